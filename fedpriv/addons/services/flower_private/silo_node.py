"""Node of a silo: one process that pulls queries from the SuperLink and calls fedpriv's ClientApp.

    python -P -m fedpriv.addons.services.flower_private.silo_node SUPERLINK SILO GUARD KEYS|-

SUPERLINK is the address of the Fleet API, SILO the number of the silo, GUARD the socket of its guard, and KEYS the
folder with ca.crt and node.key, or "-" for a connection without TLS.

A query is a tree of objects, each named by the SHA-256 of its content, and so is a reply.  A route is a path of
the SuperLink with the types of its request and its answer, and a bundle is the packed files of the app that a run
was started with.

The node runs no code that the SuperLink sends: a run whose bundle names another app gets an error reply.  A node
that loses its SuperLink exits with LOST_EXIT_CODE.
"""

import email.utils
import hashlib
import io
import logging
import os
import sys
import threading
import time
import tomllib
import zipfile
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import httpx
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import TIMESTAMP_HEADER, ErrorCode
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.inflatable.inflatable_object import InflatableObject
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from google.protobuf.message import DecodeError

from fedpriv.addons.services.certificates import AUTHORITY_FILE, NODE_KEY_FILE, read_node_key
from fedpriv.addons.services.flower_private import APP_PATH, VERSION_HEADER
from fedpriv.addons.services.flower_private.control import ApiClient, open_client, parse_refusal
from fedpriv.addons.services.flower_private.names import (
    ACTIVATE_NODE,
    CONFIRM_MESSAGE,
    DEACTIVATE_NODE,
    GET_FAB,
    GET_RUN,
    METADATA_FIELDS,
    NODE_HEARTBEAT,
    PULL_MESSAGES,
    PULL_OBJECT,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    SELF_REGISTER_NODE,
    Route,
)
from fedpriv.addons.services.service import (
    HEARTBEAT_FOLDER_VARIABLE,
    LOST_EXIT_CODE,
    SUPERNODE,
    exit_on_signals,
    write_heartbeat,
)
from fedpriv.clients.app import app
from fedpriv.core.errors import FedprivError, RunError, sanitize_line
from fedpriv.core.logs import configure_service_logging
from fedpriv.protocol.messages import PROTOCOL_VERSION, format_clock_offset, is_clock_tolerated

_log = logging.getLogger("fedpriv.supernode")
_HEARTBEAT_INTERVAL, _HEARTBEAT_SECONDS = 15.0, 10.0  # Flower marks a node as offline after two intervals
_PATIENCE_SECONDS = 20.0  # seconds for which a request without an answer is repeated
_MIN_HOLD_SECONDS = 1.0  # seconds after which an empty answer must come from long polling
_MAX_WAIT_SECONDS = 3.0  # longest pause in seconds between two requests to a SuperLink without long polling
_OBJECT_SECONDS = 180.0  # seconds after which Flower drops a query whose objects do not arrive
_UNKNOWN_NODE = "the SuperLink does not know this SuperNode: it was started again, or its key was revoked"
_MAX_PYPROJECT = 2**20  # bytes


class LostError(RunError):
    """The SuperLink is away, or does not admit this node."""


