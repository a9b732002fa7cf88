"""Extensions, which are users' own algorithms, models and data, and add-ons, fedpriv's optional parts.

An extension is a Python file that is named by `--import` or in `FEDPRIV_IMPORT`, or a module that a package names
as an entry point of the group `fedpriv.extensions`.  When it is imported, it calls functions such as
`fedpriv.add_algorithm`, `add_model` and `add_data`.

An add-on is a file or a folder of `fedpriv/addons`, without which the core works.  `COMMANDS` names the modules
that add commands, and `ADD_ON_PARTS` the parts that the core imports on use.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib import metadata, util
from pathlib import Path
from typing import Any

from fedpriv.core.errors import InputError, refuse

_ADD_ON_PACKAGE = "fedpriv.addons."
ADD_ON_PARTS: Mapping[str, Mapping[str, str]] = {
    "model": {"statistics": "statistics.indicators:ROW"},
    "evaluation": {"curves": "statistics.curves:CurveSettings"},
    "guard": {"statistics": "statistics.plan:GUARD"},
    "scenario file": {"statistics": "statistics.tables:cell_of_plan"},
    "measurement": {"learning": "learning:measure_learning"},
    "findings": {"learning": "learning:describe_findings"},
    "tables": {"curves": "statistics.curves:intervals_of"},
    "scaling": {"table": "rates.scaling:scaling_table"},
    "charts": {"scaling": "rates.scaling:scaling_chart"},
    "rows": {"local models": "worth.references:local_models_row"},
    "engine": {"ray": "services.deployment:run_ray", "deployment": "services.deployment:run_deployment"},
    "Flower": {"names": "services.flower_private.names:check_names"},
    "tracker": {"make": "trackers:make_tracker"},
    "own data": {"sites": "readers.federation:complete_federation", "advice": "begin.advise:as_advised"},
    "own table": {"frame": "readers.frames:register_frame"},
    "table file": {"text": "readers.files:read_text"},
    "table format": {
        "parse": "readers.formats:parse_format",
        "find": "readers.formats:find_format",
        "describe": "readers.formats:describe_format",
    },
    "own module": {"wrappers": "readers.modules:prepare_module"},
    "own records": {"items": "readers.items:read_items", "parts": "readers.sites:read_parts"},
}
"""Kind -> name -> "module:attribute" in the folder of add-ons."""
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "audit.options": ("audit",),
    "begin.options": ("advise", "init", "data inspect"),
    "certificate.options": ("certify", "silo key", "silo sign"),
    "rates.options": ("privacy rates", "privacy samples", "privacy theorem"),
    "services.options": ("superlink", "supernode", "certificates", "federation"),
    "statistics.options": ("statistics", "coefficients"),
    "tune.options": ("tune",),
    "worth.options": ("worth", "silo refine"),
}
"""Module of an add-on -> the commands that its `register` adds.

The modules are imported when the command line starts, and so import nothing heavy themselves.
"""


def load_add_on_part(kind: str, name: str) -> Any:
    """Import the part of an add-on with this name.

    Raises:
        InputError: The add-on is not installed.
        ModuleNotFoundError: Another module, which the add-on imports, is not installed.
    """
    return _import_attribute(ADD_ON_PARTS[kind][name], f"{kind} {name!r}")


def load_add_on_parts(kind: str) -> dict[str, Any]:
    """Import all parts of a kind whose add-ons are installed, by name.

    Raises:
        ModuleNotFoundError: Another module, which an add-on imports, is not installed.
    """
    parts = {}
    for name in ADD_ON_PARTS[kind]:
        with suppress(InputError):
            parts[name] = load_add_on_part(kind, name)
    return parts


def is_add_on_part_loaded(kind: str, name: str) -> bool:
    """Whether the module of an add-on's part is imported already."""
    return _ADD_ON_PACKAGE + ADD_ON_PARTS[kind][name].partition(":")[0] in sys.modules


def find_register(module: str) -> Any:
    """Return the function that adds the commands of an add-on's module.

    Raises:
        InputError: The add-on is not installed.
        ModuleNotFoundError: Another module, which the add-on imports, is not installed.
    """
    return _import_attribute(f"{module}:register", f"fedpriv {COMMANDS[module][0]}")


