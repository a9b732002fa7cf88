"""torch's recurrent layers, step by step, from functions that functional knows.

torch runs a recurrent layer as one function, of which neither vmap nor a watcher of its parameters knows the
inside.  Each function here takes the arguments of torch's own and gives what that gives, but for rounding; the
part of a gate that its input decides is one product for all steps.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

State = tuple[Tensor, ...]
"""Hidden values, and for an LSTM its cells; each (records, width)."""
Cell = Callable[[Tensor, Tensor, State], State]
"""From what the input and the state say of the gates, (records, gates · width) each, and the state."""


def _lstm(seen: Tensor, told: Tensor, state: State) -> State:
    given, kept, new, shown = (seen + told).chunk(4, -1)
    cells = kept.sigmoid() * state[1] + given.sigmoid() * new.tanh()
    return shown.sigmoid() * cells.tanh(), cells


def _gru(seen: Tensor, told: Tensor, state: State) -> State:
    (reset, kept, new), (resets, keeps, news) = seen.chunk(3, -1), told.chunk(3, -1)
    share = (kept + keeps).sigmoid()
    candidate = (new + (reset + resets).sigmoid() * news).tanh()
    return (candidate + share * (state[0] - candidate),)


def _plain(activation: Callable[[Tensor], Tensor], seen: Tensor, told: Tensor, _: State) -> State:
    return (activation(seen + told),)


def _layer(
    cell: Cell,
    values: Tensor,
    state: State | Tensor,
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
    last: list[State] = []
    for layer in range(layers):
        ways = [
            _way(cell, steps, tuple(part[len(last) + way] for part in states), own[len(last) + way], bool(way))
            for way in range(1 + both_ways)
        ]
        steps = torch.cat([outputs for outputs, _ in ways], -1)
        if dropout and train and layer < layers - 1:
            steps = functional.dropout(steps, dropout)
        last += [final for _, final in ways]
    outputs = steps.transpose(0, 1) if batch_first else steps
    return outputs, *(torch.stack(parts) for parts in zip(*last, strict=True))


def _way(cell: Cell, steps: Tensor, state: State, own: Sequence[Tensor], backward: bool) -> tuple[Tensor, State]:
    (inward, onward), (shift, shifts) = own[:2], own[2:] or (None, None)
    seen = functional.linear(steps, inward, shift).unbind(0)
    outputs = []
    for one in reversed(seen) if backward else seen:
        state = cell(one, functional.linear(state[0], onward, shifts), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backward else outputs), state


def _step(
    cell: Cell, values: Tensor, state: Any, inward: Tensor, onward: Tensor, shift: Any = None, shifts: Any = None
) -> Any:
    """As torch.lstm_cell, gru_cell, rnn_tanh_cell and rnn_relu_cell."""
    states = tuple(state) if isinstance(state, tuple | list) else (state,)
    after = cell(functional.linear(values, inward, shift), functional.linear(states[0], onward, shifts), states)
    return after if isinstance(state, tuple | list) else after[0]


_CELLS: dict[str, Cell] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": partial(_plain, torch.tanh),
    "rnn_relu": partial(_plain, torch.relu),
}
STEP_BY_STEP: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): partial(_layer, cell) for name, cell in _CELLS.items()},
    **{getattr(torch, f"{name}_cell"): partial(_step, cell) for name, cell in _CELLS.items()},
}
"""By torch's own function."""
