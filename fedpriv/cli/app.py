"""The commands and their help; what they do is imported when they are called, so that help is quick."""

from pathlib import Path
from typing import Annotated

import typer

from fedpriv.cli.privacy import app as privacy_app
from fedpriv.cli.silo import app as silo_app
from fedpriv.errors import InputError

app = typer.Typer(
    name="fedpriv",
    help="Differentially private federated optimization: simulate, account, deploy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(help="Data sets: download, verify, cache.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(privacy_app, name="privacy")
app.add_typer(silo_app, name="silo")

Imports = Annotated[
    list[Path] | None,
    typer.Option("--import", metavar="FILE.py", help="Your own algorithms, models and data. Repeatable."),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A folder that `fedpriv run` wrote.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"fedpriv {metadata.version('fedpriv')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@app.command()
def run(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="A shipped scenario by name, or a file (TOML).")
    ],
    engine: Annotated[
        str,
        typer.Option(help="vectorized (fastest), inprocess (the Flower apps in one process), ray or deployment."),
    ] = "vectorized",
    imports: Imports = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key; a swept key is narrowed. Repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where results go; runs/NAME by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table; errors only.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Progress as JSON lines on stdout instead of the table.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the report's page on this machine while the run goes.")
    ] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write curves for TensorBoard too (extra: tensorboard).")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option(metavar="URI", help="Log to this MLflow tracking URI too (extra: mlflow).")
    ] = None,
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
) -> None:
    """Run every cell of a scenario; write results.json, history.jsonl and table.md as it goes.

    Stop it with Ctrl-C whenever you like: what is finished stays, and the command that goes on is printed.

    Examples:

        fedpriv run quickstart

        fedpriv run mnist-untrusted --set federation.silos=100 --set seeds=1

        fedpriv run quickstart --engine inprocess --set privacy.rho=4

        fedpriv run scenario.toml --import my_algorithm.py

        fedpriv run deployment --engine deployment

        fedpriv run mnist-untrusted --workers 2
    """
    from fedpriv.cli.run import run_scenario
    from fedpriv.engines.base import Connection
    from fedpriv.engines.workers import Workers

    run_scenario(
        scenario,
        engine,
        overrides or [],
        out,
        Connection(superlink, root_certificates),
        None if workers is None and ray is None else Workers(workers, ray),
        resume=resume,
        quiet=quiet,
        as_json=as_json,
        tensorboard=tensorboard,
        mlflow=mlflow,
        imports=imports or [],
        watch=watch,
    )


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
    from fedpriv.extensions import import_files

    import_files(imports or [])
    list_what(what)


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")]) -> None:
    """Make a folder to start from: a scenario, an algorithm, a model and a notebook of your own.

    Example: fedpriv init my-study
    """
    from fedpriv.cli.init import begin

    for path in begin(folder):
        typer.echo(path)


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
    from fedpriv.reports.table import STYLES, render
    from fedpriv.sweep.results import read_results

    if style not in STYLES:
        raise InputError(f"--format {style}: known formats are {', '.join(STYLES)}")
    typer.echo(render(read_results(run_dir), style), nl=False)


@app.command()
def plot(run_dir: RunDir) -> None:
    """Draw curves, privacy against accuracy, what is clipped, and noise by mechanism, into RUN_DIR/plots.

    Example: fedpriv plot runs/quickstart
    """
    from fedpriv.reports.plots import plot_run

    for path in plot_run(run_dir):
        typer.echo(path)


@app.command()
def report(
    run_dir: RunDir,
    out: Annotated[Path | None, typer.Option(help="The file; RUN_DIR/report.html by default.")] = None,
) -> None:
    """Write one HTML file that stands alone: what ran, what is protected, tables, plots, how to run it again.

    Example: fedpriv report runs/quickstart
    """
    from fedpriv.reports.page import write_report

    typer.echo(write_report(run_dir, out))


