"""Integers and secret participation together: the noise of the lattice, amplified as that of real numbers is."""

import itertools
from typing import Any

import pytest

from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.errors import InputError
from fedpriv.privacy.ledger import as_data, from_data
from fedpriv.running.plan import Plan, plan_of
from fedpriv.running.task import task_of_cell
from fedpriv.scenario import Cell, resolve_cell
from tests.conftest import small_tree

EPSILON = 1.5


def cell_of(sampling: str, trust: str = "untrusted", relation: str = "zero-out", **changes: Any) -> Cell:
    tree = small_tree(
        federation={"silos": 3, "rounds": 10, "batch": 4, "sampling": sampling},
        algorithm={"name": "dp-sgd", "trust": trust, "clip": 1.0, "step": 0.1, **changes},
        privacy={"relation": relation, "epsilon": EPSILON},
        run={"dtype": "float32", "arithmetic": "integers"},
    )
    return resolve_cell(tree, "test")


def planned(cell: Cell) -> Plan:
    return plan_of(cell, task_of_cell(cell).objective)


CASES = list(
    itertools.product(
        ("allocation", "poisson"), ("untrusted", "trusted", "secure-aggregation"), ("zero-out", "replace-one")
    )
)


@pytest.mark.parametrize(("sampling", "trust", "relation"), CASES)
def test_the_curve_is_that_of_the_noise_in_units_of_one_records_integers(
    sampling: str, trust: str, relation: str
) -> None:
    """Guarantee: never more noise is claimed than σ / K, and the (ε, δ) asked for is kept, nearly used up."""
    plan = planned(cell_of(sampling, trust, relation))
    assert plan.exact is not None
    owners = 3 if trust == "secure-aggregation" else 1
    (norm,) = plan.exact.norms(1)
    for stream in plan.releases(10):
        guarantee = stream.guarantee
        assert isinstance(guarantee, AllocatedGaussian | PoissonGaussian)
        really = plan.exact.claim.sigma * owners**0.5 / norm
        assert really * (1.0 - 1e-6) < guarantee.noise_multiplier < really
        assert EPSILON * (1.0 - 1e-3) < guarantee.epsilon_of(1e-5) <= EPSILON
        assert from_data(as_data(stream)).guarantee == guarantee


def test_sums_that_last_are_refused() -> None:
    cell = cell_of("allocation", name="dp-ftrl", mechanism="tree")
    with pytest.raises(InputError, match=r"secret|released by itself"):
        planned(cell)
