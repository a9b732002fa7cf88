"""Tables: features of one record alone, by what is public; bad tables end in one line."""

import csv
import datetime
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fedpriv.addons.begin.inspect import summarize_columns
from fedpriv.core.errors import InputError
from fedpriv.data import cells as cells_of_files
from fedpriv.data.cells import MISSING_TEXTS, RawTable, parse_number, read_table
from fedpriv.data.encode import encode_features, encode_table, read_rows
from fedpriv.data.named import load, load_held_out
from fedpriv.data.partition import counted_mask
from fedpriv.data.schema import TableSchema
from fedpriv.data.tables import load_silo_table, load_table
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.load import resolve_cell
from tests.data.tables import SCHEMA, rows, table_tree, write_csv


def schema(**changes: Any) -> TableSchema:
    return TableSchema.model_validate({**SCHEMA, **changes})


def without_hospital(records: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    return [{key: value for key, value in record.items() if key != "hospital"} for record in records]


def test_numeric_columns_are_scaled_by_public_ranges_and_categories_are_one_hot(tmp_path: Path) -> None:
    records = rows(3)
    records[0] |= {"age": "25", "sex": "m", "pain": "some", "outcome": "ill"}
    records[1] |= {"age": "250", "sex": "f", "pain": "terrible", "outcome": "well"}
    encoded = encode_table(read_table(write_csv(tmp_path / "t.csv", records)), schema())
    assert encoded.features[:2].tolist() == [[-0.5, 0, 1, 0, 0, 1], [1.0, 0, 0, 1, 1, 0]]  # age, pain, sex
    assert encoded.labels[:2].tolist() == [1, 0]
    assert encoded.split.test.is_counted.tolist() == [True, False, False]


def test_a_numeric_target_is_scaled_and_clipped_to_its_range(tmp_path: Path) -> None:
    records = rows(4)
    for record, cost in zip(records, ("0", "50", "100", "1e9"), strict=True):
        record["cost"] = cost
    given = schema(target="cost", classes=None, range=[0, 100])
    assert encode_table(read_table(write_csv(tmp_path / "t.csv", records)), given).labels.tolist() == [-1, 0, 1, 1]
    assert given.label_scale == 50.0


cells = st.fixed_dictionaries(
    {
        "age": st.one_of(st.floats(-1e300, 1e300).map(repr), st.integers().map(str)),
        "sex": st.sampled_from(["f", "m"]),
        "pain": st.text(st.characters(codec="utf-8"), max_size=5).map(lambda word: word.strip() or "none"),
        "outcome": st.sampled_from(["well", "ill"]),
    }
)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(cells, min_size=2, max_size=5), cells, st.integers(0, 4))
def test_features_and_split_of_a_record_do_not_depend_on_other_records(
    records: list[dict[str, str]], other: dict[str, str], place: int
) -> None:
    """The encoding's guarantee: replacing one record leaves every other record's features as they were."""
    place %= len(records)
    for each in (other, *records):
        if each["pain"].lower() in MISSING_TEXTS:
            each["pain"] = "none"
    changed = [*records]
    changed[place] = other
    given_schema = schema(split=None, site=None, sites=[])
    before, after = (
        encode_table(RawTable.from_texts("t", {name: [r[name] for r in each] for name in other}), given_schema)
        for each in (records, changed)
    )
    decay = np.arange(len(records)) != place
    np.testing.assert_array_equal(before.features[decay], after.features[decay])
    np.testing.assert_array_equal(before.split.test.row_indices, after.split.test.row_indices)
    np.testing.assert_array_equal(before.split.train.row_indices, after.split.train.row_indices)
    assert np.linalg.norm(after.features, axis=1).max() <= given_schema.max_norm * (1 + 1e-12)


