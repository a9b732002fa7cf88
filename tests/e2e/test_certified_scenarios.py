"""Every shipped scenario's reduced run is certified, and verifies in a process that has no data."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fedpriv
from benchmarks.reduced import SCENARIOS, WEIGHTS, reduced
from fedpriv.data import named
from fedpriv.plan import task
from tests.cli.command import fedpriv as command


@pytest.fixture(scope="module", autouse=True)
def pictures_are_few() -> Iterator[None]:
    """The first 12,000 training records of MNIST and Fashion-MNIST, and 1,000 test records."""

    def read(folder: Path, split: str) -> tuple[Any, ...]:
        count = {"train": 12_000, "test": 1_000}[split]
        return tuple(part[:count] for part in _read_all(folder, split))

    _read_all, classes = named._READERS["mnist"]
    with mock.patch.dict(named._READERS, dict.fromkeys(("mnist", "fashion-mnist"), (read, classes))):
        yield
    for function in (task.load_task_of_inputs, task._load_public_task, task._load_unit_task):
        function.cache_clear()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """Another process, which has a home of its own and has run nothing but what it is given."""
    home = tmp_path_factory.mktemp("home")
    with ProcessPoolExecutor(1, get_context("spawn"), live_in, (home,)) as process:
        yield process


def live_in(home: Path) -> None:
    os.environ |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "nothing")}


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_certificate_of_every_reduced_scenario_run_verifies_without_the_data(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: ProcessPoolExecutor
) -> None:
    monkeypatch.setenv("FEDPRIV_WEIGHTS", str(WEIGHTS))
    folder = tmp_path / "run"
    cells = fedpriv.run(path, set=reduced(path), out=folder).cells
    own = ["--key", folder / "key", "--cell", len(cells) - 1]
    done = command("certify", folder, *own, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("certificate.html", "model-card.md"):
        assert "A SIMULATION" in (folder / name).read_text()
    (folder / "trusted").write_text(done.stdout.splitlines()[0] + "\n")
    given = ["--keys", folder / "trusted", "--model", folder / f"models/{len(cells) - 1:04d}.npy"]
    verify = ["certify", "--verify", folder / "certificate.json", *given]
    again = elsewhere.submit(command, *verify, cwd=tmp_path).result()
    assert (again.returncode, again.stderr) == (0, ""), again.stderr
