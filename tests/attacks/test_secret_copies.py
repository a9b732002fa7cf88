"""Copies of pictures while it is secret who takes part: the others' sum tells nobody that a record was drawn.

Gains, if a test here fails: coins of copies that are keyed by a record's position among those drawn move the
copies of every record behind it.  At 0.3.0 the others' sum moved by a clip in each round that drew the victim,
and a claimed ε of 2 was 10.4 (`epsilon_of_law`).
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld

import fedpriv
from fedpriv.addons.certificate.certify import recompute_record
from fedpriv.claims.entries import LedgerEntry, check_copies, read_ledger
from fedpriv.core.errors import InputError
from fedpriv.loss.objective import Records, View
from fedpriv.participation.orders import OWN_FACTS, Dependence, as_row_indices
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.rounds.round import RoundBatch
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.silo import Silo
from fedpriv.study.results import read_claims
from tests.conftest import small_tree
from tests.parts import in_parts

ROUNDS, RATE, DELTA, CLAIMED = 20, 20, 1e-5, 2.0
VICTIM = 0
SAMPLINGS = ("poisson", "allocation", "balanced")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dp-sgd": {"name": "dp-sgd", "step": 0.1},
    "dp-adam": {"name": "dp-adam", "step": 0.1},
    "dp-ftrl": {"name": "dp-ftrl", "step": 0.1, "mechanism": "banded", "bands": 2},
}


def copies_tree(federation: dict[str, Any], algorithm: str = "dp-sgd", **sections: Any) -> dict[str, Any]:
    return small_tree(
        data={"name": "synthetic"},
        model={"name": "mlp", "hidden": 4, "augment": {"copies": 2, "shift": 10}},
        federation=federation,
        algorithm={**ALGORITHMS[algorithm], "trust": "untrusted", "clip": 1.0},
        privacy={"relation": "zero-out", "epsilon": CLAIMED, "delta": DELTA},
        **sections,
    )


def cell_of(sampling: str, algorithm: str = "dp-sgd", arithmetic: str = "integers", **sections: Any) -> Cell:
    groups = {"groups": 2} if algorithm == "dp-ftrl" else {}
    federation = {"silos": 1, "rounds": ROUNDS, "batch": 1, "sampling": sampling, **groups}
    tree = copies_tree(federation, algorithm, run={"dtype": "float32", "arithmetic": arithmetic})
    return resolve_cell(tree | sections, "test")


def silo_of(cell: Cell) -> Silo:
    """A silo with as many pictures as an epoch reads, each drawn at random."""
    task = load_task(cell)
    plan = make_plan(cell, task.objective, for_release=True)
    return Silo.for_release(
        0, plan, Records(task.train.features[:RATE], task.train.labels[:RATE]), bytes(31) + b"8", b""
    )


def others_apart(silo: Silo) -> list[float]:
    """Distances of the others' sums, in clips, with and without the victim among those drawn.

    The victim itself counts for nothing: its weight is 0 where it is read.
    """
    plan, distances = silo.plan, list[float]()
    query = plan.objective.initial() * 3.0
    held, there = silo._records_and_mask
    for t in range(1, ROUNDS + 1):
        batch = plan.batch_sizes[0]
        rows = as_row_indices(plan.schedule.select_rows(t, batch, 0, lambda: silo._sampling_randomness))
        sums = []
        for chosen in (np.union1d(rows, [VICTIM]), rows[rows != VICTIM]):
            weights = there[chosen] * (torch.from_numpy(chosen) != VICTIM)
            records = Records(held.features[chosen], held.labels[chosen])
            read = RoundBatch(records, weights, ((0, len(chosen)),), chosen)
            total = silo.steps.sum_increments(silo.initial_state(), plan.rounds[t - 1], query, read)
            sums.append(total.values.double())
        (norm,) = plan.required_exact_plan.norms(t)
        distances.append(float((sums[0] - sums[1]).norm()) / norm)
    return distances


def epsilon_of_law(others: float) -> float:
    """ε of ROUNDS rounds in which a drawn record adds one clip, and moves the others' sum by `others` more."""
    plan = silo_of(cell_of("poisson")).plan
    (norm,) = plan.required_exact_plan.norms(1)
    law = pld.from_gaussian_mechanism(
        plan.required_exact_plan.claim.sigma / norm, sensitivity=1.0 + others, sampling_prob=1.0 / RATE
    )
    return float(law.self_compose(ROUNDS).get_epsilon_for_delta(DELTA))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("sampling", "algorithm"),
    in_parts(
        [(sampling, algorithm) for sampling in SAMPLINGS for algorithm in ALGORITHMS],
        [("poisson", "dp-sgd"), ("allocation", "dp-adam"), ("balanced", "dp-ftrl")],
    ),
)
def test_guarantee_drawing_a_record_does_not_change_the_augmented_sum_of_the_others(
    sampling: str, algorithm: str
) -> None:
    assert others_apart(silo_of(cell_of(sampling, algorithm))) == [0.0] * ROUNDS


