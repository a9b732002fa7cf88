"""Words of a stranger's scenario, run and certificate at a terminal: they are shown, and command nothing."""

import unicodedata
from pathlib import Path

import pytest

from tests.cli.command import SMALL, fedpriv

WORDS = "\\u001b[31m\\u001b]0;owned\\u0007\\u202Eevil"
TITLE = f'title = "{WORDS}\\nfedpriv: all is well"\n'
COMMANDS = [
    ["show", "runs/small"],
    ["table", "runs/small"],
    ["table", "runs/small", "--format", "csv"],
    ["table", "runs/small", "--format", "latex"],
    ["privacy", "runs/small"],
    ["compare", "runs/small", "runs/small"],
    ["certify", "runs/small"],
    ["theorem", "small.toml"],
    ["run", "small.toml", "--dry-run"],
    ["run", "odd.toml", "--dry-run"],
    ["privacy", "odd.toml"],
    ["show", "odd"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stranger's scenario, its run, and a scenario whose keys and values are such words."""
    folder = tmp_path_factory.mktemp("strangers")
    (folder / "small.toml").write_text(TITLE + SMALL)
    odd = SMALL.replace('"synthetic"', f'"{WORDS}"').replace("[privacy]", f'"{WORDS}" = 1\n[privacy]')
    (folder / "odd.toml").write_text(TITLE + odd)
    (folder / "odd").mkdir()
    (folder / "odd" / "results.json").write_text(f'{{"title": "{WORDS}", "{WORDS}": 1}}')
    done = fedpriv("run", "small.toml", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_text_of_foreign_scenarios_and_runs_reaches_no_terminal_as_control_characters(
    folder: Path, command: list[str]
) -> None:
    """Gains: the title, the colours and the lines of somebody's terminal (S6)."""
    done = fedpriv(*command, cwd=folder)
    said = done.stdout + done.stderr
    assert said
    assert [c for c in said if c != "\n" and unicodedata.category(c)[0] == "C"] == []
    assert "\nfedpriv: all is well" not in said
