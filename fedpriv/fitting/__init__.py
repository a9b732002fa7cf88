"""Noise fitted to what a run publishes: from a row's optimizer to the mechanism that serves its output best.

Optimizer -> `published.response_of` (its linear map, by adjoint) -> `objective_of` (noise against lower bounds)
-> `auto`.  Only what runs an optimizer or a stream imports torch.
"""

from fedpriv.fitting.auto import Candidate, auto, candidates, choice, fitted, named
from fedpriv.fitting.compare import Comparison, Published, compared, least
from fedpriv.fitting.objective import Objective, objective_of
from fedpriv.fitting.response import Response, rows_response

__all__ = [
    "Candidate",
    "Comparison",
    "Objective",
    "Published",
    "Response",
    "auto",
    "candidates",
    "choice",
    "compared",
    "fitted",
    "least",
    "named",
    "objective_of",
    "rows_response",
]
