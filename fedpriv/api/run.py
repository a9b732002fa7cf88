"""Run a scenario from Python, also with the program's own records and module, and load results."""

import copy
import functools
import json
import sys
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn, uint8

from fedpriv.api.results import RunResults, load_results
from fedpriv.claims.outcome import RunObserver
from fedpriv.cli.progress import Progress
from fedpriv.core.errors import InputError, refuse
from fedpriv.core.extensions import load_add_on_part, load_add_on_parts
from fedpriv.core.files import find_scenario_file
from fedpriv.data.given import Fields, RecordSource, to_array, to_record_arrays
from fedpriv.data.named import ARGUMENT_NAMES, add_data, make_dataset
from fedpriv.data.tables import DataFrame, in_memory_name, is_data_frame
from fedpriv.engines.workers import Workers
from fedpriv.loss.frozen import trainable_parameters
from fedpriv.loss.imported import GIVEN_PREFIX as OF_MODULE
from fedpriv.loss.models import LossArgument, add_module_instance, make_loss_choice
from fedpriv.scenario.load import load_scenario, parse_scenario, read_toml
from fedpriv.show.table import write_table
from fedpriv.study.sweep import RunOptions, run_sweep

CALLING_PROCESS_ENGINES = ("vectorized", "inprocess")
"""Engines that run in the calling process, and so can use its arrays and modules."""
EngineName = Literal["vectorized", "inprocess", "ray", "deployment"]
TrustName = Literal["untrusted", "secure-aggregation", "trusted", "curator"]
AlgorithmName = Literal[
    "dp-mu2-fl", "accelerated-dp-srgd", "unaccelerated-dp-srgd", "accelerated-independent", "momentum-tree",
    "momentum-tree-reduced", "momentum-tree-aligned", "online-to-batch", "dp-sgd", "local-dp-sgd", "dp-ftrl",
    "noisy-minibatch", "noisy-newton", "fedavg", "dp-fedavg", "dp-fedadam", "dp-fedyogi", "dp-fedadagrad",
    "goldstein-single-pass", "goldstein-erm", "phased-sgd", "dp-adam", "dp-adamw",
]  # fmt: skip
"""Shipped algorithms, for completion in editors.  `add_algorithm` adds others."""


OWN_DATA_SCENARIO = "own-data"
"""Shipped scenario for a program's own records, whose settings `fedpriv advise` may choose."""


def insert_own_data(
    tree: Mapping[str, Any],
    train: RecordSource | DataFrame | None,
    test: RecordSource | None,
    model: nn.Module | None,
    classes: int | None,
    loss: LossArgument,
    overrides: Mapping[str, Any] | None = None,
    sites: ArrayLike | None = None,
    fields: Fields | None = None,
) -> dict[str, Any]:
    """Return a scenario whose [data] and [model] name these records and this module.

    Records and module are registered in this process under names made of two digests, by which a resumed run
    recognises them: of the records and the number of classes, and of the module with its code and its loss
    (`_describe_value`).  The second one lacks code of PyTorch, of extension modules and of functions in other
    files that the module's code calls, and values of global variables.

    `federation.samples` becomes the number of training records, unless another scenario than own-data sets
    samples, batch, batches or clients.  Add-ons may then adapt the scenario, such as to silos that are the sites.
    With a DataFrame only the name of the data changes, and without records nothing does.  `tree` is not changed.

    Args:
        tree: Scenario as nested dictionaries.
        train: Training records, or a DataFrame for the scenario's [data.table], or None for the scenario's data.
        test: Test records, or None with a DataFrame or without training records.
        model: Module for these records, or None for the scenario's model.
        classes: Number of classes, 0 for a regression, or None to infer it from the labels.
        loss: Loss of the module, or None for its default.
        overrides: Overridden keys of the shipped scenario own-data, whose other settings `fedpriv advise` may
            choose, or None for another scenario.
        sites: Site of each training record, or None.
        fields: Names or positions of an item's record and label, or None for pairs.

    Raises:
        InputError: The records, the module or their combination cannot be used.
    """
    # Cases without records in arrays: a DataFrame, or the scenario's own data.
    completed = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    refuse(
        {
            f"{key} = {completed.get(key)!r}: expected a table of keys": not isinstance(
                completed.get(key, {}), dict
            )
            for key in ("data", "federation")
        }
    )
    if is_data_frame(train):
        return _insert_frame(completed, train, test, model)
    refuse(
        {
            "train and test: give both; a model is evaluated on records that it was not trained on": (
                (train is None) != (test is None)
            ),
            "model: a module is given with train and test; a scenario's data has models by name": (
                train is None and model is not None
            ),
        }
    )
    make_loss_choice(loss, real=False)  # refuses an unknown loss before records are read
    if train is None or test is None:
        return completed
    # Records, under the digest of their values.  Data sets in a list, one for each silo, are joined.
    *splits, split_sites = (
        load_add_on_part("own records", "parts")(train, test, sites, fields)
        if isinstance(train, list) or sites is not None
        else (
            to_record_arrays(cast(RecordSource, train), "train", fields),
            to_record_arrays(test, "test", fields),
            None,
        )
    )
    dataset = replace(make_dataset(ARGUMENT_NAMES, splits[0], splits[1], classes), sites=split_sites)
    for prepare_module in load_add_on_parts("own module").values():
        model = prepare_module(model, dataset.train_labels, classes, loss)
    arrays = [*splits[0], *splits[1], *(() if split_sites is None else (split_sites.train, split_sites.test))]
    name = in_memory_name(_digest_arrays(*arrays, text=f"{dataset.class_count} classes "))
    add_data(name, lambda: cast(Any, splits), dataset.class_count, sites=split_sites)
    completed.setdefault("data", {})["name"] = name
    federation = completed.setdefault("federation", {})
    if overrides is not None or not {"samples", "batch", "batches", "clients"} & federation.keys():
        federation["samples"] = len(dataset.train_labels)
    # Module, under the digest of its parameters, buffers, code and loss (`_describe_value`).
    if model is not None:
        record, real = dataset.train_images.shape[1:], dataset.class_count == 0
        own_arrays = [
            *(to_array(values, "model") for values in (*model.parameters(), *model.buffers())),
            np.array([*record, dataset.class_count]),
        ]
        model_name = (
            OF_MODULE
            + (
                _digest_arrays(
                    *own_arrays,
                    text=f"{_describe_value((model, loss), {})}{list(trainable_parameters(model))}"
                    f"{[layer.training for layer in model.modules()]}",
                ).hex()[:16]
            )
        )
        add_module_instance(model_name, model, record, regression=real, choice=make_loss_choice(loss, real=real))
        completed["model"] = {"name": model_name}
    for complete in load_add_on_parts("own data").values():
        completed = complete(completed, dataset, overrides, model)
    return completed


