"""AUC that silos release beside that of the ranks of the same model's scores, which is what scikit-learn has."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu

import fedpriv
from benchmarks.auc_beside import Row, rows_of
from fedpriv.core.errors import FedprivError
from fedpriv.data.named import load
from tests.data.tables import rows, write_csv
from tests.silo.test_curves import CURVES, cell_of

HOSPITALS = Path(__file__).parents[2] / "examples/evaluation/hospitals-auc.toml"


def by_ranks(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> float:
    """U / (P N): `sklearn.metrics.roc_auc_score`, ties counted half."""
    ones, zeros = scores[labels == 1], scores[labels == 0]
    return float(mannwhitneyu(ones, zeros).statistic) / (len(ones) * len(zeros))


def test_the_rank_based_reference_auc_equals_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="needs pip install 'fedpriv[learners]'")
    draw = np.random.default_rng(3)
    labels, scores = draw.integers(0, 2, 200), draw.integers(0, 30, 200).astype(float)
    assert by_ranks(labels, scores) == pytest.approx(metrics.roc_auc_score(labels, scores), abs=1e-12)


def test_released_auc_with_negligible_noise_is_near_the_rank_based_auc(tmp_path: Path) -> None:
    tree = cell_of(tmp_path, mu=4000.0, curves={**CURVES, "bins": 256}).canonical_data()
    seed = tree.pop("seed")
    write_csv(tmp_path / "table.csv", rows(600))
    tree = {key: value for key, value in tree.items() if key != "label"} | {"sweep": {"seeds": [seed]}}
    found = rows_of(fedpriv.run(tree, out=tmp_path / "run").folder, by_ranks)
    assert found[0].of == "all"
    assert len(found) > 2
    for row in found:
        for name, exact in row.exact.items():
            assert row.released[name][0] == pytest.approx(exact, abs=0.03 if name == "auc" else 0.01)


def within(found: list[Row]) -> bool:
    """Whether the interval of everybody has the exact figures in it, which are within the sampling as well."""
    return all(low <= found[0].exact[name] <= high for name, (_, low, high) in found[0].released.items())


@pytest.mark.deployment
def test_the_auc_interval_that_four_hospitals_release_contains_the_exact_auc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        load("heart-hospitals")
    except FedprivError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    out = fedpriv.run(str(HOSPITALS), engine="deployment", out=tmp_path / "run").folder
    found = rows_of(out, by_ranks)
    assert found[0].records == 254
    assert found[0].ones == 132
    assert within(found)
