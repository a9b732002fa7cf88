"""The certificate of a released model: one signed JSON document, from which everybody can recompute the claim.

    about         who has signed, and who has not: the first line
    body          the model's digest, the run's record with its releases, tuning, audit, what people said of it
    coordinator   the signature of the coordinator over all of that
    format        "fedpriv certificate 2"
    silos         what each silo's administrator signed: policy, charges, budget left (fedpriv/silo/attest.py)

A record has no score that was measured on the silos' own records, and no folder of a machine.  What of it follows
from its scenario is recomputed.  Who signed is decided by a file that the reader of a certificate has from
elsewhere (`signers_of`), never by the certificate.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedpriv.core.errors import InputError, RunError, printable
from fedpriv.core.figures import counted
from fedpriv.core.signed import bytes_of, check_signature, read_spelled, sha256, signature, spelled
from fedpriv.rounds.claim import PrivacyClaim, figures_of
from fedpriv.rounds.entries import LedgerEntry, entry_of

if TYPE_CHECKING:
    from fedpriv.study.results import Results

FORMAT = "fedpriv certificate 2"
SAYS = FORMAT
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
    *("epsilon_paper", "rho", "evaluation", "silos", "clients", "rounds", "records", "unread", "smallest_silo"),
    *("batch", "dimension", "missed", "engine", "scenario"),
)
_MOST_ROUNDS, _MOST_SILOS = 10**7, 10**6


@dataclass(frozen=True)
class Verified:
    """A certificate that was recomputed, and what can be said of it."""

    body: Mapping[str, Any]
    silos: Sequence[Mapping[str, Any]]
    claim: PrivacyClaim[Any] | None
    from_scenario: bool = True
    """Whether the scenario is one that could be planned here; of a deployment it always is by its silos."""

    @property
    def simulated(self) -> bool:
        return bool(self.body["record"]["engine"] != "deployment")

    @property
    def about(self) -> str:
        """Who has signed, and who has not."""
        return about(self.body, self.silos)

    @property
    def unsigned(self) -> list[int]:
        """The silos of the scenario that have not signed; none of a simulation."""
        return _unsigned(self.body, self.silos)

    @property
    def lines(self) -> list[str]:
        """What holds, as the terminal says it."""
        record = self.body["record"]
        said = (
            "no noise: nothing is claimed" if self.claim is None else self.claim.sentence("line", record["delta"])
        )
        unplanned = _HERE_UNKNOWN if self.simulated else _BY_SILOS_ALONE
        return [self.about, f"recomputed: {said}", *([] if self.from_scenario else [unplanned])]


_BY_SILOS_ALONE = (
    "the scenario's model is code that is none of fedpriv's, which no certificate may run: its noise was "
    "recomputed by the silos that signed, and not here"
)
_HERE_UNKNOWN = "the scenario names code that is not here: the record was compared with its releases alone"


def about(body: Mapping[str, Any], silos: Sequence[Mapping[str, Any]]) -> str:
    """The first line of a certificate: how many silos of the scenario have signed, and which have not."""
    if body["record"]["engine"] != "deployment":
        return "a simulation: no silo's guard had a part in it, and none signed"
    from fedpriv.rounds.recomputed import format_silos

    count, missing = _silos_of(body), _unsigned(body, silos)
    said = f"{count - len(missing)} of {counted(count, 'silo')} signed"
    if not missing:
        return said
    return f"{said}: {format_silos(missing)} {'has' if len(missing) == 1 else 'have'} not"


def _silos_of(body: Mapping[str, Any]) -> int:
    """Number of silos that the scenario has, whatever is written beside it."""
    from fedpriv.scenario.sections import FederationSection

    return FederationSection.model_validate(body["record"]["scenario"]["federation"]).silos


def _unsigned(body: Mapping[str, Any], silos: Sequence[Mapping[str, Any]]) -> list[int]:
    if body["record"]["engine"] != "deployment":
        return []
    return sorted(set(range(_silos_of(body))) - {each["silo"] for each in silos})


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
        reason = entry_of(cell).disagreement or "its figures are written otherwise"
        raise RunError(
            f"{folder}: cell {cell['cell']} claims something else than its releases and scenario give: {reason}"
        )
    from fedpriv.rounds.recomputed import without_paths

    model, scenario = bytes_of(folder / cell["model"]), without_paths(cell["scenario"])
    evaluated = cell["evaluation"] is not None and cell["evaluation"]["published"] == "without noise"
    kept = [name for name in cell if name in _OF_THE_RECORD or (name.startswith("test_") and not evaluated)]
    body = {
        "run": {
            "name": results.name,
            "title": results.title,
            "date": results.date,
            "versions": dict(results.versions),
            "cells": len(cells),
            "released_cells": sum(each["noise"] == "release" for each in results.cells),
        },
        "model": {"file": Path(cell["model"]).name, "bytes": len(model), "sha256": sha256(model)},
        "record": {
            **{name: cell[name] for name in kept},
            "point": {key: without_paths(value, key) for key, value in cell["point"].items()},
            "scenario": scenario,
            "scenario_sha256": sha256(json.dumps(cell["scenario"], sort_keys=True).encode()),
        },
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
    signed = sorted(silos, key=lambda each: str(each.get("silo")))
    document = {"about": about(body, signed), "body": body, "format": FORMAT, "silos": signed}
    return spelled({**document, "coordinator": signature(key, SAYS, document)})


def read_certificate(path: Path) -> dict[str, Any]:
    """A certificate as it is, nothing recomputed and no signature looked at; InputError for what is none."""
    tree = read_spelled(bytes_of(path), path)
    if str(tree.get("format")).startswith("fedpriv certificate ") and tree["format"] != FORMAT:
        raise InputError(
            f"{path}: has the format {printable(repr(tree['format']), 40)}, which silos signed without planning "
            f"the run again; certify the run anew for {FORMAT!r}"
        )
    if tree.get("format") != FORMAT or set(tree) != {"about", "format", "body", "silos", "coordinator"}:
        raise InputError(f"{path}: is no certificate of a model; expected the format {FORMAT!r}")
    return tree


def verified(
    path: Path, signers: Mapping[str, Ed25519PublicKey], model: Path | None = None, *, all_silos: bool = True
) -> Verified:
    """Recompute a certificate without the data; RunError names the first thing that differs.

    Guarantee: whatever passes was signed, byte for byte, by the coordinator whom `signers` names, and, if it is
    of a deployment, by every silo of its scenario by itself, or, without `all_silos`, by those that it says; its
    figures are what its releases give, and these are what its scenario gives; no silo was charged otherwise than
    that costs; and `model`, if it is given, is the model that was certified.
    """
    tree = read_certificate(path)
    try:
        if COORDINATOR not in signers:
            raise InputError(f"the keys that you trust have none of the {COORDINATOR}")
        document = {name: tree[name] for name in ("about", "format", "body", "silos")}
        check_signature(tree["coordinator"], SAYS, document, signers[COORDINATOR], f"the {COORDINATOR}")
        entry = recomputed(tree["body"])
        planned = _check_silos(tree, signers, entry)
        found = Verified(tree["body"], tree["silos"], entry.claim, planned)
        if tree["about"] != found.about:
            raise InputError(f"about is {printable(repr(tree['about']), 60)}, and it is: {found.about}")
        if all_silos and found.unsigned:
            raise InputError(found.about)
        if model is not None and sha256(content := bytes_of(model)) != tree["body"]["model"]["sha256"]:
            raise InputError(f"{model} ({len(content)} bytes) is not the model that was certified")
    except InputError as error:
        raise RunError(f"{path}: {error}") from None
    except Exception as error:  # whoever has signed it: a document of another make ends in one line
        raise RunError(
            f"{path}: is not a whole certificate ({type(error).__name__}: {printable(str(error), 100)})"
        ) from None
    return found


def recomputed(body: Mapping[str, Any]) -> LedgerEntry:
    """The record, with its claim; InputError names the first figure that releases or scenario do not give."""
    record = body["record"]
    _check_sizes(record)
    entry = entry_of(record)
    for name, value in _stated(entry).items():
        if name not in record or not _same(record[name], value, name):
            raise InputError(
                f"record.{name} is {record.get(name)!r:.80}, and releases and scenario give {value!r:.80}"
            )
    if (reason := entry.disagreement) is not None:
        raise InputError(f"record: {reason}")
    _check_words(body, entry)
    return entry


def _stated(entry: LedgerEntry) -> dict[str, Any]:
    """What of the record follows from scenario and releases; from releases alone where its code is not here.

    Guarantee: nothing is believed that the scenario decides: trust, silos, rounds, records, δ, participation.
    """
    from fedpriv.study.stored import stated_of

    record, cell = entry.record, entry.resolved
    if cell is None and record["engine"] == "deployment":
        raise InputError("record.scenario cannot be planned here; code of one's own is given with --import")
    if cell is None:
        return figures_of(entry.claim, entry.delta)
    noise: Literal["simulation", "release"] = "release" if record["noise"] == "release" else "simulation"
    stated: dict[str, Any] = json.loads(json.dumps(stated_of(cell, entry.streams, entry.tests, noise)))
    return stated


def _check_words(body: Mapping[str, Any], entry: LedgerEntry) -> None:
    """InputError for a name, a title, or rounds that silos missed, which the scenario does not have."""
    record, scenario = body["record"], body["record"]["scenario"]
    for name in ("name", "title"):
        if (said := body["run"][name]) != scenario[name]:
            said, right = (printable(repr(text), 60) for text in (said, scenario[name]))
            raise InputError(f"run.{name} is {said}, and the scenario's is {right}")
    for silo, rounds in record["missed"].items():
        known = silo.isdecimal() and int(silo) < record["silos"]
        if not known or any(not 1 <= t <= record["rounds"] for t in rounds):
            raise InputError("record.missed has silos or rounds that the scenario has not")


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
        return (
            isinstance(said, dict)
            and said.keys() == value.keys()
            and all(_same(said[key], value[key], name) for key in value)
        )
    if not isinstance(value, float) or isinstance(said, bool) or not isinstance(said, float | int):
        return bool(said == value)
    least, most = value * (1.0 - 1e-8), value * (1.01 if name.startswith("epsilon") else 1.0 + 1e-8)
    return least <= said <= most


def _check_silos(tree: Mapping[str, Any], signers: Mapping[str, Ed25519PublicKey], entry: LedgerEntry) -> bool:
    """Check what silos signed, and the releases by the shapes that they signed; whether these could be planned.

    InputError names the first silo, or figure, that differs.
    """
    record, body = tree["body"]["record"], sha256(spelled(tree["body"]))
    if not isinstance(tree["silos"], list):
        raise InputError("silos: expected a list")
    if record["engine"] != "deployment":
        if tree["silos"]:
            raise InputError(f"silo {tree['silos'][0]['silo']!r:.20} signed, and has no part in a simulation")
        return entry.resolved is not None
    from fedpriv.silo.attest import SAYS as SILO_SAYS  # torch, which no simulation's certificate needs

    signed = dict[int, Mapping[str, Any]]()
    for each in tree["silos"]:
        number = each["silo"]
        if isinstance(number, bool) or not isinstance(number, int) or number in signed:
            raise InputError(f"silos: {number!r:.20} is no silo's number, or is there twice")
        name, facts = f"silo-{number}", {key: value for key, value in each.items() if key != "signed"}
        if number not in range(_silos_of(tree["body"])):
            raise InputError(f"silo {number} signed, and has no part in this run")
        if name not in signers:
            raise InputError(f"the keys that you trust have none of {name}")
        check_signature(each["signed"], SILO_SAYS, facts, signers[name], name)
        if each["body"] != body:
            raise InputError(f"{name} signed another certificate than this")
        signed[number] = each
    return not signed or _check_planned(record, entry, signed)


def _check_planned(record: Mapping[str, Any], entry: LedgerEntry, signed: Mapping[int, Mapping[str, Any]]) -> bool:
    """Plan the run again, and compare streams and charges; False, and nothing compared, for other code."""
    from fedpriv.rounds.plan import plan_of
    from fedpriv.rounds.recomputed import objective_of, recompute
    from fedpriv.silo.attest import find_charge_difference

    cell, (first, *others) = entry.resolved, [each["shapes"] for each in signed.values()]
    assert cell is not None
    for number, shapes in zip(list(signed)[1:], others, strict=True):
        if shapes != first:
            raise InputError(f"silo {number} has records of other shapes than silo {next(iter(signed))}")
    if cell.model.code:
        return False
    again = recompute(
        cell,
        objective_of(cell, first),
        record["releases"],
        lambda step: plan_of(step, objective_of(step, first), released=True),
    )
    again.check(record)
    for number, facts in signed.items():
        if (reason := find_charge_difference(number, facts, again)) is not None:
            raise InputError(reason)
    return True
