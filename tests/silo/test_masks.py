"""Masks: they cancel in the sum of all silos and hide everything else; keys and messages are given once."""

import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from fedpriv.cli.app import app
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.random import KeyedNormal, seed_key
from fedpriv.plan.calibration import EncodedMessage, Grid, make_grid
from fedpriv.silo.guard import Guard
from fedpriv.silo.masks import Masker
from tests.silo.charged import charged
from tests.silo.guarded import ZERO, cell_json, find_run, guard_at, refused


def maskers(silos: int, run: int = 0) -> list[Masker]:
    source = KeyedNormal(seed_key(run, "noise"))
    return [Masker(source.derive_secret(number), number) for number in range(silos)]


def masks(silos: list[Masker], t: int, size: int) -> list[EncodedMessage]:
    keys = b"".join(masker.public_key for masker in silos)
    return [masker.mask(keys, len(silos), t, size) for masker in silos]


def p_value(words: EncodedMessage) -> float:
    """Of the bytes being uniform: χ² with 255 degrees of freedom."""
    return float(stats.chisquare(np.bincount(words.view(np.uint8), minlength=256)).pvalue)


@settings(max_examples=25, deadline=None)
@given(silos=st.integers(2, 7), size=st.integers(1, 40), t=st.integers(1, 2**40), run=st.integers(0, 2**64))
def test_masks_of_all_silos_cancel_exactly(silos: int, size: int, t: int, run: int) -> None:
    assert not np.any(np.sum(masks(maskers(silos, run), t, size), axis=0, dtype=np.uint64))


def test_a_masked_message_is_uniform_and_so_is_every_sum_of_fewer_than_all() -> None:
    """Guarantee: silos send a constant; 15 tests at level 1e-6 and a fixed seed; without masks each fails."""
    constant = np.full(20_000, 12345, np.uint64)
    messages = [constant + mask for mask in masks(maskers(4), 3, len(constant))]
    for count in (1, 2, 3):
        for subset in combinations(messages, count):
            assert p_value(np.sum(subset, axis=0, dtype=np.uint64)) > 1e-6
    assert np.array_equal(np.sum(messages, axis=0, dtype=np.uint64), 4 * constant)
    assert p_value(constant) < 1e-100


def test_masks_of_rounds_and_runs_have_nothing_in_common() -> None:
    """Level 1e-6 each: differences of one silo's masks are as uniform as the masks."""
    first, second = (masks(maskers(3), t, 20_000)[0] for t in (1, 2))
    elsewhere = masks(maskers(3, run=1), 1, 20_000)[0]
    assert p_value(first - second) > 1e-6
    assert p_value(first - elsewhere) > 1e-6
    assert np.array_equal(first, masks(maskers(3), 1, 20_000)[0])


def test_keys_that_would_leave_a_message_bare_are_refused() -> None:
    own, *_ = silos = maskers(3)
    good = [masker.public_key for masker in silos]
    again = [(int.from_bytes(key, "little") | 1 << 255).to_bytes(32, "little") for key in good]
    for keys, reason in (
        ([], "expected 3 different public keys"),
        (good[:1], "expected 3 different public keys"),
        ([*good, bytes(32)], "expected 3 different public keys"),
        ([good[0], good[1], good[1]], "expected 3 different public keys"),
        ([good[1], good[0], good[2]], "another public key as this silo's"),
        ([good[0], good[1], again[1]], "no usable X25519"),  # the point of silo 1 again, in other bytes
        ([good[0], again[0], good[2]], "no usable X25519"),  # its own: a mask agreed on with itself
        ([good[0], good[1], (2**255 - 19 + 9).to_bytes(32, "little")], "no usable X25519"),
        ([good[0], good[1], bytes(32)], "no usable X25519"),  # low order: the shared secret would be 0
    ):
        with pytest.raises(RunError, match=f"silo 0: .*{reason}"):
            own.mask(b"".join(keys), 3, 1, 8)
    assert np.any(own.mask(b"".join(good), 3, 1, 8))


def test_each_run_and_silo_has_a_key_of_its_own() -> None:
    assert len({masker.public_key for run in (0, 1) for masker in maskers(3, run)}) == 6


UNIT = 2.0**-10
values = st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=6)


@given(values)
def test_a_sum_of_encoded_vectors_is_exact_and_signed(multiples: list[int]) -> None:
    grid = Grid(UNIT)
    messages = [grid.encode(np.array([k * UNIT, -k * UNIT])) for k in multiples]
    assert grid.decode_sum(messages).tolist() == [sum(multiples) * UNIT, -sum(multiples) * UNIT]


def test_a_sum_beyond_64_bits_wraps_as_a_residue() -> None:
    """The residue is a function of the sum: 3 · 2^61 units come back as 3 · 2^61 - 2^64 if added twice."""
    grid = Grid(1.0)
    words = grid.encode(np.array([3.0 * 2.0**60]))
    assert grid.decode_sum([words] * 4) == [3.0 * 2.0**62 - 2.0**64]


@pytest.mark.parametrize("digits", [24, 53])
@pytest.mark.parametrize("share", [1e-6, 0.7, 1.0, 55.68])
def test_the_grid_is_a_power_of_two_with_half_of_the_digits_above_it(share: float, digits: int) -> None:
    unit = make_grid(share, digits, 1.0).unit
    assert math.frexp(unit)[0] == 0.5
    assert 2.0 ** (digits // 2) <= share / unit < 2.0 ** (digits // 2 + 1)


def test_a_grid_that_has_no_room_is_refused() -> None:
    assert make_grid(1.0, 53, 2.0**22).unit == 2.0**-26
    with pytest.raises(InputError, match="do not fit on a grid"):
        make_grid(1.0, 53, 2.0**22 + 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**62])
