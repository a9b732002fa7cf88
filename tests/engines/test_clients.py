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
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.entries import read_ledger
from fedpriv.claims.ledger import make_release_streams
from fedpriv.claims.outcome import RunObserver
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError
from fedpriv.engines.table import make_engine
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.plan.calibration import fit_cell_noise
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.show.statement import make_statements
from fedpriv.show.verdict import describe_run, list_party_views
from fedpriv.study.results import read_results
from tests.conftest import small_tree
from tests.engines.test_engines import run

FEDAVG = {"name": "dp-fedavg", "trust": "trusted", "local_steps": 3, "local_step": 0.05, "clip": 0.5}
QUIET = {"privacy__mode": "none", "privacy__epsilon": None}
CLIENT = {"unit": "client", "records": 6, "relation": "zero-out"}


def client_cell(**changes: Any) -> Cell:
    """200 clients of 6 records, cohorts of 20, 12 rounds, Poisson, ε = 4."""
    tree = small_tree(
        federation={"clients": 200, "cohort": 20, "rounds": 12, "sampling": "poisson"},
        algorithm=FEDAVG,
        privacy={**CLIENT, "epsilon": 4.0},
    )
    for dotted, value in changes.items():
        section, key = dotted.split("__")
        tree[section] = {**tree[section], key: value}
        if value is None:
            del tree[section][key]
    return resolve_cell(tree, "test")


ROWS: dict[str, dict[str, Any]] = {
    "dp-fedavg": {},
    "dp-fedavg, quantile": {"clip_quantile": 0.4, "clip_rate": 0.5},
}
ORDERS: dict[str, dict[str, Any]] = {
    "cyclic": {"sampling": "fixed"},
    "available": {"sampling": "available", "min_separation": 4},
}


def row_cell(row: str, **changes: Any) -> Cell:
    return client_cell(**{f"algorithm__{key}": value for key, value in ROWS[row].items()}, **changes)


@pytest.mark.parametrize("order", ["cyclic", "available"])
@pytest.mark.parametrize("mechanism", [{"mechanism": "tree"}, {"mechanism": "blt"}])
def test_client_level_ftrl_trains_on_both_engines(order: str, mechanism: dict[str, Any]) -> None:
    ftrl = {"name": "dp-ftrl", "step": 0.5, **mechanism}
    changes = {f"algorithm__{key}": value for key, value in ftrl.items()}
    orders = {f"federation__{key}": value for key, value in ORDERS[order].items()}
    cell = fit_cell_noise(client_cell(**changes, **orders))
    (vectorized,), _ = run("vectorized", cell)
    (inprocess,), _ = run("inprocess", cell)
    np.testing.assert_allclose(vectorized.cell_outcome.model, inprocess.cell_outcome.model, rtol=1e-9, atol=1e-11)
    claim = compute_claim(vectorized.cell_outcome.releases)
    assert claim is not None
    assert isinstance(claim.guarantee, GaussianDP)
    assert claim.guarantee.mu == pytest.approx(mu_of(4.0, 1e-5), rel=1e-9)


@pytest.mark.slow
def test_integers_are_released_of_cohorts_too() -> None:
    """The exact arithmetic of releases, and of the quantile's bit with it; near the run in floating point."""
    for row in ("dp-fedavg", "dp-fedavg, quantile"):
        exact = row_cell(row, run__arithmetic="integers")
        (released,), _ = run("inprocess", exact)
        (plain,), _ = run("inprocess", row_cell(row, **QUIET))
        claim = compute_claim(released.cell_outcome.releases)
        assert claim is not None
        assert claim.exact
        assert claim.guarantee.epsilon_of(1e-5) <= 4.0
        assert released.cell_outcome.test_loss == pytest.approx(plain.cell_outcome.test_loss, abs=0.5)


GOLDEN = [
    (0.1, 60, 2.0, 1e-5, 1.8609),
    (0.1, 60, 8.0, 1e-5, 0.8339),
    (0.01, 1000, 2.0, 1e-6, 1.0293),
    (0.001, 2000, 2.0, 1e-8, 0.7066),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("rate", "rounds", "epsilon", "delta", "multiplier"), GOLDEN)
