"""What a silo's policy allows: every other scenario is refused in one line, before anything is released."""

import json
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedpriv.core.errors import InputError, RunError
from fedpriv.data.own import load_npz
from fedpriv.plan.task import load_task
from fedpriv.scenario.load import resolve_cell
from fedpriv.silo import admission
from fedpriv.silo.admission import Admission, AdmittedRun, Charge
from fedpriv.silo.demo import run_allowance
from fedpriv.silo.fingerprint import create_ledger
from fedpriv.silo.ledger import SiloLedger
from fedpriv.silo.policy import EvaluationLimits, Policy, RunLimits, read_policy, write_template
from fedpriv.silo.shard import load_shard
from tests.conftest import small_tree
from tests.silo.charged import charged
from tests.silo.guarded import (
    CLIP,
    UNACCOUNTABLE,
    ZERO,
    cell_json,
    guard_at,
    guard_of,
    refused,
    write_silo,
)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"privacy__rho": 4.1}, r"costs mu = 4\.1.*the budget is 4"),
        ({"privacy__mode": "none", "privacy__rho": None}, "without noise"),
        ({"algorithm__trust": "trusted"}, "without noise"),
        ({"algorithm__clip": 1e6}, r"clips at 1e\+06, allowed is 118"),
        ({"algorithm__diameter": 10.0}, "clips at"),
        ({"federation__rounds": 11}, "11 rounds, allowed are 10"),
        ({"federation__batch": 3}, "needs 24 records"),
        ({"privacy__relation": "zero-out"}, "relation is zero-out, allowed is replace-one"),
        ({"federation__silos": 10_000_000}, "10000000 silos"),
        ({"federation__silos": 100_001}, "has 100001 silos, and a run with silo 0 has 1 to 100000"),
        ({"federation__silos": 100_000, "federation__rounds": 11}, "11 rounds, allowed are 10"),
        ({"federation__rounds": 10, "federation__batch": 2, "algorithm__clip": 1e6}, r"clips at 1e\+06"),
    ],
)
def test_a_scenario_that_exceeds_the_policy_is_refused(
    tmp_path: Path, overrides: dict[str, Any], reason: str
) -> None:
    refused(guard_at(tmp_path), reason, cell_json(**overrides))


@pytest.mark.parametrize(
    ("run", "cell", "reason"),
    [
        ("run", "x" * 65_537, "the scenario has 65537 characters, allowed are 65536"),
        ("run", "x" * 65_536, "the scenario that was sent cannot be used"),
        ("", "{}", "the run's name has 0 characters, allowed are 1 to 128"),
        ("n" * 129, "{}", "the run's name has 129 characters, allowed are 1 to 128"),
        ("n" * 128, "{}", "the scenario that was sent cannot be used"),
    ],
)
def test_texts_that_are_too_long_are_refused_unread(tmp_path: Path, run: str, cell: str, reason: str) -> None:
    refused(guard_at(tmp_path), reason, cell, run=run)


@pytest.mark.parametrize(("rounds", "largest"), [(10, 4096), (5000, 5000)])
def test_a_whole_number_of_an_algorithm_is_at_most_4096_or_the_rounds(
    tmp_path: Path, rounds: int, largest: int
) -> None:
    """A server chooses such a number, and a guard's memory and time grow with it."""
    guard = guard_at(tmp_path, rounds=rounds)
    for number, reason in (
        (largest, "cannot be used: .*unknown key"),
        (largest + 1, f"algorithm.size = {largest + 1}: more than any run that is allowed needs"),
    ):
        tree = small_tree(algorithm__size=number)
        refused(guard, reason, json.dumps(tree))


@pytest.mark.parametrize(
    ("bands", "reason"),
    [
        (15, r"the scenario clips at 1, allowed is 0\.5"),
        (16, "the run keeps 537 MiB from round to round, and a ledger 512 MiB"),
    ],
    ids=["505-MiB", "537-MiB"],
)
def test_a_state_beyond_what_a_ledger_can_store_is_refused(tmp_path: Path, bands: int, reason: str) -> None:
    """Two million parameters, for each of which the noise keeps two numbers a band."""
    noise = {"name": "dp-ftrl", "mechanism": "banded", "bands": bands, "clip": 1.0, "step": 0.1}
    text = cell_json(
        algorithm={**noise, "trust": "untrusted"},
        model={"name": "mlp", "hidden": 2600},
        federation={"silos": 3, "rounds": 20, "batch": 1},
        privacy={"relation": "replace-one", "mu": 1.0},
    )
    policy = read_policy(write_silo(tmp_path, clip=0.5, rounds=20, memory="64 GiB", dimension=2**22))
    with pytest.raises(RunError, match=reason):
        Admission(policy, policy.load_shard()).admit(text)


