"""`fedpriv data`: fetch, inspect and split data sets; `fedpriv init`: a folder to start from."""

from pathlib import Path
from typing import Annotated

import typer

from fedpriv.cli.options import Overrides

app = typer.Typer(help="Data sets: download, verify, cache.", no_args_is_help=True, suggest_commands=False)


@app.command("fetch")
def data_fetch(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="mnist, fashion-mnist, emnist, cifar10, heart-hospitals, dialysis, dialysis-survival, "
            "dialysis-times, adult or visits.",
        ),
    ],
    root: Annotated[
        Path | None, typer.Option(help="Where to keep it; $FEDPRIV_DATA, or a folder of the user's cache.")
    ] = None,
) -> None:
    """Download a data set, verify it and keep it; does nothing if a verified copy is there.

    Example: fedpriv data fetch mnist
    """
    from fedpriv.data.named import fetch

    typer.echo(f"{name}: verified in {fetch(name, root, say=typer.echo)}")


@app.command("split")
def data_split(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="A scenario file; one federation throughout.")
    ],
    out: Annotated[Path, typer.Option(help="Where the silos' folders go.")],
    overrides: Overrides = None,
    runs: Annotated[int, typer.Option(min=1, help="How many runs of it the silos' budgets allow.")] = 10,
) -> None:
    """Give each silo of a demonstration a folder of its own: its shard of the data set, and a policy.

    Example: fedpriv data split scenarios/containers.toml --out deploy/run
    """
    from fedpriv.scenario.load import load_scenario
    from fedpriv.silo.demo import prepare_silos

    for folder in prepare_silos(load_scenario(scenario, overrides or []), out, runs):
        typer.echo(folder)
