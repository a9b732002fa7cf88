"""Layers that torch.func.vmap has no rule for, or a wrong one, in operations that it has: of the same parameters.

vmap raises in GRU, RNN and their cells (their gates are written into a tensor of one record), runs an LSTM and an
EmbeddingBag one record after another, and has no gradients of sparse tables.

torch's recurrent layers, step by step, from functions that functional knows.

torch runs a recurrent layer as one function, of which neither vmap nor a watcher of its parameters knows the
inside.  Each function here takes the arguments of torch's own and gives what that gives, but for rounding; the
part of a gate that its input decides is one product for all steps.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from fedpriv.core.errors import InputError

RecurrentState = tuple[Tensor, ...]
"""Hidden values, and for an LSTM its cells; each (records, width)."""
CellFunction = Callable[[Tensor, Tensor, RecurrentState], RecurrentState]
"""From what the input and the state say of the gates, (records, gates · width) each, and the state."""


def _lstm_step(seen: Tensor, told: Tensor, state: RecurrentState) -> RecurrentState:
    given, kept, new, shown = (seen + told).chunk(4, -1)
    cells = kept.sigmoid() * state[1] + given.sigmoid() * new.tanh()
    return shown.sigmoid() * cells.tanh(), cells


def _gru_step(seen: Tensor, told: Tensor, state: RecurrentState) -> RecurrentState:
    (reset, kept, new), (resets, keeps, news) = seen.chunk(3, -1), told.chunk(3, -1)
    share = (kept + keeps).sigmoid()
    candidate = (new + (reset + resets).sigmoid() * news).tanh()
    return (candidate + share * (state[0] - candidate),)


def _rnn_step(
    activation: Callable[[Tensor], Tensor], seen: Tensor, told: Tensor, _: RecurrentState
) -> RecurrentState:
    return (activation(seen + told),)


def _run_layer(
    cell: CellFunction,
    values: Tensor,
    state: RecurrentState | Tensor,
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """As torch.lstm, gru, rnn_tanh and rnn_relu: the outputs of all steps, then the last states, layers first."""
    states = state if isinstance(state, tuple | list) else (state,)
    if not states[0].is_floating_point():
        raise RuntimeError("a packed sequence, whose records have a number of steps each")
    steps = values.transpose(0, 1) if batch_first else values
    own = [weights[start : start + 2 + 2 * biases] for start in range(0, len(weights), 2 + 2 * biases)]
    last: list[RecurrentState] = []
    for layer in range(layers):
        ways = [
            _run_direction(
                cell, steps, tuple(part[len(last) + way] for part in states), own[len(last) + way], bool(way)
            )
            for way in range(1 + both_ways)
        ]
        steps = torch.cat([outputs for outputs, _ in ways], -1)
        if dropout and train and layer < layers - 1:
            steps = functional.dropout(steps, dropout)
        last += [final for _, final in ways]
    outputs = steps.transpose(0, 1) if batch_first else steps
    return outputs, *(torch.stack(parts) for parts in zip(*last, strict=True))


def _run_direction(
    cell: CellFunction,
    steps: Tensor,
    state: RecurrentState,
    own: Sequence[Tensor],
    backward: bool,
    projection: Tensor | None = None,
) -> tuple[Tensor, RecurrentState]:
    """The outputs of all steps, and the last state; `own` are weights, and biases where there are any."""
    (inward, onward), (shift, shifts) = own[:2], own[2:] or (None, None)
    seen = functional.linear(steps, inward, shift).unbind(0)
    outputs = []
    for one in reversed(seen) if backward else seen:
        state = cell(one, functional.linear(state[0], onward, shifts), state)
        if projection is not None:
            state = (functional.linear(state[0], projection), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backward else outputs), state


def _run_cell(
    cell: CellFunction,
    values: Tensor,
    state: Any,
    inward: Tensor,
    onward: Tensor,
    shift: Any = None,
    shifts: Any = None,
) -> Any:
    """As torch.lstm_cell, gru_cell, rnn_tanh_cell and rnn_relu_cell."""
    states = tuple(state) if isinstance(state, tuple | list) else (state,)
    after = cell(functional.linear(values, inward, shift), functional.linear(states[0], onward, shifts), states)
    return after if isinstance(state, tuple | list) else after[0]


_CELL_FUNCTIONS: dict[str, CellFunction] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": partial(_rnn_step, torch.tanh),
    "rnn_relu": partial(_rnn_step, torch.relu),
}
UNROLLED_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): partial(_run_layer, cell) for name, cell in _CELL_FUNCTIONS.items()},
    **{getattr(torch, f"{name}_cell"): partial(_run_cell, cell) for name, cell in _CELL_FUNCTIONS.items()},
}
"""By torch's own function."""


def make_vmap_module(module: nn.Module) -> nn.Module:
    """The module, or a copy of the same parameters and buffers in which such layers have another forward pass.

    The numbers are those of the module's own up to rounding.
    """
    if not any(type(layer) in _REPLACEMENTS or isinstance(layer, _ATTENTION) for layer in module.modules()):
        return module
    copied = copy.deepcopy(module, {id(values): values for values in (*module.parameters(), *module.buffers())})
    for layer in copied.modules():
        if type(layer) in _REPLACEMENTS:
            layer.__class__ = _REPLACEMENTS[type(layer)]
        elif isinstance(layer, _ATTENTION):
            layer.training = True  # torch's fast path is for evaluation, and has no rule
    return copied


