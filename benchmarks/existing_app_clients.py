"""Three ClientApps of the same app: stock, with Opacus in the client, and with the silo's guard in its place.

Imported where Opacus is installed beside fedpriv (benchmarks/peer_environments.sh).
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.existing_app_model import Net
from fedpriv.data.named import Dataset
from fedpriv.flower import guard_of
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import load_scenario
from fedpriv.silo.demo import format_policy, run_allowance, write_policy, write_shard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import read_policy

DELTA, CLIP = 1e-5, 1.0
SILOS, HELD = 3, 4000
BATCH, SERVER_ROUNDS = 500, 3
STEPS = HELD // BATCH
"""Noisy steps of a silo between two averages: an epoch."""
_ROOT = Path(__file__).resolve().parents[1]

SCENARIO = """\
name = "existing-app"
[data]
name = "mnist"
[model]
name = "benchmarks.existing_app_model:net"
shape = [1, 28, 28]
[federation]
silos = {silos}
rounds = {rounds}
epochs = {epochs}
batch = {batch}
sampling = "{sampling}"
[algorithm]
name = "dp-sgd"
trust = "untrusted"
clip = {clip}
step = {step}
[privacy]
relation = "zero-out"
epsilon = {epsilon}
delta = {delta}
"""


@dataclass(frozen=True)
class Setting:
    """What all clients have in common."""

    epsilon: float
    step: float
    sampling: str = "poisson"
    """How guards let records take part: "poisson", as Opacus does, or "fixed"."""

    def noise_multiplier(self) -> float:
        """Opacus' own noise for ε over all rounds, by its tightest accountant."""
        from opacus.accountants.utils import (
            get_noise_multiplier,  # seconds, which the guard's client does not need
        )

        return float(
            get_noise_multiplier(
                target_epsilon=self.epsilon,
                target_delta=DELTA,
                sample_rate=BATCH / HELD,
                steps=STEPS * SERVER_ROUNDS,
                accountant="prv",
            )
        )

    def scenario(self) -> str:
        """What the app puts to guards."""
        return SCENARIO.format(
            silos=SILOS, rounds=STEPS * SERVER_ROUNDS, epochs=SERVER_ROUNDS, batch=BATCH, sampling=self.sampling,
            clip=CLIP, step=self.step, epsilon=self.epsilon, delta=DELTA,
        )  # fmt: skip


def spent(noise_multiplier: float, steps: int) -> float:
    """ε of so many steps of one silo, by Opacus' own accountant."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(noise_multiplier, BATCH / HELD, steps)]
    return float(accountant.get_epsilon(DELTA))


def images_of(values: np.ndarray) -> Tensor:
    """Pixels as the template scales them: (n, 1, 28, 28) in [0, 1]."""
    return torch.from_numpy(values).float().unsqueeze(1) / 255


Train = Callable[[Message, Context], Message]


def app_of(train: Train) -> ClientApp:
    """A ClientApp that trains so."""
    app = ClientApp()
    app.train()(train)
    return app


def own_train(data: Dataset, setting: Setting, noise_multiplier: float | None) -> Train:
    """The template's training on each silo's part of the records; with Opacus if there is a noise multiplier."""

    def train(msg: Message, context: Context) -> Message:
        model: nn.Module = Net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        part = slice(int(context.node_config["partition-id"]) * HELD, None)
        images, labels = (
            images_of(data.train_images[part][:HELD]),
            torch.from_numpy(data.train_labels[part][:HELD]),
        )
        loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=setting.step)
        inner = model
        if noise_multiplier is not None:
            from opacus import PrivacyEngine

            model, optimizer, loader = PrivacyEngine().make_private(
                module=model,
                optimizer=optimizer,
                data_loader=loader,
                noise_multiplier=noise_multiplier,
                max_grad_norm=CLIP,
            )
        criterion = nn.CrossEntropyLoss()
        for batch_images, batch_labels in loader:
            optimizer.zero_grad()
            criterion(model(batch_images), batch_labels).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(labels)})
        content = RecordDict({"arrays": ArrayRecord(inner.state_dict()), "metrics": metrics})
        return Message(content, reply_to=msg)

    return train


def guarded_train(scenario: Path) -> Train:
    """The five lines of docs/existing-flower-app.md."""

    def train(msg: Message, context: Context) -> Message:
        guard = guard_of(context, scenario, STEPS)
        arrays = guard.train(msg.content["arrays"], int(msg.content["config"]["server-round"]))
        metrics = MetricRecord({"num-examples": guard.examples})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    return train


@contextmanager
def guards(data: Dataset, setting: Setting, silos: int = SILOS) -> Iterator[Path]:
    """A guard process for each silo, with its own records, policy and ledger; the folder of the app's scenario."""
    with tempfile.TemporaryDirectory(prefix="fedpriv-app-") as name:
        folder, started = Path(name), []
        (folder / "guard.toml").write_text(setting.scenario())
        cell = load_scenario(folder / "guard.toml").points[0].cell
        allowed = {**run_allowance(cell, load_task(cell)), "models": ["benchmarks.existing_app_model:net"]}
        try:
            for silo in range(silos):
                own = folder / f"silo-{silo}"
                own.mkdir(mode=0o700)
                write_shard(own / "shard.npz", data, np.arange(silo * HELD, (silo + 1) * HELD))
                keys = {
                    "silo": silo,
                    "classes": 10,
                    "shard": "shard.npz",
                    "ledger": "l.sqlite",
                    "socket": "s.sock",
                }
                write_policy(own / "policy.toml", format_policy(keys, allowed))
                begin_ledgers(read_policy(own / "policy.toml"))
                words = [str(Path(sys.executable).with_name("fedpriv")), "silo", "run", str(own / "policy.toml")]
                environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
                started.append(
                    subprocess.Popen(
                        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                    )
                )
            for process in started:
                assert process.stdout is not None
                if not process.stdout.readline():
                    _, said = process.communicate()
                    raise RuntimeError(f"a guard did not start: {said[-300:]}")
            yield folder
        finally:
            for process in started:
                process.kill()
                process.communicate()
