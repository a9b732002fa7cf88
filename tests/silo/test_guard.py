"""A silo against a server that does not follow the protocol: rounds and queries, by the real guard and ledger."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.clients.simulated import SimulatedFederation
from fedpriv.core.errors import RunError
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.fingerprint import begin_ledger
from fedpriv.silo.guard import Guard
from fedpriv.silo.ledger import LedgerError, SiloLedger
from fedpriv.silo.policy import Policy, read_policy
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo, unpack_state
from tests.conftest import small_tree
from tests.silo.charged import charged
from tests.silo.guarded import CELL, CLIP, ZERO, cell_json, guard_of, write_silo


def test_a_run_goes_through_and_is_noisy(tmp_path: Path) -> None:
    guard, other = guard_of(write_silo(tmp_path)), tmp_path / "other"
    other.mkdir()
    releases = [guard.answer("run", CELL, t, ZERO) for t in range(1, 9)]
    again = guard_of(write_silo(other))
    differently = [again.answer("run", CELL, t, ZERO) for t in range(1, 9)]
    sigma = 2 * CLIP * math.sqrt(8) / 4.0
    for one, two in zip(releases, differently, strict=True):  # same records, another key of the system's
        difference = (one - two) / (sigma * math.sqrt(2))
        assert abs(float(difference.std()) - 1) < 5 / math.sqrt(2 * 7850)  # false alarm 6e-7 a round


def test_a_repeated_round_gets_the_same_bytes_and_another_query_is_refused(tmp_path: Path) -> None:
    guard = guard_of(write_silo(tmp_path))
    first, second = guard.answer("run", CELL, 1, ZERO), guard.answer("run", CELL, 2, ZERO)
    assert torch.equal(guard.answer("run", CELL, 2, ZERO), second)
    assert torch.equal(guard.answer("run", CELL, 1, ZERO), first)
    for t in (1, 2):
        with pytest.raises(RunError, match=f"round {t} was answered already, for another query"):
            guard.answer("run", CELL, t, ZERO + 1e-12)
    assert torch.isfinite(guard.answer("run", CELL, 3, ZERO)).all()


@pytest.mark.parametrize(
    ("t", "query", "reason"),
    [
        (2, ZERO, "asked for round 2 after round 0"),
        (0, ZERO, "asked for round 0 after round 0"),
        (-1, ZERO, "asked for round -1"),
        (1, ZERO[:-1], r"shape \(7849,\)"),
        (1, ZERO.float(), "float32"),
        (1, ZERO + torch.nan, "not finite"),
        (1, ZERO + torch.inf, "not finite"),
    ],
)
def test_rounds_and_queries_outside_the_protocol_are_refused(
    tmp_path: Path, t: int, query: torch.Tensor, reason: str
) -> None:
    guard = guard_of(write_silo(tmp_path))
    with pytest.raises(RunError, match=reason):
        guard.answer("run", CELL, t, query)
    assert torch.isfinite(guard.answer("run", CELL, 1, ZERO)).all()  # a refusal costs nothing and breaks nothing


def test_no_release_after_the_last_round_and_the_key_is_wiped(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    guard = guard_of(path)
    last = [guard.answer("run", CELL, t, ZERO) for t in range(1, 9)][-1]
    with pytest.raises(RunError, match="round 9: this run is over"):
        guard.answer("run", CELL, 9, ZERO)
    assert torch.equal(guard.answer("run", CELL, 8, ZERO), last)
    run = SiloLedger(read_policy(path).ledger).find_run("run")
    assert run is not None
    assert run.key is None


def test_a_restarted_guard_goes_on_with_the_noise_of_its_ledger(tmp_path: Path) -> None:
    """Two guards after each other release what one silo with the first one's key releases."""
    path = write_silo(tmp_path)
    before = guard_of(path)
    releases = [before.answer("run", CELL, t, ZERO) for t in range(1, 5)]
    opened = before._ledger.find_run("run")
    assert opened is not None
    assert opened.key is not None
    after = guard_of(path)
    releases += [after.answer("run", CELL, t, ZERO) for t in range(5, 9)]
    admitted = after._admission.admit(after._admission.canonicalize(CELL))
    silo = Silo.for_release(
        0, admitted.plan, after._views.records(admitted.cell), opened.key, admitted.scenario_digest
    )
    state = silo.initial_state()
    for t, released in enumerate(releases, 1):
        expected, state = silo.answer(state, t, ZERO)
        assert torch.equal(released, silo.make_message(expected.vector, t, b"", state.query_chain))


