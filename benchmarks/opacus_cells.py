"""Cells of a scenario with Opacus in fedpriv's place: the same network, records, x_1, batch, clip and rounds.

    .venv-opacus/bin/python -m benchmarks.opacus_cells [--same-draws | --same-noise] SCENARIO OUT.jsonl [KEY=VALUE]
    .venv-opacus/bin/python -m benchmarks.opacus_cells TUNING OUT.jsonl
    python -m benchmarks.opacus_cells --beside RUN_DIR OUT.jsonl [KEY=VALUE …]

SCENARIO is a file with `dp-sgd`, Poisson sampling and a trusted server; a cell of several silos is one data
set here, as Opacus knows no silos.  The noise multiplier is Opacus' own for (ε, δ), by its PRV accountant.
TUNING is a file of scenarios/tuning: Opacus tries its grid on its held-out records.  OUT gets a line for
every cell; those that it has are not trained again.

By default Opacus draws its own batches and noise, by torch.  With --same-draws it gets fedpriv's: the records of
every round, and the standard normal vector of every round, which it scales by its own noise multiplier.  Both
libraries' runs keep their laws, and the difference of two runs of one seed loses what chance they share.  With
--same-noise it has fedpriv's multiplier, too, so that nothing is left but how each computes: under
run.dtype=float64 the two end at one loss, or they are different algorithms.

With --beside nothing is trained: a table with 95 % intervals of both, and of how far fedpriv's RUN_DIR is ahead;
KEY=VALUE narrow it.  `make bench-peers` makes the environment.
"""

import contextlib
import copy
import json
import sys
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.differences import interval
from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER, simulation_noise
from fedpriv.loss.module import unflatten_parameters
from fedpriv.loss.objective import Records
from fedpriv.plan.plan import make_plan
from fedpriv.plan.task import Task, load_task, partition_records
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell

Line = dict[str, Any]
Draws = Literal["own", "fedpriv", "fedpriv's with its multiplier"]
"""Whose batches and noise Opacus trains with."""


def check(cell: Cell) -> None:
    """InputError for a cell that Opacus would train in another way."""
    algorithm, federation = cell.algorithm, cell.federation
    if algorithm.name != "dp-sgd" or algorithm.trust != "trusted" or federation.sampling != "poisson":
        raise InputError(
            "opacus_cells: Opacus has dp-sgd with federation.sampling = 'poisson', and trusts its server"
        )
    if cell.privacy.epsilon is None or cell.privacy.relation != "zero-out":
        raise InputError("opacus_cells: give privacy.epsilon, for relation = 'zero-out'")


def module_of(task: Task, point: Tensor | None = None) -> nn.Module:
    """A copy of the network at `point`, by default x_1, in the point's type."""
    objective: Any = task.objective
    point = objective.initial() if point is None else point
    while not hasattr(objective, "loss"):  # behind views
        objective = objective.base
    module: nn.Module = copy.deepcopy(objective.module).to(point.dtype)
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, values in unflatten_parameters(module, point).items():
            own[name].copy_(values)
    return module


@lru_cache
def multiplier_of(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Opacus' noise for (epsilon, delta)."""
    from opacus.accountants.utils import get_noise_multiplier

    return float(
        get_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps, accountant="prv"
        )
    )


def trained_by(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.requires_grad]


def batches(cell: Cell, task: Task, t: int) -> Records:
    """The records of all silos that fedpriv draws for round t."""
    coins = simulation_noise(cell.noise_seed, np.float32).sampling_randomness()
    index = torch.cat([
        share[cell.schedule.select_rows(t, size, silo, lambda: coins)]
        for silo, (share, size) in enumerate(zip(partition_records(cell), cell.batch_sizes, strict=True))
    ])  # fmt: skip
    return Records(task.train.features[index], task.train.labels[index])


def normals(cell: Cell, task: Task, t: int) -> Tensor:
    """The server's standard normal vector of round t in fedpriv (d,), in the order of a point."""
    kind = np.float32 if cell.run.dtype == "float32" else np.float64
    return torch.from_numpy(simulation_noise(cell.noise_seed, kind).vector(task.objective.dimension, SERVER, t))


