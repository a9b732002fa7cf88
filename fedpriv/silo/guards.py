"""A silo's guards: one of the records that it trains on, one of its test records, if evaluations are answered.

Evaluations are runs of their own, with a ledger and a budget of their own, and the same guard answers both.

A silo's administrator asks the ledgers here: what was spent, and to end a run.
"""

import json
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from fedpriv.core.errors import InputError, sanitize_line
from fedpriv.core.figures import format_count, format_lower, format_upper
from fedpriv.loss.objective import Objective
from fedpriv.noise.integers import gaussian
from fedpriv.noise.trust import RECORD
from fedpriv.plan.evaluation import evaluation_cell, evaluation_count, make_evaluation_plan
from fedpriv.plan.plan import Plan
from fedpriv.scenario.schema import Cell
from fedpriv.silo.admission import ROUND_UP, Admission, TimeLimit
from fedpriv.silo.fingerprint import begin_ledger, check_records
from fedpriv.silo.guard import Guard, open_guard
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.memory import MemoryPool
from fedpriv.silo.policy import Policy, read_policy
from fedpriv.silo.seen import budget_status
from fedpriv.silo.shard import Shard


@dataclass(frozen=True)
class EvaluationAdmission(Admission):
    """The policy of `Policy.for_tests`, applied to what a scenario asks of the silo's test records."""

    def _plan_run(self, cell: Cell, objective: Objective) -> tuple[Cell, Plan]:
        asked = make_evaluation_plan(cell, objective, for_release=True)
        assert asked is not None  # checked with the participation
        return evaluation_cell(cell), asked.plan

    def _check_participation(self, cell: Cell) -> None:
        """All test records take part in every evaluation, whatever the training samples."""
        if cell.evaluation is None:
            raise self.refusal_error("the scenario has no [evaluation]")
        assert self.policy.evaluation is not None
        if (count := evaluation_count(cell)) > (most := self.policy.evaluation.evaluations):
            raise self.refusal_error(f"the scenario has {count} evaluations, allowed are {most}")

    def _check_record_count(self, cell: Cell) -> None:
        assert cell.evaluation is not None
        needed = cell.evaluation.records_per_silo(cell.federation.silos)[self.policy.silo]
        if needed > len(self.shard.labels):
            raise self.refusal_error(
                f"the scenario evaluates on {needed} test records of this silo, here are fewer"
            )


@dataclass(frozen=True)
class Guards:
    """The guards of one silo."""

    training: Guard
    tests: Guard | None
    """None if no evaluation is answered."""


def begin_ledgers(policy: Policy) -> list[Policy]:
    """Begin the ledgers of a policy's records, each once; the policies whose ledgers were begun.

    InputError if all of them are there, or were.  A policy that gets an [evaluation] later has one to begin.
    """
    wanted = policies_with_shards(policy)
    missing = [(of, own) for of, own in wanted if not (of.ledger.exists() or of.mark_path.exists())]
    for of, own in wanted:
        if missing and of.ledger.exists():
            with closing(SiloLedger(of.ledger, of.mark_path)) as ledger:
                check_records(of, ledger, own)  # its key is that of the others
    for of, own in missing or wanted:  # if none is missing it is refused there
        begin_ledger(of, own)
    return [of for of, _ in missing]


def policies_with_shards(policy: Policy) -> list[tuple[Policy, Shard]]:
    """A policy with the records that it trains on, and that of its test records with these, if it has any."""
    shard, tests = policy.load_shard(), policy.test_policy
    return [(policy, shard), *([] if tests is None else [(tests, held_out_shard(policy, shard))])]


def open_guards(policy: Policy, time_limit: TimeLimit = nullcontext) -> Guards:
    """The guards of a policy; InputError if shard or a ledger cannot be used.

    What draws is loaded now, before the process is held to a limit: it is no part of what a run takes.
    """
    gaussian.warm_up()
    room = MemoryPool(policy.allow.memory)
    training = open_guard(policy, time_limit, room)
    return Guards(training, _open_test_guard(policy, training.shard, time_limit, room))


