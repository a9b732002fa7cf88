"""torchvision beside a torch it was not built for: the operator registration is left out only when it fails.

A process imports torchvision once, so each test has its own; a small package stands in for torchvision.
"""

import subprocess
import sys
from pathlib import Path

import pytest

MISSING_OPERATOR = "raise RuntimeError('operator torchvision::nms does not exist')"
REPORT = """
import sys
from fedpriv.data.formats import import_torchvision
torchvision = import_torchvision()
assert import_torchvision() is torchvision
from torchvision import _meta_registrations, datasets
print(torchvision.complete, datasets.complete, hasattr(_meta_registrations, "complete"))
"""


def write_torchvision(folder: Path, registrations: str, last_line: str = "complete = True") -> None:
    """Like the real one: the package imports its registrations first, then its data sets."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torchvision._extension\n"
        "torchvision._extension.loaded\n"  # not there if a half-imported module was left over
        f"from torchvision import _meta_registrations, datasets\n{last_line}\n"
    )
    (package / "_extension.py").write_text("loaded = True\n")
    (package / "_meta_registrations.py").write_text(f"{registrations}\ncomplete = True\n")
    (package / "datasets.py").write_text("from torchvision import _extension\ncomplete = True\n")


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path[:0] = {[str(folder) for folder in path]}\n"
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False)


FAILED_BEFORE = "try:\n    import torchvision\nexcept RuntimeError:\n    pass\n"


@pytest.mark.parametrize(
    ("registrations", "before", "complete"),
    [("", "", True), (MISSING_OPERATOR, "", False), (MISSING_OPERATOR, FAILED_BEFORE, False)],
    ids=["imports", "misses an operator", "failed elsewhere before"],
)
def test_torchvision_is_imported_without_operator_registrations_only_if_these_fail(
    tmp_path: Path, registrations: str, before: str, complete: bool
) -> None:
    write_torchvision(tmp_path, registrations)
    done = run(before + REPORT, tmp_path)
    assert done.stdout == f"True True {complete}\n", done.stderr


@pytest.mark.parametrize("registrations", ["", MISSING_OPERATOR])
def test_other_import_failures_of_torchvision_are_raised(tmp_path: Path, registrations: str) -> None:
    write_torchvision(tmp_path, registrations, last_line="raise RuntimeError('something else')")
    done = run(REPORT, tmp_path)
    assert done.returncode != 0
    assert done.stderr.endswith("RuntimeError: something else\n")


def test_a_torchvision_that_is_not_installed_is_an_import_error() -> None:
    done = run("sys.modules['torchvision'] = None\n" + REPORT)
    assert done.returncode != 0
    assert "ModuleNotFoundError: import of torchvision halted" in done.stderr


@pytest.mark.slow
def test_the_installed_torchvision_gives_its_data_sets() -> None:
    done = run(
        "from fedpriv.data.formats import import_torchvision\n"
        "print(import_torchvision().datasets.MNIST.__name__)\n"
    )
    assert done.stdout == "MNIST\n", done.stderr
