"""DP-μ²-FL: its theorems by hand, its server by definition, and what it takes beyond its paper."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.claims.ledger import make_release_streams
from fedpriv.claims.outcome import RunObserver
from fedpriv.core.errors import InputError
from fedpriv.engines.vectorized.engine import run_vectorized
from fedpriv.loss.estimators import PlainGradient, RaisedClips, RecursiveGradient
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.objective import Records
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.series import Workload
from fedpriv.papers.base import Problem, project_to_ball
from fedpriv.papers.reshef_levy import AnytimeSGD, _step_length, mu2_parameters
from fedpriv.participation.orders import FixedOrder
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.rounds.floats import initial_running_sum, update_running_sum
from fedpriv.scenario.schema import Cell
from tests.engines.test_engines import run
from tests.noise.matrices import streamed_matrix
from tests.papers.builders import draw_normals, drive, vectors

MNIST = Problem(7850, math.sqrt(2 * 785), 785 / 2, True, 100, FixedOrder(600, 600), silos=100)
ASKED = 4.0, 0.1
"""Tables 1 and 2 at M = 100, ρ = 4 and D = 0.1."""


def test_mnist_parameters_of_dp_mu2_fl_match_the_papers_tables() -> None:
    """S = 118.1; σ = 2 S √T / ρ = 1446.7 a silo, of which the mean has a tenth, or 1/100 at the server."""
    untrusted, trusted = (mu2_parameters(MNIST, *ASKED, each) for each in (False, True))
    clip = math.sqrt(1570) + 785 * 0.1
    assert untrusted.clip == trusted.clip == pytest.approx(clip) == pytest.approx(118.1, abs=0.05)
    sigma = 2 * clip * math.sqrt(600) / 4
    assert untrusted.noise_in_mean == pytest.approx(sigma / 10)
    assert trusted.noise_in_mean == pytest.approx(sigma / 100)
    first = 4 * 0.1 * math.sqrt(100) / (2 * clip * 600 * math.sqrt(7850))
    assert untrusted.step == pytest.approx(min(first, 1 / (4 * 392.5 * 600)))
    assert trusted.step == pytest.approx(min(10 * first, 1 / (4 * 392.5 * 600)))


@pytest.mark.parametrize(("trusted", "share"), [(False, 10.0), (True, 100.0)])
def test_the_excess_risk_bound_of_dp_mu2_fl_matches_its_theorem(trusted: bool, share: float) -> None:
    """4D ((G + 2LD)/T + 2S√d/(ρ T √M) + σ~/√(TM)), M for √M if trusted."""
    clip = math.sqrt(1570) + 785 * 0.1
    terms = clip / 600 + 2 * clip * math.sqrt(7850) / (4 * 600 * share) + clip / math.sqrt(60_000)
    assert mu2_parameters(MNIST, *ASKED, trusted).excess_risk == pytest.approx(4 * 0.1 * terms)


def test_zero_out_needs_half_of_the_noise_of_replace_one() -> None:
    half = mu2_parameters(replace(MNIST, relation="zero-out"), *ASKED, True).noise_in_mean
    assert half == pytest.approx(mu2_parameters(MNIST, *ASKED, True).noise_in_mean / 2)


def test_dp_mu2_fl_refuses_a_loss_without_a_smoothness_bound() -> None:
    with pytest.raises(InputError, match="smoothness"):
        mu2_parameters(replace(MNIST, smoothness=math.inf), *ASKED, True)


ESTIMATOR = RecursiveGradient(clip=1.0)
MakeCell = Callable[..., Cell]


def test_the_papers_step_needs_a_positive_smoothness_without_noise(small_cell: MakeCell) -> None:
    """Before: the step was infinite, and the run ended with a loss that was not finite."""
    settings = small_cell(algorithm__step="paper").algorithm.settings
    with pytest.raises(InputError, match="no smoothness L above 0 is known"):
        _step_length(settings, replace(MNIST, smoothness=0.0), 0.0)


@given(rounds=st.integers(1, 30), seed=st.integers(0, 10**6), radius=st.floats(0.01, 10.0))
@settings(max_examples=40)
def test_output_is_the_weighted_average_of_iterates(rounds: int, seed: int, radius: float) -> None:
    """x_T = Σ_{t≤T} α_t w_t / α_{1:T} with α_t = t: the update of round T moves nothing that is published."""
    optimizer, releases = AnytimeSGD(step=0.3, radius=radius), draw_normals(seed, rounds, 4)
    iterate, iterates = torch.zeros(4, dtype=torch.float64), []
    states = drive(optimizer, iterate, releases, ESTIMATOR.round)[1:]
    for t, (state, released) in enumerate(zip(states, releases, strict=True), start=1):
        iterates.append(iterate)
        iterate = project_to_ball(iterate - 0.3 * released, radius)
        weights = torch.arange(1, t + 1, dtype=torch.float64)
        average = (weights[:, None] * torch.stack(iterates)).sum(0) / weights.sum()
        torch.testing.assert_close(optimizer.output(state), average, rtol=1e-10, atol=1e-12)
        assert float(iterate.norm()) <= radius * (1 + 1e-12)


def test_queries_move_by_two_over_t_plus_two_toward_the_iterate() -> None:
    optimizer = AnytimeSGD(step=1.0, radius=1e9)
    *_, state = drive(optimizer, torch.zeros(1), [torch.tensor([-3.0])], ESTIMATOR.round)
    assert float(optimizer.query(state)) == pytest.approx(3.0 * 2 / 3)
    assert float(optimizer.output(state)) == 0.0


@given(seed=st.integers(0, 10**6), radius=st.floats(0.01, 5.0))
@settings(max_examples=50)
def test_consecutive_queries_are_within_their_bound_for_any_releases(seed: int, radius: float) -> None:
    """(t-1) ‖x_t - x_{t-1}‖ ≤ 2D whatever is released: the fact behind S = G + 2LD."""
    optimizer = AnytimeSGD(step=10.0, radius=radius)
    states = drive(optimizer, torch.zeros(3, dtype=torch.float64), draw_normals(seed, 39, 3), ESTIMATOR.round)
    for t, (before, query) in enumerate(pairwise(map(optimizer.query, states)), start=1):
        assert t * float((query - before).norm()) <= 2 * (2 * radius) * (1 + 1e-9)


def test_projection_to_the_ball_leaves_inner_points_and_zero_unchanged() -> None:
    inside = torch.tensor([[0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(project_to_ball(inside, 0.5), inside)
    torch.testing.assert_close(project_to_ball(torch.tensor([3.0, 4.0]), 0.5), torch.tensor([0.3, 0.4]))


ROUNDS, CLIP, MU = 8, 5.0, 4.0


def plan(cell: Cell) -> Plan:
    return make_plan(cell, load_task(cell).objective)


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_larger_late_clip_norms_need_no_more_noise_and_give_every_record_the_claimed_mu(
    small_cell: MakeCell, trust: str
) -> None:
    """Replace-one by hand: record t moves each of the sums t … T of its silo by up to twice its clip."""
    keys: dict[str, Any] = {"algorithm__trust": trust, "algorithm__clip": CLIP, "algorithm__step": 0.01}
    same = plan(small_cell(**keys))
    balanced = plan(small_cell(**keys, algorithm__late_clip="balanced"))
    assert balanced.noise == same.noise
    share = 1.0 if trust == "untrusted" else 1.0 / 3.0
    std = float(balanced.noise.sources[0].std)
    rounds = range(1, ROUNDS + 1)
    moved = [2.0 * share * float(balanced.estimator.round(t).clip) * np.sqrt(ROUNDS - t + 1) / std for t in rounds]
    np.testing.assert_allclose(moved, MU)
    (stream,) = make_release_streams(balanced, ROUNDS)
    assert stream.mu == pytest.approx(MU)


def test_increments_are_clipped_to_the_larger_clip_norm_of_their_round() -> None:
    """A record with a huge gradient moves the sum by its round's clip, from S at first to S √T."""
    estimator = RaisedClips(RecursiveGradient(CLIP), tuple((ROUNDS / (ROUNDS - t)) ** 0.5 for t in range(ROUNDS)))
    objective = SoftmaxRegression(4, 3, feature_norm=1e9, dtype=torch.float64)
    records = Records(torch.full((1, 4), 1e6, dtype=torch.float64), torch.tensor([1]))
    total = initial_running_sum(objective.initial())
    for t in range(1, ROUNDS + 1):
        before, batch = total.total.clone(), (objective, records, torch.ones(1))
        total, clipped = update_running_sum(
            total, estimator.round(t), objective.initial(), *batch, estimator.memory
        )
        assert int(clipped) == 1
        assert float((total.total - before).norm()) == pytest.approx(CLIP * (ROUNDS / (ROUNDS - t + 1)) ** 0.5)


