"""Pictures: that they are there, hold what was measured, and are the same bytes every time."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedpriv.errors import InputError
from fedpriv.reports import plot
from fedpriv.reports.plot import plot_run
from fedpriv.reports.results import Results

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
        "cells": results.cells,
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
    return plot._curves(results, [line_of(cell, t) for cell in results.cells for t in EVALUATED])


def legend_texts(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_files_and_their_sizes(tmp_path: Path, make_table: Make) -> None:
    folder = write(tmp_path / "run", make_table())
    names = ["curves.png", "curves.svg", "privacy.png", "privacy.svg"]
    files = plot_run(folder)
    assert files == [folder / "plots" / name for name in names]
    assert size_of(files[0]) == (1410, 630)  # 9.4 by 4.2 inches at 150 dpi
    assert size_of(files[2]) == (960, 720)
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
    assert [file.name for file in files] == ["curves.png", "curves.svg"]  # one μ: no trade-off to show
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
    assert legend_texts(curves(make_table())) == ["silos", "1", "10", "rho", "4", "8"]


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
    figure = plot._curves(fewer, history)
    assert len(figure.axes[1].lines) == 3
    assert figure.axes[1].lines[2].get_ydata()[-1] == pytest.approx(73.0)  # seed 0 alone
    assert "INCOMPLETE: 7 of 12 cells" in figure.get_suptitle()


def test_accuracy_against_privacy(make_table: Make) -> None:
    figure = plot._privacy(make_table())
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "8"]
    assert legend_texts(figure) == ["1 silo, untrusted server", "10 silos, untrusted server", "published"]
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
    figure = plot._privacy(make_results(axes, [0, 1], lambda point, seed: (2.25, 0.7)))
    lines = [container.lines[0] for container in figure.axes[0].containers]
    looks = {container.get_label(): line for container, line in zip(figure.axes[0].containers, lines, strict=True)}
    assert sorted(looks) == [
        "100 silos, batch 1, trusted server",
        "100 silos, batch 1, untrusted server",
        "100 silos, batch 5, trusted server",
        "100 silos, batch 5, untrusted server",
    ]
    styles = {label.split(", ")[-1]: line.get_linestyle() for label, line in looks.items()}
    assert styles == {"untrusted server": "-", "trusted server": "--"}
    assert all(len(line.get_xdata()) == 2 for line in lines)


def test_rounding_of_mu_is_not_a_second_value(tmp_path: Path, make_results: Make) -> None:
    axes = {"federation.silos": [1, 10]}
    results = make_results(
        axes, [0], lambda p, s: (2.25, 0.7), facts=lambda p: {"mu": 4.0 - 1e-13 * p["federation.silos"]}
    )
    assert [file.stem for file in plot_run(write(tmp_path / "run", results))] == ["curves", "curves"]


def test_cells_without_noise_are_left_out_of_the_trade_off(make_table: Make) -> None:
    results = make_table(facts=lambda point: {"mu": None} if point["federation.silos"] == 10 else {})
    assert legend_texts(plot._privacy(results)) == ["1 silo, untrusted server", "published"]


def test_nothing_to_draw(tmp_path: Path, make_table: Make) -> None:
    empty = write(tmp_path / "run", make_table(figures=lambda point, seed: None))
    with pytest.raises(InputError, match="no finished cell to draw yet"):
        plot_run(empty)
    assert not (empty / "plots").exists()


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, fedpriv.reports.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
