"""All mechanisms that a scenario can name: JSON, options, columns of C, refusals, and the choice of one."""

import itertools
import json
from collections.abc import Callable

import numpy as np
import pytest

from fedpriv.noise.buffered import BufferedToeplitz, LambdaCgd
from fedpriv.noise.diagonal import IndependentGaussian, ScheduledGaussian
from fedpriv.noise.fitting.auto import (
    MechanismCandidate,
    choose_candidate,
    compare_mechanism,
    fit_auto,
    fit_sizes,
    undominated_candidates,
)
from fedpriv.noise.fitting.cost import (
    NoiseCost,
    NoiseStream,
    apply_adjoint,
    make_noise_cost,
    output_variances,
    rows_response,
)
from fedpriv.noise.mechanism import Mechanism, clip_multipliers
from fedpriv.noise.registry import (
    SELECTABLE_MECHANISMS,
    MechanismOptions,
    make_mechanism,
    mechanism_from_data,
)
from fedpriv.noise.toeplitz import BandedInverseSquareRoot, BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from tests.noise.matrices import Matrix, patterns, separated, workload_matrix, workload_of
from tests.noise.rows import ROWS, objective, response, workload
from tests.parts import in_parts

ROUNDS = 23


def members(decay: float) -> list[Mechanism]:
    return [
        IndependentGaussian(),
        ScheduledGaussian(tuple(np.geomspace(0.5, 4.0, ROUNDS).tolist()), decay),
        BinaryTree(decay),
        BandedSquareRoot(decay, 5),
        BandedSquareRoot(decay, 40),
        BandedInverseSquareRoot(decay, 4),
        LambdaCgd(decay, (0.7 * decay,), (0.0,)),
        BufferedToeplitz(decay, (0.9 * decay, 0.5 * decay), (0.7 * decay, 0.0)),
        BufferedToeplitz(decay, (0.9 * decay, 0.5 * decay), (0.7 * decay, 0.1 * decay)),
        LambdaCgd(decay, (0.7 * decay,), (0.0,)).with_equal_columns(workload_of(ROUNDS, decay)),
        BufferedToeplitz(decay, (0.8 * decay,), (0.3 * decay,)).with_equal_columns(workload_of(ROUNDS, decay)),
    ]


MEMBERS = [(decay, mechanism) for decay in (1.0, 0.8) for mechanism in members(decay)]
IDS = [f"{mechanism.label}, decay {decay}" for decay, mechanism in MEMBERS]
every_member = pytest.mark.parametrize(("decay", "mechanism"), MEMBERS, ids=IDS)


def matrix(mechanism: Mechanism, decay: float) -> Matrix:
    """C = B^-1 A, from streaming alone."""
    b = apply_adjoint(NoiseStream(mechanism), np.eye(ROUNDS))
    return np.linalg.solve(b, workload_matrix(ROUNDS, decay))


def test_members_of_these_tests_cover_every_selectable_mechanism() -> None:
    assert {type(mechanism) for mechanism in members(1.0)} == set(SELECTABLE_MECHANISMS)


@every_member
def test_mechanism_is_restored_from_json_and_from_scenario_options(decay: float, mechanism: Mechanism) -> None:
    """Lists of JSON become tuples, and a scenario's keys give the same numbers."""
    assert mechanism_from_data(json.loads(json.dumps(mechanism.as_data()))) == mechanism
    options = MechanismOptions.model_validate(json.loads(json.dumps(mechanism.options())))
    assert make_mechanism(mechanism.name, workload_of(ROUNDS, decay), options) == mechanism


@every_member
def test_column_norms_and_products_match_the_strategy_matrix(decay: float, mechanism: Mechanism) -> None:
    c = matrix(mechanism, decay)
    columns = mechanism.columns(workload_of(ROUNDS, decay))
    np.testing.assert_allclose(columns.squared_norms, np.sum(c**2, axis=0), rtol=1e-10)
    for held in (np.arange(ROUNDS), np.arange(3, ROUNDS, 7)):
        np.testing.assert_allclose(columns.inner(held), c[:, held].T @ c[:, held], rtol=1e-9, atol=1e-12)


@every_member
def test_output_variances_of_weighted_rows_match_the_streamed_noise(decay: float, mechanism: Mechanism) -> None:
    rows = np.random.default_rng(1).normal(size=(4, ROUNDS))
    streamed = np.sum(apply_adjoint(NoiseStream(mechanism), rows) ** 2, axis=1)
    np.testing.assert_allclose(output_variances(mechanism, rows, workload_of(ROUNDS, decay)), streamed, rtol=1e-10)
    alone = output_variances(mechanism, np.eye(ROUNDS), workload_of(ROUNDS, decay))
    np.testing.assert_allclose(alone, mechanism.variance(workload_of(ROUNDS, decay)), rtol=1e-12)


