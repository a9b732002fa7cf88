"""Bugs planted into the code that the audit looks at, each a function that plants it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fedpriv.clients.guard
import fedpriv.server.noise
from fedpriv.auditing.guarded import GuardedSilo
from fedpriv.clients.releasing import ReleasingSilo
from fedpriv.errors import RunError
from fedpriv.mechanisms import IndependentGaussian
from fedpriv.objectives import SoftmaxRegression
from fedpriv.participation.fixed_order import Schedule
from fedpriv.privacy.trust import Noise, Trust
from fedpriv.randomness import KeyedNormal, derive_key, seed_key, simulation_noise
from fedpriv.server.noise_chain import NoiseChain

Plant = Callable[[pytest.MonkeyPatch], None]


def fixed_keys(plant: pytest.MonkeyPatch) -> None:
    """No bug: keys that are the same in every run of a test, each used once."""
    drawn = iter(range(10**9))
    for module in ("fedpriv.clients.guard", "fedpriv.server.journal"):
        plant.setattr(f"{module}.system_key", lambda: derive_key(b"test", str(next(drawn))))


def noise_times(factor: float) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        honest = Trust.noise

        def less(self: Trust, *arguments: Any) -> Noise:
            return Noise(tuple(s._replace(std=s.std * factor) for s in honest(self, *arguments).sources))

        patch.setattr(Trust, "noise", less)

    return plant


def divided_twice(patch: pytest.MonkeyPatch) -> None:
    honest = Trust.noise

    def divided(self: Trust, sensitivity: float, batches: Any, weights: Any, relation: Any, mu: float) -> Noise:
        noise = honest(self, sensitivity, batches, weights, relation, mu)
        return Noise(tuple(s._replace(std=s.std / len(batches)) for s in noise.sources))

    patch.setattr(Trust, "noise", divided)


def no_clip(patch: pytest.MonkeyPatch) -> None:
    honest = SoftmaxRegression.increment

    def unclipped(
        self: SoftmaxRegression, points: Any, coefficients: Any, records: Any, weights: Any, clip: float
    ) -> Any:
        return honest(self, points, coefficients, records, weights, 4.0 * clip)

    patch.setattr(SoftmaxRegression, "increment", unclipped)


def read_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Schedule, "batches", lambda _, t: range(max(0, t - 2), max(1, t - 1)))


def same_noise_twice(first: int) -> Plant:
    """Round 4 repeats the noise of an earlier one; repeated noise would lower the score of a matched filter."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def repeating(_: Any, state: Any, t: int, fresh: Tensor) -> tuple[Tensor, Any]:
            kept = (fresh,) if t == first else state
            return (kept[0] if t == 4 else fresh), kept

        patch.setattr(IndependentGaussian, "noise", repeating)

    return plant


def one_round_without(patch: pytest.MonkeyPatch) -> None:
    def forgetful(_: Any, state: Any, t: int, fresh: Tensor) -> tuple[Tensor, Any]:
        return (torch.zeros_like(fresh) if t == 4 else fresh), state

    patch.setattr(IndependentGaussian, "noise", forgetful)


def same_noise_at_two_silos(patch: pytest.MonkeyPatch) -> None:
    honest = ReleasingSilo._fresh
    patch.setattr("fedpriv.clients.guard.system_key", lambda: bytes(32))
    patch.setattr(
        ReleasingSilo,
        "_fresh",
        lambda self, t, chain: honest(dataclasses.replace(self, number=0), t, chain),
    )


def one_key_for_all_runs(patch: pytest.MonkeyPatch) -> None:
    """45: a second open run is served under the first one's key."""
    honest, public = KeyedNormal.__init__, seed_key(1, "noise")
    patch.setattr(
        KeyedNormal,
        "__init__",
        lambda self, key, dtype="float32": honest(self, key if key == public else bytes(32), dtype),
    )


def a_key_from_the_seed(patch: pytest.MonkeyPatch) -> None:
    """47, and the same at a silo: anybody can draw the noise again."""
    honest = KeyedNormal.__init__
    patch.setattr(
        KeyedNormal, "__init__", lambda self, _, dtype="float32": honest(self, seed_key(1, "noise"), dtype)
    )


def state_without_nodes(patch: pytest.MonkeyPatch) -> None:
    """44: what a guard writes to its ledger has lost the mechanism's vectors."""
    honest = fedpriv.clients.guard.pack
    patch.setattr(fedpriv.clients.guard, "pack", lambda state: honest(state._replace(hidden=())))


def refusals_that_tell(patch: pytest.MonkeyPatch) -> None:
    """A guard that gives up where a record drives the arithmetic out of its range."""
    honest = GuardedSilo.answer

    def telling(self: GuardedSilo, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        if self._shard.images[0].any() and query.abs().max() > 1e6:
            raise RunError("values are not finite")
        return honest(self, run, t, query, keys)

    patch.setattr(GuardedSilo, "answer", telling)


def float32_noise(patch: pytest.MonkeyPatch) -> None:
    """2 and 5, at the server: noise of the run's type, not rounded."""
    patch.setattr(NoiseChain, "source", lambda self, link: KeyedNormal(self._of(b"noise", link), "float32"))
    patch.setattr(fedpriv.server.noise, "released", lambda noisy, _, dtype: noisy.to(dtype))


def chain_from_the_seed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NoiseChain, "source", lambda *_: simulation_noise(1, "float32"))
