"""What a run's folder says that it released and claims, whether the two agree, and its dp-accounting events.

An event is plain data here, {"class": NAME, FIELD: VALUE, …} with the names and fields of dp-accounting's classes;
`dp_event` makes the object.  Streams in a public order are Gaussian mechanisms: A s + B z is post-processing of
C s + z, which one record moves by at most the sensitivity, whatever was asked in between.  A Gaussian's noise
multiplier is noise over the distance by which one neighbour moves the sums, with the factor of the relation in it.
So every accountant gives the run's ε under its own default relation; with "REPLACE_ONE" dp-accounting's two
accountants disagree about a factor of 2 (google/differential-privacy, issue 378).
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedpriv.accounting.gaussian import epsilon_of, moved_by
from fedpriv.accounting.guarantees import Event, Guarantee, gaussian_event, repeated_event
from fedpriv.core.errors import InputError
from fedpriv.core.files import whole_lines
from fedpriv.rounds.claim import (
    ELSEWHERE,
    PrivacyClaim,
    claim_of,
    claim_of_data,
    evaluation_data,
    figures_of,
    mu_of_tests,
)
from fedpriv.rounds.ledger import FIRST_STEP, ROUNDS, ReleaseStream, from_data

_LOOSER = 1.01  # than today's, as bounds of earlier versions can be


@dataclass(frozen=True)
class LedgerEntry:
    """One cell of a run: where it stands in the sweep, what it claims, and what it released."""

    cell: int
    point: Mapping[str, Any]
    seed: int
    trust: str
    claimed_mu: float | None
    claimed_epsilon: float | None
    """At `delta`."""
    delta: float
    streams: tuple[ReleaseStream, ...]
    told: Mapping[str, Any] = field(default_factory=dict)
    """The whole record of the cell: what tables and reports show of it."""

    @cached_property
    def claim(self) -> PrivacyClaim[Guarantee] | None:
        """Recomputed from the streams."""
        return claim_of_data(self.told["releases"]) if "releases" in self.told else claim_of(self.streams)

    @cached_property
    def _figures(self) -> dict[str, Any]:
        return figures_of(self.claim, self.delta)

    @property
    def recomputed(self) -> dict[str, Any]:
        """The record of the cell with every figure of privacy computed from what was released.

        Guarantee: tables, pages and figures are made of this: what is written beside the releases shows nowhere.
        """
        found = {**self.told, **self._figures}
        if found.get("rho") is not None:
            found["rho"] = found["mu"]
        if self.tests:
            of_tests = evaluation_data(self.tests, self.trust, found["mu"])
            found["evaluation"] = {**self.told["evaluation"], **(of_tests or {})}
        return found

    @property
    def tests(self) -> tuple[ReleaseStream, ...]:
        """What evaluations released of test records; none where silos did not evaluate."""
        return tuple(map(from_data, (self.told.get("evaluation") or {}).get("releases", ())))

    @property
    def claimed_of_tests(self) -> float | None:
        """μ of all evaluations, as it is claimed."""
        claimed: float | None = (self.told.get("evaluation") or {}).get("mu")
        return claimed

    @property
    def agrees(self) -> bool:
        """Whether what is claimed is what the streams give.

        A record that leaves out what it is compared with does not agree.
        """
        mu, epsilon = self._figures["mu"], self._figures["epsilon"]
        mine = _same(self.claimed_mu, mu) and _bounds(self.claimed_epsilon, epsilon, mu is not None)
        try:
            return mine and self._evaluates_as_told() and self._shows_the_same() and self._are_of_the_run()
        except (
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
        ):  # whoever wrote it, it is no record of these streams
            return False

    def _evaluates_as_told(self) -> bool:
        """Whether evaluations are there where the scenario has them, of all silos and as often as told."""
        tests, told = self.tests, self.told
        if bool(told["scenario"].get("evaluation")) != bool(tests):
            return False
        if not tests:
            return True
        noisy = [stream for stream in tests if stream.std]
        trust = "trusted" if tests[0].owner == "server" else "untrusted"
        if noisy and not _from_all(noisy, trust, told["silos"]):
            return False
        count = min(told["rounds"], told["scenario"]["run"]["evaluations"])
        if any(stream.schedule.rounds != count for stream in tests):
            return False
        private = [stream.relation == told["relation"] for stream in noisy]
        return _same(self.claimed_of_tests, mu_of_tests(tests)) and all(private)

    def _shows_the_same(self) -> bool:
        """Whether the other figures of the record are those of the claim."""
        told, figures = self.told, self._figures
        if any(told[name] != figures[name] for name in ("relation", "unit") if name in figures):
            return False
        known = [name for name in ("zcdp", "epsilon_paper") if figures[name] is not None]
        return all(_same(told[name], figures[name]) for name in known)

    def _are_of_the_run(self) -> bool:
        """Whether the streams are of all rounds and all silos, and of whom the trust setting has add noise."""
        told, noisy = self.told, [stream for stream in self.streams if stream.std]
        first = [stream for stream in self.streams if stream.step == FIRST_STEP]
        rounds = [stream for stream in self.streams if stream.step == ROUNDS]
        if len(first) + len(rounds) < len(self.streams):
            return False
        scale = told["scenario"]["data"].get("scale")
        if bool(scale) != bool(first) or not self._charges_all_of_a_step_elsewhere(scale, first):
            return False
        taken = [stream for stream in first if stream.owner != ELSEWHERE]
        for streams, count in ((taken, 1), (rounds, told["rounds"])):
            if any(stream.schedule.rounds != count for stream in streams):
                return False
            private = [stream for stream in streams if stream.std]
            if private and not _from_all(private, self.trust, told["silos"]):
                return False
        asked = told["scenario"]["privacy"]
        if asked.get("shares") and not _keep_shares([stream for stream in rounds if stream.std], asked):
            return False
        if any((stream.relation, stream.unit.name) != (asked["relation"], asked["unit"]) for stream in noisy):
            return False
        return bool(told["noise"] != "release" or told["engine"] == "deployment")

    def _charges_all_of_a_step_elsewhere(
        self, scale: Mapping[str, Any] | None, first: Sequence[ReleaseStream]
    ) -> bool:
        """Whether a first step that was not released here is charged with its whole share of the claim."""
        elsewhere = [stream for stream in first if stream.owner == ELSEWHERE]
        if not elsewhere:
            return True
        if len(first) > 1 or scale is None or self.claimed_mu is None:
            return False
        return elsewhere[0].mu >= math.sqrt(scale.get("share", 1.0)) * self.claimed_mu * (1.0 - 1e-8)


def _from_all(streams: Sequence[ReleaseStream], trust: str, silos: int) -> bool:
    """Whether streams are what all silos of a run release under this trust setting, each silo once."""
    if trust == "secure-aggregation":
        return [stream.owner for stream in streams] == [f"sum of silos 0-{silos - 1}"]
    if trust != "untrusted":
        return [stream.owner for stream in streams] == ["server"]
    if any(stream.silos.stop > silos for stream in streams):
        return False
    return sorted(silo for stream in streams for silo in stream.silos) == list(range(silos))


def _keep_shares(streams: Sequence[ReleaseStream], asked: Mapping[str, Any]) -> bool:
    """Whether every silo's stream promises its own share of what [privacy] asks, not another silo's."""
    from fedpriv.scenario.sections import PrivacySection

    try:
        privacy = PrivacySection.model_validate(asked)
        targets = [(stream.guarantee, privacy.target_of(silo)) for stream in streams for silo in stream.silos]
    except (ValueError, IndexError):
        return False
    return all(
        known is not None
        and mu is not None
        and known.epsilon_of(privacy.delta)
        <= epsilon_of(mu, privacy.delta) * (_LOOSER if known.mu is None else 1.0 + 1e-8)
        for known, mu in targets
    )


def _same(claimed: float | None, recomputed: float | None) -> bool:
    """Up to rounding: a privacy loss distribution comes of a Fourier transform."""
    if claimed is None or recomputed is None:
        return claimed is recomputed
    return math.isclose(claimed, recomputed, rel_tol=1e-8)


def _bounds(claimed: float | None, recomputed: float | None, exact: bool) -> bool:
    """Whether an ε that was claimed is the one recomputed; where accounting is numerical, not below it.

    Versions of this program bound sampled runs more or less closely; a bound above is a bound.
    """
    if exact or claimed is None or recomputed is None:
        return _same(claimed, recomputed)
    return recomputed * (1.0 - 1e-8) <= claimed <= recomputed * _LOOSER


def entry_of(cell: Mapping[str, Any]) -> LedgerEntry:
    """The entry of a cell of results.json; KeyError, TypeError or ValueError for what is none."""
    return LedgerEntry(
        cell["cell"],
        cell["point"],
        cell["seed"],
        cell["trust"],
        cell["mu"],
        cell["epsilon"],
        cell["delta"],
        tuple(map(from_data, cell["releases"])),
        cell,
    )


def differing_words(cells: Sequence[int]) -> str:
    """Say of which cells results.json claims something else than their releases give."""
    return f"the claim of cell {', '.join(map(str, cells))} is not what the ledger gives"


def read_ledger(folder: Path) -> list[LedgerEntry]:
    """The entries of RUN_DIR/results.json, and of cells.jsonl beside it; InputError if one cannot be read."""
    path, newer = folder / "results.json", folder / "cells.jsonl"
    try:
        cells: dict[int, Mapping[str, Any]] = {}
        for cell in (*json.loads(path.read_text(encoding="utf-8"))["cells"], *map(json.loads, whole_lines(newer))):
            cells[cell["cell"]] = cell
        return [entry_of(cell) for _, cell in sorted(cells.items())]
    except FileNotFoundError:
        raise InputError(f"{folder}: no results.json there; give a folder that `fedpriv run` wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: not a ledger of fedpriv ({type(error).__name__}: {error})") from None


_SAME = 1e-9  # relative: two ways to add up the same squares


def events_of(entry: LedgerEntry) -> dict[str, Any]:
    """A cell: its event, the accountant's neighbouring relation for it, and what fedpriv claims.

    Guarantee: `event` under `neighboring_relation` dominates what the cell released of one unit under the cell's
    own relation.  InputError for a cell without a guarantee, and where dp-accounting has no event for one.
    """
    claim = entry.claim
    if claim is None:
        raise InputError(f"cell {entry.cell}: released without noise, so that no event describes it")
    if (dominating := claim.guarantee.event()) is None:
        raise InputError(
            f"cell {entry.cell}: dp-accounting has no event for {entry.streams[0].schedule.title}; "
            "`fedpriv privacy ledger RUN_DIR --json` has the releases"
        )
    return {
        "cell": entry.cell,
        "point": dict(entry.point),
        "seed": entry.seed,
        "relation": claim.relation,
        "unit": claim.unit.words,
        "neighboring_relation": dominating[0],
        "event": _by_rounds(claim.guarantee, entry.streams) or dominating[1],
        "mu": claim.guarantee.mu,
        "epsilon": claim.guarantee.epsilon_of(entry.delta),
        "delta": entry.delta,
    }


def _by_rounds(guarantee: Guarantee, streams: Sequence[ReleaseStream]) -> Event | None:
    """The event of a guarantee round by round, where one of `streams` has rounds that nothing else reaches.

    Guarantee: whatever form it takes, a Gaussian event composes to the guarantee's μ.
    """
    if guarantee.mu is None:
        return None
    for stream in streams:
        moved = _moved_by_a_record(stream)
        if moved and math.isclose(math.hypot(*moved), guarantee.mu, rel_tol=_SAME):
            alike = [(1.0 / mu, len(list(run))) for mu, run in itertools.groupby(moved)]
            each = [repeated_event(gaussian_event(multiplier), rounds) for multiplier, rounds in alike]
            return each[0] if len(each) == 1 else {"class": "ComposedDpEvent", "events": each}
    return None


def dp_event(event: Any) -> Any:
    """The dp-accounting object that such data describe."""
    import dp_accounting  # a second, which nobody else needs to wait for

    if isinstance(event, list):
        return [dp_event(one) for one in event]
    if not isinstance(event, dict):
        return event
    fields = {name: dp_event(value) for name, value in event.items() if name != "class"}
    return getattr(dp_accounting, event["class"])(**fields)


def _moved_by_a_record(stream: ReleaseStream) -> list[float]:
    """μ of every round of the worst record, where no two of its rounds move the same part of C s; else none."""
    blocks = stream.mechanism.blocks(stream.workload)
    apart = stream.schedule.rounds_per_epoch
    if stream.schedule.secret or stream.std == 0.0 or blocks is None or blocks.bands > apart:
        return []
    moved = moved_by(stream.relation, stream.per_record, 1.0, stream.apart)
    each = moved * stream.workload.clips * blocks.norms / stream.std
    of_records = [each[first::apart] for first in range(min(apart, len(each)))]
    worst: list[float] = max(of_records, key=lambda rounds: float(np.sum(rounds**2))).tolist()
    return worst
