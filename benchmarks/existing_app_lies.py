"""What the two apps with privacy answer to a server that lies: Opacus in the client, and the silo's guard.

Every lie is put to one silo, in Flower's messages, and what comes back is looked at.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.existing_app_clients import (
    HELD,
    SERVER_ROUNDS,
    STEPS,
    Setting,
    app_of,
    guarded_train,
    guards,
    own_train,
    spent,
)
from benchmarks.existing_app_model import Net
from fedpriv.data.named import Dataset, load
from fedpriv.engines.inprocess import InProcessGrid
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import read_policy

Ask = Callable[[ArrayRecord, int], ArrayRecord | str]
"""(parameters, server round) -> the silo's answer, or why there is none."""


def told(setting: Setting, trials: int) -> dict[str, Any]:
    """For each app: the shares of trials in which a lie worked, and what was spent."""
    data, noise = load("mnist"), setting.noise_multiplier()
    canaries = [with_canary(data, present) for present in (True, False)]

    @contextmanager
    def opacus(records: Dataset) -> Iterator[tuple[Ask, Callable[[], int]]]:
        answered: list[int] = []
        ask = asking(app_of(own_train(records, setting, noise)), {})

        def counted(arrays: ArrayRecord, server_round: int) -> ArrayRecord | str:
            answered.append(1)
            return ask(arrays, server_round)

        yield counted, lambda: STEPS * len(answered)

    @contextmanager
    def guard(records: Dataset) -> Iterator[tuple[Ask, Callable[[], int]]]:
        with guards(records, setting, silos=1) as folder:
            app = app_of(guarded_train(folder / "guard.toml"))
            yield asking(app, {"guard": f"{folder}/silo-{{silo}}/s.sock"}), lambda: steps_in(folder / "silo-0")

    model = scaled(1.0)
    found: dict[str, Any] = {}
    for name, silo in (("opacus", opacus), ("guard", guard)):
        with silo(data) as (ask, steps):
            missing = ask(scaled(np.nan), 1)
            nan = {"answered": not isinstance(missing, str), "reason": missing if isinstance(missing, str) else ""}
            nan["steps"] = steps()
        with silo(data) as (ask, steps):
            first, again = ask(model, 1), ask(model, 1)
            assert not isinstance(first, str)
            assert not isinstance(again, str)
            twice = {"same": equal(first, again), "steps": steps()}
        with silo(data) as (ask, steps):
            answers = [ask(model, t) for t in range(1, 2 * SERVER_ROUNDS + 1)]
            reasons = [answer for answer in answers if isinstance(answer, str)]
            more = {"answered": len(answers) - len(reasons), "reason": (reasons or [""])[0], "steps": steps()}
        works = 0
        for _ in range(trials):
            for records, present in zip(canaries, (True, False), strict=True):
                with silo(records) as (ask, _):
                    said = any(tells(ask(overflowing(), t)) for t in range(1, SERVER_ROUNDS + 1))
                works += said == present
        found[name] = {"nan": nan, "twice": twice, "more": more, "canary": works / (2 * trials)}
        for lie in ("nan", "twice", "more"):
            found[name][lie]["epsilon"] = spent(noise, found[name][lie].pop("steps")) if name == "opacus" else None
    return found


def asking(app: ClientApp, run_config: dict[str, str]) -> Ask:
    """Silo 0 of one run, asked as a strategy asks."""
    grid = InProcessGrid(app, 1, run_config)
    (node,) = grid.get_node_ids()

    def ask(arrays: ArrayRecord, server_round: int) -> ArrayRecord | str:
        config = ConfigRecord({"server-round": server_round})
        message = Message(RecordDict({"arrays": arrays, "config": config}), node, "train")
        (reply,) = grid.send_and_receive([message])
        if reply.has_error():
            return reply.error.reason
        return reply.content.array_records["arrays"]

    return ask


def scaled(factor: float) -> ArrayRecord:
    """A server's model, times `factor`."""
    torch.manual_seed(0)
    return ArrayRecord({name: factor * value for name, value in Net().state_dict().items()})


def overflowing() -> ArrayRecord:
    """A finite model whose logits are infinite for a record with a bright first pixel, and zero for all others."""
    state = {name: torch.zeros_like(value) for name, value in Net().state_dict().items()}
    for name, place in (("conv1", (0, 0, 0, 0)), ("conv2", (0, 0, 0, 0))):
        state[f"{name}.weight"][place] = 1e14
    state["fc.weight"][0, 0] = 1e12
    return ArrayRecord(state)


def with_canary(data: Dataset, present: bool) -> Dataset:
    """Record 0 with a bright first pixel, or without; MNIST has none."""
    images = data.train_images.copy()
    images[:HELD, 0, 0] = 0
    images[0, 0, 0] = 255 if present else 0
    return dataclasses.replace(data, train_images=images)


def tells(answer: ArrayRecord | str) -> bool:
    """Whether the answer is what the server waits for: no number, or none at all."""
    return isinstance(answer, str) or not all(np.isfinite(value).all() for value in numbers(answer))


def numbers(arrays: ArrayRecord) -> list[np.ndarray]:
    return arrays.to_numpy_ndarrays()


def equal(one: ArrayRecord, other: ArrayRecord) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(numbers(one), numbers(other), strict=True))


def steps_in(silo: Path) -> int:
    """Rounds that the silo's ledger says were answered."""
    policy = read_policy(silo / "policy.toml")
    ledger = SiloLedger(policy.ledger, policy.mark_path)
    rows = ledger.list_runs()
    ledger.close()
    return sum(row.answered_count for row in rows)
