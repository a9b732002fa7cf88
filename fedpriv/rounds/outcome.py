"""Outcomes of cells, observers of runs and checkpoints of simulations: all that an engine hands out.

`Finished` is the outcome of a cell, whichever engine ran it.  `RunObserver` is one protocol for servers, engines,
results, progress, trackers and your own.

A checkpoint lets a simulation that was killed resume.  It is bytes: a header in JSON and the tensors as they are,
without code.  It says which cells it is of and which versions computed it, because only the same ones would have
computed the same numbers.  States are trees of tensors, numbers, tuples, named tuples and dataclasses.
"""

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.errors import FedprivError, RunError
from fedpriv.loss.objective import Objective, Records
from fedpriv.rounds.fitted import Fitted
from fedpriv.rounds.ledger import ReleaseStream
from fedpriv.rounds.plan import Plan
from fedpriv.scenario.load import Scenario
from fedpriv.scenario.schema import Cell


class WithMetrics:
    """The usual figures of `metrics`, by name."""

    if TYPE_CHECKING:  # a field of dataclasses

        @property
        def metrics(self) -> Mapping[str, float]: ...

    @property
    def test_loss(self) -> float:
        return self.metrics["test_loss"]

    @property
    def test_accuracy(self) -> float:
        """A share, 0 … 1; KeyError for a regression, which has none."""
        return self.metrics["test_accuracy"]


@dataclass(frozen=True)
class Finished(WithMetrics):
    """What one finished cell gave.

    `metrics` are those of its published model on the test set, by name: "test_loss", for a classification
    "test_accuracy" (a share), and what else the objective knows.

    `fraction_clipped` is None where silos do not tell; `wall_seconds` is its share of the time of cells that
    were run together; `releases` is its ledger; `gradient_evaluations` counts gradients of single records of all
    silos.
    """

    metrics: Mapping[str, float]
    fraction_clipped: float | None
    wall_seconds: float
    releases: tuple[ReleaseStream, ...]
    gradient_evaluations: int
    model: NDArray[np.floating]
    noise: Literal["simulation", "release"] = "simulation"
    """Whose key the noise was drawn with: the scenario's seed, or the operating system's."""
    missed: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Silo -> rounds in which it did not answer, and counted with an increment of 0."""
    bytes_sent: int = 0
    """By one silo in all rounds, headers apart."""
    evaluations: tuple[ReleaseStream, ...] = ()
    """What evaluations released of the silos' test records, which are other records than those of `releases`;
    empty where the server evaluated on a public test set."""


def finished_after(
    plan: Plan,
    rounds: int,
    model: NDArray[np.floating],
    metrics: Mapping[str, float],
    fraction_clipped: float | None,
    wall_seconds: float,
    missed: Mapping[int, Sequence[int]] | None = None,
    evaluations: tuple[ReleaseStream, ...] = (),
) -> Finished:
    """The outcome of a plan's first `rounds` rounds, its ledger and its costs with it."""
    return Finished(
        metrics=metrics,
        fraction_clipped=fraction_clipped,
        wall_seconds=wall_seconds,
        releases=plan.releases(rounds),
        gradient_evaluations=plan.gradient_evaluations(rounds, missed),
        model=model,
        missed=missed or {},
        bytes_sent=plan.bytes_sent(rounds),
        evaluations=evaluations,
    )


