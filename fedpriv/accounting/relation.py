"""Which data sets are neighbours."""

from typing import Literal, get_args

from fedpriv.errors import InputError

Relation = Literal["replace-one", "zero-out"]
"""Neighbours: one record exchanged for another, or one record's contribution replaced by zero."""

RELATIONS: tuple[Relation, ...] = get_args(Relation)
RELATION_FACTOR: dict[Relation, float] = {"zero-out": 1.0, "replace-one": 2.0}
"""By how many clip norms one record can move a clipped increment under each of them."""


def moved_by(relation: Relation, per_record: float, sensitivity: float) -> float:
    """How far, in l2 norm, one record moves a stream: summed increments of `sensitivity`, each times `per_record`.

    Calibration and ledger both call this, so that they compute with the same number to the last bit.
    """
    return RELATION_FACTOR[relation] * per_record * sensitivity


def relation_named(name: str) -> Relation:
    """`name` as a neighbouring relation; raises InputError if it is none."""
    for relation in RELATIONS:
        if name == relation:
            return relation
    raise InputError(f"relation = {name!r}: accepted are {', '.join(map(repr, RELATIONS))}")
