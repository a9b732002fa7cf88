"""Commands that write a first scenario: `fedpriv data inspect`, `fedpriv advise` and `fedpriv init`.

A *unit* is what a run protects: a record, or a person with all records.  A *policy* is a file in which a silo
allows runs.  A *schema* describes a table: target, sites, persons and features with their ranges or words.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from fedpriv.addons.begin.inspect import (
    MAX_WORDS,
    PersonCounts,
    count_persons,
    describe_table,
    find_unused_columns,
    summarize_columns,
)
from fedpriv.addons.begin.joined import JOINED_FILE, describe_format, find_formats, join_files
from fedpriv.cli.explore import Column, print_plain, print_rich
from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.core.figures import format_count, format_count_range, format_epsilon_delta
from fedpriv.core.files import write_text
from fedpriv.data.cells import TABLE_SUFFIXES, is_table_path, write_rows
from fedpriv.data.encode import TableRows, read_rows
from fedpriv.data.partition import index_persons
from fedpriv.data.schema import TableSchema
from fedpriv.data.tables import check_persons, format_schema_toml, read_raw_table

# Modules that need torch are imported only where they are used, so that a first look at a table is fast.

_MIN_RECORDS = 10
"""Number of a silo's training units below which `inspect` warns."""
_DEFAULT_SILOS = 4  # number of silos for a table without a column of sites
_MAX_RECORDS_PER_PERSON = 16  # each record of a person enlarges every batch, and further ones add little
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
    """Columns that a user named, or None for a role without a column, and the kind of the target."""

    target: str | None
    site: str | None
    person: str | None
    split: str | None
    """Column with "train" and "test"."""
    regression: bool | None
    """True for a real number, False for classes, or None for a guess."""


