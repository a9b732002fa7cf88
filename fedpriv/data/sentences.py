"""Sentences that are made up: rows of words whose class lies in their order, not only in which words there are."""

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.random import public_generator

WORDS, LENGTH, TOPICS = 64, 16, 4
_MARKER, _COMMON = 0, 12
"""Word 0 is the marker, 1 … 11 are common words, and every topic has 13 of the others."""
_SHARE = 0.25
"""How often a word is of the topic of its part; the others are common ones."""

Tokens = NDArray[np.int64]


def sentences(train: int, test: int) -> tuple[Tokens, Tokens, Tokens, Tokens]:
    """Training tokens (n, 16) and labels, test tokens and labels; always the same ones.

    A sentence has two parts about two different topics, and the marker between them, at a place of its own; the
    topic of the second part is its label.  Which words there are tells the two topics, and only their order which
    of them is asked for.
    """
    generator, count = public_generator(0, "sentences"), train + test
    labels = generator.integers(0, TOPICS, count)
    before = (labels + generator.integers(1, TOPICS, count)) % TOPICS
    marker = generator.integers(2, LENGTH // 2, count)[:, None]
    places = np.arange(LENGTH)[None]
    topic = np.where(places < marker, before[:, None], labels[:, None])
    each = (WORDS - _COMMON) // TOPICS
    of_topic = _COMMON + topic * each + generator.integers(0, each, (count, LENGTH))
    common = generator.integers(_MARKER + 1, _COMMON, (count, LENGTH))
    tokens = np.where(generator.random((count, LENGTH)) < _SHARE, of_topic, common)
    tokens = np.where(places == marker, _MARKER, tokens).astype(np.int64)
    return tokens[:train], labels[:train], tokens[train:], labels[train:]
