"""Compare settings on held-out records, openly or privately.

A row is one point of the scenario's sweep, with a grid of values for some keys.  A setting is one combination of
these values, and a trial is a run with it that does not train on the held-out records.  An open tuning compares
settings of a row by exact scores.  A private one publishes the best of a random number of trials of a row.
"""

import json
import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.accounting.selection import PrivateSelection, RunCountDistribution
from fedpriv.addons.tune.grids import (
    GridPosition,
    HeldOut,
    Setting,
    TuningRow,
    find_positions,
    is_better,
    make_trial,
)
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.core.errors import InputError, RunError, refuse
from fedpriv.core.figures import format_upper, format_upper_delta, privacy_caveats
from fedpriv.core.files import write_json, write_text
from fedpriv.engines.table import make_engine
from fedpriv.noise.trust import RECORD
from fedpriv.plan.calibration import fit_scenario_noise
from fedpriv.plan.task import load_task
from fedpriv.scenario.data import PARTITION_KEYS
from fedpriv.scenario.load import Scenario, SweepPoint, parse_scenario
from fedpriv.scenario.published import Tuning, parse_assignment
from fedpriv.scenario.schema import Cell
from fedpriv.show.summary import cells_at_point
from fedpriv.study.results import read_results
from fedpriv.study.sweep import RunOptions, run_sweep

SETTING_AXIS = "tune.setting"
"""Axis of the trials' results: the number of a setting among those of its row."""
ACCURACY = "test_accuracy"
_NO_ACCURACY = (
    f"--private: runs are compared by {ACCURACY}, which a regression or a loss of your own does not have"
)


@dataclass(frozen=True)
class TuningChoice:
    """Choice for a row."""

    row: TuningRow
    """Row with its grid."""
    setting: Setting | None
    """Chosen setting, or None if a private choice made no run, so that the scenario's own setting stays."""
    score: float | None
    """Score of the chosen setting, with its noise after a private choice, or None if there is no setting."""
    next_best: float | None = None
    """Best score of the rejected settings, or None after a private choice or if there are none."""
    selection: PrivateSelection | None = None
    """Privacy cost of a private choice, or None after an open one."""


def tune_openly(
    scenario: Scenario,
    rows: Sequence[tuple[TuningRow, Sequence[Setting]]],
    held_out: HeldOut,
    fixed: Sequence[str],
    seeds: Sequence[int],
    metric: str,
    options: RunOptions,
    observers: Sequence[RunObserver],
) -> list[TuningChoice]:
    """Run each setting of each row on each seed, and choose the setting with the best mean score.

    Scores on the held-out records get no noise.  Of settings with the same score the first one is chosen.

    Args:
        scenario: Scenario that is tuned.
        rows: Rows with the settings to try.
        held_out: Held-out records on which settings are compared.
        fixed: "KEY=VALUE" of keys that all trials have, none of them a key of a setting.
        seeds: Seeds of the trials.
        metric: Metric that is compared.
        options: Options of the run of all trials.
        observers: Observers of this run.

    Returns:
        The choice for each row, in the order of `rows`.

    Raises:
        InputError: A trial cannot be run, evaluations do not have the metric, or a score is not finite.
        RunError: A run fails.
    """
    points = [
        SweepPoint({**row.when, SETTING_AXIS: number}, make_trial(row.cell, setting, held_out, fixed, seed))
        for row, settings in rows
        for number, setting in enumerate(settings)
        for seed in seeds
    ]
    _check_metric([point.cell for point in points], metric)
    axes = {**scenario.axes, SETTING_AXIS: list(range(max(len(settings) for _, settings in rows)))}
    # Published values, a fit of growth and an earlier tuning of the scenario do not belong to the trials.
    trials = replace(
        scenario, axes=axes, seeds=list(seeds), points=points, published=None, growth=None, tuning=None
    )
    results, choices = read_results(run_sweep(trials, options, observers)), []
    for row, settings in rows:
        cells_by_setting = (
            cells_at_point(results, {**row.when, SETTING_AXIS: number}) for number in range(len(settings))
        )
        scores = [statistics.fmean(_read_score(cell, metric) for cell in cells) for cells in cells_by_setting]
        sign = 1.0 if is_better(metric, 0.0, 1.0) else -1.0  # 1 if smaller scores are better
        best, *runners_up = sorted(range(len(settings)), key=lambda number: (sign * scores[number], number))
        choices.append(
            TuningChoice(row, settings[best], scores[best], scores[runners_up[0]] if runners_up else None)
        )
    return choices


