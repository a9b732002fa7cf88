"""Memory is said before a run starts, is enough, and more than the machine has is refused."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.long_vectors import vectors_at_peak
from fedpriv.core.errors import InputError
from fedpriv.core.limits import LIMIT_REMEDIES
from fedpriv.engines import table
from fedpriv.engines.vectorized.silos import group_cells
from fedpriv.loss.objective import Records
from fedpriv.noise.registry import SELECTABLE_MECHANISMS
from fedpriv.papers.table import ALGORITHMS
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.cli.command import fedpriv
from tests.conftest import small_tree
from tests.engines.builders import ENGINES, plan_cell, refusal, run_python, small_cell
from tests.engines.peak import run_and_measure
from tests.engines.test_every_row import SETTINGS
from tests.parts import in_parts


def estimate(cells: Sequence[Cell], engine: str, **processes: int) -> table.MemoryNeed:
    need = table.estimate_memory(cells, engine, **processes)
    assert need is not None
    return need


def sections_of(row: str, **settings: object) -> dict[str, Any]:
    algorithm, table_row = SETTINGS[row], ALGORITHMS[row]
    return {
        "algorithm": {"name": row, "trust": table_row.trusts[0], **algorithm, **settings},
        "privacy": {"relation": "zero-out", table_row.name_of_mu: 1.0},
    }


@pytest.mark.parametrize("row", [name for name in ALGORITHMS if name in SETTINGS])
@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_the_memory_estimate_includes_the_states_of_every_algorithm(row: str, engine: str) -> None:
    """Of vectors that a state has, whatever they are called."""
    try:
        cell = small_cell(**sections_of(row), model={"name": "mlp", "hidden": 64})
        parts = estimate([cell], engine).parts
    except InputError as error:
        pytest.skip(str(error))  # a row with a participation or a model of its own
    assert sum(parts.get(name, 0) for name in ("states", "server", "silos")) >= 3 * 50_890 * 8


def test_the_memory_estimate_grows_with_cells_and_worker_processes() -> None:
    cells = [small_cell(seed=seed) for seed in range(4)]
    one, four = (estimate(cells[:count], "vectorized") for count in (1, 4))
    assert four.parts["states"] == 4 * one.parts["states"]
    apart = estimate(cells, "inprocess", workers=3)
    assert apart.total == 3 * (apart.resident + sum(apart.parts.values()))
    assert table.estimate_memory(cells, "deployment") is None
    assert estimate(cells, "vectorized", workers=3).processes == 1  # one group, which one process computes


def test_the_memory_estimate_includes_the_test_records_of_every_cell() -> None:
    """Was: those of one cell, half of the peak of 300 cells with 20,000 test records."""
    cells = [small_cell(seed=seed) for seed in range(4)]
    task = load_task(cells[0])
    more = replace(task, test=Records(*(torch.cat([column, column]) for column in task.test)))
    few, many = (table._record_bytes(plan_cell(cells[0]), each, cells) for each in (task, more))
    assert many - few == 4 * 16 * len(task.test.labels) * 8


def test_the_memory_estimate_includes_the_noise_of_absent_silos() -> None:
    """Was: a quarter of the peak of 400 silos with a perceptron."""
    sgd, drop_out = sections_of("dp-sgd", trust="untrusted"), {"silos": 20, "rounds": 8, "drop_out": 0.3}
    present, absent = (
        sum(estimate([small_cell(**sgd, model=PERCEPTRON, federation=federation)], "vectorized").parts.values())
        for federation in ({**drop_out, "drop_out": 0.0}, drop_out)
    )
    assert absent - present >= 15 * 203_530 * 8
    trusted = small_cell(**sections_of("dp-sgd", trust="trusted"), model=PERCEPTRON, federation=drop_out)
    assert estimate([trusted], "vectorized").parts["absent silos"] == 0


@pytest.mark.parametrize(
    ("changes", "engine", "remedy"),
    [
        (
            {"sweep": {"seeds": 3}, "seed": None},
            "vectorized",
            'fewer cells at a time .*; or run.dtype = "float32"',
        ),
        ({"run__dtype": "float32"}, "inprocess", "--engine vectorized, which keeps no silo by itself"),
        ({"sweep": {"seeds": 3}}, "inprocess", 'run.dtype = "float32"; or --engine vectorized'),  # cell by cell
        (
            {"run__dtype": "float32", "run__arithmetic": "integers"},
            "inprocess",
            "a smaller model or batch",
        ),  # not the engine that has no integers
        ({"run__dtype": "float32"}, "vectorized", "a smaller model or batch, or a machine with more"),
    ],
)
def test_a_run_that_exceeds_the_memory_of_the_machine_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], engine: str, remedy: str
) -> None:
    scenario = parse_scenario(small_tree(**changes), "test")
    monkeypatch.setattr(table, "memory_limits", lambda: {"memory": 300 * 10**6})
    here = r"300 MB here \(mem_limit, MemoryMax\)"
    with refusal(f"memory: a run takes up to .* and there are {here}: take {remedy}"):
        run_sweep(scenario, RunOptions(engine=engine, out=tmp_path / "run"))
    assert not (tmp_path / "run" / "results.json").exists()


GOLDSTEIN = {
    "name": "goldstein-single-pass", "anchor_clip": 1.0, "clip": 0.5, "period": 4, "radius": 0.1,
    "smoothing": 0.01, "window": 2, "step": 0.1, "trust": "trusted",
}  # fmt: skip


def smoothing_tree(oracle: str, directions: int, **others: object) -> dict[str, object]:
    """A scenario of random smoothing: 32 records a round, 8 dimensions."""
    return small_tree(
        data={"name": "phase-retrieval"},
        model={"name": "amplitude-phase-retrieval"},
        federation={"silos": 2, "rounds": 4, "batch": 16},
        algorithm={**GOLDSTEIN, "oracle": oracle, "directions": directions, "shared_directions": False},
        privacy={"relation": "zero-out", "mu": 2.0},
        run={"evaluations": 1, "dtype": "float64"},
        **others,
    )


def test_the_memory_estimate_of_random_directions_is_bounded_for_any_number() -> None:
    """Was: "at most 500 MB" of a run that took 15 GB: directions of its own for each of 290 records."""
    bytes_of_copies, points, records, dimensions = 8 * 8, 2, 32, 8
    few, most = bytes_of_copies * points * records * 8 * dimensions, 8 * 2 * 2**20 * 8
    for directions, size in ((8, few), (5_000, most), (10_000_000, most)):
        cell = resolve_cell(smoothing_tree("zeroth-order", directions), "test")
        for engine in ENGINES:
            assert estimate([cell], engine).parts["directions and copies"] == size


def test_replicates_with_many_random_directions_run_in_small_groups() -> None:
    tree = smoothing_tree("zeroth-order", 5_000, sweep={"seeds": 12}, seed=None)
    cells = [point.cell for point in parse_scenario(tree, "test").points]
    assert [len(group) for group in group_cells(cells)] == [4, 4, 4]
    assert estimate(cells, "vectorized").parts["directions and copies"] == 4 * 8 * 2 * 2**20 * 8


@pytest.mark.parametrize("name", ["address space", "data"])
def test_a_memory_limit_of_the_process_applies_and_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What this process has of it already is not there for a run; other processes have limits of their own."""
    monkeypatch.setattr(table, "memory_usage", lambda: {name: 900 * 10**6})
    monkeypatch.setattr(table, "_resident_bytes", lambda: 300 * 10**6)
    monkeypatch.setattr(table, "memory_limits", lambda: {name: 1000 * 10**6})
    assert table.available_memory() == (400 * 10**6, LIMIT_REMEDIES[name])
    assert table.available_memory(2) == (800 * 10**6, LIMIT_REMEDIES[name])
    monkeypatch.setattr(table, "memory_limits", lambda: {name: 700 * 10**6})
    with refusal(rf"and there are 100 MB here \({LIMIT_REMEDIES[name]}\): take "):
        table.check_memory([small_cell()], "vectorized")


