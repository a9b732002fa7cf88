"""The theorems of Accelerated-DP-SRGD: what they ask for at given numbers, and whether their conditions hold.

Source: Choquette-Choo, Ganesh & Thakurta, "Near-Optimal Rates for O(1)-Smooth DP-SCO with a Single Epoch and
Large Batches" (ALT 2025), the realizable and the non-realizable setting.  Natural logarithms.

| here | paper | unit |
|---|---|---|
| `examples` | n, each read once | |
| `dimension` | p | |
| `epsilon`, `delta` | ε, δ | |
| `lipschitz` | L | loss / parameter |
| `smoothness` | M | loss / parameter² |
| `radius` | R: K is the ball of this radius around 0 | parameter |
| `rounds`, `batch` | T, B | |
| `beta` | β, the optimizer divides by it | loss / parameter² |
| `clip` | norm bound on one example's increment | gradient |
| `sigma` | standard deviation of a node's noise in the sum of a batch's mean increments | gradient |

The numbers are the formulas' own, not rounded; a run takes `whole_rounds` and `whole_batch`.

Guarantee: `sigma` makes all released prefix sums (ε, δ)-DP for neighbours under `relation`: an increment is in
⌊log2 T⌋ + 1 tree nodes at most, each of which it moves by clip / B under zero-out, by twice that under
replace-one.  It uses the exact Gaussian conversion and
the exact number of nodes, both of them tighter than the paper's.  It is for batches of exactly B; a run with
whole batches calibrates its own noise.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedpriv.accounting import gdp, zcdp
from fedpriv.accounting.checks import check_delta, check_positive
from fedpriv.accounting.relation import Relation, moved_by
from fedpriv.errors import InputError
from fedpriv.theory.conditions import Condition
from fedpriv.theory.excess_risk import Released, accelerated


@dataclass(frozen=True)
class Problem:
    """What a theorem is asked about; the symbols are in the table above."""

    examples: int
    dimension: int
    epsilon: float
    delta: float
    lipschitz: float
    smoothness: float
    radius: float
    relation: Relation = "zero-out"
    """The paper's; replace-one takes twice the noise."""

    def __post_init__(self) -> None:
        if self.examples < 2 or self.dimension < 1:
            raise InputError(f"examples = {self.examples}, dimension = {self.dimension}: 2 and 1 at least")
        for name in ("epsilon", "lipschitz", "smoothness", "radius"):
            check_positive(name, getattr(self, name))
        check_delta(self.delta)

    @property
    def relative_smoothness(self) -> float:
        """c_M of M = c_M L / R, which the theorems treat as a constant."""
        return self.smoothness * self.radius / self.lipschitz


@dataclass(frozen=True)
class Asked:
    """What a theorem asks for."""

    theorem: str
    examples: int
    rounds: float
    batch: float
    beta: float
    clip: float
    sigma: float
    paper_sigma: float
    """The same by Corollary 9: 1 + ⌈log2 T⌉ nodes for every increment, and ε = ρ + 2√(ρ ln(1/δ)) for ρ-zCDP."""
    conditions: tuple[Condition, ...]
    assumption: str
    """What no number can show."""

    @property
    def refusal(self) -> str | None:
        """Why the formula cannot be run at this n, on one line; None if it can."""
        if self.rounds <= self.examples:
            return None
        return (
            f"the {self.theorem} theorem asks for {self.rounds:,.0f} rounds of B = {self.batch:.3g} examples, but "
            f"n = {self.examples:,} examples read once make at most that many rounds: B must be 1 or more"
        )

    @property
    def whole_batch(self) -> int:
        """B rounded down; InputError where the formula cannot be run."""
        if self.refusal is not None:
            raise InputError(self.refusal)
        return math.floor(self.batch * (1.0 + 1e-12))  # √n of a square may come out a rounding below it

    @property
    def whole_rounds(self) -> int:
        """How many whole batches the examples fill."""
        return self.examples // self.whole_batch

    def excess_risk(self, problem: Problem) -> float:
        """What the mean excess risk cannot exceed with `sigma` and the whole rounds and batches; inf if unknown.

        The paper's Theorems 3 and 15 say it up to constants and logarithms; this is `excess_risk.accelerated`.
        """
        rounds = self.whole_rounds
        nodes = np.array([t.bit_count() for t in range(1, rounds + 1)])
        stds = self.sigma * np.sqrt(nodes)
        released = Released(self.whole_batch, problem.dimension, np.full(rounds, self.clip), stds)
        return accelerated(released.of_sums, problem.radius, problem.smoothness, self.beta).value


