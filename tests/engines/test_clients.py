"""Clients in cohorts, from the scenario to the claim: denominators are public, nothing is kept."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedpriv
from fedpriv.accounting.gaussian import mu_of
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.claims.entries import read_ledger
from fedpriv.claims.ledger import make_release_streams
from fedpriv.claims.outcome import RunObserver
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.engines.table import make_engine
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.plan.calibration import fit_cell_noise
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.show.statement import make_statements
from fedpriv.show.verdict import describe_run, list_party_views
from fedpriv.study.results import read_results
from tests.engines.builders import claim_of, plan_cell, refusal, run_cell, run_on_both, small_cell
from tests.rough import rough_accounting

rough = pytest.fixture(autouse=True, scope="module")(rough_accounting)

FEDAVG = {"name": "dp-fedavg", "trust": "trusted", "local_steps": 3, "local_step": 0.05, "clip": 0.5}
QUIET = {"privacy__mode": "none", "privacy__epsilon": None}
CLIENT = {"unit": "client", "records": 6, "relation": "zero-out"}


def client_cell(**changes: Any) -> Cell:
    """200 clients of 6 records, cohorts of 20, 12 rounds, Poisson, ε = 4."""
    federation = {"clients": 200, "cohort": 20, "rounds": 12, "sampling": "poisson"}
    return small_cell(federation=federation, algorithm=FEDAVG, privacy={**CLIENT, "epsilon": 4.0}, **changes)


QUANTILE: dict[str, Any] = {"algorithm__clip_quantile": 0.4, "algorithm__clip_rate": 0.5}
ORDERS: dict[str, dict[str, Any]] = {
    "cyclic": {"federation__sampling": "fixed"},
    "available": {"federation__sampling": "available", "federation__min_separation": 4},
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mechanism", ["tree", "blt"])
def test_client_level_ftrl_trains_on_both_engines(order: str, mechanism: str) -> None:
    ftrl = {"algorithm__name": "dp-ftrl", "algorithm__step": 0.5, "algorithm__mechanism": mechanism}
    outcome, _ = run_on_both(fit_cell_noise(client_cell(**ftrl, **ORDERS[order])), atol=1e-11)
    claim = claim_of(outcome.releases)
    assert isinstance(claim.guarantee, GaussianDP)
    assert claim.guarantee.mu == pytest.approx(mu_of(4.0, 1e-5), rel=1e-9)


@pytest.mark.slow
def test_integer_releases_of_client_cohorts_meet_epsilon_and_train_as_in_floating_point() -> None:
    """The exact arithmetic of releases, and of the quantile's bit with it; near the run in floating point."""
    for clip in ({}, QUANTILE):
        released = run_cell("inprocess", client_cell(**clip, run__arithmetic="integers"))
        plain = run_cell("inprocess", client_cell(**clip, **QUIET))
        claim = claim_of(released.releases)
        assert claim.exact
        assert claim.guarantee.epsilon_of(1e-5) <= 4.0
        assert released.test_loss == pytest.approx(plain.test_loss, abs=0.5)


GOLDEN = [
    (0.1, 60, 2.0, 1e-5, 1.8609),
    (0.1, 60, 8.0, 1e-5, 0.8339),
    (0.01, 1000, 2.0, 1e-6, 1.0293),
    (0.001, 2000, 2.0, 1e-8, 0.7066),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("rate", "rounds", "epsilon", "delta", "multiplier"), GOLDEN)
def test_noise_multipliers_of_poisson_subsampled_cohorts_match_reference_values(
    rate: float, rounds: int, epsilon: float, delta: float, multiplier: float
) -> None:
    """Golden numbers of clients (q, T, ε, δ), by dp-accounting and the specification's own; z within 1e-3."""
    federation = {"clients": 1000, "cohort": int(1000 * rate), "rounds": rounds, "sampling": "poisson"}
    privacy = {**CLIENT, "epsilon": epsilon, "delta": delta}
    plan = plan_cell(small_cell(federation=federation, algorithm=FEDAVG, privacy=privacy))
    claim = claim_of(make_release_streams(plan, rounds))
    assert isinstance(claim.guarantee, PoissonGaussian)
    assert claim.guarantee.sampling_rate == rate
    assert claim.guarantee.noise_multiplier == pytest.approx(multiplier, rel=1e-3)
    assert plan.noise.std_in_mean == pytest.approx(
        claim.guarantee.noise_multiplier * 0.5 / (1000 * rate), rel=1e-9
    )


def test_adaptive_clipping_costs_only_the_norm_of_the_added_quantile_bit() -> None:
    """Clip κ = √(1 + ρ²/4) in units of the clip of the moment, ρ = 20/B: the same multiplier for κ."""
    fixed, following = (plan_cell(client_cell(**clip)) for clip in ({}, QUANTILE))
    assert following.objective.dimension == fixed.objective.dimension + 1
    of_fixed, of_following = (make_release_streams(plan, 12)[0] for plan in (fixed, following))
    assert of_following.clips == pytest.approx([np.sqrt(1.25)] * 12, rel=1e-12)
    assert of_fixed.clips == (0.5,) * 12
    costs = of_fixed.guarantee, of_following.guarantee
    assert isinstance(costs[0], PoissonGaussian)
    assert isinstance(costs[1], PoissonGaussian)
    assert costs[0].noise_multiplier == pytest.approx(costs[1].noise_multiplier, rel=1e-9)


