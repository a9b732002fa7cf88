"""A policy that a guard takes up while it runs: never one that allows more; it holds from the next round on."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedpriv.cli import app
from fedpriv.clients.app import ask
from fedpriv.core.errors import InputError, RunError
from fedpriv.protocol.frames import send_frame
from fedpriv.protocol.messages import Refusal
from fedpriv.silo import daemon
from fedpriv.silo.daemon import Desk
from fedpriv.silo.narrowing import ask_to_reload, narrowing
from fedpriv.silo.policy import Allowed, Evaluated, Policy, read_policy
from tests.silo.evaluated import MODEL, SCENARIO, guards_of, write_tested
from tests.silo.guarded import CELL, ZERO, cell_json, start_daemon, write_silo

BASE: dict[str, Any] = {
    "trust": "secure-aggregation",
    "relation": "replace-one",
    "unit": "record",
    "clip": 2.0,
    "least_clip": 1.0,
    "rounds": 10,
    "budget": 4.0,
    "slack": 1e-6,
    "slack_per_run": 1e-8,
    "silos": 3,
    "query": 100.0,
    "dimension": 100,
    "memory": 2**28,
    "models": ("a:B",),
    "algorithms": ("own",),
    "mechanisms": ("mine",),
    "extensions": ("module",),
    "open_runs": 3,
    "tick": 0.1,
    "runs": 10,
    "statistics": ("age",),
    "noise_free": False,
}
NARROWER: dict[str, Any] = {
    "trust": "untrusted",
    "clip": 1.5,
    "least_clip": 1.5,
    "rounds": 9,
    "budget": 3.0,
    "slack": 0.0,
    "query": 99.0,
    "dimension": 99,
    "models": (),
    "algorithms": (),
    "mechanisms": (),
    "open_runs": 2,
    "tick": 0.2,
    "runs": 9,
    "statistics": (),
}
WIDER: dict[str, list[Any]] = {
    "trust": ["trusted"],
    "clip": [2.5],
    "least_clip": [0.5],
    "rounds": [11],
    "budget": [4.0 * (1 + 1e-15), 1e9],
    "slack": [2e-6],
    "query": [101.0],
    "dimension": [101],
    "models": [("a:B", "c:D"), ("c:D",)],
    "algorithms": [("own", "other")],
    "mechanisms": [("other",)],
    "open_runs": [4],
    "tick": [0.0, 0.05],
    "runs": [11],
    "statistics": [("sex",)],
    "noise_free": [True],
}
FIXED: dict[str, Any] = {
    "relation": "zero-out",
    "unit": "user",
    "slack_per_run": 1e-9,
    "silos": 4,
    "memory": 2**27,
    "extensions": (),
}


def policy(evaluation: Evaluated | None = None, **allow: Any) -> Policy:
    allowed = Allowed(**{**BASE, **allow})
    return Policy(
        silo=0, classes=10, shard=Path("s.npz"), ledger=Path("l"), socket=Path("s"), allow=allowed
    ).model_copy(update={"evaluation": evaluation})


def test_every_key_of_a_policy_is_known_to_be_narrowed_widened_or_fixed() -> None:
    """A key that is added later has to be thought of here: until then it cannot change."""
    assert set(BASE) == set(Allowed.model_fields) == set(WIDER) | set(FIXED)
    assert set(NARROWER) == set(WIDER) - {"noise_free"}


@pytest.mark.parametrize("key", NARROWER)
def test_each_key_may_allow_less(key: str) -> None:
    (change,) = narrowing(policy(), policy(**{key: NARROWER[key]}))
    assert change.startswith(f"allow.{key}: ")
    assert narrowing(policy(), policy()) == []


@pytest.mark.parametrize("key", WIDER)
def test_guarantee_no_key_may_allow_more(key: str) -> None:
    """Also not beside keys that allow less."""
    others = {other: value for other, value in NARROWER.items() if other not in (key, "clip", "least_clip")}
    for value in WIDER[key]:
        for beside in ({}, others):
            with pytest.raises(InputError, match=f"allow.{key}: .* which allows more; a guard that runs takes up"):
                narrowing(policy(), policy(**{**beside, key: value}))


@pytest.mark.parametrize("key", FIXED)
def test_what_a_budget_is_about_cannot_change(key: str) -> None:
    with pytest.raises(InputError, match=rf"allow\.{key}: .* cannot change while the guard runs"):
        narrowing(policy(), policy(**{key: FIXED[key]}))


@pytest.mark.parametrize(
    "change",
    [{"silo": 1}, {"shard": Path("t")}, {"ledger": Path("t")}, {"mark": Path("t")}, {"peers": Path("t")}],
)
def test_records_ledger_and_peers_cannot_change(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(InputError, match=f"^{name}: .* cannot change while the guard runs"):
        narrowing(policy(), policy().model_copy(update=change))


def test_evaluations_may_end_or_be_fewer_and_not_begin_or_be_more() -> None:
    some, fewer = Evaluated(budget=2.0), Evaluated(budget=1.0, evaluations=3)
    assert narrowing(policy(some), policy()) == ["no [evaluation] any more"]
    assert [change.partition(":")[0] for change in narrowing(policy(some), policy(fewer))] == [
        "evaluation.budget",
        "evaluation.evaluations",
    ]
    for before, after in ((None, some), (fewer, some)):
        with pytest.raises(InputError, match="allows"):
            narrowing(policy(before), policy(after))


def rewritten(path: Path, **allow: float) -> None:
    lines = path.read_text().splitlines()
    for key, value in allow.items():
        lines = [f"{key} = {value}" if line.startswith(f"{key} = ") else line for line in lines]
    path.write_text("\n".join(lines) + "\n")


def desk_of(path: Path) -> Desk:
    return Desk(read_policy(path), guards_of(path), lambda: read_policy(path))


def test_guarantee_a_narrowed_budget_holds_for_a_run_under_way_from_its_next_round_on(tmp_path: Path) -> None:
    path = write_tested(tmp_path, budget=4.0)
    desk = desk_of(path)

    def answered(t: int) -> None:
        desk._guards.training.answer("run", CELL, t, ZERO)

    answered(1)
    rewritten(path, rounds=9)
    assert desk._reload().header == {"reload": ["allow.rounds: 10 becomes 9"]}
    answered(2)  # the run has eight
    ledger = (tmp_path / "ledger-0.sqlite").read_bytes()
    path.write_text(path.read_text().replace("budget = 4.0", "budget = 3.9"))
    assert desk._reload().header == {"reload": ["allow.budget: 4.0 becomes 3.9"]}
    with pytest.raises(RunError, match=r"with all before 4; the budget is 3\.9"):
        answered(3)
    path.write_text(path.read_text().replace("budget = 3.9", "budget = 4.0"))
    said = desk._reload().header["refused"]
    assert "allow.budget: 3.9 becomes 4.0, which allows more" in said
    with pytest.raises(RunError, match=r"the budget is 3\.9"):
        answered(3)
    assert (tmp_path / "ledger-0.sqlite").read_bytes() == ledger


def test_evaluations_end_with_their_section_and_other_budgets_stay_apart(tmp_path: Path) -> None:
    path = write_tested(tmp_path)
    desk = desk_of(path)
    assert desk._guards.tests is not None
    desk._guards.tests.answer("run", SCENARIO, 1, MODEL)
    rewritten(path, rounds=9)
    desk._reload()
    assert desk._guards.tests is not None
    desk._guards.tests.answer("run", SCENARIO, 2, MODEL)
    path.write_text(path.read_text().partition("[evaluation]")[0])
    assert desk._reload().header == {"reload": ["no [evaluation] any more"]}
    with pytest.raises(RunError, match="evaluates nothing"):
        desk._tests()


def test_a_policy_that_cannot_be_read_or_that_others_may_write_is_not_taken_up(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    desk, before = desk_of(path), path.read_text()
    for text, mode in (("budget = ", 0o600), (before.replace("clip", "clap"), 0o600), (before, 0o666)):
        path.write_text(text)
        path.chmod(mode)
        guards = desk._guards
        assert desk._reload().header["refused"].startswith("the guard goes on by the policy that it has: ")
        assert desk._guards is guards


def test_nobody_but_the_guards_own_user_lets_it_read_its_policy_and_no_request_is_taken_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SuperNode's user may reach the socket."""
    monkeypatch.setattr(daemon, "_peer", lambda _: os.geteuid() + 7)
    desk = desk_of(write_silo(tmp_path, tick=0.0))
    for name in ("_reload", "reload_soon"):
        monkeypatch.setattr(desk, name, lambda: pytest.fail("the policy was read"))
    here, there = socket.socketpair()
    with here, there:
        send_frame(there, b'{"reload": true}')
        assert desk._conversed(here).header["refused"] == "the request is malformed or too long"
    asked = daemon.Asked({"reload": True, "run": "r", "cell": CELL}, bytearray(), daemon.Future())
    assert desk._replied(asked).header["refused"] == "the request is malformed"


