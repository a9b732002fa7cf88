"""The cache on disk: verified on every use, repaired when it is not whole, never half written.

A data set of two small files stands in for the real ones; its sources count how often they are asked.
"""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedpriv.core.errors import InputError
from fedpriv.data.formats import Origin, Source, ensure_files

FILES = {"images": b"images " * 1000, "labels": b"labels " * 100}
SHA256, MD5 = (
    {name: f"{kind}:{hashlib.new(kind, content).hexdigest()}" for name, content in FILES.items()}
    for kind in ("sha256", "md5")
)
FOLDER = "TOY/raw"


class ToySource:
    """Writes `files`; `asked` counts the calls."""

    def __init__(self, files: dict[str, bytes] = FILES) -> None:
        self.files = files
        self.asked = 0

    def __call__(self, root: Path) -> None:
        self.asked += 1
        (root / FOLDER).mkdir(parents=True)
        for name, content in self.files.items():
            (root / FOLDER / name).write_bytes(content)


def origin_of(*writers: Callable[[Path], None], hashes: dict[str, str] = SHA256) -> Origin:
    sources = [Source(f"source {number}", writer) for number, writer in enumerate(writers, start=1)]
    return Origin(FOLDER, hashes, sources)


def fails(_: Path) -> None:
    raise InputError("host not reached")


def holds_the_files(root: Path) -> bool:
    return all((root / FOLDER / name).read_bytes() == content for name, content in FILES.items())


def quiet(_: str) -> None:
    pass


both_kinds = pytest.mark.parametrize("hashes", [SHA256, MD5], ids=["sha256", "md5"])


@both_kinds
def test_a_cache_that_verifies_is_not_fetched_again(tmp_path: Path, hashes: dict[str, str]) -> None:
    source = ToySource()
    said: list[str] = []
    ensure_files("toy", origin_of(source, hashes=hashes), tmp_path / "new", said.append)
    assert holds_the_files(tmp_path / "new")
    assert said == ["toy: trying source 1"]
    before = sorted((tmp_path / "new").rglob("*"))
    ensure_files("toy", origin_of(source, hashes=hashes), tmp_path / "new", said.append)
    assert source.asked == 1
    assert len(said) == 1
    assert sorted((tmp_path / "new").rglob("*")) == before


def cut_short(folder: Path) -> None:
    os.truncate(folder / "images", 3000)


def tampered(folder: Path) -> None:
    with (folder / "labels").open("r+b") as file:
        file.seek(50)
        file.write(b"X")


def emptied(folder: Path) -> None:
    (folder / "images").write_bytes(b"")


def removed(folder: Path) -> None:
    (folder / "labels").unlink()


@both_kinds
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut_short, "images has been changed or cut short"),
        (tampered, "labels has been changed or cut short"),
        (emptied, "images has been changed or cut short"),
        (removed, "labels is missing"),
    ],
)
def test_a_damaged_cache_is_noticed_and_fetched_again(
    tmp_path: Path, damage: Callable[[Path], None], problem: str, hashes: dict[str, str]
) -> None:
    source = ToySource()
    said: list[str] = []
    ensure_files("toy", origin_of(source, hashes=hashes), tmp_path, quiet)
    damage(tmp_path / FOLDER)
    ensure_files("toy", origin_of(source, hashes=hashes), tmp_path, said.append)
    assert source.asked == 2
    assert holds_the_files(tmp_path)
    assert any(problem in line and "fetching it again" in line for line in said)


