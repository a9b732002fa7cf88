"""Momentum aggregation of Tran & Cutkosky, in three rows of the table of algorithms.

Source: Tran & Cutkosky, "Momentum Aggregation for Private Non-convex ERM" (NeurIPS 2022), Algorithms 1 and 2.  A
silo's momentum is m_t = (1 - α) m_{t-1} + α g_t, with g_t the mean over its records of round t of clipped
gradients at w_t, unless the aligned row clips parts of them.  m^_t is the mean of the silos' momenta with any
noise.  A step of the server has length η up to rounding, or 0 if m^_t is 0 (normalized SGD):

    w_{t+1} = w_t - η m^_t / ‖m^_t‖,  and w_{t+1} = w_t if m^_t = 0
    output w_{T+1}, or w_U with U uniform on 1 … T (the iterate that the paper's theorems are about)

| here | paper | meaning |
|---|---|---|
| `iterate` | w_t | the query, (..., d) |
| `output_iterate` | w_min(t, U) | (..., d) |
| `released` | m^_t | the mean momentum with any noise, (..., d) |
| `alpha` | α | weight of a new gradient in the momentum |
| `step` | η | length of every step |
| `gamma` | γ | weight of new gradients in the sums of Algorithm 2 |
| `rounds_per_epoch`, `rounds` | N, T | rounds of one epoch, of the run |

A query is the point at which silos compute gradients.  Theorems 4, 6, 8 and 9 stand here with their errata
(docs/momentum.md).  The theorems are for the replace-one relation and n = N records, with one record in each round
of an epoch.
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
from fedpriv.core.errors import InputError, refuse
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
from fedpriv.participation.orders import FixedOrder, FreshOrder, Participation

_ROUNDING = 1.0 + 1e-6
_STEP_ROUNDING = 1.0 + 5e-7  # half of the slack, since a check of the length may add squares in another order
_ATTEMPTS = 8  # lengths of a step that are tried before coordinates are rounded one by one


def movement_bound(step: float) -> float:
    """Return the bound η(1 + 1e-6) on ‖w_{t+1} - w_t‖, floating-point rounding included."""
    return step * _ROUNDING


class NormalizedState(NamedTuple):
    """Server's vectors between two rounds, (..., d) each."""

    iterate: Tensor
    output_iterate: Tensor


@dataclass(frozen=True)
class NormalizedSGD:
    """Optimizer with steps of length `step` against the mean momentum of the silos.

    Guarantee: ‖w_{t+1} - w_t‖ ≤ `movement_bound(step)` for the stored vectors, rounded to their type, for every
    finite release.

    Attributes:
        step: η.
        output_round: U, drawn by public randomness before the run, or infinity to publish the last iterate
            w_{T+1}.
    """

    step: Scalar
    output_round: Scalar = float("inf")

    def start(self, initial: Tensor) -> NormalizedState:
        return NormalizedState(initial, initial)

    def query(self, state: NormalizedState) -> Tensor:
        return state.iterate

    def update(self, state: NormalizedState, released: Tensor, current: Round) -> NormalizedState:
        direction = released.double()
        norm = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
        iterate = _take_bounded_step(state.iterate, direction / norm.where(norm > 0.0, 1.0), self.step)
        return NormalizedState(
            iterate, torch.where(torch.as_tensor(current.t < self.output_round), iterate, state.output_iterate)
        )

    def output(self, state: NormalizedState) -> Tensor:
        return state.output_iterate


def _take_bounded_step(iterate: Tensor, direction: Tensor, step: Scalar) -> Tensor:
    """Return iterate - step · direction, rounded to the iterate's type, with a step within the bound.

    The bound is `movement_bound(step)`, on which the noise of Algorithm 2 relies, and rounding can exceed it.  A
    step that is too long after rounding is shortened before rounding, a few times at most.  If that does not
    suffice, each coordinate that moved too far is rounded towards its old value.

    Args:
        iterate: w_t, (..., d), in the type of the result.
        direction: Vectors of norm 1 up to rounding, or 0, (..., d) in float64.
        step: η, the length of the step.

    Returns:
        w_{t+1}, (..., d).
    """
    origin, limit = iterate.double(), step * _STEP_ROUNDING
    displacement = step * direction
    # Rows of the leading axes are shortened one by one, as far as they are too long.
    for _ in range(_ATTEMPTS):
        result = (origin - displacement).to(iterate.dtype)
        length = torch.linalg.vector_norm(result.double() - origin, dim=-1, keepdim=True)
        is_too_long = length > limit
        if is_known_true(~is_too_long.any()):
            return result
        displacement = torch.where(is_too_long, displacement * (limit / length), displacement)
    # The last resort: the next number of the type, nearer to the old coordinate.
    result = (origin - displacement).to(iterate.dtype)
    nearer = torch.where((result.double() - origin).abs() > displacement.abs(), result.nextafter(iterate), result)
    return torch.where(is_too_long, nearer, result)


