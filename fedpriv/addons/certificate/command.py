"""Commands `fedpriv certify` and `fedpriv silo sign`, and views of a certificate.

A certificate is a signed JSON document on the released model of one cell, which is one run of a sweep.  Its body
has the record of the cell (scenario, releases, claim) and people's answers.  Silos add signed statements on
their privacy budgets, under the key "silos".

The views show a verified certificate: a short page for a board, a page of all questions, and a model card.  The
page and the card list questions and answers.  A question that no program can answer has a person's answer, or "to
be filled in by …".  Each view says that it states no compliance with a law.

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
    RESPONSIBLE_PEOPLE,
    STATEMENT_NAMES,
    VerifiedCertificate,
    format_envelopes,
    make_body,
    read_certificate,
    recompute_record,
    sign_certificate,
    verify_certificate,
)
from fedpriv.claims.claim import PROTECTION_LEVELS, has_external_first_step
from fedpriv.cli.options import print_text
from fedpriv.core.errors import FedprivError, InputError, refuse, sanitize_line
from fedpriv.core.figures import (
    best_guess,
    format_count,
    format_epsilon_delta,
    format_lower,
    format_upper,
    format_upper_delta,
    format_upper_epsilon,
    format_upper_percent,
)
from fedpriv.core.files import write_bytes, write_text
from fedpriv.core.signed import (
    canonical_json,
    format_public_key,
    load_or_create_key,
    parse_public_key,
    read_canonical_json,
    read_file_bytes,
    read_signers,
    sha256,
)
from fedpriv.data.named import find_schema
from fedpriv.noise.trust import find_trust
from fedpriv.scenario.published import Tuning
from fedpriv.show.page import export_run
from fedpriv.show.statement import NOT_PROTECTED, Statement, load_audit, make_statements
from fedpriv.study.results import Results, read_claims

NIST, SATRE, OPENDP = "NIST SP 800-226", "SATRE 3.3.09", "OpenDP registry, tier 3"
_NIST_AND_OPENDP = f"{NIST}; {OPENDP}"
_NO_LAW_NOTE = (
    "This document states facts of one computation. It is no statement that any law or policy is complied with: "
    "that is for the people who file it."
)
_SIMULATION_NOTE = (
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


_OTHER_MODELS_NOTE = (
    "Records against all models of this run together: the figures are of the one that is certified. Choosing it "
    "among them by what was measured is not covered."
)


class CertificateAnswer(NamedTuple):
    """Question of a view, the documents that require it, and its answer."""

    question: str
    source: str
    text: str

    @property
    def html(self) -> str:
        """Entry of the page's list, which highlights an answer that a person still has to give."""
        text = escape(self.text)
        entry = f'<span class="open">{text}</span>' if self.text.startswith("to be filled in by ") else text
        return f'<dt>{escape(self.question)} <span class="for">{escape(self.source)}</span></dt>\n<dd>{entry}</dd>'


