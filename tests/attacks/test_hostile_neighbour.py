"""Another user of the machine on which a federation runs."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.attacks.neighbour import as_nobody
from tests.e2e.federation import federation, finish

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
def test_nobody_gets_code_messages_or_a_place_in_a_federation(tmp_path: Path, marker: Path) -> None:
    """Would gain: code as the user who runs the federation, and with it every silo's records, ledgers and keys."""
    with federation(tmp_path) as fed:
        fed.start_silos()
        running = fed.run()
        fed.wait_for_round(1, running)
        ports = ports_of(fed.home)
        assert len(ports) == 2 + len(fed.silos)  # Fleet, Runtime, and a Runtime API for each silo
        assert as_nobody(marker, ports) == []
        assert not marker.exists()
        finish(running)  # undisturbed
