"""What stands under a table: what is missing, how it was measured, what is protected, how settings were chosen."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedpriv.accounting.selection import Selection
from fedpriv.figures import caveats, delta_figure, epsilon_range, upper_range
from fedpriv.privacy.claim import EXACT
from fedpriv.privacy.elsewhere import STEP_ELSEWHERE, charged_elsewhere
from fedpriv.privacy.evaluations import evaluation_words
from fedpriv.privacy.ledger import from_data
from fedpriv.privacy.trust import trust_named
from fedpriv.privacy.unit import CLIENT, RECORD
from fedpriv.reports.summary import Metric, compare, differing, incomplete, metrics_of, missing, point_text, points
from fedpriv.sweep.results import Results, engines_of

_LISTED = 10  # missing points that are named; the tables show the others


def published_metrics(results: Results) -> list[Metric]:
    if results.published is None:
        return []
    return [metric for metric in metrics_of(results) if metric.key in results.published.table.shown]


def what_is_missing(results: Results) -> str:
    """Which cells have no result, in bold Markdown; nothing if all have."""
    if not (loud := incomplete(results)):
        return ""
    texts = []
    for point, seeds in missing(results):
        these = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        texts.append(", ".join(filter(None, [point_text(results, point), these])))
    more = f"; and {len(texts) - _LISTED} more points" if len(texts) > _LISTED else ""
    return f"**{loud}.** Missing: {'; '.join(texts[:_LISTED])}{more}."


def what_differs(results: Results) -> str:
    """Which cells claim what was not released, in bold Markdown; nothing if none does."""
    loud = differing(results)
    return f"**{loud}.** Figures of privacy are those of the ledger here." if loud else ""


def how_measured(results: Results) -> str:
    """Seeds, engine, and the largest difference to what was published, in one line."""
    count = len(results.seeds)
    seeds = "1 seed" if count == 1 else f"{count} seeds: mean ± sample standard deviation"
    largest = []
    for metric in published_metrics(results):
        differences = [compare(results, metric, point).difference for point in points(results)]
        if known := [abs(difference) for difference in differences if difference is not None]:
            largest.append(f"{metric.title} {max(known):.{metric.digits}f}")
    worst = f"; largest |difference|: {', '.join(largest)}" if largest else ""
    notes = [each for each in (_withheld(results), _paired(results), _unread(results)) if each]
    return " ".join([f"{seeds}; engine {engines_of(results)}{worst}.", *notes])


def _withheld(results: Results) -> str:
    """Why no published values are shown, where a scenario has some."""
    if results.published is None or not results.published.withheld:
        return ""
    return f"Published values are for other settings and not shown: {', '.join(results.published.withheld)}."


def _paired(results: Results) -> str:
    """That rows share their random numbers: differences between them spread less than each of them does."""
    simulated = all(cell["noise"] != "release" for cell in results.cells)
    if len(points(results)) < 2 or not results.cells or not simulated:
        return ""
    return (
        "Cells of one seed share the order of records and, scaled, their noise: take differences seed by "
        "seed, and their spread from those pairs."
    )


def _unread(results: Results) -> str:
    """That samples were asked for which no round reads."""
    left = sorted({cell["unread"] for cell in results.cells if cell.get("unread")})
    if not left:
        return ""
    numbers = str(left[0]) if len(left) == 1 else f"{left[0]} to {left[-1]}"
    return f"Of the samples asked for {numbers} are never read: they do not fill a round of every silo."


def privacy_lines(results: Results) -> list[str]:
    """A line for each distinct statement; those that differ only in μ share one; then those of evaluations."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in results.cells:
        kind = (
            *(cell[key] for key in ("unit", "relation", "trust", "noise", "delta")),
            cell["mu"] is None,
            cell.get("participation"),
            cell.get("holds"),
        )
        groups.setdefault(kind, []).append(cell)
    tests = {evaluation_words(told, cell["delta"]) for cell in results.cells if (told := cell.get("evaluation"))}
    charged = any(charged_elsewhere(cell["releases"]) for cell in results.cells)
    elsewhere = [STEP_ELSEWHERE] if charged else []
    said = [line for cells in groups.values() for line in (_statement(cells), *caveats_of(cells))]
    return [*said, *elsewhere, *sorted(tests), *choice_of_settings(results)]


