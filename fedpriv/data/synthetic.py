"""Data that needs no network: Gaussian blobs, sentences, and problems whose population optimum is known."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.random import public_generator

_CLASS_COUNT, _IMAGE_SIDE = 10, 28
_COARSE_SIDE = 7


def make_blobs(
    train: int, test: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
    """Training images and labels, test images and labels; always the same ones.

    A class is a coarse 7 x 7 pattern enlarged to 28 x 28; a record is its class's pattern plus Gaussian noise on
    every pixel, cut to 0 … 255.  The classes are far apart: the nearest class mean labels every test image right.
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


@dataclass(frozen=True)
class KnownProblem:
    """Records drawn from a distribution whose risk has a known minimizer x*.

    A feature vector z has independent coordinates ±√curvature, so E[z zᵀ] = diag(curvature) and every norm is
    `feature_norm` = √Σ curvature.
    """

    features: NDArray[np.float64]
    labels: NDArray[np.float64]
    curvature: NDArray[np.float64]
    minimizer: NDArray[np.float64]
    feature_norm: float
    label_bound: float
    """The largest |label| that can occur."""


def geometric_curvature(dimension: int, condition: float) -> NDArray[np.float64]:
    """Eigenvalues from 1 down to 1 / `condition` in equal ratios, (dimension,)."""
    if dimension < 1 or condition < 1.0:
        raise ValueError(f"dimension {dimension} and condition number {condition} must be at least 1")
    return np.geomspace(1.0, 1.0 / condition, dimension)


def make_linear_regression(n: int, dimension: int, condition: float, noise: float, seed: int) -> KnownProblem:
    """y = ⟨x*, z⟩ + noise · u with ‖x*‖ = 1 and u uniform in ±√3, of variance 1: labels are bounded.

    The risk of x under (⟨x, z⟩ - y)² / 2 is (x - x*)ᵀ diag(curvature) (x - x*) / 2 + noise² / 2, exactly.
    """
    generator = public_generator(seed, "linear regression")
    features, curvature, minimizer = _draw_design(generator, n, dimension, condition)
    return _add_labels(generator, features, curvature, minimizer, noise)


def power_law(dimension: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Curvature i^-2 and a minimizer of norm 1 proportional to i^-1/2, i = 1 … dimension.

    As hard as smooth convex problems get up to constants: while T is well below `dimension`, gradient descent is
    left with an excess risk of order 1/T, accelerated descent with 1/T².
    """
    index = np.arange(1.0, dimension + 1.0)
    return index**-2.0, index**-0.5 / np.linalg.norm(index**-0.5)


def make_power_law_regression(n: int, dimension: int, noise: float, seed: int) -> KnownProblem:
    """As `linear_regression`, with the curvature and the minimizer of `power_law`."""
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
    largest = float(np.sqrt(3.0)) * noise
    labels = features @ minimizer + generator.uniform(-largest, largest, len(features))
    norm = float(np.sqrt(curvature.sum()))
    return KnownProblem(features, labels, curvature, minimizer, norm, norm + largest)


def _draw_design(
    generator: np.random.Generator, n: int, dimension: int, condition: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Features (n, dimension), curvature and a unit vector, both (dimension,)."""
    curvature = geometric_curvature(dimension, condition)
    direction = generator.standard_normal(dimension)
    return (
        generator.choice([-1.0, 1.0], (n, dimension)) * np.sqrt(curvature),
        curvature,
        direction / np.linalg.norm(direction),
    )


VOCABULARY_SIZE, SENTENCE_LENGTH, TOPIC_COUNT = 64, 16, 4
_MARKER_WORD, _COMMON_WORD_COUNT = 0, 12
"""Word 0 is the marker, 1 … 11 are common words, and every topic has 13 of the others."""
_TOPIC_SHARE = 0.25
"""How often a word is of the topic of its part; the others are common ones."""

Tokens = NDArray[np.int64]


def make_sentences(train: int, test: int) -> tuple[Tokens, Tokens, Tokens, Tokens]:
    """Training tokens (n, 16) and labels, test tokens and labels; always the same ones.

    A sentence has two parts about two different topics, and the marker between them, at a place of its own; the
    topic of the second part is its label.  Which words there are tells the two topics, and only their order which
    of them is asked for.
    """
    generator, count = public_generator(0, "sentences"), train + test
    labels = generator.integers(0, TOPIC_COUNT, count)
    before = (labels + generator.integers(1, TOPIC_COUNT, count)) % TOPIC_COUNT
    marker = generator.integers(2, SENTENCE_LENGTH // 2, count)[:, None]
    places = np.arange(SENTENCE_LENGTH)[None]
    topic = np.where(places < marker, before[:, None], labels[:, None])
    each = (VOCABULARY_SIZE - _COMMON_WORD_COUNT) // TOPIC_COUNT
    of_topic = _COMMON_WORD_COUNT + topic * each + generator.integers(0, each, (count, SENTENCE_LENGTH))
    common = generator.integers(_MARKER_WORD + 1, _COMMON_WORD_COUNT, (count, SENTENCE_LENGTH))
    tokens = np.where(generator.random((count, SENTENCE_LENGTH)) < _TOPIC_SHARE, of_topic, common)
    tokens = np.where(places == marker, _MARKER_WORD, tokens).astype(np.int64)
    return tokens[:train], labels[:train], tokens[train:], labels[train:]
