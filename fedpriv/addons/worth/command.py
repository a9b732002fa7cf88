"""`fedpriv worth`: each silo alone beside the models of a run, and whether joining gains."""

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
from fedpriv.addons.worth.references import ONE_CLASS_SHARE, References, cache_key, deviation_over_silos
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
    """What a person asked for beside each silo alone."""

    with_pooled: bool = False
    with_any_learner: bool = False
    only_local: bool = False
    with_personal: bool = False
    grid: tuple[tuple[str, ...], tuple[float, ...], int | None, int, Path | None] | None = None
    """(trusts, ε, splits, seeds, file of the picture) of a break-even; None where nobody asks for one."""
    as_json: bool = False


def print_worth(given: Path, overrides: Sequence[str], wanted: WorthRequest) -> None:
    """Print the references of a scenario, what a run's models gain, or the gain against ε.

    InputError as `references`, `rows_of` and `joining` raise it, and for overrides of a run that is over.
    """
    if (given / "results.json").exists():
        _print_run_folder(given, overrides, wanted)
        return
    path = find_scenario_file(given)
    if wanted.only_local:
        _fill_cache([point.cell for point in load_scenario(path, list(overrides)).points], wanted)
        return
    if wanted.grid is not None:
        trusts, epsilons, splits, seeds, plot = wanted.grid
        if plot is not None:
            check_plot_path(plot)
        asked = JoiningRequest(
            path, tuple(overrides), trusts, epsilons or EPSILON_GRID, splits, seeds, wanted.with_personal
        )
        print_joining(study_joining(asked, _report_progress), as_json=wanted.as_json, plot=plot)
        return
    if wanted.with_personal:
        raise InputError("--personal: starts from a released model; give a run's folder, or --splits")
    cell = load_scenario(path, list(overrides)).points[0].cell
    known = compute_references(cell, with_any_learner=wanted.with_any_learner, report_progress=_report_progress)
    united = evaluate_gains(cell, known, fit_pooled_model(cell)) if wanted.with_pooled else None
    if wanted.as_json:
        _print_json({"alone": dataclasses.asdict(known), "pooled": united and dataclasses.asdict(united)})
        return
    lines = _reference_lines([known], wanted)
    if united is not None:
        lines += [
            _score_line("pooled, no noise", [united.released], known),
            _score_line("pooled, recalibrated", [united.recalibrated], known),
        ]
    print_table(lines)
    print_text("".join(_notes(known)))


def _print_run_folder(given: Path, overrides: Sequence[str], wanted: WorthRequest) -> None:
    if overrides:
        raise InputError("--set: a run is compared as it ran; give the scenario for another one")
    if wanted.grid is not None:
        raise InputError(
            "--splits, --trust, --epsilon, --plot: run a scenario anew; give that, not a run's folder"
        )
    results = read_claims(given)
    if wanted.only_local:
        cells = [resolve_cell(dict(record["scenario"]), str(given / "results.json")) for record in results.cells]
        _fill_cache(cells, wanted)
    else:
        rows = compare_run(
            given,
            results,
            _report_progress,
            with_any_learner=wanted.with_any_learner,
            with_personal=wanted.with_personal,
        )
        _print_json({"rows": [_point_data(row) for row in rows]}) if wanted.as_json else _print_points(
            rows, wanted
        )
    check_claims(given, results)


def _fill_cache(cells: Sequence[Cell], wanted: WorthRequest) -> None:
    """Fit each silo alone for every seed and model of the cells, so that tables have the row."""
    once = {cache_key(cell): cell for cell in cells}
    if wanted.as_json:
        found = {
            cell.seed: compute_references(
                cell, with_any_learner=wanted.with_any_learner, report_progress=_report_progress
            )
            for cell in once.values()
        }
        _print_json({"alone": [{"seed": seed, **dataclasses.asdict(known)} for seed, known in found.items()]})
        return
    for cell in once.values():
        known = compute_references(
            cell, with_any_learner=wanted.with_any_learner, report_progress=_report_progress
        )
        print_table(
            [[f"seed {cell.seed}", known.metric, "spread over silos", "silos"], _local_models_line([known])]
        )


def _reference_lines(seeds: Sequence[References], wanted: WorthRequest) -> list[list[str]]:
    """Every seed's silos alone; with several seeds means over seeds."""
    head = "" if len(seeds) == 1 else f"mean over {len(seeds)} seeds"
    lines = [[head, seeds[0].metric, "spread over silos", "silos"], _local_models_line(seeds)]
    lines.append(_score_line("a constant", [[silo.constant for silo in known.silos] for known in seeds], seeds[0]))
    best = [[silo.any_learner for silo in known.silos if silo.any_learner is not None] for known in seeds]
    if wanted.with_any_learner and all(best):
        lines.append(_score_line("each silo alone, any learner", best, seeds[0]))
    if any(silo.majority > ONE_CLASS_SHARE for known in seeds for silo in known.silos):
        balanced = [[silo.balanced for silo in known.silos] for known in seeds]
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
        "references": [dataclasses.asdict(known) for known in row.references],
        "gains": [dataclasses.asdict(gains) for gains in row.gains],
    }


