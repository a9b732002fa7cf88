"""Draw a data set's training and test records anew, and spare some of the training records: public choices.

A published split is one of many.  How far a comparison depends on it is seen by drawing others, of the same sizes:
site by site where the data have sites, stratified by label where every label that occurs does more than twice, and
by person where the data say whose a record is.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.core.random import public_generator
from fedpriv.data.own import Dataset, Sites
from fedpriv.data.partition import blanked, counted

_SEED = 0
"""The public seed of all splits; their numbers tell them apart."""
_RARE = 2
"""A label that occurs so often, or less, is not shared out."""


def resplit(data: Dataset, number: int) -> Dataset:
    """The records of both parts, dealt out anew by the public split `number`, 1 or more; sizes stay.

    Guarantee: no record is in both parts, and no person.  InputError where persons of the test part are not known.
    """
    train_counts, test_counts = counted(data.train_labels), counted(data.test_labels)
    if data.rows is not None and np.array_equal(np.sort(data.rows[0]), np.sort(data.rows[1])):
        back = _back(data)
        images = np.where(_column(train_counts, data.train_images), data.train_images, data.test_images[back])
        labels = np.where(_column(train_counts, data.train_labels), data.train_labels, data.test_labels[back])
        known = train_counts | test_counts[back]
        tests = test_counts[back]
        aside = _drawn(data, labels, known, tests, "split", number)
        train, test = known & ~aside, aside
        forth = np.argsort(back)
        return dataclasses.replace(
            data,
            train_images=_zeroed(images, train),
            train_labels=blanked(labels, train),
            test_images=_zeroed(images, test)[forth],
            test_labels=blanked(labels, test)[forth],
        )
    if data.persons is not None:
        raise InputError(f"data.split: whose the test records of {data.name} are is not known; leave it out")
    images = np.concatenate([data.train_images, data.test_images])
    labels = np.concatenate([data.train_labels, data.test_labels])
    sites = None if data.sites is None else np.concatenate([data.sites.train, data.sites.test])
    known, tests = counted(labels), np.arange(len(labels)) >= len(data.train_labels)
    named = None if data.sites is None or sites is None else Sites(data.sites.names, sites, sites)
    whole = dataclasses.replace(data, sites=named)
    aside = _drawn(whole, labels, known, tests & known, "split", number)
    out = aside | (tests & ~known)
    chosen, others = np.flatnonzero(out), np.flatnonzero(~out)
    others = others[public_generator(_SEED, "order of split", str(number)).permutation(len(others))]
    return dataclasses.replace(
        data,
        train_images=images[others],
        train_labels=labels[others],
        test_images=images[chosen],
        test_labels=labels[chosen],
        sites=None if named is None else Sites(named.names, named.train[others], named.test[chosen]),
        rows=None,
    )


def spared(data: Dataset, share: float) -> Dataset:
    """The data with a `share` of the training records, drawn like a split, as zeros that keep their places."""
    known = counted(data.train_labels)
    units = round(1.0 / share)
    generator = public_generator(_SEED, "spared")
    quota = known & (generator.permutation(len(known)) % units == 0)
    aside = _drawn(data, data.train_labels, known, quota, "spared", 0)
    return dataclasses.replace(
        data,
        train_images=_zeroed(data.train_images, known & ~aside),
        train_labels=blanked(data.train_labels, known & ~aside),
    )


def _back(data: Dataset) -> NDArray[np.int64]:
    """For every training place, the test place of the same row."""
    assert data.rows is not None
    return np.argsort(data.rows[1])[np.argsort(np.argsort(data.rows[0]))]


def _drawn(
    data: Dataset, labels: NDArray[Any], known: NDArray[np.bool_], quota: NDArray[np.bool_], why: str, number: int
) -> NDArray[np.bool_]:
    """Choose records of `known` to put aside, site by site as many units as `quota` has, (n,)."""
    sites = np.zeros(len(labels), np.int64) if data.sites is None else data.sites.train
    persons = None if data.persons is None else np.unique(data.persons, return_inverse=True)[1].ravel()
    aside = np.zeros(len(labels), np.bool_)
    for site in np.unique(sites[known]):
        here = np.flatnonzero(known & (sites == site))
        units = np.arange(len(here)) if persons is None else np.unique(persons[here], return_inverse=True)[1]
        first = np.unique(units, return_index=True)[1]
        many = len(np.unique(units[quota[here]]))
        generator = public_generator(_SEED, why, str(number), str(site))
        chosen = _stratified(labels[here][first], many, generator)
        aside[here[np.isin(units, chosen)]] = True
    return aside


def _stratified(labels: NDArray[Any], many: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """`many` places of `labels`, each label with its share of them; any where a label is rare, or a number."""
    classes = labels.dtype.kind == "i" and labels.ndim == 1  # several labels of a record are no stratum
    kinds, counts = np.unique(labels, return_counts=True) if classes else (labels[:1], np.array([len(labels)]))
    order = generator.permutation(len(labels))
    if not classes or counts.min() <= _RARE:
        return order[:many]
    wanted = counts * (many / len(labels))
    whole = np.floor(wanted).astype(np.int64)
    rest = wanted - whole + 1e-9 * generator.random(len(whole))
    whole[np.argsort(-rest)[: many - int(whole.sum())]] += 1
    return np.concatenate([order[labels[order] == kind][:size] for kind, size in zip(kinds, whole, strict=True)])


def _column(mask: NDArray[np.bool_], images: NDArray[Any]) -> NDArray[np.bool_]:
    return mask.reshape(-1, *[1] * (images.ndim - 1))


def _zeroed(images: NDArray[Any], counts: NDArray[np.bool_]) -> NDArray[Any]:
    kept = images.copy()
    kept[~counts] = 0
    return kept
