"""Features of a record by itself, and augmentation of pictures.

A feature map of one record, with public constants, releases nothing: the record's increment, which is the vector
that it adds to a sum, is clipped, whatever its features are.  Frozen features of a pre-trained module are such a
map, too.

`AugmentedView` computes increments on shifted and mirrored copies of each picture ("augmentation multiplicity").
A transform of a copy is three integers: pixels down, pixels right, and 1 for a mirror.  Transforms are drawn by
public coins: random numbers that everyone may know.  A record's loss is the mean of the losses of its copies, so
its gradient is the mean of their gradients, and is clipped once.

Views are objectives that wrap another one, their `base`.  A batch layout has the round of a batch, and for each
record its silo (the party that holds it) and its row index there.  Leading axes "..." of points and records are
those of replicates, which are runs that are computed side by side.

Source: De, Berrada, Hayes, Smith & Balle 2022, "Unlocking high-accuracy differentially private image
classification through scale", section 3, with crops of a padded picture and mirror images.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.core.errors import CodeError, InputError
from fedpriv.core.random import RowRandomIntegers, seed_key
from fedpriv.core.replicates import Scalar, max_values_at_once
from fedpriv.data.layout import FeatureLayout, split_inputs
from fedpriv.loss.alone import aligned_copy, evaluate_per_record, reason_of
from fedpriv.loss.clipping import upper_norm
from fedpriv.loss.frozen import FunctionalModule
from fedpriv.loss.imported import build_module, read_state_dict, weights_error
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.losses import Loss, Unjudged
from fedpriv.loss.module import BaseModuleObjective
from fedpriv.loss.objective import Batch, BatchLayout, Increment, Objective, Query, Records, View
from fedpriv.participation.orders import OWN_FACTS, Dependence, declared_dependence

DIRECTIONS = 8
"""Number of directions of edges."""
CELL = 4
"""Side of a cell in pixels."""
IMAGES_PER_CHUNK = 512
"""Number of images that are mapped at a time if no module maps them."""


def pixel_features(images: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Flatten raw records to features, with bytes divided by 255: (n, ...) -> (n, features).

    Bytes (uint8) are pixels.  Values of other types are converted to `dtype`, and not divided.  Several inputs of
    a record, which are fields of a structured array, are concatenated.

    Args:
        images: Raw records, (n, ...), or a structured array (n,).  Integers are below 2^63.
        dtype: Type of the features.
    """
    if images.dtype.names is not None:
        return torch.cat(
            [pixel_features(np.ascontiguousarray(column), dtype) for column in split_inputs(images).values()],
            dim=1,
        )
    # By way of one axis, since torch refuses the strides of a field of a structured array.
    flat = images.reshape(-1).reshape(len(images), math.prod(images.shape[1:]))
    if flat.dtype != np.uint8:
        # torch has little arithmetic of unsigned types of more than 8 bits.
        return torch.from_numpy(flat.astype(np.int64) if flat.dtype.kind == "u" else flat).to(dtype)
    return torch.from_numpy(flat.astype(np.float32)).to(dtype) / 255.0


