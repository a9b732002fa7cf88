"""Files that are written whole or not at all."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray


def write_json(path: Path, value: Any) -> None:
    """Plain data as JSON; ValueError for numbers that are not finite."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    _replace(path, lambda file: file.write(text.encode()))


def write_vector(path: Path, vector: NDArray[Any]) -> None:
    """A NumPy array as .npy."""
    _replace(path, lambda file: np.save(file, vector, allow_pickle=False))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    _replace(path, lambda file: file.write(content))


def _replace(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
