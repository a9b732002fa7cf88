"""The gain of joining against ε: released models of many splits of the records, beside each silo alone.

For every split, trust setting, ε and noise seed one cell is run, on an engine like any other, and its model is
judged on the silos' own test records.  Where the scenario sweeps other keys, these are settings to choose from: in
each split, on a fifth of the training records that the candidates did not read.  Settings at ε may be any of a
smaller ε, with its noise, since what holds there holds at a larger one.  With one setting nothing is chosen.

What a split gave is kept in the user's cache, for its owner alone, so that a study that was stopped goes on.
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
"""Splits, and seeds of each: a split is a grid of runs and takes seconds to minutes."""
_MIN_SEEDS = 2
_TRUST_KEY, _EPSILON_KEY = "algorithm.trust", "privacy.epsilon"
ProgressCallback = Callable[[str], None]


@dataclass(frozen=True)
class JoiningRequest:
    """What is asked: a scenario with overrides, the grid, and how many splits and noise seeds."""

    scenario: Path
    overrides: tuple[str, ...]
    trusts: tuple[str, ...]
    """Empty: all that the scenario can have."""
    epsilons: tuple[float, ...]
    splits: int | None
    """0 is the published split alone; None what the scenario says, 5 without a word."""
    seeds: int = _MIN_SEEDS
    with_personal: bool = False
    """Whether personal models are fitted, too."""


@dataclass(frozen=True)
class SplitGains:
    """What one split gave; arrays are means over silos unless said otherwise."""

    alone: float
    balanced: float
    released: Mapping[str, NDArray[np.float64]]
    """By trust: (ε, seeds)."""
    recalibrated: Mapping[str, NDArray[np.float64]]
    gains: Mapping[str, NDArray[np.float64]]
    """By trust: (ε, seeds, silos)."""
    personal: Mapping[str, NDArray[np.float64]]
    """By trust: the gain of personal models, (ε, seeds); empty where nobody asked."""
    judged: str
    noiseless: NDArray[np.float64]
    """The gain of the same rounds without noise, with the settings of the largest ε: (seeds,)."""
    pooled: float
    own_intercept: float
    """The gain of the model of all silos' records, without noise, and of it with intercepts fitted at home."""
    ratio: float
    tests: NDArray[np.int64]
    names: tuple[str, ...]


@dataclass(frozen=True)
class JoiningResult:
    """Splits 1 … n of a question, and the published one apart."""

    request: JoiningRequest
    name: str
    delta: float
    silos: int
    metric: str
    records: int
    """Training records of a silo, the median."""
    trusts: tuple[str, ...]
    monotone: bool
    published: SplitGains
    splits: tuple[SplitGains, ...]
    shares: Mapping[str, float]
    """`budget_shares` the scenario."""

    def averaged_splits(self) -> tuple[SplitGains, ...]:
        """The splits that means are taken over: the drawn ones, or the published one where none is drawn."""
        return self.splits or (self.published,)

    def mean_over_silos(self, trust: str, name: str = "gains") -> NDArray[np.float64]:
        """Means over silos of a figure of every split, (ε, splits, seeds)."""
        values = [getattr(split, name)[trust] for split in self.averaged_splits()]
        return np.stack([each.mean(axis=2) if each.ndim == 3 else each for each in values], axis=1)

    def mean_of(self, name: str) -> float:
        """The mean over splits of a figure of `Split`."""
        return float(np.mean([np.mean(getattr(split, name)) for split in self.averaged_splits()]))

    @property
    def test_train_ratio(self) -> float:
        return self.mean_of("ratio")

    def find_break_even(self, trust: str) -> BreakEven:
        return estimate_break_even(
            np.array(self.request.epsilons),
            self.mean_over_silos(trust),
            self.test_train_ratio,
            monotone=self.monotone,
        )

    def verdict(self, found: BreakEven) -> str:
        """The words for a break-even of one of its trust settings."""
        grid = np.array(self.request.epsilons)
        return describe_break_even(found, grid, self.mean_of("noiseless"), self.mean_of("pooled"))


