"""Clipped sums of per-record gradients: fedpriv's routes beside Opacus 1.x, one thread, float32.

Opacus has an environment of its own, which `make bench-peers` makes; without it its columns stay empty.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.noise import nanoseconds
from benchmarks.peers import python_of
from fedpriv.loss.layered import LayeredObjective, objective_of
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.models import convolutional_net
from fedpriv.loss.module import ModuleObjective
from fedpriv.loss.objective import Batch, Objective, Query, Records
from fedpriv.loss.softmax import SoftmaxRegression

PIXELS, CLASSES, BATCHES = 784, 10, (250, 3750)
MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "softmax regression": lambda: nn.Sequential(nn.Linear(PIXELS, CLASSES)),
    "MLP 784-64-10": lambda: nn.Sequential(nn.Linear(PIXELS, 64), nn.Tanh(), nn.Linear(64, CLASSES)),
    "CNN 26,010": lambda: convolutional_net(CLASSES),
}


def run() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    opacus = _opacus()
    print("Microseconds per record; in brackets with the two points of a recursive gradient.\n")
    print("| model | batch | closed form | torch.func | Opacus hooks | Opacus ghost |")
    print("|---|---|---|---|---|---|")
    for name, make in MODELS.items():
        for batch in BATCHES:
            linear = len(make()) == 1
            fast: Objective = (
                SoftmaxRegression(PIXELS + 1, CLASSES, feature_norm=28.1)
                if linear
                else objective_of(make(), PIXELS, CrossEntropy(), 0)
            )
            assert isinstance(fast, SoftmaxRegression | LayeredObjective)
            general = ModuleObjective(make(), CrossEntropy(), 0)
            cells = [_both(fast, PIXELS + linear, batch), _both(general, PIXELS, batch)]
            cells += [f"{value:.0f}" for value in opacus.get(f"{name}/{batch}", [])] or ["-", "-"]
            print(f"| {name} | {batch} | {' | '.join(cells)} |", flush=True)
    torch.set_num_threads(threads)


def _both(objective: Objective, features: int, batch: int) -> str:
    records = Records(torch.rand(batch, features), torch.randint(0, CLASSES, (batch,)))
    weights, point = torch.full((batch,), 1.0 / batch), objective.initial()

    def sums(points: int) -> Any:
        with torch.inference_mode():
            return objective.increment(Query([point] * points, [2.0, -1.0][:points]), Batch(records, weights), 1.0)

    one, two = (nanoseconds(lambda points=points: sums(points), batch, 1) / 1e3 for points in (1, 2))
    return f"{one:.1f} ({two:.1f})"


def _opacus() -> dict[str, list[float]]:
    """Microseconds per record by hooks and by ghost norms, from the other environment; empty if there is none."""
    python = python_of("opacus")
    if not python.exists():
        print("Opacus is left out: it has no environment here; make bench-peers\n")
        return {}
    script = Path(__file__).with_name("opacus_time.py")
    done = subprocess.run([str(python), str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"Opacus is left out: {(done.stderr.strip().splitlines() or ['no message'])[-1]}\n")
        return {}
    times: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return times
