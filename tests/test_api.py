"""fedpriv from Python: the same results as the command, frozen, and cheap to import."""

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedpriv
from fedpriv.api.run import _describe_value
from fedpriv.claims.outcome import CellOutcome
from fedpriv.scenario.load import Scenario
from tests.conftest import small_tree


def sweep() -> dict[str, Any]:
    return {**small_tree(), "sweep": {"privacy.rho": [4.0, 8.0], "seeds": 2}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> fedpriv.RunResults:
    return fedpriv.run(sweep(), out=tmp_path_factory.mktemp("api") / "run")


def test_a_run_gives_every_cell_with_its_privacy_and_history(results: fedpriv.RunResults) -> None:
    assert results.complete
    assert [(cell.point["privacy.rho"], cell.seed) for cell in results.cells] == [(4, 0), (4, 1), (8, 0), (8, 1)]
    for cell in results.cells:
        assert cell.privacy.mu == pytest.approx(cell.point["privacy.rho"])
        assert (cell.privacy.trust, cell.privacy.noise) == ("untrusted", "simulation")
        assert [evaluation.round for evaluation in cell.history] == [2, 4, 6, 8]
        assert cell.history[-1].test_loss == cell.test_loss
        assert cell.model().shape == (7850,)


def test_run_results_are_frozen_and_load_back_equal(results: fedpriv.RunResults) -> None:
    assert fedpriv.load(results.folder) == results
    with pytest.raises(dataclasses.FrozenInstanceError):
        results.cells[0].test_loss = 0.0  # type: ignore[misc]


def test_the_table_of_run_results_equals_that_of_the_command(results: fedpriv.RunResults) -> None:
    assert results.table() == (results.folder / "table.md").read_text(encoding="utf-8")
    assert results.table("csv").startswith("privacy.rho,metric,mean")
    with pytest.raises(fedpriv.InputError, match="known styles are markdown, csv, latex"):
        results.table("html")  # type: ignore[arg-type]


def test_the_set_argument_overrides_keys_and_narrows_sweeps(tmp_path: Path) -> None:
    changes = {"privacy.rho": 8.0, "seeds": [3], "federation.rounds": 4, "run.dtype": "float32"}
    (cell,) = fedpriv.run(sweep(), set=changes, out=tmp_path / "run").cells
    assert (cell.seed, cell.rounds, cell.scenario["run"]["dtype"]) == (3, 4, "float32")
    assert cell.privacy.mu == pytest.approx(8.0)


@pytest.mark.parametrize("value", [{"a": 1}, object(), float("nan"), None])
def test_a_set_value_of_an_invalid_type_is_refused_by_its_key(value: object) -> None:
    with pytest.raises(fedpriv.InputError, match=r"set: privacy\.rho = "):
        fedpriv.run(sweep(), set={"privacy.rho": value})


def test_numpy_integers_are_accepted_as_scenario_values(tmp_path: Path) -> None:
    """Before: "expected a number", of np.int64(2)."""
    results = fedpriv.run(small_tree(), set={"federation.rounds": np.int64(2)}, out=tmp_path / "run")
    assert results[0].rounds == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"loss": "huber"}, "loss: is the loss of a module"), ({"classes": 3}, "classes: is")],
)
def test_arguments_without_effect_on_a_run_are_refused(
    tmp_path: Path, arguments: dict[str, Any], reason: str
) -> None:
    """Before: ignored in silence."""
    with pytest.raises(fedpriv.InputError, match=reason):
        fedpriv.run(small_tree(), **arguments, out=tmp_path / "run")


