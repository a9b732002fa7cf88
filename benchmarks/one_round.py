"""One round as a reader meets it: the figure of docs/architecture.md, and the files that a round goes through.

    python -m benchmarks.one_round           writes docs/figures/one-round.svg, then lists both rounds below
    python -m benchmarks.one_round --list    lists alone

A round of a simulation is all that is called from one `Silo.answer` of a run of one silo to the next; a round of a
guard is one `Guard.answer` after the first.  Both are listed by file, with the functions that were entered, their
lines and the lines of the file.
"""

import argparse
import io
import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import fedpriv
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import make_release_streams
from fedpriv.core.files import write_text
from fedpriv.engines.inprocess import run_inprocess
from fedpriv.engines.table import make_engine
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.noise.trust import Trust
from fedpriv.plan.plan import make_plan
from fedpriv.scenario.load import load_scenario, resolve_cell
from fedpriv.server.app import run_cell
from fedpriv.silo.silo import Silo
from fedpriv.study.results import RunFolder
from fedpriv.study.stored import privacy_data
from fedpriv.study.sweep import run_sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUT = Path(__file__).resolve().parents[1] / "docs" / "figures" / "one-round.svg"

BEFORE, EACH, AFTER = "before round 1", "every round, at every silo", "afterwards"
_BANDS = {BEFORE: "#eef5fb", EACH: "#fdf2ea", AFTER: "#eef7f2"}
_INK, _FAINT, _LINE = "#1a1a1a", "#555555", "#0072b2"
_WIDTH, _ROW, _HEAD = 640.0, 38.0, 74.0  # points
_LANES, _LANE = 22.0, 30.0


class Step(NamedTuple):
    """When it happens, what it is, and which function it is."""

    when: str
    words: str
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """`module:function`, from the folder of its room."""
        return f"{self.function.__module__.removeprefix('fedpriv.')}:{self.function.__qualname__}"

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]


STEPS = (
    Step(BEFORE, "the file is read, overridden and swept", load_scenario),
    Step(BEFORE, "every cell is validated", resolve_cell),
    Step(BEFORE, "the missing cells are looked for", run_sweep),
    Step(BEFORE, "the engine is made", make_engine),
    Step(BEFORE, "the plan: parts, clips, noise; a silo builds the same", make_plan),
    Step(BEFORE, "the noise for the target, from the sensitivity", Trust.calibrate_noise),
    Step(BEFORE, "it goes through the cells", run_inprocess),
    Step(BEFORE, "the server starts a cell", run_cell),
    Step(EACH, "a silo answers a query", Silo.answer),
    Step(EACH, "clipped increments of the round's records", SoftmaxRegression.increment),
    Step(AFTER, "what was spent, read off the parts that computed", make_release_streams),
    Step(AFTER, "the cell is written", RunFolder.finished),
    Step(AFTER, "its statement, from what was released", privacy_data),
    Step(AFTER, "the claim, recomputed", compute_claim),
    Step(AFTER, "results.json is written", RunFolder.ended),
)
"""In the order of their first calls by a run on the in-process engine."""


