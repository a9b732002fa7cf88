"""`fedpriv silo refine`: a silo's comparison of its local model, the released one and a personal one.

The silo's administrator runs the comparison.  It opens no socket, reads the silo's records and, but for `--alone`,
a published model, prints to its terminal, and writes the personal model into a folder that no other user can read.
A local model is fitted to the silo's own training records.  A personal model is a local one that is pulled towards
the published model, with a weight λ that is chosen by fits from which some training records are held out, and is 0
for one unit alone.  The results are functions of the silo's records without noise, so no run's guarantee holds
against a person who sees them.
"""

import dataclasses
import os
import stat
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.addons.worth.local_models import (
    Floats,
    PersonalModel,
    SiloRecords,
    fit_local_model,
    fit_personal_model,
    recalibrate,
    score_balanced,
    score_constant,
    score_model,
)
from fedpriv.cli.options import print_table
from fedpriv.core.errors import InputError
from fedpriv.core.files import PRIVATE_MODE, find_scenario_file, write_vector
from fedpriv.core.random import public_generator
from fedpriv.core.replicates import limit_to_one_thread
from fedpriv.loss.objective import Objective, Records, fast_paths
from fedpriv.plan.task import ModelInputs, mask_absent_records
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell
from fedpriv.silo.policy import Policy, check_readers, check_writers, read_policy
from fedpriv.silo.shard import Shard

_CURVE_SHARES = (0.25, 0.5, 1.0)
_MIN_TRAINING_RECORDS = 2
_MAX_PARAMETER = 1e30


@dataclass(frozen=True)
class HomeData:
    """A silo's records as a scenario's model sees them."""

    objective: Objective
    """Loss of linear scores."""
    silo_records: SiloRecords
    """Training records of the shard and of the held-out file, and test records of the shard."""
    read_by_guard: NDArray[np.bool_]
    """Mask of the training records that the guard held, (n,), those of the shard."""
    seed: int
    """Public seed of folds."""


@dataclass(frozen=True)
class RefinedScores:
    """Scores on the silo's own test records, where larger is better, and the personal model."""

    local_score: float
    """Score of the silo's own model."""
    released_score: float
    """Score of the released model."""
    recalibrated_score: float
    """Score after a fit of the released model's intercepts and scale."""
    personal_score: float
    """Score of the personal model."""
    constant_score: float
    """Score of a constant prediction."""
    personal_model: PersonalModel
    """Personal model, with its λ."""


@limit_to_one_thread()
def load_home_data(policy: Policy, cell: Cell, held_out: Path | None) -> HomeData:
    """Load the silo's records, with persons as units if the shard and the held-out file name persons.

    Otherwise records are the units.  A shard is the file of the silo's records.

    Args:
        policy: The silo's policy, which names its shard.
        cell: Cell of the run's scenario.
        held_out: File of further training records that the silo's guard never held, or None.  Test records of this
            file are not used.

    Raises:
        InputError: The scenario's model or a file cannot be used, other users can read or change the held-out
            file, or there are too few records.
    """
    if cell.model.import_paths:
        raise InputError(
            f"model.name = {cell.model.name!r}: code that is none of fedpriv's is not run beside a silo's records"
        )
    shards = [policy.load_shard()]
    if held_out is not None:
        check_writers([held_out])
        check_readers(held_out)
        shards.append(policy.model_copy(update={"shard": held_out}).load_shard())
    if (tests := shards[0].test) is None:
        raise InputError(
            f"{policy.shard}: has no test records to judge a model on; give `test_labels` and `test_images` or "
            "`test_features` in the .npz file, or table.split"
        )
    classes = policy.class_count
    if cell.model.is_regression != (classes == 0):
        raise InputError(f"model.name = {cell.model.name!r}: does not fit the labels of {policy.shard}")
    shard_records = [_load_records(shard, cell) for shard in shards]
    if len({records.features.shape[1:] for records, _ in shard_records}) > 1:
        raise InputError(f"{held_out}: its records have another shape than those of {policy.shard}")
    test, _ = _load_records(tests, cell)
    train = Records(
        *(torch.cat([getattr(records, name) for records, _ in shard_records]) for name in Records._fields)
    )
    units = np.arange(len(train.labels))
    if all(shard.persons is not None for shard in shards):
        person_columns = [
            np.char.decode(persons, "utf-8", "backslashreplace")
            if persons.dtype.kind == "S"
            else persons.astype(np.str_)
            for shard, (_, rows) in zip(shards, shard_records, strict=True)
            for persons in [np.asarray(shard.persons)[rows]]
        ]
        units = np.unique(np.concatenate(person_columns), return_inverse=True)[1].ravel()
    read_by_guard = np.concatenate(
        [np.full(len(records.labels), shard_index == 0) for shard_index, (records, _) in enumerate(shard_records)]
    )
    if len(train.labels) < _MIN_TRAINING_RECORDS or not len(test.labels):
        sizes = f"{len(train.labels)} training and {len(test.labels)} test records"
        raise InputError(f"{policy.shard}: {sizes} are too few to fit and to judge a model")
    inputs, first = _model_inputs(cell), shards[0]
    objective = inputs.make_objective(inputs.make_layout(first.images, first.labels, classes), classes)
    if fast_paths(objective).linear is None:
        raise InputError(
            f"model.name = {cell.model.name!r}: refines models of linear scores without a penalty so far"
        )
    return HomeData(
        objective, SiloRecords(policy.silo, f"silo {policy.silo}", train, units, test), read_by_guard, cell.seed
    )


