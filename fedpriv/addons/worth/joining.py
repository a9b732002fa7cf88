"""Gain of joining against ε: released models for many splits, compared with local models.

A split is a division of the records into training and test records.  The published split is the scenario's own,
and the others are drawn.  A local model is fitted by one silo to its own training records.  The gain of a model is
its score at a silo minus that of the local model.  A cell is one run, with every key of its scenario resolved.

For each split, trust setting, ε and noise seed there is a model of one cell, which is judged on the test records
of silos.  If the scenario sweeps other keys, their values are settings, and the best one is chosen on spared
training records.  The candidates at ε include the settings at each smaller ε of the grid, since a guarantee for a
smaller ε holds for a larger one, too.

The result of a split is stored in the user's cache, so that an interrupted study can be continued.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.addons.worth.break_even import BreakEven, describe_break_even, estimate_break_even
from fedpriv.addons.worth.local_models import Floats, score_model
from fedpriv.addons.worth.references import cache_key, read_cached, write_cached
from fedpriv.addons.worth.worth import (
    GainEvaluator,
    budget_shares,
    compute_references,
    digest_silos,
    find_seen_rows,
    fit_pooled_model,
    make_evaluator,
    replace_data_keys,
)
from fedpriv.claims.outcome import RunObserver
from fedpriv.core.errors import FedprivError, InputError
from fedpriv.core.figures import format_upper
from fedpriv.core.replicates import limit_to_one_thread
from fedpriv.engines.table import make_engine
from fedpriv.loss.objective import Records
from fedpriv.noise.trust import CURATOR
from fedpriv.plan.task import check_record_count, partition_records
from fedpriv.scenario.load import PRIVACY_TARGETS, Scenario, load_scenario, resolve_cell
from fedpriv.scenario.schema import Cell

EPSILON_GRID = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SPARED_SHARE = 0.2
_MAX_SPLITS = 1000
"""Most splits, and most seeds of each.  A split is a grid of runs."""
_MIN_SEEDS = 2
"""Fewest seeds of each split, without which no part of a spread is known to be due to noise."""
_TRUST_KEY, _EPSILON_KEY = "algorithm.trust", "privacy.epsilon"
ProgressCallback = Callable[[str], None]


@dataclass(frozen=True)
class JoiningRequest:
    """A scenario with overrides, the grid, and the number of splits and noise seeds."""

    scenario: Path
    """Path of the scenario's file."""
    overrides: tuple[str, ...]
    """"KEY=VALUE" for each key that differs from the scenario's file."""
    trusts: tuple[str, ...]
    """Trust settings, or empty for all that the scenario can be run with, except curators."""
    epsilons: tuple[float, ...]
    """Grid of ε, rising numbers above 0."""
    splits: int | None
    """Number of drawn splits, or None for the scenario's number (5 by default).

    With 0 only the published split is run.
    """
    seeds: int = _MIN_SEEDS
    """Number of noise seeds of each split."""
    with_personal: bool = False
    """Whether personal models are fitted, too."""


@dataclass(frozen=True)
class SplitGains:
    """Results of one split.  Arrays are means over silos unless their shape includes silos.

    Figures without seeds in their shape are those of the first noise seed, except `alone`.
    """

    alone: float
    """Score of the local models, a mean over silos and seeds."""
    balanced: float
    """Balanced score of the local models, a mean over silos."""
    released: Mapping[str, NDArray[np.float64]]
    """Scores of the released models, (ε, seeds), by trust."""
    recalibrated: Mapping[str, NDArray[np.float64]]
    """Scores, (ε, seeds), by trust, after silos fit intercepts and scale of the models to their records."""
    gains: Mapping[str, NDArray[np.float64]]
    """Gains of the released models, (ε, seeds, silos), by trust."""
    personal: Mapping[str, NDArray[np.float64]]
    """Gains of the personal models, (ε, seeds), by trust, or empty if they were not requested."""
    judged: str
    """Records by which λ of the personal models was chosen: "spared", "folds", or "" without such models."""
    noiseless: NDArray[np.float64]
    """Gains of the same rounds without noise, (seeds,).

    The settings are those of the first trust setting and the largest ε.
    """
    pooled: float
    """Gain of the pooled model, fitted without noise to the records of all silos that have test records."""
    own_intercept: float
    """Gain of the pooled model after silos fit its intercepts and scale to their records, without noise."""
    ratio: float
    """Test records / training records."""
    tests: NDArray[np.int64]
    """Number of test records of each silo, (silos,)."""
    names: tuple[str, ...]
    """Names of the silos."""


