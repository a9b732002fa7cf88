"""The Flower ServerApp: one cell of a scenario, from the run configuration to a published model.

Silos may evaluate: the server sends a model, and gets sums over their test records.

untrusted    every silo's means come with its own noise, and are kept and published silo by silo
trusted      exact integer sums come; their sum with the server's noise is kept and published
no noise     exact means come: nothing is claimed

Agreement before work: every silo says whether it would refuse the run, before any is asked for a round.

Nothing is opened, charged or released for the question, so that a run that one silo refuses costs the others
nothing.
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
    """RunError, with a line for each silo that does not agree; `nodes` are those of silo 0, 1, …

    Without `all_needed`, a silo that does not answer in so many seconds is no reason to end the run.
    """
    asked, began = [Message(RecordDict(), node, ADMISSION_QUERY) for node in nodes], time.time()
    replies = {
        reply.metadata.reply_to_message_id: reply for reply in grid.send_and_receive(asked, timeout=timeout)
    }
    against: dict[int, str] = {}
    for silo, message in enumerate(asked):
        reply = replies.get(message.metadata.message_id)
        refusal = None if reply is None or reply.has_error() else read_refusal(reply.content)
        if reply is None or (refusal is not None and not refusal.is_final):
            if require_all:
                against[silo] = f"no reply from silo {silo}" + (f"; {refusal.reason}" if refusal else "")
        elif reply.has_error():
            against[silo] = (
                f"silo {silo} cannot be asked whether it agrees: its app is not of protocol {PROTOCOL_VERSION}, "
                "as this "
                f"coordinator's fedpriv is, or failed: {sanitize_line(str(reply.error.reason))}"
            )
        elif refusal is not None:
            own = refusal.reason.startswith(f"silo {silo} ")
            against[silo] = refusal.reason if own else f"silo {silo}: {refusal.reason}"
        elif not is_clock_tolerated(ahead := clock_offset(reply.metadata.created_at, began, time.time())):
            against[silo] = (
                f"silo {silo}: its clock is {format_clock_offset(ahead)} the coordinator's; set both by NTP"
            )
    if against:
        words = f"{len(against)} of {len(asked)} silos do not take part, so none is asked for a round:"
        raise RunError("\n  ".join([words, *against.values()]))


class SiloEvaluation:
    """The evaluations of one run, in order.

    Guarantee: what was published of an evaluation is in the journal before anybody sees it, and is not asked for
    again: no second noise is drawn on sums that have been published, whenever the server is killed.
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
        """By name, of evaluation number `place`, from 1; RunError if a silo does not answer as it should."""
        known = self._journal.read_entry(number) if self._journal else None
        published = (
            self._aggregator.repeat_release(known, number)
            if known
            else self._run_evaluation(number, model, grid, nodes(), timeout)
        )
        return self._evaluation_plan.metrics(published.view(-1, self._evaluation_plan.scores.dimension))

    def _run_evaluation(
        self, number: int, model: Tensor, grid: Grid, nodes: Sequence[int], timeout: float
    ) -> Tensor:
        content = query_content(to_array_record(model), number, ConfigRecord())
        commits = self._checkpoints
        asked = {
            silo: Message(
                commits.add_checkpoints(silo, content) if commits is not None else content, node, EVALUATE
            )
            for silo, node in enumerate(nodes)
        }
        answers = require_all_answers(
            asked, grid.send_and_receive(asked.values(), timeout=timeout), f"evaluation {number}"
        )
        if commits is not None:
            for silo, answer in enumerate(answers):
                commits.record_checkpoint(silo, answer)
        messages = [self._read_sums(answer, silo, number) for silo, answer in enumerate(answers)]
        released = self._aggregator.make_release(messages, number, model)
        if self._journal:
            self._journal.record(number, released.entry, {}, None, released.secret_state)
        return released.vector

    def _read_sums(self, content: RecordDict, silo: int, number: int) -> Tensor:
        plan, where = self._evaluation_plan.plan, f"silo {silo}, evaluation {number}"
        release, _ = read_release(
            content,
            where,
            plan.rounds[number - 1].message_length,
            plan.message_dtype,
            self._aggregator.has_seeded_noise,
        )
        if not is_finite(release):
            raise RunError(f"{where}: it sent values that are not finite")
        return release


