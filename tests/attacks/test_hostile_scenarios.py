"""A server that writes every key of a scenario and every name: how it spells them, and what they stand for."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpriv.core.errors import RunError
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo
from tests.attacks.guards import guard_for, random_records, scenario, zeros


def test_one_scenario_has_one_spelling_and_a_key_that_is_there_twice_one_value(tmp_path: Path) -> None:
    """Gains: a second scenario under a run that is paid for, or a price that is not that of what is run."""
    guard, cell = guard_for(tmp_path, *random_records(), budget=4.0), scenario()
    tree, first = (
        json.loads(cell),
        guard_for(tmp_path, *random_records(), budget=4.0).answer("run", cell, 1, zeros()),
    )
    spellings = [
        json.dumps(tree, indent=3),
        json.dumps(dict(reversed(list(tree.items())))),
        cell.replace("seed", "\\u0073eed"),
        f'{{"seed": 99, {cell[1:]}',
    ]
    for other in spellings:
        assert torch.equal(guard.answer("run", other, 1, zeros()), first)
    dearer = cell[:-1] + ', "privacy": {"relation": "replace-one", "mu": 1000.0}}'
    with pytest.raises(RunError, match="is not the one this run was opened with"):
        guard.answer("run", dearer, 1, zeros())
    with pytest.raises(RunError, match="costs mu = 1000"):
        guard.answer("another", dearer, 1, zeros())
    assert [row.mu for row in guard._ledger.overview()] == [pytest.approx(4.0)]


@pytest.mark.parametrize("run", ["a\x00b", "é", "e\u0301", "a ", "'; DROP TABLE runs; --", "../../run", "\ud800"])
def test_any_name_of_a_run_is_one_run_or_is_refused(tmp_path: Path, run: str) -> None:
    """Gains: the record of what was spent, under a name that a file or a database takes for another."""
    guard = guard_for(tmp_path, *random_records(), budget=4.0)
    guard.answer("a", scenario(privacy__rho=1.0), 1, zeros())
    if run == "\ud800":
        with pytest.raises(RunError, match="refuses: the run's name"):
            guard.answer(run, scenario(privacy__rho=1.0), 1, zeros())
    else:
        guard.answer(run, scenario(privacy__rho=1.0), 1, zeros())
    assert [row.run_id for row in guard._ledger.overview()] == (["a"] if run == "\ud800" else ["a", run])


def test_records_are_read_without_denormals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains: bright records, by the clock: at queries of 1e-310 a round took 20 ms with them, 5 ms without.

    Scenarios are read and prices computed with them: a clip of 1e-320 is not 0.
    """

    def flushes() -> bool:
        return bool((torch.tensor([1e-310], dtype=torch.float64) * 1.0 == 0.0).all())

    guard, honest, found = guard_for(tmp_path, *random_records()), Silo.answer, list[bool]()

    def watched(*given: Any) -> Any:
        found.append(flushes())
        return honest(*given)

    monkeypatch.setattr(Silo, "answer", watched)
    guard.answer("run", scenario(), 1, zeros())
    supported = torch.set_flush_denormal(False)  # a processor that cannot says so
    assert found == [supported]
    assert not flushes()


def test_nothing_that_a_scenario_names_is_opened(tmp_path: Path) -> None:
    """Gains: whether a file is there, through refusals; or a device or a data set of the server's choice."""
    guard, tree = guard_for(tmp_path, *random_records(), budget=100.0), json.loads(scenario())
    guard.answer("warm", scenario(), 1, zeros())
    names: list[str] = []
    watching = [True]

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if watching and event in ("open", "os.listdir", "socket.connect", "subprocess.Popen"):
            names.append(str(given[0]))

    sys.addaudithook(hook)
    changes: list[dict[str, Any]] = [
        {"data": {"name": "/etc/passwd"}},
        {"data": {"name": str(tmp_path / "shard-0.npz"), "validation": 30}},
        {"data": {"name": "x", "partition": "dirichlet", "concentration": 1e-300}},
        {
            "run": {
                **tree["run"],
                "device": "/dev/zero",
                "goldstein_radius": 0.5,
                "evaluations": 2**50,
                "noise": "aggregate",
            }
        },
        {"label": {"../../x": "/etc/passwd"}, "title": "/etc/passwd"},
    ]
    for number, change in enumerate(changes):
        guard.answer(f"run {number}", json.dumps({**tree, **change}), 1, zeros())
    watching.clear()
    ledger = str(tmp_path / "ledger-0.sqlite")
    assert [
        name for name in names if not (name.isdigit() or name.startswith(ledger) or name == str(tmp_path))
    ] == []


def test_records_are_looked_at_for_a_query_on_file_alone_and_without_denormals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: how many records are bright, by the clock and free of charge, at a scale of features of 1e-310."""
    guard, seen, found = guard_for(tmp_path, *random_records(), budget=100.0), Shard.seen, list[Any]()

    def watched(shard: Shard, cell: Any) -> Any:
        if shard.images.any():
            flushed = (torch.tensor([1e-310], dtype=torch.float64) * 1.0 == 0.0).all()
            found.append((guard._ledger.answer("run", 1) is not None, bool(flushed)))
        return seen(shard, cell)

    monkeypatch.setattr(Shard, "seen", watched)
    cell = scenario(model={"name": "softmax-regression", "feature_norm": 1e-3})
    for wrong in (torch.zeros(7), torch.zeros(7, dtype=torch.float64), zeros() * float("nan"), zeros() + 2.0**41):
        with pytest.raises(RunError):
            guard.answer("run", cell, 1, wrong)
    assert found == []
    assert list(guard._ledger.overview()) == []
    guard.answer("run", cell, 1, zeros())
    assert found == [(True, torch.set_flush_denormal(False))]


def test_no_scale_of_features_makes_denormals(tmp_path: Path) -> None:
    guard = guard_for(tmp_path, *random_records(), budget=100.0)
    tree = json.loads(scenario())
    tree["model"]["feature_norm"] = 1e-310
    with pytest.raises(RunError, match="feature_norm"):
        guard.answer("run", json.dumps(tree), 1, zeros())


def test_a_model_that_does_not_take_the_records_is_refused_before_it_is_charged(tmp_path: Path) -> None:
    guard = guard_for(tmp_path, *random_records(), budget=100.0)
    with pytest.raises(RunError, match="columns are places among numbers"):
        guard.answer("run", scenario(model={"name": "column-moments", "columns": [0]}), 1, zeros())
    assert list(guard._ledger.overview()) == []


def test_columns_are_named_once(tmp_path: Path) -> None:
    """Gains: the guard's memory: one column named 32,000 times makes 64,000 features of each record."""
    guard = guard_for(tmp_path, *random_records(), budget=100.0)
    tree = json.loads(scenario())
    tree["model"] = {"name": "column-moments", "columns": [0, 0]}
    with pytest.raises(RunError, match="a column is named twice"):
        guard.answer("run", json.dumps(tree), 1, zeros())
