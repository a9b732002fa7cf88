"""Momentum aggregation: Tran & Cutkosky, Momentum Aggregation for Private Non-convex ERM (NeurIPS 2022).

Algorithms 1 and 2.  Every step of the server has length η, whatever the noise (normalized SGD):

    w_{t+1} = w_t - η m^_t / ‖m^_t‖,  and w_{t+1} = w_t if m^_t = 0
    output w_{T+1}, or w_U with U uniform on 1 … T (the iterate that the paper's theorems are about)

| here | paper | meaning |
|---|---|---|
| `iterate` | w_t | the query, (..., d) |
| `chosen` | w_min(t, U) | (..., d) |
| `released` | m^_t | the noisy momentum, (..., d) |
| `alpha` | α | weight of a new gradient in the momentum |
| `step` | η | length of every step |
| `gamma` | γ | weight of new gradients in the sums of Algorithm 2 |
| `rounds_per_epoch`, `rounds` | N, T | rounds of one epoch, of the run |

Theorems 4, 6, 8 and 9 stand here with their errata (docs/momentum.md).  All are for the replace-one relation;
n = N records, one in each slot of an epoch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from fedpriv.accounting.gaussian import check_delta, check_positive, mu_of
from fedpriv.core.errors import InputError
from fedpriv.core.random import public_generator
from fedpriv.core.replicates import Scalar, is_known_true
from fedpriv.loss.estimators import PlainGradient, Round, SplitGradient
from fedpriv.noise.differences import AlignedDifferences, Trees, calibrate_trees, size_by_paper
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.sliding import SlidingDifferences
from fedpriv.noise.tree import BinaryTree, PaperTree
from fedpriv.papers.base import (
    Algorithm,
    NoiseSettings,
    Positive,
    Prescription,
    Problem,
    Settings,
    catch_refusal,
    choose_mechanism,
)

_ROUNDING = 1.0 + 1e-6
_STEP_ROUNDING = 1.0 + 5e-7  # half of it: the rest is for measurements in another order of sums
_ATTEMPTS = 8


def movement_bound(step: float) -> float:
    """The most that ‖w_{t+1} - w_t‖ can be, floating-point rounding included: η(1 + 1e-6)."""
    return step * _ROUNDING


class NormalizedState(NamedTuple):
    """The server's vectors between two rounds, each (..., d)."""

    iterate: Tensor
    output_iterate: Tensor


@dataclass(frozen=True)
class NormalizedSGD:
    """Steps of length `step`, taken after the silos' momenta are averaged.

    `output_round` is U, drawn by public randomness before the run; infinity publishes the last iterate.

    Guarantee: ‖w_{t+1} - w_t‖ ≤ `movement_bound(step)` for the vectors as they are, rounded to their type,
    whatever finite vector is released.
    """

    step: Scalar
    output_round: Scalar = float("inf")

    def start(self, initial: Tensor) -> NormalizedState:
        return NormalizedState(initial, initial)

    def query(self, state: NormalizedState) -> Tensor:
        return state.iterate

    def update(self, state: NormalizedState, released: Tensor, current: Round) -> NormalizedState:
        wide = released.double()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        iterate = _take_bounded_step(state.iterate, wide / norm.where(norm > 0.0, 1.0), self.step)
        return NormalizedState(
            iterate, torch.where(torch.as_tensor(current.t < self.output_round), iterate, state.output_iterate)
        )

    def output(self, state: NormalizedState) -> Tensor:
        return state.output_iterate


def _take_bounded_step(iterate: Tensor, direction: Tensor, step: Scalar) -> Tensor:
    """iterate - step · direction, rounded to the iterate's type so that no step is longer than the bound.

    A rounded step that is too long is taken again, as much shorter; where rounding outweighs the step, so that
    this does not settle, every coordinate is rounded towards where it was.
    """
    start, limit = iterate.double(), step * _STEP_ROUNDING
    move = step * direction
    for _ in range(_ATTEMPTS):
        moved = (start - move).to(iterate.dtype)
        length = torch.linalg.vector_norm(moved.double() - start, dim=-1, keepdim=True)
        over = length > limit
        if is_known_true(~over.any()):
            return moved
        move = torch.where(over, move * (limit / length), move)
    moved = (start - move).to(iterate.dtype)
    nearer = torch.where((moved.double() - start).abs() > move.abs(), moved.nextafter(iterate), moved)
    return torch.where(over, nearer, moved)


