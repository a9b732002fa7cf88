#!/usr/bin/env python3
"""Write deploy/requirements.txt: the versions of constraints.txt with their files' hashes, for every platform.

torch and torchvision are left out: which build of them is installed, with or without CUDA, is the image's choice,
and each has other hashes.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WITHOUT = ("torch", "torchvision")


def wanted(project: str, extra: str) -> list[str]:
    """The requirements of the image, one a line, from a pyproject.toml and deploy/requirements.in."""
    tree = tomllib.loads(project)
    lines = [*tree["project"]["dependencies"], *tree["build-system"]["requires"], *extra.splitlines()]
    return [line for line in lines if line[:1].isalpha() and not line.startswith(WITHOUT)]


if __name__ == "__main__":
    lines = wanted((ROOT / "pyproject.toml").read_text(), (ROOT / "deploy" / "requirements.in").read_text())
    options = [
        "--generate-hashes",
        "--universal",
        "--python-version=3.11",
        "--no-header",
        "--no-annotate",
        "--quiet",
    ]
    options += ["--constraint", str(ROOT / "constraints.txt"), "--output-file", "deploy/requirements.txt"]
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "-", *options]
    subprocess.run(command, input="\n".join(lines), text=True, cwd=ROOT, check=True)
