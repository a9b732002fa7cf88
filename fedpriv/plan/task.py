"""Task of a cell: the records of a federation as features of a model, partitioned over the silos.

A cell is one run of a scenario with all its settings, and a silo a party that holds records.  Records may be
grouped into units, persons or clients with several records each.  A record that a unit lacks is a row of zeros
with the label of an absent record, -1 or NaN.  This label is also that of a row that has a place among the
training (or test) records and does not count there, because it is incomplete, spared, or one of the other part.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.errors import InputError, refuse
from fedpriv.core.extensions import table_revision
from fedpriv.data.encode import Scaling
from fedpriv.data.layout import FeatureLayout, describe_inputs
from fedpriv.data.named import display_name, find_file, find_schema, load, load_held_out
from fedpriv.data.own import Sites
from fedpriv.data.partition import (
    SiloRows,
    UnitTable,
    blank_labels,
    blank_training_share,
    counted_mask,
    draw_split,
    group_by_person,
    group_consecutive,
    index_persons,
    partition_by_site,
    partition_dirichlet,
    partition_iid,
    partition_shards,
)
from fedpriv.data.schema import TableSchema
from fedpriv.data.tables import file_version
from fedpriv.loss.features import augment_objective
from fedpriv.loss.goldstein import GoldsteinView
from fedpriv.loss.objective import Objective, Records, is_shipped, make_bfloat16_view
from fedpriv.loss.rows import ModuleSettings
from fedpriv.loss.scores import ScoreView, check_scores
from fedpriv.loss.views import absent_label, is_absent
from fedpriv.noise.trust import RECORD, USER, Unit
from fedpriv.papers.base import Settings
from fedpriv.papers.table import find_algorithm
from fedpriv.scenario.data import DataSection
from fedpriv.scenario.messages import format_fitting_batches
from fedpriv.scenario.schema import Cell, ModelSection


def group_records(records: Records, units: UnitTable) -> Records:
    """Group records into units, with a row of zeros and the label of an absent record for each absent one.

    Args:
        records: Records, (n, ...).
        units: Row indices of each unit, (units, max_records), negative for an absent record.

    Returns:
        Records (units, max_records, ...), or (units, ...) if a unit is one record.
    """
    count, max_records = units.shape
    if np.array_equal(units.ravel(), np.arange(units.size)):  # consecutive rows, of which a view needs no copy
        shape = (count, max_records) if max_records > 1 else (count,)
        return Records(*(column[: units.size].view(*shape, *column.shape[1:]) for column in records))
    indices = torch.from_numpy(units if max_records > 1 else units[:, 0])
    is_present = indices >= 0
    features, labels = (column[indices.clamp(min=0)] for column in records)
    features = features.where(is_present.view(*is_present.shape, *[1] * (features.dim() - is_present.dim())), 0)
    return Records(features, labels.where(is_present, absent_label(labels)))


def order_by_site(test: Records, sites: Sites | None) -> tuple[Records, tuple[tuple[str, int], ...]]:
    """Sort test records by site, in the order of `sites.names`, and count them.

    Args:
        test: Test records.
        sites: Sites of the data, whose `test` has the site of each record, or None for data without sites.

    Returns:
        The records and (name, number of records) of each site.  Without sites of test records the records are
        unchanged and the list is empty.
    """
    if sites is None or not sites.test.size:
        return test, ()
    order = torch.from_numpy(np.argsort(sites.test, kind="stable"))
    counts = np.bincount(sites.test, minlength=len(sites.names)).tolist()
    return Records(*(column[order] for column in test)), tuple(zip(sites.names, counts, strict=True))


_CLIENT_SEED = 0
"""Seed of clients whose records a partition skews ("dirichlet", "shards"), for any scenario's seed."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class PublicTask:
    """Data set as features of a model, as a server needs it: without training records."""

    objective: Objective
    """Loss of the cell's model over such records."""
    test: Records
    """Test records that count, sorted by site if the data name the sites, or none (`make_schema_task`)."""
    site_sizes: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)
    """Name and number of records of each site, in the order of `test`, or empty without sites."""
    label_unit: float = field(default=1.0, kw_only=True)
    """Number of units of a real target that a difference of 1 between labels stands for, 1 for classes."""
    label_shape: tuple[int, ...] = field(default=(), kw_only=True)
    """Shape of one record's labels, or () for a single label."""


