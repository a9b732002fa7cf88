"""Client side of a private strategy: records, noise and state of a silo, behind one call.

    private = PrivateClient(context, Net(), nn.CrossEntropyLoss())
    return private.train(msg, load_data(context))

* A cell is the run's scenario as an object, and a plan has what is known of the run before round 1.
* A guard is a process at the site with records, policy and budget, which answers in place of a silo here.
* A mask is a key stream that hides a message and cancels in the sum over silos.
* The query is the vector of parameters that the server sends for a round.
* The release is the silo's answer to a query before a mask.
* The state is what a silo keeps between rounds.

A message of the server has the run's terms (`Terms`): the scenario as JSON text, the round t, and whether noise
comes from the scenario's seed.  In round 0 a silo answers with its number, and with a public key if it masks.  In
rounds t from 1 it answers with its release, with noise and a mask if the run calls for them.
"""

import copy
import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from fedpriv.clients.app import ask_admission, ask_release, ask_shapes, runs_in_supernode
from fedpriv.core.errors import FedprivError, RunError, refuse
from fedpriv.core.random import derive_key, integer_noise_key, simulation_noise, system_key
from fedpriv.core.replicates import limit_to_one_thread
from fedpriv.data.given import RecordSource, to_record_arrays
from fedpriv.data.layout import FeatureLayout, describe_inputs
from fedpriv.data.own import check_records
from fedpriv.flower.guards import (
    ARRAYS,
    ModelLayout,
    Terms,
    find_guard,
    flatten_arrays,
    read_message_terms,
    unwrap_answer,
)
from fedpriv.loss.features import pixel_features
from fedpriv.loss.frozen import run_trial
from fedpriv.loss.imported import GIVEN_PREFIX, InitializedView
from fedpriv.loss.inputs import make_layout_objective, wrap_module
from fedpriv.loss.losses import LOSSES, LossChoice
from fedpriv.loss.models import LossArgument, make_loss_choice
from fedpriv.loss.objective import Objective, Records
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import DTYPES, make_records
from fedpriv.protocol.messages import (
    Refusal,
    add_bytes,
    read_public_keys,
    refusal_content,
    release_content,
    roster_content,
    seal_vector,
)
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo, pack_state, unpack_state, without_denormals

_log = logging.getLogger("flwr")
_STATE_RECORD = "fedpriv-private"

AppRecords = RecordSource | DataLoader[Any]
"""(records, labels), a torch Dataset of such pairs, or a DataLoader that does not shuffle them."""
Arrays = tuple[NDArray[Any], NDArray[Any]]
"""(features, labels), with one row for each record."""


