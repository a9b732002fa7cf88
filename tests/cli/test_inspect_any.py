"""`data inspect` on files as hospitals have them: one for each site, in any format, whose scenario runs."""

import csv
import json
import random
import re
import shutil
from pathlib import Path

import pytest

import fedpriv
from fedpriv.core.errors import InputError
from fedpriv.scenario.load import load_scenario
from fedpriv.silo.policy import read_policy
from tests.cli import command
from tests.cli.command import output_of
from tests.cli.test_inspect import make_public
from tests.data.tables import rows, write_csv


def write(path: Path, records: list[dict[str, str]], separator: str = ",") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(records)
    return path


def laboratory(count: int) -> list[dict[str, str]]:
    """Records of shared cases: C-reactive protein in halves, below 0.8 a limit; illness follows from it."""
    draw = random.Random(8)
    records = []
    for _ in range(count):
        crp = draw.choice([0.4, 0.7, *(n / 2 for n in range(2, 40))])
        records.append(
            {
                "crp": "<0.8" if crp < 0.8 else f"{crp}",
                "site": draw.choice("nesw"),
                "age": str(draw.randint(20, 90)),
                "outcome": "ill" if crp + draw.gauss(0.0, 1.5) > 4.0 else "well",
            }
        )
    return records


def test_detection_limits_with_a_less_than_sign_are_converted_to_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(Path("lab.csv"), laboratory(1200))
    text = output_of("data", "inspect", "lab.csv", "--target", "outcome", "--site", "site", "--out", "lab")
    assert "crp: numbers from 0.8 to 19.5; limits such as <0.8 are read as the limit" in text
    output_of("run", make_public(Path("lab/scenario.toml")), "--out", "run", "--set", "sweep.seeds=3")
    cells = fedpriv.load("run").cells
    assert sum(cell.test_accuracy for cell in cells) / len(cells) > 0.7


COLUMNS: dict[str, tuple[list[str], str, str]] = {
    "decimal commas": (["0,5", "1,25", "12,0"], "1234,5", "numbers from 0.5 to 12"),
    "thousands and decimal commas": (["1.234,5", "2,5", "12.000,0"], "1.234,5", "numbers from 2.5 to 12000"),
    "thousands": (["1,234.5", "2,500,000.0", "12.5"], "1,234.5", "numbers from 12.5 to 2.5e"),
    "millions": (["1,234,000", "2,500", "12"], "1,234.5", "numbers from 12 to 1.234e"),
    "spaces": (["1 234", "2 500", "12"], "1 234.5", "numbers from 12 to 2500"),
    "percent": (["5.0%", "7.5%", "10%"], "", "numbers from 5 to 10; 5.0% is read as 5"),
    "some percent": (
        ["5.0%", "7.5%", "10"],
        "",
        "and other cells have no percent sign: write all cells in one way",
    ),
    "infinite": (["1.5", "Inf", "-inf"], "", "numbers from 1.5 to 1.5, 400 missing"),
    "points": (["1.234", "2.345", "3.456"], "", "numbers from 1.234 to 3.456"),
}


@pytest.mark.parametrize("form", COLUMNS)
def test_number_formats_and_separators_of_a_file_are_detected(form: str, tmp_path: Path) -> None:
    values, example, line = COLUMNS[form]
    records = [{"x": values[n % 3], "y": str(n % 2)} for n in range(600)]
    text = output_of("data", "inspect", write(tmp_path / "t.csv", records, ";"))
    assert "t.csv: cells are separated by semicolons" in text
    assert line in text
    assert ("numbers are written as" in text) == bool(example)
    assert example in text


def test_commas_before_three_digits_need_an_explicit_number_format(tmp_path: Path) -> None:
    """1,234 may be a thousand and more, or between one and two: a guess would be wrong by a factor of 1,000."""
    path = write(tmp_path / "t.csv", [{"x": f"{n % 7 + 1},{n % 5}00", "y": str(n % 2)} for n in range(70)])
    text = output_of("data", "inspect", path)
    assert "--thousands , if 1,234 is above a thousand, or --decimal , if it is between 1 and 2" in text
    assert "numbers from 1000 to 7400" in output_of("data", "inspect", path, "--thousands", ",")
    assert "numbers from 1 to 7.4" in output_of("data", "inspect", path, "--decimal", ",")
    with pytest.raises(InputError, match=r"--decimal ';': expected one of '\.' ','"):
        output_of("data", "inspect", path, "--decimal", ";")
    with pytest.raises(InputError, match=r"--decimal '\.': expected one of ','"):
        output_of("data", "inspect", path, "--thousands", ".")
    with pytest.raises(InputError, match=r"--decimal ',': expected one of '\.'"):
        output_of("data", "inspect", path, "--decimal", ",", "--thousands", ",")


