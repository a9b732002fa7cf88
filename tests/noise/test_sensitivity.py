"""Sensitivities against brute force over neighbours and participation patterns."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedpriv.noise import sensitivity
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian
from fedpriv.noise.mechanism import Mechanism, Sensitivity, toeplitz_inner
from fedpriv.noise.sensitivity import (
    farthest_pattern,
    heaviest_pattern,
    heaviest_patterns,
    sensitivity_from_rows,
    tighten_sensitivity,
)
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import MinSeparation
from tests.noise.matrices import Matrix, clip_norms, farthest, patterns, separated, workload_of

decays = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.01, 0.99))
PERIODS = st.one_of(st.none(), st.integers(1, 14))


def factor(mechanism: Mechanism, workload: Workload) -> Matrix:
    """C by its definition; see test_algebra for the proof that it belongs to the streamed B."""
    rounds, decay = workload.rounds, workload.decay
    if isinstance(mechanism, LeafGaussian):
        first = np.arange(rounds) % workload.rounds_per_period == 0
        return np.diag(np.where(first, 1.0 / mechanism.first, 1.0))
    c = np.zeros((rounds, rounds))
    for t in range(rounds):
        place = t % workload.rounds_per_period + 1
        reach = {"IndependentGaussian": place, "BinaryTree": place & -place}.get(type(mechanism).__name__)
        for age in range(t + 1 if reach is None else reach):
            if isinstance(mechanism, BandedSquareRoot):
                c[t, t - age] = math.comb(2 * age, age) / 4**age * decay**age * (age < mechanism.bands)
            else:
                c[t, t - age] = decay**age
    return c


def opposite(mechanism: Mechanism, workload: Workload) -> float:
    """The farthest that C s moves if a record's increments are replaced by their opposites."""
    c, clips = factor(mechanism, workload), workload.clips
    return max(float(np.linalg.norm(2 * c[:, chosen] @ clips[list(chosen)])) for chosen in patterns(workload))


@st.composite
def mechanisms(draw: st.DrawFn, decay: float, period: int | None) -> Mechanism:
    leaf = LeafGaussian(decay, period, draw(st.floats(0.1, 10.0)))
    members: list[Mechanism] = [IndependentGaussian(), BinaryTree(decay, period), leaf]
    if period is None:
        members.append(BandedSquareRoot(decay, draw(st.integers(1, 14))))
    return draw(st.sampled_from(members))


@given(data=st.data(), rounds=st.integers(1, 24), decay=decays)
@settings(max_examples=100)
def test_fixed_order_sensitivity_is_exact_for_every_mechanism(
    data: st.DataObject, rounds: int, decay: float
) -> None:
    rounds_per_epoch = data.draw(st.integers(max(1, rounds // 8), 30))
    period = data.draw(st.one_of(st.none(), st.integers(1, 30)))
    mechanism = data.draw(mechanisms(decay, period))
    workload = workload_of(rounds, decay, rounds_per_epoch, period, data.draw(clip_norms(rounds)))
    found = mechanism.certified(workload)
    assert found.exact
    assert found.value == pytest.approx(farthest(factor(mechanism, workload), workload), rel=1e-10)


@given(data=st.data(), rounds=st.integers(1, 12), decay=decays)
@settings(max_examples=100)
def test_sensitivity_of_separated_rounds_is_exact_or_marked_as_a_bound(
    data: st.DataObject, rounds: int, decay: float
) -> None:
    most, gap, period = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 14)), data.draw(PERIODS)
    mechanism = data.draw(mechanisms(decay, period))
    workload = separated(rounds, most, gap, decay, period, data.draw(clip_norms(rounds)))
    found = mechanism.certified(workload)
    worst = farthest(factor(mechanism, workload), workload)
    if found.exact:
        assert found.value == pytest.approx(worst, rel=1e-10)
    else:
        assert found.value >= worst * (1.0 - 1e-12)


@pytest.mark.parametrize(("bands", "reason"), [(1, "squares add up"), (3, "squares add up"), (4, "by search")])
def test_banded_sensitivity_of_separated_rounds_is_exact_for_unequal_clips(bands: int, reason: str) -> None:
    clips = np.array([1.0, 5.0, 2.0, 4.0, 4.0, 0.5, 3.0, 2.0])
    mechanism, workload = BandedSquareRoot(1.0, bands), separated(8, 2, 3, clips=clips)
    found, worst = mechanism.certified(workload), farthest(factor(mechanism, workload), workload)
    assert found.exact
    assert reason in found.reason
    assert found.value == pytest.approx(worst)


def test_sensitivity_counts_the_maximum_participations_where_columns_do_not_overlap() -> None:
    mechanism, workload = BandedSquareRoot(1.0, 2), separated(12, 2, 3)
    worst = farthest(factor(mechanism, workload), workload)
    assert mechanism.sensitivity(workload) == pytest.approx(worst)


def test_the_bound_of_a_periodic_tree_counts_its_last_short_tree() -> None:
    mechanism, workload = BinaryTree(1.0, 2), separated(3, 3, 1, period=2)
    worst = farthest(factor(mechanism, workload), workload)
    assert worst == pytest.approx(math.sqrt(6))
    assert mechanism.sensitivity(workload) >= worst


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), decays, st.sampled_from([None, 3, 4]))
@settings(max_examples=60)
def test_tree_sensitivity_with_equal_clips_and_separated_rounds_is_the_worst_pattern(
    rounds: int, most: int, gap: int, decay: float, period: int | None
) -> None:
    mechanism, workload = BinaryTree(decay, period), separated(rounds, most, gap, decay, period, 2.0)
    worst = farthest(factor(mechanism, workload), workload)
    assert worst * (1 - 1e-12) <= mechanism.sensitivity(workload) <= worst * (1 + 1e-12)


