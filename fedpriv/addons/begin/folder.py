"""`fedpriv init`: a folder to start from."""

import dataclasses
import re
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from fedpriv.core.errors import InputError

_EACH = 300  # records of each of five silos that a new folder's scenario starts with
_NOTES = {
    "data": "# a data set (`fedpriv list data`), an .npz file, or a name given to fedpriv.add_data\n",
    "model": "# from my_model.py\n",
    "privacy": "# zero-out: neighbours differ in one record, which is there or not\n",
}
_FILES = ("scenario.toml", "my_algorithm.py", "my_model.py", "notebook.ipynb", "README.md")


def _advised(name: str) -> str:
    """The sections that `fedpriv advise` writes for the starter's federation, with the starter's own model."""
    from fedpriv.addons.begin.advise import Facts, advice_of

    advice = advice_of(Facts((_EACH,) * 5, 784, 10, 4.0, trust="trusted"), {"name": "synthetic"}, name)
    algorithm = {key: value for key, value in advice.tree["algorithm"].items() if key != "output"}
    tree = {**advice.tree, "model": {"name": "my-model"}, "algorithm": algorithm}
    sections = dataclasses.replace(advice, tree=tree).sections(_NOTES)
    return "\n".join(text for key, text in sections.items() if key != "run")


def begin(folder: Path) -> list[Path]:
    """Write the starting files into a new folder, whole or not at all; returns them.

    The scenario has what `fedpriv advise` says of its numbers, and the algorithm of one's own beside it.

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
                if "# ADVISED\n" in text:
                    text = text.replace("# ADVISED\n", _advised(name))
                (draft / file).write_text(text, encoding="utf-8")
            draft.chmod(0o755)
            draft.rename(folder)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        raise InputError(f"fedpriv init {folder}: cannot be written ({error.strerror})") from None
    return [folder / file for file in _FILES]
