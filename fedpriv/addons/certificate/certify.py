"""Certificate of a released model, a signed JSON document from which readers recompute the claim.

| key | value |
|---|---|
| `about` | first entry: number of silos that signed, and those that did not, or that it is a simulation |
| `body` | digest of the model, record of the run with its releases, tuning, audit, answers of people |
| `coordinator` | the coordinator's signature over the other four keys |
| `format` | `FORMAT`, or `OLD_FORMAT` of fedpriv 0.3.1 |
| `silos` | each silo's signed statement: policy, charges, remaining budget (`attest`) |

Here a record is the entry of one cell, which is one run of a sweep, in results.json.  A release stream is the
releases of one party, or of several alike, in one part of a run, with their noise and participation.  A plan is
what is known of a run before its first round, and gives the noise and the price of its releases.  A charge is what
a run took from a silo's privacy budget, as the silo's ledger has it.  A statement is what a silo signed.  A draft
is a deployment's certificate that no silo has signed yet.

The privacy figures of the record are recomputed from its releases, and from its scenario if its code is here.
Readers have the keys that they trust from elsewhere.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedpriv.claims.claim import PrivacyClaim, claim_figures
from fedpriv.claims.entries import LedgerEntry, check_copies, make_entry
from fedpriv.claims.recomputed import format_silos, make_objective, recompute_plans, strip_paths
from fedpriv.core.errors import InputError, RunError, refuse, sanitize_line
from fedpriv.core.figures import format_count
from fedpriv.core.signed import (
    canonical_json,
    check_signature,
    make_envelope,
    read_canonical_json,
    read_file_bytes,
    sha256,
    sign_data,
)
from fedpriv.plan.plan import make_plan
from fedpriv.scenario.sections import FederationSection
from fedpriv.study.results import Results
from fedpriv.study.stored import derived_fields

FORMAT, OLD_FORMAT = "application/vnd.fedpriv.certificate.3+json", "fedpriv certificate 2"
"""Format of a certificate and type of its coordinator's signature, today's and that of 0.3.1."""
STATEMENT_NAMES = {
    FORMAT: "application/vnd.fedpriv.silo-statement.3+json",
    OLD_FORMAT: "fedpriv certificate 2, a silo's part",
}
"""Type as which a silo signs its statement, by the format of the certificate."""
COORDINATOR = "coordinator"
RESPONSIBLE_PEOPLE = {
    "purpose": "the coordinator",
    "intended_use": "the coordinator",
    "reason_for_epsilon": "the information-governance board",
    "holders_of_records": "each silo",
    "access_to_records": "each silo",
    "retention": "each silo",
    "subgroups": "the coordinator",
    "contact": "the coordinator",
    "approved_by": "the information-governance board",
}
"""Facts that no program knows, with the people who answer for them."""
_RECORD_FIELDS = (
    *("cell", "point", "seed", "trust", "relation", "unit", "participation", "noise", "delta", "releases"),
    *("target", "guarantee", "holds", "attained", "counted_mu", "several_records", "mu", "zcdp", "epsilon"),
    *("epsilon_paper", "rho", "evaluation", "silos", "clients", "rounds", "records", "unread", "smallest_silo"),
    *("batch", "dimension", "missed", "engine", "scenario"),
)
_ALL_FIELDS = {*_RECORD_FIELDS, "scenario_sha256"}
"""Keys of a certificate's record, without those of scores."""
_MAX_ROUNDS, _MAX_SIGNING_SILOS, _MAX_SIMULATED_SILOS = 10**7, 10**6, 10**7
_FACTS_FORM = {
    "before": {"runs": (int,)},
    "charged": {"mu": (float, type(None)), "slack": (float,)},
    "spent": {"runs": (int,), "mu": (float, type(None)), "slack": (float, type(None))},
    "left": {"mu": (float,)},
    "runs_of_this_scenario": (int,),
}
"""Types of a ledger's facts in a statement."""
_STATEMENT_FORM = {
    "fedpriv": (str,),
    "policy": {"sha256": (str,), "allow": {"budget": (float,), "slack": (float,), "noise_free": (bool,)}},
    "table_public": (bool, type(None)),
    "training": _FACTS_FORM,
}
"""Types of the facts in a silo's statement that the views show, without its further parts."""


