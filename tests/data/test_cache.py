"""The cache on disk: verified on every use, repaired when it is not whole, never half written.

A data set of two small files stands in for the real ones; its sources count how often they are asked.
"""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

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


def fails(_: Path) -> None:
    raise InputError("host not reached")


def holds_the_files(root: Path) -> bool:
    return all((root / FOLDER / name).read_bytes() == content for name, content in FILES.items())


def ensure(root: Path, *writers: Callable[[Path], None], hashes: dict[str, str] = SHA256) -> list[str]:
    """Lines of progress of a data set whose sources are `writers`."""
    lines: list[str] = []
    sources = [Source(f"source {number}", writer) for number, writer in enumerate(writers, start=1)]
    ensure_files("toy", Origin(FOLDER, hashes, sources), root, lines.append)
    return lines


both_kinds = pytest.mark.parametrize("hashes", [SHA256, MD5], ids=["sha256", "md5"])


@both_kinds
def test_a_cache_with_correct_hashes_is_not_fetched_again(tmp_path: Path, hashes: dict[str, str]) -> None:
    source, root = ToySource(), tmp_path / "new"
    assert ensure(root, source, hashes=hashes) == ["toy: trying source 1"]
    assert holds_the_files(root)
    before = sorted(root.rglob("*"))
    assert ensure(root, source, hashes=hashes) == []
    assert source.asked == 1
    assert sorted(root.rglob("*")) == before


@both_kinds
@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("images", FILES["images"][:3000], "images has been changed or cut short"),
        ("labels", FILES["labels"][:50] + b"X" + FILES["labels"][51:], "labels has been changed or cut short"),
        ("images", b"", "images has been changed or cut short"),
        ("labels", None, "labels is missing"),
    ],
    ids=["cut short", "tampered", "emptied", "removed"],
)
def test_a_damaged_cache_is_noticed_and_fetched_again(
    tmp_path: Path, name: str, content: bytes | None, problem: str, hashes: dict[str, str]
) -> None:
    source, place = ToySource(), tmp_path / FOLDER / name
    ensure(tmp_path, source, hashes=hashes)
    place.unlink()
    if content is not None:
        place.write_bytes(content)
    lines = ensure(tmp_path, source, hashes=hashes)
    assert source.asked == 2
    assert holds_the_files(tmp_path)
    assert any(problem in line and "fetching it again" in line for line in lines)


def test_a_forged_hash_record_does_not_validate_cached_files(tmp_path: Path) -> None:
    """A record that a user writes himself made any files "verified"."""
    forged = {"images": b"forged", "labels": b"forged"}
    ToySource(forged)(tmp_path)
    record = {name: hashlib.sha256(content).hexdigest() for name, content in forged.items()}
    (tmp_path / FOLDER / "fedpriv-sha256.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match="could not be fetched"):
        ensure(tmp_path, fails)
    source = ToySource()
    ensure(tmp_path, source)
    assert source.asked == 1
    assert holds_the_files(tmp_path)


@pytest.mark.parametrize("digest", ["", "abc", "sha1:abc"])
def test_a_data_set_file_without_a_valid_hash_is_refused(digest: str) -> None:
    with pytest.raises(ValueError, match="names no hash"):
        Origin(FOLDER, {"images": digest}, ())


def test_the_next_source_is_tried_when_one_fails(tmp_path: Path) -> None:
    assert ensure(tmp_path, fails, ToySource()) == ["toy: trying source 1", "toy: trying source 2"]
    assert holds_the_files(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"images": b"other", "labels": FILES["labels"]}, {"images": FILES["images"]}, {}]
)
def test_files_with_wrong_hashes_are_never_stored_in_the_cache(tmp_path: Path, wrong: dict[str, bytes]) -> None:
    with pytest.raises(InputError, match=r"source 1: what came is not the data set \((images|labels) "):
        ensure(tmp_path, ToySource(wrong))
    assert list(tmp_path.iterdir()) == []
    ensure(tmp_path, ToySource(wrong), ToySource())
    assert holds_the_files(tmp_path)


def test_extra_downloaded_files_are_not_stored_in_the_cache(tmp_path: Path) -> None:
    ensure(tmp_path, ToySource({**FILES, "archive.gz": b"large"}))
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == set(FILES)


def test_the_error_after_all_sources_failed_is_one_line_with_a_remedy(tmp_path: Path) -> None:
    disk_full = Mock(side_effect=OSError(28, "No space left on device"))
    with pytest.raises(InputError) as raised:
        ensure(tmp_path, fails, disk_full)
    message = str(raised.value)
    assert "\n" not in message
    assert "source 1: host not reached; source 2: [Errno 28] No space left on device" in message
    assert "connect to a network and try again" in message
    assert f"put the files images, labels, unpacked as they are named, into {tmp_path / FOLDER}" in message


def test_files_that_a_user_puts_in_place_are_accepted_without_a_download(tmp_path: Path) -> None:
    ToySource()(tmp_path)
    ensure(tmp_path, fails)


def test_a_data_root_that_is_a_file_raises_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("in the way")
    with pytest.raises(InputError, match=r"root: File exists; set FEDPRIV_DATA"):
        ensure(tmp_path / "root", ToySource())


@both_kinds
def test_an_interrupted_download_leaves_no_files(tmp_path: Path, hashes: dict[str, str]) -> None:
    def dies(root: Path) -> None:
        (root / FOLDER).mkdir(parents=True)
        (root / FOLDER / "images").write_bytes(FILES["images"][:100])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure(tmp_path, dies, hashes=hashes)
    assert list(tmp_path.iterdir()) == []


@both_kinds
@pytest.mark.parametrize("killed_at", ["images", "labels"])
def test_a_fetch_killed_between_two_files_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str, hashes: dict[str, str]
) -> None:
    """Other files lie in the folder before; the fetch is killed as it is about to put `killed_at` in place."""
    ToySource(dict.fromkeys(FILES, b"old"))(tmp_path)
    whole = os.replace

    def replace(draft: Path, place: Path) -> None:
        if place.name == killed_at:
            raise KeyboardInterrupt
        whole(draft, place)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        ensure(tmp_path, ToySource(), hashes=hashes)
    assert all((tmp_path / FOLDER / name).read_bytes() in (b"old", FILES[name]) for name in FILES)
    monkeypatch.undo()
    again = ToySource()
    ensure(tmp_path, again, hashes=hashes)
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
        ensure(tmp_path, write, hashes=hashes)
        verified.put(holds_the_files(tmp_path))

    processes = [context.Process(target=fetch) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [verified.get(timeout=5) for _ in processes] == [True, True]
    ensure(tmp_path, fails, hashes=hashes)
    assert [path.name for path in tmp_path.iterdir()] == ["TOY"]
