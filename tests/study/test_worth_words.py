"""Words of `fedpriv worth`: what one seed, one split or equal seeds do not tell; the fit of many records."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedpriv
from fedpriv.addons.worth import local_models as fits
from fedpriv.addons.worth.break_even import describe_break_even, estimate_break_even, format_error
from fedpriv.addons.worth.command import WorthRequest, _describe_budgets, _describe_gains, _fill_cache
from fedpriv.addons.worth.joining import JoiningRequest, JoiningResult, SplitGains
from fedpriv.addons.worth.joining_command import make_gain_chart, print_joining
from fedpriv.addons.worth.worth import (
    Gains,
    PointGains,
    compare_run,
    compute_references,
    evaluate_gains,
    fit_pooled_model,
    load_silo_records,
    make_evaluator,
)
from fedpriv.cli.app import app
from fedpriv.core.errors import InputError
from fedpriv.data.schema import TableSchema
from fedpriv.scenario.load import resolve_cell
from fedpriv.show.charts import Chart
from fedpriv.study.results import read_claims
from tests.study.builders import (
    added_cell,
    cell_on,
    first_silo,
    flipped_scenario,
    invoke,
    joining,
    own_cache,
    written,
)

__all__ = ["own_cache"]
GRID = np.array([0.1, 1.0, 30.0])


def row_of(*gains: float, mu: float = 1.0) -> PointGains:
    of_seeds = tuple(Gains((0.5,), (0.5,), (gain,), (0.5,)) for gain in gains)
    return PointGains({"privacy.mu": mu}, tuple(range(len(gains))), (), of_seeds, {})


def test_the_verdict_is_undecided_exactly_if_the_interval_of_the_gain_covers_zero() -> None:
    rows = [
        row_of(0.020, 0.021, 0.022, mu=8.0),
        row_of(-0.020, -0.021, -0.022, mu=0.1),
        row_of(-0.01, 0.02, 0.0, mu=1.0),
        row_of(0.02, 0.03, mu=2.0),  # two seeds: Student's t is 12.7 there
        row_of(0.3, mu=4.0),
        row_of(0.1, 0.1, mu=5.0),
    ]
    lines = _describe_gains(rows, "accuracy")
    # The mean of three seeds, ± 4.303 · .1 / √3: before, the sentence was "joining gains: privacy.mu = 8.0."
    assert lines[0] == (
        "On these records joining gains: the gain is +2.1 points of accuracy (95 % from +1.9 to +2.3) "
        "at privacy.mu = 8.0.\n"
    )
    assert lines[1] == (
        "On these records joining loses: the gain is -2.1 points of accuracy (95 % from -2.3 to -1.9) "
        "at privacy.mu = 0.1.\n"
    )
    assert "not told apart from staying alone: the gain is +0.3 points of accuracy (95 % from " in lines[2]
    verdict = "no standard error and no verdict: the gain is"
    assert (
        lines[3]
        == f"On these records there is one seed, so {verdict} +30.0 points of accuracy at privacy.mu = 4.0.\n"
    )
    assert (
        f"every seed has the same gain, so there is {verdict} +10.0 points of accuracy at privacy.mu = 5.0"
        in lines[4]
    )
    (loss, *_) = _describe_gains(rows[:1], "loss")
    assert "the gain is +0.0210 in loss (95 % from" in loss
    for row in rows[:4]:
        assert row.interval is not None
        covers = row.interval[0] <= 0.0 <= row.interval[1]
        assert covers == (row.point["privacy.mu"] in (1.0, 2.0))
    assert all("s.e." not in line for line in _describe_gains([row_of(0.3)], "accuracy"))


@pytest.mark.parametrize(
    ("error", "words"), [(None, "none"), (0.0, "none"), (0.01, "<0.1"), (0.06, "0.1"), (1.23, "1.2")]
)
def test_no_standard_error_is_printed_as_zero(error: float | None, words: str) -> None:
    assert format_error(error, 1) == words


def test_budget_shares_are_described_only_for_sweep_points_with_partial_budgets() -> None:
    rows = [
        dataclasses.replace(row_of(0.02, mu=mu), budget_shares=shares)
        for mu, shares in ((1.0, {"a": 1.0, "b": 0.5}), (2.0, {"a": 1.0, "b": 0.1}), (4.0, {"a": 1.0, "b": 1.0}))
    ]
    assert _describe_budgets(rows) == [
        "At privacy.mu = 1.0: ε is the whole budget, of which each silo's records spend a share: a 1, b 0.5.\n",
        "At privacy.mu = 2.0: ε is the whole budget, of which each silo's records spend a share: a 1, b 0.1.\n",
    ]
    assert _describe_budgets(rows[:1])[0].startswith("ε is the whole budget")
    assert _describe_budgets(rows[1:])[0].startswith("At privacy.mu = 2.0: ε is")  # before: said of both points
    assert _describe_budgets(rows[2:]) == []


def test_the_break_even_is_never_only_if_its_interval_has_no_crossing() -> None:
    draw = np.random.default_rng(0)
    gains = -0.01 + 0.03 * draw.standard_normal((1, 10, 1)) + np.zeros((3, 10, 2))
    unsure = estimate_break_even(GRID, gains, 0.5, monotone=True)
    assert np.isinf(unsure.epsilon)
    assert describe_break_even(unsure, GRID, -0.01, -0.2) == "above 30 (below 0.1 to above 30)"
    sure = estimate_break_even(GRID, gains - 0.2, 0.5, monotone=True)
    assert describe_break_even(sure, GRID, -0.2, -0.2) == "never, even without noise"


def result_of(gains: float, metric: str, splits: int = 0) -> JoiningResult:
    """A study of two ε: every silo of three has these gains at the first, and half of them at the second."""
    by_trust = {"untrusted": np.array([1.0, 0.5])[:, None, None] * np.full((2, 2, 3), gains)}
    means = {trust: values.mean(axis=2) for trust, values in by_trust.items()}
    silos, errors = (np.array([9] * 3), tuple("abc")), np.array([0.1, 0.1])
    split = SplitGains(-0.5, -0.5, means, means, by_trust, {}, "", errors, 0.1, 0.1, 0.5, *silos)
    request = JoiningRequest(Path("x"), (), ("untrusted",), (0.1, 30.0), splits)
    return JoiningResult(request, "x", 1e-5, 3, metric, 20, ("untrusted",), False, split, (split,) * splits, {})


def test_the_gain_chart_prints_losses_with_four_digits_and_accuracies_with_one() -> None:
    assert "ε = 0.1: -0.0300" in tips(make_gain_chart(result_of(-0.03, "-loss")))  # before: "-0.0"
    assert "ε = 0.1: -3.0" in tips(make_gain_chart(result_of(-0.03, "accuracy")))
    assert "ε is against the server" not in make_gain_chart(result_of(-0.03, "accuracy")).note


def test_joining_may_pay_above_the_grid_if_it_loses_on_the_whole_grid(capsys: pytest.CaptureFixture[str]) -> None:
    print_joining(result_of(-0.03, "accuracy"), as_json=False, plot=None)
    assert "Joining may pay from ε above 30" in " ".join(capsys.readouterr().out.split())  # before: "pays"


def test_the_factor_of_mu_against_a_silo_under_masks_is_rounded_up(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(-0.03, "accuracy")
    split = result.published
    by_trust = {
        name: {"secure-aggregation": getattr(split, name)["untrusted"]}
        for name in ("released", "recalibrated", "gains")
    }
    masked = dataclasses.replace(
        result, trusts=("secure-aggregation",), published=dataclasses.replace(split, **by_trust)
    )
    print_joining(masked, as_json=False, plot=None)
    assert "against it μ is 1.23 times as large" in " ".join(capsys.readouterr().out.split())  # √1.5 = 1.2247


def test_the_note_on_personal_models_is_of_all_splits(capsys: pytest.CaptureFixture[str]) -> None:
    """If the published split spared enough records and a drawn one did not, the release read the folds of some."""
    result = result_of(0.03, "accuracy", splits=2)
    spared, folds = (
        dataclasses.replace(result.published, personal={"untrusted": np.zeros((2, 2))}, judged=judged)
        for judged in ("spared", "folds")
    )
    request = dataclasses.replace(result.request, with_personal=True)
    for drawn, words in ((spared, "which the release did not read"), (folds, "that the release read")):
        study = dataclasses.replace(result, request=request, published=spared, splits=(spared, drawn))
        print_joining(study, as_json=False, plot=None)
        assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_local_scores_of_two_models_with_one_seed_are_both_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON had one entry a seed, so that of two models only one was there."""
    cells = [added_cell("two-models", 2, 20, 1.0, model={"feature_norm": norm}) for norm in (4.0, 8.0)]
    _fill_cache(cells, WorthRequest(only_local=True, as_json=True))
    assert [entry["seed"] for entry in json.loads(capsys.readouterr().out)["alone"]] == [3, 3]


