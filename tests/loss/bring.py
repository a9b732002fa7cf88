"""Modules as people bring them, by their rows on docs/own-module.md: they run, or are refused."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fedpriv
from fedpriv.loss.presets import Transformer
from tests.loss.builders import Net

OUTPUTS, WORDS, LONG, WIDE = 3, 11, 5, 6


class Case(NamedTuple):
    """A module's factory, and the shape of a record; `words` for records of whole numbers."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (WIDE,)
    words: bool = False


def classify(layer: nn.Module, width: int, choose: Callable[[Any], Tensor] = lambda outputs: outputs) -> Net:
    """`layer`, of whose outputs `choose` makes one value a feature, and a Linear layer to the classes."""
    head = nn.Linear(width, OUTPUTS)
    return Net(lambda net, values: net.head(choose(net.layer(values)).flatten(1)), layer=layer, head=head)


def of_words(rest: nn.Module) -> nn.Module:
    """Whole numbers first, whatever type they come in."""
    return Net(lambda net, values: net.rest(values.long()), rest=rest)


def tied() -> nn.Module:
    """One table of words, on the way in and on the way out."""
    net = Net(
        lambda net, values: net.head(torch.tanh(net.words(values.long() % OUTPUTS)).mean(1)),
        words=nn.Embedding(OUTPUTS, 4), head=nn.Linear(4, OUTPUTS, bias=False),
    )  # fmt: skip
    net.head.weight = net.words.weight  # type: ignore[union-attr]
    return net


def positions() -> nn.Module:
    """Sines by position, as a buffer, and a mask that looks back only."""

    def call(net: Any, values: Tensor) -> Any:
        placed = values + net.table
        mixed, _ = net.attention(placed, placed, placed, attn_mask=net.mask, need_weights=False)
        return net.head(mixed.mean(1))

    net = Net(call, attention=nn.MultiheadAttention(WIDE, 2, batch_first=True), head=nn.Linear(WIDE, OUTPUTS))
    net.register_buffer("table", torch.sin(torch.arange(LONG * WIDE, dtype=torch.float32)).view(LONG, WIDE))
    net.register_buffer("mask", torch.full((LONG, LONG), -torch.inf).triu(1), persistent=False)
    return net


def steps(net: Any, values: Tensor) -> Tensor:
    """A cell's state, step by step."""
    state: Any = None
    for step in range(values.shape[1]):
        state = net.cell(values[:, step], state)
    return first(state) if isinstance(state, tuple) else state


def twice(net: Any, values: Tensor) -> Any:
    """One layer that is used twice."""
    return net.head(torch.tanh(net.layer(torch.tanh(net.layer(values)))))


def until(net: Any, values: Tensor) -> Any:
    """As many steps as the record says."""
    for _ in range(1 + int(values.abs().max().nan_to_num(0.0, 0.0).clamp(max=3))):
        values = torch.tanh(net.layer(values))
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


def packing(net: Any, values: Tensor) -> Any:
    """Packs its sequences."""
    lengths = torch.full((len(values),), values.shape[1])
    packed = nn.utils.rnn.pack_padded_sequence(values, lengths, batch_first=True)
    return net.head(net.rnn(packed)[1][-1])


def hooked() -> nn.Module:
    network = nn.Sequential(nn.Linear(WIDE, 4), nn.Tanh(), nn.Linear(4, OUTPUTS))
    network[2].register_full_backward_hook(lambda layer, inputs, outputs: (3.0 * inputs[0],))
    return network


def backbone() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, OUTPUTS))


def with_lora(module: nn.Module) -> nn.Module:
    """With a B that is not zero, as it is after a round."""
    result = fedpriv.lora(module, rank=2, alpha=3.0)
    for name, values in result.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(values)
    return result


def first(outputs: tuple[Any, ...]) -> Any:
    """The outputs of a recurrent layer or of attention, less its state."""
    return outputs[0]


def encoder() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDE, 2, 8, dropout=0.0, batch_first=True)


def reused(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(WIDE, OUTPUTS))


IMAGE, SEQUENCE, TEXT = (2, 6, 6), (LONG, WIDE), (LONG,)

