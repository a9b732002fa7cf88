"""Models by import path, "package.module:Name": any torch module that this installation has.

Nothing is imported when a scenario is read, only when its model is built: a guard checks the name first.
"""

import importlib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedpriv.errors import CodeError, InputError, printable

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_LONGEST = 200
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
        raise CodeError(f"{key} = {path!r}: cannot be imported here", printable(str(error))) from None
    except Exception as error:  # whatever a stranger's module does while it is imported
        raise CodeError(f"{key} = {path!r}: fails while it is imported", type(error).__name__) from None
    if not callable(found):
        raise InputError(f"{key} = {path!r}: is neither a class nor a function")
    return found  # type: ignore[no-any-return]


def build(path: str, key: str, positional: tuple[int, ...], arguments: dict[str, Any]) -> nn.Module:
    """The module that the class or function at `path` gives; InputError in one line if it gives none.

    Guarantee: `CodeError.public`, which is all that a guard says of a failure, depends on the scenario alone.
    """
    factory = imported(path, key)
    try:
        with torch.random.fork_rng(devices=[]):
            module = factory(*positional, **arguments)
    except Exception as error:  # as above
        raise CodeError(
            f"{key} = {path!r}: cannot be built from {positional} and {arguments}",
            printable(str(error).split("\n")[0]) or type(error).__name__,
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