def test_features_do_not_depend_on_the_order_of_columns_in_a_schema(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", rows())
    turned = schema(columns=dict(reversed(SCHEMA["columns"].items())))
    assert turned != schema() or list(turned.columns) != list(schema().columns)
    ours, theirs = (encode_table(read_table(path), described).features for described in (turned, schema()))
    np.testing.assert_array_equal(ours, theirs)


def test_every_row_of_a_long_table_is_encoded_from_its_own_cells() -> None:
    """Rows are encoded some thousands at a time, and each has the features of its own cells."""
    ages, sexes = np.arange(20_000) % 101, np.arange(20_000) % 2
    texts = {"age": [str(age) for age in ages], "sex": ["fm"[sex] for sex in sexes], "outcome": ["well"] * 20_000}
    columns = {"age": {"range": [0, 100]}, "sex": {"values": ["f", "m"]}}
    given_schema = schema(split=None, site=None, sites=[], columns=columns)
    chosen = np.arange(1, 20_000)
    features = encode_features(RawTable.from_texts("t", texts), given_schema, chosen)
    expected = np.stack([ages / 50.0 - 1.0, sexes == 0, sexes == 1], axis=1)
    np.testing.assert_allclose(features, expected[chosen], atol=1e-12)


def test_missing_values_are_filled_dropped_or_refused(tmp_path: Path) -> None:
    records = rows(6)
    records[2]["age"], records[4]["sex"] = "NA", ""
    path = write_csv(tmp_path / "t.csv", records)
    line = r"t\.csv, line 4, column 'age': 'NA' is a missing value; give the column"
    with pytest.raises(InputError, match=line):
        encode_table(read_table(path), schema())
    train = encode_table(read_table(path), schema(missing="drop")).split.train
    assert train.row_indices.tolist() == list(range(6))
    assert train.is_counted.tolist() == [False, True, False, False, False, True]  # 0 and 3 are for testing
    columns = {**SCHEMA["columns"], "age": {"range": [0, 100], "missing": 75}}
    columns["sex"] = {"values": ["f", "m"], "missing": "m"}
    filled = encode_table(read_table(path), schema(columns=columns))
    assert filled.features[2, 0] == 0.5
    assert filled.features[4, -2:].tolist() == [0, 1]


def test_a_missing_value_that_arrow_and_python_write_in_lower_case_differently_is_refused() -> None:
    """Arrow writes the dotted capital I as i, and Python as i with a dot above."""
    texts = {"age": ["1", "\u0130NF"], "outcome": ["well", "ill"]}
    given_schema = schema(split=None, site=None, sites=[], columns={"age": {"range": [0, 100]}})
    with pytest.raises(InputError, match=r"row 2, column 'age': '.NF' is a missing value"):
        read_rows(RawTable.from_texts("t", texts), given_schema)


def test_parquet_and_csv_files_give_the_same_features_and_labels(tmp_path: Path) -> None:
    records = rows()
    columns: dict[str, Any] = {name: [record[name] for record in records] for name in records[0]}
    columns["age"] = [None if age == "50" else float(age) for age in columns["age"]]
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    for record in records:
        record["age"] = "" if record["age"] == "50" else record["age"]
    csv, packed = (
        encode_table(read_table(path), schema(missing="drop"))
        for path in (write_csv(tmp_path / "t.csv", records), tmp_path / "t.parquet")
    )
    np.testing.assert_array_equal(csv.features, packed.features)
    np.testing.assert_array_equal(csv.labels, packed.labels)


def test_a_table_is_loaded_with_the_site_and_person_of_every_record(tmp_path: Path) -> None:
    name = str(write_csv(tmp_path / "t.csv", rows()))
    dataset = load(name, table=schema(person="patient"))
    assert dataset.sites is not None
    assert dataset.persons is not None
    assert dataset.row_indices is not None
    assert (len(dataset.train_labels), len(dataset.test_labels), dataset.class_count) == (60, 60, 2)
    assert (counted_mask(dataset.train_labels).sum(), counted_mask(dataset.test_labels).sum()) == (40, 20)
    by_row = dict(enumerate(rows()))
    for place in range(60):
        record = by_row[int(dataset.row_indices[0][place])]
        assert dataset.persons[place] == record["patient"]
        assert (dataset.train_labels[place] >= 0) == (record["part"] == "train")
        assert SCHEMA["sites"][dataset.sites.train[place]] == record["hospital"]
    assert len(load_held_out(name, table=schema()).labels) == 20


@pytest.mark.parametrize(("part", "share"), [("test", 1 / 3), ("test", 0.0), ("train", 1 / 3)])
def test_a_table_without_training_or_test_records_is_refused(tmp_path: Path, part: str, share: float) -> None:
    """But for a table of which no share is for testing."""
    name = str(write_csv(tmp_path / "t.csv", [{**record, "part": part} for record in rows()]))
    missing = "training" if part == "test" else "test"
    with pytest.raises(InputError, match=f"has no {missing} records; look at `split` and `test_share`"):
        load(name, table=schema(test_share=share))


def test_a_server_loads_a_table_that_has_only_test_records(tmp_path: Path) -> None:
    held = list(without_hospital(record for record in rows() if record["part"] == "test"))
    name = str(write_csv(tmp_path / "test.csv", held))
    part = load_held_out(name, table=schema())
    assert (len(part.labels), part.sites) == (20, None)
    whole = load_held_out(str(write_csv(tmp_path / "t.csv", rows())), table=schema())
    np.testing.assert_array_equal(part.images, whole.images)
    assert whole.sites is not None
    assert (len(whole.sites.train), len(whole.sites.test)) == (0, 20)
    with pytest.raises(InputError, match="has no column 'hospital'"):
        load(name, table=schema())
    write_csv(tmp_path / "test.csv", [{**record, "part": "train"} for record in held])
    with pytest.raises(InputError, match="has no test records; look at `split` and `test_share`"):
        load_held_out(name, table=schema())


def test_the_partition_by_site_gives_each_silo_its_own_records(tmp_path: Path) -> None:
    cell = resolve_cell(table_tree(write_csv(tmp_path / "t.csv", rows())), "test")
    sites = load_task(cell).train_sites
    assert sites is not None
    shares = [share.numpy() for share in partition_records(cell)]
    assert [len(share) for share in shares] == [24, 16]
    for silo, share in enumerate(shares):
        assert len(set(share.tolist())) == len(share)
        assert (sites[share] == silo).all()


def test_validation_records_are_training_records_of_every_site(tmp_path: Path) -> None:
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()))
    tree["data"]["validation"], tree["federation"]["batches"] = 16, [5, 3]
    tree["run"]["per_silo"] = True
    task = load_task(resolve_cell(tree, "test"))
    labels, counts = task.test_with_missing.labels.numpy(), [count for _, count in task.site_sizes]
    assert len(labels) == 16  # places, of which those of test rows are zeros
    assert sum(counts) == int(counted_mask(labels).sum()) == 12
    assert min(counts) >= 2


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., None]:
    """Reads the records of a scenario on changed rows."""

    def read(change: Callable[[list[dict[str, str]]], Any] = as_it_is, **schema: Any) -> None:
        records = rows()
        change(records)
        partition_records(resolve_cell(table_tree(write_csv(tmp_path / "bad.csv", records), **schema), "test"))

    return read


