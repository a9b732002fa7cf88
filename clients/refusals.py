"""What a guard writes to its log about those who asked in vain: an administrator wants to know of them."""

import logging

from fedpriv.errors import printable

_log = logging.getLogger("fedpriv.guard")
_IN_FULL = 100
_THEN_EVERY = 1000
_LONGEST = 300


class RefusalLog:
    """The first hundred refusals of a process, then every thousandth: whoever asks for ever fills no disk."""

    def __init__(self) -> None:
        self._count = 0

    def tell(self, run: str, reason: str) -> None:
        """One line; `run` and `reason` may have words of a stranger."""
        self._count += 1
        if self._count <= _IN_FULL or self._count % _THEN_EVERY == 0:
            _log.warning("refusal %d, run %s: %s", self._count, printable(run, 40), printable(reason, _LONGEST))
