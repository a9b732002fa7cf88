"""[run] and [deployment] of a scenario: how to compute, and what a server does about silos that are not there."""

from typing import Annotated, Literal

from pydantic import Field

from fedpriv.algorithms import Positive
from fedpriv.metrics.scores import Score
from fedpriv.scenario.section import Count, Section


class RunSection(Section):
    """[run]: how to compute, not what; nothing here changes the guarantee."""

    dtype: Literal["float32", "float64"] = "float32"
    arithmetic: Literal["float", "integers"] = Field(
        "float",
        description='"integers" releases as deployments do (engines inprocess, ray): exact sums, discrete noise',
    )
    word: Literal[40, 48] = Field(
        48, description="bits of a number in a masked message, where integers are masked"
    )
    device: str = Field("cpu", description="where the vectorized engine computes, as torch names it")
    evaluations: Count = Field(20, description="how many rounds, evenly spaced, are evaluated on the test set")
    metrics: Annotated[tuple[Score, ...], Field(strict=False)] = Field(
        (),
        description='scores of the test records beside loss and accuracy: "auc", "balanced_accuracy", '
        '"calibration_error" of classes, "r2", "mae" of real numbers',
    )
    per_silo: bool = Field(
        False, description="every metric also on each site's own test records, with their mean and the worst"
    )
    goldstein_radius: Positive | None = Field(
        None, description="evaluations measure Goldstein stationarity in this radius, as the metric `goldstein`"
    )
    noise: Literal["per-silo", "aggregate"] = Field(
        "per-silo",
        description='"aggregate" draws the mean of the silos\' noise at once (vectorized engine only): '
        "the same distribution, another trajectory",
    )


class DeploymentSection(Section):
    """[deployment]: what a server does about silos that do not answer; simulations have no such silos."""

    patience: Positive = Field(600.0, description="seconds to wait for the silos of a round before giving up")
    missing: Literal["stop", "continue"] = Field(
        "stop",
        description='"continue": the run continues without a silo that did not answer, with an increment of 0',
    )
