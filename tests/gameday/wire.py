"""Sites in network namespaces of their own, and the wires to the coordinator's: IP packets, carried here.

A wire has a TUN device at each end, in the site's namespace and in the coordinator's.  What is sent into one
is read by this process, which may lose it, delay it, send it twice or let others overtake it, and written to the
other; TCP is the kernel's own on both sides.  Kernels without netem can do that, too.

A namespace has no name.  It lasts as long as a process that waits for the end of a pipe from this one, and
services in it: nothing is left of it after Ctrl-C or SIGKILL, and no address in it is one of the machine's.
"""

import asyncio
import fcntl
import os
import random
import shutil
import struct
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

from tests.gameday.network import Weather

_PACKET = 65_536
_BURST = 64  # packets that are read in one go
_OVERTAKEN = 0.05  # seconds, at most, by which a packet is later than those behind it
_SET_INTERFACE, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_COORDINATOR, _SITES = "198.18.0.1", "198.18.0."  # RFC 2544: addresses of nobody
_UPLINK = "uplink"


class NoNamespacesError(Exception):
    """This user may make no network namespace here, or no device in one; why, in words."""


class Namespace:
    """A network of its own, with its own loopback and nothing else."""

    def __init__(self) -> None:
        try:
            self._holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo here; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C ends the services first
            )
        except OSError as error:
            raise NoNamespacesError(str(error)) from None
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if not self._holder.stdout.readline():
            raise NoNamespacesError(self._holder.stderr.read().decode().strip())
        self.pid = self._holder.pid
        self.within = ("nsenter", f"--net=/proc/{self.pid}/ns/net", "--")
        """What stands before a command that is to run in it."""
        self.ip("link", "set", "lo", "up")

    def ip(self, *words: str) -> None:
        run_ip(*words, within=self.within)

    def close(self) -> None:
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if pipe is not None:
                pipe.close()
        self._holder.wait()


def run_ip(*words: str, within: Sequence[str] = ()) -> None:
    try:
        done = subprocess.run([*within, "ip", *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoNamespacesError(str(error)) from None
    if done.returncode:
        raise NoNamespacesError(f"`ip {' '.join(words)}`: {done.stderr.strip()}")


def device(namespace: Namespace, name: str, own: str, peer: str) -> int:
    """A TUN device `name` there, from address `own` to `peer`; the descriptor of its other side.

    It goes with the descriptor.
    """
    try:
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        asked = fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH14x", b"fedpriv%d", _TUN | _NO_HEADER))
    except OSError as error:
        raise NoNamespacesError(f"/dev/net/tun: {error}") from None
    here = asked[:16].rstrip(b"\0").decode()
    run_ip("link", "set", here, "netns", str(namespace.pid), "name", name)
    namespace.ip("address", "add", own, "peer", peer, "dev", name)
    namespace.ip("link", "set", name, "up")
    return end


class Wire:
    """Carries packets between two descriptors both ways, in `loop`, as its weather has it."""

    def __init__(self, ends: tuple[int, int], dice: random.Random, loop: asyncio.AbstractEventLoop) -> None:
        self._ends, self._dice, self._loop = ends, dice, loop
        self.weather = Weather()
        for source, target in (ends, ends[::-1]):
            loop.call_soon_threadsafe(loop.add_reader, source, self._read, source, target)

    def close(self) -> None:
        for end in self._ends:
            self._loop.remove_reader(end)
            os.close(end)

    def _read(self, source: int, target: int) -> None:
        with suppress(BlockingIOError):
            for _ in range(_BURST):
                self._carry(os.read(source, _PACKET), target)

    def _carry(self, packet: bytes, target: int) -> None:
        now = self.weather
        if now.swallowed or now.cut or self._dice.random() < now.lost:
            return
        late = now.delay
        if self._dice.random() < now.overtaken:
            late += self._dice.uniform(0.0, _OVERTAKEN)
        for _ in range(2 if self._dice.random() < now.twice else 1):
            if late:
                self._loop.call_later(late, self._write, target, packet)
            else:
                self._write(target, packet)

    def _write(self, target: int, packet: bytes) -> None:
        with suppress(OSError):  # the device is down, its queue is full, or the game is over: a lost packet
            os.write(target, packet)


class Namespaces:
    """One for the coordinator and one for each site, with a wire between; NoNamespacesError where none can be."""

    packets = True
    """A packet can arrive twice, or after those that were sent behind it."""
    host = _COORDINATOR

    def __init__(self, sites: int, seed: int) -> None:
        if missing := [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]:
            raise NoNamespacesError(f"{', '.join(missing)} not installed")
        self._coordinator = Namespace()
        self._sites = [Namespace() for _ in range(sites)]
        self._loop = asyncio.new_event_loop()
        self._wires = [
            Wire(self._ends(site), random.Random(f"{seed} {site}"), self._loop) for site in range(sites)
        ]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def _ends(self, site: int) -> tuple[int, int]:
        address = f"{_SITES}{site + 2}"
        return (
            device(self._sites[site], _UPLINK, address, _COORDINATOR),
            device(self._coordinator, f"site-{site}", _COORDINATOR, address),
        )

    def calls(self, site: int, port: int) -> str:
        """Where a site reaches the SuperLink that listens on `port`."""
        return f"{self.host}:{port}"

    def within(self, site: int | None) -> tuple[str, ...]:
        """What stands before the command of a service of a site, or of the coordinator."""
        return (self._coordinator if site is None else self._sites[site]).within

    def change(self, site: int, weather: Weather) -> None:
        """Let it be so from now on; a cut takes the site's link down, and its end brings it up."""
        before, self._wires[site].weather = self._wires[site].weather, weather
        if weather.cut != before.cut:
            self._sites[site].ip("link", "set", _UPLINK, "down" if weather.cut else "up")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        for wire in self._wires:
            wire.close()
        self._loop.close()
        for namespace in (*self._sites, self._coordinator):
            namespace.close()
