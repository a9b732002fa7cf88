"""Commands from nothing to a scenario: `fedpriv data inspect`, `fedpriv advise` and `fedpriv init`.

`inspect` describes a table, and writes a scenario and policies.  `advise` chooses row, clip, step, rounds and
trust.  `init` makes a folder to start from.
"""

import dataclasses
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from fedpriv.addons.begin.advise import Advice, Facts, advise, advise_on_facts
from fedpriv.addons.begin.inspect import (
    PersonCounts,
    count_persons,
    describe_table,
    find_unused_columns,
    summarize_columns,
)
from fedpriv.cli.explore import Column, print_plain, print_rich
from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.core.figures import format_count, format_epsilon_delta
from fedpriv.core.files import write_text
from fedpriv.data.cells import is_table_path, read_table
from fedpriv.data.encode import TableRows, read_rows
from fedpriv.data.partition import index_persons
from fedpriv.data.schema import TableSchema
from fedpriv.data.tables import check_persons, format_schema_toml

# Modules that need torch are imported where files are written: a first look at a table does not wait for them.

_MIN_RECORDS = 10
"""Training records of a silo, below which it is warned of."""
_DEFAULT_EPSILON = 3.0
_DEFAULT_SILOS = 4  # of a table that does not say whose records they are
_MAX_RECORDS_PER_PERSON = 16  # of one person: each takes room in every batch, and more say little that is new
WARNING = (
    "ranges, vocabularies and numbers of records below were read from the records, and to publish them is a\n"
    "release that no noise protects.  Replace them by what is known without the records, such as what a\n"
    "questionnaire allows; then write public = true.  Until then a run with noise is refused."
)

_PERSONS_COMMENT = (
    "# persons have several records: all of one person's are protected, and the first {records} at most count\n"
)
_BATCHES_COMMENT = "# batches counts persons\n"
_UNIT_COMMENT = (
    '# unit = "user": the budget is for whole persons, and runs that protect single records are refused\n'
)


@dataclass(frozen=True)
class ColumnRoles:
    """The columns that a person named, and whether the target is a real number (None: guess)."""

    target: str | None
    site: str | None
    person: str | None
    split: str | None
    regression: bool | None


def inspect_table(path: Path, roles: ColumnRoles, out: Path | None) -> None:
    """Say what is in a table; with `out` write scenario.toml and a policy a silo, all of them or none."""
    if not is_table_path(path.name):
        raise InputError(f"{path}: expected a .csv or .parquet file")
    if out is not None and roles.target is None:
        raise InputError("--out: needs --target, the column that is to be predicted")
    table = read_table(path)
    typer.echo(f"{path}: {len(table)} records, {len(table.columns)} columns")
    columns = summarize_columns(table)
    for column in columns:
        typer.echo(f"  {sanitize_line(column.name)}: {column.describe()}")
    if copies := table.duplicate_count():
        typer.echo(
            f"warning: {format_count(copies, 'record')} equal an earlier one in every column; is each another "
            "unit?"
        )
    if roles.target is None:
        return
    schema = describe_table(
        table,
        columns,
        roles.target,
        regression=roles.regression,
        site=roles.site,
        person=roles.person,
        split=roles.split,
    )
    unused, odd = find_unused_columns(table, schema), {column.name for column in columns if column.odd_cells}
    for why, names in (
        ("until its cells are mended", [name for name in unused if name in odd]),
        ("with one value or too many words", [name for name in unused if name not in odd]),
    ):
        if names:
            typer.echo(f"left out, {why}: {sanitize_line(', '.join(names))}")
    encoded = read_rows(table, schema)
    check_persons(encoded, schema, path)
    unit, train = _find_unit_keys(encoded, schema), encoded.split.train
    sizes = _count_units(encoded, schema, train.row_indices, by_person="unit" in unit)
    training = _count_units(encoded, schema, train.row_indices[train.is_counted], by_person="unit" in unit)
    _warn_of_small_silos(encoded, schema, training, "persons in training" if unit else "training records")
    if schema.classes is not None and {column.name: column for column in columns}[schema.target].has_class_codes:
        typer.echo(
            f"{sanitize_line(schema.target)}: whole numbers, taken for classes; --regression if they are amounts"
        )
    if out is None:
        return
    from fedpriv.silo.policy import revoke_write_access

    files = _make_files(path, schema, sizes, unit)
    if present := [name for name in files if (out / name).exists()]:
        raise InputError(f"{out / present[0]} exists; give another --out")
    for name, text in files.items():
        write_text(out / name, text)
        revoke_write_access(out / name)  # a guard refuses a policy that others may change
        typer.echo(out / name)
    typer.echo(f"note: {' '.join(WARNING.splitlines())}")


