"""torchvision's own download as a source of a data set."""

import contextlib
import io
import socket
from collections.abc import Iterator
from pathlib import Path

from fedpriv.data.cache import Source
from fedpriv.data.torchvision_shim import import_torchvision
from fedpriv.errors import InputError

_PATIENCE_SECONDS = 4.0


def torchvision_download(dataset: str, **options: str) -> Source:
    """The download of torchvision.datasets.<dataset>: quiet, and given up soon where its hosts do not answer.

    torchvision is imported when the source is used.  It tries its mirrors one after another and checks the MD5
    of what comes.
    """

    def write(root: Path) -> None:
        try:
            with _quiet(), _socket_timeout(_PATIENCE_SECONDS):
                getattr(import_torchvision().datasets, dataset)(str(root), download=True, **options)
        except Exception as error:  # no list of types: whatever it trips over, the next source must be tried
            lines = str(error).split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), type(error).__name__)
            raise InputError(reason.strip()) from None

    return Source("torchvision's download", write)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """A limit on every connect and every read (not on a whole download); torchvision itself sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
