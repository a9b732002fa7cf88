"""Policy of a silo: file that bounds every run, which no server and no scenario can widen.

* A stream is the sequence of releases over the rounds of a run, either of one party or of the sums of masked
  messages.  Its guarantee is a μ of Gaussian differential privacy, a curve of (ε, δ) if records take part in
  secret rounds, or None without noise.
* A price is (μ, δ₀), a part of the lifetime budget: μ holds except with probability δ₀, the slack.
* An add-on is a part of fedpriv outside its core, which can add models.  An extension is a module of the site's
  own, which can also add algorithms.
"""

import json
import os
import stat
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedpriv.accounting.budget import ApproximateGDP, Price, overflow_slack
from fedpriv.accounting.curves import MIN_DELTA
from fedpriv.accounting.guarantees import Guarantee
from fedpriv.claims.ledger import ReleaseStream, make_release_streams, make_silo_stream
from fedpriv.core.errors import InputError, refuse
from fedpriv.core.extensions import ADD_ON_PARTS, import_module, load_add_on_part, load_add_on_parts
from fedpriv.core.figures import format_upper
from fedpriv.core.files import refuse_pipe
from fedpriv.data.cells import is_table_path
from fedpriv.data.schema import TableSchema
from fedpriv.loss.imported import is_import_path
from fedpriv.loss.models import MODELS
from fedpriv.noise.trust import TRUSTED, Trust, UnitName
from fedpriv.papers.base import Positive
from fedpriv.papers.table import ALGORITHMS
from fedpriv.participation.secret import SecretOrder
from fedpriv.plan.calibration import MAX_CLIP, MIN_CLIP
from fedpriv.plan.plan import Plan
from fedpriv.scenario.messages import format_validation_error
from fedpriv.scenario.schema import Cell
from fedpriv.silo.memory import DEFAULT_MEMORY, MemorySize
from fedpriv.silo.shard import Shard, key_path, load_shard, load_table_shard


@dataclass(frozen=True)
class PriceCurve:
    """Guarantee of a run, from which its price at any slack follows."""

    guarantee: Guarantee | None
    """Guarantee of the charged stream, or None without noise."""
    overflow_slack: float = 0.0
    """Slack for rounds that draw more records than the capacity of a round, 0 in public order."""

    def price_at(self, slack: float) -> Price:
        """Return the price at a slack, or None for a run without noise, which exceeds every budget.

        A guarantee that is a μ needs no slack.  The price of any other guarantee has the slack `slack`:
        `overflow_slack` of it is set aside, and its μ fails with at most the rest.

        Args:
            slack: Probability δ₀ with which the μ of the price may fail, in [0, 1).

        Raises:
            InputError: If the guarantee is no μ, and no μ can be certified at this slack.
        """
        if self.guarantee is None:
            return None
        if self.guarantee.mu is not None:
            return self.guarantee.charge(0.0)
        # Rounded down, so that both parts together do not exceed `slack`.
        if not (rest := (slack - self.overflow_slack) * (1.0 - 1e-12)) >= MIN_DELTA:
            raise InputError(
                f"allow.slack_per_run = {slack:g}: a run of this length needs "
                f"{format_upper(self.overflow_slack, 2)} of it for rounds that draw very many records, "
                f"and more than {MIN_DELTA:g} on top"
            )
        return ApproximateGDP(_mu_at_slack(self.guarantee, rest), slack)


@lru_cache(maxsize=64)
def _mu_at_slack(guarantee: Guarantee, slack: float) -> float:
    return guarantee.charge(slack).mu


def charged_stream(plan: Plan, silo: int, trust: Trust, allowed_trust: Trust) -> ReleaseStream:
    """Return the stream for which a silo is charged.

    Args:
        plan: Plan of the run.
        silo: Number of the silo.
        trust: The run's trust setting.
        allowed_trust: The trust setting that the silo's policy allows.

    Returns:
        The silo's own messages, or the release made of all silos' messages (`Trust.charges_own_messages`).
    """
    if trust.charges_own_messages(allowed_trust):
        return make_silo_stream(plan, silo, plan.schedule.rounds)
    # One release for all silos: noisy means of a server, or sums of masked messages.
    (stream,) = make_release_streams(plan, plan.schedule.rounds)
    return stream


