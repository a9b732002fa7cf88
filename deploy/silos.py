#!/usr/bin/env python3
"""Write the compose files for another number of silos: silos.py N

Silo 0 is the pattern: what is written for it is repeated with the other numbers.  docker-compose.hospitals.yml is
written too, with four silos whatever N is.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = (ROOT / "docker-compose.yml", ROOT / "docker-compose.insecure.yml")
HOSPITALS = ROOT / "docker-compose.hospitals.yml"

_PLACES = (
    r"  guard-\d+:\n(?:    .*\n|\n)+  node-\d+:\n(?:    .*\n|\n)+",  # the two services
    r"      - silo-\d+\n",  # the SuperLink's networks
    r"  silo-\d+: \{internal: true\}\n",
    r"  ledger-\d+:\n",
    r"  mark-\d+:\n",
    r"  socket-\d+:\n",
    r"  node-\d+:\n    command: .*\n    healthcheck: .*\n",  # without TLS
)


def with_silos(text: str, silos: int) -> str:
    """The compose file `text` with the services, networks and volumes of `silos` silos."""
    for place in _PLACES:
        text = re.sub(f"({place})(?:{place})*", lambda found: _numbered(found[1], silos), text)
    return text


def _numbered(pattern: str, silos: int) -> str:
    written = []
    for silo in range(silos):
        text = pattern.replace("-0", f"-{silo}").replace('"0"', f'"{silo}"')
        written.append(text.replace("20000:", f"{20000 + silo}:").replace("30000", f"{30000 + silo}"))  # users
    return "".join(written)


_HOSPITALS = """\
# The four hospitals of scenarios/heart-hospitals.toml, each with its CSV file, policy and guard: docs/hospitals.md
#
#   COMPOSE_FILE=docker-compose.hospitals.yml
#
#   silo 0 Cleveland, silo 1 Hungary, silo 2 Switzerland, silo 3 Long Beach; one seed and one epsilon by default
#
# Written by deploy/silos.py from docker-compose.yml, which says what the services are.

"""
_DEFAULTS = {
    "${SCENARIO:-scenarios/containers.toml}": "${SCENARIO:-scenarios/heart-hospitals.toml}",
    "${OPTIONS:-}": "${OPTIONS:---set seeds=[42] --set privacy.epsilon=1.0}",
}


def of_hospitals(text: str) -> str:
    """The compose file of four hospitals, from that of any number of silos."""
    _, services, rest = with_silos(text, 4).partition("x-service:")
    for default, own in _DEFAULTS.items():
        rest = rest.replace(default, own)
    return _HOSPITALS + services + rest


if __name__ == "__main__":
    if len(sys.argv) != 2 or not re.fullmatch("[1-9][0-9]*", sys.argv[1]):
        sys.exit("usage: deploy/silos.py N, with N >= 1")
    HOSPITALS.write_text(of_hospitals(FILES[0].read_text(encoding="utf-8")), encoding="utf-8")
    for path in FILES:
        path.write_text(with_silos(path.read_text(encoding="utf-8"), int(sys.argv[1])), encoding="utf-8")
