"""A silo at home: its own model, the released one, and its own pulled towards the released one.

This is neither the guard nor a client: a process of the silo's administrator that opens no socket, reads the
silo's records and a file that everybody has, prints to its own terminal and writes into a folder of its own.  What
it computes is a function of the silo's records without noise: no run's guarantee covers it for those who see it.

`fedpriv silo refine`: a silo's own comparison, on its own terminal.
"""

import dataclasses
import os
import stat
import sys
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
    """A silo's records as a scenario's model sees them; `read` (n,) says which ones the guard held."""

    objective: Objective
    silo_records: SiloRecords
    read_by_guard: NDArray[np.bool_]
    seed: int


@dataclass(frozen=True)
class RefinedScores:
    """Scores on the silo's own test records, more is better, and the models that were fitted."""

    local_score: float
    released_score: float
    recalibrated_score: float
    personal_score: float
    constant_score: float
    personal_model: PersonalModel


@limit_to_one_thread()
def load_home_data(policy: Policy, cell: Cell, held_out: Path | None) -> HomeData:
    """The silo's records; `held_out` are further ones that its guard never held.

    InputError for a scenario whose model is somebody's code or not of linear scores, and without test records.
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
    parts = [_load_records(each, cell) for each in shards]
    test, _ = _load_records(tests, cell)
    train = Records(*(torch.cat([getattr(part, name) for part, _ in parts]) for name in Records._fields))
    units = np.arange(len(train.labels))
    if all(each.persons is not None for each in shards):
        own = [
            np.asarray(each.persons)[rows].astype(np.str_) for each, (_, rows) in zip(shards, parts, strict=True)
        ]
        units = np.unique(np.concatenate(own), return_inverse=True)[1].ravel()
    read = np.concatenate([np.full(len(part.labels), place == 0) for place, (part, _) in enumerate(parts)])
    if len(train.labels) < _MIN_TRAINING_RECORDS or not len(test.labels):
        sizes = f"{len(train.labels)} training and {len(test.labels)} test records"
        raise InputError(f"{policy.shard}: {sizes} are too few to fit and to judge a model")
    inputs, first = _model_inputs(cell), shards[0]
    objective = inputs.make_objective(inputs.make_layout(first.images, first.labels, classes), classes)
    if fast_paths(objective).linear is None:
        raise InputError(f"model.name = {cell.model.name!r}: refines models of linear scores alone so far")
    return HomeData(
        objective, SiloRecords(policy.silo, f"silo {policy.silo}", train, units, test), read, cell.seed
    )


def _model_inputs(cell: Cell) -> ModelInputs:
    """What the run's model sees, in the type that models are fitted in at home."""
    return dataclasses.replace(ModelInputs.from_cell(cell), dtype="float64")


def _load_records(shard: Shard, cell: Cell) -> tuple[Records, NDArray[np.int64]]:
    """A shard's records that count, and which of its rows they are."""
    rows, there = mask_absent_records(
        _model_inputs(cell).make_records(np.array(shard.images), np.array(shard.labels))
    )
    return Records(rows.features[there], rows.labels[there]), np.flatnonzero(there.numpy())


def read_released_model(path: Path, home: HomeData) -> Floats:
    """A published model; InputError for a file that is none, or of another scenario."""
    try:
        model = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: not a released model, an array in .npy ({error})") from None
    wanted = (home.objective.dimension,)
    if not isinstance(model, np.ndarray) or model.shape != wanted or model.dtype.kind != "f":
        raise InputError(f"{path}: not a model of this scenario, whose models are {wanted} floats")
    if not (np.abs(model) <= _MAX_PARAMETER).all():
        raise InputError(
            f"{path}: a number of the model is not finite, or above {_MAX_PARAMETER:g}: its run diverged"
        )
    return model.astype(np.float64)


@limit_to_one_thread()
def compare_models(home: HomeData, released: Floats) -> RefinedScores:
    """Judge the silo's alone, released, recalibrated and personal model on the silo's own test records."""
    objective, held = home.objective, home.silo_records
    own, kappa = fit_local_model(objective, held, home.seed)
    model = fit_personal_model(objective, held, released, home.seed, kappa, home.read_by_guard)
    first, second, third, fourth = (
        score_model(objective, point, held.test)
        for point in (own, released, recalibrate(objective, held, released), model.point)
    )
    return RefinedScores(first, second, third, fourth, score_constant(objective, held), model)


