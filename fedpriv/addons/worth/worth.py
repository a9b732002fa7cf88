"""References that tell whether joining is worth it: local models, and the gains over them.

| term | meaning |
|---|---|
| D_i, T_i | training and test records of silo i |
| local_i | the scenario's model and features, fitted to D_i without noise and without a release |
| pooled | a fit to the records of the silos together, for simulations and public data only |
| released | x̂, the model that a run published |
| recalibrated | x̂ with its intercepts and its scale, if it has intercepts, fitted to D_i by the silo |
| gain_i | m(x̂, T_i) - m(local_i, T_i) for a metric m of which larger values are better |

References are the scores m(local_i, T_i), for at most 16 silos.  A model of linear scores has a loss f that is a
function of products of its parameters x with a record's features.  Spared records are training records that a run
does not read (`data.spared`).  A cell is one run, with every key of its scenario resolved.

A partition by labels gives a silo test records with about its own label shares.  On a common test set, a local
model would be judged on classes that are missing from its training records.

Not private: scores and gains are functions of the records without noise.
"""

import hashlib
import json
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from fedpriv.addons.worth.local_models import (
    PENALTIES,
    ROUGH_TOLERANCE,
    Floats,
    LinearHazards,
    SiloRecords,
    find_linear_hazards,
    fit_local_model,
    fit_personal_model,
    fitted,
    recalibrate,
    score_balanced,
    score_best_learner,
    score_constant,
    score_model,
)
from fedpriv.addons.worth.references import (
    MAX_REFERENCE_SILOS,
    ONE_CLASS_SHARE,
    LocalModelScores,
    References,
    cache_key,
    read_references,
    write_cached,
)
from fedpriv.core.errors import InputError
from fedpriv.core.random import public_generator
from fedpriv.core.replicates import limit_to_one_thread
from fedpriv.data.named import display_name
from fedpriv.data.partition import counted_mask, partition_alike
from fedpriv.loss.objective import Objective, Records, View, fast_paths
from fedpriv.noise.trust import CLIENT
from fedpriv.plan.task import Task, load_task, mask_absent_records, partition_records, row_labels
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.study.results import Results

_MAX_FOLDED_RECORDS = 20_000


@dataclass(frozen=True)
class Gains:
    """Gains of a published model over the local models, silo by silo in the order of the references."""

    released: tuple[float, ...]
    """Score m(x̂, T_i) of the released model."""
    recalibrated: tuple[float, ...]
    """Score of the recalibrated model."""
    gains: tuple[float, ...]
    """Score of the released model minus that of the local model."""
    balanced: tuple[float, ...]
    """Score of the released model.

    At a silo with more than 90 % of its training records in one class it is the mean accuracy over classes.
    """
    personal: tuple[float, ...] = ()
    """Scores of the personal models, empty if they were not requested."""
    pulls: tuple[float, ...] = ()
    """λ of the personal models, by which they are pulled to the released model."""
    judged: str = ""
    """Records by which the personal λ were chosen.

    The text is "spared" if all silos used spared records, otherwise "folds", or "" without personal models.
    """

    @property
    def gain(self) -> float:
        """Mean gain over silos."""
        return float(np.mean(self.gains))


def load_silo_records(cell: Cell, max_silos: int = MAX_REFERENCE_SILOS) -> tuple[int, list[SiloRecords]]:
    """Load the records of silos that have both training and test records.

    Args:
        cell: A cell of a scenario.
        max_silos: Most silos to return.  A public seed draws them if more silos have records of both kinds.

    Returns:
        The number of all silos, and the records of the chosen ones, in increasing order of the silos' numbers.

    Raises:
        InputError: Units are clients, a record has several labels, no silo has records of both kinds, or records
            cannot be loaded or partitioned.
    """
    if cell.privacy.protected_unit.name == CLIENT.name:
        raise InputError("privacy.unit = client: a client alone has too few records; worth is for silos")
    task, shares = load_task(cell), partition_records(cell)
    if task.label_shape:
        raise InputError(
            f"{display_name(cell.data.name)}: has labels of shape {task.label_shape} for each record; "
            "worth compares models of one label"
        )
    tests = _select_test_rows(cell, task, [share.numpy() for share in shares])
    usable = [
        silo
        for silo in range(len(shares))
        if len(tests[silo]) and len(_training_records(task, shares[silo])[0].labels)
    ]
    if not usable:
        raise InputError(
            f"worth: no silo of {cell.data.name} has records to train on and test records to be judged on"
        )
    if len(usable) > max_silos:
        sample = public_generator(cell.seed, "silos alone").permutation(len(usable))[:max_silos]
        usable = sorted(usable[index] for index in sample)
    names = _silo_names(cell, len(shares))
    # With "iid" all silos have the same test records, which share one copy.
    common = _test_records(task, tests[0]) if cell.data.partition == "iid" else None
    silo_records = [
        SiloRecords(
            silo, names[silo], *_training_records(task, shares[silo]), common or _test_records(task, tests[silo])
        )
        for silo in usable
    ]
    return len(shares), silo_records


