"""A deployed server that has silos evaluate: nothing is noised twice, and no key outlives the run."""

import itertools
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor

from fedpriv.addons.services.deployment import write_silos
from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.clients.app import app as client_app
from fedpriv.clients.simulated import make_client_app
from fedpriv.core.errors import RunError
from fedpriv.data.partition import counted_mask
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.loss.objective import Records
from fedpriv.plan.task import load_public_task
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.protocol.messages import EVALUATE, read_tensor, release_content
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.server import grid as patient_grid
from fedpriv.server.app import deploy_cell, run_cell
from fedpriv.server.journal import ServerJournal
from fedpriv.server.strategy import JournalEntry
from fedpriv.silo.demo import prepare_silos
from fedpriv.silo.guard import Guard
from fedpriv.silo.policy import read_policy
from tests.conftest import small_tree
from tests.data.tables import rows, table_tree, write_csv
from tests.server.deployed import KilledError
from tests.silo.evaluated import ASKED, guards_of, write_tested
from tests.silo.guarded import start_daemon


class Heard(RunObserver):
    """What a server says."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.result: CellOutcome | None = None

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append(dict(metrics))

    def finished(self, place: int, finished: CellOutcome) -> None:
        self.result = finished


class Bound:
    """A guard, asked about one scenario."""

    def __init__(self, guard: Guard, cell_json: str) -> None:
        self._guard, self._cell = guard, cell_json

    def public_key(self, run: str) -> bytes:
        return self._guard.public_key(run, self._cell)

    def answer(self, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        return self._guard.answer(run, self._cell, t, query, keys)


def cell_of(trust: str, **overrides: Any) -> Cell:
    return resolve_cell(small_tree(algorithm__trust=trust, evaluation=ASKED, **overrides), "test")


def grid_over(policies: list[Path], cell: Cell) -> InProcessGrid:
    """The guards of these policies, in this process."""
    config = make_run_config(cell, Path(), "run")
    guards = [guards_of(path) for path in policies]
    training = [Bound(guard.training, str(config["cell-json"])) for guard in guards]
    tests = [Bound(guard.tests, str(config["cell-json"])) for guard in guards if guard.tests]
    return InProcessGrid(make_client_app(training, "run", tests), len(policies), config)


def guarded_grid(folder: Path, cell: Cell) -> InProcessGrid:
    """Three guards of this process, begun where there are none."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"silo-{silo}.toml" for silo in range(3)]
    for silo, path in enumerate(paths):
        if not path.exists():
            write_tested(folder, silo, trust=cell.algorithm.trust)
    return grid_over(paths, cell)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silos of this process have answered before anybody looks."""
    monkeypatch.setattr(patient_grid, "_POLL_SECONDS", 0.001)


@pytest.mark.parametrize("trust", ["untrusted", "trusted", "secure-aggregation"])
def test_a_deployed_run_with_evaluations_meets_its_mu_target_and_leaves_no_key(tmp_path: Path, trust: str) -> None:
    cell, heard = cell_of(trust, federation__rounds=4), Heard()
    deploy_cell(guarded_grid(tmp_path / "silos", cell), cell, heard, tmp_path / "j")
    assert len(heard.metrics) == 4
    assert heard.result is not None
    streams = heard.result.evaluations
    assert all(stream.mu == pytest.approx(1.0) and stream.integer_release for stream in streams)
    assert [stream.party_name for stream in streams] == (["server"] if trust == "trusted" else ["silos 0-2"])
    assert not list((tmp_path / "j").rglob("noise.key"))
    assert not list((tmp_path / "j").rglob("sums-*"))


@pytest.mark.every(4)
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
@pytest.mark.parametrize("after", [False, True])
def test_a_server_killed_around_any_evaluation_publishes_the_same_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: str, after: bool
) -> None:
    """A second noise over the same sums could be averaged with the first: what is told never changes."""
    cell, told = cell_of(trust, federation__rounds=4), dict[int, dict[str, float]]()
    plain = ServerJournal.record
    for dies_in in (1, 2, 3, 4, 0):
        heard = Heard()

        def record(journal: ServerJournal, t: int, kept: JournalEntry, *rest: Any, last: int = dies_in) -> None:
            dying = journal._folder.name == "evaluation" and t == last
            if dying and not after:
                raise KilledError
            plain(journal, t, kept, *rest)
            if dying:
                raise KilledError

        monkeypatch.setattr(ServerJournal, "record", record)
        grid = guarded_grid(tmp_path / "silos", cell)
        with pytest.raises(KilledError) if dies_in else nullcontext():
            deploy_cell(grid, cell, heard, tmp_path / "j")
        for place, metrics in enumerate(heard.metrics):
            assert told.setdefault(place, metrics) == metrics
    assert len(told) == 4
    assert len({metrics["test_accuracy"] for metrics in told.values()}) == 4


@pytest.mark.slow
def test_evaluation_noise_of_a_trusted_server_is_drawn_from_a_system_key(tmp_path: Path) -> None:
    """Two servers with the same silos' sums, the same scenario and the same seed publish different metrics."""
    cell, losses = cell_of("trusted", run__evaluations=1), []
    for name in ("a", "b"):
        heard = Heard()
        deploy_cell(guarded_grid(tmp_path / name, cell), cell, heard, tmp_path / f"j-{name}")
        losses.append(heard.metrics[0]["test_loss"])
    assert losses[0] != losses[1]


