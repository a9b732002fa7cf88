"""DP-SGD inside silos: the literal algorithm on both engines, its accounting, and its guard."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.accounting.gaussian import mu_of
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import RunError
from fedpriv.core.random import simulation_noise
from fedpriv.loss.objective import Batch, Query
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.guard import Guard
from fedpriv.silo.silo import Silo
from tests.engines.builders import (
    ENGINES,
    QUIET,
    claim_of,
    plan_cell,
    refusal,
    run,
    run_cell,
    small_cell,
    streams_of,
)
from tests.silo.charged import charged
from tests.silo.guarded import ZERO, cell_json, guard_of, write_silo

LOCAL: dict[str, Any] = {"name": "local-dp-sgd", "trust": "untrusted", "clip": 2.0, "step": 0.05, "local_steps": 4}
SGD: dict[str, Any] = {"name": "dp-sgd", "trust": "untrusted", "clip": 2.0, "step": 0.05}
PRIVATE: dict[str, Any] = {"relation": "replace-one", "mu": 2.0}
STEPS: dict[str, Any] = {"silos": 3, "rounds": 12, "batch": 5}


def local_cell(**changes: Any) -> Cell:
    """3 silos, 12 steps of 5 records, an average every 4."""
    return small_cell(**{"federation": STEPS, "algorithm": LOCAL, "privacy": PRIVATE, **changes})


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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("privacy", [PRIVATE, QUIET], ids=["noisy", "quiet"])
def test_both_engines_equal_a_literal_transcription_of_local_dp_sgd(engine: str, privacy: dict[str, Any]) -> None:
    cell = local_cell(privacy=privacy)
    outcome = run_cell(engine, cell)
    np.testing.assert_allclose(outcome.model, literally(cell), rtol=1e-9, atol=1e-12)


def test_local_dp_sgd_with_one_step_per_average_equals_dp_sgd() -> None:
    local, plain = local_cell(algorithm__local_steps=1), local_cell(algorithm=SGD)
    for engine in ENGINES:
        one, other = (run_cell(engine, cell).model for cell in (local, plain))
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-13)


def test_local_dp_sgd_without_noise_and_clipping_equals_federated_averaging() -> None:
    local = local_cell(algorithm__clip=1e6, privacy=QUIET)
    averaging = small_cell(
        federation={"silos": 3, "rounds": 3, "batch": 20},
        algorithm={"name": "fedavg", "trust": "untrusted", "step": 0.05, "local_batch": 5},
        privacy=QUIET,
        run__evaluations=3,
    )
    one, other = (run_cell("inprocess", cell).model for cell in (local, averaging))
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("epochs", [1, 3, 12])
@pytest.mark.parametrize(("relation", "factor"), [("replace-one", 2.0), ("zero-out", 1.0)])
def test_every_local_step_is_charged(epochs: int, relation: str, factor: float) -> None:
    """A record is in `epochs` of the steps: μ = factor · C · √epochs / (B σ), whatever K is."""
    for steps in (1, 3, 12):
        changes = {"federation__epochs": epochs, "algorithm__local_steps": steps, "privacy__relation": relation}
        (stream,) = streams_of(local_cell(**changes))
        assert stream.std == pytest.approx(factor * 2.0 * math.sqrt(epochs) / (5 * 2.0))
        assert stream.mu == pytest.approx(2.0)
        assert stream.schedule.rounds == 12


@pytest.mark.parametrize("sampling", ["poisson", "allocation"])
def test_subsampled_local_steps_cost_as_much_as_equally_many_rounds_of_dp_sgd(sampling: str) -> None:
    """K T releases: the accountant's ε for the same noise, and not that of T averages."""
    sampled = {"federation__epochs": 3, "federation__sampling": sampling}
    privacy = {"relation": "zero-out", "epsilon": 2.0}
    (local,) = streams_of(local_cell(privacy=privacy, **sampled))
    (plain,) = streams_of(local_cell(privacy=privacy, algorithm=SGD, **sampled))
    assert local.std == plain.std
    epsilons = [claim_of([stream]).guarantee.epsilon_of(1e-5) for stream in (local, plain)]
    assert epsilons[0] == epsilons[1] <= 2.0
    in_order = local_cell(privacy={"relation": "zero-out", "mu": mu_of(2.0, 1e-5)}, federation__epochs=3)
    assert streams_of(in_order)[0].std != local.std


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *[({"algorithm__trust": trust}, "local-dp-sgd") for trust in ("trusted", "secure-aggregation", "curator")],
        ({"algorithm__local_steps": 5}, r"algorithm\.local_steps = 5: 12 rounds, which are silos' steps"),
        ({"deployment": {"missing": "continue"}}, "its silos step by themselves"),
        ({"run__noise": "aggregate"}, "step by themselves, each with noise of its own"),
    ],
)
def test_settings_incompatible_with_local_steps_are_refused_in_one_line(
    changes: dict[str, Any], reason: str
) -> None:
    """A server cannot add the noise of local steps, either."""
    with refusal(reason):
        run("vectorized", local_cell(**changes))


