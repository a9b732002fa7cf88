"""Poisson sampling: every engine draws the same records, and the claim is recomputed from what was released."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER, simulation_noise
from fedpriv.loss.objective import Batch, Query
from fedpriv.participation.secret import Poisson
from fedpriv.rounds.claim import claim_of
from fedpriv.rounds.ledger import as_data, from_data
from fedpriv.rounds.plan import plan_of
from fedpriv.rounds.task import spread, task_of_cell
from fedpriv.scenario.schema import Cell
from fedpriv.study.stored import privacy_of
from tests.engines.test_engines import run

MakeCell = Callable[..., Cell]

CLIP, STEP = 12.0, 0.02


def gradient(x: NDArray[np.float64], z: NDArray[np.float64], label: int) -> NDArray[np.float64]:
    """Of softmax regression with 10 classes, written out."""
    exponentials = np.exp(x.reshape(10, -1) @ z)
    residual = exponentials / exponentials.sum()
    residual[label] -= 1.0
    return np.outer(residual, z).ravel()


def sampled(trust: str = "trusted", **changes: Any) -> dict[str, Any]:
    """Three silos of unequal size, 8 rounds in which each record takes part with probability 1/4."""
    return {
        "algorithm": {"name": "dp-sgd", "trust": trust, "clip": CLIP, "step": STEP},
        "privacy": {"relation": "zero-out", "epsilon": 0.5},
        "federation": {
            "silos": 3,
            "rounds": 8,
            "epochs": 2,
            "samples": 200,
            "size_skew": 1.0,
            "sampling": "poisson",
        },
        **changes,
    }


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_every_engine_runs_poisson_sampled_dp_sgd(small_cell: MakeCell, engine: str, trust: str) -> None:
    """A transcription of Abadi et al.'s Algorithm 1: coins, clip, public denominators, noise; to 1e-9."""
    cell = small_cell(**sampled(trust))
    task, noise = task_of_cell(cell), simulation_noise(cell.seed, np.float64)
    size = task.objective.dimension
    silos, batches = spread(cell), cell.batch_sizes
    assert len(set(batches)) > 1
    stds = {owner: float(plan_of(cell, task.objective).noise.std_of(owner)) for owner in (0, 1, 2, SERVER)}
    model, drawn, clipped = np.zeros(size), 0, 0
    for t in range(1, 9):
        mean = stds[SERVER] * noise.vector(size, SERVER, t)
        for silo, (share, batch) in enumerate(zip(silos, batches, strict=True)):
            total = np.zeros(size)
            for record, takes_part in zip(
                share.tolist(), noise.coins().heads(len(share), 0.25, silo, t), strict=True
            ):
                if takes_part:
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
    assert 0 < clipped < drawn != 2 * 4 * sum(batches)


def test_padding_is_not_counted_as_clipped(small_cell: MakeCell) -> None:
    """A clip that every record exceeds: the fraction is 1 in every replicate, not more in the padded ones."""
    algorithm = {"name": "dp-sgd", "trust": "trusted", "clip": 0.01, "step": STEP}
    equal = {"silos": 3, "rounds": 8, "epochs": 2, "samples": 200, "sampling": "poisson"}  # as they run together
    cells = [small_cell(**sampled(algorithm=algorithm, federation=equal), seed=seed) for seed in (0, 5, 6)]
    together, _ = run("vectorized", *cells)
    assert [outcome.finished.fraction_clipped for outcome in together] == [1.0, 1.0, 1.0]


def test_rounds_that_draw_nobody_release_noise_alone(small_cell: MakeCell) -> None:
    """One expected record in four rounds: most rounds are empty for a silo, and the engines still agree."""
    federation = {"silos": 1, "rounds": 8, "epochs": 2, "batch": 1, "sampling": "poisson"}
    cell = small_cell(**sampled(federation=federation))
    coins = simulation_noise(cell.seed, np.float64).coins()
    drawn = [int(coins.heads(4, 0.25, 0, t).sum()) for t in range(1, 9)]
    assert 0 in drawn
    assert max(drawn) > 1
    (vectorized,), _ = run("vectorized", cell)
    (inprocess,), _ = run("inprocess", cell)
    np.testing.assert_allclose(vectorized.finished.model, inprocess.finished.model, rtol=1e-9, atol=1e-12)
    assert vectorized.finished.fraction_clipped == inprocess.finished.fraction_clipped


