"""Ridge regression from one release of the clipped second moments of features and label.

The server solves the regression from the released moments.

| paper | here |
|---|---|
| X, y; rows of bounded norm | u = (z, y)/R of a record, z with a constant 1, R² a bound on ‖z‖² + y² |
| XᵀX + noise, Xᵀy + noise | svec(u uᵀ): entries of the upper triangle, √2 times those off the diagonal |
| ridge with eigenvalues bounded away from 0 | (A₊ + λ I)⁻¹ b |

The released mean of (z, y)(z, y)ᵀ has the blocks A for z zᵀ and b for z y.  A₊ is A with 0 in place of its
negative eigenvalues, which noise may cause.  w = (A₊ + λ I)⁻¹ b are the weights.

‖svec(u uᵀ)‖ = ‖u‖² ≤ 1, and two such vectors have a distance of at most √2, since
⟨svec(u uᵀ), svec(v vᵀ)⟩ = ⟨u, v⟩² ≥ 0.

A label of two classes is y = ±1, and the logit is twice the prediction.  The quadratic expansion of the logistic
loss at 0 is log 2 - y s/2 + s²/8 in the logit s, which is (s - 2y)²/8 plus a constant: its minimizer is twice that
of least squares.

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
_NORMAL_QUANTILE = 1.959963984540054  # of 97.5 %, so that an interval of both signs covers 95 %
_CHUNK_VALUES = 2**22
MAX_FEATURES = 512
"""Largest number of features with the constant, which has 131,841 moments."""
Floats = NDArray[np.float64]


def check_one_release(rounds: int, algorithm: str, step: object, clip: object) -> None:
    """Check that the settings of a run make its model the mean of one release.

    Raises:
        ValueError: The run has several rounds, another algorithm, or another step or clip.
    """
    if rounds != 1 or algorithm != "dp-sgd" or step != 1.0 or clip != 1.0:
        raise ValueError(
            f'model.name = "{RIDGE_STATISTICS}" is one release: federation.rounds = 1, algorithm.name = "dp-sgd", '
            "clip = 1.0 and step = 1.0"
        )


@dataclass(frozen=True)
class RidgeStatistics(Deterministic):
    """Objective with increments -svec(u uᵀ), the contributions of records to a clipped sum.

    A step of size 1 from 0 against their mean leads to the model, the mean of svec(u uᵀ).  `compute_weights` makes
    a linear predictor of this model.

    Guarantee: for a query with coefficient 1 and a clip of 1 (`check_one_release`), an increment is a function of
    its own record alone, whatever the query's point is.  Its norm is 1 at most, and up to rounding it is no
    further than `diameter` from any other increment and from zeros: clipping makes u shorter, and u uᵀ stays
    semidefinite.
    """

    features: int
    """Number of features with the constant."""
    norm_bound: float
    """R, the bound on the norm of (z, y)."""
    classes: bool
    """Whether labels are classes 0 and 1, instead of numbers that are clamped to [-1, 1]."""
    penalty: float
    """λ, which is added to the second moments' diagonal."""
    dtype: torch.dtype
    dependence = Dependence.RECORD

    @property
    def dimension(self) -> int:
        return (self.features + 1) * (self.features + 2) // 2

    lipschitz = 1.0
    smoothness = 0.0
    diameter = math.sqrt(2.0)
    """Largest distance of two increments, or of an increment and zeros."""

    @property
    def loss(self) -> Loss:
        return LogisticLoss() if self.classes else SquaredError()

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.dtype)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Sum the weighted clipped increments -svec(u uᵀ), a chunk of records at a time.

        Of the query, the shape of the points (..., d) and the sum of the coefficients are used, which multiplies
        the increments.  Records are (..., B, …), and weights (B,) or (..., B).

        Returns:
            The sum, (..., d), and the number of clipped records, (...).
        """
        records, weights = batch
        leading_shape = np.broadcast_shapes(query.points[0].shape[:-1], records.features.shape[:-2])
        total = torch.zeros(*leading_shape, self.dimension, dtype=weights.dtype, device=weights.device)
        clipped = torch.zeros(leading_shape, dtype=torch.int64, device=weights.device)
        chunk_size = max(1, _CHUNK_VALUES // (self.dimension * math.prod(records.features.shape[:-2])))
        for start in range(0, records.features.shape[-2], chunk_size):
            chunk = Records(
                records.features[..., start : start + chunk_size, :],
                records.labels[..., start : start + chunk_size],
            )
            vectors, clipping = self._clip_increments(
                query, Batch(chunk, weights[..., start : start + chunk_size]), clip
            )
            total = total + (clipping.factor.unsqueeze(-2) @ clipping.zero_unrepresentable(vectors)).squeeze(-2)
            clipped = clipped + clipping.clipped_count
        return Increment(total, clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        vectors, clipping = self._clip_increments(query, batch, clip)
        return clipping.zero_unrepresentable(vectors) * clipping.factor.unsqueeze(-1)

    def _clip_increments(self, query: Query, batch: Batch, clip: Scalar) -> tuple[Tensor, Clipping]:
        vectors = -self._moments(batch.records).to(batch.weights.dtype) * sum(query.coefficients)
        return vectors, compute_clipping(vector_bounds(upper_norm(vectors)), batch.weights, clip)

    def _moments(self, records: Records) -> Tensor:
        """Vectors svec(u uᵀ) of all records in float64, (..., B, `dimension`).

        u = (z, y)/R has the label y = ±1 for classes, and a number clamped to [-1, 1] otherwise.
        """
        labels = records.labels.double()
        labels = 2.0 * labels - 1.0 if self.classes else labels.clamp(-1.0, 1.0)
        u = torch.cat([records.features.double(), labels.unsqueeze(-1)], dim=-1) / self.norm_bound
        rows, columns, scale = (array.to(u.device) for array in self._triangle)
        return u[..., rows] * u[..., columns] * scale

    @cached_property
    def _triangle(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = torch.triu_indices(self.features + 1, self.features + 1)
        return rows, columns, torch.where(rows == columns, 1.0, math.sqrt(2.0)).double()

    def moment_matrix(self, point: Tensor) -> Tensor:
        """Compute the mean of (z, y)(z, y)ᵀ from released moments.

        Since u = (z, y)/R, an entry is R² times that of the moments, divided by √2 off the diagonal.

        Args:
            point: Mean of svec(u uᵀ) as it was released, with noise, (..., d).

        Returns:
            Symmetric matrices in float64, (..., features + 1, features + 1).
        """
        rows, columns, scale = (array.to(point.device) for array in self._triangle)
        size = self.features + 1
        matrix = torch.zeros(*point.shape[:-1], size, size, dtype=torch.float64, device=point.device)
        matrix[..., rows, columns] = point.double() / scale * self.norm_bound**2
        matrix[..., columns, rows] = matrix[..., rows, columns]
        return matrix

    def compute_weights(self, point: Tensor) -> Tensor:
        """Compute the weights w = (A₊ + λ I)⁻¹ b of the score ⟨w, z⟩, (..., features).

        `point` (..., d) holds the released moments.  For two classes w is doubled, so that the score is a logit.
        """
        matrix, size = self.moment_matrix(point), self.features
        values, vectors = torch.linalg.eigh(matrix[..., :size, :size])
        solution = (vectors.mT @ matrix[..., :size, size:]).squeeze(-1) / (values.clamp(min=0.0) + self.penalty)
        weights: Tensor = (vectors @ solution.unsqueeze(-1)).squeeze(-1) * (2.0 if self.classes else 1.0)
        return weights.to(self.dtype)

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
        """Compute every weight with its 95 % interval, which covers sampling and noise.

        A and b are the released blocks of z zᵀ and z y, and A₊ is A without its negative eigenvalues.  Let H = A₊
        + λ I and w = H⁻¹ b, s² the mean square of the residuals y - ⟨w, z⟩ as the moments give it, at least 0, n
        the number of records, and v = (std R²)² the variance of the noise in the unit of z zᵀ.  The covariance, to
        first order in the noise and for residuals of one variance, is

            Cov w = H⁻¹ [ s² A₊ / n  +  v/2 ((1 + ‖w‖²) I + w wᵀ) ] H⁻¹.

        For two classes, weights are doubled and covariances are multiplied by 4.  The interval is for the weights
        of the population under the same penalty.

        Args:
            point: Released moments, (d,).
            published: Public numbers of the release.  Moments and std are divided by the share that counts.

        Returns:
            A coefficient for each feature, the constant included.
        """
        std, record_count, counted_share, _ = published
        matrix, size = self.moment_matrix(point / counted_share).numpy(), self.features
        moments, cross_moments = matrix[:size, :size], matrix[:size, size]
        # A₊ without the negative eigenvalues of noise, and H⁻¹.
        values, vectors = np.linalg.eigh(moments)
        semidefinite = (vectors * values.clip(0.0)) @ vectors.T
        inverse = np.linalg.inv(semidefinite + self.penalty * np.eye(size))
        weights = inverse @ cross_moments
        residual_square = max(
            0.0, float(matrix[size, size] - 2.0 * weights @ cross_moments + weights @ semidefinite @ weights)
        )
        noise_variance = (std / counted_share * self.norm_bound**2) ** 2 / 2.0
        noise_covariance = noise_variance * ((1.0 + weights @ weights) * np.eye(size) + np.outer(weights, weights))
        label_factor = 2.0 if self.classes else 1.0
        return make_intervals(
            label_factor * weights,
            label_factor**2
            * inverse
            @ (residual_square * semidefinite / record_count + noise_covariance)
            @ inverse,
        )


class Coefficient(NamedTuple):
    """A weight with its 95 % interval for sampling and noise together."""

    value: float
    """Weight."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""


class MeanStatistics(NamedTuple):
    """Public numbers of the means that a model is made of."""

    std: float
    """Standard deviation of the noise, per coordinate."""
    record_count: int
    """Number of records that count, rounded if it follows from `counted_share`."""
    counted_share: float
    """Share of row indices whose record counts.  A mean over row indices divided by it is one over records."""
    round_count: int
    """Number of rounds."""


def make_intervals(weights: Floats, covariance: Floats) -> list[Coefficient]:
    """Make coefficients from weights and the covariance of their errors."""
    return [
        Coefficient(value, value - _NORMAL_QUANTILE * error, value + _NORMAL_QUANTILE * error)
        for value, error in zip(weights.tolist(), np.sqrt(np.diag(covariance)).tolist(), strict=True)
    ]
