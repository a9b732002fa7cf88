"""What a guard says of a run before it is asked for a round, and what it spends for that: nothing."""

import errno
import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fedpriv.core.errors import RunError
from fedpriv.protocol.messages import PROTOCOL_VERSION
from fedpriv.silo.daemon import RequestQueue
from fedpriv.silo.guard import Guard, room_of_run
from fedpriv.silo.ledger import LedgerError
from fedpriv.silo.policy import read_policy
from fedpriv.silo.shard import ShardViews
from tests.silo.evaluated import SCENARIO, guards_of, write_tested
from tests.silo.guarded import CELL, ZERO, cell_json, guard_at, guard_of, refused, write_silo

COSTLY = cell_json(privacy={"relation": "replace-one", "mu": 5.0})


def digests(folder: Path) -> dict[str, bytes]:
    """Every byte of ledgers, marks and journals, but for what SQLite writes in a journal that it takes back."""
    files = [*folder.glob("ledger-*.sqlite"), *folder.glob("ledger-*.mark")]
    assert len(files) >= 2
    return {path.name: hashlib.sha256(path.read_bytes()).digest() for path in files}


def preview(guard: Guard, run: str, cell: str) -> str:
    try:
        guard.preview_admission(run, cell)
    except RunError as error:
        return str(error)
    return "yes"


@pytest.mark.parametrize(
    ("cell", "allow"),
    [
        (CELL, {}),
        (cell_json(algorithm__trust="secure-aggregation"), {"trust": "secure-aggregation"}),
        (COSTLY, {}),
        (cell_json(privacy={"relation": "zero-out", "mu": 1.0}), {}),
        (CELL, {"rounds": 2}),
        ("{", {}),
    ],
)
def test_an_admission_preview_charges_nothing_opens_no_run_and_reads_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: str, allow: dict[str, Any]
) -> None:
    """Asked for ever, by a server that picks every scenario, before and while a run is under way."""
    guard = guard_at(tmp_path, **allow)
    monkeypatch.setattr(ShardViews, "records", lambda *_: pytest.fail("the records were read"))
    monkeypatch.setattr("fedpriv.silo.guard.system_key", lambda: pytest.fail("a key was made"))
    before = digests(tmp_path)
    assert len({preview(guard, f"run-{number}", cell) for number in range(3)}) == 1
    assert digests(tmp_path) == before
    assert guard._ledger.list_runs() == []


def test_an_admission_preview_agrees_exactly_if_round_1_would_be_answered(tmp_path: Path) -> None:
    guard = guard_at(tmp_path, budget=4.0, runs=3)
    cheap = cell_json(privacy={"relation": "replace-one", "mu": 1.0})
    assert preview(guard, "one", CELL) == "yes"
    guard.answer("one", CELL, 1, ZERO)
    assert preview(guard, "one", CELL) == "yes"  # it goes on
    assert "the scenario is not the one this run was opened with" in preview(guard, "one", cheap)
    for cell in (CELL, cheap):
        assert preview(guard, "two", cell) == refused(guard, "the budget is 4", cell, run="two")
    for t in range(2, 9):
        guard.answer("one", CELL, t, ZERO)
    before = digests(tmp_path)
    assert preview(guard, "one", CELL) == "yes"  # it is over, and its last round may be asked for again
    assert digests(tmp_path) == before


def test_an_admission_preview_refuses_a_run_ended_before_its_last_round(tmp_path: Path) -> None:
    """Was: agreed to, so that others were asked for a round that this silo refuses."""
    guard = guard_at(tmp_path)
    guard.answer("run", CELL, 1, ZERO)
    with guard._ledger.lock(), guard._ledger.transaction():
        guard._ledger.record_query("run", 8, b"")  # asked for the last round, and not answered
    with guard._ledger.lock():
        guard.end_run("run")
    assert "this run was ended before its round 8" in preview(guard, "run", CELL)


@pytest.mark.parametrize("disk", ["ledger", "mark"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EIO, errno.EACCES])
def test_guarantee_a_silo_that_cannot_write_its_ledger_or_rollback_mark_refuses_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str, number: int
) -> None:
    """Was: agreed to, and other silos were charged for a round that this one could not answer."""
    path = write_silo(tmp_path)
    (tmp_path / "other").mkdir()
    path.write_text(path.read_text().replace("[allow]", 'mark = "other/mark"\n[allow]'))
    guard, honest = guard_of(path), os.open
    folder = tmp_path if disk == "ledger" else tmp_path / "other"

    def refuse(name: Any, *arguments: Any, **options: Any) -> int:
        if str(name).endswith(f".probe.{os.getpid()}") and Path(name).parent == folder:
            raise OSError(number, os.strerror(number), str(name))
        return honest(name, *arguments, **options)

    assert preview(guard, "run", CELL) == "yes"
    before = sorted(path.name for path in tmp_path.rglob("*"))
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(LedgerError, match=rf"cannot be written, so nothing is released: {os.strerror(number)}"):
        guard.preview_admission("run", CELL)
    assert guard._ledger.list_runs() == []
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_an_admission_preview_fails_without_disk_space_for_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, usage = guard_at(tmp_path), shutil.disk_usage(tmp_path)
    room = room_of_run(guard._admission.admit(CELL).plan)
    for free, word in ((room - 1, "No space left on device"), (room, "yes")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert word in preview(guard, "run", CELL)


def test_an_admission_preview_does_not_depend_on_the_records(tmp_path: Path) -> None:
    one, other = (guard_at(tmp_path / name) for name in "12")
    (tmp_path / "2" / "shard-0.npz").unlink()
    for cell in (CELL, COSTLY):
        assert preview(one, "run", cell) == preview(other, "run", cell)


def desk_of(path: Path, guards: Any = None) -> RequestQueue:
    """The requests of a policy's guards; without others, of its training guard alone."""
    alone = SimpleNamespace(training=guard_of(path), tests=None) if guards is None else guards
    return RequestQueue(read_policy(path), cast(Any, alone))


def header_of(cell: str, version: int = PROTOCOL_VERSION, fedpriv: str = "1") -> dict[str, Any]:
    return {"agree": True, "run": "run", "cell": cell, "protocol": version, "fedpriv": fedpriv}


def test_an_admission_preview_covers_the_evaluations_of_a_run(tmp_path: Path) -> None:
    path, header = write_tested(tmp_path), header_of(SCENARIO)
    desk, before = desk_of(path, guards_of(path)), digests(tmp_path)
    assert desk._answer(header, bytearray()).header == {"agree": True}
    poor = write_tested(tmp_path / "poor", evaluation={"budget": 0.5})
    with pytest.raises(RunError, match=r"the budget is 0\.5"):
        desk_of(poor, guards_of(poor))._answer(header, bytearray())
    with pytest.raises(RunError, match="no \\[evaluation\\], it evaluates nothing"):
        desk_of(write_silo(tmp_path / "none"))._answer(header, bytearray())
    assert digests(tmp_path) == before


def test_a_supernode_with_another_protocol_version_than_its_guard_is_refused(tmp_path: Path) -> None:
    path, header = write_silo(tmp_path), header_of(CELL, PROTOCOL_VERSION + 1, "0.9\x1b[2J")
    mismatch = r"guard runs fedpriv .* \(protocol 4\), its SuperNode 0\.9\\x1b\[2J \(protocol 5"
    with pytest.raises(RunError, match=mismatch):
        desk_of(path)._answer(header, bytearray())
    assert torch.isfinite(guard_of(path).answer("run", CELL, 1, ZERO)).all()
