"""One run of the existing app, or of one lie of its server, in the environment that has Opacus; prints JSON.

    python -m benchmarks.existing_app_point train WHO EPSILON STEP SEED
    python -m benchmarks.existing_app_point deployed WHO EPSILON STEP SEED
    python -m benchmarks.existing_app_point lies EPSILON STEP TRIALS
    python -m benchmarks.existing_app_point lies-deployed WHO EPSILON STEP

WHO: stock, opacus, guard (secret participation, as Opacus has it), guard-fixed (every record once an epoch, in
public order).
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812 - as PyTorch's pages have it
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from benchmarks.existing_app_clients import (
    SERVER_ROUNDS,
    SILOS,
    Setting,
    app_of,
    guarded_train,
    guards,
    images_of,
    own_train,
)
from benchmarks.existing_app_deployed import deployed
from benchmarks.existing_app_lies import told
from benchmarks.existing_app_model import Net
from fedpriv.data.named import Dataset, load
from fedpriv.engines.inprocess import InProcessGrid, quiet_flower_logs

STOCK_STEP = "0.1"
"""The template's own, since steps of clipped gradients diverge where nothing is clipped."""


class TimedGrid(InProcessGrid):
    """The grid of this process, with the seconds of every training."""

    seconds: list[float]

    def _call(self, message: Message) -> Message:
        started = time.perf_counter()
        reply = super()._call(message)
        self.seconds.append(time.perf_counter() - started)
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        return reply


def accuracy(model: Net, data: Dataset) -> float:
    """Of all test records."""
    with torch.no_grad():
        logits = model(images_of(data.test_images))
    return (logits.argmax(1) == torch.from_numpy(data.test_labels)).float().mean().item()


@contextmanager
def client_of(who: str, setting: Setting, data: Dataset) -> Iterator[tuple[ClientApp, dict[str, str]]]:
    """The ClientApp, and the run configuration of its simulation."""
    if who.startswith("guard"):
        with guards(data, setting) as folder:
            yield app_of(guarded_train(folder / "guard.toml")), {"guard": f"{folder}/silo-{{silo}}/s.sock"}
    else:
        yield app_of(own_train(data, setting, setting.noise_multiplier() if who == "opacus" else None)), {}


def trained(who: str, setting: Setting, seed: int) -> dict[str, float]:
    """Stock FedAvg over all rounds; the test accuracy, seconds of a round and of one silo's training."""
    torch.manual_seed(seed)
    data = load("mnist")
    initial = Net()
    with client_of(who, setting, data) as (app, config), quiet_flower_logs():
        grid = TimedGrid(app, SILOS, config)
        grid.seconds = []
        result = FedAvg(fraction_evaluate=0.0).start(
            grid=grid,
            initial_arrays=ArrayRecord(initial.state_dict()),
            train_config=ConfigRecord({"lr": setting.step}),
            num_rounds=SERVER_ROUNDS,
        )
    final = Net()
    final.load_state_dict(result.arrays.to_torch_state_dict())
    return {
        "accuracy": accuracy(final, data),
        "loss": F.cross_entropy(final(images_of(data.test_images)), torch.from_numpy(data.test_labels)).item(),
        "round": sum(grid.seconds) / SERVER_ROUNDS,
        "silo": statistics.median(grid.seconds),
    }


def main() -> None:
    torch.set_num_threads(1)
    task, *rest = sys.argv[1:]
    if task == "train":
        who, epsilon, step, seed = rest
        step = STOCK_STEP if who == "stock" else step
        setting = Setting(float(epsilon), float(step), "fixed" if who == "guard-fixed" else "poisson")
        print(json.dumps(trained(who, setting, int(seed))))
    elif task == "deployed":
        who, epsilon, step, seed = rest
        print(json.dumps(deployed(who, Setting(float(epsilon), float(step)), int(seed))))
    elif task == "lies-deployed":
        who, epsilon, step = rest
        print(json.dumps(deployed(who, Setting(float(epsilon), float(step)), 0, lies=True)))
    else:
        epsilon, step, trials = rest
        print(json.dumps(told(Setting(float(epsilon), float(step)), int(trials))))


if __name__ == "__main__":
    main()
