"""A coordinator who writes every file, and has silos on its side, certifies nothing but what the silos released.

Every edit goes through `fedpriv certify`, `fedpriv silo sign` and `fedpriv certify --verify`: an honest silo
refuses it, and so does a reader, even if every silo signs it blindly.  What only ledgers know, only silos refuse.
"""

import html
import json
import re
import shutil
import sqlite3
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fedpriv
from fedpriv.addons.certificate.attest import _find_unanswered
from fedpriv.claims.entries import make_entry
from fedpriv.core.signed import canonical_json, sha256
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.chain import RollbackMark
from fedpriv.silo.guards import open_guards
from fedpriv.silo.policy import read_policy
from fedpriv.silo.rows import UNKEYED_VERSION, file_digest
from tests.attacks.deployment import Deployment, Edit, deployment, fixed_order, run_by, secret_order
from tests.cli.command import fedpriv as command
from tests.conftest import small_tree
from tests.data.tables import rows, table_tree, write_csv


class Case(NamedTuple):
    """An edit of a record, with every figure that follows from it, and the words of who refuses it."""

    edit: Edit
    silo: str
    """What an honest silo says."""
    reader: str | None
    """What `--verify` says where all silos signed it blindly; None where ledgers alone tell."""


def with_figures(told: dict[str, Any]) -> None:
    """Compute every figure anew of the streams, as far as they give any: an attacker is not that careless."""
    with suppress(Exception):
        told.update(json.loads(json.dumps(make_entry(told).recomputed_record)))


def write(tree: dict[str, Any], values: dict[str, Any]) -> None:
    """Write values into a tree; a function is applied to what is there, `a__b` is a key in a key."""
    for dotted, value in values.items():
        *sections, name = dotted.split("__")
        node = reduce(dict.__getitem__, sections, tree)
        node[name] = value(node[name]) if callable(value) else value


def record(**values: Any) -> Edit:
    """Write other values beside the releases; `a__b` is a key in a key."""

    return lambda told: write(told, values)


def streams(*, tests: bool = False, **values: Any) -> Edit:
    """Write other values into every stream; a function is applied to what is there, `a__b` is a key in a key."""

    def edit(told: dict[str, Any]) -> None:
        for stream in (told["evaluation"] if tests else told)["releases"]:
            write(stream, values)
        with_figures(told)

    return edit


def noise(factor: float, *, tests: bool = False) -> Edit:
    """So much more noise, in both spellings that a stream has of it."""
    return streams(tests=tests, std=lambda std: std * factor, integers__sigma=lambda sigma: sigma * factor)


def all_of(*edits: Edit) -> Edit:
    return lambda told: [edit(told) for edit in edits]


def relabel(told: dict[str, Any]) -> None:
    told["trust"] = "secure-aggregation"
    told["releases"][0]["owner"] = "sum of silos 0-1"
    noise(8.0)(told)


def fewer(told: dict[str, Any]) -> None:
    told["silos"] = 1
    for stream in [*told["releases"], *told["evaluation"]["releases"]]:
        stream["owner"] = "silo 0"
    with_figures(told)


def doubled(told: dict[str, Any]) -> None:
    told["releases"] *= 2


def simulated(told: dict[str, Any]) -> None:
    """The same releases as floats that a simulation drew."""
    told |= {"engine": "vectorized", "noise": "simulation", "holds": "in real arithmetic", "attained": True}
    for stream in [*told["releases"], *told["evaluation"]["releases"]]:
        del stream["integers"]


def weaker_scenario(told: dict[str, Any]) -> None:
    """A scenario that asks for half of the noise's promise, with noise and digest that fit it."""
    told["scenario"]["privacy"]["rho"] = 2.0
    noise(2.0)(told)
    told["target"] = "mu = 2"


def with_digest(edit: Edit) -> Edit:
    def whole(told: dict[str, Any]) -> None:
        edit(told)
        told["scenario_sha256"] = sha256(json.dumps(told["scenario"], sort_keys=True).encode())

    return whole


def both(edit: Edit, words: str) -> Case:
    """An edit that silo and reader refuse in the same words."""
    return Case(edit, words, words)


