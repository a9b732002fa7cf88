"""Ledgers whose bytes changed on the disk, and guards that are killed with -9 at any write of theirs."""

import hashlib
import hmac
import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import torch

from fedpriv.core.errors import InputError, RunError
from fedpriv.silo import chain
from fedpriv.silo.admission import Charge
from fedpriv.silo.backup import back_up_ledgers
from fedpriv.silo.chain import Commit, MarkContent, RollbackMark
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import format_price_check
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.rows import file_digest, wipe_journal
from fedpriv.silo.silo import Silo
from tests.attacks.guards import guard_for, random_records, scenario, zeros
from tests.silo.charged import charged
from tests.silo.guarded import guard_of, refused

LEDGER = "ledger-0.sqlite"
MARK = LEDGER + ".mark"


def ask(guard: Guard, run: str, *rounds: int) -> list[torch.Tensor]:
    return [guard.answer(run, scenario(), t, zeros()) for t in rounds]


def refuse(guard: Guard, reason: str, run: str, t: int, error: type[Exception] = InputError) -> None:
    refused(guard, reason, scenario(), t=t, run=run, error=error)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A silo with two runs that are over, and one with a third that is under way."""
    folder = tmp_path_factory.mktemp("silos")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedpriv.silo.ledger.MAX_ROOM", 0)  # so that few flips are of free pages
        guard = guard_for(folder / "rest", *random_records(), budget=100.0)
        for run in ("a", "b"):
            ask(guard, run, *range(1, 9))
        shutil.copytree(folder / "rest", folder / "underway")
        ask(guard_of(folder / "underway" / "silo-0.toml"), "c", *range(1, 5))
    return folder


@pytest.fixture
def rest(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "rest", tmp_path / "silo"))


@pytest.fixture
def underway(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "underway", tmp_path / "silo"))


class Snapshot:
    """The files of a folder, as they were."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.files = folder, {path.name: path.read_bytes() for path in folder.iterdir()}
        ledger, mark = (8 * len(self.files[name]) for name in (LEDGER, MARK))
        draws = random.Random(20261123)
        in_mark = [ledger + draws.randrange(mark) for _ in range(count // 10)]
        self.bits = [*(draws.randrange(ledger + mark) for _ in range(count - len(in_mark))), *in_mark]
        """So many bits of the ledger, or of the mark behind it."""

    def restore(self, flipped: int | None = None) -> None:
        """Put all files back, but for one bit."""
        for path in self.folder.iterdir():
            if path.name not in self.files:
                path.unlink()
        files = {name: bytearray(content) for name, content in self.files.items()}
        if flipped is not None:
            in_mark = flipped - 8 * len(files[LEDGER])
            name, bit = (MARK, in_mark) if in_mark >= 0 else (LEDGER, flipped)
            files[name][bit // 8] ^= 1 << bit % 8
        for name, content in files.items():
            if (self.folder / name).read_bytes() != content:
                (self.folder / name).write_bytes(content)


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_guarantee_every_bit_flip_in_a_ledger_without_open_runs_is_refused_in_one_line(
    rest: Path, count: int
) -> None:
    """Gains: a budget that was spent, by one bit of `mu`; 0 of 150 flips were noticed."""
    snapshot = Snapshot(rest, count)
    for bit in snapshot.bits:
        snapshot.restore(flipped=bit)
        with pytest.raises(InputError) as refusal:
            guard_of(rest / "silo-0.toml")
        assert "\n" not in str(refusal.value), bit
        assert "fedpriv silo restore" in str(refusal.value), bit
    snapshot.restore()
    assert torch.isfinite(ask(guard_of(rest / "silo-0.toml"), "c", 1)[0]).all()


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_guarantee_a_bit_flip_in_a_ledger_with_an_open_run_is_refused_or_harmless(
    underway: Path, count: int
) -> None:
    """All rows are the same then, and so is the next answer: SQLite's pages have room that nothing is in."""
    snapshot, rows, refusals = Snapshot(underway, count), dump(underway), 0
    (expected,) = ask(guard_of(underway / "silo-0.toml"), "c", 5)
    for bit in snapshot.bits:
        snapshot.restore(flipped=bit)
        try:
            guard = guard_of(underway / "silo-0.toml")
        except InputError:
            refusals += 1
        else:
            assert dump(underway) == rows, bit
            assert torch.equal(ask(guard, "c", 5)[0], expected), bit
            guard._ledger.close()
    assert refusals > 0.85 * count


def dump(folder: Path) -> list[object]:
    with sqlite3.connect(folder / LEDGER) as database:
        tables = [database.execute(f"SELECT * FROM {table}") for table in ("about", "runs", "answers")]
        return [row for table in tables for row in table]


def change_rows(folder: Path, statement: str) -> None:
    with sqlite3.connect(folder / LEDGER) as database:
        assert database.execute(statement).rowcount


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE runs SET mu = 2e-308 WHERE run_id = 'a'",
        "UPDATE runs SET mu = 1e300 WHERE run_id = 'a'",
        "UPDATE runs SET cell = replace(cell, 'replace-one', 'zero-out') WHERE run_id = 'a'",
        "UPDATE runs SET run_id = 'z' WHERE run_id = 'a'",
        "DELETE FROM runs WHERE run_id = 'a'",
        "DELETE FROM answers WHERE run_id = 'c' AND t = 4",
        "UPDATE about SET head = zeroblob(32)",
        "INSERT INTO about SELECT * FROM about",
    ],
)
def test_guarantee_a_ledger_row_changed_under_a_running_guard_prevents_new_runs(
    underway: Path, statement: str
) -> None:
    guard = guard_of(underway / "silo-0.toml")
    ask(guard, "c", 5)
    change_rows(underway, statement)
    before = (underway / LEDGER).read_bytes()
    refuse(guard, r"cannot be used as a ledger|older copy", "d", 1)
    assert (underway / LEDGER).read_bytes() == before


@pytest.mark.parametrize("column", ["key", "state"])
def test_guarantee_a_replaced_key_or_state_of_a_run_is_never_used_for_a_reply(underway: Path, column: str) -> None:
    """Gains: the next round, with noise of a key that a thief of the disk chose."""
    guard = guard_of(underway / "silo-0.toml")
    change_rows(underway, f"UPDATE runs SET {column} = zeroblob(length({column})) WHERE run_id = 'c'")
    refuse(guard, "the run 'c' is not what was written", "c", 5)


@pytest.mark.parametrize(
    ("statement", "asks"),
    [
        ("UPDATE answers SET query = zeroblob(32) WHERE run_id = 'd'", False),
        ("UPDATE runs SET key = zeroblob(32) WHERE run_id = 'd'", True),
    ],
)
def test_guarantee_a_changed_query_or_key_of_an_unanswered_round_is_refused(
    underway: Path, monkeypatch: pytest.MonkeyPatch, statement: str, asks: bool
) -> None:
    """Gains: two queries for a round whose records may have been looked at: nothing follows the last commit."""
    guard = guard_of(underway / "silo-0.toml")
    with monkeypatch.context() as patch:
        patch.setattr(Silo, "answer", lambda *_: 1 / 0)
        refuse(guard, "its guard failed", "d", 1, RunError)
    change_rows(underway, statement)
    with pytest.raises(InputError, match="is not what was written"):
        ask(guard, "d", 1) if asks else guard_of(underway / "silo-0.toml")


def test_guarantee_a_changed_reply_in_the_ledger_is_not_sent_again(underway: Path) -> None:
    """14 of 150 flips made a guard answer a round with other bytes than before."""
    guard = guard_of(underway / "silo-0.toml")
    change_rows(underway, "UPDATE answers SET reply = zeroblob(length(reply)) WHERE run_id = 'c' AND t = 2")
    refuse(guard, "round 2 of the run 'c' is not what was written", "c", 2)


def forged(folder: Path, run: str, mu: float) -> None:
    """Another price, by somebody who has the disk and this code: entry, chain and mark agree with it."""
    ledger, mark = folder / LEDGER, RollbackMark(folder / MARK)
    with sqlite3.connect(ledger) as database:
        entries = dict[int, list[chain.ChainEntry]]()
        for name, cell, price, slack, opened, over, seal in database.execute(
            "SELECT run_id, cell, mu, slack, opened, over, seal FROM runs"
        ).fetchall():
            entry = chain.opening_entry(name, cell, mu if name == run else price, slack, seal)
            entries.setdefault(opened, []).append(entry)
            entries.setdefault(over, []).append(chain.ending_entry(name))
            if name == run:
                database.execute("UPDATE runs SET mu = ?, entry = ? WHERE run_id = ?", (mu, entry.digest, run))
        answers = database.execute(
            "SELECT run_id, t, query, asked, answered, replied, after FROM answers"
        ).fetchall()
        made = {row[4]: chain.reply_entry(*row[:2], *row[5:]) for row in answers}
        for row in answers:
            entries.setdefault(row[3], []).append(chain.query_entry(*row[:3]))
            entries.setdefault(row[4], []).append(made[row[4]])
        name, number, head = database.execute("SELECT begun_as, commits, shard FROM about").fetchone()
        head = chain.first_head(name, head)
        for n in range(1, number + 1):
            if n in made:
                told = chain.next_head(head, n, [made[n]])
                database.execute("UPDATE answers SET head = ? WHERE answered = ?", (told, n))
            head = chain.next_head(head, n, entries[n])
        database.execute("UPDATE about SET head = ?", (head,))
    commit = Commit(number, head)
    mark.write(MarkContent(name, commit, commit, file_digest(ledger)))


def test_guarantee_prices_are_recomputed_from_the_scenarios_on_file(tmp_path: Path) -> None:
    """Gains: a third run under a budget for two, by a price that somebody wrote with every digest."""
    guard = guard_for(tmp_path, *random_records(), budget=6.0)
    for run in ("a", "b"):
        ask(guard, run, *range(1, 9))  # √(4² + 4²) = 5.66
    guard._ledger.close()
    forged(tmp_path, "a", 4e-3)
    again = guard_of(tmp_path / "silo-0.toml")
    assert charged(again) == [4e-3, pytest.approx(4.0)]
    refuse(again, r"with all others 6\.929; the budget is 6", "c", 1, RunError)
    assert len(charged(again)) == 2
    again._ledger.close()
    assert format_price_check(tmp_path / "silo-0.toml") == [
        "'a': charged 0.004, and its scenario costs 4: that is what counts",
        "rows, chain and mark agree; prices recomputed: 1 run charged enough",
    ]


def test_a_stored_scenario_that_cannot_be_planned_stays_charged_at_its_old_price(tmp_path: Path) -> None:
    guard = guard_for(tmp_path, *random_records())
    cell = '{"model": {"name": "no_such_module:Net"}, "privacy": {"relation": "replace-one"}}'
    with guard._ledger.lock(), guard._ledger.transaction():
        guard._ledger.open_run("odd", Charge(cell, 0.5, 0.0), bytes(32))
        guard._ledger.end_run("odd")
    refuse(guard, r"with all others 4\.032; the budget is 4", "c", 1, RunError)
    assert format_price_check(tmp_path / "silo-0.toml") == [
        "rows, chain and mark agree; prices recomputed: 0 runs charged enough, 1 cannot be planned by this policy"
    ]


def test_guarantee_a_finished_run_leaves_no_digest_to_test_guesses_of_exact_sums(tmp_path: Path) -> None:
    """Gains: whether a guess at a neighbour's exact sums is right, under a trusted server, from a thief's disk."""
    guard = guard_for(tmp_path, *random_records(), trust="trusted", budget=100.0)
    opened = scenario("trusted")
    replies = [guard.answer("run", opened, t, zeros()).numpy().tobytes() for t in range(1, 9)]
    with sqlite3.connect(tmp_path / LEDGER) as database:
        kept = database.execute("SELECT t, replied, after, blind, reply FROM answers ORDER BY t").fetchall()
    assert [t for t, *_, reply in kept if reply is not None] == [8]
    for t, replied, after, blind, _ in kept[:-1]:
        assert blind is None
        for guess in (replies[t - 1], b""):
            digests = (
                hashlib.sha256(guess).digest(),
                chain.digest_reply(b"", guess),
                chain.digest_state(b"", guess),
            )
            assert not {replied, after} & {*digests}
    raw = (tmp_path / LEDGER).read_bytes()
    assert not [t for t, reply in enumerate(replies[:-1], 1) if reply[800:900] in raw and any(reply[800:900])]


def test_a_finished_run_stores_only_its_last_reply_and_digests(tmp_path: Path) -> None:
    guard = guard_for(tmp_path, *random_records(), budget=100.0)
    ask(guard, "a", *range(1, 8))
    full = (tmp_path / LEDGER).stat().st_size
    (last,) = ask(guard, "a", 8)
    assert (tmp_path / LEDGER).stat().st_size < full / 4
    for again in (guard, guard_of(tmp_path / "silo-0.toml")):
        assert torch.equal(ask(again, "a", 8)[0], last)
        over = "round 7 was answered, and this run is over: only a digest of its reply is kept"
        refuse(again, over, "a", 7, RunError)
        refused(again, "round 7 was answered already, for another query", scenario(), 7, zeros() + 1.0, "a")


def test_a_key_is_gone_from_all_files_as_soon_as_its_run_is_over(underway: Path) -> None:
    """SQLite's journal has the pages from before: a guard that is killed then leaves it to nobody."""
    ledger = SiloLedger(underway / LEDGER)
    before = ledger.find_run("c")
    assert before is not None
    assert before.key is not None
    assert before.key in (underway / LEDGER).read_bytes()
    with ledger.lock(), ledger.transaction():
        ledger.end_run("c")
    assert not [path for path in underway.glob(f"{LEDGER}*") if before.key in path.read_bytes()]


def test_a_chain_is_what_later_releases_compute_again() -> None:
    """From SHA-256 over parts with their lengths before them, and HMAC where a key is wiped with the run."""

    def digest(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()

    def keyed(key: bytes, text: bytes) -> bytes:
        return hmac.digest(key, text, "sha256")

    key, other = bytes(range(32)), bytes(32)
    opened = (0, digest(b"opened", b"run", b"cell", b"0.5", b"1e-08", b"seal"))
    asked = (1, digest(b"asked", b"run", b"3", b"query"))
    answered = (2, digest(b"answered", b"run", b"3", b"reply", b"state"))
    over = (3, digest(b"over", b"run"))
    entries = [
        chain.opening_entry("run", "cell", 0.5, 1e-8, b"seal"),
        chain.query_entry("run", 3, b"query"),
        chain.reply_entry("run", 3, b"reply", b"state"),
        chain.ending_entry("run"),
    ]
    assert entries == [opened, asked, answered, over]
    assert chain.first_head("name", b"records") == digest(b"fedpriv ledger", b"name", b"records")
    told = [bytes([kind]) + text for kind, text in (opened, asked, answered, over)]
    assert chain.next_head(b"head", 12, reversed(entries)) == digest(b"commit", b"head", b"12", *told)
    second = digest(b"key, in a chain of another origin", key)
    assert (chain.make_seal(key), chain.reseal(b"seal", key, other)) == (digest(b"key", key), second)
    assert [chain.is_seal_of(seal, key) for seal in (digest(b"key", key), second, bytes(32))] == [
        True,
        True,
        False,
    ]
    assert chain.reseal(b"seal", None, other) == keyed(other, b"sealseal")
    assert chain.converted_name("name") == digest(b"converted", b"name").hex()[:32]
    assert (chain.derive_blind(key, 3), chain.digest_reply(key, b"reply")) == (
        keyed(key, b"reply 3"),
        keyed(key, b"reply"),
    )
    assert chain.digest_state(key, b"packed") == keyed(keyed(key, b"state"), b"packed")
    assert chain.digest_state(key, None) == b""


def test_a_ledger_has_the_version_that_other_releases_know_and_its_backup_100_more(rest: Path) -> None:
    (rest / "backup").mkdir()
    (copy,) = back_up_ledgers(rest / "silo-0.toml", rest / "backup")
    for path, version in ((rest / LEDGER, 3), (copy, 103)):
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA user_version").fetchone() == (version,)


def test_only_the_runs_that_ended_most_recently_retain_their_last_reply(tmp_path: Path) -> None:
    guard, cell = guard_for(tmp_path, *random_records(), budget=100.0), scenario(federation__rounds=1)
    runs = [str(number) for number in range(10)]
    for run in runs:
        guard.answer(run, cell, 1, zeros())
    answers = [guard._ledger.find_answer(run, 1) for run in runs]
    has_reply = [answer is not None and answer.reply is not None for answer in answers]
    assert has_reply == [False] * 2 + [True] * 8


@pytest.mark.parametrize(
    ("table", "column", "row"),
    [
        ("runs", "key", "run_id = 'a'"),
        ("runs", "state", "run_id = 'a'"),
        ("runs", "key", "run_id = 'c'"),
        ("runs", "state", "run_id = 'c'"),
        ("answers", "blind", "run_id = 'a' AND t = 1"),
        ("answers", "reply", "run_id = 'a' AND t = 1"),
        *[("answers", name, "run_id = 'c' AND t = 5") for name in ("replied", "after", "head", "blind", "reply")],
    ],
    ids=lambda value: value.replace(" ", ""),
)
def test_a_secret_that_is_put_where_none_is_left_or_another_was_is_noticed(
    underway: Path, table: str, column: str, row: str
) -> None:
    """A run that is over has no key, no state and no blind, and a query without a reply has nothing of one."""
    ledger = SiloLedger(underway / LEDGER)
    with ledger.lock(), ledger.transaction():
        ledger.record_query("c", 5, bytes(32))
    ledger.close()
    SiloLedger(underway / LEDGER).close()
    with sqlite3.connect(underway / LEDGER) as database:
        changed = database.execute(f"UPDATE {table} SET {column} = ? WHERE {row}", (bytes(range(32)),))
        assert changed.rowcount == 1
    database.close()
    with pytest.raises(InputError, match="cannot be used as a ledger: its file is not what was written"):
        SiloLedger(underway / LEDGER)


def test_guarantee_a_round_has_one_reply_to_a_stored_query(underway: Path) -> None:
    """A second reply under the same noise would release a difference of two exact sums."""
    ledger = SiloLedger(underway / LEDGER)
    for t in (4, 5):
        with (
            pytest.raises(RunError, match=f"round {t} has a reply already, or no stored query"),
            ledger.lock(),
            ledger.transaction(),
        ):
            ledger.record_reply("c", t, b"another", b"state")


@pytest.mark.parametrize("header", [bytes(8), bytes.fromhex("d9d505f920a163d7")], ids=["done", "hot"])
def test_a_journal_is_wiped_unless_sqlite_needs_it(tmp_path: Path, header: bytes) -> None:
    """A journal of SQLite's magic number holds the pages before a commit that was cut short."""
    journal, is_hot = tmp_path / "l.sqlite-journal", any(header)
    assert wipe_journal(tmp_path / "l.sqlite")
    journal.write_bytes(content := header + bytes(range(256)))
    assert wipe_journal(tmp_path / "l.sqlite") is not is_hot
    assert journal.read_bytes() == (content if is_hot else bytes(264))


@pytest.mark.parametrize(
    ("writes", "line"),
    [
        (0, r"its file is not what was written \(disk I/O error\)"),
        (1, None),
        (19, None),
        (20, "all the time; try again"),
    ],
    ids=["nobody", "once", "often", "always"],
)
def test_a_ledger_is_checked_again_only_where_another_process_wrote_meanwhile(
    rest: Path, monkeypatch: pytest.MonkeyPatch, writes: int, line: str | None
) -> None:
    """What was read while another process wrote can be of two commits."""
    mark, check, pauses = RollbackMark(rest / MARK), SiloLedger.check_all_rows, list[float]()
    content, left = mark.read(), iter(range(writes))

    def check_beside_another(ledger: SiloLedger) -> None:
        if (number := next(left, None)) is not None:
            mark.write(content._replace(file_digest=content.file_digest if number % 2 else ""))
        if number is not None:
            raise InputError("damaged")
        if not writes:
            raise sqlite3.OperationalError("disk I/O error")
        check(ledger)

    monkeypatch.setattr(SiloLedger, "check_all_rows", check_beside_another)
    monkeypatch.setattr("fedpriv.silo.ledger.time.sleep", pauses.append)
    with pytest.raises(InputError, match=line) if line else nullcontext():
        SiloLedger(rest / LEDGER)
    assert len(pauses) == writes
    assert all(0.0 < pause < 1.0 for pause in pauses)


def test_a_ledger_of_another_version_is_refused_in_one_line(rest: Path) -> None:
    with sqlite3.connect(rest / LEDGER) as database:
        database.execute("PRAGMA user_version = 1")
    with pytest.raises(InputError, match="it has version 1, and this fedpriv knows 3") as refused:
        SiloLedger(rest / LEDGER)
    assert "\n" not in str(refused.value)


ROUNDS = 3
CELL = scenario(federation__rounds=ROUNDS)


def killed_at(point: int, folder: Path, ask: Callable[[Guard], object]) -> bool:
    """Whether a process that asks a guard is killed at this point: statements, syncs and replacements count."""
    child = os.fork()
    if child == 0:
        passed, honest = [0], {name: getattr(os, name) for name in ("fsync", "replace", "ftruncate")}

        def step(*_: object) -> None:
            passed[0] += 1
            if passed[0] == point:
                os.kill(os.getpid(), signal.SIGKILL)

        def stepping(name: str) -> Callable[..., object]:
            def stepped(*args: object) -> object:
                step()
                done = honest[name](*args)
                step()
                return done

            return stepped

        code = 1
        try:
            for name in honest:
                setattr(os, name, stepping(name))
            guard = guard_of(folder / "silo-0.toml")
            guard._ledger._database.set_trace_callback(step)
            ask(guard)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


EVERY = [pytest.param(t, 1, marks=pytest.mark.slow) for t in range(1, ROUNDS + 1)]


@pytest.mark.parametrize(("t", "stride"), [(ROUNDS, 13), *EVERY])
def test_guarantee_a_guard_killed_at_any_write_charges_a_run_once_and_repeats_the_same_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, t: int, stride: int
) -> None:
    """The first round opens the run, the last one ends it, drops replies and writes the file anew."""
    torch.set_num_threads(1)
    monkeypatch.setattr("fedpriv.silo.guard.system_key", lambda: bytes(range(32)))
    before, undisturbed = tmp_path / "before", tmp_path / "undisturbed"
    guard = guard_for(before, *random_records(), budget=5.0)
    for earlier in range(1, t):
        guard.answer("run", CELL, earlier, zeros())
    guard._ledger.close()
    shutil.copytree(before, undisturbed)
    honest = guard_of(undisturbed / "silo-0.toml").answer("run", CELL, t, zeros())
    point, killed = 5 if stride > 1 else 1, True
    while killed:
        folder = Path(shutil.copytree(before, tmp_path / "silo"))
        killed = killed_at(point, folder, lambda guard: guard.answer("run", CELL, t, zeros()))
        again = guard_of(folder / "silo-0.toml")
        asked = again._ledger.find_answer("run", t)
        if asked is not None:
            refused(again, rf"round {t} was (asked|answered) already, for another query", CELL, t, zeros() + 1.0)
        assert torch.equal(again.answer("run", CELL, t, zeros()), honest), point
        assert charged(again) == [pytest.approx(4.0)], point
        refused(again, "the budget is 5", CELL, run="second")
        again._ledger.close()
        shutil.rmtree(folder)
        point += stride
    assert point > 20
