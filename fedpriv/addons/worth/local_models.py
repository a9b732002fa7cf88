"""Fit a silo's own model: the local model, a recalibrated release, or a personal model.

With parameters x (d,) and a loss f of linear scores, the local model minimises (1/n) Σ f(x; record) + (κ/2) ‖x‖²
over the silo's n training records, mostly without a penalty of intercepts (`make_penalties`).  The personal model
adds (λ/2) ‖x - x̂‖² for the released x̂, so that λ = 0 gives the local model and λ = ∞ gives x̂.  Held-out records
decide κ and λ, if there are enough of them.

Folds are parts of the training records, which are held out of a fit to judge it.  A unit is a record, or
a person, whose records are in one fold.  A regression of hazards predicts the probability of an event in each bin
of time, given that the bins before had none.

Not private: models and scores are functions of the records without noise.
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
    """View of a hazard regression with `bins` bins as one convex problem, with losses record by record."""

    bins: int

    def losses(self, point: Tensor, records: Records) -> Tensor:
        return HazardLoss().value(self.base.outputs(point, records), records.labels)

    def constant_loss(self, train: Tensor, tests: Tensor) -> float:
        """Return the mean loss on labels `tests` of constant hazards, estimated from labels `train`.

        The estimated odds of an event in a bin are (events in the bin + 1/2) / (records that survived it + 1/2).
        """
        last_bin, is_event = decode_labels(train, self.bins)
        bins = torch.arange(self.bins)
        event_counts = ((bins == last_bin.unsqueeze(-1)) & is_event.unsqueeze(-1)).double().sum(0)
        odds = (event_counts + 0.5) / ((bins < last_bin.unsqueeze(-1)).double().sum(0) + 0.5)
        return float(HazardLoss().value(odds.log().expand(len(tests), -1), tests).mean())


def find_linear_hazards(objective: Objective) -> LinearHazards | None:
    """Return the view of a linear hazard regression, or None for any other loss."""
    module = getattr(objective, "module", None)
    if isinstance(getattr(objective, "loss", None), HazardLoss) and isinstance(module, nn.Linear):
        return LinearHazards(objective, module.out_features)
    return None


Floats = NDArray[np.float64]

PENALTIES = tuple(float(10.0 ** (-half / 2)) for half in range(9))
"""Candidates for κ: four decades in half-decades, the largest first, which wins ties."""
_FOLD_COUNT = 5
_MIN_CLASS_RECORDS = 5
"""Fewest units, and fewest records of each class that occurs, for folds.  With fewer, κ is the largest one."""
_MIN_SPARED = 10
"""Fewest records, not read by the release, on which λ is chosen.

With fewer, one standard error is too wide, and folds are used.
"""
_MAX_FIVE_FOLD_RECORDS = 5_000
"""Most records for which each of five folds is held out to choose κ.  With more, one fold is held out."""
_MIN_BASIS_RECORDS, _MAX_BASIS_FEATURES = 2_000, 4_000
"""Records above which, and features up to which, a fit uses the coordinates of `_find_basis`."""
_CURVATURE = 0.01
"""Public guess of a trained softmax's curvature along a score, which decides the solver's coordinates."""
_FIT_TOLERANCE, ROUGH_TOLERANCE = 1e-6, 1e-4
"""Largest gradient entry, relative to that at x = 0, at which a fit and a rough fit end."""
_INTERCEPT_PENALTY = 1e-3
"""Public penalty of scale and intercepts in a recalibration, for records of one class, too."""


@dataclass(frozen=True)
class SiloRecords:
    """A silo's records as its model sees them.  `units` (n,) numbers the unit of each training record."""

    silo: int
    """Number of the silo."""
    name: str
    """Name of the silo."""
    train: Records
    """Training records, n of them."""
    units: NDArray[np.int64]
    test: Records
    """Test records, on which models are judged."""


