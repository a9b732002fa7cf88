"""What a guard says of a run before it is asked for a round, and what it spends for that: nothing."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fedpriv.core.errors import RunError
from fedpriv.protocol.messages import PROTOCOL_VERSION
from fedpriv.silo.daemon import RequestQueue
from fedpriv.silo.guard import Guard
from fedpriv.silo.policy import read_policy
from fedpriv.silo.shard import ShardViews
from tests.silo.evaluated import SCENARIO, guards_of, write_tested
from tests.silo.guarded import CELL, ZERO, cell_json, guard_of, write_silo


def files(folder: Path) -> dict[str, bytes]:
    """Every byte of ledgers, marks and journals, but for what SQLite writes in a journal that it takes back."""
    kept = [*folder.glob("ledger-*.sqlite"), *folder.glob("ledger-*.mark")]
    assert len(kept) >= 2
    return {path.name: hashlib.sha256(path.read_bytes()).digest() for path in kept}


@pytest.mark.parametrize(
    ("cell", "allow"),
    [
        (CELL, {}),
        (cell_json(algorithm__trust="secure-aggregation"), {"trust": "secure-aggregation"}),
        (cell_json(privacy={"relation": "replace-one", "mu": 5.0}), {}),
        (cell_json(privacy={"relation": "zero-out", "mu": 1.0}), {}),
        (CELL, {"rounds": 2}),
        ("{", {}),
    ],
)
def test_a_question_whether_a_run_would_be_refused_charges_opens_and_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str, allow: dict[str, Any]
) -> None:
    """Asked for ever, by a server that picks every scenario, before and while a run is under way."""
    guard = guard_of(write_silo(tmp_path, **allow))
    monkeypatch.setattr(ShardViews, "records", lambda *_: pytest.fail("the records were read"))
    monkeypatch.setattr("fedpriv.silo.guard.system_key", lambda: pytest.fail("a key was made"))
    before = files(tmp_path)
    said = {answered(guard, f"run-{number}", cell) for number in range(3)}
    assert len(said) == 1
    assert files(tmp_path) == before
    assert guard._ledger.list_runs() == []


def answered(guard: Guard, run: str, cell: str) -> str:
    try:
        guard.preview_admission(run, cell)
    except RunError as error:
        return str(error)
    return "yes"


def test_a_run_is_agreed_to_exactly_if_its_first_round_would_be_answered(tmp_path: Path) -> None:
    guard = guard_of(write_silo(tmp_path, budget=4.0, runs=3))
    cheap = cell_json(privacy={"relation": "replace-one", "mu": 1.0})
    assert answered(guard, "one", CELL) == "yes"
    guard.answer("one", CELL, 1, ZERO)
    assert answered(guard, "one", CELL) == "yes"  # it goes on
    assert "the scenario is not the one this run was opened with" in answered(guard, "one", cheap)
    for run, cell in (("two", CELL), ("two", cheap)):
        said = answered(guard, run, cell)
        with pytest.raises(RunError) as refused:
            guard.answer(run, cell, 1, ZERO)
        assert said == str(refused.value)
        assert "the budget is 4" in said
    for t in range(2, 9):
        guard.answer("one", CELL, t, ZERO)
    before = files(tmp_path)
    assert answered(guard, "one", CELL) == "yes"  # it is over, and its last round may be asked for again
    assert files(tmp_path) == before


def test_the_answer_does_not_depend_on_what_the_records_are(tmp_path: Path) -> None:
    cells = (CELL, cell_json(privacy={"relation": "replace-one", "mu": 5.0}))
    guards = [guard_of(write_silo(tmp_path / f"{number}", 0)) for number in (1, 2)]
    (tmp_path / "2" / "shard-0.npz").unlink()
    assert [answered(guards[0], "run", cell) for cell in cells] == [
        answered(guards[1], "run", cell) for cell in cells
    ]


def desk_of(path: Path, guards: Any) -> RequestQueue:
    return RequestQueue(read_policy(path), guards)


def test_evaluations_have_to_be_agreed_to_too(tmp_path: Path) -> None:
    path = write_tested(tmp_path)
    desk, before = desk_of(path, guards_of(path)), files(tmp_path)
    header = {"agree": True, "run": "run", "cell": SCENARIO, "protocol": PROTOCOL_VERSION, "fedpriv": "1"}
    assert desk._answer(header, bytearray()).header == {"agree": True}
    poor = write_tested(tmp_path / "poor", evaluation={"budget": 0.5})
    with pytest.raises(RunError, match=r"the budget is 0\.5"):
        desk_of(poor, guards_of(poor))._answer(header, bytearray())
    none = write_silo(tmp_path / "none")
    of = SimpleNamespace(training=guard_of(none), tests=None)
    with pytest.raises(RunError, match="no \\[evaluation\\], it evaluates nothing"):
        desk_of(none, cast(Any, of))._answer(header, bytearray())
    assert files(tmp_path) == before


def test_a_supernode_of_another_version_than_its_guard_is_told(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    desk = desk_of(path, cast(Any, SimpleNamespace(training=guard_of(path), tests=None)))
    header = {"agree": True, "run": "run", "cell": CELL, "protocol": PROTOCOL_VERSION + 1, "fedpriv": "0.9\x1b[2J"}
    with pytest.raises(
        RunError, match=r"guard runs fedpriv .* \(protocol 4\), its SuperNode 0\.9\\x1b\[2J \(protocol 5"
    ):
        desk._answer(header, bytearray())
    assert torch.isfinite(guard_of(path).answer("run", CELL, 1, ZERO)).all()
