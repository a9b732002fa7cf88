"""Who takes part when, drawn in secret: against the definitions, written out record by record."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

import fedpriv.core.random
from fedpriv.core.errors import InputError
from fedpriv.core.random import SamplingRandomness, simulation_noise
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.registry import participation_from_data
from fedpriv.participation.secret import PoissonSampling, RandomAllocation, SecretOrder
from fedpriv.plan.sums import RunningSums

BATCH = 30


def coins(seed: int = 0) -> SamplingRandomness:
    return simulation_noise(seed, np.float64).sampling_randomness()


def rounds_of(order: SecretOrder, silo: int = 0, seed: int = 0, batch: int = BATCH) -> NDArray[np.bool_]:
    """Whether each record (row) takes part in each round (column)."""
    found = np.zeros((order.batches_per_silo * batch, order.rounds), np.bool_)
    for t in range(1, order.rounds + 1):
        found[order.select_rows(t, batch, silo, lambda: coins(seed)), t - 1] = True
    return found


@pytest.mark.parametrize("groups", [1, 2, 4, 12])
def test_allocation_has_every_record_in_one_round_of_its_group_in_every_epoch(groups: int) -> None:
    order = RandomAllocation(36, 12, groups)
    found = rounds_of(order)
    for epoch in range(3):
        assert np.all(found[:, 12 * epoch : 12 * epoch + 12].sum(1) == 1)
    record, place = np.nonzero(found)
    assert np.array_equal(record % groups, place % groups)


def test_allocation_is_uniform_and_anew_in_every_epoch_and_silo() -> None:
    """χ² of 8 rounds, and of pairs of rounds of two epochs, two silos and two keys: false alarm 4e-6 each."""
    order = RandomAllocation(16, 8)
    bins = [
        np.nonzero(rounds_of(order, silo, seed, 2000).reshape(-1, 2, 8))[2].reshape(-1, 2)
        for silo, seed in ((0, 0), (1, 0), (0, 1))
    ]
    assert stats.chisquare(np.bincount(bins[0][:, 0], minlength=8)).pvalue > 4e-6
    for first, second in ((bins[0][:, 0], bins[0][:, 1]), (bins[0], bins[1]), (bins[0], bins[2])):
        pairs = np.bincount(8 * first.ravel() + second.ravel(), minlength=64)
        assert stats.chisquare(pairs).pvalue > 4e-6


def test_records_choose_independently_of_how_many_others_there_are() -> None:
    """The round of a record is a function of key, silo, epoch and row alone: neighbours have the same coins."""
    few, many = rounds_of(RandomAllocation(24, 12, 3), batch=2), rounds_of(RandomAllocation(24, 12, 3), batch=50)
    assert np.array_equal(few, many[:24])
    drawn, drawn_of_many = (
        rounds_of(PoissonSampling(24, 12, 3), batch=2),
        rounds_of(PoissonSampling(24, 12, 3), batch=50),
    )
    assert np.array_equal(drawn, drawn_of_many[:24])


def test_poisson_throws_a_coin_in_every_round_of_a_group_and_in_no_other() -> None:
    order = PoissonSampling(24, 12, 3)
    assert order.rate == 0.25
    found = rounds_of(order, batch=500)
    record, place = np.nonzero(found)
    assert np.array_equal(record % 3, place % 3)
    trials = 6000 * 8
    assert abs(found.sum() - trials * 0.25) < 4.5 * np.sqrt(trials * 0.25 * 0.75)


@pytest.mark.parametrize("rounds", [1, 5, 13, 24])
@pytest.mark.parametrize("groups", [1, 4, 12])
def test_a_record_is_charged_for_every_round_in_which_a_coin_is_thrown_for_it(rounds: int, groups: int) -> None:
    """Also where groups do not divide the rounds: 13 rounds, 4 groups, z = 1 told ε 4.57 of 5.12."""
    order = PoissonSampling(rounds, 12, groups)
    coins_of_group = np.zeros(groups, np.int64)
    for t in range(1, rounds + 1):
        coins_of_group[order.group_rows(t).start] += 1
    assert order.guarantee_for_noise(1.0, "zero-out").rounds == coins_of_group.max()


def test_numbers_are_drawn_again_where_some_would_be_likelier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 bits the last ones that do not fill a round of choices are left out."""
    asked = []

    def words(encrypt: object, count: int, owner: int, t: int, attempt: int) -> NDArray[np.uint64]:
        asked.append(attempt)
        last = [[2**64 - 1, 5, 2**64 - 2], [2**64 - 1, 7, 8], [4, 7, 8]]
        return np.array(last[attempt], np.uint64)

    monkeypatch.setattr(fedpriv.core.random, "_random_bits", words)
    assert coins().numbers(3, 3, 0, 0).tolist() == [1, 2, 2]  # 2^64 - 1 is a multiple of 3: only it is left out
    assert asked == [0, 1, 2]
    asked.clear()
    assert coins().numbers(3, 4, 0, 0).tolist() == [3, 1, 2]
    assert asked == [0]


