"""Secret rounds, Poisson's and allocated ones: every engine draws the same records; the claim is recomputed."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.gaussian import epsilon_of
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import stream_from_data, stream_to_data
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER, SamplingRandomness, simulation_noise
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.participation.secret import PoissonSampling, RandomAllocation
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import Silo, pack_state, unpack_state
from fedpriv.study.stored import privacy_data
from tests.engines.builders import (
    QUIET,
    claim_of,
    plan_cell,
    refusal,
    run,
    run_cell,
    run_on_both,
    small_cell,
    store_and_load,
    streams_of,
)
from tests.rough import rough_accounting

rough = pytest.fixture(autouse=True, scope="module")(rough_accounting)

CLIP, STEP = 12.0, 0.02


def gradient(x: NDArray[np.float64], z: NDArray[np.float64], label: int) -> NDArray[np.float64]:
    """Of softmax regression with 10 classes, written out."""
    exponentials = np.exp(x.reshape(10, -1) @ z)
    residual = exponentials / exponentials.sum()
    residual[label] -= 1.0
    return np.outer(residual, z).ravel()


def sampled(trust: str = "trusted", **changes: Any) -> Cell:
    """Three silos of unequal size, 8 rounds in which each record takes part with probability 1/4."""
    federation = {"silos": 3, "rounds": 8, "epochs": 2, "samples": 200, "size_skew": 1.0, "sampling": "poisson"}
    algorithm = {"name": "dp-sgd", "trust": trust, "clip": CLIP, "step": STEP}
    privacy = {"relation": "zero-out", "epsilon": 0.5}
    return small_cell(**{"federation": federation, "algorithm": algorithm, "privacy": privacy, **changes})


def allocated(trust: str = "trusted") -> Cell:
    """Three silos of unequal size, two epochs of 4 rounds, records in public groups."""
    return sampled(trust, federation__sampling="allocation", federation__groups=2)


def drawn_by_coins(coins: SamplingRandomness, count: int, silo: int, t: int) -> NDArray[np.bool_]:
    """Poisson: which rows of a silo take part in round t, each with probability 1/4."""
    return coins.bernoulli(count, 0.25, silo, t)


def drawn_by_bins(coins: SamplingRandomness, count: int, silo: int, t: int) -> NDArray[np.bool_]:
    """Allocation: 4 rounds of an epoch, 2 groups; the row's number names its group."""
    bins = coins.numbers(count, 2, silo, (t - 1) // 4)
    return 2 * bins + np.arange(count) % 2 == (t - 1) % 4


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
@pytest.mark.parametrize(("make_cell", "draw"), [(sampled, drawn_by_coins), (allocated, drawn_by_bins)])
def test_both_engines_equal_a_literal_transcription_of_dp_sgd_with_subsampling(
    engine: str, trust: str, make_cell: Any, draw: Any
) -> None:
    """Written out record by record, for Poisson Abadi et al.'s Algorithm 1: coins, clip, denominators, noise."""
    cell = make_cell(trust)
    task, noise = load_task(cell), simulation_noise(cell.seed, np.float64)
    size = task.objective.dimension
    silos, batches = partition_records(cell), cell.batch_sizes
    assert len(set(batches)) > 1
    stds = {owner: float(make_plan(cell, task.objective).noise.std_of(owner)) for owner in (0, 1, 2, SERVER)}
    model, drawn, clipped = np.zeros(size), 0, 0
    for t in range(1, 9):
        mean = stds[SERVER] * noise.vector(size, SERVER, t)
        for silo, (share, batch) in enumerate(zip(silos, batches, strict=True)):
            total = np.zeros(size)
            rows = torch.from_numpy(draw(noise.sampling_randomness(), len(share), silo, t))
            for record in share[rows].tolist():
                z, label = task.train.features[record].numpy(), int(task.train.labels[record])
                of_record = gradient(model, z, label)
                norm = float(np.linalg.norm(of_record))
                total += of_record * min(1.0, CLIP / norm)
                drawn, clipped = drawn + 1, clipped + (norm > CLIP)
            mean = mean + batch / sum(batches) * (total / batch + stds[silo] * noise.vector(size, silo, t))
        model = model - STEP * mean
    outcome = run_cell(engine, cell)
    np.testing.assert_allclose(outcome.model, model, rtol=1e-9, atol=1e-12)
    assert outcome.fraction_clipped == pytest.approx(clipped / drawn, rel=1e-12)
    assert 0 < clipped < drawn
    once_an_epoch = drawn == 2 * 4 * sum(batches)
    assert once_an_epoch == (make_cell is allocated)


def test_padding_of_subsampled_batches_is_not_counted_as_clipped() -> None:
    """A clip that every record exceeds: the fraction is 1 in every replicate, not more in the padded ones."""
    algorithm = {"name": "dp-sgd", "trust": "trusted", "clip": 0.01, "step": STEP}
    changes = {"algorithm": algorithm, "federation__size_skew": None}  # silos of equal size run together
    outcomes, _ = run("vectorized", *(sampled(**changes, seed=seed) for seed in (0, 5, 6)))
    assert [outcome.cell_outcome.fraction_clipped for outcome in outcomes] == [1.0, 1.0, 1.0]


def test_both_engines_agree_when_poisson_subsampling_draws_no_record() -> None:
    """One expected record in four rounds: most rounds are empty for a silo, and the engines still agree."""
    federation = {"silos": 1, "rounds": 8, "epochs": 2, "batch": 1, "sampling": "poisson"}
    cell = sampled(federation=federation)
    coins = simulation_noise(cell.seed, np.float64).sampling_randomness()
    drawn = [int(coins.bernoulli(4, 0.25, 0, t).sum()) for t in range(1, 9)]
    assert 0 in drawn
    assert max(drawn) > 1
    run_on_both(cell)


def test_records_are_drawn_at_the_charged_poisson_subsampling_rate() -> None:
    """What a silo sends, divided by its mean gradient, counts the records drawn: 4 standard deviations (6e-5).

    All records are alike, so a release without noise is (number drawn) / (expected batch) times one gradient.
    """
    longer = {"federation__rounds": 200, "federation__epochs": 20, "federation__samples": 900}
    cell = sampled(privacy=QUIET, **longer)
    silo = SimulatedFederation.from_cell(cell).silo(0)
    alike = Records(*(part[:1].expand_as(part) for part in silo.records[:2]))
    silo = dataclasses.replace(silo, records=alike)
    query, state = torch.zeros(silo.plan.objective.dimension, dtype=torch.float64), silo.initial_state()
    batch = Batch(alike, torch.ones(1, dtype=torch.float64))
    one = silo.plan.objective.increment(Query([query]), batch, CLIP).total / len(alike.labels)
    counts = []
    for t in range(1, 201):
        release, state = silo.answer(state, t, query)
        counts.append(float(release.vector @ one / (one @ one)) * cell.batch_sizes[0])
        assert counts[-1] == pytest.approx(release.counts.drawn, abs=1e-9)
    trials, rate = 200 * len(alike.labels), 1 / 10
    assert abs(sum(counts) - trials * rate) < 4 * np.sqrt(trials * rate * (1 - rate))
    variance = len(alike.labels) * rate * (1 - rate)  # of the number drawn in a round: a fixed one would have none
    assert abs(np.var(counts) / variance - 1) < 4 * np.sqrt(2 / 199)


def test_sampling_randomness_of_silos_and_rounds_is_uncorrelated() -> None:
    """|correlation| of fixed draws below 4.5/√n for 28 pairs: false alarm 2e-4; the noise is another stream."""
    noise, other, size = simulation_noise(3, np.float64), simulation_noise(4, np.float64), 20_000
    rows = [noise.sampling_randomness().bernoulli(size, 0.3, owner, t) for owner in (0, 1) for t in (1, 2, 3)]
    rows += [other.sampling_randomness().bernoulli(size, 0.3, 0, 1), noise.vector(size, 0, 1) > 0]
    correlations = np.corrcoef(np.array(rows, np.float64)) - np.eye(len(rows))
    assert np.abs(correlations).max() < 4.5 / np.sqrt(size)
    single = simulation_noise(3, np.float32).sampling_randomness()
    assert np.array_equal(rows[0], single.bernoulli(size, 0.3, 0, 1))
    assert noise.sampling_randomness().bernoulli(5, 1.0, 0, 1).all()
    assert not noise.sampling_randomness().bernoulli(5, 0.0, 0, 1).any()


@pytest.mark.parametrize(
    ("make_cell", "trust", "guarantee", "participation"),
    [
        (sampled, "untrusted", "poisson-gaussian", "Poisson sampling"),
        (sampled, "trusted", "poisson-gaussian", "Poisson sampling"),
        (allocated, "untrusted", "allocated-gaussian", "random allocation"),
    ],
)
def test_the_claim_of_a_subsampled_run_is_recomputed_from_its_release_streams(
    make_cell: Any, trust: str, guarantee: str, participation: str
) -> None:
    cell = make_cell(trust)
    outcome = run_cell("vectorized", cell)
    releases = store_and_load(outcome.releases)
    assert releases == outcome.releases
    assert len(releases) == (3 if trust == "untrusted" else 1)
    claimed = claim_of(releases).guarantee
    if make_cell is sampled:
        assert isinstance(claimed, PoissonGaussian)
        assert (claimed.sampling_rate, claimed.rounds) == (0.25, 8)
        assert 0.4995 < claimed.epsilon_of(1e-5) <= 0.5 + 1e-9
        for stream in releases:
            assert stream.std == pytest.approx(claimed.noise_multiplier * CLIP * stream.record_weight, rel=1e-12)
    else:
        assert isinstance(claimed, AllocatedGaussian)
        assert (claimed.bins, claimed.epochs, claimed.relation) == (2, 2, "zero-out")
        assert all(stream.schedule == RandomAllocation(8, 4, 2) for stream in releases)
        assert 0.49 < claimed.epsilon_of(1e-5) <= 0.5
    statement = privacy_data(cell, releases)
    assert (statement["guarantee"], statement["participation"]) == (guarantee, participation)
    assert [statement[key] for key in ("mu", "rho", "zcdp", "epsilon_paper")] == [None] * 4
    assert statement["epsilon"] == claimed.epsilon_of(1e-5)
    assert statement["target"] == "epsilon = 0.5 at delta = 1e-05"


def test_a_mu_target_of_a_subsampled_run_is_met_as_the_corresponding_epsilon() -> None:
    cell = sampled(privacy={"relation": "zero-out", "mu": 0.3})
    statement = privacy_data(cell, streams_of(cell))
    assert 0.999 * epsilon_of(0.3, 1e-5) < statement["epsilon"] <= epsilon_of(0.3, 1e-5) * (1 + 1e-9)
    assert statement["target"] == "epsilon = 1.13178 at delta = 1e-05, what mu = 0.3 gives"


def test_fewer_poisson_subsampled_rounds_give_a_smaller_epsilon() -> None:
    (stream,) = streams_of(sampled(), 3)
    assert stream.schedule == PoissonSampling(3, 4)
    assert stream.guarantee.epsilon_of(1e-5) < 0.4  # type: ignore[union-attr]


@pytest.mark.parametrize("make_cell", [sampled, allocated])
def test_reducing_the_noise_of_one_silo_increases_epsilon_of_the_claim(make_cell: Any) -> None:
    honest = streams_of(make_cell("untrusted"))
    claim = claim_of([honest[0], dataclasses.replace(honest[1], std=honest[1].std / 2), honest[2]])
    assert claim.guarantee.epsilon_of(1e-5) > 0.9
    assert compute_claim([honest[0], dataclasses.replace(honest[1], std=0.0)]) is None
    with pytest.raises(InputError, match="has no mu"):
        _ = honest[0].mu


PHASED = {"name": "phased-sgd", "trust": "curator", "step": 0.01, "radius": 2.0}


def test_release_streams_with_different_subsampling_rates_give_no_claim() -> None:
    honest = streams_of(sampled("untrusted"))
    fixed = dataclasses.replace(honest[1], schedule=dataclasses.replace(honest[1].schedule, rounds_per_epoch=5))
    with refusal("in one way and at one rate"):
        compute_claim([honest[0], fixed])


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"federation__sampling": None, "federation__groups": 2}, "groups = 2: groups are for records"),
        (
            {"federation__epochs": None, "federation__groups": 3},
            "groups = 3: groups share out the 8 rounds of an epoch",
        ),
        (
            {"algorithm": PHASED, "federation__epochs": None},
            'sampling = "poisson": phased-sgd reads records in an order of its own',
        ),
    ],
)
def test_scenarios_incompatible_with_subsampling_are_refused(changes: dict[str, Any], line: str) -> None:
    with refusal(line):
        sampled(**changes)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "dp-mu2-fl", "diameter": 0.1},
        {"name": "dp-ftrl", "clip": 5.0, "step": 0.1},
        {"name": "dp-ftrl", "clip": 5.0, "step": 0.1, "mechanism": "independent"},
        {"name": "online-to-batch", "clip": 5.0, "step": 0.1, "radius": 1.0},
    ],
)
def test_poisson_subsampling_of_running_sums_and_of_tree_noise_is_refused(algorithm: dict[str, Any]) -> None:
    cell = sampled(algorithm={"trust": "trusted", **algorithm})
    with refusal("a record's influence is unbounded there; take an algorithm that releases"):
        plan_cell(cell)


