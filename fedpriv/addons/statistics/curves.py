"""Tables of class by score bin beside the sums of an evaluation: what AUC and calibration by groups follow from.

A test record b of two classes, with the logit s_b of class 1, is in one cell of each table j: its group's, its
class's, and the bin of s_b, of equal width on -8 … 8 with the threshold's as one edge more.  Its increment is

    (right_b - 1/2,  loss_b / bound - 1/2,  a C e_1b,  …,  a C e_Jb),      a = √(w/J) √(1/2) / ‖C e_1‖

with C the square root of prefix sums of each class of each group (indicators.py).  So its norm is
√(1/2) √(1 + w), and two records are √(2 + w) apart at most, less than twice that.

Groups are read off the features that a model sees: the hottest of a column's words, or a number between edges.
A missing value is in the group of what stands in for it.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedpriv.addons.statistics.indicators import Block, extent_of, square_root
from fedpriv.addons.statistics.roc import TwoClasses, together
from fedpriv.core.errors import InputError, suggestion
from fedpriv.data.schema import TableSchema
from fedpriv.loss.objective import PROVED_DIAMETERS, Records
from fedpriv.loss.rows import ModelSettings
from fedpriv.loss.scores import SummedScores, logits_of

REACH = 8.0
"""Logits beyond ± this are in the outermost bins."""
_MOST_GROUPS = 64
Floats = NDArray[np.float64]


class CurveSettings(BaseModel):
    """[evaluation.curves]: AUC, sensitivity, specificity and calibration of two classes, with intervals."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    bins: Annotated[int, Field(ge=16, le=256, multiple_of=16)] = Field(
        128, description="of the logit on -8 … 8, a multiple of 16"
    )
    threshold: Annotated[float, Field(ge=0.001, le=0.999)] = Field(
        0.5, description="the score of class 1 from which on a record counts as predicted 1"
    )
    by: Annotated[tuple[str, ...], Field(strict=False, max_length=4)] = Field(
        (), description="public columns of the table; each gives a table of its own"
    )
    edges: dict[str, Annotated[tuple[float, ...], Field(strict=False, min_length=1)]] = Field(
        {}, description="where a number of `by` is cut into groups"
    )
    weight: Annotated[float, Field(gt=0.0, le=1e6)] = Field(
        2.0, description="of the tables together in mu squared, where loss and accuracy have 1"
    )

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        if len(set(self.by)) < len(self.by):
            raise ValueError("by: a column is named twice")
        if unknown := [name for name in self.edges if name not in self.by]:
            raise ValueError(f"edges of {unknown[0]!r}, which is none of `by`")
        for name, edges in self.edges.items():
            if not all(low < high for low, high in pairwise(edges)):
                raise ValueError(f"edges of {name!r}: expected numbers that increase")
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @cached_property
    def logits(self) -> Floats:
        """The edges between bins: what lies below the first is in bin 0."""
        cut = math.log(self.threshold / (1.0 - self.threshold))
        inner = np.linspace(-REACH, REACH, self.bins + 1)[1:-1]
        return inner if np.isclose(inner, cut, atol=1e-9).any() else np.sort(np.append(inner, cut))

    @property
    def size(self) -> int:
        """Bins, the one that the threshold adds included."""
        return len(self.logits) + 1

    @property
    def cut(self) -> int:
        """The first bin of records that are predicted 1."""
        threshold = math.log(self.threshold / (1.0 - self.threshold))
        return int(np.abs(self.logits - threshold).argmin()) + 1

    @property
    def norm(self) -> float:
        """Of a record's whole increment, loss and accuracy included."""
        return math.sqrt(0.5) * math.sqrt(1.0 + self.weight)

    def scores_beside(
        self, plain: SummedScores, schema: TableSchema | None, model: ModelSettings, *, scaled: bool
    ) -> "CurveScores":
        """Return `plain` with the tables of the curves.  InputError as for `groupings_of`."""
        groupings = groupings_of(self, schema, model, scaled=scaled)
        return CurveScores(plain.base, plain.loss_bound, plain.classes, self, groupings)


