"""The audit passes the code that is here, tightly, and says what it cannot do."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.addons.audit import attacks
from fedpriv.addons.audit.audit import audit
from fedpriv.addons.audit.canaries import CanaryLayout, make_audit_cell, make_canary_objective, rows_by_round
from fedpriv.addons.audit.families import make_run_parts
from fedpriv.addons.audit.statistics import (
    bound_at_threshold,
    canary_weight_and_std,
    matched_filter,
    mu_lower_bound,
    separation,
)
from fedpriv.addons.audit.transcripts import public_run_size
from fedpriv.cli import main
from fedpriv.core.errors import InputError
from fedpriv.plan.plan import make_plan
from fedpriv.scenario.schema import Cell
from tests.audit import planted
from tests.audit.planted import noise_times
from tests.conftest import small_tree
from tests.parts import in_parts

MakeCell = Callable[..., Cell]
TRUSTS = ["untrusted", "trusted", "secure-aggregation"]
FAMILIES = ["integers", "driven canaries", "hostile queries"]


@pytest.fixture(autouse=True)
def _fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.fixed_keys(monkeypatch)


@pytest.mark.every(6)
@pytest.mark.sample(2)
@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize(("relation", "dtype"), [("replace-one", "float32"), ("zero-out", "float64")])
def test_a_correct_run_passes_the_audit_with_at_least_half_of_its_claim_shown(
    small_cell: MakeCell, trust: str, relation: str, dtype: str
) -> None:
    """At least half of the claim; for new keys a false refutation has probability at most 1 %."""
    keys = {"algorithm__trust": trust, "privacy__relation": relation, "run__dtype": dtype}
    outcome = audit(small_cell(federation__rounds=6, **keys), trials=4096, families=("canaries",))
    assert outcome.stands
    assert 0.5 <= outcome.mu <= 1.0
    assert outcome.epsilon <= outcome.claimed_epsilon


@pytest.mark.every(4)
@pytest.mark.parametrize("trust", TRUSTS)
def test_a_correct_run_of_several_epochs_passes_the_audit_with_half_of_its_claim_shown(
    small_cell: MakeCell, trust: str
) -> None:
    algorithm = {"name": "dp-sgd", "trust": trust, "clip": 1.0, "step": 0.5}
    target = {"privacy__rho": None, "privacy__mu": 1.0}
    cell = small_cell(algorithm=algorithm, federation__rounds=6, federation__epochs=3, **target)
    outcome = audit(cell, trials=4096, families=("canaries",))
    assert outcome.stands
    assert outcome.rounds == 6
    assert outcome.mu >= 0.5


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("mechanism", ["tree", "banded"])
@pytest.mark.parametrize("trust", TRUSTS)
def test_tree_and_banded_noise_pass_the_audit(small_cell: MakeCell, trust: str, mechanism: str) -> None:
    cell = small_cell(algorithm__trust=trust, algorithm__mechanism=mechanism, federation__rounds=6)
    outcome = audit(cell, trials=4096, families=("canaries",))
    assert outcome.stands
    assert outcome.mu >= 0.3


@pytest.mark.parametrize(
    ("trust", "family", "dtype"),
    in_parts(
        itertools.product(TRUSTS, FAMILIES, ["float32", "float64"]),
        long=[
            *((trust, "integers", "float64") for trust in TRUSTS),
            ("trusted", "integers", "float32"),
            ("untrusted", "hostile queries", "float64"),
            ("secure-aggregation", "hostile queries", "float32"),
        ],
    ),
)
def test_attacks_on_integers_and_by_hostile_queries_do_not_refute_correct_code(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str, family: str, dtype: str
) -> None:
    """For new keys a false refutation has probability at most 0.2 %; all values of a round are long."""
    if dtype == "float32" and trust != "trusted":
        monkeypatch.setattr(attacks, "_FEATURE_COUNT", 2**13 - 1)
    outcome = audit(small_cell(algorithm__trust=trust, run__dtype=dtype), trials=2048, families=(family,))
    assert outcome.stands, outcome


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
def test_canaries_reach_the_growing_clip_norms_in_an_audit(small_cell: MakeCell, trust: str) -> None:
    """Before: the clip followed the canaries' own constants, 6e7 for gradients of 1e4, and the audit saw μ = 0."""
    cell = small_cell(algorithm__trust=trust, algorithm__clip="growing", federation__rounds=6)
    outcome = audit(cell, trials=4096, families=("canaries",))
    assert outcome.stands
    assert outcome.mu >= 0.3


