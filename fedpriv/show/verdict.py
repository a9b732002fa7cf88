"""Description of a run in a paragraph, and comparison of two runs.

An axis is a swept key of the scenario, and a sweep point has one value for each axis.  A cell is one run, a sweep
point with a seed, as a dictionary of results.json.  Cells without noise have no ε, and cells whose guarantee is a
curve of (ε, δ) have no μ.
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
    format_point,
    format_value,
    group_by,
    list_findings,
    mean_and_deviation,
    run_metrics,
    short_names,
    summarize,
    sweep_points,
)
from fedpriv.study.results import Results, read_results

RUN_COUNTS = (1, 2, 5, 10, 50)
_UNIT_NAMES = (CLIENT.name, USER.name, RECORD.name)
_MAX_LEVELS = 6  # pairs of μ and δ in the table of repeated runs
_NOISE_SENTENCES = {
    "simulation": "This was a simulation with seeded noise: it protects nobody. A deployment with these settings "
    "would have these figures.",
    "release": "The noise was drawn with secret keys of the operating systems, so the releases with noise are "
    "protected.",
    "release simulation": "Some cells drew their noise with secret keys of the operating systems, so their "
    "releases are protected. The other noise was simulated from a seed that is written in the results, and "
    "protects nobody.",
}
"""Sentence for each set of kinds of noise in a run, sorted, joined by spaces and without "none"."""


@dataclass(frozen=True)
class PartyView:
    """Data that a party holds, and messages or models that it sees."""

    who: str
    """Name of the party, such as "the server (untrusted)"."""
    holds: str
    sees: str


def describe_run(results: Results) -> str:
    """Describe training, scores and privacy of a run, and whether its noise is secret, in one paragraph."""
    if not results.cells:
        return "No cell is finished yet."
    kinds = " ".join(sorted({cell["noise"] for cell in results.cells} - {"none"}))
    sentences = (
        _describe_training(results),
        _describe_scores(results),
        *list_findings(results),
        _describe_privacy(results),
        _NOISE_SENTENCES.get(kinds),
    )
    return " ".join(filter(None, sentences))


def _describe_training(results: Results) -> str:
    """Describe algorithms, models, data sets, participants and rounds of the finished cells in a sentence."""
    rows = dict.fromkeys(cell["scenario"]["algorithm"]["name"] for cell in results.cells)
    titles = [ALGORITHMS[name].title if name in ALGORITHMS else name for name in rows]
    algorithms = " and ".join(titles) if len(titles) < 3 else f"{len(titles)} algorithms"
    models, data_sets = (
        " and ".join(dict.fromkeys(cell["scenario"][section]["name"] for cell in results.cells))
        for section in ("model", "data")
    )
    rounds = format_count_range(cell["rounds"] for cell in results.cells)
    return (
        f"{algorithms} trained {models} on {data_sets}: {_describe_participants(results)}, {rounds} "
        f"{'round' if rounds == '1' else 'rounds'}."
    )


def _describe_participants(results: Results) -> str:
    """Format the number of silos, or of clients with the size of their cohorts if all cells have clients."""
    if all("clients" in cell for cell in results.cells):
        clients, cohorts = (
            format_count_range(cell[key] for cell in results.cells) for key in ("clients", "batch")
        )
        return f"{clients} clients, cohorts of {cohorts}"
    silos = format_count_range(cell["silos"] for cell in results.cells)
    return f"{silos} {'silo' if silos == '1' else 'silos'}"


def _describe_scores(results: Results) -> str:
    """Describe the run's best score, and the best at each strictest guarantee if guarantees differ.

    A score is the mean over seeds at a finished sweep point: the test accuracy, of which the largest is best, or
    without one the first metric, of which the smallest is best.  Guarantees differ in several respects, such as
    trust and ε.  One is strictest if no other guarantee of the run is at least as strong in all of them
    (`Strength`), so that a run can have several.
    """
    metric = next(
        (candidate for candidate in run_metrics(results) if candidate.key == "test_accuracy"),
        run_metrics(results)[0],
    )
    finished = [point for point in sweep_points(results) if cells_at_point(results, point)]
    best_point = _best_point(results, finished, metric)
    text = (
        f"The best {metric.title.removesuffix(' (%)')} is {_format_mean(results, best_point, metric)}"
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
    # The first one in order needs least trust.
    for rank, strength in enumerate(strictest):
        optimum = _best_point(results, [p for p in finished if _find_strength(results, p) == strength], metric)
        place = (
            "At the most private setting"
            if rank == 0
            else f"Where {'ε' if strength.delta else 'μ'}"
            f"{' or δ' if len({candidate.delta for candidate in strengths}) > 1 else ''} is smaller, "
            "against fewer parties or between other neighbours,"
        )
        text += f" {place} it is {_format_mean(results, optimum, metric)}{_describe_point(results, optimum)}."
    return text


class Strength(NamedTuple):
    """Strength of a guarantee, whose smaller fields are stronger."""

    trust: int
    """Level of trust that a silo has to place in others."""
    unit: int
    """0 for clients, 1 for persons, and 2 for records, which have fewer data."""
    relation: int
    """0 for replace-one, and 1 for zero-out, where the same figure says less."""
    leakage: float
    """ε, or μ if the cells with noise have several δ and all of them have a μ."""
    delta: float
    """δ of `leakage`, or 0 if that is a μ."""

    def is_stronger_than(self, other: "Strength") -> bool:
        """Whether no field is larger than that of `other`, and some field is smaller."""
        return self != other and all(mine <= its for mine, its in zip(self, other, strict=True))


def _find_strength(results: Results, point: Mapping[str, Any]) -> Strength | None:
    """Return the strength of a finished sweep point's first cell, or None for a point without noise."""
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
        # Rounded up to six digits, so that a rounding error makes no guarantee stricter than another.
        float(format_upper(cell["mu"] if compares_mu else cell["epsilon"], 6)),
        0.0 if compares_mu else cell["delta"],
    )


