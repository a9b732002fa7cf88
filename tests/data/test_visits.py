"""The made-up table of visits: the same digits everywhere, persons of one clinic each, none in both parts."""

import collections
import csv
import hashlib
import io

from fedpriv.data.named import load, load_test
from fedpriv.data.partition import counted
from fedpriv.data.public import SHA256, VISITS, visits


def test_the_file_is_the_one_that_its_hash_says() -> None:
    assert f"sha256:{hashlib.sha256(visits().encode()).hexdigest()}" == SHA256


def test_patients_come_often_to_one_clinic_and_are_for_training_or_for_testing() -> None:
    rows = list(csv.DictReader(io.StringIO(visits())))
    whose = {(row["patient"], row["clinic"], row["split"]) for row in rows}
    times = collections.Counter(row["patient"] for row in rows)
    assert len(whose) == len(times) == 2000
    assert max(times.values()) == 16
    assert sum(count <= 2 for count in times.values()) > 900
    dataset = load(VISITS)
    assert dataset.persons is not None
    assert len(dataset.persons) == len(dataset.train_labels) == len(rows)
    assert counted(dataset.train_labels).sum() == 4900
    assert len(load_test(VISITS).labels) == len(rows) - 4900
