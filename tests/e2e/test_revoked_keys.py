"""A silo's key that is stolen: it is revoked, another takes its place, and the run goes on."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fedpriv.addons.services import supernode_process
from fedpriv.addons.services.certificates import make_node_key
from fedpriv.addons.services.deployment import node_key_folder
from fedpriv.addons.services.flower_private.presence import list_silos
from fedpriv.addons.services.service import flower_environment, script_path
from tests.e2e.federation import Federation, federation, finish, kill_process, say, wait_until

pytestmark = pytest.mark.deployment
REFUSED = "the SuperLink does not know this SuperNode's key"


def command(*words: str) -> str:
    done = subprocess.run([script_path("fedpriv"), *words], capture_output=True, text=True, check=True)
    return done.stdout


def tries(log: Path) -> int:
    return log.read_text().count("trying again")


def connected(fed: Federation) -> dict[int, bool]:
    return {silo.silo: silo.connected for silo in list_silos(fed.link.control)}


def test_a_revoked_key_is_refused_and_its_silo_continues_with_a_new_key(tmp_path: Path) -> None:
    """Guarantee: a key that was taken out of `nodes` opens nothing; a silo is what its key is registered as."""
    with federation(tmp_path, "federation.rounds=12", "deployment.patience=600") as fed:
        fed.start_silos()
        running = fed.run()
        fed.wait_for_round(2, running)
        token = fed.token()
        keys = fed.silo_keys(token), fed.server_key()
        public, own = fed.home / "keys" / "nodes" / "silo-1.pub", node_key_folder(fed.home, 1)
        stolen = Path(shutil.copytree(own, fed.home / "stolen"))
        assert connected(fed) == {0: True, 1: True, 2: True}
        assert "silo 1: the key SHA256:" in command("certificates", str(fed.home / "keys"), "--revoke", "1")
        wait_until(
            lambda: REFUSED in (fed.silos[1].home / "supernode.log").read_text(), "silo 1 that is turned away"
        )
        say("silo 1, whose SuperNode was at work, is turned away by the SuperLink that ran on")
        assert fed.link.process is not None
        assert fed.link.process.poll() is None
        assert running.poll() is None
        kill_process(fed.silos[1], "supernode")
        (own / "node.key").unlink()
        make_node_key(own / "node.key", public)
        say("silo 1 has another key, of which the SuperLink that ran on takes note")
        with (tmp_path / "thief.log").open("wb") as log:
            words = supernode_process.supernode_command(
                fed.silos[1].superlink, 1, fed.silos[1].home / "guard.sock", stolen
            )
            thief = subprocess.Popen(
                words,
                cwd=tmp_path,
                env=flower_environment(fed.home),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_until(lambda: tries(tmp_path / "thief.log") > 1, "the second try with the stolen key")
            assert connected(fed) == {0: True, 1: False, 2: True}
            fed.silos[1].start("supernode")
            wait_until(lambda: all(connected(fed).values()), "silo 1 with its new key")
            finish(running)
        finally:
            thief.kill()
        assert REFUSED in (tmp_path / "thief.log").read_text()
        assert fed.link.process.poll() is None, "it was not started again"
        fed.assert_each_round_was_released_once(token)
        assert np.array_equal(fed.model(), fed.replay(*keys))