@dataclass(frozen=True)
class SignedCertificate:
    """Body of a certificate, and the statements of the silos that have signed it."""

    body: Mapping[str, Any]
    silos: Sequence[Mapping[str, Any]]
    """Signed statements (`attest`)."""

    @property
    def is_simulation(self) -> bool:
        return bool(self.body["record"]["engine"] != "deployment")

    @property
    def unsigned_silos(self) -> list[int]:
        """Numbers of the scenario's silos that have not signed, empty for a simulation."""
        return (
            []
            if self.is_simulation
            else sorted(set(range(_silo_count(self.body))) - {statement["silo"] for statement in self.silos})
        )

    @property
    def about_line(self) -> str:
        """Number of silos that signed, and those that did not, or that it is a simulation, as one line."""
        if self.is_simulation:
            return "a simulation: no silo's guard had a part in it, and none signed"
        count, missing = _silo_count(self.body), self.unsigned_silos
        unsigned_note = (
            f": {format_silos(missing)} {'has' if len(missing) == 1 else 'have'} not" if missing else ""
        )
        return f"{count - len(missing)} of {format_count(count, 'silo')} signed{unsigned_note}"


@dataclass(frozen=True)
class VerifiedCertificate(SignedCertificate):
    """Certificate whose signatures are checked and whose figures are recomputed."""

    claim: PrivacyClaim[Any] | None
    """Recomputed claim, or None for a run without noise."""
    is_planned_here: bool = True
    """Whether the record was compared with its scenario, and with a plan if silos signed it.

    False means that the scenario names code that is missing here, or a model that no certificate may run.
    """

    @property
    def lines(self) -> list[str]:
        """Lines about the certificate for the terminal: signers, claim, and possibly a caveat."""
        claim_line = (
            "no noise: nothing is claimed"
            if self.claim is None
            else self.claim.format_sentence("line", self.body["record"]["delta"])
        )
        caveats = [] if self.is_planned_here else [_CODE_NOT_HERE if self.is_simulation else _PLANNED_BY_SILOS]
        return [self.about_line, f"recomputed: {claim_line}", *caveats]


_PLANNED_BY_SILOS = (
    "the scenario's model is code that is none of fedpriv's, which no certificate may run: its noise was "
    "recomputed by the silos that signed, and not here"
)
_CODE_NOT_HERE = (
    "the scenario names code that is not here: the record was compared with its releases, and with the scenario "
    "only in part"
)


def _silo_count(body: Mapping[str, Any]) -> int:
    """Return the number of silos in the scenario."""
    return FederationSection.model_validate(body["record"]["scenario"]["federation"]).silos


