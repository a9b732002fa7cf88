"""From a CSV file to a report: what `data inspect` says and writes, and what it refuses to take for public."""

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedpriv.addons.begin.inspect import round_outwards
from fedpriv.core.errors import InputError
from fedpriv.silo.policy import read_policy
from tests.cli.command import output_of
from tests.data.tables import rows, write_csv

SITES = ["--target", "outcome", "--site", "hospital"]


def inspect(folder: Path, records: list[dict[str, str]], *words: object, out: bool = True) -> str:
    """What `data inspect` says of a table with these records; it writes to `folder`/out, if to anything."""
    table = write_csv(folder / "t.csv", records)
    return output_of("data", "inspect", table, *words, *(["--out", folder / "out"] if out else []))


def make_public(path: Path) -> Path:
    """Say in a scenario or a policy that what was read from the records may be published."""
    path.write_text(path.read_text().replace("public = false", "public = true"))
    return path


Change = dict[str, str] | Callable[[int, dict[str, str]], dict[str, str]]
"""Cells that replace those of every record, or those of the n-th."""


def changed(records: list[dict[str, str]], change: Change) -> list[dict[str, str]]:
    return [{**record, **(change(n, record) if callable(change) else change)} for n, record in enumerate(records)]


def census(count: int = 600) -> list[dict[str, str]]:
    """Mixed columns of which salary follows: numbers, words, an identifier, gaps."""
    records = rows(count)
    for number, record in enumerate(records):
        record["fnlwgt"] = str(1000 + 37 * number % 977)
        if number % 11 == 0:
            record["age"] = "?"
    return records


