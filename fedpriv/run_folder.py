"""One cell's progress and result as files: how a server in another process talks to the engine that started it.

`progress` holds the last finished round, `history.jsonl` a line an evaluated round; a run ends with `model.npy`
and then `outcome.json`, or with `failure.json`.
"""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.accounting.ledger import as_data, from_data
from fedpriv.errors import FedprivError, InputError, RunError
from fedpriv.files import write_json, write_text, write_vector
from fedpriv.outcome import Finished

_PROGRESS_EVERY = 0.5  # seconds
_PLAIN = ("metrics", "fraction_clipped", "wall_seconds", "gradient_evaluations", "noise")
_FILES = ("progress", "history.jsonl", "failure.json", "outcome.json")


def clear(folder: Path) -> None:
    """Remove what an earlier attempt at the same run reported."""
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)


class FolderReporter:
    """The writing side, in the server's process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        clear(folder)

    def advanced(self, t: int) -> None:
        if (now := time.monotonic()) - self._last > _PROGRESS_EVERY:
            write_text(self._folder / "progress", str(t))
            self._last = now

    def evaluated(self, t: int, metrics: Mapping[str, float]) -> None:
        line = {"round": t, **metrics}
        with (self._folder / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def finished(self, finished: Finished) -> None:
        write_vector(self._folder / "model.npy", finished.model)
        plain = {name: getattr(finished, name) for name in _PLAIN}
        releases = [as_data(stream) for stream in finished.releases]
        write_json(self._folder / "outcome.json", {**plain, "releases": releases, "missed": finished.missed})

    def failed(self, error: FedprivError) -> None:
        write_json(self._folder / "failure.json", {"message": str(error), "exit_code": error.exit_code})


class FolderReader:
    """The reading side, in the engine's process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines = 0

    def round(self) -> int:
        """The last round known to be finished."""
        try:
            return int((self._folder / "progress").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def new_evaluations(self) -> Iterator[dict[str, Any]]:
        """Lines of the history that were not read before."""
        try:
            lines = (self._folder / "history.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return
        complete = [line for line in lines if line.endswith("\n")]
        yield from map(json.loads, complete[self._lines :])
        self._lines = len(complete)

    def result(self) -> Finished | None:
        """The outcome once there is one; the server's own error if it failed."""
        failure = self._json("failure.json")
        if failure is not None:
            raise (InputError if failure["exit_code"] == InputError.exit_code else RunError)(failure["message"])
        outcome = self._json("outcome.json")
        if outcome is None:
            return None
        model = np.load(self._folder / "model.npy", allow_pickle=False)
        plain = {name: outcome[name] for name in _PLAIN}
        missed = {int(silo): rounds for silo, rounds in outcome["missed"].items()}
        releases = tuple(map(from_data, outcome["releases"]))
        return Finished(**plain, releases=releases, model=model, missed=missed)

    def _json(self, name: str) -> Any:
        try:
            return json.loads((self._folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
