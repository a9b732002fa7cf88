"""A run in a paragraph: what was trained, how good it got, at what privacy; who holds what; what repeats cost.

The paragraph names the best setting and the most private ones, and says whether the noise protects anybody.

Two runs side by side: where their settings differ, and by how much their figures do, seed by seed.
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
_MAX_LEVELS = 6  # levels in the table of repeated runs


@dataclass(frozen=True)
class PartyView:
    """One party: what it has, and what it gets to see."""

    who: str
    holds: str
    sees: str


def describe_run(results: Results) -> str:
    """What ran, how good it got, at what privacy, and how far to believe it."""
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
    rows = dict.fromkeys(cell["scenario"]["algorithm"]["name"] for cell in results.cells)
    titles = [ALGORITHMS[name].title if name in ALGORITHMS else name for name in rows]
    algorithms = " and ".join(titles) if len(titles) < 3 else f"{len(titles)} algorithms"
    first = results.cells[0]["scenario"]
    trained = f"{first['model']['name']} on {first['data']['name']}"
    rounds = format_count_range(cell["rounds"] for cell in results.cells)
    return f"{algorithms} trained {trained}: {_describe_participants(results)}, {rounds} rounds."


def _describe_participants(results: Results) -> str:
    """How many silos, or clients, and of those how many in a round."""
    if all("clients" in cell for cell in results.cells):
        clients, cohorts = (
            format_count_range(cell[key] for cell in results.cells) for key in ("clients", "batch")
        )
        return f"{clients} clients, cohorts of {cohorts}"
    silos = format_count_range(cell["silos"] for cell in results.cells)
    return f"{silos} {'silo' if silos == '1' else 'silos'}"


def _describe_scores(results: Results) -> str:
    metric = next((each for each in run_metrics(results) if each.key == "test_accuracy"), run_metrics(results)[0])
    private = [point for point in sweep_points(results) if cells_at_point(results, point)]
    best = _best_point(results, private, metric)
    text = (
        f"Best: {metric.title.removesuffix(' (%)')} {_format_mean(results, best, metric)}"
        f"{_describe_point(results, best)}."
    )
    strengths = {strength for point in private if (strength := _find_strength(results, point)) is not None}
    if len(strengths) < 2:
        return text
    strictest = sorted(each for each in strengths if not any(other.is_stronger_than(each) for other in strengths))
    for number, strength in enumerate(strictest):
        chosen = _best_point(results, [p for p in private if _find_strength(results, p) == strength], metric)
        which = "Most private" if number == 0 else "A smaller ε against fewer, or between other neighbours"
        text += f" {which}: {_format_mean(results, chosen, metric)}{_describe_point(results, chosen)}."
    return text


class Strength(NamedTuple):
    """How strong a guarantee is, each field the smaller the stronger; sorted so that trust comes before ε."""

    trust: int
    """How much a silo takes on trust."""
    unit: int
    """0 clients, 1 persons, 2 records."""
    relation: int
    """0 for replace-one: under zero-out the same figure protects half as well."""
    leakage: float
    """ε; μ where cells have several δ and all have one."""
    delta: float

    def is_stronger_than(self, other: "Strength") -> bool:
        """Whether it promises all that `other` does, and more."""
        return self != other and all(mine <= its for mine, its in zip(self, other, strict=True))


def _find_strength(results: Results, point: Mapping[str, Any]) -> Strength | None:
    """Of the cells at a sweep point; None where there is no noise."""
    cell = cells_at_point(results, point)[0]
    if cell["epsilon"] is None:
        return None
    private = [each for each in results.cells if each["epsilon"] is not None]
    by_mu = len({each["delta"] for each in private}) > 1 and all(each["mu"] is not None for each in private)
    return Strength(
        find_trust(cell["trust"]).trust_level,
        _UNIT_NAMES.index(stream_from_data(cell["releases"][0]).unit.name),
        ("replace-one", "zero-out").index(cell["relation"]),
        float(format_upper(cell["mu"] if by_mu else cell["epsilon"], 6)),
        0.0 if by_mu else cell["delta"],
    )


def _describe_privacy(results: Results) -> str:
    mus = [cell["mu"] for cell in results.cells if cell["mu"] is not None]
    unit = " or ".join(dict.fromkeys(cell["unit"] for cell in results.cells))
    if any(cell["epsilon"] is None for cell in results.cells):
        return " ".join([*([describe_guess(unit, mus)] if mus else []), "A cell without noise protects nothing."])
    if len(mus) < len(results.cells):
        epsilons = [cell["epsilon"] for cell in results.cells]
        worst = format_epsilon_delta(max(epsilons), max(cell["delta"] for cell in results.cells))
        return f"Privacy: at most {worst}, for {unit}."
    return describe_guess(unit, mus)


def list_party_views(results: Results) -> list[PartyView]:
    """Who has what, for each trust setting of the run."""
    by_trust = group_by(results.cells, lambda cell: cell["trust"])
    return list(
        dict.fromkeys(holder for name, cells in by_trust.items() for holder in _party_views_of_trust(name, cells))
    )


def _party_views_of_trust(name: str, cells: Sequence[Mapping[str, Any]]) -> list[PartyView]:
    trust = find_trust(name)
    shares = [round(cell["records"] / cell["silos"]) for cell in cells if "records" in cell]
    own = f"its own records ({format_count_range(shares)} on average)" if shares else "its own records"
    released = all(cell["noise"] == "release" for cell in cells)
    key = "the key of its noise" if released else "noise from the scenario's seed"
    if all("clients" in cell for cell in cells):
        return [
            PartyView(
                f"each client ({name})", "its own records", "the model of the rounds in which it takes part"
            ),
            PartyView(f"the server ({name})", f"the test records, {key}", "what each client sends, without noise"),
            PartyView("everyone else", "nothing", "the models that are published"),
        ]
    if trust.adds_noise(SERVER):
        silo, seen = own, "every silo's sum without noise"
    elif trust.publishes_sums(0):
        silo, seen = f"{own}, {key}", "every silo's releases, noise included"
    else:
        silo = f"{own}, {key}, the keys of its masks"
        seen = "masked messages, and their sum with the noise of all silos"
    server = f"the test records, {key}" if trust.adds_noise(SERVER) else "the test records"
    return [
        PartyView(f"each silo ({name})", silo, "the model of every round"),
        PartyView(f"the server ({name})", server, seen),
        PartyView("everyone else", "nothing", "the models that are published"),
    ]


def epsilon_of_repeated_runs(results: Results) -> list[list[str]]:
    """ε of several runs with the same records, for every μ of the run: μ, then ε for each of `RUN_COUNTS`."""
    private = [cell for cell in results.cells if cell["mu"] is not None]
    known = sorted({(float(format_upper(cell["mu"])), cell["delta"]) for cell in private})
    shown = known if len(known) <= _MAX_LEVELS else [*known[: _MAX_LEVELS // 2], *known[-_MAX_LEVELS // 2 :]]
    return [
        [format_upper(mu), *(format_upper_epsilon(epsilon_of(compose([mu] * runs), delta)) for runs in RUN_COUNTS)]
        for mu, delta in shown
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
    told = {
        key: value
        for key, value in point.items()
        if len(results.axes[key]) > 1 and not (epsilon and key == "privacy.epsilon")
    }
    where = "; ".join(filter(None, [format_point(results, told), epsilon]))
    return f" ({where})" if where else ""


_NOT_COMPARED = ("name", "title", "seed", "label")


@dataclass(frozen=True)
class RunComparison:
    """A row for each sweep point and metric that both runs have; the first `labels` columns name it."""

    settings: Sequence[tuple[str, str, str]]
    """Keys whose values differ between the first cells: key, value in the first run, value in the second."""
    header: Sequence[str]
    body: Sequence[Sequence[str]]
    label_count: int


def compare_folders(first: Path, second: Path) -> RunComparison:
    """Compare two folders; InputError if they have no sweep point and seed in common.

    Cells of one seed share records and, scaled, noise: differences are taken seed by seed.
    """
    one, other = read_results(first), read_results(second)
    common = [key for key in one.axes if key in other.axes]
    rows = [
        [*(format_value(point[key]) for key in one.axes), metric.title, *_format_pairs(pairs, metric)]
        for point in sweep_points(one)
        for metric in METRICS
        if (pairs := _score_pairs(one, other, point, common, metric))
    ]
    if not rows:
        raise InputError(f"{first} and {second} have no finished sweep point and seed in common")
    names = list(short_names(one.axes).values())
    header = [*names, "metric", "seeds", "first", "second", "second - first"]
    return RunComparison(_setting_differences(one, other), header, rows, len(names) + 1)


def _score_pairs(
    one: Results, other: Results, point: Mapping[str, Any], common: Sequence[str], metric: Metric
) -> list[tuple[float, float]]:
    """The metric in both runs, a pair for each seed of the point; axes of one run only must be single."""
    matching = [there for there in sweep_points(other) if all(there[key] == point[key] for key in common)]
    if len(matching) != 1:
        return []
    there = {cell["seed"]: cell for cell in cells_at_point(other, matching[0])}
    return [
        (metric.factor * cell[metric.key], metric.factor * there[cell["seed"]][metric.key])
        for cell in cells_at_point(one, point)
        if cell["seed"] in there and metric.key in cell and metric.key in there[cell["seed"]]
    ]


def _format_pairs(pairs: Sequence[tuple[float, float]], metric: Metric) -> list[str]:
    mean, deviation = mean_and_deviation([second - first for first, second in pairs])
    error = None if deviation is None else deviation / math.sqrt(len(pairs))
    means = (
        format_with_spread(mean_and_deviation(each)[0], None, metric.digits) for each in zip(*pairs, strict=True)
    )
    return [str(len(pairs)), *means, format_with_spread(mean, error, metric.digits, signed=True)]


def _setting_differences(one: Results, other: Results) -> list[tuple[str, str, str]]:
    first, second = (dict(flatten_keys(results.cells[0]["scenario"])) for results in (one, other))
    swept = {*one.axes, *other.axes}
    return [
        (key, format_value(first.get(key, "not set")), format_value(second.get(key, "not set")))
        for key in {**first, **second}
        if first.get(key) != second.get(key) and key not in swept and key.partition(".")[0] not in _NOT_COMPARED
    ]
