"""A small data set that needs no network: ten Gaussian blobs, 28 x 28 bytes each record."""

import numpy as np
from numpy.typing import NDArray

from fedpriv.randomness import public_generator

_CLASSES, _SIDE = 10, 28
_COARSE = 7


def blobs(
    train: int, test: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
    """Training images and labels, test images and labels; always the same ones.

    A class is a coarse 7 x 7 pattern enlarged to 28 x 28; a record is its class's pattern plus Gaussian noise on
    every pixel, cut to 0 … 255.  The classes are far apart: the nearest class mean labels every test image right.
    """
    generator = public_generator(0, "synthetic data")
    coarse = generator.uniform(0.0, 160.0, (_CLASSES, _COARSE, _COARSE))
    prototypes = coarse.repeat(_SIDE // _COARSE, axis=1).repeat(_SIDE // _COARSE, axis=2)
    labels = generator.integers(0, _CLASSES, train + test)
    images = prototypes[labels] + generator.normal(0.0, 90.0, (train + test, _SIDE, _SIDE))
    pixels = images.clip(0.0, 255.0).astype(np.uint8)
    return pixels[:train], labels[:train], pixels[train:], labels[train:]


def phase_retrieval(
    train: int, test: int, dimension: int, outliers: float, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Training measurements and sizes, test measurements and sizes of a hidden vector x* of norm √dimension.

    A measurement z is uniform on the unit sphere of R^dimension, its size |⟨x*, z⟩|; the share `outliers` of the
    sizes is replaced by uniform numbers between 0 and 5.  The same seed gives the same records.
    """
    generator = public_generator(seed, "phase retrieval")
    hidden = generator.standard_normal(dimension)
    hidden *= np.sqrt(dimension) / np.linalg.norm(hidden)
    measurements = generator.standard_normal((train + test, dimension))
    measurements /= np.linalg.norm(measurements, axis=1, keepdims=True)
    wrong = generator.random(train + test) < outliers
    sizes = np.where(wrong, generator.uniform(0.0, 5.0, train + test), np.abs(measurements @ hidden))
    return measurements[:train], sizes[:train], measurements[train:], sizes[train:]
