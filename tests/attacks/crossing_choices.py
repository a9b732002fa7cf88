"""Combinations of the examples: scenarios, plans, grids, and a fast list with every part in it."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fedpriv.loss.models import find_model
from fedpriv.loss.objective import Records
from fedpriv.noise.trust import TRUSTS, USER
from fedpriv.papers.base import NoiseSettings
from fedpriv.papers.table import ALGORITHMS
from fedpriv.participation.registry import SELECTABLE_PARTICIPATIONS
from fedpriv.plan.evaluation import first_step_cell, held_out_records_by_silo, make_evaluation_plan
from fedpriv.plan.plan import draw_absences, make_plan
from fedpriv.plan.task import load_task, partition_records
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from tests.attacks import crossing_examples as examples
from tests.attacks.crossings import Crossing


class Choice(NamedTuple):
    """One combination of registered parts, by name."""

    model: str = "softmax-regression"
    key: str = ""
    algorithm: str = "dp-sgd"
    variant: str = ""
    mechanism: str = ""
    participation: str = "fixed"
    unit: str = "record"
    trust: str = "untrusted"
    relation: str = "replace-one"
    extra: str = ""
    """A key of `examples.RUNS`, or of `examples.ABSENCES`."""
    beside: str = ""
    """A key of `examples.BESIDE`, for releases beside the training."""

    def __str__(self) -> str:
        return ", ".join(part for part in self if part)


Files = dict[str, Any]


def tree_of(choice: Choice, files: Files, seed: int = 1) -> dict[str, Any]:
    """Make the scenario of a combination: 8 rounds of two silos with 12 units, or of a pool of 12 clients."""
    example, unit = examples.MODELS[choice.model], examples.UNITS[choice.unit]
    row, is_public = examples.ALGORITHMS[choice.algorithm], choice.participation == "fixed"
    keys = {**example.keys, **(examples.KEYS[choice.key] if choice.key else {})}
    keys = {
        key: files["digests"].get(value, value) if isinstance(value, str) else value for key, value in keys.items()
    }
    uses_table = choice.unit.startswith(USER.name) or choice.beside in examples.OF_A_TABLE
    if uses_table and "feature_norm" in keys_of(choice.model):
        keys = {**examples.NORM, **keys}
    silos = unit.get("federation", {"silos": 2, "batch": examples.BATCH})
    epochs = {} if "clients" in silos else {"epochs": row.epochs if is_public else 2}
    needs_groups = (
        choice.mechanism in ("banded", "lambda-cgd", "blt")
        and SELECTABLE_PARTICIPATIONS[choice.participation].secret
    )
    noise = {"mechanism": choice.mechanism, **examples.MECHANISMS[choice.mechanism]} if choice.mechanism else {}
    tree: dict[str, Any] = {
        "name": "crossing",
        "seed": seed,
        "data": files["visits" if uses_table else example.data],
        "model": {"name": example.name or choice.model, **keys},
        "federation": {
            "rounds": examples.ROUNDS, **epochs, **silos, "sampling": choice.participation,
            **examples.PARTICIPATIONS[choice.participation], **({"groups": 2} if needs_groups else {}),
            **examples.ABSENCES.get(choice.extra, {}), **example.federation,
        },
        "algorithm": {
            "name": choice.algorithm, "trust": choice.trust, **row.keys, **noise, **example.algorithm,
            **(examples.VARIANTS[choice.variant][1] if choice.variant else {}),
        },
        "privacy": {"relation": choice.relation, "mu": 2.0, **unit.get("privacy", {})},
        "run": {"dtype": "float64", "evaluations": 2, **examples.RUNS.get(choice.extra, {})},
    }  # fmt: skip
    for section, changes in examples.BESIDE.get(choice.beside, {}).items():
        tree[section] = {**tree.get(section, {}), **changes}
    return tree


def cell_of(choice: Choice, files: Files, seed: int = 1) -> Cell:
    """Resolve the cell whose rounds are checked, the first step if there is one.

    InputError if the combination is refused.
    """
    cell = resolve_cell(tree_of(choice, files, seed), "test")
    return first_step_cell(cell) or cell


def plan_crossing(choice: Choice, files: Files, released: bool) -> Crossing:
    """Plan a combination for silo 0 and its records.  InputError if the combination is refused."""
    cell = cell_of(choice, files)
    task = load_task(cell)
    shares = partition_records(cell)
    plan = make_plan(cell, task.objective, for_release=released)
    records = Records(*(column[shares[0]] for column in task.train))
    if (evaluation := make_evaluation_plan(cell, task.objective, for_release=released)) is not None:
        plan, records = evaluation.plan, held_out_records_by_silo(cell)[0]
    order = None
    if cell.privacy.protected_unit.name == USER.name:
        order = torch.randperm(len(records.labels), generator=torch.Generator().manual_seed(1))
    missed_rounds = frozenset(draw_absences(cell).rounds.get(0, ()))
    return Crossing(plan, records, order, missed_rounds, victim=-(len(str(choice)) % 2))


def keys_of(model: str) -> list[str]:
    """List the keys of a model's settings."""
    example = examples.MODELS[model]
    return list(find_model(example.name or model).settings.model_fields)


