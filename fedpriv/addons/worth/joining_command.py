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
    chance_gain_rate,
    estimate_gain,
    format_error,
    format_grid_epsilon,
    scale_of,
)
from fedpriv.addons.worth.joining import JoiningResult
from fedpriv.cli.options import print_table, print_text
from fedpriv.core.figures import format_count, format_upper, format_upper_delta
from fedpriv.noise.trust import find_trust
from fedpriv.show.charts import Chart, Mark, Panel, Series
from fedpriv.show.looks import nth_look, shade
from fedpriv.show.plots import save_chart


def make_gain_chart(found: JoiningResult) -> Chart:
    """The gain over each silo alone against ε: a line a trust setting with its standard error, and zero."""
    grid, (scale, _) = found.request.epsilons, scale_of(found.metric)
    ends = [Mark(epsilon, 0.0, "gain 0") for epsilon in (grid[0], grid[-1])]
    series = [Series("each silo alone", replace(shade(5), dash=1), ends, dots=False)]
    for place, trust in enumerate(found.trusts):
        marks = []
        for epsilon, values in zip(grid, found.mean_over_silos(trust), strict=True):
            told = estimate_gain(values, found.test_train_ratio)
            error = scale * (told.error or 0.0)
            spread = f" ± {format_error(error, 1)}" if error else ", no standard error"
            tip = f"ε = {format_upper(epsilon, 3)}: {scale * told.mean:+.1f}{spread}"
            marks.append(Mark(epsilon, scale * told.mean, tip, error))
        series.append(Series(find_trust(trust).title, nth_look(place), marks))
    drawn = len(found.splits)
    splits = f"mean over {drawn} splits ± s.e." if drawn > 1 else "one split, no standard error"
    note = f"{splits}, {format_count(found.request.seeds, 'noise seed')} each"
    note += f"; ε is against the server, δ\u00a0=\u00a0{format_upper_delta(found.delta)}."
    y = "gain over each silo alone (points)" if scale > 1.0 else "gain over each silo alone"
    caption = f"Is it worth joining? {found.name}, {found.silos} silos"
    return Chart("worth", caption, "ε", y, [Panel("", series)], note, log_x=True, ticks=grid)


def print_joining(found: JoiningResult, *, as_json: bool, plot: Path | None) -> None:
    """Print the table and the sentence, or all of it as JSON; draw the picture where a file is given."""
    if as_json:
        sys.stdout.write(json.dumps(_joining_data(found)) + "\n")
    else:
        print_table(_table_lines(found))
        print_text("".join(f"{line}\n" for line in ("", *_describe_break_evens(found), *_notes(found))))
    if plot is not None:
        save_chart(make_gain_chart(found), plot)
        sys.stderr.write(f"wrote {plot}\n")


def _format_gains(values: np.ndarray[Any, Any], found: JoiningResult) -> list[str]:
    """Mean, standard error and noise of gains (splits, seeds)."""
    (scale, digits), told = scale_of(found.metric), estimate_gain(values, found.test_train_ratio)
    return [
        f"{scale * told.mean:+.{digits}f}",
        format_error(told.error and scale * told.error, digits),
        "one seed" if told.noise is None else f"{scale * told.noise:.{digits}f}",
    ]


def _table_lines(found: JoiningResult) -> list[list[str]]:
    alone, (scale, digits) = found.mean_of("alone"), scale_of(found.metric)

    def text(value: float) -> str:
        return f"{scale * value:.{digits}f}"

    head = ["trust", "ε", found.metric, "recalibrated", "gain over alone", "s.e.", "s.d. over noise", "better off"]
    head += ["by chance"] + (["personal, gain", "s.e."] if found.request.with_personal else [])
    head += ["published split"] if found.splits else []
    rows = [head, ["each silo alone, nothing released", "", text(alone), *[""] * (len(head) - 3)]]
    for name, figure in (("pooled, no noise", "pooled"), ("pooled, own intercept", "own_intercept")):
        gains = np.array([[getattr(split, figure)] for split in found.averaged_splits()])
        mean = text(float(alone + gains.mean()))
        rows.append([name, "", mean, "", *_format_gains(gains, found)[:2], *[""] * (len(head) - 6)])
    quiet = np.array([split.noiseless for split in found.averaged_splits()])
    rows.append(["no noise, same rounds", "", "", "", *_format_gains(quiet, found), *[""] * (len(head) - 7)])
    for trust in found.trusts:
        gains = found.mean_over_silos(trust)
        released, own = (
            found.mean_over_silos(trust, name).mean(axis=(1, 2)) for name in ("released", "recalibrated")
        )
        for place, epsilon in enumerate(found.request.epsilons):
            row = [
                trust,
                format_upper(epsilon, 3),
                text(released[place]),
                text(own[place]),
                *_format_gains(gains[place], found),
                *(f"{share:.0%}" for share in _better_off_shares(found, trust, place)),
            ]
            if found.request.with_personal:
                row += _format_gains(found.mean_over_silos(trust, "personal")[place], found)[:2]
            if found.splits:
                row.append(f"{scale * float(found.published.gains[trust][place].mean()):+.{digits}f}")
            rows.append(row)
    return rows


