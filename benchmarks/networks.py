"""Convolutional networks with 100 silos on the vectorized engine, beside Opacus: microseconds per record.

Whole rounds of DP-SGD, one fresh record of every silo: gradients clipped to norm 1 one by one, noise of a trusted
server, a step.  Networks of 26,010 and of 1,000,150 parameters.  For Opacus the same records are one batch.  The
contenders come one after another; seconds of the clock and of the processor are shown.  Opacus has an environment
of its own, which `make bench-peers` makes.
"""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import fedpriv
from benchmarks.client_models import CLASSES, NETWORKS
from benchmarks.clock import timed
from benchmarks.peers import python_of, told_by_peer
from fedpriv.scenario.load import parse_scenario
from fedpriv.scenario.schema import Cell

_TURNS = 1
_SILOS = 100
ROUNDS = {"cnn": 40, "wide-cnn": 6}
_DATA = "benchmark-pictures"
_CONTENDERS = _OURS, _HOOKS, _GHOST = "fedpriv, vectorized", "Opacus 1.6.0, hooks", "Opacus 1.6.0, ghost norms"
_SCRIPT = "opacus_rounds.py"


def cell(network: str) -> Cell:
    tree: dict[str, Any] = {
        "name": "networks",
        "data": {"name": _DATA},
        "model": {"name": f"benchmark-{network}"},
        "federation": {"silos": _SILOS, "rounds": ROUNDS[network]},
        "algorithm": {"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1},
        "privacy": {"relation": "zero-out", "mu": 4.0},
        "run": {"evaluations": 1},
    }
    return parse_scenario(tree, "benchmarks/networks.py").points[0].cell


class _Took(NamedTuple):
    """Microseconds per record."""

    wall: float
    processor: float


def _contenders(network: str) -> dict[str, Callable[[], _Took | None]]:
    """By name: one measurement, None where the peer is not here."""
    return {
        _OURS: lambda: _fedpriv(network),
        _HOOKS: lambda: _opacus("hooks", network),
        _GHOST: lambda: _opacus("ghost", network),
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
    found: dict[str, dict[str, list[_Took]]] = {}
    for network in ROUNDS:
        took = found[network] = dict[str, list[_Took]]()
        for _ in range(_TURNS):
            for name, measure in _contenders(network).items():
                if (one := measure()) is not None:
                    took.setdefault(name, []).append(one)
    for place, clock in enumerate(_Took._fields):
        print(f"Microseconds per record, {clock}:\n")
        print("| network | fedpriv, vectorized | Opacus hooks | × | Opacus ghost norms | × |")
        print("|---|---|---|---|---|---|")
        for network, took in found.items():
            print(_row(network, {name: [one[place] for one in several] for name, several in took.items()}))
        print()
    print(f"turns: {_TURNS}; load {os.getloadavg()[0]:.1f}")
    if not python_of("opacus").exists():
        print("Opacus is left out: it has no environment here; make bench-peers")


def _row(network: str, took: Mapping[str, Sequence[float]]) -> str:
    ours = statistics.median(took[_OURS])
    entries = [f"{network}, {sum(part.numel() for part in NETWORKS[network]().parameters()):,} parameters"]
    for name in _CONTENDERS:
        if several := took.get(name):
            middle = statistics.median(several)
            entries.append(f"{middle:,.0f} ({min(several):,.0f} - {max(several):,.0f})")
            entries += [f"{middle / ours:.2f}"] * (name != _OURS)
        else:
            entries += ["-", "-"]
    return f"| {' | '.join(entries)} |"
