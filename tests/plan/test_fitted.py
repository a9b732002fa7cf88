"""Fitted noise: numbers in the scenario, once for each setting, never again on resuming, none in a guard."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpriv
from fedpriv.claims.entries import read_ledger
from fedpriv.claims.ledger import make_release_streams
from fedpriv.claims.outcome import RunObserver
from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.fitting.auto import fit_named
from fedpriv.noise.fitting.cost import make_noise_cost
from fedpriv.papers.base import NoiseSettings
from fedpriv.plan import calibration as module
from fedpriv.plan.calibration import FittedNoise, fit_cell_noise, fit_scenario_noise, response_and_workload
from fedpriv.plan.plan import make_plan, make_problem, make_uncalibrated_parts
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import Scenario, parse_scenario, resolve_cell
from fedpriv.silo.guard import Guard
from tests.conftest import small_tree
from tests.silo.guarded import ZERO, guard_of, write_silo

FTRL: dict[str, Any] = {"name": "dp-ftrl", "trust": "untrusted", "clip": 20.0, "step": 0.01, "mechanism": "auto"}


def tree(**sweep: Any) -> dict[str, Any]:
    asked = small_tree(algorithm=dict(FTRL), privacy={"relation": "replace-one", "mu": 2.0})
    return asked | ({"sweep": sweep} if sweep else {})


class Heard(RunObserver):
    def __init__(self) -> None:
        self.fits: list[FittedNoise] = []

    def fitted(self, fit: FittedNoise) -> None:
        self.fits.append(fit)


OUTPUTS = ("last", "next")


def scenario(**sweep: Any) -> Scenario:
    return parse_scenario(tree(**sweep), "test")


def test_fitting_replaces_an_automatic_noise_mechanism_by_its_parameters() -> None:
    cell = fit_cell_noise(resolve_cell(tree(), "test"))
    numbers = cell.canonical_data()["algorithm"]
    assert numbers["mechanism"] == "blt"
    assert numbers["theta"][0] > numbers["phi"][0] > 0.0
    assert numbers["scale"] is True
    assert fit_cell_noise(cell) is cell
    assert fit_cell_noise(resolve_cell(json.loads(json.dumps(cell.canonical_data())), "test")) == cell


@pytest.mark.slow
def test_noise_is_fitted_once_per_momentum_and_shared_by_steps_clips_targets_and_seeds() -> None:
    """Steps, clips, targets and seeds do not change it, momentum does."""
    sweep: Mapping[str, Any] = {
        "algorithm.step": [0.1, 0.2],
        "algorithm.clip": [1.0, 2.0],
        "privacy.mu": [1.0, 2.0],
        "algorithm.momentum": [0.0, 0.9],
        "seeds": 2,
    }
    heard: list[FittedNoise] = []
    found, fits = fit_scenario_noise(scenario(**sweep), {}, heard.append)
    assert len(found.points) == 32
    assert len(heard) == len(fits) == 2
    thetas = {json.dumps(point.cell.canonical_data()["algorithm"]["theta"]) for point in found.points}
    assert len(thetas) == 2
    again, _ = fit_scenario_noise(scenario(**sweep), fits, heard.append)
    assert [point.cell for point in again.points] == [point.cell for point in found.points]
    assert len(heard) == 2


@pytest.mark.every(4)
@pytest.mark.parametrize(("mechanism", "epochs"), [("auto", 1), ("auto", 2), ("scheduled", 1), ("lambda-cgd", 1)])
def test_noise_for_clips_that_grow_is_fitted_to_clips_that_grow(mechanism: str, epochs: int) -> None:
    """With 2LD = 2G.  Fitted to equal clips, "auto" had 1.6 times the noise of its best in 8 rounds of one pass.

    The noise was enough: it was, and is, calibrated to the run's own clips.
    """
    keys = {"algorithm__clip": "growing", "algorithm__mechanism": mechanism, "federation__epochs": epochs}
    cell = resolve_cell(small_tree(**keys), "test")
    fitted, objective, settings = fit_cell_noise(cell), load_task(cell).objective, cell.algorithm.settings
    _, fitted_mechanism, workload = make_uncalibrated_parts(fitted, make_problem(fitted, objective))
    assert workload.clips[-1] > 2.0 * workload.clips[0]
    assert isinstance(settings, NoiseSettings)
    response, _ = response_and_workload(cell.algorithm.row, settings, cell.schedule)
    cost = make_noise_cost(response, workload)
    best = fit_named(cost, mechanism, settings).mechanism
    assert cost.evaluate(fitted_mechanism) <= 1.02**2 * cost.evaluate(best)
    plan = make_plan(fitted, objective)
    (claimed,) = {stream.mu for stream in make_release_streams(plan, plan.schedule.rounds)}
    assert claimed == pytest.approx(4.0, rel=1e-9)


@pytest.mark.parametrize("mechanism", ["auto", "scheduled", "blt", "lambda-cgd"])
def test_noise_of_a_single_round_is_fitted_where_the_output_depends_on_no_release(mechanism: str) -> None:
    """DP-μ²-FL publishes x_T, which is x_1 after one round: the fit is then to the release itself."""
    keys = {"algorithm__mechanism": mechanism, "federation__rounds": 1}
    cells = [
        fit_cell_noise(resolve_cell(small_tree(**keys, algorithm__output=output), "test")) for output in OUTPUTS
    ]
    mechanisms = [make_plan(cell, load_task(cell).objective).mechanism for cell in cells]
    assert mechanisms[0] == mechanisms[1]


@pytest.mark.slow
def test_a_run_reports_its_noise_fit_and_stores_the_fitted_parameters(tmp_path: Path) -> None:
    heard = Heard()
    results = fedpriv.run(tree(), out=tmp_path / "run", observers=[heard])
    (fit,) = heard.fits
    assert fit.summary.startswith("noise fitted in ")
    written = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [FittedNoise(**each) for each in written["fits"]] == [fit]
    assert results.cells[0].scenario["algorithm"]["theta"] == fit.found["theta"]
    (entry,) = read_ledger(tmp_path / "run")
    assert entry.agrees
    assert list(entry.streams[0].mechanism.as_data()["theta"]) == fit.found["theta"]


@pytest.mark.slow
def test_a_resumed_run_does_not_fit_its_noise_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of a library may end in other last digits: those of the run's start hold."""
    folder = tmp_path / "run"
    fedpriv.run(tree(seeds=[1]), out=folder)
    written = json.loads((folder / "results.json").read_text())
    written["complete"] = False
    written["cells"] = []
    (folder / "results.json").write_text(json.dumps(written))

    def refit(asked: str, cell: object) -> FittedNoise:
        raise AssertionError("fitted again")

    monkeypatch.setattr(module, "_fit_noise", refit)
    heard = Heard()
    results = fedpriv.run(tree(seeds=[1]), out=folder, resume=True, observers=[heard])
    assert results.complete
    assert heard.fits == []


