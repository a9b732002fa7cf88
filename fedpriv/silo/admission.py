"""Admission of a server's scenario by a silo's policy, and the price of a run.

A scenario is untrusted text, whose length is bounded before it is parsed, and its numbers before they are used.

* A cell is the scenario of one run as an object, with a value for each key.
* A plan has what is known of a run before round 1, such as batch sizes, clips and noise.
* A unit is what neighbouring data sets differ in, such as a record or a person.  Under the relation "replace-one"
  another unit takes its place, and under "zero-out" it contributes zero.
* A price is (μ, δ₀), a part of the silo's lifetime budget: a μ of Gaussian differential privacy that holds except
  with probability δ₀, the slack.  A run needs slack if its records take part in secret rounds.
* A charge is a run's entry in the silo's ledger, with the price of the run when it was opened.
* The charged stream is the sequence of releases by which a run is priced: the silo's own messages, or the releases
  made of all silos' messages.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from fedpriv.accounting.budget import ApproximateGDP, LifetimeBudget, Price, compose_charges, price_at_distance
from fedpriv.accounting.gaussian import relation_named
from fedpriv.core.errors import CodeError, FedprivError, InputError, RunError, refuse, sanitize_line
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
    """Ledger entry of a run: its scenario as JSON, and the price that it was charged."""

    cell: str
    mu: float
    """inf for a run that no μ is known to bound, such as one without noise."""
    slack: float


def price_charges(charges: Sequence[Charge], relation: str, unit: str = RECORD.name) -> list[Price]:
    """Price earlier runs for neighbours that differ in one `unit` under `relation`.

    Guarantee: a run that was charged for other neighbours has the price that its charge implies for these
    neighbours. A charge under replace-one implies itself under zero-out.  If a run was charged under zero-out,
    neighbours under replace-one, and neighbours in a record if the charged unit is larger, are two of its steps
    apart.  Neighbours in a record under replace-one are twice as many steps apart if the charged unit is larger,
    since the exchanged record may name another person, so that two persons change; the number of persons is public
    and the same.  k steps multiply a μ without slack by k.  Nothing is implied by several steps for a run with
    slack, for a run with another unit if `unit` is not the record, for a run with an infinite μ, and for a stored
    scenario whose relation or unit is unknown.  A stored scenario without a unit has records as its unit.

    Args:
        charges: Charges of the runs.
        relation: Neighbouring relation of the result.
        unit: Name of the unit in which the neighbours of the result differ.

    Returns:
        One price for each charge, None if nothing is implied.

    Raises:
        InputError: If a multiple of a μ is too large for a float.
    """
    return [_price_charge(charge, relation, unit) for charge in charges]


def _price_charge(charge: Charge, relation: str, unit: str) -> Price:
    """Price one charge for neighbours in one `unit` under `relation`, or return None if nothing bounds it.

    One unit replaces another in two steps of a charge under zero-out: from the first unit to zero, and from zero
    to the second.  A change of a part of the charged unit replaces that unit, too.  A part that goes from one
    unit to another, as a row in which the person's name changes, replaces both.
    """
    if math.isinf(charge.mu):
        return None  # Such as a run without noise.
    try:
        privacy = json.loads(charge.cell)["privacy"]
        charged_relation, charged_unit = (
            relation_named(privacy["relation"]),
            make_unit(privacy.get("unit", RECORD.name)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, InputError):
        return None  # The stored scenario has no relation or no unit that this version knows.
    if not charged_unit.covers(make_unit(unit)):
        return None  # One `unit` may have any number of the charged units.
    exchanged, is_part = relation_named(relation) == "replace-one", charged_unit.name != unit
    return price_at_distance(
        ApproximateGDP(charge.mu, charge.slack),
        (2 if exchanged and is_part else 1)
        * (2 if (exchanged or is_part) and charged_relation == "zero-out" else 1),
    )


def why_over_budget(budget: LifetimeBudget, other_prices: Sequence[Price], run_price: Price) -> str | None:
    """Return why a run exceeds a budget together with all other runs, or None if it does not.

    Args:
        budget: Largest price of all runs together, with μ times `ROUND_UP`.
        other_prices: Prices of the other runs of the ledger.
        run_price: Price of the run.
    """
    if budget.why_over_budget(other_prices, run_price) is None:
        return None
    slack = f" with slack {format_lower(budget.slack, 3)}" if budget.slack else ""
    # Rounded down, because `budget` is a policy's budget times `ROUND_UP`.
    return (
        f"the run costs {format_price(run_price)}, with all others "
        f"{_format_price_value(compose_prices([*other_prices, run_price]))}; the budget "
        f"is {format_lower(budget.mu)}{slack}"
    )


def compose_prices(prices: Sequence[Price]) -> Price:
    """Compose prices, or return None if one of them is None or their slacks add up to about 1."""
    finite_prices = [price for price in prices if price is not None]
    return (
        compose_charges(finite_prices)
        # A sum below 1 that is rounded up could be 1, which is no slack.
        if len(finite_prices) == len(prices) and 1e-9 + sum(price.slack for price in finite_prices) < 1.0
        else None
    )


def format_price(run_price: Price) -> str:
    """Format a price as text: "mu = 0.5", "mu = 0.5 with slack 1e-08", or "mu = inf" for None."""
    return f"mu = {_format_price_value(run_price)}"


def _format_price_value(cost: Price) -> str:
    return "inf" if cost is None else cost.description


TimeLimit = Callable[[], AbstractContextManager[None]]
"""Function that returns a context, which raises TimeoutError if its block takes too long."""
_log = logging.getLogger("fedpriv.guard")
ROUND_UP = 1 + 1e-9
"""Factor on a limit, for rounding errors of the number that is compared with it."""
_MAX_NAME_LENGTH = 128
_MAX_MISSED_VALUES = 2**25
"""Most values of noise that are drawn for missed rounds before one answer: some seconds of a CPU core."""
_FOREIGN_MECHANISM = "is none of fedpriv's, and those alone add noise in a guard"
MAX_SCENARIO_BYTES = 2**16
"""Most characters of the JSON text of a scenario."""
_MAX_SILOS = 100_000  # A plan has a weight for each silo, and a server may claim any number of silos.
_MAX_NUMBER = 2.0**53
_MAX_PRIVACY = 1e6
"""Largest number of a scenario's section [privacy], at which a guarantee protects nothing."""


