"""Processes of a federation that are killed: what was released stays released once, and the model is the same."""

import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedpriv.addons.services.certificates import make_node_key
from fedpriv.addons.services.deployment import LocalSilo, node_key_folder, start_superlink
from fedpriv.addons.services.flower_private.presence import list_runs, list_silos
from tests.e2e.federation import Federation, federation, finish, kill_process, results, say, wait_until

pytestmark = pytest.mark.deployment


ROUNDS = 40
PRIVATE = "fedpriv.addons.services.flower_private"


@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
def test_a_killed_and_restarted_silo_continues_from_its_ledger_with_the_same_model(
    tmp_path: Path, trust: str
) -> None:
    with federation(tmp_path, f"algorithm.trust={trust}") as fed:
        fed.start_silos()
        running = fed.run()
        fed.wait_for_round(2, running)
        token = fed.token()
        silo_keys, server_key = fed.silo_keys(token), fed.server_key()
        say(f"killing silo 1's SuperNode and guard after round {fed.rounds_done()}")
        for name in ("supernode", "guard"):
            kill_process(fed.silos[1], name)
        fed.silos[1].start()
        finish(running)
        say("the run is over; replaying it in one process with the kept keys")
        fed.assert_each_round_was_released_once(token)
        assert np.array_equal(fed.model(), fed.replay(silo_keys, server_key))
        cell = results(tmp_path)
        assert (cell["noise"], cell["trust"], round(cell["mu"], 9)) == ("release", trust, 4.0)
        assert fed.ledger(1, "SELECT key FROM runs") == [(None,)]
        assert not (fed.own() / "journal" / "noise.key").exists()


def test_a_silo_lost_for_good_ends_the_run_with_an_error_naming_silo_and_round(tmp_path: Path) -> None:
    with federation(tmp_path, "deployment.patience=20") as fed:
        fed.start_silos()
        running = fed.run()
        fed.wait_for_round(2, running)
        done = fed.rounds_done()
        say(f"killing silo 2's SuperNode for good after round {done}")
        kill_process(fed.silos[2], "supernode")
        output = finish(running, code=1)
        say(output.strip().splitlines()[-1])
        rounds = fed.rounds_done()
        assert f"fedpriv: round {rounds + 1}: no reply from silo 2" in output
        assert f"--resume --out {tmp_path / 'run'}\n" in output
        fed.assert_no_round_was_released_twice(fed.token())
        assert not (tmp_path / "run" / "models").exists()


def test_a_restarted_superlink_continues_the_run_with_its_silos(tmp_path: Path) -> None:
    """A silo that was added meanwhile takes no part, and ends nothing."""
    with federation(tmp_path, f"federation.rounds={ROUNDS}", "federation.batch=45") as fed:
        fed.start_silos()
        running = fed.run()
        fed.wait_for_round(2, running)
        token = fed.token()
        silo_keys, server_key = fed.silo_keys(token), fed.server_key()
        assert fed.link.process is not None
        add_silo(fed)
        say(f"killing the SuperLink after round {fed.rounds_done()}")
        fed.link.process.kill()
        fed.link.process.wait()
        assert fed.link.address is not None
        runs = str(fed.home / "runs.json")
        port = int(fed.link.address.rpartition(":")[2])
        again = start_superlink(fed.home, ["--keys", str(fed.home / "keys"), "--state", runs], port)
        say("the SuperLink is back; SuperNodes and `fedpriv run` were left alone")
        output = finish(running)
        say(output)
        assert "the SuperLink was started again; the run goes on from its journal" in output
        say("the run is over")
        fed.assert_each_round_was_released_once(token)
        assert np.array_equal(fed.model(), fed.replay(silo_keys, server_key))
        assert all(silo.processes["supernode"].poll() is None for silo in fed.silos)
        assert again.process is not None
        wait_until(
            lambda: list_runs(fed.link.control)[0].state == "finished:completed", "the run's end in its list"
        )
        again.process.kill()
        again.process.wait()
        start_superlink(fed.home, ["--keys", str(fed.home / "keys"), "--state", runs], port)
        say("started once more; another run, which no silo allows")
        (known,) = list_runs(fed.link.control)
        assert (known.state, known.rounds, known.orphan) == ("finished:completed", ROUNDS, False)
        output = finish(fed.run("--quiet", out="another"), code=1)
        assert "3 of 3 silos do not take part" in output  # their budgets are spent, and they are all there


