"""Counts of records in the cells of public tables: a model whose increments are columns of public matrices.

A record is in one cell of each table j; its increment is (a_j C_j e_k)_j for the cells k that it is in, of norm 1
at most.  C_j is the identity, or the square root of prefix or suffix sums in blocks of ordered cells:

| kind of a block | C | what follows from C n + noise |
|---|---|---|
| "plain" | I | counts |
| "prefix" | Σ f_i shift^i, f_i = C(2i, i)/4^i | N_k = Σ_{i ≤ k} n_i, with noise of σ √(Σ_{i ≤ k} f_i²) |
| "suffix" | its transpose | R_k = Σ_{i ≥ k} n_i |

A table of moments has (x, 2x² - 1, 1.7) in place of a column, of a number scaled to x in -1 … 1: the third counts
the records that have one, at no cost, since two with a value are further apart than one is from zeros.

Weights a_j = √(w_j / Σ w) / max_k ‖C_j e_k‖ give every table its share of one budget, with one deviation for all
coordinates.  The sensitivity is known better than by the clip: `Indicators.diameter`.

Source: Fichtenberger, Henzinger & Upadhyay 2023, "Constant matters" (the square root of prefix sums).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.replicates import Scalar
from fedpriv.data.encode import MOMENTS_DIAMETER
from fedpriv.loss.clipping import compute_clipping, upper_norm, vector_bounds
from fedpriv.loss.objective import (
    PROVED_DIAMETERS,
    SUMMED_BY_CELL,
    Batch,
    Deterministic,
    Increment,
    ModelEvaluation,
    Query,
    Records,
)
from fedpriv.loss.rows import Model, ModelSettings
from fedpriv.participation.orders import Dependence

STATISTICS = "statistics"
PRESENT_MOMENT = 1.7
"""The third moment of a record that has a value."""
MAX_CELLS, MAX_ORDERED_CELLS = 2**16, 2**12
"""Of all tables together, and of one block of ordered cells."""
_CHUNK = 2**22
_MISSING_CODE = 9.0
Floats = NDArray[np.float64]


class _PublicModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Edges = Annotated[tuple[float, ...], Field(strict=False, min_length=2)]


class Axis(_PublicModel):
    """One column of a table: numbers between public edges, or words."""

    column: Annotated[int, Field(ge=0)] = Field(description="place of the column among the raw cells of a record")
    edges: Edges | None = Field(None, description="of bins [e, e'), the last one closed")
    words: Annotated[int, Field(ge=1, le=MAX_CELLS)] | None = Field(
        None, description="how many words the column has"
    )

    @model_validator(mode="after")
    def _bins_or_words(self) -> Self:
        if (self.edges is None) == (self.words is None):
            raise ValueError("an axis has either edges, for numbers, or words")
        if self.edges is not None and not all(low < high for low, high in pairwise(self.edges)):
            raise ValueError(f"edges = {list(self.edges)[:8]}: expected numbers that increase")
        return self

    @property
    def ordered_count(self) -> int:
        """Below, bins and above; or words: the cells apart from that of missing values."""
        return len(self.edges) + 1 if self.edges is not None else self.words or 0

    @property
    def cell_count(self) -> int:
        return self.ordered_count + 1

    def codes(self, raw: Floats) -> NDArray[np.int64]:
        """The cell of every value (n,), the last for a missing one: a function of that value alone."""
        missing = np.isnan(raw)
        if self.edges is None:
            held = np.where(missing, -1.0, raw)
            known = (held >= 0.0) & (held < self.ordered_count) & (held == np.floor(held))
            return np.where(known, held, self.ordered_count).astype(np.int64)
        edges = np.array(self.edges)
        found = np.searchsorted(edges, raw, side="right")
        found[raw == edges[-1]] = len(edges) - 1
        return np.where(missing, self.ordered_count, found).astype(np.int64)


class CellBlock(BaseModel):
    """Cells of a table that are summed together, in their order."""

    model_config = ConfigDict(frozen=True)

    size: int
    kind: Literal["plain", "prefix", "suffix"]


class Cells(_PublicModel):
    """One table: its axes, what is summed over it, and its share of the budget."""

    axes: Annotated[tuple[Axis, ...], Field(strict=False, min_length=1, max_length=4)]
    form: Literal["counts", "moments", "prefix", "survival"] = Field(
        "counts",
        description='"moments": of one number, whose edges are its range; "prefix": sums over the ordered cells '
        'of the last axis; "survival": the last two axes are a time, with edges, and an event, of two words, 0 if '
        "it was not seen",
    )
    weight: Annotated[float, Field(gt=0.0, le=1e6)] = Field(1.0, description="of its part of mu squared")

    @model_validator(mode="after")
    def _has_axes(self) -> Self:
        if len({axis.column for axis in self.axes}) < len(self.axes):
            raise ValueError("a table has a column twice")
        if (
            cells := math.prod(axis.cell_count for axis in self.axes)
        ) > 2 * MAX_CELLS:  # before a list of them is made
            raise ValueError(f"{cells} cells of one table, at most {MAX_CELLS} are released together")
        if self.form == "moments" and (len(self.axes) > 1 or len(self.axes[0].edges or ()) != 2):
            raise ValueError('form = "moments" is of one number, and its two edges are its range')
        if self.form == "prefix" and self.axes[-1].edges is None:
            raise ValueError('form = "prefix" is of numbers: its last axis has edges')
        if self.form == "survival" and (
            len(self.axes) < 2 or self.axes[-2].edges is None or self.axes[-1].words != 2
        ):
            raise ValueError('form = "survival" needs a time, with edges, and an event of two words')
        if any(block.size > MAX_ORDERED_CELLS for block in self.blocks if block.kind != "plain"):
            raise ValueError(f"more than {MAX_ORDERED_CELLS} ordered cells")
        return self

    @property
    def group_axes(self) -> tuple[Axis, ...]:
        """The axes that are crossed: all of counts, and those by which a curve is taken apart."""
        return self.axes[: {"counts": None, "moments": 0, "prefix": -1, "survival": -2}[self.form]]

    @property
    def group_count(self) -> int:
        return math.prod(axis.cell_count for axis in self.group_axes)

    @property
    def bin_count(self) -> int:
        """Bins of time, of a table of survival."""
        return self.axes[-2].cell_count - 3

    @property
    def blocks(self) -> tuple[CellBlock, ...]:
        """In the order of the cells; a curve has the same ones for every group."""
        if self.form == "counts":
            return (CellBlock(size=math.prod(axis.cell_count for axis in self.axes), kind="plain"),)
        if self.form == "moments":
            return (CellBlock(size=3, kind="plain"),)
        if self.form == "prefix":
            sums = [CellBlock(size=self.axes[-1].ordered_count, kind="prefix")]
        else:  # events, and censored records with those beyond all bins
            sums = [CellBlock(size=size, kind="suffix") for size in (self.bin_count, self.bin_count + 1)]
        return (*sums, CellBlock(size=1, kind="plain")) * self.group_count

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def extent(self) -> tuple[float, float]:
        """(c, Δ) of the table's increments; see `find_extent`."""
        if self.form == "moments":
            return math.sqrt(2.0 + PRESENT_MOMENT**2), max(MOMENTS_DIAMETER, math.sqrt(2.0 + PRESENT_MOMENT**2))
        return find_extent(self.blocks)

    def codes(self, raw: Floats) -> NDArray[np.int64] | Floats:
        """The cell (n,) of every record's raw cells (n, columns); of moments x, or 9 where there is no number."""
        if self.form == "moments":
            (low, high), held = self.axes[0].edges or (0.0, 1.0), raw[:, self.axes[0].column]
            return np.where(np.isnan(held), _MISSING_CODE, 2.0 * (held.clip(low, high) - low) / (high - low) - 1.0)
        each = [axis.codes(raw[:, axis.column]) for axis in self.axes]
        place = np.zeros(len(raw), np.int64)
        for axis, cell in zip(self.group_axes, each, strict=False):
            place = place * axis.cell_count + cell
        if self.form == "counts":
            return place
        if self.form == "prefix":
            return place * self.axes[-1].cell_count + each[-1]
        time, event, bins = each[-2], each[-1], self.bin_count
        beyond, lacking = time == bins + 1, (time == 0) | (time == bins + 2) | (event == 2)
        inside = np.where(event == 1, time - 1, bins + time - 1)
        left = np.where(lacking, 2 * bins + 1, np.where(beyond, 2 * bins, inside))
        return np.asarray(place * (2 * bins + 2) + left, np.int64)