@dataclass(frozen=True)
class Task(PublicTask):
    """Public task with the training records."""

    train: Records
    """Training records, or units of them if `unit_indices` is set."""
    train_sites: NDArray[np.int64] | None = field(default=None, kw_only=True)
    """Site of each row of `train`, or None if the data name no sites.

    A person has the site of the first row with the person's name, and a client that of the client's first record.
    """
    persons: NDArray[np.str_] | None = field(default=None, kw_only=True)
    """Person of each training record, or None if the data name no persons."""
    unit_indices: UnitTable | None = field(default=None, kw_only=True)
    """Row indices, in the training part, of each unit's records, or None if rows are records.

    An absent record of a unit has the index -1.
    """
    test_with_missing: Records = field(kw_only=True)
    """Test part of the data, or held-out training records, with all rows, whether they count or not.

    `test` holds the rows that count.
    """
    test_sites: NDArray[np.int64] | None = field(default=None, kw_only=True)
    """Site of each row of `test_with_missing`, or None if these rows are of no site."""
    test_index_of_train: NDArray[np.int64] | None = field(default=None, kw_only=True)
    """Row index in `test_with_missing` of each training record of the data, or None.

    It is set for a file whose rows each have a place in both parts, if no training records are held out.
    """


def make_records(features: Tensor, labels: NDArray[Any], dtype: torch.dtype) -> Records:
    """Combine features with labels, where a regression's labels get type `dtype`.

    Labels of rows that do not count, -1 or NaN, stay so.  Several labels of a record are moved to the end of its
    features, and its `labels` then only state whether it counts.

    Args:
        features: (B, f).
        labels: (B,) classes or numbers, or (B, …) for several labels of a record.
        dtype: Type of real-valued labels in the result.

    Returns:
        Features (B, f), or (B, f + labels of a record), and labels (B,).
    """
    counts = counted_mask(labels)
    if labels.ndim > 1:
        label_columns = torch.from_numpy(np.where(counts[:, None], labels.reshape(len(labels), -1), 0))
        features = torch.cat([features, label_columns.to(features.dtype)], dim=1)
        labels = blank_labels(np.zeros(len(labels), labels.dtype), counts)
    label_tensor = torch.from_numpy(labels)
    return Records(features, label_tensor.to(dtype if label_tensor.is_floating_point() else label_tensor.dtype))


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of a cell's model: the data set, and the map of its records.

    Tasks are cached by these inputs, so that cells which differ in other settings can share one.
    """

    data_name: str
    """Name of the data set."""
    model: ModelSection
    """Section [model], with the map from records to features."""
    dtype: str
    """Type of the features, "float32" or "float64"."""
    table: TableSchema | None = None
    """Schema of a table in [data], or None."""
    scaling: Scaling | None = None
    """Means and deviations of the table's columns of numbers, or None if columns are not scaled."""
    resplit: tuple[int | None, float | None] = (None, None)
    """Number of a new split and spared share of the training records, each None for data as published.

    They are `data.split` and `data.spared`.
    """
    algorithm: tuple[str, Settings] | None = None
    """Name and settings of an algorithm that extends the model, or None."""
    file_version: tuple[int, int] = (0, 0)
    """Size and time of modification of the data set's file, or zeros if it has none."""
    registry_revision: int = field(default_factory=table_revision)
    """Revision of the tables to which extensions add rows."""

    @staticmethod
    def from_cell(cell: Cell) -> "ModelInputs":
        data, algorithm = cell.data, cell.algorithm
        return ModelInputs(
            data.name,
            cell.model,
            cell.run.dtype,
            data.table,
            data.scaling,
            data.split_and_spared,
            None if algorithm.row.model is None else (algorithm.name, algorithm.settings),
            file_version(find_file(data.name)),
        )

    def compute_features(self, images: NDArray[Any]) -> Tensor:
        """Scale columns by `scaling`, if it is given, then apply the model's map to each record."""
        raw_features = images if self.scaling is None else self.scaling.apply(images)
        return self.model.row.features(raw_features, DTYPES[self.dtype], self.model.settings)

    def make_records(self, images: NDArray[Any], labels: NDArray[Any]) -> Records:
        """Return the records as inputs of the model (see `make_records` of the module)."""
        return make_records(self.compute_features(images), labels, DTYPES[self.dtype])

    def make_layout(self, images: NDArray[Any], labels: NDArray[Any], classes: int) -> FeatureLayout:
        """Return the layout of a row of features, which no value of the data decides.

        Raises:
            InputError: The model's map is a user's, and gives records of zeros and ones other features together
                than each alone.
        """
        probe = np.ones_like(images[:1], shape=(3, *images.shape[1:]))
        probe[0] = probe[2:].reshape(-1)[::2] = 0
        refuse(
            {
                f"model.name = {self.model.name!r}: a record's features follow from other records, and no clip "
                "bounds that; map each row by itself, with public constants": (
                    not is_shipped(self.model.row.features)
                    and not torch.allclose(
                        self.compute_features(probe),
                        torch.cat([self.compute_features(probe[row : row + 1]) for row in range(3)]),
                        equal_nan=True,
                    )
                )
            }
        )
        record = self.make_records(
            np.zeros_like(images[:1], shape=(1, *images.shape[1:])), np.zeros((1, *labels.shape[1:]))
        )
        return FeatureLayout(
            record.features.shape[1], describe_inputs(images), labels.shape[1:], labels_are_classes=classes > 0
        )

    def check_data(self, classes: int) -> None:
        """Check that the model is for labels of this kind, and for this data set.

        Args:
            classes: Number of classes, 0 for real targets.

        Raises:
            InputError: The model is for labels of the other kind, or for another data set only.
        """
        if self.model.is_regression != (classes == 0):
            raise InputError(
                f"model.name = {self.model.name!r} does not fit data.name = {self.data_name!r}, whose labels are "
                f"{'real numbers' if classes == 0 else 'classes'}"
            )
        self.model.row.check_data(self.model.name, self.data_name)

    def make_objective(self, layout: FeatureLayout, classes: int) -> Objective:
        """Return the model's loss over records of this layout.

        A module's loss may be over augmented records, and an algorithm may extend the loss.

        Args:
            layout: Layout of a row of features.
            classes: Number of classes, 0 for real targets.

        Raises:
            InputError: The model or the algorithm does not fit the records.
        """
        row = self.model.row
        extend = None if self.algorithm is None else find_algorithm(self.algorithm[0]).model
        if layout.label_shape and not row.several_labels:
            raise InputError(
                f"model.name = {self.model.name!r}: takes one label a record, and here labels are of shape "
                f"{layout.label_shape}; a module of your own takes several, with a loss such as 'binary'"
            )
        settings = self.model.settings
        objective = row.objective(layout, classes, DTYPES[self.dtype], settings)
        if isinstance(settings, ModuleSettings):
            objective = augment_objective(objective, settings.augment, layout, getattr(settings, "shape", ()))
        return objective if self.algorithm is None or extend is None else extend(self.algorithm[1], objective)


