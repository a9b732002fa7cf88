"""Charts: scales with round ticks, marks where they belong, texts escaped, curves of the right guarantee."""

import math
import re
from statistics import NormalDist

import pytest

from fedpriv.show.charts import Chart, Mark, Series, charts_of, drawn, scale_of
from tests.reports.conftest import results_of


@pytest.mark.parametrize("values", [(0.0, 1.0), (2.25, 2.31), (-3.0, 900.0), (5.0, 5.0), (1e-4, 2e-4)])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_every_value_lies_on_the_axis_and_ticks_are_few(values: tuple[float, float], logarithmic: bool) -> None:
    scale = scale_of(values, 0.0, 100.0, logarithmic=logarithmic)
    assert all(0.0 < scale.place(value) < 100.0 for value in values)
    ticks = scale.ticks(6)
    assert 1 <= len(ticks) <= 8
    assert all(scale.low <= tick <= scale.high for tick in ticks)
    assert sorted(ticks) == ticks


def test_a_logarithmic_axis_has_equal_ratios_at_equal_distances() -> None:
    scale = scale_of((1.0, 100.0), 0.0, 1.0, logarithmic=True)
    assert scale.place(10.0) - scale.place(1.0) == pytest.approx(scale.place(100.0) - scale.place(10.0))


def test_names_and_numbers_are_text() -> None:
    chart = Chart("k", "<i>", "x", "y", [Series("<b>", [Mark(1, 1, "1 & 2"), Mark(2, math.nan, "none")])])
    svg = drawn(chart)
    assert "<b>" not in svg
    assert "<i>" not in svg
    assert "&lt;b&gt;: 1 &amp; 2" in svg
    assert svg.count("<circle") == 1


def test_curves_show_the_mean_over_seeds() -> None:
    results = results_of({"privacy.rho": [1.0, 4.0]}, [0, 1], lambda point, seed: (2.0, 0.5))
    history = [
        {"cell": place, "round": t, "test_loss": 2.0 + place + t, "test_accuracy": 0.1}
        for place in range(4) for t in (1, 2)
    ]  # fmt: skip
    chart = next(chart for chart in charts_of(results, history, None) if chart.key == "test_loss")
    assert [series.name for series in chart.series] == ["ρ = 1", "ρ = 4"]
    assert [(mark.x, mark.y) for mark in chart.series[1].marks] == [(1, 5.5), (2, 6.5)]
    assert chart.series[1].marks[0].spread == pytest.approx(math.sqrt(0.5))


def test_the_trade_off_is_that_of_the_cells_mu() -> None:
    results = results_of({"privacy.rho": [1.0]}, [0], lambda point, seed: (2.0, 0.5))
    chart = next(chart for chart in charts_of(results, [], None) if chart.key == "tradeoff")
    curve = next(series for series in chart.series if series.name == f"μ = {results.cells[0]['mu']:g}")
    mu, normal = results.cells[0]["mu"], NormalDist()
    for mark in curve.marks:
        assert normal.inv_cdf(1 - mark.x) - normal.inv_cdf(mark.y) == pytest.approx(mu)


def test_published_values_have_the_colour_of_what_they_are_compared_with() -> None:
    paper = {
        "rows": "privacy.rho", "columns": "algorithm.trust", "test_accuracy": [[60.0, 70.0], [65.0, 75.0]],
        "row_values": [1.0, 4.0], "column_values": ["untrusted", "trusted"],
    }  # fmt: skip
    axes = {"privacy.rho": [1.0, 4.0], "algorithm.trust": ["untrusted", "trusted"]}
    chart = charts_of(results_of(axes, [0], lambda point, seed: (2.0, 0.5), paper), [], None)[0]
    looks = dict(zip([each.name for each in chart.series], map(chart.look, range(4)), strict=True))
    assert looks["trusted"] == looks["trusted, published"] != looks["untrusted"]
    hollow = re.findall(r'class="hollow"', drawn(chart))
    assert len(hollow) == 4
