"""`fedpriv export`: events that dp-accounting reads, and a crate that describes the folder."""

import json
import re
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from typer.testing import CliRunner

import fedpriv
from fedpriv.cli.app import app
from fedpriv.core.errors import InputError
from fedpriv.show.page import export_run
from tests.conftest import small_tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished cells, untrusted and trusted."""
    tree = {**small_tree(), "sweep": {"algorithm.trust": ["untrusted", "trusted"]}}
    return fedpriv.run(tree, out=tmp_path_factory.mktemp("runs") / "small").folder


def exported(folder: Path, form: str) -> Any:
    done = CliRunner().invoke(app, ["export", str(folder), "--as", form], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(Path(done.output.strip()).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_dp_accounting_reads_exported_events_and_computes_the_same_epsilon(folder: Path) -> None:
    """With the reader that docs/python.md shows."""

    def event(tree: Any) -> Any:
        if isinstance(tree, list):
            return [event(one) for one in tree]
        if not isinstance(tree, dict):
            return tree
        return getattr(dp_accounting, tree["class"])(**{k: event(v) for k, v in tree.items() if k != "class"})

    cells = exported(folder, "dp-accounting")
    assert [cell["point"]["algorithm.trust"] for cell in cells] == ["untrusted", "trusted"]
    for cell, mine in zip(cells, fedpriv.load(folder), strict=True):
        accountant = PLDAccountant(dp_accounting.NeighboringRelation[cell["neighboring_relation"]])
        theirs = accountant.compose(event(cell["event"])).get_epsilon(cell["delta"])
        assert theirs == pytest.approx(mine.privacy.epsilon, rel=1e-3)


def test_an_ro_crate_lists_every_file_of_a_run_with_its_version_and_privacy_claim(folder: Path) -> None:
    (folder / ".draft").write_text("not of the run", encoding="utf-8")
    crate = exported(folder, "ro-crate")
    assert crate["@context"] == "https://w3id.org/ro/crate/1.1/context"
    entities = {entity["@id"]: entity for entity in crate["@graph"]}
    assert len(entities) == len(crate["@graph"])
    descriptor, root = entities["ro-crate-metadata.json"], entities["./"]
    assert descriptor["about"] == {"@id": "./"}
    assert descriptor["conformsTo"] == {"@id": "https://w3id.org/ro/crate/1.1"}
    named = {part["@id"] for part in root["hasPart"]}
    assert named >= {"results.json", "history.jsonl", "models/0000.npy", "models/0001.npy"}
    assert named == {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".draft", "ro-crate-metadata.json")
    }
    written = (folder / "results.json").read_bytes()
    assert int(entities["results.json"]["contentSize"]) == len(written)
    assert entities["#run"]["actionStatus"]["@id"].endswith("CompletedActionStatus")
    assert entities["#fedpriv"]["version"] == json.loads(written)["versions"]["fedpriv"]
    assert root["datePublished"].endswith("+00:00")
    assert "μ-GDP exactly with μ = 4" in entities["#privacy-1"]["value"]


def test_every_internal_link_of_an_ro_crate_has_its_entity(folder: Path) -> None:
    crate = exported(folder, "ro-crate")
    known = {entity["@id"] for entity in crate["@graph"]}

    links = set(re.findall(r'\{"@id": "([^"]*)"\}', json.dumps(crate["@graph"])))
    assert all(link.startswith(("https://w3id.org/", "http://schema.org/")) for link in links - known)


def test_an_ro_crate_of_an_unfinished_run_has_the_active_action_status(folder: Path, tmp_path: Path) -> None:
    tree = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    tree |= {"complete": False, "cells": tree["cells"][:1]}
    (tmp_path / "results.json").write_text(json.dumps(tree), encoding="utf-8")
    entities = {entity["@id"]: entity for entity in exported(tmp_path, "ro-crate")["@graph"]}
    assert entities["#run"]["actionStatus"]["@id"].endswith("ActiveActionStatus")


def test_an_ro_crate_of_results_without_a_version_or_a_date_has_an_unknown_version_or_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    """Before: a KeyError, and a ValueError."""
    tree = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    (tmp_path / "results.json").write_text(json.dumps({**tree, "versions": {}}), encoding="utf-8")
    entities = {entity["@id"]: entity for entity in exported(tmp_path, "ro-crate")["@graph"]}
    assert entities["#fedpriv"]["version"] == "unknown"
    (tmp_path / "results.json").write_text(json.dumps({**tree, "date": "yesterday"}), encoding="utf-8")
    with pytest.raises(InputError, match="date = 'yesterday': expected one like"):
        export_run(tmp_path, "ro-crate")


def test_an_export_to_an_unknown_format_or_without_results_is_refused_and_writes_nothing(
    folder: Path, tmp_path: Path
) -> None:
    for where, form, said in (
        (folder, "ro-crat", "--as ro-crat: known forms are dp-accounting, ro-crate; did you mean 'ro-crate'?"),
        (tmp_path, "ro-crate", "no results.json there"),
        (tmp_path, "dp-accounting", "no results.json there"),
    ):
        with pytest.raises(InputError, match=said.replace("?", r"\?")):
            CliRunner().invoke(app, ["export", str(where), "--as", form], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []
