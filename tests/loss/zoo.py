"""Torch modules as people have them, by import path: good ones, and ones that look at other records."""

from typing import Any

import torch
from torch import Tensor, nn

import fedpriv
from tests.loss.builders import Net


class Wide(nn.Module):
    """A multilayer perceptron with a skip connection: no Sequential, so torch.func takes its gradients."""

    def __init__(self, features: int, outputs: int, hidden: int = 8) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(features, hidden), nn.Linear(hidden, outputs)
        self.skip = nn.Linear(features, outputs, bias=False)

    def forward(self, values: Tensor) -> Any:
        return self.outer(torch.tanh(self.inner(values))) + self.skip(values)


class Centred(Wide):
    """Subtracts the mean of the batch: no known layer, no buffer, and every record looks at the others."""

    def forward(self, values: Tensor) -> Any:
        return super().forward(values - values.mean(0, keepdim=True))


class Remembering(Wide):
    """Adds what the call before it saw."""

    kept: Tensor | float = 0.0

    def forward(self, values: Tensor) -> Tensor:
        out = super().forward(values) + self.kept
        self.kept = values.detach().sum()
        return out


class Looking(nn.Module):
    """A table of rows by number: raises on a record whose number is none of its rows."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.table = nn.Embedding(4, outputs)

    def forward(self, values: Tensor) -> Any:
        return self.table(values[..., 0].long().abs())


def normalized(features: int, outputs: int) -> nn.Module:
    """With BatchNorm, as most image models come."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * features, outputs)
    )


def backbone(width: int = 5) -> nn.Module:
    """What has been trained elsewhere; 6 values in."""
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh())


def mixing_backbone() -> nn.Module:
    """Looks at the whole batch, whatever mode it is in."""

    return Net(lambda net, values: net.inner(values - values.mean(0)), inner=nn.Linear(6, 5))


def three(_features: int, _outputs: int) -> int:
    return 3


class Finite(nn.Module):
    """An ordinary idiom against overflow, with the mistake that it asks all records of the batch at once."""

    def __init__(self, features: int, outputs: int, hidden: int = 4) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(features, hidden), nn.Linear(hidden, outputs)

    def forward(self, values: Tensor) -> Any:
        hidden = self.inner(values).exp()
        hidden = torch.where(torch.isfinite(hidden).all(), hidden, torch.zeros_like(hidden))
        return self.outer(hidden)


def tokens(outputs: int = 32) -> nn.Module:
    """Maps a word's number, a float as records are, to features; raises on a word beyond its 16."""
    table = Net(lambda net, values: net.table(values.long()), table=nn.Embedding(16, 64))
    return nn.Sequential(nn.Flatten(0), table, nn.Linear(64, outputs), nn.Tanh())


class Fragile(nn.Module):
    """Raises on a record above 8, is not finite for one below -9, overflows for large models, and looks around."""

    def __init__(self, features: int, outputs: int, hidden: int = 5) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(features, hidden), nn.Linear(hidden, outputs)
        self.table = nn.Embedding(1, 1)

    def forward(self, values: Tensor) -> Any:
        known = self.table((values.amax(-1) > 8.0).long())  # IndexError for row 1 of 1
        hidden = self.inner(values).exp()
        hidden = torch.where(torch.isfinite(hidden).all(), hidden, torch.zeros_like(hidden))
        return self.outer(hidden + (values[..., :1] + 9.0).log()) + known


def ragged() -> nn.Module:
    """As many features as the record's number is above 1; 1 of most."""
    return Net(lambda _, values: torch.ones(len(values), max(1, int(values.max()))))


class Summing(nn.Module):
    """Adds up all that it has seen in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, values: Tensor) -> Tensor:
        self.seen += values.sum(0)
        return self.seen.expand(len(values), -1)


class Replacing(Summing):
    """Puts a new buffer with the sum in the place of the old one."""

    def forward(self, values: Tensor) -> Tensor:
        self.seen = self.seen + values.sum(0)
        return self.seen.expand(len(values), -1)


class Aliasing(nn.Module):
    """Adds up all that it has seen in a buffer, by another name of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6, dtype=torch.float64))
        self.others = [self.get_buffer("seen")]

    def forward(self, values: Tensor) -> Tensor:
        self.others[0] += values.sum(0)
        return self.others[0].expand(len(values), -1)


def drawing() -> nn.Module:
    """Drops half of what it sees, whatever mode it is in."""
    return Net(lambda _, values: nn.functional.dropout(values, 0.5))


class Sentences(nn.Module):
    """Outputs of a record's tokens, of 20 words; raises on a word beyond them."""

    def __init__(self, _features: int, outputs: int, words: int = 20) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(words, 4), nn.Linear(4, outputs)

    def forward(self, tokens: Tensor) -> Any:
        return self.last(torch.tanh(self.table(tokens)).mean(1))


class Tags(Sentences):
    """A class for each token, of tokens and a mask."""

    def forward(self, tokens: Tensor, mask: Tensor) -> Any:
        return self.last(torch.tanh(self.table(tokens)) * mask.unsqueeze(-1))


class Beside(nn.Module):
    """Flags of an image and a row of numbers."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.images, self.rows = nn.Conv2d(1, 2, 2), nn.Linear(features - 9, 8)
        self.last = nn.Linear(8, outputs)

    def forward(self, images: Tensor, rows: Tensor) -> Any:
        return self.last(torch.tanh(self.images(images)).flatten(1) + self.rows(rows))


def flags(features: int, outputs: int) -> nn.Module:
    """Layers of known form, for several labels."""
    return nn.Sequential(nn.Linear(features, 5), nn.Tanh(), nn.Linear(5, outputs))


def apart(output: Tensor, label: Tensor) -> Tensor:
    """A loss of one's own, steep where the two are far apart; raises on a label above 1e6."""
    return (output - label).pow(4).sum()


def spying(output: Tensor, label: Tensor) -> Tensor:
    """Writes down that it was called."""
    calls.append(1)
    return (output - label).sum()


calls: list[int] = []


def half_frozen(features: int, outputs: int) -> Wide:
    """`Wide`, of which the inner layer is not trained."""
    module = Wide(features, outputs)
    module.inner.requires_grad_(False)
    return module


def adapted(features: int, outputs: int) -> nn.Module:
    """`Wide`, of whose Linear layers two matrices each are trained."""
    return fedpriv.lora(Wide(features, outputs), rank=2)


class Gru(nn.Module):
    """Steps of two features."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.steps, self.rnn, self.head = features // 2, nn.GRU(2, 4, batch_first=True), nn.Linear(4, outputs)

    def forward(self, values: Tensor) -> Any:
        return self.head(self.rnn(values.unflatten(1, (self.steps, 2)))[1][-1])
