"""Runs tests on slips of one copy of the checkout, in forks of a process that has imported fedpriv too.

A slip inside functions that did not run at import changes their code in place.  For any other slip the fork
imports fedpriv again.  Tests are imported in the fork alone.  Reads one request a line, `{"file", "text",
"tests", "log"}` with the seconds that each test takes by itself, in their order, and answers `{"code", "test",
"mode"}`: pytest's exit code (None if the time ran out), the last test that began, and how the slip came in.
"""

import faulthandler
import functools
import gc
import importlib
import resource
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.cover import OPTIONS
from tests.mutants.slips import sources
from tests.mutants.worker import changed, forked, serve

MEMORY = 6 << 30
"""Bytes of data that a fork may have: a slip can fill a list without end."""
_GRACE, _PATIENCE = 60.0, 10.0
"""A test that takes longer than a minute and ten times its time hangs."""
Key = tuple[str, int]
_AT_IMPORT: set[tuple[str, Key]] = set()
_FUNCTIONS: dict[tuple[str, Key], list[types.FunctionType]] = defaultdict(list)


def _key(code: types.CodeType) -> Key:
    return code.co_qualname, code.co_firstlineno


@functools.cache
def _load() -> None:
    """Import fedpriv, and note which functions run at import and which objects hold a function's code."""
    here = str(Path.cwd())

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(here):
            _AT_IMPORT.add((frame.f_code.co_filename, _key(frame.f_code)))

    importlib.import_module("flwr.simulation")
    sys.setprofile(note)
    try:
        for file in sources(("fedpriv", "server", "clients"), Path.cwd()):
            name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            if "starter" not in name:  # files of users, to start from
                importlib.import_module(name if name.startswith("fedpriv") else f"fedpriv.{name}")
    finally:
        sys.setprofile(None)
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__code__.co_filename.startswith(here):
            _FUNCTIONS[each.__code__.co_filename, _key(each.__code__)].append(each)
    gc.collect()
    gc.freeze()


def functions(code: types.CodeType) -> Iterator[types.CodeType]:
    """The outermost functions of a module's code, those of classes too."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            if each.co_flags & 1:  # CO_OPTIMIZED: a function, and no body of a class
                yield each
            else:
                yield from functions(each)


def _outside(code: types.CodeType) -> list[object]:
    """What runs at import: a module's code and its classes'."""
    parts: list[object] = [code.co_code, code.co_names]
    for each in code.co_consts:
        is_function = isinstance(each, types.CodeType) and each.co_flags & 1
        parts += [] if is_function else _outside(each) if isinstance(each, types.CodeType) else [repr(each)]
    return parts


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _nested(each)


def swapped(file: str, before: str, after: str) -> bool:
    """Change loaded functions in place; False, and nothing done, where only a new import shows the slip."""
    old, new = (compile(text, file, "exec") for text in (before, after))
    pairs = list(zip(functions(old), functions(new), strict=False))
    keys = [_key(code) for code in functions(old)]
    if _outside(old) != _outside(new) or keys != [_key(code) for code in functions(new)]:
        return False
    slipped = [(one, other) for one, other in pairs if one != other]
    ran = any((file, _key(code)) in _AT_IMPORT for one, _ in slipped for code in _nested(one))
    if ran or "compile_function" in before or any(keys.count(_key(one)) > 1 for one, _ in slipped):
        return False
    if any(
        one.co_freevars != other.co_freevars or not _FUNCTIONS.get((file, _key(one))) for one, other in slipped
    ):
        return False
    for one, other in slipped:
        for function in _FUNCTIONS[file, _key(one)]:
            function.__code__ = other
    return True


class _Chosen:
    """A plugin that runs tests in an order, ends one that hangs, and writes the name of each that begins."""

    def __init__(self, seconds: dict[str, float], path: Path) -> None:
        self._seconds = seconds
        self._path = path

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        rank = {name: number for number, name in enumerate(self._seconds)}
        items[:] = sorted((item for item in items if item.nodeid in rank), key=lambda item: rank[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._path.write_text(report.nodeid, encoding="utf-8")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._path.write_text(nodeid, encoding="utf-8")
        faulthandler.dump_traceback_later(_GRACE + _PATIENCE * self._seconds[nodeid], exit=True)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    _load()
    file, text, tests = asked["file"], asked["text"], asked["tests"]
    before = Path(file).read_text(encoding="utf-8")
    log, said = Path(asked["log"]), Path(asked["log"]).with_suffix(".test")
    mode = Path(asked["log"]).with_suffix(".mode")
    said.write_text("", encoding="utf-8")

    def run() -> int:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        sys.dont_write_bytecode = False  # of tests; that of fedpriv is checked by the digest of its source
        in_place = asked["in_place"] and swapped(file, before, text)
        mode.write_text("in place" if in_place else "imported", encoding="utf-8")
        if not in_place:
            for name in [name for name in sys.modules if name.partition(".")[0] == "fedpriv"]:
                del sys.modules[name]
        files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
        options = [*OPTIONS, "-x", "-n0", "--tb=line", "--no-header", "-p", "no:faulthandler"]
        return int(pytest.main([*files, *options], plugins=[_Chosen(tests, said)]))

    with changed(file, text):
        limit = 4 * _GRACE + _PATIENCE * sum(tests.values())
        code = forked(run, str(log), limit)
    return {"code": code, "test": said.read_text(encoding="utf-8"), "mode": mode.read_text(encoding="utf-8")}


if __name__ == "__main__":
    serve(answer)
