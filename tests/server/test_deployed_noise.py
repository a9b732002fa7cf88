"""The noise of a deployed server that is trusted: whose key, which arithmetic, the same bytes after any kill."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

import fedpriv.server.app
from fedpriv.claims.outcome import RunObserver
from fedpriv.clients.app import app as client_app
from fedpriv.core.errors import RunError
from fedpriv.core.files import PRIVATE_MODE, write_bytes
from fedpriv.core.random import SERVER, simulation_noise
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.protocol.messages import TRAIN, read_tensor, release_content
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import deploy_cell, simulated_strategy
from tests.attacks.guards import KEPT_STATE, scenario
from tests.server.deployed import exact_means, plan_with, released_in, serve, silos_of

MakeCell = Callable[..., Cell]


def test_noise_of_a_deployed_trusted_server_does_not_follow_from_the_public_seed(
    small_cell: MakeCell, tmp_path: Path
) -> None:
    """An insider of a silo would remove all noise from every broadcast with the seed in the scenario."""
    cell = small_cell(algorithm__trust="trusted", run__arithmetic="integers")
    plan = plan_with(cell)
    std = float(plan.noise.std_of(SERVER))
    deploy_cell(silos_of(cell), cell, RunObserver(), tmp_path / "j")
    (first, *_) = released_in(tmp_path / "j", plan)
    (mean,) = exact_means(cell, [plan.optimizer.query(plan.optimizer.start(plan.objective.initial()))])
    noise = (first - mean) / std
    assert abs(float(noise.std()) - 1.0) < 0.05  # seven standard errors
    for dtype in ("float32", "float64"):
        guessed = torch.from_numpy(simulation_noise(cell.seed, dtype).vector(7850, SERVER, 1))
        assert abs(float((noise * guessed).mean())) < 0.06  # five standard errors: 6e-7
    deploy_cell(silos_of(cell), cell, RunObserver(), tmp_path / "k")
    (other, *_) = released_in(tmp_path / "k", plan)
    assert float((other - first).std()) / std == pytest.approx(math.sqrt(2.0), abs=0.06)


def test_the_noise_key_of_the_server_is_overwritten_and_deleted_after_the_last_round(
    small_cell: MakeCell, tmp_path: Path
) -> None:
    """Whoever finds the disk later would remove the noise of everything that was broadcast."""
    cell = small_cell(algorithm__trust="trusted", run__arithmetic="integers")
    grid = silos_of(cell)
    serve(plan_with(cell), tmp_path / "j", grid, rounds=1)
    (tmp_path / "hard link").hardlink_to(tmp_path / "j" / "noise.key")
    assert any((tmp_path / "hard link").read_bytes())
    deploy_cell(grid, cell, RunObserver(), tmp_path / "j")
    assert not (tmp_path / "j" / "noise.key").exists()
    assert (tmp_path / "hard link").read_bytes() == bytes(32)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", KEPT_STATE)
def test_a_server_killed_before_or_after_any_journal_entry_releases_the_same_bytes(
    tmp_path: Path, name: str
) -> None:
    """Another row of noise over the same sums would cancel a tree's: it hangs together over rounds."""
    text = scenario("trusted", **KEPT_STATE[name], run__arithmetic="integers", run__dtype="float32")
    cell = resolve_cell(json.loads(text), "test")
    plan = plan_with(cell)
    serve(plan, tmp_path / "whole", silos_of(cell))
    key = (tmp_path / "whole" / "noise.key").read_bytes()
    expected = list(released_in(tmp_path / "whole", plan))
    assert len(expected) == 8
    for after in (False, True):
        folder = tmp_path / f"cut {after}"
        write_bytes(folder / "noise.key", key, PRIVATE_MODE)
        grid = Repeating(client_app, cell.federation.silos, make_run_config(cell, Path()))
        for t in range(1, 9):
            serve(plan, folder, grid, dies_in=-t if after else t)
        model = serve(plan, folder, grid).model
        for one, other in zip(released_in(folder, plan), expected, strict=True):
            assert torch.equal(one, other)
        assert torch.isfinite(model).all()


class Repeating(InProcessGrid):
    """Silos that give the same bytes to the same question, as guards do."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.given: dict[tuple[int, int, bytes], Message] = {}

    def _call(self, message: Message) -> Message:
        if message.metadata.message_type != TRAIN:
            return super()._call(message)
        query = read_tensor(message.content, "query").numpy().tobytes()
        asked = message.metadata.dst_node_id, message.content["config"]["t"], query
        if asked not in self.given:
            self.given[asked] = super()._call(message)
        return Message(self.given[asked].content, reply_to=message)


def test_a_trusted_run_by_flwr_run_over_silos_with_guards_is_refused(small_cell: MakeCell) -> None:
    """`flwr run` against real silos would take the noise of a trusted server from the public seed."""
    cell = small_cell(algorithm__trust="trusted", run__arithmetic="integers")
    plan = plan_with(cell)
    strategy = simulated_strategy(plan, plan.objective.initial(), cell)

    class Guarded(InProcessGrid):
        def _call(self, message: Message) -> Message:
            reply = super()._call(message)
            if reply.metadata.message_type == TRAIN:
                return Message(release_content(read_tensor(reply.content, "release"), None), reply_to=message)
            return reply

    grid = Guarded(client_app, 3, make_run_config(cell, Path()))
    with pytest.raises(RunError, match=r"silo 0, round 1: .* use --engine deployment"):
        strategy.run(grid)
    assert fedpriv.server.app.run_cell(silos_of(cell), cell, RunObserver()).noise == "simulation"


def test_a_deployed_trusted_server_without_privacy_adds_no_noise(small_cell: MakeCell, tmp_path: Path) -> None:
    cell = small_cell(privacy__mode="none", privacy__rho=None, algorithm__trust="trusted")
    plan = plan_with(cell)
    runs = []
    for name in ("a", "b"):
        serve(plan, tmp_path / name, silos_of(cell), rounds=2)
        runs.append(torch.stack(list(released_in(tmp_path / name, plan))))
    assert torch.equal(*runs)


def test_independent_noise_differs_between_rounds(small_cell: MakeCell, tmp_path: Path) -> None:
    """The chain of equal sums still gives every round its own noise."""
    cell = small_cell(algorithm__trust="trusted", run__arithmetic="integers")
    plan = plan_with(cell)
    serve(plan, tmp_path / "j", silos_of(cell))
    one, two, *_ = released_in(tmp_path / "j", plan)
    assert float((one - two).std()) > float(plan.noise.std_of(SERVER))
