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
from fedpriv.core.errors import sanitize_line
from fedpriv.core.figures import format_lower, format_upper
from fedpriv.core.logs import log_fields
from fedpriv.silo.admission import Charge, compose_prices, price_charges
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.metrics import ServiceMetric
from fedpriv.silo.policy import RunLimits

_log = logging.getLogger("fedpriv.guard")
_FULL_LOG_COUNT = 100
_LOG_INTERVAL = 1000
_MAX_REASON_LENGTH = 300


class BudgetAmount(NamedTuple):
    """Of a budget."""

    mu: float
    """inf where a run was without noise."""
    slack: float


class BudgetStatus(NamedTuple):
    """A ledger's account of its policy's budget: all of it, spent, left for one more run, and runs."""

    budget: BudgetAmount
    charge: BudgetAmount
    remaining: BudgetAmount
    run_count: int
    open_run_count: int


def budget_status(ledger: SiloLedger, allow: RunLimits) -> BudgetStatus:
    """From all that the ledger has charged, for the neighbours that the policy has."""
    charges = ledger.charges()
    prices = price_charges(charges, allow.relation, allow.unit)
    total, left = compose_prices(prices), LifetimeBudget(allow.budget, allow.slack).remaining(prices)
    return BudgetStatus(
        BudgetAmount(allow.budget, allow.slack),
        BudgetAmount(math.inf, sum(each.slack for each in charges))
        if total is None
        else BudgetAmount(total.mu, total.slack),
        BudgetAmount(0.0, 0.0) if left is None else BudgetAmount(left.mu, left.slack),
        len(charges),
        ledger.count_open_runs(),
    )


def log_opened_run(run: str, charge: Charge, remaining: BudgetAmount) -> None:
    """Log a run that was opened, called once its charge is on file."""
    scenario = json.loads(charge.cell)["name"]
    with_slack = f" and slack {format_upper(charge.slack, 3)}" if charge.slack else ""
    _log.info(
        "opened for scenario %s: charged mu = %s%s, left for one more run %s",
        sanitize_line(repr(scenario), 60),
        format_upper(charge.mu, 6),
        with_slack,
        format_lower(remaining.mu, 6),
        extra=log_fields(sanitize_line(run, 40), event="opened"),
    )


class GuardEvents:
    """Counts and logs what a guard's process does: the first hundred refusals, then every thousandth.

    Whoever asks for ever fills no disk: a round is told once, however often it is asked for.
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._last_rounds: dict[tuple[str, bool], int] = {}
        self._last_answer_time, self._version = 0.0, version("fedpriv")

    def record_answer(self, run: str, t: int, *, is_evaluation: bool) -> None:
        """Called after the answer is in the ledger, and so for runs that a budget was charged for."""
        if t > self._last_rounds.get((run, is_evaluation), 0):
            self._last_rounds[run, is_evaluation] = t
            self._counts["evaluations" if is_evaluation else "rounds"] += 1
            self._last_answer_time = time.time()
            words = "an evaluation" if is_evaluation else "a round"
            _log.info("answered %s", words, extra=log_fields(sanitize_line(run, 40), t, "answered"))
        else:
            self._counts["repeated"] += 1

    def record_refusal(self, run: str, reason: str) -> None:
        count = self._counts["refused"] = self._counts["refused"] + 1
        if count <= _FULL_LOG_COUNT or count % _LOG_INTERVAL == 0:
            named, said = sanitize_line(run, 40), sanitize_line(reason, _MAX_REASON_LENGTH)
            _log.warning("refusal %d, run %s: %s", count, named, said, extra=log_fields(named, event="refused"))

    def record_failure(self) -> None:
        self._counts["failed"] += 1

    def metrics(self, silo: int, statuses: Mapping[str, BudgetStatus]) -> list[ServiceMetric]:
        """As they are now; `standings` by whose records: of training, or of tests."""
        count, who = self._counts, {"silo": str(silo), "version": self._version}
        found = [
            ServiceMetric("info", "The guard's silo and version.", 1, who),
            ServiceMetric(
                "answered_total", "Rounds answered, each once.", count["rounds"], {"records": "training"}
            ),
            ServiceMetric("answered_total", "", count["evaluations"], {"records": "tests"}),
            ServiceMetric("repeated_total", "Rounds asked for again: they get the same bytes.", count["repeated"]),
            ServiceMetric("refused_total", "Requests refused; the log has reasons.", count["refused"]),
            ServiceMetric(
                "failed_total", "Requests on which the guard failed; the log says why.", count["failed"]
            ),
            ServiceMetric(
                "last_answer_seconds",
                "When a round was answered, since 1970; 0 if never.",
                math.floor(self._last_answer_time),
            ),
        ]
        for records, (budget, used, left, runs, underway) in statuses.items():
            found += [
                ServiceMetric(name, words, value, {"records": records})
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
