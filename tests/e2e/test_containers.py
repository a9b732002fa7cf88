"""The containers, really run: README's commands in a clean checkout, and their results against the simulation.

Takes a Docker daemon, and minutes: `make e2e`.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.checkout import Containers, prepared
from tests.e2e.docker_host import Docker, run
from tests.e2e.federation import wait_until

SILOS, ROUNDS, SEEDS = 3, 3, 8
NOISY, NOISE_FREE = "scenarios/noisy.toml", "scenarios/noise-free.toml"

pytestmark = pytest.mark.containers


@pytest.fixture(scope="module")
def containers(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    folder = tmp_path_factory.mktemp("containers")
    with prepared(docker, folder, NOISY, "--runs", "1", change=two_scenarios) as ready:
        yield ready


def two_scenarios(checkout: Path) -> None:
    """The scenarios of this test."""
    text = (checkout / "scenarios" / "containers.toml").read_text(encoding="utf-8")
    noisy = text.replace("rounds = 6", f"rounds = {ROUNDS}").replace('name = "containers"', 'name = "noisy"')
    noise_free = noisy.replace("mu = 2.0", 'mode = "none"').replace('name = "noisy"', 'name = "noise-free"')
    (checkout / NOISY).write_text(noisy, encoding="utf-8")
    (checkout / NOISE_FREE).write_text(noise_free, encoding="utf-8")


def test_a_guard_refuses_a_run_without_noise_and_the_job_fails(containers: Containers) -> None:
    done = containers.up(NOISE_FREE)
    assert done.returncode != 0
    assert "refuses: the scenario has" in done.stdout, done.stdout[-3000:]
    assert not containers.results("noise-free")["complete"]


def test_a_container_run_has_noise_of_the_simulated_size_and_independent_direction(
    containers: Containers,
) -> None:
    """Its distance from the noise-free model is that of seeded runs, its direction is none of theirs.

    7,850 coordinates: the distance varies by 1 % between seeds, the cosine of two independent noises by 0.011.
    """
    killed: list[str] = []

    def a_supernode_crashes() -> None:
        """In the middle of the run; Docker starts its container again, and the job goes on."""
        progress = containers.checkout / "runs" / "noisy" / "deployment"
        wait_until(lambda: any(progress.glob("*/journal/released.bin")), "a round")
        named = "tr '\\0' ' ' < $p/cmdline | grep -q 'fedpriv supernode'"
        kill = f"for p in /proc/[0-9]*; do {named} && kill -9 ${{p#/proc/}}; done"
        killed.append(containers.inside("node-1", f"{kill}; true").stderr)

    done = containers.up(NOISY, during=a_supernode_crashes)
    assert done.returncode == 0, done.stdout[-3000:]
    assert killed
    results = containers.results("noisy")
    assert results["complete"]
    (cell,) = results["cells"]
    assert (cell["engine"], cell["silos"], cell["rounds"]) == ("deployment", SILOS, ROUNDS)
    assert cell["mu"] == pytest.approx(2.0)

    seeds = f"seeds={SEEDS}"
    containers.simulate(NOISY, "noisy-simulated", seeds)
    containers.simulate(NOISE_FREE, "noise-free-simulated", seeds)
    noises = np.stack(
        [
            containers.model("noisy-simulated", seed) - containers.model("noise-free-simulated", seed)
            for seed in range(SEEDS)
        ]
    )
    noise = containers.model("noisy") - containers.model("noise-free-simulated", 0)
    sizes = np.linalg.norm(noises, axis=1)
    assert np.linalg.norm(noise) == pytest.approx(sizes.mean(), rel=0.08)
    assert np.abs(noises @ noise / (sizes * np.linalg.norm(noise))).max() < 0.07


def test_the_spent_budget_persists_after_the_containers_are_recreated(containers: Containers) -> None:
    done = containers.up(NOISY)
    assert done.returncode != 0
    assert "the budget is 2" in done.stdout, done.stdout[-3000:]


def test_containers_without_noise_compute_the_model_of_the_simulation(containers: Containers) -> None:
    for policy in containers.checkout.glob("deploy/run/silo-*/guard/policy.toml"):
        policy.write_text(policy.read_text(encoding="utf-8") + "noise_free = true\n", encoding="utf-8")
    shutil.rmtree(containers.checkout / "runs" / "noise-free", ignore_errors=True)  # of the refused run
    done = containers.up(NOISE_FREE)
    assert done.returncode == 0, done.stdout[-3000:]
    results = containers.results("noise-free")
    assert results["complete"]
    (cell,) = results["cells"]
    (simulated,) = containers.simulate(NOISE_FREE, "noise-free-reference")
    assert np.array_equal(containers.model("noise-free"), containers.model("noise-free-reference"))
    assert cell["test_loss"] == simulated["test_loss"]
    assert cell["test_accuracy"] == simulated["test_accuracy"]


def test_running_containers_have_restricted_users_files_and_networks(containers: Containers) -> None:
    """Asked of the daemon and from inside, not of the compose file."""
    try:
        services = ("superlink", "guard-0", "node-0", "guard-1", "node-1")
        started = containers.compose("up", "--detach", *services)
        assert started.returncode == 0, started.stderr
        for name in ("superlink", "guard-0", "node-0"):
            container = containers.compose("ps", "--quiet", name).stdout.strip()
            (state,) = json.loads(run("docker", "inspect", container, env=containers.environment))
            assert state["Config"]["User"].partition(":")[0] not in ("", "0", "root"), name
            assert state["HostConfig"]["ReadonlyRootfs"], name
            assert state["HostConfig"]["Memory"] > 0, name

        inside = containers.inside
        health = "health.py https://superlink:8000/health"
        wait_until(lambda: inside("node-0", health).returncode == 0, "the SuperLink", 120.0)
        wait_until(
            lambda: inside("guard-0", "test -S /silo/socket/guard.sock").returncode == 0, "the guard", 120.0
        )
        # The socket is no file; shard, policy and ledger are not there.
        assert inside("node-0", "find /silo -type f; find /silo -type s").stdout.split() == [
            "/silo/socket/guard.sock"
        ]
        assert inside("node-0", "rm /silo/socket/guard.sock").returncode != 0
        assert inside("node-0", "test -w /silo/socket/guard.sock").returncode == 0  # it may ask
        assert inside("guard-0", "ls /sys/class/net").stdout.split() == ["lo"]
        assert "CERTIFICATE_VERIFY_FAILED" in inside("node-0", "-e", "SSL_CERT_FILE=/dev/null", health).stderr
        assert inside("node-0", "getent hosts node-1").returncode != 0

        # The Fleet API is all that a silo reaches of the SuperLink.
        assert inside("superlink", "test -S /control/control.sock").returncode == 0
        assert not inside("node-0", "find / -name control.sock 2> /dev/null").stdout
        for path in ("control/start-run", "control/list-runs", "runtime/acquire-task"):
            ask = f"import httpx; print(httpx.post('https://superlink:8000/v1/{path}', verify=False).status_code)"
            assert inside("node-0", f'python -c "{ask}"').stdout.strip() == "404", path
        ports = "import socket; print([p for p in range(1, 65536) if not socket.socket().connect_ex((a, p))])"
        scan = f"import socket; a = socket.gethostbyname('superlink'); {ports}"
        assert inside("node-0", f'python -c "{scan}"').stdout.strip() == "[8000]"

        stranger = containers.checkout / "stranger"
        shutil.copytree(containers.checkout / "deploy" / "run" / "silo-0" / "node", stranger)
        (stranger / "node.key").unlink()
        (stranger / "node.key.pub").unlink()
        run(
            "ssh-keygen",
            "-q",
            "-t",
            "ecdsa",
            "-b",
            "384",
            "-N",
            "",
            "-f",
            stranger / "node.key",
            env=containers.environment,
        )
        run("chown", "--recursive", "30000:30000", stranger, env=containers.environment)
        refused = containers.compose("run", "--rm", "--no-deps", "--volume", f"{stranger}:/keys:ro", "node-0")
        assert refused.returncode != 0
    finally:
        containers.compose("down")
