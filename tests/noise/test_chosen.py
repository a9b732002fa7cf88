"""All mechanisms that a scenario can name: JSON, options, columns of C, and what is refused."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.noise.buffered import BufferedToeplitz, LambdaCgd
from fedpriv.noise.diagonal import IndependentGaussian, ScheduledGaussian
from fedpriv.noise.fitting.adjoint import NoiseStream, pulled_back
from fedpriv.noise.fitting.cost import spread
from fedpriv.noise.mechanism import Mechanism, raised
from fedpriv.noise.registry import AUTO, CHOSEN, MechanismOptions, chosen_mechanism, mechanism_from
from fedpriv.noise.toeplitz import BandedInverseSquareRoot, BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.noise.workload import Workload
from fedpriv.participation.orders import Schedule, Separated

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
        LambdaCgd(decay, (0.7 * decay,), (0.0,)).lengthened(one_pass(decay)),
        BufferedToeplitz(decay, (0.8 * decay,), (0.3 * decay,)).lengthened(one_pass(decay)),
    ]


def one_pass(decay: float, clips: Sequence[float] = (1.0,) * ROUNDS) -> Workload:
    return Workload(Schedule(ROUNDS, ROUNDS), decay, np.array(clips))


MEMBERS = [(decay, mechanism) for decay in (1.0, 0.8) for mechanism in members(decay)]
IDS = [f"{mechanism.label}, decay {decay}" for decay, mechanism in MEMBERS]


def matrix(mechanism: Mechanism, decay: float) -> NDArray[np.float64]:
    """C = B^-1 A, from streaming alone."""
    b = pulled_back(NoiseStream(mechanism), np.eye(ROUNDS))
    lag = np.subtract.outer(np.arange(ROUNDS), np.arange(ROUNDS))
    return np.linalg.solve(b, np.where(lag >= 0, decay ** np.maximum(lag, 0.0), 0.0))


def test_the_members_are_all_that_can_be_chosen() -> None:
    assert {type(mechanism) for mechanism in members(1.0)} == set(CHOSEN)


@pytest.mark.parametrize(("decay", "mechanism"), MEMBERS, ids=IDS)
def test_json_and_options_make_it_again(decay: float, mechanism: Mechanism) -> None:
    """Lists of JSON become tuples, and a scenario's keys give the same numbers."""
    assert mechanism_from(json.loads(json.dumps(mechanism.as_data()))) == mechanism
    options = MechanismOptions.model_validate(json.loads(json.dumps(mechanism.options())))
    assert chosen_mechanism(mechanism.name, one_pass(decay), options) == mechanism


@pytest.mark.parametrize(("decay", "mechanism"), MEMBERS, ids=IDS)
def test_columns_are_those_of_the_strategy(decay: float, mechanism: Mechanism) -> None:
    c = matrix(mechanism, decay)
    columns = mechanism.columns(one_pass(decay))
    np.testing.assert_allclose(columns.squared_norms, np.sum(c**2, axis=0), rtol=1e-10)
    for held in (np.arange(ROUNDS), np.arange(3, ROUNDS, 7)):
        np.testing.assert_allclose(columns.inner(held), c[:, held].T @ c[:, held], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("decay", "mechanism"), MEMBERS, ids=IDS)
def test_noise_in_weighted_rows_is_that_of_streaming(decay: float, mechanism: Mechanism) -> None:
    rows = np.random.default_rng(1).normal(size=(4, ROUNDS))
    streamed = np.sum(pulled_back(NoiseStream(mechanism), rows) ** 2, axis=1)
    np.testing.assert_allclose(spread(mechanism, rows, one_pass(decay)), streamed, rtol=1e-10)
    alone = spread(mechanism, np.eye(ROUNDS), one_pass(decay))
    np.testing.assert_allclose(alone, mechanism.variance(one_pass(decay)), rtol=1e-12)


