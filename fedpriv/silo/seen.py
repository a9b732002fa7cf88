"""A guard seen from outside: a log line for each event, and figures for whoever watches over it.

Names and reasons may have words of a stranger; lines have them in one spelling without control characters, figures
not at all.

Guarantee: no line and no figure depends on the records but through their number, and figures change when a tick is
over, as replies leave: the time of a change says no more than that of a reply.  A time is in whole seconds.
"""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from typing import NamedTuple

from fedpriv.accounting.budget import LifetimeBudget
from fedpriv.core.errors import printable
from fedpriv.core.figures import lower_figure, upper_figure
from fedpriv.core.logs import facts
from fedpriv.silo.admission import Charge, spent, together
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.metrics import Figure
from fedpriv.silo.policy import Allowed

_log = logging.getLogger("fedpriv.guard")
_IN_FULL = 100
_THEN_EVERY = 1000
_LONGEST = 300


class Amount(NamedTuple):
    """Of a budget."""

    mu: float
    """inf where a run was without noise."""
    slack: float


class Standing(NamedTuple):
    """A ledger's account of its policy's budget: all of it, spent, left for one more run, and runs."""

    budget: Amount
    spent: Amount
    left: Amount
    runs: int
    open: int


def standing_of(ledger: SiloLedger, allow: Allowed) -> Standing:
    """From all that the ledger has charged, for the neighbours that the policy has."""
    charges = ledger.charges()
    prices = spent(charges, allow.relation, allow.unit)
    total, left = together(prices), LifetimeBudget(allow.budget, allow.slack).left(prices)
    return Standing(
        Amount(allow.budget, allow.slack),
        Amount(math.inf, sum(each.slack for each in charges)) if total is None else Amount(total.mu, total.slack),
        Amount(0.0, 0.0) if left is None else Amount(left.mu, left.slack),
        len(charges),
        ledger.open_runs(),
    )


def tell_opened(run: str, charged: Charge, left: Amount) -> None:
    """Log a run that was opened, called once its charge is on file."""
    scenario = json.loads(charged.cell)["name"]
    with_slack = f" and slack {upper_figure(charged.slack, 3)}" if charged.slack else ""
    _log.info(
        "opened for scenario %s: charged mu = %s%s, left for one more run %s",
        printable(repr(scenario), 60),
        upper_figure(charged.mu, 6),
        with_slack,
        lower_figure(left.mu, 6),
        extra=facts(printable(run, 40), event="opened"),
    )


class Events:
    """Counts and logs what a guard's process does: the first hundred refusals, then every thousandth.

    Whoever asks for ever fills no disk: a round is told once, however often it is asked for.
    """

    def __init__(self) -> None:
        self._count = Counter[str]()
        self._last: dict[tuple[str, bool], int] = {}
        self._at, self._version = 0.0, version("fedpriv")

    def answered(self, run: str, t: int, *, tests: bool) -> None:
        """Called after the answer is in the ledger, and so for runs that a budget was charged for."""
        if t > self._last.get((run, tests), 0):
            self._last[run, tests] = t
            self._count["evaluations" if tests else "rounds"] += 1
            self._at = time.time()
            words = "an evaluation" if tests else "a round"
            _log.info("answered %s", words, extra=facts(printable(run, 40), t, "answered"))
        else:
            self._count["repeated"] += 1

    def refused(self, run: str, reason: str) -> None:
        count = self._count["refused"] = self._count["refused"] + 1
        if count <= _IN_FULL or count % _THEN_EVERY == 0:
            named, said = printable(run, 40), printable(reason, _LONGEST)
            _log.warning("refusal %d, run %s: %s", count, named, said, extra=facts(named, event="refused"))

    def failed(self) -> None:
        self._count["failed"] += 1

    def figures(self, silo: int, standings: Mapping[str, Standing]) -> list[Figure]:
        """As they are now; `standings` by whose records: of training, or of tests."""
        count, who = self._count, {"silo": str(silo), "version": self._version}
        found = [
            Figure("info", "The guard's silo and version.", 1, who),
            Figure("answered_total", "Rounds answered, each once.", count["rounds"], {"records": "training"}),
            Figure("answered_total", "", count["evaluations"], {"records": "tests"}),
            Figure("repeated_total", "Rounds asked for again: they get the same bytes.", count["repeated"]),
            Figure("refused_total", "Requests refused; the log has reasons.", count["refused"]),
            Figure("failed_total", "Requests on which the guard failed; the log says why.", count["failed"]),
            Figure(
                "last_answer_seconds", "When a round was answered, since 1970; 0 if never.", math.floor(self._at)
            ),
        ]
        for records, (budget, used, left, runs, underway) in standings.items():
            found += [
                Figure(name, words, value, {"records": records})
                for name, words, value in (
                    ("runs", "Runs that were ever opened, and charged.", runs),
                    ("runs_open", "Runs under way.", underway),
                    ("budget_mu", "The lifetime budget of the policy.", budget.mu),
                    ("spent_mu", "Spent of it; rounded up.", used.mu),
                    ("left_mu", "The most that one more run may cost; rounded down.", left.mu),
                    ("budget_slack", "The lifetime slack of the policy.", budget.slack),
                    ("spent_slack", "Spent of it.", used.slack),
                )
            ]
        return [each._replace(name=f"fedpriv_guard_{each.name}") for each in found]
