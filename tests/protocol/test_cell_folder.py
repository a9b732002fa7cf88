"""The folder between server and engine when the disk is full or a file is damaged: one line, and no litter."""

import errno
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fedpriv.claims.outcome import CellOutcome
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.files import load_json, write_bytes, write_json, write_vector
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.protocol.cell_folder import FolderReader, FolderReporter, make_run_config, scenario_from_run_config
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import make_server_app, output_folder

DONE = CellOutcome({"test_loss": 1.0}, None, 1.0, (), 1, np.zeros(3, np.float32))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    error = OSError(errno.ENOSPC, "No space left on device")
    return lambda: monkeypatch.setattr(os, "fsync", Mock(side_effect=error))


def test_a_failed_write_on_a_full_disk_leaves_the_old_file_and_no_temporary_file(
    tmp_path: Path, full_disk: Callable[[], None]
) -> None:
    write_json(tmp_path / "results.json", {"a": 1})
    full_disk()
    writes: list[tuple[Callable[..., None], str, Any]] = [
        (write_json, "results.json", {"a": 2}),
        (write_bytes, "new", b"x"),
        (write_vector, "model.npy", np.zeros(3)),
    ]
    for write, name, content in writes:
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path / name, content)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert json.loads((tmp_path / "results.json").read_text()) == {"a": 1}


