"""A plugin of pytest: coverage by test and by shared fixture, of subprocesses too, and the time of each test.

Coverage runs already when a process imports this, by `sitecustomize` in a folder that `cover.measure` makes.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.mutants.cover import TEST, TIMES

_tests: dict[str, dict[str, Any]] = {}


def _switch(context: str) -> None:
    os.environ[TEST] = context
    if (running := coverage.Coverage.current()) is not None:
        running.switch_context(context)


def fixture_context(definition: Any) -> str:
    """Name of a fixture that several tests share, as a context."""
    return f"fixture {definition.baseid} {definition.argname}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _switch(item.nodeid)
    try:
        return (yield)
    finally:
        _switch("")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Generator[None, object, object]:
    if fixturedef.scope == "function":
        return (yield)
    before = os.environ.get(TEST, "")
    _switch(fixture_context(fixturedef))
    try:
        return (yield)
    finally:
        _switch(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    report = yield
    definitions = [each for found in item._fixtureinfo.name2fixturedefs.values() for each in found]
    report.shared = sorted({fixture_context(each) for each in definitions if each.scope != "function"})
    return report


def pytest_runtest_logreport(report: Any) -> None:
    test = _tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True, "shared": report.shared})
    test["seconds"] = round(test["seconds"] + report.duration, 4)
    test["passed"] &= report.passed


def pytest_sessionfinish(session: pytest.Session) -> None:
    running = coverage.Coverage.current()
    if running is not None:
        running.stop()
        running.save()  # here, since a worker of xdist is killed if it takes seconds to end
    if not hasattr(session.config, "workerinput"):
        Path(os.environ[TIMES]).write_text(json.dumps(_tests, sort_keys=True), encoding="utf-8")