def _import_attribute(path: str, part: str) -> Any:
    """Import "module:attribute" of the add-ons' package.

    Args:
        path: Module and attribute, such as "statistics.tables:cell_of_plan".
        part: Purpose of the attribute, which begins the error message.

    Raises:
        InputError: A module of the add-ons' package is not installed.
        ModuleNotFoundError: Another module, which the add-on imports, is not installed.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(_ADD_ON_PACKAGE + module), attribute)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_ADD_ON_PACKAGE.rstrip(".")):
            raise
        raise InputError(
            f"{part}: it is of the add-on {module.partition('.')[0]!r}, which this installation lacks; install "
            "fedpriv with its folder fedpriv/addons"
        ) from None


ENTRY_POINT_GROUP = "fedpriv.extensions"
IMPORT_VARIABLE = "FEDPRIV_IMPORT"
_imported_extensions: set[str] = set()
"""Digests of imported files (path and content), and values of the entry points that were tried."""
_table_changes: list[None] = []


def note_table_change() -> None:
    """Record that the table of algorithms, models or data sets got a row that fedpriv does not ship."""
    _table_changes.append(None)


def table_revision() -> int:
    """Return the number of changes that `note_table_change` recorded.

    Values that are cached from a table are valid for one revision.
    """
    return len(_table_changes)


def import_files(files: Sequence[Path]) -> None:
    """Import these files, and name them in `FEDPRIV_IMPORT` for the processes that this one starts.

    Raises:
        InputError: A file cannot be imported, or its path has the separator of `FEDPRIV_IMPORT` (`os.pathsep`).
    """
    absolute = [str(path.resolve()) for path in files]
    refuse({f"--import {path}: rename it without {os.pathsep!r}": os.pathsep in path for path in absolute})
    for path in absolute:
        _import_file(Path(path))
    os.environ[IMPORT_VARIABLE] = os.pathsep.join(
        dict.fromkeys([*filter(None, os.environ.get(IMPORT_VARIABLE, "").split(os.pathsep)), *absolute])
    )


def load_extensions() -> None:
    """Import the files in `FEDPRIV_IMPORT` and the entry points of installed packages.

    Files that were imported before with this content, and entry points that were tried before, are skipped.

    Raises:
        InputError: An import fails.
    """
    for path in filter(None, os.environ.get(IMPORT_VARIABLE, "").split(os.pathsep)):
        _import_file(Path(path).resolve())
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.value in _imported_extensions:
            continue
        _imported_extensions.add(entry.value)
        try:
            entry.load()
        except Exception as error:
            raise InputError(
                f"{ENTRY_POINT_GROUP}, entry point {entry.name} = {entry.value}: {_format_error(error)}"
            ) from None


def import_module(name: str, key: str) -> None:
    """Import an installed module that a configuration names under `key`.

    Raises:
        InputError: The import fails.
    """
    try:
        importlib.import_module(name)
    except Exception as error:
        raise InputError(f"{key}: {name!r}: {_format_error(error)}") from None


def _import_file(path: Path) -> None:
    """Import a Python file, unless this content at this path is imported already.

    Raises:
        InputError: The file cannot be read or imported.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"--import {path}: cannot be read ({error.strerror})") from None
    key = sha256(str(path).encode() + b"\0" + content).hexdigest()
    if key in _imported_extensions:
        return
    name = f"fedpriv_import_{path.stem}_{key[:8]}"  # files of one name must not replace each other
    spec = util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"--import {path}: not a Python file; its name must end in .py")
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    _imported_extensions.add(key)  # first, so that code of the file that loads extensions does not import it anew
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        _imported_extensions.discard(key)
        del sys.modules[name]
        raise InputError(f"--import {path}{_format_error_line(path, error)}: {_format_error(error)}") from None


def _format_error_line(path: Path, error: Exception) -> str:
    """Return ", line 12" for the file's innermost line in the traceback, or "" without one."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def _format_error(error: Exception) -> str:
    message = " ".join(str(error).split())
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {message}"
