"""Results of `fedpriv.run` and `fedpriv.load`, frozen, with tables and figures for notebooks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from fedpriv.claims.outcome import MetricsMixin
from fedpriv.core.errors import InputError, refuse
from fedpriv.core.figures import format_count, format_upper, format_upper_delta
from fedpriv.data.given import to_record_array
from fedpriv.loss.imported import copy_with_parameters, make_trained_model
from fedpriv.loss.losses import FunctionLoss, PoissonLoss, predict_labels
from fedpriv.plan.task import ModelInputs, load_public_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.show.page import render_fragment, write_report
from fedpriv.show.plots import plot_run, render_svgs
from fedpriv.show.summary import extract_metrics, group_by, list_findings
from fedpriv.show.table import STYLES, Style, render_tables
from fedpriv.study.results import read_claims, read_history, read_results


@dataclass(frozen=True)
class Evaluation(MetricsMixin):
    """Metrics of the model after a round, most of them on the test records."""

    round: int
    """Number of the round, from 1."""
    metrics: Mapping[str, float]
    """Metrics by name, such as test_loss and test_accuracy (a share)."""


@dataclass(frozen=True)
class Privacy:
    """Privacy guarantee of a cell, computed from its releases.

    `fedpriv.accounting` has the conversions.

    Guarantee: `mu`, `zcdp`, and both ε at `delta` hold for neighbouring data sets under `relation` that differ in
    one `unit`, under the assumptions that results.json has as "holds", as long as the noise is secret.  If the
    sensitivity rests on more than clipping, as for phased-sgd, so do they: on the assumption about the loss that
    `RunResults.report` states.  For `noise` = "simulation" they hold for a deployment with the same settings and
    secret noise.  All four are None if the run adds no noise.
    """

    trust: str
    """Name of the trust setting, such as "untrusted"."""
    relation: str
    """Relation of neighbouring data sets, "replace-one" or "zero-out"."""
    unit: str
    """Description of the unit of protection, in which neighbours differ."""
    noise: str
    """Kind of noise: "simulation" (seeded, protects no record), "release" or "none"."""
    delta: float
    """δ of both ε."""
    mu: float | None
    """μ of Gaussian DP, exact or an upper bound, or None without noise or if the guarantee has no μ."""
    zcdp: float | None
    """ρ of zero-concentrated DP, μ²/2, or None without μ."""
    epsilon: float | None
    """ε at δ, converted exactly from μ or bounded by the accountant, or None without noise."""
    epsilon_paper: float | None
    """ε = μ²/2 + μ√(2 ln(1/δ)) of the papers' formula, or None without μ."""


