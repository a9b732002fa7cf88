"""`fedpriv run --resume` with more seeds: theirs are run, and what is there stays as it is."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpriv
from fedpriv.claims.outcome import CellOutcome
from fedpriv.core.figures import format_upper
from fedpriv.scenario.load import Scenario, parse_scenario
from fedpriv.show.statement import make_statements
from fedpriv.study.results import RunFolder, read_history, read_results
from tests.cli.command import SMALL
from tests.cli.command import fedpriv as command
from tests.conftest import small_tree

SCENARIO = f"""
{SMALL}[run]
dtype = "float64"
evaluations = 4
[sweep]
"privacy.rho" = [4.0, 8.0]
seeds = 2
"""
FOUR = ("--set", "seeds=4")


def said(*options: str) -> str:
    """What `fedpriv run small.toml` says on standard error but notes; its exit code has to fit that."""
    done = command("run", "small.toml", "--quiet", *options, cwd=Path())
    assert done.returncode == (2 if done.stderr.startswith("fedpriv: ") else 0), done.stderr
    return "".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith("note: "))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of two sweep points and two seeds, in `out` below the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(SCENARIO, encoding="utf-8")
    assert said("--out", "out") == ""
    return tmp_path / "out"


def tree_of(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return tree


def by_what_was_run(folder: Path) -> dict[tuple[float, int], Mapping[str, Any]]:
    return {(cell["point"]["privacy.rho"], cell["seed"]): cell for cell in tree_of(folder)["cells"]}


def bytes_below(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_figures(cell: Any, other: Any) -> None:
    """Two cells are equal to 1e-9, but for their numbers and their seconds."""
    if isinstance(cell, dict):
        assert cell.keys() == other.keys()
        for key in cell.keys() - {"cell", "model", "wall_seconds"}:
            assert_same_figures(cell[key], other[key])
    elif isinstance(cell, list):
        assert len(cell) == len(other)
        for one, two in zip(cell, other, strict=True):
            assert_same_figures(one, two)
    else:
        assert cell == (pytest.approx(other, rel=0, abs=1e-9) if isinstance(cell, float) else other)


@pytest.mark.slow
def test_resuming_with_more_seeds_runs_only_the_new_ones_and_keeps_finished_cells(run: Path) -> None:
    before, files = tree_of(run), bytes_below(run)
    assert said("--out", "out", "--resume", *FOUR) == ""
    after = tree_of(run)
    assert [json.dumps(cell) for cell in after["cells"][:4]] == [json.dumps(cell) for cell in before["cells"]]
    for name, content in files.items():
        if name.parts[0] in ("models", "history.jsonl"):
            assert (run / name).read_bytes().startswith(content)
    assert (after["complete"], after["seeds"], after["added_seeds"]) == (True, [0, 1, 2, 3], [[2, 3]])
    assert (after["date"], after["axes"]) == (before["date"], before["axes"])
    assert after["rerun"] == "fedpriv run small.toml --set seeds=4"  # which gives all of them
    assert [cell["cell"] for cell in after["cells"]] == list(range(8))
    told = [(line["cell"], line["round"]) for line in read_history(run)]
    assert len(told) == len(set(told)) == 8 * 4
    assert not (run / "checkpoints").exists()

    assert said("--out", "fresh", *FOUR) == ""
    fresh, added = by_what_was_run(run.parent / "fresh"), by_what_was_run(run)
    assert added.keys() == fresh.keys()
    for key, cell in added.items():
        assert_same_figures(cell, fresh[key])
        models = np.load(run / cell["model"]), np.load(run.parent / "fresh" / fresh[key]["model"])
        np.testing.assert_allclose(*models, rtol=0, atol=1e-9)
    assert "added_seeds" not in tree_of(run.parent / "fresh")
    tables = [(folder / "table.md").read_text(encoding="utf-8") for folder in (run, run.parent / "fresh")]
    figures, same = (re.findall(r"\S+ ± \S+", table) for table in tables)
    assert figures == same
    assert len(figures) >= 4
    assert all("means ± sample standard deviations over 4 seeds" in table for table in tables)

    written = tree_of(run)
    assert said("--out", "out", "--resume", *FOUR) == ""
    assert tree_of(run) == written  # a start without anything to do


def test_seeds_added_in_the_scenario_file_are_run_on_resume(run: Path) -> None:
    before = tree_of(run)["cells"]
    Path("small.toml").write_text(SCENARIO.replace("seeds = 2", "seeds = [7, 1, 0]"), encoding="utf-8")
    assert said("--out", "out", "--resume", "--engine", "inprocess") == ""
    after = tree_of(run)
    assert after["cells"][:4] == before
    assert (after["seeds"], after["added_seeds"]) == ([0, 1, 7], [[7]])
    assert [(cell["seed"], cell["engine"]) for cell in after["cells"][4:]] == [(7, "inprocess")] * 2


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--set", "seeds=1"], "its seeds are 0, 1, and this scenario has no seed 1;"),
        (["--set", "seeds=[1, 2]"], "its seeds are 0, 1, and this scenario has no seed 0;"),
        ([*FOUR, "--set", "federation.rounds=9"], "federation.rounds is 8 there, 9 here;"),
        ([*FOUR, "--set", "privacy.rho=[4.0, 8.0, 9.0]"], "rho is [4.0, 8.0] there, [4.0, 8.0, 9.0] here;"),
        ([*FOUR, "--set", "privacy.rho=[8.0, 4.0]"], "privacy.rho is [4.0, 8.0] there, [8.0, 4.0] here;"),
        ([*FOUR, "--set", "run.dtype=float32"], "run.dtype is 'float64' there, 'float32' here;"),
    ],
)  # fmt: skip
def test_resuming_with_any_change_other_than_more_seeds_is_refused(
    run: Path, options: list[str], what: str
) -> None:
    files = bytes_below(run)
    line = said("--out", "out", "--resume", *options)
    assert line.startswith("fedpriv: out holds another run: ")
    assert what in line
    assert line.endswith(
        "give another --out, or the scenario and --set options it was started with; only seeds can be added\n"
    )
    assert line.count("\n") == 1
    assert bytes_below(run) == files


def test_resuming_without_the_recorded_tuning_section_is_refused(tmp_path: Path) -> None:
    """Guarantee: what choosing the settings cost is not lost with a file that does not say it."""
    tuned = {"settings": 3, "held_out": 100, "metric": "test_accuracy"}
    chosen = parse_scenario({**small_tree(), "tuned": tuned}, "test")
    RunFolder(tmp_path, chosen, "vectorized", resume=False).finished(0, outcome())
    assert RunFolder(tmp_path, chosen, "vectorized", resume=True).missing_indices == []
    with pytest.raises(fedpriv.InputError, match=r"holds another run: its \[tuned\]"):
        RunFolder(tmp_path, parse_scenario(small_tree(), "test"), "vectorized", resume=True)


def outcome() -> CellOutcome:
    return CellOutcome({"test_loss": 2.0, "test_accuracy": 0.5}, 0.25, 1.5, (), 48, np.full(4, 2.0))


def sweep(seeds: int) -> dict[str, Any]:
    return {**small_tree(seed=None), "sweep": {"privacy.rho": [4.0, 8.0], "seeds": seeds}}


class StopsAfter(fedpriv.RunObserver):
    """Ends a run once so many cells are finished."""

    def __init__(self, cells: int) -> None:
        self.left, self.places = cells, list[int]()

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        self.places = list(places)

    def finished(self, place: int, finished: CellOutcome) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_seeds_can_be_added_repeatedly_to_a_stopped_run(tmp_path: Path) -> None:
    """Every start keeps its cells' numbers, however often it is stopped; 2, 3 and 6 seeds, in Python."""
    out = tmp_path / "out"
    for seeds, places in ((2, [0, 1, 2, 3]), (3, [1, 2, 3, 4, 5]), (6, list(range(2, 12)))):
        listener = StopsAfter(1)
        with pytest.raises(KeyboardInterrupt):
            fedpriv.run(sweep(seeds), out=out, resume=seeds > 2, engine="inprocess", observers=[listener])
        assert listener.places == places
    results = fedpriv.run(sweep(6), out=out, resume=True, engine="inprocess")
    assert results.complete
    assert tree_of(out)["added_seeds"] == [[2], [3, 4, 5]]
    ran = [(cell["seed"], cell["point"]["privacy.rho"]) for cell in tree_of(out)["cells"]]
    assert ran == [(0, 4.0), (1, 4.0), (0, 8.0), (1, 8.0), (2, 4.0), (2, 8.0),
                   *((seed, rho) for rho in (4.0, 8.0) for seed in (3, 4, 5))]  # fmt: skip
    fedpriv.run(sweep(6), out=tmp_path / "fresh", engine="inprocess")
    fresh = by_what_was_run(tmp_path / "fresh")
    for key, cell in by_what_was_run(out).items():
        assert_same_figures(cell, fresh[key])


