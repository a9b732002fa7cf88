"""A silo answers what the protocol allows, with the noise it owes, and nothing else."""

import contextlib
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from scipy import stats

from fedpriv.clients.simulated import ContextStore, SimulatedFederation
from fedpriv.core.errors import RunError
from fedpriv.core.random import KeyedNormal
from fedpriv.loss.objective import Records
from fedpriv.rounds.plan import plan_of
from fedpriv.rounds.task import spread, task_of_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import Silo
from tests.disordered import at_address, disordered

MakeCell = Callable[..., Cell]


def noise_of_releases(cell: Cell, silo: Silo, exact: Silo) -> torch.Tensor:
    """What a silo added to its sums over a whole run at the origin: (T, d)."""
    query = torch.zeros(silo.objective.dimension, dtype=torch.float64)
    state, plain = silo.start(), exact.start()
    rows = []
    for t in range(1, cell.federation.total_rounds + 1):
        release, state = silo.answer(state, t, query)
        truth, plain = exact.answer(plain, t, query)
        rows.append(release.vector - truth.vector)
    return torch.stack(rows)


def test_noise_has_the_papers_variance_and_is_independent(small_cell: MakeCell) -> None:
    """σ² = 4 S² T / ρ² per coordinate; KS at level 1e-4, and rejected at 2/3 and 3/2 of σ; rounds uncorrelated."""
    cell = small_cell(federation__rounds=16)
    exact = SimulatedFederation.of(
        small_cell(federation__rounds=16, privacy__mode="none", privacy__rho=None)
    ).silo(1)
    noise = noise_of_releases(cell, SimulatedFederation.of(cell).silo(1), exact)
    clip = np.sqrt(2 * 785) + 2 * 392.5 * 0.1
    sigma = 2 * clip * np.sqrt(16) / 4.0
    values = noise.flatten().numpy() / sigma
    assert stats.kstest(values, "norm").pvalue > 1e-4
    assert stats.kstest(values * 2 / 3, "norm").pvalue < 1e-12
    assert stats.kstest(values * 3 / 2, "norm").pvalue < 1e-12
    assert abs(values.mean()) < 4 / np.sqrt(values.size)
    correlations = np.corrcoef(noise.numpy()) - np.eye(16)
    assert np.abs(correlations).max() < 5 / np.sqrt(7850)
    other = noise_of_releases(
        cell,
        SimulatedFederation.of(cell).silo(0),
        SimulatedFederation.of(small_cell(federation__rounds=16, privacy__mode="none", privacy__rho=None)).silo(0),
    )
    assert abs(np.corrcoef(noise.flatten(), other.flatten())[0, 1]) < 5 / np.sqrt(values.size)


