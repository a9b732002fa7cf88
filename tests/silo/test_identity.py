"""Silos that have each other's keys on file take no key from the server that its silo did not sign."""

import hashlib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fedpriv.core.errors import InputError, RunError
from fedpriv.silo.guard import Guard
from fedpriv.silo.masks import Masker, load_identity
from tests.silo.charged import charged
from tests.silo.guarded import ZERO, cell_json, guard_of, write_silo

CELL = cell_json(algorithm__trust="secure-aggregation")


def write_identities(folder: Path, silos: int = 3) -> list[Path]:
    """Private keys of so many silos, and `peers` with their public ones, as ssh-keygen writes them."""
    keys = [Ed25519PrivateKey.generate() for _ in range(silos)]
    paths = []
    for silo, key in enumerate(keys):
        paths.append(folder / f"identity-{silo}")
        paths[-1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        paths[-1].chmod(0o600)
    lines = [key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) for key in keys]
    (folder / "peers").write_bytes(b"".join(line + b" silo\n" for line in lines))
    return paths


def guards(folder: Path) -> list[Guard]:
    found = []
    for silo, identity in enumerate(write_identities(folder)):
        path = write_silo(folder, silo, trust="secure-aggregation", silos=None)
        path.write_text(f'identity = "{identity.name}"\npeers = "peers"\n' + path.read_text())
        found.append(guard_of(path))
    return found


def test_silos_that_know_each_other_agree(tmp_path: Path) -> None:
    of = guards(tmp_path)
    cards = b"".join(guard.public_key("run", CELL) for guard in of)
    assert len({guard.answer("run", CELL, 1, ZERO, cards).numpy().tobytes() for guard in of}) == 3


def test_a_key_that_the_server_puts_in_is_refused(tmp_path: Path) -> None:
    """Guarantee: unsigned, signed by another silo, or signed for another run, whichever silo it stands for."""
    of = guards(tmp_path)
    cards = [guard.public_key("run", CELL) for guard in of]
    own = Masker(bytes(range(32)), 1).public_key
    scenario = hashlib.sha256(CELL.encode()).digest()
    assert load_identity(1, tmp_path / "identity-1", None).sign_key("run", scenario, cards[1][:32]) == cards[1]
    elsewhere = load_identity(1, tmp_path / "identity-1", None).sign_key("another run", scenario, cards[1][:32])
    otherwise = load_identity(1, tmp_path / "identity-1", None).sign_key("run", bytes(32), cards[1][:32])
    by_another = load_identity(1, tmp_path / "identity-2", None).sign_key("run", scenario, own)
    as_another = load_identity(2, tmp_path / "identity-1", None).sign_key("run", scenario, cards[1][:32])
    for forged in (own + bytes(64), own + cards[1][32:], elsewhere, otherwise, by_another, as_another):
        with pytest.raises(RunError, match="relayed as silo 1's is not signed by it for this run and scenario"):
            of[0].answer("run", CELL, 1, ZERO, b"".join([cards[0], forged, cards[2]]))
    assert of[0].answer("run", CELL, 1, ZERO, b"".join(cards)).shape == (6 * len(ZERO),)


def test_silos_that_are_not_on_file_are_refused(tmp_path: Path) -> None:
    of = guards(tmp_path)
    more = cell_json(algorithm__trust="secure-aggregation", federation__silos=4)
    with pytest.raises(RunError, match="knows 3 silos, and the scenario has 4"):
        of[0].public_key("run", more)
    assert charged(of[0]._ledger) == []


@pytest.mark.parametrize("name", ["identity", "peers"])
@pytest.mark.parametrize("content", [b"nonsense", b"", bytes(range(32))], ids=["nonsense", "empty", "raw"])
def test_files_that_are_no_keys_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InputError, match=r"/file.*(cannot be used|expected)"):
        load_identity(0, path if name == "identity" else None, path if name == "peers" else None)
    with pytest.raises(InputError, match=r"none: cannot be read"):
        load_identity(0, tmp_path / "none", None)


def test_a_line_of_a_file_with_empty_lines_is_named_by_its_number(tmp_path: Path) -> None:
    write_identities(tmp_path)
    lines = (tmp_path / "peers").read_bytes().splitlines(keepends=True)
    (tmp_path / "peers").write_bytes(b"".join([lines[0], b"\n", b"  \n", b"nonsense\n"]))
    with pytest.raises(InputError, match=r"peers, line 4: cannot be used as an Ed25519 public key"):
        load_identity(0, None, tmp_path / "peers")


def test_one_silo_cannot_stand_for_two(tmp_path: Path) -> None:
    """Gains: two shares of the noise, one of them another silo's, for a key that is in `peers` twice."""
    write_identities(tmp_path)
    lines = (tmp_path / "peers").read_bytes().splitlines(keepends=True)
    (tmp_path / "peers").write_bytes(b"".join([lines[0], lines[1], lines[1].replace(b" silo", b" other")]))
    with pytest.raises(InputError, match=r"peers: silos 1 and 2 have the same key; each needs its own"):
        load_identity(0, None, tmp_path / "peers")


def test_a_key_that_is_not_on_file_for_its_silo_is_named_at_once(tmp_path: Path) -> None:
    """Another's number in the policy: every other silo would refuse, in the middle of a run."""
    first, *_ = write_identities(tmp_path)
    with pytest.raises(InputError, match=r"identity-0: its public half is not the one .*peers has for silo 1"):
        load_identity(1, first, tmp_path / "peers")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_signing_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """Gains: the name of a silo, for any user of its machine: keys of his own under the other silos' masks."""
    first, *_ = write_identities(tmp_path)
    first.chmod(mode)
    with pytest.raises(InputError, match=r"identity-0: others can read this key; chmod 600 it"):
        load_identity(0, first, None)
