"""`fedpriv certify` and `fedpriv silo sign`: make a certificate, have silos sign it, recompute one.

Views of a certificate: a page for an information-governance board, and a model card.

Both are made of the JSON document alone, and say where it is.  A question that no program can answer has the
answer that a person gave, or "to be filled in by …".  Nothing here claims that a law is complied with.

The questions follow the subjects of NIST SP 800-226 (2025), of SATRE 3.3.09 (a record of the criteria for each
released output), and of tier 3 of the OpenDP registry of deployments.
"""

import dataclasses
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import escape

from fedpriv.addons.certificate.certify import (
    COORDINATOR,
    PEOPLE,
    Verified,
    body_of,
    certificate,
    read_certificate,
    recomputed,
    verified,
)
from fedpriv.cli.options import print_text
from fedpriv.core.errors import FedprivError, InputError, printable
from fedpriv.core.figures import counted, delta_figure, epsilon_figure, lower_figure, upper_figure
from fedpriv.core.files import write_bytes, write_text
from fedpriv.core.signed import (
    bytes_of,
    made_key,
    public_key,
    public_line,
    read_spelled,
    sha256,
    signers_of,
    spelled,
)
from fedpriv.data.named import schema_of
from fedpriv.noise.trust import trust_named
from fedpriv.scenario.published import Tuned
from fedpriv.show.page import export_run
from fedpriv.show.statement import NOT_PROTECTED, Statement, load_audit, make_statements
from fedpriv.study.results import Results, read_claims

NIST, SATRE, OPENDP = "NIST SP 800-226", "SATRE 3.3.09", "OpenDP registry, tier 3"
_BOTH = f"{NIST}; {OPENDP}"
_NO_LAW = (
    "This document states facts of one computation. It is no statement that any law or policy is complied with: "
    "that is for the people who file it."
)
_SIMULATED = (
    "A SIMULATION. Its noise follows from a seed that is written in it, no silo's guard had a part in it, and "
    "none signed: the figures say what a deployment of this scenario would guarantee. Nothing here is protected."
)
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#1c2430}"
    "h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2rem}dt{font-weight:600;margin-top:.8rem}"
    "dd{margin:0;overflow-wrap:anywhere}.for{color:#5a6675;font-weight:400;font-size:.85rem}"
    ".note{border-left:4px solid #b3541e;padding:.5rem 1rem;background:#fbf3ec}.open{color:#b3541e}"
    "@media print{body{margin:0}}"
)


_OTHERS = (
    "Records against all models of this run together: the figures are of the one that is certified. Choosing it "
    "among them by what was measured is not covered."
)


class Answer(NamedTuple):
    """A question, the documents that ask it, and the fact."""

    question: str
    asked_by: str
    text: str

    @property
    def html(self) -> str:
        """Entry of the page's list, in which an answer that a person still has to give stands out."""
        text = escape(self.text)
        shown = f'<span class="open">{text}</span>' if self.text.startswith("to be filled in by ") else text
        return (
            f'<dt>{escape(self.question)} <span class="for">{escape(self.asked_by)}</span></dt>\n<dd>{shown}</dd>'
        )


def sections(of: Verified) -> list[tuple[str, list[Answer]]]:
    """List the questions in the order of the page.

    The privacy statement is of the certified cell alone: everything in it is recomputed.
    """
    body, run, model, record = of.body, of.body["run"], of.body["model"], of.body["record"]
    scenario = record["scenario"]
    (statement,) = make_statements(
        Results(
            name=run["name"],
            title=run["title"],
            engine=record["engine"],
            complete=True,
            axes={},
            seeds=[],
            published=None,
            cells=[record],
            versions=run["versions"],
            rerun=None,
            tuned=body["tuned"] and Tuned.model_validate(body["tuned"]),
            date=run["date"],
        )
    )
    return [
        (
            "What is released, and why",
            [
                Answer(
                    "Which artefact may leave?",
                    SATRE,
                    f"{model['file']}, {model['bytes']} bytes, SHA-256 {model['sha256']}",
                ),
                Answer(
                    "What is it?",
                    OPENDP,
                    f"{scenario['model']['name']}, a vector of {record['dimension']} numbers, trained by "
                    f"{scenario['algorithm']['name']} on {scenario['data']['name']}, "
                    f"{counted(record['silos'], 'silo')}, {counted(record['rounds'], 'round')}; "
                    f"run {run['name']!r} of {run['date']}",
                ),
                Answer("For which purpose?", f"{OPENDP}; {SATRE}", _person(body, "purpose")),
                Answer("For which use is it intended, and for which not?", OPENDP, _person(body, "intended_use")),
                Answer("Who answers questions?", OPENDP, _person(body, "contact")),
                Answer("Who approved the release, by which criteria?", SATRE, _person(body, "approved_by")),
            ],
        ),
        ("The guarantee", _guarantee(of, statement)),
        (
            "Who is trusted, and with what",
            [
                Answer(
                    "Against whom does it protect?",
                    _BOTH,
                    f"{trust_named(statement.trust).title}: {statement.protection}",
                ),
                Answer("Who drew the noise?", NIST, statement.noise or "there is none"),
                Answer(
                    "Who signed this?",
                    SATRE,
                    "the coordinator alone: a simulation"
                    if of.simulated
                    else f"the coordinator; {of.about}; their keys are in certificate.json",
                ),
                Answer("Where do raw records lie, and who has them?", NIST, _person(body, "holders_of_records")),
                Answer("Who can reach records, ledger and keys?", NIST, _person(body, "access_to_records")),
                Answer("When is what deleted?", NIST, _person(body, "retention")),
            ],
        ),
        (
            "The same records in other releases",
            [
                Answer(f"Silo {each['silo']}: how often before, and what is left?", _BOTH, _of_silo(each))
                for each in of.silos
            ]
            or [
                Answer("How often were these records used before?", _BOTH, "not known: no silo's ledger was asked")
            ],
        ),
        ("Correctness and limits", _limits(of, statement)),
    ]


