"""Table of the names of Flower that Flower does not promise to keep, and its check.

A row is a Python name with the parameters, attributes or value that are used, or a route: a path of the SuperLink
with the fields of its request and answer.  `check_names` refuses a Flower that differs from a row, unless the row
only gains speed.

docs/flower-releases.md says how to proceed after a release of Flower.
"""

import functools
import importlib
import inspect
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from fedpriv.core.errors import InputError

TESTED_VERSIONS = ("1.41", "1.42")
"""Minor versions of Flower with which the tests have run."""


@dataclass(frozen=True)
class PythonName:
    """A Python name, with a function's first parameters, a class's attributes or a constant's value."""

    module: str
    """Module of the name."""
    name: str
    """Function, class or constant in the module."""
    reason: str
    """Use that fedpriv makes of the name."""
    parameters: str = ""
    """First parameters of a function in order, separated by spaces, or "" if they are not checked."""
    attributes: str = ""
    """Attributes that are used, separated by spaces."""
    value: object = None
    """Expected value of a constant, or None if it is not checked."""

    def find_fault(self) -> str | None:
        """Describe the first difference of the installed Flower from this row, or return None.

        The parameters agree if the function has them first, in this order, and can be called with them alone.
        """
        path = f"{self.module}.{self.name}"
        try:
            value = getattr(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError):
            return f"{path} is gone"
        if self.value is not None and value != self.value:
            return f"{path} is {value!r}, not {self.value!r}"
        if missing := sorted({*self.attributes.split()} - {*dir(value), *dir(type(value))}):
            return f"{path}.{missing[0]} is gone"
        if not self.parameters or not callable(value):
            return f"{path} is no function" if self.parameters else None
        # `bind` raises TypeError if the function cannot be called with these parameters alone.
        names, signature = self.parameters.split(), inspect.signature(value)
        with suppress(TypeError):
            signature.bind(**dict.fromkeys(names))
            if list(signature.parameters)[: len(names)] == names:
                return None
        return f"{path} takes {', '.join(signature.parameters) or 'nothing'}"


@dataclass(frozen=True)
class Route:
    """A request of Flower's wire: its path, and the fields of request and answer that are used."""

    api: str
    """First part of the path, which names the API."""
    endpoint: str
    """Last part of the path."""
    message_name: str
    """Module and name of the messages, without the ending Request or Response."""
    reason: str
    """Use that fedpriv makes of the route."""
    request_fields: str = ""
    """Fields of the request, separated by spaces, with dots for nested ones."""
    answer_fields: str = ""
    """Fields of the answer, in the same form."""
    only_for_speed: bool = False
    """Whether a Flower whose request or answer of the route differs is only slower."""

    @property
    def path(self) -> str:
        """Path of the request at a SuperLink."""
        return self.api + self.endpoint

    @functools.cached_property
    def request_type(self) -> Any:
        """Type of the request."""
        return self._message_type("Request")

    @functools.cached_property
    def answer_type(self) -> Any:
        """Type of the answer."""
        return self._message_type("Response")

    def _message_type(self, suffix: str) -> Any:
        module, _, name = self.message_name.partition(".")
        return getattr(importlib.import_module(f"flwr.proto.{module}_pb2"), f"{name}{suffix}")

    def find_fault(self) -> str | None:
        """Return a difference of the installed Flower from the row's request and answer, or None.

        The path is not checked.
        """
        try:
            pairs = ((self.request_type, self.request_fields), (self.answer_type, self.answer_fields))
        except (ImportError, AttributeError):
            return f"flwr.proto {self.message_name} of {self.path} is gone"
        return next(
            (
                f"{message.DESCRIPTOR.name}.{field} of {self.path} is gone"
                for message, fields in pairs
                for field in fields.split()
                if not _has_field(message.DESCRIPTOR, field.split("."))
            ),
            None,
        )


def _has_field(descriptor: Any, path: Sequence[str]) -> bool:
    field = descriptor.fields_by_name.get(path[0])
    return field is not None and (
        len(path) == 1 or (field.message_type is not None and _has_field(field.message_type, path[1:]))
    )


CONTROL_PREFIX, FLEET_PREFIX, RUNTIME_PREFIX = "/v1/control/", "/v1/fleet/", "/v1/runtime/"
_NODE, _OBJECT = "node.node_id run_id", "node.node_id run_id session_id object_id object_content"
METADATA_FIELDS = (
    "run_id message_id src_node_id dst_node_id reply_to_message_id group_id ttl message_type created_at"
)
_MESSAGES = (
    f"{' '.join(f'messages_list.metadata.{field}' for field in METADATA_FIELDS.split())} "
    "message_object_trees.object_id message_object_trees.children"
)
_SESSION = "objects_to_push session_id"

