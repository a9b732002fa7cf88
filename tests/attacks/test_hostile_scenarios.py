"""A server that writes every key, name and number of a scenario: what they stand for, and what is charged."""

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch

from fedpriv.core.errors import FedprivError
from fedpriv.core.random import SERVER
from fedpriv.loss.estimators import Round
from fedpriv.participation.secret import PoissonSampling
from fedpriv.silo.admission import AdmittedRun
from fedpriv.silo.guard import Guard
from fedpriv.silo.shard import Shard
from fedpriv.silo.silo import Silo
from tests.attacks.guards import guard_for, random_records, scenario, zeros
from tests.silo.charged import charged
from tests.silo.guarded import refused


def test_all_json_spellings_of_a_scenario_are_one_run_and_a_duplicate_key_gains_nothing(tmp_path: Path) -> None:
    """Gains: a second scenario under a run that is paid for, or a price that is not that of what is run."""
    guard, cell = guard_for(tmp_path, *random_records(), budget=4.0), scenario()
    tree, first = json.loads(cell), guard.answer("run", cell, 1, zeros())
    spellings = [
        json.dumps(tree, indent=3),
        json.dumps(dict(reversed(list(tree.items())))),
        cell.replace("seed", "\\u0073eed"),
        f'{{"seed": 99, {cell[1:]}',
    ]
    for other in spellings:
        assert torch.equal(guard.answer("run", other, 1, zeros()), first)
    dearer = cell[:-1] + ', "privacy": {"relation": "replace-one", "mu": 1000.0}}'
    refused(guard, "is not the one this run was opened with", dearer)
    refused(guard, "costs mu = 1000", dearer, run="another")
    assert charged(guard) == [pytest.approx(4.0)]


@pytest.mark.parametrize("run", ["a\x00b", "é", "e\u0301", "a ", "'; DROP TABLE runs; --", "../../run", "\ud800"])
def test_every_run_name_is_stored_unchanged_or_refused(tmp_path: Path, run: str) -> None:
    """Gains: the record of what was spent, under a name that a file or a database takes for another."""
    guard = guard_for(tmp_path, *random_records(), budget=4.0)
    guard.answer("a", scenario(privacy__rho=1.0), 1, zeros())
    if run == "\ud800":
        refused(guard, "refuses: the run's name", scenario(privacy__rho=1.0), run=run)
    else:
        guard.answer(run, scenario(privacy__rho=1.0), 1, zeros())
    assert [row.run_id for row in guard._ledger.list_runs()] == (["a"] if run == "\ud800" else ["a", run])


def test_a_guard_answers_with_denormals_flushed_to_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains: bright records, by the clock: at queries of 1e-310 a round took 20 ms with them, 5 ms without.

    Scenarios are read and prices computed with them: a clip of 1e-320 is not 0.
    """

    def flushes() -> bool:
        return bool((torch.tensor([1e-310], dtype=torch.float64) * 1.0 == 0.0).all())

    guard, honest, found = guard_for(tmp_path, *random_records()), Silo.answer, list[bool]()

    def watched(*given: Any) -> Any:
        found.append(flushes())
        return honest(*given)

    monkeypatch.setattr(Silo, "answer", watched)
    guard.answer("run", scenario(), 1, zeros())
    supported = torch.set_flush_denormal(False)  # a processor that cannot says so
    assert found == [supported]
    assert not flushes()


def test_a_guard_opens_no_file_that_a_scenario_names(tmp_path: Path) -> None:
    """Gains: whether a file is there, through refusals; or a device or a data set of the server's choice."""
    guard, tree = guard_for(tmp_path, *random_records(), budget=100.0), json.loads(scenario())
    guard.answer("warm", scenario(), 1, zeros())
    names: list[str] = []
    watching = [True]

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if watching and event in ("open", "os.listdir", "socket.connect", "subprocess.Popen"):
            names.append(str(given[0]))

    sys.addaudithook(hook)
    changes: list[dict[str, Any]] = [
        {"data": {"name": "/etc/passwd"}},
        {"data": {"name": str(tmp_path / "shard-0.npz"), "validation": 30}},
        {"data": {"name": "x", "partition": "dirichlet", "concentration": 1e-300}},
        {"run": {**tree["run"], "device": "/dev/zero", "goldstein_radius": 0.5, "evaluations": 2**50,
                 "noise": "aggregate"}},
        {"label": {"../../x": "/etc/passwd"}, "title": "/etc/passwd"},
    ]  # fmt: skip
    for number, change in enumerate(changes):
        guard.answer(f"run {number}", json.dumps({**tree, **change}), 1, zeros())
    watching.clear()
    own, folder = (str(tmp_path / "ledger-0.sqlite"), str(tmp_path / ".ledger-0.sqlite")), str(tmp_path)
    assert [name for name in names if not (name.isdigit() or name.startswith(own) or name == folder)] == []


