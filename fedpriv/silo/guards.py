"""Guards of a silo: one for training and, if the policy allows evaluations, one for test records.

A guard answers a server's queries within the silo's policy, and charges a run to a ledger when the run is opened.
The charge is a μ of Gaussian differential privacy, and a slack: a probability with which μ may fail.

The guard of test records has its own ledger and budget.  The evaluations of a run are one run of this guard.
"""

import json
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from fedpriv.core.errors import InputError, refuse, sanitize_line
from fedpriv.core.figures import format_count, format_lower, format_upper
from fedpriv.loss.objective import Objective
from fedpriv.noise.integers import gaussian
from fedpriv.noise.trust import RECORD
from fedpriv.plan.evaluation import evaluation_cell, evaluation_count, make_evaluation_plan
from fedpriv.plan.plan import Plan
from fedpriv.scenario.schema import Cell
from fedpriv.silo.admission import ROUND_UP, Admission, TimeLimit
from fedpriv.silo.fingerprint import SpentBefore, begin_ledger, check_records, is_begun
from fedpriv.silo.guard import Guard, open_guard
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.memory import MemoryPool
from fedpriv.silo.policy import Policy, read_policy
from fedpriv.silo.seen import budget_status
from fedpriv.silo.shard import Shard


@dataclass(frozen=True)
class EvaluationAdmission(Admission):
    """Admission of evaluations, by the policy for the silo's test records (`Policy.test_policy`)."""

    def _plan_run(self, cell: Cell, objective: Objective) -> tuple[Cell, Plan]:
        evaluation = make_evaluation_plan(cell, objective, for_release=True)
        assert evaluation is not None  # `_check_participation` has refused cells without an evaluation.
        return evaluation_cell(cell), evaluation.plan

    def _check_participation(self, cell: Cell) -> None:
        """Check the number of evaluations, since training records do not take part in them.

        Raises:
            RunError: If the scenario has no evaluation, or more of them than the policy allows.
        """
        if cell.evaluation is None:
            raise self.refusal_error("the scenario has no [evaluation]")
        assert self.policy.evaluation is not None
        if (count := evaluation_count(cell)) > (max_count := self.policy.evaluation.evaluations):
            raise self.refusal_error(f"the scenario has {count} evaluations, allowed are {max_count}")

    def _check_record_count(self, cell: Cell) -> None:
        assert cell.evaluation is not None
        record_count = cell.evaluation.records_per_silo(cell.federation.silos)[self.policy.silo]
        if record_count > len(self.shard.labels):
            raise self.refusal_error(
                f"the scenario evaluates on {record_count} test records of this silo, here are fewer"
            )


@dataclass(frozen=True)
class Guards:
    """Guards of one silo."""

    training: Guard
    tests: Guard | None
    """Guard of the test records, or None if no evaluation is answered."""


def begin_ledgers(policy: Policy, earlier_charge: SpentBefore | None = None) -> list[Policy]:
    """Create the missing ledgers of a policy's records, and return the policies of these ledgers.

    A policy has one ledger for training records, and one for test records if it has a section [evaluation].

    Args:
        policy: Policy of the silo.
        earlier_charge: Budget of the training records that was spent before, or None.

    Raises:
        InputError: If no ledger is missing, records, key or an existing ledger cannot be used, or `earlier_charge`
            is no budget, names nobody, or comes after the ledger.
        LedgerError: If a ledger of fedpriv 0.3.0 cannot be converted now.
    """
    if earlier_charge is not None:
        mu, slack, said_by = earlier_charge
        refuse(
            {
                f"--spent {mu:g}, --spent-slack {slack:g}: expected a mu above 0, a slack from 0 to below 1": (
                    not mu > 0.0 <= slack < 1.0
                ),
                "--spent: give --said-by, the person who says so, and how it is known, in one line of text": (
                    not said_by.strip() or not said_by.isprintable()
                ),
                f"--spent: {policy.ledger} has been begun, and nothing is entered in it": is_begun(policy),
            }
        )
    pairs = policies_with_shards(policy)
    missing = [(record_policy, shard) for record_policy, shard in pairs if not is_begun(record_policy)]
    for record_policy, shard in pairs:
        if missing and record_policy.ledger.exists():
            with closing(SiloLedger(record_policy.ledger, record_policy.mark_path)) as ledger:
                check_records(record_policy, ledger, shard)  # The silo has one key for all its ledgers.
    # With nothing missing, `begin_ledger` raises an error about the ledger that exists.
    for record_policy, shard in missing or pairs:
        begin_ledger(record_policy, shard, earlier_charge if record_policy is policy else None)
    return [record_policy for record_policy, _ in missing]


