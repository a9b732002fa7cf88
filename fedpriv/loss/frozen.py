"""What of a module is trained, what stays as it is, and that its forward pass leaves it so.

The flat point holds the parameters that are trained (`trained_of`); all others, and all buffers, are constants.
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
    """The parameters that require gradients, each under its first name, in the order of `named_parameters`."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def frozen_names(module: nn.Module) -> list[str]:
    """The names of the parameters that stay as they are."""
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def freeze(module: nn.Module, except_: Collection[str] = ()) -> nn.Module:
    """Return a copy whose parameters stay as they are, but those of the layers and parameters named in `except_`.

    A BatchNorm all of which is frozen goes to evaluation mode: it is a constant map then, and looks at one record.

    Args:
        module: it is not changed.
        except_: names as `named_modules` and `named_parameters` give them: "head" is every parameter below it.

    Raises:
        InputError: a name that the module does not have, or that has no parameters.
    """
    copied = copy.deepcopy(module)
    names = [name for name, _ in copied.named_parameters(remove_duplicate=False)]
    for kept in except_:
        if not any(is_inside(name, kept) for name in names):
            known = ", ".join(sorted({name.split(".")[0] for name in names}))
            raise InputError(f"freeze: except_ = {kept!r} names no parameters of the module; it has {known}")
    trained = {name for name in names if any(is_inside(name, kept) for kept in except_)}
    held = {
        id(parameter) for name, parameter in copied.named_parameters(remove_duplicate=False) if name in trained
    }
    for parameter in copied.parameters():
        parameter.requires_grad_(id(parameter) in held)
    for layer in copied.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and not trainable_parameters(layer):
            layer.eval()
    return copied


def is_inside(name: str, layer: str) -> bool:
    """Whether a parameter or layer called `name` is `layer`, or in it; "" is all of the module."""
    return layer == "" or name == layer or name.startswith(f"{layer}.")


class FunctionalModule:
    """A module's forward pass with parameters of the caller's; where its tensors are is read once."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = [name for name, _ in module.named_buffers()]
        first = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self._first_names = {
            f"{above}.{own}".removeprefix("."): first[id(tensor)]
            for above, layer in module.named_modules()
            for of in (layer.named_parameters, layer.named_buffers)
            for own, tensor in of(recurse=False, remove_duplicate=False)
        }

    def __call__(self, parameters: dict[str, Tensor], values: Tensor) -> Tensor:
        """Outputs with these parameters, and with a copy of every buffer, to do with as it likes.

        Guarantee: what the forward pass of one record writes into a buffer is in no other call's: torch's
        `functional_call` puts the copies in the buffers' places, and the module's own back in the end.  Each place
        of a tensor is named once: where one layer is at two places, torch's own tying of names would leave the
        tensors of the call in it.
        """
        given = {**parameters, **{name: self._module.get_buffer(name).clone() for name in self._buffers}}
        everywhere = {place: given[name] for place, name in self._first_names.items() if name in given}
        outputs: Tensor = functional_call(self._module, everywhere, (values,), tie_weights=False)
        return outputs


def run_trial(module: nn.Module, probe: Tensor) -> Tensor:
    """What a copy of the module gives for a record that is made up.

    InputError, naming the layer, for a forward pass that changes a buffer or a parameter, or packs sequences.
    """
    tried = copy.deepcopy(module)
    for name, layer in tried.named_modules():
        if isinstance(layer, nn.RNNBase):
            layer.register_forward_pre_hook(_refuse_packed(name))
    before = {name: values.detach().clone() for name, values in _parameters_and_buffers(tried).items()}
    with torch.no_grad():
        outputs: Tensor = tried(probe)
    for name, values in _parameters_and_buffers(tried).items():
        if name not in before or not torch.equal(_comparable(values.detach()), _comparable(before[name])):
            layer_name, _, own = name.rpartition(".")
            raise InputError(
                f"model: layer {layer_name or 'itself'} ({type(tried.get_submodule(layer_name)).__name__}) "
                f"changes {own} in its forward pass, so that a record would depend on the one before; a buffer "
                "that stays as it is can be used"
            )
    return outputs


def _parameters_and_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _comparable(values: Tensor) -> Tensor:
    """Values to compare: NaN, as a mask may hold it, equals NaN."""
    return torch.nan_to_num(values, nan=12345.678) if values.is_floating_point() else values


def _refuse_packed(name: str) -> Callable[[nn.Module, tuple[object, ...]], None]:
    def hook(layer: nn.Module, inputs: tuple[object, ...]) -> None:
        if inputs and isinstance(inputs[0], PackedSequence):
            raise InputError(
                f"model: layer {name or 'itself'} ({type(layer).__name__}) is given a packed sequence, whose "
                "records lie among each other; give it the padded one, and mask the outputs"
            )

    return hook