@lru_cache(maxsize=2)
def _load_public_task(inputs: ModelInputs) -> PublicTask:
    """Load the public part of a task: its objective, and test records sorted by site."""
    held_out = load_held_out(inputs.data_name, table=inputs.table)
    inputs.check_data(held_out.class_count)
    test, site_sizes = order_by_site(inputs.make_records(held_out.images, held_out.labels), held_out.sites)
    layout = inputs.make_layout(held_out.images, held_out.labels, held_out.class_count)
    return PublicTask(
        inputs.make_objective(layout, held_out.class_count),
        test,
        site_sizes=site_sizes,
        label_unit=held_out.label_scale,
        label_shape=layout.label_shape,
    )


def load_public_task(cell: Cell) -> PublicTask:
    """Return the task of a deployment's server, with the metrics of the scenario if the server evaluates.

    If the server does not evaluate and the data are a table, the table's schema suffices, and no record is loaded.

    Raises:
        InputError: The scenario holds out, splits or spares training records, which the server does not have, the
            test records cannot be loaded, or data, model and metrics do not fit together.
    """
    refuse(
        {
            "data.validation: the server of a deployment has no training records to hold out": (
                cell.data.validation is not None
            ),
            "data.split, data.spared: the records of a deployment are what its silos have; leave them out": (
                cell.data.split_and_spared != (None, None)
            ),
        }
    )
    by_server = cell.evaluation is None and cell.model.row.evaluated
    if not by_server and (schema := cell.data.table_schema) is not None:
        return make_schema_task(cell, schema)
    task = _load_public_task(ModelInputs.from_cell(cell))
    return dataclasses.replace(task, objective=_add_metrics(task, cell))


