"""Section [scaling]: metrics and interpolated efforts by n, their exponents, and what is not fitted."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.risk_slope import exponents
from fedpriv.addons.rates.scaling import Point, Size, Value, _estimate, find_values, scaling_chart
from fedpriv.claims.outcome import CellOutcome
from fedpriv.core.errors import InputError
from fedpriv.papers.choquette_choo import AcceleratedSettings
from fedpriv.plan.plan import excess_risk_bound, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import Scenario, load_scenario, parse_scenario
from fedpriv.scenario.published import Growth
from fedpriv.show.table import render_tables
from fedpriv.study.results import Results, RunFolder, read_results
from tests.conftest import small_tree
from tests.show.builders import results_of_records

SCENARIOS = Path(__file__).parents[2] / "scenarios"
SIZES, ROUNDS = [256, 1024, 4096], [1, 2, 4, 8, 16, 32, 64, 128]


def scenario(**scaling: Any) -> Scenario:
    tree = small_tree(
        federation={"silos": 1, "samples": 256, "rounds": 4},
        privacy={"relation": "zero-out", "mode": "none"},
    )
    tree["sweep"] = {
        "algorithm.trust": ["untrusted", "trusted"], "federation.samples": SIZES, "federation.rounds": ROUNDS,
        "label.setting": ["good", "bad"],
    }  # fmt: skip
    section = {
        "along": "federation.samples", "smallest": "federation.rounds", "by": "algorithm.trust",
        "metric": "excess_risk", "factor": 1.0, "scale": 1.0, "theory": {"trusted": 0.25}, **scaling,
    }  # fmt: skip
    tree["scaling"] = {key: value for key, value in section.items() if value is not None}
    return parse_scenario(tree, "test")


def growth_of(**scaling: Any) -> Growth:
    growth = scenario(**scaling).growth
    assert growth is not None
    return growth


def risk(point: dict[str, Any]) -> float:
    """1/T² for trusted and 1/T for untrusted, ten times as much with bad settings."""
    rounds = point["federation.rounds"]
    value = rounds**-2.0 if point["algorithm.trust"] == "trusted" else rounds**-1.0
    return float(value) * (10.0 if point["label.setting"] == "bad" else 1.0)


def write_run(folder: Path, count: int | None = None) -> Path:
    """The folder of a run with the first cells of the sweep, or with all."""
    sweep = scenario()
    writer = RunFolder(folder, sweep, "vectorized", resume=False)
    for index, point in list(enumerate(sweep.points))[:count]:
        metrics = {"test_loss": 1.0, "excess_risk": risk(dict(point.swept_values))}
        writer.finished(index, CellOutcome(metrics, 0.0, 0.0, (), 7, np.zeros(3)))
    return folder


@pytest.fixture
def results(tmp_path: Path) -> Any:
    """Results whose cells' figures a test may change."""
    return read_results(write_run(tmp_path / "run"))


def values_of(results: Results, growth: Growth) -> list[list[float | None]]:
    return [[value.value for value in line.values.values()] for line in find_values(results, growth)]


def test_interpolated_rounds_to_a_target_risk_have_the_exact_growth_exponents(results: Results) -> None:
    """Target 1/√n, risks 1/T² and 1/T: T = n^(1/4) and n^(1/2) exactly, also between powers of two."""
    assert results.growth is not None
    untrusted, trusted = find_values(results, results.growth)
    assert values_of(results, results.growth) == [
        pytest.approx([16.0, 32.0, 64.0]),
        pytest.approx([4.0, 4096**0.25 / 2**0.5, 8.0]),
    ]
    assert untrusted.fit is not None
    assert trusted.fit is not None
    assert (untrusted.fit.exponent, trusted.fit.exponent) == pytest.approx((0.5, 0.25))
    assert untrusted.fit.half_width == pytest.approx(0.0, abs=1e-9)


def test_sweep_points_without_a_result_of_the_given_seeds_are_not_interpolated() -> None:
    scaling = pytest.importorskip("fedpriv.addons.rates.scaling")
    points = [scaling.Point(10.0, {1: 0.9}, 100.0), scaling.Point(20.0, {0: 0.4, 1: 0.4}, 200.0)]
    value = scaling._interpolate(scaling.Size(100.0, 0.5, points), [0, 0])
    assert (value.value, value.gradients) == (20.0, 200.0)


def test_without_a_smallest_key_the_scaling_exponent_is_fitted_to_the_metric_itself(results: Any) -> None:
    """At 4 rounds alone the risk does not depend on n; a metric of its own n gives its own exponent."""
    plain = growth_of().model_copy(update={"smallest": None, "factor": None})
    for cell in results.cells:
        cell["excess_risk"] *= cell["point"]["federation.samples"] ** -0.5
    for over, edge in (("best", 128.0), ("worst", 1.0)):
        line = find_values(results, plain.model_copy(update={"over": over}))[1]
        factor = 1.0 if over == "best" else 10.0
        assert line.values[256.0].value == pytest.approx(factor * edge**-2.0 / 16.0)
        assert line.fit is not None
        assert line.fit.exponent == pytest.approx(-0.5)


