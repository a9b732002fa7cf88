"""`fedpriv export`: a run in a form that other programs read."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A folder that `fedpriv run` wrote.")],
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
    from fedpriv.reports.exports import export as write

    typer.echo(write(run_dir, form))
