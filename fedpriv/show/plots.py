"""Pictures of a run as PNG and SVG, the same bytes for the same results.

Loss and accuracy against the round, with bands over seeds.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpriv.core.errors import InputError
from fedpriv.core.files import write_bytes
from fedpriv.show.plot_style import (
    SETTINGS,
    entitle,
    explain,
    layout_of,
    look_of,
    name_panels,
    panels,
    write_powers,
)
from fedpriv.show.privacy_plots import draw_clipping, draw_noise, draw_tradeoff, levels
from fedpriv.show.summary import Metric, cells_at, points, shared_metrics, state_of, summarize
from fedpriv.study.results import Results, read_claims, read_history

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MARKS = 5  # on a curve, about
_WIDE_RANGE = 10.0  # from there on whatever is no share is drawn on a logarithmic axis


def draw_curves(results: Results, history: Sequence[Mapping[str, Any]]) -> dict[str, "Figure"]:
    """A line a sweep point, a band of ± one standard deviation over seeds.

    One figure "curves" with all metrics; where a sweep needs several panels, one for each, such as "loss".
    """
    drawn = shared_metrics(results)
    rows, columns = layout_of(results.axes).shape
    if rows * columns == 1:
        figure, grid = panels(4.7 * len(drawn), 4.2, 1, len(drawn))
        for axes, metric in zip(grid[0], drawn, strict=True):
            _fill([[axes]], results, history, metric)
        _finish(figure, results)
        return {"curves": figure}
    figures = {}
    for metric in drawn:
        figure, grid = panels(1.9 + 2.9 * columns, 1.0 + 2.5 * rows, rows, columns, share=True)
        _fill(grid, results, history, metric)
        name_panels(grid, results, layout_of(results.axes))
        _finish(figure, results)
        figures[metric.key.removeprefix("test_")] = figure
    return figures


def _finish(figure: "Figure", results: Results) -> None:
    entitle(figure, results)
    explain(figure, results, layout_of(results.axes))


def _fill(
    grid: Sequence[Sequence["Axes"]], results: Results, history: Sequence[Mapping[str, Any]], metric: Metric
) -> None:
    layout = layout_of(results.axes)
    for row, along in enumerate(grid):
        for column, axes in enumerate(along):
            here = [point for point in points(results) if layout.panel_of(point) == (row, column)]
            _panel(axes, results, here, history, metric)
    _scale(grid[0][0], metric, history)


def _panel(
    axes: "Axes",
    results: Results,
    here: Sequence[Mapping[str, Any]],
    history: Sequence[Mapping[str, Any]],
    metric: Metric,
) -> None:
    """The lines of some sweep points; runs of unequal length share the axis as shares of their rounds."""
    layout = layout_of(results.axes)
    rounds = {cell["cell"]: cell["rounds"] for point in here for cell in cells_at(results, point)}
    equal = len(set(rounds.values())) <= 1
    for rank, point in enumerate(here):
        ids = {cell["cell"] for cell in cells_at(results, point)}
        lines = [
            (line["round"] * (1 if equal else 100 / rounds[line["cell"]]), line)
            for line in history
            if line["cell"] in ids
        ]
        if lines:
            _curve(axes, lines, metric, look_of(layout, point), rank)
    axes.set_xlabel("round" if equal else "share of the rounds (%)")
    axes.set_ylabel(metric.title)
    axes.set_xlim(left=0)


def _curve(
    axes: "Axes",
    lines: Sequence[tuple[float, Mapping[str, Any]]],
    metric: Metric,
    look: Mapping[str, Any],
    rank: int,
) -> None:
    """Mean and band of history lines, given with the place of each on the x axis; `rank` staggers the markers."""
    by_place: dict[float, list[Mapping[str, Any]]] = {}
    for place, line in lines:
        by_place.setdefault(place, []).append(line)
    places = sorted(by_place)
    summaries = [found for place in places if (found := summarize(by_place[place], metric))]
    step = max(1, len(places) // _MARKS)
    axes.plot(places, [each.mean for each in summaries], markevery=(rank % step, step), **look)
    if any(each.std for each in summaries):
        low = [each.mean - (each.std or 0.0) for each in summaries]
        high = [each.mean + (each.std or 0.0) for each in summaries]
        axes.fill_between(places, low, high, color=look["color"], alpha=0.13, linewidth=0)


def _scale(axes: "Axes", metric: Metric, history: Sequence[Mapping[str, Any]]) -> None:
    """One diverging run must not flatten all others; shared y axes follow the first panel's."""
    values = [line[metric.key] for line in history if metric.key in line]
    if metric.key != "test_accuracy" and values and max(values) > _WIDE_RANGE * min(values) > 0.0:
        axes.set_yscale("log")


