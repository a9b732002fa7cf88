"""A real federation: Flower's SuperLink and a SuperNode and a guard for each silo, which share only the network.

Without an address all of it is started here, as processes of this machine; with one, the app is submitted to a
SuperLink whose silos are somebody else's business.  A run's identity is a token that is kept in its folder, since
Flower gives a resubmitted run another number: silos and server go on from their ledgers under the same token.
"""

import hashlib
import json
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedpriv.engines.base import Connection, Outcome
from fedpriv.engines.follow import follow
from fedpriv.engines.inprocess import refuse_vectorized_options
from fedpriv.engines.local_silo import LocalSilo, remove_silos, state_folder, write_silos
from fedpriv.engines.processes import refuse_root
from fedpriv.engines.superlink import SuperLink, federation_superlink, node_keys, remote_superlink
from fedpriv.errors import InputError
from fedpriv.files import write_text
from fedpriv.protocol.cell_folder import FolderReader, clear
from fedpriv.protocol.run_config import run_config_of
from fedpriv.running.observer import RunObserver
from fedpriv.running.outcome import Finished
from fedpriv.scenario import Cell

Lost = Callable[[], str | None]


def run_deployment(
    cells: Sequence[Cell], observer: RunObserver, *, folder: Path, connection: Connection
) -> Iterator[Outcome]:
    """Run cells one after another; see `Engine`.

    `folder` is the RUN_DIR: the server writes below it, so that it must be the same folder where the SuperLink
    runs.  `connection` says where a running SuperLink lets runs be started: `unix:SOCKET` as `fedpriv superlink`
    makes it, or host:port, over TLS if certificates are given.
    """
    address = connection.superlink
    if address is None:
        refuse_root("--engine deployment")
    for cell in cells:
        _refuse_clients(cell)
    for index, cell in enumerate(cells):
        refuse_vectorized_options(cell, "deployment")
        if cell.federation.drop_out or cell.federation.away:
            raise InputError(
                "federation.drop_out and federation.away are for simulations: silos of a deployment are away when "
                'they are; write deployment.missing = "continue" instead'
            )
        out = folder.resolve() / "deployment" / _digest(cell)
        token = _token(out)
        finished = FolderReader(out).result() if (out / "outcome.json").exists() else None
        if finished is None:
            clear(out)
            if address is not None:
                link = remote_superlink(address, connection.root_certificates)
                finished = _submit(link, index, cell, out, token, observer)
            else:
                with _local_federation(cell, token) as (link, lost):
                    finished = _submit(link, index, cell, out, token, observer, lost)
        yield Outcome(index, finished)
        if address is None and state_folder(token).exists():
            remove_silos(state_folder(token))


def _refuse_clients(cell: Cell) -> None:
    if cell.federation.clients is not None:
        raise InputError(
            f"federation.clients = {cell.federation.clients}: engine deployment has silos with guards, and no "
            "clients that come and go; use --engine vectorized"
        )


def _submit(
    link: SuperLink,
    index: int,
    cell: Cell,
    out: Path,
    token: str,
    observer: RunObserver,
    lost: Lost = lambda: None,
) -> Finished:
    run = link.submit(run_config_of(cell, out, token))
    try:
        return follow(run, FolderReader(out), index, cell.schedule.rounds, observer, lost)
    except BaseException:
        if link.process is None:  # our own is ended as a whole
            run.stop()
        raise


@contextmanager
def _local_federation(cell: Cell, token: str) -> Iterator[tuple[SuperLink, Lost]]:
    """SuperLink and silos as processes that are gone when the block is left, and what says that one has ended.

    A run that continues without a missing silo is told of none.
    """
    with tempfile.TemporaryDirectory(prefix="fedpriv-") as name:
        home = Path(name)
        policies = write_silos(cell, state_folder(token), home)
        with federation_superlink(home, len(policies)) as link:
            assert link.address is not None
            silos = [
                LocalSilo(number, policy, link.address, node_keys(home, number))
                for number, policy in enumerate(policies)
            ]
            for silo in silos:
                silo.start()
            needed = [] if cell.deployment.missing == "continue" else silos
            yield link, lambda: next((said for silo in needed if (said := silo.ended()) is not None), None)


def _digest(cell: Cell) -> str:
    return hashlib.sha256(json.dumps(cell.canonical(), sort_keys=True).encode()).hexdigest()[:16]


def _token(out: Path) -> str:
    """The run's own name: made up once, kept beside what the server writes."""
    path = out / "token"
    if not path.exists():
        write_text(path, secrets.token_hex(16))
    return path.read_text(encoding="utf-8")
