"""The table of Flower's names, beside the code and beside other Flowers."""

import ast
import asyncio
import functools
import os
import subprocess
import tomllib
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest

from fedpriv.addons.services.flower_private import executor, front, names
from fedpriv.addons.services.flower_private.names import (
    GET_FAB,
    LIST_RUNS,
    NAMES,
    PULL_MESSAGES,
    PUSH_MESSAGES,
    ROUTES,
    SERVER_PULL_MESSAGES,
    PythonName,
    Route,
    check_names,
    find_faults,
)
from fedpriv.addons.services.service import script_path
from tests.engines.builders import ROOT, refusal
from tests.engines.flower_link import link_options
from tests.forks import run_in_forks

PARTS = ("app", "serverapp", "serverapp.strategy", "clientapp", "clientapp.mod", "simulation")
PUBLIC = {f"flwr.{part}" for part in PARTS}
MOST = 40


@functools.cache
def product() -> list[tuple[Path, str]]:
    paths = [path for room in ("fedpriv", "server", "clients") for path in sorted((ROOT / room).rglob("*.py"))]
    return [(path, path.read_text(encoding="utf-8")) for path in paths]


def trees(names: Collection[str]) -> Iterator[tuple[Path, ast.Module]]:
    """The files whose text has one of the names."""
    return ((path, ast.parse(text)) for path, text in product() if any(name in text for name in names))


def imported(tree: ast.Module) -> Iterator[str]:
    """Every name of Flower that a file imports, whether at its top or in a function, or names in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "flwr":
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module not in PUBLIC)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "flwr")


def test_the_table_of_flower_names_lists_exactly_the_names_that_the_code_imports() -> None:
    used = {name for _, tree in trees(["flwr"]) for name in imported(tree)}
    assert used == {f"{row.module}.{row.name}" for row in NAMES}


def test_every_flower_route_is_used_and_message_types_occur_in_one_file_only() -> None:
    constants = {name for name, value in vars(names).items() if isinstance(value, Route)}
    assert len(constants) == len(ROUTES)
    used: set[str] = set()
    for path, tree in trees({"flwr.proto", *constants}):
        if path.name == "names.py":
            continue
        used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & constants
        strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        assert not [text for text in strings if isinstance(text, str) and text.startswith("flwr.proto")], path
    assert used == constants


def test_the_table_of_flower_names_is_short_and_gives_reasons() -> None:
    assert len(NAMES) + len(ROUTES) <= MOST
    assert all(row.reason for row in (*NAMES, *ROUTES))


def test_the_package_does_not_monkeypatch_flower() -> None:
    for path, text in product():
        assert "mock.patch" not in text, path
        assert "patch.object" not in text, path


def test_the_installed_flower_has_every_name_of_the_table() -> None:
    assert find_faults((*NAMES, *ROUTES)) == []
    assert check_names() == []


PULL = "/v1/fleet/", "x", "fleet.PullMessages", "."


def a_function(one: int, two: int, more: int = 0) -> None:
    """A stand-in for one of Flower's."""


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (PythonName("flwr.gone", "x", "."), "flwr.gone.x is gone"),
        (PythonName("flwr.app", "Massage", "."), "flwr.app.Massage is gone"),
        (PythonName("flwr.app", "Message", ".", attributes="metadata x"), "flwr.app.Message.x is gone"),
        (PythonName("flwr.common.constant", "SUPERLINK_NODE_ID", ".", value=2), "SUPERLINK_NODE_ID is 1, not 2"),
        (PythonName(__name__, "a_function", ".", "one"), "a_function takes one, two, more"),
        (PythonName(__name__, "a_function", ".", "two one"), "a_function takes one, two, more"),
        (PythonName("flwr.common.constant", "SUPERLINK_NODE_ID", ".", "one"), "SUPERLINK_NODE_ID is no function"),
        (Route("/v1/fleet/", "x", "gone.X", "."), "flwr.proto gone.X of /v1/fleet/x is gone"),
        (Route("/v1/fleet/", "x", "fleet.Pull", "."), "flwr.proto fleet.Pull of /v1/fleet/x is gone"),
        (Route(*PULL, "node.node_id node.name"), "PullMessagesRequest.node.name of /v1/fleet/x is gone"),
        (Route(*PULL, "node.node_id.x"), "PullMessagesRequest.node.node_id.x of /v1/fleet/x is gone"),
        (
            Route(*PULL, "", "messages_list.metadata.silo"),
            "PullMessagesResponse.messages_list.metadata.silo of /v1/fleet/x is gone",
        ),
    ],
)
def test_a_flower_with_a_missing_or_changed_name_is_refused(row: PythonName | Route, fault: str) -> None:
    """Guarantee: a Flower that lacks a protection starts nothing."""
    assert fault in str(row.find_fault())
    with refusal(r"Flower 1\.\d+\.\d+: .*, which fedpriv needs; install a Flower that"):
        check_names([*NAMES, row, *ROUTES])


