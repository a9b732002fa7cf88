"""A made-up table of persons with several records: visits of patients to four clinics, computed, always the same.

Nobody is described by it.  Patients come 1 to 16 times, half of them once or twice; what is measured varies
between patients and, less, between the visits of one, so that the visits of a patient tell much the same.
"""

import csv
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.cache import Source
from fedpriv.data.public_tables import FILE
from fedpriv.data.table_schema import Column, TableSchema
from fedpriv.randomness import public_generator

VISITS = "visits"
_PATIENTS = {"north": 800, "east": 600, "south": 400, "west": 200}
_TEST_SHARE, _MOST, _AGAIN = 0.25, 16, 0.7
_COLUMNS = {
    "heart_rate": (70.0, 12.0, (40.0, 140.0)), "pressure": (125.0, 18.0, (80.0, 200.0)),
    "sugar": (105.0, 25.0, (60.0, 240.0)), "weight": (76.0, 14.0, (40.0, 150.0)),
    "pain": (4.0, 2.0, (0.0, 10.0)), "sleep": (6.8, 1.2, (0.0, 14.0)),
}  # fmt: skip
"""Mean, deviation and public range of what is measured."""
_RISK = np.array([0.5, 0.9, 0.8, 0.2, 1.0, -0.7])
_LEAST = -0.2

SCHEMA = TableSchema(
    public=True,
    target="outcome",
    classes=("well", "ill"),
    site="clinic",
    sites=tuple(_PATIENTS),
    person="patient",
    split="split",
    test_share=_TEST_SHARE,
    columns={name: Column(range=limits) for name, (_, _, limits) in _COLUMNS.items()},
)
SHA256 = "sha256:41a82642388fa34dedde846c3f4f174b84ba84e5a145f29995f86e0574d913af"


def source(folder: str) -> Source:
    """The file, written to `folder` below the root."""

    def write(root: Path) -> None:
        (root / folder).mkdir(parents=True)
        (root / folder / FILE).write_text(visits(), encoding="utf-8", newline="")

    return Source("its own program", write)


def visits() -> str:
    """The table as a CSV file, patient by patient."""
    generator = public_generator(0, "visits")
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["clinic", "patient", "split", *_COLUMNS, "outcome"])
    for clinic, patients in _PATIENTS.items():
        for number in range(patients):
            split = "test" if number < _TEST_SHARE * patients else "train"
            of_patient, risk = _normal(generator, len(_COLUMNS)), 0.5 * _normal(generator, 1)[0]
            for _ in range(_times(generator)):
                seen = 0.8 * of_patient + 0.6 * _normal(generator, len(_COLUMNS))
                ill = _LEAST + float(_RISK @ seen) + risk + 0.7 * _normal(generator, 1)[0] > 0.0
                measured = [
                    f"{mean + std * x:.1f}" for (mean, std, _), x in zip(_COLUMNS.values(), seen, strict=True)
                ]
                writer.writerow([clinic, f"{clinic}-{number}", split, *measured, "ill" if ill else "well"])
    return buffer.getvalue()


def _times(generator: np.random.Generator) -> int:
    """How often a patient comes: once more with the same probability each time, 16 times at most."""
    times = 1
    while times < _MOST and generator.random() < _AGAIN:
        times += 1
    return times


def _normal(generator: np.random.Generator, size: int) -> NDArray[np.float64]:
    """Nearly normal, from sums of uniform numbers: the same digits with every version of NumPy."""
    drawn: NDArray[np.float64] = generator.random((size, 12)).sum(1) - 6.0
    return drawn
