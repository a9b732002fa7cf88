"""What the theorems of DP-μ²-FL ask for, and the excess risk they promise.

Source: Reshef & Levy 2024, Theorems 5.2 (untrusted server, Algorithm 1) and 6.2 (trusted server, Algorithm 2).

| here | paper | unit |
|---|---|---|
| `rounds` | T, as many records in each silo | |
| `silos` | M | |
| `lipschitz`, `smoothness` | G, L | gradient; gradient / parameter |
| `diameter` | D | parameter |
| `mu` | ρ | |
| `clip` | S = G + 2LD | gradient |
| `noise_in_mean` | σ/√M (5.2), σ (6.2): in the mean over silos | gradient |

The theorems are for replace-one; under zero-out a record moves half as far, and half of the noise does.
"""

import math
from dataclasses import dataclass

from fedpriv.accounting.checks import check_positive
from fedpriv.accounting.gdp import noise_for
from fedpriv.accounting.relation import Relation, moved_by


@dataclass(frozen=True)
class Mu2Problem:
    """What a theorem is asked about; the symbols are in the table above."""

    rounds: int
    silos: int
    dimension: int
    lipschitz: float
    smoothness: float
    diameter: float
    mu: float
    relation: Relation = "replace-one"

    def __post_init__(self) -> None:
        for name in ("rounds", "silos", "dimension", "lipschitz", "smoothness", "diameter", "mu"):
            check_positive(name, float(getattr(self, name)))


@dataclass(frozen=True)
class Mu2Parameters:
    """What a theorem asks for; `excess_risk` bounds E f(x_T) - f(x*) for the worst G* and σ~."""

    rounds: int
    clip: float
    noise_in_mean: float
    step: float
    excess_risk: float


def mu2_parameters(problem: Mu2Problem, trusted: bool) -> Mu2Parameters:
    """σ = 2S√T/ρ at every silo, or 2S√T/(ρM) at the server; η = min{D/(σ_mean √(T d)), 1/(4LT)}.

        E f(x_T) - f(x*) ≤ 4D ((G* + 2LD)/T + 2S√d/(ρ T √M) + σ~/√(TM)),  σ~ = σ_g + 2σ_L D

    with M for the first √M if trusted; that term is σ_mean √d / T^{3/2}.  G* ≤ G, σ_g ≤ G and σ_L ≤ L hold for
    any records, so that the bound is (G + 2LD), the clip, in both other places.
    """
    rounds, silos, diameter = problem.rounds, problem.silos, problem.diameter
    clip = problem.lipschitz + 2.0 * problem.smoothness * diameter
    share = 1.0 / silos if trusted else 1.0 / math.sqrt(silos)
    noise = noise_for(problem.mu, moved_by(problem.relation, share, clip * math.sqrt(rounds)))
    smooth = 1.0 / (4.0 * problem.smoothness * rounds)
    step = min(diameter / (noise * math.sqrt(rounds * problem.dimension)), smooth)
    private = noise * math.sqrt(problem.dimension) / rounds**1.5
    sampling = clip / math.sqrt(rounds * silos)
    risk = 4.0 * diameter * (clip / rounds + private + sampling)
    return Mu2Parameters(rounds, clip, noise, step, risk)
