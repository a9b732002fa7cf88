#!/bin/sh
# Silo $SILO's SuperNode, with the options that are given; it asks the guard whose socket is in /silo/socket.
exec fedpriv supernode --superlink "${SUPERLINK:-superlink:8000}" --silo "$SILO" \
    --guard /silo/socket/guard.sock "$@"
