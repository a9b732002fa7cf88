"""What losses, models and views refuse: a call, and the line that names the key or place and the remedy."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

import fedpriv
from fedpriv.core.errors import InputError
from fedpriv.data.layout import FeatureLayout, InputLayout
from fedpriv.data.schema import Survival
from fedpriv.loss.features import augment_objective, orientation_histograms
from fedpriv.loss.imported import (
    GIVEN_PREFIX,
    InitializedView,
    check_outputs,
    check_per_record,
    check_record_shape,
)
from fedpriv.loss.inputs import LabelledView, make_layout_objective
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.losses import CrossEntropy, LossChoice, SquaredError
from fedpriv.loss.models import MODELS, RidgeStatisticsSettings, SoftmaxSettings, find_model, make_loss_choice
from fedpriv.loss.module import ModuleObjective
from fedpriv.loss.objective import Objective, Query, Records, make_bfloat16_view
from fedpriv.loss.rows import ModuleSettings
from fedpriv.loss.scores import check_scores, make_summed_scores
from fedpriv.loss.views import LocalSteps
from tests.engines.test_engines import run
from tests.loss import zoo
from tests.loss.bring import WIDE, backbone, classify
from tests.loss.builders import F32, F64, Net, list_increments, make_imported, sum_increments
from tests.loss.test_augment import THREE
from tests.loss.test_passes import OBJECTIVES, cell, pictures, point_of
from tests.loss.test_per_unit import batch, softmax

GIVEN = f"{GIVEN_PREFIX}0123"


def check_net(call: Callable[[Any, Tensor], Tensor]) -> None:
    check_per_record(Net(call, layer=nn.Linear(6, 3)), 6, GIVEN)


def augment(shape: tuple[int, ...], kind: Any = "numbers") -> None:
    width = math.prod(shape)
    plain = ModuleObjective(nn.Linear(width, 2), CrossEntropy(), 0, F32)
    augment_objective(plain, THREE, FeatureLayout(width, (InputLayout(shape, kind),)))


def orient(shape: tuple[int, ...]) -> None:
    orientation_histograms(np.zeros(shape, np.uint8), F32)


def imported(name: str, **settings: Any) -> None:
    make_imported(f"tests.loss.zoo:{name}", **settings)


def adapt(**settings: Any) -> None:
    fedpriv.lora(classify(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 8)), 8), **settings)


def in_bfloat16(module: nn.Module | None = None, words: Tensor | None = None) -> None:
    records = pictures(2)
    if words is not None:
        records.features[:, 3] = words
    model = OBJECTIVES["softmax"]() if module is None else make_module_objective(module, 784, CrossEntropy(), 0)
    make_bfloat16_view(model, records)


def subtract_in_bfloat16() -> None:
    short = make_bfloat16_view(OBJECTIVES["softmax"](), pictures(2))
    sum_increments(short, Query([point_of(short)] * 2, (2.0, -1.0)), pictures(2), 1.0)


def ridge(shape: tuple[int, ...], classes: int) -> None:
    settings = RidgeStatisticsSettings(feature_norm=1.0, penalty=1.0)
    MODELS["ridge-statistics"].objective(shape, classes, F32, settings)


def evaluate_looking() -> None:
    objective = ModuleObjective(zoo.Looking(1, 3), CrossEntropy(), 0, F64)
    objective.evaluate(objective.initial(), Records(torch.tensor([[1.0], [9.0]], dtype=F64), torch.tensor([0, 1])))


def choose(name: str, classes: int, weights: tuple[float, ...] = (), smoothing: float = 0.0) -> None:
    LossChoice(name, None, weights, smoothing).make_loss((), classes)


def several(name: str, classes: int, labels: tuple[int, ...] = (), shape: tuple[int, ...] = (2,)) -> Objective:
    layout = FeatureLayout(6 + (math.prod(labels) if labels else 0), (InputLayout((6,), "numbers"),), labels)
    net = nn.Sequential(nn.Linear(6, math.prod(shape)), nn.Unflatten(1, shape))
    return make_layout_objective(net, layout, (6,), LossChoice(name), classes, 0, F64, GIVEN)[0]


def score(name: Any, labels: Tensor, *silos: tuple[str, int], regression: bool = False, bins: int = 0) -> None:
    check_scores((name,), labels, silos, regression=regression, bins=bins)


ODD_LOSSES: list[Any] = [
    {"name": "cross-entropy", "class_weights": ["a", "b"]}, {"name": "cross-entropy", "class_weights": 3},
    {"name": "cross-entropy", "label_smoothing": "much"}, {"name": "cross-entropy", "function": len}, 3,
]  # fmt: skip
REFUSED: dict[str, Callable[[], object]] = {
    # Records and features
    r"of shape \(36,\)": lambda: augment((36,)),
    "of whole numbers": lambda: augment((6, 6), "tokens"),
    "channels come first": lambda: augment((12, 12, 3)),
    "out of sight": lambda: augment((2, 30)),
    r"bytes of gray images whose sides are multiples of 4, not of shape \(30, 28\)": lambda: orient((2, 30, 28)),
    r"gray images whose sides are multiples of 4, not of shape \(32, 32, 3\)": lambda: orient((2, 32, 32, 3)),
    "differences of gradients": subtract_in_bfloat16,
    "feature 3 has whole numbers beyond 256": lambda: in_bfloat16(words=torch.tensor([1.0, 257.0])),
    "cannot compute in it": lambda: in_bfloat16(
        nn.Sequential(nn.Linear(784, 4).requires_grad_(False), nn.Linear(4, 10))),
    "such as dp-sgd": lambda: run("vectorized", cell(momentum=True)),
    # Modules
    "Centred.*: a record's outputs change with the other records of its batch": lambda: imported("Centred"),
    "Remembering.*: a record's outputs change with the other records": lambda: imported("Remembering"),
    "^model: the module: a record's outputs change": lambda: check_net(lambda net, x: net.layer(x - x.mean(0))),
    "^model: the module: a record's outputs change with": lambda: check_net(  # with the record after the next
        lambda net, x: net.layer(x + x.roll(-2, 0))),
    r"^model: the module takes records of shape \(2, 4\)": lambda: check_record_shape((2, 4), (6,), GIVEN),
    "outputs or gradients that are not finite": lambda: check_net(lambda net, x: net.layer(x) / 0.0),
    "nowhere.* cannot be imported here": lambda: make_imported("tests.loss.nowhere:Net"),
    "Nothing.* cannot be imported here": lambda: imported("Nothing"),
    r"gives no torch module \(found int\)": lambda: imported("three"),
    r"cannot be built from \(6, 3\) and .*unexpected keyword": lambda: imported("Wide", arguments={"depth": 2}),
    r"takes records of shape \(2, 4\), 8 values, and those of": lambda: imported("Wide", shape=[2, 4]),
    r"cannot be given a record of 6 values|maps one record to": lambda: imported("Wide", shape=[2, 3]),
    "cannot be built|no parameters to train|maps": lambda: make_imported("torch.nn:Flatten"),
    "cannot be given a record|cannot be built": lambda: make_imported(
        "torch.nn:Bilinear", arguments={"out_features": 3}),
    **{
        rf"{re.escape(name)}'.*: known models are .* or package\.module:Name": functools.partial(find_model, name)
        for name in ("os:system()", "a b:C", "..:x", "pkg:Na-me", ":x", "x:")},
    r"Looking fails on a record that it is evaluated on \(index out of range": evaluate_looking,
    r"except_ = 'heads' names no parameters .* it has 0, 1, 3": lambda: fedpriv.freeze(
        backbone(), except_=("heads",)),
    r"cannot be given a record of 6 values \(shape": lambda: check_outputs(  # takes a batch of one only
        Net(lambda net, x: net.layer(x).view(1, 3), layer=nn.Linear(6, 3)), 6, 3, GIVEN
    ),
    r"maps one record to shape \(2, 3\), but \(1, 3\) is needed$": lambda: check_outputs(  # two rows for a record
        Net(lambda net, x: torch.cat([net.layer(x)] * 2), layer=nn.Linear(6, 3)), 6, None, GIVEN
    ),
    r"\(1, 2\), but \(1, 1\) is needed: the outputs of the loss 'binary', for labels 0 … 1$":
        lambda: several("binary", 2),
    r"\(1, 3, 2\) is needed: the outputs of the loss 'hazard' for each of its labels \(3,\), for labels 0 … 4$":
        lambda: several("hazard", 5, (3,)),
    "no parameters to train; requires_grad = False for all it has": lambda: check_outputs(
        fedpriv.freeze(nn.Linear(6, 3)), 6, 3, "module-test"),
    "expected a whole number of 1 or more": lambda: adapt(rank=0),
    r"names no Linear layer of the module; it has layer\.0, layer\.2, head": lambda: adapt(layers=("heads",)),
    "no layer that could train a product": lambda: adapt(layers=("head",), train=("head",)),
    "train = 'tail' names no parameters": lambda: adapt(train=("tail",)),
    "28 x 28 = 784 pixels, not 3072": lambda: find_model("cnn").objective((3072,), 10, F32, ModuleSettings()),
    "is for two classes, not 3": lambda: ridge((5,), 3),
    "513 features, at most 512": lambda: ridge((513,), 2),
    "have no increments of single records": lambda: list_increments(
        LocalSteps(softmax(), 0.4, 5), Query([], []), batch(), 1.0),
    "no values record by record": lambda: object.__new__(ModuleObjective).losses(torch.zeros(1), pictures(1)),
    # Losses and scores
    **{
        f"^loss = {re.escape(repr(loss))}: accepted keys are name, class_weights and label_smoothing":
        functools.partial(make_loss_choice, loss, real=False)
        for loss in ODD_LOSSES
    },
    r"loss = \"\['x'\]\": accepted are": lambda: make_loss_choice({"name": ["x"]}, real=False),
    "accepted are 'cross-entropy', 'binary'": lambda: choose("cubic", 2),
    "is for labels that are numbers .floats., and they are classes 0 … 2": lambda: choose("huber", 3),
    "is for labels that are classes, and they are numbers": lambda: choose("cross-entropy", 0),
    "is for labels that are 0 or 1, not 0 … 2": lambda: choose("binary", 3),
    "'hazard': is for 3, 5, 7, … classes, and here are 10": lambda: choose("hazard", 10),
    "'hazard': is for 3, 5, 7, … classes, and here are 1$": lambda: choose("hazard", 1),
    "expected 3 numbers, one for each class, and there are 1": lambda: choose("cross-entropy", 3, (1.0,)),
    "finite numbers, 0 or more": lambda: choose("cross-entropy", 2, (1.0, -1.0)),
    "go with the losses .cross-entropy. and .binary. only": lambda: choose("huber", 0, (1.0, 1.0)),
    "label_smoothing: goes with the loss .cross-entropy. only": lambda: choose("binary", 2, (), 0.1),
    "0 or more, and less than 1": lambda: choose("cross-entropy", 2, (), 1.0),
    "run.metrics: .*auc is not defined, since the test records are all of one class":
        lambda: score("auc", torch.zeros(4)),
    "run.metrics: .*auc is not defined at any silo, .*of 'a' are all of one class; .*per_silo":
        lambda: score("auc", torch.tensor([0, 0, 1, 1]), ("a", 2), ("b", 2)),
    "run.metrics: .*r2 is not defined, since the test records are all of one value":
        lambda: score("r2", torch.ones(4), regression=True),
    "run.metrics: .*mae is not for labels that are classes; there are auc":
        lambda: score("mae", torch.tensor([0, 1])),
    "run.metrics: .*auc is not for labels that are real numbers; there are r2, mae":
        lambda: score("auc", torch.ones(4), regression=True),
    "concordance is not defined, .* are without an event in a bin that another record survived":
        lambda: score("concordance", torch.tensor([0, 1, 2, 6]), bins=3),  # the event is in bin 2
    "concordance is not defined at any silo, .*of 'a' are without an event":
        lambda: score("concordance", torch.tensor([0, 3, 4, 4]), ("a", 2), ("b", 2), bins=3),
    "integrated_brier is not defined, since the test records are all seen no longer than the first bin":
        lambda: score("integrated_brier", torch.tensor([0, 4]), bins=3),
}  # fmt: skip
"""The line, and a call that is refused by it."""


@pytest.mark.parametrize("line", REFUSED)
def test_it_is_refused_in_one_line(line: str) -> None:
    with pytest.raises(InputError, match=line) as caught:
        REFUSED[line]()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "classes", "shape"), [("cross-entropy", 5, (3, 5)), ("hazard", 5, (3, 2))])
def test_only_losses_with_an_accuracy_can_be_scored_for_several_labels(
    name: str, classes: int, shape: tuple[int, ...]
) -> None:
    """Before: scores of several hazards failed in the first evaluation, by an AssertionError."""
    objective = several(name, classes, (3,), shape)
    assert isinstance(objective, LabelledView)
    records = Records(torch.zeros(4, 9, dtype=F64), torch.zeros(4))
    has_accuracy = objective.evaluate(objective.initial(), records).accuracy is not None
    assert objective.has_accuracy == has_accuracy == (name == "cross-entropy")


BACKBONE: dict[str, Any] = {"backbone_weights": "sha256:" + "0" * 64, "feature_norm": 1.0}


@pytest.mark.parametrize(
    ("model", "settings", "line"),
    [
        (SoftmaxSettings, {"features": "orientations"}, "feature_norm is needed"),
        (SoftmaxSettings, {"scaling": "exactly"}, "feature_norm is needed"),
        (SoftmaxSettings, {"features": "orientations", "feature_norm": 1.0, "centre": 0.1}, "centre is for"),
        (SoftmaxSettings, {"feature_norm": 0.0}, "greater than or equal to"),
        (SoftmaxSettings, {"backbone": "no path", **BACKBONE}, "expected an import path"),
        (SoftmaxSettings, {"backbone": "a:B", "feature_norm": 1.0}, "needs backbone_weights"),
        (
            SoftmaxSettings,
            {"backbone": "a:B", **BACKBONE, "backbone_weights": "sha256:0"},
            "needs backbone_weights",
        ),
        (SoftmaxSettings, {"backbone": "a:B", **BACKBONE, "feature_norm": None}, "backbone needs feature_norm"),
        (SoftmaxSettings, {"backbone": "a:B", **BACKBONE, "features": "orientations"}, 'features = "pixels"'),
        *(
            (SoftmaxSettings, {key: value, "feature_norm": 1.0}, "belong to backbone")
            for key, value in (
                ("backbone_weights", BACKBONE["backbone_weights"]),
                ("backbone_arguments", {"width": 4}),
                ("backbone_shape", [3, 4]),
            )
        ),
        *((MODELS[name].settings, {"feature_norm": 2.0}, "feature_norm") for name in ("mlp", "mlp-relu", "cnn")),
        *(
            (Survival, {"time": "t", "edges": edges}, "edges")
            for edges in ([0.0], [0.0, math.nan], [0.0, math.inf], list(range(300)))
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(model: type[BaseModel], settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        model.model_validate(settings)


def test_evaluation_by_silos_is_refused_for_a_model_without_losses_behind_a_view_too() -> None:
    """Before the run, and not in its first evaluation."""
    traced = make_module_objective(
        nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1)), 3, SquaredError(), 0
    )
    for objective in (traced, InitializedView(traced, traced.module)):
        with pytest.raises(InputError, match="evaluation: GhostObjective gives no losses record by record"):
            make_summed_scores(objective, 4.0, classes=False)