def _person(body: Mapping[str, Any], name: str) -> str:
    return body["people"].get(name) or f"to be filled in by {PEOPLE[name]}"


def _guarantee(of: Verified, statement: Statement) -> list[Answer]:
    if of.claim is None:
        return [Answer("Which ε and δ?", NIST, "none: the run adds no noise, and nothing is guaranteed")]
    return [
        Answer("Which unit is protected?", _BOTH, statement.unit),
        Answer("Which data sets are neighbours?", _BOTH, f"{statement.relation}; hidden is {statement.hidden}"),
        Answer("Which ε and δ?", _BOTH, of.claim.sentence("line", of.body["record"]["delta"])),
        Answer(
            "What can an attacker do?",
            NIST,
            f"who knows all else and guesses about one {of.claim.unit.noun} is right in at most "
            f"{statement.levels[0].attacker} of cases, where blind guessing is in 50 %",
        ),
        Answer("What weakens it?", NIST, " ".join(weaknesses(of, statement))),
        Answer("Why this ε?", _BOTH, _person(of.body, "reason_for_epsilon")),
        Answer(
            "Which releases add up to it?",
            _BOTH,
            f"{'; '.join(statement.mechanisms)}. What is computed from them alone, such as the model, costs "
            "nothing more.",
        ),
        Answer(
            "What does it take for granted?",
            _BOTH,
            " ".join([*statement.loss_assumptions, *statement.assumptions]),
        ),
    ]


def weaknesses(of: Verified, statement: Statement) -> list[str]:
    """List what weakens the figures, for the page and the card."""
    record = of.body["record"]
    return [
        *([f"NOT ALL SILOS SIGNED: {of.about}."] if of.unsigned else []),
        "This is a simulation, whose noise anybody can recompute and remove."
        if of.simulated
        else "This is of a release: who drew the noise, and from which key, is said below.",
        *statement.caveats,
        _declared(of, record["scenario"]["data"]),
        "Settings were chosen by fedpriv tune, and what that cost is said below."
        if of.body["tuned"]
        else "Whether settings were chosen by a look at these records, no file of the run says; that is for the "
        "coordinator to answer.",
        *([_runs_of(each) for each in of.silos] or ["Whether these records were used before is not known."]),
        *([] if of.simulated else [_MODEL]),
    ]


_MODEL = (
    "That the model is the one that this run gave is the coordinator's word: whichever run it came from, a silo's "
    "records are protected by all of that silo's runs together."
)


def _declared(of: Verified, data: Mapping[str, Any]) -> str:
    """Say who declared ranges and vocabularies public."""
    table = data.get("table")
    if table is None and schema_of(data["name"], None) is not None:
        return "Ranges, vocabularies and classes of the table are public, as fedpriv describes this data set."
    if table is None:
        return "Shapes of records and the number of classes are taken to be public, as the scenario has them."
    signers = [each for each in of.silos if each["table_public"]]
    silos = f", and by the policies of {counted(len(signers), 'silo')} that signed" if signers else ""
    return (
        "Ranges, vocabularies, classes and sites of the table were declared public by the coordinator's scenario "
        f"(data.table.public = {str(table['public']).lower()}){silos}: if they were read off the "
        "records, they tell of them whatever the noise."
    )


