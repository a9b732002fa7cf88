"""References for the question whether joining is worth it: each silo alone, and what the released model gains.

| here | meaning |
|---|---|
| D_i, T_i | training and test records of silo i |
| alone_i | the scenario's model and features, fitted to D_i alone without noise: nothing is released |
| pooled | the same fit to the records of all silos: simulations and public data only |
| released | x̂, the model that a run published |
| recalibrated | x̂ with its intercepts and its scale fitted to D_i at home |
| gain_i | m(x̂, T_i) - m(alone_i, T_i) for a metric m of which more is better |

alone_i minimises (1/n_i) Σ f(x; record) + (κ/2) ‖x‖² over D_i, intercepts without the penalty, with κ from five
folds.  A partition by labels has test records of the silo's own label shares (`partition.alike`): on a common test
set each silo alone would be judged on classes that it never sees.

Not private: every number here is a function of the records.  In a deployment nothing of it leaves a silo.
"""

import hashlib
import json
import math
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
    """What a published model gains over each silo alone, silo by silo in the order of the references."""

    released: tuple[float, ...]
    recalibrated: tuple[float, ...]
    gains: tuple[float, ...]
    balanced: tuple[float, ...]
    """The released model's mean accuracy over classes."""
    personal: tuple[float, ...] = ()
    """Empty where nobody asked."""
    pulls: tuple[float, ...] = ()
    judged: str = ""
    """The records by which the λ of the personal models were chosen: "spared", or "folds" at a silo or more."""

    @property
    def gain(self) -> float:
        return float(np.mean(self.gains))


