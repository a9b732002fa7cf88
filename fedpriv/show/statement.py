"""Privacy statement of a run for a data-protection officer, and the audit that is stored with the run.

A cell is one run of a sweep: a dictionary of results.json with its settings, releases and figures.  A release
stream is the releases of one party, or of several alike, in the rounds of a run or in a first step before them,
with their noise, clip and schedule.  A claim is the guarantee that follows from the streams: a μ of Gaussian
differential privacy, or a curve of (ε, δ), which has no μ.  The unit is what is protected: a record, a person or a
client.  An audit tries to refute a claim.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fedpriv.accounting.gaussian import compose
from fedpriv.accounting.guarantees import Guarantee
from fedpriv.claims.claim import (
    EXTERNAL_PARTY,
    EXTERNAL_STEP_NOTE,
    PrivacyClaim,
    compute_claim_from_data,
    describe_evaluation,
    describe_group_privacy,
    describe_silo_budgets_of_cells,
)
from fedpriv.claims.ledger import FIRST_STEP, ROUNDS, ReleaseStream, stream_from_data
from fedpriv.core.errors import InputError
from fedpriv.core.figures import (
    format_count,
    format_lower,
    format_upper,
    format_upper_delta,
    format_upper_epsilon,
    format_upper_percent,
    format_upper_range,
)
from fedpriv.core.files import write_json
from fedpriv.core.random import SERVER
from fedpriv.noise.trust import RECORD, Trust, Unit, find_trust
from fedpriv.show.summary import describe_tuning, group_by, list_caveats
from fedpriv.study.results import Results, read_results

_HIDDEN_FACTS = {
    "replace-one": "which {unit} was used: any one may be exchanged for any other, the rest staying the same",
    "zero-out": "whether any one {unit} contributed at all, the rest staying the same",
}
_SEEDED_NOISE = (
    "This was a simulation. Its noise comes from a seed that is written in the results: anybody can recompute and "
    "remove it. The figures say what a deployment with secret noise would guarantee; nothing that this run wrote "
    "is protected."
)
_SILO_NOISE = "Every silo drew its noise with a key from its own operating system, which has not left that silo."
_SERVER_NOISE = (
    "The server drew the noise, with a key from its operating system. It sees what silos send without noise: all "
    "that is said here rests on the server keeping both to itself."
)
_NO_LOSS_ASSUMPTION = (
    "The figures assume nothing about the loss or the model, because what is released is clipped, {unit} by "
    "{unit}."
)


@dataclass(frozen=True)
class ProtectionLevel:
    """Printed figures of one level of protection among a statement's cells, "none" for a missing figure."""

    mu: str
    zcdp: str
    """ρ of zero-concentrated differential privacy."""
    epsilon: str
    """ε at `delta`, by the accountant."""
    epsilon_paper: str
    """ε at `delta` by the conversion of papers, for comparison."""
    delta: str
    attacker: str
    """Bound on the probability of guessing which of two equally likely neighbours was used, in percent."""
    sort_key: float = field(compare=False)
    """ε at the level's δ, as a number."""


@dataclass(frozen=True)
class Statement:
    """Privacy statement on all cells with one trust, relation, noise, δ, unit and kind of guarantee.

    Guarantee: `levels` are recomputed from the recorded releases, not read from the claimed figures.
    """

    private: bool
    """Whether all cells have a claim.  A cell has one if all its releases have noise."""
    note: str
    """Remark on the kind of guarantee, for example on secret participation, or empty."""
    trust: str
    """Name of the trust setting."""
    protection: str
    """Protected data under the trust setting, and the parties against whom it is protected."""
    unit: str
    """Description of the unit of protection."""
    hidden: str
    """Difference between neighbours, which the releases hide."""
    relation: str
    noise: str
    """Note on who drew or knows the noise, and on several runs together, or empty without noise."""
    mechanisms: Sequence[str]
    """Description of each party's releases, with their noise and clip."""
    attained: bool
    """Whether every cell has a claim whose μ is exact, and not an upper bound."""
    levels: Sequence[ProtectionLevel]
    """Distinct figures of the cells, the smallest ε first."""
    caveats: Sequence[str]
    """Sentences on what weakens the figures."""
    evaluations: Sequence[str]
    """Sentences on metrics that silos evaluated, with the privacy cost for test records."""
    loss_assumptions: Sequence[str]
    """Assumptions of the figures about loss and model."""
    assumptions: Sequence[str]
    """Assumptions of the figures about units, noise, arithmetic and choice of settings."""


