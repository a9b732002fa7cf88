"""Build the site of this checkout's version beside those of others: `python docs/versions.py FOLDER`.

FOLDER/0.2.0/ is the site, FOLDER/versions.json is the list that its header shows, FOLDER/index.html leads to the
newest one.
What other versions left in FOLDER stays: check out a tag, run this, and serve FOLDER.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SITE = re.compile(r"\d+(\.\d+)*")


def version() -> str:
    """Of this checkout."""
    found: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return found


def listed(folder: Path) -> list[str]:
    """The versions that have a site in `folder`, the newest first."""
    found = [path.name for path in folder.iterdir() if path.is_dir() and _SITE.fullmatch(path.name)]
    return sorted(found, key=lambda name: [int(part) for part in name.split(".")], reverse=True)


def write_list(folder: Path) -> None:
    """versions.json in the form that mkdocs-material reads, and an index that leads to the newest."""
    names = listed(folder)
    entries = [{"version": name, "title": name, "aliases": ["latest"] * (name == names[0])} for name in names]
    (folder / "versions.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    leads = f'<meta http-equiv="refresh" content="0; url={names[0]}/index.html">'
    (folder / "index.html").write_text(f"<!doctype html><title>fedpriv</title>{leads}\n", encoding="utf-8")


def main(folder: Path) -> None:
    """Build, then list; ends with mkdocs' code if the build fails."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(ROOT / "mkdocs-versioned.yml"),
    ]
    built = subprocess.run([*command, "--site-dir", str(folder.resolve() / version())], cwd=ROOT, check=False)
    if built.returncode:
        sys.exit(built.returncode)
    write_list(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
