"""A silo's signed statement in a certificate, with facts from the silo's own ledgers.

The administrator signs by `fedpriv silo sign`, which reads policy, ledgers and data.  The run is planned again
from the scenario in the ledger.  The certificate's release streams are compared with that plan, and the silo's
charges for this run with the plan's price.

A *record* is the certificate's entry of the run, and the *body* is the part of the certificate that silos sign.  A
run has up to three *parts* with charges: its rounds, a first step that scales the table, and evaluations of test
records.  A *release stream* is the releases of one party, or of several alike, in a part.  A *price* is what a
part costs by its plan, and a *charge* is what the ledger has for it.  Both are a μ and a *slack*: the releases are
μ-GDP, except that anything may be revealed with probability slack.
"""

import json
import math
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpriv.accounting.budget import ApproximateGDP, LifetimeBudget, Price
from fedpriv.claims.ledger import FIRST_STEP
from fedpriv.claims.recomputed import (
    EVALUATIONS_PART,
    ROUNDS_PART,
    RunPlans,
    first_step_before,
    recompute_plans,
    shapes_to_data,
    strip_paths,
)
from fedpriv.core.errors import FedprivError, InputError, RunError
from fedpriv.core.figures import format_upper
from fedpriv.core.signed import format_public_key, load_or_create_key, read_file_bytes, sha256, sign_data
from fedpriv.plan.plan import Plan
from fedpriv.plan.task import ModelInputs
from fedpriv.scenario.schema import Cell
from fedpriv.silo.admission import Admission, Charge, compose_prices, price_charges
from fedpriv.silo.chain import RollbackMark
from fedpriv.silo.ledger import LedgerRun, SiloLedger
from fedpriv.silo.policy import Policy, possible_prices, read_policy

STATEMENT_PARTS = {"training": ROUNDS_PART, "first_step": FIRST_STEP, "tests": EVALUATIONS_PART}
"""Parts of a silo's statement that have facts of a ledger, with the keys of their plans."""
_POLICY_KEYS = ("trust", "relation", "unit", "clip", "rounds", "budget", "slack", "noise_free")
"""Keys of a policy's section [allow] that a silo's statement contains."""
_DEPLOYED = (("deployment", "release"), ("deployment", "none"))
"""Engine and noise of runs in which guards take part."""
_TOLERANCE, _CURVE_TOLERANCE = 1e-9, 1e-6
"""Relative tolerance of the μ of a price without slack, and of a price with slack."""


def signing_key(policy: Policy) -> Ed25519PrivateKey:
    """Return the silo's private key, which is made if its file is missing.

    The file is the policy's `identity`, or if the policy names none, the ledger's path followed by ".key".

    Raises:
        InputError: If the key cannot be used or made.
    """
    return load_or_create_key(policy.identity or policy.ledger.with_name(policy.ledger.name + ".key"))


def key_line(path: Path) -> str:
    """Return the line "silo-N KEY" of the public key of a policy's silo, which is made if it is missing.

    Raises:
        InputError: If the policy or the key cannot be used.
    """
    policy = read_policy(path)
    return f"silo-{policy.silo} {format_public_key(signing_key(policy).public_key())}"