def orientation_histograms(images: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Compute histograms of oriented gradients in cells of 4 x 4 pixels: (n, h, w) -> (n, 8 · h/4 · w/4).

    The histograms follow Dalal & Triggs 2005, section 6, with 8 directions of the full circle, without blocks and
    without normalization.  Derivatives are central differences of pixels / 255.

    Args:
        images: Gray images of bytes, (n, h, w).
        dtype: Type of the features.

    Raises:
        InputError: Images are not bytes of shape (n, h, w), or have sides that are no multiples of 4.
    """
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1] % CELL or images.shape[2] % CELL:
        raise InputError(
            f'model.features = "orientations" takes bytes of gray images whose sides are multiples of {CELL}, not '
            f"of shape {images.shape[1:]} and type {images.dtype}"
        )
    gray = pixel_features(images, dtype).view(images.shape)
    # Result for an image on which the computation raises.
    fallback = torch.zeros(1, DIRECTIONS * math.prod(side // CELL for side in images.shape[1:]), dtype=dtype)
    histograms = torch.empty(len(images), fallback.shape[1], dtype=dtype)
    for index, features in enumerate(evaluate_per_record(_histograms, (gray,), fallback)):
        histograms[index] = features
    return histograms


def _histograms(gray: Tensor) -> Tensor:
    """Histograms of one image, (1, h, w) -> (1, 8 · h/4 · w/4), direction by direction.

    Each pixel has an edge, the vector of its derivatives to the right and down.  The edge's length is divided in
    proportion between the two nearest of 8 directions, and averaged over the cell.  Pixels outside of the image
    are 0.
    """
    padded = functional.pad(gray, (1, 1, 1, 1))
    horizontal = (padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]) / 2.0
    vertical = (padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]) / 2.0
    length, angle = (
        torch.hypot(horizontal, vertical),
        torch.atan2(vertical, horizontal) * (DIRECTIONS / (2.0 * math.pi)),
    )
    # (8, h, w): the length of each pixel's edge by direction, with the distance taken modulo the circle.
    half_circle, directions = DIRECTIONS / 2, torch.arange(DIRECTIONS, dtype=gray.dtype).view(-1, 1, 1)
    lengths_by_direction = length * (
        1.0 - ((angle - directions + half_circle) % DIRECTIONS - half_circle).abs()
    ).clamp(min=0.0)
    return functional.avg_pool2d(lengths_by_direction, CELL).view(1, -1)


def scale_to_norm(features: Tensor, norm: float, *, exactly: bool) -> Tensor:
    """Scale each row (n, f) to Euclidean norm at most `norm`, or exactly `norm`, and keep zeros.

    The norm is met up to rounding, for a `norm` of 1e-15 to 1e19.  A row with a value that is not finite has a NaN
    in the result.

    Guarantee: a row of the result is a function of its own row, bit for bit.  The length of a row is computed from
    this row by itself.  If a bound that holds in any order of additions shows that a row is short enough, and
    `exactly` is False, the row's factor is 1 and no length is computed.

    Args:
        features: Rows to scale, (n, f).
        norm: Upper bound on the norm, above 0.
        exactly: Whether shorter rows, except for zeros, are scaled up to `norm`.
    """
    # Rows that may need a factor, and their lengths.
    is_scaled = torch.ones(len(features), dtype=torch.bool) if exactly else ~_is_surely_within(features, norm)
    if not is_scaled.any():
        return features
    row_indices, number_range = is_scaled.nonzero()[:, 0], torch.finfo(features.dtype)
    rows, lengths = features[row_indices], _row_lengths(features, row_indices)
    # Rows whose squares overflow, or underflow too far, are divided by their largest absolute value.
    largest_values = rows.abs().amax(dim=1, keepdim=True)
    min_length = math.sqrt(number_range.tiny / number_range.eps) if exactly else 0.0
    is_extreme = (lengths.isinf() | (lengths < min_length)) & (largest_values > 0.0) & largest_values.isfinite()
    if is_extreme.any():
        features = features.index_copy(0, row_indices, torch.where(is_extreme, rows / largest_values, rows))
        lengths = _row_lengths(features, row_indices)
    # The factor of a row of zeros stays finite.  That of a row that was divided above may have to exceed 1.
    factors = norm / lengths.clamp(min=max(number_range.tiny, 2.0 * norm / number_range.max))
    all_factors = features.new_ones(len(features), 1)
    all_factors[row_indices] = factors if exactly else torch.where(is_extreme, factors, factors.clamp(max=1.0))
    return features * all_factors


def _row_lengths(features: Tensor, row_indices: Tensor) -> Tensor:
    """Return the length of each of these rows, computed from an aligned copy of the row, (rows, 1)."""
    single_rows = (aligned_copy(features[row_index : row_index + 1]) for row_index in row_indices.tolist())
    return torch.cat([torch.linalg.vector_norm(row, dim=1, keepdim=True) for row in single_rows])


def _is_surely_within(features: Tensor, norm: float) -> Tensor:
    """Return a mask (n,) of the rows whose computed length is at most `norm` in any order of additions.

    The mask is also False for rows whose length is within rounding of `norm`, and for a row with a NaN.
    """
    return upper_norm(features) * (1.0 + (features.shape[1] + 16.0) * torch.finfo(features.dtype).eps) <= norm


def compute_frozen_features(
    values: Tensor, path: str, arguments: dict[str, Any], weights: str, shape: tuple[int, ...]
) -> Tensor:
    """Compute features by the module at `path`, one record after another: (n, f) -> (n, features).

    Guarantee: a record's features are a function of the record and the weights, bit for bit, whatever the module
    does with a batch: each record is a batch of its own.  A record on which the module raises, or returns another
    number of features than for a record of zeros, has zeros for features, and no other record's features change.
    Buffers that hold a tensor are reset before every record.  The code is trusted to keep nothing else between
    calls.

    Args:
        values: Records, (n, f).
        path: Import path of the module.
        arguments: Keyword arguments that the module is built with.
        weights: Digest of the weights, "sha256:HEX".
        shape: Shape in which the module takes a record, or () for flat records.

    Raises:
        InputError: The module cannot be built, the weights are missing or do not fit, or the module raises, or
            draws from torch's CPU generator, on a record of zeros.
    """
    # The cached module is copied, since it is converted and its buffers may be written into.
    module = copy.deepcopy(_load_module(path, json.dumps(arguments, sort_keys=True), weights)).to(values.dtype)
    # Calls get copies of the buffers, so that one that a call replaces is back for the next.  The module's own are
    # reset, too, as code may write into them by other names.
    call_module, initial_buffers = FunctionalModule(module), [(part, part.clone()) for part in module.buffers()]

    def map_record(record: Tensor) -> Tensor:
        for buffer, initial in initial_buffers:
            buffer.copy_(initial)
        features = call_module({}, record.view(1, *shape) if shape else record)
        return features.reshape(1, -1)

    fallback = _zero_features(map_record, values.new_zeros(1, values.shape[1]), path)
    all_features = values.new_empty(len(values), fallback.shape[1])
    for index, record_features in enumerate(evaluate_per_record(map_record, (values,), fallback)):
        all_features[index] = record_features
    return all_features


def _zero_features(map_record: Callable[[Tensor], Tensor], record: Tensor, path: str) -> Tensor:
    """Map a record of zeros (1, f) to find the number of features, and return zeros (1, features).

    Raises:
        InputError: The module raises on the record, or draws from torch's CPU generator.
    """
    rng_state = torch.get_rng_state()
    try:
        with torch.no_grad():
            features = map_record(record)
    except Exception as error:  # a module may raise any error
        raise CodeError(
            f"model.backbone = {path!r}: fails on records of {record.shape[1]} values", reason_of(error)
        ) from None
    if not torch.equal(rng_state, torch.get_rng_state()):
        raise InputError(f"model.backbone = {path!r}: draws random numbers; features are a record's own")
    return record.new_zeros(features.shape)


@lru_cache(maxsize=2)
def _load_module(path: str, arguments: str, weights: str) -> nn.Module:
    """Build the module at `path` with the named weights, frozen and in evaluation mode.

    `arguments` are JSON.  The module is cached, and must not be changed.

    Raises:
        InputError: The module cannot be built, or the weights are missing or do not fit.
    """
    with torch.device("cpu"):
        module = build_module(path, "model.backbone", (), json.loads(arguments))
        state = read_state_dict(weights, "model.backbone_weights", path, module)
        try:
            module.load_state_dict(state)
        except Exception as error:  # weights of another module may raise any error
            raise weights_error(weights, "model.backbone_weights", path, error) from None
    return module.eval().requires_grad_(False)


_CHUNK_VALUES = 2**22
"""Values of copies that exist at a time on a CPU, unless those of one record are more."""
_MAX_CHANNELS = 4
"""Largest last axis that is taken for channels of a picture whose first axis is above this number."""


class Augmentation(BaseModel):
    """[model.augment]: copies of a picture that a record is trained on."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    copies: Annotated[int, Field(ge=1, le=64)] = Field(
        description="of a picture, whose gradients' mean is clipped"
    )
    shift: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="pixels that a copy is moved by at most, up or down and left or right; zeros come in"
    )
    flip: bool = Field(False, description="whether each copy is mirrored, left to right, with probability 1/2")

    @model_validator(mode="after")
    def _something_changes(self) -> Self:
        if not self.shift and not self.flip:
            raise ValueError("copies of a picture differ by shift or flip; give one of them")
        return self


