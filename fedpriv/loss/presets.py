"""Networks of the shipped scenarios: a small transformer over tokens, and LoRA on the CNN.

`lora` makes Linear layers with weight W + scale · B A, of which A and B are trained and W is constant.  The scale
is α / r for the rank r, or 1 without α.  At the start B is 0 and A random.  Source: Hu et al. 2022, "LoRA:
Low-rank adaptation of large language models", section 4.1.
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
    """Linear layer x (W + scale · B A)ᵀ + b with W and b frozen, made by `lora`.

    Guarantee: only `lora_a` and `lora_b` are trainable, so W and b are in no query, no norm and no release.  If
    the argument `train` of `lora` names b, by any of its names, b is trainable, too.
    """

    begin_at_zero = frozenset({"lora_b"})
    """Parameters that are zero in x_1 if it is drawn, for any seed."""
    lora_a: nn.Parameter
    """A, (rank, in)."""
    lora_b: nn.Parameter
    """B, (out, rank)."""
    scale: float
    """Factor of B A, α / rank, or 1 without α."""

    def forward(self, values: Tensor) -> Tensor:
        low_rank = functional.linear(functional.linear(values, self.lora_a), self.lora_b)
        return super().forward(values) + self.scale * low_rank

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
    """Return a copy whose Linear layers train a product of two small matrices.

    A layer x Wᵀ + b becomes x (W + scale · B A)ᵀ + b (`LoraLinear`), with A (rank, in) random and B (out, rank)
    zero.  Layers of subclasses of nn.Linear get no product, nor does a layer NAME if `train` names NAME.weight, by
    any of its names, or a module that holds it.  Other parameters are frozen, unless `train` names them.  The
    state_dict has the module's names, and NAME.lora_a and NAME.lora_b for a layer NAME with a product.

    Args:
        module: Module to copy, which is not changed.
        rank: Rank r of the product.
        alpha: α of the factor alpha / rank of the product.  By default the factor is 1.
        layers: Names of Linear layers as `named_modules` returns them, or of modules, for all of their Linear
            layers.  By default all Linear layers.
        train: Names of layers and parameters that are trained themselves, such as those of a new head.
        seed: Seed of A, whose entries are uniform in ±1/√in.

    Raises:
        InputError: The rank is below 1, a name in `layers` has no Linear layer, a name in `train` has no
            parameters, or no Linear layer would train a product.
    """
    if rank < 1:
        raise InputError(f"lora: rank = {rank}: expected a whole number of 1 or more")
    copied = copy.deepcopy(module).requires_grad_(False)
    linear = {name: layer for name, layer in copied.named_modules() if type(layer) is nn.Linear}
    linear_names = ", ".join(linear) or "none"
    for layer_name in layers or ():
        if not any(is_inside(name, layer_name) for name in linear):
            raise InputError(
                f"lora: layers = {layer_name!r} names no Linear layer of the module; it has {linear_names}"
            )
    names = [name for name, _ in copied.named_parameters(remove_duplicate=False)]
    for layer_name in train:
        if not any(is_inside(name, layer_name) for name in names):
            raise InputError(f"lora: train = {layer_name!r} names no parameters of the module")
    trained_names = {name for name in names if any(is_inside(name, trained_name) for trained_name in train)}
    # Layers that learn a product.
    lora_layers = {
        name: layer
        for name, layer in linear.items()
        if (layers is None or any(is_inside(name, layer_name) for layer_name in layers))
        and all(layer.weight is not copied.get_parameter(trained_name) for trained_name in trained_names)
    }
    if not lora_layers:
        raise InputError(
            "lora: the module has no layer that could train a product, which has to be of type nn.Linear itself; "
            "name another one in layers, or leave its weight out of train"
        )
    # B is zero, so that the module is the same function at first.
    generator = public_generator(seed, "LoRA")
    for layer in lora_layers.values():
        layer.__class__ = LoraLinear
        assert isinstance(layer, LoraLinear)
        bound = 1.0 / math.sqrt(layer.in_features)
        initial = torch.from_numpy(generator.uniform(-bound, bound, (rank, layer.in_features)))
        layer.lora_a = nn.Parameter(initial.to(layer.weight))
        layer.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        layer.scale = 1.0 if alpha is None else alpha / rank
    for parent in copied.modules():  # off: torch's fast paths use a layer's weight without its forward
        if isinstance(parent, nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0
        elif isinstance(parent, nn.TransformerEncoder):
            parent.use_nested_tensor = False
    # The module's other parameters were frozen when it was copied.
    for name in trained_names:
        copied.get_parameter(name).requires_grad_(True)
    return copied


def merged(module: nn.Module) -> nn.Module:
    """Copy a module, with plain Linear layers of weight W + scale · B A for the layers of `lora`.

    Outputs are the module's up to rounding.  Parameters have the names that they had before `lora`.

    Args:
        module: Module that `lora` returned, which is not changed.  Its layers with a product must not share their
            weight with other layers.
    """
    copied = copy.deepcopy(module)
    for layer in copied.modules():
        if isinstance(layer, LoraLinear):
            with torch.no_grad():
                layer.weight += layer.scale * layer.lora_b @ layer.lora_a
            del layer.lora_a, layer.lora_b, layer.scale
            layer.__class__ = nn.Linear  # type: ignore[assignment]
    return copied


class Transformer(nn.Module):
    """Classifier of token sequences, (B, length) to (B, outputs).

    The network has embeddings with sinusoidal positions, `blocks` layers of attention, and a linear layer on the
    mean over positions.
    """

    places: Tensor
    """Encoding of positions, (length, width).

    Columns 2i and 2i+1 of position p are the sine and cosine of p / 100^(2i/width), divided by √width.
    """

    def __init__(
        self, length: int, outputs: int, words: int, width: int = 32, heads: int = 4, blocks: int = 1
    ) -> None:
        """Make the network.

        Args:
            length: Number of tokens of a sequence.
            outputs: Number of outputs.
            words: Number of different tokens, 0 … `words` - 1.
            width: Width of an embedding, an even number and a multiple of `heads`.
            heads: Heads of attention in a layer.
            blocks: Number of layers of attention.
        """
        super().__init__()
        self.words, self.last = nn.Embedding(words, width), nn.Linear(width, outputs)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        # Sines and cosines with periods from 2π to below 200π positions, a vector of norm 1/√2 for each position.
        angles = torch.arange(length).unsqueeze(1) / 100.0 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("places", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1) / width**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.blocks(self.words(tokens) + self.places).mean(1))
        return outputs


def adapted(_pixels: int, classes: int, train: Literal["lora", "head", "all"], rank: int = 8) -> nn.Module:
    """Make the CNN of the table of models, with a part of it trained.

    Args:
        _pixels: Number of features, which is not used, since the CNN has a fixed one.
        classes: Number of classes.
        train: Trained part: LoRA of the first linear layer with the last layer itself, or the last layer, or all.
        rank: Rank of LoRA.
    """
    network = convolutional_net(classes)
    head = str(len(network) - 1)
    if train == "all":
        return network
    return freeze(network, except_=(head,)) if train == "head" else lora(network, rank, train=(head,))
