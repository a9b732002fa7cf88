"""How records are spread over silos: public choices, made from the scenario's seed.

A partition takes (number of records, silos, records per silo, seed) and returns record numbers of shape
(silos, records per silo), in the order each silo reads them.  PARTITIONS is the table of them.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.randomness import public_generator


def iid(records: int, silos: int, per_silo: int, seed: int) -> NDArray[np.int64]:
    """A uniformly random permutation of the records, cut into silos.

    Guarantee: no record is given twice.  InputError if there are too few.
    """
    _check(records, silos, per_silo)
    order = public_generator(seed, "partition").permutation(records)
    return order[: silos * per_silo].reshape(silos, per_silo)


def _check(records: int, silos: int, per_silo: int) -> None:
    if silos < 1 or per_silo < 1:
        raise InputError(f"{silos} silos of {per_silo} records: both numbers must be at least 1")
    if silos * per_silo > records:
        raise InputError(
            f"{silos} silos of {per_silo} records need {silos} * {per_silo} = {silos * per_silo} records, "
            f"but there are {records}"
        )


Partition = Callable[[int, int, int, int], NDArray[np.int64]]

PARTITIONS: dict[str, Partition] = {"iid": iid}