def test_what_cannot_be_encoded_is_refused(value: float) -> None:
    with pytest.raises(RunError, match="not finite, or outside"):
        Grid(1.0).encode(np.array([0.0, value]))


MASKED = "secure-aggregation"
CELL = cell_json(algorithm__trust=MASKED)
OTHERS = [Masker(bytes([number]) * 32, number).public_key + bytes(64) for number in (1, 2)]


def keys_with(card: bytes) -> bytes:
    """The cards of three silos, of which two do not sign."""
    return b"".join([card, *OTHERS])


def masked_guard(folder: Path) -> tuple[Guard, bytes]:
    """A guard that counts on the other silos, and the card that it gave for a run."""
    guard = guard_at(folder, trust=MASKED)
    return guard, guard.public_key("run", CELL)


def test_a_round_that_is_asked_again_gets_the_same_bytes_also_after_a_restart(tmp_path: Path) -> None:
    guard, card = masked_guard(tmp_path)
    first = guard.answer("run", CELL, 1, ZERO, keys_with(card))
    assert (first.dtype, len(first)) == (torch.uint8, 7850 * 6)
    again, repeated = masked_guard(tmp_path)
    assert repeated == card
    assert torch.equal(again.answer("run", CELL, 1, ZERO, keys_with(card)), first)
    changed = b"".join([card, OTHERS[1], OTHERS[0]])
    refused(again, "round 1 was answered already, for another query", CELL, signed_keys=changed)
    assert not torch.equal(again.answer("run", CELL, 2, ZERO, keys_with(card)), first)


def test_asking_for_the_key_again_does_not_start_the_run_again(tmp_path: Path) -> None:
    guard, card = masked_guard(tmp_path)
    guard.answer("run", CELL, 1, ZERO, keys_with(card))
    assert guard.public_key("run", CELL) == card
    refused(guard, "asked for round 3 after round 1", CELL, t=3, signed_keys=keys_with(card))


def test_the_key_is_wiped_with_the_last_round_and_its_public_half_is_not(tmp_path: Path) -> None:
    guard, card = masked_guard(tmp_path)
    last = [guard.answer("run", CELL, t, ZERO, keys_with(card)) for t in range(1, 9)][-1]
    again, repeated = masked_guard(tmp_path)
    assert find_run(again).key is None
    assert repeated == card
    assert torch.equal(again.answer("run", CELL, 8, ZERO, keys_with(card)), last)


@pytest.mark.parametrize("keys", [b"", bytes(3 * 32), bytes(3 * 96), b"".join(OTHERS)])
def test_without_the_keys_of_all_nothing_leaves(tmp_path: Path, keys: bytes) -> None:
    guard, card = masked_guard(tmp_path)
    refused(guard, "silo 0: ", CELL, signed_keys=keys)
    assert guard.answer("run", CELL, 1, ZERO, keys_with(card)).dtype == torch.uint8


@pytest.mark.parametrize(
    ("trust", "budget", "price"),
    [
        (MASKED, 4.0, 4.0),
        ("untrusted", 7.0, 4.0 * math.sqrt(3.0)),
        ("untrusted", 4.0, r"the run costs mu = 6\.929"),
        (MASKED, 3.9, "the run costs mu = 4"),
    ],
)
def test_the_price_is_the_sums_only_where_the_policy_counts_on_the_other_silos(
    tmp_path: Path, trust: str, budget: float, price: float | str
) -> None:
    """Guarantee: μ with the permission; μ √3 of the own share alone without it; a budget below it is refused."""
    guard = guard_at(tmp_path, trust=trust, budget=budget)
    if isinstance(price, str):
        with pytest.raises(RunError, match=price):
            guard.public_key("run", CELL)
    else:
        guard.public_key("run", CELL)
    assert charged(guard) == ([] if isinstance(price, str) else [pytest.approx(price)])


def test_no_key_and_no_sum_leaves_for_a_run_without_masks(tmp_path: Path) -> None:
    """A policy that counts on silos does not trust the server."""
    guard = guard_at(tmp_path, trust=MASKED)
    with pytest.raises(RunError, match="this run has no masks"):
        guard.public_key("run", cell_json())
    refused(guard, "this silo release its sums without noise", cell_json(algorithm__trust="trusted"))


def test_the_command_line_runs_a_masked_federation(tmp_path: Path) -> None:
    scenario = tmp_path / "masked.toml"
    scenario.write_text(
        'name = "masked"\n[data]\nname = "synthetic"\n[federation]\nsilos = 3\nrounds = 6\n'
        '[algorithm]\nname = "dp-mu2-fl"\ntrust = "untrusted"\ndiameter = 0.1\n'
        '[privacy]\nrelation = "replace-one"\nrho = 4.0\n'
    )
    options = ["--set", "algorithm.trust=secure-aggregation", "--engine", "inprocess", "--quiet"]
    result = CliRunner().invoke(app, ["run", str(scenario), *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    (cell,) = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    assert (cell["trust"], round(cell["mu"], 9)) == (MASKED, 4.0)
    assert [release["owner"] for release in cell["releases"]] == ["sum of silos 0-2"]
    for command, line in (
        (["privacy", "ledger"], "sum of silos 0-2"),
        (["table"], "untrusted server, secure aggregation"),
    ):
        assert line in CliRunner().invoke(app, [*command, str(tmp_path / "out")]).output
