"""Recurrent layers and embeddings in operations that torch.func.vmap can batch.

Under vmap, gradients of torch's recurrent layers, and of some embeddings, raise an error or are computed one
record after another.  `make_vmap_module` replaces the forward pass of such layers, and keeps their parameters.

torch runs a recurrent layer as one function, inside of which neither vmap nor a trace of parameters can look.
`UNROLLED_FUNCTIONS` has functions that compute the same step by step, with `functional.linear` for the products by
weights, and take the positional arguments of torch's functions.
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
"""Hidden values, and the cells for an LSTM."""
CellFunction = Callable[[Tensor, Tensor, RecurrentState], RecurrentState]
"""Next state from the input's part of the gates, the hidden values' part, and the state.

The parts are W_ih x + b_ih and W_hh h + b_hh, (..., gates · width) each, for inputs x and hidden values h.
"""


def _lstm_step(input_part: Tensor, state_part: Tensor, state: RecurrentState) -> RecurrentState:
    input_gate, forget_gate, candidate, output_gate = (input_part + state_part).chunk(4, -1)
    cells = forget_gate.sigmoid() * state[1] + input_gate.sigmoid() * candidate.tanh()
    return output_gate.sigmoid() * cells.tanh(), cells


def _gru_step(input_part: Tensor, state_part: Tensor, state: RecurrentState) -> RecurrentState:
    (input_reset, input_update, input_new), (state_reset, state_update, state_new) = (
        input_part.chunk(3, -1),
        state_part.chunk(3, -1),
    )
    update_gate = (input_update + state_update).sigmoid()
    candidate = (input_new + (input_reset + state_reset).sigmoid() * state_new).tanh()
    return (candidate + update_gate * (state[0] - candidate),)


def _rnn_step(
    activation: Callable[[Tensor], Tensor], input_part: Tensor, state_part: Tensor, _: RecurrentState
) -> RecurrentState:
    return (activation(input_part + state_part),)


def _run_layer(
    cell: CellFunction,
    values: Tensor,
    state: RecurrentState | Tensor,
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Run all layers and steps of torch.lstm, gru, rnn_tanh or rnn_relu.

    Args:
        cell: Function of one step, from the input's part of the gates, the state's part and the state.
        values: Inputs, (steps, records, features), or (records, steps, features) if `batch_first`.
        state: State before the first step, (layers · directions, records, width).  For an LSTM it is a pair of
            hidden values and cells.
        weights: W_ih and W_hh, then b_ih and b_hh if `biases`, then a projection if the hidden values of `state`
            have another width than its cells, for each direction of each layer in turn.
        biases: Whether there are biases.
        layers: Number of layers, of which each gets the outputs of the one before.
        dropout: Probability with which an output is dropped between two layers in training.
        train: Whether the layer is in training mode.
        bidirectional: Whether each layer also runs from the last step to the first.
        batch_first: Whether records come before steps.

    Returns:
        The last layer's outputs at all steps, in the layout of `values`, with the hidden values of all directions
        side by side in place of features.  Then the hidden values after the step that is run last (and its cells
        for an LSTM), in the layout of `state`.

    Raises:
        RuntimeError: The arguments are those for a packed sequence.
    """
    states = state if isinstance(state, tuple | list) else (state,)
    # For a packed sequence torch passes numbers of records, which are integers, in the place of the state.
    if not states[0].is_floating_point():
        raise RuntimeError("a packed sequence, whose records have a number of steps each")
    steps = values.transpose(0, 1) if batch_first else values
    # Only a projection makes hidden values narrower than cells.
    count = 2 + 2 * biases + (states[0].shape[-1] != states[-1].shape[-1])
    layer_weights = [weights[start : start + count] for start in range(0, len(weights), count)]
    last_states: list[RecurrentState] = []  # of the runs so far, so that its length is the next run's index
    for layer in range(layers):
        direction_runs = [
            _run_direction(
                cell,
                steps,
                tuple(part[len(last_states) + direction] for part in states),
                layer_weights[len(last_states) + direction][: 2 + 2 * biases],
                bool(direction),
                *layer_weights[len(last_states) + direction][2 + 2 * biases :],
            )
            for direction in range(1 + bidirectional)
        ]
        steps = torch.cat([outputs for outputs, _ in direction_runs], -1)
        if dropout and train and layer < layers - 1:
            steps = functional.dropout(steps, dropout)
        last_states += [last_state for _, last_state in direction_runs]
    return (
        steps.transpose(0, 1) if batch_first else steps,
        *(torch.stack(parts) for parts in zip(*last_states, strict=True)),
    )


