"""TensorBoard and MLflow as observers of a run; each needs an extra that is not installed by default."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from fedpriv.core.errors import InputError, RunError
from fedpriv.rounds.outcome import Finished, RunObserver
from fedpriv.scenario.load import Point, Scenario
from fedpriv.scenario.published import dotted


class TensorBoard(RunObserver):
    """TensorBoard runs, one for each cell, in a folder of `directory` that is named after its swept values."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer = _required("torch.utils.tensorboard", "TensorBoard", "tensorboard").SummaryWriter
        self._writers: dict[int, Any] = {}

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        self._writers = {
            place: self._writer(self._directory / scenario.name / _label(scenario.points[place]))
            for place in places
        }

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writers[place].add_scalar(name.replace("_", "/", 1), value, t)

    def ended(self) -> None:
        for writer in self._writers.values():
            writer.close()


class MLflow(RunObserver):
    """MLflow runs, one for each cell, in an experiment that is named after the scenario, at a tracking URI.

    A refusal by MLflow is a RunError of one line; results are kept in any case.
    """

    def __init__(self, uri: str) -> None:
        module = _required("mlflow", "MLflow", "mlflow")
        self._uri, self._error = uri, module.exceptions.MlflowException
        self._runs: dict[int, str] = {}
        with self._one_line():
            self._client = module.MlflowClient(tracking_uri=uri)

    def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
        with self._one_line():
            found = self._client.get_experiment_by_name(scenario.name)
            experiment = found.experiment_id if found else self._client.create_experiment(scenario.name)
            for place in places:
                point = scenario.points[place]
                run = self._client.create_run(experiment, run_name=_label(point)).info.run_id
                self._runs[place] = run
                for key, value in dotted(point.cell.canonical()):
                    self._client.log_param(run, key, value)

    def evaluated(self, place: int, t: int, metrics: Mapping[str, float]) -> None:
        with self._one_line():
            for name, value in metrics.items():
                self._client.log_metric(self._runs[place], name, value, step=t)

    def finished(self, place: int, finished: Finished) -> None:
        with self._one_line():
            self._client.set_terminated(self._runs.pop(place))

    def ended(self) -> None:
        with self._one_line():
            for run in self._runs.values():
                self._client.set_terminated(run, "KILLED")

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise RunError(f"MLflow at {self._uri}: {str(error).splitlines()[0]}") from None


def _required(module: str, name: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise InputError(f"{name} is not installed; install it with: pip install 'fedpriv[{extra}]'") from None


def _label(point: Point) -> str:
    """ "rho=4.0,silos=10,seed=0": the cell as the name of a folder."""
    swept = [f"{key.rpartition('.')[2]}={value}" for key, value in point.swept.items()]
    return ",".join([*swept, f"seed={point.cell.seed}"]).replace("/", "-")