def load_silo_records(cell: Cell, most: int = MAX_REFERENCE_SILOS) -> tuple[int, list[SiloRecords]]:
    """(number of silos, the records of at most `most` of them, of those that have records of both kinds).

    InputError for units that are clients: one client's records are too few to train on.
    """
    if cell.privacy.protected_unit.name == CLIENT.name:
        raise InputError("privacy.unit = client: a client alone has too few records; worth is for silos")
    task, shares = load_task(cell), partition_records(cell)
    if task.label_shape:
        raise InputError(
            f"{display_name(cell.data.name)}: has labels of shape {task.label_shape} a record; worth is of one"
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
    if len(usable) > most:
        drawn = public_generator(cell.seed, "silos alone").permutation(len(usable))[:most]
        usable = sorted(usable[place] for place in drawn)
    names = _silo_names(cell, len(shares))
    common = _test_records(task, tests[0]) if cell.data.partition == "iid" else None
    held = [
        SiloRecords(
            silo, names[silo], *_training_records(task, shares[silo]), common or _test_records(task, tests[silo])
        )
        for silo in usable
    ]
    return len(shares), held


def _silo_names(cell: Cell, silos: int) -> Sequence[str]:
    schema = cell.data.table_schema if cell.data.partition == "site" else None
    return [f"silo {silo}" for silo in range(silos)] if schema is None else schema.sites


def budget_shares(cell: Cell) -> Mapping[str, float]:
    """The share of the target that each silo's records spend, by silo's name; empty where all spend it whole."""
    shares = cell.privacy.shares or ()
    return dict(zip(_silo_names(cell, len(shares)), shares, strict=True)) if shares else {}


def _select_test_rows(cell: Cell, task: Task, shares: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """The numbers of each silo's test records among `task.tests`: its site's, of its label shares, or all."""
    labels = task.test_with_missing.labels.numpy()
    counts = np.flatnonzero(counted_mask(labels))
    if cell.data.partition == "site":
        assert task.test_sites is not None
        return [counts[task.test_sites[counts] == silo] for silo in range(len(shares))]
    if cell.data.partition == "iid":
        return [counts for _ in shares]
    sizes = [len(counts) // len(shares)] * len(shares)
    own = partition_alike(labels[counts], sizes, cell.seed, [row_labels(task)[share] for share in shares])
    return [counts[share] for share in own]


def _training_records(task: Task, share: Tensor) -> tuple[Records, NDArray[np.int64]]:
    """A silo's training records that count, and which unit each is of."""
    rows = _to_float64(Records(*(column[share] for column in task.train)))
    if rows.labels.dim() > 1:  # units of several records each
        units = torch.arange(len(rows.labels)).unsqueeze(-1).expand(rows.labels.shape).flatten()
        rows = Records(rows.features.flatten(0, 1), rows.labels.flatten())
    else:
        units = torch.arange(len(rows.labels))
    rows, there = mask_absent_records(rows)
    return Records(rows.features[there], rows.labels[there]), units[there].numpy()


def _test_records(task: Task, tests: NDArray[np.int64]) -> Records:
    return _to_float64(Records(*(column[torch.from_numpy(tests)] for column in task.test_with_missing)))


def _to_float64(records: Records) -> Records:
    """In float64, classes as they are."""
    return Records(*(column.double() if column.is_floating_point() else column for column in records))


def find_linear_objective(cell: Cell) -> Objective:
    """The cell's loss without what it measures.

    InputError unless it is a function of linear scores, whose fit is one convex problem.
    """
    objective = load_task(cell).objective
    while isinstance(objective, View):
        objective = objective.base
    if fast_paths(objective).linear is not None:
        return objective
    if (hazards := find_linear_hazards(objective)) is not None:
        return hazards
    raise InputError(
        f"model.name = {cell.model.name!r}: worth fits models of linear scores alone so far (softmax, logistic "
        "and hazard regression, least squares)"
    )


@limit_to_one_thread()
def compute_references(
    cell: Cell, *, with_any_learner: bool = False, report_progress: Callable[[str], None] = lambda _: None
) -> References:
    """Each silo alone; from the user's cache where the same records, partition, seed and model were fitted before.

    `with_any_learner` also tries learners of scikit-learn.  InputError for a model that is not of linear scores,
    for clients, and where no silo has test records.
    """
    cell = _without_spared(cell)
    objective = find_linear_objective(cell)
    of, silos = load_silo_records(cell)
    records = digest_silos(silos)
    key = cache_key(cell) or records
    kept = _verify_references(key, records, silos)
    if kept is not None and (not with_any_learner or kept.silos[0].any_learner is not None):
        return kept
    rows = []
    for place, held in enumerate(silos, 1):
        report_progress(f"{held.name} alone: {place} of {len(silos)}")
        point, kappa = fit_local_model(objective, held, cell.seed)
        labels = held.train.labels
        classes = not labels.is_floating_point() and not isinstance(objective, LinearHazards)
        share = float(torch.bincount(labels).max()) / len(labels) if classes else 0.0
        score, constant = score_model(objective, point, held.test), score_constant(objective, held)
        balanced = score_balanced(objective, point, held.test) if share > ONE_CLASS_SHARE else score
        row = LocalModelScores(
            held.silo, held.name, len(labels), len(held.test.labels), score, constant, kappa, share, balanced
        )
        if with_any_learner:
            best, learner = score_best_learner(objective, held, cell.seed, point)
            row = replace(row, any_learner=best, learner=learner)
        rows.append(row)
    found = References("accuracy" if classes else "-loss", of, tuple(rows))
    write_cached("alone", key, records, asdict(found))
    return found


def _without_spared(cell: Cell) -> Cell:
    """The cell with the training records that it may have spared: references are of all that a silo has."""
    return cell if cell.data.spared is None else resolve_cell(replace_data_keys(cell, spared=None), "spared")


def replace_data_keys(cell: Cell, **keys: Any) -> dict[str, Any]:
    """A cell's tree with keys of [data]; None takes one away."""
    tree = cell.canonical_data()
    return {**tree, "data": {key: value for key, value in {**tree["data"], **keys}.items() if value is not None}}


def _verify_references(key: str, records: str, silos: Sequence[SiloRecords]) -> References | None:
    """What is kept, if it is of these records and of these silos."""
    known = read_references(key, records)
    sizes = [(held.silo, held.name, len(held.train.labels), len(held.test.labels)) for held in silos]
    same = known is not None and [(each.silo, each.name, each.train, each.test) for each in known.silos] == sizes
    return known if same else None


def digest_silos(silos: Sequence[SiloRecords]) -> str:
    """SHA-256 of the records as the model sees them."""
    digest = hashlib.sha256(json.dumps(PENALTIES).encode())
    for held in silos:
        digest.update(f"{held.silo} {held.name} {len(held.train.labels)}".encode())
        for column in (*held.train, *held.test):
            digest.update(column.contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class GainEvaluator:
    """The silos that references are of, ready to judge one model after another."""

    cell: Cell
    objective: Objective
    references: References
    silos: tuple[SiloRecords, ...]

    @limit_to_one_thread()
    def evaluate(self, released: Floats) -> Gains:
        """The gain of a published model (d,) over each silo alone.

        InputError for a model of another scenario, or with a number that is not finite.
        """
        if released.shape != (self.objective.dimension,) or not np.isfinite(released).all():
            raise InputError(
                f"worth: a model of shape {released.shape}, or one with a number that is not finite; this "
                f"scenario's have ({self.objective.dimension},) finite ones"
            )
        scores = [score_model(self.objective, released, each.test) for each in self.silos]
        fitted = [
            score_model(self.objective, recalibrate(self.objective, each, released), each.test)
            for each in self.silos
        ]
        balanced = [
            score_balanced(self.objective, released, each.test) if silo.majority > ONE_CLASS_SHARE else score
            for each, silo, score in zip(self.silos, self.references.silos, scores, strict=True)
        ]
        gains = np.subtract(scores, [silo.score for silo in self.references.silos]).tolist()
        return Gains(tuple(scores), tuple(fitted), tuple(gains), tuple(balanced))

    @limit_to_one_thread()
    def evaluate_personal(self, released: Floats, cell: Cell) -> tuple[list[float], list[float], str]:
        """(scores, λ, the records by which λ was chosen) of each silo's personal model of `cell`'s release."""
        models = [
            fit_personal_model(self.objective, each, released, self.cell.seed, silo.penalty, saw)
            for each, silo, saw in zip(
                self.silos, self.references.silos, find_seen_rows(cell, self.silos), strict=True
            )
        ]
        scores = [
            score_model(self.objective, one.point, each.test) for one, each in zip(models, self.silos, strict=True)
        ]
        judged = "spared" if all(one.judged == "spared" for one in models) else "folds"
        return scores, [one.pull_weight for one in models], judged


@limit_to_one_thread()
def make_evaluator(cell: Cell, known: References) -> GainEvaluator:
    cell = _without_spared(cell)
    held = {each.silo: each for each in load_silo_records(cell)[1]}
    return GainEvaluator(cell, find_linear_objective(cell), known, tuple(held[silo.silo] for silo in known.silos))


def evaluate_gains(cell: Cell, known: References, released: Floats, *, with_personal: bool = False) -> Gains:
    """`GainEvaluator.evaluate`; with `own` the silos' personal models, too."""
    return _evaluate_gains(make_evaluator(cell, known), cell, released, with_personal=with_personal)


def _evaluate_gains(bench: GainEvaluator, cell: Cell, released: Floats, *, with_personal: bool) -> Gains:
    found = bench.evaluate(released)
    if not with_personal:
        return found
    scores, pulls, judged = bench.evaluate_personal(released, cell)
    return replace(found, personal=tuple(scores), pulls=tuple(pulls), judged=judged)


def find_seen_rows(cell: Cell, silos: Sequence[SiloRecords]) -> list[NDArray[np.bool_] | None]:
    """Which of each silo's training records the release has seen; None where it has seen all."""
    if cell.data.spared is None:
        return [None for _ in silos]
    task, shares = load_task(cell), partition_records(cell)
    whole = load_task(_without_spared(cell))

    def there(held: SiloRecords, task: Task) -> NDArray[np.bool_]:
        return (
            mask_absent_records(Records(*(column[shares[held.silo]] for column in task.train)))[1]
            .flatten()
            .numpy()
        )

    return [there(held, task)[there(held, whole)] for held in silos]


@limit_to_one_thread()
def fit_pooled_model(cell: Cell) -> Floats:
    """The model fitted to the training records of all silos without noise, κ by one fold or five.

    More than 20,000 records take the smallest κ and end at a gradient of 1e-4: there it decides nothing.
    """
    cell = _without_spared(cell)
    objective = find_linear_objective(cell)
    _, silos = load_silo_records(cell, cell.federation.silos)
    columns = (torch.cat([getattr(held.train, name) for held in silos]) for name in Records._fields)
    starts = np.cumsum([0, *(int(held.units.max(initial=-1)) + 1 for held in silos)])[:-1]
    units = np.concatenate([held.units + start for held, start in zip(silos, starts, strict=True)])
    whole = SiloRecords(-1, "pooled", Records(*columns), units, silos[0].test)
    if len(whole.train.labels) > _MAX_FOLDED_RECORDS:
        return fitted(objective, whole.train, PENALTIES[-1], ROUGH_TOLERANCE)
    return fit_local_model(objective, whole, cell.seed)[0]


@dataclass(frozen=True)
class PointGains:
    """A point of a run's sweep: references and gains of every seed, in the order of the seeds."""

    point: Mapping[str, Any]
    seeds: tuple[int, ...]
    references: tuple[References, ...]
    gains: tuple[Gains, ...]
    budget_shares: Mapping[str, float]
    """`budget_shares` the point."""

    @property
    def gain(self) -> float:
        """The mean over silos and seeds."""
        return float(np.mean([each.gain for each in self.gains]))

    @property
    def standard_error(self) -> float | None:
        """Of `gain` over seeds, which draw noise and partition anew but no other records.

        None for one seed, and where all seeds have the same gain: that is no error of 0.
        """
        if len({each.gain for each in self.gains}) < 2:
            return None
        return float(np.std([each.gain for each in self.gains], ddof=1)) / math.sqrt(len(self.gains))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The gain's 95 % interval over seeds, by Student's t; None without a standard error."""
        if self.standard_error is None:
            return None
        wide = float(stdtrit(len(self.gains) - 1, 0.975)) * self.standard_error
        return self.gain - wide, self.gain + wide

    def mean_figure(self, name: str) -> float:
        """The mean over silos and seeds of a figure of `Gains`."""
        return float(np.mean([np.mean(getattr(each, name)) for each in self.gains]))

    @property
    def by_silo(self) -> dict[str, float]:
        """Each silo's gain, the mean over the seeds in which it is one of the references."""
        found: dict[str, list[float]] = {}
        for known, gains in zip(self.references, self.gains, strict=True):
            for silo, gain in zip(known.silos, gains.gains, strict=True):
                found.setdefault(silo.name, []).append(gain)
        return {name: float(np.mean(values)) for name, values in found.items()}


def compare_run(
    folder: Path,
    results: Results,
    report_progress: Callable[[str], None] = lambda _: None,
    *,
    with_any_learner: bool = False,
    with_personal: bool = False,
) -> list[PointGains]:
    """Every point of a run with its gains; InputError for a run without finished cells, and as `references`."""
    if not results.cells:
        raise InputError(f"{folder}: no cell is finished yet, so no model is there to be compared")
    cells = [resolve_cell(dict(record["scenario"]), str(folder / "results.json")) for record in results.cells]
    keys = [cache_key(cell) or f"cell {place}" for place, cell in enumerate(cells)]
    found = dict[int, tuple[References, Gains]]()
    for key in dict.fromkeys(keys):  # one seed's records at a time
        places = [place for place, its in enumerate(keys) if its == key]
        first = cells[places[0]]
        bench = make_evaluator(
            first, compute_references(first, with_any_learner=with_any_learner, report_progress=report_progress)
        )
        for place in places:
            released = np.load(folder / results.cells[place]["model"], allow_pickle=False).astype(np.float64)
            report_progress(f"model {place + 1} of {len(cells)}")
            found[place] = (
                bench.references,
                _evaluate_gains(bench, cells[place], released, with_personal=with_personal),
            )
    by_point: dict[str, list[int]] = {}
    for place, record in enumerate(results.cells):
        by_point.setdefault(json.dumps(record["point"]), []).append(place)
    return [
        PointGains(
            results.cells[places[0]]["point"],
            tuple(results.cells[place]["seed"] for place in places),
            tuple(found[place][0] for place in places),
            tuple(found[place][1] for place in places),
            budget_shares(cells[places[0]]),
        )
        for places in by_point.values()
    ]
