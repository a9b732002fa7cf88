"""Compare settings on held-out records: all of them, openly, or the best of a random number, privately.

A tuning leaves the scenario with the chosen settings, and a table of where they stand in the grid.
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
from fedpriv.core.errors import InputError, RunError
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
from fedpriv.study.results import read_results
from fedpriv.study.sweep import RunOptions, run_sweep

SETTING_AXIS = "tune.setting"
"""The axis of the trials' results: a setting's number among those of its row."""
ACCURACY = "test_accuracy"
_NO_ACCURACY = f"--private: runs are compared by {ACCURACY}, which a regression does not have"


@dataclass(frozen=True)
class TuningChoice:
    """Choice for a row."""

    row: TuningRow
    setting: Setting | None
    """None where a private choice tried nothing: the scenario's own stays."""
    score: float | None
    next_best: float | None = None
    """Of the others; a private choice tells nothing of them."""
    selection: PrivateSelection | None = None
    """What a private choice costs."""


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
    """Run every setting of every row on every seed, as one run with all its results; choose the best mean.

    InputError, before they start, for a metric that the runs do not have.  The results are functions of the
    records without noise.
    """
    points = [
        SweepPoint({**row.when, SETTING_AXIS: number}, make_trial(row.cell, setting, held_out, fixed, seed))
        for row, settings in rows
        for number, setting in enumerate(settings)
        for seed in seeds
    ]
    _check_metric([point.cell for point in points], metric)
    axes = {**scenario.axes, SETTING_AXIS: list(range(max(len(settings) for _, settings in rows)))}
    trials = replace(
        scenario, axes=axes, seeds=list(seeds), points=points, published=None, growth=None, tuning=None
    )
    cells = iter(read_results(run_sweep(trials, options, observers)).cells)
    choices = []
    for row, settings in rows:
        scores = [statistics.fmean(_read_score(next(cells), metric) for _ in seeds) for _ in settings]
        sign = 1.0 if is_better(metric, 0.0, 1.0) else -1.0
        best, *others = sorted(range(len(settings)), key=lambda number: (sign * scores[number], number))
        choices.append(TuningChoice(row, settings[best], scores[best], scores[others[0]] if others else None))
    return choices


def tune_privately(
    scenario: Scenario,
    rows: Sequence[tuple[TuningRow, Sequence[Setting]]],
    held_out: HeldOut,
    fixed: Sequence[str],
    law: RunCountDistribution,
    generator: np.random.Generator,
) -> list[TuningChoice]:
    """For every row the best of K runs, K from `law`, each with a setting drawn from the row's, and its own noise.

    Scores are accuracies on held-out records with Gaussian noise.  InputError for runs whose guarantee is no μ of
    one record, and, before any of them, for a setting with another promise than the scenario's; RunError if one
    fails.

    Guarantee: `TuningChoice.selection` holds for the setting and the score of a row, for training records and
    held-out records alike: a run's releases are μ-GDP for a record that it trains on, its score is μ-GDP for a
    record that is held out, and which of both a record is, and with which silo and in which batch, follows from
    its place alone (or its site).  Nothing of another run is kept, written or told.  `generator` must be as
    secret as the noise.
    """
    for row, settings in rows:
        _find_target(row)
        _check_partition(row.cell)
        if row.cell.model.is_regression:
            raise InputError(_NO_ACCURACY)
        if row.cell.privacy.protected_unit.name != RECORD.name:
            raise InputError(
                "--private: a person's records may lie on both sides of the split, so that only one record is "
                'protected; tune with privacy.unit = "record"'
            )
        for tried in [make_trial(row.cell, setting, held_out, fixed, 0) for setting in settings]:
            _check_partition(tried)
            _check_same_promise(row.cell, tried, held_out)
    plans = [(row, settings, law.draw(generator)) for row, settings in rows]
    drawn = [
        (row, settings[int(generator.integers(len(settings)))])
        for row, settings, runs in plans
        for _ in range(runs)
    ]
    points = [
        SweepPoint(row.when, make_trial(row.cell, setting, held_out, fixed, int(generator.integers(2**62))))
        for row, setting in drawn
    ]
    cells = [point.cell for point in fit_scenario_noise(replace(scenario, points=points), {})[0].points]
    try:
        outcomes = sorted(make_engine("vectorized")(cells, RunObserver()), key=lambda outcome: outcome.index)
    except RunError:
        raise RunError(
            "--private: a run failed, as one does whose loss is not finite; nothing is published, but that it "
            "failed is not covered by any claim; leave such settings out of the grid"
        ) from None
    finished, choices = iter(outcome.cell_outcome for outcome in outcomes), []
    settings_drawn = iter(setting for _, setting in drawn)
    for row, _, runs in plans:
        best: tuple[float, Setting] | None = None
        target = _find_target(row)
        for _ in range(runs):
            one, setting = next(finished), next(settings_drawn)
            check_promise(one, target)
            score = noisy_score(one, held_out.count, target, generator)
            best = (score, setting) if best is None or score > best[0] else best
        chosen = TuningChoice(row, None, None) if best is None else TuningChoice(row, best[1], best[0])
        choices.append(replace(chosen, selection=PrivateSelection(target, law)))
    return choices


