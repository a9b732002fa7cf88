"""Pictures: that they are there, hold what was measured, and are the same bytes every time."""

import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedpriv.core.errors import InputError
from fedpriv.rounds.entries import entry_of
from fedpriv.show.plot_style import layout_of, write_powers
from fedpriv.show.plots import draw_curves, plot_run, svgs_of
from fedpriv.show.privacy_plots import draw_clipping, draw_noise, draw_tradeoff
from fedpriv.study.results import Results

Make = Callable[..., Results]
EVALUATED = (150, 300, 450, 600)
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write(folder: Path, results: Results) -> Path:
    """`results` as a run's folder, with a history that ends at the figures of each cell."""
    tree = {
        "format": 1,
        "scenario": {"name": results.name, "title": results.title},
        "axes": results.axes,
        "seeds": results.seeds,
        "published": results.published and results.published.as_data(),
        "engine": results.engine,
        "complete": results.complete,
        "cells": [entry_of(cell).recomputed for cell in results.cells],
    }
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(tree), encoding="utf-8")
    with (folder / "history.jsonl").open("w", encoding="utf-8") as file:
        for cell in results.cells:
            for t in EVALUATED:
                file.write(json.dumps(line_of(cell, t)) + "\n")
    return folder


def line_of(cell: Any, t: int) -> dict[str, Any]:
    done = t / EVALUATED[-1]
    return {
        "cell": cell["cell"],
        **cell["point"],
        "seed": cell["seed"],
        "round": t,
        "test_loss": 2.3 - done * (2.3 - cell["test_loss"]),
        "test_accuracy": done * cell["test_accuracy"],
    }


