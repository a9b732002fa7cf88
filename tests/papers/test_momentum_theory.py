"""Tran & Cutkosky's algorithms: golden runs, parameters, the length of a step, and the measured table of noise."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from benchmarks.momentum_crossing import crossing_table, momentum, noise, reduced_noise, tree_noise
from fedpriv.accounting.gaussian import mu_of
from fedpriv.core.errors import InputError
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.differences import AlignedDifferences, paper_window_counts
from fedpriv.noise.sliding import SlidingDifferences
from fedpriv.noise.tree import BinaryTree
from fedpriv.papers.base import Problem
from fedpriv.papers.table import find_algorithm
from fedpriv.papers.tran_cutkosky import (
    NormalizedSGD,
    movement_bound,
    reduced_parameters,
    simple_noise_multiplier,
    tree_gradient_bound,
    tree_parameters,
)
from fedpriv.participation.orders import FixedOrder
from tests import oracle_momentum as oracle
from tests.papers.builders import draw_normals, drive


def test_theorem_6_parameters_match_a_calculation_by_hand() -> None:
    found = tree_parameters(records=1000, dimension=100, epsilon=1.0, delta=1e-6)
    assert found.rounds == 2396
    assert found.alpha == pytest.approx(1e-3, rel=1e-3)
    assert found.alpha >= 1e-3
    assert found.step == pytest.approx(1.0 / math.sqrt(1000 * 2396))


def test_theorem_9_parameters_match_a_calculation_by_hand() -> None:
    found = reduced_parameters(records=1000, dimension=100, epsilon=1.0)
    assert found.rounds == 464_158
    assert found.alpha == pytest.approx(1e-3, rel=1e-5)
    assert found.mixing == pytest.approx(0.046, abs=5e-4)
    assert found.mixing == pytest.approx(math.sqrt(1000 / 464_158))


def test_theorem_9_needs_gamma_of_at_most_a_half() -> None:
    assert reduced_parameters(1000, 100, ENOUGH * 1.001).mixing <= 0.5


@pytest.mark.parametrize(
    ("epsilon", "delta", "paper", "exact"),
    [(0.5, 1e-5, 13.57, 7.03), (1.0, 1e-5, 6.79, 3.73), (2.0, 1e-6, 3.72, 2.23), (8.0, 1e-5, 0.848, 0.600)],
)
def test_the_papers_noise_multipliers_exceed_the_exact_gaussian_ones(
    epsilon: float, delta: float, paper: float, exact: float
) -> None:
    assert simple_noise_multiplier(epsilon, delta) == pytest.approx(paper, rel=2e-3)
    assert simple_noise_multiplier(epsilon, delta, reduced=True) == pytest.approx(2.0 * paper, rel=2e-3)
    assert 1.0 / mu_of(epsilon, delta) == pytest.approx(exact, rel=2e-3)


def test_the_simple_noise_multiplier_would_violate_delta_at_a_large_epsilon() -> None:
    """The paper's condition is printed the wrong way round: at ε = 20, δ = 0.1 the true δ is 0.543."""
    mu = 20.0 / (2.0 * math.sqrt(math.log(10.0)))
    true_delta = norm.cdf(-20.0 / mu + mu / 2) - math.exp(20.0) * norm.cdf(-20.0 / mu - mu / 2)
    assert true_delta == pytest.approx(0.543, abs=5e-4)
    assert simple_noise_multiplier(2.3, 0.1) > 0.0


ENOUGH = 2.0 * math.sqrt(2.0 * 100) / 1000
"""The least ε of Theorem 9: T ≥ 4N is εN ≥ 2√2 √d, which the paper forgets."""
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: simple_noise_multiplier(20.0, 0.1), "ln"),
    (lambda: paper_window_counts(100, 1), "exact"),
    (lambda: paper_window_counts(100, 2), "exact"),
    (lambda: paper_window_counts(100, 5), "exact"),
    (lambda: tree_parameters(3, 1, 0.1, 1e-6), "Theorem 6"),
    (lambda: reduced_parameters(1000, 100, ENOUGH * 0.99), "gamma"),
]