def sections(certificate: VerifiedCertificate) -> list[tuple[str, list[CertificateAnswer]]]:
    """List headings and answers in the order of the page.

    The privacy statement is about the certified cell alone.  Its figures are recomputed from the releases, or are
    those of the record, which `verify_certificate` has compared with recomputed ones.
    """
    body, statement = certificate.body, _make_statement(certificate)
    run, model, record = body["run"], body["model"], body["record"]
    scenario = record["scenario"]
    return [
        (
            "What is released, and why",
            [
                CertificateAnswer(
                    "Which artefact may leave?",
                    SATRE,
                    f"{model['file']}, {model['bytes']} bytes, SHA-256 {model['sha256']}",
                ),
                CertificateAnswer(
                    "What is it?",
                    OPENDP,
                    f"{scenario['model']['name']}, a vector of {record['dimension']} numbers, trained by "
                    f"{scenario['algorithm']['name']} on {scenario['data']['name']}, "
                    f"{format_count(record['silos'], 'silo')}, {format_count(record['rounds'], 'round')}; "
                    f"run {run['name']!r} of {run['date']}",
                ),
                CertificateAnswer("For which purpose?", f"{OPENDP}; {SATRE}", _person_answer(body, "purpose")),
                CertificateAnswer(
                    "For which use is it intended, and for which not?",
                    OPENDP,
                    _person_answer(body, "intended_use"),
                ),
                CertificateAnswer("Who answers questions?", OPENDP, _person_answer(body, "contact")),
                CertificateAnswer(
                    "Who approved the release, by which criteria?", SATRE, _person_answer(body, "approved_by")
                ),
            ],
        ),
        ("The guarantee", _guarantee_answers(certificate, statement)),
        (
            "Who is trusted, and with what",
            [
                CertificateAnswer(
                    "Against whom does it protect?",
                    _NIST_AND_OPENDP,
                    f"{find_trust(statement.trust).title}: {statement.protection}",
                ),
                CertificateAnswer("Who drew the noise?", NIST, statement.noise or "there is none"),
                CertificateAnswer(
                    "Who signed this?",
                    SATRE,
                    "the coordinator alone: a simulation"
                    if certificate.is_simulation
                    else f"the coordinator; {certificate.about_line}; their keys are in certificate.json",
                ),
                CertificateAnswer(
                    "Where do raw records lie, and who has them?", NIST, _person_answer(body, "holders_of_records")
                ),
                CertificateAnswer(
                    "Who can reach records, ledger and keys?", NIST, _person_answer(body, "access_to_records")
                ),
                CertificateAnswer("When is what deleted?", NIST, _person_answer(body, "retention")),
            ],
        ),
        (
            "The same records in other releases",
            [
                CertificateAnswer(
                    f"Silo {silo_statement['silo']}: how often before, and what is left?",
                    _NIST_AND_OPENDP,
                    _describe_silo_budget(silo_statement),
                )
                for silo_statement in certificate.silos
            ]
            or [
                CertificateAnswer(
                    "How often were these records used before?",
                    _NIST_AND_OPENDP,
                    "not known: no silo's ledger was asked",
                )
            ],
        ),
        ("Correctness and limits", _limit_answers(certificate, statement)),
    ]


def _make_statement(certificate: VerifiedCertificate) -> Statement:
    """Make the privacy statement on the certified cell alone."""
    body, run, record = certificate.body, certificate.body["run"], certificate.body["record"]
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
            tuning=body["tuned"] and Tuning.model_validate(body["tuned"]),
            date=run["date"],
        )
    )
    return statement


def _person_answer(body: Mapping[str, Any], name: str) -> str:
    return body["people"].get(name) or f"to be filled in by {RESPONSIBLE_PEOPLE[name]}"


def _guarantee_answers(certificate: VerifiedCertificate, statement: Statement) -> list[CertificateAnswer]:
    if certificate.claim is None:
        return [
            CertificateAnswer("Which ε and δ?", NIST, "none: the run adds no noise, and nothing is guaranteed")
        ]
    return [
        CertificateAnswer("Which unit is protected?", _NIST_AND_OPENDP, statement.unit),
        CertificateAnswer(
            "Which data sets are neighbours?",
            _NIST_AND_OPENDP,
            f"{statement.relation}; hidden is {statement.hidden}",
        ),
        CertificateAnswer(
            "Which ε and δ?",
            _NIST_AND_OPENDP,
            certificate.claim.format_sentence("line", certificate.body["record"]["delta"]),
        ),
        CertificateAnswer(
            "What can an attacker do?",
            NIST,
            f"An attacker who knows all else and guesses about one {certificate.claim.unit.noun} is right in "
            f"{_share_of_cases(certificate.claim.guarantee.best_guess)}. Blind guessing is right in 50 %.",
        ),
        CertificateAnswer("What weakens it?", NIST, " ".join(list_weaknesses(certificate, statement))),
        CertificateAnswer("Why this ε?", _NIST_AND_OPENDP, _person_answer(certificate.body, "reason_for_epsilon")),
        CertificateAnswer(
            "Which releases add up to it?",
            _NIST_AND_OPENDP,
            f"{'; '.join(statement.mechanisms)}. What is computed from them alone, such as the model, costs "
            "nothing more.",
        ),
        CertificateAnswer(
            "What does it take for granted?",
            _NIST_AND_OPENDP,
            " ".join([*statement.loss_assumptions, *statement.assumptions]),
        ),
    ]


