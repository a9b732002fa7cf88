"""Who takes part when, drawn in secret: against definitions, and what is charged against samples."""

import itertools
import json
import math
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

import fedpriv.core.random
from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.gaussian import Relation
from fedpriv.core.errors import InputError
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.registry import participation_from_data
from fedpriv.participation.secret import BalancedSubsampling, PoissonSampling, RandomAllocation, SecretOrder
from fedpriv.plan.sums import RunningSums
from fedpriv.scenario.load import resolve_cell
from tests.conftest import small_tree
from tests.engines.test_engines import run
from tests.participation.builders import coins, tabulate


@pytest.mark.parametrize("groups", [1, 2, 4, 12])
def test_allocation_has_every_record_in_one_round_of_its_group_in_every_epoch(groups: int) -> None:
    order = RandomAllocation(36, 12, groups)
    table = tabulate(order, 30)
    for epoch in range(3):
        assert np.all(table[:, 12 * epoch : 12 * epoch + 12].sum(1) == 1)
    record, place = np.nonzero(table)
    assert np.array_equal(record % groups, place % groups)


def test_allocation_is_uniform_and_independent_across_epochs_silos_and_keys() -> None:
    """χ² of 8 rounds, and of pairs of rounds of two epochs, two silos and two keys: false alarm 4e-6 each."""
    order = RandomAllocation(16, 8)
    bins = [
        np.nonzero(tabulate(order, 2000, silo, seed).reshape(-1, 2, 8))[2].reshape(-1, 2)
        for silo, seed in ((0, 0), (1, 0), (0, 1))
    ]
    assert stats.chisquare(np.bincount(bins[0][:, 0], minlength=8)).pvalue > 4e-6
    for first, second in ((bins[0][:, 0], bins[0][:, 1]), (bins[0], bins[1]), (bins[0], bins[2])):
        pairs = np.bincount(8 * first.ravel() + second.ravel(), minlength=64)
        assert stats.chisquare(pairs).pvalue > 4e-6


def test_secret_rounds_of_a_record_do_not_depend_on_the_number_of_records() -> None:
    """The round of a record is a function of key, silo, epoch and row alone: neighbours have the same coins."""
    for order in (RandomAllocation(24, 12, 3), PoissonSampling(24, 12, 3)):
        assert np.array_equal(tabulate(order, 2), tabulate(order, 50)[:24])


def test_poisson_sampling_includes_records_at_its_rate_in_rounds_of_their_group_only() -> None:
    order = PoissonSampling(24, 12, 3)
    assert order.rate == 0.25
    table = tabulate(order, 500)
    record, place = np.nonzero(table)
    assert np.array_equal(record % 3, place % 3)
    trials = 6000 * 8
    assert abs(table.sum() - trials * 0.25) < 4.5 * np.sqrt(trials * 0.25 * 0.75)


@pytest.mark.parametrize("rounds", [1, 5, 13, 24])
@pytest.mark.parametrize("groups", [1, 4, 12])
def test_poisson_sampling_charges_every_round_in_which_a_record_may_be_sampled(rounds: int, groups: int) -> None:
    """Also where groups do not divide the rounds: 13 rounds, 4 groups, z = 1 told ε 4.57 of 5.12."""
    order = PoissonSampling(rounds, 12, groups)
    coins_of_group = np.zeros(groups, np.int64)
    for t in range(1, rounds + 1):
        coins_of_group[order.group_rows(t).start] += 1
    assert order.guarantee_for_noise(1.0, "zero-out").rounds == coins_of_group.max()