def price_curve(plan: Plan, guarantee: Guarantee | None, silo: int) -> PriceCurve:
    """Return the price curve of one silo's part in a plan whose charged stream has `guarantee`."""
    participation = plan.schedule
    if guarantee is None or not isinstance(participation, SecretOrder):
        return PriceCurve(guarantee)
    return PriceCurve(
        guarantee, overflow_slack(participation.capacity(plan.batch_sizes[silo]), participation.rounds)
    )


def possible_prices(plan: Plan, silo: int, slack: float) -> list[Price]:
    """Return the possible prices of a silo's part in a plan at a slack.

    They are the price of the silo's own messages, and, if the run has a single stream of releases, its price.

    Raises:
        InputError: If a stream cannot be accounted for, or has no price at this slack.
    """
    releases = make_release_streams(plan, plan.schedule.rounds)
    streams = [make_silo_stream(plan, silo, plan.schedule.rounds), *(releases if len(releases) == 1 else ())]
    return [price_curve(plan, stream.guarantee, silo).price_at(slack) for stream in streams]


_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40
"""Most symbolic links that are followed on the way to a file, as in Linux."""


def check_writers(files: Iterable[Path]) -> None:
    """Check that group and others may write neither files nor their folders.

    The folders are those of the file and of the symbolic links on the way to it.  Folders further up may be
    writable by their group, but not by others.  A path that is missing or cannot be read passes, and so does a
    folder with the sticky bit, such as /tmp, where nobody but root and its owner can replace files of other users.

    Guarantee: at the time of the check nobody but root and the owners of the files, of the links to them, and of
    all folders above them, can replace a file that exists; with one exception, a group that may write a folder
    further up, as on some systems, or a user or group that may do so by an access control list.

    Raises:
        InputError: If group or others may write a file, its folder or the folder of a link on the way, or others a
            folder further up, and it is no folder with the sticky bit.
    """
    for file in files:
        for path, is_further_up in _folders_on_path(file):
            try:
                mode = path.stat().st_mode
            except OSError:  # reported by the code that reads the file
                continue
            if mode & (stat.S_IWOTH if is_further_up else _OTHERS_MAY_WRITE) and not (
                stat.S_ISDIR(mode) and mode & stat.S_ISVTX
            ):
                raise InputError(
                    f"{path}: mode {stat.S_IMODE(mode):04o}, not only its owner may write it, and so change what "
                    f"this silo allows or releases; chmod go-w {path}"
                )


def _folders_on_path(file: Path) -> Iterator[tuple[Path, bool]]:
    """Iterate over a file and the folders that lead to it, each with whether it is a folder further up.

    Not further up are the file, its folder, and the folder of each symbolic link on the way, because file and link
    can be replaced there.
    """
    folder, parts, link_count = Path("/"), list(reversed(file.absolute().parts[1:])), 0
    is_deciding: dict[Path, bool] = {}  # whether the path is not further up
    while parts:
        name = parts.pop()
        if name == "..":  # `folder` has no links left, so that its parent is where ".." leads.
            folder = folder.parent
            continue
        is_deciding.setdefault(folder, False)
        if os.path.islink(folder / name) and (link_count := link_count + 1) <= _MAX_LINKS:
            is_deciding[folder] = True
            target = (folder / name).readlink()
            folder = Path("/") if target.is_absolute() else folder
            parts += reversed([part for part in target.parts if part != "/"])
        else:
            folder = folder / name
    is_deciding |= {folder.parent: True, folder: True}
    for path in reversed(is_deciding):
        yield path, not is_deciding[path]


def check_readers(file: Path) -> None:
    """Check that only the owner of a file of records may read it.

    A file that is missing or cannot be reached passes.

    Raises:
        InputError: If group or others have any permission.
    """
    try:
        mode = file.stat().st_mode
    except OSError:  # reported by the code that reads the file
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"{file}: mode {stat.S_IMODE(mode):04o}, others have access to these records; chmod 600 {file}"
        )


