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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpriv.accounting.gaussian import APART, epsilon_of, moved_by
from fedpriv.accounting.guarantees import Event, Guarantee, gaussian_event, repeated_event
from fedpriv.core.errors import InputError, printable
from fedpriv.core.files import whole_lines
from fedpriv.participation.registry import CHOSEN
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

if TYPE_CHECKING:  # torch is behind them, which who only reads a ledger need not wait for
    from fedpriv.scenario.schema import Cell
    from fedpriv.scenario.sections import FederationSection, PrivacySection

_COPIES_MOVED = "0.3.0"
"""Version in which a record that was drawn moved the copies of the others."""
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
        """Whether what is claimed is what the streams give, and both are of the record's scenario."""
        return self.disagreement is None

    @cached_property
    def disagreement(self) -> str | None:
        """The first figure of the record that streams and scenario do not give; None if they give all.

        A record that leaves out what it is compared with does not agree.

        Guarantee: trust, silos, rounds, relation, unit and δ are those of the scenario, whatever is written beside
        it, and so is how much the noise promises.
        """
        try:
            return next(itertools.chain(self._beside_the_scenario(), self._beside_the_streams()), None)
        except (KeyError, TypeError, AttributeError, ValueError, InputError) as error:  # whoever wrote it
            return f"is none of a run ({type(error).__name__}: {printable(str(error), 100)})"

    @cached_property
    def resolved(self) -> "Cell | None":
        """The scenario; None for one that names a row, or a module, of somebody's own that is not here."""
        from fedpriv.scenario.load import resolve_cell

        try:
            return resolve_cell(self.told["scenario"], "record.scenario")
        except InputError:
            return None

    @cached_property
    def _asked(self) -> "tuple[FederationSection, PrivacySection]":
        from fedpriv.scenario.sections import FederationSection, PrivacySection

        scenario = self.told["scenario"]
        federation, privacy = scenario["federation"], scenario["privacy"]
        return FederationSection.model_validate(federation), PrivacySection.model_validate(privacy)

    def _beside_the_scenario(self) -> Iterator[str]:
        """What the scenario says otherwise, of the record first and then of the streams."""
        federation, privacy = self._asked
        right: dict[str, Any] = {
            "trust": self.told["scenario"]["algorithm"]["trust"],
            "silos": federation.silos,
            "delta": privacy.delta,
            "relation": privacy.relation,
            "unit": privacy.protected.words,
        }
        if self.resolved is not None:
            right["rounds"] = self.resolved.schedule.rounds
        for name, value in right.items():
            if (said := self.told[name]) != value:
                yield f"{name} is {said!r:.60}, and the scenario gives {value!r:.60}"
        if self.resolved is not None:
            yield from self._beside_the_cell(self.resolved)
        yield from self._beside_the_target(privacy)

    def _beside_the_cell(self, cell: "Cell") -> Iterator[str]:
        """Participation, weights, clips and distance of the rounds, as far as they need no shape of a record."""
        from fedpriv.rounds.plan import weights_of
        from fedpriv.rounds.recomputed import clips_of, distance_of

        unit, sizes = cell.privacy.protected, cell.batch_sizes
        order, in_mean = cell.schedule.as_data(), unit.in_mean(weights_of(cell), sizes)
        for stream in (stream for stream in self.streams if stream.step == ROUNDS and stream.std):
            if stream.schedule.as_data() != order:
                yield f"participation of {stream.owner} is not that of the scenario"
            weights = [unit.in_silo(sizes[silo]) for silo in stream.silos] or [in_mean]
            if any(not _same(stream.per_record, weight) for weight in weights):
                yield f"per_record of {stream.owner} is {stream.per_record:.6g}, by the scenario {weights[0]:.6g}"
            if (clips := clips_of(cell)) is not None and not _alike(stream.clips, clips):
                yield f"clips of {stream.owner} are not those of the scenario"
            if stream.apart < APART and stream.apart != (apart := distance_of(cell)):
                yield f"apart of {stream.owner} is {stream.apart:.6g}, and the scenario gives {apart:.6g}"

    def _beside_the_target(self, privacy: "PrivacySection") -> Iterator[str]:
        """Whether the noise promises what the scenario asks for: no less protection, and no other run's."""
        target, claim = privacy.target, self.claim
        if target is None or claim is None:
            if (target is None) != (claim is None):
                yield f"std is that of a run {'without' if claim is None else 'with'} noise, unlike the scenario's"
            return
        mu = claim.guarantee.mu
        said = claim.guarantee.epsilon_of(privacy.delta) if mu is None else mu
        right = epsilon_of(target, privacy.delta) if mu is None else target
        if not right / _LOOSER <= said <= right * (_LOOSER if mu is None else 1.0 + 1e-8):
            name = "epsilon" if mu is None else "mu"
            yield f"std gives {name} = {said:.6g}, and the scenario asks for {right:.6g}"

    def _beside_the_streams(self) -> Iterator[str]:
        mu, epsilon = self._figures["mu"], self._figures["epsilon"]
        if not _same(self.claimed_mu, mu):
            yield f"mu is {self.claimed_mu!r:.60}, and the releases give {mu!r:.60}"
        if not _bounds(self.claimed_epsilon, epsilon, mu is not None):
            yield f"epsilon is {self.claimed_epsilon!r:.60}, and the releases give {epsilon!r:.60}"
        yield from self._beside_the_evaluations()
        if not self._shows_the_same():
            yield "relation, unit, zcdp or epsilon_paper is not what the releases give"
        if not self._are_of_the_run():
            yield "releases are not those of all rounds, silos and steps of its scenario"
        if self.told["noise"] == "release" and self.told["engine"] != "deployment":
            yield "noise for release is drawn by a deployment only"

    def _beside_the_evaluations(self) -> Iterator[str]:
        """Whether evaluations are where the scenario has them, of all silos, as often, and with its noise."""
        tests, asked = self.tests, self.told["scenario"].get("evaluation")
        if bool(asked) != bool(tests):
            yield "evaluation is there, or not, where the scenario has it otherwise"
        if not asked or not tests:
            return
        noisy = [stream for stream in tests if stream.std]
        trust = "trusted" if tests[0].owner == "server" else "untrusted"
        if noisy and not _from_all(noisy, trust, self._asked[0].silos):
            yield "evaluation.releases are not those of all silos of the scenario"
        count = min(self.told["rounds"], self.told["scenario"]["run"]["evaluations"])
        if any(stream.schedule.rounds != count for stream in tests):
            yield f"evaluation.releases are not those of {count} evaluations"
        if any(stream.relation != self.told["relation"] for stream in noisy):
            yield "evaluation.releases have another relation than the scenario"
        if any(stream.apart < APART for stream in tests) and not (asked.get("curves") and count == 1):
            yield "evaluation.releases have an apart below 2, and the scenario has no single evaluation of curves"
        mu, target = mu_of_tests(tests), asked.get("mu")
        if not _same(self.claimed_of_tests, mu):
            yield f"evaluation.mu is {self.claimed_of_tests!r:.60}, and its releases give {mu!r:.60}"
        if (mu is None) != (target is None) or not (
            mu is None or target is None or target / _LOOSER <= mu <= target * (1.0 + 1e-8)
        ):
            yield f"evaluation.releases give mu = {mu!r:.20}, and the scenario asks for {target!r:.20}"

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
        return all((each.relation, each.unit.name) == (asked["relation"], asked["unit"]) for each in noisy)

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


