"""The certificate of a released model: one signed JSON document, from which everybody can recompute the claim.

    format        "fedpriv certificate 1"
    body          the model's digest, the run's record with its releases, tuning, audit, what people said of it
    silos         what each silo's administrator signed: policy, charges, budget left (fedpriv/silo/attest.py)
    coordinator   the signature of the coordinator over all of that

A record has no score that was measured on the silos' own records.  Who signed is decided by a file that the reader
of a certificate has from elsewhere (`signers_of`), never by the certificate.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedpriv.core.errors import InputError, RunError, printable
from fedpriv.core.signed import bytes_of, check_signature, read_spelled, sha256, signature, spelled
from fedpriv.rounds.claim import PrivacyClaim, figures_of
from fedpriv.rounds.entries import LedgerEntry, entry_of

if TYPE_CHECKING:
    from fedpriv.study.results import Results

FORMAT = "fedpriv certificate 1"
SAYS = "fedpriv certificate"
"""What the coordinator signs."""
COORDINATOR = "coordinator"
PEOPLE = {
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
"""Facts that no program knows, and the person who says them."""
_OF_THE_RECORD = (
    *("cell", "point", "seed", "trust", "relation", "unit", "participation", "noise", "delta", "releases"),
    *("target", "guarantee", "holds", "attained", "counted_mu", "several_records", "mu", "zcdp", "epsilon"),
    *("epsilon_paper", "rho", "evaluation", "silos", "clients", "rounds", "records", "dimension", "missed"),
    *("engine", "scenario"),
)
_MOST_ROUNDS, _MOST_SILOS = 10**7, 10**6


@dataclass(frozen=True)
class Verified:
    """A certificate that was recomputed, and what can be said of it."""

    body: Mapping[str, Any]
    silos: Sequence[Mapping[str, Any]]
    claim: PrivacyClaim[Any] | None

    @property
    def simulated(self) -> bool:
        return bool(self.body["record"]["engine"] != "deployment")

    @property
    def lines(self) -> list[str]:
        """What holds, as the terminal says it."""
        record, signed = self.body["record"], len(self.silos)
        said = (
            "no noise: nothing is claimed" if self.claim is None else self.claim.sentence("line", record["delta"])
        )
        who = (
            "a simulation: no silo's guard had a part in it, and none signed"
            if self.simulated
            else f"signed by the coordinator and by {signed} of {record['silos']} silos"
        )
        return [f"recomputed: {said}", who]


def body_of(
    folder: Path,
    results: "Results",
    place: int | None,
    people: Mapping[str, str],
    said: Mapping[str, Any],
) -> dict[str, Any]:
    """What is certified of a run's cell; InputError for a folder that cannot be, RunError for one that lies.

    `people` are answers to `PEOPLE`; `said` is put beside it: what was not protected, and an audit.
    """
    cells = {cell["cell"]: cell for cell in results.cells}
    if place is None and len(cells) != 1:
        raise InputError(
            f"{folder}: has {len(cells)} finished cells; say which model is released by --cell NUMBER"
        )
    if (cell := cells.get(next(iter(cells)) if place is None else place)) is None:
        raise InputError(f"{folder}: has no finished cell {place}")
    if unknown := sorted(set(people) - set(PEOPLE)):
        raise InputError(f"{unknown[0]}: expected one of {', '.join(PEOPLE)}")
    if cell["cell"] in results.differs:
        raise RunError(f"{folder}: cell {cell['cell']} claims something else than its releases give")
    model = bytes_of(folder / cell["model"])
    evaluated = cell["evaluation"] is not None and cell["evaluation"]["published"] == "without noise"
    kept = [name for name in cell if name in _OF_THE_RECORD or (name.startswith("test_") and not evaluated)]
    body = {
        "run": {
            "name": results.name,
            "title": results.title,
            "date": results.date,
            "rerun": results.rerun,
            "versions": dict(results.versions),
            "cells": len(cells),
            "released_cells": sum(each["noise"] == "release" for each in results.cells),
        },
        "model": {"file": cell["model"], "bytes": len(model), "sha256": sha256(model)},
        "record": {name: cell[name] for name in kept},
        "tuned": results.tuned and results.tuned.model_dump(mode="json"),
        "people": {name: people.get(name) for name in PEOPLE},
        **said,
    }
    # plain data as a reader of the file will have it: tuples are lists, keys are text
    return {**json.loads(spelled(body))}


def certificate(body: Mapping[str, Any], silos: Sequence[Mapping[str, Any]], key: Ed25519PrivateKey) -> bytes:
    """The document, signed by the coordinator; InputError for silos that signed another body."""
    for each in silos:
        if each.get("body") != sha256(spelled(body)):
            raise InputError(
                f"silo {each.get('silo')} signed another certificate than this: run, answers or audit were "
                "changed since, so let it sign the present one"
            )
    document = {"format": FORMAT, "body": body, "silos": sorted(silos, key=lambda each: str(each.get("silo")))}
    return spelled({**document, "coordinator": signature(key, SAYS, document)})


def read_certificate(path: Path) -> dict[str, Any]:
    """A certificate as it is, nothing recomputed and no signature looked at; InputError for what is none."""
    tree = read_spelled(bytes_of(path), path)
    if tree.get("format") != FORMAT or set(tree) != {"format", "body", "silos", "coordinator"}:
        raise InputError(f"{path}: is no certificate of a model; expected the format {FORMAT!r}")
    return tree


def verified(path: Path, signers: Mapping[str, Ed25519PublicKey], model: Path | None = None) -> Verified:
    """Recompute a certificate without the data; RunError names the first thing that differs.

    Guarantee: whatever passes was signed, byte for byte, by the coordinator whom `signers` names, and, if it is
    of a deployment, by every silo by itself; its figures are what its releases give, none of them is below what a
    silo charged, and `model`, if it is given, is the model that was certified.
    """
    tree = read_certificate(path)
    try:
        if COORDINATOR not in signers:
            raise InputError(f"the keys that you trust have none of the {COORDINATOR}")
        document = {name: tree[name] for name in ("format", "body", "silos")}
        check_signature(tree["coordinator"], SAYS, document, signers[COORDINATOR], f"the {COORDINATOR}")
        claim = recomputed(tree["body"])
        _check_silos(tree, signers, claim)
        if model is not None and sha256(content := bytes_of(model)) != tree["body"]["model"]["sha256"]:
            raise InputError(f"{model} ({len(content)} bytes) is not the model that was certified")
    except InputError as error:
        raise RunError(f"{path}: {error}") from None
    except Exception as error:  # whoever has signed it: a document of another make ends in one line
        raise RunError(
            f"{path}: is not a whole certificate ({type(error).__name__}: {printable(str(error), 100)})"
        ) from None
    return Verified(tree["body"], tree["silos"], claim)


def recomputed(body: Mapping[str, Any]) -> PrivacyClaim[Any] | None:
    """The claim of the releases; InputError names the first figure of the record that they do not give."""
    record = body["record"]
    _check_sizes(record)
    entry = entry_of(record)
    figures = figures_of(entry.claim, record["delta"])
    for name, value in figures.items():
        if not _same(record[name], value, name):
            raise InputError(
                f"record.{name} is {record[name]!r:.60}, and the recorded releases give {value!r:.60}"
            )
    if not entry.agrees:
        raise InputError("record: " + _disagreement(entry))
    return entry.claim


def _check_sizes(record: Mapping[str, Any]) -> None:
    """InputError for releases that would take a reader's memory, before any of them is unfolded."""
    evaluation = record.get("evaluation") or {"releases": []}
    rounds = 0
    for release in (*record["releases"], *evaluation["releases"]):
        held = [value if isinstance(value, list) else [value] for value in release["participation"].values()]
        counts = [value for values in held for value in values if isinstance(value, int)]
        rounds += sum(abs(int(count)) for count in (*counts, *(count for _, count in release["clips"])))
    if rounds > _MOST_ROUNDS or abs(int(record["silos"])) > _MOST_SILOS:
        raise InputError("record: has more rounds or silos than any run")


