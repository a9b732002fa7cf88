"""deploy/: up.sh ends with the job's exit code; what the image installs is what was tested, and has hashes."""

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def commands(folder: Path, code: int) -> None:
    """docker-compose and docker as they answer when the job ends with `code`; what they are asked is kept."""
    folder.mkdir()
    for name, answers in {
        "docker-compose": 'case "$1" in ps) echo job-id ;; esac',
        "docker": f'case "$1" in wait) echo {code} ;; logs) echo "the job says" ;; esac',
    }.items():
        path = folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{folder}/asked"\n{answers}\n')
        path.chmod(0o755)


@pytest.mark.parametrize("code", [0, 1, 2, 137])
def test_the_up_script_exits_with_the_code_of_the_job_and_stops_no_other_container(
    tmp_path: Path, code: int
) -> None:
    """Was: `--exit-code-from job` ended everything, with 137, when one SuperNode crashed."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "up.sh", tmp_path / "deploy")
    commands(tmp_path / "bin", code)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [tmp_path / "deploy" / "up.sh", "--build"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "the job says" in done.stdout
    asked = sorted((tmp_path / "bin" / "asked").read_text().splitlines())
    assert asked == [
        "docker logs --follow job-id",
        "docker wait job-id",
        "docker-compose ps --all --quiet job",
        "docker-compose up --detach --build",
    ]


def test_no_document_or_script_uses_the_option_exit_code_from() -> None:
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("deploy/*.sh"),
        *ROOT.glob("docker-compose*"),
    ):
        if path.name != "CHANGELOG.md":
            assert "--exit-code-from" not in path.read_text(encoding="utf-8"), path


lock = runpy.run_path(str(ROOT / "deploy" / "lock.py"))


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!;\[ ]", requirement)[0]).lower()


def locked() -> dict[str, str]:
    """Package -> its block of the file: version, marker, hashes."""
    text = (ROOT / "deploy" / "requirements.txt").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=\S)", text.strip())
    return {name_of(block): block for block in blocks}


def test_every_locked_requirement_has_a_hash_and_the_tested_version() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = {name_of(line): line.partition("==")[2] for line in constraints if "==" in line}
    for name, block in locked().items():
        assert "--hash=sha256:" in block, name
        if name in tested:
            assert f"=={tested[name]}" in block.splitlines()[0], name


def test_locked_requirements_cover_all_dependencies_except_torch() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = lock["wanted"](project, (ROOT / "deploy" / "requirements.in").read_text(encoding="utf-8"))
    assert {name_of(line) for line in wanted} <= set(locked())
    assert not {"torch", "torchvision"} & set(locked())


def test_the_locked_requirements_name_no_host() -> None:
    assert "://" not in (ROOT / "deploy" / "requirements.txt").read_text(encoding="utf-8")
