"""What a SuperLink has of the one before it: its nodes by their keys, and a list of runs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.superlink.federation import NoOpFederationManager

from fedpriv.core.errors import InputError, RunError
from fedpriv.engines import deployment
from fedpriv.engines.deployment import Progress, follow
from fedpriv.engines.flower_private import kept
from fedpriv.engines.flower_private.control import LostRunError
from fedpriv.engines.flower_private.kept import KeptRuns, create_nodes, forget_node, node_id_of
from fedpriv.engines.superlink import simulating_superlink
from fedpriv.protocol.cell_folder import FolderReader
from fedpriv.rounds.outcome import RunObserver


def state() -> InMemoryLinkState:
    return InMemoryLinkState(NoOpFederationManager(), InMemoryObjectStore())


@pytest.fixture(scope="module")
def keys() -> Mapping[str, bytes]:
    return {f"silo-{silo}": public_key_to_bytes(generate_key_pairs()[1]) for silo in range(2)}


def test_a_supernode_is_the_same_node_after_every_restart(keys: Mapping[str, bytes]) -> None:
    """Was: nodes were forgotten, and a SuperNode's next request refused."""
    lives = [state(), state()]
    for life in lives:
        create_nodes(life, keys)
        for name, key in keys.items():
            assert life.get_node_id_by_public_key(key) == node_id_of(name, key)
        assert life.acknowledge_node_heartbeat(node_id_of("silo-1", keys["silo-1"]), 30.0)  # it goes on beating
    assert {node.name for node in lives[0].get_node_info()} == set(keys)


def test_a_key_that_is_replaced_or_moved_to_another_silo_is_another_node(keys: Mapping[str, bytes]) -> None:
    """Would gain: the place of a silo whose key was revoked."""
    one, two = keys["silo-0"], keys["silo-1"]
    ids = {node_id_of(name, key) for name in keys for key in (one, two)}
    assert len(ids) == 4
    assert node_id_of("silo-0", one + b"\n") == node_id_of("silo-0", one)
    after = state()
    create_nodes(after, {"silo-0": two})
    assert after.get_node_id_by_public_key(one) is None
    assert not after.acknowledge_node_heartbeat(node_id_of("silo-0", one), 30.0)
    assert not after.acknowledge_node_heartbeat(node_id_of("silo-1", two), 30.0)


def test_guarantee_a_key_that_is_forgotten_opens_nothing_whether_its_node_was_there_or_not(
    keys: Mapping[str, bytes],
) -> None:
    """Flower raises for a node that never came; the node of another key stays as it is."""
    for was_there in (True, False):
        life = state()
        create_nodes(life, keys)
        nodes = {name: node_id_of(name, key) for name, key in keys.items()}
        assert life.acknowledge_node_heartbeat(nodes["silo-1"], 30.0)
        if was_there:
            assert life.acknowledge_node_heartbeat(nodes["silo-0"], 30.0)
        forget_node(life, "silo-0", keys["silo-0"])
        assert life.get_node_id_by_public_key(keys["silo-0"]) is None, "who asks is not let in"
        assert not life.acknowledge_node_heartbeat(nodes["silo-0"], 30.0)
        assert not life.activate_node(nodes["silo-0"], 30.0)
        assert [node.node_id for node in life.get_node_info(statuses=["online"])] == [nodes["silo-1"]]
        assert life.get_node_id_by_public_key(keys["silo-1"]) == nodes["silo-1"]


class Runs:
    """A LinkState with these runs."""

    def __init__(self, *runs: Any) -> None:
        self.runs = runs

    def get_run_info(self) -> Any:
        return self.runs


def run(number: int, status: str, sub_status: str = "", finished: str = "") -> Any:
    from flwr.supercore.run import Run, RunStatus

    made = Run.create_empty(number)
    made.status, made.finished_at = RunStatus(status, sub_status, ""), finished
    made.override_config, made.running_at = {"out": "/srv/run"}, "2026-11-23T10:00:00+00:00"
    return made


def test_runs_are_kept_and_those_that_were_under_way_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_EVERY", 0.0)
    path = tmp_path / "runs.json"
    KeptRuns(path).look(cast(Any, Runs(run(7, "running"), run(8, "finished", "completed", "then"))))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [set(each) for each in json.loads(path.read_text())] == [
        {"run", "state", "started", "finished", "folder"}
    ] * 2
    after = KeptRuns(path)
    assert [each["state"] for each in after.earlier()] == [
        "finished:failed (the SuperLink was started again)",
        "finished:completed",
    ]
    monkeypatch.setattr(kept, "_MOST", 3)
    after.look(cast(Any, Runs(*(run(number, "pending") for number in range(10, 12)))))
    assert [each["run"] for each in KeptRuns(path).earlier()] == ["8", "10", "11"]
    assert KeptRuns(None).earlier() == []


@pytest.mark.parametrize("broken", ["{", "[1]", '[{"state": "running"}]', "7"])
def test_a_file_that_is_none_of_ours_is_refused_in_one_line(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(broken)
    path.chmod(0o600)
    with pytest.raises(InputError, match=r"--state .*runs\.json: cannot be used .*; move it away"):
        KeptRuns(path)
    path.write_text("[]")
    path.chmod(0o644)
    with pytest.raises(InputError, match="others can read it; chmod 600"):
        KeptRuns(path)
    with pytest.raises(InputError, match="cannot be written there"):
        KeptRuns(tmp_path / "nowhere" / "runs.json")


class Told(RunObserver):
    """Counts rounds."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def advanced(self, rounds: int) -> None:
        self.rounds.append(rounds)


class Lost:
    """A run of which the SuperLink knows no more."""

    class superlink:  # noqa: N801 - an attribute
        ended = False

    def status(self) -> str:
        raise LostRunError("started again")


def test_a_run_that_the_superlink_lost_is_told_apart_and_rounds_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_STATUS_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "_POLL_SECONDS", 0.0)
    told = Told()
    progress, reader = Progress(told), FolderReader(tmp_path)

    def followed(rounds: str) -> None:
        (tmp_path / "progress").write_text(rounds)
        lost: Callable[[], None] = lambda: None  # noqa: E731
        with pytest.raises(LostRunError):
            follow(cast(Any, Lost()), reader, 0, 9, told, lost, progress)

    for rounds in ("4", "1", "6"):  # the second server begins again, from its journal
        followed(rounds)
    assert told.rounds == [4, 2]


def test_ray_without_flowers_program_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Was: the executor could not start the simulation, and `fedpriv run --engine ray` waited for ever."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with (
        pytest.raises(RunError, match="flwr-simulation is missing: install fedpriv"),
        simulating_superlink(tmp_path),
    ):
        pass
