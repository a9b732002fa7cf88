"""One round of a run, from the records that it reads to what it releases.

| symbol | verb | result |
|---|---|---|
| rows, weights | `fedpriv.participation` | which records, and what one of them weighs |
| s_t | `Arithmetic.sums` | their clipped increments, added; in floating point the running sum q_t |
| y_t | `Arithmetic.noisy` | q_t + (B z)_t, or (C s)_t + z_t in integers |
| q~_t | `Arithmetic.leaving` | y_t itself, or unit / denominator · (B y)_t |

Floating point and integers differ here and nowhere else.  A silo takes these steps for its records, a server for
the sum of what silos sent, and the vectorized engine for all silos and replicates at once.

The end of the file has the silos of a simulation that do not answer in a round, and what a server counts in their
place.  In a deployment a silo is away when it is; a scenario says so beforehand, in public: `federation.away`
names rounds, `federation.drop_out` is the probability of every silo and round, by coins of the scenario's seed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.errors import RunError
from fedpriv.core.random import LONGEST_AT_ONCE, SERVER, KeyedNormal, public_generator
from fedpriv.loss.estimators import Round
from fedpriv.loss.objective import Records, Slots
from fedpriv.loss.running_sums import Part, RunningSum, absorb, parts_of
from fedpriv.loss.views import is_absent
from fedpriv.noise.integers.fixed_point import Ints, packed, sum_of
from fedpriv.noise.integers.gaussian import START, linked, linked_missed, round_noise
from fedpriv.noise.integers.increments import integer_sum
from fedpriv.noise.integers.plan import ExactPlan, added, leaving, private_sums
from fedpriv.noise.integers.strategies import IntegerStrategy
from fedpriv.noise.mechanism import Mechanism, MechanismState
from fedpriv.noise.sliding import check_movement
from fedpriv.participation.secret import SecretOrder
from fedpriv.rounds.arithmetic import Reals, Wholes
from fedpriv.rounds.plan import Plan
from fedpriv.scenario.schema import Cell

_PIECE = 2**16
"""Values of a mean that are computed at a time: all messages side by side are a copy of every one."""
_ROUNDS_AHEAD = 16
_VALUES_AHEAD = 2**26  # of noise that all silos together hold ahead, when one process simulates them


class Read(NamedTuple):
    """Records of a round, of one silo or of all of them."""

    records: Records | None
    """(..., records, ...); None in a round without any."""
    weights: Tensor
    """Of every record, (records,) or (..., records); 0 of a row that does not count."""
    rows: tuple[tuple[int, int], ...]
    """The silos in the order of their records, as in `Slots`."""


def counting(records: Records) -> tuple[Records, Tensor]:
    """Rows of single records with labels for all of them, and which of them are there, both (..., B).

    Guarantee: with weight 0 where it is not there, a row adds nothing to a sum, whatever the loss is.
    """
    missing = is_absent(records.labels)
    return Records(records.features, records.labels.masked_fill(missing, 0)), ~missing


class State(NamedTuple):
    """Vectors that a silo or a server keeps between rounds, each (..., d)."""

    answered: int = 0
    """The last round that was answered."""
    past: tuple[Tensor, ...] = ()
    """Vectors that the estimator remembers."""
    sums: tuple[Tensor, ...] = ()
    """The running sum; of integers C's state."""
    hidden: MechanismState = ()
    """B's state."""
    chain: bytes = b""
    """A digest of all queries until now, where the noise depends on them."""


class Summed(NamedTuple):
    """A round's sums, the queries to remember, and how many records were clipped, (...) or None if not counted."""

    values: Tensor
    past: tuple[Tensor, ...]
    clipped: Tensor | None


class Fresh(NamedTuple):
    """Fresh vectors of a round, (..., d) or (..., draws, d); with an `amplitude` (..., 1) their row is multiplied.

    Replicates can share unit noise, (1, d), since mechanisms are linear.
    """

    vectors: Tensor
    amplitude: Tensor | None = None


Draw = Callable[[int, int], Fresh | None]
"""(owner, t) -> its fresh vectors of round t, None if it adds no noise."""


