"""Models by import path, "package.module:Name": any torch module that this installation has.

Nothing is imported when a scenario is read, only when its model is built: a guard checks the name first.
"""

import importlib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedpriv.errors import InputError, printable

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_LONGEST = 200
_PROBED = 3  # records of a probe
_MOST_GROUPS = 32


def is_import_path(name: str) -> bool:
    """Whether a model's name is of the form package.module:Name."""
    return len(name) <= _LONGEST and _PATH.fullmatch(name) is not None


def imported(path: str, key: str) -> Callable[..., Any]:
    """The class or function at `path`; InputError, naming `key`, if it cannot be imported or called."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{key} = {path!r}: cannot be imported here ({printable(str(error))})") from None
    except Exception as error:  # whatever a stranger's module does while it is imported
        raise InputError(f"{key} = {path!r}: fails while it is imported ({type(error).__name__})") from None
    if not callable(found):
        raise InputError(f"{key} = {path!r}: is neither a class nor a function")
    return found  # type: ignore[no-any-return]


def build(path: str, key: str, positional: tuple[int, ...], arguments: dict[str, Any]) -> nn.Module:
    """The module that the class or function at `path` gives; InputError in one line if it gives none."""
    factory = imported(path, key)
    try:
        with torch.random.fork_rng(devices=[]):
            module = factory(*positional, **arguments)
    except Exception as error:  # as above
        reason = printable(str(error).split("\n")[0]) or type(error).__name__
        raise InputError(
            f"{key} = {path!r}: cannot be built from {positional} and {arguments} ({reason})"
        ) from None
    if not isinstance(module, nn.Module):
        raise InputError(f"{key} = {path!r}: gives a {type(module).__name__}, not a torch module")
    return module


def with_group_norm(module: nn.Module) -> nn.Module:
    """The module with GroupNorm in place of every BatchNorm: of one record alone, and with as many parameters."""
    if isinstance(module, _BatchNorm):
        channels = module.num_features
        groups = next(count for count in range(min(_MOST_GROUPS, channels), 0, -1) if channels % count == 0)
        return nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)
    for name, child in module.named_children():
        setattr(module, name, with_group_norm(child))
    return module


def check_alone(module: nn.Module, features: int, outputs: int, name: str) -> None:
    """InputError unless a record's outputs and gradients are what they are whatever the other records are.

    It really runs the module: records 1 and 2 of a batch of 3 are replaced, and outputs and gradient of record 0
    have to stay, bit by bit, at the module's own parameters and at others.  A batch of one has to give the same up
    to rounding.  Increments are taken of each record alone, so what is found here would not break their guarantee,
    but the model that is evaluated would be another one than the model that is trained.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        return  # built to be measured, not to be run
    generator = torch.Generator().manual_seed(0)
    parameters = dict(module.named_parameters())
    kind = next((p.dtype for p in parameters.values()), torch.float32)
    first = torch.randn(_PROBED, features, generator=generator, dtype=kind)
    second = torch.randn(_PROBED, features, generator=generator, dtype=kind)
    second[0] = first[0]
    for scale in (0.0, 1.0):
        moved = {
            key: (p.detach() + scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)).requires_grad_()
            for key, p in parameters.items()
        }
        (out, slope), (other, other_slope), (alone, _) = (
            _of_first(module, moved, batch, outputs, name) for batch in (first, second, first[:1])
        )
        same = torch.equal(out, other) and all(map(torch.equal, slope, other_slope))
        if not same or not torch.allclose(out, alone, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise InputError(
                f"model.name = {name!r}: a record's outputs change with the other records of its batch, or from "
                "call to call; models here look at one record (model.group_norm = true replaces BatchNorm)"
            )


def _of_first(
    module: nn.Module, parameters: dict[str, Tensor], batch: Tensor, outputs: int, name: str
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of record 0, and the gradients of their sum of squares."""
    with torch.enable_grad():
        try:
            given = torch.func.functional_call(module, parameters, (batch,))
        except Exception as error:  # as above
            reason = printable(str(error).split("\n")[0]) or type(error).__name__
            raise InputError(f"model.name = {name!r}: fails on {tuple(batch.shape)} numbers ({reason})") from None
        if not isinstance(given, Tensor) or given.shape != (len(batch), outputs):
            found = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise InputError(
                f"model.name = {name!r}: maps {tuple(batch.shape)} to {found}, expected {(len(batch), outputs)}"
            )
        used = [p for p in parameters.values() if p.requires_grad]
        slopes = torch.autograd.grad(given[0].square().sum(), used, allow_unused=True)
    return given[0].detach(), [torch.zeros(()) if slope is None else slope for slope in slopes]
