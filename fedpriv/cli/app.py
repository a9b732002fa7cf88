"""Commands and their help; a command imports its modules when it is called, so that help is quick."""

from pathlib import Path
from typing import Annotated

import typer

from fedpriv.cli.data import app as data_app
from fedpriv.cli.federation import app as federation_app
from fedpriv.cli.options import (
    AuditRequest,
    Display,
    Imports,
    Overrides,
    RunDir,
    SweepOverrides,
    TuneRequest,
    grouped,
)
from fedpriv.cli.privacy import app as privacy_app
from fedpriv.cli.silo import app as silo_app
from fedpriv.cli.silo import certificates, certify, superlink, supernode
from fedpriv.core.errors import InputError, suggestion

app = typer.Typer(
    name="fedpriv",
    help="Differentially private federated optimization: simulate, account, deploy.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,  # click does, once
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(data_app, name="data")
app.add_typer(privacy_app, name="privacy")
app.add_typer(silo_app, name="silo")
app.add_typer(federation_app, name="federation")


def _version(wanted: bool) -> None:
    if wanted:
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
@grouped
def run(
    *,
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="A shipped scenario by name, or a file (TOML).")
    ],
    engine: Annotated[
        str,
        typer.Option(help="vectorized (fastest), inprocess (the Flower apps in one process), ray or deployment."),
    ] = "vectorized",
    imports: Imports = None,
    overrides: SweepOverrides = None,
    out: Annotated[Path | None, typer.Option(help="Where results go; runs/NAME by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a run that was stopped, or add seeds.")] = False,
    display: Display,
    superlink: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Deployment: a SuperLink that runs, instead of a local federation: unix:SOCKET or HOST:PORT.",
        ),
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Deployment: whom to trust for the SuperLink's TLS (PEM).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Run groups of cells in so many processes (extra: ray).")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run groups of cells on this Ray cluster (extra: ray).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and say what memory it takes; nothing is run.")
    ] = False,
) -> None:
    """Run every cell of a scenario; write results.json, history.jsonl and table.md as it goes.

    Stop it with Ctrl-C whenever you like: finished cells stay, and fedpriv prints the command that resumes it.

    Examples:

        fedpriv run quickstart

        fedpriv run mnist-untrusted --set federation.silos=100 --set seeds=1

        fedpriv run quickstart --engine inprocess --set privacy.rho=4

        fedpriv run scenario.toml --import my_algorithm.py

        fedpriv run deployment --engine deployment

        fedpriv run mnist-untrusted --workers 2

        fedpriv run mnist-untrusted --set federation.silos=100 --dry-run
    """
    from fedpriv.core.files import scenario_file

    scenario_file(scenario)  # a name that is wrong is told before torch is imported
    from fedpriv.cli.run import run_scenario, weigh
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
        weigh(scenario, options)
        return
    run_scenario(scenario, options, display)


@app.command()
@grouped
def tune(request: TuneRequest) -> None:
    """Choose settings on held-out training records, as many for every row; write the scenario with them.

    The test set is not looked at. Without --private the choice reads records without noise, and no ε covers it.

    Examples:

        fedpriv tune quickstart

        fedpriv tune my.toml --grid algorithm.step=[0.1,1,10] --grid algorithm.clip=[0.5,1,2] --held-out 1000

        fedpriv tune my.toml --private --trials 10
    """
    from fedpriv.cli.tune import tune_scenario

    tune_scenario(request)


