"""Modules of users: what is frozen, what LoRA trains, import paths, and guards that run them."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.core.errors import InputError, RunError
from fedpriv.loss.frozen import FunctionalModule, run_trial, trainable_parameters
from fedpriv.loss.ghost import GhostObjective
from fedpriv.loss.imported import (
    build_module,
    check_per_record,
    load_constants,
    make_trained_model,
    replace_batch_norm,
)
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.models import find_model
from fedpriv.loss.module import ModuleObjective, draw_initial_point, unflatten_parameters
from fedpriv.loss.objective import Records
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.demo import format_policy
from fedpriv.silo.guard import Guard, open_guard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import read_policy
from tests.api.test_own import TREE, network, records
from tests.conftest import small_tree
from tests.engines.test_engines import run
from tests.loss import zoo
from tests.loss.bring import LONG, OUTPUTS, SEQUENCE, WIDE, Counting, backbone, classify, first, tied, with_lora
from tests.loss.builders import (
    F64,
    Net,
    Patch,
    all_but,
    make_imported,
    pick,
    pick_one,
    save_weights,
    sum_increments,
)
from tests.silo.guarded import cell_json as silo_cell_json
from tests.silo.guarded import guard_of, write_silo


def four() -> Records:
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((4, WIDE)))
    return Records(values, torch.arange(4) % OUTPUTS)


def test_what_is_frozen_is_in_no_point_and_comes_back_as_it_was(tmp_path: Path) -> None:
    """A frozen parameter in the vector would be released, moved by noise, and counted in every norm."""
    train, test = records()
    whole = network()
    model = fedpriv.freeze(whole, except_=("2",))
    assert whole[0].weight.requires_grad
    (cell,) = fedpriv.run(TREE, train=train, test=test, model=model, out=tmp_path / "run")
    assert cell.model().shape == (12 * 2 + 2,)
    module, state = cell.to_module(), cell.state_dict()
    assert isinstance(module, nn.Sequential)
    assert torch.equal(state["0.weight"], whole[0].weight)
    assert not torch.equal(state["2.weight"], whole[2].weight)
    assert not module[0].weight.requires_grad
    assert np.array_equal(torch.cat([state["2.weight"].flatten(), state["2.bias"]]).numpy(), cell.model())
    outputs = module(torch.from_numpy(test[0]))
    assert np.array_equal(cell.predict(test[0]), outputs.argmax(-1).numpy())
    other = copy.deepcopy(model)
    other.get_parameter("0.bias").data += 1.0
    with pytest.raises(InputError, match="holds another run"):  # its constants are part of its name
        fedpriv.run(TREE, train=train, test=test, model=other, out=tmp_path / "run", resume=True)


def test_freeze_keeps_what_it_is_told_and_names_what_is_not_there() -> None:
    frozen = fedpriv.freeze(backbone(), except_=("0.bias", "3"))
    trained = [name for name, values in frozen.named_parameters() if values.requires_grad]
    assert trained == ["0.bias", "3.weight", "3.bias"]
    assert not frozen[1].training  # type: ignore[index]
    assert fedpriv.freeze(backbone(), except_=("1",))[1].training  # type: ignore[index]
    assert fedpriv.freeze(tied(), except_=("head",)).get_parameter("words.weight").requires_grad


def test_a_buffer_that_a_record_changes_reaches_no_other_record() -> None:
    """Without the probe, which refuses it; the first record is huge, and would scale all that follow."""
    module = Counting().to(F64)
    objective = ModuleObjective(module, CrossEntropy(), 0, F64)
    point, quiet = objective.initial(), four()
    loud = Records(quiet.features.clone(), quiet.labels)
    loud.features[0] *= 1e6
    for rows in (slice(None), slice(0, 1), slice(1, 2)):  # together, and one after another
        results = []
        for some in (quiet, loud):
            sum_increments(objective, point, pick_one(some, 0), 1.0, torch.ones(1))
            others = sum_increments(objective, point, pick(some, rows), weights=all_but(4, 0)[rows]).total
            results.append((others, objective.outputs(point, pick_one(quiet, 1))))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
    assert float(module.seen) == 0.0


def test_a_layer_at_two_places_holds_no_tensors_of_a_call_afterwards() -> None:
    """Buffers of one record's call would be where the next record's call begins."""
    layer = nn.BatchNorm1d(WIDE)
    module = nn.Sequential(layer, nn.Linear(WIDE, WIDE), layer).to(F64)

    def tensors() -> dict[str, torch.Tensor]:
        named = (module.named_parameters, module.named_buffers)
        return {name: values for names in named for name, values in names(remove_duplicate=False)}

    before, copies = tensors(), {name: values.clone() for name, values in tensors().items()}
    FunctionalModule(module)({name: values + 1.0 for name, values in module.named_parameters()}, four().features)
    assert "2.running_mean" in before
    for name, values in tensors().items():
        assert values is before[name]
        assert torch.equal(values, copies[name])


def test_a_tied_weight_is_counted_once_in_the_norm() -> None:
    """Its gradient is the sum of both uses: two halves, each with its own norm, would pass the clip together."""
    objective = make_module_objective(tied().to(F64), 5, CrossEntropy(), 0, F64)
    assert objective.dimension == OUTPUTS * 4
    words = torch.from_numpy(np.random.default_rng(0).integers(0, 3, (1, 5)).astype(float))
    point, record = objective.initial(), Records(words, torch.zeros(1).long())
    free = sum_increments(objective, point, record).total
    clip = float(free.norm()) / 3.0
    clipped = sum_increments(objective, point, record, clip)
    assert float(clipped.total.norm()) == pytest.approx(clip, rel=1e-5)
    assert torch.allclose(clipped.total, free / 3.0, rtol=1e-5)
    assert int(clipped.clipped_count) == 1
    back = make_trained_model(objective, objective.initial().numpy()).module
    assert back.get_parameter("words.weight") is back.get_parameter("head.weight")


@pytest.mark.parametrize(
    "alter",
    [
        lambda net: net[0].register_forward_hook(lambda layer, inputs, output: 2.0 * output),
        lambda net: net.register_forward_pre_hook(lambda layer, inputs: (inputs[0] + 1.0,)),
        lambda net: setattr(net[1], "forward", torch.cos),
    ],
    ids=["hook", "hook before", "forward of an instance"],
)
def test_what_was_hung_on_a_plain_network_is_trained_with_it(alter: Callable[[nn.Sequential], object]) -> None:
    """The closed forms of a plain network's layers would leave it out."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(F64)
    alter(net)
    objective = make_module_objective(net, 3, CrossEntropy(), 0, F64)
    point, rows = objective.initial(), Records(torch.eye(3, dtype=F64), torch.tensor([0, 1, 0]))
    expected = torch.func.functional_call(net, unflatten_parameters(net, point), (rows.features,))
    assert torch.allclose(objective.outputs(point, rows), expected)
    general = ModuleObjective(net, CrossEntropy(), 0, F64)
    totals = [sum_increments(each, point, rows, 0.5).total for each in (objective, general)]
    assert torch.allclose(*totals)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(Of the|The model|By its)")  # findings on what was learnt and read
