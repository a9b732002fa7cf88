"""Limits of Flower's that a loaded machine passes."""

from unittest import mock

_CLAIM_SECONDS, _BEAT_SECONDS = 300.0, 60.0


def wait_for_slow_starts() -> None:
    """Let a task's process take minutes to start, where Flower takes its token back after 30 s.

    A process that runs sends heartbeats, and is missed after a minute, as always.
    """
    from flwr.supercore.corestate import in_memory_corestate

    patience = _BEAT_SECONDS / _CLAIM_SECONDS  # a heartbeat counts for PATIENCE * INTERVAL, a claim for INTERVAL
    mock.patch.object(in_memory_corestate, "HEARTBEAT_PATIENCE", patience).start()  # for as long as this process
    mock.patch.object(in_memory_corestate, "HEARTBEAT_DEFAULT_INTERVAL", _CLAIM_SECONDS).start()
