"""Curves and figures from private sums: ROC and calibration of two classes, and survival curves.

For ROC and calibration, tables of class by score bin are added to the sums of an evaluation.  A test record, with
the logit s of class 1 over class 0, is in one cell of each of J tables: the cell of its group, its class and the
bin of s.  Its increment is

    (right - 1/2,  loss / bound - 1/2,  a C e_1,  …,  a C e_J),      a = √(w/J) √(1/2) / c

with right = 1 for a right prediction and else 0, loss at most `bound`, e_j the indicator of its cell in table j, C
the square root of prefix sums for each class of each group (indicators.py), c the largest norm of a column of C,
and w the tables' weight.  The increment's norm is at most √((1 + w)/2).  The distance of two increments is at most
√(2 + w).

Kaplan–Meier curves follow from noisy sums of events and of censored records.  There are d_b events and c_b
censored records in bin b, and one more bin has the records that leave behind the last edge:

    R_b = Σ_{i ≥ b} (d_i + c_i) - c_b/2,   h_b = d_b/R_b,   S = Π (1 - h),   Λ = -log S

R_b is the number at risk in bin b, h_b the hazard, S the survival at the upper edge of a bin, with the product
over the bins so far, and Λ the cumulative hazard. Λ̂ is the estimate of Λ.  The ends of its band of 95 % are the Λ
that solve

    (Λ̂ - Λ)² = 1.96² (v + u Λ)

Here v is the variance of the noise in Λ̂, by the delta method, and u Λ is the variance of sampling.  The factor u
is the mean of 1/R_b over the bins so far, or Greenwood's variance divided by Λ̂ if this is larger and Λ̂ is well
above its noise.

Figures of test records are written with intervals of 95 %, for [evaluation.curves]:

| key of results.json | figure of |
|---|---|
| `test_auc`, `test_auc_low`, `test_auc_high` | all test records |
| `test_auc_of_sex=Male`, `test_auc_of_sex=Male_low`, … | the records of a group |
| `test_auc_at_SILO`, `test_auc_low_at_SILO`, … | the records of a silo |
| `test_observed_where_0.212`, … | share of class 1 where the model's mean score is .212 |

Other figures of `TwoClassTable.figures` have keys like those of the AUC.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedpriv.addons.statistics.indicators import CellBlock, find_extent, prefix_root, prefix_root_matrix
from fedpriv.addons.statistics.roc import TwoClassTable, combine_groups
from fedpriv.core.errors import InputError, refuse, suggestion
from fedpriv.data.schema import TableSchema
from fedpriv.loss.objective import PROVED_DIAMETERS, Records
from fedpriv.loss.rows import ModelSettings
from fedpriv.loss.scores import SummedScores, to_logits
from fedpriv.show.summary import Metric, cells_at_point, find_metric, format_value, short_names, sweep_points
from fedpriv.study.results import Results

Z = 1.959963984540054
"""Half the length of a 95 % interval, in standard errors."""
_MIN_AT_RISK = 4.0
"""Number of records at risk above which a curve is shown, in standard errors of that number."""
_MIN_HAZARD = 3.0
"""Λ̂ above which Greenwood's variance can be used, in standard deviations of the noise in Λ̂."""
Floats = NDArray[np.float64]


class SurvivalBands(NamedTuple):
    """Survival curves with bands, (..., bins), at the upper edges of bins, and numbers at risk."""

    start: Floats
    """Number at risk at the start of each curve, (...)."""
    start_error: float
    """Standard deviation of the noise in `start`."""
    values: Floats
    """Survival S, (..., bins), in 0 … 1, not larger than in the bin before."""
    low: Floats
    """Lower end of the band, (..., bins)."""
    high: Floats
    """Upper end of the band, (..., bins)."""
    is_shown: NDArray[np.bool_]
    """Masks, (..., bins), true before the first bin with a number at risk of 4 standard errors or less.

    Values and bands mean nothing where the mask is false.
    """


