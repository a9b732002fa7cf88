"""The Flower ClientApp: messages in, messages out; the protocol itself is in fedpriv/silo/silo.py.

In a deployment it is a thin proxy: the silo's guard (fedpriv/silo/daemon.py), a process of the silo's own
installation, has the records and decides.  In a simulation it is the silo.  A SuperNode starts a process for each
message, so that torch, which only a simulation needs here, is imported when it is needed.

The proxy passes bytes to the guard's Unix socket and back.

A request is two frames, a JSON header {run, cell, t, dtype, keys} and the query's bytes; a reply is a frame
{"dtype": the release's, "commit": that of the guard's ledger} and the release's bytes, or one frame {"refused":
reason, "final": whether asking again cannot help}.  With "tests": true it is about the silo's test records, and t
numbers evaluations.  `keys` are the silos' public keys, where messages are masked, and "seen" the commits of this
silo's ledgers that the server remembers, all in hexadecimal digits.  Round 0 asks for the silo's own public key,
and has no query.  {"shapes_of": cell}, with no query, is answered by {"shapes": those of the arrays that a query
consists of}; {"agree": true, "run", "cell", "protocol", "fedpriv"} by {"agree": true} if the run would not be
refused, for which nothing is opened or charged.  A frame {"health": true} alone is answered by {"healthy": whether
the guard is at work or ready}; deploy/health.py sends it.
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
"""The most bytes of one frame."""


def forward_query(message: Message, context: Context, socket: Path, *, tests: bool = False) -> Message:
    """Put a train message to the guard, or an evaluation of its `tests`; the reply is its release or refusal."""
    if (refusal := find_protocol_mismatch(context)) is not None:
        return Message(refusal_content(refusal), reply_to=message)
    query = read_array(message.content, "query")
    t = read_int_field(message.content, CONFIG, "t")
    keys, seen = read_public_keys(message.content), read_optional_bytes(message.content, SERVER_CHECKPOINTS)
    answer = ask_reply(socket, ledger_run_id(context), _cell_json(context), t, query, keys, seen, tests=tests)
    if isinstance(answer, Refusal):
        return Message(refusal_content(answer), reply_to=message)
    return Message(
        add_bytes(seal_vector("release", answer.release), REPLY_CHECKPOINT, answer.checkpoint), reply_to=message
    )


def forward_key(message: Message, context: Context, socket: Path) -> Message:
    """Ask the guard for its public key of this run."""
    if (refusal := find_protocol_mismatch(context)) is not None:
        return Message(refusal_content(refusal), reply_to=message)
    answer = ask_release(socket, ledger_run_id(context), _cell_json(context), 0, np.empty(0, np.uint8))
    if isinstance(answer, Refusal):
        return Message(refusal_content(answer), reply_to=message)
    return Message(key_content(answer.tobytes()), reply_to=message)


def forward_admission_query(message: Message, context: Context, socket: Path) -> Message:
    """Ask the guard whether it would refuse the run; it opens, charges and releases nothing for that."""
    refusal = find_protocol_mismatch(context) or ask_admission(socket, ledger_run_id(context), _cell_json(context))
    return Message(RecordDict() if refusal is None else refusal_content(refusal), reply_to=message)


def find_protocol_mismatch(context: Context) -> Refusal | None:
    """Refuse a coordinator whose protocol is another: nothing of the run reaches the guard."""
    theirs, version = (context.run_config.get(key) for key in ("protocol", "fedpriv"))
    if theirs == PROTOCOL_VERSION:
        return None
    coordinator = (
        f"{sanitize_line(str(version), 20)} (protocol {theirs})" if isinstance(theirs, int) else "an older one"
    )
    silo, own = context.node_config["partition-id"], metadata.version("fedpriv")
    return Refusal(
        f"silo {silo} runs fedpriv {own} (protocol {PROTOCOL_VERSION}), the coordinator {coordinator}: "
        "install the same version on both",
        is_final=True,
    )


def runs_in_supernode() -> bool:
    """Whether this is a process `flwr-clientapp`, which SuperNodes start for messages, and simulations never."""
    return Path(sys.argv[0]).name.startswith("flwr-clientapp")


def ledger_run_id(context: Context) -> str:
    """The run as a ledger knows it: the scenario's own token, which a resumed run keeps; else Flower's number."""
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
    """The guard's answer to round t, or to evaluation t of its `tests`; a refusal if it is not there."""
    answer = ask_reply(socket, run, cell_json, t, query, keys, tests=tests)
    return answer if isinstance(answer, Refusal) else answer.release


