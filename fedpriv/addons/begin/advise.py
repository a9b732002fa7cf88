"""Advise which row, batch, clip, step, rounds and trust to take, from public facts alone.

No record is read: everything follows from `Facts`.  docs/advise.md has the measurement behind every constant.

| here | meaning |
|---|---|
| n, M | units (records or persons) of all silos, and the number of silos |
| F | bound on the norm of a record's features with the constant 1 |
| μ | of (ε, δ), by the accountant |
| m | parties that add noise: M for an untrusted server, 1 where one party or a masked sum has it |
| q = n μ / (√m F) | what the records say beside the noise: the one number that the rules turn on |
| travel = step · clip · rounds | norm that the model reaches at most |

The scenario own-data for records that a program gives, with what `fedpriv advise` says of their numbers.
"""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedpriv.accounting.gaussian import mu_of
from fedpriv.claims.claim import compute_claim
from fedpriv.claims.ledger import make_release_streams
from fedpriv.core.errors import InputError
from fedpriv.core.figures import format_upper, format_upper_delta
from fedpriv.data.own import Dataset
from fedpriv.data.schema import TableSchema
from fedpriv.data.tables import format_schema_toml
from fedpriv.noise.trust import RECORD, UNTRUSTED, find_trust
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import DTYPES
from fedpriv.scenario.load import resolve_cell
from fedpriv.scenario.schema import Cell
from fedpriv.silo.demo import format_toml

DEFAULT_ROUNDS, MAX_ROUNDS = 30, 100
CLIP = 0.1
"""Of F: less than most gradients have."""
CLASSES_TRAVEL, CLASSES_POWER = 6.0, 2.0 / 3.0
CLASSES_TURN, TURN_POWER = 20.0, 0.75
"""The most that a round moves a score where all records pull one way; of 2 classes, and growing with classes/2."""
REAL_TRAVEL, REAL_TURN = 0.7, 2.0
"""The same of a prediction in -1 … 1."""
MIN_Q = {True: 3.5, False: 1.5}
"""q of a regression, and of classes, below which a constant does as well."""