def test_a_smaller_budget_holds_for_a_run_under_way_from_the_restart_on(tmp_path: Path) -> None:
    path = write_silo(tmp_path, budget=4.0)
    first = guard_of(path).answer("run", CELL, 1, ZERO)
    path.write_text(path.read_text().replace("budget = 4.0", "budget = 3.9"))
    restarted = guard_of(path)
    with pytest.raises(RunError, match=r"with all before 4; the budget is 3\.9"):
        restarted.answer("run", CELL, 2, ZERO)
    path.write_text(path.read_text().replace("budget = 3.9", "budget = 4.0"))
    restarted = guard_of(path)
    assert torch.equal(restarted.answer("run", CELL, 1, ZERO), first)
    assert torch.isfinite(restarted.answer("run", CELL, 2, ZERO)).all()


def test_a_run_cannot_change_its_scenario(tmp_path: Path) -> None:
    guard = guard_of(write_silo(tmp_path))
    guard.answer("run", CELL, 1, ZERO)
    with pytest.raises(RunError, match="not the one this run was opened with"):
        guard.answer("run", cell_json(privacy__rho=1.0), 2, ZERO)


def test_increments_are_clipped_whatever_the_query(tmp_path: Path) -> None:
    """A query far outside the ball makes the unclipped increment huge; the release moves by at most 2·clip."""
    far = ZERO.clone()
    far[::7] = 1e6
    guard = guard_of(write_silo(tmp_path))
    guard.answer("run", CELL, 1, ZERO)
    guard.answer("run", CELL, 2, far)
    packed = SiloLedger(tmp_path / "ledger-0.sqlite").find_run("run")
    assert packed is not None
    assert packed.state is not None
    silo = next(iter(guard._loaded_silos.values()))
    (total,) = unpack_state(packed.state, silo).accumulator
    assert 0.0 < float(total.double().norm()) * silo.plan.required_exact_plan.lattice.unit <= 2 * CLIP


def test_a_full_disk_releases_nothing(tmp_path: Path) -> None:
    guard = guard_of(write_silo(tmp_path))
    guard.answer("run", CELL, 1, ZERO)
    guard._ledger._database.execute("PRAGMA max_page_count = 1")  # SQLite's own way of a disk that is full
    with pytest.raises(LedgerError, match="nothing is released"):
        guard.answer("run", CELL, 2, ZERO)
    known = guard_of(tmp_path / "silo-0.toml")._ledger.find_answer("run", 2)
    assert known is None or known.reply is None


def test_a_last_round_that_fails_ends_the_run_and_wipes_its_key_and_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: a thief of the disk, by the key of noise that was added to rounds before."""
    guard = guard_of(write_silo(tmp_path))
    for t in range(1, 8):
        guard.answer("run", CELL, t, ZERO)
    before = guard._ledger.find_run("run")
    assert before is not None
    assert before.key
    assert before.state

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Silo, "answer", fails)
    with pytest.raises(RunError, match="its guard failed, and its own log says why"):
        guard.answer("run", CELL, 8, ZERO)
    monkeypatch.undo()
    after = guard._ledger.find_run("run")
    assert after is not None
    assert (after.key, after.state) == (None, None)
    with pytest.raises(RunError, match="this run is over"):
        guard.answer("run", CELL, 8, ZERO)
    written = b"".join(path.read_bytes() for path in tmp_path.glob("ledger-0.sqlite*"))
    assert before.key not in written


@pytest.mark.parametrize("name", ["mu", "zcdp", "epsilon", "rho"])
def test_a_privacy_target_beyond_everything_is_refused_under_each_of_its_names(tmp_path: Path, name: str) -> None:
    tree = json.loads(CELL)
    tree["privacy"] = {"relation": "replace-one", name: 2e6, **({"delta": 1e-5} if name == "epsilon" else {})}
    with pytest.raises(RunError, match=f"privacy.{name} = 2e\\+06: protects nothing"):
        guard_of(write_silo(tmp_path)).query_shapes(json.dumps(tree))


def test_left_out_rounds_whose_noise_would_keep_others_waiting_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise of 50 rounds of 103,000 values took 1.7 s before an answer, and nothing bounded it."""
    monkeypatch.setattr("fedpriv.silo.admission._MAX_MISSED_VALUES", 3 * 7850)
    guard = guard_of(write_silo(tmp_path))
    cell = cell_json(deployment={"missing": "continue"})
    with pytest.raises(RunError, match=r"round 6: 5 rounds before it were left out"):
        guard.answer("run", cell, 6, ZERO)
    assert guard._ledger.charges() == [], "a run whose first question is refused costs nothing"
    guard.answer("run", cell, 1, ZERO)
    with pytest.raises(RunError, match=r"round 6: 4 rounds before it were left out, .* 31400 values"):
        guard.answer("run", cell, 6, ZERO)
    assert guard._ledger.find_answer("run", 6) is None
    assert torch.isfinite(guard.answer("run", cell, 5, ZERO)).all()