def svg() -> str:
    """The figure: a line through the rooms, a row a step; text stays text, on a light ground in any theme."""
    from matplotlib import rc_context, rcdefaults
    from matplotlib.figure import Figure

    height = _HEAD + _ROW * len(STEPS) + 8.0
    with rc_context():
        rcdefaults()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "one-round"}):
            figure = Figure(figsize=(_WIDTH / 72, height / 72), facecolor="#ffffff")
            axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0.0, _WIDTH), ylim=(height, 0.0))
            axes.set_axis_off()
            _draw(axes)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    lines = file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _draw(axes: "Axes") -> None:
    rooms = list(dict.fromkeys(step.room for step in STEPS))
    across = {room: _LANES + _LANE * place for place, room in enumerate(rooms)}
    text = across[rooms[-1]] + 24.0
    middle = [_HEAD + _ROW * (place + 0.5) for place in range(len(STEPS))]
    for when, colour in _BANDS.items():
        there = [y for y, step in zip(middle, STEPS, strict=True) if step.when == when]
        axes.axhspan(there[0] - _ROW / 2, there[-1] + _ROW / 2, color=colour, linewidth=0)
        axes.text(_WIDTH - 10, there[0] - 3, when, fontsize=9, color=_FAINT, ha="right", style="italic")
    for room, x in across.items():
        axes.plot([x, x], [_HEAD, middle[-1] + _ROW / 2], color="#c8c8c8", linewidth=1.0)
        axes.text(x + 2, _HEAD - 6, room, fontsize=10, color=_INK, rotation=45, rotation_mode="anchor")
    way = [across[step.room] for step in STEPS]
    axes.plot(way, middle, color=_LINE, linewidth=2.0, marker="o", markersize=7, solid_joinstyle="round")
    for y, (place, step) in zip(middle, enumerate(STEPS, 1), strict=True):
        axes.text(text, y - 3, f"{place}. {step.words}", fontsize=10.5, color=_INK)
        axes.text(text, y + 11, step.name, fontsize=9, color=_FAINT, family="monospace")


ROOT = OUT.parents[2]
_SCENARIO: dict[str, Any] = {
    "name": "one-round",
    "seed": 1,
    "data": {"name": "synthetic"},
    "federation": {"silos": 1, "rounds": 4},
    "algorithm": {"name": "dp-mu2-fl", "trust": "untrusted", "diameter": 0.1},
    "privacy": {"relation": "replace-one", "rho": 4.0},
    "run": {"evaluations": 1, "dtype": "float64"},
}


def entered(run: Callable[[], Any], first: CodeType) -> dict[CodeType, None]:
    """Functions of fedpriv entered from the second call of `first` to the third, or to the end of `run`."""
    calls, found = 0, dict[CodeType, None]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        if event != "call":
            return
        calls += frame.f_code is first
        if calls == 2 and frame.f_code.co_filename.startswith(_SHIPPED):
            found.setdefault(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


_SHIPPED = tuple(f"{ROOT / room}{os.sep}" for room in ("fedpriv", "server", "clients"))


def simulated_round(folder: Path) -> dict[CodeType, None]:
    """Functions that a round of a simulation in process enters."""
    return entered(lambda: fedpriv.run(_SCENARIO, engine="inprocess", out=folder / "run"), Silo.answer.__code__)


def guarded_round(folder: Path) -> dict[CodeType, None]:
    """Functions that a guard's answer to round 2 enters, from the query to the ledger and the release."""
    from benchmarks.record_guards import query_of
    from fedpriv.silo.guard import Guard
    from tests.attacks.guards import guard_for, random_records

    cell = json.dumps(
        resolve_cell({**_SCENARIO, "federation": {"silos": 3, "rounds": 4}}, "one round").canonical_data()
    )
    guard = guard_for(folder, *random_records(), budget=100.0)

    def ask() -> None:
        for t in (1, 2, 3):
            guard.answer("run", cell, t, query_of(7850, t).to(torch.float64))

    return entered(ask, Guard.answer.__code__)


def listing(title: str, codes: dict[CodeType, None]) -> str:
    """A line a file, in the order in which it is first entered, and their number."""
    by_file: dict[str, list[CodeType]] = defaultdict(list)
    for code in codes:
        by_file[str(Path(code.co_filename).relative_to(ROOT))].append(code)
    lines = [f"{title}: {len(by_file)} files"]
    for name, there in by_file.items():
        inside = {line for code in there for *_, line in code.co_lines() if line}
        whole = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        functions = ", ".join(dict.fromkeys(code.co_qualname.split(".<")[0] for code in there))
        lines.append(f"  {name}: {len(inside)} of {whole} lines: {functions}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="leave the figure as it is")
    if not parser.parse_args().list:
        write_text(OUT, svg())
        print(OUT)
    with tempfile.TemporaryDirectory() as folder:
        print(listing("a round of a simulation", simulated_round(Path(folder))))
        print(listing("a round of a guard", guarded_round(Path(folder))))


if __name__ == "__main__":
    main()
