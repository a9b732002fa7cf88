"""Fashion-MNIST out of a Debian package, made here in small."""

import gzip
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from fedpriv.core.errors import InputError
from fedpriv.data import fetch as debian
from fedpriv.data.fetch import fashion_mnist_package, read_package

FILES = {"train-images-idx3-ubyte": b"images", "t10k-labels-idx1-ubyte": b"labels " * 5}


def package(files: dict[str, bytes] = FILES, name: str = "data.tar.xz") -> bytes:
    """An ar archive as dpkg makes it: version, control, data."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for each, content in files.items():
            compressed = gzip.compress(content)
            member = tarfile.TarInfo(f"./usr/share/datasets/fashion-mnist/{each}.gz")
            member.size = len(compressed)
            archive.addfile(member, io.BytesIO(compressed))
    members = (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), (name, packed.getvalue()))
    return b"!<arch>\n" + b"".join(
        f"{each:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        + content
        + b"\n" * (len(content) % 2)
        for each, content in members
    )


def test_the_files_are_read_out_of_the_archive() -> None:
    assert read_package(package(), tuple(FILES)) == FILES


@pytest.mark.parametrize(
    "content",
    [b"", b"not a package", package(name="other.tar"), package({}), package()[:150], package()[:-200]],
)
def test_anything_else_is_one_line(content: bytes) -> None:
    with pytest.raises(InputError, match="dataset-fashion-mnist: not the expected package") as raised:
        read_package(content, tuple(FILES))
    assert "\n" not in str(raised.value)


def test_the_source_writes_the_files_below_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def downloaded(command: list[str], cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:2] == ["apt-get", "download"]
        (cwd / "dataset-fashion-mnist_0.deb").write_bytes(package())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(debian.shutil, "which", lambda _: "/usr/bin/apt-get")
    monkeypatch.setattr(subprocess, "run", downloaded)
    fashion_mnist_package("FashionMNIST/raw", tuple(FILES)).write(tmp_path)
    found = {path.name: path.read_bytes() for path in (tmp_path / "FashionMNIST/raw").iterdir()}
    assert found == FILES


def test_a_machine_without_apt_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian.shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="apt-get is not here"):
        fashion_mnist_package("raw", ()).write(tmp_path)


def test_what_apt_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 100, "", "W: something\nE: Unable to locate package")

    monkeypatch.setattr(debian.shutil, "which", lambda _: "/usr/bin/apt-get")
    monkeypatch.setattr(subprocess, "run", refused)
    with pytest.raises(InputError, match="apt-get download dataset-fashion-mnist: Unable to locate package"):
        fashion_mnist_package("raw", ()).write(tmp_path)
