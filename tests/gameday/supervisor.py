"""A small service manager: starts what ended again, like systemd with Restart=always, and keeps what it said."""

import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fedpriv.addons.services.service import describe_exit, flower_environment
from fedpriv.engines.children import end_processes_in

_RESTART = 3.0
"""Seconds before a service that ended is started again; the units have 5."""
_LOOK = 0.2


@dataclass(frozen=True)
class Line:
    """A line of the journal; `service` is a service's name, and "manager" for the manager's own."""

    at: float
    service: str
    text: str


class Journal:
    """All that services wrote and the manager noted, in order, and in a file."""

    def __init__(self, path: Path) -> None:
        self._lines: list[Line] = []
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def add(self, service: str, text: str) -> None:
        line = Line(time.monotonic(), service, text)
        self._lines.append(line)
        self._file.write(f"{time.strftime('%H:%M:%S', time.gmtime())} {service}: {text}\n")

    def since(self, at: float) -> list[Line]:
        return [line for line in list(self._lines) if line.at >= at]


@dataclass
class Service:
    """A command that is to run always, or until it ends with 0."""

    name: str
    command: Sequence[str]
    home: Path
    """Of its own; what was started with it as FLWR_HOME is the service's, as with a control group."""
    extra: dict[str, str] = field(default_factory=dict)
    always: bool = True
    wanted: bool = True
    process: "subprocess.Popen[str] | None" = None
    starts: int = 0
    due: float = 0.0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """All of it, with what left its session."""
        found = set[psutil.Process]()
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if Path(process.environ().get("FLWR_HOME", "/")).is_relative_to(self.home):
                    found.add(process)
        return sorted(found, key=lambda process: process.pid)

    def send(self, number: signal.Signals, *, whole: bool) -> None:
        """A signal to its main process, or to all of it."""
        if whole:
            for process in self.processes():
                with suppress(psutil.Error):
                    process.send_signal(number)
        elif self.running and self.process is not None:
            self.process.send_signal(number)


class Supervisor:
    """Watches services in a thread; `journal` has what they wrote."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self.services = journal, dict[str, Service]()
        self._lock, self._ending = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def add(self, service: Service) -> Service:
        service.home.mkdir(mode=0o700, exist_ok=True)
        with self._lock:
            self.services[service.name] = service
        return service

    def stop(self, *names: str) -> None:
        """`systemctl stop`: end them, and leave them ended."""
        with self._lock:
            for name in names:
                self.services[name].wanted = False
                self._end(self.services[name])

    def start(self, *names: str, extra: Mapping[str, str] | None = None) -> None:
        """`systemctl start`; `extra` are environment variables from now on."""
        with self._lock:
            for name in names:
                service = self.services[name]
                service.wanted, service.due = True, 0.0
                if extra is not None:
                    service.extra = dict(extra)

    def power_cut(self, *names: str) -> None:
        """End all processes of these services at once, and start none: the manager is gone with the machine."""
        with self._lock:
            for name in names:
                self.services[name].wanted = False
            for name in names:
                self.services[name].send(signal.SIGKILL, whole=True)
        self.journal.add("manager", f"power cut: {', '.join(names)}")

    def close(self) -> None:
        self._ending.set()
        self._thread.join(5.0)
        for service in self.services.values():
            self._end(service)

    def _watch(self) -> None:
        while not self._ending.wait(_LOOK):
            with self._lock:
                for service in self.services.values():
                    self._look(service)

    def _look(self, service: Service) -> None:
        if service.running or not service.wanted:
            return
        if service.process is not None:
            code = service.process.wait()
            service.process = None
            self.journal.add("manager", f"{service.name}: main process {describe_exit(code)}")
            end_processes_in(service.home)
            if code == 0 and not service.always:
                service.wanted = False
                return
            service.due = time.monotonic() + _RESTART
        if time.monotonic() >= service.due:
            self._start(service)

    def _start(self, service: Service) -> None:
        service.starts += 1
        service.process = subprocess.Popen(
            service.command,
            cwd=service.home,
            env={**flower_environment(service.home), **service.extra},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if service.starts > 1:
            self.journal.add("manager", f"{service.name}: started again")
        threading.Thread(target=self._read, args=(service.name, service.process), daemon=True).start()

    def _read(self, name: str, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with suppress(ValueError):
            for text in process.stdout:
                self.journal.add(name, text.rstrip("\n"))

    def _end(self, service: Service) -> None:
        end_processes_in(service.home)
        if service.process is not None:
            service.process.wait()
            service.process = None
