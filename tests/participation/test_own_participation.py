"""A participation of one's own: its name, what it is charged, runs, a guard's permission, and reading back."""

import json
import os
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
from fedpriv.core.random import SamplingRandomness, simulation_noise
from fedpriv.noise.series import Workload
from fedpriv.noise.tree import BinaryTree
from fedpriv.participation.orders import FixedOrder, MinSeparation
from fedpriv.participation.registry import (
    PARTICIPATIONS,
    USER_PARTICIPATIONS,
    DrawnOrder,
    add_participation,
    participation_from_data,
)
from fedpriv.scenario.load import resolve_cell
from tests.attacks.guards import guard_for, random_records, scenario
from tests.conftest import small_tree
from tests.engines.test_engines import run
from tests.participation.own import WithoutReplacement

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
    privacy = {"relation": "zero-out", "mu": 1.5}
    return resolve_cell(
        small_tree(**{"algorithm": algorithm, "privacy": privacy, "federation": FEDERATION, **overrides}), "test"
    )


# A name


@pytest.mark.parametrize("name", list(PARTICIPATIONS))
def test_nobody_replaces_a_participation_of_fedpriv(name: str) -> None:
    with pytest.raises(InputError, match=f"add_participation: '{name}' is a participation of fedpriv"):
        add_participation(type("Other", (WithoutReplacement,), {"name": name}))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (dict, "expected a subclass of DrawnOrder, found <class 'dict'>"),
        (FixedOrder, "expected a subclass of DrawnOrder"),
        (type("Loud", (WithoutReplacement,), {"name": "Loud"}), "has the name 'Loud'"),
        (type("Mute", (WithoutReplacement,), {"name": "mute", "title": ""}), "needed are a `title`"),
        (
            type("Cheap", (WithoutReplacement,), {"name": "cheap", "max_rounds_per_record": 1}),
            "has a 'max_rounds_per_record' of its own",
        ),
        (
            type("Own", (WithoutReplacement,), {"name": "own", "select_rows": lambda *_: []}),
            "has a 'select_rows' of its own",
        ),
        (type("Hidden", (WithoutReplacement,), {"name": "hidden", "secret": True}), "has a 'secret' of its own"),
    ],
)
def test_a_class_that_is_not_charged_by_fedpriv_gets_no_name(kind: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        add_participation(kind)


def test_a_name_that_nobody_added_names_those_there_are() -> None:
    USER_PARTICIPATIONS.clear()
    with pytest.raises(InputError, match=r"federation\.sampling.*'fixed', .*, 'balanced' or 'available'"):
        cell_of()
    with pytest.raises(InputError, match=rf"ledger: sampling '{OWN}' is none of fixed, .* FEDPRIV_IMPORT"):
        participation_from_data(WithoutReplacement(8, 2, 1, 4).to_data())


# Rounds, and their price


def rounds_of(order: DrawnOrder, batch: int = 50) -> np.ndarray:
    """Which record is read in which round, (rounds, records)."""
    coins = simulation_noise(3, "float32").sampling_randomness()
    found = np.zeros((order.rounds, order.rounds_per_epoch * batch), bool)
    for t in range(1, order.rounds + 1):
        found[t - 1, order.select_rows(t, batch, 0, lambda: coins)] = True
    return found


def test_every_record_is_in_k_rounds_and_a_round_has_its_batch_in_the_mean() -> None:
    """300 records in 4 of 12 rounds each, uniformly: 100 a round, with a deviation of 8.2 (5 of them)."""
    found = rounds_of(WithoutReplacement(12, 4, 1, 3), batch=100)
    assert (found.sum(0) == 4).all()
    assert np.abs(found.sum(1) - 100).max() < 41


def test_it_is_charged_as_any_pattern_of_so_many_rounds() -> None:
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


@pytest.mark.parametrize(
    ("given", "refused"),
    [([1, 4], False), ([0, 4], False), ([1, 3], True), ([4, 4], True), ([1, 4, 8], True), ([9, 0], True),
     ([-1, 4], True), ([1.0, 4.0], True)],
)  # fmt: skip
def test_rounds_that_are_not_charged_are_not_read(given: list[int], refused: bool) -> None:
    order = Careless(8, 2, 3, 4)
    Careless.given = given
    if not refused:
        assert order.select_rows(
            4, 5, 0, lambda: simulation_noise(3, "float32").sampling_randomness()
        ).tolist() == list(range(20))
        return
    with pytest.raises(
        RunError, match=r'"careless": the rounds it draws .* at most 2 of 1 … 8 .*, 3 or more apart'
    ):
        order.select_rows(4, 5, 0, lambda: simulation_noise(3, "float32").sampling_randomness())


# Runs


@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
@pytest.mark.parametrize("arithmetic", ["float", "integers"])
def test_it_runs_on_both_engines_and_is_read_back(trust: str, arithmetic: str) -> None:
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


def test_what_a_run_writes_has_to_be_what_is_read() -> None:
    @dataclass(frozen=True)
    class Forgetful(WithoutReplacement):
        name: ClassVar[str] = "forgetful"

        def to_data(self) -> dict[str, Any]:
            return {**super().to_data(), "max_participations": 1}

    add_participation(Forgetful)
    with pytest.raises(InputError, match='"forgetful": what it writes'):
        _ = cell_of(federation={**FEDERATION, "sampling": "forgetful"}).schedule


@pytest.mark.slow
def test_a_folder_is_shown_and_its_claim_computed_again_where_its_file_is_named(tmp_path: Path) -> None:
    tree = small_tree(federation=FEDERATION, privacy={"relation": "replace-one", "mu": 1.0})
    results = fedpriv.run(tree, out=str(tmp_path / "run"))
    assert results.cells[0].privacy.mu == pytest.approx(1.0, rel=1e-9)
    ours = {**os.environ, "FEDPRIV_IMPORT": str(Path(__file__).with_name("own.py"))}
    for environment, reads in ((ours, True), (dict(os.environ), False)):
        asked = [str(Path(sys.executable).with_name("fedpriv")), "privacy", "ledger", str(tmp_path / "run")]
        found = subprocess.run(asked, capture_output=True, text=True, check=False, env=environment)
        assert (found.returncode == 0) == reads, found.stderr
        assert ("FEDPRIV_IMPORT" in found.stderr) != reads


# A guard


def test_a_guard_answers_with_permission_only(tmp_path: Path) -> None:
    asked, zero = scenario(federation={**FEDERATION, "batch": 2}), torch.zeros(7850, dtype=torch.float64)
    USER_PARTICIPATIONS.clear()
    (tmp_path / "without").mkdir()
    guard = guard_for(tmp_path / "without", *random_records())
    with pytest.raises(RunError, match=rf"federation.sampling = '{OWN}' is none of fedpriv's"):
        guard.answer("run", asked, 1, zero)
    add_participation(WithoutReplacement)  # as importing its module once more would
    guard = guard_for(tmp_path, *random_records(), extensions=["tests.participation.own"])
    releases = [guard.answer("run", asked, t, zero) for t in range(1, 9)]
    assert len({release.numpy().tobytes() for release in releases}) == 8
    assert torch.equal(guard.answer("run", asked, 8, zero), releases[-1])
