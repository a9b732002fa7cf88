"""Access from an existing Flower app to a silo's guard, which answers training steps with noise.

    from fedpriv.flower import guard_of

    guard = guard_of(context, Path(__file__).with_name("guard.toml"))
    arrays = guard.train(msg.content["arrays"], msg.content["config"]["server-round"])

The app never sees a record, and the server keeps its strategy: docs/existing-flower-app.md.  The app's scenario is
public, fixed before round 1, and the same at every silo.

Local training becomes noisy steps:

    x_{k+1} = x_k - η · release_k        release_k: the mean of a batch's clipped gradients at x_k, with noise

Each step is one round of a run at the guard.  With K local steps, round r of the server takes rounds
(r-1)K + 1 … rK of this run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context
from numpy.typing import NDArray

from fedpriv.claims.outcome import evaluation_rounds
from fedpriv.clients.app import ask, ask_shapes
from fedpriv.core.errors import InputError, RunError, printable
from fedpriv.flower.terms import ModelLayout
from fedpriv.loss.scores import named_scores
from fedpriv.noise.trust import UNTRUSTED
from fedpriv.papers.base import ScheduledSettings
from fedpriv.papers.sgd import DP_SGD, SgdSettings
from fedpriv.plan.evaluation import evaluations_of
from fedpriv.protocol.messages import Refusal
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell

_SERVER_KEYS = {
    "momentum": "the server's strategy can have it (FedAvgM, FedAdam)",
    "radius": "no projection is done here",
    "output": "the server's strategy says which model is published",
    **dict.fromkeys(ScheduledSettings.model_fields, "steps and models are the server's strategy's"),
}
"""Keys that only fedpriv's own servers use, each with the reason why an app leaves the key out."""


@dataclass(frozen=True)
class EvaluationTerms:
    """Terms of evaluations by guards, whose answers are noisy means of bounded scores."""

    count: int
    """Number of evaluations in a whole run."""
    records: tuple[int, ...]
    """Public number of test records, by the silo's number."""
    loss_bound: float
    classes: bool
    """Whether the model classifies, so that evaluations have an accuracy."""


@dataclass(frozen=True)
class AppTerms:
    """Terms of an app's scenario: a release is the noisy mean of a batch's clipped gradients."""

    cell_json: str
    """Scenario as it is sent to guards."""
    step: float
    """Step size η in x - η · release."""
    dtype: str
    """Type of queries, "float32" or "float64"."""
    rounds: int
    """Number of releases in a whole run."""
    batches: tuple[int, ...]
    """Public number of records in one release, by the silo's number."""
    evaluation: EvaluationTerms | None = None
    """Terms of evaluations, or None without [evaluation] in the scenario."""


def read_terms(path: Path) -> AppTerms:
    """Read an app's scenario.

    Guards do not rely on these checks, and admit a scenario by their policies.

    Raises:
        InputError: An app cannot take the steps of this scenario by itself.
    """
    points = load_scenario(path).points
    if len(points) != 1:
        raise InputError(f"{path}: sweep: an app asks for one run, and this stands for {len(points)}")
    return terms_of(points[0].cell, str(path))


def terms_of(cell: Cell, source: str) -> AppTerms:
    """Return the terms of a cell, which messages name by `source`.

    InputError as for `read_terms`.
    """
    settings = cell.algorithm.settings
    if not isinstance(settings, SgdSettings):
        raise InputError(
            f"{source}: algorithm.name = {cell.algorithm.name!r}: an app's steps are those of {DP_SGD.name!r}; "
            "other rows need their own server (fedpriv run)"
        )
    for key, replacement in _SERVER_KEYS.items():
        if getattr(settings, key) != SgdSettings.model_fields[key].default:
            raise InputError(
                f"{source}: algorithm.{key} = {getattr(settings, key)!r}: leave it out; {replacement}"
            )
    if cell.algorithm.trust_setting is not UNTRUSTED:
        raise InputError(
            f"{source}: algorithm.trust = {cell.algorithm.trust!r}: a server that is not fedpriv's adds no noise; "
            f"use {UNTRUSTED.name!r}"
        )
    return AppTerms(
        json.dumps(cell.canonical()),
        settings.step,
        cell.run.dtype,
        cell.schedule.rounds,
        cell.batch_sizes,
        _evaluation_terms(cell),
    )


