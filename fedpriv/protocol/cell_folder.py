"""Files by which a server in another process reports to its engine, and keys that name its run.

| file | content |
|---|---|
| `progress` | number of finished rounds, written at most every 0.5 s, and not always after the last round |
| `history.jsonl` | one line for each evaluated round |
| `waiting.json` | silos for which the server waits, and since when; removed when it no longer waits |
| `model.npy`, then `outcome.json` | result of a run that succeeded |
| `failure.json` | error of a run that failed |

The run configuration of `flwr run` names the scenario and its cell, as Flower's flat keys.  A cell is one run of a
scenario: a sweep point, which has one value of each swept key, and a seed.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedpriv.claims.ledger import stream_from_data, stream_to_data
from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.core.errors import FedprivError, InputError, RunError
from fedpriv.core.files import append_line, read_complete_lines, write_json, write_text, write_vector
from fedpriv.plan.calibration import fit_cell_noise
from fedpriv.protocol.messages import PROTOCOL_VERSION, decode_vector
from fedpriv.scenario.load import Scenario, load_scenario, resolve_cell
from fedpriv.scenario.schema import Cell

_PROGRESS_SECONDS = 0.5  # shortest time between two writes of `progress`
_PLAIN_FIELDS = ("metrics", "fraction_clipped", "wall_seconds", "gradient_evaluations", "noise", "bytes_sent")
_FILE_NAMES = ("progress", "history.jsonl", "waiting.json", "failure.json", "outcome.json")


def clear_reports(folder: Path) -> None:
    """Remove the reports of an earlier attempt at the same run, but for `model.npy`.

    Raises:
        RunError: A file cannot be removed.
    """
    with _convert_write_errors(folder):
        for name in _FILE_NAMES:
            (folder / name).unlink(missing_ok=True)


def report_waiting(folder: Path, silos: Sequence[int], start: float) -> None:
    """Report the silos for which the server waits.

    Args:
        folder: Folder of the run.
        silos: Numbers of these silos, empty when the server no longer waits.
        start: Start of the wait, in seconds since 1970 (Unix time).
    """
    path = folder / "waiting.json"
    with suppress(OSError):  # such as a full disk, which ends the run at its next report
        if silos:
            write_json(path, {"silos": list(silos), "since": start})
        else:
            path.unlink(missing_ok=True)


class FolderReporter(RunObserver):
    """Writer of one cell's reports, in the server's process.

    Constructor and methods raise a RunError if a file cannot be written or removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._round_count, self._last_write = 0, 0.0
        with _convert_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        clear_reports(folder)

    def advanced(self, rounds: int) -> None:
        self._round_count += rounds
        if (now := time.monotonic()) - self._last_write > _PROGRESS_SECONDS:
            with _convert_write_errors(self._folder):
                write_text(self._folder / "progress", str(self._round_count))
            self._last_write = now

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        with _convert_write_errors(self._folder):
            append_line(self._folder / "history.jsonl", {"round": t, **metrics})

    def finished(self, place: int, finished: CellOutcome) -> None:
        plain = {name: getattr(finished, name) for name in _PLAIN_FIELDS}
        streams = {
            name: list(map(stream_to_data, getattr(finished, name))) for name in ("releases", "evaluations")
        }
        with _convert_write_errors(self._folder):
            write_vector(self._folder / "model.npy", finished.model)
            write_json(self._folder / "outcome.json", {**plain, **streams, "missed": finished.missed})

    def failed(self, error: FedprivError) -> None:
        with _convert_write_errors(self._folder):
            write_json(self._folder / "failure.json", {"message": str(error), "exit_code": error.exit_code})


