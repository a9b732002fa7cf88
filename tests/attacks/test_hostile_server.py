"""A server that may send anything: queries, scenarios, frames.  What it gains is said in each test's first line.

"Real" tests talk to a guard process over its socket.  Findings of a review are named by their numbers.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.core.errors import InputError, RunError
from fedpriv.noise.integers.fixed_point import unpack_sum
from fedpriv.noise.integers.gaussian import KeyedDiscreteGaussian
from fedpriv.silo.guards import end_run
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import read_policy
from fedpriv.silo.silo import Silo
from tests.attacks.guards import (
    KEPT_STATE,
    guard_for,
    guard_process,
    never,
    random_records,
    scenario,
    write_policy,
    zeros,
)  # fmt: skip
from tests.parts import in_parts
from tests.silo.charged import charged
from tests.silo.guarded import refused
from tests.silo.test_masks import guards, p_value

# 4, 25, 6: clips and noise that floating point cannot hold, parts that the policy did not see


@pytest.mark.slow
@pytest.mark.parametrize("dtype", in_parts(["float32", "float64"], ["float64"]))
def test_a_guard_process_refuses_clips_and_noise_below_floating_point_precision(
    tmp_path: Path, dtype: str
) -> None:
    """Gains: increments of 3.5 clips (finding 4); the label itself, from noise that rounds to 0 (finding 25)."""
    with guard_process(tmp_path, *random_records(), clip=1.0, budget=1e6) as guard:
        for clip in (1.6e-44, 1e-40, 1e-38, 1e-310, 9e-13):
            for mu in (1.0, 4.0, 1e5):
                algorithm = {"name": "dp-sgd", "clip": clip, "step": 0.1}
                privacy = {"relation": "replace-one", "mu": mu}
                cell = scenario(algorithm=algorithm, privacy=privacy, run__dtype=dtype)
                reason = guard.refused(cell, 1, np.zeros(7850, dtype))
                assert "would be clipped to norm" in reason or "floating point can add" in reason
    assert charged(SiloLedger(tmp_path / "ledger-0.sqlite")) == []


def test_noise_much_smaller_than_the_sum_is_added_without_rounding_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: in floating point, a release whose noise lies below the last digits of the sum."""
    guard = guard_for(tmp_path, *random_records(4000), budget=2e6)
    cell = scenario(
        algorithm={"name": "dp-ftrl", "clip": 1.0, "step": 0.1},
        privacy={"relation": "replace-one", "mu": 1e6},
        federation={"silos": 3, "rounds": 2, "batch": 2000},
        run__dtype="float64",
    )
    noisy, silo = guard.answer("run", cell, 1, zeros()), guard._loaded_silos["run"]
    monkeypatch.setattr(KeyedDiscreteGaussian, "vector", lambda _, size, *of_noise: np.zeros(size, np.int64))
    exact, _ = silo.answer(silo.initial_state(), 1, zeros())
    assert float((noisy - exact.vector).std()) == pytest.approx(float(silo.plan.noise.std_of(0)), rel=0.06)
    assert float(exact.vector.norm()) > 1e3 * float(silo.plan.noise.std_of(0))


ALIGNED = {"name": "momentum-tree-aligned", "clip": 0.1, "alpha": 1.0, "step": 0.1, "gamma": 0.3}
ANCHORED = KEPT_STATE["trees that restart"]["algorithm"]