class CopiesModule(nn.Module):
    """Module that applies `module` to each copy: rows (B, copies · features) to outputs (B, copies, …)."""

    def __init__(self, module: nn.Module, copies: int) -> None:
        super().__init__()
        self.module, self.copies = module, copies

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.module(rows.reshape(len(rows) * self.copies, -1))
        return outputs.reshape(len(rows), self.copies, *outputs.shape[1:])


@dataclass(frozen=True)
class MeanOverCopies(Unjudged):
    """Mean of `base` over a record's copies, which all have its label.

    Outputs are (B, copies, …), and labels are those of `base`, (B, …).  Copies are used for training only, so the
    loss has no accuracy.
    """

    base: Loss
    """Loss of one copy."""

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.base.value(*self._flatten_copies(outputs, labels)).view(outputs.shape[:2]).mean(1)

    def output_gradient(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (
            self.base.output_gradient(*self._flatten_copies(outputs, labels)).view(outputs.shape)
            / outputs.shape[1]
        )

    def _flatten_copies(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.flatten(0, 1), labels.repeat_interleave(outputs.shape[1], 0)


@dataclass(frozen=True)
class AugmentedView(View):
    """`base` with increments and gradients of `copies_objective` on copies of the records.

    Evaluations are those of `base` on the records themselves.

    Guarantee: a record's copies are made of its own content and of public coins alone, which are keyed by the seed
    of the initial model, the silo, the round and the record's row index in the silo.  The copies are the same
    whichever other records are read.  `copies_objective` clips the mean gradient of a record's copies as a whole,
    so that one record moves the sum by at most its weight times one clip if it is added or removed, however many
    copies there are.
    """

    title = "model.augment"

    copies_objective: Objective
    """Objective over rows that hold the copies of a record."""
    augmentation: Augmentation
    """Number and transforms of the copies."""
    picture: tuple[int, int, int]
    """Shape (channels, height, width) of a record."""
    seed: int
    """Seed of the first model, which keys the coins."""
    batch_layout: BatchLayout | None = None
    """Round, silos and row indices of the batch, set by `for_batch`, or None before."""

    @property
    def dependence(self) -> Dependence:
        return declared_dependence(self.copies_objective) | OWN_FACTS

    def for_batch(self, slots: BatchLayout) -> Self:
        return replace(self, batch_layout=slots)

    def evaluations(self, points: int) -> int:
        return self.augmentation.copies * self.base.evaluations(points)

    def extra_values(self, points: int, rows: int = 1) -> int:
        """Four times the number of values of one record's copies, each of the size of the padded picture.

        Copies of a batch exist for few records at a time, of all replicates together.
        """
        channels, *sides = self.picture
        values = channels * np.prod([side + 2 * self.augmentation.shift for side in sides])
        return 4 * self.augmentation.copies * int(values)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Sum the weighted clipped increments of a batch that has the rows of the batch layout.

        Copies are made for a chunk of records at a time, which bounds the memory.

        Returns:
            The sum, (..., d), and the number of clipped records, (...).

        Raises:
            ValueError: There is no batch layout, or it has another number of rows than the batch.
        """
        total: Tensor | float = 0.0
        clipped: Tensor | int = 0
        for chunk, transforms in self._chunks(batch):
            chunk_increment = self.copies_objective.increment(query, self._make_copies(chunk, transforms), clip)
            total, clipped = total + chunk_increment.total, clipped + chunk_increment.clipped_count
        assert isinstance(total, Tensor)
        assert isinstance(clipped, Tensor)
        return Increment(total, clipped)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        total: Tensor | float = 0.0
        for chunk, transforms in self._chunks(batch):
            total = total + self.copies_objective.gradient(point, self._make_copies(chunk, transforms))
        assert isinstance(total, Tensor)
        return total

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        transforms = self._draw_transforms(self._known_layout.with_rows(rows.cpu().numpy()))
        return self.copies_objective.per_record(query, self._make_copies(batch, transforms), rows, clip)

    def _chunks(self, batch: Batch) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """Yield chunks of a batch, each with the transforms of its records' copies, (..., records, copies, 3).

        A chunk has so few records that their copies have at most `_CHUNK_VALUES` values (more on a GPU), but one
        record at least.  The records of `batch` are in the order of the batch layout.

        Raises:
            ValueError: There is no batch layout, or it has another number of rows than the batch.
        """
        records, weights = batch
        axis, count = records.record_axis, records.features.shape[records.record_axis]
        if count != self.transforms.shape[-3]:
            raise ValueError(f"coins of {self.transforms.shape[-3]} rows for a batch of {count}")
        values_per_record = records.features[..., 0, :].numel() if count else 1
        chunk_size = max(
            1, max_values_at_once(_CHUNK_VALUES, weights.device) // (values_per_record * self.augmentation.copies)
        )
        for start in range(0, max(count, 1), chunk_size):
            chunk_length = min(chunk_size, count - start)
            chunk = Records(*(column.narrow(axis, start, chunk_length) for column in records))
            yield (
                Batch(chunk, weights.narrow(-1, start, chunk_length)),
                self.transforms[..., start : start + chunk_length, :, :],
            )

    @cached_property
    def transforms(self) -> NDArray[np.int64]:
        """Transforms of all records of the batch layout, (B, copies, 3) or (replicates, B, copies, 3)."""
        return self._draw_transforms(self._known_layout)

    @property
    def _known_layout(self) -> BatchLayout:
        if self.batch_layout is None:
            raise ValueError("copies of a record are drawn for the slots of a batch: see `for_batch`")
        return self.batch_layout

    def _draw_transforms(self, slots: BatchLayout) -> NDArray[np.int64]:
        """Draw transforms: pixels down, pixels right, and 1 for a mirror.

        Pixels are uniform in -shift … shift, and a mirror has probability 1/2 with `flip`, else 0.  The result is
        (B, copies, 3), or (replicates, B, copies, 3) if replicates read different rows.
        """
        copies, shift, flip = self.augmentation.copies, self.augmentation.shift, int(self.augmentation.flip)
        choices = np.tile([2 * shift + 1, 2 * shift + 1, flip + 1], copies)
        numbers = self._row_numbers.draw(slots.row_indices, choices, slots.silo_ids, slots.t)
        return numbers.reshape(*slots.row_indices.shape, copies, 3) - np.array([shift, shift, 0], np.int64)

    @cached_property
    def _row_numbers(self) -> RowRandomIntegers:
        return RowRandomIntegers(seed_key(self.seed, "augmentation"))

    def _make_copies(self, batch: Batch, transforms: NDArray[np.int64]) -> Batch:
        """Batch of rows that hold all copies of a record, one after another, (..., B, copies · features).

        `transforms` are (B, copies, 3) or (replicates, B, copies, 3).
        """
        (features, labels), weights = batch
        flat_rows = features.reshape(-1, *features.shape[-2:])
        record_transforms = (
            torch.from_numpy(transforms).to(features.device).expand(*features.shape[:-1], *transforms.shape[-2:])
        )
        copies = torch.stack(
            [
                apply_transforms(rows, self.picture, row_transforms, self.augmentation.shift)
                for rows, row_transforms in zip(
                    flat_rows, record_transforms.reshape(-1, *record_transforms.shape[-3:]), strict=True
                )
            ]
        )
        return Batch(Records(copies.view(*features.shape[:-1], -1), labels), weights)


def apply_transforms(rows: Tensor, picture: tuple[int, int, int], transforms: Tensor, shift: int) -> Tensor:
    """Make the copies of pictures by their transforms.

    A picture is moved down and right, where zeros fill the gap, and then mirrored left to right or not.

    Args:
        rows: Pictures, (B, c · h · w).
        picture: Shape (c, h, w) of a picture.
        transforms: Pixels down, pixels right (negative for up and left), and 1 for a mirror or 0, (B, copies, 3).
        shift: Largest number of pixels of a shift.

    Returns:
        The copies, (B, copies · c · h · w).
    """
    channels, height, width = picture
    padded = nn.functional.pad(rows.reshape(-1, channels, height, width), (shift, shift, shift, shift))
    # Column and line of the padded picture from which each pixel of a copy is read, (B, copies, w) and (…, h).
    positions = torch.arange(width, device=rows.device)
    columns = torch.where(transforms[..., 2:] > 0, width - 1 - positions, positions) + shift - transforms[..., 1:2]
    lines = torch.arange(height, device=rows.device) + shift - transforms[..., :1]
    record_index = torch.arange(len(rows), device=rows.device)[:, None, None, None]
    pixels = padded.permute(0, 2, 3, 1)[record_index, lines.unsqueeze(-1), columns.unsqueeze(-2)]
    return pixels.permute(0, 1, 4, 2, 3).reshape(len(rows), transforms.shape[1] * channels * height * width)


def augment_objective(
    objective: Objective, augmentation: Augmentation | None, layout: FeatureLayout, shape: tuple[int, ...] = ()
) -> Objective:
    """Make the objective on copies of the records, or return the objective itself without augmentation.

    Behind views, the innermost objective is replaced.

    Args:
        objective: Objective of a torch module, possibly inside of views.
        augmentation: Settings of the copies, or None.
        layout: Layout of a record's features.
        shape: Shape in which the module takes a record, or () for the shape of the layout.

    Raises:
        InputError: Records are no pictures, or seem to have channels last (`picture_shape`), a shift may move them
            out of sight, or the model is no torch module.
    """
    if augmentation is None:
        return objective
    if not isinstance(objective, BaseModuleObjective):
        if isinstance(objective, View):
            return replace(objective, base=augment_objective(objective.base, augmentation, layout, shape))
        raise InputError("model.augment: is for models of torch layers")
    picture = picture_shape(layout, shape)
    if augmentation.shift >= min(picture[1:]):
        raise InputError(
            f"model.augment.shift = {augmentation.shift}: moves pictures of {picture[1]} x {picture[2]} out of "
            "sight; give fewer pixels"
        )
    copies_objective = make_module_objective(
        CopiesModule(objective.module, augmentation.copies),
        augmentation.copies * layout.input_width,
        MeanOverCopies(objective.loss),
        objective.seed,
        objective.dtype,
    )
    return AugmentedView(objective, copies_objective, augmentation, picture, objective.seed)


def picture_shape(layout: FeatureLayout, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Find the shape (channels, height, width) of a record, with 1 channel for (height, width).

    Args:
        layout: Layout of a record's features.
        shape: Shape in which the module takes a record, or () for the shape of the layout.

    Raises:
        InputError: A record is no picture, or seems to have its channels last.
    """
    first, *other_inputs = layout.inputs
    record_shape = shape or first.shape
    if other_inputs or first.kind != "numbers" or len(record_shape) not in (2, 3):
        actual = f"of shape {record_shape}" if not other_inputs else f"of {len(layout.inputs)} inputs"
        kind = " of whole numbers" if first.kind == "tokens" else ""
        raise InputError(
            "model.augment: shift and flip are for pictures, (height, width) or (channels, height, width); "
            f"records here are {actual}{kind}"
        )
    channels, height, width = record_shape if len(record_shape) == 3 else (1, *record_shape)
    if width <= _MAX_CHANNELS < channels:
        raise InputError(
            f"model.augment: records are of shape {record_shape}; channels come first, (channels, height, width)"
        )
    return channels, height, width


def check_augmentation_allowed(objective: Objective, used_objective: Objective, name: str) -> None:
    """Check that an algorithm does not replace an objective with augmentation.

    An algorithm's own objective may use other batches than the round's, whose rows key the copies.

    Args:
        objective: Objective of the model.
        used_objective: Objective that the algorithm makes of it, which may be the same.
        name: Name of the algorithm in the message.

    Raises:
        InputError: The objective has augmentation, and the algorithm makes another one of it.
    """
    innermost = objective
    while isinstance(innermost, View) and not isinstance(innermost, AugmentedView):
        innermost = innermost.base
    if isinstance(innermost, AugmentedView) and used_objective is not objective:
        raise InputError(f"model.augment: {name} takes records apart in its own way; use another algorithm")