def pool(cell: Cell) -> Any:
    return SimulatedFederation.from_cell(cell).silo(0)


def test_releases_are_divided_by_the_expected_cohort_size_for_every_draw() -> None:
    """Guarantee: a round's sum is divided by what is expected; that many or fewer, and none at all."""
    silo = pool(client_cell(**QUIET, algorithm__clip=1e-3))  # every client is clipped: of norm 1e-3
    query = silo.plan.objective.initial()
    drawn = {t: silo._read_batch(silo.plan.rounds[t - 1]) for t in range(1, 13)}
    assert len({len(read.weights) for read in drawn.values()}) > 3
    for t, read in drawn.items():
        assert read.weights.tolist() == [1.0 / 20] * len(read.weights)
        count = len(read.weights)
        batch = Batch(read.records, torch.ones(count, dtype=torch.float64))
        rows = silo.plan.objective.per_record(Query([query]), batch, torch.arange(count), 1e-3)
        released, _ = dataclasses.replace(silo, may_miss_rounds=True).answer(silo.initial_state(), t, query)
        torch.testing.assert_close(released.vector, rows.sum(0) / 20, rtol=1e-6, atol=1e-12)


def test_one_client_moves_a_release_by_at_most_its_clip_over_the_cohort_size() -> None:
    """Neighbours by brute force: each drawn client zeroed, and exchanged for a far one, in a round of the pool."""
    silo = pool(client_cell(**QUIET))
    seeded: dict[str, Any] = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
    query = torch.randn(silo.plan.objective.dimension, **seeded)
    plain, _ = silo.answer(silo.initial_state(), 1, query)
    rows = silo.plan.schedule.select_rows(1, 20, 0, lambda: silo._sampling_randomness)
    distances: dict[str, list[float]] = {"absent": [], "far": []}
    for client in rows.tolist():
        for kind, moved in distances.items():
            features, labels = silo.records.features.clone(), silo.records.labels.clone()
            if kind == "absent":
                labels[client] = -1
            else:
                features[client] = 1e5 * torch.randn(features[client].shape, dtype=torch.float64)
            neighbour = dataclasses.replace(silo, records=Records(features, labels))
            other, _ = neighbour.answer(silo.initial_state(), 1, query)
            moved.append(float((plain.vector - other.vector).norm()))
    assert 0.0 < min(distances["absent"]) <= max(distances["absent"]) <= 0.5 / 20 * (1 + 1e-9)
    assert 0.0 < min(distances["far"]) <= max(distances["far"]) <= 2 * 0.5 / 20 * (1 + 1e-9)


def test_the_round_state_of_a_cohort_has_no_part_per_client() -> None:
    """What the pool keeps is as large with 200 clients as with 20: queries and sums, nothing a client."""
    for silo in (pool(client_cell(federation__clients=count)) for count in (40, 200)):
        _, state = silo.answer(silo.initial_state(), 1, silo.plan.objective.initial())
        size = sum(tensor.numel() for tensor in (*state.past_vectors, *state.accumulator))
        assert size == silo.plan.objective.dimension
        assert state.mechanism_state == silo.plan.mechanism.start()


def test_clients_are_drawn_at_the_poisson_subsampling_rate() -> None:
    """200 clients, 600 rounds at q = 0.1: every count within 5.6 deviations, false alarm 200 · 2.1e-8 = 5e-6."""
    schedule = client_cell(federation__rounds=600).schedule
    coins = pool(client_cell())._sampling_randomness
    counts = np.zeros(200)
    for t in range(1, 601):
        counts[schedule.select_rows(t, 20, 0, lambda: coins)] += 1
    assert np.abs(counts - 60).max() < 5.6 * np.sqrt(600 * 0.1 * 0.9)
    assert counts.std() == pytest.approx(np.sqrt(600 * 0.09), rel=0.25)  # 5 deviations of a deviation of 200


def test_random_allocation_puts_every_client_into_one_secret_round_per_epoch() -> None:
    cell = client_cell(federation__sampling="allocation", federation__rounds=20)
    coins = pool(cell)._sampling_randomness
    rounds = [set(cell.schedule.select_rows(t, 20, 0, lambda: coins).tolist()) for t in range(1, 21)]
    for epoch in (rounds[:10], rounds[10:]):
        assert sorted(client for drawn in epoch for client in drawn) == list(range(200))
    assert rounds[0] != rounds[10]
    assert len({len(drawn) for drawn in rounds}) > 3


SKEWS = [{"partition": "shards", "shards": 2}, {"partition": "dirichlet", "concentration": 0.1}]


