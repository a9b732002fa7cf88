"""Scenarios by name, from any folder."""

from pathlib import Path

import pytest

from fedpriv.core.errors import InputError
from fedpriv.core.files import find_scenario_file, list_shipped_scenarios
from fedpriv.scenario.load import read_toml


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
