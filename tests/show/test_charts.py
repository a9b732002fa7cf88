"""Charts: round ticks, looks that differ, marks where they belong, texts escaped, the right guarantee."""

import itertools
import math
import re
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest

from fedpriv.claims.ledger import ReleaseStream, stream_to_data
from fedpriv.noise.tree import BinaryTree
from fedpriv.noise.trust import make_unit
from fedpriv.participation.orders import FixedOrder, PublicOrder
from fedpriv.participation.registry import ClientAvailability
from fedpriv.show.charts import Chart, Mark, Panel, Series, make_charts, make_noise_charts
from fedpriv.show.looks import _HUES, format_tick, make_layout, make_scale, nth_look, shade
from fedpriv.show.page import draw_svg, order_charts
from fedpriv.show.summary import axis_points
from fedpriv.study.results import Results
from tests.show.builders import results_of

TRUSTS = ["untrusted", "trusted"]
SWEEPS = {
    "levels": {"privacy.mu": [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]},
    "trust and levels": {"algorithm.trust": TRUSTS, "privacy.mu": [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]},
    "many silos": {"federation.silos": list(range(1, 13))},
    "too many": {"federation.silos": list(range(1, 60))},
    "algorithms": {"algorithm.name": list("abcdefgh"), "privacy.mu": [1.0, 2.0]},
    "trust, algorithms": {"algorithm.trust": TRUSTS, "algorithm.name": list("abc"), "privacy.mu": [1.0, 2.0]},
    "five axes": {
        "algorithm.name": ["x", "y", "z"], "data.a": list(range(5)), "data.b": list(range(6)),
        "data.c": [1, 2], "algorithm.trust": TRUSTS,
    },
}  # fmt: skip


def swept(name: str) -> Results:
    return results_of(SWEEPS[name])


def history_of(results: Results) -> list[dict[str, float]]:
    return [{"cell": cell["cell"], "round": t, "test_loss": 2.0 + t} for cell in results.cells for t in (1, 2)]


def charts_of(results: Results, history: list[dict[str, float]] | None = None) -> dict[str, Chart]:
    charts = make_charts(results, history_of(results) if history is None else history, None)
    return {chart.key: chart for chart in charts}


def chart_of(*series: Series, panel: str = "", y_label: str = "<y>", **more: Any) -> Chart:
    """A chart with one panel, and texts in which a mark-up would be seen."""
    return Chart("k", "<i>", "<x>", y_label, [Panel(panel, [*series])], **more)


@pytest.mark.parametrize("values", [(0.0, 1.0), (2.25, 2.31), (-3.0, 900.0), (5.0, 5.0), (1e-4, 2e-4)])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_every_value_lies_on_the_axis_and_ticks_are_few(values: tuple[float, float], logarithmic: bool) -> None:
    scale = make_scale(values, 0.0, 100.0, logarithmic=logarithmic and min(values) > 0.0)
    assert all(0.0 < scale.position(value) < 100.0 for value in values)
    ticks = scale.ticks(6)
    assert 1 <= len(ticks) <= 8
    assert all(scale.low <= tick <= scale.high for tick in ticks)
    assert sorted(ticks) == ticks


def test_tick_labels_are_short_decimal_or_scientific_numbers() -> None:
    texts = {0.0: "0", 0.25: "0.25", 600.0: "600", 20_000.0: "20000", 1e6: "1e6", 2e-5: "2e-5", 1e10: "1e10"}
    texts |= {1.5e5: "1.5e5", 2.5e-4: "2.5e-4"}  # before: "2e5", as 200,000
    texts |= {9999.4: "9999", 9999.7: "10000"}  # before: "1e+04"
    assert {value: format_tick(value) for value in texts} == texts


def test_a_logarithmic_axis_has_equal_ratios_at_equal_distances() -> None:
    scale = make_scale((1.0, 100.0), 0.0, 1.0, logarithmic=True)
    one, ten, hundred = map(scale.position, (1.0, 10.0, 100.0))
    assert ten - one == pytest.approx(hundred - ten)