def list_weaknesses(certificate: VerifiedCertificate, statement: Statement) -> list[str]:
    """List the weaknesses of the figures for the page and the card."""
    record = certificate.body["record"]
    return [
        *([f"NOT ALL SILOS SIGNED: {certificate.about_line}."] if certificate.unsigned_silos else []),
        "This is a simulation, whose noise anybody can recompute and remove."
        if certificate.is_simulation
        else "This is of a release: who drew the noise, and from which key, is said below.",
        *statement.caveats,
        _describe_public_facts(certificate, record["scenario"]["data"]),
        "Settings were chosen by fedpriv tune, and what that cost is said below."
        if certificate.body["tuned"]
        else "Whether settings were chosen by a look at these records, no file of the run says; that is for the "
        "coordinator to answer.",
        *(
            [_describe_other_runs(silo_statement) for silo_statement in certificate.silos]
            or ["Whether these records were used before is not known."]
        ),
        *([] if certificate.is_simulation else [_MODEL_NOTE]),
    ]


_MODEL_NOTE = (
    "That the model is the one that this run gave is the coordinator's word: whichever run it came from, a silo's "
    "records are protected by all of that silo's runs together."
)


def _describe_public_facts(certificate: VerifiedCertificate, data: Mapping[str, Any]) -> str:
    """Describe in a sentence the public facts about the data, and who declared them public.

    These are ranges, vocabularies and classes of a table, or the shapes of records and the number of classes of
    other data.  `data` is the scenario's section.
    """
    table = data.get("table")
    # fedpriv itself describes the tables among its own data sets.
    if table is None and find_schema(data["name"], None) is not None:
        return "Ranges, vocabularies and classes of the table are public, as fedpriv describes this data set."
    if table is None:
        return "Shapes of records and the number of classes are taken to be public."
    count = sum(silo_statement["table_public"] is True for silo_statement in certificate.silos)
    silos = (
        f", {'and' if table['public'] else 'but'} by the policies of {format_count(count, 'silo')} that signed"
        if count
        else ""
    )
    return (
        f"Ranges, vocabularies, classes and sites of the table were {'' if table['public'] else 'not '}declared "
        f"public by the coordinator's scenario (data.table.public = {str(table['public']).lower()}){silos}: if "
        "they were read off the records, they tell of them whatever the noise."
    )


def _describe_other_runs(statement: Mapping[str, Any]) -> str:
    """Describe the other runs on a silo's records, and, if there are any, the composed cost of all runs.

    A first step is part of the certified run, with an entry of its own in the ledger of training records.
    """
    parts = [
        ("records", statement["training"], 1 + ("first_step" in statement)),
        *([("test records", statement["tests"], 1)] if "tests" in statement else []),
    ]
    return f"Silo {statement['silo']} had {', and '.join(_runs_on(*part) for part in parts)}."


def _runs_on(noun: str, facts: Mapping[str, Any], own_count: int) -> str:
    runs, repeat_count = facts["spent"]["runs"] - own_count, facts["runs_of_this_scenario"] - 1
    repeat_note = f", {repeat_count} of the very same scenario" if repeat_count else ""
    total_note = f"; all together are {_format_amount(facts['spent'], 'more than any budget')}" if runs else ""
    return f"{format_count(runs, 'other run')} on its {noun}{repeat_note}{total_note}"