def test_a_federation_of_one_silo_passes_the_audit(small_cell: MakeCell) -> None:
    cell = small_cell(federation__silos=1, federation__rounds=6)
    assert audit(cell, trials=2048, families=("canaries",)).stands


def test_the_audit_progress_increases_to_at_most_one(small_cell: MakeCell) -> None:
    heard: list[float] = []
    cell = small_cell(federation__rounds=2, algorithm__trust="trusted")
    audit(cell, trials=2048, progress=heard.append, families=("canaries", "hostile queries"))
    assert heard == sorted(heard)
    assert heard[-1] <= 1.0
    assert len(heard) >= 2


@pytest.mark.every(3)
@pytest.mark.parametrize(("rounds", "per_run"), [(1, 256), (2, 512), (6, 1024)])
def test_the_trials_of_an_audit_count_only_canaries_that_were_planted(
    small_cell: MakeCell, rounds: int, per_run: int
) -> None:
    """A batch has room for 256 canaries: a run of one round was said to have 1,024."""
    outcome = audit(small_cell(federation__rounds=rounds), trials=2048, families=("canaries",))
    assert outcome.trials == 2 * per_run


def test_an_audit_restores_the_number_of_torch_threads(small_cell: MakeCell) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    audit(small_cell(federation__rounds=2), trials=2048, families=("canaries",))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_a_canary_weighs_less_in_a_round_of_several_batches(small_cell: MakeCell) -> None:
    """An anchor of 3 batches of 3 is a mean of 9 records, and the round after it one of 3."""
    algorithm = {
        "name": "goldstein-single-pass", "trust": "untrusted", "anchor_batches": 3, "smoothing": 0.1,
        "radius": 0.02, "period": 3, "anchor_clip": 4.0, "clip": 2.0, "step": 0.01, "window": 2, "output": "last",
    }  # fmt: skip
    small = make_audit_cell(small_cell(algorithm=algorithm, privacy__rho=None, privacy__mu=1.0), 1.0, 6, 2, 3)
    assert [len(rows) for rows in rows_by_round(small)] == [9, 3, 3, 9, 3, 3]
    plan = make_plan(small, make_canary_objective(small, 4), for_release=True)
    assert [canary_weight_and_std(plan, t)[0] for t in (1, 2)] == pytest.approx([4.0 / 9.0, 2.0 / 3.0])


