"""Parameters that are not trained and buffers: constants, in no query, and of no record."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.core.errors import InputError
from fedpriv.loss.frozen import FunctionalModule
from fedpriv.loss.imported import make_trained_model
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.models import find_model
from fedpriv.loss.module import ModuleObjective, draw_initial_point, unflatten_parameters
from fedpriv.loss.objective import Records
from tests.api.test_own import TREE, network, records
from tests.loss import zoo
from tests.loss.bring import LONG, OUTPUTS, SEQUENCE, WIDE, Counting, Then, backbone, first, tied, with_lora
from tests.loss.builders import F64, Patch, all_but, pick, pick_one, save_weights, sum_increments


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


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")
def test_recurrent_layers_run_and_come_back_as_they_are(tmp_path: Path) -> None:
    """A GRU ended in a RuntimeError of vmap's, and an LSTM in its warning."""
    train, test = records((4, 2))
    for kind in (nn.GRU, nn.LSTM):
        torch.manual_seed(0)
        model = Then(kind(2, 4, batch_first=True), 16, first)
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
        ({**state, "inner.weight": torch.zeros(2, 2)}, "do not fit"),
    ):
        with pytest.raises(InputError, match=line) as caught:
            objective(weights=save_weights(tmp_path, wrong))
        assert "\n" not in str(caught.value)
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
    model = Then(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 8)), 8)
    some = fedpriv.lora(model, layers=("layer",), train=("head", "layer.0.bias"))
    trained = [name for name, values in some.named_parameters() if values.requires_grad]
    assert trained == [
        "layer.0.bias", "layer.0.lora_a", "layer.0.lora_b", "layer.2.lora_a", "layer.2.lora_b", "head.weight",
        "head.bias",
    ]  # fmt: skip
    assert len(list(fedpriv.lora(nn.Linear(3, 3)).parameters())) == 4


def test_no_fast_path_of_torchs_leaves_it_out() -> None:
    """An encoder's takes the weight of a layer: what was trained would be in no output, and without a gradient."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDE, 2, 8, dropout=0.0, batch_first=True), 2)
    model = with_lora(Then(encoder, LONG * WIDE)).eval()
    values = torch.randn(3, *SEQUENCE)
    with torch.no_grad():
        fast = model(values)
    assert torch.allclose(fast, model.train()(values), atol=1e-6)
    assert torch.allclose(fast, fedpriv.merged(model)(values), atol=1e-5)
    objective = make_module_objective(model, 0, CrossEntropy(), 0, torch.float32)
    assert np.isfinite(objective.initial().numpy()).all()
    assert fast.shape == (3, OUTPUTS)