def test_loss_functions_with_different_closure_values_have_different_names() -> None:
    """Before: a run could be resumed with another loss, if only such a value was another one."""

    def scaled(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda outputs, label: factor * (outputs - label) ** 2

    def powered(power: float) -> Callable[..., Tensor]:
        def loss(outputs: Tensor, label: Tensor, *, power: float = power) -> Tensor:
            return (outputs - label).abs() ** power

        return loss

    def weighted(last: float) -> Callable[[Tensor, Tensor], Tensor]:
        weights = torch.arange(5000.0)
        weights[2500] = last  # `str` leaves out the middle
        return lambda outputs, label: weights.mean() * (outputs - label) ** 2

    def partial(factor: float) -> Callable[..., Tensor]:
        return functools.partial(scaled(factor), label=torch.zeros(1))

    def nested(factor: float) -> Callable[..., Tensor]:
        return lambda outputs, label: (lambda difference: factor * difference**2)(outputs - label)

    def by_class(weight: float) -> nn.Module:
        return nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight]))

    def in_bfloat16(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        factors = torch.full((2, 1), factor, dtype=torch.bfloat16)
        return lambda outputs, label: (factors * (outputs - label) ** 2).mean()

    for make in (scaled, powered, weighted, partial, nested, by_class, in_bfloat16):
        assert _describe_value(make(1.0), {}) == _describe_value(make(1.0), {}) != _describe_value(make(5.0), {})
        assert " at 0x" not in _describe_value(make(1.0), {}), "a name of another process, too"


SOURCE = """
from torch import nn, relu, tanh
def scale(x): return 2 * x
class Net(nn.Module):
    factors = property(lambda self: [2])
    bound = 7
    def __init__(self):
        super().__init__()
        self.layer, self.activation, self.parents, self.widths = nn.Linear(2, 2), relu, [self], [3]
    def forward(self, x): return [scale(y) for y in [self.activation(self.layer(x))]][0]
"""


def describe_network(old: str = "", new: str = "", hook: Callable[..., Any] | None = None) -> str:
    """Describe the module of `SOURCE`, in which `new` replaces `old`."""
    names: dict[str, Any] = {"__name__": "own"}
    exec(SOURCE.replace(old, new) if old else SOURCE, names)
    torch.manual_seed(0)
    network = names["Net"]()
    if hook is not None:
        network.layer.register_forward_hook(hook)
    return _describe_value(network, {})


def test_the_name_of_a_module_covers_its_code_as_far_as_it_can_be_read() -> None:
    """Before: it had the text of the module and its arrays alone."""
    same = describe_network()
    assert same == describe_network()
    assert " at 0x" not in same
    for old, new in (
        ("2 * x", "3 * x"),
        ("[2]", "[4]"),
        (", relu, [", ", tanh, ["),
        ("[3]", "[5]"),
        ("bound = 7", "bound = 8"),
        ("(x))]", "(-x))]"),
    ):
        assert describe_network(old, new) != same, old
    assert describe_network(hook=lambda *_: None) != same


def test_the_name_of_a_loss_function_does_not_depend_on_the_order_of_a_set() -> None:
    """Before: a set of texts in its code had another order, and the function another name, in each process."""
    assert (
        _describe_value(frozenset([0, 8]), {})
        == _describe_value(frozenset([8, 0]), {})
        != _describe_value(frozenset([8]), {})
    )


def test_an_observer_is_notified_of_every_cell_and_of_the_end_of_a_failed_run(tmp_path: Path) -> None:
    class Listener(fedpriv.RunObserver):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def started(self, scenario: Scenario, places: Sequence[int], folder: Path) -> None:
            self.heard.append(f"started {list(places)} in {folder.name}")

        def finished(self, place: int, finished: CellOutcome) -> None:
            self.heard.append(f"finished {place}")
            if place == 1:
                raise RuntimeError("an observer that breaks")

        def ended(self) -> None:
            self.heard.append("ended")

    listener, out = Listener(), tmp_path / "run"
    with pytest.raises(RuntimeError, match="an observer that breaks"):
        fedpriv.run(sweep(), out=out, observers=[listener])
    assert listener.heard == ["started [0, 1, 2, 3] in run", "finished 0", "finished 1", "ended"]
    assert [cell.point["privacy.rho"] for cell in fedpriv.load(out).cells] == [4.0, 4.0]  # kept, and can go on
    whole = fedpriv.run(sweep(), out=out, resume=True)
    assert whole.complete
    assert all(np.isfinite(cell.test_loss) for cell in whole.cells)


def test_an_observer_receives_the_error_of_a_failed_run_before_its_end(tmp_path: Path) -> None:
    heard: list[str] = []

    class Listener(fedpriv.RunObserver):
        def failed(self, error: fedpriv.FedprivError) -> None:
            heard.append(str(error))

        def ended(self) -> None:
            heard.append("ended")

    with pytest.raises(fedpriv.RunError) as caught:
        fedpriv.run(sweep(), set={"run.device": "cuda:99"}, out=tmp_path / "run", observers=[Listener()])
    assert heard == [str(caught.value), "ended"]


def test_dir_of_fedpriv_lists_exactly_its_public_names() -> None:
    """Completion in a shell and in notebooks rests on `dir`; names are imported when they are first asked for."""
    assert {name for name in dir(fedpriv) if not name.startswith("__")} == set(fedpriv.__all__) - {"__version__"}
    assert all(getattr(fedpriv, name) is not None for name in fedpriv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'simulate'"):
        fedpriv.simulate  # noqa: B018


def test_importing_fedpriv_imports_nothing_heavy() -> None:
    code = (
        "import sys, fedpriv; fedpriv.InputError; fedpriv.__version__; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic', 'matplotlib', 'flwr')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
