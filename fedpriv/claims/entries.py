"""Ledger entries of a run: its releases and claims, a comparison of the two, and dp-accounting events.

An event is plain data here, {"class": NAME, FIELD: VALUE, …} with the names and fields of dp-accounting's classes.

* A cell is one run of a scenario.  Its record is its entry in results.json, or its line of cells.jsonl: the
  scenario, the figures of privacy that were written, and the releases.  A silo's records are called data records.
* A stream is the releases of one party over the rounds of a step, with the noise, the clips and the weight of one
  data record.  Silos with equal weights and noise may share one.  A step is the rounds, or a first step: a release
  before them by whose result columns are scaled.
* An increment is the contribution of one unit, a data record or a person, to a round.  Its clip is the bound on
  its norm.
* `apart`, the increment diameter, is the largest distance of two increments, in clips: 2, or less for some losses.
* The participation says which data records take part in which rounds: in a public order, or in secret.

In real arithmetic, a stream in a public order is a Gaussian mechanism.  With A s the running sums of the
increments s, and A = B C (`noise.mechanism`), A s + B z is post-processing of C s + z.  The noise multiplier of a
Gaussian event is the standard deviation of z over the largest distance by which one unit moves C s.
"""

import itertools
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
from fedpriv.claims.claim import (
    EXTERNAL_PARTY,
    PrivacyClaim,
    claim_figures,
    compute_claim,
    compute_claim_from_data,
    evaluation_mu,
    evaluation_to_data,
)
from fedpriv.claims.ledger import FIRST_STEP, ROUNDS, ReleaseStream, stream_from_data
from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.core.extensions import ADD_ON_PARTS
from fedpriv.core.files import load_json, read_complete_lines
from fedpriv.participation.registry import SELECTABLE_PARTICIPATIONS

if TYPE_CHECKING:  # these import torch, for which a reader of a ledger need not wait
    from fedpriv.scenario.schema import Cell
    from fedpriv.scenario.sections import FederationSection, PrivacySection

_LEAKY_COPIES_VERSION = "0.3.0"
"""Version of fedpriv in which a record that took part moved the copies of other records."""
_MAX_RATIO = 1.01
"""Largest ratio of two numerical figures for one run, which versions bound more or less closely."""


