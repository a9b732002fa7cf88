# One image for every role: SuperLink, SuperNode, guard, job.  docs/containers.md says how it is run.
#
# The base is pinned by its tag; BASE_IMAGE takes a digest (python:3.11-slim-bookworm@sha256:...) or a local image.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# TORCH_INDEX: an index with CPU-only wheels of torch.  PIP_NO_INDEX=1: only what lies in deploy/wheels.
ARG TORCH_INDEX=""
ARG PIP_NO_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_FIND_LINKS=/wheels
RUN python3 -m venv /venv
COPY constraints.txt deploy/requirements.txt /src/
COPY deploy/wheels/ /wheels/
WORKDIR /src
# The dependencies first, in a layer of their own: they change seldom, and are almost all of the image.  All have to
# have the hashes in deploy/requirements.txt (deploy/lock.py), but torch and torchvision, whose build is chosen here.
RUN if [ -n "$PIP_NO_INDEX" ]; then export PIP_NO_INDEX; else unset PIP_NO_INDEX; fi \
 && /venv/bin/pip install --quiet --require-hashes --no-deps --requirement requirements.txt \
 && if [ -n "$TORCH_INDEX" ]; then export PIP_EXTRA_INDEX_URL="$TORCH_INDEX"; fi \
 && /venv/bin/pip install --quiet --constraint constraints.txt torch torchvision \
 && rm -rf /venv/lib/python3.11/site-packages/torch/include /venv/lib/python3.11/site-packages/torch/test
COPY pyproject.toml README.md LICENSE /src/
COPY fedpriv/ /src/fedpriv/
COPY server/ /src/server/
COPY clients/ /src/clients/
COPY scenarios/ /src/scenarios/
RUN /venv/bin/pip install --quiet --no-deps --no-build-isolation .

FROM ${BASE_IMAGE}
COPY --from=build /venv /venv
COPY deploy/supernode.sh deploy/health.py /usr/local/bin/
# Volumes take their mode from these folders: whoever writes to one owns what he wrote, and nobody else may replace it.
RUN mkdir -p /silo/ledger /silo/mark /silo/socket /control \
 && chmod 1777 /silo/ledger /silo/mark /silo/socket /control
ENV PATH=/venv/bin:$PATH \
    HOME=/tmp LOGNAME=fedpriv FLWR_HOME=/tmp/flwr MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 \
    FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
# The SuperLink's working directory precedes the app on the import path: nothing that can be imported lies here.
WORKDIR /app
USER 10001:10001
CMD ["fedpriv", "--help"]