def test_parts_that_nothing_clips_are_refused_without_noise_too_and_no_policy_is_made_for_them(
    tmp_path: Path,
) -> None:
    """Floating point keeps to no smoothness of a loss, by which alone such parts are bounded."""
    smooth = {"name": "momentum-tree-aligned", "trust": "untrusted", "alpha": 0.2, "step": 0.0001}
    changes = {"algorithm": smooth, "privacy": {"mode": "none", "relation": "replace-one"}}
    reason = "floating point keeps to no such thing: use an algorithm that clips every part"
    refused(guard_at(tmp_path, noise_free=True), reason, cell_json(**changes))
    cell = resolve_cell(small_tree(**changes), "test")
    with pytest.raises(InputError, match=f"a deployment's silos refuse this scenario: .*{reason}"):
        run_allowance(cell, load_task(cell))


@pytest.mark.parametrize(
    ("key", "bound", "beyond", "reason"),
    [
        ("rounds", 8, 7, "the scenario has 8 rounds, allowed are 7"),
        ("dimension", 7850, 7849, "the scenario's model has 7850 parameters, allowed are 7849"),
        ("clip", CLIP, CLIP * (1 - 1e-6), "the scenario clips at 118.1, allowed is 118.123"),
        ("least_clip", CLIP, CLIP * (1 + 1e-6), "the scenario clips at 118.1, allowed is 118.123 or more"),
        ("memory", None, -1, "the run takes 171 MiB of memory, allow.memory is 171 MiB"),
    ],
    ids=["rounds", "dimension", "clip", "least_clip", "memory"],
)
def test_a_run_at_a_bound_is_admitted_and_none_beyond(
    tmp_path: Path, key: str, bound: float | None, beyond: float, reason: str
) -> None:
    text = cell_json()

    def admit(value: float | None) -> AdmittedRun:
        allow: dict[str, Any] = {"clip": 2 * CLIP, **({} if value is None else {key: value})}
        policy = read_policy(write_silo(tmp_path, **allow))
        return Admission(policy, policy.load_shard()).admit(text)

    admitted = admit(bound)
    if key == "memory":
        admit(bound := admitted.memory_bytes)
        beyond = bound - 1
    with pytest.raises(RunError, match=reason):
        admit(beyond)


@pytest.mark.parametrize(
    ("section", "key", "reason"),
    [
        ("model", "name", "is none of fedpriv's, and allow.models does not name it"),
        ("algorithm", "name", "is none of fedpriv's, and allow.algorithms does not name it"),
        ("algorithm", "mechanism", "is none of fedpriv's, and those alone add noise in a guard"),
        ("federation", "sampling", "is none of fedpriv's, and no row of allow.extensions"),
    ],
    ids=["model", "algorithm", "mechanism", "sampling"],
)
def test_a_name_that_is_none_of_fedprivs_is_refused_before_the_scenario_is_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, key: str, reason: str
) -> None:
    """Another name would make the guard look for the extension that adds it."""
    monkeypatch.setattr(admission, "resolve_cell", lambda *_: pytest.fail("the scenario was resolved"))
    tree = small_tree()
    tree.setdefault(section, {})[key] = "theirs" * 20
    name = ("theirs" * 20)[:100]
    refused(guard_at(tmp_path), f"cannot be used: .*{section}.{key} = '{name}' {reason}", json.dumps(tree))


