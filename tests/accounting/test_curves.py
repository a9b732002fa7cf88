"""Curves of (ε, δ), groups of units, laws of the loss, and the capacity of a round."""

import math
import subprocess
import sys
import tomllib
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr
from scipy.stats import binom

from fedpriv.accounting import curves
from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.budget import find_capacity, overflow_slack
from fedpriv.accounting.losses import GridLossDistribution, PrivacyLossDistribution, min_noise_multiplier
from tests.doc_pages import ROOT

DELTA = 1e-5


def gaussian_losses(mu: float, points: int = 4001) -> PrivacyLossDistribution:
    """The loss of N(μ, 1) against N(0, 1) in bins, each at its upper end: above the truth."""
    edges = np.linspace(-9.0, 9.0, points)
    masses = np.diff(ndtr(edges))
    masses[0] += float(ndtr(edges[0]))
    return PrivacyLossDistribution(mu * edges[1:] + 0.5 * mu * mu, masses, float(ndtr(-edges[-1])))


def test_a_gaussian_curve_is_not_below_the_exact_delta_at_enormous_losses() -> None:
    """Before: 0.0005 where δ is 1 at μ = 3e9, since two logarithms of 2e19 cancelled."""
    for mu, epsilon in ((3e9, 4.4999999835e18), (1e10, 5e19 - 8e10)):
        assert float(curves.gaussian_curve(mu)(np.array([epsilon]))[0]) >= gdp.delta_of(mu, epsilon) * (1 - 1e-11)


@settings(max_examples=200)
@given(mu=st.floats(1e-4, 60.0), epsilon=st.floats(0.0, 600.0))
def test_gaussian_curves_hold_the_exact_delta_between_them(mu: float, epsilon: float) -> None:
    exact, at = gdp.delta_of(mu, epsilon), np.array([epsilon])
    assert float(curves.gaussian_curve(mu)(at)[0]) >= exact * (1 - 1e-11)
    assert float(curves.lower_gaussian_curve(mu)(at)[0]) <= exact
    if exact > 1e-12:
        assert float(curves.gaussian_curve(mu)(at)[0]) <= exact * 1.01
        assert float(curves.lower_gaussian_curve(mu)(at)[0]) >= exact * 0.99


@pytest.mark.parametrize("mu", [0.1, 1.0, 5.0])
def test_epsilon_at_returns_the_smallest_epsilon_whose_delta_meets_the_target(mu: float) -> None:
    epsilon = curves.epsilon_at(curves.gaussian_curve(mu), DELTA)
    assert curves.delta_at(curves.gaussian_curve(mu), epsilon) <= DELTA
    assert epsilon == pytest.approx(gdp.epsilon_of(mu, DELTA), rel=1e-9)
    assert curves.epsilon_at(lambda epsilons: np.ones_like(epsilons), DELTA) == math.inf
    assert curves.epsilon_at(curves.gaussian_curve(0.0), DELTA) == 0.0


def test_lowest_and_highest_curves_are_the_pointwise_minimum_and_maximum() -> None:
    at, (low, high) = np.array([0.0, 1.0, 3.0]), (curves.gaussian_curve(1.0), curves.gaussian_curve(2.0))
    assert np.array_equal(curves.lowest_curve([low, high])(at), low(at))
    assert np.array_equal(curves.highest_curve([low, high])(at), high(at))


@settings(max_examples=50)
@given(first=st.floats(0.05, 3.0), second=st.floats(0.05, 3.0), epsilon=st.floats(0.0, 20.0))
def test_triangle_curve_of_two_gaussian_shifts_is_above_the_exact_delta_of_their_sum(
    first: float, second: float, epsilon: float
) -> None:
    """N(μ₁ + μ₂, 1) against N(0, 1) through N(μ₂, 1): the chain is a bound of what is exactly known."""
    bound = curves.delta_at(
        curves.triangle_curve(curves.gaussian_curve(first), curves.gaussian_curve(second)), epsilon
    )
    assert bound >= min(1.0, gdp.delta_of(first + second, epsilon)) * (1 - 1e-9)


# Groups of units


@pytest.mark.parametrize(("size", "together"), [(2, 9.997), (8, 65.32)])
def test_group_epsilons_of_a_fixed_order_match_golden_values(size: int, together: float) -> None:
    assert gdp.epsilon_of(curves.group_mu(1.0, size), DELTA) == pytest.approx(together, abs=5e-3)
    assert curves.group_mu(1.0, 1) == 1.0


