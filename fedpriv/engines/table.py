"""The engines by name; each is imported when it is asked for, because each is heavy in its own way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedpriv.engines.base import LOCAL, Connection, Engine
from fedpriv.errors import InputError, suggestion
from fedpriv.running.checkpoint import NO_CHECKPOINTS, Checkpoints
from fedpriv.scenario import Cell

Groups = Callable[[Sequence[Cell]], list[list[int]]]


@dataclass(frozen=True)
class EngineRow:
    """One engine: how it is made for a run's folder, and what a caller has to know of it."""

    made: Callable[[Path, Connection, Checkpoints], Engine]
    connects: bool = False
    """Whether it can use a SuperLink that runs already, with records that are not here."""
    resumes_cells: bool = False
    """Whether a cell that failed goes on from its last round: its silos and server keep what they released."""
    releases: bool = False
    """Whether its noise protects somebody: releases are integers, with keys of the operating system."""
    groups: Groups | None = None
    """The cells that it computes together, as places in the list; None if it has processes of its own."""


def _vectorized(_: Path, __: Connection, kept: Checkpoints) -> Engine:
    from fedpriv.engines.vectorized.engine import run_vectorized

    return partial(run_vectorized, kept=kept)


def _vectorized_groups(cells: Sequence[Cell]) -> list[list[int]]:
    from fedpriv.engines.vectorized.grouping import groups_of

    return groups_of(cells)


def _one_by_one(cells: Sequence[Cell]) -> list[list[int]]:
    return [[place] for place in range(len(cells))]


def _inprocess(_: Path, __: Connection, ___: Checkpoints) -> Engine:
    from fedpriv.engines.inprocess import run_inprocess

    return run_inprocess


def _ray(_: Path, __: Connection, ___: Checkpoints) -> Engine:
    from fedpriv.engines.ray import run_ray

    return run_ray


def _deployment(folder: Path, connection: Connection, _: Checkpoints) -> Engine:
    from fedpriv.engines.deployment import run_deployment

    return partial(run_deployment, folder=folder, connection=connection)


ENGINES = {
    "vectorized": EngineRow(_vectorized, groups=_vectorized_groups),
    "inprocess": EngineRow(_inprocess, groups=_one_by_one),
    "ray": EngineRow(_ray),
    "deployment": EngineRow(_deployment, connects=True, resumes_cells=True, releases=True),
}


def engine_row(name: str) -> EngineRow:
    """InputError for an engine that there is not."""
    if name not in ENGINES:
        raise InputError(f"--engine {name}: known engines are {', '.join(ENGINES)}{suggestion(name, ENGINES)}")
    return ENGINES[name]


def engine_named(
    name: str, folder: Path = Path(), connection: Connection = LOCAL, kept: Checkpoints = NO_CHECKPOINTS
) -> Engine:
    """The engine for a run whose results go to `folder`; InputError for a connection that it cannot use.

    `kept` is where it keeps checkpoints of cells that it is in the middle of, if it does.
    """
    row = engine_row(name)
    if not row.connects and connection != LOCAL:
        able = ", ".join(other for other, each in ENGINES.items() if each.connects)
        raise InputError(f"--engine {name}: --superlink and --root-certificates are for --engine {able}")
    return row.made(folder, connection, kept)
