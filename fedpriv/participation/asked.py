"""What a scenario, or a question on the command line, says of a participation beside its name."""

from dataclasses import dataclass

from fedpriv.errors import InputError


@dataclass(frozen=True)
class Asked:
    """Keys of [federation] that only some participations take; what is left out is not given."""

    groups: int = 1
    min_separation: int | None = None
    max_participations: int | None = None

    def without_timers(self, name: str) -> None:
        """InputError for the keys of clients that come by themselves, which participation `name` has not."""
        for key in ("min_separation", "max_participations"):
            if (value := getattr(self, key)) is not None:
                raise InputError(
                    f"federation.{key} = {value}: it is for clients that come by themselves; with sampling = "
                    f'"{name}" leave it out, or set sampling = "available"'
                )

    def without_groups(self, name: str) -> None:
        """InputError for groups, which only secret participations have."""
        if self.groups != 1:
            raise InputError(
                f"federation.groups = {self.groups}: groups are for records that take part in secret; with "
                f'sampling = "{name}" leave them out'
            )