def _format_amount(charge: Mapping[str, Any], without_noise: str) -> str:
    """Format one or several composed charges with their slack, or `without_noise` if their μ is None.

    μ is no guarantee without the slack, so that both are shown.
    """
    if (mu := charge["mu"]) is None:
        return without_noise
    slack = charge["slack"]
    return f"μ = {format_upper(mu)}" + (f" but for a probability of {format_upper(slack, 3)}" if slack else "")


def _describe_silo_budget(statement: Mapping[str, Any]) -> str:
    facts, allow = statement["training"], statement["policy"]["allow"]
    slack_note = f" and a probability of {format_lower(allow['slack'], 3)}" if allow["slack"] else ""
    return "; ".join(
        [
            f"{format_count(facts['before']['runs'] - ('first_step' in statement), 'run')} before this one; it "
            f"was charged {_format_amount(facts['charged'], 'as a run without noise')}"
            + (
                f" and, for its first step, {_format_amount(first_step['charged'], 'as one without noise')}"
                if (first_step := statement.get("first_step"))
                else ""
            ),
            f"spent by all: {_format_amount(facts['spent'], 'more than any budget')}, of a lifetime budget of "
            f"{format_lower(allow['budget'])}{slack_note}, "
            f"left for one more run {format_lower(facts['left']['mu'])}",
            f"policy SHA-256 {statement['policy']['sha256']}, fedpriv {statement['fedpriv']}",
            *(["THE POLICY ANSWERS RUNS WITHOUT NOISE: its budget bounds nothing"] if allow["noise_free"] else []),
        ]
    )


def _limit_answers(certificate: VerifiedCertificate, statement: Statement) -> list[CertificateAnswer]:
    body, audit = certificate.body, certificate.body["audit"]
    audit_text = (
        "none was stored"
        if audit is None
        else (
            f"by the coordinator's word {audit['trials']} canaries show at least μ = {format_lower(audit['mu'])} "
            f"of {format_upper(audit['claimed_mu'])}: {'the claim stands' if audit['stands'] else 'IT IS REFUTED'}"
        )
    )
    scores = ", ".join(
        f"{name.removeprefix('test_').replace('_', ' ')} {value:.4g}"
        for name, value in body["record"].items()
        if name.startswith("test_") and isinstance(value, float)
    )
    return [
        CertificateAnswer("Was the claim attacked?", NIST, audit_text),
        CertificateAnswer(
            "What is not protected?", _NIST_AND_OPENDP, " ".join([*body["not_protected"], *statement.evaluations])
        ),
        CertificateAnswer(
            "How good is it?",
            NIST,
            f"by the coordinator's word: {scores}" if scores else "this document has no score",
        ),
        CertificateAnswer("And for smaller groups of people?", NIST, _person_answer(body, "subgroups")),
        CertificateAnswer(
            "Which programs computed it?",
            _NIST_AND_OPENDP,
            ", ".join(f"{name} {version}" for name, version in sorted(body["run"]["versions"].items())),
        ),
    ]


def _first_line(certificate: VerifiedCertificate) -> str:
    """Return the first line of a view: how many silos signed and which did not, or a simulation's note."""
    return (
        _SIMULATION_NOTE
        if certificate.is_simulation
        else f"{certificate.about_line[0].upper()}{certificate.about_line[1:]}."
    )


def format_page(certificate: VerifiedCertificate) -> str:
    """Format all questions and answers as self-contained HTML that can be printed."""
    parts = [
        part
        for heading, answers in sections(certificate)
        for part in (f"<h2>{escape(heading)}</h2>\n<dl>", *(answer.html for answer in answers), "</dl>")
    ]
    return _format_html(certificate, "Certificate of a model", CERTIFICATE_FILE, parts)


