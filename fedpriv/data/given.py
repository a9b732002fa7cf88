"""Records that a program has in memory, as the arrays that data sets consist of."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedpriv.core.errors import InputError
from fedpriv.data.layout import in_order
from fedpriv.data.named import ARGUMENTS, Part

Given = Part | Dataset[Any]
"""(records, labels), or a torch Dataset of such pairs; records with several inputs are a tuple of arrays."""


def array_of(values: ArrayLike) -> NDArray[Any]:
    """A copy of an array or a tensor."""
    return np.array(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values)


def records_of(given: Any) -> NDArray[Any]:
    """Records as one array, of several inputs where they are a tuple of arrays; InputError if these do not fit."""
    if not isinstance(given, tuple) or not all(isinstance(each, np.ndarray | torch.Tensor) for each in given):
        return array_of(given)
    inputs = [array_of(each) for each in given]
    counts = [len(each) if each.ndim else 0 for each in inputs]
    if len(set(counts)) != 1:
        raise InputError(f"records: the inputs of a tuple have {counts} records; give as many of each")
    return in_order(inputs)


def arrays_of(given: Given | DataLoader[Any], source: str = ARGUMENTS) -> tuple[NDArray[Any], NDArray[Any]]:
    """Copy two arrays, so that later changes of the program's own change no run.

    A DataLoader is read from its first batch to its last.  A batch may be a dictionary of records and labels, in
    this order.  `source` names the argument in messages.
    """
    if isinstance(given, DataLoader):
        batches = [tuple(batch.values()) if isinstance(batch, Mapping) else batch for batch in given]
        pairs = [_pair(batch, source) for batch in batches]
        if not pairs:
            raise InputError(f"{source}: the DataLoader has no batch")
        records, labels = (np.concatenate(column) for column in zip(*pairs, strict=True))
        return records, labels
    if isinstance(given, TensorDataset):
        *tensors, of_labels = given.tensors
        return _pair((tuple(tensors) if len(tensors) > 1 else tensors[0], of_labels), source)
    if isinstance(given, Dataset):
        rows = [given[place] for place in range(len(cast(Sized, given)))]
        inputs, targets = zip(*rows, strict=True)
        if isinstance(inputs[0], tuple):
            return _pair((tuple(_stack(each) for each in zip(*inputs, strict=True)), _stack(targets)), source)
        return _pair((_stack(inputs), _stack(targets)), source)
    return _pair(given, source)


def _stack(values: Sequence[ArrayLike]) -> NDArray[Any]:
    return np.stack([array_of(each) for each in values])


def _pair(given: Any, source: str) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        records, labels = given
    except (TypeError, ValueError):
        raise InputError(
            f"{source}: expected (records, labels) or a torch Dataset of such pairs; several inputs of a "
            "record are a tuple, ((tokens, mask), labels)"
        ) from None
    return records_of(records), array_of(labels)
