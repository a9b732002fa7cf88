"""`fedpriv worth`: local models compared with the models of a run, or with those of a grid of ε.

A local model is fitted by one silo to its own training records, without noise.  References are the scores of local
models on test records.  The gain of a released model is its score at a silo minus that of the local model.  A
recalibrated model is a released one whose intercepts and scale a silo has fitted to its own training records.  A
personal model has all its parameters fitted to them, but is pulled to the released one.  A pooled model is fitted
without noise to the training records of all silos that have test records, too.  A point is one value of each swept
key of a scenario, and has a cell, one run, for each seed.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedpriv.addons.worth.break_even import format_error, scale_of
from fedpriv.addons.worth.joining import EPSILON_GRID, JoiningRequest, study_joining
from fedpriv.addons.worth.joining_command import describe_budget_shares, print_joining
from fedpriv.addons.worth.references import (
    MAX_REFERENCE_SILOS,
    ONE_CLASS_SHARE,
    References,
    cache_key,
    deviation_over_silos,
)
from fedpriv.addons.worth.worth import (
    PointGains,
    compare_run,
    compute_references,
    evaluate_gains,
    fit_pooled_model,
)
from fedpriv.cli.options import print_table, print_text
from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.core.files import find_scenario_file
from fedpriv.scenario.load import load_scenario, resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.show.plots import check_plot_path
from fedpriv.study.results import check_claims, read_claims


@dataclass(frozen=True)
class WorthRequest:
    """Options of a comparison with local models."""

    with_pooled: bool = False
    """Whether to fit a model to the records of all silos, too, for a scenario without a grid."""
    with_any_learner: bool = False
    """Whether to try learners of scikit-learn on each silo's records, too, without a grid."""
    only_local: bool = False
    """Whether to fit only the local models, whose scores reports take from the cache."""
    with_personal: bool = False
    """Whether to fit personal models, too, for a run's folder or a grid."""
    grid: tuple[tuple[str, ...], tuple[float, ...], int | None, int, Path | None] | None = None
    """Trusts, ε, splits, seeds and file of the chart for a break-even, or None if none is requested.

    Without trusts, ε or splits the defaults of `JoiningRequest` and `EPSILON_GRID` are used.
    """
    as_json: bool = False


def print_worth(path_or_run: Path, overrides: Sequence[str], request: WorthRequest) -> None:
    """Print the references of a scenario, the gains of a run's models, or the gain against ε.

    A grid in the request runs the scenario anew for each ε.  With `only_local` the references of all points and
    seeds are computed, and otherwise without a grid those of the scenario's first point and seed.

    Args:
        path_or_run: Folder of a run, with results.json, or a scenario by name or file.
        overrides: Texts "KEY=VALUE", for a scenario only.
        request: Options of the comparison.

    Raises:
        InputError: The comparison is not possible, or options do not fit together.
        RunError: The claims of a run's folder differ from its releases.
    """
    is_run = (path_or_run / "results.json").exists()
    _check_options(overrides, request, is_run=is_run)
    if is_run:
        _print_run_folder(path_or_run, request)
        return
    path = find_scenario_file(path_or_run)
    if request.only_local:
        _fill_cache([point.cell for point in load_scenario(path, list(overrides)).points], request)
        return
    if request.grid is not None:
        trusts, epsilons, splits, seeds, plot = request.grid
        if plot is not None:
            check_plot_path(plot)
        joining_request = JoiningRequest(
            path, tuple(overrides), trusts, epsilons or EPSILON_GRID, splits, seeds, request.with_personal
        )
        print_joining(study_joining(joining_request, _report_progress), as_json=request.as_json, plot=plot)
        return
    cell = load_scenario(path, list(overrides)).points[0].cell
    references = compute_references(
        cell, with_any_learner=request.with_any_learner, report_progress=_report_progress
    )
    pooled_gains = evaluate_gains(cell, references, fit_pooled_model(cell)) if request.with_pooled else None
    if request.as_json:
        _print_json(
            {"alone": dataclasses.asdict(references), "pooled": pooled_gains and dataclasses.asdict(pooled_gains)}
        )
        return
    lines = _reference_lines([references], request)
    if pooled_gains is not None:
        lines += [
            _score_line("pooled, no noise", [pooled_gains.released], references),
            _score_line("pooled, recalibrated", [pooled_gains.recalibrated], references),
        ]
    print_table(lines)
    print_text("".join(_notes(references)))


_GRID_OPTIONS = "--splits, --seeds, --trust, --epsilon, --plot"


