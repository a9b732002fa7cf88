"""A person's command on a silo's ledger with a fault at each step of what it writes, and what is found afterwards.

    LD_PRELOAD=STEPS.so python -m tests.silo.every_command FOLDER COMMAND STRIDE

FOLDER is empty, and COMMAND one of `COMMANDS`.  A line of JSON is printed for each step and fault: the step's call
and file, the fault, what the command said, what it says once more without a fault, and what is wrong afterwards.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedpriv.core.errors import FedprivError
from fedpriv.silo.backup import back_up_ledgers, restore_ledgers
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import read_policy
from tests.attacks.guards import guard_for, random_records, zeros
from tests.silo.charged import charged
from tests.silo.every_step import CELL, FAULTS, ROUNDS, in_a_process
from tests.silo.guarded import guard_of
from tests.silo.unkeyed import copied

BUDGET, SPENT = 9.0, 2.0
KEPT = "backup"


class Command(NamedTuple):
    """What a person does with a silo, and what has to be true of it later."""

    prepare: Callable[[Path], None]
    """Make the silo in a folder."""
    run: Callable[[Path], None]
    policy: str
    """Name of the silo's policy."""
    charges: Callable[[list[float]], bool]
    """Whether the charges of a silo are what they have to be, once the command has been given again."""
    is_again_harmless: bool = False
    """Whether the command may be given again when it was done."""


def silo_of_two_runs(folder: Path) -> None:
    """A run that is over, and a second one of which one round is answered."""
    guard = guard_for(folder, *random_records(), budget=BUDGET)
    for t in range(1, ROUNDS + 1):
        guard.answer("run", CELL, t, zeros())
    guard.answer("second", CELL, 1, zeros())
    guard._ledger.close()


def silo_without_ledger(folder: Path) -> None:
    guard_for(folder, *random_records(), budget=BUDGET)._ledger.close()
    for path in [*folder.glob("ledger-0.sqlite*"), read_policy(folder / "silo-0.toml").shard_key]:
        path.unlink()


def silo_with_a_backup(folder: Path) -> None:
    """A silo whose ledger was backed up, and has gone on."""
    silo_of_two_runs(folder)
    back_up(folder)
    guard = guard_of(folder / "silo-0.toml")
    guard.answer("second", CELL, 2, zeros())
    guard._ledger.close()


def silo_that_lost_its_ledger(folder: Path) -> None:
    silo_with_a_backup(folder)
    (folder / "ledger-0.sqlite").unlink()


def silo_that_lost_what_was_backed_up(folder: Path) -> None:
    silo_of_two_runs(folder)
    back_up(folder)
    (folder / "ledger-0.sqlite").unlink()


def silo_of_0_3_0(folder: Path) -> None:
    copied(folder)
    shutil.rmtree(folder / KEPT)


def begin(folder: Path) -> None:
    begin_ledgers(read_policy(folder / "silo-0.toml"))


def begin_with_spent_budget(folder: Path) -> None:
    begin_ledgers(read_policy(folder / "silo-0.toml"), (SPENT, 0.0, "the board, by its minutes"))


def back_up(folder: Path) -> None:
    (folder / KEPT).mkdir(exist_ok=True)
    back_up_ledgers(folder / "silo-0.toml", folder / KEPT)


def restore(folder: Path) -> None:
    list(restore_ledgers(folder / "silo-0.toml", folder / KEPT))


def open_silo(folder: Path) -> None:
    """Open a silo, which converts a ledger of 0.3.0."""
    guard_of(folder / "policy.toml")._ledger.close()


def is_spent(charges: list[float]) -> bool:
    return charges[0] == SPENT and len(charges) == 1


def has_two_runs(charges: list[float]) -> bool:
    return len(charges) == 2


def is_spent_whole(charges: list[float]) -> bool:
    """The two runs, and the whole budget for whatever was released since the backup, once or more."""
    return len(charges) > 2 and all(charge == BUDGET for charge in charges[2:])


