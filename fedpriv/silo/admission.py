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

from fedpriv.accounting.budget import ApproximateGDP, LifetimeBudget, Price, compose_charges, price_at_distance
from fedpriv.accounting.gaussian import relation_named
from fedpriv.core.errors import CodeError, FedprivError, InputError, RunError, sanitize_line
from fedpriv.core.extensions import ADD_ON_PARTS, is_add_on_part_loaded, load_add_on_part
from fedpriv.core.figures import format_lower
from fedpriv.core.limits import format_mebibytes
from fedpriv.core.random import SERVER
from fedpriv.core.signed import parse_bounded_int, refuse_non_finite
from fedpriv.loss.imported import is_import_path
from fedpriv.loss.models import SHIPPED as SHIPPED_MODELS
from fedpriv.loss.objective import Objective
from fedpriv.noise.registry import AUTO
from fedpriv.noise.registry import MECHANISMS as SHIPPED_MECHANISMS
from fedpriv.noise.trust import RECORD, find_trust, make_unit
from fedpriv.papers.table import SHIPPED as SHIPPED_ALGORITHMS
from fedpriv.participation.registry import PARTICIPATIONS as SHIPPED_SAMPLINGS
from fedpriv.participation.registry import USER_PARTICIPATIONS as ADDED_SAMPLINGS
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import ModelInputs
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.memory import MAX_STATE_BYTES, round_memory, state_memory
from fedpriv.silo.policy import (
    Policy,
    PriceCurve,
    charged_stream,
    possible_prices,
    price_curve,
    why_assumption_refused,
    why_unaccountable,
)
from fedpriv.silo.shard import Shard


class Charge(NamedTuple):
    """What the ledger has of a run: its scenario as canonical JSON, and what it was charged."""

    cell: str
    mu: float
    """inf for a run without noise."""
    slack: float


def price_charges(charges: Sequence[Charge], relation: str, unit: str = RECORD.name) -> list[Price]:
    """What runs of the past cost a budget with neighbours that differ in one `unit` under `relation`.

    Guarantee: a run that was charged for other neighbours costs what is known of these.  Units of replace-one, and
    a part of one, are two steps of zero-out apart, which doubles an exact μ; of a sampled run nothing is known
    then, and nothing of a run whose unit is a part of `unit`.
    """
    return [_price_charge(each, relation, unit) for each in charges]


def _price_charge(charge: Charge, relation: str, unit: str) -> Price:
    if math.isinf(charge.mu):
        return None
    try:
        asked = json.loads(charge.cell)["privacy"]
        charged, of = relation_named(asked["relation"]), make_unit(asked.get("unit", RECORD.name))
    except (ValueError, KeyError, TypeError, AttributeError, InputError):
        return None  # of whom it was is not known any more
    if not of.covers(make_unit(unit)):
        return None
    exchanged = relation_named(relation) == "replace-one" or of.name != unit
    steps = 2 if exchanged and charged == "zero-out" else 1
    return price_at_distance(ApproximateGDP(charge.mu, charge.slack), steps)


def why_over_budget(budget: LifetimeBudget, earlier_prices: Sequence[Price], run_price: Price) -> str | None:
    """Why a run does not fit into a budget beside those before it; None if it does."""
    if budget.why_over_budget(earlier_prices, run_price) is None:
        return None
    total = compose_prices([*earlier_prices, run_price])
    slack = f" with slack {format_lower(budget.slack, 3)}" if budget.slack else ""
    limit = format_lower(budget.mu) + slack  # rounds down: it has `ROUNDING` on top of what a policy says
    return (
        f"the run costs {format_price(run_price)}, with all before {_format_price_value(total)}; the budget "
        f"is {limit}"
    )


def compose_prices(prices: Sequence[Price]) -> Price:
    """All of them; None if one of them is more than any budget."""
    known = [each for each in prices if each is not None]
    return (
        compose_charges(known) if len(known) == len(prices) and sum(each.slack for each in known) < 1.0 else None
    )


def format_price(run_price: Price) -> str:
    """A price as a person reads it."""
    return f"mu = {_format_price_value(run_price)}"


