"""Fits against golden optima (own optimizer and jax-privacy's), their gradients, and the figures of the rows."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.fitting.auto import compare_mechanism, least_published_noise
from fedpriv.noise.fitting.cost import NoiseCost, NoiseResponse, make_noise_cost, std_lower_bounds
from fedpriv.noise.fitting.fit import (
    PlainLoss,
    RootFit,
    RootLoss,
    ScaledLoss,
    _starting_points,
    fit_lambda,
    fit_roots,
)
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from tests.noise.matrices import separated, workload_of
from tests.noise.rows import ROWS, objective, response, sharper_mean_bound, workload
from tests.parts import in_parts


def last_prefix(rounds: int) -> NoiseCost:
    """√J is the largest error of a prefix sum: the last one's."""
    row = np.zeros((1, rounds))
    row[0, -1] = 1.0
    return NoiseCost(workload_of(rounds), row)


def fitted(wanted: NoiseCost, pairs: int, last_free: bool = True) -> RootFit:
    return fit_roots(PlainLoss(wanted), pairs, last_free, fit_lambda(wanted).theta)


@pytest.mark.parametrize(
    ("rounds", "pairs", "error"),
    in_parts(
        [
            (60, 2, 2.370437127),
            (600, 2, 3.140162313),
            (600, 3, 3.105023815),
            (10_000, 3, 4.033251607),
            (100_000, 3, 4.853468104),
            (100_000, 4, 4.757683565),
        ],
        fast=[(60, 2, 2.370437127), (600, 2, 3.140162313), (600, 3, 3.105023815)],
    ),
)
def test_fitted_largest_errors_of_prefix_sums_match_golden_optima(rounds: int, pairs: int, error: float) -> None:
    assert math.exp(fitted(last_prefix(rounds), pairs).loss / 2) == pytest.approx(error, rel=1e-8)


@pytest.mark.slow
def test_fit_at_a_hundred_thousand_rounds_matches_jax_privacys_optimum() -> None:
    """jax-privacy's own fit: θ .9999528892, .9857068667 with a largest error of 5.2967471463."""
    two = fitted(last_prefix(100_000), 2)
    assert math.exp(two.loss / 2) == pytest.approx(5.2967471463, rel=1e-8)
    np.testing.assert_allclose(two.theta, (0.9999528893, 0.9857068673), rtol=1e-6)
    np.testing.assert_allclose(two.phi, (0.9991333338, 0.7864017318), rtol=1e-6)


def test_fit_for_dp_ftrl_in_ten_epochs_matches_the_golden_optimum() -> None:
    found = fitted(objective("dp-ftrl", 600, 60), 2)
    assert math.exp(found.loss / 2) / math.sqrt(2) == pytest.approx(1.680199, rel=1e-6)
    np.testing.assert_allclose(found.theta, (0.972374, 0.440871), atol=1e-5)
    np.testing.assert_allclose(found.phi, (0.779676, 0.119231), atol=1e-5)


