"""Ridge regression out of one release: the clipped second moments of features and label, solved by the server.

| of the paper | here |
|---|---|
| X, y; rows of bounded norm | u = (z, y)/R of a record, z with a constant 1, R² a bound on ‖z‖² + y² |
| XᵀX + noise, Xᵀy + noise | svec(u uᵀ): entries of the upper triangle, √2 times those off the diagonal |
| ridge with the eigenvalues kept away from 0 | (A₊ + λ I)⁻¹ b, A₊ without negative eigenvalues |

‖svec(u uᵀ)‖ = ‖u‖² ≤ 1, and two such are √2 apart at most, since ⟨svec(u uᵀ), svec(v vᵀ)⟩ = ⟨u, v⟩² ≥ 0.

A label of two classes is ±1, and the logit is twice the prediction: where the logistic loss is replaced by its
quadratic expansion at 0, log 2 - y s/2 + s²/8, least squares times 2 is its minimizer.

Source: Wang 2018, "Revisiting differentially private linear regression" (sufficient statistics, adaptive ridge).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.replicates import Scalar
from fedpriv.loss.clipping import Clipping, compute_clipping, upper_norm, vector_bounds
from fedpriv.loss.losses import LogisticLoss, Loss, SquaredError
from fedpriv.loss.objective import Batch, Deterministic, Increment, ModelEvaluation, Query, Records
from fedpriv.participation.orders import Dependence

RIDGE_STATISTICS = "ridge-statistics"
_NORMAL_QUANTILE = 1.959963984540054
_CHUNK_VALUES = 2**22
MAX_FEATURES = 512
"""With the constant; so many give 131,841 moments."""
Floats = NDArray[np.float64]


def check_one_release(rounds: int, algorithm: str, step: object, clip: object) -> None:
    """ValueError for a run whose model is not the mean of one release."""
    if rounds != 1 or algorithm != "dp-sgd" or step != 1.0 or clip != 1.0:
        raise ValueError(
            f'model.name = "{RIDGE_STATISTICS}" is one release: federation.rounds = 1, algorithm.name = "dp-sgd", '
            "clip = 1.0 and step = 1.0"
        )


@dataclass(frozen=True)
class RidgeStatistics(Deterministic):
    """-svec(u uᵀ) of a record: one step of size 1 from 0 gives their mean, and `weights` what it predicts.

    Guarantee: an increment is a function of its own record alone, whatever is asked, of norm 1 at most and no
    further than `diameter` from any other and from zeros: clipping makes u shorter, and u uᵀ stays semidefinite.
    """

    features: int
    """With the constant."""
    norm_bound: float
    """R."""
    classes: bool
    penalty: float
    dtype: torch.dtype
    dependence = Dependence.RECORD

    @property
    def dimension(self) -> int:
        return (self.features + 1) * (self.features + 2) // 2

    lipschitz = 1.0
    smoothness = 0.0
    diameter = math.sqrt(2.0)
    """The largest distance of two increments, or of one and zeros."""

    @property
    def loss(self) -> Loss:
        return LogisticLoss() if self.classes else SquaredError()

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.dtype)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        records, weights = batch
        lead = np.broadcast_shapes(query.points[0].shape[:-1], records.features.shape[:-2])
        total = torch.zeros(*lead, self.dimension, dtype=weights.dtype, device=weights.device)
        clipped = torch.zeros(lead, dtype=torch.int64, device=weights.device)
        rows = max(1, _CHUNK_VALUES // (self.dimension * math.prod(records.features.shape[:-2])))
        for start in range(0, records.features.shape[-2], rows):
            some = Records(
                records.features[..., start : start + rows, :], records.labels[..., start : start + rows]
            )
            vectors, found = self._clip_increments(query, Batch(some, weights[..., start : start + rows]), clip)
            total = total + (found.factor.unsqueeze(-2) @ found.zero_unrepresentable(vectors)).squeeze(-2)
            clipped = clipped + found.clipped_count
        return Increment(total, clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        vectors, found = self._clip_increments(query, batch, clip)
        return found.zero_unrepresentable(vectors) * found.factor.unsqueeze(-1)

    def _clip_increments(self, query: Query, batch: Batch, clip: Scalar) -> tuple[Tensor, Clipping]:
        vectors = -self._moments(batch.records).to(batch.weights.dtype) * sum(query.coefficients)
        return vectors, compute_clipping(vector_bounds(upper_norm(vectors)), batch.weights, clip)

    def _moments(self, records: Records) -> Tensor:
        """svec(u uᵀ) in float64, (..., B, `dimension`)."""
        labels = records.labels.double()
        labels = 2.0 * labels - 1.0 if self.classes else labels.clamp(-1.0, 1.0)
        u = torch.cat([records.features.double(), labels.unsqueeze(-1)], dim=-1) / self.norm_bound
        rows, columns, scale = (each.to(u.device) for each in self._triangle)
        return u[..., rows] * u[..., columns] * scale

    @cached_property
    def _triangle(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = torch.triu_indices(self.features + 1, self.features + 1)
        return rows, columns, torch.where(rows == columns, 1.0, math.sqrt(2.0)).double()

    def moment_matrix(self, point: Tensor) -> Tensor:
        """The mean of (z, y)(z, y)ᵀ that moments `point` (..., d) say, noise included."""
        rows, columns, scale = (each.to(point.device) for each in self._triangle)
        size = self.features + 1
        found = torch.zeros(*point.shape[:-1], size, size, dtype=torch.float64, device=point.device)
        found[..., rows, columns] = point.double() / scale * self.norm_bound**2
        found[..., columns, rows] = found[..., rows, columns]
        return found

    def compute_weights(self, point: Tensor) -> Tensor:
        """Of the score ⟨weights, z⟩: (..., features)."""
        whole, size = self.moment_matrix(point), self.features
        values, vectors = torch.linalg.eigh(whole[..., :size, :size])
        along = (vectors.mT @ whole[..., :size, size:]).squeeze(-1) / (values.clamp(min=0.0) + self.penalty)
        found: Tensor = (vectors @ along.unsqueeze(-1)).squeeze(-1) * (2.0 if self.classes else 1.0)
        return found.to(self.dtype)

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        return records.features @ self.compute_weights(point).unsqueeze(-1)

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return self.loss.value(self.outputs(point, records), records.labels)

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        outputs = self.outputs(point, records)
        return ModelEvaluation(
            self.loss.value(outputs, records.labels).mean(-1), self.loss.accuracy(outputs, records.labels)
        )

    def coefficients(self, point: Tensor, published: "MeanStatistics") -> "list[Coefficient]":
        """Every weight with its interval of 95 %.

        With H = A₊ + λ I, s² the residuals' mean square and v = (std R²)², to first order in the noise

            Cov w = H⁻¹ [ s² A₊ / n  +  v/2 ((1 + ‖w‖²) I + w wᵀ) ] H⁻¹.

        It is of the population's weights under the same penalty.
        """
        std, records, counted, _ = published
        whole, size = self.moment_matrix(point / counted).numpy(), self.features
        moments, both = whole[:size, :size], whole[:size, size]
        values, vectors = np.linalg.eigh(moments)
        held = (vectors * values.clip(0.0)) @ vectors.T
        inverse = np.linalg.inv(held + self.penalty * np.eye(size))
        weights = inverse @ both
        residual = max(0.0, float(whole[size, size] - 2.0 * weights @ both + weights @ held @ weights))
        spread = (std / counted * self.norm_bound**2) ** 2 / 2.0
        noise = spread * ((1.0 + weights @ weights) * np.eye(size) + np.outer(weights, weights))
        unit = 2.0 if self.classes else 1.0
        return make_intervals(unit * weights, unit**2 * inverse @ (residual * held / records + noise) @ inverse)


class Coefficient(NamedTuple):
    """A weight with its interval of 95 %: sampling and noise."""

    value: float
    low: float
    high: float


class MeanStatistics(NamedTuple):
    """Public numbers of the means that a model came from."""

    std: float
    """Of the noise, per coordinate."""
    record_count: int
    """That count."""
    counted_share: float
    """The share of places whose record counts; means are over places."""
    round_count: int


def make_intervals(weights: Floats, covariance: Floats) -> list[Coefficient]:
    """Coefficients with this covariance of their errors."""
    return [
        Coefficient(value, value - _NORMAL_QUANTILE * error, value + _NORMAL_QUANTILE * error)
        for value, error in zip(weights.tolist(), np.sqrt(np.diag(covariance)).tolist(), strict=True)
    ]