def test_a_flower_function_with_an_additional_optional_parameter_is_accepted() -> None:
    assert PythonName(__name__, "a_function", ".", "one two").find_fault() is None


def test_a_changed_optional_flower_route_only_disables_long_polling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Was: any change of Flower's, or none was noticed."""

    def make_app_without(route: Route) -> front.SuperLinkApp:
        monkeypatch.setattr(Route, "find_fault", lambda self: "it is gone" if self is route else None)
        return front.make_superlink_app(link_options(tmp_path)[1])

    link = make_app_without(SERVER_PULL_MESSAGES)
    assert "rounds take seconds longer: Flower has changed (it is gone)" in caplog.messages
    assert list(link.app._handlers) == [PUSH_MESSAGES.path]
    for route in (PULL_MESSAGES, PUSH_MESSAGES):  # without which no node gets a query, or none replies
        with refusal("it is gone, which fedpriv needs"):
            make_app_without(route)


def test_the_table_has_every_flower_field_that_a_node_or_a_list_of_runs_uses() -> None:
    """Was: a Flower without one of them started, and no silo answered."""
    assert "hash_str" in GET_FAB.request_fields.split()
    assert "messages_list.content" in PUSH_MESSAGES.request_fields.split()
    assert "run_dict.value.override_config.value.string" in LIST_RUNS.answer_fields.split()


GONE = ("create_app", "SuperExecAuthHttpInterceptor")
PROGRAMS = (executor.SERVERAPP, executor.SIMULATION, executor.CLIENTAPP, "flower-supernode")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, "subprocess.CompletedProcess[str]"]:
    """What fedpriv's superlink shows on a Flower without a name, and what Flower's programs show for --help."""
    rows = {row.name: row for row in NAMES if row.name in GONE}
    scripts = {script.name: script for script in metadata.entry_points(group="console_scripts")}
    modules = [row.module for row in rows.values()] + [scripts[program].module for program in PROGRAMS]
    programs = {}
    for name, row in rows.items():
        words = ["fedpriv", "superlink", "--control", "c.sock", "--simulation"]
        programs[name] = f"del sys.modules[{row.module!r}].{name}\nsys.argv = {words}\n"
        programs[name] += "from fedpriv.cli import main\nmain()"
    for program in PROGRAMS:
        module, attribute = scripts[program].module, scripts[program].attr
        programs[program] = f"sys.argv = [{program!r}, '--help']\nsys.modules[{module!r}].{attribute}()"
    shared = f"import sys, {', '.join(modules)}\nassert 'fedpriv' not in sys.modules"
    folder = tmp_path_factory.mktemp("flower")
    done = run_in_forks(shared, *programs.values(), folder=folder)
    assert list(folder.iterdir()) == []
    return dict(zip(programs, done, strict=True))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", GONE)