class TheoremParameters(NamedTuple):
    """Numbers that a theorem prescribes: T, α, η and, for Algorithm 2, the mixing weight γ (else 0)."""

    rounds: int
    alpha: float
    step: float
    mixing: float


def simple_noise_multiplier(epsilon: float, delta: float, reduced: bool = False) -> float:
    """σ = 2 √ln(1/δ) / ε of Theorem 4, or 4 √ln(1/δ) / ε of Theorem 8 (`reduced`).

    Guarantee: noise of this multiplier on the theorem's node sensitivities is (ε, δ)-DP under replace-one.
    InputError if ε > ln(1/δ): the paper prints the condition the other way round, and there the formula gives
    too little noise (at ε = 20, δ = 0.1 the true δ is 0.54).
    """
    log = _log_inverse_delta(epsilon, delta)
    if epsilon > log:
        raise InputError(
            f"epsilon = {epsilon:g}: the paper's formula for the noise holds only up to ln(1/delta) = {log:.4g}"
        )
    return (4.0 if reduced else 2.0) * math.sqrt(log) / epsilon


def tree_parameters(records: int, dimension: int, epsilon: float, delta: float) -> TheoremParameters:
    """Theorem 6: T is the largest integer ≥ 2 with T log2 T ≤ ε N² / √(d ln(1/δ)), α in [1/N, 1], η = 1/√(NT).

    InputError if there is no such T.
    """
    spread = math.sqrt(dimension * _log_inverse_delta(epsilon, delta))
    budget = epsilon * records**2 / spread
    if budget < 2.0:
        raise InputError(f"{records} records are too few for Theorem 6 at epsilon = {epsilon:g}, d = {dimension}")
    low, high = 2, max(4, math.ceil(budget))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle * math.log2(middle) <= budget else (low, middle)
    alpha = epsilon * records / (low * math.log2(low) * spread)
    return TheoremParameters(low, min(max(alpha, 1.0 / records), 1.0), 1.0 / math.sqrt(records * low), 0.0)


def reduced_parameters(records: int, dimension: int, epsilon: float) -> TheoremParameters:
    """Theorem 9: T = ⌊N^{7/3} ε^{4/3} / d^{2/3}⌋, α = N^{3/4} ε / (T^{3/4} √d), η = 1/√(NT), γ = ηN.

    Its rate is claimed, not proved (its proof needs fresh permutations, the algorithm a fixed one).  InputError
    if T < 4N, where γ > 1/2: the proof needs it, the statement forgets it; or if α > 1.
    """
    check_positive("epsilon", epsilon)
    exact = records ** (7.0 / 3.0) * epsilon ** (4.0 / 3.0) / dimension ** (2.0 / 3.0)
    rounds = math.floor(exact * (1.0 + 1e-12))  # not one less for the rounding of the powers
    if rounds < 4 * records:
        raise InputError(f"Theorem 9 gives T = {rounds}, less than 4N = {4 * records}: gamma would exceed 1/2")
    alpha = records**0.75 * epsilon / (rounds**0.75 * math.sqrt(dimension))
    if alpha > 1.0:
        raise InputError(f"Theorem 9 gives alpha = {alpha:.4g} > 1 at epsilon = {epsilon:g}")
    step = 1.0 / math.sqrt(records * rounds)
    return TheoremParameters(rounds, max(alpha, 1.0 / records), step, step * records)