@pytest.mark.parametrize(("ask", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_parameters_outside_the_theorems_are_refused(ask: Callable[[], object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        ask()


def test_the_papers_window_counts_match_golden_values() -> None:
    assert paper_window_counts(640, 64) == (18.0, 240.0)


def test_the_corrected_gradient_bound_falls_with_more_records() -> None:
    few, many = (tree_gradient_bound(1.0, 1.0, 1.0, n, 100, 1.0, 1e-6) for n in (10**4, 10**6))
    assert many < few / 5


def test_theorem_6_gives_no_bound_for_a_clip_norm_below_the_lipschitz_constant() -> None:
    """Gains: with a clip of 1 % of the Lipschitz constant the bound was a hundredth, and nothing was proved."""
    row = find_algorithm("momentum-tree")
    problem = Problem(10, 1.0, 1.0, False, 1, FixedOrder(1000, 1000), epsilon=1.0, gap=1.0)
    bounds = {}
    for clip in (0.01, 1.0, 2.0):
        (asked,) = row.theorems(row.settings.model_validate({"clip": clip}), problem)
        bounds[clip] = asked.numbers.get("bound")
    assert bounds[0.01] is None
    assert bounds[1.0] == tree_gradient_bound(1.0, 1.0, 1.0, 1000, 10, 1.0, 1e-5)
    assert bounds[2.0] == tree_gradient_bound(1.0, 2.0, 1.0, 1000, 10, 1.0, 1e-5)


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


def step_lengths(
    optimizer: NormalizedSGD, start: torch.Tensor, releases: Iterable[torch.Tensor]
) -> Iterator[torch.Tensor]:
    queries = [optimizer.query(state).double() for state in drive(optimizer, start, releases)]
    return ((after - before).norm(dim=-1) for before, after in itertools.pairwise(queries))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_normalized_step_has_the_step_length_within_the_movement_bound(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    releases = [torch.randn(3, 50_000, generator=generator, dtype=dtype) * 10.0 ** (t - 4) for t in range(1, 8)]
    for moved in step_lengths(NormalizedSGD(0.3), torch.zeros(3, 50_000, dtype=dtype), releases):
        assert bool((moved <= movement_bound(0.3)).all())
        assert moved.tolist() == pytest.approx([0.3] * 3, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(size=st.integers(1, 30), step=powers(-12.0, 2.0), scale=powers(-3.0, 6.0), seed=st.integers(0, 10**6))
@settings(max_examples=60, derandomize=True)
def test_no_rounded_normalized_step_exceeds_the_movement_bound(
    dtype: torch.dtype, size: int, step: float, scale: float, seed: int
) -> None:
    """Noise is sized for steps of η (1 + 1e-6): far from 0, where a step is rounded to its type, too."""
    start, *releases = draw_normals(seed, 20, 3, size)
    lengths = step_lengths(
        NormalizedSGD(step), (scale * start).to(dtype), [vector.to(dtype) for vector in releases]
    )
    assert all(bool((moved <= movement_bound(step)).all()) for moved in lengths)


def test_a_momentum_of_zero_leaves_the_iterate_unchanged() -> None:
    optimizer, start = NormalizedSGD(0.3), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    *_, state = drive(optimizer, start, [torch.tensor([[0.0, 0.0], [0.0, 5.0]])])
    assert optimizer.query(state).tolist() == [[1.0, 2.0], [3.0, pytest.approx(3.7)]]


@pytest.mark.parametrize("output_round", [1.0, 3.0, math.inf])
def test_the_output_is_the_chosen_iterate_or_the_last(output_round: float) -> None:
    optimizer = NormalizedSGD(1.0, output_round)
    *_, state = drive(optimizer, torch.zeros(1), torch.ones(5, 1))
    assert float(optimizer.output(state)) == -(min(output_round, 6.0) - 1.0)


def test_stacked_replicates_may_publish_different_iterates() -> None:
    optimizer = NormalizedSGD(torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0], [math.inf]]))
    *_, state = drive(optimizer, torch.zeros(2, 1), torch.ones(4, 2, 1))
    assert optimizer.output(state).tolist() == [[-1.0], [-4.0]]


def test_the_random_output_round_is_independent_of_the_noise_and_in_the_theorems_range() -> None:
    row = find_algorithm("momentum-tree")
    settings = row.settings.model_validate({"clip": 1.0, "output": "random"})
    chosen = set()
    for seed in range(40):
        problem = Problem(2, 1.0, 1.0, convex=False, batch=1, schedule=FixedOrder(8, 4), seed=seed)
        optimizer = row.optimizer(settings, problem, 0.0)
        assert optimizer == row.optimizer(settings, problem, 1.0)
        chosen.add(optimizer.output_round)
    assert chosen <= set(map(float, range(1, 9)))
    assert {1.0, 8.0} <= chosen


TREE = {
    1: (0.068613147121, 0.057735972479, 0.110686696361, 0.030907326579, 0.903684429796, -0.526894440622),
    7: (0.114467022682, -0.028398638570, 0.086020189033, -0.071676210017, 0.361139866827, -0.361508731018),
    13: (0.017290618169, -0.067429108050, 0.000107606213, -0.044093803241, -0.053048885985, -0.117021018899),
}
REDUCED = {
    1: (0.068613147121, 0.057735972479, 0.055072957598, 0.072139487770, 0.939319343247, -0.579484953897),
    7: (0.117172754636, -0.038511428541, 0.126771405325, -0.016179723973, 0.389523132869, -0.530251913420),
    10: (0.119097589776, -0.091119229627, 0.127673966663, -0.111110304189, 0.156723361295, -0.342845516142),
    13: (0.032670438303, -0.067763643660, 0.043314216257, -0.069804732554, -0.028601839959, -0.116641004326),
}


GOLDEN = oracle.GOLDEN_START, oracle.golden_gradient, oracle.golden_noise


def golden_tree_run() -> list[oracle.Step]:
    return oracle.tree_run(*GOLDEN, oracle.GOLDEN_ROUNDS, oracle.GOLDEN_ALPHA, oracle.GOLDEN_STEP, std=0.05)


def golden_reduced_run() -> list[oracle.Step]:
    return oracle.reduced_run(
        *GOLDEN,
        oracle.GOLDEN_ROUNDS,
        oracle.GOLDEN_PLACES,
        oracle.GOLDEN_ALPHA,
        oracle.GOLDEN_MIXING,
        oracle.GOLDEN_STEP,
        oracle.GOLDEN_STDS,
    )


@pytest.mark.parametrize(("run", "golden"), [(golden_tree_run, TREE), (golden_reduced_run, REDUCED)])
def test_the_reference_implementations_reproduce_the_golden_runs(
    run: Callable[[], list[oracle.Step]], golden: dict[int, tuple[float, ...]]
) -> None:
    steps = run()
    for t, expected in golden.items():
        np.testing.assert_allclose(np.concatenate(steps[t - 1]), expected, atol=1e-11)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("rounds_per_epoch", "epochs", "tree", "smooth", "smoother", "balanced"),
    [
        (50, 10, 0.414, 0.656, 0.407, 0.392),
        (50, 40, 0.827, 0.983, 0.561, 0.472),
        (50, 100, 1.309, 1.236, 0.687, 0.524),
        (200, 40, 0.293, 0.337, None, None),
        (200, 80, 0.415, 0.403, None, None),
    ],
)
def test_the_noise_of_tree_and_sliding_differences_matches_a_prototype(
    rounds_per_epoch: int, epochs: int, tree: float, smooth: float, smoother: float | None, balanced: float | None
) -> None:
    """A prototype's figures, to 1 %; it charges Σλ = 1, fedpriv the worst record of all groups together: less."""
    assert tree_noise(rounds_per_epoch, epochs) == pytest.approx(tree, abs=6e-4)
    for smoothness, is_balanced, expected in ((1.0, False, smooth), (0.1, False, smoother), (0.1, True, balanced)):
        if expected is not None:
            found = reduced_noise(SlidingDifferences, rounds_per_epoch, epochs, smoothness, is_balanced)
            assert 0.95 * expected < found < 1.01 * expected


@pytest.mark.parametrize(("smoothness", "before", "after"), [(1.0, 40, 100), (0.1, 5, 10)])
def test_algorithm_2_has_less_noise_than_the_tree_only_for_many_epochs(
    smoothness: float, before: int, after: int
) -> None:
    """Near 80 epochs if L = G, near 10 (less with γ = η N L / G) if L = G/10, at N = 50."""
    few, many = (reduced_noise(SlidingDifferences, 50, epochs, smoothness) for epochs in (before, after))
    assert few > tree_noise(50, before)
    assert many < tree_noise(50, after)


@pytest.mark.parametrize(("rounds_per_epoch", "epochs"), [(50, 10), (50, 100), (51, 10), (51, 100)])
def test_aligned_differences_have_15_to_26_percent_less_noise_than_sliding_ones(
    rounds_per_epoch: int, epochs: int
) -> None:
    """15 to 26 % less than windows that slide, L = G."""
    kinds = (SlidingDifferences, AlignedDifferences)
    sliding, aligned = (reduced_noise(kind, rounds_per_epoch, epochs, 1.0) for kind in kinds)
    assert 0.74 < aligned / sliding < 0.85


@pytest.mark.slow
def test_noise_grows_like_the_root_of_epochs_for_trees_and_the_fourth_root_for_differences() -> None:
    (few, many) = crossing_table({50: (100, 400)})
    assert many.tree / few.tree == pytest.approx(2.0, rel=0.01)
    assert many.sliding / few.sliding == pytest.approx(2.0**0.5, rel=0.02)
    assert many.aligned / few.aligned == pytest.approx(2.0**0.5, rel=0.02)


def test_tree_noise_on_momentum_is_below_two_fifths_of_independent_noise() -> None:
    workload = momentum(200, 10)
    assert noise(BinaryTree(workload.decay), workload) < 0.4 * noise(IndependentGaussian(), workload)