@contextmanager
def private_umask() -> Iterator[None]:
    """Set a umask in the block, under which new files are private to their owner."""
    umask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(umask)


def make_own_folder(path: Path, mode: int = 0o755) -> None:
    """Create a folder of this mode and its missing parents of mode 0755, less the umask.

    A folder that exists keeps its mode.
    """
    if not path.is_dir():
        make_own_folder(path.parent)
        path.mkdir(mode, exist_ok=True)


def revoke_write_access(path: Path) -> None:
    """Remove the write permission of group and others, whatever the umask was when `path` was made."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS_MAY_WRITE)


SLACK_PER_RUN = 1e-8
"""Slack that a run whose records take part in secret is charged by default."""


class RunLimits(BaseModel):
    """Section [allow]: bounds on every run that is answered, and on all of them together."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    trust: Literal["untrusted", "secure-aggregation", "trusted"] = Field(
        "untrusted",
        description='"secure-aggregation" also answers with a share of the noise, masked, counting on the other '
        'silos\' shares; "trusted" also where the server adds the noise',
    )
    relation: Literal["replace-one", "zero-out"] = Field(description="the neighbouring relation of `budget`")
    unit: UnitName = Field("record", description="whose privacy `budget` is: runs of another unit are refused")
    clip: Annotated[float, Field(ge=MIN_CLIP, le=MAX_CLIP)] = Field(
        description="the largest norm bound on one record's increment, and on each part that is clipped for itself"
    )
    least_clip: Annotated[float, Field(ge=MIN_CLIP, le=MAX_CLIP)] = Field(
        MIN_CLIP, description="the smallest such bound: a clip next to nothing asks arithmetic for too much"
    )
    rounds: Annotated[int, Field(ge=1)] = Field(description="the most rounds of one run")
    least_records: Annotated[int, Field(ge=1)] = Field(
        1, description="the fewest training records of this silo, or persons, that a run reads"
    )
    expires: date | None = Field(
        None, description="the last day, in UTC, on which runs are answered, whatever is left of `budget`"
    )
    budget: Positive = Field(description="mu (Gaussian DP) over the lifetime of the shard, all runs composed")
    slack: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0,
        description="the probability with which `budget` may fail, over the lifetime of the shard, all runs added "
        "up: runs whose records take part in secret need some (1e-6, say), and 0 refuses them",
    )
    slack_per_run: Annotated[float, Field(ge=MIN_DELTA, lt=1.0)] = Field(
        SLACK_PER_RUN, description="how much of `slack` each such run uses up: a smaller one makes it cost more mu"
    )
    silos: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description='how many silos share the noise of a masked run; needed for trust = "secure-aggregation" '
        "unless `peers` says it",
    )
    query: Positive = Field(2.0**40, description="the largest absolute value of a query's coordinates")
    dimension: Annotated[int, Field(ge=1)] = Field(2**20, description="the most parameters of a model")
    memory: MemorySize = Field(
        DEFAULT_MEMORY,
        description="what all runs together may take, beyond the program (300 to 400 MiB), requests that wait "
        "(128 MiB) and the records: the container's limit has to be above the sum of the four",
    )
    models: tuple[str, ...] = Field(
        (),
        strict=False,
        description="models beyond those of fedpriv that a scenario may name: import paths, package.module:Name, "
        "of torch modules of this installation, and names of rows of `extensions`",
    )
    algorithms: tuple[str, ...] = Field(
        (),
        strict=False,
        description="algorithms beyond those of fedpriv that a scenario may name: rows of `extensions`",
    )
    extensions: tuple[str, ...] = Field(
        (),
        strict=False,
        description="modules, package.module, that the guard imports when it starts, and that add rows of their "
        "own; no other extension is imported, whatever is installed",
    )
    open_runs: Annotated[int, Field(ge=1)] = Field(8, description="the most runs that are under way at a time")
    tick: Annotated[float, Field(ge=0.0, le=60.0)] = Field(
        0.05,
        description="seconds: a request takes a whole multiple of this, so that its time tells less; 0 is at once",
    )
    runs: Annotated[int, Field(ge=1)] = Field(1000, description="the most runs over the lifetime of the ledger")
    statistics: tuple[str, ...] = Field(
        (),
        strict=False,
        description="columns of the table whose cells may be counted, target and site too; none of the others. "
        "`budget` is what protects: a model that is trained may ask about any column",
    )
    noise_free: bool = Field(
        False, description="true gives up all protection: runs without noise are answered, `budget` bounds nothing"
    )

    @model_validator(mode="after")
    def _check_clips(self) -> Self:
        if self.least_clip > self.clip:
            raise ValueError(f"least_clip = {self.least_clip:g} is above clip = {self.clip:g}: no run has both")
        return self