@pytest.mark.slow
def test_tree_sensitivity_with_separated_rounds_matches_golden_values() -> None:
    """Counted level by level it is 6.000, 14.25 and 11.747, by rows alone 5.4772, 13.27 and 10.583."""
    for numbers, expected in {(60, 5, 12): 5.4772, (600, 10, 60): 12.8841, (1000, 10, 100): 10.4881}.items():
        assert BinaryTree().sensitivity(separated(*numbers)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("mechanism", [IndependentGaussian(), BandedSquareRoot(0.8, 5)], ids=str)
def test_sensitivity_with_equal_clips_and_separated_rounds_is_exact(mechanism: Mechanism) -> None:
    assert mechanism.certified(separated(10, 3, 2, 0.8, clips=2.0)).exact


@given(data=st.data(), rounds=st.integers(1, 10), decay=decays, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_no_neighbours_with_vector_increments_are_farther_apart_than_the_sensitivity(
    data: st.DataObject, rounds: int, decay: float, seed: int
) -> None:
    """Two data sets whose running sums differ in one record, increments in R^3 of every clip norm."""
    mechanism = data.draw(mechanisms(decay, None))
    rounds_per_epoch = data.draw(st.integers(1, rounds))
    clips = data.draw(clip_norms(rounds))
    workload = workload_of(rounds, decay, rounds_per_epoch, clips=clips)
    generator = np.random.default_rng(seed)
    record = int(generator.integers(rounds_per_epoch))
    directions = generator.standard_normal((2, rounds, 3))
    directions /= np.linalg.norm(directions, axis=2, keepdims=True)
    takes_part = (np.arange(rounds) % rounds_per_epoch == record)[:, None]
    mine, yours = directions * clips[:, None] * takes_part
    c = factor(mechanism, workload)
    sensitivity = mechanism.sensitivity(workload)
    assert np.linalg.norm(c @ mine) <= sensitivity * (1 + 1e-12)  # zero-out
    assert np.linalg.norm(c @ (mine - yours)) <= 2 * sensitivity * (1 + 1e-12)  # replace-one


@pytest.mark.parametrize("mechanism", [IndependentGaussian(), BinaryTree(0.6), BandedSquareRoot(0.6, 4)], ids=str)
def test_opposite_records_attain_the_replace_one_distance(mechanism: Mechanism) -> None:
    workload = workload_of(7, 0.6, 3, clips=[0.5, 2.0, 1.0, 3.0, 1.0, 1.0, 0.2])
    assert 2 * mechanism.sensitivity(workload) == pytest.approx(opposite(mechanism, workload), rel=1e-12)


def test_single_pass_sensitivity_matches_the_papers_noise_formula() -> None:
    """Reshef & Levy: σ² = 4S²T/ρ², so the sensitivity is S√T."""
    workload = workload_of(600, clips=118.1)
    assert IndependentGaussian().sensitivity(workload) == pytest.approx(118.1 * math.sqrt(600), rel=1e-14)


def test_clips_that_grow_towards_their_limit_are_charged_round_by_round() -> None:
    """Clip S_t = G + 2LD(t-1)/(t+1): exact μ/ρ of the paper's plain S is .67, .81, .94, .993."""
    g, ld = 39.6, 39.25
    for rounds, ratio in ((16, 0.67), (60, 0.81), (600, 0.94), (60_000, 0.993)):
        t = np.arange(1.0, rounds + 1)
        clips = g + 2 * ld * (t - 1) / (t + 1)
        sensitivity = IndependentGaussian().sensitivity(workload_of(rounds, clips=clips))
        assert sensitivity / ((g + 2 * ld) * math.sqrt(rounds)) == pytest.approx(ratio, abs=0.006)


@pytest.mark.parametrize(("rounds", "gain"), [(16, 0.11), (60, 0.09), (240, 0.07)])
def test_tighter_clipping_of_the_first_tree_leaf_lowers_the_sensitivity(rounds: int, gain: float) -> None:
    levels = rounds.bit_length()
    clips = np.ones(rounds)
    plain = BinaryTree().sensitivity(workload_of(rounds, clips=clips))
    clips[0] = math.sqrt((levels - 1) / levels)
    tighter = BinaryTree().sensitivity(workload_of(rounds, clips=clips))
    assert 1 - tighter / plain == pytest.approx(gain, abs=0.006)


def pattern_of(workload: Workload) -> MinSeparation:
    assert isinstance(workload.schedule, MinSeparation)
    return workload.schedule


@given(data=st.data(), rounds=st.integers(1, 14))
def test_heaviest_pattern_has_the_largest_weight_of_all_allowed_patterns(data: st.DataObject, rounds: int) -> None:
    weights = np.array(data.draw(st.lists(st.floats(0.0, 9.0), min_size=rounds, max_size=rounds)))
    workload = separated(rounds, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 16)))
    best = max(sum(weights[list(chosen)]) for chosen in patterns(workload))
    assert heaviest_pattern(weights, pattern_of(workload)) == pytest.approx(best)


