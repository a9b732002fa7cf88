"""A coordinator that goes and comes while sites are left alone, health that is a container's own, and marks.

Takes a Docker daemon, and minutes: `make e2e`.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.checkout import Containers, prepared
from tests.e2e.docker_host import ROOT, Docker, run, works
from tests.e2e.federation import entries, say, wait_until

RESTARTS = "scenarios/restarts.toml"
SILOS, ROUNDS = 3, 200  # long enough for a silo that is added and three disturbances
SITES = tuple(f"{kind}-{silo}" for kind in ("guard", "node") for silo in range(SILOS))
SUPERLINK, EXECUTOR, GUARD = "fedpriv superlink", "flower_private.executor", "fedpriv silo run"
NODE = "flower_private.silo_node"

pytestmark = pytest.mark.containers


@pytest.fixture(scope="module")
def containers(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    folder = tmp_path_factory.mktemp("restarts")
    with prepared(docker, folder, RESTARTS, "--runs", "1", change=many_rounds) as ready:
        yield ready


def many_rounds(checkout: Path) -> None:
    text = (checkout / "scenarios" / "containers.toml").read_text(encoding="utf-8")
    text = text.replace("rounds = 6", f"rounds = {ROUNDS}").replace("batch = 300", "batch = 9")
    (checkout / RESTARTS).write_text(text.replace('name = "containers"', 'name = "restarts"'), encoding="utf-8")


def container_of(containers: Containers, name: str) -> str:
    labels = {"project": containers.environment["COMPOSE_PROJECT_NAME"], "service": name, "oneoff": "False"}
    words = [f"--filter=label=com.docker.compose.{label}={value}" for label, value in labels.items()]
    return run("docker", "ps", "--all", "--quiet", *words, env=containers.environment).strip()


def seen(containers: Containers, name: str) -> dict[str, Any]:
    """What the daemon says of a container."""
    (state,) = json.loads(run("docker", "inspect", container_of(containers, name), env=containers.environment))
    return dict(state)


def succeeds(containers: Containers, name: str, command: str) -> bool:
    """Whether a shell command in a container that runs ends with 0."""
    words = ("docker", "exec", container_of(containers, name), "sh", "-c", command)
    return works(*words, env=containers.environment)


def signal_inside(containers: Containers, name: str, number: str, pattern: str) -> None:
    """To the processes in a container whose command line has `pattern`, but process 1, as a crash would be."""
    loop = "for p in /proc/[0-9]*; do n=${p#/proc/}; [ $n != 1 ] && [ $n != $$ ]"
    loop += f" && tr '\\0' ' ' < $p/cmdline 2> /dev/null | grep -q '{pattern}' && kill -{number} $n; done; true"
    assert succeeds(containers, name, loop) or number == "9"  # a container takes its shells with it


def exit_codes(containers: Containers, name: str, since: float) -> list[int]:
    """Of all ends of a container since then."""
    told = run(
        *("docker", "events", "--since", f"{since:.0f}", "--until", f"{time.time():.0f}"),
        *("--filter", f"container={container_of(containers, name)}", "--filter", "event=die"),
        *("--format", "{{.Actor.Attributes.exitCode}}"),
        env=containers.environment,
    )
    return [int(code) for code in told.split()]


def healthy(containers: Containers, name: str) -> bool:
    """What its own health check says now."""
    check = seen(containers, name)["Config"]["Healthcheck"]["Test"]
    return succeeds(containers, name, " ".join(check[1:]))


def rounds_done(containers: Containers) -> int:
    """Of the run, by the server's journal."""
    journals = containers.checkout.glob("runs/restarts/deployment/*/journal/released.bin")
    return max((entries(path.stat().st_size, np.float32) for path in journals), default=0)


def wait_for_rounds(containers: Containers, rounds: int, what: str) -> None:
    """A job that ends before fails at once, with its last lines."""
    wait_until(
        lambda: rounds_done(containers) >= rounds or not seen(containers, "job")["State"]["Running"], what, 600.0
    )
    logs = f"docker logs --tail 20 {container_of(containers, 'job')} 2>&1"
    assert rounds_done(containers) >= rounds, run("sh", "-c", logs, env=containers.environment)


