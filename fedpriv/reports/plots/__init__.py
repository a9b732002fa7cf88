"""Pictures of a run as PNG and SVG, the same bytes for the same results."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedpriv.errors import InputError
from fedpriv.files import write_bytes
from fedpriv.reports.plots.clipping import draw_clipping
from fedpriv.reports.plots.curves import draw_curves
from fedpriv.reports.plots.noise import draw_noise
from fedpriv.reports.plots.style import SETTINGS, write_powers
from fedpriv.reports.plots.tradeoff import draw_tradeoff, levels
from fedpriv.reports.summary import state_of
from fedpriv.sweep.claims import read_claims
from fedpriv.sweep.results import Results, read_history

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
