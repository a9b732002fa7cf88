"""Hospitals of unequal size on both fast engines: the same model, and the same scores silo by silo."""

from pathlib import Path

import numpy as np
import pytest

from fedpriv.scenario.load import resolve_cell
from tests.data.tables import rows, table_tree, write_csv
from tests.engines.test_engines import run


@pytest.mark.parametrize("model", ["softmax-regression", "logistic-regression", "mlp"])
def test_hospitals_train_alike_on_both_engines(tmp_path: Path, model: str) -> None:
    tree = table_tree(write_csv(tmp_path / "t.csv", rows()))
    tree["model"] = {"name": model, **({} if model == "mlp" else {"feature_norm": 2.0})}
    tree["run"] |= {"per_silo": True, "metrics": ["auc", "calibration_error"]}
    cell = resolve_cell(tree, "test")
    (fast,), heard = run("vectorized", cell)
    (slow,), _ = run("inprocess", cell)
    np.testing.assert_allclose(fast.finished.model, slow.finished.model, rtol=1e-9, atol=1e-12)
    assert set(fast.finished.metrics) == set(slow.finished.metrics) > {"test_auc", "test_auc_at_north"}
    for name, value in fast.finished.metrics.items():
        assert slow.finished.metrics[name] == pytest.approx(value), name
    assert len(heard.evaluations) == 2


def test_a_real_target_trains_and_is_told_in_its_own_unit(tmp_path: Path) -> None:
    records = rows(200)
    for number, record in enumerate(records):
        record["cost"] = str(3 * int(record["age"]) + 5 * (number % 7 - 3))
    tree = table_tree(
        write_csv(tmp_path / "t.csv", records), target="cost", range=[0, 300], columns={"age": {"range": [0, 100]}}
    )
    del tree["data"]["table"]["classes"]
    tree["model"] = {"name": "linear-regression", "feature_norm": 1.0}
    tree["federation"] = {"silos": 2, "rounds": 60, "epochs": 60, "batches": [80, 50]}
    tree["privacy"] = {"relation": "zero-out", "mode": "none"}
    tree["run"] |= {"metrics": ["r2", "mae"]}
    (outcome,), _ = run("vectorized", resolve_cell(tree, "test"))
    metrics = outcome.finished.metrics
    assert metrics["test_r2"] > 0.95
    assert 0.5 < metrics["test_mae"] < 15.0  # of a cost between 60 and 270; 150 times less in scaled units
