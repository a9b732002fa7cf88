"""DP-SGD inside silos: the literal algorithm on both engines, its accounting, and its guard."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.accounting.gaussian import mu_of
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import make_release_streams
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import simulation_noise
from fedpriv.loss.objective import Batch, Query
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.guard import Guard
from fedpriv.silo.silo import Silo
from tests.conftest import small_tree
from tests.engines.builders import plan_cell, run, run_cell
from tests.silo.charged import charged
from tests.silo.guarded import ZERO, cell_json, guard_of, write_silo

LOCAL: dict[str, Any] = {"name": "local-dp-sgd", "trust": "untrusted", "clip": 2.0, "step": 0.05, "local_steps": 4}
PRIVATE: dict[str, Any] = {"relation": "replace-one", "mu": 2.0}


def cell_of(**overrides: Any) -> Cell:
    """3 silos, 12 steps of 5 records, an average every 4."""
    tree = small_tree(**{"federation": {"silos": 3, "rounds": 12, "batch": 5}, **overrides})
    tree["algorithm"] = {**LOCAL, **overrides.get("algorithm", {})}
    tree["privacy"] = overrides.get("privacy", PRIVATE)
    return resolve_cell(tree, "test")


def literally(cell: Cell) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The algorithm as one writes it down: softmax regression, every silo with its own model and noise."""
    task, order, plan = load_task(cell), partition_records(cell), plan_cell(cell)
    noise, settings = simulation_noise(cell.seed, "float64"), cell.algorithm.settings
    features, labels = task.train.features.numpy(), task.train.labels.numpy()
    average, size = np.zeros((10, features.shape[1])), 5
    for start in range(0, 12, 4):
        models = []
        for silo in range(3):
            own = average.copy()
            for t in range(start + 1, start + 5):
                total = np.zeros_like(own)
                for record in order[silo][(t - 1) * size : t * size].tolist():
                    scores = own @ features[record]
                    shares = np.exp(scores - scores.max())
                    shares /= shares.sum()
                    shares[labels[record]] -= 1.0
                    gradient = np.outer(shares, features[record])
                    total += gradient * min(1.0, settings.clip / np.linalg.norm(gradient))
                std = float(plan.noise.std_of(silo))
                drawn = noise.vector(own.size, silo, t).reshape(own.shape) if std else 0.0
                own -= settings.step * (total / size + std * drawn)
            models.append(own)
        average = np.mean(models, axis=0)
    return np.asarray(average.reshape(-1))


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
@pytest.mark.parametrize("privacy", [PRIVATE, {"relation": "replace-one", "mode": "none"}], ids=["noisy", "quiet"])
def test_an_engine_runs_the_algorithm_as_it_is_written_down(engine: str, privacy: dict[str, Any]) -> None:
    cell = cell_of(privacy=privacy)
    outcome = run_cell(engine, cell)
    np.testing.assert_allclose(outcome.model, literally(cell), rtol=1e-9, atol=1e-12)


def test_one_step_between_two_averages_is_dp_sgd() -> None:
    local = cell_of(algorithm={"local_steps": 1})
    plain = small_tree(federation={"silos": 3, "rounds": 12, "batch": 5})
    plain["algorithm"] = {"name": "dp-sgd", "trust": "untrusted", "clip": 2.0, "step": 0.05}
    plain["privacy"] = PRIVATE
    for engine in ("vectorized", "inprocess"):
        one = run_cell(engine, local)
        other = run_cell(engine, resolve_cell(plain, "test"))
        np.testing.assert_allclose(one.model, other.model, rtol=1e-9, atol=1e-13)