def size_of(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data.startswith(SIGNATURE)
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def curves(results: Results) -> Any:
    return draw_curves(results, [line_of(cell, t) for cell in results.cells for t in EVALUATED])["curves"]


def legend_texts(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_files_and_their_sizes(tmp_path: Path, make_table: Make) -> None:
    folder = write(tmp_path / "run", make_table())
    names = [f"{name}.{kind}" for name in ("curves", "privacy", "clipped", "noise") for kind in ("png", "svg")]
    files = plot_run(folder)
    assert files == [folder / "plots" / name for name in names]
    assert size_of(files[0]) == (1410, 630)  # 9.4 by 4.2 inches at 150 dpi
    assert size_of(files[2]) == (1110, 690)
    assert all(file.stat().st_size > 10_000 for file in files)
    assert b"<svg" in files[1].read_bytes()


def test_the_same_bytes_every_time(tmp_path: Path, make_table: Make) -> None:
    first, second = (plot_run(write(tmp_path / name, make_table())) for name in ("a", "b"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    assert b"<dc:date>" not in first[1].read_bytes()


def test_drawing_leaves_settings_alone(tmp_path: Path, make_table: Make) -> None:
    import matplotlib

    with matplotlib.rc_context({"axes.facecolor": "black"}):
        before = dict(matplotlib.rcParams)
        (dark, *_) = plot_run(write(tmp_path / "a", make_table()))
        assert dict(matplotlib.rcParams) == before
    (plain, *_) = plot_run(write(tmp_path / "b", make_table()))
    assert dark.read_bytes() == plain.read_bytes()  # a user's own settings do not change a figure


def test_a_single_cell(tmp_path: Path, make_results: Make) -> None:
    results = make_results({}, [0], lambda point, seed: (2.25, 0.7))
    files = plot_run(write(tmp_path / "run", results))
    assert {file.stem for file in files} == {"curves", "clipped", "noise"}  # one μ: no trade-off to show
    figure = curves(results)
    assert figure.legends == []
    assert "one seed" in figure.get_suptitle()


def test_curves_are_means_with_bands(make_table: Make) -> None:
    figure = curves(make_table())
    loss, accuracy = figure.axes
    assert (loss.get_xlabel(), loss.get_ylabel()) == ("round", "test loss")
    assert accuracy.get_ylabel() == "test accuracy (%)"
    assert len(accuracy.lines) == len(accuracy.collections) == 4
    line = accuracy.lines[1]  # rho 4, silos 10: 69 % ± 1
    assert list(line.get_xdata()) == list(EVALUATED)
    assert list(line.get_ydata()) == pytest.approx([17.25, 34.5, 51.75, 69.0])
    edges = accuracy.collections[1].get_paths()[0].vertices
    assert max(edges[edges[:, 0] == 600, 1]) == pytest.approx(70.0)
    assert min(edges[edges[:, 0] == 600, 1]) == pytest.approx(68.0)


def test_one_seed_has_no_band(make_table: Make) -> None:
    figure = curves(make_table(seeds=[1]))
    assert [len(axes.collections) for axes in figure.axes] == [0, 0]


def test_colour_and_line_style_tell_the_axes_apart(make_table: Make) -> None:
    lines = curves(make_table()).axes[0].lines
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines]
    assert len(set(looks)) == 4
    assert looks[0][:2] == looks[2][:2] != looks[1][:2]  # silos: colour and marker
    assert looks[0][2] == looks[1][2] != looks[2][2]  # rho: line style
    assert legend_texts(curves(make_table())) == ["silos", "1", "10", "ρ", "4", "8"]


def test_many_values_of_one_axis_stay_distinct(make_results: Make) -> None:
    results = make_results({"federation.silos": list(range(1, 13))}, [0], lambda point, seed: (2.25, 0.7))
    looks = {(line.get_color(), line.get_marker()) for line in curves(results).axes[0].lines}
    assert len(looks) == 12


def test_runs_of_unequal_length_share_an_axis_in_percent(make_table: Make) -> None:
    results = make_table(facts=lambda point: {"rounds": 600 * point["federation.silos"]})
    axes = curves(results).axes[0]
    assert axes.get_xlabel() == "share of the rounds (%)"
    assert list(axes.lines[0].get_xdata()) == pytest.approx([25.0, 50.0, 75.0, 100.0])
    assert list(axes.lines[1].get_xdata()) == pytest.approx([2.5, 5.0, 7.5, 10.0])


def test_unfinished_cells_are_not_drawn(make_table: Make) -> None:
    results = make_table()
    history = [line_of(cell, t) for cell in results.cells for t in EVALUATED]
    fewer = replace(results, complete=False, cells=results.cells[:7])  # of the third point one seed of three
    figure = draw_curves(fewer, history)["curves"]
    assert len(figure.axes[1].lines) == 3
    assert figure.axes[1].lines[2].get_ydata()[-1] == pytest.approx(73.0)  # seed 0 alone
    assert "INCOMPLETE: 7 of 12 cells" in figure.get_suptitle()


def test_accuracy_against_privacy(make_table: Make) -> None:
    figure = draw_tradeoff(make_table())
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "8"]
    assert legend_texts(figure) == ["silos", "1", "10", "published"]
    assert "untrusted server" in figure.get_suptitle()
    lines = [container.lines[0] for container in axes.containers]
    assert [list(line.get_ydata()) for line in lines] == [pytest.approx([70.0, 74.0]), pytest.approx([69.0, 73.0])]
    assert list(lines[0].get_xdata()) == pytest.approx([4.0, 8.0], rel=0.02)  # moved aside by a hair
    _, _, (bars,) = axes.containers[0].lines
    assert [segment[:, 1] for segment in bars.get_segments()] == [
        pytest.approx([69.0, 71.0]),
        pytest.approx([73.0, 75.0]),
    ]
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [list(line.get_ydata()) for line in hollow] == [[69.9, 70.2], [69.4, 70.0]]


def test_trust_has_its_line_style_and_other_axes_their_lines(make_results: Make) -> None:
    axes = {
        "algorithm.trust": ["untrusted", "trusted"],
        "privacy.rho": [4.0, 8.0],
        "federation.batch": [1, 5],
    }
    figure = draw_tradeoff(make_results(axes, [0, 1], lambda point, seed: (2.25, 0.7)))
    lines = [container.lines[0] for container in figure.axes[0].containers]
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines]
    (plain, dashed), (other, other_dashed) = (looks[0], looks[2]), (looks[1], looks[3])
    assert plain[:2] == dashed[:2] != other[:2] == other_dashed[:2]  # batch: colour and marker
    assert [look[2] for look in looks] == ["-", "-", "--", "--"]
    assert all(len(line.get_xdata()) == 2 for line in lines)
    assert legend_texts(figure) == ["batch", "1", "5", "trust", "untrusted", "trusted"]


def test_rounding_of_mu_is_not_a_second_value(tmp_path: Path, make_results: Make) -> None:
    axes = {"federation.silos": [1, 10]}
    results = make_results(
        axes, [0], lambda p, s: (2.25, 0.7), facts=lambda p: {"mu": 4.0 - 1e-13 * p["federation.silos"]}
    )
    assert "privacy" not in {file.stem for file in plot_run(write(tmp_path / "run", results))}


def test_cells_without_noise_are_left_out_of_the_trade_off(make_table: Make) -> None:
    quiet = {"mu": None, "epsilon": None}
    results = make_table(facts=lambda point: quiet if point["federation.silos"] == 10 else {})
    assert len(draw_tradeoff(results).axes[0].containers) == 1


def test_where_a_guarantee_has_no_mu_the_trade_off_is_drawn_in_epsilon(make_table: Make) -> None:
    results = make_table(facts=lambda point: {"mu": None} if point["federation.silos"] == 10 else {})
    (axes,) = draw_tradeoff(results).axes
    assert axes.get_xlabel() == "ε at the scenario's δ (smaller is more private)"
    assert len(axes.containers) == 2
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["24", "48"]


def test_nothing_to_draw(tmp_path: Path, make_table: Make) -> None:
    empty = write(tmp_path / "run", make_table(figures=lambda point, seed: None))
    with pytest.raises(InputError, match="no finished cell to draw yet"):
        plot_run(empty)
    assert not (empty / "plots").exists()


@pytest.mark.slow
def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, fedpriv.show.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


STUDY = {
    "algorithm.name": ["dp-mu2-fl", "dp-sgd", "dp-ftrl", "tree-momentum"],
    "federation.rounds": [16, 60, 240],
    "privacy.mu": [0.3, 1.0],
}


def study(make_results: Make) -> Results:
    return make_results(
        STUDY,
        [0, 1],
        lambda point, seed: (2.25 + 0.01 * seed, 0.7),
        facts=lambda point: {"mu": point["privacy.mu"], "rounds": point["federation.rounds"]},
    )


def test_a_study_of_algorithms_has_a_colour_each_and_a_panel_for_the_rest(make_results: Make) -> None:
    results = study(make_results)
    history = [
        {**line_of(cell, t), "round": t * cell["rounds"] // 600} for cell in results.cells for t in EVALUATED
    ]
    figures = draw_curves(results, history)
    assert list(figures) == ["loss", "accuracy"]
    for figure in figures.values():
        assert [axes.get_title() for axes in figure.axes] == ["rounds 16", "rounds 60", "rounds 240"]
        for axes, rounds in zip(figure.axes, (16, 60, 240), strict=True):
            assert len(axes.lines) == 8  # four algorithms, two μ
            assert max(axes.lines[0].get_xdata()) == rounds  # equal within a panel: rounds, not shares
        assert legend_texts(figure)[:5] == ["algorithm", *STUDY["algorithm.name"]]
    trade = draw_tradeoff(results)
    assert len(trade.axes) == 1
    assert len(trade.axes[0].containers) == 12


def test_few_lines_share_a_panel_and_many_get_columns_then_rows() -> None:
    two = layout_of({"a": [1, 2, 3], "b": [1, 2]})
    assert (two.colours, two.shape) == ("a", (1, 1))
    long = layout_of({"algorithm.name": ["x", "y", "z"], "federation.rounds": [1, 2], "privacy.mu": [1, 2, 3]})
    assert (long.columns, long.rows, len(long.styles)) == ("federation.rounds", None, 3)
    many = layout_of({"algorithm.name": ["x", "y", "z"], "a": list(range(5)), "b": list(range(6)), "c": [1, 2]})
    assert (many.colours, many.columns, many.rows) == ("algorithm.name", "b", "a")
    assert many.styles == [{"c": 1}, {"c": 2}]
    assert many.panel_of({"algorithm.name": "y", "a": 3, "b": 4, "c": 1}) == (3, 4)


def test_a_diverging_run_makes_the_loss_logarithmic(make_table: Make) -> None:
    results = make_table(figures=lambda point, seed: (2.2 if point["privacy.rho"] == 8.0 else 80.0, 0.5))
    loss, accuracy = curves(results).axes
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")
    assert curves(make_table()).axes[0].get_yscale() == "linear"


def test_the_fraction_clipped_is_a_mark_a_point(make_table: Make) -> None:
    results = make_table(facts=lambda point: {"fraction_clipped": 0.01 * point["federation.silos"]})
    (axes,) = draw_clipping(results).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ρ = 4", "ρ = 8"]
    marks = [(float(c.lines[0].get_xdata()[0]), round(float(c.lines[0].get_ydata()[0]))) for c in axes.containers]
    assert marks == [(1.0, 0), (10.0, 0), (1.0, 1), (10.0, 1)]
    nothing = draw_clipping(make_table(facts=lambda point: {"fraction_clipped": 0.0})).axes[0]
    assert nothing.get_xlim() == (0.0, 1.0)


def test_silos_that_do_not_tell_have_no_figure_of_clipping(tmp_path: Path, make_table: Make) -> None:
    results = make_table(facts=lambda point: {"fraction_clipped": None})
    assert "clipped" not in {file.stem for file in plot_run(write(tmp_path / "run", results))}


def test_noise_is_what_accounting_gives_for_the_run(make_table: Make) -> None:
    """Independent noise on 600 sums at μ = 4: 2√600 / 4 a release, a tenth of it in the mean of 100 silos."""
    cells = make_table(facts=lambda point: {"silos": 100}).cells
    figure = draw_noise(cells)
    assert figure is not None
    left, right = figure.axes
    by_name = {line.get_label(): line for line in left.lines}
    assert list(by_name)[:2] == ["independent, this run", "tree"]
    line = by_name["independent, this run"]
    assert line.get_xdata()[-1] == 600
    assert line.get_ydata()[-1] == pytest.approx(2 * 600**0.5 / 4)
    assert list(right.lines[0].get_xdata()) == pytest.approx([12.247, 1.2247, 0.12247], rel=1e-4)
    assert "4-GDP" in figure.get_suptitle()


def test_a_run_without_noise_has_no_figure_of_it(make_table: Make) -> None:
    assert draw_noise(make_table(facts=lambda point: {"mu": None}).cells) is None


def test_svgs_can_stand_on_one_page(tmp_path: Path, make_table: Make) -> None:
    """Ids that differ from figure to figure are referred to; equal ones define equal shapes."""
    results = make_table()
    texts = svgs_of(write(tmp_path / "run", results), results)
    assert list(texts) == ["curves", "privacy", "clipped", "noise"]
    assert all(text.startswith("<svg") and text.rstrip().endswith("</svg>") for text in texts.values())
    clips = [set(re.findall(r'<clipPath id="(\w+)"', text)) for text in texts.values()]
    assert all(clips)
    assert not clips[0] & clips[1]
    assert not clips[1] & clips[2]


@pytest.mark.parametrize("label", [r"$\frac{$", r"$\frac{1}{2}$ and $5", "$"])
def test_a_label_with_dollars_is_drawn_as_it_is(tmp_path: Path, make_table: Make, label: str) -> None:
    """Not as a formula, which a label like the first of these is none."""
    results = replace(make_table(), title=label)
    plot_run(write(tmp_path / "run", results))
    assert (tmp_path / "run" / "plots" / "noise.png").exists()
    assert all(label in svg or "<text" not in svg for svg in svgs_of(tmp_path / "run", results).values())


def test_logarithmic_axes_have_plain_numbers(make_table: Make) -> None:
    figure = draw_noise(make_table().cells)
    assert figure is not None
    write_powers(figure)
    figure.draw_without_rendering()
    texts = {
        text.get_text() for axes in figure.axes for text in [*axes.get_xticklabels(), *axes.get_yticklabels()]
    }
    assert any("10" in text and set(text) & set("⁰¹²³⁴⁵⁶⁷⁸⁹⁻") for text in texts)
    assert not any("$" in text or "{" in text or "^" in text for text in texts)