class FleetClient:
    """Client of the SuperLink's Fleet API, which signs requests with the silo's key."""

    def __init__(self, superlink: str, keys: Path | None) -> None:
        """Make a client of the SuperLink at `superlink`.

        Args:
            superlink: Address of the SuperLink.
            keys: Folder with ca.crt and node.key, or None for no TLS and a new key.

        Raises:
            InputError: The private key cannot be read.
            OSError: The certificate cannot be read.
            httpx.InvalidURL: The address has another form.
        """
        self._key = (
            ec.generate_private_key(ec.SECP384R1()) if keys is None else read_node_key(keys / NODE_KEY_FILE)
        )
        self.public_key = self._key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self._version = f"{version('fedpriv')} (protocol {PROTOCOL_VERSION})"
        self._client = ApiClient(
            open_client(superlink, None if keys is None else keys / AUTHORITY_FILE), self._headers
        )

    def _headers(self, _route: Route, _request: Any) -> Mapping[str, str]:
        timestamp = datetime.now(UTC).isoformat()
        signature = self._key.sign(timestamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        return {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(self.public_key).decode("ascii"),
            TIMESTAMP_HEADER: timestamp,
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode("ascii"),
            VERSION_HEADER: self._version,
        }

    def ask(self, route: Route, *, patience: float = _PATIENCE_SECONDS, **fields: Any) -> Any:
        """Return the SuperLink's answer to a request, which is repeated while the SuperLink is away.

        Args:
            route: Route of the request.
            patience: Seconds after which no request is sent any more, up to the last pause of at most 2 s.
            **fields: Fields of the request.

        Raises:
            httpx.HTTPStatusError: The SuperLink refuses the request, or answers with a server error.  After an
                error of 502 or above the request is repeated first, until the end of `patience`.
            LostError: No readable answer came until the end of `patience`, or the SuperLink refuses the key or
                this machine's clock.
        """
        deadline, pause = time.monotonic() + patience, 0.1
        while True:
            try:
                answer = self._client.ask(route, route.request_type(**fields))
            except httpx.HTTPStatusError as error:
                response = error.response
                if response.status_code == httpx.codes.UNAUTHORIZED:
                    reason = describe_clock_error(response.headers.get("date"), time.time()) or _UNKNOWN_NODE
                    write_heartbeat(SUPERNODE, reason)
                    raise LostError(reason) from None
                # From 502 on, as a proxy answers for it, the SuperLink counts as away.
                if response.status_code >= 502:
                    write_heartbeat(SUPERNODE, f"a proxy answers for the SuperLink: HTTP {response.status_code}")
                if response.status_code < 502 or time.monotonic() > deadline:
                    raise
            except httpx.HTTPError as error:
                write_heartbeat(SUPERNODE, reason := str(error) or type(error).__name__)
                if time.monotonic() > deadline:
                    raise LostError(reason) from None
            else:
                write_heartbeat(SUPERNODE)
                return answer
            time.sleep(pause)
            pause = min(2.0 * pause, 2.0)

    def connect(self, previous_id: int | None, *, registers_itself: bool) -> int:
        """Connect as the node whose key is registered, and return its id in Flower.

        Args:
            previous_id: Id of this node in an earlier process, which may still count as connected, or None.
            registers_itself: Whether the node registers its own key first, as a node without --keys does.

        Raises:
            LostError: The SuperLink does not answer, or does not admit the node.
            httpx.HTTPStatusError: The SuperLink does not register the node's own key, or a proxy answers for it.
        """
        if registers_itself:
            self.ask(SELF_REGISTER_NODE, public_key=self.public_key)
        if previous_id is not None:
            with suppress(httpx.HTTPStatusError, LostError):  # away, restarted, or the node is offline
                self.ask(DEACTIVATE_NODE, node_id=previous_id)
        try:
            return int(
                self.ask(ACTIVATE_NODE, public_key=self.public_key, heartbeat_interval=_HEARTBEAT_INTERVAL).node_id
            )
        except httpx.HTTPStatusError as error:
            code, reason = parse_refusal(error.response)
            if code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
                reason = (
                    "the SuperLink does not know this SuperNode's key, or heard of another with it within a minute"
                )
            write_heartbeat(SUPERNODE, reason)
            raise LostError(reason) from None


def describe_clock_error(date: str | None, now: float) -> str | None:
    """Describe the difference of this clock from an answer's `date`, or return None if it is tolerated.

    The result is None as well if `date` is missing or cannot be read.
    """
    with suppress(ValueError, OverflowError):
        ahead = now - email.utils.parsedate_to_datetime(date or "").timestamp()
        if not is_clock_tolerated(ahead):
            return f"this machine's clock is {format_clock_offset(ahead)} the SuperLink's; set it by NTP"
    return None


class SiloNode:
    """A connected node, whose ClientApp is called in this process."""

    def __init__(self, fleet: FleetClient, number: int, silo: int, guard: str) -> None:
        self._fleet, self.node_id, self._node_field = fleet, number, {"node_id": number}
        self._silo, self._guard = silo, guard
        self._configurations: dict[int, dict[str, Any] | None] = {}
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def _send_heartbeats(self) -> None:
        """Send heartbeats, and end the process if one fails, since a node without them is offline."""
        try:
            while True:
                time.sleep(_HEARTBEAT_SECONDS)
                if not self._fleet.ask(
                    NODE_HEARTBEAT, node=self._node_field, heartbeat_interval=_HEARTBEAT_INTERVAL
                ).success:
                    raise LostError("the SuperLink has forgotten this SuperNode")
        except Exception as error:
            _log.warning("no heartbeat any more: %s", error)
            os._exit(LOST_EXIT_CODE)

    def serve(self) -> NoReturn:
        """Answer queries, one after another.

        Raises:
            LostError: The SuperLink does not answer, or does not admit the node any more.
            httpx.HTTPStatusError: The SuperLink refuses a request for queries, or answers it with a server error.
        """
        wait = 0.05
        while True:
            start = time.monotonic()
            answer = self._fleet.ask(PULL_MESSAGES, node=self._node_field)
            if not answer.messages_list:
                # A SuperLink with long polling has waited already; one that answers at once is asked less often.
                wait = 0.05 if time.monotonic() - start > _MIN_HOLD_SECONDS else min(2.0 * wait, _MAX_WAIT_SECONDS)
                time.sleep(wait)
                continue
            wait, run = 0.05, answer.messages_list[0].metadata.run_id  # Flower gives one message at a time
            try:
                self._answer(run, answer.message_object_trees[0])
            except httpx.HTTPStatusError as error:  # for example because the run has ended
                _log.info("a query is left unanswered: %s", parse_refusal(error.response)[1])
            except (ValueError, LookupError, TypeError, AttributeError, DecodeError) as error:
                _log.warning("a message is left unanswered, since it is no query: %s", sanitize_line(str(error)))

    def _answer(self, run: int, tree: Any) -> None:
        """Fetch a run's query by its tree of object ids, send the app's reply, and confirm the query.

        Raises:
            ValueError, TypeError, LookupError, AttributeError, DecodeError: The objects do not come, or are no
                query.
            httpx.HTTPStatusError, LostError: A request fails (`FleetClient.ask`).
        """
        start_time = time.monotonic()
        contents = {name: self._fetch_object(run, name) for name in dict.fromkeys(_object_ids(tree))}
        query = inflate_object_from_contents(tree.object_id, contents)
        if not isinstance(query, Message):
            raise TypeError(f"it is a {type(query).__name__}")
        # A message has the id of its object, to which the reply refers.
        query.metadata.__dict__["_message_id"] = tree.object_id
        self._send_reply(run, self._call_app(run, query), start_time)
        self._fleet.ask(CONFIRM_MESSAGE, node=self._node_field, run_id=run, message_object_id=tree.object_id)

    def _fetch_object(self, run: int, name: str) -> bytes:
        """Return an object of a query, after waiting for its arrival at the SuperLink.

        Raises:
            ValueError: The SuperLink does not know the object, or it does not arrive in three minutes.
            httpx.HTTPStatusError, LostError: A request fails (`FleetClient.ask`).
        """
        deadline, pause = time.monotonic() + _OBJECT_SECONDS, 0.02
        while True:
            answer = self._fleet.ask(PULL_OBJECT, node=self._node_field, run_id=run, object_id=name)
            if answer.object_available:
                return bytes(answer.object_content)
            if not answer.object_found or time.monotonic() > deadline:
                raise ValueError("its objects did not come")
            time.sleep(pause)
            pause = min(2.0 * pause, 1.0)

    def _call_app(self, run: int, query: Message) -> Message:
        """Return the reply of fedpriv's app to a query.

        A run of another app, and an exception of the app, give an error reply.
        """
        if run not in self._configurations:
            self._configurations[run] = self._fetch_configuration(run)
        if (configuration := self._configurations[run]) is None:
            reason = (
                f"silo {self._silo} runs no app but fedpriv's; `fedpriv supernode --apps` runs those of others"
            )
        else:
            node_config: dict[str, bool | float | int | str] = {"partition-id": self._silo, "guard": self._guard}
            try:
                return app(query, Context(run, self.node_id, node_config, RecordDict(), dict(configuration)))
            except Exception as error:
                # The reason stays in this log, because it may reveal records.
                _log.exception("the reply to a query failed")
                reason = f"the SuperNode of silo {self._silo} failed ({type(error).__name__}); its log says why"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=query)

    def _fetch_configuration(self, run: int) -> dict[str, Any] | None:
        """Return the configuration of a run, or None if its bundle is not that of fedpriv's app."""
        description = self._fleet.ask(GET_RUN, node=self._node_field, run_id=run).run
        fab = self._fleet.ask(GET_FAB, node=self._node_field, run_id=run, hash_str=description.fab_hash).fab
        if (configuration := read_configuration(bytes(fab.content))) is None:
            return None
        return configuration | {
            key: getattr(value, str(value.WhichOneof("scalar")))
            for key, value in description.override_config.items()
        }

    def _send_reply(self, run: int, reply: Message, start_time: float) -> None:
        """Announce a reply, then send those of its objects that the SuperLink lacks.

        Args:
            run: Id of the run.
            reply: Reply, with content or with an error.
            start_time: Start of the work on the query, on the monotonic clock.  Flower gets the time since then.
        """
        request, contents = PUSH_MESSAGES.request_type(), dict[str, bytes]()
        _add_objects(request.message_object_trees.add(), reply, contents)
        message = request.messages_list.add()
        for key in METADATA_FIELDS.split():
            setattr(message.metadata, key, getattr(reply.metadata, key))
        message.metadata.message_id = request.message_object_trees[0].object_id
        if reply.has_error():
            message.error.code, message.error.reason = reply.error.code, reply.error.reason
        else:
            message.content.SetInParent()  # an empty content, whose objects are sent below
        answer = self._fleet.ask(
            PUSH_MESSAGES,
            node=self._node_field,
            messages_list=request.messages_list,
            message_object_trees=request.message_object_trees,
            clientapp_runtime_list=[time.monotonic() - start_time],
        )
        session, missing = {"run_id": run, "session_id": answer.session_id}, set(answer.objects_to_push)
        for name in [name for name in contents if name in missing]:
            self._fleet.ask(
                PUSH_OBJECT, node=self._node_field, **session, object_id=name, object_content=contents[name]
            )