def test_a_superlink_on_an_incompatible_flower_is_refused_in_one_line(
    name: str, answers: dict[str, "subprocess.CompletedProcess[str]"]
) -> None:
    """A stub of the next version, with a name gone: exit code 2, no traceback, and no socket of any kind."""
    (row,) = [row for row in NAMES if row.name == name]
    done = answers[name]
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert f"{row.module}.{name} is gone, which fedpriv needs; install a Flower that it was tested with" in line


def test_the_environment_variable_that_opens_a_flower_grpc_api_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would gain: the Control API over gRPC, on a port of its own, for everybody."""
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    with refusal("FLWR_INTERNAL_GRPC_CONTROL_API: opens an API"):
        front.make_superlink_app(link_options(tmp_path)[1])


def test_every_started_flower_program_is_installed_and_accepts_the_used_options(
    tmp_path: Path, answers: dict[str, "subprocess.CompletedProcess[str]"]
) -> None:
    options = "isolation superexec-auth-secret-file superlink node-config root-certificates port insecure"
    node_options = [f"--{option}" for option in (*options.split(), "auth-supernode-private-key")]
    commands = [
        [*executor.task_command(name, "127.0.0.1:1", tmp_path, 1), "--token-file"] for name in PROGRAMS[:3]
    ]
    for program, words in zip(PROGRAMS, (*commands, node_options), strict=True):
        assert os.access(script_path(program), os.X_OK)
        assert answers[program].returncode == 0
        assert all(word in answers[program].stdout for word in words if word.startswith("--")), program


def app_with(statuses: dict[str, int]) -> object:
    """A SuperLink's app that answers POST with these statuses, 401 elsewhere, and GET with 405."""

    async def app(scope: dict[str, str], _receive: object, send: object) -> None:
        status = 405 if scope["method"] == "GET" else statuses.get(scope["path"], 401)
        await send({"type": "http.response.start", "status": status, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]

    return app


@pytest.mark.parametrize(
    ("statuses", "registered", "fault"),
    [
        ({}, True, None),
        ({PULL_MESSAGES.path: 200}, True, "answers /v1/fleet/pull-messages to strangers"),
        ({PULL_MESSAGES.path: 200}, False, None),
        ({"/v1/runtime/acquire-task": 200}, False, "answers /v1/runtime/acquire-task to strangers"),
        ({"/v1/runtime/acquire-task": 500}, True, "answers /v1/runtime/acquire-task to strangers"),
    ],
)
def test_guarantee_a_flower_that_answers_unauthenticated_requests_is_refused(
    statuses: dict[str, int], registered: bool, fault: str | None
) -> None:
    """A Flower that keeps its names, and lets strangers in."""
    link = front.SuperLinkApp(app_with(statuses), long_polling=True)  # type: ignore[arg-type]
    with refusal(fault) if fault is not None else nullcontext():
        asyncio.run(link.check_access(has_registered_keys=registered, has_fleet=True))


def test_the_installed_flower_refuses_unauthenticated_requests_and_a_missing_route_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = front.make_superlink_app(link_options(tmp_path)[1])
    asyncio.run(link.check_access(has_registered_keys=True, has_fleet=True))
    moved = (*ROUTES, Route("/v2/fleet/", "pull-messages", "fleet.PullMessages", "."))
    monkeypatch.setattr(front, "ROUTES", moved)
    with refusal("has no /v2/fleet/pull-messages, which fedpriv needs"):
        asyncio.run(link.check_access(has_registered_keys=True, has_fleet=True))


def test_the_tested_flower_versions_equal_the_declared_dependency_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (flower,) = [package for package in project["dependencies"] if package.startswith("flwr")]
    first, last = names.TESTED_VERSIONS[0], names.TESTED_VERSIONS[-1]
    after = f"1.{int(last.partition('.')[2]) + 1}"
    assert flower == f"flwr>={first},<{after}"
    assert project["optional-dependencies"]["ray"] == [f"flwr[simulation]>={first},<{after}"]
