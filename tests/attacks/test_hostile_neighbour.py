"""Another user of the machine on which a federation runs."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedpriv.addons.services.service import script_path
from fedpriv.engines.children import ALLOW_ROOT
from fedpriv.engines.workers import Workers, _connect_ray
from fedpriv.silo.metrics import open_private_socket
from tests.attacks.neighbour import as_nobody
from tests.e2e.federation import SCENARIO, federation, finish, wait_until

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user"
)


@pytest.fixture
def marker() -> Iterator[Path]:
    """A path where anybody may write."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name) / "was-here"


def ports_of(home: Path) -> list[int]:
    """Every TCP port on which a process of this federation listens."""
    found = set()
    for process in psutil.process_iter():
        try:
            if Path(process.environ().get("FLWR_HOME", "/")).is_relative_to(home):
                connections = process.net_connections("tcp")
                found |= {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    return sorted(found)


@needs_root
@pytest.mark.deployment
def test_another_user_of_the_machine_gains_nothing_from_the_ports_of_a_federation(
    tmp_path: Path, marker: Path
) -> None:
    """Would gain: code as the user who runs the federation, and with it every silo's records, ledgers and keys."""
    with federation(tmp_path) as fed:
        fed.start_silos()
        running = fed.run()
        fed.wait_for_round(1, running)
        ports = ports_of(fed.home)
        assert len(ports) == 2  # Fleet and Runtime; nothing of a silo listens
        assert as_nobody(marker, ports) == []
        assert not marker.exists()
        finish(running)  # undisturbed


def test_the_control_socket_is_created_accessible_to_its_owner_only(tmp_path: Path) -> None:
    """Would gain: the Control API, where the folder of the socket can be entered."""
    before = os.umask(0)
    try:
        with open_private_socket(tmp_path / "control.sock", "--control"):
            assert stat.S_IMODE((tmp_path / "control.sock").stat().st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deployment", "ray"])
def test_running_a_server_engine_as_root_requires_explicit_permission(tmp_path: Path, engine: str) -> None:
    """Would gain: with any hole in the above, the machine instead of a user."""
    if os.geteuid() != 0:
        pytest.skip("only root can be refused as root")
    command = [script_path("fedpriv"), "run", str(SCENARIO), "--engine", engine, "--out", str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name != ALLOW_ROOT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"fedpriv: --engine {engine} starts servers that run code they are sent, as root here" in done.stderr


@needs_root
@pytest.mark.deployment
def test_ray_refuses_a_connection_of_another_user_without_a_token() -> None:
    """Would gain: code as the user who runs `--engine ray`, from any machine that reaches this one."""
    pytest.importorskip("ray", reason="needs pip install 'fedpriv[ray]'")
    with tempfile.TemporaryDirectory() as name:  # Ray's sockets allow no long path
        home = Path(name)
        command = [script_path("fedpriv"), "run", str(SCENARIO), "--engine", "ray", "--out", str(home / "run")]
        running = subprocess.Popen(
            [*command, "--set", "federation.rounds=100", "--set", "federation.batch=6"],
            env={**os.environ, "TMPDIR": str(home)},
            stdout=subprocess.DEVNULL,
        )
        try:
            ports: list[int] = []

            def ray_listens() -> bool:
                ports[:] = ray_ports(home)
                return bool(ports) or running.poll() is not None

            wait_until(ray_listens, "Ray")
            said = [ray_as_nobody(port) for port in ports]
            assert any("InvalidAuthToken" in words for words in said), said
            assert not any("Version mismatch" in words or "in with" in words for words in said), said
        finally:
            running.terminate()
            running.wait(timeout=60)


@pytest.mark.slow
def test_the_files_of_ray_workers_lie_in_a_folder_private_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would gain: a socket of their own in the place of the scheduler's, or links in the places of logs.

    Ray makes its folder and all below it writable for everybody.
    """
    pytest.importorskip("ray", reason="needs pip install 'fedpriv[ray]'")
    with tempfile.TemporaryDirectory() as short:  # Ray's sockets allow no long path
        monkeypatch.setattr(tempfile, "tempdir", short)
        with _connect_ray(Workers(count=1)):
            (home,) = Path(short).glob("fedpriv-workers-*")
            assert stat.S_IMODE(home.stat().st_mode) == 0o700
            assert len(list(home.glob("*/session_*/sockets/*"))) >= 2


def ray_ports(home: Path) -> list[int]:
    """Where the control service of the Ray that has its files in `home` listens."""
    for process in psutil.process_iter():
        try:
            if "gcs_server" in " ".join(process.cmdline()[:1]) and str(home) in " ".join(process.cmdline()):
                connections = process.net_connections("tcp")
                return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue
    return []


def ray_as_nobody(port: int) -> str:
    """What Ray tells a stranger who connects, its refusal included."""
    program = f"import ray; ray.init(address='127.0.0.1:{port}'); print('in with', ray.nodes())"
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-P", "-c", program]
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        environment = {"PATH": os.environ["PATH"], "HOME": name, "RAY_IGNORE_VERSION_MISMATCH": "1"}
        done = subprocess.run(
            command, env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=False
        )
    return done.stdout + done.stderr
