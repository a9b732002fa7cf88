"""A silo against a server that does not follow the protocol: rounds and queries, by the real guard and ledger."""

import json
import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from fedpriv.silo.silo import Silo, unpack_state
from tests.silo.charged import charged
from tests.silo.guarded import CELL, CLIP, ZERO, cell_json, find_run, guard_at, refused


def test_two_guards_with_the_same_records_release_noise_of_the_planned_variance(tmp_path: Path) -> None:
    guards = guard_at(tmp_path), guard_at(tmp_path / "other")  # the same records, another key of the system's
    sigma = 2 * CLIP * math.sqrt(8) / 4.0
    for t in range(1, 9):
        one, two = (guard.answer("run", CELL, t, ZERO) for guard in guards)
        difference = (one - two) / (sigma * math.sqrt(2))
        assert abs(float(difference.std()) - 1) < 5 / math.sqrt(2 * 7850)  # false alarm 6e-7 a round


def test_a_repeated_round_gets_the_same_bytes_and_another_query_is_refused(tmp_path: Path) -> None:
    guard = guard_at(tmp_path)
    first, second = guard.answer("run", CELL, 1, ZERO), guard.answer("run", CELL, 2, ZERO)
    assert torch.equal(guard.answer("run", CELL, 2, ZERO), second)
    assert torch.equal(guard.answer("run", CELL, 1, ZERO), first)
    for t in (1, 2):
        refused(guard, f"round {t} was answered already, for another query", t=t, query=ZERO + 1e-12)
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
    guard = guard_at(tmp_path)
    refused(guard, reason, t=t, query=query)
    assert torch.isfinite(guard.answer("run", CELL, 1, ZERO)).all()  # a refusal costs nothing and breaks nothing


def test_a_run_ends_after_its_last_round_and_its_key_is_wiped(tmp_path: Path) -> None:
    guard = guard_at(tmp_path)
    last = [guard.answer("run", CELL, t, ZERO) for t in range(1, 9)][-1]
    refused(guard, "round 9: this run is over", t=9)
    assert torch.equal(guard.answer("run", CELL, 8, ZERO), last)
    assert find_run(guard_at(tmp_path)).key is None


def test_a_lowered_budget_applies_to_an_open_run_after_a_restart(tmp_path: Path) -> None:
    first = guard_at(tmp_path, budget=4.0).answer("run", CELL, 1, ZERO)
    refused(guard_at(tmp_path, budget=3.9), r"with all others 4; the budget is 3\.9", t=2)
    restarted = guard_at(tmp_path, budget=4.0)
    assert torch.equal(restarted.answer("run", CELL, 1, ZERO), first)
    assert torch.isfinite(restarted.answer("run", CELL, 2, ZERO)).all()


def test_a_run_cannot_change_its_scenario(tmp_path: Path) -> None:
    guard = guard_at(tmp_path)
    guard.answer("run", CELL, 1, ZERO)
    refused(guard, "not the one this run was opened with", cell_json(privacy__rho=1.0), t=2)


def test_increments_of_a_far_query_are_clipped(tmp_path: Path) -> None:
    """A query far outside the ball makes the unclipped increment huge; the release moves by at most 2·clip."""
    far = ZERO.clone()
    far[::7] = 1e6
    guard = guard_at(tmp_path)
    guard.answer("run", CELL, 1, ZERO)
    guard.answer("run", CELL, 2, far)
    packed, silo = find_run(guard).state, next(iter(guard._loaded_silos.values()))
    assert packed is not None
    (total,) = unpack_state(packed, silo).accumulator
    assert 0.0 < float(total.double().norm()) * silo.plan.required_exact_plan.lattice.unit <= 2 * CLIP


