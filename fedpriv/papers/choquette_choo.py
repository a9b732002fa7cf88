"""Accelerated-DP-SRGD of Choquette-Choo, Ganesh & Thakurta: rows, theorems and excess risk.

Source: Choquette-Choo, Ganesh & Thakurta, "Near-Optimal Rates for O(1)-Smooth DP-SCO with a Single Epoch and Large
Batches" (ALT 2025), Algorithm 1.  Rounds count from 1, and α_t = t are weights (the paper's η_t) with sums α_{1:t}
= α_1 + … + α_t.  S~_t is the noisy sum that estimates α_t ∇F(x_t), F the mean loss, and Π projects on the ball K.
An increment is a record's clipped contribution to a sum, and the excess risk is F at the output minus F at the
best point of K.

    g~_t = S~_t / α_t
    z_{t+1} = Π(z_t - (α_t/β) g~_t)
    y_{t+1} = Π(x_t - (1/β) g~_t)
    x_{t+1} = (1 - τ) y_{t+1} + τ z_{t+1},   τ = α_{t+1} / α_{1:t+1}
    output y_{T+1}

| here | paper | shape or unit |
|---|---|---|
| `query_point`, `mirror`, `output` | x_t, z_t, y_t | (..., d) |
| `released` / `scale` | S~_t / α_t, the noisy gradient g~_t | (..., d) |
| `beta` | β, which the optimizer divides by | loss / parameter² |
| `radius` | R: K is the ball of this radius around 0 | parameter |
| `records`, `dimension` | n, each read once, and p | |
| `epsilon`, `delta` | ε, δ | |
| `lipschitz`, `smoothness` | L, M | loss / parameter, loss / parameter² |
| `rounds`, `batch` | T, B | |
| `clip` | C: norm bound on one example's increment | gradient |
| `sigma` | standard deviation of a tree node's noise, for sums of mean increments over a batch | gradient |

Erratum: the z-step is α_t/β, as Algorithm 1 prints it.  The paper's proof halves it.  The paper's log is to
base 2.

Guarantee: `sigma` makes all released prefix sums (ε, δ)-DP for neighbours under `relation`.  An increment is in at
most ⌊log2 T⌋ + 1 tree nodes.  A record changes each of these by at most clip / B under zero-out, and by at most
twice that under replace-one.  `sigma` uses the exact Gaussian conversion and this number of nodes, where the paper
uses a looser conversion and prints log2 T nodes.  `sigma` is for batches of B, not rounded.

The bound on the excess risk (`accelerated_bound`) holds for β > M (T+1)/2.  Proof: docs/proofs/excess-risk.md.
The paper requires β ≥ 2 M T where the minimizer may lie outside K (Theorem 14), and only β ≥ M otherwise (Theorem
3), with the halved z-step.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting.gaussian import check_delta, check_positive, moved_by
from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import LinearWeights, PlainGradient, RecursiveGradient, Round, Weights
from fedpriv.noise.series import Floats
from fedpriv.noise.tree import level_count
from fedpriv.papers.base import (
    Algorithm,
    Bound,
    Condition,
    NoiseSettings,
    Positive,
    Prescription,
    Problem,
    ReleaseNumbers,
    Settings,
    catch_refusal,
    choose_mechanism,
    independent,
    project_to_ball,
)
from fedpriv.papers.sgd import ProjectedSGD, projected_bound


class NesterovState(NamedTuple):
    """Server's vectors between two rounds, (..., d) each."""

    query_point: Tensor
    mirror: Tensor
    output: Tensor


