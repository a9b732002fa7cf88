# ruff: noqa: E501
"""The parts of the Goldstein rows together reproduce runs of an independent program to 1e-11."""

import math

import numpy as np
import pytest
import torch

from fedpriv.loss.estimators import VarianceReducedGradient
from fedpriv.loss.goldstein import RandomSmoothing
from fedpriv.loss.objective import Batch, Objective, Query
from fedpriv.noise.diagonal import LeafGaussian
from fedpriv.noise.tree import BinaryTree, column_squared_norms
from tests.noise.matrices import streamed_matrix
from tests.papers.builders import vectors
from tests.papers.goldstein_golden import (
    ALPHA,
    LOSS,
    PERIOD,
    ROUNDS,
    ExactlySmoothed,
    GoldenDirections,
    Trace,
    golden_run,
    records,
)

NEVER = 1e9
EXACT = ExactlySmoothed(2, 1, feature_norm=1.0, dtype=torch.float64)


def smoothed(order: str, shared: bool) -> RandomSmoothing:
    anchor = 1 if order == "first" else 2
    return RandomSmoothing(LOSS, ALPHA, order, 2, anchor, shared, GoldenDirections())  # type: ignore[arg-type]


def node_noise(t: int) -> torch.Tensor:
    period, place = (t - 1) // PERIOD, (t - 1) % PERIOD + 1
    return 0.05 * vectors(*(math.sin(1 + 5 * period + 7 * place + 11 * c) for c in (0, 1)))


def single_pass(objective: Objective, anchor_clip: float = NEVER, clip: float = NEVER) -> Trace:
    sizes = [3 if (t - 1) % PERIOD == 0 else 2 for t in range(1, ROUNDS + 1)]
    starts = [sum(sizes[: t - 1]) for t in range(1, ROUNDS + 1)]
    estimator, fresh = VarianceReducedGradient(anchor_clip, clip, PERIOD), map(node_noise, range(1, ROUNDS + 1))
    batches = [records(start, size) for start, size in zip(starts, sizes, strict=True)]
    return golden_run(objective, estimator, BinaryTree(period=PERIOD), list(fresh), batches)


def multi_pass(objective: Objective) -> Trace:
    fresh = [0.02 * vectors(*(math.sin(2 + 3 * t + 11 * c) for c in (0, 1))) for t in range(1, ROUNDS + 1)]
    estimator, mechanism = VarianceReducedGradient(NEVER, NEVER, PERIOD), LeafGaussian(period=PERIOD, first=2.5)
    return golden_run(objective, estimator, mechanism, fresh, [records(0, 5)] * ROUNDS)