def print_inspection(
    paths: Sequence[Path], roles: ColumnRoles, out: Path | None, marks: Mapping[str, str | None], *, as_json: bool
) -> None:
    """Print the lines of `inspect_table`, or one JSON object with its facts and the lines."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text if as_json else sys.stdout):
        facts = inspect_table(paths, roles, out, marks)
    if as_json:
        sys.stdout.write(json.dumps({**facts, "lines": text.getvalue().splitlines()}) + "\n")


def inspect_table(
    paths: Sequence[Path], roles: ColumnRoles, out: Path | None, marks: Mapping[str, str | None]
) -> dict[str, Any]:
    """Print a description of a table, and with `out` write a scenario and a policy for each silo.

    Several files are one table, in which each file is a site unless a column of sites is named.  With `out` the
    joined table is written there, too.  Files are written only if none of them exists.  Without a target the
    description ends with the columns and the copies of records.

    Args:
        paths: Files of the table, one or more.
        roles: Columns that the user named.
        out: Folder of scenario.toml and silo-N.toml, or None for no files.
        marks: Separator of cells, and marks of decimals and thousands, by the names of options, or None to find
            them.

    Returns:
        Facts of the description: source, number of records, columns with 50 of their words at most, reasons of
        columns that are passed over, and the number of repeated records.  With a target also the columns that are
        left out, the table as a scenario describes it, and the number of training units of each silo; with `out`
        the files.

    Raises:
        InputError: If the files cannot be read as a table, an option of `marks` is malformed, a column cannot have
            its role, no column can become a feature, a row does not keep to the description, a person has records
            at two sites, a silo has no training unit, `out` is given without a target or for a table for which no
            settings can be advised, or a file that would be written exists in `out`.
        OSError: If a file cannot be opened or written.
    """
    if other := [path for path in paths if not is_table_path(path.name)]:
        raise InputError(f"{other[0]}: expected a file of a table, {' or '.join(TABLE_SUFFIXES)}")
    if out is not None and roles.target is None:
        raise InputError("--out: needs --target, the column that is to be predicted")
    # Columns, and records that equal an earlier one.
    formats, path = find_formats(paths, marks), paths[0]
    for text in filter(None, map(describe_format, paths, formats)):
        typer.echo(text)
    if len(paths) == 1:
        table = read_raw_table(path, formats[0])
    else:
        table, site = join_files(paths, formats, roles.site)
        path, roles = (Path() if out is None else out) / JOINED_FILE, dataclasses.replace(roles, site=site)
    typer.echo(f"{table.source}: {len(table)} records, {len(table.columns)} columns")
    columns = summarize_columns(table)
    for column in columns:
        typer.echo(f"  {sanitize_line(column.name)}: {column.describe()}")
    for name, reason in table.unreadable.items():
        typer.echo(f"  {sanitize_line(name)}: passed over; {sanitize_line(reason)}")
    if copies := table.duplicate_count():
        verb = "equals" if copies == 1 else "equal"
        typer.echo(
            f"warning: {format_count(copies, 'record')} {verb} an earlier one in every column; "
            "is each of them a unit of its own?"
        )
    facts: dict[str, Any] = {
        "source": table.source,
        "records": len(table),
        "columns": [
            {**vars(column), "words": column.words[:MAX_WORDS], "description": column.describe()}
            for column in columns
        ],
        "passed_over": table.unreadable,
        "repeated_records": copies,
    }
    if roles.target is None:
        return facts
    # Columns with a use, and columns that are left out.
    schema = describe_table(
        table,
        columns,
        roles.target,
        regression=roles.regression,
        site=roles.site,
        person=roles.person,
        split=roles.split,
    )
    schemas = [schema.model_copy(update=cell_format._asdict()) for cell_format in formats]
    schema = schemas[0] if len(paths) == 1 else schema  # the joined file is a plain one
    unused, columns_with_odd_cells = (
        find_unused_columns(table, schema),
        {column.name for column in columns if column.odd_cells},
    )
    for reason, names in (
        ("until its cells are mended", [name for name in unused if name in columns_with_odd_cells]),
        (
            "with one value, too large numbers or too many words",
            [name for name in unused if name not in columns_with_odd_cells],
        ),
    ):
        if names:
            typer.echo(f"left out, {reason}: {sanitize_line(', '.join(names))}")
    # Records as a run would read them: persons, and silos of too few records or a single class.
    encoded = read_rows(table, schema)
    check_persons(encoded, schema, path)
    unit, train = _find_unit_keys(encoded, schema), encoded.split.train
    # If a column decides which rows are for training, each row has a place in both parts, and counts in one.
    # So the number of places, which is public, depends on no entry.  Batches are planned by `sizes`, the places of
    # each silo.  Warnings are of `training`, the rows or persons that count.
    sizes = _count_units(encoded, schema, train.row_indices, by_person="unit" in unit)
    training = _count_units(encoded, schema, train.row_indices[train.is_counted], by_person="unit" in unit)
    _warn_of_small_silos(encoded, schema, training, "persons in training" if unit else "training records")
    if schema.classes is not None and {column.name: column for column in columns}[schema.target].has_class_codes:
        typer.echo(
            f"{sanitize_line(schema.target)}: whole numbers, taken for classes; --regression if they are amounts"
        )
    facts |= {"left_out": unused, "table": schema.model_dump(mode="json"), "training_units": training}
    if out is None:
        return facts
    from fedpriv.silo.policy import private_umask, revoke_write_access

    shards = dict(zip(paths, schemas, strict=True)) if len(paths) > 1 else {}
    files = _make_files(path, schema, sizes, unit, out, shards)
    names = [*files, *([JOINED_FILE] if len(paths) > 1 else [])]
    if present := [name for name in names if (out / name).exists()]:
        raise InputError(f"{out / present[0]} exists; give another --out")
    if len(paths) > 1:
        with private_umask():
            out.mkdir(parents=True, exist_ok=True)
            write_rows(table, range(len(table)), path)
        typer.echo(path)
    for name, text in files.items():
        write_text(out / name, text)
        revoke_write_access(out / name)  # a guard refuses a policy that other users can change
        typer.echo(out / name)
    if (refusal := _why_refused(out / "scenario.toml")) is not None:
        typer.echo(f"warning: as it stands, a run of {out / 'scenario.toml'} is refused: {sanitize_line(refusal)}")
    typer.echo(f"note: {' '.join(WARNING.splitlines())}")
    return {**facts, "files": [str(out / name) for name in names]}


def _why_refused(scenario: Path) -> str | None:
    """Return why a run of a written scenario would be refused for its data, or None.

    The description counts as public.
    """
    from fedpriv.plan.task import check_record_count, load_task
    from fedpriv.scenario.load import load_scenario

    try:
        cell = load_scenario(scenario, ["data.table.public=true"]).points[0].cell
        load_task(cell)
        check_record_count(cell)
    except InputError as error:
        return str(error)
    return None


def _find_unit_keys(encoded: TableRows, schema: TableSchema) -> dict[str, Any]:
    """Print the number of persons, and return the keys of [privacy] that protect persons.

    The keys are `unit` and `records`, the largest number of a person's records that count.  There are no keys if
    no person has several records.  A table without a column of persons has no keys, and nothing is printed.
    """
    if (persons := count_persons(encoded)) is None:
        return {}
    typer.echo(f"{sanitize_line(str(schema.person))}: {_describe_persons(persons)}")
    return (
        {"unit": "user", "records": min(persons.max_records, _MAX_RECORDS_PER_PERSON)}
        if persons.repeated_count
        else {}
    )


def _describe_persons(persons: PersonCounts) -> str:
    if not persons.repeated_count:
        return f"{persons.count} persons with one record each: to protect a record is to protect a person"
    limit_note = (
        f", of a person with more the first {_MAX_RECORDS_PER_PERSON} count"
        if persons.max_records > _MAX_RECORDS_PER_PERSON
        else ""
    )
    return (
        f"{persons.count} persons, {persons.repeated_count} of them with several records, "
        f"{persons.max_records} at most: "
        f'a run has to protect persons, unit = "user"{limit_note}'
    )


def _count_units(
    encoded: TableRows, schema: TableSchema, row_indices: NDArray[np.int64], *, by_person: bool
) -> list[int]:
    """Return the number of units among some rows in each silo.

    A silo is a site, and all rows of a person are at one site (`check_persons`).  In a table without sites, each
    of four silos has a quarter of the units, rounded down.

    Args:
        encoded: Rows of the table.
        schema: Description of the table, which lists the sites.
        row_indices: Indices of the rows that are counted.
        by_person: Whether units are persons, else records.
    """
    if by_person:
        assert encoded.persons is not None
        row_indices = row_indices[index_persons(encoded.persons[row_indices])[0]]  # the first row of each person
    if encoded.sites is None:
        return [len(row_indices) // _DEFAULT_SILOS] * _DEFAULT_SILOS
    counts: list[int] = np.bincount(encoded.sites[row_indices], minlength=len(schema.sites)).tolist()
    return counts


def _warn_of_small_silos(encoded: TableRows, schema: TableSchema, sizes: Sequence[int], noun: str) -> None:
    """Print warnings of silos with few training units, and of sites with fewer than two classes in a part.

    Args:
        encoded: Rows of the table.
        schema: Description of the table, which lists sites and classes.
        sizes: Number of training units of each silo.
        noun: Name of these units in the warnings.

    Raises:
        InputError: If a silo has no training unit, so that the table cannot be run.
    """
    names = schema.sites or tuple(f"silo {silo}" for silo in range(len(sizes)))
    if (min_size := min(sizes)) < 1:
        raise InputError(
            f"{names[sizes.index(min_size)]!r} has no {noun}; "
            + ("leave its records out of the table" if schema.sites else f"{len(sizes)} silos need one each")
        )
    for silo_id, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if size < _MIN_RECORDS:
            typer.echo(f"warning: {name!r} has {size} {noun}: its noise will hide nearly all they say")
        if schema.classes is None or encoded.sites is None:
            continue
        for split_name, split_rows in (("training", encoded.split.train), ("test", encoded.split.test)):
            rows = split_rows.row_indices[split_rows.is_counted]
            classes = np.unique(encoded.labels[rows[encoded.sites[rows] == silo_id]])
            if len(classes) < 2:
                class_name = schema.classes[int(classes[0])] if len(classes) else "none"
                typer.echo(
                    f"warning: {name!r} has {split_name} records of one class only ({sanitize_line(class_name)})"
                )


def _make_files(
    path: Path,
    schema: TableSchema,
    sizes: Sequence[int],
    unit: dict[str, Any],
    out: Path,
    shards: Mapping[Path, TableSchema],
) -> dict[str, str]:
    """Make the texts of scenario.toml and of a policy silo-N.toml for each silo, by name.

    The scenario has the advised settings, and the policies allow a run of it.  The table's description stays
    public = false in the files, so that a run with noise is refused until its owner has checked it.

    Args:
        path: The table.
        schema: Description of the table.
        sizes: Number of units among each silo's training rows, which is also its batch size.
        unit: Keys of [privacy] for persons with several records, empty for records.
        out: Folder of the files, from which the scenario names a table of relative path.
        shards: Description of each joined file by its path, or empty for one file.  A silo's policy names the
            file whose name up to the first dot is the silo's site, and otherwise silo-N.csv.
    """
    from fedpriv.addons.begin.advise import advise_on_table
    from fedpriv.plan.task import make_schema_task
    from fedpriv.scenario.load import resolve_cell
    from fedpriv.silo.demo import format_policy, run_allowance

    advice = advise_on_table(path, schema, sizes, unit)
    confirmed = schema.model_copy(update={"public": True})  # only to compute the limits of the policies
    data = {**advice.tree["data"], "table": confirmed.model_dump(exclude_none=True)}
    cell = resolve_cell({**advice.tree, "data": data}, str(path))
    limits = run_allowance(cell, make_schema_task(cell, confirmed))
    relative_name = os.path.relpath(path, out) if not path.is_absolute() else str(path)
    advice = dataclasses.replace(
        advice, tree={**advice.tree, "data": {**advice.tree["data"], "name": relative_name}}
    )
    warning_lines = "".join(f"# {line}\n" for line in WARNING.splitlines())
    sections = advice.sections(
        {"privacy": _PERSONS_COMMENT.format(**unit), "federation": _BATCHES_COMMENT} if unit else {}
    )
    preamble = (
        f"{warning_lines}name = {json.dumps(advice.tree['name'])}\n\n{format_schema_toml(schema, 'data.table')}\n"
    )
    files = {"scenario.toml": preamble + "\n".join(sections.values())}
    names = {"shard": "csv", "ledger": "sqlite", "socket": "sock"}
    shard_of_site = {shard.name.split(".")[0]: (shard.name, description) for shard, description in shards.items()}
    for silo in range(len(sizes)):
        policy_keys = {"silo": silo} | {name: f"silo-{silo}.{suffix}" for name, suffix in names.items()}
        description = schema
        if schema.sites[silo:] and schema.sites[silo] in shard_of_site:
            policy_keys["shard"], marks = shard_of_site[schema.sites[silo]]
            description = schema.model_copy(update=marks.cell_format._asdict())
        files[f"silo-{silo}.toml"] = (
            warning_lines + (_UNIT_COMMENT if unit else "") + format_policy(policy_keys, limits, description)
        )
    return files


def print_advice(
    silos: int, records: str, further_facts: dict[str, Any], data: str | None, out: Path | None, *, as_json: bool
) -> None:
    """Print the advice, and write its scenario to `out`.

    Args:
        silos: Number of silos.
        records: Number of training records of each silo, as one number for all or as numbers with commas.
        further_facts: Other facts, by the names of arguments of `advise`.
        data: Name of the data in the scenario, or None for records.npz.
        out: File of the scenario, or None for none.
        as_json: Whether JSON is printed in place of a table and sentences.

    Raises:
        InputError: If no federation has these facts, `records` is no list of numbers, or `out` exists.
        OSError: If `out` cannot be written.
    """
    if out is not None and out.exists():
        raise InputError(f"--out {out}: exists; give another name")
    from fedpriv.addons.begin.advise import NETWORK_NAME, advise

    advice = advise(
        silos=silos, records=_parse_counts(records), data=None if data is None else {"name": data}, **further_facts
    )
    if as_json:
        data_of_advice = {
            "scenario": advice.tree,
            "reasons": {recommendation.key: recommendation.why for recommendation in advice.chosen},
            "forecast": {**vars(advice.forecast), "sentence": advice.forecast.sentence},
            "epsilon": advice.epsilon,
            "others": advice.others,
        }
        sys.stdout.write(json.dumps(data_of_advice) + "\n")
    else:
        rows = [
            [recommendation.key, _format_value(recommendation.value), recommendation.why]
            for recommendation in advice.chosen
        ]
        print_rich("What to take", [Column("key"), Column("value"), Column("why", can_wrap=True)], rows)
        from fedpriv.noise.trust import UNITS, find_trust

        sizes, rounds = advice.facts.sizes, advice.tree["federation"]["rounds"]
        units = f"{UNITS[advice.facts.unit].noun}s"
        cost_line = (
            f"{format_count(len(sizes), 'silo')} with {format_count_range(sizes)} {units} each "
            f"({find_trust(advice.facts.trust).title}) read all {sum(sizes):,} {units} in each of "
            f"{format_count(rounds, 'round')}, which costs "
            f"{format_epsilon_delta(advice.epsilon, advice.facts.delta)}."
        )
        for line in (cost_line, advice.forecast.sentence, *advice.others):
            print_plain(line)
    if out is not None:
        write_text(out, advice.text)
        if not as_json:
            instruction = "" if data is not None else ". Put your records into records.npz (docs/adding-data.md)"
            print_plain(
                f"written: {out}{instruction}; run it with: fedpriv run {out}"
                + (f" --import FILE, which adds {NETWORK_NAME}" if advice.facts.parameters is not None else "")
            )


def _parse_counts(text: str) -> int | tuple[int, ...]:
    """Parse a number, or a number for each silo, separated by commas.

    Raises:
        InputError: A part is no whole number.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--records {text!r}: expected a whole number, or one for each silo: 120,80,300"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def _format_value(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    low, high = min(value), max(value)
    return f"{low:,} each" if low == high else f"{low:,} to {high:,}"


