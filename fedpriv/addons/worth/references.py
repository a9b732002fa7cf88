"""Each silo alone, as it is kept in the user's cache: what a report may read and never computes.

| here | meaning |
|---|---|
| key | of all that decides a silo's records and its fit: data, partition, seed, split, model, unit |
| records | SHA-256 of the records as the model saw them, written beside the scores |

Not private: scores are functions of silos' records, so a file is its owner's alone.
"""

import hashlib
import json
import os
import stat
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.core.errors import FedprivError
from fedpriv.core.files import PRIVATE_MODE, write_json
from fedpriv.data.fetch import COMPUTED_DATA_SETS, ORIGINS, default_data_root
from fedpriv.data.named import is_user_data, load_user_data
from fedpriv.loss.scores import MEAN_SUFFIX
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.show.summary import Metric
from fedpriv.study.results import Results

FORMAT = 2
MAX_REFERENCE_SILOS = 16
"""Of a federation with more silos so many are drawn, by a public seed."""

ONE_CLASS_SHARE = 0.9
"""The share of one class above which accuracy alone says little of a silo."""


@dataclass(frozen=True)
class LocalModelScores:
    """A silo alone: scores are the metric on its own test records, more is better."""

    silo: int
    name: str
    train: int
    test: int
    score: float
    constant: float
    """The score of the best constant prediction: the class of most training records, or their mean."""
    penalty: float
    majority: float
    """The share of the largest class among the training records; 0 for a regression."""
    balanced: float
    """The mean of the accuracies in each class of the test records where one has most; else the score itself."""
    any_learner: float | None = None
    """The score of the best of several learners by the same folds, where they were tried."""
    learner: str = ""


@dataclass(frozen=True)
class References:
    """Every silo alone, in a federation of `of` silos; `metric` is "accuracy", or "-loss" for a regression."""

    metric: str
    of: int
    silos: tuple[LocalModelScores, ...]

    @property
    def mean_score(self) -> float:
        return float(np.mean([silo.score for silo in self.silos]))

    @property
    def test_train_ratio(self) -> float:
        """Test records of these silos over their training records."""
        return sum(silo.test for silo in self.silos) / max(1, sum(silo.train for silo in self.silos))


def deviation_over_silos(values: Any) -> float:
    """The standard deviation over silos; 0 for one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def cache_key(cell: Cell) -> str | None:
    """The key of a cell's references; None where the records have no name to go by.

    It reads no record of a named data set, and hashes the file of one's own.
    """
    if (source := _data_source(cell.data.name)) is None:
        return None
    tree = cell.canonical_data()
    data = {key: value for key, value in tree["data"].items() if key not in ("splits", "spared")}
    privacy = {key: tree["privacy"].get(key) for key in ("unit", "records", "shared")}
    sizes = [cell.schedule.batches_per_silo * batch for batch in cell.batch_sizes]
    asked = [
        FORMAT,
        source,
        data,
        cell.seed,
        tree["model"],
        sizes,
        cell.federation.clients,
        privacy,
        MAX_REFERENCE_SILOS,
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _data_source(name: str) -> str | None:
    if name in COMPUTED_DATA_SETS or name in ORIGINS:
        return name
    if is_user_data(name):
        whole, digest = load_user_data(name), hashlib.sha256()
        for array in (whole.train_images, whole.train_labels, whole.test_images, whole.test_labels):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()
    try:
        return _digest_file(name, _file_facts(os.stat(name)))
    except OSError:
        return None


@lru_cache(maxsize=16)  # every seed of a sweep asks, in a table and in what is printed
def _digest_file(name: str, facts: tuple[int, ...]) -> str | None:
    """SHA-256 of a file, read once as long as `facts`, which change with it, are the same; None of no file."""
    with open(os.open(name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            return None
        if _file_facts(found) != facts:
            raise OSError(f"{name}: another file since it was looked at")
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_facts(of: os.stat_result) -> tuple[int, ...]:
    return of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns


def cache_folder(kind: str) -> Path:
    """The folder of the user's cache for what is known of records, made for its owner alone."""
    folder = default_data_root().parent / kind
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_cached(kind: str, key: str, records: str, content: Mapping[str, Any]) -> None:
    """Keep `content` under its key, for the owner alone, with the records that it is of."""
    write_json(cache_folder(kind) / f"{key[:32]}.json", {"key": key, "records": records, **content}, PRIVATE_MODE)


