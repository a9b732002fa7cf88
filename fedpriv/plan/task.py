"""Task of a cell: the records of a federation, loaded once, turned into features and spread over the silos.

Records may be grouped into units, persons or clients with several records each; a unit that is not there is zeros.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.extensions import table_revision
from fedpriv.data.encode import Scaling
from fedpriv.data.layout import FeatureLayout, describe_inputs
from fedpriv.data.named import display_name, find_schema, load, load_held_out
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
from fedpriv.loss.features import augment_objective
from fedpriv.loss.goldstein import GoldsteinView
from fedpriv.loss.objective import Objective, Records, make_bfloat16_view
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
    """`records` (n, ...) as units: (units, most, ...), or (units, ...) where a unit is one record.

    Units in the order of the records are a view of them.
    """
    count, most = units.shape
    if np.array_equal(units.ravel(), np.arange(units.size)):
        shape = (count, most) if most > 1 else (count,)
        return Records(*(column[: units.size].view(*shape, *column.shape[1:]) for column in records))
    index = torch.from_numpy(units if most > 1 else units[:, 0])
    there = index >= 0
    features, labels = (column[index.clamp(min=0)] for column in records)
    features = features.where(there.view(*there.shape, *[1] * (features.dim() - there.dim())), 0)
    return Records(features, labels.where(there, absent_label(labels)))


def order_by_site(test: Records, sites: Sites | None) -> tuple[Records, tuple[tuple[str, int], ...]]:
    """The test records in the order of their sites, and how many each has; as they are without sites."""
    if sites is None:
        return test, ()
    order = torch.from_numpy(np.argsort(sites.test, kind="stable"))
    counts = np.bincount(sites.test, minlength=len(sites.names)).tolist()
    return Records(*(column[order] for column in test)), tuple(zip(sites.names, counts, strict=True))


_CLIENT_SEED = 0
"""The seed that skews records over clients: seeds of a scenario draw cohorts and noise, not other clients."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class PublicTask:
    """A data set seen through a model, as a server needs it: without a training record."""

    objective: Objective
    test: Records
    """Silo by silo, where the data say whose records they are."""
    site_sizes: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)
    """The sites of the test records in that order: (name, records)."""
    label_unit: float = field(default=1.0, kw_only=True)
    """How much of a real target's own unit 1 of a label is."""
    label_shape: tuple[int, ...] = field(default=(), kw_only=True)
    """Shape of a record's labels; () of one."""


@dataclass(frozen=True)
class Task(PublicTask):
    """With the training records, which only silos and simulations have."""

    train: Records
    train_sites: NDArray[np.int64] | None = field(default=None, kw_only=True)
    """Which site each training record belongs to, if the data say so."""
    persons: NDArray[np.str_] | None = field(default=None, kw_only=True)
    """Whose each training record is, if the data say so."""
    unit_indices: UnitTable | None = field(default=None, kw_only=True)
    """Which training records of the data make up each row of `train`; None where rows are records."""
    test_with_missing: Records = field(kw_only=True)
    """Every place of a test record, as the data have them, at `test_sites`; `test` are those that count."""
    test_sites: NDArray[np.int64] | None = field(default=None, kw_only=True)
    test_index_of_train: NDArray[np.int64] | None = field(default=None, kw_only=True)
    """Which of `tests` each training record is, where every row of a file has a place in both parts."""