def test_a_csv_file_in_german_number_format_is_described_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    records = [{**record, "age": f"{record['age']},5"} for record in rows(200)]
    write(Path("t.csv"), records, ";")
    text = output_of("data", "inspect", "t.csv", "--target", "outcome", "--site", "hospital", "--out", "out")
    assert "t.csv: cells are separated by semicolons, and numbers are written as 1234,5" in text
    assert "warning: as it stands" not in text
    output_of("run", make_public(Path("out/scenario.toml")), "--out", "run")
    policy = read_policy(make_public(Path("out/silo-0.toml")))
    assert policy.table is not None
    assert policy.table.cell_format[:2] == (";", ",")


def test_one_file_for_each_site_is_joined_into_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a format of its own; the scenario runs, and a policy names its site's own file and format."""
    monkeypatch.chdir(tmp_path)
    records = [{name: cell for name, cell in record.items() if name != "hospital"} for record in rows(240)]
    write(Path("north.csv"), [{**record, "ward": "a"} for record in records[:120]])
    write(Path("south.csv"), [{**record, "age": f"{record['age']},0"} for record in records[120:]], ";")
    arguments = ["data", "inspect", "north.csv", "south.csv", "--target", "outcome"]
    text = output_of(*arguments, "--out", "study")
    for line in (
        "south.csv: cells are separated by semicolons, and numbers are written as 1234,5",
        "north.csv, south.csv: 240 records, 7 columns",
        "  ward: passed over; is not in south.csv",
        "  site: 2 words: north, south",
    ):
        assert line in text
    assert Path("study/records.csv").stat().st_mode & 0o077 == 0
    output_of("run", make_public(Path("study/scenario.toml")), "--out", "run")
    (cell,) = fedpriv.load("run").cells
    assert cell.scenario["federation"]["silos"] == 2
    policies = [read_policy(make_public(Path(f"study/silo-{silo}.toml"))) for silo in range(2)]
    assert [policy.shard.name for policy in policies] == ["north.csv", "south.csv"]
    assert [policy.table and policy.table.decimal for policy in policies] == [None, ","]
    with pytest.raises(InputError, match=r"study/records\.csv|study/scenario\.toml exists"):
        output_of(*arguments, "--out", "study")
    Path("other").mkdir()
    write(Path("other/north.csv"), records[:3])
    with pytest.raises(InputError, match="a site has the name of its file"):
        output_of("data", "inspect", "north.csv", "other/north.csv")


SITE_NAMES = ("site", "site_of_file", "site of north")


@pytest.mark.parametrize(
    ("header", "site"),
    [
        ("site,site", "site_of_file"),  # its column could not be read, because the new one had its name
        (",".join(SITE_NAMES), "site 0"),  # was a StopIteration
    ],
)
def test_the_column_of_joined_files_has_a_name_that_no_file_uses(tmp_path: Path, header: str, site: str) -> None:
    paths = [tmp_path / f"{name}.csv" for name in ("north", "south")]
    for path in paths:
        cells = [f"{number % 2},{number}," + ",".join("1" * len(header.split(","))) for number in range(40)]
        path.write_text("\n".join([f"y,a,{header}", *cells]) + "\n")
    text = output_of("data", "inspect", *paths, "--target", "y")
    assert f"  {site}: 2 words: north, south" in text


def test_files_that_share_a_single_column_are_refused_for_that(tmp_path: Path) -> None:
    """Before: they were said to share no column, also where the column of sites was the one that some lacked."""
    paths = [tmp_path / f"{name}.csv" for name in ("north", "south")]
    for path, text in zip(paths, ("x,h\n1,A\n2,B\n", "x\n3\n4\n"), strict=True):
        path.write_text(text)
    with pytest.raises(InputError, match="share fewer than two columns, that of sites counted; give each file"):
        output_of("data", "inspect", *paths, "--target", "x", "--site", "h")