RUNS: dict[str, Case] = {
    "Linear, activations, branches": Case(lambda: classify(nn.Sequential(nn.Linear(WIDE, 8), nn.GELU()), 8)),
    "a layer that is used twice": Case(
        lambda: Net(twice, layer=nn.Linear(WIDE, WIDE), head=nn.Linear(WIDE, OUTPUTS))),
    "Conv1d, Conv2d, Conv3d, also grouped, dilated, transposed": Case(lambda: classify(
        nn.Sequential(nn.Conv2d(2, 4, 3, groups=2, dilation=2), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2)), 18
    ), IMAGE),
    "pooling, Flatten, Unflatten, Upsample": Case(
        lambda: classify(nn.Sequential(nn.Conv2d(2, 3, 3), nn.AvgPool2d(2), nn.Upsample(None, 2)), 48), IMAGE),
    "LayerNorm, RMSNorm": Case(lambda: classify(nn.Sequential(nn.LayerNorm(WIDE), nn.RMSNorm(WIDE)), WIDE)),
    "GroupNorm, InstanceNorm": Case(lambda: classify(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)), 64
    ), IMAGE),
    "BatchNorm in evaluation mode, as freeze leaves it": Case(lambda: fedpriv.freeze(backbone(), except_=("3",))),
    "Dropout with p = 0": Case(lambda: classify(nn.Sequential(nn.Linear(WIDE, 8), nn.Dropout(0.0), nn.Tanh()), 8)),
    "MultiheadAttention": Case(positions, SEQUENCE),
    "TransformerEncoderLayer, TransformerEncoder with dropout = 0": Case(
        lambda: classify(encoder(), LONG * WIDE), SEQUENCE),
    "requires_grad = False": Case(lambda: fedpriv.freeze(
        classify(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh()), 8), except_=("head", "layer.0.bias"))),
    "buffers that stay as they are": Case(positions, SEQUENCE),
    "LoRA on Linear layers": Case(lambda: with_lora(classify(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh()), 8))),
    "LoRA in a TransformerEncoderLayer": Case(
        lambda: with_lora(classify(encoder().eval(), LONG * WIDE)), SEQUENCE),
    "tied weights": Case(tied, TEXT, True),
    "weight_norm, parametrizations": Case(
        lambda: classify(nn.utils.parametrizations.weight_norm(nn.Linear(WIDE, 4)), 4)),
    "GRU, also several layers, both directions": Case(
        lambda: classify(nn.GRU(WIDE, 4, 2, bidirectional=True, batch_first=True), LONG * 8, first), SEQUENCE),
    "RNN, with tanh or relu": Case(
        lambda: classify(nn.RNN(WIDE, 4, nonlinearity="relu", batch_first=True), LONG * 4, first), SEQUENCE),
    "LSTM, also with proj_size": Case(
        lambda: classify(nn.LSTM(WIDE, 4, 2, proj_size=2, batch_first=True), LONG * 2, first), SEQUENCE),
    "GRUCell": Case(lambda: classify(Net(steps, cell=nn.GRUCell(WIDE, 4)), 4), SEQUENCE),
    "RNNCell": Case(lambda: classify(Net(steps, cell=nn.RNNCell(WIDE, 4)), 4), SEQUENCE),
    "LSTMCell": Case(lambda: classify(Net(steps, cell=nn.LSTMCell(WIDE, 4)), 4), SEQUENCE),
    "Embedding with sparse = True": Case(
        lambda: of_words(classify(nn.Embedding(WORDS, 4, padding_idx=0, sparse=True), LONG * 4)), TEXT, True),
    "EmbeddingBag of (records, words)": Case(
        lambda: of_words(classify(nn.EmbeddingBag(WORDS, 4, mode="mean", padding_idx=1), 4)), TEXT, True),
    "a module that vmap cannot run": Case(lambda: classify(Net(until, layer=nn.Linear(WIDE, WIDE)), WIDE)),
    "Embedding, with padding_idx": Case(
        lambda: of_words(classify(nn.Embedding(WORDS, 4, padding_idx=0), LONG * 4)), TEXT, True),
}  # fmt: skip
"""By row of the page's first table."""

BESIDE: dict[str, Case] = {
    "MLP": Case(lambda: nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, OUTPUTS))),
    "CNN": Case(lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(3, OUTPUTS)
    ), IMAGE),
    "Conv1d": Case(
        lambda: classify(nn.Sequential(nn.Conv1d(LONG, 4, 3, 1, 1), nn.ReLU(), nn.Conv1d(4, 2, 2)), 10), SEQUENCE),
    "a layer at two places of a Sequential": Case(lambda: reused(nn.Linear(WIDE, WIDE))),
    "LSTM of two layers": Case(lambda: classify(nn.LSTM(WIDE, 4, 2, batch_first=True), LONG * 4, first), SEQUENCE),
    "transformer of words": Case(
        lambda: of_words(Transformer(LONG, OUTPUTS, WORDS, width=4, heads=2)), TEXT, True),
}  # fmt: skip
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
        lambda: classify(nn.InstanceNorm2d(2, track_running_stats=True), 72), IMAGE
    ),
    "Dropout with p above 0": Case(lambda: classify(nn.Dropout(0.5), WIDE)),
    "RReLU": Case(lambda: classify(nn.RReLU(), WIDE)),
    "FractionalMaxPool": Case(lambda: classify(nn.FractionalMaxPool2d(2, output_size=2), 8), IMAGE),
    "Embedding with max_norm": Case(
        lambda: of_words(classify(nn.Embedding(WORDS, 4, max_norm=1.0), LONG * 4)), TEXT, True
    ),
    "Embedding with scale_grad_by_freq": Case(
        lambda: of_words(classify(nn.Embedding(WORDS, 4, scale_grad_by_freq=True), LONG * 4)), TEXT, True
    ),
    "a buffer that the forward pass changes": Case(Counting),
    "spectral_norm": Case(lambda: classify(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDE, 4)), 4)),
    "packed sequences": Case(
        lambda: Net(packing, rnn=nn.GRU(WIDE, 4, batch_first=True), head=nn.Linear(4, OUTPUTS)), SEQUENCE
    ),
    "LazyLinear and others before their first record": Case(lambda: classify(nn.LazyLinear(4), 4)),
    "a layer with a backward hook": Case(hooked),
}  # fmt: skip
"""By row of the page's second table."""
