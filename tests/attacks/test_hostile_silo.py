"""A silo with its own registered key that wants to be another silo, or the SuperLink's owner."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from starlette.testclient import TestClient

from fedpriv.addons.services.flower_private.front import make_superlink_app
from fedpriv.addons.services.flower_private.names import CONTROL_PREFIX, FLEET_PREFIX
from fedpriv.addons.services.superlink_process import PathFilter
from fedpriv.server.grid import PatientGrid
from tests.e2e.federation import federation, finish
from tests.engines.flower_link import link_options
from tests.server.test_patient_grid import ScriptedGrid, release

Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]


@pytest.fixture
def keys() -> Mapping[str, Keys]:
    return {f"silo-{silo}": generate_key_pairs() for silo in range(2)}


@pytest.fixture
def app(tmp_path: Path, keys: Mapping[str, Keys]) -> Any:
    """The whole SuperLink, as `fedpriv superlink` serves it, without a network."""
    link = make_superlink_app(link_options(tmp_path)[1])
    asyncio.run(link.register_nodes({name: public_key_to_bytes(public) for name, (_, public) in keys.items()}))
    return link.app


def client(kind: type[ProtobufClient], app: Any, prefix: str, *interceptors: Any, name: str = "flwr CLI") -> Any:
    """One of Flower's own clients, on the listener that serves `prefix`."""
    version = RuntimeVersionHttpInterceptor(component_name=name)
    made = kind("http://testserver", interceptors=[version, *interceptors])
    made._client = TestClient(PathFilter(app, prefix), raise_server_exceptions=False)
    return made


def fleet(app: Any, pair: Keys) -> FleetHttpClient:
    made = client(FleetHttpClient, app, FLEET_PREFIX, NodeAuthHttpInterceptor(*pair), name="SuperNode")
    assert isinstance(made, FleetHttpClient)
    return made


def test_a_silo_reaches_neither_the_control_nor_the_runtime_api(app: Any) -> None:
    """Would gain: code in the SuperLink, beside its TLS key and the key of the server's noise."""
    control = client(ControlHttpClient, app, FLEET_PREFIX)
    runtime = client(RuntimeHttpClient, app, FLEET_PREFIX, name="SuperExec")
    for ask in (
        lambda: control.StartRun(StartRunRequest()),
        lambda: control.ListRuns(ListRunsRequest()),
        lambda: control.RegisterNode(RegisterNodeRequest()),
        lambda: runtime.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"])),
    ):
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            ask()
    owner = client(ControlHttpClient, app, CONTROL_PREFIX)
    assert owner.ListRuns(ListRunsRequest()).run_dict == {}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/..%2fcontrol/list-runs",
        "//v1/control/list-runs",
        "/v1/fleet//v1/control/list-runs",
        "/V1/CONTROL/list-runs",
        "/v1/control/list-runs/",
        "/openapi.json",
        "/docs",
    ],
)
def test_no_path_encoding_bypasses_the_filter_of_the_fleet_api(app: Any, path: str) -> None:
    """Would gain: the Control API by a path that is compared in one way and routed in another."""
    with TestClient(PathFilter(app, FLEET_PREFIX)) as asking:
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            assert asking.request(method, path, follow_redirects=False).status_code in (404, 405), method


def test_a_node_with_an_unregistered_key_cannot_register_or_activate(app: Any) -> None:
    """Would gain: a silo's place in every run, and the say in what the sum is."""
    stranger = generate_key_pairs()
    key = public_key_to_bytes(stranger[1])
    with pytest.raises(httpx.HTTPStatusError):
        fleet(app, stranger).RegisterNode(RegisterNodeFleetRequest(public_key=key))
    with pytest.raises(httpx.HTTPStatusError):
        fleet(app, stranger).ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30.0))


def test_a_silo_has_the_name_that_its_public_key_was_registered_under(app: Any, keys: Mapping[str, Keys]) -> None:
    nodes = {}
    for name, pair in keys.items():
        request = ActivateNodeRequest(public_key=public_key_to_bytes(pair[1]), heartbeat_interval=30.0)
        nodes[name] = fleet(app, pair).ActivateNode(request).node_id
    state = app.app.state.linkstate_factory.state()
    assert {info.name: info.node_id for info in state.get_node_info()} == nodes


class Registered(ScriptedGrid):
    """Nodes with the names that their keys were registered with; what they say is in `silo_of`."""

    def __init__(self, silo_of: dict[int, int], names: dict[int, str]) -> None:
        super().__init__(silo_of, release)
        self.names = names

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, name=name or None) for node, name in self.names.items()]


def test_registered_names_and_not_node_replies_decide_which_silo_a_node_is() -> None:
    """Would gain: another silo's place, and with it that silo's messages."""
    liars = Registered({7: 1, 8: 0, 9: 1}, {7: "silo-0", 8: "silo-1", 9: "", 10: "silo-1x"})
    assert PatientGrid(liars, has_registered_nodes=True).roster(2, 5.0) == [7, 8]
    assert next(liars.numbers) == 1  # nobody was asked


@pytest.mark.deployment
def test_a_federation_ignores_a_supernode_that_claims_to_be_another_silo(tmp_path: Path) -> None:
    """Would gain: silo 0's place; before, the run ended in "a node says it is silo 0", or had silo 2 twice."""
    with federation(tmp_path, "federation.rounds=2") as fed:
        fed.silos[2].number = 0
        fed.start_silos()
        running = fed.run()
        fed.wait_for_round(1, running)
        silo_keys, server_key = fed.silo_keys(fed.token()), fed.server_key()
        finish(running)
        assert np.array_equal(fed.model(), fed.replay(silo_keys, server_key))