@pytest.mark.slow
def test_square_root_rule_for_groups_fails_under_allocation_while_the_triangle_bound_holds() -> None:
    """Two units with secret rounds of their own, by sampling; 4.5 standard errors: one false alarm in 1.5e5 seeds.

    W is the mean over i, j of the ratio of N(e_i + e_j, z²): Y_i Y_j, or Y_i² e^(-1/z²) where i = j.
    """
    z, bins, samples = 0.9205, 60, 1_000_000
    epsilon = gdp.epsilon_of(math.sqrt(2.0) * 0.3, DELTA)
    draw, values = np.random.default_rng(2), []
    for _ in range(samples // 20_000):
        normal = draw.standard_normal((20_000, bins))
        rows = np.arange(20_000)
        for _unit in range(2):
            normal[rows, draw.integers(0, bins, 20_000)] += 1.0 / z
        y = np.exp(normal / z - 0.5 / z**2)
        squares = (y**2).sum(1)
        ratio = (y.sum(1) ** 2 - squares + math.exp(-(z**-2)) * squares) / bins**2
        values.append(np.maximum(1.0 - math.exp(epsilon) / ratio, 0.0))
    deltas = np.concatenate(values)
    error = float(deltas.std()) / math.sqrt(samples)
    assert float(deltas.mean()) - 4.5 * error > 3.0 * DELTA
    assert float(deltas.mean()) < curves.delta_at(
        curves.group_privacy_curve(AllocatedGaussian(z, bins).curve, 2), epsilon
    )


@settings(max_examples=50)
@given(mu=st.floats(0.05, 2.0), size=st.integers(1, 8), epsilon=st.floats(0.0, 20.0))
def test_group_privacy_curve_is_above_the_exact_gaussian_group_delta(mu: float, size: int, epsilon: float) -> None:
    bound = curves.delta_at(curves.group_privacy_curve(curves.gaussian_curve(mu), size), epsilon)
    assert bound >= gdp.delta_of(size * mu, epsilon) * (1 - 1e-9)


def test_bound_of_a_huge_group_needs_no_memory_of_its_size() -> None:
    """Σ e^(iε/k) is k at ε = 0, and k (e - 1) at 1 but for a part 1/k.  Before: 65 GB for a million units."""
    bound = curves.group_privacy_curve(lambda epsilons: np.full_like(epsilons, 1e-12), 10**6)
    deltas = bound(np.linspace(0.0, 1.0, 8193))
    assert deltas[[0, -1]] == pytest.approx([1e-6, 1e-6 * math.expm1(1.0)], rel=1e-5)


# Laws of the loss


@pytest.mark.parametrize("mu", [0.3, 1.0])
@pytest.mark.parametrize("step", [0.2, 0.05, 1e-3])
@pytest.mark.parametrize("times", [1, 4, 20])
def test_rounding_losses_to_a_grid_raises_delta_and_a_fine_grid_only_slightly(
    mu: float, step: float, times: int
) -> None:
    law = gaussian_losses(mu).to_grid(step).self_compose(times)
    for epsilon in (0.0, 0.7, 2.0):
        exact = gdp.delta_of(math.sqrt(times) * mu, epsilon)
        computed = float(law.deltas(epsilon))
        assert computed >= exact * (1 - 1e-9)
        if step <= 1e-3:
            assert computed <= exact * (1.0 + 0.05 * math.sqrt(times)) + 1e-9


@settings(max_examples=60)
@given(
    masses=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=12),
    losses=st.lists(st.floats(-6.0, 6.0), min_size=12, max_size=12, unique=True),
    step=st.floats(0.01, 1.0),
    epsilon=st.floats(0.0, 8.0),
)
def test_loss_grid_never_lowers_the_delta_of_one_release_or_two(
    masses: list[float], losses: list[float], step: float, epsilon: float
) -> None:
    """The guarantee of on_lattice, against the atoms, for one release and for two."""
    share = np.array(masses) / (sum(masses) + 0.01)
    law = PrivacyLossDistribution(np.sort(np.array(losses[: len(share)])), share, 1.0 - float(share.sum()))
    lattice = law.to_grid(step)

    def exact(at: curves.Floats, of: curves.Floats, infinite: float) -> float:
        return infinite + float(np.maximum(-np.expm1(epsilon - at), 0.0) @ of)

    twice = np.add.outer(law.losses, law.losses).ravel(), np.multiply.outer(law.masses, law.masses).ravel()
    assert float(lattice.distribution.deltas(epsilon)) >= exact(law.losses, law.masses, law.infinity_mass)
    least = exact(*twice, 1.0 - (1.0 - law.infinity_mass) ** 2)
    assert float(lattice.self_compose(2).deltas(epsilon)) >= least - 1e-13


# Calibration, capacity, imports


def test_min_noise_multiplier_is_verified_with_the_fine_delta_bound() -> None:
    """The guarantee of smallest_noise, with a coarse bound that is 40 % off and one that is not a bound at all."""
    tried: dict[float, float] = {}

    def fine(z: float) -> float:
        tried[z] = gdp.delta_of(1.0 / z, 1.0)
        return tried[z]

    def scaled(factor: float, z: float) -> float:
        return gdp.delta_of(factor / z, 1.0)

    for factor in (1.0, 1.4, 0.7):
        z = min_noise_multiplier(partial(scaled, factor), fine, DELTA)
        assert tried[z] <= DELTA
        assert z == pytest.approx(1.0 / gdp.mu_of(1.0, DELTA), rel=3e-4)
    assert min_noise_multiplier(lambda z: 0.0, lambda z: 0.0, DELTA) == pytest.approx(0.1, rel=2e-4)


