"""Tables in the forms that spreadsheets, laboratories and other programs give them."""

import csv
import gzip
import importlib
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import tomli_w
from pyarrow import parquet

import fedpriv
from fedpriv.addons.readers.files import make_converter
from fedpriv.addons.readers.formats import find_format
from fedpriv.addons.readers.frames import register_frame
from fedpriv.addons.services.service import flower_environment
from fedpriv.core.errors import InputError
from fedpriv.data.cells import CellFormat, RawTable, parse_number, read_table
from fedpriv.data.named import RECORDS_FOLDER_VARIABLE, load, load_held_out
from fedpriv.data.schema import TableSchema
from fedpriv.data.tables import find_frame
from fedpriv.scenario.load import load_scenario, parse_scenario
from tests.data.tables import rows, table_tree, write_csv

PLAIN = "id,dose,name\n1,0.5,a\n2,1234.5,b\n\n3,,c\n"
GERMAN = "id;dose;name\n1;0,5;a\n2;1.234,5;b\n\n3;;c\n"


def cells(table: RawTable) -> dict[str, list[str]]:
    return {name: column.to_numpy().tolist() for name, column in table.columns.items()}


def write_sheet(path: Path, content: list[list[Any]], *more: list[list[Any]]) -> Path:
    openpyxl = pytest.importorskip("openpyxl", reason="needs pip install 'fedpriv[checks]'")
    book = openpyxl.Workbook()
    for number, sheet_rows in enumerate((content, *more)):
        sheet = book.active if not number else book.create_sheet(f"more {number}")
        for row in sheet_rows:
            sheet.append(row)
    book.save(path)
    return path


