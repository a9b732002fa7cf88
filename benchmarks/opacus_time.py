"""Run by benchmarks/objectives.py in the environment that has Opacus; imports nothing of fedpriv.

    python opacus_time.py BATCH

Prints one JSON object: "model/hooks" and "model/ghost" -> microseconds and megabytes (`memory.Cost`) of the
clipped sum of per-record gradients, by hooks (GradSampleModule, clipped as its DPOptimizer does) and by ghost
norms (GradSampleModuleFastGradientClipping).
"""

import json
import sys
import warnings
from collections.abc import Callable

import torch
from client_models import CLASSES, GRADIENTS, PIXELS
from memory import cost_of
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.layers import DPLSTM
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn


class _Zeroing:
    """What the ghost-norm loss wants of an optimizer: its reduction and its zero_grad."""

    loss_reduction = "mean"

    def __init__(self, module: nn.Module) -> None:
        self.zero_grad = module.zero_grad


Step = Callable[[torch.Tensor, torch.Tensor], None]


def by_hooks(net: nn.Module) -> Step:
    module = GradSampleModule(net, loss_reduction="sum")
    loss = nn.CrossEntropyLoss(reduction="sum")

    def step(features: torch.Tensor, labels: torch.Tensor) -> None:
        loss(module(features), labels).backward()
        samples = [parameter.grad_sample for parameter in module.parameters()]
        norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in samples]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for sample in samples:
            torch.einsum("i,i...", factor, sample)
        module.zero_grad()

    return step


def by_ghost_norms(net: nn.Module) -> Step:
    module = GradSampleModuleFastGradientClipping(
        net, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="mean"
    )
    loss = DPLossFastGradientClipping(module, _Zeroing(module), nn.CrossEntropyLoss(), "mean")

    def step(features: torch.Tensor, labels: torch.Tensor) -> None:
        loss(module(features), labels).backward()
        module.zero_grad()

    return step


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    batch = int(sys.argv[1])
    costs = {}
    for name, make in GRADIENTS.items():
        for way, of in (("hooks", by_hooks), ("ghost", by_ghost_norms)):
            features, labels = torch.rand(batch, PIXELS), torch.randint(0, CLASSES, (batch,))
            step = of(make(DPLSTM))
            step(features[:2], labels[:2])
            costs[f"{name}/{way}"] = cost_of(lambda: step(features, labels), batch)  # noqa: B023
    print(json.dumps(costs))


main()
