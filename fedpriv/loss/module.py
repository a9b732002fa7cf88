"""Torch modules as objectives, with per-record gradients by torch.func.

The trainable parameters of a module are the flat point, (d,), and x_1 is the point at which a run starts.  A
record's increment is Σ_k c_k ∇f(x_k; record) for the points x_k and coefficients c_k of a query, clipped as a
whole.  Replicates are runs that are computed side by side, on the leading axes of points and records.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from fedpriv.core.errors import InputError
from fedpriv.core.random import public_generator
from fedpriv.core.replicates import Scalar, max_values_at_once
from fedpriv.loss.alone import aligned_copy, map_records, reason_of
from fedpriv.loss.clipping import Clipping, compute_clipping, upper_norm, vector_bounds
from fedpriv.loss.frozen import FunctionalModule, frozen_names, trainable_parameters
from fedpriv.loss.losses import Loss
from fedpriv.loss.objective import Batch, Deterministic, Increment, ModelEvaluation, Query, Records
from fedpriv.loss.unrolled import make_vmap_module
from fedpriv.participation.orders import Dependence

_CHUNK_VALUES = 2**20
"""Values of gradients that `increment` computes at a time on a CPU, or those of one record."""
_EVALUATION_VALUES = 2**20
"""Values of features that are evaluated at a time on a CPU, or those of one record."""
_EVALUATION_RECORDS = 256
"""Most records that are evaluated at a time on a CPU."""
_DRAWN_VALUES = 2**16
"""Values of x_1 that are drawn at a time."""


@dataclass(frozen=True)
class BaseModuleObjective(Deterministic):
    """Loss of a module's outputs, without known constants."""

    module: nn.Module
    """Module that maps (records, features) to outputs (records, …)."""
    loss: Loss
    """Loss of the outputs and labels."""
    seed: int
    """Seed of x_1."""
    dtype: torch.dtype
    """Type of x_1."""
    dependence = Dependence.RECORD
    lipschitz = math.inf
    smoothness = math.inf

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the trainable parameters by name, in the order of the point."""
        return trainable_shapes(self.module)

    @cached_property
    def dimension(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    def initial(self) -> Tensor:
        return draw_initial_point(self.module, self.seed, self.dtype)

    def evaluate(self, point: Tensor, records: Records) -> ModelEvaluation:
        outputs = self.outputs(point, records)
        return ModelEvaluation(
            self.loss.value(outputs, records.labels).mean(-1), self.loss.accuracy(outputs, records.labels)
        )


@dataclass(frozen=True)
class ModuleObjective(BaseModuleObjective):
    """Loss of a module's outputs, with per-record gradients by torch.func.

    Guarantee: each record passes through the module alone, in a batch of one, so its gradient and its outputs
    depend on no other record but for rounding, whatever the module's code does with a batch.  A record on which
    the module or the loss raises a RuntimeError, IndexError or ValueError adds nothing and counts as clipped, and
    no other record is touched, with the exceptions below.  Every call has buffers of its own (`FunctionalModule`);
    beside these buffers the code is trusted to keep nothing between calls.  A parameter that is not trained is a
    constant: it is in no query, no gradient and no norm.

    `increment` and `per_record` raise such an error if it occurs

    * at one point on all records that are computed at a time,
    * on zeros in place of a record, or on a batch but on none of its records,
    * on a batch of several records with "random" in its message, as an InputError.

    They raise any other error that occurs on one record.

    Raises:
        InputError: `check_module` refuses the module.
    """

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_module(self.module)

    def increment(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Sum the weighted clipped increments of a batch, replicate by replicate.

        Args:
            query: Combination of gradients, at points (..., d), whose leading axes are replicates.
            batch: Records (..., B, …), one or more, and weights, (..., B) or (B,).
            clip: Norm bound, a number or (..., 1).

        Returns:
            The sum, (..., d) in the type of the weights, and the number of clipped records, (...).
        """
        records, weights = batch
        # The leading axes become one axis of replicates: points (R, d), features (R, B, …), weights (R, B).
        leading = query.points[0].shape[:-1]
        replicate_points = [point.reshape(-1, self.dimension) for point in query.points]
        features = records.features.reshape(-1, *records.features.shape[len(leading) :])
        labels = records.labels.reshape(-1, *records.labels.shape[records.record_axis :])
        replicate_weights = weights.expand(records.features.shape[:-1]).reshape(labels.shape[:2])
        clips = clip.reshape(-1) if isinstance(clip, Tensor) else [clip] * len(replicate_points[0])
        increments = [
            self._increment_of_replicate(
                Query([replicate_point[replicate] for replicate_point in replicate_points], query.coefficients),
                Batch(Records(features[replicate], labels[replicate]), replicate_weights[replicate]),
                clips[replicate],
            )
            for replicate in range(len(replicate_points[0]))
        ]
        total, clipped = (torch.stack(columns) for columns in zip(*increments, strict=True))
        return Increment(total.view(*leading, -1), clipped.view(leading))

    def _increment_of_replicate(self, query: Query, batch: Batch, clip: Scalar) -> Increment:
        """Sum the weighted clipped increments of one replicate, a chunk of records at a time.

        The query has points (d,), and the batch records (B, …) and weights (B,).
        """
        records, weights = batch
        chunk_size = max(
            1, max_values_at_once(_CHUNK_VALUES, weights.device) // (self.dimension * len(query.points))
        )
        total = torch.zeros_like(query.points[0], dtype=weights.dtype)
        clipped = torch.zeros((), dtype=torch.int64, device=weights.device)
        for features, labels, weight in zip(
            *(torch.split(part, chunk_size) for part in (*records, weights)), strict=True
        ):
            combined, chunk = self._clip_increments(query, Batch(Records(features, labels), weight), clip)
            # A record's factor is its weight times the factor that clips its increment.
            total += torch.cat([chunk.factor @ part for part in combined])
            clipped += chunk.clipped_count
        return Increment(total, clipped)

    def per_record(self, query: Query, batch: Batch, rows: Tensor, clip: float) -> Tensor:
        combined, clipped = self._clip_increments(query, batch, clip)
        return torch.cat(combined, dim=-1) * clipped.factor.unsqueeze(-1)

    def _clip_increments(self, query: Query, batch: Batch, clip: Scalar) -> tuple[list[Tensor], Clipping]:
        """Increments of a batch by parameters, (B, size) each, and the clipping of each record.

        The increments are unclipped, in the type of the weights.  Increments that are not representable are zero.
        """
        weights, points = batch.weights, [unflatten_point(self.shapes, point) for point in query.points]
        gradients = list(zip(query.coefficients, self._per_record_gradients(points, batch.records), strict=True))
        # For each parameter Σ_k c_k · (gradient at point k), (B, size).
        combined = [
            torch.stack([coefficient * gradient[name] for coefficient, gradient in gradients])
            .sum(0)
            .reshape(len(weights), self.shapes[name].numel())
            .to(weights.dtype)
            for name in points[0]
        ]
        clipped = compute_clipping(
            vector_bounds(upper_norm(torch.stack([upper_norm(gradient) for gradient in combined]), axis=0)),
            weights,
            clip,
        )
        return [clipped.zero_unrepresentable(gradient) for gradient in combined], clipped

    def _per_record_gradients(
        self, points: Sequence[dict[str, Tensor]], records: Records
    ) -> list[dict[str, Tensor]]:
        """Gradient of each record at each point, (B, *shape) by parameter, NaN where module or loss raises.

        vmap computes a batch of several records at once.  If it raises, each record is tried alone.  Records that
        raise get NaN.  If all of them raise, as they do if vmap cannot run the module, gradients are computed
        without vmap.

        Args:
            points: Parameters by name, (*shape) each, at each point.
            records: Records of the batch, (B, …).

        Raises:
            InputError: The module draws random numbers of torch, or its error on a batch speaks of random numbers.
            RuntimeError, IndexError, ValueError: Module or loss raises on every record, on the batch but on no
                single record, or on zeros in place of a record.  Other errors of the two are passed on.
        """
        if len(records.labels) == 1:
            return [self._gradient_of_one(parameters, records) for parameters in points]
        batch_gradients = vmap(grad(self._loss_of_one), in_dims=(None, 0, 0))
        try:
            return [batch_gradients(parameters, *records) for parameters in points]
        except (RuntimeError, IndexError, ValueError) as error:
            if "random" in str(error):  # vmap refuses random numbers by such a message
                raise self._randomness_error() from None
            raising = torch.tensor([self._raises(points, Records(*record)) for record in _single_records(records)])
            if not raising.any():
                raise
            if raising.all():  # vmap has no rule for an operation, or the module raises
                return self._gradients_without_vmap(points, records, error)
            # Zeros for these records keep the shape of the batch: rows of other shapes may be rounded otherwise.
            quiet_records = [column.where(~_broadcast_mask(raising, column), 0) for column in records]
            return [
                {
                    name: values.where(~_broadcast_mask(raising, values), torch.nan)
                    for name, values in gradient.items()
                }
                for gradient in (batch_gradients(parameters, *quiet_records) for parameters in points)
            ]

    def _gradients_without_vmap(
        self, points: Sequence[dict[str, Tensor]], records: Records, error: Exception
    ) -> list[dict[str, Tensor]]:
        """Gradient of each record at each point, by one pass of autograd for each record and point.

        `error` is raised if every record raises at one of the points.

        Returns:
            Gradients (B, *shape) by parameter for each point, NaN where module, loss or autograd raises a
            RuntimeError, an IndexError or a ValueError.
        """
        gradients = []
        for parameters in points:
            rows: list[dict[str, Tensor] | None] = []
            for record in _single_records(records):
                try:
                    rows.append(self._gradient_of_one(parameters, Records(*record)))
                except (RuntimeError, IndexError, ValueError):
                    rows.append(None)
            if not any(rows):
                raise error
            gradients.append(
                {
                    name: torch.cat(
                        [
                            torch.full_like(value, torch.nan).unsqueeze(0) if row is None else row[name]
                            for row in rows
                        ]
                    )
                    for name, value in parameters.items()
                }
            )
        return gradients

    def _gradient_of_one(self, parameters: dict[str, Tensor], records: Records) -> dict[str, Tensor]:
        """Gradient of one record, a batch (1, …), by autograd without vmap: (1, *shape) by parameter.

        Raises:
            InputError: The module draws numbers from torch's CPU generator.  Errors of the module and of autograd
                are passed on.
        """
        rng_state = torch.get_rng_state()
        with torch.inference_mode(False), torch.enable_grad():
            leaves = {name: aligned_copy(value).requires_grad_() for name, value in parameters.items()}
            loss = self.loss.value(
                self.functional_module(leaves, aligned_copy(records.features)), aligned_copy(records.labels)
            ).squeeze(0)
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        if not torch.equal(rng_state, torch.get_rng_state()):
            raise self._randomness_error()
        return {name: gradient.to_dense().unsqueeze(0) for name, gradient in zip(leaves, gradients, strict=True)}

    def _randomness_error(self) -> InputError:
        return InputError(
            f"model: {type(self.module).__name__} draws random numbers in its forward pass; "
            "a model without dropout can be used"
        )

    def _raises(self, points: Sequence[dict[str, Tensor]], record: Records) -> bool:
        """Whether module or loss raises under vmap on a record, (1, …), at one of the points.

        A RuntimeError, an IndexError or a ValueError counts.  Other errors are passed on.
        """
        gradients = vmap(grad(self._loss_of_one), in_dims=(None, 0, 0))
        try:
            for parameters in points:
                gradients(parameters, *record)
        except (RuntimeError, IndexError, ValueError):
            return True
        return False

    def _loss_of_one(self, parameters: dict[str, Tensor], features: Tensor, label: Tensor) -> Tensor:
        return self.loss.value(
            self._call_under_vmap(parameters, features.unsqueeze(0)), label.unsqueeze(0)
        ).squeeze(0)

    def outputs(self, point: Tensor, records: Records) -> Tensor:
        """Compute the outputs of every record, (..., B, …), a block of records at a time.

        Blocks of several records are computed under vmap.  If it raises a RuntimeError, an IndexError or a
        ValueError, the module is called on one record after another.

        Args:
            point: Models, (..., d).
            records: Records without leading axes, (B, …).

        Raises:
            InputError: The module raises on a record, raises another error under vmap, or gives outputs of
                different shapes.
        """
        max_values = max_values_at_once(_EVALUATION_VALUES, point.device)
        block_size = min(
            max_values_at_once(_EVALUATION_RECORDS, point.device),
            max(1, max_values // max(1, records.features.shape[1:].numel())),
        )
        blocks = torch.split(records.features, block_size)

        def outputs_at(row: Tensor) -> Tensor:
            parameters = unflatten_point(self.shapes, aligned_copy(row))
            call, batch_call = (
                partial(self.functional_module, parameters),
                partial(self._call_under_vmap, parameters),
            )
            try:
                return torch.cat([map_records(batch_call if len(block) > 1 else call, block) for block in blocks])
            except (RuntimeError, IndexError, ValueError):
                # vmap has no rule for an operation, or the module raises.
                return torch.cat([call(row) for row in torch.split(records.features, 1)])

        try:
            outputs = torch.stack([outputs_at(row) for row in point.reshape(-1, self.dimension)])
        except Exception as error:  # a module may raise any error
            raise InputError(
                f"model: {type(self.module).__name__} fails on a record that it is evaluated on "
                f"({reason_of(error)})"
            ) from None
        return outputs.view(*point.shape[:-1], *outputs.shape[1:])

    @cached_property
    def functional_module(self) -> FunctionalModule:
        return FunctionalModule(self.module)

    @cached_property
    def vmap_module(self) -> FunctionalModule:
        """The module, with layers that vmap can batch (`make_vmap_module`)."""
        return FunctionalModule(make_vmap_module(self.module))

    def _call_under_vmap(self, parameters: dict[str, Tensor], features: Tensor) -> Tensor:
        """Call the module on one record inside a vmap."""
        with sdpa_kernel(SDPBackend.MATH):  # vmap runs other implementations record after record
            return self.vmap_module(parameters, features)


def _single_records(records: Records) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(records.features, 1), torch.split(records.labels, 1), strict=True)


