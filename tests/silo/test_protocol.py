"""Masked rounds from query to sum: what the server sees, what it is charged for, and what ends a run."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from scipy import stats
from torch import Tensor

from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import make_release_streams, make_silo_stream, stream_from_data, stream_to_data
from fedpriv.clients.app import app as honest
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError, RunError
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.loss.objective import Objective
from fedpriv.noise.trust import Noise
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_task
from fedpriv.protocol.cell_folder import make_run_config
from fedpriv.protocol.messages import (
    PUBLIC_KEY_QUERY,
    read_int_field,
    read_public_keys,
    read_tensor,
    release_content,
)  # fmt: skip
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import simulated_strategy
from fedpriv.server.strategy import ReleaseStrategy
from tests.conftest import small_tree

Answer = Callable[[Message, Context], Message]
MASKED = "secure-aggregation"
UNEQUAL = {"silos": 3, "rounds": 8, "samples": 150, "size_skew": 0.5}


def masked_cell(**overrides: Any) -> Cell:
    return resolve_cell(small_tree(**{"algorithm__trust": MASKED, **overrides}), "test")


def trusting(cell: Cell) -> Cell:
    """The same cell with a trusted server."""
    return cell.model_copy(update={"algorithm": cell.algorithm.model_copy(update={"trust": "trusted"})})


def objective_of(cell: Cell) -> Objective:
    return load_task(cell).objective


def plan_with(cell: Cell) -> Plan:
    return make_plan(cell, objective_of(cell))


def app_that(answer: Answer) -> ClientApp:
    """A ClientApp whose key and train messages go through `answer`."""
    app = ClientApp()

    @app.query("roster")
    def roster(message: Message, context: Context) -> Message:
        return honest(message, context)

    app.query("key")(answer)
    app.train()(answer)
    return app


def run_over(app: ClientApp, cell: Cell) -> ReleaseStrategy:
    strategy = simulated_strategy(plan_with(cell), objective_of(cell).initial(), cell)
    strategy.run(InProcessGrid(app, cell.federation.silos, make_run_config(cell, Path())), timeout=1.0)
    return strategy


class Overheard(NamedTuple):
    """An honest app, what every silo sent round by round, and the queries."""

    app: ClientApp
    sent: dict[int, list[Tensor]]
    queries: list[Message]


@pytest.fixture
def overheard() -> Overheard:
    sent: dict[int, list[Tensor]] = {}
    queries: list[Message] = []

    def answer(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type != PUBLIC_KEY_QUERY:
            queries.append(message)
            number = int(context.node_config["partition-id"])
            sent.setdefault(number, []).append(read_tensor(reply.content, "release"))
        return reply

    return Overheard(app_that(answer), sent, queries)


def test_masked_messages_are_uniform_and_sum_to_the_rounded_releases(overheard: Overheard) -> None:
    """Guarantee of Silo.message: unequal silos, every round; χ² of bytes at level 1e-6 a message, 24 messages."""
    app, sent, queries = overheard
    cell = masked_cell(federation=UNEQUAL)
    run_over(app, cell)
    grid, weights = plan_with(cell).grid, plan_with(cell).weights
    assert grid is not None
    assert len(set(weights)) > 1
    silos = [SimulatedFederation.from_cell(cell).silo(number) for number in range(3)]
    states = [silo.initial_state() for silo in silos]
    by_round = {read_int_field(message.content, "config", "t"): message.content for message in queries}
    for t in range(1, 9):
        query = read_tensor(by_round[t], "query")
        words = np.zeros(len(query), np.uint64)
        for number, silo in enumerate(silos):
            release, states[number] = silo.answer(states[number], t, query)
            rounded = grid.encode(weights[number] * release.vector.numpy())
            message = sent[number][t - 1].numpy()
            assert message.dtype == np.uint64
            assert stats.chisquare(np.bincount(message.view(np.uint8), minlength=256)).pvalue > 1e-6
            assert stats.chisquare(np.bincount(rounded.view(np.uint8), minlength=256)).pvalue < 1e-100
            words += rounded
        together = np.sum([sent[number][t - 1].numpy() for number in range(3)], axis=0, dtype=np.uint64)
        assert np.array_equal(together, words)


def test_masked_messages_take_eight_bytes_per_coordinate_and_queries_one_key_per_silo(
    overheard: Overheard,
) -> None:
    app, sent, queries = overheard
    run_over(app, masked_cell(run__dtype="float32", federation__rounds=2))
    assert {message.numpy().nbytes for messages in sent.values() for message in messages} == {8 * 7850}
    (keys,) = {read_public_keys(query.content) for query in queries}
    assert len(keys) == 3 * 32


def test_a_masked_release_has_double_precision_before_rounding_to_the_grid() -> None:
    """Guarantee: a large sum in float32 would swallow the digits of the noise below the grid, in each silo."""
    cell = masked_cell(run__dtype="float32")
    silo, plan = SimulatedFederation.from_cell(cell).silo(0), plan_with(cell)
    release, _ = silo.answer(silo.initial_state(), 1, objective_of(cell).initial())
    assert release.vector.dtype == torch.float64
    assert float((release.vector - release.vector.float()).abs().max()) > 0.0
    clear = SimulatedFederation.from_cell(trusting(cell)).silo(0)
    exact, _ = clear.answer(silo.initial_state(), 1, objective_of(cell).initial())
    noise = silo.noise.vector(7850, 0, 1).astype(np.float64) * float(plan.noise.std_of(0))
    assert np.array_equal(release.vector.numpy(), exact.vector.numpy() + noise)


@pytest.mark.parametrize("federation", [{"silos": 4, "rounds": 8}, UNEQUAL])
def test_the_decoded_masked_sum_has_the_noise_of_a_trusted_server(federation: dict[str, Any]) -> None:
    """KS at level 1e-4 against N(0, σ²) of the trusted server; rejected with one share less; rounds apart."""
    cell = masked_cell(federation=federation, privacy={"relation": "zero-out", "mu": 2.0})
    trusted, plan, silos = trusting(cell), plan_with(cell), cell.federation.silos
    sigma = plan_with(trusted).noise.std_in_mean
    assert plan.noise.std_in_mean == pytest.approx(sigma, rel=1e-12)
    assert plan.grid is not None
    query, noise = objective_of(cell).initial(), []
    masked = [SimulatedFederation.from_cell(cell).silo(number) for number in range(silos)]
    exact = [SimulatedFederation.from_cell(trusted).silo(number) for number in range(silos)]
    states, plain = [silo.initial_state() for silo in masked], [silo.initial_state() for silo in exact]
    keys = b"".join(silo.masker.public_key for silo in masked)
    for t in range(1, 9):
        words, truth = [], torch.zeros_like(query)
        for number in range(silos):
            release, states[number] = masked[number].answer(states[number], t, query)
            words.append(masked[number].make_message(release.vector, t, keys).numpy())
            clear, plain[number] = exact[number].answer(plain[number], t, query)
            truth += plan.weights[number] * clear.vector
        noise.append(plan.grid.decode_sum(words) - truth.numpy())
    drawn = np.array(noise) / sigma
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 1e-4
    assert stats.kstest(drawn.ravel() * math.sqrt(silos / (silos - 1)), "norm").pvalue < 1e-12
    assert np.abs(np.corrcoef(drawn) - np.eye(8)).max() < 5 / math.sqrt(7850)


def test_the_claim_of_a_masked_run_follows_from_the_noise_of_the_sum() -> None:
    """Halving every share doubles the claim; leaving one of three out makes it √(3/2) of itself."""
    plan = plan_with(masked_cell(federation=UNEQUAL))
    (stream,) = make_release_streams(plan, 8)
    assert stream.party_name == "sum of silos 0-2"
    assert stream.mu == pytest.approx(4.0, rel=1e-12)
    sources = plan.noise.sources
    halved = Noise(tuple(source._replace(std=0.5 * float(source.std)) for source in sources))
    for noise, mu in ((halved, 8.0), (Noise(sources[:2]), 4.0 * math.sqrt(1.5))):
        claim = compute_claim(make_release_streams(dataclasses.replace(plan, noise=noise), 8))
        assert claim is not None
        assert claim.guarantee.mu == pytest.approx(mu, rel=1e-12)  # type: ignore[union-attr]


def test_the_noise_share_of_one_silo_gives_sqrt_m_times_the_mu_of_the_sum() -> None:
    """Guarantee: against everybody else together μ √M is left, whatever the silos' sizes."""
    plan = plan_with(masked_cell(federation__silos=4))
    assert make_silo_stream(plan, 0, 8).mu == pytest.approx(8.0)
    unequal = plan_with(masked_cell(federation=UNEQUAL))
    prices = [make_silo_stream(unequal, silo, 8).mu for silo in range(3)]
    assert prices == pytest.approx([4.0 * math.sqrt(3.0)] * 3)


