"""A silo against a server that does not follow the protocol: through the real guard, ledger and daemon."""

import grp
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from clients.app import app as client_app
from clients.guard import Guard, load_shard
from clients.ledger import SiloLedger
from clients.policy import Policy, read_policy
from clients.proxy import ask
from clients.state import unpack
from fedpriv.engines.inprocess_grid import InProcessGrid
from fedpriv.errors import InputError, RunError
from fedpriv.federation import task_of_cell
from fedpriv.plan import plan_of
from fedpriv.randomness import simulation_noise
from fedpriv.records import Refusal
from fedpriv.run_config import run_config_of
from fedpriv.scenario import Cell, resolve_cell
from fedpriv.wire import one_array
from server.strategy import ReleaseStrategy
from tests.conftest import small_tree

MakeCell = Callable[..., Cell]
ZERO = torch.zeros(7850, dtype=torch.float64)
CLIP = math.sqrt(2 * 785) + 78.5


def write_silo(folder: Path, number: int = 0, **allow: Any) -> Path:
    """A policy file with its shard of 20 random records; the path of the policy."""
    generator = np.random.default_rng(number)
    np.savez(
        folder / f"shard-{number}.npz",
        images=generator.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        labels=generator.integers(0, 10, 20),
    )
    allowed = {"relation": "replace-one", "clip": CLIP, "rounds": 10, "budget": 4.0, **allow}
    path = folder / f"silo-{number}.toml"
    path.write_text(
        f'silo = {number}\nclasses = 10\nshard = "shard-{number}.npz"\nledger = "ledger-{number}.sqlite"\n'
        f'socket = "{number}.sock"\n[allow]\n'
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in allowed.items())
    )
    return path


def guard_of(policy_path: Path) -> Guard:
    policy: Policy = read_policy(policy_path)
    return Guard(policy, SiloLedger(policy.ledger), load_shard(policy.shard, policy.classes))


def cell_json(**overrides: Any) -> str:
    return json.dumps(resolve_cell(small_tree(**overrides), "test").canonical(), sort_keys=True)


CELL = cell_json()


def test_a_run_goes_through_and_is_noisy(tmp_path: Path) -> None:
    guard, other = guard_of(write_silo(tmp_path)), tmp_path / "other"
    other.mkdir()
    releases = [guard.answer("run", CELL, t, ZERO) for t in range(1, 9)]
    again = guard_of(write_silo(other))
    differently = [again.answer("run", CELL, t, ZERO) for t in range(1, 9)]
    sigma = 2 * CLIP * math.sqrt(8) / 4.0
    for one, two in zip(releases, differently, strict=True):  # same records, another key of the system's
        difference = (one - two) / (sigma * math.sqrt(2))
        assert abs(float(difference.std()) - 1) < 5 / math.sqrt(2 * 7850)  # false alarm 6e-7 a round


def test_a_repeated_round_gets_the_same_bytes_and_another_query_is_refused(tmp_path: Path) -> None:
    guard = guard_of(write_silo(tmp_path))
    first, second = guard.answer("run", CELL, 1, ZERO), guard.answer("run", CELL, 2, ZERO)
    assert torch.equal(guard.answer("run", CELL, 2, ZERO), second)
    assert torch.equal(guard.answer("run", CELL, 1, ZERO), first)
    for t in (1, 2):
        with pytest.raises(RunError, match=f"round {t} was answered already, for another query"):
            guard.answer("run", CELL, t, ZERO + 1e-12)
    assert torch.isfinite(guard.answer("run", CELL, 3, ZERO)).all()


@pytest.mark.parametrize(
    ("t", "query", "reason"),
    [
        (2, ZERO, "asked for round 2 after round 0"),
        (0, ZERO, "asked for round 0 after round 0"),
        (-1, ZERO, "asked for round -1"),
        (1, ZERO[:-1], r"shape \(7849,\)"),
        (1, ZERO.float(), "float32"),
        (1, ZERO + torch.nan, "not finite"),
        (1, ZERO + torch.inf, "not finite"),
    ],
)
def test_rounds_and_queries_outside_the_protocol_are_refused(
    tmp_path: Path, t: int, query: torch.Tensor, reason: str
) -> None:
    guard = guard_of(write_silo(tmp_path))
    with pytest.raises(RunError, match=reason):
        guard.answer("run", CELL, t, query)
    assert torch.isfinite(guard.answer("run", CELL, 1, ZERO)).all()  # a refusal costs nothing and breaks nothing


