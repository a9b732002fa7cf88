"""Sections of a scenario: [federation], [privacy], [run], [deployment] and [evaluation].

| section | content |
|---|---|
| [federation] | silos or clients, rounds, and their participation |
| [privacy] | the privacy target, the unit of protection, and the budget of a cell's rounds |
| [run], [deployment] | how to compute, and what a server does about silos that do not reply |
| [evaluation] | evaluation of the model by the silos, each on its own test records |

A pass, or epoch, reads the records of a silo once.  A pool of clients takes the place of silos, and a round reads
a cohort of the clients.  A unit of protection is what neighbouring data sets differ in: a record, a person or a
client.  μ is the parameter of Gaussian differential privacy, and zCDP's parameter is μ²/2.
"""

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from fedpriv.accounting.gaussian import mu_of
from fedpriv.accounting.renyi import mu_of_zcdp
from fedpriv.core.errors import refuse
from fedpriv.core.extensions import load_add_on_part
from fedpriv.core.random import SERVER
from fedpriv.data.partition import silo_sizes
from fedpriv.loss.scores import Score
from fedpriv.noise.trust import RECORD, USER, Trust, Unit, UnitName, make_unit
from fedpriv.papers.base import Count, Positive
from fedpriv.participation.orders import ParticipationKeys
from fedpriv.participation.registry import SamplingName, find_sampling_class

