"""A deployed server over silos of this process, whose rounds can be cut off anywhere."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from fedpriv.clients.app import app as client_app
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import deployed_strategy
from fedpriv.server.journal import EntrySizes, ServerJournal
from fedpriv.server.strategy import JournalEntry, MissedRounds, ReleaseStrategy, ServerAggregator


class KilledError(BaseException):
    """The process is gone."""


class MortalJournal(ServerJournal):
    """Dies in round `dies_in`, before or after it has written."""

    dies_in, after_writing = 0, False

    def record(
        self,
        t: int,
        entry: JournalEntry,
        missed_rounds: MissedRounds,
        last_releases: Tensor | None,
        secret_state: bytes = b"",
    ) -> None:
        if t == self.dies_in and not self.after_writing:
            raise KilledError
        super().record(t, entry, missed_rounds, last_releases, secret_state)
        if t == self.dies_in:
            raise KilledError


def plan_with(cell: Cell) -> Plan:
    return make_plan(cell, load_task(cell).objective, for_release=True)


def silos_of(cell: Cell) -> InProcessGrid:
    return InProcessGrid(client_app, cell.federation.silos, make_run_config(cell, Path()))


def serve(plan: Plan, folder: Path, grid: InProcessGrid, rounds: int = 0, dies_in: int = 0) -> ReleaseStrategy:
    """A server from the journal in `folder` on; it dies in round |dies_in|, after its entry if negative."""
    initial = plan.objective.initial()
    with MortalJournal(folder, EntrySizes.from_plan(plan)) as journal:
        journal.dies_in, journal.after_writing = abs(dies_in), dies_in < 0
        strategy = deployed_strategy(plan, initial, journal)
        with suppress(KilledError):
            strategy.run(grid, num_rounds=rounds)
    return strategy


def released_in(folder: Path, plan: Plan) -> Iterator[Tensor]:
    """What every round in a journal released, each (d,)."""
    initial = plan.objective.initial()
    with ServerJournal(folder, EntrySizes.from_plan(plan)) as journal:
        sums = ServerAggregator(plan, initial, bytes(32))
        for t in range(1, plan.schedule.rounds + 1):
            known = journal.read_entry(t)
            if known is None:
                return
            yield sums.repeat_release(known, t)


def exact_means(cell: Cell, queries: list[Tensor]) -> list[Tensor]:
    """The silos' weighted means of such a run of queries, in float64, without any noise."""
    cell = cell.model_copy(update={"run": cell.run.model_copy(update={"arithmetic": "float"})})
    silos = [SimulatedFederation.from_cell(cell).silo(number) for number in range(cell.federation.silos)]
    states, means = [silo.initial_state() for silo in silos], []
    for t, query in enumerate(queries, start=1):
        answers = [silo.answer(state, t, query) for silo, state in zip(silos, states, strict=True)]
        states = [state for _, state in answers]
        weights = torch.tensor(silos[0].plan.weights, dtype=torch.float64)
        means.append(weights @ torch.stack([release.vector.double() for release, _ in answers]))
    return means