def test_records_are_read_only_after_the_query_is_stored_and_with_denormals_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains: how many records are bright, by the clock and free of charge, at a scale of features of 1e-310."""
    guard, honest, found = guard_for(tmp_path, *random_records(), budget=100.0), Shard.model_records, list[Any]()

    def watched(shard: Shard, cell: Any) -> Any:
        if shard.images.any():
            flushed = (torch.tensor([1e-310], dtype=torch.float64) * 1.0 == 0.0).all()
            found.append((guard._ledger.find_answer("run", 1) is not None, bool(flushed)))
        return honest(shard, cell)

    monkeypatch.setattr(Shard, "model_records", watched)
    cell = scenario(model={"name": "softmax-regression", "feature_norm": 1e-3})
    for wrong in (torch.zeros(7), torch.zeros(7, dtype=torch.float64), zeros() * float("nan"), zeros() + 2.0**41):
        refused(guard, ".", cell, query=wrong)
    assert found == []
    assert list(guard._ledger.list_runs()) == []
    guard.answer("run", cell, 1, zeros())
    assert found == [(True, torch.set_flush_denormal(False))]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"feature_norm": 1e-310}, "feature_norm"),
        ({"name": "column-moments", "columns": [0]}, "columns are indices of features that are numbers"),
        ({"name": "column-moments", "columns": [0, 0]}, "a column is named twice"),
    ],
    ids=["denormals", "columns of what has none", "a column named 32,000 times, for memory"],
)
def test_a_model_that_does_not_fit_the_records_is_refused_before_a_charge(
    tmp_path: Path, model: dict[str, Any], reason: str
) -> None:
    """Gains: the guard's memory, from 64,000 features of each record."""
    guard, tree = guard_for(tmp_path, *random_records(), budget=100.0), json.loads(scenario())
    tree["model"] = model if "name" in model else {**tree["model"], **model}
    refused(guard, reason, json.dumps(tree))
    assert charged(guard) == []


mpmath.mp.dps = 120
_ROUNDS = (1, 2, 3, 4, 6, 8, 9, 12)


