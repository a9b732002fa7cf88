"""Simulations on systems without what Linux alone has, in a process that does not have it either."""

import subprocess
from pathlib import Path

import pytest

from tests.forks import run_in_forks

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
import fedpriv
small = {SMALL}
fedpriv.run('quickstart', set=small, out='run')
"""
SIMULATION = """
results = fedpriv.run('quickstart', set=small, out='run', resume=True)
from fedpriv.engines.table import describe_available_memory
assert describe_available_memory() == 'an unknown amount'
import numpy as np
own = (np.ones((20, 2), 'float32'), np.arange(20) % 2)
for out in ('first', 'second'):  # the second time the key of names of records in memory exists
    fedpriv.run('own-data', train=own, test=own, set={'privacy.epsilon': 4.0}, out=out)
print(len(results), results.table().splitlines()[0])
from fedpriv.study.sweep import lock_folder
from pathlib import Path
with lock_folder(Path('locked')):
    try:
        with lock_folder(Path('locked')): print('twice')
    except fedpriv.InputError as error: print(error)
print(Path('locked').exists())
"""

COMMANDS = ("list scenarios", "privacy convert --mu 1", "--help", "table run", "show run")
NEED_LINUX = ("silo run policy.toml", "run deployment --engine deployment")

Answers = dict[str, "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("without-linux")


@pytest.fixture(scope="module")
def answers(folder: Path) -> Answers:
    """What the simulation and each command answer, all after one small run."""
    commands = (*COMMANDS, *NEED_LINUX)
    main = "from fedpriv.cli import main\nmain()\n"
    programs = [f"sys.argv = ['fedpriv', *{command.split()}]\n{main}" for command in commands]
    done = run_in_forks(WITHOUT, SIMULATION, *programs, folder=folder)
    return dict(zip(("simulation", *commands), done, strict=True))


@pytest.mark.slow
def test_a_simulation_needs_nothing_that_windows_lacks(answers: Answers, folder: Path) -> None:
    """Before, `import resource` ended every command there."""
    done = answers["simulation"]
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ## ")
    assert "is running there; give another --out, or wait until it ends" in lines[1]
    assert lines[2:] == ["False"]
    assert (folder / "run" / "results.json").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_start_no_process_work_without_linux_modules(command: str, answers: Answers) -> None:
    done = answers[command]
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


@pytest.mark.parametrize("command", NEED_LINUX)
def test_a_command_that_needs_linux_says_so_in_one_line(command: str, answers: Answers) -> None:
    done = answers[command]
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "this command needs Linux" in done.stderr