def test_noise_of_cohorts_is_the_specifications(
    rate: float, rounds: int, epsilon: float, delta: float, multiplier: float
) -> None:
    """Golden numbers of clients (q, T, ε, δ), by dp-accounting and the specification's own; z within 1e-3."""
    cell = client_cell(
        federation__clients=1000, federation__cohort=int(1000 * rate), federation__rounds=rounds,
        privacy__epsilon=epsilon, privacy__delta=delta,
    )  # fmt: skip
    plan = make_plan(cell, load_task(cell).objective)
    claim = compute_claim(make_release_streams(plan, rounds))
    assert claim is not None
    assert isinstance(claim.guarantee, PoissonGaussian)
    assert claim.guarantee.sampling_rate == rate
    assert claim.guarantee.noise_multiplier == pytest.approx(multiplier, rel=1e-3)
    assert plan.noise.std_in_mean == pytest.approx(
        claim.guarantee.noise_multiplier * 0.5 / (1000 * rate), rel=1e-9
    )


def test_the_quantile_costs_what_its_bit_adds_to_the_norm() -> None:
    """Clip κ = √(1 + ρ²/4) in units of the clip of the moment, ρ = 20/B: the same multiplier for κ."""
    fixed, following = (
        make_plan(cell := row_cell(row), load_task(cell).objective) for row in ("dp-fedavg", "dp-fedavg, quantile")
    )
    assert following.objective.dimension == fixed.objective.dimension + 1
    of_fixed, of_following = (make_release_streams(plan, 12)[0] for plan in (fixed, following))
    assert of_following.clips == pytest.approx([np.sqrt(1.25)] * 12, rel=1e-12)
    assert of_fixed.clips == (0.5,) * 12
    multipliers = [
        stream.guarantee.noise_multiplier
        for stream in (of_fixed, of_following)
        if isinstance(stream.guarantee, PoissonGaussian)
    ]
    assert multipliers[0] == pytest.approx(multipliers[1], rel=1e-9)


def pool(cell: Cell) -> Any:
    return SimulatedFederation.from_cell(cell).silo(0)


def test_the_denominator_is_the_cohort_whoever_is_drawn() -> None:
    """Guarantee: a round's sum is divided by what is expected; that many or fewer, and none at all."""
    cell = client_cell(**QUIET, algorithm__clip=1e-3)  # every client is clipped: of norm 1e-3
    silo = pool(cell)
    query = silo.plan.objective.initial()
    drawn = {t: silo._read_batch(silo.plan.rounds[t - 1]) for t in range(1, 13)}
    assert len({len(read.weights) for read in drawn.values()}) > 3
    for t, read in drawn.items():
        assert read.weights.tolist() == [1.0 / 20] * len(read.weights)
        rows = silo.plan.objective.per_record(
            Query([query]),
            Batch(read.records, torch.ones(len(read.weights), dtype=torch.float64)),
            torch.arange(len(read.weights)),
            1e-3,
        )
        released, _ = dataclasses.replace(silo, may_miss_rounds=True).answer(silo.initial_state(), t, query)
        torch.testing.assert_close(released.vector, rows.sum(0) / 20, rtol=1e-6, atol=1e-12)