@pytest.mark.parametrize(("decay", "mechanism"), MEMBERS, ids=IDS)
@pytest.mark.parametrize("rounds_per_epoch", [ROUNDS, 6])
def test_raised_clips_cost_nothing(decay: float, mechanism: Mechanism, rounds_per_epoch: int) -> None:
    """Guarantee of `raised`: by brute force over the records of a fixed order every one costs the same."""
    plain = Workload(Schedule(ROUNDS, rounds_per_epoch), decay, np.ones(ROUNDS))
    factors = raised(mechanism.columns(plain), plain)
    c, before = matrix(mechanism, decay), mechanism.sensitivity(plain)
    for place in range(rounds_per_epoch):
        held = np.arange(place, ROUNDS, rounds_per_epoch)
        assert np.linalg.norm(c[:, held] @ factors[held]) == pytest.approx(before, rel=1e-9)
    after = mechanism.sensitivity(Workload(Schedule(ROUNDS, rounds_per_epoch), decay, factors))
    assert after == pytest.approx(before, rel=1e-9)


@pytest.mark.parametrize(("decay", "mechanism"), MEMBERS, ids=IDS)
def test_separated_participations_with_unequal_clips_are_covered(decay: float, mechanism: Mechanism) -> None:
    """The row-wise bound is in every certificate: never below the worst pattern, and near it."""
    clips = np.random.default_rng(3).uniform(0.3, 2.0, ROUNDS)
    asked = Workload(Separated(ROUNDS, 2, 9), decay, clips)
    c = matrix(mechanism, decay)
    moved = max(
        float(np.linalg.norm(clips[first] * c[:, first] + (clips[then] * c[:, then] if then < ROUNDS else 0.0)))
        for first in range(ROUNDS)
        for then in range(first + 9, ROUNDS + 9)
    )
    found = mechanism.certified(asked)
    assert moved * (1.0 - 1e-9) <= found.value <= 1.1 * moved


def test_factors_are_known_where_clips_can_be_raised_only() -> None:
    mechanism = BinaryTree(1.0, 4)
    restarting = Workload(Schedule(8, 8), 1.0, np.ones(8), 4)
    with pytest.raises(InputError, match="restart"):
        raised(mechanism.columns(restarting), restarting)
    separated = Workload(Separated(8, 2, 2), 1.0, np.ones(8))
    with pytest.raises(InputError, match="fixed order"):
        raised(BinaryTree().columns(separated), separated)


@pytest.mark.parametrize("name", [AUTO, "scheduled", "lambda-cgd", "blt"])
def test_nothing_is_fitted_where_a_plan_is_made(name: str) -> None:
    """A guard that fitted could be kept busy, or fit something else than its server."""
    with pytest.raises(InputError, match="fitted before a run starts"):
        chosen_mechanism(name, one_pass(1.0), MechanismOptions())


@pytest.mark.parametrize(
    ("name", "keys", "named"),
    [
        ("tree", {"theta": [0.5]}, 'theta is for mechanism = "blt"'),
        ("banded", {"scale": True}, 'scale is for mechanism = "blt"'),
        ("lambda-cgd", {"theta": [0.5, 0.4], "phi": [0.45, 0.0]}, "one root"),
        ("blt", {"theta": [0.5], "phi": [0.6]}, "θ_1 > φ_1"),
        ("blt", {"theta": [0.5]}, "phi 0"),
    ],
)
def test_numbers_that_are_none_of_its_own_are_refused(name: str, keys: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        chosen_mechanism(name, one_pass(1.0), MechanismOptions.model_validate(keys))


def test_scale_is_for_one_pass_with_equal_clips() -> None:
    options = MechanismOptions(theta=(0.9,), scale=True)
    epochs = Workload(Schedule(8, 4), 1.0, np.ones(8))
    unequal = Workload(Schedule(3, 3), 1.0, np.array([1.0, 2.0, 3.0]))
    for asked in (epochs, unequal):
        with pytest.raises(InputError, match="single pass with the same clip"):
            chosen_mechanism("lambda-cgd", asked, options)
