"""Fresh noise of sizes that are fixed beforehand: its certificate by brute force, its fit, its integers."""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.core.errors import InputError
from fedpriv.noise.diagonal import IndependentGaussian, ScheduledGaussian
from fedpriv.noise.fitting.auto import fit_sizes, max_displacements
from fedpriv.noise.fitting.cost import NoiseResponse, make_noise_cost, rows_response
from fedpriv.noise.registry import MechanismOptions, make_mechanism, mechanism_from_data
from fedpriv.noise.series import Workload
from fedpriv.participation.orders import FixedOrder, MinSeparation
from tests.noise.rows import objective, response, workload

SIZES = (1.0, 0.5, 2.0, 1.5, 0.7, 3.0, 1.0, 0.9)


def dense(workload: Workload) -> np.ndarray[Any, np.dtype[np.float64]]:
    """C = diag(1/d) A."""
    t = np.arange(workload.rounds)
    lag = np.subtract.outer(t, t)
    sums = np.where(lag >= 0, workload.decay ** np.maximum(lag, 0), 0.0)
    return np.asarray(sums / np.array(SIZES[: workload.rounds])[:, None])


@pytest.mark.parametrize("decay", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("rounds", "epoch"), [(8, 8), (8, 4), (8, 3), (5, 2), (8, 1)])
def test_the_worst_record_is_charged_exactly(decay: float, rounds: int, epoch: int) -> None:
    """Guarantee: every record of the fixed order, by brute force, also where the last epoch is cut."""
    clips = np.array([1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 0.2, 2.5])[:rounds]
    workload = Workload(FixedOrder(rounds, epoch), decay, clips)
    mechanism = ScheduledGaussian(SIZES, decay)
    matrix = dense(workload)
    norms = [np.linalg.norm(matrix[:, place::epoch] @ clips[place::epoch]) for place in range(epoch)]
    found = mechanism.certified(workload)
    assert found.exact
    assert found.value == pytest.approx(max(norms), rel=1e-12)
    columns = mechanism.columns(workload)
    assert columns.squared_norms == pytest.approx(np.sum(matrix**2, axis=0), rel=1e-12)
    held = np.arange(rounds)
    assert columns.inner(held) == pytest.approx(matrix.T @ matrix, rel=1e-12)


def test_the_papers_formula_for_any_schedule() -> None:
    """Reshef & Levy: ρ = 2S √(Σ_t 1/σ_t²) under replace-one, so the distance is S √(Σ_t 1/d_t²)."""
    workload = Workload(FixedOrder(8, 8), 1.0, np.full(8, 118.1))
    expected = 118.1 * math.sqrt(sum(size**-2 for size in SIZES))
    assert ScheduledGaussian(SIZES).sensitivity(workload) == pytest.approx(expected, rel=1e-13)
    same = ScheduledGaussian((2.0,) * 8)
    assert same.sensitivity(workload) == pytest.approx(IndependentGaussian().sensitivity(workload) / 2.0)


def test_noise_has_the_sizes_and_nothing_is_kept() -> None:
    mechanism, workload = ScheduledGaussian(SIZES), Workload(FixedOrder(8, 8), 1.0, np.ones(8))
    for t, size in enumerate(SIZES, start=1):
        noise, state = mechanism.noise((), t, torch.ones(3))
        assert noise.tolist() == pytest.approx([size] * 3)
        assert state == ()
    assert mechanism.variance(workload) == pytest.approx(np.array(SIZES) ** 2)
    assert mechanism.fresh_std == 0.5
    with pytest.raises(InputError, match="planned for 8 rounds"):
        mechanism.noise((), 9, torch.ones(3))


@pytest.mark.parametrize("row", ["dp-mu2-fl", "accelerated", "unaccelerated", "dp-ftrl"])
@pytest.mark.parametrize("epoch", [None, 6])
def test_fitted_sizes_are_the_best(row: str, epoch: int | None) -> None:
    """No other sizes do better: the product is Σ m √w, and 200 nearby schedules lie above."""
    wanted = objective(row, 24, epoch)
    best = fit_sizes(wanted)
    value = wanted.evaluate(best)
    assert value <= wanted.evaluate(IndependentGaussian()) * (1 + 1e-12)
    weights = np.sqrt(np.sum(wanted.weights**2, axis=0))
    if np.min(weights) > 1e-3 * np.max(weights):
        assert math.sqrt(value) == pytest.approx(
            float(np.sum(max_displacements(wanted.workload) * weights)), rel=1e-9
        )
    generator = np.random.default_rng(1)
    for _ in range(200):
        other = np.array(best.sizes) * np.exp(0.05 * generator.normal(size=24))
        assert wanted.evaluate(ScheduledGaussian(tuple(other.tolist()))) >= value * (1 - 1e-6)


def test_the_output_of_rows_that_sum_sums_is_near_its_bound_without_any_state() -> None:
    """Accelerated-DP-SRGD at T = 60: √(J/2) of 1.0575 where independent noise has 1.2168."""
    wanted = objective("accelerated", 60)
    assert math.sqrt(wanted.evaluate(fit_sizes(wanted)) / 2) == pytest.approx(1.0575, abs=5e-5)
    assert math.sqrt(wanted.evaluate(IndependentGaussian()) / 2) == pytest.approx(1.2168, abs=5e-5)


