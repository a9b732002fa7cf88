"""DP-SGD inside the silos: noisy clipped steps between two averages, as with Opacus inside a Flower client."""

from typing import Annotated

from pydantic import Field

from fedpriv.algorithms.base import Algorithm, Positive, Settings, independent
from fedpriv.errors import InputError
from fedpriv.estimators.gradients import LocalGradient
from fedpriv.optimizers import LocalAveraging
from fedpriv.participation.fixed_order import Schedule


class LocalSettings(Settings):
    clip: Positive = Field(description="C: norm bound on one record's gradient")
    step: Positive = Field(description="η of the silos' own steps")
    local_steps: Annotated[int, Field(ge=1)] = Field(
        description="K: steps of every silo between two averages; federation.rounds counts steps, each a release"
    )


def _whole_averages(settings: LocalSettings, declared: Schedule) -> Schedule:
    if declared.rounds % settings.local_steps:
        raise InputError(
            f"algorithm.local_steps = {settings.local_steps}: {declared.rounds} rounds, which are silos' steps, "
            "are no whole number of averages; let federation.rounds be a multiple"
        )
    return declared


LOCAL_DP_SGD = Algorithm(
    name="local-dp-sgd",
    title="Local DP-SGD",
    source="Abadi et al. (CCS 2016), Algorithm 1, as local training in McMahan et al. (2017), Algorithm 1",
    settings=LocalSettings,
    schedule=_whole_averages,
    # noise is there before a silo's next step, so that only the silo itself can add it
    trusts=("untrusted",),
    estimator=lambda settings, _problem: LocalGradient(settings.clip, settings.step, settings.local_steps),
    mechanism=independent,
    optimizer=lambda settings, _problem, _noise_std: LocalAveraging(settings.step, settings.local_steps),
)