def compute_survival_bands(released: Floats, std: float) -> SurvivalBands:
    """Compute survival curves and their bands from released sums of events and of censored records.

    The estimates are those of the module's docstring, with S cut so that it never rises.

    Args:
        released: Noisy vectors in records, (..., 2 bins + 1), of two parts.  The first has Cᵀ times the events of
            each bin.  The second has Cᵀ times the censored records of each bin, with one entry more for all
            records that leave behind the last edge.  C is the square root of prefix sums.
        std: Standard deviation of the noise in each coordinate, in records.

    Returns:
        Curves and bands at the upper edge of each bin, (..., bins), with the numbers at risk at the start, (...).
    """
    bins = released.shape[-1] // 2
    tail_events, tail_censored = np.zeros((bins + 1, 2 * bins + 1)), np.zeros((bins + 1, 2 * bins + 1))
    # Row b adds up the events, or the censored records, of bin b and all bins behind it.
    tail_events[:bins, :bins], tail_censored[:, bins:] = prefix_root_matrix(bins).T, prefix_root_matrix(bins + 1).T
    # With these rows d_b, R_b and the number at the start are linear forms of the release.
    event_weights = tail_events[:-1] - tail_events[1:]
    risk_weights = tail_events[:-1] + (tail_censored[:-1] + tail_censored[1:]) / 2.0
    start_weights = tail_events[0] + tail_censored[0]
    # R_b, the bins that are shown, and h_b.
    at_risk = released @ risk_weights.T
    is_shown = np.logical_and.accumulate(
        at_risk > _MIN_AT_RISK * std * np.linalg.norm(risk_weights, axis=1), axis=-1
    )
    at_risk = np.where(is_shown, at_risk, 1.0)  # any positive number, since these bins are not shown
    hazard = released @ event_weights.T / at_risk
    bounded_hazard = hazard.clip(0.0, 1.0 - 1e-9)
    # The noise in Λ to first order is a linear form of the noise of the release, with these weights.
    log_slope = 1.0 / (at_risk * (1.0 - bounded_hazard))
    noise_weights = np.cumsum(log_slope[..., None] * (event_weights - hazard[..., None] * risk_weights), axis=-2)
    noise_std = std * np.linalg.norm(noise_weights, axis=-1)
    survival = np.cumprod(np.maximum(0.0, 1.0 - hazard), axis=-1)
    cumulative_hazard = -np.log(np.where(survival > 0.0, survival, 1.0))
    mean_inverse_risk = np.cumsum(1.0 / at_risk, axis=-1) / np.arange(1, bins + 1)
    is_clear = cumulative_hazard > _MIN_HAZARD * noise_std
    greenwood_ratio = np.cumsum(bounded_hazard * log_slope, axis=-1) / np.where(is_clear, cumulative_hazard, 1.0)
    sampling = Z**2 * np.where(is_clear, np.maximum(mean_inverse_risk, greenwood_ratio), mean_inverse_risk)
    # The ends of the band are the roots of the quadratic equation for Λ, with Z² v and Z² u in it.
    centre = cumulative_hazard + sampling / 2.0
    half_length = np.sqrt((Z * noise_std) ** 2 + np.maximum(0.0, sampling * (cumulative_hazard + sampling / 4.0)))
    values = np.minimum.accumulate(np.minimum(1.0, survival), axis=-1)
    is_positive = survival > 0.0
    low = np.where(is_positive, np.exp(-(centre + half_length)), 0.0)
    high = np.where(is_positive, np.exp(-np.maximum(0.0, centre - half_length)), 1.0)
    return SurvivalBands(
        released @ start_weights,
        float(std * np.linalg.norm(start_weights)),
        values,
        np.minimum(low, values),
        np.maximum(high, values),
        is_shown,
    )


