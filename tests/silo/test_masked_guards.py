"""Masked rounds through a silo's guard: keys and messages are given once, and charged as the policy says."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpriv.core.errors import RunError
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.masks import Masker
from fedpriv.silo.policy import read_policy
from tests.silo.test_guard import ZERO, cell_json, guard_of, write_silo

MASKED = "secure-aggregation"
CELL = cell_json(algorithm__trust=MASKED)
OTHERS = [Masker(bytes([number]) * 32, number).public + bytes(64) for number in (1, 2)]


def keys_with(card: bytes) -> bytes:
    """The cards of three silos, of which two do not sign."""
    return b"".join([card, *OTHERS])


def allowing(tmp_path: Path, **allow: Any) -> Path:
    return write_silo(tmp_path, **{"trust": MASKED, **allow})


def test_a_round_that_is_asked_again_gets_the_same_bytes_also_after_a_restart(tmp_path: Path) -> None:
    path = allowing(tmp_path)
    guard = guard_of(path)
    public = guard.public_key("run", CELL)
    first = guard.answer("run", CELL, 1, ZERO, keys_with(public))
    assert (first.dtype, len(first)) == (torch.uint8, 7850 * 6)
    again = guard_of(path)
    assert again.public_key("run", CELL) == public
    assert torch.equal(again.answer("run", CELL, 1, ZERO, keys_with(public)), first)
    changed = b"".join([public, OTHERS[1], OTHERS[0]])
    with pytest.raises(RunError, match="round 1 was answered already, for another query"):
        again.answer("run", CELL, 1, ZERO, changed)
    assert not torch.equal(again.answer("run", CELL, 2, ZERO, keys_with(public)), first)


def test_asking_for_the_key_again_does_not_start_the_run_again(tmp_path: Path) -> None:
    guard = guard_of(allowing(tmp_path))
    public = guard.public_key("run", CELL)
    guard.answer("run", CELL, 1, ZERO, keys_with(public))
    assert guard.public_key("run", CELL) == public
    with pytest.raises(RunError, match="asked for round 3 after round 1"):
        guard.answer("run", CELL, 3, ZERO, keys_with(public))


def test_the_key_is_wiped_with_the_last_round_and_its_public_half_is_not(tmp_path: Path) -> None:
    path = allowing(tmp_path)
    guard = guard_of(path)
    public = guard.public_key("run", CELL)
    last = [guard.answer("run", CELL, t, ZERO, keys_with(public)) for t in range(1, 9)][-1]
    run = SiloLedger(read_policy(path).ledger).run("run")
    assert run is not None
    assert run.key is None
    again = guard_of(path)
    assert again.public_key("run", CELL) == public
    assert torch.equal(again.answer("run", CELL, 8, ZERO, keys_with(public)), last)


@pytest.mark.parametrize("keys", [b"", bytes(3 * 32), bytes(3 * 96), b"".join(OTHERS)])
def test_without_the_keys_of_all_nothing_leaves(tmp_path: Path, keys: bytes) -> None:
    guard = guard_of(allowing(tmp_path))
    public = guard.public_key("run", CELL)
    with pytest.raises(RunError, match="silo 0: "):
        guard.answer("run", CELL, 1, ZERO, keys)
    assert guard.answer("run", CELL, 1, ZERO, keys_with(public)).dtype == torch.uint8


def test_a_run_without_masks_gives_no_key(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="this run has no masks"):
        guard_of(allowing(tmp_path)).public_key("run", cell_json())


def test_the_price_is_the_sums_only_where_the_policy_counts_on_the_other_silos(tmp_path: Path) -> None:
    """Guarantee: μ with the permission; μ √3 of the own share alone without it; nothing for exact sums."""
    path = allowing(tmp_path)
    guard_of(path).public_key("run", CELL)
    assert SiloLedger(read_policy(path).ledger).prices() == [pytest.approx(4.0)]
    for trust, budget, reason in (
        ("untrusted", 4.0, r"the run costs mu = 6\.929"),
        (MASKED, 3.9, "the run costs mu = 4"),
    ):
        folder = tmp_path / f"{trust} {budget}"
        folder.mkdir()
        with pytest.raises(RunError, match=reason):
            guard_of(write_silo(folder, trust=trust, budget=budget)).public_key("run", CELL)
    alone = tmp_path / "alone"
    alone.mkdir()
    path = write_silo(alone, budget=7.0)
    guard_of(path).public_key("run", CELL)
    assert SiloLedger(read_policy(path).ledger).prices() == [pytest.approx(4.0 * math.sqrt(3.0))]


def test_a_policy_that_counts_on_silos_does_not_trust_the_server(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="this silo release its sums without noise"):
        guard_of(allowing(tmp_path)).answer("run", cell_json(algorithm__trust="trusted"), 1, ZERO)
