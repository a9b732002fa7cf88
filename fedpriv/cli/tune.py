"""`fedpriv tune`: settings chosen on held-out records, as many tried for every row."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.accounting.selection import Law, NegativeBinomial, Poisson
from fedpriv.cli.explore import Column, print_plain, print_rich
from fedpriv.cli.progress import Progress
from fedpriv.core.errors import InputError
from fedpriv.core.extensions import import_files
from fedpriv.core.files import scenario_file
from fedpriv.engines.workers import Workers
from fedpriv.scenario.load import Scenario, load_scenario, read_toml
from fedpriv.scenario.published import Tuned, TunedRow, parsed_assignment
from fedpriv.study.sweep import locked
from fedpriv.study.tune import (
    ACCURACY,
    HEADER,
    Choice,
    costs,
    edges,
    lines,
    not_chosen,
    tuned_openly,
    tuned_privately,
    tuned_text,
    write_tuning,
)
from fedpriv.study.tuning_file import (
    Grid,
    HeldOut,
    Row,
    Setting,
    check_grid,
    check_settings,
    chosen_settings,
    given_grid,
    grid_around,
    held_out_of,
    rows_of,
    settings_of,
)

_SEEDS = (100,)  # that scenarios do not use
_TRIALS = 25
_MEAN = 20.0
TUNING_KEYS = {"scenario", "seeds", "fixed", "grid", "axis", "metric"}


@dataclass(frozen=True)
class Asked:
    """What the command line asks for, with what a tuning file says."""

    scenario: Path
    overrides: Sequence[str]
    fixed: Sequence[str]
    grids: Mapping[Any, Grid] | None
    """By the value of `axis`; None for grids around the scenario's own numbers, or one grid for all."""
    one_grid: Grid
    axis: str = "algorithm.name"
    held_out: int | None = None
    trials: float | None = None
    seeds: Sequence[int] = field(default=_SEEDS)
    metric: str = ACCURACY

    @classmethod
    def of(
        cls,
        given: Path,
        overrides: Sequence[str],
        fixed: Sequence[str],
        grid: Sequence[str],
        held_out: int | None,
        trials: float | None,
        seeds: Sequence[int],
        metric: str,
    ) -> "Asked":
        """InputError for keys that a tuning file does not have, and for a grid over what does not train."""
        own = given_grid(grid)
        check_grid(own, "--grid")
        for assignment in fixed:
            if parsed_assignment(assignment, "--while-tuning")[0] == "data.validation":
                raise InputError(f"--while-tuning {assignment!r}: how many records are held out; give --held-out")
        path = scenario_file(given)
        tree = read_toml(path)
        if not {"scenario", "grid"} <= tree.keys():
            return cls(
                given,
                overrides,
                fixed,
                None,
                own,
                held_out=held_out,
                trials=trials,
                seeds=seeds or _SEEDS,
                metric=metric,
            )
        if unknown := sorted(tree.keys() - TUNING_KEYS):
            raise InputError(f"{given}: {unknown[0]}: a tuning file has {', '.join(sorted(TUNING_KEYS))}")
        held = tree.get("fixed", {})
        if own:
            raise InputError(f"{given}: a tuning file has grids of its own; leave --grid out")
        if not isinstance(tree["grid"], dict):
            raise InputError(f"{given}: grid: expected a table [grid.VALUE] for every value of the axis")
        for value, each in tree["grid"].items():
            check_grid(each, f"{given}: grid.{value}:")
        return cls(
            (path.parent / tree["scenario"]).resolve(),
            overrides,
            [*(f"{key}={json.dumps(value)}" for key, value in held.items() if key != "data.validation"), *fixed],
            tree["grid"],
            {},
            str(tree.get("axis", "algorithm.name")),
            held.get("data.validation") if held_out is None else held_out,
            trials,
            seeds or tree.get("seeds", _SEEDS),
            tree.get("metric", metric),
        )