@pytest.mark.slow
def test_a_first_look_at_a_table_does_not_wait_for_torch(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "t.csv", census())
    script = (
        "import sys; sys.argv = ['fedpriv', 'data', 'inspect', *sys.argv[1:]]\n"
        "from fedpriv.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(table), *SITES]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith("0 False\n")


def test_five_commands_lead_from_a_csv_file_to_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of docs/tables.md, on a small table of the same kind."""
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "adult.csv", census())
    text = output_of("data", "inspect", "adult.csv", *SITES, "--out", "adult")
    for part in (
        "  age: numbers from 20 to 89, 55 missing",
        "  pain: 3 words: ",
        "left out, with one value, too large numbers or too many words: patient",
        "were read from the records, and to publish them is a release",
    ):
        assert part in text
    scenario = tmp_path / "adult" / "scenario.toml"
    with pytest.raises(InputError, match=r"data\.table\.public = false"):
        output_of("run", scenario)
    assert not (tmp_path / "runs").exists()
    output_of("run", make_public(scenario), "--out", "runs/adult")
    assert "AUC" in output_of("table", "runs/adult")
    output_of("report", "runs/adult")
    assert (tmp_path / "runs" / "adult" / "report.html").exists()


def test_policies_written_by_data_inspect_are_refused_until_declared_public(tmp_path: Path) -> None:
    inspect(tmp_path, census(), *SITES)
    path = tmp_path / "out" / "silo-1.toml"
    with pytest.raises(InputError, match=r"table\.public = false"):
        read_policy(path)
    policy = read_policy(make_public(path))
    assert policy.table is not None
    assert (policy.silo, policy.table.sites, policy.allow.rounds) == (1, ("north", "south"), 30)


def test_a_numeric_target_is_proposed_as_a_regression(tmp_path: Path) -> None:
    inspect(tmp_path, census(), "--target", "fnlwgt")
    scenario = tmp_path / "out" / "scenario.toml"
    text = scenario.read_text()
    assert "range = [1000.0, 2000.0]" in text
    assert 'metrics = ["r2", "mae"]' in text
    output_of("run", scenario, "--set", "data.table.public=true", "--out", tmp_path / "run")


ONE_VALUE = "'days': holds one value only"
REFUSALS: list[tuple[Change, str, str]] = [
    ({}, "", "--out: needs --target"),
    ({}, "--target outcom", "has no column 'outcom', .*did you mean 'outcome'"),
    ({"outcome": "well"}, "--target outcome", "'outcome': holds one value only"),
    ({"outcome": ""}, "--target outcome", "'outcome': is empty, so there is nothing to predict"),
    (
        lambda n, record: {"days": "1.7976931348623157e308" if n == 5 else str(n)},
        "--target days",
        "'days': holds a number of size 1e307 or more",
    ),  # was a ValidationError
    ({}, "--target sex --regression", "'sex': holds words, so it is no real target"),
    ({"part": "test"}, "--target outcome --split part", "has no training records; 4 silos need one each"),
    (
        {"hospital": ""},
        "--target outcome --site hospital",
        "'hospital': is empty, so it says of no record whose it is",
    ),
    (lambda n, record: {"days": "1" if n % 2 else "1.0"}, "--target days --regression", ONE_VALUE),
    (
        lambda n, record: {"age": "sixty"} if n == 17 else {},
        "--target age",
        "column 'age': 59 numbers, and 1 cell that is none: line 19",
    ),
    (
        lambda n, record: {"patient": "p0", "hospital": "south"} if n == 9 else {},
        "--target outcome --site hospital --person patient",
        "'p0' has records at 'north' and 'south'",
    ),
    *(
        (
            {},
            "--target outcome " * ("target" not in roles) + " ".join(f"--{role} hospital" for role in roles),
            f"'hospital': is named as {roles[0]} and as {roles[1]}; it can have one role",
        )
        for roles in itertools.combinations(["target", "site", "person", "split"], 2)
    ),
]


@pytest.mark.parametrize(("change", "words", "line"), REFUSALS)
def test_tables_that_cannot_be_described_are_refused_in_one_line_and_nothing_is_written(
    tmp_path: Path, change: Change, words: str, line: str
) -> None:
    with pytest.raises(InputError, match=line) as raised:
        inspect(tmp_path, changed(rows(), change), *words.split())
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_column_of_extremely_large_numbers_is_left_out(tmp_path: Path) -> None:
    text = inspect(
        tmp_path,
        changed(rows(), lambda n, record: {"days": "1.7976931348623157e308" if n % 9 == 0 else str(n)}),
        *SITES,
    )
    assert "too large numbers or too many words: patient, days" in text  # was a ValidationError


@pytest.mark.parametrize(
    ("low", "high", "bounds"),
    [
        (17.0, 83.0, (10.0, 90.0)),
        (0.0, 5e-324, (0.0, 5e-324)),  # was a ZeroDivisionError
        (0.8300000000000001, 0.8400000000000001, (0.83, 0.85)),
        (-2.3, -1.7, (-2.3, -1.7)),  # ended at -2.3000000000000003
        (-0.3, 0.5, (-0.3, 0.5)),
    ],
)
def test_ranges_are_rounded_outwards_and_never_inwards(
    low: float, high: float, bounds: tuple[float, float]
) -> None:
    assert round_outwards(low, high)[0] <= low < high <= round_outwards(low, high)[1]
    assert round_outwards(low, high) == bounds


def test_data_inspect_never_overwrites_existing_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "silo-1.toml").write_text("mine")
    with pytest.raises(InputError, match=r"silo-1\.toml exists; give another --out"):
        inspect(tmp_path, census(), *SITES)
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("silo-1.toml", "mine")]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda n, record: {"hospital": "north"} if n > 15 else {},
            "warning: 'south' has 4 training records: its noise will hide nearly all they say",
        ),
        (
            lambda n, record: {"outcome": "ill"} if record["hospital"] == "south" else {},
            "warning: 'south' has test records of one class only (ill)",
        ),
    ],
)
def test_data_inspect_warns_of_sites_with_few_records_or_one_class(
    tmp_path: Path, change: Change, line: str
) -> None:
    text = inspect(tmp_path, changed(rows(), change), *SITES, "--split", "part", out=False)
    assert line in text.splitlines()


def visits(persons: int = 120, most: int = 4) -> list[dict[str, str]]:
    """Persons with 1 to `most` records, all at one site."""
    return [
        {**record, "patient": f"p{number}"}
        for number, record in enumerate(rows(persons))
        for _ in range(1 + number % most)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("site", [["--site", "hospital"], []])
def test_repeated_persons_make_the_user_the_unit_of_the_written_scenario(tmp_path: Path, site: list[str]) -> None:
    summary = inspect(tmp_path, visits(), "--target", "outcome", *site, "--person", "patient")
    persons = "patient: 120 persons, 90 of them with several records, 4 at most"
    assert f"{persons}: a run has to protect persons, unit" in summary
    scenario = tmp_path / "out" / "scenario.toml"
    text = scenario.read_text()
    assert "first 4 at most count\n" in text
    assert 'unit = "user"\nrecords = 4\n' in text
    shown = output_of("run", scenario, "--set", "data.table.public=true", "--out", tmp_path / "run")
    assert "all records of one person in one silo, at most 4 a round" in " ".join(shown.split())
    assert read_policy(make_public(tmp_path / "out" / "silo-0.toml")).allow.unit == "user"


def test_persons_with_very_many_records_are_capped_at_their_first_sixteen(tmp_path: Path) -> None:
    text = inspect(tmp_path, visits(40, 20), *SITES, "--person", "patient")
    assert '20 at most: a run has to protect persons, unit = "user", of a person with more the first 16' in text
    assert "records = 16\n" in (tmp_path / "out" / "scenario.toml").read_text()


def test_persons_with_one_record_each_keep_the_record_as_the_unit(tmp_path: Path) -> None:
    text = inspect(tmp_path, census(), *SITES, "--person", "patient")
    assert "patient: 600 persons with one record each: to protect a record is to protect a person" in text
    assert "unit" not in (tmp_path / "out" / "scenario.toml").read_text()


@pytest.mark.parametrize("cell", ["sixty", "6O", "1_000"])
def test_a_malformed_number_in_a_column_is_reported_with_its_line(tmp_path: Path, cell: str) -> None:
    records = rows(600)
    records[17]["age"] = cell
    lines = inspect(tmp_path, records, "--target", "outcome", out=False).splitlines()
    mistake = f"599 numbers, and 1 cell that is none: line 19: {cell!r}"
    assert any(line.startswith(f"  age: {mistake}; mend what is wrong, and empty a cell") for line in lines)
    assert "left out, until its cells are mended: age" in lines
    assert "left out, with one value, too large numbers or too many words: patient" in lines
    with pytest.raises(InputError, match=re.escape(f"column 'age': {mistake}")):
        inspect(tmp_path, records, "--target", "age")


def test_a_column_of_codes_with_one_word_is_described_as_words(tmp_path: Path) -> None:
    records = changed(rows(600), lambda n, record: {"ward": "ICU" if n == 3 else str(n % 5)})
    assert "  ward: 6 words: " in inspect(tmp_path, records, "--target", "outcome", out=False)


@pytest.mark.parametrize(
    ("target", "metric"), [("outcome", "test_accuracy"), ("fnlwgt", "test_r2"), ("stage", "test_accuracy")]
)
def test_tuning_a_scenario_written_by_data_inspect_compares_by_its_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, metric: str
) -> None:
    """Sites of any size, of which the last records of the file, those held out, belong to one."""
    monkeypatch.chdir(tmp_path)
    records = [{**record, "stage": str(number % 3 + 9)} for number, record in enumerate(census(163))]
    records.sort(key=lambda record: record["hospital"])
    text = inspect(tmp_path, records, "--target", target, "--site", "hospital")
    scenario = tmp_path / "out" / "scenario.toml"
    assert ("stage: whole numbers, taken for classes" in text) == (target == "stage")
    assert ('classes = ["9", "10", "11"]' in scenario.read_text()) == (target == "stage")
    options = ["--set", "data.table.public=true", "--trials", "3", "--held-out", "17"]
    assert f"{metric} while tuning" in output_of("tune", scenario, *options)


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        ([0, 1, 2], True),
        (list(range(10)), True),
        (list(range(11)), False),  # too many
        ([0, 1, 2.5], False),  # no whole number
        ([-1, 1, 7], True),
    ],
)
def test_a_target_of_few_whole_numbers_is_a_classification_unless_overridden(
    tmp_path: Path, values: list[float], classes: bool
) -> None:
    records = changed(rows(200), lambda n, record: {"kind": str(values[n % len(values)])})
    for words, expected in (([], classes), (["--regression"], False), (["--classes"], True)):
        folder = tmp_path / "".join(["as", *words])
        folder.mkdir()
        inspect(folder, records, "--target", "kind", *words)
        text = (folder / "out" / "scenario.toml").read_text()
        assert ('name = "softmax-regression"' in text) == expected