def read_cached(kind: str, key: str, records: str | None = None) -> Mapping[str, Any] | None:
    """What is kept under `key`; None without it, and for a file of somebody else or of other records."""
    file = default_data_root().parent / kind / f"{key[:32]}.json"
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                return None
            tree = json.loads(opened.read())
        return dict(tree) if tree["key"] == key and (records is None or tree["records"] == records) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def read_references(key: str, records: str | None = None) -> References | None:
    """The references under `key`; None where there are none that can be believed."""
    tree = read_cached("alone", key, records)
    try:
        return None if tree is None else _parse_references(tree)
    except (KeyError, TypeError, ValueError):
        return None


def _parse_references(tree: Mapping[str, Any]) -> References:
    known = References(tree["metric"], tree["of"], tuple(LocalModelScores(**silo) for silo in tree["silos"]))
    if known.metric not in ("accuracy", "-loss") or not 0 < len(known.silos) <= _check_count(known.of):
        raise ValueError("no references")
    for silo in known.silos:
        shares = [silo.score, silo.constant, silo.balanced, silo.majority]
        if silo.any_learner is not None:
            shares.append(silo.any_learner)
        if not all(type(value) in (int, float) and abs(value) <= _MAX_VALUE for value in (*shares, silo.penalty)):
            raise ValueError("no scores")
        if known.metric == "accuracy" and not all(0.0 <= share <= 1.0 for share in shares):
            raise ValueError("no accuracies")
        if min(_check_count(silo.silo), _check_count(silo.train), _check_count(silo.test) - 1) < 0:
            raise ValueError("no counts")
        if not isinstance(silo.name, str) or not isinstance(silo.learner, str):
            raise ValueError("no names")
    return known


_MAX_VALUE = 1e100
"""More than any score or count is, and little enough to be added up."""


def _check_count(value: object) -> int:
    if type(value) is not int or abs(value) > _MAX_VALUE:
        raise ValueError("no count")
    return value


def find_references(scenarios: Iterable[Mapping[str, Any]]) -> dict[int, References]:
    """What the cache has of resolved scenarios, by their place in the order given; nothing is computed.

    A scenario that this version cannot resolve has none.
    """
    folder = default_data_root().parent / "alone"
    if not folder.is_dir() or not any(folder.iterdir()):
        return {}
    known: dict[str, References | None] = {}
    found = {}
    for place, scenario in enumerate(scenarios):
        try:
            algorithm = {
                k: v for k, v in dict(scenario.get("algorithm", {})).items() if k not in ("trust", "clip", "step")
            }
            unit = [dict(scenario.get("privacy", {})).get(key) for key in ("unit", "records", "shared")]
            others = [scenario.get(key) for key in ("seed", "data", "model", "federation")]
            same = json.dumps([algorithm, unit, others])
        except (TypeError, ValueError):  # somebody wrote it
            continue
        if same not in known:
            known[same] = _references_of_scenario(scenario)
        if (references := known[same]) is not None:
            found[place] = references
    return found


def _references_of_scenario(scenario: Mapping[str, Any]) -> References | None:
    try:
        cell = resolve_cell(scenario, "results.json")
        key = None if cell.federation.clients is not None else cache_key(cell)
    except FedprivError:
        return None
    return None if key is None else read_references(key)


LOCAL_MODELS_TITLE = "each silo alone, nothing released"


def _local_models_text(
    results: Results, known: Mapping[int, References], metric: Metric, fixed: Mapping[str, Any]
) -> str:
    """The metric of each silo alone at the points that have `fixed`; nothing where the cache has none of them.

    A range where settings of the scenario change the silos' records or their model.
    """
    by_point: dict[str, list[float]] = {}
    for place, found in known.items():
        cell = results.cells[place]
        if any(cell["point"][key] != value for key, value in fixed.items()):
            continue
        if found.metric == "accuracy" and metric.key in ("test_accuracy", f"test_accuracy_{MEAN_SUFFIX}"):
            by_point.setdefault(str(cell["point"]), []).append(found.mean_score)
        elif found.metric == "-loss" and metric.key == "test_loss":
            by_point.setdefault(str(cell["point"]), []).append(-found.mean_score)
    means = sorted(statistics.fmean(values) for values in by_point.values())
    ends = (f"{metric.factor * mean:.{metric.digits}f}" for mean in means[:1] + means[-1:])
    return " to ".join(dict.fromkeys(ends))


def local_models_row(results: Results) -> tuple[str, Callable[[Metric, Mapping[str, Any]], str]]:
    """Return the title and the texts of the tables' row of local models."""
    known = find_references(cell["scenario"] for cell in results.cells)
    return LOCAL_MODELS_TITLE, lambda metric, fixed: _local_models_text(results, known, metric, fixed)
