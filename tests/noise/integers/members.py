"""Mechanisms in their exact form, and their matrices built from the definitions, in rationals."""

import dataclasses
import itertools
from fractions import Fraction

import numpy as np

from fedpriv.noise import sensitivity as nonincreasing
from fedpriv.noise.buffered import (
    BufferedToeplitz,
    IntegerBuffered,
    LambdaCgd,
    integer_series,
    make_integer_buffered,
)
from fedpriv.noise.diagonal import IndependentGaussian, LeafGaussian, ScheduledGaussian
from fedpriv.noise.differences import AlignedDifferences
from fedpriv.noise.integers.fixed_point import COEFFICIENT_ONE, Ints, to_coefficient
from fedpriv.noise.integers.plan import ExactRunInputs
from fedpriv.noise.integers.strategies import IntegerStrategy, Lattice, pack_state, unpack_state
from fedpriv.noise.mechanism import Factorization, Mechanism
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import FixedOrder

UNITS = Lattice(0)
"""Clips that are already norms in units."""

Matrix = list[list[Fraction]]


def workload_of(
    rounds: int, decay: float, passes: int = 1, clips: np.ndarray | None = None, period: int | None = None
) -> Workload:
    order = FixedOrder(rounds, -(-rounds // passes))
    return Workload(order, decay, np.ones(rounds) if clips is None else clips, period)


def run_of(mechanism: Mechanism, workload: Workload, records: int = 100, **options: object) -> ExactRunInputs:
    settings: dict[str, object] = {"dimension": 7850, "relation": "replace-one", "mu": 4.0, **options}
    return ExactRunInputs(mechanism.integer(workload), (records,) * workload.rounds, **settings)  # type: ignore[arg-type]


def simple(name: str, decay: float, period: int | None = None) -> Mechanism:
    return {
        "independent": IndependentGaussian(),
        "scheduled": ScheduledGaussian((1.0, 0.5, 2.0, 4.0) * 128, decay),
        "tree": BinaryTree(decay, period),
        "leaf": LeafGaussian(decay, period, first=0.5),
        "banded 1": BandedSquareRoot(decay, 1),
        "banded 4": BandedSquareRoot(decay, 4),
        "banded all": BandedSquareRoot(decay, 100),
        "lambda-cgd": LambdaCgd(decay, (0.96 * decay or 0.5,), (0.0,)),
        "blt": BufferedToeplitz(decay, _roots(decay, 0.98, 0.7), _roots(decay, 0.9, 0.3)),
    }[name]


def _roots(decay: float, *shares: float) -> tuple[float, ...]:
    return tuple(share * (decay or 1.0) for share in shares)


SIMPLE = ["independent", "scheduled", "tree", "leaf", "banded 1", "banded 4", "banded all", "lambda-cgd", "blt"]
PERIODIC = ["independent", "tree", "leaf"]


def aligned(decay: float, rounds_per_epoch: int, clip: float = 1.0) -> AlignedDifferences:
    stds = {"std_early": 1.0, "std_late": 0.8, "std_difference": 0.5, "std_residual": 0.6}
    return AlignedDifferences(rounds_per_epoch, 0.3, 2.0 * clip / 3.0, clip / 3.0, None, decay, **stds)


def aligned_form(rounds: int, decay: float, rounds_per_epoch: int, clip: float = 1.0) -> Factorization:
    workload = Workload(FixedOrder(rounds, rounds_per_epoch), decay, np.full(rounds, clip))
    return aligned(decay, rounds_per_epoch, clip).integer(workload)


def exact_form(name: str, decay: float, workload: Workload) -> Factorization:
    return simple(name, decay, workload.period).integer(workload)


def scaled_form(rounds: int, theta: tuple[float, ...], phi: tuple[float, ...], clip: float) -> Factorization:
    """Buffers whose late increments are longer than columns of C need: not the first record moves the most."""
    workload = workload_of(rounds, 1.0, clips=np.full(rounds, clip))
    fair = BufferedToeplitz(1.0, theta, phi).with_equal_columns(workload)
    longer = dataclasses.replace(fair, column_scale=tuple(factor**2 for factor in fair.column_scale))
    return longer.integer(workload)


BUFFERED = {
    "λ-CGD": ([0.96], [0.0]),
    "two": ([0.98, 0.7], [0.9, 0.3]),
    "slow": ([0.9999528893, 0.9857068673], [0.99, 0.85]),
    "prefix": ([1.0], [0.0]),
}


def buffered_certified(strategy: IntegerBuffered, workload: Workload) -> float:
    return nonincreasing.sensitivity_from_series(workload, integer_series(strategy, workload.rounds)).value


def strategy_buffered(name: str, digits: int) -> IntegerBuffered:
    return make_integer_buffered(*BUFFERED[name], digits)


def series_of(strategy: IntegerBuffered, rounds: int) -> list[Fraction]:
    poles = [
        (Fraction(theta, COEFFICIENT_ONE), Fraction(omega, COEFFICIENT_ONE))
        for theta, omega in zip(strategy.theta, strategy.omega, strict=True)
    ]
    return [
        Fraction(1),
        *(sum((omega * theta**j for theta, omega in poles), Fraction(0)) for j in range(rounds - 1)),
    ]


def rows_of_c(name: str, decay: float, rounds: int, period: int | None = None) -> Matrix:
    """C over its noises' scales, from the definitions; the decay is the multiple of 2^-31 that is meant."""
    factor = Fraction(to_coefficient(decay), COEFFICIENT_ONE)
    rows = [[Fraction(0)] * rounds for _ in range(rounds)]
    series = [Fraction(1)]
    if name.startswith("banded"):
        bands = {"banded 1": 1, "banded 4": 4, "banded all": 100}[name]
        exact = [Fraction(1)]
        for j in range(1, min(bands, rounds)):
            exact.append(exact[-1] * Fraction(decay) * Fraction(2 * j - 1, 2 * j))
        series = [Fraction(round(c * COEFFICIENT_ONE), COEFFICIENT_ONE) for c in exact]
    if name in ("lambda-cgd", "blt"):
        strategy = exact_form(name, decay, workload_of(rounds, decay)).strategy
        assert isinstance(strategy, IntegerBuffered)
        series = series_of(strategy, rounds)
    for t in range(rounds):
        place = t if period is None else t % period
        for age in range(place + 1):
            if name == "scheduled":
                rows[t][t - age] = factor**age / Fraction((1.0, 0.5, 2.0, 4.0)[t % 4])
            elif name == "independent" or (name == "tree" and age < ((place + 1) & -(place + 1))):
                rows[t][t - age] = factor**age
            elif name == "leaf" and age == 0:
                rows[t][t] = Fraction(2 if place == 0 else 1)
            elif name.startswith(("banded", "lambda", "blt")) and age < len(series):
                rows[t][t - age] = series[age]
    return rows


def buffered_rows(strategy: IntegerBuffered, rounds: int) -> Matrix:
    series = series_of(strategy, rounds)
    return [[series[t - i] if i <= t else Fraction(0) for i in range(rounds)] for t in range(rounds)]


def largest_squared_norm(rows: Matrix, workload: Workload) -> Fraction:
    """The square of the sensitivity in rationals, for C ≥ 0 and a fixed order."""
    rounds, rounds_per_epoch = workload.rounds, workload.schedule.rounds_per_epoch
    clips = [Fraction(clip) for clip in workload.clips.tolist()]
    records = [range(place, rounds, rounds_per_epoch) for place in range(min(rounds_per_epoch, rounds))]
    return max(sum((sum(clips[i] * row[i] for i in held) ** 2 for row in rows), Fraction(0)) for held in records)


def disc(radius: int) -> np.ndarray:
    """All integer points of the plane within `radius`, (n, 2)."""
    points = itertools.product(range(-radius, radius + 1), repeat=2)
    return np.array([point for point in points if point[0] ** 2 + point[1] ** 2 <= radius**2])


def streamed(strategy: IntegerStrategy, sums: list[Ints]) -> list[Ints]:
    """(C s)_t of every round; the state goes through its bytes where it can."""
    state, outputs = strategy.initial_state(), []
    for t, of_round in enumerate(sums, start=1):
        output, state = strategy.step(state, t, of_round)
        if of_round.ndim == 1:
            state = unpack_state(pack_state(state))
        outputs.append(output.copy())
    return outputs