def _object_ids(tree: Any) -> Iterator[str]:
    for child in tree.children:
        yield from _object_ids(child)
    yield tree.object_id


def _add_objects(tree: Any, value: InflatableObject, contents: dict[str, bytes]) -> None:
    """Add an object and its descendants to a tree, and their contents to `contents`, children first."""
    for child in (value.children or {}).values():
        _add_objects(tree.children.add(), child, contents)
    content = value.deflate()
    tree.object_id = hashlib.sha256(content).hexdigest()  # the SuperLink verifies the content by this id
    contents[tree.object_id] = content


def read_configuration(bundle: bytes) -> dict[str, Any] | None:
    """Return the run configuration in a bundle by dotted keys, or None for another app or a broken bundle.

    A bundle has the configuration in its pyproject.toml.  If this file has more than 1 MiB, or is compressed by
    another method than deflate, the bundle counts as broken.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as files:
            info = files.getinfo("pyproject.toml")
            if info.file_size > _MAX_PYPROJECT or info.compress_type not in (0, zipfile.ZIP_DEFLATED):
                return None
            settings = tomllib.loads(files.read(info).decode("utf-8"))["tool"]["flwr"]["app"]
        return (
            dict(_flatten_keys(settings.get("config", {})))
            if settings["components"]["clientapp"] == APP_PATH
            else None
        )
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        RuntimeError,
        EOFError,
    ):
        return None


def _flatten_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def main(superlink: str, silo: str, guard: str, keys: str) -> None:
    """Connect the node, and answer queries until the process is asked to end or the SuperLink is lost.

    The process also ends if its parent does.  The node's id is written to a file beside the heartbeats, so that
    the successor of a killed process can disconnect it.  The arguments are those of the module's command line.
    """
    configure_service_logging(silo=int(silo))
    exit_on_signals()
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    folder, id_file = None if keys == "-" else Path(keys), Path(os.environ[HEARTBEAT_FOLDER_VARIABLE], "node")
    try:
        fleet, previous_id = FleetClient(superlink, folder), int(id_file.read_text()) if id_file.exists() else None
        node = SiloNode(fleet, fleet.connect(previous_id, registers_itself=folder is None), int(silo), guard)
        id_file.write_text(str(node.node_id))
        try:
            node.serve()
        finally:  # also after a signal, or if the SuperLink is lost, which does not hide how the node ended
            with suppress(LostError, httpx.HTTPError):
                fleet.ask(DEACTIVATE_NODE, patience=0.0, node_id=node.node_id)
    except (LostError, httpx.HTTPError) as error:
        _log.debug("lost: %s", error)
        sys.exit(LOST_EXIT_CODE)
    except FedprivError as error:
        _log.error("%s", error)
        sys.exit(error.exit_code)


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(LOST_EXIT_CODE)


if __name__ == "__main__":
    main(*sys.argv[1:])