def test_the_audit_signal_of_a_canary_ends_where_the_sums_restart(small_cell: MakeCell) -> None:
    """Sums restart in round 4; the worlds lay 1.73 noises apart at a claim of 1, and the power was overstated.

    The claim of 1 is that of a difference, of weight 2/3, which no canary shows.  An anchor weighs 4/9, in two
    nodes.
    """
    algorithm = {
        "name": "goldstein-single-pass", "trust": "untrusted", "anchor_batches": 3, "smoothing": 0.1,
        "radius": 0.02, "period": 3, "anchor_clip": 4.0, "clip": 2.0, "step": 0.01, "window": 2, "output": "last",
    }  # fmt: skip
    small = make_audit_cell(small_cell(algorithm=algorithm, privacy__rho=None, privacy__mu=1.0), 1.0, 6, 2, 3)
    plan = make_plan(small, make_canary_objective(small, 4), for_release=True)
    assert matched_filter(plan, 1) == pytest.approx([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    assert separation(plan) == pytest.approx(4.0 / 9.0 / (2.0 / 3.0) * 2.0**0.5, rel=1e-6)


@pytest.mark.parametrize(("rounds", "size"), [(20, (12, 1)), (50, (12, 3)), (60, (12, 3))])
def test_passes_by_the_number_of_samples_are_audited_as_passes(
    small_cell: MakeCell, rounds: int, size: tuple[int, int]
) -> None:
    """600 samples in batches of 10 of 3 silos, 20 rounds a pass: three passes were audited as a single one."""
    cell = small_cell(
        algorithm={"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.5},
        federation={"samples": 600, "silos": 3, "batch": 10, "rounds": rounds},
        privacy={"relation": "replace-one", "mu": 1.0},
    )
    assert public_run_size(cell, 12) == size
    assert make_run_parts(cell, 1.0, 1, 0)["rounds"].small_cell.schedule.rounds_per_epoch == 12 // size[1]


def test_canaries_are_placed_in_the_rows_of_their_round(small_cell: MakeCell) -> None:
    """Batch p is rows p·B to (p+1)·B of the order, and is read in round p + 1: written out, not asked."""
    small = make_audit_cell(small_cell(), 1.0, 4, 2, 3)
    passes = rows_by_round(small)
    assert passes == [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]
    layout = CanaryLayout.from_rows(passes, 2, 9, 3)
    assert layout.rounds.tolist() == [2, 2, 2, 1, 3, 4, 1, 3, 4]
    assert layout.row_indices.tolist() == [3, 4, 5, 0, 6, 9, 1, 7, 10]
    present = np.array([True, False] * 4 + [True])
    there = layout.make_shard(present, "zero-out").images
    assert (there != 0.0).sum() == 5
    assert [int(np.flatnonzero(there[:, canary])[0]) for canary in range(0, 9, 2)] == [3, 5, 6, 1, 10]
    replaced = layout.make_shard(present, "replace-one")
    assert (replaced.images != 0.0).sum() == 9
    assert replaced.labels[layout.row_indices].tolist() == (~present).astype(int).tolist()


def test_the_audit_lower_bound_on_mu_holds_at_its_confidence_and_is_tight() -> None:
    """200 experiments on N(0, 1) against N(1, 1) at failure 0.05: at most 19 exceed 1 (false alarm 0.4 %)."""
    generator = np.random.default_rng(0)
    bounds = []
    for _ in range(200):
        present = generator.random(4000) < 0.5
        bounds.append(mu_lower_bound(generator.standard_normal(4000) + present, present, 0.05))
    assert sum(bound > 1.0 for bound in bounds) <= 19
    assert np.median(bounds) > 0.87


def test_the_fixed_threshold_bound_on_mu_holds_for_twenty_trials() -> None:
    """500 experiments of 20 trials on N(0, 1) against N(1, 1) at failure 0.05: at most 40 exceed 1 (0.2 %)."""
    generator = np.random.default_rng(1)
    above = 0
    for _ in range(500):
        present = generator.random(20) < 0.5
        above += bound_at_threshold(0.5, generator.standard_normal(20) + present, present, 0.05) > 1.0
    assert above <= 40


def test_audit_bounds_are_finite_under_perfect_separation_and_zero_under_none() -> None:
    present = np.arange(2000) % 2 == 0
    assert 4.0 < mu_lower_bound(present.astype(float), present, 0.01) < 10.0
    assert mu_lower_bound(np.zeros(2000), present, 0.01) == 0.0
    assert mu_lower_bound(-present.astype(float), present, 0.01) == 0.0
    assert bound_at_threshold(0.5, present.astype(float), present, 0.01) > 4.0


def test_an_audit_refuses_noise_free_runs_and_invalid_options(small_cell: MakeCell) -> None:
    with pytest.raises(InputError, match="claims nothing"):
        audit(small_cell(privacy__mode="none", privacy__rho=None))
    with pytest.raises(InputError, match="trials = 10"):
        audit(small_cell(), trials=10)
    with pytest.raises(InputError, match="a mu in"):
        audit(small_cell(), claimed_mu=1e-300)
    with pytest.raises(InputError, match="seed = -1"):
        audit(small_cell(), seed=-1)


def write_scenario(folder: Path, **overrides: Any) -> Path:
    tree, path = small_tree(**overrides), folder / "small.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for section, values in tree.items():
        if isinstance(values, dict):
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_the_audit_command_exits_with_0_if_the_claim_stands_and_with_3_if_refuted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_scenario(tmp_path, algorithm__trust="trusted", federation__rounds=3)
    monkeypatch.setattr(attacks, "_FEATURE_COUNT", 2**13 - 1)
    monkeypatch.setattr("sys.argv", ["fedpriv", "audit", str(path), "--trials", "2048", "--json"])
    with pytest.raises(SystemExit) as stands:
        main()
    said = capsys.readouterr()
    assert stands.value.code == 0
    found = json.loads(said.out)
    assert found["stands"] is True
    assert set(found["families"]) == {"canaries", "driven canaries", "rollback", "integers", "hostile queries"}
    assert 0.6 < found["sees"]["canaries"] < 0.65
    assert said.err.startswith("fedpriv: auditing")
    noise_times(0.25)(monkeypatch)
    monkeypatch.setattr("sys.argv", ["fedpriv", "audit", str(path), "--trials", "2048"])
    with pytest.raises(SystemExit) as refuted:
        main()
    assert refuted.value.code == 3
    said = capsys.readouterr()
    assert "THE CLAIM IS REFUTED" in said.out
    assert "with 1,536 trials this audit would see σ × 0.63 (canaries)" in said.out  # two runs of 256 a round
    assert "the claim μ = 1 is refuted" in said.err