@dataclass(frozen=True)
class JoiningResult:
    """Results of splits 1 … n of a request, and separately of the published split."""

    request: JoiningRequest
    """Request that was studied."""
    name: str
    """Name of the scenario."""
    delta: float
    """δ at which ε is stated."""
    silos: int
    """Number of silos of the federation."""
    metric: str
    """Name of the score, "accuracy" or "-loss", which is larger for a better model."""
    records: int
    """Median number of training records of the silos with local models, rounded down."""
    trusts: tuple[str, ...]
    """Trust settings that were compared."""
    monotone: bool
    """Whether settings were chosen for each ε among those of this ε and of smaller ones."""
    published: SplitGains
    """Results of the scenario's own split."""
    splits: tuple[SplitGains, ...]
    """Results of the drawn splits 1 … n."""
    shares: Mapping[str, float]
    """Result of `budget_shares` for the scenario."""

    def averaged_splits(self) -> tuple[SplitGains, ...]:
        """Return the splits over which means are taken: the drawn ones, or the published one if none is drawn."""
        return self.splits or (self.published,)

    def mean_over_silos(self, trust: str, name: str = "gains") -> NDArray[np.float64]:
        """Return the means over silos of a figure of each split, (ε, splits, seeds).

        Args:
            trust: Trust setting.
            name: Field of `SplitGains` that maps trust settings to arrays.
        """
        values = [getattr(split, name)[trust] for split in self.averaged_splits()]
        return np.stack([figures.mean(axis=2) if figures.ndim == 3 else figures for figures in values], axis=1)

    def mean_of(self, name: str) -> float:
        """Return the mean over splits and seeds of a figure of `SplitGains` that has no trust settings."""
        return float(np.mean([np.mean(getattr(split, name)) for split in self.averaged_splits()]))

    @property
    def test_train_ratio(self) -> float:
        """Mean over splits of test records / training records."""
        return self.mean_of("ratio")

    def find_break_even(self, trust: str) -> BreakEven:
        """Estimate the break-even ε of a trust setting."""
        return estimate_break_even(
            np.array(self.request.epsilons),
            self.mean_over_silos(trust),
            self.test_train_ratio,
            monotone=self.monotone,
        )

    def verdict(self, break_even: BreakEven) -> str:
        """Describe a break-even, by the gains of the settings without noise and of the pooled model."""
        return describe_break_even(
            break_even, np.array(self.request.epsilons), self.mean_of("noiseless"), self.mean_of("pooled")
        )


@limit_to_one_thread()
def study_joining(request: JoiningRequest, report_progress: ProgressCallback = lambda _: None) -> JoiningResult:
    """Run the grid of a request for each split, and compare its models with the silos' local models.

    The grid has a run for each trust setting, ε, noise seed and combination of other swept keys.  Split 0 is the
    published one.  Splits in the user's cache are read and not run.

    Args:
        request: Scenario, grid and numbers of splits and seeds.
        report_progress: Receives lines of text.

    Raises:
        InputError: The grid or the numbers are invalid, or a cell cannot be run or compared.
    """
    grid = request.epsilons
    if not grid or not all(0.0 < e < math.inf for e in grid) or list(grid) != sorted(set(grid)):
        raise InputError(f"--epsilon: expected rising numbers above 0, found {', '.join(map(str, grid))}")
    if not _MIN_SEEDS <= request.seeds <= _MAX_SPLITS:
        raise InputError(f"--seeds {request.seeds}: at least {_MIN_SEEDS}, and at most {_MAX_SPLITS:,}")
    trusts = _choose_trusts(request)
    first = _load_grid(request, trusts[0], None, None)
    settings = [key for key in first.axes if key not in (_TRUST_KEY, _EPSILON_KEY)]
    # With several combinations of the other swept keys, one is chosen for each trust setting and ε.
    has_choice = len(list(itertools.product(*(first.axes[key] for key in settings)))) > 1
    cell = first.points[0].cell
    split_count = request.splits if request.splits is not None else cell.data.splits or 5
    if not 0 <= split_count <= _MAX_SPLITS:
        raise InputError(
            f"splits = {split_count}: at least 0, and at most {_MAX_SPLITS:,}, each of which runs the whole grid"
        )
    references = compute_references(cell, report_progress=report_progress)
    splits = []
    for number in range(split_count + 1):
        report_progress(f"split {number} of {split_count}")
        splits.append(_run_split(request, trusts, number or None, has_choice, report_progress))
    return JoiningResult(
        request,
        cell.name,
        cell.privacy.delta,
        references.of,
        references.metric,
        int(np.median([silo.train for silo in references.silos])),
        trusts,
        has_choice,
        splits[0],
        tuple(splits[1:]),
        budget_shares(cell),
    )


