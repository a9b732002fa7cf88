"""Flower ClientApp that passes messages to a silo's guard, or to a simulated silo.

In a deployment the app is a proxy: the silo's guard (fedpriv/silo/daemon.py) is a process of its own, which has
the records and decides.  The proxy passes bytes to the guard's Unix socket and back.  In a simulation the app is
the silo (clients/simulated.py, installed as fedpriv.clients.simulated).  A SuperNode may start a process for each
message, so the imports that need torch are inside of functions.

A query is the vector that the server, the coordinator of the run, sends in a round, and a release is the silo's
answer to it.  A cell is one run of a scenario, with a value for each key.  Masks hide a release in the sum over
silos.  A checkpoint is a position in a silo's ledger, its account of charges and replies.

A request to a guard is a frame with a JSON header, and a second frame with the query's bytes, which may be empty.
Only a request for health is a header alone.  A reply is one frame, or two if bytes follow its header.

| header | reply |
|---|---|
| {run, cell, t, dtype, keys} | {"dtype": type of the release, "commit": checkpoint}, then the release's bytes |
| the same with t = 0, without a query | {"dtype": "uint8"}, then the silo's public key |
| {"shapes_of": cell} | {"shapes": shapes of the arrays of a query} |
| {"agree": true, run, cell, protocol, fedpriv} | {"agree": true} if the run would not be refused |
| {"health": true} | {"healthy": whether the guard is at work or ready for it, "why": reason if it is not} |

* A guard that refuses a request replies {"refused": reason, "final": whether the server should give up}.
* `keys` are the silos' public keys, if messages are masked, and "seen", a key that may be missing, the checkpoints
  of this silo's ledgers that the server remembers.  `keys`, "seen" and "commit" are hexadecimal digits.
* With "tests": true the query is an evaluation of the silo's test records, and t is the number of the evaluation.
"""

import json
import socket as sockets
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedpriv.core.errors import sanitize_line
from fedpriv.protocol.frames import receive_frame, receive_json, send_frame
from fedpriv.protocol.messages import (
    CONFIG,
    PREVIEW_ADMISSION,
    PROTOCOL_VERSION,
    REPLY_CHECKPOINT,
    SERVER_CHECKPOINTS,
    Refusal,
    add_bytes,
    key_content,
    read_array,
    read_int_field,
    read_optional_bytes,
    read_public_keys,
    refusal_content,
    roster_content,
    seal_vector,
)

Answer = TypeVar("Answer")
MAX_FRAME_BYTES = 2**31
"""Largest size of one frame of a reply, in bytes."""


def forward_query(message: Message, context: Context, socket: Path, *, tests: bool = False) -> Message:
    """Pass a query to the guard, and return a message with its release or refusal.

    The checkpoint of the guard's ledger comes with the release.  If the coordinator has another protocol, the
    reply is a refusal, and the guard is not asked.

    Args:
        message: Message with the query.
        context: Flower's Context of the run.
        socket: Unix socket of the guard.
        tests: Whether the query is an evaluation of the silo's test records.

    Raises:
        ValueError: The message's query or round is missing, or one of its fields is malformed.
        InputError: The run configuration names no cell that can be run.
    """
    if (refusal := find_protocol_mismatch(context)) is not None:
        return Message(refusal_content(refusal), reply_to=message)
    query = read_array(message.content, "query")
    t = read_int_field(message.content, CONFIG, "t")
    keys, checkpoints = read_public_keys(message.content), read_optional_bytes(message.content, SERVER_CHECKPOINTS)
    answer = ask_reply(
        socket, ledger_run_id(context), _cell_json(context), t, query, keys, checkpoints, tests=tests
    )
    if isinstance(answer, Refusal):
        return Message(refusal_content(answer), reply_to=message)
    return Message(
        add_bytes(seal_vector("release", answer.release), REPLY_CHECKPOINT, answer.checkpoint), reply_to=message
    )


