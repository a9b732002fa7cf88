"""Strategies for a ServerApp of one's own: rounds of the papers, on the app's named arrays.

    strategy = DPMu2FL(trust="untrusted", silos=2, rounds=100, rho=4.0, relation="zero-out", diameter=10.0,
                       clip=1.0, step=0.1)
    result = strategy.start(grid, ArrayRecord(Net().state_dict()), evaluate_fn=evaluate)

Every ClientApp answers with `PrivateClient`.  Before round 1 each node is asked which silo it is, and whether its
module, its records and its guard fit: round 0, in which nothing is released.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.figures import epsilon_words
from fedpriv.core.random import system_key
from fedpriv.core.replicates import Scalar, one_thread
from fedpriv.flower.arrays import NamedArrays
from fedpriv.flower.terms import ARRAYS, ROUND, cell_of_keywords, cell_of_scenario, terms_config, with_dtype
from fedpriv.loss.objective import Batch, Deterministic, Evaluation, Increment, Query, Records
from fedpriv.participation.dependence import Dependence
from fedpriv.protocol.messages import CONFIG, TRAIN, also_in
from fedpriv.rounds.claim import claim_of
from fedpriv.rounds.outcome import evaluation_rounds
from fedpriv.rounds.plan import Plan, plan_of
from fedpriv.rounds.round import absences_of, is_finite
from fedpriv.scenario.schema import Cell
from fedpriv.server.app import simulated_sums
from fedpriv.server.grid import ask_roster
from fedpriv.server.strategy import ReleaseStrategy, ServerSums

_log = logging.getLogger("flwr")  # whose lines `flwr run --stream` shows
_MAX_REPORTS = 20
"""Most rounds of a run for which ε is computed."""

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True)
class SilosLoss(Deterministic):
    """A loss that silos alone can compute: a server knows the length of its gradient, and no constant."""

    start: Tensor
    """x_1 (d,)."""
    lipschitz: ClassVar[float] = math.inf
    smoothness: ClassVar[float] = math.inf
    dependence: ClassVar[Dependence] = Dependence.RECORD
    """That of the silos' loss: `PrivateClient` trains a module, whose increments are one record's each."""

    @property
    def dimension(self) -> int:
        return len(self.start)

    def initial(self) -> Tensor:
        return self.start

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        raise NotImplementedError("a server has no records")

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        raise NotImplementedError("a server has no records")

    def evaluate(self, point: Tensor, records: Records) -> Evaluation:
        raise NotImplementedError("a server of an app evaluates with its evaluate_fn")


class NamedReleases(ReleaseStrategy):
    """The rounds of one run, whose queries and models are an app's named arrays."""

    def __init__(self, cell: Cell, arrays: NamedArrays, initial: Tensor, *, seeded: bool) -> None:
        self.cell, self._arrays = cell, arrays
        self.terms = terms_config(cell, seeded=seeded)
        plan = plan_of(cell, SilosLoss(initial), released=not seeded)
        sums = simulated_sums(plan, initial, cell) if seeded else ServerSums(plan, initial, system_key())
        super().__init__(
            plan,
            initial,
            sums,
            roster=self._greet,
            without_missing=cell.deployment.missing == "continue",
            absences=absences_of(cell),
        )

    def record_of(self, vector: Tensor) -> ArrayRecord:
        return self._arrays.record(vector)

    def content_of(self, arrays: ArrayRecord, t: int, config: ConfigRecord) -> RecordDict:
        keys = {"keys": self._keys} if self._keys else {}
        return RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**config, **self.terms, **keys, ROUND: t})})

    def _greet(self, grid: Grid, silos: int, timeout: float) -> list[int]:
        """The nodes of silo 0, 1, …, once each has said that it can answer, and given its key if it masks."""
        content = self.content_of(self.query(), 0, ConfigRecord())
        replies = ask_roster(grid, silos, timeout, lambda node: Message(content, node, TRAIN))
        self._keys = b"".join(also_in(reply.content, "public") for reply in replies)
        return [reply.metadata.src_node_id for reply in replies]


