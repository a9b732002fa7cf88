"""`fedpriv certify`: what is signed recomputes without the data, and nothing else passes."""

import base64
import importlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

import fedpriv
from fedpriv.addons.certificate.certify import (
    COORDINATOR,
    FORMAT,
    SignedCertificate,
    read_certificate,
    sign_certificate,
    verify_certificate,
)
from fedpriv.addons.certificate.command import _read_people
from fedpriv.core.errors import FedprivError, InputError, RunError
from fedpriv.core.signed import (
    _signed_bytes,
    canonical_json,
    format_public_key,
    load_or_create_key,
    read_canonical_json,
    read_signers,
    sha256,
    sign_data,
)
from fedpriv.papers.table import ALGORITHMS
from fedpriv.silo import demo
from tests.attacks.deployment import Deployment, deployment, fixed_order, secret_order
from tests.cli.command import FEDPRIV
from tests.cli.command import fedpriv as command
from tests.conftest import small_tree
from tests.silo.guarded import guard_of, write_silo

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certified simulation, with the coordinator's key and the file of whom to trust beside it."""
    folder = fedpriv.run(small_tree(), out=tmp_path_factory.mktemp("runs") / "small").folder
    certify(folder)
    return folder


def certify(folder: Path, *options: object) -> str:
    """Certify, and write down whom to trust: the coordinator; what was printed."""
    done = command("certify", folder, "--key", folder / "coordinator.key", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "trusted").write_text(done.stdout.splitlines()[0] + "\n")
    return done.stdout


def check(path: Path, folder: Path) -> None:
    verify_certificate(path, read_signers(folder / "trusted"))


def rewritten(folder: Path, edit: Edit, *, by: str = "coordinator.key") -> Path:
    """The certificate after an edit of its data, signed anew by a key of the folder."""
    tree = json.loads((folder / "certificate.json").read_text())
    before = tree["about"]
    edit(tree)
    if tree["about"] == before:
        with suppress(Exception):  # what is none has no first line
            tree["about"] = SignedCertificate(tree["body"], tree["silos"]).about_line
    document = {name: tree[name] for name in ("about", "format", "body", "silos")}
    path = folder / "rewritten.json"
    path.write_bytes(
        canonical_json({**document, "coordinator": sign_data(load_or_create_key(folder / by), FORMAT, document)})
    )
    return path


