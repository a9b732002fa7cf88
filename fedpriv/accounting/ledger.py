"""What was released, as data: accounting interprets these records and nothing else.

A `ReleaseStream` says what one owner of noise (a silo, several alike, or the server) published over a run; the
guarantee of the run is recomputed from the streams alone.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedpriv.accounting.claim import (
    GaussianDP,
    Guarantee,
    PrivacyClaim,
    Relation,
    moved_by,
    relation_named,
    weakest,
)
from fedpriv.accounting.subsampled import SubsampledGaussian
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
from fedpriv.rounds import AnySchedule, Phases, Poisson, Schedule

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
    def guarantee(self) -> Guarantee | None:
        """What the whole stream promises to each record behind it; None without noise.

        Guarantee: neighbours differ in one record of one silo under `relation`; the stream is what everybody
        outside the owner sees.  InputError for what cannot be accounted for.
        """
        if self.std == 0.0:
            return None
        if isinstance(self.schedule, Poisson):
            clip = sampled_clip(self.mechanism, self.keep, self.clips, self.relation)
            multiplier = self.std / (self.per_record * clip)
            return SubsampledGaussian(multiplier, self.schedule.rate, self.schedule.rounds)
        return GaussianDP(self._mu())

    @property
    def mu(self) -> float:
        """The exact Gaussian-DP parameter of a stream in fixed order; inf without noise."""
        if self.std == 0.0:
            return math.inf
        if isinstance(self.schedule, Poisson):
            raise InputError("a stream with Poisson sampling has no mu: its guarantee is a curve of (ε, δ)")
        return self._mu()

    @property
    def workload(self) -> Workload:
        """The running sums of a fixed order; InputError for Poisson sampling."""
        if isinstance(self.schedule, Poisson):
            raise InputError("a stream with Poisson sampling has no workload: its participation is random")
        return Workload(self.schedule, self.keep, np.array(self.clips), self.period)

    def _mu(self) -> float:
        sensitivity = self.mechanism.sensitivity(self.workload)
        return moved_by(self.relation, self.per_record, sensitivity) / self.std


def sampled_clip(mechanism: Mechanism, keep: float, clips: Sequence[float], relation: Relation) -> float:
    """The norm bound of one record's contribution to each of the releases of a Poisson-sampled stream.

    Guarantee: where this returns, every release is a sum of contributions of that norm at most, of the records
    drawn in its own round, with fresh noise: the mechanism that `SubsampledGaussian` accounts for.  InputError
    for anything else, with the reason.
    """
    refused = "Poisson sampling (federation.sampling) cannot be accounted for"
    if relation not in SubsampledGaussian.relations:
        raise InputError(
            f"{refused} under {relation}: amplification by sampling is known for zero-out, where a record is "
            "there or not; a factor of 2 in the noise does not give replace-one"
        )
    if keep != 0.0 or not isinstance(mechanism, IndependentGaussian):
        raise InputError(
            f"{refused} for running sums (keep = {keep:g}) or correlated noise ({type(mechanism).__name__}): the "
            "algebra of participations knows fixed orders only; take an algorithm that releases each round's "
            "gradient with independent noise, such as dp-sgd"
        )
    if len(set(clips)) != 1:
        raise InputError(f"{refused} with clips that change from round to round: {min(clips):g} to {max(clips):g}")
    return clips[0]


def claim_of(streams: Sequence[ReleaseStream]) -> PrivacyClaim[Guarantee] | None:
    """The guarantee of all streams together; None if there is none (no stream, or one without noise).

    Guarantee: silos hold disjoint records, so a record is behind one stream only and the worst stream is
    charged, never the sum.  InputError if streams name different neighbouring relations.
    """
    relations = {stream.relation for stream in streams}
    if len(relations) > 1:
        raise InputError(f"a run has one neighbouring relation, this ledger has {', '.join(sorted(relations))}")
    guarantees = [stream.guarantee for stream in streams]
    known = [each for each in guarantees if each is not None]
    if not known or len(known) < len(guarantees):
        return None
    return PrivacyClaim(weakest(known), relations.pop())


def as_data(stream: ReleaseStream) -> dict[str, Any]:
    """Plain data, with equal clips of consecutive rounds written as [clip, rounds]."""
    mechanism: Any = stream.mechanism
    return {
        "owner": stream.owner,
        "mechanism": {"name": type(mechanism).__name__, **dataclasses.asdict(mechanism)},
        "rounds": stream.schedule.rounds,
        "places": stream.schedule.places,
        "phases": stream.schedule.lengths if isinstance(stream.schedule, Phases) else None,
        "sampling": "poisson" if isinstance(stream.schedule, Poisson) else "fixed",
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
    if not 0.0 <= data["std"] < math.inf:
        raise InputError(f"ledger: noise of standard deviation {data['std']} is none that a run can have")
    return ReleaseStream(
        owner=data["owner"],
        mechanism=_MECHANISMS[name](**settings),
        schedule=_schedule_from(data),
        keep=data["keep"],
        clips=tuple(clip for clip, rounds in data["clips"] for _ in range(rounds)),
        per_record=data["per_record"],
        relation=relation_named(data["relation"]),
        std=data["std"],
        period=data.get("period"),
    )


def _schedule_from(data: Mapping[str, Any]) -> AnySchedule:
    if data.get("phases"):
        return Phases(tuple(data["phases"]))
    match data.get("sampling", "fixed"):
        case "fixed":
            return Schedule(data["rounds"], data["places"])
        case "poisson":
            return Poisson(data["rounds"], data["places"])
        case other:
            raise InputError(f"ledger: sampling {other!r} is neither 'fixed' nor 'poisson'")
