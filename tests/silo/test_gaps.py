"""A silo that missed rounds: what it releases is a part of the stream that was accounted for."""

import dataclasses

import pytest
import torch

from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError, RunError
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.noise.integers.gaussian import linked, linked_missed
from fedpriv.noise.tree import BinaryTree
from fedpriv.rounds.plan import plan_of
from fedpriv.rounds.task import task_of_cell
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import Silo
from tests.conftest import small_tree


def silo_of(cell: Cell) -> Silo:
    silo = SimulatedFederation.of(cell).silo(0)
    tree = dataclasses.replace(silo.plan, mechanism=BinaryTree())  # whose noise hangs together over rounds
    return dataclasses.replace(silo, plan=tree, gaps=True)


def queries(silo: Silo) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = silo.objective.initial().shape
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * 1e-3 for _ in range(8)]


def releases(silo: Silo, rounds: list[int]) -> dict[int, torch.Tensor]:
    state, released = silo.start(), {}
    for t in rounds:
        release, state = silo.answer(state, t, queries(silo)[t - 1])
        released[t] = release.vector
    return released


@pytest.mark.parametrize("rounds", [[1, 2, 5, 6, 8], [3, 4], [1, 8]])
def test_noise_after_a_gap_is_the_noise_that_the_round_always_had(rounds: list[int]) -> None:
    """Two runs over the same rounds that differ in μ only differ by multiples of the same noise rows."""
    loud, quiet = (silo_of(resolve_cell(small_tree(privacy__rho=rho), "test")) for rho in (1.0, 2.0))
    whole = releases(loud, list(range(1, 9))), releases(quiet, list(range(1, 9)))
    parts = releases(loud, rounds), releases(quiet, rounds)
    for t in rounds:
        assert torch.allclose(parts[0][t] - parts[1][t], whole[0][t] - whole[1][t], rtol=1e-9, atol=1e-12)


def test_the_next_increment_is_taken_from_the_query_that_was_answered_last() -> None:
    """Without noise and clip, after rounds 1, 2 and 5 the sum is α_5 g_5(x_5) + what rounds 1 and 2 left."""
    cell = resolve_cell(small_tree(privacy__mode="none", privacy__rho=None, algorithm__clip=1e9), "test")
    silo = silo_of(cell)
    estimator, asked = silo.plan.estimator, queries(silo)
    released = releases(silo, [1, 2, 5])
    weights = {t: float(estimator.round(t).coefficients[0]) for t in (2, 5)}
    batch = silo._read(5).records
    assert batch is not None
    weights_of_records = torch.full((len(batch.labels),), 1.0 / len(batch.labels), dtype=torch.float64)
    now, before = (
        silo.objective.increment(Query((asked[t - 1],)), Batch(batch, weights_of_records), 1e9).total
        for t in (5, 2)
    )
    assert torch.allclose(released[5] - released[2], weights[5] * now - weights[2] * before, rtol=1e-9, atol=1e-12)


def test_a_gap_is_refused_where_the_scenario_has_none_and_the_past_is_closed() -> None:
    cell = resolve_cell(small_tree(), "test")
    strict, silo = SimulatedFederation.of(cell).silo(0), silo_of(cell)
    with pytest.raises(RunError, match="rounds come in order"):
        strict.answer(strict.start(), 2, queries(silo)[1])
    _, state = silo.answer(silo.start(), 3, queries(silo)[2])
    for t in (1, 2, 3, 9):
        with pytest.raises(RunError, match="rounds come in order"):
            silo.answer(state, t, queries(silo)[0])


def test_algorithms_that_cannot_skip_rounds_refuse_to_go_on_without_a_silo() -> None:
    tree = small_tree(
        algorithm={"name": "momentum-tree-reduced", "trust": "untrusted", "alpha": 0.2, "step": 0.005},
        privacy={"relation": "replace-one", "mu": 1.0},
        federation={"silos": 3, "rounds": 8, "epochs": 2},
        deployment={"missing": "continue"},
    )
    cell = resolve_cell(tree, "test")
    with pytest.raises(InputError, match="momentum-tree-reduced cannot go on without a silo"):
        plan_of(cell, task_of_cell(cell).objective)


def test_a_round_that_was_missed_enters_the_chain_that_decides_the_noise() -> None:
    """Otherwise a silo that is put back and asked round 2 after all would have one chain for two histories."""
    cell = resolve_cell(small_tree(), "test")
    task = task_of_cell(cell)
    plan, zero = plan_of(cell, task.objective, released=True), torch.zeros(7850, dtype=torch.float64)
    records = Records(torch.zeros(20, 785, dtype=torch.float64), torch.zeros(20, dtype=torch.int64))
    silo = Silo.of(0, plan, records, bytes(32), b"", gaps=True)
    _, first = silo.answer(silo.start(), 1, zero)
    _, gap = silo.answer(first, 3, zero)
    assert gap.chain == linked(linked_missed(first.chain), zero.numpy().tobytes())
    assert gap.chain != linked(first.chain, zero.numpy().tobytes())
