"""Kornowski, Liu & Talwar's choice of all parameters of a run, with the bound that goes with it.

Source: Theorems 3.1 and 6.1 (single pass) and 4.1 (multi pass); corrected where docs/goldstein.md says so.  Names
are those of `theory.goldstein`, which has the parts.
"""

import math
from dataclasses import dataclass

from fedpriv.mechanisms.sensitivity.nodes import levels
from fedpriv.theory.goldstein import (
    ROUNDING,
    Nonsmooth,
    explicit_bound,
    leaf_noise_ratio,
    most_nodes,
    multi_pass_error,
    paper_window,
    single_pass_error,
)


@dataclass(frozen=True)
class Parameters:
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
        """How many records a single pass reads."""
        return self.anchor_batch * self.anchors + self.batch * (self.rounds - self.anchors)


def plan_single(
    problem: Nonsmooth, records: int, mu: float, radius_factor: float = 1.0, period_factor: float = 1.0
) -> Parameters:
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
    while period * -(-rounds // period) + rounds - -(-rounds // period) > records:
        rounds -= 1
    anchor_clip, clip = lipschitz, problem.difference_clip(radius)
    heights = levels(period), levels(period) - 1
    node_std = 2.0 * max(anchor_clip / period * math.sqrt(heights[0]), clip * math.sqrt(heights[1])) / mu
    worst_std = node_std * math.sqrt(most_nodes(period))
    error = single_pass_error(problem, radius, period, period, 1, worst_std)
    return _finished(
        problem, rounds, radius, period, (period, 1), (anchor_clip, clip), (node_std, node_std), error
    )


def plan_multi(
    problem: Nonsmooth, records: int, target: float, mu: float, rounds_factor: float = 8.0
) -> Parameters:
    """Theorem 4.1 with D and T repaired: all of `records` in every round, `target` is β."""
    lipschitz, smoothing = problem.lipschitz, problem.smoothing
    radius = min(smoothing * target**2 / (4.0 * lipschitz**2), smoothing / 4.0)
    rounds = _ceiling(rounds_factor * problem.gap * lipschitz**2 / (smoothing * target**3))
    period = _clamp(_nearest(smoothing / (radius * math.sqrt(problem.dimension))), 1, rounds)
    rounds = max(rounds, paper_window(radius, smoothing))
    anchor_clip, clip = lipschitz, problem.difference_clip(radius)
    anchors = -(-rounds // period)
    ratio = leaf_noise_ratio(anchor_clip, clip, rounds, period)
    price = anchors * anchor_clip**2 / ratio**2 + (rounds - anchors) * clip**2
    difference_std = 2.0 * math.sqrt(price) / (records * mu)
    stds = ratio * difference_std, difference_std
    error = multi_pass_error(problem, period, records, *stds, radius)
    return _finished(problem, rounds, radius, period, (records, records), (anchor_clip, clip), stds, error)


@dataclass(frozen=True)
class Certified:
    """Windows and rounds that make the explicit bound at most β, if the oracle's error is at most `error`."""

    radius: float
    window: int
    windows: int
    error: float

    @property
    def rounds(self) -> int:
        return self.window * self.windows


def certified(problem: Nonsmooth, target: float) -> Certified:
    """Each of the three terms of the explicit bound is at most β/3; ours, the paper has no such recipe."""
    error = target / 6.0
    window = _ceiling((7.5 * (problem.lipschitz + error) / target) ** 2)
    radius = problem.smoothing / window
    start = problem.gap + problem.lipschitz * problem.smoothing
    return Certified(radius, window, _ceiling(3.0 * start / (radius * window * target)), error)


def _finished(
    problem: Nonsmooth,
    rounds: int,
    radius: float,
    period: int,
    batches: tuple[int, int],
    clips: tuple[float, float],
    stds: tuple[float, float],
    error: float,
) -> Parameters:
    window, norm = paper_window(radius, problem.smoothing), problem.lipschitz + error
    return Parameters(
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


def _ceiling(value: float) -> int:
    return math.ceil(value - ROUNDING)


def _nearest(value: float) -> int:
    return math.floor(value + 0.5)


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
