"""Records of several rounds that are gathered together, for replicates that read the same.

What depends on records alone is computed once for all rounds.  An objective asks for it with `of_records`, and
gets the same numbers for records that are no part of a block.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence

from torch import Tensor

from fedpriv.objectives.base import Records


class OfBlock(Records):
    """One round's records, (replicates, B, …), with one memory for all replicates.

    What is made of them, a part for instance, is plain `Records` again.
    """

    single: Records
    """The same without the axis of replicates."""
    block: "Block"
    place: int


class Block:
    """Records (rounds, B, …) of which every replicate reads all."""

    def __init__(self, records: Records, replicates: int) -> None:
        self._records, self._replicates = records, replicates
        self._computed: dict[Hashable, Sequence[Tensor]] = {}

    def rounds(self) -> Iterator[OfBlock]:
        """Each round's records."""
        singles = zip(*(column.unbind() for column in self._records), strict=True)
        wide = zip(*(self._of_replicates(column).unbind() for column in self._records), strict=True)
        for place, (columns, single) in enumerate(zip(wide, singles, strict=True)):
            records = OfBlock(*columns)
            records.single, records.block, records.place = Records(*single), self, place
            yield records

    def computed(self, place: int, name: Hashable, compute: Callable[[Records], Tensor]) -> Tensor:
        """A round's part of what `compute` makes of the records of all rounds."""
        found = self._computed.get(name)
        if found is None:
            found = self._computed[name] = compute(self._records).unbind()
        return found[place]

    def _of_replicates(self, column: Tensor) -> Tensor:
        return column.unsqueeze(1).expand(-1, self._replicates, *column.shape[1:])


def once(records: Records) -> Records:
    """Without the axis of replicates where all of them read the same records, and share their memory."""
    return records.single if isinstance(records, OfBlock) else records


def of_records(records: Records, name: Hashable, compute: Callable[[Records], Tensor]) -> Tensor:
    """What `compute` makes of `once(records)`: numbers for each record by itself, under a `name` of their own."""
    return (
        records.block.computed(records.place, name, compute) if isinstance(records, OfBlock) else compute(records)
    )
