"""Rounds per second on a GPU, in float32 and with passes in bfloat16, beside Opacus and pfl on the same card.

Rounds of DP-SGD of 100 silos with one record each, and with 64: gradients clipped one by one, noise of a trusted
server, which the GPU draws by itself, a step.  Softmax regression, the convolutional network and the transformer
of client_models.py.  Opacus has the same records as one batch, pfl as 100 users with one local step; each peer
runs in one process, ours in this one, one after another, with turns that tell how much a rate moves.  The share of
the peak is the arithmetic that one pass forward and back cannot leave out, times records a second, over what a
product of two 8,192 x 8,192 matrices reached in the same type in the same minute.

A machine without a GPU says so in one line.  `python -m benchmarks.gpu cpu` goes through the same, small, on the
processor, to try it.  Peers are taken from their environments (`make bench-peers`), or from this one.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import fedpriv
from benchmarks.client_models import CLASSES, GPU_NETWORKS, PIXELS
from benchmarks.clock import Clock
from benchmarks.peers import python_of
from fedpriv.core.random import simulation_noise
from fedpriv.engines.table import make_engine
from fedpriv.engines.vectorized.noise import DeviceSums, NoiseSum
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import parse_scenario
from fedpriv.scenario.schema import Cell

_SILOS, _TURNS = 100, 3
_HELD = 64_000
_FEW, _MOST = 12, 2_560
"""Rounds: of a first look, which warms up too, and of a turn at most."""
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PEERS = {"hooks": "opacus", "ghost": "opacus", "pfl": "pfl"}
_TITLES = {"hooks": "Opacus, hooks", "ghost": "Opacus, ghost norms", "pfl": "pfl"}


class Machine(NamedTuple):
    """Where it is measured, and how much."""

    device: str
    sizes: Sequence[int]
    """Records of a round."""
    seconds: float
    """Of a turn, about."""
    replicates: int
    matrix: int
    """Rows of the product that stands for the peak."""
    normals: int


MACHINES = {
    "cuda": Machine("cuda", (100, 6_400), 1.0, 20, 8_192, 2**26),
    "cpu": Machine("cpu", (100,), 0.2, 2, 512, 2**16),
}


class _DeviceClock(Clock):
    """A clock that waits for the device before it looks."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def advanced(self, rounds: int) -> None:
        _waited(self._device)
        super().advanced(rounds)