@pytest.mark.parametrize("name", SWEEPS)
def test_two_series_of_a_panel_differ_in_two_of_colour_dashes_and_marker(name: str) -> None:
    charts = charts_of(swept(name))
    assert {"test_loss", "noise"} <= charts.keys()
    for panel in (panel for chart in charts.values() for panel in chart.panels):
        for one, other in itertools.combinations([series for series in panel.series if series.line], 2):
            a, b = one.look, other.look
            colours, markers = a.light != b.light and a.dark != b.dark, a.marker != b.marker or not one.dots
            assert colours + (a.dash != b.dash) + markers >= 2, (one.name, other.name)


def test_series_of_one_trust_setting_are_shades_of_one_hue() -> None:
    chart = charts_of(swept("trust and levels"))["test_loss"]
    shades = [shade(hue, n / 5).light for hue in (0, 1) for n in range(6)]
    assert [series.look.light for series in chart.series] == shades


@pytest.mark.parametrize(("column", "background"), [(0, "#ffffff"), (1, "#0f141a")])
def test_every_series_colour_has_a_contrast_of_three_with_the_page_background(
    column: int, background: str
) -> None:
    for hue, share in itertools.product(range(len(_HUES)), (0.0, 0.5, 1.0)):
        look = shade(hue, share)
        low, high = sorted(_luminance(colour) + 0.05 for colour in ((look.light, look.dark)[column], background))
        assert high / low >= 3.0, (hue, share)


def _luminance(colour: str) -> float:
    parts = [byte / 255 for byte in bytes.fromhex(colour[1:])]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_charts_with_many_series_are_split_into_panels_and_those_with_few_are_not() -> None:
    two = make_layout({"a": [1, 2, 3], "b": [1, 2]})
    assert (two.kinds, two.levels, two.panels) == (("b",), ("a",), ())
    long = make_layout({"algorithm.name": ["x", "y", "z"], "federation.rounds": [1, 2], "privacy.mu": [1, 2, 3]})
    assert (long.kinds, long.panels) == (("algorithm.name",), ("federation.rounds",))
    many = make_layout({"algorithm.name": ["x", "y", "z"], "a": list(range(5)), "b": list(range(6)), "c": [1, 2]})
    assert (many.kinds, many.levels, many.panels) == (("algorithm.name",), ("c",), ("b", "a"))


def test_a_chart_note_counts_the_settings_that_are_not_drawn() -> None:
    results = swept("five axes")
    chart = charts_of(results)["test_loss"]
    assert len(chart.panels) == 12
    assert chart.note == f"The table has {len(axis_points(results.axes)) - len(chart.series)} more settings."


@pytest.mark.parametrize("name", SWEEPS)
def test_half_width_charts_of_a_page_come_in_pairs_after_the_full_width_ones(name: str) -> None:
    charts = list(charts_of(swept(name)).values())
    for several in (charts[:count] for count in range(len(charts) + 1)):
        laid = order_charts(several)
        whole = [is_whole for _, is_whole in laid]
        assert whole == sorted(whole, reverse=True)
        assert whole.count(False) % 2 == 0
        assert sorted(chart.key for chart, _ in laid) == sorted(chart.key for chart in several)


def test_series_and_panel_names_are_escaped_in_svg_charts() -> None:
    marks = [Mark(1, 1, "1 & 2"), Mark(2, math.nan, "none")]
    series = Series("<b>", nth_look(0), marks, published=[Mark(1, 2, "<u>")])
    drawing = draw_svg(chart_of(series, panel="<p>"))
    rows = draw_svg(chart_of(series, y_label="", rows=["<row>", "</svg>"]))
    assert not re.search("<[biuxyp]>", drawing)
    assert "<row>" not in rows
    assert rows.count("</svg>") == 1
    assert "&lt;b&gt;: 1 &amp; 2" in drawing
    assert drawing.count("<circle") == 2


