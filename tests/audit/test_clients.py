"""The audit of clients in cohorts: the code that is here stands, and every planted bug is refuted.

Keys are fixed, so that each of these gives the same answer every time.  For new keys healthy code would be refuted
with probability at most 1 % an audit, and 0.5 % a test of secret cohorts (Clopper & Pearson, Bonferroni over the
tests of a family).
"""

from typing import Any

import pytest
import torch

from fedpriv.addons.audit import attacks, secret
from fedpriv.addons.audit.audit import Audit, audit
from fedpriv.addons.audit.canaries import (
    FAR_NORM,
    CanaryLayout,
    make_audit_cell,
    make_canary_objective,
    rows_by_round,
    unit_records,
    why_misread,
    zero_shard,
)
from fedpriv.addons.audit.families import AuditRefutedError
from fedpriv.addons.audit.statistics import find_noise_factor, heaviest_round, matched_filter
from fedpriv.addons.audit.transcripts import check_canary_units, public_run_size
from fedpriv.core.errors import InputError
from fedpriv.core.random import derive_key
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.plan.plan import make_plan
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from tests.audit import planted, planted_secret
from tests.audit.test_secret import canaries_of, company_of
from tests.conftest import small_tree
from tests.parts import in_parts

FEDAVG = {"name": "dp-fedavg", "trust": "trusted", "local_steps": 3, "local_step": 0.05, "clip": 0.5}
CYCLIC = {"clients": 40, "cohort": 10, "rounds": 12, "sampling": "fixed"}


@pytest.fixture(autouse=True)
def _fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.fixed_keys(monkeypatch)
    drawn = iter(range(10**9))
    monkeypatch.setattr(secret, "system_key", lambda: derive_key(b"company", str(next(drawn))))


def client_cell(sampling: str = "fixed", relation: str = "zero-out", **changes: Any) -> Cell:
    """40 clients of 3 records, cohorts of 10, 3 turns, three local steps."""
    tree = small_tree(
        federation={**CYCLIC, "sampling": sampling},
        algorithm=dict(FEDAVG),
        privacy={"unit": "client", "records": 3, "relation": relation, "mu": 1.0},
        run={"dtype": "float32"},
        **changes,
    )
    return resolve_cell(tree, "test")


def public(cell: Cell, trials: int = 2048) -> Audit:
    return audit(cell, trials=trials, families=("canaries",))