def make_body(
    folder: Path,
    results: Results,
    cell_index: int | None,
    people: Mapping[str, str],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Make the body of a certificate for one cell of a run.

    Args:
        folder: Folder of the run.
        results: The folder's results.
        cell_index: Number of the cell, or None if the run has a single finished one.
        people: Answers of people, by keys of `RESPONSIBLE_PEOPLE`.
        extra: Further keys of the body: "not_protected", sentences on what the claim does not cover, and "audit".

    Returns:
        Plain JSON data: facts on the run and on the model's file, the record, the choice of settings (None without
        one), people's answers (None for an open question), and the keys of `extra`.

    Raises:
        InputError: If the cell is missing or not named, its model's file is missing, or an answer has another key.
        RunError: If the cell's claim is not that of its releases and scenario.
    """
    # Choose the cell, and refuse what cannot be certified.
    cells = {cell["cell"]: cell for cell in results.cells}
    if cell_index is None and len(cells) > 1:
        raise InputError(
            f"{folder}: has {len(cells)} finished cells; say which model is released by --cell NUMBER"
        )
    if (cell := cells.get(next(iter(cells), None) if cell_index is None else cell_index)) is None:
        raise InputError(f"{folder}: has no finished cell{'' if cell_index is None else f' {cell_index}'}")
    if unknown := sorted(set(people) - set(RESPONSIBLE_PEOPLE)):
        raise InputError(f"{unknown[0]}: expected one of {', '.join(RESPONSIBLE_PEOPLE)}")
    if cell["cell"] in results.differs:
        reason = make_entry(cell).disagreement or "its figures are written otherwise"
        raise RunError(
            f"{folder}: cell {cell['cell']} claims something else than its releases and scenario give: {reason}"
        )
    # The record leaves out folders of data files, and scores that were evaluated on silos' data without noise.
    model, scenario = read_file_bytes(folder / cell["model"]), strip_paths(cell["scenario"])
    has_exact_scores = cell["evaluation"] is not None and cell["evaluation"]["published"] == "without noise"
    names = [
        name for name in cell if name in _RECORD_FIELDS or (name.startswith("test_") and not has_exact_scores)
    ]
    # A reader computes the digest of the body from JSON, so tuples become lists and keys become text.
    body = {
        "run": {
            "name": results.name,
            # A reader compares the title with the scenario's, which `results.title` may cut or escape.
            "title": scenario["title"],
            "date": results.date,
            "versions": dict(results.versions),
            "cells": len(cells),
            "released_cells": sum(finished["noise"] == "release" for finished in results.cells),
        },
        "model": {"file": Path(cell["model"]).name, "bytes": len(model), "sha256": sha256(model)},
        "record": {
            **{name: cell[name] for name in names},
            "point": {key: strip_paths(value, key) for key, value in cell["point"].items()},
            "scenario": scenario,
            # A silo finds the run in its ledger by the digest of the whole scenario, folders included.
            "scenario_sha256": sha256(json.dumps(cell["scenario"], sort_keys=True).encode()),
        },
        "tuned": results.tuning and results.tuning.model_dump(mode="json"),
        "people": {name: people.get(name) for name in RESPONSIBLE_PEOPLE},
        **extra,
    }
    return dict(json.loads(canonical_json(body)))


def sign_certificate(body: Mapping[str, Any], silos: Sequence[Mapping[str, Any]], key: Ed25519PrivateKey) -> bytes:
    """Sign a body and the silos' statements with the coordinator's key.

    Args:
        body: Body of the certificate, from `make_body`.
        silos: Signed statements, each with the integer "silo" and the digest "body" of what was signed, in any
            order, empty for a draft or a simulation.
        key: The coordinator's key.

    Returns:
        The certificate's file, as canonical JSON.

    Raises:
        InputError: If a silo signed another body.
    """
    for statement in silos:
        if statement.get("body") != sha256(canonical_json(body)):
            raise InputError(
                f"silo {statement.get('silo')} signed another certificate than this: run, answers or audit were "
                "changed since, so let it sign the present one"
            )
    # With zeros in front, texts have the order of the numbers.
    statements = sorted(silos, key=lambda statement: str(statement.get("silo")).zfill(8))
    document = {
        "about": SignedCertificate(body, statements).about_line,
        "body": body,
        "format": FORMAT,
        "silos": statements,
    }
    return canonical_json({**document, "coordinator": sign_data(key, FORMAT, document)})


def format_envelopes(tree: Mapping[str, Any]) -> str:
    """Format a certificate as DSSE envelopes for other programs, the coordinator's line before the silos'.

    An envelope is a line of JSON with a signed document and its signature.  The document of the coordinator is the
    certificate without the coordinator's signature, and that of a silo is its statement without its signature.
    """
    document = {name: value for name, value in tree.items() if name != "coordinator"}
    envelopes = [
        make_envelope(tree["format"], document, tree["coordinator"]),
        *(
            make_envelope(
                STATEMENT_NAMES[tree["format"]],
                {name: value for name, value in statement.items() if name != "signed"},
                statement["signed"],
            )
            for statement in tree["silos"]
        ),
    ]
    return "".join(f"{json.dumps(envelope)}\n" for envelope in envelopes)


def read_certificate(path: Path, content: bytes | None = None) -> dict[str, Any]:
    """Read a certificate's JSON document without recomputing a figure or checking a signature.

    The result has the keys of the module's table, with values that are not checked except for the format.

    Args:
        path: The certificate.
        content: Bytes of a certificate that is not written yet, or None to read them from `path`.

    Raises:
        InputError: If the file cannot be read, or is no certificate of a known format.
    """
    tree = read_canonical_json(read_file_bytes(path) if content is None else content, path)
    is_known = tree.get("format") in (FORMAT, OLD_FORMAT)
    if "fedpriv" in str(tree.get("format")) and not is_known:
        raise InputError(
            f"{path}: has the format {sanitize_line(repr(tree['format']), 60)}, and this program reads "
            f"{FORMAT!r} and {OLD_FORMAT!r}; "
            + (
                "under format 1 silos signed without planning the run again: certify the run anew"
                if tree["format"] == "fedpriv certificate 1"
                else "it is of another version of fedpriv: read it with that one"
            )
        )
    if not is_known or set(tree) != {"about", "format", "body", "silos", "coordinator"}:
        raise InputError(f"{path}: is no certificate of a model; expected the format {FORMAT!r}")
    return tree


def verify_certificate(
    path: Path,
    signers: Mapping[str, Ed25519PublicKey],
    model: Path | None = None,
    *,
    require_all_silos: bool = True,
    content: bytes | None = None,
) -> VerifiedCertificate:
    """Check a certificate's signatures, and recompute its figures without the data.

    Args:
        path: The certificate.
        signers: Trusted public keys by name, "coordinator" and "silo-NUMBER".
        model: A file to compare with the certified model, or None for no comparison.
        require_all_silos: Whether a deployment's certificate without each silo's signature is refused.
        content: Bytes of a certificate that is not written to `path` yet, or None to read them from there.

    Raises:
        InputError: If the file cannot be read, or is no certificate of a known format.
        RunError: If a key is not among `signers`, a signature or a fact is not the expected one, a silo has not
            signed although each has to, `model` is another file or cannot be read, fedpriv 0.3.0 made a false
            claim for the record, or the document has another shape.  The message names the first such fault.

    Guarantee: a certificate that passes was signed, byte for byte, by the coordinator whom `signers` names.  A
    certificate of a deployment was signed by every silo of its scenario, each for itself, or, without
    `require_all_silos`, by those silos that the certificate names.  The record's privacy figures are those that
    its releases give, up to rounding, except that ε may be up to 1 % larger.  For a simulation whose scenario
    names code that is not here, this holds only for the figures of the claim and for the μ of evaluations.

    The releases of a deployment that a silo signed are those of its scenario's plan, and each silo that signed
    states the charge that these releases cost.  The plan was made here, or, if the model is code outside fedpriv
    (`is_planned_here` is False), by each silo that signed.  The releases of a simulation, or of a deployment that
    no silo signed, agree with the scenario as far as `LedgerEntry.disagreement` compares them.

    `model`, if it is given, is the model that was certified.  Other facts of the record are compared with the
    scenario where they follow from it and its code is here, such as the number of records.  Nothing else is
    recomputed.  Scores, missed rounds, the choice of settings (`tuned`), the audit, answers of people, and the
    date rest on the coordinator's word.  That a silo's ledger has its facts, charges included, rests on the
    silo's word.
    """
    tree = read_certificate(path, content)
    source = path if content is None else f"{path} is not written: the new certificate has a fault"
    try:
        if COORDINATOR not in signers:
            raise InputError(f"the keys that you trust have none of the {COORDINATOR}")
        check_signature(
            tree["coordinator"],
            tree["format"],
            {name: tree[name] for name in ("about", "format", "body", "silos")},
            signers[COORDINATOR],
            f"the {COORDINATOR}",
        )
        entry = recompute_record(tree["body"])
        result = VerifiedCertificate(tree["body"], tree["silos"], entry.claim, _check_silos(tree, signers, entry))
        refuse(
            {
                f"about is {sanitize_line(repr(tree['about']), 60)}, and it is: {result.about_line}": (
                    tree["about"] != result.about_line
                ),
                result.about_line: require_all_silos and bool(result.unsigned_silos),
            }
        )
        if model is not None and sha256(weights := read_file_bytes(model)) != tree["body"]["model"]["sha256"]:
            raise InputError(f"{model} ({len(weights)} bytes) is not the model that was certified")
    except InputError as error:
        raise RunError(f"{source}: {error}") from None
    except Exception as error:  # a signed document can have any other shape, and the message stays one line
        raise RunError(
            f"{source}: is not a whole certificate ({type(error).__name__}: {sanitize_line(str(error), 100)})"
        ) from None
    return result


def recompute_record(body: Mapping[str, Any]) -> LedgerEntry:
    """Compare a body's record with its recomputed privacy figures, and return it with its claim.

    Raises:
        InputError: If a figure or another fact is not that of releases and scenario, if they cannot be read here,
            or if fedpriv 0.3.0 made a false claim for the record.
        Exception: A body of another shape may raise other errors, such as KeyError.
    """
    record = body["record"]
    _check_sizes(record)
    entry = make_entry(record)
    for name, value in _derived_figures(entry).items():
        if name not in record or not _matches(record[name], value, name):
            raise InputError(
                f"record.{name} is {record.get(name)!r:.80}, and releases and scenario give {value!r:.80}"
            )
    if (reason := entry.disagreement) is not None:
        raise InputError(f"record: {reason}")
    check_copies("the certificate", body["run"]["versions"], [record])
    _check_texts(body)
    return entry


def _derived_figures(entry: LedgerEntry) -> dict[str, Any]:
    """Derive the figures of a record from its scenario and releases, by their names in the record.

    Guarantee: no figure is believed that the scenario decides: trust, silos, rounds, records, δ, participation.
    There is one exception, a simulation whose scenario names code that is not here: only the figures of its claim
    are derived, from the releases and the record's δ.

    Raises:
        InputError: If a deployment's scenario names code that is not here, or a scenario cannot be used.
    """
    record, cell = entry.record, entry.resolved_cell
    if cell is None and record["engine"] == "deployment":
        raise InputError(
            "record.scenario cannot be planned here; code of one's own is given with --import, and for a silo by "
            "allow.extensions of its policy"
        )
    if cell is None:
        return claim_figures(entry.claim, entry.delta)
    noise: Literal["simulation", "release"] = "release" if record["noise"] == "release" else "simulation"
    return dict(json.loads(json.dumps(derived_fields(cell, entry.streams, entry.test_streams, noise))))


def _check_texts(body: Mapping[str, Any]) -> None:
    """Refuse facts beside the figures that contradict the scenario, and unknown keys of the record.

    These facts are the run's name and title, the point of the sweep, the number of clients, and the missed rounds.
    Keys that begin with "test_" are scores, which are not checked.
    """
    record, scenario = body["record"], body["record"]["scenario"]
    text_pairs = {
        **{f"run.{name}": (body["run"][name], scenario[name]) for name in ("name", "title")},
        "record.clients": (record.get("clients"), scenario["federation"].get("clients")),
        **{
            f"record.point: {sanitize_line(key, 60)}": (value, _find_key(scenario, key))
            for key, value in record["point"].items()
        },
    }
    silos, rounds = range(record["silos"]), range(1, record["rounds"] + 1)
    refuse(
        {
            **{
                f"{name} is {sanitize_line(repr(recorded), 60)}, and the scenario's is "
                f"{sanitize_line(repr(value), 60)}": (recorded != value)
                for name, (recorded, value) in text_pairs.items()
            },
            **{
                f"record.{sanitize_line(name, 60)} is a key that no certificate has": name not in _ALL_FIELDS
                for name in record
                if not name.startswith("test_")
            },
            "record.missed has silos or rounds that the scenario has not": not all(
                str(int(silo)) == silo and int(silo) in silos and all(t in rounds for t in missed_rounds)
                for silo, missed_rounds in record["missed"].items()
            ),
        }
    )


def _find_key(tree: Any, key: str) -> Any:
    """Return the value at a dotted key of a scenario, or None if the key is missing."""
    return reduce(lambda node, name: node.get(name) if isinstance(node, Mapping) else None, key.split("."), tree)


def _check_sizes(record: Mapping[str, Any]) -> None:
    """Refuse releases that would exhaust a reader's memory, before any of them is expanded.

    Participations and clips are stored with numbers of repetitions, and mechanisms with sizes such as bands, so
    that a few bytes could stand for releases of any length.

    Raises:
        InputError: If the integers of all participations and mechanisms and the repetitions of all clips add up to
            more than 10^7, or there are more than 10^6 silos, or more than 10^7 of a simulation, which lists none
            by number.
    """
    evaluation = record.get("evaluation") or {"releases": []}
    releases = (*record["releases"], *evaluation["releases"])
    fields = [
        field
        for release in releases
        for part in ("participation", "mechanism")
        for field in release[part].values()
    ]
    counts = [
        value
        for field in fields
        for value in (field if isinstance(field, list) else [field])
        if isinstance(value, int)
    ]
    clips = [count for release in releases for _, count in release["clips"]]
    max_silos = _MAX_SIGNING_SILOS if record["engine"] == "deployment" else _MAX_SIMULATED_SILOS
    if sum(abs(int(count)) for count in (*counts, *clips)) > _MAX_ROUNDS or abs(int(record["silos"])) > max_silos:
        raise InputError("record: has more rounds or silos than a certificate may have, or larger noise matrices")


def _matches(recorded: Any, expected: Any, name: str) -> bool:
    """Whether a recorded value equals the expected one, up to rounding.

    A floating-point figure may differ by 1e-8 of its value, and one whose `name` begins with "epsilon" may be up
    to 1 % larger.  Dictionaries match key by key, and any other values have to be equal.

    Args:
        recorded: Value in the record.
        expected: Recomputed value.
        name: Key of the figure in the record, also for the values of a dictionary in the record.
    """
    if isinstance(expected, dict):
        return (
            isinstance(recorded, dict)
            and recorded.keys() == expected.keys()
            and all(_matches(recorded[key], expected[key], name) for key in expected)
        )
    # In Python True equals 1, and in JSON it is another value.
    if not isinstance(expected, float) or isinstance(recorded, bool) or not isinstance(recorded, float | int):
        return isinstance(recorded, bool) == isinstance(expected, bool) and bool(recorded == expected)
    low, high = expected * (1.0 - 1e-8), expected * (1.01 if name.startswith("epsilon") else 1.0 + 1e-8)
    return low <= recorded <= high


def _check_silos(tree: Mapping[str, Any], signers: Mapping[str, Ed25519PublicKey], entry: LedgerEntry) -> bool:
    """Check the silos' signatures, and compare releases and charges with a plan for the signed shapes.

    Args:
        tree: The certificate.
        signers: Trusted public keys by name, "silo-NUMBER" for a silo.
        entry: The recomputed record.

    Returns:
        `VerifiedCertificate.is_planned_here`: False for a simulation whose scenario names code that is not here,
        and for a deployment that silos signed and whose model is code outside fedpriv.  True otherwise.

    Raises:
        InputError: If a statement, its signature, a release or a charge is not as expected, with the first such
            fault.
    """
    record, body_digest = tree["body"]["record"], sha256(canonical_json(tree["body"]))
    refuse({"silos: expected a list": not isinstance(tree["silos"], list)})
    if record["engine"] != "deployment":
        if tree["silos"]:
            raise InputError(f"silo {tree['silos'][0]['silo']!r:.20} signed, and has no part in a simulation")
        return entry.resolved_cell is not None
    statements = dict[int, Mapping[str, Any]]()
    for statement in tree["silos"]:
        silo_id = statement["silo"]
        name, facts = f"silo-{silo_id}", {key: value for key, value in statement.items() if key != "signed"}
        refuse(
            {
                f"silos: {silo_id!r:.20} is no silo's number, or is there twice": (
                    isinstance(silo_id, bool) or not isinstance(silo_id, int) or silo_id in statements
                ),
                f"silo {silo_id} signed, and has no part in this run": (
                    silo_id not in range(_silo_count(tree["body"]))
                ),
                f"the keys that you trust have none of {name}": name not in signers,
            }
        )
        check_signature(statement["signed"], STATEMENT_NAMES[tree["format"]], facts, signers[name], name)
        more_parts = {part: _FACTS_FORM for part in ("first_step", "tests") if part in statement}
        refuse(
            {
                f"{name} signed another certificate than this": statement["body"] != body_digest,
                **dict.fromkeys(_list_form_faults(name, statement, _STATEMENT_FORM | more_parts), True),
            }
        )
        statements[silo_id] = statement
    return not statements or _check_plan(record, entry, statements)


def _list_form_faults(name: str, value: Any, form: Any) -> list[str]:
    """List the facts whose types are not those of a form.

    Args:
        name: Dotted name of the value, for the texts.
        value: Value in the certificate.
        form: Tuple of types, or a dictionary with the form of each key that the value needs.

    Raises:
        KeyError or TypeError: If a key is missing, or the value is no dictionary.
    """
    return (
        [fault for key in form for fault in _list_form_faults(f"{name}.{key}", value[key], form[key])]
        if isinstance(form, dict)
        else [f"{name} is {sanitize_line(repr(value), 60)}, which is no such fact"] * (type(value) not in form)
    )


def _check_plan(
    record: Mapping[str, Any], entry: LedgerEntry, statements: Mapping[int, Mapping[str, Any]]
) -> bool:
    """Plan the run again, and compare release streams and charges with those of the plan.

    Args:
        record: Record of a deployment.
        entry: The record, with its scenario resolved.
        statements: Signed statements by silo, one or more.  Their "shapes" of the silos' data, such as the number
            of features and classes, determine the model's size.

    Returns:
        True, or False if there is no plan because the model is code outside fedpriv.

    Raises:
        InputError: If the run cannot be planned, or the model's size, streams, shapes or charges differ.
    """
    from fedpriv.addons.certificate.attest import find_charge_difference

    cell, first_silo = entry.resolved_cell, next(iter(statements))
    first_shapes = statements[first_silo]["shapes"]
    assert cell is not None  # `_derived_figures` refuses a deployment whose scenario cannot be planned here
    if differing_silos := [silo_id for silo_id, facts in statements.items() if facts["shapes"] != first_shapes]:
        raise InputError(f"silo {differing_silos[0]} has records of other shapes than silo {first_silo}")
    if cell.model.import_paths:
        return False
    plans = recompute_plans(
        cell,
        make_objective(cell, first_shapes),
        record["releases"],
        lambda step: make_plan(step, make_objective(step, first_shapes), for_release=True),
    )
    plans.check(record)
    for silo_id, facts in statements.items():
        if (reason := find_charge_difference(silo_id, facts, plans)) is not None:
            raise InputError(reason)
    return True
