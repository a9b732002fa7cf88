"""Lattice, norms and noise fitted to each other: nothing can overflow, and too little room is refused."""

import math
from functools import partial
from math import log2
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.buffered import BufferedToeplitz, IntegerBuffered, make_integer_buffered
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.integers.fixed_point import pack_masked, unpack_sum
from fedpriv.noise.integers.gaussian import (
    INITIAL_QUERY_CHAIN,
    KeyedDiscreteGaussian,
    extend_query_chain,
    round_noise,
)
from fedpriv.noise.integers.plan import ExactPlan, ExactRunInputs, fit_lattice
from fedpriv.noise.mechanism import Factorization
from fedpriv.noise.toeplitz import BandedSquareRoot, RoundedBanded
from fedpriv.noise.tree import BinaryTree
from fedpriv.rounds.integers import add_discrete_noise, add_exact_sums, release_running_sum
from tests.noise.integers.hostile_floats import truncated
from tests.noise.integers.members import SIMPLE, aligned, buffered_certified, run_of, simple, workload_of


def test_lattice_and_noise_of_the_mnist_setting_match_the_specification() -> None:
    """MNIST, 100 silos, 600 rounds, ρ = 4: σ of 2^40.5 trusted; the numbers of the specification for words."""
    workload = workload_of(600, 1.0)
    plan = fit_lattice(run_of(IndependentGaussian(), workload))
    assert plan.lattice.exponent == -36
    assert log2(plan.norms(1)[0]) == 36.0
    assert log2(plan.claim.sigma) == pytest.approx(36 + log2(2 * math.sqrt(600) / 4), abs=0.01)
    assert 4.0 <= plan.claim.mu <= 4.0 * (1 + 2.0**-39)
    words = [run_of(IndependentGaussian(), workload, word_bits=word, party_count=100) for word in (40, 48)]
    assert [-fit_lattice(run).lattice.exponent for run in words] == [23, 31]
    assert fit_lattice(words[0]).claim.sigma >= 2.0**16


@pytest.mark.parametrize("word", [40, 48, 64])
@pytest.mark.parametrize("name", SIMPLE)
def test_worst_case_sums_with_noise_never_overflow_the_integer_words(name: str, word: int) -> None:
    """All records at their bound in every round, in both directions, with noise at 16 σ: in Python integers."""
    rounds, records, decay = 50, 10_000, 0.9
    run = run_of(simple(name, decay), workload_of(rounds, decay), records, word_bits=word, party_count=100, mu=0.1)
    plan = fit_lattice(run)
    state, largest = run.factorization.strategy.initial_state(), 0
    for t in range(1, rounds + 1):
        sums = np.full(1, records * plan.norms(t)[0], np.int64)
        output, state = run.factorization.strategy.step(state, t, sums)
        largest = max(largest, int(output[0]))
        assert all(int(vector[0]) < 1 << 61 for vector in state)
    assert largest <= plan.max_output
    whole = plan.claim.sigma * math.sqrt(100)
    assert plan.max_output + 14 * whole < 2.0 ** (word - 1)
    assert plan.max_output + 16 * whole < 2.0**61


def test_the_lattice_is_the_finest_that_fits() -> None:
    """One bit finer would leave 61 bits; the jump in the search skips none."""
    for records in (10, 10**6, 10**7):
        run = run_of(BinaryTree(1.0), workload_of(60, 1.0), records, mu=0.01)
        plan = fit_lattice(run)
        assert -plan.lattice.exponent <= 36
        if -plan.lattice.exponent < 36:
            finer = 2 * (plan.max_output + 16 * plan.claim.sigma)
            assert finer >= 2.0**61 * 0.999 or 2 * plan.claim.sigma >= 2.0**48 * 0.999


def test_the_lattice_is_as_fine_as_a_share_of_the_noise_allows() -> None:
    """Noise of 2^48.3 units in three shares: each is below 2^48, so that no bit is given up."""
    plan = fit_lattice(run_of(IndependentGaussian(), workload_of(1, 1.0), mu=2.0**-11.3, party_count=3))
    assert plan.lattice.exponent == -36
    assert 2.0**47 < plan.claim.sigma < 2.0**48


@pytest.mark.parametrize("mu", [1e-300, 5e-324])
def test_a_mu_whose_noise_no_float_holds_is_refused(mu: float) -> None:
    with pytest.raises(InputError, match="keeps 0 bits in words of 64"):
        fit_lattice(run_of(IndependentGaussian(), workload_of(1, 1.0), mu=mu))


def test_lattice_leaves_room_for_noise_above_the_sums() -> None:
    """Sums of 2^61 - 2^36 alone would fit; with 16 σ of noise, 2^41, they do not."""
    plan = fit_lattice(run_of(IndependentGaussian(), workload_of(1, 1.0), 2**25 - 1, mu=1.0))
    assert plan.lattice.exponent == -35


