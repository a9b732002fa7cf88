"""Fit a silo's own model: alone, recalibrated from a released one, or pulled towards it.

alone minimises (1/n) Σ f(x; record) + (κ/2) ‖x‖² over the silo's training records, intercepts without the penalty,
with κ from five folds.  personal adds (λ/2) ‖x - x̂‖² for the released x̂, with alone's κ: λ = 0 is alone and λ = ∞
is x̂, both bit for bit, since one solver starts from zero in either case.

Not private: everything here is a function of the records, and in a deployment nothing of it leaves a silo.

A hazard regression as one convex problem, for fits at home.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn

from fedpriv.core.errors import InputError
from fedpriv.core.random import public_generator
from fedpriv.loss.losses import HazardLoss, decode_labels
from fedpriv.loss.objective import Batch, Objective, Records, RecordView


@dataclass(frozen=True)
class LinearHazards(RecordView):
    """A hazard regression in so many `bins`, with what a fit at home needs beside: losses record by record."""

    bins: int

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return HazardLoss().value(self.base.outputs(point, records), records.labels)

    def constant_loss(self, train: Tensor, tests: Tensor) -> float:
        """The mean loss on labels `tests` of the hazards in labels `train`, half an event and a survivor added."""
        last, seen = decode_labels(train, self.bins)
        place = torch.arange(self.bins)
        died = ((place == last.unsqueeze(-1)) & seen.unsqueeze(-1)).double().sum(0)
        odds = (died + 0.5) / ((place < last.unsqueeze(-1)).double().sum(0) + 0.5)
        return float(HazardLoss().value(odds.log().expand(len(tests), -1), tests).mean())


def find_linear_hazards(objective: Objective) -> LinearHazards | None:
    """The view of a hazard regression, whose fit is one convex problem; None of any other loss."""
    module = getattr(objective, "module", None)
    if isinstance(getattr(objective, "loss", None), HazardLoss) and isinstance(module, nn.Linear):
        return LinearHazards(objective, module.out_features)
    return None


Floats = NDArray[np.float64]

PENALTIES = tuple(float(10.0 ** (-half / 2)) for half in range(9))
"""κ: four decades in half-decades, the largest first; ties go to it."""
_FOLD_COUNT = 5
_MIN_CLASS_RECORDS = 5
"""Records of every class that folds need; a silo with fewer takes the largest κ."""
_MIN_SPARED = 10
"""Spared records that λ can be judged on; of fewer, one standard error tells nothing, and folds are taken."""
_MAX_FIVE_FOLD_RECORDS = 5_000
"""Records above which one fold is held out in place of five."""
_MIN_BASIS_RECORDS, _MAX_BASIS_FEATURES = 2_000, 4_000
"""Records above which, and features up to which, a fit goes along the records' principal directions."""
_CURVATURE = 0.01
"""The loss's curvature along a score, of a softmax that has learned something: a public guess, for speed alone."""
_FIT_TOLERANCE, ROUGH_TOLERANCE = 1e-6, 1e-4
"""Norms of the gradient, as shares of that at 0, at which a fit and a fold's fit end."""
_INTERCEPT_PENALTY = 1e-3
"""The public penalty of an intercept that is fitted by itself: a silo with one class has a finite one."""


@dataclass(frozen=True)
class SiloRecords:
    """A silo's records as its model sees them; `units` (n,) says which training records are one unit's."""

    silo: int
    name: str
    train: Records
    units: NDArray[np.int64]
    test: Records


class Pull(NamedTuple):
    """A pull of `weight` λ towards a released model (d,)."""

    weight: float
    released: Floats


