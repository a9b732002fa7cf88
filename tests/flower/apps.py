"""Small apps of one's own: two networks, their clients' records, and a run of both sides in this process."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from torch import nn

from fedpriv.data.named import load
from fedpriv.data.partition import partition_iid
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.flower import PrivateClient, PrivateStrategy

SILOS, ROUNDS, BATCH = 3, 6, 4
SIZES = {"silos": SILOS, "rounds": ROUNDS, "batch": BATCH}
PRIVACY = {"relation": "zero-out", "mu": 2.0}
SETTINGS = {"diameter": 20.0, "clip": 1.0, "step": 0.05}
"""Of DP-μ²-FL."""
ROW = {"trust": "untrusted", **SIZES, **PRIVACY, **SETTINGS}
SEED = 5

Arrays = tuple[NDArray[Any], NDArray[Any]]
Train = Callable[[Message, Context], Message]


class Softmax(nn.Module):
    """Softmax regression on pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(images.flatten(1))
        return outputs


class CNN(nn.Module):
    """A convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 5, stride=4)
        self.fc = nn.Linear(4 * 36, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.fc(torch.relu(self.conv(images)).flatten(1))
        return outputs


def network(kind: type[nn.Module] = Softmax, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A network with the values that it has in every test."""
    torch.manual_seed(0)
    return kind().to(dtype)


@functools.cache
def data() -> Arrays:
    """The first 600 training records: (n, 1, 28, 28) in [0, 1], and their classes."""
    synthetic = load("synthetic")
    images = synthetic.train_images[:600].reshape(-1, 1, 28, 28).astype(np.float32) / 255
    labels = synthetic.train_labels[:600]
    for array in (images, labels):
        array.flags.writeable = False
    return images, labels


def shares(silos: int = SILOS, count: int = ROUNDS * BATCH, seed: int = SEED) -> list[Arrays]:
    """The records of silo 0, 1, …, in the order in which a scenario of this seed spreads them."""
    images, labels = data()
    return [(images[rows], labels[rows]) for rows in partition_iid(labels, [count] * silos, seed)]


def train_of(module: nn.Module, records: Sequence[Any], loss: Any = None) -> Train:
    """The train function of an app whose silo i has `records[i]`."""

    def train(message: Message, context: Context) -> Message:
        client = PrivateClient(context, module, loss or nn.CrossEntropyLoss())
        return client.train(message, records[silo_of(context)])

    return train


def app_of(train: Train) -> ClientApp:
    """A ClientApp with this train function."""
    app = ClientApp()
    app.train()(train)
    return app


def changed(train: Train, change: Callable[[Message, Context], object]) -> Train:
    """The train function before which this happens to message and context."""

    def changed_train(message: Message, context: Context) -> Message:
        change(message, context)
        return train(message, context)

    return changed_train


def silo_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def round_of(message: Message) -> int:
    return int(message.content["config"]["server-round"])


def grid_of(train: Train, silos: int = SILOS, **run_config: Any) -> InProcessGrid:
    """A grid whose nodes answer by this function."""
    return InProcessGrid(app_of(train), silos, run_config)


def run_app(strategy: PrivateStrategy, module: nn.Module, **started: Any) -> Result:
    """Run both sides from the module's values."""
    grid = grid_of(train_of(module, shares()))
    return strategy.start(grid, arrays_of(module), **started)


def arrays_of(module: nn.Module) -> ArrayRecord:
    return ArrayRecord(module.state_dict())


def flat(arrays: ArrayRecord) -> NDArray[Any]:
    """The arrays one behind the other."""
    return np.concatenate([values.ravel() for values in arrays.to_numpy_ndarrays()])
