"""Cells of tables and their sensitivity: golden figures, and brute force over every pair of neighbours."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedpriv.addons.statistics.indicators import (
    Axis,
    CellBlock,
    Cells,
    Indicators,
    StatisticsSettings,
    find_extent,
    prefix_root,
)
from fedpriv.loss.objective import Query, Records
from fedpriv.loss.views import PerUnit
from fedpriv.noise.integers.increments import sum_integer_increments
from fedpriv.plan.plan import ROUNDING_ALLOWANCE
from tests.loss.builders import F64, NORM, find_extent_by_force, list_increments, list_integers, sum_increments

COUNTS = {"axes": [{"column": 0, "words": 3}]}
CROSSED = {"axes": [{"column": 0, "words": 2}, {"column": 1, "edges": [0.0, 1.0]}], "weight": 2.0}
PREFIX = {"axes": [{"column": 1, "edges": [0.0, 0.5, 1.0, 2.0]}], "form": "prefix"}
GROUPED = {"axes": [{"column": 0, "words": 1}, {"column": 1, "edges": [0.0, 1.0]}], "form": "prefix"}
SURVIVAL = {"axes": [{"column": 1, "edges": [0.0, 1.0, 2.0]}, {"column": 2, "words": 2}], "form": "survival"}
TABLES: dict[str, list[dict[str, Any]]] = {
    "counts": [COUNTS],
    "prefix": [PREFIX],
    "survival": [SURVIVAL],
    "prefix of groups": [GROUPED],
    "three tables": [COUNTS, CROSSED, {**PREFIX, "weight": 0.3}],
    "two curves": [PREFIX, SURVIVAL],
}


def settings_of(*tables: dict[str, Any]) -> StatisticsSettings:
    return StatisticsSettings.model_validate({"tables": list(tables)})


def indicators(*tables: dict[str, Any]) -> Indicators:
    return Indicators(settings_of(*tables), F64)


def zeros(objective: Indicators | PerUnit) -> torch.Tensor:
    return torch.zeros(objective.dimension, dtype=F64)


@pytest.mark.parametrize("name", TABLES)
def test_the_distance_of_any_two_records_is_attained_and_never_exceeded(name: str) -> None:
    """Guarantee: `diameter` and the norm 1 hold in integers for every pair of records, or of one and none."""
    objective = indicators(*TABLES[name])
    every_code = itertools.product(*(range(table.size) for table in settings_of(*TABLES[name]).tables))
    codes = torch.tensor(list(every_code), dtype=F64)
    vectors = list_integers(objective, zeros(objective), Records(codes, torch.zeros(len(codes)).long()))
    length, distance = find_extent_by_force(vectors)
    assert length <= 1.0
    assert length == pytest.approx(1.0, abs=1e-6)
    assert distance <= objective.diameter * (1.0 + ROUNDING_ALLOWANCE)
    assert distance == pytest.approx(objective.diameter, rel=1e-6)


MOMENTS = {"axes": [{"column": 0, "edges": [0.0, 10.0]}], "form": "moments"}


def test_moments_of_any_two_numbers_lie_within_the_certificate() -> None:
    """Guarantee: numbers beyond the range, missing ones and hostile ones too; two of them attain it."""
    (table,), objective = settings_of(MOMENTS).tables, indicators(MOMENTS)
    raw = [*np.linspace(0.0, 10.0, 401).tolist(), -1e308, 1e308, math.inf, -math.inf, math.nan, 5e-324]
    codes = torch.from_numpy(np.array(table.codes(np.array(raw)[:, None])))
    records = Records(codes[:, None], torch.zeros(len(raw)).long())
    vectors = list_integers(objective, zeros(objective), records)
    length, distance = find_extent_by_force(vectors)
    assert length <= 1.0
    assert distance <= objective.diameter * (1.0 + ROUNDING_ALLOWANCE)
    assert distance == pytest.approx(objective.diameter, rel=1e-4)
    assert np.array_equal(vectors[raw.index(1e308)], vectors[400])
    assert not vectors[len(raw) - 2].any()
    floats = list_increments(objective, zeros(objective), records, 1.0).numpy()
    np.testing.assert_allclose(floats, vectors / NORM, atol=1e-9)  # a simulation adds what guards add


@pytest.mark.parametrize("name", ["counts", "prefix", "survival"])
def test_persons_with_several_rows_are_no_further_apart(name: str) -> None:
    """Guarantee: a mean of a person's rows lies between them, and truncation is within the allowance."""
    base = indicators(*TABLES[name])
    objective, (table,) = PerUnit(base, 3), settings_of(*TABLES[name]).tables
    persons = [
        (codes, rows)
        for rows in (1, 2, 3)
        for codes in itertools.combinations_with_replacement(range(table.size), rows)
    ]
    features = torch.tensor([[*codes, *([0] * (3 - rows))] for codes, rows in persons], dtype=F64)
    labels = torch.tensor([[0] * rows + [-1] * (3 - rows) for _, rows in persons])
    vectors = list_integers(objective, zeros(objective), Records(features.unsqueeze(-1), labels))
    assert find_extent_by_force(vectors)[1] <= base.diameter * (1.0 + ROUNDING_ALLOWANCE)


def test_golden_figures_of_256_ordered_cells() -> None:
    norm, apart = find_extent([CellBlock(size=256, kind="prefix")])
    row = math.sqrt(float(prefix_root(256) @ prefix_root(256)))
    assert norm == pytest.approx(1.6826, abs=5e-5)
    assert norm * row == pytest.approx(2.831, abs=5e-4)  # zero-out, μ = 1
    assert apart * row == pytest.approx(3.585, abs=5e-4)  # replace-one
    assert apart / norm == pytest.approx(1.2663, abs=5e-5)
    for size, ratio in ((16, 1.193), (2048, 1.296)):
        norm, apart = find_extent([CellBlock(size=size, kind="suffix")])
        assert apart / norm == pytest.approx(ratio, abs=5e-4)