def test_silos_of_one_process_hold_a_bounded_amount_of_noise(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The more silos, the fewer rounds each draws ahead; what it releases stays the same."""
    cell = small_cell(federation__silos=3, federation__rounds=8)
    exact = SimulatedFederation.of(small_cell(federation__silos=3, privacy__mode="none", privacy__rho=None)).silo(
        0
    )
    unbounded = noise_of_releases(cell, SimulatedFederation.of(cell).silo(0), exact)
    monkeypatch.setattr("fedpriv.rounds.round._VALUES_AHEAD", 2 * 3 * 7850)
    drawn: list[int] = []
    vectors = KeyedNormal.vectors

    def counted(self: KeyedNormal, size: int, owners: list[int], *rest: Any) -> Any:
        drawn.append(len(owners))
        return vectors(self, size, owners, *rest)

    monkeypatch.setattr(KeyedNormal, "vectors", counted)
    assert torch.equal(noise_of_releases(cell, SimulatedFederation.of(cell).silo(0), exact), unbounded)
    assert drawn == [2, 2, 2, 2]


def test_trusted_silo_releases_exactly_its_sum(small_cell: MakeCell) -> None:
    trusted = small_cell(algorithm__trust="trusted")
    exact = small_cell(privacy__mode="none", privacy__rho=None)
    noise = noise_of_releases(
        trusted, SimulatedFederation.of(trusted).silo(2), SimulatedFederation.of(exact).silo(2)
    )
    assert torch.all(noise == 0.0)


def test_trusted_noise_is_one_over_silos_of_the_untrusted(small_cell: MakeCell) -> None:
    """σ = 2 S √T / (ρ M) at the server against 2 S √T / ρ at each silo."""
    task = task_of_cell(small_cell())
    trusted = plan_of(small_cell(algorithm__trust="trusted", federation__silos=5), task.objective)
    untrusted = plan_of(small_cell(federation__silos=5), task.objective)
    assert trusted.noise.std_in_mean == pytest.approx(untrusted.noise.sources[0].std / 5)
    assert untrusted.noise.std_in_mean == pytest.approx(untrusted.noise.sources[0].std / np.sqrt(5))


def test_each_record_is_used_in_exactly_one_round(small_cell: MakeCell) -> None:
    """Replacing the record of round 5 changes nothing before round 5, and every release from it on."""
    cell = small_cell(privacy__mode="none", privacy__rho=None)
    silo = SimulatedFederation.of(cell).silo(0)
    features = silo.records.features.clone()
    features[4] *= -0.5
    neighbour = Silo(0, silo.plan, silo.records._replace(features=features), silo.noise)
    difference = noise_of_releases(cell, neighbour, silo).norm(dim=1)
    assert torch.all(difference[:4] == 0.0)
    assert torch.all(difference[4:] > 0.0)


def test_no_record_is_shared_between_silos(small_cell: MakeCell) -> None:
    order = torch.stack(spread(small_cell(federation__silos=30, federation__rounds=200)))
    assert order.shape == (30, 200)
    assert len(order.unique()) == order.numel()


@pytest.mark.parametrize(
    ("t", "query", "line"),
    [
        (3, torch.zeros(7850, dtype=torch.float64), "asked for round 3 after round 1"),
        (1, torch.zeros(7850, dtype=torch.float64), "asked for round 1 after round 1"),
        (2, torch.zeros(7849, dtype=torch.float64), r"shape \(7849,\)"),
        (2, torch.zeros(7850, dtype=torch.float32), "type torch.float32"),
        (2, torch.full((7850,), torch.inf, dtype=torch.float64), "not finite"),
    ],
)
def test_a_silo_refuses_what_the_protocol_does_not_have(
    small_cell: MakeCell, t: int, query: torch.Tensor, line: str
) -> None:
    silo = SimulatedFederation.of(small_cell()).silo(0)
    _, state = silo.answer(silo.start(), 1, torch.zeros(7850, dtype=torch.float64))
    with pytest.raises(RunError, match=line):
        silo.answer(state, t, query)


def test_a_silo_stops_after_the_last_round(small_cell: MakeCell) -> None:
    silo, query = (
        SimulatedFederation.of(small_cell(federation__rounds=2)).silo(0),
        torch.zeros(7850, dtype=torch.float64),
    )
    state = silo.start()
    for t in (1, 2):
        _, state = silo.answer(state, t, query)
    with pytest.raises(RunError, match="round 3 after round 2 of 2"):
        silo.answer(state, 3, query)


def test_state_survives_a_context_and_its_way_to_another_process(small_cell: MakeCell) -> None:
    silo, records = SimulatedFederation.of(small_cell()).silo(0), RecordDict()
    state = ContextStore(records).load(silo)
    assert state.answered == 0
    for t in (1, 2, 3):
        _, state = silo.answer(state, t, torch.randn(7850, dtype=torch.float64))
        ContextStore(records).save(state)
        moved = pickle.loads(pickle.dumps(records))
        assert type(moved["fedpriv-silo"]) is ConfigRecord
        for kept in (ContextStore(records).load(silo), ContextStore(moved).load(silo)):
            assert kept.answered == t
            assert torch.equal(kept.sums[0], state.sums[0])
            assert all(map(torch.equal, kept.past, state.past))
            assert len(kept.past) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [1, 3])
def test_bits_do_not_follow_from_where_a_message_or_an_array_lies(
    small_cell: MakeCell, dtype: str, batch: int
) -> None:
    """Guarantee: the same values in the same shapes give the same bits in every process of one machine.

    Queries, records and states lie at every address that a message can put them at, on a processor whose products
    follow it; without `aligned` this is red, with and without disordered products.
    """
    rounds = {"federation__samples": 24, "federation__rounds": 12 // batch}
    cell = small_cell(federation__silos=2, federation__batch=batch, run__dtype=dtype, **rounds)
    silo = SimulatedFederation.of(cell).silo(0)
    generator = torch.Generator().manual_seed(1)
    queries = 0.1 * torch.randn((3, 7850), generator=generator).to(silo.records.features.dtype)

    def releases(offset: int) -> list[torch.Tensor]:
        moved = dataclasses.replace(silo, records=Records(*(at_address(c, offset) for c in silo.records)))
        state, found = moved.start(), []
        for t, query in enumerate(queries, start=1):
            release, state = moved.answer(state, t, at_address(query, offset))
            state = state._replace(past=tuple(at_address(each, offset) for each in state.past))
            found.append(release.vector)
        return found

    for disorder in (contextlib.nullcontext(), disordered()):
        with disorder:
            first, *others = (releases(offset) for offset in (0, 1, 5))
        for other in others:
            assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("anchor_batches", [1, 3])
def test_guarantee_weights_of_a_rounds_records_add_up_to_one(small_cell: MakeCell, anchor_batches: int) -> None:
    """However many batches a round reads: 3 in an anchor's, with a weight each that would charge a third."""
    algorithm = {
        "name": "goldstein-single-pass", "trust": "untrusted", "anchor_batches": anchor_batches, "smoothing": 0.4,
        "radius": 0.02, "period": 4, "anchor_clip": 5.0, "clip": 1.0, "window": 3, "step": 0.01, "output": "last",
    }  # fmt: skip
    cell = small_cell(
        algorithm=algorithm,
        federation={"silos": 3, "rounds": 11, "batch": 2},
        privacy={"relation": "zero-out", "mu": 1.0},
    )
    silo = SimulatedFederation.of(cell).silo(1)
    records = [len(silo._read(t).weights) for t in range(1, 12)]
    assert max(records) == 2 * anchor_batches
    for t in range(1, 12):
        assert float(silo._read(t).weights.sum()) == pytest.approx(1.0, rel=1e-12)
