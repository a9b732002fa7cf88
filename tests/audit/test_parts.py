"""A run is audited as a whole: rounds, first step and evaluations, each against its own claim, and all together.

Keys are fixed, so that each of these gives the same answer every time.  For new keys healthy code is refuted with
probability at most 0.5 % a test; a planted loss of noise is missed with a probability below 1 in 1,000.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpriv.addons.audit import families, secret
from fedpriv.addons.audit.audit import Audit, audit
from fedpriv.addons.audit.families import detectable_noise_share, make_run_parts
from fedpriv.addons.audit.statistics import bound_at_threshold, separation
from fedpriv.addons.audit.transcripts import Trials
from fedpriv.core.random import derive_key
from fedpriv.noise.integers.gaussian import KeyedDiscreteGaussian
from fedpriv.rounds import integers
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.scenario.sections import RunBudget
from fedpriv.show.statement import describe_power
from tests.audit import planted
from tests.audit.test_secret import cell_of as secret_cell
from tests.plan.test_first_step import GIVEN, cell_of

MakeCell = Callable[..., Cell]
TRUSTS = ["untrusted", "trusted", "secure-aggregation"]
EVALUATED = {"records": 20, "mu": 0.5}


@pytest.fixture(autouse=True)
def _fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.fixed_keys(monkeypatch)
    drawn = iter(range(10**9))
    monkeypatch.setattr(secret, "system_key", lambda: derive_key(b"company", str(next(drawn))))


def scaled_cell(folder: Path, share: float = 0.9, trust: str = "untrusted", **scale: Any) -> Cell:
    """A table of three columns and more whose rounds have a tenth of the budget, or what `share` leaves."""
    return cell_of(folder, {"share": share, **scale}, algorithm={"trust": trust}, run={"dtype": "float32"})


def evaluated_cell(small_cell: MakeCell) -> Cell:
    keys = {"privacy__rho": None, "privacy__mu": 2.0, "evaluation": EVALUATED}
    algorithm = {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.5}
    return small_cell(algorithm=algorithm, federation__rounds=4, run__dtype="float32", **keys)


def canaries(cell: Cell, trials: int = 2048) -> Audit:
    return audit(cell, trials=trials, families=("canaries",))


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True])
def test_less_noise_in_the_rounds_is_refuted_with_and_without_a_private_scaling_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, given: bool
) -> None:
    """Guarantee: sigma times 0.4 at share 0.9 is refuted (shown 0.373 of a claim of 1 before, which stood).

    The rounds claim 0.316 then.  Where means are given there is no step to be audited, and the rounds are.
    """
    cell = scaled_cell(tmp_path, **({name: GIVEN[name] for name in ("means", "deviations")} if given else {}))
    outcome = canaries(cell)
    assert outcome.stands, outcome
    assert outcome.claims["canaries"] == pytest.approx(0.1**0.5)
    planted.noise_times(0.4)(monkeypatch)
    outcome = canaries(cell, 4096)
    assert not outcome.stands
    assert outcome.families["canaries"] > outcome.claims["canaries"]
    assert ("canaries, first step" in outcome.claims) is not given


@pytest.mark.every(4)
@pytest.mark.parametrize("trust", TRUSTS)
def test_a_correct_run_with_a_scaling_step_passes_with_a_tight_composed_bound(tmp_path: Path, trust: str) -> None:
    """The composed claim is the one asked for; at least half of it is shown."""
    outcome = canaries(scaled_cell(tmp_path, 0.5, trust), 4096)
    assert outcome.stands, outcome
    assert outcome.claims["canaries, all parts"] == 1.0
    for family in ("canaries", "canaries, first step"):
        assert outcome.claims[family] == pytest.approx(0.5**0.5)
    assert outcome.families["canaries, all parts"] >= 0.5


def less_noise_where(patch: pytest.MonkeyPatch, factor: float, chosen: Callable[[Cell], bool]) -> None:
    """Noise times `factor` in the runs of one part."""
    honest = families.run_trials

    def tried(cell: Cell, *arguments: Any) -> Trials:
        with patch.context() as planting:
            planted.noise_times(factor if chosen(cell) else 1.0)(planting)
            return honest(cell, *arguments)

    patch.setattr(families, "run_trials", tried)


@pytest.mark.slow
def test_less_noise_in_the_scaling_step_is_refuted_by_its_own_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    less_noise_where(monkeypatch, 0.4, lambda cell: cell.federation.total_rounds == 1)
    outcome = canaries(scaled_cell(tmp_path, 0.5))
    assert not outcome.stands
    assert outcome.families["canaries"] <= outcome.claims["canaries"]
    assert "of the first step" in outcome.statistic


@pytest.mark.slow
def test_less_noise_in_evaluations_is_refuted_by_their_own_claim(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them together: they read the same test records in every round."""
    cell = evaluated_cell(small_cell)
    outcome = canaries(cell)
    assert outcome.stands, outcome
    assert outcome.claims["canaries, all parts"] == pytest.approx(2.0**0.5)
    assert outcome.families["canaries, evaluations"] >= 0.4
    less_noise_where(monkeypatch, 0.4, lambda cell: cell.federation.epochs > 1)
    outcome = canaries(cell)
    assert not outcome.stands
    assert "of the evaluations" in outcome.statistic
    assert outcome.families["canaries"] <= outcome.claims["canaries"]


