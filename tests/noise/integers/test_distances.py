"""No pair of neighbours is farther than Δ: by search over small integers, in rationals, and over long runs."""

import math
from fractions import Fraction

import numpy as np
import pytest

from fedpriv.noise.buffered import IntegerBuffered
from fedpriv.noise.diagonal import IndependentGaussian, IntegerPrefix
from fedpriv.noise.integers.fixed_point import COEFFICIENT_ONE, Ints, repeated_squares, to_coefficient
from fedpriv.noise.integers.strategies import NoiseGroup, integer_distance
from fedpriv.noise.mechanism import Factorization
from fedpriv.noise.series import Workload
from fedpriv.participation.orders import MinSeparation
from tests.noise.integers import members

DECAYS = [1.0, 0.9, 0.3, 0.0]


def distances(form: Factorization, moved: list[Ints], base: list[Ints]) -> np.ndarray:
    """Σ_t ‖v_t / scale_t‖² for every trial; sums have shape (..., trials, d)."""
    strategy = form.strategy
    ours = members.streamed(strategy, base)
    theirs = members.streamed(strategy, [s + m for s, m in zip(base, moved, strict=True)])
    total = np.zeros(base[0].shape[-2])
    for t, (first, second) in enumerate(zip(ours, theirs, strict=True), start=1):
        v = (second - first) / np.array(strategy.noise_scales(t)).reshape(-1, 1, 1)
        total += np.sum(v**2, axis=(0, 2))
    return total


RADIUS, ROUNDS, TRIALS = 3, 9, 1000
CLIPS = np.full(ROUNDS, float(RADIUS))


def worst_found(form: Factorization, seed: int) -> float:
    """The largest distance that neighbours under replace-one were found at, over records, streams and directions.

    Half of the trials move as far as they can in one direction; all start from random sums of others.
    """
    generator, ball, worst = np.random.default_rng(seed), members.disc(RADIUS), 0.0
    rounds_per_epoch = form.workload.schedule.rounds_per_epoch
    for place in range(rounds_per_epoch):
        base, moved = [], []
        for t in range(1, ROUNDS + 1):
            count = len(form.strategy.noise_scales(t))
            base.append(generator.integers(-500, 500, (count, TRIALS, 2)))
            change = np.zeros((count, TRIALS, 2), np.int64)
            if (t - 1) % rounds_per_epoch == place:
                for k, clip in enumerate(form.part_clips(t)):
                    near = ball[np.sum(ball**2, axis=1) <= clip**2]
                    first, second = near[generator.integers(0, len(near), (2, TRIALS))]
                    far = TRIALS // 2
                    first[:far], second[:far] = (math.floor(clip), 0), (-math.floor(clip), 0)
                    change[k] = first - second
            moved.append(change)
        if form.strategy.draws(1) is None:
            base, moved = [b[0] for b in base], [m[0] for m in moved]
        worst = max(worst, float(np.max(distances(form, moved, base))))
    return math.sqrt(worst)


def allowed(form: Factorization, certified: float) -> tuple[float, float]:
    """Δ, and what it would be if nothing were rounded."""
    groups = form.strategy.noise_groups(ROUNDS, form.max_participations)
    linear = [NoiseGroup(vectors, scale, Fraction(0)) for vectors, scale, _ in groups]
    return (
        integer_distance(certified, "replace-one", groups, 2, form.sensitivity_factor),
        integer_distance(certified, "replace-one", linear, 2),
    )


def check_neighbours(form: Factorization, seed: int) -> None:
    """None are farther than the distance charged, and some are as far where nothing is rounded."""
    found, (most, linear) = worst_found(form, seed), allowed(form, form.sensitivity_in_units(members.UNITS))
    assert found <= most
    if most == linear:
        assert found >= linear * (1 - 1e-9)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("name", members.SIMPLE)
def test_no_neighbours_are_farther_than_the_distance_charged(name: str, decay: float, passes: int) -> None:
    """What the attacker would gain: a μ that is larger than the one on record."""
    check_neighbours(members.exact_form(name, decay, members.workload_of(ROUNDS, decay, passes, CLIPS)), seed=3)


@pytest.mark.parametrize("period", [3, 4])
@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("name", members.PERIODIC)
def test_no_neighbours_of_restarting_sums_are_farther_apart_than_the_charged_distance(
    name: str, decay: float, period: int
) -> None:
    form = members.exact_form(name, decay, members.workload_of(ROUNDS, decay, 3, CLIPS, period))
    check_neighbours(form, seed=4)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("digits", [0, 10])
