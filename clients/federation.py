"""The silos of a simulation, whose noise is the scenario's seed's."""

from dataclasses import dataclass

from torch import Tensor

from fedpriv.clients.releasing import ReleasingSilo
from fedpriv.clients.silo import Silo
from fedpriv.objectives import Records
from fedpriv.randomness import KeyedNormal, integers_key, simulation_noise
from fedpriv.running.plan import Plan, plan_of
from fedpriv.running.task import spread, task_of_cell
from fedpriv.scenario import Cell


@dataclass(frozen=True)
class SimulatedFederation:
    """What all silos of a simulation share, built once a process: records, plan, one source of noise.

    The noise is keyed by the scenario's seed; each silo draws its own streams of it, one silo at a time.
    """

    cell: Cell
    plan: Plan
    order: list[Tensor]
    noise: KeyedNormal

    @staticmethod
    def of(cell: Cell) -> "SimulatedFederation":
        plan = plan_of(cell, task_of_cell(cell).objective)
        return SimulatedFederation(cell, plan, spread(cell), simulation_noise(cell.seed, cell.run.dtype))

    def silo(self, number: int) -> Silo:
        task, shard = task_of_cell(self.cell), self.order[number]
        records = Records(task.train.features[shard], task.train.labels[shard])
        gaps = self.cell.without_silos is not None
        if self.plan.exact is None:
            return Silo(number, self.plan, self.plan.objective, records, self.noise, gaps)
        return ReleasingSilo.of(number, self.plan, records, integers_key(self.cell.seed), b"", gaps=gaps)


def simulated_silo(cell: Cell, number: int) -> Silo:
    """Silo `number` of a simulation."""
    return SimulatedFederation.of(cell).silo(number)