def test_a_last_round_that_fails_ends_the_run_and_wipes_its_key_and_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: a thief of the disk, by the key of noise that was added to rounds before."""
    guard = guard_at(tmp_path)
    for t in range(1, 8):
        guard.answer("run", CELL, t, ZERO)
    before = find_run(guard)
    assert before.key
    assert before.state
    assert guard.budget_status.open_run_count == 1
    with monkeypatch.context() as patch:
        patch.setattr(Silo, "answer", Mock(side_effect=MemoryError))
        refused(guard, "its guard failed, and its own log says why", t=8)
    assert (find_run(guard).key, find_run(guard).state) == (None, None)
    assert not guard._loaded_silos, "and no silo with the key is left in memory"
    assert guard.budget_status.open_run_count == 0
    refused(guard, "this run is over", t=8)
    assert before.key not in b"".join(path.read_bytes() for path in tmp_path.glob("ledger-0.sqlite*"))


@pytest.mark.parametrize("name", ["mu", "zcdp", "epsilon", "rho"])
def test_a_meaninglessly_large_privacy_target_is_refused_in_every_unit(tmp_path: Path, name: str) -> None:
    tree = json.loads(CELL)
    tree["privacy"] = {"relation": "replace-one", name: 2e6, **({"delta": 1e-5} if name == "epsilon" else {})}
    refused(guard_at(tmp_path), f"privacy.{name} = 2e\\+06: protects nothing", json.dumps(tree))


def test_a_gap_of_missed_rounds_with_too_much_noise_to_draw_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise of 50 rounds of 103,000 values took 1.7 s before an answer, and nothing bounded it."""
    monkeypatch.setattr("fedpriv.silo.admission._MAX_MISSED_VALUES", 3 * 7850)
    guard, cell = guard_at(tmp_path), cell_json(deployment={"missing": "continue"})
    refused(guard, r"round 6: 5 rounds before it were left out", cell, t=6)
    assert charged(guard) == [], "a run whose first question is refused costs nothing"
    guard.answer("run", cell, 1, ZERO)
    refused(guard, r"round 6: 4 rounds before it were left out, .* 31400 values", cell, t=6)
    assert guard._ledger.find_answer("run", 6) is None
    assert torch.isfinite(guard.answer("run", cell, 5, ZERO)).all()


def test_a_run_above_the_memory_limit_of_the_policy_is_refused_in_one_line(tmp_path: Path) -> None:
    guard = guard_at(tmp_path, memory="64 MiB")
    refused(guard, r"^silo 0 refuses: the run takes \d+ MiB of memory, allow.memory is 64 MiB: [^\n]*$")
    assert charged(guard) == []


NOISE_FREE = cell_json(privacy={"mode": "none", "relation": "replace-one"})


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_a_run_without_noise_is_refused_unless_the_policy_allows_runs_without_noise(
    tmp_path: Path, trust: str
) -> None:
    refused(guard_at(tmp_path, trust=trust), "refuses: the scenario has", NOISE_FREE)
    guard = guard_at(tmp_path, trust=trust, noise_free=True)
    assert torch.equal(guard.answer("run", NOISE_FREE, 1, ZERO), guard.answer("another", NOISE_FREE, 1, ZERO))


def test_a_run_without_noise_exhausts_the_budget_of_a_private_policy(tmp_path: Path) -> None:
    guard_at(tmp_path, noise_free=True).answer("bare", NOISE_FREE, 1, ZERO)
    guard = guard_at(tmp_path)
    assert charged(guard) == [math.inf]
    refused(guard, "with all others inf; the budget is 4", run="private")


def test_an_open_run_is_refused_once_a_narrowed_policy_leaves_its_sums_without_noise(tmp_path: Path) -> None:
    """Charged 4 where the server was trusted to add noise; by the narrowed policy its exact sums have no price."""
    summed, trusting = cell_json(algorithm__trust="trusted"), guard_at(tmp_path, noise_free=True, trust="trusted")
    trusting.answer("run", summed, 1, ZERO)
    assert charged(trusting) == [pytest.approx(4.0)]
    narrowed = guard_at(tmp_path, noise_free=True)
    refused(narrowed, r"by its policy this run costs .* and it was charged 4", summed, t=2)
