"""Bands of noisy survival curves cover the population, and the start has the deviation of its noise.

Federations are simulated all at once.  A bound for 2,000 of them is 4.9 standard errors below .93: bands that
cover as often at an edge fail it with probability 5e-7.  Of 20,000 they cover .93 itself, 8 standard errors below
.945.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpriv.addons.statistics.curves import Z, compute_survival_bands
from fedpriv.addons.statistics.indicators import prefix_root_matrix

Floats = NDArray[np.float64]
QUICK, FULL = 2_000, 20_000
LEAST = 0.93


class World(NamedTuple):
    """Exponential times of events and of censoring on bins of equal width."""

    records: int
    noise: float
    """Deviation, in records."""
    bins: int = 10
    events: float = 0.05
    """Cumulative hazard over all bins."""
    censored: float = 0.5

    @property
    def truth(self) -> Floats:
        return np.exp(-self.events * np.arange(1, self.bins + 1) / self.bins)

    def released(self, federations: int, seed: int = 0) -> Floats:
        """Noisy suffix sums of that many federations, (federations, 2 bins + 1)."""
        draw, both = np.random.default_rng(seed), self.events + self.censored
        staying = np.exp(-both * np.arange(self.bins + 1) / self.bins)
        leaving = -np.diff(staying) / both
        chances = np.concatenate([self.events * leaving, self.censored * leaving, staying[-1:]])
        counts = draw.multinomial(self.records, chances, federations).astype(float)
        died, gone = counts[:, : self.bins], counts[:, self.bins :]
        sums = np.hstack([died @ prefix_root_matrix(self.bins), gone @ prefix_root_matrix(self.bins + 1)])
        return sums + self.noise * draw.normal(size=sums.shape)


WORLDS = [
    World(1000, 10.0),  # .844 of federations were covered at the first edge
    World(1000, 0.0),
    World(1000, 3.0),
    World(1000, 30.0),  # .73
    World(1000, 10.0, bins=1),
    World(1000, 10.0, bins=2),
    World(1000, 10.0, bins=24),  # .82
    World(1000, 10.0, bins=50),  # .74
    World(5000, 10.0, bins=50, events=0.02),  # .81
    World(300, 1.0),
    World(300, 3.0, events=0.2),
    World(1000, 10.0, events=0.5),
    World(1000, 30.0, events=0.5),
    World(1000, 10.0, events=2.0),
]


def shares_of(world: World, federations: int) -> Floats:
    """How often each edge's band has the truth, among the curves that reach it."""
    bands = compute_survival_bands(world.released(federations), world.noise)
    assert np.all((bands.low <= bands.values) & (bands.values <= bands.high))
    hits = (bands.low <= world.truth) & (world.truth <= bands.high) & bands.is_shown
    assert np.all(np.mean(bands.is_shown, axis=0) > 0.5)
    return np.asarray(np.sum(hits, axis=0) / np.sum(bands.is_shown, axis=0))


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_survival_bands_cover_the_population(world: World) -> None:
    shares = shares_of(world, QUICK)
    assert np.min(shares) >= LEAST - 4.9 * math.sqrt(LEAST * (1.0 - LEAST) / QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_survival_bands_cover_93_percent_at_every_edge(world: World) -> None:
    shares = shares_of(world, FULL)
    print(world, ", ".join(f"{share:.3f}" for share in shares))
    assert np.min(shares) >= LEAST
    assert np.mean(shares) <= 0.985  # not by being wide


@pytest.mark.parametrize("federations", [QUICK, pytest.param(FULL, marks=pytest.mark.slow)])
def test_survival_bands_cover_the_population_under_growing_hazards(federations: int) -> None:
    """Deaths late, when few are at risk: the mean of 1/R alone covers .89."""
    draw, records, edges = np.random.default_rng(1), 300, np.linspace(0.0, 1.0, 11)
    event = (draw.exponential(size=(federations, records)) / 0.3) ** (1.0 / 3.0)
    censored = draw.exponential(1.0 / 1.5, size=(federations, records))
    bins = np.minimum(np.searchsorted(edges, np.minimum(event, censored)) - 1, 10)
    seen = (event <= censored) & (bins < 10)
    died = np.stack([np.sum(seen & (bins == each), axis=1) for each in range(10)], axis=1)
    gone = np.stack([np.sum(~seen & (bins == each), axis=1) for each in range(11)], axis=1)
    bands = compute_survival_bands(np.hstack([died @ prefix_root_matrix(10), gone @ prefix_root_matrix(11)]), 0.0)
    truth = np.exp(-0.3 * edges[1:] ** 3)
    covered = np.mean((bands.low <= truth) & (truth <= bands.high), axis=0)
    assert np.min(covered[3:]) >= LEAST - 4.9 * math.sqrt(LEAST * (1.0 - LEAST) / federations)


def test_a_survival_band_without_events_has_positive_width() -> None:
    """No event among 100: S may be .97, and a band of S = 1 alone says that nobody dies."""
    gone = np.zeros((1, 4))
    gone[0, -1] = 100.0
    bands = compute_survival_bands(np.hstack([np.zeros((1, 3)), gone @ prefix_root_matrix(4)]), 0.0)
    assert np.all(bands.values == 1.0)
    assert np.all(bands.high == 1.0)
    assert np.all(np.abs(bands.low - math.exp(-(Z**2) / 100.0)) < 1e-9)


@pytest.mark.parametrize("bins", [1, 2, 10, 24, 50])
def test_the_estimated_number_of_records_at_the_start_has_the_error_of_its_own_noise(bins: int) -> None:
    """It was that of the number at risk in the first bin, which has half of those censored there: .904 of it."""
    units = np.eye(2 * bins + 1)
    bands = compute_survival_bands(units, 3.0)
    assert bands.start_error == pytest.approx(3.0 * float(np.linalg.norm(bands.start)), rel=1e-12)
    world = World(1000, 10.0, bins)
    found = compute_survival_bands(world.released(QUICK), world.noise)
    covered = float(np.mean(np.abs(found.start - world.records) <= Z * found.start_error))
    assert abs(covered - 0.95) <= 4.9 * math.sqrt(0.95 * 0.05 / QUICK)