def _insert_frame(tree: dict[str, Any], frame: DataFrame, test: object, model: object) -> dict[str, Any]:
    """Register a DataFrame, write its name into the scenario's [data], and return the scenario.

    The scenario's section [data.table] describes the columns, and which rows are test records.

    Args:
        tree: Scenario as nested dictionaries, which is changed.
        frame: Table with training and test records.
        test: Test records, refused unless None.
        model: Module, refused unless None.

    Raises:
        InputError: Test records or a module are given, there is no [data.table], or the frame cannot be read.
    """
    data = tree.setdefault("data", {})
    refuse(
        {
            "train: with a DataFrame, data.table names the test records and the scenario names the model; to give "
            "test records and a module, give train and test as (frame[columns], frame[target])": (
                test is not None or model is not None
            ),
            "train: a DataFrame needs [data.table] in the scenario, which describes what is public about its "
            "columns; `fedpriv data inspect` writes one for a file of it. Or, if all columns are numbers, give "
            "train and test as (frame[columns], frame[target])": "table" not in data,
        }
    )
    data["name"] = load_add_on_part("own table", "frame")(frame)
    return tree


def _describe_value(value: Any, described: dict[int, int]) -> str:
    """Describe a module, a loss, or a part of one, as text for the digest that names a module.

    * An array is described by its digest, and a partial function, a method or a container part by part.
    * A function is described by its code, its defaults, the values that it closes over, and the functions of its
      own file that it names.
    * A class is described by its functions and its plain members, and those of its bases outside of PyTorch.
    * A torch module is described by its class, its text, its attributes, its layers, and its hooks before and
      after a forward pass.
    * An object whose text has an address is described by its class and its attributes.
    * Anything else is described by its text.

    Args:
        value: Value to describe.
        described: Number of each described function, class and object by its id, to which this one is added.
    """
    if hasattr(value, "__dict__"):
        if id(value) in described:
            return f"#{described[id(value)]}"
        described[id(value)] = len(described)
    match value:
        case np.ndarray():
            return _digest_arrays(value).hex()
        case Tensor():  # by its bytes, since NumPy has no bfloat16
            parts: Sequence[Any] = [
                str((value.dtype, tuple(value.shape))),
                value.detach().cpu().reshape(-1).view(uint8).numpy(),
            ]
        case nn.Module():
            parts = [
                *(type(value), str(value), value._parameters, value._buffers, value._modules),
                *(*value._forward_pre_hooks.values(), *value._forward_hooks.values()),
                *(item for item in vars(value).items() if item[0] not in vars(nn.Module())),
            ]
        case type():
            parts = [
                (name, getattr(member, "__func__", getattr(member, "fget", member)))
                for base in value.__mro__
                if not base.__module__.startswith("torch.")
                for name, member in vars(base).items()
                if isinstance(member, FunctionType)
                or (
                    isinstance(
                        member,
                        staticmethod | classmethod | property | bool | int | float | str | list | tuple | dict,
                    )
                    and not name.startswith("__")
                )
            ]
        case CodeType():
            parts = [value.co_code.hex(), value.co_names, value.co_consts]
        case FunctionType():
            parts = [
                value.__code__,
                value.__defaults__,
                value.__kwdefaults__,
                [cell.cell_contents for cell in value.__closure__ or ()],
                [
                    function
                    for name in _names_in(value.__code__)
                    if isinstance(function := value.__globals__.get(name), FunctionType)
                    and function.__module__ == value.__module__
                ],
            ]
        case MethodType():
            parts = [value.__func__, value.__self__]
        case BuiltinFunctionType():
            return value.__qualname__
        case functools.partial():
            parts = [value.func, value.args, value.keywords]
        case Mapping():
            parts = list(value.items())
        case list() | tuple() | set() | frozenset():
            # A set of texts, such as a constant of code, has another order in another process.
            parts = (
                value
                if isinstance(value, list | tuple)
                else sorted(value, key=functools.partial(_describe_value, described={}))
            )
        case _ if hasattr(value, "__dict__") and " at 0x" in str(value):
            parts = [type(value), vars(value)]
        case _:
            return str(value)
    return f"({' '.join(_describe_value(part, described) for part in parts)})"


