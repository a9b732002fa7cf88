"""Engine that runs the real ServerApp, strategy and ClientApp in one process.

A Flower Grid sends messages of the server to clients.  This one calls the ClientApp in this process, without the
network.  A cell is one run of a scenario: a value of each swept key, and a seed.  A silo is a party that holds
records, here a node of the Grid.
"""

import gc
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedpriv.claims.outcome import CellOutcome, ObserverGroup, RunObserver
from fedpriv.clients.app import app as client_app
from fedpriv.core.errors import FedprivError, refuse
from fedpriv.engines.table import IndexedOutcome, retain_freed_pages
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.protocol.messages import build_message, copy_content, set_message_id
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import make_server_app

_RUN_ID = 1


class InProcessGrid(Grid):
    """Flower Grid whose nodes are Contexts, and which answers a message while the message is pushed."""

    def __init__(self, client_app: ClientApp, silos: int, run_config: Mapping[str, Any]) -> None:
        """Make one node for each of `silos` silos, whose Context keeps the silo's state between messages.

        Args:
            client_app: App of the silos, which answers each message.
            silos: Number of silos.  Silo i is node 1000 + i.
            run_config: Flower's configuration of the run, which each Context has.
        """
        # Flower makes the metadata of a new message from these values.  In a deployment Flower itself sets them.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = _RUN_ID, SUPERLINK_NODE_ID, 1
        self._run = Run.create_empty(_RUN_ID)
        self._client_app = client_app
        self._message_numbers = itertools.count(1)
        self._replies: dict[str, Message] = {}
        self._contexts = {
            (node := 1000 + silo): _make_context(node, {"partition-id": silo, "num-partitions": silos}, run_config)
            for silo in range(silos)
        }

    def server_context(self, run_config: Mapping[str, Any]) -> Context:
        return _make_context(SUPERLINK_NODE_ID, {}, run_config)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(self, *_: Any, **__: Any) -> Message:  # pragma: no cover - abstract in Flower, deprecated
        raise NotImplementedError("an in-process grid is handed messages")

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _push(self, message: Message) -> str:
        """Get the silo's reply at once, store it until it is pulled, and return the message's id."""
        message_id = f"m{next(self._message_numbers)}"
        set_message_id(message, message_id)
        reply = self._call(message)
        set_message_id(reply, f"m{next(self._message_numbers)}")
        self._replies[message_id] = reply
        return message_id

    def _call(self, message: Message) -> Message:
        # A client gets copies of the containers, as over a network.
        client_message = build_message(message.metadata, copy_content(message.content))
        try:
            return self._client_app(client_message, self._contexts[message.metadata.dst_node_id])
        except Exception as error:  # code 2 is Flower's CLIENT_APP_RAISED_EXCEPTION
            return Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)


def _make_context(node: int, config: Mapping[str, int], run_config: Mapping[str, Any]) -> Context:
    """Make Flower's Context of a node before round 1."""
    return Context(_RUN_ID, node, dict(config), RecordDict(), dict(run_config))


class _SingleCellObserver(ObserverGroup):
    """Observer of one cell, which stores the outcome, drops a failure, and passes other events on."""

    result: CellOutcome | None = None

    def failed(self, error: FedprivError) -> None:
        """Ignore the error, which is raised as well and reported by the caller of the run."""

    def finished(self, place: int, finished: CellOutcome) -> None:
        self.result = finished


def run_inprocess(cells: Sequence[Cell], observer: RunObserver) -> Iterator[IndexedOutcome]:
    """Run cells one after another over an in-process grid, and yield each outcome with the cell's index.

    Silos are called in turn, on the CPU.

    Args:
        cells: Cells to run.
        observer: Observer of progress and evaluations, for which a cell has its index in `cells`.

    Raises:
        InputError: A cell has a setting that only the vectorized engine supports, or cannot be planned.
        RunError: A round or an evaluation failed.
    """
    for index, cell in enumerate(cells):
        refuse_vectorized_options(cell, "inprocess")
        cell_observer = _SingleCellObserver([index], [observer])
        run_config = make_run_config(cell, Path())  # No file is written to it: the observer gets the results.
        grid = InProcessGrid(client_app, cell.federation.silos, run_config)
        with quiet_flower_logs(), _delay_garbage_collection(), retain_freed_pages():
            make_server_app(lambda _: cell_observer)(grid, grid.server_context(run_config))  # noqa: B023 - called at once
        assert cell_observer.result is not None
        yield IndexedOutcome(index, cell_observer.result)


@contextmanager
def quiet_flower_logs() -> Iterator[None]:
    """Set the level of Flower's logger to WARNING within this context."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _delay_garbage_collection() -> Iterator[None]:
    """Set the threshold of garbage collection to 100,000 objects within this context.

    Messages create many containers, among which a search for cycles takes time.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def refuse_vectorized_options(cell: Cell, engine: str) -> None:
    """Raise InputError for settings that only the vectorized engine supports."""
    run, engine_label = cell.run, f"engine {engine}"
    refuse(
        {
            f'run.noise = "aggregate": {engine_label} draws noise where it is added; use "per-silo"': run.noise
            == "aggregate",
            f"run.passes: {engine_label} computes as silos do, in run.dtype; leave it out": run.passes is not None,
            f'run.device = {run.device!r}: {engine_label} computes on the CPU; use "cpu"': run.device != "cpu",
        }
    )