class EvaluationLimits(BaseModel):
    """Section [evaluation]: bounds on evaluations, which read the silo's test records.

    The bounds of [allow] on trust, relation, queries and models, and its last day, hold for evaluations too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    budget: Positive = Field(
        description="mu (Gaussian DP) over the lifetime of the test records, all evaluations composed: "
        "a budget of its own, since they are other records"
    )
    evaluations: Annotated[int, Field(ge=1)] = Field(100, description="the most evaluations of one run")
    runs: Annotated[int, Field(ge=1)] = Field(1000, description="the most runs over the lifetime of the ledger")


class Policy(BaseModel):
    """Policy file of a silo, whose relative paths `read_policy` completes by the folder of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    silo: Annotated[int, Field(ge=0)] = Field(description="this silo's number, from 0")
    shard: Path = Field(
        description="an .npz file with `labels` (n,) and `images` of bytes or `features` of floats (n, ...), or a "
        "table, such as a .csv or .parquet file, that `table` describes"
    )
    classes: Annotated[int, Field(ge=0)] | None = Field(
        None, description="how many classes labels can have; 0 for real numbers; a `table` says it itself"
    )
    table: TableSchema | None = Field(None, description="what is public about the columns of the table in `shard`")
    ledger: Path = Field(description="where what was released is kept; `fedpriv silo init` makes it, mode 0600")
    mark: Path | None = Field(
        None,
        description="how far the ledger has come, by which an older copy is noticed: on another disk if you can; "
        "by default beside the ledger, with .mark behind its name",
    )
    socket: Path = Field(description="the Unix socket on which this silo's ClientApp asks")
    identity: Path | None = Field(
        None,
        description="an Ed25519 key of ssh-keygen, with which this silo signs its keys for secure aggregation",
    )
    peers: Path | None = Field(
        None, description="every silo's public key, one a line, silo 0 first: masks are agreed on with these only"
    )
    group: str | None = Field(None, description="the Unix group that may ask: the SuperNode's user is in it")
    allow: RunLimits
    evaluation: EvaluationLimits | None = Field(
        None, description="what may be asked about the silo's test records; without it nothing is"
    )

    @model_validator(mode="after")
    def _check_table(self) -> Self:
        """Check the keys that say how the silo's records are read, which a scenario cannot change, and paths."""
        refuse(
            {
                **{
                    f"{name}: a path has no null byte": "\0" in str(getattr(self, name))
                    for name in ("shard", "ledger", "mark", "socket", "identity", "peers")
                },
                f"shard = {str(self.shard)!r}: a table, such as .csv, needs [table], and no other file has it": (
                    is_table_path(self.shard.name) != (self.table is not None)
                ),
                "classes: give how many there are, 0 for real numbers; with [table] leave it out": (
                    (self.table is None) == (self.classes is None)
                ),
                "classes = 1: expected 0, for real numbers, or at least 2": self.classes == 1,
                "table.public = false: ranges and vocabularies that were read from the records give them away; "
                "replace them by what is known without the records, and write public = true": (
                    self.table is not None and not self.table.public
                ),
            },
            ValueError,
        )
        return self

    @model_validator(mode="after")
    def _check_share_count(self) -> Self:
        """Check that a policy of secure aggregation fixes the number of silos that share the noise."""
        if self.allow.trust == "secure-aggregation" and self.allow.silos is None and self.peers is None:
            raise ValueError(
                'allow.trust = "secure-aggregation" needs allow.silos, the number of silos that share the noise, '
                "or peers: a server that names the number itself can make this silo's share as small as it likes"
            )
        return self

    @property
    def class_count(self) -> int:
        """Number of classes, or 0 for real numbers."""
        if self.table is not None:
            return self.table.class_count
        assert self.classes is not None
        return self.classes

    def import_extensions(self) -> None:
        """Import the modules that the policy lists, and the add-ons whose runs and evaluations it allows.

        Models that are listed by an import path are not imported here.

        Raises:
            InputError: If a module fails, a listed model or algorithm is neither fedpriv's nor added by a module,
                or the add-on of an allowed model is not installed.
        """
        allow = self.allow
        # An add-on has the name of the key of [allow] that permits it.
        for name in filter(partial(getattr, allow), ADD_ON_PARTS["model"]):
            for kind in ("model", "guard"):
                load_add_on_part(kind, name)
        if self.evaluation is not None:
            load_add_on_parts("evaluation")  # Add-ons are optional here: loss and accuracy need none.
        for module in allow.extensions:
            import_module(module, "allow.extensions")
        for key, names, table in (
            ("models", [name for name in allow.models if not is_import_path(name)], MODELS),
            ("algorithms", allow.algorithms, ALGORITHMS),
        ):
            if unknown := [name for name in names if name not in table]:
                raise InputError(f"allow.{key}: {unknown[0]!r} is added by none of allow.extensions")

    def load_shard(self) -> Shard:
        """Load the silo's records.

        Raises:
            InputError: If the records cannot be used.
        """
        if self.table is not None:
            return load_table_shard(self.shard, self.table, self.silo)
        return load_shard(self.shard, self.class_count)

    @property
    def test_policy(self) -> "Policy | None":
        """Policy for evaluations, with a separate ledger, or None without a section [evaluation].

        Budget and number of runs are those of this section, the slack is 0, and clips have the widest limits.
        Ledger and mark lie beside those of training, with "-tests" in their names.

        Guarantee: training and evaluation share no budget, no ledger and no rollback mark, and no record unless
        the silo's file has it twice.
        """
        if (limits := self.evaluation) is None:
            return None
        allow = {"budget": limits.budget, "runs": limits.runs, "slack": 0.0}
        # The program, and not the scenario, sets the clips of evaluations.
        allow |= {"clip": MAX_CLIP, "least_clip": MIN_CLIP}
        ledger, mark = (
            path and path.with_name(f"{path.stem}-tests{path.suffix}") for path in (self.ledger, self.mark)
        )
        return self.model_copy(
            update={"ledger": ledger, "mark": mark, "allow": self.allow.model_copy(update=allow)}
        )

    @property
    def mark_path(self) -> Path:
        """Path of the ledger's rollback mark."""
        return self.mark or self.ledger.with_name(self.ledger.name + ".mark")

    @property
    def shard_key(self) -> Path:
        """Path of the key of the records' fingerprint."""
        return key_path(self.shard)


