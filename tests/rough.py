"""Accounting of secret rounds at a tenth of its time, for tests of what a run does with the noise it is given."""

from collections.abc import Iterator
from unittest import mock

import pytest

from fedpriv.accounting import allocation, fading, poisson

_FINE = allocation._Resolution(2**9, 1e-2, 10.0, 2**9, 24, fading.COARSE)
_COARSE = allocation._Resolution(2**7, 4e-2, 4.0, 2**7, 8, fading.COARSE)
_CACHED = [module.__dict__[name] for module in (allocation, poisson) for name in ("calibrate", "_cached_curve")]


def rough_accounting(request: pytest.FixtureRequest) -> Iterator[None]:
    """Privacy curves on coarse grids, which are upper bounds, too; what was computed on them is forgotten.

    The slow suite has the grids of the product, and so golden values.
    """
    if "not slow" not in request.config.option.markexpr:
        yield
        return
    steps = {name: 10.0 * poisson.__dict__[name] for name in ("_MAX_STEP", "_STEP_BUDGET")}
    with mock.patch.multiple(allocation, _FINE=_FINE, _COARSE=_COARSE), mock.patch.multiple(poisson, **steps):
        yield
    for function in _CACHED:
        function.cache_clear()
