"""Observation of a guard: log lines of events, and metrics for monitoring.

Names and reasons can contain text of untrusted servers.  In log lines their control characters are escaped, and
metrics contain neither names nor reasons.

A budget is a μ of Gaussian differential privacy over the lifetime of the records, and a slack, a probability with
which μ may fail.  A run is charged when it is opened.

Guarantee: no line and no metric from here depends on the records except through their number, that of persons,
their shape, and a failure of the guard's code.  The times of lines, and of the last answer, are no part of this:
they say when an answer was computed.
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
"""Number of the first refusals, which are all logged."""
_LOG_INTERVAL = 1000
"""Divisor of the numbers of later refusals that are logged."""
_MAX_REASON_LENGTH = 300
"""Most characters of a reason that are logged, some of them as longer escapes."""


class BudgetAmount(NamedTuple):
    """Amount of a budget, or of charges to it."""

    mu: float
    """μ, or infinity for charges that nothing bounds, such as that of a run without noise."""
    slack: float


class BudgetStatus(NamedTuple):
    """Status of a policy's budget in a ledger, with the remaining budget for one more run."""

    budget: BudgetAmount
    charge: BudgetAmount
    remaining: BudgetAmount
    run_count: int
    open_run_count: int


def budget_status(ledger: SiloLedger, allow: RunLimits) -> BudgetStatus:
    """Compute the budget status from the charges of a ledger, not raised to today's prices."""
    charges = ledger.charges()
    prices = price_charges(charges, allow.relation, allow.unit)
    total, remaining = compose_prices(prices), LifetimeBudget(allow.budget, allow.slack).remaining(prices)
    return BudgetStatus(
        BudgetAmount(allow.budget, allow.slack),
        BudgetAmount(math.inf, sum(charge.slack for charge in charges))
        if total is None
        else BudgetAmount(total.mu, total.slack),
        BudgetAmount(0.0, 0.0) if remaining is None else BudgetAmount(remaining.mu, remaining.slack),
        len(charges),
        ledger.count_open_runs(),
    )


def log_opened_run(run: str, charge: Charge, remaining: BudgetAmount) -> None:
    """Log a run that was opened, after its charge was stored.

    Args:
        run: Name of the run in the ledger.
        charge: Charge of the run.
        remaining: Remaining budget for one more run.
    """
    _log.info(
        "opened for scenario %s: charged mu = %s%s, left for one more run %s",
        sanitize_line(repr(json.loads(charge.cell)["name"]), 60),
        format_upper(charge.mu, 6),
        f" and slack {format_upper(charge.slack, 3)}" if charge.slack else "",
        format_lower(remaining.mu, 6),
        extra=log_fields(sanitize_line(run, 40), event="opened"),
    )


class GuardEvents:
    """Counter and logger of a guard's events.

    The first hundred refusals are logged, and then every thousandth.  A round is logged at most once, however
    often it is repeated.
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._last_rounds: dict[tuple[str, bool], int] = {}
        self._last_answer_time, self._version = 0.0, version("fedpriv")

    def record_answer(self, run: str, t: int, *, is_evaluation: bool) -> None:
        """Count an answer, and log it if its round is later than all recorded rounds of the run.

        Args:
            run: Name of the run in the ledger.
            t: Round, from 1.
            is_evaluation: Whether the answer is from the guard of the test records.
        """
        if t > self._last_rounds.get((run, is_evaluation), 0):
            self._last_rounds[run, is_evaluation] = t
            self._counts["evaluations" if is_evaluation else "rounds"] += 1
            self._last_answer_time = time.time()
            _log.info(
                "answered %s",
                "an evaluation" if is_evaluation else "a round",
                extra=log_fields(sanitize_line(run, 40), t, "answered"),
            )
        else:
            self._counts["repeated"] += 1

    def record_refusal(self, run: str, reason: str) -> None:
        count = self._counts["refused"] = self._counts["refused"] + 1
        if count <= _FULL_LOG_COUNT or count % _LOG_INTERVAL == 0:
            run_name, short_reason = sanitize_line(run, 40), sanitize_line(reason, _MAX_REASON_LENGTH)
            _log.warning(
                "refusal %d, run %s: %s",
                count,
                run_name,
                short_reason,
                extra=log_fields(run_name, event="refused"),
            )

    def record_failure(self) -> None:
        self._counts["failed"] += 1

    def metrics(self, silo: int, statuses: Mapping[str, BudgetStatus]) -> list[ServiceMetric]:
        """Return the current metrics.

        Args:
            silo: Number of the silo.
            statuses: Budget status of each ledger by its kind of records, "training" or "tests".
        """
        counts, labels = self._counts, {"silo": str(silo), "version": self._version}
        metrics = [
            ServiceMetric("info", "The guard's silo and version.", 1, labels),
            ServiceMetric(
                "answered_total", "Rounds answered, each once.", counts["rounds"], {"records": "training"}
            ),
            ServiceMetric("answered_total", "", counts["evaluations"], {"records": "tests"}),
            ServiceMetric(
                "repeated_total", "Rounds asked for again: they get the same bytes.", counts["repeated"]
            ),
            ServiceMetric("refused_total", "Requests refused; the log has reasons.", counts["refused"]),
            ServiceMetric(
                "failed_total", "Requests on which the guard failed; the log says why.", counts["failed"]
            ),
            ServiceMetric(
                "last_answer_seconds",
                "When a round was last answered, since 1970; 0 if not since the start.",
                math.floor(self._last_answer_time),
            ),
            *(
                ServiceMetric(name, help_text, value, {"records": records})
                for records, (budget, charge, remaining, run_count, open_count) in statuses.items()
                for name, help_text, value in (
                    ("runs", "Runs that were ever opened, and charged.", run_count),
                    ("runs_open", "Runs under way.", open_count),
                    ("budget_mu", "The lifetime budget of the policy.", budget.mu),
                    ("spent_mu", "Spent of it; rounded up.", charge.mu),
                    ("left_mu", "The most that one more run may cost; rounded down.", remaining.mu),
                    ("budget_slack", "The lifetime slack of the policy.", budget.slack),
                    ("spent_slack", "Spent of it.", charge.slack),
                )
            ),
        ]
        return [metric._replace(name=f"fedpriv_guard_{metric.name}") for metric in metrics]
