"""Flower ServerApp that runs one cell of a scenario, from the run configuration to a published model.

* A cell is one run of a scenario, with a value for each key, and a plan has what is known of it before round 1.
* A release of the server is the vector that it makes of a round's messages.
* The journal is a folder of the server with the release of each finished round, and the key of the server's noise.
* A checkpoint is a position in a silo's ledger, which the server remembers and sends back with the next query.
* The roster is the node id of silo 0, 1, ….
* In an evaluation by silos the server sends a model, and gets sums or means of scores of the silos' test records.

Before the first query of a deployment every silo is asked whether it would refuse the run, so that such a refusal
costs the other silos no budget.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fedpriv.claims.ledger import make_evaluation_streams
from fedpriv.claims.outcome import CellOutcome, RunObserver, evaluate_models, evaluation_rounds, make_outcome
from fedpriv.core.errors import FedprivError, RunError, sanitize_line
from fedpriv.core.random import KeyedNormal, integer_noise_key, simulation_noise
from fedpriv.plan.evaluation import EvaluationPlan, make_evaluation_plan
from fedpriv.plan.plan import Plan, draw_absences, make_plan
from fedpriv.plan.task import PublicTask, load_public_task, load_task
from fedpriv.protocol.cell_folder import FolderReporter, cell_from_run_config, report_waiting
from fedpriv.protocol.messages import (
    ADMISSION_QUERY,
    EVALUATE,
    PROTOCOL_VERSION,
    REGISTERED_NODES_VARIABLE,
    clock_offset,
    decode_tensor,
    format_clock_offset,
    is_clock_tolerated,
    query_content,
    read_refusal,
    to_array_record,
)
from fedpriv.rounds.floats import evaluation_integers_key, evaluation_noise
from fedpriv.rounds.round import is_finite
from fedpriv.scenario.schema import Cell
from fedpriv.server.grid import PatientGrid, learn_roster
from fedpriv.server.journal import EntrySizes, ServerJournal
from fedpriv.server.strategy import (
    CheckpointStore,
    Journal,
    ReleaseStrategy,
    RosterFinder,
    ServerAggregator,
    read_release,
    require_all_answers,
)


def check_admission(grid: Grid, nodes: Sequence[int], timeout: float, *, require_all: bool = True) -> None:
    """Check that the silos would admit the run, and that their clocks are close to this process's clock.

    A refusal is final if asking again does not help.  A clock is close if a SuperLink would tolerate its offset.

    Args:
        grid: Grid with the silos' nodes.
        nodes: Node ids of silo 0, 1, ….
        timeout: Longest wait for replies, in seconds.
        require_all: Whether a silo that does not reply, or whose refusal is not final, ends the run.

    Raises:
        RunError: If a silo refuses the run for good, fails or has a wrong clock, and with `require_all` also if a
            silo does not reply or refuses for now.
    """
    queries, start_time = [Message(RecordDict(), node, ADMISSION_QUERY) for node in nodes], time.time()
    replies = {
        reply.metadata.reply_to_message_id: reply for reply in grid.send_and_receive(queries, timeout=timeout)
    }
    objections: dict[int, str] = {}
    for silo, message in enumerate(queries):
        reply = replies.get(message.metadata.message_id)
        refusal = None if reply is None or reply.has_error() else read_refusal(reply.content)
        if reply is None or (refusal is not None and not refusal.is_final):
            if require_all:
                objections[silo] = f"no reply from silo {silo}" + (f"; {refusal.reason}" if refusal else "")
        elif reply.has_error():
            objections[silo] = (
                f"silo {silo} cannot be asked whether it agrees: its app is not of protocol {PROTOCOL_VERSION}, "
                f"as this coordinator's fedpriv is, or failed: {sanitize_line(str(reply.error.reason))}"
            )
        elif refusal is not None:
            is_prefixed = refusal.reason.startswith(f"silo {silo} ")
            objections[silo] = refusal.reason if is_prefixed else f"silo {silo}: {refusal.reason}"
        elif not is_clock_tolerated(offset := clock_offset(reply.metadata.created_at, start_time, time.time())):
            objections[silo] = (
                f"silo {silo}: its clock is {format_clock_offset(offset)} the coordinator's; set both by NTP"
            )
    if objections:
        header = f"{len(objections)} of {len(queries)} silos do not take part, so none is asked for a round:"
        raise RunError("\n  ".join([header, *objections.values()]))


class SiloEvaluation:
    """Evaluations of one run, in order.

    Guarantee: with a journal, the release of an evaluation is stored before anybody sees it, and is not asked for
    again.  So no second noise is drawn on sums that have been published, whenever the server is killed.
    """

    def __init__(
        self,
        evaluation_plan: EvaluationPlan,
        aggregator: ServerAggregator,
        journal: Journal | None = None,
        checkpoints: CheckpointStore | None = None,
    ) -> None:
        self._evaluation_plan, self._aggregator, self._journal, self._checkpoints = (
            evaluation_plan,
            aggregator,
            journal,
            checkpoints,
        )

    def metrics(
        self, number: int, model: Tensor, grid: Grid, nodes: Callable[[], Sequence[int]], timeout: float
    ) -> dict[str, float]:
        """Return the metrics of evaluation `number`, from 1, by name.

        Args:
            number: Number of the evaluation.
            model: Model that is evaluated, (d,).
            grid: Grid with the silos' nodes.
            nodes: Function that returns the node ids, called only if the journal has no release.
            timeout: Longest wait for replies, in seconds.

        Raises:
            RunError: If a silo is not connected, does not reply, fails, refuses, or sends a message that is
                malformed or out of its bounds, or if the journal cannot be read or written.
        """
        entry = self._journal.read_entry(number) if self._journal else None
        release = (
            self._aggregator.repeat_release(entry, number)
            if entry
            else self._run_evaluation(number, model, grid, nodes(), timeout)
        )
        # One row of means over all silos, or a row for each silo if each silo's means are published.
        return self._evaluation_plan.metrics(release.view(-1, self._evaluation_plan.scores.dimension))

    def _run_evaluation(
        self, number: int, model: Tensor, grid: Grid, nodes: Sequence[int], timeout: float
    ) -> Tensor:
        """Send a model, (d,), to all silos, and return the release, mean scores of their test records.

        The release is (numbers of a score,), or each silo's numbers in a row if each silo's are published.  The
        arguments are those of `metrics`, with the node ids.

        Raises:
            RunError: A silo does not reply, fails, refuses, or sends a message that is malformed or out of its
                bounds, or the journal cannot be written.
        """
        content = query_content(to_array_record(model), number, ConfigRecord())
        checkpoints = self._checkpoints
        queries = {
            silo: Message(
                checkpoints.add_checkpoints(silo, content) if checkpoints is not None else content, node, EVALUATE
            )
            for silo, node in enumerate(nodes)
        }
        answers = require_all_answers(
            queries, grid.send_and_receive(queries.values(), timeout=timeout), f"evaluation {number}"
        )
        if checkpoints is not None:
            for silo, answer in enumerate(answers):
                checkpoints.record_checkpoint(silo, answer)
        messages = [self._read_sums(answer, silo, number) for silo, answer in enumerate(answers)]
        release = self._aggregator.make_release(messages, number, model)
        if self._journal:
            # Every silo answered, so that no round is missed and no substitute needs earlier messages.
            self._journal.record(number, release.entry, {}, None, release.secret_state)
        return release.vector

    def _read_sums(self, content: RecordDict, silo: int, number: int) -> Tensor:
        """Return a silo's message of evaluation `number`, or raise RunError for a reply that cannot be used."""
        plan, source = self._evaluation_plan.plan, f"silo {silo}, evaluation {number}"
        release, _ = read_release(
            content,
            source,
            plan.rounds[number - 1].message_length,
            plan.message_dtype,
            self._aggregator.has_seeded_noise,
        )
        if not is_finite(release):
            raise RunError(f"{source}: it sent values that are not finite")
        return release


