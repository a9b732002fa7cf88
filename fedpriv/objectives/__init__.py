"""Objectives: per-record increments over flat parameters."""

from fedpriv.objectives.base import Evaluation, Increment, Objective, Records
from fedpriv.objectives.layered import LayeredObjective
from fedpriv.objectives.losses import CrossEntropy, Loss, SquaredError
from fedpriv.objectives.module import ModuleObjective
from fedpriv.objectives.routes import objective_of
from fedpriv.objectives.softmax_regression import SoftmaxRegression

__all__ = [
    "CrossEntropy",
    "Evaluation",
    "Increment",
    "LayeredObjective",
    "Loss",
    "ModuleObjective",
    "Objective",
    "Records",
    "SoftmaxRegression",
    "SquaredError",
    "objective_of",
]
