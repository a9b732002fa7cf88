"""A server that may send anything: queries, scenarios, frames.  What it gains is said in each test's first line.

"Real" tests talk to a guard process over its socket.  Findings of a review are named by their numbers.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from clients.ledger import LedgerError, SiloLedger
from clients.policy import read_policy
from fedpriv.errors import InputError, RunError
from fedpriv.exact.words import sum_of
from fedpriv.objectives import SoftmaxRegression
from tests.attacks.guards import (
    KEPT_STATE,
    guard_for,
    guard_process,
    random_records,
    scenario,
    write_policy,
    zeros,
)
from tests.clients.guarded import guard_of
from tests.secure_aggregation.test_masks import p_value

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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_real_a_query_whose_logits_overflow_gives_a_finite_answer_for_both_neighbours(
    tmp_path: Path, dtype: str
) -> None:
    """Gains: one pixel of one record, exactly, from whether the release is NaN (finding 1)."""
    bright, dark, labels = bright_and_dark()
    cell = scenario(run__dtype=dtype)
    for name, images in (("bright", bright), ("dark", dark)):
        with guard_process(tmp_path / name, images, labels, query=OVERFLOWING) as guard:
            assert np.isfinite(guard.answered(cell, 1, overflowing(dtype))).all()
            refused = guard.refused(cell, 1, np.zeros(7850, dtype))
            assert "round 1 was answered already, for another query" in refused


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("trust", ["untrusted", "secure-aggregation", "trusted"])
def test_such_a_query_is_answered_once_under_every_trust_and_moves_the_sum_by_its_clip(
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
        run = guard._ledger.run("run")
        assert run is not None
        assert run.state is not None
        silo = guard._open["run"]
        from clients.state import unpack

        assert silo.plan.exact is not None
        (total,) = (answer,) if trust == "trusted" else unpack(run.state, silo).sums
        (norm,) = silo.plan.exact.norms(1)
        assert sum(value**2 for value in total.tolist()) <= norm**2  # in Python's integers
        with pytest.raises(RunError, match="round 1 was answered already, for another query"):
            guard.answer("run", cell, 1, query * 0.5, keys)


def test_queries_beyond_what_the_policy_allows_are_refused_before_a_record_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: overflow of any kind; by default coordinates are at most 2^40."""
    guard = guard_for(tmp_path, *random_records())
    monkeypatch.setattr("fedpriv.running.integers.integer_sum", _never)
    for value in (2.0**40 * 1.001, -1e300):
        query = zeros()
        query[17] = value
        with pytest.raises(RunError, match=r"round 1: the query has values beyond 1\.09951e\+12"):
            guard.answer("run", scenario(), 1, query)
    assert guard._ledger.prices() == []


def test_an_evaluation_that_fails_for_one_record_is_answered_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: whether a record is there, from an error that only it causes: it counts as zero, and nobody tells."""
    images, labels = random_records()
    guard = guard_for(tmp_path, images, labels, trust="trusted")
    honest = SoftmaxRegression.per_record
    failed = []

    def fragile(self: SoftmaxRegression, points: Any, coefficients: Any, records: Any, *rest: Any) -> Any:
        if int(records.labels[0]) == labels[1]:
            failed.append(int(labels[1]))
            raise ZeroDivisionError("a record that no arithmetic can bear")
        return honest(self, points, coefficients, records, *rest)

    monkeypatch.setattr(SoftmaxRegression, "per_record", fragile)
    monkeypatch.setattr(SoftmaxRegression, "outer", None)
    answers = [guard.answer("run", scenario("trusted"), t, zeros()) for t in range(1, 9)]
    assert failed
    assert [bool(answer.any()) for answer in answers] == [bool(labels[t] != labels[1]) for t in range(8)]


def test_a_round_that_was_begun_is_answered_for_its_query_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: a second look at a record, with another query, by a crash or a full disk between the two commits."""
    images, labels = random_records()
    guard = guard_for(tmp_path, images, labels)
    guard.answer("run", scenario(), 1, zeros())

    def full(*_: object) -> None:
        raise LedgerError("the silo's ledger could not be written, so nothing is released: disk full")

    with monkeypatch.context() as patched:
        patched.setattr(SiloLedger, "record", full)
        with pytest.raises(LedgerError, match="nothing is released"):
            guard.answer("run", scenario(), 2, zeros())
    again = guard_of(tmp_path / "silo-0.toml")
    with pytest.raises(RunError, match="round 2 was asked already, for another query"):
        again.answer("run", scenario(), 2, zeros() + 1.0)
    answer = again.answer("run", scenario(), 2, zeros())
    assert torch.equal(again.answer("run", scenario(), 2, zeros()), answer)