def _check_partition(cell: Cell) -> None:
    """Refuse records that sit, or count, by their contents: one would move others, or the score."""
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


def _check_same_promise(given: Cell, tried: Cell, held_out: HeldOut) -> None:
    """InputError unless a trial has the promise that is charged for, and the held-out records that are counted.

    Guarantee: relation, unit, target and who adds the noise are the scenario's, so that a price for the
    scenario's promise is one for every trial; a record moves a score by 1/`held_out.count` at most.
    """
    kept: dict[str, tuple[object, object]] = {
        "federation.sampling": (given.federation.sampling, tried.federation.sampling),
        "algorithm.trust": (given.algorithm.trust, tried.algorithm.trust),
        **{
            f"privacy.{name}": (getattr(given.privacy, name), getattr(tried.privacy, name))
            for name in type(given.privacy).model_fields
        },
        "data.validation": (held_out.count, tried.data.validation),
    }
    for key, (one, other) in kept.items():
        if one != other:
            raise InputError(
                f"--private: {key} = {other!r} while tuning, but the choice is charged for {one!r}: leave it out "
                "of --while-tuning, and change it with --set, or --held-out"
            )


def check_promise(finished: CellOutcome, mu: float) -> None:
    """InputError unless what a run released is `mu`-GDP."""
    claim = compute_claim(finished.releases)
    if claim is None or claim.guarantee.mu is None or claim.guarantee.mu > mu:
        raise InputError(
            "--private: the guarantee of this scenario's runs is a curve of (ε, δ), no mu; use a public order of "
            'records, federation.sampling = "fixed"'
        )


def noisy_score(finished: CellOutcome, held_out: int, mu: float, generator: np.random.Generator) -> float:
    """Add Gaussian noise to the accuracy on `held_out` records; InputError for a regression.

    Guarantee: one held-out record, exchanged or zeroed out, moves the accuracy by at most 1/`held_out`, and noise
    of standard deviation 1/(`held_out` · μ) makes the score μ-GDP, as the run's own releases are.
    """
    if ACCURACY not in finished.metrics:
        raise InputError(_NO_ACCURACY)
    return finished.metrics[ACCURACY] + float(generator.standard_normal()) / (held_out * mu)


def _find_target(row: TuningRow) -> float:
    """Find the μ that every run of a row is calibrated to, whatever its setting."""
    target = row.cell.privacy.target_mu
    if row.cell.privacy.shares:
        raise InputError("--private: a score is of all silos' records, and privacy.shares gives each its own")
    if target is None:
        raise InputError('--private: privacy.mode = "none" adds no noise, and what is chosen by it is not private')
    return target


def _check_metric(cells: Sequence[Cell], metric: str) -> None:
    """Check that an evaluation has the metric: one of the first model, where cells measure other things."""
    measured = {repr((cell.data, cell.model, cell.run)): cell for cell in cells}
    for cell in measured.values():
        task = load_task(cell)
        known = task.objective.evaluate(task.objective.initial(), task.test).to_metrics()
        if metric not in known:
            raise InputError(f"--metric {metric}: the runs have {', '.join(known)}")


def _read_score(cell: Mapping[str, object], metric: str) -> float:
    value = cell.get(metric)
    if not isinstance(value, int | float) or not math.isfinite(value):
        known = [name for name in cell if name.startswith("test_")]
        raise InputError(f"--metric {metric}: the runs have {', '.join(known)}")
    return float(value)


