"""Layers that vmap cannot run, in operations that it can: torch's own numbers, from the same parameters."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpriv.loss.unrolled import make_vmap_module

RECURRENT: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (kind, {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": first})
    for kind, layers, both, bias, first in product(
        (nn.GRU, nn.RNN, nn.LSTM), (1, 2), (False, True), (False, True), (False, True)
    )
] + [(nn.LSTM, {"proj_size": 2, "num_layers": 2, "bidirectional": True}), (nn.RNN, {"nonlinearity": "relu"})]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one.shape == other.shape and torch.allclose(one, other, atol=1e-12))


@pytest.mark.parametrize(("kind", "settings"), RECURRENT)
def test_a_recurrent_layer_is_torchs(kind: type[nn.RNNBase], settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = kind(3, 4, **settings).double()
    copied = make_vmap_module(layer)
    assert copied is not layer
    assert type(layer) is kind
    assert [id(each) for each in copied.parameters()] == [id(each) for each in layer.parameters()]
    values = torch.randn(5, 2, 3, dtype=torch.float64)
    assert same(copied(values), layer(values))
    assert same(copied(values[:, 0]), layer(values[:, 0]))  # one record without an axis for it
    start = layer(values)[1]
    assert same(copied(values, start), layer(values, start))
    moved = {name: torch.randn_like(each) for name, each in layer.named_parameters()}
    assert same(functional_call(copied, moved, (values,)), functional_call(layer, moved, (values,)))


@pytest.mark.parametrize("make", [nn.GRUCell, nn.RNNCell, nn.LSTMCell])
def test_a_cell_is_torchs(make: Callable[..., nn.RNNCellBase]) -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        cell = make(3, 4, bias=bias).double()
        values = torch.randn(2, 3, dtype=torch.float64)
        state = cell(values)
        assert same(make_vmap_module(cell)(values), state)
        assert same(make_vmap_module(cell)(values, state), cell(values, state))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_a_bag_is_torchs(mode: Any, padding: int | None) -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(7, 3, mode=mode, padding_idx=padding).double()
    words = torch.tensor([[0, 2, 2, 6], [2, 2, 2, 2], [1, 1, 3, 2]])
    weights: list[Tensor | None] = [None, torch.randn(3, 4, dtype=torch.float64)] if mode == "sum" else [None]
    for each in weights:
        assert same(make_vmap_module(bag)(words, None, each), bag(words, None, each))
