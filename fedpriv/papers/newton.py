"""Noisy Newton for logistic models of few parameters, with confidence intervals.

Source: Avella-Medina, Bradshaw & Loh, "Differentially Private Inference via Noisy Optimization" (Annals of
Statistics 2023), section 3.  A model has p parameters.  The increment v_b of a record b is one vector of its
gradient and its Hessian, which are clipped separately, where clip(v, C) shortens v to norm C if it is longer:

    v_b = (clip(∇f, C),  κ clip(svec ∇²f, C_H)),   κ = (C / C_H) √(φ / (1 - φ)),   ‖v_b‖ ≤ C / √(1 - φ)

One noisy sum then holds both.  The Hessian has the share φ of the budget μ² under zero-out, and φ/(2 - φ) under
replace-one.  svec is the upper triangle, with the entries off the diagonal times √2.

From the noisy means g~_t and H~_t at x_t the server computes

    A_t = A_{t-1} + 2/(t + 1) (H~_t - A_{t-1})      the mean of H~_1 … H~_t with weights 1 … t
    u_t = x_t - (A_t₊ + λ I)⁻¹ (g~_t + λ x_t)       A₊ is A without its negative eigenvalues
    x_{t+1} = u_t if t ≤ 2, else the mean of u_2 … u_t

The paper uses H~_t and u_t themselves.  A query has points at which gradients and Hessians are computed, with
coefficients by which they are added.

| here | paper | shape |
|---|---|---|
| `query`, `output` | θ^(t), with A_{t-1}: (x_t, svec A_{t-1}) | (..., p + p(p + 1)/2) |
| `released` | ∇L_n + N_k, and κ svec of ∇²L_n + W_k | (..., p + p(p + 1)/2) |
| `penalty` | none: λ of λ‖x‖²/2, added to the mean loss, the constant's weight included | scalar |
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import SHARED, Scalar
from fedpriv.loss.clipping import compute_clipping, upper_norm, vector_bounds
from fedpriv.loss.estimators import PlainGradient, Round
from fedpriv.loss.linear import LogisticRegression
from fedpriv.loss.objective import (
    PROVED_DIAMETERS,
    UNCLIPPED,
    Batch,
    Increment,
    ModelEvaluation,
    Objective,
    Query,
    Records,
    View,
)
from fedpriv.loss.ridge import Coefficient, MeanStatistics, make_intervals
from fedpriv.papers.base import Algorithm, Positive, Settings, independent
from fedpriv.participation.orders import Dependence

MAX_PARAMETERS = 50
"""Largest number of parameters, with 1,325 numbers in a release."""
_CHUNK_VALUES = 2**22
"""Most values of the increments that are formed at once, but for one record with more."""
_MIN_ROUNDS = 2
"""Fewest rounds after which intervals are given."""


@lru_cache(maxsize=8)
def _triangle(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row and column of each entry of svec, and the factor of the entry, (p(p + 1)/2,) each."""
    rows, columns = torch.triu_indices(size, size)
    return rows, columns, torch.where(rows == columns, 1.0, math.sqrt(2.0)).double()