@pytest.mark.parametrize("missing", ["key", "round 3"])
def test_a_missing_silo_ends_a_masked_run_with_an_error_that_names_the_silo(missing: str) -> None:
    """Guarantee: a partial sum is never decoded."""

    def answer(message: Message, context: Context) -> Message:
        key = message.metadata.message_type == PUBLIC_KEY_QUERY
        now = "key" if key else f"round {read_int_field(message.content, 'config', 't')}"
        if context.node_config["partition-id"] == 1 and now == missing:
            raise ZeroDivisionError("gone")
        return honest(message, context)

    what = "public keys" if missing == "key" else missing
    with pytest.raises(RunError, match=rf"silo 1 failed in {what}"):
        run_over(app_that(answer), masked_cell())


class Forgetful(InProcessGrid):
    """Loses silo 2's replies from the third round on."""

    rounds = -2  # roster and keys come before round 1

    def pull_messages(self, message_ids: Any) -> Any:
        replies = super().pull_messages(message_ids)
        self.rounds += 1
        return [reply for reply in replies if self.rounds < 3 or reply.metadata.src_node_id != 1002]


def test_a_masked_round_with_a_lost_reply_is_not_aggregated() -> None:
    cell = masked_cell()
    strategy = simulated_strategy(plan_with(cell), objective_of(cell).initial(), cell)
    with pytest.raises(RunError, match="round 3: no reply from silo 2"):
        strategy.run(Forgetful(honest, 3, make_run_config(cell, Path())), timeout=1.0)
    assert strategy.rounds_done == 2


