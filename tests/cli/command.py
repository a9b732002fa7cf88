"""`fedpriv` in the process of the tests, whose imports are done already: what a person would see of it."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from fedpriv.cli import main
from fedpriv.cli.app import app

FEDPRIV = Path(sys.executable).with_name("fedpriv")
"""The installed script, for what only a process of its own shows."""

SMALL = """\
name = "small"
[data]
name = "synthetic"
[federation]
silos = 3
rounds = 8
[algorithm]
name = "dp-mu2-fl"
trust = "untrusted"
diameter = 0.1
[privacy]
relation = "replace-one"
rho = 4.0
"""
"""A scenario that runs in a moment; sections may follow it, and top-level keys stand before it."""


def fedpriv(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `fedpriv ARGUMENTS` in a working folder: its exit code, and what it writes."""
    words, out, err = ["fedpriv", *map(str, arguments)], io.StringIO(), io.StringIO()
    code: object = None
    with (
        mock.patch.object(sys, "argv", words),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    assert code is None or isinstance(code, int), code
    return subprocess.CompletedProcess(words, code or 0, out.getvalue(), err.getvalue())


def fedpriv_process(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The installed script in a process of its own."""
    words = [FEDPRIV, *map(str, arguments)]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


@contextlib.contextmanager
def running(cwd: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """The installed script while it runs; it is killed at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [FEDPRIV, *arguments], cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def refusal(arguments: Sequence[str], code: int = 2) -> str:
    """The one line on standard error that `fedpriv ARGUMENTS` ends with, in the present folder."""
    done = fedpriv(*arguments, cwd=Path())
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith("fedpriv: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("\n")
    return done.stderr


def output_of(*words: object) -> str:
    """The output of a command that succeeds; its errors pass through, as they do to `main`."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def answer_of(*words: object) -> Any:
    """The output of a command with --json."""
    return json.loads(output_of(*words, "--json"))
