"""The Flower ServerApp: one cell of a scenario, from the run configuration to a published model."""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fedpriv.errors import FedprivError, RunError
from fedpriv.protocol.arrays import one_array, tensor_of
from fedpriv.protocol.cell_folder import FolderReporter
from fedpriv.protocol.messages import REGISTERED
from fedpriv.protocol.run_config import cell_of
from fedpriv.randomness import integers_key, simulation_noise
from fedpriv.running.absences import absences_of
from fedpriv.running.evaluation import (
    EvaluationPlan,
    evaluation_integers_key,
    evaluation_noise,
    evaluation_plan_of,
    released_by,
)
from fedpriv.running.observer import RunObserver
from fedpriv.running.outcome import Finished, evaluation_rounds, finished_after, measured
from fedpriv.running.plan import Plan, plan_of
from fedpriv.running.task import PublicTask, public_task_of_cell, task_of_cell
from fedpriv.scenario import Cell
from fedpriv.server.evaluation import SiloEvaluation, evaluation_entries, evaluation_sums
from fedpriv.server.integer_sums import sums_of
from fedpriv.server.journal import Entries, ServerJournal
from fedpriv.server.patient_grid import PatientGrid
from fedpriv.server.roster import learn_roster
from fedpriv.server.strategy import ReleaseStrategy, Roster


def server_app(observer_of: Callable[[Mapping[str, Any]], RunObserver]) -> ServerApp:
    """The ServerApp, with an observer made for each run from its run configuration."""
    app = ServerApp()

    @app.main()
    @torch.inference_mode()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)  # as in the clients: the order of sums must not depend on the cores
        observer = observer_of(context.run_config)
        try:
            cell, deployed = cell_of(context.run_config), bool(context.run_config["run-token"])
            if deployed:
                deploy_cell(grid, cell, observer, out_of(context.run_config) / "journal")
            else:
                observer.finished(0, run_cell(grid, cell, observer))
        except FedprivError as error:
            with suppress(RunError):  # a full disk takes no report either: then the error itself has to do
                observer.failed(error)
            raise

    return app


def run_cell(grid: Grid, cell: Cell, observer: RunObserver) -> Finished:
    """All rounds of one simulated cell over a grid."""
    task = task_of_cell(cell)
    plan = plan_of(cell, task.objective)
    strategy = simulated_strategy(plan, plan.objective.initial(), cell)
    asked, by_silos = evaluation_plan_of(cell, task.objective), None
    if asked is not None:
        key, noise = evaluation_integers_key(cell), evaluation_noise(cell)
        by_silos = SiloEvaluation(asked, evaluation_sums(asked, key, simulated=noise))
    return _run(strategy, grid, cell, task, observer, asked, by_silos)


def deploy_cell(grid: Grid, cell: Cell, observer: RunObserver, folder: Path) -> None:
    """All rounds of one cell with silos of their own; goes on where the journal in `folder` ends.

    Guarantee: a server that adds noise draws it from a key of the operating system, which is kept in the journal
    while the run lasts.
    """
    task = public_task_of_cell(cell)
    plan = plan_of(cell, task.objective, released=True)
    initial = plan.objective.initial()
    patient = PatientGrid(grid, registered=os.environ.get(REGISTERED) == "1")
    asked = evaluation_plan_of(cell, task.objective, released=True)
    with ServerJournal(folder, Entries.of(plan)) as journal, ExitStack() as stack:
        evaluated, by_silos = None, None
        if asked is not None:
            evaluated = stack.enter_context(ServerJournal(folder / "evaluation", evaluation_entries(asked)))
            by_silos = SiloEvaluation(asked, evaluation_sums(asked, evaluated.key(), evaluated.secret), evaluated)
        strategy = deployed_strategy(
            plan,
            initial,
            journal,
            lambda _, silos, timeout: patient.roster(silos, timeout),
            without_missing=cell.deployment.missing == "continue",
        )
        finished = _run(strategy, patient, cell, task, observer, asked, by_silos)
        for each in filter(None, (journal, evaluated)):
            each.wipe_key()  # before the result is there: then everything may be ended at any moment
        observer.finished(0, dataclasses.replace(finished, noise="release"))


def deployed_strategy(
    plan: Plan,
    initial: Tensor,
    journal: ServerJournal,
    roster: Roster = learn_roster,
    *,
    without_missing: bool = False,
) -> ReleaseStrategy:
    """The strategy of a server whose releases are real: its noise is keyed by the journal, and by nothing else."""
    sums = sums_of(plan, initial, journal.key(), journal.secret)
    return ReleaseStrategy(plan, initial, sums, journal, roster, without_missing=without_missing)


def simulated_strategy(plan: Plan, initial: Tensor, cell: Cell) -> ReleaseStrategy:
    """The strategy of a simulation's server, whose noise is the seed's."""
    noise = simulation_noise(cell.noise_seed, cell.run.dtype)
    sums = sums_of(plan, initial, integers_key(cell.noise_seed), simulated=noise)
    return ReleaseStrategy(plan, initial, sums, absences=absences_of(cell))


def _run(
    strategy: ReleaseStrategy,
    grid: Grid,
    cell: Cell,
    task: PublicTask,
    observer: RunObserver,
    asked: EvaluationPlan | None,
    by_silos: SiloEvaluation | None,
) -> Finished:
    started = time.perf_counter()
    plan = strategy.plan
    evaluated_at = sorted(evaluation_rounds(plan.schedule.rounds, cell.run.evaluations))
    timeout = cell.deployment.patience
    metrics: dict[str, float] = {}
    done = 0  # a server that goes on has its first rounds behind it

    def evaluate(t: int, arrays: ArrayRecord) -> MetricRecord | None:
        nonlocal done
        observer.advanced(t - done)
        done = t
        if t not in evaluated_at:
            return None
        model = tensor_of(next(iter(arrays.values())))
        if by_silos is None:
            metrics.update(*measured(task.objective, model, task.test, [f"round {t}"]))
        else:
            place = evaluated_at.index(t) + 1
            metrics.update(by_silos.metrics(place, model, grid, lambda: strategy.nodes(grid, timeout), timeout))
        observer.evaluated(0, t, dict(metrics))
        return MetricRecord(dict(metrics))

    result = strategy.start(grid, one_array(task.objective.initial()), timeout=timeout, evaluate_fn=evaluate)
    model = next(iter(result.arrays.to_numpy_ndarrays()))
    wall = time.perf_counter() - started
    clipped = None if strategy.counts is None else strategy.counts.fraction_clipped
    releases = released_by(asked)
    return finished_after(plan, strategy.rounds_done, model, metrics, clipped, wall, strategy.missed, releases)


def out_of(run_config: Mapping[str, Any]) -> Path:
    """The folder in which a server keeps what its run is made of."""
    return Path(str(run_config["out"]) or "runs/flower")


def _folder_reporter(run_config: Mapping[str, Any]) -> FolderReporter:
    return FolderReporter(out_of(run_config))


app = server_app(_folder_reporter)
"""What engines submit: it reports to the engine that follows it."""
