"""Run by benchmarks/gpu.py where Opacus and pfl can be imported; imports nothing of fedpriv.

    python gpu_peers.py hooks|ghost|pfl DEVICE TURNS SECONDS NETWORK:RECORDS:TYPE ...

All that one peer is asked, in one process, since its imports take longer than its rounds.  A round is a batch of
so many fresh records for Opacus; for pfl it is 100 users with a hundredth of them each, one local step,
differences clipped to norm 1, noise on their sum.  bfloat16 is torch's autocast, as either has it.  Prints
{"NETWORK:RECORDS:TYPE": [rounds per second, one a turn]}, with a text in place of the list where the peer fails.
"""

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from client_models import GPU_NETWORKS
from torch import nn

USERS, FEATURES, CLASSES = 100, 784, 10
CLIP, NOISE, STEP = 1.0, 1.0, 0.1
HELD = 64_000
"""Records on the device, of which a round takes the next."""
WARM_UP, FEW = 3, 3


def waited(device: str) -> float:
    """The time when the device has done what it was asked for."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def narrowed(device: str, kind: str) -> contextlib.AbstractContextManager[object]:
    if kind == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16)


def of_opacus(mode: str, device: str, network: str, records: int, kind: str) -> Callable[[int], float]:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    features = torch.rand(HELD, FEATURES, device=device)
    labels = torch.randint(0, CLASSES, (HELD,), device=device)
    module = GPU_NETWORKS[network]().to(device)
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=STEP),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(features, labels), batch_size=records),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    module, optimizer = private[:2]
    criterion = private[2] if mode == "ghost" else nn.CrossEntropyLoss()

    def round_of(t: int) -> None:
        some = slice(t * records % HELD, t * records % HELD + records)
        optimizer.zero_grad()
        with narrowed(device, kind):
            loss = criterion(module(features[some]), labels[some])
        loss.backward()
        optimizer.step()

    def turn(rounds: int) -> float:
        started = waited(device)
        for t in range(rounds):
            round_of(t)
        return rounds / (waited(device) - started)

    for t in range(WARM_UP):
        round_of(t)
    return turn


class Trained(nn.Module):
    """A network with the two methods that pfl asks for."""

    def __init__(self, network: str) -> None:
        super().__init__()
        self.network = GPU_NETWORKS[network]()

    def loss(self, features: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> torch.Tensor:  # noqa: A002
        return nn.functional.cross_entropy(self.network(features), labels)

    def metrics(self, *_: object, **__: object) -> dict[str, object]:
        return {}


def of_pfl(device: str, network: str, records: int, kind: str) -> Callable[[int], float]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism

    each = records // USERS
    features = torch.rand(HELD // each, each, FEATURES, device=device)
    labels = torch.randint(0, CLASSES, (HELD // each, each), device=device)

    class Clock(TrainingProcessCallback):
        """When the first counted round began and the last ended."""

        first = last = 0.0

        def __init__(self, rounds: int) -> None:
            self.looked_at = WARM_UP - 1, WARM_UP + rounds - 1

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: object, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            if central_iteration in self.looked_at:
                self.first, self.last = self.last, waited(device)
            return False, Metrics()

    def users() -> Iterator[Dataset]:
        while True:
            for one, label in zip(features, labels, strict=True):
                yield Dataset(raw_data=[one, label])

    def turn(rounds: int) -> float:
        following, clock, module = users(), Clock(rounds), Trained(network).to(device)
        data = FederatedDataset(lambda _: next(following), MinimizeReuseUserSampler(list(range(USERS))))
        noise: Any = CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, NOISE))
        FederatedAveraging().run(
            algorithm_params=NNAlgorithmParams(
                central_num_iterations=WARM_UP + rounds,
                evaluation_frequency=WARM_UP + rounds + 1,
                train_cohort_size=USERS,
                val_cohort_size=0,
            ),
            backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser(), noise]),
            model=PyTorchModel(
                model=module,
                local_optimizer_create=torch.optim.SGD,
                central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
                amp_dtype=None if kind == "float32" else torch.bfloat16,
            ),
            model_train_params=NNTrainHyperParams(
                local_num_epochs=1, local_learning_rate=STEP, local_batch_size=None
            ),
            model_eval_params=NNEvalHyperParams(local_batch_size=None),
            callbacks=[clock],
        )
        return rounds / (clock.last - clock.first)

    return turn


def main() -> None:
    peer, device, turns, seconds, *asked = sys.argv[1:]
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)
    told: dict[str, list[float] | str] = {}
    for what in asked:
        network, records, kind = what.split(":")
        words = device, network, int(records), kind
        try:
            turn = of_pfl(*words) if peer == "pfl" else of_opacus(peer, *words)
            rounds = max(FEW, int(turn(FEW) * float(seconds)))
            told[what] = [turn(rounds) for _ in range(int(turns))]
        except Exception as error:  # whatever a peer cannot do is a line of its own
            told[what] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if device == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(told))


main()
