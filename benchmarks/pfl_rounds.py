"""Run by benchmarks/peers.py in the environment that has pfl; imports nothing of fedpriv.

    python pfl_rounds.py central|local ROUNDS

Softmax regression 785 x 10, 100 users in every round, one fresh sample of each, one local step, differences
clipped to norm 1, Gaussian noise on the sum ("central") or by every user ("local").  Prints
{"rounds_per_second": …}.  No evaluation, one worker process and one torch thread: on two cores more of either
does not pay for so small a model.
"""

import json
import sys
import time

import numpy as np
import torch
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
from torch import nn

USERS, FEATURES, CLASSES = 100, 784, 10
WARM_UP = 5
CLIP, NOISE, STEP = 1.0, 1.0, 0.1


class SoftmaxRegression(nn.Module):
    """With the two methods that pfl asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features)

    def loss(self, features: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> torch.Tensor:  # noqa: A002
        return nn.functional.cross_entropy(self(features), labels)

    def metrics(self, *_: object, **__: object) -> dict[str, object]:
        return {}


class Clock(TrainingProcessCallback):
    """When the first counted round began and the last ended."""

    first = last = 0.0

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: object, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.last = time.perf_counter()
        if central_iteration == WARM_UP - 1:
            self.first = self.last
        return False, Metrics()


def federated(rounds: int) -> FederatedDataset:
    """Every call for a user's data gives that user's next sample."""
    features = torch.rand(rounds * USERS, 1, FEATURES)
    labels = torch.randint(0, CLASSES, (rounds * USERS, 1))
    samples = iter(zip(features, labels, strict=True))

    def next_sample(_user: int) -> Dataset:
        return Dataset(raw_data=list(next(samples)))

    return FederatedDataset(next_sample, MinimizeReuseUserSampler(list(range(USERS))))


def main() -> None:
    trust, rounds = sys.argv[1], int(sys.argv[2]) + WARM_UP
    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002 - pfl draws from the global generator
    torch.manual_seed(0)
    gaussian = GaussianMechanism(CLIP, NOISE)
    noise = gaussian if trust == "local" else CentrallyAppliedPrivacyMechanism(gaussian)
    module, clock = SoftmaxRegression(), Clock()
    data = federated(rounds + 1)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=USERS,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser(), noise]),
        model=PyTorchModel(
            model=module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        ),
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=STEP, local_batch_size=None),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    print(json.dumps({"rounds_per_second": (rounds - WARM_UP) / (clock.last - clock.first)}))


main()