def test_a_round_that_was_begun_and_skipped_is_never_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: records of a round that counts as missed, by coming back to it after a later one."""
    cell = scenario(deployment__missing="continue")
    guard = guard_for(tmp_path, *random_records())
    guard.answer("run", cell, 1, zeros())
    with monkeypatch.context() as patched:
        patched.setattr(SiloLedger, "record", _never)
        with pytest.raises(RunError, match="its guard failed"):
            guard.answer("run", cell, 2, zeros())
    guard.answer("run", cell, 3, zeros())
    with pytest.raises(RunError, match="asked for round 2 after round 3"):
        guard.answer("run", cell, 2, zeros())


def test_whatever_is_refused_is_refused_before_a_record_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: the words of a refusal that depend on records; here reading records at all is an error."""
    guard = guard_for(tmp_path, *random_records(), trust="secure-aggregation", silos=3)
    cell = scenario("secure-aggregation")
    card = guard.public_key("run", cell)
    monkeypatch.setattr(SoftmaxRegression, "increment", _never)
    for keys in (b"", cards(card)[:-1], bytes(3 * 96), cards(card)[96:] + card):
        with pytest.raises(RunError, match="silo 0: "):
            guard.answer("run", cell, 1, zeros(), keys)
    for t, query in ((2, zeros()), (1, zeros() + torch.nan), (1, zeros()[:-1]), (1, zeros().float())):
        with pytest.raises(RunError, match="silo 0"):
            guard.answer("run", cell, t, query, cards(card))
    assert guard._ledger.answer("run", 1) is None


# 4, 25, 6: clips and noise that floating point cannot hold, parts that the policy did not see


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_real_clips_and_noise_that_arithmetic_cannot_hold_are_refused(tmp_path: Path, dtype: str) -> None:
    """Gains: increments of 3.5 clips (finding 4); the label itself, from noise that rounds to 0 (finding 25)."""
    with guard_process(tmp_path, *random_records(), clip=1.0, budget=1e6) as guard:
        for clip in (1.6e-44, 1e-40, 1e-38, 1e-310, 9e-13):
            for mu in (1.0, 4.0, 1e5):
                algorithm = {"name": "dp-sgd", "clip": clip, "step": 0.1}
                privacy = {"relation": "replace-one", "mu": mu}
                cell = scenario(algorithm=algorithm, privacy=privacy, run__dtype=dtype)
                refused = guard.refused(cell, 1, np.zeros(7850, dtype))
                assert "would be clipped to norm" in refused or "floating point can add" in refused
    assert SiloLedger(tmp_path / "ledger-0.sqlite").prices() == []