Probability = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    """Base class of sections, tables of a scenario file without unknown keys or values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FederationSection(Section):
    """Section [federation]: the numbers of silos, rounds and records.

    * `rounds` without `samples`: a round reads `batch` records of each silo, or the number of `batches` for it.
    * `samples` without `rounds`: a pass has as many such rounds as the samples suffice for.
    * `rounds` and `samples`: the samples are divided among the rounds of a pass, for large batches.
    * `rounds`, `samples` and `batch`: a pass is as with `samples` alone, and passes follow each other until all
      rounds are done.

    Numbers of records hold in expectation if records are drawn, and an algorithm may read several batches in a
    round, or none.  Records that do not fill a round are left out.  Persons or clients are counted in place of
    records if they are the unit of protection.

    With `clients` and `cohort` one pool of clients takes the place of silos, and a round reads a cohort of them.
    """

    silos: Annotated[Count, Field(le=10_000_000)] = Field(
        description="number of silos M; all answer, unless they drop out; left out where there are clients"
    )
    clients: Count | None = Field(
        None, description="in place of silos: number of clients, of which a trusted server asks cohorts"
    )
    cohort: Count | None = Field(
        None,
        description="clients of one round, expected where they are drawn; means have this denominator",
    )
    rounds: Count | None = Field(None, description="number of rounds T")
    samples: Count | None = Field(
        None,
        description="records of all silos that are read, each once an epoch; records that do not fill a "
        "complete round of every silo are dropped, and the run says how many",
    )
    batch: Count | None = Field(
        None, description="records of one silo in one round; 1 by default, unless samples and rounds decide it"
    )
    batches: Annotated[tuple[Count, ...], Field(strict=False)] | None = Field(
        None, description="in place of `batch`: a number for each silo, where silos differ in size; needs rounds"
    )
    epochs: Count = Field(1, description="passes over the records; expected ones with Poisson sampling")
    sampling: SamplingName = Field(
        "fixed",
        description='"fixed": every record once an epoch, in the same order; "poisson": in every round each '
        'record takes part by a coin of its own; "allocation": in every epoch each in one round of its own, drawn '
        'in secret; "balanced": each in as many rounds as there are epochs, drawn in secret; "available": clients '
        "when they are there, `min_separation` rounds apart; with these four `batch` or `cohort` is what is "
        "expected",
    )
    groups: Count = Field(
        1,
        description="public groups of records that share out the rounds of an epoch, for secret sampling with "
        "correlated noise: at least as many as the noise has bands",
    )
    min_separation: Count | None = Field(
        None, description='least number of rounds from an answer of a client to its next, for "available"'
    )
    max_participations: Count | None = Field(
        None, description='most answers of a client, for sampling = "available"; by default as many as fit'
    )
    drop_out: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="in simulations: probability that a silo does not answer in a round, by public coins"
    )
    away: dict[str, Annotated[tuple[Count, ...], Field(strict=False)]] = Field(
        {}, description='in simulations: rounds in which a silo does not answer, {"2" = [3, 4]}'
    )
    size_skew: Positive | None = Field(
        None, description="silos of unequal size: concentration of their shares of the samples, small is uneven"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_pool_silo(cls, values: Any) -> Any:
        return {"silos": 1, **values} if isinstance(values, dict) and "clients" in values else values

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        """Refuse keys of silos beside clients, and a cohort that does not divide the clients.

        A pool needs `cohort`, the number of clients in a round, and `rounds`.  Sampling in which clients come when
        they can, such as "available", needs a pool.

        Raises:
            ValueError: The keys do not fit together.
        """
        if (self.clients is None) != (self.cohort is None):
            raise ValueError(
                "clients and cohort come together: how many there are, and how many answer in a round"
            )
        if self.clients is None or self.cohort is None:
            if find_sampling_class(self.sampling).client_initiated:
                raise ValueError(f'sampling = "{self.sampling}" is of clients: give clients and cohort, not silos')
            return self
        unused = {key: getattr(self, key) for key in ("samples", "batch", "batches", "size_skew")}
        unused |= {
            "silos": self.silos if self.silos > 1 else None,
            "epochs": self.epochs if self.epochs > 1 else None,
            "drop_out": self.drop_out or None,
            "away": self.away or None,
        }
        key = next((key for key, value in unused.items() if value is not None), None)
        refuse(
            {
                f"{key} says nothing of clients in cohorts: leave it out, or leave clients out": (key),
                "clients come in cohorts as often as rounds says: give rounds": (self.rounds is None),
                f"cohort = {self.cohort} does not divide clients = {self.clients}: a client takes part in 1 of "
                "clients / cohort rounds, a whole number": (self.clients % self.cohort),
            },
            ValueError,
        )
        return self

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.clients is not None:
            return self
        min_samples = self.silos * (self.batch or (1 if self.rounds is None else self.rounds_per_epoch))
        refuse(
            {
                "needs rounds, or samples, or both": (self.rounds is None and self.samples is None),
                "rounds, samples and batch together say how many passes there are: leave epochs out": (
                    self.rounds is not None
                    and self.samples is not None
                    and self.batch is not None
                    and self.epochs != 1
                ),
                f"rounds = {self.rounds} must be a multiple of epochs = {self.epochs}; for a last pass that is "
                "cut give samples and batch in place of epochs": (
                    self.rounds is not None and self.rounds % self.epochs
                ),
                "size_skew shares samples out over rounds: give both, and no batch": (
                    self.size_skew is not None
                    and (self.rounds is None or self.samples is None or self.batch is not None)
                ),
                "batches says how many records each silo reads: give rounds, no samples, no batch": (
                    self.batches is not None
                    and (self.rounds is None or self.samples is not None or self.batch is not None)
                ),
                f"batches has {len(self.batches or ())} numbers, and there are {self.silos} silos": (
                    self.batches is not None and len(self.batches) != self.silos
                ),
                f"samples = {self.samples} are too few for one pass: at least {min_samples} are needed": (
                    self.samples is not None and self.samples < min_samples
                ),
                f"rounds = {self.rounds} do not read the samples once: at batch = {self.batch} it takes "
                f"{self.rounds_per_epoch}; leave batch out, or give fewer samples": (
                    self.rounds is not None and self.rounds < self.rounds_per_epoch
                ),
            },
            ValueError,
        )
        return self

    @property
    def rounds_per_epoch(self) -> int:
        """Number of rounds of one pass."""
        if self.clients is not None and self.cohort is not None:
            return self.clients // self.cohort
        if self.samples is None or (self.rounds is not None and self.batch is None):
            return (self.rounds or 0) // self.epochs
        return self.samples // (self.silos * (self.batch or 1))

    @property
    def total_rounds(self) -> int:
        """Number T of rounds."""
        return self.rounds_per_epoch * self.epochs if self.rounds is None else self.rounds

    @property
    def participation_keys(self) -> ParticipationKeys:
        """Further keys of [federation] that a participation takes."""
        return ParticipationKeys(self.groups, self.min_separation, self.max_participations)

    def batch_sizes(self, seed: int) -> tuple[int, ...]:
        """Return the number of records of each silo in one batch, or the size of the cohort.

        Under sampling the sizes are expected ones.  They are `batches`, or `batch` for each silo (1 if it is left
        out), or the samples of one round divided among the silos (`silo_sizes`) if `samples` and `rounds` are
        given without `batch`.

        Args:
            seed: Public seed, which skewed sizes depend on.

        Returns:
            Sizes of silo 0, 1, …, or one number, the size of the cohort, for a pool of clients.
        """
        if self.cohort is not None:
            return (self.cohort,)
        if self.batches is not None:
            return self.batches
        if self.samples is None or self.rounds is None or self.batch is not None:
            return (self.batch or 1,) * self.silos
        return silo_sizes(self.samples // self.rounds_per_epoch, self.silos, self.size_skew, seed)


_MIN_USELESS_DELTA = 0.1  # δ of this size or more is refused
_ROUND_DOWN = 1.0 - 2.0**-48
"""Factor below 1 that outweighs the rounding of two composed steps, so that they keep to the promise."""


@dataclass(frozen=True)
class RunBudget:
    """Split of a run's promised μ between a cell's rounds and the run's other step, on the same records.

    For the rounds of training the other step is a release of moments of columns before them, if the cell has
    [data.scale].  For this release, which is a cell as well, the other step is the training.  The budget of a cell
    is set when the cell is validated or derived (`Cell.derive_cell`), and a copy has that of the original.

    Guarantee: rounds_mu² + other_mu² is at most the square of the promise, if the promise is 1e-290 or more.
    """

    rounds_mu: float | None
    """μ that the noise of the cell's own rounds is calibrated to, or None if the rounds add no noise."""
    other_mu: float = 0.0
    """μ of the other step of the run, or 0 without another step."""