def attest(path: Path, record: Mapping[str, Any], body: str, says: str) -> dict[str, Any]:
    """Sign the facts about a run that are in a silo's ledgers.

    Args:
        path: File of the silo's policy.
        record: The run's record, as the certificate has it.
        body: SHA-256 of the certificate's body.
        says: Type as which the statement is signed, one of the values of `certify.STATEMENT_NAMES`.

    Returns:
        The signed statement: digest of the body, number of the silo, digest and limits of the policy, version of
        fedpriv, shapes of the silo's data, whether the table is public (None without a table), the facts
        (`_read_facts`) of each of `STATEMENT_PARTS` that the run has, and the signature.

    Raises:
        InputError: If the policy, the ledger, the silo's data or its key cannot be used, the run cannot be planned
            again, a fact cannot be compared, or a release differs.
        RunError: If a charge differs, answered rounds and those recorded as missed are fewer than the run's,
            another process has the ledger locked, or the scenario's model cannot be built with the code that the
            policy permits today.
        Exception: A record of another shape may raise other errors, such as KeyError.

    Guarantee: nothing is signed for a run that the ledger does not have under this very scenario, nor for releases
    that are not those of the scenario's plan, nor for a charge, of the rounds, the first step or the evaluations,
    that is not the plan's price up to rounding.  Releases and charges that cannot be compared are not signed.
    Nothing that the silo adds to the body depends on a value in the silo's data: scenarios, policy, charges,
    shapes and the number of answers contain no such value, and the head of the ledger's chain reveals none.
    """
    policy = read_policy(path)
    policy.import_extensions()
    try:
        if (kind := (record["engine"], record["noise"])) not in _DEPLOYED:
            raise InputError(f"record.engine and record.noise are {kind!r:.60}, and this silo was in a deployment")
        # Find the run in the ledger, plan it again, and compare the record's releases with the plan.
        canonical, facts = _read_facts(policy, record["scenario"], record["scenario_sha256"])
        admission = Admission(policy, policy.load_shard())
        cell, objective = admission.recall_run(canonical)
        plans = recompute_plans(cell, objective, record["releases"], partial(_plan_first_step, admission))
        plans.check(record)
        # A first step and evaluations have entries of their own in ledgers.
        statement, test_policy = {"training": facts}, policy.test_policy
        if FIRST_STEP in plans.plans:
            text = _ledger_text(first_step_before(plans.cell))
            scenario = strip_paths(json.loads(text))
            statement["first_step"] = _read_facts(policy, scenario, sha256(text.encode()))[1]
        if EVALUATIONS_PART in plans.plans:
            if test_policy is None:
                raise InputError("the certificate has evaluations, and this policy has no [evaluation]")
            statement["tests"] = _read_facts(test_policy, record["scenario"], record["scenario_sha256"])[1]
        if (
            reason := find_charge_difference(policy.silo, statement, plans)
            or _find_unanswered(policy.silo, facts, record)
        ) is not None:
            raise RunError(reason)
    except FedprivError as error:
        raise type(error)(f"{policy.ledger}: {error}, so nothing is signed") from None
    shard, classes = admission.shard, policy.class_count
    layout = ModelInputs.from_cell(cell).make_layout(shard.model_inputs(cell), shard.labels, classes)
    facts = {
        "body": body,
        "silo": policy.silo,
        "policy": {
            "sha256": sha256(read_file_bytes(path)),
            "allow": {name: getattr(policy.allow, name) for name in _POLICY_KEYS},
        },
        "fedpriv": metadata.version("fedpriv"),
        "shapes": shapes_to_data(layout, classes),
        "table_public": None if policy.table is None else policy.table.public,
        **statement,
    }
    return {**facts, "signed": sign_data(signing_key(policy), says, facts)}


def _plan_first_step(admission: Admission, step_cell: Cell) -> Plan:
    """Plan a run's first step from its scenario, as the guard planned it."""
    cell, objective = admission.recall_run(_ledger_text(step_cell))
    return recompute_plans(cell, objective, (), partial(_plan_first_step, admission)).plans[ROUNDS_PART]


def find_charge_difference(silo: int, statement: Mapping[str, Any], plans: RunPlans) -> str | None:
    """Describe the first charge of a silo that is not the price of its plan, or return None.

    A part that only the run or only the statement has is described as well.  A charge (μ, slack) is compared, up
    to rounding, with the plan's price at that slack.  A plan may have two prices: one of the silo's own messages,
    one of the release made of all silos' messages.  The charge may be either, because the policy may have trusted
    more at the time of the run than it does now.

    Args:
        silo: Number of the silo.
        statement: Facts of the ledger by the keys of `STATEMENT_PARTS`, which are "training", "first_step" and
            "tests".  Each has its charge under "charged".
        plans: Plans of rounds, first step and evaluations, as far as the run has them.

    Raises:
        InputError: If a plan cannot be priced, such as at a charge's slack that is too small.
    """
    for part, plan_key in STATEMENT_PARTS.items():
        if (plan_key in plans.plans) != (part in statement):
            return (
                f"silo {silo} says nothing of {plan_key}, which the run has, or states a charge for "
                f"{plan_key}, which the run has not"
            )
        if part not in statement:
            continue
        charge = statement[part]["charged"]
        prices = possible_prices(plans.plans[plan_key], silo, charge["slack"])
        if not any(_prices_match(charge, price) for price in prices):
            price_texts = dict.fromkeys(_format_charge(_price_data(price)) for price in prices)
            return (
                f"silo {silo} was charged {_format_charge(charge)} for {plan_key}, and those of the certificate "
                f"cost {' or '.join(price_texts)}"
            )
    return None


def _prices_match(charge: Mapping[str, Any], price: Price) -> bool:
    if price is None or charge["mu"] is None:
        return price is None and charge["mu"] is None
    tolerance = _CURVE_TOLERANCE if price.slack else _TOLERANCE
    return price.slack == charge["slack"] and math.isclose(price.mu, charge["mu"], rel_tol=tolerance)