_FIRST_STEP = "first step, means and squares of the columns of numbers"
_COMPOSITION_NOTE = (
    "The columns of numbers were scaled by noisy means and deviations that a first step released: the figures are "
    "of that step and of the rounds together."
)
_SCHEDULE_ASSUMPTION = (
    "Every {unit} takes part only in the rounds that the schedule says, and its contribution is clipped there."
)
_RANGES_ASSUMPTION = (
    "Ranges, vocabularies, classes and sites of the table are public because the scenario declares so "
    "(data.table.public): if they were read off the records, they tell of them whatever the noise, and no figure "
    "here has that."
)
_CHOICE_ASSUMPTION = (
    "Settings were chosen without a look at the data, or that look was accounted for elsewhere: choosing the best "
    "of several runs is not part of these figures."
)
NOT_PROTECTED = (
    "That a silo takes part, how many records it contributes, and when it answers.",
    "What the model says about the population: that is what it is for.",
    "A silo's records from the silo itself or its administrator.",
)


def make_statements(results: Results) -> list[Statement]:
    """Make a statement for each trust, relation, noise, δ, unit and guarantee among the finished cells."""
    shared_keys = "trust", "relation", "noise", "delta", "unit"
    groups = group_by(results.cells, lambda cell: (*(cell[key] for key in shared_keys), cell.get("guarantee")))
    choice = describe_tuning(results) or [_CHOICE_ASSUMPTION]
    return [
        _make_statement(
            cells,
            _describe_composition(
                results.cells, cells[0]["relation"], stream_from_data(cells[0]["releases"][0]).unit
            ),
            choice,
        )
        for cells in groups.values()
    ]


def _describe_composition(cells: Sequence[Mapping[str, Any]], relation: str, unit: Unit) -> str:
    """Describe the composed μ of all runs with secret noise, under one relation, for one kind of unit.

    Runs whose claims have no μ are left out.  The text is empty for fewer than two runs.

    Args:
        cells: Cells of all statements.
        relation: Neighbouring relation.
        unit: Unit of protection, whose numbers of records and silos are not compared.
    """
    claims = [
        compute_claim_from_data(cell["releases"])
        for cell in cells
        if cell["noise"] == "release" and cell["relation"] == relation
    ]
    mus = [
        claim.guarantee.mu
        for claim in claims
        if claim and claim.unit.name == unit.name and claim.guarantee.mu is not None
    ]
    return (
        f" Every figure is of one run. A {unit.noun} that takes part in all of these {len(mus)} runs has together "
        f"only the protection of μ = {format_upper(compose(mus))}, and runs elsewhere, with other neighbours or "
        "without a μ come on top."
        if len(mus) > 1
        else ""
    )


