"""A deployed server whose silo does not answer: it goes on over the same denominators, with the same noise."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from fedpriv.claims.ledger import make_release_streams
from fedpriv.clients.app import app
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.files import PRIVATE_MODE, write_bytes
from fedpriv.core.random import integer_noise_key
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import deployed_strategy
from fedpriv.server.journal import EntrySizes, ServerJournal
from fedpriv.server.strategy import ReleaseStrategy
from tests.conftest import small_tree
from tests.engines.test_engines import run
from tests.server.deployed import plan_with

AWAY = (3, 4, 6)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "dp-sgd", "clip": 1.0, "step": 0.1},
    "tree": {"name": "dp-ftrl", "mechanism": "tree", "clip": 1.0, "step": 0.1},
}


class Losing(InProcessGrid):
    """Silo 1 is away in some rounds: it is never asked, or, with `late`, its answer is lost."""

    late = False
    away: tuple[int, ...] = AWAY

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        lost = [message for message in sent if self._away(message)]
        if not self.late:
            return super().send_and_receive([message for message in sent if message not in lost], timeout=timeout)
        replies = list(super().send_and_receive(sent, timeout=timeout))
        gone = {message.metadata.message_id for message in lost}
        return [reply for reply in replies if reply.metadata.reply_to_message_id not in gone]

    def _away(self, message: Message) -> bool:
        silo = self._contexts[message.metadata.dst_node_id].node_config["partition-id"]
        return silo == 1 and "config" in message.content and message.content["config"]["t"] in self.away


def cell_of(trust: str, name: str, **changes: Any) -> Cell:
    algorithm, privacy = {"trust": trust, **ALGORITHMS[name]}, {"relation": "zero-out", "mu": 2.0}
    tree = small_tree(algorithm=algorithm, privacy=privacy, run__arithmetic="integers", **changes)
    return resolve_cell(tree, "test")


def grid_of(cell: Cell, *, late: bool = False) -> Losing:
    grid = Losing(app, cell.federation.silos, make_run_config(cell, Path()))
    grid.late = late
    return grid


def serve(
    cell: Cell, folder: Path, grid: InProcessGrid, rounds: int = 0, *, min_replies: int | None = 1
) -> ReleaseStrategy:
    plan = plan_with(cell)
    initial = plan.objective.initial()
    with ServerJournal(folder, EntrySizes.from_plan(plan)) as journal:
        strategy = deployed_strategy(plan, initial, journal, min_replies=min_replies)
        strategy.run(grid, num_rounds=rounds)
    return strategy


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("trust", "late"), [("untrusted", False), ("trusted", False), ("trusted", True)])
def test_a_deployed_run_with_absent_silos_equals_the_simulation_bit_for_bit(
    tmp_path: Path, trust: str, late: bool, name: str
) -> None:
    """Bit for bit, with a server that is killed while the silo is away; a trusted one throws late sums away."""
    cell = cell_of(trust, name, deployment={"missing": "continue"})
    away = {"silos": 3, "rounds": 8, "away": {"1": list(AWAY)}}
    (simulated,), _ = run("inprocess", cell_of(trust, name, federation=away))
    write_bytes(tmp_path / "j" / "noise.key", integer_noise_key(cell.seed), PRIVATE_MODE)
    grid = grid_of(cell, late=late)
    for rounds in (3, 5):
        serve(cell, tmp_path / "j", grid, rounds)
    strategy = serve(cell, tmp_path / "j", grid)
    assert strategy.missed_rounds == {1: list(AWAY)} == simulated.cell_outcome.missed
    assert np.array_equal(strategy.model.numpy(), simulated.cell_outcome.model)
    assert make_release_streams(strategy.plan, 8) == make_release_streams(plan_with(cell_of(trust, name)), 8)


def test_a_silo_that_is_away_from_the_first_round_on_is_as_in_a_simulation(tmp_path: Path) -> None:
    """Its message before round 1 is zeros."""

    class Late(Losing):
        away = (1, 2)

    cell = cell_of("untrusted", "tree", deployment={"missing": "continue"})
    federation = {"silos": 3, "rounds": 8, "away": {"1": [1, 2]}}
    (simulated,), _ = run("inprocess", cell_of("untrusted", "tree", federation=federation))
    strategy = serve(cell, tmp_path, Late(app, 3, make_run_config(cell, Path())))
    assert strategy.missed_rounds == {1: [1, 2]}
    assert np.array_equal(strategy.model.numpy(), simulated.cell_outcome.model)


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_a_missing_reply_ends_a_run_that_does_not_allow_missing_silos(tmp_path: Path, trust: str) -> None:
    cell = cell_of(trust, "sgd")
    with pytest.raises(RunError, match="round 3: no reply from silo 1"):
        serve(cell, tmp_path, grid_of(cell), min_replies=None)


def test_a_round_without_any_reply_ends_the_run(tmp_path: Path) -> None:
    """Noise alone would be released for nothing: the silos are down, or the server is."""

    class Deaf(Losing):
        def _away(self, message: Message) -> bool:
            return "config" in message.content

    cell = cell_of("trusted", "sgd", deployment={"missing": "continue"})
    with pytest.raises(RunError, match="round 1: no reply from silo 0, 1, 2"):
        serve(cell, tmp_path, Deaf(app, 3, make_run_config(cell, Path())))


def test_the_noise_of_a_trusted_server_does_not_shrink_with_absent_silos(tmp_path: Path) -> None:
    """Guarantee: as much noise, over the same number of records, whoever answered; 6 standard errors of 7,850."""
    cell = cell_of("trusted", "sgd", deployment={"missing": "continue"})
    plan = plan_with(cell)
    grid = grid_of(cell)
    serve(cell, tmp_path, grid)
    with ServerJournal(tmp_path, EntrySizes.from_plan(plan)) as journal:
        entries = [journal.read_entry(t) for t in range(1, 9)]
    for entry in entries:
        assert entry is not None
        deviation = float(entry.noisy_values.double().std()) / plan.required_exact_plan.claim.sigma
        assert abs(deviation - 1.0) < 6.0 * (2 * 7850) ** -0.5 + 0.02  # records are a small part of it
        assert torch.isfinite(entry.noisy_values.double()).all()


def test_fewer_replies_than_the_required_minimum_end_the_run(tmp_path: Path) -> None:
    """Of three silos one is away in round 3: two are enough, and three are not."""
    for least_silos in (2, 3):
        cell = cell_of("trusted", "sgd", deployment={"missing": "continue", "least_silos": least_silos})
        least = cell.deployment.min_replies
        assert least == least_silos
        if least == 2:
            serve(cell, tmp_path / "two", grid_of(cell), min_replies=least)
            continue
        with pytest.raises(RunError, match=r"round 3: no reply from silo 1.*; 3 replies are needed"):
            serve(cell, tmp_path / "three", grid_of(cell), min_replies=least)
    with pytest.raises(InputError, match='least_silos: is for missing = "continue"'):
        cell_of("trusted", "sgd", deployment={"least_silos": 2})
    assert cell_of("trusted", "sgd").deployment.min_replies is None
