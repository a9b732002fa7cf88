"""A deployment's folder and its silos' real guards, without a network: what a coordinator certifies, and edits."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedpriv.addons.certificate.attest import signing_key
from fedpriv.addons.certificate.certify import FORMAT, STATEMENT_NAMES
from fedpriv.claims.ledger import make_evaluation_streams, make_release_streams
from fedpriv.claims.outcome import CellOutcome
from fedpriv.core.signed import canonical_json, load_or_create_key, sha256, sign_data
from fedpriv.plan.evaluation import make_evaluation_plan, prepare_scenario
from fedpriv.plan.plan import Plan, make_plan
from fedpriv.plan.task import load_public_task
from fedpriv.scenario.load import parse_scenario
from fedpriv.scenario.schema import Cell
from fedpriv.silo.demo import prepare_silos
from fedpriv.silo.guard import Guard
from fedpriv.silo.guards import begin_ledgers, open_guards
from fedpriv.silo.policy import read_policy
from fedpriv.study.results import RunFolder
from fedpriv.study.sweep import FirstSteps, scale_scenario
from tests.cli.command import fedpriv as command
from tests.conftest import small_tree

Edit = Callable[[dict[str, Any]], object]


def fixed_order(**overrides: Any) -> dict[str, Any]:
    """Two silos, two rounds, untrusted, with evaluations of test records."""
    return small_tree(
        **{
            "federation": {"silos": 2, "rounds": 2, "batch": 2},
            "run__evaluations": 2,
            "evaluation": {"records": 20, "mu": 1.0},
            **overrides,
        }
    )


def secret_order(**overrides: Any) -> dict[str, Any]:
    """The same silos in two rounds of DP-SGD under Poisson sampling."""
    return fixed_order(
        **{
            "federation": {"silos": 2, "rounds": 2, "batch": 4, "sampling": "poisson"},
            "algorithm": {"name": "dp-sgd", "trust": "untrusted", "clip": 1.0, "step": 0.1},
            "privacy": {"relation": "zero-out", "epsilon": 3.0},
            "evaluation": None,
            **overrides,
        }
    )


def masked(**overrides: Any) -> dict[str, Any]:
    """Two silos that add shares of the noise, in two rounds whose messages are masked."""
    algorithm = {"name": "dp-mu2-fl", "trust": "secure-aggregation", "diameter": 0.1}
    return fixed_order(**{"algorithm": algorithm, "evaluation": None, **overrides})


@dataclass(frozen=True)
class Deployment:
    """What a coordinator has after a run, and what the silos have."""

    folder: Path
    policies: Sequence[Path]

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.json"

    @property
    def trusted(self) -> Path:
        """Whom a reader trusts, as they said themselves."""
        return self.folder / "trusted"

    def edit(self, change: Edit) -> None:
        """Edit results.json as its owner can."""
        path = self.folder / "results.json"
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))

    def draft(self, *options: object) -> str:
        """Certify; the reason where that is refused, else nothing.  Whom to trust is written down."""
        done = command("certify", self.folder, "--key", self.folder / "coordinator.key", *options, cwd=self.folder)
        if done.returncode:
            return done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("coordinator ssh-ed25519"))
        keys = [command("silo", "key", policy, cwd=self.folder).stdout for policy in self.policies]
        self.trusted.write_text("".join([line + "\n", *keys]))
        return ""

    def sign(self, silo: int) -> str:
        """Have a silo sign the draft; the reason where it refuses."""
        done = command("silo", "sign", self.policies[silo], self.certificate, cwd=self.folder)
        return done.stderr if done.returncode else ""

    def assemble(self, silos: Sequence[int]) -> str:
        """Put the parts of these silos together; the reason where that is refused."""
        return self.draft(*(word for silo in silos for word in ("--signed", self.folder / f"silo-{silo}.json")))

    def verify(self) -> tuple[int, str]:
        """The exit code of a reader's verification, and what it printed."""
        done = command("certify", "--verify", self.certificate, "--keys", self.trusted, cwd=self.folder)
        return done.returncode, done.stdout + done.stderr

    def forge(self, edit: Edit, *, sign: bool = False) -> None:
        """Write the certificate as a coordinator with tools of its own does, after an edit of the honest one.

        With `sign` every silo colludes: its part is of the new body, whatever its ledger says.
        """
        tree = json.loads(self.certificate.read_text())
        edit(tree)
        body = sha256(canonical_json(tree["body"]))
        if sign:
            tree["silos"] = [self._signed(each, body) for each in tree["silos"]]
        document = {name: tree[name] for name in ("about", "body", "format", "silos")}
        key = load_or_create_key(self.folder / "coordinator.key")
        self.certificate.write_bytes(canonical_json({**document, "coordinator": sign_data(key, FORMAT, document)}))

    def _signed(self, part: dict[str, Any], body: str) -> dict[str, Any]:
        facts = {**{name: value for name, value in part.items() if name != "signed"}, "body": body}
        return {
            **facts,
            "signed": sign_data(
                signing_key(read_policy(self.policies[part["silo"]])), STATEMENT_NAMES[FORMAT], facts
            ),
        }

    def refusal(self, signers: Sequence[int] | None = None) -> tuple[str, str]:
        """Certify, have every silo sign, assemble and verify: who refuses first, and the line; "" for nobody."""
        if reason := self.draft():
            return "certify", reason
        silos = range(len(self.policies)) if signers is None else signers
        for silo in silos:
            if reason := self.sign(silo):
                return "silo", reason
        if reason := self.assemble(silos):
            return "certify", reason
        code, printed = self.verify()
        return ("verify", printed) if code else ("", printed)


