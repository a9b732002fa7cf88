"""`fedpriv init`, the scenario own-data and `fedpriv.run("own-data", …)` have what `fedpriv advise` says."""

import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.addons.begin.advise import NETWORK_CLIP, NETWORK_ROUNDS, NETWORK_STEP, SEQUENCE_STEP, as_advised
from fedpriv.addons.begin.command import create_folder
from fedpriv.core.files import find_scenario_file
from fedpriv.data.named import ARGUMENT_NAMES, make_dataset
from fedpriv.data.own import Dataset
from fedpriv.scenario.load import load_scenario, read_toml

KEYS = ("name", "trust", "clip", "step")


def records(count: int, scale: float = 1.0, classes: int | None = 2) -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    features = scale * draw.standard_normal((count, 20)).astype("float32")
    return features, (features[:, 0] > 0).astype(int) if classes else features[:, 0] / 5.0


def dataset(count: int, scale: float = 1.0, classes: int | None = 2) -> Dataset:
    return make_dataset(ARGUMENT_NAMES, records(count, scale, classes), records(40, scale, classes), classes)


def own() -> dict[str, Any]:
    return dict(read_toml(find_scenario_file(Path("own-data"))))


def test_the_init_command_writes_the_advised_settings(tmp_path: Path) -> None:
    create_folder(tmp_path / "study")
    text = (tmp_path / "study" / "scenario.toml").read_text(encoding="utf-8")
    tree = tomllib.loads(text)
    says = fedpriv.advise(silos=5, records=300, features=784, classes=10, epsilon=4.0, trust="trusted").tree
    assert [tree["algorithm"][key] for key in KEYS] == [says["algorithm"][key] for key in KEYS]
    assert tree["federation"] == says["federation"]
    assert tree["privacy"] == says["privacy"]
    assert tree["sweep"]["algorithm.name"] == ["dp-sgd", "my-algorithm"]
    assert "all records of a silo in every round" in text
    assert "ADVISED" not in text


def test_the_own_data_scenario_has_the_advised_settings_for_its_synthetic_records() -> None:
    cell = load_scenario(find_scenario_file(Path("own-data")), []).points[0].cell
    facts: Any = {"silos": 5, "records": 1200, "features": 784, "classes": 10, "epsilon": 4.0, "feature_norm": 5.0}
    says = fedpriv.advise(**facts, trust="trusted").tree
    algorithm = cell.canonical_data()["algorithm"]
    assert [algorithm.get(key) for key in KEYS] == [says["algorithm"][key] for key in KEYS]
    assert cell.batch_sizes == says["federation"]["batches"] or list(cell.batch_sizes) == [1200] * 5
    assert cell.schedule.rounds == says["federation"]["rounds"]


def test_the_clip_follows_the_bound_of_features_that_a_program_sets() -> None:
    clips = [
        as_advised(own(), dataset(1000), {"model.feature_norm": norm})["algorithm"]["clip"] for norm in (5.0, 50.0)
    ]
    assert clips[1] == pytest.approx(10.0 * clips[0], rel=0.05)


@pytest.mark.parametrize(
    ("asked", "facts"),
    [
        ({}, {"records": 200, "epsilon": 4.0, "trust": "trusted"}),
        ({"privacy.epsilon": [1.0, 8.0]}, {"records": 200, "epsilon": 1.0, "trust": "trusted"}),
        ({"algorithm.trust": ["untrusted"]}, {"records": 200, "epsilon": 4.0, "trust": "untrusted"}),
        ({"federation.samples": 500}, {"records": 100, "epsilon": 4.0, "trust": "trusted"}),
    ],
)
def test_own_data_settings_are_advised_for_the_given_records_epsilon_and_trust(
    asked: dict[str, Any], facts: dict[str, Any]
) -> None:
    tree = as_advised(own(), dataset(1000), asked)
    says = fedpriv.advise(silos=5, features=20, classes=2, feature_norm=5.0, **facts).tree
    assert tree["algorithm"] == says["algorithm"]
    assert tree["federation"]["rounds"] == tree["federation"]["epochs"] == says["federation"]["rounds"]


def test_advised_settings_do_not_depend_on_record_values_or_labels() -> None:
    """Guarantee of `as_advised`: records a thousand times as large, and other labels, change nothing."""
    one, other = dataset(300), dataset(300, 1000.0)
    other.train_labels[:] = 1 - other.train_labels
    assert as_advised(own(), one, {}) == as_advised(own(), other, {})


@pytest.mark.parametrize(
    "asked",
    [{"algorithm.name": "dp-ftrl"}, {"privacy.unit": "user"}, {"federation.batch": 3},
     {"federation.silos": "five"}, {"federation.samples": 2}, {"privacy.epsilon": "much"},
     {"federation.rounds": [10, 20]}],
)  # fmt: skip
def test_keys_outside_the_advice_leave_the_own_data_scenario_unchanged(asked: dict[str, Any]) -> None:
    assert as_advised(own(), dataset(100), asked) == own()


def test_the_advised_step_times_the_number_of_rounds_stays_constant() -> None:
    far = [as_advised(own(), dataset(1000), {"federation.rounds": rounds}) for rounds in (50, 200)]
    steps = [tree["algorithm"]["step"] * tree["federation"]["rounds"] for tree in far]
    assert steps[0] == pytest.approx(steps[1], rel=0.01)
    assert [tree["federation"]["epochs"] for tree in far] == [50, 200]


