"""The choice of a mechanism: never beaten by a named one of the same memory, and made of public numbers."""

from collections.abc import Callable

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.noise.buffered import BufferedToeplitz
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.fitting.auto import auto, candidates, compared, fitted_sizes
from fedpriv.noise.fitting.cost import NoiseCost, noise_cost_of, rows_response
from fedpriv.noise.mechanism import Mechanism
from fedpriv.noise.toeplitz import BandedInverseSquareRoot, BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.noise.workload import Workload
from fedpriv.participation.orders import Schedule, Separated
from tests.noise.rows import ROWS, objective, response, workload
from tests.parts import in_parts


def momentum(rounds: int, rounds_per_epoch: int | None = None) -> NoiseCost:
    """The rows of momentum themselves, as normalized SGD's theorems ask for."""
    asked = Workload(Schedule(rounds, rounds_per_epoch or rounds), 1 - 1 / rounds, np.ones(rounds))
    return noise_cost_of(rows_response(rounds), asked)


def separated(rounds: int, clips: str) -> NoiseCost:
    norms = np.ones(rounds) if clips == "equal" else np.linspace(2.0, 1.0, rounds)
    return noise_cost_of(response("dp-ftrl", rounds), Workload(Separated(rounds, 3, 4), 1.0, norms))


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
    "separated": lambda: separated(24, "equal"),
    "separated, unequal clips": lambda: separated(24, "unequal"),
}
CASES = {
    **{name: (lambda key=key: objective(*key)) for name, key in GRID.items()},
    **SPECIAL,
}


@pytest.mark.parametrize("case", in_parts(CASES, [*list(GRID)[::6], *SPECIAL]))
def test_no_named_mechanism_of_the_same_memory_is_one_percent_better(case: str) -> None:
    wanted = CASES[case]()
    rivals = [
        (mechanism.memory_vectors(wanted.workload), np.sqrt(wanted.value(mechanism)))
        for mechanism in named(wanted.workload.decay)
    ]
    for most in range(5):
        chosen = auto(wanted, most)
        assert chosen.vectors <= most
        assert chosen.vectors == chosen.mechanism.memory_vectors(wanted.workload)
        for vectors, noise in rivals:
            assert vectors > most or chosen.noise <= 1.01 * noise + 1e-9


@pytest.mark.parametrize("case", [case for case in CASES if "16" in case or "separated" in case])
def test_what_a_candidate_claims_is_what_its_mechanism_does(case: str) -> None:
    """√J by filters against the certified sensitivity and the streamed noise."""
    wanted = CASES[case]()
    found = list(candidates(wanted, 4))
    assert found[0].vectors == 0
    for candidate in found:
        assert candidate.noise == pytest.approx(np.sqrt(wanted.value(candidate.mechanism)), rel=1e-9)


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
def test_choices(row: str, rounds: int, rounds_per_epoch: int | None, name: str) -> None:
    found = auto(objective(row, rounds, rounds_per_epoch))
    assert found.name.partition(" (0.")[0] == name


def test_the_bound_on_memory_is_kept_down_to_nothing() -> None:
    wanted = objective("dp-ftrl", 60)
    assert auto(wanted, 0).mechanism == fitted_sizes(wanted)
    assert auto(wanted, 1).vectors == 1
    noise = [auto(wanted, most).noise for most in range(5)]
    assert noise == sorted(noise, reverse=True)
    with pytest.raises(InputError, match="max_vectors = -1"):
        auto(wanted, -1)


def test_only_public_numbers_matter_and_the_choice_is_the_same_every_time() -> None:
    assert auto(objective("unaccelerated", 40)) == auto(objective("unaccelerated", 40))


def test_scaled_noise_is_for_one_pass_with_equal_clips() -> None:
    assert any(candidate.scaled for candidate in candidates(objective("dp-ftrl", 20), 4))
    for wanted in (objective("dp-ftrl", 20, 5), objective("online-to-batch", 20), separated(20, "equal")):
        assert not any(candidate.scaled for candidate in candidates(wanted, 4))


def test_a_comparison_is_in_the_units_of_unit_sensitivity() -> None:
    wanted, asked = response("accelerated", 60), workload("accelerated", 60)
    found = compared(IndependentGaussian(), wanted, asked)
    assert found.sensitivity.value == pytest.approx(np.sqrt(60))
    assert found.rows_rms == found.rows_last == pytest.approx(np.sqrt(60))
    assert found.published.output == pytest.approx(43.671961, rel=1e-7)
    assert found.vectors == 0
    rows = compared(BinaryTree(), rows_response(60, 60), asked)
    assert rows.published.output is None
    assert rows.published.queries == pytest.approx(rows.rows_rms, rel=1e-12)
