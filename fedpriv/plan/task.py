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
from fedpriv.core.extensions import revision
from fedpriv.data.encode import Scaling
from fedpriv.data.layout import Layout, inputs_of
from fedpriv.data.named import called, load, load_test, schema_of
from fedpriv.data.own import Sites
from fedpriv.data.partition import (
    Shares,
    Table,
    blanked,
    by_site,
    counted,
    dirichlet,
    iid,
    in_a_row,
    of_persons,
    resplit,
    roster,
    shards,
    spared,
)
from fedpriv.data.schema import TableSchema
from fedpriv.loss.features import augmented
from fedpriv.loss.goldstein import Measured
from fedpriv.loss.objective import Objective, Records, short_passes
from fedpriv.loss.rows import ModuleSettings
from fedpriv.loss.scores import Scored, check_scores
from fedpriv.loss.views import absent, is_absent
from fedpriv.noise.trust import RECORD, USER, Unit
from fedpriv.papers.base import Settings
from fedpriv.papers.table import algorithm_named
from fedpriv.scenario.data import DataSection
from fedpriv.scenario.messages import enough_for
from fedpriv.scenario.schema import Cell, ModelSection


def rows_of(records: Records, units: Table) -> Records:
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
    return Records(features, labels.where(there, absent(labels)))


def silo_by_silo(test: Records, sites: Sites | None) -> tuple[Records, tuple[tuple[str, int], ...]]:
    """The test records in the order of their sites, and how many each has; as they are without sites."""
    if sites is None:
        return test, ()
    order = torch.from_numpy(np.argsort(sites.test, kind="stable"))
    counts = np.bincount(sites.test, minlength=len(sites.names)).tolist()
    return Records(*(column[order] for column in test)), tuple(zip(sites.names, counts, strict=True))


_SAME_CLIENTS = 0
"""The seed that skews records over clients: seeds of a scenario draw cohorts and noise, not other clients."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class PublicTask:
    """A data set seen through a model, as a server needs it: without a training record."""

    objective: Objective
    test: Records
    """Silo by silo, where the data say whose records they are."""
    silos: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)
    """The sites of the test records in that order: (name, records)."""
    unit: float = field(default=1.0, kw_only=True)
    """How much of a real target's own unit 1 of a label is."""
    labels: tuple[int, ...] = field(default=(), kw_only=True)
    """Shape of a record's labels; () of one."""


@dataclass(frozen=True)
class Task(PublicTask):
    """With the training records, which only silos and simulations have."""

    train: Records
    sites: NDArray[np.int64] | None = field(default=None, kw_only=True)
    """Which site each training record belongs to, if the data say so."""
    persons: NDArray[np.str_] | None = field(default=None, kw_only=True)
    """Whose each training record is, if the data say so."""
    units: Table | None = field(default=None, kw_only=True)
    """Which training records of the data make up each row of `train`; None where rows are records."""
    tests: Records = field(kw_only=True)
    """Every place of a test record, as the data have them, at `test_sites`; `test` are those that count."""
    test_sites: NDArray[np.int64] | None = field(default=None, kw_only=True)
    rows: NDArray[np.int64] | None = field(default=None, kw_only=True)
    """Which of `tests` each training record is, where every row of a file has a place in both parts."""