def _describe_privacy(results: Results) -> str:
    """Describe μ by the best guess of an attacker, or the largest ε and δ if a cell with noise has no μ.

    The best guess is the largest probability of guessing right which of two equally likely neighbours was used.
    A warning follows if some cells have no noise, and stands alone if none has any.
    """
    noisy_cells = [cell for cell in results.cells if cell["epsilon"] is not None]
    warning = "" if len(noisy_cells) == len(results.cells) else "A cell without noise protects nothing."
    if not noisy_cells:
        return warning
    mus = [cell["mu"] for cell in noisy_cells if cell["mu"] is not None]
    # Test records that silos evaluate have a μ of their own.
    unit = " or ".join(
        dict.fromkeys(
            cell["unit"].replace("record", "training record") if cell.get("evaluation") else cell["unit"]
            for cell in noisy_cells
        )
    )
    pair = format_epsilon_delta(*(max(cell[name] for cell in noisy_cells) for name in ("epsilon", "delta")))
    loss = f"The privacy loss is at most {pair}, for {unit}."
    return f"{describe_guess(unit, mus) if len(mus) == len(noisy_cells) else loss} {warning}".rstrip()


def list_party_views(results: Results) -> list[PartyView]:
    """List data and knowledge of the parties, for each trust setting of the run."""
    by_trust = group_by(results.cells, lambda cell: cell["trust"])
    return list(
        dict.fromkeys(holder for name, cells in by_trust.items() for holder in _party_views_of_trust(name, cells))
    )


