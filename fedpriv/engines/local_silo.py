"""A silo as processes of this machine: its own folder, guard and SuperNode, as on a machine of its own.

Guard and SuperNode share nothing with the others: the shard, the ledger with its keys and the policy lie in a
folder of mode 0700, and only the SuperNode talks to the SuperLink.
"""

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from fedpriv.clients.guards import begin_ledgers
from fedpriv.clients.policy import read_policy
from fedpriv.clients.prepare import allowance_of, evaluation_of, policy_text, write_policy, write_shard
from fedpriv.clients.writers import own_folder
from fedpriv.data.datasets import load
from fedpriv.engines import supernode_process
from fedpriv.engines.processes import environment, script
from fedpriv.running.held_out import held_out_of_silos, records_of_silos
from fedpriv.scenario import Cell

SOCKET = "guard.sock"
Process = subprocess.Popen[bytes]


def state_folder(run_token: str) -> Path:
    """Where the silos of a local run keep what must survive it being interrupted: never in its RUN_DIR."""
    root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(root) / "fedpriv" / run_token


def write_silos(cell: Cell, folder: Path, home: Path) -> list[Path]:
    """For each silo a policy that allows exactly this run, in `home`, over its shard and ledger in `folder`.

    The paths of the policies, one a silo.  Shards and ledgers that are there are left as they are: they say what
    was released.  InputError for a run that no policy allows.
    """
    allow, evaluation, tests = allowance_of(cell), evaluation_of(cell), held_out_of_silos(cell)
    dataset, order = load(cell.data.name, table=cell.data.table), records_of_silos(cell)
    policies = []
    for silo in range(cell.federation.silos):
        kept, own = folder / f"silo-{silo}", home / f"silo-{silo}"
        for path in (kept, own):
            own_folder(path, 0o700)
        begun = (kept / "ledger.sqlite").exists() or (kept / "shard.npz").exists()
        if not begun:
            write_shard(kept / "shard.npz", dataset, order[silo], tests[silo])
        keys = {
            "silo": silo,
            "classes": dataset.classes,
            "shard": str(kept / "shard.npz"),
            "ledger": str(kept / "ledger.sqlite"),
            "socket": str(own / SOCKET),
        }
        policies.append(own / "policy.toml")
        write_policy(policies[-1], policy_text(keys, allow, evaluation=evaluation))
        if not begun:
            begin_ledgers(read_policy(policies[-1]))
    return policies


@dataclass
class LocalSilo:
    """The processes of silo `number`; the short-lived folder of `policy` has its socket and logs.

    `keys` is the folder with its SuperNode's key.
    """

    number: int
    policy: Path
    superlink: str
    keys: Path
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.policy.parent

    def start(self) -> None:
        self.start_guard()
        self.start_supernode()

    def start_guard(self) -> None:
        self._start("guard", [script("fedpriv"), "silo", "run", str(self.policy)])

    def start_supernode(self) -> None:
        guard = self.home / SOCKET
        self._start("supernode", supernode_process.command(self.superlink, self.number, guard, self.keys))

    def kill(self, name: str) -> None:
        """SIGKILL the guard or the SuperNode, with all it started, and wait until it is gone."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def ended(self) -> str | None:
        """Which of its processes has ended, with the end of its log; None while both run."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                return (
                    f"silo {self.number}'s {name} ended with exit code {process.returncode}{self._log_tail(name)}"
                )
        return None

    def _start(self, name: str, command: list[str]) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.home, env=environment(self.home), stdout=log, stderr=log, start_new_session=True
            )

    def _log_tail(self, name: str) -> str:
        lines = (self.home / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return ":\n" + "\n".join(lines[-5:]) if lines else ""


def remove_silos(folder: Path) -> None:
    """Remove the silos' folders of a run that is over, with its records and ledgers."""
    shutil.rmtree(folder)
