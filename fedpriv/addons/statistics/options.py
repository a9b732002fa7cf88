"""Commands of this add-on and their options. The implementation of a command is imported when it is called."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.cli.options import Overrides, RunDir


def statistics(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan of tables (TOML).")],
    overrides: Overrides = None,
    engine: Annotated[str, typer.Option(help="vectorized, inprocess, ray or deployment.")] = "vectorized",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the results; by default the first free one of runs/NAME, …"),
    ] = None,
    superlink: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Deployment: a SuperLink that runs.")
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Deployment: whom to trust for the SuperLink's TLS (PEM).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print cells, errors and price; no silo is asked or charged.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Release counts, means, quantiles and survival curves of a table, with intervals for the noise.

    Examples:

        fedpriv statistics plan.toml --dry-run

        fedpriv statistics plan.toml --set privacy.epsilon=3
    """
    from fedpriv.addons.statistics.command import run_statistics
    from fedpriv.engines.table import Connection

    run_statistics(
        plan,
        overrides or [],
        engine,
        out,
        Connection(superlink, root_certificates),
        dry_run=dry_run,
        as_json=as_json,
    )


def coefficients(
    run_dir: RunDir, as_json: Annotated[bool, typer.Option("--json", help="Print plain data in one line.")] = False
) -> None:
    """Print the weights of ridge-statistics or noisy-newton, with intervals for sampling and noise.

    Example: fedpriv coefficients runs/ridge
    """
    from fedpriv.addons.statistics.command import print_coefficients

    print_coefficients(run_dir, as_json=as_json)


def register(app: Any, silo: Any, data: Any) -> None:
    """Add `statistics` and `coefficients` to `fedpriv`."""
    app.command()(statistics)
    app.command()(coefficients)
