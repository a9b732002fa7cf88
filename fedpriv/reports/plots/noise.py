"""What noise each mechanism would need for a run's guarantee: from accounting alone, nothing is drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpriv.figures import upper_figure
from fedpriv.mechanisms.registry import CHOSEN
from fedpriv.privacy.cost import Cost
from fedpriv.privacy.ledger import from_data
from fedpriv.privacy.setting import Setting
from fedpriv.reports.plots.style import colour, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HORIZONS = 12


@dataclass(frozen=True)
class Question:
    """What is compared: a setting with clip norm and batch 1, a μ, and the mechanism that was used."""

    setting: Setting
    mu: float
    used: str


def draw_noise(cells: Sequence[Mapping[str, Any]], state: str = "") -> "Figure | None":
    """Noise against the number of rounds, and in one release beside the mean over silos, for each mechanism.

    For the first cell with a guarantee and a mechanism that is compared; None if there is none.
    Units: clip norm divided by batch size.  `state` is what a reader has to know of the run before any figure.
    """
    question = question_of(cells)
    if question is None:
        return None
    setting = question.setting
    figure, ((left, right),) = panels(9.4, 4.4, 1, 2)
    names = list(setting.compare(question.mu))
    _against_rounds(left, question, names)
    _in_the_mean(right, question, names)
    sums = "running sums" if setting.decay == 1.0 else f"sums with decay {setting.decay:.3g}"
    passes = f", {setting.epochs} epochs" if setting.epochs > 1 else ""
    claim = f"{upper_figure(question.mu, 3)}-GDP, {setting.relation} neighbours{passes}"
    units = "standard deviation of a coordinate; 1 is the clip norm divided by the batch size"
    figure.suptitle("\n".join(filter(None, [f"Noise that makes {setting.rounds} {sums} {claim}", units, state])))
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", title="mechanism")
    return figure


def question_of(cells: Sequence[Mapping[str, Any]]) -> Question | None:
    """What is compared: the first cell with a guarantee and a mechanism that a scenario can name."""
    return next(filter(None, (_question(cell) for cell in cells if cell["mu"] is not None)), None)


def costs_by_rounds(question: Question) -> dict[str, list[tuple[int, float]]]:
    """For each mechanism: the root mean square over the rounds of the noise in a release, by number of rounds."""
    setting = question.setting
    passes = np.unique(np.geomspace(1, setting.rounds // setting.epochs, _HORIZONS).astype(int))
    horizons = [int(places) * setting.epochs for places in passes]
    costs = [replace(setting, rounds=rounds).compare(question.mu) for rounds in horizons]
    return {
        name: [(rounds, cost[name].error) for rounds, cost in zip(horizons, costs, strict=True) if name in cost]
        for name in setting.compare(question.mu)
    }


def _question(cell: Mapping[str, Any]) -> Question | None:
    stream = from_data(cell["releases"][0])
    if not isinstance(stream.mechanism, CHOSEN) or stream.decay == 0.0:  # nothing is summed: all add the same
        return None
    once = stream.period is not None or stream.schedule.single_pass
    rounds = stream.period or stream.schedule.rounds
    if not once and rounds % stream.schedule.rounds_per_epoch:
        return None  # the last pass is cut, and the figure is of whole ones
    setting = Setting(
        rounds=rounds,
        decay=stream.decay,
        silos=cell["silos"],
        trust=cell["trust"],
        relation=stream.relation,
        epochs=1 if once else rounds // stream.schedule.rounds_per_epoch,
    )
    return Question(setting, cell["mu"], stream.mechanism.label)


def _against_rounds(axes: "Axes", question: Question, names: Sequence[str]) -> None:
    """Root mean square over the rounds of the noise in what one owner of noise releases."""
    found = costs_by_rounds(question)
    for place, name in enumerate(names):
        label = f"{name}, this run" if name == question.used else name
        axes.plot(*zip(*found[name], strict=True), **colour(place), label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_minor_formatter("")  # between powers of ten they run into each other in short runs
    axes.set_xlabel("rounds")
    axes.set_ylabel("noise in one release")


def _in_the_mean(axes: "Axes", question: Question, names: Sequence[str]) -> None:
    """The same at the run's number of rounds: a silo's release, and the mean over silos with either trust."""
    views: dict[str, tuple[dict[str, Cost], str]] = {
        "a silo's release": (_costs(question, "untrusted"), "error"),
        f"mean of {question.setting.silos}, untrusted": (_costs(question, "untrusted"), "error_in_mean"),
        f"mean of {question.setting.silos}, trusted": (_costs(question, "trusted"), "error_in_mean"),
    }
    for place, name in enumerate(names):
        values = [getattr(costs[name], kind) for costs, kind in views.values()]
        heights = np.arange(len(views)) + 0.5 * (place + 0.5) / len(names) - 0.25
        axes.plot(values, heights, **{**colour(place), "linestyle": "none", "markersize": 7})
    axes.set_yticks(range(len(views)), list(views))
    axes.set_ylim(len(views) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlabel(f"noise, {question.setting.rounds} rounds")


def _costs(question: Question, trust: str) -> dict[str, Cost]:
    return replace(question.setting, trust=trust).compare(question.mu)