def ledger(containers: Containers, silo: int, query: str) -> list[list[Any]]:
    """A query to a silo's ledger, whether its guard runs or not."""
    code = "import json, sqlite3, sys; d = sqlite3.connect('file:/silo/ledger/ledger.sqlite?mode=ro', uri=True); "
    code += "print(json.dumps(d.execute(sys.argv[1]).fetchall()))"
    words = ("run", "--rm", "--no-deps", f"guard-{silo}", "python", "-c", code, query)
    return list(json.loads(containers.compose(*words).stdout.splitlines()[-1]))


def add_silo(containers: Containers) -> None:
    """A fourth silo's key and SuperNode by docs/containers.md, while a run goes on."""
    silo, env = SILOS, containers.environment
    network, folder = f"{env['COMPOSE_PROJECT_NAME']}_silo-{silo}", containers.checkout / f"deploy/run/silo-{silo}"
    run("deploy/silos.py", silo + 1, env=env, cwd=containers.checkout)
    run("deploy/make-keys.sh", "deploy/run", silo + 1, env=env, cwd=containers.checkout)
    run("chmod", "go+x", folder, env=env)
    run("chown", "-R", f"{30000 + silo}:{30000 + silo}", folder / "node", env=env)
    node = ("--no-deps", f"node-{silo}")
    assert (done := containers.compose("up", "--no-start", *node)).returncode == 0, done.stderr
    link = container_of(containers, "superlink")
    run("docker", "network", "connect", "--alias", "superlink", network, link, env=env)
    assert (done := containers.compose("up", "--detach", *node)).returncode == 0, done.stderr
    status = "fedpriv federation status --superlink unix:/control/control.sock"
    wait_until(lambda: f"silo {silo}: connected" in containers.inside("superlink", status).stdout, "a fourth silo")
    say("a fourth silo is connected, and the SuperLink was not started again")


def test_a_run_survives_kills_and_restarts_of_the_superlink_with_the_same_model(
    containers: Containers,
) -> None:
    """Three times in one run, once a silo was added: sites reconnect, model and ledgers are those without it."""
    keys, starts, codes = list[str](), dict[str, str](), list[int]()

    def crash(what: str, pattern: str) -> None:
        since, before = time.time(), rounds_done(containers)
        count = seen(containers, "superlink")["RestartCount"]
        signal_inside(containers, "superlink", "9", pattern)
        wait_until(lambda: seen(containers, "superlink")["RestartCount"] > count, f"a SuperLink after {what}")
        wait_for_rounds(containers, before + 3, f"rounds after {what}")
        codes.extend(exit_codes(containers, "superlink", since))
        say(f"{what}: exit codes {codes}, round {before} and then {rounds_done(containers)}")

    def disturbances() -> None:
        wait_until(lambda: rounds_done(containers) >= 2, "two rounds", 600.0)
        starts.update({name: seen(containers, name)["State"]["StartedAt"] for name in SITES})
        keys.extend(ledger(containers, silo, "SELECT hex(key) FROM runs")[0][0] for silo in range(SILOS))
        (own,) = (containers.checkout / "runs" / "restarts" / "deployment").iterdir()
        keys.insert(0, (own / "journal" / "noise.key").read_bytes().hex())
        began = seen(containers, "superlink")["State"]["StartedAt"]
        add_silo(containers)
        assert seen(containers, "superlink")["State"]["StartedAt"] == began
        crash("kill -9 of the SuperLink", SUPERLINK)
        crash("kill -9 of its executor", EXECUTOR)
        before = rounds_done(containers)
        assert containers.compose("restart", "superlink").returncode == 0
        wait_for_rounds(containers, before + 3, "rounds after a restart")
        for name in SITES:
            state = seen(containers, name)
            assert (state["RestartCount"], state["State"]["StartedAt"]) == (0, starts[name]), name
        wait_until(
            lambda: all(seen(containers, name)["State"]["Health"]["Status"] == "healthy" for name in SITES),
            "health of all sites",
        )

    done = containers.up(RESTARTS, during=disturbances)
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(codes) == 2
    assert 0 not in codes, "an unasked end has a code"
    for silo in range(SILOS):
        assert ledger(containers, silo, "SELECT t FROM answers ORDER BY t") == [[t] for t in range(1, ROUNDS + 1)]
        ((price, key),) = ledger(containers, silo, "SELECT mu, key FROM runs")
        assert price == pytest.approx(2.0)
        assert key is None
    assert np.array_equal(containers.model("restarts"), replay(containers, keys))


