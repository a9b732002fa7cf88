"""The bench that compares two commits says what its pairs allow to be said, and no more."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.compare import interval, verdict


def test_the_interval_is_that_of_students_test_of_the_logarithms() -> None:
    """The bounds are the ratios that a test at 5 % would just not reject."""
    ratios = [0.9, 1.1, 1.05, 0.97, 1.2]
    low, mean, high = interval(ratios)
    assert mean == pytest.approx(stats.gmean(ratios))
    for bound in (low, high):
        assert stats.ttest_1samp(np.log(ratios), math.log(bound)).pvalue == pytest.approx(0.05)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        low, _, high = interval(np.exp(rng.normal(math.log(0.8), 0.3, size=6)).tolist())
        covered += low <= 0.8 <= high
    assert 0.91 < covered / 400 < 0.99


@pytest.mark.parametrize("ratios", [[0.5], [0.5, 0.5]])
def test_a_pair_or_two_show_nothing(ratios: list[float]) -> None:
    low, mean, high = interval(ratios)
    assert mean == pytest.approx(0.5)
    assert verdict(low, high) == "no difference shown"


def test_verdicts() -> None:
    assert [verdict(0.8, 0.9), verdict(0.9, 1.1), verdict(1.1, 1.2)] == ["faster", "no difference shown", "slower"]


def test_a_commit_that_there_is_not_is_one_line() -> None:
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "benchmarks.compare", "no-such-commit"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("benchmarks.compare: fatal: ")
    assert len(done.stderr.splitlines()) == 1