@dataclass(frozen=True)
class LedgerEntry:
    """One cell of a run: its point of the sweep, its claim, and its releases."""

    cell: int
    point: Mapping[str, Any]
    seed: int
    trust: str
    claimed_mu: float | None
    """μ that the record claims, or None without noise or without a μ."""
    claimed_epsilon: float | None
    """ε that the record claims at `delta`, or None without noise."""
    delta: float
    streams: tuple[ReleaseStream, ...]
    record: Mapping[str, Any] = field(default_factory=dict)
    """Whole record of the cell, as results.json has it, or empty if it is not known."""

    @cached_property
    def claim(self) -> PrivacyClaim[Guarantee] | None:
        """Claim recomputed from the releases, or None without noise.

        The releases are those of `record`, or `streams` if it has none.

        Raises:
            InputError: The releases cannot be accounted for.
        """
        return (
            compute_claim_from_data(self.record["releases"])
            if "releases" in self.record
            else compute_claim(self.streams)
        )

    @cached_property
    def _figures(self) -> dict[str, Any]:
        return claim_figures(self.claim, self.delta)

    @property
    def recomputed_record(self) -> dict[str, Any]:
        """Record of the cell, with its figures of privacy computed anew from the releases.

        Guarantee: the figures of `claim_figures`, a `rho` that is not None, and the figures of evaluations are
        computed from the releases.

        Raises:
            InputError: Releases cannot be accounted for.
        """
        record = {**self.record, **self._figures}
        # "rho" has μ once more, for an algorithm whose paper calls it ρ.
        if record.get("rho") is not None:
            record["rho"] = record["mu"]
        if "evaluation" in record:
            figures = evaluation_to_data(self.test_streams, self.trust, record["mu"])
            record["evaluation"] = None if figures is None else {**record["evaluation"], **figures}
        return record

    @property
    def test_streams(self) -> tuple[ReleaseStream, ...]:
        """Streams that evaluations released about test records, empty if silos did not evaluate."""
        return tuple(map(stream_from_data, (self.record.get("evaluation") or {}).get("releases", ())))

    @property
    def claimed_test_mu(self) -> float | None:
        """μ that the record claims for all evaluations together, or None without noise or evaluations."""
        claimed: float | None = (self.record.get("evaluation") or {}).get("mu")
        return claimed

    @property
    def agrees(self) -> bool:
        """Whether the claim follows from the streams, and both belong to the record's scenario."""
        return self.disagreement is None

    @cached_property
    def disagreement(self) -> str | None:
        """First figure that streams or scenario contradict, as text, or None without a contradiction.

        A record that lacks a field that is compared, or has one of another form, is described, too.

        Guarantee: in a record without a disagreement, trust, silos, relation, unit and δ are those of the
        scenario.  The claim of the releases keeps the scenario's target, up to 1 % of a numerical ε.  Where this
        program can resolve the scenario (`resolved_cell`), the number of rounds is the scenario's, too, and so are
        participation and weights of rounds with noise, and clips, decay, period and the mechanism's name as far as
        `recompute_sums` gives them.  The same holds for a first step that the run took, and for evaluations, which
        have their own target.
        """
        try:
            return next(
                map(
                    sanitize_line,
                    itertools.chain(self._differences_from_scenario(), self._differences_from_streams()),
                ),
                None,
            )
        # The file can come from anybody, so that any field may be missing or of another type.
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, InputError) as error:
            return f"is no record of a run ({type(error).__name__}: {sanitize_line(str(error), 100)})"

    @cached_property
    def resolved_cell(self) -> "Cell | None":
        """Resolved scenario, or None if it cannot be resolved and names code that is not imported here.

        Such code is a user's algorithm, model, mechanism or sampling, or a model that is named by its import path.

        Raises:
            InputError: The scenario cannot be resolved, and its names are known.
            KeyError, TypeError or AttributeError: The record has no scenario of the usual form.
        """
        from fedpriv.loss.models import MODELS
        from fedpriv.noise.registry import MECHANISMS, USER_MECHANISMS
        from fedpriv.papers.table import ALGORITHMS
        from fedpriv.participation.registry import PARTICIPATIONS, USER_PARTICIPATIONS
        from fedpriv.scenario.load import resolve_cell

        sections = self.record["scenario"]
        try:
            return resolve_cell(sections, "record.scenario")
        except InputError:
            algorithm, model = sections["algorithm"], sections["model"]["name"]
            is_known = (
                algorithm["name"] in ALGORITHMS
                and algorithm.get("mechanism", "auto") in (*MECHANISMS, *USER_MECHANISMS, "auto")
                and (model in MODELS or model in ADD_ON_PARTS["model"])
                and sections["federation"].get("sampling", "fixed") in (*PARTICIPATIONS, *USER_PARTICIPATIONS)
            )
            if is_known:
                raise
            return None

    @cached_property
    def _sections(self) -> "tuple[FederationSection, PrivacySection]":
        from fedpriv.scenario.sections import FederationSection, PrivacySection

        sections = self.record["scenario"]
        return (
            FederationSection.model_validate(sections["federation"]),
            PrivacySection.model_validate(sections["privacy"]),
        )

    def _differences_from_scenario(self) -> Iterator[str]:
        """Describe differences of the record and its streams from the record's scenario.

        If the scenario names code that is not imported here, rounds, participation, weights and running sums are
        not compared, and an increment diameter below two clips counts as a difference.

        Raises:
            InputError, LookupError, TypeError, AttributeError or ValueError: The record is none of a run.
        """
        from fedpriv.claims.recomputed import first_step_before

        federation, privacy = self._sections
        scenario_values: dict[str, Any] = {
            "trust": self.record["scenario"]["algorithm"]["trust"],
            "silos": federation.silos,
            "delta": privacy.delta,
            "relation": privacy.relation,
            "unit": privacy.protected_unit.description,
            **({} if self.resolved_cell is None else {"rounds": self.resolved_cell.schedule.rounds}),
        }
        for name, value in scenario_values.items():
            if (record_value := self.record[name]) != value:
                yield f"{name} is {record_value!r:.60}, and the scenario gives {value!r:.60}"
        if self.resolved_cell is not None:
            yield from self._differences_from_cell(
                self.resolved_cell, [stream for stream in self.streams if stream.step == ROUNDS]
            )
            if first_steps := [
                stream
                for stream in self.streams
                if stream.step == FIRST_STEP and stream.party_name != EXTERNAL_PARTY
            ]:
                yield from self._differences_from_cell(first_step_before(self.resolved_cell), first_steps)
        elif closer := [stream for stream in self.streams if stream.increment_diameter < APART]:
            yield (
                f"apart of {closer[0].party_name} is {closer[0].increment_diameter:.6g}, and the scenario names "
                "code that was not imported"
            )
        yield from self._differences_from_target(privacy)

    def _differences_from_cell(
        self, cell: "Cell", streams: Sequence[ReleaseStream], evaluated_cell: "Cell | None" = None
    ) -> Iterator[str]:
        """Describe differences in participation, running sums, weights and increment diameter.

        Only noisy streams are compared.  The weight is that of a data record in its silo for a silo's own stream,
        and otherwise the largest weight in the mean over silos.  Clips, decay, period and the mechanism's name are
        compared as far as `recompute_sums` gives them, and an increment diameter if it is below two clips.

        Args:
            cell: Resolved scenario of the record, or of its first step or evaluations as a run.
            streams: Release streams of the cell.
            evaluated_cell: Resolved scenario whose evaluations `cell` is, or None.

        Raises:
            InputError: A smaller increment diameter cannot be recomputed.
            IndexError: A stream is of a silo that the scenario does not have.
        """
        from fedpriv.claims.recomputed import (
            recompute_diameter,
            recompute_evaluation_diameter,
            recompute_sums,
        )
        from fedpriv.plan.plan import silo_weights

        unit, sizes = cell.privacy.protected_unit, cell.batch_sizes
        participation, in_mean = cell.schedule.to_data(), unit.weight_in_mean(silo_weights(cell), sizes)
        clips, sums = recompute_sums(cell)
        for stream in (stream for stream in streams if stream.std):
            has_other_clips = clips is not None and not (
                len(stream.clips) == len(clips) and all(map(_is_close, stream.clips, clips))
            )
            # Integers have a decay that is a multiple of 2^-31.
            has_other_sums = sums is not None and not (
                abs(stream.decay - sums[0]) < 1e-6 and (stream.period, stream.mechanism.name) == sums[1:]
            )
            yield from (
                f"{difference} of the scenario"
                for difference, is_other in (
                    (
                        f"participation of {stream.party_name} is not that",
                        stream.schedule.to_data() != participation,
                    ),
                    (f"clips of {stream.party_name} are not those", has_other_clips),
                    (f"decay, period or mechanism of {stream.party_name} is not that", has_other_sums),
                )
                if is_other
            )
            weights = [unit.weight_in_silo(sizes[silo]) for silo in stream.silos] or [in_mean]
            if other_weights := [weight for weight in weights if not _is_close(stream.record_weight, weight)]:
                yield (
                    f"per_record of {stream.party_name} is {stream.record_weight:.6g}, and the scenario gives "
                    f"{other_weights[0]:.6g}"
                )
            if stream.increment_diameter < APART and not _is_close(
                stream.increment_diameter,
                diameter := (
                    recompute_diameter(cell)
                    if evaluated_cell is None
                    else recompute_evaluation_diameter(evaluated_cell)
                ),
            ):
                yield (
                    f"apart of {stream.party_name} is {stream.increment_diameter:.6g}, and the scenario gives "
                    f"{diameter:.6g}"
                )

    def _differences_from_target(self, privacy: "PrivacySection") -> Iterator[str]:
        """Describe noise that is not that of the scenario's target of privacy.

        The claim's μ, or its ε if it has no μ, may be up to about 1 % below the target.  Above the target,
        rounding is allowed for a μ, and 1 % for an ε, which is computed numerically.

        Args:
            privacy: Section [privacy] of the scenario.
        """
        target, claim = privacy.target_mu, self.claim
        if target is None or claim is None:
            if (target is None) != (claim is None):
                yield f"std is that of a run {'without' if claim is None else 'with'} noise, unlike the scenario's"
            return
        mu = claim.guarantee.mu
        claim_figure = claim.guarantee.epsilon_of(privacy.delta) if mu is None else mu
        target_figure = epsilon_of(target, privacy.delta) if mu is None else target
        if (
            not target_figure / _MAX_RATIO
            <= claim_figure
            <= target_figure * (_MAX_RATIO if mu is None else 1.0 + 1e-8)
        ):
            yield (
                f"std gives {'epsilon' if mu is None else 'mu'} = {claim_figure:.6g}, and the scenario asks for "
                f"{target_figure:.6g}"
            )

    def _differences_from_streams(self) -> Iterator[str]:
        """Describe differences of the record's figures, releases and engine from the streams and the scenario."""
        mu, epsilon = self._figures["mu"], self._figures["epsilon"]
        if not _is_close(self.claimed_mu, mu):
            yield f"mu is {self.claimed_mu!r:.60}, and the releases give {mu!r:.60}"
        if not _bounds_epsilon(self.claimed_epsilon, epsilon, mu is not None):
            yield f"epsilon is {self.claimed_epsilon!r:.60}, and the releases give {epsilon!r:.60}"
        yield from self._differences_of_evaluations()
        if not self._figures_match_claim():
            yield "relation, unit, zcdp or epsilon_paper is not what the releases give"
        if not self._streams_match_scenario():
            yield "releases are not those of all rounds, silos and steps of its scenario"
        if self.record["noise"] == "release" and self.record["engine"] != "deployment":
            yield "noise for release is drawn by a deployment only"

    def _differences_of_evaluations(self) -> Iterator[str]:
        """Describe how evaluations by silos differ from those that the scenario asks for.

        Their presence, number and μ are compared, and, if they have noise, silos and relation.  If the scenario is
        resolved, participation, weights, running sums and increment diameters of noisy ones are compared, too.
        """
        from fedpriv.plan.evaluation import evaluation_cell

        tests, section = self.test_streams, self.record["scenario"].get("evaluation")
        if not bool(section) == bool(tests) == bool(self.record.get("evaluation")):
            yield (
                f"evaluation by silos is in the {'scenario' if section else 'record'}, and not in the "
                f"{'record' if section else 'scenario'}"
            )
        if not section or not tests:
            return
        noisy = [stream for stream in tests if stream.std]
        count = min(self.record["rounds"], self.record["scenario"]["run"]["evaluations"])
        is_different = {
            "are not those of all silos of the scenario": bool(noisy)
            and not _cover_all_silos(
                noisy, "trusted" if tests[0].party_name == "server" else "untrusted", self._sections[0].silos
            ),
            f"are not those of {count} evaluations": any(stream.schedule.rounds != count for stream in tests),
            "have another relation than the scenario": any(
                stream.relation != self.record["relation"] for stream in noisy
            ),
            "have an apart below 2, and the scenario has no evaluation of curves": not section.get("curves")
            and any(stream.increment_diameter < APART for stream in tests),
        }
        yield from (
            f"evaluation.releases {difference}" for difference, is_found in is_different.items() if is_found
        )
        if self.resolved_cell is not None:
            cell = self.resolved_cell
            for difference in self._differences_from_cell(evaluation_cell(cell), tests, cell):
                yield f"evaluation.releases: {difference}"
        mu, target = evaluation_mu(tests), section.get("mu")
        if not _is_close(self.claimed_test_mu, mu):
            yield f"evaluation.mu is {self.claimed_test_mu!r:.60}, and its releases give {mu!r:.60}"
        if (mu is None) != (target is None) or not (
            mu is None or target is None or target / _MAX_RATIO <= mu <= target * (1.0 + 1e-8)
        ):
            yield f"evaluation.releases give mu = {mu!r:.20}, and the scenario asks for {target!r:.20}"

    def _figures_match_claim(self) -> bool:
        """Whether relation, unit, zCDP and the paper's ε, where the claim has them, are those of the record."""
        record, figures = self.record, self._figures
        return all(record[name] == figures[name] for name in ("relation", "unit") if name in figures) and all(
            _is_close(record[name], figures[name])
            for name in ("zcdp", "epsilon_paper")
            if figures[name] is not None
        )

    def _streams_match_scenario(self) -> bool:
        """Whether the release streams are of the rounds, silos and steps that the record's scenario has.

        The streams of rounds have as many rounds as the record says.  The streams with noise are of all silos, and
        have the relation and the unit of [privacy].  They keep the targets that [privacy] sets for single silos.
        A run with noise and [data.scale] has a first step: its own one, or that of another run, which stands in
        the record as a stream of the party "elsewhere" (`EXTERNAL_PARTY`) with its μ.
        """
        record, noisy = self.record, [stream for stream in self.streams if stream.std]
        first_steps, rounds = (
            [stream for stream in self.streams if stream.step == step] for step in (FIRST_STEP, ROUNDS)
        )
        scale, privacy = record["scenario"]["data"].get("scale"), record["scenario"]["privacy"]
        # In the order of the conditions: integers of a simulation in floating point, a step that is neither, a
        # first step without [data.scale] or the other way round in a run with noise, and a first step elsewhere
        # that has less of the μ than `data.scale.share` gives it.
        is_float = record["engine"] != "deployment" and record["scenario"]["run"].get("arithmetic") != "integers"
        if (
            (is_float and any(stream.integer_release for stream in (*self.streams, *self.test_streams)))
            or len(first_steps) + len(rounds) < len(self.streams)
            or (bool(scale) != bool(first_steps) and (noisy or first_steps))
            or not self._charges_whole_share(scale, first_steps)
        ):
            return False
        for streams, count in (
            ([stream for stream in first_steps if stream.party_name != EXTERNAL_PARTY], 1),
            (rounds, record["rounds"]),
        ):
            private = [stream for stream in streams if stream.std]
            if any(stream.schedule.rounds != count for stream in streams) or (
                private and not _cover_all_silos(private, self.trust, record["silos"])
            ):
                return False
        return (
            not privacy.get("shares") or _promise_shares([stream for stream in rounds if stream.std], privacy)
        ) and all(
            (noisy_stream.relation, noisy_stream.unit) == (privacy["relation"], self._sections[1].protected_unit)
            for noisy_stream in noisy
        )

    def _charges_whole_share(self, scale: Mapping[str, Any] | None, first_steps: Sequence[ReleaseStream]) -> bool:
        """Whether a first step elsewhere, if there is one, has its whole share of the claimed μ, or more.

        The share is the claimed μ times the root of `data.scale.share`.
        """
        if all(stream.party_name != EXTERNAL_PARTY for stream in first_steps):
            return True
        return (
            len(first_steps) == 1
            and scale is not None
            and self.claimed_mu is not None
            and first_steps[0].mu >= math.sqrt(scale.get("share", 1.0)) * self.claimed_mu * (1.0 - 1e-8)
        )