ROWS: dict[str, dict[str, Any]] = {
    "dp-fedavg, replace-one": {"relation": "replace-one"},
    "dp-fedavg": {},
    "dp-fedadam": {"algorithm__name": "dp-fedadam", "algorithm__step": 0.01},
    "dp-sgd": {
        "algorithm__name": "dp-sgd",
        "algorithm__step": 0.1,
        "algorithm__local_steps": None,
        "algorithm__local_step": None,
    },
    "dp-ftrl": {"algorithm__name": "dp-ftrl", "algorithm__step": 0.5, "algorithm__mechanism": "tree"},
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("row", ROWS)
def test_public_cohorts_of_clients_pass_the_audit_with_a_positive_bound(row: str) -> None:
    outcome = public(client_cell(**ROWS[row]))
    assert outcome.stands, outcome
    assert outcome.mu >= 0.3
    assert outcome.unit == "everything one client holds, at most 3 records a round"
    assert (outcome.rounds, outcome.silos) == (12, 1)


SECRET = pytest.mark.parametrize(
    ("sampling", "relation"), [("poisson", "replace-one"), ("allocation", "zero-out")]
)


def few(patch: pytest.MonkeyPatch) -> None:
    """Little company, and few trials of it: for the fast part, where nothing has to be refuted by it."""
    patch.setattr(secret, "_COMPANY_BATCH_SIZE", 4)
    patch.setattr(secret, "TRIALS_PER_COMPANY_RUN", 128)


@pytest.mark.slow
@SECRET
def test_secret_cohorts_of_clients_pass_the_audit_with_a_positive_bound(
    monkeypatch: pytest.MonkeyPatch, sampling: str, relation: str
) -> None:
    found = canaries_of(client_cell(sampling, relation))
    assert found.excess <= 0.0, found
    assert found.mu > 0.0
    few(monkeypatch)
    assert company_of(client_cell(sampling, relation), 16).excess <= 0.0


@pytest.mark.long
@SECRET
def test_knowing_all_other_clients_does_not_refute_secret_cohorts(sampling: str, relation: str) -> None:
    assert company_of(client_cell(sampling, relation), 100).excess <= 0.0


@pytest.mark.parametrize("whole", in_parts([False, True], long=[True]))
def test_a_full_audit_of_secret_cohorts_passes(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    if not whole:
        few(monkeypatch)
    outcome = audit(client_cell("allocation"), trials=2048)
    assert outcome.stands
    assert outcome.alarms is not None
    assert set(outcome.families) == {"canaries", "company"}
    assert outcome.pool


@pytest.mark.slow
@pytest.mark.parametrize("family", ["driven canaries", "integers"])
def test_driven_canaries_and_integer_attacks_do_not_refute_correct_client_code(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(attacks, "_FEATURE_COUNT", 2**13 - 1)
    assert audit(client_cell(), trials=2048, families=(family,)).stands


def test_audit_runs_keep_the_turns_of_fixed_cohorts() -> None:
    """Batch p is rows p·B to (p+1)·B of the pool, and is read in rounds p + 1, p + 1 + turns, …: written out."""
    small = make_audit_cell(client_cell(), 1.0, 6, 1, 2, 3)
    first, second = range(0, 2), range(2, 4)
    assert rows_by_round(small) == [first, second] * 3
    assert why_misread(small, rows_by_round(small)) is None
    layout = CanaryLayout.from_rows(rows_by_round(small), 2, 9, 2)
    assert layout.rounds.tolist() == [2, 2, 1, 1]
    assert layout.row_indices.tolist() == [2, 3, 0, 1]
    assert layout.row_count == 4
    plan = make_plan(small, make_canary_objective(small, 4), for_release=True)
    assert heaviest_round(plan) in (1, 2)
    assert matched_filter(plan, 2) == pytest.approx(
        [0, 1, 0, 1, 0, 1] / find_noise_factor(plan.mechanism, plan.schedule.rounds)[0, 0] ** 2
    )


@pytest.mark.parametrize(
    ("changes", "rounds"),
    [
        ({"rounds": 3}, (3, 1)),
        ({"rounds": 4}, (4, 1)),
        ({"rounds": 5}, (8, 2)),
        ({"rounds": 400}, (12, 3)),
        ({"rounds": 400, "cohort": 1}, (12, 3)),
        ({"rounds": 400, "cohort": 40}, (3, 3)),
        ({"rounds": 30, "cohort": 1}, (12, 1)),
    ],
)
def test_audit_runs_have_at_most_three_turns_of_equally_many_rounds(
    changes: dict[str, Any], rounds: tuple[int, int]
) -> None:
    cell = client_cell(**{f"federation__{key}": value for key, value in changes.items()})
    assert public_run_size(cell, 12) == rounds
    small = make_audit_cell(cell, 1.0, rounds[0], 1, 8, rounds[1])
    assert (small.schedule.rounds, small.schedule.rounds_per_epoch) == (rounds[0], rounds[0] // rounds[1])
    assert small.batch_sizes == (8,)


def test_a_client_canary_has_the_largest_number_of_records_all_in_one_direction() -> None:
    small = make_audit_cell(client_cell(), 1.0, 4, 1, 2)
    plan = make_plan(small, make_canary_objective(small, 2), for_release=True)
    shard = zero_shard(4, 2)
    shard.images[1, 0] = FAR_NORM
    units = unit_records(shard, small)
    assert units.labels.shape == (4, 3)
    assert (units.features[1, :, 0] == FAR_NORM).all()
    one = Records(*(column[:2] for column in units))
    query = torch.zeros_like(plan.objective.initial())
    _, moved = plan.objective.per_record(
        Query([query]), Batch(one, torch.ones(2, dtype=torch.float64)), torch.arange(2), 0.5
    )
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-6)
    assert float(moved[3].abs() + moved[0].abs()) == pytest.approx(0.5 * 2**0.5, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["fixed", "allocation"])
def test_half_of_the_noise_is_refuted_for_clients(monkeypatch: pytest.MonkeyPatch, sampling: str) -> None:
    planted.noise_times(0.5)(monkeypatch)
    if sampling == "fixed":
        assert not public(client_cell()).stands
    else:
        assert canaries_of(client_cell(sampling)).excess > 0.0


@pytest.mark.slow
def test_noise_calibrated_to_one_of_three_turns_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.noise_times(3**-0.5)(monkeypatch)
    assert not public(client_cell(), 4096).stands


def test_a_cohort_that_takes_part_out_of_turn_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.read_twice(monkeypatch)
    with pytest.raises(AuditRefutedError, match="round 2 reads records 0 to 255, not 256 to 511"):
        public(client_cell())


@pytest.mark.slow
def test_secret_cohorts_drawn_from_the_public_seed_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_secret.coins_of_the_seed(monkeypatch)
    found = canaries_of(client_cell("poisson"))
    assert found.excess > 0.0, found
    assert found.test == "coins of the public seed"


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("steps", [3, None])
@pytest.mark.parametrize("sampling", ["fixed", "allocation"])
def test_clipping_by_record_instead_of_by_client_is_refuted(
    monkeypatch: pytest.MonkeyPatch, sampling: str, steps: int | None
) -> None:
    planted_secret.record_by_record(monkeypatch)
    cell = client_cell(sampling, **ROWS["dp-sgd"] if steps is None else {})
    if sampling == "fixed":
        assert not public(cell).stands
    else:
        assert canaries_of(cell, 1).excess > 0.0


@pytest.mark.long
def test_averaging_over_the_drawn_clients_only_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_secret.over_those_drawn(monkeypatch)
    found = company_of(client_cell("allocation"), 1200, mu=1.5)
    assert found.excess > 0.0, found
    assert found.test == "a round that all others leave"


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"federation__sampling": "available", "federation__min_separation": 2},
        'federation.sampling = "available": .* with sampling = "fixed"',
    ),
    ({"algorithm__clip_quantile": 0.5}, "algorithm.clip_quantile: the clip of the moment is a coordinate"),
    ({"algorithm__local_step": 1e-5}, "--set algorithm.local_step=0.000708 or more"),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED)
def test_clients_that_canaries_cannot_represent_are_refused_in_one_line(
    changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(InputError, match=line) as refused:
        audit(client_cell(**changes))
    assert "\n" not in str(refused.value)


def test_a_refused_local_step_names_a_step_that_is_accepted() -> None:
    """At clip 0.5 the limit is 0.00070711, and 0.000707 was advised, which is refused."""
    with pytest.raises(InputError) as refused:
        check_canary_units(client_cell(algorithm__local_step=1e-5))
    advised = float(str(refused.value).partition("local_step=")[2].split()[0])
    check_canary_units(client_cell(algorithm__local_step=advised))