@app.command()
def audit(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario; its first cell is audited.")],
    imports: Imports = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key. Repeatable.")
    ] = None,
    mu: Annotated[float, typer.Option(help="The claim: the scenario is recalibrated to it.")] = 1.0,
    trials: Annotated[
        int, typer.Option(help="Canaries, a quarter of them in the round where they weigh most.")
    ] = 16_384,
    confidence: Annotated[float, typer.Option(help="Of the lower bound that is shown.")] = 0.99,
    seed: Annotated[int, typer.Option(help="Of the coins; the noise is the operating system's.")] = 0,
    store: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Keep the outcome with this run; its report shows it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Try to refute the privacy claim with canaries; exit code 0 if it stands, 3 if it is refuted.

    Example: fedpriv audit scenarios/quickstart.toml --set algorithm.trust=trusted
    """
    from fedpriv.cli.audit import audit_scenario
    from fedpriv.extensions import import_files

    import_files(imports or [])
    audit_scenario(scenario, overrides or [], mu, trials, confidence, seed, as_json=as_json, store=store)


@app.command()
def superlink(
    control: Annotated[
        Path, typer.Option(metavar="SOCKET", help="Where its owner, and nobody else, starts runs: a Unix socket.")
    ],
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With ca.crt, server.pem, server.key and nodes/silo-N.pub."),
    ] = None,
    host: Annotated[str, typer.Option(help="Where SuperNodes connect.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where SuperNodes connect.")] = 8000,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS, and any SuperNode may connect: on one's own machine only.")
    ] = False,
    simulation: Annotated[
        bool, typer.Option("--simulation", help="No SuperNodes: for Flower's Ray engine.")
    ] = False,
) -> None:
    """Run Flower's SuperLink, where the server runs, until ended; SuperNodes reach nothing of it but messages.

    Example: fedpriv superlink --control /run/fedpriv/control.sock --keys deploy/run/superlink --host 0.0.0.0
    """
    from fedpriv.engines.superlink_process import serve_superlink

    serve_superlink(control, keys, host=host, port=port, simulation=simulation, insecure=insecure)


@app.command()
def supernode(
    superlink: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The SuperLink, as its certificate names it.")
    ],
    silo: Annotated[int, typer.Option(min=0, metavar="N", help="The silo's number.")],
    guard: Annotated[Path, typer.Option(metavar="SOCKET", help="Where the silo's guard answers.")],
    keys: Annotated[Path | None, typer.Option(metavar="FOLDER", help="With ca.crt and node.key.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS and no key: on one's own machine only.")
    ] = False,
) -> None:
    """Run a silo's SuperNode, which carries queries to the guard and releases back, until ended.

    Example: fedpriv supernode --superlink fl.example.org:8000 --silo 0 --guard /run/fedpriv/guard.sock --keys node
    """
    from fedpriv.engines.supernode_process import become_supernode

    become_supernode(superlink, silo, guard, keys, insecure=insecure)


@data_app.command("fetch")
def data_fetch(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="mnist, fashion-mnist, emnist, cifar10, heart-hospitals or adult."),
    ],
    root: Annotated[
        Path | None, typer.Option(help="Where to keep it; $FEDPRIV_DATA, or a folder of the user's cache.")
    ] = None,
) -> None:
    """Download a data set, verify it and keep it; does nothing if a verified copy is there.

    Example: fedpriv data fetch mnist
    """
    from fedpriv.data.datasets import fetch

    typer.echo(f"{name}: verified in {fetch(name, root, say=typer.echo)}")


@data_app.command("inspect")
def data_inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .csv or .parquet file.")],
    target: Annotated[str | None, typer.Option(help="The column that is to be predicted.")] = None,
    site: Annotated[str | None, typer.Option(help="The column that says whose records they are.")] = None,
    person: Annotated[str | None, typer.Option(help="The column that says who a record is about.")] = None,
    split: Annotated[str | None, typer.Option(help='A column with "train" and "test".')] = None,
    regression: Annotated[
        bool | None, typer.Option("--regression/--classes", help="What the target is; guessed otherwise.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write scenario.toml and a policy a silo, to start from.")
    ] = None,
) -> None:
    """Say what is in a table, and write a scenario and policies to start from; they have to be made public first.

    Example: fedpriv data inspect patients.csv --target outcome --site hospital --out patients
    """
    from fedpriv.cli.inspect import Roles, inspect_table

    inspect_table(file, Roles(target, site, person, split, regression), out)


@data_app.command("split")
def data_split(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="A scenario file; one federation throughout.")
    ],
    out: Annotated[Path, typer.Option(help="Where the silos' folders go.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key. Repeatable.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="How many runs of it the silos' budgets allow.")] = 10,
) -> None:
    """Give each silo of a demonstration a folder of its own: its shard of the data set, and a policy.

    Example: fedpriv data split scenarios/containers.toml --out deploy/run
    """
    from fedpriv.clients.prepare import prepare_silos
    from fedpriv.scenario import load_scenario

    for folder in prepare_silos(load_scenario(scenario, overrides or []), out, runs):
        typer.echo(folder)