def _cover_all_silos(streams: Sequence[ReleaseStream], trust: str, silos: int) -> bool:
    """Whether streams are the releases of all silos under this trust setting, each silo once."""
    if trust != "untrusted":
        return [stream.party_name for stream in streams] == [
            f"sum of silos 0-{silos - 1}" if trust == "secure-aggregation" else "server"
        ]
    return all(stream.silos and stream.silos.stop <= silos for stream in streams) and sorted(
        silo for stream in streams for silo in stream.silos
    ) == list(range(silos))


def _promise_shares(streams: Sequence[ReleaseStream], section: Mapping[str, Any]) -> bool:
    """Whether every silo's stream keeps the target that [privacy] sets for this silo.

    A stream keeps its target if its ε at the scenario's δ is at most that of the target, up to rounding for a μ,
    and up to 1 % for a curve of (ε, δ).  A malformed [privacy], or one without a share for a silo, gives False.

    Args:
        streams: Streams of the rounds, with noise.
        section: Section [privacy] of the scenario, as plain data.

    Raises:
        InputError: A stream cannot be accounted for, or a target cannot be converted to μ.
    """
    from fedpriv.scenario.sections import PrivacySection

    try:
        privacy = PrivacySection.model_validate(section)
        targets = [(stream.guarantee, privacy.silo_target_mu(silo)) for stream in streams for silo in stream.silos]
    except (ValueError, IndexError):
        return False
    return all(
        guarantee is not None
        and mu is not None
        and guarantee.epsilon_of(privacy.delta)
        <= epsilon_of(mu, privacy.delta) * (_MAX_RATIO if guarantee.mu is None else 1.0 + 1e-8)
        for guarantee, mu in targets
    )