RUN = "the ledger has no run of record.scenario"
FIXED: dict[str, Case] = {
    "relabel": both(relabel, "record.trust is 'secure-aggregation', and releases"),
    "trust": both(record(trust="trusted"), "record.trust is 'trusted', and releases"),
    "tests": both(noise(4.0, tests=True), "record: evaluation.releases give mu = 0.2"),
    "fewer": both(fewer, "record.silos is 1, and releases"),
    "silos": both(record(silos=3), "record.silos is 3"),
    "rounds": both(record(rounds=1), "record.rounds is 1"),
    "relation of the record": both(record(relation="zero-out"), "record.relation is 'zero-out'"),
    "unit of the record": both(record(unit="all records"), "record.unit is 'all records'"),
    "participation of the record": both(record(participation="Poisson sampling"), "record.participation is"),
    "delta": both(record(delta=1e-3), "record.delta is 0.001"),
    "epsilon": both(record(epsilon=1.0), "record.epsilon is 1.0"),
    "mu": both(record(mu=1.0), "record.mu is 1.0"),
    "zcdp": both(record(zcdp=1.0), "record.zcdp is 1.0"),
    "epsilon_paper": both(record(epsilon_paper=1.0), "record.epsilon_paper is 1.0"),
    "rho": both(record(rho=1.0), "record.rho is 1.0"),
    "target": both(record(target="mu = 1"), "record.target is 'mu = 1'"),
    "guarantee": both(record(guarantee="exact"), "record.guarantee is 'exact'"),
    "holds": both(record(holds="always"), "record.holds is 'always'"),
    "attained": both(record(attained=True), "record.attained is True"),
    "counted_mu": both(record(counted_mu=0.5), "record.counted_mu is 0.5"),
    "several_records": both(record(several_records={}), "record.several_records is"),
    "records": both(record(records=10**6), "record.records is 1000000"),
    "smallest_silo": both(record(smallest_silo=10**6), "record.smallest_silo is"),
    "batch": both(record(batch=400), "record.batch is 400"),
    "unread": both(record(unread=7), "record.unread is 7"),
    "dimension": both(record(dimension=10), "record.dimension is 10"),
    "seed": both(record(seed=2), "record.seed is 2"),
    "noise of a simulation": Case(
        simulated,
        "this silo was in a deployment",
        "signed, and has no part in",
    ),
    "missed": both(record(missed={"7": [1]}), "record.missed has silos"),
    "missed, in another spelling": both(record(missed={"01": [1]}), "record.missed has silos"),
    "point": both(record(point={"privacy.rho": 0.1}), "record.point: privacy.rho is 0.1"),
    "point beside the scenario": both(record(point={"title.epsilon": 0.1}), "record.point: title.epsilon is"),
    "clients": both(record(clients=10**6), "record.clients is 1000000"),
    "a key that no record has": both(
        record(epsilon_of_board=0.1), "record.epsilon_of_board is a key that no certificate has"
    ),
    "a number as a truth value": both(record(unread=False), "record.unread is False"),
    "std": both(noise(4.0), "record: std gives mu = 1, and the scenario asks for 4"),
    "std on the safe side, by 1e-7": both(noise(1.0 / (1.0 + 1e-7)), "record: std gives mu"),
    "std above, by 1e-7": both(noise(1.0 + 1e-7), "integers.sigma of silos 0-1 is"),
    "std alone": both(streams(std=lambda std: std * 3.0), "std of silos 0-1 is"),
    "exponent": both(streams(integers__exponent=lambda exponent: exponent + 1), "record: std gives mu"),
    "owners of noise": both(streams(integers__owners=2), "record: std gives mu"),
    "dimension of the noise": both(streams(integers__dimension=7849), "integers.dimension of silos 0-1 is"),
    "clips": both(
        streams(clips=lambda clips: [[clip / 2, count] for clip, count in clips]), "record: std gives mu"
    ),
    "clips with the noise": both(
        all_of(
            streams(clips=lambda clips: [[clip / 2, count] for clip, count in clips]),
            streams(integers__exponent=lambda exponent: exponent - 1, std=lambda std: std / 2),
        ),
        "clips of silos 0-1 is",
    ),
    "weights": both(streams(per_record=0.25), "per_record of silos 0-1 is 0.25"),
    "decay": both(streams(decay=0.5), "decay, period or mechanism of silos 0-1"),
    "period": Case(streams(period=1), "period or mechanism of silos 0-1", "record"),
    "apart": both(streams(apart=1.0), r"apart = 1\.0: a run's increments"),
    "relation of the streams": Case(
        streams(relation="zero-out"), "record.relation is|record.mu|record: ", "record"
    ),
    "unit of the streams": both(streams(unit={"name": "user", "records": 1, "shared": 1}), "record"),
    "mechanism": both(streams(mechanism={"name": "Nothing"}), "mechanism 'Nothing' is none of"),
    "participation of the streams": Case(
        streams(participation__rounds_per_epoch=1), "participation of silos 0-1|record", "participation|record"
    ),
    "owner": Case(streams(owner="server"), "releases are not those|per_record of server", "record: "),
    "step": both(streams(step="first step"), "record.releases: has a first step"),
    "streams": both(doubled, "releases are not those of all rounds, silos"),
    "clips of the tests": both(
        streams(tests=True, clips=lambda clips: [[clip / 4, count] for clip, count in clips]),
        "evaluation.releases: clips of silos 0-1 are not",
    ),
    "noise of the tests, by a thousandth": both(
        noise(1.001, tests=True), "record.evaluation.releases: integers.sigma of silos 0-1 is"
    ),
    "owner of the tests": both(
        streams(tests=True, owner="silo 0"), "evaluation.releases are not those of all silos"
    ),
    "no tests": Case(
        record(evaluation=None), "record.evaluation is None|evaluation by silos is in the scenario", "record"
    ),
    "tests beside the training": both(record(evaluation__mu_with_training=1.0), "record.evaluation is"),
    "scenario, without its digest": Case(weaker_scenario, RUN, "ledger|was charged mu = 4"),
    "scenario, with its digest": Case(with_digest(weaker_scenario), RUN, "was charged mu = 4"),
    "digest": Case(
        record(scenario_sha256="0" * 64),
        "the ledger has record.scenario, but no run of it with the digest record.scenario_sha256",
        None,
    ),
    "title": both(record(scenario__title="Another"), "run.title is '', and the scenario's is 'Another'"),
    "a key in other letters": Case(
        with_digest(record(scenario__federation__epochs=1.0)), "epochs = 1.0: expected a whole number", "record"
    ),
    "title in both places": Case(with_digest(record(scenario__label={"a": 1})), RUN, None),
}
SECRET: dict[str, Case] = {
    "secret": both(noise(4.0), "record: std gives epsilon = 0.49"),
    "std, within what versions differ by": both(noise(1.002), "integers.sigma of silos 0-1 is"),
    "rate": Case(
        streams(participation__rounds_per_epoch=20), "participation of silos 0-1|record", "participation|record"
    ),
    "apart": both(streams(apart=1.0), "clips apart"),
    "epsilon": both(record(epsilon=1.0), "record.epsilon is 1.0"),
    "fixed order": Case(
        streams(participation={"name": "fixed", "rounds": 2, "rounds_per_epoch": 2}),
        "participation of|record",
        "record",
    ),
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Deployment]:
    """Certified runs whose silos have signed; their files are copied for every attack."""
    runs = {
        "fixed": deployment(tmp_path_factory.mktemp("fixed"), fixed_order()),
        "secret": deployment(tmp_path_factory.mktemp("secret"), secret_order()),
    }
    for each in runs.values():
        assert each.refusal() == ("", each.verify()[1])
    return runs


