"""Networks of the shipped scenarios beside those by name: a small transformer over tokens, and LoRA on the CNN.

A scenario has them by import path, as it has anybody's own.

LoRA: Linear layers whose weight is a constant W plus (α / r) B A, of which A and B are trained.

Source: Hu et al. 2022, "LoRA: Low-rank adaptation of large language models", section 4.1: B = 0 at the start, and
A is drawn.
"""

import copy
import math
from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.core.errors import InputError
from fedpriv.core.random import public_generator
from fedpriv.loss.frozen import freeze, is_inside
from fedpriv.loss.models import convolutional_net


class LoraLinear(nn.Linear):
    """x (W + scale · B A)ᵀ + b, with W and b not trained; made by `lora`.

    Guarantee: only `lora_a` and `lora_b` are parameters to train: W and b are in no query, no norm and no release.
    """

    begin_at_zero = frozenset({"lora_b"})
    """Parameters that x_1 has zeros for, whatever its seed."""
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def forward(self, values: Tensor) -> Tensor:
        low = functional.linear(functional.linear(values, self.lora_a), self.lora_b)
        return super().forward(values) + self.scale * low

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={len(self.lora_a)}, scale={self.scale}"


def lora(
    module: nn.Module,
    rank: int = 8,
    alpha: float | None = None,
    layers: Collection[str] | None = None,
    *,
    train: Collection[str] = (),
    seed: int = 0,
) -> nn.Module:
    """Return a copy in which Linear layers learn a product of two small matrices, and nothing else is trained.

    Its state_dict has the names of the module's own, and NAME.lora_a (rank, in) and NAME.lora_b (out, rank).
    `merged` makes plain Linear layers of them again.

    Args:
        module: it is not changed.
        rank: of the product, r.
        alpha: the product is added with the factor alpha / rank; by default 1.
        layers: names of Linear layers as `named_modules` gives them, or of modules all of whose Linear layers are
            meant; by default every one.
        train: names of layers and parameters that are trained as they are, such as a new head.
        seed: A is drawn from it, uniform in ±1/√in.

    Raises:
        InputError: a rank below 1, or a name without a Linear layer.
    """
    if rank < 1:
        raise InputError(f"lora: rank = {rank}: expected a whole number of 1 or more")
    copied = copy.deepcopy(module).requires_grad_(False)
    linear = {name: layer for name, layer in copied.named_modules() if type(layer) is nn.Linear}
    known = ", ".join(linear) or "none"
    for asked in layers or ():
        if not any(is_inside(name, asked) for name in linear):
            raise InputError(f"lora: layers = {asked!r} names no Linear layer of the module; it has {known}")
    names = [name for name, _ in copied.named_parameters(remove_duplicate=False)]
    for asked in train:
        if not any(is_inside(name, asked) for name in names):
            raise InputError(f"lora: train = {asked!r} names no parameters of the module")
    kept = {
        name
        for name, _ in copied.named_parameters(remove_duplicate=False)
        if any(is_inside(name, each) for each in train)
    }
    chosen = {
        name: layer
        for name, layer in linear.items()
        if (layers is None or any(is_inside(name, asked) for asked in layers)) and f"{name}.weight" not in kept
    }
    if not chosen:
        raise InputError(
            "lora: the module has no Linear layer that could learn a product; nn.Linear itself is one"
        )
    generator = public_generator(seed, "LoRA")
    for layer in chosen.values():
        layer.__class__ = LoraLinear
        assert isinstance(layer, LoraLinear)
        bound = 1.0 / math.sqrt(layer.in_features)
        drawn = torch.from_numpy(generator.uniform(-bound, bound, (rank, layer.in_features)))
        layer.lora_a = nn.Parameter(drawn.to(layer.weight))
        layer.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        layer.scale = 1.0 if alpha is None else alpha / rank
    for above in copied.modules():  # torch's fast paths take a layer's weight, and not what it does
        if isinstance(above, nn.TransformerEncoderLayer):
            above.activation_relu_or_gelu = 0
        elif isinstance(above, nn.TransformerEncoder):
            above.use_nested_tensor = False
    for name in kept:
        copied.get_parameter(name).requires_grad_(True)
    return copied


def merged(module: nn.Module) -> nn.Module:
    """A copy with plain Linear layers in place of those of `lora`: W + scale · B A, and the names of before."""
    copied = copy.deepcopy(module)
    for layer in copied.modules():
        if isinstance(layer, LoraLinear):
            with torch.no_grad():
                layer.weight += layer.scale * layer.lora_b @ layer.lora_a
            del layer.lora_a, layer.lora_b, layer.scale
            layer.__class__ = nn.Linear  # type: ignore[assignment]
    return copied


class Transformer(nn.Module):
    """Words and their places, `blocks` layers of attention, and a linear layer on the mean over places."""

    places: Tensor

    def __init__(
        self, length: int, outputs: int, words: int, width: int = 32, heads: int = 4, blocks: int = 1
    ) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(words, width), nn.Linear(width, outputs)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        angles = torch.arange(length).unsqueeze(1) / 100.0 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("places", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1) / width**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.blocks(self.words(tokens) + self.places).mean(1))
        return outputs


def adapted(_pixels: int, classes: int, train: Literal["lora", "head", "all"], rank: int = 8) -> nn.Module:
    """The CNN by name: LoRA of its first linear layer and the last layer are trained, or that alone, or all."""
    network = convolutional_net(classes)
    head = str(len(network) - 1)
    if train == "all":
        return network
    return freeze(network, except_=(head,)) if train == "head" else lora(network, rank, train=(head,))