START_RUN = Route(
    *(CONTROL_PREFIX, "start-run", "control.StartRun", "starts runs"),
    request_fields="fab.hash_str fab.content override_config.value.string override_federation_config",
    answer_fields="run_id",
)
STOP_RUN = Route(CONTROL_PREFIX, "stop-run", "control.StopRun", "stops runs", "run_id")
LIST_RUNS = Route(
    *(CONTROL_PREFIX, "list-runs", "control.ListRuns", "status of runs, --state", "run_id limit"),
    answer_fields="run_dict.value.run_id run_dict.value.status.status run_dict.value.status.sub_status "
    "run_dict.value.status.details run_dict.value.pending_at run_dict.value.running_at run_dict.value.finished_at "
    "run_dict.value.override_config.value.string",
)
REGISTER_NODE = Route(
    *(CONTROL_PREFIX, "register-node", "control.RegisterNode", "a registered key and the silo that it stands for"),
    request_fields="public_key name",
    answer_fields="node_id",
)
UNREGISTER_NODE = Route(CONTROL_PREFIX, "unregister-node", "control.UnregisterNode", "revokes a key", "node_id")

SELF_REGISTER_NODE = Route(
    FLEET_PREFIX, "register-node", "fleet.RegisterNodeFleet", "a silo without a key", "public_key"
)
ACTIVATE_NODE = Route(
    *(FLEET_PREFIX, "activate-node", "fleet.ActivateNode", "a silo connects"),
    request_fields="public_key heartbeat_interval",
    answer_fields="node_id",
)
DEACTIVATE_NODE = Route(
    FLEET_PREFIX, "deactivate-node", "fleet.DeactivateNode", "a silo that restarts is let in", "node_id"
)
NODE_HEARTBEAT = Route(
    *(FLEET_PREFIX, "send-node-heartbeat", "heartbeat.SendNodeHeartbeat", "stays connected"),
    request_fields="node.node_id heartbeat_interval",
    answer_fields="success",
)
PULL_MESSAGES = Route(
    *(FLEET_PREFIX, "pull-messages", "fleet.PullMessages", "a silo asks for a query; long polling"),
    request_fields="node.node_id",
    answer_fields=_MESSAGES,
)
PUSH_MESSAGES = Route(
    *(FLEET_PREFIX, "push-messages", "fleet.PushMessages", "a silo replies, as itself"),
    request_fields=f"node.node_id {_MESSAGES} messages_list.error.code messages_list.error.reason "
    "messages_list.content clientapp_runtime_list",
    answer_fields=_SESSION,
)
GET_RUN = Route(FLEET_PREFIX, "get-run", "run.GetRun", "a run's bundle", _NODE, "run.fab_hash run.override_config")
GET_FAB = Route(
    *(FLEET_PREFIX, "get-fab", "fab.GetFab", "which app it names, its configuration"),
    request_fields=f"{_NODE} hash_str",
    answer_fields="fab.content",
)
PULL_OBJECT = Route(
    *(FLEET_PREFIX, "pull-object", "message.PullObject", "arrays of a query"),
    request_fields=f"{_NODE} object_id",
    answer_fields="object_found object_available object_content",
)
PUSH_OBJECT = Route(FLEET_PREFIX, "push-object", "message.PushObject", "arrays of a reply", _OBJECT, "stored")
CONFIRM_MESSAGE = Route(
    *(FLEET_PREFIX, "confirm-message-received", "message.ConfirmMessageReceived", "frees the memory of a query"),
    request_fields=f"{_NODE} message_object_id",
)

ACQUIRE_TASK = Route(
    *(RUNTIME_PREFIX, "acquire-task", "runtime.AcquireTask", "the executor's question for a task"),
    request_fields="supported_task_types",
    answer_fields="task.type task.run_id token",
)
TASK_HEARTBEAT = Route(
    RUNTIME_PREFIX, "send-task-heartbeat", "runtime.SendTaskHeartbeat", "slow starts are not missed"
)
TASK_OUTPUT = Route(
    *(RUNTIME_PREFIX, "push-task-output", "runtime.PushTaskOutput", "reports a server that was killed"),
    request_fields="sub_status details",
)
SERVER_PULL_MESSAGES = Route(
    *(RUNTIME_PREFIX, "pull-messages", "runtime.PullAppMessages", "long polling; hides unfinished replies"),
    request_fields="message_ids",
    answer_fields="messages_list.metadata.reply_to_message_id",
    only_for_speed=True,
)
SERVER_PUSH_MESSAGES = Route(
    *(RUNTIME_PREFIX, "push-messages", "runtime.PushAppMessages", "wakes silos; the silo that a query goes to"),
    request_fields="messages_list.metadata.message_id messages_list.metadata.dst_node_id",
    answer_fields=_SESSION,
    only_for_speed=True,
)
SERVER_PUSH_OBJECT = Route(
    *(RUNTIME_PREFIX, "push-object", "message.PushObject", "wakes a silo once its query is whole"),
    request_fields=_OBJECT,
    answer_fields="stored",
    only_for_speed=True,
)

