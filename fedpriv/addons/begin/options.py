"""Commands of this add-on and their options. The implementation of a command is imported when it is called."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.cli.options import Json


def advise(
    silos: Annotated[int, typer.Option(help="Number of silos.")],
    records: Annotated[str, typer.Option(help="Training records of each silo: 500, or 120,80,300.")],
    features: Annotated[int, typer.Option(help="Number of features of a record.")],
    epsilon: Annotated[float, typer.Option(help="ε of the run's privacy target.")],
    delta: Annotated[float, typer.Option(help="δ of the run's privacy target.")] = 1e-5,
    classes: Annotated[int, typer.Option(help="Number of classes; 0 for a real target.")] = 0,
    trust: Annotated[str, typer.Option(help="untrusted, secure-aggregation or trusted.")] = "untrusted",
    feature_norm: Annotated[
        float | None,
        typer.Option(help="Bound on the norm of a record's features; by default √features, that of -1 … 1."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Most rounds that the network allows.")] = None,
    parameters: Annotated[
        int | None, typer.Option(help="Number of trained parameters of a network; by default a linear model.")
    ] = None,
    sequence: Annotated[
        bool, typer.Option("--sequence", help="The network has recurrent or attention layers that read numbers.")
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="Name or file of the data, for the scenario; it is not opened.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the scenario there.")] = None,
    as_json: Json = False,
) -> None:
    """Advise on algorithm, batch, clip, step, rounds and trust from public facts. No record is read.

    Example: fedpriv advise --silos 4 --records 120,80,300,95 --features 13 --classes 2 --epsilon 1 --out mine.toml
    """
    from fedpriv.addons.begin.command import print_advice

    further_facts = {
        "epsilon": epsilon,
        "delta": delta,
        "trust": trust,
        "feature_norm": feature_norm,
        "rounds": rounds,
        "parameters": parameters,
        "sequence": sequence,
    }
    print_advice(
        silos, records, {"features": features, "classes": classes, **further_facts}, data, out, as_json=as_json
    )


def init(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")],
    is_comparison: Annotated[
        bool, typer.Option("--compare", help="Write a scenario alone, of four rows with the keys that each needs.")
    ] = False,
) -> None:
    """Make a folder to start from: a scenario, an algorithm, a model and a notebook of your own.

    Example: fedpriv init my-study
    """
    from fedpriv.addons.begin.command import create_folder

    for path in create_folder(folder, is_comparison=is_comparison):
        typer.echo(path)
    commands = "fedpriv run scenario.toml" if is_comparison else "the commands that README.md there names"
    typer.echo(f"next: cd {folder}, and {commands}", err=True)


def data_inspect(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="A .csv, .xlsx or .parquet file, or one for each site.")
    ],
    target: Annotated[str | None, typer.Option(help="The column that is to be predicted.")] = None,
    site: Annotated[str | None, typer.Option(help="The column of sites, each of which becomes a silo.")] = None,
    person: Annotated[
        str | None, typer.Option(help="The column of persons, who may have several records.")
    ] = None,
    split: Annotated[str | None, typer.Option(help='A column with "train" and "test".')] = None,
    regression: Annotated[
        bool | None,
        typer.Option(
            "--regression/--classes", help="Whether the target is real or has classes; guessed by default."
        ),
    ] = None,
    separator: Annotated[
        str | None, typer.Option(help="Mark between cells: , ; | or tab; found in the header by default.")
    ] = None,
    decimal: Annotated[
        str | None, typer.Option(help="Mark before decimals: . or , and found in the numbers by default.")
    ] = None,
    thousands: Annotated[
        str | None, typer.Option(help="Mark between thousands: . , a space or '; found in the numbers by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for scenario.toml and a policy for each silo, to start from.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Describe a table, and with --out write a scenario and policies. A run with noise needs a public description.

    Example: fedpriv data inspect patients.csv --target outcome --site hospital --out patients
    """
    from fedpriv.addons.begin.command import ColumnRoles, print_inspection

    marks = {"separator": separator, "decimal": decimal, "thousands": thousands}
    print_inspection(files, ColumnRoles(target, site, person, split, regression), out, marks, as_json=as_json)


def register(app: Any, silo: Any, data: Any) -> None:
    """Add `advise` and `init` to the commands of `fedpriv`, and `inspect` to those of `fedpriv data`."""
    app.command()(advise)
    app.command()(init)
    data.command("inspect")(data_inspect)
