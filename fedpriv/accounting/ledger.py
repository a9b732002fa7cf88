"""What was released, as data: accounting interprets these records and nothing else.

A `ReleaseStream` says what one owner of noise (a silo, several alike, or the server) published over a run; the
guarantee of the run is recomputed from the streams alone.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.accounting.claim import RELATION_FACTOR, GaussianDP, PrivacyClaim, Relation, relation_named
from fedpriv.errors import InputError
from fedpriv.mechanisms import (
    AlignedDifferences,
    BandedSquareRoot,
    BinaryTree,
    IndependentGaussian,
    LeafGaussian,
    Mechanism,
    PaperTree,
    PhaseEnds,
    SlidingDifferences,
    Workload,
)
from fedpriv.rounds import AnySchedule, Phases, Schedule

_MECHANISMS = {
    kind.__name__: kind
    for kind in (
        IndependentGaussian,
        BinaryTree,
        BandedSquareRoot,
        LeafGaussian,
        PaperTree,
        PhaseEnds,
        SlidingDifferences,
        AlignedDifferences,
    )
}


@dataclass(frozen=True)
class ReleaseStream:
    """Noisy running sums released in rounds 1 … `schedule.rounds` by `owner`.

    | field | meaning | unit |
    |---|---|---|
    | `owner` | "server", "silo 3" or "silos 0-99" (alike, each with noise of its own) | |
    | `schedule` | which rounds a record takes part in | |
    | `keep` | decay of the running sum | |
    | `clips` | norm bound on one record's increment, one a round | gradient |
    | `per_record` | weight of one record's increment in what is released: 1/B_i, or max p_i/B_i | |
    | `std` | standard deviation of a fresh noise vector's coordinates | gradient |
    | `period` | the sums restart from 0 every so many rounds; None if they never do | rounds |
    """

    owner: str
    mechanism: Mechanism
    schedule: AnySchedule
    keep: float
    clips: tuple[float, ...]
    per_record: float
    relation: Relation
    std: float
    period: int | None = None

    @property
    def mu(self) -> float:
        """The exact Gaussian-DP parameter of the whole stream, for each record behind it; inf without noise.

        Guarantee: neighbours differ in one record of one silo under `relation`; the stream is what everybody
        outside the owner sees.
        """
        if self.std == 0.0:
            return math.inf
        workload = Workload(self.schedule, self.keep, np.array(self.clips), self.period)
        sensitivity = self.mechanism.sensitivity(workload)
        return RELATION_FACTOR[self.relation] * self.per_record * sensitivity / self.std


def claim_of(streams: Sequence[ReleaseStream]) -> PrivacyClaim | None:
    """The guarantee of all streams together; None if there is none (no stream, or one without noise).

    Guarantee: silos hold disjoint records, so a record is behind one stream only and the worst stream is
    charged, never the sum.  InputError if streams name different neighbouring relations.
    """
    relations = {stream.relation for stream in streams}
    if len(relations) > 1:
        raise InputError(f"a run has one neighbouring relation, this ledger has {', '.join(sorted(relations))}")
    worst = max((stream.mu for stream in streams), default=math.inf)
    return None if math.isinf(worst) else PrivacyClaim(GaussianDP(worst), relations.pop())


def as_data(stream: ReleaseStream) -> dict[str, Any]:
    """Plain data, with equal clips of consecutive rounds written as [clip, rounds]."""
    mechanism: Any = stream.mechanism
    return {
        "owner": stream.owner,
        "mechanism": {"name": type(mechanism).__name__, **dataclasses.asdict(mechanism)},
        "rounds": stream.schedule.rounds,
        "places": stream.schedule.places,
        "phases": stream.schedule.lengths if isinstance(stream.schedule, Phases) else None,
        "keep": stream.keep,
        "clips": [[clip, len(list(run))] for clip, run in itertools.groupby(stream.clips)],
        "per_record": stream.per_record,
        "relation": stream.relation,
        "std": stream.std,
        "period": stream.period,
    }


def from_data(data: Mapping[str, Any]) -> ReleaseStream:
    """The inverse of `as_data`; InputError for what cannot be accounted for."""
    settings = dict(data["mechanism"])
    name = settings.pop("name")
    if "phases" in settings:
        settings["phases"] = Phases(tuple(settings["phases"]["lengths"]))
    if name not in _MECHANISMS:
        raise InputError(f"ledger: mechanism {name!r} is none of {', '.join(_MECHANISMS)}")
    return ReleaseStream(
        owner=data["owner"],
        mechanism=_MECHANISMS[name](**settings),
        schedule=Phases(tuple(data["phases"])) if data.get("phases") else Schedule(data["rounds"], data["places"]),
        keep=data["keep"],
        clips=tuple(clip for clip, rounds in data["clips"] for _ in range(rounds)),
        per_record=data["per_record"],
        relation=relation_named(data["relation"]),
        std=data["std"],
        period=data.get("period"),
    )


@dataclass(frozen=True)
class LedgerEntry:
    """One cell of a run: where it stands in the sweep, what it claims, and what it released."""

    cell: int
    point: Mapping[str, Any]
    seed: int
    trust: str
    claimed_mu: float | None
    delta: float
    streams: tuple[ReleaseStream, ...]

    @property
    def claim(self) -> PrivacyClaim | None:
        """Recomputed from the streams."""
        return claim_of(self.streams)

    @property
    def agrees(self) -> bool:
        """Whether what is claimed is what the streams give."""
        recomputed = self.claim
        if self.claimed_mu is None or recomputed is None:
            return self.claimed_mu is None and recomputed is None
        return math.isclose(self.claimed_mu, recomputed.guarantee.mu, rel_tol=1e-9)


def read_ledger(folder: Path) -> list[LedgerEntry]:
    """The entries of RUN_DIR/results.json; InputError if it has none that can be read."""
    path = folder / "results.json"
    try:
        cells: Iterable[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [
            LedgerEntry(
                cell["cell"],
                cell["point"],
                cell["seed"],
                cell["trust"],
                cell["mu"],
                cell["delta"],
                tuple(map(from_data, cell["releases"])),
            )
            for cell in cells
        ]
    except FileNotFoundError:
        raise InputError(f"{folder}: no results.json there; give a folder that `fedpriv run` wrote") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a ledger of fedpriv ({type(error).__name__}: {error})") from None
