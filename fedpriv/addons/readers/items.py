"""Items of torch Datasets, DataLoaders, Hugging Face data sets and lists, as arrays.

An item is a pair (record, label), a longer tuple or list, or a dictionary.  An item of a DataLoader is a batch of
them, unless the DataLoader was made with batch_size=None.  `fields` names the parts of an item that are record and
label.  Without `fields`, a dictionary of two entries has its label under a usual name (`_LABEL_NAMES`) if one of
the two names is usual, or else last.
"""

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.data.given import Fields, to_array, to_record_array
from fedpriv.data.tables import is_data_frame

_LABEL_NAMES = frozenset(("label", "labels", "target", "targets", "class", "y"))
"""Usual names of the label in a dictionary, in lower case."""


def read_items(data: Any, source: str, fields: Fields | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read all items of a data set, and return their records and labels.

    If records are tuples, their parts are the inputs.

    Args:
        data: DataLoader, torch Dataset, Hugging Face data set, sequence, or iterable of items.
        source: Name of the argument in messages.
        fields: Names or positions of an item's record and label, or None for pairs and dictionaries of two
            entries.

    Returns:
        Records, (n, ...) or a structured array (n,) of several inputs, and labels, (n, ...).

    Raises:
        InputError: The data are no items with a record and a label, or cannot be joined to arrays.
    """
    pairs = [_split_item(item, source, fields) for item in _iterate_items(data, source)]
    if not pairs:
        raise InputError(f"{source}: has no records; give one record with its label at least")
    # A DataLoader makes a list of a record that is a tuple of inputs.
    records, labels = zip(
        *(
            (
                tuple(record)
                if isinstance(data, DataLoader)
                and isinstance(record, list)
                and all(isinstance(part, Tensor) for part in record)
                else record,
                label,
            )
            for record, label in pairs
        ),
        strict=True,
    )
    is_batched = isinstance(data, DataLoader) and data.batch_sampler is not None
    label_array = _join_arrays(labels, "labels", source, is_batched)
    if not isinstance(records[0], tuple):
        return _join_arrays(records, "records", source, is_batched), label_array
    if len({len(inputs) if isinstance(inputs, tuple) else 0 for inputs in records}) > 1:
        raise InputError(f"{source}: records differ in their number of inputs; give each record the same inputs")
    columns = [
        _join_arrays(inputs, f"inputs {number} of the records", source, is_batched)
        for number, inputs in enumerate(zip(*records, strict=True))
    ]
    return to_record_array(tuple(columns)), label_array


def _iterate_items(data: Any, source: str) -> Iterable[Any]:
    """Return an iterable of the items.

    Raises:
        InputError: The data are a dictionary, a DataFrame, one array, text, bytes, a tuple or list with arrays, or
            have neither `__iter__` nor both `__len__` and `__getitem__`.
    """
    if isinstance(data, Mapping) and all(hasattr(part, "__len__") for part in data.values()):
        names = sanitize_line(", ".join(map(repr, data)), 200)
        raise InputError(f"{source}: is a dictionary of {names}; give one data set of it, or (records, labels)")
    if is_data_frame(data):
        raise InputError(f"{source}: is a DataFrame; give (frame[columns], frame[target]) of it")
    is_one_array = isinstance(data, np.ndarray | Tensor | str | bytes | bytearray | Mapping)
    is_tuple_of_arrays = isinstance(data, tuple | list) and any(
        isinstance(part, np.ndarray | Tensor) for part in data
    )
    if not is_one_array and not is_tuple_of_arrays:
        # An IterableDataset inherits a __getitem__ that raises an error, and may have a length.
        if isinstance(data, Sized) and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset):
            return (data[row] for row in range(len(data)))
        if isinstance(data, Iterable):
            return data
    raise InputError(
        f"{source}: expected (records, labels) or a data set of such pairs, not a {type(data).__name__}; several "
        "inputs of a record are a tuple, ((tokens, mask), labels)"
    )


def _split_item(item: Any, source: str, fields: Fields | None) -> tuple[Any, Any]:
    """Return the record and the label of an item, or of a batch of items.

    Raises:
        InputError: The record or the label cannot be found in the item.
    """
    if fields is not None:
        try:
            record_field, label_field = fields
            return (
                tuple(item[field] for field in record_field)
                if isinstance(record_field, tuple)
                else item[record_field]
            ), item[label_field]
        except (KeyError, IndexError, TypeError, ValueError):
            raise InputError(
                f"fields = {fields!r}: an item of {source} has no such parts, but {_describe_parts(item)}"
            ) from None
    if isinstance(item, Mapping) and len(item) == 2:
        label_names = [name for name in item if str(name).lower() in _LABEL_NAMES]
        label_name = label_names[0] if len(label_names) == 1 else list(item)[1]
        return next(value for name, value in item.items() if name != label_name), item[label_name]
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    example = "('image', 'label')" if isinstance(item, Mapping) else "(0, 1)"
    raise InputError(
        f"{source}: expected items (record, label), found {_describe_parts(item)}; fields = {example} would name "
        "the record and the label, and ((…, …), …) several inputs of a record"
    )


def _describe_parts(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"the entries {sanitize_line(', '.join(map(repr, item)), 200)}"
    return f"{len(item)} parts" if isinstance(item, tuple | list) else f"a {type(item).__name__}"


def _join_arrays(values: Sequence[Any], noun: str, source: str, is_batched: bool) -> NDArray[Any]:
    """Concatenate batches (n, ...), or stack single values (...), of one shape.

    Args:
        values: Batches if `is_batched`, or else single values.
        noun: Name of the values in messages.
        source: Name of the program's argument in messages.
        is_batched: Whether the values are batches, which may differ in n.

    Raises:
        InputError: A value cannot be converted to an array, a batch has no axis, shapes differ, or types have no
            common one.
    """
    arrays = [to_array(value, f"{source}: {noun}") for value in values]
    shapes = [array.shape[1:] if is_batched else array.shape for array in arrays]
    other = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        unit = "batches" if is_batched else "items"
        raise InputError(
            f"{source}: {noun} have one shape, and those of {unit} 0 and {other} have {shapes[0]} and "
            f"{shapes[other]}; pad or cut them to a length that is known without the records, and give a mask as "
            "a second input"
        )
    try:
        return np.concatenate(arrays) if is_batched else np.stack(arrays)
    except (TypeError, ValueError) as error:
        raise InputError(f"{source}: {noun} cannot be joined ({sanitize_line(str(error), 200)})") from None
