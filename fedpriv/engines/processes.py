"""Child processes of an engine on this machine: their environment, ports, keys and certificates, and their end.

Keys and certificates are made for the processes of one machine; `engines/certificates.py` has those between
machines.  Every child is ended with its engine, by a process of its own if the engine is killed:

python -P -m fedpriv.engines.processes HOME   ends what was started in HOME once its standard input is closed
"""

import datetime
import ipaddress
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedpriv.core.errors import InputError, RunError, printable
from fedpriv.core.files import OWN, write_bytes

ALLOW_ROOT = "FEDPRIV_ALLOW_ROOT"
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_LOG_LEVEL": "WARNING",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
}


def refuse_root(option: str) -> None:
    """InputError for root, unless the environment says that it is meant."""
    if os.geteuid() == 0 and os.environ.get(ALLOW_ROOT) != "1":
        raise InputError(
            f"{option} starts servers that run code they are sent, as root here: run it as another user, "
            f"or set {ALLOW_ROOT}=1 in a container that has nothing else"
        )


@contextmanager
def left_by_nobody(home: Path) -> Iterator[None]:
    """Whatever is started with a FLWR_HOME in `home` ends with the block, or with this process, however it ends.

    Guarantee: a process that is killed with SIGKILL in the block leaves none of them running and no `home`:
    another process, in a session of its own, sees the end of a pipe that only this one holds, and ends them.  If
    that process is killed, this one starts another within a second.
    """
    command, over = [sys.executable, "-P", "-m", __name__, str(home)], threading.Event()

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    helper = start()

    def replace_lost() -> None:  # its end is seen at once: nobody else would end what is left
        nonlocal helper
        while not over.wait(_WATCH_SECONDS):
            if helper.poll() is not None:
                helper.communicate()
                helper = start()

    thread = threading.Thread(target=replace_lost, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        stop_all_of(home)
        helper.kill()
        helper.communicate()


def stop_all_of(home: Path) -> None:
    """End all that was started with a FLWR_HOME in `home`, some of it in sessions of its own.

    Their children are ours too: Ray's agents overwrite their environment with a title.
    """
    ours = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone meanwhile, or another user's
            if Path(process.environ().get("FLWR_HOME", "/")).is_relative_to(home):
                ours.add(process)
    for parent in list(ours):
        with suppress(psutil.NoSuchProcess):
            ours.update(parent.children(recursive=True))
    end_processes(ours)


def end_processes(processes: Collection[Any], seconds: float = 5.0) -> None:
    """Ask processes, of psutil or of subprocess, to end, and kill those that have not after so many seconds."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5.0)


def script(name: str) -> str:
    """A console script of this very Python environment."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise RunError(f"{path} is missing: install fedpriv with its dependencies into this environment")
    return str(path)


def environment(home: Path) -> dict[str, str]:
    """The environment of a Flower process with a home of its own."""
    scripts = str(Path(sys.executable).parent)
    path = f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"  # Flower looks for its programs there
    return {**os.environ, **_QUIET, "FLWR_HOME": str(home), "PATH": path}


def start_logged(command: Sequence[str], home: Path, name: str, **variables: str) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own, which has `home`, and appends what it says to NAME.log there."""
    (home / "empty").mkdir(exist_ok=True)  # a working directory precedes an app on Flower's import path
    with (home / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=home / "empty",
            env={**environment(home), **variables},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def log_tail(home: Path, name: str, lines: int) -> str:
    """The end of a log, to be put behind a message."""
    text = (home / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    return "\n".join([":", *map(printable, text.splitlines()[-lines:])]) if text else ""


def free_port() -> int:
    """A TCP port of this machine that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


AUTHORITY, CERTIFICATE, KEY, NODE_KEY = "ca.crt", "server.pem", "server.key", "node.key"
SECRET = "superexec.secret"
_WATCH_SECONDS = 0.5
_EVER = datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59)  # RFC 5280: no end


def make_server_keys(folder: Path) -> None:
    """Write ca.crt, server.pem and server.key (0600) for 127.0.0.1 into `folder`.

    The certificate lasts for ever, like the service that made it for itself, and whatever a clock says.

    Guarantee: ca.crt vouches for server.pem and for nothing else: it is the same certificate, and no authority's.
    Whoever takes over a port of a process that ended cannot answer in its place.
    """
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")
    own = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([name]))
        .issuer_name(x509.Name([name]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_EVER[0])
        .not_valid_after(_EVER[1])
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(own), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    for path in (folder / AUTHORITY, folder / CERTIFICATE):
        path.write_bytes(certificate.public_bytes(pem))
    write_bytes(folder / KEY, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), OWN)


def make_node_key(private: Path, public: Path) -> None:
    """A SuperNode's own key (OpenSSH, 0600) and its public half."""
    key = ec.generate_private_key(ec.SECP384R1())
    ssh, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    write_bytes(private, key.private_bytes(serialization.Encoding.PEM, ssh, plain), OWN)
    form = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    public.write_bytes(key.public_key().public_bytes(*form) + b"\n")


def node_public_key(path: Path) -> bytes:
    """The public key in `path`, one line as ssh-keygen writes it, as Flower knows it (PEM); InputError if none."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
        if isinstance(key, ec.EllipticCurvePublicKey):
            return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        reason = "it is no ECDSA key"
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        reason = str(error)
    raise InputError(f"{path}: expected a public key as `ssh-keygen -t ecdsa -b 384` makes ({reason})")


def tls_options(keys: Path) -> list[str]:
    """Options of Flower's servers for the certificate and the key in `keys`."""
    return [
        f"--ssl-ca-certfile={keys / AUTHORITY}",
        f"--ssl-certfile={keys / CERTIFICATE}",
        f"--ssl-keyfile={keys / KEY}",
    ]


def state_root() -> Path:
    """Folder for what fedpriv keeps between starts, for this user."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedpriv"


def service_folder(name: str, socket: Path | None) -> Path:
    """Folder for the files of a running service: beside its socket, or in its user's state folder.

    Neither is a folder from which hosts delete old files, as they do from /tmp.
    """
    if socket is not None:
        return socket.with_name(f"{socket.name}.d")
    return state_root() / f"{name}-{os.getpid()}"


@contextmanager
def made_anew(folder: Path) -> Iterator[None]:
    """An empty folder of mode 0700, gone when the block is left; one of a service that was killed is replaced.

    Raises:
        InputError: it cannot be made.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise InputError(f"{folder}: the service's own files cannot be there ({error.strerror})") from None
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def isolate(folder: Path) -> list[str]:
    """Make keys in `folder` for a server whose tasks are processes of their own; its options for them."""
    make_server_keys(folder)
    write_bytes(folder / SECRET, secrets.token_bytes(32), OWN)
    return ["--isolation=process", f"--superexec-auth-secret-file={folder / SECRET}"]


if __name__ == "__main__":
    sys.stdin.buffer.read()
    stop_all_of(Path(sys.argv[1]))
    shutil.rmtree(sys.argv[1], ignore_errors=True)
