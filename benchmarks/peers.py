"""Rounds per second of fedpriv's engines beside Flower's Ray engine, pfl and Opacus, on the same work, in one run.

Softmax regression 785 x 10, 100 clients in every round, one fresh sample of each, one gradient clipped to norm 1,
Gaussian noise central (drawn by the server) or local (by every client): DP-SGD, in peers federated averaging with
one local step.  The contenders take turns, so that a change of the machine's load meets all of them; medians are
shown.

pfl and Opacus have environments of their own, which `make bench-peers` makes; without one its row stays empty.
Flower's Ray engine runs the very ServerApp, strategy and ClientApp that fedpriv's in-process engine runs.
"""

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import floor
from benchmarks.clock import rounds_per_second
from fedpriv.scenario.load import parse_scenario
from fedpriv.scenario.schema import Cell

_TURNS = 2
_RAY = "Flower 1.41, Ray engine"
_PFL, _IN_PROCESS = "pfl 0.6.0", "fedpriv, in process"
_OPACUS = {"hooks": "Opacus 1.6.0, hooks", "ghost": "Opacus 1.6.0, ghost norms"}
_ONCE = {_RAY, _PFL, _IN_PROCESS, *_OPACUS.values()}
"""Measured in the first turn alone: they take long, and differ from others by more than turns do."""
_SILOS, _PLACES = 100, 600  # one pass over MNIST
_ROOT = Path(__file__).resolve().parents[1]
_TRUST = {"central": "trusted", "local": "untrusted"}
_TARGETS = (
    ("vectorized at least 1,000 × Flower's Ray engine, central noise", "fedpriv, vectorized", _RAY),
    ("vectorized at least 150 × pfl, central noise", "fedpriv, vectorized", _PFL),
    (
        "vectorized at least 0.5 × the floor's rounds, central noise",
        "fedpriv, vectorized",
        "floor: draws and products",
    ),
)
"""What is printed, who is measured, and beside whom."""

Measure = Callable[[], float | None]
"""Rounds per second; None where the peer is not here."""


@dataclass(frozen=True)
class Contender:
    """A row of the table: how to measure it with central and with local noise, as far as it has them."""

    name: str
    measures: Mapping[str, Measure]


def cell(noise: str, epochs: int, rounds: int = _PLACES, drawn: str = "per-silo") -> Cell:
    """DP-SGD on MNIST with the given noise, `epochs` passes of `rounds` rounds each."""
    tree: dict[str, Any] = {
        "name": "peers",
        "data": {"name": "mnist"},
        "federation": {"silos": _SILOS, "rounds": rounds * epochs, "epochs": epochs},
        "algorithm": {"name": "dp-sgd", "trust": _TRUST[noise], "clip": 1.0, "step": 0.1},
        "privacy": {"relation": "zero-out", "mu": 4.0},
        "run": {"evaluations": 1, "noise": drawn},
    }
    return parse_scenario(tree, "benchmarks/peers.py").points[0].cell


def contenders() -> list[Contender]:
    """Enough rounds of each for some seconds."""

    def on(engine: str, cells: Mapping[str, Cell]) -> dict[str, Measure]:
        return {noise: partial(rounds_per_second, engine, one) for noise, one in cells.items()}

    def peer(name: str, script: str, variants: Mapping[str, str], *words: str) -> dict[str, Measure]:
        return {noise: partial(_rate, name, script, variant, *words) for noise, variant in variants.items()}

    def opacus(mode: str) -> dict[str, Measure]:
        return peer("opacus", "opacus_rounds.py", {"central": mode}, "600", "softmax")

    return [
        Contender(
            "fedpriv, vectorized", on("vectorized", {"central": cell("central", 10), "local": cell("local", 2)})
        ),
        Contender(
            "fedpriv, vectorized, noise of the mean drawn at once",
            on("vectorized", {"local": cell("local", 10, drawn="aggregate")}),
        ),
        Contender(_IN_PROCESS, on("inprocess", {noise: cell(noise, 1, 60) for noise in _TRUST})),
        Contender(_RAY, on("ray", {noise: cell(noise, 1, 8) for noise in _TRUST})),
        Contender(_PFL, peer("pfl", "pfl_rounds.py", {"central": "central", "local": "local"}, "20")),
        *(Contender(name, opacus(mode)) for mode, name in _OPACUS.items()),
        Contender("floor: draws and products", {noise: partial(_floor, noise) for noise in _TRUST}),
    ]


def _rate(name: str, script: str, *words: str) -> float | None:
    told = told_by_peer(name, script, *words)
    return None if told is None else told["rounds_per_second"]


def told_by_peer(name: str, script: str, *words: str) -> dict[str, float] | None:
    """What a script here prints in a peer's environment; None if that is missing, or the script fails."""
    python = python_of(name)
    if not python.exists():
        return None
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name(script)), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        print(f"{script} {' '.join(words)} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        return None
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def python_of(peer: str) -> Path:
    """Of the environment that `make bench-peers` makes for a peer."""
    return _ROOT / f".venv-{peer}" / "bin" / "python"


def _floor(noise: str) -> float:
    one = cell(noise, 1)
    return one.federation.total_rounds / (floor.draws(one) + floor.products([one], points=1))


def _turns(rows: list[Contender]) -> Iterator[tuple[int, str, float]]:
    """(row, noise, rounds per second), all rows once, then again all that have several turns."""
    for turn in range(_TURNS):
        for row, contender in enumerate(rows):
            for noise, measure in contender.measures.items() if turn == 0 or contender.name not in _ONCE else ():
                if (rate := measure()) is not None:
                    yield row, noise, rate


def run() -> None:
    rows = contenders()
    rates: dict[tuple[int, str], list[float]] = {}
    loads = [os.getloadavg()[0]]
    for row, noise, rate in _turns(rows):
        rates.setdefault((row, noise), []).append(rate)
        loads.append(os.getloadavg()[0])
    medians = {key: statistics.median(several) for key, several in rates.items()}
    named = {contender.name: row for row, contender in enumerate(rows)}
    ray = named[_RAY]
    print("Rounds per second, median (range); and how many times the Ray engine's.\n")
    print("| who | central noise | × Ray | local noise | × Ray |")
    print("|---|---|---|---|---|")
    for row, contender in enumerate(rows):
        entries = [contender.name]
        for noise in _TRUST:
            entries += [_entry(rates.get((row, noise), [])), _ratio(medians, (row, noise), (ray, noise))]
        print(f"| {' | '.join(entries)} |")
    loaded = f"load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores"
    print(f"\n{_TURNS} turns, one of {', '.join(sorted(_ONCE))}; {loaded}")
    print("\n| target | reached |\n|---|---|")
    for target, who, other in _TARGETS:
        print(f"| {target} | {_ratio(medians, (named[who], 'central'), (named[other], 'central'))} |")
    for who, folder in (("pfl", "pfl"), ("Opacus", "opacus")):
        if not python_of(folder).exists():
            print(f"{who} is left out: it has no environment here; make bench-peers")


def _entry(several: list[float]) -> str:
    if not several:
        return "-"
    digits = 0 if statistics.median(several) >= 100 else 1
    return f"{statistics.median(several):,.{digits}f} ({min(several):,.{digits}f} - {max(several):,.{digits}f})"


def _ratio(medians: Mapping[tuple[int, str], float], one: tuple[int, str], other: tuple[int, str]) -> str:
    if one not in medians or other not in medians:
        return "-"
    return f"{medians[one] / medians[other]:.3g}"
