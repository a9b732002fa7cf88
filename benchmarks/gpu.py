"""Rounds per second on a GPU beside the processor of the same machine, for two convolutional networks.

The cells of `networks`, in turns; a machine without a GPU says so in one line.  `python -m benchmarks.gpu cpu`
goes through the same on the processor alone, to try it.
"""

import statistics
import sys

import torch

from benchmarks import networks
from benchmarks.clock import timed

_TURNS = 3


def run(device: str = "cuda") -> None:
    if device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: nothing was measured")
        return
    networks.register()
    name = torch.cuda.get_device_name(0) if device == "cuda" else "the processor"
    print(f"{name}; rounds per second, median (range) of {_TURNS} turns, float32\n")
    print("| network | processor | GPU | x |\n|---|---|---|---|")
    for network in networks.ROUNDS:
        rates: list[tuple[str, list[float]]] = [("cpu", []), (device, [])]
        for _ in range(_TURNS):
            for where, several in rates:
                several.append(timed("vectorized", networks.cell(network, where)).rounds_per_second)
        shown = [f"{statistics.median(each):,.1f} ({min(each):,.1f} - {max(each):,.1f})" for _, each in rates]
        processor, gpu = (statistics.median(each) for _, each in rates)
        print(f"| {network} | {' | '.join(shown)} | {gpu / processor:.3g} |", flush=True)


if __name__ == "__main__":
    run(*sys.argv[1:])
