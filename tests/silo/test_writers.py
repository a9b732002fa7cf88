"""A guard starts only from files that nobody but their owner may change; what fedpriv writes itself passes."""

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedpriv.addons.services import deployment
from fedpriv.addons.services.deployment import write_silos
from fedpriv.cli.app import app
from fedpriv.core.errors import InputError, RunError
from fedpriv.scenario.load import parse_scenario, resolve_cell
from fedpriv.silo.demo import prepare_silos
from fedpriv.silo.guard import open_guard
from fedpriv.silo.guards import begin_ledgers
from fedpriv.silo.policy import check_writers, read_policy
from tests.conftest import small_tree
from tests.silo.charged import charged
from tests.silo.guarded import CELL, ZERO, guard_of, write_silo

PLACES = {
    "policy": "silo-0.toml",
    "shard": "shard-0.npz",
    "ledger": "ledgers",
    "mark": "marks",
    "identity": "identity-0",
    "peers": "peers",
    "folder of the policy": ".",
}


@pytest.fixture
def generous_umask() -> Iterator[None]:
    """Under which files are made that everybody may write."""
    before = os.umask(0)
    yield
    os.umask(before)


def silo_in(folder: Path) -> Path:
    """A policy whose files lie in folders of their own; those that others write here are made 0600 and 0700."""
    path = write_silo(folder)
    for name in ("ledgers", "marks"):
        (folder / name).mkdir()
    for name in ("identity-0", "peers"):
        (folder / name).touch()
    text = path.read_text().replace('"ledger-0.sqlite"', '"ledgers/ledger.sqlite"\nmark = "marks/mark"')
    path.write_text(text.replace("[allow]", 'identity = "identity-0"\npeers = "peers"\n[allow]'))
    for place in PLACES.values():
        (folder / place).chmod(0o700)
    return path


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
@pytest.mark.parametrize("what", PLACES)
def test_files_writable_by_others_are_refused_with_path_and_remedy(tmp_path: Path, what: str, mode: int) -> None:
    path, place = silo_in(tmp_path), (tmp_path / PLACES[what]).resolve()
    read_policy(path)
    place.chmod(mode)
    with pytest.raises(InputError, match=rf"^{place}: mode {mode:04o}, [^\n]*chmod go-w {place}$"):
        read_policy(path)
    place.chmod(mode & 0o700)
    read_policy(path)


def test_a_parent_folder_writable_by_others_is_refused(tmp_path: Path) -> None:
    """Gains: the silo, by another folder in the place of the one with the policy."""
    (tmp_path / "shared" / "silo").mkdir(parents=True)
    path = silo_in(tmp_path / "shared" / "silo")
    read_policy(path)
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(InputError, match=f"^{tmp_path / 'shared'}: mode 0777"):
        read_policy(path)
    (tmp_path / "shared").chmod(0o1777)
    read_policy(path)


def test_a_symbolic_link_does_not_hide_that_its_target_is_group_writable(tmp_path: Path) -> None:
    path = silo_in(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "shard-0.npz").rename(tmp_path / "elsewhere" / "records.npz")
    (tmp_path / "shard-0.npz").symlink_to(moved)
    read_policy(path)
    moved.chmod(0o664)
    assert moved.stat().st_uid == os.geteuid()
    with pytest.raises(InputError, match=r"records\.npz: mode 0664, "):
        read_policy(path)