def test_without_noise_and_clips_it_is_federated_averaging() -> None:
    quiet = {"relation": "replace-one", "mode": "none"}
    local = cell_of(algorithm={"clip": 1e6}, privacy=quiet)
    averaging = small_tree(federation={"silos": 3, "rounds": 3, "batch": 20}, run__evaluations=3)
    averaging["algorithm"] = {"name": "fedavg", "trust": "untrusted", "step": 0.05, "local_batch": 5}
    averaging["privacy"] = quiet
    (one,), _ = run("inprocess", local)
    other = run_cell("inprocess", resolve_cell(averaging, "test"))
    np.testing.assert_allclose(one.cell_outcome.model, other.model, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("epochs", [1, 3, 12])
@pytest.mark.parametrize(("relation", "factor"), [("replace-one", 2.0), ("zero-out", 1.0)])
def test_every_step_is_charged(epochs: int, relation: str, factor: float) -> None:
    """A record is in `epochs` of the steps: μ = factor · C · √epochs / (B σ), whatever K is."""
    for steps in (1, 3, 12):
        cell = cell_of(
            federation={"silos": 3, "rounds": 12, "epochs": epochs, "batch": 5},
            algorithm={"local_steps": steps},
            privacy={"relation": relation, "mu": 2.0},
        )
        (stream,) = make_release_streams(plan_cell(cell), 12)
        assert stream.std == pytest.approx(factor * 2.0 * math.sqrt(epochs) / (5 * 2.0))
        assert stream.mu == pytest.approx(2.0)
        assert stream.schedule.rounds == 12


@pytest.mark.parametrize("sampling", ["poisson", "allocation"])
def test_sampled_steps_cost_what_as_many_sampled_rounds_of_dp_sgd_cost(sampling: str) -> None:
    """K T releases: the accountant's ε for the same noise, and not that of T averages."""
    federation = {"silos": 3, "rounds": 12, "epochs": 3, "batch": 5, "sampling": sampling}
    private = {"relation": "zero-out", "epsilon": 2.0}
    local = cell_of(federation=federation, privacy=private)
    tree = small_tree(federation=federation)
    tree["privacy"], tree["algorithm"] = (
        private,
        {"name": "dp-sgd", "trust": "untrusted", "clip": 2.0, "step": 0.05},
    )
    plain = resolve_cell(tree, "test")
    (one,), (other,) = (make_release_streams(plan_cell(cell), 12) for cell in (local, plain))
    assert one.std == other.std
    claim, also = compute_claim([one]), compute_claim([other])
    assert claim is not None
    assert also is not None
    assert claim.guarantee.epsilon_of(1e-5) == also.guarantee.epsilon_of(1e-5) <= 2.0
    fixed = cell_of(
        federation={**federation, "sampling": "fixed"}, privacy={"relation": "zero-out", "mu": mu_of(2.0, 1e-5)}
    )
    (in_order,) = make_release_streams(plan_cell(fixed), 12)
    assert one.std != in_order.std


@pytest.mark.parametrize("trust", ["trusted", "secure-aggregation", "curator"])
def test_a_server_cannot_add_the_noise_of_local_steps(trust: str) -> None:
    with pytest.raises(InputError, match="local-dp-sgd") as refused:
        cell_of(algorithm={"trust": trust})
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"algorithm": {"local_steps": 5}}, r"algorithm\.local_steps = 5: 12 rounds, which are silos' steps"),
        ({"deployment": {"missing": "continue"}}, "its silos step by themselves"),
        ({"run__noise": "aggregate"}, "step by themselves, each with noise of its own"),
    ],
)
def test_what_local_steps_cannot_do_is_refused_in_one_line(overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason) as refused:
        run("vectorized", cell_of(**overrides))
    assert len(str(refused.value).splitlines()) == 1


SCENARIO = cell_json(algorithm=LOCAL, privacy=PRIVATE)
"""8 steps of one record, an average every 4, for a guard."""


def from_key(guard: Guard, queries: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a silo with the guard's own key releases that is never stopped."""
    run_ = guard._ledger.find_run("run")
    assert run_ is not None
    assert run_.key is not None
    cell = resolve_cell(json.loads(SCENARIO), "test")
    admitted = guard._admission.admit(guard._admission.canonicalize(SCENARIO))
    silo = Silo.for_release(0, admitted.plan, guard.shard.model_records(cell), run_.key, admitted.scenario_digest)
    state, releases = silo.initial_state(), []
    for t, query in enumerate(queries, start=1):
        release, state = silo.answer(state, t, query)
        releases.append(silo.make_message(release.vector, t, b"", state.query_chain))
    return releases


def test_a_guard_takes_local_steps_and_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """Its own point is packed with its state: restarted before every step it releases the same bytes."""
    path = write_silo(tmp_path)
    queries = [ZERO + (t > 4) for t in range(1, 8)]
    releases = [guard_of(path).answer("run", SCENARIO, t, query) for t, query in enumerate(queries, start=1)]
    for one, other in zip(releases, from_key(guard_of(path), queries), strict=True):
        assert torch.equal(one, other)
    again = guard_of(path)
    assert torch.equal(again.answer("run", SCENARIO, 2, ZERO), releases[1])
    with pytest.raises(RunError, match="round 2 was answered already, for another query"):
        again.answer("run", SCENARIO, 2, ZERO + 1.0)
    assert charged(again._ledger) == pytest.approx([2.0])


def test_a_silo_steps_from_its_own_releases_and_starts_again_from_the_average() -> None:
    cell = cell_of(privacy={"relation": "replace-one", "mode": "none"})
    silo, query = SimulatedFederation.from_cell(cell).silo(1), torch.zeros(7850, dtype=torch.float64)
    state, own = silo.initial_state(), query
    for t in range(1, 7):
        own = query if t in (1, 5) else own
        release, state = silo.answer(state, t, query)
        asked = gradient_at(cell, own, t)
        torch.testing.assert_close(release.vector, asked, rtol=1e-9, atol=1e-12)
        own = own - 0.05 * release.vector


def gradient_at(cell: Cell, point: torch.Tensor, t: int) -> torch.Tensor:
    """Silo 1's clipped mean gradient of step t at `point`."""
    plain = cell.model_copy(update={"algorithm": cell.algorithm.model_copy(update={"name": "local-dp-sgd"})})
    silo = SimulatedFederation.from_cell(plain).silo(1)
    records, weights = (
        silo._read_batch(silo.plan.rounds[t - 1]).records,
        silo._read_batch(silo.plan.rounds[t - 1]).weights,
    )
    assert records is not None
    return silo.plan.objective.increment(Query([point]), Batch(records, weights), 2.0).total


@pytest.mark.parametrize("arithmetic", ["float", "integers"])
def test_integers_and_floats_differ_by_their_noise_alone(arithmetic: str) -> None:
    outcome = run_cell("inprocess", cell_of(run__arithmetic=arithmetic))
    (stream,) = outcome.releases
    assert (stream.integer_release is not None) == (arithmetic == "integers")
    assert stream.mu == pytest.approx(2.0)
    assert np.isfinite(outcome.model).all()
