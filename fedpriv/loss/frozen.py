"""Trainable and frozen parameters of a module, and a forward pass as a function of parameters.

The flat point holds the trainable parameters (`trainable_parameters`).  Other parameters, and buffers, are
constants of the model.
"""

import copy
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence

from fedpriv.core.errors import InputError


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, in the order of `named_parameters`.

    A parameter with several names has the first one.
    """
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def frozen_names(module: nn.Module) -> list[str]:
    """Return the first name of each parameter that requires no gradients."""
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def freeze(module: nn.Module, except_: Collection[str] = ()) -> nn.Module:
    """Return a copy in which only the layers and parameters named in `except_` are trained.

    A parameter that is shared under several names is trained if one of them is named, or is inside of a named
    layer.  A BatchNorm with running statistics and no trained parameter is put into evaluation mode, so that its
    result for a record depends on no other record.

    Args:
        module: Module to copy, which is not changed.
        except_: Names as `named_modules` and `named_parameters` return them.  The name of a layer, such as "head",
            stands for every parameter below it.  Parameters that are integers stay frozen.

    Raises:
        InputError: A name in `except_` is none of the module's, or has no parameters.
    """
    copied = copy.deepcopy(module)
    names = [name for name, _ in copied.named_parameters(remove_duplicate=False)]
    for layer_name in except_:
        if not any(is_inside(name, layer_name) for name in names):
            child_names = ", ".join(sorted({name.split(".")[0] for name in names}))
            raise InputError(
                f"freeze: except_ = {layer_name!r} names no parameters of the module; it has {child_names}"
            )
    # By identity, since a shared parameter has several names.
    trainable_names = {name for name in names if any(is_inside(name, layer_name) for layer_name in except_)}
    trainable_ids = {
        id(parameter)
        for name, parameter in copied.named_parameters(remove_duplicate=False)
        if name in trainable_names and (parameter.is_floating_point() or parameter.is_complex())
    }
    for parameter in copied.parameters():
        parameter.requires_grad_(id(parameter) in trainable_ids)
    for layer in copied.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and not trainable_parameters(layer):
            layer.eval()
    return copied


def is_inside(name: str, layer: str) -> bool:
    """Whether a parameter or layer called `name` is `layer`, or inside of it.

    The layer "" is all of the module.
    """
    return layer == "" or name == layer or name.startswith(f"{layer}.")


class FunctionalModule:
    """Forward pass of a module as a function of its parameters and a batch of records."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = [name for name, _ in module.named_buffers()]
        # A tensor is at one place or, if it or its layer is shared, at several.  Places are full names.
        first_names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self._first_names = {
            f"{prefix}.{tensor_name}".removeprefix("."): first_names[id(tensor)]
            for prefix, layer in module.named_modules()
            for named_tensors in (layer.named_parameters, layer.named_buffers)
            for tensor_name, tensor in named_tensors(recurse=False, remove_duplicate=False)
        }

    def __call__(self, parameters: dict[str, Tensor], values: Tensor) -> Tensor:
        """Compute the outputs of a batch with these parameters, and with copies of the buffers.

        Guarantee: a value that one call writes into a buffer is in no other call's buffers, for every buffer that
        held a tensor when the constructor ran.  torch's `functional_call` puts the copies in the buffers' places,
        and the module's own buffers back in the end.  For this, each place of a tensor is named once, and
        `tie_weights` is off: where one layer is at two places, torch's own tying of names would leave the tensors
        of the call in the layer.

        Args:
            parameters: Values by the first name of each parameter, as in `trainable_parameters`.  A parameter that
                is left out keeps the module's values, and other names are ignored.
            values: Records of the batch, (B, …).
        """
        tensors = {**parameters, **{name: self._module.get_buffer(name).clone() for name in self._buffers}}
        tensors_by_place = {place: tensors[name] for place, name in self._first_names.items() if name in tensors}
        outputs: Tensor = functional_call(self._module, tensors_by_place, (values,), tie_weights=False)
        return outputs


def run_trial(module: nn.Module, probe: Tensor) -> Tensor:
    """Run a copy of the module on an artificial record, and return its outputs.

    Args:
        module: Module to copy, which is not changed.
        probe: A record, as a batch of one, (1, …).

    Raises:
        InputError: A layer changes or adds a buffer or a parameter, so that a record would depend on the one
            before, or a recurrent layer gets a packed sequence.  Other errors of the module are passed on.
    """
    module_copy = copy.deepcopy(module)
    for name, layer in module_copy.named_modules():
        if isinstance(layer, nn.RNNBase):
            layer.register_forward_pre_hook(_refuse_packed(name), with_kwargs=True)
    before = {name: values.detach().clone() for name, values in _parameters_and_buffers(module_copy).items()}
    with torch.no_grad():
        outputs: Tensor = module_copy(probe)
    for name, values in _parameters_and_buffers(module_copy).items():
        if name not in before or not torch.equal(_comparable(values.detach()), _comparable(before[name])):
            layer_name, _, tensor = name.rpartition(".")
            raise InputError(
                f"model: {f'layer {layer_name}' if layer_name else 'the module itself'} "
                f"({type(module_copy.get_submodule(layer_name)).__name__}) "
                f"changes {tensor} in its forward pass, so that a record would depend on the one before; a buffer "
                "that stays as it is can be used"
            )
    return outputs


def _parameters_and_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _comparable(values: Tensor) -> Tensor:
    """Replace NaN, which a buffer may hold, by a number, so that it equals itself."""
    return torch.nan_to_num(values, 12345.678, torch.inf, -torch.inf) if values.is_floating_point() else values


def _refuse_packed(name: str) -> Callable[[nn.Module, tuple[object, ...], dict[str, object]], None]:
    def hook(layer: nn.Module, inputs: tuple[object, ...], keyword_inputs: dict[str, object]) -> None:
        if any(isinstance(values, PackedSequence) for values in (*inputs, *keyword_inputs.values())):
            raise InputError(
                f"model: {f'layer {name}' if name else 'the module itself'} ({type(layer).__name__}) is given a "
                "packed sequence, whose "
                "records lie among each other; give it the padded one, and mask the outputs"
            )

    return hook