def _runs_of(each: Mapping[str, Any]) -> str:
    """Describe the other runs of a silo's records, and what all runs cost together."""
    parts = [("records", each["training"]), *([("test records", each["tests"])] if "tests" in each else [])]
    return f"Silo {each['silo']} had {', and '.join(_runs_on(what, facts) for what, facts in parts)}."


def _runs_on(what: str, facts: Mapping[str, Any]) -> str:
    runs, again = facts["spent"]["runs"] - 1, facts["runs_of_this_scenario"] - 1
    same = f", {again} of the very same scenario" if again else ""
    more = f"; all together are {_amount(facts['spent'], 'more than any budget')}" if runs else ""
    return f"{counted(runs, 'other run')} on its {what}{same}{more}"


def _amount(charged: Mapping[str, Any], without_noise: str) -> str:
    """A charge, or several together, with the probability of its slack: without that a μ is no promise."""
    if (mu := charged["mu"]) is None:
        return without_noise
    slack = charged["slack"]
    return f"μ = {upper_figure(mu)}" + (f" but for a probability of {upper_figure(slack, 3)}" if slack else "")


def _of_silo(each: Mapping[str, Any]) -> str:
    facts, allow = each["training"], each["policy"]["allow"]
    but_for = f" and a probability of {lower_figure(allow['slack'], 3)}" if allow["slack"] else ""
    return "; ".join(
        [
            f"{counted(facts['before']['runs'], 'run')} before this one; it was charged "
            + _amount(facts["charged"], "as a run without noise"),
            f"spent by all: {_amount(facts['spent'], 'more than any budget')}, of a lifetime budget of "
            f"{lower_figure(allow['budget'])}{but_for}, left for one more run {lower_figure(facts['left']['mu'])}",
            f"policy SHA-256 {each['policy']['sha256']}, fedpriv {each['fedpriv']}",
            *(["THE POLICY ANSWERS RUNS WITHOUT NOISE: its budget bounds nothing"] if allow["noise_free"] else []),
        ]
    )


def _limits(of: Verified, statement: Statement) -> list[Answer]:
    body, audit = of.body, of.body["audit"]
    audited = (
        "none was stored"
        if audit is None
        else (
            f"by the coordinator's word {audit['trials']} canaries show at least μ = {lower_figure(audit['mu'])} "
            f"of {upper_figure(audit['claimed_mu'])}: {'the claim stands' if audit['stands'] else 'IT IS REFUTED'}"
        )
    )
    scores = ", ".join(
        f"{name.removeprefix('test_').replace('_', ' ')} {value:.4g}"
        for name, value in body["record"].items()
        if name.startswith("test_") and isinstance(value, float)
    )
    return [
        Answer("Was the claim attacked?", NIST, audited),
        Answer("What is not protected?", _BOTH, " ".join([*body["not_protected"], *statement.evaluations])),
        Answer(
            "How good is it?",
            NIST,
            f"by the coordinator's word: {scores}" if scores else "this document has no score",
        ),
        Answer("And for smaller groups of people?", NIST, _person(body, "subgroups")),
        Answer(
            "Which programs computed it?",
            _BOTH,
            ", ".join(f"{name} {version}" for name, version in sorted(body["run"]["versions"].items())),
        ),
    ]


def _first_line(of: Verified) -> str:
    """Signers who vouch for a certificate, for the first line of a page."""
    return _SIMULATED if of.simulated else f"{of.about[0].upper()}{of.about[1:]}."