@dataclass(frozen=True)
class NesterovCoupling:
    """Optimizer that couples a gradient step and a weighted mirror step.

    With exact gradients, from the start x_1 = 0 and with α_t = t, F(y_{T+1}) - F* ≤ β R² / (T (T + 1)) for a
    convex F of smoothness M < 2 β / (T + 1) (`accelerated_bound`).  F* is the minimum of F over the ball.

    Attributes:
        beta: β, a number, or one for each replicate.
        radius: R, a number, or one for each replicate.
        weights: Weights α_t and their sums α_{1:t}.
    """

    beta: Scalar
    radius: Scalar
    weights: Weights = field(default_factory=LinearWeights)

    def start(self, initial: Tensor) -> NesterovState:
        return NesterovState(initial, initial, initial)

    def query(self, state: NesterovState) -> Tensor:
        return state.query_point

    def update(self, state: NesterovState, released: Tensor, current: Round) -> NesterovState:
        step = released / (current.scale * self.beta)
        mirror = project_to_ball(state.mirror - self.weights.weight(current.t) * step, self.radius)
        output = project_to_ball(state.query_point - step, self.radius)
        next_round = current.t + 1
        return NesterovState(
            output.lerp(mirror, self.weights.weight(next_round) / self.weights.total(next_round)), mirror, output
        )

    def output(self, state: NesterovState) -> Tensor:
        return state.output


def accelerated_bound(
    errors: Floats, radius: float, smoothness: float, beta: float, *, fresh: bool = False
) -> Bound:
    """Bound the excess risk by (β R²/2 + Σ (2R s_t + (t+1) s_t²/(4 t c_t))) / A_T.

    The sum is over t = 1 … T, with A_T = T (T+1)/2 and c_t = 2β/(t+1) - M.  Released are α_t ∇F(x_t) + e_t, with
    α_t = t and the error e_t.  The excess risk is that of the output y_{T+1} from the start x_1 = 0, compared with
    the minimizer x* in the ball.  F is convex.

    Proof: docs/proofs/excess-risk.md.

    Args:
        errors: Bounds s_t on the root mean square of ‖e_t‖, the error of the sum that round t releases, (T,), with
            T of 1 or more.
        radius: R.
        smoothness: M.
        beta: β.
        fresh: Whether e_t has mean 0 whatever was released before.  Then the term 2R s_t is left out.

    Returns:
        The bound, infinite unless β > M (T+1)/2, and the condition M (T+1)/2 ≤ β.

    Example:
        >>> accelerated_bound(np.zeros(10), radius=1.0, smoothness=1.0, beta=11.0).value
        0.1
    """
    rounds = len(errors)
    t = np.arange(1.0, rounds + 1.0)
    condition = Condition("M (T+1)/2 ≤ β", smoothness * (rounds + 1) / 2.0, beta)
    slack = 2.0 * beta / (t + 1.0) - smoothness
    if not np.all(slack > 0.0):
        return Bound(math.inf, (condition,))
    bias = 0.0 if fresh else 2.0 * radius * float(np.sum(errors))
    squares = float(np.sum((t + 1.0) / (4.0 * t * slack) * errors**2))
    return Bound((beta * radius**2 / 2.0 + bias + squares) / (rounds * (rounds + 1) / 2.0), (condition,))


