"""A row whose mechanism is none of fedpriv's is refused before round 1: a run of it could not be read back."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedpriv
from fedpriv.core.errors import InputError
from fedpriv.noise.diagonal import IndependentGaussian
from fedpriv.papers.table import ALGORITHMS, add_algorithm
from tests.conftest import small_tree


class Mine(IndependentGaussian):
    """Of a name that is read as another mechanism, which is worse than one that is not read at all."""


@pytest.fixture(autouse=True)
def row() -> Iterator[None]:
    before = dict(ALGORITHMS)
    add_algorithm(dataclasses.replace(ALGORITHMS["dp-sgd"], name="own-noise", mechanism=lambda *_: Mine()))
    yield
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


def tree_of(name: str) -> dict[str, Any]:
    return small_tree(
        algorithm={"name": name, "trust": "untrusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "replace-one", "mu": 1.0},
    )


def test_an_unregistered_mechanism_is_refused_before_round_1_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        fedpriv.run(tree_of("own-noise"), out=str(tmp_path / "run"))
    line = str(refused.value)
    assert line.startswith("algorithm.name = 'own-noise': its mechanism Mine is none of fedpriv's")
    assert "fedpriv.add_mechanism(Mine), or take one of independent, " in line
    assert "\n" not in line
    assert not any(path.read_text() for path in tmp_path.glob("run/history.jsonl"))
