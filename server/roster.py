"""Which node is which silo, in a simulation, where all nodes are there from the start and stay."""

import time

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedpriv.errors import RunError, printable
from fedpriv.protocol.messages import ROSTER, number_in

_POLL_SECONDS = 0.1  # between looks for nodes that have not connected yet


def learn_roster(grid: Grid, silos: int, timeout: float) -> list[int]:
    """The node id of silo 0, 1, …; RunError if a silo has no node, or two, or the wait is over."""
    nodes = _wait_for_nodes(grid, silos, timeout)
    found: dict[int, int] = {}
    for reply in grid.send_and_receive([Message(RecordDict(), node, ROSTER) for node in nodes], timeout=timeout):
        if reply.has_error():
            raise RunError(f"a node failed to say which silo it is: {printable(str(reply.error.reason))}")
        enter(found, silos, number_in(reply.content, "metrics", "silo"), reply.metadata.src_node_id)
    missing = sorted(set(range(silos)) - set(found))
    if missing:
        raise RunError(f"no node says it is silo {', '.join(map(str, missing))}")
    return [found[silo] for silo in range(silos)]


def enter(found: dict[int, int], silos: int, silo: int, node: int) -> None:
    """Note which node a silo is; RunError for a silo that does not exist or is there twice."""
    if silo in found or not 0 <= silo < silos:
        raise RunError(f"a node says it is silo {silo}: expected each of 0 … {silos - 1} once")
    found[silo] = node


def _wait_for_nodes(grid: Grid, silos: int, timeout: float) -> list[int]:
    deadline = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < silos:
        if time.monotonic() > deadline:
            raise RunError(f"{len(nodes)} of {silos} silos were connected after {timeout:.0f} s")
        time.sleep(_POLL_SECONDS)
    if len(nodes) > silos:
        raise RunError(f"{len(nodes)} nodes are connected, the scenario has {silos} silos")
    return nodes
