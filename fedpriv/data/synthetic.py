"""Synthetic data: blobs, sentences, phase retrieval, and linear regressions of a known minimizer."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.random import public_generator

_CLASS_COUNT, _IMAGE_SIDE = 10, 28
_COARSE_SIDE = 7


def make_blobs(
    train: int, test: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
    """Return training and test images of ten classes, with their labels.

    A class is a coarse 7 x 7 pattern enlarged to 28 x 28.  A record is its class's pattern plus Gaussian noise on
    every pixel, clipped to 0 … 255 and cut to an integer.

    Returns:
        Training images (train, 28, 28), training labels 0 … 9, (train,), test images and test labels.
    """
    generator = public_generator(0, "synthetic data")
    coarse = generator.uniform(0.0, 160.0, (_CLASS_COUNT, _COARSE_SIDE, _COARSE_SIDE))
    prototypes = coarse.repeat(_IMAGE_SIDE // _COARSE_SIDE, axis=1).repeat(_IMAGE_SIDE // _COARSE_SIDE, axis=2)
    labels = generator.integers(0, _CLASS_COUNT, train + test)
    images = prototypes[labels] + generator.normal(0.0, 90.0, (train + test, _IMAGE_SIDE, _IMAGE_SIDE))
    pixels = images.clip(0.0, 255.0).astype(np.uint8)
    return pixels[:train], labels[:train], pixels[train:], labels[train:]


def make_phase_retrieval(
    train: int, test: int, dimension: int, outliers: float, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return training and test measurements of a random vector x*, with their sizes.

    Phase retrieval finds x*, up to its sign, from measurements and sizes.  The vector x* has norm √dimension.  A
    measurement z is uniform on the unit sphere of R^dimension, and its size is |⟨x*, z⟩|, or for an outlier a
    uniform number between 0 and 5.

    Args:
        train: Number of training records.
        test: Number of test records.
        dimension: Length of x*.
        outliers: Probability of an outlier.
        seed: Public seed.

    Returns:
        Training measurements (train, dimension), training sizes (train,), test measurements and test sizes.
    """
    generator = public_generator(seed, "phase retrieval")
    target = generator.standard_normal(dimension)
    target *= np.sqrt(dimension) / np.linalg.norm(target)
    measurements = generator.standard_normal((train + test, dimension))
    measurements /= np.linalg.norm(measurements, axis=1, keepdims=True)
    is_outlier = generator.random(train + test) < outliers
    sizes = np.where(is_outlier, generator.uniform(0.0, 5.0, train + test), np.abs(measurements @ target))
    return measurements[:train], sizes[:train], measurements[train:], sizes[train:]


@dataclass(frozen=True)
class KnownProblem:
    """Records drawn from a distribution whose risk has a known minimizer x*.

    A feature vector z has independent coordinates ±√curvature.  So E[z zᵀ] = diag(curvature), and every feature
    vector has norm `feature_norm` = √Σ curvature.
    """

    features: NDArray[np.float64]
    """(n, dimension)."""
    labels: NDArray[np.float64]
    """(n,)."""
    curvature: NDArray[np.float64]
    """Eigenvalues of E[z zᵀ], (dimension,)."""
    minimizer: NDArray[np.float64]
    """x*, (dimension,)."""
    feature_norm: float
    label_bound: float
    """Upper bound on the absolute value of a label, `feature_norm` plus the largest noise."""


def geometric_curvature(dimension: int, condition: float) -> NDArray[np.float64]:
    """Return eigenvalues from 1 down to 1 / `condition` in equal ratios, (dimension,).

    Args:
        dimension: Number of eigenvalues, 1 or more.  A single one is 1.
        condition: Condition number, 1 or more.

    Raises:
        ValueError: A number is below 1, or `condition` is not finite.

    Example:
        >>> geometric_curvature(3, 4.0).round(6).tolist()
        [1.0, 0.5, 0.25]
    """
    if dimension < 1 or not 1.0 <= condition < np.inf:
        raise ValueError(f"dimension {dimension} and condition number {condition} must be at least 1, and finite")
    return np.geomspace(1.0, 1.0 / condition, dimension)


def make_linear_regression(n: int, dimension: int, condition: float, noise: float, seed: int) -> KnownProblem:
    """Draw a regression y = ⟨x*, z⟩ + noise · u with ‖x*‖ = 1 and u uniform in [-√3, √3).

    The noise u has variance 1 and is bounded, so that labels are bounded.  The risk of x under the loss
    (⟨x, z⟩ - y)² / 2 is (x - x*)ᵀ diag(curvature) (x - x*) / 2 + noise² / 2, exactly.

    Args:
        n: Number of records.
        dimension: Number of features.
        condition: Condition number of the curvature (`geometric_curvature`).
        noise: Standard deviation of a label's noise.
        seed: Public seed.

    Raises:
        ValueError: `dimension` or `condition` is out of its range, or `noise` is negative.
    """
    generator = public_generator(seed, "linear regression")
    features, curvature, minimizer = _draw_design(generator, n, dimension, condition)
    return _add_labels(generator, features, curvature, minimizer, noise)


