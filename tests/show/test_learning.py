"""A run that learns nothing says so in terminal, Python, notebook, table and report."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.addons import learning
from fedpriv.cli.explore import show_run
from fedpriv.data.layout import IGNORED_CLASS
from fedpriv.loss.losses import CrossEntropy, MeanOverLabels
from fedpriv.show.summary import list_findings
from fedpriv.study.results import read_results

Arrays = tuple[np.ndarray, np.ndarray]


def records(count: int, shares: tuple[float, ...], seed: int = 0) -> Arrays:
    """Records of six features whose class moves the first of them."""
    draw = np.random.default_rng(seed)
    labels = draw.choice(len(shares), size=count, p=shares)
    features = draw.normal(size=(count, 6)).astype("float32")
    features[np.arange(count), labels] += 3.0
    return features, labels


def network(classes: int, last: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    head = nn.Linear(8, classes)
    with torch.no_grad():
        head.weight.mul_(0.1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), head, *([] if last is None else [last]))


def ran(folder: Path, train: Arrays, test: Arrays, model: nn.Module | None, **keys: Any) -> fedpriv.RunResults:
    loss = keys.pop("loss", None)
    settings = {
        "federation.samples": len(train[1]), "federation.silos": 2, "federation.rounds": 10,
        "federation.epochs": 10,
        "algorithm.name": "dp-sgd", "algorithm.clip": 1.0, "algorithm.step": 1.0, "privacy.epsilon": 50.0,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fedpriv.run(
            "own-data", train=train, test=test, model=model, loss=loss, set=settings, out=folder / "run"
        )


def findings(results: fedpriv.RunResults) -> str:
    return " ".join(list_findings(read_results(results.folder)))


EVEN, TEST = records(600, (0.25,) * 4), records(400, (0.25,) * 4, 1)


def test_a_run_that_learns_has_no_finding(tmp_path: Path) -> None:
    results = ran(tmp_path, EVEN, TEST, network(4))
    assert results[0].test_accuracy > 0.8
    assert findings(results) == ""
    assert results.findings == ()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"algorithm__step": 1e-6},
            "By its test loss the model is no better than at its start: 1.381 before round 1",
        ),
        ({"algorithm__step": 300.0, "privacy__epsilon": 0.01}, "accuracy is not clearly above the"),
        ({"algorithm__step": 300.0, "privacy__epsilon": 0.01}, "balanced accuracy, the mean over 4 classes, is"),
        ({"algorithm__step": 300.0}, "that of the best constant outputs"),
        (
            {"algorithm__step": 300.0, "algorithm__clip": 1e-4, "privacy__epsilon": 0.01},
            "At least 99.9 % of the increments were clipped, so that these have the norm of the clip",
        ),
        ({"algorithm__step": 300.0, "privacy__epsilon": 0.01}, "The test loss rises: it is"),
    ],
)
def test_a_run_that_fails_to_learn_has_a_finding_that_names_the_failure(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    assert words in findings(ran(tmp_path, EVEN, TEST, network(4), **keys))


def test_a_model_that_never_predicts_the_rare_class_has_a_finding(tmp_path: Path) -> None:
    train, test = records(1000, (0.985, 0.015)), records(800, (0.985, 0.015), 1)
    train[0][:], test[0][:] = (part[0] - 3.0 * np.eye(6)[part[1]] for part in (train, test))  # classes look alike
    results = ran(tmp_path, train, test, network(2), algorithm__step=0.1)
    assert results[0].test_accuracy > 0.95
    text = findings(results)
    assert "of always naming the commonest class" in text
    assert "balanced accuracy, the mean over 2 classes, is 50.0 %, and naming any one class has 50.0 %" in text


@pytest.mark.parametrize("data", [{}, {"spared": 0.25}])
def test_training_records_that_no_round_reads_are_counted_if_all_rows_are_records(
    tmp_path: Path, data: dict[str, float]
) -> None:
    """Rows may be of the other part, or left out: how many training records are left, no report has to say."""
    tree = {
        "name": "few", "data": data, "model": {"name": "softmax-regression", "feature_norm": 4.0},
        "federation": {"silos": 4, "rounds": 10, "batch": 1},
        "algorithm": {"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 1.0},
        "privacy": {"relation": "zero-out", "epsilon": 4.0},
    }  # fmt: skip
    with pytest.warns(UserWarning, match=".") as warned:
        results = fedpriv.run(tree, train=EVEN, test=TEST, out=tmp_path / "run")
    for text in (findings(results), " ".join(str(each.message) for each in warned)):
        assert ("Of 600 training records 40 are read" in text) == (not data)


@pytest.mark.parametrize(
    ("last", "loss", "classes", "is_said"),
    [
        (nn.Softmax(dim=-1), None, 2, True),
        (nn.Sigmoid(), "binary", 1, True),
        (nn.Sigmoid(), "squared-error", 1, False),
        (None, "binary", 1, False),
    ],
)
def test_a_redundant_final_sigmoid_or_softmax_layer_has_a_finding(
    tmp_path: Path, last: nn.Module | None, loss: str | None, classes: int, is_said: bool
) -> None:
    train, test = records(600, (0.5, 0.5)), records(300, (0.5, 0.5), 1)
    if loss == "squared-error":
        train, test = (train[0], train[1].astype("float32")), (test[0], test[1].astype("float32"))
    text = findings(ran(tmp_path, train, test, network(classes, last), loss=loss))
    assert ("leave that layer out" in text) == is_said


def test_multi_label_and_regression_models_are_compared_with_a_constant_prediction(tmp_path: Path) -> None:
    features, labels = records(600, (0.7, 0.3))
    several = np.stack([labels, 1 - labels, np.zeros_like(labels)], 1).astype("float32")
    text = findings(ran(tmp_path / "a", (features, several), (features, several), network(3), loss="binary",
                        algorithm__step=1e-6))  # fmt: skip
    assert "accuracy is not clearly above the" in text
    numbers = (features, features[:, 0] + 10.0)
    text = findings(ran(tmp_path / "b", numbers, numbers, network(1), algorithm__step=1e-6))
    assert "that of the best constant outputs" in text
    assert "accuracy" not in text


def test_a_finding_that_the_model_learnt_nothing_appears_in_every_view_of_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ran(tmp_path, EVEN, TEST, network(4), algorithm__step=1e-6)
    show_run(results.folder)
    shown = [
        " ".join(capsys.readouterr().out.split()),
        results.table(),
        results.table("latex"),
        results._repr_html_(),
        results.report().read_text(encoding="utf-8"),
        " ".join(results.findings),
    ]
    for text in shown:
        assert "no better than a constant prediction" in text


def test_a_run_from_python_warns_if_the_model_is_no_better_than_a_constant(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no better than a constant prediction"):
        fedpriv.run(
            "own-data", train=EVEN, test=TEST, model=network(4), out=tmp_path / "run",
            set={"federation.rounds": 2, "federation.silos": 2, "algorithm.step": 1e-7},
        )  # fmt: skip


def test_a_run_with_a_loss_without_a_gradient_is_measured_and_stored(tmp_path: Path) -> None:
    """Was: a RuntimeError of torch after the last round, and no cell."""
    results = ran(tmp_path, EVEN, TEST, network(4), loss=lambda output, label: (output.argmax() != label).float())
    facts = read_results(results.folder).cells[0]["learning"]
    assert facts["loss"] == pytest.approx(float((TEST[1] != 0).mean()))


def test_scores_on_visits_are_compared_with_guessing_among_the_two_classes_of_their_description() -> None:
    """Was: no comparison, as if fedpriv had no description of this table."""
    assert learning._class_count({"name": "visits"}) == 2
    assert learning._class_count({"name": "mnist"}) == 0


@pytest.mark.parametrize("weights", [(1, 1, 1), (7, 0, 1), (5, 0, 0)], ids=["equal", "one missing", "one class"])
@pytest.mark.parametrize("ignored", [0, 3])
def test_the_closed_form_loss_of_the_best_constant_prediction_matches_a_numerical_search(
    weights: tuple[int, ...], ignored: int
) -> None:
    labels = torch.tensor(
        [label for label, count in enumerate(weights) for _ in range(count)] + [IGNORED_CLASS] * ignored
    )
    per_label = MeanOverLabels(CrossEntropy(), 1, False, True)
    closed = learning._constant_loss(CrossEntropy(), torch.zeros(1, 3), labels)
    searched = learning._constant_loss(per_label, torch.zeros(1, 1, 3), labels[:, None])
    assert closed == pytest.approx(searched, abs=2e-5)
