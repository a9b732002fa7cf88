"""The network of Flower's PyTorch template, one linear layer in place of three: 5,142 parameters at 28 x 28.

A module of its own: guards import it by name, and have neither Opacus nor the benchmark.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - as the template has it
from torch import Tensor, nn


class Net(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, 10) of images (n, 1, 28, 28)."""
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        logits: Tensor = self.fc(torch.flatten(x, 1))
        return logits


def net(_features: int, _classes: int) -> Net:
    """For guards, which call a model with the size of a record and the number of classes."""
    return Net()
