"""Commands `fedpriv privacy …`: accounting without a run, and the claim of a run's releases.

* A mechanism is independent noise or a way to correlate the noise of rounds, such as a tree.
* The running sum of a round adds the records' increments in this round to the decay times the running sum of the
  round before.  An increment is a record's clipped contribution to a round.
* A setting has what accounting needs besides a mechanism and a target, such as rounds, clip norm and trust.
* Participation says in which rounds a record takes part.  If it is secret, its randomness amplifies the protection
  of the noise.
* A stream is the releases of one party, such as a silo or the server, in the rounds or another part of a run.
* A cell is one run of a scenario, and its claim is the guarantee that its entry in results.json states.
* A fact is a named number or text that a command prints.
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpriv.cli.options import (
    GROUP_SUFFIX,
    Delta,
    FederationOptions,
    Json,
    MechanismKeys,
    MechanismOption,
    ParticipationOptions,
    Rounds,
    RunDir,
    TargetOptions,
    cost_facts,
    expand_option_groups,
    guarantee_of_multiplier,
    parse_settings,
    print_facts,
    print_table,
    setting_facts,
    target_facts,
)
from fedpriv.core.errors import InputError, RunError, refuse, sanitize_line
from fedpriv.core.figures import format_lower, format_upper

if TYPE_CHECKING:
    from fedpriv.accounting.guarantees import Guarantee
    from fedpriv.claims.claim import PrivacyClaim
    from fedpriv.claims.entries import LedgerEntry
    from fedpriv.noise.fitting.auto import PublishedNoise
    from fedpriv.noise.fitting.cost import NoiseResponse
    from fedpriv.noise.mechanism import Mechanism
    from fedpriv.noise.series import Workload
    from fedpriv.papers.base import Algorithm, NoiseSettings
    from fedpriv.study.setting import AccountingSetting, MechanismCost, MechanismTable


_DEFAULT_DIMENSION = 100_000


def compare(
    *,
    rounds: Rounds,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="Algorithm in whose output and queries noise is measured, such as dp-ftrl; without it the noise "
            "in running sums is measured."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Key of the algorithm, such as momentum=0.9. Repeatable."),
    ] = None,
    target: TargetOptions,
    federation: FederationOptions,
    max_vectors: Annotated[
        int, typer.Option(min=0, max=64, help="Largest number of vectors in the state of fitted noise.")
    ] = 4,
    dimension: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Length of the vectors of which a round of noise is timed, or 0 for no times.  "
            f"[default: {_DEFAULT_DIMENSION} with --algorithm, else 0]",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="File (.png, .svg or .pdf) into which the comparison is drawn.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print noise, error and memory of mechanisms at the same guarantee, so that you can choose one.

    Errors are standard deviations per coordinate of the noise in a released running sum: the root mean square
    (rms) over the rounds, the one in the last round, and the rms in the mean over silos.  The next columns are
    noise in the mean over silos: in running sums (rms), or in the output and (rms) in the queries that an
    --algorithm computes from them, for steps of size 1.  The last line, "least", is a lower bound of this noise,
    and columns with "/least" are multiples of it.  "ms" is the time, if it is measured, in which noise that was
    drawn is correlated with that of earlier rounds.  "auto" marks the mechanism that `mechanism = "auto"` takes
    with --max-vectors.  Memory counts vectors of the model's size.

    With secret participation (--sampling) the table has mechanisms that it amplifies, with noise, errors, memory
    and sensitivity.

    Examples:

        fedpriv privacy compare --rounds 1000 --mu 1

        fedpriv privacy compare --algorithm dp-ftrl --set momentum=0.9 --rounds 240 --mu 1

        fedpriv privacy compare --rounds 2000 --epochs 20 --decay 0.9 --epsilon 2 --delta 1e-6 --silos 10
    """
    from fedpriv.accounting.guarantees import GaussianDP
    from fedpriv.study.setting import measure_seconds_per_round, tabulate_mechanisms

    setting, mu = federation.make_setting(rounds), target.in_mu
    refuse(
        {
            f"--sampling {setting.sampling}: has neither --algorithm nor --plot nor --dimension; leave them out": (
                setting.has_secret_order and (algorithm is not None or plot is not None or dimension)
            ),
            "--set: its keys belong to an algorithm; give --algorithm, too": algorithm is None and settings,
            "--set clip: noise is compared for the norm of --clip; give it there": any(
                text.partition("=")[0].strip() == "clip" for text in settings or []
            ),
            f"--decay {setting.decay}: an algorithm has a decay of its own; leave --decay out, and give the "
            "algorithm's keys by --set": algorithm is not None and setting.decay != 1.0,
        }
    )
    if setting.has_secret_order:
        _print_amplified(
            setting,
            federation.unit,
            mu,
            target.reporting_delta,
            target_facts(mu, target.reporting_delta, federation),
            as_json,
        )
        return
    claim = federation.make_claim(GaussianDP(mu)).conversions(target.reporting_delta)
    # Table of mechanisms, with measured times and a chart if they are requested.
    response, workload = _find_response(algorithm, settings or [], setting)
    table = tabulate_mechanisms(setting, mu, response, workload, max_vectors)
    size = (_DEFAULT_DIMENSION if algorithm else 0) if dimension is None else dimension
    seconds = [measure_seconds_per_round(line.mechanism, workload, size) if size else None for line in table.lines]
    if plot is not None:
        from fedpriv.show.charts import make_comparison_chart
        from fedpriv.show.plots import save_chart

        save_chart(make_comparison_chart(table, f"{algorithm or 'running sums'}, {rounds} rounds"), plot)
    # Output, as JSON or as a table above the facts.
    facts = setting_facts(setting, federation.unit) | ({} if algorithm is None else {"algorithm": algorithm})
    if as_json:
        rows = [
            {
                "mechanism": line.name,
                **line.mechanism.options(),
                "auto": line.is_auto,
                **cost_facts(line.cost),
                "output": line.published.output,
                "queries": line.published.queries,
                "output_over_least": line.ratio.output,
                "queries_over_least": line.ratio.queries,
                "seconds_per_round": round_seconds,
            }
            for line, round_seconds in zip(table.lines, seconds, strict=True)
        ]
        print_facts({**facts, "mechanisms": rows, "least": vars(table.lower_bound), **claim}, as_json=True)
        return
    print_table(_comparison_lines(table, seconds, size))
    typer.echo()
    print_facts({**facts, **claim}, as_json=False)