def make_records(features: Tensor, labels: NDArray[Any], dtype: torch.dtype) -> Records:
    """Put labels beside features: classes as they are, numbers of a regression in `dtype`.

    Several labels of a record lie behind its features, and say beside them only whether the record counts.
    """
    counts = counted_mask(labels)
    if labels.ndim > 1:
        behind = torch.from_numpy(np.where(counts[:, None], labels.reshape(len(labels), -1), 0))
        features = torch.cat([features, behind.to(features.dtype)], dim=1)
        labels = blank_labels(np.zeros(len(labels), labels.dtype), counts)
    of_records = torch.from_numpy(labels)
    return Records(features, of_records.to(dtype if of_records.is_floating_point() else of_records.dtype))


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of a cell's model, everything that its task depends on: the data set, and the map of its records."""

    data_name: str
    model: ModelSection
    dtype: str
    table: TableSchema | None = None
    scaling: Scaling | None = None
    resplit: tuple[int | None, float | None] = (None, None)
    """`data.split` and `data.spared`: which records are tested, and how many are trained on."""
    algorithm: tuple[str, Settings] | None = None
    """The row that asks records for more than a gradient, and its settings."""
    registry_revision: int = field(default_factory=table_revision)
    """Of the tables that get rows of somebody's own."""

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
        )

    def compute_features(self, images: NDArray[Any]) -> Tensor:
        """Scale columns by what a first step gave, then apply the model's own map, record by record."""
        given = images if self.scaling is None else self.scaling.apply(images)
        return self.model.row.features(given, DTYPES[self.dtype], self.model.settings)

    def make_records(self, images: NDArray[Any], labels: NDArray[Any]) -> Records:
        """The records as the model sees them: see `labelled_records`."""
        return make_records(self.compute_features(images), labels, DTYPES[self.dtype])

    def make_layout(self, images: NDArray[Any], labels: NDArray[Any], classes: int) -> FeatureLayout:
        """What lies where in a row of `records`; no value is looked at."""
        one = self.make_records(
            np.zeros_like(images[:1], shape=(1, *images.shape[1:])), np.zeros((1, *labels.shape[1:]))
        )
        return FeatureLayout(
            one.features.shape[1], describe_inputs(images), labels.shape[1:], labels_are_classes=classes > 0
        )

    def make_objective(self, layout: FeatureLayout, classes: int) -> Objective:
        """The model's loss over records of this layout; InputError for several labels where it takes one."""
        row = self.model.row
        if layout.label_shape and not row.several_labels:
            raise InputError(
                f"model.name = {self.model.name!r}: takes one label a record, and here labels are of shape "
                f"{layout.label_shape}; a module of your own takes several, with a loss such as 'binary'"
            )
        settings = self.model.settings
        objective = row.objective(layout, classes, DTYPES[self.dtype], settings)
        if isinstance(settings, ModuleSettings):
            objective = augment_objective(objective, settings.augment, layout, getattr(settings, "shape", ()))
        return (
            objective
            if self.algorithm is None or (model := find_algorithm(self.algorithm[0]).model) is None
            else model(self.algorithm[1], objective)
        )


@lru_cache(maxsize=2)
def _load_public_task(inputs: ModelInputs) -> PublicTask:
    """The public part of a task, loaded on first use."""
    inputs.model.row.check_data(inputs.model.name, inputs.data_name)
    part = load_held_out(inputs.data_name, table=inputs.table)
    test, silos = order_by_site(inputs.make_records(part.images, part.labels), part.sites)
    layout = inputs.make_layout(part.images, part.labels, part.class_count)
    return PublicTask(
        inputs.make_objective(layout, part.class_count),
        test,
        site_sizes=silos,
        label_unit=part.label_scale,
        label_shape=layout.label_shape,
    )


def load_public_task(cell: Cell) -> PublicTask:
    """InputError if the scenario holds out training records, of which a deployment's server has none."""
    if cell.data.validation is not None:
        raise InputError("data.validation: the server of a deployment has no training records to hold out")
    if cell.data.split_and_spared != (None, None):
        raise InputError(
            "data.split, data.spared: the records of a deployment are what its silos have; leave them out"
        )
    by_server = cell.evaluation is None and cell.model.row.evaluated
    if not by_server and (schema := cell.data.table_schema) is not None:
        return make_schema_task(cell, schema)
    task = _load_public_task(ModelInputs.from_cell(cell))
    return dataclasses.replace(task, objective=_add_metrics(task, cell))


def make_schema_task(cell: Cell, schema: TableSchema) -> PublicTask:
    """The task of a server that has no table: silos evaluate, the rest follows from what is public about it."""
    inputs = ModelInputs.from_cell(cell)
    image = np.zeros((1, len(schema.raw_columns) if cell.model.row.of_cells else schema.width))
    label = np.zeros(1, np.int64)
    one, layout = inputs.make_records(image, label), inputs.make_layout(image, label, schema.class_count)
    return PublicTask(
        inputs.make_objective(layout, schema.class_count),
        Records(one.features[:0], one.labels[:0]),
        label_unit=schema.label_scale,
    )