@pytest.mark.parametrize(
    ("algorithm", "federation"),
    [
        ({**ALIGNED, "difference_clip": 50.0, "residual_clip": 0.1}, {"epochs": 2}),
        ({**ALIGNED, "difference_clip": 0.1, "residual_clip": 0.6}, {"epochs": 2}),
        ({**ANCHORED, "anchor_clip": 0.6, "clip": 0.1, "anchor_batches": 4}, {}),
        ({"name": "dp-mu2-fl", "diameter": 0.1, "clip": 0.3, "late_clip": "balanced"}, {}),
    ],
    ids=["difference", "residual", "anchor over batches", "the last round's"],
)
def test_the_clip_bound_of_the_policy_applies_to_every_round_and_part(
    tmp_path: Path, algorithm: dict[str, Any], federation: dict[str, Any]
) -> None:
    """Gains: increments of 50 under allow.clip = 0.5 (finding 6), or in the rounds that nobody looked at (52)."""
    guard = guard_for(tmp_path, *random_records(), clip=0.5, relation="replace-one")
    cell = scenario(algorithm=algorithm, federation={"silos": 3, "rounds": 8, **federation})
    refused(guard, r"the scenario clips at .*, allowed is 0\.5", cell)
    assert charged(guard) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("momentum-tree-reduced", "SlidingDifferences: its noise cannot be added to integers"),
        ("momentum-tree-aligned", "bounds that rest on how far queries move are no bounds of integers"),
    ],
)
def test_a_mechanism_whose_sensitivity_assumes_smooth_gradients_is_refused(
    tmp_path: Path, name: str, reason: str
) -> None:
    """Gains: differences of float gradients beyond L times the movement, 12 to 512 times at small steps (6)."""
    guard = guard_for(tmp_path, *random_records())
    cell = scenario(
        algorithm={"name": name, "clip": 1.0, "alpha": 0.3, "step": 1e-8, "gamma": 0.3},
        federation={"silos": 3, "rounds": 8, "epochs": 2},
    )
    refused(guard, reason, cell)


def test_a_mechanism_without_an_exact_integer_form_is_refused(tmp_path: Path) -> None:
    """Gains: roundings of neighbours that nobody bounded, so a μ above the one on file."""
    guard = guard_for(tmp_path, *random_records())
    cell = scenario(algorithm={"name": "dp-ftrl", "mechanism": "bisr", "bands": 3, "clip": 1.0, "step": 0.1})
    refused(guard, r'cannot be made of integers: mechanism = "bisr": .* use "blt" or "banded"', cell)
    assert charged(guard) == []


# 27, 28: scenarios and silos that are not what they seem


def test_silos_given_different_scenarios_reject_the_mask_keys_of_each_other(tmp_path: Path) -> None:
    """Gains: other silos' shares on a coarser grid or of another size, real μ 6.9 at a claimed 4 (finding 27)."""
    silos, dtypes = guards(tmp_path), (torch.float64, torch.float32, torch.float32)
    cells = [scenario("secure-aggregation", run__dtype=dtype) for dtype in ("float64", "float32", "float32")]
    sent = b"".join(guard.public_key("run", cell) for guard, cell in zip(silos, cells, strict=True))
    for guard, cell, dtype in zip(silos, cells, dtypes, strict=True):
        refused(guard, "is not signed by it for this run and scenario", cell, query=zeros(dtype), signed_keys=sent)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("what", ["scenario", "query"])
def test_masks_do_not_cancel_between_silos_with_different_scenarios_or_queries(
    tmp_path: Path, what: str, same: bool
) -> None:
    """Gains: the same, from silos that do not know each other's keys.  χ² of bytes at level 1e-6, and control."""
    allow: dict[str, Any] = {"trust": "secure-aggregation", "silos": 3}
    silos = [guard_for(tmp_path, *random_records(seed=n), number=n, **allow) for n in range(3)]
    first = scenario("secure-aggregation")
    other = first if same or what == "query" else scenario("secure-aggregation", title="another")
    cells = [first, other, other]
    sent = b"".join(guard.public_key("run", cell) for guard, cell in zip(silos, cells, strict=True))
    queries = [zeros(), zeros(), zeros() + (1e-3 if what == "query" and not same else 0.0)]
    replies = [
        guard.answer("run", cell, 1, query, sent).numpy().tobytes()
        for guard, cell, query in zip(silos, cells, queries, strict=True)
    ]
    words = unpack_sum(replies, 48, (7850,)).view(np.uint8).reshape(-1, 8)[:, :6].ravel()  # the rest repeats signs
    assert (p_value(words) < 1e-100) == same
    if not same:
        assert p_value(words) > 1e-6


