"""Take up a policy that allows less while a guard runs; what allows more takes a restart, by its administrator.

A policy is narrower if every run and every answer that it allows was allowed before.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedpriv.core.errors import InputError, RunError, printable
from fedpriv.protocol.frames import receive_json, send_frame
from fedpriv.silo.policy import Policy, read_policy

RELOAD = "reload"
_SECONDS = 900.0
"""To wait for a guard that answers a round."""
_TRUST = ("untrusted", "secure-aggregation", "trusted")


def _at_most(before: Any, after: Any) -> bool:
    return bool(after <= before)


def _at_least(before: Any, after: Any) -> bool:
    return bool(after >= before)


def _none_new(before: Any, after: Any) -> bool:
    return set(after) <= set(before)


def _trusts_no_more(before: Any, after: Any) -> bool:
    return _TRUST.index(after) <= _TRUST.index(before)


_NARROWER: Mapping[str, Callable[[Any, Any], bool]] = {
    **dict.fromkeys(("clip", "rounds", "budget", "slack", "query", "dimension", "open_runs", "runs"), _at_most),
    **dict.fromkeys(("evaluations", "noise_free"), _at_most),
    **dict.fromkeys(("least_clip", "tick"), _at_least),
    **dict.fromkeys(("models", "algorithms", "mechanisms", "statistics"), _none_new),
    "trust": _trusts_no_more,
}
"""Keys of [allow] and [evaluation] that may change, and when; every other key has to stay as it is."""


def narrowing(running: Policy, wanted: Policy) -> list[str]:
    """What changes, a line a key; InputError unless `wanted` allows nothing that `running` does not.

    Guarantee: a run that `wanted` allows is allowed by `running`, and of the same records, ledger and peers.
    """
    changes = [
        *_changes(
            "", *(each.model_copy(update={"allow": None, "evaluation": None}) for each in (running, wanted))
        ),
        *_changes("allow.", running.allow, wanted.allow),
    ]
    before, after = running.evaluation, wanted.evaluation
    if before is None and after is not None:
        raise InputError(f"[evaluation] allows what the guard that runs does not; {_RESTART}")
    if before is not None and after is None:
        changes.append("no [evaluation] any more")
    elif before is not None and after is not None:
        changes += _changes("evaluation.", before, after)
    return changes


_RESTART = "a guard that runs takes up a narrower policy only: restart it for this one"


def _changes(section: str, running: BaseModel, wanted: BaseModel) -> Iterator[str]:
    for name in type(running).model_fields:
        before, after = getattr(running, name), getattr(wanted, name)
        if before == after:
            continue
        told = f"{section}{name}: {_told(before)} becomes {_told(after)}"
        if name not in _NARROWER or not section:
            raise InputError(f"{told}, which cannot change while the guard runs; {_RESTART}")
        if not _NARROWER[name](before, after):
            raise InputError(f"{told}, which allows more; {_RESTART}")
        yield told


def _told(value: object) -> str:
    return printable(repr(value), 60)


def ask_to_reload(path: Path) -> list[str]:
    """What changed at the guard of this policy, which has read it again; RunError if it did not take it up."""
    policy = read_policy(path)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SECONDS)
            connection.connect(str(policy.socket))
            send_frame(connection, b'{"%s": true}' % RELOAD.encode())
            answer = receive_json(connection, 2**20, _SECONDS)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{policy.socket}: no guard answers ({error}); one that is started reads its policy then"
        ) from None
    if "refused" in answer:
        raise RunError(str(answer["refused"]))
    return [str(change) for change in answer[RELOAD]]
