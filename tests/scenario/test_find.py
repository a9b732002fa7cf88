"""Scenarios by name, from any folder."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fedpriv.addons.certificate.certify import read_certificate
from fedpriv.core.errors import InputError
from fedpriv.core.files import find_scenario_file, list_shipped_scenarios
from fedpriv.core.signed import read_signers
from fedpriv.scenario.load import read_toml
from fedpriv.silo.policy import read_policy


@pytest.mark.parametrize("given", ["quickstart", "quickstart.toml", "scenarios/quickstart.toml"])
def test_a_shipped_scenario_is_found_from_an_empty_folder(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart").mkdir()  # such as a folder of results, which is no scenario
    assert read_toml(find_scenario_file(Path(given)))["name"] == "quickstart"


def test_a_local_scenario_file_takes_precedence_over_a_shipped_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart.toml").write_text('name = "mine"', encoding="utf-8")
    assert find_scenario_file(Path("quickstart.toml")) == Path("quickstart.toml")


def test_every_scenario_file_of_the_repository_is_shipped() -> None:
    root = Path(__file__).resolve().parents[2]
    assert set(list_shipped_scenarios()) == {path.stem for path in (root / "scenarios").glob("*.toml")}


@pytest.mark.parametrize("given", ["quikstart", "elsewhere/quickstart.toml", "quickstart.json"])
def test_an_unknown_scenario_name_is_refused(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no such file, and no scenario of that name is shipped"):
        find_scenario_file(Path(given))


@pytest.mark.parametrize("read", [find_scenario_file, read_policy, read_certificate, read_signers])
def test_a_named_pipe_is_refused_and_not_waited_for(read: Callable[[Path], object], tmp_path: Path) -> None:
    """Before: a command waited for a writer without a word."""
    path = tmp_path / "pipe.toml"
    os.mkfifo(path, 0o600)
    writer = threading.Thread(target=path.write_bytes, args=(b"",), daemon=True)  # ends the wait of a reader
    writer.start()
    with pytest.raises(InputError, match=r"pipe\.toml: is a named pipe; expected a file"):
        read(path)
    os.close(os.open(path, os.O_RDONLY))
    writer.join()


def test_a_pipe_of_process_substitution_is_a_scenario_file() -> None:
    """A shell opens both ends, so that nothing waits."""
    reader, writer = os.pipe()
    os.write(writer, b'name = "piped"')
    os.close(writer)
    try:
        assert read_toml(find_scenario_file(Path(f"/dev/fd/{reader}"))) == {"name": "piped"}
    finally:
        os.close(reader)
