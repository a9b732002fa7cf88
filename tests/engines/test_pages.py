"""Memory that a run keeps while it lasts, and gives back when it is over."""

import json
import os
import subprocess
import sys
from ctypes import CDLL
from pathlib import Path

import pytest

from fedpriv.engines import table as pages

ROOT = Path(__file__).resolve().parents[2]
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


def measured(**environment: str) -> list[float]:
    """Megabytes that stay with a process: freed inside of a run, after the run, freed after it; longer ones."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    told: list[float] = json.loads(done.stdout)
    return told


@pytest.mark.slow
@linux_only
def test_a_run_keeps_what_it_frees_and_gives_it_back_at_its_end() -> None:
    inside, outside, later, longer = measured()
    assert inside > 0.9 * MEGABYTES
    assert longer < 0.2 * MEGABYTES
    assert outside < 0.2 * MEGABYTES
    assert later < 0.2 * MEGABYTES


@pytest.mark.slow
@linux_only
def test_settings_of_whoever_started_the_process_stand() -> None:
    inside, *_ = measured(MALLOC_MMAP_THRESHOLD_="131072")
    assert inside < 0.2 * MEGABYTES


def test_without_glibc_a_run_goes_on_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: None) -> CDLL:
        raise OSError("no such library")

    monkeypatch.setattr(pages.ctypes, "CDLL", no_library)
    with pages.retain_freed_pages():
        assert not pages._ACTIVE_RUNS
