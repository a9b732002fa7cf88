"""The prefix-sum identity of DP-μ²-FL, and what one record can do to a silo's sums."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedpriv.loss.estimators import (
    Estimator,
    LocalGradient,
    PlainGradient,
    RaisedClips,
    RecursiveGradient,
    SplitGradient,
    VarianceReducedGradient,
)
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.loss.objective import Records
from fedpriv.rounds.floats import initial_running_sum, update_running_sum
from fedpriv.rounds.round import increment_parts

FEATURES, CLASSES = 4, 3
OBJECTIVE = SoftmaxRegression(FEATURES, CLASSES, feature_norm=2.0, dtype=torch.float64)


def gradient(point: Tensor, feature: Tensor, label: int) -> Tensor:
    """The gradient of one record by automatic differentiation: an oracle that shares no code."""
    leaf = point.clone().requires_grad_()
    logits = leaf.view(CLASSES, FEATURES) @ feature
    loss = torch.nn.functional.cross_entropy(logits.unsqueeze(0), torch.tensor([label]))
    (result,) = torch.autograd.grad(loss, leaf)
    return result


def path_and_records(rounds: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = np.random.default_rng(seed)
    queries = torch.from_numpy(generator.standard_normal((rounds, FEATURES * CLASSES)))
    features = torch.from_numpy(generator.standard_normal((rounds, FEATURES)))
    return queries, features, torch.from_numpy(generator.integers(0, CLASSES, rounds))


def sums(queries: Tensor, features: Tensor, labels: Tensor, clip: float) -> Tensor:
    """q_1 … q_T of one silo with one record a round: (T, d)."""
    estimator = RecursiveGradient(clip=clip)
    state = initial_running_sum(queries[0])
    rows = []
    for t, query in enumerate(queries, start=1):
        records = Records(features[t - 1 : t], labels[t - 1 : t])
        weights = torch.ones(1, dtype=torch.float64)
        state, _ = update_running_sum(
            state, estimator.round(t), query, OBJECTIVE, records, weights, estimator.memory
        )
        rows.append(state.total)
    return torch.stack(rows)


@given(rounds=st.integers(1, 12), seed=st.integers(0, 10**6))
@settings(max_examples=40)
def test_the_running_sum_is_the_weight_times_the_corrected_momentum(rounds: int, seed: int) -> None:
    """q_t = α_t d_t with d_t = g_t + (1 - β_t)(d_{t-1} - g~_{t-1}), β_t = 1/t (Reshef & Levy, section 4)."""
    queries, features, labels = path_and_records(rounds, seed)
    measured = sums(queries, features, labels, clip=1e9)
    momentum = torch.zeros(FEATURES * CLASSES, dtype=torch.float64)
    for t in range(1, rounds + 1):
        feature, label = features[t - 1], int(labels[t - 1])
        before = gradient(queries[t - 2], feature, label) if t > 1 else torch.zeros_like(momentum)
        momentum = gradient(queries[t - 1], feature, label) + (1 - 1 / t) * (momentum - before)
        torch.testing.assert_close(measured[t - 1], t * momentum, rtol=1e-10, atol=1e-10)


@given(rounds=st.integers(1, 8), seed=st.integers(0, 10**6), clip=st.floats(0.05, 5.0))
@settings(max_examples=60)
def test_replacing_one_record_moves_every_later_sum_by_at_most_twice_the_clip(
    rounds: int, seed: int, clip: float
) -> None:
    """Brute force on neighbours: 0 before the record's round, the same vector of norm ≤ 2C from it on."""
    queries, features, labels = path_and_records(rounds, seed)
    changed = seed % rounds
    other_features, other_labels = features.clone(), labels.clone()
    other_features[changed] = -3.0 * features[changed]
    other_labels[changed] = (labels[changed] + 1) % CLASSES
    difference = sums(queries, features, labels, clip) - sums(queries, other_features, other_labels, clip)
    norms = difference.norm(dim=1)
    assert torch.all(norms[:changed] == 0.0)
    assert torch.all(norms[changed:] <= 2.0 * clip * (1 + 1e-12))
    torch.testing.assert_close(difference[changed:], difference[changed].expand(rounds - changed, -1))


