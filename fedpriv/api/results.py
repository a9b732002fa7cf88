"""Results of `fedpriv.run` and `fedpriv.load`: frozen, and shown as tables and figures in a notebook."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from fedpriv.claims.outcome import MetricsMixin
from fedpriv.core.errors import InputError
from fedpriv.core.figures import format_count, format_upper, format_upper_delta
from fedpriv.data.given import to_record_array
from fedpriv.loss.imported import TrainedModel, copy_with_parameters, make_trained_model
from fedpriv.loss.losses import predict_labels
from fedpriv.plan.task import ModelInputs, load_public_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.show.page import render_fragment, write_report
from fedpriv.show.plots import plot_run, render_svgs
from fedpriv.show.summary import extract_metrics, group_by
from fedpriv.show.table import STYLES, Style, render_tables
from fedpriv.study.results import read_claims, read_history


@dataclass(frozen=True)
class Evaluation(MetricsMixin):
    """The test set after one round; the accuracy is a share, 0 … 1."""

    round: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Privacy:
    """What a cell guarantees, computed from what it released; see `fedpriv.accounting` for the conversions.

    Guarantee: it holds for neighbouring data sets under `relation` that differ in one `unit`.  `mu`, `zcdp`,
    `epsilon` (exact) and `epsilon_paper` (ε = μ²/2 + μ√(2 ln(1/δ))) are None if the run adds no noise.
    """

    trust: str
    relation: str
    unit: str
    noise: str
    """"simulation" (seeded: protects nobody), "release" or "none"."""
    delta: float
    mu: float | None
    zcdp: float | None
    epsilon: float | None
    epsilon_paper: float | None


@dataclass(frozen=True)
class Drawing:
    """A figure that a notebook shows by itself."""

    name: str
    svg: str = field(repr=False)

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True, repr=False)
class CellResults(MetricsMixin):
    """One sweep point with one seed."""

    point: Mapping[str, Any]
    """Swept values by dotted key."""
    seed: int
    silos: int
    rounds: int
    metrics: Mapping[str, float]
    """On the test set at the end: "test_loss", "test_accuracy" (a share), and what else the objective knows."""
    gradient_evaluations: int
    """Gradients of single records, of all silos."""
    bytes_sent: int
    """By each silo, in all rounds."""
    fraction_clipped: float | None
    """Share of the increments that were clipped; None where silos do not tell."""
    wall_seconds: float
    privacy: Privacy
    history: tuple[Evaluation, ...]
    scenario: Mapping[str, Any]
    """The resolved scenario as plain data."""
    model_file: Path
    module: nn.Module | None = field(default=None, compare=False)
    """The module that the calling program gave, untrained; None where the scenario names a model."""

    def __repr__(self) -> str:
        where = "".join(f"{key}={value!r}, " for key, value in self.point.items())
        metrics = "".join(f", {name}={value:.4g}" for name, value in self.metrics.items())
        return f"CellResults({where}seed={self.seed}, {self._privacy_text}{metrics})"

    @property
    def _privacy_text(self) -> str:
        epsilon, delta = self.privacy.epsilon, self.privacy.delta
        if epsilon is None:
            return "no noise"
        where = f" (all in delta={format_upper_delta(delta)})" if epsilon == 0.0 else ""
        return f"epsilon={format_upper(epsilon)}{where}"

    def model(self) -> NDArray[np.floating[Any]]:
        """The published model, flat: shape (d,)."""
        try:
            vector: NDArray[np.floating[Any]] = np.load(self.model_file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{self.model_file}: cannot be read as a model ({error})") from None
        return vector

    def to_module(self) -> nn.Module:
        """The published model as a torch module in evaluation mode, a new one with every call.

        It is the module that was given to `fedpriv.run`, or the scenario's model: softmax regression is a Linear
        layer on the features that the scenario names (`predict` makes them).
        """
        own = self.module
        return (
            self._load_trained().module
            if own is None
            else copy_with_parameters(own, torch.from_numpy(self.model()))
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The published parameters by name, as torch saves them."""
        return dict(self.to_module().state_dict())

    def predict(self, records: ArrayLike) -> NDArray[Any]:
        """The class of each record (n,), or its value where the model is a regression; (n, …) of several labels.

        Records are (n, …) as the data set has them, before the model's own features are computed; several inputs
        are a tuple.  A loss that is a function of one's own leaves the outputs as they are.
        """
        features, trained = (
            ModelInputs.from_cell(self._resolve_cell()).compute_features(to_record_array(records)),
            self._load_trained(),
        )
        found: NDArray[Any] = predict_labels(trained.loss, trained.outputs(features)).numpy()
        return found

    def _resolve_cell(self) -> Cell:
        return resolve_cell(self.scenario, str(self.model_file.parents[1]))

    def _load_trained(self) -> TrainedModel:
        return make_trained_model(load_public_task(self._resolve_cell()).objective, self.model())


