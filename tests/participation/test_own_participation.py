"""A participation of one's own: its name, what it is charged, runs, a guard's permission, and reading back."""

import dataclasses
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import fedpriv
from fedpriv.claims.ledger import stream_from_data, stream_to_data
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import SamplingRandomness
from fedpriv.noise.series import Workload
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import FixedOrder, MinSeparation, ParticipationKeys
from fedpriv.participation.registry import (
    PARTICIPATIONS,
    USER_PARTICIPATIONS,
    ClientAvailability,
    add_participation,
    participation_from_data,
)
from fedpriv.participation.secret import BalancedSubsampling, PoissonSampling, RandomAllocation
from fedpriv.scenario.load import resolve_cell
from tests.attacks.guards import guard_for, random_records, scenario
from tests.conftest import small_tree
from tests.doc_pages import ROOT, blocks
from tests.engines.test_engines import run
from tests.participation.builders import coins, tabulate
from tests.participation.own import WithoutReplacement
from tests.silo.guarded import ZERO

OWN = WithoutReplacement.name
FEDERATION = {"silos": 3, "rounds": 8, "epochs": 2, "batch": 4, "sampling": OWN}


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    before = dict(USER_PARTICIPATIONS)
    add_participation(WithoutReplacement)
    yield
    USER_PARTICIPATIONS.clear()
    USER_PARTICIPATIONS.update(before)


def cell_of(trust: str = "untrusted", **overrides: Any) -> Any:
    algorithm = {"name": "dp-ftrl", "mechanism": "tree", "clip": 1.0, "step": 0.1, "trust": trust}
    sections = {"algorithm": algorithm, "privacy": {"relation": "zero-out", "mu": 1.5}, "federation": FEDERATION}
    return resolve_cell(small_tree(**{**sections, **overrides}), "test")


def named(name: Any, **members: Any) -> Any:
    return type("Other", (WithoutReplacement,), {"name": name, **members})


def available(keys: ParticipationKeys) -> ClientAvailability:
    return ClientAvailability.from_schedule(FixedOrder(40, 30), keys)


def annotated(member: str) -> Any:
    """A class whose annotation alone makes a fixed member a field, with the inherited member as its default."""
    return dataclasses.dataclass(frozen=True)(named("field", __annotations__={member: Any}))


REFUSED: list[tuple[Any, ...]] = [
    *((f"'{name}' is a participation of fedpriv", add_participation, named(name)) for name in PARTICIPATIONS),
    ("expected a subclass of DrawnOrder, found <class 'dict'>", add_participation, dict),
    ("expected a subclass of DrawnOrder", add_participation, FixedOrder),
    ("has the name 'Loud'", add_participation, named("Loud")),
    ("has the name 7", add_participation, named(7)),
    (r"has the name \['list'\]", add_participation, named(["list"])),
    ("needed are a `title`", add_participation, named("mute", title="")),
    ("has a 'max_rounds_per_record' of its own", add_participation, named("cheap", max_rounds_per_record=1)),
    ("has a 'select_rows' of its own", add_participation, named("own", select_rows=lambda *_: [])),
    ("has a 'secret' of its own", add_participation, named("hidden", secret=True)),
    ("has a 'secret' of its own", add_participation, annotated("secret")),
    ("has a 'distance' of its own", add_participation, annotated("distance")),
    ("has a 'max_batches' of its own", add_participation, named("small", max_batches=lambda self, t: 0)),
    ("no whole number of epochs", BalancedSubsampling, 10, 4),
    *(
        (line, kind, *numbers)
        for kind in (RandomAllocation, PoissonSampling)
        for line, *numbers in (("groups = 5: groups share out the 12 rounds", 12, 12, 5), ("groups", 12, 12, 0))
    ),
    *(("both are 1", kind, 12, 0) for kind in (RandomAllocation, PoissonSampling)),
    ("min_separation: sampling = .* needs it", available, ParticipationKeys()),
    ("min_separation: sampling = .* needs it", available, ParticipationKeys(min_separation=0)),
    ("groups = 2", available, ParticipationKeys(groups=2, min_separation=5)),
    ("cohorts of at most 1/31 of them", available, ParticipationKeys(min_separation=31)),
]
"""The line, and a call with its arguments that is refused by it."""


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal[0])
def test_invalid_participation_classes_and_parameters_are_refused(refusal: tuple[Any, ...]) -> None:
    line, call, *arguments = refusal
    with pytest.raises(InputError, match=line):
        call(*arguments)


