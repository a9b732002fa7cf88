"""`fedpriv data inspect`: describe a table, and write a scenario and policies to start from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from numpy.typing import NDArray

from fedpriv.addons.begin.inspect import Persons, describe, left_out, persons_of, see
from fedpriv.core.errors import InputError, printable
from fedpriv.core.figures import counted
from fedpriv.core.files import write_text
from fedpriv.data.cells import is_table, read_table
from fedpriv.data.encode import Rows, rows_of
from fedpriv.data.partition import roster
from fedpriv.data.schema import TableSchema
from fedpriv.data.tables import check_persons, schema_toml

# Modules that need torch are imported where files are written: a first look at a table does not wait for them.
if TYPE_CHECKING:
    from fedpriv.addons.begin.advise import Advice

_FEW = 10
"""Training records of a silo, below which it is warned of."""
_EPSILON = 3.0
_SILOS = 4  # of a table that does not say whose records they are
_MOST_RECORDS = 16  # of one person: each takes room in every batch, and more say little that is new
WARNING = (
    "ranges, vocabularies and numbers of records below were read from the records, and to publish them is a\n"
    "release that no noise protects.  Replace them by what is known without the records, such as what a\n"
    "questionnaire allows; then write public = true.  Until then a run with noise is refused."
)

_PERSONS = (
    "# persons have several records: all of one person's are protected, and the first {records} at most count\n"
)
_BATCHES = "# batches counts persons\n"
_ALLOWED = '# unit = "user": the budget is for whole persons, and runs that protect single records are refused\n'


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
    columns = see(table)
    for column in columns:
        typer.echo(f"  {printable(column.name)}: {column.line()}")
    if copies := table.copies():
        typer.echo(
            f"warning: {counted(copies, 'record')} equal an earlier one in every column; is each another unit?"
        )
    if roles.target is None:
        return
    schema = describe(
        table,
        columns,
        roles.target,
        regression=roles.regression,
        site=roles.site,
        person=roles.person,
        split=roles.split,
    )
    unused, odd = left_out(table, schema), {column.name for column in columns if column.odd}
    for why, names in (
        ("until its cells are mended", [name for name in unused if name in odd]),
        ("with one value or too many words", [name for name in unused if name not in odd]),
    ):
        if names:
            typer.echo(f"left out, {why}: {printable(', '.join(names))}")
    encoded = rows_of(table, schema)
    check_persons(encoded, schema, path)
    unit = _unit(encoded, schema)
    train = encoded.places.train
    sizes = _units(encoded, schema, train.rows, of_persons="unit" in unit)
    training = _units(encoded, schema, train.rows[train.counts], of_persons="unit" in unit)
    _warn(encoded, schema, training, "persons in training" if unit else "training records")
    if schema.classes is not None and {column.name: column for column in columns}[schema.target].codes:
        typer.echo(
            f"{printable(schema.target)}: whole numbers, taken for classes; --regression if they are amounts"
        )
    if out is None:
        return
    from fedpriv.silo.policy import keep_to_owner

    files = _files(path, schema, sizes, unit)
    if present := [name for name in files if (out / name).exists()]:
        raise InputError(f"{out / present[0]} exists; give another --out")
    for name, text in files.items():
        write_text(out / name, text)
        keep_to_owner(out / name)  # a guard refuses a policy that others may change
        typer.echo(out / name)
    typer.echo(f"note: {' '.join(WARNING.splitlines())}")


def _unit(encoded: Rows, schema: TableSchema) -> dict[str, Any]:
    """Say how many records a person has; the keys of [privacy] that protect persons, if they are needed."""
    found = persons_of(encoded)
    if found is None:
        return {}
    typer.echo(f"{printable(str(schema.person))}: {_whose(found)}")
    return {"unit": "user", "records": min(found.most, _MOST_RECORDS)} if found.several else {}


def _whose(found: Persons) -> str:
    if not found.several:
        return f"{found.count} persons with one record each: to protect a record is to protect a person"
    first = f", of a person with more the first {_MOST_RECORDS} count" if found.most > _MOST_RECORDS else ""
    return (
        f"{found.count} persons, {found.several} of them with several records, {found.most} at most: a run has to "
        f'protect persons, unit = "user"{first}'
    )


def _units(encoded: Rows, schema: TableSchema, kept: NDArray[np.int64], *, of_persons: bool) -> list[int]:
    """Count these rows, or the persons in them, for each silo: its site's, or an equal share."""
    if of_persons:
        assert encoded.persons is not None
        kept = kept[roster(encoded.persons[kept])[0]]
    if encoded.sites is None:
        return [len(kept) // _SILOS] * _SILOS
    counts: list[int] = np.bincount(encoded.sites[kept], minlength=len(schema.sites)).tolist()
    return counts


def _warn(encoded: Rows, schema: TableSchema, sizes: Sequence[int], noun: str) -> None:
    """Warn of silos with few records or one class; InputError for a table that cannot be run at all."""
    names = schema.sites or tuple(f"silo {silo}" for silo in range(len(sizes)))
    if (least := min(sizes)) < 1:
        raise InputError(f"{names[sizes.index(least)]!r} has no {noun}; leave its records out of the table")
    for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if size < _FEW:
            typer.echo(f"warning: {name!r} has {size} {noun}: its noise will hide nearly all they say")
        if schema.classes is None or encoded.sites is None:
            continue
        for part, its in (("training", encoded.places.train), ("test", encoded.places.test)):
            rows = its.rows[its.counts]
            classes = np.unique(encoded.labels[rows[encoded.sites[rows] == place]])
            if len(classes) < 2:
                only = schema.classes[int(classes[0])] if len(classes) else "none"
                typer.echo(f"warning: {name!r} has {part} records of one class only ({printable(only)})")


def _files(path: Path, schema: TableSchema, sizes: Sequence[int], unit: dict[str, Any]) -> dict[str, str]:
    """Write the text of every file, by name; `unit` has the keys of [privacy] for persons with several records."""
    from fedpriv.plan.task import task_of_schema
    from fedpriv.scenario.load import resolve_cell
    from fedpriv.silo.demo import allowance_of, policy_text

    advice = _advice(path, schema, sizes, unit)
    confirmed = schema.model_copy(update={"public": True})
    data = {**advice.tree["data"], "table": confirmed.model_dump(exclude_none=True)}
    cell = resolve_cell({**advice.tree, "data": data}, str(path))
    allow = allowance_of(cell, task_of_schema(cell, confirmed))
    head = "".join(f"# {line}\n" for line in WARNING.splitlines())
    notes = {"privacy": _PERSONS.format(**unit), "federation": _BATCHES} if unit else {}
    sections = advice.sections(notes)
    table = schema_toml(schema, "data.table")
    top = f"{head}name = {json.dumps(advice.tree['name'])}\n\n{table}\n"
    files = {"scenario.toml": top + "\n".join(sections.values())}
    for silo in range(len(sizes)):
        names = {"shard": "csv", "ledger": "sqlite", "socket": "sock"}
        keys = {"silo": silo, **{name: f"silo-{silo}.{suffix}" for name, suffix in names.items()}}
        files[f"silo-{silo}.toml"] = head + (_ALLOWED if unit else "") + policy_text(keys, allow, schema)
    return files


def _advice(path: Path, schema: TableSchema, sizes: Sequence[int], unit: dict[str, Any]) -> "Advice":
    """What `fedpriv advise` says of a table with this description and so many records a silo."""
    from fedpriv.addons.begin.advise import Facts, advice_of

    keys = {"unit": unit["unit"], "records_of_person": unit["records"]} if unit else {}
    facts = Facts(tuple(sizes), schema.width, schema.class_count, _EPSILON, feature_norm=schema.norm, **keys)
    spread = {"name": str(path), "partition": "site" if schema.site is not None else "iid"}
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in path.stem.lower()).strip("-")
    return advice_of(facts, spread, name or "table")
