"""One round of an exact release, for a silo, for a server that adds up silos, and for a simulation of both.

s_t   `IntegerStep.sums`     every record's increments as integers of bounded norm, added exactly
y_t   `IntegerStep.noisy`    (C s)_t + z_t, z_t a discrete Gaussian: the only thing that knows records
r_t   `IntegerStep.leaving`  unit / denominator · (B y)_t, in float64: post-processing of y
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from fedpriv.errors import RunError
from fedpriv.estimators.parts import Part, parts_of
from fedpriv.estimators.round import Round
from fedpriv.exact.fixed_point import Ints
from fedpriv.exact.plan import ExactPlan
from fedpriv.exact.records import integer_sum
from fedpriv.exact.release import added, leaving, private_sums
from fedpriv.exact.strategies import IntegerStrategy, IntState
from fedpriv.exact.subkeys import round_noise
from fedpriv.mechanisms import MechanismState
from fedpriv.objectives import Objective, Slots
from fedpriv.participation.secret_order import SecretOrder
from fedpriv.running.plan import Plan
from fedpriv.running.round_step import Read


@dataclass(frozen=True)
class IntegerStep:
    """The parts of an exact run that meet in every round; vectors of a round are (d,), or (draws, d) stacked."""

    plan: Plan
    exact: ExactPlan

    def shape(self, t: int) -> tuple[int, ...]:
        """Of a round's sums and of y_t."""
        count, size = self.strategy.draws(t), self.plan.objective.dimension
        return (size,) if count is None else (count, size)

    def sums(
        self, past: tuple[Tensor, ...], current: Round, query: Tensor, read: Read, silo: int
    ) -> tuple[Ints, tuple[Tensor, ...]]:
        """s_t of the records of one silo, and the queries to remember.

        Guarantee: one record moves the part of each vector by at most K under zero-out and 2 K under replace-one,
        whatever the query is; nothing but the sums depends on the records.
        """
        stretch = self.exact.run.factored.stretch(current.t)
        parts, past = parts_of(current, query, past, self.plan.estimator.memory)
        batches = max(1, self.plan.schedule.expected_batches(current.t))
        objective = self.plan.objective.at(Slots(current.t, read.rows))
        wanted: list[Part | None] = [parts.gradient]
        if current.split is not None and current.split.rounds_per_epoch > 1:
            wanted.insert(0, parts.residual)
        if parts.change is not None:
            wanted.append(parts.change)
        sums = [
            self._sum(objective, part, read, silo, norm, batches, stretch)
            for part, norm in zip(wanted, self.exact.norms(current.t), strict=True)
        ]
        return sums[0] if self.strategy.draws(current.t) is None else np.stack(sums), past

    def added(self, sums: Sequence[Ints], t: int) -> Ints:
        """Σ s_t over silos, at a server that is trusted with them; RunError for what records cannot add up to."""
        norms, most = self.exact.norms(t), self.plan.schedule.most_batches(t)
        bounds = [[size * most * norm for size in self.plan.batch_sizes] for norm in norms]
        try:
            if self.strategy.draws(t) is None:
                return added(sums, bounds[0])
            return np.stack([added([of[place] for of in sums], bound) for place, bound in enumerate(bounds)])
        except RunError as error:
            raise RunError(f"round {t}, {error}") from None

    def noisy(
        self, state: IntState, t: int, sums: Ints, key: bytes, owner: int, chain: bytes
    ) -> tuple[Ints, IntState]:
        """y_t and C's next state, which is as secret as the records.

        `chain` holds all queries up to this round's; `key` and it decide the noise, with (C s)_t itself.
        """
        draw = partial(round_noise, key, owner, t, chain)
        return private_sums(self.strategy, self.exact.claim, state, t, sums, draw)

    def leaving(self, hidden: MechanismState, t: int, noisy: Ints, records: int) -> tuple[Tensor, MechanismState]:
        """(B y)_t over the public number of `records` of a batch, float64 (d,), and B's next state."""
        factor = self.exact.lattice.unit / records
        return leaving(self.plan.mechanism, self.strategy.scales(t), hidden, t, noisy, factor)

    def nothing(self, t: int) -> Ints:
        """The sums of a round without records."""
        return np.zeros(self.shape(t), np.int64)

    @property
    def strategy(self) -> IntegerStrategy:
        return self.exact.run.factored.strategy

    def _least(self, silo: int) -> int:
        """Records that each round of a silo takes the time of at least, where it is secret who takes part."""
        return self.plan.most_held(silo) if isinstance(self.plan.schedule, SecretOrder) else 0

    def _sum(
        self,
        objective: Objective,
        part: Part | None,
        read: Read,
        silo: int,
        norm: int,
        batches: int,
        stretch: float,
    ) -> Ints:
        if part is None:
            return np.zeros(objective.dimension, np.int64)
        factor = self.exact.lattice.factor(batches) * stretch
        clip, least, counts = float(part.clip), self._least(silo), (read.weights != 0.0).numpy()
        return integer_sum(
            objective, part.points, part.coefficients, clip, read.records, norm, factor, least, counts
        )
