"""Files of charts: complete, with what was measured, the same bytes every time."""

import json
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedpriv.claims.entries import make_entry
from fedpriv.core.errors import InputError
from fedpriv.show.charts import Chart, Mark, Panel, Series, make_charts
from fedpriv.show.looks import nth_look
from fedpriv.show.plots import make_figure, plot_run, plot_title, render_svgs, save_chart
from fedpriv.study.results import Results
from tests.show.builders import results_of, table_of

EVALUATED = (150, 300, 450, 600)


def write(folder: Path, results: Results) -> Path:
    """`results` as a run's folder, with a history that ends at the figures of each cell."""
    tree = {
        "format": 1, "scenario": {"name": results.name, "title": results.title}, "axes": results.axes,
        "seeds": results.seeds, "published": results.published and results.published.to_data(), "scaling": None,
        "versions": {}, "rerun": results.rerun, "date": "2026-01-01 00:00 UTC", "engine": results.engine,
        "complete": results.complete, "cells": [make_entry(cell).recomputed_record for cell in results.cells],
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(tree), encoding="utf-8")
    history = "".join(json.dumps(line) + "\n" for line in history_of(results))
    (folder / "history.jsonl").write_text(history, encoding="utf-8")
    return folder


def history_of(results: Results) -> list[dict[str, Any]]:
    """Evaluations that go straight to each cell's figures."""
    return [line_of(cell, t) for cell in results.cells for t in EVALUATED]


def line_of(cell: Any, t: int) -> dict[str, Any]:
    done = t / EVALUATED[-1]
    metrics = {
        "test_loss": 2.3 - done * (2.3 - cell["test_loss"]),
        "test_accuracy": done * cell["test_accuracy"],
    }
    return {"cell": cell["cell"], **cell["point"], "seed": cell["seed"], "round": t, **metrics}


