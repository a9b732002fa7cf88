"""The benches: what pairs of runs allow to be said, differences seed by seed, settings around a setting."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks import __main__ as bench
from benchmarks import secret_noise
from benchmarks.clock import Clock
from benchmarks.compare import interval, verdict
from benchmarks.differences import between, differences
from benchmarks.differences import interval as students_interval
from benchmarks.goldstein import promised
from benchmarks.refining import fresh_seeds, neighbours
from benchmarks.statistics_beside import lines_of
from benchmarks.tightness import KINDS, Law, by_orders, row
from fedpriv.accounting import renyi
from fedpriv.accounting.gaussian import mu_of
from fedpriv.addons.statistics.plan import read_plan
from fedpriv.core.errors import RunError
from fedpriv.core.random import KeyedNormal
from fedpriv.engines.table import make_engine
from fedpriv.noise.fitting.auto import compare_mechanism
from fedpriv.noise.registry import MechanismOptions, make_mechanism
from fedpriv.papers.table import find_algorithm
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan.calibration import response_and_workload
from fedpriv.scenario.load import load_scenario, resolve_cell
from tests.conftest import small_tree
from tests.data.tables import rows, write_csv
from tests.study.test_statistics import tree_of


def test_the_interval_of_timing_ratios_is_students_interval_of_their_logarithms() -> None:
    """The bounds are the ratios that a test at 5 % would just not reject."""
    ratios = [0.9, 1.1, 1.05, 0.97, 1.2]
    low, mean, high = interval(ratios)
    assert mean == pytest.approx(stats.gmean(ratios))
    for bound in (low, high):
        assert stats.ttest_1samp(np.log(ratios), math.log(bound)).pvalue == pytest.approx(0.05)


def test_the_interval_of_timing_ratios_covers_at_its_nominal_rate() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        low, _, high = interval(np.exp(rng.normal(math.log(0.8), 0.3, size=6)).tolist())
        covered += low <= 0.8 <= high
    assert 0.91 < covered / 400 < 0.99


@pytest.mark.parametrize("ratios", [[0.5], [0.5, 0.5]])
def test_one_or_two_timing_ratios_show_no_difference(ratios: list[float]) -> None:
    low, mean, high = interval(ratios)
    assert mean == pytest.approx(0.5)
    assert verdict(low, high) == "no difference shown"


@pytest.mark.slow
def test_benchmark_output_noise_in_a_fixed_order_matches_the_mechanism_comparison() -> None:
    """In a fixed order, where both have it; by allocation less is needed."""
    row, settings = find_algorithm("dp-ftrl"), secret_noise.ROWS["heavy ball 0.9"][1]
    own = row.settings.model_validate(settings)
    response, workload = response_and_workload(row, own, FixedOrder(12, 12))
    fixed = list(secret_noise.found("lambda-cgd", "fixed", response, workload, 1, 1.0))
    for each in fixed:
        assert each.theta is not None
        mechanism = make_mechanism("lambda-cgd", workload, MechanismOptions(theta=(each.theta,)))
        std = compare_mechanism(mechanism, response, workload).published_noise.output
        assert std is not None
        assert each.std == pytest.approx(std / mu_of(1.0, 1e-5), rel=1e-6)
    assert min(secret_noise.found("banded", "allocation", response, workload, 1, 1.0)) < min(fixed)


def test_timing_verdicts_follow_the_interval_of_the_ratio() -> None:
    assert [verdict(0.8, 0.9), verdict(0.9, 1.1), verdict(1.1, 1.2)] == ["faster", "no difference shown", "slower"]


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_the_benchmark_clock_after_round_1_includes_all_later_noise_draws(
    engine: str, trust: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: up to 16 rounds of a silo and three blocks of the vectorized engine were drawn before it started."""
    drawn, when_reported = list[int](), list[tuple[int, int]]()
    draw = KeyedNormal._draw_pairs

    def counted(self: KeyedNormal, cosines: Any, sines: Any, streams: Any, node: int, place: Any) -> None:
        drawn.append(len(streams))
        draw(self, cosines, sines, streams, node, place)

    class Counting(Clock):
        def advanced(self, rounds: int) -> None:
            super().advanced(rounds)
            when_reported.append((rounds, sum(drawn)))

    monkeypatch.setattr(KeyedNormal, "_draw_pairs", counted)
    rounds, silos = 40, 3
    federation = {"rounds": rounds, "samples": rounds * silos, "silos": silos}
    cell = resolve_cell(small_tree(federation=federation, algorithm__trust=trust), "test")
    clock = Counting()
    list(make_engine(engine)([cell], clock))
    (first, before), (_, after) = when_reported[0], when_reported[-1]
    parties = silos if trust == "untrusted" else 1
    assert (first, before, after) == (1, parties, rounds * parties)
    assert clock.rounds_per_second > 0.0