def split_budget(promise: float | None, share: float = 0.0) -> RunBudget:
    """Split the promise μ of a run between its rounds and its other step (`RunBudget`).

    Args:
        promise: μ of the run, or None for a run that is not private.
        share: Share of μ² for the other step.  With 0 the rounds have all of it.
    """
    if promise is None or share == 0.0:
        return RunBudget(promise)
    return RunBudget(promise * math.sqrt(1.0 - share) * _ROUND_DOWN, promise * math.sqrt(share) * _ROUND_DOWN)


_TARGETS = ("mu", "rho", "zcdp", "epsilon")


class PrivacySection(Section):
    """Section [privacy]: the guarantee for each silo's records.

    A private run has exactly one of mu, rho, zcdp, or epsilon with delta: a number for all silos, or a list with
    one for each (Reshef & Levy, Theorem 5.1, has such a ρ_i for machine i).  `mu` is the parameter μ of Gaussian
    differential privacy, `rho` is Reshef & Levy's name for μ, and `zcdp` is μ²/2.
    """

    mode: Literal["gaussian", "none"] = Field("gaussian", description='"none" runs without noise or guarantee')
    relation: Literal["replace-one", "zero-out"] = Field(description="which data sets are neighbours")
    unit: UnitName = Field("record", description="whose privacy it is: what is clipped, counted and protected")
    records: Count | None = Field(
        None, description="the most records of one person or client in a round, for the units of several records"
    )
    shared: Count = Field(1, description="the most silos in which one person has records; a public bound")
    mu: Positive | None = None
    rho: Positive | None = Field(None, description="the paper's name for mu (DP-μ²-FL only)")
    zcdp: Positive | None = None
    epsilon: Positive | None = None
    delta: Probability = Field(1e-5, description="δ of every (ε, δ) that is printed, and of `epsilon`")
    shares: (
        Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(strict=False, min_length=1)] | None
    ) = Field(
        None,
        description="of that target, in its own unit: what the records of silo 0, 1, … get; 1 for one of them",
    )

    @model_validator(mode="before")
    @classmethod
    def _split_targets(cls, values: Any) -> Any:
        """Replace a list of targets, one for each silo, by the largest target and the silos' shares of it.

        Other values are returned unchanged, and validated later.

        Raises:
            ValueError: The section has such a list and `shares`.
        """
        names = [name for name in _TARGETS if isinstance(values, dict) and isinstance(values.get(name), list)]
        if len(names) != 1 or not all(
            isinstance(target, int | float) and target is not True and 0 < target <= sys.float_info.max
            for target in values[names[0]] or [None]  # an empty list is no list of targets
        ):
            return values
        if values.get("shares") is not None:
            raise ValueError(f"{names[0]} has a number for each silo, and so has shares: leave out one")
        targets = [float(target) for target in values[names[0]]]
        largest = max(targets)
        shares = [target / largest for target in targets]
        # Rounded down where a share of the largest target would be above the silo's own.
        safe_shares = [
            math.nextafter(share, 0.0) if share * largest > target else share
            for share, target in zip(shares, targets, strict=True)
        ]
        return {**values, names[0]: largest, "shares": safe_shares}

    @model_validator(mode="after")
    def _check_one_target(self) -> Self:
        """Require exactly one privacy target of a private run, and none of a run without noise.

        Raises:
            ValueError: There is another number of targets.
        """
        targets = [name for name in _TARGETS if getattr(self, name) is not None]
        if self.mode == "none" and targets:
            raise ValueError(f'mode = "none" means no noise, so {targets[0]} cannot be given with it')
        if self.mode == "gaussian" and len(targets) != 1:
            raise ValueError(
                f"needs exactly one of mu, rho, zcdp and epsilon; given: {', '.join(targets) or 'none'}"
            )
        return self

    @model_validator(mode="after")
    def _check_records(self) -> Self:
        bound = "of one person count at most" if self.unit == USER.name else "one client holds at most"
        refuse(
            {
                f'records = {self.records} is for unit = "user" or "client"; set that, or leave it out': (
                    self.unit == RECORD.name and self.records is not None
                ),
                f'records is needed for unit = "{self.unit}": how many records {bound}, '
                "e.g. privacy.records = 4": (self.unit != RECORD.name and self.records is None),
                f"shared = {self.shared}: only persons have records in several silos": (
                    self.unit != USER.name and self.shared > 1
                ),
            },
            ValueError,
        )
        return self

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        max_share = max(self.shares or (1.0,))
        refuse(
            {
                'shares: mode = "none" means no noise, so there is no budget to have a share of': (
                    self.shares and self.mode == "none"
                ),
                f"shares: the largest is {max_share:g}, and no silo has the whole target; lower the "
                "target, and give the silo that it is for the share 1": (max_share < 1.0),
                f'shares with unit = "{self.unit}": a budget for each silo is of its own records': (
                    self.shares and self.unit != RECORD.name
                ),
            },
            ValueError,
        )
        return self

    @field_validator("delta")
    @classmethod
    def _check_delta(cls, delta: float) -> float:
        if delta >= _MIN_USELESS_DELTA:
            raise ValueError(
                f"publishing all records with probability {delta:g} would be allowed; take one far below 1/n for "
                "the n records of the smallest silo, such as 1e-5"
            )
        return delta

    @property
    def protected_unit(self) -> Unit:
        return make_unit(self.unit, self.records or 1, self.shared)

    @property
    def target_mu(self) -> float | None:
        """Largest μ of all silos, or None for a run that is not private."""
        return self._mu_of_share(1.0)

    def silo_target_mu(self, silo: int) -> float | None:
        """Return μ of one silo's records, or None for a run that is not private.

        With `shares` it is the silo's share of the target, and otherwise the whole target.
        """
        return self._mu_of_share(self.shares[silo] if self.shares else 1.0)

    def _mu_of_share(self, share: float) -> float | None:
        """Return the μ that a share of the privacy target amounts to, or None without a target.

        The share multiplies ε, the zCDP parameter or μ, whichever the section gives, before the conversion to μ.

        Args:
            share: Share of the target, above 0 and at most 1.

        Raises:
            InputError: The target is out of the range of the conversion.
        """
        if self.epsilon is not None:
            return mu_of(share * self.epsilon, self.delta)
        if self.zcdp is not None:
            return mu_of_zcdp(share * self.zcdp)
        mu = self.mu if self.mu is not None else self.rho
        return None if mu is None else share * mu


