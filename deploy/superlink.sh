#!/bin/sh
# A SuperLink that knows its SuperNodes: starts it with the options that are given, registers every public key in
# /keys/nodes, and says so with the file /tmp/ready.  What is registered is kept in memory and registered again at
# every start, so a key that is taken out of the folder is gone at the next.
set -eu
rm -f /tmp/ready
flower-superlink --host 0.0.0.0 --port 8000 "$@" &
superlink=$!
trap 'kill "$superlink" 2>/dev/null || true' TERM INT EXIT

until health.py https://localhost:8000/health 2>/dev/null; do
    kill -0 "$superlink" 2>/dev/null || { wait "$superlink"; exit 1; }
    sleep 1
done
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<CONFIG
[superlink]
default = "here"

[superlink.here]
address = "localhost:8000"
root-certificates = "$SSL_CERT_FILE"
CONFIG
for key in /keys/nodes/*.pub; do
    [ -e "$key" ] || { echo "no public key of a SuperNode in /keys/nodes: run deploy/make-keys.sh" >&2; exit 1; }
    flwr supernode register "$key" here --name "$(basename "$key" .pub)"
done
touch /tmp/ready
wait "$superlink"