REASONS = {
    "federation.batches": "all records of a silo in every round: a round's noise is relative to the "
    "records that it reads, and rounds that read them all share one budget for nothing: the noise of the "
    "last model does not depend on how many rounds there are",
    "algorithm.name": "dp-sgd with independent noise: where a record takes part in every round, "
    "independent noise has the least error in the sum of all rounds; correlated noise (dp-ftrl) is for "
    "rounds that read different records",
    "federation.rounds": f"{DEFAULT_ROUNDS}, up to {MAX_ROUNDS} where the travel needs them, and never more than "
    "the network allows: more rounds cost messages and no privacy, and gain little where noise decides "
    "how far a model travels",
    "algorithm.clip": f"{CLIP:g} of a record's largest feature norm F: records then count alike, and only "
    "clip times step matters: a small clip cannot diverge",
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
"""Setting and reason of each key; docs/advise.md has the measurement behind it."""


@dataclass(frozen=True)
class Facts:
    """Public facts of a federation; InputError, naming the fact, for numbers that no federation has.

    | field | meaning |
    |---|---|
    | `sizes` | units of each silo that a round can read: records, or persons where they are protected |
    | `features` | numbers that a record becomes |
    | `classes` | 0 for a real target, scaled to -1 … 1 |
    | `feature_norm` | bound on a record's norm; features in -1 … 1 have √features |
    | `rounds` | the most that the network allows; None: as many as the rules want |
    | `records_of_person` | that count, for unit = "user" |
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

    def __post_init__(self) -> None:
        _check_integer("silos", len(self.sizes), 1, 100_000)
        for silo, size in enumerate(self.sizes):
            _check_integer(f"records of silo {silo}", size, 1, 10**9)
        _check_integer("features", self.features, 1, 10**7)
        if self.classes != 0:
            _check_integer("classes", self.classes, 2, 10**5, " (0 for a regression)")
        if self.rounds is not None:
            _check_integer("rounds", self.rounds, 1, 10**6)
        if self.feature_norm is not None:
            _check_number("feature_norm", self.feature_norm, 1e-6, 1e6)
        _check_number("epsilon", self.epsilon, 1e-3, 100.0)
        _check_number("delta", self.delta, 1e-30, 0.01)

    @property
    def unit_count(self) -> int:
        """n."""
        return sum(self.sizes)

    @property
    def norm(self) -> float:
        """The bound on a record's features, without the constant."""
        return math.sqrt(self.features) if self.feature_norm is None else self.feature_norm


def _check_integer(name: str, value: object, low: int, high: int, more: str = "") -> None:
    if type(value) is not int or not low <= value <= high:
        raise InputError(f"advise: {name} = {value!r}: expected a whole number from {low:,} to {high:,}{more}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
        raise InputError(f"advise: {name} = {value!r}: expected a number from {low:g} to {high:g}")


@dataclass(frozen=True)
class Recommendation:
    """One setting: its key and value, and the reason in a sentence."""

    key: str
    value: Any
    why: str


_CONSTANT_CAVEAT = """ A constant is right as often as the largest class occurs, which nothing here tells: where \
that is far above the others, compare with it, or judge by AUC."""


@dataclass(frozen=True)
class Forecast:
    """What the noise will be, from the plan that a run has; no record says what the signal is.

    `std` is that of one coordinate of the published model, `norm` of all of them, `travel` the norm of the model.
    """

    std: float
    norm: float
    travel: float
    q: float
    enough: bool
    classes: int

    @property
    def sentence(self) -> str:
        """The forecast as a person reads it."""
        each, norm = format_upper(self.std, 3), format_upper(self.norm, 3)
        told = f"Noise of the published model: {each} in each coordinate, {norm} in all, beside a model of norm "
        told += f"{self.travel:.3g} at most; q = {self.q:.3g}."
        if not self.enough:
            return f"{told} So little is left of the signal that a constant prediction is likely to do as well."
        return told + _CONSTANT_CAVEAT * bool(self.classes)


@dataclass(frozen=True)
class Advice:
    """What to take, why, what it costs and hides, and what else would buy."""

    facts: Facts
    tree: Mapping[str, Any]
    """The scenario as nested dictionaries, which `fedpriv.run` takes."""
    chosen: tuple[Recommendation, ...]
    forecast: Forecast
    epsilon: float
    """Of the plan, by the accountant: at most what was asked for."""
    others: tuple[str, ...]
    """What secure aggregation, more rounds or a secret order would buy."""

    @property
    def text(self) -> str:
        """The scenario file, a reason above every setting."""
        return f"name = {json.dumps(self.tree['name'])}\n\n" + "\n".join(self.sections().values())

    def sections(self, notes: Mapping[str, str] | None = None) -> dict[str, str]:
        """The file's sections by name; `notes` are comments below the headers."""
        whys = {one.key: one.why for one in self.chosen}
        told = {"privacy": format_comment(self.forecast.sentence), **(notes or {})}
        found = {}
        for name, keys in self.tree.items():
            if not isinstance(keys, Mapping):
                continue
            lines = [
                format_comment(whys.get(f"{name}.{key}", "")) + format_toml({key: value})
                for key, value in keys.items()
                if key != "table"
            ]
            if (table := keys.get("table")) is not None:
                lines.append("\n" + format_schema_toml(TableSchema.model_validate(table), "data.table"))
            found[name] = f"[{name}]\n{told.get(name, '')}{''.join(lines)}"
        return found


def format_comment(text: str) -> str:
    """A sentence as comments of a TOML file; nothing for nothing."""
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, 100))


def advise_on_facts(facts: Facts, data: Mapping[str, Any] | None = None, name: str = "advised") -> Advice:
    """Advise for these facts; `data` is the scenario's [data], by default an .npz file that is still to be named.

    InputError, in one line, for facts that no run can have.  Guarantee: nothing is read but the arguments: facts,
    and the key-value pairs of [data], whose files are not opened.
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
    q: float
    rounds: int
    clip: float
    travel: float

    @property
    def step(self) -> float:
        return self.travel / (self.clip * self.rounds)


def _find_q(facts: Facts) -> float:
    """q of the facts."""
    parties = 1 if _has_one_noise_source(facts.trust) else len(facts.sizes)
    return facts.unit_count * mu_of(facts.epsilon, facts.delta) / (math.sqrt(parties) * facts.norm)


def _has_one_noise_source(trust: str) -> bool:
    """Whether the mean has the noise of one party: the server's, or that of a masked sum."""
    return find_trust(trust).name != UNTRUSTED.name


