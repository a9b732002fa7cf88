"""Statistics through a real guard: what is allowed, charged and refused, and how far one row moves them."""

import json
import logging
import math
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.addons.statistics.indicators import MAX_CELLS, Cells
from fedpriv.addons.statistics.plan import StatisticsGuard, read_plan
from fedpriv.addons.statistics.tables import Statistics
from fedpriv.claims.ledger import make_release_streams
from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import InputError, RunError
from fedpriv.plan.plan import ROUNDING_ALLOWANCE, make_plan
from fedpriv.plan.task import make_schema_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.daemon import PendingRequest, Reply, RequestQueue
from fedpriv.silo.fingerprint import create_ledger
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import Guards
from fedpriv.silo.policy import read_policy
from fedpriv.silo.shard import Shard, load_or_create_key
from fedpriv.silo.silo import Silo
from tests.data.tables import SCHEMA, rows, write_csv
from tests.noise.integers.hostile_floats import truncated
from tests.silo.charged import charged
from tests.silo.guarded import guard_of, refused, write_silo, write_table_policy

FILLED = {
    **SCHEMA,
    "columns": {
        "sex": {"values": ["f", "m"], "missing": "f"},
        "age": {"range": [0.0, 100.0], "missing": 50.0},
        "pain": {"values": ["none", "some", "*"], "missing": "*"},
    },
}
ALLOW = {
    "relation": "replace-one", "clip": 1.0, "rounds": 1, "budget": 1.0, "statistics": ["age", "sex", "outcome"],
}  # fmt: skip
TABLES: list[dict[str, Any]] = [
    {"of": ["age"], "edges": {"age": [0, 30, 60, 100]}},
    {"of": ["sex", "outcome"]},
    {"name": "quantiles", "of": ["age"], "kind": "quantiles", "edges": {"age": [0, 30, 60, 100]}},
]


def own_rows() -> list[dict[str, str]]:
    return [record for record in rows() if record["hospital"] == "north"]


def guard_at(folder: Path, records: list[dict[str, str]] | None = None, **allow: Any) -> Guard:
    folder.mkdir(exist_ok=True)
    shard = write_csv(folder / "own.csv", own_rows() if records is None else records)
    return guard_of(write_table_policy(folder, shard, {**ALLOW, **allow}, FILLED))


def plan_tree(
    path: Path, schema: dict[str, Any], trust: str = "untrusted", tables: Any = TABLES, **privacy: Any
) -> Any:
    return {
        "name": "table-one",
        "trust": trust,
        "records": [36, 24],
        "data": {"name": str(path / "table.csv"), "table": schema},
        "privacy": {"relation": "replace-one", "mu": 0.5, **privacy},
        "table": tables,
    }


def plan(path: Path, trust: str = "untrusted", tables: Any = TABLES, **privacy: Any) -> Statistics:
    return Statistics.from_plan(read_plan(plan_tree(path, FILLED, trust, tables, **privacy)))


def scenario(asked: Statistics, **changes: Any) -> str:
    """The scenario that guards get; `changes` of its sections."""
    tree = asked.cell.canonical_data()
    for section, given in changes.items():
        tree[section] = {**tree[section], **given}
    return json.dumps(tree, sort_keys=True)


def query_of(text: str) -> torch.Tensor:
    cell = resolve_cell(json.loads(text), "test")
    assert cell.data.table_schema is not None
    return make_schema_task(cell, cell.data.table_schema).objective.initial()


def ask(guard: Guard, text: str, run: str = "run") -> torch.Tensor:
    return guard.answer(run, text, 1, query_of(text))


@pytest.mark.parametrize("missing", [(), ("split",), ("person",), ("split", "person")])
def test_statistics_of_a_table_with_neither_a_split_nor_a_person_column_are_refused(
    tmp_path: Path, missing: tuple[str, ...]
) -> None:
    table = {key: value for key, value in {**FILLED, "person": "patient"}.items() if key not in missing}
    cell = Statistics.from_plan(read_plan(plan_tree(tmp_path, table))).cell
    if missing == ("split", "person"):
        with pytest.raises(InputError, match="give a column `split` or `person`, or test_share = 0"):
            StatisticsGuard.allowance(cell)
    else:
        assert StatisticsGuard.allowance(cell) == {"statistics": ["age", "sex", "outcome"]}


