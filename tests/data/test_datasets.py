"""Data sets as arrays, read from small files in the layout of the real ones."""

import gzip
import hashlib
import pickle
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fedpriv.core.errors import InputError
from fedpriv.data import fetch as fetching
from fedpriv.data.fetch import ORIGINS
from fedpriv.data.formats import Source, write_idx
from fedpriv.data.named import Dataset, load


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
        hashes = {
            path.name: f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in Path(folder).iterdir()
        }
    small = replace(ORIGINS[name], sources=(Source("test", write_below),), files=hashes)
    monkeypatch.setitem(fetching.ORIGINS, name, small)


@pytest.mark.parametrize(
    ("name", "write", "classes"),
    [("mnist", write_mnist, 10), ("fashion-mnist", write_mnist, 10), ("emnist", write_emnist, 47)],
)
def test_idx_data_sets_are_fetched_on_first_use_and_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    write: Callable[[Path], None],
    classes: int,
) -> None:
    from_files(monkeypatch, name, write)
    dataset = load(name, tmp_path)
    assert (dataset.name, dataset.classes) == (name, classes)
    np.testing.assert_array_equal(dataset.train_images, images(6, 28, 28), strict=True)
    np.testing.assert_array_equal(dataset.train_labels, np.arange(6), strict=True)
    np.testing.assert_array_equal(dataset.test_images, images(4, 28, 28), strict=True)
    np.testing.assert_array_equal(dataset.test_labels, np.arange(4), strict=True)


def test_mnist_with_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = ORIGINS["mnist"].files
    from_files(monkeypatch, "mnist", write_mnist)
    monkeypatch.setitem(fetching.ORIGINS, "mnist", replace(fetching.ORIGINS["mnist"], files=hashes))
    with pytest.raises(
        InputError, match=r"train-images-idx3-ubyte has been changed .* put the files train-images"
    ):
        load("mnist", tmp_path)


def test_cifar10_batches_are_joined_in_order_with_channels_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = images(12, 3, 32, 32)

    def write(folder: Path) -> None:
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        for number, name in enumerate(names):
            two = slice(2 * number, 2 * number + 2)
            batch = {
                "data": every[two].reshape(2, 3072),
                "labels": [number, number + 1],
                "filenames": ["a", "b"],
            }
            (folder / name).write_bytes(pickle.dumps(batch, protocol=4))
        (folder / "batches.meta").write_bytes(b"")

    from_files(monkeypatch, "cifar10", write)
    dataset = load("cifar10", tmp_path)
    np.testing.assert_array_equal(dataset.train_images, every[:10].transpose(0, 2, 3, 1), strict=True)
    np.testing.assert_array_equal(dataset.test_images, every[10:].transpose(0, 2, 3, 1), strict=True)
    np.testing.assert_array_equal(dataset.train_labels, [0, 1, 1, 2, 2, 3, 3, 4, 4, 5], strict=True)
    np.testing.assert_array_equal(dataset.test_labels, [5, 6], strict=True)
    assert dataset.train_images.flags.c_contiguous
    assert dataset.classes == 10


@pytest.fixture(scope="module")
def synthetic() -> Dataset:
    return load("synthetic")


def test_synthetic_has_the_shape_of_mnist(synthetic: Dataset) -> None:
    assert synthetic.train_images.shape == (6000, 28, 28)
    assert synthetic.test_images.shape == (1000, 28, 28)
    assert synthetic.train_images.dtype == synthetic.test_images.dtype == np.uint8
    assert synthetic.train_labels.dtype == synthetic.test_labels.dtype == np.int64
    assert set(synthetic.train_labels) == set(synthetic.test_labels) == set(range(10))
    assert synthetic.classes == 10


def test_synthetic_is_always_the_same(synthetic: Dataset) -> None:
    """Other tests' numbers rest on these bytes."""
    digest = hashlib.sha256()
    for part in ("train_images", "train_labels", "test_images", "test_labels"):
        digest.update(getattr(synthetic, part).tobytes())
    assert digest.hexdigest() == "22f7acc4cadc94cb87d588fa528c03ffab9e36ac24bc6316d7224456c32957c1"


def test_synthetic_classes_are_far_apart(synthetic: Dataset) -> None:
    train = synthetic.train_images.reshape(6000, 784).astype(float)
    test = synthetic.test_images.reshape(1000, 784).astype(float)
    means = np.stack([train[synthetic.train_labels == label].mean(axis=0) for label in range(10)])
    nearest = ((test[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    np.testing.assert_array_equal(nearest, synthetic.test_labels)


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InputError, match=r"'synthetc': known data sets are .* did you mean 'synthetic'"):
        load("synthetc")
