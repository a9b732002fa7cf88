"""Strategies on integers: C up to the rounding they admit, B after C, state, missed rounds and reach."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from fedpriv.noise.buffered import BufferedToeplitz, make_integer_buffered, rounded_zeros
from fedpriv.noise.diagonal import IntegerLeaf, LeafGaussian
from fedpriv.noise.integers.fixed_point import COEFFICIENT_ONE, Ints
from fedpriv.noise.integers.gaussian import KeyedDiscreteGaussian
from fedpriv.noise.integers.strategies import IntegerStrategy, pack_state, unpack_state
from fedpriv.noise.mechanism import Factorization, Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import FixedOrder, MinSeparation, Phases
from fedpriv.rounds.integers import release_running_sum
from tests.noise.integers import members
from tests.noise.matrices import workload_matrix

DECAYS = [1.0, 0.9, 0.3, 0.0]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("name", members.SIMPLE)
def test_integer_strategy_equals_the_strategy_matrix_up_to_its_rounding(name: str, decay: float) -> None:
    """On random streams, against rationals: half of e, since that is about the difference of two streams."""
    rounds = 23
    form = members.exact_form(name, decay, members.workload_of(rounds, decay))
    generator = np.random.default_rng(1)
    sums = [generator.integers(-(10**9), 10**9, 40) for _ in range(rounds)]
    rows = members.rows_of_c(name, decay, rounds)
    for t, output in enumerate(members.streamed(form.strategy, sums)):
        (scale,) = form.strategy.noise_scales(t + 1)
        for c in range(3):
            exact = sum(rows[t][i] * int(sums[i][c]) for i in range(rounds)) * Fraction(scale)
            difference = max(group.rounding_difference for group in form.strategy.noise_groups(rounds, rounds))
            level_rounding = Fraction(2 * rounds * 10**9, 2**31) if name == "tree" else 0
            assert abs(int(output[c]) - exact) <= difference / 2 + level_rounding


@pytest.mark.parametrize(("period", "restarts"), [(None, 1), (3, 3), (4, 2), (8, 1), (9, 1), (1, 8)])
def test_noise_on_increments_has_a_size_for_restarts_and_is_charged_for_no_rounding(
    period: int | None, restarts: int
) -> None:
    groups = tuple(map(tuple, IntegerLeaf(0.5, period).noise_groups(8, 1)))
    assert groups == ((restarts, 0.5, 0), (8 - restarts, 1.0, 0))[: 1 if restarts == 8 else 2]


@pytest.mark.parametrize(
    ("decay", "rounds", "rounds_per_epoch", "groups"),
    [
        # a rounding a level: 2 in epochs of 4 rounds, 3 in a run of 9 rounds and for each of 3 participations
        (0.9, 9, 4, ((4, 1.0, 2), (5, 0.8, 2), (5, 0.5, 2), (9, 0.6, 9))),
        (1.0, 9, 4, ((4, 1.0, 0), (5, 0.8, 0), (5, 0.5, 0), (9, 0.6, 0))),
        (0.9, 3, 4, ((3, 1.0, 1), (3, 0.6, 1))),
        (0.9, 3, 1, ((1, 1.0, 0), (2, 0.8, 0), (2, 0.5, 0))),
    ],
)
def test_roundings_of_clipped_parts_are_charged_by_level_and_participation(
    decay: float, rounds: int, rounds_per_epoch: int, groups: tuple[tuple[int, float, int], ...]
) -> None:
    form = members.aligned_form(rounds, decay, rounds_per_epoch)
    assert tuple(map(tuple, form.strategy.noise_groups(rounds, form.max_participations))) == groups


@pytest.mark.parametrize("digits", [0, 10])
@pytest.mark.parametrize("name", members.BUFFERED)
def test_buffered_integer_strategy_equals_the_strategy_matrix_up_to_its_rounding(name: str, digits: int) -> None:
    rounds, strategy = 40, members.strategy_buffered(name, digits)
    generator = np.random.default_rng(2)
    sums = [generator.integers(-(10**9), 10**9, 5) for _ in range(rounds)]
    rows = members.buffered_rows(strategy, rounds)
    ((_, _, difference),) = strategy.noise_groups(rounds, 1)
    for t, output in enumerate(members.streamed(strategy, sums)):
        exact = sum(rows[t][i] * int(sums[i][0]) for i in range(rounds))
        assert abs(int(output[0]) - exact) <= difference / 2


def impulses(rounds: int) -> list[Ints]:
    return [row.copy() for row in np.eye(rounds, dtype=np.int64) * 2**45]


def misses(form: Factorization, mechanism: Mechanism, sums: list[Ints]) -> list[float]:
    """How far the releases of each round, through C on integers and then B, are from the rows of A."""
    rounds = len(sums)
    state, found = mechanism.start(), []
    running_sums = workload_matrix(rounds, form.workload.decay)
    for t, output in enumerate(members.streamed(form.strategy, sums), start=1):
        row, state = release_running_sum(mechanism, form.strategy.noise_scales(t), state, t, output, 2.0**-45)
        found.append(float(np.max(np.abs(row.numpy() - running_sums[t - 1]))))
    return found


def strategy_of(name: str, rounds: int) -> IntegerStrategy:
    if name == "buffered":
        return members.strategy_buffered("two", 4)
    if name == "aligned":
        return members.aligned_form(rounds, 0.9, 4).strategy
    return members.exact_form(name, 0.9, members.workload_of(rounds, 0.9)).strategy


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("name", members.SIMPLE)
def test_mechanism_after_the_integer_strategy_gives_the_running_sums(name: str, decay: float) -> None:
    """Impulses through C on integers and then through the mechanism: the rows of A, decay rounded."""
    form = members.exact_form(name, decay, members.workload_of(37, decay))
    tolerance = 1e-8 if name == "tree" and 0.0 < form.workload.decay < 1.0 else 1e-12
    assert max(misses(form, form.mechanism, impulses(37))) < tolerance


@pytest.mark.parametrize("name", ["λ-CGD", "two"])
def test_scaled_buffers_after_their_integer_strategy_give_the_running_sums(name: str) -> None:
    """Of increments that were multiplied by D_t: B divides by it."""
    form = members.scaled_form(37, *map(tuple, members.BUFFERED[name]), 1.0)
    scaled = [
        np.trunc(form.increment_scale(t) * row).astype(np.int64) for t, row in enumerate(impulses(37), start=1)
    ]
    assert int(scaled[-1][-1]) > 1.1 * 2**45
    assert max(misses(form, form.mechanism, scaled)) < 1e-11


def test_unrounded_bands_do_not_reproduce_the_running_sums() -> None:
    """Control: B of the unrounded coefficients misses by more than the tolerance above."""
    form = members.exact_form("banded 4", 0.9, members.workload_of(37, 0.9))
    assert max(misses(form, BandedSquareRoot(0.9, 4), impulses(37))) > 1e-11


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("rounds_per_epoch", [1, 2, 3, 4, 8])
def test_clipped_parts_after_their_integer_strategy_give_the_running_sums(
    rounds_per_epoch: int, decay: float
) -> None:
    """Against the recursion of split_sum.py."""
    rounds = 21
    form = members.aligned_form(rounds, decay, rounds_per_epoch)
    generator = np.random.default_rng(10)
    parts = []
    for t in range(1, rounds + 1):
        part = generator.integers(-(2**44), 2**44, (form.strategy.draws(t), 6))
        if rounds_per_epoch > 1 and (t - 1) % rounds_per_epoch == 0:
            part[0] = 0
        parts.append(part)
    state: tuple[torch.Tensor, ...] = form.mechanism.start()
    integer_state, total, own = form.strategy.initial_state(), np.zeros(6), [np.zeros(6)] * rounds
    for t, part in enumerate(parts, start=1):
        output, integer_state = form.strategy.step(unpack_state(pack_state(integer_state)), t, part)
        row, state = release_running_sum(form.mechanism, form.strategy.noise_scales(t), state, t, output, 2.0**-45)
        residual, *rest = part / 2.0**45 if rounds_per_epoch > 1 else (np.zeros(6), *(part / 2.0**45))
        own[t - 1] = rest[0]
        if t > rounds_per_epoch:
            own[t - 1] = 0.7 * (own[t - 1 - rounds_per_epoch] + rest[1]) + 0.3 * rest[0]
        total = form.workload.decay * total + own[t - 1] + residual
        assert np.max(np.abs(row.numpy() - total)) < (1e-12 if decay == 1.0 else 1e-8)


def test_residual_part_in_the_first_round_of_an_epoch_is_ignored() -> None:
    """What the attacker would gain: a part that accounting charges nothing for."""
    strategy = members.aligned_form(9, 1.0, 3).strategy
    first, _ = strategy.step(strategy.initial_state(), 1, np.array([[2**40], [1]]))
    assert first.tolist() == [[0], [1]]


@pytest.mark.parametrize("name", members.BUFFERED)
def test_zeros_recomputed_from_rounded_roots_reproduce_the_strategy_matrix(name: str) -> None:
    """Π(1 - φx)/Π(1 - θx) with φ recomputed is C to 4e-13; with the φ that were asked for it is not."""
    strategy, rounds = members.strategy_buffered(name, 0), 60

    def misfit(phi: np.ndarray) -> float:
        found = np.zeros(rounds)
        found[0] = 1.0
        for root in phi:
            found[1:] -= root * found[:-1].copy()
        for theta in strategy.theta:
            for j in range(1, rounds):
                found[j] += theta / COEFFICIENT_ONE * found[j - 1]
        return float(np.max(np.abs(found - [float(row[0]) for row in members.buffered_rows(strategy, rounds)])))

    assert misfit(rounded_zeros(strategy)) < 4e-13
    if name in ("two", "slow"):
        assert misfit(np.array(members.BUFFERED[name][1])) > 1e-11


SMALL_ROOTS = [
    ((0.9816981694119518, 0.00023371047083454234), (0.0002392804211200299, 0.0)),
    ((0.9651013534942492, 0.0004264074840163504, 0.00022249738278265564), (0.000502970141115828, 3e-4, 0.0)),
    ((0.999803761629175, 0.11712833047916192, 0.0002964369365747089), (0.5, 0.022147671587592274, 0.0)),
    ((1.0, 0.6151794424619598), (0.999999999, 0.0)),
]
"""Roots θ and φ whose rounded residues leave no zero at 0, with small poles that move it far."""


@pytest.mark.parametrize(("theta", "phi"), SMALL_ROOTS)
@pytest.mark.parametrize("scale", [False, True])
def test_a_claim_from_the_rounded_roots_is_of_the_strategy_that_adds_the_noise(
    theta: tuple[float, ...], phi: tuple[float, ...], scale: bool
) -> None:
    """A ledger has the rounded roots, and its claim is of their own strategy, up to 3e-7 short of another one."""
    workload = Workload(FixedOrder(8, 8), 1.0, np.ones(8))
    plain = BufferedToeplitz(1.0, theta, phi)
    form = (plain.with_equal_columns(workload) if scale else plain).integer(workload)
    again = form.mechanism.integer(form.workload)
    assert (again.strategy, again.mechanism) == (form.strategy, form.mechanism)
    assert again.sensitivity_factor == form.sensitivity_factor


def test_residues_of_published_roots_match_the_published_weights() -> None:
    """ω of the fit for n = 1e5 in the specification of correlated noise: θ and ω are published with ten digits."""
    theta, omega = [0.9999528893, 0.9857068673], [0.0122853236, 0.1878393610]
    phi = np.linalg.eigvalsh(np.diag(theta) - np.sqrt(np.outer(omega, omega)))[::-1]
    found = make_integer_buffered(theta, phi.tolist()).omega
    assert np.allclose(np.array(found) / COEFFICIENT_ONE, omega, atol=1e-9)


@pytest.mark.parametrize("name", members.SIMPLE)
def test_the_variance_of_every_round_is_the_accounted_one(name: str) -> None:
    """Noise alone through B, 20,000 coordinates; 1e-6 a mechanism."""
    rounds, size, sigma = 12, 20_000, 2.0**30 * 1.3
    form = members.exact_form(name, 0.9, members.workload_of(rounds, 0.9))
    expected, state = form.mechanism.variance(form.workload), form.mechanism.start()
    bounds = chi2.ppf([1e-6 / rounds / 2, 1 - 1e-6 / rounds / 2], size)
    for t in range(1, rounds + 1):
        scales = form.strategy.noise_scales(t)
        noise = KeyedDiscreteGaussian(bytes(32), 1, t).vector(size, sigma * scales[0])
        row, state = release_running_sum(form.mechanism, scales, state, t, noise, 1.0)
        squared_norm = float(torch.sum(row**2)) / sigma**2 / expected[t - 1]
        assert bounds[0] < squared_norm < bounds[1]


@pytest.mark.parametrize("name", [*members.SIMPLE, "buffered", "aligned"])
def test_no_integer_sum_exceeds_its_declared_bound(name: str) -> None:
    """All records at their bound in every coordinate: the bound is held, and all but attained."""
    rounds = 20
    strategy = strategy_of(name, rounds)
    loads = [tuple(1000 * t + k for k in range(strategy.draws(t) or 1)) for t in range(1, rounds + 1)]
    sums = [np.array(load)[:, None] if strategy.draws(1) else np.array(load) for load in loads]
    state, found, inside = strategy.initial_state(), 0, 0
    for t, of_round in enumerate(sums, start=1):
        output, state = strategy.step(state, t, of_round)
        found = max(found, int(np.max(np.abs(output))))
        inside = max(inside, found, *(int(np.max(np.abs(vector))) for vector in state), 0)
    reach = strategy.bound_integers(loads)
    assert found <= reach.max_output
    assert inside <= reach.max_intermediate
    if name != "aligned":  # there r of an epoch's first round is bounded, and not read
        assert found > reach.max_output * 0.99
        assert inside > reach.max_intermediate * 0.99


def test_packed_integer_state_is_restored_when_unpacked() -> None:
    state = (np.arange(3), np.array([-1, 2**62, -(2**62)]))
    assert [v.tolist() for v in unpack_state(pack_state(state))] == [v.tolist() for v in state]
    assert unpack_state(pack_state(())) == ()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (FixedOrder(9, 9), 1), (FixedOrder(9, 4), 3), (MinSeparation(9, 2, 3), 2), (MinSeparation(9, 20, 3), 3),
        (Phases((3, 3)), 1),
    ],
)  # fmt: skip
def test_maximum_participations_follow_from_the_schedule(
    schedule: FixedOrder | MinSeparation | Phases, expected: int
) -> None:
    form = BinaryTree(0.9).integer(Workload(schedule, 0.9, np.ones(schedule.rounds)))
    assert form.max_participations == expected


def test_buffered_noise_without_roots_is_independent_on_integers() -> None:
    factor = BufferedToeplitz(1.0).integer(Workload(FixedOrder(8, 8), 1.0, np.ones(8))).sensitivity_factor
    assert 1 <= factor < 1 + 1e-9


def test_a_record_of_one_pass_with_empty_rounds_moves_fresh_noise_once() -> None:
    """Two records of different rounds do not share a place in the pass."""
    sensitivity = LeafGaussian(0.0).certified(Workload(Phases((2, 1)), 0.0, np.ones(5)))
    assert sensitivity.value == 1.0
