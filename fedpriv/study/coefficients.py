"""Coefficients of models that came with second moments, with intervals that have the noise in them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedpriv.claims.ledger import from_data
from fedpriv.core.errors import InputError
from fedpriv.data.schema import TableSchema
from fedpriv.loss.objective import View
from fedpriv.loss.ridge import RIDGE_STATISTICS, Coefficient, Published, RidgeStatistics
from fedpriv.papers.newton import NOISY_NEWTON, GradientAndHessian
from fedpriv.plan.task import public_task_of_cell, task_of_schema
from fedpriv.scenario.load import resolve_cell


def coefficients_of(record: Mapping[str, Any], folder: Path) -> list[tuple[str, Coefficient]]:
    """By feature, the constant last, of a cell of results.json; InputError for any other model.

    The noise is the ledger's: what was released, not what was planned.
    """
    cell = resolve_cell(record["scenario"], str(folder))
    if cell.model.name != RIDGE_STATISTICS and cell.algorithm.name != NOISY_NEWTON.name:
        raise InputError(
            f"{folder}: model.name = {cell.model.name!r}: coefficients have intervals where the model is "
            f"{RIDGE_STATISTICS!r}, or the algorithm {NOISY_NEWTON.name!r}"
        )
    schema, sizes = cell.data.table_schema, cell.batch_sizes
    task = public_task_of_cell(cell) if schema is None else task_of_schema(cell, schema)
    objective = task.objective
    while isinstance(objective, View) and not isinstance(objective, GradientAndHessian):
        objective = objective.base
    assert isinstance(objective, RidgeStatistics | GradientAndHessian)
    variance, shares = 0.0, [size / sum(sizes) for size in sizes]
    for stream in map(from_data, record["releases"]):
        whose = [shares[silo] for silo in stream.silos] or [1.0]
        variance += sum(share**2 for share in whose) * stream.std**2
    point = torch.from_numpy(np.load(folder / record["model"], allow_pickle=False)).double()
    counted = 1.0 if schema is None else schema.counted_share(tests=False)
    published = Published(math.sqrt(variance), round(sum(sizes) * counted), counted, record["rounds"])
    found = objective.coefficients(point, published)
    return list(zip(_names(schema, len(found)), found, strict=True))


def _names(schema: TableSchema | None, count: int) -> list[str]:
    if schema is None or schema.width + 1 != count:
        return [*(f"feature {place}" for place in range(count - 1)), "constant"]
    named = [
        each
        for name, column in schema.features
        for each in ([name] if column.values is None else [f"{name} = {word}" for word in column.values])
    ]
    return [*named, "constant"]