@pytest.mark.parametrize("content", [None, b"no array"])
def test_a_missing_or_damaged_model_file_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    """It was a traceback."""
    tree = added_cell("no-model", 2, 20, 1.0).canonical_data()
    fedpriv.run(tree, out=tmp_path / "run")
    (model,) = (tmp_path / "run").rglob("*.npy")
    model.unlink() if content is None else model.write_bytes(content)
    with pytest.raises(InputError, match=r"0000\.npy: the model of a cell cannot be read"):
        compare_run(tmp_path / "run", read_claims(tmp_path / "run"))


def test_the_seeds_option_is_refused_for_the_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "results.json").touch()
    done = invoke("worth", str(tmp_path), "--seeds", "3")
    assert "--seeds" in str(done.exception)
    assert "run a scenario anew" in str(done.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pooled", "--splits", "2"], "--pooled: a grid has the pooled model in its table; leave it out"),
        (["--any-learner", "--epsilon", "1"], "--any-learner: is not compared in a grid; leave it out"),
        (
            ["--alone", "--plot", "gain.svg"],
            "--alone: fits local models alone, without a grid; leave out --splits",
        ),
        (["--alone", "--pooled"], "--alone: fits local models alone; leave out --pooled and --personal"),
        (["--alone", "--personal"], "--alone: fits local models alone; leave out --pooled and --personal"),
        (["--personal"], "--personal: a personal model starts from a released one; give a run's folder"),
    ],
)
def test_worth_options_without_effect_on_a_scenario_are_refused_with_the_remedy(
    options: list[str], message: str
) -> None:
    """They were ignored, all but the last."""
    done = CliRunner().invoke(app, ["worth", "heart-hospitals", *options])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith(message)
    assert "\n" not in str(done.exception)


