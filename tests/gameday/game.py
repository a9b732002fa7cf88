"""Three sites and a coordinator as services of one machine, and runs on them that begin anew when one ends."""

import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedpriv.addons.services.deployment import GUARD_SOCKET, SuperLink
from fedpriv.addons.services.flower_private.control import UNIX_PREFIX, ControlClient
from fedpriv.addons.services.flower_private.presence import list_runs
from fedpriv.addons.services.service import free_port, script_path
from fedpriv.core.errors import FedprivError
from fedpriv.silo.backup import back_up_ledgers
from tests.e2e.federation import Federation
from tests.gameday.checks import charges, finished_run
from tests.gameday.network import Network, Proxies
from tests.gameday.supervisor import Journal, Line, Service, Supervisor
from tests.gameday.wire import Namespaces, NoNamespacesError

ROOT = Path(__file__).resolve().parents[2]
SITES = (0, 1, 2)
COORDINATOR, OPERATOR = "coordinator", "operator"
OTHER_VERSION = "0.2.99"
TRUSTS = ("untrusted", "trusted", "secure-aggregation")
_RUNS = 400  # that the silos' budgets allow, in number
_WELL = 300.0  # seconds within which all has to be up again
_DISK = "64m"


class GameError(Exception):
    """What a fault must not do, in words."""


@dataclass
class Struck:
    """A fault that was made, and what came of it: a row of the table."""

    seed: int
    number: int
    fault: str
    party: str
    time: str
    detail: str = ""
    told: str = ""
    """Seconds until somebody was told, and by which service."""
    well: float | None = None
    """Seconds from the fault until all was up and rounds were answered again."""
    outcome: str = ""
    run: int = 0
    """The first run that the fault was in."""


@dataclass
class _Keys:
    """What a replay needs of a run, read while it lasts: it is wiped at its end."""

    silos: list[bytes]
    server: bytes


@dataclass
class Runs:
    """Runs so far: the keys of each, and how many rounds are done in those that are over."""

    number: int = 0
    keys: _Keys | None = None
    over: int = 0
    resumed: int = 0
    checked: int = 0
    refused: int = 0


