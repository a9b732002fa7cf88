"""The typed scenario: one cell of a scenario file, every key checked before anything runs."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedpriv.accounting.gdp import mu_of
from fedpriv.algorithms import Algorithm, Positive, Settings, algorithm_named
from fedpriv.trust import Trust, trust_named

Probability = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataSection(Section):
    """[data]: which records, and how they are spread over the silos."""

    name: str = Field(description="a data set's name, as `fedpriv data fetch` takes it")
    partition: Literal["iid"] = Field("iid", description="how records are spread over silos")


class ModelSection(Section):
    """[model]: the loss."""

    name: Literal["softmax-regression"] = "softmax-regression"


class FederationSection(Section):
    """[federation]: how many silos, rounds and records; `samples` = silos * rounds * batch instead of rounds."""

    silos: Count = Field(description="number of silos M; all take part in every round")
    rounds: Count | None = Field(None, description="number of rounds T")
    samples: Count | None = Field(None, description="records read in the whole run, instead of `rounds`")
    batch: Count = Field(1, description="records of one silo in one round")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.rounds is None) == (self.samples is None):
            raise ValueError("needs exactly one of rounds and samples")
        if self.samples is not None and self.samples < self.silos * self.batch:
            raise ValueError(
                f"samples = {self.samples} gives no round: silos * batch = {self.silos * self.batch} records each"
            )
        return self

    @property
    def total_rounds(self) -> int:
        """T."""
        if self.rounds is not None:
            return self.rounds
        assert self.samples is not None
        return self.samples // (self.silos * self.batch)

    @property
    def records_per_silo(self) -> int:
        """How many records a silo needs for one pass."""
        return self.total_rounds * self.batch


class AlgorithmSection(BaseModel):
    """[algorithm]: a row of the table, the trust setting, and the row's own keys (`settings`)."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str
    trust: str

    @property
    def row(self) -> Algorithm:
        return algorithm_named(self.name)

    @property
    def setting(self) -> Trust:
        return trust_named(self.trust)

    @property
    def settings(self) -> Settings:
        """The row's own keys, validated by the row's own type."""
        return self.row.settings.model_validate(self.model_extra or {})


class PrivacySection(Section):
    """[privacy]: the guarantee each silo's records get; exactly one of mu, rho, zcdp or epsilon with delta.

    `mu` is the Gaussian-DP parameter μ; `rho` is the name Reshef & Levy give it; `zcdp` is μ²/2.
    """

    mode: Literal["gaussian", "none"] = Field("gaussian", description='"none" runs without noise or guarantee')
    relation: Literal["replace-one", "zero-out"] = Field(description="which data sets are neighbours")
    mu: Positive | None = None
    rho: Positive | None = Field(None, description="the paper's name for mu (DP-μ²-FL only)")
    zcdp: Positive | None = None
    epsilon: Positive | None = None
    delta: Probability = Field(1e-5, description="δ of every (ε, δ) that is printed, and of `epsilon`")

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        given = [name for name in ("mu", "rho", "zcdp", "epsilon") if getattr(self, name) is not None]
        if self.mode == "none" and given:
            raise ValueError(f'mode = "none" means no noise, so {given[0]} cannot be given with it')
        if self.mode == "gaussian" and len(given) != 1:
            raise ValueError(
                f"needs exactly one of mu, rho, zcdp and epsilon; given: {', '.join(given) or 'none'}"
            )
        return self

    @property
    def target(self) -> float | None:
        """μ, or None when the run is not private."""
        if self.epsilon is not None:
            return mu_of(self.epsilon, self.delta)
        if self.zcdp is not None:
            return math.sqrt(2.0 * self.zcdp)
        return self.mu if self.mu is not None else self.rho


class RunSection(Section):
    """[run]: how to compute, not what; nothing here changes the guarantee."""

    dtype: Literal["float32", "float64"] = "float32"
    device: str = Field("cpu", description="where the vectorized engine computes, as torch names it")
    evaluations: Count = Field(20, description="how many rounds, evenly spaced, are evaluated on the test set")
    noise: Literal["per-silo", "aggregate"] = Field(
        "per-silo",
        description='"aggregate" draws the mean of the silos\' noise at once (vectorized engine only): '
        "the same distribution, another trajectory",
    )


class DeploymentSection(Section):
    """[deployment]: what a server does about silos that do not answer; simulations have no such silos."""

    patience: Positive = Field(600.0, description="seconds to wait for the silos of a round before giving up")
    missing: Literal["stop", "continue"] = Field(
        "stop",
        description='"continue" goes on with the last sum of a silo that did not answer (untrusted server only)',
    )


class Cell(Section):
    """One resolved run: a scenario at one sweep point and one seed."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="lower-case letters, digits and dashes")
    title: str = ""
    seed: Annotated[int, Field(ge=0)] = 0
    data: DataSection
    model: ModelSection = ModelSection()
    federation: FederationSection
    algorithm: AlgorithmSection
    privacy: PrivacySection
    run: RunSection = RunSection()
    deployment: DeploymentSection = DeploymentSection()

    @model_validator(mode="after")
    def _only_noisy_sums_are_kept(self) -> Self:
        """A sum that comes late would enter a later round than a server's noise was calibrated for."""
        if self.deployment.missing == "continue" and trust_named(self.algorithm.trust).noise_at_server:
            raise ValueError('deployment.missing = "continue" needs silos that add their own noise')
        return self

    def canonical(self) -> dict[str, Any]:
        """Plain data that identifies the run: what results.json stores and what engines pass on."""
        return self.model_dump(mode="json", exclude_none=True)