@pytest.mark.slow
def test_a_real_guard_takes_up_a_narrower_policy_by_command_and_by_signal(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    process = start_daemon(path)
    try:

        def said(*words: str) -> str:
            result = CliRunner().invoke(app, ["silo", "reload", str(path)])
            return str(result.exception) if result.exception else result.output

        sock = tmp_path / "0.sock"
        assert not isinstance(ask(sock, "run", CELL, 1, ZERO.numpy()), Refusal)
        assert said() == "nothing in the policy has changed\n"
        rewritten(path, rounds=9)
        assert said() == "allow.rounds: 10 becomes 9\n"
        rewritten(path, rounds=20)
        assert "allow.rounds: 9 becomes 20, which allows more; a guard that runs takes up" in said()
        rewritten(path, rounds=9, budget=3.0)
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 20.0
        refused: object = None
        while not isinstance(refused, Refusal) and time.monotonic() < deadline:
            refused = ask(sock, "run", CELL, 1, ZERO.numpy())
        assert isinstance(refused, Refusal)
        assert "the budget is 3" in refused.reason
        cheap = cell_json(privacy={"relation": "replace-one", "mu": 0.5})
        assert isinstance(ask(sock, "cheap", cheap, 1, ZERO.numpy()), Refusal)
    finally:
        process.kill()
        log = process.communicate()[1]
    assert "INFO silo=0 the policy was read again: allow.rounds: 10 becomes 9" in log
    assert "WARNING silo=0 the policy is not taken up: allow.rounds: 9 becomes 20" in log
    assert "allow.budget: 4.0 becomes 3.0" in log


def test_without_a_guard_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"0\.sock: no guard answers .*; one that is started reads its policy then"):
        ask_to_reload(write_silo(tmp_path))
