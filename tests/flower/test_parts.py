"""The app's side in parts: its scenario, its arrays, and where it finds its guard."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from fedpriv.core.errors import InputError, RunError
from fedpriv.flower import guard_of
from fedpriv.flower.guards import ModelLayout, SiloGuard, cell_from_keywords, find_guard, read_app_cell
from fedpriv.loss.imported import parameter_shapes
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.seen import GuardEvents
from tests.conftest import small_tree
from tests.data.tables import rows, table_tree, write_csv
from tests.doc_pages import ROOT
from tests.flower.quickstart.client_app import SCENARIO
from tests.flower.quickstart.evaluating_app import SCENARIO as EVALUATED

SHAPES = [(2, 1, 3, 3), (2,), (), (4, 2)]


def test_flattening_and_splitting_model_arrays_are_inverse() -> None:
    arrays = [np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape) + 0.25 for shape in SHAPES]
    layout = ModelLayout.from_guard_shapes(arrays, "abcd", "float32", SHAPES)
    flat = layout.flatten(arrays)
    assert flat.dtype == np.float32
    assert flat[:18].tolist() == arrays[0].ravel().tolist()
    for array, back in zip(arrays, layout.split(flat), strict=True):
        assert back.shape == array.shape
        np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        ({"name": "mlp", "hidden": 5}, [(5, 784), (5,), (10, 5), (10,)]),
        ({"name": "softmax-regression"}, [(7850,)]),
    ],
    ids=["module", "formula"],
)
def test_models_report_the_shapes_of_their_parameter_arrays(model: dict[str, Any], shapes: list[Any]) -> None:
    assert parameter_shapes(load_task(resolve_cell(small_tree(model=model), "test")).objective) == shapes


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('"dp-sgd"', '"dp-ftrl"', r"algorithm.name = 'dp-ftrl': an app's steps are those of 'dp-sgd'"),
        ("step = 1.0", "step = 1.0\nmomentum = 0.9", r"algorithm.momentum = 0.9: leave it out; the server's"),
        ("step = 1.0", "step = 1.0\nradius = 2.0", r"algorithm.radius = 2.0: leave it out; no projection"),
        ("step = 1.0", 'step = 1.0\noutput = "average"', r"algorithm.output = 'average': leave it out"),
        ("step = 1.0", "step = 1.0\nwarm_up = 0.5", r"algorithm.warm_up = 0.5: leave it out; steps and models"),
        ('"untrusted"', '"trusted"', r"algorithm.trust = 'trusted': .* adds no noise; use 'untrusted'"),
        ("mu = 2.0", "mu = 2.0\n[sweep]\nseeds = 2", r"sweep: an app asks for one run, and this stands for 2"),
        ("clip = 1.0", "clip = -1.0", r"clip"),
    ],
)
def test_scenarios_incompatible_with_app_steps_are_refused_in_one_line(
    tmp_path: Path, old: str, new: str, line: str
) -> None:
    text = SCENARIO.read_text()
    assert text.count(old) == 1
    (tmp_path / "guard.toml").write_text(text.replace(old, new))
    with pytest.raises(InputError, match=line) as raised:
        read_app_cell(tmp_path / "guard.toml")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("node", "steps", "line"),
    [
        ({"guard": "/g"}, 1, "partition-id = None in the node configuration: expected the silo's number, 0 to 1"),
        ({"guard": "/g", "partition-id": 2}, 1, "partition-id = 2 in"),
        ({"guard": True, "partition-id": 0}, 1, "guard = True in the node configuration: expected the path"),
        ({"guard": "", "partition-id": 0}, 1, "guard = '' in the node configuration: expected the path"),
        ({"guard": "/g", "partition-id": -1}, 1, "partition-id = -1 in"),
        ({"partition-id": 0}, 1, "guard: missing; start the SuperNode with"),
        ({"guard": "/g", "partition-id": 0}, 5, "local_steps = 5: federation.rounds = 12 .* a multiple"),
        ({"guard": "/g", "partition-id": 0}, 0, "local_steps = 0"),
    ],
)
def test_an_incomplete_node_configuration_is_refused_in_one_line(
    node: dict[str, Any], steps: int, line: str
) -> None:
    with pytest.raises(InputError, match=line):
        guard_of(Context(1, 1, node, RecordDict(), {}), SCENARIO, steps)


def test_an_evaluation_without_a_matching_scenario_section_is_refused_in_one_line(tmp_path: Path) -> None:
    """No [evaluation], or more of them than server rounds: before anybody is asked."""
    context = Context(7, 1, {"partition-id": 0, "guard": "/none"}, RecordDict(), {})
    with pytest.raises(InputError, match="evaluation: the guard's scenario has no such section"):
        guard_of(context, SCENARIO).scores([np.zeros(1)], 1)
    with pytest.raises(InputError, match="has 3 evaluations, and the server 2 rounds; set it to 2 or fewer"):
        guard_of(context, EVALUATED, 6).scores([np.zeros(1)], 1)
    assert guard_of(context, EVALUATED).test_examples == 300


def test_the_guard_in_the_node_configuration_overrides_that_of_the_run_configuration() -> None:
    """A run configuration is the server's; what a silo's SuperNode was started with is the silo's."""
    node, run = {"partition-id": 1, "guard": "/own.sock"}, {"guard": "/other-{silo}.sock"}
    context = Context(7, 1, node, RecordDict(), run)
    assert guard_of(context, SCENARIO).socket == Path("/own.sock")
    del context.node_config["guard"]
    simulated = guard_of(context, SCENARIO, 3)
    assert (simulated.socket, simulated.run, simulated.examples) == (Path("/other-1.sock"), "7", 300)


