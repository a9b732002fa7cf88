"""Model that counts records in the cells of public tables.

A record is in at most one cell k_j of each table j.  A release is the noisy mean of the vectors (a_j C_j
e_{k_j})_j, columns of public matrices, of norm at most 1.  C_j has blocks of cells on its diagonal: the identity,
or for ordered cells the square root of prefix or suffix sums.  With n for the counts of a block, and noise of
standard deviation σ in units of these counts:

| kind of a block | C | estimates from C n + noise |
|---|---|---|
| "plain" | I | counts |
| "prefix" | Σ f_i shift^i, f_i = C(2i, i)/4^i | N_k = Σ_{i ≤ k} n_i, with noise of std σ √(Σ_{i ≤ k} f_i²) |
| "suffix" | its transpose | R_k = Σ_{i ≥ k} n_i |

A table of moments of a number has (x, 2x² - 1, 1.7) in place of a column.  Here x is the number, cut to its public
range, which is scaled to -1 … 1.  The third coordinate counts the records that have a value.

The columns of a table are its axes, whose bins or words are crossed.  The form of a table is one of these:

* "counts": the number of records in each cell.
* "moments": the sums of (x, 2x² - 1, 1.7) of one number.
* "prefix": sums over the ordered cells of the last axis, for quantiles.
* "survival": sums over bins of a time, for records with an event and for censored ones.

In the last two, other axes split the records into groups, each with a curve.  The code of a record in a table is
its cell, or x for moments, which is 9 if the number is missing.

The noise has one standard deviation in all coordinates.  With the scales a_j = √(w_j / Σ w) / max_k ‖C_j e_k‖ a
record's coordinates in table j have a squared norm of at most w_j / Σ w, by the table's weight w_j.  This is the
table's part of μ² under zero-out.

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

from fedpriv.core.errors import InputError, refuse
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
"""Third moment of a record that has a value."""
MAX_CELLS, MAX_ORDERED_CELLS = 2**16, 2**12
"""Most cells of all tables together, and of one block of ordered cells."""
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
        edges = self.edges or ()
        refuse(
            {
                "an axis has either edges, for numbers, or words": (self.edges is None) == (self.words is None),
                f"edges = {list(edges)[:8]}: expected numbers that increase": (
                    not all(low < high for low, high in pairwise(edges))
                ),
            },
            ValueError,
        )
        return self

    @property
    def ordered_count(self) -> int:
        """Number of cells (`codes`), not counting the cell of missing values."""
        return len(self.edges) + 1 if self.edges is not None else self.words or 0

    @property
    def cell_count(self) -> int:
        return self.ordered_count + 1

    def codes(self, raw: Floats) -> NDArray[np.int64]:
        """Return the cell of each value.

        Args:
            raw: Numbers, or indices of words, (n,), with NaN for a missing one.

        Returns:
            Cells (n,).  Numbers have cell 0 below all edges, then the bins, and a cell above all edges.  Words
            have a cell each.  The last cell has missing values, and values that are no index of a word.
        """
        missing = np.isnan(raw)
        if self.edges is None:
            filled = np.where(missing, -1.0, raw)
            is_word = (filled >= 0.0) & (filled < self.ordered_count) & (filled == np.floor(filled))
            return np.where(is_word, filled, self.ordered_count).astype(np.int64)
        edges = np.array(self.edges)
        cells = np.searchsorted(edges, raw, side="right")
        cells[raw == edges[-1]] = len(edges) - 1  # the last bin contains its upper edge
        return np.where(missing, self.ordered_count, cells).astype(np.int64)


class CellBlock(BaseModel):
    """Consecutive cells of a table with one matrix C: single counts, or sums in the order of the cells."""

    model_config = ConfigDict(frozen=True)

    size: int
    kind: Literal["plain", "prefix", "suffix"]


class Cells(_PublicModel):
    """One table: its axes, the form of its sums, and its weight in the budget."""

    axes: Annotated[tuple[Axis, ...], Field(strict=False, min_length=1, max_length=4)]
    form: Literal["counts", "moments", "prefix", "survival"] = Field(
        "counts",
        description='"moments": of one number, whose edges are its range; "prefix": sums over the ordered cells '
        'of the last axis; "survival": the last two axes are a time, with edges, and an event, of two words, 0 if '
        "it was not seen",
    )
    weight: Annotated[float, Field(gt=0.0, le=1e6)] = Field(
        1.0, description="of its part of mu squared under zero-out"
    )

    @model_validator(mode="after")
    def _has_axes(self) -> Self:
        """Check that columns are distinct, that cells are not too many, and that the axes fit the form."""
        columns, cells = {axis.column for axis in self.axes}, math.prod(axis.cell_count for axis in self.axes)
        is_survival = len(self.axes) > 1 and self.axes[-2].edges is not None and self.axes[-1].words == 2
        # A coarse limit, before `blocks` makes a list of all groups.  `StatisticsSettings` has the exact one.
        refuse(
            {
                "a table has a column twice": len(columns) < len(self.axes),
                f"{cells} cells of one table, at most {MAX_CELLS} are released together": cells > 4 * MAX_CELLS,
                'form = "moments" is of one number, and its two edges are its range': (
                    self.form == "moments" and (len(self.axes) > 1 or len(self.axes[0].edges or ()) != 2)
                ),
                'form = "prefix" is of numbers: its last axis has edges': (
                    self.form == "prefix" and self.axes[-1].edges is None
                ),
                'form = "survival" needs a time, with edges, and an event of two words': (
                    self.form == "survival" and not is_survival
                ),
            },
            ValueError,
        )
        if any(block.size > MAX_ORDERED_CELLS for block in self.blocks if block.kind != "plain"):
            raise ValueError(f"more than {MAX_ORDERED_CELLS} ordered cells")
        return self

    @property
    def group_axes(self) -> tuple[Axis, ...]:
        """Axes whose cells are crossed: all axes of counts, and the axes that split a curve into groups."""
        return self.axes[: {"counts": None, "moments": 0, "prefix": -1, "survival": -2}[self.form]]

    @property
    def group_count(self) -> int:
        return math.prod(axis.cell_count for axis in self.group_axes)

    @property
    def bin_count(self) -> int:
        """Number of bins of time in a survival table."""
        return self.axes[-2].cell_count - 3

    @property
    def blocks(self) -> tuple[CellBlock, ...]:
        """Blocks of the table's matrix C, in the order of the cells.

        A table of counts has one block of all crossed cells, and moments have one of three coordinates.  In other
        tables each group has one or two blocks of ordered cells, then one cell of the records without a place in
        them.
        """
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
        """Number of coordinates of the table in an increment."""
        return sum(block.size for block in self.blocks)

    @property
    def extent(self) -> tuple[float, float]:
        """Largest norm c and distance Δ of the vectors C e_k of the table, as in `find_extent`.

        Moments have (x, 2x² - 1, 1.7) in place of C e_k.
        """
        if self.form == "moments":
            return math.sqrt(2.0 + PRESENT_MOMENT**2), max(MOMENTS_DIAMETER, math.sqrt(2.0 + PRESENT_MOMENT**2))
        return find_extent(self.blocks)

    def codes(self, raw: Floats) -> NDArray[np.int64] | Floats:
        """Return the cell of each record, or its scaled number for moments.

        Args:
            raw: Raw cells of the records, (n, columns).

        Returns:
            (n,), integers from 0 to `size` - 1, or for moments floats: x in [-1, 1], or 9 for a missing number.
            In a survival table each group has the bins of events, the bins of censored records, one cell of
            records beyond all bins, and one of records without a usable time or event.
        """
        if self.form == "moments":
            (low, high), numbers = self.axes[0].edges or (0.0, 1.0), raw[:, self.axes[0].column]
            return np.where(
                np.isnan(numbers), _MISSING_CODE, 2.0 * (numbers.clip(low, high) - low) / (high - low) - 1.0
            )
        # Groups are numbered with the last of their axes running fastest.
        axis_codes = [axis.codes(raw[:, axis.column]) for axis in self.axes]
        group = np.zeros(len(raw), np.int64)
        for axis, code in zip(self.group_axes, axis_codes, strict=False):
            group = group * axis.cell_count + code
        if self.form == "counts":
            return group
        if self.form == "prefix":
            return group * self.axes[-1].cell_count + axis_codes[-1]
        time, event, bins = axis_codes[-2], axis_codes[-1], self.bin_count
        # Codes of the time: 0 below the bins, 1 … `bins` in them, then beyond, then missing.  Event 2 is missing.
        beyond, lacking = time == bins + 1, (time == 0) | (time == bins + 2) | (event == 2)
        inside = np.where(event == 1, time - 1, bins + time - 1)
        bin_index = np.where(lacking, 2 * bins + 1, np.where(beyond, 2 * bins, inside))
        return np.asarray(group * (2 * bins + 2) + bin_index, np.int64)


def prefix_root(size: int) -> Floats:
    """Return the coefficients f_0 … f_{size-1} of the square root of prefix sums, f_i = C(2i, i)/4^i."""
    steps = np.arange(1.0, size)
    return np.concatenate([[1.0], np.cumprod((2.0 * steps - 1.0) / (2.0 * steps))])[:size]


@lru_cache(maxsize=64)
def prefix_root_matrix(size: int) -> Floats:
    """Return the square root of prefix sums as a matrix, (size, size).

    Row k of its square adds up cells 0 … k.
    """
    return lower_toeplitz(prefix_root(size))


def lower_toeplitz(values: Floats) -> Floats:
    """Return the lower triangular Toeplitz matrix whose first column is `values`."""
    lag = np.subtract.outer(np.arange(len(values)), np.arange(len(values)))
    return np.where(lag >= 0, values[lag.clip(0)], 0.0)


@lru_cache(maxsize=256)
def _squared_extent(block: CellBlock) -> tuple[float, float]:
    """Return the squares of the largest column norm and the largest column distance of a block's C."""
    if block.kind == "plain":
        return 1.0, 2.0 * (block.size > 1)
    values, max_distance = prefix_root(block.size), 0.0
    for lag in range(1, block.size):  # columns with this lag are furthest apart if one is the longest column
        difference = values.copy()
        difference[lag:] -= values[:-lag]
        max_distance = max(max_distance, float(difference @ difference))
    return float(values @ values), max_distance