@dataclass(frozen=True)
class AdmittedRun:
    """Scenario that the policy allows, with its plan and its price."""

    cell: Cell
    plan: Plan
    price_curve: PriceCurve
    """Price of the charged stream over all rounds, by this installation's accounting."""
    scenario_digest: bytes
    """SHA-256 of the canonical scenario, which all silos of a run share."""
    memory_bytes: int
    """Memory of the run's largest round, with the cached values for the run, in bytes."""


@dataclass(frozen=True)
class Admission:
    """Policy, applied to scenarios for one shard."""

    policy: Policy
    shard: Shard
    time_limit: TimeLimit = nullcontext
    """Limit of the time for planning a scenario, by default none."""

    def admit(self, canonical: str) -> AdmittedRun:
        """Admit a canonical scenario, from `canonicalize`, and plan it.

        Raises:
            RunError: If the policy does not allow the scenario, the scenario cannot be planned, or planning takes
                longer than `time_limit`.
        """
        with self._refuse_errors():
            cell = resolve_cell(json.loads(canonical), "the server's scenario")
            self._check_cell(cell)
            features, objective = self._build_objective(cell)
            priced_cell, plan = self._plan_run(cell, objective)
            memory, cost = self._check_memory(cell, plan, features), self._check_price_curve(priced_cell, plan)
            return AdmittedRun(cell, plan, cost, hashlib.sha256(canonical.encode()).digest(), memory)

    def price(self, admitted: AdmittedRun, slack: float) -> Price:
        """Return the price of an admitted run, at `slack` if its records take part in secret.

        A run without noise has the price None.

        Raises:
            RunError: If the run has no price at this slack, or pricing takes longer than `time_limit`.
        """
        with self._refuse_errors():
            return admitted.price_curve.price_at(slack)

    def min_mu(self, charge: Charge) -> float:
        """Return the least μ that any policy can have charged for an earlier run, or 0 if it is unknown.

        The price of the silo's own messages is computed again, and the price of the release made from all silos'
        messages if the run has one.  The smaller one counts, and is infinity for a run without noise.  The μ is
        unknown if the policy does not permit the run's code, or this installation cannot price the run within
        `time_limit`.
        """
        try:
            cell, objective = self.recall_run(charge.cell)
            with self._refuse_errors():
                prices = possible_prices(self._plan_run(cell, objective)[1], self.policy.silo, charge.slack)
        except FedprivError:
            return 0.0
        return min(math.inf if price is None else price.mu for price in prices)

    def recall_run(self, canonical: str) -> tuple[Cell, Objective]:
        """Return cell and objective (the model with its loss) of an earlier run, which a policy has admitted.

        Of today's policy the limits on code apply, and `time_limit`, but none on numbers, relation and unit.  An
        add-on need not be allowed any more.

        Guarantee: a stored scenario imports no code but fedpriv's own, including add-ons, and the code that the
        policy permits now.

        Raises:
            RunError: If the scenario names other code, this installation cannot build its objective, or building
                takes longer than `time_limit`.
        """
        # So many parameters are no limit.
        allow = self.policy.allow.model_copy(update={"dimension": 2**62})
        wide = replace(self, policy=self.policy.model_copy(update={"allow": allow}))
        with self._refuse_errors():
            if (reason := self._why_unknown_code(tree := json.loads(canonical), recalled=True)) is not None:
                raise InputError(reason)
            self._check_code(cell := resolve_cell(tree, "a scenario on file"))
            return cell, wide._build_objective(cell)[1]

    def canonicalize(self, cell_json: str) -> str:
        """Return the scenario as canonical JSON, the same for all orders of its keys.

        An import path of a model is not checked here.

        Raises:
            RunError: If the text is too long or no scenario, has too large a number, names other code that the
                policy does not permit, or takes longer than `time_limit`.
        """
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
        """Refuse a text that cannot be the name of a run.

        Raises:
            RunError: If the text is empty, too long, or cannot be encoded as UTF-8.
        """
        if not 0 < len(run_id) <= _MAX_NAME_LENGTH:
            raise self.refusal_error(
                f"the run's name has {len(run_id)} characters, allowed are 1 to {_MAX_NAME_LENGTH}"
            )
        if run_id.encode(errors="replace").decode() != run_id:  # half of a pair of surrogates
            raise self.refusal_error("the run's name has half of a surrogate pair, which is no character")

    def check_expiry(self) -> None:
        """Refuse requests after the last day of the policy, those of runs under way as well.

        Raises:
            RunError: If the day is over in UTC, by this silo's clock.
        """
        last_day = self.policy.allow.expires
        if last_day is not None and datetime.now(UTC).date() > last_day:
            raise self.refusal_error(f"the budget of this silo expired at the end of {last_day}")

    def check_missed(self, plan: Plan, t: int, absences: int) -> None:
        """Refuse a round before which too many values of noise of missed rounds have to be drawn.

        The noise of a missed round is drawn later and not sent, because the noise of later rounds may depend on
        it.

        Args:
            plan: Plan of the run.
            t: Round of the query.
            absences: Number of rounds that this silo missed directly before round `t`.

        Raises:
            RunError: If this silo adds noise, and the missed rounds have more than `_MAX_MISSED_VALUES` values,
                where each counts as round `t`.
        """
        # A limit of time would refuse or allow the same round depending on the load of the machine.
        # A round counts with a value for each parameter, or for each number that a server stores of round t, if
        # these are more.
        values = absences * max(plan.rounds[t - 1].stored_length, plan.objective.dimension)
        if values > _MAX_MISSED_VALUES and plan.noise.std_of(self.policy.silo):
            raise self.refusal_error(
                f"round {t}: {absences} rounds before it were left out, and their noise has {values} values; at "
                f"most {_MAX_MISSED_VALUES} are drawn for one answer, so this silo has no part in the run any more"
            )

    def _why_unknown_code(self, tree: Mapping[str, Any], *, recalled: bool = False) -> str | None:
        """Return why a scenario names code that the policy does not permit, or None if nothing is found here.

        Checked are the names of the model, the algorithm, the mechanism and the sampling, and whether the policy
        allows `evaluation.curves`, which an add-on computes.  Values of a wrong type and import paths of models
        (package.module:Name) pass.

        Guarantee: if the result is None, resolving a scenario that is not recalled imports nothing.  Every model,
        algorithm, mechanism and sampling that the scenario names is in the table of its kind, but for an import
        path, and the add-ons that the scenario uses were imported when the guard started.

        Args:
            tree: Scenario as parsed JSON.
            recalled: Whether the scenario is that of a run in the guard's own ledger, which may use an add-on
                that the policy no longer allows.
        """
        allow = self.policy.allow
        for section, shipped, permitted in (
            ("model", SHIPPED_MODELS, allow.models),
            ("algorithm", SHIPPED_ALGORITHMS, allow.algorithms),
        ):
            name = _section_value(tree, section, "name")
            is_path = section == "model" and isinstance(name, str) and is_import_path(name)
            if isinstance(name, str) and not is_path and name not in (*shipped, *permitted):
                return (
                    f"{section}.name = {name[:100]!r} is none of fedpriv's, and allow.{section}s does not name it"
                )
            # A model of an add-on is permitted by the key of [allow] that has the model's name.
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
        mechanism = _section_value(tree, "algorithm", "mechanism")
        if isinstance(mechanism, str) and mechanism not in (*SHIPPED_MECHANISMS, AUTO):
            return f"algorithm.mechanism = {mechanism[:100]!r} {_FOREIGN_MECHANISM}"
        sampling = _section_value(tree, "federation", "sampling")
        if isinstance(sampling, str) and sampling not in (*SHIPPED_SAMPLINGS, *ADDED_SAMPLINGS):
            return f"federation.sampling = {sampling[:100]!r} is none of fedpriv's, and no row of allow.extensions"
        return None

    def refusal_error(self, reason: str) -> RunError:
        return RunError(f"silo {self.policy.silo} refuses: {reason}")

    def _refuse_errors(self) -> "_RefusalContext":
        return _RefusalContext(self.policy.silo, self.time_limit())

    def _check_number(self, section: str, name: str, number: float) -> None:
        """Refuse a number that no run within the policy needs, before anything is computed from it.

        A number is too large above 2^53 in absolute value, and in the section [privacy] above `_MAX_PRIVACY`.  A
        whole number in [algorithm] is too large if it is above 4096 and above the rounds that the policy allows.

        Args:
            section: Section of the scenario with the number.
            name: Dotted key of the number, for the message.
            number: Number to check.

        Raises:
            InputError: If the number is too large, or is NaN.
        """
        # `not` with `<=` refuses NaN, too.
        refuse(
            {
                f"{name} = {number:g}: no number of a scenario is that large": not abs(number) <= _MAX_NUMBER,
                f"{name} = {number:g}: protects nothing": section == "privacy" and not number <= _MAX_PRIVACY,
                f"{name} = {number}: more than any run that is allowed needs": (
                    section == "algorithm"
                    and isinstance(number, int)
                    and number > max(2**12, self.policy.allow.rounds)
                ),
            }
        )

    def _plan_run(self, cell: Cell, objective: Objective) -> tuple[Cell, Plan]:
        """Plan the run of the scenario, and return the cell to be priced, here `cell`, with its plan."""
        return cell, make_plan(cell, objective, for_release=True)

    def _check_cell(self, cell: Cell) -> None:
        """Check the parts of a scenario that can be checked before a plan or a model is built.

        Raises:
            RunError: If the policy or the shard does not allow one of these parts.
            InputError: If the scenario contradicts itself, the records do not have its unit of protection, or an
                add-on is missing.
        """
        allow, number, federation = self.policy.allow, self.policy.silo, cell.federation
        if not number < federation.silos <= _MAX_SILOS:
            raise self.refusal_error(
                f"the scenario has {federation.silos} silos, and a run with silo {number} has {number + 1} to "
                f"{_MAX_SILOS}"
            )
        if (reason := why_unaccountable(cell) or why_unguarded(self.policy, cell)) is not None:
            raise self.refusal_error(reason)
        for rounds in (federation.total_rounds, cell.schedule.rounds):  # An algorithm may add rounds.
            if rounds > allow.rounds:
                raise self.refusal_error(f"the scenario has {rounds} rounds, allowed are {allow.rounds}")
        self._check_participation(cell)
        # Each of these silos adds its share of a release's noise, so that the noise depends on their number.
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
            label_kind = "real numbers" if self.policy.class_count == 0 else "classes"
            raise self.refusal_error(
                f"model {cell.model.name!r} is not for labels that are {label_kind}, as they are here"
            )
        # Separators and marks of numbers may differ, because each silo's file has its own.
        if self.policy.table is not None and (
            (schema := cell.data.table_schema) is None or schema.without_format != self.policy.table.without_format
        ):
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
        """Check that this silo can fill its batches, and that they have as many units as the policy asks for.

        Raises:
            RunError: If the silo has too few units, or the policy asks for more than the batches have.
            InputError: If the records do not have the scenario's unit of protection.
        """
        needed = cell.schedule.batches_per_silo * cell.batch_sizes[self.policy.silo]
        if needed > self.shard.unit_count(cell.privacy.protected_unit):
            raise self.refusal_error(
                f"the scenario needs {needed} {cell.privacy.unit}s of this silo, here are fewer"
            )
        if needed < (min_records := self.policy.allow.least_records):
            raise self.refusal_error(
                f"the scenario reads {needed} {cell.privacy.unit}s of this silo, allowed are {min_records} or more"
            )

    def _build_objective(self, cell: Cell) -> tuple[int, Objective]:
        """Return the number of features of a record, and the model with its loss.

        Only the shapes of the silo's records matter, not their values.

        Raises:
            RunError: If the model has more parameters than the policy allows.
            InputError: If the model does not fit the records.
        """
        inputs, classes = ModelInputs.from_cell(cell), self.policy.class_count
        layout = inputs.make_layout(self.shard.model_inputs(cell), self.shard.labels, classes)
        # A model on the meta device takes no memory, whatever its number of parameters.
        with torch.device("meta"):
            dimension = inputs.make_objective(layout, classes).dimension
        if dimension > self.policy.allow.dimension:
            raise self.refusal_error(
                f"the scenario's model has {dimension} parameters, allowed are {self.policy.allow.dimension}"
            )
        return math.prod(layout), inputs.make_objective(layout, classes)

    def _check_memory(self, cell: Cell, plan: Plan, features: int) -> int:
        """Return the memory of the largest round in bytes, if policy and ledger allow it.

        A person counts with the most records of a unit, so that the result reveals no person's own number.

        Args:
            cell: Cell with the unit of protection.
            plan: Plan of the run.
            features: Number of features of one record, in the form in which the model takes them.

        Raises:
            RunError: If the round takes more than `allow.memory`, or the state between two rounds more than
                `MAX_STATE_BYTES`.
            InputError: If the records do not have the cell's unit of protection, or take too much memory once
                each unit is filled up to the records that the scenario sets.
        """
        unit, max_bytes = cell.privacy.protected_unit, self.policy.allow.memory
        rows = self.shard.unit_count(unit) * unit.max_records
        if (needed_bytes := round_memory(plan, self.policy.silo, rows, features)) > max_bytes:
            raise self.refusal_error(
                f"the run takes {format_mebibytes(needed_bytes)} of memory, allow.memory is "
                f"{format_mebibytes(max_bytes)}: a smaller model, smaller batches or fewer directions take less"
            )
        if (state := state_memory(plan, self.policy.silo)) > MAX_STATE_BYTES:
            raise self.refusal_error(
                f"the run keeps {format_mebibytes(state)} from round to round, and a ledger "
                f"{format_mebibytes(MAX_STATE_BYTES)}"
            )
        return needed_bytes

    def _check_price_curve(self, cell: Cell, plan: Plan) -> PriceCurve:
        """Check noise and clips of a plan, and return the price curve of its charged stream.

        A clip is the norm bound of one record's contribution to a round, or of a part of it.

        Args:
            cell: Cell to be priced, with the trust setting and the name of the algorithm.
            plan: Plan of this cell.

        Raises:
            RunError: If the policy does not allow the noise, an assumption of its mechanism, or a clip.
            InputError: If the charged stream cannot be accounted for.
        """
        allow, number = self.policy.allow, self.policy.silo
        if plan.mechanism.name not in SHIPPED_MECHANISMS:
            raise self.refusal_error(
                f"the noise of {cell.algorithm.name!r}, {plan.mechanism.name!r}, {_FOREIGN_MECHANISM}"
            )
        if (reason := why_assumption_refused(plan)) is not None:
            raise self.refusal_error(reason)
        trust_setting, trust = cell.algorithm.trust_setting, find_trust(allow.trust)
        stream = charged_stream(plan, number, trust_setting, trust)
        if stream.std == 0.0 and not allow.noise_free:
            fault = "nobody add noise" if trust.adds_noise(SERVER) else "this silo release its sums without noise"
            raise self.refusal_error(f"the scenario has {fault}")
        if (clip := plan.max_clip) > allow.clip * ROUND_UP:
            raise self.refusal_error(f"the scenario clips at {clip:.4g}, allowed is {allow.clip:g}")
        min_clip = min(min(plan.estimator.round(t).clips) for t in range(1, plan.schedule.rounds + 1))
        if min_clip * ROUND_UP < allow.least_clip:
            raise self.refusal_error(
                f"the scenario clips at {min_clip:.4g}, allowed is {allow.least_clip:g} or more"
            )
        return price_curve(plan, stream.guarantee, number)