FORMS: dict[str, tuple[str, bytes, CellFormat]] = {
    "capital letters": ("T.CSV", PLAIN.encode(), CellFormat()),
    "compressed": ("t.csv.gz", gzip.compress(PLAIN.encode()), CellFormat()),
    "tabs": ("t.tsv", PLAIN.replace(",", "\t").encode(), CellFormat()),
    "tabs, compressed": ("t.tsv.gz", gzip.compress(PLAIN.replace(",", "\t").encode()), CellFormat()),
    "UTF-16": ("t.csv", PLAIN.encode("utf-16"), CellFormat()),
    "UTF-16, big end first": ("t.csv", b"\xfe\xff" + PLAIN.encode("utf-16-be"), CellFormat()),
    "UTF-16 without a mark": ("t.csv", PLAIN.encode("utf-16-le"), CellFormat()),
    "Excel's Unicode text": ("t.tsv", PLAIN.replace(",", "\t").encode("utf-16"), CellFormat()),
    "a mark of UTF-8": ("t.csv", b"\xef\xbb\xbf" + PLAIN.encode(), CellFormat()),
    "semicolons and decimal commas": ("t.csv", GERMAN.encode(), CellFormat(";", ",", ".")),
    "bars": ("t.csv", PLAIN.replace(",", "|").encode(), CellFormat("|")),
    "thousands": ("t.csv", PLAIN.replace("1234.5", '"1,234.5"').encode(), CellFormat(thousands=",")),
    "thousands with a thin space": (
        "t.csv",
        GERMAN.replace("1.234", "1\u202f234").encode(),
        CellFormat(";", ",", " "),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_text_format_gives_the_table_cells_of_a_plain_csv_file(form: str, tmp_path: Path) -> None:
    """Lines, too, so that a message names the right one."""
    name, content, cell_format = FORMS[form]
    (tmp_path / "plain.csv").write_text(PLAIN)
    (tmp_path / name).write_bytes(content)
    plain, table = read_table(tmp_path / "plain.csv"), read_table(tmp_path / name, cell_format)
    assert cells(table) == cells(plain)
    np.testing.assert_array_equal(table.columns["dose"].to_numbers(), [0.5, 1234.5, np.nan])
    assert table.locate_rows([0, 2]) == plain.locate_rows([0, 2]) == [2, 5]


def test_a_spreadsheet_with_one_filled_sheet_is_loaded_as_table_cells(tmp_path: Path) -> None:
    import datetime

    day = datetime.datetime(2024, 2, 29)
    content: list[list[Any]] = [
        ["id", "dose", "name", "day", "ill"],
        [1, 0.5, "a", day, True],
        [2.0, 1234.5, "b", None, False],
        [],
        [3, None, "c", day, None],
    ]
    table = read_table(write_sheet(tmp_path / "t.xlsx", content))
    assert cells(table) == {
        "id": ["1", "2", "3"],
        "dose": ["0.5", "1234.5", ""],
        "name": ["a", "b", "c"],
        "day": ["2024-02-29", "", "2024-02-29"],
        "ill": ["true", "false", ""],
    }
    assert table.locate_rows([2]) == [5]
    with pytest.raises(InputError, match="the sheets 'Sheet', 'more 1' have cells; give a file with one of them"):
        read_table(write_sheet(tmp_path / "two.xlsx", content, content))


def test_damaged_table_files_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content, line in (
        ("t.csv.gz", b"id,dose", "cannot be decompressed"),
        ("t.csv.gz", gzip.compress(b"id,dose\n1,2\n")[:-6], "cannot be decompressed"),
        ("t.csv", b"\xff\xfe\x00", "begins as UTF-16 and is not"),
        ("t.tsv", b'a\tb\n"1\t2\n', "line 2: unexpected end of data"),
        ("t.tsv", b"a\tb\n1\t2\n3\n", "line 3: has 1 values, and the header names 2"),
        ("t.tsv", b"gr\xf6\xdfe\tb\n1\t2\n", "is not in UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=line) as caught:
            read_table(tmp_path / name)
        assert "\n" not in str(caught.value)
    (tmp_path / "t.xlsx").write_bytes(b"no spreadsheet")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(InputError, match=r"pip install 'fedpriv\[sheets\]', or save it as CSV"):
        read_table(tmp_path / "t.xlsx")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("<0.8", 0.8), ("> 200", 200.0), ("≤5", 5.0), ("≥ 1e3", 1000.0), ("<=0.5", 0.5), ("5.0%", 5.0),
        ("5 %", 5.0),
        ("<5%", 5.0), ("-0.5", -0.5), ("<", None), ("%", None), ("<<1", None), ("1<2", None), ("5%%", None),
        ("inf", None), ("<inf", None), ("1,5", None), ("1_000", None), ("", None),
    ],
)  # fmt: skip
def test_detection_limits_and_percentages_are_parsed_as_numbers(text: str, number: float | None) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("cell_format", "text", "written"),
    [
        (CellFormat(";", ","), "0,5", "0.5"),
        (CellFormat(";", ","), "<0,8", "<0.8"),
        (CellFormat(";", ","), ",5", ".5"),
        (CellFormat(";", ","), "-1,5e-3", "-1.5e-3"),
        (CellFormat(";", ","), "7,5 %", "7.5 %"),
        (CellFormat(";", ","), "1.234", "1.234 (with a point)"),  # 1.234 or 1234: nobody knows
        (CellFormat(";", ","), "1.2.2024", "1.2.2024"),
        (CellFormat(";", ","), "word, word", "word, word"),
        (CellFormat(";", ",", "."), "1.234", "1234"),
        (CellFormat(";", ",", "."), "12.34", "12.34 (with a point)"),
        (CellFormat(";", ",", "."), "1.234.567,8", "1234567.8"),
        (CellFormat(thousands=","), "1,234", "1234"),
        (CellFormat(thousands=","), "1,23", "1,23"),
        (CellFormat(thousands=","), "0,123", "0,123"),  # no group of thousands begins with 0
        (CellFormat(";", ",", "."), "0.123", "0.123 (with a point)"),
        (CellFormat(thousands=","), "<5.", "<5"),
        (CellFormat(thousands=","), "12345.5", "12345.5"),
        (CellFormat(thousands="'"), "1'234.5", "1234.5"),
        (CellFormat(thousands=" "), "1\u00a0234", "1234"),
        (CellFormat(thousands=" "), "1 23", "1 23"),
    ],
)
def test_localized_numbers_are_converted_to_decimal_points(
    cell_format: CellFormat, text: str, written: str
) -> None:
    assert make_converter(cell_format)(text) == written


def test_a_carriage_return_in_a_cell_of_a_file_with_semicolons_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b'name;x\n"a\rb";1,5\nc;2,5\n')
    table = read_table(tmp_path / "t.csv", CellFormat(";", ","))
    assert cells(table)["x"] == ["1.5", "2.5"]


