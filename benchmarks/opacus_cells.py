"""Cells of a scenario with Opacus in fedpriv's place: the same network, records, x_1, batch, clip and rounds.

    .venv-opacus/bin/python -m benchmarks.opacus_cells SCENARIO OUT.jsonl [KEY=VALUE …]
    .venv-opacus/bin/python -m benchmarks.opacus_cells TUNING OUT.jsonl
    python -m benchmarks.opacus_cells --beside RUN_DIR OUT.jsonl [KEY=VALUE …]

SCENARIO is a file with `dp-sgd`, Poisson sampling and a trusted server; a cell of several silos is one data
set here, as Opacus knows no silos.  The noise multiplier is Opacus' own for (ε, δ), by its PRV accountant.
TUNING is a file of scenarios/tuning: Opacus tries its grid on its held-out records.  OUT gets a line for
every cell; those that it has are not trained again.  With --beside nothing is trained: a table with 95 %
intervals of both, and of how far fedpriv's RUN_DIR is ahead; KEY=VALUE narrow it.  `make bench-peers` makes
the environment.
"""

import copy
import json
import sys
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.differences import interval
from fedpriv.core.errors import InputError
from fedpriv.loss.module import parameters_of
from fedpriv.rounds.task import Task, spread, task_of_cell
from fedpriv.scenario.load import load_scenario
from fedpriv.scenario.schema import Cell

Line = dict[str, Any]


def check(cell: Cell) -> None:
    """InputError for a cell that Opacus would train in another way."""
    algorithm, federation = cell.algorithm, cell.federation
    if algorithm.name != "dp-sgd" or algorithm.trust != "trusted" or federation.sampling != "poisson":
        raise InputError(
            "opacus_cells: Opacus has dp-sgd with federation.sampling = 'poisson', and trusts its server"
        )
    if cell.privacy.epsilon is None or cell.privacy.relation != "zero-out":
        raise InputError("opacus_cells: give privacy.epsilon, for relation = 'zero-out'")


def module_of(task: Task) -> nn.Module:
    """A copy of the network at x_1."""
    objective: Any = task.objective
    point = objective.initial()
    while not hasattr(objective, "loss"):  # behind views
        objective = objective.base
    module: nn.Module = copy.deepcopy(objective.module)
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, values in parameters_of(module, point).items():
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


def trained(cell: Cell) -> Line:
    """Accuracy on the cell's test records, and what it cost, by Opacus; it is imported here."""
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

    check(cell)
    torch.manual_seed(cell.seed)
    task, keys = task_of_cell(cell), cell.algorithm.settings
    held, batch, rounds = torch.cat(spread(cell)), sum(cell.batch_sizes), cell.federation.total_rounds
    records = TensorDataset(task.train.features[held], task.train.labels[held])
    assert cell.privacy.epsilon is not None  # checked
    multiplier = multiplier_of(cell.privacy.epsilon, cell.privacy.delta, batch / len(held), rounds)
    plain = ModuleValidator.fix(module_of(task).train())  # attention of its own, with the same weights
    started = time.process_time()
    engine = PrivacyEngine(accountant="prv")
    module, optimizer, loader = engine.make_private(
        module=plain,
        optimizer=torch.optim.SGD([each for each in plain.parameters() if each.requires_grad], lr=keys.step),
        data_loader=DataLoader(records, batch_size=batch),
        noise_multiplier=multiplier,
        max_grad_norm=keys.clip,
    )
    loss, done = nn.CrossEntropyLoss(), 0
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
        right = torch.cat([plain(part).argmax(1) for part in task.test.features.split(1000)]) == task.test.labels
    return {
        "test_accuracy": float(right.double().mean()),
        "noise_multiplier": multiplier,
        "epsilon": engine.get_epsilon(cell.privacy.delta),
        "processor_seconds": seconds,
    }


def asked(path: Path, overrides: Sequence[str]) -> Iterator[tuple[Line, Cell]]:
    """(point, cell) of a scenario; of a tuning file those of its grid, on one silo's held-out records."""
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    if "grid" not in tree:
        for each in load_scenario(path, overrides).points:
            yield {"point": dict(each.swept), "seed": each.cell.seed}, each.cell
        return
    fixed = {**tree["fixed"], "seeds": tree["seeds"]}
    for value, grid in tree["grid"].items():
        for key, settings in grid.items():
            for setting in settings:
                keys = {**fixed, tree["axis"]: value, key: setting}
                words = [f"{name}={json.dumps(each)}" for name, each in keys.items()]
                for each in load_scenario(path.parent / tree["scenario"], [*words, *overrides]).points:
                    yield {"point": {**each.swept, key: setting}, "seed": each.cell.seed}, each.cell


def run(path: Path, out: Path, overrides: Sequence[str]) -> None:
    there = read(out)
    for line, cell in asked(path, overrides):
        if any(each["point"] == line["point"] and each["seed"] == line["seed"] for each in there):
            continue
        line |= trained(cell)
        print(json.dumps(line), flush=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read(out: Path) -> list[Line]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def ahead(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Mean of `ours` less `theirs` and the half width of Welch's 95 % interval: seeds share no coins."""
    found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return float(np.mean(ours) - np.mean(theirs)), float(found.high - found.low) / 2


def table(cells: Sequence[Mapping[str, Any]], peers: Sequence[Line]) -> Iterator[str]:
    """A row for every point of fedpriv's: both accuracies in percent, and by how many points fedpriv is ahead."""
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for cell in cells:
        words = json.dumps(cell["point"], sort_keys=True)
        groups.setdefault(words, ([], []))[0].append(100.0 * cell["test_accuracy"])
    for line in peers:
        wanted = {key: value for key, value in line["point"].items() if key != "federation.silos"}
        for words, (_, theirs) in groups.items():
            if {key: each for key, each in json.loads(words).items() if key != "federation.silos"} == wanted:
                theirs.append(100.0 * line["test_accuracy"])
    yield "| point | fedpriv | Opacus | fedpriv ahead by |"
    yield "|---|---|---|---|"
    for words, (ours, theirs) in groups.items():
        where = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in json.loads(words).items())
        both = [f"{mean:.2f} ± {half:.2f} ({len(part)})" if part else "-" for part in (ours, theirs)
                for mean, half in [interval(part) if part else (0.0, 0.0)]]  # fmt: skip
        lead = "{:+.2f} ± {:.2f}".format(*ahead(ours, theirs)) if min(len(ours), len(theirs)) > 1 else "-"
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
        run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])


if __name__ == "__main__":
    main()
