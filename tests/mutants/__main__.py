"""Applies the mutants of `lists/` one by one, and runs for each the test that has to turn red.

    python -m tests.mutants [--list NAME ...] [--id ID ...] [--jobs N] [--suite fast|all] [--logs FOLDER]
    python -m tests.mutants random --help

Every mutant is applied in a copy of the checkout, never in place.  Without a mutant all its tests have to be
green.  The exit code is 1 if a mutant survives that is not marked equivalent, or if a list is stale.  `--suite`
runs the same tests under that suite's marker expression: what slow tests alone kill, the fast suite does not.
"""

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.listing import ROOT, Mutant, faults, mutants

_REAL = "not deployment and not containers"
SUITES = {"fast": f"not slow and not long and {_REAL}", "all": _REAL}
_OPTIONS = ["-n0", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=short", "--no-header"]
_SECONDS = 900.0
KILLED, SURVIVED, EQUIVALENT, STALE, NOT_RUN = "killed", "SURVIVED", "equivalent", "stale", "not in this suite"


def copy_checkout(root: Path, folder: Path) -> None:
    """Copy the files of a checkout, and compile them so that a changed file is seen at any size and time."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (root / name).exists() or (root / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."],
        cwd=folder,
        check=True,
    )


@dataclass
class Copy:
    """A copy of the checkout with a warm process in it."""

    folder: Path
    process: "subprocess.Popen[str]"

    @staticmethod
    def of(root: Path, folder: Path, worker: str = "tests.mutants.worker") -> "Copy":
        copy_checkout(root, folder)
        set_apart = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", worker],
            cwd=folder, env={**os.environ, **set_apart}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        return Copy(folder, process)

    def run(
        self, tests: Sequence[str], options: Sequence[str], log: Path, mutant: Mutant | None = None
    ) -> int | None:
        """pytest's exit code, or None after a quarter of an hour."""
        asked: dict[str, Any] = {"file": None, "text": None, "tests": tests, "options": options, "log": str(log)}
        if mutant is not None:
            path = self.folder / mutant.file
            asked |= {"file": str(path), "text": mutant.applied(path.read_text(encoding="utf-8"))}
        code: int | None = self.ask({**asked, "seconds": _SECONDS})
        return code

    def ask(self, request: dict[str, Any]) -> Any:
        """The process's answer to a request."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process in {self.folder} ended")
        return json.loads(line)


def outcome(mutant: Mutant, code: int | None) -> str:
    """What pytest's exit code says of a mutant: a test that hangs, or cannot be imported any more, is red, too."""
    if code == 5:
        return NOT_RUN
    if code == 4:
        return STALE
    if code == 0:
        return EQUIVALENT if mutant.equivalent else SURVIVED
    return KILLED


def sweep(chosen: Sequence[Mutant], jobs: int, options: Sequence[str], logs: Path) -> dict[str, str]:
    """The outcome of every mutant by its id, printed as they come."""
    found: dict[str, str] = {}
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in chosen:
        waiting.put(mutant)
    said = threading.Lock()

    def work(copy: Copy) -> None:
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            started = time.perf_counter()
            code = copy.run([mutant.killed_by], [*options, "-x"], logs / f"{mutant.id}.log", mutant)
            with said:
                found[mutant.id] = outcome(mutant, code)
                seconds = time.perf_counter() - started
                print(f"{found[mutant.id]:10} {mutant.where}  ({seconds:.1f} s)", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        copies = [Copy.of(ROOT, _made(Path(folder) / f"copy-{number}")) for number in range(jobs)]
        try:
            _check_green(copies[0], chosen, options, logs)
            threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for copy in copies:
                copy.process.kill()
                copy.process.wait()
    return found


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _check_green(copy: Copy, chosen: Sequence[Mutant], options: Sequence[str], logs: Path) -> None:
    """Stop unless the tests that have to turn red are green without a mutant."""
    tests = sorted({mutant.killed_by for mutant in chosen})
    log = logs / "without-a-mutant.log"
    code = copy.run(tests, options, log)
    if code not in (0, 5):
        sys.exit(f"without a mutant: pytest's exit code is {code}, and has to be 0\n{log.read_text()[-3000:]}")
    print(f"{len(tests)} tests or files are green without a mutant", flush=True)


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["random"]:
        from tests.mutants.random_slips import main as main_of_random

        return main_of_random(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list", nargs="+", default=[], help="names of lists, without .toml; all of them if left out"
    )
    parser.add_argument("--id", nargs="+", default=[], help="only these mutants")
    parser.add_argument("--jobs", type=int, default=1, help="how many copies work at a time")
    parser.add_argument(
        "--suite", choices=SUITES, default="all", help="only what this suite runs; all if left out"
    )
    parser.add_argument("--equivalent", action="store_true", help="run those marked equivalent, too")
    parser.add_argument("--logs", type=Path, help="a folder for what pytest wrote")
    given = parser.parse_args(arguments)
    listed = mutants(given.list)
    if lines := faults(listed):
        print(*lines, sep="\n")
        return 1
    if unknown := set(given.id) - {mutant.id for mutant in listed}:
        sys.exit(f"--id: no mutant has the id {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in listed if not given.id or mutant.id in given.id]
    ran = [mutant for mutant in chosen if given.equivalent or not mutant.equivalent]
    options = [*_OPTIONS, "-m", SUITES[given.suite]]
    with tempfile.TemporaryDirectory() as kept:
        logs = given.logs or Path(kept)
        logs.mkdir(parents=True, exist_ok=True)
        found = sweep(ran, max(1, min(given.jobs, len(ran))), options, logs.resolve())
    counts = Counter(found.values()) + Counter({EQUIVALENT: len(chosen) - len(ran)})
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count))
    bad = sorted(name for name, word in found.items() if word not in (KILLED, EQUIVALENT))
    for name in bad:
        print(f"{found[name]}: {name}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
