"""Fresh permutations: batches, digest, truncation, and numbers that no order has."""

import hashlib
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.core.random import public_generator
from fedpriv.participation.orders import FixedOrder, FreshOrder, ParticipationKeys
from fedpriv.participation.registry import PARTICIPATIONS, SELECTABLE_PARTICIPATIONS, participation_from_data

GOLDEN = "e1361478ff933f6fc4187645bf5349815908030dc72e7328bf2ad3af815c1b08"


def read(order: FreshOrder) -> list[int]:
    batches = [list(order.batches(t)) for t in range(1, order.rounds + 1)]
    assert all(len(of_round) == 1 for of_round in batches)
    return [batch for (batch,) in batches]


@pytest.mark.parametrize(("rounds", "rounds_per_epoch"), [(1, 1), (12, 4), (10, 4), (3, 5), (5, 1)])
def test_every_epoch_reads_every_batch_once(rounds: int, rounds_per_epoch: int) -> None:
    order = FreshOrder(rounds, rounds_per_epoch, 7)
    batches = read(order)
    for start in range(0, rounds, rounds_per_epoch):
        epoch = batches[start : start + rounds_per_epoch]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(rounds_per_epoch))
    assert order.batches_per_silo == rounds_per_epoch
    assert order.single_pass == (rounds <= rounds_per_epoch)
    assert batches == order.visits.tolist()


def test_fresh_permutations_and_their_digest_match_the_philox_definition() -> None:
    """The order of raw words of Philox under the public key of the seed; the digest is of 4-byte numbers."""
    words = public_generator(1, "fresh permutations").bit_generator.random_raw(6).tolist()
    expected = [
        index for epoch in (words[:3], words[3:]) for index in sorted(range(3), key=lambda place: epoch[place])
    ]
    order = FreshOrder(6, 3, 1)
    assert read(order) == expected == [1, 2, 0, 2, 1, 0]
    assert (
        order.digest == hashlib.sha256(b"".join(n.to_bytes(4, "little") for n in expected)).hexdigest() == GOLDEN
    )


def test_permutations_are_uniform_and_differ_between_epochs_and_seeds() -> None:
    """Six permutations of three batches in 6,000 epochs: chi-square with 5 degrees is below 20.5 in 99.9 %."""
    epochs = FreshOrder(18_000, 3, 5).visits.reshape(-1, 3)
    counts = Counter(map(tuple, epochs.tolist()))
    assert len(counts) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 20.5
    assert read(FreshOrder(40, 20, 1)) != read(FreshOrder(40, 20, 2))
    assert read(FreshOrder(40, 20, 1))[:20] != read(FreshOrder(40, 20, 1))[20:]


def test_truncated_order_keeps_the_batches_of_its_rounds() -> None:
    order = FreshOrder(23, 5, 3)
    for rounds in (1, 5, 6, 22, 23):
        stopped = order.truncate(rounds)
        assert read(stopped) == read(order)[:rounds]
        assert (stopped.digest == order.digest) == (rounds > 20)  # whole permutations of the epochs it reached
        assert FreshOrder.from_data({k: v for k, v in stopped.to_data().items() if k != "name"}) == stopped


def test_fresh_order_survives_json_and_refuses_another_digest_or_seed() -> None:
    order = FreshOrder(10, 4, 9)
    data = json.loads(json.dumps(order.to_data()))
    assert data == {"name": "fresh", "rounds": 10, "rounds_per_epoch": 4, "seed": 9, "digest": order.digest}
    assert participation_from_data(data) == order
    for change in ({"digest": "0" * 64}, {"seed": 10}, {"rounds_per_epoch": 5}, {"rounds": 13}):
        with pytest.raises(InputError, match=r"order_digest: the permutations of seed .* have the digest"):
            participation_from_data({**data, **change})


@pytest.mark.parametrize(
    "numbers",
    [
        {"rounds": 0},
        {"rounds_per_epoch": 0},
        {"seed": -1},
        {"rounds": 2**20 + 1},
        {"rounds_per_epoch": 2**20 + 1},
        {"seed": True},
        {"rounds": 4.0},
    ],
)
def test_invalid_rounds_epoch_lengths_and_seeds_of_a_fresh_order_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="rounds are 1 to 1,048,576, and a seed is 0 or more"):
        FreshOrder(**{"rounds": 8, "rounds_per_epoch": 4, "seed": 0, **numbers})


@pytest.mark.parametrize("t", [0, -1, 9])
def test_round_numbers_outside_the_order_are_refused(t: int) -> None:
    with pytest.raises(ValueError, match=f"round {t} is not one of 1 … 8"):
        FreshOrder(8, 4, 0).batches(t)


def test_fresh_order_is_public_and_not_selectable_as_a_sampling() -> None:
    order = FreshOrder(8, 4, 0)
    assert not order.secret
    assert order.public_order is order
    assert order.words == "is read 2 times"
    assert order.select_rows(1, 3, 0, lambda: pytest.fail("public")) == slice(
        3 * read(order)[0], 3 * read(order)[0] + 3
    )
    assert "fresh" in PARTICIPATIONS
    assert "fresh" not in SELECTABLE_PARTICIPATIONS
    assert FixedOrder.from_schedule(order, ParticipationKeys()) is order
    assert not order.visits.flags.writeable
    assert order.visits.dtype == np.int32
    assert FixedOrder(8, 4, seed=3) == FixedOrder(8, 4)  # the seed is no part of a fixed order