def read_policy(path: Path) -> Policy:
    """Read and validate a policy file.

    Guarantee: the policy is refused if others than the owner of a file may write one of these files: the policy,
    the records with their key, the ledgers with their marks, the identity and the peers.  It is refused if they
    may write a folder of these files, or of a link that leads to them.  Both hold with the exceptions of
    `check_writers`.  It is also refused if others may read the records.

    Returns:
        The policy, in which relative paths are completed by the folder of the file, not of a link to it.

    Raises:
        InputError: If the file cannot be used, a key or value is not valid, two of the other files above have one
            path, or the policy is refused.
    """
    check_writers([path])
    try:
        tree = tomllib.loads(refuse_pipe(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; a silo's policy is a TOML file (docs/privacy.md)") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a policy: {error}") from None
    refuse(
        {f"{path}: seed: a fixed seed is refused; released noise is keyed by the operating system": "seed" in tree}
    )
    try:
        policy = Policy.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{path}: {format_validation_error(error, Policy)}") from None
    folder = path.resolve().parent
    paths = {
        name: folder / getattr(policy, name)
        for name in ("shard", "ledger", "mark", "socket", "identity", "peers")
        if getattr(policy, name) is not None
    }
    resolved_policy = policy.model_copy(update=paths)
    trusted_files = [
        resolved_policy.shard,
        resolved_policy.shard_key,
        resolved_policy.ledger,
        resolved_policy.mark_path,
        resolved_policy.identity,
        resolved_policy.peers,
    ]
    if (test_policy := resolved_policy.test_policy) is not None:
        trusted_files += [test_policy.ledger, test_policy.mark_path]
    files_in_use = [file for file in trusted_files if file is not None]
    if len({file.resolve() for file in files_in_use}) < len(files_in_use):
        raise InputError(f"{path}: two of shard, ledger, mark, identity and peers are one file; give each its own")
    check_writers(files_in_use)
    check_readers(resolved_policy.shard)
    return resolved_policy


def why_unaccountable(cell: Cell) -> str | None:
    """Return why every guard refuses a cell, whatever its policy, or None if no reason is found here."""
    reasons = {
        f"trust = {cell.algorithm.trust!r} broadcasts what is not private": (
            not TRUSTED.covers(cell.algorithm.trust_setting)
        ),
        "federation.clients are drawn from a pool that only a simulation has": cell.federation.clients is not None,
        f"the constants of model {cell.model.name!r} are known for one data set, not for a silo's own records": (
            cell.model.row.only_for is not None
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_assumption_refused(plan: Plan) -> str | None:
    """Return why a plan is refused whose sensitivity rests on more than clipping, or None for others."""
    if (premise := (plan.mechanism.assumption or "").rstrip(".")) == "":
        return None
    return (
        f"{premise[0].lower()}{premise[1:]}; floating point keeps to no such thing: use an algorithm that clips "
        "every part, such as momentum-tree-aligned with difference_clip and residual_clip"
    )


_EXAMPLE_VALUES: dict[str, object] = {
    "silo": 0,
    "shard": "shard.npz",
    "classes": 10,
    "ledger": "ledger.sqlite",
    "socket": "silo.sock",
    "relation": "replace-one",
    "clip": 1.0,
    "rounds": 100,
    "budget": 1.0,
}
"""Example values, to be replaced, of the keys that a policy over images needs."""
_WIDTH = 100


def write_template(path: Path) -> None:
    """Write a new policy file with examples, which only its owner may write.

    Raises:
        InputError: If the file exists or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(format_template())
        revoke_write_access(path)
    except FileExistsError:
        raise InputError(f"{path} exists; a template is written to a new file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error}") from None


def format_template() -> str:
    """Format a policy file with examples for required keys and comments with defaults for the others.

    The whole section [evaluation], which a policy may lack, is a comment.
    """
    return f"{_format_section(Policy)}\n[allow]\n{_format_section(RunLimits)}\n" + "".join(
        f"# {line}\n" for line in ["[evaluation]", *_format_section(EvaluationLimits).splitlines()]
    )


def _format_section(model: type[BaseModel]) -> str:
    """Format the keys of a section as TOML, each after its description in comments.

    A key that a policy needs has an example value, and any other key is a comment with its default.  The sections
    `allow` and `evaluation` are left out.

    Args:
        model: Class whose fields are the keys of the section.
    """
    lines: list[str] = []
    for name, field in model.model_fields.items():
        if name in ("allow", "evaluation"):
            continue
        lines += textwrap.wrap(field.description or "", _WIDTH, initial_indent="# ", subsequent_indent="# ")
        lines.append(
            f"{name} = {json.dumps(_EXAMPLE_VALUES[name])}  # choose"
            if name in _EXAMPLE_VALUES
            else f"# {name} = {'(none)' if field.default is None else json.dumps(field.default)}"
        )
    return "\n".join(lines) + "\n"
