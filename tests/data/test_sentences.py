"""Made-up sentences: always the same, and a class that lies in the order of the words."""

import hashlib

import numpy as np

from fedpriv.data.named import load
from fedpriv.data.synthetic import SENTENCE_LENGTH, TOPIC_COUNT, VOCABULARY_SIZE, make_sentences


def test_synthetic_sentences_are_always_the_same_and_have_the_declared_shapes() -> None:
    data = load("sentences")
    assert (len(data.train_labels), len(data.test_labels), data.class_count) == (12_000, 4000, TOPIC_COUNT)
    assert data.train_images.dtype == np.int64  # words, as nn.Embedding takes them
    assert data.train_images.shape[1:] == (SENTENCE_LENGTH,)
    assert (data.train_images.min(), data.train_images.max()) == (0, VOCABULARY_SIZE - 1)
    assert data.train_images[0].tolist() == [10, 7, 35, 0, 7, 4, 6, 49, 4, 11, 5, 8, 10, 7, 6, 8]
    digest = hashlib.sha256()
    for part in (data.train_images, data.train_labels, data.test_images, data.test_labels):
        digest.update(part.astype("<i8").tobytes())
    assert digest.hexdigest() == "b9b4dbeccee141b1d1cfc2397d976c9d0a1a88485b00a2b110d06b8dface9ffa"
    assert np.abs(np.bincount(data.train_labels) / 12_000 - 1 / TOPIC_COUNT).max() < 0.02


def test_topic_words_match_the_label_after_the_marker_and_differ_before_the_marker() -> None:
    tokens, labels, *_ = make_sentences(2000, 10)
    assert ((tokens == 0).sum(1) == 1).all()
    marker = tokens.argmin(1)[:, None]
    topic = np.where(tokens >= 12, (tokens - 12) // 13, -1)
    after, before = np.arange(SENTENCE_LENGTH) > marker, np.arange(SENTENCE_LENGTH) < marker
    assert (topic == labels[:, None])[after & (topic >= 0)].all()
    assert (topic != labels[:, None])[before & (topic >= 0)].all()