def _print_amplified(
    setting: "AccountingSetting", unit: str, mu: float, delta: float, claim: dict[str, Any], as_json: bool
) -> None:
    """Print the noise that mechanisms need for one guarantee if participation is secret, and its errors.

    The guarantee is the (ε, δ) that μ-Gaussian DP gives at δ.

    Args:
        setting: Setting with secret participation.
        unit: Name of the unit of protection.
        mu: μ of the target.
        delta: δ of the target.
        claim: Facts of the target, which are printed last.
        as_json: Whether to print JSON.
    """
    costs = setting.compare_mechanisms(mu, delta)
    if as_json:
        rows = [{"mechanism": name, **cost_facts(cost)} for name, cost in costs.items()]
        print_facts({**setting_facts(setting, unit), "mechanisms": rows, **claim}, as_json=True)
        return
    lines = [
        ("mechanism", "noise std", "rms error", "last round", "in the mean", "memory", "sensitivity"),
        *(
            (
                name,
                format_upper(cost.std, 5),
                *(f"{value:.5g}" for value in (cost.error_rms, cost.error_last, cost.error_in_mean)),
                str(cost.memory_vectors),
                format_upper(cost.sensitivity.value, 5),
            )
            for name, cost in costs.items()
        ),
    ]
    print_table(lines)
    typer.echo()
    print_facts({**setting_facts(setting, unit), **claim}, as_json=False)