@pytest.mark.filterwarnings("error::UserWarning")
def test_recurrent_layers_run_and_come_back_as_they_are(tmp_path: Path) -> None:
    """A GRU ended in a RuntimeError of vmap's, and an LSTM in its warning."""
    train, test = records((4, 2))
    for kind in (nn.GRU, nn.LSTM):
        torch.manual_seed(0)
        model = classify(kind(2, 4, batch_first=True), 16, first)
        model.head = nn.Linear(16, 2)
        (cell,) = fedpriv.run(TREE, train=train, test=test, model=model, out=tmp_path / kind.__name__)
        module = cell.to_module()
        assert type(module.layer) is kind
        classes = module(torch.from_numpy(test[0])).argmax(-1).numpy()
        assert np.array_equal(cell.predict(test[0]), classes)
        assert cell.test_accuracy == pytest.approx(float((classes == test[1]).mean()))


def test_what_is_frozen_in_a_scenario_is_named_by_digest(tmp_path: Path, monkeypatch: Patch) -> None:
    """Without its digest a silo and its server could each have another network, and no claim would say which."""
    monkeypatch.setenv("FEDPRIV_WEIGHTS", str(tmp_path))
    row = find_model("tests.loss.zoo:half_frozen")

    def objective(**settings: Any) -> Any:
        return row.objective((6,), 3, torch.float64, row.settings.model_validate(settings))

    with pytest.raises(InputError, match=r"inner\.weight is not trained; name its values by model\.weights"):
        objective()
    state = zoo.half_frozen(6, 3).state_dict()
    made = objective(weights=save_weights(tmp_path, state))
    assert made.dimension == 8 * 3 + 3 + 6 * 3
    held = make_trained_model(made, made.initial().numpy()).module
    assert all(torch.allclose(held.state_dict()[name].float(), values) for name, values in state.items())
    base = save_weights(tmp_path, {name: values for name, values in state.items() if not name.startswith("outer")})
    begun = [
        make_trained_model(one, one.initial().numpy()).module.state_dict()
        for one in (objective(weights=base), objective(weights=base, initial_seed=1))
    ]
    assert torch.equal(begun[0]["skip.weight"], begun[1]["skip.weight"])
    assert not torch.equal(begun[0]["outer.weight"], begun[1]["outer.weight"])
    for wrong, line in (
        ({"inner.weight": state["inner.weight"]}, r"holds no inner\.bias, which is not trained"),
        ({**state, "more": torch.zeros(1)}, "do not fit"),
        ({**state, "inner.weight": torch.zeros(2, 2)}, r"do not fit .*size mismatch for inner\.weight"),
    ):
        with pytest.raises(InputError, match=line) as caught:
            objective(weights=save_weights(tmp_path, wrong))
        assert "\n" not in str(caught.value)
    shared = tied()
    file = save_weights(tmp_path, {"head.weight": torch.full_like(shared.head.weight, 7.0)})
    assert load_constants(shared, file, "bring:tied") == frozenset(), (
        "a tied weight is in a file by any of its names"
    )
    silent = zoo.half_frozen(6, 3)  # a module may leave parameters out of its state_dict
    silent.inner._register_state_dict_hook(lambda module, state, prefix, local: state.pop(f"{prefix}weight"))
    with pytest.raises(InputError, match=r"holds no inner\.weight, which is not trained"):
        load_constants(silent, save_weights(tmp_path, silent.state_dict()), "zoo:silent")
    with pytest.raises(InputError, match="No such file"):
        objective(weights="sha256:" + "1" * 64)
    (tmp_path / f"{'2' * 64}.pt").write_bytes(b"other")
    with pytest.raises(InputError, match="has another SHA-256"):
        objective(weights="sha256:" + "2" * 64)
    with pytest.raises(ValueError, match="weights"):
        row.settings.model_validate({"weights": "../../secret"})