def prefix_root(size: int) -> Floats:
    """f_0 … f_{size-1}, f_i = C(2i, i)/4^i: the square root of prefix sums."""
    steps = np.arange(1.0, size)
    return np.concatenate([[1.0], np.cumprod((2.0 * steps - 1.0) / (2.0 * steps))])[:size]


@lru_cache(maxsize=64)
def prefix_root_matrix(size: int) -> Floats:
    """The square root of prefix sums as a matrix, (size, size): row k of its square adds up cells 0 … k."""
    return lower_toeplitz(prefix_root(size))


def lower_toeplitz(values: Floats) -> Floats:
    """The lower triangular matrix with these values below one another in its first column."""
    lag = np.subtract.outer(np.arange(len(values)), np.arange(len(values)))
    return np.where(lag >= 0, values[lag.clip(0)], 0.0)


@lru_cache(maxsize=256)
def _squared_extent(block: CellBlock) -> tuple[float, float]:
    """(largest norm of a column, largest distance of two columns) of a block's C, squared."""
    if block.kind == "plain":
        return 1.0, 2.0 * (block.size > 1)
    values, furthest = prefix_root(block.size), 0.0
    for lag in range(1, block.size):  # the first column has the most rows behind it
        moved = values.copy()
        moved[lag:] -= values[:-lag]
        furthest = max(furthest, float(moved @ moved))
    return float(values @ values), furthest