def _is_close(claimed: float | None, recomputed: float | None) -> bool:
    """Whether two figures agree up to rounding, such as that of a Fourier transform over privacy losses."""
    return (
        claimed is recomputed
        if claimed is None or recomputed is None
        else math.isclose(claimed, recomputed, rel_tol=1e-8)
    )


def _bounds_epsilon(claimed: float | None, recomputed: float | None, exact: bool) -> bool:
    """Whether a claimed ε is the recomputed one, or, unless `exact`, a bound up to 1 % above it."""
    return (
        _is_close(claimed, recomputed)
        if exact or claimed is None or recomputed is None
        else recomputed * (1.0 - 1e-8) <= claimed <= recomputed * _MAX_RATIO
    )


def make_entry(cell: Mapping[str, Any]) -> LedgerEntry:
    """Make the entry of a cell of results.json.

    Raises:
        KeyError, TypeError or ValueError: If the data are no cell of results.json.
        InputError: If a release has a value that no run has.
    """
    return LedgerEntry(
        cell["cell"],
        cell["point"],
        cell["seed"],
        cell["trust"],
        cell["mu"],
        cell["epsilon"],
        cell["delta"],
        tuple(map(stream_from_data, cell["releases"])),
        cell,
    )


def format_differing_cells(cells: Sequence[int]) -> str:
    """Format the numbers of cells whose claims in results.json differ from their releases."""
    return f"the claim of cell {', '.join(map(str, cells))} is not what the ledger gives"