def test_random_integers_are_redrawn_where_the_modulus_would_bias_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 bits the last ones that do not fill a round of choices are left out."""
    attempts = []

    def random_bits(encrypt: object, count: int, owner: int, t: int, attempt: int) -> NDArray[np.uint64]:
        attempts.append(attempt)
        last = [[2**64 - 1, 5, 2**64 - 2], [2**64 - 1, 7, 8], [4, 7, 8]]
        return np.array(last[attempt], np.uint64)

    monkeypatch.setattr(fedpriv.core.random, "_random_bits", random_bits)
    assert coins().numbers(3, 3, 0, 0).tolist() == [1, 2, 2]  # 2^64 - 1 is a multiple of 3: only it is left out
    assert attempts == [0, 1, 2]
    attempts.clear()
    assert coins().numbers(3, 4, 0, 0).tolist() == [3, 1, 2]
    assert attempts == [0]


def test_random_bins_and_bernoulli_draws_are_uncorrelated() -> None:
    same, size = coins(), 20_000
    bits = [same.bernoulli(size, 0.5, 0, 1), same.numbers(size, 2, 0, 1) == 0, same.numbers(size, 2, 0, 2) == 0]
    correlations = np.corrcoef(np.array(bits, np.float64)) - np.eye(3)
    assert np.abs(correlations).max() < 4.5 / np.sqrt(size)


def test_truncated_random_allocation_is_charged_for_whole_epochs() -> None:
    order = RandomAllocation(36, 12, 2)
    assert [order.truncate(rounds) for rounds in (0, 13, 36)] == [order] * 3
    assert RandomAllocation(13, 12).epochs == 2
    assert PoissonSampling(36, 12).truncate(13) == PoissonSampling(13, 12)
    for rounds in (-1, 37):
        with pytest.raises(ValueError, match=f"{rounds} rounds of 36"):
            order.truncate(rounds)


def test_every_round_has_the_rows_of_one_group_and_no_other_round_exists() -> None:
    order = PoissonSampling(5, 4, 2)
    rows = [list(range(8)[order.group_rows(t)]) for t in range(1, 6)]
    assert rows == [[0, 2, 4, 6], [1, 3, 5, 7], [0, 2, 4, 6], [1, 3, 5, 7], [0, 2, 4, 6]]
    for t in (0, -1, 6):
        with pytest.raises(ValueError, match=f"round {t} is not one of 1 … 5"):
            order.group_rows(t)


def test_the_least_noise_of_an_allocation_is_of_its_bins_and_epochs() -> None:
    """About the least: its ε is the target's up to a thousandth, and never above."""
    guarantee = RandomAllocation(36, 12, 2).calibrate(2.0, 1e-3, "zero-out")
    assert guarantee == AllocatedGaussian(guarantee.noise_multiplier, bins=6, epochs=3)
    assert 1.998 < guarantee.epsilon_of(1e-3) <= 2.0


ORDERS = [
    RandomAllocation(36, 12, 2),
    PoissonSampling(36, 12, 3),
    PoissonSampling(5, 12),
    BalancedSubsampling(8, 4),
]


@pytest.mark.parametrize("order", ORDERS)
def test_secret_orders_survive_json_and_missing_groups_default_to_one(order: SecretOrder) -> None:
    assert participation_from_data(json.loads(json.dumps(order.to_data()))) == order
    without = {key: value for key, value in PoissonSampling(5, 12).to_data().items() if key != "groups"}
    assert participation_from_data(without) == PoissonSampling(5, 12)  # as it was written before there were groups


def strategy(mechanism: Mechanism, workload: Workload) -> NDArray[np.float64]:
    """C = B^-1 A, with B from the noise that the mechanism adds."""
    state, rows = mechanism.start(), []
    for t, fresh in enumerate(torch.eye(workload.rounds, dtype=torch.float64), start=1):
        row, state = mechanism.noise(state, t, fresh)
        rows.append(row.numpy())
    lag = np.subtract.outer(np.arange(workload.rounds), np.arange(workload.rounds))
    sums = np.where(lag >= 0, workload.decay ** np.maximum(lag, 0.0), 0.0)
    if workload.period is not None:
        block = np.arange(workload.rounds) // workload.period
        sums *= block[:, None] == block
    return np.asarray(np.linalg.solve(np.array(rows), sums))


