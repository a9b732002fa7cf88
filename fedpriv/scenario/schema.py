"""Schema of a scenario's cell, which checks keys before anything runs.

A cell is one run of a scenario.  The checks across its sections are here.

* A unit of protection is what neighbouring data sets differ in: a record, a person or a client.
* A pool of clients takes the place of silos, and a round reads a cohort of the clients.
* The trust setting says against whom a unit is protected, and who adds the noise.
* Participation says, in public or in secret, which records take part in which rounds.
* μ is the parameter of Gaussian differential privacy, and the target is the μ that noise is calibrated to.
* A first step is a release before the rounds, about the same records, by whose result columns are scaled.
* Budget shares are the silos' parts of the target, in the unit in which [privacy] gives it: ε, zCDP or μ.
"""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from fedpriv.core.errors import refuse
from fedpriv.core.random import SERVER, seed_key
from fedpriv.loss.imported import is_import_path
from fedpriv.loss.models import find_model
from fedpriv.loss.ridge import RIDGE_STATISTICS, check_one_release
from fedpriv.loss.rows import Model, ModelSettings
from fedpriv.noise.trust import CLIENT, USER, Trust, Unit, find_trust
from fedpriv.papers.base import Algorithm, Settings
from fedpriv.papers.table import find_algorithm
from fedpriv.participation.orders import FixedOrder, FreshOrder, Participation, Phases
from fedpriv.participation.registry import find_sampling_class, make_participation
from fedpriv.scenario.data import DataSection, check_first_step
from fedpriv.scenario.messages import validate_section
from fedpriv.scenario.sections import (
    DeploymentSection,
    EvaluationSection,
    FederationSection,
    PrivacySection,
    RunBudget,
    RunSection,
    Section,
    check_measures,
    split_budget,
)


def check_absences(federation: FederationSection, key: str | None, trust: Trust) -> None:
    """Refuse absences that the trust setting does not allow, or of silos or rounds that do not exist.

    Guarantee: a release without a silo is a sum with fixed weights, and its noise is the claimed noise.

    Args:
        federation: Section [federation].
        key: Key by which the run continues without silos that do not reply, or None.
        trust: Trust setting.

    Raises:
        ValueError: The trust setting needs all silos, or `away` names a silo that does not exist, or a round after
            the last one.
    """
    if key is None:
        return
    if trust.why_no_absences:
        raise ValueError(f"{key} with algorithm.trust = {trust.name!r}: {trust.why_no_absences}")
    for silo, rounds in federation.away.items():
        if not (silo.isascii() and silo.isdecimal() and str(int(silo)) == silo and int(silo) < federation.silos):
            raise ValueError(f"federation.away: {silo!r} is no silo; there are 0 to {federation.silos - 1}")
        if max(rounds, default=1) > federation.total_rounds:
            raise ValueError(
                f"federation.away: round {max(rounds)} of silo {silo}: there are {federation.total_rounds}"
            )


_POOL_PARTITIONS = ("iid", "dirichlet", "shards")
"""Partitions that spread records over the clients of a pool."""


def check_units(unit: Unit, data: DataSection, federation: FederationSection, secret: bool, trust: Trust) -> None:
    """Refuse a unit that the data or the federation do not have, or that cannot be accounted for.

    - Clients of a pool take part in cohorts, which the trust setting has to keep secret.
    - Clients as units of silos need the partition "iid", and under secret sampling such a trust setting, too.
    - Persons need a column that names them.
    - Persons in several silos need as many silos or more, and a public order of the records.

    Raises:
        ValueError: The unit cannot be protected.
    """
    if federation.clients is not None:
        _check_pool(unit, data, trust)
    elif unit.name == CLIENT.name and secret and trust.why_no_cohorts:
        raise ValueError(
            f'federation.sampling with privacy.unit = "client" and algorithm.trust = {trust.name!r}: '
            f'{trust.why_no_cohorts}; use "trusted", or sampling = "fixed"'
        )
    elif unit.name == CLIENT.name and data.partition != "iid":
        raise ValueError(
            f'data.partition = "{data.partition}" with privacy.unit = "client": use "iid", or federation.clients'
        )
    schema = data.table_schema
    refuse(
        {
            'privacy.unit = "user": the data do not say whose a record is; needs a table with table.person': (
                unit.name == USER.name and (schema is None or schema.person is None)
            ),
            f"privacy.shared = {unit.max_silos}: there are {federation.silos} silos": (
                unit.max_silos > federation.silos
            ),
            f"privacy.shared = {unit.max_silos}: persons in several silos are accounted for "
            'in public orders only; use federation.sampling = "fixed"': (unit.max_silos > 1 and secret),
        },
        ValueError,
    )


