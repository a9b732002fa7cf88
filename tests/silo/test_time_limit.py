"""What a scenario may cost a guard: seconds of the processor, however busy the machine is."""

import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from fedpriv.silo import admission
from fedpriv.silo.daemon import limit_time
from fedpriv.silo.guard import open_guard
from fedpriv.silo.policy import read_policy
from tests.attacks.guards import guard_for, random_records, scenario, zeros
from tests.silo.guarded import refused


def busy(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_what_computes_for_too_long_ends() -> None:
    line = r"^it takes more than 0.05 s of the processor$"
    with pytest.raises(TimeoutError, match=line), limit_time(0.05, 600.0):
        busy(600.0)


def test_what_others_compute_does_not_count() -> None:
    with limit_time(0.05, 600.0):
        time.sleep(0.2)


def test_what_other_threads_compute_does_not_count() -> None:
    """Whoever floods the guard's socket makes no honest plan too long."""
    flood = threading.Thread(target=busy, args=(0.5,))
    with limit_time(0.2, 600.0):
        flood.start()
        flood.join()


def test_an_error_that_was_swallowed_comes_again() -> None:
    def stubborn() -> None:
        with suppress(TimeoutError):
            busy(600.0)
        busy(600.0)

    with pytest.raises(TimeoutError), limit_time(0.05, 600.0):
        stubborn()


def test_what_waits_for_too_long_ends() -> None:
    with pytest.raises(TimeoutError, match=r"^it takes more than 0.05 s$"), limit_time(600.0, 0.05):
        time.sleep(600.0)


def test_nothing_is_left_behind() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with limit_time(600.0, 600.0):
        pass
    with pytest.raises(TimeoutError), limit_time(0.01, 600.0):
        busy(600.0)
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_guard_refuses_a_scenario_that_takes_too_long_and_answers_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard_for(tmp_path, *random_records())  # begins the ledger
    (policy,) = tmp_path.glob("*.toml")
    guard = open_guard(read_policy(policy), partial(limit_time, 1.0, 600.0))
    planned = admission.make_plan
    with monkeypatch.context() as slow:
        slow.setattr(admission, "make_plan", lambda *_, **__: busy(600.0))
        refused(guard, "cannot be planned: it takes more than 1 s of the processor$", scenario())
    assert admission.make_plan is planned
    assert guard.answer("run", scenario(), 1, zeros()).isfinite().all()
