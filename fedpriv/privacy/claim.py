"""What a release promises, in one typed, printable value.

A number without its neighbouring relation and its unit says nothing; they travel together here.
"""

from dataclasses import dataclass
from typing import Generic

from fedpriv.accounting.guarantees import Promise
from fedpriv.accounting.relation import Relation
from fedpriv.privacy.unit import RECORD, Unit


@dataclass(frozen=True)
class PrivacyClaim(Generic[Promise]):
    """A guarantee together with what it is a guarantee of.

    Guarantee: it holds for neighbouring data sets under `relation` that differ in one `unit`, whatever the
    adversary knows about all others.
    """

    guarantee: Promise
    relation: Relation
    unit: Unit = RECORD

    def statement(self, delta: float) -> str:
        """The claim as a person reads it, on one line."""
        return f"{self.guarantee.statement(delta)}; {self.relation} neighbours, unit: {self.unit.words}"
