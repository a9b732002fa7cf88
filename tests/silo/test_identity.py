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
from tests.silo.guarded import ZERO, cell_json, guard_of, refused, write_silo

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
    policies = []
    for silo, identity in enumerate(write_identities(folder)):
        policies.append(path := write_silo(folder, silo, trust="secure-aggregation", silos=None))
        path.write_text(f'identity = "{identity.name}"\npeers = "peers"\n' + path.read_text())
    return [guard_of(path) for path in policies]


def test_silos_that_know_each_other_agree(tmp_path: Path) -> None:
    silos = guards(tmp_path)
    cards = b"".join(guard.public_key("run", CELL) for guard in silos)
    assert len({guard.answer("run", CELL, 1, ZERO, cards).numpy().tobytes() for guard in silos}) == 3


def test_a_key_that_the_server_puts_in_is_refused(tmp_path: Path) -> None:
    """Guarantee: unsigned, signed by another silo, or signed for another run, whichever silo it stands for."""
    silos = guards(tmp_path)
    cards = [guard.public_key("run", CELL) for guard in silos]
    invented, scenario = Masker(bytes(range(32)), 1).public_key, hashlib.sha256(CELL.encode()).digest()

    def signed(silo: int, key: int, run: str, digest: bytes, public: bytes = cards[1][:32]) -> bytes:
        return load_identity(silo, tmp_path / f"identity-{key}", None).sign_key(run, digest, public)

    assert signed(1, 1, "run", scenario) == cards[1]
    others = [signed(1, 1, "another run", scenario), signed(1, 1, "run", bytes(32)), signed(2, 1, "run", scenario)]
    own = [invented + bytes(64), invented + cards[1][32:], signed(1, 2, "run", scenario, invented)]
    for forged in (*own, *others):
        reason = "relayed as silo 1's is not signed by it for this run and scenario"
        refused(silos[0], reason, CELL, signed_keys=b"".join([cards[0], forged, cards[2]]))
    assert silos[0].answer("run", CELL, 1, ZERO, b"".join(cards)).shape == (6 * len(ZERO),)


def test_silos_that_are_not_on_file_are_refused(tmp_path: Path) -> None:
    guard = guards(tmp_path)[0]
    with pytest.raises(RunError, match="knows 3 silos, and the scenario has 4"):
        guard.public_key("run", cell_json(algorithm__trust="secure-aggregation", federation__silos=4))
    assert charged(guard) == []


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


def test_peers_with_a_line_that_is_no_key_or_a_silo_that_stands_for_two_are_refused(tmp_path: Path) -> None:
    """Gains: two shares of the noise, one of them another silo's, for a key that is in `peers` twice."""
    write_identities(tmp_path)
    one, two, _ = (tmp_path / "peers").read_bytes().splitlines(keepends=True)
    for lines, reason in (
        ([one, b"\n", b"  \n", b"nonsense\n"], "peers, line 4: cannot be used as an Ed25519 public key"),
        (
            [one, two, two.replace(b" silo", b" other")],
            "peers: silos 1 and 2 have the same key; each needs its own",
        ),
    ):
        (tmp_path / "peers").write_bytes(b"".join(lines))
        with pytest.raises(InputError, match=reason):
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