def find_extent(blocks: Sequence[CellBlock]) -> tuple[float, float]:
    """Return the largest norm c of a column of C, and the largest distance Δ of two columns.

    C has the `blocks` on its diagonal.  One of the two columns may be zeros.

    Guarantee: no column is longer than c, and the columns of no two records are further apart than Δ, but for a
    relative 2^-40.  One of the two records may be in no cell.
    """
    extents = [_squared_extent(block) for block in blocks]
    norms = sorted((norm for norm, _ in extents), reverse=True)
    within_block = max(distance for _, distance in extents)
    across_blocks = norms[0] + norms[1] if len(norms) > 1 else 0.0
    return math.sqrt(norms[0]), math.sqrt(max(within_block, across_blocks, norms[0]))


class StatisticsSettings(ModelSettings):
    """Tables that the model counts."""

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
        """Positions of the raw cells that the tables read."""
        return {axis.column for table in self.tables for axis in table.axes}

    @cached_property
    def extents(self) -> tuple[tuple[float, float], ...]:
        """Largest norm c_j and distance Δ_j of each table."""
        return tuple(table.extent for table in self.tables)

    @cached_property
    def scales(self) -> tuple[float, ...]:
        """Scale a_j = √(w_j / Σ w) / c_j of each table."""
        total_weight = sum(table.weight for table in self.tables)
        return tuple(
            math.sqrt(table.weight / total_weight) / norm
            for table, (norm, _) in zip(self.tables, self.extents, strict=True)
        )


