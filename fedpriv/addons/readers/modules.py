"""Check a program's torch module, and take off its wrappers for several devices."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fedpriv.addons.readers.labels import check_labels
from fedpriv.core.errors import InputError
from fedpriv.loss.alone import reason_of

_WRAPPERS = (nn.DataParallel, DistributedDataParallel)


def prepare_module(model: Any, labels: NDArray[Any], classes: int | None, loss: Any) -> nn.Module | None:
    """Check a program's module and labels, and return the module without its wrapper for several devices.

    Args:
        model: Module of a program, or None for the scenario's model.
        labels: Labels of the training records.
        classes: Number of classes that the program gives, or None.
        loss: Loss that the program gives, or None.

    Returns:
        The module, or None if `model` is None.

    Raises:
        InputError: The value is no module, the module is scripted, has complex parameters or some without values
            or cannot be copied, or the labels cannot be used.
    """
    check_labels(labels, classes, loss)
    if model is None:
        return None
    while isinstance(model, _WRAPPERS):
        model = model.module
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch module, {_describe_value(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "model: is scripted, and torch gives no gradients per record of it; give the module before it"
        )
    if any(is_lazy(parameter) or parameter.is_meta for parameter in model.parameters()):
        raise InputError("model: has parameters without values; run it once on a record, or build it on the CPU")
    if any(parameter.is_complex() for parameter in model.parameters()):
        raise InputError(
            "model: has complex parameters, and clips and noise are of real ones; give two real ones each"
        )
    try:
        copy.deepcopy(model)
    except Exception as error:  # a module may raise any error
        raise InputError(
            f"model: cannot be copied ({reason_of(error)[:80]} …); weight_norm and pruning of torch.nn.utils are "
            "taken off by remove_weight_norm and prune.remove; those of torch.nn.utils.parametrizations can stay"
        ) from None
    return model


def _describe_value(value: Any) -> str:
    """Describe a value that is no module, as the end of the sentence "expected a torch module, …"."""
    if isinstance(value, type) and issubclass(value, nn.Module):
        return f"and {value.__name__} is the class of one; give an instance, such as {value.__name__}(…)"
    if isinstance(value, Mapping):
        return "not a state_dict; load it into a module with load_state_dict, and give the module"
    if isinstance(value, str):
        return f'not the name {value!r}; a model by name is set={{"model.name": …}}'
    if callable(value):
        return "not a function; give what it returns, or a class with the function as `forward`"
    return f"not a {type(value).__name__}"
