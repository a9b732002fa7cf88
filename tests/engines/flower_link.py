"""A SuperLink of fedpriv's with two silos, and Flower's own grid of a server, without a network."""

from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict
from flwr.proto.runtime_pb2 import PullTaskInputRequest
from flwr.serverapp import Grid
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid.http_grid import HttpGrid
from starlette.testclient import TestClient

from fedpriv.addons.services.certificates import (
    SECRET_FILE,
    make_node_key,
    prepare_isolation,
    read_node_key,
    tls_options,
)
from fedpriv.addons.services.flower_private import executor, silo_node
from fedpriv.addons.services.flower_private.control import ApiClient
from fedpriv.addons.services.flower_private.front import SuperLinkApp, make_superlink_app
from fedpriv.addons.services.flower_private.names import (
    ACQUIRE_TASK,
    CONTROL_PREFIX,
    FLEET_PREFIX,
    REGISTER_NODE,
    RUNTIME_PREFIX,
    START_RUN,
)
from fedpriv.addons.services.superlink_process import PathFilter

Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]
PYPROJECT = """\
[project]
name = "app"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "fedpriv"
[tool.flwr.app.components]
serverapp = "fedpriv.server.app:app"
clientapp = "{app}"
[tool.flwr.app.config]
out = ""
protocol = 0
fedpriv = "x"
run-token = ""
cell-json = ""
"""


def link_options(folder: Path) -> tuple[Path, list[str]]:
    """The executor's secret, and the options with which `fedpriv superlink` starts Flower's."""
    return folder / SECRET_FILE, [*prepare_isolation(folder), *tls_options(folder), "--enable-supernode-auth"]


class Link:
    """The SuperLink, its Control API, its silos' nodes and its run's grid."""

    def __init__(self, folder: Path, app: str = "fedpriv.clients.app:app") -> None:
        self.folder = folder
        self.secret, options = link_options(folder)
        self.link: SuperLinkApp = make_superlink_app(options)
        self.control = ApiClient(self.client(CONTROL_PREFIX))
        self.nodes = [self._register(silo) for silo in range(2)]
        self.requests: list[str] = []
        content, _ = silo_bundle(app)
        request = START_RUN.request_type()
        request.fab.content = content
        self.run = int(self.control.ask(START_RUN, request).run_id)

    def client(self, prefix: str) -> httpx.Client:
        return TestClient(PathFilter(self.link.app, prefix), raise_server_exceptions=True)

    def _register(self, silo: int) -> int:
        node = self.folder / f"node-{silo}"
        node.mkdir()
        make_node_key(node / "node.key", node / "node.pub")
        (node / "ca.crt").write_bytes((self.folder / "ca.crt").read_bytes())
        key = public_key_to_bytes(read_node_key(node / "node.key").public_key())
        request = REGISTER_NODE.request_type(public_key=key, name=f"silo-{silo}")
        return int(self.control.ask(REGISTER_NODE, request).node_id)

    def fleet(self, silo: int) -> silo_node.FleetClient:
        """Silo's connection, whose requests are noted."""
        fleet = silo_node.FleetClient("superlink", self.folder / f"node-{silo}")
        client = self.client(FLEET_PREFIX)
        client.event_hooks = {"request": [lambda request: self.requests.append(request.url.path)]}
        fleet._client.client = client
        return fleet

    def signing_client(self, secret: bytes) -> ApiClient:
        """A client of the Runtime API, as an executor with this secret has it."""
        methods = [executor._SIGNED_METHOD]
        signer = executor.SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods)
        client = self.client(RUNTIME_PREFIX)
        return ApiClient(client, lambda _, request: executor._signed_headers(signer, request))

    def token(self) -> str:
        """Token of the run's server."""
        request = ACQUIRE_TASK.request_type(supported_task_types=["flwr-serverapp"])
        return str(self.signing_client(self.secret.read_bytes()).ask(ACQUIRE_TASK, request).token)

    def grid(self, token: str) -> HttpGrid:
        """Flower's own grid, as a ServerApp has it."""
        grid = HttpGrid("superlink", token=token)
        interceptors = [RuntimeTokenHttpInterceptor(token=token)]
        grid._client = RuntimeHttpClient("http://testserver", interceptors=interceptors)
        grid._client._client = self.client(RUNTIME_PREFIX)
        grid._client.PullTaskInput(PullTaskInputRequest())  # with which the run goes on
        grid.set_run(Run.create_empty(self.run))
        return grid


def silo_bundle(app: str) -> tuple[bytes, str]:
    from flwr.cli.build import build_fab_from_files

    content, name = build_fab_from_files({"pyproject.toml": PYPROJECT.format(app=app).encode()})
    return content, name


def send(grid: Grid, content: RecordDict, *nodes: int) -> list[str]:
    """Numbers of queries to these nodes."""
    return list(grid.push_messages([Message(content, node, "train") for node in nodes]))
