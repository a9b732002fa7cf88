"""Draws slips of the hand at random, and tells which of them the fast suite does not see.

    python -m tests.mutants random --cover [--jobs N]           once for the sources as they are
    python -m tests.mutants random --count 200 --seed 1 [--jobs N] [--rooms ROOM ...]
    python -m tests.mutants random --only ID ...
    python -m tests.mutants random --report

A slip meets the tests that run its line, those of its room first.  In a room that privacy rests on, one that
survives them meets the other tests of the room and all that run its file.  Each of the two takes at most
`--seconds` of tests, the quickest first, so that a line that everything runs does not cost a whole suite.
Results are appended to a store: a run that was stopped goes on where it was.  The exit code is 1 if a slip
survives that `equivalent_slips.toml` does not name.
"""

import argparse
import json
import queue
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.mutants.listing import ROOT
from tests.mutants.slips import ROOMS, Slip, all_sites, draw

KILLED, SURVIVED, NOT_COVERED, EQUIVALENT = "killed", "SURVIVED", "NOT COVERED", "equivalent"
EQUIVALENTS = Path(__file__).with_name("equivalent_slips.toml")
_KEYS = ("file", "function", "operator", "before", "after")
_PRIVACY = ("accounting", "noise/integers", "silo", "claims", "participation")
_FILES_AT_A_TIME = (2, 6, 1000)
"""Test files that a fork imports: few at first, since most slips die of the first."""


def equivalents(path: Path = EQUIVALENTS) -> dict[tuple[str, ...], str]:
    """Reasons why no test can see a slip, by file, function, operator, text before and after."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("slip", [])
    return {tuple(entry[key] for key in _KEYS): entry["reason"] for entry in entries}


def stale(slips: Iterable[Slip], marked: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Marked slips that the source does not have any more."""
    return sorted(set(marked) - {_key(slip) for slip in slips})


def _key(slip: Slip) -> tuple[str, ...]:
    return tuple(getattr(slip, key) for key in _KEYS)


def in_order(tests: Iterable[str], seconds: dict[str, float], room: str, most: float) -> dict[str, float]:
    """Seconds of tests, those of the room first, then the quickest file, and in a file the quickest test."""
    files: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        files.setdefault(test.partition("::")[0], []).append(test)
    home = f"tests/{room.partition('/')[0]}/"
    ranked = sorted(
        files,
        key=lambda file: (not file.startswith(home), sum(map(seconds.get, files[file])) / len(files[file]), file),
    )
    chosen: dict[str, float] = {}
    for test in (test for file in ranked for test in files[file]):
        if not chosen or sum(chosen.values()) + seconds[test] <= most:
            chosen[test] = seconds[test]
    return chosen


