"""`fedpriv tune`: choose settings on held-out records, with as many trials for every row."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.accounting.selection import NegativeBinomialRunCount, PoissonRunCount, RunCountDistribution
from fedpriv.addons.tune.grids import (
    Grid,
    HeldOut,
    Setting,
    TuningRow,
    check_grid,
    check_settings,
    choose_settings,
    hold_out,
    list_settings,
    make_default_grid,
    pair_grids,
    parse_grid,
)
from fedpriv.addons.tune.options import TuneRequest
from fedpriv.addons.tune.tune import (
    ACCURACY,
    HEADER,
    TuningChoice,
    describe_costs,
    drop_chosen_keys,
    format_tuned_scenario,
    table_lines,
    tune_openly,
    tune_privately,
    warn_of_edges,
    write_tuning,
)
from fedpriv.cli.explore import Column, print_plain, print_rich
from fedpriv.cli.options import print_text
from fedpriv.cli.progress import Progress
from fedpriv.core.errors import InputError
from fedpriv.core.extensions import import_files
from fedpriv.core.files import find_scenario_file
from fedpriv.engines.workers import Workers
from fedpriv.scenario.load import Scenario, load_scenario, read_toml
from fedpriv.scenario.published import TunedChoice, Tuning, parse_assignment
from fedpriv.study.sweep import RunOptions, lock_folder

_DEFAULT_SEED = 100  # that scenarios do not use
_DEFAULT_TRIALS = 25
_DEFAULT_MEAN_RUNS = 20.0
TUNING_KEYS = {"scenario", "seeds", "fixed", "grid", "axis", "metric"}


@dataclass(frozen=True)
class Grids:
    """Values to try, for every value of a swept key, or the same for all rows."""

    by_value: Mapping[Any, Grid] | None = None
    """By the value of `axis`; None where all rows have the same, or one around their own numbers."""
    for_all: Grid = field(default_factory=dict)
    axis: str = "algorithm.name"


def complete_request(given: TuneRequest) -> tuple[TuneRequest, Grids]:
    """Complete a request by its tuning file, if it names one.

    InputError for keys that a tuning file does not have, and for a grid over keys that do not train.
    """
    own, fixed = parse_grid(given.grid or []), given.fixed or []
    check_grid(own, "--grid")
    for assignment in fixed:
        if parse_assignment(assignment, "--while-tuning")[0] == "data.validation":
            raise InputError(f"--while-tuning {assignment!r}: how many records are held out; give --held-out")
    path = find_scenario_file(given.scenario)
    tree = read_toml(path)
    if not {"scenario", "grid"} <= tree.keys():
        return replace(given, seeds=given.seeds or [_DEFAULT_SEED]), Grids(for_all=own)
    if unknown := sorted(tree.keys() - TUNING_KEYS):
        raise InputError(f"{given.scenario}: {unknown[0]}: a tuning file has {', '.join(sorted(TUNING_KEYS))}")
    if own:
        raise InputError(f"{given.scenario}: a tuning file has grids of its own; leave --grid out")
    if not isinstance(tree["grid"], dict):
        raise InputError(f"{given.scenario}: grid: expected a table [grid.VALUE] for every value of the axis")
    for value, each in tree["grid"].items():
        check_grid(each, f"{given.scenario}: grid.{value}:")
    held = tree.get("fixed", {})
    said = [f"{key}={json.dumps(value)}" for key, value in held.items() if key != "data.validation"]
    request = replace(
        given,
        scenario=(path.parent / tree["scenario"]).resolve(),
        fixed=[*said, *fixed],
        held_out=held.get("data.validation") if given.held_out is None else given.held_out,
        seeds=given.seeds or tree.get("seeds", [_DEFAULT_SEED]),
        metric=tree.get("metric", given.metric),
    )
    return request, Grids(tree["grid"], axis=str(tree.get("axis", Grids.axis)))


def tune_scenario(given: TuneRequest) -> None:
    """Choose, write, show; InputError for a scenario that cannot be tuned."""
    asked, grids = complete_request(given)
    import_files(asked.imports or [])
    scenario = load_scenario(asked.scenario, asked.overrides or [])
    if scenario.tuning is not None:
        raise InputError(f"{asked.scenario}: has [tuned] already; tune the scenario that it was made from")
    metric = asked.metric or default_metric(scenario)
    law = _make_run_count(asked) if asked.private else None
    if law is None and (asked.poisson or asked.eta):
        raise InputError("--poisson and --eta say how many runs a private choice makes: give --private with them")
    generator = np.random.default_rng(asked.seed if asked.seed is not None or asked.private else 0)
    rows = _choose_row_settings(scenario, asked, grids, generator)
    cells = [point.cell for point in scenario.points]
    held_out = hold_out(cells[0], asked.held_out).count_in_runs(
        cells
    )  # refuses what cannot run before a trial does
    for row, settings in rows:
        check_settings(row, settings)
    folder, fixed = asked.out or Path("runs") / f"{scenario.name}-tuned", asked.fixed or []
    if law is None:
        workers = None if asked.workers is None else Workers(asked.workers)
        options = RunOptions(out=folder / "trials", resume=asked.resume, workers=workers)
        choices = tune_openly(
            *(scenario, rows, held_out, fixed, asked.seeds or [], metric), options, [Progress(quiet=False)]
        )
    else:
        if asked.resume or asked.workers is not None or asked.metric not in (None, ACCURACY):
            raise InputError(
                "--private: keeps no trials to resume from, runs in this process and compares accuracies; leave "
                "--resume, --workers and --metric out"
            )
        choices = tune_privately(scenario, rows, held_out, fixed, law, generator)
    _write_and_show(scenario, asked, metric, choices, held_out, law, len(rows[0][1]), folder)


def default_metric(scenario: Scenario) -> str:
    """The metric that settings are compared by where none is named."""
    cell = scenario.points[0].cell
    if not cell.model.is_regression:
        return ACCURACY
    return "test_r2" if "r2" in cell.run.metrics else "test_loss"


def _write_and_show(
    scenario: Scenario,
    asked: TuneRequest,
    metric: str,
    choices: Sequence[TuningChoice],
    held_out: HeldOut,
    law: RunCountDistribution | None,
    tried: int,
    folder: Path,
) -> None:
    delta = scenario.points[0].cell.privacy.delta
    tuned = Tuning(
        settings=tried,
        held_out=held_out.count,
        metric=metric,
        law="none" if law is None else "poisson" if isinstance(law, PoissonRunCount) else "negative-binomial",
        mean=None if law is None else law.mean,
        eta=law.eta if isinstance(law, NegativeBinomialRunCount) else 0.0,
        rows=tuple(
            TunedChoice(when=dict(choice.row.when), mu=None if choice.selection is None else choice.selection.mu)
            for choice in choices
        ),
    )
    given = find_scenario_file(asked.scenario).read_text(encoding="utf-8")
    overrides = drop_chosen_keys(asked.overrides or [], choices)
    text, chosen = format_tuned_scenario(given, choices, tuned, overrides, str(asked.scenario))
    held_out = held_out.count_in_runs([point.cell for point in chosen.points])
    with lock_folder(folder):
        write_tuning(folder, text, choices, tuned, held_out, delta)
    columns = [Column(name, can_wrap=name == "setting") for name in HEADER]
    print_rich(f"{metric} while tuning", columns, table_lines(choices))
    for line in (f"{held_out.description[0].upper()}{held_out.description[1:]}.", *describe_costs(choices, delta)):
        print_plain(line)
    for line in warn_of_edges(choices):
        print_text(f"fedpriv: {line}\n", sys.stderr)
    rerun = ["fedpriv", "run", str(folder / "scenario.toml")]
    print_plain(shlex.join([*rerun, *(word for each in overrides for word in ("--set", each))]))


def _choose_row_settings(
    scenario: Scenario, asked: TuneRequest, grids: Grids, generator: np.random.Generator
) -> list[tuple[TuningRow, list[Setting]]]:
    found = pair_grids(scenario, grids.by_value, grids.axis)
    if not found:
        named = ", ".join(map(str, grids.by_value or {}))
        raise InputError(f"{asked.scenario}: no point has a grid; grids are for {grids.axis} = {named}")
    own = grids.by_value is None and not grids.for_all
    rows = [
        TuningRow(when, cell, grids.for_all or (make_default_grid(cell) if own else grid))
        for when, cell, grid in found
    ]
    for key in {key for row in rows for key in row.grid}:
        if key in scenario.axes:
            raise InputError(
                f"{key} is swept by {asked.scenario}: take it out of the grid, or narrow it with --set"
            )
    grids_of_rows = [row.grid for row in rows]
    if asked.private:  # every run draws from its row's whole grid
        settings = [list_settings(grid) for grid in grids_of_rows]
    else:
        trials = _DEFAULT_TRIALS if asked.trials is None and own else asked.trials
        if trials is not None and not float(trials).is_integer():
            raise InputError(f"--trials {trials}: a whole number of settings is tried, without --private")
        settings = choose_settings(grids_of_rows, None if trials is None else int(trials), generator)
    return list(zip(rows, settings, strict=True))


def _make_run_count(asked: TuneRequest) -> RunCountDistribution:
    mean = _DEFAULT_MEAN_RUNS if asked.trials is None else asked.trials
    return PoissonRunCount(mean) if asked.poisson else NegativeBinomialRunCount(mean, asked.eta)
