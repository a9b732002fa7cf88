"""`fedpriv.run` takes ε, trust and algorithm as arguments, with names that an editor completes."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from torch import nn

import fedpriv
from fedpriv.api.run import AlgorithmName, EngineName, TrustName
from fedpriv.core.errors import InputError
from fedpriv.engines.table import ENGINES
from fedpriv.noise.trust import TRUSTS
from fedpriv.papers.table import ALGORITHMS

SHIPPED = list(ALGORITHMS)

SMALL: dict[str, Any] = {"data.name": "synthetic", "federation.samples": 200, "federation.rounds": 4,
                         "federation.epochs": 4, "algorithm.step": 0.01}  # fmt: skip


def test_literal_types_match_the_tables_of_engines_trust_settings_and_algorithms() -> None:
    assert set(get_args(EngineName)) == set(ENGINES)
    assert set(get_args(TrustName)) == set(TRUSTS)
    assert set(get_args(AlgorithmName)) == set(SHIPPED)


def test_run_arguments_are_equivalent_to_the_scenario_keys_that_they_name(tmp_path: Path) -> None:
    by_argument = fedpriv.run(
        "own-data", epsilon=[2, 30], trust="untrusted", algorithm="dp-adam", set=SMALL, out=tmp_path / "a"
    )
    keys = {"privacy.epsilon": [2, 30], "algorithm.trust": "untrusted", "algorithm.name": "dp-adam"}
    by_key = fedpriv.run("own-data", set={**SMALL, **keys}, out=tmp_path / "b")
    assert [cell.metrics for cell in by_argument] == [cell.metrics for cell in by_key]
    assert [cell.privacy.trust for cell in by_argument] == ["untrusted"] * 2
    assert {cell.scenario["algorithm"]["name"] for cell in by_argument} == {"dp-adam"}
    assert [cell.scenario["privacy"]["epsilon"] for cell in by_argument] == [2.0, 30.0]


def test_a_key_that_is_given_twice_is_refused() -> None:
    with pytest.raises(fedpriv.InputError, match=r"privacy\.epsilon is given as an argument, too; give it once"):
        fedpriv.run("own-data", epsilon=2.0, set={"privacy.epsilon": 3.0})


@pytest.mark.parametrize("empty", [{"trust": []}, {"epsilon": []}, {"algorithm": ()}])
def test_an_empty_list_is_refused_in_one_line(empty: dict[str, Any], tmp_path: Path) -> None:
    records = np.zeros((40, 3), np.float32), np.arange(40) % 2
    with pytest.raises(InputError, match=r"algorithm\.trust|privacy\.epsilon|algorithm\.name"):
        fedpriv.run("own-data", train=records, test=records, model=nn.Linear(3, 2), out=tmp_path, **empty)


@pytest.mark.parametrize("epsilon", [float("nan"), float("inf")])
def test_an_epsilon_that_is_not_finite_is_refused_by_name(epsilon: float, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"privacy\.epsilon = {epsilon}: expected a finite number"):
        fedpriv.run("own-data", epsilon=epsilon, out=tmp_path)


@pytest.mark.parametrize("items", [[1.0, None], [{"a": 1}]])
def test_a_list_with_an_item_that_is_no_toml_value_is_refused(items: list[Any], tmp_path: Path) -> None:
    """Before: the list became one text, such as "[1.0, null]"."""
    with pytest.raises(InputError, match=r"set: label\.name = \["):
        fedpriv.run("own-data", set={"label.name": items}, out=tmp_path)