def _choose_numbers(facts: Facts) -> _AdvisedNumbers:
    q, largest = _find_q(facts), math.hypot(facts.norm, 1.0)
    if facts.classes:
        wanted, turn = CLASSES_TRAVEL * q**CLASSES_POWER, CLASSES_TURN * (facts.classes / 2.0) ** TURN_POWER
    else:
        wanted, turn = REAL_TRAVEL * q, REAL_TURN
    needed = (
        min(MAX_ROUNDS, max(DEFAULT_ROUNDS, math.ceil(wanted * largest / turn)))
        if facts.classes
        else DEFAULT_ROUNDS
    )
    rounds = needed if facts.rounds is None else min(needed, facts.rounds)
    return _AdvisedNumbers(q, rounds, _round_to_three_digits(CLIP * largest), min(wanted, turn * rounds / largest))


def _round_to_three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _make_tree(facts: Facts, settings: _AdvisedNumbers, data: Mapping[str, Any], name: str) -> dict[str, Any]:
    privacy = {"relation": facts.relation, "epsilon": float(facts.epsilon), "delta": float(facts.delta)}
    if facts.unit != RECORD.name:
        privacy |= {"unit": facts.unit, "records": facts.records_of_person}
    return {
        "name": name,
        "data": dict(data),
        "model": {
            "name": "softmax-regression" if facts.classes else "linear-regression",
            "feature_norm": _round_up(facts.norm),
        },
        "federation": {
            "silos": len(facts.sizes),
            "rounds": settings.rounds,
            "epochs": settings.rounds,
            "batches": list(facts.sizes),
        },
        "algorithm": {
            "name": "dp-sgd",
            "trust": facts.trust,
            "clip": settings.clip,
            "step": _round_to_three_digits(settings.step),
            "output": "last" if facts.classes else "average",
        },
        "privacy": privacy,
        "run": {"metrics": ["auc", "balanced_accuracy"] if facts.classes else ["r2", "mae"]},
    }


def _round_up(norm: float) -> float:
    """Three digits, rounded up: features of norm √k are not scaled down by a rounding."""
    digits = 2 - math.floor(math.log10(norm))
    return float(f"{math.ceil(norm * 10.0**digits) / 10.0**digits:.12g}")


def _make_plan(facts: Facts, tree: Mapping[str, Any]) -> tuple[Cell, Plan]:
    """The plan that a run of the scenario has; its data are not looked at.

    A person counts as a record does: both are clipped to one norm, and batches count them.
    """
    privacy = {key: value for key, value in tree["privacy"].items() if key not in ("unit", "records")}
    cell = resolve_cell({**tree, "data": {"name": "records.npz"}, "privacy": privacy}, "advise")
    row, dtype = cell.model.row, DTYPES[cell.run.dtype]
    return cell, make_plan(cell, row.objective((facts.features,), facts.classes, dtype, cell.model.settings))


def _make_forecast(facts: Facts, settings: _AdvisedNumbers, plan: Plan) -> Forecast:
    std = settings.step * plan.noise.std_in_mean * math.sqrt(settings.rounds)
    if not facts.classes:
        std /= math.sqrt(3.0)  # of the average of a random walk
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
    return tuple(Recommendation(key, values[key], reason) for key, reason in REASONS.items())


def _describe_alternatives(facts: Facts, forecast: Forecast) -> tuple[str, ...]:
    told = []
    silos = len(facts.sizes)
    if not _has_one_noise_source(facts.trust) and silos > 1:
        masked = _find_q(replace(facts, trust="secure-aggregation"))
        told.append(
            f"Secure aggregation: q = {masked:.3g} in place of {forecast.q:.3g}, as {silos} times the records, or "
            f"about {math.sqrt(silos):.2g} times ε, would give."
        )
    told.append("More rounds: the same noise in the last model; they help where the step is at its limit only.")
    told.append("A secret order: nothing, since every record is read in every round.")
    if facts.delta * max(facts.sizes) >= 1.0:
        told.append(
            f"delta = {format_upper_delta(facts.delta)} is not below 1 over the {max(facts.sizes):,} records of "
            "a silo: "
            "take one that is far below."
        )
    return tuple(told)


