"""Theorems and bounds of Kornowski, Liu & Talwar; `kornowski` has the algorithms.

Constants of the smoothing, windows, errors of the oracle, the explicit bound, and the choice of all parameters of
a run with the bound that goes with it: Theorems 3.1 and 6.1 (single pass) and 4.1 (multi pass), corrected where
docs/goldstein.md says so.  Logarithms of the printed O~ are left out, and the Gaussian-DP parameter μ stands where
the paper has ε.

| here | paper | unit |
|---|---|---|
| `lipschitz` | L: of every record's loss | loss / length |
| `gap` | Φ ≥ F(x_0) - inf F | loss |
| `smoothing` | α: radius of the random smoothing; the result is about radius 2α | length |
| `radius` | D: the largest step | length |
| `step` | η | length² / loss |
| `window`, `windows` | M, K = ⌊T/M⌋ | rounds |
| `period` | Σ: rounds from anchor to anchor | rounds |
| `anchor_batch`, `batch` | B1, B2: records of all silos in a round | |
| `error`, `norm` | G0, G1: rms error and rms norm of the oracle | loss / length |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fedpriv.noise.tree import level_count

Order = Literal["exact", "first", "zeroth"]
"""What the oracle sees of a record: its smoothed gradient, gradients at random points, or values there."""

ROUNDING = 1e-9


def smoothness_constant(dimension: int) -> float:
    """κ_d: an L-Lipschitz loss smoothed over a ball of radius α is exactly (κ_d L/α)-smooth; κ_d ≤ √d."""
    half = dimension / 2.0
    return 2.0 * math.exp(math.lgamma(half + 1.0) - math.lgamma(half + 0.5)) / math.sqrt(math.pi)


def direction_energy(dimension: int) -> float:
    """c_d: the one-direction zeroth-order estimate of an L-Lipschitz loss has mean square at most c_d L²."""
    return 1.0 if dimension == 1 else dimension**2 / (dimension - 1.0)


def paper_window(radius: float, smoothing: float) -> int:
    """⌊α / (4 D)⌋, at least 1."""
    return max(1, _floor(smoothing / (4.0 * radius)))


def max_window(radius: float, smoothing: float) -> int:
    """The largest W with ((W + 1)/2 - 1/W) D ≤ α: all the queries of a window are within α of their mean."""
    middle = 2.0 * smoothing / radius - 1.0
    return max(1, _floor((middle + math.sqrt(middle**2 + 8.0)) / 2.0))


@dataclass(frozen=True)
class NonsmoothProblem:
    """The public numbers of a problem with L-Lipschitz losses, and how its oracle looks at a record."""

    dimension: int
    lipschitz: float
    gap: float
    smoothing: float
    order: Order = "exact"
    direction_count: int = 1
    """J: random directions a record and query."""
    shares_directions: bool = True
    """Whether a difference looks at both of its queries along the same directions."""

    @property
    def smoothness(self) -> float:
        """κ_d L / α: of the smoothed loss."""
        return smoothness_constant(self.dimension) * self.lipschitz / self.smoothing

    def difference_clip(self, radius: float) -> float:
        """L · min(2, 2 κ_d D / α): bounds a difference of smoothed gradients, as queries move by 2D at most."""
        return min(2.0 * self.lipschitz, 2.0 * self.smoothness * radius)

    def anchor_energy(self) -> float:
        """A bound on the mean square of one record's estimate at an anchor."""
        spread = direction_energy(self.dimension) / self.direction_count if self.order == "zeroth" else 0.0
        return self.lipschitz**2 * (1.0 + spread)

    def difference_energy(self, radius: float) -> float:
        """A bound on the mean square of one record's estimated difference of gradients."""
        return 4.0 * (self.smoothness * radius) ** 2 + self.direction_energy_of_differences(radius)

    def direction_energy_of_differences(self, radius: float) -> float:
        """Share of the random directions in `difference_energy`.

        Shared directions of first order have the sure bound (2L)²: both gradients may turn at every direction.
        """
        if self.order == "exact":
            return 0.0
        if self.order == "first":
            return (4.0 if self.shares_directions else 2.0) * self.lipschitz**2 / self.direction_count
        energy = direction_energy(self.dimension)
        if self.shares_directions:
            moved = (2.0 * self.dimension * radius / self.smoothing) ** 2
            return self.lipschitz**2 * min(moved, 4.0 * energy) / self.direction_count
        return 2.0 * energy * self.lipschitz**2 / self.direction_count


def max_nodes(period: int) -> int:
    """In how many nodes of a period's tree a release can be at most."""
    return level_count(period + 1) - 1


def single_pass_error(
    problem: NonsmoothProblem, radius: float, period: int, anchor_batch: int, batch: int, std: float
) -> float:
    """G0 of the single-pass oracle without clipping; `std` is that of the noisiest release in the mean."""
    return math.sqrt(
        problem.anchor_energy() / anchor_batch
        + (period - 1) * problem.difference_energy(radius) / batch
        + problem.dimension * std**2
    )