def _check_pool(unit: Unit, data: DataSection, trust: Trust) -> None:
    """Refuse a pool of clients unless clients are the unit, cohorts are secret, and clients have no sites."""
    refuse(
        {
            f'federation.clients with privacy.unit = "{unit.name}": what is clipped and counted in a cohort is '
            'a client; set unit = "client" and records': (unit.name != CLIENT.name),
            f'federation.clients with algorithm.trust = {trust.name!r}: {trust.why_no_cohorts}; use "trusted", or '
            "make every client a silo, which answers in every round": (trust.why_no_cohorts),
            f'data.partition = "{data.partition}": clients of a pool have no sites; use "iid", "dirichlet" or '
            '"shards"': (data.partition not in _POOL_PARTITIONS),
        },
        ValueError,
    )


def check_shares(privacy: PrivacySection, data: DataSection, federation: FederationSection, trust: Trust) -> None:
    """Refuse budget shares that are not one for each silo, or that the noise cannot honour.

    Shares of a pool of clients, or with a first step, are refused, too.

    Guarantee: only a silo that adds all of its noise itself has a budget of its own.

    Raises:
        ValueError: The shares cannot be used.
    """
    if (shares := privacy.shares) is None:
        return
    if len(shares) != federation.silos or federation.clients is not None:
        raise ValueError(
            f"privacy.shares has {len(shares)} numbers; give one for each of {federation.silos} silos"
        )
    if not trust.private_messages:
        raise ValueError(
            f'privacy.shares with algorithm.trust = "{trust.name}": its noise protects the records of all silos '
            'alike; use "untrusted", or give the smallest budget to all'
        )
    if data.scale is not None:
        raise ValueError(
            "privacy.shares with data.scale: the first step has one budget for all silos; leave out one"
        )


class ModelSection(BaseModel):
    """Section [model]: a row of the table of models by its name, and the row's own keys (`settings`)."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str = "softmax-regression"

    @property
    def row(self) -> Model:
        return find_model(self.name)

    @property
    def settings(self) -> ModelSettings:
        """Settings of the row's own keys, validated by the row's own type."""
        settings: ModelSettings = validate_section(
            self.row.settings, self.model_extra or {}, "", "model", ModelSection
        )
        return settings

    @property
    def is_regression(self) -> bool:
        """Whether labels are real numbers."""
        setting = self.settings.regression
        return self.row.regression if setting is None else setting

    @property
    def is_survival(self) -> bool:
        """Whether labels are numbers of survived bins with events, and outputs are hazards."""
        return self.row.survival or (is_import_path(self.name) and self.settings.survival)

    @property
    def is_classification(self) -> bool:
        """Whether predictions are right or wrong."""
        return not self.is_regression and not self.is_survival

    @property
    def import_paths(self) -> tuple[str, ...]:
        """Import paths of the model's code outside fedpriv."""
        return (*((self.name,) if is_import_path(self.name) else ()), *self.settings.code)


def check_survival(model: ModelSection, data: DataSection) -> None:
    """Refuse hazards for data without survival times, and survival times for any other model.

    Models that are not evaluated pass.

    Raises:
        ValueError: Model and data do not fit together.
    """
    schema = data.table_schema
    has_times = schema is not None and schema.survival is not None
    if model.row.evaluated and model.is_survival != has_times:
        raise ValueError(
            f'model.name = "{model.name}": '
            + ("the table has survival; take hazard-regression" if has_times else "needs a table with survival")
        )


