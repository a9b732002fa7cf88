"""Passes through a model in bfloat16, with everything that a guarantee rests on in the run's own type.

The model, its noise, norms, clips and sums stay as they are; what a record's gradient is computed from has 8 bits.
Micikevicius et al. 2018, "Mixed precision training", have the same division: master weights and sums are wide.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.loss.objective import UNCLIPPED, Batch, Increment, Objective, Query, Records, RecordView, Slots

_WHOLE = 256
"""Up to here bfloat16 holds every whole number."""


@dataclass(frozen=True)
class ShortPasses(RecordView):
    """`base`, whose gradients are taken at models and of features that are rounded to bfloat16.

    Evaluations are in the type of the model.

    Guarantee: as for any objective, since norms and sums are in the type of the weights: gradients are other
    gradients, and each is clipped as the vector that is added.
    """

    def at(self, slots: Slots) -> Self:
        base = self.base.at(slots)
        return self if base is self.base else replace(self, base=base)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        return self.base.increment(_narrowed(query), _with_short_features(batch), clip)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        return self.base.per_record(_narrowed(query), _with_short_features(batch), rows, clip)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        return self.increment(Query((point,)), batch, UNCLIPPED).total


def _narrowed(query: Query) -> Query:
    """InputError for a difference of gradients: models of two rounds are often equal in 8 bits."""
    if len(query.points) > 1:
        raise InputError(
            'run.passes = "bfloat16": this algorithm adds differences of gradients at two models, which differ by '
            "less than bfloat16 can tell; leave it out, or take an algorithm of plain gradients such as dp-sgd"
        )
    return query._replace(points=[point.bfloat16() for point in query.points])


def _with_short_features(batch: Batch) -> Batch:
    records, weights = batch
    return Batch(Records(records.features.bfloat16(), records.labels), weights)


def short_passes(objective: Objective, records: Records) -> ShortPasses:
    """`objective` with passes in bfloat16.

    Raises:
        InputError: a column of whole numbers beyond 256, such as the words of a sentence, which would become
            others; or a model that cannot compute in bfloat16.
    """
    features = records.features.flatten(0, -2)
    whole = (features == features.round()).all(0) & (features.abs().amax(0) > _WHOLE)
    if whole.any():
        place = int(whole.nonzero()[0])
        raise InputError(
            f'run.passes = "bfloat16": feature {place} has whole numbers beyond {_WHOLE}, which would become '
            "others in 8 bits; leave it out, or scale the feature"
        )
    short, point = ShortPasses(objective), objective.initial()
    one = Records(features[:1], torch.zeros_like(records.labels.flatten()[:1]))
    try:
        short.at(Slots(1, ((0, 1),), np.zeros(1, np.int64))).increment(
            Query((point,)), Batch(one, point.new_ones(1)), 1.0
        )
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f'run.passes = "bfloat16": the model cannot compute in it ({reason}); leave it out'
        ) from None
    return short
