"""Random allocation beside an accountant of other hands, pld-accounting, with a lower and an upper end of ε."""

import numpy as np
import pytest

from fedpriv.accounting.allocation import AllocatedGaussian
from tests.parts import in_parts

DELTA = 1e-5
CASES = [  # multiplier, rounds of an epoch, epochs
    (0.92, 60, 1), (0.5, 60, 1), (0.5, 60, 5), (0.6, 120, 8), (0.35, 16, 4), (0.4, 60, 5), (0.8, 16, 4),
]  # fmt: skip
NUMERICS = 1e-9
"""Relative error of theirs, which adds up floats."""
LOOSENESS = 1.01
"""What is given away at most."""


@pytest.mark.parametrize(("multiplier", "rounds", "epochs"), in_parts(CASES, long=[CASES[3], CASES[5]]))
def test_allocation_epsilon_agrees_with_pld_accountings_range_within_one_percent(
    multiplier: float, rounds: int, epochs: int
) -> None:
    accountant = pytest.importorskip("PLD_accounting")
    upper, lower = accountant.gaussian_allocation_epsilon_range(
        delta=DELTA, sigma=multiplier, num_steps=rounds, num_epochs=epochs
    )
    epsilon = AllocatedGaussian(multiplier, rounds, epochs).epsilon_of(DELTA)
    assert lower * (1 - NUMERICS) <= epsilon <= LOOSENESS * upper


@pytest.mark.slow
def test_one_epoch_epsilon_at_random_settings_agrees_with_pld_accountings_range() -> None:
    accountant = pytest.importorskip("PLD_accounting")
    draw = np.random.default_rng(53)
    for _ in range(4):
        multiplier, rounds = float(draw.uniform(0.5, 4.0)), int(draw.integers(2, 100))
        upper, lower = accountant.gaussian_allocation_epsilon_range(
            delta=DELTA, sigma=multiplier, num_steps=rounds
        )
        epsilon = AllocatedGaussian(multiplier, rounds).epsilon_of(DELTA)
        assert lower * (1 - NUMERICS) <= epsilon <= LOOSENESS * upper, (multiplier, rounds)