def symmetric_matrix(triangle: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix (..., size, size) whose svec is `triangle`, in float64.

    Args:
        triangle: svec of the matrix, (..., p(p + 1)/2).
        size: p.

    Example:
        >>> symmetric_matrix(torch.tensor([1.0, 0.0, 2.0]), 2).tolist()
        [[1.0, 0.0], [0.0, 2.0]]
    """
    rows, columns, scale = (tensor.to(triangle.device) for tensor in _triangle(size))
    matrix = triangle.new_zeros(*triangle.shape[:-1], size, size, dtype=torch.float64)
    matrix[..., rows, columns] = triangle.double() / scale
    matrix[..., columns, rows] = matrix[..., rows, columns]
    return matrix


@dataclass(frozen=True)
class GradientAndHessian(View):
    """View of a logistic model whose increments hold gradient and Hessian.

    A point is (x, svec A).  The server maintains A, and no increment depends on it.

    Guarantee: a record's increment, before its weight, is a function of its own record and the query, of norm at
    most the round's clip, whatever the query is.  The norm of the gradient's part is at most `gradient_clip`, and
    that of the Hessian's part, before it is multiplied by `kappa`, at most `curvature_clip`.  For a query of one
    point with coefficient 1, two increments, or an increment and zeros, are at most `diameter` apart, up to
    rounding.
    """

    base: LogisticRegression
    """Logistic model of p parameters without a penalty."""
    gradient_clip: float = field(metadata=SHARED)
    """C: norm bound on the gradient."""
    curvature_clip: float = field(metadata=SHARED)
    """C_H: norm bound on the Hessian."""
    kappa: float = field(metadata=SHARED)
    """κ: factor of the Hessian's part."""
    penalty: float = field(metadata=SHARED)
    """λ, which no increment depends on."""

    convex = False
    lipschitz = smoothness = math.inf
    convex_within = 0.0

    @property
    def dependence(self) -> Dependence:
        return Dependence.RECORD

    @property
    def diameter(self) -> float:
        """√(4 C² + 2 κ² C_H²), since two semidefinite matrices of norm C_H are at most √2 C_H apart."""
        return math.hypot(2.0 * self.gradient_clip, math.sqrt(2.0) * self.kappa * self.curvature_clip)

    @property
    def parameter_count(self) -> int:
        return self.base.dimension

    @property
    def dimension(self) -> int:
        return self.parameter_count * (self.parameter_count + 3) // 2

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.base.dtype)

    def for_batch(self, slots: object) -> Objective:
        return self

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Sum the weighted clipped increments of a batch, which hold gradient and Hessian.

        Args:
            query: Points (..., d), d = p + p(p + 1)/2, and their coefficients.
            batch: B records with weights, (..., B).
            clip: Norm bound of a whole increment.

        Returns:
            The sum, (..., d), and the number of records of weight above 0 of which a part or the whole counts as
            clipped (`compute_clipping`), (...).
        """
        # A chunk of records at a time bounds the memory.
        records, weights = batch
        leading_shape = np.broadcast_shapes(query.points[0].shape[:-1], records.features.shape[:-2])
        total = torch.zeros(*leading_shape, self.dimension, dtype=weights.dtype, device=weights.device)
        clipped_count = torch.zeros(leading_shape, dtype=torch.int64, device=weights.device)
        rows = max(1, _CHUNK_VALUES // (self.dimension * math.prod(leading_shape)))
        for start in range(0, records.features.shape[-2], rows):
            chunk = slice(start, start + rows)
            chunk_records = Records(records.features[..., chunk, :], records.labels[..., chunk])
            vectors, is_clipped = self._clip_increments(query, Batch(chunk_records, weights[..., chunk]), clip)
            total, clipped_count = total + vectors.sum(-2), clipped_count + is_clipped.sum(-1)
        return Increment(total, clipped_count)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        return self._clip_increments(query, batch, clip)[0]

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        return self.increment(Query((point,)), batch, UNCLIPPED).total

    def _clip_increments(self, query: Query, batch: Batch, clip: Scalar) -> tuple[Tensor, Tensor]:
        """Return weighted clipped increments (..., B, d), and the mask of clipped records, (..., B).

        Gradients are clipped to `gradient_clip`, and Hessians to `curvature_clip` and then multiplied by κ.  Both
        together are clipped to `clip` and multiplied by the record's weight.  A record of which a part is not
        finite, or too large to be representable (`loss.clipping`), has an increment of 0.  Only records of weight
        above 0 are in the mask.

        With the score ⟨x, z⟩ of a record of features z, the gradient is (first derivative of the loss by the
        score) · z, and the Hessian (second derivative) · z zᵀ.
        """
        records, weights = batch
        output_gradient, curvature = self._derivatives(query, records)
        z, ones = records.features.to(weights.dtype), torch.ones_like(weights)
        rows, columns, scale = (tensor.to(z.device) for tensor in _triangle(self.parameter_count))
        outer_products = z[..., rows] * z[..., columns] * scale.to(z.dtype)
        parts, is_representable, clipped_masks = (
            list[Tensor](),
            torch.ones_like(ones, dtype=torch.bool),
            list[Tensor](),
        )
        for vectors, max_norm, factor in (
            (output_gradient.to(z.dtype) * z, self.gradient_clip, 1.0),
            (curvature.to(z.dtype) * outer_products, self.curvature_clip, self.kappa),
        ):
            clipping = compute_clipping(vector_bounds(upper_norm(vectors)), ones, max_norm)
            parts.append(clipping.zero_unrepresentable(vectors) * (factor * clipping.factor).unsqueeze(-1))
            is_representable = (
                is_representable if clipping.representable is None else is_representable & clipping.representable
            )
            if clipping.is_clipped is not None:
                clipped_masks.append(clipping.is_clipped)
        joined = torch.cat(parts, -1).where(is_representable.unsqueeze(-1), 0.0)
        clipping = compute_clipping(vector_bounds(upper_norm(joined)), weights, clip)
        clipped_masks += [] if clipping.is_clipped is None else [clipping.is_clipped]
        # The sum of masks is their union.
        is_clipped = sum(clipped_masks, torch.zeros(joined.shape[:-1], dtype=torch.bool, device=joined.device))
        return clipping.zero_unrepresentable(joined) * clipping.factor.unsqueeze(-1), is_clipped & (weights > 0.0)

    def _derivatives(self, query: Query, records: Records) -> tuple[Tensor, Tensor]:
        """Return first and second derivatives of the loss by the score ⟨x, z⟩, (..., B, 1) each.

        The derivatives at the query's points are summed with the query's coefficients.

        Args:
            query: Points (..., d), which begin with the parameters x, and their coefficients.
            records: Records, with features z, (..., B, p).
        """
        output_gradient = curvature = torch.zeros((), dtype=records.features.dtype, device=records.features.device)
        for point, coefficient in zip(*query, strict=True):
            scores = self.base.outputs(self._model_weights(point), records)
            output_gradient = output_gradient + coefficient * self.base.loss.output_gradient(
                scores, records.labels
            )
            # The second derivative is s (1 - s), s the sigmoid of the score.
            curvature = curvature + coefficient * scores.sigmoid() * (-scores).sigmoid()
        return output_gradient, curvature

    def _model_weights(self, point: Tensor) -> Tensor:
        return point[..., : self.parameter_count]

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        return self.base.outputs(self._model_weights(point), records)

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return self.base.losses(self._model_weights(point), records)

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        return self.base.evaluate(self._model_weights(point), records)

    def coefficients(self, point: Tensor, published: MeanStatistics) -> list[Coefficient]:
        """Compute the weights with intervals of 95 % for the population's weights under the same penalty.

        The intervals cover errors of the noise and of the sampling of records.  With H = A₊ + λ I, and per
        coordinate σ² the variance of a gradient's noise and v_t that of A_t's noise, the error of u_t has the
        second moment

            N_t = H⁻¹ [σ² I + v_t/2 (tr(M_t) I + M_t)] H⁻¹,     M_t that of x_t - x*,  M_1 = x* x*ᵀ
            v_t = (σ/κ)² 2 (2t + 1) / (3 t (t + 1))

        to first order, with M_2 = N_1 and M_t = (N_2 + … + N_{t-1}) / (t - 2)² from t = 3 on, where the errors of
        different rounds count as independent.  The published x stands for x* in M_1, and its covariance after T
        rounds is M_{T+1} + H⁻¹ (A₊/n) H⁻¹, the second term from the sampling of n records.

        Released means are over all row indices, also those without a record that counts, which add zeros.  A, σ
        and λ are divided by the share of row indices whose record counts, as if means were over these records.

        Args:
            point: Published (x, svec A), (d,).
            published: σ (not yet divided by the share), n, the share of row indices whose record counts, and T.

        Returns:
            Each of the p weights with the ends of its interval.

        Raises:
            InputError: There were fewer than two rounds.
        """
        std, records, counted_share, rounds = published
        if rounds < _MIN_ROUNDS:
            raise InputError(
                f"federation.rounds: {rounds} round of noisy-newton is one step from 0, whose intervals would "
                f"cover far less than 95 %; take {_MIN_ROUNDS} rounds or more"
            )
        size, penalty = self.parameter_count, self.penalty / counted_share
        weights = point[:size].double().numpy()
        values, vectors = np.linalg.eigh(symmetric_matrix(point[size:] / counted_share, size).numpy())
        mean_hessian = (vectors * values.clip(0.0)) @ vectors.T
        inverse, eye = np.linalg.inv(mean_hessian + penalty * np.eye(size)), np.eye(size)
        gradient, curvature = (std / counted_share) ** 2, (std / counted_share / self.kappa) ** 2
        moment, later_sum = np.outer(weights, weights), np.zeros((size, size))
        for t in range(1, rounds + 1):
            # The mean with weights s = 1 … t has Σ s² / (Σ s)² of one Hessian's variance.
            hessian_variance = curvature * (2.0 * (2.0 * t + 1.0)) / (3.0 * t * (t + 1.0))
            step = (
                inverse @ (gradient * eye + hessian_variance / 2.0 * (np.trace(moment) * eye + moment)) @ inverse
            )
            later_sum = later_sum + step if t > 1 else later_sum
            moment = step if t <= 2 else later_sum / (t - 1) ** 2
        return make_intervals(weights, moment + inverse @ (mean_hessian / records) @ inverse)


PROVED_DIAMETERS.add(GradientAndHessian)


@dataclass(frozen=True)
class NoisyNewton:
    """Optimizer of Newton steps with the mean of all Hessians, whose state is (x_t, svec A_{t-1})."""

    parameters: int
    """p."""
    kappa: float = field(metadata=SHARED)
    """κ: factor of the Hessian's part in a release."""
    penalty: float = field(metadata=SHARED)
    """λ."""

    def start(self, initial: Tensor) -> Tensor:
        return initial

    def query(self, state: Tensor) -> Tensor:
        return state

    def update(self, state: Tensor, released: Tensor, current: Round) -> Tensor:
        """Average the noisy Hessian into A_t, and step to x_{t+1}, (..., p + p (p + 1)/2) together.

        Args:
            state: (x_t, svec A_{t-1}), in the shape of the result.
            released: Release of round t, of which `released` / `scale` is (g~_t, κ svec H~_t).
            current: Round, with its number t and its scale.
        """
        size, t = self.parameters, current.t
        mean = released / current.scale
        mean_hessian = state[..., size:]
        # Hessians have the weights 1 … t in their mean, so that later ones count more.
        new_mean = mean_hessian + 2.0 / (t + 1.0) * (mean[..., size:] / self.kappa - mean_hessian)
        x = state[..., :size].double()
        values, vectors = torch.linalg.eigh(symmetric_matrix(new_mean, size))
        gradient = mean[..., :size].double() + self.penalty * x
        # Noise can make eigenvalues negative.
        eigen_step = (vectors.mT @ gradient.unsqueeze(-1)).squeeze(-1) / (values.clamp(min=0.0) + self.penalty)
        # u_1 and u_2 replace x.  From t = 3 on, 1 / (t - 1) of the way to u_t gives the mean of u_2 … u_t.
        return torch.cat(
            [(x - (vectors @ eigen_step.unsqueeze(-1)).squeeze(-1) / max(1, t - 1)).to(state.dtype), new_mean], -1
        )

    def output(self, state: Tensor) -> Tensor:
        return state


