"""One example of each registered thing that a plan is made of: what `tests/attacks/test_crossings.py` combines.

| table | keys |
|---|---|
| `MODELS` | models by name, and modules by import path |
| `KEYS` | keys of models' settings, with what a key needs beside it; each is tried with every model that has it |
| `ALGORITHMS`, `VARIANTS` | rows of papers' algorithms, and settings that change what records are asked for |
| `MECHANISMS` | noise that a scenario names |
| `PARTICIPATIONS`, `UNITS`, `TRUSTS`, `RELATIONS` | who takes part, what neighbours differ in, who adds noise |
| `RUN_COUNTS`, `ABSENCES` | keys of [run] that change how increments are computed, silos that are not there |

`STORED:path` stands for the digest of a module's weights, which `write_files` stores.
"""

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.data.tables import SCHEMA, rows, write_csv
from tests.engines.test_every_row import SETTINGS
from tests.loss import zoo
from tests.loss.test_survival import SCHEMA as TIMES
from tests.loss.test_survival import own_rows

ROUNDS, BATCH, CLIP = 8, 3, 0.5
_ZOO = zoo.__name__
_AXIS = {"column": 1, "edges": [0.0, 30.0, 60.0, 100.0]}


class Example(NamedTuple):
    """A model on records that it takes."""

    data: str
    keys: dict[str, Any]
    name: str = ""
    """Name in the scenario, where the key of the table is another one."""
    algorithm: dict[str, Any] = {}  # noqa: RUF012 - never written to
    """Settings that this model needs."""
    federation: dict[str, Any] = {}  # noqa: RUF012


def module(path: str, data: str, **keys: Any) -> Example:
    return Example(data, keys, f"{_ZOO}:{path}")


NORM = {"feature_norm": 2.0}
ONE_STEP, ONE_ROUND = {"clip": 1.0, "step": 1.0}, {"rounds": 1, "epochs": 1}
"""Of what is one release."""
MODELS: dict[str, Example] = {
    "softmax-regression": Example("pictures", {}),
    "logistic-regression": Example("pairs", NORM),
    "sigmoid-regression": Example("pairs", NORM),
    "linear-regression": Example("targets", NORM),
    "ridge-regression": Example("targets", {**NORM, "penalty": 0.1}),
    "ridge-statistics": Example("pairs", {**NORM, "penalty": 0.5}, algorithm=ONE_STEP, federation=ONE_ROUND),
    "mlp-regression": Example("targets", {"hidden": 4}),
    "mlp": Example("pictures", {"hidden": 4}),
    "mlp-relu": Example("pictures", {"hidden": 4}),
    "hazard-regression": Example("times", NORM),
    "hazard-mlp": Example("times", {"hidden": 4}),
    "cnn": Example("synthetic", {}),
    "relu-regression": Example("targets", {"hidden": 4}),
    "least-squares": Example("linear-regression", {}),
    "amplitude-phase-retrieval": Example("phase-retrieval", {}),
    "robust-phase-retrieval": Example("phase-retrieval", {}),
    "column-moments": Example("pairs", {"columns": [0, 2]}, algorithm=ONE_STEP, federation=ONE_ROUND),
    "statistics": Example(
        "visits",
        {"tables": [{"axes": [_AXIS]}, {"axes": [_AXIS], "form": "prefix"}]},
        algorithm=ONE_STEP,
        federation=ONE_ROUND,
    ),
    # by import path
    "a module": module("Wide", "pictures"),
    "layers": module("flags", "pictures"),
    "half of it": module("half_frozen", "pictures", weights=f"STORED:{_ZOO}:Wide"),
    "LoRA": module("adapted", "pictures", weights=f"STORED:{_ZOO}:Wide"),
    "several labels": module("flags", "marks", loss="binary"),
    "tokens": module("Sentences", "tokens"),
    "a recurrent net": module("Gru", "pairs"),
    "a convolution": module("normalized", "pictures", shape=[1, 4, 4], group_norm=True),
    "times": module("Wide", "times", loss="hazard"),
    "a loss of one's own": module("Wide", "targets", loss=f"{_ZOO}:apart", real=True),
}
IMPORTED = tuple(name for name, example in MODELS.items() if example.name)