def _evaluation_terms(cell: Cell) -> EvaluationTerms | None:
    if (section := cell.evaluation) is None:
        return None
    if section.curves is not None:
        raise InputError("evaluation.curves: an app's evaluations are a loss and an accuracy; leave it out")
    records = section.of_silos(cell.federation.silos)
    return EvaluationTerms(evaluations_of(cell), records, section.loss_bound, cell.model.classifies)


Answer = TypeVar("Answer")
_TEMPLATE_NAMES = {"test_loss": "eval_loss", "test_accuracy": "eval_acc"}
"""Names of scores in the template's own evaluation, by fedpriv's names."""


@dataclass(frozen=True)
class SiloGuard:
    """Access to the guard of the silo at which this app runs, for one run.

    Guarantee: nothing in this object is trusted.  Whatever an app does with this object, or with the socket in its
    place, the app gets of the silo's records only what the guard releases, within the policy's budget over the
    shard's lifetime.
    """

    socket: Path
    run: str
    """Name of the run in the silo's ledger."""
    silo: int
    terms: AppTerms
    local_steps: int = 1
    """Number K of noisy steps between two averages, each of them a release."""

    @property
    def examples(self) -> int:
        """Public number of records that one call of `train` reads, the weight of this silo's reply."""
        return self.terms.batches[self.silo] * self.local_steps

    @property
    def test_examples(self) -> int:
        """Public number of test records that one evaluation reads, the weight of this silo's metrics."""
        return self._evaluation.records[self.silo]

    def train(self, arrays: ArrayRecord, server_round: int) -> ArrayRecord:
        """Take K noisy steps from the parameters `arrays`.

        Args:
            arrays: Parameters of the app's model.
            server_round: Round of the server, from 1, as strategies put it into every message.

        Returns:
            The parameters after the steps, with the same names.

        Raises:
            InputError: The app's model is not the guard's, or the scenario has no such round.
            RunError: The guard refuses, with its reason.
        """
        values = self.steps(arrays.to_numpy_ndarrays(), server_round, list(arrays))
        return ArrayRecord({name: Array(value) for name, value in zip(arrays, values, strict=True)})

    def steps(
        self, arrays: Sequence[NDArray[Any]], server_round: int, names: Sequence[str] = ()
    ) -> list[NDArray[Any]]:
        """Take the steps of `train` from a NumPyClient's list of arrays, in the order of a state_dict."""
        terms, steps = self.terms, self.local_steps
        first = (server_round - 1) * steps + 1
        if not 1 <= first <= first + steps - 1 <= terms.rounds:
            raise InputError(
                f"server round {server_round} of {steps} local steps takes rounds {first} to {first + steps - 1}, "
                f"and the guard's scenario has {terms.rounds}: federation.rounds = local steps x server rounds"
            )
        layout, point = self._match_layout(arrays, names)
        for t in range(first, first + steps):
            release = unwrap_answer(ask(self.socket, self.run, terms.cell_json, t, point))
            if release.shape != point.shape:
                raise RunError(f"round {t}: the guard's release has {release.size} values, expected {point.size}")
            point = (point - terms.step * release.astype(np.float64)).astype(point.dtype)
        return layout.split(point)

    def evaluate(self, arrays: ArrayRecord, server_round: int) -> dict[str, float]:
        """Evaluate parameters on the silo's own test records, with noise.

        The scenario's `run.evaluations` are spread evenly over the server's rounds, the last one among them.
        InputError and RunError as for `train`.

        Returns:
            "eval_loss", and "eval_acc" of a classifier, as the template names them, or {} in a round without an
            evaluation.

        Guarantee: all evaluations of a run together are a release of μ = [evaluation].mu for each test record, and
        the evaluations of all runs and apps together one of the policy's [evaluation].budget.  The guard answers
        each evaluation once, for one model.
        """
        return self.scores(arrays.to_numpy_ndarrays(), server_round, list(arrays))

    def scores(
        self, arrays: Sequence[NDArray[Any]], server_round: int, names: Sequence[str] = ()
    ) -> dict[str, float]:
        """Return the scores of `evaluate` for a NumPyClient's list of arrays, in the order of a state_dict."""
        evaluation, rounds = self._evaluation, self.terms.rounds // self.local_steps
        if evaluation.count > rounds:
            raise InputError(
                f"run.evaluations: the guard's scenario has {evaluation.count} evaluations, and the server "
                f"{rounds} rounds; set it to {rounds} or fewer, for less noise"
            )
        if not 1 <= server_round <= rounds:
            raise InputError(f"server round {server_round}: the guard's scenario has {rounds} of them")
        evaluation_numbers = sorted(evaluation_rounds(rounds, evaluation.count))
        if server_round not in evaluation_numbers:
            return {}
        _, point = self._match_layout(arrays, names)
        number = evaluation_numbers.index(server_round) + 1
        means = unwrap_answer(ask(self.socket, self.run, self.terms.cell_json, number, point, tests=True))
        if means.shape != (1 + evaluation.classes,):
            raise RunError(
                f"evaluation {number}: the guard sent {means.size} scores, expected {1 + evaluation.classes}"
            )
        scores = named_scores(
            torch.from_numpy(means.astype(np.float64)), evaluation.loss_bound, classes=evaluation.classes
        )
        return {_TEMPLATE_NAMES[name]: float(value) for name, value in scores.items()}

    @property
    def _evaluation(self) -> EvaluationTerms:
        if self.terms.evaluation is None:
            raise InputError(
                "evaluation: the guard's scenario has no such section, which says what evaluations may cost; add "
                "it, or leave @app.evaluate() out"
            )
        return self.terms.evaluation

    def _match_layout(
        self, arrays: Sequence[NDArray[Any]], names: Sequence[str]
    ) -> tuple[ModelLayout, NDArray[Any]]:
        """Return the layout of the guard's model, and the arrays as one vector in this layout.

        InputError if the arrays do not fit.
        """
        shapes = unwrap_answer(ask_shapes(self.socket, self.terms.cell_json))
        layout = ModelLayout.of(arrays, names or [str(n) for n in range(len(arrays))], self.terms.dtype, shapes)
        return layout, layout.flat(arrays)