def why_unguarded(policy: Policy, cell: Cell) -> str | None:
    """Return why the guard of a run's model refuses the run, or why it needs a guard, or None.

    Raw cells are the entries of a silo's table before they are encoded, other than a `Cell`, which is a scenario.
    `row.guard` of the model's row in the table of models names the part of an add-on that checks runs.

    Guarantee: a run whose model reads raw cells is refused if the model's row names no guard.

    Raises:
        InputError: If the add-on is not installed.
    """
    row = cell.model.row
    if row.guard is None:
        return "the model reads raw cells, and nothing guards it" if row.of_cells else None
    reason: str | None = load_add_on_part("guard", row.guard).why_refused(policy, cell)
    return reason


@dataclass(frozen=True)
class _RefusalContext:
    """Context that turns errors of an untrusted scenario into a refusal, a `RunError`.

    Details of an error in foreign code go into the silo's log alone.
    """

    silo: int
    time_limit: AbstractContextManager[None]
    """Context that raises TimeoutError if planning takes too long."""

    def __enter__(self) -> None:
        self.time_limit.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """End the time limit, and turn an error of the block into a refusal.

        The arguments are those of a context manager: class, error and traceback, all None without an error.

        Raises:
            RunError: If the error is an InputError, a TimeoutError, or an exception that is no error of fedpriv.
        """
        with suppress(TimeoutError):  # The limit may pass after the block's end, which then was in time.
            self.time_limit.__exit__(kind, error, trace)
        if isinstance(error, CodeError):
            _log.warning("silo %d: %s", self.silo, error)
            raise RunError(error.public_message) from None  # This message has no words of foreign code.
        if isinstance(error, InputError):
            raise RunError(str(error)) from None
        if isinstance(error, TimeoutError):
            raise RunError(f"silo {self.silo} refuses: the scenario cannot be planned: {error}") from None
        # Ctrl-C and other exits are no errors of a scenario, and pass.
        if isinstance(error, Exception) and not isinstance(error, FedprivError):
            _log.warning("silo %d: a scenario cannot be planned: %s", self.silo, sanitize_line(repr(error)))
            raise RunError(f"silo {self.silo} refuses: the scenario cannot be planned") from None


def _section_value(tree: Mapping[str, Any], section: str, key: str) -> object:
    """Return the value of a section's key as it was sent, or None without the key or the section."""
    values = tree.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _iterate_numbers(tree: Any, section: str = "", name: str = "") -> Iterable[tuple[str, str, float]]:
    """Iterate over the numbers of a scenario as (section, dotted name, number).

    A key in a name is cut to 40 characters, since names stand in messages.

    Args:
        tree: Scenario as parsed JSON, or a part of it.
        section: Outermost key of the part, or "" for a whole scenario.
        name: Dotted key of the part, or "" for a whole scenario.
    """
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _iterate_numbers(value, section or str(key)[:40], f"{name}.{str(key)[:40]}".lstrip("."))
    elif isinstance(tree, list):
        for value in tree:
            yield from _iterate_numbers(value, section, name)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield section, name, tree
