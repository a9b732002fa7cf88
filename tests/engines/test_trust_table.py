"""The table of docs/participation.md but for cohorts: a cell runs, or is refused in a line that says why."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.noise.trust import TRUSTS
from fedpriv.participation.clients import CHOSEN
from fedpriv.rounds.claim import claim_of
from fedpriv.rounds.plan import plan_of
from fedpriv.rounds.task import task_of_cell
from fedpriv.scenario.schema import Cell
from tests.engines.test_engines import run

MakeCell = Callable[..., Cell]

NOISES: dict[str, dict[str, Any]] = {
    "independent": {"name": "dp-sgd", "clip": 1.0, "step": 0.1},
    "independent on running sums": {"name": "dp-ftrl", "clip": 1.0, "step": 0.1, "mechanism": "independent"},
    "tree": {"name": "dp-ftrl", "clip": 1.0, "step": 0.1, "mechanism": "tree"},
    "banded": {"name": "dp-ftrl", "clip": 1.0, "step": 0.1, "mechanism": "banded", "bands": 3},
}
SECRET = {name for name, kind in CHOSEN.items() if kind.secret}
NO_END, OVERLAP = "what a record moves has no end there", r"groups = 1: what a record moves .* would overlap"


UNITS: dict[str, dict[str, Any]] = {"record": {}, "client": {"unit": "client", "records": 3}}


def reason(trust: str, sampling: str, unit: str, noise: str, groups: int) -> str | None:
    """Why a cell of the table is refused; None if it runs."""
    if unit == "client" and sampling in SECRET and trust == "untrusted":
        return "a server sees which clients answer; use"
    if unit == "client" and sampling in SECRET and trust == "secure-aggregation":
        return "masks need the answers of all clients; use"
    if trust == "curator":
        return "can be run with 'untrusted' or 'trusted' or 'secure-aggregation'"
    if sampling not in SECRET:
        return "groups are for records that take part in secret" if groups > 1 else None
    if noise in ("tree", "independent on running sums"):
        return NO_END
    return OVERLAP if noise == "banded" and groups == 1 else None


@pytest.mark.parametrize(
    ("trust", "sampling"),
    [(trust, name) for trust, (name, kind) in itertools.product(TRUSTS, CHOSEN.items()) if not kind.of_clients],
)
@pytest.mark.parametrize(
    ("unit", "relation"), [("record", "zero-out"), ("record", "replace-one"), ("client", "zero-out")]
)
def test_every_cell_runs_or_is_refused_with_its_reason(
    small_cell: MakeCell, trust: str, sampling: str, unit: str, relation: str
) -> None:
    for noise, groups in itertools.product(NOISES, (1, 4)):
        changes = {
            "federation": {"silos": 2, "rounds": 8, "batch": 2, "sampling": sampling, "groups": groups},
            "algorithm": {"trust": trust, **NOISES[noise]},
            "privacy": {"relation": relation, "epsilon": 4.0, **UNITS[unit]},
        }
        expected = reason(trust, sampling, unit, noise, groups)
        if expected is not None:
            with pytest.raises(InputError, match=expected) as caught:
                plan_of(cell := small_cell(**changes), task_of_cell(cell).objective)
            assert "\n" not in str(caught.value)
            continue
        cell = small_cell(**changes)
        (vectorized,), _ = run("vectorized", cell)
        (inprocess,), _ = run("inprocess", cell)
        near = 1e-3 if trust == "secure-aggregation" else 1e-9
        model = vectorized.finished.model
        np.testing.assert_allclose(model, inprocess.finished.model, rtol=near, atol=near * np.linalg.norm(model))
        claim = claim_of(vectorized.finished.releases)
        assert claim is not None
        assert claim.relation == relation
        assert claim.unit.name == unit
        assert 3.9 < claim.guarantee.epsilon_of(1e-5) <= 4.0 + 1e-9
