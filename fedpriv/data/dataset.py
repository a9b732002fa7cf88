"""What a data set is, once it is in memory."""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class Dataset:
    """Images as bytes, (n, height, width) or (n, height, width, channels), and labels 0 … classes-1 (n,).

    Features that are numbers are vectors of floats (n, features) instead; a regression has classes = 0 and floats
    for labels.
    """

    name: str
    train_images: NDArray[Any]
    train_labels: NDArray[Any]
    test_images: NDArray[Any]
    test_labels: NDArray[Any]
    classes: int


@dataclass(frozen=True)
class HeldOut:
    """The test images and labels of a data set, shaped as in `Dataset`."""

    images: NDArray[Any]
    labels: NDArray[Any]
    classes: int
