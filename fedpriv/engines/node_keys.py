"""Public keys of SuperNodes at the SuperLink: read, shown by their fingerprints, and revoked while it runs.

A key is registered as long as keys/nodes/silo-N.pub has it.
"""

import hashlib
import logging
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from fedpriv.core.errors import InputError
from fedpriv.core.files import sync_folder
from fedpriv.engines.certificates import Renewed
from fedpriv.engines.processes import node_public_key

_log = logging.getLogger("fedpriv.superlink")
LOOKS = 2.0
"""Seconds between two looks of a SuperLink at its files of keys."""


def registered(keys: Path) -> dict[str, bytes]:
    """The keys (PEM) in keys/nodes by their silos' names, such as silo-0; InputError for any that is none."""
    found = sorted((keys / "nodes").glob("*.pub"))
    if not found:
        raise InputError(f"{keys / 'nodes'}: no public key of a SuperNode; run deploy/make-keys.sh")
    if wrong := [path.name for path in found if not re.fullmatch(r"silo-(0|[1-9][0-9]*)\.pub", path.name)]:
        raise InputError(f"{keys / 'nodes' / wrong[0]}: expected silo-N.pub, which says whose key it is")
    nodes = {path.stem: node_public_key(path) for path in found}
    if len(set(nodes.values())) < len(nodes):
        raise InputError(f"{keys / 'nodes'}: two silos have one key; each needs its own")
    return nodes


def fingerprint(key: bytes) -> str:
    """What `ssh-keygen -l` shows of a key (PEM): SHA256: and 43 digits of base 64."""
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    line = serialization.load_pem_public_key(key).public_bytes(encoding, form)
    return "SHA256:" + b64encode(hashlib.sha256(b64decode(line.split()[1])).digest()).decode().rstrip("=")


def revoke(keys: Path, silo: int) -> str:
    """Take the key of silo `silo` out of keys/nodes, for good when this returns; its fingerprint.

    InputError, and nothing is taken, if the silo has no key there or its file has none.
    """
    path = keys / "nodes" / f"silo-{silo}.pub"
    if not path.exists():
        there = ", ".join(each.stem for each in sorted(path.parent.glob("*.pub"))) or "none"
        raise InputError(f"{path}: silo {silo} has no key here; registered are {there}")
    told = fingerprint(node_public_key(path))
    try:
        path.unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise InputError(f"{path}: cannot be taken away: {error.strerror}") from None
    return told


class Revoked:
    """Notices that keys which were registered are there no more.

    Guarantee: a key whose file was taken away, or has another key now, is revoked for as long as this SuperLink
    runs, whatever becomes of the file.  A file that cannot be read, or a folder that is away, revokes nothing: a
    disk that fails is no revocation.
    """

    def __init__(self, keys: Path, nodes: Mapping[str, bytes], every: float = LOOKS) -> None:
        """`nodes`: what `registered` found."""
        self._folder, self._left = keys / "nodes", dict(nodes)
        self._files = Renewed(*(self._folder / f"{name}.pub" for name in nodes), every=every)
        self._looked = False

    def look(self) -> list[str]:
        """Names whose key is revoked since the last look, each once; the files are read now and then."""
        if self._looked and not self._files.changed():
            return []
        self._looked = True
        revoked = [name for name, key in self._left.items() if self._is_revoked(self._folder / f"{name}.pub", key)]
        for name in revoked:
            _log.warning("%s: the key %s is revoked", name, fingerprint(self._left.pop(name)))
        return revoked

    def _is_revoked(self, path: Path, key: bytes) -> bool:
        try:
            path.stat()
        except FileNotFoundError:
            return self._folder.is_dir()
        except OSError:
            return False
        try:
            return node_public_key(path) != key
        except InputError as error:
            _log.warning("a key that changed revokes nothing: %s", error)
            return False