class RunSection(Section):
    """Section [run]: how to compute a run.

    None of its keys changes the privacy target.  In simulations `arithmetic` decides whether the guarantee is one
    in real arithmetic ("float"), or holds for what the program computes ("integers").
    """

    dtype: Literal["float32", "float64"] = "float32"
    arithmetic: Literal["float", "integers"] = Field(
        "float",
        description='"integers" releases as deployments do (engines inprocess, ray): exact sums, discrete noise',
    )
    word: Literal[40, 48] = Field(
        48, description="bits of a number in a masked message, where integers are masked"
    )
    passes: Literal["bfloat16"] | None = Field(
        None,
        description='"bfloat16": gradients at rounded models and features (vectorized); all else stays in `dtype`',
    )
    device: str = Field("cpu", description="where the vectorized engine computes, as torch names it")
    evaluations: Count = Field(20, description="how many rounds, evenly spaced, are evaluated on the test set")
    metrics: Annotated[tuple[Score, ...], Field(strict=False)] = Field(
        (),
        description='scores of the test records beside loss and accuracy: "auc", "balanced_accuracy", '
        '"calibration_error" of classes, "r2", "mae" of real numbers, "concordance", "integrated_brier" of times',
    )
    per_silo: bool = Field(
        False, description="every metric also on each site's own test records, with their mean and the worst"
    )
    goldstein_radius: Positive | None = Field(
        None, description="evaluations measure Goldstein stationarity in this radius, as the metric `goldstein`"
    )
    noise: Literal["per-silo", "aggregate"] = Field(
        "per-silo",
        description='"aggregate" draws the mean of the silos\' noise at once (vectorized engine only): '
        "the same distribution, another trajectory",
    )


