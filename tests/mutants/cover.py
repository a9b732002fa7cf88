"""Which tests of the fast suite run a line, and how long each takes: measured once for the sources as they are."""

import ast
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.mutants.listing import ROOT
from tests.mutants.slips import Slip, sources

TEST, TIMES = "FEDPRIV_COVERED_TEST", "FEDPRIV_TEST_TIMES"
"""Environment variables: the test that a subprocess belongs to, and the file for the times."""
SUITE = "not slow and not long and not deployment and not containers"
OPTIONS = ("-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", SUITE)
_SETTINGS = f"""[run]
parallel = true
data_file = {{folder}}/coverage.db
context = ${{{{{TEST}-}}}}
include = {{copy}}/fedpriv/*, {{copy}}/server/*, {{copy}}/clients/*
patch = _exit
disable_warnings = no-data-collected, module-not-measured, include-ignored
"""


def digest(root: Path = ROOT) -> str:
    """Digest of the package and its tests, the tool for slips apart: coverage of other sources tells nothing."""
    total = hashlib.sha256()
    for path in sorted(
        path for top in ("fedpriv", "server", "clients", "tests") for path in (root / top).rglob("*.py")
    ):
        if "mutants" not in path.parts and path.name != "test_mutants.py":
            total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def measure(copy: Path, folder: Path, jobs: int, tests: Sequence[str] = ()) -> int:
    """Run the fast suite in a copy of the checkout, and write coverage and times to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as parts:
        settings = Path(parts, "coveragerc")
        settings.write_text(_SETTINGS.format(folder=parts, copy=copy), encoding="utf-8")
        Path(parts, "sitecustomize.py").write_text(
            "import coverage\n\ncoverage.process_startup()\n", encoding="utf-8"
        )
        environment = {
            **os.environ,
            "PYTHONPATH": f"{copy}{os.pathsep}{parts}",
            "COVERAGE_PROCESS_START": str(settings),
            "OMP_NUM_THREADS": "1",
            TIMES: str(Path(parts, "times.json")),
        }
        command = [sys.executable, "-m", "pytest", "-n", str(jobs), "--dist", "worksteal", *OPTIONS]
        done = subprocess.run(
            [*command, "-p", "tests.mutants.contexts", *tests], cwd=copy, env=environment, check=False
        )
        import coverage

        (folder / "coverage.db").unlink(missing_ok=True)
        combined = coverage.Coverage(data_file=str(folder / "coverage.db"), config_file=False)
        combined.combine([parts], strict=True)
        combined.save()
        times = json.loads(Path(parts, "times.json").read_text(encoding="utf-8"))
    kept = {"digest": digest(), "copy": str(copy), "tests": times, "of": list(tests)}
    (folder / "tests.json").write_text(json.dumps(kept), encoding="utf-8")
    print(
        f"{len(times)} tests, {sum(not test['passed'] for test in times.values())} of them not green and left out"
    )
    return done.returncode


def copy_and_measure(folder: Path, jobs: int, tests: Sequence[str]) -> int:
    from tests.mutants.__main__ import copy_checkout

    with tempfile.TemporaryDirectory() as copy:
        copy_checkout(ROOT, Path(copy))
        return measure(Path(copy), folder, jobs, tests)


class Covered:
    """What `measure` wrote: tests by line, and their times."""

    def __init__(self, folder: Path) -> None:
        import coverage

        kept = json.loads((folder / "tests.json").read_text(encoding="utf-8"))
        if kept["digest"] != digest():
            raise ValueError(f"the coverage in {folder} is of other sources: run `--cover` again")
        if kept["of"]:
            print("the coverage is of", *kept["of"], "alone: other tests are not met", flush=True)
        self.seconds = {name: test["seconds"] for name, test in kept["tests"].items() if test["passed"]}
        self._copy = Path(kept["copy"])
        self._data = coverage.CoverageData(str(folder / "coverage.db"))
        self._data.read()
        self._users: dict[str, list[str]] = defaultdict(list)
        for name in self.seconds:
            for shared in kept["tests"][name]["shared"]:
                self._users[shared].append(name)

    @functools.lru_cache(32)  # noqa: B019  (one object a process)
    def _contexts(self, file: str) -> dict[int, list[str]]:
        return self._data.contexts_by_lineno(str(self._copy / file))

    def of_lines(self, file: str, lines: Iterable[int]) -> set[str]:
        """Green tests that run one of the lines, themselves or in a fixture that they share."""
        contexts = self._contexts(file)
        names = {context for line in lines for context in contexts.get(line, ())}
        users = {test for name in names for test in self._users.get(name, ())}
        return {name for name in names | users if name in self.seconds}

    def of_file(self, file: str) -> set[str]:
        return self.of_lines(file, list(self._contexts(file)))

    def of_slip(self, slip: Slip) -> set[str]:
        """Tests for a slip: of its line or, outside of functions, of the lines that read the name it defines."""
        if slip.function:
            return self.of_lines(slip.file, slip.lines) or self.of_lines(slip.file, slip.statement)
        readers = [place for name in slip.names for place in _readers()[name]]
        found = {test for file, line in readers for test in self.of_lines(file, [line])}
        return found | self.of_lines(slip.file, slip.body) or self.of_file(slip.file)


@functools.cache
def _readers() -> dict[str, list[tuple[str, int]]]:
    """Where the package reads a name, by name."""
    found: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for file in sources(("fedpriv", "server", "clients")):
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            name: Any = getattr(node, "id", None) or getattr(node, "attr", None)
            if name and isinstance(node.ctx, ast.Load):
                found[name].append((file, node.lineno))
    return found
