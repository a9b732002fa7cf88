"""Memory is said before a run starts, is enough, and more than the machine has is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedpriv.core.errors import InputError
from fedpriv.engines import memory
from fedpriv.papers.table import ALGORITHMS
from fedpriv.scenario.load import resolve_cell, scenario_of
from fedpriv.scenario.schema import Cell
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.cli.command import fedpriv
from tests.conftest import small_tree
from tests.engines.test_every_row import SETTINGS

MakeCell = Callable[..., Cell]


@pytest.mark.parametrize("row", [name for name in ALGORITHMS if name in SETTINGS])
@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_every_rows_states_are_counted(row: str, engine: str) -> None:
    """Of vectors that a state has, whatever they are called."""
    tree = small_tree(
        algorithm={"name": row, "trust": ALGORITHMS[row].trusts[0], **SETTINGS[row]},
        privacy={"relation": "zero-out", ALGORITHMS[row].name_of_mu: 1.0},
        model={"name": "mlp", "hidden": 64},
    )
    try:
        need = memory.need_of([resolve_cell(tree, "test")], engine)
    except InputError as error:
        pytest.skip(str(error))  # a row with a participation or a model of its own
    assert need is not None
    parts = sum(size for name, size in need.parts.items() if name in ("states", "server", "silos"))
    assert parts >= 3 * 50_890 * 8


def test_more_cells_at_a_time_need_more_and_processes_add_up(small_cell: MakeCell) -> None:
    cells = [small_cell(seed=seed) for seed in range(4)]
    one, four = (memory.need_of(cells[:count], "vectorized") for count in (1, 4))
    assert one is not None
    assert four is not None
    assert four.parts["states"] == 4 * one.parts["states"]
    rough = memory.need_of(cells, "vectorized", roughly=True)
    assert rough is not None
    assert sum(rough.parts.values()) >= sum(four.parts.values())
    apart = memory.need_of(cells, "inprocess", workers=3)
    assert apart is not None
    assert apart.total == 3 * (apart.here + sum(apart.parts.values()))
    assert memory.need_of(cells, "deployment") is None


@pytest.mark.parametrize(
    ("changes", "engine", "remedy"),
    [
        ({"sweep": {"seeds": 3}}, "vectorized", 'fewer cells at a time .*; or run.dtype = "float32"'),
        ({"run__dtype": "float32"}, "inprocess", "--engine vectorized, which keeps no silo by itself"),
        ({"run__dtype": "float32"}, "vectorized", "a smaller model or batch, or a machine with more"),
    ],
)
def test_a_run_that_the_machine_cannot_hold_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], engine: str, remedy: str
) -> None:
    tree = small_tree(**changes)
    if "sweep" in changes:
        tree.pop("seed")
    scenario = scenario_of(tree, "test")
    monkeypatch.setattr(memory, "limit_of", lambda: 300 * 10**6)
    with pytest.raises(InputError, match=f"memory: a run takes up to .* and there are 300 MB here: take {remedy}"):
        run_sweep(scenario, RunOptions(engine=engine, out=tmp_path / "run"))
    assert not (tmp_path / "run" / "results.json").exists()


def test_random_directions_are_said_not_to_be_counted(small_cell: MakeCell) -> None:
    """Was: "at most 500 MB" of a run that took 15 GB: directions of its own for each of 290 records."""
    smoothed = {
        "name": "goldstein-single-pass", "anchor_clip": 1.0, "clip": 0.5, "period": 4, "radius": 0.1,
        "smoothing": 0.01, "window": 2, "step": 0.1, "directions": 3, "trust": "trusted",
    }  # fmt: skip
    needed = memory.need_of(
        [small_cell(algorithm=smoothed, privacy={"relation": "zero-out", "mu": 2.0})], "vectorized"
    )
    assert needed is not None
    assert needed.words().endswith(", and random directions, not counted")
    plain = memory.need_of([small_cell()], "vectorized")
    assert plain is not None
    assert "directions" not in plain.words()


def test_a_dry_run_says_the_memory_and_runs_nothing(tmp_path: Path) -> None:
    said = fedpriv("run", "quickstart", "--dry-run", "--out", "run", "--set", "seeds=1", cwd=tmp_path)
    assert "engine vectorized\nmemory: at most " in said.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["vectorized 10 1258 600", "inprocess 10 126 300", "inprocess 1000 0 6000"])
def test_a_run_keeps_to_what_was_said(point: str) -> None:
    """The peak of a process of its own, beyond the loaded data."""
    command = [sys.executable, "-m", "benchmarks.growth_point", *point.split()]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert told["bytes"] <= told["said"] <= 6 * told["bytes"]