@dataclass(frozen=True)
class AcceleratedParameters:
    """Parameters that a theorem requires for a problem, in the ball of `radius`.

    The module's table has the symbols and units of the fields.
    """

    problem: Problem
    radius: float
    rounds: float
    """T = n / B, not rounded, and above n if n is too small for the theorem."""
    batch: float
    """B, not rounded, and below 1 if n is too small for the theorem."""
    beta: float
    clip: float
    sigma: float
    printed_sigma: float
    """Noise that the corollary prints.

    Corollary 9 prints clip √(log2 T ln(2.5/δ)) / (ε B), which may be too small (`printed_epsilon`).  Corollary 13
    prints 2√2 times that.
    """
    printed_epsilon: float
    """True ε at δ of noise with `printed_sigma`, by the exact count of nodes.

    The relation is the problem's.
    """
    theorem: str
    """Setting of the theorem, "realizable" or "non-realizable"."""
    corollary: str
    """Name of the corollary that prints the noise."""
    conditions: tuple[Condition, ...]
    """Conditions of the theorem with this problem's numbers.  Some may not hold."""
    assumption: str
    """Condition that no number can show."""

    @property
    def refusal(self) -> str | None:
        """Reason, in one line, why the formula cannot be run for this n, or None if T ≤ n."""
        n = self.problem.records
        if self.rounds <= n:
            return None
        return (
            f"the {self.theorem} theorem asks for {self.rounds:,.0f} rounds of B = {self.batch:.3g} examples, but "
            f"n = {n:,} examples read once make at most that many rounds: B must be 1 or more"
        )

    @property
    def whole_batch(self) -> int:
        """Batch size B, rounded down.

        Raises:
            InputError: The formula cannot be run.
        """
        if self.refusal is not None:
            raise InputError(self.refusal)
        return math.floor(self.batch * (1.0 + 1e-12))  # an integer may be rounded to just below

    @property
    def whole_rounds(self) -> int:
        """Number of whole batches that the examples fill.

        Raises:
            InputError: The formula cannot be run.
        """
        return self.problem.records // self.whole_batch

    def excess_risk(self) -> float:
        """Bound the mean excess risk (`accelerated_bound`) with `sigma`, whole rounds and whole batches.

        The bound is infinite unless β > M (T+1)/2.

        Raises:
            InputError: The formula cannot be run.
        """
        rounds = self.whole_rounds
        # The sum of t rounds adds up as many tree nodes as the binary digits of t have ones.
        stds = self.sigma * np.sqrt(np.array([t.bit_count() for t in range(1, rounds + 1)]))
        released = ReleaseNumbers(self.whole_batch, self.problem.dimension, np.full(rounds, self.clip), stds)
        return accelerated_bound(released.sum_errors, self.radius, self.problem.smoothness, self.beta).value


def realizable_parameters(problem: Problem, radius: float) -> AcceleratedParameters:
    """Return the parameters of the realizable setting.

    T = c n^{1/4}, B = n^{3/4}/c, β = c² (L/R) max{1, √p/(ε√n)} and clip c L, with c from `realizable_factor`.

    Args:
        problem: n, p, ε, δ, L and M.
        radius: R.

    Raises:
        InputError: The theorem cannot be evaluated for the problem.
    """
    n, epsilon = problem.records, _check_epsilon("realizable", problem, radius)
    factor = realizable_factor(n, problem.delta)
    noise_factor = math.sqrt(problem.dimension / n) / epsilon
    beta = factor**2 * problem.lipschitz / radius * max(1.0, noise_factor)
    return _calibrate(
        "realizable",
        problem,
        radius,
        rounds=factor * n**0.25,
        batch=n**0.75 / factor,
        beta=beta,
        clip=factor * problem.lipschitz,
        printed=("Corollary 9", 1.0),
        conditions=(Condition("M ≤ β", problem.smoothness, beta),),
        assumption="the unconstrained minimizer lies in the ball",
    )


def realizable_factor(examples: int, delta: float) -> float:
    """Return c_DP = 4√2 (log2 n)^{3/2} √(ln(2n/δ)) ln(2.5/δ).

    Args:
        examples: n, 2 or more.
        delta: δ, strictly between 0 and 1.

    Example:
        >>> round(realizable_factor(60_000, 1e-5), -2)
        21400.0
    """
    log_factor = math.sqrt(math.log(2 * examples / delta)) * math.log(2.5 / delta)
    return 4.0 * math.sqrt(2.0) * math.pow(math.log2(examples), 1.5) * log_factor


def non_realizable_parameters(problem: Problem, radius: float) -> AcceleratedParameters:
    """Return the parameters of the non-realizable setting, with calibrated noise and conditions.

    B = min{√n, ε n^{3/2}/√p}, T = n/B, β = (16 c + 8) L n^{3/2}/(R B²) and clip (8 c + 4) L, with c = M R / L,
    which the theorem treats as a constant.  The paper's second bound on B also has a polylogarithm that it leaves
    open and a stray factor M, which are left out here.

    Args:
        problem: n, p, ε, δ, L and M.
        radius: R.

    Raises:
        InputError: The theorem cannot be evaluated for the problem.
    """
    n, epsilon = problem.records, _check_epsilon("non-realizable", problem, radius)
    relative = problem.smoothness * radius / problem.lipschitz
    batch = min(math.sqrt(n), epsilon * n**1.5 / math.sqrt(problem.dimension))
    rounds = n / batch
    beta = (16.0 * relative + 8.0) * problem.lipschitz * n**1.5 / (radius * batch**2)
    return _calibrate(
        "non-realizable",
        problem,
        radius,
        rounds=rounds,
        batch=batch,
        beta=beta,
        clip=(8.0 * relative + 4.0) * problem.lipschitz,
        printed=("Corollary 13", 2.0 * math.sqrt(2.0)),
        conditions=(
            Condition("B ≤ √n", batch, math.sqrt(n)),
            Condition("2 M T ≤ β", 2.0 * problem.smoothness * rounds, beta),
        ),
        assumption="M R / L is a constant, it does not grow with n; p is within the bound of Corollary 13, which "
        "is left out here",
    )