def as_it_is(_: list[dict[str, str]]) -> None:
    pass


def cell_set(row: int, **values: str) -> Callable[[list[dict[str, str]]], Any]:
    return lambda records: records[row].update(values)


_NO_SPLIT = r"'valid' is not among the two words of a split, \"train\" and \"test\"; name a column of these two"

BAD: dict[str, tuple[Callable[[list[dict[str, str]]], Any], dict[str, Any], str]] = {
    "missing value": (cell_set(3, age="?"), {}, r"line 5, column 'age': '\?' is a missing value; .* missing = "),
    "missing target": (cell_set(3, outcome=""), {}, r"line 5, column 'outcome': '' is a missing value"),
    "unseen category": (cell_set(1, sex="x"), {}, r"line 3, column 'sex': 'x' is not among values.*\"\*\""),
    "unseen class": (cell_set(1, outcome="dead"), {}, r"column 'outcome': 'dead' is not among classes"),
    "unseen site": (cell_set(1, hospital="nort"), {}, r"'nort' is not among sites; did you mean 'north'"),
    "text in numbers": (cell_set(0, age="forty"), {}, r"line 2, column 'age': 'forty' is no finite number"),
    "no finite number": (cell_set(0, age="inf"), {}, r"line 2, column 'age': 'inf' is a missing value"),
    "wrong dtype": (as_it_is, {"columns": {"pain": {"range": [0, 1]}}}, r"column 'pain'.* is no finite number"),
    "no such column": (
        as_it_is,
        {"columns": {"agee": {"range": [0, 1]}}},
        "has no column 'agee', only .*; did you mean 'age'",
    ),
    "a hospital with 5 records": (
        lambda records: [each.update(hospital="north") for each in records if int(each["patient"][1:]) > 15],
        {},
        r"one pass of 'south' is 2 batches of 8 records, 16 in all, but it has \d training records; give each",
    ),
    "a person at two sites": (
        cell_set(3, patient="p0"),
        {"person": "patient"},
        r"column 'patient': 'p0' has records at 'north' and 'south' .*a person belongs to one silo",
    ),
    "no test records": (
        lambda records: [each.update(part="train") for each in records],
        {},
        "has no test records; look at `split`",
    ),
    "split in other words": (cell_set(0, part="valid"), {}, _NO_SPLIT),
    "a row of nobody": (
        cell_set(3, patient=""),
        {"person": "patient"},
        "line 5, column 'patient': '' names no person; every row needs one",
    ),
    "no record without a missing value": (
        lambda records: [each.update(age="") for each in records],
        {"missing": "drop"},
        "every record has a missing value, none is left",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_an_invalid_table_is_refused_in_one_line_that_locates_the_fault(
    run_of: Callable[..., None], bad: str
) -> None:
    change, described, line = BAD[bad]
    with pytest.raises(InputError, match=line) as caught:
        run_of(change, **described)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "is empty; expected a line with the names"),
        ("a;b\n1;2\n", "seems to be separated by semicolons"),
        ("a\tb\n1\t2\n", r'seems to be separated by tabs; give separator = "\\t" in'),
        ("a,a\n1,2\n", "has no records; column 'a': the name is given to several columns"),
        (",\n1,2\n", "has no records; column 'column 1': is without a name, as R and pandas write"),
        ("a,b\n1,2\n3\n", r"line 3: has 1 values, and the header names 2"),
        ("a,b\n", "has no records"),
        ('a,b\n"1,2\n', r"line 2: unexpected end of data"),
        ('a,b\n"1"2,3\n', r"line 2: ',' expected after"),
        ('a,b\r"1"2,3\r', r"line 2: ',' expected after"),
    ],
)
def test_a_malformed_csv_file_is_refused(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InputError, match=line):
        read_table(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("t.csv", r"cat \S*/t\.csv | iconv -f LATIN1 -t UTF-8 > NEW\.csv"),
        ("t.tsv", r"cat \S*/t\.tsv | iconv -f LATIN1 -t UTF-8 > NEW\.tsv"),
        ("t.tsv.gz", r"gzip -dc \S*/t\.tsv\.gz | iconv -f LATIN1 -t UTF-8 > NEW\.tsv"),
    ],
)
def test_the_remedy_for_a_latin1_file_keeps_its_separator_and_decompresses_it(
    tmp_path: Path, name: str, remedy: str
) -> None:
    content = "gr\xf6\xdfe\tb\n1\t2\n".encode("latin-1")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(InputError, match=remedy.replace("|", r"\|") + "$"):
        read_table(tmp_path / name)