@limit_to_one_thread()
def study_joining(request: JoiningRequest, report_progress: ProgressCallback = lambda _: None) -> JoiningResult:
    """Answer a question; InputError for what cannot be run or compared."""
    grid = request.epsilons
    if not grid or not all(0.0 < e < math.inf for e in grid) or list(grid) != sorted(set(grid)):
        raise InputError(f"--epsilon: expected rising numbers above 0, found {', '.join(map(str, grid))}")
    if request.seeds > _MAX_SPLITS:
        raise InputError(f"--seeds {request.seeds}: at most {_MAX_SPLITS:,}")
    trusts = _choose_trusts(request)
    first = _load_grid(request, trusts[0], None, None)
    settings = [key for key in first.axes if key not in (_TRUST_KEY, _EPSILON_KEY)]
    choice = len(list(itertools.product(*(first.axes[key] for key in settings)))) > 1
    cell = first.points[0].cell
    asked = request.splits if request.splits is not None else cell.data.splits or 5
    if asked > _MAX_SPLITS:
        raise InputError(f"splits = {asked}: at most {_MAX_SPLITS:,}, each of which runs the whole grid")
    known = compute_references(cell, report_progress=report_progress)
    found = []
    for number in range(asked + 1):
        report_progress(f"split {number} of {asked}")
        found.append(_run_split(request, trusts, number or None, choice, report_progress))
    return JoiningResult(
        request,
        cell.name,
        cell.privacy.delta,
        known.of,
        known.metric,
        int(np.median([silo.train for silo in known.silos])),
        trusts,
        choice,
        found[0],
        tuple(found[1:]),
        budget_shares(cell),
    )


def _choose_trusts(question: JoiningRequest) -> tuple[str, ...]:
    """Those asked for, or all that the scenario can be run with, curators apart."""
    if question.trusts:
        return question.trusts
    row = load_scenario(question.scenario, question.overrides).points[0].cell.algorithm.row
    able = []
    for trust in row.trusts:
        try:
            if trust != CURATOR.name:
                _load_grid(question, trust, None, None)
                able.append(trust)
        except InputError:
            continue
    if not able:
        raise InputError(f"{question.scenario}: cannot be run with an epsilon; say --trust to see why")
    return tuple(able)


def _load_grid(question: JoiningRequest, trust: str, split: int | None, spared: float | None) -> Scenario:
    """The grid of one trust setting, of one split."""
    loaded = load_scenario(question.scenario, question.overrides)
    seeds = loaded.seeds[: question.seeds]
    seeds += [max(loaded.seeds) + more for more in range(1, question.seeds - len(seeds) + 1)]
    keys = [
        f'{_TRUST_KEY}=["{trust}"]',
        f"{_EPSILON_KEY}={list(question.epsilons)}",
        f"seeds={seeds}",
        "run.evaluations=1",
        *([] if split is None else [f"data.split={split}"]),
        *([] if spared is None else [f"data.spared={spared}"]),
    ]
    grid = load_scenario(question.scenario, [*question.overrides, *keys])
    if any(f"privacy.{other}" in grid.axes for other in PRIVACY_TARGETS if other != "epsilon"):
        raise InputError(f"{question.scenario}: sweeps another target of privacy than epsilon; leave it out")
    return grid


