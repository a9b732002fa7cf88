"""Advice on algorithm, batch, clip, step, rounds and trust, from public facts alone.

No record is read, because the advice is a function of `Facts`.  The measurements: docs/advise.md.

| here | meaning |
|---|---|
| n, M | units (such as records or persons) of all silos, and the number of silos |
| F | bound on the norm of a record's features; √(F² + 1) bounds it with the constant 1 |
| μ | μ of (ε, δ), by the accountant |
| m | noise terms in the mean: M for an untrusted server, 1 for noise of one party or of a masked sum |
| q = n μ / (√m F) | signal-to-noise ratio of the records |
| travel = step · clip · rounds | largest norm that the model can reach, apart from noise |
| turn | largest move of a score (or of a prediction) in one round, travel · √(F² + 1) / rounds |

For a network of d parameters the advice is DP-Adam, whose step sets the size of every coordinate's move in a
round, and F is not used.  There q = n μ / √(m T d).  Under zero-out it is the ratio of the largest mean of clipped
gradients to the norm of its noise in one of T rounds.  Under replace-one the ratio is half of q.
"""

import json
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any

from torch import device, nn

from fedpriv.accounting.gaussian import mu_of
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import make_release_streams
from fedpriv.core.errors import InputError
from fedpriv.core.figures import format_upper, format_upper_delta
from fedpriv.data.own import Dataset
from fedpriv.data.schema import TableSchema
from fedpriv.data.tables import format_schema_toml
from fedpriv.loss.frozen import trainable_parameters
from fedpriv.noise.trust import RECORD, TRUSTED, UNITS, UNTRUSTED, find_trust, make_unit
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import DTYPES
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.demo import format_toml

DEFAULT_ROUNDS, MAX_ROUNDS = 30, 100
_TABLE_EPSILON = 3.0
CLIP = 0.1
"""Clip as a fraction of the largest feature norm with the constant."""
CLASSES_TRAVEL, CLASSES_POWER = 6.0, 2.0 / 3.0
"""Factor c and power p of the travel c q^p for classes."""
CLASSES_TURN, TURN_POWER = 20.0, 0.75
"""Largest move of a score in a round in which all records pull the same way.

The first is that of 2 classes, the second the power of classes / 2 with which it grows.
"""
REAL_TRAVEL, REAL_TURN = 0.7, 2.0
"""Travel over q, and largest move of a prediction in a round, for a real target in -1 … 1."""
NETWORK_ROUNDS, NETWORK_CLIP, NETWORK_STEP = 100, 1.0, 0.02
"""Rounds without a limit, clip, and step in these rounds up to `NETWORK_WIDTH` parameters."""
SEQUENCE_STEP = 0.05
"""Step of a network whose recurrent or attention layers read numbers, as `NETWORK_STEP` is of others."""
NETWORK_WIDTH, WIDTH_POWER = 10_000, 1.0 / 3.0
"""Parameters above which the step falls, as parameters^(-power)."""
MIN_Q = {True: 3.5, False: 1.5}
"""Smallest q at which a model is likely to beat a constant, by whether the target is real."""