def test_records_are_drawn_at_the_rate_that_is_charged(small_cell: MakeCell) -> None:
    """What a silo sends, divided by its mean gradient, counts the records drawn: 4 standard deviations (6e-5).

    All records are alike, so a release without noise is (number drawn) / (expected batch) times one gradient.
    """
    quiet = sampled(privacy={"relation": "zero-out", "mode": "none"})
    cell = small_cell(
        **{**quiet, "federation": {**quiet["federation"], "rounds": 200, "epochs": 20, "samples": 900}}
    )
    silo = SimulatedFederation.of(cell).silo(0)
    alike = silo.records._replace(features=silo.records.features[:1].expand_as(silo.records.features))
    alike = alike._replace(labels=silo.records.labels[:1].expand_as(silo.records.labels))
    silo = dataclasses.replace(silo, records=alike)
    query, state = torch.zeros(silo.objective.dimension, dtype=torch.float64), silo.start()
    full = silo.objective.increment(Query([query]), Batch(alike, torch.ones(1, dtype=torch.float64)), CLIP).total
    one = full / len(alike.labels)
    counts = []
    for t in range(1, 201):
        release, state = silo.answer(state, t, query)
        counts.append(float(release.vector @ one / (one @ one)) * cell.batch_sizes[0])
        assert counts[-1] == pytest.approx(release.counts.drawn, abs=1e-9)
    trials, rate = 200 * len(alike.labels), 1 / 10
    assert abs(sum(counts) - trials * rate) < 4 * np.sqrt(trials * rate * (1 - rate))
    variance = len(alike.labels) * rate * (1 - rate)  # of the number drawn in a round: a fixed one would have none
    assert abs(np.var(counts) / variance - 1) < 4 * np.sqrt(2 / 199)


def test_silos_and_rounds_have_coins_of_their_own() -> None:
    """|correlation| of fixed draws below 4.5/√n for 28 pairs: false alarm 2e-4; the noise is another stream."""
    noise, other, size = simulation_noise(3, np.float64), simulation_noise(4, np.float64), 20_000
    rows = [noise.coins().heads(size, 0.3, owner, t) for owner in (0, 1) for t in (1, 2, 3)]
    rows += [other.coins().heads(size, 0.3, 0, 1), noise.vector(size, 0, 1) > 0]
    correlations = np.corrcoef(np.array(rows, np.float64)) - np.eye(len(rows))
    assert np.abs(correlations).max() < 4.5 / np.sqrt(size)
    assert np.array_equal(
        noise.coins().heads(size, 0.3, 0, 1), simulation_noise(3, np.float32).coins().heads(size, 0.3, 0, 1)
    )
    assert noise.coins().heads(5, 1.0, 0, 1).all()
    assert not noise.coins().heads(5, 0.0, 0, 1).any()


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_the_claim_is_recomputed_from_what_was_released(small_cell: MakeCell, trust: str) -> None:
    cell = small_cell(**sampled(trust))
    (outcome,), _ = run("vectorized", cell)
    releases = [from_data(json.loads(json.dumps(as_data(stream)))) for stream in outcome.finished.releases]
    assert tuple(releases) == outcome.finished.releases
    assert len(releases) == (3 if trust == "untrusted" else 1)
    claim = claim_of(releases)
    assert claim is not None
    guarantee = claim.guarantee
    assert isinstance(guarantee, PoissonGaussian)
    assert (guarantee.sampling_rate, guarantee.rounds) == (0.25, 8)
    assert 0.4995 < guarantee.epsilon_of(1e-5) <= 0.5 + 1e-9
    for stream in releases:
        assert stream.std == pytest.approx(guarantee.noise_multiplier * CLIP * stream.per_record, rel=1e-12)
    statement = privacy_of(cell, releases)
    assert statement["guarantee"] == "poisson-gaussian"
    assert [statement[key] for key in ("mu", "rho", "zcdp", "epsilon_paper")] == [None] * 4
    assert statement["epsilon"] == guarantee.epsilon_of(1e-5)
    assert statement["target"] == "epsilon = 0.5 at delta = 1e-05"


def test_a_target_in_mu_is_met_as_the_epsilon_it_gives(small_cell: MakeCell) -> None:
    cell = small_cell(**sampled(privacy={"relation": "zero-out", "mu": 0.3}))
    statement = privacy_of(cell, plan_of(cell, task_of_cell(cell).objective).releases(8))
    assert 0.999 * epsilon_of(0.3, 1e-5) < statement["epsilon"] <= epsilon_of(0.3, 1e-5) * (1 + 1e-9)
    assert statement["target"] == "epsilon = 1.13178 at delta = 1e-05, what mu = 0.3 gives"