MAX_LOGIT = 8.0
"""Absolute value of a logit beyond which it is in an outermost bin."""
_MAX_GROUPS = 64


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
        2.0, description="of the tables together in mu squared under zero-out, where loss and accuracy have 1"
    )

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        """Check that no column is named twice in `by`, and that edges are of its columns and increase."""
        refuse(
            {
                "by: a column is named twice": len(set(self.by)) < len(self.by),
                **{f"edges of {name!r}, which is none of `by`": name not in self.by for name in self.edges},
                **{
                    f"edges of {name!r}: expected numbers that increase": (
                        not all(low < high for low, high in pairwise(edges))
                    )
                    for name, edges in self.edges.items()
                },
            },
            ValueError,
        )
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @cached_property
    def edge_logits(self) -> Floats:
        """Edges between bins, in logits, increasing.  A logit below the first edge is in bin 0."""
        cut = math.log(self.threshold / (1.0 - self.threshold))
        inner = np.linspace(-MAX_LOGIT, MAX_LOGIT, self.bins + 1)[1:-1]
        return inner if np.isclose(inner, cut, atol=1e-9).any() else np.sort(np.append(inner, cut))

    @property
    def bin_count(self) -> int:
        """Number of bins, with one more if the threshold is no edge of the bins of equal width.

        A threshold whose logit is within a relative 1e-5 of an edge counts as that edge.
        """
        return len(self.edge_logits) + 1

    @property
    def threshold_bin(self) -> int:
        """Index of the first bin whose records are predicted 1."""
        return int(np.abs(self.edge_logits - math.log(self.threshold / (1.0 - self.threshold))).argmin()) + 1

    @property
    def increment_norm(self) -> float:
        """Largest norm of a record's increment, including its loss and accuracy."""
        return math.sqrt(0.5) * math.sqrt(1.0 + self.weight)

    def add_tables(
        self, plain: SummedScores, schema: TableSchema | None, model: ModelSettings, *, scaled: bool
    ) -> "CurveScores":
        """Return the scores `plain` with the tables of the curves added.

        Raises:
            InputError: `make_groupings` refuses the columns or the data.
        """
        groupings = make_groupings(self, schema, model, is_scaled=scaled)
        return CurveScores(plain.base, plain.loss_bound, plain.classes, self, groupings)


@dataclass(frozen=True)
class Grouping:
    """A column that splits test records into groups, which are read off the features that the model sees.

    These are one-hot for a column of words, or a scaled number, between edges that are scaled alike.
    """

    name: str
    """Name of the column."""
    labels: tuple[str, ...]
    """Label of each group."""
    first_feature: int
    """Position of the column's first feature."""
    edges: tuple[float, ...] | None = None
    """Edges in the scale of the feature, or None for words."""

    def codes(self, features: Tensor) -> Tensor:
        """Return the group of each record, which depends on the features of that record only.

        Args:
            features: (..., B, f).

        Returns:
            Indices into `labels`, (..., B).
        """
        if self.edges is None:
            return features[..., self.first_feature : self.first_feature + len(self.labels)].argmax(-1)
        edges = torch.tensor(self.edges, dtype=features.dtype, device=features.device)
        return (features[..., self.first_feature, None] >= edges).sum(-1)


ONE_GROUP = Grouping("all", ("all",), 0, ())
"""Grouping that puts every record into one group."""


def make_groupings(
    settings: CurveSettings, schema: TableSchema | None, model: ModelSettings, *, is_scaled: bool
) -> tuple[Grouping, ...]:
    """Return one grouping for each column of `settings.by`, in their order, or `ONE_GROUP` without any.

    Args:
        settings: Columns and the edges of their groups.
        schema: Schema of the table, or None for other data.
        model: Settings of the model whose features are read.
        is_scaled: Whether columns of numbers are scaled by means and deviations ([data.scale]).

    Raises:
        InputError: The data are no table of two classes, a column or its edges cannot be used, the features that
            the model sees do not show the groups, or two groups would have the same key in results.json.
    """
    if schema is None or schema.class_count != 2:
        raise InputError("evaluation.curves: curves need a table of two classes; leave it out for other data")
    groupings, first_feature = [], 0
    # Features stand in the order of the sorted columns, so that their widths give the position of each column.
    for name, column in schema.sorted_columns:
        if name in settings.by:
            if getattr(model, "backbone", None) is not None:
                raise InputError(
                    "evaluation.curves.by: features of a backbone do not show the group of a record; leave it out"
                )
            edges = settings.edges.get(name)
            if (column.range is None) != (edges is None):
                reason = "needs edges" if edges is None else "is a column of words, which has no edges"
                raise InputError(f"evaluation.curves.by: {name!r} {reason}")
            groupings.append(Grouping(name, column.values or (), first_feature))  # that of a number is replaced
            if column.range is not None and edges is not None:
                if is_scaled or not _keeps_encoding(model, schema):
                    raise InputError(
                        f"evaluation.curves.by: a model sees numbers of {name!r} scaled once more; "
                        f"take model.feature_norm of {math.ceil(1e3 * schema.max_norm) / 1e3:g} or more, and no "
                        "model.scaling, model.centre or [data.scale]"
                    )
                groupings[-1] = _make_number_grouping(name, first_feature, column.range, edges)
        first_feature += column.width
    names = [name for name, _ in schema.sorted_columns]
    keys = sorted(
        f"{grouping.name}={label}{end}"
        for grouping in groupings
        for label in grouping.labels
        for end in ("", "_low", "_high")
    )
    refuse(
        {
            **{
                f"evaluation.curves.by: {name!r} is no feature of the table{suggestion(name, names)}": (
                    name not in names
                )
                for name in settings.by
            },
            f"evaluation.curves.by: a column has more than {_MAX_GROUPS} groups; leave it out, or give fewer "
            "edges": any(len(grouping.labels) > _MAX_GROUPS for grouping in groupings),
            **{
                f"evaluation.curves.by: results would hold two figures by the key test_auc_of_{key}, since _low "
                "and _high behind a group's name are the ends of its interval; rename one of the groups": True
                for key, next_key in pairwise(keys)
                if key == next_key
            },
        }
    )
    order = {name: index for index, name in enumerate(settings.by)}
    return tuple(sorted(groupings, key=lambda grouping: order[grouping.name])) or (ONE_GROUP,)


