"""What is true of every file of the packages: one job, and so a length that is read at one sitting."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES = 450


@pytest.mark.parametrize("package", ["fedpriv", "server", "clients"])
def test_no_file_is_longer_than_one_job_takes(package: str) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / package).rglob("*.py")}
    assert lengths
    assert {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > MOST_LINES} == {}
