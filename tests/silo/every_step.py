"""A round of a guard with a fault at each step of what it writes: what came of it, and what is found afterwards.

    LD_PRELOAD=STEPS.so python -m tests.silo.every_step FOLDER ROUND STRIDE

`format_table` makes the table in docs/faults.md of its lines, which tests/silo/test_every_step.py compares.

FOLDER is empty.  A line of JSON is printed for each step and fault: the step's call and file, the fault, what the
guard said, and the faults of the silo that is opened afterwards, none of which may be there.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fedpriv.core.errors import FedprivError, InputError
from fedpriv.silo.guard import Guard
from fedpriv.silo.ledger import LedgerError
from tests.attacks.guards import guard_for, random_records, scenario, zeros
from tests.silo.charged import charged
from tests.silo.guarded import guard_of

ROUNDS = 3
CELL = scenario(federation__rounds=ROUNDS)
FAULTS = ("EIO", "ENOSPC", "EROFS", "short write", "killed before", "killed after")
"""Faults by their number in steps.c, from 1."""


PARTS = {".": "folder", "": "ledger", "-journal": "journal", ".mark": "mark", ".mark.": "new mark"}
"""Names of what is written, by what is behind the ledger's name."""


def step_of(row: dict[str, Any]) -> str:
    """Call and file of a step, as in the table."""
    end = row["file"].lstrip(".").removeprefix("ledger-0.sqlite")
    return f"{row['call']} the {PARTS[row['file'] if row['file'] == '.' else end]}"


def format_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown of all that was said, by round, kind of step and fault, in the order of the steps."""
    lines = [f"| round, step | {' | '.join(FAULTS)} |", "|---|" + "---|" * len(FAULTS)]
    for t, step in dict.fromkeys((row["round"], step_of(row)) for row in rows):
        alike = [row for row in rows if (row["round"], step_of(row)) == (t, step)]
        cells = (", ".join(sorted({row["said"] for row in alike if row["fault"] == fault})) for fault in FAULTS)
        lines.append(f"| {t}, {step} | {' | '.join(cells)} |")
    return lines


def arm(folder: Path, at: int, fault: int, log: Path) -> None:
    ctypes.CDLL(None).arm_steps(f"{folder}/".encode(), at, fault, str(log).encode())


def try_round(folder: Path, t: int, at: int, fault: int, log: Path) -> str:
    """What a guard in a process of its own says in round t, with this fault at this step."""
    opened = list[Guard]()
    return in_a_process(
        folder,
        lambda: say(opened[0], t),
        at,
        fault,
        log,
        before=lambda: opened.append(guard_of(folder / "silo-0.toml")),
    )


def in_a_process(
    folder: Path,
    speak: Callable[[], str],
    at: int,
    fault: int,
    log: Path,
    before: Callable[[], None] = lambda: None,
) -> str:
    """What is said in a process of its own, with a fault at a step of what is written after `before`."""
    read, written = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            before()
            arm(folder, at, fault, log)
            os.write(written, speak().encode())
        except Exception as error:  # none may come
            os.write(written, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(written)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    if os.WIFSIGNALED(status):
        return "killed" if os.WTERMSIG(status) == signal.SIGKILL else f"signal {os.WTERMSIG(status)}"
    return said or "nothing"


def say(guard: Guard, t: int) -> str:
    try:
        return f"answered {digest(guard.answer('run', CELL, t, zeros()))}"
    except LedgerError:
        return "refused for now"
    except InputError as error:
        return f"refused for good: {error}"
    except FedprivError as error:
        return f"refused: {error}"


def digest(reply: torch.Tensor) -> str:
    return str(hash(reply.numpy().tobytes()))


def find_faults(folder: Path, t: int, said: str, honest: str) -> list[str]:
    """What is wrong with a silo after a fault: nothing may be."""
    try:
        guard = guard_of(folder / "silo-0.toml")
    except FedprivError as error:
        return [f"not opened: {error}"]
    try:
        row, faults = guard._ledger.find_answer("run", t), []
        if said.startswith("answered") and (said != f"answered {honest}" or row is None or not row.is_answered):
            faults.append("what left is not on file")
        if row is not None:
            try:
                guard.answer("run", CELL, t, zeros() + 1.0)
                faults.append("another query was answered")
            except LedgerError as error:
                faults.append(str(error))
            except FedprivError:
                pass
        if (again := say(guard, t)) != f"answered {honest}":
            faults.append(f"asked again: {again}")
        if len(charged(guard)) != 1:
            faults.append(f"charged: {charged(guard)}")
        return faults
    finally:
        guard._ledger.close()


def main(folder: Path, t: int, stride: int) -> None:
    torch.set_num_threads(1)
    key: Any = bytes(range(32))
    sys.modules["fedpriv.silo.guard"].__dict__["system_key"] = lambda: key
    before, log = folder / "before", folder / "steps"
    guard = guard_for(before, *random_records(), budget=5.0)
    for earlier in range(1, t):
        guard.answer("run", CELL, earlier, zeros())
    guard._ledger.close()
    undisturbed = Path(shutil.copytree(before, folder / "silo"))
    honest = try_round(undisturbed, t, 0, 0, log).removeprefix("answered ")
    steps = log.read_text().splitlines()
    shutil.rmtree(undisturbed)
    for at in range(1 + (stride > 1), len(steps) + 1, stride):
        for number, fault in enumerate(FAULTS, start=1):
            silo = Path(shutil.copytree(before, folder / "silo"))
            said = try_round(silo, t, at, number, log)
            found = find_faults(silo, t, said, honest)
            call, name = steps[at - 1].split(" ", 1)
            row = {
                "round": t,
                "step": at,
                "of": len(steps),
                "call": call,
                "file": name.rstrip("0123456789"),
            }
            said = "answered" if said.startswith("answered") else said
            print(json.dumps({**row, "fault": fault, "said": said, "found": found}), flush=True)
            shutil.rmtree(silo)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3]))
