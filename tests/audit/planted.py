"""Bugs planted into the code that the audit looks at, each a function that plants it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from fedpriv.addons.audit.canaries import GuardedSilo
from fedpriv.core.errors import RunError
from fedpriv.core.random import KeyedNormal, derive_key, integer_noise_key
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.objective import Batch, Query
from fedpriv.noise.integers.gaussian import KeyedDiscreteGaussian
from fedpriv.noise.integers.plan import ExactPlan
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan import plan as planning
from fedpriv.rounds import integers

Plant = Callable[[pytest.MonkeyPatch], None]


def fixed_keys(plant: pytest.MonkeyPatch) -> None:
    """No bug: keys that are the same in every run of a test, each used once."""
    drawn = iter(range(10**9))
    for module in ("fedpriv.silo.guard", "fedpriv.addons.audit.transcripts", "fedpriv.server.journal"):
        plant.setattr(f"{module}.system_key", lambda: derive_key(b"test", str(next(drawn))))


def noise_times(factor: float) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        honest = KeyedDiscreteGaussian.vector

        def less(self: KeyedDiscreteGaussian, size: int, sigma: float, node: int = 0) -> Any:
            return honest(self, size, sigma * factor, node)

        patch.setattr(KeyedDiscreteGaussian, "vector", less)

    return plant


def no_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyedDiscreteGaussian, "vector", lambda _, size, sigma, node=0: np.zeros(size, np.int64))


def no_clip(patch: pytest.MonkeyPatch) -> None:
    """An increment of four times the clip, and a check that lets it pass."""
    honest, increment = ExactPlan.norms, SoftmaxRegression.per_record
    patch.setattr(ExactPlan, "norms", lambda self, t: tuple(4 * norm for norm in honest(self, t)))

    def unclipped(self: SoftmaxRegression, *arguments: Any) -> Tensor:
        return increment(self, *arguments[:-1], 4.0 * arguments[-1])

    patch.setattr(SoftmaxRegression, "per_record", unclipped)


def no_check_in_integers(patch: pytest.MonkeyPatch) -> None:
    """Increments are clipped by the norm at the first point: a query that drives it to zero leaves the other."""

    def unchecked(total: Any, increment: Any, norm: int, factor: float, counts: bool) -> None:
        values = np.trunc(np.nan_to_num(np.clip(increment * factor, -(2.0**50), 2.0**50)))
        np.add(total, counts * values.astype(np.int64), out=total)

    def careless(self: SoftmaxRegression, query: Query, batch: Batch, places: Tensor, clip: float) -> Tensor:
        features = batch.records.features.double()
        first = self._combined_gradients(
            Query(query.points[:1], query.coefficients[:1]), batch.records
        ).mT.double()
        size = first.norm(dim=-1, keepdim=True) * features.norm(dim=-1, keepdim=True)
        residual = self._combined_gradients(query, batch.records).mT.double() * clip / size.clamp(min=clip)
        return (residual.unsqueeze(-1) * features.unsqueeze(-2)).flatten(-2)

    patch.setattr("fedpriv.noise.integers.increments.suits_rank_one", lambda *_: False)  # increments are formed
    patch.setattr("fedpriv.noise.integers.increments.add_truncated", unchecked)
    patch.setattr(SoftmaxRegression, "per_record", careless)


def read_twice(patch: pytest.MonkeyPatch) -> None:
    for name in ("_plan_float_rounds", "max_running_sum"):  # what they keep is of the order as it is
        patch.setattr(planning, name, getattr(planning, name).__wrapped__)
    patch.setattr(FixedOrder, "batches", lambda _, t: range(max(0, t - 2), max(1, t - 1)))


def same_noise_twice(first: int) -> Plant:
    """Round 4 repeats the noise of an earlier one; repeated noise would lower the score of a matched filter."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        honest = integers.round_noise

        def repeating(key: bytes, owner: int, t: int, chain: bytes, sums: Any) -> KeyedDiscreteGaussian:
            return honest(key, owner, first if t == 4 else t, bytes(32), 0 * sums)

        patch.setattr(integers, "round_noise", repeating)

    return plant


