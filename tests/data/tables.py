"""Small tables as tests need them: mixed columns, two sites, persons, gaps."""

import csv
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA: dict[str, Any] = {
    "public": True,
    "target": "outcome",
    "classes": ["well", "ill"],
    "site": "hospital",
    "sites": ["north", "south"],
    "split": "part",
    "test_share": 1 / 3,
    "columns": {
        "sex": {"values": ["f", "m"]},
        "age": {"range": [0.0, 100.0]},
        "pain": {"values": ["none", "some", "*"]},
    },
}


def rows(count: int = 60) -> list[dict[str, str]]:
    """Records of two hospitals whose outcome follows from age and pain; every third is for testing."""
    return [dict(record) for record in _drawn_rows(count)]


@functools.cache
def _drawn_rows(count: int) -> list[dict[str, str]]:
    draw = np.random.default_rng(16)
    made = []
    for number in range(count):
        age, pain = int(draw.integers(20, 90)), str(draw.choice(["none", "some", "much"]))
        ill = age + 40 * (pain != "none") + draw.normal(0.0, 8.0) > 85
        made.append(
            {
                "patient": f"p{number}",
                "hospital": "north" if number % 5 < 3 else "south",
                "age": str(age),
                "sex": str(draw.choice(["f", "m"])),
                "pain": pain,
                "outcome": "ill" if ill else "well",
                "part": "test" if number % 3 == 0 else "train",
            }
        )
    return made


def write_csv(path: Path, records: Iterable[Mapping[str, str]]) -> Path:
    listed = list(records)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(listed[0]))
        writer.writeheader()
        writer.writerows(listed)
    return path


def table_tree(path: Path, **schema: Any) -> dict[str, Any]:
    """A scenario on the table at `path`: two hospitals as silos, softmax regression."""
    return {
        "name": "table",
        "seed": 1,
        "data": {"name": str(path), "partition": "site", "table": {**SCHEMA, **schema}},
        "model": {"name": "softmax-regression", "feature_norm": 2.0},
        "federation": {"silos": 2, "rounds": 8, "epochs": 4, "batches": [12, 8]},
        "algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 1.0},
        "privacy": {"relation": "zero-out", "epsilon": 8.0},
        "run": {"dtype": "float64", "evaluations": 2},
    }
