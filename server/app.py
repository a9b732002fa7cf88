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

from fedpriv.claims.ledger import released_by
from fedpriv.claims.outcome import Finished, RunObserver, evaluation_rounds, finished_after, measured
from fedpriv.core.errors import FedprivError, RunError, printable
from fedpriv.core.random import KeyedNormal, integers_key, simulation_noise
from fedpriv.plan.evaluation import EvaluationPlan, evaluation_plan_of
from fedpriv.plan.plan import Plan, absences_of, plan_of
from fedpriv.plan.task import PublicTask, public_task_of_cell, task_of_cell
from fedpriv.protocol.cell_folder import FolderReporter, cell_of, report_waiting
from fedpriv.protocol.messages import (
    AGREEMENT,
    EVALUATE,
    PROTOCOL,
    REGISTERED,
    difference,
    is_tolerated,
    one_array,
    query_content,
    refusal_in,
    tensor_of,
    told_ahead,
)
from fedpriv.rounds.floats import evaluation_integers_key, evaluation_noise
from fedpriv.rounds.round import is_finite
from fedpriv.scenario.schema import Cell
from fedpriv.server.grid import PatientGrid, learn_roster
from fedpriv.server.journal import Entries, ServerJournal
from fedpriv.server.strategy import (
    Journal,
    ReleaseStrategy,
    Roster,
    SeenCommits,
    ServerSums,
    all_answers,
    release_in,
)


def check_agreement(grid: Grid, nodes: Sequence[int], timeout: float, *, all_needed: bool = True) -> None:
    """RunError, with a line for each silo that does not agree; `nodes` are those of silo 0, 1, …

    Without `all_needed`, a silo that does not answer in so many seconds is no reason to end the run.
    """
    asked, began = [Message(RecordDict(), node, AGREEMENT) for node in nodes], time.time()
    replies = {
        reply.metadata.reply_to_message_id: reply for reply in grid.send_and_receive(asked, timeout=timeout)
    }
    against: dict[int, str] = {}
    for silo, message in enumerate(asked):
        reply = replies.get(message.metadata.message_id)
        refusal = None if reply is None or reply.has_error() else refusal_in(reply.content)
        if reply is None or (refusal is not None and not refusal.final):
            if all_needed:
                against[silo] = f"no reply from silo {silo}" + (f"; {refusal.reason}" if refusal else "")
        elif reply.has_error():
            against[silo] = (
                f"silo {silo} cannot be asked whether it agrees: its app is not of protocol {PROTOCOL}, as this "
                f"coordinator's fedpriv is, or failed: {printable(str(reply.error.reason))}"
            )
        elif refusal is not None:
            own = refusal.reason.startswith(f"silo {silo} ")
            against[silo] = refusal.reason if own else f"silo {silo}: {refusal.reason}"
        elif not is_tolerated(ahead := told_ahead(reply.metadata.created_at, began, time.time())):
            against[silo] = f"silo {silo}: its clock is {difference(ahead)} the coordinator's; set both by NTP"
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
        asked: EvaluationPlan,
        sums: ServerSums,
        journal: Journal | None = None,
        commits: SeenCommits | None = None,
    ) -> None:
        self._asked, self._sums, self._journal, self._commits = asked, sums, journal, commits

    def metrics(
        self, place: int, model: Tensor, grid: Grid, nodes: Callable[[], Sequence[int]], timeout: float
    ) -> dict[str, float]:
        """By name, of evaluation number `place`, from 1; RunError if a silo does not answer as it should."""
        known = self._journal.released(place) if self._journal else None
        published = (
            self._sums.repeat(known, place) if known else self._asked_for(place, model, grid, nodes(), timeout)
        )
        return self._asked.metrics(published.view(-1, self._asked.scores.dimension))

    def _asked_for(self, place: int, model: Tensor, grid: Grid, nodes: Sequence[int], timeout: float) -> Tensor:
        content = query_content(one_array(model), place, ConfigRecord())
        commits = self._commits
        asked = {
            silo: Message(commits.told_to(silo, content) if commits is not None else content, node, EVALUATE)
            for silo, node in enumerate(nodes)
        }
        answers = all_answers(asked, grid.send_and_receive(asked.values(), timeout=timeout), f"evaluation {place}")
        if commits is not None:
            for silo, answer in enumerate(answers):
                commits.note(silo, answer)
        messages = [self._sums_in(answer, silo, place) for silo, answer in enumerate(answers)]
        released = self._sums.released(messages, place, model)
        if self._journal:
            self._journal.record(place, released.kept, {}, None, released.secret)
        return released.vector

    def _sums_in(self, content: RecordDict, silo: int, place: int) -> Tensor:
        plan, where = self._asked.plan, f"silo {silo}, evaluation {place}"
        release, _ = release_in(
            content, where, plan.rounds[place - 1].message_length, plan.message_dtype, self._sums.simulated
        )
        if not is_finite(release):
            raise RunError(f"{where}: it sent values that are not finite")
        return release


