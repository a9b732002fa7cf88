"""A silo's guards: one of the records that it trains on, one of its test records, if evaluations are answered.

Evaluations are runs of their own, with a ledger and a budget of their own, and the same guard answers both.

A silo's administrator asks the ledgers here: what was spent, and to end a run.
"""

import json
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from fedpriv.core.errors import InputError, printable
from fedpriv.core.figures import counted, lower_figure, upper_figure
from fedpriv.loss.objective import Objective
from fedpriv.noise.integers import gaussian
from fedpriv.noise.trust import RECORD
from fedpriv.plan.evaluation import evaluation_cell, evaluation_plan_of, evaluations_of
from fedpriv.plan.plan import Plan
from fedpriv.scenario.schema import Cell
from fedpriv.silo.admission import ROUNDING, Admission, InTime
from fedpriv.silo.fingerprint import begin_ledger, check_records
from fedpriv.silo.guard import Guard, open_guard
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.memory import Room
from fedpriv.silo.policy import Policy, read_policy
from fedpriv.silo.seen import standing_of
from fedpriv.silo.shard import Shard


@dataclass(frozen=True)
class EvaluationAdmission(Admission):
    """The policy of `Policy.for_tests`, applied to what a scenario asks of the silo's test records."""

    def _planned(self, cell: Cell, objective: Objective) -> tuple[Cell, Plan]:
        asked = evaluation_plan_of(cell, objective, released=True)
        assert asked is not None  # checked with the participation
        return evaluation_cell(cell), asked.plan

    def _check_participation(self, cell: Cell) -> None:
        """All test records take part in every evaluation, whatever the training samples."""
        if cell.evaluation is None:
            raise self.refusal("the scenario has no [evaluation]")
        assert self.policy.evaluation is not None
        if (count := evaluations_of(cell)) > (most := self.policy.evaluation.evaluations):
            raise self.refusal(f"the scenario has {count} evaluations, allowed are {most}")

    def _check_enough(self, cell: Cell) -> None:
        assert cell.evaluation is not None
        needed = cell.evaluation.of_silos(cell.federation.silos)[self.policy.silo]
        if needed > len(self.shard.labels):
            raise self.refusal(f"the scenario evaluates on {needed} test records of this silo, here are fewer")


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
    wanted = records_of(policy)
    missing = [(of, own) for of, own in wanted if not (of.ledger.exists() or of.marked.exists())]
    for of, own in wanted:
        if missing and of.ledger.exists():
            with closing(SiloLedger(of.ledger, of.marked)) as ledger:
                check_records(of, ledger, own)  # its key is that of the others
    for of, own in missing or wanted:  # if none is missing it is refused there
        begin_ledger(of, own)
    return [of for of, _ in missing]


def records_of(policy: Policy) -> list[tuple[Policy, Shard]]:
    """A policy with the records that it trains on, and that of its test records with these, if it has any."""
    shard, tests = policy.load_shard(), policy.for_tests
    return [(policy, shard), *([] if tests is None else [(tests, held_out(policy, shard))])]


def open_guards(policy: Policy, in_time: InTime = nullcontext) -> Guards:
    """The guards of a policy; InputError if shard or a ledger cannot be used.

    What draws is loaded now, before the process is held to a limit: it is no part of what a run takes.
    """
    gaussian.load()
    room = Room(policy.allow.memory)
    training = open_guard(policy, in_time, room)
    return Guards(training, _of_tests(policy, training.shard, in_time, room))


def _of_tests(policy: Policy, shard: Shard, in_time: InTime, room: Room) -> Guard | None:
    """The guard of a policy's test records; None if no evaluation is answered.

    InputError if the policy allows evaluations that its shard or ledger cannot answer.

    Guarantee: as `Guard`, for each test record and the budget of [evaluation]: it holds no training record.
    """
    if (tests := policy.for_tests) is None:
        return None
    own, ledger = held_out(policy, shard), SiloLedger(tests.ledger, tests.marked)
    return Guard(tests, ledger, own, in_time, EvaluationAdmission(tests, own, in_time), room)


def held_out(policy: Policy, shard: Shard) -> Shard:
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


def status_lines(path: Path) -> list[str]:
    """The budget, what is spent and left of it, and a line a run, in the order they were opened; a policy's path.

    Names come from servers and are shown with their control characters escaped.
    """
    policy = read_policy(path)
    tests = policy.for_tests
    return _lines(policy) + ([] if tests is None else ["evaluations of test records:", *_lines(tests)])


def _lines(policy: Policy) -> list[str]:
    with closing(SiloLedger(policy.ledger, policy.marked)) as ledger:
        rows, allow = ledger.overview(), policy.allow
        _, used, left, *_ = standing_of(ledger, allow)
    lines = [
        f"silo {policy.silo}: {policy.ledger}",
        f"budget mu = {upper_figure(allow.budget, 6)}, spent "
        f"{upper_figure(used.mu, 6)} by {counted(len(rows), 'run')}, "
        f"left for one more {lower_figure(left.mu, 6)}",
    ]
    if allow.slack or any(row.slack for row in rows):
        lines.append(
            f"slack {upper_figure(allow.slack, 6)}, spent {upper_figure(used.slack, 3)}, left "
            f"{lower_figure(left.slack, 3)}"
        )
    for row in rows:
        of = json.loads(row.cell)
        with_slack = f" with slack {upper_figure(row.slack, 6)}" if row.slack else ""
        state = "under way" if row.underway else "over"
        lines.append(
            f"{row.run_id!r}: mu = {upper_figure(row.mu, 6)}{with_slack}, "
            f"{counted(row.answered, 'round')} answered, {state}, "
            f"{of['algorithm']['name']} ({of['algorithm']['trust']}), scenario {of['name']!r}"
        )
    return lines


def checked_lines(path: Path) -> list[str]:
    """What each run of a policy's ledgers costs by its scenario, beside what it was charged."""
    guards = open_guards(read_policy(path))
    return [line for guard in (guards.training, guards.tests) if guard is not None for line in _checked(guard)]


def _checked(guard: Guard) -> list[str]:
    prices = guard.past_prices()
    more = [each for each in prices if each[2] > each[1] * ROUNDING]
    unknown = sum(1 for *_, least in prices if not least)
    lines = [
        f"{printable(repr(name))}: charged {upper_figure(mu, 6)}, and its scenario costs "
        f"{upper_figure(least, 6)}: that is what counts"
        for name, mu, least in more
    ]
    known = len(prices) - len(more) - unknown
    said = f"rows, chain and mark agree; prices recomputed: {counted(known, 'run')} charged enough"
    return [*lines, said + (f", {unknown} cannot be planned by this policy" if unknown else "")]


def end_run(path: Path, run_id: str) -> None:
    """Wipe key and state of a run, and of its evaluations; InputError if no ledger has one of this name."""
    policy = read_policy(path)
    ended = [_ended(each, run_id) for each in (policy, policy.for_tests) if each is not None]
    if not any(ended):
        raise InputError(f"{policy.ledger}: has no run {run_id!r}; `fedpriv silo status` lists them")


def _ended(policy: Policy, run_id: str) -> bool:
    with closing(SiloLedger(policy.ledger, policy.marked)) as ledger, ledger.alone(), ledger.transaction():
        if found := ledger.run(run_id) is not None:
            ledger.finish(run_id)
    return found
