"""What a run released, as the events of dp-accounting, for accountants that are not fedpriv's.

An event is plain data here, {"class": NAME, FIELD: VALUE, …} with the names and fields of dp-accounting's classes;
`dp_event` makes the object.  Streams in a public order are Gaussian mechanisms: A s + B z is post-processing of
C s + z, which one record moves by at most the sensitivity, whatever was asked in between.  A Gaussian's noise
multiplier is noise over the distance by which one neighbour moves the sums, with the factor of the relation in it.
So every accountant gives the run's ε under its own default relation; with "REPLACE_ONE" dp-accounting's two
accountants disagree about a factor of 2 (google/differential-privacy, issue 378).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedpriv.accounting.allocation import AllocatedGaussian
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.accounting.poisson import PoissonGaussian
from fedpriv.accounting.relation import moved_by
from fedpriv.errors import InputError
from fedpriv.privacy.entries import LedgerEntry
from fedpriv.privacy.ledger import ReleaseStream

Event = Mapping[str, Any]
DEFAULT_RELATION = "ADD_OR_REMOVE_ONE"
_SAME = 1e-9  # relative: two ways to add up the same squares


def events_of(entry: LedgerEntry) -> dict[str, Any]:
    """A cell: its event, the accountant's neighbouring relation for it, and what fedpriv claims.

    Guarantee: `event` under `neighboring_relation` dominates what the cell released of one unit under the cell's
    own relation.  InputError for a cell without a guarantee, and where dp-accounting has no event for one.
    """
    claim = entry.claim
    if claim is None:
        raise InputError(f"cell {entry.cell}: released without noise, so that no event describes it")
    guarantee = claim.guarantee
    if isinstance(guarantee, AllocatedGaussian):
        raise InputError(
            f"cell {entry.cell}: dp-accounting has no event for random allocation; "
            "`fedpriv privacy ledger RUN_DIR --json` has the releases"
        )
    replaced = isinstance(guarantee, PoissonGaussian) and guarantee.relation == "replace-one"
    return {
        "cell": entry.cell,
        "point": dict(entry.point),
        "seed": entry.seed,
        "relation": claim.relation,
        "unit": claim.unit.words,
        "neighboring_relation": "REPLACE_ONE" if replaced else DEFAULT_RELATION,
        "event": event_of(guarantee, entry.streams),
        "mu": guarantee.mu if isinstance(guarantee, GaussianDP) else None,
        "epsilon": guarantee.epsilon_of(entry.delta),
        "delta": entry.delta,
    }


def event_of(guarantee: GaussianDP | PoissonGaussian, streams: Sequence[ReleaseStream] = ()) -> Event:
    """The event of a guarantee; round by round where one of `streams` has rounds that nothing else reaches.

    Guarantee: whatever form it takes, a Gaussian event composes to the guarantee's μ.
    """
    if isinstance(guarantee, PoissonGaussian):
        sampled = {
            "class": "PoissonSampledDpEvent",
            "sampling_probability": guarantee.sampling_rate,
            "event": _gaussian(guarantee.noise_multiplier),
        }
        return _repeated(sampled, guarantee.rounds)
    for stream in streams:
        moved = _moved_by_a_record(stream)
        if moved and math.isclose(math.hypot(*moved), guarantee.mu, rel_tol=_SAME):
            each = [_repeated(_gaussian(1.0 / mu), len(list(alike))) for mu, alike in itertools.groupby(moved)]
            return each[0] if len(each) == 1 else {"class": "ComposedDpEvent", "events": each}
    return _gaussian(1.0 / guarantee.mu)


def dp_event(event: Any) -> Any:
    """The dp-accounting object that such data describe."""
    import dp_accounting  # a second, which nobody else needs to wait for

    if isinstance(event, list):
        return [dp_event(one) for one in event]
    if not isinstance(event, dict):
        return event
    fields = {name: dp_event(value) for name, value in event.items() if name != "class"}
    return getattr(dp_accounting, event["class"])(**fields)


def _gaussian(multiplier: float) -> Event:
    return {"class": "GaussianDpEvent", "noise_multiplier": multiplier}


def _repeated(event: Event, count: int) -> Event:
    return event if count == 1 else {"class": "SelfComposedDpEvent", "event": event, "count": count}


def _moved_by_a_record(stream: ReleaseStream) -> list[float]:
    """μ of every round of the worst record, where no two of its rounds move the same part of C s; else none."""
    blocks = stream.mechanism.blocks(stream.workload)
    apart = stream.schedule.rounds_per_epoch
    if stream.schedule.secret or stream.std == 0.0 or blocks is None or blocks.bands > apart:
        return []
    each = moved_by(stream.relation, stream.per_record, 1.0) * stream.workload.clips * blocks.norms / stream.std
    of_records = [each[first::apart] for first in range(min(apart, len(each)))]
    worst: list[float] = max(of_records, key=lambda rounds: float(np.sum(rounds**2))).tolist()
    return worst