def tune_privately(
    scenario: Scenario,
    rows: Sequence[tuple[TuningRow, Sequence[Setting]]],
    held_out: HeldOut,
    fixed: Sequence[str],
    run_count: RunCountDistribution,
    generator: np.random.Generator,
) -> list[TuningChoice]:
    """Choose for each row the best of a random number of runs.

    Each run has a setting drawn uniformly from those of its row, and its own noise.  Scores are accuracies on
    held-out records with Gaussian noise.

    Guarantee: `TuningChoice.selection` holds for the setting and the score of a row, for training records and
    held-out records alike.  A run's releases are μ-GDP for a record that it trains on, and its score is μ-GDP for
    a record that is held out, with the row's target as μ, each together with a first step of data.scale if its
    means are given.  Whether a record is held out, its silo and its batch follow from its row index, its site and
    the run's seed alone.  Nothing of another run is kept, written or told, with one exception: that a run failed
    (RunError), which no claim covers.  `generator` must be as secret as the noise.

    Args:
        scenario: Scenario that is tuned.
        rows: Rows with the settings to draw from.
        held_out: Held-out records on which settings are compared.
        fixed: "KEY=VALUE" of keys that all trials have.
        run_count: Distribution of the number of runs of a row.
        generator: Secret source of the number of runs, their settings, seeds and the noise of scores.

    Returns:
        The choice for each row, in the order of `rows`.  It has no setting if the row had no run.

    Raises:
        InputError: A row or a setting is of a kind to which the guarantee does not apply, or a trial cannot be
            run.
        RunError: A run fails.
    """
    for row, settings in rows:
        _find_target(row)
        _check_partition(row.cell)
        refuse(
            {
                _NO_ACCURACY: row.cell.model.is_regression,
                "--private: a person's records may lie on both sides of the split, so that only one record is "
                'protected; tune with privacy.unit = "record"': row.cell.privacy.protected_unit.name
                != RECORD.name,
            }
        )
        for trial in [make_trial(row.cell, setting, held_out, fixed, 0) for setting in settings]:
            _check_partition(trial)
            _check_same_promise(row.cell, trial, held_out)
            refuse(
                {
                    "--private: a score is a mean over labels, and a record with several moves it by more than "
                    "one record's share, where others leave theirs out; give each record one label": (
                        load_task(trial).label_shape
                    )
                }
            )
    # Draw the number of runs of each row and their settings, and run all of them.
    plans = [(row, settings, run_count.draw(generator)) for row, settings in rows]
    sampled_settings = [
        (row, settings[int(generator.integers(len(settings)))])
        for row, settings, runs in plans
        for _ in range(runs)
    ]
    points = [
        SweepPoint(row.when, make_trial(row.cell, setting, held_out, fixed, int(generator.integers(2**62))))
        for row, setting in sampled_settings
    ]
    cells = [point.cell for point in fit_scenario_noise(replace(scenario, points=points), {})[0].points]
    try:
        outcomes = sorted(make_engine("vectorized")(cells, RunObserver()), key=lambda outcome: outcome.index)
    except RunError:
        raise RunError(
            "--private: a run failed, as one does whose loss is not finite; nothing is published, but that it "
            "failed is not covered by any claim; leave such settings out of the grid"
        ) from None
    # Score each run with noise, and keep the best of each row.
    finished, choices = iter(outcome.cell_outcome for outcome in outcomes), []
    run_settings = iter(setting for _, setting in sampled_settings)
    for row, _, runs in plans:
        best: tuple[float, Setting] | None = None
        target = _find_target(row)
        for _ in range(runs):
            cell_outcome, setting = next(finished), next(run_settings)
            check_promise(cell_outcome, target)
            # The target pays for a first step, too, and a step whose means are given has read held-out records.
            score = noisy_score(cell_outcome, held_out.count, row.cell.budget.rounds_mu or target, generator)
            best = (score, setting) if best is None or score > best[0] else best
        choice = TuningChoice(row, None, None) if best is None else TuningChoice(row, best[1], best[0])
        choices.append(replace(choice, selection=PrivateSelection(target, run_count)))
    return choices