def test_unknown_participation_name_is_refused_with_the_list_of_known_names() -> None:
    USER_PARTICIPATIONS.clear()
    with pytest.raises(InputError, match=r"federation\.sampling.*'fixed', .*, 'balanced' or 'available'"):
        cell_of()
    with pytest.raises(InputError, match=rf"ledger: sampling '{OWN}' is none of fixed, .* FEDPRIV_IMPORT"):
        participation_from_data(WithoutReplacement(8, 2, 1, 4).to_data())


def test_every_record_joins_k_rounds_and_rounds_have_the_expected_mean_size() -> None:
    """300 records in 4 of 12 rounds each, uniformly: 100 a round, with a deviation of 8.2 (5 of them)."""
    table = tabulate(WithoutReplacement(12, 4, 1, 3), 100, seed=3)
    assert (table.sum(1) == 4).all()
    assert np.abs(table.sum(0) - 100).max() < 41


def test_the_participation_of_the_page_draws_the_rounds_of_the_tested_one(tmp_path: Path) -> None:
    (code,) = [block for block in blocks(ROOT / "docs" / "participation.md") if block.language == "python"]
    (tmp_path / "own.py").write_text(code.text, encoding="utf-8")
    shown = runpy.run_path(str(tmp_path / "own.py"))["WithoutReplacement"](12, 4, 1, 3)
    assert (tabulate(shown, 100, seed=3) == tabulate(WithoutReplacement(12, 4, 1, 3), 100, seed=3)).all()


def test_custom_participation_is_charged_as_the_worst_pattern_of_k_rounds() -> None:
    order, clips = WithoutReplacement(12, 3, 1, 4), np.full(12, 2.0)
    known = BinaryTree().sensitivity(Workload(MinSeparation(12, 3, 1), 1.0, clips))
    assert BinaryTree().sensitivity(Workload(order, 1.0, clips)) == known
    assert known > BinaryTree().sensitivity(Workload(FixedOrder(12, 4), 1.0, clips))
    assert participation_from_data(json.loads(json.dumps(order.to_data()))) == order
    assert (order.truncate(2).rounds, order.truncate(2).max_rounds_per_record) == (2, 2)


@dataclass(frozen=True)
class Careless(WithoutReplacement):
    """Rounds as a test gives them."""

    name: ClassVar[str] = "careless"
    given: ClassVar[list[int]] = []

    def rounds_of(self, count: int, silo: int, coins: SamplingRandomness) -> np.ndarray:
        return np.tile(np.array(self.given), (count, 1))


@pytest.mark.parametrize("rounds", [[1, 4], [0, 4]])
def test_records_are_selected_in_drawn_rounds_that_meet_the_charged_limits(
    rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Careless, "given", rounds)
    assert Careless(8, 2, 3, 4).select_rows(4, 5, 0, lambda: coins(3)).tolist() == list(range(20))


@pytest.mark.parametrize("rounds", [[1, 3], [4, 4], [1, 4, 8], [9, 0], [-1, 4], [1.0, 4.0]])
def test_drawn_rounds_that_break_the_charged_limits_are_refused(
    rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Careless, "given", rounds)
    line = r'"careless": the rounds it draws .* at most 2 of 1 … 8 .*, 3 or more apart'
    with pytest.raises(RunError, match=line):
        Careless(8, 2, 3, 4).select_rows(4, 5, 0, lambda: coins(3))


@pytest.mark.parametrize("shape", [(20,), (20, 1, 2), ()])
def test_drawn_rounds_of_the_wrong_array_shape_are_refused(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Careless, "rounds_of", lambda *_: np.ones(shape, np.int64))
    with pytest.raises(RunError, match="the rounds it draws are not what is charged"):
        Careless(8, 2, 3, 4).select_rows(4, 5, 0, lambda: coins(3))


