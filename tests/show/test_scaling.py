"""The smallest number of rounds that reaches a target, and the exponents fitted to it."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.risk_slope import exponents
from fedpriv.claims.ledger import ReleaseStream
from fedpriv.claims.outcome import CellOutcome
from fedpriv.core.errors import InputError
from fedpriv.papers.choquette_choo import AcceleratedSettings
from fedpriv.plan.plan import excess_risk_bound, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import Scenario, load_scenario, parse_scenario
from fedpriv.show.table import find_requirements, fit_exponent, render_tables
from fedpriv.study.results import Results, RunFolder, read_results
from tests.conftest import small_tree

SIZES, ROUNDS = [256, 1024, 4096], [1, 2, 4, 8, 16, 32, 64, 128]


def scenario(**scaling: Any) -> Scenario:
    tree = small_tree(
        federation={"silos": 1, "samples": 256, "rounds": 4},
        privacy={"relation": "zero-out", "mode": "none"},
    )
    tree["sweep"] = {
        "algorithm.trust": ["untrusted", "trusted"],
        "federation.samples": SIZES,
        "federation.rounds": ROUNDS,
        "label.setting": ["good", "bad"],
    }
    tree["scaling"] = {
        "along": "federation.samples",
        "smallest": "federation.rounds",
        "by": "algorithm.trust",
        "metric": "excess_risk",
        "factor": 1.0,
        "scale": 1.0,
        "theory": {"trusted": 0.25},
        **scaling,
    }
    return parse_scenario(tree, "test")


def risk(point: dict[str, Any]) -> float:
    """1/T² for trusted and 1/T for untrusted, ten times as much with bad settings."""
    rounds = point["federation.rounds"]
    value = rounds**-2.0 if point["algorithm.trust"] == "trusted" else rounds**-1.0
    return float(value) * (10.0 if point["label.setting"] == "bad" else 1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sweep = scenario()
    writer = RunFolder(tmp_path / "run", sweep, "vectorized", resume=False)
    releases: tuple[ReleaseStream, ...] = ()
    for place, point in enumerate(sweep.points):
        metrics = {"test_loss": 1.0, "excess_risk": risk(dict(point.swept_values))}
        writer.finished(place, CellOutcome(metrics, 0.0, 0.0, releases, 7, np.zeros(3)))
    return tmp_path / "run"


def test_smallest_rounds_of_the_best_setting_and_their_exponents(folder: Path) -> None:
    """Target 1/√n: T = n^(1/4) and n^(1/2) exactly, on a grid of powers of two."""
    results = read_results(folder)
    assert results.growth is not None
    found = find_requirements(results, results.growth)
    assert [need.rounds for need in found["trusted"].values()] == [4.0, 8.0, 8.0]
    assert [need.rounds for need in found["untrusted"].values()] == [16.0, 32.0, 64.0]
    assert [need.target for need in found["trusted"].values()] == [1 / 16, 1 / 32, 1 / 64]
    exponent = fit_exponent(found["untrusted"], "rounds")
    assert exponent is not None
    assert exponent.exponent == pytest.approx(0.5)
    assert exponent.half_width == pytest.approx(0.0, abs=1e-9)
    rough = fit_exponent(found["trusted"], "rounds")
    assert rough is not None
    assert rough.exponent == pytest.approx(math.log(2) / math.log(16))
    assert rough.half_width > 0.1


def test_the_table_has_sizes_across_and_theory_beside(folder: Path) -> None:
    text = render_tables(read_results(folder), "markdown")
    assert "n = 4096" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| untrusted")]
    assert [cell.strip() for cell in line.split("|")[2:6]] == ["16", "32", "64", "0.50 ± 0.00 (3 sizes)"]
    (line,) = [line for line in text.splitlines() if line.startswith("| trusted")]
    assert "| 0.25" in line.replace("   ", "")


def test_theory_stands_beside_its_own_setting_only() -> None:
    """A narrowed sweep keeps it; another ball, privacy or radius has other exponents, or none that are known."""
    path = Path(__file__).parents[2] / "scenarios" / "complexity-table.toml"

    def theory(*overrides: str) -> dict[str, float]:
        few = ("federation.samples=[1024]", "federation.rounds=[4]", "label.step=long", "seeds=1")
        scaling = load_scenario(path, [*few, *overrides]).growth
        assert scaling is not None
        return scaling.theory

    assert theory()["accelerated-dp-srgd"] == 0.25
    assert theory("algorithm.name=dp-sgd")["dp-sgd"] == 0.5
    assert theory("model.ball=2.0")
    assert not theory("model.ball=0.5", "algorithm.radius=0.5")
    assert not theory("model.ball=[0.5, 2.0]")
    assert not theory("privacy.mode=none")


@pytest.mark.parametrize(
    ("beta", "factor", "known"), [("M (T+1)/2", 0.5, True), ("2 M T", 2.0, True), ("1", 0.0, False)]
)
def test_the_betas_of_the_outer_minimizer_are_what_they_are_called(beta: str, factor: float, known: bool) -> None:
    """M is the model's own, and a bound of the risk is known from M (T+1)/2 on."""
    path = Path(__file__).parents[2] / "scenarios" / "complexity-outside.toml"
    few = ("federation.samples=[4096]", f'label.beta=["{beta}"]', "seeds=1")
    points = load_scenario(path, few).points
    assert len(points) == 17
    objective = load_task(points[0].cell).objective
    for cell in (point.cell for point in points):
        rounds, own = cell.schedule.rounds, cell.algorithm.settings
        assert isinstance(own, AcceleratedSettings)
        asked = factor * objective.smoothness * (rounds + 1 if beta == "M (T+1)/2" else rounds)
        assert own.beta is not None
        assert own.beta == 1.0 or asked < own.beta < 1.001 * asked
        bound = excess_risk_bound(cell, make_plan(cell, objective))
        assert bound is not None
        assert math.isfinite(bound.value) == known