@limit_to_one_thread()
def measure_learning_curve(home: HomeData) -> list[tuple[int, float, float]]:
    """(training records, score, balanced score) alone at a quarter, half and all of the units."""
    units = np.unique(home.silo_records.units)
    order = units[public_generator(home.seed, "learning curve").permutation(len(units))]
    found = []
    for share in _CURVE_SHARES:
        taken = torch.from_numpy(np.isin(home.silo_records.units, order[: max(1, round(share * len(units)))]))
        train = Records(*(column[taken] for column in home.silo_records.train))
        part = SiloRecords(
            home.silo_records.silo,
            home.silo_records.name,
            train,
            home.silo_records.units[taken.numpy()],
            home.silo_records.test,
        )
        point, _ = fit_local_model(home.objective, part, home.seed)
        scores = score_model(home.objective, point, part.test), score_balanced(home.objective, point, part.test)
        found.append((len(train.labels), *scores))
    return found


def write_model(folder: Path, name: str, point: Floats) -> Path:
    """Write a model for its owner alone, into a folder that nobody else may read; InputError for another."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}") from None
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise InputError(
            f"--out {folder}: others may read it, and a refined model gives this silo's records away; "
            "chmod 700 it, or name a new folder"
        )
    if (folder / "results.json").exists():
        raise InputError(f"--out {folder}: is the folder of a run; name a folder of this silo's own")
    path = folder / f"{name}.npy"
    write_vector(path, point, PRIVATE_MODE)
    return path


def print_refined(
    policy: Path, scenario: Path, model: Path | None, held_out: Path | None, out: Path | None, *, only_curve: bool
) -> None:
    """Print the scores on the silo's own test records, and write the personal model where a folder is given."""
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
            [f"{size:,}", _format_score(home, score), _format_score(home, even)]
            for size, score, even in measure_learning_curve(home)
        ]
        print_table([["training records", f"alone, {_metric_name(home)}", "classes alike"], *rows])
        sys.stdout.write(
            "A curve that still rises is where records of others can help.  Compare with what simulations of "
            "similar federations gained: docs/worth.md.\n"
        )
        return
    found = compare_models(home, read_released_model(model, home))
    shown = {
        "this silo alone, nothing released": found.local_score,
        "released": found.released_score,
        "released, recalibrated at home": found.recalibrated_score,
        "personal": found.personal_score,
        "a constant": found.constant_score,
    }
    print_table([["", _metric_name(home)], *([name, _format_score(home, value)] for name, value in shown.items())])
    tests = len(home.silo_records.test.labels)
    # Two standard errors of a difference between two models that decide a tenth of the records differently.
    errors = f"{200.0 * (0.1 / tests) ** 0.5:.1f} points"
    noise = "their spread over records" if _metric_name(home) == "-loss" else errors
    judged = "records that the release has not read"
    if found.personal_model.judged == "folds":
        judged = "folds, all of which the release has read: that favours it"
        judged += ", and --held-out has fewer than 10 records" * (held_out is not None)
    sys.stdout.write(
        f"personal: pulled with lambda = {found.personal_model.pull_weight:g} (0 is alone, inf the released "
        "model), chosen on "
        f"{judged}, one standard error towards alone.\n"
        f"{tests:,} test records: differences below {noise} tell nothing.\n"
        "All of this is of this silo's records without noise, lambda and scores too: keep it to yourself.  "
        "Leaving or staying after a look tells others a little of it.\n"
    )
    if out is not None:
        sys.stdout.write(f"wrote {write_model(out, 'personal', found.personal_model.point)}\n")


def _metric_name(home: HomeData) -> str:
    return "-loss" if home.silo_records.train.labels.is_floating_point() else "accuracy"


def _format_score(home: HomeData, value: float) -> str:
    return f"{value:.4f}" if _metric_name(home) == "-loss" else f"{100.0 * value:.1f}"
