"""Memory that a run keeps while it lasts, and gives back when it is over."""

import json
from unittest.mock import Mock

import pytest

from fedpriv.engines import table as pages
from tests.engines.builders import run_python

MEGABYTES = 64
LONGEST = pages._MAX_RETAINED_BYTES // 2**20
PROGRAM = f"""
import json, sys
import psutil, torch
from fedpriv.engines.table import retain_freed_pages

def resident() -> float:
    return psutil.Process().memory_info().rss / 2**20

def long_vector(megabytes: int = {MEGABYTES}) -> None:
    torch.ones(megabytes * 2**18)

torch.ones(10)
before = resident()
with retain_freed_pages():
    with retain_freed_pages():
        long_vector()
    inside = resident() - before
    long_vector({LONGEST} + 1)
    longer = resident() - before - inside
outside = resident() - before
long_vector()
print(json.dumps([inside, outside, resident() - before, longer]))
"""

linux_only = pytest.mark.skipif(pages._load_glibc() is None, reason="malloc is not glibc's, or was set by hand")


def measure(**environment: str) -> list[float]:
    """Megabytes that stay with a process: freed inside of a run, after the run, freed after it; longer ones."""
    sizes: list[float] = json.loads(run_python("-c", PROGRAM, **environment))
    return sizes


@pytest.mark.slow
@linux_only
def test_freed_memory_pages_are_retained_during_a_run_and_returned_at_its_end() -> None:
    inside, outside, later, longer = measure()
    assert inside > 0.9 * MEGABYTES
    assert longer < 0.2 * MEGABYTES
    assert outside < 0.2 * MEGABYTES
    assert later < 0.2 * MEGABYTES


@pytest.mark.slow
@linux_only
def test_malloc_settings_of_the_environment_take_precedence() -> None:
    inside, *_ = measure(MALLOC_MMAP_THRESHOLD_="131072")
    assert inside < 0.2 * MEGABYTES


def test_page_retention_does_nothing_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.ctypes, "CDLL", Mock(side_effect=OSError("no such library")))
    with pages.retain_freed_pages():
        assert not pages._ACTIVE_RUNS
