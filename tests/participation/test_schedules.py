"""Which batches a round reads: schedules against their definition, written out round by round."""

import pytest

from fedpriv.participation.orders import Phases, Schedule


@pytest.mark.parametrize(("rounds", "rounds_per_epoch"), [(1, 1), (7, 7), (12, 4), (10, 4), (3, 5)])
def test_a_fixed_order_reads_one_batch_a_round_and_starts_anew_every_epoch(
    rounds: int, rounds_per_epoch: int
) -> None:
    schedule = Schedule(rounds, rounds_per_epoch)
    assert [list(schedule.batches(t)) for t in range(1, rounds + 1)] == [
        [t % rounds_per_epoch] for t in range(rounds)
    ]
    assert schedule.batches_held == rounds_per_epoch


@pytest.mark.parametrize("rounds", [1, 2, 9])
def test_a_single_pass_reads_every_batch_once_and_the_last_one_last(rounds: int) -> None:
    read = [batch for t in range(1, rounds + 1) for batch in Schedule(rounds, rounds).batches(t)]
    assert read == list(range(rounds))


def test_a_single_pass_of_several_batches_a_round_reads_each_once_in_order() -> None:
    schedule = Schedule(4, 4, (3, 1, 1, 2))
    assert [list(schedule.batches(t)) for t in range(1, 5)] == [[0, 1, 2], [3], [4], [5, 6]]
    assert schedule.batches_held == 7


@pytest.mark.parametrize("t", [0, -1, 6])
def test_there_is_no_round_beyond_the_first_and_the_last(t: int) -> None:
    with pytest.raises(ValueError, match=f"round {t} is not one of 1 … 5"):
        Schedule(5, 5).batches(t)


def test_phases_read_every_batch_once_and_nothing_in_the_round_that_ends_one() -> None:
    phases = Phases((3, 1))
    assert [list(phases.batches(t)) for t in range(1, phases.rounds + 1)] == [[0], [1], [2], [], [3], []]
