"""The audit of statistics: guards' integers are as far apart as is charged, and a smaller charge is refuted."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpriv.addons.audit.audit import audit
from fedpriv.addons.audit.counts import _open_world, audit_counts, find_furthest_pair, make_counts_cell
from fedpriv.addons.audit.families import StepCounter
from fedpriv.addons.audit.statistics import canary_weight_and_std
from fedpriv.core.errors import InputError
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import make_schema_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from tests.cli.command import fedpriv as command
from tests.data.tables import rows, write_csv
from tests.silo.test_statistics import TABLES, plan

COUNTS: list[dict[str, Any]] = [{"of": ["sex", "outcome"]}]
UNHEARD = StepCounter(lambda _: None, 1.0)


def planned(cell: Cell, mu: float = 1.0) -> tuple[Cell, Plan]:
    small = make_counts_cell(cell, mu)
    assert small.data.table_schema is not None
    return small, make_plan(small, make_schema_task(small, small.data.table_schema).objective, for_release=True)


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
@pytest.mark.parametrize("tables", [COUNTS, TABLES], ids=["counts", "several"])
def test_integer_sums_of_neighbouring_guards_differ_by_nearly_the_charged_distance(
    tmp_path: Path, relation: str, tables: list[dict[str, Any]]
) -> None:
    """Guarantee of `apart`: √2 clips for plain counts, measured on the integers that leave two guards."""
    small, of = planned(plan(tmp_path, "trusted", tables, relation=relation).cell)
    pair = find_furthest_pair(small, of, seed=0)
    sums = []
    with torch.inference_mode():
        for world in (0, 1):
            silo, *others = _open_world(tmp_path / f"{world}", small, pair, world)
            silo.select_plan(0)
            sums.append(
                silo.answer("run", 1, of.objective.initial()).double() * of.required_exact_plan.lattice.unit
            )
            for each in (silo, *others):
                each.close()
    distance = float((sums[0] - sums[1]).norm())
    charged = {"replace-one": of.increment_diameter, "zero-out": 1.0}[relation]
    assert charged * 0.95 <= distance <= charged
    if tables is COUNTS:
        assert distance == pytest.approx(math.sqrt(2.0) if relation == "replace-one" else 1.0, rel=1e-5)


@pytest.mark.parametrize("trust", ["untrusted", "secure-aggregation", "trusted"])
def test_the_furthest_neighbouring_tables_are_separated_by_the_claimed_mu(tmp_path: Path, trust: str) -> None:
    small, of = planned(plan(tmp_path, trust, COUNTS).cell, 3.0)
    pair, (weight, std) = find_furthest_pair(small, of, seed=0), canary_weight_and_std(of, 1)
    assert weight * float((pair.increments[0] - pair.increments[1]).norm()) / std == pytest.approx(3.0, rel=1e-4)


def test_the_statistics_audit_runs_real_guards_and_stays_below_the_claim(tmp_path: Path) -> None:
    with torch.inference_mode():
        found = audit_counts(plan(tmp_path, "untrusted", COUNTS).cell, 2.0, 24, 0.01, 0, UNHEARD)
    assert found.mu <= 2.0
    assert "furthest apart, 1.4142 clips" in found.test


@pytest.mark.slow
def test_a_statistics_plan_passes_the_audit_and_an_undercharged_one_is_refuted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: an audit notices that two counts are √2 apart and were charged as 1."""
    cell = plan(tmp_path, "untrusted", COUNTS).cell
    honest = audit(cell, 2.0, 16 * 400)
    assert honest.stands
    assert honest.mu > 1.0
    assert honest.trials == 400
    monkeypatch.setattr("fedpriv.plan.plan.find_increment_diameter", lambda *_: 1.0)
    assert not audit(cell, 2.0, 16 * 400).stands


@pytest.mark.slow
def test_the_audit_command_passes_a_statistics_plan(tmp_path: Path) -> None:
    write_csv(tmp_path / "table.csv", rows(60))
    (tmp_path / "plan.toml").write_text(
        'name = "counts"\n[data]\nname = "table.csv"\n[data.table]\npublic = true\ntarget = "outcome"\n'
        'classes = ["well", "ill"]\ntest_share = 0.0\n[data.table.columns]\nage = { range = [0, 100] }\n'
        '[privacy]\nrelation = "replace-one"\nmu = 1.0\n[[table]]\nof = ["age"]\nedges = { age = [0, 50, 100] }\n'
    )
    done = command("audit", "plan.toml", "--trials", 2048, "--mu", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the claim stands" in done.stdout
    assert "1.4142 clips" in done.stdout


def test_the_statistics_audit_refuses_persons_and_noisy_newton(tmp_path: Path) -> None:
    cell = plan(tmp_path, "untrusted", COUNTS).cell
    persons = cell.privacy.model_copy(update={"unit": "user", "records": 2})
    with pytest.raises(InputError, match="canaries of statistics are records"):
        audit(cell.model_copy(update={"privacy": persons}))
    from tests.papers.test_newton import tree_of

    with pytest.raises(InputError, match="canaries are gradients, and its records answer with more"):
        audit(resolve_cell(tree_of(tmp_path), "test"))