class AlgorithmSection(BaseModel):
    """Section [algorithm]: a row of the table of algorithms, trust, and the row's own keys (`settings`)."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str
    trust: str = Field(
        description='who adds the noise: "untrusted", every silo to what it sends; "trusted", the server; '
        '"secure-aggregation", every silo a share, masked, so that the server learns the sum; "curator", one '
        "party that has all records"
    )

    @property
    def row(self) -> Algorithm:
        return find_algorithm(self.name)

    @property
    def trust_setting(self) -> Trust:
        return find_trust(self.trust)

    @property
    def settings(self) -> Settings:
        """Settings of the row's own keys, validated by the row's own type."""
        settings: Settings = validate_section(
            self.row.settings, self.model_extra or {}, "", "algorithm", AlgorithmSection
        )
        return settings


class Cell(Section):
    """Resolved run: a scenario at one sweep point and one seed."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="lower-case letters, digits and dashes")
    title: str = ""
    seed: Annotated[int, Field(ge=0)] = 0
    label: dict[str, str | int | float] = Field(
        {}, description="free names of settings: to be swept, referred to by [[where]] rules, and shown in tables"
    )
    data: DataSection
    model: ModelSection = ModelSection()
    federation: FederationSection
    algorithm: AlgorithmSection
    privacy: PrivacySection
    run: RunSection = RunSection()
    evaluation: EvaluationSection | None = None
    deployment: DeploymentSection = DeploymentSection()
    _budget: RunBudget = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Split the budget of a validated cell between a first step and the rounds."""
        scale = self.data.scale
        self._budget = split_budget(self.privacy.target_mu, 0.0 if scale is None else scale.share)

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        """Check the requirements that sections have of each other.

        Raises:
            ValueError: A requirement is not met.
            InputError: A name, such as that of the model, is not known.
        """
        federation, privacy, unit = self.federation, self.privacy, self.privacy.protected_unit
        trust, private = find_trust(self.algorithm.trust), self.privacy.mode != "none"
        check_absences(federation, self.absence_key, trust)
        check_units(unit, self.data, federation, find_sampling_class(federation.sampling).secret, trust)
        trust.check_masking(federation.silos, private)
        check_shares(privacy, self.data, federation, trust)
        self.data.check_table(
            federation.silos, private=private, per_silo=self.run.per_silo and self.evaluation is None
        )
        if self.data.scale is not None:
            check_first_step(
                federation, unit, self.absence_key, None if self.model.row.evaluated else self.model.name
            )
        check_survival(self.model, self.data)
        if self.model.name == RIDGE_STATISTICS:
            keys = self.algorithm.settings.model_dump()
            check_one_release(federation.total_rounds, self.algorithm.name, keys.get("step"), keys.get("clip"))
        self.model.row.check(self)
        if self.evaluation is not None:
            if not self.model.row.evaluated:
                raise ValueError("[evaluation]: there is no model to be evaluated; leave it out")
            self.evaluation.check_federation(federation.silos, trust, privacy)
            check_measures(
                self.run, only_sum_published=trust.adds_noise(SERVER) and self.evaluation.mu is not None
            )
            refuse(
                {
                    f"{self.absence_key}: an evaluation needs all silos; leave out [evaluation]": (
                        self.absence_key is not None
                    ),
                    "data.validation: training records that are held out are no silo's test records; leave it "
                    "out, or [evaluation]": (self.data.validation is not None),
                },
                ValueError,
            )
        return self

    @property
    def absence_key(self) -> str | None:
        """Key by which a run continues without silos that do not reply, or None if the run ends there.

        The text is for messages, and may have the value of the key.  Of several such keys the first counts.
        """
        if self.deployment.missing == "continue":
            return 'deployment.missing = "continue"'
        if self.federation.drop_out:
            return f"federation.drop_out = {self.federation.drop_out:g}"
        return "federation.away" if self.federation.away else None

    @property
    def budget(self) -> RunBudget:
        """Budget of the rounds, and μ of the other step of the run."""
        return self._budget

    @property
    def target_mu(self) -> float | None:
        """μ of the rounds, or None for a run that is not private."""
        return self._budget.rounds_mu

    @property
    def target_mus(self) -> tuple[float, ...] | None:
        """μ of the rounds for the records of silo 0, 1, …, or None for a run that is not private.

        A budget share multiplies the ε, zCDP parameter or μ that [privacy] gives, before the conversion to μ.
        Without shares μ is the same for all silos.  A pool of clients counts as one silo.
        """
        if (target := self.target_mu) is None:
            return None
        if not self.privacy.shares:
            return (target,) * len(self.batch_sizes)
        return tuple(
            mu for silo in range(self.federation.silos) if (mu := self.privacy.silo_target_mu(silo)) is not None
        )

    def derive_cell(
        self,
        privacy: PrivacySection,
        federation: FederationSection,
        algorithm: AlgorithmSection,
        *,
        other_mu: float = 0.0,
        data: DataSection | None = None,
        model: ModelSection | None = None,
        run: RunSection | None = None,
    ) -> "Cell":
        """Derive a separate run from this one: its first step, an evaluation, or a run of an audit.

        The derived cell has this cell's other sections, but for

        | dropped | reason |
        |---|---|
        | the budget | the derived rounds spend the whole promise of `privacy` |
        | `data.scale` | a first step is composed with the rounds that it was taken for, and with nothing else |
        | `evaluation` | test records are other records, with a promise of their own |

        Guarantee: the derived cell's target is that of `privacy`, before and after the cell was sent as text,
        whatever the keys of this cell.

        Args:
            privacy: Section [privacy], with the promise of the derived run.
            federation: Section [federation].
            algorithm: Section [algorithm].
            other_mu: μ of the other step of the run.
            data: Section [data], or None for this cell's.
            model: Section [model], or None for this cell's.
            run: Section [run], or None for this cell's.
        """
        sections = {name: section for name, section in (("model", model), ("run", run)) if section is not None}
        cell = self.model_copy(
            update={
                "privacy": privacy,
                "federation": federation,
                "algorithm": algorithm,
                "data": (data or self.data).model_copy(update={"scale": None}),
                "evaluation": None,
                **sections,
            }
        )
        cell._budget = RunBudget(privacy.target_mu, other_mu)
        return cell

    @property
    def noise_seed(self) -> int:
        """Seed of a simulation's noise, for a model that is not evaluated another one than `seed`.

        A first step has such a model.  The rounds after it read the same records, so that equal noise would cancel
        in a difference of the releases.
        """
        if self.model.row.evaluated:
            return self.seed
        return int.from_bytes(seed_key(self.seed, "first step")[:8], "big")

    @property
    def schedule(self) -> Participation:
        """Participation of the records, as the algorithm arranges it.

        Raises:
            InputError: The algorithm's rounds do not fit the section [federation], or have an order of its own
                class.
        """
        federation = self.federation
        declared = FixedOrder(federation.total_rounds, federation.rounds_per_epoch, seed=self.seed)
        order = self.algorithm.row.schedule(self.algorithm.settings, declared)
        refuse(
            {
                # A class of one's own may read other rounds than those that its base class is charged for.
                f"algorithm.name: {self.algorithm.name} reads records in an order of its own class, "
                f"{type(order).__name__}; make it of FixedOrder, FreshOrder or Phases": (
                    type(order) not in (FixedOrder, FreshOrder, Phases)
                ),
                f"federation.samples: {self.algorithm.name} reads {order.batches_per_silo} batches of every "
                f"silo in {declared.batches_per_silo} rounds, so samples does not say how many rounds there "
                "are: give rounds and batch": (
                    federation.samples is not None and order.batches_per_silo > declared.batches_per_silo
                ),
                f'federation.sampling = "{federation.sampling}": {self.algorithm.name} reads records in an order '
                'of its own; use "fixed"': (order != declared and federation.sampling != FixedOrder.name),
            }
        )
        return make_participation(federation.sampling, order, federation.participation_keys)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Number of records of each silo in one batch, expected under sampling, or the size of the cohort.

        If persons or clients are the unit of protection, they are counted in place of records.  The sizes are
        public.
        """
        return self.federation.batch_sizes(self.seed)

    @property
    def unread_count(self) -> int:
        """Number of `federation.samples` that are left out, since all batches of a silo have one size."""
        sample_count = self.federation.samples
        return 0 if sample_count is None else sample_count - sum(self.batch_sizes) * self.schedule.batches_per_silo

    def canonical_data(self) -> dict[str, Any]:
        """Return plain data that identifies the run, for results.json and other processes."""
        return self.model_dump(mode="json", exclude_none=True)
