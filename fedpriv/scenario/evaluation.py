"""[evaluation] of a scenario: the silos evaluate the model, each on its own test records."""

from typing import Annotated

from pydantic import Field

from fedpriv.algorithms import Positive
from fedpriv.privacy.trust import Trust
from fedpriv.privacy.unit import RECORD
from fedpriv.scenario.privacy import PrivacySection
from fedpriv.scenario.section import Count, Section

_NO_SUM = {
    "auc": "it ranks every record against all others",
    "balanced_accuracy": "how many records each class has would be a release of its own",
    "calibration_error": "it needs sums over the records of every bin of confidence",
    "r2": "it divides by how much the labels spread, which is not public",
    "mae": "an error has no bound",
}
"""Why a score of test records is no sum of bounded vectors, one a record."""


class EvaluationSection(Section):
    """[evaluation]: silos send sums over their own test records, which no training reads: no public ones.

    Without this section the server evaluates, on a public test set.
    """

    records: Annotated[tuple[Count, ...], Field(strict=False)] | Count = Field(
        description="how many test records each silo evaluates on, one number or one a silo; a public choice, and "
        "the denominator of every mean"
    )
    mu: Positive | None = Field(
        None,
        description="what all evaluations of a run together cost each test record; left out, a trusted server "
        "gets exact sums, and nothing is claimed for what it does with them",
    )
    loss_bound: Annotated[float, Field(ge=2.0**-40, le=2.0**40)] = Field(
        10.0, description="a test record's loss counts as this where it is larger: no one record is a mean's"
    )

    def of_silos(self, silos: int) -> tuple[int, ...]:
        """Test records of silo 0, 1, …"""
        return (self.records,) * silos if isinstance(self.records, int) else self.records

    def check(self, silos: int, trust: Trust, privacy: PrivacySection) -> None:
        """ValueError for what silos cannot evaluate so, or not in private.

        Guarantee: a run with noise evaluates with noise wherever the server is not trusted.
        """
        if len(self.of_silos(silos)) != silos:
            raise ValueError(
                f"evaluation.records has {len(self.of_silos(silos))} numbers, and there are {silos} silos"
            )
        if privacy.mode == "none" and self.mu is not None:
            raise ValueError(
                'evaluation.mu: privacy.mode = "none" means no noise, in evaluations too; leave it out'
            )
        if privacy.mode != "none" and self.mu is None and not trust.noise_at_server:
            raise ValueError(
                "evaluation.mu: this key is missing: under a server that is not trusted every evaluation is a "
                "release of test records; say what all of them together may cost, such as mu = 1.0"
            )
        if privacy.unit != RECORD.name:
            raise ValueError(
                f'evaluation: test records are protected one by one, and privacy.unit = "{privacy.unit}"; leave '
                "the section out"
            )


def check_measures(scores: tuple[str, ...], radius: float | None, *, per_silo: bool, summed: bool) -> None:
    """ValueError for measures that silos' sums do not give; `summed`: only the sum over silos is published."""
    if scores:
        raise ValueError(
            f"run.metrics: silos send sums of bounded vectors, one a test record, and {scores[0]} is none: "
            f"{_NO_SUM[scores[0]]}; leave it out, or [evaluation]"
        )
    if radius is not None:
        raise ValueError(
            "run.goldstein_radius: gradients of test records are not sent; leave it out, or [evaluation]"
        )
    if per_silo and summed:
        raise ValueError(
            "run.per_silo: a trusted server adds the noise of evaluations to the sum over silos and publishes "
            'that alone; leave it out, or take trust = "untrusted"'
        )
