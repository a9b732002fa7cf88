"""A mechanism of one's own: its name, runs in floats, reading back, and refusals on integers."""

import math
import operator
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import fedpriv
from fedpriv.core import extensions
from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.noise.mechanism import Mechanism, MechanismState, Sensitivity
from fedpriv.noise.registry import (
    MECHANISMS,
    USER_MECHANISMS,
    MechanismOptions,
    add_mechanism,
    check_mechanism_claims,
    check_readable,
    lookup_mechanism_class,
    make_mechanism,
    mechanism_from_data,
)
from fedpriv.noise.series import Workload
from fedpriv.noise.toeplitz import BandedSquareRoot
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import FixedOrder, MinSeparation
from fedpriv.scenario.load import resolve_cell
from tests.attacks.guards import guard_for, random_records, scenario
from tests.conftest import small_tree
from tests.engines.test_every_mechanism import agreed, released_as_integers
from tests.noise.matrices import workload_of
from tests.noise.own import Echo

ECHO = {"name": "dp-ftrl", "mechanism": "echo", "clip": 1.0, "step": 0.1}
EXTENSION = ["tests.noise.own"]


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    before = dict(USER_MECHANISMS)
    add_mechanism(Echo)
    yield
    USER_MECHANISMS.clear()
    USER_MECHANISMS.update(before)


def cell_of(trust: str = "untrusted", **overrides: Any) -> Any:
    asked = {"algorithm": {**ECHO, "trust": trust}, "privacy": {"relation": "zero-out", "mu": 1.5}, **overrides}
    return resolve_cell(small_tree(**asked), "test")


# A name