def test_a_reply_that_is_not_a_masked_message_is_refused() -> None:
    def answer(message: Message, context: Context) -> Message:
        if message.metadata.message_type == PUBLIC_KEY_QUERY or context.node_config["partition-id"] != 1:
            return honest(message, context)
        return Message(release_content(torch.zeros(7850, dtype=torch.float64), None), reply_to=message)

    line = r"silo 1, round 1: a release .*torch\.float64, expected \(7850,\) and .*uint64"
    with pytest.raises(RunError, match=line):
        run_over(app_that(answer), masked_cell())


PHASED = {"name": "phased-sgd", "trust": MASKED, "step": 0.01, "radius": 2.0}


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"federation__silos": 1}, 'the sum over one silo is its message; use "untrusted"'),
        ({"privacy__mode": "none", "privacy__rho": None}, "rounded to a fraction of their noise"),
        ({"deployment__missing": "continue"}, "masks cancel in the sum of all silos only"),
        ({"algorithm": PHASED}, "phased-sgd can be run with 'curator'"),
    ],
)
def test_scenarios_incompatible_with_secure_aggregation_are_refused_in_one_line(
    overrides: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason) as refusal:
        masked_cell(**overrides)
    assert "\n" not in str(refusal.value)


def test_a_masked_sum_that_does_not_fit_on_the_grid_is_refused() -> None:
    cell = masked_cell(algorithm__clip=1e3, privacy={"relation": "zero-out", "mu": 1e8}, run__dtype="float64")
    with pytest.raises(InputError, match="do not fit on a grid"):
        plan_with(cell)


def test_the_release_stream_of_a_masked_run_survives_a_json_round_trip(tmp_path: Path) -> None:
    (stream,) = make_release_streams(plan_with(masked_cell()), 8)
    assert stream_from_data(json.loads(json.dumps(stream_to_data(stream)))) == stream
