"""Agreement before work: every silo says whether it would refuse the run, before any is asked for a round.

Nothing is opened, charged or released for the question, so that a run that one silo refuses costs the others
nothing.
"""

import time
from collections.abc import Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedpriv.core.errors import RunError, printable
from fedpriv.protocol.clocks import difference, is_tolerated, told_ahead
from fedpriv.protocol.messages import AGREEMENT, PROTOCOL, refusal_in


def check_agreement(grid: Grid, nodes: Sequence[int], timeout: float, *, all_needed: bool = True) -> None:
    """RunError, with a line for each silo that does not agree; `nodes` are those of silo 0, 1, …

    Without `all_needed`, a silo that does not answer in so many seconds is no reason to end the run.
    """
    asked, began = [Message(RecordDict(), node, AGREEMENT) for node in nodes], time.time()
    replies = {
        reply.metadata.reply_to_message_id: reply for reply in grid.send_and_receive(asked, timeout=timeout)
    }
    against: dict[int, str] = {}
    for silo, message in enumerate(asked):
        reply = replies.get(message.metadata.message_id)
        refusal = None if reply is None or reply.has_error() else refusal_in(reply.content)
        if reply is None or (refusal is not None and not refusal.final):
            if all_needed:
                against[silo] = f"no reply from silo {silo}" + (f"; {refusal.reason}" if refusal else "")
        elif reply.has_error():
            against[silo] = (
                f"silo {silo} cannot be asked whether it agrees: its app is not of protocol {PROTOCOL}, as this "
                f"coordinator's fedpriv is, or failed: {printable(str(reply.error.reason))}"
            )
        elif refusal is not None:
            own = refusal.reason.startswith(f"silo {silo} ")
            against[silo] = refusal.reason if own else f"silo {silo}: {refusal.reason}"
        elif not is_tolerated(ahead := told_ahead(reply.metadata.created_at, began, time.time())):
            against[silo] = f"silo {silo}: its clock is {difference(ahead)} the coordinator's; set both by NTP"
    if against:
        words = f"{len(against)} of {len(asked)} silos do not take part, so none is asked for a round:"
        raise RunError("\n  ".join([words, *against.values()]))