def test_every_point_of_a_chart_has_a_tooltip_but_only_some_have_a_marker() -> None:
    drawing = draw_svg(chart_of(Series("s", nth_look(3), [Mark(t, t, str(t)) for t in range(30)])))
    assert drawing.count("data-tip") == 30
    assert 5 <= drawing.count('class="mark"') <= 6


def test_overlapping_tick_labels_are_left_out() -> None:
    ticks = [1.0, 1.01, 1.02, 4.0]
    series = Series("s", nth_look(0), [Mark(x, 1.0) for x in ticks])
    drawing = draw_svg(chart_of(series, log_x=True, ticks=ticks))
    assert re.findall(r'text-anchor="middle">([\d.]+)<', drawing) == ["1", "4"]


def test_curves_show_the_mean_over_seeds() -> None:
    history = [
        {"cell": place, "round": t, "test_loss": 2.0 + place + t, "test_accuracy": 0.1}
        for place in range(4) for t in (1, 2)
    ]  # fmt: skip
    chart = charts_of(results_of({"privacy.rho": [1.0, 4.0]}, [0, 1]), history)["test_loss"]
    assert [series.name for series in chart.series] == ["ρ = 1", "ρ = 4"]
    assert [(mark.x, mark.y) for mark in chart.series[1].marks] == [(1, 5.5), (2, 6.5)]
    assert chart.series[1].marks[0].spread == pytest.approx(math.sqrt(0.5))


def test_charts_and_series_without_data_points_are_left_out() -> None:
    results = swept("levels")
    assert "test_loss" not in charts_of(results, [])
    chart = charts_of(results, history_of(results)[:2])["test_loss"]
    assert [series.name for series in chart.series] == ["μ = 0.5"]
    assert chart.legend == []


def test_the_trade_off_curve_matches_gaussian_dp_at_the_mu_of_the_cell() -> None:
    series = charts_of(results_of({"privacy.rho": [1.0]}))["tradeoff"].series
    (curve,) = (curve for curve in series if curve.name == "μ = 1")
    normal = NormalDist()
    first, *inner, last = curve.marks
    assert ((first.x, first.y), (last.x, last.y)) == ((0.0, 1.0), (1.0, 0.0))
    for mark in inner:
        assert normal.inv_cdf(1 - mark.x) - normal.inv_cdf(mark.y) == pytest.approx(1.0)


def test_trade_off_curves_that_lie_on_the_axes_are_left_out_with_a_note() -> None:
    chart = charts_of(results_of({"privacy.rho": [1.0, 4.0, 8.0, 16.0]}))["tradeoff"]
    assert [series.name for series in chart.series] == ["blind guessing", "μ = 1", "μ = 4"]
    assert "Curves that lie on the axes are left out: μ = 8, 16." in chart.note
    assert "tradeoff" not in charts_of(results_of({"privacy.rho": [8.0, 16.0]}))


def test_published_values_are_hollow_markers_of_the_series_they_are_compared_with() -> None:
    paper = {
        "rows": "privacy.rho", "columns": "algorithm.trust", "test_accuracy": [[60.0, 70.0], [65.0, 75.0]],
        "row_values": [1.0, 4.0], "column_values": ["untrusted", "trusted"],
    }  # fmt: skip
    axes = {"privacy.rho": [1.0, 4.0], "algorithm.trust": TRUSTS}
    chart, *_ = make_charts(results_of(axes, paper=paper), [], None)
    assert [series.name for series in chart.legend] == TRUSTS
    assert chart.has_published
    assert [[mark.y for mark in series.published] for series in chart.series] == [[60.0, 65.0], [70.0, 75.0]]
    assert len(re.findall(r'class="hollow"', draw_svg(chart))) == 4


