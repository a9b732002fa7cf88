"""An app that a server ships may do anything at the guard's socket; each test's first line says what it gains."""

import json
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedpriv.clients.app import ask_release, ask_shapes
from fedpriv.core.errors import InputError, RunError
from fedpriv.flower import SiloGuard, guard_of
from fedpriv.protocol.messages import Refusal
from tests.flower.quickstart.client_app import SCENARIO
from tests.flower.quickstart.evaluating_app import SCENARIO as EVALUATED
from tests.flower.quickstart.task import Net
from tests.flower.silos import context_of, guards, ledger_of

SIZE = 970
ZERO = np.zeros(SIZE, np.float32)
NOISE = 1.0 / (100 * 2.0)
"""Standard deviation of a release: clip over batch and mu, under zero-out."""


@pytest.fixture(scope="module")
def silo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One real guard whose budget all attacks but those on the budget share."""
    folder = tmp_path_factory.mktemp("silo")
    with guards(folder, 1, budget=20.0, open_runs=50) as (process,):
        yield folder
        assert process.is_alive()


def own(folder: Path, run: int, local_steps: int = 1) -> SiloGuard:
    return guard_of(context_of(folder, run), SCENARIO, local_steps)


def model() -> ArrayRecord:
    return ArrayRecord(Net().state_dict())


def cell_with(guard: SiloGuard, section: str, **changes: Any) -> str:
    """The guard's cell after these changes, of which None takes a key away."""
    cell = json.loads(guard.cell_json)
    cell[section] = {key: value for key, value in {**cell[section], **changes}.items() if value is not None}
    return json.dumps(cell)


def refused(guard: SiloGuard, t: int, query: Any = ZERO, cell: str | None = None) -> str:
    """The reason why the guard releases nothing."""
    answer = ask_release(guard.socket, guard.run, cell or guard.cell_json, t, query)
    assert isinstance(answer, Refusal), answer
    return answer.reason


def answered(folder: Path, run: int) -> int:
    """Rounds that the ledger has for a run; 0 if it was never opened."""
    return {name: rounds for name, _, rounds in ledger_of(folder)}.get(str(run), 0)


@pytest.mark.slow
def test_a_hostile_app_cannot_repeat_a_round_with_another_query(silo: Path) -> None:
    """Gains: the same bytes for the same query; nothing for another one."""
    guard, arrays = own(silo, 1), model()
    first = guard.train(arrays, 1)
    again = guard.train(arrays, 1)
    assert [a.data for a in first.values()] == [a.data for a in again.values()]
    with pytest.raises(RunError, match="round 1 was answered already, for another query"):
        guard.train(first, 1)
    assert answered(silo, 1) == 1


@pytest.mark.every(3)
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300], ids=str)
def test_a_hostile_app_cannot_use_parameters_that_are_not_finite(silo: Path, value: float) -> None:
    """Gains: nothing, and no round is used up; 1e300 is infinite in the run's own type."""
    arrays = model()
    arrays["fc1.bias"] = Array(np.full(16, value))
    with pytest.raises(RunError, match="the query has values that are not finite"):
        own(silo, 2).train(arrays, 1)
    assert answered(silo, 2) == 0


def test_a_hostile_app_cannot_enlarge_a_release_by_scaling_the_parameters(silo: Path) -> None:
    """Gains: a release as long as any other, by the clip; beyond the policy's largest query, nothing."""
    guard, query = own(silo, 3), np.full(SIZE, 1e9, np.float32)
    release = ask_release(guard.socket, guard.run, guard.cell_json, 1, query)
    assert not isinstance(release, Refusal)
    assert np.linalg.norm(release) < 1.0 + 1.3 * NOISE * np.sqrt(SIZE)
    assert 0.8 * NOISE * np.sqrt(SIZE) < np.linalg.norm(release)
    assert "beyond 1.09951e+12" in refused(guard, 2, query * np.float32(1e6))
    assert answered(silo, 3) == 1