def one_round_without(patch: pytest.MonkeyPatch) -> None:
    honest, drawn = integers.round_noise, KeyedDiscreteGaussian.vector
    silent: list[KeyedDiscreteGaussian] = []

    def forgetful(key: bytes, owner: int, t: int, chain: bytes, sums: Any) -> KeyedDiscreteGaussian:
        source = honest(key, owner, t, chain, sums)
        silent[:] = [source] if t == 4 else []
        return source

    def vector(self: KeyedDiscreteGaussian, size: int, sigma: float, node: int = 0) -> Any:
        return drawn(self, size, sigma, node) * (self not in silent)

    patch.setattr(integers, "round_noise", forgetful)
    patch.setattr(KeyedDiscreteGaussian, "vector", vector)


def same_noise_at_two_silos(patch: pytest.MonkeyPatch) -> None:
    honest = integers.round_noise
    patch.setattr(
        integers, "round_noise", lambda _, owner, t, chain, sums: honest(bytes(32), 0, t, bytes(32), 0 * sums)
    )


def one_key_for_all_runs(patch: pytest.MonkeyPatch) -> None:
    """45: a second open run is served under the first one's key, and what it was asked is not hashed."""
    honest, drawn = integers.round_noise, integer_noise_key(1)

    def forgetful(key: bytes, owner: int, t: int, chain: bytes, sums: Any) -> KeyedDiscreteGaussian:
        return honest(key if key == drawn else bytes(32), owner, t, bytes(32), 0 * sums)

    patch.setattr(integers, "round_noise", forgetful)


def a_key_from_the_seed(patch: pytest.MonkeyPatch) -> None:
    """47, and the same at a silo: anybody can draw the noise again."""
    for module in ("fedpriv.silo.guard", "fedpriv.server.journal"):
        patch.setattr(f"{module}.system_key", lambda: integer_noise_key(1))


def refusals_that_tell(patch: pytest.MonkeyPatch) -> None:
    """A guard that gives up where a record drives the arithmetic out of its range."""
    honest = GuardedSilo.answer

    def telling(self: GuardedSilo, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        if self._shard.images[0].any() and query.abs().max() > 1e6:
            raise RunError("values are not finite")
        return honest(self, run, t, query, keys)

    patch.setattr(GuardedSilo, "answer", telling)


def float32_noise(patch: pytest.MonkeyPatch) -> None:
    """2 and 5: noise of floating-point numbers of the run's type, with its generator's radii."""
    calls = iter(range(10**9))

    def drawn(self: KeyedDiscreteGaussian, size: int, sigma: float, node: int = 0) -> Any:
        source = KeyedNormal(derive_key(b"float32", str(next(calls))), np.float32)
        return np.rint(source.vector(size, 0, 1).astype(np.float64) * sigma).astype(np.int64)

    patch.setattr(KeyedDiscreteGaussian, "vector", drawn)


def coarse_noise(patch: pytest.MonkeyPatch) -> None:
    """Noise of some twenty digits, as a float32 holds: its lowest bits are zeros, the sum's are in the clear."""
    honest = KeyedDiscreteGaussian.vector

    def coarse(self: KeyedDiscreteGaussian, size: int, sigma: float, node: int = 0) -> Any:
        return honest(self, size, sigma, node) >> 20 << 20

    patch.setattr(KeyedDiscreteGaussian, "vector", coarse)


def release_that_reads_the_sum(patch: pytest.MonkeyPatch) -> None:
    """Noise is rounded to be sent, and the sum is added again: what leaves is no function of y."""
    honest = integers.add_discrete_noise

    def reading(strategy: Any, claim: Any, state: Any, t: int, sums: Any, noise_of: Any) -> Any:
        noisy, after = honest(strategy, claim, state, t, sums, noise_of)
        exact, _ = strategy.step(state, t, sums)
        return ((noisy - exact) >> 25 << 25) + exact, after

    patch.setattr(integers, "add_discrete_noise", reading)