def find_extent(blocks: Sequence[CellBlock]) -> tuple[float, float]:
    """(c, Δ): the largest norm of a column of C, and the largest distance of two columns, or of one and zeros.

    Guarantee: no column is longer than c and no two records, one of which may be in no cell, are further apart
    than Δ, but for a relative 2^-40.
    """
    each = [_squared_extent(block) for block in blocks]
    norms = sorted((longest for longest, _ in each), reverse=True)
    apart = max(furthest for _, furthest in each)
    across = norms[0] + norms[1] if len(norms) > 1 else 0.0
    return math.sqrt(norms[0]), math.sqrt(max(apart, across, norms[0]))


class StatisticsSettings(ModelSettings):
    """Which tables are counted."""

    tables: Annotated[tuple[Cells, ...], Field(strict=False, min_length=1, max_length=64)]
    real: bool = Field(False, description="whether labels are real numbers; they are not looked at")

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if (cells := sum(table.size for table in self.tables)) > MAX_CELLS:
            raise ValueError(f"{cells} cells of all tables, at most {MAX_CELLS} are released together")
        return self

    @property
    def regression(self) -> bool:
        return self.real

    @property
    def used_columns(self) -> set[int]:
        """Places of the raw cells that are looked at."""
        return {axis.column for table in self.tables for axis in table.axes}

    @cached_property
    def extents(self) -> tuple[tuple[float, float], ...]:
        """(c_j, Δ_j) of every table."""
        return tuple(table.extent for table in self.tables)

    @cached_property
    def scales(self) -> tuple[float, ...]:
        """a_j."""
        whole = sum(table.weight for table in self.tables)
        return tuple(
            math.sqrt(table.weight / whole) / norm
            for table, (norm, _) in zip(self.tables, self.extents, strict=True)
        )


