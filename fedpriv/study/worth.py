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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.files import write_text
from fedpriv.core.random import public_generator
from fedpriv.data.fetch import default_root
from fedpriv.data.partition import alike, counted
from fedpriv.loss.objective import Batch, Objective, Records, View, fast_paths
from fedpriv.noise.trust import CLIENT
from fedpriv.rounds.round import counting
from fedpriv.rounds.task import Task, labels_of_rows, spread, task_of_cell
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.study.results import Results

Floats = NDArray[np.float64]

MOST_SILOS = 16
"""Of a federation with more silos so many are drawn, by a public seed."""
PENALTIES = tuple(float(10.0 ** (-half / 2)) for half in range(9))
"""κ: four decades in half-decades, the largest first; ties go to it."""
_FOLDS = 5
_ENOUGH = 5
"""Records of every class that folds need; a silo with fewer takes the largest κ."""
_LARGE = 5_000
"""Records above which one fold is held out in place of five."""
_EXACT, _ROUGH = 1e-6, 1e-4
"""Norms of the gradient, as shares of that at 0, at which a fit and a fold's fit end."""
_OWN_INTERCEPT = 1e-3
"""The public penalty of an intercept that is fitted by itself: a silo with one class has a finite one."""


@dataclass(frozen=True)
class Held:
    """A silo's records as its model sees them; `units` (n,) says which training records are one unit's."""

    silo: int
    name: str
    train: Records
    test: Records
    units: NDArray[np.int64]


@dataclass(frozen=True)
class Alone:
    """A silo alone: scores are the metric on its own test records, more is better."""

    silo: int
    name: str
    train: int
    test: int
    score: float
    constant: float
    """The score of the best constant prediction: the class of most training records, or their mean."""
    penalty: float
    majority: float
    """The share of the largest class among the training records; 0 for a regression."""


@dataclass(frozen=True)
class References:
    """Every silo alone, in a federation of `of` silos; `metric` is "accuracy", or "-loss" for a regression."""

    metric: str
    of: int
    silos: tuple[Alone, ...]

    @property
    def mean(self) -> float:
        return float(np.mean([silo.score for silo in self.silos]))

    @property
    def spread(self) -> float:
        """The standard deviation over silos; 0 for one."""
        return float(np.std([silo.score for silo in self.silos], ddof=1)) if len(self.silos) > 1 else 0.0


@dataclass(frozen=True)
class Gains:
    """What a published model gains over each silo alone, silo by silo in the order of the references."""

    released: tuple[float, ...]
    recalibrated: tuple[float, ...]
    gains: tuple[float, ...]

    @property
    def gain(self) -> float:
        return float(np.mean(self.gains))


def held_of(cell: Cell, most: int = MOST_SILOS) -> tuple[int, list[Held]]:
    """(number of silos, the records of at most `most` of them, of those that have test records).

    InputError for units that are clients: a client of a few records has no model alone worth the name.
    """
    if cell.privacy.protected.name == CLIENT.name:
        raise InputError("privacy.unit = client: a client alone has too few records; worth is for silos")
    task, shares = task_of_cell(cell), spread(cell)
    tests = _tests(cell, task, [share.numpy() for share in shares])
    usable = [silo for silo in range(len(shares)) if len(tests[silo])]
    if not usable:
        raise InputError(f"worth: no silo of {cell.data.name} has test records to be judged on")
    if len(usable) > most:
        drawn = public_generator(cell.seed, "silos alone").permutation(len(usable))[:most]
        usable = sorted(usable[place] for place in drawn)
    names = _names(cell, len(shares))
    return len(shares), [_held(silo, names[silo], task, shares[silo], tests[silo]) for silo in usable]


def _names(cell: Cell, silos: int) -> Sequence[str]:
    schema = cell.data.table_schema
    by_site = schema is not None and cell.data.partition == "site"
    return schema.sites if schema is not None and by_site else [f"silo {silo}" for silo in range(silos)]