def test_table_files_that_are_not_utf8_or_parquet_are_refused(tmp_path: Path) -> None:
    wrong = {".csv": "is not in UTF-8 .*save it as 'CSV UTF-8'.*iconv -f", ".parquet": "not a readable .parquet"}
    for suffix, line in wrong.items():
        (tmp_path / f"t{suffix}").write_bytes("gr\xf6\xdfe,b\n1,2\n".encode("latin-1"))
        with pytest.raises(InputError, match=line):
            read_table(tmp_path / f"t{suffix}")
    with pytest.raises(InputError, match="no such file"):
        read_table(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"public": None}, r"data\.table\.public: this key is missing"),
        ({"range": [0, 1]}, "a target has either classes, or range"),
        ({"columns": {}}, "at least one column"),
        ({"columns": {"age": {}}}, "either range, for numbers, or values, for words"),
        ({"columns": {"age": {"range": [3, 1]}}}, "expected .low, high. with low below high"),
        # Twice the length overflows, and the highest number became an infinite feature.
        ({"columns": {"age": {"range": [-8e307, 8e307]}}}, "at most 8e307 apart"),
        ({"columns": {"age": {"range": [0, 1], "missing": 7}}}, "expected a number of the range"),
        ({"columns": {"sex": {"values": ["f", "f"]}}}, "at least two words, each once"),
        ({"columns": {"sex": {"values": ["f", "m"], "missing": "x"}}}, "expected one of the values"),
        ({"columns": {"outcome": {"values": ["well", "ill"]}}}, "column 'outcome' has two roles"),
        ({"columns": {"sex": {"values": ["f ", "m"]}}}, "a word has no spaces around it"),
        ({"classes": ["well", " ill"]}, "a word has no spaces around it"),
        ({"sites": []}, "site, a column, and sites, its words, are given together"),
        ({"sites": ["north", "south", "north"]}, "each is named once"),
        (
            {"public": False},
            r"data\.table\.public = false: ranges and vocabularies that were read from the records",
        ),
    ],
)
def test_an_incomplete_or_inconsistent_table_schema_is_refused(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    tree = table_tree(tmp_path / "t.csv", **changes)
    tree["data"]["table"] = {key: value for key, value in tree["data"]["table"].items() if value is not None}
    with pytest.raises(InputError, match=line):
        resolve_cell(tree, "test")


def test_the_public_share_of_counted_rows_is_below_one_only_if_cells_select_test_rows() -> None:
    """Published means are divided by it.  Rows that are put aside by their place all count in their part."""
    for changes, train, test in (
        ({}, 2 / 3, 1 / 3),
        ({"split": None}, 1.0, 1.0),
        ({"split": None, "person": "patient", "test_share": None}, 0.8, 0.2),
        ({"split": None, "person": "patient", "test_share": 0.0}, 1.0, 1.0),
    ):
        shares = [schema(**changes).counted_share(for_testing=testing) for testing in (False, True)]
        assert shares == pytest.approx([train, test])


def test_a_schema_that_is_not_public_is_accepted_in_a_run_without_noise(tmp_path: Path) -> None:
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()), public=False)
    tree["privacy"] = {"relation": "zero-out", "mode": "none"}
    assert len(partition_records(resolve_cell(tree, "test"))) == 2


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"federation": {"silos": 3, "rounds": 8, "batches": [1, 2, 3]}}, r"has 2 sites; federation\.silos ="),
        (
            {"federation": {"silos": 2, "rounds": 8, "batches": [1]}},
            "batches has 1 numbers, and there are 2 silos",
        ),
        ({"federation": {"silos": 2, "samples": 8, "batches": [1, 1]}}, "give rounds, no samples, no batch"),
        ({"data": {"name": "synthetic", "partition": "site"}}, 'partition = "site": needs a table'),
        (
            {"data": {"name": "t.csv"}},
            r"data\.table: this section is missing, .* `fedpriv data inspect t\.csv` writes",
        ),
        (
            {"data": {"name": "mnist", "table": SCHEMA}},
            r"is for a table, such as a \.csv or \.parquet file; data\.name = 'mnist' is none",
        ),
        ({"run": {"per_silo": True}, "data": {"name": "synthetic"}}, "run.per_silo: needs a table"),
    ],
)
def test_scenarios_that_do_not_fit_their_table_are_refused(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(InputError, match=line):
        resolve_cell({**table_tree(tmp_path / "t.csv"), **changes}, "test")


def test_a_schema_survives_serialization_with_sorted_keys(tmp_path: Path) -> None:
    """A guard spells a scenario with sorted keys; its description must be the same one."""
    cell = resolve_cell(table_tree(tmp_path / "t.csv"), "test")
    again = resolve_cell(json.loads(json.dumps(cell.canonical_data(), sort_keys=True)), "test")
    assert again.data.table == cell.data.table
    assert hash(again.data) == hash(cell.data)


def test_a_silo_table_may_omit_its_site_column_and_may_not_name_another_site(tmp_path: Path) -> None:
    own = [record for record in rows() if record["hospital"] == "south"]
    encoded = load_silo_table(write_csv(tmp_path / "south.csv", own), schema(), 1)
    nameless = load_silo_table(write_csv(tmp_path / "none.csv", without_hospital(own)), schema(), 1)
    np.testing.assert_array_equal(encoded.features, nameless.features)
    with pytest.raises(
        InputError, match=r"line 2, column 'hospital': 'south' is another site than silo 0, 'north'"
    ):
        load_silo_table(tmp_path / "south.csv", schema(), 0)


def test_a_silo_table_with_two_site_columns_is_refused(tmp_path: Path) -> None:
    """Before, records of other sites were taken for this silo's."""
    lines = [",".join([*record.values(), record["hospital"]]) for record in rows()]
    names = ",".join([*rows()[0], "hospital"])
    (tmp_path / "two.csv").write_text("\n".join([names, *lines]) + "\n")
    with pytest.raises(InputError, match="column 'hospital': "):
        load_silo_table(tmp_path / "two.csv", schema(), 1)


WRITTEN = st.characters(codec="utf-8", exclude_characters="\0")
SPELLED = st.one_of(
    st.floats().map(repr),
    st.integers(-(10**20), 10**20).map(str),
    st.sampled_from(
        ["1_000", "+5", ".5", "5.", "1e400", "-0", "0x1F", "inf", "nan", "NA", "", "true", "False", "٣", "1,5"]
    ),
    st.text(max_size=4).map(str.strip),
)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(SPELLED, min_size=1, max_size=8))
def test_guarantee_a_number_does_not_depend_on_how_other_cells_are_spelled(texts: list[str]) -> None:
    """One odd cell sends a column another way; each is read to the bits that Python's float gives it by itself."""
    table = RawTable.from_texts("t", {"a": texts})
    cells = table.column("a")
    assert cells.is_missing.tolist() == [text.lower() in MISSING_TEXTS for text in texts]
    numbers = [None if text.lower() in MISSING_TEXTS else parse_number(text) for text in texts]
    assert [None if np.isnan(number) else number for number in cells.to_numbers()] == numbers
    assert [cells[row] for row in range(len(texts))] == texts
    distinct, words = cells.count_values(100)
    held = [text for text in texts if text.lower() not in MISSING_TEXTS]
    assert (distinct, words) == (len(set(held)), tuple(word for word, _ in Counter(held).most_common()))
    places = [{"5": 0, "NA": 1, "*": 2}.get(text, -1) for text in texts]
    assert cells.vocabulary_indices(["5", "NA", "*"]).tolist() == places