def _format_price_value(cost: Price) -> str:
    return "inf" if cost is None else cost.description


TimeLimit = Callable[[], AbstractContextManager[None]]
_log = logging.getLogger("fedpriv.guard")
ROUND_UP = 1 + 1e-9
_MAX_NAME_LENGTH = 128
_MAX_MISSED_VALUES = 2**25
"""Values of noise of left-out rounds: some ten seconds of a processor."""
_FOREIGN_MECHANISM = "is none of fedpriv's, and those alone add noise in a guard"
MAX_SCENARIO_BYTES = 2**16
"""Bytes of a scenario as JSON."""
_MAX_SILOS = 100_000  # a plan holds a weight for each, and a server may claim any number
_MAX_NUMBER = 2.0**53
_MAX_PRIVACY = 1e6
"""Of mu, zcdp and epsilon: far beyond what protects anything, and within what their conversions can do."""


@dataclass(frozen=True)
class AdmittedRun:
    """A scenario that the policy allows, with its plan and what it costs."""

    cell: Cell
    plan: Plan
    price_curve: PriceCurve
    """Of this silo's whole stream, by this installation's accounting."""
    scenario_digest: bytes
    """Of the canonical scenario: what silos of one run have in common."""
    memory_bytes: int
    """Bytes of memory while it is answered, with what is kept for it."""


