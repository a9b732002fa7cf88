"""The Flower ServerApp: one cell of a scenario, from the run configuration to a published model."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedpriv.errors import FedprivError, RunError
from fedpriv.federation import Task, task_of_cell
from fedpriv.outcome import Finished, evaluation_rounds
from fedpriv.plan import plan_of
from fedpriv.randomness import simulation_noise
from fedpriv.run_config import cell_of
from fedpriv.run_folder import FolderReporter
from fedpriv.scenario import Cell
from fedpriv.wire import one_array, tensor_of
from server.strategy import ReleaseStrategy


class Reporter(Protocol):
    """Hears what the server does, in the server's process."""

    def advanced(self, t: int) -> None: ...

    def evaluated(self, t: int, test_loss: float, test_accuracy: float) -> None: ...

    def finished(self, finished: Finished) -> None: ...

    def failed(self, error: FedprivError) -> None: ...


def server_app(reporter_of: Callable[[Context], Reporter]) -> ServerApp:
    """The ServerApp, with a reporter made for each run."""
    app = ServerApp()

    @app.main()
    @torch.inference_mode()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)  # as in the clients: the order of sums must not depend on the cores
        reporter = reporter_of(context)
        try:
            reporter.finished(run_cell(grid, cell_of(context.run_config), reporter))
        except FedprivError as error:
            reporter.failed(error)
            raise

    return app


def run_cell(grid: Grid, cell: Cell, reporter: Reporter) -> Finished:
    """All rounds of one cell over a grid."""
    started = time.perf_counter()
    task = task_of_cell(cell)
    plan = plan_of(cell, task.objective)
    strategy = ReleaseStrategy(plan, task.objective.initial(), simulation_noise(cell.seed, cell.run.dtype))
    evaluated_at = evaluation_rounds(plan.schedule.rounds, cell.run.evaluations)
    metrics: dict[str, float] = {}

    def evaluate(t: int, arrays: ArrayRecord) -> MetricRecord | None:
        reporter.advanced(t)
        if t not in evaluated_at:
            return None
        metrics.update(_test_metrics(task, arrays, t))
        reporter.evaluated(t, metrics["test_loss"], metrics["test_accuracy"])
        return MetricRecord(dict(metrics))

    result = strategy.start(grid, one_array(task.objective.initial()), evaluate_fn=evaluate)
    model, counts = next(iter(result.arrays.to_numpy_ndarrays())), strategy.counts
    return Finished(
        **metrics,
        fraction_clipped=None if counts is None else counts.clipped / max(1, counts.drawn),
        wall_seconds=time.perf_counter() - started,
        releases=plan.releases(strategy.rounds_done),
        gradient_evaluations=plan.gradient_evaluations(strategy.rounds_done),
        model=model,
    )


def _test_metrics(task: Task, arrays: ArrayRecord, t: int) -> dict[str, float]:
    model = tensor_of(next(iter(arrays.values())))
    evaluation = task.objective.evaluate(model, task.test)
    if not torch.isfinite(evaluation.loss):
        raise RunError(f"round {t}: the test loss is not finite")
    return {"test_loss": float(evaluation.loss), "test_accuracy": float(evaluation.share_right())}


def _folder_reporter(context: Context) -> FolderReporter:
    return FolderReporter(Path(str(context.run_config["out"]) or "runs/flower"))


app = server_app(_folder_reporter)
