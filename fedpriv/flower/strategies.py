"""Strategies for the ServerApp of a Flower app: the papers' rounds on the app's named arrays.

    strategy = DPMu2FL(trust="untrusted", silos=2, rounds=100, rho=4.0, relation="zero-out", diameter=10.0,
                       clip=1.0, step=0.1)
    result = strategy.start(grid, ArrayRecord(Net().state_dict()), evaluate_fn=evaluate)

A row is an algorithm in fedpriv's table, such as "dp-mu2-fl", with its noise and its optimizer.  A cell is the
run's scenario as an object, a plan has what is known of the run before round 1, and the claim is the guarantee of
the rounds that silos were asked for.

The ClientApps answer with `PrivateClient`.  Round 0 releases nothing: it asks each node for its silo's number, and
whether its guard, or else its module and records, fit the run.  In round t, from 1, the query x_t, (d,), goes to
the silos as named arrays.  The optimizer turns the noisy mean of their messages, (d,), into x_{t+1} and into the
model that the run would publish.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor

from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import make_release_streams
from fedpriv.claims.outcome import evaluation_rounds
from fedpriv.core.errors import InputError, refuse
from fedpriv.core.figures import format_epsilon_delta
from fedpriv.core.random import system_key
from fedpriv.core.replicates import limit_to_one_thread
from fedpriv.flower.guards import (
    ARRAYS,
    ROUND,
    ModelLayout,
    cell_from_keywords,
    cell_from_scenario,
    flatten_arrays,
    make_terms_config,
    with_dtype,
)
from fedpriv.loss.objective import Deterministic
from fedpriv.participation.orders import Dependence
from fedpriv.plan.plan import Plan, draw_absences, make_plan
from fedpriv.protocol.messages import CONFIG, TRAIN, read_optional_bytes
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import simulated_aggregator
from fedpriv.server.grid import ask_roster
from fedpriv.server.strategy import ReleaseStrategy, ServerAggregator

_log = logging.getLogger("flwr")  # `flwr run --stream` shows the lines of this logger
_MAX_REPORTS = 20
"""Most rounds of a run after which ε is logged."""


@dataclass(frozen=True)
class RemoteLoss(Deterministic):
    """Loss that only silos can compute.

    The server knows its gradient's length d, but no Lipschitz or smoothness constant, so that both are infinite.
    """

    initial_point: Tensor
    """x_1 (d,)."""
    lipschitz = smoothness = torch.inf
    dependence: ClassVar[Dependence] = Dependence.RECORD
    """Dependence of the silos' loss: its increments are those of single records."""

    @property
    def dimension(self) -> int:
        return len(self.initial_point)

    def initial(self) -> Tensor:
        return self.initial_point

    def increment(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("a server of an app has no records, and evaluates with its evaluate_fn")

    per_record = evaluate = increment


class NamedReleases(ReleaseStrategy):
    """Rounds of one run, whose queries and models are an app's named arrays."""

    def __init__(self, cell: Cell, layout: ModelLayout, initial: Tensor, *, seeded: bool) -> None:
        self._layout, self._terms = layout, make_terms_config(cell, seeded=seeded)
        plan = make_plan(cell, RemoteLoss(initial), for_release=not seeded)
        super().__init__(
            plan,
            initial,
            simulated_aggregator(plan, initial, cell) if seeded else ServerAggregator(plan, initial, system_key()),
            find_roster=self._greet_nodes,
            min_replies=cell.deployment.min_replies,
            absences=draw_absences(cell),
        )

    def encode_vector(self, vector: Tensor) -> ArrayRecord:
        return self._layout.to_record(vector)

    def make_content(self, arrays: ArrayRecord, t: int, config: ConfigRecord) -> RecordDict:
        config = ConfigRecord({**config, **self._terms, "keys": self._silo_keys, ROUND: t})
        return RecordDict({ARRAYS: arrays, CONFIG: config})

    def _greet_nodes(self, grid: Grid, silos: int, timeout: float) -> list[int]:
        """Return the nodes of silo 0, 1, … after each has agreed to answer.

        Their public keys, which are b"" without masks, are kept for later messages.
        """
        content = self.make_content(self.query(), 0, ConfigRecord())
        replies = ask_roster(grid, silos, timeout, lambda node: Message(content, node, TRAIN))
        self._silo_keys = b"".join(read_optional_bytes(reply.content, "public") for reply in replies)
        return [reply.metadata.src_node_id for reply in replies]


class PrivateStrategy(FedAvg):
    """Strategy that runs the rounds of one row of the table of algorithms, and evaluates as FedAvg does.

    Guarantee: models and queries of a run of `start` are post-processing of releases that keep `claim`, and of
    which silos answered, if the server is as the trust setting says, the clients answer with `PrivateClient`, and
    no `seed` is given.  Metrics that clients send with `fraction_evaluate` above 0 are no part of the claim.  The
    claim is that of one run, and a strategy has one run.  A silo that fails or refuses ends the run.  So does one
    that does not answer, unless the scenario says `deployment.missing = "continue"` and enough silos answer: then
    it counts as a silo whose increment is zero.  The weights of silos never change, and nothing is averaged over
    fewer answers.
    """

    row: ClassVar[str | None] = None
    """Row of the table that a subclass runs, or None if the row is an argument."""

    def __init_subclass__(cls, row: str | None = None) -> None:
        """Store the row of the table that a subclass runs."""
        cls.row = row or cls.row

    def __init__(
        self,
        row: str | None = None,
        *,
        scenario: str | Path | None = None,
        seed: int | None = None,
        max_epsilon: float | None = None,
        fraction_evaluate: float = 0.0,
        min_evaluate_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        evaluate_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None = None,
        **keywords: Any,
    ) -> None:
        """Fix the terms of the run, from keywords or from a scenario file.

        Args:
            row: Row of the table of algorithms, such as "dp-mu2-fl", or None for that of the subclass or scenario.
            scenario: Scenario file instead of keywords.  Records are the app's own, not those of its [data].
            seed: Seed of a simulation, whose noise anybody can compute from it, or None for noise from the
                operating system.
            max_epsilon: Limit of ε at the scenario's δ, or None for no limit.  The run ends before a round that
                would exceed it.
            fraction_evaluate: Share of the nodes whose ClientApp evaluates after each round.  Their metrics are
                releases of records, and no claim counts them.
            min_evaluate_nodes: Smallest number of nodes that evaluate, if any do, or all silos if there are fewer.
            weighted_by_key: Name of the metric that is a node's weight in the mean of the metrics.
            evaluate_metrics_aggr_fn: Function that merges the metrics of the nodes that evaluated into one
                record, or None for Flower's weighted mean.
            keywords: `trust`, `silos`, `rounds`, `batch`, `epochs`, `sampling`, `relation`, one of `mu`, `zcdp`
                and `epsilon` (or `rho` of DP-μ²-FL, or `mode="none"`), `delta` and the row's own keys (`clip`,
                `step`, `diameter`, …), as in the sections of a scenario.  `model` names the network for guards, or
                is their [model] section.

        Raises:
            InputError: A key, the row or the scenario cannot be used, or they do not go together.
        """
        name = self.row or row
        refuse(
            {
                f"row = {row!r}: {type(self).__name__} is {name!r}; leave it out": row not in (None, name),
                f"{next(iter(keywords), None)}: give it in {scenario}, or leave the scenario out": (
                    scenario is not None and keywords
                ),
                f"name = {keywords.get('name')!r}: leave it out; the class or the argument `row` says the row": (
                    "name" in keywords
                ),
                "PrivateStrategy: give a row, such as 'dp-mu2-fl', or a scenario": name is None
                and scenario is None,
            }
        )
        self.cell = (
            cell_from_scenario(Path(scenario), name, seed)
            if scenario is not None
            else cell_from_keywords(name or "", keywords, seed)
        )
        self._seeded, self._max_epsilon, self._asked_rounds = seed is not None, max_epsilon, 0
        self._releases: NamedReleases | None = None
        super().__init__(
            fraction_evaluate=fraction_evaluate,
            min_evaluate_nodes=min(min_evaluate_nodes, self.cell.federation.silos),
            min_available_nodes=self.cell.federation.silos,
            weighted_by_key=weighted_by_key,
            evaluate_metrics_aggr_fn=evaluate_metrics_aggr_fn,
        )

    @property
    def plan(self) -> Plan:
        """Plan of the run, fixed and public before round 1.

        Raises:
            InputError: The strategy has not been started.
        """
        return self._started_releases.plan

    @property
    def claim(self) -> str:
        """Guarantee of all rounds that silos were asked for, as a sentence.

        A round that failed counts, since silos may have answered it.
        """
        if not self._asked_rounds:
            return "nothing was released"
        if (claim := compute_claim(make_release_streams(self.plan, self._asked_rounds))) is None:
            return "no guarantee: the run adds no noise"
        return f"{claim.format_sentence('line', self.cell.privacy.delta)}, {self.plan.trust.title}" + (
            "; the noise is of a seed, and protects nobody" if self._seeded else ""
        )

    def epsilon(self, rounds: int) -> float | None:
        """Return ε of the first `rounds` rounds at the scenario's δ, rounded up, or None without noise.

        Some kinds of secret sampling are charged as a whole.  Then ε is that of all rounds.

        Args:
            rounds: Number of rounds, from 1 to that of the plan.

        Raises:
            InputError: The strategy has not been started.
        """
        claim = compute_claim(make_release_streams(self.plan, rounds))
        return None if claim is None else claim.guarantee.epsilon_of(self.cell.privacy.delta)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 0,
        timeout: float = 3600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the planned rounds from `initial_arrays`, or as many of them as `max_epsilon` allows.

        Args:
            grid: Flower's connection to the silos' nodes.
            initial_arrays: x_1, the trainable parameters by name.
            num_rounds: Number of planned rounds, or 0 in its place.  Other numbers are refused.
            timeout: Longest wait in seconds, for the silos to connect and again for the replies of each round and
                of each evaluation.
            train_config: Further keys in the messages of rounds from 1.
            evaluate_config: Further keys in the messages of evaluations.
            evaluate_fn: Function of a round's number and a model, called after each round, and before round 1
                with 0 and `initial_arrays`, or None.

        Returns:
            Flower's result, with the model and the metrics.  Its training metrics are those of `aggregate_train`.

        Raises:
            InputError: The strategy was started before, or the arrays, the number of rounds, the terms or
                `max_epsilon` cannot be used.
            RunError: The nodes are not one for each silo, or a silo fails, refuses for good, does not answer
                although the run needs it, or sends what cannot be used.
        """
        refuse(
            {
                "start: this strategy was started before; for another run make another strategy": (
                    self._releases is not None
                )
            }
        )
        layout, planned_rounds = ModelLayout.from_arrays(initial_arrays), self.cell.schedule.rounds
        initial = flatten_arrays(initial_arrays)
        refuse(
            {
                "initial_arrays: a value is not finite": not initial.isfinite().all(),
                f"num_rounds = {num_rounds}: noise was calibrated for rounds = {planned_rounds}; give as many": (
                    num_rounds not in (0, planned_rounds)
                ),
            }
        )
        self._releases = NamedReleases(with_dtype(self.cell, layout.dtype), layout, initial, seeded=self._seeded)
        rounds = self._count_affordable_rounds(planned_rounds)
        self._accounted_rounds = evaluation_rounds(rounds, min(rounds, _MAX_REPORTS))
        self._releases.nodes(grid, timeout)  # round 0, which waits until the node of each silo has agreed
        result = super().start(grid, initial_arrays, rounds, timeout, train_config, evaluate_config, evaluate_fn)
        _log.info("fedpriv: after %d of %d rounds: %s", rounds, planned_rounds, self.claim)
        return result

    def _count_affordable_rounds(self, planned_rounds: int) -> int:
        """Return the largest number of rounds whose ε is within the limit, or all rounds without a limit.

        Args:
            planned_rounds: Number of rounds of the plan.

        Raises:
            InputError: There is a limit, and it is NaN, round 1 alone exceeds it, or the run adds no noise.
        """
        if (limit := self._max_epsilon) is None:
            return planned_rounds
        # Bisection, since ε does not fall with the number of rounds.
        # Without noise ε is None, and a limit that is NaN compares with nothing: both are refused below.
        rounds = bisect_right(range(1, planned_rounds + 1), limit, key=lambda t: self.epsilon(t) or 0.0)
        refuse(
            {
                f"max_epsilon = {limit}: expected a number": math.isnan(limit),
                f"max_epsilon = {limit}: this run adds no noise, so that its ε is infinite": self.epsilon(1)
                is None,
                f"max_epsilon = {limit}: round 1 alone costs "
                f"{format_epsilon_delta(self.epsilon(1) or 0.0, self.cell.privacy.delta)}": not rounds,
            }
        )
        if rounds < planned_rounds:
            _log.warning(
                "fedpriv: max_epsilon = %s ends the run after %d of %d rounds", limit, rounds, planned_rounds
            )
        return rounds

    @property
    def _started_releases(self) -> NamedReleases:
        if self._releases is None:
            raise InputError("start: the strategy has not been started, so that it has no plan")
        return self._releases

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make one message with the query for every silo that is not absent by the scenario's [federation].

        Args:
            server_round: Number of the round, from 1.
            arrays: Model, which is not sent: silos compute increments at the query.
            config: Further keys of the messages.
            grid: Not used.  The nodes are those that agreed in round 0.

        Raises:
            InputError: The strategy has not been started.
        """
        self._asked_rounds = server_round
        with torch.inference_mode(), limit_to_one_thread():
            return self._started_releases.configure_train(
                server_round, self._started_releases.query(), config, grid
            )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        """Update the optimizer with the noisy mean of the replies, and return the model.

        Args:
            server_round: Number of the round, from 1.
            replies: Replies of the silos.

        Returns:
            The model that the run would publish after this round, and the metrics or None.  At most 20 rounds,
            spread evenly, have metrics: "epsilon" of the rounds so far by `epsilon`, and its "delta".

        Raises:
            RunError: A silo fails or refuses for good, or its answer is missing although the run needs it, or
                cannot be used.
            InputError: The strategy has not been started.
        """
        with torch.inference_mode(), limit_to_one_thread():  # the order of sums must not depend on the cores
            self._started_releases.aggregate_train(server_round, replies)
            published = self._started_releases.model_arrays()
        if server_round not in self._accounted_rounds or (epsilon := self.epsilon(server_round)) is None:
            return published, None
        _log.info(
            "fedpriv: %s after round %d", format_epsilon_delta(epsilon, self.cell.privacy.delta), server_round
        )
        return published, MetricRecord({"epsilon": epsilon, "delta": self.cell.privacy.delta})

    def summary(self) -> None:
        """Log the terms of the run: algorithm, trust setting, silos, rounds, and whom noise protects.

        There is a warning if noise follows from a seed, and another one if clients evaluate.

        Raises:
            InputError: The strategy has not been started.
        """
        algorithm, plan = self.cell.algorithm, self.plan
        _log.info("\t├──> %s, %s", algorithm.row.title, plan.trust.title)
        _log.info("\t├──> %d silos, %d rounds", len(plan.weights), plan.schedule.rounds)
        if self._seeded:
            _log.warning("\t├──> noise of seed %d: a simulation, which protects nobody", self.cell.seed)
        if self.fraction_evaluate:
            _log.warning("\t├──> clients evaluate: their metrics are releases of records that no claim counts")
        _log.info(
            "\t└──> protects %s", plan.trust.protection if plan.noise.sources and not self._seeded else "nobody"
        )


class DPMu2FL(PrivateStrategy, row="dp-mu2-fl"):
    """DP-μ²-FL (Reshef & Levy 2024): `diameter`, `clip`, `step`, `output`, `mechanism`."""


class AcceleratedDPSRGD(PrivateStrategy, row="accelerated-dp-srgd"):
    """Accelerated DP-SRGD (Choquette-Choo et al. 2025): `clip`, `beta`, `radius`, `mechanism`."""


class DPMomentum(PrivateStrategy, row="momentum-tree"):
    """Momentum with tree noise (Tran & Cutkosky 2022): `clip`, `alpha`, `step`, `output`, `mechanism`."""


class DPGoldstein(PrivateStrategy, row="goldstein-single-pass"):
    """Goldstein stationarity in one pass (Kornowski et al.): `smoothing`, `radius`, `period`, two clips.

    The clips are `anchor_clip` and `clip`.
    """


class DPSGD(PrivateStrategy, row="dp-sgd"):
    """DP-SGD (Abadi et al. 2016): `clip`, `step`, `momentum`, `radius`, `output`."""


class DPFTRL(PrivateStrategy, row="dp-ftrl"):
    """DP-FTRL (Kairouz et al. 2021): `clip`, `step`, `momentum`, `mechanism`."""
