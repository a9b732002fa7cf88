"""A mechanism whose class is wrong about itself: its certificate, its noise, its state, or all of them at once.

What a class says of itself is compared with what it streams; on integers, in guards, no class of others runs.
"""

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedpriv
from fedpriv.accounting.gaussian import RELATION_FACTOR
from fedpriv.core.errors import InputError
from fedpriv.noise.diagonal import IntegerPrefix, IntegerScheduled
from fedpriv.noise.integers.fixed_point import COEFFICIENT_ONE
from fedpriv.noise.integers.strategies import IntegerStrategy
from fedpriv.noise.mechanism import ColumnBlocks, Columns, Factorization, Sensitivity
from fedpriv.noise.registry import USER_MECHANISMS, add_mechanism, check_mechanism_claims, integer_form
from fedpriv.noise.sensitivity import of_columns
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import IntegerBanded
from fedpriv.noise.tree import IntegerTree
from fedpriv.papers.table import ALGORITHMS
from fedpriv.plan.plan import Plan
from tests.attacks.guards import guard_for, random_records, scenario, zeros
from tests.conftest import small_tree
from tests.noise.integers.members import PERIODIC, SIMPLE, UNITS, exact_form, workload_of
from tests.noise.integers.test_strategies import SMALL_ROOTS
from tests.noise.own import Echo
from tests.silo.guarded import find_run, refused

ECHO = {"name": "dp-ftrl", "mechanism": "echo", "clip": 1.0, "step": 0.1}
EXTENSION = ["tests.noise.own"]


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    before, rows = dict(USER_MECHANISMS), dict(ALGORITHMS)
    yield
    for table, rest in ((USER_MECHANISMS, before), (ALGORITHMS, rows)):
        table.clear()
        table.update(rest)  # type: ignore[arg-type]


def wrong(**members: Any) -> Echo:
    """An `Echo` with something else in its place, under the name that a policy lists."""
    kind = type("Wrong", (Echo,), members)
    add_mechanism(kind)
    return kind()  # type: ignore[no-any-return]


def silent(_self: Echo, state: Any, t: int, fresh: torch.Tensor) -> Any:
    """No noise of its own after round 1."""
    return (fresh if t == 1 else torch.zeros_like(fresh)), ()


WRONG_IN_FLOATS: dict[str, tuple[dict[str, Any], str]] = {
    "a small certificate": (
        {"certified": lambda _self, _workload: Sensitivity(0.1, True, "so I say")},
        "its certificate says that a record moves C s by 0.1 at most, and what it streams is moved by",
    ),
    "a small count beside it": (
        {"attained_sensitivity": lambda _self, _workload: Sensitivity(0.1, True, "so I count")},
        "its certificate says that a record moves C s by 0.1 at most",
    ),
    "little noise": (
        {"noise": lambda self, state, t, fresh: Echo.noise(self, state, t, 0.1 * fresh), "fresh_std": 0.1},
        "its certificate says",
    ),
    "no noise": ({"noise": silent}, "row t of B z adds a multiple above 0 of z_t"),
    "noise that is less fresh": ({"fresh_std": 5.0}, "fresh_std = 5, and a round adds 1"),
    "a long state": ({"memory_vectors": lambda _self, _workload: 1}, "memory_vectors = 1, and a state holds 2"),
    "several vectors a round": ({"draws": lambda _self, _t: 2}, "takes one vector a round"),
    "a claim for slow queries": ({"movement": 0.1}, "for any queries and any loss"),
    "a claim for smooth losses": ({"assumption": "It is smooth."}, "for any queries and any loss"),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", WRONG_IN_FLOATS)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_mechanism_class_with_false_claims_about_its_noise_is_refused_before_round_1(
    name: str, passes: int, tmp_path: Path
) -> None:
    members, words = WRONG_IN_FLOATS[name]
    mechanism = wrong(**members)
    with pytest.raises(InputError, match=words):
        check_mechanism_claims(mechanism, workload_of(8, 1.0, passes))
    tree = small_tree(
        algorithm={**ECHO, "trust": "untrusted"},
        privacy={"relation": "zero-out", "mu": 1.0},
        federation={"silos": 3, "rounds": 8, "epochs": passes},
    )
    with pytest.raises(InputError, match=words):
        fedpriv.run(tree, out=tmp_path)


def test_a_third_party_mechanism_class_is_refused_on_integers() -> None:
    """A guard that believed it would add 10^9 times too little noise."""
    factor = Fraction(1, 10**9)
    mine = wrong(
        integer=lambda self, asked: Factorization(IntegerBanded(()), self, asked, sensitivity_factor=factor)
    )
    with pytest.raises(InputError, match="mechanism 'echo' is none of fedpriv's, and those alone run on integers"):
        integer_form(mine, workload_of(8, 1.0))