def evaluation_aggregator(
    evaluation_plan: EvaluationPlan,
    key: bytes,
    load_secret_state: Callable[[], bytes] = bytes,
    *,
    simulated_noise: KeyedNormal | None = None,
) -> ServerAggregator:
    """Build the server's aggregator of evaluations, with arguments as for `ServerAggregator`."""
    return ServerAggregator(
        evaluation_plan.plan,
        evaluation_plan.scores.initial(),
        key,
        load_secret_state,
        simulated_noise=simulated_noise,
        publishes_each_silo=evaluation_plan.publishes_each_silo,
    )


def make_server_app(make_observer: Callable[[Mapping[str, Any]], RunObserver]) -> ServerApp:
    """Build the ServerApp, which runs the cell of Flower's run configuration.

    Args:
        make_observer: Function that makes the observer of a run from the run configuration.
    """
    app = ServerApp()

    @app.main()
    @torch.inference_mode()
    def main(grid: Grid, context: Context) -> None:
        """Run the cell of the run configuration, as a deployment if there is a `run-token`."""
        torch.set_num_threads(1)  # The order of sums must not depend on the number of cores.
        observer = make_observer(context.run_config)
        try:
            cell, is_deployment = cell_from_run_config(context.run_config), bool(context.run_config["run-token"])
            if is_deployment:
                # The folder is RUN_DIR/deployment/DIGEST, and checkpoints lie beside RUN_DIR, for other runs.
                folder = output_folder(context.run_config)
                deploy_cell(grid, cell, observer, folder / "journal", folder.resolve().parents[2] / ".commits")
            else:
                observer.finished(0, run_cell(grid, cell, observer))  # 0 is the number of a server's only cell
        except FedprivError as error:
            with suppress(RunError):  # With a full disk the report fails too, and the error itself is raised.
                observer.failed(error)
            raise

    return app


