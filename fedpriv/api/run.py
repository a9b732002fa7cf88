"""`fedpriv.run` and `fedpriv.load`: run a scenario from Python, with records and a module of its own if given."""

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedpriv.api.results import RunResults, load_results
from fedpriv.claims.outcome import RunObserver
from fedpriv.cli.progress import Progress
from fedpriv.core.errors import InputError
from fedpriv.core.extensions import load_add_on_parts
from fedpriv.core.files import find_scenario_file
from fedpriv.data.given import RecordSource, to_record_arrays
from fedpriv.data.named import ARGUMENT_NAMES, add_data, make_dataset
from fedpriv.data.tables import DataFrame, in_memory_name, is_data_frame, register_frame
from fedpriv.engines.workers import Workers
from fedpriv.loss.frozen import trainable_parameters
from fedpriv.loss.imported import GIVEN_PREFIX as OF_MODULE
from fedpriv.loss.models import LossArgument, add_module_instance, make_loss_choice
from fedpriv.scenario.load import load_scenario, parse_scenario, read_toml
from fedpriv.show.table import write_table
from fedpriv.study.sweep import RunOptions, run_sweep

CALLING_PROCESS_ENGINES = ("vectorized", "inprocess")
"""The engines that run in the calling process, and so have what it holds."""


_OWN_DATA_SCENARIO = "own-data"
"""Scenario for records that a program gives, whose numbers advice may choose."""