def test_counts_are_the_root_of_two_apart_and_not_two() -> None:
    assert find_extent([CellBlock(size=9, kind="plain")]) == pytest.approx((1.0, math.sqrt(2.0)))


def test_the_square_root_times_itself_adds_up() -> None:
    values = prefix_root(40)
    assert np.convolve(values, values)[:40] == pytest.approx(np.ones(40))


def test_every_cell_of_a_hostile_row_has_a_code_of_its_own_kind() -> None:
    """Guarantee: below, above and missing are cells; no number of a row is in two cells, or in none."""
    axis = Axis.model_validate({"column": 0, "edges": [0.0, 1.0, 2.0]})
    tiny = float(np.nextafter(0.0, -1.0))
    raw = np.array(
        [-1e308, tiny, -0.0, 0.0, 5e-324, 1.0, 2.0, np.nextafter(2.0, 3.0), 1e308, np.inf, -np.inf, np.nan]
    )
    assert axis.codes(raw).tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 0, 4]
    words = Axis.model_validate({"column": 0, "words": 2})
    assert words.codes(np.array([0.0, 1.0, 2.0, -1.0, 0.5, 1e308, np.inf, np.nan])).tolist() == [0, 1, *[2] * 6]


def test_a_unit_that_was_seen_beyond_the_last_edge_is_at_risk_to_the_end() -> None:
    (table,) = settings_of(SURVIVAL).tables
    raw = np.array(
        [[0, 0.5, 1], [0, 1.5, 0], [0, 9.0, 1], [0, 9.0, 0], [0, np.nan, 1], [0, 0.5, np.nan], [0, -1, 1]]
    )
    assert table.codes(raw).tolist() == [0, 3, 4, 4, 5, 5, 5]


def counted(*words: int, weight: float = 1.0, **keys: Any) -> dict[str, Any]:
    axes = [{"column": column, "words": count} for column, count in enumerate(words)]
    return {"axes": axes, "weight": weight, **keys}


def cut_at(*edges: float) -> dict[str, Any]:
    return {"axes": [{"column": 0, "edges": list(edges)}]}


@pytest.mark.parametrize(
    "tables",
    [
        *([cut_at(*edges)] for edges in ((0.0, 0.0, 1.0), (0.0, math.inf), (math.nan, 1.0), (1.0, 0.0))),
        [counted(2**16)], [counted(2**15), counted(2**15)], [{**cut_at(*range(4097)), "form": "prefix"}],
        [{"axes": [{"column": 0, "words": 2}, {"column": 0, "words": 2}]}], [counted(2, form="prefix")],
        [{"axes": [{"column": 0, "edges": [0, 1]}, {"column": 1, "words": 3}], "form": "survival"}],
        [counted(2, weight=0.0)], [{"axes": [{"column": -1, "words": 2}]}], [counted(10**15)],
        [{"axes": [*counted(60000, 60000)["axes"], {"column": 2, "edges": [0, 1]}], "form": "prefix"}], [],
    ],
)  # fmt: skip
def test_tables_that_are_none_are_refused(tables: list[dict[str, Any]]) -> None:
    with pytest.raises(ValidationError):
        settings_of(*tables)


@pytest.mark.parametrize("name", TABLES)
def test_the_sum_of_many_is_the_sum_of_their_integers_bit_for_bit(name: str) -> None:
    """Guarantee: a record adds its own vector, whoever else is counted, and nothing where it is not there."""
    settings = settings_of(*TABLES[name], MOMENTS)
    objective, draw = Indicators(settings, F64), np.random.default_rng(4)
    codes = np.stack([draw.integers(-1, t.size + 1, 40).astype(float) for t in settings.tables], axis=1)
    codes[:, -1] = draw.uniform(-1.2, 1.2, 40)
    there = draw.random(40) < 0.7
    alone = [objective.sum_integer_vectors(code[None], np.ones(1, np.bool_), NORM, 1.5 * NORM) for code in codes]
    total = objective.sum_integer_vectors(codes, there, NORM, 1.5 * NORM)
    assert total.tolist() == np.sum(np.array(alone)[there], axis=0).tolist()
    assert all(sum(int(value) ** 2 for value in one.tolist()) <= NORM**2 for one in alone)
    assert objective.sum_integer_vectors(codes, ~there & there, NORM, float(NORM)).any() == 0


def test_floating_point_adds_up_what_integers_do_and_no_query_changes_it() -> None:
    objective, tables = indicators(*TABLES["three tables"]), settings_of(*TABLES["three tables"]).tables
    draw = np.random.default_rng(3)
    codes = np.stack([draw.integers(0, table.size, 50) for table in tables], axis=1)
    records = Records(torch.from_numpy(codes).double(), torch.zeros(50, dtype=torch.int64))
    for point in (zeros(objective), zeros(objective) + 1e38):
        total = sum_increments(objective, point, records, 1.0).total
        whole = sum_integer_increments(objective, Query((point,)), 1.0, records, NORM, float(NORM))
        assert total.numpy() == pytest.approx(whole / NORM, abs=1e-8)


def test_cells_hold_every_form() -> None:
    assert Cells.model_validate(SURVIVAL).size == 2 * 2 + 2
    assert Cells.model_validate({**GROUPED}).size == 2 * 4
