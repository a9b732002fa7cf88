"""Allocation along chains, attacked: hostile clips, noise, decays, lengths, at every δ that weights can reach."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from fedpriv.accounting import fading
from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.chain import LOST_MEAN, CovarianceChain, ExponentGrid, dominating_chain
from fedpriv.accounting.curves import Curve, Floats, gaussian_curve
from fedpriv.accounting.fading import COARSE, FINE, ChainEpoch, ChainResolution
from fedpriv.accounting.gaussian import Relation
from fedpriv.noise.buffered import BufferedToeplitz, LambdaCgd
from fedpriv.noise.series import Workload
from fedpriv.participation.secret import RandomAllocation
from fedpriv.plan.sums import RunningSums
from tests.accounting.builders import lags, require
from tests.accounting.falsified import Gain, matrix_of, moves_of, sticks
from tests.parts import in_parts

GAINS: tuple[Gain, ...] = ("removed", "added", "replaced")


def cgd(decay: float) -> LambdaCgd:
    return LambdaCgd(1.0, (decay,), (0.0,))


@dataclass(frozen=True)
class Attack:
    """A run with hostile numbers."""

    mechanism: BufferedToeplitz
    bins: int
    groups: int
    epochs: int
    noise: float
    """σ over the longest move of a round."""
    clips: str
    relation: Relation

    @property
    def order(self) -> RandomAllocation:
        epoch = self.bins * self.groups
        return RandomAllocation(epoch * self.epochs, epoch, self.groups)

    def each_clip(self) -> Floats:
        rounds = self.order.rounds
        return {
            "equal": np.ones(rounds),
            "rising": np.geomspace(1e-4, 1.0, rounds),
            "falling": np.geomspace(1.0, 1e-4, rounds),
            "first small": np.where(np.arange(rounds) == 0, 1e-3, 1.0),
            "few large": np.where(np.arange(rounds) % 3 == 1, 1.0, 1e-5),
            "any": np.exp(np.random.default_rng(rounds).uniform(-7.0, 0.0, rounds)),
        }[self.clips]

    def run(self) -> tuple[AllocatedGaussian, float]:
        """What it promises, and σ."""
        sums = RunningSums(self.mechanism, Workload(self.order, 1.0, self.each_clip()), self.relation)
        sigma = self.noise * sums.displacement_and_overlap(self.groups)[0]
        return self.order.guarantee(sums, sigma), sigma

    def compared(self, draws: int, grain: ChainResolution) -> Iterator[tuple[Gain, Curve, Floats, Floats, Floats]]:
        """Of every direction the bounds of the run and of chains; ε, true δ by weights, and their errors."""
        run, sigma = self.run()
        overlaps, gains = require(run.overlaps), GAINS[:2] if self.relation == "zero-out" else GAINS[2:]
        if self.relation == "zero-out":
            chains = fading.removal_and_addition_curves(overlaps, run.noise_multiplier, grain)
        else:
            curve = fading.replacement_curve(overlaps, run.noise_multiplier, grain)
            chains = None if curve is None else (curve, curve)
        largest = (1.0 if self.relation == "zero-out" else 2.0) / self.noise
        epsilons = np.array([0.0, 0.3, 1.0, 2.5, 5.0]) * min(1.5, largest)
        epsilons = np.append(epsilons, 0.5 * largest**2 + np.array([2.0, 5.0]) * largest)
        matrix = matrix_of(self.mechanism, self.order.rounds)
        for group in {0, self.groups - 1}:
            moves = moves_of(matrix, self.each_clip(), self.order, group, sigma)
            for place, gain in enumerate(gains):
                means, errors = sticks(moves, epsilons, gain, draws, seed=group)
                if chains is None or grain is FINE:
                    yield gain, run.curve, epsilons, means, errors
                if chains is not None:
                    yield gain, chains[place], epsilons, means, errors


def never_below(attack: Attack, draws: int, grain: ChainResolution) -> None:
    for gain, bound, epsilons, means, errors in attack.compared(draws, grain):
        found = bound(epsilons)
        assert np.all(found >= means - 4.5 * errors), (gain, epsilons, found, means, errors)


QUIET = [
    Attack(cgd(0.98), 12, 5, 1, 0.62, "equal", "zero-out"),
    Attack(cgd(0.99), 8, 30, 1, 0.8, "equal", "zero-out"),
]


@pytest.mark.every(2)
@pytest.mark.parametrize("attack", QUIET, ids=str)
def test_removal_and_addition_deltas_stay_near_importance_sampling_at_little_noise(attack: Attack) -> None:
    """A small δ of a unit that is added asks for ratios far below 1, where a grid of sums may be too coarse."""
    found = list(attack.compared(20_000, FINE))[1:4:2]  # the chains' bounds, the first group
    assert [gain for gain, *_ in found] == ["removed", "added"]
    for gain, bound, epsilons, means, errors in found:
        seen = (means > 1e-7) & (errors < 0.1 * means)
        assert np.count_nonzero(seen) >= 4
        assert np.all(bound(epsilons[seen]) <= 1.6 * means[seen]), gain
        assert np.all(bound(epsilons) >= means - 4.5 * errors), gain


BUFFERS = BufferedToeplitz(1.0, (0.999, 0.8, 0.3), (0.95, 0.5, 0.05))
ONE_BUFFER = BufferedToeplitz(1.0, (0.95,), (0.4,))
TWO_BUFFERS = BufferedToeplitz(1.0, (0.97, 0.5), (0.6, 0.1))
QUICK = [
    Attack(cgd(1e-3), 4, 1, 1, 1.0, "first small", "zero-out"),
    Attack(cgd(1e-3), 4, 1, 1, 1.0, "first small", "replace-one"),
    Attack(cgd(0.9999), 5, 1, 1, 0.8, "equal", "zero-out"),
    Attack(cgd(0.3), 4, 3, 1, 0.05, "any", "zero-out"),
    Attack(BUFFERS, 6, 2, 1, 50.0, "falling", "zero-out"),
    Attack(TWO_BUFFERS, 4, 4, 2, 1.0, "few large", "zero-out"),
    Attack(TWO_BUFFERS, 6, 4, 1, 1.0, "equal", "replace-one"),
    Attack(ONE_BUFFER, 5, 2, 1, 1.0, "few large", "zero-out"),
    Attack(cgd(0.7), 3, 2, 2, 1.5, "falling", "replace-one"),
]
SLOW = [
    Attack(cgd(0.97), 10, 10, 2, 1.5, "equal", "zero-out"),
    Attack(BUFFERS, 6, 2, 1, 50.0, "rising", "replace-one"),
    Attack(cgd(0.5), 8, 2, 2, 1.2, "rising", "zero-out"),
    Attack(cgd(0.05), 6, 2, 3, 2.0, "any", "replace-one"),
    Attack(BUFFERS, 5, 2, 3, 2.0, "equal", "zero-out"),
    Attack(BUFFERS, 5, 2, 2, 1.5, "any", "zero-out"),
    Attack(TWO_BUFFERS, 6, 3, 2, 1.2, "equal", "zero-out"),
    Attack(cgd(0.6), 4, 2, 4, 2.5, "equal", "replace-one"),
    Attack(cgd(0.999), 5, 1, 2, 40.0, "rising", "replace-one"),
    Attack(cgd(0.7), 6, 3, 3, 2.5, "few large", "zero-out"),
    Attack(cgd(0.999), 4, 2, 4, 3.0, "equal", "zero-out"),
    Attack(BUFFERS, 30, 3, 1, 0.8, "falling", "zero-out"),
    Attack(ONE_BUFFER, 100, 2, 1, 0.6, "any", "zero-out"),
    Attack(ONE_BUFFER, 6, 3, 3, 2.0, "falling", "zero-out"),
    Attack(ONE_BUFFER, 12, 1, 1, 5.0, "falling", "replace-one"),
]
LONG = [
    Attack(cgd(0.9), 100, 2, 1, 0.7, "equal", "zero-out"),
    Attack(cgd(0.9), 66, 3, 1, 0.7, "equal", "replace-one"),
    Attack(cgd(0.99), 200, 1, 1, 0.6, "equal", "zero-out"),
    Attack(cgd(0.97), 8, 2, 2, 1.4, "equal", "replace-one"),
    Attack(TWO_BUFFERS, 5, 4, 2, 1.3, "rising", "replace-one"),
    Attack(cgd(0.9), 8, 6, 2, 1.2, "few large", "replace-one"),
    Attack(BUFFERS, 9, 3, 2, 1.5, "equal", "replace-one"),
    Attack(BUFFERS, 40, 2, 1, 0.8, "equal", "replace-one"),
]


@pytest.mark.parametrize("attack", QUICK, ids=str)
def test_delta_bounds_of_hostile_runs_are_never_below_importance_sampling(attack: Attack) -> None:
    """The guarantees of `fading` and `AllocatedGaussian`: unequal clips, extreme noise, decays near 0 and 1."""
    never_below(attack, 3_000, COARSE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("attack", in_parts(QUICK + SLOW + LONG, long=LONG), ids=str)
def test_delta_bounds_of_hostile_and_long_runs_are_never_below_importance_sampling(attack: Attack) -> None:
    patterns = attack.bins**attack.epochs
    never_below(attack, max(2_000, min(60_000, 4_000_000 // patterns)), FINE)


@pytest.mark.parametrize("gain", GAINS)
def test_importance_sampling_reproduces_the_exact_gaussian_delta(gain: Gain) -> None:
    """One round is a Gaussian release: δ down to 1e-13, within errors that are small."""
    move = np.array([[0.6, 0.5, 0.3]])
    mu = float(np.linalg.norm(move)) * (2.0 if gain == "replaced" else 1.0)
    epsilons = np.array([0.0, 1.0, 4.0, 0.5 * mu**2 + 6.5 * mu])
    means, errors = sticks(move, epsilons, gain, 20_000, seed=1)
    exact = gaussian_curve(mu)(epsilons)
    assert exact[-1] < 1e-10
    assert np.all(np.abs(means - exact) <= 4.0 * errors)
    assert np.all(errors <= 0.1 * exact)


def test_importance_sampling_is_accurate_enough_to_reveal_a_ten_percent_too_small_delta() -> None:
    """At a δ of 1e-10 of a run, as at one of 0.1."""
    attack = Attack(cgd(0.5), 4, 2, 1, 1.0, "equal", "zero-out")
    run, sigma = attack.run()
    moves = moves_of(matrix_of(attack.mechanism, 8), np.ones(8), attack.order, 0, sigma)
    for gain in GAINS[:2]:
        means, errors = sticks(moves, np.array([0.1, 1.0, 2.0]), gain, 40_000, seed=2)
        assert np.all(errors < 0.025 * means), (gain, means, errors)
    means, errors = sticks(moves, np.array([5.2]), "removed", 40_000, seed=2)
    assert 1e-12 < means[0] < 1e-9
    assert errors[0] < 0.05 * means[0]
    assert run.curve(np.array([5.2]))[0] >= means[0] - 4.5 * errors[0]


@pytest.mark.parametrize("grain", [FINE, COARSE])
def test_first_exponent_narrower_than_the_grid_step_keeps_its_probability_mass(grain: ChainResolution) -> None:
    """It had 2e-8 of it: a unit's removal cost nothing."""
    lattice = ExponentGrid(CovarianceChain((1e-6, 1.0, 1.0), (1e-6, 1e-3)), grain.spacing, grain.max_points)
    assert lattice.step > 1e-3
    assert lattice.variances[0] == lattice.step**2
    assert abs(float(np.sum(lattice.prior)) - 1.0) <= LOST_MEAN
    tilted = float(lattice.prior @ np.exp(lattice.points - 0.5 * lattice.variances[0]))
    tilted /= 1.0 + lattice.step**2 / 8.0
    assert tilted == pytest.approx(1.0, abs=lattice.relative_error + LOST_MEAN)


def test_oversized_exponent_grid_is_skipped_and_the_run_still_has_an_epsilon() -> None:
    """Clips that rise by thousands a round: a walk over millions of places, or an error that is no number."""
    for first, share in itertools.product((1e-12, 1e-8, 1e-6), (1e-4, 1.0, 25.0)):
        steep = CovarianceChain((share * first, share), (0.9 * share * math.sqrt(first),))
        assert ChainEpoch(steep, FINE).exponent_grid is None
    run, _ = Attack(cgd(0.9), 6, 1, 1, 1.0, "rising", "zero-out").run()
    assert run.epsilon_of(1e-5) > 0.0


def test_dominating_covariances_stay_finite_where_a_candidate_decay_is_far_too_fast() -> None:
    """Overlaps over powers of it are infinite: of several decays one with numbers is chosen."""
    lag = lags(400)
    products = np.where(lag == 0, 1.0, np.where(lag == 1, 1e-3, 0.01 * 0.99**lag))
    found = dominating_chain(products, np.ones(400)).covariances
    assert np.all(np.isfinite(found))
    assert np.all(found >= products)