@pytest.mark.parametrize("most", [100_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
@given(data=st.data(), decay=decays)
@settings(max_examples=5)
def test_single_pass_formulas_hold_up_to_ten_million_rounds(most: int, data: st.DataObject, decay: float) -> None:
    rounds = data.draw(st.integers(most // 10, most))
    workload = workload_of(rounds, decay)
    first = (
        rounds if decay == 1.0 else -math.expm1(2 * rounds * math.log(decay)) / (1 - decay**2) if decay else 1.0
    )
    assert IndependentGaussian().sensitivity(workload) ** 2 == pytest.approx(first, rel=1e-9)
    nodes = sum(decay ** (2 * (2**level - 1)) for level in range(rounds.bit_length()))
    assert BinaryTree(decay).sensitivity(workload) ** 2 == pytest.approx(nodes, rel=1e-9)


def test_sensitivity_over_many_epochs_of_unequal_clips_matches_the_dense_matrix() -> None:
    workload = workload_of(96, 0.97, 7, clips=np.random.default_rng(3).uniform(0.5, 2.0, 96))
    for mechanism in (IndependentGaussian(), BinaryTree(0.97), BandedSquareRoot(0.97, 20)):
        assert 2 * mechanism.sensitivity(workload) == pytest.approx(opposite(mechanism, workload), rel=1e-11)


@given(rounds=st.integers(1, 50), most=st.integers(1, 50), gap=st.integers(1, 60))
def test_a_record_takes_part_no_more_often_than_the_rounds_allow(rounds: int, most: int, gap: int) -> None:
    pattern = MinSeparation(rounds, most, gap)
    assert pattern.max_rounds_per_record == min(most, len(range(0, rounds, gap)))
    assume(pattern.max_rounds_per_record == 1)
    assert pattern.single_pass


@given(data=st.data(), rounds=st.integers(1, 14), rows=st.integers(1, 5))
def test_heaviest_patterns_of_all_rows_match_each_row_alone(data: st.DataObject, rounds: int, rows: int) -> None:
    line = st.lists(st.floats(0.0, 9.0), min_size=rounds, max_size=rounds)
    weights = np.array(data.draw(st.lists(line, min_size=rows, max_size=rows)))
    pattern = MinSeparation(rounds, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 16)))
    expected = [heaviest_pattern(row, pattern) for row in weights]
    np.testing.assert_allclose(heaviest_patterns(weights, pattern), expected, rtol=1e-13)


@given(data=st.data(), rounds=st.integers(1, 11), period=st.one_of(st.none(), st.integers(1, 12)))
@settings(max_examples=60)
def test_the_search_finds_the_worst_pattern(data: st.DataObject, rounds: int, period: int | None) -> None:
    """For any C ≥ 0, its coefficients falling or not."""
    series = np.array(data.draw(st.lists(st.floats(0.0, 1.0), min_size=rounds, max_size=rounds)))
    clips = np.array(data.draw(st.lists(st.floats(0.1, 5.0), min_size=rounds, max_size=rounds)))
    workload = separated(
        rounds, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)), period=period, clips=clips
    )
    block = np.arange(rounds) // workload.rounds_per_period
    c = sum(value * np.eye(rounds, k=-lag) for lag, value in enumerate(series))
    c = np.where(np.equal.outer(block, block), c, 0.0)
    moved = max(float(np.linalg.norm(c[:, chosen] @ clips[list(chosen)])) for chosen in patterns(workload))
    found = sensitivity_from_rows(toeplitz_inner(series, rounds, period), workload, pattern_of(workload))
    assert found.exact
    assert found.value == pytest.approx(moved, rel=1e-12)


