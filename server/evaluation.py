"""The server's side of evaluations that silos make: it sends a model, and gets sums over their test records.

untrusted    every silo's means come with its own noise, and are kept and published silo by silo
trusted      exact integer sums come; what is kept and published is their sum with the server's noise
no noise     exact means come: nothing is claimed
"""

from collections.abc import Callable, Sequence

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedpriv.errors import RunError
from fedpriv.protocol.arrays import is_finite, one_array, query_content, vector_in
from fedpriv.protocol.messages import EVALUATE
from fedpriv.randomness import KeyedNormal
from fedpriv.running.evaluation import EvaluationPlan
from fedpriv.running.plan import Plan
from fedpriv.server.integer_sums import sums_of
from fedpriv.server.journal import Entries
from fedpriv.server.noise import Kept, Released, ServerSums
from fedpriv.server.replies import all_answers
from fedpriv.server.strategy import Journal


class SiloBySilo:
    """What silos send, each by itself, in a row: nothing is added up, and nothing added.

    Guarantee: it is what the silos released, and no noise is drawn here.
    """

    simulated = False

    def __init__(self, plan: Plan) -> None:
        self._length = plan.objective.dimension

    def released(self, messages: list[Tensor], t: int, query: Tensor) -> Released:
        if wrong := [str(silo) for silo, message in enumerate(messages) if not is_finite(message)]:
            raise RunError(f"silo {', '.join(wrong)}, evaluation {t}: it sent values that are not finite")
        row = torch.cat(messages)
        return Released(row, Kept(row))

    def repeat(self, known: Kept, t: int) -> Tensor:
        return known.values


class SiloEvaluation:
    """The evaluations of one run, in order.

    Guarantee: what was published of an evaluation is in the journal before anybody sees it, and is not asked for
    again: no second noise is drawn on sums that have been published, whenever the server is killed.
    """

    def __init__(self, asked: EvaluationPlan, sums: ServerSums, journal: Journal | None = None) -> None:
        self._asked, self._sums, self._journal = asked, sums, journal

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
        asked = {silo: Message(content, node, EVALUATE) for silo, node in enumerate(nodes)}
        answers = all_answers(asked, grid.send_and_receive(asked.values(), timeout=timeout), f"evaluation {place}")
        messages = [self._sums_in(answer, silo, place) for silo, answer in enumerate(answers)]
        released = self._sums.released(messages, place, model)
        if self._journal:
            self._journal.record(place, released.kept, {}, None, released.secret)
        return released.vector

    def _sums_in(self, content: RecordDict, silo: int, place: int) -> Tensor:
        plan = self._asked.plan
        try:
            release = vector_in(content, "release")
        except ValueError as error:
            raise RunError(f"silo {silo}, evaluation {place}: {error}") from None
        shape, dtype = (plan.message_length(place),), plan.message_dtype
        if release.shape != shape or release.dtype != dtype:
            raise RunError(
                f"silo {silo}, evaluation {place}: sums of shape {tuple(release.shape)} and type {release.dtype}, "
                f"expected {shape} and {dtype}"
            )
        if self._sums.simulated and "metrics" not in content:
            raise RunError(
                f"silo {silo}, evaluation {place}: it answers as silos with guards do, and this server's noise is "
                "a simulation's; use --engine deployment"
            )
        return release


def evaluation_sums(
    asked: EvaluationPlan,
    key: bytes,
    secret: Callable[[], bytes] = bytes,
    *,
    simulated: KeyedNormal | None = None,
) -> ServerSums:
    """The server's part in evaluations; arguments as for `sums_of`."""
    if asked.apart:
        return SiloBySilo(asked.plan)
    return sums_of(asked.plan, asked.scores.initial(), key, secret, simulated=simulated)


def evaluation_entries(asked: EvaluationPlan) -> Entries:
    """What evaluations leave in a journal of their own."""
    entries = Entries.of(asked.plan)
    if not asked.apart:
        return entries
    return entries._replace(lengths=tuple(len(asked.plan.weights) * length for length in entries.lengths))
