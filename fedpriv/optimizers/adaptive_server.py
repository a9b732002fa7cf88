"""Servers that adapt a step to every coordinate: FedAdagrad, FedYogi and FedAdam.

Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar & McMahan 2021, "Adaptive federated optimization",
Algorithm 2; there Δ_t is the clients' mean move, here the pseudo-gradient g_t = -Δ_t.

    m_t = β₁ m_{t-1} + (1 - β₁) g_t
    v_t = v_{t-1} + g_t²                                     (FedAdagrad)
    v_t = v_{t-1} - (1 - β₂) g_t² sign(v_{t-1} - g_t²)       (FedYogi)
    v_t = β₂ v_{t-1} + (1 - β₂) g_t²                         (FedAdam)
    x_{t+1} = x_t - η m_t / (√v_t + τ),   m_0 = 0, v_0 = τ²

| here | paper | shape |
|---|---|---|
| `released` / `scale` | -Δ_t, noisy | (..., d) |
| `first` | m_t, of -Δ | (..., d) |
| `second` | v_t | (..., d) |
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedpriv.estimators.round import Round
from fedpriv.replicates.columns import SHARED, Scalar


class AdaptiveState(NamedTuple):
    """The server's vectors between two rounds, each (..., d)."""

    iterate: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class FedAdagrad:
    """Steps of length `step`, divided by the root of all squares so far."""

    step: Scalar
    first_decay: Scalar
    """β₁."""
    floor: float = field(metadata=SHARED)
    """τ: how far steps adapt, a small number adapts more."""

    def start(self, initial: Tensor) -> AdaptiveState:
        return AdaptiveState(initial, torch.zeros_like(initial), torch.full_like(initial, self.floor**2))

    def query(self, state: AdaptiveState) -> Tensor:
        return state.iterate

    def update(self, state: AdaptiveState, released: Tensor, current: Round) -> AdaptiveState:
        gradient = released / current.scale
        first = self.first_decay * state.first + (1.0 - self.first_decay) * gradient
        second = self._second(state.second, gradient.square())
        return AdaptiveState(state.iterate - self.step * first / (second.sqrt() + self.floor), first, second)

    def output(self, state: AdaptiveState) -> Tensor:
        return state.iterate

    def _second(self, before: Tensor, square: Tensor) -> Tensor:
        """v_t from v_{t-1} and g_t²."""
        return before + square


@dataclass(frozen=True)
class FedYogi(FedAdagrad):
    """Squares are added or taken away, no faster than they come."""

    second_decay: Scalar
    """β₂."""

    def _second(self, before: Tensor, square: Tensor) -> Tensor:
        return before - (1.0 - self.second_decay) * square * torch.sign(before - square)


@dataclass(frozen=True)
class FedAdam(FedAdagrad):
    """Squares fade as β₂ says."""

    second_decay: Scalar
    """β₂."""

    def _second(self, before: Tensor, square: Tensor) -> Tensor:
        return self.second_decay * before + (1.0 - self.second_decay) * square