@app.command()
def worth(
    given: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR|SCENARIO", help="A run's folder, or a scenario by name or file."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key. Repeatable.")
    ] = None,
    pooled: Annotated[
        bool, typer.Option("--pooled", help="Also the records of all silos in one place, without noise.")
    ] = False,
    any_learner: Annotated[
        bool, typer.Option("--any-learner", help="Also the best of kernel ridge and boosted trees (scikit-learn).")
    ] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Only fill the row that tables and reports show: every seed and model.")
    ] = False,
    personal: Annotated[
        bool, typer.Option("--personal", help="Also models that each silo pulls home from the released one.")
    ] = False,
    trust: Annotated[
        list[str] | None,
        typer.Option("--trust", help="The gain against ε for it; all by default. Repeatable."),
    ] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="A point of the grid (.1 .3 1 3 10 30). Repeatable.")
    ] = None,
    splits: Annotated[
        int | None, typer.Option(min=0, help="Splits of the records into training and test; 0: as published.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Noise seeds in each split.")] = 2,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the gain against ε: .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, silo by silo.")] = False,
) -> None:
    """Is it worth joining? Each silo alone, nothing released, beside what a run's models gain.

    With --splits, --trust, --epsilon or --plot it runs the scenario over a grid of ε and says from which on
    joining pays. It reads records of all silos: for simulations and public data.

    Examples:

        fedpriv worth heart-hospitals --pooled

        fedpriv worth heart-hospitals --splits 20 --plot gain.svg

        fedpriv worth runs/heart-hospitals
    """
    from fedpriv.cli.worth import Wanted
    from fedpriv.cli.worth import worth as compare

    grid = None
    if trust or epsilon or splits is not None or plot is not None:
        grid = (tuple(trust or ()), tuple(sorted(set(epsilon or ()))), splits, seeds, plot)
    compare(given, overrides or [], Wanted(pooled, any_learner, alone, personal, grid, as_json))


@app.command()
def statistics(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan of tables (TOML).")],
    overrides: Overrides = None,
    engine: Annotated[str, typer.Option(help="vectorized, inprocess, ray or deployment.")] = "vectorized",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results; by default runs/NAME.")
    ] = None,
    superlink: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Deployment: a SuperLink that runs.")
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Deployment: whom to trust for the SuperLink's TLS (PEM).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say cells, errors and price; nothing is asked or charged.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Release counts, quantiles and survival curves of a table, each with an interval that has the noise in it.

    Examples:

        fedpriv statistics plan.toml --dry-run

        fedpriv statistics plan.toml --set privacy.epsilon=3
    """
    from fedpriv.cli.statistics import statistics as release
    from fedpriv.engines.table import Connection

    connection = Connection(superlink, root_certificates)
    release(plan, overrides or [], engine, out, connection, dry_run=dry_run, as_json=as_json)


@app.command("list")
def list_(
    what: Annotated[
        str | None, typer.Argument(metavar="WHAT", help="scenarios, algorithms, mechanisms, data or models.")
    ] = None,
    imports: Imports = None,
) -> None:
    """List what scenarios can name: scenarios, algorithms, mechanisms, data sets, models.

    Example: fedpriv list algorithms
    """
    from fedpriv.cli.explore import list_what
    from fedpriv.core.extensions import import_files

    import_files(imports or [])
    list_what(what)


@app.command()
def advise(
    silos: Annotated[int, typer.Option(help="How many silos there are.")],
    records: Annotated[str, typer.Option(help="Records of each silo for training: 500, or 120,80,300.")],
    features: Annotated[int, typer.Option(help="Numbers that a record becomes.")],
    epsilon: Annotated[float, typer.Option(help="Of the promise.")],
    delta: Annotated[float, typer.Option(help="Of the promise.")] = 1e-5,
    classes: Annotated[int, typer.Option(help="How many classes there are; 0 for a real target.")] = 0,
    trust: Annotated[str, typer.Option(help="untrusted, secure-aggregation or trusted.")] = "untrusted",
    feature_norm: Annotated[
        float | None,
        typer.Option(help="Bound on the norm of a record; by default that of features in -1 … 1, √features."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="The most that the network allows.")] = None,
    data: Annotated[
        str | None, typer.Option(help="What the scenario names as its data; nothing of it is read.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the scenario there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Say from public facts which row, batch, clip, step, rounds and trust to take, and why; no record is read.

    Example: fedpriv advise --silos 4 --records 120,80,300,95 --features 13 --classes 2 --epsilon 1 --out mine.toml
    """
    from fedpriv.cli.advise import advise_on

    facts = {
        "features": features,
        "epsilon": epsilon,
        "delta": delta,
        "classes": classes,
        "trust": trust,
        "feature_norm": feature_norm,
        "rounds": rounds,
    }
    advise_on(silos, records, facts, data, out, as_json=as_json)


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")]) -> None:
    """Make a folder to start from: a scenario, an algorithm, a model and a notebook of your own.

    Example: fedpriv init my-study
    """
    from fedpriv.cli.data import begin

    for path in begin(folder):
        typer.echo(path)
    typer.echo(f"next: cd {folder}, and the commands that README.md there names", err=True)