class Arithmetic(Protocol):
    """The steps of a round, for one silo, for the server, or for all silos at once.

    An `owner` is the number of a silo, or `SERVER`.
    """

    def start(self, owner: int) -> State:
        """Its state before round 1."""
        ...

    def sums(self, state: State, current: Round, query: Tensor, read: Read) -> Summed:
        """s_t at `query` of the records that one silo, or all of them, read."""
        ...

    def nothing(self, state: State, t: int) -> Tensor:
        """The sums of a round without records."""
        ...

    def noisy(self, state: State, t: int, sums: Tensor, owner: int, query: Tensor | None) -> tuple[Tensor, State]:
        """y_t with the noise that is the owner's to add, and its next state, past queries apart.

        `query` is the one that was sent; None in a round that nobody asked for.  `sums` may be written into.
        """
        ...

    def leaving(self, state: State, t: int, noisy: Tensor, owner: int) -> tuple[Tensor, State]:
        """q~_t where running sums leave this owner, else y_t as it is, and the next state."""
        ...

    def words(self, release: Tensor, t: int, owner: int, mask: NDArray[np.uint64]) -> Tensor:
        """A silo's release under its mask, as bytes or words."""
        ...

    def added(self, messages: Sequence[Tensor], t: int) -> Tensor:
        """The sum, or the mean, of the messages of silo 0, 1, …; RunError for one that cannot be used."""
        ...


@dataclass(frozen=True)
class FloatArithmetic:
    """A simulation, and a run without noise, of which nothing is claimed: y_t = q_t + (B z)_t is what leaves.

    In the vectorized engine the plan's parts have leading axes, and so have all vectors.
    """

    plan: Plan
    draw: Draw = field(default=lambda owner, t: None, repr=False)

    def start(self, owner: int) -> State:
        nothing = torch.zeros((), dtype=torch.float64).expand(self.plan.objective.dimension)  # takes no memory
        return State(sums=(nothing,), hidden=self.plan.mechanism.start())

    def sums(self, state: State, current: Round, query: Tensor, read: Read) -> Summed:
        """q_t, and how many records were clipped (...); see `absorb`."""
        objective, (total,) = self.plan.objective.at(Slots(current.t, read.rows)), state.sums
        records = read.records if read.weights.shape[-1] else None
        before = RunningSum(state.past, total)
        (past, total), clipped = absorb(
            before, current, query, objective, records, read.weights, self.plan.estimator.memory
        )
        return Summed(total, past, clipped)

    def nothing(self, state: State, t: int) -> Tensor:
        return state.sums[0] * self.plan.estimator.round(t).decay

    def noisy(self, state: State, t: int, sums: Tensor, owner: int, query: Tensor | None) -> tuple[Tensor, State]:
        kept = sums
        decay = self.plan.estimator.round(t + 1).decay if t < self.plan.schedule.rounds else 0.0
        if isinstance(decay, float) and decay == 0.0:
            kept = sums.new_zeros(()).expand_as(
                sums
            )  # nobody needs these sums again, and such zeros take no memory
        if (fresh := self.draw(owner, t)) is None:
            return sums, State(t, state.past, (kept,), state.hidden)
        row, hidden = self.plan.mechanism.noise(state.hidden, t, fresh.vectors)
        out, size = None if kept is sums else sums, fresh.amplitude
        noisy = torch.add(sums, row, out=out) if size is None else torch.addcmul(sums, size, row, out=out)
        return noisy, State(t, state.past, (kept,), hidden)

    def leaving(self, state: State, t: int, noisy: Tensor, owner: int) -> tuple[Tensor, State]:
        return noisy, state

    def words(self, release: Tensor, t: int, owner: int, mask: NDArray[np.uint64]) -> Tensor:
        """p_i · release on the plan's lattice, uint64 (d,)."""
        assert self.plan.arithmetic.grid is not None  # as wherever silos are to mask
        try:
            words = self.plan.arithmetic.grid.encode(self.plan.weights[owner] * release.numpy())
        except RunError as error:
            raise RunError(f"silo {owner}, round {t}: {error}") from None
        return torch.from_numpy(words + mask)

    def added(self, messages: Sequence[Tensor], t: int) -> Tensor:
        """Σ_i p_i · release_i (d,)."""
        if (grid := self.plan.arithmetic.grid) is not None:
            return torch.from_numpy(grid.decode_sum([message.numpy() for message in messages]))
        mean = torch.empty_like(messages[0])
        weights = torch.tensor(self.plan.weights, dtype=mean.dtype)
        for start in range(0, len(mean), _PIECE):
            stop = start + _PIECE
            parts = [message[start:stop] for message in messages] if len(mean) > _PIECE else messages
            torch.mv(torch.stack(tuple(parts)).mT, weights, out=mean[start:stop])
        return mean