def _keeps_encoding(model: ModelSettings, schema: TableSchema) -> bool:
    """Return whether the model sees the numbers of a table as encoded, neither scaled nor centred."""
    norm = getattr(model, "feature_norm", None)
    plain = getattr(model, "scaling", "at-most") == "at-most" and not getattr(model, "centre", 0.0)
    return plain and (norm is None or norm >= schema.max_norm)


def _make_number_grouping(
    name: str, start: int, bounds: tuple[float, float], edges: tuple[float, ...]
) -> Grouping:
    """Make the groups of a number between edges, with the edges scaled like the features.

    Args:
        name: Name of the column.
        start: Position of the column's feature, which is 2 (x - low)/(high - low) - 1 for a number x.
        bounds: Range (low, high) of the column's numbers.
        edges: Edges in the unit of the numbers, increasing.

    Raises:
        InputError: An edge is not above the low end of the range, or is above the high end.
    """
    low, high = bounds
    if not all(low < edge <= high for edge in edges):
        raise InputError(
            f"evaluation.curves.edges: those of {name!r} are not within its range {list(bounds)} above its low end"
        )
    middle = [f"{low_edge:.15g} – {high_edge:.15g}" for low_edge, high_edge in pairwise(edges)]
    labels = (f"below {edges[0]:.15g}", *middle, f"from {edges[-1]:.15g}")
    inside = 2.0 * (np.array(edges) - low) / (high - low) - 1.0  # the scaling of a cell in `encode`
    return Grouping(name, labels, start, tuple(inside.tolist()))


