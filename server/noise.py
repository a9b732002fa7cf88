"""What a server that is trusted to add noise does with the silos' exact mean, round by round."""

from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.errors import RunError
from fedpriv.randomness import SERVER, KeyedNormal
from fedpriv.running.plan import Plan
from fedpriv.running.release import released
from fedpriv.running.round_step import RoundStep, fresh_vectors
from fedpriv.server.noise_chain import NoiseChain

_ARITHMETIC = 1.01
"""How far above the bound in real numbers a silo's own arithmetic may bring a sum."""


class Released(NamedTuple):
    """What a round released: q~_t, shape (d,), and the link of its noise, b"" where the server adds none."""

    vector: Tensor
    link: bytes = b""


class ServerNoise:
    """The server's row of the mechanism's noise in every round, in order; nothing where the silos add it all.

    Guarantee: with a `NoiseChain`, what is released is `released` of a float64 sum, and its noise is keyed by
    everything that was added up until then.  With a simulation's `KeyedNormal` it has the run's type.
    """

    def __init__(self, plan: Plan, initial: Tensor, source: KeyedNormal | NoiseChain) -> None:
        """`initial` (d,) has the run's type."""
        self.std = float(plan.noise.std_of(SERVER))
        self._mechanism, self._initial, self._source = plan.mechanism, initial, source
        self._step = RoundStep(plan.estimator, plan.mechanism, plan.objective)
        self._state, self._link = plan.mechanism.start(), b""

    @property
    def simulated(self) -> bool:
        """Whether there is noise here that anybody can take away who knows the scenario's seed."""
        return bool(self.std) and isinstance(self._source, KeyedNormal)

    def released(self, mean: Tensor, t: int) -> Released:
        """q~_t, of the run's type, from the silos' mean (d,)."""
        dtype = self._initial.dtype
        if not self.std:
            return Released(mean.to(dtype))
        if isinstance(self._source, KeyedNormal):
            return Released(self._noisy(mean, t, self._source).to(dtype))
        self._link = self._source.link(self._link, t, mean)
        noisy = self._noisy(mean, t, self._source.source(self._link))
        return Released(released(noisy, self.std * (self._mechanism.fresh_std or 1.0), dtype), self._link)

    def repeat(self, known: Released, t: int) -> None:
        """Draw again the noise of a round that was released: its state is what later rounds need."""
        if self.std:
            self._link, source = known.link, self._source
            self._noisy(known.vector, t, source if isinstance(source, KeyedNormal) else source.source(known.link))

    def _noisy(self, mean: Tensor, t: int, source: KeyedNormal) -> Tensor:
        fresh = fresh_vectors(source, self._mechanism, len(self._initial), SERVER, t).mul_(self.std)
        vector, self._state = self._step.noisy(mean, self._state, t, fresh)
        return vector


class SumBound:
    """The largest norm that a silo's exact running sum can have, round by round, whatever its records are."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._largest = plan, 0.0

    def check(self, total: Tensor, silo: int, t: int) -> None:
        """RunError for a sum (d,) of round t that records clipped as the plan says cannot add up to."""
        norm, largest = float(torch.linalg.vector_norm(total)), self._in(t)
        if not norm <= largest * _ARITHMETIC:
            raise RunError(
                f"silo {silo}, round {t}: sum of norm {norm:.6g}; clipped records add up to {largest:.6g} or less"
            )

    def move(self, t: int) -> None:
        """Round t is over."""
        self._largest = self._in(t)

    def _in(self, t: int) -> float:
        return self._plan.largest_sum_after(self._largest, t)
