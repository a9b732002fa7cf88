"""A silo's guard for Flower apps of others: their local training becomes noisy steps that the guard answers.

    from fedpriv.flower import guard_of

    guard = guard_of(context, Path(__file__).with_name("guard.toml"))
    arrays = guard.train(msg.content["arrays"], msg.content["config"]["server-round"])

The app never sees a record, and the server's strategy stays what it is: docs/existing-flower-app.md.  The scenario
that an app puts to guards is public, fixed before round 1, and the same at every silo.  An app's list of arrays
and the guard's flat vector hold the same numbers, in the order of a state_dict.

    x_{k+1} = x_k - η · release_k        release_k: the mean of a batch's clipped gradients at x_k, with noise

Every step is one round of a run at the guard.  With K local steps, the server's round r takes the rounds
(r-1)K + 1 … rK of the run.
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

from fedpriv.clients.app import ask, ask_shapes
from fedpriv.core.errors import InputError, RunError, printable
from fedpriv.flower.arrays import ModelLayout
from fedpriv.loss.scores import named_scores
from fedpriv.noise.trust import UNTRUSTED
from fedpriv.papers.sgd import DP_SGD, SgdSettings
from fedpriv.papers.steps import ScheduledSettings
from fedpriv.protocol.messages import Refusal
from fedpriv.rounds.beside import evaluations_of
from fedpriv.rounds.outcome import evaluation_rounds
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell

_ELSEWHERE = {
    "momentum": "the server's strategy can have it (FedAvgM, FedAdam)",
    "radius": "no projection is done here",
    "output": "the server's strategy says which model is published",
    **dict.fromkeys(ScheduledSettings.model_fields, "steps and models are the server's strategy's"),
}
"""Keys of the row that are about what a server does, and who does it here."""


@dataclass(frozen=True)
class EvaluationTerms:
    """Terms of an app whose guards evaluate: their answer is the noisy mean of bounded scores."""

    count: int
    """Evaluations of a whole run."""
    records: tuple[int, ...]
    """Test records of each silo, by the silo's number: public."""
    loss_bound: float
    classes: bool
    """Whether there is an accuracy; a regression has none."""


@dataclass(frozen=True)
class AppTerms:
    """Terms of an app's scenario: a release is the noisy mean of a batch's clipped gradients."""

    cell_json: str
    """The scenario as guards get it."""
    step: float
    """η of x - η · release."""
    dtype: str
    """Of queries: "float32" or "float64"."""
    rounds: int
    """Releases of a whole run."""
    batches: tuple[int, ...]
    """Records of each silo in one release, by the silo's number: public."""
    evaluation: EvaluationTerms | None = None
    """None where the scenario has no [evaluation]."""


def read_terms(path: Path) -> AppTerms:
    """Read an app's scenario; InputError in one line for one whose releases are not steps of an app's own.

    Guards do not rely on any of this: what they allow is their policy's.
    """
    points = load_scenario(path).points
    if len(points) != 1:
        raise InputError(f"{path}: sweep: an app asks for one run, and this stands for {len(points)}")
    return terms_of(points[0].cell, str(path))


def terms_of(cell: Cell, source: str) -> AppTerms:
    """The terms of a cell; `source` names it in messages."""
    settings = cell.algorithm.settings
    if not isinstance(settings, SgdSettings):
        raise InputError(
            f"{source}: algorithm.name = {cell.algorithm.name!r}: an app's steps are those of {DP_SGD.name!r}; "
            "other rows need their own server (fedpriv run)"
        )
    for key, whose in _ELSEWHERE.items():
        if getattr(settings, key) != SgdSettings.model_fields[key].default:
            raise InputError(f"{source}: algorithm.{key} = {getattr(settings, key)!r}: leave it out; {whose}")
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
        _evaluated(cell),
    )


def _evaluated(cell: Cell) -> EvaluationTerms | None:
    if (asked := cell.evaluation) is None:
        return None
    if asked.curves is not None:
        raise InputError("evaluation.curves: an app's evaluations are a loss and an accuracy; leave it out")
    records = asked.of_silos(cell.federation.silos)
    return EvaluationTerms(evaluations_of(cell), records, asked.loss_bound, cell.model.classifies)


Answer = TypeVar("Answer")
_NAMES = {"test_loss": "eval_loss", "test_accuracy": "eval_acc"}
"""As the template's own evaluation calls them."""


