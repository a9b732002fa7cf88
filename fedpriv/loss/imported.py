"""Torch modules by import path, "package.module:Name", and their weights by SHA-256.

A module is tested by running it (`check_outputs`): it has to map one record to as many outputs as needed, and a
record's outputs must not depend on other records.  `make_trained_model` makes a torch module with the parameters
of a trained model.  The initial model of a run is called x_1.  A view is an objective that wraps another one, its
`base`.

A file of weights is named by its digest and not by a path, so that all parties have the same values.
"""

import copy
import hashlib
import importlib
import io
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from platformdirs import user_cache_path
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedpriv.core.errors import CodeError, InputError, sanitize_line
from fedpriv.data.layout import InputLayout
from fedpriv.loss.alone import map_records, reason_of
from fedpriv.loss.frozen import FunctionalModule, frozen_names, run_trial, trainable_parameters
from fedpriv.loss.layered import LayeredObjective
from fedpriv.loss.linear import LinearScore, SoftmaxRegression
from fedpriv.loss.losses import CrossEntropy, Loss
from fedpriv.loss.module import ModuleObjective, check_module, unflatten_parameters
from fedpriv.loss.objective import Objective, RecordView, find_innermost_objective
from fedpriv.loss.unrolled import make_vmap_module

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_MAX_PATH_LENGTH = 200
_MAX_GROUPS = 32  # of a GroupNorm in place of a BatchNorm


def is_import_path(name: str) -> bool:
    """Whether a model's name is of the form package.module:Name, with at most 200 characters."""
    return len(name) <= _MAX_PATH_LENGTH and _PATH.fullmatch(name) is not None


