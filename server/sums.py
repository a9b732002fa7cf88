"""What a server does with integers: the sum of masked ones as it is, of trusted silos' exact ones with its noise.

masked     y_t = Σ_i y_{i,t}, of which it knows nothing else
trusted    y_t = (C Σ_i s_{i,t}) + z_t, keyed by (key, server, round, chain of the queries, C s)
both       q~_t = unit / ΣB · (B y)_t

What a server makes of the silos' messages of a round: their mean, with noise of its own where it is trusted.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedpriv.core.errors import RunError
from fedpriv.core.random import SERVER, KeyedNormal
from fedpriv.noise.integers.fixed_point import Ints, sum_of
from fedpriv.noise.integers.gaussian import START, linked
from fedpriv.noise.integers.plan import ExactPlan
from fedpriv.noise.integers.strategies import pack, unpack
from fedpriv.protocol.arrays import is_finite
from fedpriv.rounds.plan import Plan
from fedpriv.rounds.round import IntegerStep, RoundStep, fresh_vectors

_PIECE = 2**16
"""Values of a mean that are computed at a time: all messages side by side are a copy of every one."""


class Kept(NamedTuple):
    """What a journal has of a round that is over: enough to make what it released again."""

    values: Tensor
    """q~_t (d,), or the noisy integers y_t in a row."""
    link: bytes = b""
    """The chain of the queries, where noise depends on them."""


class Released(NamedTuple):
    """What a round released: q~_t, shape (d,), of the run's type."""

    vector: Tensor
    kept: Kept
    secret: bytes = b""
    """What later rounds need and nobody else may see."""


class ServerSums(Protocol):
    """The server's side of every round, in order."""

    @property
    def simulated(self) -> bool:
        """Whether there is noise here that anybody can take away who knows the scenario's seed."""
        ...

    def released(self, messages: list[Tensor], t: int, query: Tensor) -> Released:
        """From the messages of silo 0, 1, … to the answers to `query`; RunError for one that cannot be used."""
        ...

    def repeat(self, known: Kept, t: int) -> Tensor:
        """q~_t of a round that is over, (d,)."""
        ...


class FloatSums:
    """The mean of what silos release, and in a simulation of a trusted server its noise, in the run's type.

    Guarantee: a server that really releases adds no noise in floating point; see `integer_sums`.
    """

    def __init__(self, plan: Plan, initial: Tensor, source: KeyedNormal | None) -> None:
        """`initial` (d,) has the run's type; `source` is a simulation's."""
        self._plan, self._initial, self._source = plan, initial, source
        self._std = float(plan.noise.std_of(SERVER))
        if self._std and source is None:
            raise ValueError("a server's noise is floating point in simulations only")
        self._step = RoundStep(plan.estimator, plan.mechanism, plan.objective)
        self._state = plan.mechanism.start()

    @property
    def simulated(self) -> bool:
        return bool(self._std)

    def released(self, messages: list[Tensor], t: int, query: Tensor) -> Released:
        mean = self._mean(messages)
        if not is_finite(mean):  # weights are positive, so a value that is not finite shows in the mean
            wrong = ", ".join(str(silo) for silo, message in enumerate(messages) if not is_finite(message))
            raise RunError(f"silo {wrong}, round {t}: the release has values that are not finite")
        if self._std and self._source is not None:
            size = len(self._initial)
            fresh = fresh_vectors(self._source, self._plan.mechanism, size, SERVER, t).mul_(self._std)
            mean, self._state = self._step.noisy(mean, self._state, t, fresh)
        vector = mean.to(self._initial.dtype)
        return Released(vector, Kept(vector))

    def repeat(self, known: Kept, t: int) -> Tensor:
        return known.values

    def _mean(self, messages: list[Tensor]) -> Tensor:
        """Σ_i p_i · release_i (d,)."""
        if self._plan.lattice is not None:
            total = self._plan.lattice.decode_sum([message.numpy() for message in messages])
            return torch.from_numpy(total).to(self._initial.dtype)
        mean = torch.empty_like(messages[0])
        weights = torch.tensor(self._plan.weights, dtype=mean.dtype)
        for start in range(0, len(mean), _PIECE):
            stop = start + _PIECE
            parts = [message[start:stop] for message in messages] if len(mean) > _PIECE else messages
            torch.mv(torch.stack(parts).mT, weights, out=mean[start:stop])
        return mean


class IntegerSums:
    """The sums of one run whose messages are integers.

    Guarantee: what is released is a function of y_t alone, which a journal keeps; the noise of a trusted server
    is keyed by all that was asked and by what it is added to, so that a round which is put back and comes with
    other sums has other noise, and the same round the same.
    """

    def __init__(
        self,
        plan: Plan,
        exact: ExactPlan,
        initial: Tensor,
        key: bytes,
        secret: Callable[[], bytes] = bytes,
        *,
        simulated: bool,
    ) -> None:
        """`key` is the noise's; `secret` gives what the last round that is over kept, b"" before the first."""
        self.simulated = simulated
        self._plan, self._initial, self._key, self._secret = plan, initial, key, secret
        self._step = IntegerStep(plan, exact)
        self._hidden, self._link = plan.mechanism.start(), START
        self._kept: bytes | None = None

    def released(self, messages: list[Tensor], t: int, query: Tensor) -> Released:
        self._link = linked(self._link, query.contiguous().numpy().tobytes())
        noisy = self._sum_of_masked(messages, t) if self._plan.masked else self._with_noise(messages, t)
        kept = Kept(torch.from_numpy(noisy.reshape(-1)), self._link)
        return Released(self._vector(noisy, t), kept, self._kept or b"")

    def repeat(self, known: Kept, t: int) -> Tensor:
        self._link = known.link
        return self._vector(known.values.numpy().reshape(self._step.shape(t)), t)

    def _sum_of_masked(self, messages: list[Tensor], t: int) -> Ints:
        words = [message.numpy().tobytes() for message in messages]
        return sum_of(words, self._step.exact.run.word, self._step.shape(t))

    def _with_noise(self, messages: list[Tensor], t: int) -> Ints:
        total = self._step.added([message.numpy().reshape(self._step.shape(t)) for message in messages], t)
        before = self._kept if self._kept is not None else self._secret()
        state = unpack(before) if before else self._step.strategy.start()
        noisy, state = self._step.noisy(state, t, total, self._key, SERVER, self._link)
        self._kept = pack(state)
        return noisy

    def _vector(self, noisy: Ints, t: int) -> Tensor:
        vector, self._hidden = self._step.leaving(self._hidden, t, noisy, sum(self._plan.batch_sizes))
        return vector.to(self._initial.dtype)


def sums_of(
    plan: Plan,
    initial: Tensor,
    key: bytes,
    secret: Callable[[], bytes] = bytes,
    *,
    simulated: KeyedNormal | None = None,
) -> ServerSums:
    """A server's side of the plan's rounds.

    `key` is of the noise that is added to integers, `secret` as in `IntegerSums`, and `simulated` a simulation's
    source of noise in floating point; None where releases are meant.
    """
    if plan.exact is None or plan.trust.private_messages:
        return FloatSums(plan, initial, simulated)
    noise = simulated is not None and plan.trust.noise_at_server
    return IntegerSums(plan, plan.exact, initial, key, secret, simulated=noise)
