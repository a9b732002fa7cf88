"""Fixtures shared by the suite: small cells on the synthetic data set, and a temporary data folder."""

import functools
import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
import typer.main
import typer.testing

from fedpriv.data import named, synthetic
from fedpriv.engines.children import ALLOW_ROOT
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell

hypothesis.settings.register_profile("fedpriv", deadline=None)  # a busy machine fails no test
hypothesis.settings.load_profile("fedpriv")


def small_tree(**overrides: Any) -> dict[str, Any]:
    """A scenario tree on synthetic data: 3 silos, 8 rounds, untrusted, float64."""
    tree: dict[str, Any] = {
        "name": "small",
        "seed": 1,
        "data": {"name": "synthetic"},
        "federation": {"silos": 3, "rounds": 8},
        "algorithm": {"name": "dp-mu2-fl", "trust": "untrusted", "diameter": 0.1},
        "privacy": {"relation": "replace-one", "rho": 4.0},
        "run": {"dtype": "float64", "evaluations": 4},
    }
    for dotted, value in overrides.items():
        *sections, key = dotted.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        if value is None:
            node.pop(key, None)
        else:
            node[key] = value
    return tree


def pytest_configure() -> None:
    """Have temporary folders in memory where 4 GiB of it are free: tests of ledgers wait for the disk otherwise.

    Another place is `PYTEST_DEBUG_TEMPROOT`, which pytest reads.
    """
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK | os.X_OK):
        state = os.statvfs(memory)
        if state.f_bavail * state.f_frsize >= 2**32 and not state.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each n-th set of parameters stays fast of a test that is marked `every(n)`, and the others are slow.

    Of the slow sets of one that is marked `sample(n)` each n-th stays slow, and the others are long.
    """
    met = Counter[str]()
    for item in items:
        function = item.nodeid.partition("[")[0]
        is_slow = item.get_closest_marker("slow") is not None
        if (mark := item.get_closest_marker("every")) is not None and not is_slow:
            if is_slow := met[function] % mark.args[0] > 0:
                item.add_marker("slow")
            met[function] += 1
        if is_slow and (mark := item.get_closest_marker("sample")) is not None:
            if met[f"slow {function}"] % mark.args[0]:
                item.own_markers = [own for own in item.own_markers if own.name != "slow"]
                item.add_marker("long")
            met[f"slow {function}"] += 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage among modules and tests, which stay to the end, and more rarely afterwards.

    It took a sixth of the processor's time.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    return result


@pytest.fixture(autouse=True, scope="session")
def synthetic_data_are_drawn_once() -> Iterator[None]:
    """Each caller gets its own copy."""
    draw = functools.cache(synthetic.make_blobs)
    with mock.patch.object(named, "make_blobs", lambda **sizes: tuple(part.copy() for part in draw(**sizes))):
        yield


@pytest.fixture(autouse=True)
def environment_is_restored() -> Iterator[None]:
    """Files of `--import` are in the environment for later commands, and a test's files go with the test."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True, scope="session")
def commands_are_built_once() -> Iterator[None]:
    """Typer builds all commands of an app anew for each call, which takes as long as many of the calls."""
    build = functools.cache(typer.main.get_command)
    with (
        mock.patch.object(typer.main, "get_command", build),
        mock.patch.object(typer.testing, "_get_command", build),
    ):
        yield


@pytest.fixture
def small_cell() -> Callable[..., Cell]:
    """Makes a small cell; keyword `federation__silos=5` overrides a key, None removes it."""
    return lambda **overrides: resolve_cell(small_tree(**overrides), "test")


@pytest.fixture(autouse=True, scope="session")
def root_may_run_engines() -> None:
    """Where the suite runs as root, in a container, it means to."""
    os.environ.setdefault(ALLOW_ROOT, "1")


@pytest.fixture(autouse=True, scope="session")
def only_the_owner_writes() -> Iterator[None]:
    """Guards refuse what a group may write, as a umask of 002 lets it: tests pass whatever the developer's is."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True, scope="session")
def output_is_piped() -> None:
    """Tables have the width of piped output, however wide the developer's terminal is."""
    os.environ.pop("COLUMNS", None)


@pytest.fixture(autouse=True, scope="session")
def commands_can_be_interrupted() -> Iterator[None]:
    """A suite that runs in the background ignores SIGINT, which the commands it starts would inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
