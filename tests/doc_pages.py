"""The documentation as the tests read it: pages, their code blocks, their commands."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"^(?:<!-- ((?:long|network|manual): [^\n]*) -->\n)?```(\w*)[^\n]*\n(.*?)^```", flags=re.DOTALL | re.MULTILINE
)
_INDENTED = re.compile(r"^    ((?:\.venv/bin/)?(?:fedpriv|make|flwr|docker|python3?|pip) .*)$", flags=re.MULTILINE)
_REASONS = ("long:", "network:", "manual:")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, and its text."""

    page: str
    language: str
    text: str
    reason: str = ""
    """Why none of its commands is executed: said in a comment before the block, which no reader sees."""


@dataclass(frozen=True)
class Command:
    """One shown line; `reason` says why it is not executed, and is empty if it is."""

    page: str
    line: str
    reason: str

    @property
    def words(self) -> list[str]:
        first, *rest = shlex.split(self.line)
        return [first.removeprefix(".venv/bin/"), *rest]


def blocks(page: Path) -> list[Block]:
    return [
        Block(page.name, language, text, reason)
        for reason, language, text in _FENCE.findall(page.read_text(encoding="utf-8"))
    ]


def commands_in(page: str, text: str, reason: str = "") -> list[Command]:
    found = []
    for line in text.splitlines():
        command, _, comment = (part.strip() for part in line.partition(" #"))
        if command and not command.startswith("#"):
            found.append(Command(page, command, comment if comment.startswith(_REASONS) else reason))
    return found


def commands(page: Path) -> list[Command]:
    """Lines of `sh` blocks, and indented lines that call a program."""
    shown = [
        command
        for block in blocks(page)
        if block.language == "sh"
        for command in commands_in(page.name, block.text, block.reason)
    ]
    outside = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return shown + [command for line in _INDENTED.findall(outside) for command in commands_in(page.name, line)]