@dataclass(frozen=True)
class Admission:
    """A policy, applied to scenarios for one shard; `in_time` bounds how long a plan may take."""

    policy: Policy
    shard: Shard
    time_limit: TimeLimit = nullcontext

    def admit(self, canonical: str) -> AdmittedRun:
        """RunError, in words that depend on scenario and policy alone, if the policy does not allow it."""
        with self._refuse_errors():
            cell = resolve_cell(json.loads(canonical), "the server's scenario")
            self._check_cell(cell)
            features, objective = self._build_objective(cell)
            planned, plan = self._plan_run(cell, objective)
            memory, cost = self._check_memory(cell, plan, features), self._check_price_curve(planned, plan)
            return AdmittedRun(cell, plan, cost, hashlib.sha256(canonical.encode()).digest(), memory)

    def price(self, admitted: AdmittedRun, slack: float) -> Price:
        """What an admitted run costs at a `slack` for runs that need one; RunError if there is no price."""
        with self._refuse_errors():
            return admitted.price_curve.price_at(slack)

    def min_mu(self, charge: Charge) -> float:
        """The least μ that any policy can have charged for a run of the past; 0 where it cannot be planned here.

        Silos that a policy trusted then may be trusted no more, so the cheaper of both counts.
        """
        try:
            cell, objective = self.recall_run(charge.cell)
            with self._refuse_errors():
                prices = possible_prices(self._plan_run(cell, objective)[1], self.policy.silo, charge.slack)
        except FedprivError:
            return 0.0
        return min(math.inf if each is None else each.mu for each in prices)

    def recall_run(self, canonical: str) -> tuple[Cell, Objective]:
        """A run of the past, which was within the policy of its time; RunError if it cannot be planned now.

        Guarantee: a stored scenario imports no code but fedpriv's own, of whatever add-on, and what the policy
        permits now.
        """
        allow = self.policy.allow.model_copy(update={"dimension": 2**62})
        wide = replace(self, policy=self.policy.model_copy(update={"allow": allow}))
        with self._refuse_errors():
            if (reason := self._why_unknown_code(tree := json.loads(canonical), recalled=True)) is not None:
                raise InputError(reason)
            self._check_code(cell := resolve_cell(tree, "a scenario on file"))
            return cell, wide._build_objective(cell)[1]

    def canonicalize(self, cell_json: str) -> str:
        """The scenario in one spelling, whoever wrote it; RunError if it is none."""
        if len(cell_json) > MAX_SCENARIO_BYTES:
            raise self.refusal_error(
                f"the scenario has {len(cell_json)} characters, allowed are {MAX_SCENARIO_BYTES}"
            )
        try:
            with self._refuse_errors():
                tree = json.loads(cell_json, parse_constant=refuse_non_finite, parse_int=parse_bounded_int)
                for section, name, number in _iterate_numbers(tree):
                    self._check_number(section, name, number)
                if isinstance(tree, dict) and (reason := self._why_unknown_code(tree)) is not None:
                    raise InputError(reason)
                return json.dumps(resolve_cell(tree, "the server's scenario").canonical_data(), sort_keys=True)
        except RunError as error:
            raise RunError(f"the scenario that was sent cannot be used: {error}") from None

    def check_name(self, run_id: str) -> None:
        """RunError for what cannot be the name of a run."""
        if not 0 < len(run_id) <= _MAX_NAME_LENGTH:
            raise self.refusal_error(
                f"the run's name has {len(run_id)} characters, allowed are 1 to {_MAX_NAME_LENGTH}"
            )
        if run_id.encode(errors="replace").decode() != run_id:  # half of a pair of surrogates
            raise self.refusal_error("the run's name is no text")

    def check_missed(self, plan: Plan, t: int, missed: int) -> None:
        """RunError for a round before which more noise of left-out rounds is drawn than others are to wait for.

        Values are counted, and no time is measured: a clock would refuse at one load of the machine what it takes
        at another, and after the round is on record.  A run whose first question is refused is not charged.
        """
        if not missed:
            return
        values = missed * max(plan.rounds[t - 1].stored_length, plan.objective.dimension)
        if values > _MAX_MISSED_VALUES and plan.noise.std_of(self.policy.silo):
            raise self.refusal_error(
                f"round {t}: {missed} rounds before it were left out, and their noise has {values} values; at "
                f"most {_MAX_MISSED_VALUES} are drawn for one answer, so this silo has no part in the run any more"
            )

    def _why_unknown_code(self, tree: Mapping[str, Any], *, recalled: bool = False) -> str | None:
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
            name = _section_value(tree, section, "name")
            path = section == "model" and isinstance(name, str) and is_import_path(name)
            if isinstance(name, str) and not path and name not in (*shipped, *allowed):
                return (
                    f"{section}.name = {name[:100]!r} is none of fedpriv's, and allow.{section}s does not name it"
                )
            is_added = section == "model" and isinstance(name, str) and name in ADD_ON_PARTS["model"]
            if is_added and not (recalled or getattr(allow, str(name))):
                return f"model.name = {name!r} is of an add-on, and allow.{name} allows no run of it"
        curves = _section_value(tree, "evaluation", "curves") is not None
        if (
            curves
            and not recalled
            and (self.policy.evaluation is None or not is_add_on_part_loaded("evaluation", "curves"))
        ):
            return "evaluation.curves: the policy has no section [evaluation], or its add-on is not there"
        asked = _section_value(tree, "algorithm", "mechanism")
        if isinstance(asked, str) and asked not in (*SHIPPED_MECHANISMS, AUTO):
            return f"algorithm.mechanism = {asked[:100]!r} {_FOREIGN_MECHANISM}"
        order = _section_value(tree, "federation", "sampling")
        if isinstance(order, str) and order not in (*SHIPPED_SAMPLINGS, *ADDED_SAMPLINGS):
            return f"federation.sampling = {order[:100]!r} is none of fedpriv's, and no row of allow.extensions"
        return None

    def refusal_error(self, reason: str) -> RunError:
        return RunError(f"silo {self.policy.silo} refuses: {reason}")

    def _refuse_errors(self) -> "_RefusalContext":
        return _RefusalContext(self.policy.silo, self.time_limit())

    def _check_number(self, section: str, name: str, number: float) -> None:
        if not abs(number) <= _MAX_NUMBER:
            raise InputError(f"{name} = {number:g}: no number of a scenario is that large")
        if section == "privacy" and not number <= _MAX_PRIVACY:
            raise InputError(f"{name} = {number:g}: protects nothing")
        if section == "algorithm" and isinstance(number, int) and number > max(2**12, self.policy.allow.rounds):
            raise InputError(f"{name} = {number}: more than any run that is allowed needs")

    def _plan_run(self, cell: Cell, objective: Objective) -> tuple[Cell, Plan]:
        """The run that is asked for, and its plan."""
        return cell, make_plan(cell, objective, for_release=True)

    def _check_cell(self, cell: Cell) -> None:
        """What can be seen of a scenario before anything is built for it."""
        allow, number, federation = self.policy.allow, self.policy.silo, cell.federation
        if not number < federation.silos <= _MAX_SILOS:
            raise self.refusal_error(f"the scenario has {federation.silos} silos, and this is number {number}")
        if (reason := why_unaccountable(cell) or why_unguarded(self.policy, cell)) is not None:
            raise self.refusal_error(reason)
        for rounds in (federation.total_rounds, cell.schedule.rounds):  # an algorithm may add rounds of its own
            if rounds > allow.rounds:
                raise self.refusal_error(f"the scenario has {rounds} rounds, allowed are {allow.rounds}")
        self._check_participation(cell)
        sharing = cell.algorithm.trust_setting.noise_sources_per_release(federation.silos)
        if sharing > 1 and allow.silos is not None and sharing != allow.silos:
            raise self.refusal_error(
                f"the scenario shares the noise among {sharing} silos, and by allow.silos they are {allow.silos}"
            )
        if cell.privacy.unit != allow.unit:
            raise self.refusal_error(
                f"the scenario protects by the {cell.privacy.unit}, allowed is by the {allow.unit}"
            )
        self._check_record_count(cell)
        self._check_code(cell)
        if cell.model.is_regression != (self.policy.class_count == 0):
            held = "real numbers" if self.policy.class_count == 0 else "classes"
            raise self.refusal_error(
                f"model {cell.model.name!r} is not for labels that are {held}, as they are here"
            )
        if self.policy.table is not None and cell.data.table_schema != self.policy.table:
            raise self.refusal_error(
                "the scenario describes the columns of the table otherwise than this policy does"
            )
        if cell.privacy.relation != allow.relation:
            raise self.refusal_error(
                f"the scenario's relation is {cell.privacy.relation}, allowed is {allow.relation}"
            )

    def _check_code(self, cell: Cell) -> None:
        if unknown := [path for path in cell.model.import_paths if path not in self.policy.allow.models]:
            raise self.refusal_error(
                f"the scenario's model runs {unknown[0]!r}, and allow.models does not name it"
            )

    def _check_participation(self, cell: Cell) -> None:
        if cell.schedule.secret and self.policy.allow.slack == 0.0:
            raise self.refusal_error(
                f"the budget is in mu, and a run with {cell.schedule.title} keeps to one but for a probability: "
                "allow.slack = 0 leaves none"
            )

    def _check_record_count(self, cell: Cell) -> None:
        needed = cell.schedule.batches_per_silo * cell.batch_sizes[self.policy.silo]
        if needed > self.shard.unit_count(cell.privacy.protected_unit):
            raise self.refusal_error(
                f"the scenario needs {needed} {cell.privacy.unit}s of this silo, here are fewer"
            )

    def _build_objective(self, cell: Cell) -> tuple[int, Objective]:
        """How many features a record has, and the model's loss, built once without memory to see its size."""
        inputs, classes = ModelInputs.from_cell(cell), self.policy.class_count
        layout = inputs.make_layout(self.shard.model_inputs(cell), self.shard.labels, classes)
        with torch.device("meta"):
            dimension = inputs.make_objective(layout, classes).dimension
        if dimension > self.policy.allow.dimension:
            raise self.refusal_error(
                f"the scenario's model has {dimension} parameters, allowed are {self.policy.allow.dimension}"
            )
        return math.prod(layout), inputs.make_objective(layout, classes)

    def _check_memory(self, cell: Cell, plan: Plan, features: int) -> int:
        """Bytes that a round takes; RunError for more than the policy allows, or a row of the ledger holds."""
        units, allowed = self.shard.rows_by_unit(cell.privacy.protected_unit), self.policy.allow.memory
        rows = len(self.shard.labels) if units is None else units.size
        if (taken := round_memory(plan, self.policy.silo, rows, features)) > allowed:
            raise self.refusal_error(
                f"the run takes {format_mebibytes(taken)} of memory, allow.memory is "
                f"{format_mebibytes(allowed)}: a smaller "
                "model, smaller batches or fewer directions take less"
            )
        if (state := state_memory(plan, self.policy.silo)) > MAX_STATE_BYTES:
            raise self.refusal_error(
                f"the run keeps {format_mebibytes(state)} from round to round, and a ledger "
                f"{format_mebibytes(MAX_STATE_BYTES)}"
            )
        return taken

    def _check_price_curve(self, cell: Cell, plan: Plan) -> PriceCurve:
        """What it costs; RunError if the policy is exceeded."""
        allow, number = self.policy.allow, self.policy.silo
        if plan.mechanism.name not in SHIPPED_MECHANISMS:
            raise self.refusal_error(
                f"the noise of {cell.algorithm.name!r}, {plan.mechanism.name!r}, {_FOREIGN_MECHANISM}"
            )
        if (reason := why_assumption_refused(plan)) is not None:
            raise self.refusal_error(reason)
        asked, allowed = cell.algorithm.trust_setting, find_trust(allow.trust)
        stream = charged_stream(plan, number, asked, allowed)
        if stream.std == 0.0 and not allow.noise_free:
            what = "nobody add noise" if allowed.adds_noise(SERVER) else "this silo release its sums without noise"
            raise self.refusal_error(f"the scenario has {what}")
        if (clip := plan.max_clip) > allow.clip * ROUND_UP:
            raise self.refusal_error(f"the scenario clips at {clip:.4g}, allowed is {allow.clip:g}")
        smallest = min(min(plan.estimator.round(t).clips) for t in range(1, plan.schedule.rounds + 1))
        if smallest * ROUND_UP < allow.least_clip:
            raise self.refusal_error(
                f"the scenario clips at {smallest:.4g}, allowed is {allow.least_clip:g} or more"
            )
        return price_curve(plan, stream.guarantee, number)