def encode_cells(cells: NDArray[Any], dtype: torch.dtype, settings: StatisticsSettings) -> Tensor:
    """Raw cells (n, columns) -> codes (n, tables), each row a function of that record's own cells."""
    if cells.ndim != 2 or cells.dtype != np.float64 or max(settings.used_columns) >= cells.shape[1]:
        raise InputError(
            f"model.name = {STATISTICS!r}: counts cells of a table; a record here has shape {cells.shape[1:]}"
        )
    return torch.from_numpy(np.stack([table.codes(cells) for table in settings.tables], axis=1)).to(dtype)


@dataclass(frozen=True)
class Indicators(Deterministic):
    """-(a_j C_j e_k)_j for a record in the cells k: one step of size 1 from 0 gives their mean.

    Guarantee: an increment is one of finitely many public vectors, of norm 1 at most and no further than
    `diameter` from each other and from zeros, whatever a server asks; a record in a cell that is none adds zeros.
    """

    settings: StatisticsSettings
    dtype: torch.dtype
    dependence = Dependence.RECORD

    @property
    def dimension(self) -> int:
        return sum(table.size for table in self.settings.tables)

    @property
    def lipschitz(self) -> float:
        return 1.0

    @property
    def smoothness(self) -> float:
        return 0.0

    @property
    def diameter(self) -> float:
        """The largest distance of two increments, or of one and zeros: √(Σ (a_j Δ_j)²)."""
        apart = zip(self.settings.scales, self.settings.extents, strict=True)
        return math.sqrt(sum((scale * furthest) ** 2 for scale, (_, furthest) in apart))

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.dtype)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        codes, weights = batch.records.features, batch.weights
        lead = np.broadcast_shapes(query.points[0].shape[:-1], codes.shape[:-2])
        total = torch.zeros(*lead, self.dimension, dtype=weights.dtype, device=codes.device)
        clipped = torch.zeros(lead, dtype=torch.int64, device=codes.device)
        rows = max(1, _CHUNK // (self.dimension * math.prod(codes.shape[:-2])))
        for start in range(0, codes.shape[-2], rows):
            some, weight = codes[..., start : start + rows, :], weights[..., start : start + rows]
            vectors = self._make_vectors(some, weights.dtype) * sum(query.coefficients)
            found = compute_clipping(vector_bounds(upper_norm(vectors)), weight, clip)
            total = total + (found.factor.unsqueeze(-2) @ found.zero_unrepresentable(vectors)).squeeze(-2)
            clipped = clipped + found.clipped_count
        return Increment(total, clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        vectors = self._make_vectors(batch.records.features, batch.weights.dtype) * sum(query.coefficients)
        found = compute_clipping(vector_bounds(upper_norm(vectors)), batch.weights, clip)
        return found.zero_unrepresentable(vectors) * found.factor.unsqueeze(-1)

    def sum_integer_vectors(
        self, codes: Floats, there: NDArray[np.bool_], norm: int, factor: float
    ) -> NDArray[np.int64]:
        """The sum of the integer vectors of the records that are `there`, with `codes` (n, tables): (d,).

        A record's are -trunc(scale · a_j C_j e_k), with the same scale, `factor` or less, for all of them.

        Guarantee: a record adds a vector of norm `norm` at most, truncation included, a function of its own cells
        and public numbers.  The time it takes depends on n and public numbers: cells are counted.
        """
        lengths = (c for c, _ in self.settings.extents)
        longest = math.hypot(*(a * c for a, c in zip(self.settings.scales, lengths, strict=True)))
        scale = math.copysign(min(abs(factor), norm * (1.0 - 2.0**-30) / longest), factor)
        parts = []
        for place, (table, a) in enumerate(zip(self.settings.tables, self.settings.scales, strict=True)):
            own = codes[there, place]
            if table.form == "moments":
                x = own[np.abs(own) <= 1.0]
                moments = np.stack([x, 2.0 * x * x - 1.0, np.full_like(x, PRESENT_MOMENT)])
                parts.append(np.trunc(scale * a * moments).astype(np.int64).sum(axis=1))
                continue
            inside = own[(own >= 0) & (own < table.size)].astype(np.int64)
            counts, start = np.bincount(inside, minlength=table.size), 0
            for block in table.blocks:
                held = counts[start : start + block.size]
                start += block.size
                if block.kind == "plain":
                    parts.append(held * int(scale * a))
                    continue
                values = np.trunc(scale * a * prefix_root(block.size)).astype(np.int64)
                backwards = slice(None, None, -1 if block.kind == "suffix" else 1)
                parts.append(np.convolve(held[backwards], values)[: block.size][backwards])
        return -np.concatenate(parts)

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        """0: there is nothing to be right about."""
        return ModelEvaluation(point.sum(-1) * 0.0, None)

    def _make_vectors(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """-(a_j C_j e_k)_j, (..., B, d)."""
        parts = []
        for place, (table, columns) in enumerate(zip(self.settings.tables, self._column_tensors, strict=True)):
            low, high, sign, values = (each.to(codes.device) for each in columns)
            if table.form == "moments":
                x = codes[..., place, None].to(dtype)
                moments = torch.cat([x, 2.0 * x * x - 1.0, torch.full_like(x, PRESENT_MOMENT)], dim=-1)
                parts.append((moments * values[0].to(dtype)).where(x.abs() <= 1.0, 0.0))
                continue
            code = codes[..., place].round().long()
            there = (code >= 0) & (code < len(low))
            code = code.clamp(0, len(low) - 1)
            rows = torch.arange(len(low), device=codes.device)
            lag = (rows - code.unsqueeze(-1)) * sign[code].unsqueeze(-1)
            held = (rows >= low[code].unsqueeze(-1)) & (rows < high[code].unsqueeze(-1)) & (lag >= 0)
            parts.append(values.to(dtype)[lag.clamp(0, len(values) - 1)].where(held & there.unsqueeze(-1), 0.0))
        return -torch.cat(parts, dim=-1)

    @cached_property
    def _column_tensors(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of every table: rows that a cell's column reaches [low, high), its direction, and a_j f."""
        found = []
        for table, scale in zip(self.settings.tables, self.settings.scales, strict=True):
            low, high, sign, start = [], [], [], 0
            for block in table.blocks:
                places = range(start, start + block.size)
                plain = block.kind == "plain"
                low += [each if plain else start for each in places]
                high += [each + 1 if plain else start + block.size for each in places]
                sign += [-1 if block.kind == "suffix" else 1] * block.size
                start += block.size
            longest = max([1, *(block.size for block in table.blocks if block.kind != "plain")])
            values = torch.from_numpy(scale * prefix_root(longest))
            found.append((torch.tensor(low), torch.tensor(high), torch.tensor(sign), values))
        return found


def make_indicators(
    _shape: tuple[int, ...], _classes: int, dtype: torch.dtype, settings: StatisticsSettings
) -> Indicators:
    return Indicators(settings, dtype)


def check_cell(cell: Any) -> None:
    """ValueError for what cells cannot be counted of: no table, one that drops rows, records drawn anew."""
    data, schema = cell.data, cell.data.table_schema
    if schema is None:
        raise ValueError(f"data.name = {data.name!r}: statistics are of a table")
    if schema.missing == "drop":
        raise ValueError(
            'table.missing = "drop": a row with a missing value is to be counted as missing; give every '
            "column `missing`, what stands in for it"
        )
    if data.scale is not None or data.validation is not None or data.split_and_spared != (None, None):
        raise ValueError("data: scale, validation, split and spared say nothing of counts; leave them out")
    if cell.privacy.shares:
        raise ValueError("privacy.shares: a count weighs the records of all silos alike; leave it out")


PROVED_DIAMETERS.add(Indicators)
SUMMED_BY_CELL.add(Indicators)
ROW = Model(
    StatisticsSettings,
    encode_cells,
    make_indicators,
    evaluated=False,
    of_cells=True,
    check=check_cell,
    guard=STATISTICS,
)