class PrivateClient:
    """Silo in an app's run.

    Guarantee: in a run with noise, without a guard and a seed, a silo of an untrusted server, or one that
    masks, adds its noise here, from a key of the operating system that stays in the node's Context until this
    silo answers the last planned round.  Rounds are answered in order, each once, for one scenario and for the
    same records in the same order.  Every other message for a round is refused.  Without a guard, whoever
    ships the app can replace this class, and nothing counts what several runs cost together.
    """

    def __init__(self, context: Context, module: nn.Module, loss: Any = None) -> None:
        """Set up a silo for the node of `context`.

        Args:
            context: Context that Flower passes to the ClientApp.
            module: Module that maps (n, …) to (n, outputs).  The values of its trainable parameters are not used,
                and it is not changed.
            loss: nn.CrossEntropyLoss(), a name ("cross-entropy", "binary", "squared-error", …) or a dictionary,
                as for `fedpriv.run`, or a function of one record's output and label.  The default is the
                cross-entropy, or the squared error if labels are floats.

        Raises:
            InputError: The loss is torch's cross-entropy with class weights, or leaves out a class
                (`ignore_index`).
        """
        self._context, self._module, self._loss = context, module, normalize_loss(loss)

    def train(self, message: Message, records: AppRecords | Callable[[], AppRecords]) -> Message:
        """Answer one message of a private strategy.

        An error becomes a refusal, which ends the run, and is logged at this node.

        Args:
            message: Message that Flower passes to the ClientApp.
            records: Records of the silo, at least as many as the scenario needs, in the same order in every round,
                or a function that loads them.  They are not used if there is a guard.

        Returns:
            The reply, or a refusal with the reason.
        """
        silo = self._context.node_config.get("partition-id")
        try:
            return Message(self._answer(message.content, records), reply_to=message)
        except FedprivError as error:
            reason = str(error) if str(error).startswith(f"silo {silo}") else f"silo {silo}: {error}"
            _log.warning("fedpriv: %s", reason, exc_info=error.__cause__)  # the cause is logged at this node only
        except Exception:
            reason = f"silo {silo}: its client failed, and its own log says why"
            _log.exception("fedpriv: silo %s", silo)
        return Message(refusal_content(Refusal(reason, is_final=True)), reply_to=message)

    def _answer(self, content: RecordDict, records: AppRecords | Callable[[], AppRecords]) -> RecordDict:
        """Answer a message by a guard if there is one, otherwise by a silo in this process.

        Raises:
            FedprivError: The message is refused, for a reason that the server may read.
            Exception: Another error, whose reason is for this node's log alone.
        """
        terms = read_message_terms(content)
        cell = resolve_cell(json.loads(terms.cell_json), "the server's scenario")
        number, socket = find_guard(self._context, cell.federation.silos)
        if socket is not None:
            return self._answer_by_guard(socket, content, terms, cell, number)
        refuse(
            {
                "a simulation's noise protects nobody, and this is a SuperNode: leave `seed` out of the "
                "strategy": terms.seeded and runs_in_supernode()
            },
            RunError,
        )
        with limit_to_one_thread():  # the order of sums must not depend on the cores
            return self._answer_by_silo(content, terms, cell, number, records)

    def _answer_by_guard(
        self, socket: Path, content: RecordDict, terms: Terms, cell: Cell, number: int
    ) -> RecordDict:
        """Pass the message to the guard at `socket`, which has the records and the budget.

        Round 0 checks that the guard's model has the shapes of the app's arrays and that the guard would admit the
        run, and answers with the silo's number and its public key, or b"" without masks.  Later rounds send the
        message's arrays as the query, and answer with the guard's release, masked if the run has masks.

        Raises:
            FedprivError: The guard refuses or does not answer, the strategy has a seed, or the arrays cannot be
                used.
        """
        refuse({"a guard draws noise of its own: leave `seed` out of the strategy": terms.seeded}, RunError)
        run, record = str(self._context.run_id), content.array_records[ARRAYS]
        layout = ModelLayout.from_arrays(record)
        if terms.t:
            release = ask_release(
                socket, run, terms.cell_json, terms.t, flatten_arrays(record).numpy(), read_public_keys(content)
            )
            return seal_vector("release", unwrap_answer(release))
        ModelLayout.from_guard_shapes(
            record.to_numpy_ndarrays(),
            layout.names,
            layout.dtype,
            unwrap_answer(ask_shapes(socket, terms.cell_json)),
        )
        unwrap_answer(ask_admission(socket, run, terms.cell_json))
        public = np.empty(0, np.uint8)
        if cell.algorithm.trust_setting.masked and cell.target_mu is not None:  # otherwise the silo masks nothing
            public = unwrap_answer(ask_release(socket, run, terms.cell_json, 0, public))
        return add_bytes(roster_content(number), "public", public.tobytes())

    def _answer_by_silo(
        self,
        content: RecordDict,
        terms: Terms,
        cell: Cell,
        number: int,
        records: AppRecords | Callable[[], AppRecords],
    ) -> RecordDict:
        """Answer as silo `number` in this process, without a guard.

        Round 0 makes the run's memory in the Context, and answers with the silo's number and its public key, or
        b"" without masks.  Later rounds restore the silo from this memory, answer with its release at the query,
        the message's arrays, and store the new state.

        Raises:
            FedprivError: Arrays, scenario, module, loss or records cannot be used, the message does not continue
                the remembered run, or its query or its public keys are refused.
        """
        record = content.array_records[ARRAYS]
        ModelLayout.from_arrays(record).check_module(self._module)
        arrays = _read_records(records, cell.schedule.batches_per_silo * cell.batch_sizes[number])
        memory = self._recall_memory(terms, arrays)
        silo = self._make_silo(terms, cell, number, arrays, bytes(memory["key"]))
        if not terms.t:
            self._context.state[_STATE_RECORD] = ConfigRecord(memory)
            return add_bytes(roster_content(number), "public", silo.masker.public_key if silo.plan.masked else b"")
        state = unpack_state(bytes(memory["state"]), silo) if "state" in memory else silo.initial_state()
        # Denormal numbers, which a query can produce for some records only, would slow down the reply.
        with torch.inference_mode(), nullcontext() if terms.seeded else without_denormals():
            release, state = silo.answer(state, terms.t, flatten_arrays(record))
        message = silo.make_message(release.vector, terms.t, read_public_keys(content), state.query_chain)
        is_last = terms.t == silo.plan.schedule.rounds  # no later round needs key and state
        # Written last and at once, so that a failed round changes nothing.
        self._context.state[_STATE_RECORD] = ConfigRecord(
            {**memory, "key": b"" if is_last else memory["key"], "state": b"" if is_last else pack_state(state)}
        )
        # No accountant charges counts of records, so that only a simulation reports them.
        return (
            release_content(message, release.counts) if terms.seeded else seal_vector("release", message.numpy())
        )

    def _recall_memory(self, terms: Terms, arrays: Arrays) -> dict[str, Any]:
        """Return the run's memory, after checking that the message continues this run.

        The memory is a record in the node's Context:

        * "terms": digest of the terms without the round,
        * "records": fingerprint of the records, under a key that is derived from the silo's,
        * "key": secret key of the silo's noise, or b"" after the last round,
        * "state", once a round from 1 was answered: state of the silo, or b"" after the last round.

        Round 0 makes a new memory, with the key of an earlier round 0 if there was one.  Its caller stores it.

        Raises:
            RunError: This node has no memory of the run, the run is over, records or scenario have changed, or
                round 0 comes after a release.
        """
        memory: dict[str, Any] = dict(self._context.state.config_records.get(_STATE_RECORD, {}))
        key = bytes(memory.get("key", b"")) or system_key()
        current = {
            "terms": hashlib.sha256(repr(terms._replace(t=0)).encode()).digest(),
            "records": Shard(*arrays).fingerprint(derive_key(key, "records")),
        }
        if not terms.t:
            refuse(
                {
                    "its records were released in this run already, and a second strategy would spend another "
                    "budget: start it in a run of its own": "state" in memory
                },
                RunError,
            )
            return {**current, "key": key}
        refuse(
            {
                "this node has no state of the run; was it started again?": not memory,
                "the run is over, and its key is forgotten": memory.get("state") == b"",
                "the scenario is not the one that the run began with": memory.get("terms") != current["terms"],
                "the records, or their order, are not those that the run began with: give the "
                "same ones to every round, without shuffling and without random transforms": (
                    memory.get("records") != current["records"]
                ),
            },
            RunError,
        )
        return memory

    def _make_silo(self, terms: Terms, cell: Cell, number: int, arrays: Arrays, key: bytes) -> Silo:
        """Make the silo, whose noise comes from the scenario's seed in a simulation, and otherwise from `key`."""
        objective, records = _objective_and_records(self._module, self._loss, *arrays, DTYPES[cell.run.dtype])
        plan, may_miss = make_plan(cell, objective, for_release=not terms.seeded), cell.absence_key is not None
        if terms.seeded:
            return Silo.for_simulation(
                number,
                plan,
                records,
                simulation_noise(cell.noise_seed, cell.run.dtype),
                integer_noise_key(cell.noise_seed),
                may_miss_rounds=may_miss,
            )
        return Silo.for_release(
            number, plan, records, key, hashlib.sha256(terms.cell_json.encode()).digest(), may_miss_rounds=may_miss
        )


