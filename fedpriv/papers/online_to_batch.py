"""Private online-to-batch, with weights α_t = t^k and a derived bound on increments.

Source: Zhang, Tran & Cutkosky, "Differentially Private Online-to-Batch for Smooth Losses" (NeurIPS 2022).  The
increment of round t is α_t ∇f(x_t; z) - α_{t-1} ∇f(x_{t-1}; z).  The x_t are the weighted averages of an online
learner's iterates w_t in a convex set of diameter D, and α_{1:t} is α_1 + … + α_t.  Losses are G-Lipschitz and
H-smooth.

The paper states the bound on increments up to constants.  The bound is derived here:

    ‖increment‖ ≤ (α_t - α_{t-1}) G + α_{t-1} H ‖x_t - x_{t-1}‖,   x_t - x_{t-1} = (α_t/α_{1:t}) (w_t - x_{t-1})
                ≤ t^{k-1} (k G + (k+1) H D)    as α_t - α_{t-1} ≤ k t^{k-1} and α_{1:t} ≥ t^{k+1}/(k+1)
"""

from typing import Annotated

from pydantic import Field

from fedpriv.accounting.gaussian import check_positive
from fedpriv.core.errors import InputError
from fedpriv.loss.estimators import PowerWeights, RecursiveGradient
from fedpriv.papers.base import (
    Algorithm,
    NoiseSettings,
    Positive,
    Prescription,
    Problem,
    catch_refusal,
    choose_mechanism,
)
from fedpriv.papers.reshef_levy import AnytimeSGD


def increment_bound(t: int, power: float, lipschitz: float, smoothness: float, diameter: float) -> float:
    """Return t^{k-1} (k G + (k+1) H D), a clip norm for round t with which no increment is clipped.

    Args:
        t: Round, from 1 on.
        power: k, at least 1.
        lipschitz: G.
        smoothness: H.
        diameter: D.

    Raises:
        InputError: A number is out of its range.

    Example:
        >>> increment_bound(t=3, power=1.0, lipschitz=1.0, smoothness=1.0, diameter=2.0)
        5.0
    """
    if t < 1 or not power >= 1.0:
        raise InputError(f"t = {t}, power = {power}: rounds count from 1, and the weights t^k have k of 1 or more")
    for name, value in (("lipschitz", lipschitz), ("smoothness", smoothness), ("diameter", diameter)):
        check_positive(name, value)
    return float(t ** (power - 1.0) * (power * lipschitz + (power + 1.0) * smoothness * diameter))


class OnlineToBatchSettings(NoiseSettings):
    """Keys of private online-to-batch."""

    clip: Positive = Field(description="C: an increment of round t is clipped to C t^(k-1)")
    step: Positive = Field(description="η of online gradient descent on the gradients times α_t")
    radius: Positive = Field(description="radius of the ball the model stays in")
    power: Annotated[int, Field(ge=1, le=8)] = Field(1, description="k: the weights are α_t = t^k")


@catch_refusal
def _prescribe_clip(name: str, settings: OnlineToBatchSettings, problem: Problem) -> Prescription:
    """Prescribe the key `clip` with which no increment is clipped, if G and H hold in the ball."""
    if settings.radius > problem.convex_within:
        raise InputError(f"{name}: no Lipschitz constant and smoothness of the loss are known in the ball")
    clip = increment_bound(1, settings.power, problem.lipschitz, problem.smoothness, 2.0 * settings.radius)
    return Prescription(name, {"rounds": float(problem.rounds), "batch": float(problem.batch), "clip": clip})


ONLINE_TO_BATCH = Algorithm(
    name="online-to-batch",
    title="Private online-to-batch",
    source="Zhang, Tran & Cutkosky, Differentially Private Online-to-Batch for Smooth Losses (NeurIPS 2022)",
    settings=OnlineToBatchSettings,
    # δ_t = t^k ∇f(x_t) - (t-1)^k ∇f(x_{t-1}), added to a running sum
    estimator=lambda settings, _problem: RecursiveGradient(
        settings.clip, weights=PowerWeights(settings.power), clip_growth=settings.power - 1
    ),
    mechanism=choose_mechanism,
    # online gradient descent on the sums, x_t the weighted average of its iterates
    optimizer=lambda settings, _problem, _noise_std: AnytimeSGD(settings.step, settings.radius),
    theorems=lambda settings, problem: (_prescribe_clip("bound on increments", settings, problem),),
    published="points",
)
