"""`fedpriv tune` and `fedpriv.tune`: choose settings on held-out records.

A row is one point of the scenario's sweep, with a grid: values to try for some keys.  A setting has one value for
each of these keys.  A trial is a run with a setting that does not train on the held-out records, and its score is
a metric on them.  An open choice compares exact scores.  A private one makes a random number of trials, and adds
noise to their scores.
"""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedpriv.accounting.selection import NegativeBinomialRunCount, PoissonRunCount, RunCountDistribution
from fedpriv.addons.tune.grids import (
    MEASURE_KEYS,
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
from fedpriv.api.results import RunResults
from fedpriv.api.run import OWN_DATA_SCENARIO, format_assignment, insert_own_data, run
from fedpriv.claims.outcome import RunObserver
from fedpriv.cli.explore import Column, print_plain, print_rich
from fedpriv.cli.options import print_text
from fedpriv.cli.progress import Progress
from fedpriv.core.errors import InputError, refuse
from fedpriv.core.extensions import import_files
from fedpriv.core.files import find_scenario_file
from fedpriv.engines.workers import Workers
from fedpriv.scenario.load import Scenario, load_scenario, parse_scenario, read_toml
from fedpriv.scenario.published import TunedChoice, Tuning, parse_assignment
from fedpriv.study.sweep import RunOptions, lock_folder

_DEFAULT_SEED = 100  # the scenarios of fedpriv have smaller seeds
_DEFAULT_TRIALS = 25
_DEFAULT_MEAN_RUNS = 20.0
TUNING_KEYS: Mapping[str, tuple[type, str]] = {
    "scenario": (str, "the path of a scenario, from the folder of this file"),
    "grid": (dict, "a table [grid.VALUE] for every value of the axis"),
    "axis": (str, 'a dotted key, such as "algorithm.name"'),
    "fixed": (dict, 'a table of dotted keys and values, such as "data.validation" = 1000'),
    "seeds": (list, "a list of whole numbers, such as [100, 101]"),
    "metric": (str, 'the name of a metric, such as "test_loss"'),
}
"""Keys of a tuning file, with the type of the value and its description."""


@dataclass(frozen=True)
class Grids:
    """Values to try, by the value of a key of the row, or the same values for all rows."""

    by_value: Mapping[Any, Grid] | None = None
    """Grids by the value of `axis`, or None if rows share `for_all` or have default grids."""
    for_all: Grid = field(default_factory=dict)
    """Grid of every row, or empty."""
    axis: str = "algorithm.name"
    """Dotted key of a scenario, by whose value in a row the row has its grid."""


def complete_request(request: TuneRequest) -> tuple[TuneRequest, Grids]:
    """Complete a request by its tuning file, if it names one.

    A tuning file is TOML that names a scenario and has grids for it (`TUNING_KEYS`).  A file without `scenario` or
    `grid` is a scenario.

    Returns:
        The request, with the scenario that the tuning file names, and the grids.

    Raises:
        InputError: The file cannot be read, the tuning file or a grid is not valid, or options and file contradict
            each other.
    """
    return complete_request_of_values(request, parse_grid(request.grid or []))


def complete_request_of_values(
    request: TuneRequest, line_grid: dict[str, list[Any]], *, is_file: bool = True
) -> tuple[TuneRequest, Grids]:
    """Complete a request by its tuning file, if it names one, and return it with the grids of the rows.

    A file with the keys `scenario` and `grid` is a tuning file.  Seeds, held-out records and values in `fixed` of
    the request take precedence over those of the file, and the file's metric over the request's.  The number of
    held-out records in a file is the value of "data.validation" in its `fixed`.  Without seeds there is one, 100.

    Args:
        request: Options of the command, whose `grid` is not used.
        line_grid: Values to try by dotted key, or empty.
        is_file: Whether `request.scenario` names a file, which may be a tuning file.

    Raises:
        InputError: The file cannot be read, the tuning file or a grid is not valid, request and file both have
            grids, `fixed` cannot be used, or a private request has seeds.
    """
    fixed = request.fixed or []
    check_grid(line_grid, "--grid")
    refuse(
        {
            **{
                f"--while-tuning {assignment!r}: this key is how many records are held out; give --held-out": (
                    parse_assignment(assignment, "--while-tuning")[0] == "data.validation"
                )
                for assignment in fixed
            },
            "--private: each run has a secret seed of its own; leave --seeds out": (
                request.private and request.seeds
            ),
        }
    )
    path = find_scenario_file(request.scenario) if is_file else request.scenario
    tree = read_toml(path) if is_file else {}
    if not {"scenario", "grid"} <= tree.keys():
        return replace(request, seeds=request.seeds or [_DEFAULT_SEED]), Grids(for_all=line_grid)
    if unknown := sorted(tree.keys() - TUNING_KEYS):
        raise InputError(f"{request.scenario}: {unknown[0]}: a tuning file has {', '.join(sorted(TUNING_KEYS))}")
    if line_grid:
        raise InputError(f"{request.scenario}: a tuning file has grids of its own; leave --grid out")
    for key, (kind, description) in TUNING_KEYS.items():
        if not isinstance(tree.get(key, kind()), kind):
            raise InputError(f"{request.scenario}: {key}: expected {description}")
    for value, grid in tree["grid"].items():
        check_grid(grid, f"{request.scenario}: grid.{value}:")
    file_keys = tree.get("fixed", {})
    completed = replace(
        request,
        scenario=(path.parent / tree["scenario"]).resolve(),
        fixed=[
            *(
                format_assignment(key, value, f"{request.scenario}: fixed")
                for key, value in file_keys.items()
                if key != "data.validation"
            ),
            *fixed,
        ],
        held_out=file_keys.get("data.validation") if request.held_out is None else request.held_out,
        seeds=request.seeds or tree.get("seeds") or [_DEFAULT_SEED],
        metric=tree.get("metric", request.metric),
    )
    return completed, Grids(tree["grid"], axis=tree.get("axis", Grids.axis))


@dataclass(frozen=True)
class TuningOutcome:
    """Choices of a tuning, and the scenario with the chosen settings, which lies in `folder`."""

    folder: Path
    text: str
    """TOML of the scenario."""
    overrides: Sequence[str]
    """"KEY=VALUE" that a run of the scenario takes, too."""
    choices: Sequence[TuningChoice]
    held_out: HeldOut
    metric: str
    delta: float


def tune_scenario(request: TuneRequest) -> None:
    """Choose settings, write the tuned scenario and print the table.

    Results are written into the folder `out` of the request, or runs/NAME-tuned.

    Raises:
        InputError: The scenario cannot be tuned, or not by these options.
        RunError: A trial fails.
    """
    completed, grids = complete_request(request)
    import_files(completed.imports or [])
    scenario = load_scenario(completed.scenario, completed.overrides or [])
    text = find_scenario_file(completed.scenario).read_text(encoding="utf-8")
    outcome = choose_by_request(scenario, text, completed, grids, [Progress(quiet=False)])
    _show(outcome, RunOptions(overrides=outcome.overrides, imports=completed.imports or []))


def choose_by_request(
    scenario: Scenario, text: str, request: TuneRequest, grids: Grids, observers: Sequence[RunObserver]
) -> TuningOutcome:
    """Choose settings for the rows of a scenario, and write the tuned scenario and its table.

    The folder of the results is `request.out`, or runs/NAME-tuned.

    Args:
        scenario: Scenario that is tuned.
        text: TOML of the scenario without the request's overrides.
        request: Options of the command, completed by a tuning file (`complete_request_of_values`).
        grids: Values to try.
        observers: Observers of the trials of an open choice.

    Raises:
        InputError: The scenario cannot be tuned, or not by these options.
        RunError: A trial fails.
    """
    if scenario.tuning is not None:
        raise InputError(f"{request.scenario}: has [tuned] already; tune the scenario that it was made from")
    metric = request.metric or default_metric(scenario)
    run_count = _make_run_count(request) if request.private else None
    refuse(
        {
            "--poisson and --eta say how many runs a private choice makes: give --private with them": (
                run_count is None and (request.poisson or request.eta)
            ),
            "--poisson: a Poisson number of runs has no --eta; give one of them": request.poisson and request.eta,
        }
    )
    # Without a seed a private choice has secret randomness, and an open one can be repeated.
    generator = np.random.default_rng(request.seed if request.seed is not None or request.private else 0)
    rows = _choose_row_settings(scenario, request, grids, generator)
    if metric == "test_loss" and (
        key := next(
            (key for _, settings in rows for setting in settings for key in setting if key in MEASURE_KEYS), None
        )
    ):
        raise InputError(
            f"grid of {key}: it says how test_loss is computed, by which its values cannot be compared; give "
            "--metric, or sweep this key for a row of each"
        )
    cells = [point.cell for point in scenario.points]
    # Counting the held-out records of each silo refuses runs that lack records, before a trial starts.
    held_out = hold_out(cells[0], request.held_out).count_in_runs(cells)
    for row, settings in rows:
        check_settings(row, settings)
    folder, fixed = Path(request.out or f"runs/{scenario.name}-tuned"), request.fixed or []
    if run_count is None:
        workers = None if request.workers is None else Workers(request.workers)
        options = RunOptions(out=folder / "trials", resume=request.resume, workers=workers)
        choices = tune_openly(*(scenario, rows, held_out, fixed, request.seeds or [], metric), options, observers)
    else:
        if request.resume or request.workers is not None or request.metric not in (None, ACCURACY):
            raise InputError(
                "--private: keeps no trials to resume from, runs in this process and compares accuracies; leave "
                "--resume, --workers and --metric out"
            )
        choices = tune_privately(scenario, rows, held_out, fixed, run_count, generator)
    return _write(scenario, text, request, metric, choices, held_out, run_count, len(rows[0][1]), folder)


def default_metric(scenario: Scenario) -> str:
    """Return the metric by which settings are compared if none is named."""
    cell = scenario.points[0].cell
    if cell.model.is_classification:
        return ACCURACY
    return "test_r2" if "r2" in cell.run.metrics else "test_loss"


def _write(
    scenario: Scenario,
    text_before: str,
    request: TuneRequest,
    metric: str,
    choices: Sequence[TuningChoice],
    held_out: HeldOut,
    run_count: RunCountDistribution | None,
    trial_count: int,
    folder: Path,
) -> TuningOutcome:
    """Write the tuned scenario and its table into `folder`, and return them.

    `trial_count` is the number of settings of a row, or after a private choice that of the first row's grid.

    Raises:
        InputError: The choices cannot be written into the scenario, its runs lack records, or another process uses
            the folder.
    """
    delta = scenario.points[0].cell.privacy.delta
    tuned = Tuning(
        settings=trial_count,
        held_out=held_out.count,
        metric=metric,
        law="none"
        if run_count is None
        else "poisson"
        if isinstance(run_count, PoissonRunCount)
        else "negative-binomial",
        mean=None if run_count is None else run_count.mean,
        eta=run_count.eta if isinstance(run_count, NegativeBinomialRunCount) else 0.0,
        rows=tuple(
            TunedChoice(when=dict(choice.row.when), mu=None if choice.selection is None else choice.selection.mu)
            for choice in choices
        ),
    )
    # An override of a chosen key would outrank the choice.
    overrides = drop_chosen_keys(request.overrides or [], choices)
    text, tuned_scenario = format_tuned_scenario(text_before, choices, tuned, overrides, str(request.scenario))
    # Chosen batch sizes may change which records the silos read, so that the held-out ones are counted again.
    held_out = held_out.count_in_runs([point.cell for point in tuned_scenario.points])
    with lock_folder(folder):
        write_tuning(folder, text, choices, tuned, held_out, delta)
    return TuningOutcome(folder, text, overrides, choices, held_out, metric, delta)


def _show(outcome: TuningOutcome, options: RunOptions) -> None:
    """Print the choices, held-out records, costs, warnings, and the command that runs the tuned scenario."""
    columns = [Column(name, can_wrap=name == "setting") for name in HEADER]
    print_rich(f"{outcome.metric} while tuning", columns, table_lines(outcome.choices))
    description = outcome.held_out.description
    costs = describe_costs(outcome.choices, outcome.delta)
    for line in (f"{description[0].upper()}{description[1:]}.", *costs):
        print_plain(line)
    for line in warn_of_edges(outcome.choices):
        print_text(f"fedpriv: {line}\n", sys.stderr)
    print_plain(options.format_command(str(outcome.folder / "scenario.toml")))


def _choose_row_settings(
    scenario: Scenario, request: TuneRequest, grids: Grids, generator: np.random.Generator
) -> list[tuple[TuningRow, list[Setting]]]:
    """Return the rows of the tuning with the settings to try, or for a private choice those to draw from.

    A row has the grid for its value of `grids.axis`, or the grid for all rows, or, if none is given, the default
    grid.  Points without a grid are left out.  An open choice tries `trials` settings of each row at random, by
    default 25 of default grids and all of given ones.

    Raises:
        InputError: No point has a grid, or no point has one of the grids though no override leaves points out, a
            grid varies a swept key or one within a section that an option holds, `trials` is no whole number, or
            no settings can be chosen.
    """
    points = pair_grids(scenario, grids.by_value, grids.axis)
    has_default_grids = grids.by_value is None and not grids.for_all
    rows = [
        TuningRow(when, cell, grids.for_all or (make_default_grid(cell) if has_default_grids else grid))
        for when, cell, grid in points
    ]
    keys = {key for row in rows for key in row.grid}
    overridden_keys = {parse_assignment(text)[0].removeprefix("sweep.") for text in request.overrides or []}
    # Overrides may leave out points for which the tuning file has grids.
    is_narrowed = grids.axis in overridden_keys if grids.axis in scenario.axes else bool(overridden_keys)
    refuse(
        {
            f"{request.scenario}: no point has a grid; grids are for {grids.axis} = "
            f"{', '.join(map(str, grids.by_value or {}))}": not points,
            **{
                f"{request.scenario}: no point has the grid for {grids.axis} = {name}; correct this value in the "
                "tuning file, or take its grid out": (
                    not is_narrowed and all(grid is not other for _, _, other in points)
                )
                for name, grid in (grids.by_value or {}).items()
            },
            **{
                f"{key} is swept by {request.scenario}: take it out of the grid, or narrow it with --set": (
                    key in scenario.axes
                )
                for key in keys
            },
            **{
                f"--while-tuning {text!r}: the grid tries values of this key; leave it out": (
                    parse_assignment(text)[0] in keys
                )
                for text in request.fixed or []
            },
            **{
                f"{option} {assignment!r} holds a whole section, and would hide {key}, which the trials set; "
                "give the keys of the section one by one": (key.startswith(f"{parse_assignment(assignment)[0]}."))
                for option, assignments, trial_keys in (
                    ("--set", request.overrides, keys),
                    ("--while-tuning", request.fixed, keys | {"data.validation"}),  # else test records are scored
                )
                for assignment in assignments or []
                for key in trial_keys
            },
        }
    )
    grids_of_rows = [row.grid for row in rows]
    if request.private:  # each run draws from the whole grid of its row
        settings = [list_settings(grid) for grid in grids_of_rows]
    else:
        trials = _DEFAULT_TRIALS if request.trials is None and has_default_grids else request.trials
        if trials is not None and not float(trials).is_integer():
            raise InputError(f"--trials {trials}: a whole number of settings is tried, without --private")
        settings = choose_settings(grids_of_rows, None if trials is None else int(trials), generator)
    return list(zip(rows, settings, strict=True))


def _make_run_count(request: TuneRequest) -> RunCountDistribution:
    """Return the distribution of the number of runs of a private choice, with `trials` or 20 on average."""
    mean = _DEFAULT_MEAN_RUNS if request.trials is None else request.trials
    return PoissonRunCount(mean) if request.poisson else NegativeBinomialRunCount(mean, request.eta)


@dataclass(frozen=True)
class TuningResults:
    """Choices of `tune`, with the tuned scenario.

    The folder has scenario.toml, tuning.md and tuning.json, as the command writes them.
    """

    folder: Path
    tree: Mapping[str, Any]
    """Tuned scenario as nested dictionaries, in which own records and modules are names, without `set`."""
    settings: tuple[Mapping[str, Any] | None, ...]
    """Chosen setting of each row, by dotted key, or None where a private choice made no run."""
    scores: tuple[float | None, ...]
    """Score of each chosen setting on the held-out records, with noise after a private choice."""
    costs: tuple[str, ...]
    """Sentences on what the choice costs, and on values at the edge of a grid."""
    inputs: Mapping[str, Any] = field(repr=False)
    """Arguments of `fedpriv.run` for the same records, model and overrides."""

    def __repr__(self) -> str:
        rows = ", ".join(str(None if setting is None else dict(setting)) for setting in self.settings)
        return f"TuningResults({rows}, folder={str(self.folder)!r})"

    def run(self, **arguments: Any) -> RunResults:
        """Run the tuned scenario with the records and the model that `tune` was given.

        Args:
            arguments: Further arguments of `fedpriv.run`, such as `out`.
        """
        return run(self.tree, **{**self.inputs, **arguments})


def tune(
    scenario: str | Path | Mapping[str, Any],
    *,
    train: Any = None,
    test: Any = None,
    model: Any = None,
    classes: int | None = None,
    loss: Any = None,
    set: Mapping[str, Any] | None = None,  # noqa: A002 - the name of the command's option
    grid: Mapping[str, Sequence[Any]] | None = None,
    fixed: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    progress: bool = False,
    **options: Any,
) -> TuningResults:
    """Choose settings on held-out training records, as `fedpriv tune` does, and return the tuned scenario.

    No setting is compared on the test records.  A choice that is not private reads training records without noise,
    and no ε covers it.  The results are also written into the folder `out`, by default runs/NAME-tuned.

    Args:
        scenario: Scenario of `fedpriv.run`, or without own records and module a tuning file.
        train: Training records of your own, as for `fedpriv.run`.
        test: Test records, as for `fedpriv.run`.
        model: Torch module, as for `fedpriv.run`.
        classes: Number of classes, as for `fedpriv.run`.
        loss: Loss of the module, as for `fedpriv.run`.
        set: Values for dotted keys of the scenario that is tuned.
        grid: Values to try by dotted key, by default those of a tuning file, or numbers in [algorithm] times
            factors from 1/9 to 9.
        fixed: Values that hold while tuning.
        seeds: Seeds of the trials, by default those of a tuning file, or 100.
        progress: Whether to show a progress bar, which a private choice has not.
        options: Further fields of the command: trials, held_out, metric, out, private, eta, poisson, seed, resume
            and workers.

    Raises:
        InputError: The scenario cannot be tuned, or not by these options.
        RunError: A trial fails.
    """
    own_inputs = {"train": train, "test": test, "model": model, "classes": classes, "loss": loss}
    has_own_inputs = any(value is not None for value in own_inputs.values())
    names = sorted(TuneRequest.__dataclass_fields__.keys() - {"scenario", "grid", "fixed", "overrides", "imports"})
    if unknown := sorted(options.keys() - names):
        raise InputError(f"tune: {unknown[0]}: no option; known are {', '.join(names)}")
    if has_own_inputs and options.get("workers") is not None:
        raise InputError("workers: other processes have no arrays and modules of this program; leave it out")
    overrides = [format_assignment(key, value) for key, value in (set or {}).items()]
    is_file = not (has_own_inputs or isinstance(scenario, Mapping))
    request, grids = complete_request_of_values(
        TuneRequest(
            scenario=Path("scenario" if isinstance(scenario, Mapping) else scenario),
            fixed=[format_assignment(key, value, "fixed") for key, value in (fixed or {}).items()],
            seeds=None if seeds is None else list(seeds),
            overrides=overrides,
            **options,
        ),
        {key: list(values) for key, values in (grid or {}).items()},
        is_file=is_file,
    )
    if is_file:
        text = find_scenario_file(request.scenario).read_text(encoding="utf-8")
        loaded = load_scenario(request.scenario, overrides)
    else:
        tree = scenario if isinstance(scenario, Mapping) else read_toml(find_scenario_file(Path(scenario)))
        # In this scenario of fedpriv, settings that `set` leaves open may follow the number of records.
        settings = (set or {}) if str(scenario) == OWN_DATA_SCENARIO else None
        completed_tree = insert_own_data(tree, **own_inputs, overrides=settings)
        text, loaded = (
            tomli_w.dumps(completed_tree),
            parse_scenario(completed_tree, str(request.scenario), overrides),
        )
    outcome = choose_by_request(loaded, text, request, grids, [Progress(quiet=False)] if progress else [])
    # Chosen keys are in the tuned scenario, and `set` must not override them in its runs.
    stored_keys = [override.partition("=")[0] for override in outcome.overrides]
    return TuningResults(
        outcome.folder,
        tomllib.loads(outcome.text),
        tuple(choice.setting for choice in outcome.choices),
        tuple(choice.score for choice in outcome.choices),
        (*describe_costs(outcome.choices, outcome.delta), *warn_of_edges(outcome.choices)),
        {**own_inputs, "set": {key: value for key, value in (set or {}).items() if key in stored_keys}},
    )
