"""Adam, its weight decay, step schedules and fading averages, against transcriptions in numpy."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import stack
from fedpriv.loss.estimators import Round
from fedpriv.noise.trust import TRUSTS
from fedpriv.papers.adam import CorrectedAdam
from fedpriv.papers.base import FadingAverage, ReleaseNumbers, ScheduledSettings, ScheduledSteps
from fedpriv.plan.plan import make_plan, make_problem
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from tests.attacks.guards import guard_for, random_records, scenario, zeros
from tests.conftest import small_tree
from tests.engines.test_engines import run
from tests.papers.builders import draw_normals, drive
from tests.parts import in_turn
from tests.silo.charged import charged

Floats = NDArray[np.float64]
B1, B2 = 0.8, 0.95
RUNS = in_turn([name for name in TRUSTS if name != "curator"], ["integers", "floats"])


def cell_of(trust: str = "trusted", arithmetic: str = "floats", epsilon: float = 5.0, **algorithm: Any) -> Cell:
    tree = small_tree(run__arithmetic=arithmetic) if arithmetic != "floats" else small_tree()
    tree["federation"] = {"silos": 3, "rounds": 40, "batch": 2}
    tree["algorithm"] = {"trust": trust, "clip": 1.0, "step": 0.05, **algorithm}
    tree["privacy"] = {"relation": "zero-out", "epsilon": epsilon}
    return resolve_cell(tree, "test")


def adam(released: Floats, steps: Floats, phi: float, floor: float, decay: float) -> Floats:
    """Algorithm 1 of Tang et al., line by line; the points x_1 … x_{T+1}."""
    m, v, x = np.zeros(released.shape[1]), np.zeros(released.shape[1]), np.zeros(released.shape[1])
    points = [x]
    for t, (g, eta) in enumerate(zip(released, steps, strict=True), start=1):
        m = B1 * m + (1 - B1) * g
        v = B2 * v + (1 - B2) * g * g
        m_hat, v_hat = m / (1 - B1**t), v / (1 - B2**t)
        x = x - eta * m_hat / np.sqrt(np.maximum(v_hat - phi, floor * floor)) - eta * decay * x
        points.append(x)
    return np.array(points)


def faded(points: Floats, beta: float) -> Floats:
    """The mean of x_2, x_3, … with weights β^age, summed term by term."""
    weights = beta ** np.arange(len(points) - 1)[::-1]
    return np.asarray((weights[:, None] * points[1:]).sum(0) / weights.sum())


def heard(cell: Cell, engine: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Floats, Floats]:
    """What a run of dp-adam releases, round by round, and its model."""
    released = []
    plain = CorrectedAdam.update

    def update(self: CorrectedAdam, state: Any, vector: torch.Tensor, current: Round) -> Any:
        released.append(vector.reshape(-1).numpy().copy())
        return plain(self, state, vector, current)

    monkeypatch.setattr(CorrectedAdam, "update", update)
    (outcome,), _ = run(engine, cell)
    return np.array(released, np.float64), np.asarray(outcome.cell_outcome.model)


@pytest.mark.parametrize(("trust", "arithmetic"), RUNS)
def test_dp_adamw_runs_match_a_transcription_with_the_noise_of_their_plan(
    trust: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule, decay and average on top; on integers, too."""
    cell = cell_of(
        trust, arithmetic, name="dp-adamw", first_decay=B1, second_decay=B2, floor=0.02, weight_decay=0.3,
        step_schedule="cosine", warm_up=0.25, fading_average=0.7,
    )  # fmt: skip
    released, model = heard(cell, "inprocess", monkeypatch)
    t = np.arange(1, 41)
    steps = 0.05 * np.minimum(1, t / 10) * 0.5 * (1 + np.cos(np.pi * np.maximum(0, t - 11) / 30))
    std = make_plan(cell, load_task(cell).objective).noise.std_in_mean
    points = adam(released, steps, std**2, 0.02, 0.3)
    np.testing.assert_allclose(model, faded(points, 0.7), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("trust", "arithmetic"), RUNS)