def import_callable(path: str, key: str) -> Callable[..., Any]:
    """Import the class, function or other callable at `path`.

    Args:
        path: Import path, "package.module:Name".
        key: Key of the scenario, for error messages.

    Raises:
        InputError: The path cannot be imported, or is not callable.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CodeError(f"{key} = {path!r}: cannot be imported here", sanitize_line(str(error))) from None
    except Exception as error:  # an imported module may raise any error
        raise CodeError(f"{key} = {path!r}: fails while it is imported", type(error).__name__) from None
    if not callable(function):
        raise InputError(f"{key} = {path!r}: is neither a class nor a function")
    return function  # type: ignore[no-any-return]


def build_module(path: str, key: str, positional: tuple[int, ...], arguments: dict[str, Any]) -> nn.Module:
    """Build the torch module that the class or function at `path` returns.

    torch's CPU generator starts from seed 0 for the call, and has its former state afterwards.

    Guarantee: `CodeError.public_message`, the part of the message for everybody, has no words of the code, and
    depends on the arguments and on the kind of the failure alone.

    Args:
        path: Import path, "package.module:Name".
        key: Key of the scenario, for error messages.
        positional: Positional arguments.
        arguments: Keyword arguments.

    Raises:
        InputError: The path cannot be imported or called, or the module cannot be built or is no torch module.
    """
    factory = import_callable(path, key)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # so that random buffers are the same at silo and server
            module = factory(*positional, **arguments)
    except Exception as error:  # a factory may raise any error
        raise CodeError(
            f"{key} = {path!r}: cannot be built from {positional} and {arguments}",
            reason_of(error),
        ) from None
    if not isinstance(module, nn.Module):
        raise CodeError(f"{key} = {path!r}: gives no torch module", f"found {type(module).__name__}")
    return module


def replace_batch_norm(module: nn.Module) -> nn.Module:
    """Replace BatchNorm layers by GroupNorm, whose output for a record depends on this record only.

    The number of groups is the largest divisor of the number of channels up to 32.  It is 1 for BatchNorm1d:
    a record may have one value a channel there, and a group of two such values would be about ±1 for any record.
    Submodules are replaced in place, at every place where they are used.  A GroupNorm has initial parameters, all
    trained and of torch's default type.  A lazy BatchNorm that has no channels yet stays.

    Args:
        module: Module, whose submodules are replaced.

    Returns:
        The module, or its replacement if the module itself is a BatchNorm.
    """
    group_norms: dict[nn.Module | None, nn.Module] = {
        norm: nn.GroupNorm(_group_count(norm), norm.num_features, eps=norm.eps, affine=norm.affine)
        for norm in module.modules()
        if isinstance(norm, _BatchNorm) and norm.num_features  # a lazy layer has none yet
    }
    for parent in list(module.modules()):
        for name in [name for name, child in parent._modules.items() if child in group_norms]:
            setattr(parent, name, group_norms[parent._modules[name]])
    return group_norms.get(module, module)


def _group_count(norm: _BatchNorm) -> int:
    max_count = 1 if isinstance(norm, nn.BatchNorm1d) else min(_MAX_GROUPS, norm.num_features)
    return next(count for count in range(max_count, 0, -1) if norm.num_features % count == 0)


_PROBE_RECORDS = 3
"""Number of records of a probe: one that is looked at, and two that are replaced (`check_per_record`)."""


def check_record_shape(record: tuple[int, ...], flat: tuple[int, ...], name: str) -> None:
    """Check that records of a shape have as many values as those of the data set.

    Args:
        record: Shape in which the module takes a record.
        flat: Shape of the data set's records, flat or not.
        name: Name of the model in error messages.

    Raises:
        InputError: The numbers of values differ.
    """
    if math.prod(record) != math.prod(flat):
        raise InputError(
            f"{_describe_module(name)} takes records of shape {record}, {math.prod(record)} values, and those of "
            f"the data set have {math.prod(flat)}"
        )


GIVEN_PREFIX = "module-"
"""Prefix of the names of modules that a program passed as objects."""


def check_outputs(
    module: nn.Module,
    values: int,
    outputs: int | tuple[int, ...] | None,
    name: str,
    *,
    inputs: Sequence[InputLayout] = (),
    why_needed: str = "",
) -> tuple[int, ...]:
    """Check that a module can be trained and maps one flat record to the needed outputs.

    The module is run on a record of zeros, (1, values), and on random records (`check_per_record`).  A module on
    the meta device, which has sizes and no values, is not run.

    Args:
        module: Module to check, which takes flat records.
        values: Number of values of a flat record.
        outputs: Number or shape of one record's outputs, or None for any.
        name: Name of the model in error messages.
        inputs: Layout of each input, or empty for numbers.
        why_needed: Explanation of `outputs` for the error message.

    Returns:
        The shape of one record's outputs.  For a module on the meta device it is the needed shape, or (1,) if any
        shape will do.

    Raises:
        InputError: The module cannot be trained, raises, has other outputs or values that are not finite, draws
            random numbers, changes its buffers or parameters, or lets records depend on each other.
    """
    check_module(module)
    needed = (outputs,) if isinstance(outputs, int) else outputs
    if any(parameter.is_meta for parameter in module.parameters()):
        return needed or (1,)
    probe = torch.zeros(1, values, dtype=next(module.parameters(), torch.zeros(1)).dtype)
    try:
        shape = tuple(run_trial(module, probe).shape)
        if shape != (expected := (1, *(shape[1:] if needed is None else needed))):
            raise InputError(
                f"{_describe_module(name)} maps one record to shape {shape}, but {expected} is needed{why_needed}"
            )
        check_per_record(module, values, name, inputs)
    except InputError:
        raise
    except Exception as error:  # a module may raise any error
        kinds = {"tokens": "tokens (floats are numbers)", "mask": "truth values"}
        record_text = (
            " and ".join(f"{layout.size} {kinds.get(layout.kind, 'values')}" for layout in inputs)
            or f"{values} values"
        )
        raise CodeError(
            f"{_describe_module(name)} cannot be given a record of {record_text}", reason_of(error)
        ) from None
    return shape[1:]


def _describe_module(name: str) -> str:
    """Name a module in a message, by the scenario's key or as the argument that a program passed."""
    return "model: the module" if name.startswith(GIVEN_PREFIX) else f"model.name = {name!r}"