def _make_statement(cells: Sequence[Mapping[str, Any]], composition_note: str, choice: Sequence[str]) -> Statement:
    """Make the statement on cells that agree in trust, relation, noise, δ, unit and kind of guarantee.

    Args:
        cells: Cells of results.json, at least one.
        composition_note: Note on runs with secret noise together, or "" (`_describe_composition`).
        choice: Sentences on the choice of settings, for the assumptions.
    """
    first_cell, delta = cells[0], cells[0]["delta"]
    streams_by_cell = [list(map(stream_from_data, cell["releases"])) for cell in cells]
    streams, unit = list(itertools.chain(*streams_by_cell)), streams_by_cell[0][0].unit
    claims = [compute_claim_from_data(cell["releases"]) for cell in cells]
    stated_claims = [claim for claim in claims if claim is not None]
    # A paper's constants may charge a larger μ than exact counting does.  Sentences on the smaller μ, each with
    # the charged one for sorting.
    counting_sentences = {
        (claim.guarantee.mu, claim.format_sentence("counted", delta))
        for claim in stated_claims
        if claim.mu_by_counting
    }
    trust = find_trust(first_cell["trust"])
    return Statement(
        private=bool(stated_claims) and None not in claims,
        note=stated_claims[0].guarantee.note if stated_claims else "",
        trust=first_cell["trust"],
        protection=trust.protection_of(unit),
        unit=unit.description,
        hidden=_HIDDEN_FACTS[first_cell["relation"]].format(unit=unit.noun),
        relation=first_cell["relation"],
        noise=_noise_note(first_cell["noise"], trust)
        + (composition_note if first_cell["noise"] == "release" else ""),
        mechanisms=sorted(
            {
                _describe_noise(stream, _describe_clip_unit(cell))
                for cell, cell_streams in zip(cells, streams_by_cell, strict=True)
                for stream in cell_streams
            }
        ),
        attained=all(claim is not None and claim.attained for claim in claims),
        levels=sorted({_make_level(claim, delta) for claim in stated_claims}, key=lambda level: level.sort_key),
        caveats=list_caveats(cells),
        evaluations=sorted(
            {
                describe_evaluation(evaluation, delta)
                for cell in cells
                if (evaluation := cell.get("evaluation")) and evaluation["releases"]
            }
        ),
        loss_assumptions=sorted(set(map(loss_assumption, streams))),
        assumptions=[
            unit.assumptions,
            *([silos] if (silos := describe_silo_budgets_of_cells(cells)) else []),
            *(
                [describe_group_privacy([claim.guarantee for claim in stated_claims], delta)]
                if stated_claims and unit.name == RECORD.name
                else []
            ),
            *(sentence for _, sentence in sorted(counting_sentences)),
            _SCHEDULE_ASSUMPTION.format(unit=unit.noun),
            # A scenario has the description of any table that is not shipped.
            *(
                [_RANGES_ASSUMPTION]
                if any(cell.get("scenario", {}).get("data", {}).get("table") for cell in cells)
                else []
            ),
            *choice,
            *_step_notes(streams),
            # Claims for real numbers assume more than claims for the program's own arithmetic.
            *(
                [min(stated_claims, key=lambda claim: claim.exact).format_sentence("arithmetic", delta)]
                if stated_claims
                else []
            ),
        ],
    )


def _step_notes(streams: Sequence[ReleaseStream]) -> list[str]:
    """Return notes on a first step whose releases are composed with the rounds, taken here or elsewhere."""
    parties = {stream.party_name for stream in streams if stream.step == FIRST_STEP}
    return [_COMPOSITION_NOTE] * bool(parties - {EXTERNAL_PARTY}) + [EXTERNAL_STEP_NOTE] * (
        EXTERNAL_PARTY in parties
    )


def _noise_note(noise_kind: str, trust: Trust) -> str:
    """Say who drew the noise and who could recompute it, or nothing for a run without noise."""
    if noise_kind == "release":
        return _SERVER_NOISE if trust.adds_noise(SERVER) else _SILO_NOISE
    return _SEEDED_NOISE if noise_kind == "simulation" else ""


def loss_assumption(stream: ReleaseStream) -> str:
    """Return the sentence on what the sensitivity assumes about the loss, or that it assumes nothing."""
    return stream.mechanism.assumption or _NO_LOSS_ASSUMPTION.format(unit=stream.unit.noun)


def _make_level(claim: PrivacyClaim[Guarantee], delta: float) -> ProtectionLevel:
    figures = claim.guarantee.figures(delta)
    mu, zcdp = ("none" if (value := figures[name]) is None else format_upper(value) for name in ("mu", "zcdp"))
    epsilon = claim.guarantee.epsilon_of(delta)
    paper = "none" if (value := figures["epsilon_paper"]) is None else format_upper_epsilon(value)
    return ProtectionLevel(
        mu,
        zcdp,
        format_upper_epsilon(epsilon),
        paper,
        format_upper_delta(delta),
        attacker=format_upper_percent(claim.guarantee.best_guess),
        sort_key=epsilon,
    )


def _describe_clip_unit(cell: Mapping[str, Any]) -> str:
    """Describe the unit of standard deviation and clip if a quantile sets the clip, else return ""."""
    quantile = cell.get("scenario", {}).get("algorithm", {}).get("clip_quantile")
    return (
        ""
        if quantile is None
        else "; both in units of the clip of the moment, which follows a quantile of the clients' norms: the "
        "increment is a client's move over that clip, of norm 1 at most, with the bit that says whether it fits "
        "beside it"
    )


