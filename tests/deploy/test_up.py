"""deploy/up.sh ends with the job's exit code, whatever becomes of the other containers."""

import os
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
def test_it_ends_with_the_jobs_code_and_ends_no_other_container(tmp_path: Path, code: int) -> None:
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


def test_no_document_and_no_script_ends_everything_with_the_first_container_that_ends() -> None:
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("deploy/*.sh"),
        *ROOT.glob("docker-compose*"),
    ):
        if path.name != "CHANGELOG.md":
            assert "--exit-code-from" not in path.read_text(encoding="utf-8"), path