def test_what_no_number_of_rounds_reaches_is_said(folder: Path) -> None:
    tight = scenario(factor=1e-3).growth
    assert tight is not None
    found = find_requirements(read_results(folder), tight)
    assert [need.rounds for need in found["untrusted"].values()] == [None] * 3
    assert fit_exponent(found["untrusted"], "rounds") is None


def test_private_runs_have_the_second_term(folder: Path) -> None:
    """√d/(ε n) is added where there is an ε: d = 3 in these results."""
    results = read_results(folder)
    assert results.growth is not None
    for cell in results.cells:
        cell["epsilon"] = 2.0  # type: ignore[index]
    need = find_requirements(results, results.growth)["trusted"][256.0]
    assert need.target == pytest.approx(1 / 16 + math.sqrt(3) / (2.0 * 256))


def test_a_key_that_is_not_swept_is_refused() -> None:
    with pytest.raises(InputError, match=r"scaling.along = 'privacy.mu': expected a swept key"):
        scenario(along="privacy.mu")


def test_cells_in_the_journal_are_not_lost(folder: Path) -> None:
    """A run that was killed between two rewrites of results.json: its journal counts, a torn line does not."""
    whole = read_results(folder)
    journal = folder / "cells.jsonl"
    assert not journal.exists()
    sweep = scenario()
    writer = RunFolder(folder.parent / "other", sweep, "vectorized", resume=False)
    for place in (0, 1):
        metrics = {"test_loss": 1.0, "excess_risk": 1.0}
        writer.finished(place, CellOutcome(metrics, 0.0, 0.0, (), 7, np.zeros(3)))
    other = folder.parent / "other"
    with (other / "cells.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"cell": 2, "po')
    assert [cell["cell"] for cell in read_results(other).cells] == [0, 1]
    resumed = RunFolder(other, sweep, "vectorized", resume=True)
    assert resumed.missing_indices[0] == 2
    assert len(whole.cells) == len(sweep.points)


@pytest.mark.slow
def test_a_run_without_a_scaling_table_does_not_import_scipys_statistics() -> None:
    """Half a second that every `fedpriv run` would wait."""
    code = "import sys, fedpriv.cli.run; sys.exit('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_exponents_from_size_to_size() -> None:
    """A risk of 1/√n, times a factor of the seed's own, has -1/2 everywhere."""
    cells = [
        {"point": {"federation.samples": size}, "excess_risk": (1.0 + seed) * size**-0.5}
        for size in SIZES
        for seed in (0, 1)
    ]
    axes = {"federation.samples": SIZES}
    found = exponents(Results("", "", "vectorized", True, axes, [0, 1], None, cells, {}, None))
    assert [size for size, _, _ in found] == SIZES
    for _, _, slopes in found[1:]:
        assert slopes == pytest.approx([-0.5, -0.5], abs=1e-12)
