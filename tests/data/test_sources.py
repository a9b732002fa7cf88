"""torchvision's download as a source: quiet, limited in time, and every way it fails is one reason."""

import http.client
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedpriv.core.errors import InputError
from fedpriv.data import fetch as sources
from fedpriv.data.fetch import torchvision_download


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for torchvision.datasets; a test adds data sets to it."""
    datasets = SimpleNamespace()
    monkeypatch.setattr(sources, "import_torchvision", lambda: SimpleNamespace(datasets=datasets))
    return datasets


def test_the_data_set_is_asked_for_with_its_options(tmp_path: Path, torchvision: SimpleNamespace) -> None:
    asked: list[Any] = []
    torchvision.EMNIST = lambda *args, **options: asked.append((args, options))
    torchvision_download("EMNIST", split="balanced").write(tmp_path)
    assert asked == [((str(tmp_path),), {"download": True, "split": "balanced"})]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError("Error downloading:\nTried a, got:\nfirst\nTried b, got:\n<unreachable>\n"),
            "<unreachable>",
        ),
        (RuntimeError(""), "RuntimeError"),
        (OSError(113, "No route to host"), r"\[Errno 113\] No route to host"),
        (TimeoutError("timed out"), "timed out"),
        (http.client.IncompleteRead(b"x", 9), r"IncompleteRead\(1 bytes read, 9 more expected\)"),
        (EOFError("Compressed file ended early"), "Compressed file ended early"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_failure_is_one_line_and_nothing_is_printed(
    tmp_path: Path,
    torchvision: SimpleNamespace,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    reason: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        print("Downloading to somewhere")
        print("  3%|=    ", file=sys.stderr)
        raise error

    torchvision.MNIST = fail
    with pytest.raises(InputError, match=f"^{reason}$"):
        torchvision_download("MNIST").write(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_no_torchvision_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ModuleNotFoundError("No module named 'torchvision'")

    monkeypatch.setattr(sources, "import_torchvision", absent)
    with pytest.raises(InputError, match="No module named 'torchvision'"):
        torchvision_download("MNIST").write(tmp_path)


def test_a_host_that_never_answers_is_given_up(
    tmp_path: Path, torchvision: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_PATIENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def read_from_it(*_: Any, **__: Any) -> None:
            with socket.create_connection(silent.getsockname()[:2]) as connection:
                assert connection.gettimeout() == 0.2
                connection.recv(1)

        torchvision.MNIST = read_from_it
        with pytest.raises(InputError, match="timed out"):
            torchvision_download("MNIST").write(tmp_path)
    assert socket.getdefaulttimeout() is None


def test_a_stop_by_the_user_is_not_a_reason(tmp_path: Path, torchvision: SimpleNamespace) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    torchvision.MNIST = stopped
    with pytest.raises(KeyboardInterrupt):
        torchvision_download("MNIST").write(tmp_path)
    assert socket.getdefaulttimeout() is None