def _find_unit_keys(encoded: TableRows, schema: TableSchema) -> dict[str, Any]:
    """Say how many records a person has; the keys of [privacy] that protect persons, if they are needed."""
    if (found := count_persons(encoded)) is None:
        return {}
    typer.echo(f"{sanitize_line(str(schema.person))}: {_describe_persons(found)}")
    return (
        {"unit": "user", "records": min(found.max_records, _MAX_RECORDS_PER_PERSON)}
        if found.repeated_count
        else {}
    )


def _describe_persons(found: PersonCounts) -> str:
    if not found.repeated_count:
        return f"{found.count} persons with one record each: to protect a record is to protect a person"
    first = (
        f", of a person with more the first {_MAX_RECORDS_PER_PERSON} count"
        if found.max_records > _MAX_RECORDS_PER_PERSON
        else ""
    )
    return (
        f"{found.count} persons, {found.repeated_count} of them with several records, {found.max_records} at "
        "most: a run has to "
        f'protect persons, unit = "user"{first}'
    )


def _count_units(
    encoded: TableRows, schema: TableSchema, kept: NDArray[np.int64], *, by_person: bool
) -> list[int]:
    """Count these rows, or the persons in them, for each silo: its site's, or an equal share."""
    if by_person:
        assert encoded.persons is not None
        kept = kept[index_persons(encoded.persons[kept])[0]]
    if encoded.sites is None:
        return [len(kept) // _DEFAULT_SILOS] * _DEFAULT_SILOS
    counts: list[int] = np.bincount(encoded.sites[kept], minlength=len(schema.sites)).tolist()
    return counts


def _warn_of_small_silos(encoded: TableRows, schema: TableSchema, sizes: Sequence[int], noun: str) -> None:
    """Warn of silos with few records or one class; InputError for a table that cannot be run at all."""
    names = schema.sites or tuple(f"silo {silo}" for silo in range(len(sizes)))
    if (least := min(sizes)) < 1:
        raise InputError(f"{names[sizes.index(least)]!r} has no {noun}; leave its records out of the table")
    for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if size < _MIN_RECORDS:
            typer.echo(f"warning: {name!r} has {size} {noun}: its noise will hide nearly all they say")
        if schema.classes is None or encoded.sites is None:
            continue
        for part, its in (("training", encoded.split.train), ("test", encoded.split.test)):
            rows = its.row_indices[its.is_counted]
            classes = np.unique(encoded.labels[rows[encoded.sites[rows] == place]])
            if len(classes) < 2:
                only = schema.classes[int(classes[0])] if len(classes) else "none"
                typer.echo(f"warning: {name!r} has {part} records of one class only ({sanitize_line(only)})")


def _make_files(path: Path, schema: TableSchema, sizes: Sequence[int], unit: dict[str, Any]) -> dict[str, str]:
    """Write the text of every file, by name; `unit` has the keys of [privacy] for persons with several records."""
    from fedpriv.plan.task import make_schema_task
    from fedpriv.scenario.load import resolve_cell
    from fedpriv.silo.demo import format_policy, run_allowance

    advice = _advise_on_table(path, schema, sizes, unit)
    confirmed = schema.model_copy(update={"public": True})
    data = {**advice.tree["data"], "table": confirmed.model_dump(exclude_none=True)}
    cell = resolve_cell({**advice.tree, "data": data}, str(path))
    allow = run_allowance(cell, make_schema_task(cell, confirmed))
    head = "".join(f"# {line}\n" for line in WARNING.splitlines())
    sections = advice.sections(
        {"privacy": _PERSONS_COMMENT.format(**unit), "federation": _BATCHES_COMMENT} if unit else {}
    )
    top = f"{head}name = {json.dumps(advice.tree['name'])}\n\n{format_schema_toml(schema, 'data.table')}\n"
    files = {"scenario.toml": top + "\n".join(sections.values())}
    names = {"shard": "csv", "ledger": "sqlite", "socket": "sock"}
    for silo in range(len(sizes)):
        keys = {"silo": silo} | {name: f"silo-{silo}.{suffix}" for name, suffix in names.items()}
        files[f"silo-{silo}.toml"] = head + (_UNIT_COMMENT if unit else "") + format_policy(keys, allow, schema)
    return files


def _advise_on_table(path: Path, schema: TableSchema, sizes: Sequence[int], unit: dict[str, Any]) -> "Advice":
    """Advise on a table from its description and its number of records in each silo."""
    keys = {"unit": unit["unit"], "records_of_person": unit["records"]} if unit else {}
    facts = Facts(
        tuple(sizes), schema.width, schema.class_count, _DEFAULT_EPSILON, feature_norm=schema.max_norm, **keys
    )
    spread = {"name": str(path), "partition": "site" if schema.site is not None else "iid"}
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in path.stem.lower()).strip("-")
    return advise_on_facts(facts, spread, name or "table")