@lru_cache(maxsize=2)
def load_task_of_inputs(inputs: ModelInputs, validation: int | None = None) -> Task:
    """The task, loaded on first use; the cache holds what is never written to."""
    data, model = inputs.data_name, inputs.model
    dataset = load(
        data,
        table=inputs.table,
        with_cells=model.row.of_cells,
        dtype=inputs.dtype if inputs.scaling is None else "float64",
    )
    split, share = inputs.resplit
    dataset = dataset if split is None else draw_split(dataset, split)
    dataset = dataset if share is None else blank_training_share(dataset, share)
    if model.is_regression != (dataset.class_count == 0):
        labels = "real numbers" if dataset.class_count == 0 else "classes"
        raise InputError(
            f"model.name = {model.name!r} does not fit data.name = {data!r}, whose labels are {labels}"
        )
    model.row.check_data(model.name, data)
    if model.row.evaluated and not counted_mask(dataset.test_labels).any():
        raise InputError(f"{display_name(data)}: has no test records; look at `split` and `test_share`")
    train_images, test_images = dataset.train_images, dataset.test_images
    if model.row.of_cells:
        if dataset.raw_cells is None:
            raise InputError(f"model.name = {model.name!r}: is of a table, and {display_name(data)} is none")
        train_images, test_images = dataset.raw_cells, np.zeros((len(test_images), dataset.raw_cells.shape[1]))
    layout = inputs.make_layout(train_images, dataset.train_labels, dataset.class_count)
    train = inputs.make_records(train_images, dataset.train_labels)
    test = inputs.make_records(test_images, dataset.test_labels)
    sites = dataset.sites
    if validation is not None:
        if validation >= len(train.labels):
            raise InputError(f"data.validation = {validation}: {data} has {len(train.labels)} training records")
        train, test = (
            Records(*(column[part] for column in train)) for part in (slice(-validation), slice(-validation, None))
        )
        if sites is not None:
            sites = Sites(sites.names, sites.train[:-validation], sites.train[-validation:])
    counting = counted_mask(test.labels.numpy())
    scored, silos = order_by_site(
        Records(*(column[torch.from_numpy(counting)] for column in test)) if not counting.all() else test,
        None if sites is None else Sites(sites.names, sites.train, sites.test[counting]),
    )
    both = (
        (schema := find_schema(data, inputs.table)) is not None and schema.splits_by_content and validation is None
    )
    return Task(
        inputs.make_objective(layout, dataset.class_count),
        scored,
        train,
        site_sizes=silos,
        label_unit=dataset.label_scale,
        label_shape=layout.label_shape,
        train_sites=None if sites is None else sites.train,
        persons=None if dataset.persons is None else dataset.persons[: len(train.labels)],
        test_with_missing=test,
        test_sites=None if sites is None else sites.test,
        test_index_of_train=dataset.row_indices[0] if both and dataset.row_indices is not None else None,
    )


def load_task(cell: Cell) -> Task:
    unit, inputs, validation = cell.privacy.protected_unit, ModelInputs.from_cell(cell), cell.data.validation
    if unit.name == RECORD.name:
        task = load_task_of_inputs(inputs, validation)
    else:
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
    """The task whose training rows are units: persons, or clients of so many records each.

    `clients`: how many a pool has and how their records are skewed; None for those in a row of the data.
    """
    task = load_task_of_inputs(inputs, validation)
    count = len(task.train.labels)
    if unit.name == USER.name:
        assert task.persons is not None  # a cell is checked for it
        units = group_by_person(task.persons, unit.max_records, counted_mask(task.train.labels.numpy()))
    elif clients is not None and clients[0] * unit.max_records <= count:
        number, section = clients
        units = np.stack(
            _partition_rows(section, task.train.labels.numpy(), [unit.max_records] * number, _CLIENT_SEED)
        )
    else:  # too many clients for the records are refused by `check_records`
        units = group_consecutive(count, unit.max_records)
    whose = units[:, 0] if task.persons is None or unit.name != USER.name else index_persons(task.persons)[0]
    return dataclasses.replace(
        task,
        train=group_records(task.train, units),
        unit_indices=units,
        train_sites=None if task.train_sites is None else task.train_sites[whose],
    )


