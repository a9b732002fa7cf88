"""Integers and secret participation together: the noise of the lattice, amplified as that of real numbers is."""

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.claims.ledger import make_release_streams, stream_from_data, stream_to_data
from fedpriv.core.errors import InputError
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.objective import Records
from fedpriv.noise.integers import increments as exact_records
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.secret import RandomAllocation, SecretOrder
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import Silo
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
    return make_plan(cell, load_task(cell).objective)


CASES = list(
    itertools.product(
        ("allocation", "poisson"), ("untrusted", "trusted", "secure-aggregation"), ("zero-out", "replace-one")
    )
)


@pytest.mark.every(4)
@pytest.mark.parametrize(("sampling", "trust", "relation"), CASES)
def test_amplified_integer_releases_never_claim_more_noise_than_was_added_and_meet_epsilon(
    sampling: str, trust: str, relation: str
) -> None:
    """Guarantee: never more noise is claimed than σ / K, and the (ε, δ) asked for is kept, nearly used up."""
    plan = planned(cell_of(sampling, trust, relation))
    owners = 3 if trust == "secure-aggregation" else 1
    (norm,) = plan.required_exact_plan.norms(1)
    for stream in make_release_streams(plan, 10):
        guarantee = stream.guarantee
        assert isinstance(guarantee, AllocatedGaussian | PoissonGaussian)
        really = plan.required_exact_plan.claim.sigma * owners**0.5 / norm
        assert really * (1.0 - 1e-6) < guarantee.noise_multiplier < really
        assert EPSILON * (1.0 - 1e-3) < guarantee.epsilon_of(1e-5) <= EPSILON
        assert stream_from_data(stream_to_data(stream)).guarantee == guarantee


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
@pytest.mark.parametrize("path", ["outer products", "increments", "failing"])
@pytest.mark.parametrize("sampling", ["allocation", "poisson"])
def test_gradient_work_of_a_round_does_not_depend_on_the_number_of_sampled_records(
    monkeypatch: pytest.MonkeyPatch, sampling: str, path: str, trust: str
) -> None:
    """Gains: time tells how many a round drew, and with it who: the amplification that a record was promised."""
    plan, drawn, seen = planned(cell_of(sampling, trust)), [], []
    if path != "outer products":
        monkeypatch.setattr("fedpriv.noise.integers.increments.suits_rank_one", lambda *_: False)
    linear_sum, per_record = exact_records.sum_rank_one, SoftmaxRegression.per_record

    def formed(self: SoftmaxRegression, query: Any, batch: Any, *rest: Any) -> Any:
        seen[-1].append(len(batch.weights))
        if path == "failing":
            raise FloatingPointError
        return per_record(self, query, batch, *rest)

    def watched(outer: Any, points: Any, coefficients: Any, features: Any, *rest: Any) -> Any:
        seen[-1].append(len(features))
        return linear_sum(outer, points, coefficients, features, *rest)

    monkeypatch.setattr("fedpriv.noise.integers.increments.sum_rank_one", watched)
    monkeypatch.setattr(SoftmaxRegression, "per_record", formed)
    generator = torch.Generator().manual_seed(1)
    records = Records(
        torch.randint(0, 256, (40, 785), generator=generator) / 255.0,
        torch.randint(0, 10, (40,), generator=generator),
    )
    silo = Silo.for_release(0, plan, records, bytes(31) + b"8", b"")
    state = silo.initial_state()
    for t in range(1, 11):
        seen.append([])
        release, state = silo.answer(state, t, torch.zeros(7850))
        drawn.append(release.counts.drawn)
    assert isinstance(plan.schedule, SecretOrder)
    rows = plan.schedule.capacity(4).row_count
    assert min(drawn) < 3 < max(drawn) < rows < 40
    expected = [rows] if path == "outer products" else [1] * rows
    assert all(of_round == expected for of_round in seen)


def test_tree_noise_on_integers_is_refused_under_random_allocation() -> None:
    cell = cell_of("allocation", name="dp-ftrl", mechanism="tree")
    with pytest.raises(InputError, match=r"a record's influence is unbounded"):
        planned(cell)


BANDED = {"name": "dp-ftrl", "mechanism": "banded"}


def grouped(sampling: str, trust: str, relation: str, bands: int, groups: int) -> Cell:
    tree = cell_of(sampling, trust, relation, **BANDED, bands=bands).canonical_data()
    return resolve_cell({**tree, "federation": {**tree["federation"], "rounds": 12, "groups": groups}}, "test")