def why_unguarded(policy: Policy, cell: Cell) -> str | None:
    """Return why a model's add-on lets a policy allow no such run, or None if it does.

    Guarantee: raw cells go to no model whose row names nobody to ask.
    """
    row = cell.model.row
    if row.guard is None:
        return "the model reads raw cells, and nothing guards it" if row.of_cells else None
    reason: str | None = load_add_on_part("guard", row.guard).why_refused(policy, cell)
    return reason


@dataclass(frozen=True)
class _RefusalContext:
    """Whatever goes wrong with a stranger's scenario is a refusal, in one line."""

    silo: int
    time_limit: AbstractContextManager[None]

    def __enter__(self) -> None:
        self.time_limit.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.time_limit.__exit__(kind, error, trace)
        if isinstance(error, CodeError):
            _log.warning("silo %d: %s", self.silo, error)
            raise RunError(error.public_message) from None
        if isinstance(error, InputError):
            raise RunError(str(error)) from None
        if isinstance(error, TimeoutError):
            raise RunError(f"silo {self.silo} refuses: the scenario cannot be planned: {error}") from None
        if isinstance(error, Exception) and not isinstance(error, FedprivError):
            _log.warning("silo %d: a scenario cannot be planned: %s", self.silo, sanitize_line(repr(error)))
            raise RunError(f"silo {self.silo} refuses: the scenario cannot be planned") from None


def _section_value(tree: Mapping[str, Any], section: str, key: str) -> object:
    """A key of a section as it was sent; None without it, and where the section is none."""
    found = tree.get(section)
    return found.get(key) if isinstance(found, dict) else None


def _iterate_numbers(tree: Any, section: str = "", name: str = "") -> Iterable[tuple[str, str, float]]:
    """Every number of a scenario: its section, its dotted name, and itself."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _iterate_numbers(value, section or str(key)[:40], f"{name}.{str(key)[:40]}".lstrip("."))
    elif isinstance(tree, list):
        for value in tree:
            yield from _iterate_numbers(value, section, name)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield section, name, tree
