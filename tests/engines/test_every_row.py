"""Every row of the table of algorithms, under every participation and trust setting, on both fast engines.

A combination must be refused with one line, or train alike on both engines: what falls between two parts (a round
that is given no rows, a step of 0) shows as a model that does not move.  Rows, participations and trust settings
are those of their registries, so that a new one is tried here before anybody writes a test for it.
"""

import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.noise.trust import TRUSTS
from fedpriv.papers.table import ALGORITHMS
from fedpriv.participation.orders import FixedOrder
from fedpriv.participation.registry import PARTICIPATIONS, SELECTABLE_PARTICIPATIONS
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from tests.conftest import small_tree
from tests.engines.builders import (
    claim_of,
    plan_cell,
    refusal,
    run_on_both,
    run_together,
    small_cell,
    store_and_load,
    streams_of,
)
from tests.parts import in_parts
from tests.rough import rough_accounting

rough = pytest.fixture(autouse=True, scope="module")(rough_accounting)
_GOLDSTEIN = {
    "smoothing": 0.1, "radius": 0.02, "period": 3, "anchor_clip": 20.0, "clip": 5.0, "step": 0.0005,
    "window": 2, "output": "last",
}  # fmt: skip
_LOCAL = {"clip": 20.0, "local_steps": 3, "local_step": 0.01}
SETTINGS: dict[str, dict[str, Any]] = {
    "dp-mu2-fl": {"diameter": 2.0, "clip": 5.0, "step": 0.002},
    "accelerated-dp-srgd": {"clip": 20.0, "beta": 400.0, "radius": 2.0},
    "unaccelerated-dp-srgd": {"clip": 20.0, "beta": 400.0, "radius": 2.0},
    "accelerated-independent": {"clip": 20.0, "beta": 400.0, "radius": 2.0},
    "momentum-tree": {"alpha": 0.5, "step": 0.02},
    "momentum-tree-reduced": {"alpha": 0.5, "step": 0.02},
    "momentum-tree-aligned": {"alpha": 0.5, "step": 0.02},
    "online-to-batch": {"clip": 20.0, "step": 0.002, "radius": 2.0},
    "dp-sgd": {"clip": 20.0, "step": 0.002},
    "local-dp-sgd": {"clip": 20.0, "step": 0.002, "local_steps": 3},
    "dp-ftrl": {"clip": 20.0, "step": 0.002},
    "noisy-minibatch": {"clip": 20.0, "step": 0.002},
    "fedavg": {"step": 0.002, "local_batch": 2, "local_epochs": 2},
    "goldstein-single-pass": _GOLDSTEIN,
    "goldstein-erm": _GOLDSTEIN,
    "phased-sgd": {"step": 0.004, "radius": 2.0},
    "dp-fedavg": {**_LOCAL, "step": 0.3},
    "dp-fedadam": {**_LOCAL, "step": 0.002, "clip_quantile": 0.5, "clip_weight": 0.1},
    "dp-fedyogi": {**_LOCAL, "local_batch": 1, "step": 0.002},
    "dp-fedadagrad": {**_LOCAL, "step": 0.002},
    "dp-adam": {"clip": 20.0, "step": 0.002},
    "dp-adamw": {"clip": 20.0, "step": 0.002, "floor": 0.1, "step_schedule": "cosine", "warm_up": 0.25},
    "noisy-newton": {"clip": 5.0, "curvature_clip": 5.0, "penalty": 0.5},
}  # fmt: skip
"""Steps that are small enough for the loss to fall in a few rounds without noise."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "one epoch": {"rounds": 12},
    "several epochs": {"rounds": 12, "epochs": 3},
    "all records": {"rounds": 12, "epochs": 12},
    **{
        name: {"rounds": 12, "epochs": 3, "sampling": name}
        for name, kind in SELECTABLE_PARTICIPATIONS.items()
        if name != FixedOrder.name and not kind.client_initiated
    },
    **{f"clients, {name}": {"rounds": 12, "sampling": name} for name in SELECTABLE_PARTICIPATIONS},
}

_ALWAYS = {"dp-mu2-fl", "accelerated-dp-srgd", "unaccelerated-dp-srgd", "accelerated-independent", "momentum-tree",
           "online-to-batch", "dp-sgd", "local-dp-sgd", "dp-ftrl", "noisy-minibatch", "fedavg"}  # fmt: skip
_COHORTS = {"dp-fedavg", "dp-fedadam", "dp-fedyogi", "dp-fedadagrad"}
"""Rows whose units train: clients in silos, too, with other rows' records."""
_ADAMS = {"dp-adam", "dp-adamw"}
_NEWTON = {"noisy-newton"}
"""Of two classes and one score."""
_ALWAYS |= _COHORTS | _ADAMS | _NEWTON
_FIXED = _ALWAYS | {"momentum-tree-reduced", "momentum-tree-aligned"}
RUNS = {
    "one epoch": _FIXED | {"goldstein-single-pass", "phased-sgd"},
    "several epochs": _FIXED,
    "all records": _FIXED | {"goldstein-erm"},
    "poisson": _ALWAYS,
    "allocation": _ALWAYS,
    "balanced": _ALWAYS,
    "clients, fixed": _FIXED - {"fedavg", "local-dp-sgd"},
    "clients, poisson": _ALWAYS - {"fedavg", "local-dp-sgd"},
    "clients, allocation": _ALWAYS - {"fedavg", "local-dp-sgd"},
    "clients, balanced": _ALWAYS - {"fedavg", "local-dp-sgd"},
    "clients, available": _ALWAYS - {"fedavg", "local-dp-sgd"},
}
"""Which rows run without noise under which schedule; all others are refused.  Without a line, either is fine."""
AMPLIFIED = {"accelerated-independent", "dp-sgd", "local-dp-sgd", "noisy-minibatch"} | _COHORTS | _ADAMS | _NEWTON
"""Fresh noise on every round's own gradients: what secrecy amplifies where noise is not correlated in bands."""