def test_bins_and_coins_are_different_streams() -> None:
    same, size = coins(), 20_000
    bits = [same.bernoulli(size, 0.5, 0, 1), same.numbers(size, 2, 0, 1) == 0, same.numbers(size, 2, 0, 2) == 0]
    correlations = np.corrcoef(np.array(bits, np.float64)) - np.eye(3)
    assert np.abs(correlations).max() < 4.5 / np.sqrt(size)


def test_a_run_that_stopped_is_charged_for_whole_epochs() -> None:
    order = RandomAllocation(36, 12, 2)
    assert order.truncate(13) == order
    assert RandomAllocation(13, 12).epochs == 2
    assert PoissonSampling(36, 12).truncate(13) == PoissonSampling(13, 12)
    with pytest.raises(ValueError, match="37 rounds of 36"):
        order.truncate(37)


@pytest.mark.parametrize(
    "order", [RandomAllocation(36, 12, 2), PoissonSampling(36, 12, 3), PoissonSampling(5, 12)]
)
def test_a_ledger_gives_back_what_it_was_given(order: SecretOrder) -> None:
    assert participation_from_data(order.to_data()) == order
    without = {key: value for key, value in PoissonSampling(5, 12).to_data().items() if key != "groups"}
    assert participation_from_data(without) == PoissonSampling(5, 12)  # as it was written before there were groups


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ((12, 12, 5), "groups = 5: groups share out the 12 rounds"),
        ((12, 0), "both are 1"),
        ((12, 12, 0), "groups"),
    ],
)
def test_groups_that_do_not_divide_an_epoch_are_refused(given: tuple[int, ...], line: str) -> None:
    for kind in (RandomAllocation, PoissonSampling):
        with pytest.raises(InputError, match=line):
            kind(*given)


def strategy(mechanism: Mechanism, workload: Workload) -> NDArray[np.float64]:
    """C = B^-1 A, with B from the noise that the mechanism adds."""
    import torch

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
MECHANISMS: dict[str, Callable[[], tuple[Mechanism, dict[str, Any], int]]] = {
    "independent": lambda: (IndependentGaussian(), {"decay": 0.0}, 1),
    "banded": lambda: (BandedSquareRoot(1.0, 4), {"decay": 1.0}, 4),
    "banded, decayed": lambda: (BandedSquareRoot(0.9, 3), {"decay": 0.9}, 3),
    "leaf": lambda: (LeafGaussian(0.5, 4, 3.0), {"decay": 0.5, "period": 4}, 1),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_columns_are_those_of_the_strategy_and_rounds_of_a_record_move_disjoint_blocks(name: str) -> None:
    """κ against C, computed from the noise: what it is for the accountant of independent rounds."""
    mechanism, form, bands = MECHANISMS[name]()
    workload = Workload(RandomAllocation(12, 12, 4), form["decay"], CLIPS, form.get("period"))
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
def test_what_a_record_moves_for_ever_is_refused(kind: type[Mechanism], decay: float) -> None:
    mechanism: Mechanism = BinaryTree(decay) if kind is BinaryTree else IndependentGaussian()
    with pytest.raises(InputError, match="a record's influence is unbounded there"):
        RunningSums(mechanism, Workload(PoissonSampling(12, 12, 12), decay, CLIPS), "zero-out").block_displacement(
            12
        )
