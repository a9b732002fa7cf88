"""Advised settings on networks of many kinds: own-data beside tuning, and beside training without privacy.

`fedpriv.run("own-data", train=…, test=…, model=…)` takes the settings that `fedpriv advise` recommends for a
network.  Its rule was chosen on the networks of `DEVELOPMENT` alone, and the table is of those of `UNSEEN`.

    python -m benchmarks.unseen_networks --out networks.jsonl           # hours of one core
    python -m benchmarks.unseen_networks --table --out networks.jsonl

| column | meaning |
|---|---|
| own-data | the advised settings, mean and standard deviation over seeds |
| tune | the best of 24 settings on held-out training records, judged on the test records |
| no privacy | the same module trained by Adam on all training records without clip and noise |
| constant | the best constant prediction, such as the commonest class |

Scores are accuracies in %, balanced accuracies for the rare class, R² for numbers, the explained share of the
deviance for counts, and the concordance for times.  The data are scikit-learn's small sets and computed ones.
"""

import argparse
import itertools
import json
import math
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import fedpriv

EPSILONS = (1.0, 3.0, 8.0)
SILOS = 5
Arrays = tuple[Any, NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """Network with its data."""

    data: Callable[[np.random.Generator], tuple[Arrays, Arrays]]
    """Function that draws training and test records with labels."""
    network: Callable[[], nn.Module]
    score: Callable[[Tensor, NDArray[Any]], float]
    """Function from outputs (n, …) and labels to the score."""
    loss: Any = None
    constant: Callable[[NDArray[Any]], float] | None = None
    """Score of the best constant prediction, or None for that of the commonest class."""
    rate: float = 3e-3
    """Learning rate of the training without privacy."""
    percent: bool = True


# Scores.


def accuracy(outputs: Tensor, labels: NDArray[Any]) -> float:
    return 100.0 * float((outputs.argmax(-1).numpy() == labels).mean())


def balanced(outputs: Tensor, labels: NDArray[Any]) -> float:
    right = outputs.argmax(-1).numpy() == labels
    return 100.0 * float(np.mean([right[labels == label].mean() for label in np.unique(labels)]))


def several_labels(outputs: Tensor, labels: NDArray[Any]) -> float:
    return 100.0 * float(((outputs.numpy() > 0.0) == (labels > 0.5)).mean())


def r2(outputs: Tensor, labels: NDArray[Any]) -> float:
    return 1.0 - float(((outputs[:, 0].numpy() - labels) ** 2).mean() / labels.var())


def explained_deviance(outputs: Tensor, labels: NDArray[Any]) -> float:
    """Share of the Poisson deviance of the mean that rates exp(outputs) explain."""

    def deviance(rates: NDArray[Any]) -> float:
        logs = np.where(labels > 0, labels * np.log(np.maximum(labels, 1e-9) / rates), 0.0)
        return float((logs - labels + rates).sum())

    rates = np.exp(np.clip(outputs[:, 0].double().numpy(), -20.0, 20.0))
    return 1.0 - deviance(rates) / deviance(np.full(len(labels), labels.mean()))


def concordance(outputs: Tensor, labels: NDArray[Any]) -> float:
    """Share of comparable pairs whose longer predicted time is longer, in %."""
    time, died, log_scale = labels[:, 0], labels[:, 1] > 0.5, outputs[:, 0].numpy()
    pairs = (time[:, None] < time[None, :]) & died[:, None]
    ahead = (log_scale[:, None] < log_scale[None, :]) + 0.5 * (log_scale[:, None] == log_scale[None, :])
    return 100.0 * float(ahead[pairs].mean())


# Data.


def _split(records: Any, labels: NDArray[Any], test: int) -> tuple[Arrays, Arrays]:
    parts = records if isinstance(records, tuple) else (records,)
    train_parts, test_parts = tuple(part[:-test] for part in parts), tuple(part[-test:] for part in parts)
    if not isinstance(records, tuple):
        return (train_parts[0], labels[:-test]), (test_parts[0], labels[-test:])
    return (train_parts, labels[:-test]), (test_parts, labels[-test:])


def _bundled(
    name: str, test: int, shape: tuple[int, ...] | None = None, count: int | None = None
) -> Callable[..., tuple[Arrays, Arrays]]:
    """Return a function that shuffles and standardizes a data set of scikit-learn, or `count` of its records."""

    def load(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
        bunch = getattr(import_module("sklearn.datasets"), f"load_{name}")()
        order = draw.permutation(len(bunch.target))[:count]
        records = bunch.data[order].astype("float32")
        records = records / 16.0 if name == "digits" else (records - records.mean(0)) / records.std(0)
        records = records if shape is None else records.reshape(-1, *shape)
        return _split(records.astype("float32"), bunch.target[order].astype("int64"), test)

    return load


def _classification(count: int, test: int, **settings: Any) -> Callable[..., tuple[Arrays, Arrays]]:
    def load(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
        make_classification, seed = (
            import_module("sklearn.datasets").make_classification,
            int(draw.integers(2**31)),
        )
        records, labels = make_classification(count + test, random_state=seed, **settings)
        return _split(records.astype("float32"), labels.astype("int64"), test)

    return load


def _smooth(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
    """Real targets of eight features with interactions, scaled to a deviation of 1."""
    records = draw.normal(size=(4000, 8)).astype("float32")
    values = np.sin(2 * records[:, 0]) + records[:, 1] * records[:, 2] + np.abs(records[:, 3]) + records[:, 4]
    values = values + 0.3 * draw.normal(size=4000)
    return _split(records, ((values - values.mean()) / values.std()).astype("float32"), 1000)


def _walks(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
    """Real targets of two random walks of 20 steps: the end of the first, and the furthest point of the second."""
    walks = 0.3 * np.cumsum(draw.normal(size=(3000, 2, 20)), axis=2)
    values = walks[:, 0, -1] + np.abs(walks[:, 1]).max(1)
    return _split(walks.astype("float32"), ((values - values.mean()) / values.std()).astype("float32"), 1000)


def _friedman(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
    records = draw.random((4000, 10)).astype("float32")
    x = records.T
    values = 10 * np.sin(np.pi * x[0] * x[1]) + 20 * (x[2] - 0.5) ** 2 + 10 * x[3] + 5 * x[4]
    values = values + draw.normal(size=4000)
    return _split(2 * records - 1, ((values - values.mean()) / values.std()).astype("float32"), 1000)


def _tokens(classes: int, length: int, words: int, count: int = 4000) -> Callable[..., tuple[Arrays, Arrays]]:
    """Return a function that draws sequences whose class gives a quarter of their tokens."""

    def load(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
        labels = draw.integers(classes, size=count)
        tokens = draw.integers(words, size=(count, length))
        of_class = draw.permutation(words)[: 3 * classes].reshape(classes, 3)
        picks = of_class[labels][np.arange(count)[:, None], draw.integers(3, size=(count, length))]
        tokens = np.where(draw.random((count, length)) < 0.25, picks, tokens)
        return _split(tokens.astype("int64"), labels.astype("int64"), 1000)

    return load


def _waves(channels: int, length: int, classes: int, count: int = 3000) -> Callable[..., tuple[Arrays, Arrays]]:
    """Return a function that draws noisy beats, whose class gives frequency and shape."""

    def load(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
        labels = draw.integers(classes, size=count)
        time = np.linspace(0.0, 1.0, length)
        phase, frequency = draw.random((count, 1)), (2.0 + 1.5 * labels)[:, None]
        base = np.sin(2 * np.pi * (frequency * time + phase)) ** (1 + 2 * (labels[:, None] % 2))
        gains = draw.normal(1.0, 0.3, (count, channels, 1))
        signals = gains * base[:, None] + 0.5 * draw.normal(size=(count, channels, length))
        return _split(signals.astype("float32"), labels.astype("int64"), 1000)

    return load


def _graphs(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
    """Graphs of ten nodes with four features: the class is that of the links among marked nodes."""
    count, nodes = 4000, 10
    labels = draw.integers(3, size=count)
    features = draw.normal(size=(count, nodes, 4))
    marked = features[..., 0] > 0
    chance = np.array([0.1, 0.35, 0.7])[labels][:, None, None] * np.ones((1, nodes, nodes))
    chance = np.where(marked[:, :, None] & marked[:, None, :], chance, 0.3)
    links = np.triu(draw.random((count, nodes, nodes)) < chance, 1)
    adjacency = links + links.transpose(0, 2, 1)
    return _split((features.astype("float32"), adjacency.astype("float32")), labels.astype("int64"), 1000)


def _several(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
    records = draw.normal(size=(4000, 20)).astype("float32")
    scores = records @ draw.normal(size=(20, 8)) + np.tanh(records @ draw.normal(size=(20, 8)))
    return _split(records, (scores > 1.0).astype("float32"), 1000)


def _counts(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
    records = draw.normal(size=(4000, 10)).astype("float32")
    rates = np.exp(0.6 * records[:, 0] + 0.5 * np.sin(2 * records[:, 1]) + 0.3 * records[:, 2] + 0.5)
    return _split(records, draw.poisson(rates).astype("float32"), 1000)


def _few_counts(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
    records = draw.normal(size=(4000, 6)).astype("float32")
    rates = np.exp(0.7 * records[:, 0] - 0.5 * np.abs(records[:, 1]))
    return _split(records, draw.poisson(rates).astype("float32"), 1000)


def _rare(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
    """One class of two hundred, found by a score of its features."""
    records = draw.normal(size=(8000, 12)).astype("float32")
    score = records[:, :4].sum(1) + records[:, 4] * records[:, 5]
    labels = (score > np.quantile(score, 1.0 - 1.0 / 200.0)).astype("int64")
    return _split(records, labels, 2000)


def _times(draw: np.random.Generator) -> tuple[Arrays, Arrays]:
    records = draw.normal(size=(4000, 10)).astype("float32")
    scale = np.exp(0.5 * records[:, 0] - 0.5 * np.abs(records[:, 1]) + 0.3 * records[:, 2])
    times, ends = scale * draw.weibull(1.5, 4000), draw.exponential(2.0, 4000)
    labels = np.stack([np.minimum(times, ends) + 1e-3, times <= ends], 1).astype("float32")
    return _split(records, labels, 1000)


def weibull_loss(output: Tensor, label: Tensor) -> Tensor:
    """Negative log likelihood of a Weibull time with log scale and log shape, censored where label 1 is 0."""
    shape = functional.softplus(output[1] + 0.5) + 0.1
    log_ratio = label[0].log() - output[0]
    return (shape * log_ratio).exp() - label[1] * (shape.log() + (shape - 1.0) * log_ratio - output[0])


# Networks.


class Mixer(nn.Module):
    """MLP-Mixer over the 16 patches of an 8 x 8 picture."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 32)
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(4)])
        self.tokens = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]
        )
        self.channels = nn.ModuleList(
            [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(2)]
        )
        self.head = nn.Linear(32, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        patches = pictures.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        x = self.embed(patches)
        for n in range(2):
            x = x + self.tokens[n](self.norms[2 * n](x).mT).mT
            x = x + self.channels[n](self.norms[2 * n + 1](x))
        outputs: Tensor = self.head(x.mean(1))
        return outputs


class VisionTransformer(nn.Module):
    """Transformer over the 16 patches of an 8 x 8 picture."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(4, 24), nn.Parameter(0.02 * torch.randn(16, 24))
        layer = nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        patches = pictures.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        outputs: Tensor = self.head(self.body(self.embed(patches) + self.places).mean(1))
        return outputs


class PatchEncoder(nn.Module):
    """Transformer encoder of one layer over parts of `length` steps of a series of several channels."""

    def __init__(self, channels: int, steps: int, length: int, outputs: int) -> None:
        super().__init__()
        self.length = length
        self.embed = nn.Linear(channels * length, 16)
        self.places = nn.Parameter(0.02 * torch.randn(steps // length, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, outputs)

    def forward(self, series: Tensor) -> Tensor:
        parts = series.unfold(2, self.length, self.length).transpose(1, 2).flatten(2)
        outputs: Tensor = self.head(self.body(self.embed(parts) + self.places).mean(1))
        return outputs


class TokenEncoder(nn.Module):
    """Transformer encoder over tokens."""

    def __init__(self, words: int, classes: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(self.words(tokens)).mean(1))
        return outputs


class FullTransformer(nn.Module):
    """torch's Transformer, whose decoder reads one learned query."""

    def __init__(self, words: int, classes: int, width: int) -> None:
        super().__init__()
        self.words, self.query = nn.Embedding(words, width), nn.Parameter(torch.randn(1, 1, width))
        self.body = nn.Transformer(width, 4, 1, 1, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        outputs: Tensor = self.head(self.body(x, self.query.expand(len(x), -1, -1))[:, 0])
        return outputs


class Recurrent(nn.Module):
    """Recurrent layer over a signal (channels, length) or tokens, with the mean of its states."""

    def __init__(self, layer: nn.RNNBase, outputs: int, classes: int, words: int | None = None) -> None:
        super().__init__()
        self.words = None if words is None else nn.Embedding(words, layer.input_size)
        self.layer, self.head = layer, nn.Linear(outputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT if self.words is None else self.words(x)
        outputs: Tensor = self.head(self.layer(x)[0].mean(1))
        return outputs


class Residual1d(nn.Module):
    """Residual network of 1-d convolutions with GroupNorm."""

    def __init__(self, channels: int, classes: int, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv1d(channels, width, 5, padding=2)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.GroupNorm(4, width), nn.ReLU(), nn.Conv1d(width, width, 3, padding=1),
                    nn.GroupNorm(4, width), nn.ReLU(), nn.Conv1d(width, width, 3, padding=1),
                )
                for _ in range(blocks)
            ]
        )  # fmt: skip
        self.head = nn.Linear(width, classes)

    def forward(self, signal: Tensor) -> Tensor:
        x = self.first(signal)
        for block in self.blocks:
            x = functional.max_pool1d(x + block(x), 2)
        outputs: Tensor = self.head(x.mean(-1))
        return outputs


class GraphNetwork(nn.Module):
    """Two rounds of messages along links, for features of nodes and an adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 24), nn.Linear(48, 24)])
        self.head = nn.Linear(24, 3)

    def forward(self, features: Tensor, links: Tensor) -> Tensor:
        x = features
        for layer in self.layers:
            x = torch.relu(layer(torch.cat([x, links @ x], -1)))
        outputs: Tensor = self.head(x.mean(1))
        return outputs


class Nested(nn.Module):
    """Parameters in lists and dictionaries, and one matrix that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(20, 24) / 5), nn.Parameter(torch.randn(24, 24) / 5)]
        )
        self.parts = nn.ModuleDict({"norm": nn.LayerNorm(24), "head": nn.Linear(24, 7)})

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.weights[0])
        x = torch.tanh(x @ self.weights[1]) + torch.tanh(x @ self.weights[1].T)
        outputs: Tensor = self.parts["head"](self.parts["norm"](x))
        return outputs


class Words(nn.Module):
    """Mean of embedded words, and a hidden layer."""

    def __init__(self, words: int, classes: int, width: int) -> None:
        super().__init__()
        self.bag, self.hidden = nn.EmbeddingBag(words, width, mode="mean"), nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.relu(self.hidden(self.bag(tokens))))
        return outputs


def layers(*widths: int, norm: bool = False, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Dense layers of these widths, with LayerNorm before every activation if `norm`."""
    parts: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        parts += [nn.Linear(inputs, outputs), *([nn.LayerNorm(outputs)] if norm else []), activation()]
    return nn.Sequential(*parts[: -2 if norm else -1])


def picture_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


DEVELOPMENT: Mapping[str, Case] = {
    "digits, convolutions": Case(_bundled("digits", 397, (1, 8, 8)), picture_network, accuracy),
    "4 classes, dense 64": Case(
        _classification(3000, 1000, n_features=20, n_informative=10, n_classes=4), lambda: layers(20, 64, 64, 4),
        accuracy,
    ),
    "8 classes of tokens, GRU": Case(
        _tokens(8, 12, 60), lambda: Recurrent(nn.GRU(16, 24, batch_first=True), 24, 8, 60), accuracy
    ),
    "4 kinds of waves, GRU both ways": Case(
        _waves(1, 32, 4, 2500), lambda: Recurrent(nn.GRU(1, 16, batch_first=True, bidirectional=True), 32, 4),
        accuracy,
    ),
    "digits by columns, LSTM": Case(
        _bundled("digits", 397, (8, 8)), lambda: Recurrent(nn.LSTM(8, 24, batch_first=True), 24, 10), accuracy
    ),
    "walks, LSTM": Case(
        _walks, lambda: Recurrent(nn.LSTM(2, 16, batch_first=True), 16, 1), r2,
        constant=lambda _: 0.0, percent=False,
    ),
    "4 kinds of waves, encoder": Case(_waves(1, 48, 4, 2500), lambda: PatchEncoder(1, 48, 4, 4), accuracy),
    "digits by rows, encoder": Case(
        _bundled("digits", 397, (1, 64)), lambda: PatchEncoder(1, 64, 8, 10), accuracy
    ),
    "walks, encoder": Case(
        _walks, lambda: PatchEncoder(2, 20, 2, 1), r2, constant=lambda _: 0.0, percent=False
    ),
    "6 classes of tokens, encoder": Case(
        _tokens(6, 10, 50), lambda: TokenEncoder(50, 6, 16, 1), accuracy
    ),
    "Friedman 1, dense 32": Case(
        _friedman, lambda: layers(10, 32, 32, 1), r2, constant=lambda _: 0.0, percent=False
    ),
    "few counts, dense 24": Case(
        _few_counts,
        lambda: layers(6, 24, 1, activation=nn.Tanh),
        explained_deviance,
        "poisson",
        lambda _: 0.0,
        percent=False,
    ),
    "4 kinds of waves, convolutions": Case(
        _waves(1, 48, 4), lambda: nn.Sequential(
            nn.Conv1d(1, 12, 7, padding=3), nn.ReLU(), nn.AvgPool1d(4), nn.Conv1d(12, 16, 5, padding=2), nn.ReLU(),
            nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(64, 4)),
        accuracy,
    ),
}  # fmt: skip
"""Networks and data on which the rule was chosen."""

UNSEEN: Mapping[str, Case] = {
    "digits, MLP-Mixer": Case(_bundled("digits", 597, count=1597), Mixer, accuracy),
    "smooth target, dense 48 with LayerNorm": Case(
        _smooth, lambda: layers(8, 48, 48, 1, norm=True), r2, constant=lambda _: 0.0, percent=False
    ),
    "7 classes, nested containers and tied weights": Case(
        _classification(3000, 1000, n_features=20, n_informative=12, n_classes=7, n_clusters_per_class=1), Nested,
        accuracy,
    ),
    "wine, linear": Case(_bundled("wine", 45), lambda: nn.Linear(13, 3), accuracy),
    "20 classes of tokens, TransformerEncoder": Case(
        _tokens(20, 16, 100, 3000), lambda: TokenEncoder(100, 20, 32, 2), accuracy
    ),
    "12 classes of tokens, Transformer": Case(
        _tokens(12, 12, 80, 2500), lambda: FullTransformer(80, 12, 24), accuracy
    ),
    "5 kinds of waves, LSTM both ways": Case(
        _waves(2, 24, 5, 2500), lambda: Recurrent(nn.LSTM(2, 20, batch_first=True, bidirectional=True), 40, 5),
        accuracy,
    ),
    "5 kinds of waves, residual with GroupNorm": Case(_waves(2, 48, 5, 2500), lambda: Residual1d(2, 5), accuracy),
    "graphs with two inputs": Case(_graphs, GraphNetwork, accuracy),
    "8 labels a record, dense 64": Case(
        _several, lambda: layers(20, 64, 64, 8), several_labels, "binary",
        lambda labels: 100.0 * float(np.maximum(labels.mean(0), 1 - labels.mean(0)).mean()),
    ),
    "counts, dense 48": Case(
        _counts, lambda: layers(10, 48, 48, 1), explained_deviance, "poisson", lambda _: 0.0, percent=False
    ),
    "1 of 200, class weights": Case(
        _rare, lambda: layers(12, 32, 2), balanced,
        {"name": "cross-entropy", "class_weights": [1.0, 200.0]}, lambda _: 50.0,
    ),
    "times, own Weibull loss": Case(
        _times, lambda: layers(10, 32, 32, 2), concordance, weibull_loss, lambda _: 50.0
    ),
    "digits, vision transformer": Case(_bundled("digits", 597, count=1597), VisionTransformer, accuracy),
    "10 classes of words, EmbeddingBag": Case(_tokens(10, 20, 400), lambda: Words(400, 10, 16), accuracy),
    "breast cancer, deep and narrow": Case(
        _bundled("breast_cancer", 169), lambda: layers(30, 10, 10, 10, 10, 2, activation=nn.Tanh), accuracy
    ),
}  # fmt: skip
"""Networks and data that the rule was not chosen on."""


def make_case(case: Case, seed: int) -> tuple[Arrays, Arrays, nn.Module]:
    """Draw the data of a case, and build its module from the same seed."""
    train, test = case.data(np.random.default_rng(1000 + seed))
    torch.manual_seed(seed)
    return train, test, case.network()


@torch.inference_mode()
def score_module(case: Case, module: nn.Module, test: Arrays) -> float:
    records, labels = test
    parts = records if isinstance(records, tuple) else (records,)
    outputs = module(*(torch.from_numpy(part) for part in parts))
    return case.score(outputs, labels) if torch.isfinite(outputs).all() else math.nan


def run_settings(
    case: Case, train: Arrays, test: Arrays, module: nn.Module, settings: Mapping[str, Any]
) -> list[tuple[Mapping[str, Any], float, fedpriv.CellResults]]:
    """Run own-data with these settings, and return point, score and results of each cell."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = fedpriv.run(
            "own-data",
            train=train,
            test=test,
            model=module,
            loss=case.loss,
            set=settings,
            out=Path(folder) / "run",
        )
        return [(cell.point, score_module(case, cell.to_module(), test), cell) for cell in results]


def own_data(case: Case, seed: int) -> list[dict[str, Any]]:
    """Score the advised settings at each ε, with the findings that the run tells."""
    train, test, module = make_case(case, seed)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = fedpriv.run(
            "own-data",
            train=train,
            test=test,
            model=module,
            loss=case.loss,
            epsilon=EPSILONS,
            set={"run.evaluations": 3},
            out=Path(folder) / "run",
        )
        return [
            {
                "kind": "own-data",
                "epsilon": epsilon,
                "score": score_module(case, cell.to_module(), test),
                "findings": [line for line in results.findings if f"ε = {epsilon:g}" in line],
            }
            for epsilon, cell in zip(EPSILONS, results, strict=True)
        ]


TUNE_GRIDS: Sequence[tuple[str, float, Sequence[float]]] = (
    ("dp-adam", 0.3, (0.003, 0.01, 0.03, 0.1)),
    ("dp-sgd", 1.0, (0.1, 0.3, 1.0, 3.0)),
    ("dp-sgd", 0.1, (1.0, 3.0, 10.0, 30.0)),
)
"""Algorithm, clip and steps, each in 30 and in 100 rounds: 24 settings."""
TUNE_ROUNDS = (30, 100)


def tune(case: Case, seed: int) -> list[dict[str, Any]]:
    """Score the best of 24 settings, chosen on a fifth of the training records."""
    (records, labels), test, module = make_case(case, seed)
    parts = records if isinstance(records, tuple) else (records,)
    held_out = len(labels) // 5

    def select(rows: slice) -> Arrays:
        chosen = tuple(part[rows] for part in parts)
        return (chosen if isinstance(records, tuple) else chosen[0]), labels[rows]

    fitted, judged = select(slice(None, -held_out)), select(slice(-held_out, None))
    trials: dict[float, list[tuple[float, dict[str, Any]]]] = {epsilon: [] for epsilon in EPSILONS}
    for (algorithm, clip, steps), rounds in itertools.product(TUNE_GRIDS, TUNE_ROUNDS):
        settings = {
            "algorithm.name": algorithm, "algorithm.clip": clip, "federation.rounds": rounds, "run.evaluations": 1,
            "federation.epochs": rounds,
        }  # fmt: skip
        sweep = {"algorithm.step": list(steps), "privacy.epsilon": list(EPSILONS)}
        count = len(fitted[1]) // SILOS * SILOS
        try:
            cells = run_settings(case, fitted, judged, module, {**settings, **sweep, "federation.samples": count})
        except fedpriv.RunError:  # a step that is far too long ends in a loss that is not finite
            continue
        for point, score, _ in cells:
            if not math.isnan(score):
                trials[point["privacy.epsilon"]].append(
                    (score, {**settings, "algorithm.step": point["algorithm.step"]})
                )
    found = []
    for epsilon in EPSILONS:
        chosen = max(trials[epsilon], key=lambda trial: trial[0])[1]
        count = len(labels) // SILOS * SILOS
        ((_, score, _),) = run_settings(
            case,
            (records, labels),
            test,
            module,
            {**chosen, "privacy.epsilon": epsilon, "federation.samples": count},
        )
        found.append({"kind": "tune", "epsilon": epsilon, "score": score, "chosen": chosen})
    return found


def without_privacy(case: Case, seed: int) -> list[dict[str, Any]]:
    """Score the module after 300 steps of Adam on batches of 256 training records."""
    (records, labels), test, module = make_case(case, seed)
    parts = [torch.from_numpy(part) for part in (records if isinstance(records, tuple) else (records,))]
    targets, draw = torch.from_numpy(labels), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=case.rate)
    losses: Mapping[str, Any] = {
        "binary": functional.binary_cross_entropy_with_logits,
        "poisson": lambda outputs, counts: functional.poisson_nll_loss(outputs[:, 0], counts),
    }
    weights = torch.tensor(case.loss["class_weights"]) if isinstance(case.loss, dict) else None
    for _ in range(300):
        rows = torch.randint(len(targets), (256,), generator=draw)
        outputs, wanted = module(*(part[rows] for part in parts)), targets[rows]
        if callable(case.loss):
            loss = torch.func.vmap(case.loss)(outputs, wanted).mean()
        elif isinstance(case.loss, str):
            loss = losses[case.loss](outputs, wanted)
        elif wanted.is_floating_point():
            loss = functional.mse_loss(outputs[:, 0], wanted)
        else:
            loss = functional.cross_entropy(outputs, wanted, weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    constant = (
        case.constant(test[1]) if case.constant else 100.0 * float(np.bincount(test[1]).max() / len(test[1]))
    )
    return [{"kind": "no privacy", "score": score_module(case, module, test), "constant": constant}]


def measure(out: Path, names: Sequence[str], kinds: Sequence[str], seeds: int) -> None:
    """Append a line for each measurement that `out` lacks."""
    done = {(line["case"], line["seed"], line["kind"]) for line in read_lines(out)}
    functions = {"own-data": own_data, "no privacy": without_privacy, "tune": tune}
    for kind, seed, name in itertools.product(kinds, range(seeds), names):
        if (name, seed, kind) in done:
            continue
        for line in functions[kind]((DEVELOPMENT | UNSEEN)[name], seed):  # type: ignore[operator]
            with out.open("a") as file:
                file.write(json.dumps({"case": name, "seed": seed, **line}) + "\n")
            print(name, seed, {key: value for key, value in line.items() if key != "findings"}, flush=True)


def read_lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def format_table(out: Path, names: Sequence[str]) -> str:
    """Format the measurements as Markdown, and count the cells near tune and those at chance without a finding."""
    lines = read_lines(out)
    rows = ["| network | ε | own-data | tune | no privacy | constant | said |", "|---|---|---|---|---|---|---|"]
    near = compared = silent = 0
    for name, epsilon in itertools.product(names, EPSILONS):
        case = UNSEEN.get(name) or DEVELOPMENT[name]
        factor, digits = (1.0, 1) if case.percent else (100.0, 2)
        of_case = [line for line in lines if line["case"] == name]
        at = {
            kind: [line for line in of_case if line["kind"] == kind and line.get("epsilon", epsilon) == epsilon]
            for kind in ("own-data", "tune", "no privacy")
        }
        if not at["own-data"] or not at["no privacy"]:
            continue
        mean = {kind: statistics.fmean(line["score"] for line in kept) for kind, kept in at.items() if kept}
        constant = statistics.fmean(line["constant"] for line in at["no privacy"])
        if "tune" in mean:
            compared += 1
            near += factor * (mean["tune"] - mean["own-data"]) <= 5.0
        said = sum(bool(line["findings"]) for line in at["own-data"])
        at_chance = [line for line in at["own-data"] if factor * (line["score"] - constant) <= 1.0]
        silent += sum(not line["findings"] for line in at_chance)
        spread = statistics.stdev(scores) if len(scores := [line["score"] for line in at["own-data"]]) > 1 else 0.0
        tuned = f"{mean['tune']:.{digits}f}" if "tune" in mean else ""
        rows.append(
            f"| {name} | {epsilon:g} | {mean['own-data']:.{digits}f} ± {spread:.{digits}f} | {tuned} | "
            f"{mean['no privacy']:.{digits}f} | {constant:.{digits}f} | {said} of {len(at['own-data'])} |"
        )
    rows.append(f"\n{near} of {compared} within 5 points of tune; {silent} runs at chance without a finding.")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("networks.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table of what was measured")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--only", action="append", help="part of a network's name; repeatable")
    parser.add_argument("--kind", action="append", help="own-data, tune or no privacy; repeatable")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in UNSEEN if not arguments.only or any(part in name for part in arguments.only)]
    if arguments.table:
        print(format_table(arguments.out, names))
        return
    for kind in arguments.kind or ("own-data", "no privacy", "tune"):
        measure(arguments.out, names, [kind], arguments.seeds)


if __name__ == "__main__":
    main()
