"""Every loss of the table: its slope is its derivative, its value torch's own where torch has it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedpriv.data.layout import IGNORED_CLASS
from fedpriv.loss.losses import LOSSES, LossChoice

CLASSES = 3
CHOICES = [
    *(LossChoice(name) for name in LOSSES),
    LossChoice("cross-entropy", None, (1.0, 0.5, 3.0), 0.2),
    LossChoice("binary", None, (1.0, 4.0)),
    LossChoice("mine", lambda output, label: (output.sum() - label.sum()).square()),
]


def sample(choice: LossChoice, label: tuple[int, ...]) -> tuple[Any, Tensor, Tensor, int]:
    """The loss, outputs and labels of 5 records, and how many classes there are."""
    generator = torch.Generator().manual_seed(0)
    kind = LOSSES.get(choice.name)
    classes = 0 if kind is None or kind.takes_classes is False else 2 if kind.takes_classes is None else CLASSES
    loss, needed = choice.make_loss(label, classes)
    outputs = torch.randn(5, *(needed or (4,)), generator=generator, dtype=torch.float64)
    labels = torch.randint(0, max(classes, 2), (5, *label), generator=generator)
    return loss, outputs, labels if classes else labels.double() + 0.25, classes


@pytest.mark.parametrize("label", [(), (4,), (2, 3)])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: f"{choice.name}{len(choice.class_weights)}")
def test_slopes_are_derivatives_of_each_record_alone(choice: LossChoice, label: tuple[int, ...]) -> None:
    loss, outputs, labels, classes = sample(choice, label)
    if classes and label:
        labels[0] = labels[1, ..., :1] = IGNORED_CLASS
    outputs.requires_grad_()
    values = loss.value(outputs, labels)
    assert values.shape == (5,)
    (expected,) = torch.autograd.grad(values.sum(), outputs)
    assert torch.allclose(loss.output_gradient(outputs.detach(), labels), expected, atol=1e-12)
    assert loss.output_gradient(outputs, labels).shape == outputs.shape
    for place in range(5):
        alone = loss.value(outputs[place : place + 1], labels[place : place + 1])
        assert torch.allclose(alone, values[place], rtol=1e-14)
    several = torch.stack([outputs, outputs + 1.0])  # two models on the same records
    assert torch.allclose(loss.value(several, labels)[0], values)
    accuracy = loss.accuracy(several, labels)
    assert accuracy is None or accuracy.shape == (2,)


def test_values_are_those_of_torch() -> None:
    outputs, numbers = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)
    found = {
        name: LossChoice(name).make_loss((4,), 0)[0].value(outputs, numbers)
        for name, kind in LOSSES.items()
        if kind.has_single_output
    }
    expected = {
        "binary": functional.binary_cross_entropy_with_logits(outputs, numbers, reduction="none"),
        "squared-error": functional.mse_loss(outputs, numbers, reduction="none") / 2.0,
        "absolute-error": functional.l1_loss(outputs, numbers, reduction="none"),
        "huber": functional.huber_loss(outputs, numbers, reduction="none"),
        "poisson": functional.poisson_nll_loss(outputs, numbers, reduction="none"),
    }
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.allclose(found[name], each.mean(-1)), name


def test_the_cross_entropy_is_that_of_torch_with_weights_smoothing_and_ignored_labels() -> None:
    outputs, labels = torch.randn(5, 6, CLASSES, dtype=torch.float64), torch.randint(0, CLASSES, (5, 6))
    labels[:, 1::2] = IGNORED_CLASS
    weights = (0.5, 1.0, 2.0)
    for choice, given in (
        (LossChoice("cross-entropy", None, weights), {"weight": torch.tensor(weights, dtype=torch.float64)}),
        (LossChoice("cross-entropy", None, (), 0.3), {"label_smoothing": 0.3}),
    ):
        each = functional.cross_entropy(outputs.movedim(-1, 1), labels, reduction="none", **given)  # type: ignore[arg-type]
        loss, needed = choice.make_loss((6,), CLASSES)
        assert needed == (6, CLASSES)
        assert torch.allclose(loss.value(outputs, labels), each.sum(-1) / 3.0)
    accuracy = LossChoice("cross-entropy").make_loss((6,), CLASSES)[0].accuracy(outputs, labels)
    right = (outputs.argmax(-1) == labels)[:, ::2]
    assert accuracy == pytest.approx(float(right.double().mean()))


def test_a_record_without_labels_has_no_loss_and_no_slope() -> None:
    loss, _ = LossChoice("cross-entropy").make_loss((2,), CLASSES)
    outputs, labels = torch.randn(1, 2, CLASSES), torch.full((1, 2), IGNORED_CLASS)
    assert float(loss.value(outputs, labels)) == 0.0
    assert not loss.output_gradient(outputs, labels).any()
