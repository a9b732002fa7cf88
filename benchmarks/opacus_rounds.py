"""Run by benchmarks/peers.py and networks.py in the environment that has Opacus; imports nothing of fedpriv.

    python opacus_rounds.py hooks|ghost ROUNDS softmax|cnn|wide-cnn

A model of client_models.py, a batch of 100 fresh samples in every round, which stand for the clients: gradients
clipped to norm 1 one by one, Gaussian noise on their sum.  Opacus has no clients that could add their own noise.
Prints {"rounds_per_second": …, "processor_per_round": …}.  Batches are slices of one tensor, which is faster than
a data loader.
"""

import json
import sys
import time
import warnings

import torch
from client_models import NETWORKS
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLIENTS, FEATURES, CLASSES = 100, 784, 10
WARM_UP = 2
CLIP, NOISE, STEP = 1.0, 1.0, 0.1


def main() -> None:
    mode, rounds = sys.argv[1], int(sys.argv[2]) + WARM_UP
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    features = torch.rand(rounds, CLIENTS, FEATURES)
    labels = torch.randint(0, CLASSES, (rounds, CLIENTS))
    module = NETWORKS[sys.argv[3]]()
    loader = DataLoader(TensorDataset(features.flatten(0, 1), labels.flatten()), batch_size=CLIENTS)
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=STEP),
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    module, optimizer = private[:2]
    criterion = private[2] if mode == "ghost" else nn.CrossEntropyLoss()
    for t in range(rounds):
        if t == WARM_UP:
            started, used = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        criterion(module(features[t]), labels[t]).backward()
        optimizer.step()
    counted, wall, processor = rounds - WARM_UP, time.perf_counter() - started, time.process_time() - used
    print(json.dumps({"rounds_per_second": counted / wall, "processor_per_round": processor / counted}))


main()