def test_the_table_of_a_written_scenario_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is one from the scenario's folder; one from the shell's folder is read as before."""
    monkeypatch.chdir(tmp_path)
    write_csv(Path("t.csv"), rows(200))
    output_of("data", "inspect", "t.csv", "--target", "outcome", "--site", "hospital", "--out", "study")
    scenario = make_public(tmp_path / "study" / "scenario.toml")
    assert 'name = "../t.csv"' in scenario.read_text()
    for folder in (tmp_path, tmp_path / "study", Path("/")):
        monkeypatch.chdir(folder)
        cell = load_scenario(scenario).points[0].cell
        assert Path(cell.data.name).resolve() == tmp_path / "t.csv"
    monkeypatch.chdir(tmp_path)
    scenario.write_text(scenario.read_text().replace("../t.csv", "t.csv"))
    assert load_scenario(scenario).points[0].cell.data.name == "t.csv"
    write_csv(Path("study/t.csv"), rows(100))
    assert load_scenario(Path("study/scenario.toml")).points[0].cell.data.name == "study/t.csv"


def test_data_inspect_warns_of_the_refusal_that_a_run_would_give(tmp_path: Path) -> None:
    """A few records whose test part has one class, for which no area under the curve is defined."""
    records = [{"x": str(n), "outcome": "ill" if n in (1, 3, 5) else "well"} for n in range(40)]
    text = output_of("data", "inspect", write_csv(tmp_path / "t.csv", records), "--target", "outcome",
                     "--out", tmp_path / "out")  # fmt: skip
    refusal = re.search(r"warning: as it stands, a run of .*scenario.toml is refused: (.*)", text)
    assert refusal is not None
    with pytest.raises(InputError) as raised:
        output_of("run", make_public(tmp_path / "out" / "scenario.toml"), "--out", tmp_path / "run")
    assert str(raised.value) == refusal[1]


def test_a_file_of_another_encoding_is_refused_in_one_line(tmp_path: Path) -> None:
    for name, separator in (("t.csv", b","), ("t.tsv", b"\t")):
        (tmp_path / name).write_bytes(b"a" + separator + b"b\n1" + separator + b"M\xfcller\n")
        with pytest.raises(InputError, match=rf"{name}: .*UTF-8"):
            output_of("data", "inspect", tmp_path / name)


def test_a_column_of_thousands_of_words_is_counted_but_refused_as_site_column(tmp_path: Path) -> None:
    records = [{"x": str(n), "clinic": f"c{n}", "outcome": str(n % 2)} for n in range(10_001)]
    path = write_csv(tmp_path / "t.csv", records)
    assert "10001 words" in (text := output_of("data", "inspect", path))
    assert " more" not in text
    with pytest.raises(InputError, match=r"column 'clinic': holds more than 10,000 sites"):
        output_of("data", "inspect", path, "--target", "outcome", "--site", "clinic", "--out", tmp_path / "out")


def test_an_unnamed_first_column_of_row_numbers_is_skipped(tmp_path: Path) -> None:
    """27 of 48 refusals among 288 real files: R's write.csv and pandas' to_csv write it."""
    records = [{"": str(n), **record} for n, record in enumerate(rows(200))]
    text = output_of("data", "inspect", write_csv(tmp_path / "t.csv", records), "--target", "outcome",
                     "--out", tmp_path / "out")  # fmt: skip
    assert "column 1: passed over; is without a name, as R and pandas write the numbers of rows" in text
    output_of("run", make_public(tmp_path / "out" / "scenario.toml"), "--out", tmp_path / "run")


def test_data_inspect_prints_its_description_as_json(tmp_path: Path) -> None:
    """All that the lines say, as facts; and the lines."""
    write_csv(tmp_path / "lab.csv", [*laboratory(200), *laboratory(200)[:1]])
    first = json.loads(command.fedpriv("data", "inspect", "lab.csv", "--json", cwd=tmp_path).stdout)
    assert (first["source"], first["records"]) == ("lab.csv", 201)
    assert first.keys() == {"source", "records", "columns", "passed_over", "repeated_records", "lines"}
    columns = {column["name"]: column for column in first["columns"]}
    assert list(columns) == ["crp", "site", "age", "outcome"]
    assert columns["crp"]["span"] == [0.8, 19.5]
    assert columns["crp"]["description"].endswith("limits such as <0.8 are read as the limit")
    assert sorted(columns["outcome"]["words"]) == ["ill", "well"]
    words = ["--target", "outcome", "--site", "site", "--out", "lab"]
    answer = command.fedpriv("data", "inspect", "lab.csv", *words, "--json", cwd=tmp_path)
    assert answer.stdout.count("\n") == 1
    whole = json.loads(answer.stdout)
    assert whole["columns"] == first["columns"]
    assert whole["table"]["sites"] == ["e", "n", "s", "w"]
    assert sum(whole["training_units"]) < 201
    assert whole["files"] == [f"lab/{name}" for name in ("scenario.toml", *(f"silo-{n}.toml" for n in range(4)))]
    (tmp_path / "text").mkdir()
    shutil.copy(tmp_path / "lab.csv", tmp_path / "text")
    assert (
        command.fedpriv("data", "inspect", "lab.csv", *words, cwd=tmp_path / "text").stdout.splitlines()
        == whole["lines"]
    )
    refusal = command.fedpriv("data", "inspect", "lab.csv", "--target", "nothing", "--json", cwd=tmp_path)
    assert (refusal.returncode, refusal.stdout) == (2, "")
