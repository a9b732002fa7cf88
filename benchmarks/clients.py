"""Cohorts of clients: rounds per second beside Flower's Ray engine and pfl, on the same work, in one run.

1,000 clients of ten records, cohorts of 100, five local steps of each, the move clipped to norm 1, noise of a
trusted server; a perceptron (784-64-10) and a convolutional network (26,010 parameters).  The contenders come one
after another; medians of turns are shown.  pfl has an environment of its own, which `make bench-peers` makes;
without it its row stays empty.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fedpriv
from benchmarks.client_models import CLIENTS, CLIP, COHORT, LOCAL_STEP, LOCAL_STEPS, MODELS, RECORDS, records_of
from benchmarks.clock import rounds_per_second
from fedpriv.scenario.load import parse_scenario
from fedpriv.scenario.schema import Cell

_TURNS = 1
_HERE = Path(__file__).parent
_PFL = _HERE.parent / ".venv-pfl" / "bin" / "python"
_DATA = "benchmark-clients"
_ROUNDS = {"mlp": 20, "cnn": 3}
_OF_PEERS = {"flower": {"mlp": 2, "cnn": 2}, "pfl": {"mlp": 6, "cnn": 3}}
_FLOWER = "Flower 1.41, Ray engine"


def cell(model: str, rounds: int) -> Cell:
    """DP-FedAvg with cohorts in a public order: exactly 100 clients in every round, as peers have them."""
    tree: dict[str, Any] = {
        "name": "clients",
        "data": {"name": _DATA},
        "model": {"name": model},
        "federation": {"clients": CLIENTS, "cohort": COHORT, "rounds": rounds},
        "algorithm": {
            "name": "dp-fedavg", "trust": "trusted", "local_steps": LOCAL_STEPS, "local_step": LOCAL_STEP,
            "clip": CLIP,
        },
        "privacy": {"unit": "client", "records": RECORDS, "relation": "zero-out", "mu": 4.0},
        "run": {"evaluations": 1},
    }  # fmt: skip
    return parse_scenario(tree, "benchmarks/clients.py").points[0].cell


def _data() -> Any:
    clients = [records_of(client) for client in range(CLIENTS)]
    features, labels = (torch.cat(part).numpy() for part in zip(*clients, strict=True))
    return (features, labels), (features[:100], labels[:100])


def contenders() -> dict[str, Callable[[str], float | None]]:
    """By name: from a model to rounds per second, None where the peer is not here."""
    return {
        "fedpriv, vectorized": lambda model: rounds_per_second("vectorized", cell(model, _ROUNDS[model])),
        "pfl 0.6.0": partial(_peer, _PFL, "clients_pfl.py", _OF_PEERS["pfl"]),
        _FLOWER: partial(_peer, Path(sys.executable), "clients_flower.py", _OF_PEERS["flower"]),
    }


def _peer(python: Path, script: str, rounds: Mapping[str, int], model: str) -> float | None:
    if not python.exists():
        return None
    done = subprocess.run(
        [str(python), str(_HERE / script), model, str(rounds[model])],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        print(f"{script} {model} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        return None
    return float(json.loads(done.stdout.splitlines()[-1])["rounds_per_second"])


def run() -> None:
    fedpriv.add_data(_DATA, _data, classes=10)
    rates: dict[tuple[str, str], list[float]] = {}
    loads = [os.getloadavg()[0]]
    for turn in range(_TURNS):
        for name, measure in contenders().items():
            for model in MODELS:
                started = time.perf_counter()
                if (rate := measure(model)) is not None:
                    rates.setdefault((name, model), []).append(rate)
                took = time.perf_counter() - started
                print(f"turn {turn + 1}, {name}, {model}: {took:.0f} s", file=sys.stderr)  # minutes in all
                loads.append(os.getloadavg()[0])
    print("Rounds per second, median (range), and how many times as many the vectorized engine has.\n")
    print("| who | perceptron | x | CNN | x |")
    print("|---|---|---|---|---|")
    for name in contenders():
        entries = [entry for model in MODELS for entry in _entries(rates, name, model)]
        print(f"| {name} | {' | '.join(entries)} |")
    print(f"\nturns: {_TURNS}")
    print(f"load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores")
    if not _PFL.exists():
        print("pfl is left out: it has no environment here; make bench-peers")


def _entries(rates: Mapping[tuple[str, str], list[float]], name: str, model: str) -> tuple[str, str]:
    several = rates.get((name, model))
    if not several:
        return "-", "-"
    middle, ours = statistics.median(several), statistics.median(rates["fedpriv, vectorized", model])
    return f"{middle:.3g} ({min(several):.3g} - {max(several):.3g})", f"{ours / middle:.3g}"
