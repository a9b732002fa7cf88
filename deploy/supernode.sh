#!/bin/sh
# Silo $SILO's SuperNode, with the options that are given; it asks the guard whose socket is in /silo/socket.
exec flower-supernode --superlink "${SUPERLINK:-superlink:8000}" \
    --node-config "partition-id=$SILO guard='/silo/socket/guard.sock'" "$@"
