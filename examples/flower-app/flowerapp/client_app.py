"""flowerapp: a Flower / PyTorch app."""

import torch.nn as nn
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedpriv.flower import PrivateClient
from flowerapp.task import Net, load_data

# Flower ClientApp
app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model on local data."""

    def records():
        partition_id = context.node_config["partition-id"]
        num_partitions = context.node_config["num-partitions"]
        return load_data(partition_id, num_partitions, context.run_config["batch-size"])

    private = PrivateClient(context, Net(), nn.CrossEntropyLoss())
    return private.train(msg, records)