def _run_direction(
    cell: CellFunction,
    steps: Tensor,
    state: RecurrentState,
    parameters: Sequence[Tensor],
    backward: bool,
    projection: Tensor | None = None,
) -> tuple[Tensor, RecurrentState]:
    """Run all steps of one layer in one direction, and return their outputs and the last state.

    Args:
        cell: Function of one step, from the input's part of the gates, the state's part and the state.
        steps: Inputs of all steps, (steps, records, features).
        state: State before the step that is run first: hidden values, and for an LSTM the cells as well, (records,
            width) each.
        parameters: W_ih (gates · width, features) and W_hh (gates · width, width), then b_ih and b_hh if any.
        backward: Whether steps are run from the last to the first.
        projection: Matrix (projected width, width) that is applied to the hidden values of every step, or None.
            Hidden values then have the projected width, in `state` and for W_hh too.

    Returns:
        The hidden values after every step in the order of the steps, (steps, records, width or projected width),
        and the state after the step that is run last.
    """
    (input_weight, state_weight), (input_bias, state_bias) = parameters[:2], parameters[2:] or (None, None)
    input_parts = functional.linear(steps, input_weight, input_bias).unbind(0)
    outputs = []
    for input_part in reversed(input_parts) if backward else input_parts:
        state = cell(input_part, functional.linear(state[0], state_weight, state_bias), state)
        if projection is not None:
            state = (functional.linear(state[0], projection), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backward else outputs), state


def _run_cell(
    cell: CellFunction,
    values: Tensor,
    state: Any,
    input_weight: Tensor,
    state_weight: Tensor,
    input_bias: Any = None,
    state_bias: Any = None,
) -> Any:
    """Run one step as torch.lstm_cell, gru_cell, rnn_tanh_cell and rnn_relu_cell do.

    `values` are (records, features).  `state` and the result are tensors (records, width), or for an LSTM a pair
    of hidden values and cells.
    """
    states = tuple(state) if isinstance(state, tuple | list) else (state,)
    next_state = cell(
        functional.linear(values, input_weight, input_bias),
        functional.linear(states[0], state_weight, state_bias),
        states,
    )
    return next_state if isinstance(state, tuple | list) else next_state[0]


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
"""Unrolled functions by the function of torch that they replace."""


def make_vmap_module(module: nn.Module) -> nn.Module:
    """Return the module, or a copy whose layers torch.func.vmap can batch.

    In the copy, recurrent layers, their cells and embeddings of torch's own classes get another forward pass, and
    layers of attention are put into training mode.  A module with none of these layers is returned itself.  The
    copy shares parameters and buffers with the module.
    """
    if not any(type(layer) in _REPLACEMENTS or isinstance(layer, _ATTENTION) for layer in module.modules()):
        return module
    # The memo maps parameters and buffers to themselves, so that they are not copied.
    copied = copy.deepcopy(module, {id(values): values for values in (*module.parameters(), *module.buffers())})
    for layer in copied.modules():
        if type(layer) in _REPLACEMENTS:
            layer.__class__ = _REPLACEMENTS[type(layer)]
        elif isinstance(layer, _ATTENTION):
            layer.training = True  # torch's fast path runs in evaluation mode, and vmap has no rule for it
    return copied


def _find_step(layer: nn.RNNBase | nn.RNNCellBase) -> CellFunction:
    if isinstance(layer, nn.GRU | nn.GRUCell):
        return _gru_step
    return _lstm_step if isinstance(layer, nn.LSTM | nn.LSTMCell) else _CELL_FUNCTIONS[f"rnn_{layer.nonlinearity}"]


class _Unrolled(nn.RNNBase):
    """Recurrent layer that runs its steps one after another."""

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | RecurrentState | None = None
    ) -> tuple[Tensor, Tensor | RecurrentState]:
        """Compute the outputs of all steps and the last states of all layers, without dropout.

        Args:
            input: Inputs, (steps, records, features), (records, steps, features) with `batch_first`, or
                (steps, features) of a single record.
            hx: State before the first step, (layers · directions, records, width), or (layers · directions,
                width) for a single record, or None for zeros.  For an LSTM it is a pair of hidden values, which
                have the projected width if there is a projection, and cells.

        Returns:
            The last layer's outputs in the layout of `input`, directions side by side in place of features, and
            the states after the step that is run last, in the layout of `hx`.

        Raises:
            InputError: The sequence is packed.
        """
        if isinstance(input, PackedSequence):
            raise InputError("a packed sequence cannot be used; give the layer the padded one")
        is_unbatched = input.dim() == 2
        if is_unbatched:
            input = input.unsqueeze(0 if self.batch_first else 1)
        steps = input.transpose(0, 1) if self.batch_first else input
        state_size = 2 if isinstance(self, nn.LSTM) else 1
        # Hidden values (and cells) with the layers and directions on the first axis.
        start_state = None if hx is None else hx if isinstance(hx, tuple) else (hx,)
        last_states: list[RecurrentState] = []
        for layer in range(self.num_layers):
            outputs = []
            for reverse in (False, True)[: 1 + self.bidirectional]:
                if start_state is None:
                    widths = (self.proj_size or self.hidden_size, self.hidden_size)[:state_size]
                    state: RecurrentState = tuple(steps.new_zeros(steps.shape[1], width) for width in widths)
                else:
                    state = tuple(part[len(last_states)] for part in start_state)
                    state = tuple(part.unsqueeze(0) for part in state) if is_unbatched else state
                direction_outputs, state = self._run_steps(
                    steps, state, f"_l{layer}{'_reverse' if reverse else ''}", reverse
                )
                outputs.append(direction_outputs)
                last_states.append(state)
            steps = torch.cat(outputs, -1)
        end_states = tuple(torch.stack(part) for part in zip(*last_states, strict=True))
        result = steps.transpose(0, 1) if self.batch_first else steps
        if is_unbatched:
            result, end_states = (
                result.squeeze(0 if self.batch_first else 1),
                tuple(part.squeeze(1) for part in end_states),
            )
        return result, end_states if state_size == 2 else end_states[0]

    def _run_steps(
        self, steps: Tensor, state: RecurrentState, suffix: str, reverse: bool
    ) -> tuple[Tensor, RecurrentState]:
        names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ()))
        parameters = [getattr(self, f"{name}{suffix}") for name in names]
        projection = getattr(self, f"weight_hr{suffix}") if self.proj_size else None
        return _run_direction(_find_step(self), steps, state, parameters, reverse, projection)