class NewtonSettings(Settings):
    """Keys of noisy Newton."""

    clip: Positive = Field(description="C: norm bound on one record's gradient")
    curvature_clip: Positive = Field(description="C_H: norm bound on one record's Hessian")
    curvature_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.25,
        description="φ: share of the budget μ² for Hessians under zero-out; under replace-one it is φ/(2 - φ); "
        "gradients have the rest",
    )
    penalty: Positive = Field(
        description="λ of λ‖x‖²/2, which the server adds to the mean loss; the constant's weight included"
    )


def _kappa(settings: NewtonSettings) -> float:
    share = settings.curvature_share
    return settings.clip / settings.curvature_clip * math.sqrt(share / (1.0 - share))


def _add_hessian(settings: NewtonSettings, objective: Objective) -> GradientAndHessian:
    """Return the view of a logistic model whose increments hold gradient and Hessian.

    Raises:
        InputError: The model is no plain logistic regression, has a penalty of its own, or has too many
            parameters.
    """
    if type(objective) is not LogisticRegression:
        raise InputError("algorithm.name = 'noisy-newton': it trains only model.name = \"logistic-regression\"")
    if objective.penalty:
        raise InputError(
            "model.penalty: noisy-newton's server adds the penalty; give algorithm.penalty, and leave this key out"
        )
    if objective.dimension > MAX_PARAMETERS:
        raise InputError(
            f"algorithm.name = 'noisy-newton': it is for at most {MAX_PARAMETERS} parameters, and the model has "
            f"{objective.dimension}; take 'dp-sgd'"
        )
    return GradientAndHessian(
        objective, settings.clip, settings.curvature_clip, _kappa(settings), settings.penalty
    )


NOISY_NEWTON = Algorithm(
    name="noisy-newton",
    title="Noisy Newton",
    source="Avella-Medina, Bradshaw & Loh, Differentially Private Inference via Noisy Optimization (2023), with "
    "means of Hessians and iterates",
    settings=NewtonSettings,
    model=_add_hessian,
    # the norm of gradient and Hessian together
    estimator=lambda settings, _problem: PlainGradient(settings.clip / math.sqrt(1.0 - settings.curvature_share)),
    mechanism=independent,
    optimizer=lambda settings, problem, _noise_std: NoisyNewton(
        (math.isqrt(9 + 8 * problem.dimension) - 3) // 2,  # p of p + p(p + 1)/2
        _kappa(settings),
        settings.penalty,
    ),
)