@every_member
@pytest.mark.parametrize("rounds_per_epoch", [ROUNDS, 6])
def test_clip_multipliers_leave_the_sensitivity_unchanged_for_every_record(
    decay: float, mechanism: Mechanism, rounds_per_epoch: int
) -> None:
    """Guarantee of `raised`: by brute force over the records of a fixed order every one costs the same."""
    plain = workload_of(ROUNDS, decay, rounds_per_epoch)
    factors = clip_multipliers(mechanism.columns(plain), plain)
    c, before = matrix(mechanism, decay), mechanism.sensitivity(plain)
    for place in range(rounds_per_epoch):
        held = np.arange(place, ROUNDS, rounds_per_epoch)
        assert np.linalg.norm(c[:, held] @ factors[held]) == pytest.approx(before, rel=1e-9)
    after = mechanism.sensitivity(workload_of(ROUNDS, decay, rounds_per_epoch, clips=factors))
    assert after == pytest.approx(before, rel=1e-9)


@every_member
def test_sensitivity_bound_covers_separated_participations_with_unequal_clips(
    decay: float, mechanism: Mechanism
) -> None:
    """The row-wise bound is in every certificate: never below the worst pattern, and near it."""
    clips = np.random.default_rng(3).uniform(0.3, 2.0, ROUNDS)
    workload, c = separated(ROUNDS, 2, 9, decay, clips=clips), matrix(mechanism, decay) * clips
    moved = max(float(np.linalg.norm(c[:, chosen].sum(axis=1))) for chosen in patterns(workload))
    assert moved * (1.0 - 1e-9) <= mechanism.certified(workload).value <= 1.1 * moved


def momentum(rounds: int, rounds_per_epoch: int | None = None) -> NoiseCost:
    """The rows of momentum themselves, as normalized SGD's theorems ask for."""
    return make_noise_cost(rows_response(rounds), workload_of(rounds, 1 - 1 / rounds, rounds_per_epoch))


def apart(rounds: int, last_clip: float = 1.0) -> NoiseCost:
    clips = np.linspace(1.0, last_clip, rounds)
    return make_noise_cost(response("dp-ftrl", rounds), separated(rounds, 3, 4, clips=clips))


def named(decay: float) -> list[Mechanism]:
    banded = [kind(decay, bands) for kind in (BandedSquareRoot, BandedInverseSquareRoot) for bands in (1, 2, 3, 4)]
    lambdas = [BufferedToeplitz(decay, ((decay or 1.0) * root,), (0.0,)) for root in (0.5, 0.9, 0.96)]
    return [IndependentGaussian(), BinaryTree(decay), *banded, *lambdas]


GRID = {
    **{f"{row}, T = {rounds}": (row, rounds, None) for row in ROWS for rounds in (3, 4, 7, 16, 33)},
    **{f"{row}, T = {rounds} in epochs": (row, rounds, rounds // 4) for row in ROWS for rounds in (8, 24)},
}
SPECIAL: dict[str, Callable[[], NoiseCost]] = {
    "momentum, T = 20": lambda: momentum(20),
    "momentum, T = 40 in epochs": lambda: momentum(40, 10),
    "separated": lambda: apart(24),
    "separated, unequal clips": lambda: apart(24, 0.5),
}
CASES = {**{name: (lambda key=key: objective(*key)) for name, key in GRID.items()}, **SPECIAL}


@pytest.mark.every(5)
@pytest.mark.sample(3)
@pytest.mark.parametrize("case", in_parts(CASES, [*list(GRID)[::6], *SPECIAL]))
def test_no_listed_mechanism_of_the_same_memory_beats_the_automatic_choice_by_one_percent(case: str) -> None:
    wanted = CASES[case]()
    rivals = named(wanted.workload.decay)
    noises = [(rival.memory_vectors(wanted.workload), np.sqrt(wanted.evaluate(rival))) for rival in rivals]
    for most in (1, 2, 4):
        chosen = fit_auto(wanted, most)
        assert chosen.vector_count <= most
        assert chosen.vector_count == chosen.mechanism.memory_vectors(wanted.workload)
        for vectors, noise in noises:
            assert vectors > most or chosen.noise <= 1.01 * noise + 1e-9


@pytest.mark.every(6)
@pytest.mark.parametrize("case", [case for case in CASES if "16" in case or "separated" in case])
def test_noise_of_every_fitted_candidate_matches_its_evaluated_mechanism(case: str) -> None:
    """√J by filters against the certified sensitivity and the streamed noise."""
    wanted = CASES[case]()
    found = list(undominated_candidates(wanted, 4))
    assert found[0].vector_count == 0
    for candidate in found:
        assert candidate.noise == pytest.approx(np.sqrt(wanted.evaluate(candidate.mechanism)), rel=1e-9)


def test_no_candidate_follows_another_that_is_as_good() -> None:
    """Noise within a relative 1e-6 is equal: here several fits end at the same single root."""
    candidates = list(undominated_candidates(objective("dp-ftrl", 8, 2), 4))
    for first, later in itertools.combinations(candidates, 2):
        assert later.vector_count < first.vector_count or later.noise * (1.0 + 1e-6) < first.noise


PLAIN, SCALED = LambdaCgd(1.0, (0.5,), (0.0,)), LambdaCgd(1.0, (0.5,), (0.0,), (1.0, 2.0))


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([(PLAIN, 0, 1.02), (PLAIN, 1, 1.009), (PLAIN, 1, 1.005), (PLAIN, 2, 1.0)], 2),
        ([(PLAIN, 0, 1.02), (PLAIN, 1, 1.011), (PLAIN, 2, 1.0)], 2),
        ([(PLAIN, 2, 1.0), (SCALED, 1, 0.991)], 0),
        ([(PLAIN, 2, 1.0), (SCALED, 4, 0.989)], 1),
        ([(PLAIN, 2, 1.0), (SCALED, 4, 0.98), (SCALED, 3, 0.989), (SCALED, 5, 0.985)], 2),
    ],
)
def test_the_least_state_within_one_percent_is_chosen_and_scaled_if_that_saves_more(
    candidates: list[tuple[Mechanism, int, float]], chosen: int
) -> None:
    found = [MechanismCandidate(*candidate) for candidate in candidates]
    assert choose_candidate(found) is found[chosen]


