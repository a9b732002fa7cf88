"""A silo whose releases are exact: integers from its records to the noise, and nothing of the noise used twice.

    s_t      `IntegerStep.sums`: increments truncated to the lattice, added exactly
    y_t      (C s)_t + z_t, keyed by (key, silo, round, chain, (C s)_t); chain_t = H(chain_{t-1}, query)
    leaves   untrusted: unit / B_i · (B y)_t       masked: y_t modulo 2^w plus masks       trusted: s_t itself

A silo that is put back to an earlier state (a restored disk) and asked something else draws other noise, in that
round and in all that follow; asked the same, it gives the same bytes.  Masks are bound to the chain likewise, so
that no two messages share one: silos that are asked the same agree on them, and a server that asks silos different
things gets a sum of masks.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedpriv.clients.silo import Release, Silo, SiloState
from fedpriv.estimators.local_steps import point_of, remembered
from fedpriv.exact.fixed_point import Ints
from fedpriv.exact.subkeys import START, linked, linked_missed
from fedpriv.exact.words import packed
from fedpriv.objectives import Records
from fedpriv.protocol.arrays import Counts
from fedpriv.randomness import KeyedNormal
from fedpriv.running.integers import IntegerStep
from fedpriv.running.plan import Plan
from fedpriv.running.round_step import Read
from fedpriv.secure_aggregation.masks import Masker


@dataclass(frozen=True)
class ReleasingSilo(Silo):
    """`Silo` with a key of its own for noise and masks, for one run; `plan.exact` says on which lattice.

    Guarantee: what leaves is a function of y_t (untrusted, masked), or is s_t (a trusted server, which adds the
    noise): every record enters as integers of bounded norm, whatever it is asked.  The noise is a function of the
    key, of all queries until now and of the integers it is added to, never drawn ahead.  No evaluation of records
    ends in an exception.  In a simulation the key is the seed's, and protects nobody.
    """

    scenario: bytes = b""
    """A digest of the scenario: silos with different ones do not agree on masks."""

    @staticmethod
    def of(number: int, plan: Plan, records: Records, key: bytes, scenario: bytes, *, gaps: bool = False) -> Silo:
        """The silo of a plan: a plain one where there is no noise, of which nothing is claimed."""
        noise = KeyedNormal(key, np.float64)
        if plan.exact is None:
            if plan.noise.sources:
                raise ValueError("noise that is really released needs a plan made for it: plan_of(released=True)")
            return Silo(number, plan, plan.objective, records, noise, gaps, key)
        return ReleasingSilo(number, plan, plan.objective, records, noise, gaps, key, scenario)

    def start(self) -> SiloState:
        """Whoever adds no noise has no strategy, and who is masked no B: those are the server's."""
        sums = () if self.plan.trust.noise_at_server else self._integers.strategy.start()
        hidden = self.plan.mechanism.start() if self.plan.trust.private_messages else ()
        return SiloState(0, (), _tensors(sums), hidden, START)

    def answer(self, state: SiloState, t: int, query: Tensor) -> tuple[Release, SiloState]:
        """As for `Silo`; the release is s_t, y_t or (B y)_t in real units, whatever the trust setting wants."""
        self.check(state, t, query)
        state, current = self._after_gap(state, t)
        read, point = self._read(t), point_of(current, query, state.past)
        sums, past = self._integers.sums(state.past, current, point, read, self.number)
        chain = linked(state.chain, query.contiguous().numpy().tobytes())
        vector, after = self._released(state, t, sums, chain)
        past = remembered(current, state.past, past, vector)
        return Release(vector, Counts(read.weights.shape[0], None)), after._replace(past=past)

    def message(self, release: Tensor, t: int, keys: bytes, chain: bytes = b"") -> Tensor:
        if not self.plan.masked:
            return release.reshape(-1).to(self.plan.message_dtype)
        silos, noisy = len(self.plan.weights), release.numpy().reshape(-1)
        mask = self.masker.mask(keys, silos, t, len(noisy), chain)
        words = packed(noisy, mask, self._integers.exact.run.word)
        return torch.frombuffer(bytearray(words), dtype=torch.uint8)

    def _read(self, t: int) -> Read:
        """As for `Silo`; a secret round into which nobody was drawn is like any other."""
        read = super()._read(t)
        if read.records is None and self.plan.schedule.secret:
            return read._replace(records=Records(*(column[:0] for column in self.records)))
        return read

    @cached_property
    def masker(self) -> Masker:
        return Masker(self.noise.secret(self.number), self.number, self.scenario)

    @cached_property
    def _integers(self) -> IntegerStep:
        assert self.plan.exact is not None  # as `of` says
        return IntegerStep(self.plan, self.plan.exact)

    def _missed(self, state: SiloState, t: int) -> SiloState:
        _, after = self._released(state, t, self._integers.nothing(t), linked_missed(state.chain))
        return after

    def _released(self, state: SiloState, t: int, sums: Ints, chain: bytes) -> tuple[Tensor, SiloState]:
        """What round t releases of these sums, and the state after it, past queries apart."""
        step, trust = self._integers, self.plan.trust
        if trust.noise_at_server:
            return torch.from_numpy(sums), SiloState(t, state.past, (), (), chain)
        strategy = tuple(vector.numpy() for vector in state.sums)
        noisy, strategy = step.noisy(strategy, t, sums, self.key, self.number, chain)
        vector, hidden = torch.from_numpy(noisy), state.hidden
        if trust.private_messages:
            vector, hidden = step.leaving(hidden, t, noisy, self.plan.batch_sizes[self.number])
        return vector, SiloState(t, state.past, _tensors(strategy), hidden, chain)


def _tensors(vectors: tuple[Ints, ...]) -> tuple[Tensor, ...]:
    return tuple(map(torch.from_numpy, vectors))
