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
    Held,
    Personal,
    alone,
    balanced_score,
    constant_score,
    personal,
    recalibrated,
    score_of,
)
from fedpriv.cli.options import print_table
from fedpriv.core.errors import InputError
from fedpriv.core.files import OWN, scenario_file, write_vector
from fedpriv.core.random import public_generator
from fedpriv.core.replicates import one_thread
from fedpriv.loss.objective import Objective, Records, fast_paths
from fedpriv.plan.task import ModelInputs, counting
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell
from fedpriv.silo.policy import Policy, check_readers, check_writers, read_policy
from fedpriv.silo.shard import Shard

_PARTS = (0.25, 0.5, 1.0)
_LEAST = 2
_LARGEST = 1e30


@dataclass(frozen=True)
class Home:
    """A silo's records as a scenario's model sees them; `read` (n,) says which ones the guard held."""

    objective: Objective
    held: Held
    read: NDArray[np.bool_]
    seed: int


@dataclass(frozen=True)
class Refined:
    """Scores on the silo's own test records, more is better, and the models that were fitted."""

    alone: float
    released: float
    recalibrated: float
    personal: float
    constant: float
    model: Personal


@one_thread()
def home_of(policy: Policy, cell: Cell, held_out: Path | None) -> Home:
    """The silo's records; `held_out` are further ones that its guard never held.

    InputError for a scenario whose model is somebody's code or not of linear scores, and without test records.
    """
    if cell.model.code:
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
    if cell.model.regression != (classes == 0):
        raise InputError(f"model.name = {cell.model.name!r}: does not fit the labels of {policy.shard}")
    parts = [_records(each, cell) for each in shards]
    test, _ = _records(tests, cell)
    train = Records(*(torch.cat([getattr(part, name) for part, _ in parts]) for name in Records._fields))
    units = np.arange(len(train.labels))
    if all(each.persons is not None for each in shards):
        own = [
            np.asarray(each.persons)[rows].astype(np.str_) for each, (_, rows) in zip(shards, parts, strict=True)
        ]
        units = np.unique(np.concatenate(own), return_inverse=True)[1].ravel()
    read = np.concatenate([np.full(len(part.labels), place == 0) for place, (part, _) in enumerate(parts)])
    if len(train.labels) < _LEAST or not len(test.labels):
        sizes = f"{len(train.labels)} training and {len(test.labels)} test records"
        raise InputError(f"{policy.shard}: {sizes} are too few to fit and to judge a model")
    inputs, first = _inputs(cell), shards[0]
    objective = inputs.objective(inputs.layout(first.images, first.labels, classes), classes)
    if fast_paths(objective).linear is None:
        raise InputError(f"model.name = {cell.model.name!r}: refines models of linear scores alone so far")
    return Home(objective, Held(policy.silo, f"silo {policy.silo}", train, units, test), read, cell.seed)


def _inputs(cell: Cell) -> ModelInputs:
    """What the run's model sees, in the type that models are fitted in at home."""
    return dataclasses.replace(ModelInputs.of(cell), dtype="float64")


def _records(shard: Shard, cell: Cell) -> tuple[Records, NDArray[np.int64]]:
    """A shard's records that count, and which of its rows they are."""
    rows, there = counting(_inputs(cell).records(np.array(shard.images), np.array(shard.labels)))
    return Records(rows.features[there], rows.labels[there]), np.flatnonzero(there.numpy())


def read_released(path: Path, home: Home) -> Floats:
    """A published model; InputError for a file that is none, or of another scenario."""
    try:
        model = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: not a released model, an array in .npy ({error})") from None
    wanted = (home.objective.dimension,)
    if not isinstance(model, np.ndarray) or model.shape != wanted or model.dtype.kind != "f":
        raise InputError(f"{path}: not a model of this scenario, whose models are {wanted} floats")
    if not (np.abs(model) <= _LARGEST).all():
        raise InputError(f"{path}: a number of the model is not finite, or above {_LARGEST:g}: its run diverged")
    return model.astype(np.float64)


