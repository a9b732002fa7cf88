"""Maps from one image to its features; none of them looks at another image.

A map of one record by itself, with public constants, releases nothing: the record's increment is clipped, whatever
its features are.  Statistics of the training set, such as its mean image, would have to be paid for.

Frozen features of a pre-trained module are such a map too.  Its weights are named by their SHA-256 (imported.py),
so silo and server have the same map or none.

Augmentation multiplicity: shifted and mirrored copies of a picture are one record, inside of one clip.

A record's loss is the mean of the losses of its copies, so its gradient is the mean of theirs, and is clipped
once.  The module gets all copies of one record together; copies of two records never meet.

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
from fedpriv.loss.imported import build_module, read_state_dict, weights_error
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.losses import Loss, Unjudged
from fedpriv.loss.module import BaseModuleObjective
from fedpriv.loss.objective import Batch, BatchLayout, Increment, Objective, Query, Records, View
from fedpriv.participation.orders import OWN_FACTS, Dependence, declared_dependence

DIRECTIONS = 8
CELL = 4
IMAGES_PER_CHUNK = 512
"""How many are handled at a time."""


def pixel_features(images: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Pixels divided by 255, numbers and tokens as they are: (n, ...) -> (n, features), inputs in a row."""
    if images.dtype.names is not None:
        return torch.cat(
            [pixel_features(np.ascontiguousarray(part), dtype) for part in split_inputs(images).values()], dim=1
        )
    if images.dtype != np.uint8:
        given = images.astype(np.int64) if images.dtype.kind == "u" else images  # torch has no arithmetic of those
        return torch.from_numpy(given.reshape(len(given), -1)).to(dtype)
    return torch.from_numpy(images.reshape(len(images), -1).astype(np.float32)).to(dtype) / 255.0


def orientation_histograms(images: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """How much edge there is in 8 directions, in cells of 4 x 4 pixels: (n, h, w) -> (n, 8 · h/4 · w/4).

    Central differences, an edge's length shared in proportion between the two nearest directions, and averaged
    over the cell: the histograms of oriented gradients of Dalal & Triggs 2005, section 6, without their
    overlapping blocks.  Every number is at most 1/√2.  InputError for images that are no bytes, are not gray or
    do not divide into cells.
    """
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1] % CELL or images.shape[2] % CELL:
        raise InputError(
            f'model.features = "orientations" takes gray images whose sides are multiples of {CELL}, not of '
            f"shape {images.shape[1:]}"
        )
    gray = pixel_features(images, dtype).view(images.shape)
    nothing = torch.zeros(1, DIRECTIONS * math.prod(side // CELL for side in images.shape[1:]), dtype=dtype)
    rows = torch.empty(len(images), nothing.shape[1], dtype=dtype)
    for place, row in enumerate(evaluate_per_record(_histograms, (gray,), nothing)):
        rows[place] = row
    return rows


def _histograms(gray: Tensor) -> Tensor:
    """(1, h, w) -> (1, 8 · h/4 · w/4)."""
    padded = functional.pad(gray, (1, 1, 1, 1))
    across = (padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]) / 2.0
    down = (padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]) / 2.0
    length, angle = torch.hypot(across, down), torch.atan2(down, across) * (DIRECTIONS / (2.0 * math.pi))
    half, directions = DIRECTIONS / 2, torch.arange(DIRECTIONS, dtype=gray.dtype).view(-1, 1, 1)
    edges = length * (1.0 - ((angle - directions + half) % DIRECTIONS - half).abs()).clamp(min=0.0)
    return functional.avg_pool2d(edges, CELL).view(1, -1)


