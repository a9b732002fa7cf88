"""Runs beside the training, planned and accounted alike: evaluations by silos, and the first step of [data.scale].

Every evaluation reads all test records of every silo: a round of DP-SGD's releases, of bounded vectors of one or
two numbers (loss/scores.py) in place of gradients.  So its plan, noise, integers, ledger entries and prices are
those of such a run.

The first step is a run of one round, whose model is moments of columns:

    first_step_of(cell) ─▶ any engine ─▶ Finished ─▶ scaled(cell, its model) ─▶ the rounds, with numbers

So silos, guards, noise, integers and ledger treat both as they treat every run of DP-SGD, and nothing is written
twice.  The server gets the mean over silos, as it gets a mean of gradients.

The records on which each silo of a simulation or of a demonstration trains and evaluates are assigned here, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedpriv.core.errors import InputError
from fedpriv.core.random import SERVER
from fedpriv.data.encode import Scaling
from fedpriv.data.partition import index_persons, partition_alike, partition_iid
from fedpriv.loss.objective import Objective, Records
from fedpriv.loss.rows import COLUMN_MOMENTS, MOMENT_CLIP
from fedpriv.loss.scores import LOWER_IS_BETTER, MEAN_SUFFIX, WORST_SUFFIX, SummedScores, make_summed_scores
from fedpriv.noise.trust import TRUSTED, UNTRUSTED, USER
from fedpriv.plan.plan import Plan, check_scaling_known, make_plan
from fedpriv.plan.task import Task, load_task, partition_records, row_labels
from fedpriv.scenario.schema import AlgorithmSection, Cell, ModelSection
from fedpriv.scenario.sections import FederationSection, PrivacySection, RunSection

_ALGORITHM = "dp-sgd"


def first_step_cell(cell: Cell) -> Cell | None:
    """The run that is the cell's first step; None if it has none, or has taken it.

    InputError if it cannot be taken.  Every silo's records of the rounds take part, once, in its one round.

    Guarantee: it is √share · μ-GDP for each record under the cell's relation, where the run's target is μ.
    """
    schema = cell.data.table_schema
    if schema is None or not cell.data.needs_first_step:
        return None
    budget, held = cell.budget, cell.schedule.batches_per_silo
    algorithm = AlgorithmSection.model_validate(
        {"name": _ALGORITHM, "trust": cell.algorithm.trust, "clip": MOMENT_CLIP, "step": 1.0}
    )
    if cell.algorithm.trust not in algorithm.row.trusts:
        raise InputError(
            f"data.scale: its first step cannot be taken with algorithm.trust = {cell.algorithm.trust!r}; leave "
            "[data.scale] out"
        )
    promised = {"mode": "none"} if budget.rounds_mu is None else {"mu": budget.other_mu}
    return cell.derive_cell(
        PrivacySection.model_validate(
            {"relation": cell.privacy.relation, "delta": cell.privacy.delta, **promised}
        ),
        FederationSection(
            silos=cell.federation.silos,
            rounds=1,
            epochs=1,
            batches=tuple(held * batch for batch in cell.batch_sizes),
        ),
        algorithm,
        other_mu=budget.rounds_mu or 0.0,
        model=ModelSection.model_validate(
            {
                "name": COLUMN_MOMENTS,
                "columns": schema.number_features,
                **({"real": True} if schema.class_count == 0 else {}),
            }
        ),
        run=RunSection(dtype=cell.run.dtype, arithmetic=cell.run.arithmetic, word=cell.run.word),
    )


def apply_scaling(cell: Cell, scaling: Scaling) -> Cell:
    """The cell with what its first step gave; its budget is the one that it was given with the whole run."""
    assert cell.data.scale is not None
    scale = cell.data.scale.model_copy(update={"means": scaling.means, "deviations": scaling.deviations})
    return cell.model_copy(update={"data": cell.data.model_copy(update={"scale": scale})})


def assume_scaling(cell: Cell) -> Cell:
    """The cell as its rounds will be planned, whatever its first step gives; itself if that is known, or none."""
    schema = cell.data.table_schema
    if schema is None or not cell.data.needs_first_step:
        return cell
    count = len(schema.number_features)
    return apply_scaling(cell, Scaling(schema.number_features, (0.0,) * count, (1.0,) * count))


def partition_test_records(cell: Cell) -> list[Tensor]:
    """Which places of `tests` each silo evaluates on: (evaluation.records,) of the task's for each.

    By site, a site's first ones; otherwise no silo's twice, of labels as its training records have them.  Where
    cells say which rows are for testing, a silo's rows are the same in both parts, in the order it reads them.
    InputError if the scenario asks for more than there are.
    """
    assert cell.evaluation is not None
    task, sizes = load_task(cell), cell.evaluation.records_per_silo(cell.federation.silos)
    if (held := _fixed_test_indices(cell, task)) is not None:
        return [torch.from_numpy(own) for own in _take_first(cell, held, sizes)]
    labels = task.test_with_missing.labels.numpy()
    if sum(sizes) > len(labels):
        raise InputError(
            f"evaluation.records: {sum(sizes)} test records of all silos, and {cell.data.name} has {len(labels)}"
        )
    if cell.data.partition == "iid":
        shares = partition_iid(labels, sizes, cell.seed)
    else:
        shares = partition_alike(
            labels, sizes, cell.seed, [row_labels(task)[share.numpy()] for share in partition_records(cell)]
        )
    return [torch.from_numpy(share) for share in shares]


def _fixed_test_indices(cell: Cell, task: Task) -> list[NDArray[np.int64]] | None:
    """The places of `tests` that are at each silo, in the order it reads them; None where any may be anybody's."""
    by_site, shared = (
        cell.data.partition == "site",
        task.test_index_of_train is not None and task.unit_indices is None,
    )
    if not (by_site or shared):
        return None
    read = (
        [task.test_index_of_train[share.numpy()] for share in partition_records(cell)]
        if shared and task.test_index_of_train is not None
        else []
    )
    if not by_site:
        return read
    assert task.test_sites is not None
    sites = [np.flatnonzero(task.test_sites == silo) for silo in range(cell.federation.silos)]
    return (
        sites
        if not read
        else [np.concatenate([own, np.setdiff1d(site, own)]) for own, site in zip(read, sites, strict=True)]
    )