def page(of: Verified) -> str:
    """The page that a board files: HTML that stands alone, and prints."""
    run = of.body["run"]
    parts = [
        part
        for heading, answers in sections(of)
        for part in (f"<h2>{escape(heading)}</h2>\n<dl>", *(each.html for each in answers), "</dl>")
    ]
    first = f'<p class="note"><strong>{escape(_first_line(of))}</strong></p>\n'
    title = escape(f"Certificate of a model: {run['title'] or run['name']}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{first}<h1>{title}</h1>\n"
        f"<p>{escape(_NO_LAW)} The facts are those of certificate.json beside it, which <code>fedpriv certify "
        "--verify</code> recomputes without the data.</p>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def model_card(of: Verified) -> str:
    """The model card: Markdown with the metadata block that model hubs read."""
    run, record = of.body["run"], of.body["record"]
    head = [
        *("---", "tags:", "- differential-privacy", "- federated-learning", "- fedpriv", "---"),
        "",
        f"> **{_first_line(of)}**",
        "",
        f"# {_plain(run['title'] or run['name'])}",
        "",
    ]
    if of.claim is not None:
        head += [
            f"ε = {epsilon_figure(record['epsilon'])} at δ = {delta_figure(record['delta'])} for {record['unit']} "
            f"({record['relation']}).",
            "",
        ]
    facts = [
        fact
        for heading, answers in sections(of)
        for fact in (
            f"## {heading}\n",
            *(f"**{_plain(each.question)}** {_plain(each.text)}\n" for each in answers),
        )
    ]
    return "\n".join(
        [*head, *facts, _NO_LAW, "certificate.json beside it recomputes: `fedpriv certify --verify`.", ""]
    )


def _plain(text: str) -> str:
    """Another party's text as one line that is neither markup nor a link."""
    line = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>#|!" else letter for letter in line)


CERTIFICATE, PAGE, CARD = "certificate.json", "certificate.html", "model-card.md"


def verify(path: Path, keys: Path | None, model: Path | None) -> None:
    """Print what holds of a certificate; RunError names the first thing that differs."""
    if keys is None:
        raise InputError(
            '--keys FILE: say whom you trust, a line each, "coordinator ssh-ed25519 AAAA…" and '
            '"silo-0 ssh-ed25519 AAAA…", as they told you: a certificate that names its own signers proves nothing'
        )
    compared = "the model is the one that was certified" if model else "no --model was given to compare"
    print_text("\n".join([*verified(path, signers_of(keys), model).lines, compared, ""]))


def certify(
    folder: Path, key: Path, cell: int | None, people: Path | None, answers: Sequence[str], silos: Sequence[Path]
) -> None:
    """Write a run's certificate and its views into its folder."""
    results, audit = read_claims(folder), load_audit(folder)
    extra = {
        "audit": None if audit is None else dataclasses.asdict(audit),
        "not_protected": [*NOT_PROTECTED, *([_OTHERS] if len(results.cells) > 1 else [])],
    }
    body = body_of(folder, results, cell, _people(people, answers), extra)
    recomputed(body)
    new = not key.exists()
    own, signed = made_key(key), [read_spelled(bytes_of(path), path) for path in silos]
    path = folder / CERTIFICATE
    write_bytes(path, certificate(body, signed, own))
    found = verified(path, {COORDINATOR: own.public_key(), **_as_they_say(signed)}, all_silos=False)
    lines = [f"{COORDINATOR} {public_line(own.public_key())}", *found.lines]
    if found.simulated or signed:
        write_text(folder / PAGE, page(found))
        write_text(folder / CARD, model_card(found))
        written = f"{path}, {PAGE}, {CARD} and {export_run(folder, 'ro-crate').name}"
    else:
        lines.append(
            f"a draft: let each silo call `fedpriv silo sign POLICY {path}`, and give what it writes by --signed"
        )
        written = str(path)
    if new:
        sys.stderr.write(f"fedpriv: made the key {key}, mode 0600; readers trust its first line below\n")
    print_text("\n".join([*lines, f"written: {written}"]) + "\n")


def sign(policy: Path, path: Path, out: Path | None) -> None:
    """Write what a silo signs of a certificate, after recomputing it from its own ledger and its scenario."""
    from fedpriv.addons.certificate.attest import attested

    body: Mapping[str, Any] = read_certificate(path)["body"]
    try:
        try:
            recomputed(body)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        facts = attested(policy, body["record"], sha256(spelled(body)))
    except FedprivError:
        raise
    except Exception as error:  # a coordinator's document of another make
        raise InputError(f"{path}: is not a whole certificate ({type(error).__name__})") from None
    target = out or path.with_name(f"silo-{facts['silo']}.json")
    write_bytes(target, spelled(facts))
    sys.stdout.write(f"silo-{facts['silo']} {facts['signed']['key']}\nwritten: {target}\n")


def _people(path: Path | None, answers: Sequence[str]) -> dict[str, str]:
    """What people say: a TOML file, and KEY=TEXT over it."""
    found: dict[str, Any] = {}
    if path is not None:
        try:
            found = tomllib.loads(bytes_of(path).decode())
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"{path}: cannot be read as TOML: {error}") from None
    for answer in answers:
        name, equals, text = answer.partition("=")
        if not equals:
            raise InputError(f"--say {answer}: expected KEY=TEXT, with one of {', '.join(PEOPLE)}")
        found[name.strip()] = text.strip()
    for name, text in found.items():
        if not isinstance(text, str) or not text:
            raise InputError(f"{name}: expected a text")
    return {name: printable(text, 2000) for name, text in found.items()}


def _as_they_say(signed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keys of silos as their parts name them: to see at once whether the whole agrees, not whom to trust."""
    try:
        return {
            f"silo-{each['silo']}": public_key(each["signed"]["key"].encode(), f"silo {each['silo']}")
            for each in signed
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"--signed: is nothing that a silo signed ({type(error).__name__})") from None
