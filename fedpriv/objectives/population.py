"""Populations whose risk is known, for checks against theory: what `evaluate` reports beside the mean loss."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Population(Protocol):
    """The risk over the distribution of records, not over a sample."""

    def excess_risk(self, point: Tensor) -> Tensor:
        """F(x) - F(x*) for points (..., d), shape (...)."""
        ...

    def gradient(self, point: Tensor) -> Tensor:
        """∇F(x), (..., d)."""
        ...


@dataclass(frozen=True)
class QuadraticPopulation:
    """F(x) - F(x*) = (x - x*)ᵀ diag(curvature) (x - x*) / 2, of least squares with E[z zᵀ] = diag(curvature)."""

    curvature: Tensor
    minimizer: Tensor
    least: float = 0.0
    """F - F(x*) of the best point that is allowed, if x* is not: excess is counted from there."""

    def excess_risk(self, point: Tensor) -> Tensor:
        return (self.curvature * (point - self.minimizer).square()).sum(-1) / 2.0 - self.least

    def gradient(self, point: Tensor) -> Tensor:
        return self.curvature * (point - self.minimizer)


def quadratic_in_ball(curvature: Tensor, minimizer: Tensor, radius: float) -> QuadraticPopulation:
    """The population whose excess risk is counted from the best point of the ball of `radius` around 0.

    That point is (diag(curvature) + λ)^-1 diag(curvature) x* for the λ ≥ 0 that gives it the norm `radius`.
    """
    free = QuadraticPopulation(curvature, minimizer)
    if float(torch.linalg.vector_norm(minimizer)) <= radius:
        return free
    low, high = 0.0, float(curvature.max() * torch.linalg.vector_norm(minimizer)) / radius
    for _ in range(200):
        middle = (low + high) / 2.0
        best = curvature * minimizer / (curvature + middle)
        low, high = (middle, high) if float(torch.linalg.vector_norm(best)) > radius else (low, middle)
    best = curvature * minimizer / (curvature + high)
    return QuadraticPopulation(curvature, minimizer, float(free.excess_risk(best)))
