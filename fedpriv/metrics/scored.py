"""An objective whose evaluation has the scores that a scenario asks for, of all test records and silo by silo."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpriv.errors import InputError
from fedpriv.metrics.scores import SCORES, Score
from fedpriv.objectives import Evaluation, Records, View

MEAN, WORST = "mean_of_silos", "worst_silo"
"""Behind a metric's name: over the silos' own test records, every silo counting the same."""
LOWER_IS_BETTER = frozenset({"test_loss", "test_mae", "test_calibration_error"})


@dataclass(frozen=True)
class Scored(View):
    """`base`, with `scores` as metrics test_NAME; with `silos` each metric at each silo too, their mean and worst.

    `silos` says how many test records of each silo there are; records come silo by silo, in that order.  `unit` is
    how much of a real target's own unit 1 of a label is: mae is given in that.
    """

    scores: tuple[Score, ...]
    silos: tuple[tuple[str, int], ...] = ()
    unit: int | float = 1

    def evaluate(self, point: Tensor, records: Records) -> Evaluation:
        whole = self._of(point, records)
        if not self.silos:
            return whole
        metrics = dict(whole.metrics)
        sizes = [count for _, count in self.silos]
        parts = [
            self._of(point, Records(features, labels)).named()
            for features, labels in zip(
                torch.split(records.features, sizes), torch.split(records.labels, sizes), strict=True
            )
        ]
        for name in parts[0]:
            values = torch.stack([part[name] for part in parts])
            metrics |= {f"{name}_at_{silo}": value for (silo, _), value in zip(self.silos, values, strict=True)}
            metrics[f"{name}_{MEAN}"] = values.mean(0)
            metrics[f"{name}_{WORST}"] = values.amax(0) if name in LOWER_IS_BETTER else values.amin(0)
        return whole._replace(metrics=metrics)

    def _of(self, point: Tensor, records: Records) -> Evaluation:
        evaluation = self.base.evaluate(point, records)
        if not self.scores:
            return evaluation
        outputs = self.base.outputs(point, records)
        scored = {f"test_{name}": SCORES[name].of(outputs, records.labels) for name in self.scores}
        if "test_mae" in scored:
            scored["test_mae"] = scored["test_mae"] * self.unit
        return evaluation._replace(metrics={**evaluation.metrics, **scored})


def check_scores(
    scores: Sequence[Score], labels: Tensor, silos: Sequence[tuple[str, int]], *, regression: bool
) -> None:
    """InputError unless all test records, and those of each silo, have these scores."""
    for name in scores:
        kind = SCORES[name]
        if kind.regression != regression:
            known = ", ".join(each for each, other in SCORES.items() if other.regression == regression)
            labelled = "real numbers" if regression else "classes"
            raise InputError(f"run.metrics: {name} is not for labels that are {labelled}; there are {known}")
        whose = [("all", len(labels)), *silos]
        parts = [labels, *torch.split(labels, [count for _, count in silos])] if silos else [labels]
        for (silo, _), part in zip(whose, parts, strict=False):
            if (reason := kind.undefined(part)) is not None:
                where = "the test records" if silo == "all" else f"the test records of {silo!r}"
                remedy = "leave it out" if silo == "all" else "leave it out, or run.per_silo = false"
                raise InputError(f"run.metrics: {name} is not defined, since {where} are {reason}; {remedy}")
