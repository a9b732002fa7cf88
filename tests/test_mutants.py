"""The lists of mutants fit the code as it is, and `python -m tests.mutants` tells which slips are seen."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.listing import LISTS, ROOT, faults, mutants

MODULE = (
    "def larger(one, other):\n    return one if one >= other else other\n\n\ndef unused():\n    return 1 + 1\n"
)
TEST = "from module import larger\n\n\ndef test_larger():\n    assert larger(2, 1) == larger(1, 2) == 2\n"
LIST = """
[[mutant]]
id = "seen"
file = "module.py"
before = "one >= other"
after = "one < other"
gain = "The smaller one."
killed_by = "tests/test_module.py::test_larger"
[[mutant]]
id = "no-difference"
file = "module.py"
before = "if one >= other"
after = "if one > other"
gain = "Nothing: of two alike either is the larger."
killed_by = ""
equivalent = true
[[mutant]]
id = "unseen"
file = "module.py"
before = "1 + 1"
after = "1 - 1"
gain = "Nobody looks."
killed_by = "tests/test_module.py"
"""


def test_every_mutant_can_be_applied_and_its_test_exists() -> None:
    """No list is stale: `before` occurs once, the change is Python, and the test is there."""
    assert faults(mutants()) == []
    assert len(mutants()) >= 70


def test_faults_are_told(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    broken = LIST.replace("one >= other", "other").replace('"1 - 1"', '"1 +"')
    (tmp_path / "toy.toml").write_text(broken)
    lines = faults(mutants(["toy"], tmp_path), tmp_path)
    assert any("toy.toml, seen: `before` occurs 3 times in module.py" in line for line in lines)
    assert any("toy.toml, seen: there is no test 'tests/test_module.py::test_larger'" in line for line in lines)
    assert any("toy.toml, unseen: invalid syntax" in line for line in lines)


@pytest.mark.slow
def test_what_no_test_sees_survives_and_ends_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "tests" / "mutants" / "lists").mkdir(parents=True)
    for name in ("__main__.py", "listing.py", "worker.py"):
        shutil.copy(LISTS.parent / name, tmp_path / "tests" / "mutants" / name)
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "tests" / "test_module.py").write_text(TEST)
    (tmp_path / "tests" / "mutants" / "lists" / "toy.toml").write_text(LIST)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "killed     toy.toml, seen" in done.stdout
    assert "1 SURVIVED, 1 equivalent, 1 killed\nSURVIVED: unseen\n" in done.stdout
    assert (tmp_path / "module.py").read_text() == MODULE, "nothing is changed in place"
    assert ROOT not in tmp_path.parents
