"""All mechanisms side by side at one guarantee: what each leaves in the sums, and in what is made of them."""

from collections.abc import Iterable
from dataclasses import dataclass

from fedpriv.fitting import Candidate, Published, Response, choice, compared, least, objective_of
from fedpriv.fitting.auto import fitted_of_all_kinds
from fedpriv.mechanisms import Mechanism, Workload
from fedpriv.privacy.cost import Cost
from fedpriv.privacy.setting import Setting, unfitted

MOST_SLOW = 4096
"""Rounds beyond which mechanisms of T vectors are left out: for a run nobody would take them."""


@dataclass(frozen=True)
class Line:
    """One mechanism at the guarantee that is asked for."""

    name: str
    mechanism: Mechanism
    cost: Cost
    published: Published
    """Standard deviations per coordinate, for the noise in the mean over silos and steps of 1."""
    ratio: Published
    """The same over what no mechanism falls below."""
    chosen: bool
    """Whether `mechanism = "auto"` takes it."""


@dataclass(frozen=True)
class Table:
    """The lines, and the bound below all of them."""

    lines: tuple[Line, ...]
    least: Published
    """In the units of `Line.published`."""


def table_of(setting: Setting, mu: float, response: Response, workload: Workload, max_vectors: int = 4) -> Table:
    """Every mechanism for the sums of `workload`, fitted ones too, at `mu`; `setting` says who adds the noise.

    Clips of `workload` are multiples of the setting's clip.  InputError for what nothing can be fitted to.
    """
    found = _distinct(fitted_of_all_kinds(objective_of(response, workload), max_vectors))
    best = choice([candidate for candidate in found if candidate.vectors <= max_vectors])
    lines = tuple(
        _line(name, mechanism, mechanism == best.mechanism, setting, mu, response, workload)
        for name, mechanism in _by_name(workload, found).items()
    )
    bound, first = least(response, workload), lines[0]
    unit = first.published.queries / (first.ratio.queries * bound.queries)
    return Table(lines, _times(bound, unit))


def _by_name(workload: Workload, found: list[Candidate]) -> dict[str, Mechanism]:
    known = {
        name: mechanism
        for name, mechanism in unfitted(workload).items()
        if workload.rounds <= MOST_SLOW or mechanism.memory_vectors(workload) < workload.rounds
    }
    for candidate in found:
        if candidate.mechanism not in known.values():
            name = candidate.name
            known[name if name not in known else f"{name}, {candidate.vectors} vectors"] = candidate.mechanism
    return known


def _distinct(found: Iterable[Candidate]) -> list[Candidate]:
    """Without those that came out as an earlier one."""
    first: dict[tuple[str, int], Candidate] = {}
    for candidate in found:
        first.setdefault((candidate.name, candidate.vectors), candidate)
    return list(first.values())


def _line(
    name: str,
    mechanism: Mechanism,
    chosen: bool,
    setting: Setting,
    mu: float,
    response: Response,
    workload: Workload,
) -> Line:
    cost, unit = setting.cost_for(mechanism, workload, mu), compared(mechanism, response, workload)
    published = _times(unit.published, cost.error_in_mean / unit.rows_rms)
    bound = least(response, workload)
    ratio = Published(
        unit.published.queries / bound.queries,
        None if unit.published.output is None or bound.output is None else unit.published.output / bound.output,
    )
    return Line(name, mechanism, cost, published, ratio, chosen)


def _times(published: Published, factor: float) -> Published:
    output = None if published.output is None else published.output * factor
    return Published(published.queries * factor, output)