@pytest.mark.parametrize("row", ["dp-ftrl", "dp-ftrl, momentum", "accelerated"])
def test_rounds_between_the_queries_that_are_looked_at_get_no_free_noise(row: str) -> None:
    """A fit of 200 rounds looks at 64 queries: in all of them its noise is what it is in those."""
    some, every = objective(row, 200), make_noise_cost(response(row, 200, 200), workload(row, 200))
    sizes = fit_sizes(some)
    assert every.evaluate(sizes) <= 1.1 * some.evaluate(sizes)
    assert every.evaluate(sizes) <= 1.05 * every.evaluate(fit_sizes(every))


def test_where_every_sum_counts_alike_so_does_its_noise() -> None:
    """Momentum's theorem asks for the mean noise of the sums; 64 of 300 are looked at, all have the same noise."""
    asked = Workload(FixedOrder(300, 300), 0.9, np.ones(300))
    sizes = fit_sizes(make_noise_cost(rows_response(300), asked)).sizes
    assert max(sizes) <= 1.0 + 1e-9


@pytest.mark.parametrize("rounds", [65, 300, 6000, 10_000])
def test_queries_of_one_round_each_leave_no_free_noise_where_the_output_counts(rounds: int) -> None:
    """DP-FTRL without momentum: a query is the sum of one round, and the output is a row beside the queries."""
    wanted = make_noise_cost(
        NoiseResponse(rows_response(rounds).queries, np.eye(rounds)[-1]),
        Workload(FixedOrder(rounds, rounds), 0.0, np.ones(rounds)),
    )
    assert max(fit_sizes(wanted).sizes) <= 1.0 + 1e-9


@pytest.mark.parametrize(("decay", "epoch"), list(itertools.product([0.0, 0.7, 1.0], [2, 5, 12])))
def test_how_far_a_record_can_have_moved_each_sum(decay: float, epoch: int) -> None:
    clips = np.linspace(2.0, 1.0, 12)
    workload = Workload(FixedOrder(12, epoch), decay, clips)
    moved = [
        max(sum(decay ** (t - i) * clips[i] for i in range(t + 1) if i % epoch == place) for place in range(epoch))
        for t in range(12)
    ]
    assert max_displacements(workload) == pytest.approx(moved, rel=1e-12)


def test_what_is_written_is_read_and_what_is_wrong_is_refused() -> None:
    mechanism = ScheduledGaussian(SIZES, 0.5)
    assert mechanism_from_data(json.loads(json.dumps(mechanism.as_data()))) == mechanism
    workload = Workload(FixedOrder(8, 8), 0.5, np.ones(8))
    options = MechanismOptions.model_validate(mechanism.options())
    assert make_mechanism("scheduled", workload, options) == mechanism
    with pytest.raises(InputError, match="8 numbers, and there are 5 rounds"):
        make_mechanism("scheduled", Workload(FixedOrder(5, 5), 0.5, np.ones(5)), options)
    with pytest.raises(InputError, match="fitted before a run starts"):
        make_mechanism("scheduled", workload, MechanismOptions())
    with pytest.raises(InputError, match='noise_sizes is for mechanism = "scheduled"'):
        make_mechanism("tree", workload, options)
    with pytest.raises(InputError, match="at most 1e"):
        ScheduledGaussian((1.0, 1e7))
    with pytest.raises(InputError, match="a finite number above 0"):
        ScheduledGaussian(())


def test_separated_participations_are_covered() -> None:
    """Guarantee: never below the worst of all patterns."""
    clips = np.array([1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 0.2, 2.5])
    workload = Workload(MinSeparation(8, 3, 2), 0.8, clips)
    matrix = dense(workload)
    patterns = [
        held
        for count in (1, 2, 3)
        for held in itertools.combinations(range(8), count)
        if all(later - earlier >= 2 for earlier, later in itertools.pairwise(held))
    ]
    worst = max(float(np.linalg.norm(matrix[:, list(held)] @ clips[list(held)])) for held in patterns)
    found = ScheduledGaussian(SIZES, 0.8).certified(workload)
    assert worst <= found.value * (1 + 1e-12) <= 1.2 * worst
    moved = [
        max(sum(0.8 ** (t - i) * clips[i] for i in held if i <= t) for held in patterns if min(held) <= t)
        for t in range(8)
    ]
    assert np.all(max_displacements(workload) <= np.array(moved) * (1 + 1e-12))


@pytest.mark.parametrize("order", [FixedOrder(6, 6), FixedOrder(6, 3)])
def test_sums_that_restart_are_refused(order: FixedOrder) -> None:
    """Two epochs of 3 places and period 2 were charged 30.98, "exactly", where the truth is 21.93."""
    with pytest.raises(InputError, match="built for period = None, the workload has period = 2"):
        ScheduledGaussian(SIZES[:6]).certified(Workload(order, 1.0, np.ones(6), period=2))