def _check_partition(cell: Cell) -> None:
    """Check that no contents but a record's site decide which records count, and in which silo and batch.

    One record could otherwise move others to other silos and batches, or change the number by which a score is
    divided.  Then no price of a single record would hold.

    Raises:
        InputError: The partition is made by labels, or the table drops rows by their cells, or splits them by
            cells or persons.
    """
    if cell.data.partition in PARTITION_KEYS:
        raise InputError(
            f'--private: data.partition = "{cell.data.partition}" looks at labels, so that one record moves '
            'others to other silos and batches; use "iid", or "site"'
        )
    schema = cell.data.table_schema
    if schema is not None and schema.may_zero_rows:
        key = 'missing = "drop"' if schema.missing == "drop" else "split" if schema.split else "person"
        raise InputError(
            f"--private: by table.{key} the number of held-out records that count follows from cells, and a score "
            "is divided by it; tune on a table without it, split by table.test_share"
        )


def _check_same_promise(cell: Cell, trial: Cell, held_out: HeldOut) -> None:
    """Check that a trial has the promise that is charged, and the same number of held-out records.

    Guarantee: relation, unit, target, first step, sampling and the party that adds the noise are the scenario's,
    so that a price for the scenario's promise is one for every trial; a record with one label moves a score by
    1/`held_out.count` at most.

    Raises:
        InputError: A key of the promise, or the number of held-out records, is another one.
    """
    values_by_key: dict[str, tuple[object, object]] = {
        "federation.sampling": (cell.federation.sampling, trial.federation.sampling),
        "algorithm.trust": (cell.algorithm.trust, trial.algorithm.trust),
        **{
            f"privacy.{name}": (getattr(cell.privacy, name), getattr(trial.privacy, name))
            for name in type(cell.privacy).model_fields
        },
        "data.scale": (cell.data.scale, trial.data.scale),
        "data.validation": (held_out.count, trial.data.validation),
    }
    for key, (one, other) in values_by_key.items():
        if one != other:
            raise InputError(
                f"--private: {key} = {other!r} while tuning, but the choice is charged for {one!r}: leave it out "
                "of --while-tuning, and change it with --set, or --held-out"
            )


def check_promise(finished: CellOutcome, mu: float) -> None:
    """Check that the release of a run is `mu`-GDP.

    Raises:
        InputError: The run adds no noise, its claim is no μ, or its μ is larger.
    """
    claim = compute_claim(finished.releases)
    if claim is None or claim.guarantee.mu is None or claim.guarantee.mu > mu:
        raise InputError(
            f"--private: the guarantee of this scenario's runs is not mu = {mu:g} or less, as of a curve of "
            '(ε, δ); use a public order of records, federation.sampling = "fixed"'
        )


def noisy_score(finished: CellOutcome, held_out: int, mu: float, generator: np.random.Generator) -> float:
    """Add Gaussian noise to the accuracy on held-out records.

    Guarantee: one held-out record with one label, exchanged or zeroed out, moves the accuracy by at most
    1/`held_out`, and noise of standard deviation 1/(`held_out` · μ) makes the score μ-GDP, as the run's own
    releases are.

    Raises:
        InputError: The run has no accuracy, such as that of a regression or with a loss of the caller's own.
    """
    if ACCURACY not in finished.metrics:
        raise InputError(_NO_ACCURACY)
    return finished.metrics[ACCURACY] + float(generator.standard_normal()) / (held_out * mu)


def _find_target(row: TuningRow) -> float:
    """Return the privacy parameter μ to which all runs of a row are calibrated, whatever their setting.

    Raises:
        InputError: The runs add no noise, or silos have shares of the budget.
    """
    target = row.cell.privacy.target_mu
    if row.cell.privacy.shares:
        raise InputError("--private: a score is of all silos' records, and privacy.shares gives each its own")
    if target is None:
        raise InputError('--private: privacy.mode = "none" adds no noise, and what is chosen by it is not private')
    return target


