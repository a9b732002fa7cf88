"""Random allocation from the scenario to the claim: every engine draws the same bins, with the noise needed."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER, simulation_noise
from fedpriv.participation.secret import Allocation
from fedpriv.rounds.claim import claim_of
from fedpriv.rounds.ledger import as_data, from_data
from fedpriv.rounds.plan import plan_of
from fedpriv.rounds.task import spread, task_of_cell
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import Silo, pack, unpack
from fedpriv.study.stored import privacy_of
from tests.conftest import small_tree
from tests.engines.test_engines import run
from tests.engines.test_sampling import CLIP, STEP, gradient, sampled
from tests.parts import in_parts

MakeCell = Callable[..., Cell]
EPSILON_03, EPSILON_1 = 1.1318, 4.3772


def allocated(trust: str = "trusted", groups: int = 2, **changes: Any) -> dict[str, Any]:
    """Three silos of unequal size, two epochs of 4 rounds, records in public groups."""
    tree = sampled(trust, **changes)
    return {**tree, "federation": {**tree["federation"], "sampling": "allocation", "groups": groups}}


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_every_engine_runs_dp_sgd_with_allocation(small_cell: MakeCell, engine: str, trust: str) -> None:
    """Written out record by record: bins, clip, public denominators, noise; to 1e-9."""
    cell = small_cell(**allocated(trust))
    task, noise = task_of_cell(cell), simulation_noise(cell.seed, np.float64)
    size, silos, batches = task.objective.dimension, spread(cell), cell.batch_sizes
    stds = {owner: float(plan_of(cell, task.objective).noise.std_of(owner)) for owner in (0, 1, 2, SERVER)}
    model, drawn, clipped = np.zeros(size), 0, 0
    for t in range(1, 9):
        epoch, place = (t - 1) // 4, (t - 1) % 4
        mean = stds[SERVER] * noise.vector(size, SERVER, t)
        for silo, (share, batch) in enumerate(zip(silos, batches, strict=True)):
            bins = noise.coins().numbers(len(share), 2, silo, epoch)  # 4 rounds of an epoch, 2 groups
            total = np.zeros(size)
            for row, record in enumerate(share.tolist()):
                if place == 2 * bins[row] + row % 2:
                    z, label = task.train.features[record].numpy(), int(task.train.labels[record])
                    of_record = gradient(model, z, label)
                    norm = float(np.linalg.norm(of_record))
                    total += of_record * min(1.0, CLIP / norm)
                    drawn, clipped = drawn + 1, clipped + (norm > CLIP)
            mean = mean + batch / sum(batches) * (total / batch + stds[silo] * noise.vector(size, silo, t))
        model = model - STEP * mean
    (outcome,), _ = run(engine, cell)
    np.testing.assert_allclose(outcome.finished.model, model, rtol=1e-9, atol=1e-12)
    assert outcome.finished.fraction_clipped == pytest.approx(clipped / drawn, rel=1e-12)
    assert drawn == 2 * 4 * sum(batches)  # every record once an epoch
    assert 0 < clipped < drawn


CORRELATED: dict[str, dict[str, Any]] = {
    "accelerated-dp-srgd": {"clip": 5.0, "beta": 50.0, "radius": 3.0, "mechanism": "banded", "bands": 3},
    "dp-ftrl": {"clip": 5.0, "step": 0.01, "mechanism": "banded", "bands": 2},
    "online-to-batch": {"clip": 5.0, "step": 0.01, "radius": 2.0, "mechanism": "banded", "bands": 4},
}


def test_more_bands_than_groups_are_refused(small_cell: MakeCell) -> None:
    federation = {"silos": 2, "rounds": 12, "batch": 3, "sampling": "allocation", "groups": 2}
    noise = {"clip": 5.0, "beta": 50.0, "radius": 3.0, "mechanism": "banded", "bands": 3}
    algorithm = {"name": "accelerated-dp-srgd", "trust": "trusted", **noise}
    cell = small_cell(federation=federation, algorithm=algorithm, privacy={"relation": "zero-out", "epsilon": 4.0})
    with pytest.raises(InputError, match=r"3 bands of correlated noise and federation\.groups = 2"):
        plan_of(cell, task_of_cell(cell).objective)


def multiplier(relation: str, epsilon: float, **federation: Any) -> float:
    """The noise multiplier that the ledger of a run of DP-SGD reads off: σ over the clip of one record."""
    tree = small_tree(
        federation={"silos": 2, "batch": 1, **federation},
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 3.0, "step": 0.1},
        privacy={"relation": relation, "epsilon": epsilon},
    )
    cell = resolve_cell(tree, "test")
    plan = plan_of(cell, task_of_cell(cell).objective)
    claim = claim_of(plan.releases(cell.schedule.rounds))
    assert claim is not None
    assert isinstance(claim.guarantee, AllocatedGaussian | PoissonGaussian)
    assert claim.guarantee.epsilon_of(1e-5) <= epsilon * (1 + 1e-9)
    assert float(plan.noise.std_of(0)) == pytest.approx(3.0 * claim.guarantee.noise_multiplier, rel=1e-12)
    return claim.guarantee.noise_multiplier


GOLDEN = [
    ("zero-out", EPSILON_03, {"rounds": 60, "sampling": "allocation"}, 0.9205),
    ("zero-out", EPSILON_1, {"rounds": 60, "sampling": "allocation"}, 0.5732),
    ("zero-out", 8.0, {"rounds": 16, "sampling": "allocation"}, 0.4707),
    ("zero-out", EPSILON_03, {"rounds": 60, "sampling": "allocation", "groups": 4}, 1.2385),
    ("zero-out", EPSILON_1, {"rounds": 64, "epochs": 4, "sampling": "allocation"}, 0.8425),
    ("zero-out", EPSILON_03, {"rounds": 60, "sampling": "poisson"}, 0.9639),
    ("replace-one", EPSILON_03, {"rounds": 60, "sampling": "poisson"}, 1.0411),
    ("replace-one", EPSILON_1, {"rounds": 60, "sampling": "poisson"}, 0.6216),
    ("replace-one", EPSILON_03, {"rounds": 60, "sampling": "allocation"}, 1.1417),
]


@pytest.mark.parametrize(
    ("relation", "epsilon", "federation", "golden"), in_parts(GOLDEN, [GOLDEN[3], GOLDEN[4], GOLDEN[7]])
)
def test_golden_noise_of_a_scenario(
    relation: str, epsilon: float, federation: dict[str, Any], golden: float
) -> None:
    assert multiplier(relation, epsilon, **federation) == pytest.approx(golden, rel=1e-3)


def test_the_claim_is_recomputed_from_what_was_released(small_cell: MakeCell) -> None:
    cell = small_cell(**allocated("untrusted"))
    (outcome,), _ = run("vectorized", cell)
    releases = [from_data(json.loads(json.dumps(as_data(stream)))) for stream in outcome.finished.releases]
    assert tuple(releases) == outcome.finished.releases
    assert all(stream.schedule == Allocation(8, 4, 2) for stream in releases)
    claim = claim_of(releases)
    assert claim is not None
    guarantee = claim.guarantee
    assert isinstance(guarantee, AllocatedGaussian)
    assert (guarantee.bins, guarantee.epochs, guarantee.relation) == (2, 2, "zero-out")
    statement = privacy_of(cell, releases)
    assert statement["guarantee"] == "allocated-gaussian"
    assert statement["participation"] == "random allocation"
    assert [statement[key] for key in ("mu", "rho", "zcdp", "epsilon_paper")] == [None] * 4
    assert 0.49 < statement["epsilon"] == guarantee.epsilon_of(1e-5) <= 0.5
    assert statement["target"] == "epsilon = 0.5 at delta = 1e-05"
    less = dataclasses.replace(releases[1], std=releases[1].std / 2)
    doubted = claim_of([releases[0], less, *releases[2:]])
    assert doubted is not None
    assert doubted.guarantee.epsilon_of(1e-5) > 0.9


def test_a_run_that_stops_early_is_charged_whole(small_cell: MakeCell) -> None:
    cell = small_cell(**allocated())
    plan = plan_of(cell, task_of_cell(cell).objective)
    assert plan.releases(3) == plan.releases(8)


def test_a_silo_that_restarts_draws_the_same_bins(small_cell: MakeCell) -> None:
    """From its key alone: a guard's silo, packed after every round and built anew, answers bit by bit the same."""
    cell = small_cell(**allocated("untrusted"))
    plan = plan_of(cell, task_of_cell(cell).objective, released=True)
    records = SimulatedFederation.of(cell).silo(0).records
    query = torch.zeros(plan.objective.dimension, dtype=torch.float64)

    def silo(key: bytes) -> Silo:
        return Silo.of(0, plan, records, key, b"scenario")

    straight, restarted, drawn = silo(bytes(range(32))), silo(bytes(range(32))), []
    state, other = straight.start(), restarted.start()
    for t in range(1, 9):
        release, state = straight.answer(state, t, query)
        restarted = silo(bytes(range(32)))
        again, other = restarted.answer(unpack(pack(other), restarted), t, query)
        assert torch.equal(release.vector, again.vector)
        drawn.append(release.counts.drawn)
    assert sum(drawn) == 2 * len(records.labels)
    stranger = silo(bytes(32))
    counts, state = [], stranger.start()
    for t in range(1, 9):
        release, state = stranger.answer(state, t, query)
        counts.append(release.counts.drawn)
    assert sum(counts) == sum(drawn)
    assert counts != drawn  # bins are the key's, not the seed's