def make_schema_task(cell: Cell, schema: TableSchema) -> PublicTask:
    """Return the task without any record, from the public schema of a table.

    Only rows of zeros are mapped, to learn the layout of features.

    Raises:
        InputError: The model, or an algorithm that extends it, does not fit the schema.
    """
    inputs = ModelInputs.from_cell(cell)
    inputs.check_data(schema.class_count)
    image, label = (
        np.zeros((1, len(schema.raw_columns) if cell.model.row.of_cells else schema.width)),
        np.zeros(1, np.int64),
    )
    records, layout = inputs.make_records(image, label), inputs.make_layout(image, label, schema.class_count)
    return PublicTask(
        inputs.make_objective(layout, schema.class_count),
        Records(records.features[:0], records.labels[:0]),
        label_unit=schema.label_scale,
    )


@lru_cache(maxsize=2)
def load_task_of_inputs(inputs: ModelInputs, validation: int | None = None) -> Task:
    """Load training and test records as features, and the model's objective.

    The task is cached and shared, so that callers must not write to it.

    Args:
        inputs: Data set, and map of its records.
        validation: Number of training records that are held out as test records, or None to use the test records.

    Raises:
        InputError: The data cannot be loaded, data and model do not fit, or there are too few records.
    """
    # The data set, with a new split (`data.split`) and with spared records (`data.spared`) as rows that do not
    # count.  Features that are still to be scaled are not rounded before.
    data, model, (split, spared_share) = inputs.data_name, inputs.model, inputs.resplit
    dataset = load(
        data,
        table=inputs.table,
        with_cells=model.row.of_cells,
        dtype=inputs.dtype if inputs.scaling is None else "float64",
    )
    dataset = dataset if split is None else draw_split(dataset, split)
    dataset = dataset if spared_share is None else blank_training_share(dataset, spared_share)
    inputs.check_data(dataset.class_count)
    train_images, test_images = dataset.train_images, dataset.test_images
    if model.row.of_cells:
        if dataset.raw_cells is None:
            raise InputError(
                f"model.name = {model.name!r} takes the cells of a table, and {display_name(data)} is none; take "
                "another model, or a table"
            )
        # Only training records have raw cells, and test records get zeros in place of theirs.
        train_images, test_images = dataset.raw_cells, np.zeros((len(test_images), dataset.raw_cells.shape[1]))
    # Features, and training records held out in place of test records.
    layout = inputs.make_layout(train_images, dataset.train_labels, dataset.class_count)
    train = inputs.make_records(train_images, dataset.train_labels)
    test = inputs.make_records(test_images, dataset.test_labels)
    sites = dataset.sites
    if validation is not None:
        if validation >= len(train.labels):
            raise InputError(
                f"data.validation = {validation}: {data} has {len(train.labels)} training records; hold out fewer"
            )
        train, test = (
            Records(*(column[rows] for column in train)) for rows in (slice(-validation), slice(-validation, None))
        )
        if sites is not None:
            sites = Sites(sites.names, sites.train[:-validation], sites.train[-validation:])
    counts_mask = counted_mask(test.labels.numpy())
    if model.row.evaluated and not counts_mask.any():
        raise InputError(
            f"{display_name(data)}: has no test records; look at `split` and `test_share`"
            if validation is None
            else f"data.validation = {validation}: none of these training records counts; hold out more"
        )
    # Test records that count, sorted by site.
    scored_records, site_sizes = order_by_site(
        Records(*(column[torch.from_numpy(counts_mask)] for column in test)) if not counts_mask.all() else test,
        None if sites is None or not sites.test.size else Sites(sites.names, sites.train, sites.test[counts_mask]),
    )
    # If all rows of a file are in both parts, the test part has the order of the file.  The row index of a
    # training record in the file is then its index in the test part.
    rows_in_both = (
        (schema := find_schema(data, inputs.table)) is not None and schema.splits_by_content and validation is None
    )
    return Task(
        inputs.make_objective(layout, dataset.class_count),
        scored_records,
        train,
        site_sizes=site_sizes,
        label_unit=dataset.label_scale,
        label_shape=layout.label_shape,
        train_sites=None if sites is None else sites.train,
        persons=None if dataset.persons is None else dataset.persons[: len(train.labels)],
        test_with_missing=test,
        test_sites=None if sites is None or not sites.test.size else sites.test,
        test_index_of_train=dataset.row_indices[0] if rows_in_both and dataset.row_indices is not None else None,
    )