@dataclass(frozen=True)
class IntegerArithmetic:
    """A run whose releases are functions of y_t = (C s)_t + z_t, with z_t a discrete Gaussian.

    Vectors of a round are int64, (d,), or (draws, d) stacked.  The noise is keyed by (key, owner, round, chain,
    (C s)_t), where chain_t = H(chain_{t-1}, query): a round that is put back and asked something else has other
    noise, and the same round the same.
    """

    plan: Plan
    key: bytes = field(repr=False)

    def start(self, owner: int) -> State:
        """C's state at the owner of noise, and B's where running sums leave."""
        trust = self.plan.trust
        sums = self.strategy.start() if trust.draws(owner) else ()
        return State(0, (), tensors(sums), self.plan.mechanism.start() if trust.releases(owner) else (), START)

    def sums(self, state: State, current: Round, query: Tensor, read: Read) -> Summed:
        """s_t of the records of one silo.

        Guarantee: one record moves the part of each vector by at most K under zero-out and 2 K under replace-one,
        whatever the query is; nothing but the sums depends on the records.
        """
        ((silo, count),) = read.rows
        if not count and not self.plan.schedule.secret:  # a secret round that drew nobody is like any other
            read = read._replace(records=None)
        stretch = self.exact.run.factored.stretch(current.t)
        parts, past = parts_of(current, query, state.past, self.plan.estimator.memory)
        batches = max(1, self.plan.schedule.expected_batches(current.t))
        objective = self.plan.objective.at(Slots(current.t, read.rows))
        wanted: list[Part | None] = [parts.gradient]
        if current.split is not None and current.split.rounds_per_epoch > 1:
            wanted.insert(0, parts.residual)
        if parts.change is not None:
            wanted.append(parts.change)
        factor, counts = self.exact.lattice.factor(batches) * stretch, (read.weights != 0.0).numpy()
        # Where it is secret who takes part, each round takes the time of so many records at least.
        least = self.plan.most_held(silo) if isinstance(self.plan.schedule, SecretOrder) else 0
        sums = [
            np.zeros(objective.dimension, np.int64)
            if part is None
            else integer_sum(objective, part.query, float(part.clip), read.records, norm, factor, least, counts)
            for part, norm in zip(wanted, self.exact.norms(current.t), strict=True)
        ]
        several = self.strategy.draws(current.t) is not None
        return Summed(torch.from_numpy(np.stack(sums) if several else sums[0]), past, None)

    def nothing(self, state: State, t: int) -> Tensor:
        return torch.zeros(self.shape(t), dtype=torch.int64)

    def noisy(self, state: State, t: int, sums: Tensor, owner: int, query: Tensor | None) -> tuple[Tensor, State]:
        """y_t and C's next state, which is as secret as the records; s_t itself where noise is not the owner's."""
        before = state.chain
        chain = linked_missed(before) if query is None else linked(before, query.contiguous().numpy().data)
        after = State(t, state.past, state.sums, state.hidden, chain)
        if not self.plan.trust.draws(owner):
            return sums, after
        draw = partial(round_noise, self.key, owner, t, chain)
        held = tuple(vector.numpy() for vector in state.sums)
        noisy, held = private_sums(self.strategy, self.exact.claim_of(owner), held, t, sums.numpy(), draw)
        return torch.from_numpy(noisy), after._replace(sums=tensors(held))

    def leaving(self, state: State, t: int, noisy: Tensor, owner: int) -> tuple[Tensor, State]:
        """(B y)_t over the public number of records of a batch, float64 (d,), unless y_t leaves as it is."""
        if not self.plan.trust.releases(owner):
            return noisy, state
        sizes = self.plan.batch_sizes
        factor = self.exact.lattice.unit / (sum(sizes) if owner == SERVER else sizes[owner])
        mechanism, scales, values = self.plan.mechanism, self.strategy.scales(t), noisy.numpy()
        vector, hidden = leaving(mechanism, scales, state.hidden, t, values.reshape(self.shape(t)), factor)
        return vector, state._replace(hidden=hidden)

    def words(self, release: Tensor, t: int, owner: int, mask: NDArray[np.uint64]) -> Tensor:
        """y_t modulo 2^w, uint8."""
        under = packed(release.numpy().reshape(-1), mask, self.exact.run.word)
        return torch.frombuffer(bytearray(under), dtype=torch.uint8)

    def added(self, messages: Sequence[Tensor], t: int) -> Tensor:
        """The sum of masked messages, or of exact sums at a server that is trusted with them."""
        if self.plan.masked:
            words = [message.numpy().tobytes() for message in messages]
            return torch.from_numpy(sum_of(words, self.exact.run.word, self.shape(t)))
        sums = [message.numpy().reshape(self.shape(t)) for message in messages]
        norms, most = self.exact.norms(t), self.plan.schedule.most_batches(t)
        bounds = [[size * most * norm for size in self.plan.batch_sizes] for norm in norms]
        try:
            if self.strategy.draws(t) is None:
                return torch.from_numpy(added(sums, bounds[0]))
            parts = [added([of[place] for of in sums], bound) for place, bound in enumerate(bounds)]
        except RunError as error:
            raise RunError(f"round {t}, {error}") from None
        return torch.from_numpy(np.stack(parts))

    def shape(self, t: int) -> tuple[int, ...]:
        """Of a round's sums and of y_t."""
        count, size = self.strategy.draws(t), self.plan.objective.dimension
        return (size,) if count is None else (count, size)

    @cached_property
    def exact(self) -> ExactPlan:
        return self.plan.exact

    @property
    def strategy(self) -> IntegerStrategy:
        return self.exact.run.factored.strategy


