"""Guards as an attacker of the server's side meets them: processes behind a socket, or objects for many trials."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.clients.app import ask_release
from fedpriv.protocol.messages import Refusal
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.guard import Guard
from fedpriv.silo.masks import Masker
from tests.conftest import small_tree
from tests.silo import guarded
from tests.silo.guarded import guard_of, start_daemon

POLICY = {"relation": "replace-one", "clip": 2.0**20, "rounds": 200, "budget": 4.0}
KEPT_STATE: dict[str, dict[str, Any]] = {
    "tree": {"algorithm": {"name": "dp-ftrl", "mechanism": "tree", "clip": 1.0, "step": 0.1}},
    "banded": {"algorithm": {"name": "dp-ftrl", "mechanism": "banded", "bands": 3, "clip": 1.0, "step": 0.1}},
    "λ-CGD, two epochs": {
        "algorithm": {"name": "dp-ftrl", "mechanism": "lambda-cgd", "theta": [0.9], "clip": 1.0, "step": 0.1},
        "federation": {"silos": 3, "rounds": 8, "epochs": 2},
    },
    "buffers that decay": {
        "algorithm": {
            "name": "momentum-tree", "mechanism": "blt", "theta": [0.65, 0.4], "phi": [0.5, 0.2], "clip": 1.0,
            "alpha": 0.3, "step": 0.1,
        },
    },
    "buffers, scaled": {
        "algorithm": {
            "name": "dp-ftrl", "mechanism": "blt", "theta": [0.95, 0.6], "phi": [0.7, 0.2], "scale": True,
            "clip": 1.0, "step": 0.1,
        },
    },
    "decaying tree, two epochs": {
        "algorithm": {"name": "momentum-tree", "clip": 1.0, "alpha": 0.3, "step": 0.1},
        "federation": {"silos": 3, "rounds": 8, "epochs": 2},
    },
    "decaying tree, fresh permutations": {
        "algorithm": {"name": "momentum-tree", "order": "fresh", "clip": 1.0, "alpha": 0.3, "step": 0.1},
        "federation": {"silos": 3, "rounds": 8, "epochs": 2},
    },
    "paper's tree": {
        "algorithm": {"name": "momentum-tree", "clip": 1.0, "alpha": 0.5, "step": 0.1, "calibration": "paper"},
        "federation": {"silos": 3, "rounds": 8, "epochs": 2},
    },
    "aligned differences, clipped in parts": {
        "algorithm": {
            "name": "momentum-tree-aligned", "clip": 1.0, "alpha": 0.3, "step": 0.1, "gamma": 0.3,
            "difference_clip": 0.5, "residual_clip": 0.5,
        },
        "federation": {"silos": 3, "rounds": 8, "epochs": 2},
    },
    "trees that restart": {
        "algorithm": {
            "name": "goldstein-single-pass", "anchor_clip": 1.0, "clip": 0.5, "period": 4, "radius": 0.1,
            "smoothing": 0.01, "window": 2, "step": 0.1, "oracle": "first-order",
        },
    },
    "leaves": {
        "algorithm": {
            "name": "goldstein-erm", "anchor_clip": 1.0, "clip": 0.5, "period": 4, "radius": 0.1,
            "smoothing": 0.01, "window": 2, "step": 0.1, "oracle": "first-order",
        },
        "federation": {"silos": 3, "rounds": 8, "epochs": 8, "batch": 4},
    },
    "fresh noise": {},
}  # fmt: skip
"""A scenario for every mechanism that guards accept, by what it keeps from round to round."""


def scenario(trust: str = "untrusted", **overrides: Any) -> str:
    """A scenario as JSON; `overrides` as for `small_tree`, whole sections without their trust."""
    if isinstance(algorithm := overrides.get("algorithm"), dict):
        overrides["algorithm"] = {**algorithm, "trust": trust}
        overrides.setdefault("privacy", {"relation": "replace-one", "mu": 2.0})
        overrides["algorithm__trust"] = trust
    tree = small_tree(**{"algorithm__trust": trust, **overrides})
    return json.dumps(resolve_cell(tree, "test").canonical_data(), sort_keys=True)


def write_policy(folder: Path, images: NDArray[Any], labels: NDArray[Any], number: int = 0, **allow: Any) -> Path:
    """A silo's policy, as wide as an attacker could wish but for its budget, over these records."""
    return guarded.write_policy(folder, images, labels, number, **{**POLICY, **allow})


def random_records(count: int = 40, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, 28, 28), dtype=np.uint8), generator.integers(0, 10, count)


def guard_for(folder: Path, images: NDArray[Any], labels: NDArray[Any], number: int = 0, **allow: Any) -> Guard:
    """A guard of this process over these records."""
    return guard_of(write_policy(folder, images, labels, number, **allow))


class Socket:
    """A real guard process, and an attacker who may send anything to its socket."""

    def __init__(self, folder: Path, images: NDArray[Any], labels: NDArray[Any], **allow: Any) -> None:
        self.policy = write_policy(folder, images, labels, **allow)
        self.path, self.process = folder / "0.sock", start_daemon(self.policy)

    def ask(self, cell: str, t: int, query: NDArray[Any], run: str = "run") -> NDArray[Any] | Refusal:
        return ask_release(self.path, run, cell, t, query)

    def answered(self, cell: str, t: int, query: NDArray[Any], run: str = "run") -> NDArray[Any]:
        answer = self.ask(cell, t, query, run)
        assert not isinstance(answer, Refusal), answer
        return answer

    def refused(self, cell: str, t: int, query: NDArray[Any], run: str = "run") -> str:
        answer = self.ask(cell, t, query, run)
        assert isinstance(answer, Refusal), answer
        return answer.reason

    def restart(self) -> None:
        """SIGKILL, and up again."""
        self.stop()
        self.process = start_daemon(self.policy)

    def stop(self) -> str:
        """SIGKILL; what it wrote to its log."""
        self.process.kill()
        return self.process.communicate()[1]


@contextmanager
def guard_process(folder: Path, images: NDArray[Any], labels: NDArray[Any], **allow: Any) -> Iterator[Socket]:
    """A real guard process over these records; at the end it has to be alive."""
    guard = Socket(folder, images, labels, **allow)
    try:
        yield guard
        assert guard.process.poll() is None, guard.process.communicate()
    finally:
        guard.stop()


def zeros(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.zeros(7850, dtype=dtype)


def cards(own: bytes) -> bytes:
    """The cards of three silos, of which two are the server's inventions."""
    return b"".join([own, *(Masker(bytes([n]) * 32, n).public_key + bytes(64) for n in (1, 2))])


def never(*_: object, **__: object) -> None:
    raise AssertionError("a record was read")
