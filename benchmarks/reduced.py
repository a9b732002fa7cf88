"""Every scenario file at reduced size: one seed and a few cells of each, to see that all of them run."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import fedpriv
from fedpriv.scenario.load import read_toml

SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"

WEIGHTS = SCENARIOS.parent / "examples" / "lora"
"""What the scenarios' `model.weights` name."""

_TENTH = {"federation.samples": 6000}
_FEW_CLIENTS = {"federation.rounds": 10, "federation.clients": 2000, "federation.cohort": 40}
SMALLER: dict[str, dict[str, Any]] = {
    "clients": _FEW_CLIENTS,
    "cnn-epochs": {
        "data.name": ["mnist"], "federation.samples": 600, "federation.rounds": 6, "privacy.epsilon": [3.0]
    },
    "complexity-outside": {"federation.samples": [4096, 8192], "federation.rounds": [4, 16]},
    "complexity-phased": {
        "federation.samples": [4096, 8192], "federation.rounds": [64, 91], "algorithm.step": [1.2, 2.4]
    },
    "complexity-table": {"federation.samples": [1024, 4096], "federation.rounds": [4, 16]},
    "containers": {"federation.rounds": 4},
    "deployment": {"federation.samples": 6000, "federation.rounds": 8},
    "first-run": _TENTH,
    "flower-demo": {"federation.batch": 20},
    "goldstein-as-printed": {"label.method": ["single pass, ours", "all records, ours"]},
    "heart-hospitals": {"federation.rounds": 4, "federation.epochs": 4, "privacy.epsilon": [1.0]},
    "lora-mnist": {"federation.samples": 200, "federation.rounds": 8, "privacy.epsilon": [3.0]},
    "mnist-best-ablation": {"federation.rounds": 30},
    "mnist-cnn-single-epoch": {"federation.samples": 1000, "federation.rounds": 5},
    "mnist-heterogeneous": {"federation.silos": 20, "federation.samples": 6000, "federation.rounds": 30},
    "mnist-multi-epoch": {"federation.samples": 6000, "privacy.mu": [1.0]},
    "mnist-optimizers": _TENTH,
    "mnist-single-epoch": {"federation.samples": 6000, "federation.rounds": [16]},
    "mnist-single-epoch-best": {"federation.samples": 6000, "privacy.mu": [1.0]},
    "mnist-trusted-best": {"federation.rounds": 30, "privacy.mu": [4.0]},
    "mnist-trusted": {"federation.silos": [100], **_TENTH},
    "mnist-untrusted-best": {"federation.rounds": 30, "privacy.mu": [4.0]},
    "mnist-untrusted": {"federation.silos": [100], **_TENTH},
    "momentum-as-printed": {"federation.rounds": 1500, "privacy.epsilon": [4.0]},
    "multi-epoch-noise": _TENTH,
    "noise-mechanisms": _TENTH,
    "nonconvex-momentum": {"federation.samples": 4000, "federation.epochs": 2, "privacy.epsilon": [4.0]},
    "nonsmooth-goldstein": {"federation.rounds": [500], "privacy.mu": [4.0]},
    "one-secret-pass": _TENTH,
    "quickstart": {"federation.rounds": 60},
    "sentences": {"federation.samples": 800, "federation.rounds": 12, "privacy.epsilon": [3.0]},
    "single-epoch-theorem": {"federation.samples": [256, 529]},
    "tighter": {"data.name": ["mnist"], "label.budget": ["epsilon 1.13"], **_TENTH},
    "tighter-240": {"data.name": ["mnist"], "label.budget": ["epsilon 1.13"], "federation.samples": 9600},
    "tighter-clients": {"data.name": ["mnist"], **_FEW_CLIENTS},
    "worth-fashion-mnist-10": _TENTH,
    "worth-mnist-10": _TENTH,
    "worth-mnist-100": {"federation.rounds": 60},
}  # fmt: skip
"""None of them reads more than 12,000 of MNIST's training records."""


def run(names: Sequence[str] = ()) -> None:
    """Run the scenarios named, or all, as many at a time as cores; exit code 1 and an exception if one fails."""
    paths = [SCENARIOS / f"{name}.toml" for name in names] or sorted(SCENARIOS.glob("*.toml"))
    os.environ.setdefault("FEDPRIV_WEIGHTS", str(WEIGHTS))
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), torch.set_num_threads, (1,)) as cores,
    ):
        for said in cores.map(partial(run_one, folder=Path(folder)), paths):
            print(said, flush=True)


def run_one(path: Path, folder: Path) -> str:
    """Run one scenario here; its cells and seconds."""
    started = time.perf_counter()
    results = fedpriv.run(path, set=reduced(path), out=folder / path.stem)
    return f"{path.stem}: {len(results.cells)} cells, {time.perf_counter() - started:.0f} s"


def reduced(path: Path) -> dict[str, Any]:
    """The overrides that make a scenario small; swept keys keep the first value they are narrowed to."""
    wanted = {"seeds": [0], **SMALLER.get(path.stem, {})}
    axes = read_toml(path).get("sweep", {})
    return {
        key: value if key in axes or not isinstance(value, list) or key == "seeds" else value[0]
        for key, value in wanted.items()
    }


if __name__ == "__main__":
    run(sys.argv[1:])
