"""Statistics of a federation of processes: guards, masks and noise of the operating system."""

from pathlib import Path

import pytest

import fedpriv
from tests.data.tables import rows, write_csv
from tests.study.test_statistics import tree_of


@pytest.mark.deployment
@pytest.mark.parametrize("trust", ["untrusted", "secure-aggregation", "trusted"])
def test_a_deployment_releases_counts_within_five_standard_errors_of_the_truth(
    tmp_path: Path, trust: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = write_csv(tmp_path / "t.csv", rows(600))
    tables = [{"of": ["sex", "outcome"]}, {"of": ["hospital"]}]
    found = fedpriv.statistics(tree_of(path, trust=trust, table=tables), engine="deployment", out=tmp_path / "run")
    train = [row for row in rows(600) if row["part"] == "train"]
    assert found.run.cells[0].privacy.noise == "release"
    assert found.run.cells[0].privacy.mu == pytest.approx(1.0, rel=1e-9)
    for estimate in found.tables[0].estimates:
        true = sum((row["sex"], row["outcome"]) == estimate.of for row in train)
        assert abs(estimate.value - true) <= 5.0 * estimate.standard_error
