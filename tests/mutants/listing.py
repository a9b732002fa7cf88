"""The lists of mutants in `lists/`: one slip in one line each, what it would cost, and the test that sees it.

[[mutant]]
id = "poisson-coins-floor"
file = "fedpriv/participation/secret.py"     # a path from the root
before = '''-(-self.rounds // self.groups)'''  # occurs once in the file
after = '''self.rounds // self.groups'''
gain = "What an attacker or a reader gains or loses by it, in one line."
killed_by = "tests/participation/test_secret_order.py::test_..."  # a test, or a file
equivalent = true                             # optional: no test can see it, and `gain` says why
"""

import ast
import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).with_name("lists")
_KEYS = {"id", "file", "before", "after", "gain", "killed_by"}


@dataclass(frozen=True)
class Mutant:
    """One slip: `before` becomes `after` in `file`, and the test `killed_by` has to turn red."""

    id: str
    file: str
    before: str
    after: str
    gain: str
    killed_by: str
    equivalent: bool = False
    listed_in: str = ""

    def applied(self, source: str) -> str:
        """The file with the slip; ValueError unless `before` occurs exactly once."""
        if (times := source.count(self.before)) != 1:
            raise ValueError(f"{self.where}: `before` occurs {times} times in {self.file}, and has to occur once")
        return source.replace(self.before, self.after)

    @property
    def where(self) -> str:
        return f"{self.listed_in}.toml, {self.id}"


def mutants(names: Iterable[str] = (), folder: Path = LISTS) -> list[Mutant]:
    """The mutants of the lists with these names, or of all lists; ValueError for a list that cannot be read."""
    paths = [folder / f"{name}.toml" for name in names] or sorted(folder.glob("*.toml"))
    return [mutant for path in paths for mutant in _read(path)]


def _read(path: Path) -> Iterator[Mutant]:
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
        if not entry.keys() >= _KEYS or not entry.keys() <= _KEYS | {"equivalent"}:
            given, wanted = sorted(entry), sorted(_KEYS)
            raise ValueError(f"{path.name}, {entry.get('id')}: has the keys {given}, not {wanted}")
        yield Mutant(**entry, listed_in=path.stem)


def faults(listed: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """A line for each mutant that cannot be applied, changes nothing, is no Python, or names no test."""
    found = []
    ids = [mutant.id for mutant in listed]
    for mutant in listed:
        if ids.count(mutant.id) > 1:
            found.append(f"{mutant.where}: the id is listed {ids.count(mutant.id)} times")
        try:
            source = (root / mutant.file).read_text(encoding="utf-8")
            changed = mutant.applied(source)
            if mutant.file.endswith(".py"):
                ast.parse(_statements_of(mutant, source, changed))
        except (OSError, ValueError, SyntaxError) as error:
            found.append(str(error) if isinstance(error, ValueError) else f"{mutant.where}: {error}")
        if mutant.before == mutant.after:
            found.append(f"{mutant.where}: changes nothing")
        if not mutant.gain.strip():
            found.append(f"{mutant.where}: `gain` is empty")
        if not mutant.equivalent and not _exists(mutant.killed_by, root):
            found.append(f"{mutant.where}: there is no test {mutant.killed_by!r}")
    return found


def _statements_of(mutant: Mutant, source: str, changed: str) -> str:
    """The statements at the top level that the change touches, after it: no other can have become wrong by it."""
    first = source.count("\n", 0, source.index(mutant.before))
    last, added = first + mutant.before.count("\n"), changed.count("\n") - source.count("\n")
    starts = [line for line in _starts(source) if line <= first]
    ends = [line for line in _starts(source) if line > last]
    return "\n".join(changed.split("\n")[starts[-1] if starts else 0 : ends[0] + added if ends else None])


@functools.cache
def _starts(source: str) -> list[int]:
    """Lines at which the statements of the top level start, their decorators included, counted from 0."""
    heads = ([node, *getattr(node, "decorator_list", [])] for node in ast.parse(source).body)
    return [min(node.lineno for node in head) - 1 for head in heads]


def _exists(test: str, root: Path) -> bool:
    """Whether a test id names a test file, or a function in it, without collecting anything."""
    file, *names = test.partition("[")[0].split("::")
    if not (root / file).is_file():
        return False
    return not names or names[-1] in _functions(root / file)


@functools.cache
def _functions(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^ *(?:async )?def (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