def forward_key(message: Message, context: Context, socket: Path) -> Message:
    """Return a message with the guard's public key for the masks of this run, or with a refusal.

    Raises:
        InputError: The run configuration names no cell that can be run.
    """
    if (refusal := find_protocol_mismatch(context)) is not None:
        return Message(refusal_content(refusal), reply_to=message)
    answer = ask_release(socket, ledger_run_id(context), _cell_json(context), 0, np.empty(0, np.uint8))
    if isinstance(answer, Refusal):
        return Message(refusal_content(answer), reply_to=message)
    return Message(key_content(answer.tobytes()), reply_to=message)


def forward_admission_query(message: Message, context: Context, socket: Path) -> Message:
    """Return a message with the refusal that the guard would give to the run, or an empty message.

    Raises:
        InputError: The run configuration names no cell that can be run.
    """
    refusal = find_protocol_mismatch(context) or ask_admission(socket, ledger_run_id(context), _cell_json(context))
    return Message(RecordDict() if refusal is None else refusal_content(refusal), reply_to=message)


def find_protocol_mismatch(context: Context) -> Refusal | None:
    """Return a refusal if the coordinator has another protocol, or None if its protocol is this one.

    The coordinator is the server of the run.  The run configuration has its version of fedpriv and the number of
    its protocol, unless that is older than 2.
    """
    protocol, version = (context.run_config.get(key) for key in ("protocol", "fedpriv"))
    if protocol == PROTOCOL_VERSION:
        return None
    coordinator = (
        f"{sanitize_line(str(version), 20)} (protocol {protocol})" if isinstance(protocol, int) else "an older one"
    )
    silo, local_version = context.node_config["partition-id"], metadata.version("fedpriv")
    return Refusal(
        f"silo {silo} runs fedpriv {local_version} (protocol {PROTOCOL_VERSION}), the coordinator {coordinator}: "
        "install the same version on both",
        is_final=True,
    )


def runs_in_supernode() -> bool:
    """Whether this is a process `flwr-clientapp`, which SuperNodes start and simulations do not."""
    return Path(sys.argv[0]).name.startswith("flwr-clientapp")


def ledger_run_id(context: Context) -> str:
    """Return the name of the run in ledgers: its token, or without a token Flower's number of the run.

    The token is in the run configuration.  A resumed run has the same token, and another number.
    """
    return str(context.run_config["run-token"] or context.run_id)


def ask_release(
    socket: Path,
    run: str,
    cell_json: str,
    t: int,
    query: NDArray[Any],
    keys: bytes = b"",
    *,
    tests: bool = False,
) -> NDArray[Any] | Refusal:
    """Return the guard's release of one query, or a refusal if the guard refuses or cannot be reached.

    `ask_reply` describes the arguments.
    """
    answer = ask_reply(socket, run, cell_json, t, query, keys, tests=tests)
    return answer if isinstance(answer, Refusal) else answer.release


class GuardReply(NamedTuple):
    """Release of a guard, and the checkpoint at which its ledger stored it, or b"" without one."""

    release: NDArray[Any]
    checkpoint: bytes


def ask_reply(
    socket: Path,
    run: str,
    cell_json: str,
    t: int,
    query: NDArray[Any],
    keys: bytes = b"",
    checkpoints: bytes = b"",
    *,
    tests: bool = False,
) -> GuardReply | Refusal:
    """Return the guard's release and checkpoint, or a refusal if the guard refuses or cannot be reached.

    Args:
        socket: Unix socket of the guard.
        run: Name of the run in ledgers.
        cell_json: Cell as JSON, the same text in every query of a run.
        t: Round, number of the evaluation, or 0 for the silo's public key, which then takes the release's place.
        query: Query, (d,), or empty if t = 0.
        keys: Public keys of all silos, or b"" without masks.
        checkpoints: Packed checkpoints of this silo's ledgers that the server remembers, or b"".
        tests: Whether the query is an evaluation of the silo's test records.
    """
    header = {"run": run, "cell": cell_json, "t": t, "dtype": str(query.dtype), "keys": keys.hex()}
    header |= {SERVER_CHECKPOINTS: checkpoints.hex()} if checkpoints else {}
    if tests:
        header["tests"] = True

    def read(answer: dict[str, Any], connection: sockets.socket) -> GuardReply:
        release = np.frombuffer(receive_frame(connection, MAX_FRAME_BYTES), answer["dtype"])
        return GuardReply(release, bytes.fromhex(answer.get(REPLY_CHECKPOINT, "")))

    return _exchange_frames(socket, header, query.tobytes(), read)


