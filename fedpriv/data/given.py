"""Records in a program's memory, as the arrays of a data set."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.core.extensions import load_add_on_part
from fedpriv.data.layout import combine_unnamed_inputs
from fedpriv.data.named import ARGUMENT_NAMES, SplitArrays

RecordSource = SplitArrays | TorchDataset[Any] | Iterable[Any]
"""Records and labels, as a pair of arrays or as items that each have a record and a label.

Records with several inputs are a tuple of arrays, one for each input.
"""
Fields = tuple[Hashable, Hashable]
"""Name or position of an item's record, or a tuple of them for several inputs, and of its label."""
_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


def to_array(values: Any, source: str = ARGUMENT_NAMES) -> NDArray[Any]:
    """Copy an array, a tensor or anything else that NumPy converts, to an array.

    Tensors of a floating-point type that NumPy lacks, such as bfloat16, become float32.

    Args:
        values: The values.
        source: Name of the values in messages.

    Raises:
        InputError: The values cannot be converted, such as lists of unequal length.
    """
    try:
        if not isinstance(values, torch.Tensor):
            return np.array(values)
        has_type = not values.is_floating_point() or values.dtype in _NUMPY_FLOATS
        return np.array((values if has_type else values.float()).numpy(force=True))
    except (RuntimeError, TypeError, ValueError) as error:
        reason = sanitize_line(str(error).split("\n")[0])
        raise InputError(f"{source}: expected numbers in an array of one shape ({reason})") from None


def to_record_array(records: Any, source: str = ARGUMENT_NAMES) -> NDArray[Any]:
    """Copy records to one array.

    Args:
        records: Array or tensor (n, ...), or a tuple with an array or tensor (n, ...) for each input of a record.
            Anything else, such as a list, is converted by NumPy.
        source: Name of the records in some messages.

    Returns:
        Array (n, ...), or for a tuple of arrays or tensors a structured array (n,) with a field for each input.

    Raises:
        InputError: The tuple is empty, an input has no axis, inputs differ in length, or the values cannot be
            converted.
    """
    if not isinstance(records, tuple) or not all(
        isinstance(values, np.ndarray | torch.Tensor) for values in records
    ):
        return to_array(records, source)
    return combine_unnamed_inputs([to_array(column, source) for column in records])


def to_record_arrays(
    data: RecordSource, source: str = ARGUMENT_NAMES, fields: Fields | None = None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Copy the records and labels of a program to arrays.

    Args:
        data: Records and labels, as a pair of arrays or as items, such as those of a torch Dataset, a DataLoader
            or a Hugging Face data set.
        source: Name of the argument in messages.
        fields: Names or positions of an item's record and label, without effect on a pair of arrays.  With None an
            item has these two only, but of a TensorDataset the last tensor holds the labels.

    Returns:
        Records, (n, ...) or a structured array (n,) of several inputs, and labels, (n, ...).

    Raises:
        InputError: `data` are no records with labels, or cannot be converted to arrays.
    """
    # A subclass may compute its items, which are then read one by one.
    if isinstance(data, TensorDataset) and type(data).__getitem__ is TensorDataset.__getitem__ and fields is None:
        if len(data.tensors) < 2:
            raise InputError(f"{source}: the TensorDataset has no labels; give TensorDataset(records, labels)")
        *tensors, label_tensor = data.tensors
        return to_record_array(tuple(tensors) if len(tensors) > 1 else tensors[0], source), to_array(
            label_tensor, source
        )
    # Two items in a list, such as two pairs, are not a pair of arrays.
    are_items = isinstance(data, list) and (
        fields is not None or all(isinstance(part, tuple | Mapping) for part in data)
    )
    if isinstance(data, tuple | list) and len(data) == 2 and not are_items:
        records, labels = cast(tuple[Any, Any], data)
        return to_record_array(records, source), to_array(labels, source)
    pair: tuple[NDArray[Any], NDArray[Any]] = load_add_on_part("own records", "items")(data, source, fields)
    return pair