def test_values_at_the_initial_risk_or_at_a_floor_are_left_out_of_the_scaling_fit(results: Any) -> None:
    growth = growth_of(smallest=None, factor=None, start=2e-4, floor=0.0)
    for cell in results.cells:
        cell["excess_risk"] = 1.0 / cell["point"]["federation.samples"]
    for other, fitted in (
        (growth.model_copy(update={"start": 1 / 300}), [False, True, True]),
        (growth.model_copy(update={"start": None, "floor": 1 / 2000}), [True, True, False]),
        (growth_of(factor=16.0), [False, False, False]),
    ):
        line = find_values(results, other)[0]
        assert [value.is_fitted for value in line.values.values()] == fitted
    assert line.fit is None


def test_settings_are_chosen_on_seeds_that_are_left_out_of_the_scaling_values(results: Results) -> None:
    """Seed 0 likes the bad setting; its values count for nothing else."""
    growth = growth_of(smallest=None, factor=None, chosen_on=[0])
    cells = []
    for cell in results.cells:
        good = cell["point"]["label.setting"] == "good"
        for seed, risk_of_seed in ((0, 1.0 if good else 0.1), (1, 0.5 if good else 0.7)):
            cells.append({**cell, "seed": seed, "excess_risk": risk_of_seed})
    two = dataclasses.replace(results, cells=cells, seeds=[0, 1])
    assert values_of(two, growth)[0] == pytest.approx([0.7] * 3)


def test_points_without_finished_cells_of_the_seeds_count_for_no_value_of_the_metric() -> None:
    """Before: such a point was infinitely bad, so that it was the worst, and a value could be infinite."""
    growth = growth_of(smallest=None, factor=None, over="worst")
    size = Size(256.0, math.nan, [Point(0.0, {0: 0.5}, 1.0), Point(0.0, {0: 0.7, 1: 0.8}, 1.0)])
    assert [_estimate(growth, size, seeds).value for seeds in ([0], [1], [2])] == [0.7, 0.8, None]
    only_chosen = growth.model_copy(update={"chosen_on": [0]})
    assert _estimate(only_chosen, Size(256.0, math.nan, size.points[:1]), [1]) == Value(None, is_fitted=False)


def test_a_metric_that_the_results_lack_is_named_with_those_that_are_there(results: Results) -> None:
    with pytest.raises(InputError, match=r"scaling.metric: no 'test_auc' in the results; there are .*excess_risk"):
        find_values(results, growth_of(metric="test_auc"))


def test_cells_without_the_metric_count_for_no_value(results: Results) -> None:
    """Before: a KeyError after the run, for an AUC that is left out of a cell with too few records."""
    assert results.growth is not None
    first = [cell for cell in results.cells if cell["point"]["federation.rounds"] == 1]
    for cell in first:
        cell["excess_risk"] = None
    del results.cells[0]["excess_risk"]
    untrusted, trusted = values_of(results, results.growth)
    assert untrusted == pytest.approx([16.0, 32.0, 64.0])
    assert trusted == pytest.approx([4.0, 4096**0.25 / 2**0.5, 8.0])


@pytest.mark.parametrize("role", ["along", "smallest"])
def test_an_axis_of_growth_that_has_words_is_refused(role: str) -> None:
    """Before: a ValueError after the run."""
    with pytest.raises(
        InputError, match=rf"scaling.{role}: label.setting is swept over \['good', 'bad'\]; expected"
    ):
        scenario(**{role: "label.setting"})


def test_the_scaling_chart_has_marks_fitted_lines_and_a_slope_triangle_of_the_theory(results: Results) -> None:
    chart = scaling_chart(results)
    assert chart is not None
    assert (chart.log_x, chart.log_y) == (True, True)
    lines = "untrusted: exponent 0.500 ± 0.000", "trusted: exponent 0.250 ± 0.000"
    names = [name for name in lines for _ in ("marks", "fitted line")]
    assert [series.name for series in chart.series] == [*names, "theory: 0.25"]
    left, right, top, _ = chart.series[-1].marks
    assert math.log(top.y / right.y) / math.log(right.x / left.x) == pytest.approx(0.25)
    assert "nan" not in render_tables(results, "markdown")


def test_the_slope_triangle_of_a_negative_theory_exponent_lies_below_its_line(results: Any) -> None:
    for cell in results.cells:
        cell["excess_risk"] = cell["point"]["federation.samples"] ** -0.5
    name = next(iter(results.axes["algorithm.trust"]))
    growth = growth_of(smallest=None, factor=None, theory={name: -0.5})
    chart = scaling_chart(dataclasses.replace(results, growth=growth))
    assert chart is not None
    (triangle,) = [series for series in chart.series if series.name == "theory: -0.5"]
    assert all(corner.y < corner.x**-0.5 for corner in triangle.marks)
    left, bottom, right, _ = triangle.marks
    assert (bottom.x, bottom.y) == (left.x, right.y)
    assert math.log(right.y / left.y) / math.log(right.x / left.x) == pytest.approx(-0.5)


