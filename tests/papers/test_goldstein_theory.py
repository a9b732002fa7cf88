"""The plan functions against their golden numbers, units and limits."""

import dataclasses
import math
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.loss.goldstein import find_min_norm_point
from fedpriv.loss.linear import PhaseRetrieval
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.noise.series import Floats
from fedpriv.papers.base import Problem
from fedpriv.papers.kornowski import GOLDSTEIN_ERM, AllRecordsSettings, GoldsteinSettings
from fedpriv.papers.kornowski_bounds import (
    NonsmoothProblem,
    direction_energy,
    leaf_noise_ratio,
    max_window,
    multi_pass_error,
    needed_directions,
    paper_window,
    plan_multi_pass,
    plan_single_pass,
    printed_directions,
    smoothness_constant,
)
from fedpriv.papers.table import ALGORITHMS
from fedpriv.participation.orders import FixedOrder
from fedpriv.scenario.load import load_scenario
from tests.loss.builders import first_rows

PROBLEM = NonsmoothProblem(dimension=20, lipschitz=1.0, gap=1.0, smoothing=0.2)


@pytest.mark.parametrize(
    ("dimension", "constant"), [(1, 1.0), (2, 4 / math.pi), (3, 1.5), (10, 2.586899392478), (100, 7.998817343488)]
)
def test_the_smoothness_constant_matches_golden_values_below_root_dimension(
    dimension: int, constant: float
) -> None:
    assert smoothness_constant(dimension) == pytest.approx(constant, rel=1e-12)
    assert smoothness_constant(dimension) <= math.sqrt(dimension)


@pytest.mark.parametrize(("dimension", "energy"), [(1, 1.0), (2, 4.0), (3, 4.5), (10, 100 / 9)])
def test_the_direction_energy_matches_golden_values(dimension: int, energy: float) -> None:
    assert direction_energy(dimension) == pytest.approx(energy, rel=1e-14)


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-8)


