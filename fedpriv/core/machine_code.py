"""Machine code of plain functions on arrays, by numba where it is installed (`pip install 'fedpriv[fast]'`)."""

from collections.abc import Callable
from functools import cache
from typing import TypeVar, cast

Code = TypeVar("Code", bound=Callable[..., object])


@cache
def machine_code(function: Code) -> Code | None:
    """`function` compiled, with the same results; None where numba is not installed.

    Kept on disk where the package lies or in the user's cache, where one of them can be written; else compiled in
    every process anew, which takes some seconds.  Floating point stays what IEEE 754 says: no operation is
    reordered, and none is contracted with another.
    """
    try:
        import numba
    except ImportError:
        return None
    try:
        return cast(Code, numba.njit(function, cache=True, nogil=True))
    except RuntimeError:  # no folder that can be written
        return cast(Code, numba.njit(function, nogil=True))
