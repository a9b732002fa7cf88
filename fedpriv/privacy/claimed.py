"""What a run claims, as data: computed from its releases, when it is written and whenever it is shown."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from fedpriv.accounting.guarantees import GaussianDP, Guarantee
from fedpriv.privacy.claim import EXACT, PrivacyClaim
from fedpriv.privacy.ledger import claim_of, from_data
from fedpriv.privacy.several import bounds_of_several
from fedpriv.privacy.unit import RECORD


def claim_of_data(releases: Sequence[Mapping[str, Any]]) -> PrivacyClaim[Guarantee] | None:
    """The claim of releases as results.json has them; cells of one sweep that released alike share the answer."""
    return _claim_of_text(json.dumps(releases))


@lru_cache(maxsize=1024)
def _claim_of_text(text: str) -> PrivacyClaim[Guarantee] | None:
    return claim_of(list(map(from_data, json.loads(text))))


def figures_of(claim: PrivacyClaim[Guarantee] | None, delta: float) -> dict[str, Any]:
    """Every figure of a claim at δ by its name in results.json; None for what it has not.

    Guarantee: it looks at the claim alone, so that a table cannot show what was not released.
    """
    found: dict[str, Any] = {
        "guarantee": "none" if claim is None else claim.guarantee.kind,
        "holds": None if claim is None else EXACT if claim.exact else "in real arithmetic",
        "attained": claim is not None and claim.attained,
        "counted_mu": None if claim is None else claim.counted,
        "several_records": None,
        **dict.fromkeys(("mu", "zcdp", "epsilon", "epsilon_paper")),
    }
    if claim is None:
        return found
    if claim.unit.name == RECORD.name:
        found["several_records"] = bounds_of_several(claim.guarantee, delta)
    found |= {"relation": claim.relation, "unit": claim.unit.words, "epsilon": claim.guarantee.epsilon_of(delta)}
    if isinstance(claim.guarantee, GaussianDP):
        paper = claim.guarantee.epsilon_delta(delta).paper
        found |= {"mu": claim.guarantee.mu, "zcdp": claim.guarantee.zcdp, "epsilon_paper": paper}
    return found
