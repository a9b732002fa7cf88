"""Data sets as arrays: small files in the layout of the real ones, and one's own."""

import gzip
import hashlib
import math
import pickle
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.data import fetch as fetching
from fedpriv.data import named
from fedpriv.data.fetch import ORIGINS
from fedpriv.data.formats import Source, write_idx
from fedpriv.data.named import (
    VISITS_SCHEMA,
    Dataset,
    add_data,
    is_user_data,
    list_user_data,
    load,
    load_held_out,
)
from fedpriv.data.synthetic import geometric_curvature, make_phase_retrieval, power_law
from fedpriv.loss.models import find_model
from fedpriv.plan.task import ModelInputs, load_task_of_inputs
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import ModelSection
from tests.conftest import small_tree
from tests.engines.test_engines import run


def images(count: int, *shape: int) -> NDArray[np.uint8]:
    return (np.arange(count * int(np.prod(shape))) * 7 + count).astype(np.uint8).reshape(count, *shape)


def write_idx_pair(folder: Path, prefix: str, count: int) -> None:
    write_idx(folder / f"{prefix}-images-idx3-ubyte", images(count, 28, 28))
    write_idx(folder / f"{prefix}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8))


def write_mnist(folder: Path) -> None:
    write_idx_pair(folder, "train", 6)
    write_idx_pair(folder, "t10k", 4)


def write_emnist(folder: Path) -> None:
    """The archive as it is published: every file of it compressed once more."""
    write_idx_pair(folder, "emnist-balanced-train", 6)
    write_idx_pair(folder, "emnist-balanced-test", 4)
    with zipfile.ZipFile(folder / "gzip.zip", "w") as archive:
        for path in sorted(folder.glob("emnist-*")):
            archive.writestr(f"gzip/{path.name}.gz", gzip.compress(path.read_bytes(), mtime=0))
            path.unlink()


def from_files(monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[Path], None]) -> None:
    """Let the data set's only source write small files, whose hashes are the expected ones."""

    def write_below(root: Path) -> None:
        folder = root / ORIGINS[name].folder
        folder.mkdir(parents=True)
        write(folder)

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        contents = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    hashes = {name: f"sha256:{hashlib.sha256(content).hexdigest()}" for name, content in contents.items()}
    small = replace(ORIGINS[name], sources=(Source("test", write_below),), files=hashes)
    monkeypatch.setitem(fetching.ORIGINS, name, small)


@pytest.mark.parametrize(
    ("name", "write", "classes"),
    [("mnist", write_mnist, 10), ("fashion-mnist", write_mnist, 10), ("emnist", write_emnist, 47)],
)
def test_idx_data_sets_are_fetched_on_first_use_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[Path], None], classes: int
) -> None:
    from_files(monkeypatch, name, write)
    dataset = load(name, tmp_path)
    assert (dataset.name, dataset.class_count) == (name, classes)
    np.testing.assert_array_equal(dataset.train_images, images(6, 28, 28), strict=True)
    np.testing.assert_array_equal(dataset.train_labels, np.arange(6), strict=True)
    np.testing.assert_array_equal(dataset.test_images, images(4, 28, 28), strict=True)
    np.testing.assert_array_equal(dataset.test_labels, np.arange(4), strict=True)
    held_out = load_held_out(name, tmp_path)
    np.testing.assert_array_equal(held_out.images, dataset.test_images, strict=True)
    np.testing.assert_array_equal(held_out.labels, dataset.test_labels, strict=True)
    assert held_out.class_count == classes


def test_mnist_with_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = ORIGINS["mnist"].files
    from_files(monkeypatch, "mnist", write_mnist)
    monkeypatch.setitem(fetching.ORIGINS, "mnist", replace(fetching.ORIGINS["mnist"], files=hashes))
    line = r"train-images-idx3-ubyte has been changed .* put the files train-images"
    with pytest.raises(InputError, match=line):
        load("mnist", tmp_path)


def test_cifar10_batches_are_joined_in_order_with_channels_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = images(12, 3, 32, 32)

    def write(folder: Path) -> None:
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        for number, name in enumerate(names):
            two = slice(2 * number, 2 * number + 2)
            batch = {"data": every[two].reshape(2, 3072), "labels": [number, number + 1], "filenames": ["a", "b"]}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=4))
        (folder / "batches.meta").write_bytes(b"")

    from_files(monkeypatch, "cifar10", write)
    dataset = load("cifar10", tmp_path)
    np.testing.assert_array_equal(dataset.train_images, every[:10].transpose(0, 2, 3, 1), strict=True)
    np.testing.assert_array_equal(dataset.test_images, every[10:].transpose(0, 2, 3, 1), strict=True)
    np.testing.assert_array_equal(dataset.train_labels, [0, 1, 1, 2, 2, 3, 3, 4, 4, 5], strict=True)
    np.testing.assert_array_equal(dataset.test_labels, [5, 6], strict=True)
    assert dataset.train_images.flags.c_contiguous
    assert dataset.class_count == 10