def _waited(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def cells(network: str, records: int, kind: str, device: str, rounds: int, replicates: int = 1) -> list[Cell]:
    """`replicates` seeds of at least so many rounds, in whole passes over the records."""
    places = min(_HELD // records, rounds)
    epochs = math.ceil(rounds / places)
    tree: dict[str, Any] = {
        "name": "gpu",
        "data": {"name": f"gpu-{records}"},
        "model": {"name": f"gpu-{network}"},
        "federation": {
            "silos": _SILOS, "rounds": places * epochs, "epochs": epochs, "batch": records // _SILOS,
        },
        "algorithm": {"name": "dp-sgd", "trust": "trusted", "clip": 1.0, "step": 0.1},
        "privacy": {"relation": "zero-out", "mu": 4.0},
        "run": {"evaluations": 1, "device": device, **({} if kind == "float32" else {"passes": kind})},
    }  # fmt: skip
    trees = [{**tree, "seed": seed} for seed in range(replicates)]
    return [parse_scenario(each, "benchmarks/gpu.py").points[0].cell for each in trees]


def register(sizes: Sequence[int]) -> None:
    def pictures() -> Any:
        """Noise, which costs what pictures cost; few test records, since evaluations are not what is compared."""
        draw = np.random.default_rng(0)
        features = draw.random((_HELD, PIXELS), np.float32)
        labels = draw.integers(0, CLASSES, _HELD)
        return (features, labels), (features[:100], labels[:100])

    for size in sizes:
        fedpriv.add_data(f"gpu-{size}", pictures, classes=CLASSES)
    for network in GPU_NETWORKS:
        fedpriv.add_model(f"gpu-{network}", lambda _shape, _classes, name=network: GPU_NETWORKS[name]())


def rate(several: Sequence[Cell], device: str) -> float:
    """Rounds per second of all cells together."""
    load_task(several[0])
    clock = _DeviceClock(device)
    for _ in make_engine("vectorized")(several, clock):
        pass
    return clock.rounds_per_second


def peak(kind: torch.dtype, device: str, rows: int) -> float:
    """Operations per second of a product of two square matrices of random numbers."""
    left, right = (torch.randn(rows, rows, device=device).to(kind) for _ in range(2))
    for _ in range(3):
        left @ right
    started = _waited(device)
    for _ in range(10):
        left @ right
    return 10 * 2 * rows**3 / (_waited(device) - started)


def operations(network: str) -> int:
    """Of one record's pass forward and back, to the gradient of every parameter and of nothing else."""
    module = GPU_NETWORKS[network]()
    with FlopCounterMode(display=False) as counter:
        module(torch.rand(1, PIXELS)).sum().backward()
    return int(counter.get_total_flops())


def normals_per_second(device: str, count: int, owners: int) -> float:
    """Of vectors of 2^17 numbers, of so many owners, summed: as a round of that many silos asks for them."""
    size = 2**17 if count > 2**17 else 2**10
    rounds = max(1, count // (size * owners))
    stream = NoiseSum(0, tuple(range(owners)), (1.0,) * owners)
    sums = DeviceSums(stream, size, torch.float32, torch.device(device))
    sums([1], 0)
    started = _waited(device)
    sums(range(2, 2 + rounds), 0)
    return rounds * size * owners / (_waited(device) - started)


def host_normals_per_second(count: int) -> float:
    source, size = simulation_noise(0, np.float32), min(2**17, count)
    source.vector(size, 0, 1)
    started = time.perf_counter()
    for t in range(2, 2 + count // size):
        source.vector(size, 0, t)
    return count // size * size / (time.perf_counter() - started)


def told_by(peer: str, machine: Machine, turns: int) -> dict[str, list[float] | str]:
    """Everything that a peer is asked; empty where it is not installed."""
    python = python_of(_PEERS[peer])
    if not python.exists():
        if find_spec(_PEERS[peer]) is None:
            return {}
        python = Path(sys.executable)
    asked = [f"{network}:{size}:{kind}" for network in GPU_NETWORKS for size in machine.sizes for kind in _TYPES]
    words = [peer, machine.device, str(turns), str(machine.seconds), *asked]
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("gpu_peers.py")), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(f"{peer} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        return {}
    told: dict[str, list[float] | str] = json.loads(done.stdout.splitlines()[-1])
    return told


def run(where: str = "cuda", turns: str = str(_TURNS)) -> None:
    machine = MACHINES[where]
    if where == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: nothing was measured")
        return
    started = time.perf_counter()
    name = torch.cuda.get_device_name(0) if where == "cuda" else "the processor"
    print(f"{name}, torch {torch.__version__}, {os.cpu_count()} cores\n")
    peaks = {kind: peak(kind_of, where, machine.matrix) for kind, kind_of in _TYPES.items()}
    print("| | |\n|---|---|")
    for kind, most in peaks.items():
        print(f"| product of matrices, {kind}, TFLOP/s | {most / 1e12:,.3g} |")
    for owners in (1, _SILOS):
        print(
            f"| normals of {owners} owners on the device, 10^6/s | "
            f"{normals_per_second(where, machine.normals, owners) / 1e6:,.3g} |"
        )
    print(f"| normals on one core of the processor, 10^6/s | {host_normals_per_second(2**22) / 1e6:,.3g} |\n")
    register(machine.sizes)
    ours = _ours(machine, int(turns))
    print(f"ours: {time.perf_counter() - started:.0f} s so far", file=sys.stderr, flush=True)
    peers = {}
    for peer in _PEERS:
        peers[peer] = told_by(peer, machine, int(turns))
        print(f"{peer}: {peers[peer]}\n{time.perf_counter() - started:.0f} s so far", file=sys.stderr, flush=True)
    _tables(machine, ours, peers, peaks)
    print(f"\n{turns} turns, {time.perf_counter() - started:.0f} s in all")


def _ours(machine: Machine, turns: int) -> dict[str, list[float] | str]:
    """By NETWORK:RECORDS:TYPE, and with :seeds behind it for several seeds at once of one record a silo."""
    found: dict[str, list[float] | str] = {}
    for network in GPU_NETWORKS:
        for size in machine.sizes:
            for kind in _TYPES:
                asked = partial(cells, network, size, kind, machine.device)
                found[f"{network}:{size}:{kind}"] = _rates(asked, machine, turns)
        asked = partial(cells, network, machine.sizes[0], "float32", machine.device, replicates=machine.replicates)
        found[f"{network}:{machine.sizes[0]}:float32:seeds"] = _rates(asked, machine, turns)
    return found


def _rates(asked: Callable[[int], list[Cell]], machine: Machine, turns: int) -> list[float] | str:
    """Of every turn; what went wrong in place of rates, so that one row does not cost the others."""
    try:
        few = asked(_FEW)
        first = rate(few, machine.device) / len(few)
        several = asked(max(_FEW, min(_MOST, int(first * machine.seconds))))
        found = [rate(several, machine.device) for _ in range(turns)]
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    cell = several[0]
    print(
        f"{cell.model.name} {cell.data.name} {cell.run.passes} x {len(several)}: {found}",
        file=sys.stderr,
        flush=True,
    )
    return found


def _tables(
    machine: Machine,
    ours: Mapping[str, list[float] | str],
    peers: Mapping[str, Mapping[str, list[float] | str]],
    peaks: Mapping[str, float],
) -> None:
    titles = [_TITLES[peer] for peer in peers]
    print(f"| network, records a round | passes | fedpriv | of the peak | {' | x | '.join(titles)} | x |")
    print("|---|---|---|---|" + "---|---|" * len(titles))
    for network in GPU_NETWORKS:
        count = sum(part.numel() for part in GPU_NETWORKS[network]().parameters())
        for size in machine.sizes:
            for kind in _TYPES:
                key, own = f"{network}:{size}:{kind}", ours[f"{network}:{size}:{kind}"]
                entries = [f"{network}, {count:,} parameters, {size:,}", kind, _entry(own)]
                entries.append(
                    "-"
                    if isinstance(own, str)
                    else f"{operations(network) * size * statistics.median(own) / peaks[kind]:.2%}"
                )
                for told in peers.values():
                    entries += [_entry(told.get(key)), _ratio(own, told.get(key))]
                print(f"| {' | '.join(entries)} |")
    print(f"\nRounds of {machine.replicates} seeds at once, all together:\n")
    print("| network, records a round | rounds per second | x one seed |\n|---|---|---|")
    for network in GPU_NETWORKS:
        first = machine.sizes[0]
        several = ours[f"{network}:{first}:float32:seeds"]
        print(
            f"| {network}, {first:,} | {_entry(several)} | {_ratio(several, ours[f'{network}:{first}:float32'])} |"
        )


def _entry(told: list[float] | str | None) -> str:
    if told is None:
        return "-"
    if isinstance(told, str):
        return told
    digits = 0 if statistics.median(told) >= 100 else 1
    return f"{statistics.median(told):,.{digits}f} ({min(told):,.{digits}f} - {max(told):,.{digits}f})"


def _ratio(ours: list[float] | str, theirs: list[float] | str | None) -> str:
    if theirs is None or isinstance(theirs, str) or isinstance(ours, str):
        return "-"
    return f"{statistics.median(ours) / statistics.median(theirs):.3g}"


if __name__ == "__main__":
    run(*sys.argv[1:])
