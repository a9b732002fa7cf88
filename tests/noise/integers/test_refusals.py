"""What has no claim, no room or no exact form on integers is refused: how it is asked for, and what is named."""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.buffered import BufferedToeplitz, IntegerBuffered, make_integer_buffered, rounded_zeros
from fedpriv.noise.diagonal import IndependentGaussian, PhaseEnds
from fedpriv.noise.integers.fixed_point import COEFFICIENT_ONE, to_coefficient
from fedpriv.noise.integers.gaussian import KeyedDiscreteGaussian, extend_query_chain
from fedpriv.noise.integers.plan import ExactRunInputs, fit_lattice
from fedpriv.noise.integers.strategies import NoiseGroup, claim_for_sigma, pack_state, unpack_state
from fedpriv.noise.sliding import SlidingDifferences
from fedpriv.noise.toeplitz import IntegerBanded
from fedpriv.participation.orders import Phases
from tests.noise.integers.hostile_floats import truncated
from tests.noise.integers.members import aligned, run_of, workload_of

KEY, STATE = bytes(range(32)), pack_state((np.arange(3), np.array([-1, 2**62, -(2**62)])))
MOVING = dataclasses.replace(aligned(0.9, 3), movement=0.1)
INDEPENDENT, SIXTY = IndependentGaussian(), workload_of(60, 1.0)
NEAR_ONE = (
    (1.0, 0.9999999922530666, 0.9999999855221763, 0.9998460068957085),
    (0.9999999932352928, 0.9999999889485592, 0.9999697033667423, 0.0),
)
"""Roots so close to each other that rounded ones round to others, without an end."""
OUTSIDE, MIDDLE = "16 ≤ sigma", np.array([1.0, 2.0**41, 1.0])


def growing(rounds: int) -> ExactRunInputs:
    """Clips that grow like t: K_t of 24 bits fits up to 8,191 rounds."""
    return run_of(INDEPENDENT, workload_of(rounds, 1.0, clips=np.arange(1.0, rounds + 1)), records=1)