def _check_options(overrides: Sequence[str], request: WorthRequest, *, is_run: bool) -> None:
    """Refuse options that would have no effect.

    Raises:
        InputError: One of the options would have no effect.
    """
    has_grid, only_local = request.grid is not None, request.only_local
    refusals = {
        "--set: a run is compared as it ran; give the scenario for another one": is_run and bool(overrides),
        f"{_GRID_OPTIONS}: run a scenario anew; give that, not a run's folder": is_run and has_grid,
        f"--alone: fits local models alone, without a grid; leave out {_GRID_OPTIONS}": only_local and has_grid,
        "--alone: fits local models alone; leave out --pooled and --personal": only_local
        and (request.with_pooled or request.with_personal),
        "--pooled: fits the records of a scenario; give that, not a run's folder": is_run and request.with_pooled,
        "--pooled: a grid has the pooled model in its table; leave it out": has_grid and request.with_pooled,
        f"--any-learner: is not compared in a grid; leave it out, or {_GRID_OPTIONS}": has_grid
        and request.with_any_learner,
        "--personal: a personal model starts from a released one; give a run's folder, or --splits": not is_run
        and not has_grid
        and request.with_personal,
    }
    if reasons := [reason for reason, is_refused in refusals.items() if is_refused]:
        raise InputError(reasons[0])


def _print_run_folder(folder: Path, request: WorthRequest) -> None:
    """Print the gains of a run's models, or with `only_local` the scores of its local models.

    Raises:
        InputError: The run cannot be compared.
        RunError: The run's claims differ from its releases.
    """
    results = read_claims(folder)
    if request.only_local:
        cells = [resolve_cell(dict(record["scenario"]), str(folder / "results.json")) for record in results.cells]
        _fill_cache(cells, request)
    else:
        rows = compare_run(
            folder,
            results,
            _report_progress,
            with_any_learner=request.with_any_learner,
            with_personal=request.with_personal,
        )
        _print_json({"rows": [_point_data(row) for row in rows]}) if request.as_json else _print_points(
            rows, request
        )
    check_claims(folder, results)


def _fill_cache(cells: Sequence[Cell], request: WorthRequest) -> None:
    """Compute and print the local models' scores, once for all cells with the same cache key.

    Cells whose records have no source that identifies them have no key, and are fitted one by one.
    """
    cells_by_key = {cache_key(cell) or index: cell for index, cell in enumerate(cells)}
    all_references = (
        (
            cell.seed,
            compute_references(cell, with_any_learner=request.with_any_learner, report_progress=_report_progress),
        )
        for cell in cells_by_key.values()
    )
    if request.as_json:
        _print_json(
            {"alone": [{"seed": seed, **dataclasses.asdict(references)} for seed, references in all_references]}
        )
        return
    for seed, references in all_references:
        print_table(
            [
                [f"seed {seed}", references.metric, "spread over silos", "silos"],
                _local_models_line([references]),
            ]
        )


def _reference_lines(seeds: Sequence[References], request: WorthRequest) -> list[list[str]]:
    """Return a head and the table lines of the local models and of a constant, as means over seeds.

    A line of the best learners follows if they were requested and tried.  A line of balanced scores follows if at
    some silo more than 90 % of the training records are of one class.  A balanced score is the mean accuracy over
    classes at such a silo, and the score at others.
    """
    head = "" if len(seeds) == 1 else f"mean over {len(seeds)} seeds"
    lines = [[head, seeds[0].metric, "spread over silos", "silos"], _local_models_line(seeds)]
    lines.append(
        _score_line("a constant", [[silo.constant for silo in references.silos] for references in seeds], seeds[0])
    )
    best = [
        [silo.any_learner for silo in references.silos if silo.any_learner is not None] for references in seeds
    ]
    if request.with_any_learner and all(best):
        lines.append(_score_line("each silo alone, any learner", best, seeds[0]))
    if any(silo.majority > ONE_CLASS_SHARE for references in seeds for silo in references.silos):
        balanced = [[silo.balanced for silo in references.silos] for references in seeds]
        lines.append(_score_line("alone, balanced where one class has most", balanced, seeds[0]))
    return lines