def test_no_release_after_the_last_round_and_the_key_is_wiped(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    guard = guard_of(path)
    last = [guard.answer("run", CELL, t, ZERO) for t in range(1, 9)][-1]
    with pytest.raises(RunError, match="round 9: this run is over"):
        guard.answer("run", CELL, 9, ZERO)
    assert torch.equal(guard.answer("run", CELL, 8, ZERO), last)
    run = SiloLedger(read_policy(path).ledger).run("run")
    assert run is not None
    assert run.key is None


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"privacy__rho": 4.1}, r"costs mu = 4\.1.*the budget is 4"),
        ({"privacy__mode": "none", "privacy__rho": None}, "without noise"),
        ({"algorithm__trust": "trusted"}, "without noise"),
        ({"algorithm__clip": 1e6}, r"clips at 1e\+06, allowed is 118"),
        ({"algorithm__diameter": 10.0}, "clips at"),
        ({"federation__rounds": 11}, "11 rounds, allowed are 10"),
        ({"federation__batch": 3}, "needs 24 records"),
        ({"privacy__relation": "zero-out"}, "relation is zero-out, allowed is replace-one"),
        ({"federation__silos": 10_000_000}, "10000000 silos"),
    ],
)
def test_a_scenario_that_exceeds_the_policy_is_refused(
    tmp_path: Path, overrides: dict[str, Any], reason: str
) -> None:
    guard = guard_of(write_silo(tmp_path))
    with pytest.raises(RunError, match=reason):
        guard.answer("run", cell_json(**overrides), 1, ZERO)


def test_a_sampled_run_is_refused_before_anything_is_calibrated(tmp_path: Path) -> None:
    sampled = cell_json(
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "zero-out", "epsilon": 1.0},
        federation__sampling="poisson",
    )
    guard = guard_of(write_silo(tmp_path, relation="zero-out"))
    with pytest.raises(RunError, match="the budget is in mu, and a run with Poisson sampling has none"):
        guard.answer("run", sampled, 1, ZERO)


def test_a_trusted_policy_releases_sums_at_the_price_of_what_the_server_publishes(tmp_path: Path) -> None:
    guard = guard_of(write_silo(tmp_path, trust="trusted"))
    trusted = cell_json(algorithm__trust="trusted")
    first = guard.answer("run", trusted, 1, ZERO)
    other = tmp_path / "other"
    other.mkdir()
    assert torch.equal(first, guard_of(write_silo(other, trust="trusted")).answer("run", trusted, 1, ZERO))
    assert guard._ledger.prices() == [pytest.approx(4.0)]
    with pytest.raises(RunError, match="nobody add noise"):
        guard.answer("b", cell_json(algorithm__trust="trusted", privacy__mode="none", privacy__rho=None), 1, ZERO)
    with pytest.raises(RunError, match="budget is 4"):
        guard.answer("c", cell_json(algorithm__trust="trusted", privacy__rho=1.0), 1, ZERO)