def size_of(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def charts_of(results: Results) -> dict[str, Chart]:
    return {chart.key: chart for chart in make_charts(results, history_of(results), None)}


def drawn(results: Results, *keys: str) -> Any:
    """The figure of the charts with these keys: of the curves, where none is named."""
    charts = charts_of(results)
    return make_figure([charts[key] for key in keys or ("test_loss", "test_accuracy")], plot_title(results))


def legend_texts(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


@pytest.mark.slow
def test_plotting_writes_png_and_svg_files_of_the_expected_sizes(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", table_of())
    stems = ("privacy", "curves", "clipped", "noise", "tradeoff")
    files = plot_run(folder)
    assert files == [folder / "plots" / f"{name}.{kind}" for name in stems for kind in ("png", "svg")]
    assert size_of(files[0]) == (1110, 645)  # 7.4 by 4.3 inches at 150 dpi
    assert size_of(files[2]) == (1620, 645)
    assert all(file.stat().st_size > 10_000 for file in files)
    assert b"<svg" in files[1].read_bytes()


@pytest.mark.slow
def test_plotting_the_same_results_twice_writes_identical_bytes(tmp_path: Path) -> None:
    first, second = (plot_run(write(tmp_path / name, table_of())) for name in ("a", "b"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    assert b"<dc:date>" not in first[1].read_bytes()


@pytest.mark.slow
def test_plotting_neither_changes_nor_follows_the_users_matplotlib_settings(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"axes.facecolor": "black"}):
        before = dict(matplotlib.rcParams)
        (dark, *_) = plot_run(write(tmp_path / "a", table_of()))
        assert dict(matplotlib.rcParams) == before
    (plain, *_) = plot_run(write(tmp_path / "b", table_of()))
    assert dark.read_bytes() == plain.read_bytes()  # a user's own settings do not change a figure


@pytest.mark.slow
def test_a_run_of_one_cell_has_three_plots_without_a_legend(tmp_path: Path) -> None:
    results = results_of({})
    files = plot_run(write(tmp_path / "run", results))
    assert {file.stem for file in files} == {"curves", "noise", "tradeoff"}  # one μ
    figure = drawn(results)
    assert figure.legends == []
    assert "one seed" in figure.get_suptitle()


def test_learning_curves_show_means_over_seeds_with_bands_of_one_standard_deviation() -> None:
    figure = drawn(table_of())
    loss, accuracy = figure.axes
    assert (loss.get_xlabel(), loss.get_ylabel()) == ("round", "test loss")
    assert accuracy.get_ylabel() == "test accuracy (%)"
    assert len(accuracy.lines) == len(accuracy.collections) == 4
    line = accuracy.lines[1]  # rho 4, silos 10: 69 % ± 1
    assert list(line.get_xdata()) == list(EVALUATED)
    assert list(line.get_ydata()) == pytest.approx([17.25, 34.5, 51.75, 69.0])
    edges = accuracy.collections[1].get_paths()[0].vertices
    at_the_end = edges[edges[:, 0] == 600, 1]
    assert (max(at_the_end), min(at_the_end)) == pytest.approx((70.0, 68.0))


def test_learning_curves_of_one_seed_have_no_band() -> None:
    assert [len(axes.collections) for axes in drawn(table_of(seeds=[1])).axes] == [0, 0]


def test_learning_curves_of_a_sweep_over_two_keys_differ_in_look_and_legend_by_both() -> None:
    figure = drawn(table_of())
    lines = figure.axes[0].lines
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines]
    assert len(set(looks)) == 4
    assert looks[0][2] == looks[1][2] == "-" != looks[2][2]  # ρ: hue and dashes
    assert looks[0][1] == looks[2][1] != looks[1][1]  # silos: shade and marker
    names = ["ρ = 4, silos 1", "ρ = 4, silos 10", "ρ = 8, silos 1", "ρ = 8, silos 10"]
    assert legend_texts(figure) == names


def test_runs_of_unequal_length_share_an_axis_in_percent() -> None:
    results = table_of(facts=lambda point: {"rounds": 600 * point["federation.silos"]})
    axes = drawn(results).axes[0]
    assert axes.get_xlabel() == "share of the rounds (%)"
    assert list(axes.lines[0].get_xdata()) == pytest.approx([25.0, 50.0, 75.0, 100.0])
    assert list(axes.lines[1].get_xdata()) == pytest.approx([2.5, 5.0, 7.5, 10.0])


def test_unfinished_cells_are_not_drawn() -> None:
    results = table_of()
    figure = drawn(replace(results, complete=False, cells=results.cells[:7]))  # the third point has one seed
    assert len(figure.axes[1].lines) == 3
    assert figure.axes[1].lines[2].get_ydata()[-1] == pytest.approx(73.0)  # seed 0 alone
    assert "INCOMPLETE: 7 of 12 cells" in figure.get_suptitle()


def test_the_accuracy_plot_over_rho_shows_measured_and_published_values() -> None:
    figure = drawn(table_of(), "privacy")
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "8"]
    assert legend_texts(figure) == ["silos 1", "silos 10", "published"]
    assert "untrusted server" in figure.get_suptitle()
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [list(line.get_ydata()) for line in hollow] == [[69.9, 70.2], [69.4, 70.0]]
    lines = [line for line in axes.lines if line not in hollow]
    assert [list(line.get_ydata()) for line in lines] == [pytest.approx([70.0, 74.0]), pytest.approx([69.0, 73.0])]
    assert list(lines[0].get_xdata()) == [4.0, 8.0]
    edges = axes.collections[0].get_paths()[0].vertices
    assert sorted(set(edges[:, 1])) == pytest.approx([69.0, 71.0, 73.0, 75.0])


def test_values_of_mu_that_differ_only_by_rounding_make_no_privacy_chart() -> None:
    axes = {"federation.silos": [1, 10]}
    results = results_of(axes, facts=lambda point: {"mu": 4.0 - 1e-13 * point["federation.silos"]})
    assert "privacy" not in charts_of(results)


def test_cells_without_noise_are_left_out_of_the_chart_of_accuracy_over_privacy() -> None:
    quiet = {"mu": None, "epsilon": None}
    results = table_of(facts=lambda point: quiet if point["federation.silos"] == 10 else {})
    assert legend_texts(drawn(results, "privacy")) == ["published"]


def test_the_chart_of_accuracy_over_privacy_uses_epsilon_if_a_guarantee_has_no_mu() -> None:
    results = table_of(facts=lambda point: {"mu": None} if point["federation.silos"] == 10 else {})
    figure = drawn(results, "privacy")
    (axes,) = figure.axes
    assert axes.get_xlabel() == "ε at δ = 1e-05 (smaller is more private)"
    assert legend_texts(figure) == ["silos 1", "silos 10", "published"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["24", "48"]


@pytest.mark.parametrize(
    ("key", "values", "label", "ticks"),
    [
        ("privacy.rho", [4.0, 8.0], "ρ", ["4", "8"]),
        ("privacy.epsilon", [1.0, 4.0], "ε at δ = 1e-05", ["1", "4"]),
        ("privacy.mu", [4.0, 8.0], "μ of Gaussian DP", ["4", "8"]),
        ("federation.silos", [1, 10], "μ of Gaussian DP", ["0.25", "1"]),
    ],
)
def test_the_privacy_axis_shows_the_quantity_swept_by_the_scenario(
    key: str, values: list[float], label: str, ticks: list[str]
) -> None:
    """Before, a sweep of ε = 1 and 4 was drawn over μ = 0.2681 and 0.9249."""

    def facts(point: Mapping[str, Any]) -> dict[str, Any]:
        mu = 0.25 if values.index(point[key]) == 0 else 1.0
        return {
            "mu": {"privacy.rho": 4.0 * 2 ** values.index(point[key])}.get(key, point[key] if "mu" in key else mu),
            "epsilon": point[key] if key == "privacy.epsilon" else 6.0,
        }

    (axes,) = drawn(results_of({key: values}, facts=facts), "privacy").axes
    assert axes.get_xlabel() == f"{label} (smaller is more private)"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ticks


def test_the_privacy_axis_shows_mu_if_epsilons_have_different_deltas() -> None:
    def facts(point: Mapping[str, Any]) -> dict[str, Any]:
        return {"mu": point["privacy.epsilon"] / 4, "delta": 10.0 ** -(4 + point["privacy.epsilon"])}

    (axes,) = drawn(results_of({"privacy.epsilon": [1.0, 4.0]}, facts=facts), "privacy").axes
    assert axes.get_xlabel().startswith("μ of Gaussian DP")


@pytest.mark.slow
def test_a_figure_for_a_paper_has_the_requested_width_and_no_title(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", table_of())
    files = plot_run(folder, ["pdf"], with_title=False, width=3.25)
    stems = ("privacy", "curves", "clipped", "noise", "tradeoff")
    assert files == [folder / "plots" / f"{name}.pdf" for name in stems]
    for file in files:
        box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", file.read_bytes())
        assert box is not None
        assert float(box[1]) == pytest.approx(72 * 3.25)
    figure = make_figure(list(charts_of(table_of()).values())[:1], None, 3.25)
    assert (figure.get_suptitle(), figure.get_supxlabel()) == ("", "")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_window_extent().width > 0.6 * figure.bbox.width  # the legend is below


@pytest.mark.slow
def test_a_figure_without_a_title_still_says_that_cells_are_missing(tmp_path: Path) -> None:
    """Guarantee: no option hides cells that are missing or whose claims differ."""
    results = replace(table_of(), complete=False, cells=table_of().cells[:7])
    folder = write(tmp_path / "run", results)
    (file, *_) = plot_run(folder, ["svg"], with_title=False)
    assert "INCOMPLETE: 7 of 12 cells" in re.sub(r"<!--|-->", "", file.read_text())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kinds": ["gif"]}, "--format gif: a figure is one of png, svg and pdf"),
        ({"width": 0.5}, "--width 0.5: expected inches, from 2 to 20, such as 3.25"),
        ({"width": float("nan")}, "--width nan: expected inches"),
        ({"width": 0.0}, "--width 0: expected inches"),  # before: a ValueError of matplotlib
    ],
)
def test_unsupported_plot_formats_and_widths_are_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    folder = write(tmp_path / "run", table_of())
    with pytest.raises(InputError, match=re.escape(said)):
        plot_run(folder, **options)
    assert not (folder / "plots").exists()


def test_plotting_a_run_without_a_finished_cell_is_refused(tmp_path: Path) -> None:
    empty = write(tmp_path / "run", table_of(figures=lambda point, seed: None))
    with pytest.raises(InputError, match="no finished cell to draw yet"):
        plot_run(empty)
    assert not (empty / "plots").exists()


@pytest.mark.slow
def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, fedpriv.show.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_sweep_over_algorithms_has_one_panel_for_each_number_of_rounds() -> None:
    axes = {
        "algorithm.name": ["dp-mu2-fl", "dp-sgd", "dp-ftrl", "tree-momentum"],
        "federation.rounds": [16, 60, 240],
        "privacy.mu": [0.3, 1.0],
    }
    results = results_of(
        axes, [0, 1], lambda point, seed: (2.25 + 0.01 * seed, 0.7),
        facts=lambda point: {"mu": point["privacy.mu"], "rounds": point["federation.rounds"]},
    )  # fmt: skip
    history = [
        {**line_of(cell, t), "round": t * cell["rounds"] // 600} for cell in results.cells for t in EVALUATED
    ]
    charts = {chart.key: chart for chart in make_charts(results, history, None)}
    for key in ("test_loss", "test_accuracy"):
        figure = make_figure([charts[key]])
        assert [axes.get_title() for axes in figure.axes] == ["rounds 16", "rounds 60", "rounds 240"]
        for axes, rounds in zip(figure.axes, (16, 60, 240), strict=True):
            assert len(axes.lines) == 8  # four algorithms, two μ
            assert max(axes.lines[0].get_xdata()) == rounds  # equal within a panel: rounds, not shares
        assert len(legend_texts(figure)) == 8
    assert len(charts["privacy"].panels) == 1
    assert len(charts["privacy"].series) == 12


def test_a_diverging_run_makes_the_loss_axis_logarithmic() -> None:
    results = table_of(figures=lambda point, seed: (2.2 if point["privacy.rho"] == 8.0 else 80.0, 0.5))
    assert [axes.get_yscale() for axes in drawn(results).axes] == ["log", "linear"]
    assert drawn(table_of()).axes[0].get_yscale() == "linear"


def test_the_clipped_fraction_chart_has_one_mark_for_each_sweep_point() -> None:
    results = table_of(facts=lambda point: {"fraction_clipped": 0.01 * point["federation.silos"]})
    (axes,) = drawn(results, "clipped").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["silos 1", "silos 10"]
    marks = [(x, round(y)) for line in axes.lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]
    assert marks == [(1.0, 0), (10.0, 1), (1.0, 0), (10.0, 1)]


@pytest.mark.parametrize("share", [0.0, 1.0, None], ids=["none", "all", "not told"])
def test_a_clipped_fraction_of_zero_one_or_none_has_no_chart(share: float | None) -> None:
    assert "clipped" not in charts_of(table_of(facts=lambda point: {"fraction_clipped": share}))


def test_the_noise_chart_shows_the_standard_deviation_that_accounting_gives() -> None:
    """Independent noise on 600 sums at μ = 4: 2√600 / 4 a release, a tenth of it in the mean of 100 silos."""
    figure = drawn(table_of(facts=lambda point: {"silos": 100}), "noise", "noise-in-mean")
    left, right = figure.axes
    assert legend_texts(figure)[:2] == ["independent, this run", "tree"]
    line = left.lines[0]
    assert line.get_xdata()[-1] == 600
    assert line.get_ydata()[-1] == pytest.approx(2 * 600**0.5 / 4)
    assert list(right.lines[0].get_xdata()) == pytest.approx([12.247, 1.2247, 0.12247], rel=1e-4)
    assert "4-GDP" in figure.get_supxlabel()


def test_a_run_without_noise_has_no_noise_or_trade_off_chart() -> None:
    charts = charts_of(table_of(facts=lambda point: {"mu": None}))
    assert not {"noise", "noise-in-mean", "tradeoff"} & charts.keys()


@pytest.mark.slow
def test_svg_charts_of_one_page_share_no_clip_path_identifiers(tmp_path: Path) -> None:
    """Ids that differ from figure to figure are referred to; equal ones define equal shapes."""
    results = table_of()
    texts = render_svgs(write(tmp_path / "run", results), results)
    assert list(texts) == ["privacy", "curves", "clipped", "noise", "tradeoff"]
    assert all(text.startswith("<svg") and text.rstrip().endswith("</svg>") for text in texts.values())
    clips = [set(re.findall(r'<clipPath id="(\w+)"', text)) for text in texts.values()]
    assert all(clips)
    assert [clips[0] & clips[1], clips[1] & clips[2]] == [set(), set()]


@pytest.mark.slow
@pytest.mark.parametrize("label", [r"$\frac{$", r"$\frac{1}{2}$ and $5", "$"])
def test_a_title_with_dollar_signs_is_drawn_as_plain_text_and_not_as_a_formula(tmp_path: Path, label: str) -> None:
    """Not as a formula, which a label like the first of these is none."""
    results = replace(table_of(), title=label)
    plot_run(write(tmp_path / "run", results))
    assert (tmp_path / "run" / "plots" / "noise.png").exists()
    assert all(label in svg or "<text" not in svg for svg in render_svgs(tmp_path / "run", results).values())


@pytest.mark.parametrize("name", ["_hidden", "<b>&\"'", "$x_{", "a\nb", "\\frac"])
def test_names_with_markup_or_formula_characters_are_drawn_verbatim(name: str) -> None:
    series = [Series(each, nth_look(place), [Mark(1, 1)]) for place, each in enumerate((name, "other"))]
    chart = Chart("k", name, name, name, [Panel(name, series)], name)
    figure = make_figure([chart], name)
    figure.draw_without_rendering()
    assert legend_texts(figure) == [" ".join(name.split()), "other"]


def test_logarithmic_axes_have_plain_numbers() -> None:
    figure = drawn(table_of(), "noise")
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    texts = {text.get_text() for text in [*axes.get_xticklabels(), *axes.get_yticklabels()]}
    assert {"1", "10", "100"} <= texts
    assert not any(set("$^{") & set(text) for text in texts)


def test_a_pdf_chart_has_no_creation_date(tmp_path: Path) -> None:
    """Before: the date of the drawing was in the file, so that no two files were the same."""
    series = Series("this run", nth_look(0), [Mark(1.0, 2.0), Mark(2.0, 3.0)])
    save_chart(Chart("key", "A chart", "x", "y", [Panel("", [series])]), tmp_path / "chart.pdf")
    assert b"/CreationDate" not in (tmp_path / "chart.pdf").read_bytes()