def test_the_bound_of_twice_the_clip_is_attained() -> None:
    """Two records with opposite gradients of norm above the clip: the distance is exactly 2C."""
    queries = torch.zeros(1, FEATURES * CLASSES, dtype=torch.float64)
    feature = torch.tensor([[10.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    label = torch.tensor([0])
    difference = sums(queries, feature, label, 0.5) - sums(queries, -feature, label, 0.5)
    assert float(difference.norm()) == pytest.approx(1.0, rel=1e-12)


def test_an_increment_subtracts_the_gradient_at_the_previous_query() -> None:
    queries, features, labels = path_and_records(2, 3)
    measured = sums(queries, features, labels, clip=1e9)
    feature, label = features[1], int(labels[1])
    expected = 2 * gradient(queries[1], feature, label) - gradient(queries[0], feature, label)
    torch.testing.assert_close(measured[1] - measured[0], expected)


@pytest.mark.parametrize(("estimator", "most"), [(PlainGradient(1.0), 0), (RecursiveGradient(1.0), 1)])
def test_no_more_queries_are_stored_than_the_next_round_needs(estimator: Estimator, most: int) -> None:
    past: tuple[Tensor, ...] = ()
    for t, query in enumerate(torch.eye(5), start=1):
        _, past = increment_parts(estimator.round(t), query, past, estimator.memory)
        assert len(past) == most
        assert not past or torch.equal(past[0], query)


def neighbours(rounds: int, dtype: torch.dtype) -> list[float]:
    """‖q_t - q'_t‖ for float32 queries, of silos that differ in the record of round 1, in units of the clip."""
    objective = SoftmaxRegression(FEATURES, CLASSES, feature_norm=2.0)
    generator = np.random.default_rng(0)
    queries = torch.from_numpy(generator.standard_normal((rounds, FEATURES * CLASSES))).float()
    features = torch.from_numpy(generator.standard_normal((rounds, 1, FEATURES))).float()
    estimator, one = RecursiveGradient(clip=0.1), torch.ones(1)
    states = [initial_running_sum(queries[0].to(dtype)) for _ in range(2)]
    distances = []
    for t in range(1, rounds + 1):
        for side, feature in enumerate((features[t - 1], -features[t - 1] if t == 1 else features[t - 1])):
            records = Records(feature, torch.tensor([0]))
            states[side], _ = update_running_sum(
                states[side], estimator.round(t), queries[t - 1], objective, records, one, estimator.memory
            )
        distances.append(float((states[0].total.double() - states[1].total.double()).norm()) / 0.1)
    assert states[0].total.dtype == dtype
    return distances


@pytest.mark.slow
def test_the_distance_of_float64_sums_of_neighbours_does_not_drift_over_rounds() -> None:
    """A server that runs long would see a neighbour drift away: float64 sums of float32 queries do not let it."""
    distances = neighbours(2000, torch.float64)
    assert 1.0 < distances[0] <= 2.0
    assert max(distances) - min(distances) < 1e-9
    drifted = neighbours(2000, torch.float32)
    assert max(drifted) - min(drifted) > 1e-6  # what this test would see


def test_split_increments_of_float32_queries_are_summed_in_float64() -> None:
    estimator = SplitGradient(1.0, 0.5, 0.2, 0.1, rounds_per_epoch=3, coefficient=0.5, decay=0.5)
    objective = SoftmaxRegression(FEATURES, CLASSES, feature_norm=2.0)
    queries, features, labels = path_and_records(9, 2)
    state = initial_running_sum(queries[0])
    for t in range(1, 10):
        records = Records(features[(t - 1) % 3 : (t - 1) % 3 + 1].float(), labels[(t - 1) % 3 : (t - 1) % 3 + 1])
        query = queries[t - 1].float()
        state, _ = update_running_sum(
            state, estimator.round(t), query, objective, records, torch.ones(1), estimator.memory
        )
        assert state.total.dtype == torch.float64
    assert [vector.dtype for vector in state.past_vectors] == [torch.float32] * 2 + [torch.float64] * 3


@pytest.mark.parametrize("part", [0, 1, 2])
def test_the_clipped_count_is_that_of_the_part_that_clips_most_records(part: int) -> None:
    """Epochs of two rounds: rounds 2 and 4 have a residual, and 3 and 4 a change."""
    queries, features, labels = path_and_records(4, 3)
    clips = [1e9, 1e9, 1e9]
    clips[part] = 1e-9
    estimator = SplitGradient(*clips, mixing=0.5, rounds_per_epoch=2)
    state, counts = initial_running_sum(queries[0]), []
    for t, query in enumerate(queries, start=1):
        state, clipped = update_running_sum(
            state, estimator.round(t), query, OBJECTIVE, Records(features, labels), torch.ones(4), estimator.memory
        )
        counts.append(int(clipped))
    assert counts == [[4, 4, 4, 4], [0, 0, 4, 4], [0, 4, 0, 4]][part]


@pytest.mark.parametrize(
    ("estimator", "memory", "scales"),
    [
        (PlainGradient(1.0, coefficient=0.5), 1, (1.0, 1.0)),
        (LocalGradient(1.0, step=0.1, every=2), 1, (1.0, 1.0)),
        (VarianceReducedGradient(1.0, 0.5, period=2), 2, (1.0, 1.0)),
        (SplitGradient(1.0, 0.5, 0.2, 0.1, rounds_per_epoch=3, coefficient=0.5), 1, (1.0, 1.0)),
        (RaisedClips(PlainGradient(1.0), (2.0, 3.0)), 1, (1.0, 1.0)),
        (RecursiveGradient(1.0), 2, (1.0, 2.0)),
    ],
)
def test_silos_remember_the_queries_of_an_increment_and_release_gradients_in_this_scale(
    estimator: Estimator, memory: int, scales: tuple[float, float]
) -> None:
    first, second = (estimator.round(t) for t in (1, 2))
    assert estimator.memory == memory == max(len(first.coefficients), len(second.coefficients))
    assert (first.scale, second.scale) == scales


@pytest.mark.parametrize("empty", [1, 2, 3, 5])
def test_a_round_without_records_equals_a_round_of_zero_weights_under_split_clipping(empty: int) -> None:
    """It dropped the first queries of the epochs, and a later round raised IndexError; integers keep them."""
    queries, features, labels = path_and_records(6, 3)
    estimator = SplitGradient(clip=1.0, difference_clip=0.5, residual_clip=0.5, mixing=0.5, rounds_per_epoch=3)
    none, zero = initial_running_sum(queries[0]), initial_running_sum(queries[0])
    for t, query in enumerate(queries, start=1):
        records, weights = Records(features[t - 1 : t], labels[t - 1 : t]), torch.ones(1, dtype=torch.float64)
        there = None if t == empty else records
        none, _ = update_running_sum(none, estimator.round(t), query, OBJECTIVE, there, weights, estimator.memory)
        weights = weights * (t != empty)
        zero, _ = update_running_sum(
            zero, estimator.round(t), query, OBJECTIVE, records, weights, estimator.memory
        )
        torch.testing.assert_close(none.total, zero.total)
        assert len(none.past_vectors) == len(zero.past_vectors)
