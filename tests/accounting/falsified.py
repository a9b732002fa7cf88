"""Hockey sticks of allocation under noise that fades, by weighted samples of the true pair, however small δ is.

Patterns π, equally likely, move releases of independent standard normals by m_π; S is the likelihood ratio to
none of them, S' that of -m_π.  `sticks` estimates E (S - γ)+ ("removed"), E (1 - γS)+ ("added") and E (S - γS')+
("replaced") without bias from draws of laws that lie where these gains are.
"""

import math
from typing import Literal

import numpy as np

from fedpriv.accounting.curves import Floats
from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.participation.secret import RandomAllocation
from tests.accounting.builders import log_mean

Gain = Literal["removed", "added", "replaced"]


def matrix_of(mechanism: BufferedToeplitz, rounds: int) -> Floats:
    """C, (T, T), from its first column."""
    series = mechanism.strategy_series(rounds)
    lag = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    return np.asarray(np.where(lag >= 0, series[np.maximum(lag, 0)], 0.0))


def moves_of(matrix: Floats, clips: Floats, order: RandomAllocation, group: int, sigma: float) -> Floats:
    """What a record of `group` moves releases by, over σ, for everything that it may draw: (patterns, T)."""
    found = np.zeros((1, order.rounds))
    for start in range(0, order.rounds, order.rounds_per_epoch):
        held = range(start + group, start + order.rounds_per_epoch, order.groups)
        own = np.array([matrix[:, t] * clips[t] if t < order.rounds else np.zeros(order.rounds) for t in held])
        found = (found[:, None] + own[None] / sigma).reshape(-1, order.rounds)
    return np.asarray(found)


def log_ratio(moves: Floats, at: Floats, sign: float = 1.0) -> Floats:
    """ln S of releases, (n,)."""
    exponents = sign * at @ moves.T - 0.5 * np.sum(moves**2, axis=1)
    return log_mean(exponents)


def sticks(moves: Floats, epsilons: Floats, gain: Gain, draws: int, seed: int) -> tuple[Floats, Floats]:
    """The hockey sticks at all `epsilons`, and their standard errors."""
    draw = np.random.default_rng(seed)
    centres = _below(moves, epsilons) if gain == "added" else moves
    scales = np.ones(1) if gain == "added" else _tilts(moves, epsilons, gain)
    at = draw.standard_normal((draws, moves.shape[1]))
    at += scales[draw.integers(len(scales), size=draws), None] * centres[draw.integers(len(centres), size=draws)]
    squares = np.sum(centres**2, axis=1)
    products = at @ centres.T
    logs = log_mean(np.array([log_mean(scale * products - 0.5 * scale**2 * squares) for scale in scales]).T)
    first = log_ratio(moves, at)
    if gain == "added":
        first, other = np.zeros(draws), first
    else:
        other = log_ratio(moves, at, -1.0) if gain == "replaced" else np.zeros(draws)
    gains = -np.expm1(np.minimum(0.0, epsilons[:, None] + other - first)) * np.exp(first - logs)
    return gains.mean(axis=1), gains.std(axis=1) / math.sqrt(draws)


def _tilts(moves: Floats, epsilons: Floats, gain: Gain) -> Floats:
    """By how much of their moves releases are shifted, so that gains at `epsilons` are met: 1 and more."""
    square = float(np.median(np.sum(moves**2, axis=1)))
    of_one = 0.5 + (epsilons + math.log(len(moves))) / square
    farther = of_one if gain == "removed" else epsilons / (2.0 * square)
    return np.unique(np.clip(np.append(farther, 1.0), 0.5, 1.0 + 10.0 / math.sqrt(square)).round(2))


def _below(moves: Floats, epsilons: Floats) -> Floats:
    """About the most likely releases at which ln S is -ε, of every ε; shape (n, T)."""
    at, weight, found = np.zeros(moves.shape[1]), 0.0, []
    halves = 0.5 * np.sum(moves**2, axis=1)
    for epsilon in sorted(epsilons):
        for _ in range(400):
            logs = moves @ at - halves
            most = float(np.max(logs))
            shares = np.exp(logs - most)
            if most + math.log(float(np.mean(shares))) <= -epsilon or float(at @ at) > 150.0:
                break
            weight += 0.05 * (1.0 + weight)
            at = 0.7 * at - 0.3 * weight * (shares / np.sum(shares)) @ moves
        found.append(at)
    return np.array(found)
