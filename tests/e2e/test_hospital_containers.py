"""Four hospitals in containers, as docs/hospitals.md says: to each its own CSV file, policy, guard and ledger.

Takes a Docker daemon, minutes, and the data set `heart-hospitals`, fetched: `make e2e`.
"""

import json
from collections.abc import Iterator

import pytest

from fedpriv.core.errors import InputError
from fedpriv.data.fetch import default_data_root
from fedpriv.data.named import load
from tests.e2e.checkout import Containers, prepared
from tests.e2e.docker_host import Docker

SCENARIO = "scenarios/heart-hospitals.toml"
CHOSEN = ("--set", "seeds=[42]", "--set", "privacy.epsilon=1.0")
TRAINING, TEST = (200, 171, 30, 85), (104, 89, 16, 45)

pytestmark = pytest.mark.containers


@pytest.fixture(scope="module")
def hospitals(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    try:
        load("heart-hospitals")
    except InputError as reason:
        pytest.skip(f"no containers of hospitals here: {reason}")
    with prepared(
        docker,
        tmp_path_factory.mktemp("hospitals"),
        *(SCENARIO, *CHOSEN, "--runs", "1"),
        FEDPRIV_DATA=str(default_data_root()),
        COMPOSE_FILE="docker-compose.hospitals.yml",
    ) as ready:
        yield ready


def test_only_the_guard_container_of_a_hospital_contains_its_rows(hospitals: Containers) -> None:
    """Asked from inside; a hospital's name stands in every row of its own file."""
    names = set()
    count = "wc -l < /silo/shard.csv; tail -n +2 /silo/shard.csv | cut -d , -f 1 | sort -u"
    for silo in range(4):
        asked = hospitals.compose("run", "--rm", "--no-deps", f"guard-{silo}", "sh", "-c", count)
        lines, *found = asked.stdout.split("\n")
        assert int(lines) == 1 + TRAINING[silo] + TEST[silo], asked.stderr
        (name,) = filter(None, found)
        names.add(name)
        node = hospitals.compose("run", "--rm", "--no-deps", f"node-{silo}", "find", "/", "-name", "shard.csv")
        assert node.stdout == ""
    assert len(names) == 4
    assert (hospitals.checkout / "docker-compose.yml").read_text().count("\n  guard-") == 3  # left as it was


def test_four_hospital_containers_train_once_and_then_refuse_for_lack_of_budget(hospitals: Containers) -> None:
    done = hospitals.compose("ps", "--quiet")
    assert done.returncode == 0, done.stderr
    first = hospitals.up(SCENARIO)
    assert first.returncode == 0, first.stdout[-3000:]
    results = hospitals.results("heart-hospitals")
    assert results["complete"]
    (cell,) = results["cells"]
    print(json.dumps({key: cell[key] for key in ("test_accuracy_mean_of_silos", "mu", "epsilon", "wall_seconds")}))
    rows = sum(TRAINING + TEST)  # those for testing keep their places, as zeros
    assert (cell["engine"], cell["silos"], cell["rounds"], cell["records"]) == ("deployment", 4, 50, rows)
    assert (cell["noise"], cell["missed"]) == ("release", {})
    assert cell["epsilon"] == pytest.approx(1.0)
    assert cell["test_accuracy_mean_of_silos"] > 0.70  # "ill" to everybody has 64.0; 80.2 ± 1.2 in simulation
    for silo in range(4):
        status = hospitals.compose(
            "run", "--rm", "--no-deps", f"guard-{silo}", "fedpriv", "silo", "status", "/silo/policy.toml"
        )
        assert status.returncode == 0, status.stderr
        assert "50" in status.stdout, status.stdout

    (hospitals.checkout / "runs" / "heart-hospitals").rename(hospitals.checkout / "runs" / "first")
    again = hospitals.up(SCENARIO)
    assert again.returncode != 0
    assert "the budget is" in again.stdout, again.stdout[-3000:]