def ask_admission(socket: Path, run: str, cell_json: str) -> Refusal | None:
    """Return the refusal that the guard would give to this run, or None if it would admit the run.

    The result is a refusal that is not final if the guard cannot be reached.
    """
    header = {PREVIEW_ADMISSION: True, "run": run, "cell": cell_json}
    header |= {"protocol": PROTOCOL_VERSION, "fedpriv": metadata.version("fedpriv")}
    answer = _exchange_frames(socket, header, b"", lambda answer, _: bool(answer[PREVIEW_ADMISSION]))
    return answer if isinstance(answer, Refusal) else None


def ask_shapes(socket: Path, cell_json: str) -> list[tuple[int, ...]] | Refusal:
    """Return the shapes of the arrays of the guard's model in this scenario, or a refusal."""
    return _exchange_frames(
        socket, {"shapes_of": cell_json}, b"", lambda answer, _: [tuple(shape) for shape in answer["shapes"]]
    )


def _exchange_frames(
    socket: Path,
    header: dict[str, Any],
    content: bytes,
    read: Callable[[dict[str, Any], sockets.socket], Answer],
) -> Answer | Refusal:
    """Send a request to the guard, and return its reply or refusal.

    If the guard cannot be reached, or sends no well-formed reply, the result is a refusal that is not final, so
    that the server may ask again.

    Args:
        socket: Unix socket of the guard.
        header: First frame, as a JSON object.
        content: Second frame, which may be empty.
        read: Function from the reply's header and the connection, which may have further frames, to the result.
    """
    try:
        with sockets.socket(sockets.AF_UNIX) as connection:
            connection.connect(str(socket))
            send_frame(connection, json.dumps(header).encode())
            send_frame(connection, content)
            answer = receive_json(connection, MAX_FRAME_BYTES)
            if "refused" in answer:
                return Refusal(str(answer["refused"]), bool(answer["final"]))
            return read(answer, connection)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"the silo's guard at {socket} does not answer ({error}); is `fedpriv silo` running?"
        return Refusal(reason, is_final=False)


def _cell_json(context: Context) -> str:
    if cell_json := context.run_config["cell-json"]:
        return str(cell_json)
    # Imported late, because the module needs torch.
    from fedpriv.protocol.cell_folder import cell_from_run_config

    return json.dumps(cell_from_run_config(context.run_config).canonical_data())


app = ClientApp()


@app.query("roster")
def roster(message: Message, context: Context) -> Message:
    """Return a message with the number of this node's silo."""
    return Message(roster_content(int(context.node_config["partition-id"])), reply_to=message)


@app.query("agreement")
def agreement(message: Message, context: Context) -> Message:
    """Return a message with the refusal that this silo would give to the run, or an empty message."""
    if guard := context.node_config.get("guard"):
        return forward_admission_query(message, context, Path(str(guard)))
    return Message(RecordDict(), reply_to=message)  # A silo of a simulation has no policy.


@app.query("key")
def key(message: Message, context: Context) -> Message:
    """Return a message with this silo's public key for the masks of this run, or with a refusal."""
    if guard := context.node_config.get("guard"):
        return forward_key(message, context, Path(str(guard)))
    from fedpriv.clients.simulated import public_key

    return public_key(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Return a message with the silo's scores of a model, summed or averaged, or with a refusal."""
    if guard := context.node_config.get("guard"):
        return forward_query(message, context, Path(str(guard)), tests=True)
    from fedpriv.clients.simulated import evaluate

    return evaluate(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return a message with the release of one query, or with a refusal."""
    if guard := context.node_config.get("guard"):
        return forward_query(message, context, Path(str(guard)))
    from fedpriv.clients.simulated import answer_query

    return answer_query(message, context)
