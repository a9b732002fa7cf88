#!/usr/bin/env -S python3 -IS
"""Is it there?  health.py https://HOST:PORT/health, or health.py unix:SOCKET; exit code 0 or 1.

The authority that has to have signed a server's certificate is in the file $SSL_CERT_FILE.
"""

import socket
import sys
import urllib.request

SECONDS = 4.0


def check(address: str) -> None:
    """OSError if nothing answers at `address`."""
    if address.startswith("unix:"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS)
            connection.connect(address.removeprefix("unix:"))
    else:
        urllib.request.urlopen(address, timeout=SECONDS).close()


if __name__ == "__main__":
    try:
        check(sys.argv[1])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