def measured_sensitivity(strategy: IntegerStrategy, workload: Workload) -> float:
    """Of C over its noises' scales, whose columns are what one integer of 2^40 a round makes of it."""
    state, c = strategy.initial_state(), np.zeros((workload.rounds,) * 2)
    for t in range(1, workload.rounds + 1):
        sums = np.zeros(workload.rounds, np.int64)
        sums[t - 1] = 1 << 40
        output, state = strategy.step(state, t, sums)
        c[t - 1] = output / (strategy.noise_scales(t)[0] * 2.0**40)
    return of_columns(Columns(np.sum(c**2, axis=0), lambda held: c[:, held].T @ c[:, held]), workload).value


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("name", [each for each in SIMPLE if not each.startswith("banded")])
def test_measured_sensitivities_of_built_in_mechanisms_equal_their_certificates(name: str, decay: float) -> None:
    for passes in (1, 3):
        for period in (None, 5) if name in PERIODIC else (None,):
            workload = workload_of(24, decay, passes, np.linspace(500.0, 1500.0, 24).round(), period)
            exact = exact_form(name, decay, workload)
            proven = exact.sensitivity_in_units(UNITS) * float(exact.sensitivity_factor)
            measured = measured_sensitivity(exact.strategy, exact.workload)
            assert proven * (1 - 1e-7) <= measured <= proven * (1 + 1e-6)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (lambda: IntegerPrefix(-1), "decay = -1 / 2"),
        (lambda: IntegerTree(COEFFICIENT_ONE + 1), "decay = 2147483649 / 2"),
        (lambda: IntegerScheduled(2 * COEFFICIENT_ONE, sizes=(1.0,)), "sums decay by a factor from 0 to 1"),
        (lambda: IntegerBanded((COEFFICIENT_ONE // 4, COEFFICIENT_ONE // 2)), "never rise"),
    ],
)
def test_integer_strategies_refuse_coefficients_outside_their_proofs(strategy: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        strategy()


def test_a_third_party_mechanism_is_refused_for_long_runs_and_secret_schedules(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="for at most 2000 rounds; here are 2001"):
        check_mechanism_claims(wrong(), workload_of(2001, 1.0))
    tree = small_tree(
        algorithm={**ECHO, "trust": "untrusted"},
        privacy={"relation": "zero-out", "epsilon": 4.0, "delta": 1e-5},
        federation={"silos": 3, "rounds": 8, "sampling": "poisson"},
    )
    wrong(blocks=lambda _self, workload: ColumnBlocks(1, np.full(workload.rounds, 1e-3)))
    line = "secret participation is accounted for with fedpriv's own mechanisms only"
    with pytest.raises(InputError, match=line):
        fedpriv.run(tree, out=tmp_path)


# A guard


@pytest.mark.parametrize(
    ("privacy", "place"), [({"mu": 2.0}, "run on integers"), ({"mode": "none"}, "add noise in a guard")]
)
def test_permitting_a_third_party_algorithm_does_not_permit_its_mechanism(
    tmp_path: Path, privacy: dict[str, Any], place: str
) -> None:
    """A run without noise has no integers to refuse it, and would run the class all the same."""
    row = dataclasses.replace(ALGORITHMS["dp-sgd"], name="echo-sgd", mechanism=lambda *_: Echo(decay=0.0))
    fedpriv.add_algorithm(row)
    algorithm = {"name": "dp-sgd", "clip": 1.0, "step": 0.1}
    text = scenario(algorithm=algorithm, privacy={"relation": "replace-one", **privacy})
    allow: dict[str, Any] = {"extensions": EXTENSION, "algorithms": ["echo-sgd"], "noise_free": "mode" in privacy}
    guard = guard_for(tmp_path, *random_records(), **allow)
    reason = rf"'echo'.* is none of fedpriv's, and those alone {place}"
    refused(guard, reason, text.replace('"dp-sgd"', '"echo-sgd"'))


def displacement(plan: Plan) -> float:
    """How far a record of one pass moves C s, over σ, by the strategy that the silo itself streams."""
    exact, farthest = plan.required_exact_plan, 0.0
    strategy, rounds = exact.inputs.factorization.strategy, plan.schedule.rounds
    for first in range(1, rounds + 1):
        state, outputs = strategy.initial_state(), []
        for t in range(1, rounds + 1):
            output, state = strategy.step(state, t, np.full(1, exact.norms(t)[0] * (t == first)))
            outputs.append(float(output[0]))
        farthest = max(farthest, float(np.linalg.norm(outputs)))
    return RELATION_FACTOR[plan.relation] * farthest / exact.claim.sigma


@pytest.mark.parametrize(("theta", "phi"), SMALL_ROOTS)
def test_guarantee_a_guard_charges_the_buffers_that_it_streams(
    theta: tuple[float, ...], phi: tuple[float, ...], tmp_path: Path
) -> None:
    """Gains, if it fails: more than the budget, by a server's roots whose zeros are next to 0."""
    noise = {"name": "dp-ftrl", "mechanism": "blt", "theta": theta, "phi": phi, "clip": 1.0, "step": 0.1}
    guard = guard_for(tmp_path, *random_records())
    guard.answer("run", cell := scenario(algorithm=noise), 1, zeros())
    plan = guard._admission.admit(guard._canonicalize(cell)).plan
    assert displacement(plan) <= find_run(guard).mu * (1.0 + 1e-12)