def policies_with_shards(policy: Policy) -> list[tuple[Policy, Shard]]:
    """Pair the policy with its training records, and its policy for test records with the test records.

    The second pair is missing if the policy has no section [evaluation].

    Raises:
        InputError: If the records cannot be used, or there are no test records for [evaluation].
    """
    shard, tests = policy.load_shard(), policy.test_policy
    return [(policy, shard), *([] if tests is None else [(tests, held_out_shard(policy, shard))])]


def open_guards(policy: Policy, time_limit: TimeLimit = nullcontext) -> Guards:
    """Open the guards of a policy.

    Raises:
        InputError: If extensions, shard, a ledger, the key of the records, identity or peers cannot be used.
        LedgerError: If a ledger of fedpriv 0.3.0 cannot be converted now.
    """
    # The sampler's memory and time are not to count for a run.
    gaussian.warm_up()
    memory_pool = MemoryPool(policy.allow.memory)
    training = open_guard(policy, time_limit, memory_pool)
    return Guards(training, _open_test_guard(policy, training.shard, time_limit, memory_pool))


def _open_test_guard(policy: Policy, shard: Shard, time_limit: TimeLimit, memory_pool: MemoryPool) -> Guard | None:
    """Open the guard of a policy's test records, or return None if no evaluation is answered.

    Guarantee: that of `Guard` holds for each test record and the budget of [evaluation], and this guard has no
    training record.

    Raises:
        InputError: If the policy allows evaluations that its shard or ledger cannot answer.
        LedgerError: If a ledger of fedpriv 0.3.0 cannot be converted now.
    """
    if (test_policy := policy.test_policy) is None:
        return None
    test_shard, ledger = held_out_shard(policy, shard), SiloLedger(test_policy.ledger, test_policy.mark_path)
    return Guard(
        test_policy,
        ledger,
        test_shard,
        time_limit,
        EvaluationAdmission(test_policy, test_shard, time_limit),
        memory_pool,
    )


def held_out_shard(policy: Policy, shard: Shard) -> Shard:
    """Return the silo's test records.

    Raises:
        InputError: If there are none, or the unit of protection is not the record.
    """
    if policy.allow.unit != RECORD.name:
        raise InputError(
            f'allow.unit = "{policy.allow.unit}": test records are protected one by one; leave [evaluation] out'
        )
    if shard.test is None:
        raise InputError(
            f"{policy.shard}: has no test records, for which [evaluation] answers; leave the section out, or add "
            "test_images (or test_features) and test_labels, or rows that are for testing"
        )
    return shard.test


def format_status(path: Path) -> list[str]:
    """Format budget, charges and remaining budget of a policy's ledgers, and a line for each run.

    Args:
        path: File of the policy.

    Raises:
        InputError: If the policy or a ledger cannot be used.
    """
    policy = read_policy(path)
    tests = policy.test_policy
    return _format_ledger_status(policy) + (
        [] if tests is None else ["evaluations of test records:", *_format_ledger_status(tests)]
    )


