"""Simulations on systems without what Linux alone has, in a process that does not have it either."""

import subprocess
import sys
from pathlib import Path

import pytest

SMALL = {"data.name": "synthetic", "federation.rounds": 2, "federation.silos": 3, "privacy.rho": 4.0, "seeds": 1}
HIDDEN = ("fcntl", "resource", "pwd", "grp", "termios")
WITHOUT = f"""
import os, signal, socket, sys
import platformdirs  # which takes another file on Windows
for name in {HIDDEN}:
    sys.modules[name] = None  # importing it fails, as on Windows
for module, names in (
    (os, ("geteuid", "getuid", "fork", "O_DIRECTORY", "O_NONBLOCK", "O_NOFOLLOW", "pread", "pwrite", "sysconf")),
    (os, ("sched_getaffinity",)),
    (signal, ("SIGALRM", "SIGKILL", "SIGHUP")),
    (socket, ("AF_UNIX",)),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""


def run_without(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_simulation_needs_nothing_that_windows_lacks(tmp_path: Path) -> None:
    """Before, `import resource` ended every command there."""
    code = (
        "import fedpriv\n"
        f"small = {SMALL}\n"
        "results = fedpriv.run('quickstart', set=small, out='run')\n"
        "from fedpriv.engines.table import describe_available_memory\n"
        "assert describe_available_memory() == 'an unknown amount'\n"
        "import numpy as np\n"
        "own = (np.ones((20, 2), 'float32'), np.arange(20) % 2)\n"
        "for out in ('first', 'second'):  # the second time the key of names of records in memory exists\n"
        "    fedpriv.run('own-data', train=own, test=own, set={'privacy.epsilon': 4.0}, out=out)\n"
        "print(len(results), results.table().splitlines()[0])\n"
        "from fedpriv.study.sweep import lock_folder\n"
        "from pathlib import Path\n"
        "with lock_folder(Path('locked')):\n"
        "    try:\n"
        "        with lock_folder(Path('locked')): print('twice')\n"
        "    except fedpriv.InputError as error: print(error)\n"
        "print(Path('locked').exists())\n"
    )
    lines = run_without(code, tmp_path).splitlines()
    assert lines[0].startswith("2 ## ")
    assert "is running there; give another --out, or wait until it ends" in lines[1]
    assert lines[2:] == ["False"]
    assert (tmp_path / "run" / "results.json").exists()


@pytest.mark.parametrize(
    "command", ["list scenarios", "privacy convert --mu 1", "--help", "table run", "show run"]
)
def test_commands_that_start_no_process_work_without_linux_modules(command: str, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "import fedpriv\n"
        f"small = {SMALL}\n"
        + ("fedpriv.run('quickstart', set=small, out='run')\n" if command.endswith(" run") else "")
        + f"sys.argv = ['fedpriv', *{command.split()}]\n"
        "from fedpriv.cli import main\n"
        "main()\n"
    )
    assert run_without(code, tmp_path)


@pytest.mark.parametrize("command", ["silo run policy.toml", "run deployment --engine deployment"])
def test_a_command_that_needs_linux_says_so_in_one_line(command: str, tmp_path: Path) -> None:
    code = WITHOUT + f"sys.argv = ['fedpriv', *{command.split()}]\nfrom fedpriv.cli import main\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "this command needs Linux" in done.stderr