def evaluation_sums(
    asked: EvaluationPlan,
    key: bytes,
    secret: Callable[[], bytes] = bytes,
    *,
    simulated: KeyedNormal | None = None,
) -> ServerSums:
    """The server's part in evaluations; arguments as for `ServerSums`."""
    return ServerSums(asked.plan, asked.scores.initial(), key, secret, simulated=simulated, apart=asked.apart)


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
                out = out_of(context.run_config)  # RUN_DIR/deployment/DIGEST
                deploy_cell(grid, cell, observer, out / "journal", out.resolve().parents[2] / ".commits")
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
        by_silos = SiloEvaluation(
            asked, evaluation_sums(asked, evaluation_integers_key(cell), simulated=evaluation_noise(cell))
        )
    return _run(strategy, grid, cell, task, observer, asked, by_silos)


def deploy_cell(
    grid: Grid, cell: Cell, observer: RunObserver, folder: Path, remembered: Path | None = None
) -> None:
    """All rounds of one cell with silos of their own, once all agree; goes on where the journal in `folder` ends.

    Commits of silos' ledgers are `remembered` in a folder that runs share, by default in the journal's.

    Guarantee: a server that adds noise draws it from a key of the operating system, which is kept in the journal
    while the run lasts.
    """
    task = public_task_of_cell(cell)
    plan = plan_of(cell, task.objective, released=True)
    patient = PatientGrid(
        grid, registered=os.environ.get(REGISTERED) == "1", waiting=partial(report_waiting, folder.parent)
    )
    commits = SeenCommits(remembered or folder / "commits")
    asked = evaluation_plan_of(cell, task.objective, released=True)
    goes_on = cell.deployment.missing == "continue"

    def agreed_roster(_: Grid, silos: int, timeout: float) -> list[int]:
        nodes = patient.roster(silos, timeout)
        check_agreement(patient, nodes, timeout, all_needed=not goes_on)
        return nodes

    with ServerJournal(folder, Entries.of(plan)) as journal, ExitStack() as stack:
        evaluated, by_silos = None, None
        if asked is not None:
            entries, copies = Entries.of(asked.plan), len(asked.plan.weights) if asked.apart else 1
            entries = entries._replace(lengths=tuple(copies * length for length in entries.lengths))
            evaluated = stack.enter_context(ServerJournal(folder / "evaluation", entries))
            sums = evaluation_sums(asked, evaluated.key(), evaluated.secret)
            by_silos = SiloEvaluation(asked, sums, evaluated, commits)
        strategy = deployed_strategy(
            plan, plan.objective.initial(), journal, agreed_roster, without_missing=goes_on, commits=commits
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
    commits: SeenCommits | None = None,
) -> ReleaseStrategy:
    """The strategy of a server whose releases are real: its noise is keyed by the journal, and by nothing else."""
    sums = ServerSums(plan, initial, journal.key(), journal.secret)
    return ReleaseStrategy(plan, initial, sums, journal, roster, without_missing=without_missing, commits=commits)


def simulated_strategy(plan: Plan, initial: Tensor, cell: Cell) -> ReleaseStrategy:
    """The strategy of a simulation's server, whose noise is the seed's."""
    return ReleaseStrategy(plan, initial, simulated_sums(plan, initial, cell), absences=absences_of(cell))


def simulated_sums(plan: Plan, initial: Tensor, cell: Cell) -> ServerSums:
    """The server's part in a simulation, with the seed's noise."""
    noise = simulation_noise(cell.noise_seed, cell.run.dtype)
    return ServerSums(plan, initial, integers_key(cell.noise_seed), simulated=noise)


_PROGRESS_EVERY = 0.1  # seconds


def _run(
    strategy: ReleaseStrategy,
    grid: Grid,
    cell: Cell,
    task: PublicTask,
    observer: RunObserver,
    asked: EvaluationPlan | None,
    by_silos: SiloEvaluation | None,
) -> Finished:
    started, plan = time.perf_counter(), strategy.plan
    evaluated_at = sorted(evaluation_rounds(plan.schedule.rounds, cell.run.evaluations))
    timeout = cell.deployment.patience
    metrics: dict[str, float] = {}
    done, last = 0, -math.inf  # a server that goes on has its first rounds behind it

    def evaluate(t: int, arrays: ArrayRecord) -> None:
        nonlocal done, last
        if (now := time.perf_counter()) - last > _PROGRESS_EVERY or t == plan.schedule.rounds:
            observer.advanced(t - done)
            done, last = t, now
        if t not in evaluated_at:
            return
        model = tensor_of(next(iter(arrays.values())))
        if by_silos is None:
            metrics.update(*measured(task.objective, model, task.test, [f"round {t}"]))
        else:
            place = evaluated_at.index(t) + 1
            metrics.update(by_silos.metrics(place, model, grid, lambda: strategy.nodes(grid, timeout), timeout))
        observer.evaluated(0, t, dict(metrics))

    strategy.run(grid, timeout=timeout, evaluate=evaluate)
    model = next(iter(strategy.published().to_numpy_ndarrays()))
    wall = time.perf_counter() - started
    clipped = None if strategy.counts is None else strategy.counts.fraction_clipped
    return finished_after(
        plan, strategy.rounds_done, model, metrics, clipped, wall, strategy.missed, released_by(asked)
    )


def out_of(run_config: Mapping[str, Any]) -> Path:
    """The folder in which a server keeps what its run is made of."""
    return Path(str(run_config["out"]) or "runs/flower")


app = server_app(lambda run_config: FolderReporter(out_of(run_config)))
"""The app that engines submit: it reports to the engine that follows it."""
