"""flowerapp: a Flower / PyTorch app."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedpriv.flower import DPMu2FL
from flowerapp.task import Net, load_centralized_dataset, test

# Create ServerApp
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Main entry point for the ServerApp."""
    config = context.run_config

    # Initialize the private strategy
    strategy = DPMu2FL(
        trust=config["trust"],
        silos=config["silos"],
        rounds=config["num-server-rounds"],
        batch=config["batch-size"],
        relation="zero-out",
        epsilon=config["epsilon"],
        delta=config["delta"],
        clip=1.0,
        diameter=30.0,
        step=config["learning-rate"],
        output="next",
        model={"name": "flowerapp.task:net", "shape": [1, 28, 28]},
    )

    # Start strategy, run it for all rounds
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        evaluate_fn=global_evaluate,
    )

    # Save final model to disk
    print(f"The guarantee: {strategy.claim}")
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate model on central data."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(model, load_centralized_dataset())
    return MetricRecord({"accuracy": accuracy, "loss": loss})