@pytest.mark.parametrize("partition", SKEWS)
def test_label_skewed_partitions_give_every_seed_the_same_skewed_clients(partition: dict[str, Any]) -> None:
    """Clients are the same ones for every seed; cohorts are not."""
    data = {f"data__{key}": value for key, value in partition.items()}
    cell = client_cell(**data)
    task, iid = load_task(cell), load_task(client_cell())
    assert task.unit_indices is not None
    assert task.unit_indices.shape == (200, 6)
    assert len(np.unique(task.unit_indices)) == 1200
    counts, others = ([len(set(row.tolist())) for row in data.train.labels] for data in (task, iid))
    assert np.mean(counts) < 0.6 * np.mean(others)
    other = client_cell(**data, data__name="synthetic").model_copy(update={"seed": 2})
    assert np.array_equal(load_task(other).unit_indices, task.unit_indices)
    assert not torch.equal(partition_records(other)[0], partition_records(cell)[0])


def test_consecutive_clients_share_memory_with_the_training_records() -> None:
    """A million clients are not copied."""
    assert load_task(client_cell()).train.features.untyped_storage().nbytes() >= 6000 * 785 * 8


FTRL = {"algorithm__name": "dp-ftrl", "algorithm__step": 1.0}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"algorithm__trust": "untrusted"}, "federation.clients with algorithm.trust = 'untrusted': a server sees"),
    ({"algorithm__trust": "secure-aggregation"}, "masks need the answers of all clients"),
    ({"privacy__unit": "record", "privacy__records": None}, 'federation.clients with privacy.unit = "record"'),
    ({"federation__silos": 3}, "federation: silos says nothing of clients in cohorts"),
    ({"federation__epochs": 2}, "epochs says nothing of clients"),
    ({"federation__batch": 5}, "batch says nothing of clients"),
    ({"federation__samples": 600}, "samples says nothing of clients"),
    ({"federation__cohort": None}, "clients and cohort come together"),
    ({"federation__rounds": None}, "give rounds"),
    ({"federation__cohort": 30}, "cohort = 30 does not divide clients = 200"),
    ({"federation__min_separation": 3}, "min_separation = 3: it is for clients that come by themselves"),
    ({"federation__sampling": "available"}, "min_separation: sampling = .available. needs it"),
    ({"federation__groups": 3}, "groups = 3: groups share out the 10 rounds"),
    ({"data__partition": "shards", "data__shards": 9}, r"data\.shards = 9"),
    ({"federation__clients": 2000}, "federation.clients = 2000: the training records of synthetic make 1000"),
    ({"privacy__records": 1}, "local_steps: what trains and is clipped is a client with its records"),
    ({"algorithm__clip_rate": 0.1}, "clip_rate needs a clip that follows a quantile"),
    (FTRL, "cannot be accounted for with tree noise"),
    ({**FTRL, "algorithm__clip_quantile": 0.5}, "algorithm.clip_quantile: unknown key"),
    ({**FTRL, "algorithm__local_step": None}, "go together"),
    ({"algorithm__name": "goldstein-erm"}, "algorithm"),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED)
def test_invalid_client_scenarios_are_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    """By something that comes before round 1."""
    with refusal(line):
        cell = client_cell(**changes)
        plan_cell(cell)
        partition_records(cell)


def test_participation_by_availability_requires_clients() -> None:
    with refusal(r'sampling = "available" is of clients: give clients and cohort'):
        small_cell(federation__sampling="available", federation__min_separation=2)


def test_the_deployment_engine_refuses_client_cohorts(tmp_path: Any) -> None:
    with refusal("engine deployment has silos with guards, and no clients"):
        list(make_engine("deployment", tmp_path)([client_cell()], RunObserver()))
    assert not list(tmp_path.iterdir())


def test_results_and_reports_of_a_client_run_describe_clients_and_their_protection(tmp_path: Path) -> None:
    """Results, ledger and report speak of clients; the ledger agrees with what is claimed."""
    fedpriv.run(client_cell().canonical_data(), out=tmp_path / "run")
    results = read_results(tmp_path / "run")
    (cell,) = results.cells
    assert (cell["clients"], cell["batch"], cell["silos"]) == (200, 20, 1)
    assert cell["unit"] == "everything one client holds, at most 6 records a round"
    assert all(entry.agrees for entry in read_ledger(tmp_path / "run"))
    assert "200 clients, cohorts of 20, 12 rounds." in describe_run(results)
    assert next(holder.who for holder in list_party_views(results)) == "each client (trusted)"
    (said,) = make_statements(results)
    assert said.protection.startswith("each client against the other clients")
    assert "whoever sees which devices are contacted" in said.protection
    assert said.hidden == "whether any one client contributed at all, the rest staying the same"


def test_a_client_cell_survives_a_json_round_trip() -> None:
    cell = client_cell()
    assert resolve_cell(json.loads(json.dumps(cell.canonical_data())), "test") == cell