def _add_metrics(task: PublicTask, cell: Cell) -> Objective:
    """The task's objective with what the scenario wants measured; InputError for what its test records lack."""
    objective, run = task.objective, cell.run
    if cell.evaluation is not None:  # silos send sums
        return objective
    if run.metrics and task.label_shape:
        raise InputError(
            f"run.metrics: {', '.join(run.metrics)} are of one label a record, and here labels are of shape "
            f"{task.label_shape}; leave them out"
        )
    if run.metrics or run.per_silo:
        silos = task.site_sizes if run.per_silo else ()
        if run.per_silo and (empty := [name for name, count in silos if not count]):
            raise InputError(f"run.per_silo: {empty[0]!r} has no test records; leave it out, or give it some")
        model = cell.model
        check_scores(
            run.metrics, task.test.labels, silos, regression=model.is_regression, survival=model.is_survival
        )
        objective = ScoreView(objective, run.metrics, silos, task.label_unit)
    if run.goldstein_radius is None:
        return objective
    if task.label_shape or cell.model.is_survival:
        raise InputError("run.goldstein_radius: is of records with one label each; leave it out")
    return GoldsteinView(objective, run.goldstein_radius)


def check_record_count(cell: Cell) -> None:
    """InputError if the cell asks for more training records than its data set has."""
    task = load_task(cell)
    if cell.data.partition == "site":
        _check_site_sizes(cell, task)
        return
    records, batches, batch = len(task.train.labels), cell.schedule.batches_per_silo, sum(cell.batch_sizes)
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


def _check_site_sizes(cell: Cell, task: Task) -> None:
    """InputError, naming the site, unless each has the training records that its silo reads."""
    schema, batches = cell.data.table_schema, cell.schedule.batches_per_silo
    assert schema is not None
    assert task.train_sites is not None
    counts = np.bincount(task.train_sites, minlength=len(schema.sites))
    for name, has, batch in zip(schema.sites, counts.tolist(), cell.batch_sizes, strict=True):
        if batches * batch > has:
            raise InputError(
                f"federation: one pass of {name!r} is {batches} batches of {batch} records, {batches * batch} in "
                f"all, but it has {has} training records; give each silo its own number in federation.batches"
            )


def partition_records(cell: Cell) -> list[Tensor]:
    """Which training records each silo holds, in the order it reads them: (batches * its batch,) for each silo.

    Guarantee: no record is held twice, so one record of one silo is one record of the federation.  InputError
    if the scenario asks for more records than there are.
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
    if cell.federation.clients is not None:  # whose records are skewed, not they among silos
        shares = partition_iid(labels, sizes, cell.seed)
    elif cell.data.partition == "site":
        assert task.train_sites is not None
        shares = partition_by_site(task.train_sites, sizes, cell.seed)
    else:
        shares = _partition_rows(cell.data, labels, sizes, cell.seed)
    return [torch.from_numpy(share) for share in shares]


def row_labels(task: Task) -> NDArray[Any]:
    """Of the rows of the training records; of several records, the first one's."""
    return task.train.labels.flatten(1)[:, 0].numpy() if task.train.labels.dim() > 1 else task.train.labels.numpy()


def _partition_rows(data: DataSection, labels: NDArray[np.int64], sizes: list[int], seed: int) -> SiloRows:
    """The partition that [data] names; by site it is none of labels."""
    if data.partition == "dirichlet":
        assert data.concentration is not None
        return partition_dirichlet(labels, sizes, seed, data.concentration)
    if data.partition == "shards":
        assert data.shards is not None
        return partition_shards(labels, sizes, seed, data.shards)
    return partition_iid(labels, sizes, seed)


def mask_absent_records(records: Records) -> tuple[Records, Tensor]:
    """Rows of single records with labels for all of them, and which of them are there, both (..., B).

    Guarantee: with weight 0 where it is not there, a row adds nothing to a sum, whatever the loss is.
    """
    missing = is_absent(records.labels)
    return Records(records.features, records.labels.masked_fill(missing, 0)), ~missing