def test_resuming_stopped_added_seeds_leaves_the_earlier_cells_unchanged(tmp_path: Path) -> None:
    """Cells that run together are run again together; those of another start are none of them."""
    out = tmp_path / "out"
    fedpriv.run(sweep(2), out=out)
    first = tree_of(out)["cells"]
    with pytest.raises(KeyboardInterrupt):
        fedpriv.run(sweep(4), out=out, resume=True, observers=[StopsAfter(2)])
    listener = StopsAfter(9)
    assert fedpriv.run(sweep(4), out=out, resume=True, observers=[listener]).complete
    assert listener.places == [4, 5, 6, 7]
    assert tree_of(out)["cells"][:4] == first


def test_the_composed_mu_of_a_statement_counts_the_runs_of_added_seeds(tmp_path: Path) -> None:
    """Guarantee: every seed is a run of its own on the same records, and what they cost together counts all."""
    out = tmp_path / "out"
    tree = {**small_tree(seed=None), "sweep": {"seeds": 2}}
    fedpriv.run(tree, out=out)
    fedpriv.run({**tree, "sweep": {"seeds": 5}}, out=out, resume=True)
    results = read_results(out)
    released = dataclasses.replace(results, cells=[{**cell, "noise": "release"} for cell in results.cells])
    (statement,) = make_statements(released)
    mu = results.cells[0]["mu"]
    assert f"these 5 runs has together only the protection of μ = {format_upper(mu * 5**0.5)}" in statement.noise
