"""A pool of clients, asked as a silo is, and the size to which an audit cuts it.

No guard has clients: the trusted server keeps their pool and draws their cohorts.  So the pool's own code answers,
which draws with a key of the operating system, as everything does that is really released.
"""

from collections.abc import Callable

from torch import Tensor

from fedpriv.auditing.canaries import FAR, units_of
from fedpriv.clients.releasing import ReleasingSilo
from fedpriv.clients.shard import Shard
from fedpriv.clients.silo import Silo
from fedpriv.errors import InputError
from fedpriv.participation.available import Available
from fedpriv.randomness import system_key
from fedpriv.running.plan import Plan
from fedpriv.scenario import Cell

MOST_PASSES = 3
"""Of cyclic cohorts, and evaluations of the same test records."""
_BEYOND = 10.0
_FIRST_MOVE = FAR * 0.5**0.5
"""The gradient of a canary where the model is 0, with probabilities ½ and ½ of its two classes."""


def passes_of(cell: Cell) -> int:
    """How often it is a client's turn; of records as often as the scenario says."""
    if cell.federation.clients is None:
        return cell.federation.epochs
    return -(-cell.federation.total_rounds // cell.federation.rounds_per_epoch)


def known_rounds(cell: Cell, most: int) -> tuple[int, int]:
    """Rounds and passes of a run of at most `most` rounds whose order is no secret."""
    passes = min(MOST_PASSES, passes_of(cell))
    each = cell.schedule.rounds if passes == 1 else cell.federation.rounds_per_epoch
    return passes * min(each, most // passes), passes


def check_clients(cell: Cell) -> None:
    """InputError, in one line, for clients whom canaries cannot stand for."""
    if cell.federation.clients is None:
        raise InputError('privacy.unit = "client": no guard has clients, and the audit is of pools: give clients')
    if isinstance(cell.schedule, Available):
        raise InputError(
            'federation.sampling = "available": canaries have rounds of their own here, and tests are made for '
            'cohorts that come in turn; audit a copy with sampling = "fixed" and neither min_separation nor '
            "max_participations"
        )
    settings = cell.algorithm.settings
    if getattr(settings, "clip_quantile", None) is not None:
        raise InputError(
            "algorithm.clip_quantile: the clip of the moment is a coordinate of queries and releases, in which "
            "canaries have no direction; audit without it"
        )
    step, clip = getattr(settings, "local_step", None), getattr(settings, "clip", None)
    if step is not None and isinstance(clip, float) and step * _FIRST_MOVE < _BEYOND * clip:
        raise InputError(
            f"algorithm.local_step = {step:g}: steps so short do not lead a canary beyond clip = {clip:g}; audit "
            f"with --set algorithm.local_step={_BEYOND * clip / _FIRST_MOVE:.3g} or more"
        )


class Pool:
    """Silo 0 of a plan whose rows are clients; each of `shard` holds as many alike records as count."""

    def __init__(self, cell: Cell, plan: Plan, shard: Shard) -> None:
        self._plan, self._records, self._key = plan, units_of(shard, cell), system_key()
        self._silo = self._begun()
        self._state = self._silo.start()

    def restart(self) -> None:
        """It is built again from its key, and goes on from its state."""
        self._silo = self._begun()

    def keep(self) -> Callable[[], None]:
        """Its state: its key is the same for good."""
        state = self._state

        def put_back() -> None:
            self._state = state

        return put_back

    def close(self) -> None:
        """It holds nothing open."""

    def public_key(self, run: str) -> bytes:
        """Nothing: a trusted server gets no masked messages."""
        return b""

    def answer(self, run: str, t: int, query: Tensor, keys: bytes = b"") -> Tensor:
        """What the server adds its noise to in round t."""
        release, self._state = self._silo.answer(self._state, t, query)
        return self._silo.message(release.vector, t, keys, self._state.chain)

    def _begun(self) -> Silo:
        return ReleasingSilo.of(0, self._plan, self._records, self._key, b"")
