"""Statistics: intervals cover what they say, curves are those of the literature, plans end where they must.

Coverage is counted over simulated federations at fixed seeds.  A bound is 4.5 standard errors wide: an interval
that covers as often as it says fails it with probability 7e-6.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpriv.addons.statistics import command
from fedpriv.addons.statistics.indicators import (
    PRESENT_MOMENT,
    Cells,
    find_extent,
    prefix_root,
    prefix_root_matrix,
)
from fedpriv.addons.statistics.plan import TableRequest, read_plan
from fedpriv.addons.statistics.tables import TRUSTS, Statistics, TableResult, read_table
from fedpriv.claims.outcome import RunObserver
from fedpriv.core.errors import InputError
from fedpriv.data.schema import TableSchema
from fedpriv.engines.table import make_engine
from tests.data.tables import SCHEMA, rows, write_csv
from tests.silo.test_statistics import FILLED, TABLES

COLUMNS = {"time": {"range": [0.0, 10.0]}, "event": {"values": ["no", "yes"]}}
SCHEMA_OF_TIMES = TableSchema.model_validate(
    {"public": True, "target": "outcome", "classes": ["well", "ill"], "columns": COLUMNS}
)
QUICK, FULL = 300, 2000
coverage = pytest.mark.parametrize(
    ("federations", "count", "mu"),
    [
        (QUICK, 300, 1.0),
        *(pytest.param(FULL, n, mu, marks=pytest.mark.slow) for n in (300, 3000) for mu in (1.0, 3.0)),
    ],
)


def released(table: Cells, codes: NDArray[np.int64], mu: float, draw: np.random.Generator) -> tuple[Any, float]:
    """C n + noise of one table under replace-one at μ, and the noise's deviation."""
    counts, parts, start = np.bincount(codes, minlength=table.size).astype(float), [], 0
    for block in table.blocks:
        own = counts[start : start + block.size]
        root = prefix_root_matrix(block.size)
        parts.append({"plain": own, "prefix": root @ own, "suffix": root.T @ own}[block.kind])
        start += block.size
    std = find_extent(table.blocks)[1] / mu
    return np.concatenate(parts) + std * draw.normal(size=table.size), std


def within(share: float, wanted: float, trials: int) -> bool:
    return abs(share - wanted) <= 4.5 * math.sqrt(wanted * (1.0 - wanted) / trials)


def print_coverage(title: str, shares: Mapping[str, float]) -> None:
    """Print how often intervals covered, for docs/statistics.md: `pytest -rP -m slow -k cover` shows it."""
    print(f"{title}: " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items()))


def one(
    kind: str, raw: NDArray[np.float64], edges: list[float], mu: float, draw: np.random.Generator
) -> TableResult:
    of = ("time", "event") if kind == "survival" else ("time",)
    request = TableRequest(of=of, kind=kind, edges={"time": tuple(edges)})  # type: ignore[arg-type]
    place = [SCHEMA_OF_TIMES.raw_columns.index(name) for name in of]
    axes: list[dict[str, Any]] = [{"column": place[0], "edges": edges}]
    axes += [{"column": place[1], "words": 2}] if kind == "survival" else []
    form = {"counts": "counts", "quantiles": "prefix", "survival": "survival"}[kind]
    table = Cells.model_validate({"axes": axes, "form": form})
    return read_table(request, table, SCHEMA_OF_TIMES, *released(table, table.codes(raw), mu, draw))


