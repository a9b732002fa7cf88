"""RUN_DIR/checkpoints: the cells that a run is in the middle of, a file a group, gone when the group is finished.

The files have sums without noise: their mode is 0600, the folder's 0700.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedpriv.errors import InputError
from fedpriv.files import OWN, write_bytes
from fedpriv.running.checkpoint import Checkpoints, digest_of, header_of
from fedpriv.running.observer import RunObserver
from fedpriv.scenario import Scenario

_FOLDER = "checkpoints"
_ENDING = ".npz"


class CheckpointFolder(Checkpoints):
    """Checkpoints as files.  One that cannot be written is said once, and fails nothing."""

    def __init__(self, run: Path, observer: RunObserver) -> None:
        self._folder, self._observer = run / _FOLDER, observer
        self._refused = False

    def check(self, scenario: Scenario) -> None:
        """Set aside what cannot be used; InputError for checkpoints of another scenario, which stay."""
        found = checkpoints_of(self._folder.parent)
        ours = {digest_of(point.cell) for point in scenario.points} if found else set()
        for path in found:
            try:
                header = header_of(path.read_bytes())
                why = header.refusal()
            except ValueError as error:
                why = str(error)
            else:
                if why is None and not ours.issuperset(header.cells):
                    raise InputError(
                        f"{self._folder.parent} holds another run: {path.name} is a checkpoint of cells that this "
                        "scenario does not have; give another --out, or the scenario and --set options it was "
                        "started with"
                    )
            if why is not None:
                path.unlink()
                self._observer.noted(f"{path}: not used, and its rounds are run again: {why}")

    def latest(self, name: str) -> bytes | None:
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            return None

    def keep(self, name: str, content: bytes) -> None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_bytes(self._path(name), content, OWN, durable=False)
        except OSError as error:
            if not self._refused:
                self._observer.noted(f"{self._path(name)}: no checkpoints are kept: {error.strerror}")
            self._refused = True

    def drop(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)
        with suppress(OSError):  # there are others, or there was none
            self._folder.rmdir()

    def clear(self) -> None:
        """Remove all, and drafts of killed processes with them."""
        for path in self._folder.glob("*"):
            path.unlink()
        with suppress(FileNotFoundError):
            self._folder.rmdir()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_ENDING}"


def checkpoints_of(run: Path) -> Sequence[Path]:
    """The files of the checkpoints that a run folder has."""
    return sorted((run / _FOLDER).glob(f"[!.]*{_ENDING}"))
