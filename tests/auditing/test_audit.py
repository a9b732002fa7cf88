"""The audit passes the code that is here, tightly, and catches six bugs planted in it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpriv.auditing.audit import Audit, audit
from fedpriv.auditing.bounds import mu_lower_bound
from fedpriv.cli import main
from fedpriv.errors import InputError
from fedpriv.mechanisms import IndependentGaussian
from fedpriv.objectives import SoftmaxRegression
from fedpriv.randomness import KeyedNormal
from fedpriv.rounds import Schedule
from fedpriv.scenario import Cell
from fedpriv.trust import Noise, Trust
from tests.conftest import small_tree

MakeCell = Callable[..., Cell]
TRUSTS = ["untrusted", "trusted", "secure-aggregation"]


def audit_small(small_cell: MakeCell, trust: str, **overrides: Any) -> Audit:
    return audit(small_cell(algorithm__trust=trust, federation__rounds=6, **overrides), trials=4000)


@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_healthy_code_stands_and_the_bound_is_tight(small_cell: MakeCell, trust: str, relation: str) -> None:
    """At least half of the claim; a false refutation has probability at most 1 %, and the seed is fixed."""
    outcome = audit_small(small_cell, trust, privacy__relation=relation)
    assert outcome.stands
    assert 0.5 <= outcome.mu <= 1.0
    assert outcome.epsilon <= outcome.claimed_epsilon


@pytest.mark.parametrize("trust", TRUSTS)
def test_half_the_noise_is_caught(small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str) -> None:
    honest = Trust.noise

    def halved(self: Trust, *arguments: Any) -> Noise:
        return Noise(tuple(s._replace(std=s.std / 2) for s in honest(self, *arguments).sources))

    monkeypatch.setattr(Trust, "noise", halved)
    assert not audit_small(small_cell, trust).stands


@pytest.mark.parametrize("trust", TRUSTS)
def test_a_missing_clip_is_caught(small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str) -> None:
    honest = SoftmaxRegression.increment

    def unclipped(
        self: SoftmaxRegression, points: Any, coefficients: Any, records: Any, weights: Any, _: Any
    ) -> Any:
        return honest(self, points, coefficients, records, weights, 1e30)

    monkeypatch.setattr(SoftmaxRegression, "increment", unclipped)
    assert not audit_small(small_cell, trust).stands


@pytest.mark.parametrize("first", [3, 2, 1])
@pytest.mark.parametrize("trust", TRUSTS)
def test_the_same_noise_twice_is_caught(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str, first: int
) -> None:
    """Round 4 repeats the noise of an earlier one; repeated noise would lower the score of a matched filter."""
    honest = KeyedNormal.vectors

    def repeating(self: KeyedNormal, size: int, owners: Any, rounds: Any, node: int = 0) -> Any:
        return honest(self, size, owners, [first if t == 4 else t for t in rounds], node)

    monkeypatch.setattr(KeyedNormal, "vectors", repeating)
    assert not audit_small(small_cell, trust).stands


def test_the_same_noise_at_two_silos_is_caught(small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrusted server sees both messages, and the difference has no noise."""
    honest = KeyedNormal.vectors

    def shared(self: KeyedNormal, size: int, owners: Any, rounds: Any, node: int = 0) -> Any:
        return honest(self, size, [0 for _ in owners], rounds, node)

    monkeypatch.setattr(KeyedNormal, "vectors", shared)
    assert not audit_small(small_cell, "untrusted").stands


def test_one_silo_alone_is_audited(small_cell: MakeCell) -> None:
    assert audit_small(small_cell, "untrusted", federation__silos=1).stands


@pytest.mark.parametrize("trust", TRUSTS)
def test_a_record_used_in_two_rounds_is_caught(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    monkeypatch.setattr(Schedule, "batches", lambda _, t: range(max(0, t - 2), max(1, t - 1)))
    assert not audit_small(small_cell, trust).stands


@pytest.mark.parametrize("trust", TRUSTS)
def test_one_round_without_noise_is_caught(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    def forgetful(_: IndependentGaussian, state: Any, t: int, fresh: Tensor) -> tuple[Tensor, Any]:
        return (torch.zeros_like(fresh) if t == 4 else fresh), state

    monkeypatch.setattr(IndependentGaussian, "noise", forgetful)
    assert not audit_small(small_cell, trust).stands


def test_trusted_noise_divided_by_silos_twice_is_caught(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Trust.noise

    def divided(self: Trust, sensitivity: float, batches: Any, weights: Any, relation: Any, mu: float) -> Noise:
        noise = honest(self, sensitivity, batches, weights, relation, mu)
        return Noise(tuple(s._replace(std=s.std / len(batches)) for s in noise.sources))

    monkeypatch.setattr(Trust, "noise", divided)
    assert not audit_small(small_cell, "trusted").stands


def test_the_bound_holds_at_its_confidence_and_is_close() -> None:
    """200 experiments on N(0, 1) against N(1, 1) at failure 0.05: at most 19 exceed 1 (false alarm 0.4 %)."""
    generator = np.random.default_rng(0)
    bounds = []
    for _ in range(200):
        present = generator.random(4000) < 0.5
        bounds.append(mu_lower_bound(generator.standard_normal(4000) + present, present, 0.05))
    assert sum(bound > 1.0 for bound in bounds) <= 19
    assert np.median(bounds) > 0.75


def test_perfect_separation_and_none_are_finite() -> None:
    present = np.arange(2000) % 2 == 0
    assert 4.0 < mu_lower_bound(present.astype(float), present, 0.01) < 10.0
    assert mu_lower_bound(np.zeros(2000), present, 0.01) == 0.0
    assert mu_lower_bound(-present.astype(float), present, 0.01) == 0.0


def test_what_cannot_be_audited_is_refused(small_cell: MakeCell) -> None:
    with pytest.raises(InputError, match="claims nothing"):
        audit(small_cell(privacy__mode="none", privacy__rho=None))
    with pytest.raises(InputError, match="trials = 10"):
        audit(small_cell(), trials=10)
    with pytest.raises(InputError, match="a mu in"):
        audit(small_cell(), claimed_mu=1e-300)
    with pytest.raises(InputError, match="seed = -1"):
        audit(small_cell(), seed=-1)


def write_scenario(folder: Path) -> Path:
    tree, path = small_tree(), folder / "small.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for section, values in tree.items():
        if isinstance(values, dict):
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path.write_text("\n".join(lines))
    return path


def test_exit_codes_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_scenario(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedpriv", "audit", str(path), "--trials", "2000", "--json"])
    with pytest.raises(SystemExit) as stands:
        main()
    assert stands.value.code == 0
    assert json.loads(capsys.readouterr().out)["stands"] is True
    monkeypatch.setattr(IndependentGaussian, "noise", lambda _, state, t, fresh: (fresh / 4, state))
    monkeypatch.setattr("sys.argv", ["fedpriv", "audit", str(path), "--trials", "2000"])
    with pytest.raises(SystemExit) as refuted:
        main()
    assert refuted.value.code == 3
    said = capsys.readouterr()
    assert "THE CLAIM IS REFUTED" in said.out
    assert "the claim mu = 1 is refuted" in said.err