_DPI = 150


def plot_run(folder: Path) -> list[Path]:
    """Draw what a run's finished cells allow into folder/plots; returns the files written.

    | figure | when |
    |---|---|
    | curves, or loss and accuracy | always |
    | privacy | μ, or ε where a cell has no μ, varies, and there is an accuracy |
    | clipped | silos tell how much they clip, and clip something |
    | noise | there is a guarantee |

    InputError if the folder holds no run, or one without a finished cell.
    """
    results = read_claims(folder)
    if not results.cells:
        raise InputError(f"{folder}: no finished cell to draw yet; wait for one, or go on with --resume")
    with _our_settings():
        figures = figures_of(folder, results)
        return [path for name, figure in figures.items() for path in _written(figure, folder / "plots", name)]


def draw(make: Callable[[], "Figure"], folder: Path, name: str) -> list[Path]:
    """Make a figure of one's own in our style and write it as folder/`name`.png and .svg; returns both paths."""
    with _our_settings():
        return _written(make(), folder, name)


def _written(figure: "Figure", folder: Path, name: str) -> list[Path]:
    paths = {kind: folder / f"{name}.{kind}" for kind in ("png", "svg")}
    for kind, path in paths.items():
        write_bytes(path, _rendered(figure, kind, name))
    return list(paths.values())


def svgs_of(folder: Path, results: Results) -> dict[str, str]:
    """The same figures as SVG texts by name, without an XML prologue; ids of different figures differ."""
    with _our_settings():
        texts = {
            name: _rendered(figure, "svg", name).decode() for name, figure in figures_of(folder, results).items()
        }
    return {name: text[text.index("<svg") :] for name, text in texts.items()}


def clipped_svg(results: Results) -> str | None:
    """The figure of what was clipped alone; None where nothing was, or silos do not tell."""
    if not any(cell["fraction_clipped"] for cell in results.cells):
        return None
    with _our_settings():
        text = _rendered(draw_clipping(results), "svg", "clipped").decode()
    return text[text.index("<svg") :]


def figures_of(folder: Path, results: Results) -> dict[str, "Figure"]:
    """Every figure that the finished cells allow, by name."""
    figures = draw_curves(results, list(read_history(folder)))
    if len(levels(results)) > 1 and all("test_accuracy" in cell for cell in results.cells):
        figures["privacy"] = draw_tradeoff(results)
    if any(cell["fraction_clipped"] for cell in results.cells):
        figures["clipped"] = draw_clipping(results)
    if (noise := draw_noise(results.cells, state_of(results))) is not None:
        figures["noise"] = noise
    return figures


def _rendered(figure: "Figure", kind: str, name: str) -> bytes:
    """The figure as a file's bytes: without a date, and with ids made from its name."""
    from matplotlib import rc_context

    write_powers(figure)
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


@contextmanager
def _our_settings() -> Iterator[None]:
    """A user's matplotlibrc must not change a figure, and drawing must not change the user's settings."""
    from matplotlib import rc_context, rcdefaults, rcParams

    with rc_context():
        rcdefaults()
        rcParams.update(SETTINGS)
        yield