def _take_first(cell: Cell, held: Sequence[NDArray[np.int64]], sizes: Sequence[int]) -> list[NDArray[np.int64]]:
    """InputError, naming the silo, for one that has too few."""
    schema = cell.data.table_schema
    names = schema.sites if schema is not None and cell.data.partition == "site" else ()
    what = "rows" if schema is not None and schema.splits_by_content else "test records"
    for silo, (own, size) in enumerate(zip(held, sizes, strict=True)):
        if size > len(own):
            name = repr(names[silo]) if names else f"silo {silo}"
            raise InputError(f"evaluation.records: {name} has {len(own)} {what}, and {size} are asked for")
    return [own[:size] for own, size in zip(held, sizes, strict=True)]


def test_indices_of_silos(cell: Cell) -> list[NDArray[np.int64]]:
    """The numbers, in the data set, of each silo's test records; none where silos do not evaluate."""
    return (
        [np.empty(0, np.int64)] * cell.federation.silos
        if cell.evaluation is None
        else [share.numpy() for share in partition_test_records(cell)]
    )


def test_records_of_silos(cell: Cell) -> list[Records]:
    """The test records of silo 0, 1, … as the cell's model sees them."""
    test = load_task(cell).test_with_missing
    return [Records(*(column[share] for column in test)) for share in partition_test_records(cell)]


def train_indices_of_silos(cell: Cell) -> list[NDArray[np.int64]]:
    """The numbers, in the data set, of each silo's training records, in the order it reads them.

    Of persons all records, whether they count or not, in the order of the data; of clients unit by unit.
    """
    task, shares = load_task(cell), [share.numpy() for share in partition_records(cell)]
    if task.unit_indices is None:
        return shares
    if cell.privacy.protected_unit.name == USER.name and task.persons is not None:
        whose = index_persons(task.persons)[1]
        return [np.flatnonzero(np.isin(whose, share)) for share in shares]
    return [task.unit_indices[share].ravel() for share in shares]


