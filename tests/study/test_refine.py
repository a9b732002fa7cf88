"""`fedpriv silo refine`: at home, without a socket, and nothing of it leaves."""

import json
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import Result

import fedpriv
from fedpriv.addons.worth import local_models as fits
from tests.study.builders import (
    added,
    added_cell,
    bytes_below,
    cell_on,
    first_silo,
    invoke,
    own_cache,
    thread_counts,
    two_classes,
)

__all__ = ["own_cache"]


def silo_at(folder: Path, each: int = 60) -> tuple[Path, Path, Path]:
    """(policy, scenario, released model) of a silo with training and test records."""
    folder.mkdir(exist_ok=True)
    train, test = two_classes(1, each, 1.0, 200)
    tests = {"test_features": test[0], "test_labels": test[1]}
    np.savez(folder / "shard-0.npz", features=train[0], labels=train[1], **tests)
    policy = folder / "silo-0.toml"
    policy.write_text(
        'silo = 0\nclasses = 2\nshard = "shard-0.npz"\nledger = "ledger-0.sqlite"\nsocket = "0.sock"\n[allow]\n'
        'relation = "zero-out"\nclip = 1.0\nrounds = 10\nbudget = 4.0\n'
    )
    for file in (policy, folder / "shard-0.npz"):
        file.chmod(0o600)
    scenario = folder / "run.toml"
    tree = cell_on(added("refined", 1, each, 1.0), 1, each).canonical_data()
    lines = [f'name = "worth"\nseed = {tree["seed"]}']
    for name in ("data", "model", "federation", "algorithm", "privacy"):
        keys = {key: value for key, value in tree[name].items() if not isinstance(value, dict)}
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    scenario.write_text("\n".join(lines) + "\n")
    model = folder / "model.npy"
    released = np.zeros((2, 21))
    released[:, 0] = [-5.0, 5.0]
    np.save(model, released.ravel())
    return policy, scenario, model


def refine(policy: Path, scenario: Path, *words: object) -> Result:
    return invoke("silo", "refine", policy, "--scenario", scenario, *words)


def test_refining_a_model_opens_no_socket_and_writes_files_for_their_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, scenario, model = silo_at(tmp_path / "silo")
    before = bytes_below(tmp_path / "silo")
    monkeypatch.setattr(socket, "socket", Mock(side_effect=AssertionError("a socket was opened")))
    done = refine(policy, scenario, "--model", model, "--out", tmp_path / "refined")
    assert done.exit_code == 0, done.output
    assert "this silo alone, nothing released" in done.output
    assert "keep it to yourself" in done.output
    written = tmp_path / "refined" / "personal.npy"
    assert written.stat().st_mode & 0o777 == 0o600
    assert written.parent.stat().st_mode & 0o777 == 0o700
    assert np.load(written).shape == (42,)
    assert bytes_below(tmp_path / "silo") == before


@pytest.mark.slow
def test_the_pull_weight_is_chosen_on_held_out_records_if_given_and_else_by_folds(tmp_path: Path) -> None:
    policy, scenario, model = silo_at(tmp_path)
    (features, labels), _ = two_classes(1, 30, 1.0, 10, seed=7)
    np.savez(tmp_path / "more.npz", features=features, labels=labels)
    (tmp_path / "more.npz").chmod(0o600)
    assert "has not read" in refine(policy, scenario, "--model", model, "--held-out", tmp_path / "more.npz").output
    assert "folds of records that the release has read" in refine(policy, scenario, "--model", model).output


@pytest.mark.parametrize("name", [7, "é", "é".encode()])
def test_no_folds_or_few_records_are_named_if_all_records_are_of_one_person(tmp_path: Path, name: Any) -> None:
    policy, scenario, model = silo_at(tmp_path, 20)
    arrays = {**np.load(tmp_path / "shard-0.npz"), "persons": np.array([name] * 20)}
    np.savez(tmp_path / "shard-0.npz", **arrays)
    more = {"features": arrays["features"], "labels": arrays["labels"], "persons": arrays["persons"]}
    np.savez(tmp_path / "more.npz", **more)
    (tmp_path / "more.npz").chmod(0o600)
    text = refine(policy, scenario, "--model", model, "--held-out", tmp_path / "more.npz").output
    assert "chosen on nothing, because all records are of one person.\n" in text
    assert "fewer than 10" not in text


