"""A torch module of your own, by the name that scenarios use: model.name = "my-model"."""

from torch import nn

import fedpriv


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build an untrained module for flat records of shape (features,), with an output for each class.

    A layer that mixes records, such as BatchNorm, or draws random numbers, such as Dropout, is refused.
    """
    (features,) = shape
    return nn.Sequential(nn.Linear(features, 32), nn.Tanh(), nn.Linear(32, classes))


fedpriv.add_model("my-model", network)  # with shape=(1, 28, 28) records have this shape