def labelled_records(features: Tensor, labels: NDArray[Any], dtype: torch.dtype) -> Records:
    """Put labels beside features: classes as they are, numbers of a regression in `dtype`.

    Several labels of a record lie behind its features, and say beside them only whether the record counts.
    """
    counts = counted(labels)
    if labels.ndim > 1:
        behind = torch.from_numpy(np.where(counts[:, None], labels.reshape(len(labels), -1), 0))
        features = torch.cat([features, behind.to(features.dtype)], dim=1)
        labels = blanked(np.zeros(len(labels), labels.dtype), counts)
    of_records = torch.from_numpy(labels)
    return Records(features, of_records.to(dtype if of_records.is_floating_point() else of_records.dtype))


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of a cell's model, everything that its task depends on: the data set, and the map of its records."""

    data: str
    model: ModelSection
    dtype: str
    table: TableSchema | None = None
    scaling: Scaling | None = None
    redrawn: tuple[int | None, float | None] = (None, None)
    """`data.split` and `data.spared`: which records are tested, and how many are trained on."""
    asked: tuple[str, Settings] | None = None
    """The row that asks records for more than a gradient, and its settings."""
    revision: int = field(default_factory=revision)
    """Of the tables that get rows of somebody's own."""

    @staticmethod
    def of(cell: Cell) -> "ModelInputs":
        data, algorithm = cell.data, cell.algorithm
        return ModelInputs(
            data.name,
            cell.model,
            cell.run.dtype,
            data.table,
            data.scaling,
            data.redrawn,
            None if algorithm.row.model is None else (algorithm.name, algorithm.settings),
        )

    def features(self, images: NDArray[Any]) -> Tensor:
        """Scale columns by what a first step gave, then apply the model's own map, record by record."""
        given = images if self.scaling is None else self.scaling.applied(images)
        return self.model.row.features(given, DTYPES[self.dtype], self.model.settings)

    def records(self, images: NDArray[Any], labels: NDArray[Any]) -> Records:
        """The records as the model sees them: see `labelled_records`."""
        return labelled_records(self.features(images), labels, DTYPES[self.dtype])

    def layout(self, images: NDArray[Any], labels: NDArray[Any], classes: int) -> Layout:
        """What lies where in a row of `records`; no value is looked at."""
        one = self.records(
            np.zeros_like(images[:1], shape=(1, *images.shape[1:])), np.zeros((1, *labels.shape[1:]))
        )
        return Layout(one.features.shape[1], inputs_of(images), labels.shape[1:], classes=classes > 0)

    def objective(self, layout: Layout, classes: int) -> Objective:
        """The model's loss over records of this layout; InputError for several labels where it takes one."""
        row = self.model.row
        if layout.labels and not row.several_labels:
            raise InputError(
                f"model.name = {self.model.name!r}: takes one label a record, and here labels are of shape "
                f"{layout.labels}; a module of your own takes several, with a loss such as 'binary'"
            )
        settings = self.model.settings
        objective = row.objective(layout, classes, DTYPES[self.dtype], settings)
        if isinstance(settings, ModuleSettings):
            objective = augmented(objective, settings.augment, layout, getattr(settings, "shape", ()))
        return (
            objective
            if self.asked is None or (model := algorithm_named(self.asked[0]).model) is None
            else model(self.asked[1], objective)
        )


@lru_cache(maxsize=2)
def _public_task_of(inputs: ModelInputs) -> PublicTask:
    """The public part of a task, loaded on first use."""
    inputs.model.row.check_data(inputs.model.name, inputs.data)
    part = load_test(inputs.data, table=inputs.table)
    test, silos = silo_by_silo(inputs.records(part.images, part.labels), part.sites)
    layout = inputs.layout(part.images, part.labels, part.classes)
    return PublicTask(
        inputs.objective(layout, part.classes), test, silos=silos, unit=part.unit, labels=layout.labels
    )


def public_task_of_cell(cell: Cell) -> PublicTask:
    """InputError if the scenario holds out training records, of which a deployment's server has none."""
    if cell.data.validation is not None:
        raise InputError("data.validation: the server of a deployment has no training records to hold out")
    if cell.data.redrawn != (None, None):
        raise InputError(
            "data.split, data.spared: the records of a deployment are what its silos have; leave them out"
        )
    by_server = cell.evaluation is None and cell.model.row.evaluated
    if not by_server and (schema := cell.data.table_schema) is not None:
        return task_of_schema(cell, schema)
    task = _public_task_of(ModelInputs.of(cell))
    return dataclasses.replace(task, objective=_measured(task, cell))


def task_of_schema(cell: Cell, schema: TableSchema) -> PublicTask:
    """The task of a server that has no table: silos evaluate, the rest follows from what is public about it."""
    inputs = ModelInputs.of(cell)
    image = np.zeros((1, len(schema.raw) if cell.model.row.of_cells else schema.width))
    label = np.zeros(1, np.int64)
    one, layout = inputs.records(image, label), inputs.layout(image, label, schema.class_count)
    return PublicTask(
        inputs.objective(layout, schema.class_count), Records(one.features[:0], one.labels[:0]), unit=schema.unit
    )