class Game:
    """A federation, its manager, its network and its runs."""

    def __init__(self, home: Path, seed: int, rounds: int, patience: float) -> None:
        self.home, self.seed, self._stopped, self.days = home, seed, False, 0.0
        self.rounds = rounds
        self.network, self.no_namespaces = _network(seed)
        self.keys = home / "keys"
        make = [str(ROOT / "deploy" / "make-keys.sh"), str(self.keys), str(len(SITES)), self.network.host]
        subprocess.run(make, check=True, capture_output=True)
        self.port = free_port()
        self.control = home / "control.sock"
        (own := home / "own").mkdir(mode=0o700)
        link = SuperLink(ControlClient(f"{UNIX_PREFIX}{self.control}"), home, f"127.0.0.1:{self.port}")
        overrides = [
            f"federation.rounds={rounds}",
            f"federation.batch={2000 // rounds}",
            f"algorithm.trust={TRUSTS[seed % 3]}",
            f"deployment.patience={patience}",
        ]
        self._mounted = [
            path for path in (*(home / "silos" / f"silo-{site}" for site in SITES), home / "runs") if _mount(path)
        ]
        self.fed = Federation(home, own, link, overrides, budget=_RUNS**0.5)
        self.journal = Journal(home / "journal.log")
        self.manager = Supervisor(self.journal)
        self.clocks = _clocks(home)
        self.runs, self.rows, self._lock = Runs(), list[Struck](), threading.RLock()
        self.standstills, self._last = list[tuple[float, float]](), ((0, 0), time.monotonic())
        self.backups = home / "backups"
        for site in SITES:
            self.back_up(site)
        self._begin()

    @property
    def has_disks(self) -> bool:
        """Whether ledgers and runs lie on small disks of their own."""
        return len(self._mounted) == len(SITES) + 1

    def disk_of(self, party: str) -> Path:
        return self.home / "runs" if party == COORDINATOR else self.home / "silos" / f"silo-{party[-1]}"

    def other_version(self) -> Path:
        """A folder that says, first on a path, that this fedpriv is another release."""
        told = self.home / "other" / f"fedpriv-{OTHER_VERSION}.dist-info"
        told.mkdir(parents=True, exist_ok=True)
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fedpriv\nVersion: {OTHER_VERSION}\n")
        return told.parent

    def _clock(self, service: str) -> Path:
        return self.home / f"clock-{service}"

    def set_clock(self, service: str, ahead: float) -> None:
        """Of a service, while it runs; ahead of the others by so many seconds."""
        told = struct.pack("d", self.days * 86_400.0 + ahead)
        with self._clock(service).open("r+b" if self._clock(service).exists() else "wb") as file:
            file.write(told)

    def pass_days(self, days: float) -> None:
        """Everywhere at once."""
        self.days += days
        for service in self.manager.services:
            self.set_clock(service, 0.0)

    def back_up(self, site: int) -> None:
        """As its administrator does after each run."""
        (folder := self.backups / f"silo-{site}").mkdir(mode=0o700, parents=True, exist_ok=True)
        back_up_ledgers(self.fed.silos[site].policy, folder)

    def _begin(self) -> None:
        fedpriv, link = script_path("fedpriv"), f"{UNIX_PREFIX}{self.control}"
        words = ["superlink", "--control", str(self.control), "--state", str(self.home / "runs.json")]
        words += ["--keys", str(self.keys / "superlink"), "--host", self.network.host, "--port", str(self.port)]
        self._service("superlink", None, fedpriv, *words)
        for site in SITES:
            policy = self.fed.silos[site].policy
            node = ["--silo", str(site), "--superlink", self.network.calls(site, self.port)]
            node += [
                "--guard",
                str(policy.parent / GUARD_SOCKET),
                "--keys",
                str(self.keys / f"silo-{site}" / "node"),
            ]
            self._service(f"guard-{site}", site, fedpriv, "silo", "run", str(policy))
            node += ["--health", str(self.node_health(site))]
            self._service(f"node-{site}", site, fedpriv, "supernode", *node)
        self._link = link
        self.begin_run()

    def temporary(self, service: str) -> Path:
        """Temporary folder of a service, from which a host may delete what is old."""
        return self.home / f"tmp-{service}"

    def node_health(self, site: int) -> Path:
        return self.home / f"health-{site}.sock"

    def _service(self, name: str, site: int | None, *command: str, always: bool = True) -> None:
        """Of a site, or of the coordinator, in its place in the network."""
        clock, extra = self._clock(name), {"TMPDIR": str(self.temporary(name))}
        self.temporary(name).mkdir(exist_ok=True)
        if self.clocks is not None:
            extra |= {"LD_PRELOAD": str(self.clocks), "GAMEDAY_CLOCK": str(clock)}
            self.set_clock(name, 0.0)
        words = (*self.network.within(site), *command)
        self.manager.add(Service(name, words, self.home / f"home-{name}", extra, always=always))

    def begin_run(self) -> None:
        """A new run in a folder of its own; started again with --resume as long as it fails."""
        self.runs.number += 1
        self.runs.keys = None
        self._service("run", None, *self.fed.command("--resume", out=self.out), always=False)

    @property
    def out(self) -> str:
        return f"runs/{self.runs.number}"

    def rounds_done(self) -> int:
        """Of all runs."""
        return self.runs.over + self.fed.rounds_done(self.out)

    def look(self) -> None:
        """Note that there is another round, keep the run's keys, check it if it is over, and begin the next."""
        with self._lock:
            if (done := (self.runs.number, self.fed.rounds_done(self.out))) != self._last[0]:
                now = time.monotonic()
                self.standstills.append((self._last[1], now))
                self._last = done, now
            if self.runs.keys is None and self.fed.rounds_done(self.out) >= 1:
                with suppress(sqlite3.Error, OSError, IndexError):  # a ledger that is being put back, say
                    token, server = self.fed.token(self.out), self.fed.own(self.out) / "journal" / "noise.key"
                    silos = self.fed.silo_keys(token)
                    self.runs.keys = _Keys(silos, server.read_bytes() if server.exists() else b"")
            run = self.manager.services["run"]
            if not run.wanted and run.process is None and not self._stopped:
                self._over(run)

    def stop_run(self) -> None:
        """As a person who has read why it cannot go on: it is not begun again until `new_run`."""
        with self._lock:
            self._stopped = True
            self.manager.stop("run")
            with suppress(FedprivError):
                for run in list_runs(self.fed.link.control):
                    if run.state == "running":
                        self.fed.link.control.stop_run(int(run.run))

    def new_run(self, outcome: str) -> None:
        """Another run in the place of one that was refused with these words."""
        with self._lock:
            wrong = charges(self.fed)
            self.settle("; ".join(wrong) if wrong else outcome)
            self.runs.over += self.fed.rounds_done(self.out)
            self.runs.refused += 1
            self._stopped = False
            self.begin_run()

    def _over(self, run: Service) -> None:
        assert self.runs.keys is not None
        keys = self.runs.keys
        self.runs.resumed += run.starts - 1
        wrong = finished_run(self.fed, self.out, keys.silos, keys.server)
        self.settle("; ".join(wrong) if wrong else "same bytes")
        self.runs.over += self.rounds
        self.runs.checked += 1
        shutil.rmtree(self.home / self.out)
        self.begin_run()
        for site in SITES:
            self.back_up(site)
        if wrong:
            raise GameError("; ".join(wrong))

    def settle(self, outcome: str) -> None:
        """Write it into the rows of the run that is over."""
        for row in self.rows:
            row.outcome = row.outcome or outcome

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._pause()

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = _WELL) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise GameError(f"not within {seconds:.0f} s: {what}")
            self._pause()

    def _pause(self) -> None:
        if threading.current_thread() is threading.main_thread():  # the others break things
            self.look()
        time.sleep(0.25)

    def services_of(self, party: str) -> list[str]:
        """A party is `site N`, the coordinator, or the operator who runs `fedpriv run`."""
        if party == COORDINATOR:
            return ["superlink"]
        return ["run"] if party == OPERATOR else [f"guard-{party[-1]}", f"node-{party[-1]}"]

    def server(self) -> psutil.Process | None:
        """The ServerApp's process, if there is one now."""
        for process in self.manager.services["superlink"].processes():
            try:
                if any(Path(word).name == "flwr-serverapp" for word in process.cmdline()[:5]):
                    return process
            except psutil.Error:
                continue
        return None

    def healthy(self) -> bool:
        """Every service runs, and says of itself that it is well."""
        always = [each for each in self.manager.services.values() if each.always]
        if not all(each.running for each in always):
            return False
        sockets = [
            path for site in SITES for path in (self.fed.silos[site].home / GUARD_SOCKET, self.node_health(site))
        ]
        script = str(ROOT / "deploy" / "health.py")
        return all(
            subprocess.run([sys.executable, script, f"unix:{path}"], capture_output=True, check=False).returncode
            == 0
            for path in sockets
        )

    def well(self, what: str) -> None:
        """Wait until all is up and two more rounds are answered; GameError if that takes a person."""
        before = self.rounds_done()
        self.wait_until(lambda: self.rounds_done() >= before + 2, f"rounds again after {what}")
        self.wait_until(self.healthy, f"all healthy after {what}")

    def standstill(self, since: float) -> tuple[float, float]:
        """Since `since`, the longest time between two rounds: when it began, and how long it was."""
        longest = max(
            ((end - begun, begun) for begun, end in self.standstills if end > since), default=(0.0, since)
        )
        return longest[1], longest[0]

    def told(self, party: str, since: float) -> Line | None:
        """The first line that names `party` as the one with which something is wrong."""
        own = self.services_of(party)
        name = party.replace("site", "silo")
        if party in (COORDINATOR, OPERATOR):
            name = "SuperLink|server" if party == COORDINATOR else "fedpriv run|run"
        for line in self.journal.since(since):
            by_manager = line.service == "manager" and any(
                line.text.startswith(f"{each}: main process") for each in own
            )
            alarmed = re.search(r"WARN|ERROR|CRITICAL|fedpriv: |refus", line.text) is not None
            waits = re.search(rf"(waiting for|no reply from|not connected|no answer of).*({name})", line.text)
            if (
                by_manager
                or (line.service in own and alarmed)
                or waits
                or (alarmed and re.search(name, line.text))
            ):
                return line
        return None

    def finish(self) -> None:
        """Wait for the end of the run that is under way, and check all that was charged."""
        number = self.runs.number
        self.wait_until(lambda: self.runs.number > number, "the end of the last run", 2 * _WELL)
        if wrong := charges(self.fed):
            raise GameError("; ".join(wrong))

    def close(self) -> None:
        self.manager.close()
        self.network.close()
        for path in self._mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=False)


def _network(seed: int) -> tuple[Network, str]:
    """Namespaces, or proxies and why there are no namespaces."""
    try:
        return Namespaces(len(SITES), seed), ""
    except NoNamespacesError as error:
        return Proxies(seed), str(error)


def _clocks(folder: Path) -> Path | None:
    """A library that lets a process's clock differ, if there is a compiler."""
    library, source = folder / "clock.so", Path(__file__).with_name("clock.c")
    if (compiler := shutil.which("cc")) is None:
        return None
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return library


def _mount(path: Path) -> bool:
    """A small disk there, if this user may."""
    path.mkdir(parents=True, mode=0o700)
    words = ["mount", "-t", "tmpfs", "-o", f"size={_DISK},mode=0700", "tmpfs", str(path)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0