def _report_progress(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{sanitize_line(line)}")


def _print_json(tree: object) -> None:
    sys.stdout.write(json.dumps(tree) + "\n")


def _point_data(row: PointGains) -> dict[str, object]:
    return {
        "point": dict(row.point),
        "seeds": row.seeds,
        "gain": row.gain,
        "standard_error": row.standard_error,
        "by_silo": row.by_silo,
        "shares": dict(row.budget_shares),
        "references": [dataclasses.asdict(references) for references in row.references],
        "gains": [dataclasses.asdict(gains) for gains in row.gains],
    }


def _print_points(rows: Sequence[PointGains], request: WorthRequest) -> None:
    """Print the references of the first point, a line of scores and gains for each point, and conclusions."""
    references = rows[0].references[0]
    scale, digits = scale_of(references.metric)
    print_table(_reference_lines(rows[0].references, request))
    sys.stdout.write("\n")
    axes = list(rows[0].point) or ["run"]
    head = [*axes, "released", "recalibrated", "gain over alone", "s.e.", "worst silo", "best silo", "seeds"]
    table = [[*head, *(["personal"] if request.with_personal else [])]]
    for row in rows:
        released, recalibrated = (row.mean_figure(name) for name in ("released", "recalibrated"))
        error, silos = row.standard_error, row.by_silo.values()
        table.append(
            [
                *(str(row.point[axis]) if axis in row.point else "-" for axis in axes),
                *(f"{scale * value:.{digits}f}" for value in (released, recalibrated)),
                f"{scale * row.gain:+.{digits}f}",
                format_error(None if error is None else scale * error, digits),
                *(f"{scale * value:+.{digits}f}" for value in (min(silos), max(silos))),
                str(len(row.seeds)),
                *([f"{scale * row.mean_figure('personal'):.{digits}f}"] if request.with_personal else []),
            ]
        )
    print_table(table)
    print_text("".join([*_notes(references), *_describe_budgets(rows), *_describe_gains(rows, references.metric)]))


def _describe_gains(rows: Sequence[PointGains], metric: str) -> list[str]:
    """Return a sentence on each verdict that occurs: points gain, lose, or have an interval that covers 0.

    A sentence has the gain of each point with its interval.  Points without a standard error are in a sentence
    that says why they have no verdict.  If some point has an interval, a last text says how it is made.
    """
    gaining, losing, unclear = "joining gains", "joining loses", "joining is not told apart from staying alone"
    one_seed, equal_gains = (
        "there is one seed, so no standard error and no verdict",
        "every seed has the same gain, so there is no standard error and no verdict",
    )
    points_by_verdict: dict[str, list[str]] = {gaining: [], losing: [], unclear: [], one_seed: [], equal_gains: []}
    for row in rows:
        if (interval := row.interval) is None:
            verdict = one_seed if len(row.seeds) < 2 else equal_gains
        else:
            verdict = gaining if interval[0] > 0.0 else losing if interval[1] < 0.0 else unclear
        points_by_verdict[verdict].append(f"{_format_gain(row, metric)} at {_format_point(row)}")
    sentences = [
        f"On these records {verdict}: the gain is {'; '.join(points)}.\n"
        for verdict, points in points_by_verdict.items()
        if points
    ]
    if all(row.interval is None for row in rows):
        return sentences
    return [
        *sentences,
        "The verdict is by the 95 % interval of Student's t over seeds. The s.e. is over seeds (noise and "
        "partition); other records of the same silos would add to it.\n",
    ]


def _format_gain(row: PointGains, metric: str) -> str:
    """Format a gain over the silos' own models with its 95 % interval, if it has one."""
    scale, digits = scale_of(metric)
    unit = f"points of {metric}" if scale > 1.0 else f"in {metric}"
    ends = [f"{scale * end:+.{digits}f}" for end in row.interval or ()]
    interval = f" (95 % from {' to '.join(ends)})" if ends else ""
    return f"{scale * row.gain:+.{digits}f} {unit}{interval}"


def _describe_budgets(rows: Sequence[PointGains]) -> list[str]:
    """Describe the silos' own budgets, with the points that have them if other points have others or none."""
    points_by_note: dict[str, list[str]] = {}
    for row in rows:
        if any(share < 1.0 for share in row.budget_shares.values()):
            points_by_note.setdefault(describe_budget_shares(row.budget_shares), []).append(_format_point(row))
    return [
        f"At {'; '.join(points)}: {note}\n" if len(points) < len(rows) else f"{note}\n"
        for note, points in points_by_note.items()
    ]


def _format_point(row: PointGains) -> str:
    return ", ".join(f"{key} = {value}" for key, value in row.point.items()) or "this setting"


def _notes(references: References) -> list[str]:
    """Return notes on left-out silos, and on silos where a class has over 90 % of the training records."""
    notes = []
    if len(references.silos) < references.of:
        notes.append(
            f"{len(references.silos)} of {references.of} silos: those with training and test records, of which a "
            f"public seed draws {MAX_REFERENCE_SILOS} if there are more.\n"
        )
    if skewed := [silo.name for silo in references.silos if silo.majority > ONE_CLASS_SHARE]:
        share = f"{ONE_CLASS_SHARE:.0%}".replace("%", " %")
        notes.append(
            f"More than {share} of one class at {', '.join(skewed)}: accuracy alone decides nothing there.\n"
        )
    return notes


def _local_models_line(seeds: Sequence[References]) -> list[str]:
    scores = [[silo.score for silo in references.silos] for references in seeds]
    return _score_line("each silo alone, nothing released", scores, seeds[0])


def _score_line(name: str, scores: Sequence[Sequence[float]], references: References) -> list[str]:
    """Return a table line: name, mean of the scores over silos, their spread, and the number of silos.

    Scores are those of each silo, by seed.  Mean and spread are averages over seeds.
    """
    (scale, digits), silos = scale_of(references.metric), len(scores[0])
    mean = scale * float(np.mean([np.mean(seed_scores) for seed_scores in scores]))
    spread = scale * float(np.mean([deviation_over_silos(seed_scores) for seed_scores in scores]))
    return [name, f"{mean:.{digits}f}", f"{spread:.{digits}f}" if silos > 1 else "one silo", str(silos)]