def test_nothing_beside_the_files_can_vouch_for_them(tmp_path: Path) -> None:
    """A record that a user writes himself made any files "verified"."""
    forged = {"images": b"forged", "labels": b"forged"}
    ToySource(forged)(tmp_path)
    record = {name: hashlib.sha256(content).hexdigest() for name, content in forged.items()}
    (tmp_path / FOLDER / "fedpriv-sha256.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match="could not be fetched"):
        ensure_files("toy", origin_of(fails), tmp_path, quiet)
    source = ToySource()
    ensure_files("toy", origin_of(source), tmp_path, quiet)
    assert source.asked == 1
    assert holds_the_files(tmp_path)


@pytest.mark.parametrize("digest", ["", "abc", "sha1:abc"])
def test_a_file_without_a_hash_cannot_be_offered(digest: str) -> None:
    with pytest.raises(ValueError, match="names no hash"):
        Origin(FOLDER, {"images": digest}, ())


def test_the_next_source_is_tried_when_one_fails(tmp_path: Path) -> None:
    source = ToySource()
    said: list[str] = []
    ensure_files("toy", origin_of(fails, source), tmp_path, said.append)
    assert said == ["toy: trying source 1", "toy: trying source 2"]
    assert holds_the_files(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"images": b"other", "labels": FILES["labels"]}, {"images": FILES["images"]}, {}]
)
def test_what_is_not_the_data_set_is_never_put_in_place(tmp_path: Path, wrong: dict[str, bytes]) -> None:
    with pytest.raises(InputError, match=r"source 1: what came is not the data set \((images|labels) "):
        ensure_files("toy", origin_of(ToySource(wrong)), tmp_path, quiet)
    assert list(tmp_path.iterdir()) == []
    ensure_files("toy", origin_of(ToySource(wrong), ToySource()), tmp_path, quiet)
    assert holds_the_files(tmp_path)


def test_files_that_are_not_asked_for_are_not_kept(tmp_path: Path) -> None:
    ensure_files("toy", origin_of(ToySource({**FILES, "archive.gz": b"large"})), tmp_path, quiet)
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == set(FILES)


def test_no_source_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    def disk_full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError) as raised:
        ensure_files("toy", origin_of(fails, disk_full), tmp_path, quiet)
    message = str(raised.value)
    assert "\n" not in message
    assert "source 1: host not reached; source 2: [Errno 28] No space left on device" in message
    assert "connect to a network and try again" in message
    assert f"put the files images, labels, unpacked as they are named, into {tmp_path / FOLDER}" in message


def test_what_the_error_says_works(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir(parents=True)
    for name, content in FILES.items():
        (tmp_path / FOLDER / name).write_bytes(content)
    ensure_files("toy", origin_of(fails), tmp_path, quiet)


def test_a_root_that_is_a_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("in the way")
    with pytest.raises(InputError, match=r"root: File exists; set FEDPRIV_DATA"):
        ensure_files("toy", origin_of(ToySource()), tmp_path / "root", quiet)


@both_kinds
def test_a_source_that_dies_half_way_leaves_nothing(tmp_path: Path, hashes: dict[str, str]) -> None:
    def dies(root: Path) -> None:
        (root / FOLDER).mkdir(parents=True)
        (root / FOLDER / "images").write_bytes(FILES["images"][:100])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_files("toy", origin_of(dies, hashes=hashes), tmp_path, quiet)
    assert list(tmp_path.iterdir()) == []


@both_kinds
@pytest.mark.parametrize("killed_at", ["images", "labels"])
def test_a_fetch_killed_between_two_files_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str, hashes: dict[str, str]
) -> None:
    """Other files lie in the folder before; the fetch is killed as it is about to put `killed_at` in place."""
    (tmp_path / FOLDER).mkdir(parents=True)
    for name in FILES:
        (tmp_path / FOLDER / name).write_bytes(b"old")
    whole = os.replace

    def replace(draft: Path, place: Path) -> None:
        if place.name == killed_at:
            raise KeyboardInterrupt
        whole(draft, place)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        ensure_files("toy", origin_of(ToySource(), hashes=hashes), tmp_path, quiet)
    assert all((tmp_path / FOLDER / name).read_bytes() in (b"old", FILES[name]) for name in FILES)
    monkeypatch.undo()
    again = ToySource()
    ensure_files("toy", origin_of(again, hashes=hashes), tmp_path, quiet)
    assert again.asked == 1
    assert holds_the_files(tmp_path)


@both_kinds
def test_two_processes_may_fetch_at_once(tmp_path: Path, hashes: dict[str, str]) -> None:
    context = multiprocessing.get_context("fork")
    together, verified = context.Barrier(2), context.Queue()

    def write(root: Path) -> None:
        together.wait(timeout=30)  # both have found the cache empty
        ToySource()(root)
        together.wait(timeout=30)  # both are about to put their files in place

    def fetch() -> None:
        ensure_files("toy", origin_of(write, hashes=hashes), tmp_path, quiet)
        verified.put(holds_the_files(tmp_path))

    processes = [context.Process(target=fetch) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [verified.get(timeout=5) for _ in processes] == [True, True]
    ensure_files("toy", origin_of(fails, hashes=hashes), tmp_path, quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["TOY"]