def _choose_trusts(request: JoiningRequest) -> tuple[str, ...]:
    """Return the requested trust settings, or without a request those with which a grid can be loaded.

    A curator, who has all records in one place, is left out of the latter.

    Raises:
        InputError: No setting is requested, and no grid can be loaded (`_load_grid`), or only with a curator.
    """
    if request.trusts:
        return request.trusts
    row = load_scenario(request.scenario, request.overrides).points[0].cell.algorithm.row
    possible_trusts = []
    for trust in row.trusts:
        try:
            if trust != CURATOR.name:
                _load_grid(request, trust, None, None)
                possible_trusts.append(trust)
        except InputError:
            continue
    if not possible_trusts:
        raise InputError(
            f"{request.scenario}: cannot be compared here; name a trust setting by --trust to see why"
        )
    return tuple(possible_trusts)


def _load_grid(request: JoiningRequest, trust: str, split: int | None, spared: float | None) -> Scenario:
    """Load the grid of one trust setting: the scenario at each ε of the request, for each seed.

    Other keys that the scenario sweeps stay swept.  Seeds are the scenario's first ones, and as many more as the
    request needs.  A run has one evaluation.

    Args:
        request: Scenario, its overrides, and the grid.
        trust: Trust setting.
        split: Number of the split, or None for the scenario's own.
        spared: Fraction of the training records that runs do not read, or None for the scenario's own.

    Raises:
        InputError: The scenario cannot be run with the grid, or its settings differ in records, model or privacy.
    """
    loaded = load_scenario(request.scenario, request.overrides)
    seeds = [
        *loaded.seeds[: request.seeds],
        *(max(loaded.seeds) + offset for offset in range(1, request.seeds - len(loaded.seeds) + 1)),
    ]
    keys = [
        f'{_TRUST_KEY}=["{trust}"]',
        f"{_EPSILON_KEY}={list(request.epsilons)}",
        f"seeds={seeds}",
        "run.evaluations=1",
        *([] if split is None else [f"data.split={split}"]),
        *([] if spared is None else [f"data.spared={spared}"]),
    ]
    grid = load_scenario(request.scenario, [*request.overrides, *keys])
    # Silos' records, local models and δ are those of the first cell with each seed, so that settings may not
    # differ in these.
    fixed_keys = {
        json.dumps(
            [
                cell.seed,
                tree["data"],
                tree["model"],
                {key: value for key, value in tree["privacy"].items() if key != "epsilon"},
                [cell.schedule.batches_per_silo * batch for batch in cell.batch_sizes],
                cell.federation.clients,
            ],
            sort_keys=True,
        )
        for cell, tree in ((point.cell, point.cell.canonical_data()) for point in grid.points)
    }
    if len(fixed_keys) > len(grid.seeds):
        raise InputError(
            f"{request.scenario}: settings to choose from differ in [data], [model], silos' numbers of records "
            "or [privacy]; give swept keys that change these one value each by --set"
        )
    return grid