class DeploymentSection(Section):
    """Section [deployment]: a server's treatment of silos that do not reply."""

    patience: Positive = Field(600.0, description="seconds to wait for the silos of a round before giving up")
    missing: Literal["stop", "continue"] = Field(
        "stop",
        description='"continue": the run continues without a silo that did not answer, with an increment of 0',
    )
    least_silos: Count | None = Field(
        None, description='with missing = "continue": the fewest silos that have to answer a round, 1 by default'
    )

    @model_validator(mode="after")
    def _check_least_silos(self) -> Self:
        if self.least_silos is not None and self.missing != "continue":
            raise ValueError('least_silos: is for missing = "continue"; without it all silos have to answer')
        return self

    @property
    def min_replies(self) -> int | None:
        """Least number of replies with which a round continues, or None if all silos have to reply."""
        return None if self.missing == "stop" else self.least_silos or 1


_WHY_NO_SUM = {
    "auc": "it ranks every record against all others",
    "balanced_accuracy": "how many records each class has would be a release of its own",
    "calibration_error": "it needs sums over the records of every bin of confidence",
    "r2": "it divides by how much the labels spread, which is not public",
    "mae": "an error has no bound",
    "concordance": "it ranks every record against all others",
    "integrated_brier": "its weights are of all records",
}
"""Reasons why a score of test records is no sum of bounded vectors, one for each record."""


