#!/usr/bin/env python3
"""Build the source distribution and the wheel of a repository, with absolute links and URLs, into a folder.

    python deploy/package.py https://github.com/OWNER/NAME dist

A package index shows README.md without the files that its links lead to.  Here they lead to the files of this
version in the repository that is named.  The tracked files are copied, so that the checkout stays as it is.  It
takes the package `build`.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?P<target>[^)\s]+)\)")


def absolute_links(text: str, repository: str, version: str) -> str:
    """Return a Markdown text whose relative links and images lead into a version of a repository."""

    def replace(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}{match['text']}({repository}/{kind}/v{version}/{target})"

    return _LINK.sub(replace, text)


def with_urls(project: str, repository: str, version: str) -> str:
    """Return a pyproject.toml with the URLs of a repository."""
    urls = {
        "Source": repository,
        "Documentation": f"{repository}/blob/v{version}/docs/index.md",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    lines = [f'{name} = "{url}"' for name, url in urls.items()]
    return f"{project}\n[project.urls]\n" + "\n".join(lines) + "\n"


def prepare(repository: str, folder: Path) -> None:
    """Copy the tracked files into a folder, with absolute links in README.md and URLs in pyproject.toml.

    Raises:
        ValueError: If `repository` is no https URL.
    """
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", repository):
        raise ValueError(
            f"{repository}: expected the URL of the repository, such as https://github.com/OWNER/NAME"
        )
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = tomllib.loads(project)["project"]["version"]
    (folder / "pyproject.toml").write_text(with_urls(project, repository, version), encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(absolute_links(readme, repository, version), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as draft:
        prepare(sys.argv[1].removesuffix("/"), Path(draft))
        command = [sys.executable, "-m", "build", "--outdir", str(Path(sys.argv[2]).resolve()), draft]
        subprocess.run(command, check=True)
