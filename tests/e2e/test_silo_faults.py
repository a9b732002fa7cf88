"""Silos that are slow, asked twice, corrupt, out of disk or not who they say they are."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from clients.proxy import ask
from fedpriv.engines.local_silo import SOCKET
from fedpriv.engines.superlink import free_ports, start_superlink, stop_all_of
from fedpriv.records import Refusal
from tests.e2e.federation import Federation, federation, finish, say

pytestmark = pytest.mark.deployment


def test_a_slow_silo_is_waited_for_and_a_question_delivered_twice_gets_the_same_bytes(tmp_path: Path) -> None:
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
        socket, cell = fed.silos[0].home / SOCKET, json.dumps(fed.cell.canonical())
        again, other = ask(socket, token, cell, 1, first), ask(socket, token, cell, 1, first + 1)
        ((kept,),) = fed.ledger(0, "SELECT reply FROM answers WHERE t = 1")
        assert not isinstance(again, Refusal)
        assert again.tobytes() == kept
        assert isinstance(other, Refusal)
        assert "answered already, for another query" in other.reason
        finish(running)
        fed.assert_each_round_was_released_once(token)
        assert np.array_equal(fed.model(), fed.replay(silo_keys, server_key))


def test_two_runs_at_once_keep_apart(tmp_path: Path) -> None:
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


def test_corrupt_records_are_never_served(tmp_path: Path) -> None:
    with federation(tmp_path, "deployment.patience=40") as fed:
        shard = tmp_path / "silos" / "silo-1" / "shard.npz"
        shard.write_bytes(shard.read_bytes()[:-2000])
        fed.start_silos()
        say("silo 1's shard is cut short")
        output = finish(fed.run(), code=1)
        say(output.strip().splitlines()[-1])
        assert "round 1: no reply from silo 1; the silo's guard" in output
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


def test_a_full_disk_releases_nothing_and_the_run_goes_on_when_there_is_room(
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


def test_a_silo_with_the_wrong_key_is_not_let_in(tmp_path: Path) -> None:
    """Flower's own SuperNode authentication over TLS; silo 2's key is not the one that was registered."""
    keys = tmp_path / "keys"
    keys.mkdir()
    certificate(keys)
    for name in ("silo-0", "silo-1", "silo-2", "stranger"):
        command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(keys / name)]
        subprocess.run(command, check=True)
    tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
    options = [str(keys / word) if word.startswith(("ca.", "server.")) else word for word in tls]
    home = tmp_path / "h"
    home.mkdir()
    (port,) = free_ports(1)
    try:
        link = start_superlink(home, port, [*options, "--enable-supernode-auth"], keys / "ca.crt")
        fed = Federation(tmp_path, home, link, ["deployment.patience=60"])
        for silo, key in zip(fed.silos, ("silo-0", "silo-1", "stranger"), strict=True):
            link.flwr(
                "supernode", "register", str(keys / f"silo-{silo.number}.pub"), "fedpriv", "--format", "json"
            )
            secure = ("--root-certificates", str(keys / "ca.crt"))
            silo.options = (*secure, "--auth-supernode-private-key", str(keys / key))
        fed.start_silos()
        say("silo 2 has a key that nobody registered")
        output = finish(fed.run("--root-certificates", str(keys / "ca.crt")), code=1)
        say(output.strip().splitlines()[-1])
        assert "silo 2 was not connected after 60 s" in output
        assert fed.silos[2].processes["supernode"].wait(timeout=10) != 0
        assert all(fed.silos[silo].processes["supernode"].poll() is None for silo in (0, 1))
        assert fed.rounds_done() == 0
    finally:
        stop_all_of(home)


def certificate(keys: Path) -> None:
    """A certificate of our own for 127.0.0.1, by openssl."""
    (keys / "san.cnf").write_text("subjectAltName = DNS:localhost,IP:127.0.0.1\n")
    for step in (
        "req -new -x509 -newkey rsa:2048 -nodes -subj /CN=test -days 2 -keyout ca.key -out ca.crt "
        "-addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign",
        "req -new -newkey rsa:2048 -nodes -subj /CN=superlink -keyout server.key -out server.csr",
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile san.cnf -out server.pem",
    ):
        subprocess.run(["openssl", *step.split()], cwd=keys, check=True, capture_output=True)