def _run_split(
    question: JoiningRequest, trusts: Sequence[str], number: int | None, choice: bool, say: ProgressCallback
) -> SplitGains:
    grids = {trust: _load_grid(question, trust, number, None) for trust in trusts}
    first = grids[trusts[0]].points[0].cell
    seeds = grids[trusts[0]].seeds
    check_record_count(first)
    heads = {seed: resolve_cell({**first.canonical_data(), "seed": seed}, first.name) for seed in seeds}
    benches: dict[int, GainEvaluator] = {}
    for seed in seeds:
        dealt = zip(partition_records(heads[seed]), partition_records(heads[seeds[0]]), strict=True)
        if benches and all(torch.equal(mine, its) for mine, its in dealt):  # seeds draw noise alone
            benches[seed] = benches[seeds[0]]
        else:
            benches[seed] = make_evaluator(heads[seed], compute_references(heads[seed], report_progress=say))
    if len({len(bench.silos) for bench in benches.values()}) > 1:
        raise InputError(
            "worth: seeds leave different numbers of silos with records; give --seeds 1, or larger silos"
        )
    records = hashlib.sha256("".join(digest_silos(benches[seed].silos) for seed in seeds).encode()).hexdigest()
    cells = {
        trust: {
            (point.swept_values[_EPSILON_KEY], point.cell.seed, _setting_text(point.swept_values)): point.cell
            for point in grid.points
        }
        for trust, grid in grids.items()
    }
    names = [_cell_text(cell) for at in cells.values() for cell in at.values()]
    key = hashlib.sha256(
        json.dumps([cache_key(first), names, question.with_personal, _SPARED_SHARE]).encode()
    ).hexdigest()
    if (tree := read_cached("worth", key, records)) is not None:
        try:
            return _restore_split(tree, trusts, (len(question.epsilons), len(seeds)), question.with_personal)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            pass  # of another version, or damaged: computed again
    taken = (
        _choose_cells(question, trusts, number, cells, benches, say)
        if choice
        else _fixed_cells(cells, question.epsilons)
    )
    wanted = [cells[trust][cell] for trust in trusts for at in taken[trust].values() for cell in at.values()]
    say(f"{len(wanted)} runs")
    models = _train_models(wanted)
    last = taken[trusts[0]][question.epsilons[-1]]
    quiet = {seed: _without_noise(cells[trusts[0]][last[seed]]) for seed in seeds}
    silent = _train_models(list(quiet.values()))
    own, judged = (
        _personal_gains(question, trusts, taken, cells, benches, say) if question.with_personal else ({}, "")
    )
    found = {
        trust: [
            [
                benches[seed].evaluate(models[_cell_text(cells[trust][taken[trust][epsilon][seed]])])
                for seed in seeds
            ]
            for epsilon in question.epsilons
        ]
        for trust in trusts
    }

    def means(name: str) -> dict[str, NDArray[np.float64]]:
        return {
            trust: np.array([[np.mean(getattr(each, name)) for each in row] for row in rows])
            for trust, rows in found.items()
        }

    united = benches[seeds[0]].evaluate(fit_pooled_model(heads[seeds[0]]))
    known = benches[seeds[0]].references
    scores = np.array([silo.score for silo in known.silos])
    split = SplitGains(
        float(np.mean([benches[seed].references.mean_score for seed in seeds])),
        float(np.mean([silo.balanced for silo in known.silos])),
        means("released"),
        means("recalibrated"),
        {trust: np.array([[each.gains for each in row] for row in rows]) for trust, rows in found.items()},
        own,
        judged,
        np.array([benches[seed].evaluate(silent[_cell_text(quiet[seed])]).gain for seed in seeds]),
        united.gain,
        float(np.mean(np.array(united.recalibrated) - scores)),
        known.test_train_ratio,
        np.array([silo.test for silo in known.silos]),
        tuple(silo.name for silo in known.silos),
    )
    write_cached("worth", key, records, _split_data(split))
    return split


def _setting_text(swept: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in swept.items() if key not in (_TRUST_KEY, _EPSILON_KEY)})


CellKey = tuple[float, int, str]
"""(ε, seed, the other swept keys)."""
ChosenCells = dict[str, dict[float, dict[int, CellKey]]]
"""By trust, by ε of the grid, by seed: the cell that stands there."""


def _fixed_cells(cells: Mapping[str, Mapping[CellKey, Cell]], epsilons: Sequence[float]) -> ChosenCells:
    return {
        trust: {epsilon: {seed: (e, seed, s) for e, seed, s in at if e == epsilon} for epsilon in epsilons}
        for trust, at in cells.items()
    }


def _choose_cells(
    question: JoiningRequest,
    trusts: Sequence[str],
    number: int | None,
    cells: Mapping[str, Mapping[CellKey, Cell]],
    benches: Mapping[int, GainEvaluator],
    say: ProgressCallback,
) -> ChosenCells:
    """At every ε the candidate of it or a smaller one that is best on spared records, the mean over seeds."""
    taken: ChosenCells = {}
    for trust in trusts:
        grid = _load_grid(question, trust, number, _SPARED_SHARE)
        say(f"{len(grid.points)} candidates, {trust}")
        spared = {
            (p.swept_values[_EPSILON_KEY], p.cell.seed, _setting_text(p.swept_values)): p.cell for p in grid.points
        }
        models = _train_models(list(spared.values()))
        scores: dict[tuple[float, str], list[float]] = {}
        for (epsilon, seed, setting), cell in spared.items():
            scores.setdefault((epsilon, setting), []).append(
                _score_on_spared(benches[seed], cell, models[_cell_text(cell)])
            )
        seeds = sorted({seed for _, seed, _ in cells[trust]})
        taken[trust] = {}
        for epsilon in question.epsilons:
            allowed = {key: float(np.mean(each)) for key, each in scores.items() if key[0] <= epsilon}
            best, setting = max(allowed, key=lambda key: allowed[key])
            taken[trust][epsilon] = {seed: (best, seed, setting) for seed in seeds}
    return taken


def _score_on_spared(bench: GainEvaluator, cell: Cell, model: Floats) -> float:
    """The mean over silos of the score on training records that the candidate did not read."""
    spared = [
        Records(*(column[np.flatnonzero(~seen)] for column in held.train))
        for held, seen in zip(bench.silos, find_seen_rows(cell, bench.silos), strict=True)
        if seen is not None and not seen.all()
    ]
    return float(np.mean([score_model(bench.objective, model, records) for records in spared]))


