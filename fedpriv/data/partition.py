"""How records are spread over silos: public choices, made from the scenario's seed.

A partition takes (number of records, silos, records per silo, seed) and returns record numbers of shape
(silos, records per silo), in the order each silo reads them.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InputError
from fedpriv.randomness import public_generator


def iid(records: int, silos: int, per_silo: int, seed: int) -> NDArray[np.int64]:
    """A uniformly random permutation, cut into silos.

    Guarantee: no record is given twice.  InputError if there are too few.
    """
    if silos * per_silo > records:
        raise InputError(f"{silos} silos of {per_silo} records need {silos * per_silo}, there are {records}")
    order = public_generator(seed, "partition").permutation(records)
    return order[: silos * per_silo].reshape(silos, per_silo)


Partition = Callable[[int, int, int, int], NDArray[np.int64]]

PARTITIONS: dict[str, Partition] = {"iid": iid}