def arithmetic_of(
    plan: Plan, numbers: Reals | Wholes, key: bytes, real: Callable[[], FloatArithmetic]
) -> Arithmetic:
    """The steps of a round in these numbers: of integers with noise of `key`, or those that `real` makes."""
    return IntegerArithmetic(plan, key) if isinstance(numbers, Wholes) else real()


def tensors(vectors: tuple[Ints, ...]) -> tuple[Tensor, ...]:
    """The same memory as torch's."""
    return tuple(map(torch.from_numpy, vectors))


def record_weight(share: float, batch: int, batches: int) -> float:
    """The weight of one record in a round that reads `batches` batches of `batch` records, expected if sampled.

    `share` is 1 in the silo's own mean, and the silo's weight p_i in the mean over silos.

    Guarantee: the denominator is public, however many records take part.
    """
    return share / (batch * max(1, batches))


def is_finite(vector: Tensor) -> bool:
    """Whether every value is finite: a sum lets NaN and infinity through (and overflows for absurd values)."""
    return math.isfinite(vector.sum())


def check_moved(mechanism: Mechanism, past: tuple[Tensor, ...], t: int, query: Tensor, where: str) -> None:
    """RunError if the query (..., d) moved farther than the mechanism's sensitivity allows for."""
    if t > 1 and (bound := mechanism.movement) is not None:
        check_movement(bound, past[0], query, where)


