"""`fedpriv init`: a folder to start from."""

import re
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from fedpriv.errors import InputError

_FILES = ("scenario.toml", "my_algorithm.py", "my_model.py", "notebook.ipynb", "README.md")


def begin(folder: Path) -> list[Path]:
    """Write the starting files into a new folder, whole or not at all; returns them.

    InputError if the folder exists, cannot be written, or its name cannot be a scenario's.
    """
    name = folder.name
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise InputError(f"fedpriv init {folder}: expected a name of lower-case letters, digits and dashes")
    if folder.exists():
        raise InputError(f"fedpriv init {folder}: exists already; give another name")
    source = resources.files(__package__) / "starter"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            for file in _FILES:
                text = (source / file).read_text(encoding="utf-8").replace("NAME", name)
                (draft / file).write_text(text, encoding="utf-8")
            draft.chmod(0o755)
            draft.rename(folder)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        raise InputError(f"fedpriv init {folder}: cannot be written ({error.strerror})") from None
    return [folder / file for file in _FILES]
