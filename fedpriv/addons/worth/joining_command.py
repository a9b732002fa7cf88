"""`fedpriv worth SCENARIO --splits n`: gains against ε, the break-even of each trust setting, and a picture.

The chart of `fedpriv worth`: the gain over each silo alone against ε, for the two pens of all charts.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.addons.worth.break_even import (
    better_by_chance,
    epsilon_words,
    error_words,
    estimate,
    scale_of,
)
from fedpriv.addons.worth.joining import Joining
from fedpriv.cli.options import print_table, say
from fedpriv.core.figures import counted, delta_figure, upper_figure
from fedpriv.noise.trust import trust_named
from fedpriv.show.charts import Chart, Mark, Panel, Series
from fedpriv.show.looks import nth_look, shade
from fedpriv.show.plots import save_chart


def gain_chart(found: Joining) -> Chart:
    """The gain over each silo alone against ε: a line a trust setting with its standard error, and zero."""
    grid, (scale, _) = found.question.epsilons, scale_of(found.metric)
    ends = [Mark(epsilon, 0.0, "gain 0") for epsilon in (grid[0], grid[-1])]
    series = [Series("each silo alone", replace(shade(5), dash=1), ends, dots=False)]
    for place, trust in enumerate(found.trusts):
        marks = []
        for epsilon, values in zip(grid, found.along(trust), strict=True):
            told = estimate(values, found.ratio)
            error = scale * (told.error or 0.0)
            spread = f" ± {error_words(error, 1)}" if error else ", no standard error"
            tip = f"ε = {upper_figure(epsilon, 3)}: {scale * told.mean:+.1f}{spread}"
            marks.append(Mark(epsilon, scale * told.mean, tip, error))
        series.append(Series(trust_named(trust).title, nth_look(place), marks))
    drawn = len(found.splits)
    splits = f"mean over {drawn} splits ± s.e." if drawn > 1 else "one split, no standard error"
    note = f"{splits}, {counted(found.question.seeds, 'noise seed')} each"
    note += f"; ε is against the server, δ\u00a0=\u00a0{delta_figure(found.delta)}."
    y = "gain over each silo alone (points)" if scale > 1.0 else "gain over each silo alone"
    caption = f"Is it worth joining? {found.name}, {found.silos} silos"
    return Chart("worth", caption, "ε", y, [Panel("", series)], note, log_x=True, ticks=grid)


def print_joining(found: Joining, *, as_json: bool, plot: Path | None) -> None:
    """Print the table and the sentence, or all of it as JSON; draw the picture where a file is given."""
    if as_json:
        sys.stdout.write(json.dumps(_tree(found)) + "\n")
    else:
        print_table(_table(found))
        say("".join(f"{line}\n" for line in ("", *_sentences(found), *_notes(found))))
    if plot is not None:
        save_chart(gain_chart(found), plot)
        sys.stderr.write(f"wrote {plot}\n")


def _figures(values: np.ndarray[Any, Any], found: Joining) -> list[str]:
    """Mean, standard error and noise of gains (splits, seeds)."""
    (scale, digits), told = scale_of(found.metric), estimate(values, found.ratio)
    return [
        f"{scale * told.mean:+.{digits}f}",
        error_words(told.error and scale * told.error, digits),
        "one seed" if told.noise is None else f"{scale * told.noise:.{digits}f}",
    ]


def _table(found: Joining) -> list[list[str]]:
    alone, (scale, digits) = found.mean_of("alone"), scale_of(found.metric)

    def text(value: float) -> str:
        return f"{scale * value:.{digits}f}"

    head = ["trust", "ε", found.metric, "recalibrated", "gain over alone", "s.e.", "s.d. over noise", "better off"]
    head += ["by chance"] + (["personal, gain", "s.e."] if found.question.own else [])
    head += ["published split"] if found.splits else []
    rows = [head, ["each silo alone, nothing released", "", text(alone), *[""] * (len(head) - 3)]]
    for name, figure in (("pooled, no noise", "pooled"), ("pooled, own intercept", "own_intercept")):
        gains = np.array([[getattr(split, figure)] for split in found.shown()])
        mean = text(float(alone + gains.mean()))
        rows.append([name, "", mean, "", *_figures(gains, found)[:2], *[""] * (len(head) - 6)])
    quiet = np.array([split.noiseless for split in found.shown()])
    rows.append(["no noise, same rounds", "", "", "", *_figures(quiet, found), *[""] * (len(head) - 7)])
    for trust in found.trusts:
        gains = found.along(trust)
        released, own = (found.along(trust, name).mean(axis=(1, 2)) for name in ("released", "recalibrated"))
        for place, epsilon in enumerate(found.question.epsilons):
            row = [
                trust,
                upper_figure(epsilon, 3),
                text(released[place]),
                text(own[place]),
                *_figures(gains[place], found),
                *(f"{share:.0%}" for share in _better(found, trust, place)),
            ]
            if found.question.own:
                row += _figures(found.along(trust, "personal")[place], found)[:2]
            if found.splits:
                row.append(f"{scale * float(found.published.gains[trust][place].mean()):+.{digits}f}")
            rows.append(row)
    return rows


def _better(found: Joining, trust: str, place: int) -> tuple[float, float]:
    """(the share of silos that gain, the share that pure noise would show)."""
    shares = [float((split.gains[trust][place] > 0.0).mean()) for split in found.shown()]
    chances = [better_by_chance(split.tests, np.full(len(split.tests), _DIFFERING)) for split in found.shown()]
    return float(np.mean(shares)), float(np.mean(chances)) if found.metric == "accuracy" else 0.5


_DIFFERING = 0.1
"""The share of test records that two models of about equal accuracy decide differently; a public guess."""


def _sentences(found: Joining) -> list[str]:
    said = []
    alone = "" if len(found.splits) > 1 else " (one split: no interval)"
    for trust in found.trusts:
        at = found.break_even(trust)
        words, where = found.verdict(at), trust_named(trust).title
        if words.startswith("never"):
            said.append(f"Joining pays at no epsilon of the grid, {where}: {words}{alone}.")
        else:
            pays = "may pay" if at.high == math.inf else "pays"  # an end beyond the grid: perhaps nowhere
            from_ = f"ε ≈ {words}".replace("≈ below", "below").replace("≈ above", "above")
            here = f" at these {found.records:,} records a silo"
            said.append(f"Joining {pays} from {from_}{here}, {where}{alone}.")
    return said


def _notes(found: Joining) -> list[str]:
    splits, seeds = len(found.splits), found.question.seeds
    notes = [
        f"{counted(splits, 'split')} of the records and {counted(seeds, 'noise seed')} in each; s.e. with "
        f"Nadeau & Bengio's correction for what splits share (test over training records: {found.ratio:.2f}), "
        "noise apart. The interval is the 5th to 95th percentile over splits drawn again. The published split is "
        "apart."
        if splits
        else f"The published split alone, {counted(seeds, 'noise seed')}: no standard error. --splits n draws "
        "others."
    ]
    if splits == 1:
        notes.append("One split tells no standard error and no interval: --splits n draws more.")
    if splits > 1 and seeds == 1:
        notes.append("One noise seed: how far noise alone moves a gain is not told apart from the splits.")
    notes.append(
        "Settings were chosen in each split, on a fifth of its training records, among those of this ε and of "
        "smaller ones: the fitted line never falls. That choice is not accounted for."
        if found.monotone
        else "The settings are the scenario's, not chosen in each split: the line may fall, and if they were "
        "chosen on the published split they have seen test records of the others."
    )
    if found.question.own:
        how = (
            "a fifth of the records that the release did not read"
            if found.published.judged == "spared"
            else "folds, which the release read, at silos that spared it fewer than 10 records"
        )
        notes.append(
            f"Personal models: λ by {how}, one standard error towards alone. Personal gains have no break-even."
        )
    if found.shares:
        notes.append(shares_note(found.shares))
    if any(trust_named(trust).masked for trust in found.trusts):
        more = (found.silos / (found.silos - 1)) ** 0.5 if found.silos > 1 else 1.0
        notes.append(
            f"With masks ε is against the server; a silo knows its own share, and against it μ is {more:.3g} "
            "times as large."
        )
    differ = f"if models differ on {_DIFFERING:.0%} of the test records"
    half = "one silo in two, since losses are never alike"
    notes.append(f"Better off by chance: at a true gain of 0, {differ if found.metric == 'accuracy' else half}.")
    return [
        *notes,
        "ε of different trust settings is against different adversaries. A silo that joins has spent its "
        "records' ε.",
    ]


def shares_note(shares: Mapping[str, float]) -> str:
    """What ε means where each silo's records spend a share of it; `shares` by silo's name."""
    parts = ", ".join(f"{name} {share:g}" for name, share in shares.items())
    return f"ε is the whole budget, of which each silo's records spend a share: {parts}."


def _tree(found: Joining) -> dict[str, Any]:
    grid, trusts = np.array(found.question.epsilons), {}
    for trust in found.trusts:
        at = found.break_even(trust)
        trusts[trust] = {
            "gains": [estimate(values, found.ratio)._asdict() for values in found.along(trust)],
            "published": found.published.gains[trust].mean(axis=(1, 2)).tolist(),
            "line": at.line.tolist(),
            "break_even": epsilon_words(at.epsilon, grid),
            "interval": [None if end is None else epsilon_words(end, grid) for end in (at.low, at.high)],
            "words": found.verdict(at),
        }
        if found.question.own:
            trusts[trust]["personal"] = [
                estimate(values, found.ratio)._asdict() for values in found.along(trust, "personal")
            ]
    return {
        "scenario": found.name,
        "metric": found.metric,
        "epsilons": list(found.question.epsilons),
        "splits": len(found.splits),
        "seeds": found.question.seeds,
        **{name: found.mean_of(name) for name in ("alone", "pooled", "own_intercept", "noiseless")},
        "monotone": found.monotone,
        "trusts": trusts,
        "silos": found.silos,
        "shares": dict(found.shares),
    }