def load_task(cell: Cell) -> Task:
    """Return the cell's task, with units as rows, and with the scenario's metrics unless silos evaluate.

    Rows are single records if these are the unit of protection.  If the scenario sets `run.passes`, the objective
    computes gradients in bfloat16.

    Raises:
        InputError: Data, model and metrics cannot be loaded or do not fit, or there are too few records.
    """
    unit, inputs, validation = cell.privacy.protected_unit, ModelInputs.from_cell(cell), cell.data.validation
    if unit.name == RECORD.name:
        task = load_task_of_inputs(inputs, validation)
    else:
        # With the partition "iid" a client's records are consecutive in the data, and need no section [data].
        clients, data = cell.federation.clients, cell.data
        task = _load_unit_task(
            unit, inputs, validation, None if clients is None or data.partition == "iid" else (clients, data)
        )
    objective = _add_metrics(task, cell)
    if cell.run.passes is not None:
        objective = make_bfloat16_view(objective, task.train)
    return dataclasses.replace(task, objective=objective)


@lru_cache(maxsize=1)
def _load_unit_task(
    unit: Unit, inputs: ModelInputs, validation: int | None, clients: tuple[int, DataSection] | None
) -> Task:
    """Load the task whose training rows are units.

    A unit is a person with the first `max_records` records that count, with absent records if there are fewer, or
    a client with `max_records` records.

    Args:
        unit: Unit of protection, "user" or "client".
        inputs: Data set, and map of its records.
        validation: Number of training records that are held out, or None.
        clients: Number of clients with the section [data] that partitions records over them, or None for persons,
            and for clients whose records are consecutive in the data.
    """
    task = load_task_of_inputs(inputs, validation)
    count = len(task.train.labels)
    if clients is not None and clients[0] * unit.max_records <= count:
        client_count, section = clients
        units = np.stack(
            _partition_rows(section, task.train.labels.numpy(), [unit.max_records] * client_count, _CLIENT_SEED)
        )
    elif unit.name == USER.name:
        assert task.persons is not None  # checked with the cell
        units = group_by_person(task.persons, unit.max_records, counted_mask(task.train.labels.numpy()))
    else:  # `check_record_count` refuses too many clients for the records
        units = group_consecutive(count, unit.max_records)
    # A client has the site of its first record, a person that of the first row, whether this row counts or not.
    first_rows = units[:, 0] if task.persons is None or unit.name != USER.name else index_persons(task.persons)[0]
    return dataclasses.replace(
        task,
        train=group_records(task.train, units),
        unit_indices=units,
        train_sites=None if task.train_sites is None else task.train_sites[first_rows],
    )