def read_ledger(folder: Path) -> list[LedgerEntry]:
    """Read the ledger entries of a run from results.json and cells.jsonl in its folder.

    A cell of cells.jsonl takes the place of the same cell in results.json.

    Raises:
        InputError: If results.json is missing, if a file is no ledger, if a release is none that a run can have,
            or if a cell is refused by `check_copies`.
        OSError: If a file cannot be read for another reason.
    """
    path, newer_path = folder / "results.json", folder / "cells.jsonl"
    try:
        tree = load_json(path.read_text(encoding="utf-8"))
        cells = {cell["cell"]: cell for cell in (*tree["cells"], *map(load_json, read_complete_lines(newer_path)))}
        check_copies(folder, tree.get("versions", {}), cells.values())
        return [make_entry(cell) for _, cell in sorted(cells.items())]
    except FileNotFoundError:
        raise InputError(f"{folder}: no results.json there; give a folder that `fedpriv run` wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{folder}: not a ledger of fedpriv ({type(error).__name__}: {sanitize_line(str(error))})"
        ) from None


def check_copies(source: Path | str, versions: Mapping[str, Any], cells: Iterable[Mapping[str, Any]]) -> None:
    """Refuse cells of fedpriv 0.3.0 with copies of records and secret participation.

    With `model.augment` a record's increment is computed on changed copies of its picture.  In version 0.3.0 cells
    with both released more than their claim says.

    Args:
        source: Folder or name of the run, for errors.
        versions: Versions of the programs that computed the cells, as in results.json.
        cells: Cells of results.json.

    Raises:
        InputError: If such a cell is found.
        KeyError, TypeError or AttributeError: If a cell of version 0.3.0 has another form.
    """
    # An editable installation of a later program may still have the number 0.3.0, and then refuses nothing.
    if versions.get("fedpriv") != _LEAKY_COPIES_VERSION or metadata.version("fedpriv") == _LEAKY_COPIES_VERSION:
        return
    for cell in cells:
        kind = SELECTABLE_PARTICIPATIONS.get(cell["scenario"]["federation"].get("sampling", ""))
        if cell["scenario"]["model"].get("augment") and kind is not None and kind.secret:
            raise InputError(
                f"{source}: cell {cell['cell']} is of fedpriv {_LEAKY_COPIES_VERSION}, whose copies of records "
                f'(model.augment) with federation.sampling = "{kind.name}" released more than it promised; run '
                "the scenario again, into another folder"
            )