_BACKBONE = {"backbone": f"{_ZOO}:backbone", "backbone_weights": f"STORED:{_ZOO}:backbone", "feature_norm": 1.0}
KEYS: dict[str, dict[str, Any]] = {
    "features": {"features": "orientations", "feature_norm": 2.0},
    "centre": {"centre": 0.25},
    "feature_norm": {"feature_norm": 1.0},
    "scaling": {"scaling": "exactly", "feature_norm": 1.0},
    "backbone": _BACKBONE,
    "backbone_arguments": {**_BACKBONE, "backbone_arguments": {"width": 5}},
    "backbone_weights": _BACKBONE,
    "backbone_shape": {**_BACKBONE, "backbone_shape": [6]},
    "penalty": {"penalty": 0.25},
    "real": {"real": True},
    "hidden": {"hidden": 3},
    "initial_seed": {"initial_seed": 5},
    "augment": {"augment": {"copies": 3, "shift": 1, "flip": True}},
    "start": {"start": 0.5},
    "ball": {"ball": 2.0},
    "columns": {"columns": [1]},
    "tables": {"tables": [{"axes": [_AXIS], "form": "moments"}, {"axes": [{"column": 0, "words": 2}]}]},
    "arguments": {"arguments": {"hidden": 3}},
    "loss": {"loss": "huber"},
    "class_weights": {"class_weights": [1.0, 2.0, 0.5]},
    "label_smoothing": {"label_smoothing": 0.1},
    "shape": {"shape": [16]},
    "weights": {"weights": f"STORED:{_ZOO}:Wide"},
    "group_norm": {"group_norm": True},
}  # fmt: skip


class Row(NamedTuple):
    """Settings of an algorithm, and the passes that it takes in a fixed order; for some a trust setting."""

    keys: dict[str, Any]
    epochs: int = 2


_OTHERWISE = {"clip": CLIP, "local_steps": 2}
_PASSES = {"goldstein-single-pass": 1, "phased-sgd": 1, "goldstein-erm": ROUNDS}
ALGORITHMS: dict[str, Row] = {
    name: Row({**keys, **{key: value for key, value in _OTHERWISE.items() if key in keys}}, _PASSES.get(name, 2))
    for name, keys in SETTINGS.items()
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "values alone": ("goldstein-single-pass", {"oracle": "zeroth-order", "anchor_batches": 2}),
    "values of all records": ("goldstein-erm", {"oracle": "zeroth-order", "shared_directions": False}),
    "anchored noise": ("goldstein-single-pass", {"noise": "anchored"}),
    "clipped in parts": ("momentum-tree-aligned", {"difference_clip": 0.25, "residual_clip": 0.25}),
    "a paper's tree": ("momentum-tree", {"calibration": "paper"}),
    "a clip that follows": ("dp-fedavg", {"clip_quantile": 0.5, "local_batch": 1}),
    "clients that train": ("dp-ftrl", {"local_steps": 2, "local_step": 0.1}),
    "late clips": ("dp-ftrl", {"mechanism": "tree", "late_clip": "column"}),
    "powers": ("online-to-batch", {"power": 2}),
}

MECHANISMS: dict[str, dict[str, Any]] = {
    "independent": {},
    "scheduled": {"noise_sizes": [1.0, 1.1, 1.2, 1.3, 1.2, 1.1, 1.0, 1.0]},
    "tree": {},
    "banded": {"bands": 2},
    "bisr": {"bands": 2},
    "lambda-cgd": {"theta": [0.4]},
    "blt": {"theta": [0.45, 0.3], "phi": [0.35, 0.1]},
}