PERCEPTRON: dict[str, object] = {"name": "mlp", "hidden": 256}
SOFTMAX: dict[str, object] = {"name": "softmax-regression"}
"""203,530 numbers a vector, and 7,850 of a loss that is smooth."""


def noise_tree(
    row: str, model: dict[str, object] = PERCEPTRON, silos: int = 4, seeds: int = 1, **settings: object
) -> dict[str, object]:
    """A scenario of 20 rounds in float64, with noise of this row."""
    federation, sweep = {"silos": silos, "rounds": 20}, {"seeds": seeds} if seeds > 1 else None
    return small_tree(**sections_of(row, **settings), federation=federation, model=model, sweep=sweep)


def secret_rounds(sampling: str) -> tuple[str, dict[str, object]]:
    """The vectorized engine, and 20 replicates whose silos draw their records in secret."""
    return "vectorized", small_tree(
        federation={"silos": 2, "rounds": 20, "epochs": 5, "sampling": sampling},
        algorithm={"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "zero-out", "epsilon": 4.0},
        sweep={"seeds": 20},
    )


OPTIONS: dict[str, dict[str, object]] = {
    "banded": {"bands": 4}, "bisr": {"bands": 4}, "blt": {"theta": [0.9, 0.5], "phi": [0.6, 0.1]},
    "lambda-cgd": {"theta": [0.9]}, "scheduled": {"noise_sizes": [1.0] * 20},
}  # fmt: skip
"""Keys of the mechanisms that ask for some."""

KINDS: dict[str, tuple[str, dict[str, object]]] = {
    **{
        f"{name} noise, {engine}": (engine, noise_tree("dp-ftrl", mechanism=name, **OPTIONS.get(name, {})))
        for name in (kind.name for kind in SELECTABLE_MECHANISMS)
        for engine in ENGINES
    },
    "sliding differences": ("vectorized", noise_tree("momentum-tree-reduced", SOFTMAX)),
    "aligned differences": ("vectorized", noise_tree("momentum-tree-aligned", SOFTMAX)),
    "phases": ("vectorized", noise_tree("phased-sgd", SOFTMAX, silos=1)),
    "gradients at random points": ("vectorized", smoothing_tree("first-order", 5_000, sweep={"seeds": 2})),
    "noise of silos": ("vectorized", noise_tree("local-dp-sgd", seeds=3, local_steps=4)),
    "secret rounds of one each": secret_rounds("allocation"),
    "values": ("vectorized", smoothing_tree("zeroth-order", 5_000, sweep={"seeds": 2})),
    "secret draws": secret_rounds("poisson"),
}


@pytest.fixture(scope="module")
def forks() -> Iterator[ProcessPoolExecutor]:
    """A process for each task, forked from one that has imported what a run does and has run nothing."""
    context = get_context("forkserver")
    context.set_forkserver_preload([run_and_measure.__module__])
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes:
        yield processes


@pytest.mark.parametrize("kind", in_parts(KINDS, long=[kind for kind in KINDS if "inprocess" in kind]))
def test_the_peak_memory_of_each_kind_of_run_is_within_its_estimate(
    tmp_path: Path, kind: str, forks: ProcessPoolExecutor
) -> None:
    """Guarantee of a forecast: never too little, and at most six times the peak, or 400 MB above it."""
    engine, tree = KINDS[kind]
    tree.pop("seed", None)
    told = forks.submit(run_and_measure, engine, tree, tmp_path / "run").result()
    assert told["bytes"] <= told["said"] <= max(6 * told["bytes"], told["bytes"] + 400 * 10**6), told


def test_a_memory_estimate_for_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InputError, match=r"--engine vectorised: known engines are .* did you mean 'vectorized'"):
        table.estimate_memory([small_cell()], "vectorised")


def test_a_dry_run_prints_the_memory_estimate_and_runs_nothing(tmp_path: Path) -> None:
    said = fedpriv("run", "quickstart", "--dry-run", "--out", "run", "--set", "seeds=1", cwd=tmp_path)
    assert "engine vectorized\nmemory: at most " in said.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["vectorized 10 1258 100", "inprocess 10 126 60", "inprocess 1000 0 3000"])
def test_the_peak_memory_of_large_runs_is_within_its_estimate(point: str) -> None:
    """The peak of a process of its own, beyond the loaded data."""
    told = json.loads(run_python("-m", "benchmarks.growth_point", *point.split()).splitlines()[-1])
    assert told["bytes"] <= told["said"] <= 6 * told["bytes"]


@pytest.mark.slow
def test_a_run_with_a_large_model_holds_at_most_eight_vectors_of_its_size() -> None:
    """Less what a small process has at its own peak, which is about one; its start is in it, and took twelve."""
    assert vectors_at_peak(6_000, held=True) <= 7.2
