"""The table of faults: what can break and at whom; the harness breaks it, and mends what does not mend itself."""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import NamedTuple

import psutil

from fedpriv.addons.services.service import flower_environment
from tests.gameday.game import COORDINATOR, OPERATOR, OTHER_VERSION, SITES, Game, GameError
from tests.gameday.ledgers import command, flip_a_bit, put_back
from tests.gameday.network import Weather

Strike = Callable[[Game, str, Random], str]
"""Does it, and returns once the fault itself is over, with a detail for the table."""
AT_SITES = tuple(f"site {site}" for site in SITES)


class Fault(NamedTuple):
    name: str
    parties: tuple[str, ...]
    strike: Strike
    weight: float = 1.0
    alone: bool = False
    """At no time with others: a person follows a runbook, or the run begins anew."""


def _service(game: Game, party: str, dice: Random) -> str:
    return dice.choice(game.services_of(party))


def _main_process(number: signal.Signals) -> Strike:
    def strike(game: Game, party: str, dice: Random) -> str:
        name = _service(game, party, dice)
        game.manager.services[name].send(number, whole=False)
        return name

    return strike


def _kill_a_child(game: Game, party: str, dice: Random) -> str:
    """Any process of a service but its main one: executor, SuperNode, app."""
    service = game.manager.services["superlink" if party == COORDINATOR else f"node-{party[-1]}"]
    main = service.process.pid if service.process is not None else 0
    others = [process for process in service.processes() if process.pid != main]
    if not others:
        return "none there"
    child = dice.choice(others)
    words = "gone"
    with suppress(psutil.Error):
        words = " ".join(child.cmdline())
        child.kill()
    return f"{service.name}: {_short(words)}"


def _short(command: str) -> str:
    for name in ("flower_private.executor", "flwr-serverapp", "silo_node", "SuperNode"):
        if name in command:
            return name
    return command[-40:]


def _kill_the_server(game: Game, party: str, dice: Random) -> str:
    if (server := game.server()) is None:
        return "none there"
    server.kill()
    return "ServerApp"


def _freeze(game: Game, party: str, dice: Random) -> str:
    """A virtual machine that is moved, or a process in a debugger."""
    names, seconds = [_service(game, party, dice)], dice.choice([2.0, 5.0, 10.0, 20.0, 40.0])
    if dice.random() < 0.5:
        names = game.services_of(party)
    frozen = [process for name in names for process in game.manager.services[name].processes()]
    for process in frozen:
        with suppress(psutil.Error):
            process.suspend()
    game.wait(seconds)
    for process in frozen:
        with suppress(psutil.Error):
            process.resume()
    return f"{'+'.join(names)} {seconds:.0f} s"


def _network(seconds: tuple[float, ...], weather: Callable[[Random], Weather]) -> Strike:
    def strike(game: Game, party: str, dice: Random) -> str:
        parties = SITES if party == COORDINATOR else (int(party[-1]),)
        lasts, now = dice.choice(seconds), weather(dice)
        for site in parties:
            game.network.change(site, now)
        game.wait(lasts)
        for site in parties:
            game.network.change(site, Weather())
        shares = {"lost": now.lost, "twice": now.twice, "overtaken": now.overtaken}
        words = [f"{now.delay:.1f} s each way"] * bool(now.delay)
        words += [f"{share:.0%} {name}" for name, share in shares.items() if share]
        return ", ".join([*words, f"{lasts:.0f} s"])

    return strike


def _power_cut(game: Game, party: str, dice: Random) -> str:
    names = game.services_of(party)
    game.manager.power_cut(*names)
    away = dice.choice([1.0, 5.0, 20.0])
    game.wait(away)
    game.manager.start(*names)
    return f"back after {away:.0f} s"


def _full_disk(game: Game, party: str, dice: Random) -> str:
    """The disk of a ledger, or of the coordinator's runs."""
    folder, seconds = game.disk_of(party), dice.choice([3.0, 10.0, 30.0])
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(64))
    game.wait(seconds)
    filler.unlink()
    return f"{seconds:.0f} s"


def _renew(game: Game, party: str, dice: Random) -> str:
    """The certificate between machines, while the run goes on; nobody is restarted."""
    before, extra = serving(game), game.manager.services["superlink"].extra
    starts = [each.starts for each in game.manager.services.values() if each.always]
    words = ["certificates", str(game.keys / "superlink"), "--renew", str(game.keys / "authority")]
    command(game, *words, extra=extra)
    game.wait_until(lambda: serving(game) != before, "another certificate on the port", 60.0)
    if starts != [each.starts for each in game.manager.services.values() if each.always]:
        raise GameError("a service was restarted for a certificate")
    return "another serial number on the port"


def _months(game: Game, party: str, dice: Random) -> str:
    """A hundred days in a moment, for all; the coordinator renews a certificate of a year in time, as told to."""
    if game.days % 300.0 == 200.0:
        _renew(game, party, dice)
    game.pass_days(100.0)
    return f"day {game.days:.0f}"