def test_the_pooled_and_set_options_are_refused_for_the_folder_of_a_run(tmp_path: Path) -> None:
    """It was ignored."""
    (tmp_path / "results.json").touch()
    for options, message in (
        (["--pooled"], "--pooled: fits the records of a scenario; give that, not a run's folder"),
        (["--set", "seeds=2"], "--set: a run is compared as it ran"),
    ):
        done = CliRunner().invoke(app, ["worth", str(tmp_path), *options])
        assert isinstance(done.exception, InputError)
        assert str(done.exception).startswith(message)


def test_a_break_even_study_of_one_noise_seed_is_refused(tmp_path: Path) -> None:
    """Noise that all splits share is in no spread then."""
    path = flipped_scenario(tmp_path, "seeded", 2)
    with pytest.raises(InputError, match="--seeds 1: at least 2, and at most 1,000"):
        joining(path, (1.0,), 2, seeds=1)


def test_the_gain_interval_combines_errors_of_splits_and_of_noise_seeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two splits 0.2 apart and two seeds 0.1 apart: ± √(0.1² + 0.1² + 0.05²), and 12.7 times that for 95 %."""
    result = result_of(0.0, "accuracy", 2)
    first, second = result.splits
    gains = np.array([[0.0, 0.1], [0.2, 0.3]])  # (splits, seeds)
    parts = (
        dataclasses.replace(split, gains={"untrusted": np.ones((2, 1, 3)) * values[None, :, None]})
        for split, values in zip((first, second), gains, strict=True)
    )
    print_joining(dataclasses.replace(result, splits=tuple(parts)), as_json=False, plot=None)
    text = " ".join(capsys.readouterr().out.split())
    assert "+15.0 15.0 -175.6 to +205.6" in text
    assert "noise seeds, the same in each split" in text
    assert "Student's t of that part is 12.7 in the 95 % interval" in text


def tips(chart: Chart) -> str:
    return " ".join(mark.tooltip for panel in chart.panels for series in panel.series for mark in series.marks)


@pytest.mark.slow
def test_different_budget_shares_are_named_silo_by_silo(tmp_path: Path) -> None:
    path = flipped_scenario(tmp_path, "budgets")
    shares = "privacy.shares=[[1.0, 0.5, 0.02]]"
    words = ["worth", path, "--epsilon", "1", "--trust", "untrusted", "--splits", "0"]
    said = invoke(*words, "--set", shares).output
    assert "ε is the whole budget, of which each silo's records spend a share: s0 1, s1 0.5, s2 0.02." in said
    assert "of which each silo's" not in invoke(*words).output
    fedpriv.run(path, set={"privacy.shares": [[1.0, 0.5, 0.02]], "seeds": 2}, out=tmp_path / "run")
    said = invoke("worth", tmp_path / "run").output
    assert said.count("of which each silo's records spend a share: s0 1, s1 0.5, s2 0.02.\n") == 1
    rows = json.loads(invoke("worth", tmp_path / "run", "--json").stdout)["rows"]
    assert [row["shares"] for row in rows] == [{"s0": 1.0, "s1": 0.5, "s2": 0.02}]


@pytest.mark.slow
def test_budget_shares_name_all_silos_even_if_only_sixteen_are_evaluated(tmp_path: Path) -> None:
    path = flipped_scenario(tmp_path, "many-budgets", 18, 10)
    shares = f"privacy.shares=[[{', '.join(['1.0'] * 17)}, 0.25]]"
    words = ["worth", path, "--epsilon", "1", "--trust", "untrusted", "--splits", "0", "--set", shares]
    assert "s16 1, s17 0.25." in invoke(*words).output


@pytest.mark.slow
def test_one_split_or_one_noise_seed_gives_no_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = flipped_scenario(tmp_path, "worded")
    words = ["worth", path, "--epsilon", "1", "--trust", "untrusted"]
    text = invoke(*words, "--splits", "0").stdout
    (row,) = [line for line in text.splitlines() if line.startswith("untrusted")]
    assert "none" in row
    assert "2 noise seeds: no standard error" in text
    assert "one split: no interval" in text
    chart = make_gain_chart(joining(path, (1.0,), 1))
    assert "one split, no standard error" in chart.note
    assert "no standard error" in tips(chart)
    assert "± 0.0" not in tips(chart)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_fit_in_the_span_of_the_records_ends_at_the_same_model(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 2,000 records are fitted in other coordinates, and folds in float32; here 120 are, too."""
    draw = np.random.default_rng(0)
    features = draw.standard_normal((240, 20)) * np.geomspace(0.05, 2.0, 20)
    truth = features @ draw.standard_normal(20)
    labels: Any = (truth > 0).astype(np.int64) if kind == "classes" else np.tanh(truth)
    parts = (features[:120], labels[:120]), (features[120:], labels[120:])
    fedpriv.add_data(f"along-{kind}", lambda: parts, classes=2 if kind == "classes" else 0)
    model = {"name": "softmax-regression" if kind == "classes" else "linear-regression", "feature_norm": 8.0}
    cell = cell_on(f"along-{kind}", 1, 120, model=model)
    objective, held = first_silo(cell)
    pull = fits.Pull(0.1, np.full(objective.dimension, 0.2))
    start = np.zeros(objective.dimension)

    def fit_all() -> list[Any]:
        penalty = fits.make_penalties(objective, held.train, 0.01)
        exact = [fits.fit_model(objective, held.train, penalty, start, 1e-8, to) for to in (None, pull)]
        rough = fits.fit_model(objective, held.train, penalty, exact[0], 1e-4)
        return [*exact, rough, fits.fit_local_model(objective, held, 0)[1]]

    plain = fit_all()
    monkeypatch.setattr(fits, "_MIN_BASIS_RECORDS", 0)
    along = fit_all()
    for one, other in zip(plain[:2], along[:2], strict=True):
        assert not np.array_equal(one, other)
        assert one == pytest.approx(other, abs=1e-4)
    assert plain[2] == pytest.approx(along[2], abs=0.05)
    assert plain[3] == along[3]
    penalty = fits.make_penalties(objective, held.train, 0.01)
    none = fits.fit_model(objective, held.train, penalty, start, 1e-8, fits.Pull(0.0, pull.released))
    assert none.tobytes() == along[0].tobytes()  # golden 5 there, too


