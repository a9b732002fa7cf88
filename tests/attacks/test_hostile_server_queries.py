"""A server that may send any query: what it makes of a record's arithmetic, before and after a crash."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedpriv.core.errors import RunError
from fedpriv.loss.linear import SoftmaxRegression
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo.ledger import LedgerError, SiloLedger
from fedpriv.silo.silo import unpack_state
from tests.attacks.guards import cards, guard_for, guard_process, never, random_records, scenario, zeros
from tests.noise.integers.hostile_floats import random_floats
from tests.parts import in_parts
from tests.silo.charged import charged
from tests.silo.guarded import find_run, guard_of, refused

OVERFLOWING = 1.7e308  # of allow.query: an administrator who allows everything


def bright_and_dark() -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
    """Neighbouring shards: the first record's two pixels are white, or black."""
    images, labels = random_records()
    bright, dark = images.copy(), images.copy()
    bright[0, 0, :2], dark[0, 0, :2] = 255, 0
    return bright, dark, labels


def overflowing(dtype: str) -> NDArray[Any]:
    """Finite, and its logits overflow at a record whose first two pixels are white."""
    query = np.zeros((10, 785), dtype)
    query[0, :2] = 0.6 * np.finfo(dtype).max
    query[1, :2] = -0.6 * np.finfo(dtype).max
    return query.ravel()


# 1: what a query makes of a record's arithmetic
@pytest.mark.slow
@pytest.mark.parametrize("dtype", in_parts(["float32", "float64"], ["float32"]))
def test_a_guard_process_gives_both_neighbours_a_finite_reply_to_an_overflowing_query(
    tmp_path: Path, dtype: str
) -> None:
    """Gains: one pixel of one record, exactly, from whether the release is NaN (finding 1)."""
    bright, dark, labels = bright_and_dark()
    cell = scenario(run__dtype=dtype)
    for name, images in (("bright", bright), ("dark", dark)):
        with guard_process(tmp_path / name, images, labels, query=OVERFLOWING) as guard:
            assert np.isfinite(guard.answered(cell, 1, overflowing(dtype))).all()
            reason = guard.refused(cell, 1, np.zeros(7850, dtype))
            assert "round 1 was answered already, for another query" in reason


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("trust", ["untrusted", "secure-aggregation", "trusted"])
def test_an_overflowing_query_is_answered_once_with_a_clipped_sum_in_every_trust_setting(
    tmp_path: Path, trust: str, dtype: str
) -> None:
    """Gains: with masks, a refusal for one record alone, and as many further looks as it likes (finding 1)."""
    bright, dark, labels = bright_and_dark()
    cell = scenario(trust, run__dtype=dtype)
    query = torch.from_numpy(overflowing(dtype))
    for name, images in (("bright", bright), ("dark", dark)):
        guard = guard_for(tmp_path / name, images, labels, trust=trust, silos=3, query=OVERFLOWING)
        keys = cards(guard.public_key("run", cell)) if trust == "secure-aggregation" else b""
        answer = guard.answer("run", cell, 1, query, keys)
        assert torch.isfinite(answer).all()
        packed, silo = find_run(guard).state, guard._loaded_silos["run"]
        assert packed is not None
        (total,) = (answer,) if trust == "trusted" else unpack_state(packed, silo).accumulator
        (norm,) = silo.plan.required_exact_plan.norms(1)
        assert sum(value**2 for value in total.tolist()) <= norm**2  # in Python's integers
        another = "round 1 was answered already, for another query"
        refused(guard, another, cell, query=query * 0.5, signed_keys=keys)


def test_queries_above_the_bound_of_the_policy_are_refused_before_records_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: overflow of any kind; by default coordinates are at most 2^40."""
    guard = guard_for(tmp_path, *random_records())
    monkeypatch.setattr("fedpriv.rounds.integers.sum_integer_increments", never)
    for value in (2.0**40 * 1.001, -1e300):
        query = zeros()
        query[17] = value
        refused(guard, r"round 1: the query has values beyond 1\.09951e\+12", scenario(), query=query)
    assert charged(guard) == []


def test_a_record_whose_gradient_raises_an_error_counts_as_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: whether a record is there, from an error that only it causes: it counts as zero, and nobody tells."""
    images, labels = random_records()
    guard = guard_for(tmp_path, images, labels, trust="trusted")
    honest = SoftmaxRegression.per_record
    failed = []

    def fragile(self: SoftmaxRegression, query: Any, batch: Any, *rest: Any) -> Any:
        if int(batch.records.labels[0]) == labels[1]:
            failed.append(int(labels[1]))
            raise ZeroDivisionError("a record that no arithmetic can bear")
        return honest(self, query, batch, *rest)

    monkeypatch.setattr(SoftmaxRegression, "per_record", fragile)
    monkeypatch.setattr(SoftmaxRegression, "outer", None)
    answers = [guard.answer("run", scenario("trusted"), t, zeros()) for t in range(1, 9)]
    assert failed
    assert [bool(answer.any()) for answer in answers] == [bool(labels[t] != labels[1]) for t in range(8)]