def caveats_of(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What weakens the figures of cells with one δ: their smallest silo, and the largest ε."""
    private = [cell for cell in cells if cell["epsilon"] is not None]
    if not private:
        return []
    sizes = [size for cell in private if (size := _units(cell)) is not None]
    noun = from_data(private[0]["releases"][0]).unit.noun
    released = any(cell.get("holds") not in (None, "in real arithmetic") for cell in private)
    worst = max(cell["epsilon"] for cell in private)
    return caveats(worst, private[0]["delta"], max(sizes, default=None), noun, slack=released)


def _units(cell: Mapping[str, Any]) -> int | None:
    """How many units the smallest silo has, or the pool of clients; None where that is not public."""
    unit = from_data(cell["releases"][0]).unit
    if unit.name == CLIENT.name:
        return cell.get("clients")
    return cell.get("smallest_silo") if unit.name == RECORD.name else None


def choice_of_settings(results: Results) -> list[str]:
    """What the choice of settings by `fedpriv tune` costs beside the runs; nothing where there was none.

    Guarantee: the figures are recomputed from the law of the choice and the releases of every cell.
    """
    tuned = results.tuned
    if tuned is None or not (private := [cell for cell in results.cells if cell["epsilon"] is not None]):
        return []
    law, how = tuned.number_of_runs, f"by {tuned.metric} on {tuned.held_out} training records"
    if law is None:
        return [
            f"Settings were chosen by fedpriv tune: {tuned.settings} for every row, {how}. These figures do not "
            "cover that choice: it read the records without noise."
        ]
    costs: list[tuple[float, float]] = []
    for cell in private:
        row = tuned.row_of(cell["scenario"])
        if row is None or row.mu is None or cell["mu"] is None:
            return ["Settings of some cells were not chosen by fedpriv tune, or their cost is not known."]
        choice, both = (Selection(row.mu, law, then).epsilon_of(cell["delta"]) for then in (0.0, cell["mu"]))
        costs.append((choice, both))
    delta = f"delta = {delta_figure(private[0]['delta'])}"
    alone, together = (upper_range([pair[place] for pair in costs]) for place in (0, 1))
    return [
        f"Settings were chosen privately by fedpriv tune: the best of {law.words}, {how}. The choice of one "
        f"row costs ε = {alone} at {delta}, the choice and a run of the row together ε = {together} "
        "(Papernot & Steinke 2022)."
    ]


def _statement(cells: Sequence[Mapping[str, Any]]) -> str:
    first = cells[0]
    server = trust_named(first["trust"]).title
    if first["epsilon"] is None:
        return f"Privacy: none, {server}: the run adds no noise."
    seeded = " (seeded, not for release)" if first["noise"] == "simulation" else ""
    exact = first.get("holds") not in (None, "in real arithmetic")
    noise = f"{first['noise']} noise{seeded}{f', {EXACT}' if exact else ''}"
    epsilon, delta = _range(cells, "epsilon"), delta_figure(first["delta"])
    whom = f"Privacy: {first['unit']}, {first['relation']} neighbours, {server}"
    if first["mu"] is None:
        sampling = first.get("participation", "Poisson sampling")
        return (
            f"{whom}: {sampling}, which no μ describes; (ε, δ) = ({epsilon}, {delta}), an upper bound by its "
            f"privacy loss distribution, rounded up, as long as who takes part when stays secret; {noise}."
        )
    mu, zcdp, paper = (_range(cells, key) for key in ("mu", "zcdp", "epsilon_paper"))
    attained = not exact and all(cell.get("attained") for cell in cells)
    pair = f"(ε, δ) = ({epsilon}, {delta}) exact" if attained else f"(ε, δ) at most ({epsilon}, {delta})"
    gaussian = f"μ-GDP exactly with μ = {mu}" if attained else f"μ-GDP with μ at most {mu}"
    counted = [cell["counted_mu"] for cell in cells if cell.get("counted_mu") is not None]
    if counted:
        gaussian += f", as the paper's constants charge it, and by exact counting {upper_range(counted)}"
    by_formula = f"({paper}, {delta}) by the paper's formula, rounded up"
    return f"{whom}: {gaussian} (zCDP {zcdp}); {pair}, {by_formula}; {noise}."


def _range(cells: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [cell[key] for cell in cells]
    return epsilon_range(values) if key == "epsilon" else upper_range(values)