@pytest.mark.every(7)
@pytest.mark.parametrize("groups", [3, 4, 6])
@pytest.mark.parametrize(("sampling", "trust", "relation"), CASES)
def test_amplified_banded_integer_noise_covers_the_brute_force_displacement_of_a_record(
    sampling: str, trust: str, relation: str, groups: int
) -> None:
    """Guarantee: brute force over the rounds of a record: what C on integers makes of K in one of them, rounding
    included, is at most κ; blocks of rounds `groups` apart are disjoint; the curve is that of σ / κ."""
    plan = planned(grouped(sampling, trust, relation, 3, groups))
    strategy, rounds = plan.required_exact_plan.inputs.factorization.strategy, 12
    (norm,) = plan.required_exact_plan.norms(1)
    draw, moved = np.random.default_rng(1), []
    for t in range(1, rounds + 1):
        largest = np.zeros(rounds)
        for _ in range(4):
            others = draw.integers(-(2**40), 2**40, (rounds, 1))
            ends = []
            for own in (0, norm):
                state, outputs = strategy.initial_state(), []
                for s in range(1, rounds + 1):
                    output, state = strategy.step(state, s, others[s - 1] + (own if s == t else 0))
                    outputs.append(int(output[0]))
                ends.append(np.array(outputs, dtype=object))
            largest = np.maximum(largest, np.abs(ends[1] - ends[0]).astype(float))
        assert not largest[: t - 1].any()
        assert not largest[t - 1 + groups :].any()
        moved.append(float(np.linalg.norm(largest)))
    owners = 3 if trust == "secure-aggregation" else 1
    really = plan.required_exact_plan.claim.sigma * owners**0.5 / max(moved)
    for stream in make_release_streams(plan, rounds):
        guarantee = stream_from_data(json.loads(json.dumps(stream_to_data(stream)))).guarantee
        assert isinstance(guarantee, AllocatedGaussian | PoissonGaussian)
        assert really * (1.0 - 1e-5) < guarantee.noise_multiplier < really
        assert EPSILON * (1.0 - 2e-3) < guarantee.epsilon_of(1e-5) <= EPSILON


@pytest.mark.parametrize("mechanism", [BinaryTree(), BandedSquareRoot(1.0, 4)])
def test_an_integer_ledger_that_claims_amplification_for_unsupported_noise_is_refused(
    mechanism: Mechanism,
) -> None:
    """Attack: somebody writes another mechanism, or fewer groups, into the ledger of a run with secret rounds."""
    (stream,) = make_release_streams(planned(grouped("allocation", "trusted", "zero-out", 3, 3)), 12)
    forged = stream_from_data(stream_to_data(replace(stream, mechanism=mechanism)))
    with pytest.raises(InputError, match="secret participation"):
        _ = forged.guarantee


@pytest.mark.parametrize("path", ["outer products", "increments"])
def test_the_integer_increment_of_a_record_does_not_depend_on_other_sampled_records(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A round's sum is that of the rounds in which each of its records is drawn alone, to the last unit."""
    plan = planned(cell_of("allocation", "trusted"))
    monkeypatch.setattr("fedpriv.noise.integers.increments.MAX_CHUNK_VALUES", 5 * 785)  # several chunks a round
    if path != "outer products":
        monkeypatch.setattr("fedpriv.noise.integers.increments.suits_rank_one", lambda *_: False)
    generator = torch.Generator().manual_seed(2)
    records = Records(torch.rand((40, 785), generator=generator), torch.randint(0, 10, (40,), generator=generator))
    query = 0.1 * torch.randn(7850, generator=generator)

    def sums(drawn: list[int]) -> torch.Tensor:
        monkeypatch.setattr(RandomAllocation, "select_rows", lambda *_: np.array(drawn, np.int64))
        silo = Silo.for_release(0, plan, records, bytes(31) + b"8", b"")
        release, _ = silo.answer(silo.initial_state(), 1, query)
        return release.vector

    for drawn in ([3, 8, 9, 17, 21, 30, 39], [8], []):
        alone = torch.zeros(7850, dtype=torch.int64)
        for row in drawn:
            alone += sums([row])
        assert torch.equal(sums(drawn), alone)
        assert bool(alone.any()) == bool(drawn)
