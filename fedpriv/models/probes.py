"""What a module of somebody's own has to be, found out by running it: one record in, as many outputs as needed."""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpriv.errors import CodeError, InputError, printable
from fedpriv.objectives.module import check_module

_PROBED = 3  # records of a probe


def check_shape(record: tuple[int, ...], flat: tuple[int, ...], name: str) -> None:
    """InputError if records of this shape have another number of values than the data set's."""
    if math.prod(record) != math.prod(flat):
        raise InputError(
            f"model.name = {name!r} takes records of shape {record}, {math.prod(record)} values, and those of the "
            f"data set have {math.prod(flat)}"
        )


GIVEN = "module-"
"""How the names of modules begin that a program gave; nobody typed such a name."""


def check_outputs(module: nn.Module, values: int, outputs: int, name: str) -> None:
    """InputError if the module cannot be trained here, or does not map one flat record to this many outputs.

    It is really run, so that code which no name gives away is found too: see `check_alone`.
    """
    check_module(module)
    if any(parameter.is_meta for parameter in module.parameters()):
        return  # built to be measured, not to be run
    probe = torch.zeros(1, values, dtype=next(module.parameters(), torch.zeros(1)).dtype)
    try:
        with torch.no_grad():
            shape = tuple(module(probe).shape)
    except Exception as error:  # whatever a stranger's module does
        reason = printable(str(error).split("\n")[0]) or type(error).__name__
        raise CodeError(f"{_called(name)} cannot be given a record of {values} values", reason) from None
    if shape != (1, outputs):
        raise InputError(f"{_called(name)} maps one record to shape {shape}, but (1, {outputs}) is needed")
    check_alone(module, values, name)


def _called(name: str) -> str:
    """The key, or the argument that a program gave."""
    return "model: the module" if name.startswith(GIVEN) else f"model.name = {name!r}"


def reshaped(module: nn.Module, record: tuple[int, ...]) -> nn.Module:
    """The module behind a layer that gives flat records their shape back."""
    return module if len(record) == 1 else nn.Sequential(nn.Unflatten(1, record), module)


def check_alone(module: nn.Module, features: int, name: str) -> None:
    """InputError unless a record's outputs and gradients are what they are whatever the other records are.

    It really runs the module: records 1 and 2 of a batch of 3 are replaced, and outputs and gradient of record 0
    have to stay, bit by bit, at the module's own parameters and at others.  A batch of one has to give the same up
    to rounding.  Increments are taken of each record alone, so what is found here would not break their guarantee,
    but the model that is evaluated would be another one than the model that is trained.
    """
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
            _of_first(module, moved, batch) for batch in (first, second, first[:1])
        )
        if not (out.isfinite().all() and all(part.isfinite().all() for part in slope)):
            if scale == 0.0:
                raise InputError(
                    f"model.name = {name!r}: at its own parameters a record of standard normal numbers has "
                    "outputs or gradients that are not finite"
                )
            continue  # parameters that nobody trains to
        same = torch.equal(out, other) and all(map(torch.equal, slope, other_slope))
        if not same or not torch.allclose(out, alone, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise InputError(
                f"model.name = {name!r}: a record's outputs change with the other records of its batch, or from "
                "call to call; models here look at one record (model.group_norm = true replaces BatchNorm)"
            )


def _of_first(module: nn.Module, parameters: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs of record 0, and the gradients of their sum of squares."""
    with torch.enable_grad():
        given = functional_call(module, parameters, (batch,))
        used = [parameter for parameter in parameters.values() if parameter.requires_grad]
        slopes = torch.autograd.grad(given[0].square().sum(), used, allow_unused=True)
    return given[0].detach(), [torch.zeros(()) if slope is None else slope for slope in slopes]
