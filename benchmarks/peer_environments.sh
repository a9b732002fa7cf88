#!/bin/sh
# An environment for each peer that needs its own, in the repository's root: pfl wants an older dp-accounting.
# Opacus has fedpriv beside it, for one app with both.  usage: peer_environments.sh [PYTHON]
set -eu
python=${1:-python3}
cd "$(dirname "$0")/.."

environment() {  # NAME REQUIREMENT...
    folder=.venv-$1
    shift
    "$python" -m venv "$folder"
    "$folder/bin/pip" install --quiet torch==2.13.0 "numpy==2.4.*" "$@"
}

environment pfl pfl==0.6.0
environment opacus opacus==1.6.0 --constraint constraints.txt --editable .