class Seeded:
    """The noise that a simulation draws: each owner's, as the plan scales it, from one source."""

    def __init__(self, plan: Plan, source: KeyedNormal, dtype: torch.dtype) -> None:
        self._plan, self._source = plan, source  # scaled and correlated in `dtype`
        self._dtype: np.dtype[Any] = np.dtype(str(dtype).removeprefix("torch."))
        self._stds = {owner: float(std) for owner, std, _ in plan.noise.sources}
        self._ahead: dict[int, DrawAhead] = {}

    def __call__(self, owner: int, t: int) -> Fresh | None:
        std = self._stds.get(owner, 0.0)
        if not std:
            return None
        # Widened and multiplied in one call, piece by piece in the cache.
        vectors, own = self._vectors(owner, t)
        return Fresh(torch.from_numpy(np.multiply(vectors, std, out=own, dtype=self._dtype)))

    def _vectors(self, owner: int, t: int) -> tuple[NDArray[np.floating], NDArray[np.floating] | None]:
        """Of variance 1, (d,), or (draws, d), and the same again if the caller may write into them."""
        size, count = self._plan.objective.dimension, self._plan.mechanism.draws(t)
        if count is not None:
            return self._source.nodes(size, owner, t, count), None
        ahead = rounds_ahead(size, len(self._plan.batch_sizes))
        if ahead == 1:  # piece by piece: no vector of the source's own type beside this one
            own = np.empty(size, dtype=self._dtype)
            return self._source.weighted_sum(size, [owner], [1.0], t, out=own), own
        if owner not in self._ahead:
            self._ahead[owner] = DrawAhead(self._source, size, owner, self._plan.schedule.rounds, ahead)
        return self._ahead[owner].vector(t), None


def rounds_ahead(size: int, silos: int) -> int:
    """The rounds whose vectors a simulated silo draws at a time; 1 where it keeps none.

    A vector that is drawn in pieces gains nothing from those of other rounds.
    """
    if size > LONGEST_AT_ONCE:
        return 1
    return max(1, min(_ROUNDS_AHEAD, _VALUES_AHEAD // (size * silos)))


class DrawAhead:
    """One owner's vectors for rounds in order, drawn `ahead` at a time: a batch costs half of single draws.

    A cache and nothing more: any round may be asked for, any number of times.  Round 1 is drawn alone: a clock
    that starts when it is over sees all draws of the rounds after it.
    """

    def __init__(self, source: KeyedNormal, size: int, owner: int, rounds: int, ahead: int) -> None:
        self._source, self._size, self._owner, self._rounds = source, size, owner, rounds
        self._ahead = ahead
        self._first = 0
        self._drawn = np.empty((0, size), source.dtype)

    def vector(self, t: int) -> NDArray[np.floating]:
        """The vector of round t, shape (size,): do not write into it."""
        if not self._first <= t < self._first + len(self._drawn):
            last = 1 if t == 1 else max(t, min(t + self._ahead - 1, self._rounds))
            rounds = range(t, last + 1)
            self._drawn = self._source.vectors(self._size, [self._owner] * len(rounds), rounds)
            self._first = t
        vector: NDArray[np.floating] = self._drawn[t - self._first]
        return vector


@dataclass(frozen=True)
class Absences:
    """Silo -> the rounds, in order, in which it is away; silos that never are have none."""

    rounds: Mapping[int, tuple[int, ...]]

    def __bool__(self) -> bool:
        return bool(self.rounds)

    def away(self, t: int) -> frozenset[int]:
        """The silos that do not answer in round t."""
        return frozenset(silo for silo, rounds in self.rounds.items() if t in rounds)


NOBODY = Absences({})


def absences_of(cell: Cell) -> Absences:
    """Draw the absences of a scenario, a function of its seed; the same for every engine."""
    federation, rounds = cell.federation, cell.schedule.rounds
    away: dict[int, set[int]] = {int(silo): set(given) for silo, given in federation.away.items()}
    if federation.drop_out:
        coins = public_generator(cell.seed, "drop-outs").random((rounds, federation.silos))
        for t, silo in zip(*(coins < federation.drop_out).nonzero(), strict=True):
            away.setdefault(int(silo), set()).add(int(t) + 1)
    return Absences({silo: tuple(sorted(given)) for silo, given in sorted(away.items()) if given})


def stand_in(plan: Plan, last: Tensor, t: int) -> Tensor:
    """Substitute the message of a silo that is away in round t; `last` is that of the round before.

    Its increment is 0: sums go on from what they were, zeros at first, its weight p_i and its batch B_i stay.

    Guarantee: nothing but earlier releases enters, so that all that is released keeps what `plan.releases` claims,
    for silos whose answering depends on themselves and public things only: a silo's own noisy stream has a part
    left out, and a server with noise of its own adds as much to a sum in which a record moves less, or nothing.
    """
    if plan.of_one_round:
        return torch.zeros(plan.message_length(t), dtype=plan.message_dtype)
    return last * plan.estimator.round(t).decay