@pytest.mark.slow
def test_a_certificate_is_verified_in_another_process_without_the_run_folder(run: Path, tmp_path: Path) -> None:
    for name in ("certificate.json", "trusted", "models/0000.npy"):
        (tmp_path / Path(name).name).write_bytes((run / name).read_bytes())
    words = ["certify", "--verify", "certificate.json", "--keys", "trusted", "--model", "0000.npy"]
    done = subprocess.run([FEDPRIV, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    who, claim, model = done.stdout.splitlines()
    assert "one record of a silo, replace-one neighbours: μ-GDP exactly with μ = 4" in claim
    assert who == "a simulation: no silo's guard had a part in it, and none signed"
    assert model == "the model is the one that was certified"


@pytest.mark.parametrize("flips", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_certificate_with_any_one_byte_changed_is_refused(run: Path, tmp_path: Path, flips: int) -> None:
    """Guarantee: a certificate with one byte changed is refused, whichever."""
    all_refused(run, tmp_path / "certificate.json", flips)


def all_refused(folder: Path, path: Path, flips: int) -> None:
    """Flip so many bytes of the folder's certificate, one at a time, and more of the coordinator's signature."""
    content = (folder / "certificate.json").read_bytes()
    signers, draw = read_signers(folder / "trusted"), random.Random(flips)
    signed = content.index(b'"coordinator": {')
    places = draw.sample(range(len(content)), flips) + (
        draw.sample(range(signed, signed + 260), 40 if flips < 100 else 260)
    )
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= draw.randrange(1, 256) if place % 2 else 32  # 32: the other case of a letter
        path.write_bytes(flipped)
        with pytest.raises(FedprivError) as refused:
            verify_certificate(path, signers)
        assert "\n" not in str(refused.value)
    print(f"{len(places)} flips of {len(content)} bytes: all refused")


def smaller(tree: dict[str, Any]) -> None:
    """Twice the noise in the releases and half of the promise in the scenario, with all that follows from them."""
    from fedpriv.claims.entries import make_entry

    record = tree["body"]["record"]
    record["releases"][0]["std"] *= 2.0
    record["scenario"]["privacy"]["rho"] = 2.0
    record["target"] = "mu = 2"
    record.update(json.loads(json.dumps(make_entry(record).recomputed_record)))


def test_certificates_with_consistently_edited_figures_are_refused_by_the_signature(run: Path) -> None:
    """Guarantee: an attacker who recomputes every figure and digest lacks the key, whatever key the file names."""
    path = rewritten(run, smaller)
    check(path, run)  # the coordinator itself can: it is its word, of a simulation
    tree = json.loads(path.read_text())
    tree["coordinator"] = json.loads((run / "certificate.json").read_text())["coordinator"]
    path.write_bytes(canonical_json(tree))
    with pytest.raises(RunError, match="the signature of the coordinator is not of this content: it was edited"):
        check(path, run)
    with pytest.raises(RunError, match="signed for the coordinator by another key than the one that you trust"):
        check(rewritten(run, smaller, by="mallory.key"), run)
    tree["coordinator"]["key"] = format_public_key(load_or_create_key(run / "mallory.key").public_key())
    path.write_bytes(canonical_json(tree))
    with pytest.raises(RunError, match="by another key"):
        check(path, run)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda tree: tree["body"]["record"].update(epsilon=1.0),
            r"record\.epsilon is 1\.0, and releases and scenario give 24",
        ),
        (lambda tree: tree["body"]["record"].update(mu=3.9), r"record\.mu is 3\.9"),
        (lambda tree: tree["body"]["record"].update(relation="zero-out"), r"record\.relation is 'zero-out'"),
        (lambda tree: tree["body"]["record"].update(noise="release"), "drawn by a deployment only"),
        (lambda tree: tree["body"]["record"].update(rounds=9), "rounds is 9, and releases and scenario give 8"),
        (lambda tree: tree["body"]["record"].update(silos=4), "silos is 4, and releases and scenario give 3"),
        (
            lambda tree: tree["body"]["record"].update(engine="deployment"),
            "0 of 3 silos signed: silos 0, 1, 2 have not",
        ),
        (lambda tree: tree.update(about="signed by all"), "about is 'signed by all', and it is: a simulation"),
        (
            lambda tree: tree["body"]["record"].update(silos=10**18),
            "more rounds or silos than a certificate may have",
        ),
        (
            lambda tree: tree["body"]["record"].update(silos=10**6 + 1, engine="deployment"),
            "more rounds or silos than a certificate may have",
        ),
        (  # scenarios have up to 10^7 silos, and a simulation of them is certified
            lambda tree: tree["body"]["record"].update(silos=10**7),
            "silos is 10000000, and releases and scenario give 3",
        ),
        (
            lambda tree: tree["body"]["record"].update(missed={"3": [1]}),
            "missed has silos or rounds that the scenario has not",
        ),
        (
            lambda tree: tree["body"]["record"].update(missed={"02": [1]}),
            "missed has silos or rounds that the scenario has not",
        ),
        (lambda tree: tree["body"]["record"]["releases"][0].update(clips=[[1.0, 10**15]]), "more rounds or silos"),
        (
            lambda tree: tree["body"]["record"]["releases"][0].update(
                mechanism={"name": "bisr", "decay": 1.0, "bands": 10**12}
            ),
            "or larger noise matrices",
        ),
        (lambda tree: tree["body"]["record"]["releases"][0].update(std=1e-320), "mu = inf"),
        (lambda tree: tree["body"]["record"]["releases"][0].update(decay="1"), "certificate|record"),
        (lambda tree: tree["body"]["record"].update(releases=[]), r"record\.noise is 'simulation'"),
        (lambda tree: tree["body"]["record"].pop("zcdp"), r"record\.zcdp is None"),
        (lambda tree: tree["body"].update(record=[]), "not a whole certificate"),
        (lambda tree: tree.update(silos={}), "silos"),
        (lambda tree: tree.update(silos=[{"silo": 0}]), "silo 0 signed, and has no part in a simulation"),
    ],
)
def test_signed_figures_that_the_releases_do_not_give_are_refused_by_name(
    run: Path, edit: Edit, said: str
) -> None:
    with pytest.raises(RunError, match=said) as refused:
        check(rewritten(run, edit), run)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": ' * 5000,
        b'{\n "format": NaN\n}\n',
        b'{\n "format": 1e400\n}\n',
        b'{\n "format": ' + b"9" * 5000 + b"\n}\n",
        b'{\n "format": 99999999999999999999\n}\n',
        b'{\n "format": "fedpriv certificate 1",\n "format": "fedpriv certificate 1"\n}\n',
        b'{\n "format": "\\ud800"\n}\n',
        b'{"format":1}',
        b"x" * (2**24 + 1),
    ],
)
def test_a_hostile_certificate_file_is_refused_in_one_line(run: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hostile.json"
    path.write_bytes(content)
    for words in (("certify", "--verify", path, "--keys", run / "trusted"), ("silo", "sign", "none.toml", path)):
        done = command(*words, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith(f"fedpriv: {path}: ")


def test_a_certificate_of_a_newer_format_is_not_said_to_be_of_the_first_one(tmp_path: Path) -> None:
    """Before: "certify the run anew", of a certificate for which this program is too old."""
    content = b'{\n "format": "application/vnd.fedpriv.certificate.4+json"\n}\n'
    with pytest.raises(InputError, match="it is of another version of fedpriv: read it with that one"):
        read_certificate(tmp_path / "newer.json", content)


def test_a_certificate_is_not_verified_without_trusted_keys_from_elsewhere(run: Path, tmp_path: Path) -> None:
    """Guarantee: without keys from elsewhere there is no verdict, and no key stands for two."""
    done = command("certify", "--verify", run / "certificate.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "--keys FILE: say whom you trust" in done.stderr
    line = (run / "trusted").read_text()
    for text, said in (
        (line.replace("coordinator", "silo-0"), "have none of the coordinator"),
        (line + line.replace("coordinator", "silo-0"), "its key is there already"),
        ("", "expected lines such as"),
        ("coordinator\n", "cannot be used as an Ed25519 public key"),
    ):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(FedprivError, match=said):
            verify_certificate(run / "certificate.json", read_signers(tmp_path / "keys"))


def test_a_model_other_than_the_certified_one_is_refused(run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "model.npy", np.zeros(7850))
    with pytest.raises(RunError, match="is not the model that was certified"):
        verify_certificate(run / "certificate.json", read_signers(run / "trusted"), tmp_path / "model.npy")


def test_a_certificate_has_no_scores_on_the_test_records_of_silos(tmp_path: Path) -> None:
    """Guarantee: exact metrics of test records stay with the server, whoever gets the certificate."""
    tree = small_tree(evaluation={"records": 4}, algorithm__trust="trusted", algorithm__name="dp-mu2-fl")
    folder = fedpriv.run(tree, out=tmp_path / "run").folder
    told = json.loads((folder / "results.json").read_text())["cells"][0]
    assert told["evaluation"]["published"] == "without noise"
    certify(folder)
    body = json.loads((folder / "certificate.json").read_text())["body"]
    assert not [name for name in body["record"] if name.startswith("test_")]
    assert "this document has no score" in (folder / "model-card.md").read_text()


def test_a_run_with_an_edited_claim_or_with_no_chosen_cell_is_not_certified(tmp_path: Path) -> None:
    folder = fedpriv.run({**small_tree(), "sweep": {"seeds": [1, 2]}}, out=tmp_path / "run").folder
    done = command("certify", folder, "--key", "k", cwd=tmp_path)
    assert "has 2 finished cells; say which model is released by --cell NUMBER" in done.stderr
    assert "Choosing it among them" in certify(folder, "--cell", 1) + (folder / "model-card.md").read_text()
    tree = json.loads((folder / "results.json").read_text())
    tree["cells"][0]["epsilon"] = 1.0
    (folder / "results.json").write_text(json.dumps(tree))
    done = command("certify", folder, "--cell", 0, "--key", "k", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cell 0 claims something else than its releases and scenario give" in done.stderr


@pytest.mark.parametrize("title", ["two\nlines of\u00a0text", "long " * 300])
def test_a_run_whose_title_is_cut_or_escaped_for_display_is_certified(tmp_path: Path, title: str) -> None:
    """Was: "run.title is 'two\\\\nlines …', and the scenario's is 'two\\nlines …'"."""
    folder = fedpriv.run({**small_tree(), "title": title}, out=tmp_path / "run").folder
    certify(folder)
    check(folder / "certificate.json", folder)


def test_a_folder_without_a_finished_cell_is_not_told_to_choose_one(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "results.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "cells": []}))
    done = command("certify", tmp_path / "run", "--key", "k", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"fedpriv: {tmp_path / 'run'}: has no finished cell\n")


def test_answers_of_people_are_escaped_in_the_certificate_page_and_model_card(run: Path, tmp_path: Path) -> None:
    (tmp_path / "people.toml").write_text('purpose = "A <script>course</script>"\nretention = "[two](years)"\n')
    folder = tmp_path / "run"
    fedpriv.run(small_tree(), out=folder)
    certify(folder, "--people", tmp_path / "people.toml", "--say", "contact=a@b.c")
    page, card = (folder / "certificate.html").read_text(), (folder / "model-card.md").read_text()
    assert "A &lt;script&gt;course" in page
    assert "<script" not in page
    assert "\\[two\\](years)" in card
    assert "to be filled in by the information-governance board" in page
    assert "A SIMULATION" in page
    assert "A SIMULATION" in card
    assert "certificate.json" in (folder / "ro-crate-metadata.json").read_text()
    for option, said in (("colour=red", "colour: expected one of purpose"), ("purpose", "expected KEY=TEXT")):
        assert said in command("certify", folder, "--key", "k", "--say", option, cwd=tmp_path).stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [("purpose = " + "9" * 5000, "cannot be read as TOML"), ('purpose = "  "', "purpose: expected a text")],
)
def test_a_file_of_answers_that_has_none_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "people.toml").write_text(text)
    with pytest.raises(InputError, match=said):
        _read_people(tmp_path / "people.toml", ())


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """A deployment whose silos have all signed its certificate."""
    run = deployment(tmp_path_factory.mktemp("deployed"), fixed_order())
    assert run.refusal() == ("", run.verify()[1])
    return run


def test_silos_of_a_deployment_sign_the_charges_in_their_ledgers(certified: Deployment) -> None:
    code, printed = certified.verify()
    assert (code, printed.splitlines()[0]) == (0, "2 of 2 silos signed")
    content = certified.certificate.read_text()
    assert content.splitlines()[1] == ' "about": "2 of 2 silos signed",'
    facts = json.loads(content)["silos"][0]
    assert facts["training"]["rounds_answered"] == 2
    assert facts["training"]["charged"]["mu"] == pytest.approx(4.0)
    assert facts["training"]["before"] == {"runs": 0, "mu": 0.0, "slack": 0.0}
    assert facts["training"]["left"]["mu"] == pytest.approx(4.0)
    assert facts["tests"]["charged"]["mu"] == pytest.approx(1.0)
    assert facts["policy"]["sha256"] == sha256(certified.policies[0].read_bytes())
    key = certified.policies[0].parent / "ledger" / "ledger.sqlite.key"
    assert key.stat().st_mode & 0o777 == 0o600
    page = (certified.folder / "certificate.html").read_text()
    assert "A SIMULATION" not in page
    assert page.index("2 of 2 silos signed.") < page.index("<h1>")
    assert "μ = 4, of a lifetime budget of 5.656, left for one more run " in page


@pytest.mark.slow
def test_a_certificate_signed_by_silos_with_any_one_byte_changed_is_refused(
    certified: Deployment, tmp_path: Path
) -> None:
    """Guarantee: a certificate with the parts of its silos and one byte changed is refused, whichever."""
    all_refused(certified.folder, tmp_path / "certificate.json", 2000)


@pytest.mark.parametrize("number", [None, [0], "0"])
def test_a_silo_statement_without_a_valid_silo_number_is_refused_and_changes_no_file(
    certified: Deployment, tmp_path: Path, number: object
) -> None:
    signed = json.loads((certified.folder / "silo-0.json").read_text())
    path, before = tmp_path / "signed.json", certified.certificate.read_bytes()
    path.write_bytes(canonical_json({**signed, "silo": number}))
    line = certified.draft("--signed", path)
    assert (line.count("\n"), certified.certificate.read_bytes()) == (1, before), line
    assert "--signed: a file is no statement that a silo signed" in line


def test_a_certificate_that_fails_its_verification_replaces_none(certified: Deployment, tmp_path: Path) -> None:
    statement = json.loads((certified.folder / "silo-0.json").read_text())
    statement["signed"]["signature"] = "00" * 64
    path = tmp_path / "silo-0.json"
    path.write_bytes(canonical_json(statement))
    files = sorted(path for path in certified.folder.iterdir() if path.is_file())
    before = [path.read_bytes() for path in files]
    line = certified.draft("--signed", path)
    assert line.count("\n") == 1
    assert "certificate.json is not written: the new certificate has a fault: the signature of silo-0" in line
    assert sorted(path for path in certified.folder.iterdir() if path.is_file()) == files
    assert [path.read_bytes() for path in files] == before


def test_signed_silo_statements_are_sorted_by_silo_number() -> None:
    body = {"record": {"engine": "deployment", "scenario": {"federation": {"silos": 12, "rounds": 1, "batch": 1}}}}
    signed = [{"silo": silo, "body": sha256(canonical_json(body))} for silo in (10, 2, 0, 11)]
    content = sign_certificate(body, signed, Ed25519PrivateKey.generate())
    assert [statement["silo"] for statement in json.loads(content)["silos"]] == [0, 2, 10, 11]


def test_a_silo_signs_no_run_that_is_missing_from_its_ledger(certified: Deployment, tmp_path: Path) -> None:
    other = write_silo(tmp_path / "other", 1, budget=6.0)
    guard_of(other)
    done = command("silo", "sign", other, certified.certificate, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "the ledger has no run of record.scenario, the one that is certified, so nothing is signed" in done.stderr
    )


OWN_ALGORITHM = """\
from dataclasses import replace
from fedpriv.papers.table import add_algorithm, find_algorithm
add_algorithm(replace(find_algorithm("dp-sgd"), name="own-sgd"))
"""


@pytest.mark.slow
def test_a_silo_signs_a_run_of_an_algorithm_that_an_extension_of_its_policy_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: "code of one's own is given with --import", an option that `fedpriv silo sign` lacks."""

    def prepare_silos(*arguments: Any, **options: Any) -> list[Path]:
        folders = demo.prepare_silos(*arguments, **options)
        for folder in folders:
            text = (folder / "policy.toml").read_text()
            allowed = '[allow]\nextensions = ["own_sgd_of_a_silo"]\nalgorithms = ["own-sgd"]'
            (folder / "policy.toml").write_text(text.replace("[allow]", allowed))
        return folders

    (tmp_path / "own_sgd_of_a_silo.py").write_text(OWN_ALGORITHM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tests.attacks.deployment.prepare_silos", prepare_silos)
    step = {"name": "own-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1}
    with mock.patch.dict(ALGORITHMS), mock.patch.dict(sys.modules):
        importlib.import_module("own_sgd_of_a_silo")
        own = deployment(tmp_path, secret_order(algorithm=step))
        assert own.draft() == ""
        # Another process begins without the algorithm.
        del ALGORITHMS["own-sgd"], sys.modules["own_sgd_of_a_silo"]
        assert own.sign(0) == ""


def test_a_signing_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    line = format_public_key(load_or_create_key(key).public_key())
    assert key.stat().st_mode & 0o777 == 0o600
    assert format_public_key(load_or_create_key(key).public_key()) == line
    key.chmod(0o644)
    with pytest.raises(InputError, match="others can read this key"):
        load_or_create_key(key)
    with pytest.raises(InputError, match="no key can be made there"):
        load_or_create_key(key / "below")


def test_only_the_canonical_json_form_of_a_signed_document_is_accepted() -> None:
    value = {"b": [1, 1.0, -0.0, 1e-320, True, None, "é"], "a": {}}
    assert read_canonical_json(canonical_json(value), "here") == value
    for other in (b'{"b": 1}\n', b'{\n "b": 1.00\n}\n', b'{\n "b": 1\n}', b'{\n "b": "\xc3\xa9"\n}\n'):
        with pytest.raises(InputError, match="here: cannot be read as a signed document"):
            read_canonical_json(other, "here")
    assert COORDINATOR == "coordinator"


CERTIFICATES = Path(__file__).parent / "certificates"


@pytest.mark.parametrize(
    ("kind", "about"), [("simulation", "a simulation: "), ("deployment", "2 of 2 silos signed")]
)
def test_a_certificate_of_an_earlier_version_still_verifies(kind: str, about: str, tmp_path: Path) -> None:
    """Files that fedpriv 0.3.1 wrote, in its own form of signature; each part counts as before."""
    path, signers = CERTIFICATES / kind / "certificate.json", read_signers(CERTIFICATES / kind / "trusted")
    tree = json.loads(path.read_text())
    assert tree["format"] == "fedpriv certificate 2"
    assert verify_certificate(path, signers).lines[0].startswith(about)
    for name in ("about", "body", "format", "silos"):
        edited = json.loads(path.read_text())
        match name:
            case "about":
                edited["about"] += "."
            case "body":
                edited["body"]["run"]["date"] += "."
            case "format":
                edited["format"] = FORMAT  # the signature of one form is none of the other
            case "silos":
                edited["silos"] = [] if tree["silos"] else [{"silo": 0}]
        other = tmp_path / f"{name}.json"
        other.write_bytes(canonical_json(edited))
        with pytest.raises(RunError, match="the signature of the coordinator is not of this content"):
            verify_certificate(other, signers)


def openssl_verifies(envelope: dict[str, Any], folder: Path) -> bool:
    """Verify an envelope as its specification says, with OpenSSL alone and none of fedpriv's code."""
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
    (signature,) = envelope["signatures"]
    signed = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    key = load_ssh_public_key(signature["keyid"].encode())
    files = {"signed": signed, "sig": base64.b64decode(signature["sig"]), "key.pem": key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )}  # fmt: skip
    for name, content in files.items():
        (folder / name).write_bytes(content)
    words = "openssl pkeyutl -verify -pubin -inkey key.pem -rawin -in signed -sigfile sig"
    return subprocess.run(words.split(), cwd=folder, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs OpenSSL")
def test_openssl_verifies_each_signed_envelope_of_a_certificate(certified: Deployment, tmp_path: Path) -> None:
    """Guarantee: each envelope has the bytes of the certificate, signed by the key of its signer."""
    lines = (certified.folder / "certificate.dsse.jsonl").read_text().splitlines()
    envelopes = [json.loads(line) for line in lines]
    tree = json.loads(certified.certificate.read_text())
    coordinator = tree.pop("coordinator")
    payloads = [json.loads(base64.b64decode(envelope["payload"])) for envelope in envelopes]
    assert payloads[0] == tree
    for payload, statement in zip(payloads[1:], tree["silos"], strict=True):
        assert payload == {name: value for name, value in statement.items() if name != "signed"}
    keys = [envelope["signatures"][0]["keyid"] for envelope in envelopes]
    assert keys == [coordinator["key"], *(statement["signed"]["key"] for statement in tree["silos"])]
    assert [envelope["payloadType"] for envelope in envelopes] == [
        "application/vnd.fedpriv.certificate.3+json", *["application/vnd.fedpriv.silo-statement.3+json"] * 2,
    ]  # fmt: skip
    for envelope in envelopes:
        assert openssl_verifies(envelope, tmp_path)
        edited = {**envelope, "payload": base64.b64encode(base64.b64decode(envelope["payload"]) + b" ").decode()}
        assert not openssl_verifies(edited, tmp_path)
        assert not openssl_verifies({**envelope, "payloadType": envelope["payloadType"] + "x"}, tmp_path)


def test_signed_bytes_follow_the_encoding_of_the_dsse_specification() -> None:
    """The example of DSSE's protocol, with the length of each part."""
    signed = _signed_bytes("http://example.com/HelloWorld", {})
    assert signed == b"DSSEv1 29 http://example.com/HelloWorld 3 {}\n"