@dataclass(frozen=True, repr=False)
class RunResults:
    """What a run left in its folder: every finished cell, in the order of the scenario."""

    folder: Path
    name: str
    title: str
    engine: str
    complete: bool
    cells: tuple[CellResults, ...]
    differs: tuple[int, ...] = ()
    """Cells whose record claims another privacy than their releases give, which is what is told here."""

    def __repr__(self) -> str:
        state = ("DIFFERS, " if self.differs else "") + ("complete" if self.complete else "incomplete")
        of = f"{self.name!r}, {format_count(len(self.cells), 'cell')}, {state}"
        return f"RunResults({of}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        return render_fragment(read_claims(self.folder))

    def __iter__(self) -> Iterator[CellResults]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, place: int) -> CellResults:
        return self.cells[place]

    def rows(self) -> list[dict[str, Any]]:
        """A flat dictionary for every cell: swept values, seed, metrics, privacy, cost."""
        return [
            {
                **cell.point,
                "seed": cell.seed,
                **cell.metrics,
                **{name: getattr(cell.privacy, name) for name in ("mu", "epsilon", "delta", "relation", "trust")},
                **{
                    name: getattr(cell, name) for name in ("silos", "rounds", "gradient_evaluations", "bytes_sent")
                },
                "wall_seconds": cell.wall_seconds,
            }
            for cell in self.cells
        ]

    def to_pandas(self) -> Any:
        """`rows()` as a pandas DataFrame; InputError if pandas is not installed (extra: notebook)."""
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise InputError("pandas is not installed; install it with: pip install 'fedpriv[notebook]'") from None
        return pandas.DataFrame(self.rows())

    def figures(self) -> dict[str, Drawing]:
        """What `fedpriv plot` draws, by name; a notebook shows each of them inline."""
        return {
            name: Drawing(name, svg) for name, svg in render_svgs(self.folder, read_claims(self.folder)).items()
        }

    def table(self, style: Style = "markdown") -> str:
        """Measured beside published, as "markdown", "csv" or "latex"; InputError for another style."""
        if style not in STYLES:
            raise InputError(f"style = {style!r}: known styles are {', '.join(STYLES)}")
        return render_tables(read_claims(self.folder), style)

    def plot(self) -> list[Path]:
        """Draw into folder/plots; returns the files."""
        return plot_run(self.folder)

    def report(self, file: str | Path | None = None) -> Path:
        """Write one self-contained HTML file, folder/report.html by default; returns it."""
        return write_report(self.folder, None if file is None else Path(file))


def load_results(path: Path, module: nn.Module | None = None) -> RunResults:
    """Read the results in a run's folder; `module` is the one that it trained.  InputError if there are none."""
    results = read_claims(path)
    history = group_by(read_history(path), lambda line: line["cell"])
    cells = tuple(_make_cell_results(path, cell, history.get(cell["cell"], ()), module) for cell in results.cells)
    return RunResults(path, results.name, results.title, results.engine, results.complete, cells, results.differs)


def _make_cell_results(
    folder: Path, record: Mapping[str, Any], lines: Iterable[Mapping[str, Any]], module: nn.Module | None
) -> CellResults:
    own = ("point", "seed", "silos", "rounds", "gradient_evaluations", "bytes_sent", "fraction_clipped")
    return CellResults(
        **{name: record[name] for name in (*own, "wall_seconds", "scenario")},
        metrics=extract_metrics(record),
        privacy=Privacy(**{name: record[name] for name in Privacy.__dataclass_fields__}),
        history=tuple(Evaluation(line["round"], extract_metrics(line)) for line in lines),
        model_file=folder / record["model"],
        module=module,
    )