def test_a_poisson_subsampled_release_uses_the_largest_clip_and_costs_more_under_replace_one() -> None:
    """z is σ over the clip under both relations: the 2 of replace-one is in its pair of distributions."""
    (stream,) = streams_of(sampled())
    other = dataclasses.replace(stream, relation="replace-one").guarantee
    assert isinstance(stream.guarantee, PoissonGaussian)
    assert isinstance(other, PoissonGaussian)
    assert other.relation == "replace-one"
    assert other.noise_multiplier == pytest.approx(stream.guarantee.noise_multiplier, rel=1e-12)
    assert other.epsilon_of(1e-5) > 1.3 * stream.guarantee.epsilon_of(1e-5)
    changing = dataclasses.replace(stream, clips=(1.0, 2.0) * 4).guarantee
    assert changing == dataclasses.replace(stream, clips=(2.0,) * 8).guarantee
    with refusal("'shuffled' is none of fixed, poisson, allocation, balanced, available, fresh, phases"):
        stream_from_data({**stream_to_data(stream), "participation": {"name": "shuffled"}})


def test_the_subsampling_draws_of_a_silo_depend_on_its_secret_key() -> None:
    """The query and the round do not matter: the draws depend on the silo's secret alone."""
    shared = SimulatedFederation.from_cell(sampled("untrusted"))
    secret = dataclasses.replace(shared, noise=type(shared.noise)(bytes(range(32)), np.float64))
    query = torch.zeros(shared.silo(0).plan.objective.dimension, dtype=torch.float64)
    drawn = []
    for silo in (shared.silo(0), secret.silo(0)):
        randomness, count = silo._sampling_randomness, len(silo.records.labels)
        drawn.append([randomness.bernoulli(count, 0.25, 0, t).tolist() for t in range(1, 9)])
        release, _ = silo.answer(silo.initial_state(), 1, query)
        assert release.counts.drawn == sum(drawn[-1][0])
    assert drawn[0] != drawn[1]


