"""What several tests of the accountants build: chains, hockey sticks, and losses drawn from the true pair."""

import math
from typing import TypeVar

import numpy as np

from fedpriv.accounting.chain import CovarianceChain
from fedpriv.accounting.curves import Floats
from fedpriv.accounting.gaussian import Relation

Value = TypeVar("Value")
RELATIONS: list[Relation] = ["zero-out", "replace-one"]


def require(value: Value | None) -> Value:
    """The value that this case has, where other cases have none."""
    assert value is not None
    return value


def lags(rounds: int) -> Floats:
    """|s - t| of every two rounds."""
    return np.asarray(np.abs(np.subtract.outer(np.arange(float(rounds)), np.arange(float(rounds)))))


def chain_of(decay: float, rounds: int, first: float = 1.0) -> CovarianceChain:
    """Equal variances, and overlaps that fall by `decay` a round."""
    return CovarianceChain((first,) * rounds, (first * decay,) * (rounds - 1))


def hockey_stick(first: Floats, second: Floats, epsilon: float) -> float:
    """Σ (first - e^ε second)+ of two laws on a grid."""
    return float(np.sum(np.maximum(first - math.exp(epsilon) * second, 0.0)))


def log_mean(logs: Floats) -> Floats:
    """ln of the mean of e^logs of every row; `logaddexp.reduce` takes several times as long."""
    most = np.max(logs, axis=1)
    return np.asarray(most + np.log(np.mean(np.exp(logs - most[:, None]), axis=1)))


def sampled_losses(moves: Floats, relation: Relation, draws: int, seed: int) -> list[Floats]:
    """Losses under zero-out when a unit is removed and when it is added, or under replace-one.

    Releases are independent standard normals, which patterns of equal chance move by `moves`, (patterns, T).
    """
    generator = np.random.default_rng(seed)
    still = generator.standard_normal((draws, moves.shape[1]))
    moved = still + moves[generator.integers(len(moves), size=draws)]

    def log_ratio(at: Floats, sign: float) -> Floats:
        return log_mean(sign * at @ moves.T - 0.5 * np.sum(moves**2, axis=1))

    if relation == "replace-one":
        return [log_ratio(moved, 1.0) - log_ratio(moved, -1.0)]
    return [log_ratio(moved, 1.0), -log_ratio(still, 1.0)]


def sampled_stick(losses: Floats, epsilon: float) -> tuple[float, float]:
    """The hockey stick of drawn losses, and its standard error."""
    gains = np.maximum(0.0, -np.expm1(epsilon - losses))
    return float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))
