"""Runs tests on mutants of one copy of the checkout, each in a fork of a process that has torch imported.

Reads one request a line, `{"file", "text", "tests", "options", "log", "seconds"}`, and writes one answer a line:
pytest's exit code, or null where the time ran out.  Only the fork imports fedpriv and the tests.
"""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SLOW_TO_IMPORT = (
    *("hypothesis", "matplotlib", "mpmath", "numpy", "pydantic", "pytest", "torch", "torch.func", "typer"),
    *("scipy.optimize", "scipy.signal", "scipy.stats"),
    *("dp_accounting.pld.common", "dp_accounting.pld.privacy_loss_mechanism"),
)


def answer(asked: dict[str, Any]) -> int | None:
    """pytest's exit code for the tests while the file has the text, or None after `seconds`."""
    with changed(asked["file"], asked["text"]):
        return forked(lambda: _run_pytest([*asked["tests"], *asked["options"]]), asked["log"], asked["seconds"])


@contextmanager
def changed(file: str | None, text: str | None) -> Iterator[None]:
    """Give a file another text, and its own bytes and time back in the end."""
    if file is None or text is None:
        yield
        return
    path = Path(file)
    before, times = path.read_bytes(), path.stat()
    try:
        path.write_text(text, encoding="utf-8")
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def forked(run: Callable[[], int], log: str, seconds: float) -> int | None:
    """The exit code of a function in a fork, or None after `seconds`."""
    child = os.fork()
    if not child:
        _become(run, log)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if _alive(child):
                os.killpg(child, signal.SIGKILL)  # what a test that was cut short left behind
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _become(run: Callable[[], int], log: str) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number in (1, 2):
        os.dup2(out, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 3
    try:
        code = run()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _run_pytest(arguments: Sequence[str]) -> int:
    import pytest

    return int(pytest.main(list(arguments)))


def serve(reply: Callable[[dict[str, Any]], object]) -> None:
    """Import what is slow to import, and answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an import prints is no answer
    sys.dont_write_bytecode = True  # two mutants of one second and one length are two programs
    for name in _SLOW_TO_IMPORT:
        importlib.import_module(name)
    assert "fedpriv" not in sys.modules
    for line in sys.stdin:
        answers.write(json.dumps(reply(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(answer)