def test_a_temporary_file_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    (tmp_path / f".results.json.{os.getpid()}").write_text("half")
    write_json(tmp_path / "results.json", {"a": 1}, 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").stat().st_mode & 0o777 == 0o600


def test_a_reporter_on_a_full_disk_fails_in_one_line(tmp_path: Path, full_disk: Callable[[], None]) -> None:
    reporter = FolderReporter(tmp_path)
    full_disk()
    for report, *arguments in (
        (reporter.advanced, 1),
        (reporter.finished, 0, DONE),
        (reporter.failed, RunError("broken")),
    ):
        with pytest.raises(RunError, match=r"cannot be written there: .*No space left on device"):
            report(*arguments)
    assert list(tmp_path.iterdir()) == []


def test_reports_of_an_earlier_attempt_are_removed_and_nothing_else(tmp_path: Path) -> None:
    reports = {"progress", "history.jsonl", "waiting.json", "failure.json", "outcome.json"}
    (tmp_path / "run").mkdir()
    for name in (*reports, "model.npy", "journal"):
        (tmp_path / "run" / name).write_text("of before")
    FolderReporter(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"model.npy", "journal"}
    FolderReporter(tmp_path / "a" / "new" / "run")
    assert (tmp_path / "a" / "new" / "run").is_dir()


def test_progress_is_written_once_in_a_while_with_all_rounds_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen = [100.0], list[str]()
    monkeypatch.setattr("fedpriv.protocol.cell_folder.time", SimpleNamespace(monotonic=lambda: now[0]))
    reporter = FolderReporter(tmp_path)
    for seconds, rounds in ((0.0, 3), (0.01, 2), (0.5, 4)):
        now[0] += seconds
        reporter.advanced(rounds)
        seen.append((tmp_path / "progress").read_text())
    assert seen == ["3", "3", "9"]


def test_evaluations_come_one_by_one_in_the_order_of_their_rounds(tmp_path: Path) -> None:
    reporter, reader = FolderReporter(tmp_path), FolderReader(tmp_path)
    for t, loss in ((2, 0.5), (4, 0.25)):
        reporter.evaluated(0, t, {"test_loss": loss})
        assert list(reader.read_new_evaluations()) == [{"round": t, "test_loss": loss}]


def test_a_deployment_has_its_journal_in_its_folder_and_its_checkpoints_beside_all_runs(
    small_cell: Callable[..., Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of silos' ledgers are for later runs, too."""
    runs, calls = tmp_path / "runs", list[tuple[Any, ...]]()
    monkeypatch.setattr("fedpriv.server.app.deploy_cell", lambda *arguments: calls.append(arguments))
    folder, grid, cell = runs / "mine" / "deployment" / "digest", InProcessGrid(None, 3, {}), small_cell()
    config = {**make_run_config(cell, folder), "run-token": "token"}
    app = make_server_app(lambda run_config: FolderReporter(output_folder(run_config)))
    app(grid, grid.server_context(config))
    ((given_grid, given_cell, reporter, journal, checkpoints),) = calls
    assert (given_grid, given_cell, journal, checkpoints) == (grid, cell, folder / "journal", runs / ".commits")
    reporter.evaluated(0, 1, {})
    assert (folder / "history.jsonl").exists()
    assert output_folder({"out": ""}) == Path("runs/flower")


def test_a_report_folder_that_cannot_be_created_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written there"):
        FolderReporter(tmp_path / "file" / "below")


def test_a_server_error_is_raised_even_if_its_report_cannot_be_written(
    small_cell: Callable[..., Cell], tmp_path: Path, full_disk: Callable[[], None]
) -> None:
    grid = InProcessGrid(None, 3, {})  # its nodes fail at the first message
    context = grid.server_context(make_run_config(small_cell(), tmp_path))

    def reporter(_: Mapping[str, Any]) -> FolderReporter:
        reporter = FolderReporter(tmp_path)
        full_disk()
        return reporter

    with pytest.raises(RunError, match=r"silo|roster|node"):
        make_server_app(reporter)(grid, context)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[" * 200_000, b'{"silos": [Infinity], "since": 1}', b'{"silos": [1], "since": %d}' % 10**400],
    ids=range(5),
)
def test_a_damaged_report_of_a_wait_counts_as_missing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "waiting.json").write_bytes(content)
    assert FolderReader(tmp_path).read_waiting() is None


@pytest.mark.parametrize(
    "line",
    [b"garbage\n", b"[1, 2]\n", b"\xff\xfe\n", b'{"test_loss": 1.0}\n', b'"x"\n', b"[" * 200_000 + b"\n"],
    ids=range(6),
)
def test_a_damaged_line_of_the_evaluation_history_is_named(tmp_path: Path, line: bytes) -> None:
    good = b'{"round": 1, "test_loss": 1.0}\n'
    (tmp_path / "history.jsonl").write_bytes(good + line + b'{"round": 3')
    reader = FolderReader(tmp_path)
    lines = reader.read_new_evaluations()
    assert next(lines)["round"] == 1
    with pytest.raises(RunError, match=r"history\.jsonl, line 2: damaged"):
        next(lines)


def test_evaluation_lines_are_read_once_and_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"round": 1}\n{"round": ')
    reader = FolderReader(tmp_path)
    assert list(reader.read_new_evaluations()) == [{"round": 1}]
    path.write_text('{"round": 1}\n{"round": 2}\n')
    assert list(reader.read_new_evaluations()) == [{"round": 2}]


_NPY_FILE = io.BytesIO()
np.save(_NPY_FILE, DONE.model)
NPY = _NPY_FILE.getvalue()
DAMAGES: list[tuple[str, bytes | None]] = [
    *(
        ("model.npy", content)
        for content in (b"garbage", b"", None, b"PK\x03\x04", NPY[:10] + b"{" * 118 + NPY[128:])
    ),
    *(("outcome.json", content) for content in (b"{", b"[]", b"{}", b"null")),
    *(("failure.json", content) for content in (b"garbage", b"{}", b"null", b"[" * 200_000)),
]


@pytest.mark.parametrize(("name", "content"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_result_is_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    FolderReporter(tmp_path).finished(0, DONE)
    assert FolderReader(tmp_path).read_result() is not None
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError, match=f"{name}: (damaged|missing)"):
        FolderReader(tmp_path).read_result()


@pytest.mark.parametrize("index", [-1, 10**6, "a", 0.5, [0]])
def test_a_cell_that_the_scenario_lacks_is_refused_in_one_line(index: object) -> None:
    with pytest.raises(InputError, match=r"^cell = .* has cells 0 … "):
        scenario_from_run_config({"scenario": "scenarios/mnist-untrusted.toml", "set": "", "cell": index})


def test_a_server_error_read_from_the_folder_has_its_original_type(tmp_path: Path) -> None:
    FolderReporter(tmp_path).failed(InputError("bad key"))
    with pytest.raises(InputError, match="bad key"):
        FolderReader(tmp_path).read_result()


def test_a_name_that_is_not_utf8_survives_a_json_file(tmp_path: Path) -> None:
    tree = {"name": os.fsdecode(b"caf\xe9.toml"), "title": "\\udce9 é"}
    write_json(tmp_path / "tree.json", tree)
    assert load_json((tmp_path / "tree.json").read_text(encoding="utf-8")) == tree


def test_whole_numbers_of_up_to_300_digits_are_read_whatever_their_sign() -> None:
    digits = "9" * 300
    assert [load_json(digits), load_json(f"-{digits}")] == [int(digits), -int(digits)]
    for text in (f"1{digits}", f"-1{digits}"):
        with pytest.raises(ValueError, match="more than 300 digits"):
            load_json(text)