class Sweep:
    """Slips that wait, and what came of the others."""

    def __init__(self, covered: Any, store: Path, logs: Path, most: float) -> None:
        self._covered = covered
        self._store = store
        self._logs = logs
        self._most = most
        self._lock = threading.Lock()
        self._green: dict[tuple[str, str], bool] = {}
        self._marked = equivalents()

    def judge(self, copy: Any, slip: Slip) -> dict[str, Any]:
        """The store's line for a slip."""
        started = time.perf_counter()
        with self._lock:
            tests = self._covered.of_slip(slip)
        killed_by, met, met_all, mode = self._meet(copy, slip, tests) if tests else ("", 0, True, "")
        if not killed_by and (slip.room in _PRIVACY or "mask" in slip.file):
            with self._lock:
                home = {
                    test
                    for test in self._covered.seconds
                    if test.startswith(f"tests/{slip.room.partition('/')[0]}/")
                }
                more = (home | self._covered.of_file(slip.file)) - tests
            if more:
                killed_by, met_more, met_all_more, mode = self._meet(copy, slip, more)
                met, met_all = met + met_more, met_all and met_all_more
        outcome = KILLED if killed_by else SURVIVED if tests else NOT_COVERED
        line = {
            "id": slip.id,
            "outcome": outcome,
            "room": slip.room,
            "line": slip.lines.start,
            **dict(zip(_KEYS, _key(slip), strict=True)),
            "killed_by": killed_by,
            "tests": met,
            "all": met_all,
            "mode": mode,
            "seconds": round(time.perf_counter() - started, 2),
        }
        with self._lock:
            with self._store.open("a", encoding="utf-8") as store:
                store.write(json.dumps(line) + "\n")
            if outcome == KILLED or _key(slip) in self._marked:
                print(f"{outcome:11} {slip.id} {slip.where}  ({line['seconds']} s)", flush=True)
            else:
                print(
                    f"{outcome:11} {slip.id} {slip.where}  {slip.operator}: {slip.before} => {slip.after}",
                    flush=True,
                )
        return line

    def _meet(self, copy: Any, slip: Slip, tests: Iterable[str]) -> tuple[str, int, bool, str]:
        """The test that kills a slip or "", how many it met, whether these are all, and how the slip came in."""
        tests = set(tests)
        chosen = in_order(tests, self._covered.seconds, slip.room, self._most)
        source = (ROOT / slip.file).read_text(encoding="utf-8")
        met, mode, files = 0, "", list(dict.fromkeys(test.partition("::")[0] for test in chosen))
        for size in _FILES_AT_A_TIME:
            group, files = set(files[:size]), files[size:]
            part = {test: chosen[test] for test in chosen if test.partition("::")[0] in group}
            while part:
                answer = self._ask(copy, slip.file, slip.applied(source), part, bool(slip.function))
                test, mode = answer["test"], answer["mode"]
                if answer["code"] in (0, 5):
                    met += len(part)
                    break
                if test not in part:  # an import failed: that of a test file, or of all
                    test = next((name for name in part if name.startswith(test)), next(iter(part)))
                met += list(part).index(test) + 1
                if self._is_green(copy, slip.file, source, test, mode):
                    return test, met, True, mode
                part = dict(list(part.items())[list(part).index(test) + 1 :])
        return "", met, len(chosen) == len(tests), mode

    def _is_green(self, copy: Any, file: str, source: str, test: str, mode: str) -> bool:
        """Whether a test passes by itself in such a fork without a slip: else it kills none."""
        if (test, mode) not in self._green:
            part = {test: self._covered.seconds[test]}
            self._green[test, mode] = self._ask(copy, file, source, part, mode == "in place")["code"] == 0
            if not self._green[test, mode]:
                print(f"not green without a slip, and left out: {test} ({mode})", flush=True)
        return self._green[test, mode]

    def _ask(self, copy: Any, file: str, text: str, tests: dict[str, float], in_place: bool) -> dict[str, Any]:
        log = self._logs / f"{copy.folder.name}.log"
        asked = {
            "file": str(copy.folder / file),
            "text": text,
            "tests": tests,
            "log": str(log),
            "in_place": in_place,
        }
        answer: dict[str, Any] = copy.ask(asked)
        return answer


def sweep(slips: Sequence[Slip], judge: Sweep, jobs: int, folder: Path) -> list[dict[str, Any]]:
    """The store's lines for slips, as they come from several copies of the checkout."""
    from tests.mutants.__main__ import Copy

    waiting: queue.SimpleQueue[Slip] = queue.SimpleQueue()
    for slip in slips:
        waiting.put(slip)
    lines: list[dict[str, Any]] = []

    def work(copy: Copy) -> None:
        while True:
            try:
                lines.append(judge.judge(copy, waiting.get_nowait()))
            except queue.Empty:
                return

    copies: list[Copy] = []
    try:
        for number in range(jobs):
            (folder / f"copy-{number}").mkdir()
            copies.append(Copy.of(ROOT, folder / f"copy-{number}", "tests.mutants.warm"))
        threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for copy in copies:
            copy.process.kill()
            copy.process.wait()
    return lines