@pytest.mark.slow
def test_two_steps_that_each_spend_the_whole_budget_are_refuted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that gives both steps the whole promise: each keeps its own claim, and both are √2 of it."""
    monkeypatch.setattr(
        "fedpriv.scenario.schema.split_budget", lambda promise, share=0.0: RunBudget(promise, promise)
    )
    outcome = canaries(scaled_cell(tmp_path, 0.5), 4096)
    assert not outcome.stands
    assert outcome.statistic == "rounds and first step together"


@pytest.mark.parametrize("trust", TRUSTS)
def test_a_machine_that_is_rolled_back_passes_the_audit_with_fresh_noise(small_cell: MakeCell, trust: str) -> None:
    """Guarantee: what is released before and after a rollback differs by noise that nobody knows."""
    cell = small_cell(algorithm__trust=trust, federation__rounds=3, run__dtype="float32")
    assert audit(cell, trials=2048, families=("rollback",)).stands


@pytest.mark.every(3)
@pytest.mark.parametrize("trust", TRUSTS)
def test_noise_keyed_without_queries_and_sums_is_refuted_only_by_the_rollback_attack(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    """Guarantee: a machine that is put back draws other noise for another query.

    The other families see nothing of it: 0.710 was shown before, and the claim stood.
    """
    cell = small_cell(algorithm__trust=trust, federation__rounds=3, run__dtype="float32")
    honest = integers.round_noise
    monkeypatch.setattr(
        integers, "round_noise", lambda key, owner, t, chain, sums: honest(key, owner, t, bytes(32), 0 * sums)
    )
    outcome = audit(cell, trials=2048, families=("canaries", "rollback"))
    assert not outcome.stands
    assert "before a rollback" in outcome.statistic
    assert outcome.mu > 2.0
    assert outcome.families["canaries"] <= 1.0


def test_noise_keyed_without_earlier_queries_is_refuted_in_a_later_repeated_round(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put back, asked another query and then the old ones again: without a chain the later noise repeats."""
    honest, start = integers.round_noise, b"\0" * 32

    def of_the_round(key: bytes, owner: int, t: int, chain: bytes, sums: Any) -> KeyedDiscreteGaussian:
        return honest(key, owner, t, chain if t <= 2 else start, 0 * sums)

    monkeypatch.setattr(integers, "round_noise", of_the_round)
    cell = small_cell(algorithm__trust="untrusted", federation__rounds=4, run__dtype="float32")
    outcome = audit(cell, trials=2048, families=("rollback",))
    assert not outcome.stands
    assert re.search("repeated round [2-9] before a rollback", outcome.statistic)  # 1 is asked another query


