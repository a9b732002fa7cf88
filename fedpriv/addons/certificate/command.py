"""`fedpriv certify` and `fedpriv silo sign`: make a certificate, have silos sign it, recompute one."""

import dataclasses
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpriv.addons.certificate.certify import (
    COORDINATOR,
    PEOPLE,
    body_of,
    certificate,
    read_certificate,
    recomputed,
    verified,
)
from fedpriv.cli.shown import say
from fedpriv.core.errors import FedprivError, InputError, printable
from fedpriv.core.files import write_bytes, write_text
from fedpriv.core.signed import bytes_of, made_key, public_line, read_spelled, sha256, signers_of, spelled

CERTIFICATE, PAGE, CARD = "certificate.json", "certificate.html", "model-card.md"


def verify(path: Path, keys: Path | None, model: Path | None) -> None:
    """Print what holds of a certificate; RunError names the first thing that differs."""
    if keys is None:
        raise InputError(
            '--keys FILE: say whom you trust, a line each, "coordinator ssh-ed25519 AAAA…" and '
            '"silo-0 ssh-ed25519 AAAA…", as they told you: a certificate that names its own signers proves nothing'
        )
    found = verified(path, signers_of(keys), model)
    same = "the model is the one that was certified" if model else "no --model was given to compare"
    say("\n".join([*found.lines, same]) + "\n")


def certify(
    folder: Path, key: Path, cell: int | None, people: Path | None, answers: Sequence[str], silos: Sequence[Path]
) -> None:
    """Write a run's certificate and its views into its folder."""
    from fedpriv.addons.certificate.page import model_card, page, said_of
    from fedpriv.show.exports import export
    from fedpriv.show.statement import stored_audit
    from fedpriv.study.results import read_claims

    results, stored = read_claims(folder), stored_audit(folder)
    audit = None if stored is None else dataclasses.asdict(stored)
    body = body_of(folder, results, cell, _people(people, answers), said_of(results, audit))
    recomputed(body)
    new = not key.exists()
    own, signed = made_key(key), [read_spelled(bytes_of(path), path) for path in silos]
    path = folder / CERTIFICATE
    write_bytes(path, certificate(body, signed, own))
    trusted = f"{COORDINATOR} {public_line(own.public_key())}"
    keys = {COORDINATOR: own.public_key(), **_as_they_say(signed)}
    found = verified(path, keys, all_silos=False)
    lines = [trusted, *found.lines]
    if found.simulated or signed:
        write_text(folder / PAGE, page(found))
        write_text(folder / CARD, model_card(found))
        written = f"{path}, {PAGE}, {CARD} and {export(folder, 'ro-crate').name}"
    else:
        lines.append(
            f"a draft: let each silo call `fedpriv silo sign POLICY {path}`, and give what it writes by --signed"
        )
        written = str(path)
    if new:
        sys.stderr.write(f"fedpriv: made the key {key}, mode 0600; readers trust its first line below\n")
    say("\n".join([*lines, f"written: {written}"]) + "\n")


def sign(policy: Path, path: Path, out: Path | None) -> None:
    """Write what a silo signs of a certificate, after recomputing it from its own ledger and its scenario."""
    from fedpriv.addons.certificate.attest import attested

    tree = read_certificate(path)
    body: Mapping[str, Any] = tree["body"]
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


def key_line(policy_path: Path) -> str:
    """The public key of a silo, as a reader of certificates trusts it; made where there is none."""
    from fedpriv.addons.certificate.attest import signing_key
    from fedpriv.silo.policy import read_policy

    policy = read_policy(policy_path)
    return f"silo-{policy.silo} {public_line(signing_key(policy).public_key())}"


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
    from fedpriv.core.signed import public_key

    try:
        return {
            f"silo-{each['silo']}": public_key(each["signed"]["key"].encode(), f"silo {each['silo']}")
            for each in signed
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"--signed: is nothing that a silo signed ({type(error).__name__})") from None
