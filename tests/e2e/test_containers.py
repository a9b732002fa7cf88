"""The containers, really run: README's commands in a clean checkout, and their results against the simulation.

Takes a Docker daemon, and minutes: `make e2e`.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.e2e.docker_host import UnavailableError, base_image, docker_daemon, fetch_wheels, run
from tests.e2e.federation import wait_until

ROOT = Path(__file__).resolve().parents[2]
SILOS, ROUNDS, SEEDS = 3, 3, 8
UP_SECONDS = 1200.0  # a limit for what hangs; on a quiet machine it is a minute
NOISY, NOISE_FREE = "scenarios/noisy.toml", "scenarios/noise-free.toml"

pytestmark = pytest.mark.containers


@dataclass(frozen=True)
class Containers:
    """A checkout in which deploy/prepare.sh has been run."""

    checkout: Path
    environment: Mapping[str, str]

    def compose(self, *words: str, scenario: str = NOISY) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["docker-compose", "--ansi=never", *words],
            cwd=self.checkout,
            env={**self.environment, "SCENARIO": scenario},
            capture_output=True,
            text=True,
            timeout=UP_SECONDS,
            check=False,
        )

    def up(self, scenario: str, during: Callable[[], None] = lambda: None) -> "subprocess.CompletedProcess[str]":
        """README's command, and the containers taken away after it; the ledgers stay."""
        try:
            running = subprocess.Popen(
                ["deploy/up.sh"],
                cwd=self.checkout,
                env={**self.environment, "SCENARIO": scenario},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            during()
            output, _ = running.communicate(timeout=UP_SECONDS)
            return subprocess.CompletedProcess(["deploy/up.sh"], running.returncode, output)
        finally:
            self.compose("down")

    def inside(self, name: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """A shell command, the last of `words`, in a running container; options of `exec` before it."""
        return self.compose("exec", "-T", *words[:-1], name, "sh", "-c", words[-1])

    def simulate(self, scenario: str, out: str, *overrides: str) -> list[Mapping[str, Any]]:
        """The in-process engine, in the job's own container: the same torch, whatever is installed here."""
        options = [word for override in overrides for word in ("--set", override)]
        words = ("fedpriv", "run", scenario, "--engine", "inprocess", "--out", f"runs/{out}", *options)
        done = self.compose("run", "--rm", "--no-deps", "job", *words)
        assert done.returncode == 0, done.stderr
        return self.results(out)["cells"]  # type: ignore[no-any-return]

    def results(self, name: str) -> Mapping[str, Any]:
        return dict(json.loads((self.checkout / "runs" / name / "results.json").read_text(encoding="utf-8")))

    def model(self, name: str, cell: int = 0) -> NDArray[np.float32]:
        return np.load(self.checkout / "runs" / name / "models" / f"{cell:04d}.npy")


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    folder = tmp_path_factory.mktemp("containers")
    try:
        with docker_daemon(folder / "docker") as found:
            base, checkout = base_image(folder, found), clean_checkout(folder / "fedpriv")
            fetch_wheels(checkout, found)
            environment = {
                **found,
                "BASE_IMAGE": base,
                "PIP_NO_INDEX": "1",
                "FEDPRIV_IMAGE": "fedpriv:e2e",
                "COMPOSE_PROJECT_NAME": "fedpriv-e2e",
                "FLWR_LOG_LEVEL": "INFO",
            }
            ready = Containers(checkout, environment)
            ready.compose("down", "--volumes")  # of an earlier test that was killed
            subprocess.run(
                ["deploy/prepare.sh", NOISY, "--runs", "1"], cwd=checkout, env=environment, check=True, timeout=600
            )
            try:
                yield ready
            finally:
                ready.compose("down", "--volumes")
    except UnavailableError as reason:
        pytest.skip(f"no containers here: {reason}")


def clean_checkout(folder: Path) -> Path:
    """The files that git knows, as they are now, and the two scenarios of this test."""
    listed = run("git", "ls-files", "-z", env={"PATH": "/usr/bin:/bin"}, cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    text = (folder / "scenarios" / "containers.toml").read_text(encoding="utf-8")
    noisy = text.replace("rounds = 6", f"rounds = {ROUNDS}").replace('name = "containers"', 'name = "noisy"')
    noise_free = noisy.replace("mu = 2.0", 'mode = "none"').replace('name = "noisy"', 'name = "noise-free"')
    (folder / NOISY).write_text(noisy, encoding="utf-8")
    (folder / NOISE_FREE).write_text(noise_free, encoding="utf-8")
    return folder


def test_a_guard_refuses_a_run_without_noise_and_the_job_fails(containers: Containers) -> None:
    done = containers.up(NOISE_FREE)
    assert done.returncode != 0
    assert "refuses: the scenario has" in done.stdout, done.stdout[-3000:]
    assert not containers.results("noise-free")["complete"]


def test_a_noisy_run_differs_from_the_simulation_by_noise_of_the_same_size_and_its_own(
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
        kill = "for p in /proc/[0-9]*; do grep -q supernode_process $p/cmdline && kill -9 ${p#/proc/}; done"
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


def test_the_budget_is_spent_in_the_ledger_that_outlives_the_containers(containers: Containers) -> None:
    done = containers.up(NOISY)
    assert done.returncode != 0
    assert "the budget is 2" in done.stdout, done.stdout[-3000:]


def test_without_noise_the_containers_compute_what_the_simulation_computes(containers: Containers) -> None:
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


def test_what_containers_may_do_while_they_run(containers: Containers) -> None:
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