EPSILON_03, EPSILON_1 = 1.1318, 4.3772


@pytest.mark.parametrize("sampling", ["allocation", "poisson"])
def test_more_noise_bands_than_record_groups_are_refused(sampling: str) -> None:
    federation = {"silos": 2, "rounds": 12, "batch": 3, "sampling": sampling, "groups": 2}
    noise = {"clip": 5.0, "beta": 50.0, "radius": 3.0, "mechanism": "banded", "bands": 3}
    algorithm = {"name": "accelerated-dp-srgd", "trust": "trusted", **noise}
    cell = sampled(federation=federation, algorithm=algorithm, privacy__epsilon=4.0)
    with refusal(r"3 bands of correlated noise and federation\.groups = 2"):
        plan_cell(cell)


GOLDEN = [
    ("zero-out", EPSILON_03, {"rounds": 60, "sampling": "allocation"}, 0.9205),
    ("zero-out", EPSILON_1, {"rounds": 60, "sampling": "allocation"}, 0.5732),
    ("zero-out", 8.0, {"rounds": 16, "sampling": "allocation"}, 0.4707),
    ("zero-out", EPSILON_03, {"rounds": 60, "sampling": "allocation", "groups": 4}, 1.2385),
    ("zero-out", EPSILON_1, {"rounds": 64, "epochs": 4, "sampling": "allocation"}, 0.8425),
    ("zero-out", EPSILON_03, {"rounds": 60, "sampling": "poisson"}, 0.9639),
    ("replace-one", EPSILON_03, {"rounds": 60, "sampling": "poisson"}, 1.0411),
    ("replace-one", EPSILON_1, {"rounds": 60, "sampling": "poisson"}, 0.6216),
    ("replace-one", EPSILON_03, {"rounds": 60, "sampling": "allocation"}, 0.9881),
]


