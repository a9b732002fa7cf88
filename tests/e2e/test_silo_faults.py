"""Silos that are slow, asked twice, corrupt, out of disk or not who they say they are."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fedpriv.addons.services.certificates import make_node_key
from fedpriv.addons.services.deployment import GUARD_SOCKET
from fedpriv.addons.services.supernode_process import NODE_KEY_FILE
from fedpriv.clients.app import ask_release
from fedpriv.protocol.messages import Refusal
from tests.e2e.federation import federation, finish, kill_process, results, say

pytestmark = pytest.mark.deployment


def test_the_server_waits_for_a_slow_silo_and_a_repeated_query_gets_the_same_bytes(tmp_path: Path) -> None:
    with federation(tmp_path, "federation.rounds=4") as fed:
        fed.start_silos()
        running = fed.run()
        fed.wait_for_round(1, running)
        token = fed.token()
        silo_keys, server_key = fed.silo_keys(token), fed.server_key()
        fed.silos[1].processes["guard"].send_signal(signal.SIGSTOP)
        say(f"silo 1 sleeps for 10 s after round {fed.rounds_done()}")
        time.sleep(10.0)
        fed.silos[1].processes["guard"].send_signal(signal.SIGCONT)
        fed.wait_for_round(2, running)
        say("asking silo 0 for round 1 again, with the same query and with another")
        first = np.zeros(7850, np.float32)  # x_1
        socket, cell = fed.silos[0].home / GUARD_SOCKET, json.dumps(fed.cell.canonical_data())
        again, other = ask_release(socket, token, cell, 1, first), ask_release(socket, token, cell, 1, first + 1)
        ((kept,),) = fed.ledger(0, "SELECT reply FROM answers WHERE t = 1")
        assert not isinstance(again, Refusal)
        assert again.tobytes() == kept
        assert isinstance(other, Refusal)
        assert "answered already, for another query" in other.reason
        finish(running)
        fed.assert_each_round_was_released_once(token)
        assert np.array_equal(fed.model(), fed.replay(silo_keys, server_key))


def test_two_concurrent_runs_have_separate_answers_and_share_the_budget(tmp_path: Path) -> None:
    with federation(tmp_path, "federation.rounds=3", budget=1.5) as fed:
        fed.start_silos()
        say("two runs on one SuperLink and the same silos, whose budget is 1.5 runs")
        runs = {name: fed.run(out=name) for name in ("one", "two")}
        for name, running in runs.items():
            finish(running)
            say(f"run {name} is over")
        tokens = {fed.token(name) for name in runs}
        for silo in range(3):
            answers = fed.ledger(silo, "SELECT run_id, t FROM answers ORDER BY run_id, t")
            assert answers == [(token, t) for token in sorted(tokens) for t in (1, 2, 3)]
        assert not np.array_equal(fed.model("one"), fed.model("two"))  # noise of their own
        output = finish(fed.run(out="three"), code=1)
        assert "the budget is" in output
        say(output.strip().splitlines()[-1])


def test_a_guard_with_a_corrupt_shard_does_not_start_and_the_run_ends(tmp_path: Path) -> None:
    with federation(tmp_path, "deployment.patience=40") as fed:
        shard = tmp_path / "silos" / "silo-1" / "shard.npz"
        shard.write_bytes(shard.read_bytes()[:-2000])
        fed.start_silos()
        say("silo 1's shard is cut short")
        output = finish(fed.run(), code=1)
        say(output.strip().splitlines()[-1])
        assert "no reply from silo 1; the silo's guard" in output
        assert fed.silos[1].processes["guard"].wait() == 2
        assert "expected an .npz file" in (fed.silos[1].home / "guard.log").read_text()
        assert fed.rounds_done() == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "silos" / "silo-1"
    disk.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=0700", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_silo_with_a_full_disk_releases_nothing_until_there_is_space_again(
    tmp_path: Path, small_disk: Path
) -> None:
    with federation(tmp_path) as fed:
        fed.start_silos()
        running = fed.run()
        fed.wait_for_round(1, running)
        token = fed.token()
        silo_keys, server_key = fed.silo_keys(token), fed.server_key()
        with (small_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(1000))
        answered = len(fed.ledger(1, "SELECT 1 FROM answers"))
        say(f"silo 1's disk is full after {answered} answers")
        time.sleep(20.0)
        assert running.poll() is None
        assert len(fed.ledger(1, "SELECT 1 FROM answers")) <= answered + 1  # one may have been under way
        assert fed.rounds_done() < fed.cell.schedule.rounds
        (small_disk / "filler").unlink()
        say("there is room again")
        finish(running)
        fed.assert_each_round_was_released_once(token)
        assert np.array_equal(fed.model(), fed.replay(silo_keys, server_key))


def test_a_silo_with_an_unregistered_key_cannot_connect(tmp_path: Path) -> None:
    """Silo 2's key is not the one that was registered."""
    with federation(tmp_path, "deployment.patience=20") as fed:
        key = fed.silos[2].key_folder / NODE_KEY_FILE
        key.unlink()
        make_node_key(key, tmp_path / "stranger.pub")
        fed.start_silos()
        say("silo 2 has a key that nobody registered")
        output = finish(fed.run(), code=1)
        say(output.strip().splitlines()[-1])
        assert "silo 2 was not connected after 20 s" in output
        assert all(silo.processes["supernode"].poll() is None for silo in fed.silos)  # and asks on
        assert "trying again" in (fed.silos[2].home / "supernode.log").read_text()
        assert fed.rounds_done() == 0


