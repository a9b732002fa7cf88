"""The cell that runs now, as a line on the terminal: where it is, its ε, its loss, how its accuracy went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from fedpriv.accounting.gdp import epsilon_of
from fedpriv.figures import epsilon_words
from fedpriv.scenario import Cell, Point

_BARS = "▁▂▃▄▅▆▇█"
_WIDEST = 30


@dataclass
class Current:
    """What was heard of the cell at `place`."""

    place: int
    words: str
    privacy: str
    metric: str = ""
    latest: str = ""
    values: list[float] = field(default_factory=list)

    @staticmethod
    def of(place: int, point: Point) -> "Current":
        values = [f"{key.rpartition('.')[2]} {value}" for key, value in point.swept.items()]
        return Current(place, ", ".join([*values, f"seed {point.cell.seed}"]), privacy_words(point.cell))

    def heard(self, t: int, metrics: Mapping[str, float]) -> None:
        """An evaluation after round t: the sparkline is of the accuracy, of the loss where there is none."""
        self.metric = "test_accuracy" if "test_accuracy" in metrics else "test_loss"
        self.values.append(metrics[self.metric])
        accuracy = f", {100 * metrics['test_accuracy']:.1f} %" if "test_accuracy" in metrics else ""
        self.latest = f"round {t}: loss {metrics['test_loss']:.4f}{accuracy}"

    def line(self, width: int) -> Text:
        """One line of at most `width` characters; the sparkline goes first where there is no room."""
        text = f"{self.words} · {self.privacy} · {self.latest}"
        room = min(_WIDEST, width - len(text) - 2)
        drawn = Text(text, style="dim", no_wrap=True, overflow="ellipsis")
        return drawn.append(f" {sparkline(self.values, room)}", style="cyan") if room > 3 else drawn


def privacy_words(cell: Cell) -> str:
    """The ε that the cell's target gives at its δ."""
    target, delta = cell.privacy.target, cell.privacy.delta
    return "no noise" if target is None else epsilon_words(epsilon_of(target, delta), delta, 3)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars between their least and their largest."""
    shown = values[-width:] if width > 0 else []
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in shown)