def test_noise_is_scaled_where_that_is_allowed() -> None:
    wanted = objective("dp-sgd", 4)
    assert fit_auto(wanted, 1).is_scaled
    assert not fit_auto(wanted, 1, scalable=False).is_scaled


@pytest.mark.every(12)
@pytest.mark.parametrize(
    ("row", "rounds", "rounds_per_epoch", "name"),
    [
        ("accelerated", 60, None, "lambda-cgd"),
        ("dp-mu2-fl", 60, None, "lambda-cgd"),
        ("online-to-batch", 60, None, "scheduled"),  # its clips grow: early columns of C may be long
        ("dp-ftrl", 8, 2, "banded (2)"),
        ("accelerated", 600, 60, "scheduled"),  # a record weighs more in every epoch, and early sums do so anyway
        ("unaccelerated", 60, None, "blt (2)"),
        ("dp-ftrl", 600, 60, "blt (2)"),
        ("dp-ftrl", 60, None, "blt (2, scaled)"),
        ("dp-ftrl, momentum", 600, 60, "lambda-cgd"),
        ("accelerated", 2, None, "independent"),
        ("accelerated", 1, None, "independent"),
    ],
)
def test_automatic_fit_chooses_the_expected_mechanism(
    row: str, rounds: int, rounds_per_epoch: int | None, name: str
) -> None:
    found = fit_auto(objective(row, rounds, rounds_per_epoch))
    assert found.name.partition(" (0.")[0] == name


@pytest.mark.slow
def test_automatic_fit_respects_the_memory_limit_down_to_zero_vectors() -> None:
    wanted = objective("dp-ftrl", 60)
    assert fit_auto(wanted, 0).mechanism == fit_sizes(wanted)
    assert fit_auto(wanted, 1).vector_count == 1
    noise = [fit_auto(wanted, most).noise for most in range(5)]
    assert noise == sorted(noise, reverse=True)


@pytest.mark.slow
def test_automatic_fit_makes_the_same_choice_every_time() -> None:
    assert fit_auto(objective("unaccelerated", 16)) == fit_auto(objective("unaccelerated", 16))


@pytest.mark.slow
def test_scaled_candidates_appear_only_for_one_pass_with_equal_clips() -> None:
    assert any(candidate.is_scaled for candidate in undominated_candidates(objective("dp-ftrl", 20), 4))
    for wanted in (objective("dp-ftrl", 20, 5), objective("online-to-batch", 20), apart(20)):
        assert not any(candidate.is_scaled for candidate in undominated_candidates(wanted, 4))


def test_mechanism_comparison_reports_sensitivity_row_noise_memory_and_published_noise() -> None:
    wanted, asked = response("accelerated", 60), workload("accelerated", 60)
    found = compare_mechanism(IndependentGaussian(), wanted, asked)
    assert found.sensitivity.value == pytest.approx(np.sqrt(60))
    assert found.rows_rms == found.rows_last == pytest.approx(np.sqrt(60))
    assert found.published_noise.output == pytest.approx(43.671961, rel=1e-7)
    assert found.vector_count == 0
    rows = compare_mechanism(BinaryTree(), rows_response(60, 60), asked)
    assert rows.published_noise.output is None
    assert rows.rows_last == pytest.approx(rows.sensitivity.value * 2.0, rel=1e-12)  # 60 has four bits set
    assert rows.vector_count == BinaryTree().memory_vectors(asked)
    assert rows.published_noise.queries == pytest.approx(rows.rows_rms, rel=1e-12)