def evaluation_aggregator(
    evaluation_plan: EvaluationPlan,
    key: bytes,
    load_secret_state: Callable[[], bytes] = bytes,
    *,
    simulated_noise: KeyedNormal | None = None,
) -> ServerAggregator:
    """The server's part in evaluations; arguments as for `ServerSums`."""
    return ServerAggregator(
        evaluation_plan.plan,
        evaluation_plan.scores.initial(),
        key,
        load_secret_state,
        simulated_noise=simulated_noise,
        publishes_each_silo=evaluation_plan.publishes_each_silo,
    )


def make_server_app(make_observer: Callable[[Mapping[str, Any]], RunObserver]) -> ServerApp:
    """The ServerApp, with an observer made for each run from its run configuration."""
    app = ServerApp()

    @app.main()
    @torch.inference_mode()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)  # as in the clients: the order of sums must not depend on the cores
        observer = make_observer(context.run_config)
        try:
            cell, deployed = cell_from_run_config(context.run_config), bool(context.run_config["run-token"])
            if deployed:
                out = output_folder(context.run_config)  # RUN_DIR/deployment/DIGEST
                deploy_cell(grid, cell, observer, out / "journal", out.resolve().parents[2] / ".commits")
            else:
                observer.finished(0, run_cell(grid, cell, observer))
        except FedprivError as error:
            with suppress(RunError):  # a full disk takes no report either: then the error itself has to do
                observer.failed(error)
            raise

    return app


def run_cell(grid: Grid, cell: Cell, observer: RunObserver) -> CellOutcome:
    """All rounds of one simulated cell over a grid."""
    task = load_task(cell)
    plan = make_plan(cell, task.objective)
    strategy = simulated_strategy(plan, plan.objective.initial(), cell)
    asked, by_silos = make_evaluation_plan(cell, task.objective), None
    if asked is not None:
        by_silos = SiloEvaluation(
            asked,
            evaluation_aggregator(asked, evaluation_integers_key(cell), simulated_noise=evaluation_noise(cell)),
        )
    return _run_strategy(strategy, grid, cell, task, observer, asked, by_silos)


def deploy_cell(
    grid: Grid, cell: Cell, observer: RunObserver, folder: Path, checkpoint_folder: Path | None = None
) -> None:
    """All rounds of one cell with silos of their own, once all agree; goes on where the journal in `folder` ends.

    Commits of silos' ledgers are `remembered` in a folder that runs share, by default in the journal's.

    Guarantee: a server that adds noise draws it from a key of the operating system, which is kept in the journal
    while the run lasts.
    """
    task = load_public_task(cell)
    plan = make_plan(cell, task.objective, for_release=True)
    patient = PatientGrid(
        grid,
        has_registered_nodes=os.environ.get(REGISTERED_NODES_VARIABLE) == "1",
        on_wait=partial(report_waiting, folder.parent),
    )
    commits = CheckpointStore(checkpoint_folder or folder / "commits")
    asked = make_evaluation_plan(cell, task.objective, for_release=True)
    goes_on = cell.deployment.missing == "continue"

    def agreed_roster(_: Grid, silos: int, timeout: float) -> list[int]:
        nodes = patient.roster(silos, timeout)
        check_admission(patient, nodes, timeout, require_all=not goes_on)
        return nodes

    with ServerJournal(folder, EntrySizes.from_plan(plan)) as journal, ExitStack() as stack:
        evaluated, by_silos = None, None
        if asked is not None:
            entries, copies = (
                EntrySizes.from_plan(asked.plan),
                len(asked.plan.weights) if asked.publishes_each_silo else 1,
            )
            entries = entries._replace(lengths=tuple(copies * length for length in entries.lengths))
            evaluated = stack.enter_context(ServerJournal(folder / "evaluation", entries))
            sums = evaluation_aggregator(asked, evaluated.load_noise_key(), evaluated.load_secret_state)
            by_silos = SiloEvaluation(asked, sums, evaluated, commits)
        strategy = deployed_strategy(
            plan,
            plan.objective.initial(),
            journal,
            agreed_roster,
            continue_without_missing=goes_on,
            checkpoints=commits,
        )
        finished = _run_strategy(strategy, patient, cell, task, observer, asked, by_silos)
        for each in filter(None, (journal, evaluated)):
            each.wipe_key()  # before the result is there: then everything may be ended at any moment
        observer.finished(0, dataclasses.replace(finished, noise="release"))


