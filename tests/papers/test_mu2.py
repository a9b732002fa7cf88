"""The theorems of DP-μ²-FL against numbers worked out by hand from the paper's table."""

import math
from dataclasses import replace

import pytest

from fedpriv.core.errors import InputError
from fedpriv.papers.base import Problem
from fedpriv.papers.reshef_levy import mu2_parameters
from fedpriv.participation.orders import Schedule

MNIST = Problem(7850, math.sqrt(2 * 785), 785 / 2, True, 100, Schedule(600, 600), silos=100)
ASKED = 4.0, 0.1
"""Tables 1 and 2 at M = 100, ρ = 4 and D = 0.1."""


def test_the_numbers_of_the_papers_tables() -> None:
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
def test_the_excess_risk_is_that_of_the_theorem(trusted: bool, share: float) -> None:
    """4D ((G + 2LD)/T + 2S√d/(ρ T √M) + σ~/√(TM)), M for √M if trusted."""
    clip = math.sqrt(1570) + 785 * 0.1
    terms = clip / 600 + 2 * clip * math.sqrt(7850) / (4 * 600 * share) + clip / math.sqrt(60_000)
    assert mu2_parameters(MNIST, *ASKED, trusted).excess_risk == pytest.approx(4 * 0.1 * terms)


def test_zero_out_takes_half_of_the_noise() -> None:
    half = mu2_parameters(replace(MNIST, relation="zero-out"), *ASKED, True).noise_in_mean
    assert half == pytest.approx(mu2_parameters(MNIST, *ASKED, True).noise_in_mean / 2)


def test_a_loss_without_bounds_is_refused() -> None:
    with pytest.raises(InputError, match="smoothness"):
        mu2_parameters(replace(MNIST, smoothness=math.inf), *ASKED, True)
