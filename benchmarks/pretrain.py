"""Train the CNN on Fashion-MNIST without noise, for scenarios/lora-mnist.toml; write its weights by their digest.

    python -m benchmarks.pretrain [FOLDER]

FOLDER is $FEDPRIV_WEIGHTS or the user's cache folder if it is left out.  Fashion-MNIST is public here: no ε is
claimed of its records.  examples/lora holds what the command wrote on one machine; another rounds otherwise, and
gets another digest: fedpriv run lora-mnist --set 'model.weights="sha256:…"'.
"""

import hashlib
import io
import sys
from pathlib import Path

import torch
from torch import nn

from fedpriv.data.named import load
from fedpriv.loss.features import pixel_features
from fedpriv.loss.imported import weights_folder
from fedpriv.loss.models import convolutional_net

_EPOCHS, _BATCH, _STEP = 3, 200, 2e-3


def trained(epochs: int = _EPOCHS, records: int = 60_000) -> nn.Sequential:
    """The network after so many epochs of Adam, always the same on one machine."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data, network = load("fashion-mnist"), convolutional_net(10)
    features, labels = (
        pixel_features(data.train_images[:records], torch.float32),
        torch.from_numpy(data.train_labels[:records]),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=_STEP)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(features[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        outputs = network(pixel_features(data.test_images, torch.float32))
    accuracy = (outputs.argmax(1) == torch.from_numpy(data.test_labels)).float().mean()
    print(f"Fashion-MNIST: {100 * float(accuracy):.1f} % of the test records")
    return network


def write(network: nn.Module, folder: Path) -> str:
    """Write the state_dict to FOLDER/HEX.pt; its digest, as `model.weights` has it."""
    content = io.BytesIO()
    torch.save(network.state_dict(), content)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{digest}.pt").write_bytes(content.getvalue())
    return f"sha256:{digest}"


if __name__ == "__main__":
    print(write(trained(), Path(sys.argv[1]) if len(sys.argv) > 1 else weights_folder()))
