"""A game day: three sites as processes of this machine, random faults, and what came of each.

    python -m tests.gameday --minutes N --seed S [--at-once K] [--at-least K] [--only NAME,NAME] [--out FOLDER]
        [--rounds N] [--patience SECONDS]

After each fault it is asserted that all comes up again by itself, that somebody is told within a minute if nothing
goes on for that long, and at the end of each run that the model has the bytes of an undisturbed replay and that
every ledger was charged once.  The exit code is 1 if one of these does not hold.  OUT gets faults.csv, faults.json
and journal.log, which has every line of every service.
"""

import argparse
import csv
import dataclasses
import json
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from fedpriv.engines.children import reap_processes
from tests.gameday.faults import FAULTS, OVERTAKEN, READ_ONLY, TWICE, Fault
from tests.gameday.game import Game, GameError, Struck

_TOLD = 60.0
_START = 300.0
_FAULT = 900.0  # seconds in which every fault is over; the longest takes ten minutes


def strike(game: Game, faults: Sequence[tuple[Fault, str]], dice: Random) -> None:
    """Make faults at different parties at once; GameError, in their rows too, unless all mends itself."""
    began, rows = time.monotonic(), list[Struck]()
    for fault, party in faults:
        row = Struck(game.seed, len(game.rows) + 1, fault.name, party, time.strftime("%H:%M:%S", time.gmtime()))
        row.run = game.runs.number
        game.rows.append(row)
        rows.append(row)
        game.journal.add("game", f"{row.number}: {fault.name} at {party}")
    try:
        with ThreadPoolExecutor() as threads:
            strikes = [
                threads.submit(fault.strike, game, party, Random(f"{game.seed} {row.number}"))
                for (fault, party), row in zip(faults, rows, strict=True)
            ]
            game.wait_until(lambda: all(each.done() for each in strikes), "the end of the faults", _FAULT)
        for row, each in zip(rows, strikes, strict=True):
            row.detail = each.result()
        game.well(", ".join(f"{fault.name} at {party}" for fault, party in faults))
        note_told(game, rows, began)
    except GameError as error:
        for row in rows:
            row.outcome = row.outcome or f"WRONG: {error}"
        raise


def note_told(game: Game, rows: Sequence[Struck], began: float) -> None:
    """Note when and by which service somebody was told; GameError for a standstill of a minute told later."""
    for row in rows:
        row.well = round(time.monotonic() - began, 1)
        line = game.told(row.party, began)
        row.told = "" if line is None else f"{line.at - began:.0f} s, {line.service}"
    stood, seconds = game.standstill(began)
    first = [line.at for row in rows if (line := game.told(row.party, min(began, stood))) is not None]
    if seconds > _TOLD and min(first, default=stood + seconds) - stood > _TOLD:
        for row in rows:
            row.outcome = "NOBODY TOLD within a minute"
        raise GameError(
            f"{rows[0].number}: nothing went on for {seconds:.0f} s, and nobody was told within a minute"
        )


def chosen(faults: Sequence[Fault], times: tuple[int, int], dice: Random) -> list[tuple[Fault, str]]:
    """Draw a fault so many times, at different parties, the ServerApp's machine and its SuperLink being one."""
    found: dict[str, Fault] = {}
    for _ in range(dice.randint(*times)):
        (fault,) = dice.choices(faults, [each.weight for each in faults])
        party = dice.choice(fault.parties)
        if fault.alone:
            return [(fault, party)] if not found else [(each, where) for where, each in found.items()]
        found.setdefault(party, fault)
    return [(fault, party) for party, fault in found.items()]


def play(game: Game, faults: Sequence[Fault], minutes: float, times: tuple[int, int]) -> list[str]:
    """Faults until the time is over and the last run has ended; what went wrong."""
    wrong, dice = list[str](), Random(game.seed)
    game.wait_until(lambda: game.rounds_done() >= 1, "the first round", _START)
    deadline = time.monotonic() + 60.0 * minutes
    while time.monotonic() < deadline:
        shown = len(game.rows)
        try:
            game.wait(dice.uniform(0.0, 3.0))
            strike(game, chosen(faults, times, dice), dice)
        except GameError as error:
            wrong.append(str(error))
        for row in game.rows[shown:]:
            show(row)
    try:
        game.finish()
    except GameError as error:
        wrong.append(str(error))
    return wrong


def show(row: Struck) -> None:
    well = "-" if row.well is None else f"{row.well:.0f} s"
    words = f"{row.time} {row.number:3d} {row.fault:24s} {row.party:12s} well {well:>6s}"
    print(f"{words}  told {row.told or '-':18s} {row.detail}  {row.outcome}", flush=True)


def write(rows: Sequence[Struck], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    listed = [dataclasses.asdict(row) for row in rows]
    (folder / "faults.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    with (folder / "faults.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Struck)])
        writer.writeheader()
        writer.writerows(listed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gameday", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=3, help="faults at different parties, at most")
    parser.add_argument("--at-least", type=int, default=1, help="draws of a strike, of which a party takes one")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of each run")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that a run waits for a silo")
    parser.add_argument("--only", default="", help="faults by name, with commas")
    parser.add_argument("--out", type=Path, default=Path("runs/gameday"))
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    names = [name.strip() for name in given.only.split(",") if name.strip()]
    if unknown := set(names) - {fault.name for fault in FAULTS}:
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}; there are {[each.name for each in FAULTS]}")
    faults = [fault for fault in FAULTS if not names or fault.name in names]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="fedpriv-day-") as home, reap_processes(Path(home)):
        game = Game(Path(home), given.seed, given.rounds, given.patience)
        missing = {
            **dict.fromkeys(
                ("full disk", READ_ONLY), "" if game.has_disks else "this user may mount no small disk"
            ),
            **dict.fromkeys((TWICE, OVERTAKEN), game.no_namespaces and "sites are reached through proxies"),
            **dict.fromkeys(
                ("clock", "a hundred days"), "" if game.clocks is not None else "there is no compiler"
            ),
        }
        if game.no_namespaces:
            print(f"no network namespaces, but proxies: {game.no_namespaces}")
        for name, why in missing.items():
            if why:
                print(f"{name}: left out, {why}")
        faults = [fault for fault in faults if not missing.get(fault.name)]
        try:
            wrong = play(game, faults, given.minutes, (given.at_least, max(given.at_least, given.at_once)))
        finally:
            game.close()
            write(game.rows, given.out)
            (given.out / "journal.log").write_bytes((Path(home) / "journal.log").read_bytes())
    runs = game.runs
    print(
        f"{len(game.rows)} faults, {runs.checked} runs with the bytes of their replay, {runs.resumed} resumptions"
    )
    for words in wrong:
        print(f"WRONG: {words}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
