"""What the silos of a simulation would each compute for the same query, computed for all of them at once.

One process has all silos, and the server asks all of them the same.  The first one that is asked reads the round
and takes the increments for every silo whose batches are as large as its own; the others find theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.clients.increments import Bounded
from fedpriv.clients.silo import Silo
from fedpriv.objectives import Increment, Objective, OfEach, Records, Slots, View
from fedpriv.participation.public_order import PublicOrder
from fedpriv.protocol.arrays import is_finite
from fedpriv.randomness import KeyedCoins
from fedpriv.replicates.columns import Scalar
from fedpriv.running.plan import Plan
from fedpriv.running.round_step import Read, RoundStep, record_weight

_MOST_VALUES = 2**23
"""Of features of one round that are copied together: beyond, a silo's own part of the work is long anyway."""
_QUESTIONS = 4
"""How many sets of points a round has answers for; an estimator that takes increments apart has three."""


class _Answer(NamedTuple):
    """The increments of every silo at these points."""

    points: tuple[Tensor, ...]
    coefficients: tuple[float, ...]
    clip: float
    of_each: OfEach

    def is_to(self, points: Sequence[Tensor], coefficients: Sequence[float], clip: Scalar) -> bool:
        return (
            len(points) == len(self.points)
            and tuple(coefficients) == self.coefficients
            and float(clip) == self.clip
            and all(map(_same, points, self.points))
        )


class _Turn:
    """One round of all silos."""

    def __init__(self, t: int, records: Records | None, weights: Tensor, silos: Sequence[int]) -> None:
        self.t, self._records, self._weights = t, records, weights
        self._answers: list[_Answer] = []
        count = len(weights)
        parts = [None] * len(silos) if records is None else map(Records, *map(torch.unbind, records))
        self.reads = [Read(part, weights, ((silo, count),)) for part, silo in zip(parts, silos, strict=True)]

    @property
    def answered(self) -> bool:
        """Whether anything was computed together."""
        return bool(self._answers)

    def answer(
        self, objective: Objective, points: Sequence[Tensor], coefficients: Sequence[float], clip: Scalar
    ) -> OfEach | None:
        """None for what it is not worth to compute together."""
        for known in self._answers:
            if known.is_to(points, coefficients, clip):
                return known.of_each
        if len(self._answers) == _QUESTIONS or self._records is None:
            return None
        found = objective.of_each(points, coefficients, self._records, self._weights, clip)
        if found is not None:
            self._answers.append(_Answer(tuple(points), tuple(coefficients), float(clip), found))
        return found


class Together:
    """The silos of a simulation whose batches have one size, in a public order; keeps the round under way.

    Queries are never written into: they lie over the immutable bytes of messages.
    """

    def __init__(self, plan: Plan, train: Records, orders: Sequence[Tensor], silos: Sequence[int]) -> None:
        """`orders` are the records of each of `silos` in the order in which it reads them."""
        self.places = {silo: place for place, silo in enumerate(silos)}
        self._plan, self._train, self._orders = plan, train, torch.stack(list(orders))
        self._size = plan.batch_sizes[silos[0]]
        self._turn: _Turn | None = None
        self._finite: Tensor | None = None
        self.worth_it = True
        """False once it has turned out that the objective takes one batch at a time."""

    def turn(self, t: int) -> _Turn:
        """Round t."""
        if self._turn is None or self._turn.t != t:
            self._turn = self._read(t)
        return self._turn

    def answer(
        self, t: int, objective: Objective, points: Sequence[Tensor], coefficients: Sequence[float], clip: Scalar
    ) -> OfEach | None:
        """The increments of round t of every place; None for what it is not worth to compute together."""
        if not self.worth_it:
            return None
        turn = self.turn(t)
        found = turn.answer(objective, points, coefficients, clip)
        self.worth_it = found is not None or turn.answered
        return found

    def is_finite(self, query: Tensor) -> bool:
        """As `arrays.is_finite`; a query that all silos get is looked at once."""
        if query is not self._finite:
            if not is_finite(query):
                return False
            self._finite = query
        return True

    def _read(self, t: int) -> _Turn:
        schedule, silos = self._plan.schedule, list(self.places)
        index = self._orders[:, schedule.rows(t, self._size, silos[0], _no_coins)]
        records = Records(*(column[index] for column in self._train)) if index.numel() else None
        weight = record_weight(1.0, self._size, schedule.expected_batches(t))
        return _Turn(t, records, torch.full(index.shape[1:], weight, dtype=torch.float64), silos)


@dataclass(frozen=True)
class OneOfAll(View):
    """The increments of one silo, from those of all where they are computed together.

    Guarantee: they are what `base` gives, bit for bit.
    """

    together: Together
    place: int
    t: int = 0

    def at(self, slots: Slots) -> Objective:
        own = self.base.at(slots)
        return own if own is not self.base else OneOfAll(own, self.together, self.place, slots.t)

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        found = self.together.answer(self.t, self.base, points, coefficients, clip)
        return (
            self.base.increment(points, coefficients, records, weights, clip)
            if found is None
            else found(self.place)
        )


@dataclass(frozen=True)
class SimulatedSilo(Silo):
    """A silo of a simulation in which others of the same process read as much as it does."""

    together: Together = field(kw_only=True)

    def _read(self, t: int) -> Read:
        return self.together.turn(t).reads[self._place] if self.together.worth_it else super()._read(t)

    def _is_finite(self, query: Tensor) -> bool:
        return self.together.is_finite(query)

    @cached_property
    def _place(self) -> int:
        return self.together.places[self.number]

    @cached_property
    def _step(self) -> RoundStep:
        own = OneOfAll(Bounded(self.objective), self.together, self._place)
        return RoundStep(self.plan.estimator, self.plan.mechanism, own)


def together_of(plan: Plan, train: Records, order: Sequence[Tensor]) -> dict[int, Together]:
    """Who computes together with others, for every silo that does.

    Nobody whose rounds are secret, who steps by himself, releases integers, or who has a large batch or coins.
    """
    first = plan.estimator.round(1)
    if not isinstance(plan.schedule, PublicOrder) or first.local is not None or plan.exact is not None:
        return {}
    found: dict[int, Together] = {}
    most = max(map(plan.schedule.most_batches, range(1, plan.schedule.rounds + 1)))
    for size in set(plan.batch_sizes):
        silos = [silo for silo, own in enumerate(plan.batch_sizes) if own == size]
        if len(silos) * size * most * train.features[0].numel() <= _MOST_VALUES and len(silos) > 1:
            together = Together(plan, train, [order[silo] for silo in silos], silos)
            found.update(dict.fromkeys(silos, together))
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two vectors are the same bytes."""
    return one is other or (one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes())


def _no_coins() -> KeyedCoins:  # pragma: no cover - public orders ask for none
    raise AssertionError("a public order has no coins")
