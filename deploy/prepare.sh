#!/bin/sh
# Everything the containers need: prepare.sh [SCENARIO] [--set KEY=VALUE]... [--runs N]
#
# Builds the image, and makes deploy/run: keys, and for each silo of the scenario its shard and a policy for it.
# BASE_IMAGE, TORCH_INDEX and PIP_NO_INDEX are build arguments (Dockerfile).  FEDPRIV_DATA is a folder of data sets
# that are here already; without it they are fetched, into deploy/run/data.  COMPOSE_FILE names the services.
set -eu
cd "$(dirname "$0")/.."
scenario=scenarios/containers.toml
case ${1:-} in '' | -*) ;; *) scenario=$1; shift ;; esac
image=${FEDPRIV_IMAGE:-fedpriv:local}
services=${COMPOSE_FILE:-docker-compose.yml}
services=${services%%:*}  # the first of several files has the services

# The server's user and its job's: the one who calls this, never root.  Guards and nodes have users of their own, as
# docker-compose.yml says; a container gives them their files, since only root can.
user=$(id -u):$(id -g)
[ "$(id -u)" -ne 0 ] || user=10001:10001

fail() { echo "deploy/prepare.sh: $1" >&2; exit 2; }
own() { if [ "$(id -u)" -eq 0 ]; then chown -R "$user" deploy/run && chown "$user" runs; fi; }
give_to_silos() {
    docker run --rm --user 0:0 --network none --volume "$PWD/deploy/run:/run/fedpriv" "$image" sh -eu -c '
        cd /run/fedpriv; chmod go+x .
        for folder in silo-*; do
            silo=${folder#silo-}
            sed -i "1i group = \"$((30000 + silo))\"  # who may ask: the users of node-$silo" "$folder/guard/policy.toml"
            chmod go+x "$folder"
            chown -R "$((20000 + silo)):$((30000 + silo))" "$folder/guard"
            chown -R "$((30000 + silo)):$((30000 + silo))" "$folder/node"
        done'
}
case $scenario in scenarios/*) ;; *) fail "$scenario: it has to lie in scenarios/, which the job's container sees" ;; esac
[ -e "$scenario" ] || fail "$scenario: no such scenario"
[ ! -e deploy/run/silo-0/guard/policy.toml ] || fail "deploy/run holds silos already.  A new image for them: \
docker-compose build.  New silos, whose ledgers forget the old ones: docker-compose down --volumes; rm -r deploy/run"
docker info > /dev/null 2>&1 || fail "no Docker daemon answers here: is it running, and may $(id -un) use it?"

case ${BASE_IMAGE:-} in
    *@sha256:*) ;;
    *) echo "deploy/prepare.sh: warning: the base image ${BASE_IMAGE:-python:3.11-slim-bookworm} is pinned by its tag, \
which can change; BASE_IMAGE=NAME@sha256:DIGEST pins what it is" >&2 ;;
esac
docker build ${BASE_IMAGE:+--build-arg "BASE_IMAGE=$BASE_IMAGE"} \
    ${TORCH_INDEX:+--build-arg "TORCH_INDEX=$TORCH_INDEX"} ${PIP_NO_INDEX:+--build-arg "PIP_NO_INDEX=$PIP_NO_INDEX"} \
    --tag "$image" .
umask 077
mkdir -p deploy/run/data runs
[ -z "${FEDPRIV_DATA:-}" ] || cp -R "$FEDPRIV_DATA/." deploy/run/data/
deploy/make-keys.sh deploy/run 0 > /dev/null
own
docker run --rm --user "$user" --env FEDPRIV_DATA=/run/fedpriv/data \
    --volume "$PWD/deploy/run:/run/fedpriv" --volume "$PWD/scenarios:/app/scenarios:ro" \
    "$image" fedpriv data split "$scenario" --out /run/fedpriv "$@" > /dev/null
silos=$(find deploy/run -path '*/guard/policy.toml' | wc -l)
deploy/make-keys.sh deploy/run "$silos"
own
give_to_silos
{ grep -v '^FEDPRIV_USER=' .env 2> /dev/null || true; echo "FEDPRIV_USER=$user"; } > .env.new
mv .env.new .env
if [ "$(grep -c '^  guard-[0-9]*:' "$services")" -ne "$silos" ]; then
    [ "$services" = docker-compose.yml ] || fail "$services has not the $silos silos of $scenario"
    deploy/silos.py "$silos"
fi
compose=docker-compose
command -v docker-compose > /dev/null || compose="docker compose"
silo=0
while [ "$silo" -lt "$silos" ]; do  # a guard never begins a ledger by itself
    $compose run --rm --no-deps "guard-$silo" fedpriv silo init /silo/policy.toml > /dev/null
    silo=$((silo + 1))
done
echo "then: SCENARIO=$scenario deploy/up.sh"
