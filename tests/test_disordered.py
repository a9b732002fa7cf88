"""The test double `disordered` is right up to rounding, repeatable, and depends on place, size and address."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tests.disordered import at_address, disordered

MODELS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "linear": (lambda: [nn.Linear(61, 7)], (61,)),
    "convolutions": (
        lambda: [nn.Conv2d(4, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2, dilation=2)],
        (4, 17, 17),
    ),
    "one dimension": (lambda: [nn.Conv1d(4, 6, 3)], (4, 17)),
    "norms": (lambda: [nn.Linear(33, 12), nn.LayerNorm(12), nn.GroupNorm(3, 12), nn.Linear(12, 7)], (33,)),
    "attention": (lambda: [nn.TransformerEncoderLayer(24, 2, 16, 0.0)], (5, 24)),
}


def gradients(module: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    """Of every record, (B, d), by vmap of grad."""
    parameters = {name: value.detach() for name, value in module.named_parameters()}

    def loss(given: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(module, given, (x[None],)), y[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, features, labels)
    return torch.cat([each.flatten(1) for each in found.values()], 1)


def batch_gradient(module: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    """Of the mean, (d,), by autograd."""
    module.zero_grad()
    nn.functional.cross_entropy(module(features), labels).backward()
    return torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("of", [gradients, batch_gradient])
def test_disordered_gradients_of_models_are_correct_and_repeatable(name: str, of: Callable[..., Tensor]) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(1)
    module, features = nn.Sequential(*make(), nn.Flatten()).double(), torch.randn(8, *shape).double()
    labels = torch.arange(8) % 7
    plain = of(module, features, labels)
    with disordered():
        found, again = of(module, features, labels), of(module, features, labels)
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-12)
    assert torch.equal(found, again)
    assert not torch.equal(found, plain)


PRODUCTS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, weights: x @ weights,
    lambda x, weights: (weights.mT @ x.mT).mT,
    lambda x, weights: x @ weights[:, 0],
    lambda x, weights: nn.functional.linear(x, weights.mT, weights[0]),
    lambda x, weights: x.logsumexp(-1),
    lambda x, weights: x.softmax(-1),
    lambda x, weights: x.sum(-1),
    lambda x, weights: x.mean(-1),
    lambda x, weights: torch.linalg.vector_norm(x, dim=-1),
]


@pytest.mark.every(4)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("inference", [True, False])
def test_disordered_rounding_depends_on_place_size_and_address(
    product: Callable[[Tensor, Tensor], Tensor], inference: bool
) -> None:
    """One row many times: the same numbers, other bits; of eight rows, since not every sum rounds differently."""
    generator = torch.Generator().manual_seed(2)
    rows = 3.0 * torch.randn(8, 785, generator=generator, dtype=torch.float64)
    rows -= rows.amax(1, keepdim=True)  # a logarithm near 0 shows how its sum was rounded
    weights = torch.randn(785, 10, generator=generator, dtype=torch.float64)
    seen = []
    for row in rows:
        with disordered(), torch.inference_mode(inference):
            places = [*product(row.repeat(8, 1), weights)]
            sizes = [product(row.repeat(size, 1), weights)[0] for size in range(1, 20)]
            addresses = [product(at_address(row.repeat(8, 1), offset), weights)[0] for offset in range(8)]
        seen.append([len({each.numpy().tobytes() for each in found}) for found in (places, sizes, addresses)])
        found = torch.stack([*places, *sizes, *addresses])
        torch.testing.assert_close(found, product(row[None], weights).expand_as(found), rtol=1e-11, atol=1e-11)
    assert all(max(kinds) > 1 for kinds in zip(*seen, strict=True))


def test_disordered_numpy_functions_are_correct_up_to_rounding_and_repeatable() -> None:
    generator = np.random.default_rng(3)
    a, b = generator.random((7, 300)), generator.random((300, 5))
    calls: tuple[Callable[[], np.ndarray], ...] = (
        lambda: np.einsum("bd,bd->b", a, a),
        lambda: np.matmul(a, b),
        lambda: np.dot(a, b),
        lambda: np.sum(a, axis=0),
        lambda: np.sum(a, axis=1),
    )
    for call in calls:
        plain = call()
        with disordered():
            found, again = call(), call()
        np.testing.assert_allclose(found, plain, rtol=1e-13)
        assert np.array_equal(found, again)
    with disordered():
        same = [np.einsum("bd,bd->b", *[np.repeat(row[None], 8, 0)] * 2) for row in a]
        assert max(len({*found.tolist()}) for found in same) > 1
        whole = np.floor(a * 1000.0)
        assert np.array_equal(np.matmul(whole, np.floor(b * 1000.0)), whole @ np.floor(b * 1000.0))
