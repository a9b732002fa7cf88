"""Clipped sums of per-record gradients: fedpriv's routes beside Opacus 1.6, one thread, float32.

The contenders take turns; medians of the turns are shown.  Opacus has an environment of its own, which `make
bench-peers` makes; without it its columns stay empty.
"""

import os
import statistics
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.client_models import CLASSES, GRADIENTS, PIXELS
from benchmarks.memory import Cost, cost_of
from benchmarks.peers import python_of, told_by_peer
from fedpriv.loss.ghost import GhostObjective
from fedpriv.loss.layered import LayeredObjective, make_module_objective
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.module import ModuleObjective
from fedpriv.loss.objective import Batch, Objective, Query, Records

_TURNS = {64: 1, 250: 1}
"""How often the contenders take turns, for each size of a batch; the second shows how they grow with it."""
_BESIDE = 64
"""The size for which fedpriv's other ways are shown: torch.func takes minutes."""
_COLUMNS = ("fedpriv", "two points", "torch.func", "hooks", "ghost")
"""fedpriv by the route it takes, with the two points of a recursive gradient, by vmap(grad); Opacus."""


def run() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print("Processor microseconds per record, median of turns, and in brackets the peak of memory in MB.\n")
    for batch, turns in _TURNS.items():
        print(f"Batches of {batch}, {turns} turn{'s' * (turns > 1)}:\n")
        print(
            "| model | parameters | route | fedpriv | with two points | torch.func | Opacus hooks "
            "| Opacus ghost norms | × |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        costs: dict[str, dict[str, list[Cost]]] = {name: {} for name in GRADIENTS}
        for _ in range(turns):
            for name in GRADIENTS:
                for column, cost in _ours(name, batch).items():
                    costs[name].setdefault(column, []).append(cost)
            for key, cost in (told_by_peer("opacus", "opacus_time.py", str(batch)) or {}).items():
                name, column = key.split("/")
                costs[name].setdefault(column, []).append(Cost(*cost))
        for name, of in costs.items():
            _print(name, of)
        print()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if not python_of("opacus").exists():
        print("Opacus is left out: it has no environment here; make bench-peers")
    torch.set_num_threads(threads)


def _ours(name: str, batch: int) -> dict[str, Cost]:
    fast = _objective(name)
    costs = {"fedpriv": cost_of(_step(fast, batch, 1), batch)}
    if batch == _BESIDE:
        general = ModuleObjective(GRADIENTS[name](nn.LSTM), CrossEntropy(), 0)
        costs["two points"] = cost_of(_step(fast, batch, 2), batch)
        costs["torch.func"] = cost_of(_step(general, batch, 1), batch)
    return costs


def _objective(name: str) -> Objective:
    if name == "softmax regression":
        return SoftmaxRegression(PIXELS + 1, CLASSES, feature_norm=28.1)
    return make_module_objective(GRADIENTS[name](nn.LSTM), PIXELS, CrossEntropy(), 0)


def _step(objective: Objective, batch: int, points: int) -> Callable[[], None]:
    features = PIXELS + isinstance(objective, SoftmaxRegression)
    records = Records(torch.rand(batch, features), torch.randint(0, CLASSES, (batch,)))
    query = Query([objective.initial()] * points, [2.0, -1.0][:points])

    def step(count: int = batch) -> None:
        some = Records(records.features[:count], records.labels[:count])
        with torch.inference_mode():
            objective.increment(query, Batch(some, torch.full((count,), 1.0 / batch)), 1.0)

    step(2)
    return step


def _print(name: str, costs: dict[str, list[Cost]]) -> None:
    objective = _objective(name)
    route = {LayeredObjective: "layers", GhostObjective: "functions"}.get(type(objective), "its own")
    cells, medians = [], dict[str, float]()
    for column in _COLUMNS:
        if of := costs.get(column):
            medians[column], memory = (statistics.median(values) for values in zip(*of, strict=True))
            cells.append(f"{medians[column]:.1f} ({memory:.0f})")
        else:
            cells.append("-")
    peers = [medians[column] for column in ("hooks", "ghost") if column in medians]
    cells.append(f"{medians['fedpriv'] / min(peers):.2f}" if peers else "-")
    parameters = sum(parameter.numel() for parameter in GRADIENTS[name](nn.LSTM).parameters())
    print(f"| {name} | {parameters:,} | {route} | {' | '.join(cells)} |", flush=True)
