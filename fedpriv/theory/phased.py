"""The phased method's parameters: lengths, steps and noise of every phase.

Source: Feldman, Koren & Talwar 2020, "Private Stochastic Convex Optimization: Optimal Rates in Linear Time",
section 4: phase i = 1, 2, … reads n_i = n/2^i fresh examples with step η_i = η/4^i, and starts the next one at
its average iterate plus N(0, σ_i² I).  Written down from the paper's abstract and from its known statement, not
checked against its text: `noise_std_of_phase` therefore follows from the sensitivity proved in
`fedpriv.mechanisms.phased`, and `suggested_step` is experimental.
"""

import math

from fedpriv.errors import InputError
from fedpriv.participation.phases import Phases
from fedpriv.theory.conditions import Condition


def phases_of(examples: int, batch: int = 1) -> Phases:
    """⌊n/(2^i B)⌋ rounds of B examples in phase i, for as many phases as have one.

    InputError where not even the first phase has a round.
    """
    if batch < 1 or examples < 2 * batch:
        raise InputError(
            f"examples = {examples}, batch = {batch}: the first phase reads half of the "
            "examples, so there must be two batches of 1 or more at least"
        )
    lengths, length = [], examples // (2 * batch)
    while length >= 1:
        lengths.append(length)
        length = examples // (2 ** (len(lengths) + 1) * batch)
    return Phases(tuple(lengths))


def shrink_of_phase(phase: int) -> float:
    """η_i/η = 1/4^i for phase i = 1, 2, …."""
    return math.pow(4.0, -phase)


def noise_std_of_phase(step: float, phase: int, clip: float, batch: int, mu: float) -> float:
    """σ_i = η_i C/(B μ): the noise of the start after phase i, per coordinate, in units of the parameters.

    Guarantee: every start, and so the output, is `mu`-GDP under zero-out for convex losses of smoothness at most
    2/η_1 and Lipschitz constant at most C; replace-one needs twice as much.
    """
    return step * shrink_of_phase(phase) * clip / (batch * mu)


def suggested_step(examples: int, dimension: int, lipschitz: float, diameter: float, mu: float) -> float:
    """η = (D/L) min{4/√n, μ/(2√d)}, with μ for the paper's ρ of (α, αρ²/2)-RDP; batches of 1, replace-one."""
    return diameter / lipschitz * min(4.0 / math.sqrt(examples), mu / (2.0 * math.sqrt(dimension)))


def step_conditions(step: float, smoothness: float) -> tuple[Condition, ...]:
    """The contraction, on which privacy rests: η_1 ≤ 2/smoothness."""
    return (Condition("η/4 ≤ 2/smoothness", step * shrink_of_phase(1), 2.0 / smoothness),)