def test_fewer_rounds_cost_less(small_cell: MakeCell) -> None:
    cell = small_cell(**sampled())
    (stream,) = plan_of(cell, task_of_cell(cell).objective).releases(3)
    assert stream.schedule == Poisson(3, 4)
    assert stream.guarantee.epsilon_of(1e-5) < 0.4  # type: ignore[union-attr]


def test_less_noise_shows_in_the_claim(small_cell: MakeCell) -> None:
    cell = small_cell(**sampled("untrusted"))
    honest = plan_of(cell, task_of_cell(cell).objective).releases(8)
    claim = claim_of([honest[0], dataclasses.replace(honest[1], std=honest[1].std / 2), honest[2]])
    assert claim is not None
    assert claim.guarantee.epsilon_of(1e-5) > 0.9
    assert claim_of([honest[0], dataclasses.replace(honest[1], std=0.0)]) is None
    with pytest.raises(InputError, match="has no mu"):
        _ = honest[0].mu
    fixed = dataclasses.replace(honest[1], schedule=dataclasses.replace(honest[1].schedule, rounds_per_epoch=5))
    with pytest.raises(InputError, match="in one way and at one rate"):
        claim_of([honest[0], fixed])


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"federation": {"silos": 3, "rounds": 8, "batch": 2, "groups": 2}}, "groups = 2: groups are for records"),
        (
            {"federation": {"silos": 3, "rounds": 8, "batch": 2, "sampling": "poisson", "groups": 3}},
            "groups = 3: groups share out the 8 rounds of an epoch",
        ),
        (
            {
                "algorithm": {"name": "phased-sgd", "trust": "curator", "step": 0.01, "radius": 2.0},
                "federation": {"silos": 3, "rounds": 8, "samples": 200, "sampling": "poisson"},
            },
            'sampling = "poisson": phased-sgd reads records in an order of its own',
        ),
    ],
)
def test_scenarios_that_sampling_does_not_protect_are_refused(
    small_cell: MakeCell, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(InputError, match=line):
        small_cell(**sampled(**changes))


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "dp-mu2-fl", "diameter": 0.1},
        {"name": "dp-ftrl", "clip": 5.0, "step": 0.1},
        {"name": "dp-ftrl", "clip": 5.0, "step": 0.1, "mechanism": "independent"},
        {"name": "online-to-batch", "clip": 5.0, "step": 0.1, "radius": 1.0},
    ],
)
def test_running_sums_and_correlated_noise_are_refused(small_cell: MakeCell, algorithm: dict[str, Any]) -> None:
    cell = small_cell(**sampled(algorithm={"trust": "trusted", **algorithm}))
    with pytest.raises(InputError, match="what a record moves has no end there; take an algorithm that releases"):
        plan_of(cell, task_of_cell(cell).objective)


def test_a_ledger_charges_replace_one_and_the_largest_clip(small_cell: MakeCell) -> None:
    """z is σ over the clip under both relations: the 2 of replace-one is in its pair of distributions."""
    cell = small_cell(**sampled())
    (stream,) = plan_of(cell, task_of_cell(cell).objective).releases(8)
    other = dataclasses.replace(stream, relation="replace-one").guarantee
    assert isinstance(stream.guarantee, PoissonGaussian)
    assert isinstance(other, PoissonGaussian)
    assert other.relation == "replace-one"
    assert other.noise_multiplier == pytest.approx(stream.guarantee.noise_multiplier, rel=1e-12)
    assert other.epsilon_of(1e-5) > 1.3 * stream.guarantee.epsilon_of(1e-5)
    changing = dataclasses.replace(stream, clips=(1.0, 2.0) * 4).guarantee
    assert changing == dataclasses.replace(stream, clips=(2.0,) * 8).guarantee
    with pytest.raises(InputError, match="'shuffled' is none of fixed, poisson, allocation, available, phases"):
        from_data({**as_data(stream), "participation": {"name": "shuffled"}})


def test_a_silo_tells_nobody_whom_it_drew(small_cell: MakeCell) -> None:
    """The query and the round do not matter: the draws depend on the silo's secret alone."""
    cell = small_cell(**sampled("untrusted"))
    shared = SimulatedFederation.of(cell)
    secret = dataclasses.replace(shared, noise=type(shared.noise)(bytes(range(32)), np.float64))
    query = torch.zeros(shared.silo(0).objective.dimension, dtype=torch.float64)
    drawn = []
    for federation in (shared, secret):
        silo = federation.silo(0)
        drawn.append([silo._coins.heads(len(silo.records.labels), 0.25, 0, t).tolist() for t in range(1, 9)])
        release, _ = silo.answer(silo.start(), 1, query)
        assert release.counts.drawn == sum(drawn[-1][0])
    assert drawn[0] != drawn[1]
