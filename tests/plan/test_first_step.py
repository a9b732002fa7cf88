"""The first step of [data.scale]: what it releases, what it costs beside the rounds, and who takes it."""

import ast
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedpriv
from fedpriv.accounting.guarantees import GaussianDP
from fedpriv.claims.claim import EXTERNAL_STEP_NOTE, compute_claim, evaluation_mu
from fedpriv.claims.entries import read_ledger
from fedpriv.claims.ledger import FIRST_STEP, make_evaluation_streams, stream_from_data
from fedpriv.cli.privacy import ledger
from fedpriv.core.errors import InputError, RunError
from fedpriv.data.encode import MIN_DEVIATION, Scaling, bounded_moments, scaling_from_moments
from fedpriv.data.partition import counted_mask
from fedpriv.loss.objective import Batch, Query, Records
from fedpriv.loss.rows import ColumnMoments
from fedpriv.noise.integers.increments import sum_integer_increments
from fedpriv.plan.evaluation import (
    apply_scaling,
    assume_scaling,
    evaluation_cell,
    first_step_cell,
    make_evaluation_plan,
    prepare_scenario,
    train_indices_of_silos,
)
from fedpriv.plan.plan import make_plan, silo_weights
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.scenario.sections import RunBudget
from fedpriv.show.statement import make_statements
from fedpriv.silo.demo import prepare_silos
from fedpriv.silo.policy import read_policy
from fedpriv.silo.shard import Shard
from fedpriv.study import sweep
from fedpriv.study.results import read_results
from fedpriv.study.sweep import RunOptions, estimate_run_memory
from tests.data.tables import rows, table_tree, write_csv
from tests.silo.charged import charged
from tests.silo.guarded import guard_of

RELATIONS = ("zero-out", "replace-one")
TRUSTS = ("untrusted", "secure-aggregation", "trusted")