def scale_to_norm(features: Tensor, norm: float, *, exactly: bool) -> Tensor:
    """Each row scaled to Euclidean norm at most `norm`, or exactly; zeros stay zeros.  (n, f) -> (n, f).

    Guarantee: a row of the result is a function of its own row, bit for bit.  A length is taken of one row by
    itself; where a bound in any order of additions shows that a row is short enough, its factor is 1 without it.
    """
    longer = torch.ones(len(features), dtype=torch.bool) if exactly else ~_is_surely_within(features, norm)
    if not longer.any():
        return features
    rows = longer.nonzero()[:, 0]
    each = (aligned_copy(features[row : row + 1]) for row in rows.tolist())
    lengths = torch.cat([torch.linalg.vector_norm(row, dim=1, keepdim=True) for row in each])
    factors = norm / lengths.clamp(min=torch.finfo(features.dtype).tiny)
    every = features.new_ones(len(features), 1)
    every[rows] = factors if exactly else factors.clamp(max=1.0)
    return features * every


def _is_surely_within(features: Tensor, norm: float) -> Tensor:
    """Find the rows whose lengths come out at most `norm`, in whatever order they add up; none with a NaN."""
    roundings = (features.shape[1] + 16.0) * torch.finfo(features.dtype).eps
    return upper_norm(features) * (1.0 + roundings) <= norm


def compute_frozen_features(
    values: Tensor, path: str, arguments: dict[str, Any], weights: str, shape: tuple[int, ...]
) -> Tensor:
    """(n, f) -> (n, features) by the module at `path` with these weights, one record after another.

    Guarantee: a record's features are a function of it and the weights, bit for bit, whatever the module does with
    a batch: each record is one of its own.  A record on which the module raises has zeros for features, and no
    other record's change; buffers are what they were before every record.  The code is trusted to keep nothing
    else between calls.  InputError if the weights are not here, or the module fails or draws random numbers on a
    record of zeros.
    """
    module = copy.deepcopy(_load_module(path, json.dumps(arguments, sort_keys=True), weights)).to(values.dtype)
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def of_one(record: Tensor) -> Tensor:
        for buffer, before in kept:
            buffer.copy_(before)
        given: Tensor = module(record.view(1, *shape) if shape else record)
        return given.reshape(1, -1)

    nothing = _zero_features(of_one, values.new_zeros(1, values.shape[1]), path)
    rows = values.new_empty(len(values), nothing.shape[1])
    for place, row in enumerate(evaluate_per_record(of_one, (values,), nothing)):
        rows[place] = row
    return rows


def _zero_features(of_one: Callable[[Tensor], Tensor], record: Tensor, path: str) -> Tensor:
    """Zeros of the shape and the type of a record's features."""
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            given = of_one(record)
    except Exception as error:  # whatever a stranger's module does
        raise CodeError(
            f"model.backbone = {path!r}: fails on records of {record.shape[1]} values", reason_of(error)
        ) from None
    if not torch.equal(before, torch.get_rng_state()):
        raise InputError(f"model.backbone = {path!r}: draws random numbers; features are a record's own")
    return record.new_zeros(given.shape)


@lru_cache(maxsize=2)
def _load_module(path: str, arguments: str, weights: str) -> nn.Module:
    state = read_state_dict(weights, "model.backbone_weights", path)
    with torch.device("cpu"):
        module = build_module(path, "model.backbone", (), json.loads(arguments))
        try:
            module.load_state_dict(state)
        except Exception as error:  # of another module
            raise weights_error(weights, "model.backbone_weights", path, error) from None
    return module.eval().requires_grad_(False)


_CHUNK_VALUES = 2**22
"""Values of copies that exist at a time, or one record's."""
_MAX_CHANNELS = 4  # channels that a picture has at most, where they come last


