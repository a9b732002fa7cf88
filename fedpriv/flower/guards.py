"""Access of an existing Flower app to a silo's guard, which answers training steps with noise.

    from fedpriv.flower import guard_of

    guard = guard_of(context, Path(__file__).with_name("guard.toml"))
    arrays = guard.train(msg.content["arrays"], msg.content["config"]["server-round"])

A guard is the process at a site that has the records and answers within the site's policy.  A release is its
answer to one query, and a cell is the app's scenario as an object, with a value for each key.  The scenario is
public, and the server keeps its strategy (docs/existing-flower-app.md).

`SiloGuard` replaces local training by noisy steps with the scenario's step size η:

    x_{k+1} = x_k - η · release_k        release_k: the mean of a batch's clipped gradients at x_k, with noise

Each step is one round of a run at the guard.  With K steps between two averages of the server, round r of the
server takes rounds (r-1)K + 1 … rK of this run.

`ModelLayout` relates a model's named arrays to the flat vector of their numbers.

`Terms` are what a message of fedpriv's own Flower strategies says about the run: its scenario, the round, and
whether noise follows from a seed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpriv.claims.outcome import evaluation_rounds
from fedpriv.clients.app import Answer, ask_release, ask_shapes
from fedpriv.core.errors import InputError, RunError, refuse, sanitize_line
from fedpriv.loss.frozen import trainable_parameters
from fedpriv.loss.module import check_module
from fedpriv.loss.scores import scores_to_metrics
from fedpriv.noise.trust import RECORD, UNTRUSTED
from fedpriv.papers.base import ScheduledSettings
from fedpriv.papers.sgd import DP_SGD, SgdSettings
from fedpriv.papers.table import find_algorithm
from fedpriv.plan.calibration import fit_cell_noise
from fedpriv.plan.evaluation import evaluation_count
from fedpriv.plan.task import DTYPES
from fedpriv.protocol.messages import CONFIG, Refusal, decode_tensor, encode_array, read_int_field
from fedpriv.scenario.load import load_scenario, resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.scenario.sections import EvaluationSection, FederationSection, PrivacySection

_SERVER_KEYS = {
    "momentum": "the server's strategy can have it (FedAvgM, FedAdam)",
    "radius": "no projection is done here",
    "output": "the server's strategy says which model is published",
    **dict.fromkeys(ScheduledSettings.model_fields, "steps and models are the server's strategy's"),
}
"""Keys that only fedpriv's own servers use, each with the reason why an app leaves the key out."""


