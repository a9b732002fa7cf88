"""RUN_DIR: written as a sweep goes, valid at every moment, read back to go on."""

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpriv
from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.core.errors import InputError
from fedpriv.engines.vectorized.checkpoints import SimulationCheckpoint, pack_checkpoint
from fedpriv.scenario.load import Scenario, parse_scenario
from fedpriv.scenario.schema import Cell
from fedpriv.show.statement import load_audit
from fedpriv.show.summary import describe_measurement
from fedpriv.study.results import RunFolder, describe_engines, read_fits, read_history, read_results
from fedpriv.study.stored import CheckpointFolder
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.conftest import small_tree

PAPER = {"rows": "privacy.rho", "columns": "federation.silos", "test_loss": [[2.5, 2.25]]}


def scenario(**overrides: Any) -> Scenario:
    sweep = {"privacy.rho": [4.0], "federation.silos": [1, 2], "seeds": 2}
    return parse_scenario({**small_tree(**overrides), "sweep": sweep, "paper": PAPER}, "test")


def outcome(loss: float = 2.0) -> CellOutcome:
    return CellOutcome({"test_loss": loss, "test_accuracy": 0.5}, 0.25, 1.5, (), 48, np.full(4, loss))


def folder(path: Path, *, resume: bool = False, finished: Sequence[int] = (), **overrides: Any) -> RunFolder:
    """The folder of a run, in which cells of these numbers are then evaluated at the last round, and finished."""
    run = RunFolder(path, scenario(**overrides), "vectorized", resume=resume)
    for index in finished:
        run.evaluated(index, 8, {"test_loss": 2.0, "test_accuracy": 0.5})
        run.finished(index, outcome())
    return run


def change_results(path: Path, keys: tuple[Any, ...], value: Any) -> None:
    """Write another value into results.json, under these keys."""
    tree = json.loads((path / "results.json").read_text())
    functools.reduce(lambda node, key: node[key], keys[:-1], tree)[keys[-1]] = value
    (path / "results.json").write_text(json.dumps(tree))


def test_a_run_folder_can_be_read_before_its_first_cell_is_finished(tmp_path: Path) -> None:
    assert folder(tmp_path / "deep" / "run").missing_indices == [0, 1, 2, 3]
    results = read_results(tmp_path / "deep" / "run")
    assert not results.complete
    assert results.cells == []
    assert results.axes == {"privacy.rho": [4.0], "federation.silos": [1, 2]}
    assert results.seeds == [0, 1]
    assert results.published == scenario().published


def test_a_folder_with_checkpoints_of_another_run_is_refused_before_it_is_changed(tmp_path: Path) -> None:
    folder(tmp_path)
    content = pack_checkpoint(SimulationCheckpoint(1, 0.0, (), ()), ["a cell that the scenario does not have"])
    CheckpointFolder(tmp_path, RunObserver()).keep("other", content)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    with pytest.raises(InputError, match=r"other\.npz is a checkpoint of cells that this scenario does not have"):
        run_sweep(scenario(), RunOptions(engine="inprocess", out=tmp_path, resume=True))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


