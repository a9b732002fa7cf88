"""How far queries may move: what the sensitivity of differences rests on, checked by whoever sees queries."""

import torch
from torch import Tensor

from fedpriv.errors import RunError
from fedpriv.replicates.columns import Scalar


def check_movement(bound: Scalar, before: Tensor, query: Tensor, where: str) -> None:
    """RunError if a query (..., d) is farther than `bound` from the one before it.

    Guarantee: the distance is that of the two vectors as they are, computed in float64.
    """
    moved = torch.linalg.vector_norm(query.double() - before.double(), dim=-1, keepdim=True)
    limit = torch.as_tensor(bound, dtype=torch.float64, device=moved.device).expand(moved.shape)
    over = ~(moved <= limit)  # true for NaN
    if bool(over.any()):
        raise RunError(
            f"{where}: the query moved by {float(moved[over][0]):.9g}, more than the {float(limit[over][0]):.9g} "
            "that this run's privacy rests on"
        )
