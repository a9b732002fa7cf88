"""Momentum aggregation: Tran & Cutkosky, Momentum Aggregation for Private Non-convex ERM (NeurIPS 2022).

| here | paper | meaning |
|---|---|---|
| `alpha` | α | weight of a new gradient in the momentum |
| `step` | η | length of every step |
| `places`, `rounds` | N, T | rounds of one epoch, of the run |
"""

import math
from typing import Annotated, Literal

from pydantic import Field

from fedpriv.algorithms.base import Algorithm, Positive, Problem, Settings
from fedpriv.estimators import PlainGradient
from fedpriv.mechanisms import BinaryTree
from fedpriv.optimizers import NormalizedSGD
from fedpriv.randomness import public_generator

_PAPER = "Tran & Cutkosky, Momentum Aggregation for Private Non-convex ERM (NeurIPS 2022)"


class MomentumSettings(Settings):
    """Theorems 6 and 9 both come to α = 1/N and η = 1/√(NT); `fedpriv.parameters.momentum` has their T."""

    clip: Literal["lipschitz"] | Positive = Field(
        "lipschitz", description="G: norm bound on one record's gradient; 'lipschitz' is the model's own bound"
    )
    alpha: Literal["paper"] | Annotated[float, Field(gt=0, le=1)] = Field(
        "paper", description="α: weight of a new gradient in the momentum; 'paper' is 1/N, N rounds an epoch"
    )
    step: Literal["paper"] | Positive = Field("paper", description="η: length of a step; 'paper' is 1/√(N T)")
    output: Literal["last", "random"] = Field(
        "last", description="the iterate published: the last, or the theorems' uniformly random one"
    )

    def clip_for(self, problem: Problem) -> float:
        return problem.lipschitz if self.clip == "lipschitz" else self.clip

    def alpha_for(self, problem: Problem) -> float:
        return 1.0 / _places(problem) if self.alpha == "paper" else self.alpha

    def step_for(self, problem: Problem) -> float:
        return 1.0 / math.sqrt(_places(problem) * problem.rounds) if self.step == "paper" else self.step


def _places(problem: Problem) -> int:
    return problem.places or problem.rounds


def _momentum(settings: MomentumSettings, problem: Problem) -> PlainGradient:
    """m_t = (1 - α) m_{t-1} + α g_t, with increments α g_t clipped to norm α G."""
    alpha = settings.alpha_for(problem)
    return PlainGradient(alpha * settings.clip_for(problem), coefficient=alpha, keep=1.0 - alpha)


def _normalized(settings: MomentumSettings, problem: Problem) -> NormalizedSGD:
    """The random iterate w_U is chosen by public randomness: U depends on the seed and T alone."""
    chosen = math.inf
    if settings.output == "random":
        chosen = float(public_generator(problem.seed, "output iterate").integers(1, problem.rounds + 1))
    return NormalizedSGD(settings.step_for(problem), chosen)


MOMENTUM_TREE = Algorithm(
    name="momentum-tree",
    title="Momentum with tree noise",
    source=f"{_PAPER}, Algorithm 1",
    settings=MomentumSettings,
    # m_t = (1-α) m_{t-1} + α g_t
    estimator=_momentum,
    # the binary tree on every m_t, nodes decaying by 1-α a round
    mechanism=lambda settings, problem: BinaryTree(1.0 - settings.alpha_for(problem)),
    # w_{t+1} = w_t - η m^_t / ‖m^_t‖, on the mean over silos
    optimizer=lambda settings, problem, _noise_std: _normalized(settings, problem),
)