def is_spent_at_most_whole(charges: list[float]) -> bool:
    """The two runs, and after a fault perhaps the whole budget, although nothing was released since the backup."""
    return has_two_runs(charges) or is_spent_whole(charges)


COMMANDS = {
    "init": Command(silo_without_ledger, begin, "silo-0.toml", lambda charges: not charges),
    "init --spent": Command(silo_without_ledger, begin_with_spent_budget, "silo-0.toml", is_spent),
    "backup": Command(silo_with_a_backup, back_up, "silo-0.toml", has_two_runs, is_again_harmless=True),
    "restore": Command(silo_that_lost_its_ledger, restore, "silo-0.toml", is_spent_whole),
    "restore the latest": Command(
        silo_that_lost_what_was_backed_up, restore, "silo-0.toml", is_spent_at_most_whole
    ),
    "conversion": Command(silo_of_0_3_0, open_silo, "policy.toml", has_two_runs, is_again_harmless=True),
}


def format_commands(found: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Markdown of what each command said to each fault, with the number of its steps."""
    lines = [f"| command | steps | {' | '.join(FAULTS)} |", "|---|---|" + "---|" * len(FAULTS)]
    for name, rows in found.items():
        cells = (
            ", ".join(sorted({row["said"].partition(":")[0] for row in rows if row["fault"] == fault}))
            for fault in FAULTS
        )
        lines.append(f"| `{name}` | {rows[0]['of']} | {' | '.join(cells)} |")
    return lines


def say(run: Callable[[Path], None], folder: Path) -> str:
    try:
        run(folder)
    except FedprivError as error:
        return f"refused: {error}"
    return "done"


def find_faults(command: Command, folder: Path, said: str) -> tuple[str, list[str]]:
    """What the command says once more, and what is wrong with the silo afterwards: nothing may be."""
    again, faults = say(command.run, folder), list[str]()
    if "\n" in again or "\n" in said:
        faults.append("several lines")
    if said == "done" and not command.is_again_harmless and again == "done":
        faults.append("what was done was done again")
    try:
        guard = guard_of(folder / command.policy)
    except FedprivError as error:
        return again, [*faults, f"not opened: {error}"]
    if not command.charges(charges := charged(guard)):
        faults.append(f"charged: {charges}")
    guard._ledger.close()
    if (folder / KEPT).exists():
        faults += find_faults_of_the_backup(folder)
    return again, faults


def find_faults_of_the_backup(folder: Path) -> list[str]:
    """What is wrong with a backup, from which a lost ledger has to come back at no smaller price."""
    other = Path(shutil.copytree(folder, folder.with_name("restored")))
    with suppress(FileNotFoundError):
        (other / "ledger-0.sqlite").unlink()
    said = say(restore, other)
    try:
        charges = charged(other / "silo-0.toml")
        return [] if said == "done" and len(charges) >= 2 else [f"backup: {said}, {charges}"]
    except FedprivError as error:
        return [f"backup: {said}; {error}"]
    finally:
        shutil.rmtree(other)


def main(folder: Path, name: str, stride: int) -> None:
    torch.set_num_threads(1)
    command, before, log = COMMANDS[name], folder / "before", folder / "steps"
    command.prepare(before)
    undisturbed = Path(shutil.copytree(before, folder / "silo"))
    assert in_a_process(undisturbed, lambda: say(command.run, undisturbed), 0, 0, log) == "done"
    steps = log.read_text().splitlines()
    shutil.rmtree(undisturbed)
    for at in range(1, len(steps) + 1, stride):
        for number, fault in enumerate(FAULTS, start=1):
            silo = Path(shutil.copytree(before, folder / "silo"))
            said = in_a_process(silo, lambda silo=silo: say(command.run, silo), at, number, log)
            again, found = find_faults(command, silo, said)
            row = {"step": steps[at - 1], "at": at, "of": len(steps), "fault": fault}
            print(json.dumps({**row, "said": said, "again": again, "found": found}), flush=True)
            shutil.rmtree(silo)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3]))