def format_board_page(certificate: VerifiedCertificate) -> str:
    """Format the short page for a board as self-contained HTML, without figures of μ and zCDP."""
    parts = [
        part
        for heading, sentences in _board_sections(certificate, _make_statement(certificate)).items()
        for part in (
            f"<h2>{escape(heading)}</h2>\n<ul>",
            *(f"<li>{escape(sentence)}</li>" for sentence in sentences if sentence),
            "</ul>",
        )
    ]
    return _format_html(certificate, "For the board", f"{PAGE_FILE} and {CERTIFICATE_FILE}", parts)


def _format_html(certificate: VerifiedCertificate, kind: str, files: str, parts: Sequence[str]) -> str:
    """Format a page of its first line, its title, the files of its facts, and its parts."""
    run = certificate.body["run"]
    first_line = f'<p class="note"><strong>{escape(_first_line(certificate))}</strong></p>\n'
    title = escape(f"{kind}: {run['title'] or run['name']}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{first_line}<h1>{title}</h1>\n"
        f"<p>{escape(_NO_LAW_NOTE)} The facts are those of {escape(files)} beside it, which "
        "<code>fedpriv certify --verify</code> recomputes without the data.</p>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _board_sections(certificate: VerifiedCertificate, statement: Statement) -> dict[str, list[str]]:
    """Return the sentences of the page for a board, by heading.

    A sentence that does not apply is an empty text, which the page leaves out.  Of the caveats of `statement` the
    page has only those that begin with ε or δ.
    """
    body, record = certificate.body, certificate.body["record"]
    open_questions = [
        name.replace("_", " ") for name in sorted(RESPONSIBLE_PEOPLE) if not body["people"].get(name)
    ]
    public_facts = _describe_public_facts(certificate, record["scenario"]["data"])
    other_runs = [*filter(None, map(_describe_all_runs, certificate.silos))]
    audit_note = "That an attack was tried, and what it found, is the coordinator's word."
    return {
        "Who is protected, and against whom?": [
            f"Protected are {statement.protection}.",
            f"Hidden is {statement.hidden}.",
            f"Not protected: {' '.join(body['not_protected'])}",
        ],
        "What could an attacker at best guess?": _describe_guesses(certificate),
        "What weakens this?": [
            f"NOT ALL SILOS SIGNED: {certificate.about_line}." if certificate.unsigned_silos else "",
            "This is a simulation, whose noise anybody can recompute and remove."
            if certificate.is_simulation
            else "",
            public_facts,
            *(caveat for caveat in statement.caveats if caveat.startswith(("ε", "δ"))),
            "Settings were chosen by fedpriv tune, and the certificate says whether the figures have that cost."
            if body["tuned"]
            else "",
            *other_runs,
            ""
            if other_runs or not certificate.silos
            else "No ledger of training records of a silo that signed has another run.",
            *(
                f"Silo {silo['silo']}'s policy also answers runs without noise."
                for silo in certificate.silos
                if silo["policy"]["allow"]["noise_free"]
            ),
        ],
        "What did nobody check?": [
            # Only a scenario that describes its table declares ranges public.
            "" if "public" not in (record["scenario"]["data"].get("table") or ()) else _UNCHECKED_RANGES,
            "Whether settings were chosen by a look at these records." if not body["tuned"] else "",
            ""
            if certificate.silos
            else "Whether the same records were used before, because no silo's ledger was asked.",
            "Whether one person has several records, or records in several silos.",
            "Whether scores are true, and whether this run gave the model: both are the coordinator's word.",
            "Where the means come from by which columns of numbers were scaled."
            if has_external_first_step(record["releases"])
            else "",
            "Whether the claim withstands an attack: none is recorded." if body["audit"] is None else audit_note,
            "Whether the run is allowed: that is for the people who file this."
            + (f" These questions are open: {', '.join(open_questions)}." if open_questions else ""),
        ],
    }


_UNCHECKED_RANGES = "Whether these ranges and vocabularies are public indeed."
_DECISIONS = {
    "replace-one": "which of two equally likely versions of one {unit} was used",
    "zero-out": "whether one {unit} contributed, where both are equally likely",
}


def _describe_guesses(certificate: VerifiedCertificate) -> list[str]:
    """Describe in sentences how often an attacker's guess is right at most, and the level of protection.

    The guesses are about one protected unit and, as far as the certificate has a μ for them, about several
    records of a person and about a test record (otherwise the last text is empty).  Without noise the only
    sentence says that everything can be guessed.
    """
    claim, record = certificate.claim, certificate.body["record"]
    if claim is None:
        return ["Everything: the run adds no noise, and nothing is guaranteed."]
    level = next(level for max_guess, level in PROTECTION_LEVELS if claim.guarantee.best_guess <= max_guess)
    groups = (record.get("several_records") or {}).items()
    test_mu = (record.get("evaluation") or {}).get("mu")
    return [
        f"Whoever knows all else, and decides {_DECISIONS[claim.relation].format(unit=claim.unit.noun)}, "
        f"is right in {_share_of_cases(claim.guarantee.best_guess)}. Blind guessing is right in 50 %.",
        f"That is {level} protection. For experts: {format_epsilon_delta(record['epsilon'], record['delta'])}.",
        *(
            f"Where one person has {size} records, a guess about all of them is right in "
            f"{_share_of_cases(best_guess(group['mu']))}."
            for size, group in groups
            if group["mu"] is not None
        ),
        f"A guess about a test record is right in {_share_of_cases(best_guess(test_mu))}." if test_mu else "",
    ]


def _share_of_cases(probability: float) -> str:
    return (
        "nearly all cases"
        if (text := format_upper_percent(probability)).startswith("over")
        else f"at most {text} of cases"
    )


def _describe_all_runs(silo: Mapping[str, Any]) -> str:
    """Describe the best guess from all runs of a silo together, or return "" without another run.

    The silo's statement has the composed charge of all runs on its training records: together they are μ-GDP,
    except with a probability, the slack, for which the guess is taken to be right.  Its μ is None if the runs cost
    more than any budget, for example because one has no noise.  A first step is part of the certified run, with
    an entry of its own in the ledger.
    """
    total_budget = silo["training"]["spent"]
    if (other_count := total_budget["runs"] - 1 - ("first_step" in silo)) < 1:
        return ""
    mu, slack = total_budget["mu"], total_budget["slack"]
    total = (
        "protect nothing that can be counted"
        if mu is None
        else f"a guess is right in {_share_of_cases(min(1.0, best_guess(mu) + slack))}"
    )
    other_runs = format_count(other_count, "other run")
    return f"Silo {silo['silo']} had {other_runs} on its records: all together {total}."


def format_model_card(certificate: VerifiedCertificate) -> str:
    """Format the model card as Markdown, with the metadata block that model hubs read.

    Titles and answers are escaped, because other parties may have written them.
    """
    run, record = certificate.body["run"], certificate.body["record"]
    lines = [
        *("---", "tags:", "- differential-privacy", "- federated-learning", "- fedpriv", "---"),
        "",
        f"> **{_first_line(certificate)}**",
        "",
        f"# {_escape_markdown(run['title'] or run['name'])}",
        "",
    ]
    if certificate.claim is not None:
        lines += [
            f"ε = {format_upper_epsilon(record['epsilon'])} at δ = {format_upper_delta(record['delta'])} "
            f"for {record['unit']} ({record['relation']}).",
            "",
        ]
    facts = [
        fact
        for heading, answers in sections(certificate)
        for fact in (
            f"## {heading}\n",
            *(f"**{_escape_markdown(answer.question)}** {_escape_markdown(answer.text)}\n" for answer in answers),
        )
    ]
    return "\n".join(
        [*lines, *facts, _NO_LAW_NOTE, "certificate.json beside it recomputes: `fedpriv certify --verify`.", ""]
    )


def _escape_markdown(text: str) -> str:
    """Escape another party's text to one line without CommonMark's emphasis, code, links and HTML."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>#|!" else letter for letter in " ".join(text.split()))


CERTIFICATE_FILE, ENVELOPES_FILE = "certificate.json", "certificate.dsse.jsonl"
BOARD_FILE, PAGE_FILE, CARD_FILE = "board.html", "certificate.html", "model-card.md"


def verify(path: Path, keys: Path | None, model: Path | None) -> None:
    """Verify a certificate, and print signers, recomputed claim, caveats and whether a model was compared.

    Raises:
        InputError: If no trusted keys are given, or keys or certificate cannot be read.
        RunError: If `verify_certificate` refuses the certificate or the model, with the first fault.
    """
    if keys is None:
        raise InputError(
            '--keys FILE: say whom you trust, a line each, "coordinator ssh-ed25519 AAAA…" and '
            '"silo-0 ssh-ed25519 AAAA…", as they told you: a certificate that names its own signers proves nothing'
        )
    comparison = "the model is the one that was certified" if model else "no --model was given to compare"
    print_text("\n".join([*verify_certificate(path, read_signers(keys), model).lines, comparison, ""]))


def certify(
    folder: Path, key: Path, cell: int | None, people: Path | None, answers: Sequence[str], silos: Sequence[Path]
) -> None:
    """Write a run's certificate into its folder, with its views unless it is an unsigned draft.

    A draft is a deployment's certificate without any silo's signature.  The views are the page for a board, the
    page of all questions, and the model card.  With them goes a description of the run as an RO-Crate.  Drafts
    and other certificates are also written as DSSE envelopes, a form for other programs.

    Args:
        folder: Folder of the run.
        key: File of the coordinator's key, which is made if it is missing.
        cell: Number of the certified cell, or None if the run has a single finished one.
        people: TOML file with people's answers, or None.
        answers: Further answers as "KEY=TEXT", which replace those of the file.
        silos: Files of the statements that silos have signed.

    Raises:
        InputError: If the run, an answer, the key or a silo's file cannot be used, a fact of the cell is not that
            of its scenario, or a silo signed another body.
        RunError: If the run's claim is not what releases and scenario give, or the new certificate fails its
            verification, for example by a silo's wrong signature.  No file is written then, but for a missing key.
    """
    # The body is complete, and its figures are recomputed, before anything is written.
    results, audit = read_claims(folder), load_audit(folder)
    further_keys = {
        "audit": None if audit is None else dataclasses.asdict(audit),
        "not_protected": [*NOT_PROTECTED, *([_OTHER_MODELS_NOTE] if len(results.cells) > 1 else [])],
    }
    body = make_body(folder, results, cell, _read_people(people, answers), further_keys)
    recompute_record(body)
    silo_statements = [read_canonical_json(read_file_bytes(path), path) for path in silos]
    silo_keys, is_new_key, coordinator_key = (
        _claimed_keys(silo_statements),
        not key.exists(),
        load_or_create_key(key),
    )
    path, content = folder / CERTIFICATE_FILE, sign_certificate(body, silo_statements, coordinator_key)
    # Verified with the silos' keys that their statements name, before an earlier certificate is replaced.
    certificate = verify_certificate(
        path,
        {COORDINATOR: coordinator_key.public_key(), **silo_keys},
        require_all_silos=False,
        content=content,
    )
    views = {BOARD_FILE: format_board_page, PAGE_FILE: format_page, CARD_FILE: format_model_card}
    for name in views:  # Those of an earlier certificate do not stand beside another one.
        (folder / name).unlink(missing_ok=True)
    write_bytes(path, content)
    write_text(folder / ENVELOPES_FILE, format_envelopes(read_certificate(path)))
    lines = [f"{COORDINATOR} {format_public_key(coordinator_key.public_key())}", *certificate.lines]
    if certificate.is_simulation or silo_statements:
        for name, format_view in views.items():
            write_text(folder / name, format_view(certificate))
        lines.append(f"written: {', '.join([str(path), *views])} and {export_run(folder, 'ro-crate').name}")
    else:
        lines += [
            f"a draft: let each silo call `fedpriv silo sign POLICY {path}`, and give what it writes by --signed",
            f"written: {path}",
        ]
    if is_new_key:
        sys.stderr.write(f"fedpriv: made the key {key}, mode 0600; readers need its public key, the first line\n")
    print_text("\n".join([*lines, ""]))


def sign(policy: Path, path: Path, out: Path | None) -> None:
    """Sign a certificate as a silo, and write the signed statement into a file.

    The certificate's figures are recomputed first, with the extensions of the policy.  The releases are then
    compared with a plan of the scenario in the silo's ledger, and the ledger's charges with the plan's price.

    Args:
        policy: The silo's policy.
        path: The certificate.
        out: File of the statement, or None for silo-N.json beside the certificate.

    Raises:
        InputError: If certificate, policy, ledger, records or key cannot be used, the ledger has no such run, a
            fact cannot be compared, or a figure or a release differs.
        RunError: If a charge differs, rounds are neither answered nor recorded as missed, another process has the
            ledger locked, or the scenario cannot be planned under the code that the policy permits today.
    """
    from fedpriv.addons.certificate.attest import attest
    from fedpriv.silo.policy import read_policy

    tree = read_certificate(path)
    read_policy(policy).import_extensions()
    body: Mapping[str, Any] = tree["body"]
    try:
        try:
            recompute_record(body)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        facts = attest(policy, body["record"], sha256(canonical_json(body)), STATEMENT_NAMES[tree["format"]])
    except FedprivError:
        raise
    except Exception as error:  # a coordinator can send a document of any shape
        raise InputError(f"{path}: is not a whole certificate ({type(error).__name__})") from None
    target = out or path.with_name(f"silo-{facts['silo']}.json")
    if target.exists() and "signed" not in read_canonical_json(read_file_bytes(target), target):
        raise InputError(f"{target}: is no statement that a silo signed, and is not replaced; give another --out")
    write_bytes(target, canonical_json(facts))
    sys.stdout.write(f"silo-{facts['silo']} {facts['signed']['key']}\nwritten: {target}\n")


def _read_people(path: Path | None, answers: Sequence[str]) -> dict[str, str]:
    """Read people's answers by key from a TOML file, overridden by KEY=TEXT answers.

    An answer becomes one line, and is cut after 2,000 characters (`sanitize_line`).

    Raises:
        InputError: If the file cannot be read as TOML, an answer is no text or empty, or a "KEY=TEXT" has no "=".
    """
    people: dict[str, Any] = {}
    if path is not None:
        try:
            people = tomllib.loads(read_file_bytes(path).decode())
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: cannot be read as TOML: {error}") from None
    for answer in answers:
        name, equals, text = answer.partition("=")
        if not equals:
            raise InputError(f"--say {answer}: expected KEY=TEXT, with one of {', '.join(RESPONSIBLE_PEOPLE)}")
        people[name.strip()] = text.strip()
    refuse(
        {
            f"{name}: expected a text": not isinstance(text, str) or not text.strip()
            for name, text in people.items()
        }
    )
    return {name: sanitize_line(text, 2000) for name, text in people.items()}


def _claimed_keys(signed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the silos' keys as their statements name them, which makes none trusted.

    Raises:
        InputError: If a statement has no silo's number, no key or a key that cannot be used.
    """
    try:
        return {
            f"silo-{statement['silo']:d}": parse_public_key(
                statement["signed"]["key"].encode(), f"silo {statement['silo']}"
            )
            for statement in signed
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"--signed: a file is no statement that a silo signed ({type(error).__name__})") from None