@dataclass(frozen=True)
class CurveScores(SummedScores):
    """Scores of the model `base`, by which an increment has accuracy, loss and a cell of each table.

    There is a table for each of the `groupings`, which split the records into groups by their features.

    Guarantee: but for rounding, an increment is a function of its own record and the model, its norm is at most
    `norm`, and it is no further than `diameter` from any other increment and from zeros.  All this holds whatever
    the model is, because a score that is not a number has a bin, too.
    """

    settings: CurveSettings
    """Bins, threshold and weight of the tables."""
    groupings: tuple[Grouping, ...]
    """Grouping of each table."""

    @property
    def dimension(self) -> int:
        return 2 + sum(2 * len(grouping.labels) * self.settings.bin_count for grouping in self.groupings)

    @property
    def norm(self) -> float:
        return self.settings.increment_norm

    @cached_property
    def scale(self) -> float:
        """Factor a of a column of C in an increment, the same for all tables."""
        return math.sqrt(0.5 * self.settings.weight / len(self.groupings)) / self._extent[0]

    @property
    def diameter(self) -> float:
        """Largest distance of two increments, or of one and zeros."""
        return math.sqrt(2.0 + len(self.groupings) * (self.scale * self._extent[1]) ** 2)

    @property
    def _extent(self) -> tuple[float, float]:
        """Largest norm of a column of C, and largest distance of two columns (`find_extent`)."""
        return find_extent((CellBlock(size=self.settings.bin_count, kind="prefix"),) * 2)

    def contributions(self, model: Tensor, records: Records) -> Tensor:
        """Return the increments of the records, (..., B, `dimension`).

        The first two entries are those of accuracy and loss.  For each grouping, a vector a C e_j follows, with
        the cell j of the record's group, class and bin of the logit s of class 1 over class 0.

        Args:
            model: Parameters, (..., d).
            records: Test records with features (..., B, f) and labels 0 or 1.
        """
        scores = super().contributions(model, records)
        logits = to_logits(self.base.outputs(model, records)).double()
        edges = torch.from_numpy(self.settings.edge_logits).to(logits.device)
        # NaN counts as 0, so that every record is in a bin.
        logit = (logits[..., 1] - logits[..., 0]).nan_to_num(nan=0.0, posinf=MAX_LOGIT, neginf=-MAX_LOGIT)
        bin_index = (logit.unsqueeze(-1) >= edges).sum(-1)
        # Entry r of a column of C is f_{r - bin}, with f the first column, and 0 above the bin.
        lag = torch.arange(self.settings.bin_count, device=bin_index.device) - bin_index.unsqueeze(-1)
        root = torch.from_numpy(self.scale * prefix_root(self.settings.bin_count)).to(bin_index.device)
        column = root[lag.clamp(min=0)].where(lag >= 0, 0.0)
        parts, label = [scores], records.labels.long().clamp(0, 1)
        for grouping in self.groupings:
            # The column stands in the block of bins of the record's group and class, the other blocks are 0.
            cell = (2 * grouping.codes(records.features) + label).expand(bin_index.shape)
            one_hot = torch.nn.functional.one_hot(cell, 2 * len(grouping.labels)).double()
            parts.append((one_hot.unsqueeze(-1) * column.unsqueeze(-2)).flatten(-2))
        return torch.cat(parts, -1)

    def to_metrics(self, mean: Tensor) -> dict[str, Tensor]:
        return super().to_metrics(mean[..., :2])

    def tables(self, mean: Tensor, records: int) -> list[Floats]:
        """Return the noisy C n of each table, in records, with n the counts of the bins of a group and class.

        Args:
            mean: Mean of the increments with its noise, (`dimension`,).
            records: Number of row indices that the mean is over, those of absent rows included.

        Returns:
            A table (groups, 2, bins) for each grouping, class 0 first.
        """
        shapes = [(len(grouping.labels), 2, self.settings.bin_count) for grouping in self.groupings]
        parts = np.split(mean[2:].double().numpy(), np.cumsum(list(map(math.prod, shapes))))[:-1]
        return [part.reshape(shape) * (records / self.scale) for part, shape in zip(parts, shapes, strict=True)]

    def extra_figures(self, mean: Tensor, std: float, places: int, *, groups: bool = True) -> dict[str, float]:
        """Return the figures and their intervals, under the keys of the module's table without those of silos.

        A figure has three keys: for its value, and with "_low" and "_high" for the ends of its interval.

        Args:
            mean: Mean of the increments with its noise, (`dimension`,).
            std: Standard deviation of the noise in each coordinate of the mean.
            places: Number of row indices that the mean is over.  A row index is that of a record, or of an absent
                row, which adds 0 to the mean's sum.
            groups: Whether to add the figures of groups, if there are groups, and the shares of class 1 by score.
        """
        tables, noise = self.tables(mean, places), float(std) * places / self.scale
        # The table of every grouping has all records, so that together they give one of all records.
        (negative, positive), std_of_all = combine_groups(tables, [noise] * len(tables))
        logits, threshold_bin = self.settings.edge_logits, self.settings.threshold_bin
        parts = {"": TwoClassTable(positive, negative, std_of_all, logits, threshold_bin)}
        if groups and self.settings.by:
            parts |= {
                f"_of_{grouping.name}={label}": TwoClassTable(counts[1], counts[0], noise, logits, threshold_bin)
                for grouping, table in zip(self.groupings, tables, strict=True)
                for label, counts in zip(grouping.labels, table, strict=True)
            }
        estimates = {
            f"test_{name}{suffix}": estimate
            for suffix, roc_table in parts.items()
            for name, estimate in roc_table.figures().items()
        }
        if groups:
            estimates |= {
                f"test_observed_where_{reliability_bin.mean_score:.3f}": reliability_bin.observed_share
                for reliability_bin in parts[""].reliability()
            }
        ends = {
            f"{name}_{end}": getattr(estimate, end)
            for name, estimate in estimates.items()
            for end in ("low", "high")
        }
        return {name: estimate.value for name, estimate in estimates.items()} | ends