@pytest.mark.slow
def test_an_unknown_commit_is_refused_in_one_line() -> None:
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "benchmarks.compare", "no-such-commit"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("benchmarks.compare: fatal: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_benchmark_run_writes_a_page_with_the_seconds_of_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that cannot run here is one line, and the others go on; the page has what the terminal has."""

    def fails() -> None:
        raise RunError("no such machine")

    monkeypatch.setattr(bench, "BENCHMARKS", {"bad": fails, "good": lambda: print("| a | table |")})
    monkeypatch.setattr(bench, "_OUT", tmp_path / "runs" / "page.md")
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    with pytest.raises(SystemExit, match="not run to their end: bad"):
        bench.main()
    page, shown = (tmp_path / "runs" / "page.md").read_text(encoding="utf-8"), capsys.readouterr().out
    assert shown.startswith(page)
    assert "bad cannot run here: no such machine" in page
    assert page.index("| a | table |") < page.index("| `bad` | 0 |") < page.index("| `good` | 0 |")
    assert page.endswith("| all | 0 (target: 900) |\n")


def _cell(row: str, mu: float, seed: int, accuracy: float) -> dict[str, Any]:
    return {"point": {"label.method": row, "privacy.mu": mu}, "seed": seed, "test_accuracy": accuracy}


def test_differences_of_rows_are_taken_within_a_column_and_a_seed() -> None:
    """What seeds have in common falls out; a seed that only one of the rows has is left out."""
    cells = [
        *(_cell("a", 1.0, seed, 0.9 + 0.1 * seed) for seed in (0, 1, 2)),
        *(_cell("b", 1.0, seed, 0.8 + 0.1 * seed) for seed in (1, 0)),
        _cell("a", 4.0, 0, 0.5),
        _cell("b", 4.0, 0, 0.75),
        _cell("c", 1.0, 0, 0.0),
    ]
    found = differences(cells, "a", "b")
    assert found.keys() == {'{"privacy.mu": 1.0}', '{"privacy.mu": 4.0}'}
    assert found['{"privacy.mu": 1.0}'] == pytest.approx([0.1, 0.1])
    assert found['{"privacy.mu": 4.0}'] == [-0.25]


def test_a_row_missing_from_the_run_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'z': no such row"):
        differences([_cell("a", 1.0, 0, 0.9)], "a", "z")


def test_the_interval_of_a_mean_uses_students_distribution() -> None:
    """Of five values: 2.776 standard errors."""
    mean, half = students_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0
    assert half == pytest.approx(2.776445 * 2.5**0.5 / 5**0.5, rel=1e-6)
    assert students_interval([1.0])[1] == float("inf")


@pytest.mark.parametrize(("key", "longer"), [("algorithm.step", 2.0**0.5), ("algorithm.beta", 0.5**0.5)])
def test_five_neighbouring_settings_scale_clip_norm_and_step_by_root_two(key: str, longer: float) -> None:
    """Steps are 1/β; a clip that falls by √2 goes with a step that is √2 longer."""
    centre = {"algorithm.clip": 4.0, key: 8.0, "algorithm.radius": 30.0}
    first, *others = neighbours(centre)
    assert first == centre
    assert [each["algorithm.radius"] for each in others] == [30.0] * 4
    clips, steps = ([each[name] for each in others] for name in ("algorithm.clip", key))
    assert clips == pytest.approx([4.0, 4.0, 4.0 / 2**0.5, 4.0 * 2**0.5], rel=2e-3)
    assert steps == pytest.approx([8.0 * longer, 8.0 / longer, 8.0 * longer, 8.0 / longer], rel=2e-3)


def test_neighbouring_settings_are_compared_on_fresh_seeds() -> None:
    assert fresh_seeds([100]) == [101, 102]
    assert fresh_seeds([7, 3]) == [8, 9]


def test_the_statistics_benchmark_shows_the_true_counts_of_its_table(tmp_path: Path) -> None:
    held = rows(600)
    tables: list[dict[str, Any]] = [
        {"of": ["sex", "outcome"]},
        {"name": "mean", "of": ["age"], "kind": "means"},
        {"name": "quantiles", "of": ["age"], "kind": "quantiles", "edges": {"age": [0, 30, 60, 100]}},
    ]
    privacy = {"relation": "replace-one", "epsilon": 1.0}
    tree = tree_of(write_csv(tmp_path / "t.csv", held), table=tables, privacy=privacy)
    lines = [line.split("|") for line in lines_of(read_plan(tree))]
    found = {(line[1].strip(), line[2].strip()): line[3] for line in lines}
    train = [row for row in held if row["part"] == "train"]
    ill = sum((row["sex"], row["outcome"]) == ("f", "ill") for row in train)
    assert float(found["outcome by sex", "f, ill"]) == ill
    ages = np.array([float(row["age"]) for row in train if row["age"]])
    assert float(found["mean", "values"]) == len(ages)
    assert float(found["mean", "mean"]) == pytest.approx(ages.mean(), abs=0.06)
    assert float(found["quantiles", "quantile 0.5"]) == 60.0


@pytest.mark.parametrize("name", ["trees, unequal clips", "centred moments"])
def test_an_exact_sensitivity_bound_has_a_ratio_of_one(name: str) -> None:
    cells = [cell.strip() for cell in row(name, 6).split("|")]
    assert cells[1:7] == [name, "6", "1.0000", "1.0000", "1.0000", "1.0000"]


def test_accuracy_differences_are_paired_by_seed_between_rows_and_between_runs() -> None:
    """Rows may be lists, as shares are; another run is compared seed by seed with every point."""
    shares = [[1.0, 0.5], [1.0, 1.0]]
    cells = [
        {"point": {"privacy.shares": row}, "seed": seed, "test_accuracy": 0.5 + 0.1 * place + 0.01 * seed * place}
        for place, row in enumerate(shares)
        for seed in (0, 1, 2)
    ]
    assert differences(cells, "[1.0, 1.0]", "[1.0, 0.5]") == {"{}": pytest.approx([0.1, 0.11, 0.12])}
    found = between(cells, [{"seed": seed, "test_accuracy": 0.4} for seed in (1, 2)])
    assert list(found.values()) == [pytest.approx([0.1, 0.1]), pytest.approx([0.21, 0.22])]
    with pytest.raises(ValueError, match="several points"):
        between(cells, cells)


def test_the_exponent_of_the_theorem_is_shown_only_where_its_setting_holds() -> None:
    """A loss with a Lipschitz constant everywhere, and no noise."""
    path = Path(__file__).parents[1] / "scenarios" / "nonsmooth-goldstein.toml"
    few = ("seeds=1", "federation.rounds=[500]", 'algorithm.name=["goldstein-erm"]')
    exponents = {
        (point.swept_values["model.name"], point.swept_values["privacy.mu"]): promised(point.cell)
        for point in load_scenario(path, few).points
    }
    assert exponents.pop(("amplitude-phase-retrieval", 1000.0)) == "-1/3"
    assert len(exponents) == 3
    assert not any(exponents.values())


@pytest.mark.slow
def test_renyi_bounds_from_samples_match_the_closed_form_of_a_gaussian() -> None:
    """Moments of samples miss tails, so that the rival looks a little better than it is."""
    losses = np.random.default_rng(0).normal(0.5, 1.0, 400_000)
    for delta in (1e-2, 1e-3):
        known = renyi.epsilon_of(1.0, delta)
        assert 0.98 * known < by_orders([Law.of(losses), Law.of(losses - 1.0)], delta) < 1.005 * known


@pytest.mark.slow
def test_epsilon_of_banded_noise_under_poisson_sampling_is_not_below_monte_carlo_estimates() -> None:
    draw = np.random.default_rng(3)
    found = [point for _ in range(6) for point in KINDS["under Poisson, banded noise"](draw)]
    assert len(found) > 6
    for ours, least, middle, _ in found:
        assert least <= ours <= 1.05 * middle


@pytest.mark.slow
def test_epsilon_under_poisson_sampling_is_within_two_percent_of_another_accountant() -> None:
    draw = np.random.default_rng(2)
    for ours, least, middle, best in KINDS["Poisson"](draw):
        assert least <= ours
        assert middle == best
        assert ours <= 1.02 * best
