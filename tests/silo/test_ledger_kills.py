"""A guard that is killed with -9 at any statement to its ledger, and before and after any file is synced."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedpriv.silo.guard import Guard
from tests.attacks.guards import guard_for, random_records, scenario, zeros
from tests.silo.charged import charged
from tests.silo.guarded import guard_of, refused

ROUNDS = 3
CELL = scenario(federation__rounds=ROUNDS)


def killed_at(point: int, folder: Path, ask: Callable[[Guard], object]) -> bool:
    """Whether a process that asks a guard is killed at this point: statements, syncs and replacements count."""
    child = os.fork()
    if child == 0:
        passed, honest = [0], {name: getattr(os, name) for name in ("fsync", "replace", "ftruncate")}

        def step(*_: object) -> None:
            passed[0] += 1
            if passed[0] == point:
                os.kill(os.getpid(), signal.SIGKILL)

        def stepping(name: str) -> Callable[..., object]:
            def stepped(*args: object) -> object:
                step()
                done = honest[name](*args)
                step()
                return done

            return stepped

        code = 1
        try:
            for name in honest:
                setattr(os, name, stepping(name))
            guard = guard_of(folder / "silo-0.toml")
            guard._ledger._database.set_trace_callback(step)
            ask(guard)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


EVERY = [pytest.param(t, 1, marks=pytest.mark.slow) for t in range(1, ROUNDS + 1)]


@pytest.mark.parametrize(("t", "stride"), [(ROUNDS, 13), *EVERY])
def test_guarantee_a_guard_killed_at_any_write_charges_once_and_answers_a_round_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, t: int, stride: int
) -> None:
    """The first round opens the run, the last one ends it, drops replies and writes the file anew."""
    torch.set_num_threads(1)
    monkeypatch.setattr("fedpriv.silo.guard.system_key", lambda: bytes(range(32)))
    before, undisturbed = tmp_path / "before", tmp_path / "undisturbed"
    guard = guard_for(before, *random_records(), budget=5.0)
    for earlier in range(1, t):
        guard.answer("run", CELL, earlier, zeros())
    guard._ledger.close()
    shutil.copytree(before, undisturbed)
    honest = guard_of(undisturbed / "silo-0.toml").answer("run", CELL, t, zeros())
    point, killed = 5 if stride > 1 else 1, True
    while killed:
        folder = Path(shutil.copytree(before, tmp_path / "silo"))
        killed = killed_at(point, folder, lambda guard: guard.answer("run", CELL, t, zeros()))
        again = guard_of(folder / "silo-0.toml")
        asked = again._ledger.find_answer("run", t)
        if asked is not None:
            refused(again, rf"round {t} was (asked|answered) already, for another query", CELL, t, zeros() + 1.0)
        assert torch.equal(again.answer("run", CELL, t, zeros()), honest), point
        assert charged(again) == [pytest.approx(4.0)], point
        refused(again, "the budget is 5", CELL, run="second")
        again._ledger.close()
        shutil.rmtree(folder)
        point += stride
    assert point > 20