def noise_std(cell: Cell, task: Task) -> float:
    """Standard deviation of the server's noise on the mean gradient in fedpriv."""
    (source,) = make_plan(cell, task.objective).noise.sources
    return float(source.std) * source.weight


class FedprivDraws:
    """Batches as an Opacus loader gives them, and the noise of each in place of Opacus' generator."""

    def __init__(self, cell: Cell, task: Task) -> None:
        self._cell, self._task = cell, task
        self._left: Iterator[Tensor] = iter(())

    def __iter__(self) -> Iterator[Records]:
        from opacus.validators import ModuleValidator

        for t in range(1, self._cell.federation.total_rounds + 1):
            # a module whose parameters are the noise: what Opacus replaces has other matrices of the same numbers
            holder = ModuleValidator.fix(module_of(self._task, normals(self._cell, self._task, t)))
            self._left = (each.detach() for each in trained_by(holder))
            yield batches(self._cell, self._task, t)

    def noise(self, std: float, reference: Tensor, **_: object) -> Tensor:
        return std * next(self._left).view_as(reference)


def trained(cell: Cell, draws: Draws) -> Line:
    """Accuracy and loss on the cell's test records, and what they cost, by Opacus; it is imported here."""
    import opacus.optimizers.optimizer
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

    check(cell)
    task, keys = load_task(cell), cell.algorithm.settings
    held, batch, rounds = torch.cat(partition_records(cell)), sum(cell.batch_sizes), cell.federation.total_rounds
    records = TensorDataset(task.train.features[held], task.train.labels[held])
    assert cell.privacy.epsilon is not None  # checked
    if draws == "fedpriv's with its multiplier":
        multiplier = noise_std(cell, task) * batch / keys.clip
    else:
        multiplier = multiplier_of(cell.privacy.epsilon, cell.privacy.delta, batch / len(held), rounds)
    plain = ModuleValidator.fix(module_of(task).train())  # attention of its own, with the same weights
    torch.manual_seed(cell.seed)  # last of all: what builds a network may draw
    started = time.process_time()
    engine = PrivacyEngine(accountant="prv")
    module, optimizer, loader = engine.make_private(
        module=plain,
        optimizer=torch.optim.SGD(trained_by(plain), lr=keys.step),
        data_loader=DataLoader(records, batch_size=batch),
        noise_multiplier=multiplier,
        max_grad_norm=keys.clip,
    )
    loss, done, patches = nn.CrossEntropyLoss(), 0, contextlib.ExitStack()
    if draws != "own":
        loader = FedprivDraws(cell, task)
        patches.enter_context(mock.patch.object(opacus.optimizers.optimizer, "_generate_noise", loader.noise))
    with patches:
        while done < rounds:
            for features, labels in loader:
                optimizer.zero_grad()
                loss(module(features), labels).backward()
                optimizer.step()
                done += 1
                if done == rounds:
                    break
    seconds = time.process_time() - started
    with torch.no_grad():
        outputs = torch.cat([plain(part) for part in task.test.features.split(1000)])
    return {
        "draws": draws,
        "test_accuracy": float((outputs.argmax(1) == task.test.labels).double().mean()),
        "test_loss": float(loss(outputs, task.test.labels)),
        "noise_multiplier": multiplier,
        "epsilon": engine.get_epsilon(cell.privacy.delta),
        "processor_seconds": seconds,
    }


def asked(path: Path, overrides: Sequence[str]) -> Iterator[tuple[Line, Cell]]:
    """(point, cell) of a scenario; of a tuning file those of its grid, on one silo's held-out records."""
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    if "grid" not in tree:
        for each in load_scenario(path, overrides).points:
            yield {"point": dict(each.swept_values), "seed": each.cell.seed}, each.cell
        return
    fixed = {**tree["fixed"], "seeds": tree["seeds"]}
    for value, grid in tree["grid"].items():
        for key, settings in grid.items():
            for setting in settings:
                keys = {**fixed, tree["axis"]: value, key: setting}
                words = [f"{name}={json.dumps(each)}" for name, each in keys.items()]
                for each in load_scenario(path.parent / tree["scenario"], [*words, *overrides]).points:
                    yield {"point": {**each.swept_values, key: setting}, "seed": each.cell.seed}, each.cell