def _format_charge(charge: Mapping[str, Any]) -> str:
    if charge["mu"] is None:
        return "as a run without noise"
    slack = f" with slack {format_upper(charge['slack'], 3)}" if charge["slack"] else ""
    return f"mu = {format_upper(charge['mu'], 6)}{slack}"


def _find_unanswered(silo: int, facts: Mapping[str, Any], record: Mapping[str, Any]) -> str | None:
    """Describe missing answers, or return None if answered and missed rounds are as many as all, or more."""
    missed_count = len(set(record["missed"].get(str(silo), ())))
    if facts["rounds_answered"] + missed_count >= record["rounds"]:
        return None
    return (
        f"silo {silo} answered {facts['rounds_answered']} of {record['rounds']} rounds, and record.missed has "
        f"{missed_count} of its rounds"
    )


def _ledger_text(cell: Cell) -> str:
    """Format a scenario as ledgers store it."""
    return json.dumps(cell.canonical_data(), sort_keys=True)


def _read_facts(policy: Policy, scenario: Mapping[str, Any], digest: str) -> tuple[str, dict[str, Any]]:
    """Read a run's scenario and facts from a ledger.

    The run is the last one whose scenario has this digest, and equals `scenario` without folders.

    | fact | value |
    |---|---|
    | `run`, `runs_of_this_scenario` | id of the run, and number of runs with the same scenario and digest |
    | `under_way`, `rounds_answered` | whether the run is still open, and number of answered rounds |
    | `charged` | charge (μ, slack) of the run in its own relation and unit, with μ None for a run without noise |
    | `before`, `spent` | number of all earlier runs, and of all runs, each with their composed price (μ, slack) |
    | `left` | remaining budget (μ, slack) of the policy, (0, 0) if `spent` is above the budget |
    | `ledger` | number of the last commit, and head (digest) of the ledger's chain |

    A composed price, of several runs together, is in the policy's relation and unit.  Its μ and slack are None if
    it is above every budget.

    Args:
        policy: Policy whose ledger is read, of training data or of test data.
        scenario: The record's scenario, without folders.
        digest: SHA-256 of the scenario as the ledger stores it.

    Returns:
        The scenario as the ledger stores it, and the facts.

    Raises:
        InputError: If the ledger has no such run, has an old format, is missing or is damaged.
        RunError: If another process has the ledger locked.
    """
    with closing(SiloLedger(policy.ledger, policy.mark_path)) as ledger:
        if not ledger.is_keyed():
            raise InputError(
                "the ledger is one of fedpriv 0.3.0 still, and its charges and heads are not what they should be; "
                "`fedpriv silo status POLICY --check`, or a start of the guard, converts it"
            )
        with ledger.lock():
            rows, commit = ledger.list_runs(), RollbackMark(policy.mark_path).read().last_commit
    public_texts = [json.dumps(strip_paths(json.loads(row.cell)), sort_keys=True) for row in rows]
    candidates = [index for index, text in enumerate(public_texts) if text == json.dumps(scenario, sort_keys=True)]
    if not (matches := [index for index in candidates if sha256(rows[index].cell.encode()) == digest]):
        raise InputError(
            "the ledger has record.scenario, but no run of it with the digest record.scenario_sha256"
            if candidates
            else "the ledger has no run of record.scenario, the one that is certified"
        )
    index = matches[-1]
    row, total_price = rows[index], _compose_charges(rows, policy)
    remaining = (
        None
        if total_price is None
        else LifetimeBudget(policy.allow.budget, policy.allow.slack).remaining([total_price])
    )
    return row.cell, {
        "run": row.run_id,
        "runs_of_this_scenario": len(matches),
        "under_way": row.is_open,
        "rounds_answered": row.answered_count,
        "charged": {"mu": None if math.isinf(row.mu) else row.mu, "slack": row.slack},
        "before": {"runs": index, **_price_data(_compose_charges(rows[:index], policy))},
        "spent": {"runs": len(rows), **_price_data(total_price)},
        "left": _price_data(remaining or ApproximateGDP(0.0)),
        "ledger": {"commit": commit.number, "head": commit.head.hex()},
    }


def _compose_charges(rows: list[LedgerRun], policy: Policy) -> Price:
    charges = [Charge(row.cell, row.mu, row.slack) for row in rows]
    return (
        compose_prices(price_charges(charges, policy.allow.relation, policy.allow.unit))
        if rows
        else ApproximateGDP(0.0)
    )


def _price_data(price: Price) -> dict[str, float | None]:
    """Return μ and slack as data, both None for a price above every budget."""
    return {"mu": None if price is None else price.mu, "slack": None if price is None else price.slack}
