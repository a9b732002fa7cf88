"""From a CSV file to a report: what `data inspect` says and writes, and what it refuses to take for public."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedpriv.cli.app import app
from fedpriv.core.errors import InputError
from fedpriv.silo.policy import read_policy
from tests.data.tables import rows, write_csv


def fedpriv(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def census(count: int = 600) -> list[dict[str, str]]:
    """Mixed columns of which salary follows: numbers, words, an identifier, gaps."""
    records = rows(count)
    for number, record in enumerate(records):
        record["fnlwgt"] = str(1000 + 37 * number % 977)
        if number % 11 == 0:
            record["age"] = "?"
    return records


def test_five_commands_from_a_csv_file_to_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of docs/tables.md, on a small table of the same kind."""
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "adult.csv", census())
    seen = fedpriv("data", "inspect", "adult.csv", "--target", "outcome", "--site", "hospital", "--out", "adult")
    assert "  age: numbers from 20 to 89, 55 missing" in seen.output
    assert "  pain: 3 words: " in seen.output
    assert "left out, with one value or too many words: patient" in seen.output
    assert "were read from the records, and to publish them is a release" in seen.output
    scenario = tmp_path / "adult" / "scenario.toml"
    with pytest.raises(InputError, match=r"data\.table\.public = false"):
        fedpriv("run", scenario)
    assert not (tmp_path / "runs").exists()
    scenario.write_text(scenario.read_text().replace("public = false", "public = true"))
    for command in (["run", scenario, "--out", "runs/adult"], ["table", "runs/adult"], ["report", "runs/adult"]):
        assert fedpriv(*command).exit_code == 0
    assert "AUC" in fedpriv("table", "runs/adult").output
    assert (tmp_path / "runs" / "adult" / "report.html").exists()


def test_policies_are_for_the_scenario_and_refused_until_they_are_public(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "adult.csv", census())
    fedpriv("data", "inspect", table, "--target", "outcome", "--site", "hospital", "--out", tmp_path)
    path = tmp_path / "silo-1.toml"
    with pytest.raises(InputError, match=r"table\.public = false"):
        read_policy(path)
    path.write_text(path.read_text().replace("public = false", "public = true"))
    policy = read_policy(path)
    assert policy.table is not None
    assert (policy.silo, policy.table.sites, policy.allow.rounds) == (1, ("north", "south"), 30)


def test_a_real_target_is_proposed_as_one(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "adult.csv", census())
    fedpriv("data", "inspect", table, "--target", "fnlwgt", "--out", tmp_path / "out")
    text = (tmp_path / "out" / "scenario.toml").read_text()
    assert "range = [1000.0, 2000.0]" in text
    assert 'metrics = ["r2", "mae"]' in text
    assert (
        fedpriv(
            "run", tmp_path / "out" / "scenario.toml", "--set", "data.table.public=true", "--out", tmp_path / "r"
        ).exit_code
        == 0
    )


@pytest.mark.parametrize(
    ("change", "words", "line"),
    [
        ({}, ["--out", "out"], "--out: needs --target"),
        ({}, ["--target", "outcom"], "has no column 'outcom', .*did you mean 'outcome'"),
        ({"outcome": "well"}, ["--target", "outcome"], "'outcome': holds one value only"),
        ({}, ["--target", "sex", "--regression"], "'sex': holds words, so it is no real target"),
        ({"part": "test"}, ["--target", "outcome", "--split", "part"], "has no training records"),
    ],
)
def test_what_cannot_be_described_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], words: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "t.csv", [{**record, **change} for record in rows()])
    if "--out" not in words:
        words = [*words, "--out", "out"]
    with pytest.raises(InputError, match=line):
        fedpriv("data", "inspect", "t.csv", *words)
    assert not (tmp_path / "out").exists()


def test_files_that_are_there_are_left_as_they_are(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "t.csv", census())
    (tmp_path / "silo-1.toml").write_text("mine")
    with pytest.raises(InputError, match=r"silo-1\.toml exists; give another --out"):
        fedpriv("data", "inspect", table, "--target", "outcome", "--site", "hospital", "--out", tmp_path)
    assert (tmp_path / "silo-1.toml").read_text() == "mine"
    assert not (tmp_path / "scenario.toml").exists()