def _check_epsilon(theorem: str, problem: Problem, radius: float) -> float:
    """Return ε, after a check of the numbers from which a theorem's parameters follow.

    Raises:
        InputError: A number is missing or out of its range.
    """
    epsilon, n = problem.epsilon, problem.records
    if epsilon is None or not math.isfinite(problem.lipschitz) or not math.isfinite(problem.smoothness):
        raise InputError(
            f'algorithm.parameters = "theorem-{theorem}": the theorem needs an (ε, δ), and a loss with a known '
            "Lipschitz constant and smoothness"
        )
    if n < 2 or problem.dimension < 1:
        raise InputError(
            f"examples = {n}, dimension = {problem.dimension}: the theorem is for 2 examples or more, and 1 "
            "parameter or more"
        )
    numbers = {"epsilon": epsilon, "lipschitz": problem.lipschitz, "smoothness": problem.smoothness}
    for name, value in (numbers | {"radius": radius}).items():
        check_positive(name, value)
    check_delta(problem.delta)
    return epsilon


def _calibrate(
    theorem: str,
    problem: Problem,
    radius: float,
    *,
    rounds: float,
    batch: float,
    beta: float,
    clip: float,
    printed: tuple[str, float],
    conditions: tuple[Condition, ...],
    assumption: str,
) -> AcceleratedParameters:
    """Return a theorem's numbers with calibrated noise, its corollary's noise, and all conditions.

    A record is in at most ⌊log2 T⌋ + 1 nodes of the tree of the released sums, and moves each by at most a clip/B,
    where a is 1 under zero-out and 2 under replace-one.  So it moves all nodes together by at most s = a (clip/B)
    √(⌊log2 T⌋ + 1).  `sigma` is s/μ, for the largest μ whose Gaussian guarantee is (ε, δ)-DP.  The corollary's
    noise is f (clip/B) √(log2 T ln(2.5/δ)) / ε.

    Args:
        theorem: "realizable" or "non-realizable".
        problem: Numbers of the problem, with an ε.
        radius: R.
        rounds: T, not rounded.
        batch: B, not rounded.
        beta: β.
        clip: C.
        printed: Name of the corollary, and its factor f.
        conditions: Conditions of this setting alone.
        assumption: Condition that no number can show.
    """
    n, epsilon, delta = problem.records, problem.epsilon, problem.delta
    assert epsilon is not None  # `_check_epsilon` has refused None
    log = math.log2(max(rounds, 1.0))
    # A power of two may be rounded to less.
    sensitivity = moved_by(problem.relation, 1.0 / batch, clip * math.sqrt(math.floor(log + 1e-12) + 1))
    printed_sigma = printed[1] * clip / batch * math.sqrt(log * math.log(2.5 / delta)) / epsilon
    return AcceleratedParameters(
        problem,
        radius,
        rounds,
        batch,
        beta,
        clip,
        sigma=gdp.noise_for(gdp.mu_of(epsilon, delta), sensitivity),
        printed_sigma=printed_sigma,
        printed_epsilon=gdp.epsilon_of(sensitivity / printed_sigma, delta),
        theorem=theorem,
        corollary=printed[0],
        conditions=(
            Condition("p ≤ ε² n²", problem.dimension, (epsilon * n) * (epsilon * n)),
            Condition("δ ≤ 1/n", delta, 1.0 / n),
            Condition("T B ≤ n", rounds * batch, n),
            Condition("1 ≤ B", 1.0, batch),
            *conditions,
        ),
        assumption=assumption,
    )


