"""A silo that is away: the run goes on where the scenario says so, on record, and its privacy is the same."""

from pathlib import Path

import numpy as np
import pytest

from tests.e2e.federation import federation, finish, kill_process, results, say

pytestmark = pytest.mark.deployment


def test_a_run_goes_on_without_a_silo_that_never_comes_back(tmp_path: Path) -> None:
    with federation(tmp_path, "deployment.missing=continue", "deployment.patience=20") as fed:
        fed.start_silos()
        running = fed.run("--quiet")
        fed.wait_for_round(3, running)
        say(f"killing silo 2's SuperNode for good after round {fed.rounds_done()}")
        kill_process(fed.silos[2], "supernode")
        output = finish(running)
        say(output.strip())
        cell = results(tmp_path)
        (missed,) = cell["missed"].values()
        assert list(cell["missed"]) == ["2"]
        assert missed == list(range(missed[0], fed.cell.schedule.rounds + 1))
        assert f"fedpriv: silo 2 did not answer in round {', '.join(map(str, missed))}" in output
        answered = [t for (t,) in fed.ledger(2, "SELECT t FROM answers ORDER BY t")]
        assert answered in (list(range(1, missed[0])), list(range(1, missed[0] + 1)))  # at most one reply was late
        assert [t for (t,) in fed.ledger(0, "SELECT t FROM answers ORDER BY t")] == list(range(1, 7))
        assert cell["mu"] == pytest.approx(4.0)
        assert np.isfinite(fed.model()).all()