def test_the_socket_is_given_to_the_group_that_may_ask(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    group = grp.getgrgid(os.getgid()).gr_name
    path.write_text(path.read_text().replace("[allow]", f'group = "{group}"\n[allow]'))
    process = start_daemon(path)
    try:
        assert (tmp_path / "0.sock").stat().st_mode & 0o777 == 0o660
    finally:
        process.kill()
        process.communicate()


def test_the_budget_is_for_the_shard_and_not_for_a_run(tmp_path: Path) -> None:
    """Runs of mu = 2.4 and 3.2 compose to exactly 4; a third, however small, is refused under any name."""
    guard = guard_of(write_silo(tmp_path))
    guard.answer("a", cell_json(privacy__rho=2.4), 1, ZERO)
    guard.answer("b", cell_json(privacy__rho=3.2), 1, ZERO)
    with pytest.raises(RunError, match="budget is 4"):
        guard.answer("c", cell_json(privacy__rho=0.1), 1, ZERO)
    again = guard_of(tmp_path / "silo-0.toml")  # a restart forgets nothing
    with pytest.raises(RunError, match="budget is 4"):
        again.answer("d", cell_json(privacy__rho=0.1), 1, ZERO)
    assert torch.isfinite(again.answer("b", cell_json(privacy__rho=3.2), 2, ZERO)).all()


def test_a_run_cannot_change_its_scenario(tmp_path: Path) -> None:
    guard = guard_of(write_silo(tmp_path))
    guard.answer("run", CELL, 1, ZERO)
    with pytest.raises(RunError, match="not the one this run was opened with"):
        guard.answer("run", cell_json(privacy__rho=1.0), 2, ZERO)


def test_increments_are_clipped_whatever_the_query(tmp_path: Path) -> None:
    """A query far outside the ball makes the unclipped increment huge; the release moves by at most 2·clip."""
    far = ZERO.clone()
    far[::7] = 1e6
    guard = guard_of(write_silo(tmp_path))
    guard.answer("run", CELL, 1, ZERO)
    guard.answer("run", CELL, 2, far)
    packed = SiloLedger(tmp_path / "ledger-0.sqlite").run("run")
    assert packed is not None
    assert packed.state is not None
    total = unpack(packed.state, next(iter(guard._open.values()))).sum.total
    assert float(total.norm()) <= 2 * CLIP * (1 + 1e-9)


def test_a_full_disk_releases_nothing(tmp_path: Path) -> None:
    guard = guard_of(write_silo(tmp_path))
    guard.answer("run", CELL, 1, ZERO)
    guard._ledger._database.execute("PRAGMA max_page_count = 1")  # SQLite's own way of a disk that is full
    with pytest.raises(RunError, match="nothing is released"):
        guard.answer("run", CELL, 2, ZERO)
    assert guard_of(tmp_path / "silo-0.toml")._ledger.answer("run", 2) is None


def test_files_that_cannot_be_trusted_are_refused(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    path.write_text(path.read_text().replace("silo = 0", "silo = 0\nseed = 1"))
    with pytest.raises(InputError, match="seed: a fixed seed is refused"):
        read_policy(path)
    path = write_silo(tmp_path, budget=-1.0)
    with pytest.raises(InputError, match=r"allow\.budget = -1\.0: expected a number above 0"):
        read_policy(path)
    ledger = tmp_path / "open.sqlite"
    ledger.touch(mode=0o644)
    with pytest.raises(InputError, match="chmod 600"):
        SiloLedger(ledger)
    ledger.chmod(0o600)
    ledger.write_text("this is no database, but long enough to be taken for one" * 20)
    with pytest.raises(InputError, match="cannot be used as a ledger"):
        SiloLedger(ledger)
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"expected an \.npz file"):
        load_shard(tmp_path / "bad.npz", 10)
    np.savez(tmp_path / "labels.npz", images=np.zeros((2, 4), np.uint8), labels=np.array([0, 10]))
    with pytest.raises(InputError, match="labels are whole numbers from 0 to 9"):
        load_shard(tmp_path / "labels.npz", 10)


def start_daemon(policy: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("fedpriv")), "silo", str(policy)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("answering on")
    return process


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    started = [start_daemon(write_silo(tmp_path, number, trust="secure-aggregation")) for number in range(3)]
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("trust", ["untrusted", "secure-aggregation"])
def test_a_whole_run_through_guards_that_are_killed_and_restarted(
    tmp_path: Path, daemons: list["subprocess.Popen[str]"], trust: str
) -> None:
    """Three real guard processes behind the real ClientApp and strategy; one is killed hard twice, mid-run."""
    cell = resolve_cell(small_tree(algorithm__trust=trust), "test")
    run_config = run_config_of(cell, Path())

    class GuardedGrid(InProcessGrid):
        rounds = 0

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            for context in self._contexts.values():
                context.node_config["guard"] = str(tmp_path / f"{context.node_config['partition-id']}.sock")

        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            self.rounds += 1
            if self.rounds in (4, 7):
                daemons[1].send_signal(signal.SIGKILL)
                daemons[1].wait()
                daemons[1] = start_daemon(tmp_path / "silo-1.toml")
            return list(super().send_and_receive(messages, timeout=timeout))

    task = task_of_cell(cell)
    strategy = ReleaseStrategy(
        plan_of(cell, task.objective), task.objective.initial(), simulation_noise(0, "float64")
    )
    strategy.start(GuardedGrid(client_app, 3, run_config), one_array(task.objective.initial()))
    assert strategy.rounds_done == 8
    assert strategy.counts is None  # a guard does not tell, and nobody takes that for none
    assert torch.isfinite(strategy.model).all()
    keys = b""
    for number in range(3):
        ledger = SiloLedger(tmp_path / f"ledger-{number}.sqlite")
        if cell.algorithm.setting.masked:
            agreed = ledger.answer("1", 0)
            assert agreed is not None
            keys += agreed.reply
        assert [ledger.answer("1", t) is not None for t in range(1, 10)] == [True] * 8 + [False]
        assert ledger.prices() == [pytest.approx(4.0)]
    repeated = ask(tmp_path / "1.sock", "1", json.dumps(cell.canonical()), 1, ZERO.numpy(), keys)
    assert not isinstance(repeated, Refusal)
    answer = SiloLedger(tmp_path / "ledger-1.sqlite").answer("1", 1)
    assert answer is not None
    assert repeated.tobytes() == answer.reply


def test_the_daemon_survives_nonsense_and_clients_that_vanish(
    tmp_path: Path, daemons: list["subprocess.Popen[str]"]
) -> None:
    import socket

    path = tmp_path / "0.sock"
    assert path.stat().st_mode & 0o077 == 0
    for nonsense in (b"", b"\x00\x00\x00\x02{}", b"\xff" * 64):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
            raw.sendall(nonsense)
    time.sleep(0.1)
    refused = ask(path, "x", "{}", 1, ZERO.numpy())
    assert isinstance(refused, Refusal)
    assert "cannot be used" in refused.reason
    assert refused.final
    answer = ask(path, "run", CELL, 1, ZERO.numpy())
    assert not isinstance(answer, Refusal)
    assert answer.shape == (7850,)
    absent = ask(tmp_path / "nobody.sock", "run", CELL, 1, ZERO.numpy())
    assert isinstance(absent, Refusal)
    assert "does not answer" in absent.reason
    assert not absent.final  # a guard may be starting
    assert daemons[0].poll() is None


def test_a_supernode_without_a_guard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = resolve_cell(small_tree(seed=99), "test")  # no other test's, so that no silo is built yet
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/flwr-clientapp"])
    task = task_of_cell(cell)
    strategy = ReleaseStrategy(
        plan_of(cell, task.objective), task.objective.initial(), simulation_noise(0, "float64")
    )
    with pytest.raises(RunError, match="has no guard"):
        strategy.start(
            InProcessGrid(client_app, 3, run_config_of(cell, Path())), one_array(task.objective.initial())
        )