class FolderReader:
    """Reader of one cell's reports, in the engine's process.

    A damaged evaluation or result raises a RunError, and a release that no run can have an InputError.  A damaged
    report of progress or of a wait counts as missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._line_count = 0

    def read_round(self) -> int:
        """Return the number of rounds reported as finished, or 0 if the report is missing or damaged."""
        try:
            return int((self._folder / "progress").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def read_new_evaluations(self) -> Iterator[dict[str, Any]]:
        """Yield the evaluations that earlier calls have not yielded, one for each line of the history.

        An evaluation has metrics by name, and its round as the key "round".  A line that is still being written
        waits for a later call, and a damaged line is not read again.

        Raises:
            RunError: A line is damaged.
        """
        path = self._folder / "history.jsonl"
        for line in read_complete_lines(path)[self._line_count :]:
            self._line_count += 1
            with _convert_read_errors(path, f", line {self._line_count}"):
                evaluation = dict(json.loads(line))
                evaluation["round"] = int(evaluation["round"])
            yield evaluation

    def read_waiting(self) -> tuple[list[int], float] | None:
        """Return the silos for which the server waits, and the start of the wait in seconds since 1970.

        The result is None if the server does not wait, or if its report cannot be read.
        """
        try:
            status = json.loads((self._folder / "waiting.json").read_text(encoding="utf-8"))
            return [int(silo) for silo in status["silos"]], float(status["since"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def read_result(self) -> CellOutcome | None:
        """Return the outcome of the run, or None if no end of the run is reported.

        Raises:
            InputError: The run failed at the server with an InputError, whose message this error has; or stored
                releases are none that a run can have.
            RunError: The run failed with another error, whose message this error has; or a file of the result is
                damaged or missing.
        """
        failure = self._read_json("failure.json")
        if failure is not None:
            with _convert_read_errors(self._folder / "failure.json"):
                message, exit_code = str(failure["message"]), int(failure["exit_code"])
            raise (InputError if exit_code == InputError.exit_code else RunError)(message)
        outcome = self._read_json("outcome.json")
        if outcome is None:
            return None
        with _convert_read_errors(self._folder / "outcome.json"):
            plain = {name: outcome[name] for name in _PLAIN_FIELDS}
            absences = {int(silo): rounds for silo, rounds in outcome["missed"].items()}
            releases = tuple(map(stream_from_data, outcome["releases"]))
            evaluations = tuple(map(stream_from_data, outcome.get("evaluations", ())))
        with _convert_read_errors(self._folder / "model.npy"):
            model = decode_vector((self._folder / "model.npy").read_bytes()).copy()
        return CellOutcome(**plain, releases=releases, model=model, missed=absences, evaluations=evaluations)

    def _read_json(self, name: str) -> dict[str, Any] | None:
        path = self._folder / name
        with _convert_read_errors(path):
            return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


@contextmanager
def _convert_write_errors(folder: Path) -> Iterator[None]:
    """Convert an OSError of the block to a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{folder}: the run's progress and result cannot be written there: {error}") from None


@contextmanager
def _convert_read_errors(path: Path, place: str = "") -> Iterator[None]:
    """Convert an error that a missing or damaged file causes in the block to a RunError.

    The message names the file.  If the file is damaged, `place` follows its name.
    """
    try:
        yield
    except FileNotFoundError:
        raise RunError(f"{path}: missing, though the run ended; run it again with another --out") from None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        OverflowError,
        RecursionError,
    ) as error:
        raise RunError(f"{path}{place}: damaged ({error}); run it again with another --out") from None


def make_run_config(cell: Cell, out: Path, run_token: str = "") -> dict[str, str | int]:
    """Return the run configuration that an engine submits for a resolved cell.

    Args:
        cell: The resolved cell.
        out: Folder to which the server writes its reports.
        run_token: Identity of a deployment's run in the ledgers of silos and server, the same after a resume.  For
            a simulation it is "".
    """
    return {
        "scenario": "",
        "set": "",
        "cell": 0,
        "cell-json": json.dumps(cell.canonical_data()),
        "out": str(out),
        "run-token": run_token,
        "protocol": PROTOCOL_VERSION,
        "fedpriv": version("fedpriv"),
    }


def cell_from_run_config(run_config: Mapping[str, Any]) -> Cell:
    """Return the cell that a run configuration names.

    The key `cell-json` holds a resolved cell.  If the key is empty, the cell is that of
    `scenario_from_run_config`, with fitted noise where the scenario asks for it.

    Raises:
        InputError: The configuration names no cell that can be run.
        ValueError: The key `cell-json` is neither empty nor JSON.
    """
    if run_config["cell-json"]:
        return resolve_cell(json.loads(str(run_config["cell-json"])), "cell-json")
    return fit_cell_noise(scenario_from_run_config(run_config).points[0].cell)


def scenario_from_run_config(run_config: Mapping[str, Any]) -> Scenario:
    """Return the scenario, reduced to a single cell, that a run configuration written by a person names.

    The key `scenario` holds a path or the name of a shipped scenario.  The key `set` holds overrides KEY=VALUE,
    separated by spaces.  The key `cell` holds the index of the cell, from 0, over all sweep points and seeds.

    Raises:
        InputError: The scenario cannot be read, it or an override is malformed, or there is no such cell.
    """
    path = Path(str(run_config["scenario"]))
    scenario = load_scenario(path, str(run_config["set"]).split(), finds_tables=False)
    index = run_config["cell"]
    if index not in range(len(scenario.points)):
        raise InputError(f"cell = {index!r}: {path} has cells 0 … {len(scenario.points) - 1}")
    return scenario.at_single_point(int(index))