def run_with_releases(cell: Cell, change: Callable[[Message, Tensor], Tensor]) -> None:
    """A simulating server over silos whose evaluations are changed, and bear no seal of the simulation."""

    class Changing(InProcessGrid):
        def _call(self, message: Message) -> Message:
            reply = super()._call(message)
            if message.metadata.message_type != EVALUATE:
                return reply
            changed = change(message, read_tensor(reply.content, "release"))
            return Message(release_content(changed, None), reply_to=message)

    run_cell(Changing(client_app, 3, make_run_config(cell, Path())), cell, Heard())


@pytest.mark.parametrize(
    ("vector", "reason"),
    [
        (torch.zeros(3, dtype=torch.float64), r"a release of shape \(3,\)"),
        (torch.full((2,), torch.nan, dtype=torch.float64), "it sent values that are not finite"),
    ],
)
def test_a_malformed_evaluation_reply_ends_the_run_naming_the_silo(vector: Tensor, reason: str) -> None:
    with pytest.raises(RunError, match=f"silo 1, evaluation 1: {reason}"):
        run_with_releases(
            cell_of("untrusted"),
            lambda message, release: vector if message.metadata.dst_node_id == 1001 else release,
        )


def test_a_simulating_server_refuses_evaluations_of_silos_with_guards() -> None:
    """Its noise would be the seed's: exact sums of test records, for whoever reads the scenario."""
    with pytest.raises(RunError, match="silo 0, evaluation 1: it answers as silos with guards do"):
        run_with_releases(cell_of("trusted", run__arithmetic="integers"), lambda message, release: release)


@pytest.mark.slow
def test_policies_of_a_local_deployment_allow_the_evaluations_of_the_run_but_no_more(tmp_path: Path) -> None:
    """The silos that `--engine deployment` starts: with little noise they measure what a simulation does."""
    quiet = {"evaluation": {"records": [20, 30, 40], "mu": 2000.0}, "run__per_silo": True}
    cell = resolve_cell(small_tree(**quiet, privacy__rho=None, privacy__mu=1000.0), "test")
    heard = Heard()
    policies = write_silos(cell, tmp_path / "state", tmp_path / "home")
    deploy_cell(grid_over(policies, cell), cell, heard, tmp_path / "j")
    simulated = Heard()
    run_cell(InProcessGrid(client_app, 3, make_run_config(cell, Path())), cell, simulated)
    for name, value in simulated.metrics[-1].items():
        tolerance = 0.3 if "loss" in name else 0.06  # another noise, in the model too
        assert heard.metrics[-1][name] == pytest.approx(value, abs=tolerance), name
    wider = cell.model_copy(update={"run": cell.run.model_copy(update={"evaluations": 5})})
    guard = guards_of(policies[0]).tests
    assert guard is not None
    assert heard.result is not None
    with pytest.raises(RunError, match="the scenario has 5 evaluations, allowed are 4"):
        guard.answer("other", json.dumps(wider.canonical_data()), 1, torch.from_numpy(heard.result.model))


def test_prepared_hospitals_evaluate_on_test_rows_of_their_tables(tmp_path: Path) -> None:
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()))
    sites = Counter(row["hospital"] for row in rows())  # a third of either's rows are for testing
    tree["evaluation"] = {"records": [sites["north"], sites["south"]], "mu": 2000.0}
    tree["run"]["per_silo"] = True
    tree["privacy"] = {"relation": "zero-out", "mu": 1000.0}
    seed = tree.pop("seed")
    tree["sweep"] = {"seeds": [seed]}
    scenario = parse_scenario(tree, "test")
    cell, heard = scenario.points[0].cell, Heard()
    policies = [folder / "policy.toml" for folder in prepare_silos(scenario, tmp_path / "silos", run_count=1)]
    (tmp_path / "t.csv").unlink()  # the server has no table
    deploy_cell(grid_over(policies, cell), cell, heard, tmp_path / "j")
    assert heard.result is not None
    model, objective = torch.from_numpy(heard.result.model), load_public_task(cell).objective
    for policy, name in zip(policies, ("north", "south"), strict=True):
        own = read_policy(policy).load_shard().test
        assert own is not None
        records = own.model_records(cell)
        there = torch.from_numpy(counted_mask(records.labels.numpy()))
        accuracy = objective.evaluate(model, Records(*(column[there] for column in records))).accuracy
        assert heard.metrics[-1][f"test_accuracy_at_{name}"] == pytest.approx(float(accuracy), abs=0.01)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    started = [start_daemon(write_tested(tmp_path, number)) for number in range(3)]
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_evaluations_complete_through_guard_processes_that_are_killed_and_restarted(
    tmp_path: Path, daemons: list["subprocess.Popen[str]"]
) -> None:
    """The real ClientApp and sockets; a guard is killed hard twice, before an evaluation and before a round."""
    cell, sent = cell_of("untrusted"), itertools.count(1)

    class Guarded(InProcessGrid):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            for context in self._contexts.values():
                context.node_config["guard"] = str(tmp_path / f"{context.node_config['partition-id']}.sock")

        def push_messages(self, messages: Any) -> Any:
            if next(sent) in (4, 6):
                os.kill(daemons[1].pid, signal.SIGKILL)
                daemons[1].wait()
                daemons[1] = start_daemon(tmp_path / "silo-1.toml")
            return super().push_messages(messages)

    heard = Heard()
    deploy_cell(Guarded(client_app, 3, make_run_config(cell, Path(), "run")), cell, heard, tmp_path / "j")
    assert len(heard.metrics) == 4
    assert heard.result is not None
