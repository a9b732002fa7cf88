"""Modules as people bring them, by their rows on docs/own-module.md: they run, or are refused."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fedpriv
from fedpriv.loss.presets import Transformer

OUTPUTS, WORDS, LONG, WIDE = 3, 11, 5, 6


class Case(NamedTuple):
    """A module's factory, and the shape of a record; `words` for records of whole numbers."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (WIDE,)
    words: bool = False


class Then(nn.Module):
    """`layer`, of whose outputs `pick` makes one value a feature, and a Linear layer to the classes."""

    def __init__(self, layer: nn.Module, width: int, pick: Callable[[Any], Tensor] = lambda given: given) -> None:
        super().__init__()
        self.layer, self.pick, self.head = layer, pick, nn.Linear(width, OUTPUTS)

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.pick(self.layer(values)).flatten(1))
        return outputs


class Words(nn.Module):
    """Whole numbers first, whatever type they come in."""

    def __init__(self, rest: nn.Module) -> None:
        super().__init__()
        self.rest = rest

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = self.rest(values.long())
        return outputs


class Tied(nn.Module):
    """One table of words, on the way in and on the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(OUTPUTS, 4), nn.Linear(4, OUTPUTS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.tanh(self.words(values.long() % OUTPUTS)).mean(1))
        return outputs


class Positions(nn.Module):
    """Sines by position, as a buffer, and a mask that looks back only."""

    table: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.sin(torch.arange(LONG * WIDE, dtype=torch.float32)).view(LONG, WIDE))
        self.register_buffer("mask", torch.full((LONG, LONG), -torch.inf).triu(1), persistent=False)
        self.look = nn.MultiheadAttention(WIDE, 2, batch_first=True)
        self.head = nn.Linear(WIDE, OUTPUTS)

    def forward(self, values: Tensor) -> Tensor:
        placed = values + self.table
        seen, _ = self.look(placed, placed, placed, attn_mask=self.mask, need_weights=False)
        outputs: Tensor = self.head(seen.mean(1))
        return outputs


class Steps(nn.Module):
    """A cell, step by step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, values: Tensor) -> Tensor:
        state: Any = None
        for step in range(values.shape[1]):
            state = self.cell(values[:, step], state)
        return state[0] if isinstance(state, tuple) else state


class Twice(nn.Module):
    """One layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, OUTPUTS)

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.tanh(self.layer(torch.tanh(self.layer(values)))))
        return outputs


class Until(nn.Module):
    """As many steps as the record says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE)

    def forward(self, values: Tensor) -> Tensor:
        for _ in range(1 + int(values.abs().max().nan_to_num(0.0, 0.0).clamp(max=3))):
            values = torch.tanh(self.layer(values))
        return values


class Counting(nn.Module):
    """Adds to a buffer what it sees, and to every output what is in it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.head = nn.Linear(WIDE, OUTPUTS)

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = self.head(values) * (1.0 + self.seen)
        self.seen += values.detach().abs().sum()
        return outputs


class Packing(nn.Module):
    """Packs its sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(WIDE, 4, batch_first=True), nn.Linear(4, OUTPUTS)

    def forward(self, values: Tensor) -> Tensor:
        lengths = torch.full((len(values),), values.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(values, lengths, batch_first=True)
        outputs: Tensor = self.head(self.rnn(packed)[1][-1])
        return outputs


def backbone() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, OUTPUTS))


def with_lora(module: nn.Module) -> nn.Module:
    """With a B that is not zero, as it is after a round."""
    found = fedpriv.lora(module, rank=2, alpha=3.0)
    for name, values in found.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(values)
    return found


def first(given: Any) -> Tensor:
    """The outputs of a recurrent layer or of attention, less its state."""
    outputs: Tensor = given[0]
    return outputs


def reused(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(WIDE, OUTPUTS))


IMAGE, SEQUENCE, TEXT = (2, 6, 6), (LONG, WIDE), (LONG,)

