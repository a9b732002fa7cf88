"""What a silo's administrator says of a certificate, signed with the silo's key: facts of the silo's own ledger.

The guard's process has no part in it: the administrator calls `fedpriv silo sign`, which reads policy, ledger and
records, and the key never leaves the silo's machine.  The key is the policy's `identity`, or one that is made
beside the ledger.

The run is planned again from the scenario that the ledger has.  Every stream of the certificate is compared with
that plan, and the silo's charges with what the plan costs.
"""

import json
import math
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpriv.accounting.budget import ApproximateGDP, LifetimeBudget, Price
from fedpriv.core.errors import FedprivError, InputError, RunError
from fedpriv.core.figures import upper_figure
from fedpriv.core.signed import bytes_of, made_key, sha256, signature
from fedpriv.rounds.ledger import FIRST_STEP
from fedpriv.rounds.plan import Plan
from fedpriv.rounds.recomputed import (
    ROUNDS,
    TESTS,
    RunPlans,
    first_step_before,
    recompute,
    shapes_data,
    without_paths,
)
from fedpriv.rounds.task import ModelInputs
from fedpriv.scenario.schema import Cell
from fedpriv.silo.admission import Admission, Charge, spent, together
from fedpriv.silo.ledger import Row, SiloLedger
from fedpriv.silo.mark import Mark
from fedpriv.silo.policy import Policy, read_policy
from fedpriv.silo.prices import prices_of

SAYS = "fedpriv certificate 2, a silo's part"
"""What a silo signs."""
PARTS = {"training": ROUNDS, "first_step": FIRST_STEP, "tests": TESTS}
"""Parts of what a silo says, and the plans that they are compared with."""
_DEPLOYED = (("deployment", "release"), ("deployment", "none"))
"""Engine and noise of runs in which guards have a part."""
_SAME, _SAME_OF_CURVES = 1e-9, 1e-6
"""Relative, of two prices: a curve's is computed to so much (`accounting.budget.smallest_mu`)."""


def signing_key(policy: Policy) -> Ed25519PrivateKey:
    """The key of the silo: the policy's identity, or one beside the ledger, made where there is none."""
    return made_key(policy.identity or policy.ledger.with_name(policy.ledger.name + ".key"))


def attested(path: Path, record: Mapping[str, Any], body: str) -> dict[str, Any]:
    """Sign what the ledgers of the policy at `path` say of a run, for the certificate whose body has this digest.

    `record` is the run's as it was certified.

    Guarantee: nothing is signed for a run that the ledger does not have under this very scenario, for releases
    that are not those of the scenario's plan, and for a charge, of training or of test records, that is not the
    plan's price; what cannot be compared is not signed.  Nothing that is signed depends on a value of a record:
    scenarios, policy, charges, shapes and the number of answers are what the silo's server knew, and the head of
    the chain tells nothing.
    """
    policy = read_policy(path)
    policy.import_extensions()
    try:
        if (kind := (record["engine"], record["noise"])) not in _DEPLOYED:
            raise InputError(f"record.engine and record.noise are {kind!r:.60}, and this silo was in a deployment")
        canonical, facts = _facts(policy, record["scenario"], record["scenario_sha256"])
        admission = Admission(policy, policy.load_shard())
        again, cell = _recomputed(admission, canonical, record)
        again.check(record)
        said = {"training": facts, **_others(policy, again, record)}
        if (
            reason := charges_differ(policy.silo, said, again) or _unanswered(policy.silo, facts, record)
        ) is not None:
            raise RunError(reason)
    except FedprivError as error:
        raise type(error)(f"{policy.ledger}: {error}, so nothing is signed") from None
    facts = {
        "body": body,
        "silo": policy.silo,
        "policy": {"sha256": sha256(bytes_of(path)), "allow": _allowed(policy)},
        "fedpriv": metadata.version("fedpriv"),
        "shapes": _shapes(admission, cell),
        "table_public": None if policy.table is None else policy.table.public,
        **said,
    }
    return {**facts, "signed": signature(signing_key(policy), SAYS, facts)}


def _recomputed(admission: Admission, canonical: str, record: Mapping[str, Any]) -> tuple[RunPlans, Cell]:
    """The run of a ledger, planned as the guard planned it."""

    def plan_first_step(first: Cell) -> Plan:
        cell, objective = admission.recall(_text(first))
        return recompute(cell, objective, (), plan_first_step).plans[ROUNDS]

    cell, objective = admission.recall(canonical)
    return recompute(cell, objective, record["releases"], plan_first_step), cell


def _others(policy: Policy, again: RunPlans, record: Mapping[str, Any]) -> dict[str, Any]:
    """What the ledgers say of a first step and of evaluations; InputError where there is nothing to compare."""
    said, tests = {}, policy.for_tests
    if FIRST_STEP in again.plans:
        text = _text(first_step_before(again.cell))
        said["first_step"] = _facts(policy, without_paths(json.loads(text)), sha256(text.encode()))[1]
    if TESTS in again.plans:
        if tests is None:
            raise InputError("the certificate has evaluations, and this policy has no [evaluation]")
        said["tests"] = _facts(tests, record["scenario"], record["scenario_sha256"])[1]
    return said


