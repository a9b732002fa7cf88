"""TensorBoard, MLflow and Weights & Biases: what they are told, against stand-ins; absent, one line."""

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedpriv.addons.trackers import make_tracker
from fedpriv.claims.outcome import CellOutcome
from fedpriv.core.errors import InputError, RunError
from fedpriv.scenario.load import Scenario, parse_scenario
from tests.conftest import small_tree
from tests.doc_pages import ROOT


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
            if not re.fullmatch(r"[/\w.\- ]*", key):
                raise MlflowException(f"Invalid parameter name: {key!r}")
            if len(str(value)) > 500:
                raise MlflowException(
                    f"Param value {value!r} had length {len(str(value))}, above the limit of 500"
                )
            if key == "federation.silos" or key.startswith("label"):
                calls.append((run, key, value))

        def log_metric(self, run: str, key: str, value: float, step: int) -> None:
            if not re.fullmatch(r"[/\w.\- ]*", key):
                raise MlflowException(f"Invalid metric name: {key!r}")
            calls.append((run, key, value, step))

        def set_terminated(self, run: str, status: str = "FINISHED") -> None:
            calls.append((run, status))

    class WandbError(Exception): ...

    class WandbRun:
        def __init__(self, label: str) -> None:
            self.label = label

        def log(self, metrics: dict[str, float], step: int) -> None:
            calls.extend((self.label, name, value, step) for name, value in metrics.items())

        def finish(self, exit_code: int) -> None:
            calls.append((self.label, "KILLED" if exit_code else "FINISHED"))

    def init(*, project: str, group: str, name: str, config: dict[str, Any], reinit: str) -> WandbRun:
        if project in ("nowhere", ""):
            raise WandbError("no key\nand more lines" if project else "")
        assert reinit == "create_new"  # a run of another cell stays open
        label = f"{project}/{group}:{name}"
        calls.append((label, "federation.silos", config["federation.silos"]))
        return WandbRun(label)

    wandb = ModuleType("wandb")
    wandb.init, wandb.errors = init, SimpleNamespace(Error=WandbError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tensorboard, mlflow = ModuleType("torch.utils.tensorboard"), ModuleType("mlflow")
    tensorboard.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    mlflow.MlflowClient = MlflowClient  # type: ignore[attr-defined]
    mlflow.exceptions = SimpleNamespace(MlflowException=MlflowException)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return calls


def test_tensorboard_receives_curves_by_round_in_one_folder_for_each_cell(
    said: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    board = make_tracker("tensorboard", str(tmp_path))
    board.started(scenario(), [1], tmp_path)
    board.evaluated(1, 4, {"test_loss": 2.5, "test_accuracy": 0.25})
    board.ended()
    assert said == [
        ("open", "silos=2,seed=1", "small"),
        ("silos=2,seed=1", "test/loss", 2.5, 4),
        ("silos=2,seed=1", "test/accuracy", 0.25, 4),
        ("close", "silos=2,seed=1"),
    ]


@pytest.mark.parametrize(
    ("name", "place", "begun"),
    [
        ("mlflow", "http://localhost:5000", [("uri", "http://localhost:5000"), ("experiment", "small")]),
        ("wandb", "project", []),
    ],
)
def test_mlflow_and_wandb_receive_settings_curves_and_final_status_of_each_cell(
    said: list[tuple[Any, ...]], tmp_path: Path, name: str, place: str, begun: list[tuple[str, str]]
) -> None:
    tracker = make_tracker(name, place)
    tracker.started(scenario(), [0, 1], tmp_path)
    tracker.evaluated(0, 4, {"test_loss": 2.5, "test_accuracy": 0.25})
    tracker.finished(0, FINISHED)
    tracker.ended()  # stopped: cell 1 is not finished
    top = {"mlflow": "7", "wandb": "project/small"}[name]
    first, second = f"{top}:silos=1,seed=1", f"{top}:silos=2,seed=1"
    assert said == [
        *begun,
        (first, "federation.silos", 1),
        (second, "federation.silos", 2),
        (first, "test_loss", 2.5, 4),
        (first, "test_accuracy", 0.25, 4),
        (first, "FINISHED"),
        (second, "KILLED"),
    ]


def test_mlflow_receives_names_without_the_characters_that_it_refuses(
    said: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    """Before: [evaluation.curves] by groups, or a column "age (years)", ended a run with --mlflow."""
    tracker = make_tracker("mlflow", "http://localhost:5000")
    tracker.started(parse_scenario({**small_tree(), "label": {"age (years)": 3}}, "test"), [0], tmp_path)
    tracker.evaluated(0, 4, {"test_auc_of_sex=Male": 0.75})
    assert ("7:seed=1", "label.age -years-", 3) in said
    assert said[-1] == ("7:seed=1", "test_auc_of_sex-Male", 0.75, 4)


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mlflow", "MLflow at nowhere: no such store"),
        ("wandb", "Weights & Biases, project nowhere: no key"),
    ],
)
def test_a_tracker_connection_error_is_reported_in_one_line(name: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        make_tracker(name, "nowhere").started(scenario(), [0], tmp_path)
    assert str(caught.value) == line


@pytest.mark.usefixtures("said")
def test_a_tracker_error_without_a_message_is_reported_by_its_type(tmp_path: Path) -> None:
    """Before: IndexError."""
    with pytest.raises(RunError, match=r"project : WandbError$"):
        make_tracker("wandb", "").started(scenario(), [0], tmp_path)


@pytest.mark.parametrize(
    ("module", "name"), [("torch.utils.tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_tracker_that_is_not_installed_is_refused_with_its_pip_command(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"pip install 'fedpriv\[{name}\]'") as caught:
        make_tracker(name, "x")
    assert "\n" not in str(caught.value)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert name in extras


def test_a_long_setting_is_cut_where_mlflow_takes_500_characters(
    said: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    tree = small_tree(label={"notes": "x" * 501, "short": "y" * 500})
    observer = make_tracker("mlflow", "http://localhost:5000")
    observer.started(parse_scenario(tree, "test"), [0], tmp_path)
    observer.evaluated(0, 4, {"test_loss": 2.5})
    values = {call[1]: call[2] for call in said if call[1:2] and str(call[1]).startswith("label")}
    assert values == {"label.notes": "x" * 499 + "…", "label.short": "y" * 500}
