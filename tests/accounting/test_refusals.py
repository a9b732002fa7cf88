"""What no accountant can price is refused: how it is asked for, and what the message names."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedpriv.accounting import gaussian as gdp
from fedpriv.accounting import renyi
from fedpriv.accounting.allocation import AllocatedGaussian, calibrate
from fedpriv.accounting.budget import (
    ApproximateGDP,
    LifetimeBudget,
    find_capacity,
    min_mu,
    overflow_slack,
    price_at_distance,
)
from fedpriv.accounting.curves import (
    check_group_size,
    gaussian_curve,
    group_mu,
    group_privacy_curve,
    group_privacy_epsilon,
    lower_gaussian_curve,
)
from fedpriv.accounting.losses import PrivacyLossDistribution, min_noise_multiplier
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.accounting.selection import NegativeBinomialRunCount, PoissonRunCount, PrivateSelection
from fedpriv.core.errors import InputError

OTHER: Any = "add-remove"
LAW = PrivacyLossDistribution(np.array([-1.0, 1.0]), np.array([0.5, 0.5]), 0.0)
REFUSED: list[tuple[Callable[[], object], str]] = [
    # Gaussian releases
    (lambda: gdp.epsilon_of(-1.0, 1e-5), "mu = -1"),
    (lambda: gdp.epsilon_of(math.nan, 1e-5), "mu = nan"),
    (lambda: gdp.epsilon_of(1.0, 0.0), "delta = 0"),
    (lambda: gdp.mu_of(1.0, 1.0), "delta = 1"),
    (lambda: gdp.delta_of(1.0, -0.1), "epsilon = -0.1"),
    (lambda: gdp.delta_of(1.0, math.inf), "epsilon = inf"),
    (lambda: gdp.compose([1.0, -1.0]), "every release"),
    (lambda: gdp.noise_for(0.0, 1.0), "mu = 0"),
    (lambda: renyi.mu_of(0.0, 1e-5), "epsilon = 0"),
    (lambda: renyi.mu_of_zcdp(-1.0), "zcdp = -1"),
    (lambda: renyi.mu_of_zcdp(math.inf), "zcdp = inf"),
    (lambda: renyi.zcdp_of(-1.0), "mu = -1"),
    (lambda: renyi.paper_epsilon(1.0, 0.0), "delta = 0"),
    (lambda: renyi.paper_mu(-1.0, 1e-5), "epsilon = -1"),
    (lambda: gdp.noise_for(1.0, 0.0), "sensitivity = 0"),
    (lambda: gdp.mu_of(-1.0, 1e-5), "epsilon = -1"),
    # sampled runs
    (lambda: AllocatedGaussian(0.0, 60), "noise_multiplier"),
    # Before: ZeroDivisionError, once a curve was computed.
    (lambda: AllocatedGaussian(1e200, 60), r"noise_multiplier = 1e\+200"),
    (lambda: AllocatedGaussian(1.0, 0), "bins"),
    (lambda: AllocatedGaussian(1.0, 10**6), "bins"),
    (lambda: AllocatedGaussian(1.0, 60, 0), "epochs"),
    (lambda: AllocatedGaussian(1.0, 60, 1, OTHER), "relation"),
    (lambda: AllocatedGaussian(1.0, 60).epsilon_of(1e-11), "1e-10"),
    (lambda: calibrate(1.0, 1e-12, 60), "1e-10"),
    (lambda: calibrate(1e-12, 1e-10, 60), "no noise multiplier"),
    (lambda: min_noise_multiplier(lambda z: 1.0, lambda z: 1.0, 1e-5), "no noise multiplier"),
    (lambda: PoissonGaussian(0.0, 0.1, 1), "noise_multiplier"),
    # Before: OverflowError, once a curve was computed.
    (lambda: PoissonGaussian(1e-4, 0.1, 1), "noise_multiplier = 0.0001"),
    (lambda: PoissonGaussian(1e200, 0.1, 1), r"noise_multiplier = 1e\+200"),
    (lambda: PoissonGaussian(1.0, 0.0, 1), "sampling_rate"),
    (lambda: PoissonGaussian(1.0, 1.1, 1), "sampling_rate"),
    (lambda: PoissonGaussian(1.0, 0.1, 0), "rounds"),
    (lambda: PoissonGaussian(1.0, 0.1, 10**6), "rounds"),
    (lambda: PoissonGaussian(1.0, 0.1, 1, OTHER), "relation"),
    (lambda: PoissonGaussian(0.01, 1e-4, 1).epsilon_of(1e-5), "too small"),
    (lambda: LAW.to_grid(1e-9), "do not fit"),
    (lambda: LAW.to_grid(0.1).self_compose(0), "1 time or more"),
    (lambda: check_group_size(0), "group of 0"),
    (lambda: group_mu(1.0, 0), "group of 0"),
    (lambda: group_mu(math.nan, 2), "mu = nan"),
    (lambda: group_privacy_curve(gaussian_curve(1.0), 0), "group of 0"),
    (lambda: group_privacy_epsilon(gaussian_curve(1.0), 2, 1e-11), "1e-10"),
    (lambda: PoissonGaussian(1.0, 0.1, 1).group_curve(0), "group of 0"),
    (lambda: AllocatedGaussian(1.0, 60).group_curve(0), "group of 0"),
    (lambda: gaussian_curve(-1.0), "mu = -1"),
    (lambda: lower_gaussian_curve(-1.0), "mu = -1"),
    (lambda: find_capacity(0, 0.1), "capacity"),
    (lambda: find_capacity(10, 0.0), "capacity"),
    (lambda: find_capacity(10, 1.5), "capacity"),
    (lambda: overflow_slack(find_capacity(10, 0.5), 0), "rounds"),
    # charges and budgets
    (lambda: min_mu(lambda epsilons: np.full_like(epsilons, 0.01), 1e-6), "above it at epsilon = 700"),
    (lambda: min_mu(gaussian_curve(20.0), 1e-7), "no mu can be certified"),
    (lambda: min_mu(AllocatedGaussian(0.9205, 60).curve, 1e-12), "1e-10"),
    (lambda: ApproximateGDP(-1.0, 0.0), "mu"),
    (lambda: ApproximateGDP(1.0, 1.0), "slack"),
    (lambda: ApproximateGDP(1.0, -0.1), "slack"),
    (lambda: price_at_distance(ApproximateGDP(0.25), distance=0), "distance"),
    (lambda: LifetimeBudget(0.0, 0.0), "mu"),
    (lambda: LifetimeBudget(math.inf, 0.0), "mu"),
    (lambda: LifetimeBudget(1.0, 1.0), "slack"),
    # selections
    (lambda: NegativeBinomialRunCount(0.5), "trials = "),
    (lambda: NegativeBinomialRunCount(math.nan), "trials = "),
    (lambda: NegativeBinomialRunCount(1e7), "trials = "),
    (lambda: PoissonRunCount(0.5), "trials = "),
    (lambda: PoissonRunCount(math.nan), "trials = "),
    (lambda: PoissonRunCount(1e7), "trials = "),
    (lambda: NegativeBinomialRunCount(5.0, -1.0), "eta = -1"),
    (lambda: NegativeBinomialRunCount(5.0, 100.5), "eta = 100.5"),
    (lambda: PrivateSelection(1.0, PoissonRunCount(5.0), -1.0), "mu = -1"),
    (lambda: PrivateSelection(0.0, PoissonRunCount(5.0)), "mu = 0"),
]


@pytest.mark.parametrize(("ask", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_arguments_that_no_accountant_can_price_are_refused_by_name(ask: Callable[[], object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        ask()
