"""A condition of a theorem, with the numbers it was checked with.

What a theorem asks for at a scenario's numbers, to be held beside what the scenario uses.

What the mean excess risk of a run cannot exceed, at the run's own numbers.

Derived here, in the way of the papers' proofs, with every constant: a theorem says what happens at its own
parameters, these say it at anyone's.  F is the mean of convex losses of smoothness M, x* its best point in the
ball K of radius R around the start, every record is read once, e_t is what is released in round t minus what F
itself would have released, and s_t its root mean square norm.

**Three sequences** (`NesterovCoupling`, α_t = t, A_t = t(t+1)/2, released α_t ∇F(x_t) + e_t).  With
c_t = 2β/(t+1) - M > 0 the step to y_{t+1} pays for the one to z_{t+1}, since y_{t+1} is the best point of K for
⟨g, y⟩ + β/2 ‖y - x_t‖², no worse than x_t + τ_t (z_{t+1} - z_t):

    A_t F(y_{t+1}) ≤ A_{t-1} F(y_t) + α_t F(x*) + β/2 (‖z_t - x*‖² - ‖z_{t+1} - x*‖²)
                     + ⟨e_t, x* - z_t⟩ + (t+1)/(4 t c_t) ‖e_t‖²

c_t > 0 in all rounds is β > M (T+1)/2; Choquette-Choo et al. ask for β ≥ 2 M T where the minimizer may lie outside
(Theorem 15).  In the other setting (Theorem 3) they take a smaller β, and their proof halves the z-step: for the
step that Algorithm 1 prints and such a β no bound is known, and none is given here.

**Projected SGD** (released ∇F(x_t) + e_t, mean of x_2 … x_{T+1}, step η ≤ 1/M):

    F(x_{t+1}) - F(x*) ≤ (‖x_t - x*‖² - ‖x_{t+1} - x*‖²)/(2η) - ⟨e_t, x_{t+1} - x*⟩ - (1/η - M)/2 ‖x_{t+1} - x_t‖²

**Phased SGD** (Feldman, Koren & Talwar 2020): with w̄_0 = x*, ξ_0 = w_0 - x*, ξ_i the noise after phase i,

    F(w_k) - F(x*) ≤ Σ_i (‖ξ_{i-1}‖²/(2 η_i n_i) + η_i L²/2) + L ‖ξ_k‖

The noisy minibatch method's noise and batch size, as its authors' programs compute them.

Source: Lowy & Razaviyayn 2023, "Private Federated Learning Without a Trusted Server: Optimal Algorithms for
Convex Losses"; the formulas are those of the authors' published programs (`gauss_AC` and the choice of K), once
by advanced composition, as the theorem has it, and once by the moments accountant, as the experiments use it.

In each of R rounds every silo draws K of its n records and adds N(0, σ² I) to the mean of their gradients.
The sampling is uniform with replacement and neighbours are replace-one.

This project does not account for that sampling: its own runs of the method are calibrated by
`fedpriv.accounting` for what they really do, and these numbers are shown beside them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.gaussian import check_delta, check_positive
from fedpriv.core.errors import InputError


class Condition(NamedTuple):
    """`text` as the paper writes it, `left` and `right` the two numbers of `left ≤ right`."""

    text: str
    left: float
    right: float

    @property
    def holds(self) -> bool:
        """Up to rounding, as equality is what many parameter choices aim at."""
        return self.left <= self.right * (1.0 + 1e-12)


def failing(conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """Those that do not hold, in their order."""
    return tuple(condition for condition in conditions if not condition.holds)


class Prescription(NamedTuple):
    """The numbers of one theorem; none where it cannot be evaluated, and then `refusal` says why."""

    theorem: str
    numbers: Mapping[str, float]
    """By the names that runs use: rounds, batch, clip, noise std, and the fields of the optimizer."""
    conditions: tuple[Condition, ...] = ()
    assumption: str = ""
    """What no number can show."""
    refusal: str | None = None
    """Why a scenario cannot run with these numbers, on one line; None if it can."""


Floats = NDArray[np.float64]

_UNCLIPPED = "records are independent, and no increment is longer than its clip; over the best point of the ball"


class Released(NamedTuple):
    """The public numbers of what a run releases."""

    batch: int
    """B: records of all silos in a round."""
    dimension: int
    clips: Floats
    """Norm bounds on one record's increment, (T,)."""
    stds: Floats
    """Of the noise in what is released, per coordinate, in the mean over silos, (T,)."""

    @property
    def of_sums(self) -> Floats:
        """s_t of running sums with decay 1: the sampling of all rounds so far, and the noise of this one; (T,)."""
        return np.asarray(np.sqrt(np.cumsum(self.clips**2) / self.batch + self.dimension * self.stds**2))

    @property
    def of_gradients(self) -> Floats:
        """s_t of what is released of one round's records alone; (T,)."""
        return np.asarray(np.sqrt(self.clips**2 / self.batch + self.dimension * self.stds**2))


class Bound(NamedTuple):
    """`value` bounds the mean excess risk if the conditions hold; infinite where they leave nothing to say."""

    value: float
    conditions: tuple[Condition, ...]
    assumption: str = _UNCLIPPED


