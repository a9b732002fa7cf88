"""`fedpriv data inspect`: what a table holds, and a scenario and policies to start from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer

from fedpriv.clients.prepare import allowance_of, policy_text
from fedpriv.clients.writers import keep_to_owner
from fedpriv.data.inspect import describe, left_out, see
from fedpriv.data.table_encode import Encoded, encode
from fedpriv.data.table_file import is_table, read_table
from fedpriv.data.table_schema import TableSchema
from fedpriv.data.table_toml import schema_toml
from fedpriv.errors import InputError, printable
from fedpriv.files import write_text
from fedpriv.scenario import resolve_cell

_ROUNDS_PER_EPOCH, _EPOCHS = 10, 5
_SILOS = 4  # of a table that does not say whose records they are
WARNING = (
    "ranges, vocabularies and numbers of records below were read from the records, and to publish them is a\n"
    "release that no noise protects.  Replace them by what is known without the records, such as what a\n"
    "questionnaire allows; then write public = true.  Until then a run with noise is refused."
)


@dataclass(frozen=True)
class Roles:
    """The columns that a person named, and whether the target is a real number (None: guess)."""

    target: str | None
    site: str | None
    person: str | None
    split: str | None
    regression: bool | None


def inspect_table(path: Path, roles: Roles, out: Path | None) -> None:
    """Say what is in a table; with `out` write scenario.toml and a policy a silo, all of them or none."""
    if not is_table(path.name):
        raise InputError(f"{path}: expected a .csv or .parquet file")
    if out is not None and roles.target is None:
        raise InputError("--out: needs --target, the column that is to be predicted")
    table = read_table(path)
    typer.echo(f"{path}: {len(table)} records, {len(table.columns)} columns")
    for column in see(table):
        typer.echo(f"  {printable(column.name)}: {column.line()}")
    if roles.target is None:
        return
    schema = describe(
        table, roles.target, regression=roles.regression, site=roles.site, person=roles.person, split=roles.split
    )
    if unused := left_out(table, schema):
        typer.echo(f"left out, with one value or too many words: {printable(', '.join(unused))}")
    encoded = encode(table, schema)
    sizes = _training_records(encoded, schema)
    _warn(encoded, schema, sizes)
    if out is None:
        return
    files = _files(path, schema, sizes)
    if present := [name for name in files if (out / name).exists()]:
        raise InputError(f"{out / present[0]} exists; give another --out")
    for name, text in files.items():
        write_text(out / name, text)
        keep_to_owner(out / name)  # a guard refuses a policy that others may change
        typer.echo(out / name)
    typer.echo(f"note: {' '.join(WARNING.splitlines())}")


def _training_records(encoded: Encoded, schema: TableSchema) -> list[int]:
    """Of each silo: its site's, or an equal share."""
    train = ~encoded.test
    if encoded.sites is None:
        return [int(train.sum()) // _SILOS] * _SILOS
    counts: list[int] = np.bincount(encoded.sites[train], minlength=len(schema.sites)).tolist()
    return counts


def _warn(encoded: Encoded, schema: TableSchema, sizes: Sequence[int]) -> None:
    """What a person should know before they run this; InputError for what cannot be run at all."""
    names = schema.sites or tuple(f"silo {silo}" for silo in range(len(sizes)))
    if (least := min(sizes)) < 1:
        raise InputError(
            f"{names[sizes.index(least)]!r} has no training records; leave its records out of the table"
        )
    for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if size < _ROUNDS_PER_EPOCH:
            typer.echo(f"warning: {name!r} has {size} training records: its noise will hide nearly all they say")
        if schema.classes is None or encoded.sites is None:
            continue
        for part, which in (("training", ~encoded.test), ("test", encoded.test)):
            classes = np.unique(encoded.labels[which & (encoded.sites == place)])
            if len(classes) < 2:
                only = schema.classes[int(classes[0])] if len(classes) else "none"
                typer.echo(f"warning: {name!r} has {part} records of one class only ({printable(only)})")


def _files(path: Path, schema: TableSchema, sizes: Sequence[int]) -> dict[str, str]:
    """The text of every file, by name."""
    tree = _scenario(path, schema, sizes)
    confirmed = schema.model_copy(update={"public": True})
    cell = resolve_cell(
        {**tree, "data": {**tree["data"], "table": confirmed.model_dump(exclude_none=True)}}, str(path)
    )
    allow = allowance_of(cell)
    head = "".join(f"# {line}\n" for line in WARNING.splitlines())
    sections = [f"[{name}]\n{_toml(keys)}" for name, keys in tree.items() if isinstance(keys, dict)]
    table = schema_toml(schema, "data.table")
    files = {"scenario.toml": f"{head}name = {json.dumps(tree['name'])}\n\n{table}\n" + "\n".join(sections)}
    for silo in range(len(sizes)):
        names = {"shard": "csv", "ledger": "sqlite", "socket": "sock"}
        keys = {"silo": silo, **{name: f"silo-{silo}.{suffix}" for name, suffix in names.items()}}
        files[f"silo-{silo}.toml"] = head + policy_text(keys, allow, schema)
    return files


def _scenario(path: Path, schema: TableSchema, sizes: Sequence[int]) -> dict[str, Any]:
    """All of it but the table's description."""
    places = min(_ROUNDS_PER_EPOCH, *sizes)
    real = schema.classes is None
    scores = ["r2", "mae"] if real else ["auc", "balanced_accuracy", "calibration_error"]
    return {
        "name": "".join(c if c.isalnum() and c.isascii() else "-" for c in path.stem.lower()).strip("-")
        or "table",
        "data": {"name": str(path), "partition": "site" if schema.site is not None else "iid"},
        "model": {
            "name": "linear-regression" if real else "softmax-regression",
            "feature_norm": round(schema.norm + 0.005, 2),
        },
        "federation": {
            "silos": len(sizes),
            "rounds": places * _EPOCHS,
            "epochs": _EPOCHS,
            "batches": [size // places for size in sizes],
        },
        "algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 3.0},
        "privacy": {"relation": "zero-out", "epsilon": 3.0, "delta": 1e-5},
        "run": {"metrics": scores},
    }


def _toml(keys: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