_STARTER_RECORDS = 300  # records of each of the five silos in a new folder's scenario
_STARTER_NOTES = {
    "data": "# a data set (`fedpriv list data`), an .npz file, or a name given to fedpriv.add_data\n",
    "model": "# from my_model.py\n",
    "privacy": "# zero-out: neighbours differ in one record, which is there or not\n",
}
_STARTER_FILES = {
    name: name for name in ("scenario.toml", "my_algorithm.py", "my_model.py", "notebook.ipynb", "README.md")
}
"""Source by file of a new folder."""
_COMPARISON_FILES = {"scenario.toml": "compare.toml"}


def _make_starter_sections(name: str) -> str:
    """Make the advised sections of the starter's scenario, with the starter's own model and without [run]."""
    from fedpriv.addons.begin.advise import Facts, advise_on_facts

    advice = advise_on_facts(
        Facts((_STARTER_RECORDS,) * 5, 784, 10, 4.0, trust="trusted"), {"name": "synthetic"}, name
    )
    algorithm = {key: value for key, value in advice.tree["algorithm"].items() if key != "output"}
    advice = dataclasses.replace(
        advice, tree={**advice.tree, "model": {"name": "my-model"}, "algorithm": algorithm}
    )
    return "\n".join(text for key, text in advice.sections(_STARTER_NOTES).items() if key != "run")


