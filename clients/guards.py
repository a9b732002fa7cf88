"""A silo's guards: one of the records that it trains on, one of its test records, if evaluations are answered.

Evaluations are runs of their own, with a ledger and a budget of their own, and the same guard answers both.
"""

from contextlib import nullcontext
from dataclasses import dataclass

from fedpriv.clients.admission import Admission, InTime
from fedpriv.clients.guard import Guard, open_guard
from fedpriv.clients.kept import Room
from fedpriv.clients.ledger import SiloLedger, create_ledger
from fedpriv.clients.policy import Policy
from fedpriv.clients.shard import Shard
from fedpriv.errors import InputError
from fedpriv.objectives import Objective
from fedpriv.privacy.unit import RECORD
from fedpriv.running.evaluation import evaluation_cell, evaluation_plan_of, evaluations_of
from fedpriv.running.plan import Plan
from fedpriv.scenario import Cell


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
    shard = policy.load_shard()
    wanted = [(policy, shard)]
    if (tests := policy.for_tests) is not None:
        wanted.append((tests, held_out(policy, shard)))
    missing = [(of, own) for of, own in wanted if not (of.ledger.exists() or of.marked.exists())]
    for of, own in missing or wanted:  # if none is missing it is refused there
        create_ledger(of.ledger, of.marked, own.fingerprint)
    return [of for of, _ in missing]


def open_guards(policy: Policy, in_time: InTime = nullcontext) -> Guards:
    """The guards of a policy; InputError if shard or a ledger cannot be used."""
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