def test_a_run_that_takes_more_memory_than_the_policy_says_is_refused_in_one_line(tmp_path: Path) -> None:
    guard = guard_of(write_silo(tmp_path, memory="64 MiB"))
    with pytest.raises(
        RunError, match=r"^silo 0 refuses: the run takes \d+ MiB of memory, allow.memory is 64 MiB: [^\n]*$"
    ):
        guard.answer("run", CELL, 1, ZERO)
    assert guard._ledger.charges() == []


NOISE_FREE = resolve_cell(small_tree(privacy={"mode": "none", "relation": "replace-one"}), "test")
NOISY = resolve_cell(small_tree(), "test")


def guard(folder: Path, *, noise_free: bool, trust: str = "untrusted") -> Guard:
    """Silo 0's guard, with a ledger that the next guard of this folder finds again."""
    allow = {"relation": "replace-one", "clip": 1e3, "rounds": 8, "budget": 4.0, "trust": trust}
    if noise_free:
        allow["noise_free"] = True
    given = {"silo": 0, "classes": 10, "socket": "-", "allow": allow}
    files = {"shard": folder / "shard.npz", "ledger": folder / "ledger.sqlite"}
    policy = Policy.model_validate({**given, **files})
    records = SimulatedFederation.from_cell(NOISY).silo(0).records
    images = (records.features.numpy()[:, :784].reshape(-1, 28, 28) * 255.0).round().astype(np.uint8)
    shard = Shard(images, records.labels.numpy())
    if not (folder / "ledger.sqlite").exists():
        begin_ledger(policy, shard)
    return Guard(policy, SiloLedger(folder / "ledger.sqlite"), shard)


def ask(of: Guard, run: str, cell: Cell) -> torch.Tensor:
    return of.answer(run, json.dumps(cell.canonical_data()), 1, load_task(cell).objective.initial())


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_a_run_without_noise_is_refused_unless_the_policy_gives_up_protection(tmp_path: Path, trust: str) -> None:
    with pytest.raises(RunError, match="refuses: the scenario has"):
        ask(guard(tmp_path, noise_free=False, trust=trust), "run", NOISE_FREE)
    exact = ask(guard(tmp_path, noise_free=True, trust=trust), "run", NOISE_FREE)
    again = ask(guard(tmp_path, noise_free=True, trust=trust), "another", NOISE_FREE)
    assert torch.equal(exact, again)


def test_after_a_run_without_noise_nothing_private_is_left_to_promise(tmp_path: Path) -> None:
    ask(guard(tmp_path, noise_free=True), "bare", NOISE_FREE)
    assert charged(SiloLedger(tmp_path / "ledger.sqlite")) == [math.inf]
    with pytest.raises(RunError, match="with all before inf; the budget is 4"):
        ask(guard(tmp_path, noise_free=False), "private", NOISY)


def test_a_run_that_a_narrowed_policy_finds_without_noise_is_not_left_at_its_price(tmp_path: Path) -> None:
    """Charged 4 where the server was trusted to add noise; by the narrowed policy its exact sums have no price."""
    summed = resolve_cell(small_tree(algorithm__trust="trusted"), "test")
    trusting = guard(tmp_path, noise_free=True, trust="trusted")
    query = load_task(summed).objective.initial()
    trusting.answer("run", json.dumps(summed.canonical_data()), 1, query)
    assert charged(SiloLedger(tmp_path / "ledger.sqlite")) == [pytest.approx(4.0)]
    with pytest.raises(RunError, match=r"by its policy this run costs .* and it was charged 4"):
        guard(tmp_path, noise_free=True).answer("run", json.dumps(summed.canonical_data()), 2, query)