PROVED_DIAMETERS.add(CurveScores)


_FIGURE_NAMES = ("auc", "balanced_accuracy", "sensitivity", "specificity", "calibration_error_squared")
_LOW_KEY = re.compile(rf"test_({'|'.join(_FIGURE_NAMES)})(?:_low(_at_.+)?|(_of_.+)_low)")
_OBSERVED_KEY = re.compile(r"test_observed_where_([0-9.]+)")
LabelledTable = tuple[str, Sequence[str], Sequence[Sequence[str]], int]
"""Caption, header, body and number of label columns of a table."""


def intervals_of(results: Results) -> list[LabelledTable]:
    """Return a table of figures and one of reliability curves, as far as the results have them.

    The first has a line for each point of the sweep and each set of test records with figures: all of them, those
    of a silo or those of a group.  A figure there is the mean over the runs of the point that have it.  The second
    has a line for each run and bin of the score, with the observed share of class 1.
    """
    # The runs of a point, its `cells`, differ in the seed.  A suffix of figures names the set of records.
    figures, observed = list[list[str]](), list[list[str]]()
    for point in sweep_points(results):
        cells, point_labels = cells_at_point(results, point), list(map(format_value, point.values()))
        for suffix in dict.fromkeys(suffix for cell in cells for suffix in _find_suffixes(cell)):
            texts = [
                _format_interval(cells, _interval_keys(name, suffix), _find_figure_metric(name))
                for name in _FIGURE_NAMES
            ]
            group = f"at {suffix[4:]}" if suffix.startswith("_at_") else suffix.removeprefix("_of_") or "all"
            figures.append([*point_labels, group, *texts])
        for cell in cells:
            for match in sorted(
                filter(None, map(_OBSERVED_KEY.fullmatch, cell)), key=lambda match: float(match[1])
            ):
                ends = (match[0], f"{match[0]}_low", f"{match[0]}_high")
                metric = Metric(match[0], "", 100.0, 1, 1)
                observed.append(
                    [
                        *point_labels,
                        str(cell["seed"]),
                        f"{100.0 * float(match[1]):.1f}",
                        _format_interval([cell], ends, metric),
                    ]
                )
    names = list(short_names(results.axes).values())
    titles = [_find_figure_metric(name).title for name in _FIGURE_NAMES]
    tables: list[LabelledTable] = []
    if figures:
        caption = "test records of the silos, with intervals of 95 % that have sampling and noise in them"
        tables.append((caption, [*names, "of", *titles], figures, len(names) + 1))
    if observed:
        caption = "share of class 1 among test records by the model's mean score, with intervals of 95 %"
        tables.append((caption, [*names, "seed", "score (%)", "observed (%)"], observed, len(names) + 2))
    return tables


def _find_suffixes(cell: Mapping[str, Any]) -> list[str]:
    """Return the suffix of each figure with an interval: "", "_at_SILO" or "_of_COLUMN=LABEL"."""
    matches = filter(None, map(_LOW_KEY.fullmatch, cell))
    # Without its figure a key is no lower end, but the figure of a label that ends in "_low".
    return [suffix for match in matches if f"test_{match[1]}{(suffix := match[2] or match[3] or '')}" in cell]


def _interval_keys(name: str, suffix: str) -> tuple[str, str, str]:
    """Return the keys of a figure and of the lower and upper end of its interval."""
    if suffix.startswith("_of_"):
        return (key := f"test_{name}{suffix}"), f"{key}_low", f"{key}_high"
    return f"test_{name}{suffix}", f"test_{name}_low{suffix}", f"test_{name}_high{suffix}"


def _find_figure_metric(name: str) -> Metric:
    metric = find_metric(f"test_{name}")
    assert metric is not None
    return metric


def _format_interval(cells: Sequence[Mapping[str, Any]], keys: tuple[str, str, str], metric: Metric) -> str:
    """Format the means of a figure and its ends over the cells with all three, or a dash without any."""
    complete_cells = [cell for cell in cells if all(key in cell for key in keys)]
    if not complete_cells:
        return "–"
    value, low, high = (
        f"{metric.factor * fmean(cell[key] for cell in complete_cells):.{metric.digits}f}" for key in keys
    )
    return f"{value} ({low} – {high})"
