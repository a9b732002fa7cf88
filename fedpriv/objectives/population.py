"""Populations whose risk is known, for checks against theory: what `evaluate` reports beside the mean loss."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

_LARGEST = 16


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

    def excess_risk(self, point: Tensor) -> Tensor:
        return (self.curvature * (point - self.minimizer).square()).sum(-1) / 2.0

    def gradient(self, point: Tensor) -> Tensor:
        return self.curvature * (point - self.minimizer)


@dataclass(frozen=True)
class LogisticPopulation:
    """Labels that follow the logistic model of x*, features with independent coordinates ±√curvature.

    Expectations are sums over all 2^d sign vectors, exact; ValueError above 16 dimensions.
    """

    curvature: Tensor
    minimizer: Tensor

    def __post_init__(self) -> None:
        if len(self.curvature) > _LARGEST:
            raise ValueError(f"{len(self.curvature)} dimensions: all sign vectors can be summed up to {_LARGEST}")

    @cached_property
    def _features(self) -> Tensor:
        dimension = len(self.curvature)
        bits = torch.arange(2**dimension).unsqueeze(1) >> torch.arange(dimension) & 1
        return (2.0 * bits - 1.0).to(self.curvature.dtype) * self.curvature.sqrt()

    def excess_risk(self, point: Tensor) -> Tensor:
        """The mean Kullback-Leibler divergence of the labels' true probabilities from the model's."""
        margins, true = point @ self._features.mT, self.minimizer @ self._features.mT
        return (functional.softplus(margins) - functional.softplus(true) - true.sigmoid() * (margins - true)).mean(
            -1
        )

    def gradient(self, point: Tensor) -> Tensor:
        gap = (point @ self._features.mT).sigmoid() - (self.minimizer @ self._features.mT).sigmoid()
        return gap @ self._features / len(self._features)