def test_a_masked_run_is_refused_unless_its_silo_count_matches_the_policy(tmp_path: Path) -> None:
    """Gains: a share next to nothing, among silos that it invents: μ = 178 charged as 4 (finding 28)."""
    path = write_policy(tmp_path, *random_records(), trust="secure-aggregation")
    with pytest.raises(InputError, match=r"needs allow\.silos"):
        read_policy(path)
    guard = guard_for(tmp_path / "wise", *random_records(), trust="secure-aggregation", silos=3)
    for silos in (2, 4, 2000):
        with pytest.raises(RunError, match=f"shares the noise among {silos} silos, and by allow.silos they are 3"):
            guard.public_key("run", scenario("secure-aggregation", federation__silos=silos))


# 31: whatever is sent, the guard answers the next one


MANY: dict[str, dict[str, Any]] = {
    "directions": {
        "algorithm": {**KEPT_STATE["leaves"]["algorithm"], "directions": 1024},
        "federation": {"silos": 3, "rounds": 8, "epochs": 8, "batch": 40},
    },
    "batches of an anchor": {
        "algorithm": {
            **KEPT_STATE["trees that restart"]["algorithm"], "oracle": "first-order", "directions": 1000,
            "anchor_batches": 30, "period": 8,
        },
        "run__dtype": "float64",
    },
}  # fmt: skip
"""Directions that would take 0.7 GB for one record if all of them were drawn at once."""

LARGE: dict[str, dict[str, Any]] = {
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
"""What each takes: 1.6 and 0.8 GB of state, times its copies."""


@pytest.mark.parametrize("name", MANY)
def test_a_run_with_thousands_of_random_directions_is_admitted_within_the_memory_limit(
    tmp_path: Path, name: str
) -> None:
    """Gains: a guard that is killed for its memory; `tests/silo/test_memory.py` measures one that answers."""
    guard = guard_for(tmp_path, *random_records(50), budget=100.0)
    more = {**MANY[name], "algorithm": {**MANY[name]["algorithm"], "directions": 4096}}
    for asked in (MANY[name], more):
        guard._admission.admit(guard._admission.canonicalize(scenario(**asked)))


@pytest.mark.parametrize("name", LARGE)
def test_a_run_with_too_large_a_state_is_refused_by_the_memory_limit(tmp_path: Path, name: str) -> None:
    """Gains: a guard that is killed for its memory, again and again, since the query is on file by then."""
    guard = guard_for(tmp_path, *random_records(50), budget=100.0)
    canonical = guard._admission.canonicalize(scenario(**LARGE[name]))
    with pytest.raises(RunError, match=r"the run takes \d+ MiB of memory, allow\.memory is 512 MiB: "):
        guard._admission.admit(canonical)


def test_an_internal_error_of_a_guard_is_reported_as_one_constant_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Gains: records, from the text of an exception."""
    monkeypatch.setattr(Silo, "make_message", never)
    line = "silo 0, round 1: its guard failed, and its own log says why"
    refused(guard_for(tmp_path, *random_records()), f"^{line}$", scenario())
    assert "a record was read" in caplog.text


def test_the_numbers_of_open_and_of_all_runs_are_bounded_by_the_policy(tmp_path: Path) -> None:
    """Gains: a disk that is full of runs at μ = 1e-9."""
    guard = guard_for(tmp_path, *random_records(), open_runs=2, runs=3)
    cell = scenario(privacy__rho=0.001)
    for run in ("a", "b"):
        guard.answer(run, cell, 1, zeros())
    refused(guard, "2 runs are under way, allowed are 2", cell, run="c")
    end_run(tmp_path / "silo-0.toml", "a")
    guard.answer("c", cell, 1, zeros())
    end_run(tmp_path / "silo-0.toml", "b")
    refused(guard, "3 runs were opened, allowed are 3", cell, run="d")