def test_a_world_writable_folder_is_accepted_only_with_the_sticky_bit(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    tmp_path.chmod(0o1777)  # as a container's volume for a ledger
    guard_of(path)
    tmp_path.chmod(0o777)
    with pytest.raises(InputError, match="mode 0777"):
        guard_of(path)


def test_every_silo_command_refuses_a_policy_writable_by_others(tmp_path: Path) -> None:
    path = silo_in(tmp_path)
    path.chmod(0o664)
    for command in ("init", "run", "status"):
        refusal = CliRunner().invoke(app, ["silo", command, str(path)]).exception
        assert isinstance(refusal, InputError)
        assert f"chmod go-w {path}" in str(refusal)
    assert not (tmp_path / "ledgers" / "ledger.sqlite").exists()


def split_silos(folder: Path) -> list[Path]:
    """The policies of silos that `fedpriv data split` writes."""
    tree = small_tree()
    tree.pop("seed")
    return [silo / "policy.toml" for silo in prepare_silos(parse_scenario(tree, "test"), folder, run_count=1)]


@pytest.mark.usefixtures("generous_umask")
def test_files_of_data_split_and_local_deployment_pass_the_permission_check_under_any_umask(
    tmp_path: Path,
) -> None:
    for path in (split := split_silos(tmp_path / "a")):
        assert stat.S_IMODE(path.with_name("shard.npz").stat().st_mode) == 0o600, "their owner's alone"
        begin_ledgers(read_policy(path))
    local = write_silos(resolve_cell(small_tree(), "test"), tmp_path / "kept", tmp_path / "home")
    for path in [*split, *local]:
        policy = read_policy(path)
        open_guard(policy)
        assert {stat.S_IMODE(file.stat().st_mode) & 0o022 for file in (path, policy.shard, policy.ledger)} == {0}


class Killed(BaseException):
    """End of the process in the middle of a call."""


@pytest.mark.parametrize("function", ["write_shard", "begin_ledgers"])
def test_silos_of_a_killed_local_deployment_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Was: a shard without its ledger, with which no later attempt began, since the ledger counted as lost."""
    cell, calls = resolve_cell(small_tree(), "test"), itertools.count()
    kept = tmp_path / "kept"
    original = getattr(deployment, function)

    def killed_at_the_second(*arguments: Any) -> None:
        original(*arguments)
        if next(calls) == 1:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(deployment, function, killed_at_the_second)
        with pytest.raises(Killed):
            write_silos(cell, kept, tmp_path / "home")
    (kept / "silo-1" / "shard.npz").write_bytes(b"PK half of it")
    finished_silo = (kept / "silo-0" / "ledger.sqlite").read_bytes()
    policies = write_silos(cell, kept, tmp_path / "home")
    assert (kept / "silo-0" / "ledger.sqlite").read_bytes() == finished_silo
    assert not list(kept.glob("*.unfinished"))
    for policy in policies:
        read_policy(policy).load_shard()
        open_guard(read_policy(policy))


def test_a_lost_ledger_of_a_local_deployment_is_not_begun_again(tmp_path: Path) -> None:
    cell = resolve_cell(small_tree(), "test")
    policies = write_silos(cell, tmp_path / "kept", tmp_path / "home")
    (tmp_path / "kept" / "silo-0" / "ledger.sqlite").unlink()
    assert write_silos(cell, tmp_path / "kept", tmp_path / "home") == policies
    assert not (tmp_path / "kept" / "silo-0" / "ledger.sqlite").exists()


@pytest.mark.usefixtures("generous_umask")
def test_a_policy_template_passes_the_permission_check_under_any_umask(tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    assert CliRunner().invoke(app, ["silo", "init", str(path), "--template"]).exit_code == 0
    read_policy(path)


def test_swapping_a_ledger_link_in_a_folder_writable_by_others_gains_no_second_budget(tmp_path: Path) -> None:
    """A swapped link led to a fresh ledger, and a second full budget of μ = 4 was answered; now nothing starts."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    for name in ("shared", "own", "fresh", "spent"):
        (tmp_path / name).mkdir(mode=0o700)
    (shared / "ledgers").symlink_to(tmp_path / "spent")
    path = write_silo(own)
    path.write_text(path.read_text().replace('"ledger-0.sqlite"', f'"{shared}/ledgers/ledger.sqlite"'))
    guard = guard_of(path)
    for run in ("one", "two"):
        with contextlib.suppress(RunError):  # the first takes all of it
            guard.answer(run, CELL, 1, ZERO)
    assert charged(guard) == [pytest.approx(4.0)]
    shared.chmod(0o777)
    (shared / "ledgers").unlink()  # as a neighbour swaps it for another link
    (shared / "ledgers").symlink_to(tmp_path / "fresh")
    with pytest.raises(InputError, match=f"^{shared}: mode 0777.*chmod go-w {shared}$"):
        begin_ledgers(read_policy(path))
    assert not list((tmp_path / "fresh").iterdir())


@pytest.mark.parametrize("group", [True, False])
def test_every_folder_along_a_chain_of_symbolic_links_is_checked(tmp_path: Path, group: bool) -> None:
    """A link to a link in another folder, by relative and absolute targets: each folder that holds one counts."""
    for name in ("first", "second", "third", "real"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "real" / "policy").touch(mode=0o600)
    (tmp_path / "third" / "c").symlink_to("../real/policy")
    (tmp_path / "second" / "b").symlink_to(tmp_path / "third" / "c")
    (tmp_path / "first" / "a").symlink_to("../second")
    leading = tmp_path / "first" / "a" / "b"
    check_writers([leading])
    for name in ("first", "second", "third", "real"):
        (tmp_path / name).chmod(0o770 if group else 0o707)
        with pytest.raises(InputError, match=f"^{tmp_path / name}: "):
            check_writers([leading])
        (tmp_path / name).chmod(0o700)
    (tmp_path / "first" / "loop").symlink_to("loop")
    check_writers([tmp_path / "first" / "loop"])  # whoever reads it says so


def test_the_folder_behind_forty_links_is_looked_at(tmp_path: Path) -> None:
    """Linux follows so many, and no more."""
    for name in ("links", "real"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "real" / "policy").touch(mode=0o600)
    (tmp_path / "links" / "39").symlink_to("../real/policy")
    for number in range(39):
        (tmp_path / "links" / str(number)).symlink_to(str(number + 1))
    check_writers([tmp_path / "links" / "0"])
    (tmp_path / "real").chmod(0o770)
    with pytest.raises(InputError, match=f"^{tmp_path / 'real'}: mode 0770"):
        check_writers([tmp_path / "links" / "0"])


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_records_that_others_may_read_are_refused(tmp_path: Path, mode: int) -> None:
    path, shard = write_silo(tmp_path), tmp_path / "shard-0.npz"
    read_policy(path)
    shard.chmod(mode)
    with pytest.raises(InputError, match=f"^{shard}: mode {mode:04o}, others .* chmod 600 {shard}$"):
        read_policy(path)