@pytest.mark.slow
def test_the_learning_curve_of_a_local_model_needs_no_released_model(tmp_path: Path) -> None:
    policy, scenario, _ = silo_at(tmp_path)
    text = refine(policy, scenario, "--alone").output
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["15", "30", "60"]


@pytest.mark.slow
def test_unusable_models_held_out_files_and_folders_are_refused_by_refine_in_one_line(tmp_path: Path) -> None:
    policy, scenario, model = silo_at(tmp_path)

    def say(*words: object) -> str:
        done = refine(policy, scenario, *words)
        assert done.exit_code != 0
        return f"{done.output}{done.exception}"

    assert "give one" in say()
    released: Any
    for name, released, line in (
        ("other", np.zeros(7), "not a model of this scenario"),
        ("nan", np.full(42, np.nan), "not finite"),
        ("far", np.full(42, -1e308), "its run diverged"),
        ("objects", np.array([{}]), "not a released model"),
    ):
        np.save(tmp_path / f"{name}.npy", released, allow_pickle=True)
        assert line in say("--model", tmp_path / f"{name}.npy")
    for shape in ((10**30,), (10**15,)):
        with (tmp_path / "huge.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
        assert "huge.npy: not a released model" in say("--model", tmp_path / "huge.npy")
    np.savez(tmp_path / "wide.npz", features=np.zeros((9, 30)), labels=np.arange(9) % 2)
    (tmp_path / "wide.npz").chmod(0o600)
    assert "another shape" in say("--model", model, "--held-out", tmp_path / "wide.npz")
    (tmp_path / "open").mkdir(mode=0o755)
    assert "another user owns it or has access to it" in say("--model", model, "--out", tmp_path / "open")
    (tmp_path / "shard-0.npz").chmod(0o644)
    assert "shard-0.npz" in say("--model", model)


@pytest.mark.every(6)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("size", [1e30, 1e160, 1e308, np.inf, np.nan])
def test_a_hostile_released_model_gets_pull_weight_zero_in_the_personal_model(size: float) -> None:
    cell = added_cell("hostile", 2, 60, 1.0)
    objective, held = first_silo(cell)
    _, kappa = fits.fit_local_model(objective, held, cell.seed)
    hostile = np.where(np.arange(objective.dimension) % 2, -size, size)
    mine = fits.fit_personal_model(objective, held, hostile, cell.seed, kappa)
    assert mine.pull_weight == 0.0
    assert np.abs(mine.point).max() < 100.0


@pytest.mark.slow
def test_a_personal_model_appears_neither_in_the_run_folder_nor_in_sent_bytes(tmp_path: Path) -> None:
    """A run's folder and its messages have no byte of a silo's own model, before and after the silos looked."""
    cell = added_cell("wired")
    sent: list[bytes] = []
    real = socket.socket.send

    def watched(self: socket.socket, data: Any, *rest: Any) -> int:
        sent.append(bytes(data))
        return real(self, data, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "send", watched)
        patch.setattr(socket.socket, "sendall", watched)
        fedpriv.run(cell.canonical_data(), out=tmp_path / "run", engine="inprocess")
        before = bytes_below(tmp_path / "run")
        done = invoke("worth", tmp_path / "run", "--personal")
        assert done.exit_code == 0, done.output
    after = bytes_below(tmp_path / "run")
    assert before == after
    objective, held = first_silo(cell)
    own, kappa = fits.fit_local_model(objective, held, cell.seed)
    released = np.load(next((tmp_path / "run").rglob("*.npy"))).astype(np.float64)
    mine = fits.fit_personal_model(objective, held, released, cell.seed, kappa).point
    for secret in (own, mine):
        for kind in (np.float32, np.float64):
            piece = secret.astype(kind)[:2].tobytes()
            if secret is mine and np.array_equal(mine, released):
                continue
            assert not any(piece in content for content in (*after.values(), *sent))


@pytest.mark.slow
def test_refining_computes_in_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, scenario, model = silo_at(tmp_path / "home")

    def refine_twice() -> None:
        assert refine(policy, scenario, "--model", model).exit_code == 0
        assert refine(policy, scenario, "--alone").exit_code == 0

    assert thread_counts(monkeypatch, refine_twice) == {1}