class Augmentation(BaseModel):
    """[model.augment]: what a record is trained on in its own place."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    copies: Annotated[int, Field(ge=1, le=64)] = Field(
        description="of a picture, whose gradients' mean is clipped"
    )
    shift: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="pixels that a copy is moved by at most, up or down and left or right; zeros come in"
    )
    flip: bool = Field(False, description="whether half of the copies are mirrored, left to right")

    @model_validator(mode="after")
    def _something_changes(self) -> Self:
        if not self.shift and not self.flip:
            raise ValueError("copies of a picture differ by shift or flip; give one of them")
        return self


class CopiesModule(nn.Module):
    """`module` on the copies of each record, (B, copies · features), with outputs (B, copies, …)."""

    def __init__(self, module: nn.Module, copies: int) -> None:
        super().__init__()
        self.module, self.copies = module, copies

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.module(rows.reshape(len(rows) * self.copies, -1))
        return outputs.reshape(len(rows), self.copies, *outputs.shape[1:])


@dataclass(frozen=True)
class MeanOverCopies(Unjudged):
    """The mean of `base` over a record's copies, which all have its label, and are trained on, not judged."""

    base: Loss

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
    """`base`, whose increments are those of `copied` on copies of the records; evaluations are of the records.

    Guarantee: a record's copies are made of its own content and of public coins alone, which are keyed by the seed
    of the first model, the silo, the round and the record's row index in the silo.  They are the same whoever else
    is read, so copies go with secret participation.  `copied` clips the mean gradient of a record's copies as a
    whole, so that one record moves the sum by what one clip lets it.
    """

    title = "model.augment"

    copies_objective: Objective
    augmentation: Augmentation
    picture: tuple[int, int, int]
    """(channels, height, width) of a record."""
    seed: int
    batch_layout: BatchLayout | None = None

    @property
    def dependence(self) -> Dependence:
        return declared_dependence(self.copies_objective) | OWN_FACTS

    def for_batch(self, slots: BatchLayout) -> Self:
        return replace(self, batch_layout=slots)

    def evaluations(self, points: int) -> int:
        return self.augmentation.copies * self.base.evaluations(points)

    def extra_values(self, points: int, rows: int = 1) -> int:
        """Of one record's copies, padded: those of a batch are few at a time, of all replicates together."""
        channels, *sides = self.picture
        values = channels * np.prod([side + 2 * self.augmentation.shift for side in sides])
        return 4 * self.augmentation.copies * int(values)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """See `Objective`; `batch` has the rows of all slots, `_VALUES` values of copies at a time."""
        total: Tensor | float = 0.0
        clipped: Tensor | int = 0
        for some, coins in self._chunks(batch):
            part = self.copies_objective.increment(query, self._make_copies(some, coins), clip)
            total, clipped = total + part.total, clipped + part.clipped_count
        assert isinstance(total, Tensor)
        assert isinstance(clipped, Tensor)
        return Increment(total, clipped)

    def gradient(self, point: Tensor, batch: Batch) -> Tensor:
        total: Tensor | float = 0.0
        for some, coins in self._chunks(batch):
            total = total + self.copies_objective.gradient(point, self._make_copies(some, coins))
        assert isinstance(total, Tensor)
        return total

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        coins = self._draw_transforms(self._known_layout.with_rows(rows.cpu().numpy()))
        return self.copies_objective.per_record(query, self._make_copies(batch, coins), rows, clip)

    def _chunks(self, batch: Batch) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        """The batch, few records at a time, and the coins of their copies."""
        records, weights = batch
        axis, count = records.record_axis, records.features.shape[records.record_axis]
        if count != self.transforms.shape[-3]:
            raise ValueError(f"coins of {self.transforms.shape[-3]} rows for a batch of {count}")
        each = records.features[..., 0, :].numel() if count else 1
        rows = max(1, max_values_at_once(_CHUNK_VALUES, weights.device) // (each * self.augmentation.copies))
        for start in range(0, max(count, 1), rows):
            span = min(rows, count - start)
            some = Records(*(column.narrow(axis, start, span) for column in records))
            yield Batch(some, weights.narrow(-1, start, span)), self.transforms[..., start : start + span, :, :]

    @cached_property
    def transforms(self) -> NDArray[np.int64]:
        """Coins of all records of the slots, see `_coins_of`."""
        return self._draw_transforms(self._known_layout)

    @property
    def _known_layout(self) -> BatchLayout:
        if self.batch_layout is None:
            raise ValueError("copies of a record are drawn for the slots of a batch: see `at`")
        return self.batch_layout

    def _draw_transforms(self, slots: BatchLayout) -> NDArray[np.int64]:
        """Pixels down, pixels right, 1 where a copy is mirrored: (B, copies, 3), or (replicates, B, copies, 3)."""
        copies, shift, flip = self.augmentation.copies, self.augmentation.shift, int(self.augmentation.flip)
        choices = np.tile([2 * shift + 1, 2 * shift + 1, flip + 1], copies)
        drawn = self._row_numbers.draw(slots.row_indices, choices, slots.silo_ids, slots.t)
        moved: NDArray[np.int64] = drawn.reshape(*slots.row_indices.shape, copies, 3) - np.array([shift, shift, 0])
        return moved

    @cached_property
    def _row_numbers(self) -> RowRandomIntegers:
        return RowRandomIntegers(seed_key(self.seed, "augmentation"))

    def _make_copies(self, batch: Batch, coins: NDArray[np.int64]) -> Batch:
        """The batch with every record's copies one behind the other; `coins` as `_coins_of` gives them."""
        (features, labels), weights = batch
        flat = features.reshape(-1, *features.shape[-2:])
        of_each = torch.from_numpy(coins).to(features.device).expand(*features.shape[:-1], *coins.shape[-2:])
        copies = torch.stack(
            [
                apply_transforms(rows, self.picture, own, self.augmentation.shift)
                for rows, own in zip(flat, of_each.reshape(-1, *of_each.shape[-3:]), strict=True)
            ]
        )
        return Batch(Records(copies.view(*features.shape[:-1], -1), labels), weights)


def apply_transforms(rows: Tensor, picture: tuple[int, int, int], coins: Tensor, shift: int) -> Tensor:
    """The copies of rows (B, c · h · w) that `coins` (B, copies, 3) say: (B, copies · c · h · w)."""
    channels, height, width = picture
    padded = nn.functional.pad(rows.reshape(-1, channels, height, width), (shift, shift, shift, shift))
    across = torch.arange(width, device=rows.device)
    columns = torch.where(coins[..., 2:] > 0, width - 1 - across, across) + shift - coins[..., 1:2]
    lines = torch.arange(height, device=rows.device) + shift - coins[..., :1]
    record = torch.arange(len(rows), device=rows.device)[:, None, None, None]
    pixels = padded.permute(0, 2, 3, 1)[record, lines.unsqueeze(-1), columns.unsqueeze(-2)]
    return pixels.permute(0, 1, 4, 2, 3).reshape(len(rows), coins.shape[1] * channels * height * width)


def augment_objective(
    objective: Objective, augmentation: Augmentation | None, layout: FeatureLayout, shape: tuple[int, ...] = ()
) -> Objective:
    """The objective with copies in place of records; InputError for records or models that this is not for.

    `shape` is how the module sees a record, where it says so.
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
    copied = make_module_objective(
        CopiesModule(objective.module, augmentation.copies),
        augmentation.copies * layout.input_width,
        MeanOverCopies(objective.loss),
        objective.seed,
        objective.dtype,
    )
    return AugmentedView(objective, copied, augmentation, picture, objective.seed)


def picture_shape(layout: FeatureLayout, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, height, width) of a record; InputError for what is no picture."""
    first, *others = layout.inputs
    found = shape or first.shape
    if others or first.kind != "numbers" or len(found) not in (2, 3):
        said = f"of shape {found}" if not others else f"of {len(layout.inputs)} inputs"
        kind = " of whole numbers" if first.kind == "tokens" else ""
        raise InputError(
            "model.augment: shift and flip are for pictures, (height, width) or (channels, height, width); "
            f"records here are {said}{kind}"
        )
    channels, height, width = found if len(found) == 3 else (1, *found)
    if width <= _MAX_CHANNELS < channels:
        raise InputError(
            f"model.augment: records are of shape {found}; channels come first, (channels, height, width)"
        )
    return channels, height, width


def check_augmentation_allowed(objective: Objective, looked_at: Objective, name: str) -> None:
    """InputError where a row looks at the objective in a way of its own, which knows no rows of a batch."""
    inner = objective
    while isinstance(inner, View) and not isinstance(inner, AugmentedView):
        inner = inner.base
    if isinstance(inner, AugmentedView) and looked_at is not objective:
        raise InputError(f"model.augment: {name} takes records apart in its own way; use another algorithm")