@pytest.fixture
def copied(honest: dict[str, Deployment], tmp_path: Path) -> dict[str, Deployment]:
    return {
        name: Deployment(Path(shutil.copytree(each.folder, tmp_path / name)), each.policies)
        for name, each in honest.items()
    }


def refused(run: Deployment, case: Case) -> None:
    """Edit the draft as its owner can: an honest silo refuses it, and a reader does whose silos are all bought."""

    run.forge(lambda tree: case.edit(tree["body"]["record"]), sign=True)
    line = run.sign(1)
    assert line.count("\n") == 1, line
    assert re.search(case.silo, line), line
    if case.reader is not None:
        code, printed = run.verify()
        assert (code, printed.count("\n")) == (1, 1), printed
        assert re.search(case.reader, printed), printed


@pytest.mark.every(5)
@pytest.mark.parametrize("what", FIXED)
def test_an_edited_certificate_of_a_fixed_order_run_is_refused_by_silos_and_readers(
    copied: dict[str, Deployment], what: str
) -> None:
    """Guarantee: whatever a coordinator writes, an honest silo does not sign it, and a reader sees it."""
    refused(copied["fixed"], FIXED[what])


@pytest.mark.every(3)
@pytest.mark.parametrize("what", SECRET)
def test_an_edited_certificate_of_a_secret_schedule_run_is_refused_by_silos_and_readers(
    copied: dict[str, Deployment], what: str
) -> None:
    refused(copied["secret"], SECRET[what])