@dataclass(frozen=True)
class Drawing:
    """Figure that a notebook shows inline."""

    name: str
    svg: str = field(repr=False)

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True, repr=False)
class CellResults(MetricsMixin):
    """Results of one sweep point with one seed."""

    point: Mapping[str, Any]
    """Swept values by dotted key."""
    seed: int
    """Seed of the cell, such as of the order of records and of simulated noise."""
    silos: int
    """Number of silos."""
    rounds: int
    """Number of rounds."""
    metrics: Mapping[str, float]
    """Metrics of the final model by name, most of them on the test records, such as "test_loss"."""
    gradient_evaluations: int
    """Number of gradients, or values, of single records over all silos, expected if records are sampled."""
    bytes_sent: int
    """Bytes of one silo's messages in all rounds and a first step, without headers, if it misses none."""
    fraction_clipped: float | None
    """Share of clipped increments, or None if they are not counted."""
    wall_seconds: float
    """Share of this cell in the run time of its group, plus the time of its first step, in seconds."""
    privacy: Privacy
    """Guarantee of the run, computed from its releases."""
    history: tuple[Evaluation, ...]
    """Evaluations after some rounds, in the order of rounds."""
    scenario: Mapping[str, Any]
    """Scenario of this cell alone, as plain data, with its defaults."""
    model_file: Path
    """File of the published model, a NumPy array (d,)."""
    module: nn.Module | None = field(default=None, compare=False)
    """Copy of the module that was given to `fedpriv.run`, as it was before training.

    None for a model that the scenario names, and for results that `fedpriv.load` read.
    """

    def __repr__(self) -> str:
        point_text = "".join(f"{key}={value!r}, " for key, value in self.point.items())
        metrics_text = "".join(f", {name}={value:.4g}" for name, value in self.metrics.items())
        return f"CellResults({point_text}seed={self.seed}, {self._privacy_text}{metrics_text})"

    @property
    def _privacy_text(self) -> str:
        epsilon, delta = self.privacy.epsilon, self.privacy.delta
        return ("no noise" if epsilon is None else f"epsilon={format_upper(epsilon)}") + (
            f" (all in delta={format_upper_delta(delta)})" if epsilon == 0.0 else ""
        )

    def model(self) -> NDArray[np.floating[Any]]:
        """Load the published model as a flat vector, (d,).

        Raises:
            InputError: The model file cannot be read.
        """
        try:
            vector: NDArray[np.floating[Any]] = np.load(self.model_file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{self.model_file}: cannot be read as a model ({error})") from None
        return vector

    def to_module(self) -> nn.Module:
        """Load the published model as a new torch module in evaluation mode.

        The module is a copy of the one that was given to `fedpriv.run`, or the scenario's model.  Softmax
        regression is a Linear layer on the features that the scenario names; `predict` computes these features.

        Raises:
            InputError: The model cannot be read or is no torch module, its data cannot be loaded, or
                `fedpriv.load` read the results of a program's own module, which this process did not give to
                `fedpriv.run`.
        """
        return (
            make_trained_model(load_public_task(self._resolve_cell()).objective, self.model()).module
            if self.module is None
            else copy_with_parameters(self.module, torch.from_numpy(self.model()))
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Load the published parameters by name, with any buffers, as torch saves them.

        Raises:
            InputError: `to_module` raises it.
        """
        return dict(self.to_module().state_dict())

    def predict(self, records: ArrayLike) -> NDArray[Any]:
        """Predict the class or the value of each record.

        Args:
            records: Records (n, …) as in the data set, without the model's own features.  Several inputs are a
                tuple.

        Returns:
            Classes (n,), or values for a regression; (n, …) if records have several labels.  Values of a table's
            target are in the unit of its column.  For a survival model, the loss "poisson" (logarithms of rates),
            or a loss that is the caller's own function, the model's outputs, without their last axis if that has
            length 1.

        Raises:
            InputError: The records do not have as many values as those of the data set, the model predicts
                nothing, such as column moments, or it or its data cannot be loaded.
        """
        inputs, task = ModelInputs.from_cell(self._resolve_cell()), load_public_task(self._resolve_cell())
        # Several labels of a test record lie behind its features.
        width = task.test.features.shape[1] - (int(np.prod(task.label_shape)) if task.label_shape else 0)
        try:
            features = inputs.compute_features(to_record_array(records))
            refuse({"another number of features": features.shape[1] != width}, ValueError)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise InputError(f"records: expected (n, …) as in the data set ({error})") from None
        trained = make_trained_model(task.objective, self.model())
        labels = np.asarray(predict_labels(trained.loss, trained.outputs(features)))
        schema = self._resolve_cell().data.table_schema
        return (
            labels
            if schema is None or isinstance(trained.loss, FunctionLoss | PoissonLoss)
            else schema.to_target_units(labels)
        )

    def _resolve_cell(self) -> Cell:
        """Resolve the scenario without the choice of its training records."""
        return resolve_cell(
            {
                **self.scenario,
                "data": {
                    key: value
                    for key, value in self.scenario["data"].items()
                    if key not in ("validation", "split", "spared")
                },
            },
            str(self.model_file.parents[1]),
        )


@dataclass(frozen=True, repr=False)
class RunResults:
    """Results of a run's folder, with its finished cells in the order of their numbers."""

    folder: Path
    name: str
    title: str
    engine: str
    complete: bool
    cells: tuple[CellResults, ...]
    differs: tuple[int, ...] = ()
    """Numbers of cells whose stored claim, releases and scenario contradict each other.

    `cells` has the claims of the releases.
    """

    @property
    def findings(self) -> tuple[str, ...]:
        """Sentences on a failure to learn, such as a model no better than a constant, and on unread records.

        Raises:
            InputError: The folder has no results that can be read any more.
        """
        return tuple(list_findings(read_results(self.folder)))

    def __repr__(self) -> str:
        state = ("DIFFERS, " if self.differs else "") + ("complete" if self.complete else "incomplete")
        summary = f"{self.name!r}, {format_count(len(self.cells), 'cell')}, {state}"
        return f"RunResults({summary}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        return render_fragment(read_claims(self.folder))

    def __iter__(self) -> Iterator[CellResults]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, index: int) -> CellResults:
        return self.cells[index]

    def rows(self) -> list[dict[str, Any]]:
        """Make a flat dictionary for each cell with its swept values, seed, metrics, privacy and costs."""
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
        """Convert `rows()` to a pandas DataFrame.

        Raises:
            InputError: pandas is not installed (extra: notebook).
        """
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise InputError("pandas is not installed; install it with: pip install 'fedpriv[notebook]'") from None
        return pandas.DataFrame(self.rows())

    def figures(self) -> dict[str, Drawing]:
        """Draw the figures of `fedpriv plot`, by name.  A notebook shows each of them inline.

        Raises:
            InputError: The folder has no results or no history, or damaged ones, or a damaged audit.
        """
        return {
            name: Drawing(name, svg) for name, svg in render_svgs(self.folder, read_claims(self.folder)).items()
        }

    def table(self, style: Style = "markdown") -> str:
        """Format measured and published values as tables.

        Args:
            style: "markdown", "csv" or "latex".

        Raises:
            InputError: The style is another one, or the folder has no results that can be read any more.
        """
        if style not in STYLES:
            raise InputError(f"style = {style!r}: known styles are {', '.join(STYLES)}")
        return render_tables(read_claims(self.folder), style)

    def plot(
        self, kinds: Sequence[str] = ("png", "svg"), *, with_title: bool = True, width: float | None = None
    ) -> list[Path]:
        """Draw the figures into folder/plots, and return the files.

        Args:
            kinds: Formats, each of png, svg and pdf.
            with_title: Whether run, settings and seeds stand above each figure.
            width: Width in inches, from 2 to 20, or None for one that fits the panels.

        Raises:
            InputError: No cell is finished, the folder or its audit cannot be read, or a format or the width is
                not allowed.
        """
        return plot_run(self.folder, kinds, with_title=with_title, width=width)

    def report(self, file: str | Path | None = None) -> Path:
        """Write a self-contained HTML report, and return its path.

        Args:
            file: Path of the report, or None for folder/report.html.

        Raises:
            InputError: No cell is finished, or the folder or its audit cannot be read.
        """
        return write_report(self.folder, None if file is None else Path(file))


def load_results(path: Path, module: nn.Module | None = None) -> RunResults:
    """Read the results in a run's folder.

    Args:
        path: The folder.
        module: Copy of the program's module before training, or None for a model that the scenario names.

    Raises:
        InputError: The folder has no results or no history, or they cannot be read.
    """
    results = read_claims(path)
    history = group_by(read_history(path), lambda line: line["cell"])
    return RunResults(
        path,
        results.name,
        results.title,
        results.engine,
        results.complete,
        tuple(_make_cell_results(path, cell, history.get(cell["cell"], ()), module) for cell in results.cells),
        results.differs,
    )


def _make_cell_results(
    folder: Path, record: Mapping[str, Any], lines: Iterable[Mapping[str, Any]], module: nn.Module | None
) -> CellResults:
    field_names = ("point", "seed", "silos", "rounds", "gradient_evaluations", "bytes_sent", "fraction_clipped")
    return CellResults(
        **{name: record[name] for name in (*field_names, "wall_seconds", "scenario")},
        metrics=extract_metrics(record),
        privacy=Privacy(**{name: record[name] for name in Privacy.__dataclass_fields__}),
        history=tuple(Evaluation(line["round"], extract_metrics(line)) for line in lines),
        model_file=folder / record["model"],
        module=module,
    )
