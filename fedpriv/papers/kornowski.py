"""Algorithms of Kornowski, Liu & Talwar for losses that are neither smooth nor convex.

Source: Kornowski, Liu & Talwar, "Improved Sample Complexity for Private Nonsmooth Nonconvex Optimization",
Algorithms 2 to 5.  `kornowski_bounds` has the theorems and bounds.

As printed, the single-pass algorithm is not private: at the end of every period it releases the running sum
without noise.  The tree here covers every leaf and is fresh in every period, and every record's increment is
clipped.  docs/goldstein.md lists the other differences.

Online-to-non-convex conversion (Algorithm 2, after Cutkosky, Mehta & Orabona 2023) chooses steps, not points, by
online gradient descent:

    z_t = x_{t-1} + s_t Δ_t,   x_t = x_{t-1} + Δ_t            s_t uniform on [0, 1), g~_t the release for z_t
    Δ_{t+1} = Δ_t - η g~_t, projected on the ball of radius D;  Δ_1 = 0
    output: the mean of z over one complete window of W rounds, drawn among them or the last one

| here | paper | shape |
|---|---|---|
| `iterate` | x_{t-1} | (..., d) |
| `move` | Δ_t | (..., d) |
| `query_point` | z_t, the query, a point between x_{t-1} and x_t | (..., d) |
| `window_sum` | Σ z over the window of round t, before z_t | (..., d) |
| `published` | output of a run that stops here | (..., d) |
| `radius`, `step` | D, η | number, or one for each replicate |
| `choices.window` | M (W above) | number |

A query is the point at which silos compute gradients.  The release g~_t estimates the gradient at z_t of the mean
loss, smoothed over a ball of radius α.  A period of Σ rounds begins with an anchor round, which estimates this
gradient afresh.  Each of the other rounds adds an estimate of its change since the previous query.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedpriv.accounting.gaussian import mu_of
from fedpriv.core.errors import InputError
from fedpriv.core.random import public_generator
from fedpriv.core.replicates import PER_REPLICATE, Scalar
from fedpriv.loss.estimators import Round, VarianceReducedGradient
from fedpriv.loss.goldstein import RandomSmoothing, SeededDirections
from fedpriv.loss.objective import Objective
from fedpriv.noise.diagonal import LeafGaussian
from fedpriv.noise.toeplitz import AnchoredSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.papers.base import (
    Algorithm,
    Count,
    Positive,
    Prescription,
    Problem,
    Settings,
    catch_refusal,
    project_to_ball,
    take_step,
)
from fedpriv.papers.kornowski_bounds import (
    GoldsteinParameters,
    NonsmoothProblem,
    leaf_noise_ratio,
    max_nodes,
    max_window,
    multi_pass_error,
    needed_directions,
    paper_window,
    plan_multi_pass,
    plan_single_pass,
    printed_directions,
    single_pass_error,
)
from fedpriv.participation.orders import FixedOrder


@dataclass(frozen=True)
class PublicChoices:
    """Public random choices of the optimizer, drawn from the seed.

    Unless `publishes_last`, window k becomes the output with probability 1/k (`publishes`), so that the output is
    uniform over the complete windows whenever a run stops.  The paper draws the window once.
    """

    seeds: tuple[int, ...] = field(metadata=PER_REPLICATE)
    """Public seed of each replicate."""
    rounds: int
    """T."""
    window: int
    """W, in rounds."""
    publishes_last: bool = False
    """Whether the last complete window is always published, while the theorems are about a random one."""

    def position(self, t: int, like: Tensor) -> Scalar:
        """Return s_t, (replicates, 1), or a number for one replicate.

        Args:
            t: Round, from 1 to T + 1.
            like: Vectors with the device and type of a result for several replicates.
        """
        return _as_column(self._positions[:, t - 1], like)

    def publishes(self, window: int, like: Tensor) -> Tensor:
        """Return a mask of the replicates whose output becomes the mean of this window.

        The mask is (replicates, 1), or () for one replicate and for a last window that is always published.

        Args:
            window: Number of the window, from 1.
            like: Vectors on the device of the run.
        """
        return (
            torch.ones((), dtype=torch.bool, device=like.device)
            if self.publishes_last
            else torch.as_tensor(
                _as_column((window * self._window_draws[:, window - 1] < 1.0).astype(np.float64), like)
            )
            > 0.0
        )

    @cached_property
    def _positions(self) -> NDArray[np.float64]:
        return _draw_uniform(self.seeds, "positions", self.rounds + 1)

    @cached_property
    def _window_draws(self) -> NDArray[np.float64]:
        return _draw_uniform(self.seeds, "windows", self.rounds // self.window)


class O2NCState(NamedTuple):
    """Server's vectors before round t, (..., d) each."""

    iterate: Tensor
    move: Tensor
    query_point: Tensor
    window_sum: Tensor
    published: Tensor


