"""Models by import path, "package.module:Name": any torch module that this installation has.

Nothing is imported when a scenario is read, only when its model is built: a guard checks the name first.  What a
module has to be is found out by running it: one record in, as many outputs as needed, and no look at other
records. `trained` gives a trained model back as a torch module.

Weights of modules by the SHA-256 of the file that holds them: a scenario names no path, and all have the same.

A file is looked for in $FEDPRIV_WEIGHTS (or fedpriv/weights in the user's cache folder) as HEX.pt.
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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
from fedpriv.loss.objective import Objective, RecordView, View
from fedpriv.loss.unrolled import make_vmap_module

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_MAX_PATH_LENGTH = 200
_MAX_GROUPS = 32


def is_import_path(name: str) -> bool:
    """Whether a model's name is of the form package.module:Name."""
    return len(name) <= _MAX_PATH_LENGTH and _PATH.fullmatch(name) is not None


def import_callable(path: str, key: str) -> Callable[..., Any]:
    """The class or function at `path`; InputError, naming `key`, if it cannot be imported or called."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CodeError(f"{key} = {path!r}: cannot be imported here", sanitize_line(str(error))) from None
    except Exception as error:  # whatever a stranger's module does while it is imported
        raise CodeError(f"{key} = {path!r}: fails while it is imported", type(error).__name__) from None
    if not callable(found):
        raise InputError(f"{key} = {path!r}: is neither a class nor a function")
    return found  # type: ignore[no-any-return]


def build_module(path: str, key: str, positional: tuple[int, ...], arguments: dict[str, Any]) -> nn.Module:
    """The module that the class or function at `path` gives; InputError in one line if it gives none.

    Guarantee: `CodeError.public`, which is all that a guard says of a failure, depends on the scenario alone.
    """
    factory = import_callable(path, key)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # what a class draws for a buffer is the same at silo and server
            module = factory(*positional, **arguments)
    except Exception as error:  # as above
        raise CodeError(
            f"{key} = {path!r}: cannot be built from {positional} and {arguments}",
            reason_of(error),
        ) from None
    if not isinstance(module, nn.Module):
        raise InputError(f"{key} = {path!r}: gives a {type(module).__name__}, not a torch module")
    return module


def replace_batch_norm(module: nn.Module) -> nn.Module:
    """The module with GroupNorm in place of every BatchNorm: of one record alone, and with as many parameters."""
    if isinstance(module, _BatchNorm):
        channels = module.num_features
        groups = next(count for count in range(min(_MAX_GROUPS, channels), 0, -1) if channels % count == 0)
        return nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)
    for name, child in module.named_children():
        setattr(module, name, replace_batch_norm(child))
    return module


_PROBE_RECORDS = 3  # records of a probe


def check_record_shape(record: tuple[int, ...], flat: tuple[int, ...], name: str) -> None:
    """InputError if records of this shape have another number of values than the data set's."""
    if math.prod(record) != math.prod(flat):
        raise InputError(
            f"model.name = {name!r} takes records of shape {record}, {math.prod(record)} values, and those of the "
            f"data set have {math.prod(flat)}"
        )


GIVEN_PREFIX = "module-"
"""How the names of modules begin that a program gave; nobody typed such a name."""


def check_outputs(
    module: nn.Module,
    values: int,
    outputs: int | tuple[int, ...] | None,
    name: str,
    *,
    inputs: Sequence[InputLayout] = (),
    why_needed: str = "",
) -> tuple[int, ...]:
    """InputError if the module cannot be trained here, or does not map one flat record to these outputs.

    None for outputs: any.  It gives the shape of a record's, and says `why` they are needed.  The module is really
    run, so that code which no name gives away is found too: see `check_alone`.
    """
    check_module(module)
    needed = (outputs,) if isinstance(outputs, int) else outputs
    if any(parameter.is_meta for parameter in module.parameters()):
        return needed or (1,)  # built to be measured, not to be run
    probe = torch.zeros(1, values, dtype=next(module.parameters(), torch.zeros(1)).dtype)
    try:
        shape = tuple(run_trial(module, probe).shape)
    except InputError:
        raise
    except Exception as error:  # whatever a stranger's module does
        kinds = {"tokens": "tokens (floats are numbers)", "mask": "truth values"}
        held = (
            " and ".join(f"{each.size} {kinds.get(each.kind, 'values')}" for each in inputs) or f"{values} values"
        )
        raise CodeError(f"{_describe_module(name)} cannot be given a record of {held}", reason_of(error)) from None
    if needed is not None and shape != (1, *needed):
        raise InputError(
            f"{_describe_module(name)} maps one record to shape {shape}, but {(1, *needed)} is needed{why_needed}"
        )
    check_per_record(module, values, name, inputs)
    return shape[1:]