@pytest.mark.slow
@pytest.mark.parametrize(("relation", "epsilon", "federation", "golden"), GOLDEN)
def test_noise_multipliers_of_subsampled_scenarios_match_reference_values(
    relation: str, epsilon: float, federation: dict[str, Any], golden: float
) -> None:
    """The noise multiplier that the ledger of a run of DP-SGD reads off: σ over the clip of one record."""
    cell = small_cell(
        federation={"silos": 2, "batch": 1, **federation},
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 3.0, "step": 0.1},
        privacy={"relation": relation, "epsilon": epsilon},
    )
    claimed = claim_of(streams_of(cell)).guarantee
    assert isinstance(claimed, AllocatedGaussian | PoissonGaussian)
    assert claimed.epsilon_of(1e-5) <= epsilon * (1 + 1e-9)
    multiplier = claimed.noise_multiplier
    assert float(plan_cell(cell).noise.std_of(0)) == pytest.approx(3.0 * multiplier, rel=1e-12)
    assert multiplier == pytest.approx(golden, rel=1e-3)


def test_a_run_with_random_allocation_that_stops_early_is_charged_in_full() -> None:
    assert streams_of(allocated(), 3) == streams_of(allocated(), 8)


def test_a_restarted_silo_reproduces_its_random_allocation() -> None:
    """From its key alone: a guard's silo, packed after every round and built anew, answers bit by bit the same."""
    cell = allocated("untrusted")
    plan = make_plan(cell, load_task(cell).objective, for_release=True)
    records = SimulatedFederation.from_cell(cell).silo(0).records
    query = torch.zeros(plan.objective.dimension, dtype=torch.float64)

    def make_silo(key: bytes) -> Silo:
        return Silo.for_release(0, plan, records, key, b"scenario")

    def count_drawn(key: bytes) -> list[int | None]:
        straight, counts = make_silo(key), []
        state = other = straight.initial_state()
        for t in range(1, 9):
            release, state = straight.answer(state, t, query)
            restarted = make_silo(key)
            again, other = restarted.answer(unpack_state(pack_state(other), restarted), t, query)
            assert torch.equal(release.vector, again.vector)
            counts.append(release.counts.drawn)
        return counts

    counts, others = count_drawn(bytes(range(32))), count_drawn(bytes(32))
    assert sum(counts) == sum(others) == 2 * len(records.labels)
    assert counts != others  # bins are the key's, not the seed's
