"""Break-even: standard errors over splits, the crossing, its words; splits of records and personal models."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import fedpriv
from fedpriv.addons.worth import joining as joined
from fedpriv.addons.worth import local_models as fits
from fedpriv.addons.worth.break_even import (
    chance_gain_rate,
    describe_break_even,
    estimate_break_even,
    estimate_gain,
    format_grid_epsilon,
    zero_crossing,
)
from fedpriv.addons.worth.joining_command import make_gain_chart
from fedpriv.addons.worth.local_models import PULL_WEIGHTS, Pull, fit_personal_model
from fedpriv.addons.worth.references import cache_folder, cache_key, find_references, read_references
from fedpriv.addons.worth.worth import compute_references, evaluate_gains
from fedpriv.core.errors import InputError
from fedpriv.data.own import Dataset, Sites
from fedpriv.data.partition import blank_training_share, counted_mask, draw_split
from fedpriv.scenario.load import resolve_cell
from fedpriv.show.page import draw_svg
from fedpriv.show.plots import save_chart
from fedpriv.show.table import render_tables
from fedpriv.study.results import read_claims
from tests.study.builders import (
    added,
    added_cell,
    first_silo,
    flipped_scenario,
    invoke,
    joining,
    own_cache,
    two_classes,
)

__all__ = ["own_cache"]
GRID = np.array([0.1, 0.3, 1.0, 3.0, 10.0, 30.0])


def test_without_noise_the_standard_error_of_the_gain_is_that_of_nadeau_and_bengio() -> None:
    """Golden 2: √(1 + 60 · 254/486) = 5.69 times the plain one, and noise is not scaled."""
    means = np.random.default_rng(0).standard_normal(60)
    plain = means.std(ddof=1) / math.sqrt(60)
    gain = estimate_gain(np.stack([means, means], axis=1), 254 / 486)
    assert gain.error == pytest.approx(plain * math.sqrt(1.0 + 60 * 254 / 486), rel=1e-9)
    noisy = np.random.default_rng(1).standard_normal((60, 2))
    noisy_gain = estimate_gain(noisy, 254 / 486)
    assert noisy_gain.error is not None
    assert noisy_gain.error < 0.35
    assert estimate_gain(means[:1, None], 0.5).error is None


def crossed(draw: np.random.Generator, splits: int, seeds: int, shared: float, ratio: float) -> Any:
    """Gains of true mean 0, (splits, seeds), of variance 1: a fraction `shared` of it is the seeds' own.

    Half of the rest is due to the splits, whose records have `ratio` of that variance in common, half to both.
    """
    rest = math.sqrt((1.0 - shared) / 2.0)
    by_split = rest * (draw.standard_normal((splits, 1)) + math.sqrt(ratio) * draw.standard_normal())
    by_seed = math.sqrt(shared) * draw.standard_normal((1, seeds))
    return by_split + by_seed + rest * draw.standard_normal((splits, seeds))


def independent_error(gains: Any, ratio: float) -> float:
    """The standard error that takes noise of different splits for independent, as it was before 0.4."""
    n, seeds = gains.shape
    within = gains.var(axis=1, ddof=1).mean()
    between = max(0.0, gains.mean(axis=1).var(ddof=1) - within / seeds)
    return math.sqrt((1.0 / n + ratio) * between + within / (n * seeds))


@pytest.mark.every(2)
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_intervals_of_the_gain_keep_their_coverage_if_splits_share_noise_seeds(ratio: float) -> None:
    """2 to 20 splits and seeds, and no, half or nine tenths of the variance common to all splits of a seed."""
    draw, worlds = np.random.default_rng(7), 600
    coverage, independent = {}, {}
    for splits, seeds in ((2, 2), (2, 20), (5, 5), (20, 2), (20, 20)):
        for shared in (0.0, 0.5, 0.9):
            worlds_gains = [crossed(draw, splits, seeds, shared, ratio) for _ in range(worlds)]
            intervals = np.array([estimate_gain(gains, ratio).interval for gains in worlds_gains])
            case = splits, seeds, shared
            coverage[case] = np.mean((intervals[:, 0] <= 0.0) & (intervals[:, 1] >= 0.0))
            if shared == 0.9:
                hits = [abs(gains.mean()) <= 1.96 * independent_error(gains, ratio) for gains in worlds_gains]
                independent[case] = np.mean(hits)
    assert {case: rate for case, rate in coverage.items() if not rate >= 0.93} == {}
    assert min(independent.values()) < 0.4
    assert max(independent.values()) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("monotone", [False, True])
def test_intervals_of_the_break_even_keep_their_coverage_if_splits_share_noise_seeds(monotone: bool) -> None:
    """The gain at ε is log ε - 0 on average, so that joining pays from 1 on; the range is of 90 %."""
    grid, worlds = np.array([0.01, 0.1, 1.0, 10.0, 100.0]), 200
    for splits, seeds, shared in ((10, 2, 0.9), (5, 5, 0.9), (20, 10, 0.5), (10, 5, 0.0)):
        draw, hits = np.random.default_rng(3), 0
        for _ in range(worlds):
            gains = np.log(grid)[:, None, None] + crossed(draw, splits, seeds, shared, 0.5)
            found = estimate_break_even(grid, gains, 0.5, monotone=monotone)
            assert found.low is not None
            assert found.high is not None
            hits += found.low <= 1.0 <= found.high
        assert hits / worlds >= 0.86, (splits, seeds, shared)


def test_more_splits_do_not_shrink_the_standard_error_from_shared_noise_seeds() -> None:
    """Two seeds 0.2 apart in each of 100 splits: ± 0.1, and 12.7 times that for 95 %; before 0.4 ± 0.01."""
    gains = np.tile([0.1, 0.3], (100, 1))
    found = estimate_gain(gains, 0.5)
    assert found.error == pytest.approx(0.1)
    assert found.interval == pytest.approx((0.2 - 1.2706, 0.2 + 1.2706), abs=1e-4)
    assert found.noise == pytest.approx(0.2 / math.sqrt(2.0))
    assert independent_error(gains, 0.5) == pytest.approx(0.01)


def test_the_corrected_standard_error_covers_where_the_plain_one_undercovers() -> None:
    """Golden 6 in small: known truth, 20 splits of the same records, noise of its own."""
    draw, hit, plain_hit, worlds = np.random.default_rng(5), 0, 0, 400
    for _ in range(worlds):
        records = draw.standard_normal(90)
        splits = np.array([records[draw.permutation(90)[:30]].mean() for _ in range(20)])
        gains = splits[:, None] + 0.1 * draw.standard_normal((20, 2))
        gain = estimate_gain(gains, 0.5)
        assert gain.error is not None
        hit += abs(gain.mean) <= 1.96 * gain.error
        plain_hit += abs(gain.mean) <= 1.96 * gains.mean(axis=1).std(ddof=1) / math.sqrt(20)
    assert hit / worlds >= 0.88
    assert plain_hit / worlds < 0.8


def test_the_zero_crossing_of_the_gain_is_interpolated_in_log_epsilon() -> None:
    assert zero_crossing(GRID, np.array([-2.0, -1.0, -1.0, 1.0, 2.0, 2.0])) == pytest.approx(math.sqrt(3.0))
    assert zero_crossing(GRID, np.ones(6)) == 0.0
    assert math.isinf(zero_crossing(GRID, -np.ones(6)))
    words = [format_grid_epsilon(value, GRID) for value in (0.0, 1.64, math.inf)]
    assert words == ["below 0.1", "1.6", "above 30"]


def test_falling_gains_are_pooled_only_in_a_monotone_break_even_fit() -> None:
    gains = np.array([1.0, 0.0, 2.0])[:, None, None]
    for monotone, line in ((True, [0.5, 0.5, 2.0]), (False, [1.0, 0.0, 2.0])):
        assert estimate_break_even(GRID[:3], gains, 0.0, monotone=monotone).fitted_gains.tolist() == line


def test_the_break_even_interval_widens_with_the_test_to_train_ratio_of_splits() -> None:
    draw = np.random.default_rng(0)
    gains = np.log(GRID)[:, None, None] * 0.01 + 0.03 * draw.standard_normal((1, 20, 1)) + np.zeros((6, 20, 2))
    narrow, wide = (estimate_break_even(GRID, gains, ratio, monotone=True) for ratio in (0.0, 0.5))
    assert wide.low is not None
    assert wide.high is not None
    assert narrow.low is not None
    assert narrow.high is not None
    assert wide.low < narrow.low <= narrow.epsilon <= narrow.high < wide.high


def test_the_break_even_description_separates_losses_by_settings_from_losses_by_noise() -> None:
    lost = estimate_break_even(GRID, np.full((6, 3, 2), -0.1), 0.5, monotone=False)
    assert describe_break_even(lost, GRID, -0.1, -0.2) == "never, even without noise"
    assert describe_break_even(lost, GRID, -0.1, 0.2) == "never: the settings lose it, not the noise"
    assert describe_break_even(lost, GRID, 0.1, 0.2) == "above 30"


def test_chance_alone_makes_a_third_to_nearly_half_of_the_silos_seem_to_gain() -> None:
    assert 0.3 < chance_gain_rate(np.array([20, 100]), np.array([0.1, 0.1])) < 0.45
    assert chance_gain_rate(np.array([0]), np.array([0.1])) < 0.01


def sites_of(records: int) -> Dataset:
    draw = np.random.default_rng(0)
    images = np.arange(1.0, records + 1)[:, None]
    labels = draw.integers(0, 2, records)
    test = draw.random(records) < 0.3
    place = draw.integers(0, 3, records)
    rows = draw.permutation(records)

    def part(mask: Any, order: Any) -> tuple[Any, Any]:
        return np.where(mask[:, None], images, 0.0)[order], np.where(mask, labels, -1)[order]

    here = np.arange(records)
    sites = Sites(("a", "b", "c"), place[rows], place)
    return Dataset("x", *part(~test, rows), *part(test, here), 2, sites, None, 1.0, (rows, here))


def test_a_redrawn_split_keeps_site_sizes_and_shares_no_record_between_train_and_test() -> None:
    data = sites_of(200)
    other = draw_split(data, 1)
    train, test = counted_mask(other.train_labels), counted_mask(other.test_labels)
    assert not set(other.train_images[train].ravel()) & set(other.test_images[test].ravel())
    assert len(set(other.train_images[train].ravel()) | set(other.test_images[test].ravel())) == 200
    assert data.sites is not None
    before = counted_mask(data.test_labels)
    for site in range(3):
        assert (data.sites.test[test] == site).sum() == (data.sites.test[before] == site).sum()
    assert (other.train_images[~train] == 0).all()
    images = map(float, other.test_images[test].ravel())
    labels = dict(zip(images, map(int, other.test_labels[test]), strict=True))
    for image, label in zip(data.test_images[before].ravel(), data.test_labels[before], strict=True):
        assert labels.get(float(image), int(label)) == int(label)
    assert not np.array_equal(test, counted_mask(draw_split(data, 2).test_labels))
    assert np.array_equal(test, counted_mask(draw_split(data, 1).test_labels))


def test_blanked_training_records_are_about_the_requested_share_of_those_that_count() -> None:
    data = sites_of(200)
    kept = counted_mask(blank_training_share(data, 0.2).train_labels)
    whole = counted_mask(data.train_labels)
    assert (kept <= whole).all()
    assert 0.12 < 1.0 - kept.sum() / whole.sum() < 0.28


def test_blanking_a_share_removes_whole_persons_and_exactly_that_share_of_records() -> None:
    persons = np.array([str(row // 10) for row in range(2000)])
    data = Dataset("x", np.ones((2000, 1)), np.ones(2000), np.ones((1, 1)), np.ones(1), 0, persons=persons)
    kept = counted_mask(blank_training_share(data, 0.1).train_labels).reshape(200, 10)
    assert (kept.all(1) | ~kept.any(1)).all()
    assert (~kept).mean() == 0.1  # before: .65, as every person with one of the drawn records counted


def test_a_class_of_one_record_falls_into_train_or_test_at_random() -> None:
    images, labels = np.arange(46.0)[:, None], np.array([0] + [1] * 45)
    data = Dataset("x", images[:30], labels[:30], images[30:], labels[30:], 2)
    without = sum(int((draw_split(data, number).train_labels == 0).sum() == 0) for number in range(1, 61))
    assert 10 < without < 32  # one in three


def test_pull_weight_zero_gives_the_local_model_and_infinity_the_released_one_bit_for_bit() -> None:
    """Golden 5."""
    cell = added_cell("pulled")
    objective, held = first_silo(cell)
    own, kappa = fits.fit_local_model(objective, held, 0)
    released = np.random.default_rng(0).standard_normal(objective.dimension)
    penalty = fits.make_penalties(objective, held.train, kappa)
    start = np.zeros(objective.dimension)
    none, whole, middle = (
        fits.fit_model(objective, held.train, penalty, start, 1e-6, Pull(weight, released))
        for weight in (PULL_WEIGHTS[0], PULL_WEIGHTS[-1], 1.0)
    )
    assert none.tobytes() == own.tobytes()
    assert whole.tobytes() == released.tobytes()
    assert 0.0 < np.linalg.norm(middle - released) < np.linalg.norm(own - released)


@pytest.mark.slow
def test_a_personal_model_is_pulled_toward_a_good_released_model_but_not_a_bad_one() -> None:
    cell = added_cell("taken", 40, 15, 0.75)
    objective, held = first_silo(cell)
    good = np.zeros((2, objective.dimension // 2))
    good[:, 0] = [-10.0, 10.0]
    good = good.ravel()
    own, kappa = fits.fit_local_model(objective, held, 0)
    personal, away = (fit_personal_model(objective, held, side * good, 0, kappa) for side in (1.0, -1.0))
    scores = [fits.score_model(objective, point, held.test) for point in (own, personal.point)]
    assert scores[1] >= scores[0]
    assert away.pull_weight < 0.4
    assert personal.judged == "folds"
    read = np.arange(len(held.train.labels)) % 3 > 0  # 5 records judge nothing
    assert fit_personal_model(objective, held, good, 0, kappa, read).judged == "folds"
    _, many = first_silo(added_cell("judged", 2, 60, 0.75))
    read = np.arange(60) % 3 > 0
    assert fit_personal_model(objective, many, good, 0, kappa, read).judged == "spared"


@pytest.mark.slow
def test_flipped_labels_make_joining_a_loss_that_personal_models_limit(tmp_path: Path) -> None:
    """Golden 4: labels flipped in half of the silos; with and without noise joining loses, personal does not."""
    path = flipped_scenario(tmp_path, "half", 6, 20, 0.5)
    result = joining(path, (1.0, 30.0), 4, 3, with_personal=True)
    assert result.mean_over_silos("untrusted").mean() < -0.15
    assert result.mean_over_silos("untrusted", "personal").mean() > -0.05
    break_even, grid = result.find_break_even("untrusted"), np.array([1.0, 30.0])
    words = describe_break_even(break_even, grid, -0.2, result.splits[0].pooled)
    assert words == "never, even without noise"
    few = joining(flipped_scenario(tmp_path, "few", 6, 20, 0.17), (30.0,), 1)
    gains = few.splits[0].gains["untrusted"][0].mean(axis=0)
    names = few.splits[0].names
    assert gains[names.index("s0")] < gains.mean() - 0.3 < gains.mean()


@pytest.mark.slow
def test_a_break_even_study_resumes_from_a_cache_that_only_its_owner_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = flipped_scenario(tmp_path, "stopped", 3, 20)
    first = joining(path, (1.0,), 1).mean_over_silos("untrusted")
    for kind in ("worth", "alone"):
        assert cache_folder(kind).stat().st_mode & 0o777 == 0o700
        assert all(file.stat().st_mode & 0o777 == 0o600 for file in cache_folder(kind).iterdir())
    with monkeypatch.context() as patches:
        patches.setattr(joined, "_train_models", Mock(side_effect=AssertionError("computed again")))
        again = joining(path, (1.0,), 1)
    assert np.array_equal(again.mean_over_silos("untrusted"), first)
    chart = make_gain_chart(again)
    assert "each silo alone" in draw_svg(chart)
    save_chart(chart, tmp_path / "gain.svg")
    text = (tmp_path / "gain.svg").read_text()
    assert "each silo alone" in text or len(text) > 5_000


@pytest.mark.slow
def test_a_damaged_break_even_cache_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = flipped_scenario(tmp_path, "damaged", 3, 20)
    joining(path, (1.0,), 0)
    (file,) = cache_folder("worth").iterdir()
    sound = json.loads(file.read_text())
    monkeypatch.setattr(joined, "_train_models", Mock(side_effect=InterruptedError))
    joining(path, (1.0,), 0)
    damages: tuple[dict[str, Any], ...] = (
        *({"gains": {"untrusted": [[0.0]]}}, {"gains": {}}, {"released": [1.0]}, {"alone": math.nan}),
        *({"noiseless": [0.0]}, {"names": ["a", "b"]}, {"tests": [0, 0, 0]}, {"tests": [10**400] * 3}),
    )
    for damage in damages:
        file.write_text(json.dumps({**sound, **damage}))
        with pytest.raises(InterruptedError):
            joining(path, (1.0,), 0)
    for epsilon in (math.nan, math.inf, 0.0):
        with pytest.raises(InputError, match="rising numbers above 0"):
            joining(path, (epsilon,), 0)


@pytest.mark.parametrize(("splits", "seeds"), [(10**8, 2), (-1, 2), (0, 10**8)])
def test_a_break_even_study_with_too_many_or_negative_splits_or_seeds_is_refused(
    tmp_path: Path, splits: int, seeds: int
) -> None:
    path = flipped_scenario(tmp_path, "said", 2, 20)
    with pytest.raises(InputError, match="at most 1,000"):
        joining(path, (1.0,), splits, seeds)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("privacy.delta", "[1e-9,1e-3]"),  # the result stated the first δ, and the last one won
        ("data.partition", '["site","iid"]'),
        ("model.feature_norm", "[1.0,4.0]"),
        ("federation.batch", "[100,120]"),
    ],
)
def test_a_break_even_study_refuses_sweeps_of_the_promise_the_records_and_the_model(
    tmp_path: Path, key: str, values: str
) -> None:
    path = flipped_scenario(tmp_path, "swept", 3, 20)
    request = joined.JoiningRequest(path, (f"{key}={values}",), ("untrusted",), (1.0,), 0)
    with pytest.raises(InputError, match="settings to choose from differ in"):
        joined.study_joining(request)


def test_a_break_even_study_that_can_spare_no_record_chooses_no_setting(tmp_path: Path) -> None:
    path = flipped_scenario(tmp_path, "unspared", 1, 2)
    request = joined.JoiningRequest(path, ("algorithm.step=[1.0,5.0]",), ("untrusted",), (1.0,), 0)
    with pytest.raises(InputError, match="no record is spared to choose a setting by"):
        joined.study_joining(request)


@pytest.mark.slow
def test_the_worth_command_prints_the_epsilon_from_which_joining_may_pay(tmp_path: Path) -> None:
    path = flipped_scenario(tmp_path, "said", 8, 20)
    words = ["worth", path, "--splits", "2", "--epsilon", "0.1", "--epsilon", "30", "--trust", "untrusted"]
    text = invoke(*words).stdout
    assert "each silo alone, nothing released" in text
    assert "Joining may pay from ε" in text  # two splits and seeds do not tell more
    tree = json.loads(invoke(*words, "--json", "--personal").stdout)
    assert tree["splits"] == 2
    assert tree["trusts"]["untrusted"]["gains"][0]["mean"] < tree["trusts"]["untrusted"]["gains"][1]["mean"]
    assert len(tree["trusts"]["untrusted"]["personal"]) == 2


@pytest.mark.slow
def test_a_local_model_cache_with_wrong_records_values_or_permissions_is_ignored() -> None:
    cell = added_cell("poisoned")
    known = compute_references(cell)
    key = cache_key(cell)
    assert key is not None
    (file,) = cache_folder("alone").iterdir()
    tree = json.loads(file.read_text())
    for lie in ({"records": "0" * 64}, {"key": "0" * 64}, {"metric": "rank"}, {"silos": []}):
        file.write_text(json.dumps({**tree, **lie}))
        assert compute_references(cell) == known
    silo = tree["silos"][0]
    lies = {"score": 7.0, "train": 10**400, "name": [1], "test": 2.5, "any_learner": 7, "silo": -1}
    for wrong in ({key: value} for key, value in lies.items()):
        file.write_text(json.dumps({**tree, "silos": [{**silo, **wrong}, *tree["silos"][1:]]}))
        assert read_references(key) is None, wrong
    for text in ("[" * 200_000, '{"a":' * 100_000, "", json.dumps({**tree, "of": float("inf")})):
        file.write_text(text)
        assert read_references(key) is None
    tree["silos"][0]["score"] = 7.0
    file.write_text(json.dumps(tree))
    assert compute_references(cell) == known
    file.chmod(0o622)
    assert read_references(key) is None
    file.unlink()
    file.symlink_to("/dev/zero")
    assert read_references(key) is None


@pytest.mark.slow
def test_the_table_shows_local_model_scores_only_after_the_worth_command_computed_them(tmp_path: Path) -> None:
    tree = added_cell("rowed", 3, 40, 1.0).canonical_data()
    fedpriv.run({**tree, "sweep": {"privacy.mu": [0.5, 8.0], "seeds": 2}}, out=tmp_path / "run")
    results = read_claims(tmp_path / "run")
    assert "nothing released" not in render_tables(results, "markdown")
    done = invoke("worth", tmp_path / "run", "--alone")
    assert done.exit_code == 0, done.output
    text = render_tables(results, "markdown")
    mean = np.mean([compute_references(resolve_cell({**tree, "seed": seed}, "x")).mean_score for seed in (0, 1)])
    (row,) = [line for line in text.splitlines() if "each silo alone, nothing released" in line]
    assert f"{100 * mean:.1f}" in row
    assert "nothing released" in render_tables(results, "latex")
    assert "nothing released" not in render_tables(results, "csv")  # a row is a point of the sweep
    added("rowed", 3, 40, 0.2)  # other records of the same name
    two = two_classes(3, 40, 0.2, 2_000, seed=1)
    fedpriv.add_data("rowed", lambda: two, classes=2)
    assert "nothing released" not in render_tables(results, "markdown")


@pytest.mark.slow
def test_the_row_of_local_models_is_labelled_in_a_run_without_a_sweep(tmp_path: Path) -> None:
    """It had none in the table, page and terminal of a run of one point, as `data inspect` writes it."""
    tree = added_cell("single", 3, 40, 1.0).canonical_data()
    fedpriv.run(tree, out=tmp_path / "run")
    assert invoke("worth", tmp_path / "run", "--alone").exit_code == 0
    lines = render_tables(read_claims(tmp_path / "run"), "markdown").splitlines()
    assert [line for line in lines if line.startswith("| released ")]
    assert [line for line in lines if line.startswith("| each silo alone, nothing released ")]
    shown = invoke("show", tmp_path / "run")
    assert "each silo alone, nothing released" in shown.output


@pytest.mark.parametrize("wrong", [np.full(42, np.nan), np.zeros(7)])
def test_a_released_model_of_another_shape_or_with_nan_is_refused(wrong: np.ndarray[Any, Any]) -> None:
    cell = added_cell("refused-model")
    known = compute_references(cell)
    with pytest.raises(InputError, match="a model of shape"):
        evaluate_gains(cell, known, wrong)


def test_local_model_scores_exist_for_silos_of_one_record() -> None:
    one = compute_references(added_cell("single", 4, 1, 1.0, federation={"rounds": 1, "batch": 1}))
    assert all(silo.train == 1 for silo in one.silos)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"spared": 0.2, "partition": "shards", "shards": 1}, "dealt out by their labels"),
        ({"split": 1, "validation": 10}, "of the published split"),
    ],
)
def test_splits_incompatible_with_the_partition_or_validation_are_refused(keys: dict[str, Any], said: str) -> None:
    tree = added_cell("unsplit").canonical_data()
    with pytest.raises(InputError, match=said):
        resolve_cell({**tree, "data": {**tree["data"], **keys}}, "test")


@pytest.mark.every(4)
@pytest.mark.parametrize("written", [{"privacy": [1]}, {"algorithm": "sgd"}, {"data": {"name": "/dev/zero"}}, {}])
def test_a_malformed_scenario_finds_no_cached_local_model_scores(written: dict[str, Any]) -> None:
    compute_references(added_cell("filled"))
    assert find_references([written]) == {}


def test_no_gain_that_is_not_finite_makes_joining_look_better() -> None:
    """Before: NaN counted as a gain, and -∞ gave NaN."""
    epsilons = np.array([1.0, 2.0, 4.0])
    assert zero_crossing(epsilons, np.array([-1.0, 1.0, np.nan])) == np.inf
    assert zero_crossing(epsilons, np.array([-np.inf, 1.0, 1.0])) == pytest.approx(2.0)