def _broadcast_mask(mask: Tensor, values: Tensor) -> Tensor:
    """Reshape a mask (B,) to (B, 1, …), to be used with values (B, …)."""
    return mask.view(-1, *(1,) * (values.dim() - 1))


def unflatten_parameters(module: nn.Module, point: Tensor) -> dict[str, Tensor]:
    """View flat parameters (..., d) as `trainable_parameters`, tensors (..., *shape) by name."""
    return unflatten_point(trainable_shapes(module), point)


def trainable_shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the trainable parameters by name."""
    return {name: parameter.shape for name, parameter in trainable_parameters(module).items()}


def unflatten_point(shapes: Mapping[str, torch.Size], point: Tensor) -> dict[str, Tensor]:
    """View a flat point (..., d) as tensors (..., *shape) by name."""
    pieces = torch.split(point, [shape.numel() for shape in shapes.values()], dim=-1)
    return {
        name: piece.view((*point.shape[:-1], *shape))
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


def draw_initial_point(module: nn.Module, seed: int, dtype: torch.dtype) -> Tensor:
    """Draw x_1 (d,) from `seed`, with weights and biases uniform in ±1/√(fan in).

    The fan in of a weight is the number of its values divided by the length of its first axis, and a bias has that
    of its layer's weight.  torch initializes its Linear and convolution layers with the same distribution (He et
    al. 2015, a = √5).  Parameters that their layer names in `begin_at_zero` are zero.  Parameters of one axis or
    none, whose layer has no `weight` of two axes or more, such as the scales of a normalization, keep the module's
    values.

    Args:
        module: Module whose trainable parameters make up the point, in the order of `trainable_parameters`.
        seed: Seed of the point.
        dtype: Type of the point.
    """
    generator, trainable = public_generator(seed, "initial model"), trainable_parameters(module)
    point = torch.empty(sum(parameter.numel() for parameter in trainable.values()), dtype=dtype)
    views = torch.split(point, [parameter.numel() for parameter in trainable.values()])
    for (name, parameter), values in zip(trainable.items(), views, strict=True):
        layer_name, _, own_name = name.rpartition(".")
        layer = module.get_submodule(layer_name)
        layer_weight = getattr(layer, "weight", None)
        weight = layer_weight if parameter.dim() < 2 and isinstance(layer_weight, Tensor) else parameter
        if own_name in getattr(layer, "begin_at_zero", ()):
            values.zero_()
        elif weight.dim() > 1:
            bound = 1.0 / math.sqrt(weight.numel() / weight.shape[0])
            # In chunks, so that no copy of a large parameter in float64 exists beside the point.
            for chunk in torch.split(values, _DRAWN_VALUES):
                chunk.copy_(torch.from_numpy(generator.uniform(-bound, bound, chunk.numel())))
        else:
            values.copy_(parameter.detach().flatten())
    return point


def check_module(module: nn.Module) -> None:
    """Refuse a module with a layer that cannot be used, or without trainable parameters, and run nothing.

    Raises:
        InputError: A layer, which is named, is refused, or no parameter is trainable.
    """
    for name, layer in module.named_modules():
        if reason := why_refused(layer):
            raise InputError(f"model: layer {name or 'itself'} ({type(layer).__name__}) {reason}")
    if not trainable_parameters(module):
        frozen_note = "; requires_grad = False for all it has" if frozen_names(module) else ""
        raise InputError(f"model: the module has no parameters to train{frozen_note}")


def why_refused(layer: nn.Module) -> str | None:
    """Return the reason why a layer cannot be used, with an alternative, or None if none is known.

    Refused are layers that mix records (BatchNorm without fixed statistics, an embedding scaled by frequency),
    remember records (running statistics), draw random numbers (dropout, RReLU, fractional pooling) or change their
    weight (`max_norm`), layers without parameters yet (lazy ones), and layers with a backward hook, which runs for
    each record, for a batch or not at all, depending on how gradients are computed.
    """
    dropout = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0.0)
    quiet_layer = "LeakyReLU" if isinstance(layer, nn.RReLU) else "MaxPool"
    reasons = {
        "mixes the records of a batch; GroupNorm or LayerNorm does not": (
            isinstance(layer, _BatchNorm) and (layer.training or not layer.track_running_stats)
        ),
        "remembers the records of earlier calls; track_running_stats = False does not": (
            isinstance(layer, _NormBase) and layer.training and layer.track_running_stats
        ),
        "draws random numbers; a model without dropout, or with p = 0, can be used": (
            isinstance(dropout, float | int) and dropout > 0.0
        ),
        f"draws random numbers; {quiet_layer} does not": (
            isinstance(layer, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
        ),
        "changes its weight in the forward pass; max_norm = None does not": (
            isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None
        ),
        "counts the words of a whole batch; scale_grad_by_freq = False does not": (
            isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq
        ),
        "has no parameters yet; call the module on a record once": any(
            map(is_lazy, layer.parameters(recurse=False))
        ),
        "has a backward hook, which runs or not by the number of records; remove it, or compute its gradient in a "
        "torch.autograd.Function": bool(layer._backward_hooks or layer._backward_pre_hooks),
    }
    return next((reason for reason, is_refused in reasons.items() if is_refused), None)
