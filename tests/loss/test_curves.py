"""Cells of tables and of test records: distances of increments, figures, and what intervals cover."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from fedpriv.addons.statistics.curves import (
    CurveScores,
    CurveSettings,
    Grouping,
    _make_number_grouping,
    intervals_of,
    make_groupings,
)
from fedpriv.addons.statistics.indicators import (
    Axis,
    CellBlock,
    Cells,
    Indicators,
    StatisticsSettings,
    find_extent,
    prefix_root,
    prefix_root_matrix,
)
from fedpriv.addons.statistics.roc import TwoClassTable, combine_groups
from fedpriv.core.errors import InputError
from fedpriv.data.schema import TableSchema
from fedpriv.loss.linear import LogisticRegression
from fedpriv.loss.models import LinearSettings
from fedpriv.loss.objective import Query, Records
from fedpriv.loss.scores import auc, to_logits
from fedpriv.loss.views import PerUnit
from fedpriv.noise.integers.increments import sum_integer_increments
from fedpriv.plan.plan import ROUNDING_ALLOWANCE
from tests.loss.builders import (
    F64,
    NORM,
    find_extent_by_force,
    list_increments,
    list_integers,
    pick_one,
    sum_increments,
)

GROUPS = (Grouping("sex", ("f", "m"), 0), Grouping("age", ("young", "old"), 2, (0.0,)))
MODEL = torch.tensor([1.0, -1.0, 5.0], dtype=F64)
SCHEMA = TableSchema.model_validate({
    "public": True, "target": "ill", "classes": ["no", "yes"],
    "columns": {"age": {"range": [0, 100]}, "sex": {"values": ["f", "m"]}},
})  # fmt: skip


def scores(bins: int = 16, groups: tuple[Grouping, ...] = GROUPS, **settings: Any) -> CurveScores:
    base = LogisticRegression(3, 10.0, dtype=F64)
    return CurveScores(base, 5.0, True, CurveSettings(bins=bins, **settings), groups)


def every_cell() -> Records:
    """Records of both sexes, classes and ages, with logits in every bin, and hostile ones."""
    logits = [*np.linspace(-9.0, 9.0, 37).tolist(), math.inf, -math.inf, math.nan, 1e38, 5e-324]
    rows, labels = [], []
    for sex, logit, label in itertools.product((0, 1), logits, (0, 1)):
        rows.append([1.0 - sex, float(sex), (logit - (1.0 - 2.0 * sex)) / 5.0])
        labels.append(label)
    return Records(torch.tensor(rows, dtype=F64), torch.tensor(labels))


@pytest.mark.parametrize("weight", [0.5, 2.0, 40.0])
@pytest.mark.parametrize("groups", [GROUPS[:1], GROUPS])
def test_no_two_records_are_further_apart_than_is_charged(groups: tuple[Grouping, ...], weight: float) -> None:
    """Guarantee: in integers, norm and distance of all records' increments; of two it is attained."""
    objective, records = scores(groups=groups, weight=weight), every_cell()
    vectors = [
        list_integers(objective, MODEL * (1.0 + row % 2), pick_one(records, row), objective.norm)[0]
        for row in range(len(records.labels))
    ]  # of a loss at either of its ends
    length, distance = find_extent_by_force(np.array(vectors))
    certified = objective.diameter / objective.norm
    assert 1.0 - 1e-6 < length <= 1.0
    assert certified * (1.0 - 1e-6) < distance <= certified * (1.0 + ROUNDING_ALLOWANCE)
    assert certified == pytest.approx(math.sqrt((4.0 + 2.0 * weight) / (1.0 + weight)), rel=1e-12)