def test_the_scaling_table_has_a_column_for_each_size_and_one_for_the_theory(results: Results) -> None:
    text = render_tables(results, "markdown")
    assert "n = 4096" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| untrusted")]
    entries = [cell.strip() for cell in line.split("|")[2:6]]
    assert entries == ["16.00", "32.00", "64.00", "0.500 ± 0.000 (3 sizes)"]
    (line,) = [line for line in text.splitlines() if line.startswith("| trusted")]
    assert "| 0.25" in line.replace("   ", "")


def test_theory_exponents_are_dropped_if_an_override_leaves_the_setting_of_the_theory() -> None:
    """A narrowed sweep keeps it; another ball, privacy or radius has other exponents, or none that are known."""

    def theory(*overrides: str) -> dict[str, float]:
        few = ("federation.samples=[1024]", "federation.rounds=[4]", "label.step=long", "seeds=1")
        scaling = load_scenario(SCENARIOS / "complexity-table.toml", [*few, *overrides]).growth
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
def test_labels_of_beta_match_its_values_and_only_large_beta_has_a_finite_risk_bound(
    beta: str, factor: float, known: bool
) -> None:
    """M is the model's own, and a bound of the risk is known from M (T+1)/2 on."""
    few = ("federation.samples=[4096]", f'label.beta=["{beta}"]', "seeds=1")
    points = load_scenario(SCENARIOS / "complexity-outside.toml", few).points
    assert len(points) == 17
    objective = load_task(points[0].cell).objective
    for cell in (point.cell for point in points):
        rounds, own = cell.schedule.rounds, cell.algorithm.settings
        assert isinstance(own, AcceleratedSettings)
        least = factor * objective.smoothness * (rounds + 1 if beta == "M (T+1)/2" else rounds)
        assert own.beta is not None
        assert own.beta == 1.0 or least < own.beta < 1.001 * least
        bound = excess_risk_bound(cell, make_plan(cell, objective))
        assert bound is not None
        assert math.isfinite(bound.value) == known


def test_a_target_that_no_number_of_rounds_reaches_is_shown_as_not_reached(results: Results) -> None:
    tight = growth_of(factor=1e-3)
    assert values_of(results, tight)[0] == [None] * 3
    assert find_values(results, tight)[0].fit is None
    assert "not reached" in render_tables(dataclasses.replace(results, growth=tight), "markdown")


def test_the_target_risk_of_private_runs_has_an_additional_privacy_term(results: Any) -> None:
    """√d/(ε n) is added where there is an ε: d = 3 in these results."""
    for cell in results.cells:
        cell["epsilon"] = 2.0
    trusted = find_values(results, results.growth)[1]
    target = 1 / 16 + math.sqrt(3) / (2.0 * 256)
    assert trusted.values[256.0].value == pytest.approx(target**-0.5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"along": "privacy.mu"}, r"scaling.along = 'privacy.mu': expected a swept key"),
        ({"factor": None}, r"scaling.factor: expected the target's factor"),
    ],
)
def test_a_scaling_that_cannot_be_computed_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        scenario(**change)


def test_cells_in_the_journal_of_a_killed_run_are_read_back(tmp_path: Path) -> None:
    """A run that was killed between two rewrites of results.json: its journal counts, a torn line does not."""
    whole = write_run(tmp_path / "whole")
    assert not (whole / "cells.jsonl").exists()
    assert len(read_results(whole).cells) == len(scenario().points)
    killed = write_run(tmp_path / "killed", 2)
    with (killed / "cells.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"cell": 2, "po')
    assert [cell["cell"] for cell in read_results(killed).cells] == [0, 1]
    assert RunFolder(killed, scenario(), "vectorized", resume=True).missing_indices[0] == 2


@pytest.mark.slow
def test_a_run_without_a_scaling_table_does_not_import_scipys_statistics() -> None:
    """Half a second that every `fedpriv run` would wait."""
    code = "import sys, fedpriv.cli.run; sys.exit('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_exponents_between_adjacent_sizes_recover_an_inverse_square_root_risk() -> None:
    """A risk of 1/√n, times a factor of the seed's own, has -1/2 everywhere."""
    cells = [
        {"point": {"federation.samples": size}, "excess_risk": (1.0 + seed) * size**-0.5}
        for size in SIZES
        for seed in (0, 1)
    ]
    results = dataclasses.replace(results_of_records(*cells), axes={"federation.samples": SIZES}, seeds=[0, 1])
    rows = exponents(results)
    assert [size for size, _, _ in rows] == SIZES
    for _, _, slopes in rows[1:]:
        assert slopes == pytest.approx([-0.5, -0.5], abs=1e-12)