def regression(name: str, silos: int, each: int, noise: float) -> str:
    draw = np.random.default_rng(2)
    slope = draw.standard_normal(5) / 4

    def part(count: int) -> tuple[Any, Any]:
        features = draw.uniform(-1, 1, (count, 5))
        return features, np.clip(features @ slope + 0.3 + noise * draw.standard_normal(count), -1, 1)

    train, test = part(silos * each), part(2_000)
    fedpriv.add_data(name, lambda: (train, test), classes=0)
    return name


@pytest.mark.slow
def test_local_scores_of_a_regression_are_negated_losses_beside_a_mean_prediction() -> None:
    name = regression("worth-real", 6, 12, 0.3)
    model = {"name": "linear-regression", "feature_norm": 2.3}
    cell = cell_on(name, 6, 12, model=model, federation={"rounds": 4, "batch": 3})
    known = compute_references(cell)
    assert known.metric == "-loss"
    assert len(known.silos) == 6
    assert all(silo.score < 0.0 and silo.majority == 0.0 for silo in known.silos)
    bench = make_evaluator(cell, known)
    for silo, held in zip(known.silos, bench.silos, strict=True):
        mean = held.train.labels.mean()
        assert silo.constant == pytest.approx(-float((held.test.labels - mean).square().mean()) / 2.0)
        assert silo.balanced == silo.score
    united = evaluate_gains(cell, known, fit_pooled_model(cell))
    assert united.gain > 0.0  # 72 records know five slopes better than 12 do
    assert max(united.released) <= -(0.3**2) / 2.0 * 0.8
    assert known.mean_score > np.mean([silo.constant for silo in known.silos])
    assert compute_references(cell) == known  # from the cache