REASONS = {
    "federation.batches": "all records of a silo in every round: a round's noise is relative to the "
    "records that it reads, and rounds that read them all share one budget for nothing: the noise of the "
    "last model does not depend on how many rounds there are",
    "algorithm.name": "dp-sgd with independent noise: where a record takes part in every round, "
    "independent noise has the least error in the sum of all rounds; correlated noise (dp-ftrl) is for "
    "rounds that read different records",
    "federation.rounds": f"{DEFAULT_ROUNDS}, up to {MAX_ROUNDS} where the travel for classes needs them, "
    "and never more than the network allows: more rounds cost messages and no privacy, and gain little "
    "where noise decides how far a model travels",
    "algorithm.clip": f"{CLIP:g} of √(F² + 1), the largest norm of a record's features with the constant: "
    "records then count alike, and only clip times step matters: a small clip cannot diverge",
    "algorithm.step": f"travel / (clip · rounds): travel {CLASSES_TRAVEL:g} q^(2/3) for classes, "
    f"{REAL_TRAVEL:g} q for numbers, and no round that could move a score by more than {CLASSES_TURN:g} "
    f"(classes / 2)^{TURN_POWER:g}, a number by more than {REAL_TURN:g} half ranges: noise grows with the "
    "travel as the signal does, until the scores are as large as they need to be",
    "algorithm.output": "the average of the models for numbers, the last one for classes: steps that "
    "overshoot a least-squares minimum are averaged out; classes need the longer way of the last",
    "algorithm.trust": "as asked; secure aggregation where silos can agree on keys: M silos that each add "
    "noise add √M times that of one; a masked sum has it once, and no server is trusted",
    "federation.sampling": '"fixed": where every record is read in every round, a secret order hides nothing',
    "data.scale": "no first step: noisy means and deviations take budget, and pay where ranges are much "
    "wider than the records",
}
"""Choice and reason by key, written above the keys that a scenario has.  docs/advise.md has the measurements."""
NETWORK_REASONS = {
    "federation.batches": "all records of a silo in every round: a round's noise is relative to the records that "
    "it reads",
    "algorithm.name": "dp-adam: a step of Adam sets the size of every parameter's move, so that layers of any "
    "scale learn and none is thrown far, where a rule of feature norms knows nothing about a network's gradients",
    "federation.rounds": f"{NETWORK_ROUNDS}, or fewer if no more are allowed: in these more was learnt than in 30",
    "algorithm.clip": f"{NETWORK_CLIP:g}, about the length of a network's gradients near a minimum: a smaller "
    "one turns every gradient into its direction, which misses the mean of skewed targets, such as counts",
    "algorithm.step": f"{NETWORK_STEP:g}, or {SEQUENCE_STEP:g} if recurrent or attention layers read numbers, up "
    f"to {NETWORK_WIDTH:,} parameters, less by their cube root above, and longer by √({NETWORK_ROUNDS} / rounds) "
    "in fewer rounds: noise moves a parameter by about step · √rounds, and such layers learn little near their "
    "start",
    "algorithm.trust": REASONS["algorithm.trust"],
    "federation.sampling": REASONS["federation.sampling"],
}
"""Choice and reason by key for a network."""


@dataclass(frozen=True)
class Facts:
    """Public facts of a federation.

    | field | meaning |
    |---|---|
    | `sizes` | number of training units of each silo: records, or the persons or clients that are protected |
    | `features` | number of features of a record |
    | `classes` | number of classes, 0 for a real target, which is scaled to -1 … 1 |
    | `feature_norm` | F, bound on the norm of a record's features, or None for √features, that of -1 … 1 |
    | `epsilon`, `delta` | privacy target of the run |
    | `trust`, `relation`, `unit` | as in a scenario |
    | `rounds` | largest number of rounds that is allowed, or None for no limit |
    | `records_of_person` | largest number of a person's or client's records that count, for these units |
    | `parameters` | d, number of trained parameters of a network, or None for a linear model |
    | `sequence` | whether recurrent or attention layers of a network read numbers, such as an LSTM on signals |

    Raises:
        InputError: If the number of silos or another number is out of its range, the unit is unknown, a unit
            other than "record" lacks `records_of_person`, or a linear model is to have layers for sequences.
    """

    sizes: tuple[int, ...]
    features: int
    classes: int
    epsilon: float
    delta: float = 1e-5
    trust: str = "untrusted"
    feature_norm: float | None = None
    rounds: int | None = None
    relation: str = "zero-out"
    unit: str = RECORD.name
    records_of_person: int | None = None
    parameters: int | None = None
    sequence: bool = False

    def __post_init__(self) -> None:
        """Refuse facts outside of the ranges for which advice is computed."""
        _check_integer("silos", len(self.sizes), 1, 100_000)
        for silo, size in enumerate(self.sizes):
            _check_integer(f"records of silo {silo}", size, 1, 10**9)
        _check_integer("features", self.features, 1, 10**7)
        if self.classes != 0:
            _check_integer("classes", self.classes, 2, 10**5, " (0 for a regression)")
        optional_limits = {"rounds": 10**6, "parameters": 10**10, "records_of_person": 10**9}
        for name, limit in optional_limits.items():
            if (value := getattr(self, name)) is not None:
                _check_integer(name, value, 1, limit)
        if self.feature_norm is not None:
            _check_number("feature_norm", self.feature_norm, 1e-6, 1e6)
        if self.sequence and self.parameters is None:
            raise InputError("advise: sequence: only a network has such layers; give its parameters, too")
        _check_number("epsilon", self.epsilon, 1e-3, 100.0)
        _check_number("delta", self.delta, 1e-30, 0.01)
        # Refuses an unknown unit, and persons and clients without a number of records.
        make_unit(self.unit, 1 if self.unit == RECORD.name else self.records_of_person or 0)

    @property
    def unit_count(self) -> int:
        """n, units of all silos."""
        return sum(self.sizes)

    @property
    def norm(self) -> float:
        """F, the bound on the norm of a record's features, without the constant."""
        return math.sqrt(self.features) if self.feature_norm is None else self.feature_norm