def advise(
    *,
    records: int | Sequence[int],
    features: int,
    epsilon: float,
    silos: int | None = None,
    classes: int = 0,
    data: Mapping[str, Any] | None = None,
    name: str = "advised",
    **others: Any,
) -> Advice:
    """Advise for public facts: which row, batch, clip, step, rounds and trust to take.

    Args:
        records: of each silo: one number for `silos` that are alike, or one each.
        features: numbers that a record becomes.
        epsilon: of the promise; `delta` is 1e-5 unless given.
        silos: how many there are.
        classes: 0 for a regression.
        data: the scenario's [data]; an .npz file that is still to be named by default.  It is not opened.
        name: of the scenario.
        others: further fields of `Facts`: delta, trust, feature_norm, rounds, relation, unit, records_of_person.

    Raises:
        InputError: names the fact that no federation has.
    """
    if isinstance(records, int):
        _check_integer("silos", silos, 1, 100_000)
        assert silos is not None
        sizes = (records,) * silos
    else:
        sizes = tuple(records)
        if silos is not None and silos != len(sizes):
            raise InputError(f"advise: silos = {silos}: records has {len(sizes)} numbers, one for each silo")
    if unknown := sorted(others.keys() - Facts.__dataclass_fields__.keys()):
        raise InputError(f"advise: {unknown[0]}: no fact; known are {', '.join(Facts.__dataclass_fields__)}")
    return advise_on_facts(Facts(sizes, features, classes, epsilon, **others), data, name)


OWN_DATA_SCENARIO = "own-data"
_FACT_KEYS = ("federation.silos", "federation.samples", "federation.rounds", "algorithm.trust")
_FURTHER_KEYS = ("privacy.epsilon", "privacy.delta", "privacy.relation", "algorithm.clip", "algorithm.step")
_SECTIONS = ("federation.", "algorithm.", "privacy.")


def as_advised(tree: Mapping[str, Any], data: Dataset, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Put advised rounds, clip and step into the tree, for the smallest ε and first trust that are `asked` for.

    Every round reads all records.  The tree stays as it is where `asked` names a key that advice does not know,
    such as another row or unit, and where no advice can be given for its facts.  Guarantee: of `data`
    the number of records, their width and the number of classes decide; no record and no label does.
    """
    if any(key.startswith(_SECTIONS) and key not in (*_FACT_KEYS, *_FURTHER_KEYS) for key in asked):
        return dict(tree)
    federation, algorithm, privacy = (dict(tree[name]) for name in ("federation", "algorithm", "privacy"))
    given: dict[str, Any] = {key: asked.get(key) for key in (*_FACT_KEYS, *_FURTHER_KEYS)}
    count = len(data.train_labels)
    try:
        epsilons, trust = given["privacy.epsilon"] or privacy["epsilon"], given["algorithm.trust"]
        trust = trust[0] if isinstance(trust, list | tuple) else trust or algorithm["trust"]
        samples, silos = (
            int(given["federation.samples"] or count),
            int(given["federation.silos"] or federation["silos"]),
        )
        facts = Facts(
            (samples // silos,) * silos,
            data.train_images[0].size,
            data.class_count,
            float(min(epsilons) if isinstance(epsilons, list | tuple) else epsilons),
            float(given["privacy.delta"] or privacy["delta"]),
            trust=trust,
            feature_norm=tree.get("model", {}).get("feature_norm"),
            rounds=given["federation.rounds"],
            relation=given["privacy.relation"] or privacy["relation"],
        )
        advised = advise_on_facts(facts).tree
    except (InputError, TypeError, ValueError, ZeroDivisionError):
        return dict(tree)  # what is wrong with a key is said where the scenario is read
    rounds = facts.rounds or advised["federation"]["rounds"]
    algorithm = {**advised["algorithm"]}
    algorithm["step"] *= advised["federation"]["rounds"] / rounds  # as far in more rounds than are needed
    return {
        **tree,
        "federation": {**federation, "samples": samples, "rounds": rounds, "epochs": rounds},
        "algorithm": algorithm,
    }
