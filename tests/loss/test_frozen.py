"""Parameters that are not trained and buffers: constants, in no query, and of no record."""

import copy
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.core.errors import InputError
from fedpriv.loss.frozen import FunctionalModule
from fedpriv.loss.imported import check_outputs, make_trained_model
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.models import find_model
from fedpriv.loss.module import ModuleObjective
from fedpriv.loss.objective import Batch, Query, Records
from tests.api.test_own import TREE, records
from tests.loss import zoo
from tests.loss.bring import OUTPUTS, WIDE, Counting, Then, Tied, backbone, first

ZOO = "tests.loss.zoo"
F64 = torch.float64


def some(count: int = 4) -> Records:
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((count, WIDE)))
    return Records(values, torch.arange(count) % OUTPUTS)


def test_what_is_frozen_is_in_no_point_and_comes_back_as_it_was(tmp_path: Path) -> None:
    """A frozen parameter in the vector would be released, moved by noise, and counted in every norm."""
    train, test = records()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 2))
    model = fedpriv.freeze(network, except_=("2",))
    assert network[0].weight.requires_grad
    (cell,) = fedpriv.run(TREE, train=train, test=test, model=model, out=tmp_path / "run")
    assert cell.model().shape == (12 * 2 + 2,)
    module, state = cell.to_module(), cell.state_dict()
    assert isinstance(module, nn.Sequential)
    assert torch.equal(state["0.weight"], network[0].weight)
    assert not torch.equal(state["2.weight"], network[2].weight)
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
    assert [name for name, each in frozen.named_parameters() if each.requires_grad] == [
        "0.bias",
        "3.weight",
        "3.bias",
    ]
    assert not frozen[1].training  # type: ignore[index]
    assert fedpriv.freeze(backbone(), except_=("1",))[1].training  # type: ignore[index]
    tied = fedpriv.freeze(Tied(), except_=("head",))
    assert tied.get_parameter("words.weight").requires_grad
    with pytest.raises(InputError, match=r"except_ = 'heads' names no parameters .* it has 0, 1, 3"):
        fedpriv.freeze(backbone(), except_=("heads",))
    with pytest.raises(InputError, match="no parameters to train; requires_grad = False for all it has"):
        check_outputs(fedpriv.freeze(nn.Linear(6, 3)), 6, 3, "module-test")


def test_a_buffer_that_a_record_changes_reaches_no_other_record() -> None:
    """Here the probe, which refuses such a module, is left out: a sum must not tell who came before.

    The first record is huge: what it left in the buffer would scale the gradients of all that follow.
    """
    module = Counting().to(F64)
    objective = ModuleObjective(module, CrossEntropy(), 0, F64)
    point, own = objective.initial(), some()
    loud = Records(own.features.clone(), own.labels)
    loud.features[0] *= 1e6
    only_others = torch.tensor([0.0, 1, 1, 1], dtype=F64)
    for rows in (slice(None), slice(0, 1), slice(1, 2)):  # together, and one after another
        sums = []
        for batch in (own, loud):
            ModuleObjective.increment(
                objective,
                Query((point,)),
                Batch(Records(batch.features[:1], batch.labels[:1]), torch.ones(1)),
                1.0,
            )
            part = Records(batch.features[rows], batch.labels[rows])
            sums.append(
                [
                    objective.increment(Query((point,)), Batch(part, only_others[rows]), 1e9).total,
                    objective.outputs(point, Records(own.features[1:2], own.labels[1:2])),
                ]
            )
        assert torch.equal(sums[0][0], sums[1][0])
        assert torch.equal(sums[0][1], sums[1][1])
    assert float(module.seen) == 0.0


def test_a_layer_at_two_places_holds_no_tensors_of_a_call_afterwards() -> None:
    """Buffers of one record's call would be where the next record's call begins."""
    layer = nn.BatchNorm1d(WIDE)
    module = nn.Sequential(layer, nn.Linear(WIDE, WIDE), layer).to(F64)

    def tensors() -> dict[str, torch.Tensor]:
        named = (module.named_parameters, module.named_buffers)
        return {name: each for names in named for name, each in names(remove_duplicate=False)}

    own, values = tensors(), {name: each.clone() for name, each in tensors().items()}
    FunctionalModule(module)({name: each + 1.0 for name, each in module.named_parameters()}, some().features)
    assert "2.running_mean" in own
    for name, each in tensors().items():
        assert each is own[name]
        assert torch.equal(each, values[name])


def test_a_tied_weight_is_counted_once_in_the_norm() -> None:
    """Its gradient is the sum of both uses: two halves, each with its own norm, would pass the clip together."""
    module = Tied().to(F64)
    objective = make_module_objective(module, 5, CrossEntropy(), 0, F64)
    assert objective.dimension == OUTPUTS * 4
    words = Records(
        torch.from_numpy(np.random.default_rng(0).integers(0, 3, (1, 5)).astype(float)), torch.zeros(1).long()
    )
    one = torch.ones(1, dtype=F64)
    free = objective.increment(Query((objective.initial(),)), Batch(words, one), 1e9).total
    clip = float(free.norm()) / 3.0
    found = objective.increment(Query((objective.initial(),)), Batch(words, one), clip)
    assert float(found.total.norm()) == pytest.approx(clip, rel=1e-5)
    assert torch.allclose(found.total, free / 3.0, rtol=1e-5)
    assert int(found.clipped_count) == 1
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
        given = module(torch.from_numpy(test[0])).argmax(-1).numpy()
        assert np.array_equal(cell.predict(test[0]), given)
        assert cell.test_accuracy == pytest.approx(float((given == test[1]).mean()))


def written(folder: Path, state: dict[str, Any]) -> str:
    torch.save(state, folder / "w.pt")
    digest = hashlib.sha256((folder / "w.pt").read_bytes()).hexdigest()
    (folder / "w.pt").rename(folder / f"{digest}.pt")
    return f"sha256:{digest}"


def test_what_is_frozen_in_a_scenario_is_named_by_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its digest a silo and its server could each have another network, and no claim would say which."""
    monkeypatch.setenv("FEDPRIV_WEIGHTS", str(tmp_path))
    row = find_model(f"{ZOO}:half_frozen")

    def objective(**settings: Any) -> Any:
        return row.objective((6,), 3, torch.float64, row.settings.model_validate(settings))

    with pytest.raises(InputError, match=r"inner\.weight is not trained; name its values by model\.weights"):
        objective()
    state = zoo.half_frozen(6, 3).state_dict()
    digest = written(tmp_path, state)
    made = objective(weights=digest)
    assert made.dimension == 8 * 3 + 3 + 6 * 3
    held = make_trained_model(made, made.initial().numpy()).module
    assert all(torch.allclose(held.state_dict()[name].float(), values) for name, values in state.items())
    base = written(tmp_path, {name: values for name, values in state.items() if not name.startswith("outer")})
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
            objective(weights=written(tmp_path, wrong))
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="No such file"):
        objective(weights="sha256:" + "1" * 64)
    (tmp_path / f"{'2' * 64}.pt").write_bytes(b"other")
    with pytest.raises(InputError, match="has another SHA-256"):
        objective(weights="sha256:" + "2" * 64)
    with pytest.raises(ValueError, match="weights"):
        row.settings.model_validate({"weights": "../../secret"})