def multi_pass_error(
    problem: NonsmoothProblem,
    period: int,
    records: int,
    anchor_std: float,
    difference_std: float,
    radius: float = math.inf,
) -> float:
    """G0 of the multi-pass oracle without clipping; the noises are those of the leaves in the mean.

    All records are read in every round, so that only directions and noise err: at the anchor once, in every
    difference as in a single pass.  `radius` is the largest step, infinite where it is not known.
    """
    at_anchor = 0.0
    if problem.order == "first":
        at_anchor = problem.lipschitz**2
    elif problem.order == "zeroth":
        at_anchor = problem.lipschitz**2 * direction_energy(problem.dimension) / problem.direction_count
    directions = at_anchor + (period - 1) * problem.direction_energy_of_differences(radius)
    return math.sqrt(directions / records + problem.dimension * (anchor_std**2 + (period - 1) * difference_std**2))


def leaf_noise_ratio(anchor_clip: float, clip: float, rounds: int, period: int) -> float:
    """σ1/σ2 that minimizes σ1² + (Σ - 1) σ2² at a given price n_a C1²/σ1² + n_d C2²/σ2²; 1 if all are anchors."""
    anchors = -(-rounds // period)
    differences = rounds - anchors
    return (
        1.0
        if differences == 0
        else math.sqrt(anchor_clip / clip * math.sqrt(anchors * (period - 1) / differences))
    )


def explicit_bound(
    problem: NonsmoothProblem, radius: float, window: int, windows: int, norm: float, error: float
) -> float:
    """(Φ + L α)/(D K W) + 2.5 G1/√W + 2 G0: Proposition 2.6 with its constants repaired; inf without a window."""
    if windows == 0:
        return math.inf
    start = (problem.gap + problem.lipschitz * problem.smoothing) / (radius * windows * window)
    return start + 2.5 * norm / math.sqrt(window) + 2.0 * error


def _floor(value: float) -> int:
    return math.floor(value + ROUNDING)


@dataclass(frozen=True)
class GoldsteinParameters:
    """Everything a run needs, and what the theory then says about its output.

    Noise is in units of the mean over the records of a round, for replace-one neighbours, a trusted server and
    increments clipped to `anchor_clip` and `clip`.
    """

    rounds: int
    radius: float
    window: int
    period: int
    anchor_batch: int
    batch: int
    anchor_clip: float
    clip: float
    anchor_std: float
    """Single pass: of every tree node; multi pass: of an anchor's own noise."""
    difference_std: float
    """Single pass: of every tree node; multi pass: of a difference's own noise."""
    error: float
    norm: float
    step: float
    bound: float
    """On the expected Goldstein measure at radius 2α of the output, without clipping bias."""

    @property
    def windows(self) -> int:
        return self.rounds // self.window

    @property
    def anchors(self) -> int:
        return -(-self.rounds // self.period)

    @property
    def records(self) -> int:
        """Number of records that a single pass reads."""
        return self.anchor_batch * self.anchors + self.batch * (self.rounds - self.anchors)


def printed_directions(problem: NonsmoothProblem, asked: "GoldsteinParameters", delta: float) -> float:
    """J of Theorem 3.1, 6.1 or 4.1 at its own parameters, with 1 for the constant that the paper leaves open.

    A single pass takes them for privacy, all records for utility; a clip needs neither.
    """
    d, moved = problem.dimension, (problem.smoothing / asked.radius) ** 2
    if asked.anchor_batch == asked.batch:
        energy = problem.lipschitz**2 * d / asked.batch
        return energy * (asked.period / asked.anchor_std**2 + 1.0 / asked.difference_std**2)
    if problem.order == "first":
        return max(1.0, math.log(d * asked.batch / delta) * asked.batch**2 * moved / d)
    logarithm = math.log(d * (asked.anchor_batch + asked.batch) / delta)
    return logarithm * ((d * asked.anchor_batch) ** 2 + d * asked.batch**2 * moved)


def needed_directions(problem: NonsmoothProblem, radius: float, failure: float) -> float:
    """J for which a replaced record's estimates are as near their means as a theorem's sensitivity asks.

    Neighbours see the other records along the same directions: no batch size and no ln d.
    """
    moved = (problem.smoothing / radius) ** 2
    first = max(1.0, moved / problem.dimension)
    return math.log(1.0 / failure) * (first if problem.order == "first" else problem.dimension + moved)


def plan_single_pass(
    problem: NonsmoothProblem, records: int, mu: float, radius_factor: float = 1.0, period_factor: float = 1.0
) -> GoldsteinParameters:
    """Theorems 3.1 and 6.1: one pass over `records`; mu = inf stands for no privacy."""
    dimension, lipschitz, gap, smoothing = problem.dimension, problem.lipschitz, problem.gap, problem.smoothing
    rounds = records // 2
    drop = gap / (lipschitz * rounds)
    candidates = [(drop**2 * smoothing) ** (1 / 3), (drop**2 * smoothing / math.sqrt(dimension)) ** (1 / 3)]
    if math.isfinite(mu):
        candidates.append(math.sqrt(drop * smoothing * mu / dimension))
        candidates.append((drop**3 * smoothing**2 * mu / dimension**1.5) ** 0.2)
    radius = min(radius_factor * min(candidates), smoothing / 4.0)
    private = (smoothing / (mu * radius)) ** (2 / 3)
    ideal = period_factor * (private + smoothing / (radius * math.sqrt(dimension)))
    period = _clamp(_nearest(ideal), 1, rounds)
    while (excess := (period - 1) * -(-rounds // period) + rounds - records) > 0:
        rounds -= min(excess, (rounds - 1) % period) or 1  # differences first, then the anchor behind them
    anchor_clip, clip = lipschitz, problem.difference_clip(radius)
    heights = level_count(period), level_count(period) - 1
    node_std = 2.0 * max(anchor_clip / period * math.sqrt(heights[0]), clip * math.sqrt(heights[1])) / mu
    worst_std = node_std * math.sqrt(max_nodes(period))
    error = single_pass_error(problem, radius, period, period, 1, worst_std)
    return _make_parameters(
        problem, rounds, radius, period, (period, 1), (anchor_clip, clip), (node_std, node_std), error
    )


def plan_multi_pass(
    problem: NonsmoothProblem, records: int, target: float, mu: float, rounds_factor: float = 8.0
) -> GoldsteinParameters:
    """Theorem 4.1 with D and T repaired: all of `records` in every round, `target` is β."""
    lipschitz, smoothing = problem.lipschitz, problem.smoothing
    radius = min(smoothing * target**2 / (4.0 * lipschitz**2), smoothing / 4.0)
    rounds = math.ceil(rounds_factor * problem.gap * lipschitz**2 / (smoothing * target**3) - ROUNDING)
    period = _clamp(_nearest(smoothing / (radius * math.sqrt(problem.dimension))), 1, rounds)
    rounds = max(rounds, paper_window(radius, smoothing))
    anchor_clip, clip = lipschitz, problem.difference_clip(radius)
    anchors = -(-rounds // period)
    ratio = leaf_noise_ratio(anchor_clip, clip, rounds, period)
    price = anchors * anchor_clip**2 / ratio**2 + (rounds - anchors) * clip**2
    difference_std = 2.0 * math.sqrt(price) / (records * mu)
    stds = ratio * difference_std, difference_std
    error = multi_pass_error(problem, period, records, *stds, radius)
    return _make_parameters(problem, rounds, radius, period, (records, records), (anchor_clip, clip), stds, error)


def printed_samples(problem: NonsmoothProblem, target: float, epsilon: float) -> dict[str, float]:
    """Table 1: how many records each result asks for, without the constants and logarithms of its Ω~.

    For a Goldstein measure of at most `target` at radius 2 · `smoothing`; the multi-pass result is about the
    records at hand, and the last line adds what Section 5 asks for the population.
    """
    d, lipschitz, gap, smoothing = problem.dimension, problem.lipschitz, problem.gap, problem.smoothing
    drift, noise = (
        gap * lipschitz**2 / (smoothing * target**3),
        gap * lipschitz / (epsilon * smoothing * target**2),
    )
    multi = math.sqrt(gap / smoothing) * lipschitz * d**0.75 / (epsilon * target**1.5)
    return {
        "Zhang, Tran & Cutkosky 2024": d * drift + d**1.5 * noise,
        "Theorem 3.1, single pass": math.sqrt(d) * drift + d * noise,
        "Theorem 4.1, multi pass": multi,
        "the same for the population": multi + d * (lipschitz / target) ** 2,
    }


def certified_samples(problem: NonsmoothProblem, target: float, mu: float) -> dict[str, float]:
    """How many records the explicit bounds need for the same, with every constant; inf beyond 10^18.

    Multi pass takes the best of 12 values of its own β, since the bound at β is above β.
    """
    nominal = [target * 0.7**power for power in range(12)]
    return {
        "explicit bound, single pass": _find_min_records(lambda n: plan_single_pass(problem, n, mu).bound, target),
        "explicit bound, multi pass": _find_min_records(
            lambda n: min(plan_multi_pass(problem, n, beta, mu).bound for beta in nominal), target
        ),
    }


def _find_min_records(bound: Callable[[int], float], target: float) -> float:
    """About the smallest n, to a hundredth, from which on the bound is at most the target."""
    high = 4
    while bound(high) > target:
        high *= 2
        if high > 10**18:
            return math.inf
    low = high // 2
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if bound(middle) > target else (low, middle)
    return float(high)


def _make_parameters(
    problem: NonsmoothProblem,
    rounds: int,
    radius: float,
    period: int,
    batches: tuple[int, int],
    clips: tuple[float, float],
    stds: tuple[float, float],
    error: float,
) -> GoldsteinParameters:
    window, norm = paper_window(radius, problem.smoothing), problem.lipschitz + error
    return GoldsteinParameters(
        rounds,
        radius,
        window,
        period,
        *batches,
        *clips,
        *stds,
        error,
        norm,
        step=radius / (norm * math.sqrt(window)),
        bound=explicit_bound(problem, radius, window, rounds // window, norm, error),
    )


def _nearest(value: float) -> int:
    return math.floor(value + 0.5)


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