def _add_metrics(task: PublicTask, cell: Cell) -> Objective:
    """Return the task's objective with the metrics of the scenario, as views that score the test records.

    A view wraps the objective.  A `ScoreView` computes `run.metrics`, and with `run.per_silo` metrics of each
    site.  A `GoldsteinView` estimates how stationary the model is, by gradients within `run.goldstein_radius`.  If
    silos evaluate, or the scenario sets none of these keys, the objective is unchanged.

    Raises:
        InputError: A metric cannot be computed on the test records or for the model, the records are of no site
            with `run.per_silo`, or a site has none of them.
    """
    objective, run = task.objective, cell.run
    if cell.evaluation is not None:  # silos evaluate and send sums
        return objective
    if run.metrics and task.label_shape:
        raise InputError(
            f"run.metrics: {', '.join(run.metrics)} are of one label a record, and here labels are of shape "
            f"{task.label_shape}; leave them out"
        )
    if run.metrics or run.per_silo:
        silos = task.site_sizes if run.per_silo else ()
        refuse(
            {
                "run.per_silo: the test records are of no site; give `test` a data set for each silo": (
                    run.per_silo and not silos
                ),
                **{
                    f"run.per_silo: {name!r} has no test records; leave it out, or give it some": not count
                    for name, count in silos
                },
            }
        )
        model = cell.model
        first_record = Records(task.test.features[:1], task.test.labels[:1])
        bins = objective.outputs(objective.initial(), first_record).shape[-1] if model.is_survival else 0
        check_scores(run.metrics, task.test.labels, silos, regression=model.is_regression, bins=bins)
        objective = ScoreView(objective, run.metrics, silos, task.label_unit)
    if run.goldstein_radius is None:
        return objective
    refuse(
        {
            "run.goldstein_radius: it is for records with one class or number each; leave it out": (
                bool(task.label_shape) or cell.model.is_survival
            ),
            "run.goldstein_radius: an evaluation has no copies of model.augment; leave one of them out": (
                isinstance(cell.model.settings, ModuleSettings) and cell.model.settings.augment is not None
            ),
        }
    )
    return GoldsteinView(objective, run.goldstein_radius)


def check_record_count(cell: Cell) -> None:
    """Check that the data set has as many training records as one pass of the cell reads.

    A pass reads (batches of a silo) · (sum of the silos' batch sizes) records, or units if these are the rows of
    the task.  With a partition by site, each site needs the records of its silo's pass.

    Raises:
        InputError: There are too few records, or more sites than silos, or the data cannot be used (`load_task`).
    """
    task, batches = load_task(cell), cell.schedule.batches_per_silo
    if cell.data.partition == "site":
        assert task.train_sites is not None
        counts = np.bincount(task.train_sites, minlength=cell.federation.silos).tolist()
        if len(counts) > cell.federation.silos:
            raise InputError(f"federation.silos = {cell.federation.silos}: the records are of {len(counts)} sites")
        schema = cell.data.table_schema
        names = [f"silo {silo}" for silo in range(len(counts))] if schema is None else schema.sites
        for name, count, batch in zip(names, counts, cell.batch_sizes, strict=True):
            if batches * batch > count:
                raise InputError(
                    f"federation: one pass of {name!r} is {batches} batches of {batch} records, {batches * batch} "
                    f"in all, but it has {count} training records; give each silo its own number in "
                    "federation.batches"
                )
        return
    records, batch = len(task.train.labels), sum(cell.batch_sizes)
    if cell.federation.clients is not None and batches * batch > records:
        raise InputError(
            f"federation.clients = {cell.federation.clients}: the training records of {cell.data.name} make "
            f"{records} clients of {cell.privacy.protected_unit.max_records}"
        )
    if batches * batch > records:
        raise InputError(
            f"federation: one pass is {batches} batches of {batch} records of all silos, {batches} * {batch} = "
            f"{batches * batch}, but {display_name(cell.data.name)} has "
            f"{format_fitting_batches(records, batches, batch)}"
        )