@pytest.mark.slow
def test_a_guard_never_fits_noise_and_refuses_invalid_fitted_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before anything is charged, and numbers are checked and certified."""

    def refit(asked: str, cell: object) -> FittedNoise:
        raise AssertionError("fitted in a guard")

    asked = resolve_cell(tree(), "test")
    numbers = fit_cell_noise(asked)
    monkeypatch.setattr(module, "_fit_noise", refit)
    guard = guard_of(write_silo(tmp_path, clip=20.0))
    for name in ("auto", "blt", "lambda-cgd"):
        sent = json.dumps(tree() | {"algorithm": FTRL | {"mechanism": name}})
        with pytest.raises(RunError, match="fitted before a run starts"):
            guard.answer(f"run {name}", sent, 1, ZERO)
    hostile = numbers.canonical_data()
    hostile["algorithm"]["phi"][0] = hostile["algorithm"]["theta"][0]
    with pytest.raises(RunError, match="θ_1 > φ_1"):
        guard.answer("hostile", json.dumps(hostile), 1, ZERO)
    _answers(guard, json.dumps(numbers.canonical_data()))


def _answers(guard: Guard, cell: str) -> None:
    """Every round; the state of a few buffers goes through the ledger each time."""
    releases = [guard.answer("run", cell, t, ZERO).numpy() for t in range(1, 9)]
    assert all(np.all(np.isfinite(release)) for release in releases)
    assert len({release.tobytes() for release in releases}) == 8


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["lambda-cgd", "blt"])
@pytest.mark.parametrize("late_clip", ["same", "column"])
def test_a_guard_answers_runs_with_fitted_noise_and_refuses_clips_above_its_policy(
    tmp_path: Path, name: str, late_clip: str
) -> None:
    """allow.clip bounds the largest of raised clips."""
    keys = FTRL | {"mechanism": name, "late_clip": late_clip}
    cell = json.dumps(fit_cell_noise(resolve_cell(tree() | {"algorithm": keys}, "test")).canonical_data())
    guard = guard_of(write_silo(tmp_path, clip=20.0))
    if late_clip == "column":
        with pytest.raises(RunError, match="the scenario clips at"):
            guard.answer("run", cell, 1, ZERO)
        return
    _answers(guard, cell)


def test_results_with_unreadable_noise_fits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"fits": [{"asked": "x"}]}')
    with pytest.raises(InputError, match="not a results file"):
        fedpriv.run(tree(), out=tmp_path, resume=True)


def test_a_guard_refuses_noise_mechanisms_without_an_integer_form(tmp_path: Path) -> None:
    """BISR has none: what a guard releases are integers."""
    cell = json.dumps(tree() | {"algorithm": FTRL | {"mechanism": "bisr"}})
    with pytest.raises(RunError, match="cannot be made of integers"):
        guard_of(write_silo(tmp_path, clip=20.0)).answer("run", cell, 1, ZERO)
