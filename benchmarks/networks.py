"""Convolutional networks with 100 silos on the vectorized engine, beside Opacus: microseconds per record.

Whole rounds of DP-SGD, one fresh record of every silo: gradients clipped to norm 1 one by one, noise of a trusted
server, a step.  Networks of 26,010 and of 1,000,150 parameters.  For Opacus the same records are one batch.  The
contenders take turns; medians are shown, of the clock and of the processor.  Opacus has an environment of its own,
which `make bench-peers` makes.
"""

import os
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import fedpriv
from benchmarks.client_models import CLASSES, NETWORKS
from benchmarks.clock import timed
from benchmarks.peers import python_of, told_by_peer
from fedpriv.scenario.load import scenario_of
from fedpriv.scenario.schema import Cell

_TURNS = 3
_SILOS = 100
ROUNDS = {"cnn": 40, "wide-cnn": 6}
_DATA = "benchmark-pictures"
_OURS = "fedpriv, vectorized"
_SCRIPT = "opacus_rounds.py"


def cell(network: str, device: str = "cpu") -> Cell:
    tree: dict[str, Any] = {
        "name": "networks",
        "data": {"name": _DATA},
        "model": {"name": f"benchmark-{network}"},
        "federation": {"silos": _SILOS, "rounds": ROUNDS[network]},
        "algorithm": {"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1},
        "privacy": {"relation": "zero-out", "mu": 4.0},
        "run": {"evaluations": 1, "device": device},
    }
    return scenario_of(tree, "benchmarks/networks.py").points[0].cell


class _Took(NamedTuple):
    """Microseconds per record."""

    wall: float
    processor: float


def _contenders(network: str) -> dict[str, Callable[[], _Took | None]]:
    """By name: one measurement, None where the peer is not here."""
    return {
        _OURS: lambda: _fedpriv(network),
        "Opacus 1.6.0, hooks": lambda: _opacus("hooks", network),
        "Opacus 1.6.0, ghost norms": lambda: _opacus("ghost", network),
    }


def _fedpriv(network: str) -> _Took:
    clock = timed("vectorized", cell(network))
    return _of(clock.rounds_per_second, clock.processor_per_round)


def _opacus(mode: str, network: str) -> _Took | None:
    told = told_by_peer("opacus", _SCRIPT, mode, str(ROUNDS[network]), network)
    return None if told is None else _of(told["rounds_per_second"], told["processor_per_round"])


def _of(rounds_per_second: float, processor_per_round: float) -> _Took:
    return _Took(1e6 / (rounds_per_second * _SILOS), 1e6 * processor_per_round / _SILOS)


def _pictures() -> Any:
    """Noise, which costs what pictures cost; few test records, since evaluations are not what is compared."""
    draw, count = np.random.default_rng(0), _SILOS * max(ROUNDS.values())
    features = draw.random((count, 784), np.float32)
    labels = draw.integers(0, CLASSES, count)
    return (features, labels), (features[:100], labels[:100])


def register() -> None:
    """The data and the networks, by the names that cells have for them."""
    fedpriv.add_data(_DATA, _pictures, classes=CLASSES)
    for network in ROUNDS:
        fedpriv.add_model(f"benchmark-{network}", lambda _shape, _classes, name=network: NETWORKS[name]())


def run() -> None:
    register()
    print("| network | who | us per record, median (range) | x fedpriv | processor us | x fedpriv | load |")
    print("|---|---|---|---|---|---|---|")
    for network in ROUNDS:
        took: dict[str, list[_Took]] = {}
        for _ in range(_TURNS):
            for name, measure in _contenders(network).items():
                if (one := measure()) is not None:
                    took.setdefault(name, []).append(one)
        for name in took:
            walls = sorted(one.wall for one in took[name])
            wall, processor = _medians(took[name])
            ours, ours_processor = _medians(took[_OURS])
            print(
                f"| {network} | {name} | {wall:,.0f} ({walls[0]:,.0f} - {walls[-1]:,.0f}) | {wall / ours:.2f} "
                f"| {processor:,.0f} | {processor / ours_processor:.2f} | {os.getloadavg()[0]:.1f} |",
                flush=True,
            )
    if not python_of("opacus").exists():
        print("Opacus is left out: it has no environment here; make bench-peers")


def _medians(several: list[_Took]) -> _Took:
    return _Took(*(statistics.median(column) for column in zip(*several, strict=True)))