def add_silo(fed: Federation) -> None:
    """A fourth silo's key and SuperNode, without a guard, once its SuperLink has heard of it."""
    number, keys = len(fed.silos), node_key_folder(fed.home, len(fed.silos))
    keys.mkdir(mode=0o700)
    (keys / "ca.crt").write_bytes((fed.home / "keys" / "ca.crt").read_bytes())
    make_node_key(keys / "node.key", fed.home / "keys" / "nodes" / f"silo-{number}.pub")
    policy = fed.folder / "silos" / f"silo-{number}" / "policy.toml"
    policy.parent.mkdir()
    assert fed.link.address is not None
    LocalSilo(number, policy, fed.link.address, keys).start("supernode")
    wait_until(
        lambda: any(silo.silo == number and silo.connected for silo in list_silos(fed.link.control)),
        f"silo {number}",
    )
    say(f"silo {number} is connected after round {fed.rounds_done()}")


def test_a_superlink_whose_executor_is_killed_ends_with_a_log_message(tmp_path: Path) -> None:
    with federation(tmp_path) as fed:
        fed.start_silos()
        running = fed.run()
        fed.wait_for_round(1, running)
        assert fed.link.process is not None
        say("killing the executor of the SuperLink")
        executor_of(fed).kill()
        assert fed.link.process.wait(timeout=30) == 1
        assert "its executor was ended by SIGKILL" in (fed.home / "superlink.log").read_text()
        running.kill()


def executor_of(fed: Federation) -> psutil.Process:
    assert fed.link.process is not None
    children = psutil.Process(fed.link.process.pid).children()
    (executor,) = [child for child in children if f"{PRIVATE}.executor" in child.cmdline()]
    return executor


@pytest.mark.parametrize("seed", range(20))
def test_a_helper_process_killed_at_a_random_time_does_not_change_the_model(tmp_path: Path, seed: int) -> None:
    """Guarantee: no helper process is one that nobody watches."""
    rng = np.random.default_rng([46, seed])
    with federation(tmp_path) as fed:
        fed.start_silos()
        running = fed.run()
        fed.wait_for_round(1, running)
        token = fed.token()
        silo_keys, server_key = fed.silo_keys(token), fed.server_key()
        time.sleep(float(rng.uniform(0.0, 2.0)))
        victim = int(rng.integers(4))
        if victim < 3:
            kill_node(fed.silos[victim])
        else:
            kill_executor(fed)
        say(f"killed helper {victim} after round {fed.rounds_done()}")
        finish(running)
        fed.assert_each_round_was_released_once(token)
        assert np.array_equal(fed.model(), fed.replay(silo_keys, server_key))


def kill_node(silo: LocalSilo) -> None:
    """Kill a silo's node, and wait until its supervisor has said so and started another."""
    message, log = "its SuperNode was ended by SIGKILL", silo.home / "supernode.log"
    before, supervisor = log.read_text().count(message), psutil.Process(silo.processes["supernode"].pid)
    (node,) = supervisor.children()
    node.kill()
    wait_until(lambda: log.read_text().count(message) > before, "a line in its log", seconds=10.0)
    wait_until(
        lambda: [child.pid for child in supervisor.children()] not in ([], [node.pid]),
        "another node",
        seconds=10.0,
    )


def kill_executor(fed: Federation) -> None:
    """Kill the SuperLink's executor; start the SuperLink again once it has said so and ended, as systemd does."""
    assert fed.link.process is not None
    assert fed.link.address is not None
    executor_of(fed).kill()
    assert fed.link.process.wait(timeout=10) == 1
    assert "its executor was ended by SIGKILL" in (fed.home / "superlink.log").read_text()
    options = ["--keys", str(fed.home / "keys"), "--state", str(fed.home / "runs.json")]
    start_superlink(fed.home, options, int(fed.link.address.rpartition(":")[2]))


@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
def test_a_killed_server_continues_after_resume_with_the_same_model(tmp_path: Path, trust: str) -> None:
    with federation(tmp_path, f"algorithm.trust={trust}") as fed:
        fed.start_silos()
        running = fed.run()
        fed.wait_for_round(2, running)
        token = fed.token()
        silo_keys, server_key = fed.silo_keys(token), fed.server_key()
        before = (fed.own() / "journal" / "released.bin").read_bytes()
        (server,) = fed.processes("flwr-serverapp")
        say(f"killing the ServerApp after round {fed.rounds_done()}")
        server.kill()
        running.send_signal(signal.SIGINT)
        finish(running, code=130)
        say("resuming")
        finish(fed.run("--resume"))
        fed.assert_each_round_was_released_once(token)
        assert (fed.own() / "journal" / "released.bin").read_bytes().startswith(before)
        assert np.array_equal(fed.model(), fed.replay(silo_keys, server_key))
