"""Checkpoints, from which a simulation that was killed goes on.

A checkpoint is bytes: a header in JSON and the tensors as they are, without code.  Its header names its cells and
the versions that computed it, because only the same versions would have computed the same numbers.  States are
trees of tensors, numbers, tuples, named tuples and dataclasses.
"""

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FORMAT = 2


_PLAIN_TYPES = (bool, int, float, str, type(None))


_DAMAGE_ERRORS = (ValueError, KeyError, TypeError, IndexError, EOFError, OSError, zipfile.BadZipFile)

Metrics = Mapping[str, float]


class Checkpoints:
    """Where checkpoints are kept, by name; this one keeps none."""

    def latest(self, name: str) -> bytes | None:
        """What was kept last under this name; None where there is nothing to go on from."""
        return None

    def keep(self, name: str, content: bytes) -> None:
        """Put `content` in the place of what was kept under this name."""

    def drop(self, name: str) -> None:
        """The cells are finished, and what came of them is written."""


NO_CHECKPOINTS = Checkpoints()


@dataclass(frozen=True)
class SimulationCheckpoint:
    """Cells that are computed together, after round `t`."""

    t: int
    seconds: float
    """For which they ran, all attempts together."""
    evaluations: Sequence[tuple[int, Sequence[Metrics]]]
    """The rounds in which they were evaluated, with the metrics of every cell."""
    states: Any
    """What round t + 1 starts from."""


class CheckpointHeader(NamedTuple):
    """What a checkpoint is of."""

    versions: Mapping[str, str]
    cells: tuple[str, ...]
    """The digest of every cell."""

    def why_unusable(self) -> str | None:
        """Why these versions cannot go on from it; None if they can."""
        here = installed_versions()
        differing = [name for name in here if self.versions.get(name) != here[name]]
        return ", ".join(f"{name} was {self.versions.get(name)} and is {here[name]}" for name in differing) or None


def installed_versions() -> dict[str, str]:
    """The versions that results depend on."""
    return {name: metadata.version(name) for name in ("fedpriv", "torch", "numpy", "cryptography")}


def checkpoint_name(cells: Sequence[str]) -> str:
    """Under which a checkpoint of cells with these digests is kept; their order counts."""
    return hashlib.sha256(" ".join(cells).encode()).hexdigest()[:16]


def pack_checkpoint(checkpoint: SimulationCheckpoint, cells: Sequence[str]) -> bytes:
    """TypeError for a state that has something else than what this module knows."""
    arrays: list[NDArray[Any]] = []
    header = {
        "format": FORMAT,
        "versions": installed_versions(),
        "cells": list(cells),
        "t": checkpoint.t,
        "seconds": checkpoint.seconds,
        "evaluations": checkpoint.evaluations,
        "states": _flatten_state(checkpoint.states, arrays),
    }
    content = io.BytesIO()
    np.savez(
        content,
        allow_pickle=False,
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        **{f"array{place}": array for place, array in enumerate(arrays)},
    )
    return content.getvalue()


def read_header(content: bytes) -> CheckpointHeader:
    """ValueError for what is no checkpoint of this format, or a damaged one."""
    with _parse_checkpoint(content) as (header, _):
        return CheckpointHeader(dict(header["versions"]), tuple(header["cells"]))


def unpack_checkpoint(content: bytes, like: Any, device: torch.device) -> SimulationCheckpoint:
    """The inverse of `packed`; `like` are states of the same types, such as those before round 1.

    ValueError as in `read_header`.
    """
    with _parse_checkpoint(content) as (header, arrays):
        states = _restore_state(header["states"], arrays, like, device)
        evaluations = [(t, metrics) for t, metrics in header["evaluations"]]
        return SimulationCheckpoint(header["t"], header["seconds"], evaluations, states)


@contextmanager
def _parse_checkpoint(content: bytes) -> Iterator[tuple[dict[str, Any], Mapping[str, NDArray[Any]]]]:
    """Header and arrays; what is damaged in them is a ValueError of the block, too."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']}, this version of fedpriv reads format {FORMAT}")
            yield header, file
    except _DAMAGE_ERRORS as error:
        raise ValueError(f"not a whole checkpoint ({type(error).__name__}: {error})") from None


def _flatten_state(state: Any, arrays: list[NDArray[Any]]) -> Any:
    """The state as JSON, its tensors as places in `arrays`.

    A tensor that repeats itself along an axis stays one that does: arithmetic may round others otherwise.
    """
    if isinstance(state, Tensor):
        least = state
        for axis, stride in enumerate(state.stride()):
            least = least.narrow(axis, 0, min(1, state.shape[axis])) if stride == 0 else least
        arrays.append(least.detach().cpu().contiguous().numpy())
        return {"array": len(arrays) - 1, "shape": list(state.shape)}
    if isinstance(state, tuple):
        return [_flatten_state(part, arrays) for part in state]
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return [_flatten_state(getattr(state, field.name), arrays) for field in dataclasses.fields(state)]
    if isinstance(state, _PLAIN_TYPES):
        return {"value": state}
    raise TypeError(f"a state with a {type(state).__name__} cannot be kept")


def _restore_state(tree: Any, arrays: Mapping[str, NDArray[Any]], like: Any, device: torch.device) -> Any:
    if isinstance(tree, dict):
        if "value" in tree:
            return tree["value"]
        return torch.from_numpy(arrays[f"array{tree['array']}"]).clone().to(device).expand(tree["shape"])
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        fields = zip(dataclasses.fields(like), tree, strict=True)
        return type(like)(
            **{one.name: _restore_state(part, arrays, getattr(like, one.name), device) for one, part in fields}
        )
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(
            *(_restore_state(part, arrays, each, device) for part, each in zip(tree, like, strict=True))
        )
    return tuple(_restore_state(part, arrays, None, device) for part in tree)
