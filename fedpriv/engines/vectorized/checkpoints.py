"""Checkpoints from which a killed simulation resumes.

A cell is one run of a scenario: a value of each swept key, and a seed.  A checkpoint is bytes: a JSON header and
the arrays of tensors, without code.  States are trees of tensors, plain values, tuples and dataclasses.
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


_DAMAGE_ERRORS = (ValueError, KeyError, TypeError, IndexError, RuntimeError, EOFError, OSError, zipfile.BadZipFile)

Metrics = Mapping[str, float]


class Checkpoints:
    """Store of checkpoints by name.  This base class stores none."""

    def latest(self, name: str) -> bytes | None:
        """Return the last checkpoint of this name, or None without one."""
        return None

    def keep(self, name: str, content: bytes) -> None:
        """Store `content` under this name, and replace an earlier checkpoint."""

    def drop(self, name: str) -> None:
        """Delete the checkpoint of this name."""


NO_CHECKPOINTS = Checkpoints()


@dataclass(frozen=True)
class SimulationCheckpoint:
    """State of cells that are computed together, after round `t`."""

    t: int
    """Last finished round, or 0 before round 1."""
    seconds: float
    """Run time of rounds 1 … t in seconds, summed over the attempts that computed them."""
    evaluations: Sequence[tuple[int, Sequence[Metrics]]]
    """Evaluated rounds, with the metrics of each cell."""
    states: Any
    """State from which round t + 1 starts."""


class CheckpointHeader(NamedTuple):
    """Versions and cells of a checkpoint."""

    versions: Mapping[str, str]
    """Version of each package that computed the checkpoint, by name."""
    cells: tuple[str, ...]
    """Digest of each cell."""

    def why_unusable(self) -> str | None:
        """Explain why the installed versions cannot resume from the checkpoint, or return None if they can."""
        versions = installed_versions()
        differing = [name for name in versions if self.versions.get(name) != versions[name]]
        return (
            ", ".join(f"{name} was {self.versions.get(name)} and is {versions[name]}" for name in differing)
            or None
        )


def installed_versions() -> dict[str, str]:
    """Return the versions of packages that decide the numbers of a simulation, by name."""
    return {name: metadata.version(name) for name in ("fedpriv", "torch", "numpy", "scipy", "cryptography")}


def checkpoint_name(cells: Sequence[str]) -> str:
    """Return the name of the checkpoint of cells with these digests, in this order."""
    return hashlib.sha256(" ".join(cells).encode()).hexdigest()[:16]


def pack_checkpoint(checkpoint: SimulationCheckpoint, cells: Sequence[str]) -> bytes:
    """Pack a checkpoint of cells with these digests.

    Raises:
        TypeError: The state contains an object that is not a tensor, number, text, None, tuple or dataclass, or a
            tensor of a type that numpy lacks.
    """
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
        **{f"array{index}": array for index, array in enumerate(arrays)},
    )
    return content.getvalue()


def read_header(content: bytes) -> CheckpointHeader:
    """Read a checkpoint's header.

    Raises:
        ValueError: The bytes are no checkpoint of this format, or are damaged.
    """
    with _parse_checkpoint(content) as (header, _):
        return CheckpointHeader(dict(header["versions"]), tuple(header["cells"]))


def unpack_checkpoint(content: bytes, like: Any, device: torch.device) -> SimulationCheckpoint:
    """Unpack a checkpoint that `pack_checkpoint` packed, whatever its versions.

    Args:
        content: Packed checkpoint.
        like: State of the same types, such as the one before round 1.
        device: Device of the tensors.

    Raises:
        ValueError: The bytes are no checkpoint of this format, or are damaged.
        RuntimeError: torch lacks memory for a tensor.
    """
    with _parse_checkpoint(content) as (header, arrays):
        states = _restore_state(header["states"], arrays, like, device)
        evaluations = [(t, metrics) for t, metrics in header["evaluations"]]
        return SimulationCheckpoint(header["t"], header["seconds"], evaluations, states)


@contextmanager
def _parse_checkpoint(content: bytes) -> Iterator[tuple[dict[str, Any], Mapping[str, NDArray[Any]]]]:
    """Yield the header of a packed checkpoint, as parsed JSON, and its arrays by name.

    The arrays of tensors are named "array0", "array1", ….  They are read in the block, whose errors are damage.

    Raises:
        ValueError: The checkpoint has another format or is damaged.
        RuntimeError: torch lacks memory for a tensor, which is no damage.
    """
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']}, this version of fedpriv reads format {FORMAT}")
            yield header, file
    except _DAMAGE_ERRORS as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):  # torch's, of a processor or a GPU
            raise
        raise ValueError(f"not a whole checkpoint ({type(error).__name__}: {error})") from None


def _flatten_state(state: Any, arrays: list[NDArray[Any]]) -> Any:
    """Convert a state to a JSON tree, and append its tensors to `arrays`.

    A tensor becomes {"array": index in `arrays`, "shape": […]}, a number, text or None {"value": …}, and a tuple
    or dataclass the list of its parts, without its type.

    A tensor that is expanded along an axis (stride 0) is stored once and expanded again on loading, because
    arithmetic on a dense copy may round differently.

    Raises:
        TypeError: The state contains an object of another type.
    """
    if isinstance(state, Tensor):
        unexpanded = state
        for axis, stride in enumerate(state.stride()):
            unexpanded = unexpanded.narrow(axis, 0, min(1, state.shape[axis])) if stride == 0 else unexpanded
        arrays.append(unexpanded.detach().cpu().contiguous().numpy())
        return {"array": len(arrays) - 1, "shape": list(state.shape)}
    if isinstance(state, tuple):
        return [_flatten_state(part, arrays) for part in state]
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return [_flatten_state(getattr(state, field.name), arrays) for field in dataclasses.fields(state)]
    if isinstance(state, _PLAIN_TYPES):
        return {"value": state}
    raise TypeError(f"a state with a {type(state).__name__} cannot be kept")


def _restore_state(tree: Any, arrays: Mapping[str, NDArray[Any]], like: Any, device: torch.device) -> Any:
    """Restore a state from the JSON tree that `_flatten_state` made of it.

    A list of the tree becomes the dataclass or named tuple that stands at its place in `like`, and otherwise a
    plain tuple.  Within a plain tuple all lists become plain tuples.

    Args:
        tree: JSON tree of the state.
        arrays: Arrays of the tensors by name, "array0", "array1", ….
        like: State of the same types, such as the state before round 1.
        device: Device of the tensors.
    """
    if isinstance(tree, dict):
        if "value" in tree:
            return tree["value"]
        return torch.from_numpy(arrays[f"array{tree['array']}"]).clone().to(device).expand(tree["shape"])
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        fields = zip(dataclasses.fields(like), tree, strict=True)
        return type(like)(
            **{
                field.name: _restore_state(part, arrays, getattr(like, field.name), device)
                for field, part in fields
            }
        )
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(
            *(_restore_state(part, arrays, part_like, device) for part, part_like in zip(tree, like, strict=True))
        )
    return tuple(_restore_state(part, arrays, None, device) for part in tree)
