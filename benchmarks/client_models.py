"""What clients and silos train in benchmarks, for programs that import nothing of fedpriv."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

CLIENTS, COHORT, RECORDS, LOCAL_STEPS, CLASSES = 1000, 100, 10, 5, 10
PIXELS, ROWS = 784, 28
CLIP, NOISE, STEP, LOCAL_STEP = 1.0, 1.0, 1.0, 0.1


def perceptron() -> nn.Sequential:
    """784-64-10, 50,890 parameters."""
    return nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def convolutional(channels: int = 16, hidden: int = 32) -> nn.Sequential:
    """26,010 parameters, more with more channels and hidden units, of features (n, 784)."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, channels, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(channels, 2 * channels, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * channels, hidden),
        nn.Tanh(),
        nn.Linear(hidden, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Sequential]] = {"mlp": perceptron, "cnn": convolutional}

NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "softmax": lambda: nn.Sequential(nn.Linear(784, CLASSES)),
    "cnn": convolutional,
    "wide-cnn": lambda: convolutional(64, 420),
}
"""What benchmarks/opacus_rounds.py trains; the last has 1,000,150 parameters."""


def records_of(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (RECORDS, 784) and labels of one client: noise, which costs what pictures cost."""
    generator = torch.Generator().manual_seed(client)
    return torch.rand(RECORDS, 784, generator=generator), torch.randint(
        0, CLASSES, (RECORDS,), generator=generator
    )


class Attention(nn.Module):
    """Of four heads, from linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        parts = [
            layer(values).unflatten(-1, (4, -1)).transpose(-3, -2) for layer in (self.query, self.key, self.value)
        ]
        mixed: torch.Tensor = self.out(
            functional.scaled_dot_product_attention(*parts).transpose(-3, -2).flatten(-2)
        )
        return mixed


class Block(nn.Module):
    """Attention and a perceptron, each of what LayerNorm makes of the sum so far."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.first, self.second = Attention(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values + self.attention(self.first(values))
        out: torch.Tensor = values + self.down(functional.gelu(self.up(self.second(values))))
        return out


class Transformer(nn.Module):
    """Two blocks over the rows."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.wide, self.norm, self.out = nn.Linear(ROWS, width), nn.LayerNorm(width), nn.Linear(width, CLASSES)
        self.blocks = nn.Sequential(Block(width, hidden), Block(width, hidden))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        seen = self.blocks(self.wide(values.unflatten(-1, (ROWS, ROWS))))
        out: torch.Tensor = self.out(self.norm(seen).mean(-2))
        return out


class Recurrent(nn.Module):
    """An LSTM of width 64 over the rows, in the caller's make."""

    def __init__(self, make: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cells, self.out = make(ROWS, 64, batch_first=True), nn.Linear(64, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.cells(values.unflatten(-1, (ROWS, ROWS)))[0][:, -1])
        return out


class Adapted(nn.Module):
    """LoRA: a linear layer that stays, held as no parameter, and a product of rank 8 that is trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(inputs, 8, bias=False), nn.Linear(8, outputs, bias=False)
        self.kept = [torch.randn(outputs, inputs) / inputs**0.5]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functional.linear(values, self.kept[0]) + self.up(self.down(values))
        return out


def adapted() -> nn.Module:
    """The smaller transformer with rank 8 in the place of every linear layer."""
    net = Transformer(104, 260)
    for parent in list(net.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and layer.out_features != CLASSES:
                setattr(parent, name, Adapted(layer.in_features, layer.out_features))
    return net


def with_group_norm() -> nn.Module:
    plain = list(convolutional())
    return nn.Sequential(*plain[:2], nn.GroupNorm(4, 16), *plain[2:5], nn.GroupNorm(4, 32), *plain[5:])


GRADIENTS: dict[str, Callable[[Callable[..., nn.Module]], nn.Module]] = {
    "softmax regression": lambda _: nn.Sequential(nn.Linear(PIXELS, CLASSES)),
    "MLP 784-64-10": lambda _: perceptron(),
    "CNN": lambda _: convolutional(),
    "CNN with GroupNorm": lambda _: with_group_norm(),
    "LSTM": Recurrent,
    "transformer, small": lambda _: Transformer(104, 260),
    "transformer": lambda _: Transformer(160, 480),
    "transformer, LoRA": lambda _: adapted(),
}
"""What clipped sums of per-record gradients are timed of, from an LSTM's class; sequences are 28 rows of 28."""

GPU_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "softmax": NETWORKS["softmax"],
    "cnn": NETWORKS["cnn"],
    "transformer": lambda: Transformer(160, 480),
}
"""What benchmarks/gpu.py trains."""
