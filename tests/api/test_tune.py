"""`fedpriv.tune` chooses what the command chooses, also for records and modules of a program."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from tests.cli import command

SCENARIO = """
name = "mine"
[data]
name = "synthetic"
[federation]
silos = 3
rounds = 10
samples = 600
[algorithm]
name = "dp-sgd"
trust = "trusted"
clip = 1.0
step = 0.5
[privacy]
relation = "replace-one"
mu = 5.0
"""
STEPS = [0.01, 0.5, 1000.0]


def records(count: int, seed: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    features = draw.standard_normal((count, 6)).astype("float32")
    return features, (features[:, 0] > 0).astype(int)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def test_tuning_from_python_chooses_what_the_tune_command_chooses(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SCENARIO)
    by_python = fedpriv.tune(
        tmp_path / "mine.toml", grid={"algorithm.step": STEPS}, set={"privacy.mu": 4.0}, out=tmp_path / "python"
    )
    done = command.fedpriv(
        "tune", "mine.toml", "--grid", f"algorithm.step={STEPS}", "--set", "privacy.mu=4.0", "--out", "line",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    by_command = json.loads((tmp_path / "line" / "tuning.json").read_text())["choices"]
    assert [dict(setting or {}) for setting in by_python.settings] == [choice["set"] for choice in by_command]
    assert list(by_python.scores) == [choice["score"] for choice in by_command]
    assert (tmp_path / "python" / "scenario.toml").read_text() == (tmp_path / "line" / "scenario.toml").read_text()
    assert any("no ε covers it" in sentence for sentence in by_python.costs)
    results = by_python.run(out=tmp_path / "run")
    assert results[0].scenario["privacy"]["mu"] == 4.0
    assert results[0].scenario["algorithm"]["step"] == by_python.settings[0]["algorithm.step"]  # type: ignore[index]


def test_own_records_and_a_module_are_tuned_and_run(tmp_path: Path) -> None:
    tuned = fedpriv.tune(
        "own-data", train=records(600, 0), test=records(200, 1), model=network(), held_out=120,
        grid={"algorithm.step": [1e-6, 0.03]},
        set={"federation.silos": 3, "federation.rounds": 20, "privacy.epsilon": 8.0},
        fixed={"run.evaluations": 1}, out=tmp_path / "tuned",
    )  # fmt: skip
    assert tuned.settings[0] is not None
    assert tuned.settings[0]["algorithm.step"] == 0.03
    assert tuned.tree["tuned"]["held_out"] == 120
    results = tuned.run(out=tmp_path / "run")
    assert results[0].scenario["algorithm"]["step"] == 0.03
    assert results[0].privacy.epsilon == pytest.approx(8.0, abs=0.01)
    assert results[0].test_accuracy > 0.7
    assert isinstance(results[0].to_module(), nn.Sequential)


def test_the_default_grid_of_own_data_varies_clip_norm_and_step(tmp_path: Path) -> None:
    tuned = fedpriv.tune(
        "own-data", train=records(300, 0), test=records(100, 1), model=network(), trials=3,
        set={"federation.silos": 3, "federation.rounds": 5}, out=tmp_path / "tuned",
    )  # fmt: skip
    assert tuned.settings[0] is not None
    assert set(tuned.settings[0]) == {"algorithm.clip", "algorithm.step"}


def test_a_tuning_that_is_resumed_with_another_seed_chooses_as_one_with_both(tmp_path: Path) -> None:
    """Was: scores were taken for those of other settings, since results have the new seed's cells last."""
    (tmp_path / "mine.toml").write_text(SCENARIO)
    options: dict[str, Any] = {"grid": {"algorithm.step": STEPS}, "fixed": {"federation.rounds": 5}}
    fedpriv.tune(tmp_path / "mine.toml", seeds=[100], out=tmp_path / "resumed", **options)
    resumed = fedpriv.tune(
        tmp_path / "mine.toml", seeds=[100, 101], out=tmp_path / "resumed", resume=True, **options
    )
    both = fedpriv.tune(tmp_path / "mine.toml", seeds=[100, 101], out=tmp_path / "both", **options)
    assert (resumed.settings, resumed.scores) == (both.settings, both.scores)


def test_private_tuning_states_the_epsilon_of_its_choice(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SCENARIO)
    tuned = fedpriv.tune(
        tmp_path / "mine.toml",
        grid={"algorithm.step": STEPS},
        private=True,
        trials=3,
        seed=5,
        out=tmp_path / "tuned",
    )
    assert "the choice of one row costs ε =" in tuned.costs[0]


def test_a_held_out_record_of_a_scaled_table_pays_for_the_first_step_and_its_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step read all records, so that a score has the rounds' share of μ.  Was: the whole μ besides."""
    values = np.random.default_rng(0).uniform(-1, 1, 400)
    lines = (f"{value:.3f},{'yes' if value > 0 else 'no'}\n" for value in values)
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(lines))
    table = {"public": True, "target": "y", "classes": ["no", "yes"], "columns": {"a": {"range": [-1.0, 1.0]}}}
    scale = {"share": 0.36, "means": [0.0], "deviations": [0.5]}
    tree = {
        **tomllib.loads(SCENARIO),
        "data": {"name": str(tmp_path / "t.csv"), "table": table, "scale": scale},
        "federation": {"silos": 3, "rounds": 5, "samples": 200},
        "model": {"name": "softmax-regression", "feature_norm": 2.0},
    }
    scales: list[float] = []

    def record_scale(finished: Any, held_out: int, mu: float, generator: Any) -> float:
        scales.append(mu)
        return 0.0

    monkeypatch.setattr("fedpriv.addons.tune.tune.noisy_score", record_scale)
    options: dict[str, Any] = {"grid": {"algorithm.step": [0.1]}, "private": True, "trials": 1, "seed": 5}
    fedpriv.tune(tree, **options, out=tmp_path / "tuned")
    assert scales == pytest.approx([0.8 * 5.0])
    with pytest.raises(fedpriv.InputError, match="while tuning, but the choice is charged for"):
        fedpriv.tune(tree, **options, fixed={"data.scale.share": 0.1}, out=tmp_path / "other")


def test_private_tuning_refuses_records_of_several_labels_of_which_some_may_be_left_out(tmp_path: Path) -> None:
    """The accuracy of 10 held-out records, 9 of them with one label that counts, is that of the tenth by 16/25."""
    draw = np.random.default_rng(0)
    features, labels = draw.standard_normal((200, 6)).astype("float32"), np.full((200, 16), -100)
    labels[:, 0], labels[-1] = 1, 2
    with pytest.raises(fedpriv.InputError, match="more than one record's share"):
        fedpriv.tune(
            "own-data", train=(features, labels), test=(features[:50], labels[:50]), classes=3, held_out=10,
            model=nn.Sequential(nn.Linear(6, 48), nn.Unflatten(1, (16, 3))), grid={"algorithm.step": [0.1]},
            set={"federation.silos": 2, "federation.rounds": 5, "algorithm.trust": "trusted"},
            private=True, trials=1, seed=5, out=tmp_path / "tuned",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"grid": {"privacy.mu": [1.0]}}, "says what is protected"),
        ({"gird": {}}, "tune: gird: no option; known are"),
        ({"train": (np.zeros((4, 2)), np.zeros(4, int)), "workers": 2}, "workers: other processes"),
        ({"poisson": True}, "give --private with them"),
        ({"fixed": {"run.evaluations": {}}}, "fixed: run.evaluations = {}: expected"),
    ],
)
def test_invalid_tuning_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(fedpriv.InputError, match=words):
        fedpriv.tune("quickstart", **arguments)