def test_a_regression_of_own_records_learns(tmp_path: Path) -> None:
    model = {"model.name": "linear-regression", "model.feature_norm": 5.0}
    train, test = records(1000, classes=None), records(200, classes=None)
    found = fedpriv.run("own-data", train=train, test=test, set=model, out=tmp_path / "run")
    assert getattr(found[0], "test_accuracy", None) is None  # was a KeyError
    assert found[0].metrics["test_loss"] < 0.5 * float(np.square(test[1]).mean()) / 2.0


def test_own_data_reaches_90_percent_accuracy_with_the_advised_settings(tmp_path: Path) -> None:
    found = fedpriv.run("own-data", train=records(1000), test=records(200), out=tmp_path / "run")
    assert found[0].test_accuracy is not None
    assert found[0].test_accuracy > 0.9
    assert found[0].privacy.epsilon == pytest.approx(4.0, abs=0.01)


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 2))


def test_advised_network_settings_are_fixed_and_independent_of_the_records() -> None:
    trees = [as_advised(own(), dataset(1000, scale), {}, network()) for scale in (1.0, 1000.0)]
    assert trees[0] == trees[1]
    algorithm = trees[0]["algorithm"]
    assert (algorithm["name"], algorithm["clip"], algorithm["step"]) == ("dp-adam", NETWORK_CLIP, NETWORK_STEP)
    assert trees[0]["federation"]["rounds"] == NETWORK_ROUNDS
    says = fedpriv.advise(silos=5, records=200, features=20, classes=2, epsilon=4.0, trust="trusted",
                          parameters=20 * 8 + 8 + 16 + 2).tree  # fmt: skip
    assert says["algorithm"] == algorithm


@pytest.mark.parametrize(
    ("layers", "step"),
    [
        ([nn.LSTM(20, 4)], SEQUENCE_STEP),
        ([nn.GRUCell(20, 4)], SEQUENCE_STEP),
        ([nn.TransformerEncoderLayer(20, 4, 8)], SEQUENCE_STEP),
        ([nn.Embedding(9, 20), nn.TransformerEncoderLayer(20, 4, 8)], NETWORK_STEP),
        ([nn.Linear(20, 4)], NETWORK_STEP),
    ],
)
def test_layers_that_read_sequences_of_numbers_are_advised_a_longer_step(
    layers: list[nn.Module], step: float
) -> None:
    module = nn.Sequential(nn.Identity(), nn.ModuleDict({"first": nn.Sequential(*layers)}))
    assert as_advised(own(), dataset(1000), {}, module)["algorithm"]["step"] == step


def test_the_advised_network_step_falls_with_the_square_root_of_rounds_and_with_width() -> None:
    def walk(rounds: int, width: int = 8) -> float:
        tree = as_advised(own(), dataset(1000), {"federation.rounds": rounds}, network(width))
        assert tree["federation"]["rounds"] == rounds
        return float(tree["algorithm"]["step"] * rounds**0.5)

    assert walk(25) == pytest.approx(walk(100), rel=0.01)
    assert walk(400) == pytest.approx(walk(100), rel=0.01)
    assert walk(100, 5000) < 0.6 * walk(100)


def test_naming_the_advised_algorithm_explicitly_still_gives_the_advised_settings() -> None:
    asked = as_advised(own(), dataset(1000), {"algorithm.name": "dp-adam"}, network())
    assert asked == as_advised(own(), dataset(1000), {}, network())
    assert as_advised(own(), dataset(1000), {"algorithm.name": "dp-adam"}) == own()


def test_the_advised_settings_for_a_network_reach_90_percent_accuracy(tmp_path: Path) -> None:
    advice = fedpriv.advise(silos=5, records=200, features=20, classes=2, epsilon=3.0, parameters=186)
    assert advice.epsilon == pytest.approx(3.0, abs=0.01)
    assert "a run that learns nothing says so" in advice.forecast.sentence
    results = fedpriv.run(
        advice.tree, train=records(1000), test=records(200), model=network(), out=tmp_path / "run"
    )
    assert results[0].test_accuracy > 0.9


def test_own_data_warns_that_it_trusts_the_server_unless_trust_is_given(tmp_path: Path) -> None:
    settings = {"federation.rounds": 2}
    with pytest.warns(UserWarning, match="own-data trusts the server, which sees every silo's sums without noise"):
        fedpriv.run("own-data", train=records(100), test=records(40), set=settings, out=tmp_path / "a")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fedpriv.run(
            "own-data", train=records(100), test=records(40), trust="trusted", set=settings, out=tmp_path / "b"
        )
    assert not any("trusts the server" in str(warning.message) for warning in caught)


@pytest.mark.slow
def test_the_comparison_scenario_of_init_runs_four_algorithms(tmp_path: Path) -> None:
    (path,) = create_folder(tmp_path / "four", is_comparison=True)
    small = {"federation.samples": 600, "seeds": 1, "privacy.epsilon": [4.0]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = fedpriv.run(path, set=small, out=tmp_path / "run")
    names = [cell.scenario["algorithm"]["name"] for cell in results]
    assert names == ["dp-sgd", "dp-adam", "dp-ftrl", "dp-mu2-fl"]
    assert results.complete
