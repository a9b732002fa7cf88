"""What a guard keeps from round to round, for every mechanism that it accepts, and for several runs at once."""

import json
import math
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedpriv.claims.ledger import make_silo_stream
from fedpriv.core.errors import RunError
from fedpriv.core.random import KeyedNormal
from fedpriv.noise.integers.fixed_point import Ints
from fedpriv.noise.integers.gaussian import INITIAL_QUERY_CHAIN, KeyedDiscreteGaussian, round_noise
from fedpriv.noise.series import Workload
from fedpriv.rounds.round import RoundState
from fedpriv.silo.admission import Charge
from fedpriv.silo.guard import Guard, room_of_run
from fedpriv.silo.ledger import LedgerError, SiloLedger
from fedpriv.silo.masks import Masker
from fedpriv.silo.rows import KEPT_REPLIES, MAX_ROOM
from fedpriv.silo.silo import pack_state, unpack_state
from tests.attacks.guards import KEPT_STATE, cards, guard_for, guard_process, random_records, scenario, zeros
from tests.parts import in_turn
from tests.silo.charged import charged
from tests.silo.guarded import find_run, guard_of, refused, replay, silo_with_key_of


def queries(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7850, generator=generator, dtype=torch.float64) * 1e-2 for _ in range(8)]


def bounds_of(trust: str) -> dict[str, Any]:
    return {"trust": trust, "silos": 3 if trust == "secure-aggregation" else None, "budget": 9.0}


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "dtype"), in_turn(KEPT_STATE, ["float32", "float64"]))
def test_a_guard_restarted_after_every_round_releases_the_same_bytes_as_a_silo_in_memory(
    tmp_path: Path, name: str, dtype: str
) -> None:
    """Every mechanism with state, packed and unpacked: sums, past queries and the noise of every older node."""
    cell = scenario(**KEPT_STATE[name], run__dtype=dtype)
    asked = [query.to(getattr(torch, dtype)) for query in queries()]
    guard = guard_for(tmp_path, *random_records())
    messages = [guard.answer("run", cell, 1, asked[0])]
    silo = silo_with_key_of(guard)
    messages += [guard_of(tmp_path / "silo-0.toml").answer("run", cell, t, asked[t - 1]) for t in range(2, 9)]
    for message, (expected, _, state) in zip(messages, replay(silo, asked), strict=True):
        assert message.dtype == getattr(torch, dtype)
        assert torch.equal(message, expected), state.last_round
        again = unpack_state(pack_state(state), silo)
        assert (again.last_round, again.query_chain) == (state.last_round, state.query_chain)
        for one, other in zip(vectors_of(again), vectors_of(state), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def vectors_of(state: RoundState) -> tuple[torch.Tensor, ...]:
    return (*state.past_vectors, *state.accumulator, *state.mechanism_state)


@pytest.mark.slow
def test_guarantee_replies_and_refusals_do_not_depend_on_the_caches_of_a_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that keeps all, one that keeps nothing and one that restarts give the same bytes, or refuse alike."""
    monkeypatch.setattr("fedpriv.silo.guard.system_key", lambda: bytes(range(32)))
    cell, other = scenario(**KEPT_STATE["banded"]), scenario(**KEPT_STATE["tree"])
    asked = [query.to(torch.float64) for query in queries()]
    keeps, forgets = (guard_for(tmp_path / name, *random_records(), budget=2.0) for name in ("keeps", "forgets"))
    guard_for(tmp_path / "restarts", *random_records(), budget=2.0)

    def answer_or_reason(guard: Guard, *question: Any) -> Any:
        try:
            return guard.answer(*question).numpy().tobytes()
        except RunError as refusal:
            return str(refusal)

    def questions() -> Iterator[tuple[Any, ...]]:
        for t in range(1, 5):
            yield "run", cell, t, asked[t - 1]
            yield "run", other, t, asked[t - 1]  # not the scenario it was opened with
            yield "run", cell, t, asked[t]  # answered, for another query
            yield "run", cell, t + 2, asked[t]  # not in order
            yield f"further {t}", cell, 1, asked[0]  # until the budget is spent
            yield "run", "{", t, asked[t]

    def caches(guard: Guard) -> list[Any]:
        return [guard._canonical_cells, guard._fits_budget, guard._admitted_runs, guard._blank_silos]

    replies = list[Any]()
    for number, question in enumerate(questions()):
        replies.append(first := answer_or_reason(keeps, *question))
        for cache in (*caches(forgets), forgets._loaded_silos, forgets._views):
            cache.clear()
        assert answer_or_reason(forgets, *question) == first, number
        restarted = guard_of(tmp_path / "restarts" / "silo-0.toml")
        assert answer_or_reason(restarted, *question) == first, number
    assert all(len(cache) <= 4 for cache in caches(keeps))
    assert sum(isinstance(reply, bytes) for reply in replies) >= 4
    assert any("the budget is" in reply for reply in replies if isinstance(reply, str))


def test_an_open_run_is_checked_against_the_budget_again_when_another_run_was_charged(tmp_path: Path) -> None:
    """What was found of the budget holds for these charges, and for no others."""
    guard, cell = guard_for(tmp_path, *random_records(), budget=2.0), scenario(**KEPT_STATE["banded"])
    guard.answer("run", cell, 1, queries()[0])
    guard.answer("run", cell, 2, queries()[1])
    with guard._ledger.lock(), guard._ledger.transaction():
        guard._ledger.open_run("other", Charge("{}", 9.0, 0.0), bytes(32))
    refused(guard, "the budget is", cell, 3, queries()[2])


def test_a_ledger_keeps_its_size_from_round_to_round_of_a_run(tmp_path: Path) -> None:
    """Rows of all rounds have their room from the first query on, and only the last replies are kept."""
    guard = guard_for(tmp_path, *random_records(160), budget=100.0)
    cell, sizes = scenario(federation__rounds=60, federation__epochs=60), list[int]()
    for t in range(1, 60):
        guard.answer("run", cell, t, zeros())
        sizes.append(
            sum((tmp_path / name).stat().st_size for name in ("ledger-0.sqlite", "ledger-0.sqlite-journal"))
        )
    assert len(set(sizes[KEPT_REPLIES + 1 :])) == 1, sizes
    assert sizes[-1] < room_of_run(guard._admission.admit(cell).plan) + sizes[0]


@pytest.mark.parametrize("name", ["banded", "aligned differences, clipped in parts"])
def test_the_room_of_a_run_has_the_states_of_its_mechanism(tmp_path: Path, name: str) -> None:
    """States of several vectors are stored twice for a moment, and the file had no room for them."""
    guard, cell = guard_for(tmp_path, *random_records(), budget=100.0), scenario(**KEPT_STATE[name])
    sizes = list[int]()
    for t in range(1, 8):
        guard.answer("run", cell, t, zeros())
        sizes.append((tmp_path / "ledger-0.sqlite").stat().st_size)
    assert len(set(sizes)) == 1, sizes


def test_a_second_run_leaves_the_room_of_the_first_one_free(tmp_path: Path) -> None:
    """Its room was made of the pages that the first run had set aside, and both grew the file."""
    guard = guard_for(tmp_path, *random_records())
    with guard._ledger.lock():
        for name in ("first", "second", "third"):
            with guard._ledger.transaction():
                guard._ledger.open_run(name, Charge("{}", 0.1, 0.0), bytes(32))
                guard._ledger.record_query(name, 1, bytes(32), 10**7)
        assert (tmp_path / "ledger-0.sqlite").stat().st_size > 3 * 10**7
        with guard._ledger.transaction():
            guard._ledger.open_run("fourth", Charge("{}", 0.1, 0.0), bytes(32))
            guard._ledger.record_query("fourth", 1, bytes(32), 2**40)
    assert MAX_ROOM < (tmp_path / "ledger-0.sqlite").stat().st_size < MAX_ROOM + 10**6


def test_a_refused_first_query_sets_no_room_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server could make a silo write 128 MB a request, for runs that are never charged."""
    guard, cell, rooms = guard_for(tmp_path, *random_records()), scenario(), list[object]()
    monkeypatch.setattr(SiloLedger, "record_query", lambda *given: rooms.append(given))
    refused(guard, "", cell, 1, zeros() * math.nan)
    assert rooms == []


def test_a_run_under_way_needs_no_free_disk_to_be_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its room was set aside, and a server that was started again asks before it goes on."""
    guard, cell = guard_for(tmp_path, *random_records(), budget=9.0), scenario()
    guard.answer("run", cell, 1, zeros())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    guard.preview_admission("run", cell)
    with pytest.raises(LedgerError, match="No space left on device"):
        guard.preview_admission("other", cell)


def test_the_last_replies_of_an_open_run_are_repeated_and_earlier_ones_are_refused(tmp_path: Path) -> None:
    """A killed server asks for its last round again; what no server asks for is not in the ledger."""
    guard = guard_for(tmp_path, *random_records(160), budget=100.0)
    cell, last = scenario(federation__rounds=60, federation__epochs=60), KEPT_REPLIES + 3
    replies = [guard.answer("run", cell, t, zeros()) for t in range(1, last + 1)]
    again = guard_of(tmp_path / "silo-0.toml")
    old = last - KEPT_REPLIES
    for t in range(old + 1, last + 1):
        assert torch.equal(again.answer("run", cell, t, zeros()), replies[t - 1])
    reason = f"round {old} was answered, and {KEPT_REPLIES} later rounds: only a digest of its reply is kept"
    refused(again, reason, cell, old, zeros())
    assert replies[old - 1].numpy().tobytes()[:400] not in (tmp_path / "ledger-0.sqlite").read_bytes()


@pytest.mark.every(4)
@pytest.mark.parametrize("name", KEPT_STATE)
def test_released_noise_has_the_variance_of_the_charged_mechanism_in_every_round(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variance of every round's noise against the algebra: 7,850 values, 6 standard errors, 1.6e-8 a run."""
    cell = scenario(**KEPT_STATE[name])
    guard = guard_for(tmp_path, *random_records())
    released = [guard_of(tmp_path / "silo-0.toml").answer("run", cell, t, zeros()) for t in range(1, 8)]
    silo = silo_with_key_of(guard)
    stream = make_silo_stream(silo.plan, 0, 8)
    workload = Workload(silo.plan.schedule, stream.decay, np.array(stream.clips), stream.period)
    variances = stream.std**2 * silo.plan.mechanism.variance(workload)
    monkeypatch.setattr(KeyedDiscreteGaussian, "vector", lambda _, size, *of_noise: np.zeros(size, np.int64))
    exact = (release.vector for _, release, _ in replay(silo, [zeros()] * 7))
    for t, (message, vector) in enumerate(zip(released, exact, strict=True)):
        assert (message - vector).numpy().var() == pytest.approx(variances[t], rel=6 * np.sqrt(2 / 7850)), t


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "trust"), in_turn(KEPT_STATE, ["secure-aggregation", "untrusted"]))
def test_releases_are_a_function_of_the_noisy_integers_only(
    tmp_path: Path, name: str, trust: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee of `Silo`: with other records and the same y, every reply has the same bytes."""
    cell = scenario(trust, **KEPT_STATE[name])
    generator = np.random.default_rng(1)
    noisy = {(t, n): generator.integers(-(2**40), 2**40, (n, 7850)) for t in range(1, 9) for n in (1, 2, 3)}

    def fixed(_: Any, __: Any, state: Any, t: int, sums: Ints, *rest: Any) -> tuple[Ints, Any]:
        return noisy[t, sums.size // 7850].reshape(sums.shape), state

    monkeypatch.setattr("fedpriv.rounds.integers.add_discrete_noise", fixed)
    monkeypatch.setattr("fedpriv.silo.guard.system_key", lambda: bytes(32))
    monkeypatch.setattr(Masker, "mask", lambda _, __, ___, t, size, chain: np.full(size, t, np.uint64))
    replies = []
    for seed in (0, 1):
        guard = guard_for(tmp_path / str(seed), *random_records(seed=seed), **bounds_of(trust))
        keys = cards(guard.public_key("run", cell)) if trust == "secure-aggregation" else b""
        replies.append([guard.answer("run", cell, t, zeros(), keys) for t in range(1, 9)])
    for one, other in zip(*replies, strict=True):
        assert torch.equal(one, other)
        assert len(one.unique()) > 200


def test_concurrent_runs_have_separate_keys_states_and_noise(tmp_path: Path) -> None:
    """Interleaved rounds through one guard; a run that were answered as another would share its noise."""
    cell = scenario(**KEPT_STATE["tree"])
    guard = guard_for(tmp_path, *random_records(), budget=10.0)
    released: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    for t in range(1, 8):
        for run in released:
            released[run].append(guard.answer(run, cell, t, zeros()))
    std = silo_with_key_of(guard, "a").plan.noise.std_of(0)
    for one, other in zip(released["a"], released["b"], strict=True):
        assert float((one - other).std()) > float(std)  # √2 of it at least; 0 if they shared noise
    for run, messages in released.items():
        expected = (message for message, *_ in replay(silo_with_key_of(guard, run), [zeros()] * 7))
        assert all(map(torch.equal, messages, expected))
    assert len({find_run(guard, run).key for run in released}) == 2


def test_finished_runs_stay_charged_after_their_keys_are_wiped(tmp_path: Path) -> None:
    """Two runs of μ = 2.4 and 3.2 cost 4: with both over and their keys wiped, nothing is left."""
    guard = guard_for(tmp_path, *random_records())
    for run, rho in (("a", 2.4), ("b", 3.2)):
        for t in range(1, 9):
            guard.answer(run, scenario(privacy__rho=rho), t, zeros())
        assert (find_run(guard, run).key, find_run(guard, run).state) == (None, None)
    for again in (guard, guard_of(tmp_path / "silo-0.toml")):
        refused(again, r"with all others 4\.002; the budget is 4", scenario(privacy__rho=0.1), run="c")


def test_a_narrowed_policy_applies_to_open_runs(tmp_path: Path) -> None:
    """Clip, rounds, relation, trust and budget, each taken back after round 1 (finding 32)."""
    wide: dict[str, Any] = {"trust": "trusted", "budget": 4.0}
    cell = scenario("trusted")
    guard_for(tmp_path, *random_records(), **wide).answer("run", cell, 1, zeros())
    narrower: list[tuple[dict[str, Any], str]] = [
        ({"clip": 1.0}, "the scenario clips at"),
        ({"rounds": 7}, "8 rounds, allowed are 7"),
        ({"relation": "zero-out"}, "relation is replace-one"),
        ({"trust": "untrusted"}, "without noise"),
        ({"budget": 3.9}, r"the budget is 3\.9"),
        ({"dimension": 7849}, "7850 parameters, allowed are 7849"),
    ]
    for narrow, reason in narrower:
        refused(guard_for(tmp_path, *random_records(), **{**wide, **narrow}), reason, cell, t=2)
    assert torch.isfinite(guard_for(tmp_path, *random_records(), **wide).answer("run", cell, 2, zeros())).all()


def test_an_open_masked_run_is_refused_once_the_policy_no_longer_counts_on_other_silos(tmp_path: Path) -> None:
    """Charged μ of the sum, and by the narrower policy μ √3."""
    cell = scenario("secure-aggregation")
    wide = guard_for(tmp_path, *random_records(), **bounds_of("secure-aggregation"))
    keys = cards(wide.public_key("run", cell))
    wide.answer("run", cell, 1, zeros(), keys)
    reason = r"by its policy this run costs mu = 6\.929, and it was charged 4"
    refused(guard_for(tmp_path, *random_records(), budget=9.0), reason, cell, t=2, signed_keys=keys)


def test_masks_of_different_silos_rounds_and_query_histories_share_no_block() -> None:
    """No block of a mask occurs in another one, whatever the offset; no public number is the secret."""
    maskers = [Masker(KeyedNormal(bytes([n]) * 32).derive_secret(n), n) for n in range(3)]
    keys = b"".join(masker.public_key for masker in maskers)
    seen: set[bytes] = set()
    for masker in maskers[:2]:
        for t in (1, 2, 3):
            for chain in (b"", b"one", b"two"):
                words = masker.mask(keys, 3, t, 2000, chain).tobytes()
                blocks = {words[start : start + 16] for start in range(0, len(words), 16)}
                assert len(blocks) == 1000
                assert not blocks & seen
                seen |= blocks


def test_the_mask_secret_is_neither_public_nor_the_noise_key(tmp_path: Path) -> None:
    """Two runs of one silo have two secrets, and neither a run's own key nor a constant is one."""
    cell = scenario("secure-aggregation")
    guard = guard_for(tmp_path, *random_records(), **bounds_of("secure-aggregation"))
    public = [guard.public_key(run, cell)[:32] for run in ("a", "b")]
    assert len(set(public)) == 2
    for run, card in zip(("a", "b"), public, strict=True):
        silo, key = silo_with_key_of(guard, run), find_run(guard, run).key
        assert key is not None
        secret = KeyedNormal(key).derive_secret(0)
        guesses = [key, bytes(32), bytes([1]) * 32, KeyedNormal(bytes(32)).derive_secret(0)]
        assert card not in [Masker(guess, 0).public_key for guess in guesses]
        assert card == Masker(secret, 0).public_key
        assert secret != silo.key
        one, other = (
            round_noise(seed, 0, 1, INITIAL_QUERY_CHAIN, np.zeros(7850, np.int64)).vector(7850, 2.0**40)
            for seed in (key, secret)
        )
        assert not np.array_equal(one, other)


@pytest.mark.parametrize("model", [{}, {"centre": 0.13}, {"feature_norm": 3.0, "features": "orientations"}])
def test_features_of_a_record_do_not_depend_on_the_other_records(tmp_path: Path, model: dict[str, Any]) -> None:
    """Public constants alone: a shard's own mean would be a release about all of its records (finding 49)."""
    images, labels = random_records()
    cell = scenario(model={"name": "softmax-regression", **model})

    def features_of(folder: Path, images: NDArray[Any]) -> torch.Tensor:
        guard = guard_for(folder, images, labels)
        guard.answer("run", cell, 1, zeros() if not model.get("features") else zeros()[: 10 * 393])
        return guard._loaded_silos["run"].records.features

    together = features_of(tmp_path, images)
    for row in range(4):
        alone = features_of(tmp_path / str(row), np.repeat(images[row : row + 1], 40, axis=0))
        assert torch.allclose(together[row], alone[0], rtol=1e-12)


@pytest.mark.slow
def test_a_guard_reply_contains_only_the_release_and_a_checkpoint(tmp_path: Path) -> None:
    """No counts of records beside it: how many were clipped is a release that nobody accounts for (finding 52).

    The ledger's commit is no function of records.
    """
    with guard_process(tmp_path, *random_records()) as guard, socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(guard.path))
        header = {"run": "run", "cell": scenario(), "t": 1, "dtype": "float64", "keys": ""}
        for content in (json.dumps(header).encode(), bytes(8 * 7850)):
            raw.sendall(struct.pack("!I", len(content)) + content)
        raw.shutdown(socket.SHUT_WR)
        reply = b""
        while piece := raw.recv(2**16):
            reply += piece
    (length,) = struct.unpack_from("!I", reply)
    commit = guard_of(tmp_path / "silo-0.toml").checkpoint("run", scenario(), 1).hex()
    assert json.loads(reply[4 : 4 + length]) == {"commit": commit, "dtype": "float64"}
    assert len(reply) == 8 + length + 8 * 7850


def test_a_full_disk_releases_nothing_and_the_repeated_round_gets_the_same_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query on file, the reply on file, or the mark: each refused once (finding 34)."""
    monkeypatch.setattr("fedpriv.silo.ledger.MAX_ROOM", 0)  # with room set aside the disk is not asked
    guard = guard_for(tmp_path, *random_records())
    guard.answer("run", scenario(), 1, zeros())
    pages = guard._ledger._database.execute("PRAGMA page_count").fetchone()[0]
    guard._ledger._database.execute(f"PRAGMA max_page_count = {pages}")
    refused(guard, "nothing is released", scenario(), 2, error=LedgerError)
    again = guard_of(tmp_path / "silo-0.toml")
    answer = again._ledger.find_answer("run", 2)
    assert answer is not None
    assert answer.reply is None  # the small row fitted: its query is on file
    refused(again, "round 2 was asked already, for another query", scenario(), 2, zeros() + 1.0)
    *_, (message, _, _) = replay(silo_with_key_of(again), [zeros()] * 2)
    assert torch.equal(again.answer("run", scenario(), 2, zeros()), message)
    assert charged(again) == [pytest.approx(4.0)]