def _format_ledger_status(policy: Policy) -> list[str]:
    """Format budget and slack of one ledger, and a line for each run, the oldest first.

    Raises:
        InputError: If the ledger cannot be used.
    """
    with closing(SiloLedger(policy.ledger, policy.mark_path)) as ledger:
        rows, allow = ledger.list_runs(), policy.allow
        status = budget_status(ledger, allow)
    lines = [
        f"silo {policy.silo}: {policy.ledger}",
        f"budget mu = {format_upper(allow.budget, 6)}, spent "
        f"{format_upper(status.charge.mu, 6)} by {format_count(len(rows), 'run')}, "
        f"left for one more {format_lower(status.remaining.mu, 6)}",
    ]
    if allow.slack or any(row.slack for row in rows):
        lines.append(
            f"slack {format_upper(allow.slack, 6)}, spent {format_upper(status.charge.slack, 3)}, left "
            f"{format_lower(status.remaining.slack, 3)}"
        )
    for row in rows:
        cell = json.loads(row.cell)
        with_slack = f" with slack {format_upper(row.slack, 6)}" if row.slack else ""
        lines.append(
            f"{row.run_id!r}: mu = {format_upper(row.mu, 6)}{with_slack}, "
            f"{format_count(row.answered_count, 'round')} answered, {'under way' if row.is_open else 'over'}, "
            f"{cell['algorithm']['name']} ({cell['algorithm']['trust']}), scenario {cell['name']!r}"
        )
    return lines


def format_price_check(path: Path) -> list[str]:
    """Format the runs of a policy's ledgers that were charged too little, and a summary of each ledger.

    Args:
        path: File of the policy.

    Raises:
        InputError: If the policy, its records, keys and extensions, or a ledger cannot be used.
        LedgerError: If a ledger of fedpriv 0.3.0 cannot be converted now.
    """
    guards = open_guards(read_policy(path))
    return [
        line
        for guard in (guards.training, guards.tests)
        if guard is not None
        for line in _format_guard_prices(guard)
    ]


def _format_guard_prices(guard: Guard) -> list[str]:
    """Format the runs that were charged too little, and a summary of all runs.

    A run is charged too little if the least μ that any policy can have charged by today's accounting
    (`Admission.min_mu`, 0 if it is unknown) is above the charged μ, by more than rounding.
    """
    prices = guard.charged_prices()
    undercharged = [(name, mu, min_mu) for name, mu, min_mu in prices if min_mu > mu * ROUND_UP]
    unknown_count = sum(1 for *_, min_mu in prices if not min_mu)
    lines = [
        f"{sanitize_line(repr(name))}: charged {format_upper(mu, 6)}, and its scenario costs "
        f"{format_upper(min_mu, 6)}: that is what counts"
        for name, mu, min_mu in undercharged
    ]
    enough_count = len(prices) - len(undercharged) - unknown_count
    return [
        *lines,
        f"rows, chain and mark agree; prices recomputed: {format_count(enough_count, 'run')} charged enough"
        + (f", {unknown_count} cannot be planned by this policy" if unknown_count else ""),
    ]


def end_run(path: Path, run_id: str) -> None:
    """Erase key and state of a run, and of its evaluations, if it is under way.

    Args:
        path: File of the policy.
        run_id: Name of the run, which `format_status` shows in quotes.

    Raises:
        InputError: If the policy or a ledger cannot be used, or no ledger has a run of this name.
        LedgerError: If another process holds a ledger's lock, or the disk refuses.
    """
    policy = read_policy(path)
    policies = [record_policy for record_policy in (policy, policy.test_policy) if record_policy is not None]
    if True not in [_end_run_in_ledger(record_policy, run_id) for record_policy in policies]:
        raise InputError(f"{policy.ledger}: has no run {run_id!r}; `fedpriv silo status` lists them")


def _end_run_in_ledger(policy: Policy, run_id: str) -> bool:
    with closing(SiloLedger(policy.ledger, policy.mark_path)) as ledger, ledger.lock(), ledger.transaction():
        if is_known := ledger.find_run(run_id) is not None:
            ledger.end_run(run_id)
    return is_known
