"""Optimizers driven over fixed releases, and theorems as the command prints them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typer.testing import CliRunner

from fedpriv.cli.app import app
from fedpriv.loss.estimators import Round


def plain_round(t: int) -> Round:
    """A round with one term, no memory, clip 1."""
    return Round(t, (1.0,), 0.0, 1.0, 1.0)


def drive(
    optimizer: Any, start: Tensor, releases: Iterable[Tensor], round_at: Callable[[int], Round] = plain_round
) -> list[Any]:
    """The states before rounds 1, 2, … and after the last."""
    states = [optimizer.start(start)]
    for t, released in enumerate(releases, start=1):
        states.append(optimizer.update(states[-1], released, round_at(t)))
    return states


def vectors(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def draw_normals(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def printed_theorem(file: Path, *options: str) -> dict[str, Any]:
    """The only point of `fedpriv privacy theorem --json`."""
    done = CliRunner().invoke(app, ["privacy", "theorem", str(file), *options, "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    (point,) = json.loads(done.output)["points"]
    return dict(point)
