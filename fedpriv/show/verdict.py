"""Description of a run in a paragraph, and comparison of two runs.

The paragraph names the model, its scores at the best setting and at the most private ones, the privacy, and
whether the noise is secret.  Beside it a report lists the parties with their knowledge, and ε of repeated runs.
Two runs are compared by settings, and seed by seed by scores.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedpriv.accounting.gaussian import compose, epsilon_of
from fedpriv.claims.claim import describe_guess
from fedpriv.claims.ledger import stream_from_data
from fedpriv.core.errors import InputError
from fedpriv.core.figures import (
    format_count_range,
    format_epsilon_delta,
    format_upper,
    format_upper_epsilon,
    format_with_spread,
)
from fedpriv.core.random import SERVER
from fedpriv.noise.trust import CLIENT, RECORD, USER, find_trust
from fedpriv.papers.table import ALGORITHMS
from fedpriv.scenario.published import flatten_keys
from fedpriv.show.summary import (
    METRICS,
    Metric,
    cells_at_point,
    describe_no_better_points,
    format_point,
    format_value,
    group_by,
    mean_and_deviation,
    run_metrics,
    short_names,
    summarize,
    sweep_points,
)
from fedpriv.study.results import Results, read_results

RUN_COUNTS = (1, 2, 5, 10, 50)
_UNIT_NAMES = (CLIENT.name, USER.name, RECORD.name)
_MAX_LEVELS = 6  # levels of μ in the table of repeated runs


@dataclass(frozen=True)
class PartyView:
    """Data that a party holds, and messages that it sees."""

    who: str
    """Name of the party, such as "the server (untrusted)"."""
    holds: str
    sees: str


def describe_run(results: Results) -> str:
    """Describe training, scores and privacy of a run, and whether its noise is secret, in one paragraph.

    Noise is secret in a release, and has a public seed in a simulation.  A run with cells of both kinds is said
    to be protected.  A run of simulated and noiseless cells has no sentence on its noise.
    """
    if not results.cells:
        return "No cell is finished yet."
    sentences = [
        _describe_training(results),
        _describe_scores(results),
        *filter(None, [describe_no_better_points(results), _describe_privacy(results)]),
    ]
    kinds = {cell["noise"] for cell in results.cells}
    if kinds == {"simulation"}:
        sentences.append(
            "This was a simulation with seeded noise: it protects nobody. A deployment with these settings has "
            "these figures."
        )
    elif "release" in kinds:
        sentences.append(
            "The noise was drawn with secret keys of the operating systems, so these releases are protected."
        )
    return " ".join(sentences)


def _describe_training(results: Results) -> str:
    """Name algorithms, model, data, participants and rounds in a sentence."""
    rows = dict.fromkeys(cell["scenario"]["algorithm"]["name"] for cell in results.cells)
    titles = [ALGORITHMS[name].title if name in ALGORITHMS else name for name in rows]
    algorithms = " and ".join(titles) if len(titles) < 3 else f"{len(titles)} algorithms"
    scenario = results.cells[0]["scenario"]
    training = f"{scenario['model']['name']} on {scenario['data']['name']}"
    rounds = format_count_range(cell["rounds"] for cell in results.cells)
    return f"{algorithms} trained {training}: {_describe_participants(results)}, {rounds} rounds."


def _describe_participants(results: Results) -> str:
    """Format the number of silos, or of clients with their cohort in a round."""
    if all("clients" in cell for cell in results.cells):
        clients, cohorts = (
            format_count_range(cell[key] for cell in results.cells) for key in ("clients", "batch")
        )
        return f"{clients} clients, cohorts of {cohorts}"
    silos = format_count_range(cell["silos"] for cell in results.cells)
    return f"{silos} {'silo' if silos == '1' else 'silos'}"


def _describe_scores(results: Results) -> str:
    """Describe the best score, and, of several strengths, the best score at each strictest one.

    A score is the mean over seeds at a sweep point: the largest accuracy, or the smallest value of the first
    metric if the run has no accuracy.  A strength is strictest if no other strength is stronger
    (`Strength.is_stronger_than`).
    """
    metric = next(
        (candidate for candidate in run_metrics(results) if candidate.key == "test_accuracy"),
        run_metrics(results)[0],
    )
    finished = [point for point in sweep_points(results) if cells_at_point(results, point)]
    best_point = _best_point(results, finished, metric)
    text = (
        f"Best: {metric.title.removesuffix(' (%)')} {_format_mean(results, best_point, metric)}"
        f"{_describe_point(results, best_point)}."
    )
    strengths = {strength for point in finished if (strength := _find_strength(results, point)) is not None}
    if len(strengths) < 2:
        return text
    strictest = sorted(
        candidate
        for candidate in strengths
        if not any(stronger.is_stronger_than(candidate) for stronger in strengths)
    )
    for rank, strength in enumerate(strictest):
        optimum = _best_point(results, [p for p in finished if _find_strength(results, p) == strength], metric)
        heading = "Most private" if rank == 0 else "A smaller ε against fewer, or between other neighbours"
        text += f" {heading}: {_format_mean(results, optimum, metric)}{_describe_point(results, optimum)}."
    return text


class Strength(NamedTuple):
    """Strength of a guarantee, whose smaller fields are stronger.

    Sorting puts less trust before a smaller ε.
    """

    trust: int
    """Level of trust that a silo has to place in others."""
    unit: int
    """0 clients, 1 persons, 2 records."""
    relation: int
    """0 for replace-one and 1 for zero-out, where the same figure protects half as well."""
    leakage: float
    """ε, or μ if the cells have several δ and all of them have a μ."""
    delta: float
    """δ of `leakage`, or 0 if that is a μ."""

    def is_stronger_than(self, other: "Strength") -> bool:
        """Whether no field is larger than that of `other`, and some field is smaller."""
        return self != other and all(mine <= its for mine, its in zip(self, other, strict=True))


def _find_strength(results: Results, point: Mapping[str, Any]) -> Strength | None:
    """Return the strength of a finished sweep point, or None for a point without noise.

    Points are compared by ε if all cells with noise have the same δ.  If they have several δ, points are compared
    by μ, unless a cell with noise has no μ, and then by ε and δ.
    """
    cell = cells_at_point(results, point)[0]
    if cell["epsilon"] is None:
        return None
    noisy_cells = [noisy_cell for noisy_cell in results.cells if noisy_cell["epsilon"] is not None]
    compares_mu = len({noisy_cell["delta"] for noisy_cell in noisy_cells}) > 1 and all(
        noisy_cell["mu"] is not None for noisy_cell in noisy_cells
    )
    return Strength(
        find_trust(cell["trust"]).trust_level,
        _UNIT_NAMES.index(stream_from_data(cell["releases"][0]).unit.name),
        ("replace-one", "zero-out").index(cell["relation"]),
        float(format_upper(cell["mu"] if compares_mu else cell["epsilon"], 6)),
        0.0 if compares_mu else cell["delta"],
    )


def _describe_privacy(results: Results) -> str:
    """Describe μ by the best guess of an attacker, or the largest (ε, δ) if a cell has no μ.

    The best guess is the largest probability of guessing right which of two equally likely neighbours was used.
    If a cell has no noise, the text also says that such a cell protects nothing.
    """
    mus = [cell["mu"] for cell in results.cells if cell["mu"] is not None]
    unit = " or ".join(dict.fromkeys(cell["unit"] for cell in results.cells))
    if any(cell["epsilon"] is None for cell in results.cells):
        return " ".join([*([describe_guess(unit, mus)] if mus else []), "A cell without noise protects nothing."])
    if len(mus) < len(results.cells):
        epsilons = [cell["epsilon"] for cell in results.cells]
        largest_pair = format_epsilon_delta(max(epsilons), max(cell["delta"] for cell in results.cells))
        return f"Privacy: at most {largest_pair}, for {unit}."
    return describe_guess(unit, mus)


def list_party_views(results: Results) -> list[PartyView]:
    """List data and knowledge of the parties, for each trust setting of the run."""
    by_trust = group_by(results.cells, lambda cell: cell["trust"])
    return list(
        dict.fromkeys(holder for name, cells in by_trust.items() for holder in _party_views_of_trust(name, cells))
    )


def _party_views_of_trust(name: str, cells: Sequence[Mapping[str, Any]]) -> list[PartyView]:
    """List client or silo, server and public with their data and knowledge in a trust setting.

    Args:
        name: Name of the trust setting.
        cells: Cells under this trust setting.
    """
    trust = find_trust(name)
    shard_sizes = [round(cell["records"] / cell["silos"]) for cell in cells if "records" in cell]
    silo_records = (
        f"its own records ({format_count_range(shard_sizes)} on average)" if shard_sizes else "its own records"
    )
    has_secret_noise = all(cell["noise"] == "release" for cell in cells)
    key = "the key of its noise" if has_secret_noise else "noise from the scenario's seed"
    if all("clients" in cell for cell in cells):
        return [
            PartyView(
                f"each client ({name})", "its own records", "the model of the rounds in which it takes part"
            ),
            PartyView(f"the server ({name})", f"the test records, {key}", "what each client sends, without noise"),
            PartyView("everyone else", "nothing", "the models that are published"),
        ]
    if trust.adds_noise(SERVER):
        silo_view, server_view = silo_records, "every silo's sum without noise"
    elif trust.publishes_sums(0):
        silo_view, server_view = f"{silo_records}, {key}", "every silo's releases, noise included"
    else:
        silo_view = f"{silo_records}, {key}, the keys of its masks"
        server_view = "masked messages, and their sum with the noise of all silos"
    server = f"the test records, {key}" if trust.adds_noise(SERVER) else "the test records"
    return [
        PartyView(f"each silo ({name})", silo_view, "the model of every round"),
        PartyView(f"the server ({name})", server, server_view),
        PartyView("everyone else", "nothing", "the models that are published"),
    ]


def epsilon_of_repeated_runs(results: Results) -> list[list[str]]:
    """Return the rows of a table with ε of repeated runs on the same records.

    A row has a μ of the run, then ε at the run's δ for each number k of `RUN_COUNTS`, since k runs of μ-GDP are
    √k μ-GDP together.  Cells without a μ have no row.  Of more than `_MAX_LEVELS` different μ, the table lists the
    smallest and the largest ones.
    """
    cells_with_mu = [cell for cell in results.cells if cell["mu"] is not None]
    levels = sorted({(float(format_upper(cell["mu"])), cell["delta"]) for cell in cells_with_mu})
    listed_levels = (
        levels if len(levels) <= _MAX_LEVELS else [*levels[: _MAX_LEVELS // 2], *levels[-_MAX_LEVELS // 2 :]]
    )
    return [
        [format_upper(mu), *(format_upper_epsilon(epsilon_of(compose([mu] * runs), delta)) for runs in RUN_COUNTS)]
        for mu, delta in listed_levels
    ]


def _best_point(results: Results, among: Sequence[Mapping[str, Any]], metric: Metric) -> Mapping[str, Any]:
    choose = max if metric.key == "test_accuracy" else min
    return choose(among, key=lambda point: _mean_score(results, point, metric))


def _mean_score(results: Results, point: Mapping[str, Any], metric: Metric) -> float:
    return math.nan if (summary := summarize(cells_at_point(results, point), metric)) is None else summary.mean


def _format_mean(results: Results, point: Mapping[str, Any], metric: Metric) -> str:
    unit = " %" if metric.key == "test_accuracy" else ""
    return f"{_mean_score(results, point, metric):.{metric.digits}f}{unit}"


def _describe_point(results: Results, point: Mapping[str, Any]) -> str:
    cell = cells_at_point(results, point)[0]
    epsilon = "" if cell["epsilon"] is None else format_epsilon_delta(cell["epsilon"], cell["delta"])
    settings = {
        key: value
        for key, value in point.items()
        if len(results.axes[key]) > 1 and not (epsilon and key == "privacy.epsilon")
    }
    details = "; ".join(filter(None, [format_point(results, settings), epsilon]))
    return f" ({details})" if details else ""


_NOT_COMPARED = ("name", "title", "seed", "label")


@dataclass(frozen=True)
class RunComparison:
    """Table with a row for each common sweep point and metric, named by the first `label_count` columns."""

    settings: Sequence[tuple[str, str, str]]
    """Settings that differ between the first cells: key, value in the first run, value in the second."""
    header: Sequence[str]
    """Names of the columns."""
    body: Sequence[Sequence[str]]
    """Texts of each row."""
    label_count: int


def compare_folders(first: Path, second: Path) -> RunComparison:
    """Compare the runs of two folders.

    Cells of one seed share records and, scaled, noise.  So differences are taken seed by seed.  A row has the
    sweep point, the metric, the number of common seeds, the mean in each run, and the mean difference with its
    standard error.  The second run's sweep point is the only one that agrees in all keys which both runs sweep.

    Raises:
        InputError: If the runs have no finished sweep point and seed in common.
    """
    first_results, second_results = read_results(first), read_results(second)
    common = [key for key in first_results.axes if key in second_results.axes]
    rows = [
        [*(format_value(point[key]) for key in first_results.axes), metric.title, *_format_pairs(pairs, metric)]
        for point in sweep_points(first_results)
        for metric in METRICS
        if (pairs := _score_pairs(first_results, second_results, point, common, metric))
    ]
    if not rows:
        raise InputError(f"{first} and {second} have no finished sweep point and seed in common")
    names = list(short_names(first_results.axes).values())
    header = [*names, "metric", "seeds", "first", "second", "second - first"]
    return RunComparison(_setting_differences(first_results, second_results), header, rows, len(names) + 1)


def _score_pairs(
    first: Results, second: Results, point: Mapping[str, Any], common: Sequence[str], metric: Metric
) -> list[tuple[float, float]]:
    """Return the printed metric in both runs, a pair for each common seed of the point.

    The list is empty unless exactly one point of the second run has the values of the common axes.

    Args:
        first: Results of the first run.
        second: Results of the second run.
        point: Sweep point of the first run.
        common: Keys that both runs sweep.
        metric: Metric to compare.
    """
    matching = [
        other_cells
        for other_cells in sweep_points(second)
        if all(other_cells[key] == point[key] for key in common)
    ]
    if len(matching) != 1:
        return []
    other_cells = {cell["seed"]: cell for cell in cells_at_point(second, matching[0])}
    return [
        (metric.factor * cell[metric.key], metric.factor * other_cells[cell["seed"]][metric.key])
        for cell in cells_at_point(first, point)
        if cell["seed"] in other_cells and metric.key in cell and metric.key in other_cells[cell["seed"]]
    ]


def _format_pairs(pairs: Sequence[tuple[float, float]], metric: Metric) -> list[str]:
    mean, deviation = mean_and_deviation([second - first for first, second in pairs])
    error = None if deviation is None else deviation / math.sqrt(len(pairs))
    means = (
        format_with_spread(mean_and_deviation(values)[0], None, metric.digits)
        for values in zip(*pairs, strict=True)
    )
    return [str(len(pairs)), *means, format_with_spread(mean, error, metric.digits, signed=True)]


def _setting_differences(first_results: Results, second_results: Results) -> list[tuple[str, str, str]]:
    first, second = (
        dict(flatten_keys(results.cells[0]["scenario"])) for results in (first_results, second_results)
    )
    swept = {*first_results.axes, *second_results.axes}
    return [
        (key, format_value(first.get(key, "not set")), format_value(second.get(key, "not set")))
        for key in {**first, **second}
        if first.get(key) != second.get(key) and key not in swept and key.partition(".")[0] not in _NOT_COMPARED
    ]