def _same(said: Any, value: Any, name: str) -> bool:
    if isinstance(value, dict):
        return isinstance(said, dict) and all(_same(said[key], value[key], name) for key in value | said)
    if not isinstance(value, float) or isinstance(said, bool) or not isinstance(said, float | int):
        return bool(said == value)
    least, most = value * (1.0 - 1e-8), value * (1.01 if name.startswith("epsilon") else 1.0 + 1e-8)
    return least <= said <= most


def _disagreement(entry: LedgerEntry) -> str:
    told = entry.told
    if told["noise"] == "release" and told["engine"] != "deployment":
        return "noise for release is drawn by a deployment only"
    return "its releases are not those of all rounds, silos and evaluations of its scenario"


def _check_silos(
    tree: Mapping[str, Any], signers: Mapping[str, Ed25519PublicKey], claim: PrivacyClaim[Any] | None
) -> None:
    if tree["silos"] == [] and tree["body"]["record"]["engine"] != "deployment":
        return
    from fedpriv.silo.attest import SAYS as SILO_SAYS  # torch, which no simulation's certificate needs
    from fedpriv.silo.attest import charged_more

    if not isinstance(tree["silos"], list):
        raise InputError("silos: expected a list")
    record, body = tree["body"]["record"], sha256(spelled(tree["body"]))
    signed = dict[int, Mapping[str, Any]]()
    for each in tree["silos"]:
        number = each["silo"]
        if isinstance(number, bool) or not isinstance(number, int) or number in signed:
            raise InputError(f"silos: {number!r:.20} is no silo's number, or is there twice")
        name, facts = f"silo-{number}", {key: value for key, value in each.items() if key != "signed"}
        if name not in signers:
            raise InputError(f"the keys that you trust have none of {name}")
        check_signature(each["signed"], SILO_SAYS, facts, signers[name], name)
        if each["body"] != body:
            raise InputError(f"{name} signed another certificate than this")
        mu = None if claim is None else claim.guarantee.mu
        if (reason := charged_more(facts, record["trust"], mu)) is not None:
            raise InputError(reason)
        signed[number] = each
    wanted = set(range(record["silos"])) if record["engine"] == "deployment" else set()
    if missing := sorted(wanted - set(signed)):
        raise InputError(
            f"silo {', '.join(map(str, missing[:8]))}: has not signed, and is a part of this deployment"
        )
    if strange := sorted(set(signed) - wanted):
        raise InputError(f"silo {strange[0]} signed, and has no part in this run")