def test_a_run_that_allows_missing_silos_continues_without_a_lost_silo(tmp_path: Path) -> None:
    with federation(tmp_path, "deployment.missing=continue", "deployment.patience=20") as fed:
        fed.start_silos()
        running = fed.run("--quiet")
        fed.wait_for_round(3, running)
        say(f"killing silo 2's SuperNode for good after round {fed.rounds_done()}")
        kill_process(fed.silos[2], "supernode")
        output = finish(running)
        say(output.strip())
        cell = results(tmp_path)
        (missed,) = cell["missed"].values()
        assert list(cell["missed"]) == ["2"]
        assert missed == list(range(missed[0], fed.cell.schedule.rounds + 1))
        assert f"fedpriv: silo 2 did not answer in round {', '.join(map(str, missed))}" in output
        answered = [t for (t,) in fed.ledger(2, "SELECT t FROM answers ORDER BY t")]
        assert answered in (list(range(1, missed[0])), list(range(1, missed[0] + 1)))  # at most one reply was late
        assert [t for (t,) in fed.ledger(0, "SELECT t FROM answers ORDER BY t")] == list(range(1, 7))
        assert cell["mu"] == pytest.approx(4.0)
        assert np.isfinite(fed.model()).all()


def test_the_refusals_of_all_silos_are_reported_before_round_1_without_a_charge(tmp_path: Path) -> None:
    """Silo 0 allows fewer rounds, silo 2 has less budget; masked messages, whose keys would open the run."""
    with federation(tmp_path, "algorithm.trust=secure-aggregation") as fed:
        for number, (key, bound) in {0: ("rounds", "2"), 2: ("budget", "0.5")}.items():
            policy = fed.silos[number].policy
            policy.write_text(re.sub(rf"^{key} = .*", f"{key} = {bound}", policy.read_text(), flags=re.MULTILINE))
        fed.start_silos()
        output = finish(fed.run("--quiet"), code=1)
        say(output.strip())
        assert (
            "fedpriv: 2 of 3 silos do not take part, so none is asked for a round:\n  silo 0 refuses: " in output
        )
        assert "\n  silo 2 refuses: the run costs mu = 4" in output
        assert "silo 1" not in output
        for silo in range(3):
            assert fed.ledger(silo, "SELECT run_id FROM runs") == []