def fit_model(
    objective: Objective,
    records: Records,
    penalty: Floats,
    start: Floats,
    tolerance: float,
    pull: Pull | None = None,
) -> Floats:
    """Minimise (1/n) Σ f(x; record) + Σ_j penalty_j x_j² / 2 + λ ‖x - x̂‖² / 2 by L-BFGS in float64, (d,).

    It ends where the gradient's largest entry is `tolerance` times that at 0, or after 1,000 steps.  λ = 0 is no
    pull, and λ = ∞ is x̂ itself.  Of many records the steps, and that gradient, are in coordinates in which the
    curvature is about 1, and a rough fit is in float32: a fifth of the time.
    """
    if pull is not None and math.isinf(pull.weight):
        return pull.released.copy()
    many = len(records.labels) > _MIN_BASIS_RECORDS
    kind = torch.float32 if many and tolerance >= ROUGH_TOLERANCE else torch.float64
    records = Records(*(column.to(kind) if column.is_floating_point() else column for column in records))
    weights = torch.full((len(records.labels),), 1.0 / len(records.labels), dtype=kind)
    basis = _find_basis(records, penalty + (pull.weight if pull is not None else 0.0)) if many else None

    def moved(x: Floats, through: Floats | None) -> Floats:
        return x if through is None else (x.reshape(-1, len(through)) @ through).ravel()

    def value(u: Floats) -> tuple[float, Floats]:
        x = moved(u, basis)
        point = torch.from_numpy(x).to(kind)
        loss = float(objective.losses(point, records).double().mean()) + 0.5 * float(penalty @ (x * x))
        gradient = objective.gradient(point, Batch(records, weights)).double().numpy() + penalty * x
        if pull is not None and pull.weight > 0.0:
            away = x - pull.released
            loss += 0.5 * pull.weight * float(away @ away)
            gradient += pull.weight * away
        return loss, moved(gradient, None if basis is None else basis.T)

    ends = tolerance * float(np.abs(value(np.zeros_like(start))[1]).max())
    begin = moved(start, None if basis is None else np.asarray(np.linalg.inv(basis), np.float64))
    found = minimize(
        value, begin, jac=True, method="L-BFGS-B", options={"gtol": ends, "ftol": 0.0, "maxiter": 1000}
    )
    return moved(np.asarray(found.x, np.float64), basis)


def _find_basis(records: Records, penalty: Floats) -> Floats | None:
    """B (features, features) so that the problem's curvature is about 1 in u, where x = u B; None if too wide."""
    width = records.features.shape[-1]
    if width > _MAX_BASIS_FEATURES:
        return None
    moments = (records.features.mT @ records.features).double().numpy() / len(records.labels)
    return np.asarray(np.linalg.inv(np.linalg.cholesky(_CURVATURE * moments + np.diag(penalty[:width] + 1e-9))))


