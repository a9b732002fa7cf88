"""What a server makes of the silos' messages of a round: their mean, with noise of its own where it is trusted."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedpriv.errors import RunError
from fedpriv.protocol.arrays import is_finite
from fedpriv.randomness import SERVER, KeyedNormal
from fedpriv.running.plan import Plan
from fedpriv.running.round_step import RoundStep, fresh_vectors

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
