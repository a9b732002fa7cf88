"""Settings compared on held-out records: all of them, openly, or the best of a random number, privately."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedpriv.accounting import GaussianDP
from fedpriv.accounting.selection import Law, Selection
from fedpriv.engines.table import engine_named
from fedpriv.engines.workers import Workers
from fedpriv.errors import InputError, RunError
from fedpriv.privacy.ledger import claim_of
from fedpriv.privacy.unit import RECORD
from fedpriv.running.fitted import fitted_scenario
from fedpriv.running.observer import RunObserver
from fedpriv.running.outcome import Finished
from fedpriv.running.task import task_of_cell
from fedpriv.scenario import Cell, Point, Scenario
from fedpriv.scenario.data_section import PARTITION_KEYS
from fedpriv.sweep.results import read_results
from fedpriv.sweep.runner import run_sweep
from fedpriv.tuning.grids import Setting
from fedpriv.tuning.problem import HeldOut, Row, better, trial

SETTING = "tune.setting"
"""The axis of the trials' results: a setting's number among those of its row."""
ACCURACY = "test_accuracy"
_NO_ACCURACY = f"--private: runs are compared by {ACCURACY}, which a regression does not have"


@dataclass(frozen=True)
class Choice:
    """What was chosen for a row."""

    row: Row
    setting: Setting | None
    """None where a private choice tried nothing: the scenario's own stays."""
    score: float | None
    next_best: float | None = None
    """Of the others; a private choice tells nothing of them."""
    selection: Selection | None = None
    """What a private choice costs."""


def tuned_openly(
    scenario: Scenario,
    rows: Sequence[tuple[Row, Sequence[Setting]]],
    held_out: HeldOut,
    fixed: Sequence[str],
    seeds: Sequence[int],
    metric: str,
    out: Path,
    *,
    resume: bool,
    workers: Workers | None,
    observers: Sequence[RunObserver],
) -> list[Choice]:
    """Every setting of every row on every seed, as a run in `out` with all its results; the best mean is chosen.

    InputError, before they start, for a metric that the runs do not have.  The results are functions of the
    records without noise.
    """
    points = [
        Point({**row.when, SETTING: number}, trial(row.cell, setting, held_out, fixed, seed))
        for row, settings in rows
        for number, setting in enumerate(settings)
        for seed in seeds
    ]
    _check_metric([point.cell for point in points], metric)
    axes = {**scenario.axes, SETTING: list(range(max(len(settings) for _, settings in rows)))}
    trials = replace(
        scenario, axes=axes, seeds=list(seeds), points=points, published=None, scaling=None, tuned=None
    )
    run_sweep(trials, "vectorized", out, resume=resume, observers=observers, workers=workers)
    cells = iter(read_results(out).cells)
    choices = []
    for row, settings in rows:
        scores = [statistics.fmean(_score(next(cells), metric) for _ in seeds) for _ in settings]
        best, *others = sorted(range(len(settings)), key=lambda number: (_badness(metric, scores[number]), number))
        choices.append(Choice(row, settings[best], scores[best], scores[others[0]] if others else None))
    return choices


def tuned_privately(
    scenario: Scenario,
    rows: Sequence[tuple[Row, Sequence[Setting]]],
    held_out: HeldOut,
    fixed: Sequence[str],
    law: Law,
    generator: np.random.Generator,
) -> list[Choice]:
    """For every row the best of K runs, K from `law`, each with a setting drawn from the row's, and its own noise.

    Scores are accuracies on held-out records with Gaussian noise.  InputError for runs whose guarantee is no μ of
    one record, and, before any of them, for a setting with another promise than the scenario's; RunError if one
    fails.

    Guarantee: `Choice.selection` holds for the setting and the score of a row, for training records and held-out
    records alike: a run's releases are μ-GDP for a record that it trains on, its score is μ-GDP for a record that
    is held out, and which of both a record is, and with which silo and in which batch, follows from its place
    alone (or its site).  Nothing of another run is kept, written or told.  `generator` must be as secret as the
    noise.
    """
    for row, settings in rows:
        _target(row)
        _check_places(row.cell)
        if row.cell.model.regression:
            raise InputError(_NO_ACCURACY)
        if row.cell.privacy.protected.name != RECORD.name:
            raise InputError(
                "--private: a person's records may lie on both sides of the split, so that only one record is "
                'protected; tune with privacy.unit = "record"'
            )
        for tried in [trial(row.cell, setting, held_out, fixed, 0) for setting in settings]:
            _check_places(tried)
            _check_kept(row.cell, tried, held_out)
    plans = [(row, settings, law.draw(generator)) for row, settings in rows]
    drawn = [
        (row, settings[int(generator.integers(len(settings)))])
        for row, settings, runs in plans
        for _ in range(runs)
    ]
    points = [
        Point(row.when, trial(row.cell, setting, held_out, fixed, int(generator.integers(2**62))))
        for row, setting in drawn
    ]
    cells = [point.cell for point in fitted_scenario(replace(scenario, points=points), {})[0].points]
    try:
        outcomes = sorted(engine_named("vectorized")(cells, RunObserver()), key=lambda outcome: outcome.index)
    except RunError:
        raise RunError(
            "--private: a run failed, as one does whose loss is not finite; nothing is published, but that it "
            "failed is not covered by any claim; leave such settings out of the grid"
        ) from None
    finished, choices = iter(outcome.finished for outcome in outcomes), []
    settings_drawn = iter(setting for _, setting in drawn)
    for row, _, runs in plans:
        best: tuple[float, Setting] | None = None
        target = _target(row)
        for _ in range(runs):
            one, setting = next(finished), next(settings_drawn)
            check_promise(one, target)
            score = noisy_score(one, held_out.count, target, generator)
            best = (score, setting) if best is None or score > best[0] else best
        cost = Selection(target, law)
        chosen = Choice(row, None, None) if best is None else Choice(row, best[1], best[0])
        choices.append(replace(chosen, selection=cost))
    return choices


