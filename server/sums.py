"""The server's part in a round: the mean or sum of the silos' messages, with its own noise where it is trusted.

masked     y_t = Σ_i y_{i,t}, of which it knows nothing else
trusted    y_t = (C Σ_i s_{i,t}) + z_t, keyed by (key, server, round, chain of the queries, C s)
both       q~_t = unit / ΣB · (B y)_t
else       the mean of what silos release, and in a simulation of a trusted server its noise, in the run's type
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.core.errors import RunError
from fedpriv.core.random import SERVER, KeyedNormal
from fedpriv.noise.integers.strategies import pack, unpack
from fedpriv.protocol.arrays import is_finite
from fedpriv.rounds.plan import Plan
from fedpriv.rounds.round import Arithmetic, FloatArithmetic, IntegerArithmetic, Seeded, State, tensors


class Kept(NamedTuple):
    """A journal's entry of a round that is over: enough to make what it released again."""

    values: Tensor
    """q~_t (d,), or the noisy integers y_t in a row."""
    link: bytes = b""
    """The chain of the queries, where noise depends on them."""


class Released(NamedTuple):
    """A round's release: q~_t, shape (d,), of the run's type."""

    vector: Tensor
    kept: Kept
    secret: bytes = b""
    """State that later rounds need and nobody else may see."""


class ServerSums:
    """The server's side of every round of one run, in order.

    Guarantee: a server that really releases adds no noise in floating point; see `integer_sums`.

    Guarantee: what is released is a function of y_t alone, which a journal keeps; the noise of a trusted server
    is keyed by all that was asked and by what it is added to, so that a round which is put back and comes with
    other sums has other noise, and the same round the same.
    """

    def __init__(
        self,
        plan: Plan,
        initial: Tensor,
        key: bytes,
        secret: Callable[[], bytes] = bytes,
        *,
        simulated: KeyedNormal | None = None,
        apart: bool = False,
    ) -> None:
        """`initial` (d,) has the run's type, and `key` is that of the noise which is added to integers.

        `secret` gives what the last round that is over kept, b"" before the first, and `simulated` a simulation's
        source of noise in floating point; None where releases are meant.  With `apart`, what is published is each
        silo's vector by itself, in a row.

        Guarantee: it is what the silos released, and no noise is drawn here.
        """
        self._plan, self._dtype, self._secret, self._apart = plan, initial.dtype, secret, apart
        self._arithmetic = _arithmetic_of(plan, initial.dtype, key, simulated)
        self._state = self._arithmetic.start(SERVER)
        self._kept: bytes | None = None
        self.simulated = simulated is not None and bool(float(plan.noise.std_of(SERVER)))
        """Whether there is noise here that anybody can take away who knows the scenario's seed."""

    def released(self, messages: list[Tensor], t: int, query: Tensor) -> Released:
        """From the messages of silo 0, 1, … to the answers to `query`; RunError for one that cannot be used."""
        total = torch.cat(messages) if self._apart else self._arithmetic.added(messages, t)
        if not is_finite(total):  # weights are positive, so a value that is not finite shows in the mean
            wrong = ", ".join(str(silo) for silo, message in enumerate(messages) if not is_finite(message))
            raise RunError(f"silo {wrong}, round {t}: the release has values that are not finite")
        noisy, state = self._arithmetic.noisy(self._before(), t, total, SERVER, query)
        noisy = noisy.to(self._plan.kept_dtype)
        vector, self._state = self._arithmetic.leaving(state, t, noisy, SERVER)
        if self._plan.of_one_round:
            self._kept = pack(tuple(vector.numpy() for vector in state.sums))
        return Released(vector.to(self._dtype), Kept(noisy.reshape(-1), state.chain), self._kept or b"")

    def repeat(self, known: Kept, t: int) -> Tensor:
        """q~_t of a round that is over, (d,)."""
        state = self._state._replace(chain=known.link)
        vector, self._state = self._arithmetic.leaving(state, t, known.values, SERVER)
        return vector.to(self._dtype)

    def _before(self) -> State:
        """The state before a round: sums that nobody else may see are the journal's after a restart."""
        if not self._plan.of_one_round:
            return self._state
        before = self._kept if self._kept is not None else self._secret()
        return self._state._replace(sums=tensors(unpack(before))) if before else self._state


def _arithmetic_of(plan: Plan, dtype: torch.dtype, key: bytes, simulated: KeyedNormal | None) -> Arithmetic:
    """Of real vectors where silos release them, of integers where their sum is to be released."""
    if plan.summed is not None:
        return IntegerArithmetic(plan, key)
    if simulated is not None:
        return FloatArithmetic(plan, Seeded(plan, simulated, dtype))
    if float(plan.noise.std_of(SERVER)):
        raise ValueError("a server's noise is floating point in simulations only")
    return FloatArithmetic(plan)