def tree(folder: Path, scale: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """Two hospitals, two columns of numbers, a share of a quarter."""
    path = folder / "t.csv"
    if not path.exists():
        records = [
            {**row, "weight": str(50 + 0.3 * int(row["age"]) + number % 7)} for number, row in enumerate(rows())
        ]
        write_csv(path, records)
    asked = table_tree(path)
    asked["data"]["table"]["columns"] = {
        **asked["data"]["table"]["columns"],
        "weight": {"range": [0.0, 200.0]},
    }
    asked["data"]["scale"] = {"share": 0.25, **(scale or {})}
    for name, section in sections.items():
        asked[name] = {**asked[name], **section} if isinstance(section, dict) else section
    return asked


def cell_of(folder: Path, scale: dict[str, Any] | None = None, **sections: Any) -> Cell:
    return resolve_cell(tree(folder, scale, **sections), "test")


def first_of(cell: Cell) -> Cell:
    first = first_step_cell(cell)
    assert first is not None
    return first


def grid(columns: int) -> np.ndarray:
    """Records whose columns take 9 values in -1 … 1 each, ends and middle among them: (9^columns, columns)."""
    return np.array(list(itertools.product(np.linspace(-1.0, 1.0, 9), repeat=columns)))


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_the_moments_of_a_record_have_norm_at_most_one_and_attain_one(columns: int) -> None:
    norms = np.linalg.norm(bounded_moments(grid(columns)), axis=1)
    assert norms.max() == pytest.approx(1.0, abs=1e-12)
    assert bounded_moments(grid(columns)).shape == (9**columns, 2 * columns)


def test_the_moments_of_any_two_records_are_at_most_the_charged_diameter_apart() -> None:
    """Guarantee: `ColumnMoments.diameter` is that of all pairs, and of rows beyond their ranges."""
    line = np.array([*np.linspace(-1.0, 1.0, 2001), -3.0, 0.1, 5.0, 1e300, -np.inf, np.inf])[:, None]
    moments = np.concatenate([bounded_moments(line), np.zeros((1, 2))])
    squares = (moments**2).sum(1)
    worst = math.sqrt((squares[:, None] + squares[None] - 2.0 * moments @ moments.T).max())
    known = ColumnMoments(2, 1.0, dtype=torch.float64).diameter
    assert known * (1.0 - 1e-6) <= worst <= known * (1.0 + 1e-12)
    assert np.isnan(bounded_moments(np.array([[np.nan]]))).all()
    hostile = bounded_moments(np.array([[1e300, 0.0], [-1e300, -7.0], [0.0, 2.0]]))
    assert np.linalg.norm(hostile[:, None] - hostile[None], axis=-1).max() <= known


@pytest.mark.parametrize("arithmetic", ["float", "integers"])
@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("relation", RELATIONS)
def test_private_feature_scaling_meets_its_share_of_the_mu_target_by_brute_force(
    tmp_path: Path, relation: str, trust: str, arithmetic: str
) -> None:
    """All neighbours on a grid of records: what moves, over the noise that is added there, is μ at most."""
    word = {"arithmetic": arithmetic}
    cell = cell_of(tmp_path, algorithm={"trust": trust}, privacy={"relation": relation}, run=word)
    first = first_of(cell)
    objective = load_task(first).objective
    plan, total = make_plan(first, objective), cell.privacy.target_mu
    assert total is not None
    allowed = math.sqrt(0.25) * total
    features = torch.from_numpy(bounded_moments(grid(2)))
    labels = torch.zeros(1, dtype=torch.int64)
    hostile = torch.full((4,), 1e6, dtype=torch.float64)
    for point in (objective.initial(), hostile):
        added = [
            objective.increment(
                Query((point,)), Batch(Records(row[None], labels), torch.ones(1, dtype=torch.float64)), 1.0
            )
            for row in features
        ]
        sums = torch.stack([each.total for each in added])
        moved = sums.norm(dim=1) if relation == "zero-out" else torch.cdist(sums, sums).flatten()
        silo = 0 if plan.trust.private_messages else int(np.argmax(plan.batch_sizes))
        if plan.trust.private_messages:
            in_release, std = float(moved.max()) / plan.batch_sizes[silo], float(plan.noise.std_of(silo))
        else:
            in_release, std = float(moved.max()) / sum(plan.batch_sizes), plan.noise.std_in_mean
        assert in_release / std <= allowed * (1.0 + 1e-9)
        assert in_release / std >= allowed * 0.98  # the grid has no pair that is quite as far apart as any
    if plan.exact_plan is not None:
        lattice = plan.required_exact_plan.lattice
        of_one = [
            sum_integer_increments(
                objective, Query((hostile,)), 1.0, Records(row[None], labels), lattice.norm(1.0), lattice.factor(1)
            )
            for row in features
        ]
        bound = float(lattice.norm(1.0))
        assert max(np.linalg.norm(each.astype(float)) for each in of_one) <= bound


@pytest.mark.parametrize("outside", [np.inf, np.nan, 1e300, -7.0])
def test_a_record_outside_its_public_ranges_contributes_at_most_the_clip_norm(
    tmp_path: Path, outside: float
) -> None:
    objective = load_task(first_of(cell_of(tmp_path))).objective
    moments = torch.from_numpy(bounded_moments(np.array([[outside, 0.5]])))
    records = Records(moments, torch.zeros(1, dtype=torch.int64))
    found = objective.increment(
        Query((objective.initial(),)), Batch(records, torch.ones(1, dtype=torch.float64)), 1.0
    )
    assert float(found.total.norm()) <= 1.0 + 1e-12


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("trust", TRUSTS)
def test_the_claim_composes_private_feature_scaling_and_training_rounds(
    tmp_path: Path, trust: str, relation: str
) -> None:
    """μ² = μ_1² + μ_2², no more than asked for, and next to all of it; the ledger agrees, and its parts do not."""
    asked = tree(tmp_path, algorithm={"trust": trust}, privacy={"relation": relation})
    folder = fedpriv.run(asked, out=tmp_path / "run").folder
    (entry,) = read_ledger(folder)
    target = resolve_cell(asked, "test").privacy.target_mu
    assert target is not None
    assert entry.agrees
    assert entry.claim is not None
    assert isinstance(entry.claim.guarantee, GaussianDP)
    assert target * (1.0 - 1e-9) <= entry.claim.guarantee.mu <= target
    mus = [max(s.mu for s in entry.streams if (s.step == FIRST_STEP) == first) for first in (True, False)]
    assert mus == pytest.approx([math.sqrt(0.25) * target, math.sqrt(0.75) * target])
    told = json.loads((folder / "results.json").read_text())
    assert told["cells"][0]["mu"] == entry.claimed_mu
    told["cells"][0]["releases"] = [r for r in told["cells"][0]["releases"] if "step" not in r]
    (folder / "results.json").write_text(json.dumps(told))
    (without,) = read_ledger(folder)
    assert not without.agrees
    told["cells"][0]["mu"] = without.streams[0].mu
    told["cells"][0]["epsilon"] = GaussianDP(without.streams[0].mu).epsilon_of(entry.delta)
    (folder / "results.json").write_text(json.dumps(told))
    assert not read_ledger(folder)[0].agrees  # a first step that is told of is released somewhere


def test_the_privacy_statement_mentions_the_release_of_feature_means_and_deviations(tmp_path: Path) -> None:
    folder = fedpriv.run(tree(tmp_path), out=tmp_path / "run").folder
    (statement,) = make_statements(read_results(folder))
    assert any(
        "scaled by noisy means and deviations that a first step released" in each for each in statement.assumptions
    )
    assert any("first step, means and squares" in each for each in statement.mechanisms)


def scale_of(folder: Path) -> dict[str, Any]:
    cells = json.loads((folder / "results.json").read_text())["cells"]
    found: dict[str, Any] = cells[0]["scenario"]["data"]["scale"]
    return found


@pytest.mark.parametrize("arithmetic", ["float", "integers"])
def test_feature_means_and_deviations_released_with_little_noise_match_the_training_records(
    tmp_path: Path, arithmetic: str
) -> None:
    asked = tree(tmp_path, run={"arithmetic": arithmetic}, federation={"batches": [18, 12]})
    asked["privacy"] = {"relation": "zero-out", "mu": 2e4}
    engine = "vectorized" if arithmetic == "float" else "inprocess"
    folder = fedpriv.run(asked, engine=engine, out=tmp_path / "run").folder
    cell = resolve_cell(asked, "test")
    train, read = load_task(cell).train, np.concatenate(train_indices_of_silos(cell))
    own = read[counted_mask(train.labels.numpy())[read]]
    assert (len(read), len(own)) == (60, 40)  # of all rows, the third that is for testing is no part of a mean
    features = train.features[own][:, [0, 6]].double()
    assert cell.data.table_schema is not None
    assert cell.data.table_schema.number_features == (0, 6)
    assert scale_of(folder)["means"] == pytest.approx(features.mean(0).tolist(), abs=1e-3)
    assert scale_of(folder)["deviations"] == pytest.approx(features.std(0, correction=0).tolist(), abs=1e-2)


@pytest.mark.slow
def test_engines_agree_on_private_feature_scaling_and_on_the_test_loss(tmp_path: Path) -> None:
    """Engine inprocess goes through messages and silos; with secure aggregation on its grid."""
    for trust in TRUSTS:
        asked = tree(tmp_path, algorithm={"trust": trust})
        one, other = (
            fedpriv.run(asked, engine=engine, out=tmp_path / trust / engine)
            for engine in ("vectorized", "inprocess")
        )
        for key in ("means", "deviations"):
            assert scale_of(one.folder)[key] == pytest.approx(scale_of(other.folder)[key], abs=1e-6)
        assert one[0].metrics["test_loss"] == pytest.approx(other[0].metrics["test_loss"], abs=1e-5)


def test_private_feature_scaling_uses_the_training_records_and_another_noise_seed(tmp_path: Path) -> None:
    cell = cell_of(tmp_path)
    first = first_of(cell)
    assert first.seed == cell.seed  # the same records at the same silos
    assert first.noise_seed != cell.noise_seed == cell.seed
    before = [sorted(own.tolist()) for own in train_indices_of_silos(first)]
    assert before == [sorted(own.tolist()) for own in train_indices_of_silos(cell)]


def test_feature_scaling_is_released_once_for_every_seed_and_reused_by_a_resumed_run(tmp_path: Path) -> None:
    asked = {**tree(tmp_path), "sweep": {"seeds": [1, 2]}}
    del asked["seed"]
    folder = fedpriv.run(asked, out=tmp_path / "run").folder
    whole = json.loads((folder / "results.json").read_text())["cells"]
    assert whole[0]["scenario"]["data"]["scale"] != whole[1]["scenario"]["data"]["scale"]
    again = fedpriv.run({**asked, "sweep": {"seeds": [1, 2, 3]}}, out=folder, resume=True).folder
    cells = json.loads((again / "results.json").read_text())["cells"]
    assert [cell["mu"] for cell in cells[:2]] == [cell["mu"] for cell in whole]
    assert [cell["scenario"] for cell in cells[:2]] == [cell["scenario"] for cell in whole]
    assert all(entry.agrees for entry in read_ledger(again))
    assert len(cells) == 3


def test_a_folder_with_results_is_refused_before_feature_scaling_is_released(
    tmp_path: Path, monkeypatch: Any
) -> None:
    folder = fedpriv.run(tree(tmp_path), out=tmp_path / "run").folder

    def never(*_: Any) -> None:
        raise AssertionError("a first step was taken")

    monkeypatch.setattr("fedpriv.study.sweep.scale_scenario", never)
    with pytest.raises(InputError, match="holds results already"):
        fedpriv.run(tree(tmp_path), out=folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"privacy": {"relation": "zero-out", "epsilon": 7.0}}, "cell 0 differs from this scenario.s: privacy"),
        ({"seed": 9}, "its seeds are"),
        ({"sweep": {"algorithm.clip": [0.5, 1.0]}}, "its sweep differs"),
    ],
)
def test_a_folder_of_another_run_is_refused_before_feature_scaling_is_released(
    tmp_path: Path, monkeypatch: Any, change: dict[str, Any], reason: str
) -> None:
    """Was: silos were charged for a first step, and then the folder was refused."""
    folder = fedpriv.run(tree(tmp_path), out=tmp_path / "run").folder
    before = (folder / "results.json").read_bytes()

    def never(*_: Any) -> None:
        raise AssertionError("a first step was taken")

    monkeypatch.setattr("fedpriv.study.sweep.scale_scenario", never)
    with pytest.raises(InputError, match=reason):
        fedpriv.run({**tree(tmp_path), **change}, out=folder, resume=True)
    assert (folder / "results.json").read_bytes() == before