def small_hospital(records: list[dict[str, str]]) -> list[dict[str, str]]:
    return [
        {**each, "hospital": "north" if int(each["patient"][1:]) > 15 else each["hospital"]} for each in records
    ]


def one_class(records: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**each, "outcome": "ill"} if each["hospital"] == "south" else each for each in records]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (small_hospital, "warning: 'south' has 4 training records: its noise will hide nearly all they say"),
        (one_class, "warning: 'south' has test records of one class only (ill)"),
    ],
)
def test_sites_that_need_a_second_look_are_named(tmp_path: Path, change: Any, line: str) -> None:
    table = write_csv(tmp_path / "t.csv", change(rows()))
    words = ["--target", "outcome", "--site", "hospital", "--split", "part"]
    assert line in fedpriv("data", "inspect", table, *words).output.splitlines()


def visits(persons: int = 120, most: int = 4) -> list[dict[str, str]]:
    """Persons with 1 to `most` records, all at one site."""
    return [
        {**record, "patient": f"p{number}"}
        for number, record in enumerate(rows(persons))
        for _ in range(1 + number % most)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("site", [["--site", "hospital"], []])
def test_persons_with_several_records_are_what_the_starter_protects(tmp_path: Path, site: list[str]) -> None:
    table = write_csv(tmp_path / "visits.csv", visits())
    words = ["--target", "outcome", *site, "--person", "patient", "--out", tmp_path / "out"]
    seen = fedpriv("data", "inspect", table, *words)
    told = "patient: 120 persons, 90 of them with several records, 4 at most: a run has to protect persons, unit"
    assert told in seen.output
    scenario = tmp_path / "out" / "scenario.toml"
    text = scenario.read_text()
    assert "first 4 at most count\n" in text
    assert 'unit = "user"\nrecords = 4\n' in text
    ran = fedpriv("run", scenario, "--set", "data.table.public=true", "--out", tmp_path / "run")
    assert ran.exit_code == 0
    assert "all records of one person in one silo, at most 4 a round" in " ".join(ran.output.split())
    policy = tmp_path / "out" / "silo-0.toml"
    policy.write_text(policy.read_text().replace("public = false", "public = true"))
    assert read_policy(policy).allow.unit == "user"


def test_persons_with_very_many_records_count_with_the_first_of_them(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "visits.csv", visits(40, 20))
    words = ["--target", "outcome", "--site", "hospital", "--person", "patient", "--out", tmp_path / "out"]
    seen = fedpriv("data", "inspect", table, *words)
    assert (
        '20 at most: a run has to protect persons, unit = "user", of a person with more the first 16'
        in seen.output
    )
    assert "records = 16\n" in (tmp_path / "out" / "scenario.toml").read_text()


def test_persons_with_one_record_each_leave_the_record_as_the_unit(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "t.csv", census())
    words = ["--target", "outcome", "--site", "hospital", "--person", "patient", "--out", tmp_path / "out"]
    seen = fedpriv("data", "inspect", table, *words)
    assert "patient: 600 persons with one record each: to protect a record is to protect a person" in seen.output
    assert "unit" not in (tmp_path / "out" / "scenario.toml").read_text()


def test_a_person_at_two_sites_is_refused_before_a_starter_is_written(tmp_path: Path) -> None:
    records = visits()
    records[-1]["hospital"] = "south" if records[-1]["hospital"] == "north" else "north"
    table = write_csv(tmp_path / "t.csv", records)
    words = ["--target", "outcome", "--site", "hospital", "--person", "patient", "--out", tmp_path / "out"]
    with pytest.raises(InputError, match="'p119' has records at 'north' and 'south'"):
        fedpriv("data", "inspect", table, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cell", ["sixty", "inf", "1_000"])
def test_a_mistake_among_numbers_is_told_with_its_line(tmp_path: Path, cell: str) -> None:
    records = rows(600)
    records[17]["age"] = cell
    table = write_csv(tmp_path / "t.csv", records)
    lines = fedpriv("data", "inspect", table, "--target", "outcome").output.splitlines()
    told = f"  age: 599 numbers, and 1 cell that is none: line 19: {cell!r}; mend what is wrong, and empty a cell"
    assert any(line.startswith(told) for line in lines)
    assert "left out, until its cells are mended: age" in lines
    assert "left out, with one value or too many words: patient" in lines
    with pytest.raises(InputError, match="column 'age': 599 numbers, and 1 cell that is none: line 19"):
        fedpriv("data", "inspect", table, "--target", "age")


def test_codes_of_which_one_is_a_word_stay_words(tmp_path: Path) -> None:
    records = [{**each, "ward": "ICU" if n == 3 else str(n % 5)} for n, each in enumerate(rows(600))]
    seen = fedpriv("data", "inspect", write_csv(tmp_path / "t.csv", records), "--target", "outcome")
    assert "  ward: 6 words: " in seen.output


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(["target", "site", "person", "split"], 2)))
def test_a_column_with_two_roles_is_one_line(tmp_path: Path, one: str, other: str) -> None:
    table = write_csv(tmp_path / "t.csv", rows())
    given = {"target": "outcome", one: "hospital", other: "hospital"}
    words = [word for role, name in given.items() for word in (f"--{role}", name)]
    with pytest.raises(InputError, match=f"'hospital': is named as {one} and as {other}; it can have one role"):
        fedpriv("data", "inspect", table, *words)