class TheoremParameters(NamedTuple):
    """Numbers that a theorem prescribes, as in the module's table."""

    rounds: int
    alpha: float
    step: float
    mixing: float
    """γ of Theorem 9, or 0 for Theorem 6."""


def simple_noise_multiplier(epsilon: float, delta: float, reduced: bool = False) -> float:
    """Return the noise multiplier 2 √ln(1/δ) / ε of Theorem 4, or 4 √ln(1/δ) / ε of Theorem 8.

    Guarantee: let D bound the distance by which one record moves all released nodes together under replace-one.
    Nodes are sums over intervals of rounds.  Noise of standard deviation D times this multiplier on every node is
    (ε, δ)-DP, for ε ≤ ln(1/δ).  For the multiplier of Theorem 8 it suffices if the nodes are in four groups, each
    with its own D.

    The paper prints the condition ε ≤ ln(1/δ) the other way round.

    Args:
        epsilon: ε.
        delta: δ.
        reduced: Whether the multiplier is that of Theorem 8.

    Raises:
        InputError: ε > ln(1/δ), or a number is out of its range.

    Example:
        >>> round(simple_noise_multiplier(epsilon=1.0, delta=1e-5), 4)
        6.7861
    """
    log = _log_inverse_delta(epsilon, delta)
    if epsilon > log:
        raise InputError(
            f"epsilon = {epsilon:g}: the paper's formula for the noise holds only up to ln(1/delta) = {log:.4g}"
        )
    return (4.0 if reduced else 2.0) * math.sqrt(log) / epsilon


def tree_parameters(records: int, dimension: int, epsilon: float, delta: float) -> TheoremParameters:
    """Return T, α and η of Theorem 6.

    T is the largest integer of at least 2 with T log2 T ≤ ε N² / √(d ln(1/δ)).  α is ε N / (T log2 T √(d
    ln(1/δ))), clipped to [1/N, 1], and η is 1/√(NT).

    Args:
        records: N, the number of records.
        dimension: d, the number of coordinates.
        epsilon: ε of the run.
        delta: δ of the run.

    Raises:
        InputError: There is no such T, or ε or δ is out of its range.

    Example:
        >>> tree_parameters(records=1000, dimension=10, epsilon=1.0, delta=1e-5).rounds
        7265
    """
    noise_factor = math.sqrt(dimension * _log_inverse_delta(epsilon, delta))
    budget = epsilon * records**2 / noise_factor
    if not 2.0 <= budget < math.inf:
        raise InputError(
            f"{records} records are too {'few' if budget < 2.0 else 'many'} for Theorem 6 at "
            f"epsilon = {epsilon:g}, d = {dimension}"
        )
    # Bisection: T log2 T is within the budget at `low`, and above it at `high`.
    low, high = 2, max(4, math.ceil(budget))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle * math.log2(middle) <= budget else (low, middle)
    alpha = epsilon * records / (low * math.log2(low) * noise_factor)
    return TheoremParameters(low, min(max(alpha, 1.0 / records), 1.0), 1.0 / math.sqrt(records * low), 0.0)