@pytest.mark.slow
def test_too_little_memory_for_missing_cells_alone_is_refused_before_feature_scaling_is_released(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Was: finished cells counted, after a first step."""
    asked = {**tree(tmp_path), "sweep": {"seeds": [1, 2]}}
    del asked["seed"]
    folder = fedpriv.run(asked, out=tmp_path / "run").folder
    checked_seeds = []
    check_memory = sweep.check_memory

    def note(cells: Sequence[Cell], *arguments: Any) -> Any:
        checked_seeds.append([cell.seed for cell in cells])
        return check_memory(cells, *arguments)

    monkeypatch.setattr(sweep, "check_memory", note)
    added = {**asked, "sweep": {"seeds": [1, 2, 3]}}
    fedpriv.run(added, out=folder, resume=True)
    fedpriv.run(added, out=folder, resume=True)
    assert checked_seeds == [[3]]


def test_a_first_step_is_refused_before_rounds_that_release_statistics_and_no_model(tmp_path: Path) -> None:
    """Before: both had one seed of noise, which cancelled in a difference of their releases."""
    asked = {**tree(tmp_path), "model": {"name": "column-moments", "columns": [0, 1]}}
    with pytest.raises(InputError, match=r"data.scale: model.name = \"column-moments\" releases statistics"):
        resolve_cell(asked, "test")


def test_a_regression_of_classes_is_refused_before_remote_silos_take_a_first_step(tmp_path: Path) -> None:
    """Before: guards were charged for a first step, and then refused the rounds."""
    asked = parse_scenario({**tree(tmp_path), "model": {"name": "mlp-regression"}}, "test")
    with pytest.raises(InputError, match=r"mlp-regression' does not fit .* whose labels are classes"):
        prepare_scenario(asked, {}, has_records=False)


def test_training_rounds_without_an_integer_form_are_refused_before_feature_scaling(tmp_path: Path) -> None:
    """Of a deployment, whose rounds are integers; a simulation of them can be planned."""
    ftrl = {"name": "dp-ftrl", "trust": "untrusted", "clip": 1.0, "step": 0.1, "mechanism": "bisr", "bands": 3}
    asked = parse_scenario({**tree(tmp_path), "algorithm": ftrl}, "test")

    with pytest.raises(InputError, match="cannot be made of integers"):
        prepare_scenario(asked, {}, for_release=True)
    _, _, (first,) = prepare_scenario(asked, {})
    assert first == first_of(asked.points[0].cell)


@pytest.mark.parametrize("engine", ["vectorized", "inprocess"])
def test_the_memory_of_training_rounds_is_estimated_before_feature_scaling_is_released(
    tmp_path: Path, engine: str
) -> None:
    """Was: `fedpriv run --dry-run` refused [data.scale], and told people to use `fedpriv run`."""
    need = estimate_run_memory(parse_scenario(tree(tmp_path), "test"), RunOptions(engine=engine))
    assert need is not None
    assert need.parts["rounds"] > 0


def guarded(folder: Path, asked: dict[str, Any]) -> list[Path]:
    return [path / "policy.toml" for path in prepare_silos(parse_scenario(asked, "test"), folder / "silos", 1)]


def test_a_guard_answers_feature_scaling_and_training_rounds_within_one_budget(tmp_path: Path) -> None:
    """`data split`'s policy allows both, each once; the same step again is the same bytes, another one refused."""
    asked = tree(tmp_path)
    cell = resolve_cell(asked, "test")
    first = first_of(cell)
    path = guarded(tmp_path, asked)[0]
    guard, query = guard_of(path), torch.zeros(4, dtype=torch.float64)
    words = json.dumps(first.canonical_data(), sort_keys=True)
    release = guard.answer("first", words, 1, query)
    assert torch.equal(guard.answer("first", words, 1, query), release)
    with pytest.raises(RunError, match="answered already"):
        guard.answer("first", words, 1, query + 1.0)
    rounds = apply_scaling(cell, scaling_from_moments((0, 6), -release.numpy()))
    model = load_task(rounds).objective.initial()
    for t in (1, 2):
        guard.answer("rounds", json.dumps(rounds.canonical_data(), sort_keys=True), t, model)
    policy = read_policy(path)
    assert math.hypot(*charged(guard._ledger)) <= policy.allow.budget * (1.0 + 1e-9)
    with pytest.raises(RunError, match="the budget is"):
        guard.answer("more", json.dumps(rounds.canonical_data(), sort_keys=True), 1, model)


def test_a_guard_refuses_training_rounds_without_released_feature_scaling_in_one_line(tmp_path: Path) -> None:
    asked = tree(tmp_path)
    path = guarded(tmp_path, asked)[0]
    words = json.dumps(resolve_cell(asked, "test").canonical_data(), sort_keys=True)
    with pytest.raises(RunError, match=r"data.scale: .* `fedpriv run` takes") as refused:
        guard_of(path).answer("run", words, 1, torch.zeros(14, dtype=torch.float64))
    assert "\n" not in str(refused.value)


def test_a_silo_scales_its_features_by_the_means_and_deviations_of_the_scenario(tmp_path: Path) -> None:
    numbers = {"means": [0.5, 0.0], "deviations": [0.5, 1.0]}
    cell = resolve_cell({**tree(tmp_path, numbers), "model": {"name": "mlp"}}, "test")
    values = np.zeros((1, 7))
    shard = Shard(values, np.zeros(1, np.int64))
    assert shard.model_records(cell).features.tolist() == [[-1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    narrow = Shard(np.zeros((1, 3)), np.zeros(1, np.int64))
    with pytest.raises(InputError, match=r"data.scale: is for features that are numbers, 7 or more"):
        narrow.model_records(cell)


def test_a_guard_caches_records_separately_for_each_feature_scaling(tmp_path: Path) -> None:
    asked = tree(tmp_path)
    cell = resolve_cell(asked, "test")
    guard = guard_of(guarded(tmp_path, asked)[0])
    shift = Scaling((0, 6), (0.5, 0.5), (1.0, 1.0))
    plain, shifted = guard._views.records(assume_scaling(cell)), guard._views.records(apply_scaling(cell, shift))
    assert not torch.equal(plain.features, shifted.features)


def test_any_finite_released_moments_give_a_bounded_feature_scaling() -> None:
    for released in (np.zeros(4), np.full(4, 1e30), np.full(4, -1e30)):
        found = scaling_from_moments((0, 1), released)
        assert all(-1.0 <= mean <= 1.0 for mean in found.means)
        assert all(MIN_DEVIATION <= deviation <= 1.0 for deviation in found.deviations)
    with pytest.raises(ValueError, match="4 finite moments"):
        scaling_from_moments((0, 1), np.full(4, np.nan))
    assert Scaling((1,), (0.5,), (0.25,)).apply(np.array([[2.0, 1.0]])).tolist() == [[2.0, 2.0]]
    for features in (np.zeros((1, 1)), np.zeros(2), np.zeros((1, 2), np.int64)):
        with pytest.raises(InputError, match=r"data\.scale: is for features that are numbers, 2 or more"):
            Scaling((1,), (0.5,), (0.25,)).apply(features)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"data": {"scale": {"share": 1.0}}}, "data.scale.share"),
        ({"data": {"scale": {}}}, "data.scale.share: this key is missing"),
        ({"data": {"scale": {"share": 0.5, "means": [0.0, 0.0]}}}, "means and deviations are given together"),
        (
            {"data": {"scale": {"share": 0.5, "means": [0.0], "deviations": [1.0]}}},
            "has 1 means, and the table has 2",
        ),
        (
            {"data": {"scale": {"share": 0.5, "means": [0.0, 0.0], "deviations": [0.0, 1.0]}}},
            "deviations lie in 0.0625",
        ),
        (
            {"data": {"scale": {"share": 0.5, "means": [0.0, 2.0], "deviations": [0.5, 1.0]}}},
            "means lie in -1",
        ),
        ({"federation": {"sampling": "poisson"}}, 'federation.sampling = "poisson" has none'),
        ({"deployment": {"missing": "continue"}}, "needs all silos"),
        ({"privacy": {"unit": "user", "records": 2}}, 'privacy.unit = "user"'),
    ],
)
def test_invalid_private_feature_scaling_settings_are_refused_in_one_line(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    asked = tree(tmp_path)
    if "unit" in changed.get("privacy", {}):
        asked["data"]["table"]["person"] = "patient"
    for section, keys in changed.items():
        asked[section] = {**asked.get(section, {}), **keys}
    with pytest.raises(InputError) as refused:
        resolve_cell(asked, "test")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_private_feature_scaling_is_refused_for_data_without_numeric_columns(tmp_path: Path) -> None:
    asked = tree(tmp_path)
    asked["data"]["table"]["columns"] = {"sex": {"values": ["f", "m"]}}
    for data in (asked["data"], {"name": "synthetic", "scale": {"share": 0.5}}):
        with pytest.raises(InputError, match="needs a table with a column of numbers"):
            resolve_cell({**asked, "data": data}, "test")


def test_planning_training_rounds_before_feature_scaling_is_released_is_refused(tmp_path: Path) -> None:
    """Plans are made of numbers: whoever gets to one without them is told what to do."""
    cell = cell_of(tmp_path)
    with pytest.raises(
        InputError, match=r"data.scale: .* `fedpriv run` takes; use it, or leave \[data.scale\] out"
    ):
        make_plan(cell, load_task(cell).objective)
    assert first_step_cell(assume_scaling(cell)) is None


GIVEN = {"share": 0.9, "means": [0.1, -0.2], "deviations": [0.5, 0.25]}


@pytest.mark.parametrize("arithmetic", ["float", "integers"])
@pytest.mark.parametrize("trust", TRUSTS)
def test_given_feature_means_are_charged_in_full_in_ledger_statement_and_results_table(
    tmp_path: Path, trust: str, arithmetic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """μ = 1 asked for with share .9: every view says 1.  Claimed before: .3162 (ε 1.199 where it was 4.377)."""
    run = {"arithmetic": arithmetic}
    asked = tree(tmp_path, GIVEN, algorithm={"trust": trust}, run=run)
    asked["privacy"] = {"relation": "replace-one", "mu": 1.0}
    engine = "vectorized" if arithmetic == "float" else "inprocess"
    folder = fedpriv.run(asked, engine=engine, out=tmp_path / "run").folder
    (entry,) = read_ledger(folder)
    assert entry.agrees
    assert entry.claimed_mu == pytest.approx(1.0, abs=1e-9)
    assert entry.claimed_mu <= 1.0
    assert [stream.party_name for stream in entry.streams if stream.step == FIRST_STEP] == ["elsewhere"]
    (statement,) = make_statements(read_results(folder))
    assert [level.mu for level in statement.levels] == ["1"]
    assert EXTERNAL_STEP_NOTE in statement.assumptions
    assert any("charged with μ = 0.9487, not released here" in each for each in statement.mechanisms)
    table = (folder / "table.md").read_text()
    assert EXTERNAL_STEP_NOTE in table
    assert "μ at most 1 (zCDP 0.5)" in table
    ledger(folder, as_json=False)
    assert "elsewhere, first step" in capsys.readouterr().out


@pytest.mark.parametrize("less", [3.0, 1.005, 1.0 + 2e-7])
def test_the_ledger_disagrees_if_external_feature_scaling_is_charged_less_than_its_budget_share(
    tmp_path: Path, less: float
) -> None:
    """A row that somebody wrote: less noise is charged to the step elsewhere, and the claim says so, too.

    A little less is near enough to the scenario's target, and only the step's own share tells it.
    """
    folder = fedpriv.run(tree(tmp_path, GIVEN), out=tmp_path / "run").folder
    told = json.loads((folder / "results.json").read_text())
    (cell,) = told["cells"]
    (entry,) = read_ledger(folder)
    assert entry.agrees
    other = next(release for release in cell["releases"] if release["owner"] == "elsewhere")
    std = other["std"]
    other["std"] = std * (1.0 + 5e-9)  # rounding
    assert agrees_with_figures_of_its_own(folder, told, cell)
    other["std"] = std * less
    assert not agrees_with_figures_of_its_own(folder, told, cell)


def test_feature_scaling_of_smaller_weight_than_the_scenarios_is_seen(tmp_path: Path) -> None:
    """Gains: "ok" for the same μ of half of the noise of the first step."""
    folder = fedpriv.run(tree(tmp_path), out=tmp_path / "run").folder
    told = json.loads((folder / "results.json").read_text())
    for release in told["cells"][0]["releases"]:
        if release.get("step") == FIRST_STEP:
            release["std"] /= 2.0
            release["per_record"] /= 2.0
    (folder / "results.json").write_text(json.dumps(told))
    (entry,) = read_ledger(folder)
    assert entry.claim is not None
    assert entry.claim.guarantee.mu == pytest.approx(entry.claimed_mu)
    assert entry.disagreement is not None
    assert entry.disagreement.startswith("per_record of silo 0 is ")


def test_training_rounds_attributed_to_an_external_party_are_rejected(tmp_path: Path) -> None:
    """The step elsewhere is charged with the whole budget, and the rounds with nothing: their parties tell it."""
    folder = fedpriv.run(tree(tmp_path, GIVEN), out=tmp_path / "run").folder
    told = json.loads((folder / "results.json").read_text())
    (cell,) = told["cells"]
    (entry,) = read_ledger(folder)
    assert entry.resolved_cell is not None
    assert entry.claimed_mu is not None
    unit, sizes = entry.resolved_cell.privacy.protected_unit, entry.resolved_cell.batch_sizes
    other = next(release for release in cell["releases"] if release["owner"] == "elsewhere")
    weight = unit.weight_in_mean(silo_weights(entry.resolved_cell), sizes)
    other["std"] *= stream_from_data(other).mu / entry.claimed_mu
    hidden = dict(cell["releases"][-1], owner="elsewhere", std=1e6, per_record=weight)
    assert not agrees_with_figures_of_its_own(folder, told, {**cell, "releases": [other, hidden]})
    (entry,) = read_ledger(folder)
    assert entry.disagreement == "releases are not those of all rounds, silos and steps of its scenario"


def test_the_ledger_accepts_given_feature_means_in_a_run_without_noise(tmp_path: Path) -> None:
    changes = {"privacy.mode": "none"}
    folder = fedpriv.run(tree(tmp_path, GIVEN), set=changes, out=tmp_path / "run").folder
    (entry,) = read_ledger(folder)
    assert entry.disagreement is None


def agrees_with_figures_of_its_own(folder: Path, told: dict[str, Any], cell: dict[str, Any]) -> bool:
    """Whether the ledger agrees with a row whose figures are those of its releases."""
    claim = compute_claim(list(map(stream_from_data, cell["releases"])))
    assert claim is not None
    figures = claim.guarantee.figures(cell["delta"])
    (folder / "results.json").write_text(json.dumps({**told, "cells": [{**cell, **figures}]}))
    (entry,) = read_ledger(folder)
    return entry.agrees


@pytest.mark.parametrize("key", ["budget", "_budget"])
def test_a_scenario_file_that_sets_the_internal_privacy_budget_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(InputError, match=key):
        resolve_cell({**tree(tmp_path), key: {"rounds_mu": 100.0, "other_mu": 0.0}}, "test")


def test_feature_scaling_released_in_a_run_is_charged_there_only_once(tmp_path: Path) -> None:
    """Numbers of a run, given to another one, are charged there; the run that took the step has it once."""
    asked = tree(tmp_path)
    whole = fedpriv.run(asked, out=tmp_path / "whole").folder
    again = fedpriv.run(tree(tmp_path, scale_of(whole)), out=tmp_path / "again").folder
    (own,), (other,) = read_ledger(whole), read_ledger(again)
    assert own.claimed_mu == pytest.approx(other.claimed_mu, rel=1e-9)
    assert not any(stream.party_name == "elsewhere" for stream in own.streams)


@pytest.mark.parametrize("asked_for", [{"mu": 0.7}, {"epsilon": 3.0}, {"zcdp": 0.1}])
def test_the_privacy_budget_is_preserved_when_a_cell_is_copied_or_serialized(
    tmp_path: Path, asked_for: dict[str, Any]
) -> None:
    """Guarantee: rounds² + beside² is at most the promise's square, here and at whoever gets the cell as text."""
    asked = tree(tmp_path)
    asked["privacy"] = {"relation": "replace-one", **asked_for}
    cell = resolve_cell(asked, "test")
    promise, budget = cell.privacy.target_mu, cell.budget
    assert promise is not None
    assert budget.rounds_mu is not None
    assert promise * (1 - 1e-12) <= math.hypot(budget.rounds_mu, budget.other_mu) <= promise
    assert budget == RunBudget(pytest.approx(promise * 0.75**0.5), pytest.approx(promise * 0.5))
    numbers = apply_scaling(cell, Scaling((0, 6), (0.0, 0.0), (0.5, 0.5)))
    assert numbers.budget == budget
    assert resolve_cell(json.loads(json.dumps(numbers.canonical_data())), "sent").budget == budget
    first = first_of(cell)
    assert (first.target_mu, first.budget.other_mu) == (budget.other_mu, budget.rounds_mu)
    assert resolve_cell(first.canonical_data(), "sent").target_mu == first.target_mu


def test_evaluations_spend_their_own_mu_whatever_share_feature_scaling_takes(tmp_path: Path) -> None:
    """evaluation.mu = .5 was .158 at share .9, and .354 at share .5: test records take part in no first step."""
    spent = []
    for share in (0.1, 0.5, 0.9):
        asked = {**tree(tmp_path, {**GIVEN, "share": share}), "evaluation": {"records": 5, "mu": 0.5}}
        cell = resolve_cell(asked, "test")
        own = make_evaluation_plan(cell, load_task(cell).objective)
        assert own is not None
        assert evaluation_cell(cell).budget == RunBudget(0.5)
        spent.append(evaluation_mu(make_evaluation_streams(own)))
    assert spent == pytest.approx([0.5] * 3, rel=1e-9)


def test_a_guard_charges_training_rounds_and_feature_scaling_separately(tmp_path: Path) -> None:
    """Means from elsewhere cost a guard nothing, since it released nothing; a step here is a run of its own."""
    asked = tree(tmp_path, {"share": 0.9})
    asked["privacy"] = {"relation": "zero-out", "mu": 1.0}
    whole = resolve_cell(asked, "test")
    rounds, first = apply_scaling(whole, Scaling((0, 6), (0.1, -0.2), (0.5, 0.25))), first_of(whole)
    guard = guard_of(guarded(tmp_path, asked)[0])
    words, step = (json.dumps(cell.canonical_data(), sort_keys=True) for cell in (rounds, first))
    guard.answer("rounds", words, 1, load_task(rounds).objective.initial())
    assert charged(guard._ledger) == pytest.approx([math.sqrt(0.1)], rel=1e-9)
    guard.answer("first", step, 1, torch.zeros(4, dtype=torch.float64))
    assert charged(guard._ledger) == pytest.approx([math.sqrt(0.1), math.sqrt(0.9)], rel=1e-9)


@pytest.mark.slow
def test_only_one_function_copies_cells_with_a_changed_privacy_target() -> None:
    """Guarantee: no copy of a cell gets another [privacy] or [data] with its old budget; see
    `Cell.derive_cell`.
    """
    found = []
    for path in sorted(Path(fedpriv.__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "model_copy":
                for given in ast.walk(call):
                    if isinstance(given, ast.Dict):
                        keys = [getattr(key, "value", None) for key in given.keys]
                        found += [(path.name, key) for key in keys if key in ("privacy", "_budget", "budget")]
    assert found == [("schema.py", "privacy")]