class _UnrolledGRU(_Unrolled, nn.GRU): ...  # type: ignore[misc]


class _UnrolledRNN(_Unrolled, nn.RNN): ...  # type: ignore[misc]


class _UnrolledLSTM(_Unrolled, nn.LSTM): ...  # type: ignore[misc]


class _UnrolledCell(nn.RNNCellBase):
    """One step of a recurrent layer."""

    def forward(self, input: Tensor, hx: Tensor | RecurrentState | None = None) -> Tensor | RecurrentState:
        """Compute the next hidden values, (..., width), or a pair of hidden values and cells for an LSTM.

        Args:
            input: Input of the step, (..., features).
            hx: State before the step, in the form of the result, or None for zeros.
        """
        state_size = 2 if isinstance(self, nn.LSTMCell) else 1
        if hx is None:
            state: RecurrentState = (input.new_zeros(*input.shape[:-1], self.hidden_size),) * state_size
        else:
            state = hx if isinstance(hx, tuple) else (hx,)
        input_part = functional.linear(input, self.weight_ih, self.bias_ih)
        next_state = _find_step(self)(input_part, functional.linear(state[0], self.weight_hh, self.bias_hh), state)
        return next_state if state_size == 2 else next_state[0]


class _GRUCell(_UnrolledCell, nn.GRUCell): ...  # type: ignore[misc]


class _RNNCell(_UnrolledCell, nn.RNNCell): ...  # type: ignore[misc]


class _LSTMCell(_UnrolledCell, nn.LSTMCell): ...  # type: ignore[misc]


class _DenseEmbedding(nn.Embedding):
    """Table of embeddings whose gradient is not sparse."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.embedding(input, self.weight, self.padding_idx)


class _GatherEmbeddingBag(nn.EmbeddingBag):
    """Table of embeddings that reduces the rows of each record's tokens by sum, mean or maximum."""

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Reduce the table's rows of each record's tokens to their sum, mean or maximum, (B, width).

        The layer's `mode` says which.  Tokens of the padding row, if there is one, are left out, also in the
        number by which a mean is divided.  A record of such tokens alone gets zeros.

        Args:
            input: Row of the table for each token, (B, tokens) with one token or more.
            offsets: Argument of torch's layer, which has to be None.
            per_sample_weights: Factors of the rows under "sum" and "mean", (B, tokens), or None for factors of 1.
                A mean is divided by the number of tokens, whatever their factors.  "max" does not read them.

        Raises:
            InputError: There are offsets, or the input is not (B, tokens).
        """
        if offsets is not None or input.dim() != 2:
            raise InputError(
                "an EmbeddingBag with offsets cannot be used; give it tokens of shape (records, tokens) only"
            )
        rows = functional.embedding(input, self.weight, self.padding_idx)  # (B, tokens, width)
        is_counted = (
            torch.ones_like(input, dtype=torch.bool) if self.padding_idx is None else input != self.padding_idx
        )
        if self.mode == "max":
            largest = rows.masked_fill(~is_counted.unsqueeze(-1), -torch.inf).max(1).values
            return largest.where(is_counted.any(1, keepdim=True), 0.0)
        token_weights = (
            is_counted.to(rows.dtype) if per_sample_weights is None else per_sample_weights * is_counted
        )
        total = (rows * token_weights.unsqueeze(-1)).sum(1)
        return total / is_counted.sum(1, keepdim=True).clamp(min=1) if self.mode == "mean" else total


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
