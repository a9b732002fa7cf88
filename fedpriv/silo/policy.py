"""Policy of a silo, in a file of its own: no server and no scenario can widen it.

The file to start from has every key with what it means, made from the keys themselves.  Files that a guard relies
on (policy, records, keys and ledger) are refused where users other than the guard's own may write them.

Prices of a silo's part in a plan: the stream that is charged, and its cost to a lifetime budget.
"""

import json
import os
import stat
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    """Share of the slack for rounds that draw more records than a batch can hold."""

    def price_at(self, slack: float) -> Price:
        """Return the price at a slack, or None for a run without noise, which exceeds every budget.

        A guarantee that is a μ needs no slack and ignores it.  InputError if another one needs more slack.
        """
        if self.guarantee is None:
            return None
        if self.guarantee.mu is not None:
            return self.guarantee.charge(0.0)
        if not (rest := (slack - self.overflow_slack) * (1.0 - 1e-12)) >= MIN_DELTA:
            raise InputError(
                f"allow.slack_per_run = {slack:g}: a run of this length needs "
                f"{format_upper(self.overflow_slack, 2)} of "
                f"it for rounds that draw very many records, and {MIN_DELTA:g} on top"
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
        The silo's own messages, or the release made of all silos' messages if the silo trusts whoever makes it.
    """
    if trust.charges_own_messages(allowed_trust):
        return make_silo_stream(plan, silo, plan.schedule.rounds)
    (stream,) = make_release_streams(
        plan, plan.schedule.rounds
    )  # a server's noisy means, or sums of masked messages
    return stream


def price_curve(plan: Plan, guarantee: Guarantee | None, silo: int) -> PriceCurve:
    """Return the cost of one silo's part in a plan whose charged stream has `guarantee`."""
    participation = plan.schedule
    if guarantee is None or not isinstance(participation, SecretOrder):
        return PriceCurve(guarantee)
    return PriceCurve(
        guarantee, overflow_slack(participation.capacity(plan.batch_sizes[silo]), participation.rounds)
    )


def possible_prices(plan: Plan, silo: int, slack: float) -> list[Price]:
    """Return the possible prices of a silo's part in a plan at a slack.

    The first is that of the silo's own messages.  If the run has one release for all silos, its price follows.
    """
    releases = make_release_streams(plan, plan.schedule.rounds)
    streams = [make_silo_stream(plan, silo, plan.schedule.rounds), *(releases if len(releases) == 1 else ())]
    return [price_curve(plan, stream.guarantee, silo).price_at(slack) for stream in streams]


_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40
"""On the way to a file, as Linux follows them."""


def check_writers(files: Iterable[Path]) -> None:
    """InputError for a file, or a folder that it is in, that group or others may write; what is not there passes.

    A folder with the sticky bit passes, as /tmp has it: there nobody renames or removes what is another's.  Modes
    count whoever the owner is, root too.

    Guarantee: at the time of the check nobody but root and the owners of the files, and of all folders above them,
    can replace what a guard starts from; and a group that may write a folder further up, as some systems have it.
    """
    for file in files:
        for each, parent in _folders_on_path(file):
            try:
                mode = each.stat().st_mode
            except OSError:  # whoever reads it says so
                continue
            if mode & (stat.S_IWOTH if parent else _OTHERS_MAY_WRITE) and not (
                stat.S_ISDIR(mode) and mode & stat.S_ISVTX
            ):
                raise InputError(
                    f"{each}: mode {stat.S_IMODE(mode):04o}, not only its owner may write it, and so change what "
                    f"this silo allows or releases; chmod go-w {each}"
                )


def _folders_on_path(file: Path) -> Iterator[tuple[Path, bool]]:
    """The file that a path leads to and every folder on the way, and whether it is further up than what decides.

    The folder of the file decides, and so does that of every link on the way: there the link can be exchanged.
    """
    here, left, links = Path("/"), list(reversed(file.absolute().parts[1:])), 0
    decides: dict[Path, bool] = {}
    while left:
        name = left.pop()
        if name == "..":
            here = here.parent
            continue
        decides.setdefault(here, False)
        if os.path.islink(here / name) and (links := links + 1) <= _MAX_LINKS:
            decides[here] = True
            target = (here / name).readlink()
            here = Path("/") if target.is_absolute() else here
            left += reversed([part for part in target.parts if part != "/"])
        else:
            here = here / name
    decides |= {here.parent: True, here: True}
    for place in reversed(decides):
        yield place, not decides[place]


def check_readers(file: Path) -> None:
    """InputError for records that others than their owner may read; a file that is not there passes."""
    try:
        mode = file.stat().st_mode
    except OSError:  # whoever reads it says so
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(f"{file}: mode {stat.S_IMODE(mode):04o}, others can read these records; chmod 600 {file}")


@contextmanager
def private_umask() -> Iterator[None]:
    """Files that are made inside are their owner's alone, whatever the umask is."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_own_folder(path: Path, mode: int = 0o755) -> None:
    """Make a folder and those above it that are not there: nobody else may write them, whatever the umask is."""
    if not path.is_dir():
        make_own_folder(path.parent)
        path.mkdir(mode, exist_ok=True)


def revoke_write_access(path: Path) -> None:
    """Take the right to write from group and others, whatever the umask was when `path` was made."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS_MAY_WRITE)


SLACK_PER_RUN = 1e-8


class RunLimits(BaseModel):
    """[allow]: bounds on every run that is answered, and on all of them together."""

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
        None, description="how many silos share the noise of a masked run; needed unless `peers` says it"
    )
    query: Positive = Field(2.0**40, description="the largest absolute value of a query's coordinates")
    dimension: Annotated[int, Field(ge=1)] = Field(2**20, description="the most parameters of a model")
    memory: MemorySize = Field(
        DEFAULT_MEMORY,
        description="what all runs together may take, beyond the program (about 300 MiB) and the records: the "
        "container's limit has to be above the sum of the three",
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
    """[evaluation]: bounds on evaluations, which read the silo's own test records and nothing else.

    What [allow] says of trust, relation, queries, models and time holds for them too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    budget: Positive = Field(
        description="mu (Gaussian DP) over the lifetime of the test records, all evaluations composed: "
        "a budget of its own, since they are other records"
    )
    evaluations: Annotated[int, Field(ge=1)] = Field(100, description="the most evaluations of one run")
    runs: Annotated[int, Field(ge=1)] = Field(1000, description="the most runs over the lifetime of the ledger")


class Policy(BaseModel):
    """A silo's policy file; paths are taken from the folder of the file.

    There is no key for a seed: noise that is released is keyed by the operating system.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    silo: Annotated[int, Field(ge=0)] = Field(description="this silo's number, from 0")
    shard: Path = Field(
        description="an .npz file with `labels` (n,) and `images` of bytes or `features` of floats (n, ...), or a "
        ".csv or .parquet file that `table` describes"
    )
    classes: Annotated[int, Field(ge=0)] | None = Field(
        None, description="how many classes labels can have; 0 for real numbers; a `table` says it itself"
    )
    table: TableSchema | None = Field(
        None, description="what is public about the columns of a .csv or .parquet file"
    )
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
        """A silo's own words on how its records are read: a scenario that has others is refused."""
        refuse(
            {
                f"shard = {str(self.shard)!r}: a .csv or .parquet file needs [table], and no other has it": (
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
        """A share of the noise is 1/√M of it: with a server's own M it could be next to nothing."""
        if self.allow.trust == "secure-aggregation" and self.allow.silos is None and self.peers is None:
            raise ValueError(
                'allow.trust = "secure-aggregation" needs allow.silos, the number of silos that share the noise, '
                "or peers: a server that names the number itself can make this silo's share as small as it likes"
            )
        return self

    @property
    def class_count(self) -> int:
        """0 for real numbers."""
        if self.table is not None:
            return self.table.class_count
        assert self.classes is not None
        return self.classes

    def import_extensions(self) -> None:
        """Import what the policy lists, and the add-ons whose runs it allows.

        Raises:
            InputError: a module fails, none of them adds a row that is listed, or an add-on is not there.
        """
        allow = self.allow
        for name in filter(
            partial(getattr, allow), ADD_ON_PARTS["model"]
        ):  # a key of [allow] has an add-on's name
            for kind in ("model", "guard"):
                load_add_on_part(kind, name)
        if self.evaluation is not None:
            load_add_on_parts("evaluation")  # as far as they are there: loss and accuracy need none
        for module in allow.extensions:
            import_module(module, "allow.extensions")
        for key, names, table in (
            ("models", [name for name in allow.models if not is_import_path(name)], MODELS),
            ("algorithms", allow.algorithms, ALGORITHMS),
        ):
            if unknown := [name for name in names if name not in table]:
                raise InputError(f"allow.{key}: {unknown[0]!r} is added by none of allow.extensions")

    def load_shard(self) -> Shard:
        """The silo's records; InputError, in one line, if they cannot be used."""
        if self.table is not None:
            return load_table_shard(self.shard, self.table, self.silo)
        return load_shard(self.shard, self.class_count)

    @property
    def test_policy(self) -> "Policy | None":
        """The policy by which evaluations are answered, with a ledger of its own; None if none are.

        Guarantee: training and evaluation share no budget, no ledger and no record.
        """
        if (asked := self.evaluation) is None:
            return None
        allow = {"budget": asked.budget, "runs": asked.runs, "slack": 0.0}
        allow |= {"clip": MAX_CLIP, "least_clip": MIN_CLIP}  # the program's own, none of a scenario
        ledger, mark = (
            path and path.with_name(f"{path.stem}-tests{path.suffix}") for path in (self.ledger, self.mark)
        )
        given = {"ledger": ledger, "mark": mark, "allow": self.allow.model_copy(update=allow)}
        return self.model_copy(update=given)

    @property
    def mark_path(self) -> Path:
        """Where the ledger's mark is."""
        return self.mark or self.ledger.with_name(self.ledger.name + ".mark")

    @property
    def shard_key(self) -> Path:
        """Path of the key of the records' fingerprint."""
        return key_path(self.shard)


def read_policy(path: Path) -> Policy:
    """Read and validate a policy file; InputError with one line if it cannot be used.

    Guarantee: refused where others than its owner may write the policy, the records with their key, the ledger
    with its mark, the identity or the peers, or a folder of theirs, or a folder of a link that leads to them; and
    where others may read the records.
    """
    check_writers([path])
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; a silo's policy is a TOML file (docs/privacy.md)") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a policy: {error}") from None
    if "seed" in tree:
        raise InputError(f"{path}: seed: a fixed seed is refused; released noise is keyed by the operating system")
    try:
        policy = Policy.model_validate(tree)
    except ValidationError as error:
        raise InputError(f"{path}: {format_validation_error(error, Policy)}") from None
    here = path.resolve().parent
    files = ("shard", "ledger", "mark", "socket", "identity", "peers")
    given = {name: here / getattr(policy, name) for name in files if getattr(policy, name) is not None}
    found = policy.model_copy(update=given)
    relied_on = [found.shard, found.shard_key, found.ledger, found.mark_path, found.identity, found.peers]
    if (tests := found.test_policy) is not None:
        relied_on += [tests.ledger, tests.mark_path]
    check_writers(file for file in relied_on if file is not None)
    check_readers(found.shard)
    return found


def why_unaccountable(cell: Cell) -> str | None:
    """Why no policy allows any run of `cell`, whatever its budget; None if some policy can."""
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
    """Why no policy allows a plan whose sensitivity presumes more of the loss than that increments are clipped."""
    if plan.mechanism.assumption is None:
        return None
    assumed = plan.mechanism.assumption.rstrip(".")
    return (
        f"{assumed[0].lower()}{assumed[1:]}; floating point keeps to no such thing: use an algorithm that clips "
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
"""Of keys that a policy over images needs: a value to be replaced."""
_WIDTH = 100


def write_template(path: Path) -> None:
    """Write a policy file to be edited; InputError if there is a file."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(format_template())
        revoke_write_access(path)
    except FileExistsError:
        raise InputError(f"{path} exists; a template is written to a new file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error}") from None


def format_template() -> str:
    """Keys that have to be chosen have an example, the others are commented out at their default."""
    evaluated = "".join(
        f"# {line}\n" for line in ["[evaluation]", *_format_section(EvaluationLimits).splitlines()]
    )
    return f"{_format_section(Policy)}\n[allow]\n{_format_section(RunLimits)}\n{evaluated}"


def _format_section(model: type[BaseModel]) -> str:
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