def _check_integer(name: str, value: object, low: int, high: int, more: str = "") -> None:
    """Raise InputError, with `more` at its end, unless a fact is an `int` from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise InputError(f"advise: {name} = {value!r}: expected a whole number from {low:,} to {high:,}{more}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise InputError unless a fact is an `int` or `float` from `low` to `high`."""
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
        raise InputError(f"advise: {name} = {value!r}: expected a number from {low:g} to {high:g}")


@dataclass(frozen=True)
class Recommendation:
    """Key and value of a setting, with the reason."""

    key: str
    value: Any
    why: str


_CONSTANT_CAVEAT = """ A constant is right as often as the largest class occurs, which nothing here tells: where \
that is far above the others, compare with it, or judge by AUC."""


@dataclass(frozen=True)
class Forecast:
    """Size of the noise in the published model, or in a round's mean gradient for a network.

    It follows from the plan of a run, without any record.
    """

    std: float
    """Standard deviation of one coordinate."""
    norm: float
    """Norm of the noise in all coordinates, std · √dimension."""
    travel: float
    """Largest norm of the model, apart from noise."""
    q: float
    """Signal-to-noise ratio of the records, as in the table of this module."""
    enough: bool
    """Whether q is at least `MIN_Q`, or True for a network."""
    classes: int
    """Number of classes, or 0 for a real target."""
    is_network: bool = False
    """Whether `std` and `norm` are those of a round's mean gradient, and `travel` is the clip."""

    @property
    def sentence(self) -> str:
        """Forecast as a text for a person."""
        coordinate_std, vector_norm = format_upper(self.std, 3), format_upper(self.norm, 3)
        if self.is_network:
            return (
                f"Noise of a round's mean gradient: {coordinate_std} in each coordinate, {vector_norm} in all, "
                f"beside a mean of norm {self.travel:g} at most; q = {self.q:.3g}. How much is learnt depends on "
                "how alike the records' gradients are: a run that learns nothing says so at its end."
            )
        sentence = (
            f"Noise of the published model: {coordinate_std} in each coordinate, {vector_norm} in all, "
            f"beside a model of norm {format_upper(self.travel, 3)} at most; q = {self.q:.3g}."
        )
        if not self.enough:
            return (
                f"{sentence} So little is left of the signal that a constant prediction is likely to do as well."
            )
        return sentence + _CONSTANT_CAVEAT * bool(self.classes)


