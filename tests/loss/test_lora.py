"""LoRA: A and B alone are trained; the weight is a constant that no query and no release has."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedpriv
from fedpriv.loss.layered import make_module_objective
from fedpriv.loss.losses import CrossEntropy
from fedpriv.loss.module import draw_initial_point, unflatten_parameters
from tests.api.test_own import TREE, network, records
from tests.loss.bring import LONG, OUTPUTS, SEQUENCE, WIDE, Then, with_lora


def test_it_begins_as_the_module_and_trains_two_matrices_a_layer(tmp_path: Path) -> None:
    train, test = records()
    base = network()
    model = fedpriv.lora(base, rank=2, alpha=4.0)
    shown = torch.from_numpy(test[0])
    assert torch.equal(model(shown), base(shown))
    (cell,) = fedpriv.run(TREE, train=train, test=test, model=model, out=tmp_path / "run")
    assert cell.model().shape == (2 * (8 + 12) + 2 * (12 + 2),)
    module, state = cell.to_module(), cell.state_dict()
    assert cell.test_accuracy > 0.7
    assert all(torch.equal(values, state[name]) for name, values in base.state_dict().items())
    assert bool(state["0.lora_b"].any())
    plain = fedpriv.merged(module)
    assert [type(layer) for layer in plain.modules()] == [type(layer) for layer in base.modules()]
    assert list(plain.state_dict()) == list(base.state_dict())
    assert torch.allclose(plain(shown), module(shown), atol=1e-5)
    whole = state["0.weight"] + 2.0 * state["0.lora_b"] @ state["0.lora_a"]
    assert torch.allclose(plain.state_dict()["0.weight"], whole)


def test_x1_of_a_seed_has_zeros_for_b() -> None:
    """A B that is drawn would be another network than the one that was given."""
    model = fedpriv.lora(network(), rank=2)
    parts = unflatten_parameters(model, draw_initial_point(model, 3, torch.float64))
    assert list(parts) == ["0.lora_a", "0.lora_b", "2.lora_a", "2.lora_b"]
    assert not parts["0.lora_b"].any()
    assert 0.0 < float(parts["0.lora_a"].abs().max()) <= 8**-0.5


def test_layers_are_chosen_by_name() -> None:
    model = Then(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 8)), 8)
    some = fedpriv.lora(model, layers=("layer",), train=("head", "layer.0.bias"))
    trained = [name for name, values in some.named_parameters() if values.requires_grad]
    assert trained == [
        "layer.0.bias", "layer.0.lora_a", "layer.0.lora_b", "layer.2.lora_a", "layer.2.lora_b", "head.weight",
        "head.bias",
    ]  # fmt: skip
    assert len(list(fedpriv.lora(nn.Linear(3, 3)).parameters())) == 4


def test_no_fast_path_of_torchs_leaves_it_out() -> None:
    """An encoder's takes the weight of a layer: what was trained would be in no output, and without a gradient."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDE, 2, 8, dropout=0.0, batch_first=True), 2)
    model = with_lora(Then(encoder, LONG * WIDE)).eval()
    values = torch.randn(3, *SEQUENCE)
    with torch.no_grad():
        fast = model(values)
    assert torch.allclose(fast, model.train()(values), atol=1e-6)
    assert torch.allclose(fast, fedpriv.merged(model)(values), atol=1e-5)
    objective = make_module_objective(model, 0, CrossEntropy(), 0, torch.float32)
    assert np.isfinite(objective.initial().numpy()).all()
    assert fast.shape == (3, OUTPUTS)
