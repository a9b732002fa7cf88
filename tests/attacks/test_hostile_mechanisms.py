"""A mechanism whose class is wrong about itself: its certificate, its integers, its state, or all of them at once.

Before, nothing but fedpriv's own mechanisms ran.  What a class says of itself is compared with what it streams; on
integers it is not even used.
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
from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.diagonal import IndependentGaussian, IntegerPrefix, IntegerScheduled
from fedpriv.noise.integers.fixed_point import ONE
from fedpriv.noise.integers.strategies import Factored, Lattice
from fedpriv.noise.measured import check_noise, measured_form
from fedpriv.noise.mechanism import Blocks, Sensitivity
from fedpriv.noise.registry import ADDED, add_mechanism, integer_form
from fedpriv.noise.toeplitz import IntegerBanded
from fedpriv.noise.tree import IntegerTree
from fedpriv.noise.workload import Workload
from fedpriv.papers.table import ALGORITHMS
from fedpriv.participation.orders import Separated
from tests.attacks.guards import guard_for, random_records, scenario
from tests.conftest import small_tree
from tests.noise.integers.members import PERIODIC, SIMPLE, UNITS, exact_form, simple, workload_of
from tests.noise.own import Echo

ECHO = {"name": "dp-ftrl", "mechanism": "echo", "clip": 1.0, "step": 0.1}
EXTENSION = ["tests.noise.own"]


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    before, rows = dict(ADDED), dict(ALGORITHMS)
    yield
    for table, rest in ((ADDED, before), (ALGORITHMS, rows)):
        table.clear()
        table.update(rest)  # type: ignore[arg-type]


def wrong(**members: Any) -> Echo:
    """An `Echo` with something else in its place, under the name that a policy lists."""
    kind = type("Wrong", (Echo,), members)
    add_mechanism(kind)
    return kind()  # type: ignore[no-any-return]


def whole(rounds: int, passes: int = 1) -> Workload:
    return workload_of(rounds, 1.0, passes, clips=np.full(rounds, 1000.0))


class Small(Factored):
    """What a class could say of its own integers."""

    def certified(self, lattice: Lattice) -> float:
        return 1e-9


class Loud(IntegerBanded):
    """Ten times as much of every sum as C says."""

    def step(self, state: Any, t: int, sums: Any) -> Any:
        return super().step(state, t, 10 * sums)


def silent(_self: Echo, state: Any, t: int, fresh: torch.Tensor) -> Any:
    """No noise of its own after round 1."""
    return (fresh if t == 1 else torch.zeros_like(fresh)), ()


WRONG_IN_FLOATS: dict[str, tuple[dict[str, Any], str]] = {
    "a small certificate": (
        {"certified": lambda _self, _workload: Sensitivity(0.1, True, "so I say")},
        "its certificate says that a record moves C s by 0.1 at most, and what it streams is moved by",
    ),
    "a small count beside it": (
        {"counted": lambda _self, _workload: Sensitivity(0.1, True, "so I count")},
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
def test_a_class_that_is_wrong_about_its_noise_is_refused_before_round_1(
    name: str, passes: int, tmp_path: Path
) -> None:
    members, words = WRONG_IN_FLOATS[name]
    mechanism = wrong(**members)
    with pytest.raises(InputError, match=words):
        check_noise(mechanism, workload_of(8, 1.0, passes))
    tree = small_tree(
        algorithm={**ECHO, "trust": "untrusted"},
        privacy={"relation": "zero-out", "mu": 1.0},
        federation={"silos": 3, "rounds": 8, "epochs": passes},
    )
    with pytest.raises(InputError, match=words):
        fedpriv.run(tree, out=tmp_path)


WRONG_INTEGERS: dict[str, tuple[Any, str]] = {
    "another C": (
        lambda self, workload: Factored(IntegerPrefix(ONE), self, workload),
        "its noise and its integer half are no factorization",
    ),
    "a C of less": (
        lambda self, workload: Factored(IntegerBanded(()), self, workload),
        "its noise and its integer half are no factorization",
    ),
    "a step of its own": (
        lambda self, workload: Factored(Loud((ONE // 4,)), self, workload),
        "its integer half has a strategy of its own",
    ),
    "another's noise": (
        lambda _self, workload: Factored(IntegerPrefix(ONE), IndependentGaussian(), workload),
        "the mechanism of its integer half is a IndependentGaussian",
    ),
    "another decay": (
        lambda self, asked: Factored(IntegerBanded((ONE // 4,)), self, dataclasses.replace(asked, decay=0.5)),
        "its integer half is for decay = 0.5, and here it is 1.0",
    ),
    "no form": (lambda _self, _workload: None, "its integer half has a strategy of its own"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_INTEGERS)
def test_integers_that_are_not_those_of_the_noise_are_refused(name: str) -> None:
    form, words = WRONG_INTEGERS[name]
    with pytest.raises(InputError, match=words):
        integer_form(wrong(integer=form), whole(8))


def test_integers_that_change_when_asked_again_are_refused() -> None:
    shares = iter([ONE // 4, ONE // 8])
    mechanism = wrong(integer=lambda self, w: Factored(IntegerBanded((next(shares),)), self, w))
    with pytest.raises(InputError, match="made once more of what it gave, is another one"):
        integer_form(mechanism, whole(8))


@pytest.mark.parametrize("passes", [1, 3])
def test_what_a_form_says_of_its_own_sensitivity_is_not_asked(passes: int) -> None:
    """A guard that believed it would add 10^12 times too little noise."""
    workload = whole(12, passes)
    mine = wrong(
        integer=lambda self, asked: Small(IntegerBanded((ONE // 4,)), self, asked, spread=Fraction(1, 10**9))
    )
    form = integer_form(mine, workload)
    assert form.certified(UNITS) == pytest.approx(Echo().sensitivity(workload), rel=1e-9)
    assert form.certified(UNITS) >= Echo().sensitivity(workload) * (1 - 1e-12)
    assert form.spread == 1
    assert form.part_clips(1) == (1000.0,)


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("name", [each for each in SIMPLE if not each.startswith("banded")])
def test_what_is_measured_is_what_fedprivs_own_certificates_prove(name: str, decay: float) -> None:
    for passes in (1, 3):
        for period in (None, 5) if name in PERIODIC else (None,):
            workload = workload_of(24, decay, passes, np.linspace(500.0, 1500.0, 24).round(), period)
            exact = exact_form(name, decay, workload)
            proven = exact.certified(UNITS) * float(exact.spread)
            measured = measured_form(simple(name, decay, period), workload).certified(UNITS)
            assert proven * (1 - 1e-7) <= measured <= proven * (1 + 1e-6)


def test_separated_participations_are_bounded() -> None:
    workload = Workload(Separated(12, 3, 4), 1.0, np.full(12, 1000.0))
    form = integer_form(wrong(), workload)
    worst = max(
        float(np.linalg.norm(sum(1000.0 * np.eye(13)[i] + 250.0 * np.eye(13)[i + 1] for i in held)[:12]))
        for held in ([0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11], [0, 5, 10])
    )
    assert form.certified(UNITS) >= worst * (1 - 1e-12)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (lambda: IntegerPrefix(-1), "decay = -1 / 2"),
        (lambda: IntegerTree(ONE + 1), "decay = 2147483649 / 2"),
        (lambda: IntegerScheduled(2 * ONE, sizes=(1.0,)), "sums decay by a factor from 0 to 1"),
        (lambda: IntegerBanded((ONE // 4, ONE // 2)), "never rise"),
    ],
)
def test_numbers_that_a_strategys_proof_does_not_cover_make_no_strategy(strategy: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        strategy()


def test_runs_that_are_too_long_to_be_measured_and_secret_ones_are_refused(tmp_path: Path) -> None:
    for refused in (check_noise, integer_form):
        with pytest.raises(InputError, match="for at most 2000 rounds; here are 2001"):
            refused(wrong(), workload_of(2001, 1.0))
    tree = small_tree(
        algorithm={**ECHO, "trust": "untrusted"},
        privacy={"relation": "zero-out", "epsilon": 4.0, "delta": 1e-5},
        federation={"silos": 3, "rounds": 8, "sampling": "poisson"},
    )
    wrong(blocks=lambda _self, workload: Blocks(1, np.full(workload.rounds, 1e-3)))
    with pytest.raises(
        InputError, match="secret participation is accounted for with fedpriv's own mechanisms only"
    ):
        fedpriv.run(tree, out=tmp_path)


# A guard


def test_a_permitted_row_brings_no_mechanism_that_is_not_permitted_itself(tmp_path: Path) -> None:
    fedpriv.add_algorithm(
        dataclasses.replace(ALGORITHMS["dp-sgd"], name="echo-sgd", mechanism=lambda *_: Echo(decay=0.0))
    )
    tree = scenario(algorithm={"name": "dp-sgd", "clip": 1.0, "step": 0.1}).replace('"dp-sgd"', '"echo-sgd"')
    zero, allowed = torch.zeros(7850, dtype=torch.float64), {"extensions": EXTENSION, "algorithms": ["echo-sgd"]}
    (tmp_path / "without").mkdir()
    with pytest.raises(
        RunError, match=r"the noise of 'echo-sgd', 'echo', is none of fedpriv's, and allow.mechanisms"
    ):
        guard_for(tmp_path / "without", *random_records(), **allowed).answer("run", tree, 1, zero)
    guard = guard_for(tmp_path, *random_records(), **allowed, mechanisms=["echo"])
    assert guard.answer("run", tree, 1, zero).shape == (7850,)


@pytest.mark.parametrize("name", ["a small certificate", "another C", "a step of its own", "another's noise"])
def test_a_guard_refuses_a_permitted_mechanism_that_is_wrong_and_charges_nothing(
    tmp_path: Path, name: str
) -> None:
    members = WRONG_IN_FLOATS[name][0] if name in WRONG_IN_FLOATS else {"integer": WRONG_INTEGERS[name][0]}
    guard = guard_for(tmp_path, *random_records(), extensions=EXTENSION, mechanisms=["echo"])
    wrong(**members)
    zero = torch.zeros(7850, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises(RunError, match="mechanism 'echo': "):
            guard.answer("run", scenario(algorithm=ECHO), 1, zero)


def test_a_guard_charges_what_its_own_integers_cost(tmp_path: Path) -> None:
    """A form that says next to nothing of itself gets the noise, and costs the budget, of an honest one."""
    stds = []
    for number, members in enumerate(
        [{}, {"integer": lambda self, w: Small(IntegerBanded((ONE // 4,)), self, w, spread=Fraction(1, 10**9))}]
    ):
        (tmp_path / str(number)).mkdir()
        guard = guard_for(tmp_path / str(number), *random_records(), extensions=EXTENSION, mechanisms=["echo"])
        wrong(**members)
        asked = scenario(algorithm=ECHO)
        zero = torch.zeros(7850, dtype=torch.float64)
        stds.append(float(guard.answer("run", asked, 1, zero).std()))
    assert stds[1] == pytest.approx(stds[0], rel=0.05)
