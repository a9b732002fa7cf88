"""Every bug that is planted is refuted, by the family of tests that is made for it.

Keys are fixed, so that each of these gives the same answer every time.  For a new set of keys a bug of noise would
be missed with a probability below 1 in 1,000 (5.2 standard errors to be seen, 8 there are), the others never.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.addons.audit import attacks
from fedpriv.addons.audit import families as auditing
from fedpriv.addons.audit.audit import Audit, audit
from fedpriv.addons.audit.families import AuditRefutedError
from fedpriv.scenario.schema import Cell
from tests.audit import planted
from tests.audit.planted import Plant
from tests.parts import in_parts, in_turn

MakeCell = Callable[..., Cell]
TRUSTS = ["untrusted", "trusted", "secure-aggregation"]


@pytest.fixture(autouse=True)
def _fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.fixed_keys(monkeypatch)


def refutes(
    small_cell: MakeCell,
    trust: str,
    trials: int = 2048,
    family: str = "canaries",
    dtype: str = "float32",
    **overrides: Any,
) -> Audit:
    cell = small_cell(algorithm__trust=trust, federation__rounds=6, run__dtype=dtype, **overrides)
    outcome = audit(cell, trials=trials, families=(family,))
    assert not outcome.stands, outcome
    return outcome


@pytest.mark.parametrize(
    ("share", "trials", "trust"),
    in_parts(
        [(share, n, trust) for share, n in ((0.5, 2048), (0.7, 8192), (0.8, 16384)) for trust in TRUSTS],
        [(0.5, 2048, "untrusted")],
        long=[(0.7, 8192, "untrusted"), (0.7, 8192, "trusted"), *((0.8, 16384, trust) for trust in TRUSTS[1:])],
    ),
)
def test_less_noise_than_claimed_is_refuted_by_the_whole_transcript(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str, share: float, trials: int
) -> None:
    planted.noise_times(share)(monkeypatch)
    assert "whole transcript" in refutes(small_cell, trust, trials).statistic


@pytest.mark.parametrize("trust", in_parts(TRUSTS, ["trusted"]))
def test_training_without_clipping_is_refuted_by_the_audit(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    planted.no_clip(monkeypatch)
    refutes(small_cell, trust)


@pytest.mark.parametrize("trust", in_parts(TRUSTS, ["secure-aggregation"]))
def test_a_record_that_takes_part_in_two_rounds_is_refuted(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    planted.read_twice(monkeypatch)
    with pytest.raises(AuditRefutedError, match="round 2 reads records 0 to 255, not 256 to 511"):
        audit(small_cell(algorithm__trust=trust, federation__rounds=6), trials=2048)
    monkeypatch.setattr(auditing, "why_misread", lambda *_: None)  # and by what it leaks
    refutes(small_cell, trust)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("trust", "first"),
    in_parts(itertools.product(TRUSTS, [3, 1]), [("untrusted", 1), ("secure-aggregation", 3)]),
)
def test_the_same_noise_in_two_rounds_is_refuted(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str, first: int
) -> None:
    planted.same_noise_twice(first)(monkeypatch)
    assert f"release 4 minus {first}" in refutes(small_cell, trust).statistic


@pytest.mark.parametrize("trust", in_parts(TRUSTS, ["trusted"]))
def test_a_round_without_noise_is_refuted(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    planted.one_round_without(monkeypatch)
    refutes(small_cell, trust)


@pytest.mark.slow
def test_the_same_noise_at_two_silos_is_refuted(small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrusted server sees both messages, and the difference has no noise."""
    planted.same_noise_at_two_silos(monkeypatch)
    refutes(small_cell, "untrusted")