def _silo_names(cell: Cell, silos: int) -> Sequence[str]:
    schema = cell.data.table_schema if cell.data.partition == "site" else None
    return [f"silo {silo}" for silo in range(silos)] if schema is None else schema.sites


def budget_shares(cell: Cell) -> Mapping[str, float]:
    """Return the share of the target that the records of each silo spend, by the silo's name.

    The mapping is empty if the cell has no shares, so that all silos spend the whole target.
    """
    shares = cell.privacy.shares or ()
    return dict(zip(_silo_names(cell, len(shares)), shares, strict=True)) if shares else {}


def _select_test_rows(cell: Cell, task: Task, shares: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Return the row indices of each silo's test records among the task's test records.

    `shares` has the row indices of each silo's training records.

    Rows that do not count, which have the label of an absent record, are left out.  With partition "site" a silo
    has the rows of its site, or all rows if test records are of no site.  With "iid" a silo has all rows.  With a
    partition by labels silos have equally many rows, in which labels are about as frequent as in the silo's
    training records.
    """
    labels = task.test_with_missing.labels.numpy()
    counts = np.flatnonzero(counted_mask(labels))
    if cell.data.partition == "site" and task.test_sites is not None:
        return [counts[task.test_sites[counts] == silo] for silo in range(len(shares))]
    if cell.data.partition in ("iid", "site"):
        return [counts for _ in shares]
    sizes = [len(counts) // len(shares)] * len(shares)
    partition = partition_alike(labels[counts], sizes, cell.seed, [row_labels(task)[share] for share in shares])
    return [counts[share] for share in partition]


def _training_records(task: Task, share: Tensor) -> tuple[Records, NDArray[np.int64]]:
    """Return a silo's n training records that count, and the number of each record's unit, (n,).

    A unit is what is protected: a record, or a person with several records.  Floating-point columns become
    float64.
    """
    rows = _to_float64(Records(*(column[share] for column in task.train)))
    if rows.labels.dim() > 1:  # units of several records each
        units = torch.arange(len(rows.labels)).unsqueeze(-1).expand(rows.labels.shape).flatten()
        rows = Records(rows.features.flatten(0, 1), rows.labels.flatten())
    else:
        units = torch.arange(len(rows.labels))
    rows, is_present = mask_absent_records(rows)
    return Records(rows.features[is_present], rows.labels[is_present]), units[is_present].numpy()


def _test_records(task: Task, tests: NDArray[np.int64]) -> Records:
    return _to_float64(Records(*(column[torch.from_numpy(tests)] for column in task.test_with_missing)))


def _to_float64(records: Records) -> Records:
    """Convert floating-point columns to float64, and leave classes unchanged."""
    return Records(*(column.double() if column.is_floating_point() else column for column in records))


def find_linear_objective(cell: Cell) -> Objective:
    """Return the cell's loss without its views, such as one that adds metrics.

    A linear hazard regression is returned as `LinearHazards`, the view that makes it one convex problem.

    Raises:
        InputError: The loss is no function of linear scores (`linear` of `fast_paths`), or has a penalty, or the
            cell's records cannot be loaded.
    """
    objective = load_task(cell).objective
    while isinstance(objective, View):
        objective = objective.base
    if fast_paths(objective).linear is not None:
        return objective
    if (hazards := find_linear_hazards(objective)) is not None:
        return hazards
    raise InputError(
        f"model.name = {cell.model.name!r}: worth fits these models alone so far: softmax, logistic, "
        "sigmoid and hazard regression, and least squares, without model.penalty"
    )


@limit_to_one_thread()
def compute_references(
    cell: Cell, *, with_any_learner: bool = False, report_progress: Callable[[str], None] = lambda _: None
) -> References:
    """Fit and judge the local models of up to 16 silos, or read the scores from the user's cache.

    Spared records are training records here, too.

    Args:
        cell: A cell of a scenario.
        with_any_learner: Also try learners of scikit-learn.
        report_progress: Receives a line of text for each silo, unless the scores are in the cache.

    Returns:
        Scores of the local models, also stored in the cache.

    Raises:
        InputError: The model is not one of linear scores, the records cannot be loaded or compared, or learners of
            scikit-learn cannot be tried.
    """
    cell = _without_spared(cell)
    objective = find_linear_objective(cell)
    silo_count, silos = load_silo_records(cell)
    records = digest_silos(silos)
    key = cache_key(cell) or records  # the digest, if nothing but the records identifies them
    cached = _verify_references(key, records, silos)
    if cached is not None and (not with_any_learner or cached.silos[0].any_learner is not None):
        return cached
    rows = []
    for number, silo in enumerate(silos, 1):
        report_progress(f"{silo.name} alone: {number} of {len(silos)}")
        point, kappa = fit_local_model(objective, silo, cell.seed)
        labels = silo.train.labels
        classes = not labels.is_floating_point() and not isinstance(objective, LinearHazards)
        share = float(torch.bincount(labels).max()) / len(labels) if classes else 0.0
        score, constant = score_model(objective, point, silo.test), score_constant(objective, silo)
        balanced = score_balanced(objective, point, silo.test) if share > ONE_CLASS_SHARE else score
        row = LocalModelScores(
            silo.silo, silo.name, len(labels), len(silo.test.labels), score, constant, kappa, share, balanced
        )
        if with_any_learner:
            best, learner = score_best_learner(objective, silo, cell.seed, point)
            row = replace(row, any_learner=best, learner=learner)
        rows.append(row)
    references = References("accuracy" if classes else "-loss", silo_count, tuple(rows))
    write_cached("alone", key, records, asdict(references))
    return references


def _without_spared(cell: Cell) -> Cell:
    """Return the cell without `data.spared`, because references use all training records of a silo."""
    return cell if cell.data.spared is None else resolve_cell(replace_data_keys(cell, spared=None), "spared")


def replace_data_keys(cell: Cell, **keys: Any) -> dict[str, Any]:
    """Return a cell's tree with the given keys of [data] replaced, or removed if the value is None."""
    tree = cell.canonical_data()
    return {**tree, "data": {key: value for key, value in {**tree["data"], **keys}.items() if value is not None}}


def _verify_references(key: str, records: str, silos: Sequence[SiloRecords]) -> References | None:
    """Return the cached references if they belong to these records and silos."""
    cached = read_references(key, records)
    sizes = [(silo.silo, silo.name, len(silo.train.labels), len(silo.test.labels)) for silo in silos]
    return (
        cached
        if cached is not None
        and [(scores.silo, scores.name, scores.train, scores.test) for scores in cached.silos] == sizes
        else None
    )


def digest_silos(silos: Sequence[SiloRecords]) -> str:
    """Return SHA-256 of the silos' records, names and numbers, as a hexadecimal text.

    The digest covers the number, name, count of training records, and training and test records of each silo as
    the model sees them, and the candidates for κ, the penalty of a local model's fit.
    """
    digest = hashlib.sha256(json.dumps(PENALTIES).encode())
    for silo in silos:
        digest.update(f"{silo.silo} {silo.name} {len(silo.train.labels)}".encode())
        for column in (*silo.train, *silo.test):
            digest.update(column.contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class GainEvaluator:
    """Records of the references' silos, with which any number of models can be judged."""

    cell: Cell
    """Cell without spared records."""
    objective: Objective
    """Loss of linear scores."""
    references: References
    """Scores of the local models."""
    silos: tuple[SiloRecords, ...]
    """Records of the silos, in the order of the references."""

    @limit_to_one_thread()
    def evaluate(self, released: Floats) -> Gains:
        """Compute the gain of a published model (d,) over each local model, and its scores.

        Raises:
            InputError: The model belongs to another scenario, or has a number that is not finite.
        """
        if released.shape != (self.objective.dimension,) or not np.isfinite(released).all():
            raise InputError(
                f"worth: a model of shape {released.shape} is of another scenario, or has a number that is not "
                f"finite; this scenario's models have {self.objective.dimension} finite numbers"
            )
        scores = [score_model(self.objective, released, records.test) for records in self.silos]
        recalibrated_scores = [
            score_model(self.objective, recalibrate(self.objective, records, released), records.test)
            for records in self.silos
        ]
        balanced = [
            score_balanced(self.objective, released, records.test) if local.majority > ONE_CLASS_SHARE else score
            for records, local, score in zip(self.silos, self.references.silos, scores, strict=True)
        ]
        gains = np.subtract(scores, [local.score for local in self.references.silos]).tolist()
        return Gains(tuple(scores), tuple(recalibrated_scores), tuple(gains), tuple(balanced))

    @limit_to_one_thread()
    def evaluate_personal(self, released: Floats, cell: Cell) -> tuple[list[float], list[float], str]:
        """Fit and judge each silo's personal model of the release of `cell`.

        Args:
            released: Released model, (d,).
            cell: Cell of the run, whose `data.spared` tells which records the release has read.

        Returns:
            The score and the λ of each silo's model, and the kind of records by which λ was chosen: "spared" if
            all silos used spared records, otherwise "folds".
        """
        models = [
            fit_personal_model(self.objective, records, released, self.cell.seed, local.penalty, is_seen)
            for records, local, is_seen in zip(
                self.silos, self.references.silos, find_seen_rows(cell, self.silos), strict=True
            )
        ]
        scores = [
            score_model(self.objective, model.point, records.test)
            for model, records in zip(models, self.silos, strict=True)
        ]
        judged = "spared" if all(model.judged == "spared" for model in models) else "folds"
        return scores, [model.pull_weight for model in models], judged


@limit_to_one_thread()
def make_evaluator(cell: Cell, references: References) -> GainEvaluator:
    """Load the records of the references' silos, to judge released models."""
    cell = _without_spared(cell)
    records_by_silo = {records.silo: records for records in load_silo_records(cell)[1]}
    return GainEvaluator(
        cell,
        find_linear_objective(cell),
        references,
        tuple(records_by_silo[local.silo] for local in references.silos),
    )


def evaluate_gains(cell: Cell, references: References, released: Floats, *, with_personal: bool = False) -> Gains:
    """Compute the gains of one released model, as `GainEvaluator.evaluate` does.

    With `with_personal` the silos' personal models are judged, too.
    """
    return _evaluate_gains(make_evaluator(cell, references), cell, released, with_personal=with_personal)


def _evaluate_gains(evaluator: GainEvaluator, cell: Cell, released: Floats, *, with_personal: bool) -> Gains:
    gains = evaluator.evaluate(released)
    if not with_personal:
        return gains
    scores, pulls, judged = evaluator.evaluate_personal(released, cell)
    return replace(gains, personal=tuple(scores), pulls=tuple(pulls), judged=judged)


def find_seen_rows(cell: Cell, silos: Sequence[SiloRecords]) -> list[NDArray[np.bool_] | None]:
    """Return a mask of the training records that the release of a cell has read, for each silo.

    Records that `data.spared` of the cell spares were not read, and others count as read.

    Returns:
        A mask (n,) for each silo, or None for each silo if the cell has no `data.spared`.
    """
    if cell.data.spared is None:
        return [None for _ in silos]
    task, shares = load_task(cell), partition_records(cell)
    full_task = load_task(_without_spared(cell))

    def present_rows(silo: SiloRecords, task: Task) -> NDArray[np.bool_]:
        return (
            mask_absent_records(Records(*(column[shares[silo.silo]] for column in task.train)))[1]
            .flatten()
            .numpy()
        )

    # A spared record is absent from the task of the cell, and present in that without `data.spared`.
    return [present_rows(silo, task)[present_rows(silo, full_task)] for silo in silos]


@limit_to_one_thread()
def fit_pooled_model(cell: Cell) -> Floats:
    """Fit the model to the training records of all silos that also have test records, without noise.

    The result has shape (d,).  The penalty κ is chosen as for a silo's own model.  To save time, for more than
    20,000 records κ is the smallest candidate, and the fit is less precise.

    Raises:
        InputError: The model is not one of linear scores, or `load_silo_records` refuses the cell.
    """
    cell = _without_spared(cell)
    objective = find_linear_objective(cell)
    _, silos = load_silo_records(cell, cell.federation.silos)
    columns = (torch.cat([getattr(silo.train, name) for silo in silos]) for name in Records._fields)
    # The units of each silo are numbered from 0, and those of different silos must differ.
    starts = np.cumsum([0, *(int(silo.units.max(initial=-1)) + 1 for silo in silos)])[:-1]
    units = np.concatenate([silo.units + start for silo, start in zip(silos, starts, strict=True)])
    # The test records are a placeholder, since a fit does not read them.
    pooled = SiloRecords(-1, "pooled", Records(*columns), units, silos[0].test)
    if len(pooled.train.labels) > _MAX_FOLDED_RECORDS:
        return fitted(objective, pooled.train, PENALTIES[-1], ROUGH_TOLERANCE)
    return fit_local_model(objective, pooled, cell.seed)[0]


@dataclass(frozen=True)
class PointGains:
    """A point of a run's sweep, with references and gains for each seed in the order of the seeds."""

    point: Mapping[str, Any]
    """Swept keys and their values."""
    seeds: tuple[int, ...]
    """Seeds of the point's cells."""
    references: tuple[References, ...]
    """Scores of the local models, for each seed."""
    gains: tuple[Gains, ...]
    """Gains of the run's model, for each seed."""
    budget_shares: Mapping[str, float]
    """Result of the function `budget_shares` for the point."""

    @property
    def gain(self) -> float:
        """Mean gain over silos and seeds."""
        return float(np.mean([gains.gain for gains in self.gains]))

    @property
    def standard_error(self) -> float | None:
        """Standard error of `gain` over seeds, or None for one seed.

        Equal gains of all seeds give None as well, since they do not show an error of 0.
        """
        if len({gains.gain for gains in self.gains}) < 2:
            return None
        return float(np.std([gains.gain for gains in self.gains], ddof=1)) / math.sqrt(len(self.gains))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the gain over seeds, by Student's t, or None without a standard error."""
        if self.standard_error is None:
            return None
        half_length = float(stdtrit(len(self.gains) - 1, 0.975)) * self.standard_error
        return self.gain - half_length, self.gain + half_length

    def mean_figure(self, name: str) -> float:
        """Return the mean over silos and seeds of a field of `Gains` that has numbers."""
        return float(np.mean([np.mean(getattr(gains, name)) for gains in self.gains]))

    @property
    def by_silo(self) -> dict[str, float]:
        """Gain of each silo, the mean over the seeds in which the silo is one of the references."""
        gains_by_name: dict[str, list[float]] = {}
        for references, gains in zip(self.references, self.gains, strict=True):
            for silo, gain in zip(references.silos, gains.gains, strict=True):
                gains_by_name.setdefault(silo.name, []).append(gain)
        return {name: float(np.mean(values)) for name, values in gains_by_name.items()}


def compare_run(
    folder: Path,
    results: Results,
    report_progress: Callable[[str], None] = lambda _: None,
    *,
    with_any_learner: bool = False,
    with_personal: bool = False,
) -> list[PointGains]:
    """Compute the gains at each point of a run that has a finished cell.

    A point is one combination of swept values.  A finished cell of it, one for a seed, is compared with local
    models of the records that the silos have under this seed.

    Args:
        folder: Folder of the run, with its models.
        results: Results of the run.
        report_progress: Receives lines of text.
        with_any_learner: Also try learners of scikit-learn on each silo's records.
        with_personal: Also fit and judge the silos' personal models.

    Raises:
        InputError: The run has no finished cells, references cannot be computed, or a model cannot be used.
    """
    if not results.cells:
        raise InputError(f"{folder}: no cell is finished yet, so no model is there to be compared")
    cells = [resolve_cell(dict(record["scenario"]), str(folder / "results.json")) for record in results.cells]
    keys = [cache_key(cell) or f"cell {index}" for index, cell in enumerate(cells)]
    results_by_cell = dict[int, tuple[References, Gains]]()
    for key in dict.fromkeys(keys):  # cells of equal keys have the same records, and share an evaluator
        indices = [index for index, other in enumerate(keys) if other == key]
        first = cells[indices[0]]
        evaluator = make_evaluator(
            first, compute_references(first, with_any_learner=with_any_learner, report_progress=report_progress)
        )
        for index in indices:
            try:
                released = np.load(folder / results.cells[index]["model"], allow_pickle=False).astype(np.float64)
            except (
                OSError,
                ValueError,
                EOFError,
                AttributeError,
                OverflowError,
                MemoryError,
                zipfile.BadZipFile,
            ) as error:
                raise InputError(
                    f"{folder / results.cells[index]['model']}: the model of a cell cannot be read: {error}"
                ) from None
            report_progress(f"model {index + 1} of {len(cells)}")
            results_by_cell[index] = (
                evaluator.references,
                _evaluate_gains(evaluator, cells[index], released, with_personal=with_personal),
            )
    by_point: dict[str, list[int]] = {}
    for index, record in enumerate(results.cells):
        by_point.setdefault(json.dumps(record["point"]), []).append(index)
    return [
        PointGains(
            results.cells[indices[0]]["point"],
            tuple(results.cells[index]["seed"] for index in indices),
            tuple(references for references, _ in map(results_by_cell.__getitem__, indices)),
            tuple(gains for _, gains in map(results_by_cell.__getitem__, indices)),
            budget_shares(cells[indices[0]]),
        )
        for indices in by_point.values()
    ]