def _parse_curves(section: Any) -> Any:
    return None if section is None else load_add_on_part("evaluation", "curves").model_validate(section)


class EvaluationSection(Section):
    """Section [evaluation]: silos send sums over their own test records, which are not public.

    Without this section the server evaluates, on a public test set.
    """

    records: Annotated[tuple[Count, ...], Field(strict=False)] | Count = Field(
        description="number of test records of each silo, one number or one for each silo; a public choice, and "
        "the denominator of every mean"
    )
    mu: Positive | None = Field(
        None,
        description="what all evaluations of a run together cost each test record; left out, a trusted server "
        "gets exact sums, and nothing is claimed for what it does with them",
    )
    loss_bound: Annotated[float, Field(ge=2.0**-40, le=2.0**40)] = Field(
        10.0, description="a larger loss of a test record counts as this, so that no single record decides a mean"
    )
    curves: Annotated[Any, BeforeValidator(_parse_curves)] = Field(
        None, description="AUC, sensitivity, specificity and calibration of two classes, with intervals, by groups"
    )

    @property
    def increment_norm(self) -> float:
        """Largest norm of one test record's increment in an evaluation of classes."""
        return 0.5 * math.sqrt(2.0) if self.curves is None else self.curves.increment_norm

    def records_per_silo(self, silos: int) -> tuple[int, ...]:
        """Return the number of test records of each silo, in the order of silos."""
        return (self.records,) * silos if isinstance(self.records, int) else self.records

    def check_federation(self, silos: int, trust: Trust, privacy: PrivacySection) -> None:
        """Check that silos can evaluate in this way, and in private.

        Guarantee: a run with noise evaluates with noise wherever the server is not trusted.

        Raises:
            ValueError: The section does not fit the run, or noise is missing where it is needed.
        """
        refuse(
            {
                f"evaluation.records has {len(self.records_per_silo(silos))} numbers, and there are {silos} "
                "silos": (len(self.records_per_silo(silos)) != silos),
                'evaluation.mu: privacy.mode = "none" means no noise, in evaluations too; leave it out': (
                    privacy.mode == "none" and self.mu is not None
                ),
                "evaluation.mu: this key is missing: under a server that is not trusted every evaluation is a "
                "release of test records; say what all of them together may cost, such as mu = 1.0": (
                    privacy.mode != "none" and self.mu is None and not trust.adds_noise(SERVER)
                ),
                f'evaluation: test records are protected one by one, and privacy.unit = "{privacy.unit}"; leave '
                "the section out": (privacy.unit != RECORD.name),
            },
            ValueError,
        )


def check_measures(run: RunSection, *, only_sum_published: bool) -> None:
    """Refuse measures that cannot be computed from the silos' sums over their test records.

    Args:
        run: Section [run].
        only_sum_published: Whether only the total over silos is published, so that no silo has metrics of its own.

    Raises:
        ValueError: A measure needs more than what silos send, or than what is published.
    """
    if run.metrics:
        raise ValueError(
            f"run.metrics: silos send sums of bounded vectors, one a test record, and {run.metrics[0]} is none: "
            f"{_WHY_NO_SUM[run.metrics[0]]}; leave it out, or [evaluation]"
        )
    refuse(
        {
            "run.goldstein_radius: gradients of test records are not sent; leave it out, or [evaluation]": (
                run.goldstein_radius is not None
            ),
            "run.per_silo: a trusted server adds the noise of evaluations to the sum over silos and publishes "
            'that alone; leave it out, or take trust = "untrusted"': (run.per_silo and only_sum_published),
        },
        ValueError,
    )