def charges_differ(silo: int, said: Mapping[str, Any], again: RunPlans) -> str | None:
    """The first charge of a silo that is not what the plans cost; None if all are.

    A charge (μ, slack) is compared with the price of the plan's curve at that slack, and not with ε at the
    certificate's δ: the pair lies above the curve at every δ, and meets it where the slack was chosen.
    Silos that a policy trusted then may be trusted no more, so either price counts.
    """
    for part, of in PARTS.items():
        if (of in again.plans) != (part in said):
            return f"silo {silo} says nothing of {of}, or something of what the scenario has not"
        if part not in said:
            continue
        charged = said[part]["charged"]
        prices = prices_of(again.plans[of], silo, charged["slack"])
        if not any(_same_price(charged, price) for price in prices):
            return (
                f"silo {silo} was charged {_words(charged['mu'], charged['slack'])} for {of}, and those of the "
                f"certificate cost {' or '.join(dict.fromkeys(_price_words(price) for price in prices))}"
            )
    return None


def _same_price(charged: Mapping[str, Any], price: Price) -> bool:
    if price is None or charged["mu"] is None:
        return price is None and charged["mu"] is None
    tolerance = _SAME_OF_CURVES if price.slack else _SAME
    return price.slack == charged["slack"] and math.isclose(price.mu, charged["mu"], rel_tol=tolerance)


def _price_words(price: Price) -> str:
    return _words(None, 0.0) if price is None else _words(price.mu, price.slack)


def _words(mu: float | None, slack: float) -> str:
    if mu is None:
        return "as a run without noise"
    return f"mu = {upper_figure(mu, 6)}" + (f" with slack {upper_figure(slack, 3)}" if slack else "")


def _unanswered(silo: int, facts: Mapping[str, Any], record: Mapping[str, Any]) -> str | None:
    """Why a run that this silo has not answered as often as the record says is not certified."""
    missed = len(record["missed"].get(str(silo), ()))
    if facts["rounds_answered"] + missed >= record["rounds"]:
        return None
    return (
        f"silo {silo} answered {facts['rounds_answered']} of {record['rounds']} rounds, and record.missed has "
        f"{missed} of it"
    )


def _shapes(admission: Admission, cell: Cell) -> dict[str, Any]:
    shard, classes = admission.shard, admission.policy.class_count
    return shapes_data(ModelInputs.of(cell).layout(shard.given(cell), shard.labels, classes), classes)


def _allowed(policy: Policy) -> dict[str, Any]:
    allow = policy.allow
    names = ("trust", "relation", "unit", "clip", "rounds", "budget", "slack", "noise_free")
    return {name: getattr(allow, name) for name in names}


def _text(cell: Cell) -> str:
    """A scenario in the spelling of ledgers."""
    return json.dumps(cell.canonical(), sort_keys=True)


class _Found(NamedTuple):
    canonical: str
    facts: dict[str, Any]


def _facts(policy: Policy, scenario: Mapping[str, Any], digest: str) -> _Found:
    """What a ledger says: the run, all before it, what is spent and left; InputError if the run is not there.

    A run is there if its scenario has this digest, and reads as `scenario` without folders.
    """
    ledger = SiloLedger(policy.ledger, policy.marked)
    try:
        with ledger.alone():
            rows, commit = ledger.overview(), Mark(policy.marked).read().done
    finally:
        ledger.close()
    wanted = json.dumps(scenario, sort_keys=True)
    found = [place for place, row in enumerate(rows) if _shown(row.cell) == wanted]
    if not (same := [place for place in found if sha256(rows[place].cell.encode()) == digest]):
        other = ", and record.scenario_sha256 is of another" if found else ""
        raise InputError(f"the ledger has no run of record.scenario, the one that is certified{other}")
    place = same[-1]
    row, before = rows[place], _charged(rows[:place], policy)
    spent_now = _charged(rows, policy)
    left = None if spent_now is None else LifetimeBudget(policy.allow.budget, policy.allow.slack).left([spent_now])
    facts = {
        "run": row.run_id,
        "runs_of_this_scenario": len(same),
        "under_way": row.underway,
        "rounds_answered": row.answered,
        "charged": {"mu": None if math.isinf(row.mu) else row.mu, "slack": row.slack},
        "before": {"runs": place, **_data(before)},
        "spent": {"runs": len(rows), **_data(spent_now)},
        "left": _data(left or ApproximateGDP(0.0)),
        "ledger": {"commit": commit.number, "head": commit.head.hex()},
    }
    return _Found(row.cell, facts)


def _shown(cell: str) -> str:
    return json.dumps(without_paths(json.loads(cell)), sort_keys=True)


def _charged(rows: list[Row], policy: Policy) -> Price:
    charges = [Charge(row.cell, row.mu, row.slack) for row in rows]
    return together(spent(charges, policy.allow.relation, policy.allow.unit)) if rows else ApproximateGDP(0.0)


def _data(price: Price) -> dict[str, float | None]:
    """μ and slack; both None for more than any budget."""
    return {"mu": None if price is None else price.mu, "slack": None if price is None else price.slack}
