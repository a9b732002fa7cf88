"""What a disk, a folder or a number can do to a command: one line, no traceback, no folder that is stuck."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.command import fedpriv

SETTINGS = "data.name=synthetic", "federation.rounds=4", "federation.silos=3", "seeds=1"
QUICKSTART = ["run", "quickstart", *(word for setting in SETTINGS for word in ("--set", setting)), "--quiet"]


def errors_of(*words: str) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    done = fedpriv(*words, cwd=Path())
    return done.returncode, done.stderr


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert errors_of(*QUICKSTART, "--out", "done")[0] == 0
    (tmp_path / "file").write_text("", encoding="utf-8")
    return tmp_path / "done"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([*QUICKSTART, "--out", "file"], "fedpriv: file"),
        ([*QUICKSTART, "--out", "file/below"], "fedpriv: file/below"),
        (["report", "done", "--out", "done"], "fedpriv: done: Is a directory"),
        (["report", "done", "--out", "."], "fedpriv: .: Is a directory"),
    ],
)
def test_an_unwritable_output_path_is_refused_in_one_line(run: Path, arguments: list[str], part: str) -> None:
    code, text = errors_of(*arguments)
    assert code in (1, 2)
    assert text.count("\n") == 1
    assert text.startswith(part)
    assert not list(run.parent.glob(".*"))


@pytest.mark.parametrize(
    "arguments", [["report", "done"], ["plot", "done"], [*QUICKSTART, "--out", "done", "--resume"]]
)
def test_a_malformed_history_line_is_refused_by_its_line_number(run: Path, arguments: list[str]) -> None:
    lines = (run / "history.jsonl").read_text(encoding="utf-8").count("\n")
    with (run / "history.jsonl").open("a", encoding="utf-8") as file:
        file.write("garbage\n")
    code, text = errors_of(*arguments)
    assert code == 2
    assert f"history.jsonl, line {lines + 1}: not an evaluation" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "part"),
    [("algorithm.step=1e308", "is too large to compute with"), ("algorithm.step=1e38", "loss is not finite")],
)
def test_a_step_length_that_overflows_fails_in_one_line(
    key: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = errors_of(*QUICKSTART, "--set", key)
    assert code in (1, 2)
    assert part in text
    assert text.count("\n") == 1


def test_running_out_of_memory_in_torch_fails_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpriv.cli.app.app", lambda: torch.empty(2**60, dtype=torch.uint8))
    code, text = errors_of()
    assert code == 1
    assert text.startswith("fedpriv: out of memory")


def test_a_run_that_could_not_start_does_not_block_the_corrected_run(run: Path) -> None:
    assert errors_of(*QUICKSTART, "--set", "run.device=nowhere", "--out", "next")[0] == 2
    assert errors_of(*QUICKSTART, "--out", "next")[0] == 0
    assert errors_of(*QUICKSTART, "--out", "next")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["rum", "quickstart"], "run"), (["privacy", "cnvert"], "convert"), (["data", "fetsh", "mnist"], "fetch")]
)  # fmt: skip
def test_a_misspelt_command_gets_exactly_one_suggestion(arguments: list[str], meant: str) -> None:
    code, text = errors_of(*arguments)
    assert code == 2
    assert text.count("Did you mean") == 1
    assert f"'{meant}'" in text


@pytest.mark.parametrize("command", ["run", "audit"])
def test_a_missing_scenario_file_is_refused_before_torch_is_imported(command: str) -> None:
    script = (
        "import sys; sys.argv = ['fedpriv', *sys.argv[1:]]\n"
        "from fedpriv.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, command, "nofile.toml"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 False\n"
    assert done.stderr.startswith("fedpriv: nofile.toml: no such file")


def test_a_misspelt_engine_or_format_gets_the_closest_suggestion(run: Path) -> None:
    assert "did you mean 'vectorized'?" in errors_of("run", "quickstart", "--engine", "vectorised")[1]
    assert "did you mean 'csv'?" in errors_of("table", "done", "--format", "cvs")[1]
