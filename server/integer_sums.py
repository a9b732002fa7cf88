"""What a server does with integers: the sum of masked ones as it is, of trusted silos' exact ones with its noise.

masked     y_t = Σ_i y_{i,t}, of which it knows nothing else
trusted    y_t = (C Σ_i s_{i,t}) + z_t, keyed by (key, server, round, chain of the queries, C s)
both       q~_t = unit / ΣB · (B y)_t
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedpriv.exact.fixed_point import Ints
from fedpriv.exact.plan import ExactPlan
from fedpriv.exact.state import pack, unpack
from fedpriv.exact.subkeys import START, linked
from fedpriv.exact.words import sum_of
from fedpriv.randomness import SERVER, KeyedNormal
from fedpriv.running.integers import IntegerStep
from fedpriv.running.plan import Plan
from fedpriv.server.noise import FloatSums, Kept, Released, ServerSums


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