def _describe_module(name: str) -> str:
    """The key, or the argument that a program gave."""
    return "model: the module" if name.startswith(GIVEN_PREFIX) else f"model.name = {name!r}"


def _make_probes(
    module: nn.Module, features: int, inputs: Sequence[InputLayout], kind: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Made-up records (`_PROBED`, features): standard normal numbers, tokens of the smallest table of the module's
    that looks words up, and random truth values."""

    def drawn(size: int, below: int | None) -> Tensor:
        return (
            torch.randn(_PROBE_RECORDS, size, generator=generator, dtype=kind)
            if below is None
            else torch.randint(0, below, (_PROBE_RECORDS, size), generator=generator).to(kind)
        )

    known = [
        layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    ]
    below = {"numbers": None, "tokens": min(known, default=2), "mask": 2}
    return torch.cat(
        [drawn(each.size, below[each.kind]) for each in inputs or (InputLayout((features,), "numbers"),)], dim=1
    )


def check_per_record(module: nn.Module, features: int, name: str, inputs: Sequence[InputLayout] = ()) -> None:
    """InputError unless a record's outputs and gradients are what they are whatever the other records are.

    It really runs the module, which must leave its buffers as they are (`outputs_of_trial`): records 1 and 2 of a
    batch of 3 are replaced, and outputs and gradient of record 0 have to stay, bit by bit, at the module's own
    parameters and at others.  A batch of one has to give the same up to rounding.  Increments are taken of each
    record alone, so what is found here would not break their guarantee, but the model that is evaluated would be
    another one than the model that is trained.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = trainable_parameters(module)
    kind = next((p.dtype for p in parameters.values()), torch.float32)
    first, second = (_make_probes(module, features, inputs, kind, generator) for _ in range(2))
    second[0] = first[0]
    run_trial(module, first[:1])
    for scale in (0.0, 1.0):
        moved = {
            key: (p.detach() + scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)).requires_grad_()
            for key, p in parameters.items()
        }
        (out, slope), (other, other_slope), (alone, _) = (
            _first_outputs_and_gradients(module, moved, batch) for batch in (first, second, first[:1])
        )
        if not (out.isfinite().all() and all(part.isfinite().all() for part in slope)):
            if scale == 0.0:
                raise InputError(
                    f"model.name = {name!r}: at its own parameters a record of standard normal numbers (or of "
                    "tokens) has outputs or gradients that are not finite"
                )
            continue  # parameters that nobody trains to
        same = torch.equal(out, other) and all(map(torch.equal, slope, other_slope))
        if not same or not torch.allclose(out, alone, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise InputError(
                f"model.name = {name!r}: a record's outputs change with the other records of its batch, or from "
                "call to call; models here look at one record (model.group_norm = true replaces BatchNorm)"
            )


def _first_outputs_and_gradients(
    module: nn.Module, parameters: dict[str, Tensor], batch: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of record 0, and the gradients of their sum of squares."""
    with torch.enable_grad():
        given = FunctionalModule(module)(parameters, batch)
        used = [parameter for parameter in parameters.values() if parameter.requires_grad]
        slopes = torch.autograd.grad(given[0].square().sum(), used, allow_unused=True)
    return given[0].detach(), [torch.zeros(()) if slope is None else slope for slope in slopes]


@dataclass(frozen=True)
class TrainedModel:
    """A module with the trained parameters, of features as the scenario's model maps records to them."""

    module: nn.Module
    feature_count: int | None
    """It takes so many features, the first ones; None: all."""
    loss: Loss
    """By which outputs are to be read."""

    @torch.inference_mode()
    def outputs(self, features: Tensor) -> Tensor:
        """(n, f) -> (n, outputs); no record looks at another."""
        return map_records(make_vmap_module(self.module), features[:, : self.feature_count])


def make_trained_model(objective: Objective, vector: NDArray[Any]) -> TrainedModel:
    """The model whose flat parameters (d,) are `vector`; InputError for an objective that is no module."""
    while isinstance(objective, View):
        objective = objective.base
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
            weights = point[: objective.dimension].view(1, -1)  # a row may keep numbers of its own behind them
            return TrainedModel(_set_parameters(layer, {"weight": weights}), None, objective.loss)
    raise InputError(f"{type(objective).__name__} is no torch module; cell.model() gives its parameters")


def parameter_shapes(objective: Objective) -> list[tuple[int, ...]]:
    """The shapes of the arrays that its flat parameters (d,) are, one behind the other.

    Those of a torch module are in the order of its `state_dict`, less what is not trained; an objective that is
    no module has one of (d,).
    """
    while isinstance(objective, View):
        objective = objective.base
    return (
        [tuple(parameter.shape) for parameter in trainable_parameters(objective.module).values()]
        if isinstance(objective, LayeredObjective | ModuleObjective)
        else [(objective.dimension,)]
    )


def copy_with_parameters(module: nn.Module, point: Tensor) -> nn.Module:
    """A copy of the module, in evaluation mode, with these flat parameters (d,) in the order of its own.

    What is not trained, and buffers, are the module's.
    """
    return _set_parameters(copy.deepcopy(module).to(point.dtype), unflatten_parameters(module, point))


def _set_parameters(module: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in values:
                parameter.copy_(values[name])
    return module.eval()


DIGEST_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")


def weights_folder() -> Path:
    """$FEDPRIV_WEIGHTS, or fedpriv/weights in the user's cache folder."""
    if chosen := os.environ.get("FEDPRIV_WEIGHTS"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedpriv" / "weights"


def read_weights(weights: str, key: str) -> bytes:
    """The bytes of the file of this digest; InputError, naming `key`, where there is none.

    Guarantee: their SHA-256 is the one that is named, so what a claim names is what a record passes through.
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


def read_state_dict(weights: str, key: str, path: str) -> dict[str, Tensor]:
    """The state_dict in that file, of the module at `path`."""
    content = read_weights(weights, key)
    try:
        with torch.device("cpu"):
            return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except Exception as error:  # of a damaged file
        raise weights_error(weights, key, path, error) from None


def weights_error(weights: str, key: str, path: str, error: Exception) -> CodeError:
    """The error of weights that a module at `path` does not take."""
    return CodeError(f"{key} = {weights!r}: do not fit {path!r}", str(error).split("\n")[0][:200])


@dataclass(frozen=True)
class InitializedView(RecordView):
    """`base`, from the values of the parameters that `module` has, but for those named in `without`."""

    module: nn.Module
    seeded_names: frozenset[str] = frozenset()

    convex_within = 0.0

    def initial(self) -> Tensor:
        like = self.base.initial()
        own = trainable_parameters(self.module)
        parts = [
            values if name in self.seeded_names else own[name].detach().to(like.dtype)
            for name, values in unflatten_parameters(self.module, like).items()
        ]
        return torch.cat([part.flatten() for part in parts])


def load_constants(module: nn.Module, weights: str | None, path: str) -> frozenset[str]:
    """Put the file's values into the module; the names of parameters to train that it lacks.

    These begin as the scenario's seed says: a head, or what `lora` adds.

    Guarantee: every frozen parameter, and every buffer of a state_dict, has the values of the named digest;
    InputError where one has not, as a silo and its server might fill it each in its own way.
    """
    frozen = frozen_names(module)
    if weights is None:
        if frozen:
            raise InputError(
                f"model.name = {path!r}: {sanitize_line(frozen[0])} is not trained; name its values by "
                'model.weights = "sha256:…", of the file with the state_dict'
            )
        return frozenset(trainable_parameters(module))
    where = next(module.parameters()).device  # none of memory, where a size is measured
    state = {name: values.to(where) for name, values in read_state_dict(weights, "model.weights", path).items()}
    learnt = {name for name, each in module.named_parameters(remove_duplicate=False) if each.requires_grad}
    if missing := [name for name in module.state_dict() if name not in {*learnt, *state}]:
        raise InputError(
            f"model.weights = {weights!r}: holds no {sanitize_line(missing[0])}, which is not trained"
        )
    try:
        found = module.load_state_dict(state, strict=False)
        if found.unexpected_keys:
            raise InputError(f"holds {found.unexpected_keys[0]}, which the module does not have")
    except Exception as error:  # of another shape
        raise weights_error(weights, "model.weights", path, error) from None
    return frozenset(set(trainable_parameters(module)) - set(state))