def test_sensitivity_from_rows_is_exact_where_columns_do_not_overlap() -> None:
    workload = separated(7, 3, 2, clips=[1.0, 3.0, 1.0, 2.0, 0.5, 4.0, 1.0])
    found = sensitivity_from_rows(toeplitz_inner(np.array([1.0]), 7), workload, pattern_of(workload))
    assert found.value == pytest.approx(np.sqrt(9 + 4 + 16))


@pytest.mark.parametrize(("rounds", "searched"), [(2000, True), (2001, False)])
def test_participations_are_searched_for_up_to_2000_rounds(rounds: int, searched: bool) -> None:
    clips = np.full(rounds, 0.1)
    clips[[0, -1]] = 1.0
    workload, bound = separated(rounds, 2, 1000, clips=clips), Sensitivity(1.5, False, "a bound")
    found = tighten_sensitivity(bound, lambda held: np.eye(len(held)), workload)
    assert (found.exact, found.value) == ((True, pytest.approx(math.sqrt(2))) if searched else (False, 1.5))


def test_pattern_search_that_stops_early_still_gives_an_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee of `farthest_pattern`: whatever is left to be tried promises at least its worst pattern."""
    draw = np.random.default_rng(3)
    for _ in range(60):
        rounds, most, gap = (int(draw.integers(low, high)) for low, high in ((3, 12), (1, 5), (1, 5)))
        clips = np.exp(draw.uniform(-1.0, 1.0, rounds))
        workload = separated(rounds, most, gap, clips=clips)
        weights = BinaryTree().columns(workload).inner(np.arange(rounds)) * np.outer(clips, clips)
        worst = max(float(weights[np.ix_(chosen, chosen)].sum()) for chosen in patterns(workload))
        for steps in (1, 2, 4, 400):
            monkeypatch.setattr(sensitivity, "_MAX_STEPS", steps)
            found, attained = farthest_pattern(weights, workload.public_order)
            assert found >= worst * (1 - 1e-12)
            if attained:
                assert found == pytest.approx(worst, rel=1e-12)
    assert attained