# LoRA


def test_it_begins_as_the_module_and_trains_two_matrices_a_layer(tmp_path: Path) -> None:
    train, test = records()
    base = network()
    model = fedpriv.lora(base, rank=2, alpha=4.0)
    shown = torch.from_numpy(test[0])
    assert torch.equal(model(shown), base(shown))
    (cell,) = fedpriv.run(TREE, train=train, test=test, model=model, out=tmp_path / "run")
    assert cell.model().shape == (2 * (8 + 12) + 2 * (12 + 2),)
    module, state = cell.to_module(), cell.state_dict()
    assert cell.test_accuracy > 0.7
    assert all(torch.equal(values, state[name]) for name, values in base.state_dict().items())
    assert bool(state["0.lora_b"].any())
    plain = fedpriv.merged(module)
    assert [type(layer) for layer in plain.modules()] == [type(layer) for layer in base.modules()]
    assert list(plain.state_dict()) == list(base.state_dict())
    assert torch.allclose(plain(shown), module(shown), atol=1e-5)
    whole = state["0.weight"] + 2.0 * state["0.lora_b"] @ state["0.lora_a"]
    assert torch.allclose(plain.state_dict()["0.weight"], whole)


def test_x1_of_a_seed_has_zeros_for_b() -> None:
    """A B that is drawn would be another network than the one that was given."""
    model = fedpriv.lora(network(), rank=2)
    parts = unflatten_parameters(model, draw_initial_point(model, 3, torch.float64))
    assert list(parts) == ["0.lora_a", "0.lora_b", "2.lora_a", "2.lora_b"]
    assert not parts["0.lora_b"].any()
    assert 0.0 < float(parts["0.lora_a"].abs().max()) <= 8**-0.5


def test_layers_are_chosen_by_name() -> None:
    model = classify(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 8)), 8)
    some = fedpriv.lora(model, layers=("layer",), train=("head", "layer.0.bias"))
    trained = [name for name, values in some.named_parameters() if values.requires_grad]
    assert trained == [
        "layer.0.bias", "layer.0.lora_a", "layer.0.lora_b", "layer.2.lora_a", "layer.2.lora_b", "head.weight",
        "head.bias",
    ]  # fmt: skip
    assert len(list(fedpriv.lora(nn.Linear(3, 3)).parameters())) == 4