HEADER = ("row", "setting", "score", "next best", "place in the grid")


def format_tuned_scenario(
    text: str, choices: Sequence[TuningChoice], tuned: Tuning, overrides: Sequence[str], source: str
) -> tuple[str, Scenario]:
    """Add a rule for every choice and [tuned] to the file `text`; return it with its scenario, or InputError."""
    blocks = [
        text.rstrip("\n"),
        "",
        f"# Settings by `fedpriv tune`, {tuned.settings} for every row, on {tuned.held_out} held-out records.",
    ]
    for choice in choices:
        if choice.setting is not None:
            blocks += [
                "[[where]]",
                f"when = {_format_inline_table(choice.row.when)}",
                f"set = {_format_inline_table(choice.setting)}",
                "",
            ]
    own = tuned.model_dump(mode="json", exclude_none=True, exclude={"rows"})
    blocks += ["[tuned]", *(f"{key} = {_format_value(value)}" for key, value in own.items())]
    for row in tuned.rows:
        mu = "" if row.mu is None else f"\nmu = {_format_value(row.mu)}"
        blocks += ["", "[[tuned.rows]]", f"when = {_format_inline_table(row.when)}{mu}"]
    written = "\n".join(blocks) + "\n"
    try:
        return written, parse_scenario(tomllib.loads(written), source, overrides)
    except (tomllib.TOMLDecodeError, InputError) as error:
        raise InputError(f"{source}: the chosen settings cannot be written into it: {error}") from None


def drop_chosen_keys(overrides: Sequence[str], choices: Sequence[TuningChoice]) -> list[str]:
    """Keep the KEY=VALUE of keys for which nothing was chosen: an override would outrank the choice."""
    chosen = {key for choice in choices for key in choice.setting or {}}
    return [each for each in overrides if parse_assignment(each)[0] not in chosen]


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
    """Write a line for every row, under `HEADER`."""
    return [
        (
            ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in choice.row.when.items()),
            "the scenario's own"
            if choice.setting is None
            else ", ".join(f"{key.removeprefix('algorithm.')} {value}" for key, value in choice.setting.items()),
            _format_score(choice.score),
            _format_score(choice.next_best),
            ", ".join(f"{place.number} of {place.count}" for place in _find_positions(choice)) or "-",
        )
        for choice in choices
    ]


def warn_of_edges(choices: Sequence[TuningChoice]) -> list[str]:
    """Warn of every key whose chosen value has no neighbour on one side."""
    at_edges = [place for choice in choices for place in _find_positions(choice) if place.is_edge]
    warned = Counter((place.key, place.value) for place in at_edges)
    return [
        f"{key} = {value}: at the edge of its grid in {count} row{'s' if count > 1 else ''}; widen the grid there"
        for (key, value), count in warned.items()
    ]


def describe_costs(choices: Sequence[TuningChoice], delta: float) -> list[str]:
    """Say what the choice of every row costs, alone and with one run of it, or that nothing is charged."""
    if all(choice.selection is None for choice in choices):
        return [
            "The choice is not private: it compared runs on held-out records without noise, and no ε covers it. "
            "Claims of runs with these settings hold for settings that are given."
        ]
    found = [
        (
            one.mu,
            one.run_count.description,
            one.epsilon_of(delta),
            PrivateSelection(one.mu, one.run_count, one.mu).epsilon_of(delta),
        )
        for one in (choice.selection for choice in choices)
        if one is not None
    ]
    return [
        f"The best of {words}, each {format_upper(mu)}-GDP: the choice of one row costs ε = {format_upper(alone)} "
        f"at delta = {format_upper_delta(delta)}, the choice and a run with it ε = {format_upper(both)}."
        for mu, words, alone, both in dict.fromkeys(found)
    ] + privacy_caveats(max((both for *_, both in found), default=0.0), delta)


def render_markdown(choices: Sequence[TuningChoice], held_out: HeldOut, tuned: Tuning, delta: float) -> str:
    """Write the table, and on which settings and records it rests."""
    rows = [HEADER, tuple("---" for _ in HEADER), *table_lines(choices)]
    blocks = [
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        f"{tuned.settings} settings for every row, by {tuned.metric}; {held_out.description}.",
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
        "edge": [place.key for place in _find_positions(choice) if place.is_edge],
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
    """JSON of numbers, texts, truth values and lists is TOML."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
