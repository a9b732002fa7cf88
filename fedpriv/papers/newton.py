"""Noisy Newton: Avella-Medina, Bradshaw & Loh, Differentially Private Inference via Noisy Optimization (Annals of
Statistics 2023), section 3, for logistic models of few parameters.

A record answers with its gradient and its Hessian, clipped apart, side by side:

    v_b = (clip(∇f, C),  κ clip(svec ∇²f, C_H)),   κ = (C / C_H) √(φ / (1 - φ)),   ‖v_b‖ ≤ C / √(1 - φ)

so that one noisy sum has both, and the Hessian the share φ of the budget μ².  svec is the upper triangle, times √2
off the diagonal.  From g~_t and H~_t, the noisy means at x_t, the server computes

    A_t = A_{t-1} + 2/(t + 1) (H~_t - A_{t-1})      the mean of H~_1 … H~_t with weights 1 … t
    u_t = x_t - (A_t₊ + λ I)⁻¹ (g~_t + λ x_t)       A₊ without negative eigenvalues
    x_{t+1} = u_t if t ≤ 2, else the mean of u_2 … u_t

The paper takes H~_t and u_t themselves; means use the budget of all rounds, and the first step is from far away.

| here | paper | shape |
|---|---|---|
| `query`, `output` | θ^(t) and what A_t is, (x_t, svec A_t) | (..., p + p(p + 1)/2) |
| `released` | ∇L_n + N_k and ∇²L_n + W_k | the same |
| `penalty` | none: λ‖x‖²/2 beside the mean loss, the constant's weight included | scalar |
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
from fedpriv.loss.objective import UNCLIPPED, Batch, Increment, ModelEvaluation, Objective, Query, Records, View
from fedpriv.loss.ridge import Coefficient, MeanStatistics, make_intervals
from fedpriv.papers.base import Algorithm, Positive, Settings, independent
from fedpriv.participation.orders import Dependence

MAX_PARAMETERS = 50
"""Parameters: so many give 1,325 numbers a release."""
_CHUNK_VALUES = 2**22
_MIN_ROUNDS = 2
"""Fewest rounds from which intervals cover."""


@lru_cache(maxsize=8)
def _triangle(size: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = torch.triu_indices(size, size)
    return rows, columns, torch.where(rows == columns, 1.0, math.sqrt(2.0)).double()


def symmetric_matrix(triangle: Tensor, size: int) -> Tensor:
    """The symmetric matrix (..., size, size) whose svec is `triangle`, in float64."""
    rows, columns, scale = (each.to(triangle.device) for each in _triangle(size))
    found = triangle.new_zeros(*triangle.shape[:-1], size, size, dtype=torch.float64)
    found[..., rows, columns] = triangle.double() / scale
    found[..., columns, rows] = found[..., rows, columns]
    return found


@dataclass(frozen=True)
class GradientAndHessian(View):
    """`base`, of which records answer with gradient and Hessian.

    A point is (x, svec A); A is the server's, and no answer depends on it.

    Guarantee: a record's increment is a function of its own record and the query, of norm `clip` at most, with the
    gradient's part at most `gradient_clip` and the Hessian's `curvature_clip`, whatever the query is.
    """

    base: LogisticRegression
    gradient_clip: float = field(metadata=SHARED)
    curvature_clip: float = field(metadata=SHARED)
    kappa: float = field(metadata=SHARED)
    """κ: what the Hessian's part is multiplied by."""
    penalty: float = field(metadata=SHARED)

    convex = False
    lipschitz = smoothness = math.inf
    convex_within = 0.0

    @property
    def dependence(self) -> Dependence:
        return Dependence.RECORD

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
        records, weights = batch
        lead = np.broadcast_shapes(query.points[0].shape[:-1], records.features.shape[:-2])
        total = torch.zeros(*lead, self.dimension, dtype=weights.dtype, device=weights.device)
        clipped = torch.zeros(lead, dtype=torch.int64, device=weights.device)
        rows = max(1, _CHUNK_VALUES // (self.dimension * math.prod(lead)))
        for start in range(0, records.features.shape[-2], rows):
            part = slice(start, start + rows)
            some = Records(records.features[..., part, :], records.labels[..., part])
            vectors, beyond = self._clip_increments(query, Batch(some, weights[..., part]), clip)
            total, clipped = total + vectors.sum(-2), clipped + beyond.sum(-1)
        return Increment(total, clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        return self._clip_increments(query, batch, clip)[0]

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        return self.increment(Query((point,)), batch, UNCLIPPED).total

    def _clip_increments(self, query: Query, batch: Batch, clip: Scalar) -> tuple[Tensor, Tensor]:
        """Weights times clipped increments (..., B, d), and which records were clipped anywhere, (..., B)."""
        records, weights = batch
        slope, curvature = self._derivatives(query, records)
        z, one = records.features.to(weights.dtype), torch.ones_like(weights)
        rows, columns, scale = (each.to(z.device) for each in _triangle(self.parameter_count))
        outer = z[..., rows] * z[..., columns] * scale.to(z.dtype)
        parts, held, beyond = list[Tensor](), torch.ones_like(one, dtype=torch.bool), list[Tensor]()
        for vectors, most, factor in (
            (slope.to(z.dtype) * z, self.gradient_clip, 1.0),
            (curvature.to(z.dtype) * outer, self.curvature_clip, self.kappa),
        ):
            found = compute_clipping(vector_bounds(upper_norm(vectors)), one, most)
            parts.append(found.zero_unrepresentable(vectors) * (factor * found.factor).unsqueeze(-1))
            held = held if found.representable is None else held & found.representable
            if found.is_clipped is not None:
                beyond.append(found.is_clipped)
        both = torch.cat(parts, -1).where(held.unsqueeze(-1), 0.0)
        found = compute_clipping(vector_bounds(upper_norm(both)), weights, clip)
        beyond += [] if found.is_clipped is None else [found.is_clipped]
        cut = torch.zeros(both.shape[:-1], dtype=torch.bool, device=both.device)
        for each in beyond:
            cut = cut | each
        return found.zero_unrepresentable(both) * found.factor.unsqueeze(-1), cut & (weights > 0.0)

    def _derivatives(self, query: Query, records: Records) -> tuple[Tensor, Tensor]:
        """First and second derivative of the loss by the score, combined as the query says, (..., B, 1)."""
        slope = curvature = torch.zeros((), dtype=records.features.dtype, device=records.features.device)
        for point, coefficient in zip(*query, strict=True):
            scores = self.base.outputs(self._model_weights(point), records)
            slope = slope + coefficient * self.base.loss.output_gradient(scores, records.labels)
            curvature = curvature + coefficient * scores.sigmoid() * (-scores).sigmoid()
        return slope, curvature

    def _model_weights(self, point: Tensor) -> Tensor:
        return point[..., : self.parameter_count]

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        return self.base.outputs(self._model_weights(point), records)

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return self.base.losses(self._model_weights(point), records)

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        return self.base.evaluate(self._model_weights(point), records)

    def coefficients(self, point: Tensor, published: MeanStatistics) -> list[Coefficient]:
        """Every weight with its interval of 95 %, of the population's weights under the same penalty.

        With H = A₊ + λ I, σ the noise of a gradient and v_t that of A_t, the error of u_t has the second moment

            N_t = H⁻¹ [σ² I + v_t/2 (tr(M_t) I + M_t)] H⁻¹,     M_t that of x_t - x*,  M_1 = x* x*ᵀ

        to first order, M_2 = N_1, then (N_2 + … + N_{t-1}) / (t - 2)².  Sampling adds H⁻¹ (A₊/n) H⁻¹.  InputError
        after one round, whose step from 0 is not yet at the minimum: such intervals would cover about 77 %.
        """
        std, records, counted, rounds = published
        if rounds < _MIN_ROUNDS:
            raise InputError(
                f"federation.rounds: {rounds} round of noisy-newton is one step from 0, whose intervals would "
                f"cover far less than 95 %; take {_MIN_ROUNDS} rounds or more"
            )
        size, penalty = self.parameter_count, self.penalty / counted
        weights = point[:size].double().numpy()
        values, vectors = np.linalg.eigh(symmetric_matrix(point[size:] / counted, size).numpy())
        held = (vectors * values.clip(0.0)) @ vectors.T
        inverse, eye = np.linalg.inv(held + penalty * np.eye(size)), np.eye(size)
        gradient, curvature = (std / counted) ** 2, (std / counted / self.kappa) ** 2
        moment, later = np.outer(weights, weights), np.zeros((size, size))
        for t in range(1, rounds + 1):
            spread = curvature * (2.0 * (2.0 * t + 1.0)) / (3.0 * t * (t + 1.0))  # Σ s² / (Σ s)², s = 1 … t
            step = inverse @ (gradient * eye + spread / 2.0 * (np.trace(moment) * eye + moment)) @ inverse
            later = later + step if t > 1 else later
            moment = step if t <= 2 else later / (t - 1) ** 2
        return make_intervals(weights, moment + inverse @ (held / records) @ inverse)


@dataclass(frozen=True)
class NoisyNewton:
    """Newton steps with the mean of the Hessians so far; the state is (x_t, svec A_{t-1})."""

    parameters: int
    kappa: float = field(metadata=SHARED)
    penalty: float = field(metadata=SHARED)

    def start(self, initial: Tensor) -> Tensor:
        return initial

    def query(self, state: Tensor) -> Tensor:
        return state

    def update(self, state: Tensor, released: Tensor, current: Round) -> Tensor:
        size, t = self.parameters, current.t
        mean = released / current.scale
        before = state[..., size:]
        pooled = before + 2.0 / (t + 1.0) * (mean[..., size:] / self.kappa - before)
        x = state[..., :size].double()
        values, vectors = torch.linalg.eigh(symmetric_matrix(pooled, size))
        slope = mean[..., :size].double() + self.penalty * x
        along = (vectors.mT @ slope.unsqueeze(-1)).squeeze(-1) / (values.clamp(min=0.0) + self.penalty)
        return torch.cat(
            [(x - (vectors @ along.unsqueeze(-1)).squeeze(-1) / max(1, t - 1)).to(state.dtype), pooled], -1
        )

    def output(self, state: Tensor) -> Tensor:
        return state


class NewtonSettings(Settings):
    clip: Positive = Field(description="C: norm bound on one record's gradient")
    curvature_clip: Positive = Field(description="C_H: norm bound on one record's Hessian")
    curvature_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.25, description="φ: of the budget μ², for Hessians; gradients have the rest"
    )
    penalty: Positive = Field(
        description="λ of λ‖x‖²/2, which the server adds to the mean loss; the constant's weight included"
    )


def _kappa(settings: NewtonSettings) -> float:
    share = settings.curvature_share
    return settings.clip / settings.curvature_clip * math.sqrt(share / (1.0 - share))


def _add_hessian(settings: NewtonSettings, objective: Objective) -> GradientAndHessian:
    """InputError for a model of another kind, with a penalty of its own, or of too many parameters."""
    if type(objective) is not LogisticRegression:
        raise InputError("algorithm.name = 'noisy-newton': is of model.name = \"logistic-regression\"")
    if objective.penalty:
        raise InputError("model.penalty: noisy-newton's is the server's; give algorithm.penalty, and leave it out")
    if objective.dimension > MAX_PARAMETERS:
        raise InputError(
            f"algorithm.name = 'noisy-newton': is for at most {MAX_PARAMETERS} parameters, and the model has "
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
    # the norm of both parts together
    estimator=lambda settings, _problem: PlainGradient(settings.clip / math.sqrt(1.0 - settings.curvature_share)),
    mechanism=independent,
    optimizer=lambda settings, problem, _noise_std: NoisyNewton(
        (math.isqrt(9 + 8 * problem.dimension) - 3) // 2,  # p of p + p(p + 1)/2
        _kappa(settings),
        settings.penalty,
    ),
)