def _describe_noise(stream: ReleaseStream, clip_unit: str = "") -> str:
    """Describe a stream: its party, noise, number of releases, participation, and clip, then `clip_unit`.

    A first step that was taken elsewhere is described by its party and the charged μ, and a stream without noise
    by its party and its number of releases.

    Args:
        stream: Stream to describe.
        clip_unit: Text on the unit of the standard deviation and the clip, or "".
    """
    party = stream.party_name if stream.step == ROUNDS else f"{stream.party_name}, {_FIRST_STEP}"
    if stream.party_name == EXTERNAL_PARTY:
        return f"{party}: charged with μ = {format_upper(stream.mu)}, not released here"
    releases = format_count(stream.schedule.rounds, "release")
    if stream.std == 0.0:
        return f"{party}: {releases} without noise"
    return (
        f"{party}: {stream.mechanism.words}, fresh vectors of standard deviation {format_lower(stream.std, 5)} a "
        f"coordinate; {releases}; each {stream.unit.noun} {stream.schedule.words}, its increment clipped to norm "
        f"{format_upper_range(stream.clips, 5)}{clip_unit}"
    )


_AUDIT_FILE = "audit.json"
_COMPARED_KEYS = ("algorithm", "model")


@dataclass(frozen=True)
class StoredAudit:
    """Outcome of an audit (`fedpriv.addons.audit.audit.Audit`), as far as a report shows it."""

    claimed_mu: float
    mu: float
    """Lower bound on μ that the audit shows."""
    epsilon: float
    """Lower bound on ε at `delta` that the audit shows."""
    claimed_epsilon: float
    delta: float
    statistic: str
    """Name of the test that shows `mu`."""
    confidence: float
    trials: int
    rounds: int
    silos: int
    trust: str
    stands: bool
    """Whether the claim is not refuted: `mu` is at most `claimed_mu`."""
    date: str
    sees: Mapping[str, float]
    """Largest share of the noise that the audit refutes with probability 95 %, by family of tests."""

    @property
    def power(self) -> str:
        """Clause on the loss of noise that this audit detects."""
        return describe_power(self.sees, self.trials)


def describe_power(sees: Mapping[str, float], trials: int) -> str:
    """Describe the loss of noise that an audit with this number of trials detects.

    A share f of the noise is noise of standard deviation f σ in place of the plan's σ.  A family is a group of
    tests that share one probability of a false refutation.  Shares are rounded down to percents; those of 0 are
    left out.

    Args:
        sees: Largest share of the noise that is refuted with probability 95 %, by family of tests, or empty if
            unknown.
        trials: Number of trials of the audit.
    """
    if not sees:
        return "it is not calculated where rounds are secret; audit a copy with federation.sampling=fixed"
    shares = {name: math.floor(100.0 * share + 1e-9) / 100.0 for name, share in sees.items()}
    detectable = ", ".join(f"σ × {share:.2f} ({name})" for name, share in shares.items() if share > 0.0)
    if not detectable:
        return (
            f"with {trials:,} trials even a loss of noise to σ × 0.01 can be missed at this mu; take more trials, "
            "or another mu"
        )
    return (
        f"with {trials:,} trials this audit would see {detectable}: noise of that size, or less, is "
        "refuted in 95 of 100 audits, and a smaller loss can be missed"
    )


def check_same_algorithm(folder: Path, scenario: Mapping[str, Any]) -> None:
    """Check that a run has a cell whose sections [algorithm] (with trust) and [model] are this scenario's.

    Raises:
        InputError: If the folder has no results that can be read, or no such cell.
    """
    scenarios = (cell["scenario"] for cell in read_results(folder).cells)
    if not any(all(stored.get(key) == scenario.get(key) for key in _COMPARED_KEYS) for stored in scenarios):
        raise InputError(f"--store {folder}: no cell there has the algorithm, trust and model that are audited")


def store_audit(folder: Path, outcome: Mapping[str, Any]) -> None:
    """Write an audit's outcome, with the date, to RUN_DIR/audit.json for the report."""
    fields = {**outcome, "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
    write_json(folder / _AUDIT_FILE, {name: fields[name] for name in StoredAudit.__dataclass_fields__})


def load_audit(folder: Path) -> StoredAudit | None:
    """Load the audit of a run from audit.json in its folder, or return None if there is no such file.

    Raises:
        InputError: If the file cannot be read, or is no JSON object with the fields of an audit and their types.
    """
    if not (path := folder / _AUDIT_FILE).exists():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return TypeAdapter(StoredAudit).validate_python(
            {name: tree[name] for name in StoredAudit.__dataclass_fields__}
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path}: not an audit of fedpriv ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from None