@dataclass(frozen=True)
class Grouping:
    """A column by which test records are told apart, as features have it."""

    name: str
    labels: tuple[str, ...]
    start: int
    """The place of its first feature."""
    edges: tuple[float, ...] | None = None
    """Of a number, as a feature has them; None for words, one feature each."""

    def codes(self, features: Tensor) -> Tensor:
        """The group (..., B) of features (..., B, f), each a function of its own row."""
        if self.edges is None:
            return features[..., self.start : self.start + len(self.labels)].argmax(-1)
        edges = torch.tensor(self.edges, dtype=features.dtype, device=features.device)
        return (features[..., self.start, None] >= edges).sum(-1)


ALL = Grouping("all", ("all",), 0, ())
"""Everybody in one group."""


def groupings_of(
    settings: CurveSettings, schema: TableSchema | None, model: ModelSettings, *, scaled: bool
) -> tuple[Grouping, ...]:
    """One a table; InputError for labels that have no curve, and for columns that a model's features do not tell.

    `scaled`: whether columns of numbers are scaled by what a first step gave.
    """
    if schema is None or schema.class_count != 2:
        raise InputError("evaluation.curves: is of a table of two classes; leave it out for other data")
    found, start = [], 0
    for name, column in schema.features:
        if name in settings.by:
            if getattr(model, "backbone", None) is not None:
                raise InputError("evaluation.curves.by: a backbone's features do not tell groups; leave it out")
            edges = settings.edges.get(name)
            if (column.range is None) != (edges is None):
                said = "needs edges" if edges is None else "is a column of words, which has no edges"
                raise InputError(f"evaluation.curves.by: {name!r} {said}")
            found.append(Grouping(name, column.values or (), start))
            if column.range is not None and edges is not None:
                if scaled or not _as_encoded(model, schema):
                    raise InputError(
                        f"evaluation.curves.by: a model sees numbers of {name!r} scaled once more; "
                        f"take model.feature_norm of {schema.norm:.4g} or more and no [data.scale]"
                    )
                found[-1] = _bands(name, start, column.range, edges)
        start += column.width
    known = [name for name, _ in schema.features]
    if missing := [name for name in settings.by if name not in known]:
        raise InputError(
            f"evaluation.curves.by: {missing[0]!r} is no feature of the table{suggestion(missing[0], known)}"
        )
    if any(len(each.labels) > _MOST_GROUPS for each in found):
        raise InputError(f"evaluation.curves.by: more than {_MOST_GROUPS} groups of one column")
    order = {name: place for place, name in enumerate(settings.by)}
    return tuple(sorted(found, key=lambda each: order[each.name])) or (ALL,)


def _as_encoded(model: ModelSettings, schema: TableSchema) -> bool:
    norm = getattr(model, "feature_norm", None)
    plain = getattr(model, "scaling", "at-most") == "at-most" and not getattr(model, "centre", 0.0)
    return plain and (norm is None or norm >= schema.norm)


def _bands(name: str, start: int, bounds: tuple[float, float], edges: tuple[float, ...]) -> Grouping:
    low, high = bounds
    if not all(low < edge <= high for edge in edges):
        raise InputError(f"evaluation.curves.edges: those of {name!r} are not within its range {list(bounds)}")
    middle = [f"{one:g} – {other:g}" for one, other in pairwise(edges)]
    labels = (f"below {edges[0]:g}", *middle, f"from {edges[-1]:g}")
    inside = 2.0 * (np.array(edges) - low) / (high - low) - 1.0  # as `encode` scales a cell
    return Grouping(name, labels, start, tuple(inside.tolist()))


