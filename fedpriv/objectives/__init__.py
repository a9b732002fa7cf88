"""Objectives: per-record increments over flat parameters."""

from fedpriv.objectives.base import Evaluation, Increment, Objective, Outer, Records, Slots
from fedpriv.objectives.layered import LayeredObjective
from fedpriv.objectives.linear import LeastSquares, LogisticRegression
from fedpriv.objectives.losses import AbsoluteError, CrossEntropy, Loss, SquaredError
from fedpriv.objectives.module import ModuleObjective
from fedpriv.objectives.phase_retrieval import PhaseRetrieval
from fedpriv.objectives.population import Population, QuadraticPopulation
from fedpriv.objectives.routes import objective_of
from fedpriv.objectives.smoothed import SeededDirections, Smoothed
from fedpriv.objectives.softmax_regression import SoftmaxRegression
from fedpriv.objectives.view import View

__all__ = [
    "AbsoluteError",
    "CrossEntropy",
    "Evaluation",
    "Increment",
    "LayeredObjective",
    "LeastSquares",
    "LogisticRegression",
    "Loss",
    "ModuleObjective",
    "Objective",
    "Outer",
    "PhaseRetrieval",
    "Population",
    "QuadraticPopulation",
    "Records",
    "SeededDirections",
    "Slots",
    "Smoothed",
    "SoftmaxRegression",
    "SquaredError",
    "View",
    "objective_of",
]