def _make_probes(
    module: nn.Module, features: int, inputs: Sequence[InputLayout], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Random records (`_PROBE_RECORDS`, features) for tests of a module.

    Numbers are standard normal, and truth values are random.  Tokens are indices of rows of the module's smallest
    embedding, or 0 and 1 if it has none.  The values of all `inputs` are concatenated.  Without `inputs` a record
    has `features` numbers.
    """

    def draw_values(size: int, limits: int | None) -> Tensor:
        return (
            torch.randn(_PROBE_RECORDS, size, generator=generator, dtype=dtype)
            if limits is None
            else torch.randint(0, limits, (_PROBE_RECORDS, size), generator=generator).to(dtype)
        )

    table_sizes = [
        layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    ]
    limits = {"numbers": None, "tokens": min(table_sizes, default=2), "mask": 2}
    return torch.cat(
        [
            draw_values(layout.size, limits[layout.kind])
            for layout in inputs or (InputLayout((features,), "numbers"),)
        ],
        dim=1,
    )


def check_per_record(module: nn.Module, features: int, name: str, inputs: Sequence[InputLayout] = ()) -> None:
    """Check that a record's outputs and gradients do not depend on the other records of a batch.

    All records but the first of a random batch are replaced by others.  The first record's outputs, and the
    gradient of the sum of their squares, must not change, and the outputs must be about those of the record by
    itself.  This is checked at the module's own parameters, and at these plus normal random numbers, unless values
    overflow there.

    Increments are computed of each record alone, whatever the module does with a batch.  But a batch of records
    would have other outputs than in training.

    Args:
        module: Module to check.
        features: Number of values of a flat record.
        name: Name of the model in error messages.
        inputs: Layout of each input, or empty for numbers.

    Raises:
        InputError: Outputs or gradients depend on other records, change from call to call, or are not finite at
            the module's own parameters, or `run_trial` refuses the module.  Other errors of the module are passed
            on.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = trainable_parameters(module)
    dtype = next((parameter.dtype for parameter in parameters.values()), torch.float32)
    probe, other_probe = (_make_probes(module, features, inputs, dtype, generator) for _ in range(2))
    other_probe[0] = probe[0]
    run_trial(module, probe[:1])
    for scale in (0.0, 1.0):  # the module's own parameters, then others
        shifted = {
            key: (
                parameter.detach()
                + scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            ).requires_grad_()
            for key, parameter in parameters.items()
        }
        (outputs, gradients), (other_outputs, other_gradients), (single_outputs, _) = (
            _first_outputs_and_gradients(module, shifted, batch) for batch in (probe, other_probe, probe[:1])
        )
        if not (outputs.isfinite().all() and all(part.isfinite().all() for part in gradients)):
            if scale == 0.0:
                raise InputError(
                    f"{_describe_module(name)}: at its own parameters a record of standard normal numbers (or of "
                    "tokens) has outputs or gradients that are not finite"
                )
            continue  # overflow at random parameters proves nothing
        is_same = torch.equal(outputs, other_outputs) and all(map(torch.equal, gradients, other_gradients))
        if not is_same or not torch.allclose(outputs, single_outputs, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise InputError(
                f"{_describe_module(name)}: a record's outputs change with the other records of its batch, or "
                "from call to call; they have to follow from the record alone"
            )


def _first_outputs_and_gradients(
    module: nn.Module, parameters: dict[str, Tensor], batch: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of record 0 of a batch (B, f), and the gradients of the sum of their squares by parameters.

    A gradient is 0, of shape (), if the outputs do not depend on the parameter.  If they depend on no parameter,
    autograd raises a RuntimeError.
    """
    with torch.enable_grad():
        outputs = FunctionalModule(module)(parameters, batch)
        trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
        gradients = torch.autograd.grad(outputs[0].square().sum(), trainable, allow_unused=True)
    return outputs[0].detach(), [torch.zeros(()) if gradient is None else gradient for gradient in gradients]


@dataclass(frozen=True)
class TrainedModel:
    """A module with trained parameters.

    The inputs are features as the scenario's model makes them of records.
    """

    module: nn.Module
    """Module in evaluation mode, which maps features (n, f) to outputs."""
    feature_count: int | None
    """Number of leading features that the module takes, or None for all."""
    loss: Loss
    """Loss of the outputs, which says how to read them."""

    @torch.inference_mode()
    def outputs(self, features: Tensor) -> Tensor:
        """Compute outputs (n, …) of features (n, f), each record by itself (`map_records`)."""
        return map_records(make_vmap_module(self.module), features[:, : self.feature_count])


def make_trained_model(objective: Objective, vector: NDArray[Any]) -> TrainedModel:
    """Make the torch model with flat parameters `vector`.

    The model of a torch module is a copy with these parameters.  Softmax regression, whose last feature is a
    constant 1, becomes a Linear layer with a bias, and a loss of one linear score one without bias.

    Args:
        objective: Objective that was trained, possibly behind views.
        vector: Flat parameters, (d,).  For one linear score, numbers behind the weights are not used.

    Returns:
        The module in evaluation mode, with its loss and the number of leading features that it takes, or None for
        all.

    Raises:
        InputError: The objective is none of these.
    """
    objective = find_innermost_objective(objective)
    point = torch.from_numpy(np.array(vector)).to(objective.initial().dtype)
    match objective:
        case LayeredObjective() | ModuleObjective():
            return TrainedModel(copy_with_parameters(objective.module, point), None, objective.loss)
        case SoftmaxRegression():
            weights = point.view(objective.classes, objective.features)
            layer = nn.Linear(objective.features - 1, objective.classes, dtype=point.dtype)
            return TrainedModel(
                _set_parameters(layer, {"weight": weights[:, :-1], "bias": weights[:, -1]}),
                layer.in_features,
                CrossEntropy(),
            )
        case LinearScore():
            layer = nn.Linear(objective.dimension, 1, bias=False, dtype=point.dtype)
            weights = point[: objective.dimension].view(1, -1)  # without numbers that follow the weights
            return TrainedModel(_set_parameters(layer, {"weight": weights}), None, objective.loss)
    raise InputError(f"{type(objective).__name__} is no torch module; cell.model() gives its parameters")


def parameter_shapes(objective: Objective) -> list[tuple[int, ...]]:
    """Return the shapes of the arrays that make up the flat parameters (d,), in order.

    The arrays of a torch module are its `trainable_parameters`.  Any other objective has one array (d,).
    """
    innermost = find_innermost_objective(objective)
    return (
        [tuple(parameter.shape) for parameter in trainable_parameters(innermost.module).values()]
        if isinstance(innermost, LayeredObjective | ModuleObjective)
        else [(innermost.dimension,)]
    )


def copy_with_parameters(module: nn.Module, point: Tensor) -> nn.Module:
    """Copy a module in evaluation mode, with flat parameters `point` (d,).

    The parameters are in the order of `trainable_parameters`.  Frozen parameters and buffers have the module's
    values, and those of floating point have the type of `point`.
    """
    return _set_parameters(copy.deepcopy(module).to(point.dtype), unflatten_parameters(module, point))


def _set_parameters(module: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in values:
                parameter.copy_(values[name])
    return module.eval()


DIGEST_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")
"""Form of a digest of weights."""


def weights_folder() -> Path:
    """Return $FEDPRIV_WEIGHTS, or fedpriv/weights in the user's cache folder."""
    if folder := os.environ.get("FEDPRIV_WEIGHTS"):
        return Path(folder).expanduser()
    return user_cache_path("fedpriv", appauthor=False) / "weights"


def read_weights(weights: str, key: str) -> bytes:
    """Read the file of weights with this digest, HEX.pt in `weights_folder`.

    Guarantee: the SHA-256 of the bytes is the named one, so the weights that a claim names are the weights that a
    record passes through.

    Args:
        weights: Digest, "sha256:HEX".
        key: Key of the scenario, for error messages.

    Raises:
        InputError: The file cannot be read, or its digest is another.
    """
    file = weights_folder() / f"{weights.removeprefix('sha256:')}.pt"
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"{key} = {weights!r}: {file}: {error.strerror}; put the file there, or set FEDPRIV_WEIGHTS"
        ) from None
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != weights:
        raise InputError(f"{key} = {weights!r}: {file} has another SHA-256")
    return content


_CHECKPOINT_KEYS = ("state_dict", "model_state_dict", "model")
"""Keys of a checkpoint, a dictionary of other things as well, under which programs store a state_dict."""
_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.", "")
"""Prefixes of all names in a state_dict of a wrapper such as nn.DataParallel, or "" without one."""


def read_state_dict(weights: str, key: str, path: str, module: nn.Module) -> dict[str, Tensor]:
    """Read the state_dict of the module at `path` from the file with this digest.

    The file may be a checkpoint with the state_dict under a usual key.  If all names have the prefix of a wrapper,
    such as "module.", this prefix is left out of those names that the module does not have.

    Args:
        weights: Digest, "sha256:HEX".
        key: Key of the scenario, for error messages.
        path: Import path of the module, for error messages.
        module: The module.

    Returns:
        Values by name.  The names and shapes need not be those of the module.

    Raises:
        InputError: The file cannot be read, has another digest, or holds no state_dict.
    """
    content, names = read_weights(weights, key), set(module.state_dict())
    try:
        with torch.device("cpu"):
            checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        keys = [name for name in _CHECKPOINT_KEYS if isinstance(checkpoint.get(name), dict)]
        state = checkpoint[keys[0]] if keys else checkpoint
        if not all(isinstance(values, Tensor) for values in state.values()):
            raise ValueError("holds no state_dict; save module.state_dict() with torch.save")
        prefix = next(text for text in _WRAPPER_PREFIXES if all(name.startswith(text) for name in state))
        return {name if name in names else name.removeprefix(prefix): values for name, values in state.items()}
    except Exception as error:  # a damaged file may raise any error
        raise weights_error(weights, key, path, error) from None


def weights_error(weights: str, key: str, path: str, error: Exception) -> CodeError:
    """Make the error for weights that do not fit the module at `path`."""
    # torch's own text on a file that it cannot unpickle gives other advice, or is empty or a number.
    reason = (
        "holds no state_dict that can be loaded; save module.state_dict() with torch.save"
        if isinstance(error, UnpicklingError | LookupError | EOFError | AttributeError)  # of no dictionary
        else " ".join(str(error).split())
    )
    return CodeError(f"{key} = {weights!r}: do not fit {path!r}", sanitize_line(reason, 200))


@dataclass(frozen=True)
class InitializedView(RecordView):
    """`base` whose x_1 has the values of `module`, but for the parameters in `seeded_names`."""

    module: nn.Module
    """Module whose trainable parameters are x_1."""
    seeded_names: frozenset[str] = frozenset()
    """Parameters that keep the values that `base` draws for them."""

    convex_within = 0.0  # the module's values are not the center of a known ball

    def initial(self) -> Tensor:
        seeded_point = self.base.initial()
        module_parameters = trainable_parameters(self.module)
        values = [
            seeded_values if name in self.seeded_names else module_parameters[name].detach().to(seeded_point.dtype)
            for name, seeded_values in unflatten_parameters(self.module, seeded_point).items()
        ]
        return torch.cat([part.flatten() for part in values])


def load_constants(module: nn.Module, weights: str | None, path: str) -> frozenset[str]:
    """Load a file of weights into the module, and return the names of trainable parameters that it lacks.

    Guarantee: every frozen parameter and, with a digest, every buffer of a state_dict has the values of the named
    digest.  A frozen parameter or, with a digest, a buffer of the state_dict without values in the file raises
    InputError, since a silo and its server might fill it each in its own way.

    Args:
        module: Module to load the values into.
        weights: Digest, or None for a module without frozen parameters.
        path: Import path of the module, for error messages.

    Returns:
        Names of the trainable parameters that are not in the file: all of them without a digest.  A tied parameter
        has several names, and is in the file if one of them is.

    Raises:
        InputError: There is no digest and a parameter is frozen, the file cannot be used, or it does not fit the
            module.
    """
    frozen = frozen_names(module)
    if weights is None:
        if frozen:
            raise InputError(
                f"model.name = {path!r}: {sanitize_line(frozen[0])} is not trained; name its values by "
                'model.weights = "sha256:…", of the file with the state_dict'
            )
        return frozenset(trainable_parameters(module))
    device = next(module.parameters(), torch.zeros(0)).device  # the meta device if only sizes are computed
    state = {
        name: values.to(device) for name, values in read_state_dict(weights, "model.weights", path, module).items()
    }
    trainable_names = {
        name for name, parameter in module.named_parameters(remove_duplicate=False) if parameter.requires_grad
    }
    # A module may leave parameters out of its state_dict.
    needed_names = [*module.state_dict(), *(name for name, _ in module.named_parameters(remove_duplicate=False))]
    if missing_names := [name for name in needed_names if name not in {*trainable_names, *state}]:
        raise InputError(
            f"model.weights = {weights!r}: holds no {sanitize_line(missing_names[0])}, which is not trained"
        )
    try:
        load_result = module.load_state_dict(state, strict=False)
        if load_result.unexpected_keys:
            raise InputError(f"holds {load_result.unexpected_keys[0]}, which the module does not have")
    except Exception as error:  # values of another shape raise
        raise weights_error(weights, "model.weights", path, error) from None
    loaded = {id(values) for name, values in module.named_parameters(remove_duplicate=False) if name in state}
    return frozenset(name for name, values in trainable_parameters(module).items() if id(values) not in loaded)