@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
@pytest.mark.parametrize("arithmetic", ["float", "integers"])
def test_custom_participation_runs_on_both_engines_and_survives_the_ledger(trust: str, arithmetic: str) -> None:
    cell = cell_of(trust, run__arithmetic=arithmetic)
    (inprocess,), _ = run("inprocess", cell)
    if arithmetic == "float":
        (vectorized,), _ = run("vectorized", cell)
        ours, theirs = vectorized.cell_outcome.model, inprocess.cell_outcome.model
        rounding = 1e-3 if trust == "secure-aggregation" else 1e-9
        np.testing.assert_allclose(ours, theirs, atol=rounding * np.linalg.norm(theirs))
    for stream in inprocess.cell_outcome.releases:
        assert isinstance(stream.schedule, WithoutReplacement)
        assert stream.mu == pytest.approx(1.5, rel=1e-6)
        assert stream_from_data(json.loads(json.dumps(stream_to_data(stream)))) == stream


def test_participation_whose_data_do_not_restore_it_is_refused() -> None:
    @dataclass(frozen=True)
    class Forgetful(WithoutReplacement):
        name: ClassVar[str] = "forgetful"

        def to_data(self) -> dict[str, Any]:
            return {**super().to_data(), "max_participations": 1}

    add_participation(Forgetful)
    with pytest.raises(InputError, match='"forgetful": what it writes'):
        _ = cell_of(federation={**FEDERATION, "sampling": "forgetful"}).schedule


@pytest.mark.parametrize(
    ("rounds", "rounds_per_epoch", "reason"),
    [
        (7, 4, "7 rounds and 4 an epoch, and the scenario has 8 and 4"),
        (8, 5, "8 rounds and 5 an epoch, and the scenario has 8 and 4"),
        (8, 4, "its from_schedule makes a WithoutReplacement"),
    ],
)
def test_a_participation_has_the_scenarios_rounds(rounds: int, rounds_per_epoch: int, reason: str) -> None:
    """Gains: a run of 8 rounds that is charged as one of 7."""

    def from_schedule(kind: Any, *_: Any) -> Any:
        kind = WithoutReplacement if (rounds, rounds_per_epoch) == (8, 4) else kind
        return kind(rounds, 2, 1, rounds_per_epoch)

    add_participation(named("other", from_schedule=classmethod(from_schedule)))
    with pytest.raises(InputError, match=f'sampling = "other": {reason}'):
        _ = cell_of(federation={**FEDERATION, "sampling": "other"}).schedule


@pytest.mark.slow
def test_ledger_of_a_custom_participation_is_recomputed_only_with_fedpriv_import(tmp_path: Path) -> None:
    tree = small_tree(federation=FEDERATION, privacy={"relation": "replace-one", "mu": 1.0})
    results = fedpriv.run(tree, out=str(tmp_path / "run"))
    assert results.cells[0].privacy.mu == pytest.approx(1.0, rel=1e-9)
    ours = {**os.environ, "FEDPRIV_IMPORT": str(Path(__file__).with_name("own.py"))}
    for environment, reads in ((ours, True), (dict(os.environ), False)):
        command = [str(Path(sys.executable).with_name("fedpriv")), "privacy", "ledger", str(tmp_path / "run")]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert (result.returncode == 0) == reads, result.stderr
        assert ("FEDPRIV_IMPORT" in result.stderr) != reads


def test_guard_runs_a_custom_participation_only_if_its_extension_is_allowed(tmp_path: Path) -> None:
    code = scenario(federation={**FEDERATION, "batch": 2})
    USER_PARTICIPATIONS.clear()
    (tmp_path / "without").mkdir()
    guard = guard_for(tmp_path / "without", *random_records())
    with pytest.raises(RunError, match=rf"federation.sampling = '{OWN}' is none of fedpriv's"):
        guard.answer("run", code, 1, ZERO)
    add_participation(WithoutReplacement)  # as importing its module once more would
    guard = guard_for(tmp_path, *random_records(), extensions=["tests.participation.own"])
    releases = [guard.answer("run", code, t, ZERO) for t in range(1, 9)]
    assert len({release.numpy().tobytes() for release in releases}) == 8
    assert torch.equal(guard.answer("run", code, 8, ZERO), releases[-1])
