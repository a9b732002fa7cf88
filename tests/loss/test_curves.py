"""AUC and its companions of test records: distances of increments, groups, and what intervals cover."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from fedpriv.addons.statistics.curves import CurveScores, CurveSettings, Grouping, make_groupings
from fedpriv.addons.statistics.indicators import CellBlock, find_extent, prefix_root_matrix
from fedpriv.addons.statistics.roc import TwoClassTable, combine_groups
from fedpriv.core.errors import InputError
from fedpriv.data.schema import TableSchema
from fedpriv.loss.linear import LogisticRegression
from fedpriv.loss.models import LinearSettings
from fedpriv.loss.objective import Records
from fedpriv.loss.scores import auc, to_logits
from fedpriv.plan.plan import ROUNDING_ALLOWANCE
from tests.loss.builders import F64, find_extent_by_force, list_integers, pick_one

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
    found = table(logits, labels, math.inf, draw, threshold=0.4).figures()
    area = float(auc(torch.from_numpy(logits)[:, None], torch.from_numpy(labels).long()))
    assert abs(found["auc"].value - area) < 0.002
    assert found["auc"].low < area < found["auc"].high
    positive = logits >= math.log(0.4 / 0.6)
    assert found["sensitivity"].value == pytest.approx(float(positive[labels].mean()), abs=1e-9)
    assert found["specificity"].value == pytest.approx(float((~positive)[~labels].mean()), abs=1e-9)


@pytest.mark.parametrize(
    ("federations", "count", "mu"),
    [
        (1000, 300, 1.0),
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
