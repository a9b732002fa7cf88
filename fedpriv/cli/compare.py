"""`fedpriv privacy compare`: every mechanism at one guarantee.  Imports torch for an algorithm or a time only."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli.options import Federation, Json, Rounds, Target, validated
from fedpriv.cli.shown import aim, cost_facts, print_table, setting_facts, show
from fedpriv.core.errors import InputError
from fedpriv.core.figures import upper_figure

if TYPE_CHECKING:
    from fedpriv.noise.fitting.auto import Published
    from fedpriv.noise.fitting.cost import Response
    from fedpriv.noise.workload import Workload
    from fedpriv.papers.base import Algorithm, NoiseSettings
    from fedpriv.study.setting import Setting, Table


_DIMENSION = 100_000


def compare(
    *,
    rounds: Rounds,
    algorithm: Annotated[
        str | None,
        typer.Option(help="Whose output and queries noise ends up in, such as dp-ftrl; running sums if left out."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of the algorithm, such as momentum=0.9. Repeatable."),
    ] = None,
    target: Target,
    federation: Federation,
    max_vectors: Annotated[
        int, typer.Option(min=0, max=64, help="The most vectors of state that fitted noise may keep.")
    ] = 4,
    dimension: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Measure a round of noise with vectors of so many numbers; 0 for no times.  "
            f"[default: {_DIMENSION} with --algorithm]",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file: .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Print noise, error and memory of every mechanism at the same guarantee, so that you can choose one.

    Errors are standard deviations per coordinate of the noise in a released running sum: root mean square over
    the rounds, in the last round, and (rms) in the mean over silos.  With --algorithm also in its output and (rms)
    in the points that it asks at, for steps of 1, in the mean over silos; "ms" is the time of a round of noise.
    The last line is what no mechanism falls below, and "/least" divides by it.  λ-CGD and BLT are fitted; "auto"
    marks what `mechanism = "auto"` takes.  Memory counts vectors of the model's size; "square root" would store
    all T of them.

    Examples:

        fedpriv privacy compare --rounds 1000 --mu 1

        fedpriv privacy compare --algorithm dp-ftrl --set momentum=0.9 --rounds 240 --mu 1

        fedpriv privacy compare --rounds 2000 --epochs 20 --decay 0.9 --epsilon 2 --delta 1e-6 --silos 10
    """
    from fedpriv.accounting.guarantees import GaussianDP
    from fedpriv.study.setting import table_of

    setting, mu = federation.setting(rounds), target.in_mu
    if setting.secret:
        if algorithm is not None or plot is not None:
            raise InputError(f"--sampling {setting.sampling}: is compared without --algorithm and --plot")
        _amplified(setting, federation.unit, mu, target.at, aim(mu, target.at, federation), as_json)
        return
    claim = federation.claim(GaussianDP(mu)).conversions(target.at)
    if algorithm is None and settings:
        raise InputError("--set: its keys are an algorithm's: give --algorithm, too")
    if algorithm is not None and setting.decay != 1.0:
        raise InputError(
            f"--decay {setting.decay}: an algorithm has a decay of its own, with its own settings (--set)"
        )
    response, workload = _asked(algorithm, settings or [], setting)
    table = table_of(setting, mu, response, workload, max_vectors)
    size = (_DIMENSION if algorithm else 0) if dimension is None else dimension
    seconds = _times(table, workload, size)
    if plot is not None:
        from fedpriv.show.charts import comparison_chart
        from fedpriv.show.plots import save_chart

        save_chart(comparison_chart(table, f"{algorithm or 'running sums'}, {rounds} rounds"), plot)
    facts = setting_facts(setting, federation.unit) | ({} if algorithm is None else {"algorithm": algorithm})
    if as_json:
        rows = [
            {
                "mechanism": line.name,
                **line.mechanism.options(),
                "auto": line.chosen,
                **cost_facts(line.cost),
                "output": line.published.output,
                "queries": line.published.queries,
                "output_over_least": line.ratio.output,
                "queries_over_least": line.ratio.queries,
                "seconds_per_round": took,
            }
            for line, took in zip(table.lines, seconds, strict=True)
        ]
        show({**facts, "mechanisms": rows, "least": vars(table.least), **claim}, as_json=True)
        return
    print_table(_text(table, seconds, size))
    typer.echo()
    show({**facts, **claim}, as_json=False)


