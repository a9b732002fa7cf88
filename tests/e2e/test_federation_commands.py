"""`fedpriv federation` beside a real federation."""

import json
import signal
import subprocess
from typing import Any

import numpy as np
import pytest

from fedpriv.addons.services.service import flower_environment, script_path
from tests.e2e.federation import Federation, federation, finish, kill_process, say, wait_until

pytestmark = pytest.mark.deployment


def asked(fed: Federation, *words: str) -> tuple[int, str]:
    """`fedpriv federation WORDS`: its exit code and output."""
    command = [script_path("fedpriv"), "federation", *words, "--superlink", fed.link.control.address]
    done = subprocess.run(command, capture_output=True, text=True, env=flower_environment(fed.home), check=False)
    return done.returncode, done.stdout + done.stderr


def listed(fed: Federation, what: str) -> list[dict[str, Any]]:
    return list(json.loads(asked(fed, what, "--json")[1]))


def test_an_orphaned_run_can_be_listed_stopped_and_resumed(tmp_path: Any) -> None:
    with federation(tmp_path, "federation.rounds=12") as fed:
        assert asked(fed, "status")[0] == 1
        fed.start_silos()
        wait_until(lambda: asked(fed, "status")[0] == 0, "all silos")
        say(asked(fed, "status")[1].strip())
        kill_process(fed.silos[2], "supernode")
        running = fed.run()
        wait_until(lambda: [each["state"] for each in listed(fed, "runs")] == ["running"], "the run")
        running.kill()
        running.communicate()
        say("`fedpriv run` is killed while the run waits for silo 2")
        wait_until(lambda: listed(fed, "runs")[0]["orphan"], "an orphan", 90.0)
        say(asked(fed, "runs")[1].strip())
        assert [silo["connected"] for silo in listed(fed, "status")] == [True, True, False]
        fed.silos[2].start("supernode")
        wait_until(lambda: fed.rounds_done() >= 1, "round 1")
        fed.silos[0].processes["guard"].send_signal(signal.SIGSTOP)
        token = fed.token()
        keys = fed.silo_keys(token), fed.server_key()
        (run,) = listed(fed, "runs")
        code, output = asked(fed, "stop", run["run"])
        assert code == 0, output
        say(output.strip())
        wait_until(lambda: listed(fed, "runs")[0]["state"] == "finished:stopped", "the end")
        fed.silos[0].processes["guard"].send_signal(signal.SIGCONT)
        assert fed.rounds_done() < 12
        finish(fed.run("--resume"))
        assert listed(fed, "runs")[0]["rounds"] == 12
        fed.assert_each_round_was_released_once(token)
        assert np.array_equal(fed.model(), fed.replay(*keys))