BALANCED = {"algorithm__late_clip": "balanced"}
EPOCHS = BALANCED | {"federation__epochs": 2, "privacy": {"relation": "zero-out", "mode": "none"}}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (BALANCED | {"algorithm__mechanism": "tree"}, 'late_clip = "balanced" is for mechanism = "independent"'),
        (BALANCED | {"algorithm__mechanism": "banded"}, 'late_clip = "balanced" is for mechanism = "independent"'),
        # they were called free, and cost 17 % more noise with two epochs
        (EPOCHS, r"late_clip = \"balanced\" is free for a single pass .*use \"same\""),
        (
            EPOCHS | {"federation__sampling": "poisson"},
            r"late_clip = \"balanced\" is free for a single pass .*use \"same\"",
        ),
        # 8,000 rounds with as many bands would be 32 million vector additions for every run: it did not end
        ({"algorithm__mechanism": "banded", "algorithm__bands": 8000}, r"bands.*1024"),
    ],
)
def test_balanced_late_clip_norms_with_other_mechanisms_or_epochs_and_too_many_bands_are_refused(
    small_cell: MakeCell, keys: dict[str, Any], line: str
) -> None:
    with pytest.raises(InputError, match=line):
        plan(small_cell(**keys))


@pytest.mark.parametrize("mechanism", ["tree", "banded", "independent"])
def test_dp_mu2_fl_with_a_mechanism_equals_online_to_batch_with_linear_weights(
    small_cell: MakeCell, mechanism: str
) -> None:
    shared: dict[str, Any] = {"trust": "trusted", "mechanism": mechanism, "clip": CLIP, "step": 0.01}
    mu2 = small_cell(algorithm={"name": "dp-mu2-fl", "diameter": 3.0, **shared})
    privacy = {"relation": "replace-one", "mu": MU}
    other = small_cell(algorithm={"name": "online-to-batch", "radius": 1.5, **shared}, privacy=privacy)
    ours, theirs = (next(run_vectorized([cell], RunObserver())).cell_outcome for cell in (mu2, other))
    np.testing.assert_array_equal(ours.model, theirs.model)
    assert ours.releases[0].std == theirs.releases[0].std > 0.0


