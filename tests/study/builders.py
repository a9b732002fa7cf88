"""Federations, runs and studies of joining, as the tests of studies need them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import fedpriv
from fedpriv.addons.worth import local_models as fits
from fedpriv.addons.worth.joining import JoiningRequest, JoiningResult, study_joining
from fedpriv.addons.worth.local_models import SiloRecords
from fedpriv.addons.worth.worth import find_linear_objective, load_silo_records
from fedpriv.cli.app import app
from fedpriv.loss.objective import Objective
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell

DIMENSION = 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path / "cache" / "data"))
    return tmp_path / "cache" / "alone"


def invoke(*words: object) -> Result:
    """Run a command of fedpriv in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def bytes_below(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def two_classes(silos: int, each: int, distance: float, tests: int, seed: int = 0) -> tuple[Any, Any]:
    """Records of N(±m, I) with |m| = `distance`, as many of both classes, and tests."""
    draw = np.random.default_rng(seed)

    def part(count: int) -> tuple[Any, Any]:
        labels = np.arange(count) % 2
        records = draw.standard_normal((count, DIMENSION))
        records[:, 0] += distance * (2.0 * labels - 1.0)
        return records, labels.astype(np.int64)

    return part(silos * each), part(tests)


def cell_on(name: str, silos: int, each: int, **sections: Any) -> Cell:
    """A cell on added data, with changed sections or keys of them."""
    tree: dict[str, Any] = {
        "name": "worth",
        "seed": 3,
        "data": {"name": name},
        "federation": {"silos": silos, "rounds": 5, "batch": each // 5 or 1},
        "model": {"name": "softmax-regression", "feature_norm": 8.0},
        "algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.5},
        "privacy": {"relation": "zero-out", "mu": 1.0},
        "run": {"dtype": "float64", "evaluations": 1},
    }
    for section, keys in sections.items():
        tree[section] = {**tree[section], **keys} if isinstance(keys, dict) else keys
    return resolve_cell(tree, "test")


def added(name: str, silos: int, each: int, distance: float, tests: int = 2_000) -> str:
    train, test = two_classes(silos, each, distance, tests)
    fedpriv.add_data(name, lambda: (train, test), classes=2)
    return name


def added_cell(name: str, silos: int = 2, each: int = 40, distance: float = 1.0, **sections: Any) -> Cell:
    """A cell on data that are added under this name."""
    return cell_on(added(name, silos, each, distance), silos, each, **sections)


def first_silo(cell: Cell) -> tuple[Objective, SiloRecords]:
    """The objective, and the records of the first silo."""
    return find_linear_objective(cell), load_silo_records(cell)[1][0]


def flipped(name: str, silos: int, each: int, share: float, distance: float = 1.5, seed: int = 0) -> str:
    """A federation by sites, of whose silos a `share` has labels flipped, in training and tests."""
    train, test = two_classes(silos, each, distance, silos * 100, seed)
    folder = Path(os.environ["FEDPRIV_DATA"]).parent
    lines = ["site,split,label," + ",".join(f"x{j}" for j in range(20))]
    for part, (features, labels) in (("train", train), ("test", test)):
        for place, (row, label) in enumerate(zip(features, labels, strict=True)):
            site = place // (100 if part == "test" else each)  # both classes in either part
            right = 1 - label if site < share * silos else label
            cells = [f"s{site}", part, "ab"[right], *(f"{float(v):.4f}" for v in np.clip(row, -6, 6))]
            lines.append(",".join(cells))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def federation_of(path: str, silos: int, each: int) -> dict[str, Any]:
    columns = {f"x{j}": {"range": [-6.0, 6.0]} for j in range(20)}
    table = {
        "public": True, "target": "label", "classes": ["a", "b"], "site": "site", "split": "split",
        "sites": [f"s{i}" for i in range(silos)], "test_share": 0.5, "columns": columns,
    }  # fmt: skip
    return {
        "name": "worth",
        "data": {"name": path, "partition": "site", "table": table},
        "model": {"name": "softmax-regression", "feature_norm": 4.0},
        "federation": {"silos": silos, "rounds": 10, "epochs": 10, "batch": each + 100},
        "algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 5.0},
        "privacy": {"relation": "zero-out", "epsilon": 1.0, "delta": 1e-5},
        "run": {"evaluations": 1},
    }


def written(folder: Path, tree: dict[str, Any]) -> Path:
    """A new file with a scenario."""
    lines: list[str] = []

    def table(prefix: str, keys: dict[str, Any]) -> None:
        if prefix:
            lines.append(f"[{prefix}]")
        lines.extend(f'"{k}" = {json.dumps(v)}' for k, v in keys.items() if not isinstance(v, dict))
        for key, value in keys.items():
            if isinstance(value, dict):
                table(f"{prefix}.{key}" if prefix else key, value)

    table("", tree)
    path = folder / f"{len(list(folder.glob('*.toml')))}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def flipped_scenario(folder: Path, name: str, silos: int = 3, each: int = 20, share: float = 0.0) -> Path:
    """A file with a federation, of whose silos a `share` has labels flipped."""
    return written(folder, federation_of(flipped(name, silos, each, share), silos, each))


def joining(
    path: Path, epsilons: tuple[float, ...], splits: int | None, *more: Any, **options: Any
) -> JoiningResult:
    """A study without trust in the server."""
    return study_joining(JoiningRequest(path, (), ("untrusted",), epsilons, splits, *more, **options))


def thread_counts(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> set[int]:
    """Numbers of threads with which fits are minimized while two are allowed, which they are afterwards, too."""
    counts: set[int] = set()
    real, before = fits.minimize, torch.get_num_threads()
    monkeypatch.setattr(fits, "minimize", lambda *a, **k: (counts.add(torch.get_num_threads()), real(*a, **k))[1])
    torch.set_num_threads(2)
    try:
        action()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    return counts
