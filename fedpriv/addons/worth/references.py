"""Scores of the local models in the user's cache, for the tables of reports.

| field of a file | meaning |
|---|---|
| `key` | digest of what determines a silo's records and its fit, such as data, partition, seed and model |
| `records` | SHA-256 of the records as the model sees them (`digest_silos`) |

A local model is fitted by one silo to its own training records.  References are the scores of local models on test
records, for a cell: one run, with every key of its scenario resolved.

Not private: scores are functions of silos' records, so only the owner of a file can read it.
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
"""Most silos with a local model.  If more silos have training and test records, a public seed draws them."""

ONE_CLASS_SHARE = 0.9
"""Share of one class above which accuracy says little about a silo."""


@dataclass(frozen=True)
class LocalModelScores:
    """Scores of a silo's local model: the metric on its test records, where larger is better."""

    silo: int
    """Number of the silo."""
    name: str
    """Name of the silo in tables."""
    train: int
    """Number of training records."""
    test: int
    """Number of test records."""
    score: float
    """Accuracy in [0, 1], or the negative mean loss of a regression or of hazards."""
    constant: float
    """Score of a constant prediction: the most frequent training label, their mean, or constant hazards."""
    penalty: float
    """Penalty κ of the fit."""
    majority: float
    """Share of the largest class among the training records, or 0 for a regression and for hazards."""
    balanced: float
    """Mean accuracy over classes if `majority` is above `ONE_CLASS_SHARE`, or else the score."""
    any_learner: float | None = None
    """Score of the best of several learners by the same folds, or None if they were not tried."""
    learner: str = ""
    """Name of the best learner, or "" if none was tried."""


@dataclass(frozen=True)
class References:
    """Local models of silos in a federation."""

    metric: str
    """Name of the score, "accuracy", or "-loss" for a regression and for hazards."""
    of: int
    """Number of silos of the federation."""
    silos: tuple[LocalModelScores, ...]
    """Scores of each silo's local model."""

    @property
    def mean_score(self) -> float:
        """Mean score over silos."""
        return float(np.mean([silo.score for silo in self.silos]))

    @property
    def test_train_ratio(self) -> float:
        """Test records of these silos / their training records."""
        return sum(silo.test for silo in self.silos) / max(1, sum(silo.train for silo in self.silos))


def deviation_over_silos(values: Any) -> float:
    """Return the standard deviation over silos, or 0 for one silo."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def cache_key(cell: Cell) -> str | None:
    """Return the key of a cell's references, or None if the records have no source that identifies them.

    The key digests the source of the records, and the settings by which silos have them and fit local models, such
    as partition, seed and model, but not those of the federation's training, such as clip norm and step.
    """
    if (source := _data_source(cell.data.name)) is None:
        return None
    tree = cell.canonical_data()
    # A local model reads spared records, too, and belongs to one `split` of the `splits`.
    data = {key: value for key, value in tree["data"].items() if key not in ("splits", "spared")}
    privacy = {key: tree["privacy"].get(key) for key in ("unit", "records", "shared")}
    sizes = [cell.schedule.batches_per_silo * batch for batch in cell.batch_sizes]
    key_parts = [
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
    return hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode()).hexdigest()


def _data_source(name: str) -> str | None:
    """Return the name or digest that identifies the data, or None if there is neither.

    A data set of fedpriv has its name.  A user's own arrays have the digest of records and labels, and a file has
    that of its content.
    """
    if name in COMPUTED_DATA_SETS or name in ORIGINS:
        return name
    if is_user_data(name):
        data, digest = load_user_data(name), hashlib.sha256()
        for array in (data.train_images, data.train_labels, data.test_images, data.test_labels):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()
    try:
        return _digest_file(name, _file_facts(os.stat(name)))
    except OSError:
        return None


@lru_cache(maxsize=16)  # table and printed text ask for each seed of a sweep
def _digest_file(name: str, facts: tuple[int, ...]) -> str | None:
    """Return SHA-256 of a regular file as hexadecimal text, or None for a device or a pipe.

    Args:
        name: Path of the file.
        facts: Device, inode, size and times of the file (`_file_facts`), so that a changed file is read again.

    Raises:
        OSError: The file cannot be read, is a folder, or has other facts by now.
    """
    with open(os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return None
        if _file_facts(status) != facts:
            raise OSError(f"{name}: another file since it was looked at")
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_facts(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def cache_folder(kind: str) -> Path:
    """Return a folder of the user's cache for facts about records, with access for its owner only."""
    folder = default_data_root().parent / kind
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_cached(kind: str, key: str, records: str, content: Mapping[str, Any]) -> None:
    """Write plain data under its key, readable for its owner only, with the digest of its records."""
    write_json(cache_folder(kind) / f"{key[:32]}.json", {"key": key, "records": records, **content}, PRIVATE_MODE)


def read_cached(kind: str, key: str, records: str | None = None) -> Mapping[str, Any] | None:
    """Return the content that is cached under `key`, or None without it.

    A file is not used if another user owns it or can write it, if it is no regular file, if it is damaged, or if
    it is of another key or of other records.

    Args:
        kind: Name of the folder in the cache.
        key: Digest of all that determines the content.
        records: Digest of the records, or None to accept any.
    """
    file = default_data_root().parent / kind / f"{key[:32]}.json"
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                return None
            tree = json.loads(stream.read())
        return dict(tree) if tree["key"] == key and (records is None or tree["records"] == records) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    except AttributeError:  # a system without owners of files, such as Windows, has no cache
        return None


