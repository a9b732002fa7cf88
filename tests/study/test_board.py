"""The page for a board: half a page without symbols, whose figures and warnings are those of the certificate."""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.addons.certificate.certify import VerifiedCertificate, verify_certificate
from fedpriv.addons.certificate.command import format_board_page, format_page
from fedpriv.core.signed import read_signers

FOLDER = Path(__file__).parent / "certificates"
Edit = Callable[[VerifiedCertificate], None]


def load(kind: str) -> VerifiedCertificate:
    return verify_certificate(FOLDER / kind / "certificate.json", read_signers(FOLDER / kind / "trusted"))


def edited(kind: str, edit: Edit, view: Callable[[VerifiedCertificate], str] = format_board_page) -> str:
    """The page after an edit of the verified facts."""
    certificate = load(kind)
    changed = replace(
        certificate, body=deepcopy(dict(certificate.body)), silos=[deepcopy(dict(s)) for s in certificate.silos]
    )
    edit(changed)
    return text_of(view(changed))


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)))


@pytest.mark.parametrize("kind", ["simulation", "deployment"])
def test_the_board_page_answers_four_questions_in_at_most_420_words_without_symbols(kind: str) -> None:
    text = text_of(format_board_page(load(kind)))
    assert len(text.split()) <= 420
    assert not re.search(r"μ|zCDP|GDP|ρ|2\^-60", text)
    headings = ("Who is protected, and against whom?", "What could an attacker at best guess?",
                "What weakens this?", "What did nobody check?")  # fmt: skip
    assert [text.count(heading) for heading in headings] == [1, 1, 1, 1]
    assert "each silo's records against the server, the other silos and everyone else" in text
    assert "is right in at most 97.8 % of cases. Blind guessing is right in 50 %." in text  # Φ(4/2), rounded up
    assert "ε = 24.39 at δ = 1e-05" in text
    assert "next to no protection" in text


def test_the_board_page_of_a_simulation_says_first_that_nothing_is_protected() -> None:
    text = text_of(format_board_page(load("simulation")))
    assert text.index("Nothing here is protected.") < text.index("Who is protected")
    assert "whether the same records were used before, because no silo's ledger was asked" in text.lower()
    assert "an attack was tried" not in text.lower()


def set_data(table: dict[str, Any] | None, name: str = "patients.csv") -> Edit:
    def edit(certificate: VerifiedCertificate) -> None:
        certificate.body["record"]["scenario"]["data"].update({"name": name, "table": table})

    return edit


def test_the_board_page_lists_ranges_declared_public_as_an_unchecked_weakness() -> None:
    """Guarantee: a table's ranges are never passed over, whoever declared them public."""
    text = edited("simulation", set_data({"public": True}))
    assert "declared public by the coordinator's scenario" in text
    assert "if they were read off the records, they tell of them whatever the noise" in text
    assert "Whether these ranges and vocabularies are public indeed." in text
    assert "these ranges" not in text_of(format_board_page(load("simulation")))
    text = edited("simulation", set_data({"public": False}))  # as only a run without noise can have it
    assert "were not declared public by the coordinator's scenario (data.table.public = false): if" in text


def edit_silo(silo: int, **facts: Any) -> Edit:
    return lambda certificate: certificate.silos[silo]["training"].update(facts)


def test_the_board_page_composes_earlier_runs_on_the_same_records_with_this_one() -> None:
    """Two runs of μ = 4 are 4·√2 together: a guess is right in Φ(2.829), 99.77 % of cases, rounded up."""
    before = text_of(format_board_page(load("deployment")))
    assert "No ledger of training records of a silo that signed has another run." in before
    text = edited("deployment", edit_silo(1, spent={"runs": 2, "mu": 4.0 * 2**0.5, "slack": 0.0}))
    assert (
        "Silo 1 had 1 other run on its records: all together a guess is right in at most 99.8 % of cases" in text
    )
    assert "No ledger of training records of a silo that signed has another run" not in text
    text = edited("deployment", edit_silo(1, spent={"runs": 3, "mu": 0.2, "slack": 0.25}))
    assert "2 other runs on its records: all together a guess is right in at most 79.0 % of cases" in text
    text = edited("deployment", edit_silo(0, spent={"runs": 2, "mu": None, "slack": None}))
    assert "Silo 0 had 1 other run on its records: all together protect nothing that can be counted" in text


def test_the_first_step_of_a_run_is_no_other_run_on_its_records() -> None:
    """Was: "Silo 1 had 1 other run on its records", which was the first step of the certified run."""

    def take_first_step(certificate: VerifiedCertificate) -> None:
        step = {"runs_of_this_scenario": 1, "charged": {"mu": 3.0, "slack": 0.0}}
        certificate.silos[1]["first_step"] = step
        certificate.silos[1]["training"].update(
            before={"runs": 1, "mu": 3.0, "slack": 0.0}, spent={"runs": 2, "mu": 5.0, "slack": 0.0}
        )

    text = edited("deployment", take_first_step)
    assert "No ledger of training records of a silo that signed has another run." in text
    text = edited("deployment", take_first_step, format_page)
    assert "Silo 1 had 0 other runs on its records" in text
    assert (
        "0 runs before this one; it was charged μ = 4 and, for its first step, μ = 3; spent by all: μ = 5" in text
    )


def test_a_guess_that_is_nearly_always_right_is_no_guess_of_at_most_over_99_9_percent() -> None:
    certificate = load("deployment")
    assert certificate.claim is not None
    weak = replace(certificate, claim=replace(certificate.claim, guarantee=GaussianDP(8.0)))
    text = text_of(format_page(weak))
    assert "guesses about one record is right in nearly all cases. Blind guessing is right in 50 %." in text
    assert "at most 97.8 % of cases. Blind guessing" in text_of(format_page(certificate))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda c: c.body.update(audit=None), "Whether the claim withstands an attack: none is recorded."),
        (lambda c: c.body.update(tuned=None), "Whether settings were chosen by a look at these records."),
        (lambda c: c.body["people"].update(purpose="x"), "are open: access to records, approved by, contact"),
        (lambda c: c.silos.pop(), "NOT ALL SILOS SIGNED: 1 of 2 silos signed: silo 1 has not."),
        (
            lambda c: c.silos[0]["policy"]["allow"].update(noise_free=True),
            "Silo 0's policy also answers runs without noise.",
        ),
        (
            lambda c: c.body["record"]["evaluation"].update(mu=2.0),
            "test record is right in at most 84.2 % of cases",
        ),
    ],
)
def test_the_board_page_names_each_weakness_of_a_certificate(edit: Edit, said: str) -> None:
    assert said in edited("deployment", edit)


def test_the_board_page_of_a_run_without_noise_says_that_nothing_is_guaranteed() -> None:
    text = text_of(format_board_page(replace(load("deployment"), claim=None)))
    assert "Everything: the run adds no noise, and nothing is guaranteed." in text
    assert "is right in at most" not in text.split("What weakens this?")[0]