def find_intercepts(objective: Objective, records: Records) -> NDArray[np.bool_]:
    """Which parameters weigh a constant feature, the last one of every output; none where it is not constant."""
    width = records.features.shape[-1]
    found = np.zeros((objective.dimension // width, width), np.bool_)
    found[:, -1] = bool((records.features[..., -1] == 1.0).all())
    return found.ravel()


def make_penalties(objective: Objective, records: Records, kappa: float) -> Floats:
    """κ for every weight; intercepts have none, but where they would grow without end.

    That is where all labels are one, and of hazards, of which a small silo has bins without an event.
    """
    if isinstance(objective, LinearHazards):
        return np.full(objective.dimension, kappa)
    return np.where(find_intercepts(objective, records) & (not _has_one_class(records)), 0.0, kappa)


def fitted(
    objective: Objective,
    records: Records,
    kappa: float,
    tolerance: float = _FIT_TOLERANCE,
    pull: Pull | None = None,
) -> Floats:
    """`fit` from zero, with κ for every weight that has a penalty."""
    start = np.zeros(objective.dimension)
    return fit_model(objective, records, make_penalties(objective, records, kappa), start, tolerance, pull)


def fit_local_model(objective: Objective, held: SiloRecords, seed: int) -> tuple[Floats, float]:
    """(alone_i, its κ): κ by folds, then a fit to all training records."""
    kappa = choose_penalty(objective, held, seed)
    return fitted(objective, held.train, kappa), kappa


def choose_penalty(objective: Objective, held: SiloRecords, seed: int) -> float:
    """κ of the least mean loss on held-out folds, stratified by label, units whole; the largest of equals.

    The largest of all where a class has fewer than five records, or there is one class; of hazards, and
    wherever folds would be empty, where there are fewer than five units.
    """
    labels = held.train.labels
    few = len(np.unique(held.units)) < _MIN_CLASS_RECORDS
    if not few and not labels.is_floating_point() and not isinstance(objective, LinearHazards):
        few = int(torch.bincount(labels)[labels].min()) < _MIN_CLASS_RECORDS
    if few or (_has_one_class(held.train) and not isinstance(objective, LinearHazards)):
        return PENALTIES[0]
    folds = assign_folds(held, seed)
    tried = range(1) if len(labels) > _MAX_FIVE_FOLD_RECORDS else range(_FOLD_COUNT)
    losses = np.zeros(len(PENALTIES))
    for fold in tried:
        out = torch.from_numpy(folds == fold)
        inside, outside = (Records(*(column[rows] for column in held.train)) for rows in (~out, out))
        point = np.zeros(objective.dimension)
        for place, kappa in enumerate(PENALTIES):  # each from the one before: fewer steps
            point = fit_model(objective, inside, make_penalties(objective, inside, kappa), point, ROUGH_TOLERANCE)
            losses[place] += float(objective.losses(torch.from_numpy(point), outside).mean())
    return PENALTIES[int(np.argmin(losses))]


def assign_folds(held: SiloRecords, seed: int) -> NDArray[np.int64]:
    """The fold of every training record, (n,): units whole, dealt class by class in a public random order."""
    first = np.unique(held.units, return_index=True)[1]
    labels = held.train.labels.numpy()[first]
    order = public_generator(seed, "folds alone", str(held.silo)).permutation(len(first))
    if labels.dtype.kind == "i":
        order = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(len(first), np.int64)
    fold[order] = np.arange(len(first)) % _FOLD_COUNT
    return fold[np.searchsorted(held.units[first], held.units)]


def _has_one_class(records: Records) -> bool:
    return not records.labels.is_floating_point() and len(torch.unique(records.labels)) < 2


def recalibrate(objective: Objective, held: SiloRecords, released: Floats) -> Floats:
    """x̂ with intercepts and one scale of all other weights fitted to the silo's training records (Platt 1999).

    Without the scale a model whose weights are small, as a ball of radius .1 keeps them, would be drowned by its
    intercepts.  Both have the public penalty of 1e-3, so that a silo of one class has finite ones.
    """
    mask = find_intercepts(objective, held.train)
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
        loss = float(objective.losses(point, held.train).mean()) + 0.5 * _INTERCEPT_PENALTY * float(own @ own)
        gradient = objective.gradient(point, Batch(held.train, weights)).numpy()
        return loss, np.concatenate([[gradient @ direction], gradient[mask]]) + _INTERCEPT_PENALTY * own

    start = np.concatenate([[size], released[mask]])
    return model(
        minimize(
            value, start, jac=True, method="L-BFGS-B", options={"gtol": 1e-7, "ftol": 1e-12, "maxiter": 200}
        ).x
    )


_MAX_LOSS = 1e100
PULL_WEIGHTS = (0.0, *(float(10.0 ** (half / 2)) for half in range(-6, 1)), math.inf)
"""λ, from alone to the released model."""


class PersonalModel(NamedTuple):
    """A silo's personal model, its λ, and the records by which λ was chosen."""

    point: Floats
    pull_weight: float
    judged: Literal["spared", "folds"]


def fit_personal_model(
    objective: Objective,
    held: SiloRecords,
    released: Floats,
    seed: int,
    kappa: float,
    seen: NDArray[np.bool_] | None = None,
) -> PersonalModel:
    """The personal model with alone's `kappa`: the least λ within one standard error of the best.

    λ is judged on the training records that the release has not `seen`, where there are ten or more of them; else
    on folds, which it has seen, and that favours large λ.
    """
    spared = seen is not None and int((~seen).sum()) >= _MIN_SPARED and bool(seen.any())
    if len(np.unique(held.units)) < 2:  # nothing to hold out
        return PersonalModel(fit_local_model(objective, held, seed)[0], 0.0, "folds")
    tested = [~seen] if spared and seen is not None else _held_out_masks(held, seed)
    losses = np.concatenate([_held_out_losses(objective, held, released, kappa, out) for out in tested], axis=1)
    losses = np.where(
        losses < _MAX_LOSS, losses, _MAX_LOSS
    )  # NaN too: a released model that diverged is never the best
    best = int(np.argmin(losses.mean(axis=1)))
    worse = losses - losses[best]
    errors = worse.std(axis=1, ddof=1 if losses.shape[1] > 1 else 0) / math.sqrt(losses.shape[1])
    within = np.flatnonzero(worse.mean(axis=1) <= errors)
    weight = PULL_WEIGHTS[int(within[0]) if len(within) else best]
    return PersonalModel(
        fitted(objective, held.train, kappa, pull=Pull(weight, released)), weight, "spared" if spared else "folds"
    )


def _held_out_masks(held: SiloRecords, seed: int) -> list[NDArray[np.bool_]]:
    folds = assign_folds(held, seed)
    return [folds == fold for fold in range(_FOLD_COUNT) if 0 < int((folds == fold).sum()) < len(folds)]


def _held_out_losses(
    objective: Objective, held: SiloRecords, released: Floats, kappa: float, out: NDArray[np.bool_]
) -> Floats:
    """The losses on records `out` of models fitted to the others, (λ, records)."""
    rows = torch.from_numpy(out)
    inside, outside = (Records(*(column[chosen] for column in held.train)) for chosen in (~rows, rows))
    points = [fitted(objective, inside, kappa, ROUGH_TOLERANCE, Pull(weight, released)) for weight in PULL_WEIGHTS]
    return np.stack([objective.losses(torch.from_numpy(point), outside).numpy() for point in points])


def score_best_learner(objective: Objective, held: SiloRecords, seed: int, own: Floats) -> tuple[float, str]:
    """(score on the test records, name) of the best by folds: the model itself, kernel ridge, boosted trees.

    InputError where scikit-learn is not installed.
    """
    if isinstance(objective, LinearHazards):
        raise InputError("--any-learner: scikit-learn has no learner of hazards; leave it out")
    try:
        ensemble, kernels, pools = map(
            import_module, ("sklearn.ensemble", "sklearn.kernel_ridge", "threadpoolctl")
        )
    except ImportError:
        raise InputError(
            "--any-learner: kernel ridge and boosted trees are of scikit-learn, which is not installed; "
            "pip install 'fedpriv[learners]', or leave it out"
        ) from None
    real = held.train.labels.is_floating_point()
    if _has_one_class(held.train) or len(held.train.labels) < 2 * _FOLD_COUNT:
        return score_model(objective, own, held.test), "the model"
    (features, labels), (tests, targets) = (
        (part.features.numpy(), part.labels.numpy()) for part in (held.train, held.test)
    )
    classes = np.unique(labels)
    picks = np.random.default_rng(0).permutation(len(features))[:500]
    away = ((features[picks][:, None] - features[picks][None]) ** 2).sum(-1)
    gamma = 1.0 / max(float(np.median(away[away > 0.0])) if (away > 0.0).any() else 1.0, 1e-12)

    def ridge(width: float, alpha: float) -> Callable[[Floats, NDArray[Any], Floats], NDArray[Any]]:
        def predict(train: Floats, given: NDArray[Any], asked: Floats) -> NDArray[Any]:
            found = kernels.KernelRidge(alpha=alpha, kernel="rbf", gamma=width * gamma)
            wanted = given if real else (given[:, None] == classes[None]) * 2.0 - 1.0
            answer = found.fit(train, wanted).predict(asked)
            return np.asarray(answer if real else classes[answer.argmax(1)])

        return predict

    def trees(train: Floats, given: NDArray[Any], asked: Floats) -> NDArray[Any]:
        name = f"HistGradientBoosting{'Regressor' if real else 'Classifier'}"
        return np.asarray(getattr(ensemble, name)(max_iter=100, random_state=0).fit(train, given).predict(asked))

    def right(answer: NDArray[Any], truth: NDArray[Any]) -> float:
        return -float(((answer - truth) ** 2).mean()) / 2.0 if real else float((answer == truth).mean())

    learners = {
        f"kernel ridge, width {w:g}, ridge {a:g}": ridge(w, a) for w in (0.5, 2.0) for a in (0.01, 0.1, 1.0)
    }
    tried = {**learners, "boosted trees": trees}
    scores = dict.fromkeys(["the model", *tried], 0.0)
    with pools.threadpool_limits(1):  # theirs, not torch's
        for out in _held_out_masks(held, seed):
            inside = Records(*(column[torch.from_numpy(~out)] for column in held.train))
            outside = Records(*(column[torch.from_numpy(out)] for column in held.train))
            part = SiloRecords(held.silo, held.name, inside, held.units[~out], outside)
            point, _ = fit_local_model(objective, part, seed)
            scores["the model"] += score_model(objective, point, outside)
            for name, predict in tried.items():
                scores[name] += right(predict(features[~out], labels[~out], features[out]), labels[out])
        best = max(scores, key=lambda name: scores[name])
        if best == "the model":
            return score_model(objective, own, held.test), best
        return right(tried[best](features, labels, tests), targets), best


def score_balanced(objective: Objective, point: Floats, records: Records) -> float:
    """The mean of the accuracies in every class that there is; the score itself for a regression."""
    if records.labels.is_floating_point() or isinstance(objective, LinearHazards):
        return score_model(objective, point, records)
    kinds = [records.labels == kind for kind in torch.unique(records.labels)]
    parts = [Records(*(column[chosen] for column in records)) for chosen in kinds]
    return float(np.mean([score_model(objective, point, part) for part in parts]))


def score_model(objective: Objective, point: Floats, records: Records) -> float:
    """The accuracy in [0, 1], or the negated mean loss of a regression or of hazards: more is better."""
    found = objective.evaluate(torch.from_numpy(point), records)
    return float(found.loss.neg() if found.accuracy is None else found.accuracy)


def score_constant(objective: Objective, held: SiloRecords) -> float:
    """The score of the training records' largest class, mean or hazards on the test records."""
    labels, tests = held.train.labels, held.test.labels
    if isinstance(objective, LinearHazards):
        return -objective.constant_loss(labels, tests)
    if labels.is_floating_point():
        return -float((tests - labels.mean()).square().mean()) / 2.0
    return float((tests == torch.bincount(labels).argmax()).double().mean())
