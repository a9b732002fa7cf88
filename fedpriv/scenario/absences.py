"""Whether a run can go on without a silo that does not answer."""

from fedpriv.privacy.trust import Trust
from fedpriv.scenario.federation import FederationSection


def check_absences(federation: FederationSection, key: str | None, trust: Trust) -> None:
    """ValueError, naming `key`, under a trust setting that needs all silos, and for silos or rounds there are not.

    Guarantee: what is released without a silo is a sum with fixed weights, whose noise is what is claimed.
    """
    if key is None:
        return
    if trust.masked:
        raise ValueError(
            f"{key} with algorithm.trust = {trust.name!r}: masks cancel in the sum of all silos only, and every "
            'silo adds its share of the noise; use "untrusted" or "trusted"'
        )
    if trust.one_party:
        raise ValueError(
            f"{key} with algorithm.trust = {trust.name!r}: a curator has all records, so no silo can be away; "
            "leave it out"
        )
    for silo, rounds in federation.away.items():
        if not (silo.isascii() and silo.isdecimal() and str(int(silo)) == silo and int(silo) < federation.silos):
            raise ValueError(f"federation.away: {silo!r} is no silo; there are 0 to {federation.silos - 1}")
        if federation.rounds is not None and max(rounds, default=1) > federation.rounds:
            raise ValueError(f"federation.away: round {max(rounds)} of silo {silo}: there are {federation.rounds}")