@pytest.mark.parametrize("name", [*MECHANISMS, "auto"])
def test_nobody_replaces_a_mechanism_of_fedpriv(name: str) -> None:
    other = type("Other", (Echo,), {"name": name})
    with pytest.raises(InputError, match=f"add_mechanism: '{name}' is a mechanism of fedpriv"):
        add_mechanism(other)
    with pytest.raises(TypeError):
        MECHANISMS[name] = other  # type: ignore[index]
    assert mechanism_from_data({"name": "independent"}) == IndependentGaussian()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Echo(), "expected a class of mechanisms, found Echo"),
        (dict, "expected a class of mechanisms, found <class 'dict'>"),
        (type("Loud", (Echo,), {"name": "Echo"}), "has the name 'Echo'"),
        (type("Mute", (Echo,), {"words": ""}), "needed are `words`"),
        (type("Dash", (Echo,), {"name": "-echo"}), "without a dash in front"),
    ],
)
def test_invalid_mechanism_classes_are_refused_by_add_mechanism(kind: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        add_mechanism(kind)


def test_unknown_mechanism_name_is_refused_with_the_list_of_known_names() -> None:
    USER_MECHANISMS.clear()
    with pytest.raises(InputError, match="'independent', 'scheduled', 'tree'"):
        cell_of()
    with pytest.raises(InputError, match=r"ledger: mechanism 'echo' is none of independent, .* FEDPRIV_IMPORT"):
        mechanism_from_data(Echo().as_data())


def test_added_mechanisms_are_among_those_that_a_refusal_lists() -> None:
    with pytest.raises(InputError, match=r"'nothing': accepted are 'independent', .*, 'blt', 'echo'"):
        make_mechanism("nothing", workload_of(8), MechanismOptions())


def test_a_mechanism_that_is_added_outdates_what_is_cached_from_the_tables() -> None:
    before = extensions.table_revision()
    add_mechanism(Echo)
    assert extensions.table_revision() > before


def test_a_name_that_is_not_in_the_table_yet_imports_the_named_files(monkeypatch: pytest.MonkeyPatch) -> None:
    USER_MECHANISMS.clear()
    monkeypatch.setenv(extensions.IMPORT_VARIABLE, str(Path(__file__).with_name("own.py")))
    monkeypatch.setattr(extensions, "_imported_extensions", set(extensions._imported_extensions))
    for name in ("auto", "tree"):
        lookup_mechanism_class(name)
        assert not USER_MECHANISMS
    assert mechanism_from_data(Echo().as_data()).as_data() == Echo().as_data()


@dataclass(frozen=True)
class Noted(Echo):
    name: ClassVar[str] = "noted"
    notes: dict[str, float] = field(default_factory=dict)


def test_a_mechanism_that_is_read_back_alike_but_has_no_hash_is_refused() -> None:
    add_mechanism(Noted)
    check_readable(Echo(), workload_of(8), "dp-ftrl")
    assert mechanism_from_data(Noted().as_data()) == Noted()
    with pytest.raises(InputError, match="not what it is read as"):
        check_readable(Noted(), workload_of(8), "dp-ftrl")


@pytest.mark.parametrize(
    ("mechanism", "period"),
    [(Echo(0.5), None), (Echo(0.0), None), (BandedSquareRoot(0.5, 3), None), (BinaryTree(0.5, 3), 3)],
    ids=["decay", "no-decay", "bands", "period"],
)
def test_a_measured_certificate_is_accepted_and_one_that_is_lower_is_not(
    mechanism: Mechanism, period: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = workload_of(8, mechanism.decay, 4, period)  # type: ignore[attr-defined]
    honest = mechanism.certified(workload)
    check_mechanism_claims(mechanism, workload)
    monkeypatch.setattr(type(mechanism), "certified", lambda *_: honest._replace(value=0.999 * honest.value))
    with pytest.raises(InputError, match="its certificate says"):
        check_mechanism_claims(mechanism, workload)


@dataclass(frozen=True)
class Rows(Echo):
    """B from its rows, with a claimed sensitivity."""

    rows: tuple[tuple[float, ...], ...] = ()
    claimed: float = 1.0
    attained: float = math.inf
    least: float = 0.0

    @property
    def fresh_std(self) -> float:
        return self.least

    def certified(self, workload: Workload) -> Sensitivity:
        return Sensitivity(self.claimed, True, "claimed")

    def attained_sensitivity(self, workload: Workload) -> Sensitivity:
        return Sensitivity(self.attained, True, "claimed")

    def memory_vectors(self, workload: Workload) -> int:
        return len(self.rows)

    def noise(self, state: MechanismState, t: int, fresh: torch.Tensor) -> tuple[torch.Tensor, MechanismState]:
        vectors = (*state, fresh)
        total = sum(weight * vector for weight, vector in zip(self.rows[t - 1], vectors, strict=False))
        return torch.as_tensor(total), vectors


def rows_of(matrix: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, matrix.tolist()))


def test_ill_conditioned_noise_hides_no_sensitivity_from_the_measurement() -> None:
    """A solver that exchanges rows finds 1 % less here, and believes a certificate that is 0.5 % too low."""
    generator, rounds = np.random.default_rng(1), 40
    noise = np.tril(generator.normal(size=(rounds, rounds)))
    np.fill_diagonal(noise, np.abs(np.diag(noise)) + 0.01)
    exact = [[Fraction(value) for value in row] for row in noise.tolist()]
    column = list[Fraction]()
    for t, row in enumerate(exact):
        column.append((int(t == 0) - sum(map(operator.mul, row, column), Fraction(0))) / row[t])
    norm = math.sqrt(sum(value**2 for value in column))
    workload = workload_of(rounds, 0.0, rounds)
    assert measured_norm(noise) < 0.995 * norm
    check_mechanism_claims(Rows(rows=rows_of(noise), claimed=norm), workload)
    with pytest.raises(InputError, match="its certificate says"):
        check_mechanism_claims(Rows(rows=rows_of(noise), claimed=0.995 * norm), workload)


def measured_norm(noise: np.ndarray) -> float:
    return float(np.linalg.norm(np.linalg.solve(noise, np.eye(len(noise)))[:, 0]))


@pytest.mark.parametrize("order", [FixedOrder(6, 3), MinSeparation(6, 2, 3)], ids=["fixed", "separated"])
def test_a_sensitivity_beyond_floating_point_is_refused(order: FixedOrder | MinSeparation) -> None:
    noise = np.eye(6)
    noise[2, 1] = noise[4, 2] = noise[5, 2] = 1e200
    noise[5, 4] = 1.0
    workload = Workload(order, 0.0, np.ones(6))
    with np.errstate(all="ignore"), pytest.raises(InputError, match="is moved by inf"):
        check_mechanism_claims(Rows(rows=rows_of(noise), claimed=2.0), workload)


@pytest.mark.parametrize(
    ("claims", "words"), [({"least": math.nan}, "fresh_std"), ({"attained": math.nan}, "nan")]
)
def test_claims_that_are_no_numbers_are_refused(claims: dict[str, Any], words: str) -> None:
    mechanism = Rows(rows=rows_of(np.eye(4)), claimed=2.0)
    check_mechanism_claims(mechanism, workload_of(4, 0.0, 4))
    with pytest.raises(InputError, match=words):
        check_mechanism_claims(replace(mechanism, **claims), workload_of(4, 0.0, 4))


@dataclass(frozen=True)
class Parts(Echo):
    """Noise that says it is charged for two further parts of an increment, and charges nothing for them."""

    clipped_parts: tuple[float, ...] = (50.0, 50.0)


def test_parts_of_an_increment_are_charged_for_by_no_mechanism_of_ones_own() -> None:
    """An estimator with parts clipped to 50 was planned with the noise of its first part, clipped to 1."""
    check_mechanism_claims(Parts(clipped_parts=()), workload_of(8))
    with pytest.raises(InputError, match="clipped as a whole"):
        check_mechanism_claims(Parts(), workload_of(8))


# Runs


@pytest.mark.every(2)
@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_custom_mechanism_agrees_on_both_engines_and_survives_the_ledger(trust: str, epochs: int) -> None:
    cell = cell_of(trust, federation={"silos": 3, "rounds": 8, "epochs": epochs})
    assert all(isinstance(stream.mechanism, Echo) for stream in agreed(cell))


@pytest.mark.slow
def test_results_of_a_custom_mechanism_are_shown_and_recomputed_only_with_fedpriv_import(tmp_path: Path) -> None:
    tree = small_tree(algorithm={**ECHO, "trust": "trusted"}, privacy={"relation": "replace-one", "mu": 1.0})
    results = fedpriv.run(tree, out=str(tmp_path / "run"))
    assert results.cells[0].privacy.mu == pytest.approx(1.0, rel=1e-9)
    ours = {**os.environ, "FEDPRIV_IMPORT": str(Path(__file__).with_name("own.py"))}
    for environment, command in ((ours, ["show"]), (ours, ["privacy", "ledger"]), (None, ["privacy", "ledger"])):
        asked = [str(Path(sys.executable).with_name("fedpriv")), *command, str(tmp_path / "run")]
        found = subprocess.run(asked, capture_output=True, text=True, check=False, env=environment)
        if environment:
            assert found.returncode == 0, found.stderr
            assert {"show": "μ", "ledger": "Echo"}[command[-1]] in found.stdout
        else:
            assert found.returncode != 0
            assert "FEDPRIV_IMPORT" in found.stderr


# A guard


@pytest.mark.parametrize("allow", [{}, {"extensions": EXTENSION}])
def test_guard_refuses_to_add_noise_of_a_custom_mechanism(tmp_path: Path, allow: dict[str, Any]) -> None:
    guard = guard_for(tmp_path, *random_records(), **allow)
    with pytest.raises(RunError, match=r"algorithm.mechanism = 'echo' is none of fedpriv's, and those alone add"):
        guard.answer("run", scenario(algorithm=ECHO), 1, torch.zeros(7850, dtype=torch.float64))


def test_custom_mechanism_is_refused_on_integers() -> None:
    with pytest.raises(InputError, match="mechanism 'echo' is none of fedpriv's, and those alone run on integers"):
        released_as_integers(cell_of(), 2e4)