@dataclass(frozen=True)
class SiloGuard:
    """The guard of the silo that this app runs at, for one run.

    Guarantee: nothing here is trusted.  Whatever an app does with this object, or in its place with the socket,
    what it gets of the silo's records is what the guard releases: the policy's budget over the shard's lifetime.
    """

    socket: Path
    run: str
    """The run's name in the silo's ledger."""
    silo: int
    terms: AppTerms
    local_steps: int = 1
    """K: noisy steps between two averages, each of them a release."""

    @property
    def examples(self) -> int:
        """Records that one call of `train` reads: a public number, the weight of this silo's reply."""
        return self.terms.batches[self.silo] * self.local_steps

    @property
    def test_examples(self) -> int:
        """Test records that one evaluation reads: a public number, the weight of this silo's metrics."""
        return self._evaluated.records[self.silo]

    def train(self, arrays: ArrayRecord, server_round: int) -> ArrayRecord:
        """The parameters after K noisy steps, with the names that `arrays` has.

        `server_round` counts from 1, as strategies put it into every message.  InputError if the app's model is
        not the guard's, or the scenario has no such round; RunError with the guard's reason if it refuses.
        """
        values = self.steps(arrays.to_numpy_ndarrays(), server_round, list(arrays))
        return ArrayRecord({name: Array(value) for name, value in zip(arrays, values, strict=True)})

    def steps(
        self, arrays: Sequence[NDArray[Any]], server_round: int, names: Sequence[str] = ()
    ) -> list[NDArray[Any]]:
        """`train` for a list of arrays in the order of the model's state_dict, as NumPyClient has them."""
        terms, steps = self.terms, self.local_steps
        first = (server_round - 1) * steps + 1
        if not 1 <= first <= first + steps - 1 <= terms.rounds:
            raise InputError(
                f"server round {server_round} of {steps} local steps takes rounds {first} to {first + steps - 1}, "
                f"and the guard's scenario has {terms.rounds}: federation.rounds = local steps x server rounds"
            )
        layout, point = self._asked(arrays, names)
        for t in range(first, first + steps):
            release = given(ask(self.socket, self.run, terms.cell_json, t, point))
            if release.shape != point.shape:
                raise RunError(f"round {t}: the guard's release has {release.size} values, expected {point.size}")
            point = (point - terms.step * release.astype(np.float64)).astype(point.dtype)
        return layout.split(point)

    def evaluate(self, arrays: ArrayRecord, server_round: int) -> dict[str, float]:
        """Evaluate parameters on the silo's own test records, with noise; {} in rounds without an evaluation.

        "eval_loss", and "eval_acc" of a classification, as the template calls them.  The scenario's
        `run.evaluations` are spread evenly over the server's rounds, the last one among them.  InputError and
        RunError as for `train`.

        Guarantee: all evaluations of a run are a release of [evaluation].mu for each test record, and those of
        all runs and apps together of the policy's [evaluation].budget: the guard answers each once, for one model.
        """
        return self.scores(arrays.to_numpy_ndarrays(), server_round, list(arrays))

    def scores(
        self, arrays: Sequence[NDArray[Any]], server_round: int, names: Sequence[str] = ()
    ) -> dict[str, float]:
        """`evaluate` for a list of arrays in the order of the model's state_dict, as NumPyClient has them."""
        asked, rounds = self._evaluated, self.terms.rounds // self.local_steps
        if asked.count > rounds:
            raise InputError(
                f"run.evaluations: the guard's scenario has {asked.count} evaluations, and the server {rounds} "
                f"rounds; set it to {rounds} or fewer, for less noise"
            )
        if not 1 <= server_round <= rounds:
            raise InputError(f"server round {server_round}: the guard's scenario has {rounds} of them")
        places = sorted(evaluation_rounds(rounds, asked.count))
        if server_round not in places:
            return {}
        _, point = self._asked(arrays, names)
        place = places.index(server_round) + 1
        means = given(ask(self.socket, self.run, self.terms.cell_json, place, point, tests=True))
        if means.shape != (1 + asked.classes,):
            raise RunError(f"evaluation {place}: the guard sent {means.size} scores, expected {1 + asked.classes}")
        found = named_scores(torch.from_numpy(means.astype(np.float64)), asked.loss_bound, classes=asked.classes)
        return {_NAMES[name]: float(value) for name, value in found.items()}

    @property
    def _evaluated(self) -> EvaluationTerms:
        if self.terms.evaluation is None:
            raise InputError(
                "evaluation: the guard's scenario has no such section, which says what evaluations may cost; add "
                "it, or leave @app.evaluate() out"
            )
        return self.terms.evaluation

    def _asked(self, arrays: Sequence[NDArray[Any]], names: Sequence[str]) -> tuple[ModelLayout, NDArray[Any]]:
        """The arrays as the guard's model has them, one behind the other; InputError where they are not."""
        shapes = given(ask_shapes(self.socket, self.terms.cell_json))
        layout = ModelLayout.of(arrays, names or [str(n) for n in range(len(arrays))], self.terms.dtype, shapes)
        return layout, layout.flat(arrays)


def guard_of(context: Context, scenario: Path, local_steps: int = 1) -> SiloGuard:
    """The guard of the silo that `context` belongs to, for the app's own scenario file.

    The SuperNode's node configuration says `guard`, a socket's path, and `partition-id`, the silo's number; in
    Flower's simulation the run configuration says `guard`, with {silo} in the path.  InputError for what is
    missing.
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
    """The silo that a node is; InputError where its configuration names none of so many."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or not 0 <= number < silos:
        raise InputError(
            f"partition-id = {number!r} in the node configuration: expected the silo's number, 0 to "
            f"{silos - 1} by federation.silos{source}"
        )
    return number


def guard_socket(context: Context, number: int) -> Path | None:
    """The socket of the silo's guard, where there is one: the node's own word goes before the server's."""
    socket = context.node_config.get("guard") or context.run_config.get("guard")
    return Path(socket.replace("{silo}", str(number))) if isinstance(socket, str) else None


def given(answer: Answer | Refusal) -> Answer:
    """The answer of a guard; RunError with its reason for a refusal."""
    if isinstance(answer, Refusal):
        raise RunError(printable(answer.reason))
    return answer


__all__ = ["SiloGuard", "guard_of"]