@pytest.fixture(scope="module")
def synthetic() -> Dataset:
    return load("synthetic")


def test_the_synthetic_data_set_has_the_shape_of_mnist(synthetic: Dataset) -> None:
    assert (synthetic.train_images.shape, synthetic.test_images.shape) == ((6000, 28, 28), (1000, 28, 28))
    assert synthetic.train_images.dtype == synthetic.test_images.dtype == np.uint8
    assert synthetic.train_labels.dtype == synthetic.test_labels.dtype == np.int64
    assert set(synthetic.train_labels) == set(synthetic.test_labels) == set(range(10))
    assert synthetic.class_count == 10


def test_the_synthetic_data_set_is_always_the_same(synthetic: Dataset) -> None:
    """Other tests' numbers rest on these bytes."""
    digest = hashlib.sha256()
    for part in ("train_images", "train_labels", "test_images", "test_labels"):
        digest.update(getattr(synthetic, part).tobytes())
    assert digest.hexdigest() == "22f7acc4cadc94cb87d588fa528c03ffab9e36ac24bc6316d7224456c32957c1"


def test_classes_of_the_synthetic_data_set_are_separated_by_their_nearest_means(synthetic: Dataset) -> None:
    train = synthetic.train_images.reshape(6000, 784).astype(float)
    test = synthetic.test_images.reshape(1000, 784).astype(float)
    means = np.stack([train[synthetic.train_labels == label].mean(axis=0) for label in range(10)])
    nearest = ((test[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    np.testing.assert_array_equal(nearest, synthetic.test_labels)


def test_a_tenth_of_all_phase_retrieval_records_are_outliers() -> None:
    """A size above √8, the norm of x*, is of an outlier: a share 0.1 · (1 - √8/5), 4.5 standard errors allowed."""
    dataset = load("phase-retrieval")
    assert (dataset.train_images.shape, dataset.test_images.shape) == ((200_000, 8), (4000, 8))
    share = 0.1 * (1.0 - math.sqrt(8.0) / 5.0)
    error = math.sqrt(share * (1.0 - share) / 200_000)
    assert abs((dataset.train_labels > math.sqrt(8.0)).mean() - share) < 4.5 * error


def test_phase_retrieval_labels_are_measured_magnitudes_or_uniform_outliers() -> None:
    """Without outliers one x* of norm √8 fits all records, and sizes of outliers are uniform between 0 and 5."""
    measurements, sizes, _, _ = make_phase_retrieval(2000, 10, dimension=8, outliers=0.0, seed=3)
    assert np.linalg.norm(measurements, axis=1) == pytest.approx(1.0)
    # A measurement's square of its size is linear in x* x*ᵀ, whose trace is 8.
    products = (measurements[:, :, None] * measurements[:, None]).reshape(-1, 64)
    matrix, *_ = np.linalg.lstsq(products, sizes**2, rcond=None)
    assert products @ matrix == pytest.approx(sizes**2, abs=1e-9)
    assert matrix.reshape(8, 8).trace() == pytest.approx(8.0)
    outliers = make_phase_retrieval(20_000, 10, dimension=8, outliers=1.0, seed=3)[1]
    shares = np.histogram(outliers, bins=10, range=(0.0, 5.0))[0] / 20_000
    assert shares == pytest.approx(0.1, abs=0.011)


@pytest.mark.parametrize(
    ("dimension", "condition"), [(0, 4.0), (3, 0.99), (-1, 0.5), (3, math.inf), (3, math.nan)]
)
def test_dimensions_and_condition_numbers_below_one_or_infinite_are_refused(
    dimension: int, condition: float
) -> None:
    with pytest.raises(
        ValueError, match=f"dimension {dimension} and condition number {condition} must be at least"
    ):
        geometric_curvature(dimension, condition)
    assert geometric_curvature(3, 4.0) == pytest.approx([1.0, 0.5, 0.25])


def test_linear_regression_labels_have_noise_of_standard_deviation_one_tenth() -> None:
    dataset = load("linear-regression")
    assert (dataset.train_images.shape, dataset.test_images.shape) == ((65_536, 256), (1000, 256))
    for features, labels in (
        (dataset.train_images[:5000], dataset.train_labels[:5000]),
        (dataset.test_images, dataset.test_labels),
    ):
        errors = labels - features @ power_law(256)[1]
        assert np.abs(errors).max() <= 0.1 * math.sqrt(3.0) * (1.0 + 1e-9)
        assert errors.std() == pytest.approx(0.1, rel=0.1)


def test_an_unknown_data_set_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"'synthetc': known data sets are .* did you mean 'synthetic'"):
        load("synthetc")


@pytest.mark.parametrize("name", ["Mine", "-mine", "my data", "", "mnist.npz"])
def test_adding_a_data_set_under_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="expected lower-case letters, digits and dashes"):
        add_data(name, lambda: (([], []), ([], [])))
    assert name not in list_user_data()


def test_extensions_are_imported_only_for_unknown_data_set_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be imported stops no run on a data set of fedpriv."""
    monkeypatch.setenv("FEDPRIV_IMPORT", "/nowhere/own.py")
    assert not any(map(is_user_data, ("mnist", "synthetic")))
    with pytest.raises(InputError, match=r"/nowhere/own\.py"):
        is_user_data("own")


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


def test_arrays_of_an_npz_file_are_loaded_unchanged(written: Callable[..., str]) -> None:
    dataset = load(written())
    assert dataset.class_count == 3
    np.testing.assert_array_equal(dataset.train_images, GOOD["train_images"])
    np.testing.assert_array_equal(dataset.test_labels, GOOD["test_labels"])
    real = load(written(classes=0, train_labels=np.ones(6), test_labels=np.ones(2)))
    assert real.train_labels.dtype == np.float64
    assert (dataset.label_scale, real.label_scale) == (1.0, 1.0)  # labels are written in their own unit


def test_a_server_loads_an_npz_file_that_has_only_test_records(written: Callable[..., str]) -> None:
    name = written(train_images=None, train_labels=None)
    assert len(load_held_out(name).labels) == 2
    with pytest.raises(InputError, match="has no array `train_images`, only classes, test_images, test_labels"):
        load(name)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"classes": None}, "`classes` must be one whole number"),
        ({"classes": 2}, "train part: labels are whole numbers from 0 to 1"),
        (
            {"train_labels": np.array([0, 1, 2, 0, 1, -1])},
            "train part: labels are whole numbers from 0 to 2, found -1",
        ),
        ({"train_labels": np.zeros(5, int)}, r"train part: expected records .* found \(6, 4\) and \(5,\)"),
        ({"train_images": np.ones(6)}, r"train part: expected records .* found \(6,\) and \(6,\)"),
        ({"test_images": np.full((2, 4), np.nan)}, "test part: a value is not finite"),
        ({"train_images": np.ones((6, 4), np.complex64)}, "records are bytes .* or floats, not complex64"),
        ({"train_images": np.ones((6, 4), np.int32)}, "must be alike, found int32 .* and float64"),
        ({"train_images": np.full((6, 4), 2**24 + 1)}, "whole numbers are at most 2\\^24"),
        ({"train_labels": np.array(["a"] * 6)}, "train part: labels are numbers, not <U1"),
        ({"test_images": np.ones((2, 3))}, r"must be alike, found float64 \(6, 4\) and float64 \(2, 3\)"),
        ({"test_images": np.ones((2, 4), np.uint8)}, "must be alike, found float64 .* and uint8"),
        ({"train_features.x": np.float64(1.0)}, "the inputs x must be arrays of as many records each"),
        (
            {"train_features.x": np.ones((6, 1)), "train_features.y": np.ones((5, 1))},
            "the inputs x, y must be arrays of as many records each",
        ),
        (
            {"train_features": np.ones((6, 1)), "train_features.x": np.ones((6, 1))},
            "has train_features and train_features.x; leave one of them out",
        ),
        ({"train_features.": np.ones((6, 1))}, "must be arrays of as many records each, with names"),
        (
            {
                **{f"train_features.{name}": np.ones((6, 1)) for name in "xy"},
                **{f"test_features.{name}": np.ones((2, 1)) for name in "yx"},
            },
            r"training and test records must be alike, found .*'x'.*'y'.* and .*'y'.*'x'",
        ),
    ],
)
def test_npz_files_with_invalid_arrays_are_refused(
    written: Callable[..., str], changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(InputError, match=line):
        load(written(**changes))


def test_members_of_an_npz_file_that_are_no_arrays_are_ignored(written: Callable[..., str]) -> None:
    name = written()
    with zipfile.ZipFile(name, "a") as archive:
        archive.writestr("train_features.txt", b"a note")
    np.testing.assert_array_equal(load(name).train_images, GOOD["train_images"])


def test_an_added_data_set_with_the_schema_of_a_table_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(named, "_USER_DATA", {})
    pair = GOOD["train_images"], GOOD["train_labels"]
    add_data("mine", lambda: (pair, pair))
    assert load("mine").class_count == 3
    for load_any in (load, load_held_out):
        with pytest.raises(InputError, match=r"data\.table: is for a table, .* 'mine' is none"):
            load_any("mine", table=VISITS_SCHEMA)


def test_missing_and_unreadable_npz_files_raise_different_errors(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    with (tmp_path / "single.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    np.savez(tmp_path / "objects.npz", classes=np.array({"a": 1}, dtype=object))
    for name, line in {
        "missing": "no such file",
        "text": r"not a readable \.npz file",
        "single": r"not a readable \.npz file",
        "objects": r"not a readable \.npz file without objects",
    }.items():
        with pytest.raises(InputError, match=line):
            load(str(tmp_path / f"{name}.npz"))


def test_numeric_features_need_a_norm_bound_and_are_scaled_down_to_that_bound() -> None:
    row = find_model("softmax-regression")
    with pytest.raises(InputError, match=r"model\.feature_norm: needed for features that are numbers"):
        row.features(np.ones((2, 4)), torch.float32, row.settings())
    scaled = row.features(np.full((2, 4), 10.0), torch.float64, row.settings(feature_norm=3.0))
    assert torch.linalg.vector_norm(scaled[:, :-1], dim=1).tolist() == pytest.approx([3.0, 3.0])


@pytest.mark.parametrize("model", ["least-squares", "amplitude-phase-retrieval", "robust-phase-retrieval"])
def test_models_with_constants_of_one_data_set_refuse_other_data_sets(
    written: Callable[..., str], model: str
) -> None:
    """Their smoothness would be too small for larger features, and noise may rest on it."""
    name = written(classes=0, train_labels=np.ones(6), test_labels=np.ones(2))
    with pytest.raises(InputError, match=rf"model\.name = '{model}' is for data\.name = .* alone, not"):
        load_task_of_inputs(ModelInputs(name, ModelSection(name=model), "float32"))


def test_a_model_that_needs_table_cells_refuses_plain_arrays(written: Callable[..., str]) -> None:
    tables = [{"axes": [{"column": 0, "edges": [0, 50, 100]}]}]
    model = ModelSection.model_validate({"name": "statistics", "tables": tables})
    with pytest.raises(InputError, match=r"model\.name = 'statistics' takes the cells of a table, and .* is none"):
        load_task_of_inputs(ModelInputs(written(), model, "float32"))


def test_boolean_labels_are_the_classes_0_and_1(written: Callable[..., str]) -> None:
    labels = {"train_labels": np.arange(6) % 2 == 1, "test_labels": np.array([True, False])}
    dataset = load(written(classes=2, **labels))
    assert dataset.train_labels.dtype == np.int64
    assert dataset.train_labels.tolist() == [0, 1, 0, 1, 0, 1]
    with pytest.raises(InputError, match="labels are whole numbers from 0 to 0"):
        load(written(classes=1, **labels))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_a_regression_on_own_arrays_reduces_its_loss(written: Callable[..., str], dtype: str, engine: str) -> None:
    """At float32, the default, labels were float64 and the first round ended in a traceback."""
    draw = np.random.default_rng(37)
    images = draw.standard_normal((400, 5))
    labels = np.tanh(images @ draw.standard_normal(5))
    train, test = ({"images": images[part], "labels": labels[part]} for part in (slice(300), slice(300, None)))
    parts = {f"{part}_{key}": held[key] for part, held in (("train", train), ("test", test)) for key in held}
    tree = small_tree(
        data={"name": written(**parts, classes=0)},
        model={"name": "relu-regression", "hidden": 8},
        federation={"silos": 3, "rounds": 20, "batch": 5},
        algorithm={"name": "dp-sgd", "trust": "trusted", "clip": 5.0, "step": 0.1},
        privacy={"relation": "zero-out", "mode": "none"},
        run={"dtype": dtype, "evaluations": 2},
    )
    (_,), heard = run(engine, resolve_cell(tree, "test"))
    first, last = (line[2] for line in heard.evaluations)
    assert last < first
