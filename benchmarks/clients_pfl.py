"""Run by benchmarks/clients.py in the environment that has pfl; imports nothing of fedpriv.

    python clients_pfl.py mlp|cnn ROUNDS

Cohorts of 100 of 1,000 users, five local steps on a user's ten records, the model difference clipped to norm 1,
Gaussian noise on the sum.  Prints {"rounds_per_second": …}.  No evaluation, one process and one torch thread.
"""

import json
import sys
import time
from functools import cache

import numpy as np
import torch
from client_models import CLIENTS, CLIP, COHORT, LOCAL_STEP, LOCAL_STEPS, MODELS, NOISE, STEP, records_of
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

WARM_UP = 2


class Module(nn.Module):
    """With the two methods that pfl asks for."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = MODELS[name]()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.net(features)

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


@cache
def data_of(user: int) -> Dataset:
    return Dataset(raw_data=list(records_of(user)))


def main() -> None:
    name, rounds = sys.argv[1], int(sys.argv[2]) + WARM_UP
    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002 - pfl draws from the global generator
    torch.manual_seed(0)
    for user in range(CLIENTS):
        data_of(user)
    module, clock = Module(name), Clock()
    data = FederatedDataset(data_of, MinimizeReuseUserSampler(list(range(CLIENTS))))
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, NOISE))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser(), noise]),
        model=PyTorchModel(
            model=module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), lr=STEP),
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=LOCAL_STEPS, local_learning_rate=LOCAL_STEP, local_batch_size=None
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    print(json.dumps({"rounds_per_second": (rounds - WARM_UP) / (clock.last - clock.first)}))


main()