@pytest.fixture(scope="module", autouse=True)
def a_small_problem(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Three classes of 20 numbers, 1,200 records, as `problem.npz` in the working directory."""
    draw = np.random.default_rng(10)
    labels = draw.integers(0, 3, 1500)
    images = draw.standard_normal((3, 20))[labels] + draw.standard_normal((1500, 20))
    folder, before = tmp_path_factory.mktemp("problem"), Path.cwd()
    parts = {
        "train_images": images[:1200], "train_labels": labels[:1200], "test_images": images[1200:],
        "test_labels": labels[1200:],
    }  # fmt: skip
    np.savez(folder / "problem.npz", **parts, classes=np.array(3))
    for part in ("train_labels", "test_labels"):
        parts[part] = parts[part].clip(max=1)
    np.savez(folder / "two.npz", **parts, classes=np.array(2))
    os.chdir(folder)
    yield
    os.chdir(before)


def tree_of(name: str, schedule: str, trust: str, private: bool, seed: int = 1) -> dict[str, Any]:
    """A scenario: 3 silos with batches of 8 records or 100, or 144 clients in cohorts of 24, 12 rounds, float64.

    The noise does not hide the signal.
    """
    tree = small_tree(seed=seed, run__evaluations=3)
    tree["data"], tree["model"] = {"name": "problem.npz"}, {"name": "softmax-regression", "feature_norm": 5.0}
    if name in _NEWTON:
        tree["data"], tree["model"] = {"name": "two.npz"}, {"name": "logistic-regression", "feature_norm": 5.0}
    whom = {"clients": 144, "cohort": 24} if pooled(schedule) else {"silos": 3}
    tree["federation"] = {**whom, **SCHEDULES[schedule]}
    if not pooled(schedule):
        tree["federation"]["batch"] = 100 if schedule == "all records" else 8
    elif schedule == "clients, available":
        tree["federation"] |= {"min_separation": 3, "max_participations": 2}
    tree["algorithm"] = {"name": name, "trust": trust, **SETTINGS[name]}
    tree["privacy"] = {"relation": "zero-out", **({"mu": 1000.0} if private else {"mode": "none"})}
    if private and secret(schedule):
        tree["privacy"] = {"relation": "zero-out", "epsilon": 50.0}
    if name in _COHORTS or pooled(schedule):
        tree["privacy"] |= {"unit": "client", "records": 2}
    return tree


def pooled(schedule: str) -> bool:
    """Whether clients of a pool take part."""
    return schedule.startswith("clients, ")


def secret(schedule: str) -> bool:
    """Whether the guarantee is a curve, which has no mu to ask for."""
    name = schedule.removeprefix("clients, ")
    return name in SELECTABLE_PARTICIPATIONS and SELECTABLE_PARTICIPATIONS[name].secret


@functools.cache
def usable(name: str, schedule: str, trust: str, private: bool) -> Cell | None:
    """The cell, or None where it is refused; a refusal is one line."""
    try:
        cell = resolve_cell(tree_of(name, schedule, trust, private), "test")
        plan_cell(cell)
        return cell
    except InputError as error:
        lines = str(error).splitlines()
    assert len(lines) == 1
    return None


GRID = list(itertools.product(ALGORITHMS, SCHEDULES, [False, True]))
"""Row, schedule, and whether there is noise."""


def test_the_test_grid_contains_every_algorithm() -> None:
    assert SETTINGS.keys() == ALGORITHMS.keys()


def test_phased_sgd_refuses_several_epochs() -> None:
    """Phased SGD left the key unread: one pass in phases, whatever `epochs` said."""
    with refusal("phased-sgd reads every record once, in phases"):
        plan_cell(resolve_cell(tree_of("phased-sgd", "several epochs", "curator", private=True), "test"))


@pytest.mark.parametrize(
    ("name", "trust", "line"),
    [
        ("phased-sgd", "curator", "these rounds are not one whole pass; .*take rounds = clients / cohort"),
        ("goldstein-single-pass", "trusted", "give as many rounds as one pass has"),
    ],
)
def test_a_row_of_one_pass_does_not_call_half_a_pass_of_clients_several(name: str, trust: str, line: str) -> None:
    tree = tree_of(name, "several epochs", trust, private=True)
    privacy = {"relation": "replace-one", "mu": 1.0, "unit": "client", "records": 6}
    with refusal(line):
        plan_cell(
            resolve_cell(
                tree | {"federation": {"clients": 100, "cohort": 10, "rounds": 5}, "privacy": privacy}, "test"
            )
        )


@pytest.mark.parametrize("private", [False, True])
def test_the_paper_step_size_is_refused_for_a_model_of_unknown_smoothness(private: bool) -> None:
    """η = 1/(4LT) is 0 for a model whose smoothness is not known: the budget would buy nothing."""
    privacy = {"relation": "replace-one", **({"rho": 4.0} if private else {"mode": "none"})}
    cell = small_cell(algorithm__clip=1.0, model={"name": "mlp", "hidden": 4}, privacy=privacy)
    with refusal(r'algorithm\.step = "paper": .*smoothness.*; give a number'):
        plan_cell(cell)


def runs(name: str, schedule: str, trust: str, private: bool) -> bool:
    """Whether this combination trains; all others are refused."""
    if private and secret(schedule):
        trains = name in AMPLIFIED
    else:
        trains = name in RUNS[schedule] and not (private and name == "fedavg")
    if trust == "secure-aggregation":
        trains = trains and private
    if pooled(schedule) or (name in _COHORTS and secret(schedule)):  # secret clients need a server that is trusted
        trains = trains and TRUSTS[trust].noise_at_server
    return trains and trust in ALGORITHMS[name].trusts


@pytest.mark.slow
def test_every_participation_and_trust_setting_has_an_admitted_private_cell() -> None:
    """Whatever the registries have is reached by the comparison below."""
    cells = [usable(*keys, private=True) for keys in itertools.product(ALGORITHMS, SCHEDULES, TRUSTS)]
    fresh = {"fresh"}  # which tests/engines/test_fresh_order.py trains on both engines
    assert {cell.schedule.name for cell in cells if cell is not None} == set(PARTICIPATIONS) - fresh
    assert {cell.algorithm.trust for cell in cells if cell is not None} == set(TRUSTS)


def trained_alike(cell: Cell) -> list[float]:
    """The losses of a cell on the vectorized engine; the other engine tells and releases the same."""
    outcome, recorder = run_on_both(cell, share=1e-6 if cell.algorithm.trust_setting.masked else 1e-9)
    assert np.linalg.norm(outcome.model) > 1e-3, f"{cell.algorithm.trust}: the model does not move"
    assert store_and_load(outcome.releases) == outcome.releases
    return [line[2] for line in recorder.evaluations]


def in_turn(name: str, schedule: str, private: bool) -> list[str]:
    """One trust setting of those that train, another one from schedule to schedule."""
    trains = [trust for trust in TRUSTS if usable(name, schedule, trust, private)]
    place = GRID.index((name, schedule, False)) // 2 + private
    return trains[place % len(trains) :][:1] if trains else []


@pytest.mark.every(3)
@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "schedule", "private"), GRID)
def test_an_algorithm_is_admitted_as_documented_and_trains_alike_on_both_engines(
    name: str, schedule: str, private: bool
) -> None:
    """Every trust setting is asked for, and one of them trains: the others follow among the slow tests."""
    if schedule in RUNS:
        for trust in TRUSTS:
            admitted = usable(name, schedule, trust, private) is not None
            assert admitted == runs(name, schedule, trust, private), trust
    for trust in in_turn(name, schedule, private):
        check_trains_alike(name, schedule, trust, private)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "schedule", "private"), GRID)
def test_an_algorithm_trains_alike_on_both_engines_in_every_trust_setting(
    name: str, schedule: str, private: bool
) -> None:
    for trust in TRUSTS:
        if usable(name, schedule, trust, private):
            check_trains_alike(name, schedule, trust, private)


def check_trains_alike(name: str, schedule: str, trust: str, private: bool) -> None:
    """On both engines; without noise the loss falls."""
    cell = usable(name, schedule, trust, private)
    assert cell is not None
    losses = trained_alike(cell)
    if not private:
        before = np.log(2.0) / 2.0 if name in _NEWTON else losses[0]  # which is there after a few rounds
        assert losses[-1] < before < 1.0001 * np.log(3.0), f"{trust}: the loss does not fall"


UNEQUAL = {"samples": 200, "size_skew": 1.0, "batch": None}
GROUPS = {"groups": 4, **UNEQUAL}
BESIDE: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("dp-sgd", "several epochs", {"momentum": 0.5, "radius": 2.0, "output": "average"}, UNEQUAL),
    ("dp-sgd", "poisson", {"momentum": 0.5}, UNEQUAL),
    ("dp-sgd", "several epochs", {"step_schedule": "drops", "step_drops": [0.5], "fading_average": 0.5}, UNEQUAL),
    ("dp-adamw", "poisson", {"fading_average": 0.8, "bias": "kept", "weight_decay": 0.1}, UNEQUAL),
    ("dp-ftrl", "several epochs", {"momentum": 0.5, "radius": 10.0}, UNEQUAL),
    ("dp-ftrl", "allocation", {"mechanism": "banded", "bands": 2}, GROUPS),
    ("dp-ftrl", "poisson", {"mechanism": "banded", "bands": 2}, GROUPS),
    ("accelerated-dp-srgd", "allocation", {"mechanism": "banded", "bands": 3}, GROUPS),
    ("accelerated-dp-srgd", "poisson", {"mechanism": "banded", "bands": 3}, GROUPS),
    ("online-to-batch", "several epochs", {"power": 2}, UNEQUAL),
    ("online-to-batch", "allocation", {"mechanism": "banded", "bands": 4}, GROUPS),
    ("momentum-tree-aligned", "several epochs", {"difference_clip": 0.5, "residual_clip": 0.2}, UNEQUAL),
    ("momentum-tree-reduced", "several epochs", {"alpha": 0.2, "step": 0.005}, UNEQUAL),
    ("goldstein-single-pass", "one epoch", {"noise": "anchored", "anchor_batches": 3}, {}),
    ("goldstein-single-pass", "one epoch", {"oracle": "zeroth-order", "anchor_batches": 3}, {}),
    ("goldstein-erm", "all records", {"oracle": "zeroth-order"}, {}),
    ("dp-fedavg", "clients, poisson", {"momentum": 0.9, "step": 0.5, "local_batch": 1}, {}),
    ("dp-fedavg", "clients, available", {"clip_quantile": 0.4, "clip_rate": 0.5}, {}),
    ("dp-fedadam", "clients, poisson", {"warm_up": 0.5, "step_schedule": "cosine", "fading_average": 0.9}, {}),
]  # fmt: skip
"""Settings beyond the grid's: the row, its schedule, keys of its algorithm and of its federation."""


@pytest.mark.every(20)
@pytest.mark.parametrize(("name", "schedule", "algorithm", "federation"), BESIDE)
def test_further_algorithm_settings_train_alike_on_both_engines_and_meet_their_target(
    name: str, schedule: str, algorithm: dict[str, Any], federation: dict[str, Any]
) -> None:
    trusts = ALGORITHMS[name].trusts
    for trust in (name for name in trusts if TRUSTS[name].noise_at_server or not pooled(schedule)):
        tree = tree_of(name, schedule, trust, private=True)
        tree["algorithm"] |= algorithm
        tree["privacy"]["relation"] = "zero-out" if pooled(schedule) else "replace-one"
        tree["federation"] = {key: v for key, v in (tree["federation"] | federation).items() if v is not None}
        cell = resolve_cell(tree, "test")
        trained_alike(cell)
        claim = claim_of(streams_of(cell))
        if secret(schedule):
            assert 49.5 < claim.guarantee.epsilon_of(1e-5) <= 50.0
        else:
            assert claim.guarantee.mu == pytest.approx(1000.0, rel=1e-9)


REPLICATES = [(schedule, name) for schedule in SCHEDULES for name in sorted(RUNS.get(schedule, _ALWAYS))]


@pytest.mark.every(54)
@pytest.mark.sample(3)
@pytest.mark.parametrize(("schedule", "name"), in_parts(REPLICATES, REPLICATES[::4]))
def test_replicates_with_different_settings_run_together_equal_the_runs_alone(schedule: str, name: str) -> None:
    """Other seeds draw other records, and other numbers of them; steps, clips and noise differ, too."""
    trust = next(trust for trust in ("trusted", "untrusted", "curator") if trust in ALGORITHMS[name].trusts)
    cells = []
    for seed in (1, 2, 3):
        tree = tree_of(name, schedule, trust, runs(name, schedule, trust, private=True), seed)
        for section, keys in (("algorithm", ("step", "local_step", "clip")), ("privacy", ("mu", "epsilon"))):
            tree[section] |= {key: seed**0.5 * tree[section][key] for key in keys if key in tree[section]}
        cells.append(resolve_cell(tree, "test"))
    run_together(cells)