def test_an_empty_guard_in_the_run_configuration_is_no_guard() -> None:
    """Was: the folder `.` was asked as a guard's socket; Flower's keys need a default, and "" is the usual one."""
    context = Context(7, 1, {"partition-id": 1}, RecordDict(), {"guard": ""})
    assert find_guard(context, 2) == (1, None)


def test_an_app_without_a_running_guard_fails_in_one_line(tmp_path: Path) -> None:
    context = Context(7, 1, {"partition-id": 1, "guard": str(tmp_path / "s")}, RecordDict(), {})
    with pytest.raises(RunError, match=r"the silo's guard at .* does not answer"):
        guard_of(context, SCENARIO).steps([np.zeros(1)], 1)


def test_repeated_refusals_are_logged_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    told = GuardEvents()
    with caplog.at_level(logging.WARNING, "fedpriv.guard"):
        for _ in range(3500):
            told.record_refusal("run\n\x1b[31m", "no\nreason")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == r"refusal 1, run run\n\x1b[31m: no\nreason"
    assert [int(line.split()[1].rstrip(",")) for line in lines] == [*range(1, 101), 1000, 2000, 3000]


def test_the_documented_app_changes_are_those_of_the_tested_apps() -> None:
    """Every line that docs/existing-flower-app.md adds is one of a tested app; those of the first are five.

    Evaluation is four more.
    """
    page = (ROOT / "docs" / "existing-flower-app.md").read_text(encoding="utf-8")
    added = [line[1:] for line in page.splitlines() if line.startswith("+") and line.strip("+ ")]
    names = ("client_app.py", "evaluating_app.py", "numpy_app.py")
    texts = [(SCENARIO.parent / name).read_text(encoding="utf-8") for name in names]
    message, evaluating, numpy = (text.splitlines() for text in texts)
    assert len(added) == 10
    assert [line for line in added[:5] if line not in message] == []
    assert [line for line in added[5:9] if line not in evaluating] == []
    assert added[9] in numpy


def test_scores_of_a_table_whose_cells_choose_the_test_rows_are_of_these_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard's means are over all rows, and a fifth of them count."""
    listed = [{**row, "patient": f"p{number // 2}"} for number, row in enumerate(rows(60))]
    tree = table_tree(write_csv(tmp_path / "t.csv", listed), split=None, person="patient", test_share=0.2)
    cell = resolve_cell({**tree, "evaluation": {"mu": 1.0, "loss_bound": 5.0, "records": 30}}, "test")
    guard = SiloGuard(tmp_path / "s", "run", 0, cell, "{}", 1)
    means = np.array([0.5, -0.5]) * 0.2  # all right, and no loss, where rows count
    monkeypatch.setattr(SiloGuard, "_match_layout", lambda *_: (None, np.zeros(3)))
    monkeypatch.setattr("fedpriv.flower.guards.ask_release", lambda *_, **__: means)
    scores = guard.scores({}, cell.schedule.rounds)
    assert scores == {"eval_loss": pytest.approx(0.0, abs=1e-12), "eval_acc": pytest.approx(1.0)}


def test_a_keyword_does_not_replace_the_row_of_the_strategy() -> None:
    """Before: `name` went to [algorithm], where it was that of another row."""
    keywords = {"model": "softmax-regression", "silos": 2, "rounds": 4, "clip": 1.0, "step": 0.1, "epsilon": 1.0}
    keywords |= {"trust": "untrusted", "relation": "replace-one"}
    cell = cell_from_keywords("dp-sgd", {**keywords, "name": "dp-ftrl"}, None)
    assert cell.algorithm.name == "dp-sgd"