def _personal_gains(
    question: JoiningRequest,
    trusts: Sequence[str],
    taken: ChosenCells,
    cells: Mapping[str, Mapping[CellKey, Cell]],
    benches: Mapping[int, GainEvaluator],
    say: ProgressCallback,
) -> tuple[dict[str, NDArray[np.float64]], str]:
    """Gains of personal models of releases that did not read a fifth of the records, by which λ is chosen."""
    can = cells[trusts[0]][next(iter(cells[trusts[0]]))].data.partition in ("iid", "site")
    found, judged = {}, ""
    for trust in trusts:
        found[trust] = np.empty((len(question.epsilons), len(benches)))
        for row, epsilon in enumerate(question.epsilons):
            for column, (seed, bench) in enumerate(benches.items()):
                cell = cells[trust][taken[trust][epsilon][seed]]
                cell = resolve_cell(replace_data_keys(cell, spared=_SPARED_SHARE), cell.name) if can else cell
                say(f"personal, {trust}, epsilon = {format_upper(epsilon, 3)}")
                scores, _, judged = bench.evaluate_personal(_train_models([cell])[_cell_text(cell)], cell)
                found[trust][row, column] = float(np.mean(scores)) - bench.references.mean_score
    return found, judged


def _without_noise(cell: Cell) -> Cell:
    """The same rounds without noise: clip and steps as they are; masks need noise, so a server is trusted."""
    tree = cell.canonical_data()
    privacy = {key: value for key, value in tree["privacy"].items() if key not in (*PRIVACY_TARGETS, "shares")}
    trust = "trusted" if cell.algorithm.trust_setting.masked else cell.algorithm.trust
    algorithm = {**tree["algorithm"], "trust": trust}
    return resolve_cell({**tree, "privacy": {**privacy, "mode": "none"}, "algorithm": algorithm}, cell.name)


def _cell_text(cell: Cell) -> str:
    return json.dumps(cell.canonical_data(), sort_keys=True)


def _train_models(cells: Sequence[Cell]) -> dict[str, Floats]:
    """The published model of every cell, by its canonical text; equal cells are run once."""
    once = list({_cell_text(cell): cell for cell in cells}.values())
    try:
        outcomes = list(make_engine("vectorized")(once, RunObserver()))
    except FedprivError as error:
        raise InputError(f"worth: a run of the grid could not be finished: {error}") from None
    return {_cell_text(once[each.index]): each.cell_outcome.model.astype(np.float64) for each in outcomes}


_BY_TRUST = ("released", "recalibrated", "gains", "personal")


def _split_data(split: SplitGains) -> dict[str, Any]:
    tree = dict(vars(split))
    for name in _BY_TRUST:
        tree[name] = {trust: values.tolist() for trust, values in tree[name].items()}
    return {**tree, "noiseless": split.noiseless.tolist(), "tests": split.tests.tolist()}


def _restore_split(
    tree: Mapping[str, Any], trusts: Sequence[str], shape: tuple[int, int], own: bool
) -> SplitGains:
    """The split that was kept; ValueError for numbers that cannot be its figures, (ε, seeds) by `shape`."""
    fields = {name: tree[name] for name in SplitGains.__dataclass_fields__}
    names, told = tuple(tree["names"]), [fields["judged"]]
    silos, wanted = (len(names),), dict.fromkeys(trusts, shape)
    shapes = {"released": wanted, "recalibrated": wanted, "gains": dict.fromkeys(trusts, (*shape, *silos))}
    shapes["personal"] = wanted if own else {}
    for name, by_trust in shapes.items():
        fields[name] = {trust: np.array(values, np.float64) for trust, values in fields[name].items()}
        if {trust: values.shape for trust, values in fields[name].items()} != by_trust:
            raise ValueError(name)
    fields |= {"noiseless": np.array(tree["noiseless"], np.float64), "tests": np.array(tree["tests"], np.int64)}
    figures = [fields[name] for name in ("alone", "balanced", "pooled", "own_intercept", "ratio", "noiseless")]
    figures += [values for name in _BY_TRUST for values in fields[name].values()]
    if not all(np.isfinite(values).all() for values in figures):
        raise ValueError("figures")
    if not silos[0] or fields["noiseless"].shape != shape[1:] or fields["tests"].shape != silos:
        raise ValueError("shapes")
    if fields["tests"].min() < 1 or not all(isinstance(text, str) for text in (*names, *told)):
        raise ValueError("counts or names")
    return SplitGains(**{**fields, "names": names})