TABLE = {
    "public": True, "target": "ill", "classes": ["no", "yes"], "site": "site", "sites": ["a", "b"],
    "person": "who", "test_share": 0.4, "columns": {"x": {"range": [-4.0, 4.0]}},
}  # fmt: skip


def persons(folder: Path) -> Path:
    """40 persons at two sites with three records each; a person's records have one label."""
    draw = np.random.default_rng(4)
    lines = ["who,site,x,ill"]
    for person in range(40):
        ill = person % 2
        for _ in range(3):
            lines.append(f"p{person},{'ab'[person // 20]},{np.clip(draw.normal(2 * ill - 1), -4, 4):.6f},")
            lines[-1] += "yes" if ill else "no"
    path = folder / "persons.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_splits_by_person_keep_all_records_of_a_person_on_one_side(tmp_path: Path) -> None:
    """`[data] splits` with persons: no person's records stand in training and in tests, in any split."""
    TableSchema.model_validate(TABLE)
    tree = {
        "name": "persons",
        "data": {"name": str(persons(tmp_path)), "partition": "site", "table": TABLE, "splits": 2},
        "model": {"name": "softmax-regression", "feature_norm": 1.0},
        "federation": {"silos": 2, "rounds": 5, "epochs": 5, "batch": 10},
        "algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 0.5, "step": 2.0},
        "privacy": {"relation": "zero-out", "epsilon": 8.0, "delta": 1e-5, "unit": "user", "records": 3},
        "run": {"evaluations": 1},
    }
    sides = []
    for split in (1, 2):
        data: Any = tree["data"]
        held = load_silo_records(resolve_cell({**tree, "data": {**data, "split": split}}, "test"))[1]
        for silo in held:
            counts = np.bincount(silo.units)
            assert set(counts[counts > 0]) == {3}
            trained, tested = (set(part.features[:, 0].tolist()) for part in (silo.train, silo.test))
            assert not trained & tested
            assert len(silo.test.labels) % 3 == 0
            folds = fits.assign_folds(silo, 0)
            assert all(len(set(folds[silo.units == unit])) == 1 for unit in set(silo.units.tolist()))
        sides.append([tuple(sorted(silo.test.features[:, 0].tolist())) for silo in held])
    assert sides[0] != sides[1]
    splits = joining(written(tmp_path, tree), (8.0,), None).splits
    assert len(splits) == 2
    assert all(split.tests.sum() % 3 == 0 for split in splits)


def test_a_silo_with_one_unit_of_protection_keeps_its_local_model(own_cache: Path) -> None:
    """One unit's records cannot be held out from themselves: the silo stays alone."""
    cell = added_cell("few-units", 3, 10, 1.0)
    objective, held = first_silo(cell)
    one = dataclasses.replace(held, units=np.zeros(len(held.train.labels), np.int64))
    released = np.ones(objective.dimension)
    assert fits.fit_personal_model(objective, one, released, 0, 1.0).pull_weight == 0.0
