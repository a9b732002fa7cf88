"""deploy/requirements.txt: what the image installs is what was tested, and has hashes."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
lock = runpy.run_path(str(ROOT / "deploy" / "lock.py"))


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!;\[ ]", requirement)[0]).lower()


def locked() -> dict[str, str]:
    """Package -> its block of the file: version, marker, hashes."""
    text = (ROOT / "deploy" / "requirements.txt").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=\S)", text.strip())
    return {name_of(block): block for block in blocks}


def test_everything_has_a_hash_and_the_version_that_was_tested() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = {name_of(line): line.partition("==")[2] for line in constraints if "==" in line}
    for name, block in locked().items():
        assert "--hash=sha256:" in block, name
        if name in tested:
            assert f"=={tested[name]}" in block.splitlines()[0], name


def test_all_that_the_project_asks_for_is_in_it_but_torch() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = lock["wanted"](project, (ROOT / "deploy" / "requirements.in").read_text(encoding="utf-8"))
    assert {name_of(line) for line in wanted} <= set(locked())
    assert not {"torch", "torchvision"} & set(locked())


def test_it_names_no_host() -> None:
    assert "://" not in (ROOT / "deploy" / "requirements.txt").read_text(encoding="utf-8")
