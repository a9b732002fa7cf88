"""A silo whose releases are meant: noise from a secret key, and nothing of it used twice.

    chain_t = H(chain_{t-1}, query of round t, or "missed")
    fresh noise of round t = KeyedNormal(H(key, silo, t, chain_t))

A silo that is put back to an earlier state (a restored disk) and asked something else draws other noise, in that
round and in all that follow; asked the same, it gives the same bytes.  Masks are bound to the chain likewise, so
that no two messages share one: silos that are asked the same agree on them, and a server that asks silos different
things gets a sum of masks.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedpriv.clients.increments import Bounded
from fedpriv.clients.silo import Silo, SiloState
from fedpriv.objectives import Increment, Objective, Records
from fedpriv.randomness import KeyedNormal, derive_key
from fedpriv.replicates.columns import Scalar
from fedpriv.running.plan import Plan
from fedpriv.running.release import released
from fedpriv.running.round_step import fresh_vectors
from fedpriv.secure_aggregation.masks import Masker

_log = logging.getLogger("fedpriv.guard")


@dataclass(frozen=True)
class Forgiving(Bounded):
    """A record whose increment cannot be computed counts as zero: giving up then would tell of it.

    Guarantee: what the other records add does not depend on it.  The reason goes to the silo's own log.
    """

    def increment(
        self,
        points: Sequence[Tensor],
        coefficients: Sequence[float],
        records: Records,
        weights: Tensor,
        clip: Scalar,
    ) -> Increment:
        try:
            return super().increment(points, coefficients, records, weights, clip)
        except Exception:
            _log.exception("an evaluation failed; it is done again for each record among dummies")
        total = torch.zeros(self.dimension, dtype=torch.float64)
        clipped = torch.zeros((), dtype=torch.int64)
        for row in range(len(records.labels)):
            only = torch.arange(len(records.labels)) == row
            try:
                alone = super().increment(
                    points, coefficients, _among_dummies(records, only), weights.where(only, 0.0), clip
                )
            except Exception:
                clipped += 1
            else:
                total, clipped = total + alone.total, clipped + alone.clipped
        return Increment(total, clipped)


def _among_dummies(records: Records, kept: Tensor) -> Records:
    """The kept rows in their places, zeros in the others: a batch of another shape would have other last bits."""
    features = records.features.where(kept.view(-1, *[1] * (records.features.dim() - 1)), 0)
    labels = records.labels.where(kept.view(-1, *[1] * (records.labels.dim() - 1)), 0)
    return Records(features, labels)


@dataclass(frozen=True)
class ReleasingSilo(Silo):
    """`Silo` with a key of its own for noise and masks, for one run.

    Guarantee: what leaves is a function of exact sums plus float64 noise, rounded once (`released`, `Grid`); its
    noise is a function of the key and of all queries until now, never drawn ahead, and unrelated for two different
    sequences of queries; no evaluation of records ends in an exception.
    """

    key: bytes = field(default=b"", repr=False)
    """32 bytes that nobody else has."""
    scenario: bytes = b""
    """A digest of the scenario: silos with different ones do not agree on masks."""

    @staticmethod
    def of(
        number: int, plan: Plan, records: Records, key: bytes, scenario: bytes, *, gaps: bool = False
    ) -> "ReleasingSilo":
        noise = KeyedNormal(key, np.float64)
        return ReleasingSilo(number, plan, plan.objective, records, noise, gaps, key, scenario)

    def start(self) -> SiloState:
        return super().start()._replace(chain=bytes(hashlib.sha256().digest_size))

    @cached_property
    def masker(self) -> Masker:
        return Masker(self.noise.secret(self.number), self.number, self.scenario)

    @property
    def _looked_at(self) -> Objective:
        return Forgiving(self.objective)

    def _linked(self, chain: bytes, query: Tensor | None) -> bytes:
        asked = b"missed" if query is None else b"asked" + query.contiguous().numpy().tobytes()
        return hashlib.sha256(b"fedpriv queries" + chain + asked).digest()

    def _fresh(self, t: int, chain: bytes) -> Tensor:
        key = derive_key(self.key, "noise of a round", str(self.number), str(t), chain.hex())
        source = KeyedNormal(key, np.float64)
        return fresh_vectors(source, self.plan.mechanism, self.objective.dimension, self.number, t)

    def _rounded(self, release: Tensor) -> Tensor:
        """Rounded far below the least noise that this mechanism's rounds have."""
        std = float(self.plan.noise.std_of(self.number))
        if not std:
            return super()._rounded(release)
        least = self.plan.mechanism.fresh_std
        return released(release, std * least if least > 0.0 else std, self.plan.message_dtype)
