"""Networks of the shipped scenarios: what of them is trained, and that they train."""

from pathlib import Path

import pytest
import torch

import fedpriv
from benchmarks import pretrain
from fedpriv.loss.models import convolutional_net
from fedpriv.loss.presets import Transformer, adapted
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import load_scenario

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("train", "size"), [("all", 26_010), ("head", 330), ("lora", 8 * (512 + 32) + 330)])
def test_what_is_trained_of_the_network_that_is_adapted(train: str, size: int) -> None:
    module = adapted(784, 10, train)  # type: ignore[arg-type]
    assert sum(each.numel() for each in module.parameters() if each.requires_grad) == size
    assert set(convolutional_net(10).state_dict()) <= set(module.state_dict())


def test_the_transformer_sees_the_order_of_words() -> None:
    torch.manual_seed(0)
    module, tokens = Transformer(6, 3, words=9, width=8, heads=2), torch.tensor([[1, 2, 3, 4, 5, 6]])
    assert not torch.allclose(module(tokens), module(tokens.flip(1)))


@pytest.mark.slow
def test_a_run_of_sentences_learns_more_than_which_words_there_are(tmp_path: Path) -> None:
    """79 % is what a bag of words gives."""
    one = {"seeds": [0], "federation.silos": [1], "privacy.epsilon": [8.0]}
    results = fedpriv.run("sentences", set=one, out=tmp_path / "run")
    assert results[0].model().shape == (10_724,)
    assert (results[0].test_accuracy or 0.0) > 0.93


def test_the_weights_that_are_shipped_are_those_that_the_scenario_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRIV_WEIGHTS", str(ROOT / "examples" / "lora"))
    few = ["seeds=1", "privacy.epsilon=3.0", 'label.method="LoRA, rank 8"', "data.name=synthetic"]
    (point,) = load_scenario(ROOT / "scenarios" / "lora-mnist.toml", few).points
    task = load_task(point.cell)
    assert task.objective.dimension == 8 * (512 + 32) + 330
    named = point.cell.model.settings.model_dump()["weights"]
    kept = torch.load(ROOT / "examples" / "lora" / f"{named.removeprefix('sha256:')}.pt", weights_only=True)
    assert torch.equal(task.objective.initial()[-10:], kept["10.bias"])


def test_pretraining_is_written_by_its_digest(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = convolutional_net(10)
    one, two = (pretrain.write(network, tmp_path / name) for name in "ab")
    assert one == two
    assert [path.stem for path in (tmp_path / "a").iterdir()] == [one.removeprefix("sha256:")]