@pytest.mark.parametrize("claimed", [0.5, 1.0, 3.0])
def test_noise_at_the_detectable_share_is_refuted_at_the_stated_rate(claimed: float) -> None:
    """Noise of f times its size, 400 times: at least 363 refuted (95 % less four deviations), at f + .1 fewer."""
    generator, refuted = np.random.default_rng(3), []
    seen = detectable_noise_share(np.array([claimed / 2.0]), claimed, 1024, 0.01)
    for share in (seen, min(seen + 0.1, 1.0)):
        count = 0
        for _ in range(400):
            present = generator.random(1024) < 0.5
            scores = generator.standard_normal(1024) * share + claimed * present
            count += bound_at_threshold(claimed / 2.0, scores, present, 0.005) > claimed
        refuted.append(count)
    assert 0.5 < seen < 0.9 or claimed == 0.5
    assert refuted[0] >= 363
    assert refuted[1] < refuted[0] - 100


def test_the_detectable_noise_share_is_near_zero_for_extreme_claims_and_grows_with_trials() -> None:
    def share_of(claimed: float, trials: int) -> float:
        return detectable_noise_share(np.array([claimed / 2.0]), claimed, trials, 0.005)

    assert share_of(9.0, 4096) == 0.0
    assert share_of(1e-3, 4096) < 0.01
    assert share_of(1.0, 4096) < share_of(1.0, 16384) < 1.0


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
@pytest.mark.parametrize("trust", TRUSTS)
def test_the_best_test_separates_neighbouring_runs_by_the_claimed_mu(
    small_cell: MakeCell, trust: str, relation: str
) -> None:
    cell = small_cell(algorithm__trust=trust, privacy__relation=relation, federation__rounds=6)
    for mu in (0.5, 2.0):
        part = make_run_parts(cell, mu, 2, 0)["rounds"]
        assert separation(part.build_plan()) == pytest.approx(mu, rel=1e-9)


@pytest.mark.slow
def test_evaluations_beside_secret_rounds_are_audited_against_their_own_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = secret_cell().canonical_data()
    cell = resolve_cell({**tree, "evaluation": EVALUATED}, "test")
    heard: list[float] = []
    outcome = audit(cell, trials=2048, progress=heard.append)
    assert outcome.stands, outcome
    assert [share for share in heard if share >= 1.0] == heard[-1:], "evaluations are a part of the work"
    assert outcome.claims["canaries, evaluations"] == 1.0
    assert outcome.sees.keys() == {"canaries, evaluations"}
    less_noise_where(monkeypatch, 0.4, lambda each: each.federation.epochs > 1)
    outcome = audit(cell, trials=2048)
    assert not outcome.stands
    assert "of the evaluations" in outcome.statistic


@pytest.mark.slow
def test_no_detectable_noise_share_is_stated_for_secret_rounds() -> None:
    outcome = audit(secret_cell(), trials=2048)
    assert outcome.stands
    assert outcome.sees == {}
    assert describe_power(outcome.sees, outcome.trials).startswith("it is not calculated where ")


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("trust", TRUSTS)
def test_noise_below_the_detectable_share_is_refuted_with_16384_trials(
    small_cell: MakeCell, monkeypatch: pytest.MonkeyPatch, trust: str
) -> None:
    """16,384 trials: σ × 0.83 by its own power calculation."""
    cell = small_cell(algorithm__trust=trust, federation__rounds=6, run__dtype="float32")
    outcome = canaries(cell, 16_384)
    assert outcome.stands
    assert 0.83 <= outcome.sees["canaries"] < 0.85
    planted.noise_times(outcome.sees["canaries"] - 0.03)(monkeypatch)
    assert not canaries(cell, 16_384).stands