def test_a_site_that_no_record_names_is_one_line(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "t.csv", [{**record, "hospital": ""} for record in rows()])
    with pytest.raises(InputError, match="'hospital': is empty, so it says of no record whose it is"):
        fedpriv("data", "inspect", table, "--target", "outcome", "--site", "hospital")


def test_a_real_target_with_one_number_spelled_twice_is_one_line(tmp_path: Path) -> None:
    records = [{**record, "days": "1" if n % 2 else "1.0"} for n, record in enumerate(rows())]
    with pytest.raises(InputError, match="'days': holds one value only"):
        fedpriv("data", "inspect", write_csv(tmp_path / "t.csv", records), "--target", "days", "--regression")


@pytest.mark.parametrize(
    ("target", "metric"), [("outcome", "test_accuracy"), ("fnlwgt", "test_r2"), ("stage", "test_accuracy")]
)
def test_tune_works_on_what_is_written_and_compares_by_its_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, metric: str
) -> None:
    """Sites of any size, of which the last records of the file, those held out, belong to one."""
    monkeypatch.chdir(tmp_path)
    records = [{**record, "stage": str(number % 3 + 9)} for number, record in enumerate(census(163))]
    records.sort(key=lambda record: record["hospital"])
    write_csv(tmp_path / "adult.csv", records)
    told = fedpriv("data", "inspect", "adult.csv", "--target", target, "--site", "hospital", "--out", "out")
    assert ("stage: whole numbers, taken for classes" in told.output) == (target == "stage")
    assert ('classes = ["9", "10", "11"]' in (tmp_path / "out" / "scenario.toml").read_text()) == (
        target == "stage"
    )
    tuned = fedpriv(
        "tune", "out/scenario.toml", "--set", "data.table.public=true", "--trials", "3", "--held-out", "17",
    )  # fmt: skip
    assert tuned.exit_code == 0
    assert f"{metric} while tuning" in tuned.output


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
def test_a_few_whole_numbers_are_classes_unless_said_otherwise(
    tmp_path: Path, values: list[float], classes: bool
) -> None:
    records = [{**record, "kind": str(values[n % len(values)])} for n, record in enumerate(rows(200))]
    table = write_csv(tmp_path / "kinds.csv", records)
    for words, expected in (([], classes), (["--regression"], False), (["--classes"], True)):
        out = tmp_path / f"out{len(words)}{expected}{''.join(words)}"
        fedpriv("data", "inspect", table, "--target", "kind", "--out", out, *words)
        text = (out / "scenario.toml").read_text()
        assert ('name = "softmax-regression"' in text) == expected