class PrivateStrategy(Strategy):
    """A strategy whose rounds are those of a row of the table of algorithms.

    Guarantee: what a run of `start` sends and publishes is post-processing of releases that keep `claim`, against
    a server that is as the trust setting says and clients that answer with `PrivateClient`, once for one run.
    A round with fewer answers than planned ends the run; nothing is averaged over fewer.
    """

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
        """Fix the run.

        Args:
            row: a row of the table of algorithms, such as "dp-mu2-fl".
            scenario: a file that says everything in place of keywords; its [data] is not looked at.
            seed: makes a simulation, which has the same model again and protects nobody.  Left out, noise is of
                the operating system.
            max_epsilon: rounds that would exceed this ε, at the δ of `delta`, are not begun.
            fraction_evaluate: share of the nodes whose ClientApp evaluates after every round, as for FedAvg.  Its
                metrics are releases of records that no claim counts.
            min_evaluate_nodes: the fewest of them, or all silos if there are fewer.
            weighted_by_key: the metric by which metrics are weighted.
            evaluate_metrics_aggr_fn: makes one record of metrics of all nodes' metrics.
            keywords: `trust`, `silos`, `rounds`, `batch`, `epochs`, `sampling`, `relation`, `rho` (or
                `mu`, `zcdp`, `epsilon`), `delta` and the row's own keys (`clip`, `step`, `diameter`, …), as in
                the sections of a scenario.  `model` names the network for guards, or is their [model] section.

        Raises:
            InputError: names the key that cannot be used.
        """
        if scenario is not None and keywords:
            raise InputError(f"{next(iter(keywords))}: give it in {scenario}, or leave the scenario out")
        if scenario is not None:
            self.cell = cell_of_scenario(Path(scenario), row, seed)
        elif row is not None:
            self.cell = cell_of_keywords(row, keywords, seed)
        else:
            raise InputError("PrivateStrategy: give a row, such as 'dp-mu2-fl', or a scenario")
        self._seeded, self._max_epsilon = seed is not None, max_epsilon
        self._releases: NamedReleases | None = None
        self._accounted_rounds: frozenset[int] = frozenset()
        self._evaluation = FedAvg(
            fraction_evaluate=fraction_evaluate,
            min_evaluate_nodes=min(min_evaluate_nodes, self.cell.federation.silos),
            min_available_nodes=self.cell.federation.silos,
            weighted_by_key=weighted_by_key,
            evaluate_metrics_aggr_fn=evaluate_metrics_aggr_fn,
        )

    @property
    def plan(self) -> Plan:
        """Everything that is fixed and public before round 1.  InputError before `start`."""
        return self._begun.plan

    @property
    def claim(self) -> str:
        """The guarantee of the rounds that are done, as a sentence."""
        if not (rounds := self._begun.rounds_done):
            return "nothing was released"
        if (claim := claim_of(self.plan.releases(rounds))) is None:
            return "no guarantee: the run adds no noise"
        seeded = "; the noise is of a seed, and protects nobody" if self._seeded else ""
        return f"{claim.sentence('line', self.cell.privacy.delta)}, {self.plan.trust.title}{seeded}"

    def epsilon(self, rounds: int) -> float | None:
        """ε of the first `rounds` rounds at the δ of `delta`, rounded up, or None without noise."""
        claim = claim_of(self.plan.releases(rounds))
        return None if claim is None else claim.guarantee.epsilon_of(self.cell.privacy.delta)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 0,
        timeout: float = 3600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the planned rounds from `initial_arrays`, as Flower's strategies do.

        Args:
            grid: where the silos' nodes are.
            initial_arrays: x_1, the trained parameters by name.
            num_rounds: as planned, or 0.
            timeout: seconds to wait for the silos of a round.
            train_config: keys that clients find in the messages of every round.
            evaluate_config: the same of evaluations.
            evaluate_fn: called with the model before round 1 and after every round.

        Raises:
            InputError: for what cannot be private, before anything was sent.
            RunError: a silo refuses, fails, or does not answer.
        """
        if self._releases is not None:
            raise InputError(
                "start: this strategy has spent its budget on a run; for another run make another one"
            )
        arrays = NamedArrays.of(initial_arrays)
        initial = arrays.vector(initial_arrays)
        if not is_finite(initial):
            raise InputError("initial_arrays: a value is not finite")
        planned = self.cell.schedule.rounds
        if num_rounds not in (0, planned):
            raise InputError(
                f"num_rounds = {num_rounds}: noise was calibrated for rounds = {planned}; give as many"
            )
        self._releases = NamedReleases(
            with_dtype(self.cell, arrays.layout.dtype), arrays, initial, seeded=self._seeded
        )
        rounds = self._affordable(planned)
        self._accounted_rounds = evaluation_rounds(rounds, min(rounds, _MAX_REPORTS))
        self._releases.nodes(grid, timeout)
        result = super().start(grid, initial_arrays, rounds, timeout, train_config, evaluate_config, evaluate_fn)
        _log.info("fedpriv: after %d of %d rounds: %s", rounds, planned, self.claim)
        return result

    def _affordable(self, planned: int) -> int:
        """The rounds whose ε is at most `max_epsilon`.  InputError if round 1 exceeds it."""
        if (limit := self._max_epsilon) is None:
            return planned
        if self.epsilon(1) is None:
            raise InputError(f"max_epsilon = {limit}: this run adds no noise, so that its ε is infinite")
        rounds = bisect_right(range(1, planned + 1), limit, key=lambda t: self.epsilon(t) or 0.0)
        if not rounds:
            words = epsilon_words(self.epsilon(1) or 0.0, self.cell.privacy.delta)
            raise InputError(f"max_epsilon = {limit}: round 1 alone has {words}")
        if rounds < planned:
            _log.warning("fedpriv: max_epsilon = %s ends the run after %d of %d rounds", limit, rounds, planned)
        return rounds

    @property
    def _begun(self) -> NamedReleases:
        if self._releases is None:
            raise InputError("start: the strategy has not been started, so that it has no plan")
        return self._releases

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message to every silo, with the query.  `arrays`, the model, is not what silos are asked at."""
        with torch.inference_mode(), one_thread():
            return self._begun.configure_train(server_round, self._begun.query(), config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        """Move the optimizer by the noisy mean, and return the model with the ε that it has cost.

        RunError if a silo's answer is missing or cannot be used.
        """
        with torch.inference_mode(), one_thread():  # the order of sums must not depend on the cores
            self._begun.aggregate_train(server_round, replies)
            published = self._begun.published()
        if server_round not in self._accounted_rounds or (epsilon := self.epsilon(server_round)) is None:
            return published, None
        delta = self.cell.privacy.delta
        _log.info("fedpriv: %s after round %d", epsilon_words(epsilon, delta), server_round)
        return published, MetricRecord({"epsilon": epsilon, "delta": delta})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model to a share of the nodes, as FedAvg does."""
        return self._evaluation.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the weighted mean of the nodes' metrics, as FedAvg does."""
        return self._evaluation.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the terms of the run."""
        algorithm, plan = self.cell.algorithm, self.plan
        _log.info("\t├──> %s, %s", algorithm.row.title, plan.trust.title)
        _log.info("\t├──> %d silos, %d rounds", len(plan.weights), plan.schedule.rounds)
        if self._seeded:
            _log.warning("\t├──> noise of seed %d: a simulation, which protects nobody", self.cell.seed)
        if self._evaluation.fraction_evaluate:
            _log.warning("\t├──> clients evaluate: their metrics are releases of records that no claim counts")
        _log.info("\t└──> protects %s", plan.trust.protects)


class _OfRow(PrivateStrategy):
    row: ClassVar[str]

    def __init__(self, **keywords: Any) -> None:
        """Fix the run.  Keywords are those of `PrivateStrategy`."""
        super().__init__(self.row, **keywords)


class DPMu2FL(_OfRow):
    """DP-μ²-FL (Reshef & Levy 2024): its own keys are `diameter`, `clip`, `step`, `output`, `mechanism`."""

    row = "dp-mu2-fl"


class AcceleratedDPSRGD(_OfRow):
    """Accelerated DP-SRGD (Choquette-Choo et al. 2025): `clip`, `beta`, `radius`, `mechanism`."""

    row = "accelerated-dp-srgd"


class DPMomentum(_OfRow):
    """Momentum with tree noise (Tran & Cutkosky 2022): `clip`, `alpha`, `step`, `output`, `mechanism`."""

    row = "momentum-tree"


class DPGoldstein(_OfRow):
    """Goldstein stationarity in one pass (Kornowski et al.): `smoothing`, `radius`, `period`, two clips."""

    row = "goldstein-single-pass"


class DPSGD(_OfRow):
    """DP-SGD (Abadi et al. 2016): `clip`, `step`, `momentum`, `radius`, `output`."""

    row = "dp-sgd"


class DPFTRL(_OfRow):
    """DP-FTRL (Kairouz et al. 2021): `clip`, `step`, `momentum`, `mechanism`."""

    row = "dp-ftrl"
