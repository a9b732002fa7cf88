"""The claim is on the safe side of the theorem, and the theorem's steps hold in numbers."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from fedpriv.accounting import gaussian as gdp
from fedpriv.core.errors import InputError
from fedpriv.noise.integers.gaussian import KeyedDiscreteGaussian
from fedpriv.noise.integers.strategies import NoiseGroup, claim_for_mu, integer_distance

Values = np.ndarray


def smoothing(h: float) -> float:
    """ε_h = 2 Σ_{j≥1} exp(-2π² h² j²)."""
    return 2.0 * sum(math.exp(-2.0 * math.pi**2 * h**2 * j**2) for j in range(1, 50))


def pmf(sigma: float, radius: int) -> Values:
    values = np.arange(-radius, radius + 1)
    weights = np.exp(-(values**2) / (2.0 * sigma**2))
    return weights / math.fsum(weights)


@pytest.mark.parametrize("sigma", [1.0, 3.0])
@pytest.mark.parametrize("h", [0.4, 0.5, 0.7])
def test_randomly_rounded_gaussian_has_nearly_the_discrete_gaussian_distribution(sigma: float, h: float) -> None:
    """Step 1: x ~ N(0, σ² - h²) rounded by D(h) around x has the law D(σ) within exp(±2 ε_h)."""
    radius, wide = math.ceil(7 * sigma), math.sqrt(sigma**2 - h**2)
    x = np.arange(-12 * sigma, 12 * sigma, wide / 400)  # the trapezoidal rule converges geometrically here
    density = np.exp(-(x**2) / (2 * wide**2)) / math.sqrt(2 * math.pi) / wide * (x[1] - x[0])
    near = np.round(x)[:, None] + np.arange(-40, 41)
    normalizer = np.exp(-((near - x[:, None]) ** 2) / (2 * h**2)).sum(axis=1)
    values = range(-radius, radius + 1)
    found = np.array([np.sum(density * np.exp(-((y - x) ** 2) / (2 * h**2)) / normalizer) for y in values])
    assert np.max(np.abs(np.log(found / pmf(sigma, radius)))) <= 2.0 * smoothing(h) + 1e-9


@pytest.mark.parametrize("share", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("owners", [2, 3, 5])
def test_sum_of_discrete_gaussian_shares_is_nearly_a_discrete_gaussian(owners: int, share: float) -> None:
    reach = math.ceil(16 * share * owners)
    total = np.ones(1)
    for _ in range(owners):
        total = np.convolve(total, pmf(share, reach))
    radius = math.ceil(6 * share * math.sqrt(owners))
    middle = len(total) // 2
    found = total[middle - radius : middle + radius + 1]
    exact = pmf(share * math.sqrt(owners), 10 * radius)[9 * radius : 11 * radius + 1]
    bound = 2.0 * sum(smoothing(share * math.sqrt((m - 1) / m)) for m in range(2, owners + 1))
    assert np.max(np.abs(np.log(found / exact))) <= bound + 1e-9


@pytest.mark.parametrize(("sigma", "h"), [(3.0, 1.0), (16.0, 2.0), (64.0, 16.0)])
@pytest.mark.parametrize("moved", [1, 2, 5])
def test_delta_of_the_theorem_is_never_exceeded(sigma: float, h: float, moved: int) -> None:
    """With the control that δ of Δ/σ, without the deduction of h², is."""
    radius = math.ceil(14 * sigma) + moved
    ours = pmf(sigma, radius)
    theirs = np.concatenate([np.zeros(moved), ours[:-moved]])
    eta, mu = 2.0 * smoothing(h), moved / math.sqrt(sigma**2 - h**2)
    exceeded = 0
    for epsilon in np.linspace(0.0, 4.0 * moved / sigma, 81).tolist():
        exact = math.fsum(np.maximum(theirs - math.exp(epsilon) * ours, 0.0))
        safe = math.exp(eta) * gdp.delta_of(mu, max(0.0, epsilon - 2.0 * eta))
        assert exact <= safe * (1 + 1e-9) + 1e-14
        exceeded += exact > gdp.delta_of(moved / sigma, epsilon) * (1 + 1e-7)
    assert exceeded >= 5


GROUPS = [
    [NoiseGroup(100, 1.0, Fraction(0))],
    [NoiseGroup(10, 0.25, Fraction(0)), NoiseGroup(90, 1.0, Fraction(7))],
    [NoiseGroup(100, 3.0, Fraction(31, 7))],
]


@settings(max_examples=100)
@given(st.floats(2.0**20, 2.0**42), st.floats(0.05, 20.0), st.sampled_from(GROUPS), st.integers(1, 300))
def test_claimed_mu_and_noise_are_sufficient_in_exact_rational_arithmetic(
    distance: float, mu: float, groups: list[NoiseGroup], owners: int
) -> None:
    least = min(Fraction(scale) for _, scale, _ in groups)
    try:
        claim = claim_for_mu(distance, mu, groups, 100, [1] * 100, owners)
    except InputError:
        return
    deducted = Fraction(256) / least**2
    left = owners * Fraction(claim.sigma) ** 2 - deducted
    assert left >= (Fraction(distance) / Fraction(mu)) ** 2  # what was asked for is reached
    assert Fraction(claim.mu) ** 2 * left >= Fraction(distance) ** 2  # what is on record is not too small
    assert claim.mu <= mu * (1 + 2.0**-38)
    for _, scale, _ in groups:
        sigma = Fraction(claim.sigma_of(scale))
        assert sigma >= Fraction(scale) * Fraction(claim.sigma)
        assert 2.0**16 <= sigma < 2.0**48
        assert owners * sigma**2 - 256 >= Fraction(scale) ** 2 * left  # every group, with 16 units deducted


def test_claimed_mu_covers_a_noise_group_of_tiny_scale() -> None:
    """What the attacker would gain: at a scale of .001 the true μ was 1.031 at a claim of 1."""
    scale = 0.001
    claim = claim_for_mu(2.0**26 + 0.5, 1.0, [NoiseGroup(1, scale, Fraction(0))], 1, [1])
    true = (Fraction(2.0**26 + 0.5) * Fraction(scale)) ** 2 / (Fraction(claim.sigma_of(scale)) ** 2 - 256)
    assert true <= Fraction(claim.mu) ** 2
    naive = Fraction(math.sqrt((2.0**26 + 0.5) ** 2 + 256))
    assert (Fraction(2.0**26 + 0.5) * Fraction(scale)) ** 2 > (naive * Fraction(scale)) ** 2 - 256


def test_integer_distance_adds_rounding_once_and_relative_to_the_noise_of_each_group() -> None:
    groups = [NoiseGroup(4, 0.5, Fraction(3)), NoiseGroup(5, 1.0, Fraction(2)), NoiseGroup(7, 0.1, Fraction(0))]
    rounding = math.sqrt(10 * (4 * 36 + 5 * 4))
    assert integer_distance(100.0, "zero-out", groups, 10) == pytest.approx(100.0 + rounding, rel=1e-11)
    assert integer_distance(100.0, "replace-one", groups, 10) == pytest.approx(200.0 + rounding, rel=1e-11)
    spread = integer_distance(100.0, "replace-one", groups, 10, 1 + Fraction(1, 100))
    assert spread == pytest.approx(202.0 + rounding)
    assert Fraction(integer_distance(0.1, "zero-out", groups[2:], 10)) >= Fraction(0.1) * (1 + Fraction(1, 2**40))


def test_noise_outside_the_range_of_the_sampler_is_refused() -> None:
    for distance, mu in ((1.0, 1.0), (2.0**50, 1.0), (2.0**30, 2.0**15)):
        with pytest.raises(InputError, match="2\\^16 to 2\\^48"):
            claim_for_mu(distance, mu, GROUPS[0], 1, [1])
    with pytest.raises(InputError, match="no noise"):
        claim_for_mu(2.0**30, 1.0, [NoiseGroup(1, 0.0, Fraction(0))], 1, [1])
    with pytest.raises(InputError, match="mu"):
        claim_for_mu(2.0**30, 0.0, GROUPS[0], 1, [1])


def test_slack_counts_every_noise_value_key_and_party() -> None:
    """600 rounds of 7850 values: 2^-97 and 2^-90; far below the 2^-60 that reports speak of."""
    claim = claim_for_mu(2.0**40, 1.0, GROUPS[0], 7850, [1] * 600)
    exact = Fraction(600 * 7850, 2**120) + Fraction(600 * 7850**2, 2**125)
    assert Fraction(claim.slack) >= exact
    assert claim.slack == pytest.approx(float(exact), abs=0.0)
    assert claim.slack < 2.0**-60
    masked = claim_for_mu(2.0**40, 1.0, GROUPS[0], 7850, [1] * 600, party_count=100)
    assert masked.slack == pytest.approx(100 * claim.slack, abs=0.0)
    assert claim.delta_of(1.0) >= gdp.delta_of(claim.mu, 1.0) + (1 + math.e) * claim.slack
    assert claim.delta_of(800.0) == 1.0


def test_noise_shares_of_nine_parties_add_up_to_the_full_variance() -> None:
    """Drawn: the variance of the sum of 9 owners' noise is the whole's; 1e-6."""
    size, owners = 20_000, 9
    claim = claim_for_mu(2.0**36, 1.0, GROUPS[0], 10, [1] * 10, party_count=owners)
    total = sum(
        KeyedDiscreteGaussian(bytes(32), owner, 1).vector(size, claim.sigma_of(1.0)) for owner in range(owners)
    )
    squared_norm = float(np.sum((np.asarray(total) / 2.0**36) ** 2))
    assert chi2.ppf(5e-7, size) < squared_norm < chi2.ppf(1 - 5e-7, size)
