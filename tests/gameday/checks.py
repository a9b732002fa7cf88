"""What must hold after faults: the bytes of an undisturbed run, and every ledger charged once for each round."""

from collections.abc import Sequence

import numpy as np

from tests.e2e.federation import Federation


def finished_run(fed: Federation, out: str, silos: Sequence[bytes], server: bytes) -> list[str]:
    """What is wrong with a run that is over; `silos` and `server` are the keys that it used."""
    wrong, token = [], fed.token(out)
    rounds = fed.cell.schedule.rounds
    first = 0 if fed.cell.algorithm.trust_setting.masked else 1
    for silo in range(len(fed.silos)):
        answered = [t for (t,) in fed.ledger(silo, "SELECT t FROM answers WHERE run_id = ? ORDER BY t", token)]
        if answered != list(range(first, rounds + 1)):
            wrong.append(f"silo {silo} answered {answered}")
        if fed.ledger(silo, "SELECT key FROM runs WHERE run_id = ?", token) != [(None,)]:
            wrong.append(f"silo {silo} kept its key")
    if not np.array_equal(fed.model(out), fed.replay(list(silos), server)):
        wrong.append("OTHER BYTES than the undisturbed replay")
    return wrong + charges(fed)


def charges(fed: Federation) -> list[str]:
    """What is wrong with the ledgers' charges: a run is charged once, at the plan's price, whatever happened."""
    wrong = []
    for silo in range(len(fed.silos)):
        runs = fed.ledger(silo, "SELECT run_id, mu FROM runs")
        if len({run for run, _ in runs}) < len(runs):
            wrong.append(f"silo {silo} charged a run twice")
        prices = {price for _, price in runs}
        if any(abs(price - (fed.cell.privacy.target_mu or 0.0)) > 1e-9 for price in prices):
            wrong.append(f"silo {silo} charged {sorted(prices)}")
    return wrong