def test_results_are_complete_only_with_the_last_cell(tmp_path: Path) -> None:
    run = folder(tmp_path)
    for number, place in enumerate((2, 0, 3, 1), start=1):  # engines finish in any order
        run.finished(place, outcome(float(place + 1)))
        results = read_results(tmp_path)
        assert results.complete is (number == 4)
        assert len(results.cells) == number
    assert run.missing_indices == []
    assert [cell["cell"] for cell in results.cells] == [0, 1, 2, 3]
    for cell in results.cells:
        np.testing.assert_array_equal(np.load(tmp_path / cell["model"]), np.full(4, cell["cell"] + 1.0))
        assert (cell["test_loss"], cell["seed"]) == (cell["cell"] + 1.0, cell["cell"] % 2)
        assert cell["point"] == {"privacy.rho": 4.0, "federation.silos": 1 + cell["cell"] // 2}
        assert (cell["fraction_clipped"], cell["wall_seconds"]) == (0.25, 1.5)


def test_a_cell_without_noise_claims_no_mu_and_no_epsilon(tmp_path: Path) -> None:
    """The figures come from the ledger: a run that released nothing private has no μ, whatever was asked for."""
    folder(tmp_path, finished=[0])
    (cell,) = read_results(tmp_path).cells
    assert cell["noise"] == "none"
    assert [cell[key] for key in ("mu", "rho", "zcdp", "epsilon", "epsilon_paper")] == [None] * 5


def test_a_metric_that_is_not_finite_is_never_written_to_the_results(tmp_path: Path) -> None:
    run = folder(tmp_path, finished=[0])
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.finished(1, outcome(float("nan")))
    assert (tmp_path / "results.json").read_bytes() == before


def test_a_finished_run_folder_has_no_temporary_files(tmp_path: Path) -> None:
    folder(tmp_path, finished=[0]).ended()
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["history.jsonl", "models/0000.npy", "results.json"]


def test_resuming_keeps_finished_cells_and_drops_the_history_of_unfinished_ones(tmp_path: Path) -> None:
    run = folder(tmp_path)
    for place in (1, 2):
        run.evaluated(place, 4, {"test_loss": 2.0 + place, "test_accuracy": 0.5})
    run.finished(1, outcome())
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"cell": 1, "round": 8, "tes')
    assert [line["cell"] for line in read_history(tmp_path)] == [1, 2]
    again = folder(tmp_path, resume=True)
    assert again.missing_indices == [0, 2, 3]
    assert [line["cell"] for line in read_history(tmp_path)] == [1]  # cell 2 is told again when it is run again
    assert read_results(tmp_path).cells[0]["cell"] == 1


def test_a_cell_whose_model_is_gone_is_run_again(tmp_path: Path) -> None:
    folder(tmp_path, finished=range(4))
    (tmp_path / "models" / "0002.npy").unlink()
    assert folder(tmp_path, resume=True).missing_indices == [2]
    assert [line["cell"] for line in read_history(tmp_path)] == [0, 1, 3]


def test_a_run_that_two_engines_computed_names_both(tmp_path: Path) -> None:
    folder(tmp_path, finished=[0])
    again = RunFolder(tmp_path, scenario(), "inprocess", resume=True)
    for place in (1, 2, 3):
        again.finished(place, outcome())
    assert describe_engines(read_results(tmp_path)) == "vectorized, inprocess"
    assert "engine vectorized, inprocess" in describe_measurement(read_results(tmp_path))


def test_resuming_a_folder_without_results_starts_all_cells(tmp_path: Path) -> None:
    assert folder(tmp_path / "new", resume=True).missing_indices == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "holds results already; give another --out, or --resume"),
        *(
            ({"resume": True, **change}, "holds another run: its cell 3 differs")
            for change in ({"federation__rounds": 9}, {"algorithm__diameter": 0.2}, {"run__dtype": "float32"})
        ),
    ],
)
def test_results_are_not_written_over_and_not_resumed_by_another_scenario(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    folder(tmp_path, finished=[3])
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(InputError, match=reason) as caught:
        folder(tmp_path, **change)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "results.json").read_bytes() == before


def test_a_history_line_holds_the_sweep_point_the_round_and_the_metrics(tmp_path: Path) -> None:
    metrics = {"test_loss": 2.25, "test_accuracy": 0.5}
    folder(tmp_path).evaluated(3, 6, metrics)
    line = {"cell": 3, "privacy.rho": 4.0, "federation.silos": 2, "seed": 1, "round": 6, **metrics}
    assert list(read_history(tmp_path)) == [line]


def test_results_of_another_format_are_refused(tmp_path: Path) -> None:
    folder(tmp_path)
    change_results(tmp_path, ("format",), 2)
    with pytest.raises(InputError, match="format 2, this version of fedpriv reads format 1"):
        read_results(tmp_path)


def test_reading_the_history_of_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no history\.jsonl there"):
        list(read_history(tmp_path))


