"""What a silo that misbehaves does to a run: it fails, with the silo's number and the round."""

import io
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedpriv.claims.outcome import RunObserver
from fedpriv.clients.app import app as honest
from fedpriv.core.errors import RunError
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.protocol.messages import PUBLIC_KEY_QUERY, RecordCounts, release_content
from fedpriv.rounds import floats as rounds
from fedpriv.rounds.floats import FloatSteps
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import run_cell, simulated_strategy
from fedpriv.server.strategy import ReleaseStrategy, ServerAggregator

MakeCell = Callable[..., Cell]
Answer = Callable[[Message, Context], Message]


def app_where(silo: int, t: int, answer: Answer) -> ClientApp:
    """A ClientApp that is honest except for one silo in one round."""
    app = ClientApp()

    @app.query("roster")
    def roster(message: Message, context: Context) -> Message:
        return honest(message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == silo and message.content["config"]["t"] == t:
            return answer(message, context)
        return honest(message, context)

    return app


def run_with(
    app: ClientApp, cell: Cell, grid_type: type[InProcessGrid] = InProcessGrid, seed: int | None = None
) -> ReleaseStrategy:
    """A run with these silos; the server may have another seed than they have."""
    task = load_task(cell)
    of_server = cell if seed is None else cell.model_copy(update={"seed": seed})
    strategy = simulated_strategy(make_plan(cell, task.objective), task.objective.initial(), of_server)
    grid = grid_type(app, cell.federation.silos, make_run_config(cell, Path()))
    strategy.run(grid, timeout=1.0)
    return strategy


def raising(*_: Any) -> Message:
    raise ZeroDivisionError("a bug in the silo's code")


def replying(vector: torch.Tensor) -> Answer:
    return lambda message, _: Message(release_content(vector, RecordCounts(1, 0)), reply_to=message)


def archived(message: Message, _: Any) -> Message:
    archive = io.BytesIO()
    np.savez(archive, vector=np.zeros(7850))
    described = Array("float64", (7850,), "numpy.ndarray", archive.getvalue())
    content = {"release": ArrayRecord({"vector": described}), "config": ConfigRecord({"seal": bytes(32)})}
    return Message(RecordDict(content), reply_to=message)


FAULTS: list[tuple[Answer, str]] = [
    (raising, r"silo 1 failed in round 3: ZeroDivisionError: a bug in the silo's code"),
    (replying(torch.full((7850,), torch.nan, dtype=torch.float64)), r"silo 1, round 3: .* not finite"),
    (replying(torch.full((7850,), torch.inf, dtype=torch.float64)), r"silo 1, round 3: .* not finite"),
    (replying(torch.zeros(7849, dtype=torch.float64)), r"silo 1, round 3: a release of shape \(7849,\)"),
    (replying(torch.zeros(7850, dtype=torch.float32)), r"silo 1, round 3: .* type torch.float32"),
    (lambda message, _: Message(RecordDict(), reply_to=message), r"silo 1, round 3: .* no 'release' vector"),
    (archived, r"silo 1, round 3: .*an array whose values are no plain numbers"),
    (
        lambda message, _: Message(Error(code=8, reason="died"), reply_to=message),
        r"silo 1 failed in round 3: died",
    ),
]


@pytest.mark.parametrize(("answer", "line"), FAULTS)
def test_a_faulty_reply_ends_the_run_naming_silo_and_round(
    small_cell: MakeCell, answer: Answer, line: str
) -> None:
    with pytest.raises(RunError, match=line):
        run_with(app_where(1, 3, answer), small_cell())


@pytest.mark.parametrize(
    ("first_lost", "reason"), [(1, "no node says it is silo 2"), (4, "round 3: no reply from silo 2")]
)
def test_a_missing_reply_ends_the_run(small_cell: MakeCell, first_lost: int, reason: str) -> None:
    class LossyGrid(InProcessGrid):
        calls = 0

        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            self.calls += 1
            replies = list(super().send_and_receive(messages, timeout=timeout))
            return replies if self.calls < first_lost else replies[:-1]

    with pytest.raises(RunError, match=reason):
        run_with(honest, small_cell(), LossyGrid)


def test_the_order_of_replies_does_not_matter(small_cell: MakeCell) -> None:
    class ReversingGrid(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            return list(super().send_and_receive(messages, timeout=timeout))[::-1]

    cell = small_cell(run__dtype="float32", federation__silos=7)
    forward, backward = run_with(honest, cell), run_with(honest, cell, ReversingGrid)
    assert torch.equal(forward.model, backward.model)


@pytest.mark.parametrize("fault", ["lost", "short"])
def test_without_every_silos_key_no_masked_round_begins(small_cell: MakeCell, fault: str) -> None:
    class Faulty(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if messages and next(iter(messages)).metadata.message_type == PUBLIC_KEY_QUERY:
                replies[1].content["key"]["public"] = bytes(95)
                return [replies[1], replies[0]] if fault == "lost" else replies
            return replies

    line = "public keys: no reply from silo 2" if fault == "lost" else "silo 1, public keys: 95 bytes, expected 32"
    with pytest.raises(RunError, match=line):
        run_with(honest, small_cell(algorithm__trust="secure-aggregation"), Faulty)


def test_a_server_has_no_noise_in_floating_point_outside_a_simulation(small_cell: MakeCell) -> None:
    """Guarantee of `ServerAggregator`: floating point protects nobody."""
    for trust, is_refused in (("trusted", True), ("untrusted", False)):
        cell = small_cell(algorithm__trust=trust)
        plan = make_plan(cell, load_task(cell).objective)
        error = pytest.raises(ValueError, match="floating point in simulations only")
        with error if is_refused else nullcontext():
            ServerAggregator(plan, plan.objective.initial(), bytes(32))


def test_an_observer_sees_every_round_and_evaluation_and_the_outcome_has_the_seconds_of_the_run(
    small_cell: MakeCell,
) -> None:
    class Recorder(RunObserver):
        rounds, evaluations = 0, list[int]()

        def advanced(self, rounds: int) -> None:
            assert rounds > 0
            self.rounds += rounds

        def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
            assert self.rounds <= t
            self.evaluations.append(t)

    cell, observer, start = small_cell(), Recorder(), time.perf_counter()
    outcome = run_cell(InProcessGrid(honest, 3, make_run_config(cell, Path())), cell, observer)
    assert 0.0 < outcome.wall_seconds <= time.perf_counter() - start
    assert (observer.rounds, observer.evaluations) == (8, [2, 4, 6, 8])
    assert (len(outcome.model), outcome.fraction_clipped) == (7850, 0.0)
    assert outcome.metrics.keys() == {"test_loss", "test_accuracy"}


@pytest.mark.parametrize(("clip", "clipped"), [(1e-6, 48), (1e6, 0)])
def test_a_server_adds_up_the_records_and_the_clipped_ones_of_all_rounds(
    small_cell: MakeCell, clip: float, clipped: int
) -> None:
    """Three silos with two records in each of eight rounds."""
    sgd = {"name": "dp-sgd", "trust": "untrusted", "clip": clip, "step": 0.1}
    cell = small_cell(algorithm=sgd, federation__batch=2, privacy={"relation": "zero-out", "mu": 1.0})
    objective = load_task(cell).objective
    before = simulated_strategy(make_plan(cell, objective), objective.initial(), cell)
    assert (before.rounds_done, before.counts) == (0, RecordCounts(0, 0))
    after = run_with(honest, cell)
    assert (after.rounds_done, after.counts) == (8, RecordCounts(48, clipped))


@pytest.mark.parametrize("silo", ["0", "1"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_substitute_of_a_silo_absent_in_round_1_has_the_type_of_the_messages(
    small_cell: MakeCell, silo: str, dtype: str
) -> None:
    """Sums for a trusted server are float64 in any run: a substitute in float32 for silo 0 ended the run."""
    cell = small_cell(algorithm__trust="trusted", run__dtype=dtype, federation__away={silo: [1]})
    assert run_with(honest, cell).missed_rounds == {int(silo): [1]}


def test_two_nodes_that_claim_to_be_one_silo_are_refused(small_cell: MakeCell) -> None:
    class TwinGrid(InProcessGrid):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            for context in self._contexts.values():
                context.node_config["partition-id"] = 0

    with pytest.raises(RunError, match="a node says it is silo 0"):
        run_with(honest, small_cell(), TwinGrid)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("count", "reason"),
    [(2, "2 of 3 silos were connected"), (4, "4 nodes are connected, the scenario has 3 silos")],
)
def test_a_run_with_too_few_or_too_many_nodes_ends(small_cell: MakeCell, count: int, reason: str) -> None:
    class OtherGrid(InProcessGrid):
        def get_node_ids(self) -> list[int]:
            return [*super().get_node_ids(), 7][:count]

    with pytest.raises(RunError, match=reason):
        run_with(honest, small_cell(), OtherGrid)


def test_a_trusted_server_adds_noise_once_and_an_untrusted_one_none(small_cell: MakeCell) -> None:
    """The difference of two runs that differ in the server's noise source only."""
    for trust in ("trusted", "untrusted"):
        cell = small_cell(algorithm__trust=trust)
        one, other = (run_with(honest, cell, seed=seed).model for seed in (1, 2))
        assert torch.equal(one, other) == (trust == "untrusted")
        assert torch.allclose(one, other) == (trust == "untrusted")


def test_values_too_large_to_add_name_all_silos_if_each_message_is_finite(small_cell: MakeCell) -> None:
    """Was: "silo , round 1", where the vectors of silos are published in a row."""
    cell = small_cell()
    objective = load_task(cell).objective
    plan, initial = make_plan(cell, objective), objective.initial()
    message = torch.zeros_like(initial)
    message[0] = 0.9 * torch.finfo(initial.dtype).max
    aggregator = ServerAggregator(plan, initial, bytes(32), publishes_each_silo=True)
    with pytest.raises(RunError, match=r"silo 0, 1, …, round 1: the release has values that are not finite"):
        aggregator.make_release([message] * len(plan.weights), 1, initial)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_aggregation_in_chunks_equals_aggregation_of_whole_vectors_bit_for_bit(
    dtype: str, small_cell: Callable[..., Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = small_cell(run__dtype=dtype)
    objective = load_task(cell).objective
    plan, initial = make_plan(cell, objective), objective.initial()
    generator = torch.Generator().manual_seed(1)
    messages = [torch.randn(len(initial), generator=generator).to(initial.dtype) for _ in plan.weights]
    weights = torch.tensor(plan.weights, dtype=initial.dtype)
    assert len(plan.weights) > 1
    for piece in (64, len(initial) - 1, rounds._CHUNK):
        monkeypatch.setattr(rounds, "_CHUNK", piece)
        mean = FloatSteps(plan).aggregate(messages, 1)
        assert torch.equal(mean, weights @ torch.stack(messages))
