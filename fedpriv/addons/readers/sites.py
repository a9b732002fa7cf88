"""Read records that are split by silo: a data set for each silo, or the site of each record.

The number of records of each silo is public.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedpriv.core.errors import InputError, refuse
from fedpriv.data.given import Fields, to_array, to_record_arrays
from fedpriv.data.own import Sites, check_same_shapes

_Pair = tuple[NDArray[Any], NDArray[Any]]
_NO_ROWS = np.zeros(0, np.int64)


def read_parts(
    train: Any, test: Any, sites: ArrayLike | None, fields: Fields | None
) -> tuple[_Pair, _Pair, Sites | None]:
    """Read the training and the test records, and the site of each record if they are split by silo.

    Args:
        train: Training records in any form that `to_record_arrays` reads, or a list of data sets (`_is_data_set`),
            one for each silo.
        test: Test records in such a form, or a list of as many data sets, if `train` is one.
        sites: Site of each training record, (n,), numbers or names, or None.
        fields: Names or positions of an item's record and label, or None.

    Returns:
        The training part and the test part, each records (n, ...) and labels (n, ...), and the sites of the
        records, or None if the training records are not split.  The sites of the test records are empty unless
        `test` is a list of data sets.

    Raises:
        InputError: The records cannot be read, a site is missing or cannot be compared with others, or `sites` or
            the list `test` does not fit the training records.
    """
    (train_pair, train_sites), (test_pair, test_sites) = (
        _read_part(part, name, fields) for part, name in ((train, "train"), (test, "test"))
    )
    if sites is not None:
        refuse(
            {
                "sites: train is a list with a data set for each silo; leave sites out, or join them": (
                    train_sites.size
                )
            }
        )
        values = to_array(sites, "sites")
        # Items of a list are tested themselves, since NumPy makes a text of NaN beside names.
        items = sites if isinstance(sites, list | tuple) and values.ndim == 1 else values.ravel().tolist()
        try:
            if any(value is None or value != value for value in items):  # NaN is not equal to itself
                raise InputError(
                    "sites: a record has no site (nan); give each record one, or leave the record out"
                )
            names, train_sites = np.unique(values, return_inverse=True)
        except TypeError:  # among them pandas' NA, which has no truth value
            raise InputError(
                "sites: a record has no site, or sites are of several types; give each record a number, or each a "
                "name"
            ) from None
        refuse(
            {
                f"sites: of shape {train_sites.shape}; expected the site of each of "
                f"{len(np.atleast_1d(train_pair[1]))} records": train_sites.shape != train_pair[1].shape[:1]
            }
        )
    elif train_sites.size:
        names = np.arange(len(train))
    refuse(
        {
            "test: a list has test records of each silo, as many as train has data sets; or give one set": (
                test_sites.size and (sites is not None or not train_sites.size or len(test) != len(train))
            )
        }
    )
    if not train_sites.size:
        return train_pair, test_pair, None
    site_names = tuple(f"silo {name}" if sites is None else str(name) for name in names.tolist())
    return train_pair, test_pair, Sites(site_names, train_sites.astype(np.int64), test_sites)


def _read_part(part: Any, source: str, fields: Fields | None) -> tuple[_Pair, NDArray[np.int64]]:
    """Return the records and labels of a part, and the number of each record's silo, (n,).

    A list of data sets is split by silo.  The numbers are empty, (0,), for any other part.

    Raises:
        InputError: The records cannot be read, or those of two silos differ in shape or kind.
    """
    if not (isinstance(part, list) and part and all(map(_is_data_set, part))):
        return to_record_arrays(part, source, fields), _NO_ROWS
    pairs = [to_record_arrays(silo_part, f"{source}[{silo}]", fields) for silo, silo_part in enumerate(part)]
    for silo, pair in enumerate(pairs):
        check_same_shapes(pairs[0], pair, f"{source}[0] and {source}[{silo}]")
    records, labels = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return (records, labels), np.repeat(np.arange(len(pairs)), [len(pair[1]) for pair in pairs])


def _is_data_set(value: Any) -> bool:
    """Whether a value is a data set, and not an array or a single item (record, label).

    A pair is a data set if its records, or their first input, have at least two axes, and as many rows as its
    labels.  Any other value is one if it can be indexed or iterated over, and is no tuple, array, tensor, list,
    text, bytes or mapping.
    """
    if isinstance(value, tuple):
        try:
            records, labels = value
            return (
                np.ndim(labels) > 0
                and np.ndim(first := records[0] if isinstance(records, tuple) and records else records) > 1
                and len(first) == len(labels)
            )
        except ValueError:  # no pair, or nested lists of unequal length
            return False
    return not isinstance(value, np.ndarray | Tensor | list | str | bytes | Mapping) and (
        hasattr(value, "__getitem__") or hasattr(value, "__iter__")
    )
