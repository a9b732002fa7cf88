"""What a silo's administrator says of a certificate, signed with the silo's key: facts of the silo's own ledger.

The guard's process has no part in it: the administrator calls `fedpriv silo sign`, which reads the policy and the
ledger, and the key never leaves the silo's machine.  The key is the policy's `identity`, or one that is made
beside the ledger.
"""

import json
import math
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpriv.accounting.budget import ApproximateGDP, LifetimeBudget, Price
from fedpriv.core.errors import InputError, RunError
from fedpriv.core.figures import upper_figure
from fedpriv.core.signed import bytes_of, made_key, sha256, signature
from fedpriv.noise.trust import trust_named
from fedpriv.silo.admission import ROUNDING, Charge, spent, together
from fedpriv.silo.ledger import Row, SiloLedger
from fedpriv.silo.mark import Mark
from fedpriv.silo.policy import Policy, read_policy

SAYS = "fedpriv certificate, a silo's part"
"""What a silo signs."""


def signing_key(policy: Policy) -> Ed25519PrivateKey:
    """The key of the silo: the policy's identity, or one beside the ledger, made where there is none."""
    return made_key(policy.identity or policy.ledger.with_name(policy.ledger.name + ".key"))


def attested(path: Path, record: Mapping[str, Any], mu: float | None, body: str) -> dict[str, Any]:
    """Sign what the ledger of the policy at `path` says of a run, for the certificate whose body has this digest.

    `record` is the run's as it was certified, and `mu` what its releases give, None if that is a curve.

    Guarantee: nothing is signed for a run that the ledger does not have under this very scenario, or that claims
    less than the silo charged for its own part; and nothing that is signed depends on a record: scenarios, policy,
    charges and the number of answers are what the silo's server knew, and the head of the chain tells nothing.
    """
    policy = read_policy(path)
    facts = {
        "body": body,
        "silo": policy.silo,
        "policy": {"sha256": sha256(bytes_of(path)), "allow": _allowed(policy)},
        "fedpriv": metadata.version("fedpriv"),
        "training": _facts(policy, record["scenario"]),
    }
    tests = policy.for_tests
    if record.get("evaluation") is not None and tests is not None:
        facts["tests"] = _facts(tests, record["scenario"])
    if (reason := charged_more(facts, record["trust"], mu)) is not None:
        raise RunError(f"{policy.ledger}: {reason}, so nothing is signed")
    return {**facts, "signed": signature(signing_key(policy), SAYS, facts)}


def charged_more(facts: Mapping[str, Any], trust: str, mu: float | None) -> str | None:
    """Why a claim of `mu` is less than a silo charged for the run; None if it is not, or cannot be compared.

    A silo that does not trust the run's other parties charges its own messages alone, which the claim of all
    together does not speak of.
    """
    charged, asked = facts["training"]["charged"]["mu"], trust_named(trust)
    alone = asked.charged_alone(trust_named(facts["policy"]["allow"]["trust"]))
    if mu is None or (alone and not asked.private_messages):
        return None
    if charged is None or charged > mu * ROUNDING:
        said = "a run without noise" if charged is None else f"mu = {upper_figure(charged)}"
        return f"silo {facts['silo']} charged {said}, and the certificate claims mu = {upper_figure(mu)}"
    return None


def _allowed(policy: Policy) -> dict[str, Any]:
    allow = policy.allow
    names = ("trust", "relation", "unit", "clip", "rounds", "budget", "slack", "noise_free")
    return {name: getattr(allow, name) for name in names}


def _facts(policy: Policy, scenario: Mapping[str, Any]) -> dict[str, Any]:
    """What a ledger says: the run, all before it, what is spent and left; InputError if the run is not there."""
    ledger = SiloLedger(policy.ledger, policy.marked)
    try:
        with ledger.alone():
            rows, commit = ledger.overview(), Mark(policy.marked).read().done
    finally:
        ledger.close()
    found = [place for place, row in enumerate(rows) if json.loads(row.cell) == scenario]
    if not found:
        raise InputError(f"{policy.ledger}: has no run of the scenario that is certified")
    place = found[-1]
    row, before = rows[place], _charged(rows[:place], policy)
    spent_now = _charged(rows, policy)
    left = None if spent_now is None else LifetimeBudget(policy.allow.budget, policy.allow.slack).left([spent_now])
    return {
        "run": row.run_id,
        "runs_of_this_scenario": len(found),
        "under_way": row.underway,
        "rounds_answered": row.answered,
        "charged": {"mu": None if math.isinf(row.mu) else row.mu, "slack": row.slack},
        "before": {"runs": place, **_data(before)},
        "spent": {"runs": len(rows), **_data(spent_now)},
        "left": _data(left or ApproximateGDP(0.0)),
        "ledger": {"commit": commit.number, "head": commit.head.hex()},
    }


def _charged(rows: list[Row], policy: Policy) -> Price:
    charges = [Charge(row.cell, row.mu, row.slack) for row in rows]
    return together(spent(charges, policy.allow.relation, policy.allow.unit)) if rows else ApproximateGDP(0.0)


def _data(price: Price) -> dict[str, float | None]:
    """μ and slack; both None for more than any budget."""
    return {"mu": None if price is None else price.mu, "slack": None if price is None else price.slack}
