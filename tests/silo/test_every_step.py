"""Every step of a round's transactions, with a disk that fails there or a guard that is killed there."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from fedpriv.core.errors import InputError
from tests.attacks.guards import guard_for, random_records, zeros
from tests.silo.every_command import COMMANDS, format_commands
from tests.silo.every_step import CELL, FAULTS, ROUNDS, format_table, step_of
from tests.silo.guarded import guard_of

SOURCE = Path(__file__).with_name("steps.c")
FAULTS_PAGE = SOURCE.parents[2] / "docs" / "faults.md"
LEDGER = "ledger-0.sqlite"
STRIDES = {"init": 5, "init --spent": 7, "backup": 2, "restore": 29, "restore the latest": 31, "conversion": 17}
LAST_STEPS = ("sync", "rename", "unlink")

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or not sys.platform.startswith("linux"), reason="needs a C compiler, and Linux"
)


def rows(folder: Path, t: int, stride: int) -> list[dict[str, Any]]:
    return rows_of("every_step", folder, str(t), str(stride))


def rows_of(program: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    library, silo = folder / "steps.so", folder / "silo"
    silo.mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.silo.{program}", str(silo), *arguments]
    done = subprocess.run(
        command, env=environment, cwd=SOURCE.parents[2], capture_output=True, text=True, check=False, timeout=3000
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def documented(head: str = format_table([])[0]) -> list[str]:
    """Lines of a table in docs/faults.md."""
    lines = FAULTS_PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index(head)
    return list(takewhile(lambda line: line.startswith("|"), lines[first:]))


def check(found: list[dict[str, Any]], stride: int) -> None:
    """Guarantee of `ledger`: what leaves is on the disk, and a guard goes on after any fault of its disk."""
    assert [row for row in found if row["found"]] == []
    assert {row["fault"] for row in found} == {*FAULTS}
    assert len(found) >= 6 * (found[0]["of"] // stride - 1)
    said = {fault: Counter(row["said"] for row in found if row["fault"] == fault) for fault in FAULTS}
    assert set(said["short write"]) == {"answered"}
    for fault in ("killed before", "killed after"):
        assert set(said[fault]) == {"killed"}
    for fault in ("EIO", "ENOSPC", "EROFS"):
        assert set(said[fault]) <= {"refused for now", "answered"}
        assert said[fault]["refused for now"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("t", "stride"), [(1, 11), (ROUNDS, 17)])
def test_guarantee_a_disk_fault_at_any_step_leaves_a_round_charged_once_and_answered_once(
    tmp_path: Path, t: int, stride: int
) -> None:
    found = rows(tmp_path, t, stride)
    check(found, stride)
    table = "\n".join(documented())
    assert [row for row in found if f"| {t}, {step_of(row)} |" not in table] == []


@pytest.mark.long
def test_guarantee_faults_at_every_step_of_a_round_give_the_documented_table(tmp_path: Path) -> None:
    found = list[dict[str, Any]]()
    for t in range(1, ROUNDS + 1):
        (tmp_path / str(t)).mkdir()
        of_round = rows(tmp_path / str(t), t, 1)
        check(of_round, 1)
        found += of_round
    lines = format_table(found)
    (tmp_path / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == documented()


def check_command(name: str, found: list[dict[str, Any]]) -> None:
    assert [row for row in found if row["found"]] == []
    for row in found:
        said, again = row["said"].partition(":")[0], row["again"].partition(":")[0]
        assert said == "killed" if row["fault"].startswith("killed") else said in ("done", "refused")
        if row["fault"] == "short write":
            assert said == "done"
        if COMMANDS[name].is_again_harmless:
            assert again == "done"
        else:  # what is refused the second time was done the first, up to what follows the last rename
            assert again == "done" or said in ("done", "killed") or row["step"].startswith(LAST_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stride"), STRIDES.items())
def test_guarantee_a_silo_command_that_failed_at_any_step_can_be_repeated(
    tmp_path: Path, name: str, stride: int
) -> None:
    """Before: an `init` that was killed left half a ledger, which neither `init` nor the guard took."""
    check_command(name, rows_of("every_command", tmp_path, name, str(stride)))


@pytest.mark.long
def test_guarantee_faults_at_every_step_of_silo_commands_give_the_documented_table(tmp_path: Path) -> None:
    found = dict[str, list[dict[str, Any]]]()
    for number, name in enumerate(COMMANDS):
        (tmp_path / str(number)).mkdir()
        found[name] = rows_of("every_command", tmp_path / str(number), name, "1")
        check_command(name, found[name])
    lines = format_commands(found)
    (tmp_path / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == documented(lines[0])


@pytest.mark.slow
def test_guarantee_lost_writes_of_either_ledger_or_rollback_mark_are_detected(tmp_path: Path) -> None:
    """What a disk that lies about syncs leaves of ledger and mark: each as of another round, refused in words."""
    silo, copies = tmp_path / "silo", tmp_path / "copies"
    guard = guard_for(silo, *random_records(), budget=5.0)
    for t in range(ROUNDS + 1):
        if t:
            guard.answer("run", CELL, t, zeros())
        copies.mkdir(exist_ok=True)
        for name in (LEDGER, f"{LEDGER}.mark"):
            shutil.copy(silo / name, copies / f"{t} {name}")
    guard._ledger.close()
    for t in range(ROUNDS + 1):
        for other in range(ROUNDS + 1):
            shutil.copy(copies / f"{t} {LEDGER}", silo / LEDGER)
            shutil.copy(copies / f"{other} {LEDGER}.mark", silo / f"{LEDGER}.mark")
            (silo / f"{LEDGER}-journal").unlink(missing_ok=True)
            if t == other:
                guard_of(silo / "silo-0.toml")._ledger.close()
            else:
                with pytest.raises(InputError, match=r"older copy|not what was written"):
                    guard_of(silo / "silo-0.toml")