def _open_test_guard(policy: Policy, shard: Shard, time_limit: TimeLimit, memory_pool: MemoryPool) -> Guard | None:
    """The guard of a policy's test records; None if no evaluation is answered.

    InputError if the policy allows evaluations that its shard or ledger cannot answer.

    Guarantee: as `Guard`, for each test record and the budget of [evaluation]: it holds no training record.
    """
    if (tests := policy.test_policy) is None:
        return None
    own, ledger = held_out_shard(policy, shard), SiloLedger(tests.ledger, tests.mark_path)
    return Guard(tests, ledger, own, time_limit, EvaluationAdmission(tests, own, time_limit), memory_pool)


def held_out_shard(policy: Policy, shard: Shard) -> Shard:
    """The silo's test records; InputError, in one line, if there are none, or units are not records."""
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
    """The budget, what is spent and left of it, and a line a run, in the order they were opened; a policy's path.

    Names come from servers and are shown with their control characters escaped.
    """
    policy = read_policy(path)
    tests = policy.test_policy
    return _format_ledger_status(policy) + (
        [] if tests is None else ["evaluations of test records:", *_format_ledger_status(tests)]
    )


def _format_ledger_status(policy: Policy) -> list[str]:
    with closing(SiloLedger(policy.ledger, policy.mark_path)) as ledger:
        rows, allow = ledger.list_runs(), policy.allow
        _, used, left, *_ = budget_status(ledger, allow)
    lines = [
        f"silo {policy.silo}: {policy.ledger}",
        f"budget mu = {format_upper(allow.budget, 6)}, spent "
        f"{format_upper(used.mu, 6)} by {format_count(len(rows), 'run')}, "
        f"left for one more {format_lower(left.mu, 6)}",
    ]
    if allow.slack or any(row.slack for row in rows):
        lines.append(
            f"slack {format_upper(allow.slack, 6)}, spent {format_upper(used.slack, 3)}, left "
            f"{format_lower(left.slack, 3)}"
        )
    for row in rows:
        of = json.loads(row.cell)
        with_slack = f" with slack {format_upper(row.slack, 6)}" if row.slack else ""
        state = "under way" if row.is_open else "over"
        lines.append(
            f"{row.run_id!r}: mu = {format_upper(row.mu, 6)}{with_slack}, "
            f"{format_count(row.answered_count, 'round')} answered, {state}, "
            f"{of['algorithm']['name']} ({of['algorithm']['trust']}), scenario {of['name']!r}"
        )
    return lines


def format_price_check(path: Path) -> list[str]:
    """What each run of a policy's ledgers costs by its scenario, beside what it was charged."""
    guards = open_guards(read_policy(path))
    return [
        line
        for guard in (guards.training, guards.tests)
        if guard is not None
        for line in _format_guard_prices(guard)
    ]


def _format_guard_prices(guard: Guard) -> list[str]:
    prices = guard.charged_prices()
    more = [each for each in prices if each[2] > each[1] * ROUND_UP]
    unknown = sum(1 for *_, least in prices if not least)
    lines = [
        f"{sanitize_line(repr(name))}: charged {format_upper(mu, 6)}, and its scenario costs "
        f"{format_upper(least, 6)}: that is what counts"
        for name, mu, least in more
    ]
    known = len(prices) - len(more) - unknown
    said = f"rows, chain and mark agree; prices recomputed: {format_count(known, 'run')} charged enough"
    return [*lines, said + (f", {unknown} cannot be planned by this policy" if unknown else "")]


def end_run(path: Path, run_id: str) -> None:
    """Wipe key and state of a run, and of its evaluations; InputError if no ledger has one of this name."""
    policy = read_policy(path)
    ended = [_end_run_in_ledger(each, run_id) for each in (policy, policy.test_policy) if each is not None]
    if not any(ended):
        raise InputError(f"{policy.ledger}: has no run {run_id!r}; `fedpriv silo status` lists them")


def _end_run_in_ledger(policy: Policy, run_id: str) -> bool:
    with closing(SiloLedger(policy.ledger, policy.mark_path)) as ledger, ledger.lock(), ledger.transaction():
        if found := ledger.find_run(run_id) is not None:
            ledger.end_run(run_id)
    return found
