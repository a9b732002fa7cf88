"""A sweep on two Ray nodes of this machine, one of which is lost in the middle: the results are one process's."""

from pathlib import Path
from typing import Any

import pytest

from fedpriv.claims.outcome import RunObserver
from fedpriv.engines.workers import Workers
from fedpriv.scenario.load import Scenario, parse_scenario
from fedpriv.study.sweep import RunOptions, run_sweep
from tests.conftest import small_tree
from tests.engines.builders import check_same_folder


def sweep() -> Scenario:
    """Four groups, long enough that each node is in the middle of one when the other is lost."""
    rounds = {"federation.rounds": [1500, 1501, 1502, 1503], "seeds": 2}
    tree = small_tree(
        federation={"silos": 3}, run={"dtype": "float64", "evaluations": 150}, sweep=rounds, seed=None
    )
    return parse_scenario(tree, "test")


class Breaking(RunObserver):
    """Takes a node away as soon as something was computed."""

    def __init__(self, cluster: Any, node: Any) -> None:
        self._cluster, self._node = cluster, node
        self.broken = False

    def advanced(self, rounds: int) -> None:
        if not self.broken:
            self.broken = True
            self._cluster.remove_node(self._node, allow_graceful=False)


@pytest.mark.long
def test_losing_a_ray_node_during_a_sweep_does_not_change_the_results(tmp_path: Path) -> None:
    """Its groups are run again on the node that is left; all bits are those of one process."""
    pytest.importorskip("ray", reason="needs pip install 'fedpriv[ray]'")
    from ray.cluster_utils import Cluster

    alone = run_sweep(sweep(), RunOptions(out=tmp_path / "alone"))
    cluster = Cluster()
    try:
        resources: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 2**27, "include_dashboard": False}
        nodes = [cluster.add_node(**resources) for _ in range(2)]
        breaking = Breaking(cluster, nodes[1])
        options = RunOptions(out=tmp_path / "both", workers=Workers(address=cluster.address))
        both = run_sweep(sweep(), options, [breaking])
    finally:
        cluster.shutdown()
    assert breaking.broken
    check_same_folder(both, alone)