@pytest.mark.parametrize("mechanism", ["independent", "tree", "banded"])
def test_the_papers_step_uses_the_noise_that_the_mechanism_releases(small_cell: MakeCell, mechanism: str) -> None:
    """η = D / (σ √(T d)) with σ the noise in a release: measured here by running the mechanism on unit vectors."""
    keys = {"algorithm__mechanism": mechanism, "federation__rounds": ROUNDS, "algorithm__clip": CLIP}
    made = plan(small_cell(**keys, privacy__rho=0.1))
    rows = np.sum(streamed_matrix(made.mechanism, ROUNDS) ** 2, axis=1)
    released = made.noise.std_in_mean * np.sqrt(np.mean(rows))
    assert (np.mean(rows) > 1.2) == (mechanism != "independent")
    assert isinstance(made.optimizer, AnytimeSGD)
    dimension = made.objective.dimension
    assert made.optimizer.step == pytest.approx(0.1 / (released * np.sqrt(ROUNDS * dimension)), rel=1e-12)


def test_larger_late_clip_norms_over_two_epochs_increase_the_sensitivity_by_17_percent() -> None:
    """What the refusal says: the price of two passes, over that of equal clips."""
    rounds, schedule = 60, FixedOrder(60, 30)
    clips = np.sqrt(rounds / np.arange(rounds, 0.0, -1.0))
    works = (Workload(schedule, 1.0, norms) for norms in (clips, np.ones(rounds)))
    raised, same = map(IndependentGaussian().sensitivity, works)
    assert raised / same == pytest.approx(1.17, abs=0.01)