def test_the_variance_that_dp_adam_subtracts_is_that_of_the_releases(
    trust: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise drowns the gradients here: the mean square of releases is φ, and of unequal silos, too."""
    cell = cell_of(trust, arithmetic, epsilon=0.01, name="dp-adam")
    tree = cell.canonical_data() | {"federation": {"silos": 3, "rounds": 40, "batches": [1, 2, 5]}}
    for unequal in (cell, resolve_cell(tree, "test")):
        released, _ = heard(unequal, "inprocess", monkeypatch)
        optimizer: Any = make_plan(unequal, load_task(unequal).objective).optimizer
        assert np.mean(released**2) == pytest.approx(optimizer.noise_std**2, rel=0.1)
        assert optimizer.noise_std == optimizer.floor
    biased = cell_of(trust, arithmetic, name="dp-adam", bias="kept")
    kept: Any = make_plan(biased, load_task(biased).objective).optimizer
    assert kept.noise_std == 0.0 < kept.floor


@pytest.mark.slow  # torch.optim takes seconds to import
def test_corrected_adam_without_noise_is_adamw_of_torch() -> None:
    released = draw_normals(1, 30, 4)
    ours, point = CorrectedAdam(0.1, 0.9, 0.99, 0.0, 1e-40, 0.2), torch.ones(4, dtype=torch.float64)
    theirs = torch.nn.Parameter(point.clone())
    torchs = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.2)
    for vector in released:
        theirs.grad = vector.clone()
        torchs.step()
    torch.testing.assert_close(
        ours.output(drive(ours, point, released)[-1]), theirs.detach(), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("hostile", [0.0, 1e38, 1e-310, -1e-310])
def test_releases_of_any_size_keep_corrected_adam_finite(hostile: float) -> None:
    """The root is never below γ, whatever was released before."""
    for dtype in (torch.float32, torch.float64):
        server = CorrectedAdam(0.1, 0.9, 0.999, 1e-3, 1e-3, 0.01)
        *_, state = drive(server, torch.zeros(3, dtype=dtype), torch.full((3, 3), hostile, dtype=dtype))
        assert state.iterate.isfinite().all()


def settings(**keys: Any) -> ScheduledSettings:
    return ScheduledSettings.model_validate(keys)


def test_step_schedules_match_a_calculation_by_hand() -> None:
    assert settings().step_factors(3) == (1.0, 1.0, 1.0)
    assert settings(warm_up=0.5).step_factors(4) == (0.5, 1.0, 1.0, 1.0)
    cosine = settings(step_schedule="cosine").step_factors(4)
    assert cosine == pytest.approx([1.0, 0.5 + 0.25 * math.sqrt(2), 0.5, 0.5 - 0.25 * math.sqrt(2)])
    drops = settings(step_schedule="drops", step_drops=[0.5, 0.75], step_drop=0.5).step_factors(4)
    assert drops == (1.0, 1.0, 0.5, 0.25)
    assert settings(step_schedule="drops", step_drops=[0.5]).step_factors(2) == (1.0, 0.1)
    assert all(min(settings(step_schedule="cosine", warm_up=0.9).step_factors(n)) > 0.0 for n in range(1, 30))


def test_stacked_replicates_of_optimizers_move_as_single_runs() -> None:
    """Steps, noise, floors and averages of one's own, in one stacked optimizer."""
    factors, released = settings(step_schedule="cosine").step_factors(8), draw_normals(2, 8, 2, 3)
    alone = [
        FadingAverage(ScheduledSteps(CorrectedAdam(0.1 * k, 0.9, 0.99, 0.2 * k, 0.1 * k, 0.0), factors), 0.5 / k)
        for k in (1, 2)
    ]
    stacked = stack(alone, torch.float64, torch.device("cpu"))
    together = stacked.output(drive(stacked, torch.zeros(2, 3).double(), released)[-1])
    for place, optimizer in enumerate(alone):
        one = optimizer.output(drive(optimizer, torch.zeros(3).double(), released[:, place])[-1])
        torch.testing.assert_close(together[place], one, rtol=1e-12, atol=1e-15)


def test_dp_sgd_with_a_step_schedule_has_no_excess_risk_bound() -> None:
    """The bound on the average of DP-SGD is for one step length: with a schedule there is none."""
    told = ReleaseNumbers(6, 3, np.ones(40), np.ones(40))
    for keys, proved in (({}, True), ({"step_schedule": "cosine"}, False), ({"warm_up": 0.1}, False)):
        cell = cell_of(name="dp-sgd", output="average", radius=1.0, **keys)
        row, problem = cell.algorithm.row, make_problem(cell, load_task(cell).objective)
        assert (row.excess_risk(cell.algorithm.settings, problem, told) is not None) == proved


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"name": "dp-adam", "mechanism": "banded"}, "only noise that is fresh in every round has one"),
        ({"name": "dp-adam", "floor": 0.0}, r"algorithm\.floor = 0\.0: "),
        ({"name": "dp-adam", "weight_decay": 0.1}, "weight_decay"),
        ({"name": "dp-sgd", "step_schedule": "drops"}, "go together"),
        ({"name": "dp-sgd", "step_drops": [0.5]}, "go together"),
        ({"name": "dp-sgd", "step_drop": 0.5}, "step_drop needs step_schedule"),
        ({"name": "dp-sgd", "warm_up": 1.0}, r"algorithm\.warm_up = 1\.0: "),
        ({"name": "dp-sgd", "output": "average", "fading_average": 0.9}, "two models to publish"),
        ({"name": "dp-ftrl", "step_schedule": "cosine"}, "step_schedule"),
    ],
)
def test_invalid_optimizer_settings_are_refused_in_one_line(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason) as error:
        cell_of(**keys)
    assert len(str(error.value).splitlines()) == 1


def test_schedule_keys_that_are_left_out_are_absent_from_canonical_data() -> None:
    """What a scenario without them asks a guard, and what its results are known by, is what it was."""
    kept = cell_of(name="dp-sgd").canonical_data()["algorithm"]
    assert not kept.keys() & ScheduledSettings.model_fields.keys()


def test_a_guard_charges_adam_and_step_schedules_like_dp_sgd(tmp_path: Path) -> None:
    """Guarantee: what a server does with releases is post-processing, so that the clip and the noise decide."""
    tuned = {"step_schedule": "drops", "step_drops": [0.5], "warm_up": 0.2, "fading_average": 0.9}
    answers, budgets = [], []
    for name, keys in (("dp-sgd", {}), ("dp-sgd", tuned), ("dp-adam", tuned), ("dp-adamw", {})):
        folder = tmp_path / str(len(answers))
        folder.mkdir()
        guard = guard_for(folder, *random_records())
        asked = scenario(algorithm={"name": name, "clip": 1.0, "step": 0.1, **keys})
        answers.append(guard.answer("run", asked, 1, zeros()))
        budgets.append(charged(guard._ledger))
    assert all(found == budgets[0] for found in budgets)
    assert all(float(found.std()) == pytest.approx(float(answers[0].std()), rel=0.1) for found in answers)
