"""Each silo alone: its fit, its folds, what a released model gains; federations that gain and that lose."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedpriv
from fedpriv.addons.worth import local_models as fits
from fedpriv.addons.worth import worth
from fedpriv.addons.worth.local_models import PENALTIES, LinearHazards, SiloRecords, assign_folds
from fedpriv.addons.worth.references import MAX_REFERENCE_SILOS, LocalModelScores, References, deviation_over_silos
from fedpriv.addons.worth.worth import compute_references, evaluate_gains, find_linear_objective, load_silo_records
from fedpriv.core.errors import InputError
from fedpriv.loss.objective import Records
from fedpriv.scenario.load import resolve_cell
from fedpriv.study.results import read_claims
from tests.loss.test_survival import tree_of as hazards
from tests.study.builders import (
    added_cell,
    bytes_below,
    cell_on,
    first_silo,
    invoke,
    own_cache,
    thread_counts,
    two_classes,
)

__all__ = ["own_cache"]


@pytest.mark.slow
def test_pooling_small_silos_gains_about_fifteen_points_over_local_models() -> None:
    """|m| = .75, 15 records a silo: ten such federations gain 14 to 18 points by pooling."""
    cell = added_cell("worth-gains", 40, 15, 0.75)
    known = compute_references(cell)
    pooled = evaluate_gains(cell, known, worth.fit_pooled_model(cell))
    assert known.of == 40
    assert len(known.silos) == MAX_REFERENCE_SILOS
    assert 0.55 < known.mean_score < 0.70
    assert 0.12 < pooled.gain < 0.20


def test_a_local_model_minimizes_the_mean_loss_with_a_ridge_penalty_on_weights() -> None:
    cell = added_cell("worth-minimum")
    objective, held = first_silo(cell)
    penalty = fits.make_penalties(objective, held.train, 0.1)
    model = fits.fit_model(objective, held.train, penalty, np.zeros(objective.dimension), 1e-6)
    point = torch.tensor(model).requires_grad_()
    loss = objective.losses(point, held.train).mean() + (torch.from_numpy(penalty) * point.square()).sum() / 2.0
    (gradient,) = torch.autograd.grad(loss, point)
    assert float(gradient.abs().max()) < 1e-6
    assert (penalty.reshape(2, -1)[:, -1] == 0.0).all()
    assert (penalty.reshape(2, -1)[:, :-1] == 0.1).all()


@pytest.mark.slow
def test_pooling_loses_under_labels_flipped_in_half_of_the_silos_even_with_own_intercepts() -> None:
    """Golden 4: a pooled model is a coin there, each silo alone is not."""
    train, test = two_classes(8, 40, 1.5, 1_000)
    sites = np.repeat(np.arange(8), 40)
    labels = np.where(sites % 2 == 1, 1 - train[1], train[1])
    objective, model = first_silo(added_cell("worth-flipped", 8, 40, 1.5))
    scores, united = [], []
    features, tests = (
        torch.from_numpy(np.concatenate([records / 8.0, np.ones((len(records), 1))], axis=1))
        for records in (train[0], test[0])
    )
    pooled = Records(features, torch.from_numpy(labels))
    x, _ = fits.fit_local_model(objective, SiloRecords(-1, "pooled", pooled, np.arange(320), model.test), 0)
    for silo in range(8):
        own = sites == silo
        right = 1 - test[1] if silo % 2 else test[1]
        read = Records(features[own], torch.from_numpy(labels[own]))
        tested = Records(tests, torch.from_numpy(right))
        held = SiloRecords(silo, f"silo {silo}", read, np.arange(40), tested)
        scores.append(fits.score_model(objective, fits.fit_local_model(objective, held, 0)[0], held.test))
        united.append(fits.score_model(objective, fits.recalibrate(objective, held, x), held.test))
    assert np.mean(scores) > 0.8
    assert np.mean(united) < np.mean(scores) - 0.2


def test_local_models_of_label_skewed_silos_are_scored_on_test_records_of_their_own_skew() -> None:
    """On the common test set a silo of one class alone would be at one half."""
    cell = added_cell("worth-skewed", 4, 50, data={"partition": "shards", "shards": 1})
    known = compute_references(cell)
    assert known.mean_score > 0.95
    for silo in (silo for silo in known.silos if silo.majority == 1.0):
        assert (silo.penalty, silo.constant) == (PENALTIES[0], 1.0)


def test_recalibration_fits_only_intercepts_and_one_common_scale() -> None:
    cell = added_cell("worth-intercepts")
    objective, held = first_silo(cell)
    released = 1e-4 * fits.fit_local_model(objective, held, 0)[0]
    own, weights = fits.recalibrate(objective, held, released).reshape(2, -1), released.reshape(2, -1)
    scale = own[0, 0] / weights[0, 0]
    assert scale > 100.0
    assert np.allclose(own[:, :-1], scale * weights[:, :-1], rtol=1e-9)
    assert fits.score_model(objective, own.ravel(), held.train) > 0.8


def test_cross_validation_folds_keep_units_whole_and_balance_classes() -> None:
    units = np.repeat(np.arange(30), 3)
    labels = torch.from_numpy(np.repeat(np.arange(30) % 2, 3))
    read, tested = Records(torch.zeros(90, 2), labels), Records(torch.zeros(1, 2), labels[:1])
    held = SiloRecords(0, "silo 0", read, units, tested)
    folds = assign_folds(held, seed=5)
    assert all(len(set(folds[units == unit])) == 1 for unit in range(30))
    for fold in range(5):
        assert int((folds == fold).sum()) == 18
        assert 6 <= int(labels[torch.from_numpy(folds == fold)].sum()) <= 12
    assert not (folds == assign_folds(held, seed=6)).all()


@pytest.mark.slow
def test_a_model_gains_zero_over_itself_and_local_scores_are_read_from_the_cache(own_cache: Path) -> None:
    cell = added_cell("worth-cached", 1, 40, 1.0)
    known = compute_references(cell)
    (file,) = own_cache.iterdir()
    x, _ = fits.fit_local_model(find_linear_objective(cell), load_silo_records(cell)[1][0], cell.seed)
    assert evaluate_gains(cell, known, x).gain == 0.0
    tree = json.loads(file.read_text())
    tree["silos"][0]["score"] = 0.25
    file.write_text(json.dumps(tree))
    assert compute_references(cell).mean_score == 0.25
    file.write_text("{")
    assert compute_references(cell) == known


@pytest.mark.slow
def test_other_records_seeds_or_models_have_cached_local_scores_of_their_own(own_cache: Path) -> None:
    compute_references(added_cell("worth-first"))
    compute_references(cell_on("worth-first", 2, 40, model={"feature_norm": 4.0}))
    compute_references(cell_on("worth-first", 2, 40, seed=4))
    assert len(list(own_cache.iterdir())) == 3


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"name": "cnn"}, "data": {"name": "synthetic"}}, "worth fits these models alone"),
        (
            {
                "privacy": {"unit": "client", "records": 2},
                "algorithm": {"trust": "trusted"},
                "federation": {"silos": 1, "clients": 20, "cohort": 4, "rounds": 5},
            },
            "a client alone has too few records",
        ),
    ],
)
def test_scenarios_without_linear_scores_or_with_client_units_have_no_local_models(
    sections: dict[str, Any], said: str
) -> None:
    tree = added_cell("worth-refused", 4).canonical_data()
    for name, keys in sections.items():
        tree[name] = keys if name in ("federation", "model") else {**tree[name], **keys}
    with pytest.raises(InputError, match=said):
        compute_references(resolve_cell(tree, "test"))


@pytest.mark.slow
def test_the_worth_command_compares_a_run_with_local_models_by_sweep_point(tmp_path: Path) -> None:
    tree = added_cell("worth-run", 3).canonical_data()
    results = fedpriv.run({**tree, "sweep": {"privacy.mu": [0.05, 8.0], "seeds": 2}}, out=tmp_path / "run")
    assert len(results) == 4
    done = invoke("worth", tmp_path / "run", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [row["point"]["privacy.mu"] for row in rows] == [0.05, 8.0]
    assert rows[0]["gain"] < rows[1]["gain"]
    assert rows[0]["standard_error"] > 0.0
    text = invoke("worth", tmp_path / "run").stdout
    (line,) = [line for line in text.splitlines() if "each silo alone, nothing released" in line]
    alone = [np.mean([silo["score"] for silo in known["silos"]]) for known in rows[0]["references"]]
    assert f"{100.0 * np.mean(alone):.1f}" in line
    assert "mean over 2 seeds" in text
    assert "On these records joining" in text


@pytest.mark.slow
def test_the_worth_command_writes_nothing_into_the_run_folder(tmp_path: Path) -> None:
    """Nothing that was computed from a silo's records lands where a run is published."""
    fedpriv.run(added_cell("worth-folder", 3).canonical_data(), out=tmp_path / "run")
    before = bytes_below(tmp_path / "run")
    invoke("worth", tmp_path / "run")
    assert before == bytes_below(tmp_path / "run")