def reduced_parameters(records: int, dimension: int, epsilon: float) -> TheoremParameters:
    """Return T, α, η and γ of Theorem 9.

    T is ⌊N^{7/3} ε^{4/3} / d^{2/3}⌋, α is N^{3/4} ε / (T^{3/4} √d), at least 1/N, η is 1/√(NT), and γ is ηN.  The
    theorem's rate is claimed and not proved: its proof needs fresh permutations, the algorithm a fixed one.

    Args:
        records: N, the number of records.
        dimension: d, the number of coordinates.
        epsilon: ε of the run.

    Raises:
        InputError: ε is not a finite number above 0, α > 1, or T < 4N, so that γ > 1/2.
    """
    check_positive("epsilon", epsilon)
    exact = records ** (7.0 / 3.0) * epsilon ** (4.0 / 3.0) / dimension ** (2.0 / 3.0)
    rounds = math.floor(exact * (1.0 + 1e-12))  # rounding of the powers must not cost a round
    if rounds < 4 * records:
        raise InputError(f"Theorem 9 gives T = {rounds}, less than 4N = {4 * records}: gamma would exceed 1/2")
    alpha = records**0.75 * epsilon / (rounds**0.75 * math.sqrt(dimension))
    if alpha > 1.0:
        raise InputError(f"Theorem 9 gives alpha = {alpha:.4g} > 1 at epsilon = {epsilon:g}")
    step = 1.0 / math.sqrt(records * rounds)
    return TheoremParameters(rounds, max(alpha, 1.0 / records), step, step * records)