@dataclass(frozen=True)
class ModelLayout:
    """Names and shapes of a model's arrays, in order, and the type of their flat vector."""

    names: tuple[str, ...]
    """Name of each array."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each array."""
    dtype: str
    """Type of the flat vector, "float32" or "float64"."""

    @staticmethod
    def from_arrays(arrays: ArrayRecord) -> "ModelLayout":
        """Read names, shapes and type from arrays.

        Args:
            arrays: Trainable parameters of a model.

        Raises:
            InputError: There are no arrays, an array is not float32 or float64, or both types are mixed.
        """
        dtypes = sorted({array.dtype for array in arrays.values()})
        refuse(
            {
                "initial_arrays: there are none; give ArrayRecord(net.state_dict())": not arrays,
                **{
                    f"array {sanitize_line(name)!r} is {array.dtype}, and parameters are float32 or float64: "
                    "buffers, as BatchNorm keeps them, would leave a silo without noise; GroupNorm has none": (
                        array.dtype not in DTYPES
                    )
                    for name, array in arrays.items()
                },
                f"initial_arrays: {' and '.join(dtypes)} are mixed; give all parameters one type": len(dtypes) > 1,
            }
        )
        return ModelLayout(tuple(arrays), tuple(tuple(array.shape) for array in arrays.values()), dtypes[0])

    @staticmethod
    def from_guard_shapes(
        arrays: Sequence[NDArray[Any]], names: Sequence[str], dtype: str, shapes: Sequence[tuple[int, ...]]
    ) -> "ModelLayout":
        """Check the shapes of an app's arrays against the guard's model, and return their layout.

        Args:
            arrays: Arrays of the app's model.
            names: Names of these arrays, for messages.
            dtype: Type of the guard's vector.
            shapes: Shapes of the arrays of the guard's model.

        Raises:
            InputError: `arrays` are not floats of these shapes, in this order.
        """
        refuse(
            {
                f"the app's model has {len(arrays)} arrays, the guard's has {len(shapes)}: allow.models and "
                "model.name have to name the same network (buffers, as BatchNorm keeps them, are arrays too)": (
                    len(arrays) != len(shapes)
                )
            }
        )
        for number, (array, name, shape) in enumerate(zip(arrays, names, shapes, strict=True)):
            refuse(
                {
                    f"array {number}, {name!r}, has shape {array.shape} in the app's model and {shape} in the "
                    "guard's: model.name has to name the same network, its layers in the same order": (
                        array.shape != shape
                    ),
                    f"array {number}, {name!r}, is {array.dtype}: parameters are floating-point numbers": (
                        array.dtype.kind != "f"
                    ),
                }
            )
        return ModelLayout(tuple(names), tuple(shapes), dtype)

    def flatten(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Concatenate the arrays to a vector (d,) of the layout's type.

        The arrays may have another type: Flower's FedAdam sends float64.
        """
        with np.errstate(over="ignore"):  # a value that does not fit becomes infinite, and the guard refuses it
            return np.concatenate([np.ravel(array).astype(self.dtype) for array in arrays])

    def split(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        """Split a vector (d,) into arrays of the layout's shapes, in order."""
        ends = np.cumsum([np.prod(shape, dtype=int) for shape in self.shapes])[:-1]
        return [piece.reshape(shape) for piece, shape in zip(np.split(vector, ends), self.shapes, strict=True)]

    def to_record(self, vector: Tensor) -> ArrayRecord:
        """Split a vector (d,) into named arrays."""
        return ArrayRecord(dict(zip(self.names, map(encode_array, self.split(vector.numpy())), strict=True)))

    def check_module(self, module: nn.Module) -> None:
        """Check that a server's arrays, whose layout this is, are the module's trainable parameters.

        Names, shapes and their order have to agree, and types need not.

        Args:
            module: Module of the client.  Parameters with requires_grad=False are not trainable.

        Raises:
            InputError: A layer cannot be used, such as a lazy one, no parameter is trainable, or arrays and
                trainable parameters differ.
        """
        check_module(module)
        own_shapes = {name: tuple(parameter.shape) for name, parameter in trainable_parameters(module).items()}
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for server_array, own_array in zip_longest(zip(self.names, self.shapes, strict=True), own_shapes.items()):
            if server_array != own_array:
                name, shape = server_array or own_array
                reason = (
                    "it is trained here, and the server did not send it"
                    if server_array is None
                    else f"here it has shape {own_shapes[name]}, or another place in the order"
                    if name in own_shapes
                    else "it is none that is trained here"
                    if name not in parameters
                    else "its requires_grad is False"
                    if not parameters[name].requires_grad
                    else f"here it is {next(key for key in own_shapes if parameters[key] is parameters[name])!r} "
                    "under another name; send each once, as named_parameters() has them"
                )
                raise InputError(
                    f"array {sanitize_line(name)!r} {shape}{' of the server' if server_array else ''}: {reason}; "
                    "server and clients need the same module, "
                    "and the server sends its trained parameters and nothing else"
                )


def flatten_arrays(arrays: ArrayRecord) -> Tensor:
    """Concatenate arrays to a vector (d,)."""
    return torch.cat([decode_tensor(array).flatten() for array in arrays.values()])


ARRAYS, ROUND = "arrays", "server-round"


class Terms(NamedTuple):
    """Terms of a run, as carried by one message."""

    t: int
    """Number of the round, or 0 before round 1, when silos announce their numbers."""
    cell_json: str
    """Scenario of the run as JSON text."""
    seeded: bool
    """Whether noise follows from the scenario's seed, as in a simulation."""


def read_message_terms(content: RecordDict) -> Terms:
    """Read the terms of a message.

    Raises:
        RunError: Another strategy sent the message.
        ValueError: The message has terms, and no round.
    """
    match content.config_records.get(CONFIG):
        case {"fedpriv-cell": str(cell_json), "fedpriv-seeded": bool(seeded)}:
            return Terms(read_int_field(content, CONFIG, ROUND), cell_json, seeded)
    raise RunError(
        "the server's strategy is none of fedpriv.flower: PrivateClient answers DPMu2FL and its sisters; "
        "for a strategy of Flower's use guard_of"
    )


def make_terms_config(cell: Cell, *, seeded: bool) -> ConfigRecord:
    """Make the configuration by which a strategy sends the terms, without the round.

    Args:
        cell: Cell of the run.
        seeded: Whether the noise is that of a seed.
    """
    return ConfigRecord({"fedpriv-cell": json.dumps(cell.canonical_data()), "fedpriv-seeded": seeded})


def _load_single_run(path: Path, overrides: Sequence[str], requirement: str) -> Cell:
    """Load the one run of a scenario file.

    Raises:
        InputError: The scenario is a sweep of several runs, with `requirement` in the message, or cannot be used.
    """
    points = load_scenario(path, overrides, finds_tables=False).points
    refuse({f"{path}: sweep: {requirement}, and this stands for {len(points)}": len(points) != 1})
    return points[0].cell


def cell_from_scenario(path: Path, row: str | None, seed: int | None) -> Cell:
    """Resolve the single run of a scenario file.

    Args:
        path: The scenario file.
        row: Row of the table of algorithms that the scenario has to name, or None for any.
        seed: Seed that replaces the scenario's, or None.

    Raises:
        InputError: The scenario has another row, is a sweep of several runs, or cannot be used by an app.
    """
    cell = _load_single_run(path, [] if seed is None else [f"seed={seed}"], "an app is one run")
    refuse(
        {
            f"{path}: algorithm.name = {cell.algorithm.name!r}: this strategy is {row!r}": (
                row not in (None, cell.algorithm.name)
            )
        }
    )
    return _require_app_cell(cell, str(path))


def cell_from_keywords(row: str, keywords: Mapping[str, Any], seed: int | None) -> Cell:
    """Resolve the run that keywords describe.

    Args:
        row: Name of a row of the table of algorithms.
        keywords: Values by key, without the names of their sections [algorithm], [federation] and [privacy].
            `model` is the section [model], or the name in it.
        seed: Seed of a simulation, or None for a run whose noise is the operating system's.

    Raises:
        InputError: There is no such row, or a key or a value cannot be used.
    """
    tree: dict[str, Any] = {
        "name": row,
        "seed": seed or 0,
        "data": {"name": "synthetic"},  # not used, because silos have their own records
        "federation": {},
        "privacy": {},
        "algorithm": {"name": row},
    }
    sections = {
        **dict.fromkeys(PrivacySection.model_fields, "privacy"),
        **dict.fromkeys(FederationSection.model_fields, "federation"),
        **dict.fromkeys(find_algorithm(row).settings.model_fields, "algorithm"),
    }
    for key, value in {**keywords, "name": row}.items():
        if key == "model":
            tree["model"] = {"name": value} if isinstance(value, str) else value
        else:
            # An unknown key goes to [algorithm] as well, and `resolve_cell` refuses it there.
            tree[sections.get(key, "algorithm")][key] = value
    return _require_app_cell(resolve_cell(tree, row), row)


def with_dtype(cell: Cell, dtype: str) -> Cell:
    """Return the same run in the type of the app's arrays, with fitted noise if it is to be fitted.

    Args:
        cell: Cell of the run.
        dtype: Type of the app's arrays, "float32" or "float64".

    Raises:
        InputError: The type or the noise cannot be used.
    """
    tree = cell.canonical_data()
    return fit_cell_noise(resolve_cell({**tree, "run": {**tree["run"], "dtype": dtype}}, cell.name))


def _require_app_cell(cell: Cell, source: str) -> Cell:
    """Return `cell` if an app's own module and records can do this run.

    Raises:
        InputError: They cannot, with the key of `source` that is in the way.
    """
    refused = {
        f"algorithm.name = {cell.algorithm.name!r}: asks silos for more than gradients of a module": (
            cell.algorithm.row.model is not None
        ),
        f"algorithm.trust = {cell.algorithm.trust!r}: a curator has all records, and no silos": (
            not cell.algorithm.trust_setting.broadcasts
        ),
        f"privacy.unit = {cell.privacy.unit!r}: an app's records are protected one by one": (
            cell.privacy.unit != RECORD.name
        ),
        "data.scale: an app scales its records by itself, with public numbers": cell.data.scale is not None,
        # The server, which does not know the loss, plans for clipped gradients, at most two clips apart.
        f"model.name = {cell.model.name!r}: no module can be this model": not cell.model.row.gradients,
        "evaluation: the silos of an app evaluate by its own @app.evaluate()": cell.evaluation is not None,
    }
    refuse({f"{source}: {reason}; use fedpriv run": holds for reason, holds in refused.items()})
    return cell


def read_app_cell(path: Path) -> Cell:
    """Read the scenario of an app whose server is not fedpriv's.

    Raises:
        InputError: The scenario cannot be used, is a sweep of several runs, or has steps, a trust setting or
            evaluations that an app's own server cannot have.
    """
    cell = _load_single_run(path, [], "an app asks for one run")
    settings = cell.algorithm.settings
    refuse(
        {
            f"{path}: algorithm.name = {cell.algorithm.name!r}: an app's steps are those of {DP_SGD.name!r}; "
            "other rows need their own server (fedpriv run)": not isinstance(settings, SgdSettings),
            **{
                f"{path}: algorithm.{key} = {getattr(settings, key, None)!r}: leave it out; {replacement}": (
                    getattr(settings, key, None) != SgdSettings.model_fields[key].default
                )
                for key, replacement in _SERVER_KEYS.items()
            },
            f"{path}: algorithm.trust = {cell.algorithm.trust!r}: a server that is not fedpriv's adds no noise; "
            f"use {UNTRUSTED.name!r}": cell.algorithm.trust_setting is not UNTRUSTED,
            "evaluation.curves: an app's evaluations are a loss and an accuracy; leave it out": (
                cell.evaluation is not None and cell.evaluation.curves is not None
            ),
        }
    )
    return cell


_TEMPLATE_NAMES = {"test_loss": "eval_loss", "test_accuracy": "eval_acc"}
"""Names of scores in the evaluation of Flower's template for an app, by fedpriv's names."""


@dataclass(frozen=True)
class SiloGuard:
    """Access to the guard of the silo at which this app runs, for one run.

    Guarantee: nothing in this object is trusted.  Whatever an app does with this object, or with the socket in its
    place, the app gets of the silo's records only what the guard releases by its policy, whose budget holds over
    the lifetime of the silo's ledger.
    """

    socket: Path
    """Unix socket on which the guard answers."""
    run: str
    """Name of the run in the silo's ledger."""
    silo: int
    """Number of the silo, from 0."""
    cell: Cell
    """App's scenario: a release is the noisy mean of a batch's clipped gradients."""
    cell_json: str
    """Text of the scenario that guards receive."""
    local_steps: int = 1
    """Number K of noisy steps between two averages.  Each step is a release."""

    @property
    def examples(self) -> int:
        """Public number of records that one call of `train` reads, the weight of this silo's reply.

        A record counts once a step.  The number is the expected one if the records of a round are drawn.  If the
        unit of protection is the person, persons are counted in place of records.
        """
        return self.cell.batch_sizes[self.silo] * self.local_steps

    @property
    def test_examples(self) -> int:
        """Public number of test records that one evaluation reads, the weight of this silo's metrics.

        Raises:
            InputError: The scenario has no [evaluation].
        """
        return self._evaluation.records_per_silo(self.cell.federation.silos)[self.silo]

    def train(self, arrays: ArrayRecord, server_round: int) -> ArrayRecord:
        """Take K noisy steps from the parameters `arrays`.

        Args:
            arrays: Parameters of the app's model.
            server_round: Number of the server's round, from 1, the message's "server-round".

        Returns:
            The parameters after the steps, with the same names.

        Raises:
            FedprivError: As `steps`.
        """
        values = map(Array, self.steps(arrays.to_numpy_ndarrays(), server_round, list(arrays)))
        return ArrayRecord(dict(zip(arrays, values, strict=True)))

    def steps(
        self, arrays: Sequence[NDArray[Any]], server_round: int, names: Sequence[str] = ()
    ) -> list[NDArray[Any]]:
        """Take K noisy steps from a NumPyClient's list of arrays, in the order of a state_dict.

        Step k is x_{k+1} = x_k - η · release_k, with the scenario's step size η and the guard's release at x_k.
        K is `local_steps`.

        Args:
            arrays: Parameters of the module.
            server_round: Number of the server's round, from 1.
            names: Names of the arrays in error messages, by default their numbers from 0.

        Returns:
            Parameters after the steps, in the same order, in the scenario's `run.dtype`.

        Raises:
            InputError: The round or an array is not that of the guard's scenario.
            RunError: The guard refuses or does not answer, or its release cannot be used.
        """
        steps, rounds = self.local_steps, self.cell.schedule.rounds
        first = (server_round - 1) * steps + 1
        last = first + steps - 1
        refuse(
            {
                f"server round {server_round} of {steps} local steps takes rounds {first} to {last}, and the "
                f"guard's scenario has {rounds}: federation.rounds = local steps x server rounds": (
                    not 1 <= first <= last <= rounds
                )
            }
        )
        layout, point = self._match_layout(arrays, names)
        settings = cast("SgdSettings", self.cell.algorithm.settings)  # as `read_app_cell` requires
        for t in range(first, last + 1):
            release = unwrap_answer(ask_release(self.socket, self.run, self.cell_json, t, point))
            refuse(
                {
                    f"round {t}: the guard's release has {release.size} values, expected {point.size}": (
                        release.shape != point.shape
                    )
                },
                RunError,
            )
            point = (point - settings.step * release.astype(np.float64)).astype(point.dtype)
        return layout.split(point)

    def evaluate(self, arrays: ArrayRecord, server_round: int) -> dict[str, float]:
        """Evaluate parameters on the silo's own test records, with noise.

        Guarantee: all evaluations of a run together are a release of μ = [evaluation].mu for each test record, and
        the evaluations of all runs and apps together one of the policy's [evaluation].budget.  There is no such
        guarantee if the policy allows runs without noise.  The guard answers each evaluation for one model only.

        Args:
            arrays: Parameters of the app's model.
            server_round: Number of the server's round, from 1, the message's "server-round".

        Returns:
            "eval_loss", and "eval_acc" of a classifier, as Flower's template names them, or {} in a round
            without an evaluation.

        Raises:
            FedprivError: As `scores`.
        """
        return self.scores(arrays.to_numpy_ndarrays(), server_round, list(arrays))

    def scores(
        self, arrays: Sequence[NDArray[Any]], server_round: int, names: Sequence[str] = ()
    ) -> dict[str, float]:
        """Ask the guard for noisy mean scores of a NumPyClient's model on the silo's test records.

        The scenario's evaluations, at most one for each of its rounds, are spread evenly over the server's rounds,
        the last one among them.

        Args:
            arrays: Parameters of the model, in the order of a state_dict.
            server_round: Number of the server's round, from 1.
            names: Names of the arrays in error messages, by default their numbers from 0.

        Returns:
            "eval_loss", the mean of the losses clamped to [0, `loss_bound`] of the scenario, and of a classifier
            "eval_acc", the share of right predictions, or {} in a round without an evaluation.

        Raises:
            InputError: The round or an array is not that of the guard's scenario, or the scenario has no
                [evaluation], or more evaluations than the server has rounds.
            RunError: The guard refuses or does not answer, or its scores cannot be used.
        """
        evaluation, rounds = self._evaluation, self.cell.schedule.rounds // self.local_steps
        count, classes = evaluation_count(self.cell), self.cell.model.is_classification
        refuse(
            {
                f"run.evaluations: the guard's scenario has {count} evaluations, and the server "
                f"{rounds} rounds; set it to {rounds} or fewer, for less noise": count > rounds,
                f"server round {server_round}: the guard's scenario has {rounds} of them": (
                    not 1 <= server_round <= rounds
                ),
            }
        )
        evaluation_numbers = sorted(evaluation_rounds(rounds, count))
        if server_round not in evaluation_numbers:
            return {}
        _, point = self._match_layout(arrays, names)
        number = evaluation_numbers.index(server_round) + 1
        means = unwrap_answer(ask_release(self.socket, self.run, self.cell_json, number, point, tests=True))
        refuse(
            {
                f"evaluation {number}: the guard sent {means.size} scores, expected {1 + classes}": (
                    means.shape != (1 + classes,)
                )
            },
            RunError,
        )
        # The means count a row that the table sets aside for training as 0, which the division corrects.
        scores = scores_to_metrics(
            torch.from_numpy(means.astype(np.float64))
            / (1.0 if (schema := self.cell.data.table_schema) is None else schema.counted_share(for_testing=True)),
            evaluation.loss_bound,
            classes=classes,
        )
        return {_TEMPLATE_NAMES[name]: float(value) for name, value in scores.items()}

    @property
    def _evaluation(self) -> EvaluationSection:
        if self.cell.evaluation is None:
            raise InputError(
                "evaluation: the guard's scenario has no such section, which says what evaluations may cost; add "
                "it, or leave @app.evaluate() out"
            )
        return self.cell.evaluation

    def _match_layout(
        self, arrays: Sequence[NDArray[Any]], names: Sequence[str]
    ) -> tuple[ModelLayout, NDArray[Any]]:
        """Return the layout of the guard's model, and the arrays as one vector in this layout.

        Raises:
            InputError: The arrays do not fit.
            RunError: The guard refuses or does not answer.
        """
        shapes = unwrap_answer(ask_shapes(self.socket, self.cell_json))
        layout = ModelLayout.from_guard_shapes(
            arrays, names or [str(number) for number in range(len(arrays))], self.cell.run.dtype, shapes
        )
        return layout, layout.flatten(arrays)


def guard_of(context: Context, scenario: Path, local_steps: int = 1) -> SiloGuard:
    """Find the guard of the silo to which `context` belongs, for an app's scenario file.

    The node configuration of a SuperNode has `guard`, the path of a socket, and `partition-id`, the silo's number.
    In Flower's simulation the run configuration has `guard`, with {silo} in the path for the silo's number.

    Args:
        context: Flower's context of the ClientApp.
        scenario: The app's scenario file.
        local_steps: Number of noisy steps between two averages, a divisor of federation.rounds.

    Raises:
        InputError: The scenario or `local_steps` cannot be used, or a key of the configuration is missing or does
            not fit the scenario.
    """
    cell = read_app_cell(scenario)
    number, socket = find_guard(context, cell.federation.silos, f" of {scenario}")
    if socket is None:
        raise InputError(
            "guard: missing; start the SuperNode with --node-config "
            "\"partition-id=0 guard='/run/fedpriv/guard.sock'\""
        )
    refuse(
        {
            f"local_steps = {local_steps}: federation.rounds = {cell.schedule.rounds} of {scenario} has to be a "
            "multiple": local_steps < 1 or cell.schedule.rounds % local_steps
        }
    )
    return SiloGuard(socket, str(context.run_id), number, cell, json.dumps(cell.canonical_data()), local_steps)


def find_guard(context: Context, silos: int, source: str = "") -> tuple[int, Path | None]:
    """Find a node's silo number, and the socket of its guard, or None without a guard.

    The node's `guard` takes precedence over the run's, which may be "" for no guard.  In the path of the socket,
    {silo} stands for the silo's number.

    Args:
        context: Flower's context of the ClientApp.
        silos: Number of silos of the scenario.
        source: Name of the scenario, for the error.

    Raises:
        InputError: `partition-id` of the node's configuration is not the number of a silo, 0 to `silos` - 1, or
            its `guard` is no path.
    """
    number, guard = (context.node_config.get(key) for key in ("partition-id", "guard"))
    refuse(
        {
            f"partition-id = {number!r} in the node configuration: expected the silo's number, 0 to "
            f"{silos - 1} by federation.silos{source}": not isinstance(number, int) or not 0 <= number < silos,
            f"guard = {guard!r} in the node configuration: expected the path of the guard's socket": (
                guard is not None and not (isinstance(guard, str) and guard)
            ),
        }
    )
    socket = guard or context.run_config.get("guard")
    return cast(int, number), (
        Path(socket.replace("{silo}", str(number))) if isinstance(socket, str) and socket else None
    )


def unwrap_answer(answer: Answer | Refusal) -> Answer:
    """Return a guard's answer.

    Raises:
        RunError: The answer is a refusal; the message has the guard's reason.
    """
    if isinstance(answer, Refusal):
        raise RunError(sanitize_line(answer.reason))
    return answer
