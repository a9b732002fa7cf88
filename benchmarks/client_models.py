"""What clients and silos train in benchmarks, for programs that import nothing of fedpriv."""

from collections.abc import Callable

import torch
from torch import nn

CLIENTS, COHORT, RECORDS, LOCAL_STEPS, CLASSES = 1000, 100, 10, 5, 10
CLIP, NOISE, STEP, LOCAL_STEP = 1.0, 1.0, 1.0, 0.1


def perceptron() -> nn.Sequential:
    """784-64-10, 50,890 parameters."""
    return nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def convolutional(channels: int = 16, hidden: int = 32) -> nn.Sequential:
    """26,010 parameters, more with more channels and hidden units, of features (n, 784)."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, channels, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(channels, 2 * channels, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * channels, hidden),
        nn.Tanh(),
        nn.Linear(hidden, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Sequential]] = {"mlp": perceptron, "cnn": convolutional}

NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "softmax": lambda: nn.Sequential(nn.Linear(784, CLASSES)),
    "cnn": convolutional,
    "wide-cnn": lambda: convolutional(64, 420),
}
"""What benchmarks/opacus_rounds.py trains; the last has 1,000,150 parameters."""


def records_of(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (RECORDS, 784) and labels of one client: noise, which costs what pictures cost."""
    generator = torch.Generator().manual_seed(client)
    return torch.rand(RECORDS, 784, generator=generator), torch.randint(
        0, CLASSES, (RECORDS,), generator=generator
    )