@pytest.mark.parametrize("size", [1, SIZE - 1, SIZE // 2, SIZE + 1, 0])
def test_a_hostile_app_cannot_query_a_part_of_the_parameters(silo: Path, size: int) -> None:
    """Gains: nothing for a part of the parameters, asked at the socket itself."""
    reason = refused(own(silo, 4), 1, np.zeros(size, np.float32))
    assert "expected (970,)" in reason if size else "malformed" in reason
    assert answered(silo, 4) == 0


def test_a_hostile_app_cannot_query_with_another_model_than_that_of_the_guard(silo: Path) -> None:
    """Gains: one line, before a run is opened."""
    guard, right = own(silo, 5), model()
    swapped = ArrayRecord({name: right[name] for name in ("fc2.weight", "fc2.bias", "fc1.weight", "fc1.bias")})
    fewer = ArrayRecord({name: right[name] for name in ("fc1.weight", "fc1.bias")})
    whole = ArrayRecord({**right, "fc1.bias": Array(np.zeros(16, np.int64))})
    for arrays, line in (
        (swapped, r"array 0, 'fc2.weight', has shape \(10, 16\) in the app's model and \(16, 49\) in the guard's"),
        (fewer, r"the app's model has 2 arrays, the guard's has 4"),
        (whole, r"array 1, 'fc1.bias', is int64: parameters are floating-point numbers"),
    ):
        with pytest.raises(InputError, match=line):
            guard.train(arrays, 1)
    assert "5" not in {name for name, _, _ in ledger_of(silo)}


@pytest.mark.slow
def test_a_hostile_app_cannot_skip_rounds_or_exceed_their_number(silo: Path) -> None:
    """Gains: nothing out of order, and nothing after the last round."""
    guard = own(silo, 6, 6)
    with pytest.raises(RunError, match="was asked for round 7 after round 0 of 12"):
        guard.train(model(), 2)
    after = guard.train(guard.train(model(), 1), 2)
    assert answered(silo, 6) == 12
    with pytest.raises(InputError, match="takes rounds 13 to 18, and the guard's scenario has 12"):
        guard.train(after, 3)
    assert "this run is over" in refused(guard, 12 + 1)
    assert answered(silo, 6) == 12


@pytest.mark.parametrize(
    ("section", "changes", "line"),
    [
        ("privacy", {"mode": "none", "mu": None}, "release its sums without noise"),
        ("privacy", {"mu": 1e5}, "the budget is 20"),
        ("privacy", {"relation": "replace-one"}, "the scenario's relation is replace-one"),
        ("algorithm", {"clip": 1e3}, "the scenario clips at 1000, allowed is 1"),
        ("algorithm", {"trust": "trusted"}, "nobody adds noise|release its sums without noise"),
        ("federation", {"rounds": 24, "batch": 50}, "the scenario has 24 rounds, allowed are 12"),
        ("federation", {"batch": 101}, "needs 1212 records of this silo, here are fewer"),
        ("model", {"name": "os:system"}, "runs 'os:system', and allow.models does not name it"),
    ],
)
def test_a_hostile_app_cannot_open_a_run_with_a_scenario_outside_the_policy(
    silo: Path, section: str, changes: dict[str, Any], line: str
) -> None:
    """Gains: nothing beyond the policy, and neither noise nor scenario can change in a run that is open."""
    guard = own(silo, 7)
    hostile = cell_with(guard, section, **changes)
    assert re.search(line, refused(guard, 1, cell=hostile))
    assert isinstance(ask_shapes(guard.socket, hostile), Refusal) or "the budget is" in line
    assert answered(silo, 7) == 0


def test_a_hostile_app_cannot_change_the_scenario_of_an_open_run(silo: Path) -> None:
    """Gains: nothing; clip, noise and batch of a run are those it was opened with."""
    guard = own(silo, 8)
    guard.train(model(), 1)
    for section, key, value in (("algorithm", "clip", 0.5), ("privacy", "mu", 1.0), ("federation", "batch", 1)):
        hostile = cell_with(guard, section, **{key: value})
        assert "not the one this run was opened with" in refused(guard, 2, cell=hostile)
    assert answered(silo, 8) == 1


@pytest.mark.slow
def test_a_hostile_app_cannot_exceed_the_budget_by_opening_more_runs(tmp_path: Path) -> None:
    """Gains: the policy's mu over all runs and no more; the administrator finds refusals in the guard's log."""
    with guards(tmp_path, 1, budget=2.9):
        arrays = model()
        for run in (1, 2):
            own(tmp_path, run).train(arrays, 1)
        for run in (3, 4):
            with pytest.raises(RunError, match=r"costs mu = 2, with all others 3\.465; the budget is 2\.9"):
                own(tmp_path, run).train(arrays, 1)
    log = (tmp_path / "silo-0" / "log").read_text()
    assert [name for name, _, _ in ledger_of(tmp_path)] == ["1", "2"]
    assert "refusal 1, run 3: silo 0 refuses: the run costs mu = 2" in log
    assert "refusal 2, run 4: " in log


@pytest.mark.slow
def test_a_hostile_app_cannot_exceed_the_evaluation_budget_by_repetition(tmp_path: Path) -> None:
    """Gains: each evaluation once, for one model, and over all runs the budget of the test records and no more."""
    with guards(tmp_path, 1, budget=20.0, evaluation={"budget": 2.9, "evaluations": 3}):
        guard, arrays = guard_of(context_of(tmp_path, 1), EVALUATED), model()
        first = guard.evaluate(arrays, 4)
        for _ in range(10):
            assert guard.evaluate(arrays, 4) == first
        other = ArrayRecord({name: Array(2.0 * value.numpy()) for name, value in arrays.items()})
        with pytest.raises(RunError, match="round 1 was answered already, for another query"):
            guard.evaluate(other, 4)
        assert [guard.evaluate(other, t) for t in (1, 2, 3, 5, 6, 7)] == [{}] * 6
        with pytest.raises(InputError, match="server round 13: the guard's scenario has 12 of them"):
            guard.evaluate(other, 13)

        def evaluation(run: int, t: int, cell: str = guard.cell_json) -> Any:
            return ask_release(guard.socket, str(run), cell, t, ZERO, tests=True)

        assert [isinstance(evaluation(1, t), Refusal) for t in (2, 3, 4, 5)] == [False, False, True, True]
        assert "12 evaluations, allowed are 3" in str(evaluation(2, 1, cell_with(guard, "run", evaluations=12)))
        answers = [evaluation(run, 1) for run in (3, 4, 5)]
        assert [isinstance(answer, Refusal) for answer in answers] == [False, True, True]
        assert "the budget is 2.9" in str(answers[-1])
    assert ledger_of(tmp_path, tests=True) == [("1", pytest.approx(2.0), 3), ("3", pytest.approx(2.0), 1)]
    assert ledger_of(tmp_path) == []  # no training was asked for


def test_a_hostile_app_cannot_evaluate_where_the_policy_allows_no_evaluation(silo: Path) -> None:
    """Gains: one line."""
    with pytest.raises(RunError, match=r"by its policy, which has no \[evaluation\], it evaluates nothing"):
        guard_of(context_of(silo, 9), EVALUATED).evaluate(model(), 4)


READ = """
import os, socket, sys
from pathlib import Path
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
folder = Path(sys.argv[1])
assert (folder / "public").read_text() == "anyone"
for name in ("shard.npz", "l.sqlite", "l.sqlite.mark", "policy.toml"):
    try:
        (folder / "silo-0" / name).open("rb").close()
        print("read", name)
    except PermissionError:
        pass
try:
    socket.socket(socket.AF_UNIX).connect(str(folder / "silo-0" / "s.sock"))
    print("connected")
except PermissionError:
    pass
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_read_the_files_nor_use_the_socket_of_a_guard() -> None:
    """Gains: no file and no connection as a user who is neither the guard's nor in `group`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "public").write_text("anyone")
        with guards(folder, 1):
            assert stat.S_IMODE((folder / "silo-0" / "s.sock").stat().st_mode) == 0o600
            done = subprocess.run(
                [sys.executable, "-I", "-c", READ, name], capture_output=True, text=True, cwd="/"
            )
            with socket.socket(socket.AF_UNIX) as mine:
                mine.connect(str(folder / "silo-0" / "s.sock"))
    assert done.stdout.split() == ["done"], (done.stdout, done.stderr)