def in_turn(*axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Draw values of all axes without end, the same ones in each call.

    They are random, so that no axis of a grid runs in step with them.
    """
    draw = np.random.default_rng(len(axes))
    while True:
        yield tuple(axis[draw.integers(len(axis))] for axis in axes)


def fitting(unit: str, participation: str, trust: str = "untrusted") -> tuple[str, str]:
    """Return the unit and trust setting closest to the arguments that a participation admits."""
    if SELECTABLE_PARTICIPATIONS[participation].client_initiated:
        return "client of a pool", "trusted"
    secret_clients = SELECTABLE_PARTICIPATIONS[participation].secret and unit.startswith("client")
    return unit, "trusted" if secret_clients or unit == "client of a pool" else trust


def models_and_keys() -> list[Choice]:
    """Cross models, each key of their settings and participations, with drawn values of the other axes."""
    rest = in_turn(
        list(examples.TRUSTS[:3]),
        list(examples.RELATIONS),
        ["dp-sgd", "dp-adam", "dp-ftrl"],
        ["", "dtype", "", "passes", "arithmetic"],
    )
    choices = []
    for model in examples.MODELS:
        for key, participation in itertools.product(["", *keys_of(model)], SELECTABLE_PARTICIPATIONS):
            trust, relation, algorithm, extra = next(rest)
            if SELECTABLE_PARTICIPATIONS[participation].secret and algorithm == "dp-ftrl":
                algorithm = "noisy-minibatch"
            unit, trust = fitting("record", participation, trust)
            choices.append(Choice(model, key, algorithm, "", "", participation, unit, trust, relation, extra))
    return choices


CHEAP = ("logistic-regression", "softmax-regression", "mlp", "a module")


def algorithms_and_units() -> list[Choice]:
    """Cross algorithms and variants, participations, units and trust, with drawn values of the other axes."""
    rows = [(name, "") for name in ALGORITHMS] + [(row, name) for name, (row, _) in examples.VARIANTS.items()]
    rest = in_turn(CHEAP, examples.RELATIONS, ["", "", "away", "", "drop-outs"], ["", "augment", ""])
    choices = []
    for (name, variant), participation, unit, trust in itertools.product(
        rows, SELECTABLE_PARTICIPATIONS, examples.UNITS, TRUSTS
    ):
        model, relation, extra, key = next(rest)
        model = "logistic-regression" if name == "noisy-newton" else model
        if extra and (trust not in ("untrusted", "trusted") or "pool" in unit):
            extra = ""
        key = key if key in keys_of(model) else ""
        choices.append(Choice(model, key, name, variant, "", participation, unit, trust, relation, extra))
    return choices


def noises() -> list[Choice]:
    """Cross mechanisms, the algorithms that take one, participations and trust settings."""
    rows = [name for name, row in ALGORITHMS.items() if issubclass(row.settings, NoiseSettings)]
    rest = in_turn(
        ["logistic-regression", "mlp"], examples.RELATIONS, ["", "", "word", "away"], ["record", "user"]
    )
    choices = []
    for name, noise, participation, trust in itertools.product(
        rows, examples.MECHANISMS, SELECTABLE_PARTICIPATIONS, TRUSTS
    ):
        model, relation, extra, unit = next(rest)
        unit, _ = fitting(unit, participation)
        extra = "" if extra == "away" and (trust in ("secure-aggregation", "curator") or "pool" in unit) else extra
        choices.append(Choice(model, "", name, "", noise, participation, unit, trust, relation, extra))
    return choices


def models_and_units() -> list[Choice]:
    """Cross models, units and trust settings, and then models with releases beside the training."""
    rest = in_turn(list(SELECTABLE_PARTICIPATIONS), examples.RELATIONS)
    choices = []
    for model, unit, trust in itertools.product(examples.MODELS, examples.UNITS, TRUSTS):
        participation, relation = next(rest)
        choices.append(Choice(model, "", "dp-sgd", "", "", participation, unit, trust, relation))
    for beside, model, trust, relation in itertools.product(
        examples.BESIDE, examples.MODELS, TRUSTS, examples.RELATIONS
    ):
        choices.append(Choice(model, trust=trust, relation=relation, beside=beside))
    return choices


GRIDS: dict[str, Callable[[], list[Choice]]] = {
    "models and keys": models_and_keys,
    "algorithms and units": algorithms_and_units,
    "noises": noises,
    "models and units": models_and_units,
}
PARTS = 32
"""Of a grid, each a test of its own."""


def part_of(grid: str, part: int) -> list[Choice]:
    """Take a part of a grid in a drawn order: part 0 has every value of every axis, the others what is left."""
    choices, met = GRIDS[grid](), set[tuple[int, str]]()
    first, others = list[Choice](), list[Choice]()
    for place in np.random.default_rng(1).permutation(len(choices)):
        values = set(enumerate(choices[place]))
        (others if values <= met else first).append(choices[place])
        met |= values
    return first if part == 0 else others[part - 1 :: PARTS - 1]


_CLIENTS = {"unit": "client", "model": "logistic-regression"}
_LOGISTIC = {"model": "logistic-regression"}
_UNTRUSTED = {**_LOGISTIC, "trust": "untrusted"}
NEEDS: dict[str, dict[str, str]] = {
    "dp-fedavg": _CLIENTS,
    "dp-fedadam": _CLIENTS,
    "dp-fedyogi": _CLIENTS,
    "dp-fedadagrad": _CLIENTS,
    "noisy-newton": _LOGISTIC,
    **dict.fromkeys(("momentum-tree", "momentum-tree-reduced", "momentum-tree-aligned"), _UNTRUSTED),
    "phased-sgd": {**_LOGISTIC, "trust": "curator"},
}
"""Choices that an algorithm needs to be admitted."""
NEVER = {"fedavg"}
"""Algorithms for which no noise can be calibrated."""
LONG = {"cnn"}
"""Models that take seconds."""


def fast_choices() -> list[Choice]:
    """List a few combinations that have every model, algorithm, mechanism, participation, unit and trust."""
    federated_models = [name for name, example in examples.MODELS.items() if example.federation]
    models = iter([name for name in examples.MODELS if name not in LONG and name not in federated_models])
    rest = zip(itertools.cycle(examples.TRUSTS[:3]), itertools.cycle(examples.RELATIONS), strict=False)
    choices = []
    for name in [name for name in ALGORITHMS if name not in NEVER]:
        trust, relation = next(rest)
        needs = NEEDS[name] if name in NEEDS else {"model": next(models)}
        choices.append(Choice(algorithm=name, relation=relation, **{"trust": trust, **needs}))
    choices += [Choice(model) for model in [*models, *federated_models]]
    choices += [Choice("logistic-regression", algorithm="dp-ftrl", mechanism=name) for name in examples.MECHANISMS]
    for name in SELECTABLE_PARTICIPATIONS:
        unit, trust = fitting("record", name)
        model = "logistic-regression" if name == "balanced" else "softmax-regression"
        choices.append(Choice(model, participation=name, unit=unit, trust=trust))
    choices += [Choice("mlp", "augment", participation=name) for name in ("fixed", "poisson")]
    choices += [
        Choice("logistic-regression", unit=unit, trust=fitting(unit, "fixed")[1]) for unit in examples.UNITS
    ]
    choices += [Choice("logistic-regression", beside=beside) for beside in examples.BESIDE]
    return choices