CLIPS = np.array([1.0, 2.0, 0.5, 3.0, 1.0, 1.0, 2.5, 1.0, 1.0, 1.0, 1.0, 2.0])
MECHANISMS: dict[str, tuple[Any, ...]] = {
    "independent": (IndependentGaussian(), 1, 0.0),
    "banded": (BandedSquareRoot(1.0, 4), 4, 1.0),
    "banded, decayed": (BandedSquareRoot(0.9, 3), 3, 0.9),
    "leaf": (LeafGaussian(0.5, 4, 3.0), 1, 0.5, 4),
}
"""Mechanism, bands, decay and period."""


@pytest.mark.parametrize("name", MECHANISMS)
def test_blocks_match_the_banded_strategy_matrix_and_too_few_groups_are_refused(name: str) -> None:
    """κ against C, computed from the noise: what it is for the accountant of independent rounds."""
    mechanism, bands, *form = MECHANISMS[name]
    workload = Workload(RandomAllocation(12, 12, 4), form[0], CLIPS, *form[1:])
    blocks, matrix = mechanism.blocks(workload), strategy(mechanism, workload)
    assert blocks is not None
    assert blocks.bands == bands
    np.testing.assert_allclose(blocks.norms, np.linalg.norm(matrix, axis=0), rtol=1e-9)
    lag = np.subtract.outer(np.arange(12), np.arange(12))
    assert np.abs(matrix[(lag < 0) | (lag >= bands)]).max() < 1e-12
    sums = RunningSums(mechanism, workload, "zero-out")
    largest = np.max(CLIPS * np.linalg.norm(matrix, axis=0))
    assert largest * (1 - 1e-12) <= sums.block_displacement(4) <= largest * (1 + 1e-9)
    if bands > 1:
        with pytest.raises(InputError, match=f"{bands} bands of correlated noise and federation.groups = "):
            sums.block_displacement(bands - 1)


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("kind", [IndependentGaussian, BinaryTree])
def test_mechanisms_with_unbounded_influence_of_a_record_are_refused_under_poisson_sampling(
    kind: type[Mechanism], decay: float
) -> None:
    mechanism: Mechanism = BinaryTree(decay) if kind is BinaryTree else IndependentGaussian()
    sums = RunningSums(mechanism, Workload(PoissonSampling(12, 12, 12), decay, CLIPS), "zero-out")
    with pytest.raises(InputError, match="a record's influence is unbounded there"):
        sums.block_displacement(12)


# Balanced iteration subsampling


Floats = NDArray[np.float64]


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_every_record_takes_part_in_as_many_rounds_as_there_are_epochs(groups: int) -> None:
    order = BalancedSubsampling(24, 6, groups)
    table = tabulate(order, 50, seed=1)
    assert (table.sum(1) == 4).all()
    for group in range(groups):
        others = [place for place in range(24) if place % groups != group]
        assert not table[group::groups][:, others].any()
    assert (tabulate(order, 50, seed=1) == table).all()
    assert (tabulate(order, 50, silo=1, seed=1) != table).any()


def test_balanced_subsampling_draws_every_set_of_rounds_equally_often() -> None:
    """Chi-square over the 20 sets of 3 of 6 rounds; at the fixed seed, false alarm rate 1e-6."""
    table = tabulate(BalancedSubsampling(6, 2), 10_000, seed=1)
    counts = Counter(tuple(np.flatnonzero(row)) for row in table)
    expected = len(table) / 20
    assert set(counts) == set(itertools.combinations(range(6), 3))
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 64.0


def test_records_are_drawn_independently_of_each_other() -> None:
    """Of pairs of neighbours a share of 1/20 has the same set of rounds, ± 5 standard errors."""
    table = tabulate(BalancedSubsampling(6, 2), 10_000, seed=1)
    same = (table[1:] == table[:-1]).all(1).mean()
    assert abs(same - 0.05) < 5.0 * math.sqrt(0.05 * 0.95 / len(table))