ROUTES = tuple(value for value in list(globals().values()) if isinstance(value, Route))

_CONSTANT, _SUPERLINK = "flwr.supercore.constant", "flwr.superlink.cli.flower_superlink"
_COMMON, _INFLATABLE = "flwr.common.constant", "flwr.supercore.inflatable.inflatable"
NAMES = (
    PythonName("flwr.superlink.main", "create_app", "the SuperLink as an app", "config superlink_lifespan_class"),
    PythonName(_SUPERLINK, "_parse_superlink_lifespan_config", "options of `flower-superlink`"),
    PythonName(_SUPERLINK, "SuperLinkLifespan", "services of that app", "config state_factory"),
    PythonName(
        *("flwr.supercore.interceptors", "SuperExecAuthHttpInterceptor"),
        "the executor's secret, without which nobody gets a task",
        *("master_secret protected_methods", "intercept"),
    ),
    PythonName(_CONSTANT, "TASK_TOKEN_HEADER", "a task's token in a request", value="flwr-task-token"),
    PythonName(_CONSTANT, "FLEET_HTTP_PUBLIC_KEY_HEADER", "key that signed a request", value="flwr-public-key"),
    PythonName(_CONSTANT, "FLEET_HTTP_SIGNATURE_HEADER", "its signature", value="flwr-signature"),
    PythonName(_COMMON, "TIMESTAMP_HEADER", "the time that was signed", value="flwr-timestamp"),
    PythonName(_COMMON, "SUPERLINK_NODE_ID", "the server's node", value=1),
    PythonName(
        *(_COMMON, "ErrorCode", "why a silo's reply is an error"),
        attributes="CLIENT_APP_RAISED_EXCEPTION CLIENT_APP_CRASHED MESSAGE_UNAVAILABLE REPLY_MESSAGE_UNAVAILABLE "
        "NODE_UNAVAILABLE",
    ),
    PythonName(
        *("flwr.supercore.error", "ApiErrorCode", "why a request is refused"),
        attributes="RUN_ID_NOT_FOUND FLEET_NODE_ACTIVATION_FAILED NODE_NOT_FOUND",
    ),
    PythonName("flwr.cli.build", "build_fab_from_files", "the bundle that names fedpriv's app", "files"),
    PythonName(
        *(f"{_INFLATABLE}_utils", "inflate_object_from_contents", "a query from its objects"),
        "object_id object_contents",
    ),
    PythonName(f"{_INFLATABLE}_object", "InflatableObject", "objects of a reply", attributes="children deflate"),
    PythonName("flwr.app.message.message", "make_message", "a message with metadata of its own", "metadata"),
    PythonName("flwr.supercore.run", "Run", "a run of the simulated grid", attributes="create_empty"),
    PythonName(
        *("flwr.supercore.task_identity", "TaskIdentity", "who sends, in the simulated grid"),
        attributes="run_id node_id task_id",
    ),
    PythonName("flwr.common.logger", "log", "the server's log, which `flwr log` shows", "level msg"),
)


def find_faults(rows: Iterable[PythonName | Route]) -> list[str]:
    """Return one difference of the installed Flower for each of these rows from which it differs."""
    return [fault for row in rows if (fault := row.find_fault()) is not None]


def check_names(rows: Sequence[PythonName | Route] = (*NAMES, *ROUTES)) -> list[str]:
    """Refuse an installed Flower that differs in a row that is not only for speed.

    Guarantee: if this function returns, the installed Flower has the name, or the request and the answer, of every
    row that is a protection, or without which nothing works.

    Returns:
        Differences that only cost speed.

    Raises:
        InputError: The installed Flower differs in a row that is not only for speed.
    """
    speed_rows = [row for row in rows if isinstance(row, Route) and row.only_for_speed]
    if differences := find_faults(row for row in rows if row not in speed_rows):
        raise InputError(
            f"Flower {metadata.version('flwr')}: {differences[0]}, which fedpriv needs; install a Flower that it "
            f"was tested with: pip install 'flwr=={TESTED_VERSIONS[-1]}.*'"
        )
    return find_faults(speed_rows)
