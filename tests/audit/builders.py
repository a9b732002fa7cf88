"""Cells and trials of audits, and keys that are the same in every run of a test."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.addons.audit import secret
from fedpriv.addons.audit.audit import Audit, audit
from fedpriv.addons.audit.canaries import make_canary_objective
from fedpriv.addons.audit.statistics import ClaimedCurve, CurveResult
from fedpriv.core.random import derive_key
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.scenario.schema import Cell
from tests.audit import planted
from tests.engines.builders import small_cell

TRUSTS = ["untrusted", "trusted", "secure-aggregation"]
FAILURE = 0.005
SGD: dict[str, Any] = {"name": "dp-sgd", "clip": 1.0, "step": 0.1}


@pytest.fixture(autouse=True)
def fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.fixed_keys(monkeypatch)
    drawn = iter(range(10**9))
    monkeypatch.setattr(secret, "system_key", lambda: derive_key(b"company", str(next(drawn))))


def plan_release(cell: Cell, canaries: int) -> Plan:
    """The plan of a guard's run with so many canaries."""
    return make_plan(cell, make_canary_objective(cell, canaries), for_release=True)


def audit_canaries(cell: Cell, trials: int = 2048) -> Audit:
    return audit(cell, trials=trials, families=("canaries",))


def secret_cell(
    sampling: str = "allocation", trust: str = "untrusted", relation: str = "zero-out", **federation: Any
) -> Cell:
    """Two silos and 8 rounds that are secret."""
    return small_cell(
        federation={"silos": 2, "rounds": 8, "batch": 2, "sampling": sampling, **federation},
        algorithm={**SGD, "trust": trust},
        privacy={"relation": relation, "mu": 1.0},
        run={"dtype": "float32"},
    )


def join_trials(trials: Sequence[secret.CanaryTrials]) -> secret.CanaryTrials:
    return secret.CanaryTrials(*(np.concatenate(columns) for columns in zip(*trials, strict=True)))


@torch.inference_mode()
def canaries_of(cell: Cell, runs: int = 2, mu: float = 1.0) -> CurveResult:
    """What canaries in secret rounds show."""
    small = secret.make_canary_cell(cell, mu)
    plan = plan_release(small, 1)
    trials = join_trials([secret.run_canaries(small, seed) for seed in range(runs)])
    return secret.evaluate_canaries(small, plan, trials, ClaimedCurve(secret.sampled_guarantee(plan)), FAILURE)


@torch.inference_mode()
def company_of(cell: Cell, runs: int, mu: float = 1.0) -> CurveResult:
    """What known company shows of secret rounds."""
    small = secret.make_company_cell(cell, mu)
    plan, trials = plan_release(small, 1), secret.run_company(small, runs, 1)
    return secret.evaluate_company(plan, trials, ClaimedCurve(secret.sampled_guarantee(plan)), FAILURE)


def check_refuted(result: CurveResult, test: str) -> None:
    """The claim is exceeded, most by this test."""
    assert result.excess > 0.0, result
    assert result.test == test


def check_shown(result: CurveResult, least: float = 0.0) -> None:
    """The claim is not exceeded, and more than so much of it is shown."""
    assert result.excess <= 0.0, result
    assert result.mu > least
