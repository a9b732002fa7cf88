"""[privacy] of a scenario: the target, what it is a guarantee of, and what a cell's rounds may spend of it."""

import math
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from fedpriv.accounting.gdp import mu_of
from fedpriv.accounting.zcdp import mu_of_zcdp
from fedpriv.algorithms import Positive
from fedpriv.privacy.unit import RECORD, USER, Unit, UnitName, unit_named
from fedpriv.scenario.section import Count, Probability, Section

_TOO_LARGE = 0.1  # δ from here on is refused
_SAFE = 1.0 - 2.0**-48
"""Less than what composing two steps rounds: together they stay within what was promised."""


@dataclass(frozen=True)
class Budget:
    """What the rounds of a cell may spend of a promise, and what is spent beside them of the same records.

    | field | meaning |
    |---|---|
    | `rounds` | μ that the noise of the cell's own rounds is calibrated to; None: they add none |
    | `beside` | μ of the other step of the run, such as a first step; 0 where there is none |

    A cell gets it where a run is composed, and keeps it however it is copied: nothing reads it off other keys.

    Guarantee: rounds² + beside² is at most the square of the promise.
    """

    rounds: float | None
    beside: float = 0.0


def budget_of(promise: float | None, share: float = 0.0) -> Budget:
    """The promise μ of a run whose other step takes the `share` of μ²; without one the rounds have all of it."""
    if promise is None or share == 0.0:
        return Budget(promise)
    return Budget(promise * math.sqrt(1.0 - share) * _SAFE, promise * math.sqrt(share) * _SAFE)


class PrivacySection(Section):
    """[privacy]: the guarantee each silo's records get; exactly one of mu, rho, zcdp or epsilon with delta.

    `mu` is the Gaussian-DP parameter μ; `rho` is the name Reshef & Levy give it; `zcdp` is μ²/2.
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

    @model_validator(mode="after")
    def _records_of_a_unit(self) -> Self:
        if self.unit == RECORD.name and self.records is not None:
            raise ValueError(
                f'records = {self.records} is for unit = "user" or "client"; set that, or leave it out'
            )
        if self.unit != RECORD.name and self.records is None:
            which = "of one person count at most" if self.unit == USER.name else "one client holds at most"
            raise ValueError(
                f'records is needed for unit = "{self.unit}": how many records {which}, e.g. privacy.records = 4'
            )
        if self.unit != USER.name and self.shared > 1:
            raise ValueError(f"shared = {self.shared}: only persons have records in several silos")
        return self

    @field_validator("delta")
    @classmethod
    def _delta_is_small(cls, delta: float) -> float:
        if delta >= _TOO_LARGE:
            raise ValueError(
                f"publishing all records with probability {delta:g} would be allowed; take one far below 1/n for "
                "the n records of the smallest silo, such as 1e-5"
            )
        return delta

    @property
    def protected(self) -> Unit:
        return unit_named(self.unit, self.records or 1, self.shared)

    @property
    def target(self) -> float | None:
        """μ, or None when the run is not private."""
        if self.epsilon is not None:
            return mu_of(self.epsilon, self.delta)
        if self.zcdp is not None:
            return mu_of_zcdp(self.zcdp)
        return self.mu if self.mu is not None else self.rho
