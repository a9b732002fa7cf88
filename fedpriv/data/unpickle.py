"""Read pickles that hold NumPy arrays, and refuse everything else before it can run."""

import io
import pickle
from typing import Any

import numpy as np
from numpy._core import multiarray

from fedpriv.errors import InputError

_ADMITTED = {
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.multiarray", "_reconstruct"): multiarray._reconstruct,  # as NumPy before 2.0 wrote it
    ("numpy._core.multiarray", "_reconstruct"): multiarray._reconstruct,
}


def unpickle_arrays(content: bytes) -> Any:
    """Lists, tuples, dicts, numbers, strings and NumPy arrays out of a pickle (Python 2's too, as latin-1).

    InputError if it names any other class or function, or is no whole pickle.
    """
    try:
        return _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise InputError(f"a data file is not a whole pickle ({error})") from None


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise InputError(f"a data file asks for {module}.{name}: only NumPy arrays are read from it")
        return _ADMITTED[module, name]