def encode_cells(cells: NDArray[Any], dtype: torch.dtype, settings: StatisticsSettings) -> Tensor:
    """Encode raw cells (n, columns) as codes (n, tables).

    Each row is a function of that record's own cells (`Cells.codes`).

    Raises:
        InputError: The cells are not (n, columns) of float64, or a table reads a column that they lack.
    """
    if cells.ndim != 2 or cells.dtype != np.float64 or max(settings.used_columns) >= cells.shape[1]:
        raise InputError(
            f"model.name = {STATISTICS!r}: counts cells of a table; a record here has shape {cells.shape[1:]}"
        )
    return torch.from_numpy(np.stack([table.codes(cells) for table in settings.tables], axis=1)).to(dtype)


@dataclass(frozen=True)
class Indicators(Deterministic):
    """Objective whose increment is -(a_j C_j e_k)_j for a record in the cells k.

    In a table of moments, (x, 2x² - 1, 1.7) is in place of C_j e_k.  One step of size 1 from 0 gives the mean of
    (a_j C_j e_k)_j over the records.

    Guarantee: for a query with coefficients of sum 1, an increment is a public function of the record's codes and
    the clip, whatever the query's points are.  Up to rounding, its norm is at most 1, and it is no further than
    `diameter` from any other increment and from zeros.  A record whose code is no cell of a table adds zeros
    there.
    """

    settings: StatisticsSettings
    """Tables that are counted, with their scales a_j."""
    dtype: torch.dtype
    """Type of the model."""
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
        """Largest distance of two increments, or of one and zeros: √(Σ (a_j Δ_j)²)."""
        scaled_extents = zip(self.settings.scales, self.settings.extents, strict=True)
        return math.sqrt(sum((scale * distance) ** 2 for scale, (_, distance) in scaled_extents))

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.dtype)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Sum the increments of a batch, (..., d), and count the clipped ones.

        Increments do not depend on the query's points.  They are multiplied by the sum of the query's
        coefficients, clipped to norm `clip`, and summed with the batch's weights.

        Args:
            query: Points and coefficients of the query.
            batch: Codes of the records, (..., B, tables), and their weights, (..., B).
            clip: Largest norm of an increment.
        """
        codes, weights = batch.records.features, batch.weights
        lead = np.broadcast_shapes(query.points[0].shape[:-1], codes.shape[:-2])
        total = torch.zeros(*lead, self.dimension, dtype=weights.dtype, device=codes.device)
        clipped = torch.zeros(lead, dtype=torch.int64, device=codes.device)
        # Chunks of rows limit the memory for the vectors, (..., rows, d).
        rows = max(1, _CHUNK // (self.dimension * math.prod(codes.shape[:-2])))
        for start in range(0, codes.shape[-2], rows):
            chunk_codes, chunk_weights = codes[..., start : start + rows, :], weights[..., start : start + rows]
            vectors = self._make_vectors(chunk_codes, weights.dtype) * sum(query.coefficients)
            clipping = compute_clipping(vector_bounds(upper_norm(vectors)), chunk_weights, clip)
            total = total + (clipping.factor.unsqueeze(-2) @ clipping.zero_unrepresentable(vectors)).squeeze(-2)
            clipped = clipped + clipping.clipped_count
        return Increment(total, clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        vectors = self._make_vectors(batch.records.features, batch.weights.dtype) * sum(query.coefficients)
        clipping = compute_clipping(vector_bounds(upper_norm(vectors)), batch.weights, clip)
        return clipping.zero_unrepresentable(vectors) * clipping.factor.unsqueeze(-1)

    def sum_integer_vectors(
        self, codes: Floats, is_counted: NDArray[np.bool_], norm: int, factor: float
    ) -> NDArray[np.int64]:
        """Sum the integer vectors of the counted records.

        A record's vector is -trunc(scale · a_j C_j e_k), joined over the tables j, or for moments with (x, 2x² -
        1, 1.7) in place of C_j e_k.  The scale is `factor`, made smaller in size as far as `norm` requires it.

        Guarantee: a record adds a vector of norm at most `norm`, truncation included, that is a function of its
        own cells and public numbers.  The number of operations depends on n and public numbers only: a record that
        does not count, or is in no cell, takes part in all of them and adds zeros.

        Args:
            codes: Codes of the records, (n, tables), as from `encode_cells`.
            is_counted: Mask of the records that count, (n,).
            norm: Largest norm of a record's integer vector.
            factor: Scale before it is limited by `norm`, with the sign of the sum of the query's coefficients.

        Returns:
            (d,), int64.
        """
        # The vectors of a record have norm at most `max_norm` before they are scaled and truncated.
        lengths = (c for c, _ in self.settings.extents)
        max_norm = math.hypot(*(a * c for a, c in zip(self.settings.scales, lengths, strict=True)))
        scale = math.copysign(min(abs(factor), norm * (1.0 - 2.0**-30) / max_norm), factor)
        parts = []
        for table_index, (table, a) in enumerate(zip(self.settings.tables, self.settings.scales, strict=True)):
            table_codes = np.where(is_counted, codes[:, table_index], np.nan)
            if table.form == "moments":
                x = np.where(np.abs(table_codes) <= 1.0, table_codes, np.nan)
                moments = np.stack([x, 2.0 * x * x - 1.0, np.where(np.isnan(x), np.nan, PRESENT_MOMENT)])
                parts.append(np.nan_to_num(np.trunc(scale * a * moments)).astype(np.int64).sum(axis=1))
                continue
            # Records in no cell get a cell of their own, behind those of all blocks.
            inside = np.where((table_codes >= 0) & (table_codes < table.size), table_codes, table.size)
            counts, start = np.bincount(inside.astype(np.int64), minlength=table.size + 1), 0
            for block in table.blocks:
                block_counts = counts[start : start + block.size]
                start += block.size
                if block.kind == "plain":
                    parts.append(block_counts * int(scale * a))
                    continue
                # C times the counts is a convolution with C's first column, backwards for suffix sums.
                values = np.trunc(scale * a * prefix_root(block.size)).astype(np.int64)
                backwards = slice(None, None, -1 if block.kind == "suffix" else 1)
                parts.append(np.convolve(block_counts[backwards], values)[: block.size][backwards])
        return -np.concatenate(parts)

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        """Return a loss of 0 and no accuracy, since counts predict nothing."""
        return ModelEvaluation(point.sum(-1) * 0.0, None)

    def _make_vectors(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return -(a_j C_j e_k)_j for each record, (..., B, d), from codes (..., B, tables).

        In prefix sums, row r of the column C_j e_k is f_{r-k} for the rows r ≥ k of the block of k.  In suffix
        sums it is f_{k-r} for r ≤ k, and in a plain block it is 1 for r = k.  Other rows are 0.  Moments have (x,
        2x² - 1, 1.7) in place of the column.  A code that is no cell, or no number from -1 to 1 for moments, gives
        zeros.
        """
        parts = []
        for table_index, (table, columns) in enumerate(
            zip(self.settings.tables, self._column_tensors, strict=True)
        ):
            low, high, sign, values = (column.to(codes.device) for column in columns)
            if table.form == "moments":
                x = codes[..., table_index, None].to(dtype)
                moments = torch.cat([x, 2.0 * x * x - 1.0, torch.full_like(x, PRESENT_MOMENT)], dim=-1)
                parts.append((moments * values[0].to(dtype)).where(x.abs() <= 1.0, 0.0))
                continue
            code = codes[..., table_index].round().long()
            is_cell = (code >= 0) & (code < len(low))
            code = code.clamp(0, len(low) - 1)
            rows = torch.arange(len(low), device=codes.device)
            lag = (rows - code.unsqueeze(-1)) * sign[code].unsqueeze(-1)
            is_reached = (rows >= low[code].unsqueeze(-1)) & (rows < high[code].unsqueeze(-1)) & (lag >= 0)
            parts.append(
                values.to(dtype)[lag.clamp(0, len(values) - 1)].where(is_reached & is_cell.unsqueeze(-1), 0.0)
            )
        return -torch.cat(parts, dim=-1)

    @cached_property
    def _column_tensors(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Four tensors for each table, from which its columns a_j C_j e_k are formed.

        The first three, (cells,), have for each cell k the range [low, high) of rows that its column may reach,
        and the direction in which it extends from row k: 1 to later rows, -1 to earlier ones.  The fourth has the
        value a_j f_i at distance i from row k.  Moments use only its first value, a_j.
        """
        tensors = []
        for table, scale in zip(self.settings.tables, self.settings.scales, strict=True):
            low, high, sign, start = [], [], [], 0
            for block in table.blocks:
                cells = range(start, start + block.size)
                plain = block.kind == "plain"
                low += [cell if plain else start for cell in cells]
                high += [cell + 1 if plain else start + block.size for cell in cells]
                sign += [-1 if block.kind == "suffix" else 1] * block.size
                start += block.size
            longest = max([1, *(block.size for block in table.blocks if block.kind != "plain")])
            values = torch.from_numpy(scale * prefix_root(longest))
            tensors.append((torch.tensor(low), torch.tensor(high), torch.tensor(sign), values))
        return tensors


def make_indicators(
    _shape: tuple[int, ...], _classes: int, dtype: torch.dtype, settings: StatisticsSettings
) -> Indicators:
    """Return the objective of these settings, for records of any shape and number of classes."""
    return Indicators(settings, dtype)


def check_cell(cell: Any) -> None:
    """Check that the statistics of a scenario can be counted.

    Args:
        cell: Resolved settings of one run of the scenario, not a cell of a table.

    Raises:
        ValueError: The data are no table, or a setting of the data or the budget does not fit counts.
    """
    data, schema = cell.data, cell.data.table_schema
    refuse(
        {
            f"data.name = {data.name!r}: statistics are of a table": schema is None,
            'table.missing = "drop": a row with a missing value is to be counted as missing; leave it '
            "out, and give every column `missing`, what stands in for it": (
                schema is not None and schema.missing == "drop"
            ),
            "data: scale, validation, split and spared say nothing of counts; leave them out": (
                data.scale is not None or data.validation is not None or data.split_and_spared != (None, None)
            ),
            "privacy.shares: a count weighs the records of all silos alike; leave it out": cell.privacy.shares,
        },
        ValueError,
    )


PROVED_DIAMETERS.add(Indicators)
SUMMED_BY_CELL.add(Indicators)
ROW = Model(
    StatisticsSettings,
    encode_cells,
    make_indicators,
    evaluated=False,
    gradients=False,
    of_cells=True,
    check=check_cell,
    guard=STATISTICS,
)