def deployed_strategy(
    plan: Plan,
    initial: Tensor,
    journal: ServerJournal,
    find_roster: RosterFinder = learn_roster,
    *,
    continue_without_missing: bool = False,
    checkpoints: CheckpointStore | None = None,
) -> ReleaseStrategy:
    """The strategy of a server whose releases are real: its noise is keyed by the journal, and by nothing else."""
    sums = ServerAggregator(plan, initial, journal.load_noise_key(), journal.load_secret_state)
    return ReleaseStrategy(
        plan,
        initial,
        sums,
        journal,
        find_roster,
        continue_without_missing=continue_without_missing,
        checkpoints=checkpoints,
    )


def simulated_strategy(plan: Plan, initial: Tensor, cell: Cell) -> ReleaseStrategy:
    """The strategy of a simulation's server, whose noise is the seed's."""
    return ReleaseStrategy(plan, initial, simulated_aggregator(plan, initial, cell), absences=draw_absences(cell))


def simulated_aggregator(plan: Plan, initial: Tensor, cell: Cell) -> ServerAggregator:
    """The server's part in a simulation, with the seed's noise."""
    noise = simulation_noise(cell.noise_seed, cell.run.dtype)
    return ServerAggregator(plan, initial, integer_noise_key(cell.noise_seed), simulated_noise=noise)


_PROGRESS_SECONDS = 0.1  # seconds


def _run_strategy(
    strategy: ReleaseStrategy,
    grid: Grid,
    cell: Cell,
    task: PublicTask,
    observer: RunObserver,
    evaluation_plan: EvaluationPlan | None,
    silo_evaluation: SiloEvaluation | None,
) -> CellOutcome:
    started, plan = time.perf_counter(), strategy.plan
    evaluated_at = sorted(evaluation_rounds(plan.schedule.rounds, cell.run.evaluations))
    timeout = cell.deployment.patience
    metrics: dict[str, float] = {}
    done, last = 0, -math.inf  # a server that goes on has its first rounds behind it

    def evaluate(t: int, arrays: ArrayRecord) -> None:
        nonlocal done, last
        if (now := time.perf_counter()) - last > _PROGRESS_SECONDS or t == plan.schedule.rounds:
            observer.advanced(t - done)
            done, last = t, now
        if t not in evaluated_at:
            return
        model = decode_tensor(next(iter(arrays.values())))
        if silo_evaluation is None:
            metrics.update(*evaluate_models(task.objective, model, task.test, [f"round {t}"]))
        else:
            place = evaluated_at.index(t) + 1
            metrics.update(
                silo_evaluation.metrics(place, model, grid, lambda: strategy.nodes(grid, timeout), timeout)
            )
        observer.evaluated(0, t, dict(metrics))

    strategy.run(grid, timeout=timeout, evaluate=evaluate)
    model = next(iter(strategy.model_arrays().to_numpy_ndarrays()))
    wall = time.perf_counter() - started
    clipped = None if strategy.counts is None else strategy.counts.fraction_clipped
    return make_outcome(
        plan,
        strategy.rounds_done,
        model,
        metrics,
        clipped,
        wall,
        strategy.missed_rounds,
        make_evaluation_streams(evaluation_plan),
    )


def output_folder(run_config: Mapping[str, Any]) -> Path:
    """The folder in which a server keeps what its run is made of."""
    return Path(str(run_config["out"]) or "runs/flower")


app = make_server_app(lambda run_config: FolderReporter(output_folder(run_config)))
"""The app that engines submit: it reports to the engine that follows it."""
