#!/usr/bin/env -S python3 -IS
"""Is it at work?  health.py https://HOST:PORT/health of a SuperLink, or unix:SOCKET of a guard or a SuperNode.

The exit code is 0 or 1.

The authority that has to have signed a server's certificate is in the file $SSL_CERT_FILE.
"""

import json
import socket
import struct
import sys
import urllib.request

SECONDS = 4.0


def check(address: str) -> None:
    """OSError if nothing answers at `address`, or a service says that it is ill."""
    if address.startswith("unix:"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS)
            connection.connect(address.removeprefix("unix:"))
            question = json.dumps({"health": True}).encode()
            connection.sendall(struct.pack("!I", len(question)) + question)
            answer = connection.makefile("rb").read()[4:]  # the guard closes the connection behind it
            if answer != json.dumps({"healthy": True}).encode():
                raise OSError(f"not healthy: {answer[:80]!r}")
    else:
        urllib.request.urlopen(address, timeout=SECONDS).close()


if __name__ == "__main__":
    try:
        check(sys.argv[1])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
