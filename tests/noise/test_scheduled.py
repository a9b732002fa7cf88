"""Fresh noise of sizes that are fixed beforehand: its certificate by brute force, its fit, its integers."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from fedpriv.noise.diagonal import IndependentGaussian, ScheduledGaussian
from fedpriv.noise.fitting.auto import fit_sizes, max_displacements
from fedpriv.noise.fitting.cost import NoiseCost, NoiseResponse, make_noise_cost, rows_response
from fedpriv.noise.registry import MechanismOptions, make_mechanism, mechanism_from_data
from fedpriv.noise.series import Workload
from tests.noise.matrices import Matrix, farthest, patterns, separated, stream, workload_matrix, workload_of
from tests.noise.rows import objective, response, workload

SIZES = (1.0, 0.5, 2.0, 1.5, 0.7, 3.0, 1.0, 0.9)
CLIPS = (1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 0.2, 2.5)


def dense(workload: Workload) -> Matrix:
    """C = diag(1/d) A."""
    rounds = workload.rounds
    return np.asarray(workload_matrix(rounds, workload.decay) / np.array(SIZES[:rounds])[:, None])


@pytest.mark.parametrize("decay", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("rounds", "epoch"), [(8, 8), (8, 4), (8, 3), (5, 2), (8, 1)])
def test_the_worst_record_is_charged_exactly(decay: float, rounds: int, epoch: int) -> None:
    """Guarantee: every record of the fixed order, by brute force, also where the last epoch is cut."""
    workload, mechanism = workload_of(rounds, decay, epoch, clips=CLIPS[:rounds]), ScheduledGaussian(SIZES, decay)
    matrix, found = dense(workload), mechanism.certified(workload)
    assert found.exact
    assert found.value == pytest.approx(farthest(matrix, workload), rel=1e-12)
    columns = mechanism.columns(workload)
    assert columns.squared_norms == pytest.approx(np.sum(matrix**2, axis=0), rel=1e-12)
    assert columns.inner(np.arange(rounds)) == pytest.approx(matrix.T @ matrix, rel=1e-12)


def test_single_pass_sensitivity_matches_the_papers_formula_for_any_noise_schedule() -> None:
    """Reshef & Levy: ρ = 2S √(Σ_t 1/σ_t²) under replace-one, so the distance is S √(Σ_t 1/d_t²)."""
    workload = workload_of(8, clips=118.1)
    expected = 118.1 * math.sqrt(sum(size**-2 for size in SIZES))
    assert ScheduledGaussian(SIZES).sensitivity(workload) == pytest.approx(expected, rel=1e-13)
    same = ScheduledGaussian((2.0,) * 8)
    assert same.sensitivity(workload) == pytest.approx(IndependentGaussian().sensitivity(workload) / 2.0)


def test_scheduled_noise_has_its_given_sizes_and_keeps_no_state() -> None:
    mechanism = ScheduledGaussian(SIZES)
    for size, (noise, state) in zip(SIZES, stream(mechanism, torch.ones(8, 3)), strict=True):
        assert noise.tolist() == pytest.approx([size] * 3)
        assert state == ()
    assert mechanism.variance(workload_of(8)) == pytest.approx(np.array(SIZES) ** 2)
    assert mechanism.fresh_std == 0.5


@pytest.mark.parametrize("row", ["dp-mu2-fl", "accelerated", "unaccelerated", "dp-ftrl"])
@pytest.mark.parametrize("epoch", [None, 6])
def test_fitted_noise_sizes_have_the_least_cost(row: str, epoch: int | None) -> None:
    """No other sizes do better: the product is Σ m √w, and 60 nearby schedules lie above."""
    wanted = objective(row, 24, epoch)
    best = fit_sizes(wanted)
    assert best.sizes[0] == 1.0
    value = wanted.evaluate(best)
    assert value <= wanted.evaluate(IndependentGaussian()) * (1 + 1e-12)
    weights = np.sqrt(np.sum(wanted.weights**2, axis=0))
    if np.min(weights) > 1e-3 * np.max(weights):
        product = float(np.sum(max_displacements(wanted.workload) * weights))
        assert math.sqrt(value) == pytest.approx(product, rel=1e-9)
    generator = np.random.default_rng(1)
    for _ in range(60):
        other = np.array(best.sizes) * np.exp(0.05 * generator.normal(size=24))
        assert wanted.evaluate(ScheduledGaussian(tuple(other.tolist()))) >= value * (1 - 1e-6)


def test_fitted_noise_schedule_for_the_accelerated_optimizer_beats_independent_noise() -> None:
    """Accelerated-DP-SRGD at T = 60: √(J/2) of 1.0575 where independent noise has 1.2168."""
    wanted = objective("accelerated", 60)
    assert math.sqrt(wanted.evaluate(fit_sizes(wanted)) / 2) == pytest.approx(1.0575, abs=5e-5)
    assert math.sqrt(wanted.evaluate(IndependentGaussian()) / 2) == pytest.approx(1.2168, abs=5e-5)


@pytest.mark.parametrize("row", ["dp-ftrl", "dp-ftrl, momentum", "accelerated"])
def test_fit_on_some_queries_adds_little_noise_in_the_rounds_between_them(row: str) -> None:
    """A fit of 200 rounds looks at 64 queries: in all of them its noise is what it is in those."""
    some, every = objective(row, 200), make_noise_cost(response(row, 200, 200), workload(row, 200))
    sizes = fit_sizes(some)
    assert every.evaluate(sizes) <= 1.1 * some.evaluate(sizes)
    assert every.evaluate(sizes) <= 1.05 * every.evaluate(fit_sizes(every))


MOST = math.sqrt(1000.0)
"""Size of a round without weight, beside a first round of the largest weight."""


@pytest.mark.parametrize(
    ("rows", "weights", "sizes"),
    [
        (1, (4, 0, 1), (1, 2, 2)),
        (2, (4, 0, 1), (1, 2, 2)),
        (3, (4, 0, 1), (1, 2, 2)),
        (3, (4, 0.25, 1), (1, 4, 2)),
        (4, (4, 0, 1), (1, MOST, 2)),
        (4, (4, 0, 0, 0, 0, 0, 0, 1), (1, MOST, MOST, 2, 2, MOST, MOST, 2)),
        (5, (4, 0, 0, 0, 0, 0, 1), (1, MOST, MOST, 2, MOST, MOST, 2)),
    ],
)
def test_rounds_within_the_distance_of_two_queries_count_like_the_lighter_neighbour(
    rows: int, weights: tuple[float, ...], sizes: tuple[float, ...]
) -> None:
    """One of the rows may be the output, so that queries are ⌈T / (rows - 2)⌉ rounds apart at most."""
    cost = NoiseCost(workload_of(len(weights)), np.outer(np.eye(1, rows), weights))
    assert fit_sizes(cost).sizes == pytest.approx(sizes, rel=1e-12)


def test_fitted_noise_sizes_are_at_most_one_where_every_running_sum_counts_equally() -> None:
    """Momentum's theorem asks for the mean noise of the sums; 64 of 300 are looked at, all have the same noise."""
    sizes = fit_sizes(make_noise_cost(rows_response(300), workload_of(300, 0.9))).sizes
    assert max(sizes) <= 1.0 + 1e-9