@pytest.mark.parametrize(("factor", "most"), [(1.0, 3), (0.7, 10), (0.2, 14)])
def test_a_search_computes_the_fine_bound_a_few_times(factor: float, most: int) -> None:
    """It takes seconds each time.  The factor is that of the noise that the coarse bound asks for."""
    tried: list[float] = []

    def fine(z: float) -> float:
        tried.append(z)
        return gdp.delta_of(1.0 / z, 1.0)

    min_noise_multiplier(lambda z: gdp.delta_of(factor / z, 1.0), fine, DELTA)
    assert len(tried) <= most


@pytest.mark.parametrize(("units", "rate"), [(1000, 1 / 60), (60_000, 1 / 60), (50, 0.5), (1, 0.3), (10**7, 1e-4)])
def test_round_capacity_is_the_smallest_with_a_negligible_overflow_probability(units: int, rate: float) -> None:
    round_capacity = find_capacity(units, rate)
    exact = float(binom.sf(round_capacity.row_count, units, rate))
    assert exact <= round_capacity.overflow_probability <= 2.0**-40
    smaller = float(binom.sf(round_capacity.row_count - 1, units, rate))
    assert round_capacity.row_count == 0 or smaller > 2.0**-40 * (1 - 1e-5)
    assert overflow_slack(round_capacity, 60) >= 60 * exact
    assert round_capacity.row_count <= units


def test_guarantee_overflow_probability_of_a_billion_units_is_rounded_up() -> None:
    """Before: below the probability by 3 millionths of it, where rounding took 4 and one was added."""
    capacity = find_capacity(10**9, 1e-3)
    exact = float(binom.sf(capacity.row_count, 10**9, 1e-3))
    assert exact <= capacity.overflow_probability <= exact * (1.0 + 4e-5)


@pytest.mark.parametrize(("mu", "bounds"), [(1e-160, (0.0, 1e-300)), (1e200, (0.0, 1.0))])
def test_gaussian_curves_of_extreme_mu_are_numbers(mu: float, bounds: tuple[float, float]) -> None:
    """Before: δ was NaN, and with it the least of several bounds."""
    epsilons = np.array([1.0])
    assert (curves.lower_gaussian_curve(mu)(epsilons)[0], curves.gaussian_curve(mu)(epsilons)[0]) == bounds


def test_the_accountants_work_without_torch_and_without_the_dp_accounting_package() -> None:
    """It keeps attrs below 24 for all that is installed beside it, so that it is an oracle of the tests alone."""
    modules = "allocation budget curves gaussian guarantees losses poisson renyi selection"
    code = (
        "import sys; sys.modules['dp_accounting'] = None\n"
        f"from fedpriv.accounting import {', '.join(modules.split())}\n"
        "print(poisson.calibrate(1.0, 1e-5, 0.1, 5).noise_multiplier)\n"
        "print(poisson.calibrate(1.0, 1e-5, 0.1, 5, 'replace-one').noise_multiplier, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *multipliers, imports_torch = done.stdout.split()
    assert (len(multipliers), imports_torch) == (2, "False")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not [name for name in project["dependencies"] if name.startswith(("dp-accounting", "attrs"))]


def test_probability_mass_above_the_loss_grid_counts_as_infinite_loss() -> None:
    """A mass of 5e-17 at the loss 50: beyond what is kept, and never dropped."""
    law = PrivacyLossDistribution(np.array([-1.0, 1.0, 50.0]), np.array([0.5, 0.5, 5e-17]), 0.0)
    assert law.to_grid(0.1).infinity_mass == 5e-17


def test_the_spread_and_the_range_of_finite_losses() -> None:
    """Of the mean .5 and the variance .75 by hand, and without the last 1e-16 of mass at either end."""
    law = PrivacyLossDistribution(np.array([-9.0, 0.0, 2.0, 9.0]), np.array([5e-17, 0.3, 0.1, 5e-17]), 0.6)
    assert law.loss_std == pytest.approx(math.sqrt(0.75), rel=1e-12)
    assert law.loss_range == 2.0
    nothing = PrivacyLossDistribution(np.zeros(1), np.zeros(1), 1.0)
    assert (nothing.loss_std, nothing.loss_range) == (0.0, 0.0)


def test_every_delta_has_margins_for_rounding() -> None:
    """1e-12, and 1e-9 of δ."""
    for infinite in (0.0, 0.1, 0.5):
        law = PrivacyLossDistribution(np.array([0.0]), np.array([1.0 - infinite]), infinite)
        assert float(law.deltas(1.0)) == pytest.approx(infinite * (1.0 + 1e-9) + 1e-12, rel=1e-14, abs=0.0)


def test_rounding_error_of_a_long_composition_is_added_to_its_infinity_mass() -> None:
    """1e-15 a release: 10,000 of them pass the 1e-12 that every composition adds."""
    assert GridLossDistribution(1e-3, 0, np.array([0.5, 0.5]), 0.0).self_compose(10_000).infinity_mass >= 1e-11
