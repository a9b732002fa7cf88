"""The silos of a simulation, whose noise is the scenario's seed's."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fedpriv.clients.releasing import ReleasingSilo
from fedpriv.clients.silo import Silo
from fedpriv.clients.together import SimulatedSilo, Together, together_of
from fedpriv.data.placing import counted
from fedpriv.errors import RunError
from fedpriv.objectives import Records
from fedpriv.randomness import KeyedNormal, integers_key, simulation_noise
from fedpriv.running.evaluation import (
    EvaluationPlan,
    evaluation_integers_key,
    evaluation_noise,
    evaluation_plan_of,
)
from fedpriv.running.held_out import held_out_shares
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
        return SimulatedFederation(cell, plan, spread(cell), simulation_noise(cell.noise_seed, cell.run.dtype))

    def silo(self, number: int) -> Silo:
        task, shard = task_of_cell(self.cell), self.order[number]
        records = Records(task.train.features[shard], task.train.labels[shard])
        gaps = self.cell.without_silos is not None
        if self.plan.exact is None:
            own = number, self.plan, self.plan.objective, records, self.noise, gaps
            together = None if gaps or not counted(task.train.labels.numpy()).all() else self._together.get(number)
            return Silo(*own) if together is None else SimulatedSilo(*own, together=together)
        return ReleasingSilo.of(number, self.plan, records, integers_key(self.cell.noise_seed), b"", gaps=gaps)

    def evaluated(self, number: int) -> Silo:
        """Silo `number` as it evaluates: its test records, which train nothing."""
        if self.tests is None:
            raise RunError(f"silo {number}: the scenario has no [evaluation]")
        asked, shares = self.tests
        if asked.plan.exact is None:
            return Silo(number, asked.plan, asked.scores, shares[number], evaluation_noise(self.cell))
        return ReleasingSilo.of(number, asked.plan, shares[number], evaluation_integers_key(self.cell), b"")

    @cached_property
    def _together(self) -> dict[int, Together]:
        return together_of(self.plan, task_of_cell(self.cell).train, self.order)

    @cached_property
    def tests(self) -> tuple[EvaluationPlan, list[Records]] | None:
        """The plan of the evaluations and every silo's test records; None where silos do not evaluate."""
        asked = evaluation_plan_of(self.cell, task_of_cell(self.cell).objective)
        return None if asked is None else (asked, held_out_shares(self.cell))


def simulated_silo(cell: Cell, number: int) -> Silo:
    """Silo `number` of a simulation."""
    return SimulatedFederation.of(cell).silo(number)