def test_one_client_moves_a_release_by_its_clip_over_the_cohort() -> None:
    """Neighbours by brute force: each drawn client zeroed, and exchanged for a far one, in a round of the pool."""
    silo = pool(client_cell(**QUIET))
    query = torch.randn(
        silo.plan.objective.dimension, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    plain, _ = silo.answer(silo.initial_state(), 1, query)
    rows = silo.plan.schedule.select_rows(1, 20, 0, lambda: silo._sampling_randomness)
    moved = []
    for client in rows.tolist():
        for kind in ("none", "far"):
            features, labels = silo.records.features.clone(), silo.records.labels.clone()
            if kind == "none":
                labels[client] = -1
            else:
                features[client] = 1e5 * torch.randn(features[client].shape, dtype=torch.float64)
            other, _ = dataclasses.replace(silo, records=Records(features, labels)).answer(
                silo.initial_state(), 1, query
            )
            moved.append((kind, float((plain.vector - other.vector).norm())))
    assert max(size for kind, size in moved if kind == "none") <= 0.5 / 20 * (1 + 1e-9)
    assert max(size for kind, size in moved if kind == "far") <= 2 * 0.5 / 20 * (1 + 1e-9)
    assert min(size for _, size in moved) > 0.0


def test_nothing_is_kept_of_any_client_between_rounds() -> None:
    """What the pool keeps is as large with 200 clients as with 20: queries and sums, nothing a client."""
    small = client_cell(federation__clients=40, federation__cohort=20)
    for cell in (small, client_cell()):
        silo = pool(cell)
        _, state = silo.answer(silo.initial_state(), 1, silo.plan.objective.initial())
        size = sum(tensor.numel() for tensor in (*state.past_vectors, *state.accumulator))
        assert size == silo.plan.objective.dimension
        assert state.mechanism_state == silo.plan.mechanism.start()


def test_a_client_is_drawn_as_often_as_the_rate_says() -> None:
    """200 clients, 600 rounds at q = 0.1: every count within 5.6 deviations, false alarm 200 · 2.1e-8 = 5e-6."""
    schedule = client_cell(federation__rounds=600).schedule
    coins = pool(client_cell())._sampling_randomness
    counts = np.zeros(200)
    for t in range(1, 601):
        counts[schedule.select_rows(t, 20, 0, lambda: coins)] += 1
    assert np.abs(counts - 60).max() < 5.6 * np.sqrt(600 * 0.1 * 0.9)
    assert counts.std() == pytest.approx(np.sqrt(600 * 0.09), rel=0.25)  # 5 deviations of a deviation of 200


def test_with_allocation_every_client_is_in_one_secret_round_of_an_epoch() -> None:
    cell = client_cell(federation__sampling="allocation", federation__rounds=20)
    coins = pool(cell)._sampling_randomness
    rounds = [set(cell.schedule.select_rows(t, 20, 0, lambda: coins).tolist()) for t in range(1, 21)]
    for epoch in (rounds[:10], rounds[10:]):
        assert sorted(client for drawn in epoch for client in drawn) == list(range(200))
    assert rounds[0] != rounds[10]
    assert len({len(drawn) for drawn in rounds}) > 3


SKEWS = [{"partition": "shards", "shards": 2}, {"partition": "dirichlet", "concentration": 0.1}]


@pytest.mark.parametrize("partition", SKEWS)
def test_labels_can_be_skewed_over_clients(partition: dict[str, Any]) -> None:
    """Clients are the same ones for every seed; cohorts are not."""
    data = {f"data__{key}": value for key, value in partition.items()}
    cell, iid = client_cell(**data), client_cell()
    task = load_task(cell)
    assert task.unit_indices is not None
    assert task.unit_indices.shape == (200, 6)
    assert len(np.unique(task.unit_indices)) == 1200
    labels = [len(set(row.tolist())) for row in task.train.labels]
    assert np.mean(labels) < 0.6 * np.mean([len(set(row.tolist())) for row in load_task(iid).train.labels])
    other = client_cell(**data, data__name="synthetic").model_copy(update={"seed": 2})
    assert np.array_equal(load_task(other).unit_indices, task.unit_indices)
    assert not torch.equal(partition_records(other)[0], partition_records(cell)[0])


def test_clients_in_a_row_are_a_view_of_the_records() -> None:
    """A million clients are not copied."""
    cell = client_cell()
    assert load_task(cell).train.features.untyped_storage().nbytes() >= 6000 * 785 * 8


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
    (
        {"federation__clients": 2000},
        "federation.clients = 2000: the training records of synthetic make 1000",
    ),
    ({"privacy__records": 1}, "local_steps: what trains and is clipped is a client with its records"),
    ({"algorithm__clip_rate": 0.1}, "clip_rate needs a clip that follows a quantile"),
    ({"algorithm__name": "dp-ftrl", "algorithm__step": 1.0}, "cannot be accounted for with tree noise"),
    (
        {"algorithm__name": "dp-ftrl", "algorithm__step": 1.0, "algorithm__clip_quantile": 0.5},
        "algorithm.clip_quantile: unknown key",
    ),
    ({"algorithm__name": "dp-ftrl", "algorithm__step": 1.0, "algorithm__local_step": None}, "go together"),
    ({"algorithm__name": "goldstein-erm"}, "algorithm"),
]


def planned(changes: dict[str, Any]) -> None:
    """Everything that comes before round 1."""
    cell = client_cell(**changes)
    make_plan(cell, load_task(cell).objective)
    partition_records(cell)


@pytest.mark.parametrize(("changes", "line"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line) as refusal:
        planned(changes)
    assert len(str(refusal.value).splitlines()) == 1


def test_available_is_of_clients() -> None:
    with pytest.raises(InputError, match=r'sampling = "available" is of clients: give clients and cohort'):
        resolve_cell(small_tree(federation__sampling="available", federation__min_separation=2), "test")


def test_a_deployment_has_no_cohorts(tmp_path: Any) -> None:
    with pytest.raises(InputError, match="engine deployment has silos with guards, and no clients"):
        list(make_engine("deployment", tmp_path)([client_cell()], RunObserver()))
    assert not list(tmp_path.iterdir())


def test_a_run_of_clients_says_so_in_its_folder(tmp_path: Path) -> None:
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


def test_a_cell_is_plain_data_and_back() -> None:
    cell = client_cell()
    assert resolve_cell(json.loads(json.dumps(cell.canonical_data())), "test") == cell