def realizable(problem: Problem) -> Asked:
    """T = c n^{1/4}, B = n^{3/4}/c, β = c² (L/R) max{1, √p/(ε√n)}, clip c L, with the factor c below."""
    n, lipschitz, radius = problem.examples, problem.lipschitz, problem.radius
    factor = realizable_factor(n, problem.delta)
    rounds = factor * n**0.25
    batch = n**0.75 / factor
    noise_factor = math.sqrt(problem.dimension / n) / problem.epsilon
    beta = factor**2 * lipschitz / radius * max(1.0, noise_factor)
    clip = factor * lipschitz
    return Asked(
        theorem="realizable",
        examples=n,
        rounds=rounds,
        batch=batch,
        beta=beta,
        clip=clip,
        sigma=_sigma(problem, clip, rounds, batch),
        paper_sigma=_paper_sigma(problem, clip, rounds, batch),
        conditions=(*_common(problem, rounds, batch), Condition("M ≤ β", problem.smoothness, beta)),
        assumption="the unconstrained minimizer lies in the ball",
    )


def realizable_factor(examples: int, delta: float) -> float:
    """c_DP = 4√2 (ln n)^{3/2} √(ln(2n/δ)) ln(2.5/δ): about 12,000 at n = 60,000 and δ = 1e-5."""
    spread = math.sqrt(math.log(2 * examples / delta)) * math.log(2.5 / delta)
    return 4.0 * math.sqrt(2.0) * math.pow(math.log(examples), 1.5) * spread


def non_realizable(problem: Problem, polylog: float = 1.0) -> Asked:
    """B = min{√n, ε n^{3/2}/(√p polylog)}, T = n/B, β = (16 c + 8) L n^{3/2}/(R B²), clip (8 c + 4) L.

    c = M R / L.  The paper leaves `polylog` open.  Its second bound on B carries a stray factor M, which is
    dropped here: without it the two bounds meet at p = ε² n², the theorem's own limit, and B has no unit.
    """
    n, lipschitz, relative = problem.examples, problem.lipschitz, problem.relative_smoothness
    check_positive("polylog", polylog)
    batch = min(math.sqrt(n), problem.epsilon * n**1.5 / (math.sqrt(problem.dimension) * polylog))
    rounds = n / batch
    beta = (16.0 * relative + 8.0) * lipschitz * n**1.5 / (problem.radius * batch**2)
    clip = (8.0 * relative + 4.0) * lipschitz
    return Asked(
        theorem="non-realizable",
        examples=n,
        rounds=rounds,
        batch=batch,
        beta=beta,
        clip=clip,
        sigma=_sigma(problem, clip, rounds, batch),
        paper_sigma=_paper_sigma(problem, clip, rounds, batch),
        conditions=(
            *_common(problem, rounds, batch),
            Condition("B ≤ √n", batch, math.sqrt(n)),
            Condition("2 M T ≤ β", 2.0 * problem.smoothness * rounds, beta),
        ),
        assumption="M R / L is a constant, it does not grow with n; p is within the bound of Corollary 13, which "
        "is left out here",
    )


def _common(problem: Problem, rounds: float, batch: float) -> tuple[Condition, ...]:
    n = problem.examples
    return (
        Condition("p ≤ ε² n²", problem.dimension, (problem.epsilon * n) ** 2),
        Condition("δ ≤ 1/n", problem.delta, 1.0 / n),
        Condition("T B ≤ n", rounds * batch, n),
        Condition("1 ≤ B", 1.0, batch),
    )


def _sigma(problem: Problem, clip: float, rounds: float, batch: float) -> float:
    nodes = math.floor(math.log2(max(rounds, 1.0))) + 1
    moved = moved_by(problem.relation, 1.0 / batch, clip * math.sqrt(nodes))
    return gdp.noise_for(gdp.mu_of(problem.epsilon, problem.delta), moved)


def _paper_sigma(problem: Problem, clip: float, rounds: float, batch: float) -> float:
    nodes = 1 + math.ceil(math.log2(max(rounds, 1.0)))
    moved = moved_by(problem.relation, 1.0 / batch, clip * math.sqrt(nodes))
    return gdp.noise_for(zcdp.paper_mu(problem.epsilon, problem.delta), moved)
