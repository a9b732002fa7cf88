"""The certificates of a recording: honest ones as readers get them, and who refuses each edit of a record."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.record_guards import known_secrets
from benchmarks.record_parts import Entries, Wanted, as_text, mine, without
from tests.attacks.deployment import Deployment, deployment, fixed_order, secret_order
from tests.attacks.test_certificates import FIXED, SECRET, Case

RUNS = {"fixed": (fixed_order, FIXED), "secret": (secret_order, SECRET)}


def certificates(piece: int, pieces: int, wanted: Wanted) -> Entries:
    """Each kind of run: its certificate, signed by all, and what a silo and a reader say of each edit."""

    def named() -> Iterator[tuple[str, Callable[[], str]]]:
        for kind, (_, cases) in RUNS.items():
            yield f"{kind}/honest", lambda k=kind: _certified(k)
            for name, case in cases.items():
                yield f"{kind}/edited/{name}", lambda k=kind, c=case: _refusals(k, c)

    return mine(named(), piece, pieces, wanted)


@functools.cache
def _honest(kind: str) -> Deployment:
    """A run of this kind, certified and signed by all of its silos."""
    with known_secrets():
        run = deployment(Path(tempfile.mkdtemp()), RUNS[kind][0]())
        run.refusal()
    return run


def _certified(kind: str) -> str:
    tree = json.loads(_honest(kind).certificate.read_text(encoding="utf-8"))
    return as_text(without({"about": tree["about"], "record": tree["body"]["record"]}))


def _refusals(kind: str, case: Case) -> str:
    honest = _honest(kind)
    run = Deployment(Path(shutil.copytree(honest.folder, Path.cwd() / "run")), honest.policies)
    run.forge(lambda tree: case.edit(tree["body"]["record"]), sign=True)
    code, printed = run.verify()
    told = f"silo: {run.sign(1)}reader: {code} {printed}"
    return told.replace(str(honest.policies[0].parents[1]), "SILOS")