def test_an_interrupted_round_is_answered_only_for_its_stored_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: a second look at a record, with another query, by a crash or a full disk between the two commits."""
    guard = guard_for(tmp_path, *random_records())
    guard.answer("run", scenario(), 1, zeros())
    full = LedgerError("the silo's ledger could not be written, so nothing is released: disk full")
    with monkeypatch.context() as patch:
        patch.setattr(SiloLedger, "record_reply", Mock(side_effect=full))
        refused(guard, "nothing is released", scenario(), 2, error=LedgerError)
    again = guard_of(tmp_path / "silo-0.toml")
    refused(again, "round 2 was asked already, for another query", scenario(), 2, zeros() + 1.0)
    answer = again.answer("run", scenario(), 2, zeros())
    assert torch.equal(again.answer("run", scenario(), 2, zeros()), answer)


def test_an_interrupted_round_is_never_answered_after_a_later_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: records of a round that counts as missed, by coming back to it after a later one."""
    cell = scenario(deployment__missing="continue")
    guard = guard_for(tmp_path, *random_records())
    guard.answer("run", cell, 1, zeros())
    with monkeypatch.context() as patch:
        patch.setattr(SiloLedger, "record_reply", never)
        refused(guard, "its guard failed", cell, 2)
    guard.answer("run", cell, 3, zeros())
    refused(guard, "asked for round 2 after round 3", cell, 2)


def test_invalid_keys_rounds_and_queries_are_refused_before_records_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: the words of a refusal that depend on records; here reading records at all is an error."""
    guard = guard_for(tmp_path, *random_records(), trust="secure-aggregation", silos=3)
    cell = scenario("secure-aggregation")
    card = guard.public_key("run", cell)
    monkeypatch.setattr("fedpriv.rounds.integers.sum_integer_increments", never)
    for keys in (b"", cards(card)[:-1], bytes(3 * 96), cards(card)[96:] + card):
        refused(guard, "silo 0: ", cell, signed_keys=keys)
    for t, query in ((2, zeros()), (1, zeros() + torch.nan), (1, zeros()[:-1]), (1, zeros().float())):
        refused(guard, "silo 0", cell, t, query, signed_keys=cards(card))
    assert guard._ledger.find_answer("run", 1) is None


ROUNDS = 200
RECORDED = ("the query has values that are not finite", "the query has values beyond")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_refusals_of_random_queries_do_not_depend_on_the_records_and_sums_stay_clipped(
    tmp_path: Path, dtype: str
) -> None:
    """Guarantee: every unit's integers are within their bound, and nothing but the recorded refusals comes back.

    The server is one that silos trust, so that their exact sums are seen; each round reads one record, and all
    records of the two silos differ.  The increments are those of two points, the last query and this one.
    """
    federation = {"silos": 3, "rounds": ROUNDS}
    text = scenario("trusted", federation=federation, run__dtype=dtype)
    cell = resolve_cell(json.loads(text), "test")
    plan = make_plan(cell, load_task(cell).objective, for_release=True)
    guards = [
        guard_for(tmp_path / str(seed), *random_records(ROUNDS, seed), trust="trusted", query=OVERFLOWING)
        for seed in (1, 2)
    ]
    generator, t, seen = np.random.default_rng(0), 1, []
    for _ in range(100):
        few = torch.from_numpy(
            random_floats(generator, 32 if dtype == "float32" else 64, generator.integers(1, 5))
        )
        query, answers = few.repeat(7850 // len(few) + 1)[:7850], []
        if generator.integers(2):
            query = query.where(torch.arange(7850) % 785 < len(few), 0.0)
        for guard in guards:
            try:
                answers.append(guard.answer("run", text, t, query))
            except RunError as refusal:
                answers.append(str(refusal))
        if isinstance(answers[0], str):
            assert answers[0] == answers[1]
            assert any(words in answers[0] for words in RECORDED), answers[0]
            continue
        assert all(isinstance(answer, torch.Tensor) and answer.dtype == torch.int64 for answer in answers)
        (norm,) = plan.required_exact_plan.norms(t)
        moved = [int(value) for value in (answers[0] - answers[1]).tolist()]
        assert sum(value**2 for value in moved) <= (2 * norm) ** 2
        for answer in answers:
            assert sum(int(value) ** 2 for value in answer.tolist()) <= norm**2
        seen.append(np.any(moved))
        t += 1
    assert len(seen) >= 20
    assert any(seen)
