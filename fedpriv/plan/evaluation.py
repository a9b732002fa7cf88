"""Runs besides the training: evaluations by silos, and the first step of [data.scale].

Both are planned and accounted for as runs of DP-SGD of their own.  A cell is one run of a scenario with all its
settings, and a silo a party that holds records.

In an evaluation the increments are scores of test records, bounded vectors in place of clipped gradients.  The
first step is a run of one round, before the others, that releases moments by which a table's columns are then
scaled.

This module also assigns the records on which each silo of a simulation or demonstration trains and evaluates.
"""

from collections.abc import Callable, Mapping, Sequence
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
from fedpriv.plan.calibration import FittedNoise, fit_scenario_noise
from fedpriv.plan.plan import Plan, check_scaling_known, make_plan
from fedpriv.plan.task import (
    Task,
    check_record_count,
    load_task,
    make_schema_task,
    partition_records,
    row_labels,
)
from fedpriv.scenario.load import Scenario
from fedpriv.scenario.schema import AlgorithmSection, Cell, ModelSection
from fedpriv.scenario.sections import FederationSection, PrivacySection, RunSection

_ALGORITHM = "dp-sgd"


def first_step_cell(cell: Cell) -> Cell | None:
    """Return the run that is the cell's first step, or None if no first step is left to take.

    The first step is a run of DP-SGD with one round, whose objective is moments of the columns with numbers.
    All records that a silo can read in the later rounds take part in it, once.

    Guarantee: the target of the first step is √share · μ or less, for each record under the cell's relation, where
    the run's target is μ, and share is the part of μ² that [data.scale] gives to the first step.  A run without a
    target has a first step without noise.

    Raises:
        InputError: DP-SGD cannot be run with the algorithm's trust setting, or the algorithm's rounds do not fit.
    """
    schema = cell.data.table_schema
    if schema is None or not cell.data.needs_first_step:
        return None
    budget, batches = cell.budget, cell.schedule.batches_per_silo
    algorithm = AlgorithmSection.model_validate(
        {"name": _ALGORITHM, "trust": cell.algorithm.trust, "clip": MOMENT_CLIP, "step": 1.0}
    )
    if cell.algorithm.trust not in algorithm.row.trusts:
        raise InputError(
            f"data.scale: its first step cannot be taken with algorithm.trust = {cell.algorithm.trust!r}; leave "
            "[data.scale] out"
        )
    # The share of the budget for the first step, or no noise in a run without noise.
    privacy_keys = {"mode": "none"} if budget.rounds_mu is None else {"mu": budget.other_mu}
    return cell.derive_cell(
        PrivacySection.model_validate(
            {"relation": cell.privacy.relation, "delta": cell.privacy.delta, **privacy_keys}
        ),
        FederationSection(
            silos=cell.federation.silos,
            rounds=1,
            epochs=1,
            batches=tuple(batches * batch for batch in cell.batch_sizes),
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
    """Return the cell with the scaling that its first step computed.

    The cell keeps the budget that it has as part of the whole run.
    """
    assert cell.data.scale is not None
    scale = cell.data.scale.model_copy(update={"means": scaling.means, "deviations": scaling.deviations})
    return cell.model_copy(update={"data": cell.data.model_copy(update={"scale": scale})})


def assume_scaling(cell: Cell) -> Cell:
    """Return the cell with an assumed result of its first step, if this step is not taken yet.

    Scaling by means of 0 and deviations of 1 stands for the result, on which no plan of the rounds depends.
    """
    schema = cell.data.table_schema
    if schema is None or not cell.data.needs_first_step:
        return cell
    count = len(schema.number_features)
    return apply_scaling(cell, Scaling(schema.number_features, (0.0,) * count, (1.0,) * count))


def prepare_scenario(
    scenario: Scenario,
    cached_fits: Mapping[str, FittedNoise],
    on_fit: Callable[[FittedNoise], None] = lambda _: None,
    *,
    has_records: bool = True,
    for_release: bool = False,
) -> tuple[Scenario, dict[str, FittedNoise], list[Cell | None]]:
    """Check the records of all cells, fit their noise, and plan the rounds that follow a first step.

    Guarantee: nothing is released here, and no first step is returned unless the rounds of every cell that waits
    for one can be planned.

    Args:
        scenario: Scenario of the run.
        cached_fits: Fits of a run that is resumed, by request, which are not repeated.  A request is the text of
            the numbers that a fit depends on.
        on_fit: Function that is called with every new fit.
        has_records: Whether the records are here, and not at remote silos, so that they are checked.
        for_release: Whether the noise protects somebody.  Releases of a private run are then integers.

    Returns:
        The scenario with fitted numbers in every cell that left its noise to be fitted, its fits by request, and
        the first step of each point, or None where there is none to take.

    Raises:
        InputError: `check_record_count` refuses a cell, no noise can be fitted, the trust setting has no first
            step, or rounds after a first step cannot be planned.
    """
    if has_records:
        for point in scenario.points:
            check_record_count(point.cell)
    scenario, fits = fit_scenario_noise(scenario, cached_fits, on_fit)
    return scenario, fits, [_prepare_first_step(point.cell, for_release) for point in scenario.points]


def _prepare_first_step(cell: Cell, for_release: bool) -> Cell | None:
    """Return the first step of a cell, or None without one, after planning the rounds that follow it."""
    if (schema := cell.data.table_schema) is not None and cell.data.needs_first_step:
        rounds = assume_scaling(cell)
        make_plan(rounds, make_schema_task(rounds, schema).objective, for_release=for_release)
    return first_step_cell(cell)


def partition_test_records(cell: Cell) -> list[Tensor]:
    """Return the row indices of the test records on which each silo evaluates.

    Each silo gets `evaluation.records` rows of `Task.test_with_missing`, and no row goes to two silos.  By default
    the rows are drawn: at random with the partition "iid", and else with label frequencies like those of the
    silo's training records.  In some partitions by site, and in some tables where the cells of a row decide
    whether it is for testing, a silo gets rows of its own (`_fixed_test_indices`).

    Args:
        cell: Cell of the training, with a section [evaluation].

    Raises:
        InputError: The scenario asks for more test records than there are, or than a silo has, or
            `partition_records` refuses the cell.
    """
    assert cell.evaluation is not None
    task, sizes = load_task(cell), cell.evaluation.records_per_silo(cell.federation.silos)
    if (fixed_indices := _fixed_test_indices(cell, task)) is not None:
        return [torch.from_numpy(indices) for indices in _take_first(cell, fixed_indices, sizes)]
    labels = task.test_with_missing.labels.numpy()
    if sum(sizes) > len(labels):
        raise InputError(
            f"evaluation.records: {sum(sizes)} test records of all silos, and {cell.data.name} has {len(labels)}; "
            "ask for fewer"
        )
    if cell.data.partition == "iid":
        shares = partition_iid(labels, sizes, cell.seed)
    else:
        shares = partition_alike(
            labels, sizes, cell.seed, [row_labels(task)[share.numpy()] for share in partition_records(cell)]
        )
    return [torch.from_numpy(share) for share in shares]


def _fixed_test_indices(cell: Cell, task: Task) -> list[NDArray[np.int64]] | None:
    """Return the row indices in `test_with_missing` of each silo, in reading order, (rows of the silo,).

    The result is None if any row may go to any silo.  A silo has rows of its own in two cases, which may meet:

    - The cells of a row decide whether it is for testing, so that each row has an index in both parts and counts
      in at most one of them, and a unit is a record: the rows that the silo has in the training part.
    - The partition is by site, and test rows have sites: the rows of its site.

    If both cases hold, the rows of the first come first, and then the other rows of the site.

    Args:
        cell: Cell of the training.
        task: Task of the cell.
    """
    by_site, by_row = (
        cell.data.partition == "site" and task.test_sites is not None,
        task.test_index_of_train is not None and task.unit_indices is None,
    )
    if not (by_site or by_row):
        return None
    # `test_index_of_train` leads from a row's index in the training part to its index in the test part.
    test_indices = (
        [task.test_index_of_train[share.numpy()] for share in partition_records(cell)]
        if by_row and task.test_index_of_train is not None
        else []
    )
    if not by_site:
        return test_indices
    assert task.test_sites is not None
    sites = [np.flatnonzero(task.test_sites == silo) for silo in range(cell.federation.silos)]
    return (
        sites
        if not test_indices
        else [
            np.concatenate([silo_indices, np.setdiff1d(site_indices, silo_indices)])
            for silo_indices, site_indices in zip(test_indices, sites, strict=True)
        ]
    )


def _take_first(
    cell: Cell, indices_by_silo: Sequence[NDArray[np.int64]], sizes: Sequence[int]
) -> list[NDArray[np.int64]]:
    """Return each silo's first rows, as many as the evaluation reads there.

    Args:
        cell: Cell of the training, for messages.
        indices_by_silo: Row indices of each silo, from which the first are taken.
        sizes: Number of rows that each silo evaluates on.

    Raises:
        InputError: A silo has fewer rows than that.
    """
    schema = cell.data.table_schema
    names = schema.sites if schema is not None and cell.data.partition == "site" else ()
    row_noun = "rows" if schema is not None and schema.splits_by_content else "test records"
    for silo, (indices, size) in enumerate(zip(indices_by_silo, sizes, strict=True)):
        if size > len(indices):
            name = repr(names[silo]) if names else f"silo {silo}"
            raise InputError(f"evaluation.records: {name} has {len(indices)} {row_noun}, and {size} are asked for")
    return [indices[:size] for indices, size in zip(indices_by_silo, sizes, strict=True)]


def held_out_indices_by_silo(cell: Cell) -> list[NDArray[np.int64]]:
    """Return the row indices, in the test part of the data set, of each silo's test records.

    Each silo's array is empty if silos do not evaluate.
    """
    return (
        [np.empty(0, np.int64)] * cell.federation.silos
        if cell.evaluation is None
        else [share.numpy() for share in partition_test_records(cell)]
    )


def held_out_records_by_silo(cell: Cell) -> list[Records]:
    """Return the test records of silo 0, 1, … as inputs of the cell's model.

    The cell must have a section [evaluation].
    """
    test = load_task(cell).test_with_missing
    return [Records(*(column[share] for column in test)) for share in partition_test_records(cell)]


def train_indices_of_silos(cell: Cell) -> list[NDArray[np.int64]]:
    """Return the row indices, in the training part of the data set, of each silo's training records.

    If persons are protected and the data name them, a silo gets all records of its persons, whether they count or
    not.  If its units are other groups of records, such as clients, it gets their records, unit by unit.
    """
    # A share has indices of records, persons or other units, by the cell's unit of protection.
    task, shares = load_task(cell), [share.numpy() for share in partition_records(cell)]
    if task.unit_indices is None:
        return shares
    if cell.privacy.protected_unit.name == USER.name and task.persons is not None:
        _, person_of_row = index_persons(task.persons)
        return [np.flatnonzero(np.isin(person_of_row, share)) for share in shares]
    return [task.unit_indices[share].ravel() for share in shares]


@dataclass(frozen=True)
class EvaluationPlan:
    """Plan of a cell's evaluations, with the names of its silos."""

    plan: Plan
    """Plan of the run of all evaluations."""
    scores: SummedScores
    """Objective whose increments are a record's scores, and which converts means of them to metrics."""
    silo_names: tuple[str, ...]
    """Names of silo 0, 1, … for metrics of each silo, or empty if only metrics of all silos are reported."""
    counted_share: float = 1.0
    """Public, expected share of the rows read that count, by which means over rows are divided."""

    @property
    def publishes_each_silo(self) -> bool:
        """Whether every silo's own means are published, and not only those of all silos."""
        return not float(self.plan.noise.std_of(SERVER))

    def metrics(self, published: Tensor) -> dict[str, float]:
        """Compute metrics by name from an evaluation's published means.

        Means over the rows read are divided by `counted_share`, to estimate means over the rows that count.  With
        `silo_names` each silo's metrics follow under "metric_at_name", with their unweighted mean and their worst
        value.  Scores with curves, such as the ROC curve, add figures of these, for single silos without groups.

        Args:
            published: Mean scores over the rows read, with any noise: (silos, numbers of a score), or (1, numbers
                of a score) if only the mean over silos is published.
        """
        # From here `published` has means over the rows that count, if their share is the expected one.
        row_means, published = published.double(), published.double() / self.counted_share
        shares = torch.tensor(self.plan.weights if self.publishes_each_silo else (1.0,), dtype=torch.float64)
        metrics = {name: float(value) for name, value in self.scores.to_metrics(shares @ published).items()}
        # Figures of curves are made of counts, which are means over the rows read times the number of these rows.
        curves = self.scores.extra_figures(
            shares @ row_means, self.plan.noise.std_in_mean, sum(self.plan.batch_sizes)
        )
        if not self.silo_names:
            return metrics | curves
        for name, values in self.scores.to_metrics(published).items():
            metrics |= {
                f"{name}_at_{silo}": float(value) for silo, value in zip(self.silo_names, values, strict=True)
            }
            metrics[f"{name}_{MEAN_SUFFIX}"] = float(values.mean())
            metrics[f"{name}_{WORST_SUFFIX}"] = float(values.max() if name in LOWER_IS_BETTER else values.min())
        for number, silo in enumerate(self.silo_names):
            std, size = float(self.plan.noise.std_of(number)), self.plan.batch_sizes[number]
            metrics |= {
                f"{name}_at_{silo}": value
                for name, value in self.scores.extra_figures(row_means[number], std, size, groups=False).items()
            }
        return metrics | curves


def evaluation_count(cell: Cell) -> int:
    """Number of rounds that are evaluated."""
    return min(cell.schedule.rounds, cell.run.evaluations)


def evaluation_cell(cell: Cell) -> Cell:
    """Return the run of a cell's evaluations, with a round for each.

    A round reads all records on which silos evaluate.  The run is one of DP-SGD whose increments are scores of
    bounded norm.  The noise is calibrated to the evaluations' own target, or absent without one.  The server adds
    it if the trust setting has the server add the training's noise.  Otherwise, also under secure aggregation,
    every silo adds all noise of its message itself.  Without noise `arithmetic` is "float".

    Args:
        cell: Cell of the training, with a section [evaluation].
    """
    section, silos = cell.evaluation, cell.federation.silos
    assert section is not None
    count = evaluation_count(cell)
    trust = TRUSTED if cell.algorithm.trust_setting.adds_noise(SERVER) else UNTRUSTED
    target = {"mode": "none"} if section.mu is None else {"mu": section.mu}
    return cell.derive_cell(
        PrivacySection.model_validate({"relation": cell.privacy.relation, "delta": cell.privacy.delta, **target}),
        FederationSection(silos=silos, rounds=count, epochs=count, batches=section.records_per_silo(silos)),
        AlgorithmSection.model_validate(
            {
                "name": "dp-sgd",
                "trust": trust.name,
                # Without classes an increment is the loss alone, between -1/2 and 1/2.
                "clip": section.increment_norm if cell.model.is_classification else 0.5,
                "step": 1.0,
            }
        ),
        run=cell.run if section.mu is not None else cell.run.model_copy(update={"arithmetic": "float"}),
    )


def make_evaluation_plan(cell: Cell, objective: Objective, *, for_release: bool = False) -> EvaluationPlan | None:
    """Plan a cell's evaluations as a separate run, whose queries are models.

    Guarantee: if `evaluation.mu` is given, the releases of all evaluations together are `evaluation.mu`-GDP for
    each test record.  On integers this holds up to the slack of `make_exact_plan`, and in floating point it holds
    in real arithmetic.

    Args:
        cell: Cell of the training.
        objective: Objective of the model for single records, before an algorithm wraps it.
        for_release: Whether the noise protects somebody.  Releases of private evaluations are then integers.

    Returns:
        The plan, or None if silos do not evaluate.

    Raises:
        InputError: The evaluations cannot be planned.
    """
    if cell.evaluation is None:
        return None
    check_scaling_known(cell)
    schema = cell.data.table_schema
    scores = make_summed_scores(objective, cell.evaluation.loss_bound, classes=cell.model.is_classification)
    if (curves := cell.evaluation.curves) is not None:
        scores = curves.add_tables(scores, schema, cell.model.settings, scaled=cell.data.scaling is not None)
    return EvaluationPlan(
        replace(
            make_plan(evaluation_cell(cell), scores, for_release=for_release), model_length=objective.dimension
        ),
        scores,
        _silo_names(cell) if cell.run.per_silo else (),
        1.0 if schema is None else schema.counted_share(for_testing=True),
    )


def _silo_names(cell: Cell) -> tuple[str, ...]:
    schema = cell.data.table_schema
    return (
        schema.sites
        if cell.data.partition == "site" and schema is not None
        else tuple(f"silo_{silo}" for silo in range(cell.federation.silos))
    )