def test_column_values_are_listed_only_up_to_a_limit_of_distinct_values() -> None:
    cells = RawTable.from_texts("t", {"a": ["y", "x", "x", "NA", "z"]}).column("a")
    assert cells.count_values(3) == (3, ("x", "y", "z"))
    assert cells.count_values(2) == (3, ())


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.text(WRITTEN, max_size=6), min_size=2, max_size=2), min_size=1, max_size=4))
def test_cells_and_line_numbers_of_a_csv_file_match_a_strict_python_reader(
    tmp_path: Path, rows_of: list[list[str]]
) -> None:
    """Quotes, separators and ends of lines inside of cells included, and the lines of messages."""
    path = tmp_path / "t.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["a", "b"], *rows_of])
    table = read_table(path)
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, strict=True)
        next(reader)
        for row, cells in enumerate(reader):
            assert [table.columns[name][row] for name in "ab"] == [cell.strip() for cell in cells]
            assert table.locate_rows([row]) == [reader.line_num]


def test_a_line_break_inside_a_quoted_cell_does_not_end_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Arrow cuts the file into blocks."""
    monkeypatch.setattr(cells_of_files, "_BLOCK_BYTES", 1 << 20)
    long = [("x\n" * 3000 + str(number), str(number)) for number in range(300)]
    with (tmp_path / "t.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("a", "b"), *long])
    table = read_table(tmp_path / "t.csv")
    assert len(table) == 300
    assert table.column("b").to_numbers().tolist() == list(range(300))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("header", ["a,b", '"a",b', '"a\nx",b', '"a\r\n",b', '"a\rx",b'])
@pytest.mark.parametrize("start", ["", "\ufeff", "@", "@@", "\ufeff@"])
def test_empty_lines_before_the_header_of_a_csv_file_are_skipped(
    tmp_path: Path, start: str, header: str, end: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(f"{start.replace('@', end)}{header}{end}1,2{end}{end}3,4{end}".encode())
    table = read_table(path)
    assert [cells.to_numbers().tolist() for cells in table.columns.values()] == [[1.0, 3.0], [2.0, 4.0]]


def test_cells_of_a_csv_file_do_not_depend_on_the_block_size_of_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words that occur first in later blocks, with and without spaces, and more of them than a byte counts."""
    draw = np.random.default_rng(0)
    records = [
        {"a": str(draw.choice(["x", " x", "y ", "", "late" if row > 800 else "z"])), "b": str(row % 301)}
        for row in range(1000)
    ]
    path = write_csv(tmp_path / "t.csv", records)
    whole = read_table(path)
    monkeypatch.setattr(cells_of_files, "_BLOCK_BYTES", 200)
    monkeypatch.setattr(cells_of_files, "_BLOCKS_PER_MERGE", 3)
    in_blocks = read_table(path)
    for name in "ab":
        texts = [record[name].strip() for record in records]
        assert in_blocks.column(name).to_numpy().tolist() == whole.column(name).to_numpy().tolist() == texts
        assert in_blocks.column(name).count_values(400) == whole.column(name).count_values(400)
    copies = len(records) - len({(r["a"].strip(), r["b"]) for r in records})
    assert in_blocks.duplicate_count() == whole.duplicate_count() == copies
    assert in_blocks.column("a").arrow_array.indices.type.bit_width == 8


