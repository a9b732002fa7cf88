"""Which batches a round reads: schedules against their definition, written out round by round."""

import json
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpriv.accounting.gaussian import mu_of
from fedpriv.core.errors import InputError
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import (
    FixedOrder,
    MinSeparation,
    Participation,
    ParticipationKeys,
    Phases,
)
from fedpriv.participation.registry import ClientAvailability, participation_from_data
from fedpriv.participation.secret import BalancedSubsampling, PoissonSampling, RandomAllocation
from tests.participation.builders import coins, tabulate


@pytest.mark.parametrize(
    ("rounds", "rounds_per_epoch"), [(1, 1), (2, 2), (7, 7), (9, 9), (12, 4), (10, 4), (3, 5)]
)
def test_a_fixed_order_reads_one_batch_a_round_and_starts_anew_every_epoch(
    rounds: int, rounds_per_epoch: int
) -> None:
    schedule = FixedOrder(rounds, rounds_per_epoch)
    batches = [list(schedule.batches(t)) for t in range(1, rounds + 1)]
    assert batches == [[t % rounds_per_epoch] for t in range(rounds)]
    assert schedule.batches_per_silo == rounds_per_epoch


def test_a_single_pass_of_several_batches_a_round_reads_each_once_in_order() -> None:
    schedule = FixedOrder(4, 4, (3, 1, 1, 2))
    assert [list(schedule.batches(t)) for t in range(1, 5)] == [[0, 1, 2], [3], [4], [5, 6]]
    assert schedule.batches_per_silo == 7