def test_a_weight_that_is_trained_under_another_name_gets_no_product() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(5, 4), "scores": nn.Linear(4, 5), "hidden": nn.Linear(4, 4)})
    model["scores"].weight = model["words"].weight
    trained = list(trainable_parameters(fedpriv.lora(model, train=("words",))))
    assert trained == ["words.weight", "hidden.lora_a", "hidden.lora_b"]


def test_no_fast_path_of_torchs_leaves_it_out() -> None:
    """An encoder's takes the weight of a layer: what was trained would be in no output, and without a gradient."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDE, 2, 8, dropout=0.0, batch_first=True), 2)
    model = with_lora(classify(encoder, LONG * WIDE)).eval()
    values = torch.randn(3, *SEQUENCE)
    with torch.no_grad():
        fast = model(values)
    assert torch.allclose(fast, model.train()(values), atol=1e-6)
    assert torch.allclose(fast, fedpriv.merged(model)(values), atol=1e-5)
    objective = make_module_objective(model, 0, CrossEntropy(), 0, torch.float32)
    assert np.isfinite(objective.initial().numpy()).all()
    assert fast.shape == (3, OUTPUTS)


# By import path


ZOO = "tests.loss.zoo"
SGD = {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1}
MakeFeatures = Callable[..., torch.Tensor]
MakeGuard = Callable[..., Guard]
PRIVACY = {"relation": "replace-one", "mu": 1.0}
DRAW = np.random.default_rng(5)


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_a_module_is_built_with_the_shape_of_the_data_and_trains() -> None:
    cell = resolve_cell(
        small_tree(
            model={"name": f"{ZOO}:Wide", "arguments": {"hidden": 4}},
            algorithm={"name": "dp-sgd", "trust": "trusted", "clip": 5.0, "step": 0.5},
            privacy={"relation": "zero-out", "mode": "none"},
            federation={"silos": 3, "rounds": 20, "batch": 20},
        ),
        "test",
    )
    trained = {engine: run(engine, cell) for engine in ("vectorized", "inprocess")}
    (finished,), heard = trained["vectorized"]
    assert heard.evaluations[-1][2] < heard.evaluations[0][2]
    assert finished.cell_outcome.model.shape == (784 * 4 + 4 + 40 + 10 + 7840,)
    assert trained["inprocess"][0][0].cell_outcome.test_loss == pytest.approx(finished.cell_outcome.test_loss)


def test_a_module_of_one_record_passes_the_probe() -> None:
    for module in (zoo.Wide(6, 3), nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 3), nn.GroupNorm(1, 3))):
        check_per_record(module, 6, "test")


@pytest.mark.parametrize("key", [None, "input"])
def test_a_packed_sequence_is_refused_by_position_and_by_name(key: str | None) -> None:
    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(1, 2, batch_first=True)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            lengths = [values.shape[1]] * len(values)
            packed = nn.utils.rnn.pack_padded_sequence(values.unsqueeze(-1), lengths, batch_first=True)
            states: torch.Tensor = (self.rnn(packed) if key is None else self.rnn(**{key: packed}))[1]
            return states[-1]

    with pytest.raises(InputError, match=r"layer rnn \(GRU\) is given a packed sequence"):
        run_trial(Packing(), torch.ones(1, 3))


def test_a_trial_sees_that_infinity_in_a_buffer_becomes_a_number() -> None:
    class Lowering(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.least.fill_(torch.finfo(torch.float32).max)
            return super().forward(values)

    for least in (torch.inf, torch.nan):
        layer = Lowering(3, 2)
        layer.register_buffer("least", torch.tensor(least))
        with pytest.raises(InputError, match=r"the module itself \(Lowering\) changes least"):
            run_trial(layer, torch.ones(1, 3))


def test_group_norm_stands_in_for_batch_norm() -> None:
    shape: dict[str, Any] = {"shape": [1, 4, 4], "features": 16}
    with pytest.raises(InputError, match="mixes the records of a batch; GroupNorm or LayerNorm does not"):
        make_imported(f"{ZOO}:normalized", **shape)
    objective = make_imported(f"{ZOO}:normalized", group_norm=True, **shape)
    assert objective.dimension == parameter_count(zoo.normalized(16, 3))
    for channels, groups in ((48, 24), (64, 32), (66, 22), (37, 1), (6, 6)):
        norm = replace_batch_norm(nn.BatchNorm2d(channels, eps=0.25, affine=channels != 6))
        assert isinstance(norm, nn.GroupNorm)
        assert (norm.num_groups, norm.num_channels, norm.eps, norm.affine) == (
            groups,
            channels,
            0.25,
            channels != 6,
        )
    shared = nn.BatchNorm2d(4)
    twice = replace_batch_norm(nn.Sequential(nn.Conv2d(1, 4, 3), shared, nn.Conv2d(4, 4, 3), shared))
    assert isinstance(twice[1], nn.GroupNorm)
    assert twice[1] is twice[3]
    flat = replace_batch_norm(nn.BatchNorm1d(64))(torch.randn(2, 64, generator=torch.Generator().manual_seed(0)))
    assert float(flat.detach().abs().max()) > 1.5, "pairs of values would be 1 and -1, whatever they are"
    lazy = nn.LazyBatchNorm2d()  # which is refused with the other lazy layers
    assert replace_batch_norm(lazy) is lazy


@pytest.mark.parametrize("kind", [ModuleObjective, GhostObjective])
def test_a_record_on_which_a_module_raises_is_left_out_and_no_other(kind: type[ModuleObjective]) -> None:
    """Whether a round is answered must not depend on a record."""
    objective = kind(zoo.Looking(1, 3), CrossEntropy(), 0, F64)
    records = Records(torch.tensor([[0.0], [1.0], [9.0], [3.0]], dtype=F64), torch.tensor([0, 1, 2, 0]))
    some = pick(records, [0, 1, 3])
    with_it, without = (sum_increments(objective, objective.initial(), given, 0.1) for given in (records, some))
    torch.testing.assert_close(with_it.total, without.total)
    assert int(with_it.clipped_count) == int(without.clipped_count) + 1


@pytest.mark.parametrize("kind", [ModuleObjective, GhostObjective])
def test_a_record_whose_label_raises_is_left_out_and_no_other(kind: type[ModuleObjective]) -> None:
    """A label that is no class is raised by the loss, also at features of zeros."""
    objective = kind(nn.Linear(WIDE, OUTPUTS).double(), CrossEntropy(), 0, F64)
    records = four()
    records.labels[2] = OUTPUTS + 4
    some = pick(records, [0, 1, 3])
    with_it, without = (sum_increments(objective, objective.initial(), batch, 0.1) for batch in (records, some))
    torch.testing.assert_close(with_it.total, without.total)
    assert int(with_it.clipped_count) == int(without.clipped_count) + 1


def test_an_error_of_a_batch_that_no_record_raises_is_raised() -> None:
    """Nobody knows then which records the sum would be of, such as after a device was busy once."""
    errors = [RuntimeError("busy once")]

    def call(net: Any, values: torch.Tensor) -> torch.Tensor:
        if errors:
            raise errors.pop()
        outputs: torch.Tensor = net.layer(values)
        return outputs

    objective = ModuleObjective(Net(call, layer=nn.Linear(WIDE, OUTPUTS)).double(), CrossEntropy(), 0, F64)
    with pytest.raises(RuntimeError, match="busy once"):
        sum_increments(objective, objective.initial(), four())


def test_reading_a_scenario_imports_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "side_effect.py").write_text("open('ran', 'w')\nfrom torch.nn import Linear\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    resolve_cell(small_tree(model={"name": "side_effect:Linear"}), "test")
    assert "side_effect" not in sys.modules
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def guard_with(tmp_path: Path) -> Callable[..., Guard]:
    def guard(*models: str) -> Guard:
        draw = np.random.default_rng(3)
        np.savez(tmp_path / "own.npz", features=draw.standard_normal((30, 6)), labels=draw.integers(0, 3, 30))
        (tmp_path / "own.npz").chmod(0o600)
        keys = {"silo": 0, "classes": 3, "shard": "own.npz", "ledger": "l.sqlite", "socket": "s.sock"}
        allow = {"relation": "zero-out", "clip": 1.0, "rounds": 8, "budget": 9.0, "models": list(models)}
        (tmp_path / "policy.toml").write_text(format_policy(keys, allow))
        policy = read_policy(tmp_path / "policy.toml")
        begin_ledgers(policy)
        return open_guard(policy)

    return guard


def cell_json(**model: Any) -> str:
    tree = small_tree(
        model=model,
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.5},
        privacy={"relation": "zero-out", "epsilon": 2.0},
        federation={"silos": 3, "rounds": 4, "batch": 5},
    )
    return json.dumps(resolve_cell(tree, "test").canonical_data())


@pytest.mark.parametrize("name", ["Wide", "Gru"])
def test_a_guard_runs_a_module_that_its_policy_names(guard_with: MakeGuard, name: str) -> None:
    guard = guard_with(f"{ZOO}:{name}")
    query = torch.ones(parameter_count(getattr(zoo, name)(6, 3)), dtype=F64)
    release = guard.answer("run", cell_json(name=f"{ZOO}:{name}"), 1, query)
    assert release.shape == query.shape
    assert torch.isfinite(release).all()
    with pytest.raises(RunError, match=r"does not name it"):
        guard.answer("other", cell_json(name=f"{ZOO}:Centred"), 1, query)


def test_a_guard_trains_what_lora_adds_to_weights_of_a_digest(
    guard_with: MakeGuard, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The ledger names the weights; without a digest, or with a file of another one, nothing is answered."""
    monkeypatch.setenv("FEDPRIV_WEIGHTS", str(tmp_path))
    digest = save_weights(tmp_path, zoo.Wide(6, 3).state_dict())
    guard = guard_with(f"{ZOO}:adapted")
    size = 2 * (6 + 8) + 2 * (8 + 3) + 2 * (6 + 3)
    query = torch.ones(size).double()
    with pytest.raises(RunError, match=r"name its values by model\.weights"):
        guard.answer("run", cell_json(name=f"{ZOO}:adapted"), 1, query)
    other, ours = (cell_json(name=f"{ZOO}:adapted", weights=name) for name in ("sha256:" + "3" * 64, digest))
    (tmp_path / f"{'3' * 64}.pt").write_bytes((tmp_path / f"{digest.removeprefix('sha256:')}.pt").read_bytes())
    with pytest.raises(RunError, match="has another SHA-256"):
        guard.answer("run", other, 1, query)
    release = guard.answer("run", ours, 1, query)
    assert release.shape == (size,)
    assert torch.isfinite(release).all()
    with pytest.raises(RunError):  # the run is of these weights, and no others
        guard.answer("run", other, 2, query)


