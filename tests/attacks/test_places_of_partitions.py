"""One row of a file, or one person, is edited, and the file is spread over silos: nobody else moves.

Silos of their own files are in `test_places`; here one file is spread by what [data] says.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, reject, settings
from torch import Tensor

from fedpriv.claims.ledger import make_release_streams
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError
from fedpriv.loss.objective import Records
from fedpriv.plan.evaluation import held_out_records_by_silo, partition_test_records
from fedpriv.plan.task import load_task, row_labels
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.silo import Silo
from tests.attacks.test_places import CASES, PARTS, READ, Rows, edits, made, scenario
from tests.data.tables import write_csv

HELD: dict[str, dict[str, Any]] = {
    "iid": {},
    "site": {"partition": "site"},
    "dirichlet": {"partition": "dirichlet", "concentration": 1.0},
    "shards": {"partition": "shards", "shards": 2},
}
SITES = {"site": "hospital", "sites": ["north", "south"]}
AT_LABELS = ("dirichlet", "shards")
ROOT = Path(__file__).resolve().parents[2]


class Spread(NamedTuple):
    """What the silos of one file hold and send."""

    held: list[list[int]]
    """The units of each silo, in the order it reads them, and its test records."""
    labels: Tensor
    """Of every unit of the file, as partitions look at them."""
    units: list[Records]
    """As each silo trains on them, and as it evaluates on them."""
    rounds: list[list[list[int]]]
    """The places that each silo reads in every round."""
    sums: list[Tensor]
    """What each silo sends in every round; the keys are the scenario's."""
    said: tuple[object, ...]


def spread_of(
    path: Path, rows: Rows, schema: dict[str, Any], unit: dict[str, Any], asked: dict[str, Any], partition: str
) -> Spread:
    tree = json.loads(scenario({**schema, **SITES}, trust="trusted", federation=asked, privacy=unit))
    tree["data"] = {**tree["data"], "name": str(write_csv(path, rows)), **HELD[partition]}
    tree["run"]["arithmetic"] = "integers"
    if partition not in AT_LABELS and not unit:
        tree["evaluation"] = {"records": 3, "mu": 1.0}
    cell = resolve_cell(tree, "test")
    federation = SimulatedFederation.from_cell(cell)
    plan, silos = federation.plan, [federation.silo(number) for number in range(2)]
    times, query = range(1, plan.schedule.rounds + 1), torch.zeros_like(plan.objective.initial())
    sums, read = [], []
    for silo in silos:
        state, sent = silo.initial_state(), []
        for t in times:
            release, state = silo.answer(state, t, query)
            sent.append(release.vector)
        sums.append(torch.stack(sent))
        read.append([places_read(silo, t) for t in times])
    tests = cell.evaluation is not None
    return Spread(
        [each.tolist() for each in (*federation.silo_rows, *(partition_test_records(cell) if tests else ()))],
        torch.from_numpy(row_labels(load_task(cell))),
        [*(silo.records for silo in silos), *(held_out_records_by_silo(cell) if tests else ())],
        read,
        sums,
        make_release_streams(plan, plan.schedule.rounds),
    )


def places_read(silo: Silo, t: int) -> list[int]:
    rows = silo.plan.schedule.select_rows(t, 2, silo.number, lambda: silo._sampling_randomness)
    return torch.arange(len(silo.records.labels))[rows].tolist()


def case(name: str, part: str, persons: int = 0) -> tuple[Rows, Rows, str, str, bool, str]:
    rows, other = made(40, persons), made(40, persons)
    CASES[name][0](other)
    return rows, other, part, "drop", persons > 0, "once"


@pytest.mark.slow
@pytest.mark.parametrize("partition", HELD)
@example(drawn=case("split", "column"))
@example(drawn=case("drop", "place"))
@example(drawn=case("persons", "person", 20))
@settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=edits())
def test_an_edit_of_one_row_or_person_changes_one_unit_of_one_silo(
    partition: str, drawn: tuple[Rows, Rows, str, str, bool, str]
) -> None:
    """Guarantee of `placing`: over partition x split x missing x unit x participation.

    With the three cases of `test_places` and random neighbours, of which the same 12 are drawn always.  Partitions
    that look at labels keep to it for edits that leave all labels as they are.
    """
    rows, other, part, missing, persons, read = drawn
    for table in (rows, other):
        for number, row in enumerate(table):  # a record, and a person, stays at its site
            row["hospital"] = SITES["sites"][(int(row["who"][1:]) if persons else number) % 2]
    schema = {**PARTS[part], "missing": missing, **({"person": "who"} if persons else {})}
    unit = {"unit": "user", "records": 2} if persons else {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        try:
            one, two = (
                spread_of(Path(name) / f"{world}.csv", table, schema, unit, READ[read], partition)
                for world, table in enumerate((rows, other))
            )
        except InputError as error:
            if "records; look at `split` and `test_share`" not in str(error):
                raise
            reject()
    if partition in AT_LABELS and not torch.equal(one.labels, two.labels):
        reject()
    assert one.said == two.said
    assert one.held == two.held
    assert one.rounds == two.rounds
    for part_of_file in (one.held[:2], one.held[2:]):
        held = [each for of_silo in part_of_file for each in of_silo]
        assert len(held) == len(set(held))
    changed = [differing(*each) for each in zip(one.units, two.units, strict=True)]
    assert sum(map(len, changed[:2])) <= 1
    assert sum(map(len, changed[2:])) <= 1
    for places, rounds, before, after in zip(changed[:2], one.rounds, one.sums, two.sums, strict=True):
        for of_round, moved in zip(rounds, (before != after).any(1).tolist(), strict=True):
            assert not moved or set(of_round) & places


def differing(one: Records, two: Records) -> set[int]:
    """The places at which the features or labels of two silos differ."""
    alike = torch.ones(len(one.labels), dtype=torch.bool)
    for before, after in zip(one, two, strict=True):
        alike &= (before == after).reshape(len(alike), -1).all(1)
    return set((~alike).nonzero().ravel().tolist())


@pytest.mark.parametrize("partition", HELD)
def test_a_label_changes_the_partition_of_other_records_only_where_documented(
    tmp_path: Path, partition: str
) -> None:
    """`tune --private` refuses these partitions as well, and guards have none (tests/study/test_refused.py)."""
    tables = made(40), made(40)
    tables[1][0]["outcome"] = "well" if tables[1][0]["outcome"] == "ill" else "ill"
    for table in tables:
        for number, row in enumerate(table):
            row["hospital"] = SITES["sites"][number % 2]
    one, two = (
        spread_of(tmp_path / f"{world}.csv", table, PARTS["place"], {}, READ["once"], partition)
        for world, table in enumerate(tables)
    )
    said = " ".join((ROOT / "docs" / "privacy.md").read_text().split())
    named = said.partition("The partitions ")[2].partition(" look at labels: their claims take for granted")[0]
    assert (one.held != two.held) == (f"`{partition}`" in named)