def run(path: Path, out: Path, overrides: Sequence[str], draws: Draws) -> None:
    """Train the cells that `out` has not, and add a line of each; InputError where its lines have other draws."""
    there = read(out)
    if other := {each.get("draws", "own") for each in there} - {draws}:
        raise InputError(
            f"opacus_cells: {out} has lines whose draws are {sorted(other)}, not {draws!r}: give another file"
        )
    for line, cell in asked(path, overrides):
        if any(each["point"] == line["point"] and each["seed"] == line["seed"] for each in there):
            continue
        line |= trained(cell, draws)
        print(json.dumps(line), flush=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read(out: Path) -> list[Line]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def ahead(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Mean of `ours` less `theirs` and the half width of Welch's 95 % interval: seeds share no coins."""
    found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return float(np.mean(ours) - np.mean(theirs)), float(found.high - found.low) / 2


def same_run(point: Mapping[str, Any], line: Line) -> bool:
    """Whether a line of Opacus' belongs beside `point`: one data set beside any silos, but for their draws."""
    keys = set() if line.get("draws", "own") != "own" else {"federation.silos"}
    mine, its = ({key: value for key, value in each.items() if key not in keys} for each in (point, line["point"]))
    return mine == its


def table(cells: Sequence[Mapping[str, Any]], peers: Sequence[Line]) -> Iterator[str]:
    """A row for every point of fedpriv's: both accuracies in percent, and by how many points fedpriv is ahead.

    Where Opacus had fedpriv's draws the lead is that of seeds in pairs, by Student's interval.
    """
    groups: dict[str, dict[int, float]] = {}
    for cell in cells:
        words = json.dumps(cell["point"], sort_keys=True)
        groups.setdefault(words, {})[cell["seed"]] = 100.0 * cell["test_accuracy"]
    yield "| point | fedpriv | Opacus | fedpriv ahead by |"
    yield "|---|---|---|---|"
    for words, ours in groups.items():
        point = json.loads(words)
        lines = [line for line in peers if same_run(point, line)]
        theirs = {line["seed"]: 100.0 * line["test_accuracy"] for line in lines}
        paired = any(line.get("draws", "own") != "own" for line in lines)
        both = [f"{mean:.2f} ± {half:.2f} ({len(part)})" if part else "-" for part in (ours, theirs)
                for mean, half in [interval(list(part.values())) if part else (0.0, 0.0)]]  # fmt: skip
        lead = "-"
        if paired and len(common := sorted(ours.keys() & theirs.keys())) > 1:
            lead = "{:+.2f} ± {:.2f}".format(*interval([ours[seed] - theirs[seed] for seed in common]))
        elif not paired and min(len(ours), len(theirs)) > 1:
            lead = "{:+.2f} ± {:.2f}".format(*ahead(list(ours.values()), list(theirs.values())))
        where = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in point.items())
        yield f"| {where} | {both[0]} | {both[1]} | {lead} |"


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if sys.argv[1] == "--beside":
        cells = json.loads((Path(sys.argv[2]) / "results.json").read_text(encoding="utf-8"))["cells"]
        wanted = dict(word.split("=", 1) for word in sys.argv[4:])
        chosen = [
            cell for cell in cells if all(str(cell["point"].get(key)) == value for key, value in wanted.items())
        ]
        print(*table(chosen, read(Path(sys.argv[3]))), sep="\n")
    else:
        given: dict[str, Draws] = {"--same-draws": "fedpriv", "--same-noise": "fedpriv's with its multiplier"}
        draws = given.get(sys.argv[1], "own")
        words = sys.argv[1 if draws == "own" else 2 :]
        run(Path(words[0]), Path(words[1]), words[2:], draws)


if __name__ == "__main__":
    main()