GOLDEN = {
    "first order": (
        single_pass(smoothed("first", shared=False)),
        {
            2: ((0.706344849225, -0.400056399339), (-0.496063903551, 0.140127588806), (-0.463549511543, 0.178255511330)),
            5: ((0.815192634572, -0.409810203488), (0.411483371258, -0.033071960218), (0.432491723100, -0.078350878318)),
            11: ((0.958954018000, -0.244655561723), (-0.361972558015, -0.297774725669), (-0.341018811458, -0.388952405472)),
        },
        [(0.708194285177, -0.400894993015), (0.813992806445, -0.409556153729), (0.903976152229, -0.369198318428)],
    ),
    "clipped": (
        single_pass(smoothed("first", shared=False), 0.6, 0.5),
        {
            2: ((0.704454459634, -0.400851763660), (-0.412236047983, 0.154769873312), (-0.379721655976, 0.192897795836)),
            11: ((0.935626335019, -0.396813170887), (-0.422048609768, -0.406913886449), (-0.401094863211, -0.498091566252)),
        },
        [],
    ),
    "zeroth order": (
        single_pass(smoothed("zeroth", shared=False)),
        {
            2: ((0.702507354781, -0.400923453333), (-0.169742421074, 0.148670556795), (-0.137228029066, 0.186798479319)),
            11: ((0.558295119747, -0.498958555856), (-0.144979365731, 0.010576553919), (-0.124025619174, -0.080601125885)),
        },
        [(0.703021233301, -0.401756035241), (0.732892858132, -0.440183900911), (0.696222698499, -0.491449443105)],
    ),
    "zeroth order, shared": (
        single_pass(smoothed("zeroth", shared=True)),
        {
            2: ((0.702507354781, -0.400923453333), (-0.132748845511, 0.022854541251), (-0.100234453503, 0.060982463775)),
            11: ((0.586032076064, -0.486302888701), (0.016977801063, -0.150705520712), (0.037931547620, -0.241883200516)),
        },
        [],
    ),
    "exact": (
        single_pass(EXACT),
        {
            2: ((0.701178380950, -0.401356508484), (-0.088247293562, 0.037794951294), (-0.055732901554, 0.075922873818)),
            11: ((0.545289274190, -0.465876871972), (-0.024284523729, -0.081691040330), (-0.003330777171, -0.172868720134)),
        },
        [],
    ),
    "multi pass": (
        multi_pass(smoothed("zeroth", shared=False)),
        {
            2: ((0.699765118206, -0.395105657368), None, (0.093739460264, -0.187040388819)),
            11: ((0.605174033760, -0.126066805506), None, (-0.004018837960, -0.006846045337)),
        },
        [(0.699335095525, -0.394484187221), (0.684069731238, -0.341434650569), (0.651402784070, -0.248600249141)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_goldstein_runs_match_an_independent_program_to_eleven_digits(name: str) -> None:
    trace, rows, windows = GOLDEN[name]
    for t, (query, total, released) in rows.items():
        assert trace.queries[t - 1].tolist() == pytest.approx(query, abs=1e-11)
        assert trace.released[t - 1].tolist() == pytest.approx(released, abs=1e-11)
        if total is not None:
            assert trace.sums[t - 1].tolist() == pytest.approx(total, abs=1e-11)
    for measured, window in zip(trace.windows, windows, strict=False):
        assert measured.tolist() == pytest.approx(window, abs=1e-11)


def test_the_number_of_clipped_records_matches_the_golden_run() -> None:
    assert GOLDEN["clipped"][0].clipped == 11
    assert GOLDEN["first order"][0].clipped == 0


@pytest.mark.parametrize("period", [1, 3, 4, 20])
def test_the_variance_reduced_sum_equals_the_full_gradient_without_noise(period: int) -> None:
    """g_t = ∇F_α(z_t) at every t, for every period, also where the rounds are no multiple of it."""
    batch, estimator = records(0, 7), VarianceReducedGradient(NEVER, NEVER, period)
    nothing = [vectors(0.0, 0.0)] * ROUNDS
    trace = golden_run(EXACT, estimator, BinaryTree(period=period), nothing, [batch] * ROUNDS)
    weights = torch.full((7,), 1 / 7, dtype=torch.float64)
    for query, total in zip(trace.queries, trace.sums, strict=True):
        expected = EXACT.increment(Query([query]), Batch(batch, weights), NEVER).total
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rounds_per_tree", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_every_release_of_every_period_has_noise(rounds_per_tree: int) -> None:
    """As printed the last step of a period has none, nor has any step for Σ = 1: the tree's index runs to Σ here."""
    tree, rounds = BinaryTree(period=rounds_per_tree), 3 * rounds_per_tree
    for t, row in enumerate(streamed_matrix(tree, rounds), start=1):
        place = (t - 1) % rounds_per_tree + 1
        assert float(np.sum(row**2)) == place.bit_count()
        assert not row[: t - place].any()  # nothing of the tree before


def test_leaves_of_a_thirteen_round_tree_are_in_the_expected_number_of_nodes() -> None:
    """Σ = 13: the nodes that hold a leaf, the exact price of a record."""
    assert column_squared_norms(13, 1.0).tolist() == [4, 3, 3, 2, 3, 2, 2, 1, 3, 2, 2, 1, 1]