def _names_in(code: CodeType) -> list[str]:
    """List the names of globals and attributes in a function's code, and in functions inside of it."""
    return [
        *code.co_names,
        *(name for inner in code.co_consts if isinstance(inner, CodeType) for name in _names_in(inner)),
    ]


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
    sites: ArrayLike | None = None,
    fields: Fields | None = None,
    model: nn.Module | None = None,
    classes: int | None = None,
    loss: LossArgument = None,
    epsilon: float | Sequence[float] | None = None,
    trust: TrustName | Sequence[TrustName] | None = None,
    algorithm: AlgorithmName | str | Sequence[str] | None = None,
    set: Mapping[str, Any] | None = None,  # noqa: A002 - the name of the command's option
    engine: EngineName = "vectorized",
    out: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[RunObserver] = (),
    progress: bool | None = None,
    workers: int | None = None,
    ray: str | None = None,
) -> RunResults:
    """Run every cell of a scenario, as `fedpriv run` does, and return the results.

    A cell is one run: a value of each swept key and a seed.  Results are written into a folder as cells finish.
    `RunResults.findings`, such as a model no better than a constant, are also issued as warnings.

    Args:
        scenario: Name of a shipped scenario, a file, or a scenario as nested dictionaries.
        train: Your own records instead of the scenario's: (records, labels) as arrays or tensors, or items of
            records and labels, such as those of a torch Dataset, a DataLoader or a Hugging Face data set.  A list
            has such a data set for each silo.  Records are (n, …).  Bytes are pixels, floats are numbers, and
            other integers are tokens; several inputs are a tuple.  Labels are integers for classes, or floats for
            a regression: (n,), or (n, …) if a record has several.  A DataFrame (pandas, polars, Arrow) replaces
            the table that the scenario's [data.table] describes, which also defines the test records.
        test: Test records of the same form, given with `train` unless that is a DataFrame.
        sites: Site of each training record, (n,), numbers or names; each site becomes a silo.
        fields: Names or positions of an item's record and label where items are no pairs, such as
            ("image", "label"), or ((0, 1), 2) for two inputs of a record.
        model: Torch module instead of the scenario's model; training starts from its parameters.  It maps (n, …)
            to (n, classes), to (n, 1) for a regression or the loss "binary", or to (n, bins) for "hazard", and has
            outputs for each label if records have several.  The module itself is not changed.  A module needs
            `train` and `test`.
        classes: Number of classes, 0 for a regression; by default one more than the largest label if labels are
            integers or booleans, which makes this number public, else 0.
        loss: Loss of a module: a name ("cross-entropy", "binary", "squared-error", "absolute-error", "huber",
            "poisson", "hazard"), {"name": …, "class_weights": […], "label_smoothing": …}, or a function of one
            record's output and label.  By default cross-entropy, or squared error for a regression.
        epsilon: Value of `privacy.epsilon`, or several to sweep.
        trust: Value of `algorithm.trust`, or several to sweep.
        algorithm: Value of `algorithm.name`, or several to sweep, also of algorithms of your own.
        set: Values for dotted keys, such as {"federation.silos": 10}.  A list sweeps the key.
        engine: "vectorized", "inprocess", "ray" or "deployment"; your own records and modules need one of the
            first two.
        out: Folder of the results; by default a new one in runs/, or with `resume` the last one of this scenario.
        resume: Whether to keep the results in `out` and to run missing cells, including those of new seeds.  Other
            records, and another module or loss, are refused; a change in other files that it calls is not noticed.
        observers: Observers of the run's events.
        progress: Whether to show a progress bar; by default in a notebook and in an interactive session.
        workers: Number of processes of this machine that run groups of cells.
        ray: Address of a Ray cluster that runs groups of cells.

    Raises:
        InputError: A key, the records or the module cannot be used; the message names the cause.
        RunError: The run could not be finished; the message gives the reason.
    """
    settings = _merge_settings(
        set or {}, {"privacy.epsilon": epsilon, "algorithm.trust": trust, "algorithm.name": algorithm}
    )
    overrides = [format_assignment(key, value) for key, value in settings.items()]
    has_own_inputs = train is not None or test is not None or model is not None
    refuse(
        {
            "loss: is the loss of a module; give model, too, or leave loss out": loss is not None
            and model is None,
            "sites, fields: are of train and test as records and labels; give these, too": (
                (sites is not None or fields is not None) and (train is None or is_data_frame(train))
            ),
            "classes: is the number of classes of records; give train and test as records and labels, too": (
                classes is not None and (train is None or is_data_frame(train))
            ),
            f"engine = {engine!r}: its processes have no arrays and modules of this program; use "
            f"{' or '.join(map(repr, CALLING_PROCESS_ENGINES))}, or fedpriv.add_data and add_model in a file "
            "that is imported": has_own_inputs and engine not in CALLING_PROCESS_ENGINES,
            "workers, ray: other processes have no arrays and modules of this program; use fedpriv.add_data and "
            "add_model in a file that is imported": (has_own_inputs and (workers is not None or ray is not None)),
        }
    )
    options = RunOptions(
        engine=engine,
        out=None if out is None else Path(out),
        resume=resume,
        workers=None if workers is None and ray is None else Workers(workers, ray),
        overrides=overrides,
    )
    if has_own_inputs or isinstance(scenario, Mapping):
        tree, source = (
            (scenario, "scenario")
            if isinstance(scenario, Mapping)
            else (read_toml(find_scenario_file(Path(scenario))), str(scenario))
        )
        own_data_overrides = settings if source == OWN_DATA_SCENARIO else None
        loaded = parse_scenario(
            insert_own_data(tree, train, test, model, classes, loss, own_data_overrides, sites, fields),
            source,
            overrides,
        )
        rerun = None
    else:
        loaded, rerun = load_scenario(Path(scenario), overrides), options.format_command(str(scenario))
    shows_progress = hasattr(sys, "ps1") or "ipykernel" in sys.modules if progress is None else progress
    folder = run_sweep(loaded, options, [*observers, *([Progress(quiet=False)] if shows_progress else [])], rerun)
    write_table(folder)
    results = load_results(folder, None if model is None else copy.deepcopy(model))
    for finding in results.findings:
        warnings.warn(finding, stacklevel=2)
    return results


