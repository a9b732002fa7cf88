"""Noise of simulations: a party's vectors times its standard deviation, however many are drawn at a time."""

from collections.abc import Callable

import numpy as np
import pytest

from fedpriv.core.random import MAX_VALUES_PER_DRAW, SERVER, simulation_noise
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.rounds import floats
from fedpriv.rounds.floats import SeededNoise, rounds_per_draw
from fedpriv.scenario.schema import Cell

MakeCell = Callable[..., Cell]


@pytest.mark.parametrize(
    ("dimension", "silos", "rounds"),
    [
        (10, 3, 16),
        (2**16, 64, 16),
        (2**16, 128, 8),
        (2**16, 1024, 1),
        (2**16, 2048, 1),
        (MAX_VALUES_PER_DRAW + 1, 1, 1),
    ],
)
def test_the_number_of_prefetched_noise_rounds_falls_with_dimension_and_silos(
    dimension: int, silos: int, rounds: int
) -> None:
    assert rounds_per_draw(dimension, silos) == rounds


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
@pytest.mark.parametrize("most", [2**26, 0])
def test_noise_does_not_depend_on_how_many_rounds_are_drawn_at_a_time(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str, most: int
) -> None:
    """Silos of unequal batches have unequal noise, and a party that adds none has none."""
    monkeypatch.setattr(floats, "_MAX_PREFETCHED_VALUES", most)
    cell = small_cell(algorithm__trust=trust, federation={"silos": 2, "rounds": 8, "batches": [2, 5]})
    plan = make_plan(cell, load_task(cell).objective)
    source = simulation_noise(7, np.float64)
    noise = SeededNoise(plan, source, plan.dtype)
    for t in (1, 2, 3, 8, 2, 1):
        for party in (0, 1, SERVER):
            fresh, std = noise(party, t), float(plan.noise.std_of(party))
            assert (fresh is not None) == (std > 0.0) == ((party == SERVER) == (trust == "trusted"))
            if fresh is not None:
                expected = std * source.vector(plan.objective.dimension, party, t)
                np.testing.assert_allclose(fresh.vectors.numpy(), expected, rtol=1e-12)