def partition_records(cell: Cell) -> list[Tensor]:
    """Return the row indices of each silo's training records, in reading order.

    Rows are single records, or units (persons or clients) if these are the rows of the task.  They are drawn with
    the cell's seed: iid, skewed by label, or by site.  A pool of clients counts as one silo.

    Guarantee: no row is held twice, so that each record or unit of the federation is one of one silo at most.

    Returns:
        A tensor (batches · batch size,) for each silo.

    Raises:
        InputError: `check_record_count` refuses the cell, or the partition does not fit labels or rows.
    """
    check_record_count(cell)
    task = load_task(cell)
    labels, batches = row_labels(task), cell.schedule.batches_per_silo
    if task.label_shape and cell.data.partition in ("dirichlet", "shards"):
        raise InputError(
            f"data.partition = {cell.data.partition!r}: skews one label a record, and records here have labels of "
            f"shape {task.label_shape}; take 'iid'"
        )
    sizes = [batches * batch for batch in cell.batch_sizes]
    if cell.federation.clients is not None:  # clients are skewed in their records, not silos in their clients
        shares = partition_iid(labels, sizes, cell.seed)
    elif cell.data.partition == "site":
        assert task.train_sites is not None
        shares = partition_by_site(task.train_sites, sizes, cell.seed)
    else:
        shares = _partition_rows(cell.data, labels, sizes, cell.seed)
    return [torch.from_numpy(share) for share in shares]


def row_labels(task: Task) -> NDArray[Any]:
    """Return the label of each training row, (rows,).

    For rows of several records this is the first record's label.
    """
    return task.train.labels.flatten(1)[:, 0].numpy() if task.train.labels.dim() > 1 else task.train.labels.numpy()


def _partition_rows(data: DataSection, labels: NDArray[np.int64], sizes: list[int], seed: int) -> SiloRows:
    """Partition rows over silos, or over clients, at random or skewed by label.

    Args:
        data: Section [data], whose `partition` is "dirichlet", "shards" or "iid", with its parameter.
        labels: Label of each row, (rows,).
        sizes: Number of rows of each silo or client.
        seed: Seed of the draw.

    Returns:
        Row indices of each silo or client, as many as its size.

    Raises:
        InputError: There are too few rows for these sizes, a size is below 1, or below the number of shards.
    """
    if data.partition == "dirichlet":
        assert data.concentration is not None
        return partition_dirichlet(labels, sizes, seed, data.concentration)
    if data.partition == "shards":
        assert data.shards is not None
        return partition_shards(labels, sizes, seed, data.shards)
    return partition_iid(labels, sizes, seed)


def mask_absent_records(records: Records) -> tuple[Records, Tensor]:
    """Replace the labels of absent records by 0, and return the mask of the present ones.

    Labels and mask are (..., B).

    Guarantee: with weight 0 where a record is absent, its row adds nothing to a sum, whatever the loss is.
    """
    missing = is_absent(records.labels)
    return Records(records.features, records.labels.masked_fill(missing, 0)), ~missing
