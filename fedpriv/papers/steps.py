"""Steps that change over a run, and a fading average of its models: for every row whose optimizer has a `step`.

    η_t = η · min(1, t / W) · f_t                        W: rounds of the warm-up, T: of the run
    f_t = 1, ½ (1 + cos(π p_t)), or drop^(times so far),  p_t = max(0, t - 1 - W) / (T - W)
    a_t = (β - β^t)/(1 - β^t) a_{t-1} + (1 - β)/(1 - β^t) x_{t+1}

a_t is the mean of x_2 … x_{t+1}, of which one weighs β times the next (as De et al. 2022 publish).  Cosine:
Loshchilov & Hutter 2017; warm-up: Goyal et al. 2017.

| here | meaning | shape |
|---|---|---|
| `factors` | η_t / η of round 1, 2, … | (T,) |
| `mean` | a_t | (..., d) |

Guarantee: factors and β are public before round 1, and vectors are those that the inner optimizer has: whatever is
computed here is post-processing.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self, cast

from pydantic import Field, model_validator
from torch import Tensor

from fedpriv.core.replicates import Scalar
from fedpriv.loss.estimators import Round
from fedpriv.papers.base import Optimizer, Problem, Settings


class Stepping(Optimizer, Protocol):
    """An optimizer, a frozen dataclass, that moves by `step` times something; where it stands knows no step."""

    @property
    def step(self) -> Scalar: ...


@dataclass(frozen=True)
class ScheduledSteps:
    """`inner`, whose step in round t is its own times `factors[t - 1]`."""

    inner: Stepping
    factors: tuple[float, ...]

    def start(self, initial: Tensor) -> Any:
        return self.inner.start(initial)

    def query(self, state: Any) -> Tensor:
        return self.inner.query(state)

    def update(self, state: Any, released: Tensor, current: Round) -> Any:
        step = self.inner.step * self.factors[current.t - 1]
        now = cast(Stepping, dataclasses.replace(cast(Any, self.inner), step=step))
        return now.update(state, released, current)

    def output(self, state: Any) -> Tensor:
        return self.inner.output(state)


class FadingState(NamedTuple):
    """The inner optimizer's state, and the mean (..., d)."""

    inner: Any
    mean: Tensor


@dataclass(frozen=True)
class FadingAverage:
    """`inner`, whose models so far are published in their mean: one counts `decay` times the next."""

    inner: Optimizer
    decay: Scalar
    """β."""

    def start(self, initial: Tensor) -> FadingState:
        return FadingState(self.inner.start(initial), initial)

    def query(self, state: FadingState) -> Tensor:
        return self.inner.query(state.inner)

    def update(self, state: FadingState, released: Tensor, current: Round) -> FadingState:
        inner = self.inner.update(state.inner, released, current)
        weight = (1.0 - self.decay) / (1.0 - self.decay**current.t)
        return FadingState(inner, state.mean + weight * (self.inner.output(inner) - state.mean))

    def output(self, state: FadingState) -> Tensor:
        return state.mean


Share = Annotated[float, Field(gt=0, lt=1)]


class ScheduledSettings(Settings):
    """Keys of every row whose server steps: how its step changes, and which mean of its models is published."""

    step_schedule: Literal["cosine", "drops"] | None = Field(
        None, description="how the step shrinks: half a cosine down to 0, or after step_drops; not if left out"
    )
    warm_up: Share | None = Field(
        None, description="share of the rounds in which the step rises to its full length; 0 if left out"
    )
    step_drops: Annotated[tuple[Share, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description='shares of the rounds after each of which the step is shorter, with "drops"'
    )
    step_drop: Share | None = Field(
        None, description="what the step is multiplied by at each of step_drops; 0.1 if left out"
    )
    fading_average: Share | None = Field(
        None, description="β: the mean of all models is published, one weighing β times the next"
    )

    @model_validator(mode="after")
    def _of_drops(self) -> Self:
        if (self.step_schedule == "drops") != (self.step_drops is not None):
            raise ValueError('step_schedule = "drops" and step_drops come together: which, and when')
        if self.step_drop is not None and self.step_drops is None:
            raise ValueError('step_drop is of step_schedule = "drops": give step_drops too')
        return self

    @property
    def steady(self) -> bool:
        """Whether all steps are equal and the optimizer's own output is published, as theorems presume."""
        return self.warm_up is None and self.fading_average is None and self.step_schedule is None

    def factors(self, rounds: int) -> tuple[float, ...]:
        """η_t / η of all rounds."""
        warm = round((self.warm_up or 0.0) * rounds)
        return tuple(min(1.0, t / max(1, warm)) * self._shape(t, rounds, warm) for t in range(1, rounds + 1))

    def _shape(self, t: int, rounds: int, warm: int) -> float:
        if self.step_schedule == "cosine":
            return 0.5 + 0.5 * math.cos(math.pi * max(0, t - 1 - warm) / max(1, rounds - warm))
        times = sum(t > share * rounds for share in self.step_drops or ())
        return float((self.step_drop or 0.1) ** times)

    def stepping(self, optimizer: Stepping, problem: Problem) -> Optimizer:
        """The optimizer with these steps and this mean; itself where the scenario gives none of the keys."""
        factors = self.factors(problem.rounds)
        moved: Optimizer = optimizer if set(factors) == {1.0} else ScheduledSteps(optimizer, factors)
        return FadingAverage(moved, self.fading_average) if self.fading_average else moved