class Hostile:
    """Scenarios of every row that guards accept, with numbers from the ends of their ranges."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def number(self, low: float = -12.0, high: float = 12.0) -> float:
        draw = self.random
        return draw.choice([10.0 ** draw.uniform(low, high), draw.uniform(0.1, 10.0), 1.0])

    def share(self) -> float:
        draw = self.random
        return draw.choice(
            [draw.uniform(0.01, 0.99), 10.0 ** -draw.uniform(1, 17), 1 - 10.0 ** -draw.uniform(1, 15)]
        )

    def scenario(self, name: str) -> tuple[str, str]:
        """A scenario as JSON, and its trust setting."""
        draw, number = self.random, self.number
        rounds = draw.choice(_ROUNDS)
        epochs = draw.choice([each for each in range(1, rounds + 1) if rounds % each == 0])
        named = draw.choice(["tree", "independent", "scheduled", "banded", "bisr", "lambda-cgd", "blt"])
        noise: dict[str, Any] = {"mechanism": named}
        if named in ("banded", "bisr"):
            noise["bands"] = draw.randint(1, rounds + 2)
        elif named == "scheduled":
            noise["noise_sizes"] = [number() for _ in range(rounds)]
        elif named in ("lambda-cgd", "blt"):
            roots = sorted((self.share() for _ in range(2 * draw.randint(1, 3))), reverse=True)
            noise |= {"theta": roots[:1]} if named == "lambda-cgd" else {"theta": roots[::2], "phi": roots[1::2]}
            noise["scale"] = draw.random() < 0.3
        if not noise.get("scale") and draw.random() < 0.3:
            noise["late_clip"] = "column"
        keys: dict[str, Any] = {"name": name, "clip": number()}
        if name == "dp-mu2-fl":
            keys |= {"diameter": number(), "step": 1.0, **noise}
            keys |= {"late_clip": "balanced"} if named == "independent" and epochs == 1 else {}
        elif name == "online-to-batch":
            keys |= {"step": 1.0, "radius": 1.0, "power": draw.randint(1, 8), **noise}
        elif name == "accelerated-dp-srgd":
            keys |= {"beta": 1.0, "radius": 1.0, "first_clip": draw.choice(["same", "balanced"]), **noise}
            if "late_clip" in noise:
                keys["first_clip"] = "same"
        elif name.startswith("goldstein"):
            keys |= {"anchor_clip": number(), "period": draw.randint(1, rounds + 1), "radius": 0.1}
            keys |= {"smoothing": 0.01, "window": 1, "step": 0.1}
            single = name == "goldstein-single-pass"
            epochs = 1 if single else rounds
            keys |= {"anchor_batches": draw.randint(1, 4)} if single else {}
        else:
            keys |= {"alpha": self.share(), "step": number()}
            if name == "momentum-tree-aligned":
                keys |= {"difference_clip": number(), "residual_clip": number(), "gamma": self.share()}
                keys |= {"shares": draw.choice(["best", "equal"])}
            else:
                keys |= {"calibration": draw.choice(["exact", "paper"])}
        federation: dict[str, Any] = {"silos": draw.randint(1, 3), "rounds": rounds, "epochs": epochs}
        if draw.random() < 0.5:
            federation["batch"] = draw.randint(1, 5)
        else:
            federation["samples"] = federation["silos"] * (rounds // epochs) * draw.randint(1, 4)
            federation["size_skew"] = number(-3.0, 2.0)
        trust = draw.choice(["untrusted", "trusted"])
        privacy = {"relation": "replace-one", "mu": number(-3.0, 3.0)}
        sections = {"algorithm": keys, "federation": federation, "privacy": privacy}
        return scenario(trust, **sections, run__dtype="float64", seed=draw.randint(0, 99)), trust


def noise_rows(admitted: AdmittedRun) -> mpmath.matrix:
    """B, (T, fresh vectors of all rounds), from the mechanism that adds the noise, not from its algebra."""
    mechanism, rounds = admitted.plan.mechanism, admitted.plan.schedule.rounds
    counts = [mechanism.draws(t) for t in range(1, rounds + 1)]
    eye, state, rows, used = torch.eye(sum(n or 1 for n in counts), dtype=torch.float64), mechanism.start(), [], 0
    for t, count in enumerate(counts, start=1):
        fresh = eye[used] if count is None else eye[used : used + count]
        used += count or 1
        row, state = mechanism.noise(state, t, fresh)
        rows.append(row.tolist())
    return mpmath.matrix(rows)


def moved(admitted: AdmittedRun, place: int, signs: Iterator[int]) -> mpmath.matrix:
    """How far the record in this place moves every sum, by increments as long as their clips allow, in a line."""
    plan, ring = admitted.plan, dict[int, Any]()
    assert not isinstance(plan.schedule, PoissonSampling)
    sums = [mpmath.mpf(0)]
    for t in range(1, plan.schedule.rounds + 1):
        current, batches = plan.estimator.round(t), plan.schedule.batches(t)
        added = mpmath.mpf(0)
        if current.split is not None:
            added = ring[t] = _in_parts(current, ring, place in batches, signs)
            if place in batches and (t - 1) % current.split.rounds_per_epoch:
                added += next(signs) * mpmath.mpf(float(current.split.residual_clip))
        elif place in batches:
            added = next(signs) * mpmath.mpf(float(current.clip)) / len(batches)
        sums.append(mpmath.mpf(current.decay) * sums[-1] + added)
    return mpmath.matrix(sums[1:])


def _in_parts(current: Round, ring: dict[int, Any], takes_part: bool, signs: Iterator[int]) -> Any:
    split = current.split
    assert split is not None
    mixing = mpmath.mpf(float(split.mixing))
    own = next(signs) * mpmath.mpf(float(current.clip)) if takes_part else mpmath.mpf(0)
    if current.t <= split.rounds_per_epoch:
        return own
    change = next(signs) * mpmath.mpf(float(split.difference_clip)) if takes_part else mpmath.mpf(0)
    return (1 - mixing) * (ring[current.t - split.rounds_per_epoch] + change) + mixing * own


def spent(admitted: AdmittedRun, trust: str, signs: Iterator[int]) -> float:
    """The largest μ that any record here pays, over the price: 1 if the price is exact, above 1 if it is a lie."""
    plan = admitted.plan
    rows = noise_rows(admitted)
    inverse = mpmath.inverse(rows * rows.T)
    owner = SERVER if trust == "trusted" else 0
    weight = max(p / b for p, b in zip(plan.weights, plan.batch_sizes, strict=True))
    per_record = weight if trust == "trusted" else 1.0 / plan.batch_sizes[0]
    assert not isinstance(plan.schedule, PoissonSampling)
    worst = mpmath.mpf(0)
    for place in range(plan.schedule.batches_per_silo):
        for one_way in (True, False):
            way = moved(admitted, place, itertools.repeat(1) if one_way else signs)
            worst = max(worst, (way.T * inverse * way)[0])
    mu = 2 * mpmath.mpf(per_record) * mpmath.sqrt(worst) / mpmath.mpf(float(plan.noise.std_of(owner)))
    price = admitted.price_curve.price_at(0.0)
    assert price is not None
    return float(mu / mpmath.mpf(price.mu))


def wide(folder: Path) -> Guard:
    return guard_for(folder, *random_records(400), budget=1e9, clip=2.0**40, rounds=200, trust="trusted")


@pytest.mark.parametrize(
    "name",
    [
        "dp-mu2-fl", "online-to-batch", "accelerated-dp-srgd", "goldstein-single-pass", "goldstein-erm",
        "momentum-tree", "momentum-tree-aligned",
    ],
)  # fmt: skip
def test_extreme_settings_never_make_the_charged_mu_smaller_than_the_true_mu(tmp_path: Path, name: str) -> None:
    """Gains: a larger mu than is charged, by numbers at which the calibration loses digits.

    In 120 digits, from the noise that is really added and from increments that are as long as they may be.
    """
    guard, hostile = wide(tmp_path), Hostile(seed=7)
    signs, ratios = iter(lambda: hostile.random.choice([-1, 1]), None), list[float]()
    while len(ratios) < 12:
        cell, trust = hostile.scenario(name)
        try:
            admitted = guard._admission.admit(guard._admission.canonicalize(cell))
        except FedprivError:
            continue
        ratios.append(spent(admitted, trust, signs))
        assert ratios[-1] <= 1.0 + 1e-9, json.loads(cell)
    assert max(ratios) > 0.5  # the brute force finds what is charged for


@pytest.mark.parametrize("gamma", [1e-170, 1e-300])
def test_a_scenario_whose_noise_underflows_to_zero_for_a_group_of_nodes_is_refused(
    tmp_path: Path, gamma: float
) -> None:
    """Answers of NaN, round after round, in a run that has been paid for."""
    keys = {"name": "momentum-tree-aligned", "clip": 1.0, "alpha": 0.3, "step": 0.1, "gamma": gamma}
    cell = scenario(
        algorithm={**keys, "difference_clip": 0.5, "residual_clip": 0.5},
        federation={"silos": 3, "rounds": 8, "epochs": 2},
    )
    guard = wide(tmp_path)
    with pytest.raises(FedprivError, match="a released group of nodes has no noise"):
        guard._admission.admit(guard._admission.canonicalize(cell))
