"""From a CSV file to a report: what `data inspect` says and writes, and what it refuses to take for public."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedpriv.cli.app import app
from fedpriv.clients.policy import read_policy
from fedpriv.errors import InputError
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
    assert (policy.silo, policy.table.sites, policy.allow.rounds) == (1, ("north", "south"), 50)


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
