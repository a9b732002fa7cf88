#!/bin/sh
# Start the containers, show what the job says, and end with its exit code: up.sh [OPTION of `docker-compose up`]...
#
# Containers that crash meanwhile are started again; all go on running afterwards, for the next job:
# `docker-compose down` takes them away.
set -eu
cd "$(dirname "$0")/.."
if command -v docker-compose > /dev/null; then compose=docker-compose; else compose='docker compose'; fi
$compose up --detach "$@"
job=$($compose ps --all --quiet job)
trap '$compose stop job' INT TERM
docker logs --follow "$job" &
code=$(docker wait "$job")
wait
exit "$code"