def _model_inputs(cell: Cell) -> ModelInputs:
    """Return the inputs of the run's model with float64 as their type, in which local models are judged."""
    return dataclasses.replace(ModelInputs.from_cell(cell), dtype="float64")


def _load_records(shard: Shard, cell: Cell) -> tuple[Records, NDArray[np.int64]]:
    """Return a shard's records that count, and their row indices in the shard."""
    rows, is_present = mask_absent_records(
        _model_inputs(cell).make_records(np.array(shard.images), np.array(shard.labels))
    )
    return Records(rows.features[is_present], rows.labels[is_present]), np.flatnonzero(is_present.numpy())


def read_released_model(path: Path, home: HomeData) -> Floats:
    """Read a published model, (d,), from a file in NumPy's format .npy.

    Raises:
        InputError: The file is no model of this scenario, or a number is not finite or beyond ± 1e30.
    """
    try:
        model = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, OverflowError, MemoryError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: not a released model, an array in .npy ({error})") from None
    expected_shape = (home.objective.dimension,)
    if not isinstance(model, np.ndarray) or model.shape != expected_shape or model.dtype.kind != "f":
        raise InputError(f"{path}: not a model of this scenario, whose models are {expected_shape} floats")
    if not (np.abs(model) <= _MAX_PARAMETER).all():
        raise InputError(
            f"{path}: a number of the model is not finite, or above {_MAX_PARAMETER:g}: its run diverged"
        )
    return model.astype(np.float64)


@limit_to_one_thread()
def compare_models(home: HomeData, released: Floats) -> RefinedScores:
    """Score the local, released, recalibrated and personal models, and a constant, on the test records."""
    objective, silo = home.objective, home.silo_records
    # κ, the penalty of the local fit, is also that of the personal fit.
    local_point, kappa = fit_local_model(objective, silo, home.seed)
    model = fit_personal_model(objective, silo, released, home.seed, kappa, home.read_by_guard)
    local_score, released_score, recalibrated_score, personal_score = (
        score_model(objective, point, silo.test)
        for point in (local_point, released, recalibrate(objective, silo, released), model.point)
    )
    return RefinedScores(
        local_score, released_score, recalibrated_score, personal_score, score_constant(objective, silo), model
    )


@limit_to_one_thread()
def measure_learning_curve(home: HomeData) -> list[tuple[int, float, float]]:
    """Fit local models to about a quarter, a half and all of the units, in a public random order.

    A unit is a record, or all records of a person if the files name persons.

    Returns:
        For each model the number of training records, the score on the test records, and the balanced score, which
        for classes is the mean of the accuracies at each class.
    """
    units = np.unique(home.silo_records.units)
    order = units[public_generator(home.seed, "learning curve").permutation(len(units))]
    curve = []
    for share in _CURVE_SHARES:
        is_used = torch.from_numpy(np.isin(home.silo_records.units, order[: max(1, round(share * len(units)))]))
        train = Records(*(column[is_used] for column in home.silo_records.train))
        silo = SiloRecords(
            home.silo_records.silo,
            home.silo_records.name,
            train,
            home.silo_records.units[is_used.numpy()],
            home.silo_records.test,
        )
        point, _ = fit_local_model(home.objective, silo, home.seed)
        scores = score_model(home.objective, point, silo.test), score_balanced(home.objective, point, silo.test)
        curve.append((len(train.labels), *scores))
    return curve