SCENARIO = cell_json(algorithm=LOCAL, privacy=PRIVATE)
"""8 steps of one record, an average every 4, for a guard."""


def from_key(guard: Guard, queries: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a silo with the guard's own key releases that is never stopped."""
    opened = guard._ledger.find_run("run")
    assert opened is not None
    assert opened.key is not None
    cell = resolve_cell(json.loads(SCENARIO), "test")
    admitted = guard._admission.admit(guard._admission.canonicalize(SCENARIO))
    silo = Silo.for_release(
        0, admitted.plan, guard.shard.model_records(cell), opened.key, admitted.scenario_digest
    )
    state, releases = silo.initial_state(), []
    for t, query in enumerate(queries, start=1):
        release, state = silo.answer(state, t, query)
        releases.append(silo.make_message(release.vector, t, b"", state.query_chain))
    return releases


def test_a_guard_restarted_before_every_local_step_releases_the_same_bytes(tmp_path: Path) -> None:
    """Its own point is packed with its state: restarted before every step it releases the same bytes."""
    path = write_silo(tmp_path)
    queries = [ZERO + (t > 4) for t in range(1, 8)]
    releases = [guard_of(path).answer("run", SCENARIO, t, query) for t, query in enumerate(queries, start=1)]
    for one, other in zip(releases, from_key(guard_of(path), queries), strict=True):
        assert torch.equal(one, other)
    again = guard_of(path)
    assert torch.equal(again.answer("run", SCENARIO, 2, ZERO), releases[1])
    with refusal("round 2 was answered already, for another query", RunError):
        again.answer("run", SCENARIO, 2, ZERO + 1.0)
    assert charged(again._ledger) == pytest.approx([2.0])


def test_a_silo_steps_from_its_own_releases_and_restarts_from_every_average() -> None:
    cell = local_cell(privacy=QUIET)
    silo, query = SimulatedFederation.from_cell(cell).silo(1), torch.zeros(7850, dtype=torch.float64)
    state, own = silo.initial_state(), query
    for t in range(1, 7):
        own = query if t in (1, 5) else own
        release, state = silo.answer(state, t, query)
        torch.testing.assert_close(release.vector, gradient_at(cell, own, t), rtol=1e-9, atol=1e-12)
        own = own - 0.05 * release.vector


def gradient_at(cell: Cell, point: torch.Tensor, t: int) -> torch.Tensor:
    """Silo 1's clipped mean gradient of step t at `point`."""
    silo = SimulatedFederation.from_cell(cell).silo(1)
    batch = silo._read_batch(silo.plan.rounds[t - 1])
    return silo.plan.objective.increment(Query([point]), Batch(batch.records, batch.weights), 2.0).total


@pytest.mark.parametrize("arithmetic", ["float", "integers"])
def test_local_dp_sgd_meets_the_mu_target_in_integer_and_float_arithmetic(arithmetic: str) -> None:
    outcome = run_cell("inprocess", local_cell(run__arithmetic=arithmetic))
    (stream,) = outcome.releases
    assert (stream.integer_release is not None) == (arithmetic == "integers")
    assert stream.mu == pytest.approx(2.0)
    assert np.isfinite(outcome.model).all()