class Pull(NamedTuple):
    """A pull with weight λ towards a released model, (d,)."""

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
    """Minimise the regularised mean loss by L-BFGS.

    The objective is (1/n) Σ f(x; record) + Σ_j penalty_j x_j² / 2 + λ ‖x - x̂‖² / 2.  To save time with many
    records, the solver may use other coordinates (`_find_basis`), and float32 for a large tolerance.

    Args:
        objective: Loss f of linear scores.
        records: Training records.
        penalty: Penalty of each parameter, (d,).
        start: First point of the solver, (d,).
        tolerance: Largest entry of the gradient, in the solver's coordinates and relative to that at x = 0, at
            which the solver stops.  After 1,000 steps it stops in any case.
        pull: Weight λ and released model x̂, or None for no pull.  For λ = ∞ the result is x̂ itself.

    Returns:
        Parameters x (d,), float64.  For a loss that is not convex, as of a sigmoid regression, they may be at a
        local minimum.
    """
    if pull is not None and math.isinf(pull.weight):
        return pull.released.copy()
    has_many_records = len(records.labels) > _MIN_BASIS_RECORDS
    dtype = torch.float32 if has_many_records and tolerance >= ROUGH_TOLERANCE else torch.float64
    records = Records(*(column.to(dtype) if column.is_floating_point() else column for column in records))
    weights = torch.full((len(records.labels),), 1.0 / len(records.labels), dtype=dtype)
    # With a basis B the solver moves in coordinates u with x = u B for each output, and else in x.
    basis = (
        _find_basis(records, penalty + (pull.weight if pull is not None else 0.0)) if has_many_records else None
    )

    def transform(x: Floats, matrix: Floats | None) -> Floats:
        return x if matrix is None else (x.reshape(-1, len(matrix)) @ matrix).ravel()

    def value(u: Floats) -> tuple[float, Floats]:
        """Return the objective and its gradient at u, in the coordinates of the basis."""
        x = transform(u, basis)
        point = torch.from_numpy(x).to(dtype)
        loss = float(objective.losses(point, records).double().mean()) + 0.5 * float(penalty @ (x * x))
        gradient = objective.gradient(point, Batch(records, weights)).double().numpy() + penalty * x
        if pull is not None and pull.weight > 0.0:
            displacement = x - pull.released
            loss += 0.5 * pull.weight * float(displacement @ displacement)
            gradient += pull.weight * displacement
        return loss, transform(gradient, None if basis is None else basis.T)

    gradient_tolerance = tolerance * float(np.abs(value(np.zeros_like(start))[1]).max())
    first_point = transform(start, None if basis is None else np.asarray(np.linalg.inv(basis), np.float64))
    result = minimize(
        value,
        first_point,
        jac=True,
        method="L-BFGS-B",
        options={"gtol": gradient_tolerance, "ftol": 0.0, "maxiter": 1000},
    )
    return transform(np.asarray(result.x, np.float64), basis)


def _find_basis(records: Records, penalty: Floats) -> Floats | None:
    """Return B (features, features) such that the curvature is about 1 in u, where x = u B.

    Rows of x and u are outputs.  B is the inverse of the Cholesky factor L of L Lᵀ = c AᵀA/n + diag(p), with A (n,
    features) the features of the n records, c = 0.01 a guess of the loss's curvature, and p the penalty of an
    output's parameters, the same for each output, plus 1e-9.  The result is None for more than 4,000 features.
    """
    width = records.features.shape[-1]
    if width > _MAX_BASIS_FEATURES:
        return None
    # In float32 the moments of columns that are nearly collinear may have no Cholesky factor.
    moments = ((features := records.features.double()).mT @ features).numpy() / len(records.labels)
    return np.asarray(np.linalg.inv(np.linalg.cholesky(_CURVATURE * moments + np.diag(penalty[:width] + 1e-9))))


