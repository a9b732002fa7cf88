"""Networks of the shipped scenarios beside those by name: a small transformer over tokens, and LoRA on the CNN.

A scenario has them by import path, as it has anybody's own.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from fedpriv.loss.frozen import freeze
from fedpriv.loss.lora import lora
from fedpriv.loss.models import convolutional_net


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
        steps = torch.arange(0, width, 2) / width
        angles = torch.arange(length).unsqueeze(1) / 100.0**steps
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
    if train == "head":
        return freeze(network, except_=(head,))
    return lora(network, rank, train=(head,))