PARTICIPATIONS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "poisson": {},
    "allocation": {},
    "balanced": {},
    "available": {"min_separation": 2, "max_participations": 3},
}
UNITS: dict[str, dict[str, dict[str, Any]]] = {
    "record": {},
    "user": {"privacy": {"unit": "user", "records": 3}},
    "client": {"privacy": {"unit": "client", "records": 2}},
    # beyond the registry: a unit of one record, units of a pool, one in two silos
    "user of one": {"privacy": {"unit": "user", "records": 1}},
    "client of one": {"privacy": {"unit": "client", "records": 1}},
    "client of a pool": {
        "privacy": {"unit": "client", "records": 2},
        "federation": {"clients": 12, "cohort": BATCH},
    },
    "user in two silos": {"privacy": {"unit": "user", "records": 2, "shared": 2}},
}
TRUSTS = ("untrusted", "trusted", "secure-aggregation", "curator")
RELATIONS = ("zero-out", "replace-one")
RUNS: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "float32"},
    "arithmetic": {"arithmetic": "integers"},
    "word": {"word": 40, "arithmetic": "integers"},
    "passes": {"passes": "bfloat16"},
}
"""Keys of [run] that change increments, or the numbers that they become."""
_TESTED = {"records": 20, "mu": 1.0}
BESIDE: dict[str, dict[str, dict[str, Any]]] = {
    "evaluations": {"evaluation": _TESTED},
    "one evaluation": {"evaluation": _TESTED, "run": {"evaluations": 1}},
    "curves by groups": {"evaluation": {**_TESTED, "curves": {"bins": 16, "by": ["sex"]}}},
    "curves": {"evaluation": {**_TESTED, "curves": {"bins": 16}}},
    "first step": {"data": {"scale": {"share": 0.25}}},
}
"""What is released of records beside the training."""
OF_A_TABLE = ("curves", "curves by groups", "first step")
"""Those of `BESIDE` that are of a table's columns."""
ABSENCES: dict[str, dict[str, Any]] = {"away": {"away": {"0": [2, 5]}}, "drop-outs": {"drop_out": 0.4}}
"""Silos that do not answer in a round."""
SHOWN = {"device", "evaluations", "metrics", "per_silo", "goldstein_radius", "noise"}
"""Keys of [run] that no record's increment depends on."""


def write_files(folder: Path) -> dict[str, Any]:
    """Write all records and weights; [data] of each kind of records, and digests by `STORED:path`."""
    draw = np.random.default_rng(7)
    count, tests = 120, 60

    def stored(name: str, features: Any, labels: Any, classes: int) -> dict[str, Any]:
        parts = {
            "train_features": features[:count], "train_labels": labels[:count],
            "test_features": features[count:], "test_labels": labels[count:],
        }  # fmt: skip
        np.savez(folder / f"{name}.npz", **parts, classes=np.array(classes))
        return {"name": str(folder / f"{name}.npz")}

    total = count + tests
    pictures = draw.integers(0, 256, (total, 4, 4), dtype=np.uint8)
    numbers = draw.standard_normal((total, 6))
    classes, marks = draw.integers(0, 3, total), draw.integers(0, 2, (total, 3))
    known = {
        "pictures": stored("pictures", pictures, classes, 3),
        "pairs": stored("pairs", np.clip(numbers, -1.0, 1.0), draw.integers(0, 2, total), 2),
        "targets": stored("targets", numbers, draw.standard_normal(total), 0),
        "marks": stored("marks", pictures, marks, 2),
        "tokens": stored("tokens", draw.integers(0, 20, (total, 5)), classes, 3),
    }
    visits = rows(300)
    for number, visit in enumerate(visits):
        visit["patient"] = f"{visit['hospital']}{number % 14}"
    filled = {
        name: {**column, "missing": column.get("values", [50.0])[-1]} for name, column in SCHEMA["columns"].items()
    }
    schema = {**SCHEMA, "columns": filled, "person": "patient"}
    table = {"name": str(write_csv(folder / "visits.csv", visits)), "partition": "site", "table": schema}
    times = {"name": str(write_csv(folder / "times.csv", own_rows(300))), "partition": "site", "table": TIMES}
    plain = {name: {"name": name} for name in ("synthetic", "linear-regression", "phase-retrieval")}
    return {**known, **plain, "visits": table, "times": times, "digests": write_weights(folder)}


def write_weights(folder: Path) -> dict[str, str]:
    """The digest of each module's weights, which lie where [model] looks for them."""
    os.environ["FEDPRIV_WEIGHTS"] = str(folder)
    digests = {}
    for path, arguments in {f"{_ZOO}:Wide": (16, 3), f"{_ZOO}:backbone": ()}.items():
        package, _, name = path.partition(":")
        torch.manual_seed(3)
        torch.save(getattr(importlib.import_module(package), name)(*arguments).state_dict(), folder / "w")
        digest = hashlib.sha256((folder / "w").read_bytes()).hexdigest()
        (folder / "w").rename(folder / f"{digest}.pt")
        digests[f"STORED:{path}"] = f"sha256:{digest}"
    return digests