def test_float32_features_are_the_rounded_float64_features(tmp_path: Path) -> None:
    path, asked = write_csv(tmp_path / "t.csv", rows()), schema(missing="drop")
    wide, narrow = load_table("t", path, asked, with_cells=True), load_table("t", path, asked, dtype="float32")
    assert (narrow.train_images.dtype, narrow.raw_cells) == (np.float32, None)
    for one, other in ((wide.train_images, narrow.train_images), (wide.test_images, narrow.test_images)):
        assert np.array_equal(one.astype(np.float32), other)
    assert wide.raw_cells is not None
    assert wide.raw_cells.shape == (len(wide.train_labels), len(asked.raw_columns))


def test_parquet_columns_give_the_same_texts_and_numbers_as_python_values(tmp_path: Path) -> None:
    held: dict[str, list[Any]] = {
        "whole": [1, 2, None, 4],
        "real": [0.1, None, float("nan"), 1e300],
        "word": [" a ", None, "NA", "b"],
        "truth": [True, False, None, True],
        "day": [datetime.date(2020, 1, 2), None, datetime.date(2021, 1, 2), datetime.date(2020, 1, 2)],
    }
    parquet.write_table(pyarrow.table(held), tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet")
    for name, cells in held.items():
        texts = ["" if value is None else str(value).strip() for value in cells]
        column = table.column(name)
        assert [column[row] for row in range(4)] == texts == column.to_numpy().tolist()
        assert column.is_missing.tolist() == [text.lower() in MISSING_TEXTS for text in texts]
        numbers = [None if text.lower() in MISSING_TEXTS else parse_number(text) for text in texts]
        assert [None if np.isnan(number) else number for number in column.to_numbers()] == numbers
    assert table.locate_rows([2]) == [3]


@pytest.mark.parametrize(("numbers", "words", "is_of_numbers"), [(18, 2, True), (27, 3, True), (17, 3, False)])
def test_a_column_with_at_most_one_tenth_invalid_cells_counts_as_numeric(
    tmp_path: Path, numbers: int, words: int, is_of_numbers: bool
) -> None:
    """Before: exactly a tenth made it a column of words, by rounding."""
    cells = [*map(str, range(numbers)), *(f"bad{word}" for word in range(words))]
    table = read_table(write_csv(tmp_path / "t.csv", [{"a": cell} for cell in cells]))
    (summary,) = summarize_columns(table)
    assert (summary.odd_count == words) == is_of_numbers


def test_table_inspection_counts_duplicate_rows_and_suggests_remedies_for_columns(tmp_path: Path) -> None:
    records = [{"a": f"{number},5", "day": f"{number % 28 + 1}.3.2020", "outcome": "x"} for number in range(60)]
    path = write_csv(tmp_path / "t.csv", [*records, *records[:7]])
    table = read_table(path)
    assert table.duplicate_count() == 7
    said = {column.name: column.describe() for column in summarize_columns(table)}
    assert said["a"].endswith("they seem to be numbers with decimal commas: give --decimal ,")
    assert said["day"].endswith("they seem to be dates: give numbers, such as years since a day")