def find_intercepts(objective: Objective, records: Records) -> NDArray[np.bool_]:
    """Return a mask of the intercepts among the parameters, (d,).

    The intercept of each output is the weight of the last feature, if this feature is 1 in all records.  Otherwise
    no parameter is an intercept.
    """
    width = records.features.shape[-1]
    mask = np.zeros((objective.dimension // width, width), np.bool_)
    mask[:, -1] = bool((records.features[..., -1] == 1.0).all())
    return mask.ravel()


def make_penalties(objective: Objective, records: Records, kappa: float) -> Floats:
    """Return the penalty of each parameter, (d,): κ for weights, and 0 for intercepts.

    Intercepts have κ, too, if all records are of one class, since they would diverge, and for hazards, since a
    small silo may have bins without an event.
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
    """Fit a model from zero with the penalty κ, and return its parameters (d,).

    Intercepts have the penalty that `make_penalties` gives them.  `tolerance` and `pull` are those of `fit_model`.
    """
    start = np.zeros(objective.dimension)
    return fit_model(objective, records, make_penalties(objective, records, kappa), start, tolerance, pull)


def fit_local_model(objective: Objective, silo: SiloRecords, seed: int) -> tuple[Floats, float]:
    """Choose κ by folds, fit all training records, and return the local model (d,) and κ."""
    kappa = choose_penalty(objective, silo, seed)
    return fitted(objective, silo.train, kappa), kappa


def choose_penalty(objective: Objective, silo: SiloRecords, seed: int) -> float:
    """Return the penalty κ with the smallest mean loss on held-out folds, the largest of equals.

    The candidates are `PENALTIES`.  Models are fitted without the records of a fold and judged on these, for five
    folds in turn, or for one of them with more than 5,000 records.  The folds follow from the public `seed`.  A
    silo gets the largest candidate without folds if it has fewer than 5 units, fewer than 5 records of a class
    that occurs, or one class only.  The last two matter for classes only, and not for hazards.
    """
    labels = silo.train.labels
    has_few_records = len(np.unique(silo.units)) < _MIN_CLASS_RECORDS
    if not has_few_records and not labels.is_floating_point() and not isinstance(objective, LinearHazards):
        has_few_records = int(torch.bincount(labels)[labels].min()) < _MIN_CLASS_RECORDS
    if has_few_records or (_has_one_class(silo.train) and not isinstance(objective, LinearHazards)):
        return PENALTIES[0]
    folds = assign_folds(silo, seed)
    folds_to_test = range(1) if len(labels) > _MAX_FIVE_FOLD_RECORDS else range(_FOLD_COUNT)
    losses = np.zeros(len(PENALTIES))
    for fold in folds_to_test:
        is_held_out = torch.from_numpy(folds == fold)
        train_part, test_part = (
            Records(*(column[rows] for column in silo.train)) for rows in (~is_held_out, is_held_out)
        )
        point = np.zeros(objective.dimension)
        for index, kappa in enumerate(PENALTIES):  # each fit starts from the one before, which saves steps
            point = fit_model(
                objective, train_part, make_penalties(objective, train_part, kappa), point, ROUGH_TOLERANCE
            )
            losses[index] += float(objective.losses(torch.from_numpy(point), test_part).mean())
    return PENALTIES[int(np.argmin(losses))]


def assign_folds(silo: SiloRecords, seed: int) -> NDArray[np.int64]:
    """Assign each training record to a fold 0 … 4, (n,), with the records of a unit in the same fold.

    Units are dealt to the folds in turn, in a random order of the public `seed`, and class by class if labels are
    integers.  The class of a unit is the label of its first record.
    """
    first = np.unique(silo.units, return_index=True)[1]
    labels = silo.train.labels.numpy()[first]
    order = public_generator(seed, "folds alone", str(silo.silo)).permutation(len(first))
    if labels.dtype.kind == "i":
        order = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(len(first), np.int64)
    fold[order] = np.arange(len(first)) % _FOLD_COUNT
    return fold[np.searchsorted(silo.units[first], silo.units)]


def _has_one_class(records: Records) -> bool:
    return not records.labels.is_floating_point() and len(torch.unique(records.labels)) < 2


def recalibrate(objective: Objective, silo: SiloRecords, released: Floats) -> Floats:
    """Fit the intercepts of x̂ and one scale of its other weights to the silo's training records.

    With w the weights of x̂, the model x has weights s w/‖w‖ and intercepts b.  The fit over the scale s and over
    b starts at x̂ and minimises (1/n) Σ f(x; record) + 1e-3 (s² + ‖b‖²)/2.  The penalty keeps intercepts and scale
    finite for a silo with one class.

    Source: Platt 1999.

    Returns:
        Parameters of the model, (d,), those of x̂ if there are no intercepts, or if all weights w are 0.
    """
    mask = find_intercepts(objective, silo.train)
    weights = torch.full((len(silo.train.labels),), 1.0 / len(silo.train.labels), dtype=torch.float64)
    size = float(np.linalg.norm(released[~mask]))
    if not (mask.any() and size > 0.0):
        return released.copy()
    direction = np.where(mask, 0.0, released) / size

    def model(parameters: Floats) -> Floats:
        x: Floats = parameters[0] * direction
        x[mask] = parameters[1:]
        return x

    def value(parameters: Floats) -> tuple[float, Floats]:
        point = torch.from_numpy(model(parameters))
        loss = float(objective.losses(point, silo.train).mean()) + 0.5 * _INTERCEPT_PENALTY * float(
            parameters @ parameters
        )
        gradient = objective.gradient(point, Batch(silo.train, weights)).numpy()
        return loss, np.concatenate([[gradient @ direction], gradient[mask]]) + _INTERCEPT_PENALTY * parameters

    start = np.concatenate([[size], released[mask]])
    return model(
        minimize(
            value, start, jac=True, method="L-BFGS-B", options={"gtol": 1e-7, "ftol": 1e-12, "maxiter": 200}
        ).x
    )


_MAX_LOSS = 1e100  # replaces larger losses and NaN, so that means stay finite
PULL_WEIGHTS = (0.0, *(float(10.0 ** (half / 2)) for half in range(-6, 1)), math.inf)
"""Candidates for λ, from the local model to the released one."""


class PersonalModel(NamedTuple):
    """A silo's personal model, its λ, and the records by which λ was chosen."""

    point: Floats
    """Parameters, (d,)."""
    pull_weight: float
    """λ."""
    judged: Literal["spared", "folds"]
    """Records by which λ was chosen: training records that the release has not read, or folds.

    A silo with one unit has "folds", although its λ is 0 without a choice.
    """


def fit_personal_model(
    objective: Objective,
    silo: SiloRecords,
    released: Floats,
    seed: int,
    kappa: float,
    is_seen: NDArray[np.bool_] | None = None,
) -> PersonalModel:
    """Fit the personal model with the smallest λ within one standard error of the best.

    For each λ of `PULL_WEIGHTS`, from 0 to ∞, a model is fitted without the held-out records and judged by its
    losses on them.  The best λ has the smallest mean loss.  Another λ is within one standard error if the mean
    difference of its losses and those of the best λ is at most the standard error of this difference.

    Held out are the training records that the release has not read, if they are 10 or more and it has read others.
    Otherwise each fold of the training records is held out in turn.  A silo with one unit gets its local model.

    Args:
        objective: Loss of linear scores.
        silo: The silo's records.
        released: Released model x̂, (d,).
        seed: Public seed of the folds.
        kappa: κ of the local model.
        is_seen: Mask of the training records that the release has read, (n,), or None if it has read all.

    Returns:
        The personal model, fitted to all training records with the chosen λ.
    """
    # The release fits records that it has read better than others, which would favour a large λ.
    spared = is_seen is not None and int((~is_seen).sum()) >= _MIN_SPARED and bool(is_seen.any())
    if len(np.unique(silo.units)) < 2:  # nothing to hold out
        return PersonalModel(fit_local_model(objective, silo, seed)[0], 0.0, "folds")
    held_out_masks = [~is_seen] if spared and is_seen is not None else _held_out_masks(silo, seed)
    losses = np.concatenate(
        [_held_out_losses(objective, silo, released, kappa, mask) for mask in held_out_masks], axis=1
    )
    # NaN is replaced as well, since it would be taken for the smallest loss.
    losses = np.where(losses < _MAX_LOSS, losses, _MAX_LOSS)
    best = int(np.argmin(losses.mean(axis=1)))
    excess = losses - losses[best]
    standard_errors = excess.std(axis=1, ddof=1 if losses.shape[1] > 1 else 0) / math.sqrt(losses.shape[1])
    candidates = np.flatnonzero(excess.mean(axis=1) <= standard_errors)
    weight = PULL_WEIGHTS[int(candidates[0]) if len(candidates) else best]
    return PersonalModel(
        fitted(objective, silo.train, kappa, pull=Pull(weight, released)), weight, "spared" if spared else "folds"
    )


def _held_out_masks(silo: SiloRecords, seed: int) -> list[NDArray[np.bool_]]:
    folds = assign_folds(silo, seed)
    return [folds == fold for fold in range(_FOLD_COUNT) if 0 < int((folds == fold).sum()) < len(folds)]


def _held_out_losses(
    objective: Objective, silo: SiloRecords, released: Floats, kappa: float, is_held_out: NDArray[np.bool_]
) -> Floats:
    """Return the losses on held-out records of models fitted to the others, (λ, held-out records).

    `is_held_out` is a mask of the training records, (n,).
    """
    rows = torch.from_numpy(is_held_out)
    train_part, test_part = (Records(*(column[mask] for column in silo.train)) for mask in (~rows, rows))
    points = [
        fitted(objective, train_part, kappa, ROUGH_TOLERANCE, Pull(weight, released)) for weight in PULL_WEIGHTS
    ]
    return np.stack([objective.losses(torch.from_numpy(point), test_part).numpy() for point in points])


def score_best_learner(objective: Objective, silo: SiloRecords, seed: int, local: Floats) -> tuple[float, str]:
    """Return the test score and the name of the learner that is best by folds.

    The learners are the local model ("the model"), six settings of kernel ridge regression, and boosted trees.
    The best one has the largest sum of scores on held-out folds of the training records, and is then fitted to all
    of them.  With training records of one class or of one unit, or fewer than 10 of them, the local model is
    taken.

    Raises:
        InputError: scikit-learn is not installed, or the model is of hazards.
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
    is_regression = silo.train.labels.is_floating_point()
    if _has_one_class(silo.train) or len(silo.train.labels) < 2 * _FOLD_COUNT:
        return score_model(objective, local, silo.test), "the model"
    (features, labels), (tests, targets) = (
        (fold_records.features.numpy(), fold_records.labels.numpy()) for fold_records in (silo.train, silo.test)
    )
    classes = np.unique(labels)
    # The kernel is exp(-width · gamma ‖a - b‖²).  1/gamma is the median squared distance, without zeros, of at
    # most 500 records.
    sample = np.random.default_rng(0).permutation(len(features))[:500]
    squared_distances = ((features[sample][:, None] - features[sample][None]) ** 2).sum(-1)
    gamma = 1.0 / max(
        float(np.median(squared_distances[squared_distances > 0.0])) if (squared_distances > 0.0).any() else 1.0,
        1e-12,
    )

    def ridge(width: float, alpha: float) -> Callable[[Floats, NDArray[Any], Floats], NDArray[Any]]:
        """Return a function that fits kernel ridge regression, with penalty `alpha`, and predicts `queries`.

        For classes the targets are 1 for the class and -1 for others, and the largest output is the prediction.
        """

        def predict(train: Floats, train_labels: NDArray[Any], queries: Floats) -> NDArray[Any]:
            learner = kernels.KernelRidge(alpha=alpha, kernel="rbf", gamma=width * gamma)
            targets_of_fit = (
                train_labels if is_regression else (train_labels[:, None] == classes[None]) * 2.0 - 1.0
            )
            prediction = learner.fit(train, targets_of_fit).predict(queries)
            return np.asarray(prediction if is_regression else classes[prediction.argmax(1)])

        return predict

    # Boosted trees have one setting, and the same form of a function.  With more than 10,000 records
    # they stop early, on a stratified sample, which needs two records of each class.
    def trees(train: Floats, train_labels: NDArray[Any], queries: Floats) -> NDArray[Any]:
        name = f"HistGradientBoosting{'Regressor' if is_regression else 'Classifier'}"
        stopping = "auto" if is_regression or np.unique(train_labels, return_counts=True)[1].min() > 1 else False
        return np.asarray(
            getattr(ensemble, name)(max_iter=100, random_state=0, early_stopping=stopping)
            .fit(train, train_labels)
            .predict(queries)
        )

    def score(prediction: NDArray[Any], truth: NDArray[Any]) -> float:
        return (
            -float(((prediction - truth) ** 2).mean()) / 2.0
            if is_regression
            else float((prediction == truth).mean())
        )

    learners = {
        f"kernel ridge, width {w:g}, ridge {a:g}": ridge(w, a) for w in (0.5, 2.0) for a in (0.01, 0.1, 1.0)
    }
    candidates = {**learners, "boosted trees": trees}
    scores = dict.fromkeys(["the model", *candidates], 0.0)
    # Judge every learner on the same folds, and then the best one on the test records.
    with pools.threadpool_limits(1):
        for is_held_out in _held_out_masks(silo, seed):
            train_part = Records(*(column[torch.from_numpy(~is_held_out)] for column in silo.train))
            test_part = Records(*(column[torch.from_numpy(is_held_out)] for column in silo.train))
            fold_records = SiloRecords(silo.silo, silo.name, train_part, silo.units[~is_held_out], test_part)
            scores["the model"] += score_model(
                objective, fit_local_model(objective, fold_records, seed)[0], test_part
            )
            for name, predict in candidates.items():
                scores[name] += score(
                    predict(features[~is_held_out], labels[~is_held_out], features[is_held_out]),
                    labels[is_held_out],
                )
        best = max(scores, key=lambda name: scores[name])
        if best == "the model":
            return score_model(objective, local, silo.test), best
        return score(candidates[best](features, labels, tests), targets), best


def score_balanced(objective: Objective, point: Floats, records: Records) -> float:
    """Return the mean accuracy over the classes that occur, or `score_model` for a regression or hazards."""
    if records.labels.is_floating_point() or isinstance(objective, LinearHazards):
        return score_model(objective, point, records)
    masks = [records.labels == label for label in torch.unique(records.labels)]
    records_by_class = [Records(*(column[mask] for column in records)) for mask in masks]
    return float(np.mean([score_model(objective, point, class_records) for class_records in records_by_class]))


def score_model(objective: Objective, point: Floats, records: Records) -> float:
    """Return the accuracy in [0, 1], or the negative mean loss of a regression or of hazards."""
    evaluation = objective.evaluate(torch.from_numpy(point), records)
    return float(evaluation.loss.neg() if evaluation.accuracy is None else evaluation.accuracy)


def score_constant(objective: Objective, silo: SiloRecords) -> float:
    """Return the score on the test records of a constant prediction from the training labels.

    The prediction is the most frequent class, the mean label of a regression, or the estimated hazards.  The score
    is the accuracy for classes, minus half the mean squared error for a regression, and minus the mean loss for
    hazards.
    """
    labels, tests = silo.train.labels, silo.test.labels
    if isinstance(objective, LinearHazards):
        return -objective.constant_loss(labels, tests)
    if labels.is_floating_point():
        return -float((tests - labels.mean()).square().mean()) / 2.0
    return float((tests == torch.bincount(labels).argmax()).double().mean())