def _alike(clips: Sequence[float], others: Sequence[float]) -> bool:
    return len(clips) == len(others) and all(map(_same, clips, others))


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
        tree = json.loads(path.read_text(encoding="utf-8"))
        for cell in (*tree["cells"], *map(json.loads, whole_lines(newer))):
            cells[cell["cell"]] = cell
        check_copies(folder, tree.get("versions", {}), cells.values())
        return [entry_of(cell) for _, cell in sorted(cells.items())]
    except FileNotFoundError:
        raise InputError(f"{folder}: no results.json there; give a folder that `fedpriv run` wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: not a ledger of fedpriv ({type(error).__name__}: {error})") from None


def check_copies(where: Path | str, versions: Mapping[str, Any], cells: Iterable[Mapping[str, Any]]) -> None:
    """Refuse cells of fedpriv 0.3.0 with copies of records in a secret order, which released more than they say.

    An editable installation keeps the number that it was made with, so that of this program is no evidence.
    """
    if versions.get("fedpriv") != _COPIES_MOVED or metadata.version("fedpriv") == _COPIES_MOVED:
        return
    for cell in cells:
        model, federation = cell["scenario"]["model"], cell["scenario"]["federation"]
        kind = CHOSEN.get(federation.get("sampling", ""))
        if model.get("augment") and kind is not None and kind.secret:
            raise InputError(
                f"{where}: cell {cell['cell']} is of fedpriv {_COPIES_MOVED}, whose copies of records "
                f'(model.augment) with federation.sampling = "{kind.name}" released more than it promised; run '
                "the scenario again, into another folder"
            )


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