def _check_metric(cells: Sequence[Cell], metric: str) -> None:
    """Check that evaluations of the trials' cells have a metric.

    The initial model is evaluated on the held-out records, so that a wrong name is found before any training.

    Raises:
        InputError: An evaluation lacks the metric, or a cell's records or model cannot be loaded.
    """
    # Cells that differ in other sections only, such as [algorithm], are measured once.
    measured = {repr((cell.data, cell.model, cell.run)): cell for cell in cells}
    for cell in measured.values():
        task = load_task(cell)
        metrics = task.objective.evaluate(task.objective.initial(), task.test).to_metrics()
        if metric not in metrics:
            raise InputError(f"--metric {metric}: the runs have {', '.join(metrics)}")


def _read_score(cell: Mapping[str, object], metric: str) -> float:
    """Read the metric of a run's cell.

    Raises:
        InputError: The cell lacks the metric, or the metric is not finite.
    """
    value = cell.get(metric)
    if not isinstance(value, int | float) or not math.isfinite(value):
        names = ", ".join(name for name in cell if name.startswith("test_") and name != metric)
        raise InputError(
            f"--metric {metric}: a run has no finite value of it, but {names or 'no other metric'}; take another "
            "metric, or leave out the setting of that run"
        )
    return float(value)


HEADER = ("row", "setting", "score", "next best", "place in the grid")
"""Heads of the columns of the table of choices."""


def format_tuned_scenario(
    text: str, choices: Sequence[TuningChoice], tuned: Tuning, overrides: Sequence[str], source: str
) -> tuple[str, Scenario]:
    """Add a rule for each choice with a setting, and [tuned], to the scenario file `text`.

    A rule [[where]] has the keys and values of a row under `when`, and the chosen setting under `set`.  Overrides
    are not written, but apply to the scenario that is returned.

    Args:
        text: Content of the scenario file.
        choices: Choices of the rows.
        tuned: Content of [tuned], and of its rows.
        overrides: "KEY=VALUE" with which the new scenario is parsed.
        source: Name of the file in error messages.

    Returns:
        The new content, and its scenario.

    Raises:
        InputError: The new content is no scenario.
    """
    blocks = [
        text.rstrip("\n"),
        "",
        f"# Settings by `fedpriv tune`, {tuned.settings if tuned.law == 'none' else 'a random number of runs'} "
        f"for every row, on {tuned.held_out} held-out records.",
    ]
    for choice in choices:
        if choice.setting is not None:
            blocks += [
                "[[where]]",
                f"when = {_format_inline_table(choice.row.when)}",
                f"set = {_format_inline_table(choice.setting)}",
                "",
            ]
    tuned_keys = tuned.model_dump(mode="json", exclude_none=True, exclude={"rows"})
    blocks += ["[tuned]", *(f"{key} = {_format_value(value)}" for key, value in tuned_keys.items())]
    for row in tuned.rows:
        mu = "" if row.mu is None else f"\nmu = {_format_value(row.mu)}"
        blocks += ["", "[[tuned.rows]]", f"when = {_format_inline_table(row.when)}{mu}"]
    new_text = "\n".join(blocks) + "\n"
    try:
        return new_text, parse_scenario(tomllib.loads(new_text), source, overrides)
    except (tomllib.TOMLDecodeError, InputError) as error:
        raise InputError(f"{source}: the chosen settings cannot be written into it: {error}") from None


def drop_chosen_keys(overrides: Sequence[str], choices: Sequence[TuningChoice]) -> list[str]:
    """Return the "KEY=VALUE" of keys for which nothing was chosen."""
    chosen_keys = {key for choice in choices for key in choice.setting or {}}
    return [override for override in overrides if parse_assignment(override)[0] not in chosen_keys]