def power_law(dimension: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the curvature i^-2 and a minimizer of norm 1 proportional to i^-1/2, for i = 1 … dimension.

    While the number of steps T is well below `dimension`, the excess risk of gradient descent is of order 1/T, and
    that of accelerated descent of order 1/T², as in the worst smooth convex problem up to a logarithm.
    """
    index = np.arange(1.0, dimension + 1.0)
    return index**-2.0, index**-0.5 / np.linalg.norm(index**-0.5)


def make_power_law_regression(n: int, dimension: int, noise: float, seed: int) -> KnownProblem:
    """Draw a regression as `make_linear_regression` does, with curvature and minimizer of `power_law`.

    The arguments are those of `make_linear_regression`.

    Raises:
        ValueError: `noise` is negative.
    """
    generator = public_generator(seed, "power-law regression")
    curvature, minimizer = power_law(dimension)
    return _add_labels(
        generator, generator.choice([-1.0, 1.0], (n, dimension)) * np.sqrt(curvature), curvature, minimizer, noise
    )


def _add_labels(
    generator: np.random.Generator,
    features: NDArray[np.float64],
    curvature: NDArray[np.float64],
    minimizer: NDArray[np.float64],
    noise: float,
) -> KnownProblem:
    max_noise = float(np.sqrt(3.0)) * noise
    labels = features @ minimizer + generator.uniform(-max_noise, max_noise, len(features))
    norm = float(np.sqrt(curvature.sum()))
    return KnownProblem(features, labels, curvature, minimizer, norm, norm + max_noise)


def _draw_design(
    generator: np.random.Generator, n: int, dimension: int, condition: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Draw features (n, dimension), and return them with curvature and a unit vector, (dimension,) both."""
    curvature = geometric_curvature(dimension, condition)
    direction = generator.standard_normal(dimension)
    return (
        generator.choice([-1.0, 1.0], (n, dimension)) * np.sqrt(curvature),
        curvature,
        direction / np.linalg.norm(direction),
    )


VOCABULARY_SIZE, SENTENCE_LENGTH, TOPIC_COUNT = 64, 16, 4
_MARKER_WORD, _COMMON_WORD_COUNT = 0, 12
"""Word 0 is the marker, words 1 … 11 are common, and each topic has 13 of the other words."""
_TOPIC_SHARE = 0.25
"""Probability that a word is of the topic of its part, and not a common word."""

Tokens = NDArray[np.int64]


def make_sentences(train: int, test: int) -> tuple[Tokens, Tokens, Tokens, Tokens]:
    """Return training and test sentences of 16 tokens, with their labels.

    A sentence has two parts about two different topics, with the marker at a random position 2 … 7 between them,
    counted from 0.  Each word but the marker is one of its part's topic with probability `_TOPIC_SHARE`, and
    otherwise a common word.  The topic of the second part is the label, so that the order of the words matters.

    Returns:
        Training tokens 0 … 63, (train, 16), training labels 0 … 3, (train,), test tokens and test labels.
    """
    generator, count = public_generator(0, "sentences"), train + test
    labels = generator.integers(0, TOPIC_COUNT, count)
    first_topic = (labels + generator.integers(1, TOPIC_COUNT, count)) % TOPIC_COUNT
    marker = generator.integers(2, SENTENCE_LENGTH // 2, count)[:, None]
    positions = np.arange(SENTENCE_LENGTH)[None]
    topic = np.where(positions < marker, first_topic[:, None], labels[:, None])
    topic_size = (VOCABULARY_SIZE - _COMMON_WORD_COUNT) // TOPIC_COUNT
    topic_words = (
        _COMMON_WORD_COUNT + topic * topic_size + generator.integers(0, topic_size, (count, SENTENCE_LENGTH))
    )
    common_words = generator.integers(_MARKER_WORD + 1, _COMMON_WORD_COUNT, (count, SENTENCE_LENGTH))
    tokens = np.where(generator.random((count, SENTENCE_LENGTH)) < _TOPIC_SHARE, topic_words, common_words)
    tokens = np.where(positions == marker, _MARKER_WORD, tokens).astype(np.int64)
    return tokens[:train], labels[:train], tokens[train:], labels[train:]