def test_a_cell_group_with_a_missing_cell_is_computed_again_as_a_whole(tmp_path: Path) -> None:
    """Cells that ran together ran as so many: fewer at once may round otherwise."""
    folder(tmp_path, finished=[0, 2, 3])

    def groups(cells: Sequence[Cell]) -> list[list[int]]:
        assert list(cells) == [point.cell for point in scenario().points]
        return [[0, 1], [2, 3]]

    again = RunFolder(tmp_path, scenario(), "vectorized", resume=True, group_cells=groups)
    assert again.missing_indices == [0, 1]
    assert [line["cell"] for line in read_history(tmp_path)] == [2, 3]
    assert [cell["cell"] for cell in read_results(tmp_path).cells] == [2, 3]


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("axes",), 3),
        (("versions",), "a"),
        (("cells", 0), 1),
        (("cells", 0, "point"), []),
        (("cells", 0, "releases"), None),
        (("cells", 0, "scenario"), {}),
        (("cells", 0, "scenario", "privacy"), "mu"),
        (("cells", 0, "scenario", "data"), {"name": "synthetic"}),
        (("cells", 0, "model"), None),
        (("cells", 0, "wall_seconds"), None),
        (("cells", 0, "fraction_clipped"), {}),
        (("cells", 0, "test_loss"), "low"),
        (("cells", 0, "unread"), "x"),
        (("cells", 0, "excess_risk"), "low"),
        (("cells", 0, "gradient_norm"), None),
        (("cells", 0, "goldstein"), [1]),
        (("cells", 0, "silos"), 0),
        (("cells", 0, "participation"), [1]),
        (("cells", 0, "learning"), 5),
        (("cells", 0, "learning"), {"tests": "x"}),
        (("cells", 0, "learning"), {"tests": 0}),
        (("cells", 0, "learning"), {"first": [1]}),
        (("cells", 0, "learning"), {"first": 1.0}),
        (("cells", 0, "learning"), {"start_and_end": [1.0, "x"]}),
        (("cells", 0, "learning"), {"commonest": 1.5}),
        (("cells", 0, "learning"), {"classes": None}),
        (("cells", 0, "learning"), {"balanced": [1.0]}),
        (("cells", 0, "learning"), {"loss": math.nan}),
        (("axes",), {"privacy.rho": [1.0]}),
        (("published",), 7),
        (("published",), {"row_values": [], "column_values": [], "withheld": [1]}),
    ],
)
def test_damaged_results_files_are_refused_in_one_line(tmp_path: Path, keys: tuple[Any, ...], value: Any) -> None:
    fedpriv.run({**small_tree(), "name": "damaged"}, out=tmp_path)
    change_results(tmp_path, keys, value)
    with pytest.raises(InputError, match="not a results file of fedpriv"):
        read_results(tmp_path)


@pytest.mark.parametrize("keys", [(), ("commonest",), ("balanced",), ("loss",), ("first",), ("start_and_end",)])
def test_findings_need_no_fact_beside_another(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """Before: results whose facts or metrics somebody had taken out ended in a traceback."""
    fedpriv.run({**small_tree(), "name": "damaged"}, out=tmp_path)
    (cell,) = read_results(tmp_path).cells
    change_results(tmp_path, ("cells", 0, "learning"), {key: cell["learning"][key] for key in keys})
    assert isinstance(describe_measurement(read_results(tmp_path)), str)
    change_results(
        tmp_path, ("cells", 0), {key: value for key, value in cell.items() if not key.startswith("test_")}
    )
    assert isinstance(describe_measurement(read_results(tmp_path)), str)


@pytest.mark.parametrize(
    "fits", ['[{"asked": [], "found": {}, "label": "", "vectors": 0, "seconds": 0.0}]', "[" * 100_000]
)
def test_damaged_fits_are_refused_in_one_line(tmp_path: Path, fits: str) -> None:
    (tmp_path / "results.json").write_text(f'{{"fits": {fits}}}', encoding="utf-8")
    with pytest.raises(InputError, match="not a results file of fedpriv"):
        read_fits(tmp_path)


def test_a_cell_of_a_negative_number_and_a_history_of_lists_are_refused(tmp_path: Path) -> None:
    folder(tmp_path, finished=(len(scenario().points) - 1,)).ended()
    (tmp_path / "history.jsonl").write_text('{"cell": [1], "round": 1}\n', encoding="utf-8")
    with pytest.raises(InputError, match="line 1: not an evaluation"):
        folder(tmp_path, resume=True)
    change_results(tmp_path, ("cells", 0, "cell"), -1)
    with pytest.raises(InputError, match="its cell -1 differs"):
        folder(tmp_path, resume=True)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"cell": 0, "round": [1], "test_loss": 1.0}',
        '{"cell": 0, "round": null, "test_loss": 1.0}',
        '{"cell": "0", "round": 1, "test_loss": 1.0}',
        '{"cell": 0, "round": 1, "test_loss": "1.0"}',
        '{"cell": 0, "round": 1, "test_loss_at_a.b": null}',
        f'{{"cell": 0, "round": 1, "test_loss": {"9" * 400}}}',
    ],
)
def test_a_history_with_values_that_are_no_numbers_is_refused_in_one_line(tmp_path: Path, line: str) -> None:
    """A report of such a history ended in a traceback."""
    good = '{"cell": 0, "algorithm.trust": "untrusted", "seed": 0, "round": 1, "test_loss": NaN}'
    (tmp_path / "history.jsonl").write_text(f"{good}\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 2: not an evaluation"):
        list(read_history(tmp_path))


def test_an_audit_that_is_nested_too_deeply_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(InputError, match="not an audit of fedpriv"):
        load_audit(tmp_path)
