"""Trackers of experiments: TensorBoard, MLflow, and Weights & Biases.

A tracker stores a run for each cell that is computed, and `TrackerObserver` drives it by the events of the cells.
Each tracker needs an extra of the package, which is not installed by default.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fedpriv.claims.outcome import CellOutcome, RunObserver
from fedpriv.core.errors import InputError, RunError
from fedpriv.scenario.load import Scenario, SweepPoint
from fedpriv.scenario.published import flatten_keys


class Tracker(Protocol):
    """Store of runs with their settings, and with curves of metrics by round."""

    name: str
    """Name and place of the store in error messages."""
    errors: tuple[type[Exception], ...]
    """Errors of the store, which are reported in one line."""

    def begin(self, experiment: str, name: str, settings: Mapping[str, Any]) -> Any:
        """Begin a run of an experiment, and return its handle."""

    def log(self, run: Any, metrics: Mapping[str, float], t: int) -> None:
        """Store metrics after round t."""

    def end(self, run: Any, *, finished: bool) -> None:
        """End a run, which its cell has finished or not."""


class TrackerObserver(RunObserver):
    """Observer that stores each cell of a run in a tracker.

    The experiment has the scenario's name.  An error of `Tracker.errors` is raised as a RunError of one line.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._runs: dict[int, Any] = {}

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        """Begin a run for each cell, with the cell's keys as settings."""
        with self._translate_errors():
            for place in places:
                point = scenario.points[place]
                self._runs[place] = self._tracker.begin(
                    scenario.name, _run_name(point), dict(flatten_keys(point.cell.canonical_data()))
                )

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        with self._translate_errors():
            self._tracker.log(self._runs[place], metrics, t)

    def finished(self, place: int, finished: CellOutcome) -> None:
        with self._translate_errors():
            self._tracker.end(self._runs.pop(place), finished=True)

    def ended(self) -> None:
        with self._translate_errors():
            for run in self._runs.values():
                self._tracker.end(run, finished=False)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except self._tracker.errors as error:
            raise RunError(
                f"{self._tracker.name}: {(str(error).splitlines() or [type(error).__name__])[0]}"
            ) from None


class TensorBoard:
    """Curves for TensorBoard in the folder directory/SCENARIO/CELL."""

    name: str = "TensorBoard"
    errors: tuple[type[Exception], ...] = ()

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._writer = _import_extra("torch.utils.tensorboard", "TensorBoard", "tensorboard").SummaryWriter

    def begin(self, experiment: str, name: str, settings: Mapping[str, Any]) -> Any:
        return self._writer(self._directory / experiment / name)

    def log(self, run: Any, metrics: Mapping[str, float], t: int) -> None:
        for name, value in metrics.items():
            run.add_scalar(name.replace("_", "/", 1), value, t)

    def end(self, run: Any, *, finished: bool) -> None:
        run.close()


_mlflow_name = partial(re.compile(r"[^/\w.\- ]").sub, "-")


class MLflow:
    """Runs of MLflow at a tracking URI.

    In the name of a parameter or metric, a dash replaces characters that MLflow may refuse, such as "=".  A
    parameter's value of more than 500 characters is cut to these, with "…" at its end.
    """

    def __init__(self, uri: str) -> None:
        module = _import_extra("mlflow", "MLflow", "mlflow")
        self.name: str = f"MLflow at {uri}"
        self.errors: tuple[type[Exception], ...] = (module.exceptions.MlflowException,)
        self._experiments: dict[str, Any] = {}
        self._make_client = partial(module.MlflowClient, tracking_uri=uri)

    @cached_property
    def _client(self) -> Any:
        """Client, made at first use, so that an error is one of a call to the store."""
        return self._make_client()

    def begin(self, experiment: str, name: str, settings: Mapping[str, Any]) -> Any:
        """Begin a run with its settings as parameters, and return MLflow's id of the run.

        An experiment that the store lacks is created.
        """
        if experiment not in self._experiments:
            stored = self._client.get_experiment_by_name(experiment)
            self._experiments[experiment] = (
                stored.experiment_id if stored else self._client.create_experiment(experiment)
            )
        run = self._client.create_run(self._experiments[experiment], run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(
                run, _mlflow_name(key), value if len(text := str(value)) <= 500 else f"{text[:499]}…"
            )
        return run

    def log(self, run: Any, metrics: Mapping[str, float], t: int) -> None:
        for name, value in metrics.items():
            self._client.log_metric(run, _mlflow_name(name), value, step=t)

    def end(self, run: Any, *, finished: bool) -> None:
        self._client.set_terminated(run, "FINISHED" if finished else "KILLED")


class WeightsAndBiases:
    """Runs of Weights & Biases in a project, with a group for each scenario."""

    def __init__(self, project: str) -> None:
        self._module, self._project = _import_extra("wandb", "Weights & Biases", "wandb"), project
        self.name: str = f"Weights & Biases, project {project}"
        self.errors: tuple[type[Exception], ...] = (self._module.errors.Error,)

    def begin(self, experiment: str, name: str, settings: Mapping[str, Any]) -> Any:
        return self._module.init(
            project=self._project, group=experiment, name=name, config=dict(settings), reinit="create_new"
        )

    def log(self, run: Any, metrics: Mapping[str, float], t: int) -> None:
        run.log(dict(metrics), step=t)

    def end(self, run: Any, *, finished: bool) -> None:
        run.finish(exit_code=0 if finished else 1)


TRACKERS: Mapping[str, Callable[[str], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}
"""Trackers by the names of their options and extras."""


def make_tracker(name: str, place: str) -> TrackerObserver:
    """Make the observer of a tracker.

    Args:
        name: Name of the tracker, of `TRACKERS`.
        place: Its folder, URI or project.

    Raises:
        InputError: The extra of the tracker is not installed.
    """
    return TrackerObserver(TRACKERS[name](place))


def _import_extra(module: str, name: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise InputError(f"{name} is not installed; install it with: pip install 'fedpriv[{extra}]'") from None


def _run_name(point: SweepPoint) -> str:
    """Format a cell's swept values and seed as the name of a run, such as "rho=4.0,silos=10,seed=0"."""
    return ",".join(
        f"{key.rpartition('.')[2]}={value}"
        for key, value in (*point.swept_values.items(), ("seed", point.cell.seed))
    ).replace("/", "-")
