"""Random allocation under noise that fades: what two rounds move alike is known, the rest stays secret.

Noise that fades (`noise/buffered.py`: λ-CGD and buffers) adds up over all later rounds: columns of C overlap
however far apart a unit's rounds lie. Let X_st = clip_s clip_t ⟨C_s, C_t⟩ ≥ 0 in units of σ², v the largest
X_tt, and a the largest X_st of two different rounds s, t that one unit may take part in. A run of k epochs is
dominated by

    k releases of random allocation with independent noise, of variance 1/(v - a), **and** one Gaussian release
    that everybody knows the unit is in, of k √a standard deviations (2k √a under replace-one).

For C = I this is random allocation, and where a unit has one round only it is exact. Sound, and not tight.

**Kahane's inequality** (1985). Let X, Y be centred Gaussian vectors, c_i real, F convex, and c_i c_j (E Y_i Y_j
- E X_i X_j) ≥ 0 for all i, j. Then E F(Σ c_i e^(X_i - E X_i²/2)) ≤ E F(Σ c_i e^(Y_i - E Y_i²/2)): along Z =
√(1-θ) X + √θ Y, independent, the derivative by θ is ½ Σ_ij (E Y_i Y_j - E X_i X_j) c_i c_j E[w_i w_j F''(Σ c
w)], w_i = e^(Z_i - E Z_i²/2) > 0. (A convex F with a corner is a limit of smooth ones.)

**That the pair dominates.** π is what a unit may draw, a round of every epoch, with probability p_π. Let N be
the law of y = C s + σ z without the unit, σ = 1. Its increments u_t, ‖u_t‖ ≤ clip_t, are functions of what was
released before round t; in row r the unit moves y by m_r^π = Σ_{t ∈ π} C_rt u_t, and its law over N is S = Σ_π
p_π w_π,

    w_π = exp Σ_r (⟨m_r^π, z_r⟩ - ‖m_r^π‖²/2).

Hockey sticks are E F(S) with F = (S - γ)+ or (1 - γS)+, and under replace-one E (S - γ S')+, S' of the other
unit's increments u'. Given the past of row r the m_r^π are fixed vectors with ⟨m_r^π, m_r^ρ⟩ ≤ c_r^π c_r^ρ,
c_r^π = Σ_{t ∈ π} C_rt clip_t, and ⟨m_r^π, m'_r^ρ⟩ ≥ -c_r^π c_r^ρ. From the last row to the first: let all later
rows have been replaced by the worst, increments of one direction e, and of -e for the other unit; what is left
is E over independent later Gaussians of a convex function, so that Kahane's inequality, for this row's exponents
plus the later ones, replaces this row too. So the worst increments are clips of one direction, opposite ones for
two units, and exponents have

    E G_π G_ρ = Σ_{s ∈ π} Σ_{t ∈ ρ} X_st ≤ k² a + (v - a) |π ∩ ρ|,

since rounds of different epochs are different ones. Kahane's inequality once more puts the right side in its
place, with the sign turned between two units: G_π = k √a ξ + √(v - a) Σ_{t ∈ π} ξ_t, and -G_π for the other
unit. Then S is e^(k√a ξ - k²a/2) times the product over epochs of the means of e^(√(v-a) ξ_t - (v-a)/2): the law
over N of the Gaussian release and of k epochs of random allocation together. ∎ Nothing was asked of γ ≥ 0, so
pairs compose.

Sets of k rounds drawn at once (`Balanced`) are allocation given a partition, as in `participation/secret.py`.
With Poisson sampling |π| varies and with it what is common, so that no such product dominates: it stays refused.
"""

import math

import numpy as np

from fedpriv.accounting.curves import Floats, as_floats, gaussian
from fedpriv.accounting.losses import LatticeLosses, Losses
from fedpriv.accounting.poisson import connected_dots

_REACH = 8.5  # standard deviations of a Gaussian's loss: beyond lies less than 1e-16
_STEPS = 40.0  # of the lattice are one standard deviation of either loss, or more
_MOST_PLACES = 2**13  # of either law on it


def beside(law: Losses, mu: float) -> Losses:
    """The law of the loss of `law`'s release and of a Gaussian one of `mu` together, adaptive or not.

    Guarantee: an upper bound of H_ε wherever `law` is one, for every ε of either sign.
    """
    if mu == 0.0:
        return law
    extent = max(law.extent, 2.0 * _REACH * mu)
    step = max(min(value for value in (law.spread, mu) if value > 0.0) / _STEPS, extent / _MOST_PLACES)
    return law.on_lattice(step).beside(_gaussian_law(mu, step)).atoms


def _gaussian_law(mu: float, step: float) -> LatticeLosses:
    low, high = (math.floor((0.5 * mu + side * _REACH) * mu / step) for side in (-1.0, 1.0))
    return connected_dots(step, low, _hockey_stick(mu, as_floats(step * np.arange(low, high + 2))))


def _hockey_stick(mu: float, epsilons: Floats) -> Floats:
    """That of μ-GDP for ε of either sign, rounded up: below 0 it is 1 - e^ε + e^ε δ(-ε), by symmetry."""
    deltas = gaussian(mu)(np.abs(epsilons))
    return as_floats(
        np.where(epsilons >= 0.0, deltas, -np.expm1(epsilons) + np.exp(np.minimum(0.0, epsilons)) * deltas)
    )