def _amplified(
    setting: "Setting", unit: str, mu: float, delta: float, claim: dict[str, Any], as_json: bool
) -> None:
    """Print the mechanisms that secret participation amplifies, at the (ε, δ) that μ gives at δ."""
    costs = setting.compare(mu, delta)
    if as_json:
        rows = [{"mechanism": name, **cost_facts(cost)} for name, cost in costs.items()]
        show({**setting_facts(setting, unit), "mechanisms": rows, **claim}, as_json=True)
        return
    header = ("mechanism", "noise std", "rms error", "last round", "in the mean", "memory", "sensitivity")
    lines = [
        (
            name,
            upper_figure(cost.std, 5),
            *(f"{value:.5g}" for value in (cost.error, cost.error_last, cost.error_in_mean)),
            str(cost.memory),
            upper_figure(cost.sensitivity.value, 5),
        )
        for name, cost in costs.items()
    ]
    print_table([header, *lines])
    typer.echo()
    show({**setting_facts(setting, unit), **claim}, as_json=False)


def _asked(algorithm: str | None, settings: list[str], setting: "Setting") -> tuple["Response", "Workload"]:
    """Find the response in which noise is compared, and the sums that are released."""
    from fedpriv.noise.fitting.cost import rows_response

    if algorithm is None:
        return rows_response(setting.rounds), setting.workload
    from fedpriv.papers.table import algorithm_named
    from fedpriv.participation.orders import Schedule
    from fedpriv.plan.fitted import response_and_workload

    row = algorithm_named(algorithm)
    schedule = Schedule(setting.rounds, setting.rounds // setting.epochs)
    response, workload = response_and_workload(row, _settings(row, settings), schedule)
    clips = setting.clip * workload.clips
    return response, dataclasses.replace(workload, clips=clips, schedule=setting.workload.schedule)


def _settings(row: "Algorithm", assignments: list[str]) -> "NoiseSettings":
    """Read the row's own keys, those of its scale 1 where they are not given; InputError if it takes no noise."""
    from fedpriv.papers.base import UNITS, NoiseSettings

    if row.published is None or not issubclass(row.settings, NoiseSettings):
        raise InputError(f"--algorithm {row.name}: noise cannot be fitted to what it publishes")
    units = {name: 1.0 for name in UNITS if name in row.settings.model_fields}
    return validated(row.settings, assignments, units)


def _times(table: "Table", workload: "Workload", dimension: int) -> list[float | None]:
    """Measure the seconds per round of every line's noise; None where that is not measured."""
    from fedpriv.study.setting import seconds_per_round

    return [seconds_per_round(each.mechanism, workload, dimension) if dimension else None for each in table.lines]


def _text(table: "Table", seconds: list[float | None], dimension: int) -> list[tuple[str, ...]]:
    """Write the table's lines with the same columns: those of an algorithm's output only where it has one."""
    output = table.least.output is not None
    published = ["output", "queries", "output/least", "queries/least"] if output else ["in sums", "/least"]
    header = ["mechanism", "noise std", "rms error", "last round", "in the mean", *published]
    lines = [(*header, *(["ms"] if dimension else []), "memory", "sensitivity")]
    for line, took in zip(table.lines, seconds, strict=True):
        cost = line.cost
        errors = (cost.error, cost.error_last, cost.error_in_mean)
        time = ["-" if took is None else f"{1000.0 * took:.3g}"] if dimension else []
        exact = "" if cost.sensitivity.exact else "≤ "
        lines.append(
            (
                line.name + (" (auto)" if line.chosen else ""),
                upper_figure(cost.std, 5),  # what is needed: less would not do
                *(f"{value:.5g}" for value in errors),
                *_published(line.published, line.ratio),
                *time,
                str(cost.memory),
                f"{exact}{upper_figure(cost.sensitivity.value, 5)}",
            )
        )
    least = _published(table.least, None)
    lines.append(("least", *["-"] * 4, *least, *["-"] * (2 + bool(dimension))))
    return lines


def _published(values: "Published", ratio: "Published | None") -> list[str]:
    stds = [values.queries] if values.output is None else [values.output, values.queries]
    over = () if ratio is None else (ratio.output, ratio.queries)
    ratios = ["1"] * len(stds) if ratio is None else [f"{each:.3f}" for each in over if each is not None]
    return [*(f"{value:.5g}" for value in stds), *ratios]
