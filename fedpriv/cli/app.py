"""Command-line app: commands with their help, and those of the add-ons.

A run computes the cells of a scenario: a cell is a sweep point (a value of each swept key) with a seed.  Commands
import the modules that do their work late, so that help is fast.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.cli.options import (
    DisplayOptions,
    Imports,
    Json,
    Overrides,
    RunDir,
    SweepOverrides,
    expand_option_groups,
    print_text,
)
from fedpriv.cli.privacy import app as privacy_app
from fedpriv.cli.silo import app as silo_app
from fedpriv.core.errors import InputError, suggestion
from fedpriv.core.extensions import COMMANDS, find_register, import_files

data_app = typer.Typer(
    help="Download and verify a data set, or split one among silos.", no_args_is_help=True, suggest_commands=False
)


@data_app.command("fetch")
def data_fetch(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of the data set: mnist, fashion-mnist, emnist, cifar10, heart-hospitals, dialysis, "
            "dialysis-survival, dialysis-times, adult or visits.",
        ),
    ],
    root: Annotated[
        Path | None,
        typer.Option(help="Folder of data sets; $FEDPRIV_DATA or a folder of the user's cache by default."),
    ] = None,
) -> None:
    """Download a data set, verify it and store it, unless a verified copy is stored already.

    Example: fedpriv data fetch mnist
    """
    from fedpriv.data.named import fetch

    typer.echo(f"{name}: verified in {fetch(name, root, report_progress=typer.echo)}")


@data_app.command("split")
def data_split(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="Scenario whose cells all have the same federation.")
    ],
    out: Annotated[Path, typer.Option(help="Folder in which a folder for each silo is made.")],
    overrides: Overrides = None,
    runs: Annotated[
        int, typer.Option(min=1, help="Number of runs of the scenario that the silos' budgets allow.")
    ] = 10,
) -> None:
    """Make a folder for each silo of a demonstration: its shard of the data set, and a policy.

    Example: fedpriv data split scenarios/containers.toml --out deploy/run
    """
    from fedpriv.scenario.load import load_scenario
    from fedpriv.silo.demo import prepare_silos

    for folder in prepare_silos(load_scenario(scenario, overrides or []), out, runs):
        typer.echo(folder)


app = typer.Typer(
    name="fedpriv",
    help="Simulate, account for and deploy differentially private federated optimization.",
    no_args_is_help=True,
    suggest_commands=False,  # click does, once
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(data_app, name="data")
app.add_typer(privacy_app, name="privacy")
app.add_typer(silo_app, name="silo")


def _version(is_requested: bool) -> None:
    if is_requested:
        from importlib import metadata

        typer.echo(f"fedpriv {metadata.version('fedpriv')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
@expand_option_groups
def run(
    *,
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="Name of a shipped scenario, or a file (TOML).")
    ],
    engine: Annotated[
        str,
        typer.Option(
            help="Engine: vectorized (fastest), inprocess (the Flower apps in one process), ray or deployment."
        ),
    ] = "vectorized",
    imports: Imports = None,
    overrides: SweepOverrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results; by default the first free one of runs/NAME, runs/NAME-2, …, or with "
            "--resume the last used one."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a run that was stopped, or add seeds.")] = False,
    display: DisplayOptions,
    superlink: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Engine deployment: address of a running SuperLink, unix:SOCKET or HOST:PORT, which is used "
            "instead of a local federation.",
        ),
    ] = None,
    root_certificates: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Engine deployment: certificates that vouch for the SuperLink (PEM)."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Run groups of cells in this number of processes (extra: ray).")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run groups of cells on this Ray cluster (extra: ray).")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Run no cell, but check scenario, data and memory, and print the memory that a run needs.",
        ),
    ] = False,
) -> None:
    """Run the unfinished cells of a scenario, write results as cells finish, and table.md at the end.

    Ctrl-C while cells are computed stops the run.  Finished cells stay, and fedpriv prints the command that
    resumes it, unless --quiet was given.  With --dry-run no cell is run.

    Examples:

        fedpriv run quickstart

        fedpriv run mnist-untrusted --set federation.silos=100 --set seeds=1

        fedpriv run quickstart --engine inprocess --set privacy.rho=4

        fedpriv run scenario.toml --import my_algorithm.py

        fedpriv run deployment --engine deployment

        fedpriv run mnist-untrusted --workers 2

        fedpriv run mnist-untrusted --set federation.silos=100 --dry-run
    """
    from fedpriv.core.files import find_scenario_file

    find_scenario_file(scenario)  # a wrong name is reported before torch is imported
    from fedpriv.cli.run import print_memory_need, run_scenario
    from fedpriv.engines.table import Connection
    from fedpriv.engines.workers import Workers
    from fedpriv.study.sweep import RunOptions

    options = RunOptions(
        engine=engine,
        out=out,
        resume=resume,
        connection=Connection(superlink, root_certificates),
        workers=None if workers is None and ray is None else Workers(workers, ray),
        overrides=overrides or [],
        imports=imports or [],
    )
    if dry_run:
        print_memory_need(scenario, options)
    else:
        run_scenario(scenario, options, display)


@app.command("list")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(metavar="WHAT", help="scenarios, algorithms, mechanisms, data or models; by default all."),
    ] = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """List shipped scenarios, algorithms, mechanisms, data and models, each with a description.

    Example: fedpriv list algorithms
    """
    from fedpriv.cli.explore import list_kinds

    import_files(imports or [])
    list_kinds(what, as_json=as_json)


@app.command()
def show(run_dir: RunDir, as_json: Json = False) -> None:
    """Show the tables of a run, its missing cells, its seeds, and its guarantees.

    Example: fedpriv show runs/quickstart
    """
    from fedpriv.cli.explore import show_run

    show_run(run_dir, as_json=as_json)


@app.command()
def compare(first: RunDir, second: RunDir, as_json: Json = False) -> None:
    """Print the settings in which two runs differ, and the mean differences of their metrics over seeds.

    Example: fedpriv compare runs/quickstart runs/quickstart-2
    """
    from fedpriv.cli.explore import compare_runs

    compare_runs(first, second, as_json=as_json)


@app.command()
def table(
    run_dir: RunDir,
    style: Annotated[
        str, typer.Option("--format", help="Format of the tables: markdown, csv or latex.")
    ] = "markdown",
) -> None:
    """Print the tables of a run, with published values beside the measured ones if its scenario has some.

    Afterwards the exit code is 1 if a stored privacy claim differs from the run's releases.

    Example: fedpriv table runs/quickstart --format csv
    """
    from fedpriv.show.table import STYLES, render_tables
    from fedpriv.study.results import check_claims, read_claims

    if style not in STYLES:
        raise InputError(f"--format {style}: known formats are {', '.join(STYLES)}{suggestion(style, STYLES)}")
    results = read_claims(run_dir)
    print_text(render_tables(results, style))
    check_claims(run_dir, results)


@app.command()
def plot(
    run_dir: RunDir,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="KIND", help="png, svg or pdf. Repeatable; png and svg by default."),
    ] = None,
    title: Annotated[bool, typer.Option(help="Write run, settings and seeds above each figure.")] = True,
    width: Annotated[float | None, typer.Option(metavar="INCHES", help="Such as 3.25, a paper's column.")] = None,
) -> None:
    """Draw the report's charts into RUN_DIR/plots.

    They show metrics by round and by privacy, clipping, the noise of mechanisms, and attacks.

    Examples:

        fedpriv plot runs/quickstart

        fedpriv plot runs/quickstart --format pdf --no-title --width 3.25
    """
    from fedpriv.show.plots import plot_run
    from fedpriv.study.results import check_claims, read_claims

    for path in plot_run(run_dir, kinds or ("png", "svg"), with_title=title, width=width):
        typer.echo(path)
    check_claims(run_dir, read_claims(run_dir))


@app.command()
def report(
    run_dir: RunDir,
    out: Annotated[Path | None, typer.Option(help="File of the report; RUN_DIR/report.html by default.")] = None,
) -> None:
    """Write one self-contained HTML file with tables, charts, protection, settings and the command.

    Example: fedpriv report runs/quickstart
    """
    from fedpriv.show.page import write_report
    from fedpriv.study.results import check_claims, read_claims

    typer.echo(write_report(run_dir, out))
    check_claims(run_dir, read_claims(run_dir))


@app.command()
def export(
    run_dir: RunDir,
    form: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="FORM",
            help="Form and file: dp-accounting (dp-events.json) or ro-crate (ro-crate-metadata.json).",
        ),
    ],
) -> None:
    """Write a run in a form that other programs read, into its folder.

    dp-accounting gets the releases of each cell as its events; ro-crate describes the folder for repositories
    of research data.

    Example: fedpriv export runs/quickstart --as dp-accounting
    """
    from fedpriv.show.page import export_run as write

    typer.echo(write(run_dir, form))


def _register_missing(command: str, error: InputError) -> None:
    """Add a command that raises the error of its missing add-on."""
    *group, name = command.split()
    parent_app = {"silo": silo_app, "data": data_app, "privacy": privacy_app}.get(group[0], app) if group else app

    @parent_app.command(name, hidden=True, context_settings={"ignore_unknown_options": True})
    def missing(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        raise error


for module, commands in COMMANDS.items():
    try:
        find_register(module)(app, silo_app, data_app)
    except InputError as error:
        for command in commands:
            _register_missing(command, error)

_PANELS: Mapping[str, Sequence[str]] = {
    "Begin": ("init", "advise", "list", "data", "tune"),
    "Run and read": (
        *("run", "show", "table", "report", "plot", "compare", "coefficients", "statistics", "worth", "export"),
    ),
    "What is protected": ("privacy", "audit", "certify"),
    "Sites and servers": ("silo", "superlink", "supernode", "certificates", "federation"),
}
"""Commands of `fedpriv` by the panel of the help that lists them."""
_PANEL_OF_COMMAND = {name: panel for panel, names in _PANELS.items() for name in names}
_entries: list[Any] = [*app.registered_commands, *app.registered_groups]
for entry in _entries:
    command_name = entry.name or getattr(entry.callback, "__name__", "")
    entry.rich_help_panel = _PANEL_OF_COMMAND.get(command_name, "Others")
