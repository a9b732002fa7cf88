"""Noise fitted to what a run publishes: from a row's optimizer to the mechanism that serves its output best.

Optimizer -> `response_of` (its linear map, by adjoint) -> `objective_of` (noise against lower bounds) -> `auto`.
"""

from fedpriv.fitting.auto import Candidate, auto, candidates
from fedpriv.fitting.compare import Comparison, Published, compared, least
from fedpriv.fitting.objective import Objective, objective_of
from fedpriv.fitting.response import Response, response_of, rows_response

__all__ = [
    "Candidate",
    "Comparison",
    "Objective",
    "Published",
    "Response",
    "auto",
    "candidates",
    "compared",
    "least",
    "objective_of",
    "response_of",
    "rows_response",
]
