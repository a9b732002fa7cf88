"""What fedpriv gives, entry by entry: recorded before code is moved, and compared after.

    python -m benchmarks.record --out FILE                        record every part, 4 to 8 minutes on two cores
    python -m benchmarks.record --only guards,privacy --out FILE  or some of them
    python -m benchmarks.record --compare FILE                    record the parts of FILE again, and compare
    python -m benchmarks.record --compare FILE OTHER              compare two recordings
    python -m benchmarks.record --only shipped --out FILE         the shipped scenarios, which fetch their data

A recording is a zip file with a text for every entry: what a run wrote, digests of its models, a guard's replies,
what a command printed, a message.  Times, dates and versions are left out; every other key and digit counts.
Compared by bytes: exit code 1 and a line for each entry that differs, with the first place where it does.
With --disordered everything is computed under products and sums that add in an order of their own
(tests/disordered.py), as another processor may: replies of guards must not differ, `--only guards`.
"""

import argparse
import difflib
import multiprocessing
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

_SURROUNDINGS = {"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb", "FEDPRIV_ALLOW_ROOT": "1"}
_DATE = (2000, 1, 1, 0, 0, 0)  # of entries in the zip file: equal recordings are equal files


def written(path: Path, entries: Mapping[str, str]) -> None:
    """Write a recording: the same entries are the same bytes."""
    with zipfile.ZipFile(path, "w") as file:
        for name, text in sorted(entries.items()):
            info = zipfile.ZipInfo(name, _DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, text)


def read(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name).decode() for name in file.namelist()}


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A line for each entry that is missing in one recording or is not the same in both."""
    lines = []
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            lines.append(f"{name}: only {'before' if name in before else 'after'}")
        elif before[name] != after[name]:
            lines.append(f"{name}: {_where(before[name], after[name])}")
    return lines


def _where(before: str, after: str) -> str:
    """How many lines differ, and the first ones that do."""
    changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    first = {sign: next((line[2:].strip() for line in changed if line[0] == sign), "nothing") for sign in "-+"}
    return f"{len(changed)} lines, first {_short(first['-'])} → {_short(first['+'])}"


def _short(line: str) -> str:
    return line if len(line) <= 160 else f"{line[:157]}..."


def parts() -> dict[str, Any]:
    """The parts by name, each a function of (piece, of how many) that gives pairs of a name and a text."""
    from benchmarks.record_certificates import certificates
    from benchmarks.record_commands import commands, privacy, reports
    from benchmarks.record_guards import guards
    from benchmarks.record_parts import PARTS
    from benchmarks.record_refusals import refusals

    return {
        **PARTS,
        "guards": guards,
        "certificates": certificates,
        "privacy": privacy,
        "reports": reports,
        "commands": commands,
        "refusals": refusals,
    }


def record(only: Sequence[str], jobs: int = 2, disordered: bool = False, match: str = "") -> dict[str, str]:
    """The entries of these parts whose names have `match`; several jobs are processes of their own."""
    pieces = [(part, piece, 2 * jobs, disordered, match) for piece in range(2 * jobs) for part in only]
    found: dict[str, str] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) if jobs > 1 else nullcontext() as pool:
        for part, entries in (pool.map if pool else map)(_piece, pieces):
            found |= entries
            print(f"{part}: {len(entries)} entries", file=sys.stderr, flush=True)
    return found


def _piece(asked: tuple[str, int, int, bool, str]) -> tuple[str, dict[str, str]]:
    part, piece, pieces, disordered, match = asked
    import torch

    before, threads = Path.cwd(), torch.get_num_threads()
    memory = (
        "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )  # guards wait for every write to be on the disk
    with (
        tempfile.TemporaryDirectory(dir=memory) as folder,
        patch.dict(os.environ, _SURROUNDINGS),
        _order(disordered),
    ):
        os.chdir(folder)
        torch.set_num_threads(1)
        try:
            entries = {f"{part}/{name}": text for name, text in parts()[part](piece, pieces, re.compile(match))}
        finally:
            os.chdir(before)
            torch.set_num_threads(threads)
    return part, entries


def _order(disordered: bool) -> AbstractContextManager[None]:
    """Products and sums that add in an order of their own, if asked for."""
    if not disordered:
        return nullcontext()
    order: AbstractContextManager[None] = import_module("tests.disordered").disordered()
    return order


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--compare", type=Path, nargs="+", metavar="FILE", help="one recording, or two")
    parser.add_argument("--only", default="", help="parts, separated by commas")
    parser.add_argument("--match", default="", help="only entries whose names match this regular expression")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--disordered", action="store_true")
    given = parser.parse_args(arguments)
    if given.out is None and given.compare is None:
        parser.error("give --out FILE, --compare FILE, or both")
    if given.compare and len(given.compare) > 1:
        return _compared(*(read(path) for path in given.compare[:2]))
    before = read(given.compare[0]) if given.compare else {}
    known = list(parts())
    asked = [part for part in known if (_has(before, part) if before else part != "shipped")]
    only = given.only.split(",") if given.only else asked
    if unknown := sorted(set(only) - set(known)):
        parser.error(f"--only: {', '.join(unknown)}: the parts are {', '.join(known)}")
    after = record(only, given.jobs, given.disordered, given.match)
    if given.out is not None:
        written(given.out, after)
    if not given.compare:
        print(f"{len(after)} entries")
        return 0
    wanted = re.compile(given.match)
    asked_for = (name for name in before if name.split("/")[0] in only and wanted.search(name.partition("/")[2]))
    return _compared({name: before[name] for name in asked_for}, after)


def _has(entries: Mapping[str, str], part: str) -> bool:
    return any(name.startswith(f"{part}/") for name in entries)


def _compared(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    lines = differences(before, after)
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(lines)} of {len({*before, *after})} entries differ")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