@dataclass(frozen=True)
class Advice:
    """Advised scenario, with reasons for its settings, its privacy cost, and alternatives."""

    facts: Facts
    tree: Mapping[str, Any]
    """Scenario as nested dictionaries, as `fedpriv.run` takes it."""
    chosen: tuple[Recommendation, ...]
    """Settings with their reasons."""
    forecast: Forecast
    epsilon: float
    """ε of the plan by the accountant."""
    others: tuple[str, ...]
    """Texts on alternatives, such as more rounds, and a warning if δ is large."""

    @property
    def text(self) -> str:
        """Text of the scenario file, with a reason above every setting that has one in `chosen`."""
        return f"name = {json.dumps(self.tree['name'])}\n\n" + "\n".join(self.sections().values())

    def sections(self, notes: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the text of each section of the scenario file by name.

        A reason stands above every setting that has one in `chosen`, and the forecast of the noise below the
        header [privacy].  The key "table", the description of the columns, becomes the section [data.table].

        Args:
            notes: Comment lines below the header of a section, by the section's name.  A note on "privacy"
                replaces the forecast.

        Raises:
            ValueError: If "table" is no description of columns.
        """
        reasons = {recommendation.key: recommendation.why for recommendation in self.chosen}
        comments = {"privacy": format_comment(self.forecast.sentence), **(notes or {})}
        sections = {}
        for name, keys in self.tree.items():
            if not isinstance(keys, Mapping):
                continue  # the scenario's name, which stands above the sections
            lines = [
                format_comment(reasons.get(f"{name}.{key}", "")) + format_toml({key: value})
                for key, value in keys.items()
                if key != "table"
            ]
            if (table := keys.get("table")) is not None:
                lines.append("\n" + format_schema_toml(TableSchema.model_validate(table), "data.table"))
            sections[name] = f"[{name}]\n{comments.get(name, '')}{''.join(lines)}"
        return sections


def format_comment(text: str) -> str:
    """Format a sentence as comment lines of a TOML file, and an empty text as no line."""
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, 100))


def advise_on_facts(facts: Facts, data: Mapping[str, Any] | None = None, name: str = "advised") -> Advice:
    """Advise on settings for these facts, and plan a run of them for its ε and its noise.

    Guarantee: nothing is read but the arguments: facts, and the keys of [data], whose files are not opened.

    Args:
        facts: Public facts of the federation.
        data: The scenario's [data], by default the file records.npz, which need not exist yet.
        name: Name of the scenario.

    Raises:
        InputError: If no run can have these facts, or a scenario cannot have this name.
    """
    settings = _choose_numbers(facts)
    tree = _make_tree(facts, settings, data or {"name": "records.npz"}, name)
    cell, plan = _make_plan(facts, tree)
    claim = compute_claim(make_release_streams(plan, cell.schedule.rounds))
    assert claim is not None
    forecast = _make_forecast(facts, settings, plan)
    return Advice(
        facts,
        tree,
        _explain_settings(facts, tree, settings),
        forecast,
        float(claim.guarantee.figures(facts.delta)["epsilon"] or math.inf),
        _describe_alternatives(facts, forecast),
    )


@dataclass(frozen=True)
class _AdvisedNumbers:
    """Numbers from the rules, in the terms of the table at the top of this module."""

    q: float
    rounds: int
    clip: float
    """Norm to which each unit's gradient is clipped."""
    step: float
    travel: float
    """Largest norm of the model apart from noise, or the clip for a network."""


def _find_q(facts: Facts) -> float:
    """Compute q = n μ / (√m F), or n μ / √(m T d) for a network."""
    parties = 1 if _has_one_noise_source(facts.trust) else len(facts.sizes)
    scale = facts.norm if facts.parameters is None else math.sqrt(_network_rounds(facts) * facts.parameters)
    return facts.unit_count * mu_of(facts.epsilon, facts.delta) / (math.sqrt(parties) * scale)


def _network_rounds(facts: Facts) -> int:
    return NETWORK_ROUNDS if facts.rounds is None else min(NETWORK_ROUNDS, facts.rounds)


def _has_one_noise_source(trust: str) -> bool:
    """Whether the mean has a single noise term, that of a server, of a curator or of a masked sum."""
    return find_trust(trust).name != UNTRUSTED.name


def _choose_numbers(facts: Facts) -> _AdvisedNumbers:
    """Choose travel, rounds, clip and step by the rules of docs/advise.md.

    For a linear model the travel is 6 q^(2/3) for classes and 0.7 q for a real target, or less if a round would
    turn a score too far.  Classes get as many rounds, from 30 to 100, as the travel needs, and a real target 30.
    The clip is 0.1 √(F² + 1), and the step travel / (clip · rounds), to three digits each.  The travel of the
    result is that of the rounded numbers.

    A network has clip 1, 100 rounds and the step 0.02, or 0.05 if recurrent or attention layers read numbers.  The
    step is shorter for many parameters and longer for fewer rounds.  The rounds are at most those of the facts.
    """
    q, max_norm = _find_q(facts), math.hypot(facts.norm, 1.0)
    if facts.parameters is not None:
        rounds = _network_rounds(facts)
        width_factor = min(1.0, (NETWORK_WIDTH / facts.parameters) ** WIDTH_POWER)
        base_step = SEQUENCE_STEP if facts.sequence else NETWORK_STEP
        step = base_step * math.sqrt(NETWORK_ROUNDS / rounds) * width_factor
        return _AdvisedNumbers(q, rounds, NETWORK_CLIP, step, NETWORK_CLIP)
    if facts.classes:
        target_travel, max_turn = (
            CLASSES_TRAVEL * q**CLASSES_POWER,
            CLASSES_TURN * (facts.classes / 2.0) ** TURN_POWER,
        )
    else:
        target_travel, max_turn = REAL_TRAVEL * q, REAL_TURN
    needed_rounds = (
        min(MAX_ROUNDS, max(DEFAULT_ROUNDS, math.ceil(target_travel * max_norm / max_turn)))
        if facts.classes
        else DEFAULT_ROUNDS
    )
    rounds, clip = (
        needed_rounds if facts.rounds is None else min(needed_rounds, facts.rounds),
        _round_to_three_digits(CLIP * max_norm),
    )
    step = _round_to_three_digits(min(target_travel, max_turn * rounds / max_norm) / (clip * rounds))
    return _AdvisedNumbers(q, rounds, clip, step, step * clip * rounds)


def _round_to_three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _make_tree(facts: Facts, settings: _AdvisedNumbers, data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Make the scenario of the advised numbers, in which every round reads all units of each silo."""
    privacy = {"relation": facts.relation, "epsilon": float(facts.epsilon), "delta": float(facts.delta)}
    if facts.unit != RECORD.name:
        privacy |= {"unit": facts.unit, "records": facts.records_of_person}
    is_linear = facts.parameters is None
    return {
        "name": name,
        "data": dict(data),
        "model": _make_linear_model(facts) if is_linear else {"name": NETWORK_NAME},
        "federation": {
            "silos": len(facts.sizes),
            "rounds": settings.rounds,
            "epochs": settings.rounds,
            "batches": list(facts.sizes),
        },
        "algorithm": {
            "name": "dp-sgd" if is_linear else "dp-adam",
            "trust": facts.trust,
            "clip": settings.clip,
            "step": _round_to_three_digits(settings.step),
            **({"output": "last" if facts.classes else "average"} if is_linear else {}),
        },
        "privacy": privacy,
        "run": {"metrics": ["auc", "balanced_accuracy"] if facts.classes else ["r2", "mae"]},
    }


NETWORK_NAME = "my-network"
"""Name of a network in an advised scenario, which a file of --import gives to `fedpriv.add_model`."""


def _make_linear_model(facts: Facts) -> dict[str, Any]:
    return {
        "name": "softmax-regression" if facts.classes else "linear-regression",
        "feature_norm": _round_up(facts.norm),
    }


def _round_up(norm: float) -> float:
    """Round up to three digits, so that features of norm √k are not scaled down."""
    return float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(repr(float(norm))))


def _make_plan(facts: Facts, tree: Mapping[str, Any]) -> tuple[Cell, Plan]:
    """Plan a run of the scenario without its data.

    Persons and clients are planned as records, because both are clipped to the same norm and batches count them
    alike.  A network is planned as a linear model, because noise does not depend on the number of parameters.
    """
    privacy = {key: value for key, value in tree["privacy"].items() if key not in ("unit", "records")}
    planned_tree = {
        **tree,
        "data": {"name": "records.npz"},
        "model": _make_linear_model(facts),
        "privacy": privacy,
    }
    cell = resolve_cell(planned_tree, "advise")
    row, dtype = cell.model.row, DTYPES[cell.run.dtype]
    with device("meta"):  # a model takes no memory there, whatever its number of parameters
        return cell, make_plan(cell, row.objective((facts.features,), facts.classes, dtype, cell.model.settings))


def _make_forecast(facts: Facts, settings: _AdvisedNumbers, plan: Plan) -> Forecast:
    """Compute the forecast from the plan.

    A linear model adds up step · noise over all rounds.  For a real target the output is the average of the
    models, whose noise is about that of this sum over √3 in many rounds, and more in a few.
    """
    if facts.parameters is not None:
        std = plan.noise.std_in_mean
        norm = std * math.sqrt(facts.parameters)
        return Forecast(std, norm, settings.travel, settings.q, True, facts.classes, is_network=True)
    std = settings.step * plan.noise.std_in_mean * math.sqrt(settings.rounds)
    if not facts.classes:
        std /= math.sqrt(3.0)  # variance of the average of a random walk
    norm = std * math.sqrt(plan.objective.dimension)
    return Forecast(std, norm, settings.travel, settings.q, settings.q >= MIN_Q[facts.classes == 0], facts.classes)


def _explain_settings(
    facts: Facts, tree: Mapping[str, Any], settings: _AdvisedNumbers
) -> tuple[Recommendation, ...]:
    values = {
        "federation.batches": tree["federation"]["batches"],
        "federation.rounds": settings.rounds,
        "federation.sampling": "fixed",
        "data.scale": "none",
        **{f"algorithm.{key}": value for key, value in tree["algorithm"].items()},
    }
    # A user's own data.scale is no choice of the advice.
    return tuple(
        Recommendation(key, values[key], reason)
        for key, reason in (REASONS if facts.parameters is None else NETWORK_REASONS).items()
        if key != "data.scale" or "scale" not in tree["data"]
    )


def _describe_alternatives(facts: Facts, forecast: Forecast) -> tuple[str, ...]:
    """Describe what secure aggregation, more rounds and a secret order gain, and warn of a large δ.

    δ is large if its product with the number of units of the largest silo is 1 or more, because a release that
    shows each unit with probability δ would then be expected to show one.

    Args:
        facts: Public facts of the federation.
        forecast: Noise of the advised run, with its q.
    """
    alternatives = []
    silos = len(facts.sizes)
    if not _has_one_noise_source(facts.trust) and silos > 1:
        masked_q = _find_q(replace(facts, trust="secure-aggregation"))
        alternatives.append(
            f"Secure aggregation: q = {masked_q:.3g} in place of {forecast.q:.3g}, as "
            f"{math.sqrt(silos):.2g} times the records at each silo, or about as many times ε, would give."
        )
    alternatives.append(
        "More rounds: the noise in the last model is the same; they help only where the step is at its limit."
        if facts.parameters is None
        else "More rounds: with a step shorter by the root of their number they change little, and take longer."
    )
    alternatives.append("A secret order: nothing, since every record is read in every round.")
    if facts.delta * max(facts.sizes) >= 1.0:
        alternatives.append(
            f"delta = {format_upper_delta(facts.delta)} is not below 1 "
            f"over the {max(facts.sizes):,} {UNITS[facts.unit].noun}s of a silo: take one that is far below."
        )
    return tuple(alternatives)


def advise(
    *,
    records: int | Sequence[int],
    features: int,
    epsilon: float,
    silos: int | None = None,
    classes: int = 0,
    data: Mapping[str, Any] | None = None,
    name: str = "advised",
    **further_facts: Any,
) -> Advice:
    """Advise on algorithm, batch, clip, step, rounds and trust for public facts.

    Args:
        records: Number of training records of each silo, or of persons or clients if `unit` protects these.  A
            single number stands for silos that all have the same.
        features: Number of features of a record.
        epsilon: ε of the privacy budget, with δ = 1e-5 unless `delta` is given.
        silos: Number of silos, which may be omitted if `records` has a number for each silo.
        classes: Number of classes, 0 for a regression.
        data: The scenario's [data], by default the file records.npz.  The file is not opened.
        name: Name of the scenario.
        further_facts: Further fields of `Facts`, which are delta, trust, feature_norm, rounds, relation,
            unit, records_of_person, and for a network `parameters` and `sequence`.

    Returns:
        The scenario with reasons, the forecast of its noise, and alternatives.

    Raises:
        InputError: If a fact is out of its range or unknown, no run can have all facts, or a scenario cannot have
            this name.

    Example:
        >>> import fedpriv
        >>> advice = fedpriv.advise(records=500, silos=4, features=13, epsilon=1.0, classes=2)
        >>> advice.tree["federation"]["batches"]
        [500, 500, 500, 500]
    """
    if not isinstance(records, Sequence):
        _check_integer("silos", silos, 1, 100_000)
        assert silos is not None
        sizes = (records,) * silos
    else:
        sizes = tuple(records)
        if silos is not None and silos != len(sizes):
            raise InputError(f"advise: silos = {silos}: records has {len(sizes)} numbers, one for each silo")
    if unknown := sorted(further_facts.keys() - {*(fact_names := [*Facts.__dataclass_fields__][1:])}):
        raise InputError(f"advise: {unknown[0]}: no fact; known are records, silos, {', '.join(fact_names)}")
    return advise_on_facts(Facts(sizes, features, classes, epsilon, **further_facts), data, name)


def advise_on_table(path: Path, schema: TableSchema, sizes: Sequence[int], unit: Mapping[str, Any]) -> Advice:
    """Advise on a table, with ε = 3.

    Args:
        path: File of the table, whose name becomes that of the scenario.
        schema: Description of the table.
        sizes: Number of training units of each silo.
        unit: Keys `unit` and `records` of [privacy], or none if single records are protected.

    Raises:
        InputError: No run can have these facts.
    """
    keys = {"unit": unit["unit"], "records_of_person": unit["records"]} if unit else {}
    facts = Facts(
        tuple(sizes), schema.width, schema.class_count, _TABLE_EPSILON, feature_norm=schema.max_norm, **keys
    )
    data_section = {"name": str(path), "partition": "site" if schema.site is not None else "iid"}
    name = "".join(
        character if character.isalnum() and character.isascii() else "-" for character in path.stem.lower()
    ).strip("-")
    return advise_on_facts(facts, data_section, name or "table")


def _reads_sequences(module: nn.Module) -> bool:
    """Whether a module has a recurrent layer or attention of torch, and no embedding of tokens."""
    layers = list(module.modules())
    return any(
        isinstance(layer, nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention) for layer in layers
    ) and not any(isinstance(layer, nn.Embedding) for layer in layers)


OWN_DATA_SCENARIO = "own-data"
_FACT_KEYS = ("federation.silos", "federation.samples", "federation.rounds", "algorithm.trust")
_FURTHER_KEYS = ("privacy.epsilon", "privacy.delta", "privacy.relation", "algorithm.clip", "algorithm.step")
_SECTIONS = ("federation.", "algorithm.", "privacy.")


def as_advised(
    tree: Mapping[str, Any], data: Dataset, settings: Mapping[str, Any] | None, module: nn.Module | None = None
) -> dict[str, Any]:
    """Return a scenario with advised algorithm, rounds, clip and step, whose rounds read whole silos.

    Facts come from the settings, the scenario and the data.  If the settings sweep ε or trust, the advice is for
    the smallest ε and the first trust.  The scenario is returned unchanged if it is another one than the shipped
    own-data, if the program sets a key that excludes the advice, such as another algorithm, or if the facts allow
    none.  A number of rounds that the program sets is kept, with a shorter step if the advice has fewer.  A
    warning is issued if the server is trusted by the scenario alone.

    Guarantee: of `data` the number of records, their width and `class_count` decide; no record does, and no label
    other than by `class_count`, which `make_dataset` infers from the labels unless the program gives it.  Of
    `module` the number of trained parameters decides, and whether it reads sequences of numbers.

    Args:
        tree: Scenario as nested dictionaries.
        data: Records that a program gives.
        settings: Values that the program sets, by dotted key, or None for another scenario than own-data.
        module: Module that a program gives, or None for the scenario's model.
    """
    if settings is None:
        return dict(tree)
    # Other settings, such as another algorithm or unit, are outside of the advice.
    advised_name = "dp-sgd" if module is None else "dp-adam"
    other_keys = (
        settings.keys()
        - {*_FACT_KEYS, *_FURTHER_KEYS}
        - ({"algorithm.name"} if settings.get("algorithm.name") == advised_name else set())
    )
    if any(key.startswith(_SECTIONS) for key in other_keys):
        return dict(tree)
    federation, algorithm, privacy = (dict(tree[name]) for name in ("federation", "algorithm", "privacy"))
    # A missing setting is None, and then the scenario, the data or the advice decide.
    known_settings: dict[str, Any] = {key: settings.get(key) for key in (*_FACT_KEYS, *_FURTHER_KEYS)}
    record_count = len(data.train_labels)
    try:
        epsilons, trust = (
            known_settings["privacy.epsilon"] or privacy["epsilon"],
            known_settings["algorithm.trust"],
        )
        trust = trust[0] if trust and isinstance(trust, list | tuple) else trust or algorithm["trust"]
        samples, silos = (
            int(known_settings["federation.samples"] or record_count),
            int(known_settings["federation.silos"] or federation["silos"]),
        )
        facts = Facts(
            tuple(federation.get("batches", (samples // silos,) * silos)),
            data.train_images[0].size,
            data.class_count,
            float(min(epsilons) if isinstance(epsilons, list | tuple) else epsilons),
            float(known_settings["privacy.delta"] or privacy["delta"]),
            trust=trust,
            feature_norm=settings.get("model.feature_norm", tree.get("model", {}).get("feature_norm")),
            rounds=known_settings["federation.rounds"],
            relation=known_settings["privacy.relation"] or privacy["relation"],
            parameters=None
            if module is None
            else sum(parameter.numel() for parameter in trainable_parameters(module).values()),
            sequence=module is not None and _reads_sequences(module),
        )
        advised_tree = advise_on_facts(facts).tree
    except (InputError, TypeError, ValueError, ZeroDivisionError):
        return dict(tree)  # there is no advice for these facts
    if trust == TRUSTED.name and known_settings["algorithm.trust"] is None:
        noise_ratio = math.sqrt(silos)
        warnings.warn(
            "own-data trusts the server, which sees every silo's sums without noise. With trust='untrusted' each "
            f"silo adds the noise itself, and the mean has {noise_ratio:.2g} times as much; with "
            "trust='secure-aggregation' it has as much as now. Give one of the three to leave this line out.",
            stacklevel=4,
        )
    rounds = facts.rounds or advised_tree["federation"]["rounds"]
    algorithm = {**advised_tree["algorithm"]}
    # The travel of a linear model stays the same in more rounds, and so does the random walk of a network's noise.
    algorithm["step"] *= (advised_tree["federation"]["rounds"] / rounds) ** (1.0 if module is None else 0.5)
    return {
        **tree,
        "federation": {
            **federation,
            **({} if "batches" in federation else {"samples": samples}),
            "rounds": rounds,
            "epochs": rounds,
        },
        "algorithm": algorithm,
    }