def read_store(path: Path) -> dict[str, dict[str, Any]]:
    """The last line for each slip, by its id."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line["id"]: line for line in map(json.loads, lines)}


def report(lines: Iterable[dict[str, Any]], marked: dict[tuple[str, ...], str]) -> bool:
    """Print a row for each room and the survivors; whether there are none but equivalent ones."""
    rows: dict[str, Counter[str]] = {room: Counter() for room in ROOMS}
    survivors = []
    for line in lines:
        key = tuple(line[each] for each in _KEYS)
        outcome = EQUIVALENT if line["outcome"] != KILLED and key in marked else line["outcome"]
        rows[line["room"]].update([outcome, "drawn"])
        if outcome in (SURVIVED, NOT_COVERED):
            survivors.append(line)
        elif outcome == EQUIVALENT:
            print(f"{EQUIVALENT}: {line['id']} {line['file']}:{line['line']}  {marked[key]}")
    for line in sorted(survivors, key=lambda line: (line["file"], line["line"])):
        part = "" if line["all"] else f" ({line['tests']} tests met, as many as the time allows)"
        print(f"{line['outcome']}: {line['id']} {line['file']}:{line['line']} {line['operator']}{part}")
        print(*(f"    {text}" for text in f"{line['before']}\n{line['after']}".splitlines()), sep="\n")
    columns = ("drawn", KILLED, SURVIVED, NOT_COVERED, EQUIVALENT)
    print(f"{'room':16}" + "".join(f"{name.lower():>13}" for name in columns))
    for room, counts in [*rows.items(), ("all", sum(rows.values(), Counter[str]()))]:
        if counts["drawn"]:
            print(f"{room:16}" + "".join(f"{counts[name]:13}" for name in columns))
    return not survivors


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants random",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cover", action="store_true", help="measure which tests run which lines, and how long")
    parser.add_argument("--tests", nargs="+", default=[], help="with --cover: only these folders, for a trial")
    parser.add_argument("--count", type=int, default=200, help="how many slips are drawn (200)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the draw; a larger count draws the same ones first"
    )
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=ROOMS, help="only of these rooms")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these slips, again, instead of a draw")
    parser.add_argument("--list", action="store_true", help="write the slips, and run none")
    parser.add_argument("--report", action="store_true", help="a row for each room of what the store has")
    parser.add_argument("--jobs", type=int, default=1, help="how many copies work at a time (1)")
    parser.add_argument("--seconds", type=float, default=90.0, help="most time of tests for a slip (90)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "slips", help="for coverage (build/slips)")
    parser.add_argument("--store", type=Path, help="file of the results (FOLDER/slips.jsonl)")
    given = parser.parse_args(arguments)
    store = given.store or given.folder / "slips.jsonl"
    marked = equivalents()
    if given.report:
        return 0 if report(read_store(store).values(), marked) else 1
    from tests.mutants.cover import Covered, copy_and_measure

    if given.cover:
        return copy_and_measure(given.folder, given.jobs, given.tests)
    every_site = all_sites()
    if given.only:
        slips = [slip for site in every_site for slip in site if slip.id in given.only]
        if unknown := set(given.only) - {slip.id for slip in slips}:
            sys.exit(f"--only: the sources have no slip {', '.join(sorted(unknown))}")
    else:
        counts = Counter(site[0].room for site in every_site)
        print(
            "sites:",
            ", ".join(f"{room} {counts[room]:,}" for room in ROOMS),
            f"all {counts.total():,}",
            flush=True,
        )
        slips = draw(every_site, given.rooms, given.count, given.seed)
    if given.list:
        for slip in slips:
            print(f"{slip.id} {slip.where} {slip.function} {slip.operator}\n    {slip.before}\n    {slip.after}")
        return 0
    if not (given.folder / "tests.json").exists():
        sys.exit(f"there is no coverage in {given.folder}: run `python -m tests.mutants random --cover` first")
    store.parent.mkdir(parents=True, exist_ok=True)
    known = {} if given.only else read_store(store)
    waiting = [slip for slip in slips if slip.id not in known]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        judge = Sweep(Covered(given.folder), store, Path(folder), given.seconds)
        lines = sweep(waiting, judge, max(1, min(given.jobs, len(waiting))), Path(folder))
    killed = [line["seconds"] for line in lines if line["outcome"] == KILLED]
    took = time.perf_counter() - started
    print(f"{len(lines)} slips in {took:.0f} s; a killed one takes {sum(killed) / max(1, len(killed)):.1f} s")
    results = read_store(store)
    return 0 if report([results[slip.id] for slip in slips], marked) else 1
