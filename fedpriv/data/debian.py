"""Fashion-MNIST out of Debian's package dataset-fashion-mnist, for machines that reach their distribution alone.

The package is downloaded by apt-get, which checks its signature, and never installed: its archive is read here.
"""

import gzip
import io
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fedpriv.data.cache import Source
from fedpriv.errors import InputError

PACKAGE = "dataset-fashion-mnist"
_WITHIN = "./usr/share/datasets/fashion-mnist"
_APT_SECONDS = 300.0
_MAGIC, _HEADER = b"!<arch>\n", 60


def fashion_mnist_package(folder: str, files: Sequence[str]) -> Source:
    """The IDX files `files`, written to `folder` below the root."""

    def write(root: Path) -> None:
        raw = root / folder
        raw.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="fedpriv-debian-") as downloads:
            content = _apt_download(Path(downloads)).read_bytes()
        for name, values in read_package(content, files).items():
            (raw / name).write_bytes(values)

    return Source(f"Debian's package {PACKAGE}", write)


def read_package(package: bytes, files: Sequence[str]) -> dict[str, bytes]:
    """The named files of a .deb, unzipped; InputError if it is none or lacks one."""
    try:
        with tarfile.open(fileobj=io.BytesIO(_data_of(package)), mode="r:*") as archive:
            found = {}
            for name in files:
                member = archive.extractfile(f"{_WITHIN}/{name}.gz")
                if member is None:
                    raise KeyError(name)
                found[name] = gzip.decompress(member.read())
            return found
    except (KeyError, EOFError, OSError, ValueError, tarfile.TarError) as error:
        raise InputError(f"{PACKAGE}: not the expected package ({str(error).splitlines()[0]})") from None


def _data_of(package: bytes) -> bytes:
    """The member data.tar.* of an ar archive: headers of 60 bytes, each before content of even length."""
    if not package.startswith(_MAGIC):
        raise ValueError("no ar archive")
    start = len(_MAGIC)
    while start < len(package):
        header = package[start : start + _HEADER]
        size, start = int(header[48:58]), start + _HEADER
        if header[:16].decode("ascii").startswith("data.tar"):
            return package[start : start + size]
        start += size + size % 2
    raise ValueError("no data.tar in it")


def _apt_download(folder: Path) -> Path:
    if shutil.which("apt-get") is None:
        raise InputError("apt-get is not here")
    try:
        done = subprocess.run(
            ["apt-get", "download", "-q", PACKAGE],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_APT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"apt-get download {PACKAGE} took longer than {_APT_SECONDS:.0f} s") from None
    packages = list(folder.glob("*.deb"))
    if done.returncode or not packages:
        lines = done.stderr.strip().splitlines() or ["no package came"]
        raise InputError(f"apt-get download {PACKAGE}: {lines[-1].removeprefix('E: ')}")
    return packages[0]