def _run_split(
    request: JoiningRequest,
    trusts: Sequence[str],
    number: int | None,
    has_choice: bool,
    report_progress: ProgressCallback,
) -> SplitGains:
    """Run the grid of split `number`, None for the published one, or read the result from the cache.

    Compared are the models of the chosen cells, personal models if they are requested, and the pooled model.  The
    cells of the first trust setting and the largest ε are also run without noise.

    Returns:
        Scores and gains of all models of the split.

    Raises:
        InputError: A cell cannot be run, a run fails, a model cannot be compared, or seeds leave different numbers
            of silos with records.
    """
    # Make an evaluator for each noise seed, which compares a model with the silos' local models.
    grids = {trust: _load_grid(request, trust, number, None) for trust in trusts}
    first = grids[trusts[0]].points[0].cell
    seeds = grids[trusts[0]].seeds
    check_record_count(first)
    seed_cells = {seed: resolve_cell({**first.canonical_data(), "seed": seed}, first.name) for seed in seeds}
    evaluators: dict[int, GainEvaluator] = {}
    for seed in seeds:
        silo_rows = zip(partition_records(seed_cells[seed]), partition_records(seed_cells[seeds[0]]), strict=True)
        # Seeds that give silos the same records differ in the noise only, and share an evaluator.
        if evaluators and all(torch.equal(seed_rows, first_rows) for seed_rows, first_rows in silo_rows):
            evaluators[seed] = evaluators[seeds[0]]
        else:
            evaluators[seed] = make_evaluator(
                seed_cells[seed], compute_references(seed_cells[seed], report_progress=report_progress)
            )
    if len({len(evaluator.silos) for evaluator in evaluators.values()}) > 1:
        raise InputError(
            "worth: seeds leave different numbers of silos with records; give fewer --seeds, or larger silos"
        )
    # Look for the result in the cache, under the digest of all cells.
    records = hashlib.sha256("".join(digest_silos(evaluators[seed].silos) for seed in seeds).encode()).hexdigest()
    cells = {
        trust: {
            (point.swept_values[_EPSILON_KEY], point.cell.seed, _setting_text(point.swept_values)): point.cell
            for point in grid.points
        }
        for trust, grid in grids.items()
    }
    cell_texts = [_cell_text(cell) for cells_by_key in cells.values() for cell in cells_by_key.values()]
    key = hashlib.sha256(
        json.dumps([cache_key(first), cell_texts, request.with_personal, _SPARED_SHARE]).encode()
    ).hexdigest()
    if (tree := read_cached("worth", key, records)) is not None:
        try:
            return _restore_split(tree, trusts, (len(request.epsilons), len(seeds)), request.with_personal)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            pass  # damaged, or written by another version: compute it again
    # Choose the cells, and train their models with noise, without noise and, if requested, as personal ones.
    chosen_cells = (
        _choose_cells(request, trusts, number, cells, evaluators, report_progress)
        if has_choice
        else _fixed_cells(cells, request.epsilons)
    )
    cells_to_run = [
        cells[trust][cell]
        for trust in trusts
        for cells_by_key in chosen_cells[trust].values()
        for cell in cells_by_key.values()
    ]
    report_progress(f"{len(cells_to_run)} runs")
    models = _train_models(cells_to_run)
    largest_epsilon_keys = chosen_cells[trusts[0]][request.epsilons[-1]]
    noiseless_cells = {seed: _without_noise(cells[trusts[0]][largest_epsilon_keys[seed]]) for seed in seeds}
    noiseless_models = _train_models(list(noiseless_cells.values()))
    personal_gains, judged = (
        _personal_gains(request, trusts, chosen_cells, cells, evaluators, report_progress)
        if request.with_personal
        else ({}, "")
    )
    # Judge all models on the silos' test records, and store the result.
    gains = {
        trust: [
            [
                evaluators[seed].evaluate(models[_cell_text(cells[trust][chosen_cells[trust][epsilon][seed]])])
                for seed in seeds
            ]
            for epsilon in request.epsilons
        ]
        for trust in trusts
    }

    def means(name: str) -> dict[str, NDArray[np.float64]]:
        return {
            trust: np.array([[np.mean(getattr(figures, name)) for figures in row] for row in rows])
            for trust, rows in gains.items()
        }

    pooled_gains = evaluators[seeds[0]].evaluate(fit_pooled_model(seed_cells[seeds[0]]))
    references = evaluators[seeds[0]].references
    scores = np.array([silo.score for silo in references.silos])
    split = SplitGains(
        float(np.mean([evaluators[seed].references.mean_score for seed in seeds])),
        float(np.mean([silo.balanced for silo in references.silos])),
        means("released"),
        means("recalibrated"),
        {trust: np.array([[figures.gains for figures in row] for row in rows]) for trust, rows in gains.items()},
        personal_gains,
        judged,
        np.array(
            [evaluators[seed].evaluate(noiseless_models[_cell_text(noiseless_cells[seed])]).gain for seed in seeds]
        ),
        pooled_gains.gain,
        float(np.mean(np.array(pooled_gains.recalibrated) - scores)),
        references.test_train_ratio,
        np.array([silo.test for silo in references.silos]),
        tuple(silo.name for silo in references.silos),
    )
    write_cached("worth", key, records, _split_data(split))
    return split


def _setting_text(swept: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in swept.items() if key not in (_TRUST_KEY, _EPSILON_KEY)})


