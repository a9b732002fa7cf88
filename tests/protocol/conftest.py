"""Fixtures of what is on the wire."""

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture
def flower_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of Flower's, without which it makes no message."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