def _party_views_of_trust(name: str, cells: Sequence[Mapping[str, Any]]) -> list[PartyView]:
    """List client or silo, server or curator, and public with their data and knowledge in a trust setting.

    A curator is server and silos in one.  Test records are the silos' own in cells that they evaluate, else the
    server's.

    Args:
        name: Name of the trust setting.
        cells: Cells under this trust setting.
    """
    trust, evaluated_by_silos = find_trust(name), {bool(cell.get("evaluation")) for cell in cells}
    shard_sizes = [round(cell["records"] / cell["silos"]) for cell in cells if "records" in cell]
    test_records, silo_records = (
        ["the test records"] if False in evaluated_by_silos else [],
        f"its own records{f' ({format_count_range(shard_sizes)} on average)' if shard_sizes else ''}"
        f"{', its own test records' if True in evaluated_by_silos else ''}",
    )
    key_texts = {"release": ", the key of its noise", "simulation": ", noise from the scenario's seed"}
    noise_kinds = {cell["noise"] for cell in cells}
    key = "".join(text for kind, text in key_texts.items() if kind in noise_kinds)
    public_view = PartyView("everyone else", "nothing", "the models that are published")
    if not trust.broadcasts:
        return [PartyView("the curator", f"the records of all silos, the test records{key}", "all"), public_view]
    if all("clients" in cell for cell in cells):
        return [
            PartyView(
                f"each client ({name})", "its own records", "the model of the rounds in which it takes part"
            ),
            PartyView(f"the server ({name})", f"the test records{key}", "what each client sends, without noise"),
            public_view,
        ]
    # Nothing is masked without noise.
    if trust.adds_noise(SERVER) or (trust.masked and noise_kinds == {"none"}):
        silo_view, server_view = silo_records, "every silo's sum without noise"
    elif trust.publishes_sums(0):
        silo_view, server_view = f"{silo_records}{key}", "every silo's releases, noise included if there is any"
    else:
        silo_view = f"{silo_records}{key}, the keys of its masks"
        server_view = "masked messages, and their sum with the noise in it" + (
            ", and of runs without noise every silo's sum" if "none" in noise_kinds else ""
        )
    return [
        PartyView(f"each silo ({name})", silo_view, "the model of every round"),
        PartyView(
            f"the server ({name})",
            ", ".join([*test_records, *([key[2:]] if key and trust.adds_noise(SERVER) else [])]) or "nothing",
            server_view,
        ),
        public_view,
    ]


def epsilon_of_repeated_runs(results: Results) -> list[list[str]]:
    """Return the rows of a table with ε of repeated runs on the same records.

    A row has a μ of the run, rounded up to four digits, then ε at the cell's δ for each number k of `RUN_COUNTS`,
    since k runs of μ-GDP are √k μ-GDP together.  Of more than six different pairs of μ and δ, the table lists the
    three smallest and the three largest ones.
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
    sign = -1.0 if metric.key == "test_accuracy" else 1.0
    # A score that is no number comes last.
    return min(among, key=lambda point: (math.isnan(score := sign * _mean_score(results, point, metric)), score))


def _mean_score(results: Results, point: Mapping[str, Any], metric: Metric) -> float:
    return math.nan if (summary := summarize(cells_at_point(results, point), metric)) is None else summary.mean


def _format_mean(results: Results, point: Mapping[str, Any], metric: Metric) -> str:
    return (
        f"{_mean_score(results, point, metric):.{metric.digits}f}{' %' if metric.key == 'test_accuracy' else ''}"
    )


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
    """Settings that no run sweeps and that differ between the runs' first cells, as (key, first, second).

    Name, title, label and seed are left out.
    """
    header: Sequence[str]
    """Names of the columns."""
    body: Sequence[Sequence[str]]
    """Texts of each row."""
    label_count: int


def compare_folders(first: Path, second: Path) -> RunComparison:
    """Compare the runs of two folders.

    Differences are taken seed by seed.  A row has a sweep point of the first run, a metric, the number of common
    seeds, the mean in each run, and the mean difference with its standard error.  The point's counterpart is the
    one sweep point of the second run that agrees in all keys which both runs sweep.

    Args:
        first: Folder of the first run.
        second: Folder of the second run.

    Raises:
        InputError: If a folder has no results that can be read, or there is no row.
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
        raise InputError(
            f"{first} and {second} have no finished sweep point and seed in common, or no metric there, or "
            f"several sweep points of {second} match each one of {first}"
        )
    names = list(short_names(first_results.axes).values())
    header = [*names, "metric", "seeds", "first", "second", "second - first"]
    return RunComparison(_setting_differences(first_results, second_results), header, rows, len(names) + 1)


def _score_pairs(
    first: Results, second: Results, point: Mapping[str, Any], common: Sequence[str], metric: Metric
) -> list[tuple[float, float]]:
    """Return the metric in both runs, in the printed unit, as a pair for each common seed of the point.

    Seeds whose cells lack the metric are left out.  The list is empty unless exactly one point of the second run
    has the values of the common axes.

    Args:
        first: Results of the first run.
        second: Results of the second run.
        point: Sweep point of the first run.
        common: Keys that both runs sweep.
        metric: Metric to compare.
    """
    matching = [
        other_point
        for other_point in sweep_points(second)
        if all(other_point[key] == point[key] for key in common)
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