@pytest.mark.parametrize("name", members.BUFFERED)
def test_no_neighbours_of_buffered_noise_are_farther_apart_than_the_charged_distance(
    name: str, digits: int, passes: int
) -> None:
    workload = members.workload_of(ROUNDS, 1.0, passes, CLIPS)
    strategy = members.strategy_buffered(name, digits)
    form = Factorization(strategy, IndependentGaussian(), workload)
    most, linear = allowed(form, members.buffered_certified(strategy, workload))
    found = worst_found(form, seed=5)
    assert found <= most
    assert found >= linear * (1 - 1e-9)


SCALED = {"λ-CGD": ((0.96,), (0.0,)), "two": ((0.98, 0.7), (0.9, 0.3))}


@pytest.mark.parametrize("name", SCALED)
def test_no_neighbours_of_scaled_buffers_are_farther_apart_than_the_charged_distance(name: str) -> None:
    """Increments of a late round are longer, D_t times the clip, and charged as such."""
    form = members.scaled_form(ROUNDS, *SCALED[name], float(RADIUS))
    assert form.increment_scale(ROUNDS) > form.increment_scale(1) * 1.05
    most, linear = allowed(form, form.sensitivity_in_units(members.UNITS))
    found = worst_found(form, seed=12)
    assert linear * 0.99 < found <= most


@pytest.mark.parametrize("name", SCALED)
def test_sensitivity_of_scaled_buffers_matches_rational_arithmetic_within_2_to_the_minus_40(name: str) -> None:
    for rounds in (7, 33, 64):
        form = members.scaled_form(rounds, *SCALED[name], 2.0**36 + 5)
        assert isinstance(form.strategy, IntegerBuffered)
        norms = np.array([members.UNITS.norm(clip) for t in range(1, rounds + 1) for clip in form.part_clips(t)])
        of_integers = members.workload_of(rounds, 1.0, clips=norms.astype(float))
        exact = members.largest_squared_norm(members.buffered_rows(form.strategy, rounds), of_integers)
        assert abs(Fraction(form.sensitivity_in_units(members.UNITS)) ** 2 / exact - 1) < Fraction(2, 2**40)


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("rounds_per_epoch", [1, 2, 3, 4])
def test_no_neighbours_of_clipped_parts_are_farther_apart_than_the_charged_distance(
    rounds_per_epoch: int, decay: float
) -> None:
    form = members.aligned_form(ROUNDS, decay, rounds_per_epoch, float(RADIUS))
    most, _ = allowed(form, form.sensitivity_in_units(members.UNITS))
    assert worst_found(form, seed=6) <= most


def test_integer_rounding_moves_banded_neighbours_beyond_the_unrounded_distance() -> None:
    """Control: neighbours do get farther apart than C alone says."""
    form = members.exact_form("banded 4", 0.9, members.workload_of(ROUNDS, 0.9, 1, CLIPS))
    _, linear = allowed(form, form.sensitivity_in_units(members.UNITS))
    assert worst_found(form, seed=3) > linear * 1.01


@pytest.mark.every(5)
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("decay", [*DECAYS, 1 - 1 / 60])
@pytest.mark.parametrize("name", members.SIMPLE)
def test_sensitivity_matches_rational_arithmetic_within_2_to_the_minus_40(
    name: str, decay: float, passes: int
) -> None:
    """What Δ is multiplied by for it, 1 + 2^-40, therefore covers it."""
    generator = np.random.default_rng(7)
    for rounds in (1, 7, 33):
        for clips in (np.full(rounds, 2.0**36 + 5), np.floor(generator.uniform(2.0**24, 2.0**37, rounds))):
            form = members.exact_form(name, decay, members.workload_of(rounds, decay, passes, clips))
            exact = members.largest_squared_norm(members.rows_of_c(name, decay, rounds), form.workload)
            found = Fraction(form.sensitivity_in_units(members.UNITS)) ** 2
            assert abs(found / exact - 1) < Fraction(2, 2**40)