def test_a_guard_imports_nothing_that_its_policy_does_not_name(
    guard_with: MakeGuard, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "foreign.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom torch.nn import Linear\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    guard = guard_with(f"{ZOO}:Wide")
    backbone = {"backbone": "foreign:Linear", "backbone_weights": "sha256:" + "0" * 64, "feature_norm": 1.0}
    for model in ({"name": "foreign:Linear"}, {"name": "logistic-regression", **backbone}):
        with pytest.raises(RunError, match=r"runs 'foreign:Linear', and allow\.models does not name it"):
            guard.answer("run", cell_json(**model), 1, torch.zeros(21, dtype=F64))
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def features(tmp_path: Path, monkeypatch: Patch) -> Callable[..., torch.Tensor]:
    """Frozen features of values by a module of the zoo, whose weights are stored under their digest."""
    monkeypatch.setenv("FEDPRIV_WEIGHTS", str(tmp_path))
    row = find_model("softmax-regression")

    def compute(values: Any, name: str, module: nn.Module | None = None, **settings: Any) -> torch.Tensor:
        if "weights" not in settings:
            settings["weights"] = save_weights(tmp_path, (module or getattr(zoo, name)()).state_dict())
        keys = {"feature_norm": 9.0, "backbone": f"{ZOO}:{name}"}
        keys |= {f"backbone_{key}": value for key, value in settings.items()}
        return row.features(np.asarray(values), F64, row.settings.model_validate(keys))

    return compute


def test_frozen_features_are_the_modules_own(features: MakeFeatures) -> None:
    torch.manual_seed(0)
    module, values = zoo.backbone(), DRAW.standard_normal((7, 6))
    result = features(values, "backbone", module)
    torch.testing.assert_close(result[:, :-1], module.eval().double()(torch.from_numpy(values)))


@pytest.mark.parametrize("name", ["backbone", "mixing_backbone"])
def test_frozen_features_of_a_record_never_look_at_another(features: MakeFeatures, name: str) -> None:
    """Also for a backbone that subtracts the mean of its batch: the batch is one record."""
    module, values = getattr(zoo, name)(), DRAW.standard_normal((7, 6))
    changed = values.copy()
    changed[3] = 50.0
    before, after = (features(array, name, module)[[0, 1, 2, 4, 5, 6]] for array in (values, changed))
    torch.testing.assert_close(before, after, rtol=0.0, atol=0.0)


def test_a_record_on_which_a_backbone_raises_has_zeros_and_no_other(features: MakeFeatures) -> None:
    module, sizes = zoo.Looking(1, 2), {"features": 1, "outputs": 2}
    all_three, without = (
        features(values, "Looking", module, arguments=sizes) for values in ([[1.0], [9.0], [3.0]], [[1.0], [3.0]])
    )
    assert all_three[1].tolist() == [0.0, 0.0, 1.0]
    torch.testing.assert_close(all_three[[0, 2]], without)


def test_a_record_that_has_features_of_another_shape_has_zeros(features: MakeFeatures) -> None:
    """What vmap refused for all records; whether a silo answers must not depend on one."""
    assert features([[0.0], [3.0], [1.0]], "ragged").tolist() == [[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("name", ["Summing", "Replacing", "Aliasing"])
def test_a_backbones_buffers_start_anew_for_every_record(features: MakeFeatures, name: str) -> None:
    """Gains: the first record, in the features of all that follow."""
    assert features(np.ones((3, 6)), name)[:, :-1].tolist() == [[1.0] * 6] * 3


def test_a_backbone_that_cannot_be_used_is_refused(features: MakeFeatures, tmp_path: Path) -> None:
    """One that draws random numbers; weights that are not here, changed, or of another module."""
    values, missing = np.ones((7, 6)), "sha256:" + "1" * 64
    with pytest.raises(InputError, match="draws random numbers; features are a record's own"):
        features(values, "drawing")
    with pytest.raises(InputError, match="do not fit"):
        features(values, "backbone", arguments={"width": 4})
    with pytest.raises(InputError, match="No such file or directory; put the file there"):
        features(values, "backbone", weights=missing)
    (tmp_path / f"{'1' * 64}.pt").write_bytes(b"other")
    with pytest.raises(InputError, match="has another SHA-256"):
        features(values, "backbone", weights=missing)
    with pytest.raises(ValueError, match=r"backbone needs backbone_weights"):
        features(values, "backbone", weights="../../secret")


def test_building_draws_no_random_number_of_ours() -> None:
    torch.manual_seed(1)
    first = torch.rand(1)
    torch.manual_seed(1)
    build_module(f"{ZOO}:Wide", "model.name", (6, 3), {})
    assert torch.equal(torch.rand(1), first)


def opens(features: int, outputs: int, path: str) -> nn.Module:
    """A factory that reads a file, as one that takes weights does: its exceptions say what is there."""
    return nn.Linear(features, outputs, bias=bool(json.loads(Path(path).read_text())))


def test_a_factory_that_fails_tells_a_server_nothing_of_the_silos_files(tmp_path: Path) -> None:
    """Missing, folder and unparsable files were told apart by the exception's text; now by nothing."""
    guard, lines = guard_of(write_silo(tmp_path, models=[f"{__name__}:opens"])), set()
    (tmp_path / "folder").mkdir()
    (tmp_path / "secret").write_text("not JSON")
    for name in ("folder", "secret", "nothing"):
        model: dict[str, Any] = {"name": f"{__name__}:opens", "arguments": {"path": str(tmp_path / name)}}
        with pytest.raises(RunError) as refused:
            guard.query_shapes(silo_cell_json(model=model, algorithm=SGD, privacy=PRIVACY))
        lines.add(str(refused.value).replace(name, "…"))
        with pytest.raises(InputError, match=r"cannot be built from .* \([A-Z\[]"):  # a person reads why
            build_module(model["name"], "model.name", (6, 3), model["arguments"])
    assert len(lines) == 1


def test_freeze_leaves_integer_parameters_of_a_named_layer_frozen() -> None:
    """Before: torch's own RuntimeError, of a layer with weights of a few bits."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
    frozen = fedpriv.freeze(module, except_=("1",))
    assert [name for name, values in frozen.named_parameters() if values.requires_grad] == ["1.weight", "1.bias"]
