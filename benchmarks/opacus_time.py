"""Run by benchmarks/objectives.py in the environment that has Opacus; imports nothing of fedpriv.

Prints one JSON object: "model/batch" -> microseconds per record of the clipped sum of per-record gradients, by
hooks (GradSampleModule, clipped as its DPOptimizer does) and ghost norms (GradSampleModuleFastGradientClipping).
"""

import json
import time
from collections.abc import Callable

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "softmax regression": lambda: nn.Sequential(nn.Linear(784, 10)),
    "MLP 784-64-10": lambda: nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10)),
    "CNN 26,010": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    ),
}


class _Zeroing:
    """What the ghost-norm loss wants of an optimizer: its reduction and its zero_grad."""

    loss_reduction = "mean"

    def __init__(self, module: nn.Module) -> None:
        self.zero_grad = module.zero_grad


def by_hooks(net: nn.Sequential, features: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    module = GradSampleModule(net, loss_reduction="sum")
    loss = nn.CrossEntropyLoss(reduction="sum")

    def step() -> None:
        loss(module(features), labels).backward()
        samples = [parameter.grad_sample for parameter in module.parameters()]
        norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in samples]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for sample in samples:
            torch.einsum("i,i...", factor, sample)
        module.zero_grad()

    return step


def by_ghost_norms(net: nn.Sequential, features: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    module = GradSampleModuleFastGradientClipping(
        net, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="mean"
    )
    loss = DPLossFastGradientClipping(module, _Zeroing(module), nn.CrossEntropyLoss(), "mean")

    def step() -> None:
        loss(module(features), labels).backward()
        module.zero_grad()

    return step


def microseconds(step: Callable[[], None], records: int) -> float:
    step()
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - started)
    return 1e6 * best / records


def main() -> None:
    torch.set_num_threads(1)
    times = {}
    for name, make in MODELS.items():
        for batch in (250, 3750):
            features, labels = torch.rand(batch, 784), torch.randint(0, 10, (batch,))
            times[f"{name}/{batch}"] = [
                microseconds(way(make(), features, labels), batch) for way in (by_hooks, by_ghost_norms)
            ]
    print(json.dumps(times))


main()
