"""A guard from outside: its log lines and figures, which tell nothing of the records, and who can ask for them."""

import http.client
import json
import logging
import math
import re
import socket
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fedpriv.addons.services.service import free_port
from fedpriv.core import logs
from fedpriv.core.errors import InputError, RunError
from fedpriv.protocol.messages import SERVER_CHECKPOINTS
from fedpriv.silo import daemon
from fedpriv.silo.admission import Charge
from fedpriv.silo.chain import MarkContent, RollbackMark
from fedpriv.silo.daemon import PendingRequest, Reply, RequestQueue
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import begin_ledgers, open_guards
from fedpriv.silo.ledger import LedgerError
from fedpriv.silo.metrics import ServiceMetric, format_metrics, serve_metrics
from fedpriv.silo.policy import read_policy
from fedpriv.silo.seen import BudgetAmount, GuardEvents, log_opened_run
from fedpriv.silo.silo import Silo
from tests.silo.guarded import CLIP, ZERO, cell_json, write_policy

FORGED = "5f0c round=9 event=opened\n2026-11-23T00:00:00Z INFO event=opened run=forged\x1b[2K"


def records(changed: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    draw = np.random.default_rng(3)
    images, labels = draw.integers(0, 256, (20, 28, 28), dtype=np.uint8), draw.integers(0, 10, 20)
    if changed:
        images[7], labels[7] = 255, (labels[7] + 1) % 10
    return images, labels


def desk_of(folder: Path, changed: bool = False, **allow: Any) -> RequestQueue:
    allowed = {"relation": "replace-one", "clip": CLIP, "rounds": 10, "budget": 5.0, **allow}
    policy = read_policy(write_policy(folder, *records(changed), **allowed))
    begin_ledgers(policy)
    return RequestQueue(policy, open_guards(policy), collects_metrics=True)


def ask(desk: RequestQueue, run: str, t: int, text: str = "", **header: Any) -> dict[str, Any]:
    """A request as it comes over the socket, and the header of its reply."""
    asked = {"run": run, "cell": text or cell_json(), "t": t, "keys": "", "dtype": "float64", **header}
    reply: Future[Reply] = Future()
    desk._requests.put(PendingRequest(asked, bytearray(ZERO.numpy().tobytes()), reply))
    desk.answer_next_request()
    return reply.result().header


def test_a_ledger_that_cannot_be_read_for_metrics_leaves_the_guard_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply goes out, and the metrics stay those of the request before."""
    desk = desk_of(tmp_path)
    before = values(desk)

    def fail(_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Guard, "budget_status", property(fail))
    ask(desk, "5f0c", 1)
    assert values(desk) == before


def asked_all(desk: RequestQueue) -> None:
    ask(desk, "5f0c", 1)
    ask(desk, "5f0c", 1)
    ask(desk, "5f0c", 2)
    ask(desk, "5f0c", 1, dtype="float32")  # another query for a round that was answered
    ask(desk, FORGED, 0, "{}")
    ask(desk, "later", 1, cell_json(privacy__rho=100.0))


def values(desk: RequestQueue) -> dict[str, float]:
    figures = [figure for figure in desk.metrics() if figure.labels.get("records") != "tests"]
    return {figure.name.removeprefix("fedpriv_guard_"): figure.value for figure in figures}


def test_metrics_of_a_guard_count_replies_and_refusals_and_report_the_remaining_budget(tmp_path: Path) -> None:
    desk = desk_of(tmp_path)
    before = values(desk)
    assert {before[name] for name in ("answered_total", "runs", "spent_mu", "last_answer_seconds")} == {0}
    asked_all(desk)
    after = values(desk)
    assert (after["answered_total"], after["repeated_total"], after["refused_total"]) == (2, 1, 3)
    sizes = {
        (figure.name, figure.labels["file"]): figure.value for figure in desk.metrics() if "file" in figure.labels
    }
    assert sizes["fedpriv_guard_file_bytes", "ledger"] == (tmp_path / "ledger-0.sqlite").stat().st_size
    assert sizes["fedpriv_guard_disk_free_bytes", "mark"] > 0
    assert (after["runs"], after["runs_open"], after["budget_mu"], after["failed_total"]) == (1, 1, 5.0, 0)
    assert after["spent_mu"] == pytest.approx((5.0**2 - after["left_mu"] ** 2) ** 0.5)
    assert after["spent_mu"] == pytest.approx(4.0)
    assert abs(after["last_answer_seconds"] - time.time()) < 60.0
    assert after["last_answer_seconds"] == int(after["last_answer_seconds"])


def test_an_error_is_told_to_the_log_alone_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its text may be of a record."""
    desk = desk_of(tmp_path)
    monkeypatch.setattr(desk._guards.training, "answer", Mock(side_effect=ValueError("record 7 is 255")))
    told = {"refused": "silo 0: its guard failed, and its own log says why", "final": True}
    assert [ask(desk, "5f0c", t) for t in (1, 2)] == [told, told]
    assert "record 7 is 255" in caplog.text
    assert (values(desk)["failed_total"], values(desk)["refused_total"]) == (2, 0)


def test_a_failure_while_a_silo_computes_counts_as_failed_not_as_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators raise an alarm on failures; before, such a one counted as a refusal."""
    desk = desk_of(tmp_path)
    monkeypatch.setattr(Silo, "answer", Mock(side_effect=ValueError("record 7 is 255")))
    assert "its guard failed, and its own log says why" in ask(desk, "5f0c", 1)["refused"]
    assert (values(desk)["failed_total"], values(desk)["refused_total"]) == (1, 0)


def test_a_malformed_request_is_refused_for_good(tmp_path: Path) -> None:
    desk, query = desk_of(tmp_path), bytearray(ZERO.numpy().tobytes())
    asked = {"run": "r", "cell": cell_json(), "t": 1, "keys": "", "dtype": "float64"}
    refusal = Reply({"refused": "the request is malformed", "final": True})
    for header in (
        *[{name: value} for name in ("run", "cell", "keys", SERVER_CHECKPOINTS) for value in (1, None)],
        *[{name: value} for name in ("keys", SERVER_CHECKPOINTS) for value in ("0", "no")],
        *[{"t": value} for value in (True, 1.0, "1", None)],
        *[{"dtype": value} for value in ("int64", None)],
    ):
        assert desk._answer(asked | header, query) == refusal, header
    for content in (b"", bytes(9)):
        assert desk._answer(asked, bytearray(content)) == refusal
    assert values(desk)["runs"] == 0


def test_another_version_of_the_protocol_is_named_in_one_short_line(tmp_path: Path) -> None:
    desk, version = desk_of(tmp_path), "0.1.2\n" + "3" * 40
    with pytest.raises(RunError, match="install the same version for both") as refusal:
        desk._answer({"protocol": "4" * 40, "fedpriv": version}, bytearray())
    shown = "0.1.2\\n" + "3" * 14 + " …"
    assert f"its SuperNode {shown} (protocol '{'4' * 19}): install" in str(refusal.value)


def test_a_guard_tells_the_shapes_of_a_query_and_opens_nothing(tmp_path: Path) -> None:
    desk = desk_of(tmp_path)
    assert desk._answer({"shapes_of": cell_json()}, bytearray()) == Reply({"shapes": [(7850,)]})
    assert values(desk)["runs"] == 0


def test_metrics_and_log_lines_of_a_guard_do_not_depend_on_any_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee of `seen`: no line and no figure depends on the records but through their number."""
    seen = []
    for changed in (False, True):
        caplog.clear()
        desk = desk_of(tmp_path / str(changed), changed)
        with caplog.at_level(logging.INFO, "fedpriv.guard"):
            asked_all(desk)
        changing = ("last_answer_seconds", "disk_free_bytes")  # what the machine has, whatever the records are
        figures = [figure for figure in desk.metrics() if not figure.name.endswith(changing)]
        seen.append((figures, [(record.getMessage(), event_of(record)) for record in caplog.records]))
    assert seen[0] == seen[1]
    assert [event for _, event in seen[0][1]] == ["opened", *["answered"] * 2, *["refused"] * 3]


def event_of(record: logging.LogRecord) -> str:
    return str(getattr(record, "event", ""))


def test_a_hundred_refusals_are_told_one_by_one_and_then_each_thousandth(caplog: pytest.LogCaptureFixture) -> None:
    """A server that is refused without end fills no disk, and its words are cut."""
    events = GuardEvents()
    for _ in range(2050):
        events.record_refusal("n" * 41, "r" * 301)
    counts = [*range(1, 101), 1000, 2000]
    name, reason = "n" * 40 + " …", "r" * 300 + " …"
    assert [record.getMessage() for record in caplog.records] == [
        f"refusal {count}, run {name}: {reason}" for count in counts
    ]


def test_what_is_told_of_an_opened_run_is_its_charge_and_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedpriv.guard")
    for slack in (0.0, 1e-8):
        log_opened_run("r" * 41, Charge(json.dumps({"name": "n" * 60}), 1.23456789, slack), BudgetAmount(0.5, 0.0))
    name = "'" + "n" * 59 + " …"
    lines = [
        f"opened for scenario {name}: charged mu = 1.23457{slack}, left for one more run 0.5"
        for slack in ("", " and slack 1e-08")
    ]
    assert [record.getMessage() for record in caplog.records] == lines
    assert {getattr(record, "run", None) for record in caplog.records} == {"r" * 40 + " …"}


def test_metrics_of_a_guard_change_only_at_the_end_of_a_policy_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee of `seen`: the time of a change says no more than that of a reply."""
    desk = desk_of(tmp_path, tick=0.05)
    during, sleep = [], time.sleep
    monkeypatch.setattr(daemon.time, "sleep", lambda s: (during.append(values(desk)), sleep(s)))
    ask(desk, "5f0c", 1)
    figures = [(figure["answered_total"], figure["runs"]) for figure in (*during, values(desk))]
    assert figures == [(0, 0), (1, 1)]


def test_a_run_is_logged_as_opened_only_after_the_ledger_stored_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = desk_of(tmp_path)
    ledger = desk._guards.training._ledger

    caplog.set_level(logging.INFO, "fedpriv.guard")
    with monkeypatch.context() as patch:
        patch.setattr(type(ledger), "record_query", Mock(side_effect=OSError("disk full")))
        with pytest.raises(LedgerError, match="disk full"):
            desk._guards.training.answer("5f0c", cell_json(), 1, ZERO)
        ask(desk, "other", 1, "{}")
    assert "opened" not in map(event_of, caplog.records)
    assert ledger.charges() == []
    ask(desk, "5f0c", 1)
    (line,) = [record.getMessage() for record in caplog.records if event_of(record) == "opened"]
    assert re.fullmatch(r"opened for scenario '.*': charged mu = [\d.]+, left for one more run [\d.]+", line)


@pytest.mark.parametrize(("t", "counts"), [(1, (1, 1)), (8, (1, 0))])
def test_the_budget_status_has_a_commit_after_which_the_rollback_mark_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, t: int, counts: tuple[int, int]
) -> None:
    """Gains: monitoring that shows more remaining budget than there is, until the next run."""
    guard, write = desk_of(tmp_path)._guards.training, RollbackMark.write

    def fail_after_commit(mark: RollbackMark, content: MarkContent) -> None:
        write(mark, content)
        if content.last_commit == content.pending_commit and guard._ledger.find_answer("5f0c", t) is not None:
            raise OSError("no power")

    for earlier_round in range(1, t):
        guard.answer("5f0c", cell_json(), earlier_round, ZERO)
    assert guard.budget_status.open_run_count == (t > 1)
    monkeypatch.setattr(RollbackMark, "write", fail_after_commit)
    for _ in range(2):  # The commits of the query and of its reply.
        with pytest.raises(LedgerError, match="no power"):
            guard.answer("5f0c", cell_json(), t, ZERO)
    monkeypatch.undo()
    assert (guard.budget_status.run_count, guard.budget_status.open_run_count) == counts
    assert guard.budget_status.charge.mu > 0.0


@pytest.mark.parametrize("form", [False, True], ids=["text", "json"])
def test_run_names_and_error_texts_cannot_forge_log_records(form: bool) -> None:
    """Guarantee of `logs`: neither a run's name nor an error with a traceback forges a record."""
    for name in (FORGED, "\u2028forged", "a\rb", '"quoted" event=opened'):
        try:
            raise ValueError(FORGED)
        except ValueError as error:
            trouble = (ValueError, error, error.__traceback__)
        record = logging.LogRecord("fedpriv.guard", logging.ERROR, "", 0, "failed: %s", (name,), trouble)
        record.__dict__ |= logs.log_fields(name, 3, "refused")
        text = logs._LineFormatter(as_json=form).format(record)
        lines = text.splitlines()
        assert [line for line in lines[1:] if not line.startswith("  | ")] == []
        assert "\x1b" not in text
        if form:
            assert len(lines) == 1
        else:
            without = re.sub(r'"(?:[^"\\]|\\.)*"', "NAME", lines[0].partition(" failed: ")[0])
            assert re.fullmatch(r"\S+ ERROR event=refused run=NAME round=3", without)


FIGURES = [
    ServiceMetric("asked_total", "Requests.", 3, {"of": "tests"}),
    ServiceMetric("left_mu", "Of the budget.", 0.1),
    ServiceMetric("asked_total", "", 2**60, {"of": 'a "name"\\ of\ntwo lines'}),
    ServiceMetric("spent_mu", "Of it.", math.inf),
]


def test_metrics_are_formatted_in_the_prometheus_text_format() -> None:
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
    text = reply.read()
    assert reply.getheader("Content-Length") == str(len(text))
    assert reply.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    return reply.status, text.decode()


def test_metrics_are_served_on_the_loopback_interface_only() -> None:
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
    assert not [thread for thread in threading.enumerate() if "serve_forever" in thread.name]


def test_the_metrics_socket_is_accessible_to_its_owner_only(tmp_path: Path) -> None:
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
def test_a_metrics_address_reachable_from_other_machines_is_refused(place: str) -> None:
    with pytest.raises(InputError, match=f"^--metrics {re.escape(place)}: "), serve_metrics(place, list):
        pass


def test_the_metrics_socket_does_not_replace_an_existing_file(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_text("rows")
    place = str(tmp_path / "ledger.sqlite")
    with pytest.raises(InputError, match="is a file, and no socket"), serve_metrics(place, list):
        pass
    assert (tmp_path / "ledger.sqlite").read_text() == "rows"


def test_no_metrics_are_served_without_an_address() -> None:
    with serve_metrics(None, lambda: pytest.fail("nobody asks")):
        pass
