"""flowerapp: a Flower / PyTorch app."""

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812 - as the template has it
from torch.utils.data import DataLoader, TensorDataset

from fedpriv.data.named import load  # small pictures that need no network; FederatedDataset in the template


class Net(nn.Module):
    """Model (simple CNN adapted from 'PyTorch: A 60 Minute Blitz')."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc(x.flatten(1))


def net(_features, _classes):
    """For guards, which call a model with the size of a record and the number of classes."""
    return Net()


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Load the training records of one partition, in the same order every time."""
    data = load("synthetic")
    images = torch.from_numpy(data.train_images[partition_id::num_partitions]).float().unsqueeze(1) / 255
    labels = torch.from_numpy(data.train_labels[partition_id::num_partitions])
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size)


def load_centralized_dataset():
    """Load public test records."""
    data = load("synthetic")
    images = torch.from_numpy(data.test_images).float().unsqueeze(1) / 255
    return DataLoader(TensorDataset(images, torch.from_numpy(data.test_labels)), batch_size=128)


def test(net, testloader):
    """Validate the model on the test set."""
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images)
            loss += F.cross_entropy(outputs, labels).item()
            correct += (outputs.argmax(1) == labels).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