@pytest.mark.parametrize("name", ["tree", "lambda-cgd", "blt"])
def test_rounding_is_charged_once_for_every_participation(name: str) -> None:
    """Nodes that a tree rounds, and poles that are rounded, move with every round that holds the record."""
    rounds, decay = 64, 0.9
    once = members.exact_form(name, decay, members.workload_of(rounds, decay))
    often = members.exact_form(name, decay, members.workload_of(rounds, decay, 4))
    apart = members.exact_form(name, decay, Workload(MinSeparation(rounds, 4, 16), decay, np.ones(rounds)))
    assert (once.max_participations, often.max_participations, apart.max_participations) == (1, 4, 4)
    for several in (often, apart):
        assert several.sensitivity_factor - 1 == pytest.approx(4 * (once.sensitivity_factor - 1), rel=1e-9)
        assert several.sensitivity_factor > 1
    if name == "tree":
        ((_, _, single),) = once.strategy.noise_groups(rounds, once.max_participations)
        ((_, _, all_of_them),) = often.strategy.noise_groups(rounds, often.max_participations)
        assert all_of_them == 4 * single == 4 * 6


@pytest.mark.parametrize("passes", [1, 4])
def test_sensitivity_factor_covers_decays_that_the_tree_rounds_level_by_level(passes: int) -> None:
    """In rationals, with the coefficients that the tree really has; and it is needed for some of the decays."""
    rounds, needed = 64, 0
    for decay in (0.9, 0.99, 0.995, 0.97, 1 - 1 / 60, 0.8, 0.3):
        form = members.exact_form("tree", decay, members.workload_of(rounds, decay, passes))
        levels = repeated_squares(to_coefficient(decay), 7)
        rows = [[Fraction(0)] * rounds for _ in range(rounds)]
        for t in range(1, rounds + 1):
            for age in range(t & -t):
                powers = [Fraction(levels[k], COEFFICIENT_ONE) for k in range(7) if age >> k & 1]
                rows[t - 1][t - 1 - age] = math.prod(powers, start=Fraction(1))
        exact, found = (
            members.largest_squared_norm(rows, form.workload),
            Fraction(form.sensitivity_in_units(members.UNITS)),
        )
        assert exact <= (found * form.sensitivity_factor) ** 2
        needed += exact > (found * (1 + Fraction(1, 2**40))) ** 2
    assert needed >= 1


@pytest.mark.parametrize("name", members.BUFFERED)
def test_sensitivity_of_buffers_matches_rational_arithmetic_within_2_to_the_minus_40(name: str) -> None:
    for rounds, passes in ((1, 1), (33, 1), (64, 4)):
        workload = members.workload_of(rounds, 1.0, passes, np.full(rounds, 2.0**36 + 5))
        strategy = members.strategy_buffered(name, 0)
        exact = members.largest_squared_norm(members.buffered_rows(strategy, rounds), workload)
        assert abs(Fraction(members.buffered_certified(strategy, workload)) ** 2 / exact - 1) < Fraction(2, 2**40)


@pytest.mark.parametrize("name", ["independent", "tree"])
def test_distance_of_neighbours_does_not_drift_over_thousands_of_rounds(name: str) -> None:
    """Without a decay two neighbours stay exactly one record apart in every node that holds it, up to 2^56."""
    rounds = 6000
    form = members.exact_form(name, 1.0, members.workload_of(rounds, 1.0))
    generator = np.random.default_rng(8)
    states = [form.strategy.initial_state(), form.strategy.initial_state()]
    moved = np.array([2**37, -5, 0])
    for t in range(1, rounds + 1):
        sums = generator.integers(-(2**43), 2**43, 3)
        first, states[0] = form.strategy.step(states[0], t, sums)
        second, states[1] = form.strategy.step(states[1], t, sums + moved if t == 7 else sums)
        holds = t >= 7 if name == "independent" else t - (t & -t) < 7 <= t
        assert (second - first).tolist() == (moved if holds else 0 * moved).tolist()


@pytest.mark.parametrize("decay", [0.9, 1 - 1 / 600])
def test_distances_under_a_decay_stay_within_the_bound(decay: float) -> None:
    rounds = 3000
    strategy = members.exact_form("independent", decay, members.workload_of(rounds, decay)).strategy
    assert isinstance(strategy, IntegerPrefix)
    ((_, _, difference),) = strategy.noise_groups(rounds, 1)
    decay, linear = strategy.decay / COEFFICIENT_ONE, 0.0
    generator = np.random.default_rng(9)
    states = [strategy.initial_state(), strategy.initial_state()]
    for t in range(1, rounds + 1):
        sums = generator.integers(-(2**40), 2**40, 50)
        linear = decay * linear + (2.0**37 if t == 7 else 0.0)
        first, states[0] = strategy.step(states[0], t, sums)
        second, states[1] = strategy.step(states[1], t, sums + 2**37 if t == 7 else sums)
        assert np.max(np.abs((second - first) - linear)) <= float(difference) + 1e-3