@pytest.mark.parametrize(
    "numbers", [(4, 2, (1, 1, 1, 1)), (4, 4, (1, 1, 1)), (4, 4, (1, 1, 1, 1, 1)), (2, 2, (1, 0)), (2, 2, (-1, 3))]
)
def test_every_round_of_a_single_pass_has_a_number_of_batches(numbers: tuple[int, int, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="of a single pass need as many numbers of batches, 1 or more"):
        FixedOrder(*numbers)


@pytest.mark.parametrize("t", [0, -1, 7])
@pytest.mark.parametrize(
    "order",
    [
        FixedOrder(6, 3),
        Phases((3, 1)),
        BalancedSubsampling(6, 3),
        PoissonSampling(6, 3),
        ClientAvailability(6, 2, 2, 3),
    ],
    ids=lambda order: order.name,
)
def test_round_numbers_outside_the_schedule_are_refused(order: Participation, t: int) -> None:
    with pytest.raises(ValueError, match=f"round {t} is not one of 1 … 6"):
        order.select_rows(t, 2, 0, coins)


@pytest.mark.parametrize("t", [-1, 0, 7])
def test_random_allocation_draws_nothing_for_a_round_that_does_not_exist(t: int) -> None:
    with pytest.raises(ValueError, match=f"round {t} is not one of 1 … 6"):
        RandomAllocation(6, 3).select_rows(t, 2, 0, mock.Mock(side_effect=AssertionError))


SECRET = "drawn at random, and in which"
WORDS: list[tuple[Participation, str]] = [
    (FixedOrder(4, 4), "is read once"),
    (FixedOrder(3, 4), "is read at most once"),
    (Phases((3, 1)), "is read once"),
    (FixedOrder(5, 4), "is read 1 or 2 times"),
    (FixedOrder(8, 4), "is read 2 times"),
    (FixedOrder(9, 4), "is read 2 or 3 times"),
    (RandomAllocation(10, 10), f"takes part in one of 10 rounds, {SECRET} one stays secret"),
    (
        RandomAllocation(20, 10, 2),
        f"takes part in one of the 5 rounds of its group in each of 2 epochs, {SECRET} one stays secret",
    ),
    (BalancedSubsampling(20, 10), f"takes part in 2 of 20 rounds, {SECRET} ones stays secret"),
    (BalancedSubsampling(20, 10, 2), f"takes part in 2 of 10 rounds of its group, {SECRET} ones stays secret"),
    (PoissonSampling(20, 10), "takes part in each with probability 0.1, and in which ones stays secret"),
    (
        PoissonSampling(20, 10, 5),
        "takes part in each of its group (5 groups) with probability 0.5, and in which ones stays secret",
    ),
    (ClientAvailability(40, 1, 10, 30), "takes part at most once, when it is there"),
    (ClientAvailability(40, 3, 40, 40), "takes part at most once, when it is there"),
    (ClientAvailability(40, 3, 10, 30), "takes part at most 3 times, 10 or more rounds apart, when it is there"),
]


@pytest.mark.parametrize(("order", "words"), WORDS, ids=map(str, range(len(WORDS))))
def test_a_report_says_how_often_a_record_takes_part(order: Participation, words: str) -> None:
    assert order.words == words


def test_phases_read_every_batch_once_and_nothing_in_their_last_round() -> None:
    phases = Phases((3, 1))
    assert [list(phases.batches(t)) for t in range(1, phases.rounds + 1)] == [[0], [1], [2], [], [3], []]


@pytest.mark.parametrize("lengths", [(), [2.0, 1], [2.5], [True], ["2"], [0], [None]])
def test_phases_of_a_ledger_have_whole_lengths(lengths: Sequence[object]) -> None:
    """Before: 2.0 and 2.5 rounds were accepted, and texts ended in a TypeError."""
    data = json.loads(json.dumps({"name": "phases", "lengths": lengths}))
    with pytest.raises(InputError, match="each of 1 or more rounds"):
        participation_from_data(data)


def test_phases_that_stop_early_are_charged_as_a_whole() -> None:
    phases = Phases((3, 1))
    assert [phases.truncate(rounds) for rounds in (0, 2, 6)] == [phases] * 3
    for rounds in (-1, 7):
        with pytest.raises(ValueError, match=f"{rounds} rounds of 6"):
            phases.truncate(rounds)


@pytest.mark.parametrize(
    ("order", "rows"),
    [
        (RandomAllocation(4, 4, 2), [[0, 2], [1, 3, 5, 7], [4, 6], []]),
        (BalancedSubsampling(4, 2), [[1, 3], [0], [0, 1, 2, 3], [2]]),
        (PoissonSampling(4, 2), [[0, 3], [2], [1, 3], [0, 1]]),
        (ClientAvailability(6, 2, 3, 4), [[0], [1, 2, 4, 5], [3, 6], [0, 7], [2, 4, 5], [3]]),
    ],
    ids=["allocation", "balanced", "poisson", "available"],
)
def test_a_key_gives_the_records_that_it_has_always_given(order: Participation, rows: list[list[int]]) -> None:
    """A guard that is restarted with a later version goes on with the same records."""
    assert [np.flatnonzero(of_round).tolist() for of_round in tabulate(order, 2, silo=1, seed=5).T] == rows


COHORT, PLACES = 20, 30


def answers(order: ClientAvailability) -> NDArray[np.bool_]:
    """Who answers in which round, (clients, rounds)."""
    return tabulate(order, COHORT, seed=3)


@pytest.mark.parametrize("most", [4, 2])
def test_client_answers_keep_the_minimum_separation_and_the_maximum_count(most: int) -> None:
    """Guarantee of `ClientAvailability`: at least the separation between two answers, and no more than said."""
    order = ClientAvailability(40, most, 10, PLACES)
    came = answers(order)
    assert came.sum(1).max() == most
    for client in came:
        rounds = np.flatnonzero(client)
        assert len(rounds) < 2 or np.diff(rounds).min() >= 10
    assert (came.sum(1) > 1).mean() > 0.1  # it is no rule of one answer


def test_mean_cohort_size_matches_its_expectation() -> None:
    """40 rounds of 600 clients, mean 20: the mean lies within 4.9 deviations (false alarm 1e-6)."""
    sizes = answers(ClientAvailability(40, 4, 10, PLACES)).sum(0)
    deviation = np.sqrt(COHORT / 40 * (1 - 10 / PLACES))
    assert abs(sizes.mean() - COHORT) < 4.9 * deviation
    assert sizes.std() > 1.0


def test_selection_of_available_clients_does_not_depend_on_the_order_of_requests() -> None:
    """No state: rounds asked in any order, again, give the same clients."""
    order, bits = ClientAvailability(40, 2, 10, PLACES), coins(3)
    in_order, backwards = (
        [list(order.select_rows(t, COHORT, 0, lambda: bits)) for t in rounds]
        for rounds in (range(1, 41), range(40, 0, -1))
    )
    assert in_order == backwards[::-1]


@pytest.mark.parametrize("mechanism", [IndependentGaussian(), BinaryTree(), LeafGaussian()])
def test_client_availability_is_charged_as_the_worst_pattern_with_its_separation(mechanism: Mechanism) -> None:
    order, clips = ClientAvailability(40, 3, 10, PLACES), np.full(40, 2.0)
    known = mechanism.sensitivity(Workload(MinSeparation(40, 3, 10), 1.0, clips))
    assert mechanism.sensitivity(Workload(order, 1.0, clips)) == known
    assert known > mechanism.sensitivity(Workload(FixedOrder(40, 40), 1.0, clips))


def test_client_availability_is_restored_from_its_data_and_can_be_truncated() -> None:
    order = ClientAvailability(40, 3, 10, PLACES)
    assert participation_from_data(order.to_data()) == order
    assert order.truncate(12) == ClientAvailability(12, 3, 10, PLACES)
    assert order.truncate(12).max_rounds_per_record == 2
    assert mu_of(1.0, 1e-5) == order.calibrated_mu(mock.Mock(), mu_of(1.0, 1e-5), 1e-5)


def test_maximum_participations_follow_from_rounds_and_minimum_separation() -> None:
    order = ClientAvailability.from_schedule(FixedOrder(40, PLACES), ParticipationKeys(min_separation=12))
    assert order == ClientAvailability(40, 4, 12, PLACES)