_PAPER = "Choquette-Choo, Ganesh & Thakurta, Near-Optimal Rates for O(1)-Smooth DP-SCO (ALT 2025)"


class AcceleratedSettings(NoiseSettings):
    """Parameters of the algorithm, or the theorem that they are taken from."""

    parameters: Literal["explicit", "theorem-realizable", "theorem-non-realizable"] = Field(
        "explicit", description="where clip and beta come from; a theorem also says how many rounds there must be"
    )
    clip: Positive | None = Field(None, description="C: norm bound on one record's increment")
    first_clip: Literal["balanced", "same"] = Field(
        "same", description="round 1 is in one tree node more: 'balanced' clips it tighter, for less noise"
    )
    beta: Positive | None = Field(None, description="β: the steps are α_t/β and 1/β")
    radius: Positive = Field(description="R: radius of the ball the model stays in")

    @model_validator(mode="after")
    def _one_source_of_parameters(self) -> Self:
        """Check that clip and β have one source, and that one key at most changes the clip of round 1."""
        for key in ("clip", "beta"):
            if (getattr(self, key) is None) == (self.parameters == "explicit"):
                raise ValueError(f'{key} is needed with parameters = "explicit", and only there')
        if self.first_clip == "balanced" and self.late_clip != "same":
            raise ValueError('late_clip evens out round 1 as well: leave first_clip = "balanced" out')
        return self

    def clip_and_beta(self, problem: Problem) -> tuple[float, float]:
        """Return the clip C and β, from the scenario or from the theorem that `parameters` names.

        Args:
            problem: Numbers of the run.  With a theorem, its rounds must be those of the theorem.

        Raises:
            InputError: The theorem cannot be evaluated, or cannot be run for this n, or needs another number of
                rounds than the run's.
        """
        if self.parameters == "explicit":
            assert self.clip is not None
            assert self.beta is not None
            return self.clip, self.beta
        numbers = _THEOREMS[self.parameters](problem, self.radius)
        if numbers.whole_rounds != problem.rounds:
            raise InputError(
                f'algorithm.parameters = "{self.parameters}" asks for {numbers.whole_rounds} rounds of '
                f"{numbers.whole_batch} records at n = {problem.records}; the scenario has {problem.rounds} rounds"
            )
        return numbers.clip, numbers.beta


_THEOREMS = {"theorem-realizable": realizable_parameters, "theorem-non-realizable": non_realizable_parameters}


@catch_refusal
def _prescribe(name: str, problem: Problem, radius: float) -> Prescription:
    parameters = _THEOREMS[name](problem, radius)
    risk = parameters.excess_risk() if parameters.refusal is None and radius <= problem.convex_within else math.inf
    numbers = {
        "rounds": parameters.rounds,
        "batch": parameters.batch,
        "clip": parameters.clip,
        "noise std": parameters.sigma,
        f"noise std of {parameters.corollary}": parameters.printed_sigma,
        f"epsilon of {parameters.corollary}": parameters.printed_epsilon,
        "beta": parameters.beta,
        "radius": radius,
        **({"excess risk": risk} if math.isfinite(risk) else {}),
    }
    return Prescription(name, numbers, parameters.conditions, parameters.assumption, parameters.refusal)


def _make_estimator(settings: AcceleratedSettings, problem: Problem) -> RecursiveGradient:
    """Return the estimator of prefix sums, with a smaller clip for round 1 if it is balanced.

    The clip is balanced if `first_clip` is "balanced", the mechanism is the tree, and T is 2 or more.  In the
    tree, round 1 is in h = ⌊log2 T⌋ + 1 released nodes, and every other round in at most h - 1.  The balanced clip
    of round 1 is √((h - 1)/h) times the clip of the others, so that round 1 costs no more than the worst other
    round.
    """
    clip, _ = settings.clip_and_beta(problem)
    level_total = level_count(problem.rounds)
    balanced = settings.first_clip == "balanced" and settings.mechanism == "tree" and level_total > 1
    return RecursiveGradient(
        clip=clip, first_clip=(math.sqrt((level_total - 1) / level_total) if balanced else 1.0) * clip
    )


