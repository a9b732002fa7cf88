"""Records in a program's memory, as the arrays of a data set."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from fedpriv.core.errors import InputError
from fedpriv.data.layout import combine_unnamed_inputs
from fedpriv.data.named import ARGUMENT_NAMES, SplitArrays

RecordSource = SplitArrays | TorchDataset[Any]
"""Records and labels, as a pair of arrays or as a torch Dataset of (record, label).

Records with several inputs are a tuple of arrays, one for each input.
"""


def to_array(values: ArrayLike) -> NDArray[Any]:
    """Copy an array, a tensor or anything that NumPy converts to an array."""
    return np.array(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values)


def to_record_array(records: Any) -> NDArray[Any]:
    """Copy records to one array.

    Args:
        records: Array or tensor (n, ...), or a tuple with an array or tensor (n, ...) for each input of a record.
            Anything else, such as a list, is converted by NumPy.

    Returns:
        Array (n, ...), or for a tuple a structured array (n,) with a field for each input.

    Raises:
        InputError: The inputs in a tuple differ in length.
    """
    if not isinstance(records, tuple) or not all(
        isinstance(column, np.ndarray | torch.Tensor) for column in records
    ):
        return to_array(records)
    return combine_unnamed_inputs([to_array(column) for column in records])


def to_record_arrays(
    data: RecordSource | DataLoader[Any], source: str = ARGUMENT_NAMES
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Copy records and labels, so that the program may change its own later.

    Args:
        data: Records and labels, as a pair or as a torch Dataset of pairs.  The last tensor of a TensorDataset is
            the labels, and the others are inputs.  A DataLoader is read from its first batch to its last, and a
            batch may be a dictionary of records and labels, in this order.
        source: Name of the argument in messages.

    Returns:
        Records, (n, ...) or a structured array (n,) of several inputs, and labels, (n, ...).

    Raises:
        InputError: `data` are no pairs of records and labels, inputs differ in length, a Dataset has no records or
            records of several shapes, or a DataLoader is empty.
        ValueError: Batches of a DataLoader have records of several shapes.
    """
    if isinstance(data, DataLoader):
        pairs = [
            _split_pair(tuple(batch.values()) if isinstance(batch, Mapping) else batch, source) for batch in data
        ]
        if not pairs:
            raise InputError(f"{source}: the DataLoader has no batch")
        records, labels = (np.concatenate(column) for column in zip(*pairs, strict=True))
        return records, labels
    if isinstance(data, TensorDataset):
        *tensors, label_tensor = data.tensors
        return _split_pair((tuple(tensors) if len(tensors) > 1 else tensors[0], label_tensor), source)
    if isinstance(data, TorchDataset):
        pairs = [data[row] for row in range(len(cast(Sized, data)))]
        try:
            inputs, targets = map(list, zip(*pairs, strict=True))
            return to_record_array(
                tuple(map(_stack_arrays, zip(*inputs, strict=True)))
                if isinstance(inputs[0], tuple)
                else _stack_arrays(inputs)
            ), _stack_arrays(targets)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{source}: expected a torch Dataset of one (record, label) or more, all of one shape ({error})"
            ) from None
    return _split_pair(data, source)


def _stack_arrays(values: Sequence[ArrayLike]) -> NDArray[Any]:
    return np.stack([to_array(value) for value in values])


def _split_pair(data: Any, source: str) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        records, labels = data
    except (TypeError, ValueError):
        raise InputError(
            f"{source}: expected (records, labels) or a torch Dataset of such pairs; several inputs of a "
            "record are a tuple, ((tokens, mask), labels)"
        ) from None
    return to_record_array(records), to_array(labels)