def run_cell(grid: Grid, cell: Cell, observer: RunObserver) -> CellOutcome:
    """Run all rounds of one simulated cell over a grid, and return its outcome.

    The server's noise comes from the scenario's seed.
    """
    task = load_task(cell)
    plan = make_plan(cell, task.objective)
    strategy = simulated_strategy(plan, plan.objective.initial(), cell)
    evaluation_plan, silo_evaluation = make_evaluation_plan(cell, task.objective), None
    if evaluation_plan is not None:
        silo_evaluation = SiloEvaluation(
            evaluation_plan,
            evaluation_aggregator(
                evaluation_plan, evaluation_integers_key(cell), simulated_noise=evaluation_noise(cell)
            ),
        )
    return _run_strategy(strategy, grid, cell, task, observer, evaluation_plan, silo_evaluation)


def deploy_cell(
    grid: Grid, cell: Cell, observer: RunObserver, folder: Path, checkpoint_folder: Path | None = None
) -> None:
    """Run all rounds of one cell with deployed silos, after asking whether they agree.

    An interrupted run continues after the last round in the journal.  The observer gets the outcome.

    Guarantee: a server that adds noise draws it from a key of the operating system, which is kept in the journal
    while the run lasts and wiped before its outcome is published.

    Args:
        grid: Grid with the silos' nodes.
        cell: Cell that is run.
        observer: Observer of the run.
        folder: Folder of the journal.
        checkpoint_folder: Folder for checkpoints of silos' ledgers, which runs can share, by default in `folder`.

    Raises:
        FedprivError: The cell cannot be run, a silo refuses, fails or is missing, or the journal cannot be used.
    """
    task = load_public_task(cell)
    plan = make_plan(cell, task.objective, for_release=True)
    # On this grid a silo keeps its node id after a restart, and waits for silos are reported.
    patient_grid = PatientGrid(
        grid,
        has_registered_nodes=os.environ.get(REGISTERED_NODES_VARIABLE) == "1",
        on_wait=partial(report_waiting, folder.parent),
    )
    checkpoints = CheckpointStore(checkpoint_folder or folder / "commits")
    evaluation_plan = make_evaluation_plan(cell, task.objective, for_release=True)
    min_replies = cell.deployment.min_replies

    def agreed_roster(_: Grid, silos: int, timeout: float) -> list[int]:
        nodes = patient_grid.roster(silos, timeout)
        # A run that may go on without some silos also begins without those that do not reply now.
        check_admission(patient_grid, nodes, timeout, require_all=min_replies is None)
        return nodes

    with ServerJournal(folder, EntrySizes.from_plan(plan)) as journal, ExitStack() as stack:
        evaluation_journal, silo_evaluation = None, None
        if evaluation_plan is not None:
            # If each silo's vector is published, an entry has the vectors of all silos in a row.
            entries, copies = (
                EntrySizes.from_plan(evaluation_plan.plan),
                len(evaluation_plan.plan.weights) if evaluation_plan.publishes_each_silo else 1,
            )
            entries = entries._replace(lengths=tuple(copies * length for length in entries.lengths))
            evaluation_journal = stack.enter_context(ServerJournal(folder / "evaluation", entries))
            aggregator = evaluation_aggregator(
                evaluation_plan, evaluation_journal.load_noise_key(), evaluation_journal.load_secret_state
            )
            silo_evaluation = SiloEvaluation(evaluation_plan, aggregator, evaluation_journal, checkpoints)
        strategy = deployed_strategy(
            plan,
            plan.objective.initial(),
            journal,
            agreed_roster,
            min_replies=min_replies,
            checkpoints=checkpoints,
        )
        outcome = _run_strategy(strategy, patient_grid, cell, task, observer, evaluation_plan, silo_evaluation)
        # Keys are wiped before the outcome is published, after which this process can be ended at any moment.
        for run_journal in filter(None, (journal, evaluation_journal)):
            run_journal.wipe_key()
        # "release": the keys of the noise came from the operating system, not from the scenario's seed.
        observer.finished(0, dataclasses.replace(outcome, noise="release"))


