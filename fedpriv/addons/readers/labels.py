"""Check of the labels that a program gives."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError


def check_labels(labels: NDArray[Any], classes: int | None, loss: Any) -> None:
    """Refuse one-hot labels of classes, which would be read as several labels of a record, or as numbers.

    Labels (n, C) with C > 1 are one-hot if each row has a single 1 and zeros.  They are accepted if the program
    gives a number of classes or a loss.

    Raises:
        InputError: The labels are one-hot, and the program gives neither.
    """
    if labels.ndim != 2 or labels.shape[1] < 2 or classes is not None or loss is not None:
        return
    if np.isin(labels, (0, 1)).all() and (labels.sum(1) == 1).all():
        raise InputError(
            f"train: labels of shape {labels.shape} are one-hot; give the number of each record's class, "
            "labels.argmax(1); or say what they are by classes = 0, for numbers, or by a module with loss = "
            '"binary", for several labels of a record'
        )
