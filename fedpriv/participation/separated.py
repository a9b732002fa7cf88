"""Any rounds that keep a distance: what accounting knows of a record that comes when it likes."""

from dataclasses import dataclass

from fedpriv.errors import InputError


@dataclass(frozen=True)
class Separated:
    """Any participation of a record in at most `max_participations` of `rounds` rounds, at least
    `min_separation` rounds apart.

    Guarantee: what is accounted for it holds for every such pattern, also one chosen by an adversary.
    """

    rounds: int
    max_participations: int
    min_separation: int

    def __post_init__(self) -> None:
        if min(self.rounds, self.max_participations, self.min_separation) < 1:
            raise InputError(
                f"rounds = {self.rounds}, max_participations = {self.max_participations}, "
                f"min_separation = {self.min_separation}: all are 1 or more"
            )

    @property
    def most(self) -> int:
        """How often a record really can take part: `max_participations`, or fewer if the rounds do not suffice."""
        return min(self.max_participations, -(-self.rounds // self.min_separation))

    @property
    def single_pass(self) -> bool:
        return self.most == 1