def normalize_loss(loss: Any) -> LossArgument:
    """Return torch's cross-entropy in the form of a scenario, and any other loss unchanged.

    A subclass of torch's cross-entropy with a `forward` of its own is another loss.

    Raises:
        InputError: The loss is torch's cross-entropy with class weights, or leaves out a class (`ignore_index`).
    """
    layer = nn.CrossEntropyLoss() if loss is nn.functional.cross_entropy else loss
    if not isinstance(layer, nn.CrossEntropyLoss) or type(layer).forward is not nn.CrossEntropyLoss.forward:
        return loss  # type: ignore[no-any-return]
    refuse(
        {
            "loss: torch divides by the weights of a batch, and records are clipped one by one; give "
            '{"name": "cross-entropy", "class_weights": [...]}': layer.weight is not None,
            f"loss: ignore_index = {layer.ignore_index} leaves out a class, and every record counts here; leave "
            "ignore_index and these records out": layer.ignore_index >= 0,
        }
    )
    return {"name": "cross-entropy", "label_smoothing": layer.label_smoothing}


def _read_records(records: AppRecords | Callable[[], AppRecords], count: int) -> Arrays:
    """Read the features and labels of the first `count` records.

    Raises:
        RunError: The records cannot be loaded or read, are a DataLoader with `shuffle=True`, or are fewer than
            `count`.
    """
    try:  # the error of a function that loads records may quote them, and stays at this node
        source = records() if callable(records) else records
        features, labels = to_record_arrays(source, "records")
    except Exception as error:
        raise RunError("its records cannot be read, and its own log says why") from error
    refuse(
        {
            "records: a DataLoader that shuffles; records keep their order over the rounds: give shuffle=False": (
                isinstance(source, DataLoader) and isinstance(source.sampler, RandomSampler)
            ),
            f"records: the scenario reads {count} of them, and there are fewer": (
                len(labels) < count or len(features) < count
            ),
        },
        RunError,
    )
    return features[:count], labels[:count]