def test_the_standard_deviation_of_local_scores_is_over_silos() -> None:
    silo = LocalModelScores(0, "a", 10, 10, 0.5, 0.5, 0.1, 0.5, 0.5)
    known = References("accuracy", 2, (silo, LocalModelScores(1, "b", 10, 10, 0.7, 0.5, 0.1, 0.5, 0.5)))
    assert known.mean_score == pytest.approx(0.6)
    assert deviation_over_silos([silo.score for silo in known.silos]) == pytest.approx(0.1 * 2**0.5)


@pytest.mark.slow
def test_local_models_are_computed_in_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of torch on a busy machine took 7 minutes where one takes 5 s."""
    cell, evaluations = added_cell("threads"), list[int]()
    tree = cell.canonical_data()
    fedpriv.run({**tree, "sweep": {"privacy.mu": [0.5, 8.0], "seeds": 1}}, out=tmp_path / "run")
    kind = type(find_linear_objective(cell))
    real = kind.evaluate

    def evaluate(self: Any, *arguments: Any) -> Any:
        evaluations.append(torch.get_num_threads())
        return real(self, *arguments)

    def compare() -> None:
        worth.compare_run(tmp_path / "run", read_claims(tmp_path / "run"), with_personal=True)
        worth.evaluate_gains(cell, compute_references(cell), worth.fit_pooled_model(cell))

    monkeypatch.setattr(kind, "evaluate", evaluate)
    assert thread_counts(monkeypatch, compare) | set(evaluations) == {1}


@pytest.mark.slow
def test_local_hazard_models_minimize_the_penalized_loss_and_beat_constant_hazards(tmp_path: Path) -> None:
    """Age moves the hazard: each of two clinics beats constant hazards, and the likelihood is what is compared."""
    cell = resolve_cell(hazards(tmp_path), "test")
    objective, held = first_silo(cell)
    point, kappa = fits.fit_local_model(objective, held, cell.seed)
    assert kappa < PENALTIES[0]
    losses = objective.losses(torch.from_numpy(point), held.test)
    assert float(losses.mean()) == pytest.approx(-fits.score_model(objective, point, held.test), rel=1e-12)
    moved = torch.from_numpy(point).requires_grad_()
    loss = objective.losses(moved, held.train).mean() + kappa * moved.square().sum() / 2.0
    (gradient,) = torch.autograd.grad(loss, moved)
    assert float(gradient.abs().max()) < 1e-6
    known = compute_references(cell)
    assert known.metric == "-loss"
    assert all(silo.score > silo.constant for silo in known.silos)
    assert evaluate_gains(cell, known, worth.fit_pooled_model(cell)).gain == pytest.approx(0.0, abs=0.1)
    with pytest.raises(InputError, match="no learner of hazards"):
        compute_references(cell, with_any_learner=True)


def test_the_constant_hazard_loss_matches_smoothed_odds_of_the_death_table(tmp_path: Path) -> None:
    objective = find_linear_objective(resolve_cell(hazards(tmp_path), "test"))
    assert isinstance(objective, LinearHazards)
    bins = objective.bins
    survived, died = torch.tensor([bins] * 7), torch.tensor([bins + 1] * 3)
    log_odds = torch.tensor([math.log(3.5 / 7.5), *[math.log(0.5 / 7.5)] * (bins - 1)], dtype=torch.float64)
    wanted = float(torch.nn.functional.softplus(log_odds).sum())
    assert objective.constant_loss(torch.cat([survived, died]), survived[:2]) == pytest.approx(wanted)


def test_local_hazard_models_with_a_hidden_layer_are_refused(tmp_path: Path) -> None:
    tree = hazards(tmp_path) | {"model": {"name": "hazard-mlp"}}
    with pytest.raises(InputError, match="hazard regression"):
        compute_references(resolve_cell(tree, "test"))


@pytest.mark.slow
def test_the_worth_command_reports_hazard_models_by_negative_loss(tmp_path: Path) -> None:
    tree = hazards(tmp_path, privacy={"mu": None, "epsilon": 3.0, "delta": 1e-5})
    del tree["privacy"]["mu"], tree["seed"]
    results = fedpriv.run(tree, out=tmp_path / "run")
    text = invoke("worth", results.folder).stdout
    assert "-loss" in text
    assert re.search(r"each silo alone, nothing released +-\d\.\d{4}", text)


@pytest.mark.slow
def test_boosted_trees_are_tried_with_one_record_of_a_class_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more than 10,000 records they would stop early on a sample that needs two records of each class."""
    ridges = pytest.importorskip("sklearn.kernel_ridge", reason="needs pip install 'fedpriv[learners]'")

    class Zeros:
        """No kernel of 10,000 records, which would take a minute."""

        def __init__(self, **_: object) -> None: ...

        def fit(self, *_: object) -> "Zeros":
            return self

        def predict(self, queries: Any) -> Any:
            return np.zeros((len(queries), 2))

    monkeypatch.setattr(ridges, "KernelRidge", Zeros)
    objective, held = first_silo(added_cell("rare", 2, 60, 1.0))
    features = torch.from_numpy(np.random.default_rng(0).standard_normal((12_600, 21)))
    train = Records(features, (torch.arange(12_600) == 7).long())
    silo = SiloRecords(0, "silo 0", train, np.arange(12_600), held.test)
    local = fits.fitted(objective, train, 1.0)
    assert 0.0 <= fits.score_best_learner(objective, silo, 0, local)[0] <= 1.0


def test_a_damaged_model_of_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    results = fedpriv.run(added_cell("damaged", 2, 40).canonical_data(), out=tmp_path / "run")
    claims = read_claims(results.folder)
    with (results.folder / claims.cells[0]["model"]).open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (10**30,)})
    with pytest.raises(InputError, match="cannot be read"):
        worth.compare_run(results.folder, claims)