def test_repeated_statistics_get_the_stored_reply_and_are_charged_once(tmp_path: Path) -> None:
    """Guarantee: the same statistics asked again get the bytes that are on file, and are charged once."""
    guard, text = guard_at(tmp_path), scenario(plan(tmp_path))
    first = ask(guard, text, "one")
    assert torch.equal(ask(guard, text, "another"), first)
    assert torch.equal(ask(guard_at(tmp_path), text, "after a restart"), first)
    assert charged(guard) == [pytest.approx(0.5, rel=1e-9)]
    ask(guard, scenario(plan(tmp_path, tables=TABLES[:1])), "one")
    assert len(charged(guard)) == 2


@pytest.mark.parametrize(("column", "value"), [("age", "130"), ("pain", "")])
def test_guarantee_a_ledger_refuses_a_table_whose_cells_differ_where_its_features_do_not(
    tmp_path: Path, column: str, value: str
) -> None:
    """Gains: one table's charges stand for another's, and after a restore of both files two messages one mask.

    A filled value and an age beyond the range have the features of another cell, and counts tell them apart.
    """
    records, path = own_rows(), tmp_path / "policy.toml"
    first = next(record for record in records if record["part"] == "train")
    first |= {"age": "100", "pain": "much"}
    guard_at(tmp_path, records)
    before = read_policy(path).load_shard()
    first[column] = value
    with pytest.raises(InputError, match="these are not the records, in the order, that"):
        guard_at(tmp_path, records)
    after = read_policy(path).load_shard()
    assert before.content_digest == after.content_digest
    assert before.cells is not None
    assert after.cells is not None
    assert np.not_equal(before.cells, after.cells).sum() == 1


def test_a_ledger_of_a_table_whose_fingerprint_has_no_cells_goes_on(tmp_path: Path) -> None:
    """Ledgers of fedpriv 0.3.1 know features, labels and persons."""
    (tmp_path / "silo").mkdir()
    shard = write_csv(tmp_path / "silo" / "own.csv", own_rows())
    policy = read_policy(write_table_policy(tmp_path / "silo", shard, ALLOW, FILLED))
    key, records = load_or_create_key(policy.shard_key), policy.load_shard()
    create_ledger(policy.ledger, policy.mark_path, Shard(records.images, records.labels).fingerprint(key))
    guard, text = guard_of(policy_path := tmp_path / "silo" / "policy.toml"), scenario(plan(tmp_path))
    first = ask(guard, text)
    assert torch.equal(ask(guard_of(policy_path), text), first)


def test_records_without_a_table_have_no_cells(tmp_path: Path) -> None:
    shard, cell = read_policy(write_silo(tmp_path)).load_shard(), plan(tmp_path).cell
    with pytest.raises(InputError, match=r"model\.name = 'statistics': is of a table, and these records are none"):
        shard.model_inputs(cell)


def test_repeated_statistics_of_a_trusted_server_are_charged_every_time(tmp_path: Path) -> None:
    """Guarantee: sums that leave without noise get another one every time, and are charged as often."""
    guard, text = guard_at(tmp_path, trust="trusted"), scenario(plan(tmp_path, "trusted"))
    ask(guard, text, "one")
    ask(guard, text, "another")
    assert len(charged(guard)) == 2


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_guarantee_another_scenario_cannot_occupy_the_run_name_of_statistics(tmp_path: Path, trust: str) -> None:
    """Gains: a plan that is refused for good, at whatever price the one has who may ask first (S4)."""
    guard, text = guard_at(tmp_path, trust="trusted"), scenario(plan(tmp_path))
    digest = guard._admission.admit(guard._admission.canonicalize(text)).scenario_digest.hex()
    squatter = scenario(plan(tmp_path, "trusted", tables=TABLES[:1], mu=0.001))
    if trust == "untrusted":
        ask(guard, scenario(plan(tmp_path, tables=TABLES[:1], mu=0.001)), f"statistics-{digest}")
    else:
        with pytest.raises(RunError, match="a run named statistics-… is of the statistics whose digest follows"):
            ask(guard, squatter, f"statistics-{digest}")
    assert torch.isfinite(ask(guard, text, "honest")).all()
    assert torch.equal(ask(guard, text, f"statistics-{digest}"), ask(guard, text, "honest"))