def create_folder(folder: Path, *, is_comparison: bool = False) -> list[Path]:
    """Write the starter files into a new folder, whole or not at all, and return their paths.

    In the sources NAME stands for the scenario's name, and a line "# ADVISED" for sections with the numbers that
    are advised for softmax regression.

    Args:
        folder: Folder to make, whose name becomes that of the scenario.
        is_comparison: Whether the folder has only a scenario that compares four algorithms.

    Raises:
        InputError: If the folder exists or cannot be written, or its name cannot be a scenario's.
    """
    name = folder.name
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise InputError(f"fedpriv init {folder}: expected a name of lower-case letters, digits and dashes")
    if folder.exists():
        raise InputError(f"fedpriv init {folder}: exists already; give another name")
    source, sections = resources.files(__package__) / "starter", _make_starter_sections(name)
    files = _COMPARISON_FILES if is_comparison else _STARTER_FILES
    # The files are written to a hidden folder, which is then renamed.
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            for file, source_name in files.items():
                text = (source / source_name).read_text(encoding="utf-8").replace("NAME", name)
                (draft / file).write_text(text.replace("# ADVISED\n", sections), encoding="utf-8")
            draft.chmod(0o755)
            draft.rename(folder)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        raise InputError(f"fedpriv init {folder}: cannot be written ({error.strerror})") from None
    return [folder / file for file in files]
