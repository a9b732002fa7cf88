"""Strategy matrices from interlacing roots: their series, their inverse, and how their noise streams.

    C(x) = Π (1 - φ_i x) / Π (1 - θ_i x),    θ_1 > φ_1 > θ_2 > φ_2 > … > θ_m > φ_m ≥ 0

C is the lower-triangular Toeplitz matrix of this power series.  In partial fractions c_0 = 1 and
c_j = Σ ω_i θ_i^(j-1) with every ω_i > 0, because the roots interlace, and c_1 = Σ θ - Σ φ ≤ θ_1 ≤ 1: the
coefficients are never negative and never increase.  Likewise 1/C(x) has the coefficients 1, Σ ω̂_i φ_i^(j-1) with
every ω̂_i < 0.

Sources: McMahan, Xiao, Pillutla 2024 and Dvijotham, McMahan, Pillutla, Steinke, Thakurta 2024 (buffered linear
Toeplitz); Choquette-Choo et al. 2023 for λ-CGD, which is m = 1 with φ_1 = 0.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fedpriv.errors import InputError
from fedpriv.mechanisms.workload import Floats, powers

Roots = tuple[float, ...]


class Mode(NamedTuple):
    """A vector M that streaming keeps: the row gets gain · M, and then M = pole · M + z."""

    pole: float
    gain: float


def check(theta: Roots, phi: Roots, decay: float) -> None:
    """InputError unless the roots interlace, and lie in [0, decay], or in [0, 1] for decay = 0.

    Guarantee: what passes has a C with coefficients ≥ 0 that never increase, whoever chose the numbers.
    """
    if len(theta) != len(phi):
        raise InputError(f"theta has {len(theta)} roots and phi {len(phi)}: both need the same number")
    largest = decay if decay > 0.0 else 1.0
    falling = tuple(root for pair in zip(theta, phi, strict=True) for root in pair)
    inside = all(0.0 <= root <= largest for root in falling)  # not so for nan
    if not inside or any(not after < before for before, after in pairwise(falling)):
        raise InputError(
            f"theta = {list(theta)}, phi = {list(phi)}: needed is {largest:g} ≥ θ_1 > φ_1 > θ_2 > φ_2 > … ≥ 0"
        )


def residues(over: Roots, under: Roots) -> Floats:
    """ω of Π (1 - under_j x) / Π (1 - over_i x) = 1 + Σ ω_i x / (1 - over_i x); as many of both."""
    poles, zeros = np.array(over), np.array(under)
    distance = np.subtract.outer(poles, poles)
    np.fill_diagonal(distance, 1.0)
    # ratios in order: neighbours are close, and products of small numbers alone could underflow
    return np.asarray(np.prod(np.subtract.outer(poles, zeros) / distance, axis=1), np.float64)


def coefficients(over: Roots, under: Roots, count: int) -> Floats:
    """The first `count` ≥ 1 coefficients of Π (1 - under_j x) / Π (1 - over_i x).

    C is `coefficients(theta, phi, T)`, its inverse `coefficients(phi, theta, T)`.
    """
    series = np.zeros(count)
    series[0] = 1.0
    for root, weight in zip(over, residues(over, under), strict=True):
        series[1:] += weight * powers(root, count - 1)
    return series


def noise_modes(decay: float, theta: Roots, phi: Roots) -> tuple[Mode, ...]:
    """The modes of B = A C^-1: row t is z_t + Σ gain · M_{t-1}.

    B(x) = Π (1 - θ_i x) / ((1 - decay x) Π (1 - φ_i x)) has a mode for each pole p > 0, with gain r_p p.  A pole
    that a zero cancels (θ_1 = decay) has none.  With decay = φ_m = 0 the pole at 0 is double, and one more mode,
    which is the last fresh vector, makes up for what b_1 lacks.
    """
    poles = (decay, *phi)
    modes = []
    for place, pole in enumerate(poles):
        if pole == 0.0:
            continue
        others = [pole - other for number, other in enumerate(poles) if number != place]
        gain = pole
        for above, below in zip([pole - root for root in theta], others, strict=True):
            gain *= above / below
        if gain != 0.0:
            modes.append(Mode(pole, gain))
    if poles.count(0.0) == 2:
        first = sum(phi) - sum(theta)
        modes.append(Mode(0.0, first - sum(mode.gain for mode in modes)))
    return tuple(modes)