def test_a_trusted_silo_releases_the_exact_counts_of_a_table(tmp_path: Path) -> None:
    asked = plan(tmp_path, "trusted", tables=[{"of": ["sex", "outcome"]}])
    sums = ask(guard_at(tmp_path, trust="trusted"), scenario(asked))
    unit = asked.make_plan(for_release=True).required_exact_plan.lattice.unit
    counts = {place: float(value) * unit for place, value in enumerate(-sums.double()) if abs(value) > 0}
    records = [row for row in own_rows() if row["part"] == "train"]
    for sex, outcome in ((0, 0), (0, 1), (1, 0), (1, 1)):
        true = sum(row["sex"] == "fm"[sex] and row["outcome"] == ("well", "ill")[outcome] for row in records)
        assert counts.get(3 * sex + outcome, 0.0) == pytest.approx(true, abs=1e-6)


def tables(*axes: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A change of a scenario whose one table has these axes and settings."""
    return {"model": {"tables": [{"axes": list(axes), **settings}]}}


def words(column: int, count: int = 2) -> dict[str, Any]:
    return {"column": column, "words": count}


def edges(*values: float) -> dict[str, Any]:
    return {"column": 0, "edges": list(values)}


def copies(count: int, axis: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"tables": [{"axes": [axis]}] * count}}


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a column that is not allowed": (tables(words(1, 3)), "'pain' are asked for, and allow"),
    "the site": (tables(words(4)), "'hospital' are asked for"),
    "a column that is none": (tables(words(5)), "no such columns"),
    "edges that fall": (tables(edges(1.0, 0.0)), "numbers that increase"),
    "cells beyond all": (tables(words(0, 2**16)), "at most 65536"),
    "a curve too long": (tables(edges(*range(4200)), form="prefix"), "more than 4096 ordered"),
    "a smaller distance": ({"model": {"apart": 1.0}}, "apart"),
    "dropped rows": ({"data": {"table": {**FILLED, "missing": "drop"}}}, "to be counted as missing"),
    "records that are not there": ({"federation": {"batches": [37, 24]}}, "here are fewer"),
    "too much": ({"privacy": {"mu": 1.5}}, "costs mu = 1.5"),
    "two rounds": ({"federation": {"rounds": 2, "epochs": 2}}, "allowed are 1"),
    "no noise": ({"privacy": {"mode": "none", "mu": None}}, "release its sums without noise"),
    "an edge that is no number": (tables(edges(0.0, math.nan)), "cannot be planned"),
    "an edge beyond all numbers": (tables(edges(0.0, math.inf)), "cannot be planned"),
    "one edge": (tables(edges(1.0)), "at least 2 items"),
    "edges and words": (tables({**edges(0.0, 1.0), "words": 2}), "for numbers, or words"),
    "no words": (tables(words(1, 0)), "words = 0: expected"),
    "a column before all": (tables(words(-1)), "column = -1: expected"),
    "a column twice": (tables(words(2), words(2)), "has a column twice"),
    "five columns": (tables(*map(words, range(5))), "at most 4 items"),
    "no tables": ({"model": {"tables": []}}, "at least 1 item"),
    "too many tables": (copies(65, words(2)), "at most 64 items"),
    "a table of no weight": (tables(words(2), weight=0.0), "weight = 0.0: expected"),
    "a table of all weight": (tables(words(2), weight=math.inf), "cannot be planned"),
    "a kind that there is not": (tables(words(2), form="maximum"), "form = 'maximum': expected"),
    "moments of words": (tables(words(2), form="moments"), "is of one number"),
    "sums over words": (tables(words(2), form="prefix"), "is of numbers"),
    "survival without a time": (tables(words(2), form="survival"), "needs a time, with edges"),
    "many small tables": (copies(3, words(0, 2**15)), "98307 cells of all tables"),
    "other neighbours": ({"privacy": {"relation": "zero-out"}}, "allowed is replace-one"),
    "sums for a server": ({"algorithm": {"trust": "trusted"}}, "release its sums without noise"),
    "another target": (
        {"data": {"table": {**FILLED, "classes": ["ill", "well"]}}},
        "otherwise than this policy does",
    ),
    "a coin for each record": ({"federation": {"sampling": "poisson"}}, "allow.slack = 0 leaves none"),
    "a clip that the policy has not": ({"algorithm": {"clip": 2.0}}, "clips at 2, allowed is 1"),
}


def test_the_cell_limit_of_a_survival_table_counts_only_released_cells() -> None:
    """Its axes have three times as many cells as it releases."""
    axes = [words(0, 2**14 - 1), {**edges(0.0, 1.0), "column": 1}, words(2)]
    assert Cells.model_validate({"axes": axes, "form": "survival"}).size == MAX_CELLS


NO_QUERY = torch.zeros(3, dtype=torch.float64)


@pytest.mark.parametrize("attack", HOSTILE)
def test_invalid_statistics_plans_are_refused_before_anything_is_charged(tmp_path: Path, attack: str) -> None:
    """Guarantee: a refusal costs nothing, and says what policy and scenario say."""
    guard, (changes, reason) = guard_at(tmp_path), HOSTILE[attack]
    tree = json.loads(scenario(plan(tmp_path), **changes))
    tree["privacy"] = {key: value for key, value in tree["privacy"].items() if value is not None}
    refused(guard, reason, json.dumps(tree), query=NO_QUERY)
    assert charged(guard) == []


def test_statistics_of_records_that_are_not_a_table_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", features=np.zeros((40, 6)), labels=np.zeros(40, np.int64))
    guard = guard_of(write_table_policy(tmp_path, tmp_path / "s.npz", ALLOW, classes=2))
    refused(guard, "statistics are of the columns of a table", scenario(plan(tmp_path)), query=NO_QUERY)
    assert charged(guard) == []


EXCHANGED = {
    "another age": {"age": "99"},
    "a missing age": {"age": ""},
    "everything missing": {"age": "", "sex": ""},
    "an age beyond all": {"age": "1e308"},
    "another part": {"part": "test"},
    "all of it": {"age": "20", "sex": "m", "outcome": "ill", "pain": "some"},
}
"""What one row of the file may be exchanged for."""


@pytest.mark.parametrize("change", EXCHANGED)
def test_replacing_one_row_moves_the_sums_within_the_certificate_and_changes_no_refusal(
    tmp_path: Path, change: str
) -> None:
    """Guarantee: neighbours are answered, refused and charged alike, and their sums lie within `apart` clips."""
    own, asked = own_rows(), plan(tmp_path, "trusted")
    neighbour = [dict(row) for row in own]
    place = next(place for place, row in enumerate(own) if row["part"] == "train" and row["age"] > "40")
    neighbour[place] |= EXCHANGED[change]
    exact = asked.make_plan(for_release=True)
    sums, refusals = [], []
    for name, records in (("a", own), ("b", neighbour)):
        guard = guard_at(tmp_path / name, records, trust="trusted")
        sums.append(ask(guard, scenario(asked)))
        hostile = [scenario(asked, **changes) for changes, _ in HOSTILE.values()]
        lines = [refused(guard, ".", text, query=NO_QUERY, run="hostile") for text in hostile]
        refusals.append((lines, charged(guard)))
    moved = math.sqrt(sum((int(one) - int(two)) ** 2 for one, two in zip(*sums, strict=True)))
    (norm,) = exact.required_exact_plan.norms(1)
    assert 0 < moved <= exact.increment_diameter * norm
    assert exact.increment_diameter <= math.sqrt(2.0) * 1.2
    assert refusals[0] == refusals[1]


def test_the_increment_diameter_of_statistics_follows_from_the_tables_and_sets_the_noise(tmp_path: Path) -> None:
    """Guarantee: `apart` follows from the plan's tables; the noise is no less than it says."""
    counts = plan(tmp_path, tables=TABLES[1:2]).make_plan(for_release=True)
    assert counts.increment_diameter == pytest.approx(math.sqrt(2.0) * (1.0 + ROUNDING_ALLOWANCE), rel=1e-12)
    for stream, size in zip(make_release_streams(counts, 1), (36, 24), strict=True):
        assert stream.mu == pytest.approx(0.5, rel=1e-6)
        assert stream.mu <= 0.5
        assert stream.std * size >= math.sqrt(2.0) / 0.5
    zeroed = plan(tmp_path, tables=TABLES[1:2], relation="zero-out").make_plan(for_release=True)
    assert make_release_streams(zeroed, 1)[0].std * 36 == pytest.approx(2.0, rel=1e-6)


def test_a_word_length_whose_lattice_is_too_coarse_for_the_diameter_is_refused(tmp_path: Path) -> None:
    """Words of 40 bits have clips of 2^15 units, of which √d alone can be 1 %: 2^-20 would not be above it."""
    asked = plan(tmp_path, "secure-aggregation", TABLES[1:2], mu=1e-4)
    cell, objective = asked.cell, make_schema_task(asked.cell, asked.schema).objective
    exact = make_plan(cell, objective, for_release=True).required_exact_plan
    assert math.sqrt(objective.dimension) * 2.0**22 <= min(exact.norms(1))
    short = cell.model_copy(update={"run": cell.run.model_copy(update={"word": 40})})
    with pytest.raises(InputError, match="units are too coarse; ask for fewer cells, or take a longer word"):
        make_plan(short, objective, for_release=True)


@pytest.mark.parametrize("seed", range(4))
def test_the_rounding_allowance_of_the_diameter_covers_the_rounding_of_two_records(seed: int) -> None:
    """At the coarsest lattice that is accepted, 2^22 √d units a clip: vectors that lose nearly 1 a coordinate."""
    draw, size = np.random.default_rng(seed), 64
    norm = math.ceil(2.0**22 * math.sqrt(size))
    clip = norm + 0.999  # in units
    worst = 0.0
    for _ in range(200):
        pair = draw.normal(size=(2, size)) * draw.exponential(size=(2, 1))
        pair *= draw.uniform(0.9, 1.5) * clip / np.linalg.norm(pair, axis=1, keepdims=True)
        pair = np.floor(pair) + np.array([[1e-9], [1.0 - 1e-9]])
        pair /= np.maximum(1.0, np.linalg.norm(pair, axis=1, keepdims=True) / clip)
        apart = max(1.0, float(np.linalg.norm(pair[0] - pair[1])) / clip)
        first, second = truncated(pair, norm, 1.0).astype(float)
        worst = max(worst, float(np.linalg.norm(first - second)) / (norm * apart) - 1.0)
    assert worst <= ROUNDING_ALLOWANCE


def test_statistics_of_a_guard_and_of_the_simulation_have_the_same_bytes(tmp_path: Path) -> None:
    """Noise on, of one key: a hospital's own file behind its policy, and the whole table in one process."""
    write_csv(tmp_path / "table.csv", rows())
    asked = plan(tmp_path)
    run = asked.cell.run.model_copy(update={"arithmetic": "integers"})
    cell = asked.cell.model_copy(update={"run": run})
    simulated = SimulatedFederation.from_cell(cell).silo(0)
    guard = guard_at(tmp_path / "own")
    released = make_plan(cell, simulated.plan.objective, for_release=True)
    own = Silo.for_release(0, released, guard.shard.model_records(cell), simulated.key)
    query = released.objective.initial()
    one, other = (silo.answer(silo.initial_state(), 1, query)[0].vector for silo in (simulated, own))
    assert float(released.noise.std_of(0)) > 0.0
    assert one.numpy().tobytes() == other.numpy().tobytes()


def test_statistics_repeated_under_new_run_names_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gains: a disk that a server fills with repeated requests, and a memory of names without end."""
    guard, text = guard_at(tmp_path), scenario(plan(tmp_path))
    query = query_of(text)
    requests = RequestQueue(guard._policy, Guards(guard, None))
    with caplog.at_level(logging.INFO, "fedpriv.guard"):
        for name in ("one", "another", "a third"):
            header = {
                "run": name,
                "cell": text,
                "t": 1,
                "keys": "",
                "dtype": str(query.dtype).removeprefix("torch."),
            }
            reply: Future[Reply] = Future()
            requests._requests.put(PendingRequest(header, bytearray(query.numpy().tobytes()), reply))
            requests.answer_next_request()
            assert "refused" not in reply.result().header
    assert [getattr(record, "event", "") for record in caplog.records] == ["opened", "answered"]
    assert (requests._events._counts["rounds"], requests._events._counts["repeated"]) == (1, 2)