def _better_off_shares(found: JoiningResult, trust: str, place: int) -> tuple[float, float]:
    """(the share of silos that gain, the share that pure noise would show)."""
    shares = [float((split.gains[trust][place] > 0.0).mean()) for split in found.averaged_splits()]
    chances = [
        chance_gain_rate(split.tests, np.full(len(split.tests), _DISAGREEMENT_RATE))
        for split in found.averaged_splits()
    ]
    return float(np.mean(shares)), float(np.mean(chances)) if found.metric == "accuracy" else 0.5


_DISAGREEMENT_RATE = 0.1
"""The share of test records that two models of about equal accuracy decide differently; a public guess."""


def _describe_break_evens(found: JoiningResult) -> list[str]:
    said = []
    alone = "" if len(found.splits) > 1 else " (one split: no interval)"
    for trust in found.trusts:
        at = found.find_break_even(trust)
        words, where = found.verdict(at), find_trust(trust).title
        if words.startswith("never"):
            said.append(f"Joining pays at no epsilon of the grid, {where}: {words}{alone}.")
        else:
            pays = "may pay" if at.high == math.inf else "pays"  # an end beyond the grid: perhaps nowhere
            from_ = f"ε ≈ {words}".replace("≈ below", "below").replace("≈ above", "above")
            here = f" at these {found.records:,} records a silo"
            said.append(f"Joining {pays} from {from_}{here}, {where}{alone}.")
    return said


def _notes(found: JoiningResult) -> list[str]:
    splits, seeds = len(found.splits), found.request.seeds
    notes = [
        f"{format_count(splits, 'split')} of the records and {format_count(seeds, 'noise seed')} in each; s.e. "
        "with "
        "Nadeau & Bengio's correction for what splits share (test over training records: "
        f"{found.test_train_ratio:.2f}), "
        "noise apart. The interval is the 5th to 95th percentile over splits drawn again. The published split is "
        "apart."
        if splits
        else f"The published split alone, {format_count(seeds, 'noise seed')}: no standard error. --splits n "
        "draws "
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
    if found.request.with_personal:
        how = (
            "a fifth of the records that the release did not read"
            if found.published.judged == "spared"
            else "folds, which the release read, at silos that spared it fewer than 10 records"
        )
        notes.append(
            f"Personal models: λ by {how}, one standard error towards alone. Personal gains have no break-even."
        )
    if found.shares:
        notes.append(describe_budget_shares(found.shares))
    if any(find_trust(trust).masked for trust in found.trusts):
        more = (found.silos / (found.silos - 1)) ** 0.5 if found.silos > 1 else 1.0
        notes.append(
            f"With masks ε is against the server; a silo knows its own share, and against it μ is {more:.3g} "
            "times as large."
        )
    differ = f"if models differ on {_DISAGREEMENT_RATE:.0%} of the test records"
    half = "one silo in two, since losses are never alike"
    notes.append(f"Better off by chance: at a true gain of 0, {differ if found.metric == 'accuracy' else half}.")
    return [
        *notes,
        "ε of different trust settings is against different adversaries. A silo that joins has spent its "
        "records' ε.",
    ]


def describe_budget_shares(shares: Mapping[str, float]) -> str:
    """What ε means where each silo's records spend a share of it; `shares` by silo's name."""
    parts = ", ".join(f"{name} {share:g}" for name, share in shares.items())
    return f"ε is the whole budget, of which each silo's records spend a share: {parts}."


def _joining_data(found: JoiningResult) -> dict[str, Any]:
    grid, trusts = np.array(found.request.epsilons), {}
    for trust in found.trusts:
        at = found.find_break_even(trust)
        trusts[trust] = {
            "gains": [
                estimate_gain(values, found.test_train_ratio)._asdict() for values in found.mean_over_silos(trust)
            ],
            "published": found.published.gains[trust].mean(axis=(1, 2)).tolist(),
            "line": at.fitted_gains.tolist(),
            "break_even": format_grid_epsilon(at.epsilon, grid),
            "interval": [None if end is None else format_grid_epsilon(end, grid) for end in (at.low, at.high)],
            "words": found.verdict(at),
        }
        if found.request.with_personal:
            trusts[trust]["personal"] = [
                estimate_gain(values, found.test_train_ratio)._asdict()
                for values in found.mean_over_silos(trust, "personal")
            ]
    return {
        "scenario": found.name,
        "metric": found.metric,
        "epsilons": list(found.request.epsilons),
        "splits": len(found.splits),
        "seeds": found.request.seeds,
        **{name: found.mean_of(name) for name in ("alone", "pooled", "own_intercept", "noiseless")},
        "monotone": found.monotone,
        "trusts": trusts,
        "silos": found.silos,
        "shares": dict(found.shares),
    }