@pytest.mark.slow
def test_the_claimed_epsilon_holds_only_if_drawing_a_record_leaves_the_others_unchanged() -> None:
    """Poisson sampling, one coordinate: the claimed ε where the others stay, and what 0.3.0 really gave."""
    assert 0.97 * CLAIMED < epsilon_of_law(0.0) <= CLAIMED * (1 + 1e-3)
    assert epsilon_of_law(1.0) > 10.0


class Silent(View):
    """A part that does not say what an increment depends on."""


class Positioned(View):
    """A part that keys something by a record's position among those read, and says so."""

    dependence = OWN_FACTS | Dependence.POSITION


@pytest.mark.parametrize("arithmetic", ["integers", "float"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("part", "reason"), [(Silent, "does not declare"), (Positioned, "its position among")])
def test_guarantee_objectives_that_may_depend_on_batch_position_are_refused_with_secret_schedules(
    sampling: str, part: type[View], reason: str, arithmetic: str
) -> None:
    """In a guard and in a simulation, in one line that names both parts."""
    cell = cell_of(sampling, arithmetic=arithmetic)
    line = f'federation.sampling = "{sampling}" .* {part.__name__}.*{reason}'
    with pytest.raises(InputError, match=line) as refusal:
        make_plan(cell, part(load_task(cell).objective), for_release=arithmetic == "integers")
    assert "\n" not in str(refusal.value)


def test_an_objective_that_depends_on_batch_position_is_admitted_with_a_fixed_order() -> None:
    cell = cell_of("fixed")
    assert make_plan(cell, Positioned(load_task(cell).objective), for_release=True)
    with pytest.raises(InputError, match="Silent"):
        make_plan(cell, Silent(load_task(cell).objective), for_release=True)


@pytest.fixture(scope="module")
def of_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as fedpriv 0.3.0 left it: two rounds of copies in a secret order."""
    folder = tmp_path_factory.mktemp("before") / "run"
    fedpriv.run(tree_of_run(), out=folder)
    path = folder / "results.json"
    tree = json.loads(path.read_text())
    tree["versions"]["fedpriv"] = "0.3.0"
    path.write_text(json.dumps(tree))
    return folder


def tree_of_run(seeds: int = 1, sampling: str = "poisson") -> dict[str, Any]:
    federation = {"silos": 1, "rounds": 2, "batch": 1, "sampling": sampling}
    return copies_tree(federation, sweep={"seeds": seeds})


def as_0_3_1(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fedpriv.claims.entries.metadata", SimpleNamespace(version=lambda name: "0.3.1"))


def body_of_before(folder: Path) -> LedgerEntry:
    tree = json.loads((folder / "results.json").read_text())
    return recompute_record(
        {"record": tree["cells"][0], "run": {**tree["scenario"], "versions": tree["versions"]}}
    )


READERS: dict[str, Callable[[Path], object]] = {
    "show": read_claims,
    "privacy ledger": read_ledger,
    "resume": lambda folder: fedpriv.run(tree_of_run(2), out=folder, resume=True),
    "certify --verify": body_of_before,
}


@pytest.mark.parametrize("reader", READERS)
def test_guarantee_a_false_claim_of_fedpriv_0_3_0_is_neither_shown_resumed_nor_certified(
    of_before: Path, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: the ε of 0.3.0 in a report of today; cells of both versions in one folder, which names the newer."""
    as_0_3_1(monkeypatch)
    with pytest.raises(InputError, match=r"is of fedpriv 0\.3\.0, whose copies .*released more than") as caught:
        READERS[reader](of_before)
    assert "\n" not in str(caught.value)


def test_runs_of_fedpriv_0_3_0_with_valid_claims_are_still_accepted(
    of_before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_0_3_1(monkeypatch)
    (cell,) = json.loads((of_before / "results.json").read_text())["cells"]
    check_copies("", {"fedpriv": "0.3.1"}, [cell])
    for section, key, value in (("federation", "sampling", "fixed"), ("model", "augment", None)):
        scenario = {**cell["scenario"], section: {**cell["scenario"][section], key: value}}
        check_copies("", {"fedpriv": "0.3.0"}, [{**cell, "scenario": scenario}])