def test_unnamed_columns_and_columns_with_duplicate_names_are_skipped(tmp_path: Path) -> None:
    """R's write.csv and pandas' to_csv write the numbers of rows under an empty name."""
    (tmp_path / "t.csv").write_text('"",age,note,note,\n1,30,x,y,\n2,40,z,w,\n')
    table = read_table(tmp_path / "t.csv")
    assert cells(table) == {"age": ["30", "40"]}
    assert sorted(table.unreadable) == ["column 1", "column 5", "note"]
    with pytest.raises(InputError, match="column 'note': the name is given to several columns; give each its own"):
        table.column("note")
    with pytest.raises(InputError, match="has no column '', only 'age'"):
        table.column("")


@pytest.mark.parametrize("form", ["parquet", "pandas", "polars"])
def test_unused_columns_of_any_type_do_not_change_the_model(form: str, tmp_path: Path) -> None:
    """The same run as without them; a column that is asked for is refused with its type."""
    records = rows()
    plain = fedpriv.run(table_tree(write_csv(tmp_path / "t.csv", records)), out=tmp_path / "plain")
    columns: dict[str, list[Any]] = {name: [row[name] for row in records] for name in records[0]}
    columns["age"] = [int(text) for text in columns["age"]]
    vectors, blobs = [[1.0, float(n)] for n in range(len(records))], [b"x"] * len(records)
    if form == "parquet":
        pyarrow = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.parquet").write_table(
            pyarrow.table({**columns, "vector": vectors, "blob": blobs, "struct": [{"a": 1}] * len(records)}),
            tmp_path / "t.parquet",
        )
        run = fedpriv.run(table_tree(tmp_path / "t.parquet"), out=tmp_path / "run")
    else:
        library = pytest.importorskip(form, reason="needs pip install 'fedpriv[checks]'")
        mixed: dict[str, Any] = {"mixed": [1, "a", 2.5] * 20} if form == "pandas" else {}
        frame = library.DataFrame({**columns, "vector": vectors, "blob": blobs, **mixed})
        if form == "pandas":
            frame["complex"] = np.arange(60) * 1j
        else:
            frame = frame.with_columns(object=library.Series([object()] * 60, dtype=library.Object))
        run = fedpriv.run(table_tree(tmp_path / "t.csv"), train=frame, out=tmp_path / "run")
    assert run.cells[0].model().tobytes() == plain.cells[0].model().tobytes()


def every_type(library: Any, form: str) -> Any:
    """A DataFrame with a column of words and a column of numbers in every type that its library has."""
    words, numbers = ["a", "b", "a", None], [1, 2, 3, 4]
    if form == "pandas":
        return library.DataFrame(
            {
                "category": library.Series(words, dtype="category"),
                "string": library.Series(words, dtype="string"),
                "object": library.Series(words, dtype="object"),
                **{
                    kind: library.Series(numbers, dtype=kind)
                    for kind in ("int8", "uint64", "Int64", "float32", "Float64", "float16")
                },
                "bool": library.Series([True, False] * 2),
                "boolean": library.Series([True, None] * 2, dtype="boolean"),
                "sparse": library.arrays.SparseArray(numbers),
                "datetime": library.date_range("2024-01-01", periods=4),
                "timedelta": library.to_timedelta(numbers, unit="D"),
                "period": library.period_range("2024-01", periods=4, freq="M"),
            }
        )
    return library.DataFrame(
        {
            "category": library.Series(words, dtype=library.Categorical),
            "enum": library.Series(words, dtype=library.Enum(["a", "b"])),
            "string": library.Series(words, dtype=library.String),
            **{
                kind: library.Series(numbers).cast(getattr(library, kind))
                for kind in ("Int8", "UInt64", "Int128", "Float32", "Float64", "Boolean", "Date", "Datetime",
                             "Duration", "Time")
            },
            "Decimal": library.Series(numbers).cast(library.Decimal(10, 2)),
            "null": library.Series([None] * 4, dtype=library.Null),
        }
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of pandas, on types that it will drop
@pytest.mark.parametrize("form", ["pandas", "polars"])
def test_data_frames_with_columns_of_every_type_are_loaded(form: str) -> None:
    library = pytest.importorskip(form, reason="needs pip install 'fedpriv[checks]'")
    table = find_frame(Path(register_frame(every_type(library, form))))
    assert table is not None
    for name in {"category", "enum", "string", "object"} & table.columns.keys():
        assert table.columns[name].to_numpy().tolist() == ["a", "b", "a", ""]
    numbers = {"int8", "uint64", "Int64", "float32", "Float64", "Int8", "UInt64", "Int128", "Float32", "Decimal",
               "sparse", "float16"}  # fmt: skip
    for name in numbers & table.columns.keys():
        assert table.columns[name].to_numbers().tolist() == [1.0, 2.0, 3.0, 4.0], name
    assert {"category", "string", "Float64"} <= table.columns.keys()
    for name, column in table.columns.items():
        assert len(column.to_numpy()) == 4, name


def test_infinite_numbers_count_as_missing_values() -> None:
    pyarrow = importlib.import_module("pyarrow")
    values = [1.0, float("inf"), float("-inf"), float("nan"), None]
    table = find_frame(Path(register_frame(pyarrow.table({"x": values, "text": ["1", "Inf", "-inf", "nan", ""]}))))
    assert table is not None
    for name in ("x", "text"):
        assert table.columns[name].is_missing.tolist() == [False, True, True, True, True]
        np.testing.assert_array_equal(table.columns[name].to_numbers(), [1.0, *[np.nan] * 4])


def german(records: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**record, "age": f"{record['age']},0"} for record in records]