@pytest.mark.parametrize(("rounds", "share"), [(16, 0.674), (60, 0.812), (600, 0.936)])
def test_growing_clip_norms_need_less_noise(small_cell: MakeCell, rounds: int, share: float) -> None:
    """S_t = G + 2LD (t-1)/(t+1): the noise falls to that of the worst round, S_t √(T - t + 1) over S √T."""
    keys: dict[str, Any] = {"federation__rounds": rounds, "algorithm__diameter": 0.1}
    keys |= {"data__name": "synthetic", "model": {"name": "softmax-regression"}}
    paper, growing = plan(small_cell(**keys)), plan(small_cell(**keys, algorithm__clip="growing"))
    assert growing.noise.std_in_mean / paper.noise.std_in_mean == pytest.approx(share, abs=6e-4)
    assert float(growing.estimator.round(1).clip) < float(growing.estimator.round(rounds).clip)
    assert growing.max_clip <= paper.max_clip
    (stream,) = make_release_streams(growing, rounds)
    assert stream.mu == pytest.approx(4.0)


def test_growing_clip_norms_clip_no_increment(small_cell: MakeCell) -> None:
    """Without noise the trajectory is the paper's: the bound holds for every increment of the run."""
    quiet = {"privacy": {"relation": "replace-one", "mode": "none"}, "algorithm__step": 0.01}
    (paper,), _ = run("vectorized", small_cell(**quiet))
    (growing,), _ = run("vectorized", small_cell(**quiet, algorithm__clip="growing"))
    assert growing.cell_outcome.fraction_clipped == 0.0
    np.testing.assert_allclose(growing.cell_outcome.model, paper.cell_outcome.model, rtol=1e-9, atol=1e-15)


def test_the_output_next_publishes_the_query_after_the_last_round(small_cell: MakeCell) -> None:
    """x_{T+1} of T rounds is x_T of a run that asks once more, whose last release moves nothing."""
    quiet = {"privacy": {"relation": "replace-one", "mode": "none"}, "algorithm__step": 0.01}
    (following,), _ = run("vectorized", small_cell(**quiet, algorithm__output="next"))
    (last,), _ = run("vectorized", small_cell(**quiet))
    assert np.linalg.norm(following.cell_outcome.model - last.cell_outcome.model) > 0.0
    (inprocess,), _ = run("inprocess", small_cell(**quiet, algorithm__output="next"))
    np.testing.assert_allclose(following.cell_outcome.model, inprocess.cell_outcome.model, rtol=1e-9)
    optimizer = plan(small_cell(**quiet, algorithm__output="next")).optimizer
    for state in drive(optimizer, vectors(0.0, 0.0), torch.ones(3, 2).double(), RecursiveGradient(1.0).round)[1:]:
        assert torch.equal(optimizer.output(state), optimizer.query(state))


def test_dp_mu2_fl_refuses_an_estimator_without_averaging_weights() -> None:
    with pytest.raises(InputError, match="the estimator's weights, and this estimator has none"):
        drive(AnytimeSGD(step=1.0, radius=1e9), vectors(0.0, 0.0), [vectors(1.0, 1.0)], PlainGradient(1.0).round)
