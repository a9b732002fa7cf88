"""Prometheus figures of services: their text, and who can ask for them."""

import http.client
import math
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fedpriv.addons.services.service import free_port
from fedpriv.core.errors import InputError
from fedpriv.silo.metrics import ServiceMetric, format_metrics, serve_metrics

FIGURES = [
    ServiceMetric("asked_total", "Requests.", 3, {"of": "tests"}),
    ServiceMetric("left_mu", "Of the budget.", 0.1),
    ServiceMetric("asked_total", "", 2**60, {"of": 'a "name"\\ of\ntwo lines'}),
    ServiceMetric("spent_mu", "Of it.", math.inf),
]


def test_the_text_is_that_of_the_format() -> None:
    assert format_metrics(FIGURES) == (
        "# HELP asked_total Requests.\n# TYPE asked_total counter\n"
        'asked_total{of="tests"} 3\nasked_total{of="a \\"name\\"\\\\ of\\ntwo lines"} 1.152921504606847e+18\n'
        "# HELP left_mu Of the budget.\n# TYPE left_mu gauge\nleft_mu 0.1\n"
        "# HELP spent_mu Of it.\n# TYPE spent_mu gauge\nspent_mu +Inf\n"
    )


def asked(connect: Callable[[], socket.socket], path: str = "/metrics") -> tuple[int, str]:
    """The status and text of a request, as a scraper makes it."""
    connection = http.client.HTTPConnection("localhost", timeout=10.0)
    connection.sock = connect()
    connection.request("GET", path)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def test_figures_are_told_to_this_machine_only() -> None:
    """Guarantee of `serve_metrics`: it listens on the loopback interface, and on no other."""
    port = free_port()
    connect = lambda: socket.create_connection(("127.0.0.1", port), 10.0)  # noqa: E731
    with serve_metrics(str(port), lambda: FIGURES):
        assert asked(connect) == (200, format_metrics(FIGURES))
        assert asked(connect, "/metrics?name=x")[0] == 200
        assert asked(connect, "/health") == (404, "only /metrics is here\n")
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert f"0100007F:{port:04X}" in listening
        assert f"00000000:{port:04X}" not in listening
        with pytest.raises(InputError, match=rf"--metrics {port}: .*in use"), serve_metrics(str(port), list):
            pass
    with pytest.raises(ConnectionError):
        connect()


def test_a_socket_is_its_users_own(tmp_path: Path) -> None:
    place = tmp_path / "metrics.sock"

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(place))
        return connection

    with serve_metrics(str(place), lambda: FIGURES):
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        connect().close()  # one that asks nothing, and goes
        assert asked(connect) == (200, format_metrics(FIGURES))
    assert not place.exists()


@pytest.mark.parametrize("place", ["0.0.0.0:9464", ":9464", "localhost:9464", "70000"])
def test_a_place_for_other_machines_is_refused(place: str) -> None:
    with pytest.raises(InputError, match=f"^--metrics {re.escape(place)}: "), serve_metrics(place, list):
        pass


def test_a_file_is_not_replaced_by_a_socket(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_text("rows")
    place = str(tmp_path / "ledger.sqlite")
    with pytest.raises(InputError, match="is a file, and no socket"), serve_metrics(place, list):
        pass
    assert (tmp_path / "ledger.sqlite").read_text() == "rows"


def test_nothing_is_opened_unasked() -> None:
    with serve_metrics(None, lambda: pytest.fail("nobody asks")):
        pass