def test_a_german_csv_file_trains_the_same_model_as_a_plain_csv_file(tmp_path: Path) -> None:
    """Semicolons and decimal commas, in simulation and on the way to a guard."""
    records = rows()
    plain = fedpriv.run(table_tree(write_csv(tmp_path / "t.csv", records)), out=tmp_path / "plain")
    with (tmp_path / "g.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), delimiter=";")
        writer.writeheader()
        writer.writerows(german(records))
    tree = table_tree(tmp_path / "g.csv", separator=";", decimal=",")
    run = fedpriv.run(tree, out=tmp_path / "run")
    assert run.cells[0].model().tobytes() == plain.cells[0].model().tobytes()
    for key, line in (("decimal", "is no finite number"), ("separator", "seems to be separated by semicolons")):
        del tree["data"]["table"][key]
        with pytest.raises(InputError, match=line):
            fedpriv.run(tree, out=tmp_path / key)


def test_a_schema_can_drop_its_file_format_and_refuses_equal_decimal_and_thousands_marks(tmp_path: Path) -> None:
    tree = table_tree(tmp_path / "t.csv", separator=";", decimal=",")["data"]["table"]
    plain_tree = {**tree, "separator": None, "decimal": None}
    schema, plain = (TableSchema.model_validate(table) for table in (tree, plain_tree))
    assert schema != plain
    assert schema.without_format == plain == plain.without_format
    with pytest.raises(ValueError, match="thousands = ',': is the mark of decimals, too"):
        TableSchema.model_validate({**tree, "thousands": ","})
    with pytest.raises(ValueError, match=r"thousands = '\.': is the mark of decimals, too"):
        TableSchema.model_validate({**tree, "decimal": None, "thousands": "."})


def test_a_server_started_in_another_folder_finds_its_held_out_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower starts a server's process in an empty folder, where a coordinator's relative path leads nowhere."""
    monkeypatch.delenv(RECORDS_FOLDER_VARIABLE, raising=False)
    schema = TableSchema.model_validate(table_tree(Path("t.csv"))["data"]["table"])
    write_csv(tmp_path / "t.csv", rows())
    features = np.zeros((4, 2), np.float32)
    np.savez(
        tmp_path / "r.npz", train_features=features, test_features=features, train_labels=np.zeros(4, int),
        test_labels=np.ones(4, int), classes=np.array(2),
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    environment = flower_environment(tmp_path / "home")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for name, table in (("t.csv", schema), ("r.npz", None)):
        with pytest.raises(InputError, match="no such file"):
            load_held_out(name, table=table)
    monkeypatch.setenv(RECORDS_FOLDER_VARIABLE, environment[RECORDS_FOLDER_VARIABLE])
    assert len(load_held_out("t.csv", table=schema).labels) == 20
    assert len(load_held_out("r.npz").labels) == 4


@pytest.mark.parametrize("count", [9_000, 11_000])
def test_decimal_commas_are_detected_in_columns_of_many_distinct_numbers(tmp_path: Path, count: int) -> None:
    """Before: with more than 10,000 of them no column was looked at, and the numbers stayed texts."""
    path = tmp_path / "many.csv"
    path.write_text("pressure;ward\n" + "".join(f"{number},5;a\n" for number in range(count)))
    assert find_format(path, CellFormat()) == CellFormat(";", ",")


@pytest.mark.parametrize("text", ["\na;b;c\n1;2;3\n", "a;b;c\r1;2;3\r", '"a\nx";b;c\n1;2;3\n'])
def test_the_separator_is_that_of_the_first_line_with_names(tmp_path: Path, text: str) -> None:
    """An empty line before it, ends of lines by a carriage return alone, a name of two lines."""
    (tmp_path / "t.csv").write_bytes(text.encode())
    assert find_format(tmp_path / "t.csv", CellFormat()) == CellFormat(";")


@pytest.mark.parametrize("name", ["t.tsv.csv", "export.tsv-2024.csv"])
def test_only_a_name_that_ends_with_tsv_stands_for_tabs(name: str, tmp_path: Path) -> None:
    """Before: tabs were taken for the usual separator, with which a .csv file is not read."""
    (tmp_path / name).write_text("a\tb\n1\t2\n")
    assert find_format(tmp_path / name, CellFormat()) == CellFormat("\t")


def test_points_that_can_only_separate_thousands_are_detected_as_thousands_marks(tmp_path: Path) -> None:
    path = tmp_path / "large.csv"
    path.write_text("sum;ward\n1.234.567;a\n2.345.678;b\n3.456.789;c\n")
    assert find_format(path, CellFormat()) == CellFormat(";", ",", ".")


@pytest.mark.parametrize(
    "values",
    [
        pyarrow.array([0, 10**9], pyarrow.date32()),
        pyarrow.array([0, -(10**9)], pyarrow.date32()),
        pyarrow.array([0, 10**15], pyarrow.timestamp("s")),
    ],
)
def test_a_column_with_dates_beyond_those_of_python_is_passed_over_with_the_reason(
    tmp_path: Path, values: Any
) -> None:
    """Was: an OverflowError of Python."""
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"day": values, "age": [1.0, 2.0]}), path)
    table = read_table(path)
    assert list(table.columns) == ["age"]
    with pytest.raises(InputError, match=r"column 'day': of type .*, with dates beyond the years 1 to 9999"):
        table.column("day")


def test_dates_of_python_in_a_parquet_file_are_words(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    days = pyarrow.array([date(1, 1, 1), date(9999, 12, 31)])
    parquet.write_table(pyarrow.table({"day": days}), path)
    assert read_table(path).column("day").to_numpy().tolist() == ["0001-01-01", "9999-12-31"]


def test_a_name_with_a_null_byte_is_refused_in_a_line() -> None:
    """Was: a ValueError of the operating system's interface."""
    with pytest.raises(InputError, match=r"data\.name = 't\\x00\.csv': expected a text of the form"):
        parse_scenario(table_tree(Path("t\0.csv")), "test")


def test_a_table_beside_its_scenario_goes_before_one_in_the_folder_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: FEDPRIV_RECORDS_FOLDER/study/t.csv was read, which is another file or none."""
    for name in ("study", "srv", "srv/study"):
        (tmp_path / name).mkdir()
    write_csv(tmp_path / "study" / "t.csv", rows())
    write_csv(tmp_path / "srv" / "study" / "t.csv", rows(30))
    write_csv(tmp_path / "srv" / "u.csv", rows(30))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RECORDS_FOLDER_VARIABLE, str(tmp_path / "srv"))
    for name, count in (("t.csv", 60), ("u.csv", 30)):
        (tmp_path / "study" / "s.toml").write_text(tomli_w.dumps(table_tree(Path(name))))
        cell = load_scenario(Path("study/s.toml")).points[0].cell
        assert len(load(cell.data.name, table=cell.data.table).train_labels) == count