CellKey = tuple[float, int, str]
"""Tuple of ε, seed and the other swept keys as JSON."""
ChosenCells = dict[str, dict[float, dict[int, CellKey]]]
"""Key of the chosen cell by trust, by ε of the grid, and by seed."""


def _fixed_cells(cells: Mapping[str, Mapping[CellKey, Cell]], epsilons: Sequence[float]) -> ChosenCells:
    return {
        trust: {epsilon: {seed: (e, seed, s) for e, seed, s in keys if e == epsilon} for epsilon in epsilons}
        for trust, keys in cells.items()
    }


def _choose_cells(
    request: JoiningRequest,
    trusts: Sequence[str],
    number: int | None,
    cells: Mapping[str, Mapping[CellKey, Cell]],
    evaluators: Mapping[int, GainEvaluator],
    report_progress: ProgressCallback,
) -> ChosenCells:
    """Choose the best setting for each trust and ε, by its mean score over seeds on spared records.

    Candidates at ε are the settings of this ε and of smaller ones.  They are trained on about four fifths of the
    training records of split `number`, and judged on the spared others, as a mean over silos.

    Returns:
        The key (ε, seed, setting as JSON) of the chosen cell by trust, ε of the grid, and seed.  The cell's ε may
        be smaller than that of the grid.

    Raises:
        InputError: A candidate cannot be run, as in a partition that cannot spare records, its run fails, or no
            record is spared.
    """
    chosen_cells: ChosenCells = {}
    for trust in trusts:
        grid = _load_grid(request, trust, number, _SPARED_SHARE)
        report_progress(f"{len(grid.points)} candidates, {trust}")
        spared_cells = {
            (point.swept_values[_EPSILON_KEY], point.cell.seed, _setting_text(point.swept_values)): point.cell
            for point in grid.points
        }
        models = _train_models(list(spared_cells.values()))
        scores: dict[tuple[float, str], list[float]] = {}
        for (epsilon, seed, setting), cell in spared_cells.items():
            scores.setdefault((epsilon, setting), []).append(
                _score_on_spared(evaluators[seed], cell, models[_cell_text(cell)])
            )
        seeds = sorted({seed for _, seed, _ in cells[trust]})
        chosen_cells[trust] = {}
        for epsilon in request.epsilons:
            mean_scores = {
                (smaller, setting): float(np.mean(seed_scores))
                for (smaller, setting), seed_scores in scores.items()
                if smaller <= epsilon
            }
            best_epsilon, setting = max(mean_scores, key=lambda key: mean_scores[key])
            chosen_cells[trust][epsilon] = {seed: (best_epsilon, seed, setting) for seed in seeds}
    return chosen_cells


def _score_on_spared(evaluator: GainEvaluator, cell: Cell, model: Floats) -> float:
    """Return the mean score on training records that the candidate did not read.

    The mean is over the silos that have such records.

    Raises:
        InputError: No silo has such records.
    """
    spared = [
        Records(*(column[np.flatnonzero(~is_seen)] for column in silo.train))
        for silo, is_seen in zip(evaluator.silos, find_seen_rows(cell, evaluator.silos), strict=True)
        if is_seen is not None and not is_seen.all()
    ]
    if not spared:
        raise InputError("worth: no record is spared to choose a setting by; give each swept key one value")
    return float(np.mean([score_model(evaluator.objective, model, records) for records in spared]))


def _personal_gains(
    request: JoiningRequest,
    trusts: Sequence[str],
    chosen_cells: ChosenCells,
    cells: Mapping[str, Mapping[CellKey, Cell]],
    evaluators: Mapping[int, GainEvaluator],
    report_progress: ProgressCallback,
) -> tuple[dict[str, NDArray[np.float64]], str]:
    """Return gains of personal models, (ε, seeds) by trust, and the kind of records by which λ was chosen.

    A personal model is a local one that is pulled with weight λ towards the released model of a chosen cell.  If
    the partition allows it, the cell is run again without a fifth of the records, and λ is chosen on these
    ("spared").  Otherwise, and at a silo with few of these records, λ is chosen by cross-validation ("folds").
    The kind that is returned is "folds" if any silo used folds for any cell.

    Raises:
        InputError: A cell cannot be run without a fifth of the records, or a run fails.
    """
    can_spare = cells[trusts[0]][next(iter(cells[trusts[0]]))].data.partition in ("iid", "site")
    gains, kinds = {trust: np.empty((len(request.epsilons), len(evaluators))) for trust in trusts}, set()
    for trust in trusts:
        for row, epsilon in enumerate(request.epsilons):
            for column, (seed, evaluator) in enumerate(evaluators.items()):
                cell = cells[trust][chosen_cells[trust][epsilon][seed]]
                cell = (
                    resolve_cell(replace_data_keys(cell, spared=_SPARED_SHARE), cell.name) if can_spare else cell
                )
                report_progress(f"personal, {trust}, epsilon = {format_upper(epsilon, 3)}")
                scores, _, kind = evaluator.evaluate_personal(_train_models([cell])[_cell_text(cell)], cell)
                kinds.add(kind)
                gains[trust][row, column] = float(np.mean(scores)) - evaluator.references.mean_score
    return gains, min(kinds)  # "folds" if any was chosen on folds