def _print_points(rows: Sequence[PointGains], wanted: WorthRequest) -> None:
    known = rows[0].references[0]
    scale, digits = scale_of(known.metric)
    print_table(_reference_lines(rows[0].references, wanted))
    sys.stdout.write("\n")
    axes = list(rows[0].point) or ["run"]
    head = [*axes, "released", "recalibrated", "gain over alone", "s.e.", "worst silo", "best silo", "seeds"]
    table = [[*head, *(["personal"] if wanted.with_personal else [])]]
    for row in rows:
        released, own = (row.mean_figure(name) for name in ("released", "recalibrated"))
        error, silos = row.standard_error, row.by_silo.values()
        table.append(
            [
                *(str(row.point[axis]) if axis in row.point else "-" for axis in axes),
                *(f"{scale * value:.{digits}f}" for value in (released, own)),
                f"{scale * row.gain:+.{digits}f}",
                format_error(None if error is None else scale * error, digits),
                *(f"{scale * value:+.{digits}f}" for value in (min(silos), max(silos))),
                str(len(row.seeds)),
                *([f"{scale * row.mean_figure('personal'):.{digits}f}"] if wanted.with_personal else []),
            ]
        )
    print_table(table)
    print_text("".join([*_notes(known), *_describe_budgets(rows), *_describe_gains(rows)]))


def _describe_gains(rows: Sequence[PointGains]) -> list[str]:
    """A sentence for the points that gain, one for those that lose, and one for those whose interval covers 0.

    Points of one seed, or with the same gain at every seed, have no standard error, and no verdict.
    """
    gains, loses, unclear = "joining gains", "joining loses", "joining is not told apart from staying alone"
    one, same = "one seed: no standard error, so no verdict", "every seed has the same gain: no standard error"
    told: dict[str, list[str]] = {gains: [], loses: [], unclear: [], one: [], same: []}
    for row in rows:
        if (interval := row.interval) is None:
            kind = one if len(row.seeds) < 2 else same
        else:
            kind = gains if interval[0] > 0.0 else loses if interval[1] < 0.0 else unclear
        told[kind].append(_format_point(row))
    said = [f"On these records {kind}: {'; '.join(there)}.\n" for kind, there in told.items() if there]
    if all(row.interval is None for row in rows):
        return said
    return [
        *said,
        "Told by the 95 % interval of Student's t over seeds. The s.e. is over seeds (noise and partition); other "
        "records of the same silos would add to it.\n",
    ]


def _describe_budgets(rows: Sequence[PointGains]) -> list[str]:
    """A sentence on budgets of the silos' own; at which points, where they are swept."""
    told: dict[str, list[str]] = {}
    for row in rows:
        if any(share < 1.0 for share in row.budget_shares.values()):
            told.setdefault(describe_budget_shares(row.budget_shares), []).append(_format_point(row))
    return [f"At {'; '.join(at)}: {note}\n" if len(told) > 1 else f"{note}\n" for note, at in told.items()]


def _format_point(row: PointGains) -> str:
    return ", ".join(f"{key} = {value}" for key, value in row.point.items()) or "this setting"


def _notes(known: References) -> list[str]:
    notes = []
    if len(known.silos) < known.of:
        notes.append(f"{len(known.silos)} of {known.of} silos, drawn by a public seed.\n")
    if skewed := [silo.name for silo in known.silos if silo.majority > ONE_CLASS_SHARE]:
        share = f"{ONE_CLASS_SHARE:.0%}".replace("%", " %")
        notes.append(
            f"More than {share} of one class at {', '.join(skewed)}: accuracy alone decides nothing there.\n"
        )
    return notes


def _local_models_line(seeds: Sequence[References]) -> list[str]:
    scores = [[silo.score for silo in known.silos] for known in seeds]
    return _score_line("each silo alone, nothing released", scores, seeds[0])


def _score_line(name: str, scores: Sequence[Sequence[float]], known: References) -> list[str]:
    """Scores of each seed's silos: means and spreads of a seed, averaged over seeds."""
    (scale, digits), silos = scale_of(known.metric), len(scores[0])
    mean = scale * float(np.mean([np.mean(of_seed) for of_seed in scores]))
    over = scale * float(np.mean([deviation_over_silos(of_seed) for of_seed in scores]))
    return [name, f"{mean:.{digits}f}", f"{over:.{digits}f}" if silos > 1 else "one silo", str(silos)]