def tune_scenario(
    asked: Asked,
    out: Path | None,
    imports: Sequence[Path],
    *,
    private: bool,
    poisson: bool,
    eta: float,
    seed: int | None,
    resume: bool,
    workers: int | None,
) -> None:
    """Choose, write, show; InputError for what cannot be tuned."""
    import_files(imports)
    scenario = load_scenario(asked.scenario, asked.overrides)
    if scenario.tuned is not None:
        raise InputError(f"{asked.scenario}: has [tuned] already; tune the scenario that it was made from")
    law = _law(asked.trials, poisson, eta) if private else None
    if law is None and (poisson or eta):
        raise InputError("--poisson and --eta say how many runs a private choice makes: give --private with them")
    generator = np.random.default_rng(seed if seed is not None or private else 0)
    rows = _with_settings(scenario, asked, private, generator)
    cells = [point.cell for point in scenario.points]
    held_out = held_out_of(cells[0], asked.held_out).in_runs(cells)  # refuses what cannot run before a trial does
    for row, settings in rows:
        check_settings(row, settings)
    folder = out or Path("runs") / f"{scenario.name}-tuned"
    if law is None:
        choices = tuned_openly(
            scenario, rows, held_out, asked.fixed, asked.seeds, asked.metric, folder / "trials", resume=resume,
            workers=None if workers is None else Workers(workers), observers=[Progress(quiet=False)],
        )  # fmt: skip
    else:
        if resume or workers is not None or asked.metric != ACCURACY:
            raise InputError(
                "--private: keeps no trials to resume from, runs in this process and compares accuracies; leave "
                "--resume, --workers and --metric out"
            )
        choices = tuned_privately(scenario, rows, held_out, asked.fixed, law, generator)
    _write_and_show(scenario, asked, choices, held_out, law, len(rows[0][1]), folder)


def _write_and_show(
    scenario: Scenario,
    asked: Asked,
    choices: Sequence[Choice],
    held_out: HeldOut,
    law: Law | None,
    tried: int,
    folder: Path,
) -> None:
    delta = scenario.points[0].cell.privacy.delta
    tuned = Tuned(
        settings=tried,
        held_out=held_out.count,
        metric=asked.metric,
        law="none" if law is None else "poisson" if isinstance(law, Poisson) else "negative-binomial",
        mean=None if law is None else law.mean,
        eta=law.eta if isinstance(law, NegativeBinomial) else 0.0,
        rows=tuple(
            TunedRow(when=dict(choice.row.when), mu=None if choice.selection is None else choice.selection.mu)
            for choice in choices
        ),
    )
    source = scenario_file(asked.scenario)
    given = source.read_text(encoding="utf-8")
    overrides = not_chosen(asked.overrides, choices)
    text, chosen = tuned_text(given, choices, tuned, overrides, str(asked.scenario))
    held_out = held_out.in_runs([point.cell for point in chosen.points])
    with locked(folder):
        write_tuning(folder, text, choices, tuned, held_out, delta)
    columns = [Column(name, wrap=name == "setting") for name in HEADER]
    print_rich(f"{asked.metric} while tuning", columns, lines(choices))
    print_plain(f"{held_out.words[0].upper()}{held_out.words[1:]}.")
    for line in costs(choices, delta):
        print_plain(line)
    for line in edges(choices):
        sys.stderr.write(f"fedpriv: {line}\n")
    rerun = ["fedpriv", "run", str(folder / "scenario.toml")]
    print_plain(shlex.join([*rerun, *(word for each in overrides for word in ("--set", each))]))


def _with_settings(
    scenario: Scenario, asked: Asked, private: bool, generator: np.random.Generator
) -> list[tuple[Row, list[Setting]]]:
    found = rows_of(scenario, asked.grids, asked.axis)
    if not found:
        named = ", ".join(map(str, asked.grids or {}))
        raise InputError(f"{asked.scenario}: no point has a grid; grids are for {asked.axis} = {named}")
    own = asked.grids is None and not asked.one_grid
    rows = [Row(when, cell, asked.one_grid or (grid_around(cell) if own else grid)) for when, cell, grid in found]
    for key in {key for row in rows for key in row.grid}:
        if key in scenario.axes:
            raise InputError(
                f"{key} is swept by {asked.scenario}: take it out of the grid, or narrow it with --set"
            )
    grids_of_rows = [row.grid for row in rows]
    if private:  # every run draws from its row's whole grid
        settings = [settings_of(grid) for grid in grids_of_rows]
    else:
        trials = _TRIALS if asked.trials is None and own else asked.trials
        if trials is not None and not float(trials).is_integer():
            raise InputError(f"--trials {trials}: a whole number of settings is tried, without --private")
        settings = chosen_settings(grids_of_rows, None if trials is None else int(trials), generator)
    return list(zip(rows, settings, strict=True))


def _law(trials: float | None, poisson: bool, eta: float) -> Law:
    mean = _MEAN if trials is None else trials
    return Poisson(mean) if poisson else NegativeBinomial(mean, eta)
