"""Admit a server's scenario by a policy, and price it, without a look at a record.

A scenario is text from a stranger: it is bounded before it is parsed, its numbers before they are used, and the
building of its plan in memory and, where the process can, in time.

A price is (μ, δ₀), what a run takes of the silo's lifetime budget by this installation's accounting.  An exact μ
has slack δ₀ = 0; a run whose records take part in secret has a curve of (ε, δ), and is charged the μ that holds
but for a probability of its slack, of which the policy says how much a run may use up.

A guard admits and prices a scenario when it opens its run (fedpriv/silo/guard.py), and checks names, missed rounds
and queries at every answer.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fedpriv.accounting.budget import ApproximateGDP, LifetimeBudget, Price, composed, price
from fedpriv.accounting.gaussian import relation_named
from fedpriv.core.errors import CodeError, FedprivError, InputError, RunError, printable
from fedpriv.core.extensions import ADDED, added, is_loaded
from fedpriv.core.figures import lower_figure
from fedpriv.core.limits import mebibytes
from fedpriv.core.random import SERVER
from fedpriv.core.signed import bounded_int, no_number
from fedpriv.loss.imported import is_import_path
from fedpriv.loss.models import SHIPPED as SHIPPED_MODELS
from fedpriv.loss.objective import Objective
from fedpriv.noise.registry import AUTO
from fedpriv.noise.registry import MECHANISMS as SHIPPED_MECHANISMS
from fedpriv.noise.trust import RECORD, trust_named, unit_named
from fedpriv.papers.table import SHIPPED as SHIPPED_ALGORITHMS
from fedpriv.participation.registry import ADDED as ADDED_SAMPLINGS
from fedpriv.participation.registry import PARTICIPATIONS as SHIPPED_SAMPLINGS
from fedpriv.plan.plan import Plan, plan_of
from fedpriv.plan.task import ModelInputs
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.memory import LONGEST_STATE, state_of, taken_by
from fedpriv.silo.policy import Cost, Policy, cost_of, presuming, priced_stream, prices_of, unaccountable
from fedpriv.silo.shard import Shard


class Charge(NamedTuple):
    """What the ledger has of a run: its scenario as canonical JSON, and what it was charged."""

    cell: str
    mu: float
    """inf for a run without noise."""
    slack: float


def spent(charges: Sequence[Charge], relation: str, unit: str = RECORD.name) -> list[Price]:
    """What runs of the past cost a budget with neighbours that differ in one `unit` under `relation`.

    Guarantee: a run that was charged for other neighbours costs what is known of these.  Units of replace-one, and
    a part of one, are two steps of zero-out apart, which doubles an exact μ; of a sampled run nothing is known
    then, and nothing of a run whose unit is a part of `unit`.
    """
    return [_spent(each, relation, unit) for each in charges]


def _spent(charge: Charge, relation: str, unit: str) -> Price:
    if math.isinf(charge.mu):
        return None
    try:
        asked = json.loads(charge.cell)["privacy"]
        charged, of = relation_named(asked["relation"]), unit_named(asked.get("unit", RECORD.name))
    except (ValueError, KeyError, TypeError, AttributeError, InputError):
        return None  # of whom it was is not known any more
    if not of.covers(unit_named(unit)):
        return None
    exchanged = relation_named(relation) == "replace-one" or of.name != unit
    steps = 2 if exchanged and charged == "zero-out" else 1
    return price(ApproximateGDP(charge.mu, charge.slack), steps)


def refusal(budget: LifetimeBudget, before: Sequence[Price], asked: Price) -> str | None:
    """Why a run does not fit into a budget beside those before it; None if it does."""
    if budget.refusal(before, asked) is None:
        return None
    total = together([*before, asked])
    slack = f" with slack {lower_figure(budget.slack, 3)}" if budget.slack else ""
    limit = lower_figure(budget.mu) + slack  # rounds down: it has `ROUNDING` on top of what a policy says
    return f"the run costs {words(asked)}, with all before {_bare(total)}; the budget is {limit}"


def together(prices: Sequence[Price]) -> Price:
    """All of them; None if one of them is more than any budget."""
    known = [each for each in prices if each is not None]
    return composed(known) if len(known) == len(prices) and sum(each.slack for each in known) < 1.0 else None


def words(asked: Price) -> str:
    """A price as a person reads it."""
    return f"mu = {_bare(asked)}"


def _bare(cost: Price) -> str:
    return "inf" if cost is None else cost.words


InTime = Callable[[], AbstractContextManager[None]]
_log = logging.getLogger("fedpriv.guard")
ROUNDING = 1 + 1e-9
_LONGEST_NAME = 128
_MOST_MISSED = 2**25
"""Values of noise of left-out rounds: some ten seconds of a processor."""
_NO_MECHANISM = "is none of fedpriv's, and those alone add noise in a guard"
LONGEST_SCENARIO = 2**16
"""Bytes of a scenario as JSON."""
_MOST_SILOS = 100_000  # a plan holds a weight for each, and a server may claim any number
_LARGEST_NUMBER = 2.0**53
_LARGEST_PRIVACY = 1e6
"""Of mu, zcdp and epsilon: far beyond what protects anything, and within what their conversions can do."""


@dataclass(frozen=True)
class Admitted:
    """A scenario that the policy allows, with its plan and what it costs."""

    cell: Cell
    plan: Plan
    cost: Cost
    """Of this silo's whole stream, by this installation's accounting."""
    digest: bytes
    """Of the canonical scenario: what silos of one run have in common."""
    taken: int
    """Bytes of memory while it is answered, with what is kept for it."""


@dataclass(frozen=True)
class Admission:
    """A policy, applied to scenarios for one shard; `in_time` bounds how long a plan may take."""

    policy: Policy
    shard: Shard
    in_time: InTime = nullcontext

    def admit(self, canonical: str) -> Admitted:
        """RunError, in words that depend on scenario and policy alone, if the policy does not allow it."""
        with self._refusing():
            cell = resolve_cell(json.loads(canonical), "the server's scenario")
            self._check_cell(cell)
            features, objective = self._objective(cell)
            planned, plan = self._planned(cell, objective)
            memory, cost = self._memory(cell, plan, features), self._cost(planned, plan)
            return Admitted(cell, plan, cost, hashlib.sha256(canonical.encode()).digest(), memory)

    def price(self, admitted: Admitted, slack: float) -> Price:
        """What an admitted run costs at a `slack` for runs that need one; RunError if there is no price."""
        with self._refusing():
            return admitted.cost.at(slack)

    def least_mu(self, charge: Charge) -> float:
        """The least μ that any policy can have charged for a run of the past; 0 where it cannot be planned here.

        Silos that a policy trusted then may be trusted no more, so the cheaper of both counts.
        """
        try:
            cell, objective = self.recall(charge.cell)
            with self._refusing():
                prices = prices_of(self._planned(cell, objective)[1], self.policy.silo, charge.slack)
        except FedprivError:
            return 0.0
        return min(math.inf if each is None else each.mu for each in prices)

    def recall(self, canonical: str) -> tuple[Cell, Objective]:
        """A run of the past, which was within the policy of its time; RunError if it cannot be planned now.

        Guarantee: a stored scenario imports no code but fedpriv's own, of whatever add-on, and what the policy
        permits now.
        """
        allow = self.policy.allow.model_copy(update={"dimension": 2**62})
        wide = replace(self, policy=self.policy.model_copy(update={"allow": allow}))
        with self._refusing():
            if (reason := self._unknown(tree := json.loads(canonical), recalled=True)) is not None:
                raise InputError(reason)
            self._check_code(cell := resolve_cell(tree, "a scenario on file"))
            return cell, wide._objective(cell)[1]

    def canonical(self, cell_json: str) -> str:
        """The scenario in one spelling, whoever wrote it; RunError if it is none."""
        if len(cell_json) > LONGEST_SCENARIO:
            raise self.refusal(f"the scenario has {len(cell_json)} characters, allowed are {LONGEST_SCENARIO}")
        try:
            with self._refusing():
                tree = json.loads(cell_json, parse_constant=no_number, parse_int=bounded_int)
                for section, name, number in _numbers_in(tree):
                    self._check_number(section, name, number)
                if isinstance(tree, dict) and (reason := self._unknown(tree)) is not None:
                    raise InputError(reason)
                return json.dumps(resolve_cell(tree, "the server's scenario").canonical(), sort_keys=True)
        except RunError as error:
            raise RunError(f"the scenario that was sent cannot be used: {error}") from None

    def check_name(self, run_id: str) -> None:
        """RunError for what cannot be the name of a run."""
        if not 0 < len(run_id) <= _LONGEST_NAME:
            raise self.refusal(f"the run's name has {len(run_id)} characters, allowed are 1 to {_LONGEST_NAME}")
        if run_id.encode(errors="replace").decode() != run_id:  # half of a pair of surrogates
            raise self.refusal("the run's name is no text")

    def check_missed(self, plan: Plan, t: int, missed: int) -> None:
        """RunError for a round before which more noise of left-out rounds is drawn than others are to wait for.

        Values are counted, and no time is measured: a clock would refuse at one load of the machine what it takes
        at another, and after the round is on record.  A run whose first question is refused is not charged.
        """
        if not missed:
            return
        values = missed * max(plan.rounds[t - 1].stored_length, plan.objective.dimension)
        if values > _MOST_MISSED and plan.noise.std_of(self.policy.silo):
            raise self.refusal(
                f"round {t}: {missed} rounds before it were left out, and their noise has {values} values; at "
                f"most {_MOST_MISSED} are drawn for one answer, so this silo has no part in the run any more"
            )

    def _unknown(self, tree: Mapping[str, Any], *, recalled: bool = False) -> str | None:
        """Why a scenario names code that the policy does not permit, from its text alone; None if it does not.

        `recalled` is for a run of the guard's own ledger, which may be of an add-on that is allowed no more.

        Guarantee: after None, resolving a scenario that is not recalled imports nothing: every row that it names
        is in its table, and every add-on was imported when the guard started.
        """
        allow = self.policy.allow
        for section, shipped, allowed in (
            ("model", SHIPPED_MODELS, allow.models),
            ("algorithm", SHIPPED_ALGORITHMS, allow.algorithms),
        ):
            name = _given(tree, section, "name")
            path = section == "model" and isinstance(name, str) and is_import_path(name)
            if isinstance(name, str) and not path and name not in (*shipped, *allowed):
                return (
                    f"{section}.name = {name[:100]!r} is none of fedpriv's, and allow.{section}s does not name it"
                )
            is_added = section == "model" and isinstance(name, str) and name in ADDED["model"]
            if is_added and not (recalled or getattr(allow, str(name))):
                return f"model.name = {name!r} is of an add-on, and allow.{name} allows no run of it"
        curves = _given(tree, "evaluation", "curves") is not None
        if curves and not recalled and (self.policy.evaluation is None or not is_loaded("evaluation", "curves")):
            return "evaluation.curves: the policy has no section [evaluation], or its add-on is not there"
        asked = _given(tree, "algorithm", "mechanism")
        if isinstance(asked, str) and asked not in (*SHIPPED_MECHANISMS, AUTO):
            return f"algorithm.mechanism = {asked[:100]!r} {_NO_MECHANISM}"
        order = _given(tree, "federation", "sampling")
        if isinstance(order, str) and order not in (*SHIPPED_SAMPLINGS, *ADDED_SAMPLINGS):
            return f"federation.sampling = {order[:100]!r} is none of fedpriv's, and no row of allow.extensions"
        return None

    def refusal(self, reason: str) -> RunError:
        return RunError(f"silo {self.policy.silo} refuses: {reason}")

    def _refusing(self) -> "_Refusing":
        return _Refusing(self.policy.silo, self.in_time())

    def _check_number(self, section: str, name: str, number: float) -> None:
        if not abs(number) <= _LARGEST_NUMBER:
            raise InputError(f"{name} = {number:g}: no number of a scenario is that large")
        if section == "privacy" and not number <= _LARGEST_PRIVACY:
            raise InputError(f"{name} = {number:g}: protects nothing")
        if section == "algorithm" and isinstance(number, int) and number > max(2**12, self.policy.allow.rounds):
            raise InputError(f"{name} = {number}: more than any run that is allowed needs")

    def _planned(self, cell: Cell, objective: Objective) -> tuple[Cell, Plan]:
        """The run that is asked for, and its plan."""
        return cell, plan_of(cell, objective, released=True)

    def _check_cell(self, cell: Cell) -> None:
        """What can be seen of a scenario before anything is built for it."""
        allow, number, federation = self.policy.allow, self.policy.silo, cell.federation
        if not number < federation.silos <= _MOST_SILOS:
            raise self.refusal(f"the scenario has {federation.silos} silos, and this is number {number}")
        if (reason := unaccountable(cell) or unguarded(self.policy, cell)) is not None:
            raise self.refusal(reason)
        for rounds in (federation.total_rounds, cell.schedule.rounds):  # an algorithm may add rounds of its own
            if rounds > allow.rounds:
                raise self.refusal(f"the scenario has {rounds} rounds, allowed are {allow.rounds}")
        self._check_participation(cell)
        sharing = cell.algorithm.trust_setting.owners_in_release(federation.silos)
        if sharing > 1 and allow.silos is not None and sharing != allow.silos:
            raise self.refusal(
                f"the scenario shares the noise among {sharing} silos, and by allow.silos they are {allow.silos}"
            )
        if cell.privacy.unit != allow.unit:
            raise self.refusal(f"the scenario protects by the {cell.privacy.unit}, allowed is by the {allow.unit}")
        self._check_enough(cell)
        self._check_code(cell)
        if cell.model.regression != (self.policy.class_count == 0):
            held = "real numbers" if self.policy.class_count == 0 else "classes"
            raise self.refusal(f"model {cell.model.name!r} is not for labels that are {held}, as they are here")
        if self.policy.table is not None and cell.data.table_schema != self.policy.table:
            raise self.refusal("the scenario describes the columns of the table otherwise than this policy does")
        if cell.privacy.relation != allow.relation:
            raise self.refusal(f"the scenario's relation is {cell.privacy.relation}, allowed is {allow.relation}")

    def _check_code(self, cell: Cell) -> None:
        if unknown := [path for path in cell.model.code if path not in self.policy.allow.models]:
            raise self.refusal(f"the scenario's model runs {unknown[0]!r}, and allow.models does not name it")

    def _check_participation(self, cell: Cell) -> None:
        if cell.schedule.secret and self.policy.allow.slack == 0.0:
            raise self.refusal(
                f"the budget is in mu, and a run with {cell.schedule.title} keeps to one but for a probability: "
                "allow.slack = 0 leaves none"
            )

    def _check_enough(self, cell: Cell) -> None:
        needed = cell.schedule.batches_held * cell.batch_sizes[self.policy.silo]
        if needed > self.shard.count(cell.privacy.protected):
            raise self.refusal(f"the scenario needs {needed} {cell.privacy.unit}s of this silo, here are fewer")

    def _objective(self, cell: Cell) -> tuple[int, Objective]:
        """How many features a record has, and the model's loss, built once without memory to see its size."""
        inputs, classes = ModelInputs.of(cell), self.policy.class_count
        layout = inputs.layout(self.shard.given(cell), self.shard.labels, classes)
        with torch.device("meta"):
            dimension = inputs.objective(layout, classes).dimension
        if dimension > self.policy.allow.dimension:
            raise self.refusal(
                f"the scenario's model has {dimension} parameters, allowed are {self.policy.allow.dimension}"
            )
        return math.prod(layout), inputs.objective(layout, classes)

    def _memory(self, cell: Cell, plan: Plan, features: int) -> int:
        """Bytes that a round takes; RunError for more than the policy allows, or a row of the ledger holds."""
        units, allowed = self.shard.units(cell.privacy.protected), self.policy.allow.memory
        rows = len(self.shard.labels) if units is None else units.size
        if (taken := taken_by(plan, self.policy.silo, rows, features)) > allowed:
            raise self.refusal(
                f"the run takes {mebibytes(taken)} of memory, allow.memory is {mebibytes(allowed)}: a smaller "
                "model, smaller batches or fewer directions take less"
            )
        if (state := state_of(plan, self.policy.silo)) > LONGEST_STATE:
            raise self.refusal(
                f"the run keeps {mebibytes(state)} from round to round, and a ledger {mebibytes(LONGEST_STATE)}"
            )
        return taken

    def _cost(self, cell: Cell, plan: Plan) -> Cost:
        """What it costs; RunError if the policy is exceeded."""
        allow, number = self.policy.allow, self.policy.silo
        if plan.mechanism.name not in SHIPPED_MECHANISMS:
            raise self.refusal(f"the noise of {cell.algorithm.name!r}, {plan.mechanism.name!r}, {_NO_MECHANISM}")
        if (reason := presuming(plan)) is not None:
            raise self.refusal(reason)
        asked, allowed = cell.algorithm.trust_setting, trust_named(allow.trust)
        stream = priced_stream(plan, number, asked, allowed)
        if stream.std == 0.0 and not allow.noise_free:
            what = "nobody add noise" if allowed.draws(SERVER) else "this silo release its sums without noise"
            raise self.refusal(f"the scenario has {what}")
        if (clip := plan.largest_clip) > allow.clip * ROUNDING:
            raise self.refusal(f"the scenario clips at {clip:.4g}, allowed is {allow.clip:g}")
        smallest = min(min(plan.estimator.round(t).clips) for t in range(1, plan.schedule.rounds + 1))
        if smallest * ROUNDING < allow.least_clip:
            raise self.refusal(f"the scenario clips at {smallest:.4g}, allowed is {allow.least_clip:g} or more")
        return cost_of(plan, stream.guarantee, number)