@dataclass(frozen=True)
class O2NC:
    """Online-to-non-convex conversion with projected online gradient descent.

    In exact arithmetic ‖Δ_t‖ ≤ D and ‖z_t - z_{t-1}‖ ≤ 2D, whatever finite vectors are released.  The queries of a
    window lie within ((W + 1)/2 - 1/W) D of their mean.  All queries and the output, with the choice of the
    window, are post-processing of the initial model, releases and public random choices.
    """

    step: Scalar
    """η."""
    radius: Scalar
    """D, the largest step."""
    choices: PublicChoices
    """Positions s_t, and the window that is published."""

    def start(self, initial: Tensor) -> O2NCState:
        zero = torch.zeros_like(initial)
        return O2NCState(initial, zero, initial, zero, initial)

    def query(self, state: O2NCState) -> Tensor:
        return state.query_point

    def update(self, state: O2NCState, released: Tensor, current: Round) -> O2NCState:
        """Step to x_t, choose Δ_{t+1} by projected descent, and place z_{t+1} by s_{t+1}, (..., d) each.

        z_t is added to the window's sum, and a complete window may become the output.

        Args:
            state: Vectors of the module's table before round t.
            released: Release of round t, of which `released` / `scale` is the noisy gradient g~_t at z_t.
            current: Round, with its number t and its scale.
        """
        window, t = self.choices.window, current.t
        window_sum, published = state.window_sum + state.query_point, state.published
        # Window k = t / W is complete.  It replaces the output with probability 1/k, or always (`publishes_last`).
        if t % window == 0:
            published = torch.where(self.choices.publishes(t // window, released), window_sum / window, published)
            window_sum = torch.zeros_like(window_sum)
        iterate = state.iterate + state.move
        move = project_to_ball(take_step(state.move, self.step / current.scale, released), self.radius)
        return O2NCState(
            iterate, move, iterate + self.choices.position(t + 1, released) * move, window_sum, published
        )

    def output(self, state: O2NCState) -> Tensor:
        """Return the mean of the published window, or x_0 before the first window is complete."""
        return state.published


def _draw_uniform(seeds: Sequence[int], purpose: str, count: int) -> NDArray[np.float64]:
    return np.stack([public_generator(seed, "o2nc", purpose).random(count) for seed in seeds])


def _as_column(values: NDArray[np.float64], like: Tensor) -> Scalar:
    return float(values[0]) if len(values) == 1 else like.new_tensor(values).unsqueeze(-1)


_PAPER = "Kornowski, Liu & Talwar, Improved Sample Complexity for Private Nonsmooth Nonconvex Optimization"
_TARGET_COUNT = 200
"""Number of values of β among which the multi-pass theorem's best is chosen."""


class GoldsteinSettings(Settings):
    """Parameters of the algorithms, for which `kornowski_bounds` has the theorems' prescriptions."""

    smoothing: Positive = Field(description="α: radius of the random smoothing; the guarantee is at radius 2α")
    radius: Positive = Field(description="D: the largest step; queries move by at most 2D")
    period: Count = Field(description="Σ: rounds from one anchor to the next")
    anchor_clip: Positive = Field(description="C1: norm bound on one record's gradient in an anchor round")
    clip: Positive = Field(description="C2: norm bound on one record's difference of gradients in other rounds")
    step: Literal["theorem"] | Positive = Field(
        "theorem", description="η; 'theorem' is D/(G1√W), G1 = anchor_clip + the error of the oracle"
    )
    window: Literal["paper", "longest"] | Count = Field(
        "paper", description="W: rounds that are averaged; 'paper' is α/(4D), 'longest' what the proof allows"
    )
    output: Literal["random", "last"] = Field(
        "random", description="which complete window is published; the theorems are about a random one"
    )
    oracle: Literal["first-order", "zeroth-order"] = Field(
        "first-order", description="gradients, or values, at random points around the query"
    )
    directions: Count = Field(
        8, description="J: random directions a record and query; an anchor's gradients take one"
    )
    shared_directions: bool = Field(
        True, description="both gradients of a difference along the same directions; false is the paper's choice"
    )

    def keys_at_rest(self, distance: float) -> dict[str, Any]:
        """Return a radius `distance` of the smoothing, with the largest step in proportion."""
        return {"smoothing": distance, "radius": self.radius * distance / self.smoothing}

    @property
    def window_rounds(self) -> int:
        """Length W of a window, in rounds."""
        if self.window == "paper":
            return paper_window(self.radius, self.smoothing)
        return max_window(self.radius, self.smoothing) if self.window == "longest" else self.window

    @property
    def first_order(self) -> bool:
        return self.oracle == "first-order"

    @property
    def anchor_direction_count(self) -> int:
        """Number m of random directions of a record at an anchor."""
        return 1 if self.first_order else self.directions

    def make_nonsmooth_problem(self, problem: Problem) -> NonsmoothProblem:
        """Return the problem of the theory, with C1 for the Lipschitz constant and an infinite gap Φ."""
        return NonsmoothProblem(
            problem.dimension,
            self.anchor_clip,
            math.inf,
            self.smoothing,
            "first" if self.first_order else "zeroth",
            self.directions,
            self.shared_directions,
            self.anchor_direction_count,
        )


class AllRecordsSettings(GoldsteinSettings):
    """Parameters of the algorithm that reads all records in every round."""

    anchor_directions: Count | None = Field(
        None, description="m: random directions a record at an anchor; omitted, 1 of first order and J of zeroth"
    )

    @property
    def anchor_direction_count(self) -> int:
        return self.anchor_directions or super().anchor_direction_count


class SinglePassSettings(GoldsteinSettings):
    """Parameters of the single-pass algorithms."""

    anchor_batches: Count = Field(
        1, description="batches of its order that a silo reads in an anchor round: B1/B2"
    )
    noise: Literal["tree", "anchored"] = Field(
        "tree",
        description="the paper's tree over a period, or noise of every anchor's own and a square root for the "
        "differences, which is much less in long periods",
    )

    @property
    def anchored_noise(self) -> AnchoredSquareRoot:
        """Noise with a separate part for anchors, sized so that neither kind of round pays for the other.

        A record of an anchor costs as much as one of the first difference of a full period.  Records of later
        differences cost less.

        Raises:
            InputError: A period or a ratio of noises is out of the mechanism's range.
        """
        return AnchoredSquareRoot.with_equal_cost(self.period, self.anchor_clip / self.anchor_batches, self.clip)


@catch_refusal
def _prescribe(
    name: str,
    problem: Problem,
    plan: Callable[[NonsmoothProblem, float], GoldsteinParameters],
    settings: GoldsteinSettings,
) -> Prescription:
    """Prescribe a theorem's numbers with corrected constants, and the bound that then holds.

    "noise std" is that of a difference round (of every tree node in a single pass).  "bound" is on the Goldstein
    measure, the smallest norm of a weighted mean of gradients at nearby points.  "directions" is the paper's
    number of random directions in which a record's loss or gradient is evaluated.  "directions needed" is, up to a
    constant, the number with which the paper's sensitivity holds without clipping, but for a probability of δ/2.

    Args:
        name: Name of the theorem.
        problem: Numbers of the run, with ε, a Lipschitz constant and a bound `gap` on the fall of the loss.
        plan: Function that chooses parameters for the problem of the theory and for μ under replace-one.
        settings: Keys of the algorithm, for the smoothing and the oracle.
    """
    if problem.epsilon is None or not (math.isfinite(problem.gap) and math.isfinite(problem.lipschitz)):
        raise InputError(
            f"{name} needs a guarantee, a loss with a known Lipschitz constant, "
            "and a bound on how far the loss can fall (--gap)"
        )
    nonsmooth_problem = dataclasses.replace(
        settings.make_nonsmooth_problem(problem), lipschitz=problem.lipschitz, gap=problem.gap
    )
    # The theory's noise is for replace-one, under which a record moves a sum twice as far as under zero-out.
    parameters = plan(
        nonsmooth_problem,
        (1.0 if problem.relation == "replace-one" else 2.0) * mu_of(problem.epsilon, problem.delta),
    )
    # A record is in one round of a single pass, and in all rounds of a multi-pass run.  Half of δ, divided by the
    # number of these rounds, is the probability that the estimates of one round are too far from their means.
    multi_pass = not isinstance(settings, SinglePassSettings)
    read_count = parameters.rounds if multi_pass else 1
    numbers = {
        "rounds": float(parameters.rounds),
        "batch": float(parameters.batch),
        "anchor batch": float(parameters.anchor_batch),
        "clip": parameters.clip,
        "anchor_clip": parameters.anchor_clip,
        "noise std": parameters.difference_std,
        "anchor noise std": parameters.anchor_std,
        "radius": parameters.radius,
        "period": float(parameters.period),
        "window": float(parameters.window),
        "step": parameters.step,
        "bound": parameters.bound,
        "directions": printed_directions(nonsmooth_problem, parameters, problem.delta, multi_pass=multi_pass),
        "directions needed": needed_directions(
            nonsmooth_problem, parameters.radius, 0.5 * problem.delta / read_count
        ),
    }
    return Prescription(
        name,
        numbers,
        assumption="clips take nothing away; the bound is on the Goldstein measure at radius 2α of a random "
        "window",
    )


def _single_pass_theorem(settings: SinglePassSettings, problem: Problem) -> tuple[Prescription, ...]:
    name = "Theorem 6.1" if settings.first_order else "Theorem 3.1"
    return (
        _prescribe(
            name,
            problem,
            lambda nonsmooth_problem, mu: plan_single_pass(nonsmooth_problem, problem.records, mu),
            settings,
        ),
    )


def _multi_pass_theorem(settings: GoldsteinSettings, problem: Problem) -> tuple[Prescription, ...]:
    """Prescribe Theorem 4.1 with the target β of the least bound, since the paper leaves β open."""

    def find_best_plan(nonsmooth_problem: NonsmoothProblem, mu: float) -> GoldsteinParameters:
        targets = nonsmooth_problem.lipschitz * np.geomspace(1e-3, 4.0, _TARGET_COUNT)
        plans = (plan_multi_pass(nonsmooth_problem, problem.records, float(target), mu) for target in targets)
        return min(plans, key=lambda plan: plan.bound)

    return (_prescribe("Theorem 4.1", problem, find_best_plan, settings),)


def _make_estimator(settings: GoldsteinSettings, _problem: Problem) -> VarianceReducedGradient:
    return VarianceReducedGradient(settings.anchor_clip, settings.clip, settings.period)


def _make_one_pass_schedule(settings: SinglePassSettings, declared: FixedOrder) -> FixedOrder:
    """Return the order in which anchor rounds read `anchor_batches` batches.

    Raises:
        InputError: The rounds of the scenario are not one whole pass.
    """
    if declared.rounds_per_epoch != declared.rounds:
        raise InputError(
            "federation: goldstein-single-pass reads every record in one round, because its differences would be "
            "biased in a second pass; leave epochs out and give as many rounds as one pass has, or run "
            "goldstein-erm"
        )
    anchors = range(0, declared.rounds, settings.period)
    batches = (settings.anchor_batches if index in anchors else 1 for index in range(declared.rounds))
    return FixedOrder(declared.rounds, declared.rounds_per_epoch, tuple(batches))


def _check_full_batches(_settings: GoldsteinSettings, declared: FixedOrder) -> FixedOrder:
    """Return the declared order.

    Raises:
        InputError: A pass has several rounds, so that a round does not read all records.
    """
    if declared.rounds_per_epoch != 1:
        raise InputError(
            "federation.epochs: goldstein-erm reads all of a silo's records in every round, and nothing is proved "
            f"for smaller batches; give epochs = rounds = {declared.rounds}, and a silo's records as batch"
        )
    return declared


def _single_pass_error(settings: SinglePassSettings, problem: Problem, noise_std: float) -> float:
    anchor_batch = settings.anchor_batches * problem.batch
    variance_factor = (
        settings.anchored_noise.worst_variance if settings.noise == "anchored" else max_nodes(settings.period)
    )
    std = noise_std * math.sqrt(variance_factor)
    return single_pass_error(
        settings.make_nonsmooth_problem(problem),
        settings.radius,
        settings.period,
        anchor_batch,
        problem.batch,
        std,
    )


def _erm_error(settings: GoldsteinSettings, problem: Problem, noise_std: float) -> float:
    anchor_std = _anchor_noise_ratio(settings, problem) * noise_std
    return multi_pass_error(
        settings.make_nonsmooth_problem(problem),
        settings.period,
        problem.batch,
        anchor_std,
        noise_std,
        settings.radius,
    )


def _anchor_noise_ratio(settings: GoldsteinSettings, problem: Problem) -> float:
    """Ratio of an anchor's noise to a difference's (`leaf_noise_ratio`)."""
    return leaf_noise_ratio(settings.anchor_clip, settings.clip, problem.rounds, settings.period)


def _make_optimizer(settings: GoldsteinSettings, problem: Problem, error: float) -> O2NC:
    """Return the optimizer, with the step η = D / ((C1 + G0) √W) unless the scenario gives a number.

    C1 + G0 is the theory's bound of the root mean square norm of a release, with the clip C1 of anchors for the
    Lipschitz constant, and the bound G0 (`error`) on the root mean square error of a release.

    Raises:
        InputError: A window has more rounds than the run.
    """
    window, step = settings.window_rounds, settings.step
    if window > problem.rounds:
        raise InputError(f"algorithm.window: {window} rounds are averaged, and the run has {problem.rounds}")
    if step == "theorem":
        step = settings.radius / ((settings.anchor_clip + error) * math.sqrt(window))
    return O2NC(
        step,
        settings.radius,
        PublicChoices((problem.seed,), problem.rounds, window, publishes_last=settings.output == "last"),
    )


def _smooth_objective(settings: GoldsteinSettings, problem: Problem, objective: Objective) -> RandomSmoothing:
    """Return the smoothed objective.

    Raises:
        InputError: A zeroth-order oracle is to run in float32, whose digits its differences would lose.
    """
    if not settings.first_order and objective.initial().dtype == torch.float32:
        raise InputError(
            'run.dtype = "float32": a zeroth-order difference cancels four values of the loss; it needs "float64"'
        )
    return RandomSmoothing(
        objective,
        settings.smoothing,
        "first" if settings.first_order else "zeroth",
        settings.directions,
        anchor_direction_count=settings.anchor_direction_count,
        shares_directions=settings.shared_directions,
        direction_source=SeededDirections((problem.seed,)),
    )


GOLDSTEIN_SINGLE_PASS = Algorithm(
    name="goldstein-single-pass",
    title="O2NC, variance reduction in one pass",
    source=f"{_PAPER}, Algorithms 2 and 3 (zeroth order) or 5 (first order)",
    settings=SinglePassSettings,
    schedule=_make_one_pass_schedule,
    # an anchor: g = mean E(z_t);  else g = g + mean [E(z_t) - E(z_{t-1})], E the estimate of ∇f_α of one record
    estimator=_make_estimator,
    # one fresh tree a period on every g, unless anchors have noise of their own
    mechanism=lambda settings, _problem, workload: (
        settings.anchored_noise if settings.noise == "anchored" else BinaryTree(workload.decay, workload.period)
    ),
    optimizer=lambda settings, problem, noise_std: _make_optimizer(
        settings, problem, _single_pass_error(settings, problem, noise_std)
    ),
    objective=_smooth_objective,
    theorems=_single_pass_theorem,
)

GOLDSTEIN_ERM = Algorithm(
    name="goldstein-erm",
    title="O2NC, variance reduction on all records",
    source=f"{_PAPER}, Algorithms 2 and 4",
    settings=AllRecordsSettings,
    schedule=_check_full_batches,
    # the estimator of the single pass, over all records in every round
    estimator=_make_estimator,
    # Gaussian noise on every leaf, whose noisy value is added to g
    mechanism=lambda settings, problem, workload: LeafGaussian(
        workload.decay, workload.period, _anchor_noise_ratio(settings, problem)
    ),
    optimizer=lambda settings, problem, noise_std: _make_optimizer(
        settings, problem, _erm_error(settings, problem, noise_std)
    ),
    objective=_smooth_objective,
    theorems=_multi_pass_theorem,
)