REFUSED: list[tuple[Callable[[], object], str]] = [
    # plans
    (lambda: fit_lattice(run_of(INDEPENDENT, SIXTY, records=10**13)), "bits"),
    (lambda: fit_lattice(run_of(INDEPENDENT, SIXTY, word_bits=40, records=10**4, mu=3000.0)), "2\\^16 to 2\\^48"),
    (lambda: fit_lattice(run_of(INDEPENDENT, SIXTY, word_bits=32)), "accepted are"),
    (lambda: fit_lattice(ExactRunInputs(INDEPENDENT.integer(SIXTY), (1,) * 59, 10, "zero-out", 1.0)), "60 rounds"),
    (lambda: fit_lattice(run_of(INDEPENDENT, SIXTY, party_count=0)), "parties"),
    (lambda: fit_lattice(run_of(INDEPENDENT, SIXTY, dimension=0)), "values"),
    (
        lambda: fit_lattice(ExactRunInputs(INDEPENDENT.integer(SIXTY), (-1,) + (1,) * 59, 10, "zero-out", 1.0)),
        "records",
    ),
    (lambda: fit_lattice(run_of(INDEPENDENT, workload_of(3, 1.0, clips=MIDDLE))), "2\\^-40"),
    (lambda: fit_lattice(run_of(INDEPENDENT, workload_of(3, 1.0, clips=1 / MIDDLE))), "2\\^-40"),
    (lambda: fit_lattice(growing(8192)), "8,191 rounds"),
    (lambda: fit_lattice(run_of(INDEPENDENT, SIXTY, word_bits=40, records=10**9)), "4,194,303 rounds"),
    (lambda: fit_lattice(run_of(INDEPENDENT, SIXTY, mu=0.0)), "mu = 0.0"),
    (lambda: fit_lattice(run_of(INDEPENDENT, SIXTY, mu=math.nan)), "mu = nan"),
    (lambda: fit_lattice(run_of(INDEPENDENT, SIXTY, mu=math.inf)), "mu = inf"),
    (lambda: claim_for_sigma(1.0, math.inf, [NoiseGroup(60, 1.0, Fraction(0))], 1, [1] * 60), "sigma = inf"),
    # claims about real numbers
    (lambda: MOVING.integer(workload_of(9, 0.9, 3)), "integers"),
    (lambda: SlidingDifferences(**vars(MOVING)).integer(workload_of(9, 0.9, 3)), "integers"),
    (lambda: PhaseEnds(Phases((2, 2)), 0.1, 1.0, 1.0).integer(workload_of(9, 0.9, 3)), "integers"),
    # coefficients
    (lambda: IntegerBanded((COEFFICIENT_ONE + 1,)), "never rise"),
    (lambda: IntegerBanded((5, 6)), "never rise"),
    (lambda: IntegerBanded((-1,)), "never rise"),
    (lambda: make_integer_buffered([0.5], [0.6]), "needed is 1 ≥ θ_1"),
    (lambda: make_integer_buffered([0.9, 0.8], [0.85, 0.82]), "needed is 1 ≥ θ_1"),
    (lambda: make_integer_buffered([1.1], [0.5]), "needed is 1 ≥ θ_1"),
    (lambda: make_integer_buffered([0.5], []), "same number"),
    (lambda: BufferedToeplitz(1.0, *NEAR_ONE).integer(SIXTY), "again and again"),
    (lambda: IntegerBuffered((COEFFICIENT_ONE, COEFFICIENT_ONE), (COEFFICIENT_ONE, 1)), "add up to more"),
    (lambda: BufferedToeplitz(1.0, (1.0, 2.0**-16), (2.0**-15, 0.0)).integer(SIXTY), "-6.32"),
    (lambda: IntegerBuffered((5,), ()), "decays,"),
    (lambda: IntegerBuffered((5,), (5,), -1), "-1 digits"),
    (lambda: IntegerBuffered((5,), (5,), 25), "25 digits"),
    (lambda: IntegerBuffered((COEFFICIENT_ONE + 1,), (5,)), "decay by 0 to 1"),
    (lambda: IntegerBuffered((-1,), (5,)), "decay by 0 to 1"),
    (lambda: IntegerBuffered((5,), (-1,)), "weights of 0 or more"),
    (lambda: to_coefficient(-0.1), "between 0 and 1"),
    (lambda: to_coefficient(1.1), "between 0 and 1"),
    (lambda: to_coefficient(math.nan), "between 0 and 1"),
    (lambda: to_coefficient(math.inf), "between 0 and 1"),
    # the sampler
    (lambda: KeyedDiscreteGaussian(KEY, 0, 1).vector(1, 15.99), OUTSIDE),
    (lambda: KeyedDiscreteGaussian(KEY, 0, 1).vector(1, 2.0**48), OUTSIDE),
    (lambda: KeyedDiscreteGaussian(KEY, 0, 1).vector(1, math.nan), OUTSIDE),
    (lambda: KeyedDiscreteGaussian(KEY, 0, 1).vector(1, math.inf), OUTSIDE),
    (lambda: KeyedDiscreteGaussian(KEY, 0, 1).vector(1, -16.0), OUTSIDE),
]
SLIPS_OF_CALLERS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: KeyedDiscreteGaussian(b"", 0, 1), ValueError, "32 bytes"),
    (lambda: KeyedDiscreteGaussian(bytes(16), 0, 1), ValueError, "32 bytes"),
    (lambda: extend_query_chain(b"short", b""), ValueError, "32 bytes"),
    (lambda: KeyedDiscreteGaussian(KEY, 2**32, 1), ValueError, "32 bits"),
    (lambda: KeyedDiscreteGaussian(KEY, 0, 1).vector(1, 16.0, node=2**16), ValueError, "outside"),
    (lambda: truncated(np.ones((1, 1)), 0, 1.0), ValueError, "2\\^53"),
    (lambda: truncated(np.ones((1, 1)), -1, 1.0), ValueError, "2\\^53"),
    (lambda: truncated(np.ones((1, 1)), 2**53, 1.0), ValueError, "2\\^53"),
    (lambda: unpack_state(b""), RunError, "state"),
    (lambda: unpack_state(STATE[:-1]), RunError, "state"),
    (lambda: unpack_state(STATE + b"x"), RunError, "state"),
    (lambda: unpack_state(b"other" + STATE), RunError, "state"),
]


@pytest.mark.parametrize(("ask", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_plans_and_parameters_without_an_exact_integer_form_are_refused(
    ask: Callable[[], object], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        ask()


@pytest.mark.parametrize(("ask", "error", "named"), SLIPS_OF_CALLERS, ids=[row[2] for row in SLIPS_OF_CALLERS])
def test_invalid_keys_norms_and_packed_states_raise_errors(
    ask: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        ask()


def test_growing_clips_fit_the_lattice_up_to_8191_rounds() -> None:
    assert fit_lattice(growing(8191)).norms(1)[0] >= 2**23


def test_one_value_and_rounds_without_records_have_a_lattice() -> None:
    plan = fit_lattice(run_of(INDEPENDENT, SIXTY, records=0, dimension=1))
    assert (plan.lattice.exponent, plan.max_output) == (-36, 0)


def test_buffers_at_the_edges_of_what_is_accepted_are_built() -> None:
    edges = (COEFFICIENT_ONE, 0)
    assert [IntegerBuffered(edges, edges[::-1], digits).digits for digits in (0, 24)] == [0, 24]
    assert IntegerBuffered((), ()).theta == ()


def test_a_last_zero_that_rounding_moves_a_little_below_0_is_0() -> None:
    theta, phi = (1.0, 2.0**-12), ((1.0 + 2.0**-8) * 2.0**-12, 0.0)
    assert -(2.0**-20) < rounded_zeros(make_integer_buffered(theta, phi))[-1] < 0.0
    form = BufferedToeplitz(1.0, theta, phi).integer(SIXTY)
    assert isinstance(form.strategy, IntegerBuffered)
    assert isinstance(form.mechanism, BufferedToeplitz)
    assert form.mechanism.phi[-1] == pytest.approx(max(0.0, rounded_zeros(form.strategy)[-1]))