def _tests(cell: Cell, task: Task, shares: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """The numbers of each silo's test records among `task.tests`: its site's, of its label shares, or all."""
    labels = task.tests.labels.numpy()
    counts = np.flatnonzero(counted(labels))
    if cell.data.partition == "site":
        assert task.test_sites is not None
        return [counts[task.test_sites[counts] == silo] for silo in range(len(shares))]
    if cell.data.partition == "iid":
        return [counts for _ in shares]
    sizes = [len(counts) // len(shares)] * len(shares)
    own = alike(labels[counts], sizes, cell.seed, [labels_of_rows(task)[share] for share in shares])
    return [counts[share] for share in own]


def _held(silo: int, name: str, task: Task, share: Tensor, tests: NDArray[np.int64]) -> Held:
    rows = _exact(Records(*(column[share] for column in task.train)))
    if rows.labels.dim() > 1:  # units of several records each
        units = torch.arange(len(rows.labels)).unsqueeze(-1).expand(rows.labels.shape).flatten()
        rows = Records(rows.features.flatten(0, 1), rows.labels.flatten())
    else:
        units = torch.arange(len(rows.labels))
    rows, there = counting(rows)
    test = _exact(Records(*(column[torch.from_numpy(tests)] for column in task.tests)))
    return Held(silo, name, Records(rows.features[there], rows.labels[there]), test, units[there].numpy())


def _exact(records: Records) -> Records:
    """In float64, classes as they are."""
    return Records(*(column.double() if column.is_floating_point() else column for column in records))


def linear_objective(cell: Cell) -> Objective:
    """The cell's loss without what it measures.

    InputError unless it is a function of linear scores, whose fit is one convex problem.
    """
    objective = task_of_cell(cell).objective
    while isinstance(objective, View):
        objective = objective.base
    if fast_paths(objective).linear is None:
        raise InputError(
            f"model.name = {cell.model.name!r}: worth fits models of linear scores alone so far (softmax and "
            "logistic regression, least squares)"
        )
    return objective


def fit(objective: Objective, records: Records, penalty: Floats, start: Floats, tolerance: float) -> Floats:
    """Minimise (1/n) Σ f(x; record) + Σ_j penalty_j x_j² / 2 by L-BFGS in float64, (d,).

    It ends where the gradient's largest entry is `tolerance` times that at 0, or after 1,000 steps.
    """
    weights = torch.full((len(records.labels),), 1.0 / len(records.labels), dtype=torch.float64)

    def value(x: Floats) -> tuple[float, Floats]:
        point = torch.from_numpy(x)
        loss = float(objective.losses(point, records).mean()) + 0.5 * float(penalty @ (x * x))
        return loss, objective.gradient(point, Batch(records, weights)).numpy() + penalty * x

    ends = tolerance * float(np.abs(value(np.zeros_like(start))[1]).max())
    limits = {"gtol": ends, "ftol": 0.0, "maxiter": 1000}
    found = minimize(value, start, jac=True, method="L-BFGS-B", options=limits)
    return np.asarray(found.x, np.float64)


def intercepts(objective: Objective, records: Records) -> NDArray[np.bool_]:
    """Which parameters weigh a constant feature, the last one of every output; none where it is not constant."""
    width = records.features.shape[-1]
    found = np.zeros((objective.dimension // width, width), np.bool_)
    found[:, -1] = bool((records.features[..., -1] == 1.0).all())
    return found.ravel()


def penalties(objective: Objective, records: Records, kappa: float) -> Floats:
    """κ for every weight; intercepts have none, but where all labels are one: they would grow without end."""
    free = intercepts(objective, records) & (not _one_class(records))
    return np.where(free, 0.0, kappa)


def alone(objective: Objective, held: Held, seed: int) -> tuple[Floats, float]:
    """(alone_i, its κ): κ by folds, then a fit to all training records."""
    kappa = chosen_penalty(objective, held, seed)
    start = np.zeros(objective.dimension)
    return fit(objective, held.train, penalties(objective, held.train, kappa), start, _EXACT), kappa


def chosen_penalty(objective: Objective, held: Held, seed: int) -> float:
    """κ of the least mean loss on held-out folds, stratified by label, units whole; the largest of equals.

    The largest of all where a class has fewer than five records, or there is one class.
    """
    labels = held.train.labels
    if _one_class(held.train):
        return PENALTIES[0]
    if not labels.is_floating_point() and int(torch.bincount(labels)[labels].min()) < _ENOUGH:
        return PENALTIES[0]
    folds = folds_of(held, seed)
    tried = range(1) if len(labels) > _LARGE else range(_FOLDS)
    losses = np.zeros(len(PENALTIES))
    for fold in tried:
        out = torch.from_numpy(folds == fold)
        inside, outside = (Records(*(column[rows] for column in held.train)) for rows in (~out, out))
        point = np.zeros(objective.dimension)
        for place, kappa in enumerate(PENALTIES):  # each from the one before: fewer steps
            point = fit(objective, inside, penalties(objective, inside, kappa), point, _ROUGH)
            losses[place] += float(objective.losses(torch.from_numpy(point), outside).mean())
    return PENALTIES[int(np.argmin(losses))]


def folds_of(held: Held, seed: int) -> NDArray[np.int64]:
    """The fold of every training record, (n,): units whole, dealt class by class in a public random order."""
    first = np.unique(held.units, return_index=True)[1]
    labels = held.train.labels.numpy()[first]
    order = public_generator(seed, "folds alone", str(held.silo)).permutation(len(first))
    if labels.dtype.kind == "i":
        order = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(len(first), np.int64)
    fold[order] = np.arange(len(first)) % _FOLDS
    return fold[np.searchsorted(held.units[first], held.units)]


def _one_class(records: Records) -> bool:
    return not records.labels.is_floating_point() and len(torch.unique(records.labels)) < 2


def recalibrated(objective: Objective, held: Held, released: Floats) -> Floats:
    """x̂ with intercepts and one scale of all other weights fitted to the silo's training records (Platt 1999).

    Without the scale a model whose weights are small, as a ball of radius .1 keeps them, would be drowned by its
    intercepts.  Both have the public penalty of 1e-3, so that a silo of one class has finite ones.
    """
    mask = intercepts(objective, held.train)
    weights = torch.full((len(held.train.labels),), 1.0 / len(held.train.labels), dtype=torch.float64)
    size = float(np.linalg.norm(released[~mask]))
    if not (mask.any() and size > 0.0):
        return released.copy()
    direction = np.where(mask, 0.0, released) / size

    def model(own: Floats) -> Floats:
        x: Floats = own[0] * direction
        x[mask] = own[1:]
        return x

    def value(own: Floats) -> tuple[float, Floats]:
        point = torch.from_numpy(model(own))
        loss = float(objective.losses(point, held.train).mean()) + 0.5 * _OWN_INTERCEPT * float(own @ own)
        gradient = objective.gradient(point, Batch(held.train, weights)).numpy()
        return loss, np.concatenate([[gradient @ direction], gradient[mask]]) + _OWN_INTERCEPT * own

    start = np.concatenate([[size], released[mask]])
    limits = {"gtol": 1e-7, "ftol": 1e-12, "maxiter": 200}
    return model(minimize(value, start, jac=True, method="L-BFGS-B", options=limits).x)


def score_of(objective: Objective, point: Floats, records: Records) -> float:
    """The accuracy in [0, 1], or the negated mean loss of a regression: more is better."""
    found = objective.evaluate(torch.from_numpy(point), records)
    return float(found.loss.neg() if found.accuracy is None else found.accuracy)


def constant_score(objective: Objective, held: Held) -> float:
    """The score of the training records' largest class, or of their mean, on the test records."""
    labels, tests = held.train.labels, held.test.labels
    if labels.is_floating_point():
        return -float((tests - labels.mean()).square().mean()) / 2.0
    return float((tests == torch.bincount(labels).argmax()).double().mean())


def references(cell: Cell, most: int = MOST_SILOS, say: Callable[[str], None] = lambda _: None) -> References:
    """Each silo alone; from the user's cache where the same records, partition, seed and model were fitted before.

    InputError for a model that is not of linear scores, for clients, and where no silo has test records.
    """
    objective = linear_objective(cell)
    of, silos = held_of(cell, most)
    file = default_root().parent / "alone" / f"{_digest(cell, silos)}.json"
    if (kept := _kept(file)) is not None:
        return kept
    rows = []
    for place, held in enumerate(silos, 1):
        say(f"{held.name} alone: {place} of {len(silos)}")
        point, kappa = alone(objective, held, cell.seed)
        labels = held.train.labels
        share = 0.0 if labels.is_floating_point() else float(torch.bincount(labels).max()) / len(labels)
        sizes = len(labels), len(held.test.labels)
        score, constant = score_of(objective, point, held.test), constant_score(objective, held)
        rows.append(Alone(held.silo, held.name, *sizes, score, constant, kappa, share))
    metric = "-loss" if silos[0].train.labels.is_floating_point() else "accuracy"
    found = References(metric, of, tuple(rows))
    write_text(file, json.dumps(asdict(found), indent=1) + "\n")
    return found


def _digest(cell: Cell, silos: Sequence[Held]) -> str:
    """Of all that a reference depends on: the records as the model sees them, the model, and the folds' seed."""
    digest = hashlib.sha256(json.dumps([cell.canonical()["model"], cell.seed, PENALTIES]).encode())
    for held in silos:
        digest.update(f"{held.silo} {held.name}".encode())
        for column in (*held.train, *held.test):
            digest.update(column.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _kept(file: Path) -> References | None:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        return References(tree["metric"], tree["of"], tuple(Alone(**silo) for silo in tree["silos"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or of another version: fitted again


def gains_of(cell: Cell, known: References, released: Floats) -> Gains:
    """The gain of a published model (d,) over each of the `known` silos."""
    objective = linear_objective(cell)
    held = {each.silo: each for each in held_of(cell, len(known.silos))[1]}
    silos = [held[silo.silo] for silo in known.silos]
    scores = [score_of(objective, released, each.test) for each in silos]
    own = [score_of(objective, recalibrated(objective, each, released), each.test) for each in silos]
    return Gains(tuple(scores), tuple(own), tuple(np.subtract(scores, [silo.score for silo in known.silos])))


def pooled(cell: Cell) -> Floats:
    """The model fitted to the training records of all silos without noise, κ by one fold or five."""
    objective = linear_objective(cell)
    _, silos = held_of(cell, cell.federation.silos)
    columns = (torch.cat([getattr(held.train, name) for held in silos]) for name in Records._fields)
    starts = np.cumsum([0, *(int(held.units.max(initial=-1)) + 1 for held in silos)])
    units = np.concatenate([held.units + start for held, start in zip(silos, starts, strict=False)])
    whole = Held(-1, "pooled", Records(*columns), silos[0].test, units)
    return alone(objective, whole, cell.seed)[0]


@dataclass(frozen=True)
class Row:
    """A point of a run's sweep: references and gains of every seed, in the order of the seeds."""

    point: Mapping[str, Any]
    seeds: tuple[int, ...]
    references: tuple[References, ...]
    gains: tuple[Gains, ...]

    @property
    def gain(self) -> float:
        """The mean over silos and seeds."""
        return float(np.mean([each.gain for each in self.gains]))

    @property
    def standard_error(self) -> float | None:
        """Of `gain` over seeds, which draw noise and partition anew but no other records; None for one seed."""
        if len(self.gains) < 2:
            return None
        return float(np.std([each.gain for each in self.gains], ddof=1)) / math.sqrt(len(self.gains))

    @property
    def by_silo(self) -> dict[str, float]:
        """Each silo's gain, the mean over the seeds in which it is one of the references."""
        found: dict[str, list[float]] = {}
        for known, gains in zip(self.references, self.gains, strict=True):
            for silo, gain in zip(known.silos, gains.gains, strict=True):
                found.setdefault(silo.name, []).append(gain)
        return {name: float(np.mean(values)) for name, values in found.items()}


def rows_of(folder: Path, results: Results, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Every point of a run with its gains; InputError for a run without finished cells, and as `references`."""
    if not results.cells:
        raise InputError(f"{folder}: no cell is finished yet, so no model is there to be compared")
    by_point: dict[str, list[tuple[Mapping[str, Any], int, References, Gains]]] = {}
    for record in results.cells:
        cell = resolve_cell(dict(record["scenario"]), str(folder / "results.json"))
        known = references(cell, say=say)
        gains = gains_of(cell, known, np.load(folder / record["model"]).astype(np.float64))
        by_point.setdefault(json.dumps(record["point"]), []).append(
            (record["point"], record["seed"], known, gains)
        )
    rows = []
    for cells in by_point.values():
        points, seeds, known_of, gains_at = zip(*cells, strict=True)
        rows.append(Row(points[0], seeds, known_of, gains_at))
    return rows