def replay(containers: Containers, keys: list[str]) -> np.ndarray:
    """The model of an undisturbed run with these keys, in a container: the same torch."""
    words = ("python", "-m", "tests.e2e.replay", RESTARTS, "runs/replay.npy", *keys)
    done = containers.compose("run", "--rm", "--no-deps", "--volume", f"{ROOT}/tests:/app/tests:ro", "job", *words)
    assert done.returncode == 0, done.stderr
    return np.asarray(np.load(containers.checkout / "runs" / "replay.npy"))


def test_the_health_of_a_container_does_not_depend_on_other_containers(containers: Containers) -> None:
    """A SuperNode whose SuperLink is away is well; one that does nothing for a minute is not, and its guard is."""
    try:
        started = containers.compose("up", "--detach", "superlink", "guard-0", "node-0", "guard-1", "node-1")
        assert started.returncode == 0, started.stderr
        names = ("superlink", "guard-0", "node-0", "guard-1", "node-1")
        for name in names:
            wait_until(lambda name=name: healthy(containers, name), f"health of {name}")
        assert containers.compose("stop", "superlink").returncode == 0
        signal_inside(containers, "node-0", "STOP", NODE)
        signal_inside(containers, "guard-1", "STOP", GUARD)
        assert not healthy(containers, "guard-1")
        wait_until(lambda: not healthy(containers, "node-0"), "a SuperNode that is ill", 180.0)
        assert healthy(containers, "guard-0")
        assert healthy(containers, "node-1"), "neither the SuperLink nor the guard makes it ill"
        signal_inside(containers, "node-0", "CONT", NODE)
        signal_inside(containers, "guard-1", "CONT", GUARD)
        for name in names[1:]:
            wait_until(lambda name=name: healthy(containers, name), f"health of {name} again")
    finally:
        containers.compose("down")


def test_guarantee_a_rolled_back_ledger_volume_without_its_mark_volume_is_refused(containers: Containers) -> None:
    """Its mark has a volume of its own; what such a ledger allows, others have read already."""
    state = containers.compose("run", "--rm", "--no-deps", "guard-0", "ls", "/silo/ledger", "/silo/mark").stdout
    assert re.search(r"/silo/mark:\s+ledger.mark\s*$", state), state
    assert "mark" not in state.partition("/silo/mark:")[0].replace("/silo/ledger", "")
    copy = "import shutil, pathlib; shutil.copytree('/silo/ledger', '/tmp/kept', dirs_exist_ok=True)"
    spend = "fedpriv silo restore /silo/policy.toml /tmp/backup"
    back = "import shutil, pathlib; [shutil.copy2(p, '/silo/ledger') for p in pathlib.Path('/tmp/kept').iterdir()]"
    make = "mkdir -m 700 /tmp/backup && fedpriv silo backup /silo/policy.toml /tmp/backup"
    steps = (
        f'{make} && python -c "{copy}" && rm /silo/ledger/* && {spend} && rm /silo/ledger/* && python -c "{back}"'
    )
    done = containers.compose("run", "--rm", "--no-deps", "guard-0", "sh", "-c", steps)
    assert done.returncode == 0, done.stdout + done.stderr
    refused = containers.compose(
        "run", "--rm", "--no-deps", "guard-0", "fedpriv", "silo", "run", "/silo/policy.toml"
    )
    assert refused.returncode != 0
    told = refused.stderr + refused.stdout  # nothing was released since the backup, so only its bytes tell
    assert "its file is not what was written, so nothing is released" in told, told
