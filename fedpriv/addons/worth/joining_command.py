"""Output of `fedpriv worth SCENARIO --splits n`: table, chart and break-even of each trust setting.

The chart shows the mean gain over the local models against ε.  A local model is fitted by one silo to its own
records.  A recalibrated model is a released one whose intercepts and scale a silo has fitted to its records.  A
split is a division of the records into training and test records: the published one is the scenario's own, and
others are drawn.  The break-even is the ε from which the mean gain stays at or above 0.  If settings are chosen at
each ε, a non-decreasing curve that is fitted to the mean gains takes their place.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit as t_quantile

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


def make_gain_chart(result: JoiningResult) -> Chart:
    """Make the chart of the gain over the local models against ε, with a line for each trust setting.

    Gains are means over splits, seeds and silos, in percentage points for accuracies, and else in the metric.  A
    dashed line at 0 stands for the local models.
    """
    grid, (scale, digits) = result.request.epsilons, scale_of(result.metric)
    ends = [Mark(epsilon, 0.0, "gain 0") for epsilon in (grid[0], grid[-1])]
    series = [Series("each silo alone", replace(shade(5), dash=1), ends, dots=False)]
    for index, trust in enumerate(result.trusts):
        marks = []
        for epsilon, values in zip(grid, result.mean_over_silos(trust), strict=True):
            estimate = estimate_gain(values, result.test_train_ratio)
            error = scale * (estimate.error or 0.0)
            spread = f" ± {format_error(error, digits)}" if error else ", no standard error"
            tip = f"ε = {format_upper(epsilon, 3)}: {scale * estimate.mean:+.{digits}f}{spread}"
            marks.append(Mark(epsilon, scale * estimate.mean, tip, error))
        series.append(Series(find_trust(trust).title, nth_look(index), marks))
    split_count = len(result.splits)
    splits = f"mean over {split_count} splits ± s.e." if split_count > 1 else "one split, no standard error"
    note = f"{splits}, {format_count(result.request.seeds, 'noise seed')} each"
    note += f"; each trust setting has its own adversary; δ\u00a0=\u00a0{format_upper_delta(result.delta)}."
    y = "gain over each silo alone (points)" if scale > 1.0 else "gain over each silo alone"
    caption = f"Is it worth joining? {result.name}, {result.silos} silos"
    return Chart("worth", caption, "ε", y, [Panel("", series)], note, log_x=True, ticks=grid)


def print_joining(result: JoiningResult, *, as_json: bool, plot: Path | None) -> None:
    """Print the table and the conclusions, or the result as JSON, and draw the chart if a file is given.

    Raises:
        InputError: The chart cannot be drawn into the file `plot`.
    """
    if as_json:
        sys.stdout.write(json.dumps(_joining_data(result)) + "\n")
    else:
        print_table(_table_lines(result))
        print_text("".join(f"{line}\n" for line in ("", *_describe_break_evens(result), *_notes(result))))
    if plot is not None:
        save_chart(make_gain_chart(result), plot)
        sys.stderr.write(f"wrote {plot}\n")


def _format_gains(values: np.ndarray[Any, Any], result: JoiningResult) -> list[str]:
    """Format mean, standard error, 95 % interval and deviation over noise seeds of gains (splits, seeds)."""
    (scale, digits), estimate = scale_of(result.metric), estimate_gain(values, result.test_train_ratio)
    interval = estimate.interval if estimate.interval and estimate.error else ()
    return [
        f"{scale * estimate.mean:+.{digits}f}",
        format_error(estimate.error and scale * estimate.error, digits),
        " to ".join(f"{scale * end:+.{digits}f}" for end in interval) or "none",
        "one seed" if estimate.noise is None else f"{scale * estimate.noise:.{digits}f}",
    ]


def _table_lines(result: JoiningResult) -> list[list[str]]:
    """Return the lines of the table: the references, and one line for each trust setting and ε.

    References are the local models, the pooled model without noise, that model after silos fit its intercepts and
    scale to their records, and the rounds without noise.  The score of a pooled model is the mean score of the
    local models plus its gain, which is that of the first seed if seeds give silos other records.  A line has the
    scores of the released and the recalibrated models, and the gain over the local models with its standard error,
    95 % interval and standard deviation over noise seeds.  Then come the fraction of silos that gain, and the
    fraction that would gain by chance.  With personal models a line also has their gain with its standard error,
    and with drawn splits the gain in the published split.
    """
    local_score, (scale, digits) = result.mean_of("alone"), scale_of(result.metric)

    def text(value: float) -> str:
        return f"{scale * value:.{digits}f}"

    head = [
        "trust",
        "ε",
        result.metric,
        "recalibrated",
        "gain over alone",
        "s.e.",
        "95 % interval",
        "s.d. over noise",
        "better off",
    ]
    head += ["by chance"] + (["personal, gain", "s.e."] if result.request.with_personal else [])
    head += ["published split"] if result.splits else []
    rows = [head, ["each silo alone, nothing released", "", text(local_score), *[""] * (len(head) - 3)]]
    for name, figure in (("pooled, no noise", "pooled"), ("pooled, own intercept", "own_intercept")):
        gains = np.array([[getattr(split, figure)] for split in result.averaged_splits()])  # (splits, 1)
        mean = text(float(local_score + gains.mean()))
        rows.append([name, "", mean, "", *_format_gains(gains, result)[:3], *[""] * (len(head) - 7)])
    noiseless_gains = np.array([split.noiseless for split in result.averaged_splits()])  # (splits, seeds)
    rows.append(
        ["no noise, same rounds", "", "", "", *_format_gains(noiseless_gains, result), *[""] * (len(head) - 8)]
    )
    for trust in result.trusts:
        gains = result.mean_over_silos(trust)  # (ε, splits, seeds)
        released, recalibrated = (
            result.mean_over_silos(trust, name).mean(axis=(1, 2)) for name in ("released", "recalibrated")
        )
        for index, epsilon in enumerate(result.request.epsilons):
            row = [
                trust,
                format_upper(epsilon, 3),
                text(released[index]),
                text(recalibrated[index]),
                *_format_gains(gains[index], result),
                *(f"{share:.0%}" for share in _better_off_shares(result, trust, index)),
            ]
            if result.request.with_personal:
                row += _format_gains(result.mean_over_silos(trust, "personal")[index], result)[:2]
            if result.splits:
                row.append(f"{scale * float(result.published.gains[trust][index].mean()):+.{digits}f}")
            rows.append(row)
    return rows


def _better_off_shares(result: JoiningResult, trust: str, index: int) -> tuple[float, float]:
    """Return the fraction of silos that gain at an ε, by its index, and the fraction that would by chance.

    The first one is a mean over splits and seeds.  The second one is a half for losses, which are hardly ever
    equal.
    """
    shares = [float((split.gains[trust][index] > 0.0).mean()) for split in result.averaged_splits()]
    chances = [
        chance_gain_rate(split.tests, np.full(len(split.tests), _DISAGREEMENT_RATE))
        for split in result.averaged_splits()
    ]
    return float(np.mean(shares)), float(np.mean(chances)) if result.metric == "accuracy" else 0.5


_DISAGREEMENT_RATE = 0.1
"""Public guess of the fraction of test records on which two models of similar accuracy differ."""


def _describe_break_evens(result: JoiningResult) -> list[str]:
    """Describe the break-even of each trust setting, the ε from which joining pays, in a text each.

    Joining "may pay" if the break-even or the upper end of its interval is above the grid.  If it never pays
    (`JoiningResult.verdict`), the text has the gain at the largest ε of the grid.
    """
    sentences = []
    suffix = "" if len(result.splits) > 1 else " (one split: no interval)"
    for trust in result.trusts:
        break_even = result.find_break_even(trust)
        description, title = result.verdict(break_even), find_trust(trust).title
        if description.startswith("never"):
            grid, (scale, digits) = result.request.epsilons, scale_of(result.metric)
            gain = scale * float(result.mean_over_silos(trust)[-1].mean())
            sentences.append(
                f"Joining pays at no ε from {format_upper(grid[0], 3)} to {format_upper(grid[-1], 3)}, {title}: "
                f"{description}{suffix}. At the largest the gain is {gain:+.{digits}f} "
                f"{'points of' if scale > 1.0 else 'in'} {result.metric}."
            )
        else:
            # An estimate or interval that ends beyond the grid does not exclude that joining pays nowhere.
            verb = "may pay" if math.inf in (break_even.epsilon, break_even.high) else "pays"
            lowest_epsilon = f"ε ≈ {description}".replace("≈ below", "below").replace("≈ above", "above")
            size_note = f" at these {result.records:,} records a silo"
            sentences.append(f"Joining {verb} from {lowest_epsilon}{size_note}, {title}{suffix}.")
    return sentences


def _notes(result: JoiningResult) -> list[str]:
    """Return the notes below the table, which say how its figures were computed and what ε means."""
    splits, seeds = len(result.splits), result.request.seeds
    notes = [
        f"{format_count(splits, 'split')} of the records and {format_count(seeds, 'noise seed')}, the same in "
        "each split. The s.e. has a part for splits, with Nadeau & Bengio's correction for the records that they "
        f"share (test over training records: {result.test_train_ratio:.2f}), and a part for seeds, which more "
        f"splits do not make smaller. Student's t of that part is {float(t_quantile(seeds - 1, 0.975)):.3g} in "
        "the 95 % interval: more --seeds narrow it. The range of ε is of 90 %, by both parts. No mean contains "
        "the published split."
        if splits
        else f"The published split alone, {format_count(seeds, 'noise seed')}: no standard error. "
        "--splits n draws others.",
        *(["One split has no standard error and no interval: --splits n draws more."] * (splits == 1)),
        "Settings were chosen in each split, on a fifth of its training records, among those of this ε and of "
        "smaller ones: the fitted line never falls. The choice reads records, and no ε accounts for it."
        if result.monotone
        else "The settings are the scenario's, not chosen in each split: the line may fall, and if they were "
        "chosen on the published split they have seen test records of the others.",
    ]
    if result.request.with_personal:
        method = (
            "a fifth of the records, which the release did not read"
            if all(split.judged == "spared" for split in (result.published, *result.splits))
            else "folds of records that the release read, at silos with fewer than 10 records that it did not read"
        )
        notes.append(
            f"Personal models: λ by {method}, one standard error towards alone. Personal gains have no break-even."
        )
    if result.shares:
        notes.append(describe_budget_shares(result.shares))
    if any(find_trust(trust).masked for trust in result.trusts):
        # A silo can subtract its own noise, which leaves the noise of the others, M - 1 of M equal parts.
        factor = (result.silos / (result.silos - 1)) ** 0.5 if result.silos > 1 else 1.0
        notes.append(
            "With masks ε is against the server; "
            f"a silo knows its own share, and against it μ is {format_upper(factor, 3)} times as large."
        )
    by_accuracy = f"if models differ on {_DISAGREEMENT_RATE:.0%} of the test records"
    by_loss = "one silo in two, since losses are never alike"
    notes.append(
        f"Better off by chance: at a true gain of 0, {by_accuracy if result.metric == 'accuracy' else by_loss}."
    )
    return [
        *notes,
        "ε of different trust settings is against different adversaries. "
        "A silo that joins has spent its records' ε.",
    ]


def describe_budget_shares(shares: Mapping[str, float]) -> str:
    """Describe the meaning of ε in a sentence, if the records of silos spend `shares` of it, by name."""
    parts = ", ".join(f"{name} {share:g}" for name, share in shares.items())
    return f"ε is the whole budget, of which each silo's records spend a share: {parts}."


def _joining_data(result: JoiningResult) -> dict[str, Any]:
    """Return the result as plain data for JSON."""
    grid, trusts = np.array(result.request.epsilons), {}
    for trust in result.trusts:
        break_even = result.find_break_even(trust)
        trusts[trust] = {
            "gains": [
                estimate_gain(values, result.test_train_ratio)._asdict()
                for values in result.mean_over_silos(trust)
            ],
            "published": result.published.gains[trust].mean(axis=(1, 2)).tolist(),  # over seeds and silos
            "line": break_even.fitted_gains.tolist(),
            "break_even": format_grid_epsilon(break_even.epsilon, grid),
            "interval": [
                None if end is None else format_grid_epsilon(end, grid)
                for end in (break_even.low, break_even.high)
            ],
            "words": result.verdict(break_even),
        }
        if result.request.with_personal:
            trusts[trust]["personal"] = [
                estimate_gain(values, result.test_train_ratio)._asdict()
                for values in result.mean_over_silos(trust, "personal")
            ]
    return {
        "scenario": result.name,
        "metric": result.metric,
        "epsilons": list(result.request.epsilons),
        "splits": len(result.splits),
        "seeds": result.request.seeds,
        **{name: result.mean_of(name) for name in ("alone", "pooled", "own_intercept", "noiseless")},
        "monotone": result.monotone,
        "trusts": trusts,
        "silos": result.silos,
        "shares": dict(result.shares),
    }