@app.command()
def show(run_dir: RunDir) -> None:
    """Show a run on the terminal: its tables, what it guarantees, what is missing.

    Example: fedpriv show runs/quickstart
    """
    from fedpriv.cli.explore import show_run

    show_run(run_dir)


@app.command()
def compare(first: RunDir, second: RunDir) -> None:
    """Compare two runs seed by seed: where their settings differ, and by how much their figures do.

    Example: fedpriv compare runs/quickstart runs/quickstart-2
    """
    from fedpriv.cli.explore import compare_runs

    compare_runs(first, second)


@app.command()
def table(
    run_dir: RunDir,
    style: Annotated[str, typer.Option("--format", help="markdown, csv or latex.")] = "markdown",
) -> None:
    """Print what was measured beside what was published.

    Example: fedpriv table runs/quickstart --format csv
    """
    from fedpriv.cli.shown import say
    from fedpriv.show.table import STYLES, render
    from fedpriv.study.results import check_claims, read_claims

    if style not in STYLES:
        raise InputError(f"--format {style}: known formats are {', '.join(STYLES)}{suggestion(style, STYLES)}")
    results = read_claims(run_dir)
    say(render(results, style))
    check_claims(run_dir, results)


@app.command()
def coefficients(
    run_dir: RunDir, as_json: Annotated[bool, typer.Option("--json", help="Plain data in one line.")] = False
) -> None:
    """Print the weights of ridge-statistics or noisy-newton, with intervals that have sampling and noise in them.

    Example: fedpriv coefficients runs/ridge
    """
    from fedpriv.cli.coefficients import coefficients as show_coefficients

    show_coefficients(run_dir, as_json=as_json)


@app.command()
def plot(run_dir: RunDir) -> None:
    """Draw the report's charts into RUN_DIR/plots: curves, privacy, clipping, noise by mechanism, trade-offs.

    Example: fedpriv plot runs/quickstart
    """
    from fedpriv.show.plots import plot_run
    from fedpriv.study.results import check_claims, read_claims

    for path in plot_run(run_dir):
        typer.echo(path)
    check_claims(run_dir, read_claims(run_dir))


@app.command()
def report(
    run_dir: RunDir,
    out: Annotated[Path | None, typer.Option(help="The file; RUN_DIR/report.html by default.")] = None,
) -> None:
    """Write one HTML file that stands alone: what ran, what is protected, tables, plots, how to run it again.

    Example: fedpriv report runs/quickstart
    """
    from fedpriv.show.page import write_report
    from fedpriv.study.results import check_claims, read_claims

    typer.echo(write_report(run_dir, out))
    check_claims(run_dir, read_claims(run_dir))


@app.command()
@grouped
def audit(request: AuditRequest) -> None:
    """Try to refute the privacy claim with canaries; exit code 0 if it stands, 3 if it is refuted.

    Example: fedpriv audit scenarios/quickstart.toml --set algorithm.trust=trusted
    """
    from fedpriv.core.files import scenario_file

    scenario_file(request.scenario)
    from fedpriv.cli.audit import audit_scenario

    audit_scenario(request)


@app.command()
def export(
    run_dir: RunDir,
    form: Annotated[
        str,
        typer.Option(
            "--as", metavar="FORM", help="dp-accounting (dp-events.json) or ro-crate (ro-crate-metadata.json)."
        ),
    ],
) -> None:
    """Write a run in a form that other programs read, into its folder.

    dp-accounting gets the releases of each cell as its events; ro-crate describes the folder for repositories
    of research data.

    Example: fedpriv export runs/quickstart --as dp-accounting
    """
    from fedpriv.show.exports import export as write

    typer.echo(write(run_dir, form))


app.command()(certify)
app.command()(superlink)
app.command()(supernode)
app.command()(certificates)