def _without_noise(cell: Cell) -> Cell:
    """Return the cell for the same rounds without noise, with the same clip norm and step keys.

    An algorithm that derives its step from the noise derives another step.  Masks need noise, so a masked cell
    becomes one with a trusted server.
    """
    tree = cell.canonical_data()
    privacy = {key: value for key, value in tree["privacy"].items() if key not in (*PRIVACY_TARGETS, "shares")}
    trust = "trusted" if cell.algorithm.trust_setting.masked else cell.algorithm.trust
    algorithm = {**tree["algorithm"], "trust": trust}
    return resolve_cell({**tree, "privacy": {**privacy, "mode": "none"}, "algorithm": algorithm}, cell.name)


def _cell_text(cell: Cell) -> str:
    return json.dumps(cell.canonical_data(), sort_keys=True)


def _train_models(cells: Sequence[Cell]) -> dict[str, Floats]:
    """Return the published model of each cell by its canonical text, where equal cells are run once.

    Raises:
        InputError: A run fails.
    """
    distinct_cells = list({_cell_text(cell): cell for cell in cells}.values())
    try:
        outcomes = list(make_engine("vectorized")(distinct_cells, RunObserver()))
    except FedprivError as error:
        raise InputError(f"worth: a run of the grid could not be finished: {error}") from None
    return {
        _cell_text(distinct_cells[run_outcome.index]): run_outcome.cell_outcome.model.astype(np.float64)
        for run_outcome in outcomes
    }


_BY_TRUST = ("released", "recalibrated", "gains", "personal")


def _split_data(split: SplitGains) -> dict[str, Any]:
    tree = dict(vars(split))
    for name in _BY_TRUST:
        tree[name] = {trust: values.tolist() for trust, values in tree[name].items()}
    return {**tree, "noiseless": split.noiseless.tolist(), "tests": split.tests.tolist()}


def _restore_split(
    tree: Mapping[str, Any], trusts: Sequence[str], shape: tuple[int, int], has_personal: bool
) -> SplitGains:
    """Restore a cached split, and check its form and figures, since the file may be damaged.

    `shape` has the numbers of ε and of seeds.

    Raises:
        ValueError: A figure is not finite, a silo has no test record, or an array has another shape.
        KeyError, TypeError, AttributeError, OverflowError: The tree has another form.
    """
    fields = {name: tree[name] for name in SplitGains.__dataclass_fields__}
    names, texts = tuple(tree["names"]), [fields["judged"]]
    silos, trust_shapes = (len(names),), dict.fromkeys(trusts, shape)
    shapes = {
        "released": trust_shapes,
        "recalibrated": trust_shapes,
        "gains": dict.fromkeys(trusts, (*shape, *silos)),
    }
    shapes["personal"] = trust_shapes if has_personal else {}
    for name, by_trust in shapes.items():
        fields[name] = {trust: np.array(values, np.float64) for trust, values in fields[name].items()}
        if {trust: values.shape for trust, values in fields[name].items()} != by_trust:
            raise ValueError(name)
    fields |= {"noiseless": np.array(tree["noiseless"], np.float64), "tests": np.array(tree["tests"], np.int64)}
    figures = [fields[name] for name in ("alone", "balanced", "pooled", "own_intercept", "ratio", "noiseless")]
    figures += [values for name in _BY_TRUST for values in fields[name].values()]
    if not (
        all(np.isfinite(values).all() for values in figures)
        and silos[0]
        and fields["noiseless"].shape == shape[1:]
        and fields["tests"].shape == silos
        and fields["tests"].min() >= 1
        and all(isinstance(text, str) for text in (*names, *texts))
    ):
        raise ValueError("figures, shapes, counts or names")
    return SplitGains(**{**fields, "names": names})