def test_a_record_is_in_the_cell_of_its_own_group_class_and_bin_alone() -> None:
    """Alone, as silos compute it; beside others a logit may round to the other side of an edge that it lies on."""
    objective = scores(threshold=0.3)
    records, edges = every_cell(), objective.settings.edge_logits
    beside = objective.contributions(MODEL, records)
    for place, of_batch in enumerate(beside):
        one = Records(*(column.clone() for column in pick_one(records, place)))
        row = objective.contributions(MODEL, one)[0]
        outputs = to_logits(objective.base.outputs(MODEL, one))[0]
        logit = float((outputs[1] - outputs[0]).nan_to_num(nan=0.0, posinf=9.0, neginf=-9.0))
        if np.abs(logit - edges).min() > 1e-9:
            torch.testing.assert_close(of_batch, row, rtol=0.0, atol=1e-9)
        bin_of = int(np.sum(logit >= edges))
        for table, group in zip(
            objective.tables(row, 1), (one.features[0, 1], one.features[0, 2] >= 0), strict=True
        ):
            bin_count = objective.settings.bin_count
            counts = np.linalg.solve(prefix_root_matrix(bin_count), table.reshape(-1, bin_count).T).T
            expected = np.zeros_like(counts)
            expected[2 * int(group) + int(one.labels), bin_of] = 1.0
            np.testing.assert_allclose(counts, expected, atol=1e-9)


def table(
    logits: NDArray[np.float64], labels: NDArray[np.bool_], mu: float, draw: Any, threshold: float = 0.5
) -> TwoClassTable:
    """One table under replace-one at μ, if it were all that is released."""
    settings = CurveSettings(threshold=threshold)
    edges, count = settings.edge_logits, settings.bin_count
    std = find_extent((CellBlock(size=count, kind="prefix"),) * 2)[1] / mu if mu < math.inf else 0.0
    bins = np.searchsorted(edges, logits, side="right")
    ones, zeros = (
        prefix_root_matrix(count) @ np.bincount(bins[labels == label], minlength=count)
        + std * draw.normal(size=count)
        for label in (True, False)
    )
    return TwoClassTable(ones, zeros, std, edges, settings.threshold_bin)


def drawn(
    count: int, draw: np.random.Generator, share: float = 0.3, apart: float = 1.2
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Calibrated logits: two normal densities, and their likelihood's ratio."""
    labels = draw.random(count) < share
    own = draw.normal(size=count) + apart * labels
    return apart * own - apart**2 / 2.0 + math.log(share / (1.0 - share)), labels


def test_without_noise_the_figures_are_those_of_the_records() -> None:
    draw = np.random.default_rng(1)
    logits, labels = drawn(2000, draw)
    result = table(logits, labels, math.inf, draw, threshold=0.4).figures()
    area = float(auc(torch.from_numpy(logits)[:, None], torch.from_numpy(labels).long()))
    assert abs(result["auc"].value - area) < 0.002
    assert result["auc"].low < area < result["auc"].high
    positive = logits >= math.log(0.4 / 0.6)
    assert result["sensitivity"].value == pytest.approx(float(positive[labels].mean()), abs=1e-9)
    assert result["specificity"].value == pytest.approx(float((~positive)[~labels].mean()), abs=1e-9)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("federations", "count", "mu"),
    [
        (400, 300, 0.6),
        *(pytest.param(2000, n, mu, marks=pytest.mark.slow) for n in (300, 3000) for mu in (1.0, 3.0)),
    ],
)
def test_intervals_cover_the_population(federations: int, count: int, mu: float) -> None:
    """Guarantee: sampling and noise are in an interval; 92 to 99 % where there is one."""
    draw = np.random.default_rng(2)
    logits, labels = drawn(1_000_000, draw)
    predicted = logits >= 0.0
    true = {
        "auc": 0.5 * (1.0 + math.erf(1.2 / 2.0)),
        "sensitivity": float(predicted[labels].mean()),
        "specificity": float((~predicted)[~labels].mean()),
        "calibration_error_squared": 0.0,
    }
    true["balanced_accuracy"] = (true["sensitivity"] + true["specificity"]) / 2.0
    covered, values = ({name: list[float]() for name in true} for _ in range(2))
    for _ in range(federations):
        for name, figure in table(*drawn(count, draw), mu, draw).figures().items():
            covered[name].append(figure.low <= true[name] <= figure.high)
            values[name].append(figure.value)
    shares = {name: float(np.mean(each)) for name, each in covered.items()}
    print({name: (round(share, 3), round(float(np.std(values[name])), 4)) for name, share in shares.items()})
    slack = 4.5 * math.sqrt(0.08 * 0.92 / federations)
    for name, share in shares.items():
        assert len(covered[name]) > 0.9 * federations
        assert 0.92 - slack < share, name
        error = float(np.std(values[name])) / math.sqrt(len(values[name]))
        bias = 0.0005 if name == "calibration_error_squared" else 0.004
        assert abs(float(np.mean(values[name])) - true[name]) < bias + 4.5 * error, name
    assert shares["auc"] < 0.99 + slack