def test_noise_far_below_the_sum_is_not_swallowed_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains: in floating point, a release whose noise lies below the last digits of the sum."""
    guard = guard_for(tmp_path, *random_records(4000), budget=2e6)
    cell = scenario(
        algorithm={"name": "dp-ftrl", "clip": 1.0, "step": 0.1},
        privacy={"relation": "replace-one", "mu": 1e6},
        federation={"silos": 3, "rounds": 2, "batch": 2000},
        run__dtype="float64",
    )
    noisy, silo = guard.answer("run", cell, 1, zeros()), guard._open["run"]
    monkeypatch.setattr("fedpriv.exact.release.drawn", lambda *_: np.int64(0))
    exact, _ = silo.answer(silo.start(), 1, zeros())
    assert float((noisy - exact.vector).std()) == pytest.approx(float(silo.plan.noise.std_of(0)), rel=0.06)
    assert float(exact.vector.norm()) > 1e3 * float(silo.plan.noise.std_of(0))


@pytest.mark.parametrize(
    ("algorithm", "federation"),
    [
        (
            {"name": "momentum-tree-aligned", "clip": 0.1, "alpha": 1.0, "step": 0.1, "gamma": 0.3,
             "difference_clip": 50.0, "residual_clip": 0.1},
            {"silos": 3, "rounds": 8, "epochs": 2},
        ),
        (
            {"name": "momentum-tree-aligned", "clip": 0.1, "alpha": 1.0, "step": 0.1, "gamma": 0.3,
             "difference_clip": 0.1, "residual_clip": 0.6},
            {"silos": 3, "rounds": 8, "epochs": 2},
        ),
        (
            {"name": "goldstein-single-pass", "anchor_clip": 0.6, "clip": 0.1, "period": 4, "radius": 0.1,
             "smoothing": 0.01, "window": 2, "step": 0.1, "oracle": "first-order", "anchor_batches": 4},
            {"silos": 3, "rounds": 8},
        ),
        (
            {"name": "dp-mu2-fl", "diameter": 0.1, "clip": 0.3, "late_clip": "balanced"},
            {"silos": 3, "rounds": 8},
        ),
    ],
    ids=["difference", "residual", "anchor over batches", "the last round's"],
)  # fmt: skip
def test_the_largest_clip_of_any_round_and_part_is_what_the_policy_bounds(
    tmp_path: Path, algorithm: dict[str, Any], federation: dict[str, Any]
) -> None:
    """Gains: increments of 50 under allow.clip = 0.5 (finding 6), or in the rounds that nobody looked at (52)."""
    guard = guard_for(tmp_path, *random_records(), clip=0.5, relation="replace-one")
    cell = scenario(algorithm=algorithm, federation=federation)
    with pytest.raises(RunError, match=r"the scenario clips at .*, allowed is 0\.5"):
        guard.answer("run", cell, 1, zeros())
    assert guard._ledger.prices() == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("momentum-tree-reduced", "SlidingDifferences: its noise cannot be added to integers"),
        ("momentum-tree-aligned", "bounds that rest on how far queries move are no bounds of integers"),
    ],
)
def test_noise_that_presumes_smooth_gradients_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    """Gains: differences of float gradients beyond L times the movement, 12 to 512 times at small steps (6)."""
    guard = guard_for(tmp_path, *random_records())
    cell = scenario(
        algorithm={"name": name, "clip": 1.0, "alpha": 0.3, "step": 1e-8, "gamma": 0.3},
        federation={"silos": 3, "rounds": 8, "epochs": 2},
    )
    with pytest.raises(RunError, match=reason):
        guard.answer("run", cell, 1, zeros())


# 27, 28: scenarios and silos that are not what they seem


def test_two_scenarios_under_one_run_do_not_agree_on_keys(tmp_path: Path) -> None:
    """Gains: other silos' shares on a coarser grid or of another size, real μ 6.9 at a claimed 4 (finding 27)."""
    from tests.secure_aggregation.test_identity import guards

    of = guards(tmp_path)
    cells = [scenario("secure-aggregation", run__dtype=dtype) for dtype in ("float64", "float32", "float32")]
    sent = b"".join(guard.public_key("run", cell) for guard, cell in zip(of, cells, strict=True))
    for guard, cell, dtype in zip(of, cells, (torch.float64, torch.float32, torch.float32), strict=True):
        with pytest.raises(RunError, match="is not signed by it for this run and scenario"):
            guard.answer("run", cell, 1, zeros(dtype), sent)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("what", ["scenario", "query"])
def test_without_signatures_silos_that_are_asked_different_things_sum_to_noise(
    tmp_path: Path, what: str, same: bool
) -> None:
    """Gains: the same, from silos that do not know each other's keys.  χ² of bytes at level 1e-6, and control."""
    of = [
        guard_for(tmp_path, *random_records(seed=n), number=n, trust="secure-aggregation", silos=3)
        for n in range(3)
    ]
    first = scenario("secure-aggregation")
    other = first if same or what == "query" else scenario("secure-aggregation", title="another")
    cells = [first, other, other]
    sent = b"".join(guard.public_key("run", cell) for guard, cell in zip(of, cells, strict=True))
    queries = [zeros(), zeros(), zeros() + (1e-3 if what == "query" and not same else 0.0)]
    replies = [
        guard.answer("run", cell, 1, query, sent).numpy().tobytes()
        for guard, cell, query in zip(of, cells, queries, strict=True)
    ]
    words = sum_of(replies, 48, (7850,)).view(np.uint8).reshape(-1, 8)[:, :6].ravel()  # the rest repeats the sign
    assert (p_value(words) < 1e-100) == same
    if not same:
        assert p_value(words) > 1e-6


