"""The core's tests, with the folder of add-ons removed: in a copy of the checkout, whose files are not touched.

    python -m tests.core [PYTEST OPTIONS]

Left out are test files that import an add-on, themselves or through a helper, that name one of its modules in a
string, or that are about the checkout as a whole (`OF_ALL`).
"""

import ast
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ADD_ONS = "fedpriv.addons"
PARTS = ("fedpriv", "server", "clients", "tests", "benchmarks", "scenarios", "examples", "docs", "deploy")
OF_ALL = ("docs/test_walk_through.py", "test_budgets.py", "test_mutants.py", "test_packages.py")
"""Test files that count, list or describe everything, the add-ons too."""


def imports_of(path: Path) -> Iterator[str]:
    """Names of modules that a file imports, or names in a string."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and f"{ADD_ONS}." in node.value:
            yield ADD_ONS


def files_with_add_ons(root: Path) -> set[Path]:
    """Files of tests and benchmarks that need an add-on."""
    paths = {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for top in ("tests", "benchmarks")
        for path in (root / top).rglob("*.py")
    }
    imports = {name: set(imports_of(path)) for name, path in paths.items()}
    found = {name for name, names in imports.items() if any(other.startswith(ADD_ONS) for other in names)}
    while more := {name for name in imports if name not in found and imports[name] & found}:
        found |= more
    return {paths[name] for name in found}


def main() -> int:
    """Run the tests in a copy without the folder; pytest's exit code."""
    with tempfile.TemporaryDirectory(prefix="fedpriv-core-") as folder:
        copy = Path(folder)
        for part in PARTS:
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "javascripts"))
        for file in filter(Path.is_file, ROOT.iterdir()):
            shutil.copy(file, copy)
        left_out = {*files_with_add_ons(copy), *(copy / "tests" / name for name in OF_ALL)}
        shutil.rmtree(copy / "fedpriv" / "addons")
        tests = [path for path in sorted((copy / "tests").rglob("test_*.py")) if path not in left_out]
        print(f"{len(tests)} test files without add-ons, {len(left_out)} files left out", flush=True)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *sys.argv[1:]]
        return subprocess.run([*command, *map(str, tests)], cwd=copy, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