@pytest.mark.parametrize(("below", "exponent"), [(0.5, -35), (1.5, -36)])
def test_noise_is_rounded_up_before_it_has_room(below: float, exponent: int) -> None:
    """2^25 - 1 records of 2^36 units leave less than 2^36 below 2^61: for 16 σ with σ up to 2^32 - 1."""
    mu = 2.0**36 * (1.0 + 2.0**-40) / (2.0**32 - below)
    run = run_of(IndependentGaussian(), workload_of(1, 1.0), 2**25 - 1, mu=mu, relation="zero-out")
    assert fit_lattice(run).lattice.exponent == exponent


def test_lattice_fit_accounts_for_large_intermediate_buffers() -> None:
    """What would go wrong: buffers of 2^67 under the fit for n = 1e5 with ten digits; the sums are small."""
    strategy = make_integer_buffered([0.9999528893, 0.9857068673], [0.999, 0.95], digits=10)
    workload = workload_of(2000, 1.0)

    class Form(Factorization):
        def sensitivity_in_units(self, lattice: object) -> float:
            norms = np.full(2000, float(lattice.norm(1.0)))  # type: ignore[attr-defined]
            assert isinstance(self.strategy, IntegerBuffered)
            return buffered_certified(self.strategy, workload_of(2000, 1.0, clips=norms))

    form = Form(strategy, IndependentGaussian(), workload)
    plan = fit_lattice(ExactRunInputs(form, (10_000,) * 2000, 100, "replace-one", 4.0))
    inside = strategy.bound_integers([(10_000 * plan.norms(t)[0],) for t in range(1, 2001)]).max_intermediate
    assert inside < 2**61
    assert 2 * inside >= 2**61
    assert plan.max_output < 2**55


@pytest.mark.parametrize(("rounds", "digits"), [(1, 1), (5, 3), (511, 9), (512, 10), (2000, 10)])
def test_buffers_have_a_digit_for_each_bit_of_their_roundings_and_ten_at_most(rounds: int, digits: int) -> None:
    root = 1.0 - 2.0**-20  # nearly one rounding a round
    strategy = BufferedToeplitz(1.0, (root,), (0.0,)).integer(workload_of(rounds, 1.0)).strategy
    assert isinstance(strategy, IntegerBuffered)
    assert strategy.digits == digits


def test_each_part_of_an_increment_has_its_own_integer_norm() -> None:
    plan = fit_lattice(run_of(aligned(0.9, 3), workload_of(9, 0.9, 3)))
    assert [log2(norm) for norm in plan.norms(4)] == pytest.approx([36 - log2(3), 36, 36 + log2(2 / 3)], abs=1e-6)
    assert len(plan.norms(1)) == 2


def test_the_slack_is_that_of_the_vectors_of_every_round() -> None:
    plan = fit_lattice(run_of(aligned(0.9, 3), workload_of(9, 0.9, 3)))
    counts = [7850 * vectors for vectors in (2, 2, 2, 3, 3, 3, 3, 3, 3)]
    slack = sum(counts) / 2.0**120 + sum(count**2 for count in counts) / 2.0**125
    assert plan.claim.slack == pytest.approx(slack, rel=1e-9, abs=0.0)


def released(plan: ExactPlan, increments: list[np.ndarray], key: bytes | None) -> list[np.ndarray]:
    """An untrusted silo's releases: what it is once guard and clips are left out.  No key: no noise."""
    run, form = plan.inputs, plan.inputs.factorization
    state, hidden, chain, rows = form.strategy.initial_state(), form.mechanism.start(), INITIAL_QUERY_CHAIN, []
    for t, of_round in enumerate(increments, start=1):
        sums = truncated(of_round, plan.norms(t)[0], plan.lattice.factor()).sum(axis=0)
        chain = extend_query_chain(chain, b"query")
        if key is None:
            noisy, state = form.strategy.step(state, t, sums)
        else:
            sigmas, source = plan.plan_round(t, 1).sigmas or (), partial(round_noise, key, 2, t, chain)
            noisy, state = add_discrete_noise(form.strategy, sigmas, state, t, sums, source)
        scales, unit = form.strategy.noise_scales(t), plan.lattice.unit / run.record_counts[0]
        row, hidden = release_running_sum(form.mechanism, scales, hidden, t, noisy, unit)
        rows.append(row.numpy())
    return rows


@pytest.mark.parametrize("name", SIMPLE)
def test_integer_release_without_noise_is_the_running_sum_of_clipped_means(name: str) -> None:
    """Within 2^-26 of float64: the utility that integers cost."""
    rounds, records, size, decay = 12, 20, 300, 0.9
    plan = fit_lattice(run_of(simple(name, decay), workload_of(rounds, decay), records))
    generator = np.random.default_rng(1)
    increments = [generator.normal(size=(records, size)) * 0.1 for _ in range(rounds)]
    total = np.zeros(size)
    for of_round, row in zip(increments, released(plan, increments, None), strict=True):
        total = plan.inputs.factorization.workload.decay * total
        total += np.mean(of_round / np.maximum(np.linalg.norm(of_round, axis=1, keepdims=True), 1.0), axis=0)
        assert np.linalg.norm(row - total) < 2.0**-26


