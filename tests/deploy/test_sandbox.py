"""The shipped units under their own sandbox: they work, and nothing else of the disk can be written."""

import os
from pathlib import Path

import pytest

from fedpriv.addons.services.certificates import make_node_key, make_server_keys
from tests.deploy.sandbox import ROOT, UNITS, command_of, may_unshare, run_inside
from tests.silo.guarded import write_silo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not may_unshare(), reason="needs root and mount namespaces"),
]

ASK = """
import os, subprocess, sys, time
from pathlib import Path
sys.path[:0] = [{root!r}]
from tests.silo.guarded import CELL, ZERO
from fedpriv.clients.app import ask_admission, ask_release
from fedpriv.protocol.messages import Refusal
socket = Path("/run/fedpriv-guard/guard.sock")
guard = subprocess.Popen({command!r})
while not socket.exists() and guard.poll() is None:
    time.sleep(0.1)
refusal = ask_admission(socket, "run", CELL)
print("agreement:", refusal and refusal.reason, flush=True)
answer = None if refusal else ask_release(socket, "run", CELL, 1, ZERO.numpy())
print("answer:", "none" if answer is None or isinstance(answer, Refusal) else answer.shape, flush=True)
health = subprocess.run([sys.executable, "-IS", "{root}/deploy/health.py", f"unix:{{socket}}"], stderr=-3)
print("health:", health.returncode, flush=True)
guard.kill()
guard.wait()
"""


def ask_guard(folder: Path, unit: str) -> str:
    """What a guard of this unit says to a question for agreement and, if it agrees, to round 1, and its health."""
    (folder / "etc").mkdir()
    policy = write_silo(folder / "etc" / "guard")
    text = policy.read_text().replace('"ledger-0.sqlite"', '"/var/lib/fedpriv-guard/ledger.sqlite"')
    text = text.replace('"0.sock"', '"/run/fedpriv-guard/guard.sock"\nmark = "/var/lib/fedpriv-mark/ledger.mark"')
    policy.write_text(text)
    policy.rename(policy.with_name("policy.toml"))
    command = command_of(unit, folder / "etc")
    (folder / "ask.py").write_text(ASK.format(root=str(ROOT), command=command))
    begin = f"chmod 700 /var/lib/fedpriv-mark; {command[0]} silo init {folder}/etc/guard/policy.toml"
    done = run_inside(unit, folder, begin, str(folder / "ask.py"))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_sandboxed_guard_can_write_its_rollback_mark_on_another_disk(tmp_path: Path) -> None:
    """Was: agreed to, and EROFS in round 1, when other silos had been charged."""
    told = ask_guard(tmp_path, (UNITS / "fedpriv-guard.service").read_text("utf-8"))
    assert "agreement: None\nanswer: (7850,)\nhealth: 0\n" in told


def test_a_guard_that_cannot_write_its_rollback_mark_is_unhealthy_and_refuses_runs(tmp_path: Path) -> None:
    unit = (UNITS / "fedpriv-guard.service").read_text("utf-8").replace("ReadWritePaths=", "# ReadWritePaths=")
    told = ask_guard(tmp_path, unit)
    assert "agreement: the silo's disk of ledger.mark cannot be written, so nothing is released: Read-only" in told
    assert "answer: none\nhealth: 1\n" in told


SERVE = """
import os, subprocess, sys, time
from pathlib import Path
import httpx
service = subprocess.Popen({command!r})
def health():
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds="/run/fedpriv/control.sock")) as client:
            return client.get("http://superlink/health", timeout=5.0).status_code
    except httpx.HTTPError:
        return 0
while health() != 200 and service.poll() is None:
    time.sleep(0.2)
print("health:", health(), flush=True)
for folder in ("/var/lib/fedpriv/runs/trial", "/var/lib/elsewhere/trial"):
    try:
        Path(folder).mkdir(parents=True)
        print(folder, "yes", flush=True)
    except OSError as error:
        print(folder, error.strerror, flush=True)
service.terminate()
print("end:", service.wait(), flush=True)
"""


def test_a_sandboxed_superlink_can_write_runs_only_where_its_unit_says(tmp_path: Path) -> None:
    """Was: no page and no unit said where, and a run ended without a result."""
    unit = (UNITS / "fedpriv-superlink.service").read_text("utf-8")
    keys = tmp_path / "etc" / "superlink"
    (keys / "nodes").mkdir(parents=True)
    make_server_keys(keys)
    make_node_key(tmp_path / "node.key", keys / "nodes" / "silo-0.pub")
    command = [word.replace("0.0.0.0", "127.0.0.1") for word in command_of(unit, tmp_path / "etc")]
    (tmp_path / "serve.py").write_text(SERVE.format(command=[*command, "--port", "18461"]))
    done = run_inside(unit, tmp_path, "true", str(tmp_path / "serve.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "health: 200",
        "/var/lib/fedpriv/runs/trial yes",
        "/var/lib/elsewhere/trial Read-only file system",
        "end: 0",
    ], done.stderr
    assert "--out /var/lib/fedpriv/runs/NAME" in unit