def _find_response(
    algorithm: str | None, settings: list[str], setting: "AccountingSetting"
) -> tuple["NoiseResponse", "Workload"]:
    """Return the weights of running sums in the vectors whose noise is compared, and the running sums.

    Without an algorithm these vectors are the running sums themselves, and with one vectors that are weighted sums
    of its noisy running sums, such as its output and its queries.

    Args:
        algorithm: Name of a row of the table of algorithms, or None.
        settings: KEY=VALUE texts for the algorithm's own keys.
        setting: Rounds, participation and clip norm.

    Returns:
        Weights of the running sums in these vectors (response), and the running sums (workload).

    Raises:
        InputError: The algorithm is unknown, noise cannot be fitted to it, or a setting is refused.
    """
    from fedpriv.noise.fitting.cost import rows_response

    if algorithm is None:
        return rows_response(setting.rounds), setting.workload
    from fedpriv.papers.table import find_algorithm
    from fedpriv.participation.orders import FixedOrder
    from fedpriv.plan.calibration import response_and_workload

    algorithm_row = find_algorithm(algorithm)
    schedule = FixedOrder(setting.rounds, setting.rounds // setting.epochs)
    response, algorithm_workload = response_and_workload(
        algorithm_row, _parse_algorithm_settings(algorithm_row, settings), schedule
    )
    # Clips for a clip norm of 1 become those of the setting, and the plain fixed order its participation.
    return response, dataclasses.replace(
        algorithm_workload, clips=setting.clip * algorithm_workload.clips, schedule=setting.workload.schedule
    )


def _parse_algorithm_settings(row: "Algorithm", assignments: list[str]) -> "NoiseSettings":
    """Parse the algorithm's own keys, with 1 as the default of scales such as `clip` and `step`.

    A clip that an algorithm lets grow is 1 in all rounds here, the bound to which it grows.

    Raises:
        InputError: Noise cannot be fitted to the algorithm, or a key is refused.
    """
    from fedpriv.papers.base import SCALE_SETTINGS, NoiseSettings

    if row.published is None or not issubclass(row.settings, NoiseSettings):
        raise InputError(
            f"--algorithm {row.name}: noise cannot be fitted to what it publishes; give another one, or none"
        )
    return parse_settings(
        row.settings, assignments, {key: 1.0 for key in SCALE_SETTINGS if key in row.settings.model_fields}
    )


def _comparison_lines(
    table: "MechanismTable", seconds: list[float | None], dimension: int
) -> list[tuple[str, ...]]:
    """Format a table of mechanisms as texts: a header, a line for each mechanism, and the lower bound.

    Columns "/least" are ratios of noise to its lower bound.

    Args:
        table: Mechanisms at one guarantee, and the lower bound of their noise.
        seconds: Seconds of a round of each mechanism's noise, or None if they are not measured.
        dimension: Length of the vectors whose time is measured, or 0 for a table without times.
    """
    has_output = table.lower_bound.output is not None
    published = ["output", "queries", "output/least", "queries/least"] if has_output else ["in sums", "/least"]
    header = ["mechanism", "noise std", "rms error", "last round", "in the mean", *published]
    lines = [(*header, *(["ms"] if dimension else []), "memory", "sensitivity")]
    for line, round_seconds in zip(table.lines, seconds, strict=True):
        cost = line.cost
        time_columns = ["-" if round_seconds is None else f"{1000.0 * round_seconds:.3g}"] if dimension else []
        lines.append(
            (
                line.name + (" (auto)" if line.is_auto else ""),
                format_upper(cost.std, 5),  # the noise that is needed, so it is rounded up
                *(f"{value:.5g}" for value in (cost.error_rms, cost.error_last, cost.error_in_mean)),
                *_format_published(line.published, line.ratio),
                *time_columns,
                str(cost.memory_vectors),
                f"{'' if cost.sensitivity.exact else '≤ '}{format_upper(cost.sensitivity.value, 5)}",
            )
        )
    return [
        *lines,
        ("least", *["-"] * 4, *_format_published(table.lower_bound, None), *["-"] * (2 + bool(dimension))),
    ]


def _format_published(values: "PublishedNoise", ratio: "PublishedNoise | None") -> list[str]:
    stds = [values.queries] if values.output is None else [values.output, values.queries]
    ratio_values = () if ratio is None else (ratio.output, ratio.queries)
    ratios = (
        ["1"] * len(stds)
        if ratio is None
        else [f"{quotient:.3f}" for quotient in ratio_values if quotient is not None]
    )
    return [*(f"{value:.5g}" for value in stds), *ratios]


app = typer.Typer(
    help="Accounting without a run: convert guarantees, calibrate noise, compare mechanisms.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,
    rich_markup_mode="markdown",
)
app.command()(expand_option_groups(compare))


@app.command()
def ledger(
    run_dir: RunDir,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print a run's releases, and recompute its claims from them alone.

    The exit code is 1 if a stored claim does not follow from the releases, or these are not of the stored
    scenario.

    Example:

        fedpriv privacy ledger runs/quickstart
    """
    from fedpriv.claims.claim import EXTERNAL_PARTY, EXTERNAL_STEP_NOTE
    from fedpriv.claims.entries import format_differing_cells, read_ledger
    from fedpriv.cli.explore import print_plain

    entries = read_ledger(run_dir)
    refuse(
        {
            f"{run_dir}: no finished cell whose claim could be compared yet; wait for one, or go on with "
            "--resume": not entries
        }
    )
    try:
        data, body = (
            [_entry_data(entry) for entry in entries],
            [] if as_json else [line for entry in entries for line in _ledger_lines(entry)],
        )
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise InputError(
            f"{run_dir}: not a ledger of fedpriv ({type(error).__name__}: {sanitize_line(str(error))})"
        ) from None
    if as_json:
        typer.echo(json.dumps(data))
    else:
        print_table(
            [
                (
                    *("cell", "point", "seed", "trust", "released by", "mechanism", "rounds", "clip"),
                    *("noise std", "relation", "μ", "claimed", ""),
                ),
                *body,
            ]
        )
        if any(stream.party_name == EXTERNAL_PARTY for entry in entries for stream in entry.streams):
            print_plain(EXTERNAL_STEP_NOTE)
    if differing_cells := [entry.cell for entry in entries if not entry.agrees]:
        raise RunError(f"{run_dir}: {format_differing_cells(differing_cells)}")


def _entry_data(entry: "LedgerEntry") -> dict[str, Any]:
    from fedpriv.claims.ledger import stream_to_data

    return {
        "cell": entry.cell,
        "releases": list(map(stream_to_data, entry.streams)),
        **({"evaluations": list(map(stream_to_data, entry.test_streams))} if entry.test_streams else {}),
    }


def _ledger_lines(entry: "LedgerEntry") -> list[tuple[str, ...]]:
    """Format one line of texts for each release stream of a cell, with its μ and the claim of the cell.

    A stream without a μ has its ε at the cell's δ, and one without noise "∞".  The name of a party is followed by
    the part of the run if this is not the rounds.  Evaluations come last, with the claim on test records.
    """
    from fedpriv.claims.claim import format_price
    from fedpriv.claims.ledger import ROUNDS

    point = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in entry.point.items()) or "-"
    claimed_text = format_price(entry.claimed_mu, entry.claimed_epsilon)
    test_claim_text = "none" if entry.claimed_test_mu is None else format_upper(entry.claimed_test_mu, 6)
    steps = [
        (release_stream, "" if release_stream.step == ROUNDS else f", {release_stream.step}", claimed_text)
        for release_stream in entry.streams
    ]
    steps += [(release_stream, ", test records", test_claim_text) for release_stream in entry.test_streams]
    return [
        (
            str(entry.cell),
            point,
            str(entry.seed),
            str(entry.trust),
            f"{stream.party_name}{step}",
            type(stream.mechanism).__name__,
            str(stream.schedule.rounds),
            format_upper(max(stream.clips), 5),
            format_lower(stream.std, 5),
            stream.relation,
            "∞"
            if (guarantee := stream.guarantee) is None
            else format_price(guarantee.mu, guarantee.epsilon_of(entry.delta)),
            price,
            "ok" if entry.agrees else "DIFFERS",
        )
        for stream, step, price in steps
    ]


@app.command()
@expand_option_groups
def selection(
    target: TargetOptions,
    trials: Annotated[float, typer.Option(min=1, help="Mean number of runs.")] = 20.0,
    eta: Annotated[
        float,
        typer.Option(
            min=0,
            help="η of the number of runs, which is negative binomial: 0 for logarithmic, 1 for geometric.",
        ),
    ] = 0.0,
    poisson: Annotated[bool, typer.Option("--poisson", help="Take a Poisson number of runs instead.")] = False,
    as_json: Json = False,
) -> None:
    """Print the privacy cost of publishing only the best of a random number of runs.

    The target is that of one run, its score included: --mu, --zcdp, or --epsilon with --delta. A bound of the
    choice is the smaller of two, one of them by Theorem 2 or 6 of Papernot & Steinke 2022. The bounds hold if the
    number of runs does not depend on the data, the settings of every run are drawn from one public distribution,
    and the number of runs and all other runs stay secret.

    Examples:

        fedpriv privacy selection --mu 1 --trials 20

        fedpriv privacy selection --mu 0.5 --trials 5 --poisson
    """
    from fedpriv.accounting.guarantees import GaussianDP
    from fedpriv.accounting.selection import NegativeBinomialRunCount, PoissonRunCount, PrivateSelection

    refuse({"--poisson: a Poisson number of runs has no --eta; give one of them": poisson and eta})
    mu, delta = target.in_mu, target.reporting_delta
    run_count = PoissonRunCount(trials) if poisson else NegativeBinomialRunCount(trials, eta)
    print_facts(
        {
            "runs": run_count.description,
            "mu": mu,
            "delta": delta,
            "epsilon_of_one_run": GaussianDP(mu).epsilon_of(delta),
            "epsilon_of_the_choice": PrivateSelection(mu, run_count).epsilon_of(delta),
            "epsilon_of_choice_and_run": PrivateSelection(mu, run_count, later_mu=mu).epsilon_of(delta),
        },
        as_json,
    )


@app.command()
@expand_option_groups
def convert(
    *,
    target: TargetOptions,
    order: ParticipationOptions,
    multiplier: Annotated[
        float | None, typer.Option(help="Noise std over clip norm, for records that --sampling draws in secret.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number T of rounds of --multiplier.")] = None,
    together: Annotated[
        list[int] | None,
        typer.Option(
            min=2,
            help="Number of units, such as one person's records, whose ε together is also printed. Repeatable.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn a guarantee into its other forms: give exactly one of --mu, --zcdp, or --epsilon with --delta.

    Or give --multiplier with --sampling and --rounds, for records that take part in secret.

    Examples:

        fedpriv privacy convert --mu 1 --delta 1e-6

        fedpriv privacy convert --epsilon 2 --delta 1e-6

        fedpriv privacy convert --sampling allocation --rounds 60 --multiplier 0.9205 --relation zero-out

        fedpriv privacy convert --sampling poisson --rounds 60 --multiplier 2 --relation zero-out --together 3
    """
    from fedpriv.accounting.guarantees import GaussianDP

    refuse(
        {
            "--multiplier: is a guarantee of its own; leave out --mu, --zcdp and --epsilon": (
                multiplier is not None and (target.mu, target.zcdp, target.epsilon) != (None, None, None)
            ),
            "--rounds, --epochs, --sampling and --groups: are for --multiplier; leave them out": (
                multiplier is None
                and (rounds, order.epochs, order.sampling, order.groups) != (None, 1, "fixed", 1)
            ),
        }
    )
    guarantee = (
        GaussianDP(target.in_mu) if multiplier is None else guarantee_of_multiplier(order, multiplier, rounds)
    )
    facts = order.make_claim(guarantee).conversions(target.reporting_delta)
    for size in together or []:
        facts[f"epsilon_of_{size}_{order.unit}s{GROUP_SUFFIX}"] = guarantee.epsilon_of_group(
            size, target.reporting_delta
        )
    print_facts(facts, as_json)


@app.command()
@expand_option_groups
def noise(
    *,
    rounds: Rounds,
    target: TargetOptions,
    mechanism: MechanismOption = "independent",
    federation: FederationOptions,
    options: MechanismKeys = None,
    as_json: Json = False,
) -> None:
    """Print the noise that a mechanism needs for a target: --mu, --zcdp, or --epsilon with --delta.

    With secret participation (--sampling) the target is the ε that this guarantee has at --delta.

    Examples:

        fedpriv privacy noise --rounds 600 --mu 4 --clip 118.1 --silos 100 --trust trusted

        fedpriv privacy noise --rounds 1000 --epochs 10 --epsilon 2 --delta 1e-6 --mechanism tree
    """
    from fedpriv.accounting.guarantees import GaussianDP

    setting, mu = federation.make_setting(rounds), target.in_mu
    noise_mechanism = _make_mechanism(setting, mechanism, options)
    cost = setting.cost_at_mu(noise_mechanism, mu, target.reporting_delta)
    claim = federation.make_claim(
        setting.guarantee_at_std(noise_mechanism, cost.std) if setting.has_secret_order else GaussianDP(mu)
    )
    _print_cost(mechanism, setting, cost, claim, target.reporting_delta, as_json)


@app.command()
@expand_option_groups
def spent(
    *,
    rounds: Rounds,
    std: Annotated[
        float, typer.Option(help="Standard deviation of the fresh noise vectors, as silo or server draws them.")
    ],
    delta: Delta = None,
    mechanism: MechanismOption = "independent",
    federation: FederationOptions,
    options: MechanismKeys = None,
    as_json: Json = False,
) -> None:
    """Print the guarantee that noise of a given standard deviation has, the inverse of `noise`.

    Example:

        fedpriv privacy spent --rounds 600 --std 1446.4 --clip 118.1
    """
    setting = federation.make_setting(rounds)
    noise_mechanism = _make_mechanism(setting, mechanism, options)
    cost, claim = (
        setting.cost_at_std(noise_mechanism, std),
        federation.make_claim(setting.guarantee_at_std(noise_mechanism, std)),
    )
    _print_cost(mechanism, setting, cost, claim, TargetOptions(delta=delta).reporting_delta, as_json)


def _make_mechanism(setting: "AccountingSetting", name: str, options: list[str] | None) -> "Mechanism":
    from fedpriv.noise.registry import MechanismOptions

    return setting.make_mechanism(name, parse_settings(MechanismOptions, options or []))


def _print_cost(
    mechanism: str,
    setting: "AccountingSetting",
    cost: "MechanismCost",
    claim: "PrivacyClaim[Guarantee]",
    delta: float,
    as_json: bool,
) -> None:
    facts = setting_facts(setting, claim.unit.name) | cost_facts(cost) | claim.conversions(delta)
    print_facts({"mechanism": mechanism, **facts}, as_json)