@dataclass(frozen=True)
class EvaluationPlan:
    """The plan of a cell's evaluations, and who its silos are."""

    plan: Plan
    scores: SummedScores
    silo_names: tuple[str, ...]
    """Names of silo 0, 1, … for metrics of each; none where only all of them together are asked for."""
    counted_share: float = 1.0
    """The public share of the places read that count, where cells decide: means over places are divided by it."""

    @property
    def publishes_each_silo(self) -> bool:
        """Whether every silo's own means are published, and not those of all silos alone."""
        return not float(self.plan.noise.std_of(SERVER))

    def metrics(self, published: Tensor) -> dict[str, float]:
        """By name, of an evaluation's published means (silos, `dimension`), or (1, `dimension`)."""
        places, published = published.double(), published.double() / self.counted_share
        shares = torch.tensor(self.plan.weights if self.publishes_each_silo else (1.0,), dtype=torch.float64)
        found = {name: float(value) for name, value in self.scores.to_metrics(shares @ published).items()}
        curves = self.scores.extra_figures(
            shares @ places, self.plan.noise.std_in_mean, sum(self.plan.batch_sizes)
        )
        if not self.silo_names:
            return found | curves
        for name, values in self.scores.to_metrics(published).items():
            found |= {
                f"{name}_at_{silo}": float(value) for silo, value in zip(self.silo_names, values, strict=True)
            }
            found[f"{name}_{MEAN_SUFFIX}"] = float(values.mean())
            found[f"{name}_{WORST_SUFFIX}"] = float(values.max() if name in LOWER_IS_BETTER else values.min())
        for number, silo in enumerate(self.silo_names):
            std, size = float(self.plan.noise.std_of(number)), self.plan.batch_sizes[number]
            found |= {
                f"{name}_at_{silo}": value
                for name, value in self.scores.extra_figures(places[number], std, size, groups=False).items()
            }
        return found | curves


def evaluation_count(cell: Cell) -> int:
    """How many rounds are evaluated."""
    return min(cell.schedule.rounds, cell.run.evaluations)


def evaluation_cell(cell: Cell) -> Cell:
    """The run that a cell's evaluations are: a round each, of all test records, with noise of their own target.

    Under secure aggregation every silo adds the whole noise: its message is private by itself.
    """
    asked, silos = cell.evaluation, cell.federation.silos
    assert asked is not None
    count = evaluation_count(cell)
    trust = TRUSTED if cell.algorithm.trust_setting.adds_noise(SERVER) else UNTRUSTED
    target = {"mode": "none"} if asked.mu is None else {"mu": asked.mu}
    return cell.derive_cell(
        PrivacySection.model_validate({"relation": cell.privacy.relation, "delta": cell.privacy.delta, **target}),
        FederationSection(silos=silos, rounds=count, epochs=count, batches=asked.records_per_silo(silos)),
        AlgorithmSection.model_validate(
            {
                "name": "dp-sgd",
                "trust": trust.name,
                "clip": asked.increment_norm if cell.model.is_classification else 0.5,
                "step": 1.0,
            }
        ),
        run=cell.run if asked.mu is not None else cell.run.model_copy(update={"arithmetic": "float"}),
    )


def make_evaluation_plan(cell: Cell, objective: Objective, *, for_release: bool = False) -> EvaluationPlan | None:
    """None where silos do not evaluate; `objective` is the model's own.  InputError as for `plan_of`.

    Guarantee: the releases of all evaluations together are `evaluation.mu`-GDP for each test record.
    """
    if cell.evaluation is None:
        return None
    check_scaling_known(cell)
    schema, tests = cell.data.table_schema, cell.data.validation is None
    scores = make_summed_scores(objective, cell.evaluation.loss_bound, classes=cell.model.is_classification)
    if (curves := cell.evaluation.curves) is not None:
        scores = curves.add_tables(scores, schema, cell.model.settings, scaled=cell.data.scaling is not None)
    return EvaluationPlan(
        replace(
            make_plan(evaluation_cell(cell), scores, for_release=for_release), model_length=objective.dimension
        ),
        scores,
        _silo_names(cell) if cell.run.per_silo else (),
        1.0 if schema is None else schema.counted_share(for_testing=tests),
    )


def _silo_names(cell: Cell) -> tuple[str, ...]:
    schema = cell.data.table_schema
    return (
        schema.sites
        if cell.data.partition == "site" and schema is not None
        else tuple(f"silo_{silo}" for silo in range(cell.federation.silos))
    )