def read_references(key: str, records: str | None = None) -> References | None:
    """Return the references under `key`, or None if there are no valid ones."""
    tree = read_cached("alone", key, records)
    try:
        return None if tree is None else _parse_references(tree)
    except (KeyError, TypeError, ValueError):
        return None


def _parse_references(tree: Mapping[str, Any]) -> References:
    """Parse cached references, and check their fields, since the file may be damaged.

    Raises:
        KeyError, TypeError, ValueError: A field is missing or unknown, or has a value that no references have.
    """
    references = References(tree["metric"], tree["of"], tuple(LocalModelScores(**silo) for silo in tree["silos"]))
    if references.metric not in ("accuracy", "-loss") or not 0 < len(references.silos) <= _check_count(
        references.of
    ):
        raise ValueError("no references")
    for silo in references.silos:
        any_learner = silo.score if silo.any_learner is None else silo.any_learner
        shares = (silo.score, silo.constant, silo.balanced, silo.majority, any_learner)
        if not (
            all(type(value) in (int, float) and abs(value) <= _MAX_VALUE for value in (*shares, silo.penalty))
            and (references.metric == "-loss" or all(0.0 <= share <= 1.0 for share in shares))
            # Numbers and counts are 0 or more, and a silo has one test record or more.
            and min(_check_count(silo.silo), _check_count(silo.train), _check_count(silo.test) - 1) >= 0
            and isinstance(silo.name, str)
            and isinstance(silo.learner, str)
        ):
            raise ValueError("no scores, counts or names")
    return references


_MAX_VALUE = 1e100
"""Bound above all scores and counts, small enough for sums to stay finite."""


def _check_count(value: object) -> int:
    if type(value) is not int or abs(value) > _MAX_VALUE:
        raise ValueError("no count")
    return value


def find_references(scenarios: Iterable[Mapping[str, Any]]) -> dict[int, References]:
    """Return the cached references of a run's resolved scenarios by their index, without computing any.

    Scenarios that differ only in trust, clip, step or privacy target have the same ones.
    """
    folder = default_data_root().parent / "alone"
    if not folder.is_dir() or not any(folder.iterdir()):
        return {}
    cached_references: dict[str, References | None] = {}
    references_by_index = {}
    for index, scenario in enumerate(scenarios):
        try:
            algorithm = {
                k: v for k, v in dict(scenario.get("algorithm", {})).items() if k not in ("trust", "clip", "step")
            }
            unit = [dict(scenario.get("privacy", {})).get(key) for key in ("unit", "records", "shared")]
            other_keys = [scenario.get(key) for key in ("seed", "data", "model", "federation")]
            identity = json.dumps([algorithm, unit, other_keys])
        except (TypeError, ValueError):  # a scenario of another form, which fedpriv did not write
            continue
        if identity not in cached_references:
            cached_references[identity] = _references_of_scenario(scenario)
        if (entry := cached_references[identity]) is not None:
            references_by_index[index] = entry
    return references_by_index


def _references_of_scenario(scenario: Mapping[str, Any]) -> References | None:
    try:
        cell = resolve_cell(scenario, "results.json")
        key = None if cell.federation.clients is not None else cache_key(cell)
    except FedprivError:
        return None
    return None if key is None else read_references(key)


LOCAL_MODELS_TITLE = "each silo alone, nothing released"


def _local_models_text(
    results: Results, references_by_index: Mapping[int, References], metric: Metric, fixed: Mapping[str, Any]
) -> str:
    """Return the local models' metric at points with the swept values `fixed`, or "" if none is cached.

    A point has the mean over its seeds that are cached, and a seed the mean over the silos of its references.  The
    text is a range if the values of points differ in the digits shown, and "" for a metric other than that of the
    references.
    """
    by_point: dict[str, list[float]] = {}
    for index, references in references_by_index.items():
        cell = results.cells[index]
        if any(cell["point"][key] != value for key, value in fixed.items()):
            continue
        if references.metric == "accuracy" and metric.key in ("test_accuracy", f"test_accuracy_{MEAN_SUFFIX}"):
            by_point.setdefault(str(cell["point"]), []).append(references.mean_score)
        elif references.metric == "-loss" and metric.key == "test_loss":
            by_point.setdefault(str(cell["point"]), []).append(-references.mean_score)
    means = sorted(statistics.fmean(values) for values in by_point.values())
    ends = (f"{metric.factor * mean:.{metric.digits}f}" for mean in means[:1] + means[-1:])
    return " to ".join(dict.fromkeys(ends))


def local_models_row(results: Results) -> tuple[str, Callable[[Metric, Mapping[str, Any]], str]]:
    """Return the title and the texts of the tables' row of local models."""
    references_by_index = find_references(cell["scenario"] for cell in results.cells)
    return LOCAL_MODELS_TITLE, lambda metric, fixed: _local_models_text(
        results, references_by_index, metric, fixed
    )
