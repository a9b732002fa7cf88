"""Checks of the labels that a program gives."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError


def check_labels(labels: NDArray[Any], classes: int | None, loss: Any) -> None:
    """Refuse one-hot labels of classes, which would be read as several labels of a record, or as numbers.

    Labels (n, C) are one-hot if each has a single 1 and zeros.  They are accepted with the loss "binary", for
    records with several labels, and with a number of classes that the program gives.

    Args:
        labels: Labels of the training records.
        classes: Number of classes that the program gives, or None.
        loss: Loss that the program gives, or None.

    Raises:
        InputError: The labels are one-hot, and the program says nothing of them.
    """
    if labels.ndim != 2 or labels.shape[1] < 2 or classes is not None or loss is not None:
        return
    if np.isin(labels, (0, 1)).all() and (labels.sum(1) == 1).all():
        raise InputError(
            f"train: labels of shape {labels.shape} are one-hot; give the number of each record's class, "
            'labels.argmax(1); or say what they are by classes = 0, for numbers, or loss = "binary", for several '
            "labels of a record"
        )