def deployed_strategy(
    plan: Plan,
    initial: Tensor,
    journal: ServerJournal,
    find_roster: RosterFinder = learn_roster,
    *,
    min_replies: int | None = None,
    checkpoints: CheckpointStore | None = None,
) -> ReleaseStrategy:
    """Build the strategy of a server that releases, with noise under the key of the journal."""
    aggregator = ServerAggregator(plan, initial, journal.load_noise_key(), journal.load_secret_state)
    return ReleaseStrategy(
        plan,
        initial,
        aggregator,
        journal,
        find_roster,
        min_replies=min_replies,
        checkpoints=checkpoints,
    )


def simulated_strategy(plan: Plan, initial: Tensor, cell: Cell) -> ReleaseStrategy:
    """Build the strategy of a simulation's server, with noise of the scenario's seed."""
    return ReleaseStrategy(plan, initial, simulated_aggregator(plan, initial, cell), absences=draw_absences(cell))


def simulated_aggregator(plan: Plan, initial: Tensor, cell: Cell) -> ServerAggregator:
    """Build the aggregator of a simulation's server, with noise of the scenario's seed."""
    noise = simulation_noise(cell.noise_seed, cell.run.dtype)
    return ServerAggregator(plan, initial, integer_noise_key(cell.noise_seed), simulated_noise=noise)


_PROGRESS_SECONDS = 0.1  # shortest time between two reports of progress, but for the last one


def _run_strategy(
    strategy: ReleaseStrategy,
    grid: Grid,
    cell: Cell,
    task: PublicTask,
    observer: RunObserver,
    evaluation_plan: EvaluationPlan | None,
    silo_evaluation: SiloEvaluation | None,
) -> CellOutcome:
    """Run all rounds of a strategy with evaluations, and make the outcome of the cell.

    The server evaluates on the public test set of `task` if `evaluation_plan` and `silo_evaluation` are None.
    """
    start, plan = time.perf_counter(), strategy.plan
    evaluated_rounds = sorted(evaluation_rounds(plan.schedule.rounds, cell.run.evaluations))
    timeout = cell.deployment.patience
    metrics: dict[str, float] = {}
    reported_rounds, last_report = 0, -math.inf  # rounds and time of the last report of progress

    def evaluate(t: int, arrays: ArrayRecord) -> None:
        """Report progress if it is time, and evaluate the model (d,) if t is an evaluated round."""
        nonlocal reported_rounds, last_report
        if (now := time.perf_counter()) - last_report > _PROGRESS_SECONDS or t == plan.schedule.rounds:
            observer.advanced(t - reported_rounds)
            reported_rounds, last_report = t, now
        if t not in evaluated_rounds:
            return
        model = decode_tensor(next(iter(arrays.values())))
        if silo_evaluation is None:
            metrics.update(*evaluate_models(task.objective, model, task.test, [f"round {t}"]))
        else:
            number = evaluated_rounds.index(t) + 1
            metrics.update(
                silo_evaluation.metrics(number, model, grid, lambda: strategy.nodes(grid, timeout), timeout)
            )
        observer.evaluated(0, t, dict(metrics))

    strategy.run(grid, timeout=timeout, evaluate=evaluate)
    model = next(iter(strategy.model_arrays().to_numpy_ndarrays()))
    wall_seconds = time.perf_counter() - start
    fraction_clipped = None if strategy.counts is None else strategy.counts.fraction_clipped
    return make_outcome(
        plan,
        strategy.rounds_done,
        model,
        metrics,
        fraction_clipped,
        wall_seconds,
        strategy.missed_rounds,
        make_evaluation_streams(evaluation_plan),
    )


def output_folder(run_config: Mapping[str, Any]) -> Path:
    """Folder of the run's files at the server, or runs/flower if the configuration names none."""
    return Path(str(run_config["out"]) or "runs/flower")


app = make_server_app(lambda run_config: FolderReporter(output_folder(run_config)))
"""App that engines submit, and whose reports they follow."""