def _check_places(cell: Cell) -> None:
    """InputError for records that sit, or count, by what they hold: one would move others, or the score."""
    if cell.data.partition in PARTITION_KEYS:
        raise InputError(
            f'--private: data.partition = "{cell.data.partition}" looks at labels, so that one record moves '
            'others to other silos and batches; use "iid", or "site"'
        )
    schema = cell.data.table_schema
    if schema is not None and schema.zeros:
        key = 'missing = "drop"' if schema.missing == "drop" else "split" if schema.split else "person"
        raise InputError(
            f"--private: by table.{key} the number of held-out records that count follows from cells, and a score "
            "is divided by it; tune on a table without it, split by table.test_share"
        )


def _check_kept(given: Cell, tried: Cell, held_out: HeldOut) -> None:
    """InputError unless a trial has the promise that is charged for, and the held-out records that are counted.

    Guarantee: relation, unit, target and who adds the noise are the scenario's, so that a price for the
    scenario's promise is one for every trial; a record moves a score by 1/`held_out.count` at most.
    """
    kept: dict[str, tuple[object, object]] = {
        "federation.sampling": (given.federation.sampling, tried.federation.sampling)
    }
    kept |= {"algorithm.trust": (given.algorithm.trust, tried.algorithm.trust)}
    kept |= {
        f"privacy.{name}": (getattr(given.privacy, name), getattr(tried.privacy, name))
        for name in type(given.privacy).model_fields
    }
    kept["data.validation"] = (held_out.count, tried.data.validation)
    for key, (one, other) in kept.items():
        if one != other:
            raise InputError(
                f"--private: {key} = {other!r} while tuning, but the choice is charged for {one!r}: leave it out "
                "of --while-tuning, and change it with --set, or --held-out"
            )


def check_promise(finished: Finished, mu: float) -> None:
    """InputError unless what a run released is `mu`-GDP."""
    claim = claim_of(finished.releases)
    if claim is None or not isinstance(claim.guarantee, GaussianDP) or claim.guarantee.mu > mu:
        raise InputError(
            "--private: the guarantee of this scenario's runs is a curve of (ε, δ), no mu; use a public order of "
            'records, federation.sampling = "fixed"'
        )


def noisy_score(finished: Finished, held_out: int, mu: float, generator: np.random.Generator) -> float:
    """The accuracy on `held_out` records with Gaussian noise; InputError for a regression.

    Guarantee: one held-out record, exchanged or zeroed out, moves the accuracy by at most 1/`held_out`, and noise
    of standard deviation 1/(`held_out` · μ) makes the score μ-GDP, as the run's own releases are.
    """
    if ACCURACY not in finished.metrics:
        raise InputError(_NO_ACCURACY)
    return finished.metrics[ACCURACY] + float(generator.standard_normal()) / (held_out * mu)


def _target(row: Row) -> float:
    """The μ that every run of a row is calibrated to, whatever its setting."""
    target = row.cell.privacy.target
    if target is None:
        raise InputError('--private: privacy.mode = "none" adds no noise, and what is chosen by it is not private')
    return target


def _badness(metric: str, score: float) -> float:
    return score if better(metric, 0.0, 1.0) else -score


def _check_metric(cells: Sequence[Cell], metric: str) -> None:
    """InputError unless an evaluation has the metric: one of the first model, where cells measure other things."""
    measured = {repr((cell.data, cell.model, cell.run)): cell for cell in cells}
    for cell in measured.values():
        task = task_of_cell(cell)
        known = task.objective.evaluate(task.objective.initial(), task.test).named()
        if metric not in known:
            raise InputError(f"--metric {metric}: the runs have {', '.join(known)}")


def _score(cell: Mapping[str, object], metric: str) -> float:
    value = cell.get(metric)
    if not isinstance(value, int | float) or not math.isfinite(value):
        known = ", ".join(name for name in cell if name.startswith("test_"))
        raise InputError(f"--metric {metric}: the runs have {known}")
    return float(value)