class GuardReply(NamedTuple):
    """A guard's answer, and the commit of its ledger that it is in."""

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
    """The answer with its commit, to somebody who has `seen` others before."""
    header = {"run": run, "cell": cell_json, "t": t, "dtype": str(query.dtype), "keys": keys.hex()}
    header |= {SERVER_CHECKPOINTS: checkpoints.hex()} if checkpoints else {}
    if tests:
        header["tests"] = True

    def read(answer: dict[str, Any], connection: sockets.socket) -> GuardReply:
        release = np.frombuffer(receive_frame(connection, MAX_FRAME_BYTES), answer["dtype"])
        return GuardReply(release, bytes.fromhex(answer.get(REPLY_CHECKPOINT, "")))

    return _exchange_frames(socket, header, query.tobytes(), read)


def ask_admission(socket: Path, run: str, cell_json: str) -> Refusal | None:
    """The refusal that the guard would give this run; None if it would answer."""
    header = {PREVIEW_ADMISSION: True, "run": run, "cell": cell_json}
    header |= {"protocol": PROTOCOL_VERSION, "fedpriv": metadata.version("fedpriv")}
    answer = _exchange_frames(socket, header, b"", lambda answer, _: bool(answer[PREVIEW_ADMISSION]))
    return answer if isinstance(answer, Refusal) else None


def ask_shapes(socket: Path, cell_json: str) -> list[tuple[int, ...]] | Refusal:
    """The shapes of the arrays that a query of this scenario consists of, as the guard's model has them."""
    return _exchange_frames(
        socket, {"shapes_of": cell_json}, b"", lambda answer, _: [tuple(shape) for shape in answer["shapes"]]
    )


def _exchange_frames(
    socket: Path,
    header: dict[str, Any],
    content: bytes,
    read: Callable[[dict[str, Any], sockets.socket], Answer],
) -> Answer | Refusal:
    try:
        with sockets.socket(sockets.AF_UNIX) as connection:
            connection.connect(str(socket))
            send_frame(connection, json.dumps(header).encode())
            send_frame(connection, content)
            answer = receive_json(connection, MAX_FRAME_BYTES)
            if "refused" in answer:
                return Refusal(str(answer["refused"]), bool(answer["final"]))
            return read(answer, connection)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"the silo's guard at {socket} does not answer ({error}); is `fedpriv silo` running?"
        return Refusal(reason, is_final=False)


def _cell_json(context: Context) -> str:
    if given := context.run_config["cell-json"]:
        return str(given)
    from fedpriv.protocol.cell_folder import cell_from_run_config  # reads the scenario's file, which takes torch

    return json.dumps(cell_from_run_config(context.run_config).canonical_data())


app = ClientApp()


@app.query("roster")
def roster(message: Message, context: Context) -> Message:
    """Tell the server which silo this node is."""
    return Message(roster_content(int(context.node_config["partition-id"])), reply_to=message)


@app.query("agreement")
def agreement(message: Message, context: Context) -> Message:
    """Tell the server whether this silo would refuse the run; nothing is spent for the answer."""
    if guard := context.node_config.get("guard"):
        return forward_admission_query(message, context, Path(str(guard)))
    return Message(RecordDict(), reply_to=message)  # a simulation's silo has no policy


@app.query("key")
def key(message: Message, context: Context) -> Message:
    """Give the server this silo's public key for the masks of this run, which it relays to the other silos."""
    if guard := context.node_config.get("guard"):
        return forward_key(message, context, Path(str(guard)))
    from fedpriv.clients.simulated import public_key

    return public_key(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Sum a model's scores over the silo's own test records."""
    if guard := context.node_config.get("guard"):
        return forward_query(message, context, Path(str(guard)), tests=True)
    from fedpriv.clients.simulated import evaluate

    return evaluate(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer one query."""
    if guard := context.node_config.get("guard"):
        return forward_query(message, context, Path(str(guard)))
    from fedpriv.clients.simulated import answer_query

    return answer_query(message, context)