def test_integer_releases_are_reproducible_and_depend_on_the_key() -> None:
    plan = fit_lattice(run_of(BinaryTree(0.9), workload_of(5, 0.9), 20))
    increments = [np.ones((20, 50))] * 5
    first, again, other = (released(plan, increments, key) for key in (bytes(32), bytes(32), bytes([1]) * 32))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_integer_release_is_a_function_of_the_noisy_integers_alone() -> None:
    """What the attacker would gain: the low bits of s, did r_t read it again.  Two pairs (s, z) with one y."""
    form = IndependentGaussian().integer(workload_of(2, 1.0))
    y = np.array([2**40 + 1, -7, 5])

    def noise_to(exact: np.ndarray) -> Any:
        return Mock(vector=lambda *_, **__: y - exact)

    found = []
    for s in (np.array([5, 0, 1]), np.array([-(2**39), 3, 2])):
        noisy, _ = add_discrete_noise(form.strategy, (1.0,), (), 1, s, noise_to)
        row, _ = release_running_sum(form.mechanism, (1.0,), (), 1, noisy, 2.0**-36)
        found.append(row.numpy().tobytes())
    assert found[0] == found[1]


def test_trusted_server_refuses_integer_sums_out_of_bounds_or_of_wrong_shape() -> None:
    """What a malicious silo would gain: sums that wrap around 2^63."""
    good = [np.array([5, -5]), np.array([3, 3])]
    assert add_exact_sums(good, [5, 3]).tolist() == [8, -2]
    for bad in (np.array([6, 0]), np.array([0, -6]), np.array([-(2**63), 0]), np.array([2**63 - 1, 0])):
        with pytest.raises(RunError, match="silo 1"):
            add_exact_sums([good[0], bad], [5, 5])
    for bad in (np.array([1.0, 2.0]), np.array([1]), np.array([1, 2], np.int32)):
        with pytest.raises(RunError, match="shape"):
            add_exact_sums([good[0], bad], [5, 5])


@pytest.mark.parametrize("word", [40, 48, 64])
def test_masked_integer_messages_add_up_to_the_sum_of_noisy_values(word: int) -> None:
    generator, owners, size = np.random.default_rng(3), 5, 1000
    sigma = min(2.0 ** (word - 12), 2.0**45)
    noisy = [KeyedDiscreteGaussian(bytes(32), i, 1).vector(size, sigma).reshape(2, -1) for i in range(owners)]
    masks = [np.zeros((2, size // 2), np.uint64) for _ in range(owners)]
    for i in range(owners):
        for j in range(i):
            pair = generator.integers(0, 2**64, (2, size // 2), np.uint64)
            masks[i] += pair
            masks[j] -= pair
    messages = [pack_masked(y, mask, word) for y, mask in zip(noisy, masks, strict=True)]
    assert {len(message) for message in messages} == {size * word // 8}
    assert unpack_sum(messages, word, (2, size // 2)).tolist() == np.sum(noisy, axis=0).tolist()
    with pytest.raises(RunError, match="message 1"):
        unpack_sum([messages[0], messages[1][:-1]], word, (2, size // 2))
    extremes = np.array([2 ** (word - 1) - 1, -(2 ** (word - 1))])
    alone = pack_masked(extremes, np.zeros(2, np.uint64), word)
    assert unpack_sum([alone], word, (2,)).tolist() == extremes.tolist()


def test_integer_banded_mechanism_has_the_variance_of_its_rounded_coefficients() -> None:
    form = BandedSquareRoot(0.9, 4).integer(workload_of(20, 0.9))
    assert isinstance(form.mechanism, BandedSquareRoot)
    b = np.tril(0.9 ** np.subtract.outer(np.arange(20), np.arange(20)).clip(0)) @ np.linalg.inv(c_matrix(form))
    assert np.allclose(form.mechanism.variance(form.workload), np.sum(b**2, axis=1), rtol=1e-12)


def test_blocks_of_a_rounded_banded_mechanism_are_those_of_its_rounded_coefficients() -> None:
    """Norms of unrounded columns are below the true ones by a relative 1e-10."""
    form = BandedSquareRoot(0.9, 4).integer(workload_of(20, 0.9))
    blocks = form.mechanism.blocks(form.workload)
    assert blocks is not None
    assert blocks.bands == 4
    np.testing.assert_allclose(blocks.norms, np.linalg.norm(c_matrix(form), axis=0), rtol=1e-14)


def c_matrix(form: Factorization) -> np.ndarray:
    assert isinstance(form.mechanism, RoundedBanded)
    return np.array(
        [sum(m / 2**31 * np.eye(20, k=-j)[t] for j, m in enumerate(form.mechanism.multiples)) for t in range(20)]
    )