def write_tuning(
    out: Path, text: str, choices: Sequence[TuningChoice], tuned: Tuning, held_out: HeldOut, delta: float
) -> None:
    """Write scenario.toml, tuning.json and tuning.md into `out`."""
    write_text(out / "scenario.toml", text)
    write_text(out / "tuning.md", render_markdown(choices, held_out, tuned, delta))
    write_json(
        out / "tuning.json",
        {
            "format": 1,
            "tuned": tuned.model_dump(mode="json"),
            "held_out": {
                "count": held_out.count,
                "of": held_out.total_count,
                "by_silo": held_out.silo_counts_by_run[0],
                "words": held_out.description,
            },
            "choices": [_choice_data(choice, delta) for choice in choices],
        },
    )


def table_lines(choices: Sequence[TuningChoice]) -> list[tuple[str, ...]]:
    """Return a line for each row, with the columns of `HEADER`."""
    return [
        (
            ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in choice.row.when.items()),
            "the scenario's own"
            if choice.setting is None
            else ", ".join(f"{key.removeprefix('algorithm.')} {value}" for key, value in choice.setting.items()),
            _format_score(choice.score),
            _format_score(choice.next_best),
            ", ".join(f"{position.number} of {position.count}" for position in _find_positions(choice)) or "-",
        )
        for choice in choices
    ]


def warn_of_edges(choices: Sequence[TuningChoice]) -> list[str]:
    """Return a warning for each key and chosen number at an end of the key's values."""
    at_edges = [position for choice in choices for position in _find_positions(choice) if position.is_edge]
    counts = Counter((position.key, position.value) for position in at_edges)
    return [
        f"{key} = {value}: at the edge of its grid in {count} row{'s' if count > 1 else ''}; widen the grid there"
        for (key, value), count in counts.items()
    ]


def describe_costs(choices: Sequence[TuningChoice], delta: float) -> list[str]:
    """Describe the cost of each private choice, alone and with one run of its row, and caveats.

    Rows of the same cost have one sentence.  If no choice is private, the text says that no ε covers them.
    """
    if all(choice.selection is None for choice in choices):
        return [
            "The choice is not private: it compared runs on held-out records without noise, and no ε covers it. "
            "Claims of runs with these settings hold as if the settings had been given without a look at records."
        ]
    costs = [
        (
            selection.mu,
            selection.run_count.description,
            selection.epsilon_of(delta),
            PrivateSelection(selection.mu, selection.run_count, selection.mu).epsilon_of(delta),
        )
        for selection in (choice.selection for choice in choices)
        if selection is not None
    ]
    return [
        f"The best of {runs}, each {format_upper(mu)}-GDP: the choice of one row costs ε = {format_upper(single)} "
        f"at delta = {format_upper_delta(delta)}, the choice and a run with it ε = {format_upper(total)}."
        for mu, runs, single, total in dict.fromkeys(costs)
    ] + privacy_caveats(max((total for *_, total in costs), default=0.0), delta)


def render_markdown(choices: Sequence[TuningChoice], held_out: HeldOut, tuned: Tuning, delta: float) -> str:
    """Render the table as Markdown, with its held-out records, costs and warnings."""
    rows = [HEADER, tuple("---" for _ in HEADER), *table_lines(choices)]
    blocks = [
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        f"{tuned.settings} settings for every row, by {tuned.metric}; {held_out.description}."
        if tuned.law == "none"
        else f"A random number of runs for every row, by {tuned.metric}; {held_out.description}.",
        *describe_costs(choices, delta),
        *warn_of_edges(choices),
    ]
    return "\n\n".join(blocks) + "\n"


def _choice_data(choice: TuningChoice, delta: float) -> dict[str, Any]:
    return {
        "when": dict(choice.row.when),
        "set": None if choice.setting is None else dict(choice.setting),
        "score": choice.score,
        "next_best": choice.next_best,
        "grid": {key: list(values) for key, values in choice.row.grid.items()},
        "edge": [position.key for position in _find_positions(choice) if position.is_edge],
        "delta": delta,
        "epsilon": None if choice.selection is None else choice.selection.epsilon_of(delta),
    }


def _find_positions(choice: TuningChoice) -> list[GridPosition]:
    return [] if choice.setting is None else find_positions(choice.row.grid, choice.setting)


def _format_score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _format_inline_table(table: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{json.dumps(key)} = {_format_value(value)}" for key, value in table.items()) + " }"


def _format_value(value: Any) -> str:
    """Format a number, text, boolean or list as TOML, for which its JSON is valid."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