def cells_of(times: NDArray[np.float64], events: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Raw cells in the order of `TableSchema.raw_columns`: event, time, outcome."""
    nothing = np.zeros(len(times))
    return np.stack([nothing if events is None else events, times, nothing], axis=1)


@coverage
def test_intervals_of_counts_and_quantiles_cover_at_their_nominal_rate(
    federations: int, count: int, mu: float
) -> None:
    draw, edges = np.random.default_rng(11), np.linspace(0.0, 10.0, 17).tolist()
    counts, quantiles = list[bool](), {"these records": list[bool](), "the population": list[bool]()}
    upper = np.append(edges, np.inf)
    for _ in range(federations):
        times = draw.gamma(2.0, 1.5, count)
        table = one("counts", cells_of(times), edges, mu, draw)
        true = np.histogram(times, edges)[0]
        for estimate, own in zip(table.estimates[1:-2], true.tolist(), strict=True):
            counts.append(abs(estimate.value - own) <= 1.959964 * estimate.standard_error)
            assert estimate.low <= estimate.high
        for estimate in one("quantiles", cells_of(times), edges, mu, draw).estimates:
            share = float(estimate.of[0].split()[1])
            below = np.cumsum(np.histogram(times, [-np.inf, *edges, np.inf])[0])
            own_edge = upper[int(np.flatnonzero(below >= share * count)[0])]
            population = {0.25: 1.4419, 0.5: 2.5175, 0.75: 4.0389}[share]
            of_all = upper[int(np.flatnonzero(np.array([*edges, np.inf]) >= population)[0])]
            wanted = own_edge if estimate.covers == "these records" else of_all
            quantiles[estimate.covers].append(estimate.low <= wanted <= estimate.high)
    shares = {name: float(np.mean(hit)) for name, hit in {"counts": counts, **quantiles}.items()}
    print_coverage(f"{count} records, mu {mu:g}", shares)
    assert within(shares["counts"], 0.95, len(counts))
    for covered in quantiles.values():
        assert np.mean(covered) >= 0.95 - 4.5 * math.sqrt(0.05 * 0.95 / len(covered))


@coverage
def test_intervals_of_cumulative_shares_cover_at_their_nominal_rate(
    federations: int, count: int, mu: float
) -> None:
    draw, edges = np.random.default_rng(16), np.linspace(0.0, 10.0, 17).tolist()
    hits = list[bool]()
    for seed in range(federations):
        raw = cells_of(draw.gamma(2.0, 1.5, count))
        (curve,) = one("quantiles", raw, edges, mu, np.random.default_rng(seed)).curves
        below = np.cumsum(np.histogram(raw[:, 1], [-np.inf, *edges])[0]) / count
        for true, low, high in zip(below.tolist(), curve.low, curve.high, strict=True):
            hits.append(low - 1e-12 <= true <= high + 1e-12)
    print_coverage(f"{count} records, mu {mu:g}", {"shares": float(np.mean(hits))})
    assert len(hits) > 3 * federations
    assert within(float(np.mean(hits)), 0.95, len(hits) // len(edges))  # sums of one federation share noise


@coverage
def test_intervals_of_survival_cover_the_population(federations: int, count: int, mu: float) -> None:
    draw, edges = np.random.default_rng(12), np.linspace(0.0, 10.0, 21).tolist()
    hits: dict[float, list[bool]] = {}
    for _ in range(federations):
        event, censored = draw.exponential(6.0, count), draw.exponential(10.0, count)
        raw = cells_of(np.minimum(event, censored), (event <= censored).astype(float))
        (curve,) = one("survival", raw, edges, mu, draw).curves
        for at, low, high in list(zip(curve.at, curve.low, curve.high, strict=True))[1:]:
            hits.setdefault(at, []).append(low <= math.exp(-at / 6.0) <= high)
    shares = [(np.mean(each), len(each)) for each in hits.values() if len(each) > federations / 2]
    print_coverage(f"{count} records, mu {mu:g}", {"survival": float(np.mean([share for share, _ in shares]))})
    assert len(shares) >= 10
    assert all(share >= 0.92 - 4.5 * math.sqrt(0.92 * 0.08 / trials) for share, trials in shares)
    assert 0.92 <= float(np.mean([share for share, _ in shares])) <= 0.99


@pytest.mark.parametrize("federations", [QUICK, pytest.param(FULL, marks=pytest.mark.slow)])
def test_intervals_of_means_and_deviations_cover_at_their_nominal_rate(federations: int) -> None:
    draw, hits = np.random.default_rng(15), dict[tuple[str, str], list[bool]]()
    table = Cells.model_validate({"axes": [{"column": 1, "edges": [0.0, 10.0]}], "form": "moments"})
    for _ in range(federations):
        times = np.minimum(draw.gamma(4.0, 1.0, 500), 10.0)
        x = np.append(times, np.nan) / 5.0 - 1.0
        sums = np.array([np.nansum(x), np.nansum(2.0 * x**2 - 1.0), PRESENT_MOMENT * 500])
        std = table.extent[1] / 1.0
        released_sums = sums + std * draw.normal(size=3)
        request = TableRequest(of=("time",), kind="means")
        true = {"values": 500.0, "mean": float(times.mean()), "deviation": float(times.std())}
        for estimate in read_table(request, table, SCHEMA_OF_TIMES, released_sums, std).estimates:
            wanted = true[estimate.of[0]] if estimate.covers == "these records" else 3.98635
            hits.setdefault((estimate.of[0], estimate.covers), []).append(estimate.low <= wanted <= estimate.high)
    print_coverage("500 records, mu 1", {" ".join(name): float(np.mean(hit)) for name, hit in hits.items()})
    assert len(hits) == 4
    for covered in hits.values():
        assert abs(float(np.mean(covered)) - 0.95) <= 0.01 + 4.5 * math.sqrt(0.05 * 0.95 / federations)


def kaplan_meier(times: NDArray[np.float64], events: NDArray[np.bool_], at: float) -> float:
    """The product-limit estimate, record by record."""
    survival = 1.0
    for time in np.unique(times[events & (times <= at)]):
        survival *= 1.0 - float(np.sum(events & (times == time))) / float(np.sum(times >= time))
    return survival


def test_the_exact_kaplan_meier_curve_matches_lifelines() -> None:
    lifelines = pytest.importorskip("lifelines", reason="needs pip install 'fedpriv[checks]'")
    draw = np.random.default_rng(4)
    times, events = draw.integers(1, 40, 300).astype(float), draw.random(300) < 0.6
    fitted = lifelines.KaplanMeierFitter().fit(times, events)
    for at in (5.0, 17.0, 39.0):
        assert kaplan_meier(times, events, at) == pytest.approx(float(fitted.predict(at)), abs=1e-12)


@pytest.mark.slow
def test_noise_free_survival_estimates_match_kaplan_meier_up_to_the_binning() -> None:
    draw, edges = np.random.default_rng(13), np.linspace(0.0, 10.0, 41).tolist()
    event, censored = draw.exponential(6.0, 3000), draw.exponential(10.0, 3000)
    times, seen = np.minimum(event, censored), event <= censored
    (curve,) = one("survival", cells_of(times, seen.astype(float)), edges, 1e9, draw).curves
    exact = [kaplan_meier(times, seen, at) for at in curve.at]
    assert len(curve.at) == 41
    assert np.abs(np.array(curve.values) - exact).max() < 0.002


def test_a_survival_curve_ends_where_too_few_are_at_risk_and_never_rises() -> None:
    draw = np.random.default_rng(14)
    times = draw.exponential(1.0, 200)
    (curve,) = one("survival", cells_of(times, np.ones(200)), list(range(21)), 0.3, draw).curves  # type: ignore[arg-type]
    assert len(curve.at) < 21
    assert list(curve.values) == sorted(curve.values, reverse=True)
    assert all(low <= value <= high for low, value, high in zip(curve.low, curve.values, curve.high, strict=True))

    assert prefix_root_matrix(5) @ prefix_root_matrix(5) == pytest.approx(np.tril(np.ones((5, 5))))
    assert prefix_root(1).tolist() == [1.0]


def tree_of(path: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "table-one",
        "data": {"name": str(path), "table": FILLED},
        "privacy": {"relation": "replace-one", "mu": 1.0},
        "table": TABLES,
        **changes,
    }


def statistics_of(tree: Mapping[str, Any]) -> Statistics:
    return Statistics.from_plan(read_plan(tree))


def values_of(statistics: Statistics, engine: str = "vectorized") -> list[TableResult]:
    (outcome,) = make_engine(engine)([statistics.cell], RunObserver())
    return statistics.read_tables(outcome.cell_outcome.model)


def test_sites_are_counted_like_any_column(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", rows(600))
    privacy = {"relation": "replace-one", "mu": 50.0}
    statistics = statistics_of(tree_of(path, table=[{"of": ["hospital"]}], privacy=privacy))
    (table,) = values_of(statistics)
    train = [row for row in rows(600) if row["part"] == "train"]
    for estimate in table.estimates:
        assert estimate.value == pytest.approx(sum(row["hospital"] == estimate.of[0] for row in train), abs=1.0)


def test_labels_name_the_edges_of_a_plan_to_all_digits() -> None:
    """Before: six digits, by which two bins of one table were both called "1e+06 – 1e+06"."""
    times, draw = np.array([1000000.5, 1000001.5]), np.random.default_rng(0)
    counts = one("counts", cells_of(times), [1000000.0, 1000001.0, 1000002.0], 1.0, draw)
    assert [estimate.of for estimate in counts.estimates] == [
        ("below 1000000",), ("1000000 – 1000001",), ("1000001 – 1000002",), ("above 1000002",), ("missing",),
    ]  # fmt: skip
    events = np.ones(500)
    survival = one(
        "survival", cells_of(1000000.0 + 2.0 * draw.random(500), events), [1000000.0, 1000001.0], 50.0, draw
    )
    assert command.table_rows(survival)[-1]["of"] == "survival at 1000001"


@pytest.mark.parametrize("trust", TRUSTS)
def test_the_statistics_of_both_engines_agree_and_lie_near_the_true_counts(tmp_path: Path, trust: str) -> None:
    path = write_csv(tmp_path / "t.csv", rows(600))
    statistics = statistics_of(tree_of(path, trust=trust))
    assert statistics.cell.batch_sizes == (360, 240)
    train = [row for row in rows(600) if row["part"] == "train"]
    first, second = values_of(statistics), values_of(statistics, "inprocess")
    for one_table, other in zip(first, second, strict=True):
        values, others = ([estimate.value for estimate in table.estimates] for table in (one_table, other))
        assert values == pytest.approx(others, abs=1e-6)
    for estimate in first[1].estimates:
        true = sum((row["sex"], row["outcome"]) == estimate.of for row in train)
        assert abs(estimate.value - true) <= 4.5 * estimate.standard_error
    assert statistics.noise_stds(trust) == statistics.noise_stds()
    assert statistics.noise_stds("untrusted")[0] == pytest.approx(
        math.sqrt(2) * statistics.noise_stds("trusted")[0]
    )


def test_statistics_in_integer_arithmetic_lie_near_the_true_counts(tmp_path: Path) -> None:
    """In process, with the arithmetic and the noise of a deployment under the test key."""
    path = write_csv(tmp_path / "t.csv", rows(600))
    statistics = statistics_of(tree_of(path, trust="secure-aggregation"))
    run = statistics.cell.run.model_copy(update={"arithmetic": "integers"})
    (outcome,) = make_engine("inprocess")([statistics.cell.model_copy(update={"run": run})], RunObserver())
    stream = outcome.cell_outcome.releases[0]
    assert stream.integer_release is not None
    assert stream.mu <= 1.0
    train = [row for row in rows(600) if row["part"] == "train"]
    for estimate in statistics.read_tables(outcome.cell_outcome.model, for_release=True)[1].estimates:
        true = sum((row["sex"], row["outcome"]) == estimate.of for row in train)
        assert abs(estimate.value - true) <= 4.5 * estimate.standard_error


def test_a_person_counts_once_however_many_rows_the_table_has(tmp_path: Path) -> None:
    """Of a person with k rows each counts 1/k; places and errors are persons'."""
    listed = [{**row, "patient": row["hospital"] + str(number // 7)} for number, row in enumerate(rows(600))]
    path = write_csv(tmp_path / "t.csv", listed)
    privacy = {"relation": "replace-one", "mu": 50.0, "unit": "user", "records": 8}
    tree = tree_of(path, privacy=privacy, data={"name": str(path), "table": {**FILLED, "person": "patient"}})
    statistics = statistics_of({**tree, "trust": "trusted"})
    persons = {row["patient"] for row in listed}
    assert statistics.unit_count == len(persons)
    shares: dict[str, list[bool]] = {}
    for row in listed:
        if row["part"] == "train":
            shares.setdefault(row["patient"], []).append(row["sex"] == "m")
    found = {estimate.of: estimate.value for estimate in values_of(statistics)[1].estimates}
    male = found["m", "well"] + found["m", "ill"]
    assert male == pytest.approx(sum(float(np.mean(own)) for own in shares.values()), abs=1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"table": [{"of": ["weight"]}]}, "'weight' is no column"),
        ({"table": [{"of": ["sex"], "edges": {"sex": [0, 1]}}]}, "a column of words"),
        ({"table": [{"of": ["sex"], "edges": {"age": [0, 1]}}]}, "none of its columns"),
        ({"table": [{"of": ["sex"]}, {"of": ["sex"]}]}, "two tables are called 'sex'"),
        ({"table": [{"of": ["sex"], "kind": "quantiles"}]}, "of numbers"),
        ({"table": [{"of": ["age"], "edges": {"age": [0, 0]}}]}, "numbers that increase"),
        ({"privacy": {"relation": "replace-one", "mode": "none"}}, "promise nothing"),
        ({"data": {"name": "synthetic"}}, "statistics are of a table"),
        ({"colour": 1}, "colour"),
        ({"silos": 3, "records": [24, 16]}, "silos = 3: `records` is of 2 of them; leave `silos` out"),
        ({"silos": 3}, "silos = 3: the data are of 2 of them; leave `silos` out"),
    ],
)
def test_invalid_statistics_plans_are_refused_in_one_line(
    tmp_path: Path, changes: Mapping[str, Any], words: str
) -> None:
    path = write_csv(tmp_path / "t.csv", rows())
    with pytest.raises(InputError, match=words) as refused:
        statistics_of(tree_of(path, **changes))
    assert "\n" not in str(refused.value)


def test_statistics_refuse_tables_that_drop_rows_with_missing_values(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", rows())
    data = {"name": str(path), "table": {**SCHEMA, "missing": "drop"}}
    with pytest.raises(InputError, match="to be counted as missing"):
        statistics_of(tree_of(path, data=data))


def test_statistics_are_computed_for_a_table_without_a_test_split(tmp_path: Path) -> None:
    schema = {key: value for key, value in FILLED.items() if key != "split"} | {"test_share": 0.0}
    path = write_csv(tmp_path / "t.csv", rows())
    statistics = statistics_of(tree_of(path, data={"name": str(path), "table": schema}))
    assert statistics.unit_count == 60
    assert len(values_of(statistics)) == 3


@pytest.mark.parametrize("trust", TRUSTS)
def test_the_price_of_a_dry_run_is_that_of_the_run_for_persons_in_several_silos(
    tmp_path: Path, trust: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an untrusted server a person pays in every silo."""
    path = tmp_path / "t.csv"
    write_csv(path, [{**row, "patient": f"{row['hospital']}{n // 7}"} for n, row in enumerate(rows(600))])
    privacy = {"relation": "replace-one", "mu": 1.0, "unit": "user", "records": 8, "shared": 2}
    table = {"name": str(path), "table": {**FILLED, "person": "patient"}}
    plan = tree_of(path, privacy=privacy, data=table, trust=trust)
    command._print_dry_run(Statistics.from_plan(read_plan(plan)), for_release=False, as_json=True)
    price = json.loads(capsys.readouterr().out)
    assert price["mu"] == pytest.approx(1.0, rel=1e-9)
    assert price["epsilon"] == pytest.approx(4.377, abs=1e-3)