def paper_node_count(rounds: int, rounds_per_epoch: int) -> float:
    """V of Algorithm 1 with ⌈T/N⌉ for the printed T/N: the released nodes a record can be in are no more."""
    levels, within = rounds.bit_length() - 1, rounds_per_epoch.bit_length() - 1
    long_nodes = sum(rounds >> level for level in range(within + 1, levels + 1))
    return float((min(levels, within) + 1) * -(-rounds // rounds_per_epoch) + long_nodes)


def tree_gradient_bound(
    gap: float, lipschitz: float, smoothness: float, records: int, dimension: int, epsilon: float, delta: float
) -> float:
    """Theorem 6's bound on E‖∇F(w_U)‖ with corrected constants, for its own parameters and fresh orders.

    `gap` is F(w_1) - inf F.
    """
    rounds = tree_parameters(records, dimension, epsilon, delta).rounds
    spread, depth = math.sqrt(dimension * _log_inverse_delta(epsilon, delta)), math.log2(rounds)
    return (
        (1.5 * gap + 12.0 * smoothness + 48.0 * lipschitz) * math.sqrt(depth * spread / (epsilon * records))
        + 6.0 * lipschitz / math.sqrt(records)
        + 3.0 * lipschitz * depth * spread / (epsilon * records)
    )


def _log_inverse_delta(epsilon: float, delta: float) -> float:
    """ln(1/δ), of arguments that were checked."""
    check_positive("epsilon", epsilon)
    return -math.log(check_delta(delta))


_PAPER = "Tran & Cutkosky, Momentum Aggregation for Private Non-convex ERM (NeurIPS 2022)"


class MomentumSettings(Settings):
    """Theorems 6 and 9 both come to α = 1/N and η = 1/√(NT); `tree_parameters` and `reduced_parameters` have T."""

    clip: Literal["lipschitz"] | Positive = Field(
        "lipschitz", description="G: norm bound on one record's gradient; 'lipschitz' is the model's own bound"
    )
    alpha: Literal["paper"] | Annotated[float, Field(gt=0, le=1)] = Field(
        "paper", description="α: weight of a new gradient in the momentum; 'paper' is 1/N, N rounds an epoch"
    )
    step: Literal["paper"] | Positive = Field("paper", description="η: length of a step; 'paper' is 1/√(N T)")
    output: Literal["last", "random"] = Field(
        "last", description="the iterate published: the last, or the theorems' uniformly random one"
    )

    calibration: Literal["exact", "paper"] = Field(
        "exact", description="noise by exact counting, or by the theorem's constants and its formula for σ"
    )

    def clip_for(self, problem: Problem) -> float:
        return problem.lipschitz if self.clip == "lipschitz" else self.clip

    def alpha_for(self, problem: Problem) -> float:
        return 1.0 / problem.schedule.rounds_per_epoch if self.alpha == "paper" else self.alpha

    def step_for(self, problem: Problem) -> float:
        return (
            self.step
            if self.step != "paper"
            else 1.0 / math.sqrt(problem.schedule.rounds_per_epoch * problem.rounds)
        )


def _make_estimator(settings: MomentumSettings, problem: Problem) -> PlainGradient:
    """m_t = (1 - α) m_{t-1} + α g_t, with increments α g_t clipped to norm α G; the last query is remembered."""
    alpha = settings.alpha_for(problem)
    return PlainGradient(alpha * settings.clip_for(problem), coefficient=alpha, decay=1.0 - alpha, memory=2)


def _make_optimizer(settings: MomentumSettings, problem: Problem, _noise_std: float) -> NormalizedSGD:
    """The random iterate w_U is chosen by public randomness: U depends on the seed and T alone."""
    chosen = math.inf
    if settings.output == "random":
        chosen = float(public_generator(problem.seed, "output iterate").integers(1, problem.rounds + 1))
    return NormalizedSGD(settings.step_for(problem), chosen)


def _sigma_mu(problem: Problem, reduced: bool) -> float:
    """σμ: the theorem's noise multiplier for this (ε, δ), times the GDP parameter that is the same guarantee."""
    return (
        0.0
        if problem.epsilon is None
        else simple_noise_multiplier(problem.epsilon, problem.delta, reduced)
        * mu_of(problem.epsilon, problem.delta)
    )


class MomentumTreeSettings(MomentumSettings, NoiseSettings):
    """Algorithm 1 is the row with a tree; other noise is sized by exact counting only."""

    @model_validator(mode="after")
    def _the_papers_constants_are_a_trees(self) -> Self:
        if self.calibration == "paper" and (self.mechanism != BinaryTree.name or self.late_clip != "same"):
            raise ValueError('calibration = "paper" is for the paper\'s tree with equal clips: use "exact"')
        return self


def _make_tree(settings: MomentumTreeSettings, problem: Problem, workload: Workload) -> Mechanism:
    decay, rounds_per_epoch = workload.decay, problem.schedule.rounds_per_epoch
    if settings.calibration == "exact":
        return choose_mechanism(settings, problem, workload)
    if decay > 1.0 - 1.0 / rounds_per_epoch + 1e-12:
        raise InputError(f'algorithm.calibration = "paper" needs alpha of at least 1/N = 1/{rounds_per_epoch}')
    count = paper_node_count(problem.rounds, rounds_per_epoch)
    return PaperTree(decay, least=2.0 * math.sqrt(count) * _sigma_mu(problem, reduced=False))


def _prescribe_theorem_6(settings: MomentumSettings, problem: Problem) -> tuple[Prescription, ...]:
    """With its bound on E‖∇F(w_U)‖ where G, L and what the loss can fall by are known."""
    asked = _prescribe(
        "Theorem 6", problem, partial(tree_parameters, problem.records, problem.dimension, delta=problem.delta)
    )
    known = (problem.gap, settings.clip_for(problem), problem.smoothness)
    if asked.refusal is not None or problem.epsilon is None or not all(map(math.isfinite, known)):
        return (asked,)
    bound = tree_gradient_bound(*known, problem.records, problem.dimension, problem.epsilon, problem.delta)
    assumption = "the bound is for an order that is drawn anew in every epoch, and runs here keep one"
    return (asked._replace(numbers={**asked.numbers, "bound": bound}, assumption=assumption),)


def _prescribe_theorem_9(_settings: MomentumSettings, problem: Problem) -> tuple[Prescription, ...]:
    name = "Theorem 9, whose rate is claimed, not proved"
    return (_prescribe(name, problem, partial(reduced_parameters, problem.records, problem.dimension)),)


@catch_refusal
def _prescribe(name: str, problem: Problem, formula: Callable[[float], TheoremParameters]) -> Prescription:
    """The paper's T counts gradients of single records: batch 1, N = n."""
    if problem.epsilon is None:
        raise InputError(f"{name} needs an (ε, δ), and the scenario is not private")
    asked = formula(problem.epsilon)
    numbers = {"rounds": float(asked.rounds), "batch": 1.0, "alpha": asked.alpha, "step": asked.step}
    return Prescription(name, numbers | ({"gamma": asked.mixing} if asked.mixing else {}))


MOMENTUM_TREE = Algorithm(
    name="momentum-tree",
    title="Momentum with tree noise",
    source=f"{_PAPER}, Algorithm 1",
    settings=MomentumTreeSettings,
    # m_t = (1-α) m_{t-1} + α g_t
    estimator=_make_estimator,
    # the binary tree on every m_t, nodes decaying by 1-α a round
    mechanism=_make_tree,
    # w_{t+1} = w_t - η m^_t / ‖m^_t‖, on the mean over silos
    optimizer=_make_optimizer,
    theorems=_prescribe_theorem_6,
    published="rows",
)


class ReducedSettings(MomentumSettings):
    gamma: Literal["balanced", "paper"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        "balanced", description="γ; 'paper' is ηN, 'balanced' ηN L/G, both at most 1/2"
    )
    shares: Literal["best", "equal"] = Field(
        "best",
        description="how the privacy loss is split over the groups of nodes: for the least noise, or evenly",
    )
    order: Literal["fixed", "fresh"] = Field("fixed", description="of the records; only a fixed one is possible")

    @field_validator("order")
    @classmethod
    def _only_fixed(cls, order: str) -> str:
        """With fresh permutations u_{t-N} is another record's term, and the sum is no longer momentum."""
        if order != "fixed":
            raise ValueError("differences between epochs need the same record in the same round of every epoch")
        return order

    def difference_clips_for(self, problem: Problem) -> tuple[float, float]:
        """Bounds on the change of α g_t from anchor to anchor (α L η N, at most 2αG), and in one round (α L η)."""
        alpha = self.alpha_for(problem)
        moved = movement_bound(self.step_for(problem)) * alpha * problem.smoothness
        if not math.isfinite(moved):
            return moved, moved  # refused: residuals have no bound then
        return min(moved * problem.schedule.rounds_per_epoch, 2.0 * alpha * self.clip_for(problem)), moved

    def movement_bound_for(self, problem: Problem) -> float | None:
        return movement_bound(self.step_for(problem))

    def gamma_for(self, problem: Problem) -> float:
        if self.gamma == "balanced":
            difference, _ = self.difference_clips_for(problem)
            return min(0.5, difference / (self.alpha_for(problem) * self.clip_for(problem)))
        return (
            min(0.5, self.step_for(problem) * problem.schedule.rounds_per_epoch)
            if self.gamma == "paper"
            else self.gamma
        )


def _make_trees(kind: type[Trees], settings: ReducedSettings, problem: Problem, workload: Workload) -> Trees:
    """Sized for T rounds: by exact counting, or as Algorithm 2 has it."""
    schedule = problem.schedule
    if schedule.secret:
        raise InputError('the reduced variant rests on a fixed order of records: federation.sampling = "fixed"')
    trees = kind(
        schedule.rounds_per_epoch,
        settings.gamma_for(problem),
        *settings.difference_clips_for(problem),
        settings.movement_bound_for(problem),
        decay=workload.decay,
    )
    return (
        calibrate_trees(trees, workload, settings.shares)
        if settings.calibration == "exact"
        else size_by_paper(trees, workload, _sigma_mu(problem, reduced=True))
    )


MOMENTUM_TREE_REDUCED = Algorithm(
    name="momentum-tree-reduced",
    title="Momentum with reduced tree noise",
    source=f"{_PAPER}, Algorithm 2",
    settings=ReducedSettings,
    # α G_[1,t] + α r_[1,t], which in a fixed order is m_t = (1-α) m_{t-1} + α g_t
    estimator=_make_estimator,
    # three trees, on G, Δ and r, and the reconstruction of their noise over windows of N rounds
    mechanism=partial(_make_trees, SlidingDifferences),
    # w_{t+1} = w_t - η m^_t / ‖m^_t‖, so that queries move by η a round at most: what the noise rests on
    optimizer=_make_optimizer,
    theorems=_prescribe_theorem_9,
)


class AlignedSettings(ReducedSettings):
    """Two clips in place of the bounds that follow from L and η; both or none."""

    difference_clip: Positive | None = Field(
        None, description="norm bound on the change of one record's gradient from epoch start to epoch start"
    )
    residual_clip: Positive | None = Field(
        None, description="norm bound on the change of one record's gradient since the start of the epoch"
    )

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.difference_clip is None) != (self.residual_clip is None):
            raise ValueError("difference_clip and residual_clip go together: give both or none")
        return self

    def difference_clips_for(self, problem: Problem) -> tuple[float, float]:
        if self.difference_clip is None or self.residual_clip is None:
            return super().difference_clips_for(problem)
        alpha = self.alpha_for(problem)
        return alpha * self.difference_clip, alpha * self.residual_clip

    def movement_bound_for(self, problem: Problem) -> float | None:
        return super().movement_bound_for(problem) if self.difference_clip is None else None


def _make_split_estimator(settings: AlignedSettings, problem: Problem) -> PlainGradient | SplitGradient:
    plain = _make_estimator(settings, problem)
    if settings.difference_clip is None:
        return plain
    return SplitGradient(
        plain.clip,
        *settings.difference_clips_for(problem),
        settings.gamma_for(problem),
        problem.schedule.rounds_per_epoch,
        plain.coefficient,
        plain.decay,
    )


MOMENTUM_TREE_ALIGNED = Algorithm(
    name="momentum-tree-aligned",
    title="Momentum with reduced noise, trees aligned with epochs",
    source=f"after {_PAPER}, Algorithm 2; the alignment is not in the paper",
    settings=AlignedSettings,
    # as above, or u_t = (1-γ) (u_{t-N} + Δ_t) + γ G_t and q_t = (1-α) q_{t-1} + u_t + r_t with each part clipped
    estimator=_make_split_estimator,
    # three trees, those of G and Δ over the places of an epoch
    mechanism=partial(_make_trees, AlignedDifferences),
    optimizer=_make_optimizer,
)