LOSSES: dict[str, RootLoss] = {
    "one pass": PlainLoss(objective("accelerated", 30)),
    "epochs": PlainLoss(objective("unaccelerated", 30, 7)),
    "unequal clips": PlainLoss(objective("online-to-batch", 30, 7)),
    "separated": PlainLoss(NoiseCost(separated(30, 3, 6, 0.9), np.random.default_rng(1).normal(size=(4, 30)))),
    "no sums": PlainLoss(objective("dp-sgd", 30)),
    "scaled": ScaledLoss(objective("dp-ftrl, momentum", 30)),
    "scaled, no sums": ScaledLoss(objective("dp-sgd, average", 30)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_the_fitting_loss_match_finite_differences(name: str) -> None:
    loss, roots, step = LOSSES[name], np.array([0.88, 0.8, 0.6, 0.15]), 1e-6
    _, gradient = loss.evaluate(roots)
    numeric = [
        (loss.evaluate(roots + step * unit)[0] - loss.evaluate(roots - step * unit)[0]) / (2 * step)
        for unit in np.eye(4)
    ]
    np.testing.assert_allclose(gradient, numeric, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in LOSSES if "scaled" not in name])
def test_fitting_loss_equals_the_evaluated_cost_of_the_mechanism(name: str) -> None:
    """Filters against the certified sensitivity and the streamed noise; no fit is believed on its own word."""
    loss = LOSSES[name]
    assert isinstance(loss, PlainLoss)
    mechanism = BufferedToeplitz(loss.workload.decay, (0.88, 0.6), (0.8, 0.0))
    found, _ = loss.evaluate(np.array([0.88, 0.8, 0.6, 0.0]))
    assert math.exp(found) == pytest.approx(loss.cost.evaluate(mechanism), rel=1e-10)


@pytest.mark.slow
def test_fitted_roots_always_interlace_as_the_certificate_requires() -> None:
    for row in ROWS:
        for pairs in (1, 2, 3):
            found = fitted(objective(row, 40, 40), pairs)
            roots = [root for pair in zip(found.theta, found.phi, strict=True) for root in pair]
            assert all(above > below for above, below in pairwise([1.0 + 1e-15, *roots]))
            BufferedToeplitz(workload(row, 40).decay, found.theta, found.phi)


@pytest.mark.parametrize(
    ("asked", "rounds"),
    [(workload_of(60), 60), (workload_of(60, 1.0, 20), 20), (separated(60, 3, 12), 12), (separated(6, 1, 12), 6)],
)
@pytest.mark.parametrize("last_free", [True, False])
def test_a_fit_starts_at_spread_roots_and_at_the_single_one_with_pairs_that_nearly_cancel(
    asked: Workload, rounds: int, last_free: bool
) -> None:
    """A start is v with ratios 1 / (1 + e^v) of each root to the one before."""
    count = 4 if last_free else 3
    starts = _starting_points(asked, 2, last_free, 0.9)
    spread, near = (np.cumprod(1.0 / (1.0 + np.exp(start))) for start in starts)
    assert spread == pytest.approx(1.0 - np.geomspace(0.6 / rounds, 0.75, count))
    assert near == pytest.approx([0.9, 0.9 * 0.6, 0.9 * 0.6 * 0.85, 0.9 * 0.02][:count])


@pytest.mark.parametrize("rounds", [2, 12, 17, 24, 34, 48])
@pytest.mark.parametrize("row", ["accelerated", "dp-ftrl", "dp-sgd, momentum"])
def test_no_single_root_is_better_than_the_fitted_one(row: str, rounds: int) -> None:
    loss = PlainLoss(objective(row, rounds))
    roots = (loss.workload.decay or 1.0) * (1.0 - np.geomspace(0.05 / rounds, 0.95, 100))
    others = [loss.evaluate(np.array([root, 0.0]))[0] for root in roots]
    assert fit_lambda(loss.cost).loss <= min(others) + 1e-12


def test_fits_are_deterministic() -> None:
    assert fitted(objective("unaccelerated", 60), 2) == fitted(objective("unaccelerated", 60), 2)


def test_root_pairs_that_cancel_are_left_out_of_the_fit() -> None:
    """Accelerated asks for λ-CGD: more roots only cancel, and would cost vectors and divide by small gaps."""
    found = fitted(objective("accelerated", 60), 3)
    assert len(found.theta) == 1
    assert found.phi == (0.0,)


def output_noise(mechanism: Mechanism, row: str, rounds: int, rounds_per_epoch: int | None = None) -> float:
    compared = compare_mechanism(mechanism, response(row, rounds, 1), workload(row, rounds, rounds_per_epoch))
    assert compared.published_noise.output is not None
    return compared.published_noise.output


def least_output_noise(row: str, rounds: int, rounds_per_epoch: int | None = None) -> float:
    bound = least_published_noise(response(row, rounds, 1), workload(row, rounds, rounds_per_epoch)).output
    assert bound is not None
    return bound


def cgd(root: float) -> BufferedToeplitz:
    return BufferedToeplitz(1.0, (root,), (0.0,))


TREE, INDEPENDENT = BinaryTree(), IndependentGaussian()


@pytest.mark.parametrize(
    ("mechanism", "row", "rounds", "rounds_per_epoch", "std", "tolerance"),
    [
        (cgd(0.96), "dp-mu2-fl", 60, None, 39.820868944654, 1e-11),
        (cgd(0.96), "accelerated", 60, None, 40.356118064797, 1e-11),
        (cgd(0.96), "dp-ftrl, momentum", 60, None, 14.359036883135, 1e-11),
        (TREE, "dp-mu2-fl", 60, None, 56.5631061, 1e-8),
        (TREE, "accelerated", 60, None, 57.4175840, 1e-8),
        (TREE, "unaccelerated", 60, None, 5.1959679, 1e-8),
        (TREE, "dp-ftrl, momentum", 60, None, 32.7777786, 1e-8),
        (INDEPENDENT, "dp-mu2-fl", 60, None, 43.315869, 1e-7),
        (INDEPENDENT, "accelerated", 60, None, 43.671961, 1e-7),
        (cgd(1 - 12.3 / 600), "dp-mu2-fl", 600, 60, 2321.757684, 1e-9),
        (INDEPENDENT, "dp-mu2-fl", 600, 60, 2715.708058, 1e-9),
        (cgd(1 - 2.5 / 16), "dp-mu2-fl", 16, None, 10.151631, 1e-7),
        (cgd(1 - 2.5 / 60), "dp-mu2-fl", 60, None, 39.888027, 1e-7),
        (cgd(1 - 2.5 / 240), "dp-mu2-fl", 240, None, 161.536973, 1e-7),
        (cgd(1 - 2.5 / 600), "dp-mu2-fl", 600, None, 404.834889, 1e-7),
    ],
)
def test_output_noise_of_mechanisms_matches_golden_values(
    mechanism: Mechanism, row: str, rounds: int, rounds_per_epoch: int | None, std: float, tolerance: float
) -> None:
    assert output_noise(mechanism, row, rounds, rounds_per_epoch) == pytest.approx(std, rel=tolerance)


@pytest.mark.parametrize("row", ["accelerated", "dp-mu2-fl"])
@pytest.mark.parametrize("rounds", [16, 60, 240, 600])
def test_lambda_cgd_with_one_vector_comes_within_two_percent_of_the_least_noise(row: str, rounds: int) -> None:
    mechanism = cgd(fit_lambda(objective(row, rounds)).theta[0])
    assert mechanism.memory_vectors(workload(row, rounds)) == 1
    assert output_noise(mechanism, row, rounds) <= 1.02 * least_output_noise(row, rounds)


@pytest.mark.parametrize("row", ["accelerated", "dp-mu2-fl"])
@pytest.mark.parametrize("rounds", in_parts([6000, 100_000], long=[100_000]))
def test_lambda_cgd_with_one_vector_comes_within_two_percent_at_many_rounds(row: str, rounds: int) -> None:
    wanted, asked = response(row, rounds), workload(row, rounds)
    assert wanted.output is not None
    mechanism = cgd(fit_lambda(make_noise_cost(wanted, asked)).theta[0])
    alone = PlainLoss(make_noise_cost(NoiseResponse(wanted.output[None]), asked))
    ratio = mechanism.sensitivity(asked) * math.sqrt(alone.noise_energy(mechanism.theta, mechanism.phi))
    assert ratio <= 1.02


@pytest.mark.parametrize("rounds", [16, 60, 240, 600])
def test_fit_for_the_unaccelerated_optimizer_comes_within_one_percent_of_the_least_noise(rounds: int) -> None:
    found = fitted(objective("unaccelerated", rounds), 2)
    mechanism = BufferedToeplitz(1.0, found.theta, found.phi)
    assert mechanism.memory_vectors(workload("unaccelerated", rounds)) <= 3
    assert output_noise(mechanism, "unaccelerated", rounds) <= 1.01 * least_output_noise("unaccelerated", rounds)


@pytest.mark.parametrize(
    ("row", "rounds", "most"),
    [
        ("dp-ftrl, momentum", 60, 1.21),
        ("dp-ftrl, momentum", 240, 1.45),
        ("dp-ftrl", 60, 1.775),
        ("dp-ftrl", 240, 2.065),
    ],
)
def test_scaled_two_buffer_noise_for_dp_ftrl_stays_within_a_given_factor_of_the_least_noise(
    row: str, rounds: int, most: float
) -> None:
    wanted = objective(row, rounds)
    found = fit_roots(ScaledLoss(wanted), 2, True, fit_lambda(wanted).theta)
    plain = BufferedToeplitz(1.0, found.theta, found.phi)
    mechanism = plain.with_equal_columns(wanted.workload)
    assert output_noise(mechanism, row, rounds) <= most * least_output_noise(row, rounds)
    assert mechanism.sensitivity(wanted.workload) == pytest.approx(plain.sensitivity(wanted.workload), rel=1e-12)
    assert wanted.evaluate(mechanism) == pytest.approx(math.exp(found.loss), rel=1e-9)


MECHANISMS = (
    IndependentGaussian(),
    BinaryTree(),
    BandedSquareRoot(1.0, 4),
    BufferedToeplitz(1.0, (0.95, 0.6), (0.8, 0.1)),
    BufferedToeplitz(1.0),
)


@pytest.mark.parametrize(
    ("row", "rounds", "rounds_per_epoch", "bound", "tolerance"),
    [
        ("dp-mu2-fl", 60, None, 2 * 59 / 3, 1e-7),
        ("accelerated", 60, None, 39.849726776, 1e-7),
        ("unaccelerated", 60, None, 4.679870, 1e-7),
        ("dp-ftrl, momentum", 60, None, 9.982029897, 1e-7),
        ("dp-ftrl", 60, None, 1.0, 1e-7),
        ("dp-mu2-fl", 600, 60, 1700.509706, 1e-9),
    ],
)
def test_least_output_noise_matches_golden_bounds(
    row: str, rounds: int, rounds_per_epoch: int | None, bound: float, tolerance: float
) -> None:
    assert least_output_noise(row, rounds, rounds_per_epoch) == pytest.approx(bound, rel=tolerance)


@pytest.mark.parametrize(("row", "bound"), [("dp-mu2-fl", 23.489131), ("accelerated", 24.327859)])
def test_sharper_lower_bound_for_the_queries_matches_golden_values(row: str, bound: float) -> None:
    found = sharper_mean_bound(response(row, 60).queries, workload(row, 60), steps=500)
    assert found == pytest.approx(bound, rel=1e-6)


@pytest.mark.every(2)
@pytest.mark.parametrize(("rounds", "best"), [(16, 1.68940369), (60, 2.08034753)])
def test_the_sharper_bound_is_the_dense_optimum_for_prefix_sums(rounds: int, best: float) -> None:
    """In one pass the bound is attained, by a C of T vectors: jax-privacy's optimizer finds it."""
    found = sharper_mean_bound(np.eye(rounds), workload("dp-ftrl", rounds), steps=2000)
    assert found == pytest.approx(best, rel=1e-6)


@pytest.mark.slow
@given(data=st.data(), rounds=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_no_mechanism_falls_below_the_lower_bounds_on_noise(data: st.DataObject, rounds: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows, clips = generator.normal(size=(3, rounds)), generator.uniform(0.3, 3.0, rounds)
    gap, most = data.draw(st.integers(1, rounds)), data.draw(st.integers(1, 3))
    for asked in (workload_of(rounds, 1.0, gap, clips=clips), separated(rounds, most, gap, clips=clips)):
        for row in rows:
            alone = make_noise_cost(NoiseResponse(row[None]), asked)
            assert all(alone.evaluate(mechanism) >= 1.0 - 1e-9 for mechanism in MECHANISMS)
    single = workload_of(rounds, clips=clips)
    cost, least_mean = make_noise_cost(NoiseResponse(rows), single), np.mean(std_lower_bounds(rows, single) ** 2)
    least = sharper_mean_bound(rows, single) ** 2 * (1 - 1e-9)
    assert all(cost.evaluate(mechanism) * least_mean >= least for mechanism in MECHANISMS)


def test_noise_objective_counts_one_for_every_term_where_a_mechanism_is_optimal() -> None:
    """One round: every mechanism is optimal in the output and in the only point."""
    assert objective("accelerated", 1).evaluate(IndependentGaussian()) == pytest.approx(2.0)


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_a_fit_that_correlates_nothing_still_has_different_roots(decay: float) -> None:
    # Increments with alternating weights are best left alone, C = I, which equal roots alone are.
    signs = np.array([1.0, -1.0, 1.0])
    wanted = make_noise_cost(
        NoiseResponse((signs - decay * np.append(signs[1:], 0.0))[None]), workload_of(3, decay)
    )
    loss = ScaledLoss(wanted)
    found = fit_roots(loss, 1, True, fit_lambda(wanted).theta)
    assert found.loss == pytest.approx(loss.evaluate(np.array([0.5, 0.5]))[0], abs=1e-9)
    BufferedToeplitz(decay, found.theta, found.phi).with_equal_columns(wanted.workload).integer(wanted.workload)