def unguarded(policy: Policy, cell: Cell) -> str | None:
    """Return why a model's add-on lets a policy allow no such run, or None if it does.

    Guarantee: raw cells go to no model whose row names nobody to ask.
    """
    row = cell.model.row
    if row.guard is None:
        return "the model reads raw cells, and nothing guards it" if row.of_cells else None
    reason: str | None = added("guard", row.guard).why_refused(policy, cell)
    return reason


@dataclass(frozen=True)
class _Refusing:
    """Whatever goes wrong with a stranger's scenario is a refusal, in one line."""

    silo: int
    in_time: AbstractContextManager[None]

    def __enter__(self) -> None:
        self.in_time.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.in_time.__exit__(kind, error, trace)
        if isinstance(error, CodeError):
            _log.warning("silo %d: %s", self.silo, error)
            raise RunError(error.public) from None
        if isinstance(error, InputError):
            raise RunError(str(error)) from None
        if isinstance(error, TimeoutError):
            raise RunError(f"silo {self.silo} refuses: the scenario cannot be planned: {error}") from None
        if isinstance(error, Exception) and not isinstance(error, FedprivError):
            _log.warning("silo %d: a scenario cannot be planned: %s", self.silo, printable(repr(error)))
            raise RunError(f"silo {self.silo} refuses: the scenario cannot be planned") from None


def _given(tree: Mapping[str, Any], section: str, key: str) -> object:
    """A key of a section as it was sent; None without it, and where the section is none."""
    found = tree.get(section)
    return found.get(key) if isinstance(found, dict) else None


def _numbers_in(tree: Any, section: str = "", name: str = "") -> Iterable[tuple[str, str, float]]:
    """Every number of a scenario: its section, its dotted name, and itself."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _numbers_in(value, section or str(key)[:40], f"{name}.{str(key)[:40]}".lstrip("."))
    elif isinstance(tree, list):
        for value in tree:
            yield from _numbers_in(value, section, name)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield section, name, tree