@one_thread()
def refined(home: Home, released: Floats) -> Refined:
    """Judge the silo's alone, released, recalibrated and personal model on the silo's own test records."""
    objective, held = home.objective, home.held
    own, kappa = alone(objective, held, home.seed)
    model = personal(objective, held, released, home.seed, kappa, home.read)
    first, second, third, fourth = (
        score_of(objective, point, held.test)
        for point in (own, released, recalibrated(objective, held, released), model.point)
    )
    return Refined(first, second, third, fourth, constant_score(objective, held), model)


@one_thread()
def learning_curve(home: Home) -> list[tuple[int, float, float]]:
    """(training records, score, balanced score) alone at a quarter, half and all of the units."""
    units = np.unique(home.held.units)
    order = units[public_generator(home.seed, "learning curve").permutation(len(units))]
    found = []
    for share in _PARTS:
        taken = torch.from_numpy(np.isin(home.held.units, order[: max(1, round(share * len(units)))]))
        train = Records(*(column[taken] for column in home.held.train))
        part = Held(home.held.silo, home.held.name, train, home.held.units[taken.numpy()], home.held.test)
        point, _ = alone(home.objective, part, home.seed)
        scores = score_of(home.objective, point, part.test), balanced_score(home.objective, point, part.test)
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
    write_vector(path, point, OWN)
    return path


def print_refined(
    policy: Path, scenario: Path, model: Path | None, held_out: Path | None, out: Path | None, *, alone: bool
) -> None:
    """Print the scores on the silo's own test records, and write the personal model where a folder is given."""
    if (model is None) != alone:
        raise InputError(
            "--model FILE compares with a released model, --alone draws the curve without one: give one"
        )
    if alone and (out is not None or held_out is not None):
        raise InputError("--alone: writes no model and needs no other records; leave out --out and --held-out")
    home = home_of(read_policy(policy), load_scenario(scenario_file(scenario)).points[0].cell, held_out)
    if model is None:
        rows = [[f"{size:,}", _text(home, score), _text(home, even)] for size, score, even in learning_curve(home)]
        print_table([["training records", f"alone, {_metric(home)}", "classes alike"], *rows])
        sys.stdout.write(
            "A curve that still rises is where records of others can help.  Compare with what simulations of "
            "similar federations gained: docs/worth.md.\n"
        )
        return
    found = refined(home, read_released(model, home))
    shown = {
        "this silo alone, nothing released": found.alone,
        "released": found.released,
        "released, recalibrated at home": found.recalibrated,
        "personal": found.personal,
        "a constant": found.constant,
    }
    print_table([["", _metric(home)], *([name, _text(home, value)] for name, value in shown.items())])
    tests = len(home.held.test.labels)
    # Two standard errors of a difference between two models that decide a tenth of the records differently.
    errors = f"{200.0 * (0.1 / tests) ** 0.5:.1f} points"
    noise = "their spread over records" if _metric(home) == "-loss" else errors
    judged = "records that the release has not read"
    if found.model.judged == "folds":
        judged = "folds, all of which the release has read: that favours it"
        judged += ", and --held-out has fewer than 10 records" * (held_out is not None)
    sys.stdout.write(
        f"personal: pulled with lambda = {found.model.pull:g} (0 is alone, inf the released model), chosen on "
        f"{judged}, one standard error towards alone.\n"
        f"{tests:,} test records: differences below {noise} tell nothing.\n"
        "All of this is of this silo's records without noise, lambda and scores too: keep it to yourself.  "
        "Leaving or staying after a look tells others a little of it.\n"
    )
    if out is not None:
        sys.stdout.write(f"wrote {write_model(out, 'personal', found.model.point)}\n")


def _metric(home: Home) -> str:
    return "-loss" if home.held.train.labels.is_floating_point() else "accuracy"


def _text(home: Home, value: float) -> str:
    return f"{value:.4f}" if _metric(home) == "-loss" else f"{100.0 * value:.1f}"
