"""Parameters of Tran & Cutkosky, Momentum Aggregation for Private Non-convex ERM (NeurIPS 2022).

Theorems 4, 6, 8 and 9 with their errata (docs/momentum.md).  All are for the replace-one relation; n = N records,
one in each slot of an epoch.
"""

import math
from typing import NamedTuple

from fedpriv.accounting.gaussian import check_delta, check_positive
from fedpriv.core.errors import InputError


class TheoremParameters(NamedTuple):
    """What a theorem prescribes: T, α, η and, for Algorithm 2, the mixing weight γ (else 0)."""

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
    log = _log(epsilon, delta)
    if epsilon > log:
        raise InputError(
            f"epsilon = {epsilon:g}: the paper's formula for the noise holds only up to ln(1/delta) = {log:.4g}"
        )
    return (4.0 if reduced else 2.0) * math.sqrt(log) / epsilon


def quadratic_noise_multiplier(epsilon: float, delta: float) -> float:
    """σ from ε = ρ + 2 √(ρ ln(1/δ)) with ρ = 1/(2σ²): the paper's conversion, for any ε > 0 and 0 < δ < 1."""
    log = _log(epsilon, delta)
    return 1.0 / (math.sqrt(2.0 * log + 2.0 * epsilon) - math.sqrt(2.0 * log))


def tree_parameters(records: int, dimension: int, epsilon: float, delta: float) -> TheoremParameters:
    """Theorem 6: T is the largest integer ≥ 2 with T log2 T ≤ ε N² / √(d ln(1/δ)), α in [1/N, 1], η = 1/√(NT).

    InputError if there is no such T.
    """
    spread = math.sqrt(dimension * _log(epsilon, delta))
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
    log = _log(epsilon, delta)
    spread, depth = math.sqrt(dimension * log), math.log2(rounds)
    return (
        (1.5 * gap + 12.0 * smoothness + 48.0 * lipschitz) * math.sqrt(depth * spread / (epsilon * records))
        + 6.0 * lipschitz / math.sqrt(records)
        + 3.0 * lipschitz * depth * spread / (epsilon * records)
    )


def _log(epsilon: float, delta: float) -> float:
    """ln(1/δ), of arguments that were checked."""
    check_positive("epsilon", epsilon)
    return -math.log(check_delta(delta))