@pytest.mark.parametrize("rounds", [65, 300, 6000, 10_000])
def test_fitted_noise_sizes_are_at_most_one_for_single_round_queries_and_an_output(rounds: int) -> None:
    """DP-FTRL without momentum: a query is the sum of one round, and the output is a row beside the queries."""
    published = NoiseResponse(rows_response(rounds).queries, np.eye(rounds)[-1])
    assert max(fit_sizes(make_noise_cost(published, workload_of(rounds, 0.0))).sizes) <= 1.0 + 1e-9


@pytest.mark.parametrize(("decay", "epoch"), list(itertools.product([0.0, 0.7, 1.0], [2, 5, 12])))
def test_largest_displacement_of_each_running_sum_matches_brute_force(decay: float, epoch: int) -> None:
    clips = np.linspace(2.0, 1.0, 12)
    workload = workload_of(12, decay, epoch, clips=clips)
    moved = [
        max(sum(decay ** (t - i) * clips[i] for i in range(t + 1) if i % epoch == place) for place in range(epoch))
        for t in range(12)
    ]
    assert max_displacements(workload) == pytest.approx(moved, rel=1e-12)


def test_scheduled_noise_is_restored_from_its_data_and_options() -> None:
    mechanism = ScheduledGaussian(SIZES, 0.5)
    assert mechanism_from_data(json.loads(json.dumps(mechanism.as_data()))) == mechanism
    options = MechanismOptions.model_validate(mechanism.options())
    assert make_mechanism("scheduled", workload_of(8, 0.5), options) == mechanism


def test_sensitivity_bound_covers_separated_participations() -> None:
    """Guarantee: never below the worst of all patterns."""
    workload = separated(8, 3, 2, 0.8, clips=CLIPS)
    worst = farthest(dense(workload), workload)
    found = ScheduledGaussian(SIZES, 0.8).certified(workload)
    assert worst <= found.value * (1 + 1e-12) <= 1.2 * worst
    moved = [
        max(
            sum(0.8 ** (t - i) * CLIPS[i] for i in held if i <= t) for held in patterns(workload) if min(held) <= t
        )
        for t in range(8)
    ]
    assert np.all(max_displacements(workload) <= np.array(moved) * (1 + 1e-12))