def print_advice(
    silos: int, records: str, others: dict[str, Any], data: str | None, out: Path | None, *, as_json: bool
) -> None:
    """Print the advice, and write its scenario to `out`; InputError for facts that no federation has."""
    if out is not None and out.exists():
        raise InputError(f"--out {out}: exists; give another name")
    found = advise(
        silos=silos, records=_parse_counts(records), data=None if data is None else {"name": data}, **others
    )
    if as_json:
        sys.stdout.write(json.dumps(_advice_data(found)) + "\n")
    else:
        rows = [[one.key, _format_value(one.value), one.why] for one in found.chosen]
        print_rich("What to take", [Column("key"), Column("value"), Column("why", can_wrap=True)], rows)
        costs = f"It costs {format_epsilon_delta(found.epsilon, found.facts.delta)}."
        for line in (costs, found.forecast.sentence, *found.others):
            print_plain(line)
    if out is not None:
        write_text(out, found.text)
        if not as_json:
            of = "" if data is not None else ". Put your records into records.npz (docs/adding-data.md)"
            print_plain(f"written: {out}{of}; run it with: fedpriv run {out}")


def _parse_counts(text: str) -> int | tuple[int, ...]:
    """One number, or one for each silo, with commas between."""
    try:
        numbers = tuple(int(each) for each in text.split(","))
    except ValueError:
        raise InputError(
            f"--records {text!r}: expected a whole number, or one for each silo: 120,80,300"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def _advice_data(found: Advice) -> dict[str, Any]:
    return {
        "scenario": found.tree,
        "reasons": {one.key: one.why for one in found.chosen},
        "forecast": {**vars(found.forecast), "sentence": found.forecast.sentence},
        "epsilon": found.epsilon,
        "others": found.others,
    }


def _format_value(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    low, high = min(value), max(value)
    return f"{low:,} each" if low == high else f"{low:,} to {high:,}"


_STARTER_RECORDS = 300  # records of each of five silos that a new folder's scenario starts with
_STARTER_NOTES = {
    "data": "# a data set (`fedpriv list data`), an .npz file, or a name given to fedpriv.add_data\n",
    "model": "# from my_model.py\n",
    "privacy": "# zero-out: neighbours differ in one record, which is there or not\n",
}
_STARTER_FILES = ("scenario.toml", "my_algorithm.py", "my_model.py", "notebook.ipynb", "README.md")


def _make_starter_sections(name: str) -> str:
    """The sections that `fedpriv advise` writes for the starter's federation, with the starter's own model."""
    advice = advise_on_facts(
        Facts((_STARTER_RECORDS,) * 5, 784, 10, 4.0, trust="trusted"), {"name": "synthetic"}, name
    )
    algorithm = {key: value for key, value in advice.tree["algorithm"].items() if key != "output"}
    advice = dataclasses.replace(
        advice, tree={**advice.tree, "model": {"name": "my-model"}, "algorithm": algorithm}
    )
    return "\n".join(text for key, text in advice.sections(_STARTER_NOTES).items() if key != "run")


def create_folder(folder: Path) -> list[Path]:
    """Write the starting files into a new folder, whole or not at all; returns them.

    The scenario has what `fedpriv advise` says of its numbers, and the algorithm of one's own beside it.

    InputError if the folder exists, cannot be written, or its name cannot be a scenario's.
    """
    name = folder.name
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise InputError(f"fedpriv init {folder}: expected a name of lower-case letters, digits and dashes")
    if folder.exists():
        raise InputError(f"fedpriv init {folder}: exists already; give another name")
    source, advised = resources.files(__package__) / "starter", _make_starter_sections(name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            for file in _STARTER_FILES:
                text = (source / file).read_text(encoding="utf-8").replace("NAME", name)
                (draft / file).write_text(text.replace("# ADVISED\n", advised), encoding="utf-8")
            draft.chmod(0o755)
            draft.rename(folder)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        raise InputError(f"fedpriv init {folder}: cannot be written ({error.strerror})") from None
    return [folder / file for file in _STARTER_FILES]
