"""Which route computes a module's increments: closed form where every layer has one, torch.func otherwise."""

import torch
from torch import nn

from fedpriv.objectives.layered import LayeredObjective
from fedpriv.objectives.losses import Loss
from fedpriv.objectives.module import ModuleObjective


def objective_of(
    module: nn.Module, features: int, loss: Loss, seed: int, dtype: torch.dtype = torch.float32
) -> LayeredObjective | ModuleObjective:
    """The objective of a module that maps (records, features) to (records, outputs); x_1 follows from `seed`.

    Sequential modules of Linear, Conv2d, MaxPool2d, Tanh, ReLU, Flatten and Unflatten take the fast route.
    Both routes compute the same numbers.  InputError if a layer mixes records, draws random numbers or keeps
    buffers.
    """
    layered = LayeredObjective.of(module, features, loss, seed, dtype)
    return ModuleObjective(module, loss, seed, dtype) if layered is None else layered