def part(silo: int, /, **values: Any) -> Edit:
    """Write other facts into what a silo signed."""

    return lambda tree: write(tree["silos"][silo], values)


def body(**values: Any) -> Edit:
    return lambda tree: write(tree["body"], values)


def swapped(tree: dict[str, Any]) -> None:
    first, second = tree["silos"]
    first["silo"], second["silo"] = 1, 0


def signatures_swapped(tree: dict[str, Any]) -> None:
    first, second = tree["silos"]
    first["signed"], second["signed"] = second["signed"], first["signed"]


def own_key(tree: dict[str, Any]) -> None:
    """A part that the coordinator signs for silo 1 with the key of silo 0, which is on its side."""
    tree["silos"][1]["signed"]["key"] = tree["silos"][0]["signed"]["key"]


SIGNED: dict[str, tuple[Edit, str]] = {
    "a silo left out": (
        lambda tree: tree["silos"].pop() and tree.update(about="1 of 2 silos signed: silo 1 has not"),
        "1 of 2 silos signed: silo 1 has not",
    ),
    "a silo left out, in silence": (
        lambda tree: tree["silos"].pop(),
        "about is '2 of 2 silos signed', and it is: 1",
    ),
    "all silos left out": (lambda tree: tree.update(silos=[]), "it is: 0 of 2 silos signed: silos 0, 1 have not"),
    "about": (
        lambda tree: tree.update(about="9 of 9 silos signed"),
        "about is '9 of 9 silos signed', and it is: 2 of 2",
    ),
    "a silo twice": (
        lambda tree: tree.update(silos=[tree["silos"][0]] * 2),
        "0 is no silo's number, or is there twice",
    ),
    "a silo that is none": (part(1, silo=7), "silo 7 signed, and has no part in this run"),
    "silos swapped": (swapped, "by another key than the one that you trust as silo-"),
    "signatures swapped": (signatures_swapped, "by another key than the one that you trust as silo-0"),
    "a key in the file": (own_key, "by another key than the one that you trust as silo-1"),
    "charge": (part(1, training__charged__mu=1.0), "the signature of silo-1 is not of this content"),
    "budget left": (part(1, training__left__mu=5.9), "the signature of silo-1 is not of this content"),
    "runs before": (part(1, training__before__runs=0, training__spent__runs=0), "the signature of silo-1"),
    "policy": (part(1, policy__allow__trust="trusted"), "the signature of silo-1 is not of this content"),
    "shapes": (part(1, shapes__width=3), "the signature of silo-1 is not of this content"),
    "tests of a silo": (
        lambda tree: tree["silos"][1].pop("tests"),
        "the signature of silo-1 is not of this content",
    ),
    "name of the run": (body(run__name="other"), "run.name is 'other', and the scenario's is 'small'"),
    "title of the run": (body(run__title="Other"), "run.title is 'Other', and the scenario's is ''"),
    "date": (body(run__date="2020-01-01 00:00 UTC"), "silo-0 signed another certificate than this"),
    "number of cells": (body(run__cells=2, run__released_cells=2), "silo-0 signed another certificate"),
    "versions": (body(run__versions__fedpriv="9"), "silo-0 signed another certificate than this"),
    "model": (body(model__sha256="0" * 64), "silo-0 signed another certificate than this"),
    "audit": (body(audit={"stands": True}), "silo-0 signed another certificate than this"),
    "what people said": (body(people__purpose="marketing"), "silo-0 signed another certificate than this"),
    "tuning": (body(tuned={"settings": 1}), "silo-0 signed another certificate than this"),
    "not protected": (body(not_protected=[]), "silo-0 signed another certificate than this"),
    "scores": (body(record__test_accuracy=0.99), "silo-0 signed another certificate than this"),
    "format": (
        lambda tree: tree.update(format="fedpriv certificate 1"),
        "silos signed without planning the run again",
    ),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("what", SIGNED)
def test_a_certificate_edited_after_signing_fails_verification(copied: dict[str, Deployment], what: str) -> None:
    run, (edit, words) = copied["fixed"], SIGNED[what]
    run.forge(edit)
    code, printed = run.verify()
    assert code in (1, 2), printed
    assert words in printed, printed
    assert printed.count("\n") == 1


COLLUDING: dict[str, tuple[Edit, str]] = {
    "a smaller charge": (
        part(0, training__charged__mu=1.0),
        "silo 0 was charged mu = 1 for the rounds, and those of",
    ),
    "a larger charge": (
        part(0, training__charged__mu=5.0),
        "silo 0 was charged mu = 5 for the rounds, and those of",
    ),
    "no noise": (part(0, training__charged__mu=None), "silo 0 was charged as a run without noise for the rounds"),
    "slack": (part(0, training__charged__slack=1e-3), "silo 0 was charged mu = 4 with slack 0.001 for the rounds"),
    "a charge of tests": (part(0, tests__charged__mu=0.5), "silo 0 was charged mu = 0.5 for the evaluations"),
    "no tests": (lambda tree: tree["silos"][0].pop("tests"), "silo 0 says nothing of the evaluations"),
    "other shapes": (part(0, shapes__width=5), "silo 1 has records of other shapes than silo 0"),
    "shapes that are none": (
        lambda tree: [each["shapes"].update(width=2**62) for each in tree["silos"]],
        "shapes of the silos' records are none",
    ),
    "shapes of another model": (
        lambda tree: [each["shapes"].update(width=5) for each in tree["silos"]],
        "record.dimension is 7850",
    ),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("what", COLLUDING)
def test_a_charge_signed_by_a_colluding_silo_is_checked_against_the_scenario(
    copied: dict[str, Deployment], what: str
) -> None:
    """Guarantee: a signature makes no charge true that the scenario does not cost."""
    run, (edit, words) = copied["fixed"], COLLUDING[what]
    run.forge(edit, sign=True)
    code, printed = run.verify()
    assert (code, printed.count("\n")) == (1, 1), printed
    assert words in printed, printed


@pytest.mark.parametrize("what", ["relabel", "tests", "fewer", "secret"])
def test_the_certify_command_refuses_edited_results(copied: dict[str, Deployment], what: str) -> None:
    """Guarantee: `fedpriv certify` compares results.json with the scenario in it, whatever else is consistent."""
    run = copied["secret" if what == "secret" else "fixed"]
    case = SECRET[what] if what == "secret" else FIXED[what]
    run.edit(lambda tree: case.edit(tree["cells"][0]))
    line = run.draft()
    assert line.count("\n") == 1
    assert "cell 0 claims something else than its releases and scenario give: " in line
    assert re.search(case.silo.removeprefix("record.").removeprefix("record: ").split(", and")[0], line), line


def test_a_signature_of_another_run_fails_verification(
    honest: dict[str, Deployment], copied: dict[str, Deployment]
) -> None:
    run, other = copied["fixed"], honest["secret"]
    foreign = json.loads(other.certificate.read_text())["silos"][1]
    run.forge(lambda tree: tree.update(silos=[tree["silos"][0], foreign]))
    code, printed = run.verify()
    assert code == 1
    assert "by another key than the one that you trust as silo-1" in printed


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"policy": {}}, "KeyError"),
        ({"policy__allow__budget": "4"}, "policy.allow.budget"),
        ({"policy__allow__noise_free": None}, "policy.allow.noise_free"),
        ({"fedpriv": ["0.3.1"]}, "fedpriv"),
        ({"table_public": "yes"}, "table_public"),
        ({"training__before": None}, "TypeError"),
        ({"training__spent__runs": "1"}, "training.spent.runs"),
        ({"training__spent__runs": True}, "training.spent.runs"),
        ({"training__left": {}}, "KeyError"),
        ({"tests__runs_of_this_scenario": 1.0}, "tests.runs_of_this_scenario"),
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_silos_statement_of_another_form_is_refused_before_it_replaces_a_certificate(
    copied: dict[str, Deployment], values: dict[str, Any], fault: str
) -> None:
    """Gains: a silo destroyed a good certificate, and the coordinator's program ended with a traceback."""
    run, path = copied["fixed"], copied["fixed"].folder / "silo-1.json"
    before = run.certificate.read_bytes()
    run.forge(part(1, **values), sign=True)
    code, printed = run.verify()
    assert (code, printed.count("\n")) == (1, 1), printed
    assert fault in printed, printed
    path.write_bytes(canonical_json(json.loads(run.certificate.read_text())["silos"][1]))
    run.certificate.write_bytes(before)
    line = run.assemble([0, 1])
    assert line.count("\n") == 1, line
    assert fault in line, line
    assert run.certificate.read_bytes() == before