@cache
def ratios(relation: Relation, z: float, rounds: int, passes: int, draws: int = 40_000) -> tuple[Floats, Floats]:
    """ln of with over without in `draws` samples of either, for k of T rounds; opposite ones under replace-one."""
    draw = np.random.default_rng(rounds * 100 + passes)

    def of_sets(releases: Floats, sign: float) -> Floats:
        sums = np.zeros((passes + 1, draws))
        sums[0] = 1.0
        for each in np.exp(sign * releases / z**2 - 0.5 / z**2).T:
            sums[1:] += sums[:-1] * each
        return np.log(sums[-1] / math.comb(rounds, passes))

    def sampled(sign: float) -> Floats:
        releases = z * draw.normal(size=(draws, rounds))
        sets = np.argsort(draw.random((draws, rounds)), axis=1)[:, :passes]
        np.put_along_axis(releases, sets, np.take_along_axis(releases, sets, 1) + sign, 1)
        return releases

    other = 0.0 if relation == "zero-out" else -1.0
    with_it, without = sampled(1.0), sampled(other)

    def loss(releases: Floats) -> Floats:
        return of_sets(releases, 1.0) - (of_sets(releases, -1.0) if other else 0.0)

    return loss(with_it), -loss(without)


@pytest.mark.every(12)
@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    ("z", "rounds", "passes"),
    [(2.0, 60, 10), (1.5, 60, 10), (1.0, 60, 4), (1.0, 20, 2), (3.0, 20, 10), (2.0, 8, 4)],
)
def test_charged_delta_of_balanced_subsampling_is_never_below_monte_carlo(
    relation: Relation, z: float, rounds: int, passes: int
) -> None:
    """Guarantee: δ at 6 values of ε in both directions, less 4 standard errors; 72 points in all."""
    promise = BalancedSubsampling(rounds, rounds // passes).guarantee_for_noise(z, relation)
    assert promise == AllocatedGaussian(z, rounds // passes, passes, relation)
    curve = promise.curve
    for losses in ratios(relation, z, rounds, passes):
        for epsilon in (0.0, 0.5, 1.0, 2.0, 3.0, 5.0):
            over = np.maximum(0.0, -np.expm1(epsilon - losses))
            error = float(over.std()) / math.sqrt(len(over))
            assert float(over.mean()) - 4.0 * error <= float(curve(np.array([epsilon]))[0])


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_epsilon_of_balanced_subsampling_is_within_six_percent_of_monte_carlo(relation: Relation) -> None:
    """At δ = 1e-2, where 40,000 samples tell: the bound is at most 6 % above."""
    for z, rounds, passes in ((2.0, 60, 10), (1.0, 20, 2)):
        promise = BalancedSubsampling(rounds, rounds // passes).guarantee_for_noise(z, relation)
        epsilon = 0.94 * promise.epsilon_of(1e-2)
        samples = ratios(relation, z, rounds, passes)
        assert max(np.maximum(0.0, -np.expm1(epsilon - losses)).mean() for losses in samples) > 1e-2


@pytest.mark.slow
def test_engines_agree_on_balanced_subsampling() -> None:
    tree = small_tree(
        federation={"silos": 2, "rounds": 8, "epochs": 2, "batch": 4, "sampling": "balanced"},
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "zero-out", "epsilon": 1.0},
        run={"dtype": "float64", "evaluations": 2, "noise": "per-silo"},
    )
    cell = resolve_cell(tree, "test")
    ((vectorized,), _), ((inprocess,), _) = (run(engine, cell) for engine in ("vectorized", "inprocess"))
    np.testing.assert_allclose(vectorized.cell_outcome.model, inprocess.cell_outcome.model, rtol=1e-9, atol=1e-13)
    order = vectorized.cell_outcome.releases[0].schedule
    assert order == BalancedSubsampling(8, 4)
    assert "2 of 8 rounds" in order.words