def test_the_number_of_silos_that_share_the_noise_is_the_silos_own_choice(tmp_path: Path) -> None:
    """Gains: a share next to nothing, among silos that it invents: μ = 178 charged as 4 (finding 28)."""
    path = write_policy(tmp_path, *random_records(), trust="secure-aggregation")
    with pytest.raises(InputError, match=r"needs allow\.silos"):
        read_policy(path)
    guard = guard_for(tmp_path / "wise", *random_records(), trust="secure-aggregation", silos=3)
    for silos in (2, 4, 2000):
        with pytest.raises(RunError, match=f"shares the noise among {silos} silos, and by allow.silos they are 3"):
            guard.public_key("run", scenario("secure-aggregation", federation__silos=silos))


# 2: what floating-point noise says about the sum


# 31: whatever is sent, the guard answers the next one


LARGE: dict[str, dict[str, Any]] = {
    "directions": {
        "algorithm": {**KEPT_STATE["leaves"]["algorithm"], "directions": 1024},
        "federation": {"silos": 3, "rounds": 8, "epochs": 8, "batch": 40},
    },
    "batches of an anchor": {
        "algorithm": {
            **KEPT_STATE["trees that restart"]["algorithm"], "oracle": "zeroth-order", "directions": 1000,
            "anchor_batches": 30, "period": 8,
        },
        "run__dtype": "float64",
    },
    "bands": {
        "algorithm": {"name": "dp-ftrl", "mechanism": "banded", "bands": 200, "clip": 1.0, "step": 0.1},
        "federation": {"silos": 3, "rounds": 200, "epochs": 10},
        "model": {"name": "mlp", "hidden": 1000},
    },
    "parts of an epoch": {
        "algorithm": KEPT_STATE["aligned differences, clipped in parts"]["algorithm"],
        "federation": {"silos": 3, "rounds": 100, "epochs": 2},
        "model": {"name": "mlp", "hidden": 1000},
    },
}  # fmt: skip
"""What each takes: 10 GB and more in one round, 1.6 and 0.8 GB of state."""


@pytest.mark.parametrize("name", LARGE)
def test_what_a_round_takes_and_a_run_keeps_is_bounded(tmp_path: Path, name: str) -> None:
    """Gains: a guard that is killed for its memory, again and again, since the query is on file by then."""
    guard = guard_for(tmp_path, *random_records(50), budget=100.0)
    canonical = guard._admission.canonical(scenario(**LARGE[name]))
    with pytest.raises(RunError, match=r"silo 0 refuses: .* values .*, allowed are"):
        guard._admission.admit(canonical)


def test_a_bug_of_the_guard_is_one_constant_line_and_its_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Gains: records, from the text of an exception."""
    from clients.releasing import ReleasingSilo

    guard = guard_for(tmp_path, *random_records())
    monkeypatch.setattr(ReleasingSilo, "message", _never)
    with pytest.raises(RunError) as refused:
        guard.answer("run", scenario(), 1, zeros())
    assert str(refused.value) == "silo 0, round 1: its guard failed, and its own log says why"
    assert "a record was read" in caplog.text


def test_runs_are_bounded_in_number_and_an_ended_one_makes_room(tmp_path: Path) -> None:
    """Gains: a disk that is full of runs at μ = 1e-9."""
    from clients.status import end_run

    guard = guard_for(tmp_path, *random_records(), open_runs=2, runs=3)
    cell = scenario(privacy__rho=0.001)
    for run in ("a", "b"):
        guard.answer(run, cell, 1, zeros())
    with pytest.raises(RunError, match="2 runs are under way, allowed are 2"):
        guard.answer("c", cell, 1, zeros())
    end_run(tmp_path / "silo-0.toml", "a")
    guard.answer("c", cell, 1, zeros())
    end_run(tmp_path / "silo-0.toml", "b")
    with pytest.raises(RunError, match="3 runs were opened, allowed are 3"):
        guard.answer("d", cell, 1, zeros())


def cards(own: bytes) -> bytes:
    """The cards of three silos, of which two are the server's inventions."""
    from fedpriv.secure_aggregation.masks import Masker

    return b"".join([own, *(Masker(bytes([n]) * 32, n).public + bytes(64) for n in (1, 2))])


def _never(*_: object, **__: object) -> None:
    raise AssertionError("a record was read")
