"""Theorem parameters of the momentum algorithms: golden numbers and refusals."""

import math

import pytest
from scipy.stats import norm

from fedpriv.accounting.gaussian import mu_of
from fedpriv.core.errors import InputError
from fedpriv.noise.differences import paper_window_counts
from fedpriv.papers.tran_cutkosky import (
    reduced_parameters,
    simple_noise_multiplier,
    tree_gradient_bound,
    tree_parameters,
)


def test_theorem_6() -> None:
    found = tree_parameters(records=1000, dimension=100, epsilon=1.0, delta=1e-6)
    assert found.rounds == 2396
    assert found.alpha == pytest.approx(1e-3, rel=1e-3)
    assert found.alpha >= 1e-3
    assert found.step == pytest.approx(1.0 / math.sqrt(1000 * 2396))


def test_theorem_9() -> None:
    found = reduced_parameters(records=1000, dimension=100, epsilon=1.0)
    assert found.rounds == 464_158
    assert found.alpha == pytest.approx(1e-3, rel=1e-5)
    assert found.mixing == pytest.approx(0.046, abs=5e-4)
    assert found.mixing == pytest.approx(math.sqrt(1000 / 464_158))


def test_theorem_9_needs_gamma_of_at_most_a_half() -> None:
    """T ≥ 4N is εN ≥ 2√2 √d, which the paper forgets."""
    enough = 2.0 * math.sqrt(2.0 * 100) / 1000
    assert reduced_parameters(1000, 100, enough * 1.001).mixing <= 0.5
    with pytest.raises(InputError, match="gamma"):
        reduced_parameters(1000, 100, enough * 0.99)


@pytest.mark.parametrize(
    ("epsilon", "delta", "paper", "exact"),
    [
        (0.5, 1e-5, 13.57, 7.03),
        (1.0, 1e-5, 6.79, 3.73),
        (2.0, 1e-6, 3.72, 2.23),
        (8.0, 1e-5, 0.848, 0.600),
    ],
)
def test_two_conversions(epsilon: float, delta: float, paper: float, exact: float) -> None:
    assert simple_noise_multiplier(epsilon, delta) == pytest.approx(paper, rel=2e-3)
    assert simple_noise_multiplier(epsilon, delta, reduced=True) == pytest.approx(2.0 * paper, rel=2e-3)
    assert 1.0 / mu_of(epsilon, delta) == pytest.approx(exact, rel=2e-3)


def test_the_simple_noise_is_refused_where_it_is_too_little() -> None:
    """The paper's condition is printed the wrong way round: at ε = 20, δ = 0.1 the true δ is 0.543."""
    mu = 20.0 / (2.0 * math.sqrt(math.log(10.0)))
    true_delta = norm.cdf(-20.0 / mu + mu / 2) - math.exp(20.0) * norm.cdf(-20.0 / mu - mu / 2)
    assert true_delta == pytest.approx(0.543, abs=5e-4)
    with pytest.raises(InputError, match="ln"):
        simple_noise_multiplier(20.0, 0.1)
    assert simple_noise_multiplier(2.3, 0.1) > 0.0


@pytest.mark.parametrize("rounds_per_epoch", [1, 2, 5])
def test_the_papers_counts_are_refused_where_they_are_too_small(rounds_per_epoch: int) -> None:
    with pytest.raises(InputError, match="exact"):
        paper_window_counts(100, rounds_per_epoch)


def test_the_papers_counts() -> None:
    assert paper_window_counts(640, 64) == (18.0, 240.0)


def test_the_corrected_bound_falls_with_more_records() -> None:
    few, many = (tree_gradient_bound(1.0, 1.0, 1.0, n, 100, 1.0, 1e-6) for n in (10**4, 10**6))
    assert many < few / 5


def test_theorem_6_says_where_it_has_no_parameters() -> None:
    with pytest.raises(InputError, match="Theorem 6"):
        tree_parameters(3, 1, 0.1, 1e-6)