def write_model(folder: Path, name: str, point: Floats) -> Path:
    """Write a model, readable for its owner only, into a folder that no other user can read.

    Args:
        folder: Folder, which is made if it is missing.
        name: Name of the file without its suffix .npy.
        point: Parameters of the model, (d,).

    Returns:
        Path of the file.

    Raises:
        InputError: Another user owns the folder or has access to it, it cannot be made, or it is the folder of a
            run.
        OSError: The file cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}") from None
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise InputError(
            f"--out {folder}: another user owns it or has access to it, and a refined model gives this silo's "
            "records away; chmod 700 it, or name a new folder"
        )
    if (folder / "results.json").exists():
        raise InputError(f"--out {folder}: is the folder of a run; name a folder of this silo's own")
    path = folder / f"{name}.npy"
    write_vector(path, point, PRIVATE_MODE)
    return path


def print_refined(
    policy: Path, scenario: Path, model: Path | None, held_out: Path | None, out: Path | None, *, only_curve: bool
) -> None:
    """Print a silo's scores of its local, released, recalibrated and personal models, and of a constant.

    With `only_curve` scores of local models that are fitted to parts of the records are printed instead.  The
    model and the data of the scenario are those of its first sweep point.

    Args:
        policy: Policy of the silo, which names the records.
        scenario: Scenario of the run.
        model: File of the released model, or None with `only_curve`.
        held_out: File of further training records that the guard never held, or None.
        out: Folder for the personal model, or None to write nothing.
        only_curve: Whether only the learning curve of local models is printed, without a released model.

    Raises:
        InputError: Options do not fit together, or a file or the folder `out` cannot be used.
        OSError: The personal model cannot be written.
    """
    if (model is None) != only_curve:
        raise InputError(
            "--model FILE compares with a released model, --alone draws the curve without one: give one"
        )
    if only_curve and (out is not None or held_out is not None):
        raise InputError("--alone: writes no model and needs no other records; leave out --out and --held-out")
    home = load_home_data(
        read_policy(policy), load_scenario(find_scenario_file(scenario)).points[0].cell, held_out
    )
    if model is None:
        rows = [
            [f"{size:,}", _format_score(home, score), _format_score(home, balanced)]
            for size, score, balanced in measure_learning_curve(home)
        ]
        print_table([["training records", f"alone, {_metric_name(home)}", "mean over classes"], *rows])
        sys.stdout.write(
            "If the curve still rises at its end, records of others can help.  Compare with what simulations of "
            "similar federations gained: docs/worth.md.\n"
        )
        return
    refined = compare_models(home, read_released_model(model, home))
    scores = {
        "this silo alone, nothing released": refined.local_score,
        "released": refined.released_score,
        "released, recalibrated at home": refined.recalibrated_score,
        "personal": refined.personal_score,
        "a constant": refined.constant_score,
    }
    print_table(
        [["", _metric_name(home)], *([name, _format_score(home, value)] for name, value in scores.items())]
    )
    tests = len(home.silo_records.test.labels)
    # Two standard errors of a difference between two models that decide a tenth of the records differently.
    errors = f"{200.0 * (0.1 / tests) ** 0.5:.1f} points"
    noise = "their spread over records" if _metric_name(home) == "-loss" else errors
    judged = "records that the release has not read, one standard error towards alone"
    if refined.personal_model.judged == "folds":
        few = held_out is not None and int((~home.read_by_guard).sum()) < 10
        judged = (
            "nothing, because all records are of one person"
            if len(np.unique(home.silo_records.units)) < 2
            else "folds of records that the release has read, which favours it"
            + ", because --held-out has fewer than 10 records" * few
            + ", one standard error towards alone"
        )
    sys.stdout.write(
        f"personal: pulled with lambda = {refined.personal_model.pull_weight:g} "
        f"(0 is alone, inf the released model), chosen on {judged}.\n"
        f"{tests:,} test records: differences below {noise} tell nothing.\n"
        "All of this, lambda and scores too, is computed from this silo's records without noise: keep it to "
        "yourself.  Whether the silo then leaves or stays tells others a little of it.\n"
    )
    if out is not None:
        sys.stdout.write(f"wrote {write_model(out, 'personal', refined.personal_model.point)}\n")


def _metric_name(home: HomeData) -> str:
    return "-loss" if home.silo_records.train.labels.is_floating_point() else "accuracy"


def _format_score(home: HomeData, value: float) -> str:
    return f"{value:.4f}" if _metric_name(home) == "-loss" else f"{100.0 * value:.1f}"