def test_a_model_that_is_off_is_told_from_a_calibrated_one() -> None:
    draw = np.random.default_rng(3)
    logits, labels = drawn(3000, draw)
    good = table(logits, labels, 1.0, draw).calibration_error_squared()
    off = table(1.5 * logits + 1.0, labels, 1.0, draw).calibration_error_squared()
    assert good is not None
    assert off is not None
    assert good.low == 0.0 < good.high < off.low < off.value
    curve = table(1.5 * logits + 1.0, labels, 1.0, draw).reliability()
    assert sum(each.observed_share.high < each.mean_score for each in curve) >= 2


@pytest.mark.parametrize("seed", range(5))
def test_too_few_records_of_a_class_get_no_figure(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for count, mu in ((40, 10.0), (300, 0.05)):
        assert table(*drawn(count, draw), mu, draw).figures() == {}


def test_everybody_is_put_together_from_all_tables_by_their_noise() -> None:
    sex, age = np.ones((2, 2, 16)), np.full((3, 2, 16), 2.0 / 3.0)
    both, std = combine_groups([sex, age], [1.0, 1.0])
    np.testing.assert_allclose(both, 2.0)
    assert std == pytest.approx(1.0 / math.sqrt(1.0 / 2.0 + 1.0 / 3.0))
    assert combine_groups([sex, age], [0.0, 0.0])[1] == 0.0


def grouped(model: LinearSettings | None = None, *, scaled: bool = False, **settings: Any) -> tuple[Grouping, ...]:
    model = model or LinearSettings(feature_norm=2.0)
    return make_groupings(CurveSettings(**settings), SCHEMA, model, is_scaled=scaled)


def test_groups_are_read_off_what_a_model_sees() -> None:
    sex, age = grouped(by=("sex", "age"), edges={"age": (50.0, 75.0)})
    features = torch.tensor([[-1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.4999, 0.0, 1.0], [0.5, 1.0, 0.0]])
    assert sex.codes(features).tolist() == [0, 1, 1, 0]
    assert age.codes(features).tolist() == [0, 1, 1, 2]
    assert age.labels == ("below 50", "50 – 75", "from 75")
    close = _make_number_grouping("id", 0, (0.0, 1e7), (2000001.0, 2000002.0, 2000003.5))
    assert close.labels == ("below 2000001", "2000001 – 2000002", "2000002 – 2000003.5", "from 2000003.5")
    assert grouped()[0].codes(features).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        ({"by": ("height",)}, {}, "'height' is no feature"),
        ({"by": ("age",)}, {}, "'age' needs edges"),
        ({"by": ("sex",), "edges": {"sex": (1.0,)}}, {}, "a column of words"),
        ({"by": ("age",), "edges": {"age": (150.0,)}}, {}, "not within its range"),
        ({"by": ("age",), "edges": {"age": (50.0,)}}, {"scaled": True}, "scaled once more"),
        ({"by": ("age",), "edges": {"age": (50.0,)}}, {"model": LinearSettings(feature_norm=1.0)}, "scaled once"),
    ],
)
def test_groups_that_a_model_does_not_see_are_refused(
    settings: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        grouped(**settings, **changes)


@pytest.mark.parametrize(
    ("columns", "key"),
    [
        ({"risk": ["high", "high_low"]}, "risk=high_low"),
        ({"risk": ["x_high", "x"]}, "risk=x_high"),
        ({"a=b": ["c", "d"], "a": ["b=c", "e"]}, "a=b=c"),
    ],
)
def test_groups_whose_figures_would_be_stored_under_one_key_are_refused(
    columns: dict[str, list[str]], key: str
) -> None:
    """Was: the end of an interval took the place of another group's figure."""
    schema = TableSchema.model_validate(
        {
            "public": True,
            "target": "ill",
            "classes": ["no", "yes"],
            "columns": {name: {"values": values} for name, values in columns.items()},
        }
    )
    settings = CurveSettings(by=tuple(columns))
    with pytest.raises(InputError, match=f"by the key test_auc_of_{key}, since .* rename one of the groups"):
        make_groupings(settings, schema, LinearSettings(feature_norm=2.0), is_scaled=False)


def test_the_least_feature_norm_that_a_refusal_of_groups_names_is_enough() -> None:
    """It was rounded, for three columns to 1.732 where √3 is needed."""
    schema = SCHEMA.model_copy(update={"columns": {**SCHEMA.columns, "size": SCHEMA.columns["age"]}})
    settings = CurveSettings(by=("age",), edges={"age": (50.0,)})
    with pytest.raises(InputError, match=r"or more, and no model\.scaling, model\.centre or") as refused:
        make_groupings(settings, schema, LinearSettings(feature_norm=1.0), is_scaled=False)
    norm = float(str(refused.value).partition("feature_norm of ")[2].split()[0])
    assert norm < 1.01 * math.sqrt(3.0)
    (age,) = make_groupings(settings, schema, LinearSettings(feature_norm=norm), is_scaled=False)
    assert age.labels == ("below 50", "from 50")


def test_figures_have_a_line_for_every_group_whatever_its_name() -> None:
    """A group "very_low" had a second line, "very", and one of a column "at home" had dashes for figures."""
    names = {"": "all", "_at_low": "at low", "_of_risk=very_low": "risk=very_low", "_of_at home=no": "at home=no"}
    cell = {"point": {}, "seed": 0}
    for number, suffix in enumerate(names):
        low, high = ((f"{suffix}_{end}" if "_of_" in suffix else f"_{end}{suffix}") for end in ("low", "high"))
        cell |= {f"test_auc{suffix}": 0.5 + number / 10.0, f"test_auc{low}": 0.4, f"test_auc{high}": 0.9}
    (figures,) = intervals_of(SimpleNamespace(axes={}, cells=[cell]))  # type: ignore[arg-type]
    assert [line[:2] for line in figures[2]] == [
        [name, f"{0.5 + number / 10.0:.4f} (0.4000 – 0.9000)"] for number, name in enumerate(names.values())
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"bins": 20}, {"bins": 2**20}, {"threshold": 0.0}, {"threshold": math.nan}, {"weight": math.inf},
        {"by": ("sex", "sex")}, {"edges": {"age": (1.0,)}}, {"by": ("age",), "edges": {"age": (2.0, 1.0)}},
        {"by": ("age",), "edges": {"age": (1.0, math.nan)}},
    ],
)  # fmt: skip
def test_hostile_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CurveSettings.model_validate(settings)


# Cells of tables: golden figures, and brute force over every pair of neighbours


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


@pytest.mark.parametrize("name", TABLES)
def test_a_sum_does_as_much_work_whoever_counts_and_whatever_is_missing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: the number of operations depends on n and public numbers, not on cells or on who is counted."""
    objective, tables = indicators(*TABLES[name], MOMENTS), settings_of(*TABLES[name], MOMENTS).tables
    sizes = list[tuple[int, ...]]()
    for function in ("bincount", "trunc"):
        original = getattr(np, function)

        def record_size(values: Any, *rest: Any, original: Any = original, **keys: Any) -> Any:
            sizes.append(np.shape(values))
            return original(values, *rest, **keys)

        monkeypatch.setattr(np, function, record_size)
    sizes_of_runs = []
    for code, count in ((0.0, 40), (0.0, 3), (9.0 + max(table.size for table in tables), 40)):
        sizes.clear()
        objective.sum_integer_vectors(np.full((40, len(tables)), code), np.arange(40) < count, NORM, NORM)
        sizes_of_runs.append(list(sizes))
    assert sizes_of_runs[0] == sizes_of_runs[1] == sizes_of_runs[2]


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
