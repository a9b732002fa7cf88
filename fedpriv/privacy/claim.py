"""What a release promises, in one typed, printable value.

A number without its neighbouring relation and its unit says nothing; they travel together here.
"""

from dataclasses import dataclass
from typing import Generic

from fedpriv.accounting.guarantees import Promise
from fedpriv.accounting.relation import Relation
from fedpriv.privacy.unit import RECORD, Unit

EXACT = "up to 2^-60 in total variation (δ grows by (1 + e^ε) · 2^-60), if AES-256 is a pseudorandom permutation"
"""What an exact release's guarantee takes for granted; its slack is checked when the run is planned."""


@dataclass(frozen=True)
class PrivacyClaim(Generic[Promise]):
    """A guarantee together with what it is a guarantee of.

    Guarantee: it holds for neighbouring data sets under `relation` that differ in one `unit`, whatever the
    adversary knows about all others.
    """

    guarantee: Promise
    relation: Relation
    unit: Unit = RECORD
    exact: bool = False
    """Whether it holds for the program's own arithmetic, not for real numbers alone."""
    attained: bool = False
    """Whether μ is exact: its certificate is, and the noise is what is charged.  Otherwise it is a bound."""
    counted: float | None = None
    """μ by exact counting, where a paper's constants charge more than that; a bound too."""

    def statement(self, delta: float) -> str:
        """The claim as a person reads it, on one line."""
        claimed = self.guarantee.statement(delta)
        if self.exact:
            claimed = f"{claimed}, {EXACT}"
        return f"{claimed}; {self.relation} neighbours, unit: {self.unit.words}"