def deployment(folder: Path, tree: dict[str, Any], *, first: bool = False) -> Deployment:
    """A run of `tree` by real guards, who answered every round of it, and the folder that its server left.

    With `first` the first step of [data.scale] is taken by them, too.
    """
    scenario = parse_scenario(tree, "test")
    policies = [each / "policy.toml" for each in prepare_silos(scenario, folder, run_count=2)]
    for policy in policies:
        begin_ledgers(read_policy(policy))
    guards = [open_guards(read_policy(policy)) for policy in policies]
    steps = FirstSteps({})
    if first:
        scenario, steps = scale_scenario(
            scenario,
            prepare_scenario(scenario, {}, for_release=True)[2],
            lambda cell: run_by([each.training for each in guards], cell),
        )
    (point,) = scenario.points
    finished = run_by([each.training for each in guards], point.cell)
    if point.cell.evaluation is not None:
        asked = make_evaluation_plan(point.cell, load_public_task(point.cell).objective, for_release=True)
        assert asked is not None
        answer_all(
            [each.tests for each in guards if each.tests is not None], point.cell, asked.plan, finished.model.size
        )
        finished = replace(finished, evaluations=make_evaluation_streams(asked))
    run = RunFolder(folder / "run", scenario, "deployment", resume=False)
    run.finished(0, steps.prepend_releases(point.cell, finished))
    run.ended()
    return Deployment(folder / "run", policies)


def run_by(guards: Sequence[Guard], cell: Cell, name: str = "run") -> CellOutcome:
    """A run of a cell whose rounds are all answered, with a model of zeros."""
    plan = make_plan(cell, load_public_task(cell).objective, for_release=True)
    answer_all(guards, cell, plan, plan.query_length, name)
    return CellOutcome(
        metrics={"test_loss": 1.0, "test_accuracy": 0.5},
        fraction_clipped=None,
        wall_seconds=1.0,
        releases=make_release_streams(plan, plan.schedule.rounds),
        gradient_evaluations=1,
        model=np.zeros(plan.objective.dimension),
        noise="release",
    )


def answer_all(guards: Sequence[Guard], cell: Cell, plan: Plan, length: int, name: str = "run") -> None:
    """Have silos' guards answer all rounds of a run for the query 0."""
    text, name = json.dumps(cell.canonical_data(), sort_keys=True), f"{name}-{cell.model.name}"
    keys = b"".join(guard.public_key(name, text) for guard in guards) if plan.masked else b""
    for guard in guards:
        for t in range(1, plan.schedule.rounds + 1):
            guard.answer(name, text, t, torch.zeros(length, dtype=torch.float64), keys)