MANY_DIMENSIONS = NonsmoothProblem(7850, 1.0, 2.3, 0.1)
PLANS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "single pass": (
        lambda: plan_single_pass(PROBLEM, 60_000, mu=1.0),
        {
            "rounds": 30_000, "window": 136, "windows": 220, "period": 188, "anchor_batch": 188, "batch": 1,
            "records": 59_920, "radius": near(3.67641190e-4), "anchor_clip": near(0.0106382979 * 188 / 2),
            "clip": near(0.0265665796 / 2), "anchor_std": near(0.0702885628), "difference_std": near(0.0702885628),
            "error": near(0.854389841), "step": near(1.70001858e-5), "bound": near(2.21540388),
        },
    ),
    "without privacy": (
        lambda: plan_single_pass(PROBLEM, 60_000, mu=math.inf),
        {
            "period": 122, "records": 59_766, "anchor_std": 0.0, "error": near(0.171891424),
            "bound": near(0.704097650),
        },
    ),
    "a million records": (
        lambda: plan_single_pass(PROBLEM, 10**6, mu=1.0),
        {
            "rounds": 499_800, "window": 887, "period": 1026, "radius": near(5.63453823e-5),
            "anchor_std": near(0.0128756692), "bound": near(0.534847079),
        },
    ),
    "vacuous at the size of MNIST": (
        lambda: plan_single_pass(MANY_DIMENSIONS, 60_000, mu=1.0), {"bound": pytest.approx(117, rel=0.01)},
    ),
    "multi pass": (
        lambda: plan_multi_pass(PROBLEM, 60_000, target=0.3, mu=1.0),
        {
            "rounds": 1482, "window": 11, "windows": 134, "period": 10, "radius": pytest.approx(0.0045, rel=1e-12),
            "anchor_std": near(6.38036869e-4), "difference_std": near(2.56887586e-4), "error": near(0.00447439858),
            "step": near(0.00135075722), "bound": near(0.947013477),
        },
    ),
    "multi pass in many dimensions": (
        lambda: plan_multi_pass(MANY_DIMENSIONS, 60_000, target=0.3, mu=1.0),
        {
            "rounds": 6815, "period": 1, "error": pytest.approx(0.2438, abs=1e-4),
            "bound": pytest.approx(1.58, abs=0.005),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_goldstein_plans_match_their_golden_numbers(name: str) -> None:
    make, golden = PLANS[name]
    plan = make()
    assert {key: getattr(plan, key) for key in golden} == golden


@pytest.mark.parametrize(("length", "loss"), [(7.0, 1.0), (1.0, 5.0), (0.1, 0.3)])
def test_goldstein_plans_are_invariant_under_units_of_length_and_loss(length: float, loss: float) -> None:
    """x → length · x and f → loss · f scale D by `length` and change no count: the printed D and T do not."""
    scaled = NonsmoothProblem(20, loss / length, loss, 0.2 * length)
    for plan, same in (
        (plan_single_pass(PROBLEM, 5000, 1.0), plan_single_pass(scaled, 5000, 1.0)),
        (plan_multi_pass(PROBLEM, 5000, 0.3, 1.0), plan_multi_pass(scaled, 5000, 0.3 * loss / length, 1.0)),
    ):
        assert same.radius == pytest.approx(plan.radius * length, rel=1e-9)
        counts = attrgetter("rounds", "window", "period", "windows")
        assert counts(same) == counts(plan)
        assert same.bound == pytest.approx(plan.bound * loss / length, rel=1e-9)


@pytest.mark.parametrize(("radius", "smoothing"), [(0.01, 0.4), (0.3, 0.4), (0.05, 0.05), (1e-4, 0.7)])
def test_the_longest_window_keeps_its_spread_within_the_smoothing_radius(radius: float, smoothing: float) -> None:
    def spread(window: int) -> float:
        return ((window + 1) / 2 - 1 / window) * radius

    longest = max_window(radius, smoothing)
    assert spread(longest) <= smoothing * (1 + 1e-6) < spread(longest + 1)
    assert 1 <= paper_window(radius, smoothing) <= longest


def test_the_window_of_a_tiny_step_is_a_number() -> None:
    """Before, an OverflowError for any step below 1e-154 α, or 1e-308 α."""
    assert max_window(1e-200, 1.0) == max_window(1e-320, 1.0) == paper_window(1e-320, 1.0) == 10**18


@pytest.mark.parametrize(("rounds", "period"), [(100, 10), (37, 5), (12, 12)])
def test_the_leaf_noise_ratio_minimizes_the_variance(rounds: int, period: int) -> None:
    clips = 1.0, 0.3
    anchors = -(-rounds // period)

    def variance(ratio: float) -> float:
        price = anchors * clips[0] ** 2 / ratio**2 + (rounds - anchors) * clips[1] ** 2
        return price * (ratio**2 + period - 1)

    best = leaf_noise_ratio(*clips, rounds, period)
    grid = best * np.exp(np.linspace(-1.0, 1.0, 201))
    assert variance(best) <= min(variance(float(ratio)) for ratio in grid) * (1 + 1e-12)
    assert leaf_noise_ratio(*clips, rounds, 1) == 1.0


@pytest.mark.parametrize("shared", [True, False])
def test_the_multi_pass_error_bound_is_tight_for_a_sawtooth_loss(shared: bool) -> None:
    """A saw of slope ±1 whose queries move by one tooth: a difference is ±2 along every shared direction.

    One record, 12 rounds from the anchor, 4 directions a difference and one at the anchor, 20,000 draws.  The root
    mean square has a standard error below half a percent, and is to be within 2 percent of a bound that is tight.
    """
    draw, period, directions, draws = np.random.default_rng(14), 12, 4, 20_000
    smoothing, tooth = 1.0, 1.0 / 64.0

    def gradient(x: Floats) -> Floats:
        return np.where(np.floor(x / tooth) % 2 == 0, 1.0, -1.0)

    def along(count: int) -> Floats:
        return np.asarray(draw.uniform(-smoothing, smoothing, (draws, count)))

    estimate = gradient(along(1)).mean(1)
    for t in range(2, period + 1):
        now, before = tooth * (t % 2), tooth * (1 - t % 2)
        first = along(directions)
        second = first if shared else along(directions)
        estimate = estimate + (gradient(now + first) - gradient(before + second)).mean(1)
    measured = math.sqrt(float(np.mean(estimate**2)))  # the smoothed gradient is 0 everywhere
    problem = NonsmoothProblem(1, 1.0, 1.0, smoothing, "first", directions, shared)
    bound = multi_pass_error(problem, period, 1, 0.0, 0.0, tooth)
    assert 0.98 * bound < measured < 1.02 * bound
    assert bound == pytest.approx(math.sqrt(1 + (4 if shared else 2) * (period - 1) / directions), rel=1e-12)


@pytest.mark.parametrize(("m", "golden"), [(1, 0.0479), (4, 0.0235), (16, 0.0124)])
def test_more_directions_average_out_the_anchor_error_at_a_kink(m: int, golden: float) -> None:
    """Equation (10): |x_1| at its kink, n = 400 records: the anchor's root mean square error is 1/√(n m).

    Measured over 200 seeds, whose standard error is 5 %.  The golden numbers are of one other sample each.
    """
    n, seeds, dtype = 400, 200, torch.float64
    settings = AllRecordsSettings(
        smoothing=0.5, radius=0.1, period=4, anchor_clip=1.0, clip=1.0, anchor_directions=m
    )
    schedule = FixedOrder(4, 1)
    problem = Problem(dimension=2, lipschitz=1.0, smoothness=math.inf, convex=False, batch=n, schedule=schedule)
    base = PhaseRetrieval(2, 1, feature_norm=1.0, dtype=dtype)
    rows = Records(torch.tensor([[1.0, 0.0]], dtype=dtype).expand(n, 2), torch.zeros(n, dtype=dtype))
    errors = []
    for seed in range(seeds):
        problem = dataclasses.replace(problem, seed=seed)
        objective = GOLDSTEIN_ERM.objective(settings, problem, base).for_batch(first_rows(1, ((0, n),)))
        batch = Batch(rows, torch.full((n,), 1.0 / n, dtype=dtype))
        errors.append(
            float(objective.increment(Query([torch.tensor([0.0, 0.3], dtype=dtype)]), batch, 1.0).total[0])
        )
    measured, expected = math.sqrt(float(np.mean(np.square(errors)))), 1.0 / math.sqrt(n * m)
    assert measured == pytest.approx(expected, rel=0.17)
    assert golden == pytest.approx(expected, rel=0.07)
    nonsmooth = settings.make_nonsmooth_problem(problem)
    assert multi_pass_error(nonsmooth, 1, n, 0.0, 0.0) == pytest.approx(expected, rel=1e-12)


def test_the_zeroth_order_multi_pass_error_matches_its_formula() -> None:
    """c_d/J at the anchor; in a difference min(4 d² D²/α², 4 c_d)/J along shared directions, else 2 c_d/J."""
    d, lipschitz, period, records, directions, smoothing = 6, 2.0, 5, 10, 8, 0.5
    energy = d**2 / (d - 1)
    for shared, radius, of_difference in (
        (True, 0.01, (2 * d * 0.01 / smoothing) ** 2),
        (True, math.inf, 4 * energy),
        (False, 0.01, 2 * energy),
    ):
        problem = NonsmoothProblem(d, lipschitz, 1.0, smoothing, "zeroth", directions, shared)
        squares = lipschitz**2 * (energy + (period - 1) * of_difference) / (directions * records)
        squares += d * (0.3**2 + (period - 1) * 0.2**2)
        assert multi_pass_error(problem, period, records, 0.3, 0.2, radius) == pytest.approx(math.sqrt(squares))


@pytest.mark.parametrize("records", [4, 8])
def test_proposition_5_1_is_false_as_printed(records: int) -> None:
    """A Lipschitz loss whose records' Goldstein measure is 0 everywhere, and the population's 1/2 everywhere.

    On the line, in cells of equal width, record r's slope is -1/2 + s/2 with an independent sign s in each cell:
    so the population's is -1/2 everywhere.  64 · 2^n cells lie in every interval of radius α.
    """
    generator, inside = np.random.default_rng(records), 64 * 2**records
    signs = generator.choice([-1.0, 1.0], (records, 20 * inside))
    slopes = -0.5 + signs / 2.0
    assert np.abs(slopes).max() == 1.0
    of_records, of_population = slopes.mean(0), np.full(20 * inside, -0.5)
    assert of_records.mean() == pytest.approx(-0.5, abs=0.01)
    for start in range(0, 19 * inside, inside // 2):
        interval = slice(start, start + inside)
        assert find_min_norm_point(of_records[interval, None]).norm == 0.0
        assert find_min_norm_point(of_population[interval, None]).norm == 0.5


def test_the_printed_single_pass_directions_match_the_theorems_and_far_exceed_the_need() -> None:
    """Theorems 3.1 and 6.1, written out; neighbours share directions, so far fewer are needed."""
    n, d, alpha, delta = 290, 8, 0.25, 1e-5
    zeroth, first = (NonsmoothProblem(d, 1.0, 0.8, alpha, order) for order in ("zeroth", "first"))
    asked = plan_single_pass(zeroth, n, 1.666)
    b1, moved = asked.period, alpha**2 / asked.radius**2
    printed = math.log(d * (b1 + 1) / delta) * (d**2 * b1**2 + d * moved)
    assert printed_directions(zeroth, asked, delta, multi_pass=False) == pytest.approx(printed, rel=1e-12)
    gradients = printed_directions(first, asked, delta, multi_pass=False)
    assert gradients == pytest.approx(math.log(d / delta) * moved / d, rel=1e-12)
    needed = needed_directions(zeroth, asked.radius, delta)
    assert needed == pytest.approx(math.log(1 / delta) * (d + moved), rel=1e-12)
    assert needed_directions(first, alpha, delta) == pytest.approx(math.log(1 / delta), rel=1e-12)
    assert needed < 0.03 * printed


def test_a_single_pass_of_anchors_alone_follows_its_own_theorem() -> None:
    """Σ = 1 made B1 = B2 = 1, and 801 directions by Theorem 4.1 stood where Theorem 6.1 asks for three."""
    row, delta = ALGORITHMS["goldstein-single-pass"], 1e-5
    settings = row.settings.model_validate(
        {"smoothing": 0.01, "radius": 0.001, "period": 1, "anchor_clip": 1.0, "clip": 1.0}
    )
    problem = Problem(100, 1.0, 1.0, True, 1, FixedOrder(20, 20), epsilon=24.4, delta=delta, gap=1.0)
    (asked,) = row.theorems(settings, problem)
    assert (asked.numbers["period"], asked.numbers["batch"], asked.numbers["anchor batch"]) == (1.0, 1.0, 1.0)
    assert asked.numbers["directions"] == pytest.approx(math.log(100 / delta) * 4.0**2 / 100, rel=1e-9)
    # A record is in one round, so that half of δ is that round's.
    assert asked.numbers["directions needed"] == pytest.approx(math.log(2.0 / delta), rel=1e-9)


def test_a_single_pass_over_one_record_is_refused() -> None:
    """Before, a division by zero."""
    row = ALGORITHMS["goldstein-single-pass"]
    settings = row.settings.model_validate(
        {"smoothing": 0.01, "radius": 0.001, "period": 1, "anchor_clip": 1.0, "clip": 1.0}
    )
    problem = Problem(100, 1.0, 1.0, True, 1, FixedOrder(1, 1), epsilon=1.0, gap=1.0)
    (asked,) = row.theorems(settings, problem)
    assert not asked.numbers
    assert asked.refusal == "a single pass has a round for every two records: give 2 or more, not 1"


def test_the_printed_directions_of_theorem_4_1_are_too_few() -> None:
    """Theorem 4.1's m = L²dΣ/(nσ1²) + L²d/(nσ2²), at its own T, Σ and noise: 458 in the example of the errata."""
    n, d, alpha, beta, delta = 3163, 100, 0.1, 0.1, 1e-6
    rounds, radius, period = 1 / (alpha * beta**3), alpha * beta**2, 10
    price = math.sqrt(rounds * math.log(1 / delta)) / n
    anchor, difference = price / math.sqrt(period), price * radius * math.sqrt(d) / alpha
    problem = NonsmoothProblem(d, 1.0, 1.0, alpha, "zeroth")
    changes = {"radius": radius, "period": period, "anchor_std": anchor, "difference_std": difference}
    asked = dataclasses.replace(plan_multi_pass(problem, n, beta, 1.0), **changes)  # type: ignore[arg-type]
    assert round(printed_directions(problem, asked, delta, multi_pass=True)) == 458
    assert needed_directions(problem, radius, delta / 2 / rounds) > 500 * 458


@pytest.mark.parametrize("method", ["Algorithm 3, zeroth order", "Algorithm 4, zeroth order"])
def test_the_scenario_as_printed_has_the_parameters_of_its_theorem(method: str) -> None:
    path = Path(__file__).parents[2] / "scenarios" / "goldstein-as-printed.toml"
    cell = load_scenario(path, [f"label.method={method}", "privacy.mu=1.666"]).points[0].cell
    run = cell.algorithm.settings
    problem = NonsmoothProblem(8, 1.0, 0.8, 0.25, "zeroth", 1, shares_directions=False)
    assert isinstance(run, GoldsteinSettings)
    assert not run.first_order
    assert not run.shared_directions
    single = cell.algorithm.name == "goldstein-single-pass"
    asked = plan_single_pass(problem, 290, 1.666) if single else plan_multi_pass(problem, 290, 0.5, 1.666)
    assert (cell.schedule.rounds, run.period, run.window_rounds) == (asked.rounds, asked.period, asked.window)
    assert run.radius == pytest.approx(asked.radius, rel=1e-3)
    printed = printed_directions(problem, asked, 1e-5, multi_pass=asked.anchor_batch == asked.batch)
    assert run.directions == pytest.approx(printed, rel=0.04)
    assert run.clip >= asked.clip
