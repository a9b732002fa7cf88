"""`fedpriv data`: fetch, inspect and split data sets; `fedpriv init`: a folder to start from."""

import dataclasses
import re
import shutil
import tempfile
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.cli.options import Overrides
from fedpriv.core.errors import InputError

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


@app.command("inspect")
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


_EACH = 300  # records of each of five silos that a new folder's scenario starts with
_NOTES = {
    "data": "# a data set (`fedpriv list data`), an .npz file, or a name given to fedpriv.add_data\n",
    "model": "# from my_model.py\n",
    "privacy": "# zero-out: neighbours differ in one record, which is there or not\n",
}
_FILES = ("scenario.toml", "my_algorithm.py", "my_model.py", "notebook.ipynb", "README.md")


def _advised(name: str) -> str:
    """The sections that `fedpriv advise` writes for the starter's federation, with the starter's own model."""
    from fedpriv.study.advise import Facts, advice_of

    advice = advice_of(Facts((_EACH,) * 5, 784, 10, 4.0, trust="trusted"), {"name": "synthetic"}, name)
    algorithm = {key: value for key, value in advice.tree["algorithm"].items() if key != "output"}
    tree = {**advice.tree, "model": {"name": "my-model"}, "algorithm": algorithm}
    sections = dataclasses.replace(advice, tree=tree).sections(_NOTES)
    return "\n".join(text for key, text in sections.items() if key != "run")


def begin(folder: Path) -> list[Path]:
    """Write the starting files into a new folder, whole or not at all; returns them.

    The scenario has what `fedpriv advise` says of its numbers, and the algorithm of one's own beside it.

    InputError if the folder exists, cannot be written, or its name cannot be a scenario's.
    """
    name = folder.name
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise InputError(f"fedpriv init {folder}: expected a name of lower-case letters, digits and dashes")
    if folder.exists():
        raise InputError(f"fedpriv init {folder}: exists already; give another name")
    source = resources.files(__package__) / "starter"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            for file in _FILES:
                text = (source / file).read_text(encoding="utf-8").replace("NAME", name)
                if "# ADVISED\n" in text:
                    text = text.replace("# ADVISED\n", _advised(name))
                (draft / file).write_text(text, encoding="utf-8")
            draft.chmod(0o755)
            draft.rename(folder)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        raise InputError(f"fedpriv init {folder}: cannot be written ({error.strerror})") from None
    return [folder / file for file in _FILES]
