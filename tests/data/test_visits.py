"""The made-up table of visits: the same digits everywhere, persons of one clinic each, none in both parts."""

import collections
import csv
import hashlib
import io
from pathlib import Path

from fedpriv.data.named import load, load_held_out
from fedpriv.data.partition import counted_mask
from fedpriv.data.public import TABLE_FILE, VISITS, VISITS_SCHEMA, VISITS_SHA256, make_visits, visits_source


def test_the_generated_visits_table_matches_its_hash(tmp_path: Path) -> None:
    visits_source("below").write(tmp_path)
    content = (tmp_path / "below" / TABLE_FILE).read_bytes()
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == VISITS_SHA256


def test_every_patient_of_the_visits_table_has_one_clinic_and_one_split_part() -> None:
    rows = list(csv.DictReader(io.StringIO(make_visits())))
    whose = {(row["patient"], row["clinic"], row["split"]) for row in rows}
    times = collections.Counter(row["patient"] for row in rows)
    assert len(whose) == len(times) == 2000
    assert max(times.values()) == 16
    assert sum(count <= 2 for count in times.values()) > 900
    dataset = load(VISITS)
    assert dataset.persons is not None
    assert len(dataset.persons) == len(dataset.train_labels) == len(rows)
    assert counted_mask(dataset.train_labels).sum() == 4900
    assert len(load_held_out(VISITS).labels) == len(rows) - 4900


def test_the_visits_schema_declares_the_expected_public_ranges() -> None:
    """Features are scaled by them, and a cell outside of its range is clipped."""
    ranges = {name: column.range for name, column in VISITS_SCHEMA.columns.items()}
    assert ranges == {
        "heart_rate": (40.0, 140.0),
        "pressure": (80.0, 200.0),
        "sugar": (60.0, 240.0),
        "weight": (40.0, 150.0),
        "pain": (0.0, 10.0),
        "sleep": (0.0, 14.0),
    }