def _objective_and_records(
    module: nn.Module, loss: LossArgument, features: NDArray[Any], labels: NDArray[Any], dtype: torch.dtype
) -> tuple[Objective, Records]:
    """Make the objective of a copy of the module, and the records in the form that it reads.

    Labels that are floats are values of a regression.  Other labels are classes.

    Args:
        module: Module that maps (n, …) to (n, outputs).
        loss: Loss of the module, or None for the cross-entropy, or the squared error if labels are floats.
        features: Features of the records, (n, …).
        labels: Labels of the records, (n,) or (n, …).
        dtype: Type of the computation.

    Raises:
        RunError: The records cannot be used.
        InputError: The loss is invalid, or module, loss and shape of the records do not fit each other.
    """
    is_regression, record_shape = labels.dtype.kind == "f", features.shape[1:]
    choice = make_loss_choice(loss, real=is_regression)
    module_copy = copy.deepcopy(module).to("cpu", dtype)
    classes = 0 if is_regression else _count_classes(module_copy, choice, features, dtype)
    try:
        check_records(features, labels, classes, "records")
        records = make_records(
            pixel_features(features, dtype), labels.astype(np.float64 if is_regression else np.int64), dtype
        )
    except FedprivError as error:
        raise RunError("its records cannot be used, and its own log says why") from error
    layout = FeatureLayout(
        records.features.shape[1], describe_inputs(features), labels.shape[1:], labels_are_classes=classes > 0
    )
    return InitializedView(
        *make_layout_objective(module_copy, layout, record_shape, choice, classes, 0, dtype, GIVEN_PREFIX)
    ), records


def _count_classes(module: nn.Module, choice: LossChoice, features: NDArray[Any], dtype: torch.dtype) -> int:
    """Return the number of classes for which a loss needs as many outputs as the module has.

    A record of zeros, with the shape of a record of `features`, (n, …), shows how many it has.  A loss that is a
    function counts as the cross-entropy.  The result is 2 for a loss of a single output, such as the logistic
    loss, and for a module that fails.
    """
    probe = torch.zeros(1, sum(part.size for part in describe_inputs(features)), dtype=dtype)
    network = wrap_module(module, describe_inputs(features), features.shape[1:])
    try:
        min_outputs, kind = (
            (2, LOSSES["cross-entropy"]) if choice.function is not None else (1, LOSSES[choice.name])
        )
        return (
            2
            if kind.has_single_output
            else kind.class_count(max(min_outputs, run_trial(network, probe).shape[-1]))
        )
    except Exception:  # a module may raise anything; `make_layout_objective` reports it
        return 2
