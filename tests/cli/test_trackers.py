"""TensorBoard and MLflow: what they are told, against stand-ins of their interfaces; absent, one line."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedpriv.claims.outcome import CellOutcome
from fedpriv.cli.progress import MLflow, TensorBoard
from fedpriv.core.errors import InputError, RunError
from fedpriv.scenario.load import Scenario, parse_scenario
from tests.conftest import small_tree


def scenario() -> Scenario:
    return parse_scenario({**small_tree(), "sweep": {"federation.silos": [1, 2]}}, "test")


FINISHED = CellOutcome({"test_loss": 2.0, "test_accuracy": 0.5}, None, 1.0, (), 0, np.zeros(2))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of the stand-ins, in order."""
    calls: list[tuple[Any, ...]] = []

    class MlflowException(Exception): ...  # noqa: N818 - its name in MLflow

    class SummaryWriter:
        def __init__(self, folder: Path) -> None:
            self.name = folder.name
            calls.append(("open", folder.name, folder.parent.name))

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            calls.append((self.name, tag, value, step))

        def close(self) -> None:
            calls.append(("close", self.name))

    class MlflowClient:
        def __init__(self, tracking_uri: str) -> None:
            if tracking_uri == "nowhere":
                raise MlflowException("no such store\nand more lines")
            calls.append(("uri", tracking_uri))

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            calls.append(("experiment", name))
            return "7"

        def create_run(self, experiment: str, run_name: str) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}:{run_name}"))

        def log_param(self, run: str, key: str, value: Any) -> None:
            if key == "federation.silos":
                calls.append((run, key, value))

        def log_metric(self, run: str, key: str, value: float, step: int) -> None:
            calls.append((run, key, value, step))

        def set_terminated(self, run: str, status: str = "FINISHED") -> None:
            calls.append((run, status))

    tensorboard, mlflow = ModuleType("torch.utils.tensorboard"), ModuleType("mlflow")
    tensorboard.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    mlflow.MlflowClient = MlflowClient  # type: ignore[attr-defined]
    mlflow.exceptions = SimpleNamespace(MlflowException=MlflowException)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return calls


def test_tensorboard_gets_curves_by_round_in_a_folder_a_cell(said: list[tuple[Any, ...]], tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.started(scenario(), [1], tmp_path)
    board.evaluated(1, 4, {"test_loss": 2.5, "test_accuracy": 0.25})
    board.ended()
    assert said == [
        ("open", "silos=2,seed=1", "small"),
        ("silos=2,seed=1", "test/loss", 2.5, 4),
        ("silos=2,seed=1", "test/accuracy", 0.25, 4),
        ("close", "silos=2,seed=1"),
    ]


def test_mlflow_gets_settings_curves_and_how_each_cell_ended(said: list[tuple[Any, ...]], tmp_path: Path) -> None:
    tracker = MLflow("http://localhost:5000")
    tracker.started(scenario(), [0, 1], tmp_path)
    tracker.evaluated(0, 4, {"test_loss": 2.5, "test_accuracy": 0.25})
    tracker.finished(0, FINISHED)
    tracker.ended()  # stopped: cell 1 is not finished
    first, second = "7:silos=1,seed=1", "7:silos=2,seed=1"
    assert said == [
        ("uri", "http://localhost:5000"),
        ("experiment", "small"),
        (first, "federation.silos", 1),
        (second, "federation.silos", 2),
        (first, "test_loss", 2.5, 4),
        (first, "test_accuracy", 0.25, 4),
        (first, "FINISHED"),
        (second, "KILLED"),
    ]


@pytest.mark.usefixtures("said")
def test_what_mlflow_refuses_is_one_line() -> None:
    with pytest.raises(RunError) as caught:
        MLflow("nowhere")
    assert str(caught.value) == "MLflow at nowhere: no such store"


@pytest.mark.parametrize(
    ("module", "make", "line"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoard(Path("tb")), r"pip install 'fedpriv\[tensorboard\]'"),
        ("mlflow", lambda: MLflow("x"), r"pip install 'fedpriv\[mlflow\]'"),
    ],
)
def test_an_extra_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, module: str, make: Any, line: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=line) as caught:
        make()
    assert "\n" not in str(caught.value)
