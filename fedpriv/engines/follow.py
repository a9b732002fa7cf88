"""From a submitted run to its outcome: progress comes through the run's folder, its end from Flower."""

import time
from collections.abc import Callable

from fedpriv.engines.superlink import SubmittedRun
from fedpriv.errors import RunError
from fedpriv.protocol.cell_folder import FolderReader
from fedpriv.running.observer import RunObserver
from fedpriv.running.outcome import Finished

_POLL_SECONDS = 0.2
_STATUS_SECONDS = 5.0


def follow(
    run: SubmittedRun,
    reader: FolderReader,
    index: int,
    rounds: int,
    observer: RunObserver,
    lost: Callable[[], str | None] = lambda: None,
) -> Finished:
    """Relay a run's progress until it has an outcome; RunError if it ends without one.

    `lost` says which process without which there will be none has ended, and how; None while all are there.
    """
    seen, asked = 0, time.monotonic()
    while True:
        finished = reader.result()
        now = rounds if finished is not None else reader.round()
        observer.advanced(now - seen)
        seen = now
        for line in reader.new_evaluations():
            observer.evaluated(index, line.pop("round"), line)
        if finished is not None:
            return finished
        if run.superlink.ended:
            raise RunError(f"Flower's SuperLink ended before the run did{run.superlink.log_tail()}")
        if (ended := lost()) is not None:
            raise RunError(ended)
        if time.monotonic() - asked > _STATUS_SECONDS:
            asked = time.monotonic()
            if run.status().startswith("finished") and reader.result() is None:
                raise RunError(f"Flower ended the run without a result{run.superlink.log_tail()}")
        time.sleep(_POLL_SECONDS)
