"""Figures of `fedpriv worth` that were computed before by other programs: MNIST, hospitals, two normal classes."""

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedpriv
from fedpriv.core.files import scenario_file
from fedpriv.data.fetch import default_root
from fedpriv.scenario.load import load_scenario, resolve_cell
from fedpriv.study import alone as fits
from fedpriv.study import references as kept
from fedpriv.study.break_even import break_even, estimate
from fedpriv.study.worth import Bench, bench_of, gains_of, held_of, linear_objective, pooled, references
from tests.study.test_break_even import federation_of, flipped
from tests.study.test_worth import own_cache

DIMENSION, TRAIN = 20, 20


@pytest.fixture
def own_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own, beside the data that were fetched."""
    monkeypatch.setattr(kept, "default_root", lambda: tmp_path / "data")
    return default_root()


@pytest.mark.slow
def test_mnist_in_a_hundred_silos(own_alone: Path) -> None:
    """Golden 1: 86.0 ± .4 with folds over 8 silos of 600 images."""
    cell = resolve_cell(
        {
            "name": "mnist",
            "data": {"name": "mnist"},
            "model": {"name": "softmax-regression"},
            "federation": {"silos": 100, "rounds": 600},
            "algorithm": {"name": "dp-mu2-fl", "trust": "untrusted", "diameter": 0.1},
            "privacy": {"relation": "replace-one", "rho": 4.0},
        },
        "test",
    )
    objective = linear_objective(cell)
    held = held_of(cell, 8)[1]
    scores = [fits.score_of(objective, fits.alone(objective, each, 0)[0], each.test) for each in held]
    assert 100.0 * float(np.mean(scores)) == pytest.approx(86.0, abs=0.6)


@pytest.mark.slow
def test_hospitals_over_splits(own_alone: Path) -> None:
    """Golden 2: alone 83.4, pooled 80.7, with intercepts fitted at home 83.1, ± .5 over 60 splits; here 20."""
    found = []
    for split in range(1, 21):
        words = [f"data.split={split}", "seeds=1", "sweep.privacy.epsilon=[1.0]"]
        cell = load_scenario(scenario_file(Path("heart-hospitals")), words).points[0].cell
        known = references(cell)
        united = gains_of(cell, known, pooled(cell))
        found.append((known.mean, np.mean(united.released), np.mean(united.recalibrated)))
    assert 100.0 * np.mean(found, axis=0) == pytest.approx([83.4, 80.7, 83.1], abs=1.2)


def normal(silos: int, each: int, distance: float, seed: int, tests: int = 10_000) -> Any:
    draw = np.random.default_rng(seed)

    def part(count: int) -> tuple[Any, Any]:
        labels = np.arange(count) % 2
        records = draw.standard_normal((count, DIMENSION))
        records[:, 0] += distance * (2.0 * labels - 1.0)
        order = draw.permutation(count)
        return records[order], labels[order].astype(np.int64)

    return part(silos * each), part(tests)


def world(name: str, silos: int, each: int, distance: float, seed: int) -> dict[str, Any]:
    parts = normal(silos, each, distance, seed)
    fedpriv.add_data(name, lambda: parts, classes=2)
    return {
        "name": name,
        "seed": seed,
        "data": {"name": name},
        "model": {"name": "softmax-regression", "feature_norm": 5.0},
        "federation": {"silos": silos, "rounds": 20, "epochs": 20, "batch": each},
        "algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 2.0},
        "privacy": {"relation": "zero-out", "epsilon": 1.0, "delta": 1e-5},
        "run": {"evaluations": 1},
    }


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_pooling_gains_twelve_points_where_silos_are_small_and_alike() -> None:
    """Golden 3: |m| = .75, 50 silos of 13 training records: pooled less alone 12.2 ± 1."""
    gains = []
    for seed in range(3):
        tree = world(f"small-{seed}", 50, 13, 0.75, seed)
        tree["data"] |= {"partition": "dirichlet", "concentration": 1e6}  # as many of both classes
        cell = resolve_cell(tree, "test")
        gains.append(gains_of(cell, references(cell), pooled(cell)).gain)
    assert 100.0 * float(np.mean(gains)) == pytest.approx(12.2, abs=2.0)


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_the_break_even_falls_with_the_number_of_silos_and_with_masks() -> None:
    """Golden 3: |m| = 1, 20 training records: 4.7, 1.6, .65 for 5, 20, 100 silos untrusted; less with masks."""
    grid = np.array([0.1, 0.3, 1.0, 3.0, 10.0, 30.0])
    found: dict[tuple[str, int], float] = {}
    for silos in (5, 20, 100):
        for trust in ("untrusted", "secure-aggregation"):
            gains = np.zeros((len(grid), 6, 1))
            for seed in range(6):
                tree = world(f"gains-{silos}-{seed}", silos, TRAIN, 1.0, seed)
                tree["algorithm"]["trust"] = trust
                bench: Bench | None = None
                results = fedpriv.run(
                    {**{k: v for k, v in tree.items() if k != "seed"},
                     "sweep": {"privacy.epsilon": grid.tolist(), "seeds": [seed]}},
                    out=own_folder(silos, trust, seed),
                )  # fmt: skip
                for place, result in enumerate(results):
                    if bench is None:
                        cell = resolve_cell(tree, "test")
                        bench = bench_of(cell, references(cell))
                    gains[place, seed, 0] = bench.gains(result.model().astype(np.float64)).gain
            found[trust, silos] = break_even(grid, gains, 0.0, monotone=True).epsilon
    untrusted = [found["untrusted", silos] for silos in (5, 20, 100)]
    assert untrusted[0] > untrusted[1] > untrusted[2]
    for value, known in zip(untrusted, (4.7, 1.6, 0.65), strict=True):
        assert abs(math.log(value / known)) < math.log(2.0)
    for silos in (5, 20, 100):
        assert found["secure-aggregation", silos] < found["untrusted", silos]


def own_folder(silos: int, trust: str, seed: int) -> Path:
    return Path(tempfile.mkdtemp(prefix="fedpriv-golden-")) / f"{silos}-{trust}-{seed}"


@pytest.mark.slow
def test_coverage_over_redrawn_federations() -> None:
    """Golden 6 with normal means in place of models: 60 records, 20 splits, 88 to 100 % of the truth."""
    draw, hit = np.random.default_rng(1), 0
    for _ in range(600):
        records = draw.standard_normal((6, 60))
        values = []
        for _ in range(20):
            order = draw.permuted(records, axis=1)
            values.append((order[:, :20].mean() + draw.normal(0.0, 0.05, 2)).tolist())
        told = estimate(np.array(values), 0.5)
        assert told.error is not None
        hit += abs(told.mean) <= 1.96 * told.error
    assert hit / 600 >= 0.88


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_labels_flipped_in_half_of_the_silos_lose_at_full_strength(tmp_path: Path) -> None:
    """Golden 4: 20 silos of 20, half of them flipped; the model of all is a coin."""
    cell = resolve_cell(federation_of(flipped("twenty", 20, 20, 0.5), 20, 20), "test")
    known = references(cell)
    assert gains_of(cell, known, pooled(cell)).gain < -0.2


__all__ = ["own_cache"]