def insert_own_data(
    tree: Mapping[str, Any],
    train: RecordSource | DataFrame | None,
    test: RecordSource | None,
    model: nn.Module | None,
    classes: int | None,
    loss: LossArgument,
    asked: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Put these records and this module in place of the scenario's [data] and [model].

    Both get names made from their content, so that a run is resumed with the same ones only.  Where the scenario
    gives none of `federation.samples`, `batch` and `clients`, all training records are read, once an epoch.  The
    shipped own-data takes what `fedpriv advise` says of them and of the keys that are `asked` for.
    """
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    if is_data_frame(train):
        return _insert_frame(found, train, test, model)
    if (train is None) != (test is None):
        raise InputError("train and test: give both; a model is evaluated on records that it was not trained on")
    make_loss_choice(loss, real=False)
    if train is None or test is None:
        if model is not None:
            raise InputError("model: a module is given with train and test; a scenario's data has models by name")
        return found
    parts = to_record_arrays(cast(RecordSource, train)), to_record_arrays(test)
    checked = make_dataset(ARGUMENT_NAMES, *parts, classes)
    name = in_memory_name(_digest_arrays(*(array for part in parts for array in part)))
    add_data(name, lambda: parts, checked.class_count)
    found.setdefault("data", {})["name"] = name
    federation = found.setdefault("federation", {})
    if not {"samples", "batch", "clients"} & federation.keys():
        federation["samples"] = len(checked.train_labels)
    if model is not None:
        record, real = checked.train_images.shape[1:], checked.class_count == 0
        constants = [values.detach().cpu().numpy() for values in (*model.parameters(), *model.buffers())]
        text = (
            f"{model!r}{_describe_loss(loss)}{list(trainable_parameters(model))}"
            f"{[layer.training for layer in model.modules()]}"
        )
        shape = np.array([*record, checked.class_count])
        of_model = f"{OF_MODULE}{_digest_arrays(*constants, shape, text=text).hex()[:16]}"
        add_module_instance(of_model, model, record, regression=real, choice=make_loss_choice(loss, real=real))
        found["model"] = {"name": of_model}
    if asked is not None:
        for as_advised in load_add_on_parts("own data").values():
            found = as_advised(found, checked, asked)
    return found


def _insert_frame(found: dict[str, Any], frame: DataFrame, test: object, model: object) -> dict[str, Any]:
    """Put a DataFrame in place of the file that the scenario describes."""
    if test is not None or model is not None:
        raise InputError(
            "train: a DataFrame has its test records by data.table, and a model by name; give a module and test "
            "records with (records, labels): (frame[columns], frame[target])"
        )
    data = found.setdefault("data", {})
    if "table" not in data:
        raise InputError(
            "train: a DataFrame needs [data.table] in the scenario, what is public about its columns, which "
            "`fedpriv data inspect` writes for a file of it; numbers alone go as (frame[columns], frame[target])"
        )
    data["name"] = register_frame(frame)
    return found


def _describe_loss(loss: LossArgument) -> str:
    """A loss as text that tells it from others: a function by its code, as far as Python tells."""
    if loss is None:
        return "squared"
    code = getattr(loss, "__code__", None)
    return str(loss) if code is None else f"{code.co_code.hex()} {code.co_consts} {code.co_names}"


def _digest_arrays(*arrays: NDArray[Any], text: str = "") -> bytes:
    digest = sha256(text.encode())
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def run(
    scenario: str | Path | Mapping[str, Any],
    *,
    train: RecordSource | DataFrame | None = None,
    test: RecordSource | None = None,
    model: nn.Module | None = None,
    classes: int | None = None,
    loss: LossArgument = None,
    set: Mapping[str, Any] | None = None,  # noqa: A002 - the name of the command's option
    engine: str = "vectorized",
    out: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[RunObserver] = (),
    progress: bool | None = None,
    workers: int | None = None,
    ray: str | None = None,
) -> RunResults:
    """Run every cell of a scenario, as `fedpriv run` does, and return what it gave.

    Args:
        scenario: the name of a shipped scenario, a file, or the same as nested dictionaries.
        train: records of your own in place of the scenario's: (records, labels) as arrays or tensors, or a torch
            Dataset of such pairs.  Records are (n, …): bytes are pixels, floats numbers, other whole numbers
            tokens; several inputs are a tuple.  Labels are whole numbers of classes, or floats for a regression:
            (n,), or (n, …) where a record has several.  Or a DataFrame (pandas, polars, Arrow) in place of the
            table that the scenario's [data.table] describes, which says what is for testing, too.
        test: the same, to evaluate on.
        model: a torch module in place of the scenario's model; x_1 are the parameters that it has.  It maps
            (n, …) to (n, classes), or to (n, 1) for a regression; to as many outputs as labels for several.  The
            module itself is not changed.
        classes: how many classes there are, 0 for a regression; by default one more than the largest label.
        loss: of a module: a name ("cross-entropy", "binary", "squared-error", "absolute-error", "huber",
            "poisson"), {"name": …, "class_weights": […], "label_smoothing": …}, or a function of one record's
            output and label; by default the cross-entropy, of a regression the squared error.
        set: values for dotted keys; a swept key is narrowed.
        engine: "vectorized", "inprocess", "ray" or "deployment"; your own records and modules need the first two.
        out: where results are written as the run goes; runs/NAME by default.
        resume: keep what is in `out`, and run what is missing, seeds that are new in the scenario among it.
        observers: receive the events of the run.
        progress: show a bar; by default in a notebook and in an interactive session.
        workers: so many processes of this machine run groups of cells; results are the same.
        ray: the address of a Ray cluster whose processes do.

    Raises:
        InputError: names the key that cannot be used, or what is wrong with records or module.
        RunError: says why a run could not be finished.
    """
    overrides = [_format_assignment(key, value) for key, value in (set or {}).items()]
    own = train is not None or test is not None or model is not None
    if own and engine not in CALLING_PROCESS_ENGINES:
        raise InputError(
            f"engine = {engine!r}: its processes have no arrays and modules of this program; use "
            f"{' or '.join(map(repr, CALLING_PROCESS_ENGINES))}, or fedpriv.add_data and add_model in a file "
            "that is imported"
        )
    options = RunOptions(
        engine=engine,
        out=None if out is None else Path(out),
        resume=resume,
        workers=None if workers is None and ray is None else Workers(workers, ray),
        overrides=overrides,
    )
    if own and options.workers is not None:
        raise InputError(
            "workers, ray: other processes have no arrays and modules of this program; use fedpriv.add_data and "
            "add_model in a file that is imported"
        )
    if own or isinstance(scenario, Mapping):
        given = scenario if isinstance(scenario, Mapping) else read_toml(find_scenario_file(Path(scenario)))
        source = "scenario" if isinstance(scenario, Mapping) else str(scenario)
        asked = (set or {}) if source == _OWN_DATA_SCENARIO else None
        loaded = parse_scenario(
            insert_own_data(given, train, test, model, classes, loss, asked), source, overrides
        )
        rerun = None
    else:
        loaded, rerun = load_scenario(Path(scenario), overrides), options.format_command(str(scenario))
    shown = hasattr(sys, "ps1") or "ipykernel" in sys.modules if progress is None else progress
    folder = run_sweep(loaded, options, [*observers, *([Progress(quiet=False)] if shown else [])], rerun)
    write_table(folder)
    return load_results(folder, None if model is None else copy.deepcopy(model))


def load(folder: str | Path) -> RunResults:
    """Read what a run left in its folder; InputError if there is none."""
    return load_results(Path(folder))


def _format_assignment(key: str, value: Any) -> str:
    """Write KEY=VALUE as `--set` takes it: JSON of numbers, texts, truth values and lists is TOML."""
    try:
        if isinstance(value, Mapping):
            raise TypeError("a table of keys is no single value")
        return f"{key}={json.dumps(value, ensure_ascii=False, allow_nan=False)}"
    except (TypeError, ValueError):
        raise InputError(f"set: {key} = {value!r}: expected a number, a text, true or false, or a list") from None
