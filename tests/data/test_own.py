"""Data sets of one's own: what a file may hold, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.core.errors import InputError
from fedpriv.data.named import load, load_test
from fedpriv.loss.models import model_named
from fedpriv.rounds.task import ModelInputs, task_of
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import ModelSection
from tests.engines.test_engines import run

GOOD: dict[str, Any] = {
    "train_images": np.ones((6, 4)),
    "train_labels": np.array([0, 1, 2, 0, 1, 2]),
    "test_images": np.zeros((2, 4)),
    "test_labels": np.array([1, 1]),
    "classes": 3,
}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    def write(**changes: Any) -> str:
        file = tmp_path / "own.npz"
        np.savez(file, **{name: value for name, value in {**GOOD, **changes}.items() if value is not None})
        return str(file)

    return write


def test_a_file_is_read_as_it_is(written: Callable[..., str]) -> None:
    dataset = load(written())
    assert dataset.classes == 3
    np.testing.assert_array_equal(dataset.train_images, GOOD["train_images"])
    np.testing.assert_array_equal(dataset.test_labels, GOOD["test_labels"])
    assert (
        load(written(classes=0, train_labels=np.ones(6), test_labels=np.ones(2))).train_labels.dtype == np.float64
    )


def test_a_server_needs_the_test_part_only(written: Callable[..., str]) -> None:
    name = written(train_images=None, train_labels=None)
    assert len(load_test(name).labels) == 2
    with pytest.raises(InputError, match="has no array `train_images`, only classes, test_images, test_labels"):
        load(name)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"classes": None}, "`classes` must be one whole number"),
        ({"classes": 2}, "train part: labels are whole numbers from 0 to 1"),
        ({"train_labels": np.zeros(5, int)}, r"train part: expected records .* found \(6, 4\) and \(5,\)"),
        ({"test_images": np.full((2, 4), np.nan)}, "test part: a value is not finite"),
        ({"train_images": np.ones((6, 4), np.int32)}, "records are bytes .* or floats, not int32"),
        ({"train_labels": np.array(["a"] * 6)}, "train part: labels are numbers, not <U1"),
        ({"test_images": np.ones((2, 3))}, r"must be alike, found float64 \(6, 4\) and float64 \(2, 3\)"),
        ({"test_images": np.ones((2, 4), np.uint8)}, "must be alike, found float64 .* and uint8"),
    ],
)
def test_what_cannot_be_used_is_refused(written: Callable[..., str], changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        load(written(**changes))


def test_no_file_and_no_npz_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load(str(tmp_path / "missing.npz"))
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(InputError, match=r"not a readable \.npz file"):
        load(str(tmp_path / "text.npz"))
    np.savez(tmp_path / "objects.npz", classes=np.array({"a": 1}, dtype=object))
    with pytest.raises(InputError, match=r"not a readable \.npz file without objects"):
        load(str(tmp_path / "objects.npz"))


def test_numbers_need_a_bound_on_their_norm() -> None:
    row = model_named("softmax-regression")
    with pytest.raises(InputError, match=r"model\.feature_norm: needed for features that are numbers"):
        row.features(np.ones((2, 4)), torch.float32, row.settings())
    scaled = row.features(np.full((2, 4), 10.0), torch.float64, row.settings(feature_norm=3.0))
    assert torch.linalg.vector_norm(scaled[:, :-1], dim=1).tolist() == pytest.approx([3.0, 3.0])


@pytest.mark.parametrize("model", ["least-squares", "amplitude-phase-retrieval", "robust-phase-retrieval"])
def test_models_whose_constants_are_those_of_one_data_set_refuse_another(
    written: Callable[..., str], model: str
) -> None:
    """Their smoothness would be too small for larger features, and noise may rest on it."""
    name = written(classes=0, train_labels=np.ones(6), test_labels=np.ones(2))
    with pytest.raises(InputError, match=rf"model\.name = '{model}' is for data\.name = .* alone, not"):
        task_of(ModelInputs(name, ModelSection(name=model), "float32"))


def test_boolean_labels_are_the_classes_0_and_1(written: Callable[..., str]) -> None:
    dataset = load(written(classes=2, train_labels=np.arange(6) % 2 == 1, test_labels=np.array([True, False])))
    assert dataset.train_labels.dtype == np.int64
    assert dataset.train_labels.tolist() == [0, 1, 0, 1, 0, 1]
    with pytest.raises(InputError, match="labels are whole numbers from 0 to 0"):
        load(written(classes=1, train_labels=np.arange(6) % 2 == 1, test_labels=np.array([True, False])))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_a_regression_on_own_numbers_trains(written: Callable[..., str], dtype: str, engine: str) -> None:
    """At float32, the default, labels were float64 and the first round ended in a traceback."""
    draw = np.random.default_rng(37)
    images = draw.standard_normal((400, 5))
    labels = np.tanh(images @ draw.standard_normal(5))
    name = written(
        train_images=images[:300],
        train_labels=labels[:300],
        test_images=images[300:],
        test_labels=labels[300:],
        classes=0,
    )
    cell = resolve_cell(
        {
            "name": "own",
            "data": {"name": name},
            "model": {"name": "relu-regression", "hidden": 8},
            "federation": {"silos": 3, "rounds": 20, "batch": 5},
            "algorithm": {"name": "dp-sgd", "trust": "trusted", "clip": 5.0, "step": 0.1},
            "privacy": {"relation": "zero-out", "mode": "none"},
            "run": {"dtype": dtype, "evaluations": 2},
        },
        "test",
    )
    (_,), heard = run(engine, cell)
    first, last = (line[2] for line in heard.evaluations)
    assert last < first
