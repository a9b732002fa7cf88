"""Network namespaces of the game day, and what their wires do to packets; where this user may make them."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.gameday.network import Weather
from tests.gameday.wire import Namespaces, NoNamespacesError

PORT = 8000
_ECHO = f"""
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("{Namespaces.host}", {PORT}))
print("here", flush=True)
while True:
    s.sendto(*s.recvfrom(100))
"""
_ASK = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(0.3)
for i in range(40):
    s.sendto(b"%d" % i, (sys.argv[1], int(sys.argv[2])))
try:
    while True:
        print(s.recv(100).decode())
except OSError:
    pass
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Namespaces]:
    try:
        made = Namespaces(2, 0)
    except NoNamespacesError as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    words = [*made.within(None), sys.executable, "-I", "-c", _ECHO]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as echo:
        assert echo.stdout is not None
        assert echo.stdout.readline() == b"here\n"
        yield made
        echo.kill()
    made.close()


def answers(network: Namespaces, site: int) -> list[int]:
    """Forty datagrams that a site sends the coordinator: those that come back, in this order."""
    words = [*network.within(site), sys.executable, "-I", "-c", _ASK, network.host, str(PORT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.slow
def test_dropping_the_packets_of_one_simulated_site_does_not_affect_another(network: Namespaces) -> None:
    assert answers(network, 0) == list(range(40))
    network.change(0, Weather(swallowed=True))
    assert answers(network, 0) == []
    assert answers(network, 1) == list(range(40))
    network.change(0, Weather())
    assert answers(network, 0) == list(range(40))


def test_cutting_a_simulated_link_takes_the_interface_down_until_the_cut_ends(network: Namespaces) -> None:
    words = [*network.within(1), "ip", "-brief", "link", "show", "uplink"]
    for cut, shown, received in ((True, "DOWN", []), (False, "UNKNOWN", list(range(40)))):
        network.change(1, Weather(cut=cut))
        assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[1] == shown
        assert answers(network, 1) == received


@pytest.mark.slow
def test_the_network_simulator_loses_delays_duplicates_and_reorders_packets(network: Namespaces) -> None:
    network.change(0, Weather(lost=0.3))
    assert 0 < len(answers(network, 0)) < 40, "each way"
    network.change(0, Weather(twice=0.5))
    twice = answers(network, 0)
    assert len(twice) > 40
    assert set(twice) == set(range(40))
    network.change(0, Weather(overtaken=0.5))
    overtaken = answers(network, 0)
    assert overtaken != sorted(overtaken) == list(range(40))
    network.change(0, Weather(delay=0.1))
    began = time.monotonic()
    assert answers(network, 0) == list(range(40))
    assert time.monotonic() - began > 0.2, "each way"
    network.change(0, Weather())


def test_a_network_namespace_cannot_reach_the_host_or_its_networks(network: Namespaces) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    for address in ("127.0.0.1", "192.0.2.1"):
        code = f"import socket; socket.create_connection(({address!r}, {port}), 2.0)"
        words = [*network.within(0), sys.executable, "-I", "-c", code]
        assert subprocess.run(words, capture_output=True, check=False).returncode != 0
    listener.close()


@pytest.mark.slow
def test_a_killed_network_simulation_leaves_no_namespace(network: Namespaces) -> None:
    code = "from tests.gameday.wire import Namespaces\nn = Namespaces(1, 0)\n"
    code += "print(n.within(None)[1], n.within(0)[1], flush=True)\nimport time\ntime.sleep(60)"
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root) as game:
        assert game.stdout is not None
        holders = [psutil.Process(int(word.split("/")[2])) for word in game.stdout.readline().split()]
        assert all(each.is_running() for each in holders)
        game.kill()
    _, alive = psutil.wait_procs(holders, timeout=10.0)
    assert not alive