def measured(objective: Objective, model: Tensor, test: Records, names: Sequence[str]) -> list[dict[str, float]]:
    """The metrics of a model (d,), or of each of several (n, d), on the test set.

    RunError, with its name in `names`, for one whose loss is not finite.
    """
    evaluation = objective.evaluate(model, test)
    for name, finite in zip(names, torch.isfinite(evaluation.loss).reshape(-1).tolist(), strict=True):
        if not finite:
            raise RunError(f"{name}: the test loss is not finite")
    columns = {name: values.reshape(-1).tolist() for name, values in evaluation.named().items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def evaluation_rounds(rounds: int, evaluations: int) -> frozenset[int]:
    """`evaluations` rounds evenly spaced over 1 … rounds, the last always among them."""
    count = min(rounds, evaluations)
    return frozenset(-(-rounds * (place + 1) // count) for place in range(count))


class Counts(NamedTuple):
    """A silo's counts of one round's records: how many took part, and how many of those were clipped."""

    drawn: int
    clipped: int | None
    """None where nothing was counted: integers are not asked what became of their increments."""

    def with_those(self, others: "Counts") -> "Counts":
        clipped = None if self.clipped is None or others.clipped is None else self.clipped + others.clipped
        return Counts(self.drawn + others.drawn, clipped)

    @property
    def fraction_clipped(self) -> float | None:
        """The share of records, None where nothing was counted."""
        return None if self.clipped is None else self.clipped / max(1, self.drawn)


class RunObserver:
    """Receives the events of a run; override the methods you need.  All calls come from one process and thread.

    `place` is a cell's number: in `Scenario.points` for observers of a run, in the list of cells for the observer
    of an engine, and 0 for that of a server, which runs one cell.
    """

    def fitted(self, fit: Fitted) -> None:
        """Noise was fitted to what some cells publish; called before `started`, once for each such fit."""

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        """The cells at `places` are about to be run, with results in `folder`; finished ones are left out."""

    def advanced(self, rounds: int) -> None:
        """So many more rounds, summed over cells, are done."""

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        """A cell was evaluated on the test set after round t: test_loss, test_accuracy (a share), … by name."""

    def finished(self, place: int, finished: Finished) -> None:
        """A cell is finished."""

    def lost(self, worker: str, places: Sequence[int]) -> None:
        """A worker died; the cells it had are run again."""

    def noted(self, line: str) -> None:
        """Something that a person should know of, in one line; nothing failed."""

    def failed(self, error: FedprivError) -> None:
        """The run failed; the error is also raised to whoever started it."""

    def ended(self) -> None:
        """The run is over: every cell is finished, or it was stopped, or it failed."""


class Observers(RunObserver):
    """Several as one; an engine numbers the cells by their place in `places`, and observers hear those."""

    def __init__(self, places: Sequence[int], observers: Sequence[RunObserver]) -> None:
        self._places, self._observers = places, observers

    def fitted(self, fit: Fitted) -> None:
        for observer in self._observers:
            observer.fitted(fit)

    def advanced(self, rounds: int) -> None:
        for observer in self._observers:
            observer.advanced(rounds)

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        for observer in self._observers:
            observer.evaluated(self._places[place], t, metrics)

    def finished(self, place: int, finished: Finished) -> None:
        for observer in self._observers:
            observer.finished(self._places[place], finished)

    def lost(self, worker: str, places: Sequence[int]) -> None:
        for observer in self._observers:
            observer.lost(worker, [self._places[place] for place in places])

    def noted(self, line: str) -> None:
        for observer in self._observers:
            observer.noted(line)

    def failed(self, error: FedprivError) -> None:
        for observer in self._observers:
            observer.failed(error)


FORMAT = 2
_NUMBERS = (bool, int, float, str, type(None))
_DAMAGED = (ValueError, KeyError, TypeError, IndexError, EOFError, OSError, zipfile.BadZipFile)

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
class Checkpoint:
    """Cells that are computed together, after round `t`."""

    t: int
    seconds: float
    """For which they ran, all attempts together."""
    evaluations: Sequence[tuple[int, Sequence[Metrics]]]
    """The rounds in which they were evaluated, with the metrics of every cell."""
    states: Any
    """What round t + 1 starts from."""


class Header(NamedTuple):
    """What a checkpoint is of."""

    versions: Mapping[str, str]
    cells: tuple[str, ...]
    """The digest of every cell."""

    def refusal(self) -> str | None:
        """Why these versions cannot go on from it; None if they can."""
        here = installed()
        differing = [name for name in here if self.versions.get(name) != here[name]]
        return ", ".join(f"{name} was {self.versions.get(name)} and is {here[name]}" for name in differing) or None


def installed() -> dict[str, str]:
    """The versions that results depend on."""
    return {name: metadata.version(name) for name in ("fedpriv", "torch", "numpy", "cryptography")}


def digest_of(cell: Cell) -> str:
    """Of everything that decides what a cell computes."""
    return hashlib.sha256(json.dumps(cell.canonical(), sort_keys=True).encode()).hexdigest()[:32]


def name_of(cells: Sequence[str]) -> str:
    """Under which a checkpoint of cells with these digests is kept; their order counts."""
    return hashlib.sha256(" ".join(cells).encode()).hexdigest()[:16]


def packed(checkpoint: Checkpoint, cells: Sequence[str]) -> bytes:
    """TypeError for a state that has something else than what this module knows."""
    arrays: list[NDArray[Any]] = []
    header = {
        "format": FORMAT,
        "versions": installed(),
        "cells": list(cells),
        "t": checkpoint.t,
        "seconds": checkpoint.seconds,
        "evaluations": checkpoint.evaluations,
        "states": _taken_apart(checkpoint.states, arrays),
    }
    content = io.BytesIO()
    np.savez(
        content,
        allow_pickle=False,
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        **{f"array{place}": array for place, array in enumerate(arrays)},
    )
    return content.getvalue()


def header_of(content: bytes) -> Header:
    """ValueError for what is no checkpoint of this format, or a damaged one."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            header = _header(file)
        return Header(dict(header["versions"]), tuple(header["cells"]))
    except _DAMAGED as error:
        raise _damage(error) from None


def unpacked(content: bytes, like: Any, device: torch.device) -> Checkpoint:
    """The inverse of `packed`; `like` are states of the same types, such as those before round 1.

    ValueError as in `header_of`.
    """
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            header = _header(file)
            states = _put_together(header["states"], file, like, device)
        evaluations = [(t, metrics) for t, metrics in header["evaluations"]]
        return Checkpoint(header["t"], header["seconds"], evaluations, states)
    except _DAMAGED as error:
        raise _damage(error) from None


def _header(file: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(file["header"].tobytes())
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, this version of fedpriv reads format {FORMAT}")
    return header


def _damage(error: Exception) -> ValueError:
    return ValueError(f"not a whole checkpoint ({type(error).__name__}: {error})")


def _taken_apart(state: Any, arrays: list[NDArray[Any]]) -> Any:
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
        return [_taken_apart(part, arrays) for part in state]
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return [_taken_apart(getattr(state, field.name), arrays) for field in dataclasses.fields(state)]
    if isinstance(state, _NUMBERS):
        return {"value": state}
    raise TypeError(f"a state with a {type(state).__name__} cannot be kept")


def _put_together(tree: Any, arrays: Mapping[str, NDArray[Any]], like: Any, device: torch.device) -> Any:
    if isinstance(tree, dict):
        if "value" in tree:
            return tree["value"]
        return torch.from_numpy(arrays[f"array{tree['array']}"]).clone().to(device).expand(tree["shape"])
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        names = [field.name for field in dataclasses.fields(like)]
        parts = [
            _put_together(part, arrays, getattr(like, name), device)
            for name, part in zip(names, tree, strict=True)
        ]
        return type(like)(**dict(zip(names, parts, strict=True)))
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(
            *(_put_together(part, arrays, each, device) for part, each in zip(tree, like, strict=True))
        )
    return tuple(_put_together(part, arrays, None, device) for part in tree)