@pytest.mark.parametrize(
    ("schedule", "shown"),
    [
        (FixedOrder(40, 10), True),
        (FixedOrder(40, 40), True),
        (FixedOrder(45, 10), False),
        (ClientAvailability(40, 10, 4, 20), False),
    ],
)
def test_the_noise_chart_is_drawn_only_for_whole_passes_in_a_fixed_order(
    schedule: PublicOrder, shown: bool
) -> None:
    """Before: a run whose clients came when they could was shown with a third of its noise."""
    stream = ReleaseStream("silo 0", BinaryTree(), schedule, 1.0, (1.0,) * schedule.rounds, 1.0, "zero-out", 1.0)
    cell = {"releases": [stream_to_data(stream)], "silos": 1, "trust": "untrusted", "mu": stream.mu}
    assert bool(make_noise_charts([cell])) == shown


@pytest.mark.parametrize(
    ("change", "mu_factor"),
    [({"period": 10}, 2.0), ({"unit": make_unit("user", max_silos=4)}, 2.0)],
    ids=["a record in four periods", "a person in four silos"],
)
def test_no_noise_chart_is_drawn_if_a_unit_is_charged_for_several_periods_or_silos(
    change: dict[str, Any], mu_factor: float
) -> None:
    """Before: the noise of one period or silo was calibrated at the μ of all four, half of what they need."""
    one = ReleaseStream("silos 0-3", BinaryTree(), FixedOrder(40, 40), 1.0, (1.0,) * 40, 1.0, "zero-out", 1.0)
    schedule = FixedOrder(40, 10) if "period" in change else one.schedule
    stream = replace(one, mechanism=BinaryTree(period=change.get("period")), schedule=schedule, **change)
    one_mu = replace(stream, schedule=FixedOrder(40, 40)).mu
    cell = {"releases": [stream_to_data(stream)], "silos": 4, "trust": "untrusted", "mu": mu_factor * one_mu}
    assert make_noise_charts([cell]) == []


def test_the_noise_chart_of_masked_messages_shows_the_noise_of_their_mean() -> None:
    """Before: it showed the share of one silo, √M times the noise of the release of M silos."""
    stream = ReleaseStream("silos 0-3", BinaryTree(), FixedOrder(16, 16), 1.0, (1.0,) * 16, 1.0, "zero-out", 1.0)
    cell = {"releases": [stream_to_data(stream)], "silos": 4, "mu": 1.0}
    trusted, masked = (
        [[mark.y for mark in series.marks] for series in make_noise_charts([{**cell, "trust": trust}])[0].series]
        for trust in ("trusted", "secure-aggregation")
    )
    assert masked == [pytest.approx(values) for values in trusted]


@pytest.mark.slow
def test_a_privacy_chart_counts_the_settings_of_the_table_that_it_does_not_draw() -> None:
    """Before: a line that is left out counted as one setting, though it has one for each privacy level."""
    axes = {**SWEEPS["five axes"], "privacy.rho": [1.0, 2.0]}
    chart = charts_of(results_of(axes))["privacy"]
    drawn = sum(len(series.marks) for series in chart.series)
    assert chart.note == f"The table has {len(axis_points(axes)) - drawn} more settings."


@pytest.mark.parametrize("values", [(1e-17, 1e300), (5e-324, 1.0), (1.7e308, 1.7e308), (-1e308, 1e308)])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_values_near_the_ends_of_floating_point_have_an_axis(
    values: tuple[float, float], logarithmic: bool
) -> None:
    """Before: a diverging run beside a tiny excess risk ended a report in a ValueError."""
    scale = make_scale(values, 0.0, 1.0, logarithmic=logarithmic)
    assert all(0.0 <= scale.position(value) <= 1.0 for value in values)
    assert all(math.isfinite(tick) and format_tick(tick) for tick in scale.ticks(6))


def test_the_misses_of_a_trade_off_curve_are_rounded_down() -> None:
    """They are a lower bound: rounding up would promise more protection than there is."""
    series = charts_of(results_of({"privacy.rho": [1.0]}))["tradeoff"].series
    marks = next(curve for curve in series if curve.name == "μ = 1").marks
    assert all(float(mark.tooltip.rpartition(" ")[2]) <= mark.y for mark in marks)