ACCELERATED_DP_SRGD = Algorithm(
    name="accelerated-dp-srgd",
    title="Accelerated-DP-SRGD",
    source=f"{_PAPER}, Algorithm 1",
    settings=AcceleratedSettings,
    # Δ_t = t ∇f(x_t) - (t-1) ∇f(x_{t-1}), summed: S_t = S_{t-1} + Δ_t
    estimator=_make_estimator,
    # the binary tree on every S_t
    mechanism=choose_mechanism,
    # z, y and x: Nesterov's three sequences
    optimizer=lambda settings, problem, _noise_std: NesterovCoupling(
        settings.clip_and_beta(problem)[1], settings.radius
    ),
    theorems=lambda settings, problem: tuple(_prescribe(name, problem, settings.radius) for name in _THEOREMS),
    excess_risk=lambda settings, problem, released: accelerated_bound(
        released.sum_errors, settings.radius, problem.smoothness, settings.clip_and_beta(problem)[1]
    ),
    published="points",
)


class UnacceleratedSettings(AcceleratedSettings):
    """Parameters without acceleration, for which the paper has no theorem."""

    parameters: Literal["explicit"] = Field("explicit", description="clip and beta are given")
    output: Literal["last", "average"] = Field("last", description="which iterate is published")


def _unaccelerated_bound(
    settings: UnacceleratedSettings, problem: Problem, released: ReleaseNumbers
) -> Bound | None:
    """Bound the excess risk of the average of the iterates, or return None for the last iterate.

    Release t estimates t ∇F(x_t), and the optimizer divides it by t, and with it its error.
    """
    if settings.output != "average":
        return None
    return projected_bound(
        released.sum_errors / np.arange(1.0, problem.rounds + 1.0),
        settings.radius,
        problem.smoothness,
        1.0 / settings.clip_and_beta(problem)[1],
    )


UNACCELERATED_DP_SRGD = Algorithm(
    name="unaccelerated-dp-srgd",
    title="DP-SRGD without acceleration",
    source=f"{_PAPER}, section 4.3",
    settings=UnacceleratedSettings,
    estimator=_make_estimator,
    mechanism=choose_mechanism,
    # x_{t+1} = Π(x_t - S~_t / (t β))
    optimizer=lambda settings, problem, _noise_std: ProjectedSGD(
        step=1.0 / settings.clip_and_beta(problem)[1],
        radius=settings.radius,
        averaged=settings.output == "average",
    ),
    excess_risk=_unaccelerated_bound,
    published="points",
)


class IndependentSettings(Settings):
    """Parameters of the accelerated steps on independently released gradients."""

    clip: Positive = Field(description="C: norm bound on one record's gradient, before the weight α_t")
    beta: Positive = Field(description="β: the steps are α_t/β and 1/β")
    radius: Positive = Field(description="R: radius of the ball the model stays in")


ACCELERATED_INDEPENDENT = Algorithm(
    name="accelerated-independent",
    title="Accelerated SGD on independent gradients",
    source=f"{_PAPER}, section 5.5",
    settings=IndependentSettings,
    # ∇_t alone is released, and the optimizer weights it by α_t, so that the noise grows with the weight
    estimator=lambda settings, _problem: PlainGradient(settings.clip),
    mechanism=independent,
    optimizer=lambda settings, _problem, _noise_std: NesterovCoupling(settings.beta, settings.radius),
    # the error of t g_t is t times that of g_t, and of mean 0 whatever was released before
    excess_risk=lambda settings, problem, released: accelerated_bound(
        released.gradient_errors * np.arange(1.0, problem.rounds + 1.0),
        settings.radius,
        problem.smoothness,
        settings.beta,
        fresh=True,
    ),
)