def guard_of(context: Context, scenario: Path, local_steps: int = 1) -> SiloGuard:
    """Find the guard of the silo to which `context` belongs, for an app's scenario file.

    The node configuration of a SuperNode has `guard`, the path of a socket, and `partition-id`, the silo's number.
    In Flower's simulation the run configuration has `guard`, with {silo} in the path.

    Args:
        context: Flower's context of the ClientApp.
        scenario: The app's scenario file.
        local_steps: Number of noisy steps between two averages, a divisor of federation.rounds.

    Raises:
        InputError: A key is missing, or one does not fit the scenario.
    """
    terms = read_terms(scenario)
    number = silo_number(context, len(terms.batches), f" of {scenario}")
    if (socket := guard_socket(context, number)) is None:
        raise InputError(
            "guard: missing; start the SuperNode with --node-config "
            "\"partition-id=0 guard='/run/fedpriv/guard.sock'\""
        )
    if local_steps < 1 or terms.rounds % local_steps:
        raise InputError(
            f"local_steps = {local_steps}: federation.rounds = {terms.rounds} of {scenario} has to be a multiple"
        )
    return SiloGuard(socket, str(context.run_id), number, terms, local_steps)


def silo_number(context: Context, silos: int, source: str = "") -> int:
    """Return the number of the silo that a node is.  InputError if its configuration names none of `silos`."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or not 0 <= number < silos:
        raise InputError(
            f"partition-id = {number!r} in the node configuration: expected the silo's number, 0 to "
            f"{silos - 1} by federation.silos{source}"
        )
    return number


def guard_socket(context: Context, number: int) -> Path | None:
    """Return the socket of the silo's guard, or None without a guard.

    The node's configuration takes precedence over the run's, which comes from the server.
    """
    socket = context.node_config.get("guard") or context.run_config.get("guard")
    return Path(socket.replace("{silo}", str(number))) if isinstance(socket, str) else None


def unwrap_answer(answer: Answer | Refusal) -> Answer:
    """Return a guard's answer.  RunError with the guard's reason if it is a refusal."""
    if isinstance(answer, Refusal):
        raise RunError(printable(answer.reason))
    return answer


__all__ = ["SiloGuard", "guard_of"]