def serving(game: Game) -> str:
    """The certificate on the SuperLink's port, as seen from its own machine."""
    ask = f"import ssl; print(ssl.get_server_certificate({(game.network.host, game.port)}))"
    words = [*game.network.within(None), sys.executable, "-I", "-c", ask]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def _upgrade(game: Game, party: str, dice: Random) -> str:
    """Its services one after the other, each with the other version's number."""
    names = game.services_of(party)
    other = {"PYTHONPATH": str(game.other_version())}
    back = other.items() <= game.manager.services[names[0]].extra.items()
    for name in names:
        game.manager.stop(name)
        game.wait(1.0)
        extra = game.manager.services[name].extra
        game.manager.start(
            name, extra={key: extra[key] for key in extra.keys() - other.keys()} if back else extra | other
        )
        game.wait(dice.choice([0.0, 5.0]))
    return f"to {'this version' if back else OTHER_VERSION}"


def _clock(game: Game, party: str, dice: Random) -> str:
    """The clock of its SuperNode jumps, and after a while jumps back, as NTP does with what is far off."""
    by, seconds = dice.choice([3.0, 20.0, 600.0, 86_400.0, -3.0, -200.0, -600.0]), dice.choice([10.0, 30.0])
    game.set_clock(f"node-{party[-1]}", by)
    game.wait(seconds)
    game.set_clock(f"node-{party[-1]}", 0.0)
    return f"{by:+.0f} s, for {seconds:.0f} s"


def _second_instance(game: Game, party: str, dice: Random) -> str:
    """The command of a service that runs, by mistake once more; it has to be refused, and the first to go on."""
    name = _service(game, party, dice)
    service = game.manager.services[name]
    if not (service.running and game.healthy()):
        return f"{name} does not run"
    (home := game.home / "second").mkdir(exist_ok=True)
    environment = {**flower_environment(home), **service.extra}
    words, options = service.command, {"capture_output": True, "text": True, "timeout": 180.0, "check": False}
    second = subprocess.run(words, cwd=home, env=environment, **options)  # type: ignore[call-overload]
    line = (second.stderr.strip().splitlines() or ["nothing"])[-1]
    if second.returncode != 2 or not service.running:
        raise GameError(f"a second {name} ended with {second.returncode}: {line}")
    return f"{name}: {line[-60:]}"


def _aged_folder(game: Game, party: str, dice: Random) -> str:
    """What a host does with a temporary folder after ten days: all of its files are deleted."""
    files = [
        path for name in game.services_of(party) for path in game.temporary(name).rglob("*") if path.is_file()
    ]
    for path in files:
        path.unlink(missing_ok=True)
    return f"{len(files)} files"


def _read_only_disk(game: Game, party: str, dice: Random) -> str:
    """The site's machine comes up with its ledger's disk read-only, until somebody mounts it anew."""
    guard, disk, seconds = f"guard-{party[-1]}", str(game.disk_of(party)), dice.choice([10.0, 30.0])
    game.manager.stop(guard)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        game.manager.start(guard)
        game.wait(seconds)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    return f"{seconds:.0f} s"


EVERYWHERE = (*AT_SITES, COORDINATOR)
READ_ONLY = "read-only disk"
TEN_MINUTES, TWICE, OVERTAKEN = "black hole of ten minutes", "packets twice", "packets overtaken"
FAULTS = (
    Fault("kill -9", (*EVERYWHERE, OPERATOR), _main_process(signal.SIGKILL), 2.0),
    Fault("SIGTERM", (*EVERYWHERE, OPERATOR), _main_process(signal.SIGTERM)),
    Fault("kill -9 of a child", EVERYWHERE, _kill_a_child, 2.0),
    Fault("kill -9 of the ServerApp", (COORDINATOR,), _kill_the_server),
    Fault("SIGSTOP", EVERYWHERE, _freeze, 2.0),
    Fault("partition", EVERYWHERE, _network((2.0, 10.0, 30.0), lambda _: Weather(cut=True))),
    Fault("black hole", EVERYWHERE, _network((5.0, 30.0, 70.0), lambda _: Weather(swallowed=True))),
    Fault("delay", EVERYWHERE, _network((10.0, 20.0), lambda dice: Weather(delay=dice.choice([0.1, 0.5, 1.5])))),
    Fault("loss", EVERYWHERE, _network((10.0, 20.0), lambda dice: Weather(lost=dice.choice([0.05, 0.2])))),
    Fault(TEN_MINUTES, AT_SITES, _network((600.0,), lambda _: Weather(swallowed=True)), 0.02),
    Fault(TWICE, EVERYWHERE, _network((10.0, 20.0), lambda dice: Weather(twice=dice.choice([0.1, 0.5])))),
    Fault(OVERTAKEN, EVERYWHERE, _network((10.0, 20.0), lambda dice: Weather(overtaken=dice.choice([0.1, 0.5])))),
    Fault("power cut", EVERYWHERE, _power_cut),
    Fault("full disk", EVERYWHERE, _full_disk),
    Fault(READ_ONLY, AT_SITES, _read_only_disk),
    Fault("second instance", EVERYWHERE, _second_instance, 0.5, alone=True),
    Fault("aged temporary folder", EVERYWHERE, _aged_folder),
    Fault("clock", AT_SITES, _clock),
    Fault("a hundred days", (COORDINATOR,), _months, 0.3, alone=True),
    Fault("certificate renewed", (COORDINATOR,), _renew, 0.5, alone=True),
    Fault("upgrade", EVERYWHERE, _upgrade),
    Fault("bit flip", AT_SITES, flip_a_bit, 0.5, alone=True),
    Fault("ledger and mark restored", AT_SITES, put_back, 0.5, alone=True),
)