@lru_cache(maxsize=2)
def task_of(inputs: ModelInputs, validation: int | None = None) -> Task:
    """The task, loaded on first use; the cache holds what is never written to."""
    data, model = inputs.data, inputs.model
    dataset = load(
        data,
        table=inputs.table,
        cells=model.row.of_cells,
        dtype=inputs.dtype if inputs.scaling is None else "float64",
    )
    split, share = inputs.redrawn
    dataset = dataset if split is None else resplit(dataset, split)
    dataset = dataset if share is None else spared(dataset, share)
    if model.regression != (dataset.classes == 0):
        labels = "real numbers" if dataset.classes == 0 else "classes"
        raise InputError(
            f"model.name = {model.name!r} does not fit data.name = {data!r}, whose labels are {labels}"
        )
    model.row.check_data(model.name, data)
    if model.row.evaluated and not counted(dataset.test_labels).any():
        raise InputError(f"{called(data)}: has no test records; look at `split` and `test_share`")
    train_images, test_images = dataset.train_images, dataset.test_images
    if model.row.of_cells:
        if dataset.cells is None:
            raise InputError(f"model.name = {model.name!r}: is of a table, and {called(data)} is none")
        train_images, test_images = dataset.cells, np.zeros((len(test_images), dataset.cells.shape[1]))
    layout = inputs.layout(train_images, dataset.train_labels, dataset.classes)
    train = inputs.records(train_images, dataset.train_labels)
    test = inputs.records(test_images, dataset.test_labels)
    sites = dataset.sites
    if validation is not None:
        if validation >= len(train.labels):
            raise InputError(f"data.validation = {validation}: {data} has {len(train.labels)} training records")
        train, test = (
            Records(*(column[part] for column in train)) for part in (slice(-validation), slice(-validation, None))
        )
        if sites is not None:
            sites = Sites(sites.names, sites.train[:-validation], sites.train[-validation:])
    counting = counted(test.labels.numpy())
    scored, silos = silo_by_silo(
        Records(*(column[torch.from_numpy(counting)] for column in test)) if not counting.all() else test,
        None if sites is None else Sites(sites.names, sites.train, sites.test[counting]),
    )
    both = (schema := schema_of(data, inputs.table)) is not None and schema.by_content and validation is None
    return Task(
        inputs.objective(layout, dataset.classes),
        scored,
        train,
        silos=silos,
        unit=dataset.unit,
        labels=layout.labels,
        sites=None if sites is None else sites.train,
        persons=None if dataset.persons is None else dataset.persons[: len(train.labels)],
        tests=test,
        test_sites=None if sites is None else sites.test,
        rows=dataset.rows[0] if both and dataset.rows is not None else None,
    )


def task_of_cell(cell: Cell) -> Task:
    unit, inputs, validation = cell.privacy.protected, ModelInputs.of(cell), cell.data.validation
    if unit.name == RECORD.name:
        task = task_of(inputs, validation)
    else:
        clients, data = cell.federation.clients, cell.data
        task = _by_units(
            unit, inputs, validation, None if clients is None or data.partition == "iid" else (clients, data)
        )
    objective = _measured(task, cell)
    if cell.run.passes is not None:
        objective = short_passes(objective, task.train)
    return dataclasses.replace(task, objective=objective)


@lru_cache(maxsize=1)
def _by_units(
    unit: Unit, inputs: ModelInputs, validation: int | None, clients: tuple[int, DataSection] | None
) -> Task:
    """The task whose training rows are units: persons, or clients of so many records each.

    `clients`: how many a pool has and how their records are skewed; None for those in a row of the data.
    """
    task = task_of(inputs, validation)
    count = len(task.train.labels)
    if unit.name == USER.name:
        assert task.persons is not None  # a cell is checked for it
        units = of_persons(task.persons, unit.records, counted(task.train.labels.numpy()))
    elif clients is not None and clients[0] * unit.records <= count:
        number, section = clients
        units = np.stack(_shares(section, task.train.labels.numpy(), [unit.records] * number, _SAME_CLIENTS))
    else:  # too many clients for the records are refused by `check_records`
        units = in_a_row(count, unit.records)
    whose = units[:, 0] if task.persons is None or unit.name != USER.name else roster(task.persons)[0]
    return dataclasses.replace(
        task,
        train=rows_of(task.train, units),
        units=units,
        sites=None if task.sites is None else task.sites[whose],
    )