RUNS: dict[str, Case] = {
    "Linear, activations, branches": Case(lambda: Then(nn.Sequential(nn.Linear(WIDE, 8), nn.GELU()), 8)),
    "a layer that is used twice": Case(Twice),
    "Conv1d, Conv2d, Conv3d, also grouped, dilated, transposed": Case(
        lambda: Then(
            nn.Sequential(nn.Conv2d(2, 4, 3, groups=2, dilation=2), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2)), 18
        ),
        IMAGE,
    ),
    "pooling, Flatten, Unflatten, Upsample": Case(
        lambda: Then(nn.Sequential(nn.Conv2d(2, 3, 3), nn.AvgPool2d(2), nn.Upsample(scale_factor=2)), 48), IMAGE
    ),
    "LayerNorm, RMSNorm": Case(lambda: Then(nn.Sequential(nn.LayerNorm(WIDE), nn.RMSNorm(WIDE)), WIDE)),
    "GroupNorm, InstanceNorm": Case(
        lambda: Then(nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)), 64),
        IMAGE,
    ),
    "BatchNorm in evaluation mode, as freeze leaves it": Case(lambda: fedpriv.freeze(backbone(), except_=("3",))),
    "Dropout with p = 0": Case(lambda: Then(nn.Sequential(nn.Linear(WIDE, 8), nn.Dropout(0.0), nn.Tanh()), 8)),
    "MultiheadAttention": Case(Positions, SEQUENCE),
    "TransformerEncoderLayer, TransformerEncoder with dropout = 0": Case(
        lambda: Then(nn.TransformerEncoderLayer(WIDE, 2, 8, dropout=0.0, batch_first=True), LONG * WIDE), SEQUENCE
    ),
    "requires_grad = False": Case(
        lambda: fedpriv.freeze(
            Then(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh()), 8), except_=("head", "layer.0.bias")
        )
    ),
    "buffers that stay as they are": Case(Positions, SEQUENCE),
    "LoRA on Linear layers": Case(lambda: with_lora(Then(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh()), 8))),
    "LoRA in a TransformerEncoderLayer": Case(
        lambda: with_lora(
            Then(nn.TransformerEncoderLayer(WIDE, 2, 8, dropout=0.0, batch_first=True).eval(), LONG * WIDE)
        ),
        SEQUENCE,
    ),
    "tied weights": Case(Tied, TEXT, words=True),
    "weight_norm, parametrizations": Case(
        lambda: Then(nn.utils.parametrizations.weight_norm(nn.Linear(WIDE, 4)), 4)
    ),
    "GRU, also several layers, both directions": Case(
        lambda: Then(nn.GRU(WIDE, 4, num_layers=2, bidirectional=True, batch_first=True), LONG * 8, first),
        SEQUENCE,
    ),
    "RNN, with tanh or relu": Case(
        lambda: Then(nn.RNN(WIDE, 4, nonlinearity="relu", batch_first=True), LONG * 4, first), SEQUENCE
    ),
    "LSTM, also with proj_size": Case(
        lambda: Then(nn.LSTM(WIDE, 4, num_layers=2, proj_size=2, batch_first=True), LONG * 2, first), SEQUENCE
    ),
    "GRUCell": Case(lambda: Then(Steps(nn.GRUCell(WIDE, 4)), 4), SEQUENCE),
    "RNNCell": Case(lambda: Then(Steps(nn.RNNCell(WIDE, 4)), 4), SEQUENCE),
    "LSTMCell": Case(lambda: Then(Steps(nn.LSTMCell(WIDE, 4)), 4), SEQUENCE),
    "Embedding with sparse = True": Case(
        lambda: Words(Then(nn.Embedding(WORDS, 4, padding_idx=0, sparse=True), LONG * 4)), TEXT, words=True
    ),
    "EmbeddingBag of (records, words)": Case(
        lambda: Words(Then(nn.EmbeddingBag(WORDS, 4, mode="mean", padding_idx=1), 4)), TEXT, words=True
    ),
    "a module that vmap cannot run": Case(lambda: Then(Until(), WIDE)),
    "Embedding, with padding_idx": Case(
        lambda: Words(Then(nn.Embedding(WORDS, 4, padding_idx=0), LONG * 4)), TEXT, words=True
    ),
}
"""By row of the page's first table."""

BESIDE: dict[str, Case] = {
    "MLP": Case(lambda: nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, OUTPUTS))),
    "CNN": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(3, OUTPUTS)
        ),
        IMAGE,
    ),
    "Conv1d": Case(
        lambda: Then(nn.Sequential(nn.Conv1d(LONG, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 2, 2)), 10), SEQUENCE
    ),
    "a layer at two places of a Sequential": Case(lambda: reused(nn.Linear(WIDE, WIDE))),
    "LSTM of two layers": Case(
        lambda: Then(nn.LSTM(WIDE, 4, num_layers=2, batch_first=True), LONG * 4, first), SEQUENCE
    ),
    "transformer of words": Case(lambda: Words(Transformer(LONG, OUTPUTS, WORDS, width=4, heads=2)), TEXT, True),
}
"""Modules that are no rows of their own."""

REVIEWED = (
    "MLP", "CNN", "Conv1d, Conv2d, Conv3d, also grouped, dilated, transposed", "GroupNorm, InstanceNorm", "Conv1d",
    "a layer that is used twice", "a layer at two places of a Sequential", "Embedding, with padding_idx",
    "LSTM of two layers", "tied weights", "MultiheadAttention",
)  # fmt: skip
"""The eleven that a reviewer tried first."""

REFUSED: dict[str, Case] = {
    "BatchNorm, SyncBatchNorm": Case(backbone),
    "InstanceNorm with track_running_stats": Case(
        lambda: Then(nn.InstanceNorm2d(2, track_running_stats=True), 72), IMAGE
    ),
    "Dropout with p above 0": Case(lambda: Then(nn.Dropout(0.5), WIDE)),
    "RReLU": Case(lambda: Then(nn.RReLU(), WIDE)),
    "FractionalMaxPool": Case(lambda: Then(nn.FractionalMaxPool2d(2, output_size=2), 8), IMAGE),
    "Embedding with max_norm": Case(
        lambda: Words(Then(nn.Embedding(WORDS, 4, max_norm=1.0), LONG * 4)), TEXT, words=True
    ),
    "Embedding with scale_grad_by_freq": Case(
        lambda: Words(Then(nn.Embedding(WORDS, 4, scale_grad_by_freq=True), LONG * 4)), TEXT, words=True
    ),
    "a buffer that the forward pass changes": Case(Counting),
    "spectral_norm": Case(lambda: Then(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDE, 4)), 4)),
    "packed sequences": Case(Packing, SEQUENCE),
    "LazyLinear and others before their first record": Case(lambda: Then(nn.LazyLinear(4), 4)),
}
"""By row of the page's second table."""
