"""Any floats at all as queries, asked of guards whose records differ: what comes back says no more than it may.

Gains, if this fails: a record's bit, exactly, at any budget, by whether a reply comes, is finite or is long.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedpriv.core.errors import RunError
from fedpriv.rounds.plan import plan_of
from fedpriv.rounds.task import task_of_cell
from fedpriv.scenario.load import resolve_cell
from tests.attacks.guards import guard_for, random_records, scenario
from tests.noise.integers.test_records import bits, from_bits

ROUNDS = 200
OVERFLOWING = 1.7e308  # of allow.query: an administrator who allows everything
RECORDED = ("the query has values that are not finite", "the query has values beyond")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_query_is_refused_at_both_guards_in_the_same_words_or_moves_their_sums_by_one_record(
    tmp_path: Path, dtype: str
) -> None:
    """Guarantee: every unit's integers are within their bound, and nothing but the recorded refusals comes back.

    The server is one that silos trust, so that their exact sums are seen; each round reads one record, and all
    records of the two silos differ.  The increments are those of two points, the last query and this one.
    """
    federation = {"silos": 3, "rounds": ROUNDS}
    text = scenario("trusted", federation=federation, run__dtype=dtype)
    cell = resolve_cell(json.loads(text), "test")
    plan = plan_of(cell, task_of_cell(cell).objective, released=True)
    guards = [
        guard_for(tmp_path / str(seed), *random_records(ROUNDS, seed), trust="trusted", query=OVERFLOWING)
        for seed in (1, 2)
    ]
    kind, rounds, seen = torch.float32 if dtype == "float32" else torch.float64, itertools.count(1), []
    upcoming = [next(rounds)]

    @given(words=st.lists(bits(kind), min_size=1, max_size=4), sparse=st.booleans())
    @settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    def asked(words: list[int], sparse: bool) -> None:
        few = from_bits(kind)(words)
        query = few.repeat(7850 // len(few) + 1)[:7850]
        if sparse:
            query = query.where(torch.arange(7850) % 785 < len(few), 0.0)
        t, answers = upcoming[0], []
        for guard in guards:
            try:
                answers.append(guard.answer("run", text, t, query))
            except RunError as refused:
                answers.append(str(refused))
        if isinstance(answers[0], str):
            assert answers[0] == answers[1]
            assert any(words in answers[0] for words in RECORDED), answers[0]
            return
        assert all(isinstance(answer, torch.Tensor) and answer.dtype == torch.int64 for answer in answers)
        (norm,) = plan.exact.norms(t)
        moved = [int(value) for value in (answers[0] - answers[1]).tolist()]
        assert sum(value**2 for value in moved) <= (2 * norm) ** 2
        for answer in answers:
            assert sum(int(value) ** 2 for value in answer.tolist()) <= norm**2
        seen.append(np.any(moved))
        upcoming[0] = next(rounds)

    asked()
    assert len(seen) >= 20
    assert any(seen)
