"""Eighteen inputs of a first day, each through the command or the call that a user makes.

Seven are columns of a table that is described and run, and eleven are records and modules of a program.  Each is
run, or refused in one line with the remedy.  What else the readers do has tests of its own in
`tests/data/test_any_tables.py`, `tests/data/test_any_records.py` and `tests/show/test_learning.py`.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedpriv
from fedpriv.core.errors import InputError
from tests.cli.command import output_of
from tests.cli.test_inspect import make_public
from tests.data.tables import rows, write_csv
from tests.data.test_any_records import FEATURES, LABELS, Items, Stream, network, scripted

pytest.importorskip("fedpriv.addons.readers.items")  # items are read by an add-on

Cell = Callable[[int, dict[str, str]], dict[str, str]]
COLUMNS: dict[str, tuple[Cell, list[str], str]] = {
    "detection limits": (
        lambda number, row: {"age": "<25" if int(row["age"]) < 25 else row["age"]},
        [],
        "limits such as <25 are read as the limit",
    ),
    "percent": (lambda number, row: {"age": f"{row['age']}.0%"}, [], "% is read as "),
    "Inf": (lambda number, row: {"age": "Inf" if number % 40 == 0 else row["age"]}, [], ", 3 missing"),
    "thousands": (
        lambda number, row: {"age": f"{int(row['age'])},000"},
        ["--thousands", ","],
        "numbers from 20000 to 89000",
    ),
    "a first column without a name": (lambda number, row: {"": str(number)}, [], "column 1: passed over"),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_an_everyday_table_column_is_described_and_its_table_trains(column: str, tmp_path: Path) -> None:
    change, words, line = COLUMNS[column]
    records = [{**change(number, row), **(row | change(number, row))} for number, row in enumerate(rows(120))]
    write_csv(tmp_path / "t.csv", records)
    arguments = ["--target", "outcome", "--site", "hospital", "--out", tmp_path / "out", *words, "--json"]
    facts = json.loads(output_of("data", "inspect", tmp_path / "t.csv", *arguments))
    assert any(line in text for text in facts["lines"]), facts["lines"]
    assert "range" in facts["table"]["columns"]["age"]
    results = fedpriv.run(make_public(tmp_path / "out" / "scenario.toml"), out=tmp_path / "run")
    assert all(np.isfinite(cell.test_loss) for cell in results)


@pytest.mark.parametrize("column", ["a list", "a category of polars"])
def test_polars_columns_of_other_types_are_skipped_or_converted(column: str, tmp_path: Path) -> None:
    library = pytest.importorskip("polars", reason="needs pip install 'fedpriv[checks]'")
    records = rows(120)
    frame = library.DataFrame({name: [row[name] for row in records] for name in records[0]})
    frame = frame.with_columns(
        library.col("age").cast(library.Int64),
        library.Series("extra", [[1.0, 2.0]] * 120)
        if column == "a list"
        else library.col("sex").cast(library.Categorical),
    )
    frame.write_parquet(tmp_path / "t.parquet")
    arguments = ["--target", "outcome", "--site", "hospital", "--out", tmp_path / "out"]
    text = output_of("data", "inspect", tmp_path / "t.parquet", *arguments)
    assert ("extra: passed over; " if column == "a list" else "sex: 2 words: ") in text
    (cell,) = fedpriv.run(make_public(tmp_path / "out" / "scenario.toml"), train=frame, out=tmp_path / "run")
    assert np.isfinite(cell.test_loss)


PLAIN = (FEATURES, LABELS)
GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "bfloat16": ({"train": (FEATURES.bfloat16(), LABELS)}, ""),
    "triples": (
        {"train": Items(lambda x, y, row: (x, y, row)), "test": Items(lambda x, y, row: (x, y, row))},
        r"found 3 parts; fields = \(0, 1\) would name",
    ),
    "dictionaries": ({"train": Items(lambda x, y, row: {"label": y, "x": x})}, ""),
    "unequal lengths": ({"train": Items(lambda x, y, row: (x[: 2 + row % 2], y))}, "pad or cut them to a length"),
    "a stream": ({"train": Stream()}, ""),
    "no record": ({"train": Items(lambda x, y, row: (x, y), 0)}, "train: has no records"),
    "a data set a silo": ({"train": [(FEATURES[:60], LABELS[:60]), (FEATURES[60:], LABELS[60:])]}, ""),
    "a wrapped module": ({"model": nn.DataParallel(network())}, ""),
    "a class": ({"model": nn.Linear}, "Linear is the class of one; give an instance"),
    "a scripted module": ({"model": scripted}, "is scripted, .*give the module before it"),
    "a last Softmax": ({"model": nn.Sequential(network(), nn.Softmax(dim=-1))}, ""),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, of what is deprecated
@pytest.mark.parametrize("form", GIVEN)
def test_everyday_python_inputs_train_or_are_refused_in_one_line(form: str, tmp_path: Path) -> None:
    changes, line = GIVEN[form]
    settings = {"federation.rounds": 2, **({} if form == "a data set a silo" else {"federation.silos": 2})}
    arguments: dict[str, Any] = {"train": PLAIN, "test": PLAIN, "model": network(), "set": settings, **changes}
    if form == "a scripted module":
        arguments["model"] = scripted()
    if line:
        with pytest.raises(InputError, match=line) as caught:
            fedpriv.run("own-data", out=tmp_path / "run", **arguments)
        assert "\n" not in str(caught.value)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = fedpriv.run("own-data", out=tmp_path / "run", **arguments)
    assert np.isfinite(results[0].test_loss)
    assert any("leave that layer out" in finding for finding in results.findings) == (form == "a last Softmax")
