"""The cache on disk: verified on every use, repaired when it is not whole, never half written.

A data set of two small files stands in for the real ones; its sources count how often they are asked.
"""

import contextlib
import hashlib
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedpriv.data import cache
from fedpriv.data.cache import RECORD, Origin, Source, ensure
from fedpriv.errors import InputError

FILES = {"images": b"images " * 1000, "labels": b"labels " * 100}
SHA256 = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
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


def origin_of(*writers: Callable[[Path], None], sha256: dict[str, str] = SHA256) -> Origin:
    sources = [Source(f"source {number}", writer) for number, writer in enumerate(writers, start=1)]
    return Origin(FOLDER, tuple(FILES), sources, sha256)


def fails(_: Path) -> None:
    raise InputError("host not reached")


def holds_the_files(root: Path) -> bool:
    return all((root / FOLDER / name).read_bytes() == content for name, content in FILES.items())


def quiet(_: str) -> None:
    pass


both_kinds = pytest.mark.parametrize("sha256", [SHA256, {}], ids=["hashes known", "hashes recorded"])


@both_kinds
def test_a_cache_that_verifies_is_not_fetched_again(tmp_path: Path, sha256: dict[str, str]) -> None:
    source = ToySource()
    said: list[str] = []
    ensure("toy", origin_of(source, sha256=sha256), tmp_path / "new", said.append)
    assert holds_the_files(tmp_path / "new")
    assert said == ["toy: trying source 1"]
    before = sorted((tmp_path / "new").rglob("*"))
    ensure("toy", origin_of(source, sha256=sha256), tmp_path / "new", said.append)
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
    tmp_path: Path, damage: Callable[[Path], None], problem: str, sha256: dict[str, str]
) -> None:
    source = ToySource()
    said: list[str] = []
    ensure("toy", origin_of(source, sha256=sha256), tmp_path, quiet)
    damage(tmp_path / FOLDER)
    ensure("toy", origin_of(source, sha256=sha256), tmp_path, said.append)
    assert source.asked == 2
    assert holds_the_files(tmp_path)
    assert any(problem in line and "fetching it again" in line for line in said)


@pytest.mark.parametrize("record", [None, "", "[]", "{}", '{"images": 3, "labels": null}'])
def test_a_record_that_is_lost_or_damaged_means_fetching_again(tmp_path: Path, record: str | None) -> None:
    source = ToySource()
    ensure("toy", origin_of(source, sha256={}), tmp_path, quiet)
    path = tmp_path / FOLDER / RECORD
    path.unlink() if record is None else path.write_text(record)
    ensure("toy", origin_of(source, sha256={}), tmp_path, quiet)
    assert source.asked == 2
    ensure("toy", origin_of(source, sha256={}), tmp_path, quiet)
    assert source.asked == 2


def test_a_record_cannot_replace_a_hash_that_is_known_beforehand(tmp_path: Path) -> None:
    forged = ToySource({"images": b"forged", "labels": b"forged"})
    ensure("toy", origin_of(forged, sha256={}), tmp_path, quiet)
    source = ToySource()
    ensure("toy", origin_of(source), tmp_path, quiet)
    assert source.asked == 1
    assert holds_the_files(tmp_path)


def test_the_next_source_is_tried_when_one_fails(tmp_path: Path) -> None:
    source = ToySource()
    said: list[str] = []
    ensure("toy", origin_of(fails, source), tmp_path, said.append)
    assert said == ["toy: trying source 1", "toy: trying source 2"]
    assert holds_the_files(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"images": b"other", "labels": FILES["labels"]}, {"images": FILES["images"]}, {}]
)
def test_what_is_not_the_data_set_is_never_put_in_place(tmp_path: Path, wrong: dict[str, bytes]) -> None:
    with pytest.raises(InputError, match=r"source 1: what came is not the data set \((images|labels) "):
        ensure("toy", origin_of(ToySource(wrong)), tmp_path, quiet)
    assert list(tmp_path.iterdir()) == []
    ensure("toy", origin_of(ToySource(wrong), ToySource()), tmp_path, quiet)
    assert holds_the_files(tmp_path)


def test_files_that_are_not_asked_for_are_not_kept(tmp_path: Path) -> None:
    ensure("toy", origin_of(ToySource({**FILES, "archive.gz": b"large"})), tmp_path, quiet)
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == set(FILES)


def test_no_source_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    def disk_full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError) as raised:
        ensure("toy", origin_of(fails, disk_full), tmp_path, quiet)
    message = str(raised.value)
    assert "\n" not in message
    assert "source 1: host not reached; source 2: [Errno 28] No space left on device" in message
    assert "connect to a network and try again" in message
    assert f"put the uncompressed files images, labels into {tmp_path / FOLDER}" in message


def test_what_the_error_says_works(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir(parents=True)
    for name, content in FILES.items():
        (tmp_path / FOLDER / name).write_bytes(content)
    ensure("toy", origin_of(fails), tmp_path, quiet)


def test_what_the_error_says_works_where_hashes_are_recorded(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with pytest.raises(InputError, match=f"`fedpriv data fetch toy` worked into {here / FOLDER}"):
        ensure("toy", origin_of(fails, sha256={}), here, quiet)
    ensure("toy", origin_of(ToySource(), sha256={}), there, quiet)
    (there / "TOY").rename(here / "TOY")
    ensure("toy", origin_of(fails, sha256={}), here, quiet)


def test_a_root_that_is_a_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("in the way")
    with pytest.raises(InputError, match=r"root: File exists; set FEDPRIV_DATA"):
        ensure("toy", origin_of(ToySource()), tmp_path / "root", quiet)


@both_kinds
def test_a_source_that_dies_half_way_leaves_nothing(tmp_path: Path, sha256: dict[str, str]) -> None:
    def dies(root: Path) -> None:
        (root / FOLDER).mkdir(parents=True)
        (root / FOLDER / "images").write_bytes(FILES["images"][:100])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure("toy", origin_of(dies, sha256=sha256), tmp_path, quiet)
    assert list(tmp_path.iterdir()) == []


@both_kinds
@pytest.mark.parametrize("killed_at", ["images", "labels", RECORD])
def test_a_fetch_killed_between_two_files_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str, sha256: dict[str, str]
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

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(cache, "write_json", killed)
    never_written = killed_at == RECORD and sha256  # known hashes need no record
    with contextlib.nullcontext() if never_written else pytest.raises(KeyboardInterrupt):
        ensure("toy", origin_of(ToySource(), sha256=sha256), tmp_path, quiet)
    assert all((tmp_path / FOLDER / name).read_bytes() in (b"old", FILES[name]) for name in FILES)
    monkeypatch.undo()
    again = ToySource()
    ensure("toy", origin_of(again, sha256=sha256), tmp_path, quiet)
    assert again.asked == (0 if never_written else 1)
    assert holds_the_files(tmp_path)


@both_kinds
def test_two_processes_may_fetch_at_once(tmp_path: Path, sha256: dict[str, str]) -> None:
    context = multiprocessing.get_context("fork")
    together, verified = context.Barrier(2), context.Queue()

    def write(root: Path) -> None:
        together.wait(timeout=30)  # both have found the cache empty
        ToySource()(root)
        together.wait(timeout=30)  # both are about to put their files in place

    def fetch() -> None:
        ensure("toy", origin_of(write, sha256=sha256), tmp_path, quiet)
        verified.put(holds_the_files(tmp_path))

    processes = [context.Process(target=fetch) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [verified.get(timeout=5) for _ in processes] == [True, True]
    ensure("toy", origin_of(fails, sha256=sha256), tmp_path, quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["TOY"]