_TOLERANCE = 1e-9
"""Relative tolerance for two ways to add up the same squares."""


def make_event_data(entry: LedgerEntry) -> dict[str, Any]:
    """Return a cell's event, the accountant's neighbouring relation for this event, and fedpriv's claim.

    An event describes releases to an accountant of dp-accounting, round by round if that is possible, and
    otherwise the whole run at once.

    Guarantee: `event` under `neighboring_relation` dominates the cell's releases about one unit of training
    records under the cell's own relation, up to the slack of exact releases and a relative 1e-9 in μ.

    Raises:
        InputError: The cell has no noise, its claim cannot be computed, or dp-accounting has no event for it.
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
        "unit": claim.unit.description,
        "neighboring_relation": dominating[0],
        "event": _event_by_rounds(claim.guarantee, entry.streams) or dominating[1],
        "mu": claim.guarantee.mu,
        "epsilon": claim.guarantee.epsilon_of(entry.delta),
        "delta": entry.delta,
    }


def _event_by_rounds(guarantee: Guarantee, streams: Sequence[ReleaseStream]) -> Event | None:
    """Return the event of a guarantee round by round, or None without a μ or a stream that gives one.

    A stream gives an event by rounds if √Σ μ_t² over the rounds of its worst data record is the guarantee's μ.  A
    round of μ_t is a Gaussian event of noise multiplier 1/μ_t.  Equal rounds in a row become one repeated event.

    Guarantee: the event, one Gaussian event or several, composes to the guarantee's μ, up to a relative 1e-9.
    """
    if guarantee.mu is None:
        return None
    for stream in streams:
        round_mus = _mus_of_worst_record(stream)
        if round_mus and math.isclose(math.hypot(*round_mus), guarantee.mu, rel_tol=_TOLERANCE):
            events = [
                repeated_event(gaussian_event(1.0 / mu), len(list(run)))
                for mu, run in itertools.groupby(round_mus)
            ]
            return events[0] if len(events) == 1 else {"class": "ComposedDpEvent", "events": events}
    return None


def _mus_of_worst_record(stream: ReleaseStream) -> list[float]:
    """Return μ_t of every round of the worst data record of a fixed order, or [] if they are not known.

    A data record takes part every `rounds_per_epoch` rounds there, and the worst one has the largest Σ μ_t².  The
    μ_t are known if C is banded so that no two rounds of a data record move the same row of C s, and not without
    noise or in secret rounds.

    For another public order the result is only a candidate, which the caller compares with the guarantee.
    """
    # Number of bands and norms of C's columns, (T,), or None for a C that is not banded.
    blocks, epoch_rounds = stream.mechanism.blocks(stream.workload), stream.schedule.rounds_per_epoch
    if stream.schedule.secret or stream.std == 0.0 or blocks is None or blocks.bands > epoch_rounds:
        return []
    # How far a neighbour moves a sum, for clip 1 and sensitivity 1.
    distance = moved_by(stream.relation, stream.record_weight, 1.0, stream.increment_diameter)
    mus = distance * stream.workload.clips * blocks.norms / stream.std
    record_mus = [mus[first::epoch_rounds] for first in range(min(epoch_rounds, len(mus)))]
    return [float(mu) for mu in max(record_mus, key=lambda rounds: float(np.sum(rounds**2)))]