@pytest.mark.slow
def test_trusted_noise_divided_twice_by_the_number_of_silos_is_refuted(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.noise_times(1.0 / 3.0)(monkeypatch)
    refutes(small_cell, "trusted")


@pytest.mark.slow
def test_two_runs_with_the_same_noise_key_are_refuted(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.one_key_for_all_runs(monkeypatch)
    assert "minus that of another run" in refutes(small_cell, "untrusted").statistic


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["untrusted", "secure-aggregation"])
def test_refusals_that_depend_on_records_are_refuted(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    planted.refusals_that_tell(monkeypatch)
    assert "no finite reply" in refutes(small_cell, trust, family="hostile queries").statistic


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["untrusted", "secure-aggregation"])
def test_a_clip_that_hostile_queries_bypass_is_refuted_by_driven_canaries(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    """At ordinary queries nothing is seen of it; a trusted server itself checks what silos send."""
    planted.no_check_in_integers(monkeypatch)
    cell = small_cell(algorithm__trust=trust, federation__rounds=6)
    assert audit(cell, trials=2048, families=("canaries",)).stands
    assert "under hostile queries" in refutes(small_cell, trust, family="driven canaries").statistic


TRIED = 6
"""Attacks on a bug that is there: each of them is right."""


def right(small_cell: MakeCell, trust: str, dtype: str, test: str) -> int:
    """How many of `TRIED` attacks on the bits of integers a test is right in."""
    cell = attacks.integers_cell(small_cell(algorithm__trust=trust, run__dtype=dtype), 1.0)
    with torch.inference_mode():
        tried = [attacks.attack_integers(cell, seed) for seed in range(TRIED)]
    return sum((scores[attacks.INTEGER_TESTS.index(test)] > 0.0) == present for present, scores in tried)


@pytest.fixture
def few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of a round by the thousand, of which every attack but that on radii of 31 bits needs no more."""
    monkeypatch.setattr(attacks, "_FEATURE_COUNT", 2**12 - 1)


@pytest.mark.slow
@pytest.mark.usefixtures("few_features")
@pytest.mark.parametrize(("trust", "dtype"), in_turn(TRUSTS, ["float32", "float64"]))
def test_a_noise_key_from_the_public_seed_lets_the_attack_guess_every_trial(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str, dtype: str
) -> None:
    planted.a_key_from_the_seed(monkeypatch)
    assert right(small_cell, trust, dtype, "noise of the public seed") == TRIED


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["trusted", "untrusted"])
def test_noise_of_31_bit_radii_lets_the_attack_guess_almost_every_trial(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    """Radii of 31 bits; the attack is right in 98 of 100, so 5 of 6 are missed with a probability below 1 %."""
    planted.float32_noise(monkeypatch)
    assert right(small_cell, trust, "float64", "the lattice of 31-bit radii") >= TRIED - 1


ON_INTEGERS = [("secure-aggregation", "float32"), ("trusted", "float64"), ("untrusted", "float64")]


@pytest.mark.slow
@pytest.mark.usefixtures("few_features")
@pytest.mark.parametrize(
    ("of", "plant"), in_turn(ON_INTEGERS, [planted.coarse_noise, planted.release_that_reads_the_sum])
)
def test_low_bits_without_noise_let_the_attack_guess_every_trial(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, of: tuple[str, str], plant: Plant
) -> None:
    plant(monkeypatch)
    assert right(small_cell, *of, "residues modulo 2^16") == TRIED


SCHEDULED = {
    "name": "dp-ftrl", "clip": 1.0, "step": 0.1,
    "mechanism": "scheduled", "noise_sizes": [2.0, 1.5, 0.7, 3.0, 1.0, 1.0, 1.0, 1.0],
}  # fmt: skip
"""Noise of a size of its own in each round, and more rounds than an attack has."""


@pytest.mark.every(3)
@pytest.mark.parametrize("trust", TRUSTS)
def test_the_attack_on_integers_knows_the_noise_size_of_each_round(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    """Integers were divided by the round's size of noise, and eight sizes did not fit the four rounds."""
    planted.coarse_noise(monkeypatch)
    monkeypatch.setattr(attacks, "_FEATURE_COUNT", 2**10 - 1)
    changes = {"federation__rounds": 8, "run__dtype": "float64", "privacy": {"relation": "zero-out", "mu": 1.0}}
    cell = small_cell(algorithm=SCHEDULED | {"trust": trust}, **changes)
    small = attacks.integers_cell(cell, 1.0)
    assert small.algorithm.settings.noise_sizes == (2.0, 1.5, 0.7, 3.0)
    with torch.inference_mode():
        tried = [attacks.attack_integers(small, seed) for seed in range(4)]
    evidence = [scores[attacks.INTEGER_TESTS.index("residues modulo 2^16")] for _, scores in tried]
    assert [value > 0.0 for value in evidence] == [present for present, _ in tried]
    assert min(map(abs, evidence)) > 4 * 2**10  # about 4 x 2^11 residues of zero, against uniform ones


def test_the_attack_on_integers_does_not_read_the_bias(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An absent record of zeros moved the bias, and the attack read it: its worlds were no neighbours."""
    monkeypatch.setattr(attacks, "_FEATURE_COUNT", 2**10 - 1)
    monkeypatch.setattr(attacks, "RADIUS_BITS", (8,))  # few bits, so that every radius counts
    honest, scored = attacks._score_world, []

    def also_without_bias(cell: Cell, plan: Any, exact: Any, noisy: Any, sums: Any) -> Any:
        scored.append(
            [
                honest(cell, plan, exact, noisy + shift, sums)
                for shift in (0.0, 1e3 * (np.arange(2**11) % 2**10 == 2**10 - 1))
            ]
        )
        return scored[-1][0]

    monkeypatch.setattr(attacks, "_score_world", also_without_bias)
    with torch.inference_mode():
        attacks.attack_integers(attacks.integers_cell(small_cell(algorithm__trust="untrusted"), 1.0), 0)
    for scores, shifted_scores in scored:
        np.testing.assert_array_equal(scores, shifted_scores)


def test_a_perfect_integer_attack_refutes_a_claim_of_mu_one(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From attacks to a bound: 32 of 32 right are more than a claim of 1 allows."""
    present = [number % 2 == 0 for number in range(attacks.TRIALS)]
    scores = [
        np.where(np.arange(len(attacks.INTEGER_TESTS)) == 5, 1.0 if there else -1.0, 0.0) for there in present
    ]
    bound, test = attacks.bound_integers_attack(list(zip(present, scores, strict=True)), 0.002)
    assert bound > 1.0
    assert test == attacks.INTEGER_TESTS[5]