def paper_node_count(rounds: int, rounds_per_epoch: int) -> float:
    """Return V of Algorithm 1, with ⌈T/N⌉ for the printed T/N.

    At most V released nodes hold a record.

    Args:
        rounds: T.
        rounds_per_epoch: N.

    Example:
        >>> paper_node_count(rounds=64, rounds_per_epoch=16)
        23.0
    """
    levels, epoch_levels = rounds.bit_length() - 1, rounds_per_epoch.bit_length() - 1
    long_nodes = sum(rounds >> level for level in range(epoch_levels + 1, levels + 1))
    return float((min(levels, epoch_levels) + 1) * -(-rounds // rounds_per_epoch) + long_nodes)


def tree_gradient_bound(
    gap: float, lipschitz: float, smoothness: float, records: int, dimension: int, epsilon: float, delta: float
) -> float:
    """Return Theorem 6's bound on E‖∇F(w_U)‖, with corrected constants.

    The bound holds for the theorem's own parameters and noise, and for orders that are drawn anew in every epoch.

    Args:
        gap: Bound on F(w_1) - inf F.
        lipschitz: G, which gradients do not exceed and to which they are clipped.
        smoothness: L.
        records: N.
        dimension: d.
        epsilon: ε.
        delta: δ.

    Raises:
        InputError: `tree_parameters` refuses N, d, ε or δ.
    """
    rounds = tree_parameters(records, dimension, epsilon, delta).rounds
    spread, depth = math.sqrt(dimension * _log_inverse_delta(epsilon, delta)), math.log2(rounds)
    return (
        (1.5 * gap + 12.0 * smoothness + 48.0 * lipschitz) * math.sqrt(depth * spread / (epsilon * records))
        + 6.0 * lipschitz / math.sqrt(records)
        + 3.0 * lipschitz * depth * spread / (epsilon * records)
    )


def _log_inverse_delta(epsilon: float, delta: float) -> float:
    """Return ln(1/δ) after checking both arguments."""
    check_positive("epsilon", epsilon)
    return -math.log(check_delta(delta))


_PAPER = "Tran & Cutkosky, Momentum Aggregation for Private Non-convex ERM (NeurIPS 2022)"


class MomentumSettings(Settings):
    """Keys of all three rows."""

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
    """Return the estimator m_t = (1 - α) m_{t-1} + α g_t, with increments α g_t clipped to norm α G.

    A silo remembers two queries, so that it can measure how far a query moved.
    """
    alpha = settings.alpha_for(problem)
    return PlainGradient(alpha * settings.clip_for(problem), coefficient=alpha, decay=1.0 - alpha, memory=2)


def _make_optimizer(settings: MomentumSettings, problem: Problem, _noise_std: float) -> NormalizedSGD:
    """Return normalized SGD, whose U, for a random output, follows from the seed and T alone."""
    output_round = math.inf
    if settings.output == "random":
        output_round = float(public_generator(problem.seed, "output iterate").integers(1, problem.rounds + 1))
    return NormalizedSGD(settings.step_for(problem), output_round)


def _sigma_mu(problem: Problem, reduced: bool) -> float:
    """Return the theorem's σ for (ε, δ) times the μ of the same guarantee, or 0 for a run without noise.

    Raises:
        InputError: ε is 0 or above ln(1/δ).
    """
    return (
        0.0
        if problem.epsilon is None
        else simple_noise_multiplier(problem.epsilon, problem.delta, reduced)
        * mu_of(problem.epsilon, problem.delta)
    )


class MomentumTreeSettings(MomentumSettings, NoiseSettings):
    """Keys of Algorithm 1 with a tree, or with other noise that is calibrated by exact counting only."""

    order: Literal["fixed", "fresh"] = Field(
        "fixed", description="of the records: the same in every epoch, or a new public permutation"
    )
    order_digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        None, description="SHA-256 that the fresh permutations of the run's seed need to have; omitted, any"
    )

    @model_validator(mode="after")
    def _the_papers_constants_and_orders_are_a_trees(self) -> Self:
        is_papers_tree = self.mechanism == BinaryTree.name and self.late_clip == "same"
        refuse(
            {
                'calibration = "paper" is for the paper\'s tree with equal clips: use "exact"': (
                    self.calibration == "paper" and not is_papers_tree
                ),
                'order = "fresh" needs mechanism = "tree" and late_clip = "same": use order = "fixed"': (
                    self.order == "fresh" and not is_papers_tree
                ),
                'order_digest is of fresh permutations: give order = "fresh", or leave it out': (
                    self.order == "fixed" and self.order_digest is not None
                ),
            },
            ValueError,
        )
        return self

    def arrange_order(self, declared: FixedOrder) -> Participation:
        """Return the declared order, or fresh permutations of its batches from its public seed.

        Raises:
            InputError: `order_digest` is not that of the permutations.
        """
        numbers = declared.rounds, declared.rounds_per_epoch, declared.seed
        return declared if self.order == "fixed" else FreshOrder(*numbers, self.order_digest or "")


def _make_tree(settings: MomentumTreeSettings, problem: Problem, workload: Workload) -> Mechanism:
    """Return the chosen mechanism, or with calibration = "paper" a tree with the paper's noise.

    A node of the tree holds the sum of an interval of rounds.  The paper's noise on it is 4 √V σ times the largest
    clip and a record's weight under replace-one, with V from `paper_node_count` and σ from
    `simple_noise_multiplier`, and half of that under zero-out.  If the tree's own sensitivity needs more noise,
    the tree has that.

    Raises:
        InputError: The chosen mechanism cannot be built, or the paper's noise is asked for with α below 1/N, or
            with an ε that is 0 or above ln(1/δ).
    """
    decay, rounds_per_epoch = workload.decay, problem.schedule.rounds_per_epoch
    if settings.calibration == "exact":
        return choose_mechanism(settings, problem, workload)
    if decay > 1.0 - 1.0 / rounds_per_epoch + 1e-12:
        raise InputError(f'algorithm.calibration = "paper" needs alpha of at least 1/N = 1/{rounds_per_epoch}')
    node_count = paper_node_count(problem.rounds, rounds_per_epoch)
    # A sensitivity in clips: calibration multiplies it by the clip, by 2 under replace-one, and divides it by μ.
    return PaperTree(decay, least=2.0 * math.sqrt(node_count) * _sigma_mu(problem, reduced=False))


def _prescribe_theorem_6(settings: MomentumTreeSettings, problem: Problem) -> tuple[Prescription, ...]:
    """Prescribe the numbers of Theorem 6, with its bound on E‖∇F(w_U)‖ if that is known.

    The bound needs a finite clip G, smoothness L and bound on the fall of the loss (`gap`), and a clip that is at
    least the Lipschitz constant of the loss.  With a fixed order of records, the theorem's fresh orders are stated
    as an assumption.
    """
    prescription = _prescribe(
        "Theorem 6", problem, partial(tree_parameters, problem.records, problem.dimension, delta=problem.delta)
    )
    constants = (problem.gap, settings.clip_for(problem), problem.smoothness)
    if (
        prescription.refusal is not None
        or problem.epsilon is None
        or not all(map(math.isfinite, constants))
        or settings.clip_for(problem) < problem.lipschitz
    ):
        return (prescription,)
    bound = tree_gradient_bound(*constants, problem.records, problem.dimension, problem.epsilon, problem.delta)
    assumption = (
        "the bound is for an order that is drawn anew in every epoch, and this run keeps one; "
        'order = "fresh" draws it anew'
    )
    return (
        prescription._replace(
            numbers={**prescription.numbers, "bound": bound},
            assumption=assumption if settings.order == "fixed" else "",
        ),
    )


def _prescribe_theorem_9(_settings: MomentumSettings, problem: Problem) -> tuple[Prescription, ...]:
    name = "Theorem 9, whose rate is claimed, not proved"
    return (_prescribe(name, problem, partial(reduced_parameters, problem.records, problem.dimension)),)


@catch_refusal
def _prescribe(name: str, problem: Problem, formula: Callable[[float], TheoremParameters]) -> Prescription:
    """Prescribe a theorem's numbers, for batches of 1 record, since the paper's T counts single gradients."""
    if problem.epsilon is None:
        raise InputError(f"{name} needs an (ε, δ), and the scenario is not private")
    parameters = formula(problem.epsilon)
    numbers = {
        "rounds": float(parameters.rounds),
        "batch": 1.0,
        "alpha": parameters.alpha,
        "step": parameters.step,
    }
    return Prescription(name, numbers | ({"gamma": parameters.mixing} if parameters.mixing else {}))


MOMENTUM_TREE = Algorithm(
    name="momentum-tree",
    title="Momentum with tree noise",
    source=f"{_PAPER}, Algorithm 1",
    settings=MomentumTreeSettings,
    schedule=MomentumTreeSettings.arrange_order,
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
    """Keys of Algorithm 2."""

    gamma: Literal["balanced", "paper"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        "balanced",
        description="γ; 'paper' is ηN, 'balanced' is ηN L/G, or difference_clip/G if that is given; both are at "
        "most 1/2",
    )
    shares: Literal["best", "equal"] = Field(
        "best",
        description="how the privacy loss is split over the groups of nodes: for the least noise, or evenly",
    )
    order: Literal["fixed", "fresh"] = Field("fixed", description="of the records; only a fixed one is possible")

    @field_validator("order")
    @classmethod
    def _only_fixed(cls, order: str) -> str:
        """Refuse fresh permutations, under which round t - N reads another record and the sum is no momentum."""
        if order != "fixed":
            raise ValueError("differences between epochs need the same record in the same round of every epoch")
        return order

    def difference_clips_for(self, problem: Problem) -> tuple[float, float]:
        """Return norm bounds on the change of one record's α g_t, for a whole epoch and for a round.

        The first is about the queries at which two consecutive epochs start.  The bounds are min(α L η N, 2αG) and
        α L η, with η enlarged by rounding (`movement_bound`).  Both are infinite if L is not known.
        """
        alpha = self.alpha_for(problem)
        displacement = movement_bound(self.step_for(problem)) * alpha * problem.smoothness
        if not math.isfinite(displacement):
            return displacement, displacement  # refused later, since residuals have no bound
        return min(
            displacement * problem.schedule.rounds_per_epoch, 2.0 * alpha * self.clip_for(problem)
        ), displacement

    def movement_bound_for(self, problem: Problem) -> float | None:
        """Return the bound on a query's move that the noise rests on, or None if differences are clipped."""
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


def _make_trees(tree_class: type[Trees], settings: ReducedSettings, problem: Problem, workload: Workload) -> Trees:
    """Return the three noise trees of a row, with the standard deviations of their nodes.

    These are chosen for the trees' own sensitivity, or by the formula of Algorithm 2.

    Raises:
        InputError: Participation is secret, the trees do not fit the run, or the formula does not hold for its ε.
    """
    schedule = problem.schedule
    if schedule.secret:
        raise InputError(
            'the reduced variant rests on a fixed order of records: set federation.sampling = "fixed"'
        )
    trees = tree_class(
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
    # w_{t+1} = w_t - η m^_t / ‖m^_t‖, so that queries move by at most η a round, which the noise relies on
    optimizer=_make_optimizer,
    theorems=_prescribe_theorem_9,
)


class AlignedSettings(ReducedSettings):
    """Keys of the aligned row: two clips that replace the bounds from L and η, both given or none."""

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
    # m_t as in the reduced row, or with clipped parts q_t = (1-α) q_{t-1} + u_t + r_t,
    # where u_t = (1-γ) (u_{t-N} + Δ_t) + γ G_t, and u_t = G_t in the first epoch
    estimator=_make_split_estimator,
    # three trees, with those of G and Δ over the rounds of an epoch
    mechanism=partial(_make_trees, AlignedDifferences),
    optimizer=_make_optimizer,
)
