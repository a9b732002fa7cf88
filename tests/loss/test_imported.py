"""Any torch module by import path: one record decides its increment; a guard runs what its policy names."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.core.errors import InputError, RunError
from fedpriv.loss.imported import build_module, check_per_record, replace_batch_norm
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.models import find_model
from fedpriv.loss.module import ModuleObjective
from fedpriv.loss.objective import Records
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.demo import format_policy
from fedpriv.silo.guard import Guard, open_guard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import read_policy
from tests.conftest import small_tree
from tests.engines.test_engines import run
from tests.loss import zoo
from tests.loss.builders import F64, Patch, all_but, make_imported, pick, save_weights, sum_increments
from tests.silo.guarded import cell_json as silo_cell_json
from tests.silo.guarded import guard_of, write_silo

ZOO = "tests.loss.zoo"
SGD = {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1}
MakeFeatures, MakeGuard = Callable[..., torch.Tensor], Callable[..., Guard]
PRIVACY = {"relation": "replace-one", "mu": 1.0}
DRAW = np.random.default_rng(5)
LOOKING = ModuleObjective(zoo.Looking(1, 3), CrossEntropy(), 0, F64)


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


def test_group_norm_stands_in_for_batch_norm() -> None:
    shape = {"shape": [1, 4, 4], "features": 16}
    with pytest.raises(InputError, match="mixes the records of a batch; GroupNorm or LayerNorm does not"):
        make_imported(f"{ZOO}:normalized", **shape)
    objective = make_imported(f"{ZOO}:normalized", group_norm=True, **shape)
    assert objective.dimension == parameter_count(zoo.normalized(16, 3))
    assert isinstance(replace_batch_norm(nn.BatchNorm2d(48)), nn.GroupNorm)


@pytest.mark.parametrize("name", ["Wide", "Centred"])
def test_a_record_alone_decides_its_increment(name: str) -> None:
    """The guarantee of ModuleObjective, which rests on no probe: here modules that the probe refuses are run."""
    objective = ModuleObjective(getattr(zoo, name)(6, 3), CrossEntropy(), 0, F64)
    values = torch.from_numpy(np.random.default_rng(3).standard_normal((5, 6)))
    quiet, loud = (Records(features, torch.arange(5) % 3) for features in (values, values.clone()))
    loud.features[1:] = 100.0
    point, weights = objective.initial(), 1.0 - all_but(5, 0)
    before, after = (sum_increments(objective, point, records, 1.0, weights).total for records in (quiet, loud))
    torch.testing.assert_close(before, after, rtol=0.0, atol=1e-12)
    assert float(sum_increments(objective, point, quiet, 1.0).total.norm()) <= 5.0


def test_a_record_on_which_a_module_raises_is_left_out_and_no_other() -> None:
    """Whether a round is answered must not depend on a record."""
    records = Records(torch.tensor([[0.0], [1.0], [9.0], [3.0]], dtype=F64), torch.tensor([0, 1, 2, 0]))
    some = pick(records, [0, 1, 3])
    with_it, without = (sum_increments(LOOKING, LOOKING.initial(), given, 0.1) for given in (records, some))
    torch.testing.assert_close(with_it.total, without.total)
    assert int(with_it.clipped_count) == int(without.clipped_count) + 1


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


def test_a_backbones_buffers_start_anew_for_every_record(features: MakeFeatures) -> None:
    """Gains: the first record, in the features of all that follow."""
    assert features(np.ones((3, 6)), "Summing")[:, :-1].tolist() == [[1.0] * 6] * 3


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
