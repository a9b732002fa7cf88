"""Faults of a ledger that no service mends: a guard refuses in words, and a person follows the runbook."""

import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random

from fedpriv.addons.services.service import flower_environment, script_path
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import read_policy
from tests.gameday.game import Game, GameError

_SECONDS = 180.0  # a run may begin meanwhile, on a slow machine
_UNKNOWN = "nobody knows what was released since"


def command(game: Game, *words: str, extra: Mapping[str, str] | None = None) -> str:
    """What `fedpriv WORDS` prints; GameError if it fails."""
    done = subprocess.run(
        [script_path("fedpriv"), *words],
        capture_output=True,
        text=True,
        env={**flower_environment(game.home / "person"), **(extra or {})},
        check=False,
    )
    if done.returncode:
        raise GameError(f"fedpriv {words[0]} {words[1]}: {done.stderr.strip()[-200:]}")
    return done.stdout


def flip_a_bit(game: Game, party: str, dice: Random) -> str:
    """One bit of the ledger, or of its mark, while the guard is down for a moment."""
    site = int(party[-1])
    guard, folder = f"guard-{site}", game.fed.folder / "silos" / f"silo-{site}"
    game.manager.stop(guard)
    path = folder / dice.choice(["ledger.sqlite"] * 4 + ["ledger.sqlite.mark"])
    content = bytearray(path.read_bytes())
    bit = dice.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    since = time.monotonic()
    game.manager.start(guard)
    where = f"bit {bit} of {path.name}"
    if (words := _refused_or_well(game, party, since)) is None:
        return f"{where}: in no row"
    return f"{where}: {_after_runbook(game, site, words)}"


def put_back(game: Game, party: str, dice: Random) -> str:
    """A snapshot of ledger and mark together, some rounds old: nothing at the site can tell."""
    site = int(party[-1])
    guard, folder = f"guard-{site}", game.fed.folder / "silos" / f"silo-{site}"
    snapshot = game.home / "snapshot"
    game.manager.stop(guard)
    _copy(folder, snapshot)
    game.manager.start(guard)
    rounds = game.rounds_done() + dice.choice([2, 5])
    game.wait_until(lambda: game.rounds_done() >= rounds, "rounds after the snapshot")
    game.manager.stop(guard)
    _copy(snapshot, folder)
    since = time.monotonic()
    game.manager.start(guard)
    if (words := _refused_or_well(game, party, since, "has seen commit")) is None:
        raise GameError("a ledger that was put back with its mark answered")
    return _after_runbook(game, site, words)


def _copy(folder: Path, to: Path) -> None:
    to.mkdir(exist_ok=True)
    for path in folder.glob("ledger.sqlite*"):
        shutil.copy2(path, to / path.name)


def _refused_or_well(game: Game, party: str, since: float, words: str = "") -> str | None:
    """The line in which the guard refuses, None once it answers a round."""
    guard = f"guard-{party[-1]}"
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        for line in game.journal.since(since):
            alarm = words in line.text if words else line.text.startswith("fedpriv:") or " ERROR " in line.text
            if line.service == guard and alarm:
                return line.text
            if line.service == guard and "answered a round" in line.text:
                return None
        game.wait(0.5)
    raise GameError(f"{guard} neither refused in words nor answered within {_SECONDS:.0f} s")


def _after_runbook(game: Game, site: int, refusal: str) -> str:
    """What a person does: restore the backup; the run is over, and new records begin a ledger of their own."""
    policy, folder = game.fed.silos[site].policy, game.fed.folder / "silos" / f"silo-{site}"
    guard = f"guard-{site}"
    game.manager.stop(guard)
    (folder / "ledger.sqlite").rename(folder / "damaged")
    said = command(game, "silo", "restore", str(policy), str(game.backups / f"silo-{site}"))
    if _UNKNOWN not in said and "nothing was released since" not in said:
        raise GameError(f"silo restore said: {said}")
    game.stop_run()
    status = command(game, "silo", "status", str(policy), "--check")
    if _UNKNOWN in said and "restored from a backup" not in status and "whatever was released" not in status:
        raise GameError(f"the budget was not charged: {status[-300:]}")
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    (folder / "damaged").unlink()
    begin_ledgers(read_policy(policy))
    game.back_up(site)
    game.manager.start(guard)
    words = re.split(r"fedpriv: | ERROR |: silo \d refuses: ", refusal, maxsplit=1)[-1].replace(f"{folder}/", "")
    game.new_run(f"refused: {words[:120]}")
    return "runbook followed, new ledger"
