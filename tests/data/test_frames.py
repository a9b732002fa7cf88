"""DataFrames in place of a table's file: the same run, content for a name, refusals in one line."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

import fedpriv
from fedpriv.addons.readers.frames import register_frame
from fedpriv.core.errors import InputError
from fedpriv.data.cells import read_table, table_from_columns
from fedpriv.data.encode import encode_features
from fedpriv.data.named import RECORDS_FOLDER_VARIABLE, table_path
from fedpriv.data.schema import FeatureColumn, TableSchema
from fedpriv.data.tables import find_frame, is_data_frame
from tests.data.tables import rows, table_tree, write_csv


def columns() -> dict[str, list[Any]]:
    """Columns of the table with numbers as such."""
    records = rows()
    return {name: [int(row[name]) if name == "age" else row[name] for row in records] for name in records[0]}


every_library = pytest.mark.parametrize("library", ["pyarrow", "pandas", "polars", "categories"])


def frame_by(library: str) -> Any:
    held = pyarrow.table(columns())
    if library == "pyarrow":
        return held
    if library == "categories":
        return held.set_column(held.column_names.index("pain"), "pain", held["pain"].dictionary_encode())
    pytest.importorskip(library, reason="needs pip install 'fedpriv[checks]'")
    return importlib.import_module(library).DataFrame(columns())


@every_library
def test_a_run_on_a_data_frame_equals_the_run_on_its_csv_file(tmp_path: Path, library: str) -> None:
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()))
    of_file = fedpriv.run(tree, out=tmp_path / "file")
    given = fedpriv.run(tree, train=frame_by(library), out=tmp_path / "frame")
    assert given.cells[0].model().tobytes() == of_file.cells[0].model().tobytes()
    assert given.cells[0].metrics == of_file.cells[0].metrics


@every_library
def test_a_data_frame_has_the_cells_of_its_csv_file_and_a_name_from_its_content(
    tmp_path: Path, library: str
) -> None:
    name, table = register_frame(frame_by(library)), read_table(write_csv(tmp_path / "t.csv", rows()))
    found = find_frame(Path(name))
    assert found is not None
    for column, cells in table.columns.items():
        assert found.column(column).to_numpy().tolist() == cells.to_numpy().tolist()
    assert name == register_frame(frame_by(library))
    other = pyarrow.table({**columns(), "age": [*columns()["age"][:-1], 91]})
    assert register_frame(other) != name
    assert find_frame(Path("given.parquet")) is None


def test_a_data_frame_is_found_in_whatever_folder_files_of_records_are(monkeypatch: pytest.MonkeyPatch) -> None:
    name = register_frame(pyarrow.table(columns()))
    monkeypatch.setenv(RECORDS_FOLDER_VARIABLE, "/srv/records")
    assert find_frame(table_path(name)) is find_frame(Path(name)) is not None


def test_a_registered_data_frame_is_copied() -> None:
    """Arrow shares the memory of NumPy's arrays, and so do DataFrames of pandas with their Arrow tables."""
    ages = np.array([30.0, 40.0])
    name = register_frame(pyarrow.table({"age": pyarrow.array(ages)}))
    ages[0] = 99.0
    table = find_frame(Path(name))
    assert table is not None
    assert table.columns["age"].to_numbers().tolist() == [30.0, 40.0]


def test_a_column_that_arrow_cannot_export_may_have_spaces_around_its_name() -> None:
    table = table_from_columns({"b": pyarrow.chunked_array([[1]])}, [" a ", "b"], "train", {" a ": "not of words"})
    assert table.unreadable == {"a": "not of words"}
    assert table.column("b").to_numbers().tolist() == [1.0]


def test_unusable_data_frames_are_refused_with_a_reason(tmp_path: Path) -> None:
    tree, held = table_tree(write_csv(tmp_path / "t.csv", rows())), pyarrow.table(columns())
    assert not is_data_frame([1, 2])
    assert not is_data_frame(held["age"])
    for given, asked, line in (
        ({"train": held}, "own-data", "needs \\[data.table\\] in the scenario"),
        ({"train": held, "test": held}, tree, "data.table names the test records and"),
        ({"train": held.drop_columns(["age"])}, tree, "train: has no column 'age'"),
        ({"train": held.slice(0, 0)}, tree, "train: has no records"),
        ({"train": pyarrow.table({"a": [[1], [2]]})}, tree, "train: has no records; column 'a': of type list"),
        (
            {"train": held.set_column(2, "age", pyarrow.array([[1]] * 60))},
            tree,
            "train, column 'age': of type list",
        ),
        (
            {"train": pyarrow.table({"a": pyarrow.array([b"x"], "large_binary")})},
            tree,
            "'a': of type large_binary",
        ),
        ({"train": held, "engine": "ray"}, tree, "its processes have no arrays and modules of this program"),
    ):
        with pytest.raises(InputError, match=line):
            fedpriv.run(asked, out=tmp_path / "out", **given)


def test_a_missing_number_of_one_record_changes_no_word_of_another() -> None:
    """Programs make floats of integers if one is missing.  Was: "1.0" for "1", so that all words became others."""
    columns = {"grade": FeatureColumn(values=("1", "2", "*"))}
    schema = TableSchema(public=True, target="y", classes=("n", "y"), columns=columns, missing="drop")
    whole, with_missing = (
        table_from_columns(
            {"grade": pyarrow.chunked_array([grades]), "y": pyarrow.chunked_array([["n", "y", "n"]])},
            ["grade", "y"],
            "train",
        )
        for grades in (pyarrow.array([1, 2, 2]), pyarrow.array([1.0, 2.0, None]))
    )
    rows = np.arange(2)
    assert encode_features(with_missing, schema, rows).tolist() == encode_features(whole, schema, rows).tolist()