def test_a_silo_that_the_run_does_not_have_takes_no_part(tmp_path: Path) -> None:
    refused(guard_at(tmp_path, 3), "the scenario has 3 silos, and a run with silo 3 has 4 to 100000")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"privacy": {"relation": "replace-one", "mu": 1e6}}, r"the run costs mu = 1e\+06|costs mu = 1000000"),
        ({"privacy": {"relation": "replace-one", "mu": 1000001.0}}, "privacy.mu = 1e.06: protects nothing"),
        ({"unknown": {"size": 2**53}}, "cannot be used: .*unknown"),
        (
            {"unknown": {"size": [1, {"size": 2**53 + 2}]}},
            "unknown.size.size = .*: no number of a scenario is that",
        ),
        ({"unknown": {"size": -(2.0**53) - 2}}, "unknown.size = .*: no number of a scenario is that large"),
    ],
    ids=["mu", "mu-beyond", "size", "nested-size", "negative-size"],
)
def test_a_number_of_a_scenario_is_at_most_two_to_the_53_and_of_its_privacy_a_million(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    refused(guard_at(tmp_path), reason, json.dumps({**json.loads(cell_json()), **change}))


def test_a_run_that_reads_too_few_records_is_refused(tmp_path: Path) -> None:
    """A scenario of 8 rounds with a record each; the least is the silo's, and not the server's."""
    guard = guard_at(tmp_path, least_records=9)
    refused(guard, "the scenario reads 8 records of this silo, allowed are 9 or more")
    assert charged(guard) == []
    guard_at(tmp_path / "eight", least_records=8).answer("run", cell_json(), 1, ZERO)


def test_a_budget_expires_at_the_end_of_its_day_in_utc_even_for_open_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs under way, too: the last day's end is a moment in UTC, by the silo's own clock."""

    class Clock(datetime):
        moment = datetime(2031, 3, 31, 23, 59, 59, tzinfo=UTC)

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "datetime":  # type: ignore[override]
            return cls.moment.astimezone(tz)

    monkeypatch.setattr(admission, "datetime", Clock)
    path = write_silo(tmp_path)
    path.write_text(path.read_text() + "expires = 2031-03-31\n")
    guard = guard_of(path)
    first = guard.answer("run", cell_json(), 1, ZERO)
    Clock.moment += timedelta(seconds=1)
    for t, run in ((1, "run"), (2, "run"), (1, "new")):
        refused(guard, "silo 0 refuses: the budget of this silo expired at the end of 2031-03-31", t=t, run=run)
    assert len(charged(guard)) == 1
    Clock.moment -= timedelta(seconds=1)
    assert torch.equal(guard.answer("run", cell_json(), 1, ZERO), first)


@pytest.mark.parametrize("trust", ["untrusted", "trusted"])
@pytest.mark.parametrize("noise_free", [False, True])
@pytest.mark.parametrize(("overrides", "reason"), UNACCOUNTABLE.values(), ids=UNACCOUNTABLE)
def test_releases_that_cannot_be_accounted_for_are_refused_in_one_line_under_any_policy(
    tmp_path: Path, overrides: dict[str, Any], reason: str, trust: str, noise_free: bool
) -> None:
    """And before anything is calibrated, charged or opened."""
    guard = guard_at(tmp_path, relation="zero-out", clip=1e9, trust=trust, noise_free=noise_free)
    assert refused(guard, "refuses", cell_json(**overrides)) == f"silo 0 refuses: {reason}"
    assert charged(guard) == []


def test_a_policy_that_trusts_the_server_releases_exact_sums_and_charges_the_published_mu(tmp_path: Path) -> None:
    guard, trusted = guard_at(tmp_path, trust="trusted"), cell_json(algorithm__trust="trusted")
    first = guard.answer("run", trusted, 1, ZERO)
    assert torch.equal(first, guard_at(tmp_path / "other", trust="trusted").answer("run", trusted, 1, ZERO))
    assert charged(guard) == [pytest.approx(4.0)]
    without = cell_json(algorithm__trust="trusted", privacy__mode="none", privacy__rho=None)
    refused(guard, "nobody add noise", without, run="b")
    refused(guard, "budget is 4", cell_json(algorithm__trust="trusted", privacy__rho=1.0), run="c")


def test_the_budget_covers_all_runs_on_a_shard_together(tmp_path: Path) -> None:
    """Runs of mu = 2.4 and 3.2 compose to exactly 4; a third, however small, is refused under any name."""
    guard = guard_at(tmp_path)
    guard.answer("a", cell_json(privacy__rho=2.4), 1, ZERO)
    guard.answer("b", cell_json(privacy__rho=3.2), 1, ZERO)
    refused(guard, "budget is 4", cell_json(privacy__rho=0.1), run="c")
    again = guard_at(tmp_path)  # a restart forgets nothing
    refused(again, "budget is 4", cell_json(privacy__rho=0.1), run="d")
    assert torch.isfinite(again.answer("b", cell_json(privacy__rho=3.2), 2, ZERO)).all()


@pytest.mark.parametrize(
    ("epochs", "algorithm"),
    [
        (2, {"name": "dp-ftrl", "clip": 1e-3, "step": 0.1}),
        (2, {
            "name": "momentum-tree-aligned", "clip": 1.0, "alpha": 1.0, "step": 0.1, "gamma": 0.3,
            "difference_clip": 1.0, "residual_clip": 1e-3,
        }),
        (1, {
            "name": "goldstein-single-pass", "anchor_clip": 1.0, "clip": 1e-3, "period": 4, "radius": 0.1,
            "smoothing": 0.01, "window": 2, "step": 0.1, "oracle": "first-order", "anchor_batches": 1,
        }),
    ],
    ids=["clip", "residual_clip", "clip beside an anchor's"],
)  # fmt: skip
def test_clips_below_the_least_clip_of_the_policy_are_refused_for_every_part(
    tmp_path: Path, epochs: int, algorithm: dict[str, Any]
) -> None:
    """A server that clips at next to nothing chooses the numbers that arithmetic is worst at."""
    asked = cell_json(
        algorithm={"trust": "untrusted", **algorithm},
        federation__epochs=epochs,
        privacy={"relation": "replace-one", "mu": 1.0},
    )
    line = r"the scenario clips at 0\.001, allowed is 0\.01 or more"
    refused(guard_at(tmp_path, least_clip=0.01), line, asked)
    assert torch.isfinite(guard_at(tmp_path, least_clip=1e-3).answer("run", asked, 1, ZERO)).all()


def test_a_policy_without_newer_keys_loads_with_their_defaults(tmp_path: Path) -> None:
    """What it does not say is at its default: none of these keys widens what it allowed."""
    allow = read_policy(write_silo(tmp_path)).allow
    assert allow.model_fields_set == {"relation", "clip", "rounds", "budget"}
    limits = {"least_clip": 2.0**-40, "query": 2.0**40, "dimension": 2**20, "memory": 2**29, "tick": 0.05}
    counts = {"least_records": 1, "open_runs": 8, "runs": 1000}
    nothing = {"slack": 0.0, "silos": None, "expires": None, "noise_free": False}
    lists = dict.fromkeys(("models", "algorithms", "extensions", "statistics"), ())
    defaults = {
        **limits,
        **counts,
        **nothing,
        **lists,
        "slack_per_run": 1e-8,
        "trust": "untrusted",
        "unit": "record",
    }
    assert allow.model_dump(exclude=allow.model_fields_set) == defaults
    evaluation = EvaluationLimits(budget=1.0)
    assert (evaluation.evaluations, evaluation.runs) == (100, 1000)


@pytest.mark.parametrize(
    ("key", "within", "beyond"),
    [
        ("clip", 2.0**40, 2.0**40 * (1 + 1e-15)),
        ("least_clip", 2.0**-40, 2.0**-40 * (1 - 1e-15)),
        ("rounds", 1, 0),
        ("least_records", 1, 0),
        ("slack", 0.0, -1e-300),
        ("slack", 1.0 - 1e-15, 1.0),
        ("slack_per_run", 1.0 - 1e-15, 1.0),
        ("silos", 2, 1),
        ("query", 1e-300, 0.0),
        ("dimension", 1, 0),
        ("memory", 2**26, 2**26 - 1),
        ("open_runs", 1, 0),
        ("runs", 1, 0),
        ("tick", 0.0, -1e-300),
        ("tick", 60.0, 60.001),
    ],
)
def test_a_number_of_a_policy_is_within_its_bounds(key: str, within: float, beyond: float) -> None:
    allow = {"relation": "replace-one", "clip": 1.0, "rounds": 10, "budget": 4.0}
    assert getattr(RunLimits.model_validate({**allow, key: within}), key) == within
    with pytest.raises(ValidationError, match=rf"RunLimits\n{key}\n"):
        RunLimits.model_validate({**allow, key: beyond})


def test_a_silo_without_a_number_or_classes_has_no_policy(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    text = path.read_text()
    for old, new, line in (
        ("silo = 0", "silo = -1", "silo"),
        ("classes = 10", "classes = -1", "classes"),
        ("classes = 10", "classes = 1", "classes = 1: expected 0, for real numbers, or at least 2"),
        ("classes = 10", "", "classes: give how many there are"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(InputError, match=rf"silo-0\.toml: {line}"):
            read_policy(path)
    for classes in (0, 2):
        path.write_text(text.replace("classes = 10", f"classes = {classes}"))
        assert read_policy(path).class_count == classes
    for key in ("evaluations", "runs"):
        with pytest.raises(ValidationError, match=key):
            EvaluationLimits.model_validate({"budget": 1.0, key: 0})
        assert getattr(EvaluationLimits.model_validate({"budget": 1.0, key: 1}), key) == 1


def test_the_policy_template_is_valid_and_lists_every_key(tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    write_template(path)
    policy = read_policy(path)
    defaults = policy.allow.relation, policy.allow.trust, policy.shard.name
    assert defaults == ("replace-one", "untrusted", "shard.npz")
    text = path.read_text()
    for model in (Policy, RunLimits):
        for name, field in model.model_fields.items():
            assert name in ("allow", "evaluation") or f"{name} = " in text
            assert field.description is None or field.description.split()[-1] in text
    descriptions = text.partition("# [evaluation]")[0].splitlines()
    assert max(len(line) for line in descriptions if line.startswith("# ") and " = " not in line) == 100
    for place, line in ((path, "exists"), (tmp_path / "nowhere" / "new.toml", "cannot be written")):
        with pytest.raises(InputError, match=line):
            write_template(place)


@pytest.mark.parametrize(
    ("allow", "extra", "line"),
    [
        ({"clip": 1.0, "least_clip": 2.0}, "", r"least_clip = 2 is above clip = 1: no run has both"),
        ({"least_clip": 2.0**-41}, "", r"allow\.least_clip"),
        ({"tick": -0.1}, "", r"allow\.tick"),
        ({"query": 0.0}, "", r"allow\.query"),
        ({"budget": -1.0}, "", r"allow\.budget = -1\.0: expected a number above 0"),
        ({}, "budgett = 1.0", r"silo-0\.toml: allow\.budgett: unknown key; did you mean 'budget'\?$"),
        # was "the key is algorithm.clip", which is a key of scenarios
        ({}, "clip_norm = 1.0", r"silo-0\.toml: allow\.clip_norm: unknown key; did you mean 'clip'\?$"),
        *[({}, f"memory = {size}", r"silo-0\.toml: allow\.memory") for size in
          ('"512 MB"', "-1", '"1 KiB"', "true", '"much"')],
    ],
)  # fmt: skip
def test_invalid_or_contradictory_bounds_of_a_policy_are_refused(
    tmp_path: Path, allow: dict[str, Any], extra: str, line: str
) -> None:
    path = write_silo(tmp_path, **allow)
    path.write_text(path.read_text() + extra)
    with pytest.raises(InputError, match=line):
        read_policy(path)


def test_a_fixed_seed_an_unsafe_ledger_and_a_malformed_shard_are_refused(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    path.write_text(path.read_text().replace("silo = 0", "silo = 0\nseed = 1"))
    with pytest.raises(InputError, match="seed: a fixed seed is refused"):
        read_policy(path)
    ledger = tmp_path / "open.sqlite"
    create_ledger(ledger, tmp_path / "open.sqlite.mark", b"")
    ledger.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        SiloLedger(ledger)
    ledger.chmod(0o600)
    ledger.write_text("this is no database, but long enough to be taken for one" * 20)
    with pytest.raises(InputError, match="cannot be used as a ledger"):
        SiloLedger(ledger)
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    np.savez(tmp_path / "labels.npz", images=np.zeros((2, 4), np.uint8), labels=np.array([0, 10]))
    with (tmp_path / "array.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    not_archive = r"expected an \.npz file"
    for name, line in (
        ("bad", not_archive),
        ("array", not_archive),
        ("labels", "labels are whole numbers from 0 to 9"),
    ):
        with pytest.raises(InputError, match=line):
            load_shard(tmp_path / f"{name}.npz", 10)


def test_the_slack_of_training_does_not_apply_to_evaluations(tmp_path: Path) -> None:
    path = write_silo(tmp_path, slack=1e-6)
    path.write_text(path.read_text() + "[evaluation]\nbudget = 1.0\n")
    tests = read_policy(path).test_policy
    assert tests is not None
    assert (tests.allow.budget, tests.allow.slack, tests.allow.runs) == (1.0, 0.0, 1000)
    assert (tests.allow.clip, tests.allow.least_clip) == (2.0**40, 2.0**-40)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('"512 MiB"', 2**29),
        ('"1 GiB"', 2**30),
        ('"2TiB"', 2**41),
        ('"524288 KiB"', 2**29),
        ('"536870912 B"', 2**29),
        ("536870912", 2**29),
        ('"64MiB"', 2**26),
    ],
)
def test_the_memory_limit_of_a_policy_accepts_bytes_and_binary_units(
    tmp_path: Path, given: str, expected: int
) -> None:
    path = write_silo(tmp_path)
    path.write_text(path.read_text() + f"memory = {given}\n")
    assert read_policy(path).allow.memory == expected


def test_a_ledger_rolled_back_by_one_commit_is_refused(tmp_path: Path) -> None:
    """A run that was opened and not answered is one commit: its charge must not be forgotten either."""
    path, kept = tmp_path / "l.sqlite", tmp_path / "copy"
    create_ledger(path, tmp_path / "l.sqlite.mark", b"")
    ledger = SiloLedger(path)
    for run in ("one", "two", "three"):
        kept.write_bytes(path.read_bytes())
        with ledger.lock(), ledger.transaction():
            ledger.open_run(run, Charge("{}", 1.0, 0.0), bytes(32))
    path.write_bytes(kept.read_bytes())
    with pytest.raises(InputError, match="older copy that was put back"):
        SiloLedger(path)


@pytest.mark.parametrize("key", ["mark", "peers"])
def test_a_policy_that_names_one_file_for_two_purposes_is_refused(tmp_path: Path, key: str) -> None:
    """Before, a mark that was the ledger overwrote it."""
    path = write_silo(tmp_path)
    path.write_text(f'{key} = "ledger-0.sqlite"\n{path.read_text()}')
    with pytest.raises(InputError, match="two of shard, ledger, mark, identity and peers are one file"):
        read_policy(path)


def test_a_damaged_npz_shard_is_refused_with_its_file_name(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (50, 20, 20), np.uint8)
    np.savez_compressed(tmp_path / "shard.npz", images=images, labels=np.zeros(50, np.int64))
    content = (tmp_path / "shard.npz").read_bytes()
    for place in range(60, len(content) - 400, 997):
        damaged = content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]
        (tmp_path / "shard.npz").write_bytes(damaged)
        with pytest.raises(InputError, match=r"shard\.npz"):
            load_shard(tmp_path / "shard.npz", 10)
        with pytest.raises(InputError, match=r"shard\.npz"):
            load_npz(str(tmp_path / "shard.npz"))
    names = np.zeros(3, np.dtype([(f"{number:0300}", np.float32) for number in range(60)]))
    np.savez(tmp_path / "shard.npz", images=names, labels=np.zeros(3, np.int64))
    with pytest.raises(InputError, match=r"shard\.npz: .*Header info length") as refusal:
        load_shard(tmp_path / "shard.npz", 10)
    assert "\n" not in str(refusal.value)  # NumPy's own message has three lines
    np.savez(tmp_path / "shard.npz", images=images, labels=np.zeros(50, np.int64))
    content = bytearray((tmp_path / "shard.npz").read_bytes())
    content[content.rindex(b"PK\x01\x02") + 8] |= 1  # says that it is encrypted
    (tmp_path / "shard.npz").write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"shard\.npz"):
        load_shard(tmp_path / "shard.npz", 10)


@pytest.mark.parametrize("name", ["shard", "ledger", "mark", "socket", "identity", "peers"])
def test_a_path_with_a_null_byte_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    """Was: a ValueError of the operating system's interface, at the start of a guard."""
    path = write_silo(tmp_path)
    lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{name} =")]
    path.write_text("\n".join([f'{name} = "a\\u0000b"', *lines, ""]))
    with pytest.raises(InputError, match=f"{name}: a path has no null byte"):
        read_policy(path)