def _find_step(layer: nn.RNNBase | nn.RNNCellBase) -> CellFunction:
    if isinstance(layer, nn.GRU | nn.GRUCell):
        return _gru_step
    return _lstm_step if isinstance(layer, nn.LSTM | nn.LSTMCell) else _CELL_FUNCTIONS[f"rnn_{layer.nonlinearity}"]


class _Unrolled(nn.RNNBase):
    """A recurrent layer, its steps one after another."""

    def forward(
        self, values: Tensor | PackedSequence, start: Tensor | RecurrentState | None = None
    ) -> tuple[Tensor, Tensor | RecurrentState]:
        if isinstance(values, PackedSequence):
            raise InputError("a packed sequence cannot be used; give the layer the padded one")
        alone = values.dim() == 2
        if alone:
            values = values.unsqueeze(0 if self.batch_first else 1)
        steps = values.transpose(0, 1) if self.batch_first else values
        several = 2 if isinstance(self, nn.LSTM) else 1
        given = None if start is None else start if isinstance(start, tuple) else (start,)
        last: list[RecurrentState] = []
        for layer in range(self.num_layers):
            outputs = []
            for reverse in (False, True)[: 1 + self.bidirectional]:
                if given is None:
                    widths = (self.proj_size or self.hidden_size, self.hidden_size)[:several]
                    state: RecurrentState = tuple(steps.new_zeros(steps.shape[1], width) for width in widths)
                else:
                    state = tuple(each[len(last)] for each in given)
                    state = tuple(each.unsqueeze(0) for each in state) if alone else state
                found, state = self._run_steps(steps, state, f"_l{layer}{'_reverse' if reverse else ''}", reverse)
                outputs.append(found)
                last.append(state)
            steps = torch.cat(outputs, -1)
        ends = tuple(torch.stack(each) for each in zip(*last, strict=True))
        result = steps.transpose(0, 1) if self.batch_first else steps
        if alone:
            result, ends = result.squeeze(0 if self.batch_first else 1), tuple(each.squeeze(1) for each in ends)
        return result, ends if several == 2 else ends[0]

    def _run_steps(
        self, steps: Tensor, state: RecurrentState, suffix: str, reverse: bool
    ) -> tuple[Tensor, RecurrentState]:
        names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ()))
        own = [getattr(self, f"{name}{suffix}") for name in names]
        projection = getattr(self, f"weight_hr{suffix}") if self.proj_size else None
        return _run_direction(_find_step(self), steps, state, own, reverse, projection)


class _UnrolledGRU(_Unrolled, nn.GRU): ...  # type: ignore[misc]


class _UnrolledRNN(_Unrolled, nn.RNN): ...  # type: ignore[misc]


class _UnrolledLSTM(_Unrolled, nn.LSTM): ...  # type: ignore[misc]


class _UnrolledCell(nn.RNNCellBase):
    """One step of a recurrent layer."""

    def forward(self, values: Tensor, start: Tensor | RecurrentState | None = None) -> Tensor | RecurrentState:
        several = 2 if isinstance(self, nn.LSTMCell) else 1
        if start is None:
            state: RecurrentState = (values.new_zeros(*values.shape[:-1], self.hidden_size),) * several
        else:
            state = start if isinstance(start, tuple) else (start,)
        inner = functional.linear(values, self.weight_ih, self.bias_ih)
        found = _find_step(self)(inner, functional.linear(state[0], self.weight_hh, self.bias_hh), state)
        return found if several == 2 else found[0]


class _GRUCell(_UnrolledCell, nn.GRUCell): ...  # type: ignore[misc]


class _RNNCell(_UnrolledCell, nn.RNNCell): ...  # type: ignore[misc]


class _LSTMCell(_UnrolledCell, nn.LSTMCell): ...  # type: ignore[misc]


class _DenseEmbedding(nn.Embedding):
    """A table of words whose gradient is not sparse."""

    def forward(self, words: Tensor) -> Tensor:
        return functional.embedding(words, self.weight, self.padding_idx)


class _GatherEmbeddingBag(nn.EmbeddingBag):
    """The rows of (B, words) looked up and added up."""

    def forward(
        self, words: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        if offsets is not None or words.dim() != 2:
            raise InputError("an EmbeddingBag with offsets cannot be used; give it (records, words)")
        rows = functional.embedding(words, self.weight, self.padding_idx)
        there = torch.ones_like(words, dtype=torch.bool) if self.padding_idx is None else words != self.padding_idx
        if self.mode == "max":
            largest = rows.masked_fill(~there.unsqueeze(-1), -torch.inf).max(1).values
            return largest.where(there.any(1, keepdim=True), 0.0)
        shares = there.to(rows.dtype) if per_sample_weights is None else per_sample_weights * there
        total = (rows * shares.unsqueeze(-1)).sum(1)
        return total / there.sum(1, keepdim=True).clamp(min=1) if self.mode == "mean" else total


_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
_REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.GRU: _UnrolledGRU,
    nn.RNN: _UnrolledRNN,
    nn.LSTM: _UnrolledLSTM,
    nn.GRUCell: _GRUCell,
    nn.RNNCell: _RNNCell,
    nn.LSTMCell: _LSTMCell,
    nn.Embedding: _DenseEmbedding,
    nn.EmbeddingBag: _GatherEmbeddingBag,
}