@dataclass(frozen=True)
class CurveScores(SummedScores):
    """`base`, whose increments are a test record's right, loss, and its cell of every table.

    Guarantee: an increment is a function of its own record and the model, of norm `norm` at most and no further
    than `diameter` from any other and from zeros, whatever the model is: a score that is no number has a bin, too.
    """

    settings: CurveSettings
    groupings: tuple[Grouping, ...]

    @property
    def dimension(self) -> int:
        return 2 + sum(2 * len(each.labels) * self.settings.size for each in self.groupings)

    @property
    def norm(self) -> float:
        return self.settings.norm

    @cached_property
    def scale(self) -> float:
        """a: one count of a table, of all that are alike."""
        longest, _ = self._extent
        return math.sqrt(0.5 * self.settings.weight / len(self.groupings)) / longest

    @property
    def diameter(self) -> float:
        """The largest distance of two increments, or of one and zeros."""
        _, furthest = self._extent
        return math.sqrt(2.0 + len(self.groupings) * (self.scale * furthest) ** 2)

    @property
    def _extent(self) -> tuple[float, float]:
        block = Block(size=self.settings.size, kind="prefix")
        return extent_of((block, block))

    def contributions(self, model: Tensor, records: Records) -> Tensor:
        scores = super().contributions(model, records)
        logits = logits_of(self.base.outputs(model, records)).double()
        edges = torch.from_numpy(self.settings.logits).to(logits.device)
        logit = (logits[..., 1] - logits[..., 0]).nan_to_num(nan=0.0, posinf=REACH, neginf=-REACH)
        place = (logit.unsqueeze(-1) >= edges).sum(-1)
        lag = torch.arange(self.settings.size, device=place.device) - place.unsqueeze(-1)
        root = torch.from_numpy(self.scale * square_root(self.settings.size)).to(place.device)
        column = root[lag.clamp(min=0)].where(lag >= 0, 0.0)
        parts, label = [scores], records.labels.long().clamp(0, 1)
        for each in self.groupings:
            cell = (2 * each.codes(records.features) + label).expand(place.shape)
            own = torch.nn.functional.one_hot(cell, 2 * len(each.labels)).double()
            parts.append((own.unsqueeze(-1) * column.unsqueeze(-2)).flatten(-2))
        return torch.cat(parts, -1)

    def named(self, mean: Tensor) -> dict[str, Tensor]:
        return super().named(mean[..., :2])

    def tables(self, mean: Tensor, records: int) -> list[Floats]:
        """C n and its noise, (groups, 2, bins) of each table, of a mean (`dimension`,) over so many places."""
        found, start = [], 2
        for each in self.groupings:
            shape = (len(each.labels), 2, self.settings.size)
            stop = start + math.prod(shape)
            found.append(mean[start:stop].double().numpy().reshape(shape) * (records / self.scale))
            start = stop
        return found

    def figures(self, mean: Tensor, std: float, places: int, *, groups: bool = True) -> dict[str, float]:
        tables, noise = self.tables(mean, places), float(std) * places / self.scale
        (negative, positive), whole = together(tables, [noise] * len(tables))
        logits, cut = self.settings.logits, self.settings.cut
        parts = {"": TwoClasses(positive, negative, whole, logits, cut)}
        if groups and self.settings.by:
            parts |= {
                f"_of_{grouping.name}={label}": TwoClasses(counts[1], counts[0], noise, logits, cut)
                for grouping, table in zip(self.groupings, tables, strict=True)
                for label, counts in zip(grouping.labels, table, strict=True)
            }
        named = {
            f"test_{name}{of}": figure for of, part in parts.items() for name, figure in part.figures().items()
        }
        if groups:
            named |= {f"test_observed_where_{each.predicted:.3f}": each.share for each in parts[""].reliability()}
        ends = {f"{name}_{end}": getattr(figure, end) for name, figure in named.items() for end in ("low", "high")}
        return {name: figure.value for name, figure in named.items()} | ends


PROVED_DIAMETERS.add(CurveScores)