@pytest.mark.parametrize("name", ["policy.toml", "shard.npz", "ledger/ledger.sqlite", "certificate.json"])
def test_a_statement_replaces_no_file_that_is_none(
    copied: dict[str, Deployment], tmp_path: Path, name: str
) -> None:
    """Gains: records, key, policy or ledger of a silo whose administrator gave the wrong --out."""
    run = copied["fixed"]
    silo = Path(shutil.copytree(run.policies[1].parent, tmp_path / "silo"))
    path = run.certificate if name == "certificate.json" else silo / name
    before = path.read_bytes()
    done = command("silo", "sign", silo / "policy.toml", run.certificate, "--out", path, cwd=run.folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert path.read_bytes() == before
    for _ in range(2):  # a statement is replaced by another one
        done = command("silo", "sign", silo / "policy.toml", run.certificate, "--out", "own.json", cwd=run.folder)
        assert done.returncode == 0, done


def test_pages_of_a_certificate_that_a_draft_replaces_are_removed(copied: dict[str, Deployment]) -> None:
    """Gains: a page beside a draft that said, of the facts in the draft, that all silos had signed."""
    run = copied["fixed"]
    assert "2 of 2 silos signed" in (run.folder / "board.html").read_text()
    assert run.draft("--say", "purpose=marketing") == ""
    files = [path for path in run.folder.iterdir() if path.suffix in (".html", ".md", ".json", ".jsonl")]
    stale = [path.name for path in files if "2 of 2 silos signed" in path.read_text()]
    assert stale == []


def test_a_party_of_several_lines_is_refused_in_one_line(copied: dict[str, Deployment]) -> None:
    run, name = copied["fixed"], "silos 0-1\nrecomputed: \x1b[1mmu = 0.1"
    run.forge(lambda tree: write(tree["body"]["record"]["releases"][0], {"owner": name}), sign=True)
    code, printed = run.verify()
    assert (code, printed.count("\n"), "\x1b" in printed) == (1, 1, False), printed
    assert run.sign(1).count("\n") == 1


def test_a_missed_round_listed_twice_counts_once() -> None:
    """Gains: a run that a silo has not answered, with one of its rounds called missed several times."""
    answered, record = {"rounds_answered": 3}, {"rounds": 5, "missed": {"1": [1, 1]}}
    assert "answered 3 of 5 rounds, and record.missed has 1" in (_find_unanswered(1, answered, record) or "")
    assert _find_unanswered(1, answered, {**record, "missed": {"1": [1, 2]}}) is None


def test_a_certificate_of_a_secret_schedule_run_states_the_slack_of_each_price(
    copied: dict[str, Deployment],
) -> None:
    """Gains: μ = 0 on a page, for a silo whose policy lets a run use up a slack of a half."""
    page = html.unescape((copied["secret"].folder / "certificate.html").read_text())
    assert "it was charged μ = 0.7563 but for a probability of 1e-08; spent by all: μ = 0.7563 but for a" in page
    assert "probability of 1e-08, of a lifetime budget of 1.069 and a probability of 2e-08, left" in page


def test_an_unconverted_ledger_of_fedpriv_0_3_0_signs_no_certificate(tmp_path: Path) -> None:
    """Gains: a price of fedpriv 0.3.0 that was too low, and a head that follows from a digest of the records."""
    run = deployment(tmp_path, fixed_order(evaluation=None))
    assert run.draft() == ""
    policy = read_policy(run.policies[1])
    with sqlite3.connect(policy.ledger) as database:
        database.execute(f"PRAGMA user_version = {UNKEYED_VERSION}")
    database.close()
    mark = RollbackMark(policy.mark_path)
    mark.write(mark.read()._replace(file_digest=file_digest(policy.ledger)))
    assert run.sign(0) == ""
    line = run.sign(1)
    assert "is one of fedpriv 0.3.0 still" in line
    assert line.count("\n") == 1


def test_a_partially_signed_certificate_says_so_first_and_fails_verification(
    copied: dict[str, Deployment],
) -> None:
    """Guarantee: who has not signed is in the first line of file, page and card, and no reader lets it pass."""
    run = copied["fixed"]
    assert run.draft() == ""
    assert run.sign(0) == ""
    assert run.assemble([0]) == ""
    first = "1 of 2 silos signed: silo 1 has not"
    assert run.certificate.read_text().splitlines()[1] == f' "about": "{first}",'
    page, card = ((run.folder / name).read_text() for name in ("certificate.html", "model-card.md"))
    assert page.index(f"{first}.") < page.index("<h1>")
    assert "NOT ALL SILOS SIGNED" in page
    assert card.index(f"> **{first}.**") < card.index("\n# ")
    code, printed = run.verify()
    assert (code, printed.count("\n")) == (1, 1)
    assert first in printed


def hospitals(folder: Path, **sections: Any) -> dict[str, Any]:
    """Two hospitals with a table of their own, whose file lies in a folder of this machine."""
    asked = table_tree(write_csv(folder / "patients.csv", rows()))
    asked["federation"] = {"silos": 2, "rounds": 2, "batches": [12, 8]}
    for name, section in sections.items():
        asked[name] = {**asked.get(name, {}), **section}
    return asked


SGD = {"algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1}}
KINDS: dict[str, Any] = {
    "trusted": lambda _: fixed_order(algorithm__trust="trusted"),
    "a module": lambda _: fixed_order(
        model={"name": "torch.nn:Linear"}, privacy={"relation": "zero-out", "mu": 1.0}, **SGD
    ),
    "masked": lambda _: fixed_order(algorithm__trust="secure-aggregation"),
    "budgets of silos": lambda _: fixed_order(
        privacy={"relation": "replace-one", "mu": 2.0, "shares": [0.5, 1.0]}, evaluation=None, **SGD
    ),
    "silos of two sizes": lambda _: fixed_order(federation={"silos": 2, "rounds": 2, "batches": [2, 5]}),
    "trusted, secret": lambda _: secret_order(algorithm__trust="trusted"),
    "tree": lambda _: fixed_order(
        algorithm={"name": "dp-ftrl", "trust": "untrusted", "clip": 1.0, "step": 0.1},
        privacy={"relation": "zero-out", "mu": 1.0},
    ),
    "a table": hospitals,
    "curves": lambda folder: hospitals(
        folder, run={"evaluations": 1}, evaluation={"records": 8, "mu": 1.0, "curves": {"bins": 16}}
    ),
    "a first step": lambda folder: hospitals(folder, data={**hospitals(folder)["data"], "scale": {"share": 0.25}}),
    "a first step elsewhere": lambda folder: hospitals(
        folder, data={**hospitals(folder)["data"], "scale": {"share": 0.25, "means": [0.0], "deviations": [0.5]}}
    ),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("what", KINDS)
def test_an_honest_certificate_verifies_for_every_kind_of_run_and_contains_no_local_paths(
    tmp_path: Path, what: str
) -> None:
    """Guarantee: no folder of a machine is in certificate, page or card."""
    run = deployment(tmp_path, KINDS[what](tmp_path), first=what == "a first step")
    assert run.refusal() == ("", printed := run.verify()[1])
    assert ("which no certificate may run: its noise was recomputed by the silos that signed" in printed) == (
        what == "a module"
    )
    for name in ("certificate.json", "certificate.html", "model-card.md", "silo-0.json"):
        text = (run.folder / name).read_text()
        assert str(tmp_path) not in text, name
        assert tmp_path.parent.name not in text, name


def test_a_certificate_lists_the_caveats_of_its_claim(tmp_path: Path) -> None:
    """Guarantee: the list has who declared ranges public, choices, kind of run, earlier runs, and a δ of 1/n."""
    asked = hospitals(tmp_path, privacy={"delta": 0.09, "epsilon": 1.0})
    run = deployment(tmp_path, asked)
    other = resolve_cell({**asked, "seed": 2}, "test")
    run_by([open_guards(read_policy(policy)).training for policy in run.policies], other, "another")
    assert run.refusal()[0] == ""
    for name in ("certificate.html", "model-card.md"):
        text = html.unescape((run.folder / name).read_text()).replace("\\", "")
        for words in (
            "This is of a release",
            "δ = 0.09 is not below 1/n for the n = 16 records of the smallest silo",
            "declared public by the coordinator's scenario (data.table.public = true), and by the policies of 2",
            "if they were read off the records, they tell of them whatever the noise",
            "Whether settings were chosen by a look at these records, no file of the run says",
            "Silo 0 had 1 other run on its records; all together are μ = ",
            "That the model is the one that this run gave is the coordinator's word",
        ):
            assert words in text, (name, words)


def test_a_certificate_of_a_simulation_states_that_its_noise_can_be_recomputed(tmp_path: Path) -> None:
    folder = fedpriv.run(small_tree(), out=tmp_path / "run").folder
    assert command("certify", folder, "--key", folder / "key", cwd=folder).returncode == 0
    page = (folder / "certificate.html").read_text()
    assert page.index("A SIMULATION") < page.index("<h1>")
    assert "This is a simulation, whose noise anybody can recompute and remove." in page
    assert "Whether these records were used before is not known." in page


def test_signing_and_verifying_a_certificate_import_no_module_that_the_scenario_names(
    copied: dict[str, Deployment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: neither a silo that signs nor a reader imports what a coordinator's scenario names."""
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = copied["fixed"]
    run.forge(lambda tree: tree["body"]["record"]["scenario"].update(model={"name": "planted:Model"}), sign=True)
    assert "the ledger has no run of record.scenario" in run.sign(1)
    assert "its noise was recomputed by the silos that signed, and not here" in run.verify()[1]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "values",
    [
        {"rounds": 10**12, "scenario__federation__rounds": 10**12},
        {"silos": 10**6, "scenario__federation__silos": 10**6},
        {"scenario": {}},
        {"scenario": None},
        {"missed": []},
        {"releases": None},
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_malformed_certificate_record_is_refused_in_one_line(
    copied: dict[str, Deployment], values: dict[str, Any]
) -> None:
    run = copied["fixed"]
    run.forge(lambda tree: record(**values)(tree["body"]["record"]), sign=True)
    code, printed = run.verify()
    assert (code, printed.count("\n")) == (1, 1), printed[:300]
    assert run.sign(1).count("\n") == 1


def test_a_certificate_states_the_total_cost_of_other_runs_of_the_same_scenario(tmp_path: Path) -> None:
    """A coordinator certifies one run with the model of another: the page says what all of them cost."""
    run = deployment(tmp_path, fixed_order(evaluation=None))
    (cell,) = json.loads((run.folder / "results.json").read_text())["cells"]
    guards = [open_guards(read_policy(policy)).training for policy in run.policies]
    run_by(guards, resolve_cell(cell["scenario"], "test"), "again")
    assert run.refusal()[0] == ""
    page = (run.folder / "certificate.html").read_text()
    assert "Silo 1 had 1 other run on its records, 1 of the very same scenario; all together are μ = 5.65" in page
