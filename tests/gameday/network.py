"""A site's way to the coordinator, and what can be wrong with it; as TCP proxies, where wires are not to be had.

A proxy can cut a connection, delay it, lose some of it or swallow all of it; what happens to packets is TCP's own.
"""

import asyncio
import random
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

_CHUNK = 65_536
_RETRANSMITTED = 0.4  # seconds until TCP sends a lost packet again


@dataclass
class Weather:
    """What happens to bytes on their way now."""

    cut: bool = False
    """The link is down, or a router says no: no new connection, and nothing comes through the old ones."""
    swallowed: bool = False
    """Nothing comes through and nobody says so: a black hole."""
    delay: float = 0.0
    """Seconds each way."""
    lost: float = 0.0
    """Share of packets; of a proxy's chunks, which are sent again, but one in ten resets its connection."""
    twice: float = 0.0
    """Share of packets that arrive twice; a proxy has no packets."""
    overtaken: float = 0.0
    """Share of packets that arrive after some that were sent behind them; a proxy has none."""


class Network(Protocol):
    """The ways of all sites to the SuperLink."""

    packets: bool
    host: str
    """The SuperLink's address, where it listens."""

    def calls(self, site: int, port: int) -> str: ...

    def within(self, site: int | None) -> tuple[str, ...]: ...

    def change(self, site: int, weather: Weather) -> None: ...

    def close(self) -> None: ...


@dataclass
class Proxy:
    """Listens on a port of 127.0.0.1 and hands on to `target`, another one; runs in a thread of its own."""

    target: int
    dice: random.Random
    weather: Weather = field(default_factory=Weather)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._writers = set[asyncio.StreamWriter]()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def change(self, weather: Weather) -> None:
        """Let it be so from now on; a cut resets the connections that there are."""
        self.weather = weather
        if weather.cut:
            self._loop.call_soon_threadsafe(self._reset)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._listener.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_server(self._accepted, sock=self._listener))
        self._loop.run_forever()

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection from a SuperNode: one of our own for it, both until either ends."""
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            if self.weather.cut:
                return
            await self._through()
            answers, other = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(other)
            ways = [asyncio.ensure_future(self._carry(*way)) for way in ((reader, other), (answers, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
        except OSError:
            pass  # the SuperLink is away
        finally:
            for each in (writer, other):
                if each is not None:
                    each.transport.abort()
                    self._writers.discard(each)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                await self._through()
                if self.weather.lost and self.dice.random() < self.weather.lost:
                    await asyncio.sleep(_RETRANSMITTED)
                    if self.dice.random() < 0.1:
                        return
                writer.write(chunk)
                await writer.drain()

    async def _through(self) -> None:
        while self.weather.swallowed:
            await asyncio.sleep(0.1)
        if self.weather.delay:
            await asyncio.sleep(self.weather.delay)


class Proxies:
    """A proxy for each site on the machine's loopback, made once the SuperLink's port is known."""

    packets = False
    host = "127.0.0.1"

    def __init__(self, seed: int) -> None:
        self._seed, self._proxies = seed, dict[int, Proxy]()

    def calls(self, site: int, port: int) -> str:
        if site not in self._proxies:
            self._proxies[site] = Proxy(port, random.Random(f"{self._seed} {site}"))
        return f"{self.host}:{self._proxies[site].port}"

    def within(self, site: int | None) -> tuple[str, ...]:
        return ()

    def change(self, site: int, weather: Weather) -> None:
        self._proxies[site].change(weather)

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.close()