def _measured(task: PublicTask, cell: Cell) -> Objective:
    """The task's objective with what the scenario wants measured; InputError for what its test records lack."""
    objective, run = task.objective, cell.run
    if cell.evaluation is not None:  # silos send sums
        return objective
    if run.metrics and task.labels:
        raise InputError(
            f"run.metrics: {', '.join(run.metrics)} are of one label a record, and here labels are of shape "
            f"{task.labels}; leave them out"
        )
    if run.metrics or run.per_silo:
        silos = task.silos if run.per_silo else ()
        if run.per_silo and (empty := [name for name, count in silos if not count]):
            raise InputError(f"run.per_silo: {empty[0]!r} has no test records; leave it out, or give it some")
        model = cell.model
        check_scores(run.metrics, task.test.labels, silos, regression=model.regression, survival=model.survival)
        objective = Scored(objective, run.metrics, silos, task.unit)
    if run.goldstein_radius is None:
        return objective
    if task.labels or cell.model.survival:
        raise InputError("run.goldstein_radius: is of records with one label each; leave it out")
    return Measured(objective, run.goldstein_radius)


def check_records(cell: Cell) -> None:
    """InputError if the cell asks for more training records than its data set has."""
    task = task_of_cell(cell)
    if cell.data.partition == "site":
        _check_sites(cell, task)
        return
    records, batches, batch = len(task.train.labels), cell.schedule.batches_held, sum(cell.batch_sizes)
    if cell.federation.clients is not None and batches * batch > records:
        raise InputError(
            f"federation.clients = {cell.federation.clients}: the training records of {cell.data.name} make "
            f"{records} clients of {cell.privacy.protected.records}"
        )
    if batches * batch > records:
        raise InputError(
            f"federation: one pass is {batches} batches of {batch} records of all silos, {batches} * {batch} = "
            f"{batches * batch}, but {called(cell.data.name)} has {enough_for(records, batches, batch)}"
        )


def _check_sites(cell: Cell, task: Task) -> None:
    """InputError, naming the site, unless each has the training records that its silo reads."""
    schema, batches = cell.data.table_schema, cell.schedule.batches_held
    assert schema is not None
    assert task.sites is not None
    counts = np.bincount(task.sites, minlength=len(schema.sites))
    for name, has, batch in zip(schema.sites, counts.tolist(), cell.batch_sizes, strict=True):
        if batches * batch > has:
            raise InputError(
                f"federation: one pass of {name!r} is {batches} batches of {batch} records, {batches * batch} in "
                f"all, but it has {has} training records; give each silo its own number in federation.batches"
            )


def spread(cell: Cell) -> list[Tensor]:
    """Which training records each silo holds, in the order it reads them: (batches * its batch,) for each silo.

    Guarantee: no record is held twice, so one record of one silo is one record of the federation.  InputError
    if the scenario asks for more records than there are.
    """
    check_records(cell)
    task = task_of_cell(cell)
    labels, batches = labels_of_rows(task), cell.schedule.batches_held
    if task.labels and cell.data.partition in ("dirichlet", "shards"):
        raise InputError(
            f"data.partition = {cell.data.partition!r}: skews one label a record, and records here have labels of "
            f"shape {task.labels}; take 'iid'"
        )
    sizes = [batches * batch for batch in cell.batch_sizes]
    if cell.federation.clients is not None:  # whose records are skewed, not they among silos
        shares = iid(labels, sizes, cell.seed)
    elif cell.data.partition == "site":
        assert task.sites is not None
        shares = by_site(task.sites, sizes, cell.seed)
    else:
        shares = _shares(cell.data, labels, sizes, cell.seed)
    return [torch.from_numpy(share) for share in shares]


def labels_of_rows(task: Task) -> NDArray[Any]:
    """Of the rows of the training records; of several records, the first one's."""
    return task.train.labels.flatten(1)[:, 0].numpy() if task.train.labels.dim() > 1 else task.train.labels.numpy()


def _shares(data: DataSection, labels: NDArray[np.int64], sizes: list[int], seed: int) -> Shares:
    """The partition that [data] names; by site it is none of labels."""
    if data.partition == "dirichlet":
        assert data.concentration is not None
        return dirichlet(labels, sizes, seed, data.concentration)
    if data.partition == "shards":
        assert data.shards is not None
        return shards(labels, sizes, seed, data.shards)
    return iid(labels, sizes, seed)


def counting(records: Records) -> tuple[Records, Tensor]:
    """Rows of single records with labels for all of them, and which of them are there, both (..., B).

    Guarantee: with weight 0 where it is not there, a row adds nothing to a sum, whatever the loss is.
    """
    missing = is_absent(records.labels)
    return Records(records.features, records.labels.masked_fill(missing, 0)), ~missing