def load(folder: str | Path) -> RunResults:
    """Read the results in a run's folder.

    A module that a program gave to `run` is not stored: `model()` loads its parameters in any process, but
    `to_module` and `predict` work only in a process that gave it to `run`.

    Raises:
        InputError: The folder has no results or no history, or they cannot be read.
    """
    return load_results(Path(folder))


def _merge_settings(settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values of dotted keys with those of separate arguments.

    Raises:
        InputError: A key is given in both forms.
    """
    separate = {key: value for key, value in arguments.items() if value is not None}
    refuse({f"set: {key} is given as an argument, too; give it once": key in settings for key in separate})
    return {
        **settings,
        **{key: list(value) if isinstance(value, tuple) else value for key, value in separate.items()},
    }


def format_assignment(key: str, value: Any, source: str = "set") -> str:
    """Format KEY=VALUE for `--set`, with the value as JSON that is also TOML.

    The value is a number (also of NumPy or torch), a text, a truth value or a list.

    Args:
        key: Dotted key.
        value: Value of the key.
        source: Argument or file that has the key, for messages.

    Raises:
        InputError: The value is none of these, a number is not finite, or the value cannot be written as TOML.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=lambda number: number.item())
        refuse({"a table of keys": isinstance(tomllib.loads(f"value = {text}")["value"], dict)}, TypeError)
        return f"{key}={text}"
    except (AttributeError, RuntimeError, TypeError, ValueError):
        raise InputError(
            f"{source}: {key} = {value!r}: expected a finite number, a text, true or false, or a list"
        ) from None