def accelerated(errors: Floats, radius: float, smoothness: float, beta: float, *, fresh: bool = False) -> Bound:
    """(β R²/2 + Σ (2R s_t + (t+1) s_t²/(4 t c_t))) / A_T; `errors` are the s_t, (T,).

    `fresh` says that e_t has mean 0 whatever was released before: then nothing is lost on ⟨e_t, x* - z_t⟩.
    """
    rounds = len(errors)
    t = np.arange(1.0, rounds + 1.0)
    condition = Condition("M (T+1)/2 ≤ β", smoothness * (rounds + 1) / 2.0, beta)
    slack = 2.0 * beta / (t + 1.0) - smoothness
    if not np.all(slack > 0.0):
        return Bound(math.inf, (condition,))
    turned = 0.0 if fresh else 2.0 * radius * float(np.sum(errors))
    squares = float(np.sum((t + 1.0) / (4.0 * t * slack) * errors**2))
    total = rounds * (rounds + 1) / 2.0
    return Bound((beta * radius**2 / 2.0 + turned + squares) / total, (condition,))


def projected(errors: Floats, radius: float, smoothness: float, step: float, *, fresh: bool = False) -> Bound:
    """R²/(2ηT) + 2R mean(s_t), or R²/(2ηT) + mean(s_t²)/(2(1/η - M)) if `fresh`; of the mean of the iterates."""
    condition = Condition("M ≤ 1/η", smoothness, 1.0 / step)
    slack = 1.0 / step - smoothness
    if slack < 0.0 or (fresh and slack <= 0.0):
        return Bound(math.inf, (condition,))
    start = radius**2 / (2.0 * step * len(errors))
    if fresh:
        return Bound(start + float(np.mean(errors**2)) / (2.0 * slack), (condition,))
    return Bound(start + 2.0 * radius * float(np.mean(errors)), (condition,))


def phased(
    lengths: Sequence[int], steps: Sequence[float], noises: Sequence[float], radius: float, lipschitz: float
) -> Bound:
    """Of rounds n_i, steps η_i and root mean square noises ‖ξ_i‖ of the phases i = 1 … k; L is `lipschitz`."""
    before = [radius, *noises[:-1]]
    value = lipschitz * noises[-1] + sum(
        off**2 / (2.0 * step * length) + step * lipschitz**2 / 2.0
        for length, step, off in zip(lengths, steps, before, strict=True)
    )
    return Bound(value, (), "records are independent; over the best point of the ball")


@dataclass(frozen=True)
class NoisyMinibatch:
    """R rounds with batch K and noise of standard deviation `sigma` in each silo's mean gradient."""

    rounds: int
    batch: int
    sigma: float
    conditions: tuple[Condition, ...]


def by_moments(examples: int, rounds: int, epsilon: float, delta: float, lipschitz: float) -> NoisyMinibatch:
    """σ² = 8 L² R ln(1/δ)/(n² ε²), K = max(1, n √(ε/(4R))), for ε ≤ 2 ln(1/δ); n records in a silo."""
    _check(examples, rounds, epsilon, delta, lipschitz)
    log_term = math.log(1.0 / delta)
    sigma = lipschitz * math.sqrt(8.0 * rounds * log_term) / (examples * epsilon)
    smallest = examples * math.sqrt(epsilon / (4.0 * rounds))
    return _setting(examples, rounds, sigma, smallest, Condition("ε ≤ 2 ln(1/δ)", epsilon, 2.0 * log_term))


def by_advanced_composition(
    examples: int, rounds: int, epsilon: float, delta: float, lipschitz: float
) -> NoisyMinibatch:
    """σ² = 256 L² R ln(2.5RK/(δn)) ln(2/δ)/(n² ε²), K = max(1, nε/(4√(2R ln(2/δ)))), for ε ≤ 2 ln(2/δ)."""
    _check(examples, rounds, epsilon, delta, lipschitz)
    log_term = math.log(2.0 / delta)
    smallest = examples * epsilon / (4.0 * math.sqrt(2.0 * rounds * log_term))
    batch = _whole(smallest)
    composed = math.log(2.5 * rounds * batch / (delta * examples))
    if composed <= 0.0:
        raise InputError(f"delta = {delta}: advanced composition needs delta below 2.5 R K / n")
    sigma = 16.0 * lipschitz * math.sqrt(rounds * composed * log_term) / (examples * epsilon)
    return _setting(examples, rounds, sigma, smallest, Condition("ε ≤ 2 ln(2/δ)", epsilon, 2.0 * log_term))


def _check(examples: int, rounds: int, epsilon: float, delta: float, lipschitz: float) -> None:
    if min(examples, rounds) < 1:
        raise InputError(f"examples = {examples}, rounds = {rounds}: 1 or more of both")
    check_positive("epsilon", epsilon)
    check_delta(delta)
    check_positive("lipschitz", lipschitz)


def _whole(smallest: float) -> int:
    """As the authors' programs round: down, and 1 at least."""
    return max(1, int(smallest))


def _setting(examples: int, rounds: int, sigma: float, smallest: float, small: Condition) -> NoisyMinibatch:
    batch = _whole(smallest)
    return NoisyMinibatch(rounds, batch, sigma, (small, Condition("K ≤ n", batch, examples)))
